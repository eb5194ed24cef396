// common.cuh: what every CUDA op uses: vector I/O, row addressing, launching.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "../kernels.h"
#include "tuning.cuh"

namespace hfp::cuda {

// ---------------------------------------------------------------------------------------------
// Vector I/O

// n / d as a multiplication, for n < 2^31 and 1 <= d < 2^31. Granlund & Montgomery,
// doi:10.1145/178243.178249.
struct FastDivisor {
  uint32_t multiplier = 0, shift = 0;

  FastDivisor() = default;
  explicit FastDivisor(int64_t d) {
    while ((int64_t{1} << shift) < d) ++shift;
    const uint64_t excess = (uint64_t{1} << shift) - static_cast<uint64_t>(d);
    multiplier = static_cast<uint32_t>((excess << 32) / static_cast<uint64_t>(d) + 1);
  }
#ifdef __CUDACC__
  __device__ __forceinline__ uint32_t divide(uint32_t n) const {
    return (__umulhi(n, multiplier) + n) >> shift;
  }
#endif
};

// kStream skips L1: every byte of an activation is read once, so it would only evict the weights.
// It is a plain (coherent) load, because `out` may be the buffer that is read; so is kTwice, which
// leaves in L1 what the CTA reads again.
enum class Cache { kStream, kTwice, kReadOnly };

template <Cache kCache, class V>
__device__ __forceinline__ V load_word(const V *from) {
  if constexpr (kCache == Cache::kStream) return __ldcg(from);
  else if constexpr (kCache == Cache::kTwice) return __ldca(from);
  else return __ldg(from);
}

template <int kBytes, Cache kCache>
__device__ __forceinline__ void load_bytes(uint32_t *word, const char *from) {
  if constexpr (kBytes == 16) {
    const uint4 v = load_word<kCache>(reinterpret_cast<const uint4 *>(from));
    word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
  } else if constexpr (kBytes == 8) {
    const uint2 v = load_word<kCache>(reinterpret_cast<const uint2 *>(from));
    word[0] = v.x, word[1] = v.y;
  } else if constexpr (kBytes == 4) {
    word[0] = load_word<kCache>(reinterpret_cast<const unsigned int *>(from));
  } else {
    static_assert(kBytes == 2, "a vector has 2, 4, 8 or a multiple of 16 bytes");
    word[0] = load_word<kCache>(reinterpret_cast<const unsigned short *>(from));
  }
}

template <int kBytes>
__device__ __forceinline__ void store_bytes(char *to, const uint32_t *word) {
  if constexpr (kBytes == 16) {
    *reinterpret_cast<uint4 *>(to) = make_uint4(word[0], word[1], word[2], word[3]);
  } else if constexpr (kBytes == 8) {
    *reinterpret_cast<uint2 *>(to) = make_uint2(word[0], word[1]);
  } else if constexpr (kBytes == 4) {
    *reinterpret_cast<uint32_t *>(to) = word[0];
  } else {
    static_assert(kBytes == 2, "a vector has 2, 4, 8 or a multiple of 16 bytes");
    *reinterpret_cast<uint16_t *>(to) = static_cast<uint16_t>(word[0]);
  }
}

// Two 16-bit floats in one 32-bit word, the first one in the low half.
template <class T>
__device__ __forceinline__ float2 unpack(uint32_t word) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  } else {
    __half2 pair;
    pair = *reinterpret_cast<const __half2 *>(&word);
    return __half22float2(pair);
  }
}

template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
  }
}

// N elements of T as they lie in memory. Kept packed while they wait in registers, because a half
// type then needs half the registers of the fp32 values that are computed with.
template <class T, int N>
struct Vec {
  static constexpr int kBytes = N * static_cast<int>(sizeof(T));
  static constexpr int kStep = kBytes < kVectorBytes ? kBytes : kVectorBytes;
  static constexpr int kWords = kBytes < 4 ? 1 : kBytes / 4;
  uint32_t word[kWords];

  template <Cache kCache>
  __device__ __forceinline__ void load(const T *from) {
#pragma unroll
    for (int b = 0; b < kBytes; b += kStep) {
      load_bytes<kStep, kCache>(word + b / 4, reinterpret_cast<const char *>(from) + b);
    }
  }

  __device__ __forceinline__ void store(T *to) const {
#pragma unroll
    for (int b = 0; b < kBytes; b += kStep) {
      store_bytes<kStep>(reinterpret_cast<char *>(to) + b, word + b / 4);
    }
  }

