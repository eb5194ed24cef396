// attention_hopper.h: attention with the tensor cores of sm_90a, which a build may lack.
#pragma once

#include "../products.h"

namespace hfp::cuda {

// Whether this build and the current device have it, and HFPATCH_ATTENTION_WGMMA is not 0.
bool has_hopper_attention();

// Half types, heads of at most 256 columns, rows of q, k and v in pieces of 16 bytes. `paired`: two columns
// of the result can be written at once.
int32_t attention_hopper(const AttentionArgs &a, bool paired, void *stream);

}  // namespace hfp::cuda
