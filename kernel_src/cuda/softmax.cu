// softmax.cu: the softmax of each row of scale * x + mask; hfp_softmax on CUDA.
//
// Up to 16384 columns of a half type (8192 of fp32) the row stays in registers. A wider one is cut
// into parts: a warp finds the maximum of a part and its sum of exp(z - maximum), rescaling as it
// goes on (Milakov & Gimelshein, arXiv:1805.02867); then the row is read again, from L2 mostly. One
// CTA takes all parts of a row, or, where rows are few, many CTAs share them. Up to 32768 aligned
// columns of a half type each warp of one CTA keeps its part, up to 262144 (of fp32 too) each warp of
// a cluster of CTAs (sm_90), and nothing is read again.
#include "ordered.cuh"
#include "row_cluster.cuh"

namespace hfp::cuda {
namespace {

struct SoftmaxParams {
  static constexpr bool kStartsEarly = true;
  void *out;
  float2 *workspace;  // (maximum, sum) of each part
  const void *x, *mask;
  DType mask_type;
  Rows x_rows, mask_rows;
  int64_t first_row;
  int64_t vectors;  // per row, the last one maybe in part
  float scale;
  Parts parts;
  int write_ctas;    // per row
  int cluster_ctas;  // per row
  int rows_ahead;  // of the row that a CTA brings to L2; 0: none
  uint32_t zero;   // 0; see Vec::stay_packed
};

// One row of the input.
template <class T, bool kAligned, bool kMask>
struct Source {
  static constexpr int N = kVectorOf<T>;
  const T *x;
  const void *mask;
  int64_t mask_offset, cols;
  DType mask_type;
  float scale;

  __device__ Source(const SoftmaxParams &p, int64_t row)
      : x(static_cast<const T *>(p.x) + row_offset(p.x_rows, row)),
        mask(p.mask),
        mask_offset(kMask ? row_offset(p.mask_rows, row) : 0),
        cols(p.x_rows.cols),
        mask_type(p.mask_type),
        scale(p.scale) {}

  // -inf past the end of the row.
  __device__ __forceinline__ void scaled(const Vec<T, N> &v, int64_t at, float (&z)[N]) const {
    v.get(z);
#pragma unroll
    for (int i = 0; i < N; ++i) z[i] *= scale;
    if constexpr (kMask) {
      if constexpr (kAligned) {
        float m[N];
        load_any(m, mask, mask_type, mask_offset + at * N);
#pragma unroll
        for (int i = 0; i < N; ++i) z[i] += m[i];
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          float m[1] = {0.0f};
          if (at * N + i < cols) load_any(m, mask, mask_type, mask_offset + at * N + i);
          z[i] += m[0];
        }
      }
    }
    if constexpr (!kAligned) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (at * N + i >= cols) z[i] = minus_inf();
      }
    }
  }
};

// ---------------------------------------------------------------------------------------------
// Rows in registers

