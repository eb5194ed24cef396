// cluster.cuh: a team of CTAs that share one piece of work through distributed shared memory (sm_90).
#pragma once

#include "common.cuh"

namespace hfp::cuda {

inline constexpr int kClusterSize = 8;  // the most that every sm_90 GPU can schedule

// ---------------------------------------------------------------------------------------------
// The CTAs of a team

template <bool kCluster>
struct Team {
  __device__ __forceinline__ static unsigned rank() {
    unsigned r = 0;
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
#endif
    return r;
  }

  __device__ __forceinline__ static unsigned size() { return kCluster ? kClusterSize : 1; }

  // Of a team whose size is said at the launch.
  __device__ __forceinline__ static unsigned launched_size() {
    unsigned n = 1;
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster) asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(n));
#endif
    return n;
  }

  // Also orders what the CTAs wrote to each other's shared memory.
  __device__ __forceinline__ static void sync() {
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster) {
      asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
      return;
    }
#endif
    __syncthreads();
  }

  // The two halves of a sync that orders nothing: that this thread needs no other CTA's memory any
  // more, and waiting until none needs this CTA's. Between them a thread works on its own. A warp
  // arrives as one: where one of its threads has set something up before, the others wait for it.
  __device__ __forceinline__ static void leave() {
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster) {
      __syncwarp();
      asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }
#endif
  }

  __device__ __forceinline__ static void left() {
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
  }

  // Of a variable in shared memory, that of CTA `rank`. Generic addresses reach it like one's own.
  template <class V>
  __device__ __forceinline__ static V *at(V *own, unsigned rank) {
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster) {
      uint64_t there;
      asm("mapa.u64 %0, %1, %2;"
          : "=l"(there)
          : "l"(reinterpret_cast<uint64_t>(own)), "r"(rank));
      return reinterpret_cast<V *>(there);
    }
#endif
    (void)rank;
    return own;
  }
};

// ---------------------------------------------------------------------------------------------
// Launching

// Whether `kernel`'s code on this device was compiled for sm_90, which knows clusters: not so where
// the driver has made it from older PTX.
inline bool has_clusters(const void *kernel, int device) {
  int major = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  if (major < 9) return false;
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
    cudaGetLastError();  // the launch itself will say it
    return false;
  }
  return attributes.ptxVersion >= 90;
}

// How many clusters of one kernel a GPU has room for at once; the answer per device is kept. Fewer than
// its SMs would let one expect: a cluster is on one part of the GPU, and these have odd numbers of SMs.
class ClusterRoom {
 public:
  template <class Params>
  int of(void (*kernel)(Params), int threads, int shared_bytes, int size, int device) {
    if (device < 0 || device >= kDevices) return 0;
    int known = known_[device].load(std::memory_order_relaxed);
    if (known > 0) return known - 1;
    if (allow_shared_memory(kernel, shared_bytes) != cudaSuccess) return 0;
    cudaLaunchAttribute dimension{};
    dimension.id = cudaLaunchAttributeClusterDimension;
    dimension.val.clusterDim.x = static_cast<unsigned>(size);
    dimension.val.clusterDim.y = dimension.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(size));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.attrs = &dimension;
    config.numAttrs = 1;
    int clusters = 0;
    const void *function = reinterpret_cast<const void *>(kernel);
    if (cudaOccupancyMaxActiveClusters(&clusters, function, &config) != cudaSuccess) {
      cudaGetLastError();
      clusters = 0;
    }
    known_[device].store(static_cast<int16_t>(clusters + 1), std::memory_order_relaxed);
    return clusters;
  }

 private:
  static constexpr int kDevices = 64;
  std::atomic<int16_t> known_[kDevices]{};  // one more; 0: not asked yet
};

template <class Params>
int32_t launch_clusters(void (*kernel)(Params), int64_t clusters, int threads, Params &params,
                        void *stream, const char *op, int shared_bytes = 0,
                        int size = kClusterSize) {
  const cudaError_t status = allow_shared_memory(kernel, shared_bytes);
  if (status != cudaSuccess) return check(status, op);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = static_cast<unsigned>(size);
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(clusters * size));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = kStartsEarly<Params> ? 2 : 1;
  void *arguments[] = {&params};
  return check(cudaLaunchKernelExC(&config, reinterpret_cast<const void *>(kernel), arguments), op);
}

}  // namespace hfp::cuda
