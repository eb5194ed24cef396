"""What a captured block became: its regions, the op of each, the walls between them, and why."""

from __future__ import annotations

import difflib
import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

import hfpatch
from hfpatch import attention, swap
from hfpatch.ops import OPS
from hfpatch.proof.subject import class_of
from hfpatch.regions.capture import Captured, Uncapturable
from hfpatch.regions.interpret import Interpreter, attend_reference
from hfpatch.regions.kind import Kind, Variant, _Undecided
from hfpatch.regions.nodes import (
    Attend,
    CacheUpdate,
    Call,
    Constant,
    Filled,
    Fused,
    Leaf,
    Param,
    Project,
    ProjectGelu,
    value,
)
from hfpatch.regions.proof import Disproved, Proof
from hfpatch.regions.rules import is_work
from hfpatch.text import shown

Tensor = torch.Tensor
#: What a step is: an op that stands for several operators, a layer or module that is called as it
#: is, an operator of PyTorch's that no rule takes up, an update of the cache.
KINDS = ("op", "wall", "operator", "cache")


@dataclass(frozen=True)
class Step:
    """One thing that a fused call does.

    Attributes:
        kind: of KINDS. region: its number; 0 of walls.
        title, shape: of the op, layer or operator, and of its (first) result in this call.
        uses: the numbers of the steps that it reads; -1 is the call's arguments.
        error: of an op on this call's numbers against its formula in a wider dtype, relative to the
            norm; None where it is PyTorch's own code.
        why: of a wall or an operator, why it stays.
    """

    kind: str
    region: int
    title: str
    shape: str
    uses: tuple[int, ...]
    error: float | None
    why: str


@dataclass(frozen=True, repr=False)
class Explanation:
    """A block's regions; printed as lines, in a notebook drawn. `reason` where it is not fused."""

    path: str
    class_name: str
    reason: str = ""
    steps: tuple[Step, ...] = ()
    before: int = 0
    after: int = 0
    error: float = 0.0
    original: float = 0.0
    wide: float = 0.0
    note: str = ""

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def to_svg(self) -> str:
        """A drawing."""
        return as_svg(self)

    _repr_svg_ = to_svg


