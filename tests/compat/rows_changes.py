"""What users change inside a model: settings, modules, forwards, how weights are made."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from row import NOISE, Case, Row, forward
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

GROUP = "Changes inside the model"
Change = Callable[[nn.Module], Any]


def is_norm(path: str, module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not module._modules


def is_weighted_norm(path: str, module: nn.Module) -> bool:
    return is_norm(path, module) and module._parameters.get("weight") is not None


def is_linear(path: str, module: nn.Module) -> bool:
    return type(module) is nn.Linear and any(part.isdigit() for part in path.split("."))


def is_activation(path: str, module: nn.Module) -> bool:
    return path.rpartition(".")[2] in ("act", "act_fn", "activation_fn", "nonlinearity")


def is_called(path: str, module: nn.Module) -> bool:
    """A module inside a block, of any size."""
    containers = (nn.ModuleList, nn.Sequential, nn.Dropout)
    return any(part.isdigit() for part in path.split(".")) and not isinstance(module, containers)


def each(which: Callable[[str, nn.Module], bool], change: Change) -> Callable[[Case, Any], Any]:
    """`change` every module that `which` names; where it returns a module, that takes its place."""

    def do(case: Case, model: nn.Module) -> nn.Module:
        for path, module in list(model.named_modules()):
            if which(path, module) and isinstance(new := change(module), nn.Module):
                model.set_submodule(path, new)
        return model

    return do


def other_eps(norm: nn.Module) -> None:
    for name in ("eps", "variance_epsilon"):
        if isinstance(norm.__dict__.get(name), float):
            setattr(norm, name, 0.5)


class Scaled(nn.Module):
    """Somebody's own module in a norm's place, with a weight like one."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        weight = norm._parameters.get("weight")
        if weight is None or isinstance(norm, nn.GroupNorm):
            weight = torch.ones(1)
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        return x * self.weight * 0.5


def own_forward(module: nn.Module) -> None:
    def own(self: nn.Module, x: torch.Tensor, *args: Any) -> torch.Tensor:
        return x * 0.5

    module.forward = types.MethodType(own, module)  # type: ignore[method-assign]


def wrapped_forward(module: nn.Module) -> None:
    inner = module.forward

    def outer(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        return result * 0.9 if isinstance(result, torch.Tensor) else result

    module.forward = outer  # type: ignore[method-assign]


def other_class(module: nn.Module) -> None:
    def own(self: nn.Module, x: torch.Tensor, *args: Any) -> torch.Tensor:
        return x * 0.25

    module.__class__ = type(type(module).__name__, (type(module),), {"forward": own})


class Half(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 0.5

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


def parametrized(module: nn.Module) -> None:
    parametrize.register_parametrization(module, "weight", Half(), unsafe=True)


def weight_norm(module: nn.Module) -> None:
    parametrizations.weight_norm(module)


def weight_norm_by_hook(module: nn.Module) -> None:
    nn.utils.weight_norm(module)  # type: ignore[no-untyped-call]


def pruned(module: nn.Module) -> None:
    prune.l1_unstructured(module, "weight", 0.5)  # type: ignore[no-untyped-call]


def _lists(model: nn.Module) -> list[nn.ModuleList]:
    """Lists of blocks of one class that may stand in any order."""
    names = ("layers", "layer", "blocks", "transformer_blocks", "block")
    return [
        m
        for path, m in model.named_modules()
        if isinstance(m, nn.ModuleList)
        and path.rpartition(".")[2] in names
        and path.count(".") < 2
        and len({type(child) for child in m}) == 1
    ]


def reordered(case: Case, model: nn.Module) -> nn.Module:
    for blocks in _lists(model):
        for i, block in enumerate(list(blocks)[::-1]):
            blocks[i] = block
    return model


def one_block_twice(case: Case, model: nn.Module) -> nn.Module:
    for blocks in _lists(model):
        for i in range(1, len(blocks)):
            blocks[i] = blocks[0]
    return model


def frozen_and_thawed(case: Case, model: nn.Module) -> Any:
    """Calls in turn that autograd does and does not record."""
    outputs = []
    wanted = {n: p.requires_grad for n, p in model.named_parameters()}
    for needs in (True, False, True):
        model.requires_grad_(needs)
        outputs.append(case.output(model(**case.inputs())).detach())
        outputs.append(forward(case, model))
    for name, p in model.named_parameters():
        p.requires_grad_(wanted[name])
    return outputs


CHANGED = (
    "A module whose setting, class or forward is not the one that was proven is computed by the "
    "original, and so is the block or MLP that would stand in for it."
)
MADE = (
    "The weight is made anew at each call, by a property or a hook, where a kernel would read it: "
    "such a module, and the block that would stand in for it, goes to the original."
)

FIRST_BLOCK = "The first block, with linear attention, has fewer modules with a kernel than others."


def _row(title: str, do: Any, **settings: Any) -> Row:
    why = {"original": CHANGED, "partly": CHANGED} | settings.pop("why", {})
    return Row(GROUP, title, do, lasting=False, why=why, **settings)


def _made(title: str, do: Any) -> Row:
    return _row(title, do, why={"original": MADE, "partly": MADE})


ROWS = (
    _row("`norm.eps` set", each(is_norm, other_eps)),
    # what is no norm keeps the scale of a sum, so that its noise is that of the largest value
    _row("norms replaced by other modules", each(is_norm, Scaled), noise=10 * NOISE[torch.float32]),
    _row("activations replaced by other modules", each(is_activation, lambda m: nn.Tanh())),
    _row("`norm.forward` replaced", each(is_norm, own_forward), noise=10 * NOISE[torch.float32]),
    _row("`norm.forward` wrapped", each(is_norm, wrapped_forward)),
    _row("`activation.forward` wrapped", each(is_activation, wrapped_forward)),
    _row("`linear.forward` wrapped", each(is_linear, wrapped_forward)),
    _row("every forward inside the blocks wrapped", each(is_called, wrapped_forward)),
    _row("`norm.__class__` set", each(is_norm, other_class), noise=10 * NOISE[torch.float32]),
    _made("`parametrize` on linear layers", each(is_linear, parametrized)),
    _made("`parametrize` on norms", each(is_weighted_norm, parametrized)),
    _made("`parametrizations.weight_norm` on linear layers", each(is_linear, weight_norm)),
    _made("`torch.nn.utils.weight_norm` (by a hook)", each(is_linear, weight_norm_by_hook)),
    _made("`torch.nn.utils.prune` on linear layers", each(is_linear, pruned)),
    _made("`torch.nn.utils.prune` on norms", each(is_weighted_norm, pruned)),
    _row("blocks in another order", reordered),
    _row("one block several times", one_block_twice, why={"partly": FIRST_BLOCK}),
    Row(GROUP, "frozen and thawed between calls", run=frozen_and_thawed),
)
