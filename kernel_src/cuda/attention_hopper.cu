// attention_hopper.cu: attention of half types with wgmma (sm_90a). A warp copies blocks of keys and of
// values, in turns, into a ring in shared memory; two or three warpgroups of 64 queries each take them from
// there, each at its own pace, so that one multiplies while another one computes exponentials. Shah et al.,
// arXiv:2407.08608.
#include "attention_hopper.h"

#include <cstdlib>
#include <cstring>

#include "async_copy.cuh"
#include "attention.cuh"

namespace hfp::cuda {
namespace {

constexpr int kKeys = 128;      // of a block
constexpr int kSlots = 4;       // of the ring: two of keys, two of values
constexpr int kInFlight = 2;    // blocks that are on their way
constexpr int kPanel = 64;      // columns that are 128 bytes of a row; a wider head has two panels
constexpr int kRowBytes = 128;

template <int kDim>
struct Shape {
  static constexpr int kPanels = kDim / kPanel;
  static constexpr int kGroups = kDim == 64 ? 3 : 2;  // warpgroups
  static constexpr int kQueries = kGroups * 64;
  static constexpr int kThreads = kGroups * 128 + 128;  // one more warpgroup, whose first warp copies
  // Registers of a thread, of 65536 in all: at the start 128 or 168, then the copying warpgroup gives some
  // of its own to the others.
  static constexpr int kRegisters = kDim == 64 ? 160 : 240, kCopyRegisters = 32;
  static constexpr int kPanelBytes = kKeys * kRowBytes;
  static constexpr int kSlotBytes = kPanels * kPanelBytes;
  static constexpr int kGroupBytes = kPanels * 64 * kRowBytes;  // of the queries of a warpgroup
  // 1024 for the alignment of what is swizzled
  static constexpr int kBytes = 1024 + kGroups * kGroupBytes + kSlots * kSlotBytes;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Where chunk c of 16 bytes of row r lies in a panel: the swizzle of 128 bytes.
__device__ __forceinline__ uint32_t place(int r, int c) {
  return static_cast<uint32_t>(r * kRowBytes + ((c ^ (r & 7)) * 16));
}

// What wgmma is told of a panel: 8 rows of 128 bytes after each other, swizzled. `across`: bytes from one
// panel to the next, where the columns are those of the result and there are two.
__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t across) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(across >> 4) << 16 |
         static_cast<uint64_t>(1024 >> 4) << 32 | uint64_t{1} << 62;
}

// d = a b (+ d): 64 queries, 128 keys, 16 columns of each; both in shared memory.
// d += a b: 64 queries, 64 or 128 columns of the values, 16 keys; a in registers, b row by row.
template <class T>
__device__ __forceinline__ void scores_128(float (&d)[64], uint64_t a, uint64_t b, int added) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1, 0, 0;\n}\n"
        :
            "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
            "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
            "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
            "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
            "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
            "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
            "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
            "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(added));
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1, 0, 0;\n}\n"
        :
            "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
            "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
            "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
            "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
            "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
            "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
            "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
            "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(added));
  }
}

template <class T>
__device__ __forceinline__ void weighted_64(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int added) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}\n"
        :
            "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
            "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
            "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
            "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(added));
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}\n"
        :
            "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
            "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
            "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
            "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(added));
  }
}

template <class T>
__device__ __forceinline__ void weighted_128(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int added) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"
        :
            "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
            "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
            "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
            "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
            "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
            "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
            "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
            "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(added));
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"
        :
            "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
            "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
            "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
            "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
            "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
            "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
            "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
            "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(added));
  }
}

