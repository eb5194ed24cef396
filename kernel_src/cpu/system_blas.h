// system_blas.h: the BLAS of the system, loaded at run time, so that the library needs none.
#pragma once

#include "../products.h"

namespace hfp {
namespace cpu {

// Whether the system's BLAS did the product; false: there is none, or it cannot take it. fp32 only.
bool system_gemm(const GemmArgs &args);

}  // namespace cpu
}  // namespace hfp
