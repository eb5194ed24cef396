"""Adapters and quantized layers: never bypassed, never frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from row import Case, Row, forward, only
from rows_training import GRADIENT_NOISE, PARTS, _as_one, loss_of
from torch import nn

GROUP = "Adapters and quantization"
DENOISERS = "LoRA loaders of this kind are diffusers'."


def linear_names(model: nn.Module, suffix: str = "") -> list[str]:
    """Paths of the linear layers inside the blocks."""
    return [
        n
        for n, m in model.named_modules()
        if type(m) is nn.Linear and n.endswith(suffix) and any(p.isdigit() for p in n.split("."))
    ]


def lora_config(model: nn.Module, **settings: Any) -> Any:
    """LoRA on every linear layer of the blocks, with an effect from the start."""
    from peft import LoraConfig

    defaults = {"r": 4, "lora_alpha": 8, "init_lora_weights": False}
    return LoraConfig(**(defaults | {"target_modules": linear_names(model)} | settings))


def peft_model(**settings: Any) -> Callable[[Case, Any], Any]:
    def do(case: Case, model: nn.Module) -> nn.Module:
        from peft import get_peft_model

        model = get_peft_model(model, lora_config(model, **settings))
        _seed(model)
        return model.eval()

    return do


@torch.no_grad()
def _seed(model: nn.Module) -> None:
    """Adapter weights that depend on their name alone, whoever made them, and are not zero."""
    for name, p in model.named_parameters():
        if "lora" in name and "magnitude" not in name:
            g = torch.Generator().manual_seed(sum(name.encode()))
            p.copy_(torch.randn(p.shape, generator=g) * 0.1)


def added_adapter(case: Case, model: nn.Module) -> nn.Module:
    """The library's own `model.add_adapter`."""
    model.add_adapter(lora_config(model), "first")
    _seed(model)
    return model.eval()


def added_between_applies(case: Case, model: nn.Module) -> nn.Module:
    """An adapter, `apply`, another adapter, `apply`, the first one deleted."""
    import hfpatch

    patched, config = bool(hfpatch.status(model).swaps), lora_config(model)
    for name in ("first", "second"):
        model.add_adapter(config, name)
        _seed(model)
        if patched:
            hfpatch.apply(model)
    getattr(model, "delete_adapters", getattr(model, "delete_adapter", None))("first")
    getattr(model, "set_adapters", model.set_adapter)("second")
    return model.eval()


def two_adapters(case: Case, model: nn.Module) -> nn.Module:
    from peft import get_peft_model

    config = lora_config(model)
    model = get_peft_model(model, config, "first")
    model.add_adapter("second", config)
    _seed(model)
    return model.eval()


def switched(case: Case, model: Any) -> Any:
    """Under the one, the other, none, and the first again."""
    outputs = []
    for name in ("first", "second"):
        model.set_adapter(name)
        outputs.append(forward(case, model))
    with model.disable_adapter():
        outputs.append(forward(case, model))
    model.set_adapter("first")
    outputs.append(forward(case, model))
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    return outputs


def merged(case: Case, model: Any) -> Any:
    """Merged, unmerged; the weights then put back to the bit, which unmerging rounds."""
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.merge_adapter()
    first = forward(case, model)
    model.unmerge_adapter()
    second = forward(case, model)
    model.load_state_dict(before)
    return first, second


def merged_for_good(case: Case, model: nn.Module) -> nn.Module:
    return peft_model()(case, model).merge_and_unload()


def lora_gradients(case: Case, model: Any) -> Any:
    """Training an adapter: the frozen model around it must pass gradients to every layer."""
    loss = loss_of(case, model)
    loss.backward()
    grads = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    assert grads and all("lora" in k for k in grads)
    result = loss.detach(), _as_one(grads)
    for p in model.parameters():
        p.grad = None
    return result