template <class T, bool kAligned, bool kMask, int kThreads, int kVectors>
__global__ void __launch_bounds__(max_threads(kThreads, kVectors))
    softmax_held_kernel(const __grid_constant__ SoftmaxParams p) {
  wait_for_previous();
  using G = Group<kThreads>;
  constexpr int N = kVectorOf<T>;
  __shared__ float partial[kPartials], all_high[32];
  const int64_t row = G::row(p.first_row);
  const bool live = row < p.x_rows.rows;
  const Source<T, kAligned, kMask> source(p, live ? row : 0);
  const int vectors = live ? static_cast<int>(p.vectors) : 0;

  Vec<T, N> v[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = G::index() + i * G::stride();
    if (at < vectors) load_vector<T, kAligned>(v[i], source.x, int64_t{at}, source.cols);
  }
  float high = minus_inf();
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = G::index() + i * G::stride();
    if (at >= vectors) continue;
    float z[N];
    source.scaled(v[i], at, z);
#pragma unroll
    for (int k = 0; k < N; ++k) high = fmaxf(high, z[k]);
  }
  high = max_lanes<G::kLanes>(high);
  if constexpr (G::kWholeCta) {
    const int lane = threadIdx.x % 32u, warps = blockDim.x / 32u;
    if (lane == 0) all_high[threadIdx.x / 32u] = high;
    __syncthreads();
    high = max_lanes<32>(lane < warps ? all_high[lane] : minus_inf());
  }

  // A maximum that is not finite makes NaN here, as does a NaN, which fmaxf has passed by.
  float sums[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = G::index() + i * G::stride();
    sums[i] = 0.0f;
    if (at >= vectors) continue;
    float z[N];
    source.scaled(v[i], at, z);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const bool inside = kAligned || static_cast<int64_t>(at) * N + k < source.cols;
      if (inside) sums[i] += exp_of<T>(z[k] - high);
    }
  }
  const float share = 1.0f / G::sum(sums, partial);
  T *to = static_cast<T *>(p.out) + row * source.cols;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = G::index() + i * G::stride();
    if (at >= vectors) continue;
    float z[N];
    source.scaled(v[i], at, z);
#pragma unroll
    for (int k = 0; k < N; ++k) z[k] = exp_of<T>(z[k] - high) * share;
    store_vector<T, kAligned>(to, at, source.cols, z);
  }
}

// ---------------------------------------------------------------------------------------------
// Rows in parts

// sum(exp(z - most)). `most` of nothing, or of -inf alone, is -inf, and its sum 0.
struct Online {
  float most, sum;

  // What is subtracted in exponents: -inf - -inf would be NaN.
  __device__ __forceinline__ static float shift(float most) {
    return most == minus_inf() ? 0.0f : most;
  }
};

// One vector more of a lane's share.
template <class T, bool kAligned, bool kMask>
__device__ __forceinline__ void add_vector(Online &own, const Source<T, kAligned, kMask> &source,
                                           const Vec<T, kVectorOf<T>> &v, int64_t at) {
  constexpr int N = kVectorOf<T>;
  float z[N];
  source.scaled(v, at, z);
  float high = own.most;
#pragma unroll
  for (int i = 0; i < N; ++i) high = fmaxf(high, z[i]);
  const float by = Online::shift(high);
  float more = 0.0f;  // NaN passes by fmaxf, and stays in here
#pragma unroll
  for (int i = 0; i < N; ++i) more += exp_of<T>(z[i] - by);
  own.sum = fmaf(own.sum, exp_of<T>(own.most - by), more);
  own.most = high;
}

// The shares of all lanes, on every one.
template <class T>
__device__ __forceinline__ Online over_lanes(Online own) {
  const float high = max_lanes<32>(own.most);
  own.sum = Group<32>::sum_lanes(own.sum * exp_of<T>(own.most - Online::shift(high)));
  return {high, own.sum};
}

// The maximum and sum of part `part`, by one warp; on every lane.
template <class T, bool kAligned, bool kMask>
__device__ __forceinline__ Online part_of(const SoftmaxParams &p,
                                          const Source<T, kAligned, kMask> &source, int part) {
  constexpr int N = kVectorOf<T>;
  const int64_t first = part * (p.parts.cols / N);
  const int64_t past = first + p.parts.cols / N < p.vectors ? first + p.parts.cols / N : p.vectors;
  Online own{minus_inf(), 0.0f};
  for (int64_t at = first + threadIdx.x % 32u; at < past; at += 32 * kWaveVectors) {
    Vec<T, N> v[kWaveVectors];
#pragma unroll
    for (int u = 0; u < kWaveVectors; ++u) {
      if (at + 32 * u < past) {
        load_vector<T, kAligned, Cache::kTwice>(v[u], source.x, at + 32 * u, source.cols);
      }
    }
#pragma unroll
    for (int u = 0; u < kWaveVectors; ++u) {
      if (at + 32 * u < past) add_vector(own, source, v[u], at + 32 * u);
    }
  }
  return over_lanes<T>(own);
}

