// any_type.h: one register of a dtype that is known at run time only; the branch is the same for
// all of a call. No include guard: included once per instruction set, inside the inner part of an
// op's .cpp.

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

template <DType T>
HFP_INLINE vf load_up_to(const char *p, int64_t n) {
  return n == kLanes ? load<T>(p) : load_n<T>(p, n);
}

template <DType T>
HFP_INLINE void store_up_to(char *p, vf v, int64_t n) {
  if (n == kLanes) store<T>(p, v);
  else store_n<T>(p, v, n);
}

// The first n <= kLanes elements; the other lanes are 0.
HFP_INLINE vf load_any(DType type, const char *p, int64_t n) {
  return type == DType::F32   ? load_up_to<DType::F32>(p, n)
         : type == DType::F16 ? load_up_to<DType::F16>(p, n)
                              : load_up_to<DType::BF16>(p, n);
}

HFP_INLINE void store_any(DType type, char *p, vf v, int64_t n) {
  if (type == DType::F32) store_up_to<DType::F32>(p, v, n);
  else if (type == DType::F16) store_up_to<DType::F16>(p, v, n);
  else store_up_to<DType::BF16>(p, v, n);
}

HFP_INLINE vf round_any(DType type, vf v) {
  return type == DType::F32   ? v
         : type == DType::F16 ? round_to<DType::F16>(v)
                              : round_to<DType::BF16>(v);
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp
