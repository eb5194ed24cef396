"""The head of a language model in training: its logits are made when somebody reads them.

See `hfpatch.losses.deferred_logits`. A head has no class name of its own: it is the linear layer
that a model's `get_output_embeddings` names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from hfpatch.announce import announce_in_call
from hfpatch.leaves.recall import RecallSubject
from hfpatch.losses.deferred_logits import Adapter, DeferredLogits
from hfpatch.losses.head_loss import refusal
from hfpatch.losses.resharded import is_resharded
from hfpatch.losses.taken import called_by, head_of
from hfpatch.ops import KERNEL_DTYPES
from hfpatch.per_object import PerObject
from hfpatch.planning.plan import HEAD
from hfpatch.proof.contract import Contract
from hfpatch.proof.subject import (
    Family,
    Forward,
    Subject,
    Tensor,
    autocasts,
    coded,
    is_dtensor,
    plain,
    watched,
)
from hfpatch.proof.unchanged import is_hooked
from hfpatch.training import lora

if TYPE_CHECKING:
    from hfpatch.planning.sites import Site


_RESHARDED = (
    "the head's logits are made, which takes their memory: FSDP2 gives its weight back behind the "
    "forward of its unit (`reshard_after_forward=True`), and a loss without logits needs it then; "
    "leave that option to its default for the model that has the head"
)
#: Why the logits of each head were made whole, in the order in which that was found.
_whole: PerObject[nn.Module, dict[str, None]] = PerObject()
_MOST = 8


class Heads(Family):
    """Linear layers from hidden states to logits."""

    name = "head"
    pattern = re.compile(r"(?!)")  # no class name: see `head_sites`
    rank = 6
    replacement: ClassVar[Any] = None
    differentiable = True

    def examine(self, module: nn.Module) -> Subject | str | None:
        layer: nn.Module = module
        if lora.is_adapted(module):
            parts = lora.adapted(module)
            if parts is None:
                return f"its logits cannot be deferred: {lora.why_not(module)}"
            layer = parts.base
        if type(layer) is not nn.Linear:
            return f"its logits cannot be deferred: the head is a `{type(layer).__name__}`"
        held: list[Any] = [p for p in layer._parameters.values() if p is not None]
        if layer._parameters.get("weight") is None:  # FSDP1 leaves a view of its flat parameter
            return "its logits cannot be deferred: the head's weight is not its parameter"
        # FSDP2 makes a DTensor whole for the forward. Where nobody does, planning says so.
        own = [p.to_local() if is_dtensor(p) else p for p in held]
        if not all(map(plain, own)):
            return "its logits cannot be deferred: the head's weight is a tensor subclass"
        if (why := refusal(own[0], own[0])) is not None:
            return f"its logits cannot be deferred: {why}"
        return HeadSubject(module, "logits made only where they are read", _deferring, self)

    def compare(self, module: nn.Module) -> tuple[float, float] | str:
        """The loss and its gradients of a small head of the same dtype, against PyTorch's own."""
        generator = torch.Generator().manual_seed(0)
        parts = lora.adapted_inside(module) if lora.is_adapted(module) else None
        layer: Any = module if parts is None else parts.base
        device, dtype = layer.weight.device, layer.weight.dtype

        def drawn(*shape: int) -> Tensor:
            with torch.inference_mode(False):
                x = torch.randn(shape, generator=generator).to(device, dtype)
                return x.requires_grad_()

        x, weight = drawn(2, 9, 24), drawn(50, 24)
        bias = None if layer.bias is None else drawn(50)
        a, b = (None, None) if parts is None else (drawn(3, 24), drawn(50, 3))
        target = torch.randint(50, (18,), generator=generator)
        target[3] = -100
        leaves = [t for t in (x, weight, bias, a, b) if t is not None]
        found = []
        with torch.enable_grad():
            for defers in (True, False):
                if defers:
                    adapter = None if a is None or b is None else Adapter(a, b, 0.5, dtype)
                    logits: Tensor = DeferredLogits.of(x, weight, bias, adapter)
                else:
                    logits = F.linear(x, weight, bias)
                    if a is not None and b is not None:
                        logits = logits + F.linear(F.linear(x, a), b) * 0.5
                logits = logits.float().view(-1, 50)
                loss = F.cross_entropy(logits, target.to(x.device))
                found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
        return _apart(found, torch.finfo(dtype).eps)


class HeadSubject(RecallSubject):
    """A head; what it returns is read by its model, so nothing inside is bypassed."""

    op = HEAD

    def parameters(self) -> dict[str, Tensor | None]:
        if not lora.is_adapted(self.module):
            return super().parameters()
        return dict(self.module.named_parameters())

    def forward(self, original: Forward, contract: Contract) -> Forward:
        _whole.pop(self.module, None)
        return super().forward(original, contract)


def _apart(found: list[list[Tensor]], eps: float) -> tuple[float, float] | str:
    worst = 0.0
    for ours, theirs in zip(*found, strict=True):
        scale = theirs.double().abs().max().item()
        worst = max(worst, (ours.double() - theirs.double()).abs().max().item() / scale)
    if worst > 8 * eps:
        return (
            f"the loss or a gradient is off by {worst:.2g} of the largest, expected {8 * eps:.2g}"
        )
    return worst, 8 * eps


