"""The head of a language model in training: its logits are made when somebody reads them.

See `hfpatch.losses.deferred_logits`. A head has no class name of its own: it is the linear layer
that a model's `get_output_embeddings` names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from hfpatch.announce import announce_in_call
from hfpatch.leaves.recall import RecallSubject
from hfpatch.losses.deferred_logits import DeferredLogits
from hfpatch.losses.head_loss import refusal
from hfpatch.losses.resharded import is_resharded
from hfpatch.ops import KERNEL_DTYPES
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

if TYPE_CHECKING:
    from hfpatch.planning.sites import Site


_RESHARDED = (
    "the head's logits are made, which takes their memory: FSDP2 gives its weight back behind the "
    "forward of its unit (`reshard_after_forward=True`), and a loss without logits needs it then; "
    "leave that option to its default for the model that has the head"
)


class Heads(Family):
    """Linear layers from hidden states to logits."""

    name = "head"
    pattern = re.compile(r"(?!)")  # no class name: see `head_sites`
    rank = 6
    replacement: ClassVar[Any] = None
    differentiable = True

    def examine(self, module: nn.Module) -> Subject | str | None:
        if type(module) is not nn.Linear:
            return f"its logits cannot be deferred: the head is a `{type(module).__name__}`"
        held: list[Any] = [p for p in module._parameters.values() if p is not None]
        if module._parameters.get("weight") is None:  # FSDP1 leaves a view of its flat parameter
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
        device, dtype = module.weight.device, module.weight.dtype

        def drawn(*shape: int) -> Tensor:
            with torch.inference_mode(False):
                x = torch.randn(shape, generator=generator).to(device, dtype)  # type: ignore[arg-type]
                return x.requires_grad_()

        x, weight = drawn(2, 9, 24), drawn(50, 24)
        bias = None if module.bias is None else drawn(50)
        target = torch.randint(50, (18,), generator=generator)
        target[3] = -100
        leaves = [t for t in (x, weight, bias) if t is not None]
        found = []
        with torch.enable_grad():
            for make in (DeferredLogits.of, F.linear):
                logits = make(x, weight, bias).float().view(-1, 50)
                loss = F.cross_entropy(logits, target.to(x.device))
                found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
        return _apart(found, torch.finfo(dtype).eps)  # type: ignore[arg-type]


class HeadSubject(RecallSubject):
    """A head; what it returns is read by its model, so nothing inside is bypassed."""

    op = "linear_cross_entropy"


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
    own = coded(original)
    code = own.__code__
    told: list[bool] = []

    def forward(self: nn.Module, input: Any) -> Any:
        if type(self).forward is not original or own.__code__ is not code:  # it was patched since
            return type(self).forward(self, input)
        if (
            not is_compiling()
            and type(self) is nn.Linear
            and self.__dict__.keys().isdisjoint(("weight", "bias"))  # these hide the parameters
            and self.training
            and torch.is_grad_enabled()
            and type(input) is Tensor
            and input.dim() >= 2
            and not watched()
            and not self._forward_hooks  # those before it have run
            and not self._backward_hooks
            and not self._backward_pre_hooks
            and not torch._C._len_torch_dispatch_stack()
        ):
            weight, bias = self.weight, self.bias
            x = input
            kind = x.device.type
            cast = autocasts(kind) and x.dtype.is_floating_point
            if cast:
                x = x.to(torch.get_autocast_dtype(kind))
            wide_weight = weight.dtype == torch.float32 and x.dtype in KERNEL_DTYPES
            if (
                type(weight) is nn.Parameter
                and (bias is None or type(bias) is nn.Parameter)
                and (weight.dtype == x.dtype or (cast and wide_weight))
                and weight.device == x.device
                and weight.dim() == 2
                and weight.shape[1] == x.shape[-1]
                and weight.numel()
                and (x.requires_grad or weight.requires_grad)
                and refusal(x, weight) is None
            ):
                if not is_resharded(self):
                    return DeferredLogits.of(x, weight, bias)
                if not told:
                    told.append(True)
                    announce_in_call(_RESHARDED)
        return original(self, input)

    return forward


def head_sites(sites: Iterable[Site]) -> list[Site]:
    """The sites that are some model's head, by its own `get_output_embeddings`."""
    by_id = {id(site.module): site for site in sites}
    found = {}
    for site in list(by_id.values()):
        get = getattr(type(site.module), "get_output_embeddings", None)
        # the class first: transformers' property warns in models that have no loss
        owners = (type(site.module), site.module)
        if get is None or not any(hasattr(owner, "loss_function") for owner in owners):
            continue
        try:
            head = get(site.module)
        except Exception:  # a base class that has none raises
            continue
        if isinstance(head, nn.Module) and id(head) in by_id:
            found[id(head)] = by_id[id(head)]
    return list(found.values())


HEADS = Heads()