// The whole row's, from its parts in their order; on every lane.
template <class T>
__device__ __forceinline__ Online whole(const float2 *parts, int count) {
  const int lane = threadIdx.x % 32u;
  float high = minus_inf();
  for (int i = lane; i < count; i += 32) high = fmaxf(high, parts[i].x);
  high = max_lanes<32>(high);
  const float by = Online::shift(high);
  float sum = 0.0f;
  for (int i = lane; i < count; i += 32) sum = fmaf(parts[i].y, exp_of<T>(parts[i].x - by), sum);
  return {high, Group<32>::sum_lanes(sum)};
}

template <class T, bool kAligned, bool kMask>
__device__ __forceinline__ void write_vector(const Source<T, kAligned, kMask> &source,
                                             const Vec<T, kVectorOf<T>> &v, int64_t at, T *to,
                                             float by, float share) {
  float z[kVectorOf<T>];
  source.scaled(v, at, z);
#pragma unroll
  for (int i = 0; i < kVectorOf<T>; ++i) z[i] = exp_of<T>(z[i] - by) * share;
  store_vector<T, kAligned>(to, at, source.cols, z);
}

// A CTA per row, any number of parts.
template <class T, bool kAligned, bool kMask>
__global__ void __launch_bounds__(kPartThreads, kAligned && !kMask ? 2 : 1)
    softmax_parts_kernel(const __grid_constant__ SoftmaxParams p) {
  wait_for_previous();
  __shared__ float2 all[kMaxParts];
  const int64_t row = p.first_row + blockIdx.x;
  const Source<T, kAligned, kMask> source(p, row);
  for (int part = threadIdx.x / 32u; part < p.parts.count; part += kPartThreads / 32) {
    const Online own = part_of(p, source, part);
    if (threadIdx.x % 32u == 0) all[part] = make_float2(own.most, own.sum);
  }
  __syncthreads();
  const Online row_sum = whole<T>(all, p.parts.count);
  const float by = Online::shift(row_sum.most), share = 1.0f / row_sum.sum;
  T *to = static_cast<T *>(p.out) + row * source.cols;
  for (int64_t at = threadIdx.x; at < p.vectors; at += kPartThreads * kSplitVectors) {
    Vec<T, kVectorOf<T>> v[kSplitVectors];
#pragma unroll
    for (int u = 0; u < kSplitVectors; ++u) {
      const int64_t here = at + u * kPartThreads;
      if (here < p.vectors) {
        load_vector<T, kAligned, Cache::kTwice>(v[u], source.x, here, source.cols);
      }
    }
#pragma unroll
    for (int u = 0; u < kSplitVectors; ++u) {
      const int64_t here = at + u * kPartThreads;
      if (here < p.vectors) write_vector(source, v[u], here, to, by, share);
    }
  }
}

// The same for a scale of 1, half types and a vector that has no elements past the end of the row but
// -inf, which change nothing: the bits are the same.
template <class T>
__device__ __forceinline__ void add_whole_vector(Online &own, const Vec<T, kVectorOf<T>> &v) {
  constexpr int N = kVectorOf<T>;
  const float high = fmaxf(own.most, greatest<T, false, 1>(&v));
  const float by = Online::shift(high);
  float z[N], more = 0.0f;
  v.get(z);
#pragma unroll
  for (int i = 0; i < N; ++i) more += exp_of<T>(z[i] - by);
  own.sum = fmaf(own.sum, exp_of<T>(own.most - by), more);
  own.most = high;
}

// CTAs on an SM: of half types two of 64 registers a thread, of fp32, whose parts are twice as large,
// one of 128. Smaller CTAs of a cluster are more.
template <class T>
inline constexpr int kHeldCtas = sizeof(T) == 2 ? 2 : 1;