def _deferring(original: Forward) -> Forward:
    own, linear = coded(original), coded(nn.Linear.forward)
    codes = own.__code__, linear.__code__
    told: list[bool] = []

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if type(self).forward is not original or own.__code__ is not codes[0]:  # patched since
            return type(self).forward(self, *args, **kwargs)
        if (
            len(args) == 1
            and not kwargs
            and not is_compiling()
            and self.training
            and torch.is_grad_enabled()
            and type(args[0]) is Tensor
            and args[0].dim() >= 2
            and not watched()
            and not torch._C._len_torch_dispatch_stack()
        ):
            found: DeferredLogits | str = "`torch.nn.Linear` was patched since"
            if linear.__code__ is codes[1]:
                found = _deferred(self, args[0])
            if not isinstance(found, str):
                return found
            if found:
                _note(self, found)
            if found == _RESHARDED and not told:
                told.append(True)
                announce_in_call(_RESHARDED)
        return original(self, *args, **kwargs)

    return forward


def _deferred(module: nn.Module, x: Tensor) -> DeferredLogits | str:
    """The logits, to be made later; or why they are made now, "" where nobody trains it."""
    if module._forward_hooks:  # those before it have run
        return "a forward hook stands on the head"
    if module._backward_hooks or module._backward_pre_hooks:
        return "a backward hook stands on the head"
    layer, parts = module, None
    if type(module) is not nn.Linear:
        parts = lora.adapted_inside(module)
        if parts is None:
            return lora.why_not(module)
        layer = parts.base
        if type(layer) is not nn.Linear or is_hooked(layer) or "forward" in layer.__dict__:
            return "something stands on the layer inside of the adapter"
    weight, bias = layer.weight, layer.bias
    if (
        not layer.__dict__.keys().isdisjoint(("weight", "bias"))  # these hide the parameters
        or type(weight) is not nn.Parameter
        or (bias is not None and type(bias) is not nn.Parameter)
    ):
        return "the head's weight is not its parameter, or a tensor subclass"
    cast = autocasts(x.device.type) and x.dtype.is_floating_point
    if cast:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    wide_weight = weight.dtype == torch.float32 and x.dtype in KERNEL_DTYPES
    if not (weight.dtype == x.dtype or (cast and wide_weight)):
        return f"its weight is {weight.dtype}, what it is given {x.dtype}"
    if (
        weight.device != x.device
        or weight.dim() != 2
        or weight.shape[1] != x.shape[-1]
        or not weight.numel()
    ):
        return "what it is given does not fit its weight"
    if bias is not None and bias.shape != weight.shape[:1]:  # one number is added to all
        return "its bias is not one number for each class"
    adapter = None
    if parts is not None:
        dtypes = {parts.a.dtype, parts.b.dtype}
        dtype = x.dtype if cast else parts.a.dtype
        if (
            not dtypes <= {x.dtype, torch.float32}
            or (len(dtypes) > 1 and not cast)
            or {parts.a.device, parts.b.device} != {x.device}
        ):
            return "its adapter is of another dtype or device"
        if not lora.fits(parts, *weight.shape):
            return "its adapter does not fit its weight"
        adapter = Adapter(parts.a, parts.b, parts.scaling, dtype)
    learns = (x, weight, *(() if adapter is None else adapter[:2]))
    if not any(t.requires_grad for t in learns):
        return ""
    if (why := refusal(x, weight)) is not None:
        return why
    if is_resharded(layer):
        return _RESHARDED
    reasons = _reasons(module)
    return DeferredLogits.of(x, weight, bias, adapter, lambda name: _add(reasons, _reads(name)))


def _reads(name: str) -> str:
    return f"`{name}` reads them" if name.isidentifier() else f"{name} reads them"


def _reasons(module: nn.Module) -> dict[str, None]:
    found = _whole.get(module)
    if found is None:
        found = _whole[module] = {}
    return found


def _note(module: nn.Module, why: str) -> None:
    _add(_reasons(module), why)


def _add(reasons: dict[str, None], why: str) -> None:
    if len(reasons) < _MOST:
        reasons[why] = None


def made_whole(path: str, module: nn.Module) -> Iterator[str]:
    """What `status` says of a head that was swapped, and whose logits were made whole."""
    if reasons := _whole.get(module):
        yield f"`{path}`: its logits were made whole: {'; '.join(list(reasons))}"


def head_sites(sites: Iterable[Site]) -> list[Site]:
    """The sites that are some model's head, by its own `get_output_embeddings`."""
    by_id = {id(site.module): site for site in sites}
    found = {}
    for site in list(by_id.values()):
        head = head_of(site.module)
        head = None if head is None else called_by(head)
        if head is not None and id(head) in by_id:
            found[id(head)] = by_id[id(head)]
    return list(found.values())


HEADS = Heads()
