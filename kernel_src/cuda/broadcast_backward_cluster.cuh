// broadcast_backward_cluster.cuh: the gradients of what is broadcast in one launch of clusters (sm_90),
// where work is not so little that broadcast_backward_few_kernel is faster.
//
// A cluster has all rows of a few vectors of columns of one sum, in groups of threads that have other
// rows each. The CTAs share out the sums' columns and send each other what they have added up of them
// (mailbox.cuh): nothing but the results goes to memory, and no second launch reads it.
#pragma once

#include "broadcast_backward_row.cuh"
#include "mailbox.cuh"
#include "ordered.cuh"

namespace hfp::cuda {

// Sums go about as pieces of four columns.
inline constexpr int kPieceColumns = 4;
template <class F, int N>
inline constexpr int kTeamPieces = F::kSums * N / kPieceColumns;  // of a vector of columns

// A CTA fills its SM and begins when the one before it has left: no division is in the way of its first load.
struct ClusterParams : BroadcastParams {
  int share;  // of the pieces of all lanes, those that a CTA adds up, and all send it
  FastDivisor by_share;
};

__device__ __forceinline__ void add_piece(float4 &to, const float4 &v) {
  to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w;
}

// The sum of `count` pieces, each `step`, by eights.
__device__ __forceinline__ float4 sum_pieces(const float4 *from, int step, int count) {
  constexpr int kAtOnce = 8;
  const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float4 sum = zero;
  int left = count;
#pragma unroll 2
  for (; left >= kAtOnce; left -= kAtOnce, from += kAtOnce * step) {
    float4 of_eight = from[0];
#pragma unroll
    for (int i = 1; i < kAtOnce; ++i) add_piece(of_eight, from[i * step]);
    add_piece(sum, of_eight);
  }
  float4 rest = zero;
#pragma unroll
  for (int i = 0; i + 1 < kAtOnce; ++i) {
    if (i < left) add_piece(rest, from[i * step]);
  }
  add_piece(sum, rest);
  return sum;
}

// kBrings: see BroughtRows.
template <class T, class F, int kSize, bool kBrings>
__global__ void __launch_bounds__(F::kTeamThreads, 1)
    broadcast_backward_cluster_kernel(const __grid_constant__ ClusterParams p) {
#if __CUDA_ARCH__ >= 900
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T)), kThreads = F::kTeamThreads;
  constexpr int kOfVector = N / kPieceColumns, kPieces = kTeamPieces<F, N>;
  extern __shared__ __align__(16) float4 all[];
  __shared__ Mailbox mail;
  const int lanes = p.lanes, items = kPieces * lanes, thread = threadIdx.x;
  float4 *const inbox = all + kThreads * kPieces;
  const unsigned cluster = blockIdx.x / kSize, sum = p.by_chunks.divide(cluster);
  const int rank = static_cast<int>(blockIdx.x % kSize);
  const int first_vector = static_cast<int>(cluster - sum * p.chunks) * lanes;
  const int left = items - rank * p.share;  // of the items, from this CTA's on
  const int mine = left < 0 ? 0 : left < p.share ? left : p.share;
  mail.begin(mine * kSize * static_cast<int>(sizeof(float4)));
  Team<true>::leave();

  float first[N], second[N];
#pragma unroll
  for (int i = 0; i < N; ++i) first[i] = second[i] = 0.0f;
  {
    const int group = p.by_lanes.divide(thread), vector = first_vector + thread - group * lanes;
    const bool active = group < p.groups && vector < p.vectors;
    const unsigned outer = p.by_inner.divide(sum);
    const int64_t inner = sum - outer * p.inner, row_0 = outer * p.reduced * p.inner + inner;
    const int r = rank * p.groups + group, step = p.step;
    const int64_t row = row_0 + r * p.inner, col = static_cast<int64_t>(vector) * N;
    PlainRows<T> rows;
    rows.x = static_cast<const T *>(p.x) + row * p.x_rows.s2 + col;
    rows.grad = static_cast<const T *>(p.grad) + row * p.grad_rows.s2 + col;
    rows.dx = static_cast<T *>(p.dx) + row * p.x_rows.cols + col;
    rows.first = row_0, rows.col = col;
    rows.cta = static_cast<int>(blockIdx.x - sum * p.chunks * kSize);
    rows.left = active ? p.by_step.divide(static_cast<int>(p.reduced) - r + step - 1) : 0;
    settle(rows.x, rows.grad, rows.dx);
    Team<true>::left();  // all have their mailboxes
    wait_for_previous();
    using Brought = std::conditional_t<kBrings, BroughtRows<T>, NoneBrought>;
    constexpr int kAhead = kBrings ? kBringingAhead : F::kAhead;
    if (rows.left > 0) sum_plain_rows<F, kAhead, Brought>(p, rows, first, second);
  }

  // Sums of each item, a piece of a lane. Where lanes divide a warp, its groups exchange theirs first.
  const bool by_warps = lanes == 8 || lanes == 16;
  const auto share_warp = [&](auto of_lanes) {
    constexpr int kLanes = decltype(of_lanes)::value, kGroups = 32 / kLanes;
    constexpr int kHolders = kGroups < kPieces ? kGroups : kPieces, kOwn = kPieces / kHolders;
    constexpr int kSame = kGroups / kHolders;  // groups that have the same sums
    const int lane = thread % 32, group = lane / kLanes;
    float v[F::kSums * N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (F::kSums == 2) v[i] = first[i];
      v[(F::kSums - 1) * N + i] = second[i];
    }
    share_out<kLanes, kPieceColumns, F::kSums * N>(v, lane);
    if (group % kSame != 0) return;
    float4 *const to = all + thread / 32 * items + group / kSame * kOwn * kLanes + lane % kLanes;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float *const of = v + i * kPieceColumns;
      to[i * kLanes] = make_float4(of[0], of[1], of[2], of[3]);
    }
  };
  const auto share = [&](int piece, const float (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += kPieceColumns) {
      all[(piece + i / kPieceColumns) * kThreads + thread] =
          make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
    }
  };
  if (lanes == 8) {
    share_warp(std::integral_constant<int, 8>());
  } else if (lanes == 16) {
    share_warp(std::integral_constant<int, 16>());
  } else {
    if constexpr (F::kSums == 2) share(0, first);
    share(kPieces - kOfVector, second);
  }
  __syncthreads();
  for (int item = thread; item < items; item += kThreads) {
    const int piece = p.by_lanes.divide(item), of_threads = piece * (kThreads - lanes) + item;
    const float4 v = by_warps ? sum_pieces(all + item, items, kThreads / 32)
                              : sum_pieces(all + of_threads, lanes, p.groups);
    const int to = p.by_share.divide(item);
    const float sent[kPieceColumns] = {v.x, v.y, v.z, v.w};
    mail.send(reinterpret_cast<float *>(inbox + rank * p.share + item - to * p.share), sent, to);
  }
  if (thread >= mine) return;
  mail.wait(0);
  for (int at = thread; at < mine; at += kThreads) {
    float v[kPieceColumns] = {};
#pragma unroll
    for (int from = 0; from < kSize; ++from) {
      const float4 part = inbox[from * p.share + at];
      v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
    }
    const int item = rank * p.share + at, piece = p.by_lanes.divide(item);
    const int vector = first_vector + item - piece * lanes;
    void *const to = piece < kPieces - kOfVector ? p.first : p.second;
    if (vector >= p.vectors || to == nullptr) continue;
    store_any(to, p.param_type,
              static_cast<int64_t>(sum) * p.x_rows.cols + static_cast<int64_t>(vector) * N +
                  piece % kOfVector * kPieceColumns,
              v);
  }