// A warp's part stays in its registers: all of a row is on its way at once. Parts and sums are those
// of softmax_parts_kernel, and so are the bits.
template <class T, bool kScaled>
struct HeldPart {
  static constexpr int N = kVectorOf<T>;
  static constexpr int kLaneVectors = static_cast<int>(kPartCols) / N / 32;
  Wave<T, kLaneVectors> v;
  int first, past;  // vectors

  __device__ __forceinline__ HeldPart(const SoftmaxParams &p, int part)
      : first(part * static_cast<int>(kPartCols / N) + static_cast<int>(threadIdx.x % 32u)),
        past(static_cast<int>(p.vectors)) {}

  __device__ __forceinline__ Online read(const Source<T, true, false> &source) {
    load_wave<T, true, kLaneVectors>(v, source.x, first - static_cast<int>(threadIdx.x % 32u),
                                     source.cols);
    Online own{minus_inf(), 0.0f};
#pragma unroll
    for (int u = 0; u < kLaneVectors; ++u) {
      if constexpr (!kScaled) {
        add_whole_vector<T>(own, v[u]);
      } else {
        if (first + 32 * u < past) add_vector(own, source, v[u], first + 32 * u);
      }
    }
    return over_lanes<T>(own);
  }

  __device__ __forceinline__ void write(const SoftmaxParams &p, const Source<T, true, false> &source,
                                        int64_t row, const Online &of_row) {
    const float by = Online::shift(of_row.most), share = 1.0f / of_row.sum;
    T *to = static_cast<T *>(p.out) + row * source.cols + int64_t{first} * N;
#pragma unroll
    for (int u = 0; u < kLaneVectors; ++u) {
      v[u].stay_packed(p.zero);
      float z[N];
      if constexpr (kScaled) {
        source.scaled(v[u], first + 32 * u, z);
      } else {
        v[u].get(z);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) z[i] = exp_of<T>(z[i] - by) * share;
      if (first + 32 * u < past) store_as<T>(to, 32 * u * N, z);
    }
  }
};

// A CTA per row and a warp per part.
template <class T, bool kScaled>
__global__ void __launch_bounds__(kPartThreads, kHeldCtas<T>)
    softmax_held_parts_kernel(const __grid_constant__ SoftmaxParams p) {
  wait_for_previous();
  __shared__ float2 all[kHeldParts];
  const int64_t row = p.first_row + blockIdx.x;
  const Source<T, true, false> source(p, row);
  const int part = threadIdx.x / 32u;
  HeldPart<T, kScaled> held(p, part);
  if (p.rows_ahead > 0 && threadIdx.x + 32 == blockDim.x && row + p.rows_ahead < p.x_rows.rows) {
    bring_row(static_cast<const T *>(p.x) + row_offset(p.x_rows, row + p.rows_ahead),
              static_cast<uint32_t>(p.vectors));
  }
  const Online own = held.read(source);
  if (threadIdx.x % 32u == 0) all[part] = make_float2(own.most, own.sum);
  __syncthreads();
  held.write(p, source, row, whole<T>(all, p.parts.count));
}

// A cluster per row and a warp per part. kDense: in 48 registers, of up to kDenseThreads a CTA.
template <class T, bool kScaled, bool kDense>
__global__ void __launch_bounds__(kDense ? kDenseThreads : kPartThreads,
                                  kDense ? 3 : kHeldCtas<T>)
    softmax_cluster_kernel(const __grid_constant__ SoftmaxParams p) {
#if __CUDA_ARCH__ >= 900
  __shared__ PartResults<2> all;
  all.begin(p.parts.count);
  const int64_t row = blockIdx.x / static_cast<unsigned>(p.cluster_ctas);
  const int part = static_cast<int>(Team<true>::rank() * (blockDim.x / 32u) + threadIdx.x / 32u);
  HeldPart<T, kScaled> held(p, part);
  const Source<T, true, false> source(p, row);
  wait_for_previous();
  const Online own = held.read(source);
  all.exchange({own.most, own.sum}, part, p.parts.count, p.cluster_ctas);
  held.write(p, source, row,
             whole<T>(reinterpret_cast<const float2 *>(all.of_part), p.parts.count));
#endif
}

