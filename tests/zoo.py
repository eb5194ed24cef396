"""Small models of the real transformers and diffusers classes, with random weights.

Every entry builds in milliseconds, runs on a CPU in a fraction of a second and is deterministic:

    entry = zoo.ENTRIES["llama"]
    model = entry.build(torch.bfloat16)
    inputs = entry.inputs(model, torch.bfloat16)
    y = entry.run(model, inputs)              # the tensor to compare

All parameters are random, norm weights and biases too: a norm that multiplies by `w` and one that
multiplies by `1 + w` differ, and so do a bias that is added and one that is dropped.
"""

from __future__ import annotations

import copy
import functools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import zoo_families as families
import zoo_models as models
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from zoo_models import Inputs

SEED = 0
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Entry:
    """One model (or pipeline) of the zoo.

    `make()` constructs it, `sample(model, generator)` gives the keyword arguments of one forward in
    fp32, `output(result)` picks the tensor to compare.
    """

    name: str
    make: Callable[[], Any]
    sample: Callable[[Any, torch.Generator], Inputs]
    output: Callable[[Any], torch.Tensor]
    is_pipeline: bool = False

    def build(self, dtype: torch.dtype = torch.float32, seed: int = SEED) -> Any:
        """The model on the CPU in eval mode, in `dtype` (fp32 where the library keeps it so)."""
        with torch.random.fork_rng(devices=[]):  # the constructors draw from the global generator
            torch.manual_seed(seed)
            model = self.make()
        for module in modules_of(model):
            randomize_(module, seed)
            cast_(module, dtype)
            module.eval()
        return model

    def inputs(
        self,
        model: Any,
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator | None = None,
    ) -> Inputs:
        """Keyword arguments of one call, on the CPU, floating tensors in `dtype`.

        Without a `generator` the values are always the same. Drawn in fp32 and cast, so that every
        dtype sees the same numbers. Reusable: nothing in them is consumed by a call.
        """
        generator = generator or torch.Generator().manual_seed(SEED + 1)
        return cast_inputs(self.sample(model, generator), dtype)

    @torch.no_grad()
    def run(self, model: Any, inputs: Inputs) -> torch.Tensor:
        """The model's output tensor for `inputs`."""
        return self.output(model(**inputs))

    def reference(self, model: Any, inputs: Inputs) -> torch.Tensor:
        """The output in fp64 of an fp64 copy of `model`: the same parameter and input values."""
        return self.run(in_fp64(model), cast_inputs(inputs, torch.float64))


class _Fp64Throughout(TorchDispatchMode):
    """What is fp64 stays so where the library's code casts it to fp32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        casts = func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64
        if casts and kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def in_fp64(model: Any) -> Any:
    """An fp64 copy of `model` with the same parameter values.

    Norms cast their input to fp32; those of the copy do not, or the truth would have their
    roundings. Other casts (tables of RoPE, embeddings of a timestep) are what the model means.
    """
    twin = copy.deepcopy(model)
    for module in modules_of(twin):
        norms_in_fp64_(cast_(module, torch.float64))
    return twin


def norms_in_fp64_(model: nn.Module) -> nn.Module:
    """The norms of a model in fp64 compute in fp64."""
    for part in model.modules():
        if "norm" in type(part).__name__.lower() and not part._modules:
            part.forward = functools.partial(_throughout, part.forward)
    return model


def _throughout(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Fp64Throughout():  # some models cast before they call
        return forward(*map(_wide, args), **{k: _wide(v) for k, v in kwargs.items()})


def _wide(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if floating else value


def modules_of(model: Any) -> list[nn.Module]:
    """[model], or the modules of a diffusers pipeline."""
    if isinstance(model, nn.Module):
        return [model]
    return [part for part in model.components.values() if isinstance(part, nn.Module)]


def cast_inputs(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """`inputs` with floating tensors in `dtype`, in lists too; all else as it is (also tuples:
    RoPE tables, which are fp32 in every model)."""

    def cast(value: Any) -> Any:
        if isinstance(value, list):
            return [cast(v) for v in value]
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    return {name: cast(value) for name, value in inputs.items()}


@torch.no_grad()
def randomize_(model: nn.Module, seed: int = SEED) -> nn.Module:
    """Gives every parameter random values that depend on `seed` and the parameter's name alone.

    Matrices and convolutions: N(0, 1 / fan_in), which keeps activations near unit scale however
    small the model is. Embeddings: N(0, 1). One-dimensional weights (norms): U(0.5, 1.5).
    Other vectors (biases): N(0, 0.1^2).
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, p in model.named_parameters():
        g = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        if p.ndim >= 2:
            std = 1.0 if id(p) in embeddings else (p[0].numel()) ** -0.5
            p.copy_(torch.randn(p.shape, generator=g) * std)
        elif name.endswith("weight"):
            p.copy_(torch.rand(p.shape, generator=g) + 0.5)
        else:
            p.copy_(torch.randn(p.shape, generator=g) * 0.1)
    return model