def diffusers_pipeline(case: Case, model: nn.Module) -> Any:
    """The pipeline of this family around the one model."""
    import diffusers

    name, part = {
        "ltx": ("LTXPipeline", "transformer"),
        "flux": ("FluxPipeline", "transformer"),
        "wan": ("WanPipeline", "transformer"),
        "sd15-unet": ("StableDiffusionPipeline", "unet"),
    }[case.column.name]
    parts: dict[str, Any] = dict.fromkeys(
        ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    )
    if name == "StableDiffusionPipeline":
        parts |= {"safety_checker": None, "feature_extractor": None}
        parts["requires_safety_checker"] = False
    if not name.startswith("Flux"):
        parts.pop("text_encoder_2")
        parts.pop("tokenizer_2")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    if part == "unet":
        scheduler = diffusers.DDIMScheduler(clip_sample=False, steps_offset=1)
    return getattr(diffusers, name)(**parts, scheduler=scheduler, **{part: model})


def loaded_lora(case: Case, model: nn.Module) -> Any:
    """`pipe.load_lora_weights` of a file as trainers write it."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    twin = case.build()
    twin.add_adapter(lora_config(twin), "default")
    _seed(twin)
    pipe = diffusers_pipeline(case, model)
    part = "unet" if hasattr(pipe, "unet") else "transformer"
    state = {f"{part}.{k}": v for k, v in get_peft_model_state_dict(twin).items()}
    folder = case.path("lora")
    folder.mkdir()
    save_file(state, folder / "pytorch_lora_weights.safetensors")
    pipe.load_lora_weights(str(folder), adapter_name="style")
    return model


def scaled_lora(case: Case, model: Any) -> Any:
    """At several scales, as `pipe.set_adapters(..., weights)` sets them."""
    outputs = []
    for scale in (1.0, 0.5):
        model.set_adapters("style", scale)
        outputs.append(forward(case, model))
    model.set_adapters("style", 1.0)
    assert not torch.equal(*outputs)
    return outputs


def unloaded_lora(case: Case, model: nn.Module) -> nn.Module:
    loaded_lora(case, model)
    model.unload_lora()
    return model


def fused_lora(case: Case, model: nn.Module) -> nn.Module:
    loaded_lora(case, model)
    model.fuse_lora()
    return model


def fused_qkv(case: Case, model: nn.Module) -> nn.Module:
    model.fuse_qkv_projections()
    return model


# Quantized and foreign linear layers ------------------------------------------------------------


def quantizable(model: nn.Module) -> list[str]:
    """As quantizers choose: not T5's `wo`, whose class reads its dtype; rows of whole groups."""
    return [
        n
        for n in linear_names(model)
        if not n.endswith(".wo") and model.get_submodule(n).in_features % 32 == 0
    ]


def replaced(make: Callable[[nn.Linear], nn.Module]) -> Callable[[Case, Any], Any]:
    """Linear layers of the blocks replaced, as quantizers do it."""

    def do(case: Case, model: nn.Module) -> nn.Module:
        for name in quantizable(model):
            parent, _, child = name.rpartition(".")
            owner = model.get_submodule(parent)
            setattr(owner, child, make(getattr(owner, child)))
        return model

    return do


