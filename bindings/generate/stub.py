"""`clib/stub.c`: every function of the interface, none with a kernel."""

from __future__ import annotations

from header import Header

_START = """\
/*
 * The stub of libhfpatch: every function is there and answers HFP_NOT_AVAILABLE, so that a program
 * links and runs, and falls back, where the library is not installed.
 *
 * Written by `python bindings/generate` from kernel_src/hfpatch.h; do not edit.
 */
#include "hfpatch.h"

#if defined(__cplusplus)
#define HFP_THREAD_LOCAL thread_local
#else
#define HFP_THREAD_LOCAL _Thread_local
#endif

static HFP_THREAD_LOCAL const char *message = "";

#define HFP_WHY                                                                                   \\
  ": this is the stub of libhfpatch, which has no kernels; link with libhfpatch, or compute this" \\
  " another way"

static int32_t missing(const char *why) {
  message = why;
  return HFP_NOT_AVAILABLE;
}

#ifdef __cplusplus
extern "C" {
#endif

const char *hfp_last_error(void) { return message; }

int32_t hfp_abi_version(void) { return HFP_ABI_VERSION; }

const char *hfp_build_info(void) {
"""


def stub(header: Header) -> str:
    info = (
        f'{{\\"abi\\": {header.abi}, \\"devices\\": [], \\"cuda_archs\\": [], '
        '\\"compiler\\": \\"\\", \\"simd\\": \\"none\\", \\"openmp\\": false, \\"stub\\": true}'
    )
    parts = [_START, f'  return "{info}";\n}}\n']
    for function in header.functions:
        if function.name in ("hfp_last_error", "hfp_abi_version", "hfp_build_info"):
            continue
        unused = "".join(f"  (void){p.name};\n" for p in function.parameters)
        body = f'{unused}  return missing("{function.name}" HFP_WHY);\n'
        parts.append(f"\n{function.prototype} {{\n{body}}}\n")
    parts.append("\n#ifdef __cplusplus\n}\n#endif\n")
    return "".join(parts)
