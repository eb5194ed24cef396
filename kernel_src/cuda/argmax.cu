// argmax.cu: the first index of the greatest value of each row; hfp_argmax and hfp_decode_choose on CUDA.
//
// A warp finds the greatest value of a wave, two elements at once where it can, and looks for its
// place only where no wave before had as great a one. A value and its index are then one integer
// (row_keys.h), whose maximum does not depend on the order. Up to a wave a warp takes a row, beyond
// that a CTA; few wide rows are shared out among the CTAs of a cluster (sm_90) or, elsewhere, among
// CTAs of whose results a second launch takes the greatest.
#include "../row_keys.h"
#include "mailbox.cuh"
#include "row_ops.cuh"

namespace hfp::cuda {
namespace {

struct ArgmaxParams {
  static constexpr bool kStartsEarly = true;
  int64_t *out;  // NULL: `choice`
  Choice choice;
  uint64_t *workspace;
  const void *x;
  Rows x_rows;
  int64_t first_row;
  int64_t vectors;
  int ctas;        // per row
  int64_t stride;  // vectors that a CTA takes
};

// The place of the first of a lane's elements that has this value, NaN too, counted from its first
// vector in columns of the row; kNowhere if it has none.
constexpr int kNowhere = 0x7fffffff;

template <class T, int kVectors>
__device__ __forceinline__ int first_place(const Wave<T, kVectors> &v, float value) {
  constexpr int N = kVectorOf<T>;
  int place = kNowhere;
  if constexpr (kInTwos<T, N> && kHasMaxOfTwos) {
    if (value == value) {
      // A bit for each element of four vectors: of the first of each two in the low half.
      const Two<T> wanted = as_two<T>(pack<T>(value, value));
#pragma unroll
      for (int from = 0; from < kVectors; from += 4) {
        uint32_t hits = 0;
#pragma unroll
        for (int k = 0; k < 16; ++k) {
          const int u = from + k / 4;
          if (u >= kVectors) continue;
          hits |= __heq2_mask(as_two<T>(v[u].word[k % 4]), wanted) & (0x00010001u << k);
        }
        if (hits == 0 || place != kNowhere) continue;
        const int k = __ffs(static_cast<int>((hits | hits >> 16) & 0xffffu)) - 1;
        place = 32 * (from + k / 4) * N + k % 4 * 2 + ((hits >> k & 1u) != 0 ? 0 : 1);
      }
      return place;
    }
  }
#pragma unroll
  for (int u = kVectors - 1; u >= 0; --u) {
    float x[N];
    v[u].get(x);
#pragma unroll
    for (int i = N - 1; i >= 0; --i) {
      if (x[i] == value || (x[i] != x[i] && value != value)) place = 32 * u * N + i;
    }
  }
  return place;
}

// The greatest of the waves that begin at first, first + step, ... below `past`, on every lane.
template <class T, bool kAligned, int kVectors>
__device__ __forceinline__ uint64_t scan(const ArgmaxParams &p, const T *x, int64_t first,
                                         int64_t step, int64_t past) {
  constexpr int N = kVectorOf<T>;
  uint32_t best = 0;  // no key is 0
  uint64_t pair = 0;
  for (int64_t at = first; at < past; at += step) {
    Wave<T, kVectors> v;
    load_wave<T, kAligned, kVectors>(v, x, at, p.x_rows.cols);
    const float high = greatest<T, true, kVectors>(v);
    const uint32_t key = key_of(high), most = max_over_warp(key);
    if (most <= best) continue;  // the first one stays
    best = most;
    uint32_t index = ~0u;
    if (key == most) {
      const int64_t col = (at + threadIdx.x % 32u) * N + first_place<T, kVectors>(v, high);
      index = static_cast<uint32_t>(col);
    }
    pair = pair_of(best, ~max_over_warp(~index));
  }
  return pair;
}

// What becomes of a row's index. Made before the row is read, by the thread that will know the index.
class Sink {
 public:
  __device__ __forceinline__ Sink(const ArgmaxParams &p, int64_t row, bool here) {
    if (here && p.out == nullptr) state_ = choice_row(p.choice, row);
  }
  __device__ __forceinline__ void put(const ArgmaxParams &p, int64_t row, uint64_t best) const {
    if (p.out != nullptr) {
      p.out[row] = index_of(best);
    } else {
      choose(p.choice, state_, row, index_of(best));
    }
  }

