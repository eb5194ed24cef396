"""Where a model lies, in which dtype, and who moves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pipelines import OneModelPipeline
from row import Case, Row, forward, only
from torch import nn

GROUP = "Placement and dtype"
HOOKED = (
    "The hooks of this placement stand on modules inside the fused blocks, which would not call "
    "them: where they come first the parts of each block are patched, where they come later the "
    "blocks go to the original until `apply` is called again."
)


def cast(*dtypes: torch.dtype) -> Callable[[Case, Any], Any]:
    def do(case: Case, model: nn.Module) -> nn.Module:
        for dtype in dtypes:
            model = model.to(dtype)
        return model

    return do


def pipeline(method: str, **settings: Any) -> Callable[[Case, Any], Any]:
    def do(case: Case, model: nn.Module) -> Any:
        pipe = OneModelPipeline(model)
        getattr(pipe, method)(**settings)
        return pipe

    return do


def group_offload(kind: str, **settings: Any) -> Callable[[Case, Any], Any]:
    def do(case: Case, model: nn.Module) -> Any:
        from diffusers.hooks import apply_group_offloading

        cpu = torch.device("cpu")
        apply_group_offloading(model, cpu, cpu, offload_type=kind, **settings)
        return model

    return do


def dispatch(case: Case, model: nn.Module) -> nn.Module:
    """Every second layer on disk, the rest on the CPU."""
    from accelerate import dispatch_model

    parts = [n for n, m in model.named_modules() if _is_leaf_of_map(n, m)]
    device_map = {n: "disk" if i % 2 else "cpu" for i, n in enumerate(parts)}
    device_map |= dict.fromkeys(model._parameters, "cpu")
    return dispatch_model(
        model,
        device_map,
        main_device="cpu",
        offload_dir=str(case.path("offload")),
        force_hooks=True,
    )


def _is_leaf_of_map(path: str, module: nn.Module) -> bool:
    """Blocks of a list, and what stands beside the lists."""
    parent, _, name = path.rpartition(".")
    if name.isdigit():
        return parent.count(".") <= 1
    return (
        not any(p.isdigit() for p in path.split("."))
        and not any(isinstance(m, nn.ModuleList) for m in module.modules())
        and ("." not in path or (path.count(".") == 1 and not module._modules))
    )


def auto(case: Case, model: nn.Module) -> nn.Module:
    """Saved and loaded again by `from_pretrained`, which places it."""
    folder = case.path("model")
    model.save_pretrained(folder)
    return (
        type(model)
        .from_pretrained(
            folder,
            device_map="auto",
            max_memory={"cpu": _size(model) // 2},
            offload_folder=str(case.path("offload")),
        )
        .eval()
    )


def _size(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def accelerate_call(name: str) -> Callable[[Case, Any], Any]:
    def do(case: Case, model: nn.Module) -> nn.Module:
        import accelerate

        if name == "disk_offload":
            accelerate.disk_offload(model, str(case.path("offload")), "cpu")
        else:
            getattr(accelerate, name)(model, "cpu")
        return model

    return do


def layerwise_casting(case: Case, model: nn.Module) -> nn.Module:
    from diffusers.hooks import apply_layerwise_casting

    fp8 = torch.float8_e4m3fn
    if case.column.is_denoiser:
        model.enable_layerwise_casting(fp8, torch.float32)
    else:  # modules whose weights are read by another one, or their dtype
        skipped = ("norm", "conv1d", "wo$", "embed", "shared", "lm_head")
        apply_layerwise_casting(model, fp8, torch.float32, skip_modules_pattern=skipped)
    return model


def unwrapped(mixed: str, keep: bool) -> Callable[[Case, Any], Any]:
    def do(case: Case, model: nn.Module) -> nn.Module:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, mixed_precision=mixed)
        prepared = accelerator.prepare_model(model, evaluation_mode=True)
        return accelerator.unwrap_model(prepared, keep_fp32_wrapper=keep)

    return do


def from_meta(case: Case, model: nn.Module) -> nn.Module:
    """Emptied to the meta device, brought back and filled again."""
    state = {k: v.clone() for k, v in model.state_dict().items()}
    buffers = {k: v.clone() for k, v in model.named_buffers()}
    model.to("meta")
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return model


def weights(change: Callable[[nn.Parameter], None]) -> Callable[[Case, Any], Any]:
    @torch.no_grad()
    def do(case: Case, model: nn.Module) -> nn.Module:
        for p in model.parameters():
            change(p)
        return model

    return do


def _new_parameters(case: Case, model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                setattr(module, name, nn.Parameter(p.detach() * 0.9))
    return model


def _halved(p: nn.Parameter) -> None:
    p.mul_(0.5)


def _moved(p: nn.Parameter) -> None:
    p.data = p.data.clone() * 0.5


def other_weights(case: Case, model: nn.Module) -> nn.Module:
    model.load_state_dict(case.build(seed=7).state_dict())
    return model


def assigned(case: Case, model: nn.Module) -> nn.Module:
    model.load_state_dict(case.build(seed=7).state_dict(), assign=True)
    return model


def swapped_tensors(case: Case, model: nn.Module) -> nn.Module:
    """Casts that exchange the tensors in a parameter for others."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(torch.bfloat16).to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def on_the_meta_device(case: Case, model: nn.Module) -> Any:
    """Shapes alone: the weights as fake tensors, which `FakeTensorMode` makes of them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        fake = {
            k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v
            for k, v in case.inputs().items()
        }
        result = case.output(model(**fake))
    return list(result.shape), str(result.dtype)


def replica(case: Case, model: nn.Module) -> Any:
    """A copy as `nn.DataParallel` makes it for another GPU: other weights in the same modules."""
    modules = list(model.modules())
    copies = {m: m._replicate_for_data_parallel() for m in modules}
    for module, other in copies.items():
        other._former_parameters = {}
        for name, child in module._modules.items():
            other._modules[name] = None if child is None else copies[child]
        for name, p in module._parameters.items():
            if p is None:
                other._parameters[name] = None
            else:
                setattr(other, name, p.detach() * 1.5)
        for name, buffer in module._buffers.items():
            other._buffers[name] = None if buffer is None else buffer.clone()
    return forward(case, copies[model]), forward(case, model)


def channels_last(case: Case, model: nn.Module) -> nn.Module:
    return model.to(memory_format=torch.channels_last)


FP64 = "The kernels take fp32, fp16 and bf16: calls in fp64 go to the original."
FP64_PARTS = (
    "The kernels take fp32, fp16 and bf16: calls in fp64 go to the original. The norms that "
    "compute in fp32 in any case are patched."
)
MIXED_GATE = (
    "In half precision the mixer hands its gated norm fp32 values with a half-precision gate: that "
    "norm goes to the original, the others are patched."
)
MADE_ANEW = (
    "`from_pretrained` makes a new model, which is not patched: call `apply` on what it returns."
)
CAST = (
    "With fp8 storage the weights of a block have several dtypes. A captured block is proven with "
    "them where casting comes first; where it comes later it goes to the original until `apply` is "
    "called again. Not every capture can be made of them."
)

ROWS = (
    Row(GROUP, '`.to("cpu")`', lambda case, model: model.to("cpu")),
    Row(
        GROUP,
        "`.to(torch.bfloat16)`",
        cast(torch.bfloat16),
        dtype=torch.bfloat16,
        why={"bamba:partly": MIXED_GATE},
    ),
    Row(
        GROUP,
        "`.half()`",
        lambda case, model: model.half(),
        dtype=torch.float16,
        why={"bamba:partly": MIXED_GATE},
    ),
    Row(GROUP, "`.to(torch.bfloat16)` and back", cast(torch.bfloat16, torch.float32)),
    Row(
        GROUP,
        "`.double()`",
        lambda case, model: model.double(),
        dtype=torch.float64,
        why={"original": FP64, "partly": FP64_PARTS},
    ),
    Row(
        GROUP,
        "`.to(memory_format=torch.channels_last)`",
        channels_last,
        unless=only("sd15-unet", "It has no convolution over images."),
    ),
    Row(GROUP, "`to_empty` from the meta device, weights loaded again", from_meta),
    Row(GROUP, "`load_state_dict` of other weights", other_weights),
    Row(GROUP, "`load_state_dict(assign=True)`", assigned, lasting=False),
    Row(GROUP, "casts under `set_swap_module_params_on_conversion`", swapped_tensors),
    Row(GROUP, "weights changed in place", weights(_halved)),
    Row(GROUP, "`parameter.data` replaced", weights(_moved)),
    Row(GROUP, "parameters replaced by new ones", _new_parameters),
    Row(
        GROUP,
        "`pipe.enable_model_cpu_offload()`",
        pipeline("enable_model_cpu_offload", device="cpu"),
        lambda case, pipe: case.output(pipe(**case.inputs())),
        forwards=2,
    ),
    Row(
        GROUP,
        "`pipe.enable_sequential_cpu_offload()` (accelerate's `cpu_offload`)",
        accelerate_call("cpu_offload"),
        lasting=False,
        why={"partly": HOOKED},
    ),
    Row(
        GROUP,
        "`disk_offload`",
        accelerate_call("disk_offload"),
        lasting=False,
        why={"partly": HOOKED},
    ),
    Row(GROUP, "group offload, blocks", group_offload("block_level", num_blocks_per_group=1)),
    Row(GROUP, "group offload, leaves", group_offload("leaf_level"), why={"partly": HOOKED}),
    Row(
        GROUP,
        "group offload with streams",
        unless=only("", "It needs a GPU, and is tested there by tests/gpu/test_cuda_compat.py."),
    ),
    Row(
        GROUP,
        "`dispatch_model`, CPU and disk",
        dispatch,
        lasting=False,
        why={"partly": HOOKED},
    ),
    Row(
        GROUP,
        '`from_pretrained(device_map="auto")`, CPU and disk',
        auto,
        lasting=False,
        unless=lambda c: (
            "diffusers has no automatic device map for its class." if c.name == "ltx" else None
        ),
        why={"original": MADE_ANEW, "partly": HOOKED},
    ),
    Row(
        GROUP,
        "layerwise casting (fp8 storage)",
        layerwise_casting,
        lasting=False,
        why={"partly": CAST},
    ),
    Row(
        GROUP,
        "called with fake tensors",
        run=on_the_meta_device,
        why={"original": "There is nothing to compute: shapes come from the original."},
    ),
    Row(
        GROUP,
        "copies by `nn.DataParallel`",
        run=replica,
        forwards=1,
        unless=lambda c: (
            "Its class asks its own parameters for their dtype, of which such a copy has none."
            if c.name == "wan"
            else None
        ),
    ),
    Row(GROUP, "`unwrap_model`", unwrapped("no", True)),
    Row(GROUP, "`unwrap_model(keep_fp32_wrapper=False)`", unwrapped("bf16", False)),
)