__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// The compiler must not keep these elsewhere while wgmma writes them.
template <int N>
__device__ __forceinline__ void hold(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ __forceinline__ void init_barrier(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (done == 0);
}

// What was copied is seen by wgmma.
__device__ __forceinline__ void show_to_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The warp that copies: tile 2 j is block j of the keys, tile 2 j + 1 of the values.
template <class T, int kDim>
__device__ __forceinline__ void produce(const AttentionArgs &a, const AttentionUnit &unit, char *ring,
                                        uint32_t full, uint32_t empty, int begin, int all) {
  using S = Shape<kDim>;
  constexpr int kChunks = kDim / 8, kRowsAtOnce = 32 / kChunks < 1 ? 1 : 32 / kChunks;
  const int lane = threadIdx.x % 32;
  const int row = lane / kChunks, chunk = lane % kChunks;
  const int tiles = all > begin ? 2 * ((all - begin + kKeys - 1) / kKeys) : 0;
  const T *of_k = static_cast<const T *>(a.k) + unit.k_offset(a) + chunk * 8;
  const T *of_v = static_cast<const T *>(a.v) + unit.v_offset(a) + chunk * 8;
  const bool k_there = chunk * 8 < a.dim, v_there = chunk * 8 < a.value_dim;
  const int panel = chunk / 8 * S::kPanelBytes;
  for (int tile = 0; tile < tiles; ++tile) {
    const int slot = tile % kSlots;
    if (tile >= kSlots) wait(empty + slot * 8, (tile / kSlots + 1) & 1);
    const bool values = (tile & 1) != 0;
    const int64_t step = values ? a.v_row : a.k_row;
    const T *from = (values ? of_v : of_k) + (begin + tile / 2 * kKeys + row) * step;
    const bool column = values ? v_there : k_there;
    const int left = all - begin - tile / 2 * kKeys;
    char *to = ring + slot * S::kSlotBytes + panel;
#pragma unroll 4
    for (int r = row; r < kKeys; r += kRowsAtOnce, from += kRowsAtOnce * step) {
      const bool there = column && r < left;
      copy_later(reinterpret_cast<uint4 *>(to + place(r, chunk % 8)),
                 there ? from : static_cast<const T *>(a.k), there ? 16u : 0u);
    }
    end_copies();
    if (tile >= kInFlight) {
      wait_for_copies<kInFlight>();
      show_to_products();
      arrive(full + (tile - kInFlight) % kSlots * 8);
    }
  }
  wait_for_copies<0>();
  show_to_products();
  for (int tile = tiles > kInFlight ? tiles - kInFlight : 0; tile < tiles; ++tile) {
    arrive(full + tile % kSlots * 8);
  }
}

#endif

template <class T, int kDim>
__global__ void __launch_bounds__(Shape<kDim>::kThreads, 1)
    attention_hopper_kernel(const __grid_constant__ AttentionArgs a, int64_t blocks, bool paired) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<kDim>;
  extern __shared__ char memory[];
  __shared__ uint64_t barriers[2 * kSlots];
  __shared__ int64_t masks[S::kQueries];  // where a row's begins
  const AttentionUnit unit(a, blockIdx.x, blocks, S::kQueries);
  if (unit.first >= unit.rows) return;
  char *aligned = memory + (1024 - shared_address(memory) % 1024) % 1024;
  char *ring = aligned + S::kGroups * S::kGroupBytes;
  const uint32_t full = shared_address(barriers), empty = full + kSlots * 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) {
      init_barrier(full + i * 8, 32);
      init_barrier(empty + i * 8, S::kGroups * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (a.mask != nullptr) {
    for (int r = threadIdx.x; r < S::kQueries; r += S::kThreads) {
      masks[r] = unit.first + r < unit.rows ? unit.mask_offset(a, unit.first + r) : 0;
    }
  }
  __syncthreads();
  const int all = unit.most(a, S::kQueries), begin = unit.begin(a, S::kQueries, kKeys);
  const int group = threadIdx.x / 128;
  if (group == S::kGroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::kCopyRegisters));
    if (threadIdx.x % 128 < 32) produce<T, kDim>(a, unit, ring, full, empty, begin, all);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::kRegisters));

  const int fewest = unit.fewest(a, S::kQueries), highest_low = unit.floor_of(a, all);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  char *own = aligned + group * S::kGroupBytes;
  for (int i = threadIdx.x % 128; i < 64 * kDim / 8; i += 128) {
    const int r = i / (kDim / 8), c = i % (kDim / 8);
    const int64_t row = unit.first + group * 64 + r;
    const bool there = row < unit.rows && c * 8 < a.dim;
    const T *from = static_cast<const T *>(a.q) + (there ? unit.q_offset(a, row) + c * 8 : 0);
    copy_later(reinterpret_cast<uint4 *>(own + c / 8 * (64 * kRowBytes) + place(r, c % 8)), from,
               there ? 16u : 0u);
  }
  end_copies();
  wait_for_copies<0>();
  show_to_products();
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");

  // Accumulators: rows 16 warp + lane / 4 (+ 8), columns 2 (lane % 4) (+ 1) of every 8.
  const int first_row = group * 64 + warp * 16 + lane / 4;
  int limit[2], low[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t row = unit.first + first_row + h * 8;
    limit[h] = row < unit.rows ? unit.limit(a, row) : 0;
    low[h] = unit.floor_of(a, limit[h]);
  }
  constexpr float kLog2E = 1.4426950408889634f;
  const bool capped = a.softcap > 0.0f;
  const bool scaled_first = capped || a.mask != nullptr || !(a.scale > 0.0f);
  const float first_scale = a.scale * kLog2E, cap_scale = capped ? first_scale / a.softcap : 0.0f;
  const float scale = scaled_first ? 1.0f : first_scale;
  float out[kDim / 2], top[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) out[i] = 0.0f;
  const uint32_t q_at = shared_address(own), ring_at = shared_address(ring);

  const int steps = (all - begin + kKeys - 1) / kKeys;
  for (int j = 0; j < steps; ++j) {
    const int first = begin + j * kKeys, k_slot = 2 * j % kSlots, v_slot = k_slot + 1;
    const uint32_t parity = (2 * j / kSlots) & 1;
    float s[kKeys / 2];
    wait(full + k_slot * 8, parity);
    hold(s);
    begin_products();
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      const uint32_t q_step = d / 4 * (64 * kRowBytes) + d % 4 * 32;
      const uint32_t k_step = k_slot * S::kSlotBytes + d / 4 * S::kPanelBytes + d % 4 * 32;
      scores_128<T>(s, descriptor(q_at + q_step, 16), descriptor(ring_at + k_step, 16), d > 0);
    }
    end_products();
    hold(s);
    if (lane == 0) arrive(empty + k_slot * 8);

    if (capped) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        s[i] = a.softcap * kLog2E * tanh_of_log2(s[i] * cap_scale);
      }
    }
    if (scaled_first || first + kKeys > fewest || first < highest_low) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        const int key = first + i / 4 * 8 + (lane & 3) * 2 + (i & 1), h = i / 2 & 1;
        float x = s[i];
        if (scaled_first && !capped) x *= first_scale;
        if (key >= limit[h] || key < low[h]) {
          x = -INFINITY;
        } else if (a.mask != nullptr) {
          x = masked(x, mask_value(a, masks[first_row + h * 8] + key * a.mask_col));
        }
        s[i] = x;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = top[h];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        most = fmaxf(most, fmaxf(s[4 * n + 2 * h], s[4 * n + 2 * h + 1]));
      }
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      const float shift = most == -INFINITY ? 0.0f : most * scale;
      const float factor = power_of_two(fmaf(top[h], scale, -shift));
      const bool higher = __any_sync(0xffffffffu, most != top[h]);
      top[h] = most;
      float added = 0.0f;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 4 * n + 2 * h; i < 4 * n + 2 * h + 2; ++i) {
          s[i] = power_of_two(fmaf(s[i], scale, -shift));
          added += s[i];
        }
      }
      total[h] = fmaf(total[h], factor, added);  // of this lane's keys
      if (higher) {
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          out[4 * n + 2 * h] *= factor;
          out[4 * n + 2 * h + 1] *= factor;
        }
      }
    }
    uint32_t weights[kKeys / 16][4];
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[n][i] = pack<T>(s[8 * n + 2 * i], s[8 * n + 2 * i + 1]);
    }
    wait(full + v_slot * 8, parity);
    hold(out);
    begin_products();
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      const uint32_t step = v_slot * S::kSlotBytes + n * 16 * kRowBytes;
      const uint64_t b = descriptor(ring_at + step, S::kPanelBytes);
      if constexpr (kDim == 64) weighted_64<T>(out, weights[n], b, 1);
      else weighted_128<T>(out, weights[n], b, 1);
    }
    end_products();
    hold(out);
    if (lane == 0) arrive(empty + v_slot * 8);
  }

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float whole = total[h];
    whole += __shfl_xor_sync(0xffffffffu, whole, 1);
    whole += __shfl_xor_sync(0xffffffffu, whole, 2);
    const int64_t row = unit.first + first_row + h * 8;
    if (row >= unit.rows) continue;
    const bool nothing = top[h] == -INFINITY && whole == 0.0f;
    const float share = nothing ? 0.0f : 1.0f / whole;
    const int value_dim = static_cast<int>(a.value_dim);
    T *to = static_cast<T *>(a.out) + unit.out_offset(a, row);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const int column = n * 8 + (lane & 3) * 2;
      const uint32_t both = pack<T>(out[4 * n + 2 * h] * share, out[4 * n + 2 * h + 1] * share);
      if (paired) {
        if (column < value_dim) *reinterpret_cast<uint32_t *>(to + column) = both;
      } else {
        uint16_t *one = reinterpret_cast<uint16_t *>(to + column);
        if (column < value_dim) one[0] = static_cast<uint16_t>(both);
        if (column + 1 < value_dim) one[1] = static_cast<uint16_t>(both >> 16);
      }
    }
    if ((lane & 3) == 0) {
      constexpr float kLn2 = 0.6931471805599453f;
      a.lse[unit.lse_offset(a, row)] =
          nothing ? -INFINITY : (top[h] * scale + log2f(whole)) * kLn2;
    }
  }
