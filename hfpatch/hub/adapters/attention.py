"""Attention and quantization packages: no op of ours, but transformers and diffusers take them."""

from __future__ import annotations

from hfpatch.hub.adapters.base import Adapter

_TRANSFORMERS = "transformers: `model.set_attn_implementation({!r})`"
_DIFFUSERS = "diffusers: `model.set_attention_backend({!r})`"


def _flash(repo: str, version: int, package: str, backend: str) -> Adapter:
    return Adapter(
        repo,
        version,
        package,
        route=f"{_TRANSFORMERS.format(repo)}; {_DIFFUSERS.format(backend)}",
        route_needs=("flash_attn_func(q, k, v)", "flash_attn_varlen_func(q, k, v)"),
    )


FLASH_ATTN2 = _flash("kernels-community/flash-attn2", 4, "flash-attn2", "flash_hub")
FLASH_ATTN3 = _flash("kernels-community/flash-attn3", 1, "flash-attn3", "_flash_3_hub")

FINEGRAINED_FP8 = Adapter(
    "kernels-community/finegrained-fp8",
    4,
    "finegrained-fp8",
    route="transformers: `quantization_config=FineGrainedFP8Config()` loads it",
    route_needs=("fp8_act_quant()", "matmul_2d()"),
)
EETQ = Adapter(
    "kernels-community/quantization-eetq",
    1,
    "quantization-eetq",
    route="transformers: `quantization_config=EetqConfig('int8')` loads it",
    route_needs=("w8_a16_gemm()", "quant_weights()"),
)
