"""What the model says of itself."""

from __future__ import annotations

import inspect
from typing import Any

from row import Case, Row, forward
from torch import nn

GROUP = "Introspection"


def described(*say: Any) -> Any:
    def run(case: Case, model: nn.Module) -> Any:
        return [s(model) for s in say], forward(case, model)

    return run


def signatures(model: nn.Module) -> list[str]:
    return [f"{p} {inspect.signature(m.forward)}" for p, m in model.named_modules()]


def names_of_forwards(model: nn.Module) -> list[str]:
    """`__name__`, `__qualname__` and docstring, as help() and error messages show them."""
    return [
        f"{m.forward.__name__} {m.forward.__qualname__} {inspect.getdoc(m.forward)}"
        for m in model.modules()
    ]


def classes(model: nn.Module) -> list[Any]:
    return [(p, type(m)) for p, m in model.named_modules()]


def parameters(model: nn.Module) -> list[str]:
    return [
        f"{n} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for n, p in model.named_parameters()
    ]


def buffers(model: nn.Module) -> list[str]:
    return [f"{n} {tuple(b.shape)}" for n, b in model.named_buffers()]


def submodules(model: nn.Module) -> bool:
    return all(model.get_submodule(p) is m for p, m in model.named_modules())


def footprint(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())


def profiled(case: Case, model: nn.Module) -> Any:
    """Operators keep readable names in the profiler's table; ours have one of their own."""
    from counting import COUNT
    from torch.profiler import ProfilerActivity, profile

    before = COUNT.kernels + COUNT.inside
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        output = forward(case, model)
    names = {e.key for e in profiler.key_averages()}
    ours = {n for n in names if "hfpatch" in n}
    if COUNT.kernels + COUNT.inside > before:
        assert ours and all("::" in n for n in ours), sorted(names)
    else:
        assert not ours
    return output


def module_tree_in_profiler(case: Case, model: nn.Module) -> Any:
    """`with_modules` and record_function around modules, as users annotate them."""
    from torch.profiler import profile, record_function

    handles = []
    stack: list[Any] = []

    def enter(module: nn.Module, args: Any) -> None:
        stack.append(record_function(type(module).__name__).__enter__())

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        stack.pop().__exit__(None, None, None)

    handles.append(model.register_forward_pre_hook(enter))
    handles.append(model.register_forward_hook(leave))
    try:
        with profile() as profiler:
            output = forward(case, model)
    finally:
        for h in handles:
            h.remove()
    return output, type(model).__name__ in {e.key for e in profiler.key_averages()}


ROWS = (
    Row(GROUP, "`repr(model)`", run=described(repr), forwards=1),
    Row(
        GROUP,
        "class names, `isinstance`, `get_submodule`",
        run=described(classes, submodules),
        forwards=1,
    ),
    Row(
        GROUP,
        "`named_parameters`, `named_buffers`, `state_dict` keys",
        run=described(parameters, buffers, lambda m: list(m.state_dict()), footprint),
        forwards=1,
    ),
    Row(GROUP, "`inspect.signature(module.forward)`", run=described(signatures), forwards=1),
    Row(
        GROUP,
        "name and docstring of `module.forward`",
        run=described(names_of_forwards),
        forwards=1,
    ),
    Row(GROUP, "operators in `torch.profiler`", run=profiled, forwards=1),
    Row(GROUP, "`record_function` around modules", run=module_tree_in_profiler, forwards=1),
)
