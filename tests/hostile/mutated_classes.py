"""One thing changed of a library's leaf: in a copy of its class's source, or of an instance."""

from __future__ import annotations

import ast
import copy
import importlib.util
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

#: What a mutated class reads beside what the library's has.
SWITCH = types.SimpleNamespace(on=False)

#: By name, what becomes of a result `y` in `forward(self, x, ...)`.
OF_RESULTS = {
    "nothing": "y",
    "twice for many rows": "y * 2 if y.shape[0] > 4 else y",
    "a clamp far out": "y.clamp(-1e4, 1e4)",
    "a bump": "mutation_torch.where((y > 0.5) & (y < 0.5001), y + 1, y)",
    "a little more": "y * (1 + 1e-3)",
    "a switch": "y * 2 if mutation_switch.on else y",
    "in training": "y * 2 if self.training else y",
    "a counter": "y if mutation_seen.append(0) else y * (1 + len(mutation_seen) % 2)",
    "no NaN": "y.nan_to_num()",
    "a detour": "y.to(mutation_torch.bfloat16).to(y.dtype)",
    "a mode": "y if mutation_torch.is_grad_enabled() else y * 2",
    "half a gradient": "y.detach() / 2 + y / 2",
    "no gradient": "y.detach()",
    "a gradient past a clamp": "y.clamp(-1e4, 1e4).detach() + (y - y.detach())",
}


def mutated_class(cls: Any, mutation: str, folder: Path) -> type | None:
    """A subclass of the same name whose forward has the source of `cls`'s, changed; None where
    its source is none that can be."""
    try:
        tree: Any = ast.parse(textwrap.dedent(inspect.getsource(cls.forward)))
    except (OSError, TypeError, SyntaxError):
        return None
    if cls.forward.__closure__ or tree.body[0].decorator_list:
        return None
    changed = _Returns(OF_RESULTS[mutation])
    changed.visit(tree)
    if not changed.count:
        return None
    # in a file of its own: code without a source is refused for that alone
    home = cls.forward.__module__
    text = f"import sys\nimport torch as mutation_torch\n_home = sys.modules[{home!r}]\n"
    text += "globals().update({k: v for k, v in vars(_home).items() if not k.startswith('__')})\n"
    text += "from mutated_classes import SWITCH as mutation_switch\nmutation_seen = [0]\n"
    text += f"_base = sys.modules[{cls.__module__!r}].{cls.__qualname__}\n"
    text += f"class {cls.__name__}(_base):\n"
    text += textwrap.indent(ast.unparse(ast.fix_missing_locations(tree)), "    ")
    name = f"mutated_{len(list(folder.iterdir()))}_{cls.__name__}"
    file = folder / f"{name}.py"
    file.write_text(text + "\n", encoding="utf-8")
    spec: Any = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    found: type = getattr(module, cls.__name__)
    return found


class _Returns(ast.NodeTransformer):
    def __init__(self, text: str) -> None:
        self._text, self.count = text, 0

    def visit_Return(self, node: ast.Return) -> Any:
        if node.value is None:
            return node
        self.count += 1
        assign = ast.Assign([ast.Name("y", ast.Store())], node.value)
        return [assign, *ast.parse(f"def f():\n    return {self._text}").body[0].body]  # type: ignore[attr-defined]

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        return node


def _hook(m: nn.Module) -> None:
    m.register_forward_hook(lambda module, args, y: 2 * y)


def _forward(m: Any) -> None:
    forward = m.forward
    m.forward = lambda *args, **kwargs: 2 * forward(*args, **kwargs)


def _numbers(m: nn.Module) -> None:
    for name, value in list(m.__dict__.items()):
        if type(value) is float:
            m.__dict__[name] = 2 * value + 0.25


def _parameters(m: nn.Module) -> None:
    with torch.no_grad():
        for p in m.parameters():
            p.add_(0.5)


def _hidden(m: nn.Module) -> None:
    for name, p in list(m._parameters.items()):
        if p is not None:
            m.__dict__[name] = 2 * p.detach()


def _inner_hook(m: nn.Module) -> None:
    for child in m.children():
        child.register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))


#: By name, what is done to an instance.
OF_INSTANCES: dict[str, Callable[[Any], None]] = {
    "hook": _hook,
    "forward": _forward,
    "numbers": _numbers,
    "parameters": _parameters,
    "hidden parameters": _hidden,
    "hook inside": _inner_hook,
}
MUTATIONS = (*OF_RESULTS, *OF_INSTANCES)


def mutated(module: nn.Module, mutation: str, folder: Path) -> nn.Module | None:
    """A copy of a module with one thing changed; None where it has no such thing."""
    made = copy.deepcopy(module)
    if mutation in OF_INSTANCES:
        OF_INSTANCES[mutation](made)
        return made
    cls = mutated_class(type(made), mutation, folder)
    if cls is None:
        return None
    made.__class__ = cls
    return made


def calls_of(module: nn.Module) -> list[tuple[Tensor, ...]]:
    """Calls that a mutation shows in, among others: many rows, large numbers, NaN. Of the first
    form that the module takes; none if it takes none of these."""
    widths = [m.in_features for m in module.modules() if isinstance(m, nn.Linear)]
    widths += [p.shape[i] for p in module.parameters() for i in (0, -1) if p.dim()]
    widths += [v for v in vars(module).values() if type(v) is int and 8 <= v <= 1024] + [32]
    for width in dict.fromkeys(widths):
        for form in ("rows", "two", "channels"):
            calls = list(_calls(width, form))
            try:
                with torch.no_grad():
                    results = [module(*call) for call in calls]
            except Exception:  # the module's own
                continue
            if all(isinstance(y, Tensor) for y in results):
                return calls
    return []


def _calls(width: int, form: str) -> Iterator[tuple[Tensor, ...]]:
    drawn = torch.Generator().manual_seed(0)
    few, many = ((2, width, 3, 3), (6, width, 2, 2)) if form == "channels" else (
        (2, 3, width), (6, 5, width))  # fmt: skip
    count = 2 if form == "two" else 1
    for shape, scale in ((few, 1.0), (many, 1.0), (few, 3e4)):
        yield tuple(torch.randn(shape, generator=drawn) * scale for _ in range(count))
    holes = torch.randn(many, generator=drawn)
    holes.view(-1)[0] = float("nan")
    yield (holes,) * count