// A warp per part, many CTAs per row.
template <class T, bool kAligned, bool kMask>
__global__ void __launch_bounds__(kSplitThreads)
    softmax_split_kernel(const __grid_constant__ SoftmaxParams p) {
  wait_for_previous();
  const int64_t row = blockIdx.x / static_cast<unsigned>(p.parts.ctas);
  const int part = blockIdx.x % static_cast<unsigned>(p.parts.ctas) * (kSplitThreads / 32) +
                   threadIdx.x / 32u;
  if (part >= p.parts.count) return;
  const Online own = part_of(p, Source<T, kAligned, kMask>(p, row), part);
  if (threadIdx.x % 32u == 0) {
    p.workspace[row * p.parts.count + part] = make_float2(own.most, own.sum);
  }
}

template <class T, bool kAligned, bool kMask>
__global__ void __launch_bounds__(kSplitThreads)
    softmax_write_kernel(const __grid_constant__ SoftmaxParams p) {
  wait_for_previous();
  const int64_t row = blockIdx.x / static_cast<unsigned>(p.write_ctas);
  const int64_t first = static_cast<int64_t>(blockIdx.x % static_cast<unsigned>(p.write_ctas)) *
                            (kSplitThreads * kSplitVectors) +
                        threadIdx.x;
  const Source<T, kAligned, kMask> source(p, row);
  Vec<T, kVectorOf<T>> v[kSplitVectors];
#pragma unroll
  for (int u = 0; u < kSplitVectors; ++u) {
    const int64_t at = first + u * kSplitThreads;
    if (at < p.vectors) load_vector<T, kAligned>(v[u], source.x, at, source.cols);
  }
  const Online row_sum = whole<T>(p.workspace + row * p.parts.count, p.parts.count);
  const float by = Online::shift(row_sum.most), share = 1.0f / row_sum.sum;
  T *to = static_cast<T *>(p.out) + row * source.cols;
#pragma unroll
  for (int u = 0; u < kSplitVectors; ++u) {
    const int64_t at = first + u * kSplitThreads;
    if (at < p.vectors) write_vector(source, v[u], at, to, by, share);
  }
}

// ---------------------------------------------------------------------------------------------
// Launchers

template <class T, bool kScaled>
bool launch_held_parts(SoftmaxParams &p, int device, void *stream, int32_t *status) {
  constexpr const char *op = "softmax";
  if (sizeof(T) == 2 && p.parts.count <= kHeldParts &&
      !split_rows(p.x_rows.rows, p.x_rows.cols)) {
    const int64_t bytes = kVectorBytes * p.vectors;
    p.rows_ahead =
        p.x_rows.rows < kSoftmaxAheadRows ? 0 : static_cast<int>((kSoftmaxAheadBytes + bytes - 1) / bytes);
    *status = launch_rows(&softmax_held_parts_kernel<T, kScaled>, {Shape::kLoop, kPartThreads, 1}, p,
                          stream, op);
    return true;
  }
  const ClusterPlan plan = plan_cluster(p.parts.count);
  void (*kernel)(SoftmaxParams) = &softmax_cluster_kernel<T, kScaled, false>;
  if constexpr (!kScaled && sizeof(T) == 2) {  // with a scale it would spill
    if (dense_cluster(plan, p.x_rows.rows)) kernel = &softmax_cluster_kernel<T, kScaled, true>;
  }
  return launch_row_clusters(kernel, plan, p, device, stream, op, status);
}

