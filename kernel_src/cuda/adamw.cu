// adamw.cu: one step of AdamW over a list of parameters; hfp_adamw_step on CUDA.
#include "ordered.cuh"
#include "tensor_list.cuh"

namespace hfp::cuda {
namespace {

struct AdamWScalars {
  Scalar lr, clip_coef, grad_scale;
  const float *found_inf;  // null: none
  float beta2, one_minus_beta1, one_minus_beta2;
  float log_beta1, log_beta2;
  float eps, weight_decay;
  bool maximize, amsgrad;
};

// All of one parameter together, in 64 bytes: a CTA reads them in one or two lines.
struct AdamWEntry {
  void *param;
  const void *grad;
  void *exp_avg, *exp_avg_sq;
  const float *step;  // null: step_value
  int64_t numel;
  float step_value;
  uint32_t first;  // chunk
  int aligned;     // to 16 bytes, all of them
};

// Of masters and amsgrad, apart: most optimizers have neither.
struct AdamWMore {
  void *max_exp_avg_sq;
  float *master;
};

// kMore: masters or amsgrad.
template <int kBytes, bool kMore>
struct AdamWTable {
  static constexpr bool kStartsEarly = true;
  static constexpr int kEntry =
      static_cast<int>(sizeof(AdamWEntry) + (kMore ? sizeof(AdamWMore) : 0));
  static constexpr int kCapacity = (kBytes - static_cast<int>(sizeof(AdamWScalars)) - 32) / kEntry;
  AdamWScalars s;
  int count;
  AdamWEntry entry[kCapacity];
  AdamWMore more[kMore ? kCapacity : 1];
};

__device__ __forceinline__ float value_of(const Scalar &s) {
  return s.pointer ? __ldg(s.pointer) : s.value;
}

// ---------------------------------------------------------------------------------------------
// Kernels

// The pointers of one parameter.
template <class P, class G, class M>
struct Parameter {
  P *param;
  const G *grad;
  M *exp_avg, *exp_avg_sq, *max_exp_avg_sq;
  float *master;
};

// What the elements of a parameter have in common.
struct Factors {
  float grad, decay, step_size, root_correction;
};

// N elements of a parameter as they lie in memory.
template <class P, class G, class M, bool kMaster, bool kMore, int N>
struct Elements {
  using W = std::conditional_t<kMaster, float, P>;
  Vec<W, N> weight;
  Vec<G, N> grad;
  Vec<M, N> exp_avg, exp_avg_sq, max_exp_avg_sq;

  // [at, at + N)
  __device__ __forceinline__ void load(const Parameter<P, G, M> &t, bool amsgrad, int64_t at) {
    const W *from;
    if constexpr (kMaster) from = t.master;
    else from = t.param;
    grad.template load<Cache::kStream>(t.grad + at);
    exp_avg.template load<Cache::kStream>(t.exp_avg + at);
    exp_avg_sq.template load<Cache::kStream>(t.exp_avg_sq + at);
    weight.template load<Cache::kStream>(from + at);
    if (kMore && amsgrad) max_exp_avg_sq.template load<Cache::kStream>(t.max_exp_avg_sq + at);
    else max_exp_avg_sq.zero();
  }

