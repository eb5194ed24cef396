// row_cluster.cuh: rows that a cluster of CTAs holds (sm_90): softmax and its gradient, where a row is
// more than the registers of one CTA.
//
// Each warp holds a part of the row. Its result goes to all CTAs of the cluster, each of which then
// makes the row's of all parts, as one CTA with all parts would: the bits are the same.
#pragma once

#include "mailbox.cuh"
#include "row_ops.cuh"

namespace hfp::cuda {

inline constexpr int kMostClusterParts = kClusterSize * kHeldParts;

// CTAs that share a row, and their threads, a warp for each part: small CTAs, four parts at least, as
// long as there are CTAs for all. softmax in bf16 on an H200, as few CTAs as hold a row and as many,
// us: 4096 x 151936 625, 615; 1 x 128256 4.4, 3.1; 64 x 128256 13.6, 12.3; 8192 x 50264 398, 398.
struct ClusterPlan {
  int ctas, threads;
};

inline ClusterPlan plan_cluster(int parts) {
  const int most = (parts + 3) / 4, ctas = most < kClusterSize ? most : kClusterSize;
  return {ctas, (parts + ctas - 1) / ctas * 32};
}

// Whether CTAs of 48 registers a thread, of which more fit on an SM than of 64, are faster: with five warps
// or more, and more rows than are on the GPU at once. softmax in bf16 on an H200, us: 4096 x 151936 619 ->
// 600, x 136000 569 -> 540, x 70000 289 -> 278, 2048 x 196608 413 -> 389, 256 x 151936 44.4 -> 42.6; but
// 8192 x 50264, four warps, 399 -> 402, and 1 x 151936 3.66 -> 3.86.
inline constexpr int kDenseThreads = 13 * 32;
inline bool dense_cluster(const ClusterPlan &plan, int64_t rows) {
  constexpr int64_t kAtOnce = 1024 * kFullSms;  // threads of 64 registers
  return plan.threads > 128 && plan.threads <= kDenseThreads &&
         rows * plan.ctas * plan.threads > kAtOnce;
}

#if __CUDA_ARCH__ >= 900
// In shared memory: the results of all parts, of kNumbers floats each.
template <int kNumbers>
struct PartResults {
  alignas(4 * kNumbers) float of_part[kMostClusterParts][kNumbers];
  Mailbox mail;

  // Before anything else, by all threads.
  __device__ __forceinline__ void begin(int parts) {
    mail.begin(parts * kNumbers * static_cast<int>(sizeof(float)));
    Team<true>::leave();
  }

  // By each warp: the result of its part, unless that is past the last one. After it all are here.
  __device__ __forceinline__ void exchange(const float (&result)[kNumbers], int part, int parts,
                                           int ctas) {
    Team<true>::left();  // all have their mailboxes
    const int lane = threadIdx.x % 32u;
    if (part < parts && lane < ctas) mail.send(of_part[part], result, static_cast<unsigned>(lane));
    mail.wait(0);
  }
};
#endif

// A cluster per row; false, and nothing is launched, where it cannot hold a row, where a grid has no
// room for so many, and where there are no clusters.
template <class Params>
bool launch_row_clusters(void (*kernel)(Params), const ClusterPlan &plan, Params &p, int device,
                         void *stream, const char *op, int32_t *status) {
  if (plan.threads > kPartThreads || p.x_rows.rows > kMaxGrid / plan.ctas ||
      !has_clusters(reinterpret_cast<const void *>(kernel), device)) {
    return false;
  }
  p.cluster_ctas = plan.ctas;
  *status = launch_clusters(kernel, p.x_rows.rows, plan.threads, p, stream, op, 0, plan.ctas);
  return true;
}

}  // namespace hfp::cuda