  __device__ __forceinline__ void zero() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = 0;
  }

  // Hides from the compiler that the words are those it has unpacked before: else it keeps the
  // fp32 values in registers until the next get(), and a wide row spills. An empty asm statement
  // does not stop ptxas; a `zero` that is a kernel parameter does, at one instruction a word.
  __device__ __forceinline__ void stay_packed(uint32_t zero) {
    if constexpr (sizeof(T) != 4) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) word[i] ^= zero;
    }
  }

  __device__ __forceinline__ void get(float (&value)[N]) const {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] = __uint_as_float(word[i]);
    } else if constexpr (N == 1) {
      value[0] = unpack<T>(word[0]).x;
    } else {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        const float2 pair = unpack<T>(word[i]);
        value[2 * i] = pair.x, value[2 * i + 1] = pair.y;
      }
    }
  }

  // Rounds to T, to nearest even.
  __device__ __forceinline__ void set(const float (&value)[N]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < N; ++i) word[i] = __float_as_uint(value[i]);
    } else if constexpr (N == 1) {
      word[0] = pack<T>(value[0], 0.0f);
    } else {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) word[i] = pack<T>(value[2 * i], value[2 * i + 1]);
    }
  }
};

// value rounded to T, as fp32.
template <class T, int N>
__device__ __forceinline__ void round_to(float (&value)[N]) {
  if constexpr (sizeof(T) != 4) {
    Vec<T, N> v;
    v.set(value);
    v.get(value);
  }
}

// The same three with a dtype known only at run time; the branch is uniform over the grid.
template <int N>
__device__ __forceinline__ void load_any(float (&value)[N], const void *from, DType type,
                                         int64_t offset) {
  if (type == DType::F32) {
    Vec<float, N> v;
    v.template load<Cache::kReadOnly>(static_cast<const float *>(from) + offset);
    v.get(value);
  } else if (type == DType::F16) {
    Vec<__half, N> v;
    v.template load<Cache::kReadOnly>(static_cast<const __half *>(from) + offset);
    v.get(value);
  } else {
    Vec<__nv_bfloat16, N> v;
    v.template load<Cache::kReadOnly>(static_cast<const __nv_bfloat16 *>(from) + offset);
    v.get(value);
  }
}

template <class T, int N>
__device__ __forceinline__ void store_as(void *to, int64_t offset, const float (&value)[N]) {
  Vec<T, N> v;
  v.set(value);
  v.store(static_cast<T *>(to) + offset);
}

template <int N>
__device__ __forceinline__ void store_any(void *to, DType type, int64_t offset,
                                          const float (&value)[N]) {
  if (type == DType::F32) {
    store_as<float>(to, offset, value);
  } else if (type == DType::F16) {
    store_as<__half>(to, offset, value);
  } else {
    store_as<__nv_bfloat16>(to, offset, value);
  }
}

template <int N>
__device__ __forceinline__ void round_any(float (&value)[N], DType type) {
  if (type == DType::F16) {
    round_to<__half>(value);
  } else if (type == DType::BF16) {
    round_to<__nv_bfloat16>(value);
  }
}

// ---------------------------------------------------------------------------------------------
// Row addressing

__device__ __forceinline__ int64_t row_offset(const Rows &r, int64_t row) {
  if (r.n2 >= r.rows) return row * r.s2;  // most tensors: no divisions
  // In 32 bits where they do: a 64-bit division takes four times as long.
  const bool narrow = r.rows <= 0xffffffffll;
  const auto divide = [narrow](int64_t n, int64_t d) {
    return narrow ? static_cast<int64_t>(static_cast<uint32_t>(n) / static_cast<uint32_t>(d))
                  : static_cast<int64_t>(static_cast<uint64_t>(n) / static_cast<uint64_t>(d));
  };
  const int64_t outer = divide(row, r.n2);
  const int64_t i2 = row - outer * r.n2;
  if (r.n1 * r.n2 >= r.rows) return outer * r.s1 + i2 * r.s2;
  const int64_t i0 = divide(outer, r.n1);
  const int64_t i1 = outer - i0 * r.n1;
  return i0 * r.s0 + i1 * r.s1 + i2 * r.s2;
}

// The most elements (a power of two, up to 16 bytes of x) that can be moved by one instruction
// everywhere in these rows: each row starts at, and is long, a multiple of them. Start with
// `widest_vector(rows, size)`, then narrow it by each pointer.
inline int widest_vector(const Rows &r, int element_bytes) {
  int64_t all = r.cols;
  if (r.n2 > 1) all |= r.s2;
  if (r.n1 > 1) all |= r.s1;
  if (r.rows > r.n1 * r.n2) all |= r.s0;
  int n = kVectorBytes / element_bytes;
  while (n > 1 && (all & (n - 1)) != 0) n /= 2;
  return n;
}