def explain(model: nn.Module, path: str, inputs: Mapping[str, Any], note: str = "") -> Explanation:
    """What a call of the block at `path` becomes when the model is called with `inputs`.

    The model is called once, without gradients, and left as it was; its own patches are kept.

    Raises:
        ValueError: there is no block at `path` that may be captured, or the call does not reach it.
    """
    patched = hfpatch.status(model).plan
    applied = not patched.candidates
    if applied:
        if patched.swaps:
            raise ValueError("the model was patched with `blocks=False`: restore it first")
        hfpatch.apply(model, blocks=True, decoding=False)
    try:
        candidates = {c.path: c for c in hfpatch.status(model).plan.candidates}
        if path not in candidates:
            raise ValueError(_no_block(model, path, list(candidates)))
        block = model.get_submodule(path)
        mark: Any = swap.swapped(block)
        found: list[Explanation] = []

        def look(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not found:
                found.append(_explained(mark.details.kind, block, args, kwargs, path, note))

        handle = block.register_forward_pre_hook(look, with_kwargs=True)
        try:
            with torch.no_grad():
                model(**inputs)
        finally:
            handle.remove()
    finally:
        if applied:
            hfpatch.restore(model)
    if not found:
        raise ValueError(f"`{path}` was not called with these inputs")
    return found[0]


def _no_block(model: nn.Module, path: str, candidates: list[str]) -> str:
    """Why nothing is captured at `path`, and what may be asked for in its place."""
    modules = dict(model.named_modules(remove_duplicate=False))
    if path not in modules:
        ends = [p for p in modules if path and p.endswith(f".{path}")]
        close = [*ends[:1], *difflib.get_close_matches(path, candidates, 1)]
        why = "the model has no module of that path"
        why += f"; did you mean `{close[0]}`?" if close else ""
    elif any(s.op == "block" and s.path == path for s in hfpatch.status(model).swaps):
        why = "it is fused by code that was written for its class (docs/families.md)"
    elif not path:
        why = "that is the whole model"
    else:
        name = class_of(modules[path]).__name__
        why = f"it is a `{name}`; blocks are elements of lists of layers, by the libraries' code"
    known = ", ".join(candidates[:6]) or "none"
    return f"no block of `{path}` may be captured: {why}; those that may: {known}"


def _explained(
    kind: Kind, block: nn.Module, args: Any, kwargs: Any, path: str, note: str
) -> Explanation:
    name = class_of(block).__name__
    seen: list[tuple[Captured, Proof]] = []
    try:
        variant: Variant = kind.examine(block, args, kwargs, lambda c, p: seen.append((c, p)))
    except (Uncapturable, Disproved, _Undecided) as e:
        return Explanation(path, name, str(e), note=note)
    captured, proof = seen[0]
    errors = _Measured(block, proof.wide, kind.bind).of(captured.graph, proof.tensors)
    steps = _steps(captured, block, errors)
    evidence = variant.evidence
    return Explanation(
        path, name, "", tuple(steps), variant.before, variant.after,
        evidence.fused, evidence.original, evidence.wide, note,
    )  # fmt: skip


class _Measured(Interpreter):
    """A rewritten graph run op by op by the kernels, each compared with its formula."""

    def __init__(self, block: nn.Module, wide: torch.dtype, bind: Callable[..., Any]) -> None:
        super().__init__(block, None)
        self._formula_in, self._bind = wide, bind
        self._errors: dict[Node, float] = {}

    def of(self, graph: Graph, tensors: list[Tensor]) -> dict[Node, float]:
        """The error of each op of a graph on a call's tensors."""
        self.run(graph, list(tensors))
        return self._errors

    def _node(self, node: Node, values: dict[Node, Any]) -> Any:
        target: Any = node.target
        if not isinstance(target, (Fused, Attend)):
            return super()._node(node, values)
        given = map_arg(node.args, values.__getitem__)  # type: ignore[misc]
        wide = [a.to(self._formula_in) if _floats(a) else a for a in given]
        if isinstance(target, Attend):
            q, k, v, mask = given
            ours = attention.attention(
                q, k, v, mask=mask, causal=target.causal, scale=target.scale, softcap=target.softcap
            )
            theirs = attend_reference(target, *wide)
        else:
            ours = self._bind(target.op, target.formula.params)(*given)
            theirs = OPS[target.op].reference(*wide, **target.formula.params)
        several = isinstance(ours, (tuple, list))
        pairs = zip(ours, theirs, strict=True) if several else ((ours, theirs),)
        self._errors[node] = max(_apart(a, b) for a, b in pairs)
        return ours


def _floats(held: Any) -> bool:
    return isinstance(held, Tensor) and held.is_floating_point()


def _apart(ours: Tensor, theirs: Tensor) -> float:
    size = float(theirs.norm())
    return float((ours.to(theirs.dtype) - theirs).norm()) / size if size else 0.0


def _steps(captured: Captured, block: nn.Module, errors: Mapping[Node, float]) -> list[Step]:
    steps: list[Step] = []
    number: dict[Node, int] = {}
    region, open_ = 0, False
    for node in captured.graph.nodes:
        if node.op != "call_function" or not _is_step(node):
            continue
        kind, title, why = _what(node, captured, block)
        if kind in ("wall", "cache"):
            open_ = False
        elif not open_:
            region, open_ = region + 1, True
        uses = sorted({number.get(s, -1) for s in _sources(node)})
        steps.append(
            Step(kind, region if open_ else 0, title, _shape(node), tuple(uses),
                 errors.get(node), why)
        )  # fmt: skip
        number[node] = len(steps) - 1
    return steps


def _is_step(node: Node) -> bool:
    if isinstance(node.target, (Constant, Filled, Param)):
        return False
    return isinstance(node.target, (CacheUpdate, Project)) or is_work(node)


def _sources(node: Node) -> list[Node]:
    """The steps and arguments that a node reads, through views."""
    found: list[Node] = []
    left, seen = list(node.all_input_nodes), set[Node]()
    while left:
        n = left.pop()
        if n in seen or n.target is torch.ops.aten.sym_size.int:
            continue
        seen.add(n)
        if n.op == "placeholder" or _is_step(n):
            found.append(n)
        elif not isinstance(n.target, (Constant, Filled, Param)):
            left += n.all_input_nodes
    return found


def _what(node: Node, captured: Captured, block: nn.Module) -> tuple[str, str, str]:
    """(kind, title, why it stays)."""
    target: Any = node.target
    if isinstance(target, Fused):
        return "op", str(target.formula), ""
    if isinstance(target, Attend):
        capped = "" if target.softcap is None else f", softcap={target.softcap:g}"
        masked = ", a mask" if len(node.args) > 3 and node.args[3] is not None else ""
        return "op", f"attention(causal={target.causal}{capped}{masked})", ""
    if isinstance(target, ProjectGelu):
        return "op", f"{target.path} with gelu in its epilogue", ""
    if isinstance(target, Project) and len(target.paths) > 1:
        return "op", f"{', '.join(target.paths)} as one product", ""
    if isinstance(target, (Project, Call, Leaf)):
        path = target.paths[0] if isinstance(target, Project) else target.path
        cls = type(block.get_submodule(path)).__name__
        why = captured.walls.get(path) or (
            "a layer" if isinstance(target, Project) else "called as it is"
        )
        return "wall", f"{path} ({cls})", why
    if isinstance(target, CacheUpdate):
        return "cache", "the cache's update", "the cache's own method"
    name = getattr(getattr(target, "_schema", None), "name", str(target)).partition("::")[2]
    return "operator", name or str(target), "no rule takes it up"


def _shape(node: Node) -> str:
    held = value(node)
    first = held[0] if isinstance(held, (tuple, list)) and held else held
    if not isinstance(first, Tensor):  # of an op that a rule put here: its parts know
        first = next((value(u) for u in node.users if isinstance(value(u), Tensor)), None)
    if not isinstance(first, Tensor):
        return ""
    return "[" + ", ".join(str(_number(s)) for s in first.shape) + "]"


def _number(size: Any) -> Any:
    """What a size is in this call."""
    return size if isinstance(size, int) else size.node.hint


# -------------------------------------------------------------------------------------------------
# Shown


def _head(e: Explanation) -> list[str]:
    if e.reason:
        lines = [f"{e.class_name} `{e.path}`: left to its parts: {e.reason}"]
    else:
        lines = [
            f"{e.class_name} `{e.path}`: {e.before} operators → {e.after}",
            f"error {e.error:.1e} (original {e.original:.1e}); rewritten graph off by "
            f"{e.wide:.1e} in a wider dtype",
        ]
    return [*lines, e.note] if e.note else lines


def as_text(e: Explanation) -> str:
    """The steps, one a line, under the number of their region."""
    lines = _head(e)
    region = 0
    for i, s in enumerate(e.steps):
        if s.region and s.region != region:
            region = s.region
            lines.append(f"region {region}")
        error = "" if s.error is None else f"  error {s.error:.1e}"
        why = f"  ({s.why})" if s.why else ""
        uses = ", ".join("in" if u < 0 else str(u) for u in s.uses)
        said = f"{s.kind:>8}  {i:2}  {s.title}  {s.shape}  <- {uses}{error}{why}"
        lines.append(f"{'  ' if s.region else ''}{said}")
    return shown("\n".join(lines))


_ROW, _WIDTH, _LEFT, _BOX = 36, 960, 150, 560
_COLORS = {"op": "#2a7f62", "wall": "#6b7280", "operator": "#b59b63", "cache": "#4f7cac"}


def as_svg(e: Explanation) -> str:
    """Boxes in the order of the call; lines from what each reads, other than the one above it."""
    head = _head(e)
    top = 24 + 18 * len(head)
    height = top + _ROW * (len(e.steps) + 1) + 30
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f"<title>{_escaped(head[0])}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for i, line in enumerate(head):
        weight = ' font-weight="bold"' if i == 0 else ""
        out.append(f'<text x="16" y="{24 + 18 * i}"{weight} fill="#1f2937">{_escaped(line)}</text>')
    out += _outlines(e.steps, top)
    if e.steps:
        out += _box(top, "#1f2937", "arguments of the call", "", "", "")
    for i, s in enumerate(e.steps):
        y = top + _ROW * (i + 1)
        out += [_line(u, i, top) for u in s.uses]
        error = "" if s.error is None else f"error {s.error:.1e}"
        out += _box(y, _COLORS[s.kind], s.title, s.shape, error or s.why, s.why)
    x = 16
    for kind, color in _COLORS.items() if e.steps else ():
        y = height - 16
        out.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" rx="2" fill="{color}"/>')
        out.append(f'<text x="{x + 18}" y="{y}" fill="#1f2937">{kind}</text>')
        x += 110
    return "\n".join([*out, "</svg>"]) + "\n"


def _outlines(steps: Sequence[Step], top: int) -> list[str]:
    """A dashed frame around each region."""
    out = []
    for region in sorted({s.region for s in steps} - {0}):
        rows = [i for i, s in enumerate(steps) if s.region == region]
        y, tall = top + _ROW * (rows[0] + 1) - 4, _ROW * (rows[-1] - rows[0] + 1)
        out.append(
            f'<rect class="region" x="{_LEFT - 8}" y="{y}" width="{_BOX + 16}" height="{tall}" '
            f'rx="6" fill="#f3f4f6" stroke="#9ca3af" stroke-dasharray="4 3"/>'
        )
        out.append(
            f'<text x="{_LEFT + _BOX + 14}" y="{y + 14}" fill="#6b7280" font-size="10">'
            f"region {region}</text>"
        )
    return out


def _line(source: int, to: int, top: int) -> str:
    """From a step to one that reads it: straight to the next, else around at the left."""
    y0, y1 = top + _ROW * (source + 1) + 28, top + _ROW * (to + 1)
    if source == to - 1:
        x = _LEFT + _BOX // 2
        return f'<path d="M{x} {y0} L{x} {y1}" stroke="#6b7280" fill="none"/>'
    away = min(120, 14 + 9 * (to - source))
    y0, y1 = y0 - 10, y1 + 10
    return (
        f'<path d="M{_LEFT} {y0} C{_LEFT - away} {y0} {_LEFT - away} {y1} {_LEFT} {y1}" '
        f'stroke="#9ca3af" fill="none"/>'
    )


def _box(y: int, color: str, title: str, shape: str, right: str, why: str) -> list[str]:
    hint = f"<title>{_escaped(why or title)}</title>"
    return [
        f'<rect class="step" x="{_LEFT}" y="{y}" width="{_BOX}" height="28" rx="5" '
        f'fill="{color}">{hint}</rect>',
        f'<text x="{_LEFT + 10}" y="{y + 18}" fill="#ffffff">{_escaped(_cut(title, 58))}</text>',
        f'<text x="{_LEFT + _BOX - 10}" y="{y + 18}" fill="#ffffff" text-anchor="end">'
        f"{_escaped(_cut(shape, 28))}</text>",
        f'<text x="{_LEFT + _BOX + 70}" y="{y + 18}" fill="#1f2937" font-size="11">'
        f"{_escaped(_cut(right, 30))}</text>",
    ]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _escaped(text: str) -> str:
    return html.escape("".join(c if c.isprintable() else " " for c in text))