def cast_(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts as `from_pretrained(dtype=...)` does: what is in the state dict, but not the modules
    that the library keeps in fp32, and no non-persistent buffer (RoPE tables).

    Not in fp64: a reference is in fp64 throughout.
    """
    keep = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    # transformers keeps these in fp32 for fp16 alone, diffusers for every half type
    if dtype == torch.float16 or type(model).__module__.startswith("diffusers"):
        keep |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    half = dtype in (torch.float16, torch.bfloat16)
    # keep_vars: the parameters and buffers themselves, not detached copies
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            fp32 = half and any(part in keep for part in name.split("."))
            tensor.data = tensor.data.to(torch.float32 if fp32 else dtype)
    return model


def _table(*entries: Entry) -> Mapping[str, Entry]:
    return {entry.name: entry for entry in entries}


ENTRIES: Mapping[str, Entry] = _table(
    Entry("ltx", models.ltx, models.ltx_sample, models.sample),
    Entry("flux", models.flux, models.flux_sample, models.sample),
    Entry("flux2", models.flux2, models.flux2_sample, models.sample),
    Entry("qwen-image", models.qwen_image, models.qwen_image_sample, models.sample),
    Entry("hunyuan-video", models.hunyuan_video, models.hunyuan_video_sample, models.sample),
    Entry("sd15-unet", models.unet, models.unet_sample, models.sample),
    Entry("sd3", models.sd3, models.sd3_sample, models.sample),
    Entry("wan", models.wan, models.wan_sample, models.sample),
    Entry("z-image", families.z_image, families.z_image_sample, families.of_list),
    Entry("lumina2", families.lumina2, families.lumina2_sample, models.sample),
    Entry("cogvideox", families.cogvideox, families.cogvideox_sample, models.sample),
    Entry("mochi", families.mochi, families.mochi_sample, models.sample),
    Entry("ltx2", families.ltx2, families.ltx2_sample, families.both_streams),
    Entry("sana", families.sana, families.sana_sample, models.sample),
    Entry("llama", models.decoder("Llama"), models.causal, models.logits),
    Entry("mistral", models.decoder("Mistral", sliding_window=8), models.causal, models.logits),
    Entry("qwen2", models.decoder("Qwen2"), models.causal, models.logits),
    Entry("qwen3", models.decoder("Qwen3", head_dim=24), models.causal, models.logits),
    Entry(
        "gemma2",
        models.decoder("Gemma2", head_dim=24, sliding_window=8),
        models.causal,
        models.logits,
    ),
    Entry(
        "gemma3",
        models.decoder("Gemma3", "Gemma3TextConfig", head_dim=24, sliding_window=8),
        models.causal,
        models.logits,
    ),
    Entry("olmo2", models.decoder("Olmo2"), models.causal, models.logits),
    Entry("phi3", models.decoder("Phi3"), models.causal, models.logits),
    Entry(
        "bamba",
        models.decoder("Bamba", attn_layer_indices=[1], **models.MAMBA),
        models.causal,
        models.logits,
    ),
    Entry(
        "falcon-h1",
        models.decoder("FalconH1", mamba_d_ssm=192, mamba_rms_norm=True, **models.MAMBA),
        models.causal,
        models.logits,
    ),
    Entry(
        "qwen3-next",
        models.decoder("Qwen3Next", **models.QWEN3_NEXT),
        models.causal,
        models.logits,
    ),
    Entry(
        "kimi-linear",
        models.decoder("KimiLinear", **models.KIMI_LINEAR),
        models.causal,
        models.logits,
    ),
    Entry("falcon", models.falcon, models.causal, models.logits),
    Entry("t5-encoder", models.t5("T5EncoderModel", "relu"), models.masked_text, models.hidden),
    Entry(
        "t5-v1.1-encoder",
        models.t5("T5EncoderModel", "gated-gelu"),
        models.masked_text,
        models.hidden,
    ),
    Entry("t5", models.t5("T5ForConditionalGeneration", "relu"), models.seq2seq, models.logits),
    Entry(
        "t5-v1.1",
        models.t5("T5ForConditionalGeneration", "gated-gelu"),
        models.seq2seq,
        models.logits,
    ),
    Entry("bert", models.bert, models.masked_text, models.hidden),
    Entry("clip-text", models.clip_text, models.text, models.hidden),
    Entry("vit", models.vit, models.vit_sample, models.hidden),
)

PIPELINES: Mapping[str, Entry] = _table(
    Entry(
        "ltx-pipeline",
        models.ltx_pipeline,
        models.ltx_pipeline_sample,
        models.frames,
        is_pipeline=True,
    ),
)