class CountingLinear(nn.Linear):
    """Somebody's own layer: it computes more than `F.linear`, and counts."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.linear(x, self.weight * 0.5, self.bias)


def counting_linear(linear: nn.Linear) -> nn.Module:
    other = CountingLinear(linear.in_features, linear.out_features, linear.bias is not None)
    other.load_state_dict(linear.state_dict())
    return other


def calls_of_linears(case: Case, model: nn.Module) -> Any:
    found = {n: m for n, m in model.named_modules() if isinstance(m, CountingLinear)}
    before = {n: m.calls for n, m in found.items()}
    output = forward(case, model)
    calls = {n: m.calls - before[n] for n, m in found.items()}
    assert sum(calls.values()) > 0
    for m in found.values():
        m.calls = 0
    return output, calls


def bnb_8bit(linear: nn.Linear) -> nn.Module:
    import bitsandbytes as bnb

    bias = linear.bias is not None
    other = bnb.nn.Linear8bitLt(
        linear.in_features, linear.out_features, bias, has_fp16_weights=False
    )
    other.load_state_dict(linear.state_dict())
    return other.to("cpu").requires_grad_(False)


def bnb_4bit(linear: nn.Linear) -> nn.Module:
    import bitsandbytes as bnb

    bias = linear.bias is not None
    other = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias, torch.float32, quant_type="nf4"
    )
    other.load_state_dict(linear.state_dict())
    return other.to("cpu").requires_grad_(False)


def gguf(linear: nn.Linear) -> nn.Module:
    import gguf as library
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    kind = library.GGMLQuantizationType.Q8_0
    data = library.quantize(linear.weight.detach().numpy().astype(np.float32), kind)
    bias = linear.bias is not None
    other = GGUFLinear(linear.in_features, linear.out_features, bias, torch.float32)
    other.weight = GGUFParameter(torch.from_numpy(data), quant_type=kind)
    if bias:
        other.bias = linear.bias
    return other.requires_grad_(False)


def torchao_int8(case: Case, model: nn.Module) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    names = set(quantizable(model))
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda m, name: name in names)
    return model


FUSED_QKV = (
    "Fused projections come with another attention processor, which the fused blocks do not know: "
    "they go to the original. (Fused blocks pack these weights themselves.)"
)
QUANTIZED = (
    "Where the layers are quantized first, some fused blocks cannot read off them in which dtype "
    "they compute, and where they are quantized later captured blocks go to the original until "
    "`apply` is called again: their parts are patched."
)
SOMEBODYS = (
    "A captured block was proven with other layers where these come later: it goes to the original "
    "until `apply` is called again; its parts are patched."
)

ROWS = (
    Row(GROUP, "PEFT `get_peft_model`, LoRA", peft_model()),
    Row(GROUP, "PEFT `get_peft_model`, DoRA", peft_model(use_dora=True)),
    Row(GROUP, "`model.add_adapter`", added_adapter),
    Row(GROUP, "adapters added and deleted between two applies", added_between_applies),
    Row(GROUP, "`set_adapter`, `disable_adapter`", two_adapters, switched, forwards=4),
    Row(GROUP, "`merge_adapter`, `unmerge_adapter`", peft_model(), merged, forwards=2),
    Row(GROUP, "`merge_and_unload`", merged_for_good),
    Row(
        GROUP,
        'gradients of LoRA weights, `mode="training"`',
        peft_model(),
        lora_gradients,
        mode="training",
        why={"partly": PARTS},
        noise=GRADIENT_NOISE,
    ),
    Row(
        GROUP,
        "`pipe.load_lora_weights`, `set_adapters`",
        loaded_lora,
        scaled_lora,
        forwards=2,
        lasting=False,
        unless=only("denoiser", DENOISERS),
    ),
    Row(GROUP, "`fuse_lora`", fused_lora, unless=only("denoiser", DENOISERS)),
    Row(GROUP, "`unload_lora`", unloaded_lora, unless=only("denoiser", DENOISERS)),
    Row(
        GROUP,
        "`fuse_qkv_projections`",
        fused_qkv,
        unless=only("denoiser", "Its class has no `fuse_qkv_projections` (it is diffusers')."),
        why={"partly": FUSED_QKV},
    ),
    Row(
        GROUP,
        "own subclass of `nn.Linear`",
        replaced(counting_linear),
        calls_of_linears,
        forwards=1,
        why={"partly": SOMEBODYS},
    ),
    Row(GROUP, "torchao int8, weights only", torchao_int8, why={"partly": QUANTIZED}),
    Row(GROUP, "bitsandbytes 8 bit", replaced(bnb_8bit), why={"partly": QUANTIZED}),
    Row(GROUP, "bitsandbytes 4 bit (NF4)", replaced(bnb_4bit), why={"partly": QUANTIZED}),
    Row(GROUP, "GGUF layers (Q8_0)", replaced(gguf), why={"partly": QUANTIZED}),
)
