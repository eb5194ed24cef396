// attention_hopper.cu: attention of half types with wgmma (sm_90a). A warpgroup copies blocks of keys and of
// values, in turns, into a ring in shared memory; two or three warpgroups of 64 queries each take them from
// there, each at its own pace, so that one multiplies while another one computes exponentials. Blocks that
// a mask hides are left out. Shah et al., arXiv:2407.08608.
#include "attention_hopper.h"

#include <cstdlib>
#include <cstring>

#include "async_copy.cuh"
#include "attention_mask.cuh"

namespace hfp::cuda {
namespace {

constexpr int kInFlight = 1;  // blocks that are on their way beside the one that is copied
constexpr int kPanel = 64;  // columns that are 128 bytes of a row; a wider head has two panels or four
constexpr int kRowBytes = 128;

template <int kDim>
struct Shape {
  static constexpr int kPanels = kDim / kPanel;
  static constexpr int kKeys = kDim == 256 ? 64 : 128;  // of a block
  static constexpr int kGroups = kDim == 64 ? 3 : 2;  // warpgroups
  static constexpr int kQueries = kGroups * 64;
  static constexpr int kThreads = kGroups * 128 + 128;  // one more warpgroup, which copies
  // Registers of a thread: at the start 128 or 168, then the copying warpgroup gives some of its own to the
  // others. Who asks for more than the CTA began with waits forever.
  static constexpr int kStartRegisters = kDim == 64 ? 128 : 168;
  static constexpr int kRegisters = kDim == 64 ? 160 : 232, kCopyRegisters = kDim == 64 ? 32 : 40;
  static_assert(kGroups * kRegisters + kCopyRegisters <= (kGroups + 1) * kStartRegisters);
  static constexpr int kSlots = kDim == 64 ? 8 : 4;  // of the ring: half of keys, half of values
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

// d = a b (+ d): 64 queries, 64 or 128 keys, 16 columns of each; both in shared memory.
// d += a b: 64 queries, 64 to 256 columns of the values, 16 keys; a in registers, b row by row.
template <class T>
__device__ __forceinline__ void multiply(float (&d)[32], uint64_t a, uint64_t b, int added) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, 0, 0;\n}\n"
        :
            "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
            "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
            "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
            "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(added));
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, 0, 0;\n}\n"
        :
            "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
            "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
            "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
            "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(added));
  }
}

