"""What hfpatch must do to a model, counted from the model itself by rules of our own.

Deliberately not written with hfpatch's registry: a rule that is wrong in both places would hide.
"""

from __future__ import annotations

import torch
from torch import nn

#: Activation classes that launch several kernels in eager PyTorch, so that a fused one gains.
COMPOSED_ACTIVATIONS = {
    "NewGELUActivation",
    "FastGELUActivation",
    "QuickGELUActivation",
    "AccurateGELUActivation",
    "ApproximateGELU",
}

#: Blocks that are fused as a whole by a file of their own: those of other classes are captured.
FUSED_BLOCKS = {
    "ResnetBlock2D",
    "Transformer2DModel",
    "LTXVideoResnetBlock3d",
    "LTXVideoUpsampler3d",
    "Flux2TransformerBlock",
    "Flux2SingleTransformerBlock",
    "HunyuanVideoTransformerBlock",
    "HunyuanVideoSingleTransformerBlock",
    "CogVideoXBlock",
    "MochiTransformerBlock",
    "LTX2VideoTransformerBlock",
    "SanaTransformerBlock",
    "HunyuanVideo15TransformerBlock",
    "HunyuanImageTransformerBlock",
    "HunyuanImageSingleTransformerBlock",
}

#: Norms that a fused block calls as modules, so that a kernel takes each over by itself.
CALLED_NORMS = {("LTXVideoResnetBlock3d", "norm3")}

#: Modules whose results are kept between the steps of a denoiser.
RECALLED = {
    "LTXVideoTransformer3DModel",
    "LTXVideoRotaryPosEmbed",
    "LTX2VideoTransformer3DModel",
}


def is_fused_block(module: nn.Module) -> bool:
    """A hook on a norm or an attention inside would not fire, so such a block is not fused; on a
    norm that it calls as a module it does."""
    name = type(module).__name__
    return name in FUSED_BLOCKS and not any(
        "_hf_hook" in m.__dict__
        for path, m in module.named_modules()
        if ("norm" in path.rpartition(".")[2] and (name, path) not in CALLED_NORMS)
        or path in ("attn", "attn1", "attn2")
    )


def is_norm_of(model: nn.Module, path: str, blocks: list[str]) -> bool:
    parent, _, last = path.rpartition(".")
    if parent.rpartition(".")[0].endswith(".transformer_blocks") and parent not in blocks:
        return False  # of a captured block inside of a frame
    called = (type(model.get_submodule(parent)).__name__, last) in CALLED_NORMS
    return "norm" in last and not called and any(path.startswith(f"{b}.") for b in blocks)


#: Of the zoo, whose decoding steps an engine takes over.
DECODING = {
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Olmo2ForCausalLM", "Phi3ForCausalLM"),
}


def expected_swaps(model: nn.Module) -> dict[str, str]:
    """{path: op} of every module that a kernel must take over."""
    found: dict[str, str] = {}
    hooked = any("_hf_hook" in m.__dict__ for path, m in model.named_modules() if path)
    if type(model).__name__ in DECODING and not hooked:
        found[""] = "decoding"
    blocks = [p for p, m in model.named_modules() if is_fused_block(m)]
    for path, module in model.named_modules():
        name = type(module).__name__
        children = set(module._modules)
        if path in blocks:
            found[path] = "block"
        elif name == "LTXVideoCausalConv3d":
            inside = any(path.startswith(f"{b}.") for b in blocks)
            if not inside and module.kernel_size[0] > 1:
                found[path] = "block"
        elif name in RECALLED:
            found[path] = "recall"
        elif is_norm_of(model, path, blocks):
            continue  # part of the block's own kernels
        elif not children and "RMSNormGated" in name:
            found[path] = "gated_rms_norm"
        elif (not children and "RMSNorm" in name) or name == "T5LayerNorm":
            found[path] = "rms_norm"
        elif not children and "LayerNorm" in name:
            found[path] = "layer_norm"
        elif (
            {"gate_proj", "up_proj", "down_proj"} <= children
            or {
                "wi_0",
                "wi_1",
                "wo",
            }
            <= children
            or name == "LuminaFeedForward"
        ):
            found[path] = "gated"
        elif "gate_up_proj" in children or name in ("GEGLU", "SwiGLU"):
            found[path] = "gated_packed"
        elif name in COMPOSED_ACTIVATIONS and found.get(path.rpartition(".")[0]) != "gated":
            found[path] = "gelu"  # inside a gated MLP it is part of the MLP's own kernel
    return found


def relative_error(y: torch.Tensor, truth: torch.Tensor) -> float:
    """Frobenius norm of the error over that of `truth`: stable where a maximum is a lottery."""
    return ((y.double() - truth.double()).norm() / truth.double().norm()).item()


def snapshot(model: nn.Module) -> dict[str, dict[str, object]]:
    """Every module's `__dict__`, one level deep copied: what `restore` must give back."""

    def freeze(value: object) -> object:
        return dict(value) if isinstance(value, dict) else value

    return {
        path: {k: freeze(v) for k, v in m.__dict__.items()} for path, m in model.named_modules()
    }


def assert_same_dicts(
    before: dict[str, dict[str, object]], model: nn.Module, *, tensors: bool = True
) -> None:
    """The model's modules hold the very same objects under the same names as in `before`.

    `tensors=False` for an offloaded model, whose hooks put new placeholders in at every call.
    """
    for path, module in model.named_modules():
        expected = before[path]
        assert list(module.__dict__) == list(expected), f"`{path}`: attributes changed"
        for key, old in expected.items():
            new = module.__dict__[key]
            if isinstance(old, dict):
                assert list(new) == list(old), f"`{path}.{key}`"
                if tensors or key not in ("_parameters", "_buffers"):
                    assert all(new[k] is old[k] for k in old), f"`{path}.{key}`"
            else:
                assert new is old or new == old, f"`{path}.{key}`"
