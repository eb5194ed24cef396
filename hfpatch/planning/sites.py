"""The modules of a model, where each runs, and what rules one out before anything is run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from hfpatch import swap
from hfpatch.blocks.base import BlockSubject
from hfpatch.leaves.custom import CustomSubject
from hfpatch.ops import KERNEL_DTYPES
from hfpatch.planning.plan import Refusal
from hfpatch.proof.keys import is_given_back
from hfpatch.proof.subject import Subject, class_of, is_dtensor
from hfpatch.proof.unchanged import is_hooked


@dataclass(frozen=True)
class Site:
    """A module of the model and where it runs.

    `execution` is the device type that an offload hook, on it or above, moves its inputs to, if one
    does; `home` the device type of the nearest weights, its own or those of a module above it.
    `planned` is the device type that a plan is for, whatever the weights are on now.
    `gathered` says that FSDP2, on it or above, makes its DTensors plain parameters for its forward.
    """

    path: str
    module: nn.Module
    execution: str | None
    home: str
    gathered: bool = False
    planned: str | None = None


def sites_of(prefix: str, root: nn.Module, planned: str | None) -> Iterator[Site]:
    """The modules of `root`, above before below; `planned` is the device type of a plan for one."""
    execution: dict[str, str | None] = {}
    home: dict[str, str] = {}
    gathered: dict[str, bool] = {}
    for path, module in root.named_modules():
        above = path.rpartition(".")[0]
        while above and above not in gathered:  # a child put into `_modules` may be named "a.b"
            above = above.rpartition(".")[0]
        gathered[path] = _is_fully_sharded(module) or (gathered[above] if path else False)
        execution[path] = execution_device(module) or (execution[above] if path else None)
        own = next((p.device.type for p in module.parameters()), None)
        home[path] = own or (home[above] if path else "cpu")
        full = f"{prefix}.{path}" if prefix and path else prefix or path
        yield Site(full, module, execution[path], home[path], gathered[path], planned)


def _is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on it; nothing of torch.distributed is imported for this."""
    return class_of(module) is not type(module) and hasattr(module, "unshard")


def execution_device(module: nn.Module) -> str | None:
    """Device type that accelerate's hook on this module moves its inputs to."""
    hook = module.__dict__.get("_hf_hook")
    for h in getattr(hook, "hooks", (hook,)):
        device = getattr(h, "execution_device", None)
        if device is not None:
            if isinstance(device, int):
                return "cuda"
            return torch.device(device).type
    return None


def probe_devices(site: Site) -> tuple[str, ...] | Refusal:
    """Device types to prove on: where the weights are, and where a hook will move the input."""
    if site.planned is not None:
        return (site.planned,)
    found = {site.execution} if site.execution is not None else set()
    for child in site.module.modules():
        hook = execution_device(child) or site.execution
        for p in child._parameters.values():
            if p is not None:  # an offload hook brings weights that are on the meta device now
                found.add(hook if hook is not None and p.is_meta else p.device.type)
    found = found or {site.home}
    if "meta" in found:
        return Refusal(
            "unsupported", "its weights are on the meta device; load them, then call apply again"
        )
    other = found - {"cpu", "cuda", "xpu"}
    if other:
        return Refusal("unsupported", f"no kernel for device {', '.join(sorted(other))}")
    return tuple(sorted(found))


def unfit(site: Site, subject: Subject) -> Refusal | None:
    """What rules a module out before anything is run."""
    module = site.module
    foreign = swap.foreign_forward(module)
    if foreign is not None:
        return Refusal("foreign", foreign)
    if torch.nn.utils.parametrize.is_parametrized(module):
        return Refusal("unsupported", "its parameters are parametrized")
    hooked = [n for n in subject.bypassed if is_hooked(module._modules[n])]  # type: ignore[arg-type]
    if hooked:
        return Refusal(
            "unsupported", f"child `{hooked[0]}` has hooks, which the fused forward would not run"
        )
    why = _without_memory(module, isinstance(subject, BlockSubject))
    if why is None and isinstance(subject, CustomSubject) and subject.own:
        why = _partitioned(site, subject)
    if why is not None:
        return Refusal("unsupported", why)
    if isinstance(subject, CustomSubject):
        return None
    for child in subject.covers():
        if (foreign := swap.foreign_forward(child)) is not None:
            return Refusal(
                "unsupported",
                f"the fused forward would not run a `{type(child).__name__}` inside: {foreign}",
            )
    why = _partitioned(site, subject)
    if why is None and isinstance(subject, BlockSubject) and _context_parallel(module):
        why = "its attention is split over several GPUs (context parallel)"
    if why is not None:
        return Refusal("unsupported", why)
    for name, p in module._parameters.items():
        if p is None:
            continue
        if not is_dtensor(p) and type(p) not in (nn.Parameter, torch.Tensor):
            return Refusal("unsupported", f"`{name}` is a {type(p).__name__}")
        if p.dtype not in KERNEL_DTYPES:
            return Refusal(
                "unsupported",
                f"`{name}` is {p.dtype}; the kernels take "
                f"{', '.join(str(t).removeprefix('torch.') for t in KERNEL_DTYPES)}",
            )
    return None


def _context_parallel(block: nn.Module) -> bool:
    """Whether diffusers' `enable_parallelism` splits the attention of a block."""
    processors = [getattr(m, "processor", None) for m in block.modules()]
    return any(getattr(p, "_parallel_config", None) is not None for p in processors)


def _without_memory(module: nn.Module, whole: bool) -> str | None:
    """Why tensors cannot be read, if their memory is given back between calls."""
    for m in module.modules() if whole else (module,):
        for name, t in {**vars(m), **m._parameters, **m._buffers}.items():
            if isinstance(t, torch.Tensor) and is_given_back(t):
                return (
                    f"`{name}` has no memory now: it is given back between calls, as FSDP1 does; "
                    "call `apply` before the model is wrapped"
                )
    return None


def _partitioned(site: Site, subject: Subject) -> str | None:
    """Why parameters of which each process holds a part cannot be read, if they cannot.

    FSDP2 gathers them before the forward. Nobody does so for tensor parallel, and DeepSpeed's hooks
    of ZeRO-3 stand on each module inside a block as well. Projections are called, not read.
    """
    whole = isinstance(subject, BlockSubject)
    for name, p in site.module.named_parameters(recurse=whole):
        if is_dtensor(p) and not site.gathered:
            return f"`{name}` is a DTensor: a part of it is here"
        if p.numel() == 0 and p.device.type != "meta":
            return (
                f"`{name}` is empty, as DeepSpeed's ZeRO-3 leaves it between calls; call `apply` "
                "before the model is partitioned"
            )
    return None