template <class T>
__device__ __forceinline__ void multiply(float (&d)[64], uint64_t a, uint64_t b, int added) {
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
__device__ __forceinline__ void multiply(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int added) {
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
__device__ __forceinline__ void multiply(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int added) {
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

template <class T>
__device__ __forceinline__ void multiply(float (&d)[128], const uint32_t (&a)[4], uint64_t b, int added) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, {%128, %129, %130, %131}, %132, p, 1, 1, 1;\n}\n"
        :
            "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
            "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
            "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
            "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
            "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
            "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
            "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
            "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
            "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
            "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
            "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
            "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
            "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
            "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
            "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
            "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(added));
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, {%128, %129, %130, %131}, %132, p, 1, 1, 1;\n}\n"
        :
            "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
            "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
            "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
            "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
            "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
            "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
            "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
            "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
            "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
            "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
            "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
            "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
            "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
            "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
            "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
            "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
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

// The warpgroup that copies: tile 2 n is the n-th block of the keys, tile 2 n + 1 of the values. One warp
// alone would be too slow for those that multiply.
template <class T, int kDim, class Next>
__device__ __forceinline__ void produce(const AttentionArgs &a, const AttentionUnit &unit, char *ring,
                                        uint32_t full, uint32_t empty, int begin, int all, int steps,
                                        Next next_of) {
  using S = Shape<kDim>;
  constexpr int kKeys = S::kKeys, kSlots = S::kSlots;
  constexpr int kChunks = kDim / 8, kRowsAtOnce = 128 / kChunks;
  const int row = threadIdx.x % 128 / kChunks, chunk = threadIdx.x % kChunks;
  const T *of_k = static_cast<const T *>(a.k) + unit.k_offset(a) + chunk * 8;
  const T *of_v = static_cast<const T *>(a.v) + unit.v_offset(a) + chunk * 8;
  const bool k_there = chunk * 8 < a.dim, v_there = chunk * 8 < a.value_dim;
  const int panel = chunk / 8 * S::kPanelBytes;
  int tile = 0;
  for (int j = next_of(0); j < steps; j = next_of(j + 1)) {
    for (int values = 0; values < 2; ++values, ++tile) {
      const int slot = tile % kSlots;
      if (tile >= kSlots) wait(empty + slot * 8, (tile / kSlots + 1) & 1);
      const int64_t step = values ? a.v_row : a.k_row;
      const T *from = (values ? of_v : of_k) + (begin + j * kKeys + row) * step;
      const bool column = values ? v_there : k_there;
      const int left = all - begin - j * kKeys;
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
  }
  wait_for_copies<0>();
  show_to_products();
  for (int last = tile > kInFlight ? tile - kInFlight : 0; last < tile; ++last) {
    arrive(full + last % kSlots * 8);
  }
}

#endif

// The rows of a warpgroup. Folded, a CTA has a tile of 64 rows from either end: of a causal call the first
// rows see the fewest keys and the last ones the most, and all CTAs have as much to do.
template <int kQueries>
__device__ __forceinline__ AttentionUnit unit_of_group(const AttentionUnit &unit, int group, bool folded) {
  AttentionUnit own = unit;
  if (folded) {
    const int64_t tiles = (unit.rows + 63) / 64, low = unit.first / kQueries, high = tiles - 1 - low;
    own.first = group == 0 ? high * 64 : low < high ? low * 64 : unit.rows;
  } else {
    own.first = unit.first + group * 64;
  }
  return own;
}

template <class T, int kDim, bool kMasked>
__global__ void __launch_bounds__(Shape<kDim>::kThreads, 1)
    attention_hopper_kernel(const __grid_constant__ AttentionArgs a, int64_t blocks, bool paired,
                            MaskReads reads, bool folded) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<kDim>;
  constexpr int kKeys = S::kKeys, kSlots = S::kSlots;
  using Blocks = MaskBlocks<S::kQueries, kKeys, S::kGroups * 4>;
  extern __shared__ char memory[];
  __shared__ uint64_t barriers[2 * kSlots];
  __shared__ __align__(16) char mask_memory[kMasked ? sizeof(Blocks) : 1];
  Blocks &mask = *reinterpret_cast<Blocks *>(mask_memory);
  const AttentionUnit unit(a, blockIdx.x, blocks, S::kQueries);
  if (unit.first >= unit.rows) return;
  char *aligned = memory + (1024 - shared_address(memory) % 1024) % 1024;
  char *ring = aligned + S::kGroups * S::kGroupBytes;
  const uint32_t full = shared_address(barriers), empty = full + kSlots * 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) {
      init_barrier(full + i * 8, 128);
      init_barrier(empty + i * 8, S::kGroups * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  int all = unit.most(a, S::kQueries);
  if (folded) {
    all = 0;
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      const AttentionUnit one = unit_of_group<S::kQueries>(unit, g, true);
      if (one.first < one.rows) all = max(all, one.most(a, 64));
    }
  }
  const int begin = unit.begin(a, S::kQueries, kKeys);
  const int steps = (all - begin + kKeys - 1) / kKeys;
  const bool known = kMasked && Blocks::looks_at(steps);
  if constexpr (kMasked) mask.template begin<T>(a, unit, begin, all, known, reads.eight);
  __syncthreads();
  const auto next_of = [&](int j) { return known ? mask.next(j, steps) : j; };
  const int group = threadIdx.x / 128;
  if (group == S::kGroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::kCopyRegisters));
    produce<T, kDim>(a, unit, ring, full, empty, begin, all, steps, next_of);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::kRegisters));

  const AttentionUnit mine = unit_of_group<S::kQueries>(unit, group, folded);
  const int end = mine.first < mine.rows ? mine.most(a, 64) : 0;  // no row of this warpgroup sees more
  const int fewest = mine.first < mine.rows ? mine.fewest(a, 64) : 0, highest_low = unit.floor_of(a, all);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  char *own = aligned + group * S::kGroupBytes;
  for (int i = threadIdx.x % 128; i < 64 * kDim / 8; i += 128) {
    const int r = i / (kDim / 8), c = i % (kDim / 8);
    const int64_t row = mine.first + r;
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
  const int own_row = warp * 16 + lane / 4, first_row = group * 64 + own_row;
  int limit[2], low[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t row = mine.first + own_row + h * 8;
    limit[h] = row < unit.rows ? unit.limit(a, row) : 0;
    low[h] = unit.floor_of(a, limit[h]);
  }
  constexpr float kLog2E = 1.4426950408889634f;
  const bool capped = a.softcap > 0.0f;
  const bool scaled_first = capped || kMasked || !(a.scale > 0.0f);
  const float first_scale = a.scale * kLog2E, factor_first = scaled_first && !capped ? first_scale : 1.0f;
  const float cap_scale = capped ? first_scale / a.softcap : 0.0f;
  const float scale = scaled_first ? 1.0f : first_scale;
  float out[kDim / 2], top[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) out[i] = 0.0f;
  const uint32_t q_at = shared_address(own), ring_at = shared_address(ring);

  int tile = 0;
  for (int j = next_of(0); j < steps; j = next_of(j + 1), tile += 2) {
    const int first = begin + j * kKeys, k_slot = tile % kSlots, v_slot = k_slot + 1;
    const uint32_t parity = (tile / kSlots) & 1;
    if (folded && first >= end) {  // the other warpgroup sees these keys
      wait(full + k_slot * 8, parity);
      if (lane == 0) arrive(empty + k_slot * 8);
      wait(full + v_slot * 8, parity);
      if (lane == 0) arrive(empty + v_slot * 8);
      continue;
    }
    const bool changed = kMasked && !(known && !mask.is_set(mask.changed, j));
    float s[kKeys / 2];
    wait(full + k_slot * 8, parity);
    hold(s);
    begin_products();
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      const uint32_t q_step = d / 4 * (64 * kRowBytes) + d % 4 * 32;
      const uint32_t k_step = k_slot * S::kSlotBytes + d / 4 * S::kPanelBytes + d % 4 * 32;
      multiply<T>(s, descriptor(q_at + q_step, 16), descriptor(ring_at + k_step, 16), d > 0);
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
    finish_scores<kKeys / 8>([&](int n, int i) -> float & { return s[4 * n + i]; },
                             [&](int n, int h) {
                               const int key = first + n * 8 + (lane & 3) * 2;
                               return mask_pair<T>(a, mask.row[first_row + h * 8], key, limit[h], reads.pairs);
                             },
                             first + (lane & 3) * 2, limit, low, factor_first, changed,
                             first + kKeys > fewest || first < highest_low);
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
      multiply<T>(out, weights[n], b, 1);
    }
    end_products();
    hold(out);
    if (lane == 0) arrive(empty + v_slot * 8);
  }

  // Worked out again: it would take registers all the time.
  uint32_t index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  const AttentionUnit of_all(a, index, blocks, S::kQueries);
  const AttentionUnit at_end = unit_of_group<S::kQueries>(of_all, group, folded);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float whole = total[h];
    whole += __shfl_xor_sync(0xffffffffu, whole, 1);
    whole += __shfl_xor_sync(0xffffffffu, whole, 2);
    const int64_t row = at_end.first + own_row + h * 8;
    if (row >= at_end.rows) continue;
    const bool nothing = top[h] == -INFINITY && whole == 0.0f;
    const float share = nothing ? 0.0f : 1.0f / whole;
    const int value_dim = static_cast<int>(a.value_dim);
    T *to = static_cast<T *>(a.out) + at_end.out_offset(a, row);
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
      a.lse[at_end.lse_offset(a, row)] =
          nothing ? -INFINITY : (top[h] * scale + log2f(whole)) * kLn2;
    }
  }