 private:
  ChoiceRow state_{};
};

// A warp per row.
template <class T, bool kAligned, int kVectors>
__global__ void __launch_bounds__(kRowThreads)
    argmax_warp_kernel(const __grid_constant__ ArgmaxParams p) {
  wait_for_previous();
  const int64_t row = Group<32>::row(p.first_row);
  if (row >= p.x_rows.rows) return;
  const T *x = static_cast<const T *>(p.x) + row_offset(p.x_rows, row);
  const bool first = threadIdx.x % 32u == 0;
  const Sink sink(p, row, first);
  const uint64_t best = scan<T, kAligned, kVectors>(p, x, 0, 1, 1);
  if (first) sink.put(p, row, best);
}

// ctas CTAs per row; the result of each goes to the workspace, unless it is the only one.
template <class T, bool kAligned, int kVectors>
__global__ void __launch_bounds__(kArgmaxThreads, 2)
    argmax_kernel(const __grid_constant__ ArgmaxParams p) {
  wait_for_previous();
  __shared__ uint64_t all[32];
  const int64_t row = p.first_row + blockIdx.x / static_cast<unsigned>(p.ctas);
  const int cta = blockIdx.x % static_cast<unsigned>(p.ctas);
  const T *x = static_cast<const T *>(p.x) + row_offset(p.x_rows, row);
  const int64_t first = cta * p.stride;
  const int64_t past = first + p.stride < p.vectors ? first + p.stride : p.vectors;
  const int lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, warps = blockDim.x / 32u;
  const Sink sink(p, row, p.ctas == 1 && threadIdx.x == 0);
  uint64_t best = scan<T, kAligned, kVectors>(p, x, first + warp * 32 * kVectors,
                                              warps * 32 * kVectors, past);
  if (lane == 0) all[warp] = best;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  best = max_over_warp(lane < warps ? all[lane] : 0);
  if (lane != 0) return;
  if (p.ctas == 1) {
    sink.put(p, row, best);
  } else {
    p.workspace[row * p.ctas + cta] = best;
  }
}

// A cluster per row, where rows are few: each warp sends its result to rank 0.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kArgmaxClusterThreads)
    argmax_cluster_kernel(const __grid_constant__ ArgmaxParams p) {
#if __CUDA_ARCH__ >= 900
  constexpr int kWarps = kArgmaxClusterThreads / 32 * kClusterSize;
  __shared__ uint64_t all[kWarps];
  __shared__ Mailbox mail;
  mail.begin(kWarps * static_cast<int>(sizeof(uint64_t)));
  Team<true>::leave();
  const int64_t row = blockIdx.x / kClusterSize;
  const int rank = static_cast<int>(Team<true>::rank());
  const int lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;
  const int64_t wave = 32 * kLongVectors;
  const T *x = static_cast<const T *>(p.x) + row_offset(p.x_rows, row);
  wait_for_previous();
  const Sink sink(p, row, rank == 0 && threadIdx.x == 0);
  uint64_t best = scan<T, kAligned, kLongVectors>(p, x, (warp * kClusterSize + rank) * wave,
                                                  kWarps * wave, p.vectors);
  Team<true>::left();  // rank 0 has its mailbox
  if (lane == 0) {
    const float words[2] = {__uint_as_float(static_cast<uint32_t>(best)),
                            __uint_as_float(static_cast<uint32_t>(best >> 32))};
    mail.send(reinterpret_cast<float *>(all + rank * (kWarps / kClusterSize) + warp), words, 0);
  }
  if (rank != 0 || warp != 0) return;
  mail.wait(0);
  best = all[lane];
#pragma unroll
  for (int i = 32; i < kWarps; i += 32) best = all[lane + i] > best ? all[lane + i] : best;
  best = max_over_warp(best);
  if (lane == 0) sink.put(p, row, best);
#endif
}

__global__ void __launch_bounds__(32) argmax_merge_kernel(const __grid_constant__ ArgmaxParams p) {
  wait_for_previous();
  const int64_t row = blockIdx.x;
  const Sink sink(p, row, threadIdx.x == 0);
  uint64_t best = 0;
  for (int i = threadIdx.x; i < p.ctas; i += 32) {
    const uint64_t other = p.workspace[row * p.ctas + i];
    best = other > best ? other : best;
  }
  best = max_over_warp(best);
  if (threadIdx.x == 0) sink.put(p, row, best);
}

template <class T, bool kAligned>
int32_t launch_typed(ArgmaxParams &p, int device, void *stream) {
  constexpr const char *op = "argmax";
  constexpr int N = kVectorOf<T>;
  const int64_t rows = p.x_rows.rows, cols = p.x_rows.cols;
  p.vectors = (cols + N - 1) / N;
  p.ctas = 1;
  p.stride = p.vectors;
  if (p.vectors <= 32 * kLongVectors && rows > 1) {
    auto *kernel = p.vectors <= 32 * kShortVectors
                       ? &argmax_warp_kernel<T, kAligned, kShortVectors>
                       : &argmax_warp_kernel<T, kAligned, kLongVectors>;
    return launch_rows(kernel, {Shape::k32x8, kRowThreads, kRowThreads / 32}, p, stream, op);
  }
  if (split_rows(rows, cols)) {
    auto *cluster = &argmax_cluster_kernel<T, kAligned>;
    if (has_clusters(reinterpret_cast<const void *>(cluster), device)) {
      return launch_clusters(cluster, rows, kArgmaxClusterThreads, p, stream, op);
    }
    // As many CTAs as there are parts fit into the workspace; two waves of an H100 are enough.
    constexpr int64_t kEnough = 264;
    int64_t ctas = (p.vectors + kArgmaxThreads - 1) / kArgmaxThreads;
    const int64_t most = row_parts(cols) < kEnough / rows ? row_parts(cols) : kEnough / rows;
    ctas = ctas < most ? ctas : most;
    if (ctas > 1) {
      constexpr int64_t kWave = 32 * kShortVectors;  // whole ones
      p.stride = ((p.vectors + ctas - 1) / ctas + kWave - 1) / kWave * kWave;
      ctas = (p.vectors + p.stride - 1) / p.stride;
      p.ctas = static_cast<int>(ctas);
      const int threads = cta_threads(
          p.stride < kArgmaxThreads * kShortVectors ? p.stride : kArgmaxThreads * kShortVectors,
          kShortVectors);
      const int32_t status = launch(&argmax_kernel<T, kAligned, kShortVectors>, rows * ctas, threads,
                                    p, stream, op);
      if (status != HFP_OK) return status;
      return launch(&argmax_merge_kernel, rows, 32, p, stream, op);
    }
  }
  const int64_t wanted = cta_threads(p.vectors, kLongVectors);
  const int threads = static_cast<int>(
      p.vectors >= kArgmaxThreads * kLongVectors ? kArgmaxThreads : wanted);
  return launch_rows(&argmax_kernel<T, kAligned, kLongVectors>, {Shape::kLoop, threads, 1}, p, stream,
                     op);
}

template <class T>
int32_t launch_for(ArgmaxParams &p, int device, void *stream) {
  return rows_of_vectors(p.x_rows, p.x, sizeof(T)) ? launch_typed<T, true>(p, device, stream)
                                                   : launch_typed<T, false>(p, device, stream);
}

}  // namespace

int32_t argmax(const ArgmaxArgs &a, int device, void *stream) {
  if (a.rows.rows <= 0 || a.rows.cols <= 0) return HFP_OK;
  ArgmaxParams p{};
  p.out = a.out;
  p.choice = a.choice;
  p.workspace = a.workspace;
  p.x = a.x;
  p.x_rows = a.rows;
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), "argmax");
  switch (a.type) {
    case DType::F32: return launch_for<float>(p, device, stream);
    case DType::F16: return launch_for<__half>(p, device, stream);
    default: return launch_for<__nv_bfloat16>(p, device, stream);
  }
}

}  // namespace hfp::cuda