#endif
}

template <class T, int kDim>
int32_t launch(const AttentionArgs &a, bool paired, cudaStream_t stream) {
  using S = Shape<kDim>;
  return launch_attention(a, attention_hopper_kernel<T, kDim>, S::kQueries, S::kThreads, S::kBytes,
                          stream, paired);
}

template <class T>
int32_t sized(const AttentionArgs &a, bool paired, cudaStream_t stream) {
  const bool narrow = a.dim <= 64 && a.value_dim <= 64;
  return narrow ? launch<T, 64>(a, paired, stream) : launch<T, 128>(a, paired, stream);
}

}  // namespace

// Asked once: the kernel of a build without sm_90a is empty, and has hardly a register. Only where
// HFPATCH_ATTENTION_WGMMA is 1, until it has been compared on a GPU.
bool has_hopper_attention() {
  static const bool there = [] {
    const char *wanted = std::getenv("HFPATCH_ATTENTION_WGMMA");
    if (!wanted || std::strcmp(wanted, "1") != 0) return false;
    cudaFuncAttributes of{};
    const auto *kernel = reinterpret_cast<const void *>(&attention_hopper_kernel<__half, 64>);
    if (capability_major() != 9) return false;
    if (cudaFuncGetAttributes(&of, kernel) != cudaSuccess) {
      cudaGetLastError();
      return false;
    }
    return of.numRegs > 64;
  }();
  return there;
}

int32_t attention_hopper(const AttentionArgs &a, bool paired, void *stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  return a.type == DType::F16 ? sized<__half>(a, paired, on) : sized<__nv_bfloat16>(a, paired, on);
}

}  // namespace hfp::cuda