#endif
}

template <class T, int kDim>
int32_t launch(const AttentionArgs &a, bool paired, cudaStream_t stream) {
  using S = Shape<kDim>;
  const auto kernel = a.mask ? attention_hopper_kernel<T, kDim, true> : attention_hopper_kernel<T, kDim, false>;
  // Where all CTAs run at once, or nearly, the one with the most to do is what a call takes. In a longer row of
  // them those that are done make place, and two warpgroups at the same keys are faster than one.
  const int64_t rows = a.heads / a.kv_heads * a.most_queries;
  const int64_t grid = (rows + S::kQueries - 1) / S::kQueries * a.kv_heads * a.batch;
  int device = 0;
  const bool folded = S::kGroups == 2 && a.causal && a.window <= 0 && a.mask == nullptr &&
                      cudaGetDevice(&device) == cudaSuccess && grid <= 2 * sm_count(device);
  return launch_attention(a, kernel, S::kQueries, S::kThreads, S::kBytes, stream, paired, mask_reads(a),
                          folded);
}

template <class T>
int32_t sized(const AttentionArgs &a, bool paired, cudaStream_t stream) {
  const int64_t dim = a.dim > a.value_dim ? a.dim : a.value_dim;
  if (dim <= 64) return launch<T, 64>(a, paired, stream);
  return dim <= 128 ? launch<T, 128>(a, paired, stream) : launch<T, 256>(a, paired, stream);
}

}  // namespace

// Asked once: the kernel of a build without sm_90a is empty, and has hardly a register. Not where
// HFPATCH_ATTENTION_WGMMA is 0.
bool has_hopper_attention() {
  static const bool there = [] {
    const char *wanted = std::getenv("HFPATCH_ATTENTION_WGMMA");
    if (wanted && std::strcmp(wanted, "0") == 0) return false;
    cudaFuncAttributes of{};
    const auto *kernel = reinterpret_cast<const void *>(&attention_hopper_kernel<__half, 64, false>);
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
