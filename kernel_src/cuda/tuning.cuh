// tuning.cuh: the tuned choices of the CUDA kernels, in one table; docs/gpus.md says what they mean
// on each GPU.
//
// All are compile-time constants, the same for every architecture: tuned on an H100, and chosen such
// that they hold where registers (65536 per SM) and line sizes (128 bytes) are the same, which is
// everywhere from compute capability 7.5 on. Numbers of threads on the GPU are an H100's; on a
// smaller one the layouts for little work are used a little longer than they pay.
//
//   constant               value       what                                     used by
//   kVectorBytes           16          widest load and store                    all
//   kElementwiseThreads    256         vectors of a CTA                         elementwise.cuh
//   kFewVectors            2^14        up to here half the threads              elementwise.cuh
//   kOneInputRows          2           rows of a thread that has one input,     elementwise.cuh
//                                      and perhaps a bias
//   kVectorsPerThread      2 or 1      vectors on their way (1 input, 2)        elementwise.cuh
//   kSmallVectors          2^18        up to here one vector per thread         elementwise.cuh
//   kRowThreads            128         CTA with several rows                    rows.cuh
//   kNarrowThreads         256         the same, rows of up to 8 vectors        norms
//   kMaxThreads(X4, X8)    1024        largest CTA per row with 1 vector per    rows.cuh
//                          512, 768    thread; with 2 or 4; with 8
//   kLatencyVectors        2^18        up to here one vector per thread         rows.cuh
//   kHoldWords             64          registers for a row and its parameters   rows.cuh
//   plan_rows, plan_norm   see below   layout by the row's length               norms
//   plan_gated             see below   the same                                 gated_norm.cu
//   kManyThreads, kSome-   1536, 1024  threads on an SM that registers allow    norms
//   kMaxHoldThreads,       256, 2^21   row and parameters in registers up to    layer_norm.cu
//     kHoldVectors                     here; else the row
//   plan_full,             see below   rows that leave no vector over           layer_norm.cu,
//     plan_added_full                                                           added_norm_full.cuh
//   kHeadThreads           128         CTA                                      rope_*.cuh
//   kFullThreads,          2^19, 2     with a norm, from so many threads on     rope_heads.cuh
//     kThreadHeads                     so many heads in each
//   kPackedCtas, kFew-     1056, 528   CTAs with more heads in each thread,     rope_packed.cuh
//     PackedCtas                       with one
//   kLoopThreads           512         CTA of a wide norm across heads          qk_norm_rope.cu
//   kCrossThreads          256         CTA                                      cross_entropy.cu
//   kCrossCluster-         256, 256    CTA of a cluster; rows up to which       cross_entropy.cu
//     Threads, -Rows                   there are clusters
//   kCrossGrad-Threads,    256, 2      CTA of the gradient; vectors on their    cross_entropy.cu
//     -Vectors                         way
//   kCrossAheadBytes       4 MB        rows that CTAs bring to L2 for others    cross_entropy_with_
//                                                                               gradient.cu
//   kNormCluster-Rows,     16, 512     rows of one launch; CTA of its cluster   norm_backward_few.cuh
//     -Threads
//   rms_pairs, layer_pairs see below   rows that two CTAs share                 rms_norm.cu, layer_norm.cu
//   rows_ahead,            see below   rows that CTAs bring to L2 for others    the same,
//     added_rows_ahead                                                          added_norm_full.cuh
//   ring_ctas              see below   CTAs of an SM, rows in shared memory     norm_backward_ring.cuh
//   kSharedRingRows,       1024, 15    rows from which clusters share them;     norm_backward_ring.cuh
//     kRingEights                      clusters of eight CTAs
//   kFewSum-Threads,       512, 2      CTA of little work; vectors of columns   broadcast_backward.cu
//     -Lanes                           in it
//   kMulAdd-, kActivation- 256 and     CTA where the work is more; rows of a    broadcast_backward.cu
//     Threads, -Ahead      1024, 4, 1  thread on their way
//   column_teams, kTeam-   see below   clusters that share out its columns;     broadcast_backward_
//     Rows, -Vectors                   rows and vectors from which they do        cluster.cuh
//   kBringingAhead,        2, see      rows of a thread on their way where     the same
//     pairs_bring          below       pairs bring others to L2
//   plan_held, kMostHeld   see below   rows in registers                        softmax*.cu
//   kPartThreads,          512, 128    CTA of a wider row; of four of its       row_ops.cuh
//     kSplitThreads                    parts
//   kSoftmaxAhead-         2 MB, 1056  rows that CTAs bring to L2 for others    softmax.cu
//     Bytes, -Rows
//   kArgmaxThreads,        512, 256    CTA; CTA of a cluster                    argmax.cu
//     kArgmaxClusterThreads
//   kClusterRows, -Vec-    16, 1024,   rows up to which clusters share them,    argmax.cu, topk.cu,
//     tors, kTopClusterRows  24        and how wide; those of topk and sample   sample.cu
//   kCtaRows, kMostWanted  132, 192    rows with an SM each; k                  row_top.cuh
//   kMostFlowWanted,       64, 1024    k, and vectors of a row, of a stream     row_flow.cuh
//     kFlowWidth
//   kFewRankers, kPair-    8, 3072,    rows that two warps rank                 row_flow.cuh
//     Vectors, -Rows       16
//   group_norms::          see below   groups by CTA, cluster, many CTAs, or    group_*.cuh
//                                      read twice
//   kPlainAdamW-Threads,   128, 1,     CTA, vectors of a thread and threads     adamw.cu
//     -Vectors, -Resident  1024        on an SM, fp32 without masters or amsgrad
//   kSumThreads, -Rows     512, 320    CTA; rows of partial sums at once        partial_sums.cu
#pragma once

#include <cstdint>