  __device__ __forceinline__ void update(const Parameter<P, G, M> &t, const AdamWScalars &s,
                                         const Factors &f, int64_t at) const {
    float p[N], g[N], m[N], v[N], top[N];
    grad.get(g);
    exp_avg.get(m);
    exp_avg_sq.get(v);
    weight.get(p);
    max_exp_avg_sq.get(top);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      // Each rounding is written out: vectors and single elements must come to the same bits.
      const float change = __fmul_rn(g[i], f.grad);
      m[i] = fmaf(s.one_minus_beta1, __fsub_rn(change, m[i]), m[i]);
      v[i] = fmaf(s.beta2, v[i], __fmul_rn(__fmul_rn(s.one_minus_beta2, change), change));
      // max(top, v), NaN if either is
      top[i] = !kMore || !s.amsgrad || v[i] > top[i] || v[i] != v[i] ? v[i] : top[i];
      const float ratio = m[i] / fmaf(sqrtf(top[i]), f.root_correction, s.eps);
      p[i] = __fsub_rn(p[i], fmaf(f.decay, p[i], __fmul_rn(f.step_size, ratio)));
    }
    store_as<M>(t.exp_avg, at, m);
    store_as<M>(t.exp_avg_sq, at, v);
    if (kMore && s.amsgrad) store_as<M>(t.max_exp_avg_sq, at, top);
    if constexpr (kMaster) store_as<float>(t.master, at, p);
    store_as<P>(t.param, at, p);
  }
};

// fp32 values are moved by 16 bytes a thread, half values by 16 where all are, else by 8.
template <class G, class M>
inline constexpr int kAdamWVector = sizeof(G) == 2 && sizeof(M) == 2 ? 8 : 4;

template <class P, bool kMore>
inline constexpr int kAdamWThreads =
    std::is_same_v<P, float> && !kMore ? kPlainAdamWThreads : kListThreads;

// Vectors of a thread, on their way together.
template <class P, bool kMore>
inline constexpr int kAdamWRounds = std::is_same_v<P, float> && !kMore ? kPlainAdamWVectors : 2;

template <class P, class G, class M, bool kMore>
inline constexpr int kAdamWChunk =
    kAdamWThreads<P, kMore> * kAdamWVector<G, M> * kAdamWRounds<P, kMore>;

template <class P, bool kMore>
inline constexpr int kAdamWCtas =
    std::is_same_v<P, float> && !kMore ? resident_ctas(kPlainAdamWThreads, kPlainAdamWResident) : 0;

template <class P, class G, class M, bool kMaster, bool kMore, int kBytes>
__global__ void __launch_bounds__(kAdamWThreads<P, kMore>, kAdamWCtas<P, kMore>)
    adamw_kernel(const __grid_constant__ AdamWTable<kBytes, kMore> table) {
  constexpr int N = kAdamWVector<G, M>, kThreads = kAdamWThreads<P, kMore>;
  constexpr int kChunk = kAdamWChunk<P, G, M, kMore>, kRounds = kAdamWRounds<P, kMore>;
  const AdamWScalars &s = table.s;
  // The table is the launch's own: read while the kernel before still runs.
  const int i = find_entry(table, blockIdx.x, gridDim.x);
  const AdamWEntry &entry = table.entry[i];
  Parameter<P, G, M> t;
  t.param = static_cast<P *>(entry.param);
  t.grad = static_cast<const G *>(entry.grad);
  t.exp_avg = static_cast<M *>(entry.exp_avg);
  t.exp_avg_sq = static_cast<M *>(entry.exp_avg_sq);
  t.max_exp_avg_sq = nullptr;
  t.master = nullptr;
  if constexpr (kMore) {
    t.max_exp_avg_sq = static_cast<M *>(table.more[i].max_exp_avg_sq);
    t.master = table.more[i].master;
  }
  const float *step = entry.step;
  const float step_value = entry.step_value;
  int64_t begin = static_cast<int64_t>(blockIdx.x - entry.first) * kChunk;
  const int64_t left = entry.numel - begin;
  const int n = static_cast<int>(left < kChunk ? left : kChunk);
  const int whole = entry.aligned ? n / N * N : 0;
  compute_now(t.param, t.grad, t.exp_avg, t.exp_avg_sq);
  compute_now(step, begin);
  wait_for_previous();
  if (s.found_inf && __ldg(s.found_inf) != 0.0f) return;

  // Asked for before the factors, which wait for memory and take long to compute.
  Elements<P, G, M, kMaster, kMore, N> own[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int at = (static_cast<int>(threadIdx.x) + round * kThreads) * N;
    if (at < whole) own[round].load(t, s.amsgrad, begin + at);
  }
  const float count = step ? __ldg(step) : step_value;
  const float lr = value_of(s.lr), factor = value_of(s.clip_coef) / value_of(s.grad_scale);
  Factors f;
  f.grad = s.maximize ? -factor : factor;
  f.decay = lr * s.weight_decay;
  // 1 - beta^t
  f.step_size = lr / -expm1f(count * s.log_beta1);
  f.root_correction = 1.0f / sqrtf(-expm1f(count * s.log_beta2));
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int at = (static_cast<int>(threadIdx.x) + round * kThreads) * N;
    if (at < whole) own[round].update(t, s, f, begin + at);
  }
  for (int at = whole + threadIdx.x; at < n; at += kThreads) {
    Elements<P, G, M, kMaster, kMore, 1> one;
    one.load(t, s.amsgrad, begin + at);
    one.update(t, s, f, begin + at);
  }
}