#endif
}

// ---------------------------------------------------------------------------------------------
// Launcher

template <class T, class F, int kSize, bool kBrings>
bool launch_clusters_of(const BroadcastParams &rest, const ColumnTeams &teams, int64_t sums,
                        int device, void *stream, const char *op, int32_t *status) {
  auto *kernel = &broadcast_backward_cluster_kernel<T, F, kSize, kBrings>;
  if (!has_clusters(reinterpret_cast<const void *>(kernel), device)) return false;
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  ClusterParams p{rest};
  p.vectors = static_cast<int>(p.x_rows.cols / N);
  p.lanes = teams.lanes;
  p.chunks = (p.vectors + p.lanes - 1) / p.lanes;
  p.groups = F::kTeamThreads / p.lanes;
  p.step = kSize * p.groups;
  const int64_t rows = p.step * p.inner;
  p.x_step = rows * p.x_rows.s2;
  p.grad_step = rows * p.grad_rows.s2;
  p.dx_step = rows * p.x_rows.cols;
  p.share = (kTeamPieces<F, N> * p.lanes + kSize - 1) / kSize;
  p.by_chunks = FastDivisor(p.chunks), p.by_lanes = FastDivisor(p.lanes);
  p.by_inner = FastDivisor(p.inner), p.by_step = FastDivisor(p.step);
  if (kBrings) p.by_pieces = FastDivisor(p.vectors / BroughtRows<T>::kPieceVectors);
  p.by_share = FastDivisor(p.share);
  const int needed = (F::kTeamThreads * kTeamPieces<F, N> + kSize * p.share) *
                     static_cast<int>(sizeof(float4));
  const int bytes = shared_memory_of_wave(needed, static_cast<int>(sizeof(Mailbox)), 1);
  static ClusterRoom room;
  if (room.of(kernel, F::kTeamThreads, bytes, kSize, device) < sums * p.chunks) return false;
  *status = launch_clusters(kernel, sums * p.chunks, F::kTeamThreads, p, stream, op, bytes, kSize);
  return true;
}

// By broadcast_backward_cluster_kernel, where rows are at one distance, there is enough work, and clusters
// share out the columns evenly, all at once on the GPU; false where not.
template <class T, class F>
bool launch_cluster(const BroadcastParams &p, int64_t sums, int device, void *stream, const char *op,
                    int32_t *status) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  const int64_t vectors = p.x_rows.cols / N;
  const bool enough = p.reduced >= F::kManyTeamRows || sums * p.reduced * vectors >= F::kTeamVectors;
  const ColumnTeams teams = column_teams(vectors, sums, F::kPairLanes, F::kEights);
  if (p.reduced < kTeamRows || !enough || teams.size == 0) return false;
  if constexpr (F::kEights) {
    if (teams.size == 8) {
      return launch_clusters_of<T, F, 8, false>(p, teams, sums, device, stream, op, status);
    }
  }
  if constexpr (F::kBrings) {
    if (pairs_bring(vectors, p.reduced, sums, teams.lanes)) {
      return launch_clusters_of<T, F, 2, true>(p, teams, sums, device, stream, op, status);
    }
  }
  return launch_clusters_of<T, F, 2, false>(p, teams, sums, device, stream, op, status);
}

}  // namespace hfp::cuda
