// gemm.cu: hfp_gemm on CUDA, by cuBLASLt.
//
// cuBLASLt's matrices are column by column, so it computes out^T = op(b)^T op(a)^T. What it was asked and
// what it answered is kept, for a few shapes per thread: asking takes longer than a small product.
#include <cstring>
#include <mutex>

#include "../products.h"
#include "common.cuh"
#include "cublaslt.h"

namespace hfp::cuda {
namespace {

using cublaslt::Heuristic;
using cublaslt::Library;
using cublaslt::Object;

// Compared byte by byte: no gaps.
struct Key {
  int64_t batch, m, n, k, out_row, a_row, b_row, c_row, out_batch, a_batch, b_batch, c_batch;
  int64_t workspace, options;  // options: device, dtype, transposes, whether there is c and out is wide
  int64_t aligned[4];
};

struct Plan {
  Key key = {};
  bool made = false;
  Object product = nullptr, a = nullptr, b = nullptr, c = nullptr, out = nullptr;
  Heuristic found = {};

  void clear() {
    if (const Library *l = product || a || b || c || out ? cublaslt::library() : nullptr) {
      if (product) l->product_destroy(product);
      for (Object matrix : {a, b, c, out}) {
        if (matrix) l->matrix_destroy(matrix);
      }
    }
    product = a = b = c = out = nullptr;
    made = false;
  }
  ~Plan() { clear(); }
};

constexpr int kPlans = 64;

Plan &plan_of(const Key &key) {
  thread_local Plan plans[kPlans];
  const uint64_t *words = reinterpret_cast<const uint64_t *>(&key);
  uint64_t hash = 0;
  for (std::size_t i = 0; i < sizeof key / sizeof *words; ++i)
    hash = (hash ^ words[i]) * 0x9e3779b97f4a7c15ull;
  Plan &plan = plans[hash >> 58];
  if (plan.made && std::memcmp(&plan.key, &key, sizeof key) != 0) plan.clear();
  return plan;
}

// That of all rows: cuBLASLt asks for the pointers', but chooses kernels that misread rows of `out` where
// those of `c` are aligned better.
int64_t alignment(const void *p, DType type, int64_t row, int64_t batch_step) {
  const int64_t steps = (row | batch_step) * size_of(type);
  const uint64_t all = reinterpret_cast<uint64_t>(p) | static_cast<uint64_t>(steps);
  int64_t bytes = 256;
  while (bytes > 1 && all % static_cast<uint64_t>(bytes) != 0) bytes /= 2;
  return bytes;
}

DType result_type(const GemmArgs &g) { return g.wide ? DType::F32 : g.type; }

int type_of(DType type) {
  return type == DType::F32   ? cublaslt::kFloat32
         : type == DType::F16 ? cublaslt::kFloat16
                              : cublaslt::kBfloat16;
}

int matrix(const Library &l, Object *to, DType type, int64_t rows, int64_t cols, int64_t stride,
           int64_t batch, int64_t step) {
  int status = l.matrix_create(to, type_of(type), static_cast<uint64_t>(rows),
                               static_cast<uint64_t>(cols), stride);
  if (status != 0 || batch == 1) return status;
  const int32_t count = static_cast<int32_t>(batch);
  status = l.matrix_set(*to, cublaslt::kBatchCount, &count, sizeof count);
  if (status != 0) return status;
  return l.matrix_set(*to, cublaslt::kBatchOffset, &step, sizeof step);
}

int make(const Library &l, cublaslt::Handle handle, const GemmArgs &g, const int64_t (&aligned)[4],
         Plan *plan) {
  int status = l.product_create(&plan->product, cublaslt::kComputeFloat32, cublaslt::kFloat32);
  const int32_t transposed[2] = {g.b_transposed ? 1 : 0, g.a_transposed ? 1 : 0};
  const auto then = [&](int next) { status = status != 0 ? status : next; };
  if (status == 0) {
    then(l.product_set(plan->product, cublaslt::kTransposeA, &transposed[0], sizeof(int32_t)));
    then(l.product_set(plan->product, cublaslt::kTransposeB, &transposed[1], sizeof(int32_t)));
  }
  then(matrix(l, &plan->b, g.type, g.b_transposed ? g.k : g.n, g.b_transposed ? g.n : g.k, g.b_row,
              g.batch, g.b_batch));
  then(matrix(l, &plan->a, g.type, g.a_transposed ? g.m : g.k, g.a_transposed ? g.k : g.m, g.a_row,
              g.batch, g.a_batch));
  const DType result = result_type(g);
  then(matrix(l, &plan->out, result, g.n, g.m, g.out_row, g.batch, g.out_batch));
  then(g.c ? matrix(l, &plan->c, result, g.n, g.m, g.c_row, g.batch, g.c_batch)
           : matrix(l, &plan->c, result, g.n, g.m, g.out_row, g.batch, g.out_batch));
  Object preference = nullptr;
  then(l.preference_create(&preference));
  const uint64_t bytes = static_cast<uint64_t>(g.workspace_bytes);
  const uint32_t reductions = cublaslt::kReduceInFloat32;
  if (status == 0) {
    then(l.preference_set(preference, cublaslt::kMaxWorkspace, &bytes, sizeof bytes));
    then(l.preference_set(preference, cublaslt::kReductions, &reductions, sizeof reductions));
    for (int i = 0; i < 4; ++i) {
      const uint32_t at_least = static_cast<uint32_t>(aligned[i]);
      then(l.preference_set(preference, cublaslt::kAlignments + i, &at_least, sizeof at_least));
    }
  }
  int answers = 0;
  if (status == 0) {
    then(l.heuristic(handle, plan->product, plan->b, plan->a, plan->c, plan->out, preference, 1,
                     &plan->found, &answers));
  }
  if (preference) l.preference_destroy(preference);
  if (status == 0 && answers == 0) status = 15;  // CUBLAS_STATUS_NOT_SUPPORTED
  return status;
}

// One for each device, made once.
cublaslt::Handle handle_of(const Library &l, int device) {
  constexpr int kDevices = 64;
  static std::mutex mutex;
  static cublaslt::Handle handles[kDevices] = {};
  if (device >= kDevices) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!handles[device] && l.create(&handles[device]) != 0) handles[device] = nullptr;
  return handles[device];
}

// out = beta * c, where k is 0.
template <class T>
__global__ void scaled_kernel(const __grid_constant__ GemmArgs g) {
  const int64_t total = g.batch * g.m * g.n;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < total; i += step) {
    const int64_t column = i % g.n, row = i / g.n % g.m, batch = i / g.n / g.m;
    float y[1] = {0.0f};
    if (g.c != nullptr) {
      Vec<T, 1> v;
      v.template load<Cache::kStream>(static_cast<const T *>(g.c) + batch * g.c_batch + row * g.c_row +
                                      column);
      v.get(y);
      y[0] *= g.beta;
    }
    store_as<T>(g.out, batch * g.out_batch + row * g.out_row + column, y);
  }
}