// ---------------------------------------------------------------------------------------------
// Launchers

template <class P, class G, class M, bool kMaster, bool kMore>
struct AdamWSource {
  const AdamWArgs &args;
  void *stream;

  int64_t chunks(int64_t i) const {
    constexpr int kChunk = kAdamWChunk<P, G, M, kMore>;
    return (flat_tensor(*args.params, i).numel + kChunk - 1) / kChunk;
  }

  template <class Table>
  void put(Table &table, int at, int64_t i, uint32_t first) const {
    const AdamWTensor t = args[i];
    AdamWEntry &entry = table.entry[at];
    entry.first = first;
    entry.param = t.param;
    entry.grad = t.grad;
    entry.exp_avg = t.exp_avg;
    entry.exp_avg_sq = t.exp_avg_sq;
    entry.step = t.step.pointer;
    entry.step_value = t.step.value;
    entry.numel = t.numel;
    entry.aligned = pointer_aligned(t.param) && pointer_aligned(t.grad) &&
                    pointer_aligned(t.exp_avg) && pointer_aligned(t.exp_avg_sq) &&
                    pointer_aligned(t.max_exp_avg_sq) && pointer_aligned(t.master);
    if constexpr (kMore) table.more[at] = {t.max_exp_avg_sq, t.master};
  }

  template <int kBytes>
  int32_t launch(AdamWTable<kBytes, kMore> &table, int64_t grid) const {
    return cuda::launch(&adamw_kernel<P, G, M, kMaster, kMore, kBytes>, grid,
                        kAdamWThreads<P, kMore>, table, stream, "adamw_step");
  }
};

template <class P, class G, class M, bool kMaster, bool kMore, int kBytes>
int32_t run(const AdamWArgs &a, void *stream) {
  AdamWTable<kBytes, kMore> table;
  static_assert(sizeof table <= kBytes, "the table is larger than it may be");
  table.s = {a.lr,        a.clip_coef, a.grad_scale, a.found_inf.pointer,
             a.beta2,     a.one_minus_beta1, a.one_minus_beta2,
             a.log_beta1, a.log_beta2, a.eps,        a.weight_decay,
             a.maximize,  a.max_exp_avg_sqs->count > 0};
  return launch_tables(AdamWSource<P, G, M, kMaster, kMore>{a, stream}, a.params->count, table);
}

template <class P, class G, class M, bool kMaster, bool kMore>
int32_t run(const AdamWArgs &a, void *stream) {
  if (a.params->count <= AdamWTable<kSmallTable, kMore>::kCapacity) {
    return run<P, G, M, kMaster, kMore, kSmallTable>(a, stream);
  }
  if constexpr (!kMore) {
    if (a.params->count <= AdamWTable<kMiddleTable, kMore>::kCapacity) {
      return run<P, G, M, kMaster, kMore, kMiddleTable>(a, stream);
    }
  }
  return run<P, G, M, kMaster, kMore, kLargeTable>(a, stream);
}

template <class P, class G, class M, bool kMaster>
int32_t run(const AdamWArgs &a, void *stream) {
  if constexpr (!kMaster) {
    if (a.max_exp_avg_sqs->count == 0) return run<P, G, M, false, false>(a, stream);
  }
  return run<P, G, M, kMaster, true>(a, stream);
}

template <class P>
int32_t run_half(const AdamWArgs &a, void *stream) {
  if (a.masters->count > 0) {
    return a.grad_type == DType::F32 ? run<P, float, float, true>(a, stream)
                                     : run<P, P, float, true>(a, stream);
  }
  return a.moment_type == DType::F32 ? run<P, P, float, false>(a, stream)
                                     : run<P, P, P, false>(a, stream);
}

}  // namespace

int32_t adamw_step(const AdamWArgs &a, int device, void *stream) {
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), "adamw_step");
  switch (a.param_type) {
    case DType::F32: return run<float, float, float, false>(a, stream);
    case DType::F16: return run_half<__half>(a, stream);
    default: return run_half<__nv_bfloat16>(a, stream);
  }
}

}  // namespace hfp::cuda