inline int narrow_to_pointer(int n, const void *pointer, int64_t element_bytes) {
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  auto aligned = [&](int64_t bytes) {
    const int64_t step = bytes < kVectorBytes ? bytes : kVectorBytes;
    return (address & static_cast<uint64_t>(step - 1)) == 0;
  };
  while (n > 1 && !aligned(n * element_bytes)) n /= 2;
  return n;
}

inline bool pointer_aligned(const void *pointer) {
  return reinterpret_cast<uint64_t>(pointer) % kVectorBytes == 0;
}

// Each of these rows starts at a multiple of 16 bytes; so does an absent tensor.
inline bool rows_aligned(const Rows &r, const void *pointer, int64_t element_bytes) {
  if (pointer == nullptr) return true;
  int64_t all = 0;
  if (r.n2 > 1) all |= r.s2;
  if (r.n1 > 1) all |= r.s1;
  if (r.rows > r.n1 * r.n2) all |= r.s0;
  return pointer_aligned(pointer) && all * element_bytes % kVectorBytes == 0;
}

// ---------------------------------------------------------------------------------------------
// Launching

// Makes `device` current for one call. PyTorch already did; other callers may not have.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    int current = -1;
    status_ = cudaGetDevice(&current);
    if (status_ == cudaSuccess && current != device) {
      status_ = cudaSetDevice(device);
      if (status_ == cudaSuccess) restore_ = current;
    }
  }
  ~DeviceGuard() {
    if (restore_ >= 0) cudaSetDevice(restore_);
  }
  DeviceGuard(const DeviceGuard &) = delete;
  DeviceGuard &operator=(const DeviceGuard &) = delete;

  cudaError_t status() const { return status_; }

 private:
  cudaError_t status_;
  int restore_ = -1;
};

// Turns the status of one CUDA call of `op` into ours.
inline int32_t check(cudaError_t status, const char *op) {
  if (status == cudaSuccess) return HFP_OK;
  // The runtime also keeps the error for the thread; left there, someone else's next check would
  // report it a second time.
  cudaGetLastError();
  switch (status) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidKernelImage:
    case cudaErrorInvalidPtx:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
      return set_error(HFP_LAUNCH_FAILED,
                       "`%s`: this build holds no code for this GPU (%s); rebuild with the GPU's "
                       "architecture, or install a build that has it",
                       op, cudaGetErrorString(status));
    default:
      return set_error(HFP_LAUNCH_FAILED, "`%s`: the CUDA launch failed: %s (%s)", op,
                       cudaGetErrorName(status), cudaGetErrorString(status));
  }
}

inline constexpr int64_t kMaxGrid = 2147483647;  // gridDim.x, compute capability 3.0 and up

// A kernel whose parameters declare `static constexpr bool kStartsEarly = true` is launched while
// the one before it in the stream still runs (programmatic dependent launch, sm_90 and newer): its
// CTAs are placed and wait here, which hides about a microsecond of launch latency per kernel. So
// every thread of such a kernel must call this before it touches memory that anything wrote: also the
// parameters, which an optimizer may just have updated. A thread that has nothing to do may leave
// before, as long as one of its CTA waits: else the kernel could end before the one that it follows.
//
// kNextEarly: the next kernel may be placed while this one runs. Not where all CTAs of a large grid are
// on the GPU at once: those of the next would be placed where CTAs end first, unevenly, and begin all at
// the same time, so that all of them read and then all write (rope_packed.cuh).
template <bool kNextEarly = true>
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  // Once all CTAs of this grid are here, none is left to place: the next grid takes nothing away.
  if (kNextEarly) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Before wait_for_previous<false>(), in a small grid that is on the GPU as a whole while the kernel before
// still runs: CTAs of the next grid take the places which those of that kernel leave one by one.
__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// What is computed from the launch's own parameters alone, addresses above all, can be ready before
// wait_for_previous; the compiler would compute it where it is used, behind the wait.
// Several at once: an asm statement for each costs registers. 64 bits each.
template <class A, class B>
__device__ __forceinline__ void compute_now(A &a, B &b) {
  asm volatile("" : "+l"(a), "+l"(b));
}
template <class A, class B, class C>
__device__ __forceinline__ void compute_now(A &a, B &b, C &c) {
  asm volatile("" : "+l"(a), "+l"(b), "+l"(c));
}
template <class A, class B, class C, class D>
__device__ __forceinline__ void compute_now(A &a, B &b, C &c, D &d) {
  asm volatile("" : "+l"(a), "+l"(b), "+l"(c), "+l"(d));
}