template <class T, bool kAligned, bool kMask>
int32_t launch_typed(SoftmaxParams &p, int device, void *stream) {
  constexpr const char *op = "softmax";
  constexpr int N = kVectorOf<T>;
  p.vectors = (p.x_rows.cols + N - 1) / N;
  if (p.vectors <= kMostHeld) {
    const RowPlan plan = plan_held(p.vectors);
    switch (plan.shape) {
      case Shape::k8x2:
        return launch_rows(&softmax_held_kernel<T, kAligned, kMask, 8, 2>, plan, p, stream, op);
      case Shape::k32x2:
        return launch_rows(&softmax_held_kernel<T, kAligned, kMask, 32, 2>, plan, p, stream, op);
      case Shape::k32x4:
        // With a mask and element by element it would spill on sm_80. A CTA of one warp adds up in
        // the same order.
        if constexpr (kAligned || !kMask) {
          return launch_rows(&softmax_held_kernel<T, kAligned, kMask, 32, 4>, plan, p, stream, op);
        }
        break;
      default:
        break;
    }
    const RowPlan cta{Shape::kCtaX4, cta_threads(p.vectors, 4), 1};
    return launch_rows(&softmax_held_kernel<T, kAligned, kMask, kCta, 4>, cta, p, stream, op);
  }
  p.parts = parts_of(p.x_rows.cols);
  if constexpr (kAligned && !kMask) {
    int32_t status = HFP_OK;
    if (p.scale == 1.0f ? launch_held_parts<T, false>(p, device, stream, &status)
                        : launch_held_parts<T, true>(p, device, stream, &status)) {
      return status;
    }
  }
  if (!split_rows(p.x_rows.rows, p.x_rows.cols)) {
    return launch_rows(&softmax_parts_kernel<T, kAligned, kMask>,
                       {Shape::kLoop, kPartThreads, 1}, p, stream, op);
  }
  const int64_t each = kSplitThreads * kSplitVectors, rows = p.x_rows.rows;
  p.write_ctas = static_cast<int>((p.vectors + each - 1) / each);
  const int32_t status = launch(&softmax_split_kernel<T, kAligned, kMask>, rows * p.parts.ctas,
                                kSplitThreads, p, stream, op);
  if (status != HFP_OK) return status;
  return launch(&softmax_write_kernel<T, kAligned, kMask>, rows * p.write_ctas, kSplitThreads, p,
                stream, op);
}

template <class T>
int32_t launch_for(SoftmaxParams &p, int device, void *stream) {
  bool aligned = rows_of_vectors(p.x_rows, p.x, sizeof(T)) && pointer_aligned(p.out);
  if (p.mask != nullptr) {
    // A vector of the mask has as many elements as one of x, in loads of up to 16 bytes.
    aligned = aligned && rows_aligned(p.mask_rows, p.mask, size_of(p.mask_type));
  }
  if (p.mask != nullptr) {
    return aligned ? launch_typed<T, true, true>(p, device, stream)
                   : launch_typed<T, false, true>(p, device, stream);
  }
  return aligned ? launch_typed<T, true, false>(p, device, stream)
                 : launch_typed<T, false, false>(p, device, stream);
}

}  // namespace

int32_t softmax(const SoftmaxArgs &a, int device, void *stream) {
  if (a.x_rows.rows <= 0 || a.x_rows.cols <= 0) return HFP_OK;
  SoftmaxParams p{};
  p.out = a.out;
  p.workspace = reinterpret_cast<float2 *>(a.workspace);
  p.x = a.x;
  p.mask = a.mask;
  p.mask_type = a.mask_type;
  p.x_rows = a.x_rows;
  p.mask_rows = a.mask_rows;
  p.scale = a.scale;
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), "softmax");
  switch (a.type) {
    case DType::F32: return launch_for<float>(p, device, stream);
    case DType::F16: return launch_for<__half>(p, device, stream);
    default: return launch_for<__nv_bfloat16>(p, device, stream);
  }
}

}  // namespace hfp::cuda