int32_t scaled(const GemmArgs &g, cudaStream_t stream) {
  switch (g.type) {
    case DType::F32: scaled_kernel<float><<<256, 256, 0, stream>>>(g); break;
    case DType::F16: scaled_kernel<__half><<<256, 256, 0, stream>>>(g); break;
    default: scaled_kernel<__nv_bfloat16><<<256, 256, 0, stream>>>(g);
  }
  return check(cudaGetLastError(), "gemm");
}

}  // namespace

int64_t gemm_backend() { return cublaslt::library() ? HFP_GEMM_CUBLASLT : HFP_GEMM_NONE; }

int32_t gemm(const GemmArgs &given, int device, void *stream) {
  GemmArgs g = given;
  // Rows that lie over each other, as those of an expanded tensor, are products of their own.
  if (g.batch == 1 && !g.a_transposed && (g.a_row < g.k || (g.c && g.c_row < g.n))) {
    g.batch = g.m, g.m = 1;
    g.a_batch = g.a_row, g.c_batch = g.c_row, g.out_batch = g.out_row;
    g.a_row = g.k, g.c_row = g.out_row = g.n;
  }
  // What a caller brings may begin anywhere; cuBLASLt wants 256 bytes.
  const int64_t past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(g.workspace) % 256),
                skipped = past ? 256 - past : 0;
  g.workspace_bytes = g.workspace_bytes > skipped ? g.workspace_bytes - skipped : 0;
  g.workspace = g.workspace_bytes ? g.workspace + skipped / 4 : nullptr;
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), "gemm");
  const auto on = static_cast<cudaStream_t>(stream);
  if (g.k == 0) return scaled(g, on);
  const Library *l = cublaslt::library();
  if (!l) {
    return set_error(HFP_NOT_AVAILABLE,
                     "gemm: cuBLASLt was not found (libcublasLt.so.13, .12 or .11); put it where the"
                     " loader looks (LD_LIBRARY_PATH), or name it in HFPATCH_CUBLASLT");
  }
  const cublaslt::Handle handle = handle_of(*l, device);
  if (!handle) {
    return set_error(HFP_LAUNCH_FAILED, "gemm: cublasLtCreate failed on device %d", device);
  }
  Key key = {g.batch, g.m, g.n, g.k, g.out_row, g.a_row, g.b_row, g.c ? g.c_row : 0, g.out_batch,
             g.a_batch, g.b_batch, g.c ? g.c_batch : 0, g.workspace_bytes, 0, {}};
  key.options = (device * 4 + static_cast<int64_t>(g.type)) * 16 + (g.wide ? 8 : 0) + (g.a_transposed ? 4 : 0) +
                (g.b_transposed ? 2 : 0) + (g.c ? 1 : 0);
  const bool many = g.batch > 1;
  key.aligned[0] = alignment(g.b, g.type, g.b_row, many ? g.b_batch : 0);
  key.aligned[1] = alignment(g.a, g.type, g.a_row, many ? g.a_batch : 0);
  const DType result = result_type(g);
  key.aligned[3] = alignment(g.out, result, g.out_row, many ? g.out_batch : 0);
  key.aligned[2] = g.c ? alignment(g.c, result, g.c_row, many ? g.c_batch : 0) : key.aligned[3];
  Plan &plan = plan_of(key);
  if (!plan.made) {
    const int status = make(*l, handle, g, key.aligned, &plan);
    if (status != 0) {
      plan.clear();
      return set_error(HFP_LAUNCH_FAILED,
                       "gemm: cuBLASLt has no algorithm for this product (status %d)", status);
    }
    plan.key = key;
    plan.made = true;
  }
  const float beta = g.c ? g.beta : 0.0f;
  const int status = l->multiply(handle, plan.product, &g.alpha, g.b, plan.b, g.a, plan.a, &beta,
                                 g.c ? g.c : g.out, plan.c, g.out, plan.out, &plan.found.algorithm,
                                 g.workspace, static_cast<std::size_t>(g.workspace_bytes), on);
  if (status == 0) return HFP_OK;
  return set_error(HFP_LAUNCH_FAILED, "gemm: cublasLtMatmul failed with status %d", status);
}

}  // namespace hfp::cuda