template <class A, class B, class C, class D, class E>
__device__ __forceinline__ void compute_now(A &a, B &b, C &c, D &d, E &e) {
  asm volatile("" : "+l"(a), "+l"(b), "+l"(c), "+l"(d), "+l"(e));
}

template <class Params, class = void>
inline constexpr bool kStartsEarly = false;
template <class Params>
inline constexpr bool kStartsEarly<Params, std::void_t<decltype(Params::kStartsEarly)>> =
    Params::kStartsEarly;

// Of the current device; 0 where it cannot be asked.
inline int capability_major() {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) {
    return 0;
  }
  return major;
}

// Whether the GPU can start `kernel` early. Not so where the driver has made its code from PTX older than
// sm_90's, which does not wait: see wait_for_previous. The kernels of a build are compiled for the same
// architectures: the answer of one per device is kept for all.
inline bool early_start_supported(const void *kernel) {
  constexpr int kDevices = 64;
  static std::atomic<int8_t> known[kDevices];  // 0: not asked yet, 1: no, 2: yes
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return false;
  int8_t answer = known[device].load(std::memory_order_relaxed);
  if (answer == 0) {
    cudaFuncAttributes of{};
    if (cudaFuncGetAttributes(&of, kernel) != cudaSuccess) {
      cudaGetLastError();  // the launch itself will say it
      return false;
    }
    answer = capability_major() >= 9 && of.ptxVersion >= 90 ? 2 : 1;
    known[device].store(answer, std::memory_order_relaxed);
  }
  return answer == 2;
}

inline int sm_count(int device) {
  int sms = 0;
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  return sms;
}

// Bytes of shared memory that a CTA may ask for on the current device.
inline int shared_memory_limit() {
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
          cudaSuccess) {
    return 0;
  }
  return bytes;
}

// Shared memory to ask for beside `fixed` bytes that a kernel declares, for a grid of one wave, `ctas` on
// each SM: `bytes`, or so many that no more fit. Such a grid may be placed while the kernel before
// still has some of the SMs: else one SM would get more CTAs than its share, and another none.
inline int shared_memory_of_wave(int bytes, int fixed, int ctas) {
  constexpr int kReserved = 1 << 10, kUnit = 128;  // of each CTA, by the driver
  if (capability_major() < 9) return bytes;
  const int all = (shared_memory_limit() + kReserved) / (ctas + 1);
  const int share = all - kReserved - fixed + kUnit;
  return bytes > share ? bytes : share;
}

// Lets `kernel` be launched with so many bytes of shared memory beside those that it declares. Always all
// that there is: another thread may be about to launch it with more.
template <class Params>
cudaError_t allow_shared_memory(void (*kernel)(Params), int bytes) {
  constexpr int kAlways = 48 << 10;  // with what it declares; more has to be asked for
  if (bytes == 0) return cudaSuccess;
  const void *function = reinterpret_cast<const void *>(kernel);
  cudaFuncAttributes of{};
  const cudaError_t status = cudaFuncGetAttributes(&of, function);
  if (status != cudaSuccess || bytes + static_cast<int>(of.sharedSizeBytes) <= kAlways) return status;
  if (of.maxDynamicSharedSizeBytes > kAlways && bytes <= of.maxDynamicSharedSizeBytes) return status;
  return cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              shared_memory_limit() - static_cast<int>(of.sharedSizeBytes));
}

// cudaLaunchKernelExC and not <<<>>>: it returns the status of this launch, so that an error that an
// earlier caller left behind is neither reported here nor cleared.
template <class Params>
int32_t launch(void (*kernel)(Params), int64_t grid, int threads, Params &params, void *stream,
               const char *op, int shared_bytes = 0) {
  const cudaError_t status = allow_shared_memory(kernel, shared_bytes);
  if (status != cudaSuccess) return check(status, op);
  const void *function = reinterpret_cast<const void *>(kernel);
  void *arguments[] = {&params};
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = kStartsEarly<Params> && early_start_supported(function) ? 1 : 0;
  return check(cudaLaunchKernelExC(&config, function, arguments), op);
}

}  // namespace hfp::cuda