namespace hfp::cuda {

// Bytes of the widest load or store that every supported architecture has.
inline constexpr int kVectorBytes = 16;

// SMs of the GPU that grids of one wave are for.
inline constexpr int64_t kFullSms = 132;

// ---------------------------------------------------------------------------------------------
// Elementwise

// Vectors of a CTA: 256 threads of one, or 128 of two. With half as many the time is that of starting
// CTAs, some 1.3 ns each. H200, bf16, warm, 128 and 256 threads of one vector: gated silu 4096 x 1000
// 5.29 and 3.29 us, silu's gradient 5.33 and 3.44, mul_add 2 x 2688 x 2048 13.6 and 9.24 (cold 13.5
// and 11.6). 512 threads gained nothing that holds.
inline constexpr int kElementwiseThreads = 256;

// Half of them as long as every CTA has an SM of an H100 to itself: gated silu, 128 and 256 threads,
// 1 x 14336 0.72 and 0.83 us warm, 511 x 1001 1.47 and 1.39.
inline constexpr int64_t kFewVectors = int64_t{1} << 14;
constexpr int elementwise_threads(int64_t vectors) {
  return vectors <= kFewVectors ? kElementwiseThreads / 2 : kElementwiseThreads;
}

// Rows of a thread that has one input, and perhaps a bias: else one load of HBM on its way. H200,
// bf16, one row (128 threads), two (128) and four (256): add_silu 4608 x 12288 67.1, 54.4 and 56.0 us,
// 4096 x 1000 warm 5.4, 3.3 and 3.5. With a second parameter or input one row (256 threads) is as good
// or better: mul_add 2 x 8064 x 2048 32.0, of two rows 33.1.
inline constexpr int kOneInputRows = 2;

// Vectors of each input that a thread has on their way at once. Two in all, with 2048 threads on an
// SM, are about twice what covers the latency of HBM at full speed: more would only take registers,
// hence threads. A tensor that one wave of an H100 covers is spread over more threads instead.
template <int kInputs>
inline constexpr int kVectorsPerThread = kInputs == 1 ? 2 : 1;
inline constexpr int64_t kSmallVectors = int64_t{1} << 18;

// ---------------------------------------------------------------------------------------------
// Rows: threads per row x vectors per thread
// A row lies in the registers of its threads from the first load to the last store, so memory is
// passed over once. k<A>x<B>: A threads (8, 16, 32: a part of a warp or a warp; 64: a CTA; Cta: one
// CTA per row, its size set at the launch) of B vectors (16 bytes where aligned) each.
enum class Shape {
  k8x1, k8x2, k16x1, k16x2, k32x2, k32x4, k32x8, k64x2, kCtaX1, kCtaX2, kCtaX4, kCtaX8, kLoop
};

// CTA size where a CTA holds several rows. Small, so that the last wave is short.
inline constexpr int kRowThreads = 128;

// Sums of 32 vectors in the widest row whose threads hold four vectors: 4 * kMaxThreadsX4 / 32.
inline constexpr int kPartials = 64;

// Largest CTA that holds a row. What bounds it is the register file, 65536 per SM: x4 keeps the
// parameters in registers too (128 per thread), x8 the row only (80); x1 needs 32.
inline constexpr int kMaxThreadsX4 = 512;
inline constexpr int kMaxThreadsX8 = 768;
inline constexpr int kMaxThreads = 1024;
inline constexpr int64_t kMaxHeldVectors = 8 * kMaxThreadsX8;
static_assert(4 * kMaxThreadsX4 / 32 <= kPartials && kMaxThreads / 32 <= kPartials);

// Up to so many vectors in the whole tensor, all are on their way at once with one per thread (an
// H100 runs 270,000 threads): the time is then the latency of one thread's work, which is shortest
// with one vector.
inline constexpr int64_t kLatencyVectors = int64_t{1} << 18;

struct RowPlan {
  Shape shape;
  int threads;   // per CTA
  int cta_rows;  // rows per CTA
};

constexpr int cta_threads(int64_t vectors, int per_thread) {
  const int64_t per_warp = 32 * per_thread;
  return static_cast<int>((vectors + per_warp - 1) / per_warp * 32);
}

// For rows of `vectors` vectors. The number of rows may choose between layouts that add in one order
// only (see Group::sum), so that the bits of a row do not depend on the batch around it.
//
// Narrow rows: as few threads as still read whole 128-byte lines, so that a CTA holds many rows,
// each thread has two loads in flight, and the sum takes few shuffles.
// Up to a warp of 8 vectors a row needs no barrier. Beyond that a CTA per row, 4 vectors a thread,
// cut to the row's length in whole warps, so that no width wastes more than a warp.
// `warp_of_8` says whether a warp of 8 vectors can hold the parameters too: see kWarpOf8.
constexpr RowPlan plan_rows(int64_t vectors, int64_t rows, bool warp_of_8) {
  if (vectors <= 16) return {Shape::k8x2, kRowThreads, kRowThreads / 8};
  if (vectors <= 32) return {Shape::k16x2, kRowThreads, kRowThreads / 16};
  if (vectors <= 64) return {Shape::k32x2, kRowThreads, kRowThreads / 32};
  if (vectors <= kMaxThreads && rows <= kLatencyVectors / vectors) {
    return {Shape::kCtaX1, cta_threads(vectors, 1), 1};
  }
  if (vectors <= 128) return {Shape::k32x4, kRowThreads, kRowThreads / 32};
  if (vectors <= 256 && warp_of_8) return {Shape::k32x8, kRowThreads, kRowThreads / 32};
  if (vectors <= 4 * kMaxThreadsX4) return {Shape::kCtaX4, cta_threads(vectors, 4), 1};
  if (vectors <= kMaxHeldVectors) return {Shape::kCtaX8, cta_threads(vectors, 8), 1};
  return {Shape::kLoop, kMaxThreads, 1};
}

// The same for the general kernels (narrow vectors, mixed dtypes): fewer shapes, to build less.
constexpr RowPlan plan_rows_general(int64_t vectors) {
  if (vectors <= 16) return {Shape::k8x2, kRowThreads, kRowThreads / 8};
  if (vectors <= 128) return {Shape::k32x4, kRowThreads, kRowThreads / 32};
  if (vectors <= kMaxHeldVectors) return {Shape::kCtaX8, cta_threads(vectors, 8), 1};
  return {Shape::kLoop, kMaxThreads, 1};
}

// CTA of rms_norm and layer_norm where 8 threads have a row and each one vector: twice kRowThreads,
// whose CTAs start too slowly (see kElementwiseThreads). bf16 on an H200, us, 128 and 256 threads:
// rms_norm 32768 x 64 warm 3.11 and 1.96, 131072 x 64 cold 10.6 and 9.2; 512 threads 2.01 and 9.5, two
// rows for each thread of 128 2.19 and 9.3.
inline constexpr int kNarrowThreads = 2 * kRowThreads;

// plan_rows for rms_norm and layer_norm. Rows of up to 8 vectors are one each for 8 threads, as a
// second would be empty. Up to so many vectors in the whole tensor, rows of 9 to 16 are one each for
// 16 threads: rms_norm in bf16 on an H200, 4096 x 128, warm, 1.32 us -> 1.07. Where the GPU is full
// that is slower: rms_norm_silu 1204224 x 128 145 us -> 182.
inline constexpr int64_t kNarrowVectors = int64_t{1} << 16;
constexpr RowPlan plan_norm(int64_t vectors, int64_t rows, bool warp_of_8) {
  if (vectors <= 8) return {Shape::k8x1, kNarrowThreads, kNarrowThreads / 8};
  if (vectors <= 16 && rows <= kNarrowVectors / vectors) {
    return {Shape::k16x1, kRowThreads, kRowThreads / 16};
  }
  return plan_rows(vectors, rows, warp_of_8);
}

// CTAs of more threads than kMaxHoldThreads, with four vectors each, leave weight and bias in memory
// until they are used, and take 40 registers a thread, where the tensor of a half type has more than
// kHoldVectors. layer_norm in bf16 on an H200, in us, with the parameters in 64 registers, and without in
// 40: 4096 x 12288 55.9, 51.2, x 16384 67.5, 67.3. With fewer rows each one's loads are waited for (512 x
// 16384 12.0 and 13.2, before there was one sum); rms_norm has one parameter less and gains nothing, and
// fp32 loses (4096 x 8192 66.3, 67.1).
inline constexpr int kMaxHoldThreads = 256;
inline constexpr int64_t kHoldVectors = int64_t{1} << 21;
constexpr bool params_late(const RowPlan &plan, int64_t vectors, int64_t rows) {
  return plan.threads > kMaxHoldThreads && rows > kHoldVectors / vectors;
}

// Vectors of a thread of rms_norm whose CTA has no vector left over, in a half type; 0: another kernel.
// Four where they are one wave of a thread's registers, evenly over an H100's SMs; two up to 512 vectors
// a row. bf16 on an H200, us: 65536 x 4096 260.2 -> 255.6, 16384 x 4096 66.2 -> 64.0, 65536 x 2048
// 130.6 -> 127.7, 4096 x 2048 9.64 -> 9.25 (warm 6.32 -> 5.62); 1024 x 4096 5.52 -> 5.13 (4.22 -> 3.43), two
// vectors 5.24 (3.72); 512 x 8192 5.72 -> 5.48 (4.35 -> 3.67). Vectors strided over the CTA instead of the
// warp 257.3 and 64.5 in the first two; more vectors a row no faster (4096 x 5120 21.3 -> 22.0).
constexpr int full_vectors(int64_t vectors, int64_t rows) {
  if (vectors < 256 || rows <= kLatencyVectors / vectors) return 0;
  if (rows <= 2 * kLatencyVectors / vectors && vectors <= 1024 && vectors % 128 == 0) return 4;
  return vectors <= 512 && vectors % 128 == 0 ? 2 : 0;
}

// Vectors of a thread of layer_norm whose CTA has no vector left over, in a half type with weight and bias,
// and whether these are asked for with the row; 0: another kernel. Two where all threads are on the GPU at
// once (32 registers), where four leave some over and where rows are many (40), else four. bf16 on an H200,
// us, another kernel -> this: 1024 x 4096 5.91 -> 5.65 (warm 4.27 -> 3.82; four vectors 5.67), 8192 x 1536
// 15.0 -> 14.0, 65536 x 4096 260 -> 254 (four 262), 4096 x 2048 10.7 -> 10.3 (warm 7.3 -> 6.2), x 4096
// 19.1 -> 18.6 (two 18.8), x 8192 35.2 -> 34.7 (37.0), x 16384 69.2 -> 67.8 (with the row 68.8); 16384 x 4096,
// four 66.9, two 66.0.
struct FullPlan {
  int vectors;
  bool hold;
};
constexpr FullPlan plan_full(int64_t vectors, int64_t rows) {
  constexpr int64_t kMany = int64_t{1} << 23;
  if (vectors <= 128 || vectors > 4 * kMaxThreadsX4 || vectors % 64 != 0) return {0, false};
  if (rows <= kLatencyVectors / 2 / vectors) return {0, false};
  if (rows <= 2 * kLatencyVectors / vectors) return {2, false};  // all threads at once
  if (vectors <= 512 && (vectors % 128 != 0 || rows >= kMany / vectors)) return {2, true};
  if (vectors % 128 != 0) return {0, false};
  return {4, vectors <= 4 * kMaxHoldThreads || rows <= kHoldVectors / vectors};
}

// Rows of a half type that CTAs bring to L2 (bring_ahead): the one `distance` rows on, of `rows`; 0 where they
// do not. Some 4 MB on, for enough to be on its way while the CTAs of an SM compute. bf16 on an H200, us,
// without -> with: rms_norm 4096 x 8192 34.9 -> 33.7, x 12288 51.2 -> 49.6, x 16384 66.2 -> 65.2, layer_norm 34.5
// -> 34.4, 51.7 -> 50.4, 68.0 -> 66.0. From 66 to 165 rows on it is within 1 %; 4096 x 16384 in one CTA a row
// 66.4, with 198 rows 67.0, 264 70.4, 528 88. Fewer rows lose (512 x 16384 11.1, 11.6), and narrow ones of one
// input (4096 x 4096 18.6, 18.8).
struct RowsAhead {
  uint32_t distance, rows;
};
constexpr RowsAhead rows_ahead(int64_t vectors, int64_t rows) {
  if (vectors < 1024 || rows <= kHoldVectors / vectors) return {0, 0};
  return {kFullSms, static_cast<uint32_t>(rows)};
}
// Of x and a residual: add_rms_norm, add_layer_norm 4096 x 8192 66.8 -> 65.4, 66.3 -> 65.2, x 16384 132.0 ->
// 129.8, 132.3 -> 130.5, 65536 x 4096 520 -> 509, 517 -> 504. Half as far 0.5 us slower, 1.4 times as far the same.
constexpr RowsAhead added_rows_ahead(int64_t vectors, int64_t rows) {
  if (rows <= kHoldVectors / vectors) return {0, 0};
  return {static_cast<uint32_t>(57 * 2048 / vectors), static_cast<uint32_t>(rows)};
}

// Rows of a half type that a pair of CTAs holds, four vectors in each thread (row_pairs.cuh). bf16 on an H200,
// us, one CTA -> a pair: rms_norm 512 x 16384 10.6 -> 9.9, 1024 x 16384 18.9 -> 17.7, but 1024 x 12288 13.8 ->
// 14.1, 1024 x 8192 9.5 -> 9.9; layer_norm, 512 x 16384 11.5 -> 10.5, 1024 x 12288 16.5 -> 14.5, 1024 x 16384
// 19.7 -> 18.7, 2048 x 8192 18.2 -> 17.6, but 1024 x 8192 warm 7.3 -> 7.8. Where rows come to L2 ahead, all that
// fit. Four CTAs are no faster (8192 columns, rms_norm 33.4, two 33.4, four 43.8).
constexpr bool pairs_fit(int64_t vectors, int64_t rows) {
  return vectors % 256 == 0 && vectors <= 4 * kMaxThreadsX4 && rows <= int64_t{1} << 30;
}
constexpr bool rms_pairs(int64_t vectors, int64_t rows) {
  if (!pairs_fit(vectors, rows)) return false;
  return rows_ahead(vectors, rows).rows > 0 || (vectors > 1536 && rows > 2 * kLatencyVectors / vectors);
}
constexpr bool layer_pairs(int64_t vectors, int64_t rows, const FullPlan &plan) {
  if (!pairs_fit(vectors, rows) || plan.vectors != 4) return false;
  return vectors > 1024 || (vectors == 1024 && rows >= kHoldVectors / vectors);
}

// Threads on an SM that the registers of a kernel have to allow, where more of them pay: 32 registers
// a thread, 40, or 64. See resident_ctas.
inline constexpr int kAllThreads = 2048;
inline constexpr int kManyThreads = 1536;
inline constexpr int kSomeThreads = 1024;

// Registers that a thread may fill with row and parameters before the parameters are left in
// memory (L1, mostly) until they are used. 64 leaves 16 warps or more per SM.
inline constexpr int kHoldWords = 64;

// ---------------------------------------------------------------------------------------------
// Rows with a residual sum or a modulation: fused_norm.cu

// A quarter of the norms', since these kernels have two to four times its registers; then two vectors
// per thread up to twice as many.
inline constexpr int64_t kLatencyFused = kLatencyVectors / 4;

// Where all is of one half type, for what models ask for (HalfRow in fused_norm_half.cuh); kLoop:
// plan_fused_rest has it. bf16 on an H200, us, warm and cold, fused_norm.cu's kernel -> this one:
//   modulated: rms_norm 2 x 2688 x 2048 13.8, 16.4 -> 10.2, 13.3; 4096 x 3072 16.9, 17.9 -> 12.7,
//     14.5; 2 x 256 x 2048 2.83, 3.21 -> 1.84, 2.58 with two vectors (four 1.91, 2.63). Two to
//     eight rows a CTA, which share scale and shift, take up to 6 % from 2048 columns, cost up to
//     4 % at 3072 and 20 % where rows are few. One wave that asks for the next row ahead lost.
//   gated, then modulated: rms_norm 2 x 2688 x 2048 25.7, 25.9 -> 22.9, 23.0; 512 x 1536 3.03, 4.11
//     -> 1.84, 2.80. One vector 24.7, 24.7; 1.86, 2.76. Two rows a CTA 23.2, 23.2; 1.85, 2.80.
//   with a residual: add_layer_norm, add_rms_norm 4096 x 1000 7.77, 10.9 -> 6.07, 9.52; 6.71, 10.1
//     -> 5.52, 9.35 (a warp a row 5.95, 9.67; 5.85, 9.30, with a bound on registers for each);
//     16384 x 128 3.71, 5.53 -> 3.29, 5.19 (8 threads of two 3.10, 5.53); 4096 x 16384, cold, 142.5
//     -> 133.1, 135.0 -> 131.8 (eight vectors 138, 134).
constexpr RowPlan plan_fused_half(int64_t vectors, int64_t rows, bool sum, bool modulated) {
  if (!modulated && vectors <= 8) return {Shape::k8x1, kRowThreads, kRowThreads / 8};
  if (!modulated && vectors <= 16) return {Shape::k16x1, kRowThreads, kRowThreads / 16};
  if (vectors <= 64) return {Shape::kLoop, 0, 0};
  if (!modulated && vectors <= 128) return {Shape::k64x2, 64, 1};
  if (sum && vectors <= 2 * kMaxThreadsX4) return {Shape::kCtaX2, cta_threads(vectors, 2), 1};
  if (sum && modulated) return {Shape::kLoop, 0, 0};
  if (!sum && vectors <= 2 * kMaxThreadsX4 && rows <= 2 * kLatencyFused / vectors) {
    return {Shape::kCtaX2, cta_threads(vectors, 2), 1};
  }
  if (vectors <= 128) return {Shape::k32x4, kRowThreads, kRowThreads / 32};
  return {Shape::kCtaX4, cta_threads(vectors, 4), 1};
}

// norm(residual + x) of rows that a CTA holds without a vector left over, as plan_full; a layer norm has two
// vectors in each thread with the parameters, in 64 registers, an rms norm four in 80. bf16 on an H200, us,
// add_rms_norm, add_layer_norm: 4096 x 2048 18.6 -> 18.1, 18.7 -> 18.3, x 4096 35.3 -> 34.5, 35.3 -> 34.6,
// x 16384 134.0 -> 132.7, 134.3 -> 132.8, 1024 x 4096 10.2 -> 9.9, 10.5 -> 10.0. One vector in 32 registers
// 18.6, 18.7 and 35.0, 35.3; four with the parameters late 19.3, 19.6 and 35.1, 35.5.
constexpr FullPlan plan_added_full(int64_t vectors, int64_t rows, bool layer) {
  if (vectors <= 128 || vectors > 4 * kMaxThreadsX4 || rows <= kLatencyVectors / vectors) {
    return {0, false};
  }
  if (vectors <= 4 * kMaxHoldThreads) {
    if (layer) return {vectors % 64 == 0 ? 2 : 0, true};
    return {vectors % 128 == 0 ? 4 : 0, true};
  }
  return {vectors % 128 == 0 ? 4 : 0, false};
}

// The others. Fewer shapes than plan_rows, to build less. same_type: the parameters have the dtype
// of the row; sum: there is a residual. Two inputs: twice the loads of a thread are on their way,
// so that fewer vectors are enough, and more threads fit.
constexpr RowPlan plan_fused(int64_t vectors, int64_t rows, bool same_type, bool sum) {
  if (vectors <= 16 && same_type) return {Shape::k8x2, kRowThreads, kRowThreads / 8};
  if (vectors <= 64) return {Shape::k32x2, kRowThreads, kRowThreads / 32};
  if (vectors <= kMaxThreads && rows <= kLatencyFused / vectors) {
    return {Shape::kCtaX1, cta_threads(vectors, 1), 1};
  }
  if (vectors <= 128) {
    if (sum) return {Shape::kCtaX1, cta_threads(vectors, 1), 1};
    return {Shape::k32x4, kRowThreads, kRowThreads / 32};
  }
  if (vectors <= 2 * kMaxThreadsX4 && (sum || rows <= 2 * kLatencyFused / vectors)) {
    return {Shape::kCtaX2, cta_threads(vectors, 2), 1};
  }
  return {Shape::kCtaX4, cta_threads(vectors, 4), 1};
}

// What is left of the half types: rare, so with the fewest shapes.
constexpr RowPlan plan_fused_rest(int64_t vectors, bool sum) {
  if (vectors <= 64) return {Shape::k32x2, kRowThreads, kRowThreads / 32};
  if (sum && vectors <= 2 * kMaxThreadsX4) {
    return {Shape::kCtaX2, cta_threads(vectors, 2), 1};
  }
  return {Shape::kCtaX4, cta_threads(vectors, 4), 1};
}
inline constexpr int64_t kMaxFusedVectors = 4 * kMaxThreadsX4;

// ---------------------------------------------------------------------------------------------
// Rows with a gate: gated_norm.cu

// known: the kernel is compiled for one order of steps and a weight of the row's dtype. With 40
// registers, two vectors in each thread of a CTA are then as fast for few rows as one is. bf16 on an
// H200, norm first, before -> after: 4096 x 8192 63.9 us -> 48.3 (64 registers 51.4, one vector in
// 1024 threads 53.9), 8 x 8192 3.15 -> 1.90 (one vector 1.98), 32768 x 128 cold 8.95 -> 7.43, warm 6.52 ->
// 4.06 (two rows for 8 threads 8.36 and 4.86, one vector in 16 threads 7.43 and 5.60).
constexpr RowPlan plan_gated(int64_t vectors, int64_t rows, bool known) {
  if (vectors <= 16) return {Shape::k8x2, kRowThreads, kRowThreads / 8};
  if (vectors <= 32 && known) return {Shape::k16x2, kRowThreads, kRowThreads / 16};
  if (vectors <= 64) return {Shape::k32x2, kRowThreads, kRowThreads / 32};
  if (!known && vectors <= kMaxThreads && rows <= kLatencyFused / vectors) {
    return {Shape::kCtaX1, cta_threads(vectors, 1), 1};
  }
  if (vectors <= 2 * kMaxThreadsX4) return {Shape::kCtaX2, cta_threads(vectors, 2), 1};
  return {Shape::kCtaX4, cta_threads(vectors, 4), 1};
}

// ---------------------------------------------------------------------------------------------
// RoPE

inline constexpr int kHeadThreads = 128;

// With a norm, the GPU is full from so many threads on without one for each head: then kThreadHeads of
// them. Measured on an H100, 2048 tokens of 32 + 8 heads of 128 in the half style, cold and warm, in
// us: 1 head 16.37 and 12.71, 2 heads 16.41 and 12.34, 4 heads 16.8 and 13.1. Without a norm a thread
// has one head of q and one of k, however many there are: see rope_joint_kernel and rope_packed_kernel.
inline constexpr int64_t kFullThreads = int64_t{1} << 19;
inline constexpr int kThreadHeads = 2;

// CTAs of rope_packed_kernel that are on an H100 at once, eight to an SM; with up to half of them a head of
// q and one of k in each thread.
inline constexpr int64_t kPackedCtas = 8 * kFullSms, kFewPackedCtas = kPackedCtas / 2;

// CTA of a norm across heads that is too wide for registers.
inline constexpr int kLoopThreads = 512;

// ---------------------------------------------------------------------------------------------
// Cross entropy, and the sums of the parameters' gradients

// H200, bf16, 8192 x 32000: 121 us; with 512 threads 135.
inline constexpr int kCrossThreads = 256;

// CTAs of a cluster that share a row, where rows are few: a strand a warp. x 128256 without clusters and
// with them: 64 rows 14.5 us, 7.5; 256 rows 20.0, 20.2.
inline constexpr int kCrossClusterThreads = 256;
inline constexpr int64_t kCrossClusterRows = 256;
inline constexpr int kCrossClusterStrands = 8;  // from here on

// Of a thread, vectors or, where they have one element, elements. 8192 x 32000 with one, two and four
// vectors: 287 us, 252, 254.
inline constexpr int kCrossGradThreads = 256;
inline constexpr int kCrossGradVectors = 2, kCrossGradElements = 8;

// With the gradient the CTAs of a row bring that of so many bytes further on to L2: it begins some 2 us later. Else, as
// long as they compute, too little is asked for. H200, bf16, us, none, 2 MB, 4 MB, 7 MB: 8192 x 32000 264, 261,
// 257.5, 256; x 50264 429, 420, 413, 422; 4096 x 151936 618, 614, 603, 607; 65536 x 4096 270, 263, 263, 274.
inline constexpr int64_t kCrossAheadBytes = 4 << 20;

// The gradients of a norm of up to 16 rows are one launch of one cluster: bf16, 4096 columns, warm,
// layer_norm of 1, 8 and 16 rows 3.9, 2.9 and 3.7 us (two launches 4.9, 4.9 and 5.1), rms_norm 2.1,
// 2.5 and 3.9 (3.8, 3.8 and 4.1). With 32 rows two launches win: 5.7 against 6.0, 4.6 against 6.5.
inline constexpr int kNormClusterRows = 16;
inline constexpr int kNormClusterThreads = 512;
inline constexpr int kNormClusterGroups = kNormClusterThreads / 32;  // rows at once, at most

// The gradients of a norm of many rows in a half type: rows in rings of shared memory. bf16 on an H200,
// us, norm_backward.cuh's kernel -> this one: layer_norm 4096 x 2048 22.5 -> 18.9, x 4096 37.8 -> 32.5,
// x 8192 70.7 -> 59.6, x 16384 153 -> 122; rms_norm 19.0 -> 16.1, 32.2 -> 29.7, 60.4 -> 55.7.
// Stages and rows of each are in launch_ring: so many that 32 to 64 KB of an SM are on their way. With more,
// SMs that memory serves first run ahead, and the last ones end later. us, rows at once x stages: rms_norm
// 4096 x 4096 2 x 2 27.5, 4 x 2 27.9, 2 x 3 28.3, 512 rows of it 6.7, 7.3, 7.2; 4096 x 5120 1 x 3 33.4,
// 2 x 2 34.5; x 8192, by pairs of CTAs 1 x 2 52.2, alone 52.6, 2 x 2 53.7. layer_norm 4096 x 4096 2 x 2 28.9,
// 2 x 3 29.0, 1 x 4 28.6, but 512 rows 7.4, 8.1, 8.1; 4096 x 3584 2 x 3 25.4, 2 x 2 26.8; x 6144 1 x 3 41.4,
// 2 x 2 42.6; x 8192, by pairs 1 x 2 52.8, 2 x 2 54.5.
inline constexpr int kRingMemory = 200 << 10;   // of a CTA, in bytes, that the GPU must allow
inline constexpr int64_t kMinRingVectors = 65;  // of a row; narrower ones have 32 threads
// Of the whole tensor, at least: rms_norm 132 x 2048 4.6 us -> 3.6, 64 x 2048 3.8 -> 4.3.
inline constexpr int64_t kRingVectors = int64_t{1} << 15;
// CTAs of an SM. More hold more rows, and each leaves a row of partial sums: layer_norm 4096 x 2048
// with four 21.3 us, 4096 x 4096 with two 34.0.
constexpr int ring_ctas(bool centred, int64_t vectors) {
  if (centred) return vectors <= 128 ? 4 : vectors <= 256 ? 2 : 1;
  return vectors <= 256 ? 2 : 1;
}
// Teams of a CTA leave one row of partial sums together. us, cold, CTAs of one team -> one CTA of several:
// layer_norm 4096 x 1000, four 12.3 -> 11.3, 8192 x 3072, two with two stages 45.1 -> 42.7; rms_norm 4096 x
// 1000, four 10.4 -> 9.9. No better: two, layer_norm 4096 x 2048 17.1 (one 17.1), x 4096 31.2 (29.7);
// rms_norm 4096 x 2048 16.0 (15.9), x 4096 31.8 (28.8).
// A cluster's CTAs share rows of at least so many: eights for 16384 columns, layer_norm 118.2 ->
// 103.6 and rms_norm 108.4 -> 103.8, pairs for 4096 x 8192, layer_norm 56.6 -> 54.9. More stages let
// SMs run ahead: with three 114.7, of 16384 columns. Others lost, above all as 16 eights: a GPU has room
// for 15 (see kEightsAtOnce), the last then takes a second wave.
inline constexpr int64_t kSharedRingRows = 1024, kRingEights = 15;
// From so many rows on those of an eight's teams are next to each other: rms_norm 4096 x 16384 104.9, else
// 105.7; but layer_norm 1024 x 16384 33.9, else 33.2.
inline constexpr int64_t kSpreadRingRows = 4096;

// The gradients of mul_add, add_gelu and add_silu are one launch where the work is little, and clusters
// (column_teams) do not take it: a CTA has all rows of two vectors of columns. mul_add in bf16, warm,
// against two launches: 1 x 512 x 1536 3.1 us (10.0), 256 x 1024 2.2 (6.0), 2048 x 1536 7.5 (13.1). H200,
// cold, against the two launches that there are now: 1 x 2048 x 1536 10.1 (12.1), 2 x 1344 x 2048 13.5
// (14.0), 2 x 2688 x 2048 24.6 (22.2).
inline constexpr int kFewSumThreads = 512;  // 1024, and clusters of 8 CTAs, were slower
inline constexpr int kFewSumLanes = 2;
inline constexpr int64_t kFewSumVectors = int64_t{1} << 20;  // of the whole tensor, at most
// Rows of one sum, at most. From kFewSumCtas on 12 a thread, a little more than was measured; fewer
// for the activations, which take longer to compute and were not measured. Fewer CTAs would keep most
// of the GPU waiting: one row a thread.
inline constexpr int64_t kFewSumCtas = 32;
inline constexpr int kMulAddSumRows = 3072, kActivationSumRows = 1024, kFewSumRows = 256;

// More work: threads of a CTA, most of them on one row, rows that a thread has on their way, and CTAs on
// an SM (activations: one). bf16 on an H200, us, cold, against 256 threads with two rows, in three CTAs or,
// for activations, four: mul_add 2 x 2688 x 2048 22.3 -> 20.5, 1 x 4608 x 3072 26.8 -> 24.1, add_gelu
// (tanh) 2048 x 8192 31.6 -> 28.2, add_silu 31.0 -> 27.9, 4096 x 14336 90.7 -> 86.8, 4096 x 1000 11.8 ->
// 10.4. In programs of their own: activations in CTAs of 512 29.5, two rows on their way 28.8, rings of
// cp.async 28.3, but 96 at 4096 x 14336.
inline constexpr int kMulAddThreads = 256, kMulAddAhead = 4, kMulAddCtas = 2;
inline constexpr int kActivationThreads = 1024, kActivationLanes = 128, kActivationAhead = 1;

// The same in one launch: clusters of `size` CTAs that have all rows of `lanes` vectors of columns of a
// sum; 0: others. bf16 on an H200, us, cold, without them -> with: mul_add 2 x 2688 x 2048 20.8 -> 18.8,
// 8 x 1024 x 1536 23.3 -> 21.7, 1 x 4096 x 8192 53.0 -> 50.7, 2 x 1500 x 2048 15.3 -> 11.7, by eights
// 1 x 4608 x 3072 24.6 -> 23.9, 1 x 4096 x 1000 10.2 -> 9.5, 1 x 2048 x 1536 10.2 -> 7.6; add_silu
// 2048 x 8192 28.0 -> 27.2. A GPU has room for all its pairs, except for 15 eights of such CTAs on this H200:
// parts of it have an odd number of SMs. One too many takes a second wave, 40 % longer; 14 lose nothing.
// Where groups of a warp exchange their sums (8 and 16 lanes) 2 x 2688 x 2048 now takes 18.1, add_silu 26.2.
// Pairs have whole lines of a row, eights whole sectors, as few of these share a line: mul_add 1 x 4608 x
// 3072 in pairs of 6 lanes 26.2. Activations lose where a piece of a row is longer (4096 x 14336 86.9 ->
// 88.4), and in eights.
inline constexpr int kMulAddTeamThreads = 512, kActivationPairLanes = 16;
// Rows of a sum and vectors of the tensor from which they take it, or rows that are enough. mul_add 1 x 512 x
// 1536 3.9 -> 4.2 and 1 x 512 x 2048 4.3 -> 4.6, but 1 x 512 x 4096 6.1 -> 6.1 (warm 4.7 -> 4.2), 1 x 256 x
// 8192 7.5 -> 6.0, 1 x 768 x 1024 4.5 -> 4.3; add_silu 512 x 4096 6.2 -> 6.9, 1024 x 4096 10.7 -> 9.9, 512 x
// 8192 11.5 -> 9.6.
inline constexpr int64_t kTeamRows = 256;
inline constexpr int64_t kMulAddTeamVectors = int64_t{1} << 18, kMulAddTeamRows = 768;
inline constexpr int64_t kActivationTeamVectors = int64_t{1} << 19, kActivationTeamRows = 1024;
inline constexpr int64_t kPairs = kFullSms / 2, kEightsAtOnce = 14;
struct ColumnTeams {
  int size, lanes;
};
constexpr ColumnTeams column_teams(int64_t vectors, int64_t sums, int64_t most_lanes, bool eights) {
  // Lanes, a multiple of `unit`, with which up to `clusters` have all columns; 0 where under 85 % of them
  // are busy.
  const auto lanes = [=](int64_t clusters, int64_t unit) {
    const int64_t chunks = clusters / sums;
    if (chunks == 0) return int64_t{0};
    const int64_t even = (vectors + chunks - 1) / chunks, n = (even + unit - 1) / unit * unit;
    return n <= most_lanes && 20 * vectors * sums >= 17 * clusters * n ? n : int64_t{0};
  };
  const int64_t of_pairs = lanes(kPairs, 8);
  if (of_pairs > 0) return {2, static_cast<int>(of_pairs)};
  const int64_t of_eights = eights ? lanes(kEightsAtOnce, 2) : 0;
  return {of_eights > 0 ? 8 : 0, static_cast<int>(of_eights)};
}

// Pairs of mul_add that bring rows to L2 for each other (BroughtRows), with two rows of a thread on their way
// instead of four. bf16 on an H200, us, without -> with: 2 x 2688 x 2048 19.6 -> 19.1, 1 x 4096 x 4096 27.7 ->
// 27.1, 2 x 4096 x 2048 27.8 -> 27.0, 2 x 8064 x 2048 53.0 -> 49.6, 1 x 8192 x 8192 102.9 -> 97.4, 1 x 16384 x
// 4096 107.2 -> 96.7, 4 x 8192 x 3072 157.8 -> 143.5; fp32 2 x 8064 x 2048 99.7 -> 93.6, 1 x 4096 x 8192 102.2
// -> 97.9. Not what L2 holds (1 x 2048 x 4096 warm 13.1 -> 14.3), nor few rows, or pieces of two lines and more
// up to 2^21 vectors (2 x 1024 x 8192 27.6 -> 27.7, fp32 1 x 2048 x 4096 26.0 -> 26.3, 8 x 1024 x 1536 38.8 ->
// 39.5), nor eights (1 x 4608 x 3072 24.1 -> 24.5). With three on their way 4 x 8192 x 3072 176.
inline constexpr int kBringingAhead = 2;
constexpr bool pairs_bring(int64_t vectors, int64_t reduced, int64_t sums, int lanes) {
  const int64_t all = sums * reduced * vectors;
  if (vectors % 64 != 0 || reduced < 2048) return false;
  return all > (lanes == 8 ? kHoldVectors / 2 : kHoldVectors);
}

// 32 columns a CTA, of half the threads where half as many rows are enough. bf16 gradients' partial sums,
// warm, in us, 528, 264 and 132 rows of 2048 columns: 2.0, 1.6 and 1.4; 1024 threads with a column each
// 2.3, 1.9 and 1.6, 256 threads of four 2.6 for 264. With 132 rows 256 threads are faster after the
// kernel that leaves them: layer_norm 4096 x 8192 56.1 -> 55.1, x 16384 107.9 -> 106.0.
inline constexpr int kSumThreads = 512;
inline constexpr int kSumRows = 320;  // read at once, where columns are aligned

// ---------------------------------------------------------------------------------------------
// Rows of logits: softmax, argmax, topk, sample

// Rows that stay in registers from the load to the store; wider ones go by parts.
inline constexpr int64_t kMostHeld = 4 * kMaxThreadsX4;

constexpr RowPlan plan_held(int64_t vectors) {
  if (vectors <= 16) return {Shape::k8x2, kRowThreads, kRowThreads / 8};
  if (vectors <= 64) return {Shape::k32x2, kRowThreads, kRowThreads / 32};
  if (vectors <= 128) return {Shape::k32x4, kRowThreads, kRowThreads / 32};
  return {Shape::kCtaX4, cta_threads(vectors, 4), 1};
}

inline constexpr int kPartThreads = 512;       // a CTA that takes all parts of a row
inline constexpr int kHeldParts = kPartThreads / 32;  // a part per warp; softmax.cu keeps so many
inline constexpr int kSplitThreads = 128;      // a CTA that takes four parts
inline constexpr int kSplitVectors = 4;        // of each thread, where the results are written
inline constexpr int kWaveVectors = 4;         // of each lane at a time

// Many rows: a CTA brings that of so many bytes further on to L2, which begins a little later. 8192 x 32000 in
// bf16 on an H200, us: none 256, 2 MB 251, 4 MB 253, 7 MB 255; but 300 rows 14.2 and 15.0. By clusters 128256
// columns 257.7 and 256.1, 50264 columns 399 and 401: not used there.
inline constexpr int64_t kSoftmaxAheadBytes = 2 << 20, kSoftmaxAheadRows = 8 * kFullSms;

inline constexpr int kArgmaxThreads = 512;
inline constexpr int kArgmaxClusterThreads = 256;
inline constexpr int kLongVectors = 8;   // of a lane in a wave
inline constexpr int kShortVectors = 2;  // where rows are narrow, or few

// What is chosen of a row: few rows, which leave most SMs idle, are shared by clusters, more have a CTA with
// an SM of an H100 to itself.
inline constexpr int kSelectVectors = 2;  // of each thread at a time
inline constexpr int64_t kClusterRows = 16, kTopClusterRows = 24;
inline constexpr int64_t kClusterVectors = 1024;  // of a row, the fewest
inline constexpr int64_t kCtaRows = kFullSms;
inline constexpr int kMostWanted = 192;  // k; more would leave too few of 256 threads

// Many rows as a stream through shared memory: row_flow.cuh.
inline constexpr int64_t kMostFlowWanted = 64;  // k; more would be too many for the list
inline constexpr int64_t kFlowWidth = 1024;     // vectors of a row, the fewest

// Two warps rank a row where there is room for up to kFewRankers rows, where no more are an SM's, or where
// rows are wide and many. bf16 on an H200, us, one and two warps: topk 50 of 8192 x 32000 130.0 and 128.0,
// 512 x 128256 38.1 and 36.2, but 4096 x 12000 36.5 and 39.1; sample 127.4 and 125.7, 40.3 and 38.7, but
// 45.0 and 53.7.
inline constexpr int64_t kFewRankers = 8, kPairVectors = 3072, kPairRows = 16;  // rows of an SM

// ---------------------------------------------------------------------------------------------
// Groups of channels: group_norm

namespace group_norms {

inline constexpr int kThreads = 256;  // of the kernels over NCHW
inline constexpr int kUnroll = 4;     // NCHW: vectors of a thread at once

// Vectors of a group that is read once: up to here one CTA is as fast as a cluster; most in one CTA
// where there are no clusters; most in a cluster.
inline constexpr int64_t kOneCta = 512, kMostAlone = 2048, kMostShared = 20480;

// Clusters. A group is in parts of kThreads threads each: few up to kMostFew vectors, else most. They are
// two CTAs, or one each where groups are too few to fill the GPU. The bits are the same for any number of
// CTAs. Figures: docs/gpus.md.
inline constexpr int64_t kMostFew = 10240, kManyGroups = 64;
inline constexpr int kFewParts = 4, kMostParts = 8;

// Spread over CTAs that wait for each other (group_spread.cuh).
inline constexpr int kSpreadThreads = 1024;  // of an SM
// A run: vectors that a thread adds up. It has one in registers, and where CTAs are several waves one in
// shared memory, as if it were two threads. Groups of up to kMostSmall vectors are in parts of 256 runs,
// larger ones of 512: bf16 on an H200, us, 1 x 512 x 65536 39.8, so 41; 2 x 640 x 16384 29, so 26.2.
inline constexpr int kRun = 8;
inline constexpr int64_t kMostSmall = 64 * 1024;
// The first wave asks for a group when memory has had the time for those before it: 4.3 TB/s, at 1.85 GHz.
inline constexpr int kBytesPerClock = 2300;
// 1 x 128 x 1048576 with 0, 4, 8, 12, 16, 24 MB: 165, 148, 146, 147, 148, 167.
inline constexpr int64_t kSpreadAhead = 8 << 20;
inline constexpr int kGroupsAtOnce = 2;  // on the GPU, at least

// Read twice, the second time from L2 (group_overlap.cuh).
// A part: kUnroll vectors for each thread of a CTA. Groups of more than kMostNarrow vectors take wide CTAs.
inline constexpr int kNarrowCta = 256, kWideCta = 512;
inline constexpr int64_t kMostNarrow = 256 * 1024;
// Threads of an SM; of fp32, whose SiLU is the accurate one, fewer have the registers.
template <class T>
inline constexpr int kOverlapThreads = sizeof(T) == 4 ? 1024 : 1536;
// Threads' worth of parts, of an SM, that the first pass is ahead besides a group: 13 and 10 MB on an
// H200. With less more CTAs wait, with more L2 loses what it should keep. 1 x 128 x 1048576 in bf16, us, 7
// to 16 MB, wide: 171, 162, 161, 163, 168, 181.
template <int kCta>
inline constexpr int kAheadThreads = kCta == kNarrowCta ? 1536 : 1152;
// Vectors of a group at most: 8 MB. What is read and written meanwhile has to stay in L2 beside it: six
// times as much is asked for. With groups of 16 MB an H200 gained nothing.
inline constexpr int64_t kMostOverlap = 512 * 1024, kL2Share = 6;

// Read twice, in three launches (group_parts.cuh).
inline constexpr int64_t kMostReadParts = 256;  // of a group

// Channels last (group_last.cuh). Threads of a CTA, and where a slab has more vectors; threads of an SM that
// registers have to allow; rows of a thread at once. A thread has kLastRows rows at least, or kLastFewRows
// where that makes no more than kLastFewCtas CTAs of a sample, of which there are kLastCtas at most. bf16
// on an H200, us, 2 x 320 x 16384, 2 x 640 x 4096, 2 x 1280 x 1024, 1 x 512 x 16384, 1 x 128 x 1048576: 27.5,
// 15.7, 11.3, 18.6, 231; of four rows at once 29.5, 16.9, 11.5, 19.7, 238; of 10 rows at least 28.6, 20.8,
// 12.5, 18.6, 231; with twice the CTAs the fourth 18.4, 1 x 128 x 262144 68.5 for 63.0.
inline constexpr int kLastUsual = 256, kLastThreads = 512, kLastResident = 512, kLastUnroll = 8;
inline constexpr int64_t kLastRows = 16, kLastFewRows = 8, kLastFewCtas = 132, kLastCtas = 264;

}  // namespace group_norms

// ---------------------------------------------------------------------------------------------
// AdamW

// CTA for fp32 parameters without masters or amsgrad, vectors of a thread, and threads on an SM that
// registers have to allow. 2 KB of each tensor for a CTA: its CTAs pass over memory in order. H200, us,
// 512 threads of two vectors -> this: 32 tensors of 2^22 916 -> 886, 32 of 2^17 31.4 -> 30.2, 256 of
// 4096 9.30 -> 8.97 (warm 5.35 -> 5.13), one of 2^20 9.28 -> 9.02 (5.24 -> 5.09). 256 threads of one
// vector, 128 of two the same; 256 of two 913, 512 of one 919, chunks of four to 32 such steps 920 to
// 941. The others were not measured, and stay with kListThreads of two vectors.
inline constexpr int kPlainAdamWThreads = 128, kPlainAdamWVectors = 1, kPlainAdamWResident = 1024;

}  // namespace hfp::cuda
