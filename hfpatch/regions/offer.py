"""Which blocks of a model are candidates, and the adapter that decides at their first call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.utils import _pytree as pytree

from hfpatch import packing, swap
from hfpatch.blocks import opaque
from hfpatch.blocks.memo import current_operator
from hfpatch.kernels.sources import Kernel, Sources
from hfpatch.leaves.recorded import may_record
from hfpatch.ops import KERNEL_DTYPES
from hfpatch.per_object import PerObject
from hfpatch.planning.plan import Candidate
from hfpatch.planning.settings import Settings, matches
from hfpatch.proof.dispatch import choice_of
from hfpatch.proof.keys import Same, attributes_of, code_of
from hfpatch.proof.library import is_own, odd_class, strange_names
from hfpatch.proof.proofs import Prepared
from hfpatch.proof.subject import Forward, class_of, coded, is_dense, is_dtensor, watched
from hfpatch.proof.unchanged import Part, ProcessorPart, hooks_on_all, layers_replaced
from hfpatch.regions.apart import apart
from hfpatch.regions.beside import hooked
from hfpatch.regions.capture import KnownLeaf, is_wall, looping, numbers_of
from hfpatch.regions.deferred import is_deferred
from hfpatch.regions.emit import Bind
from hfpatch.regions.foreseen import anchor_of, names_of
from hfpatch.regions.guard import attention_table, chosen_attention, functions_around, hides
from hfpatch.regions.kind import Kind, in_training
from hfpatch.regions.listening import is_idle
from hfpatch.regions.wanted import OPS, devices_of, refusal

#: Kinds that are kept when no model has them any more.
_MOST_KINDS = 256
_kinds: dict[Any, Kind] = {}
_CHANGED = "something in it is not what it was at `apply`: call `apply` again"


class Mark(Candidate):
    """What a patched block carries: its kind, which says what came of it."""

    counts = False  # as a swap, of `restore`

    def __init__(self, path: str, class_name: str, kind: Kind) -> None:
        super().__init__(path, class_name, "at its first call")
        object.__setattr__(self, "kind", kind)

    def now(self, path: str, module: nn.Module) -> Candidate:
        """What is known of the block `module` now."""
        kind: Kind = self.kind  # type: ignore[attr-defined]
        decided = kind.decided
        if not kind.as_planned(module):
            return Candidate(path, self.class_name, "left", _CHANGED)
        if (split := kind.split(module)) is not None:
            return Candidate(path, self.class_name, "left", split)
        if decided:
            reasons = "; ".join(dict.fromkeys(kind.refused.values()))
            most = max(decided, key=lambda v: v.before - v.after)
            return Candidate(
                path, self.class_name, "fused", reasons, most.found, most.before, most.after,
                max(v.evidence.fused for v in decided), max(v.evidence.original for v in decided),
            )  # fmt: skip
        if kind.refused:
            return Candidate(path, self.class_name, "left", next(iter(kind.refused.values())))
        aside = kind.aside.get(module)
        if aside is not None and (hook := hooked(module, aside[0])) is not None:
            return Candidate(path, self.class_name, "left", hook[1])
        if kind.trained.get(module) and (inside := in_training(module)) is not None:
            what = f"`{inside}`" if inside else "it"
            return Candidate(path, self.class_name, "left", f"{what} is in training mode")
        if kind.unfit:
            return Candidate(path, self.class_name, "left", kind.unfit)
        return Candidate(path, self.class_name, "at its first call")

    def undo(self, module: nn.Module) -> None:
        """Give packed weights memory of their own again."""
        for group in _packed.pop(module, ()):
            alive = [p for ref in group if (p := ref()) is not None]
            own = {id(p) for p in module.parameters()}
            if not own.isdisjoint(map(id, alive)):
                packing.unpack(alive)


_packed: PerObject[nn.Module, list[tuple[Any, ...]]] = PerObject()


def offer(
    roots: Sequence[tuple[str, nn.Module]],
    settings: Settings,
    prepared: Sequence[Prepared],
    auto: bool,
) -> tuple[list[Prepared], list[str]]:
    """The candidates, each with its adapter; and notes on classes whose blocks are none.

    Args:
        roots: (name of the component or "", module) pairs.
        prepared: the swaps of the plan: what they take over is no candidate.
        auto: `blocks="auto"`: blocks of what `devices_of` says alone, and no calls whose cache has
            entries.
    """
    if refusal(settings) is not None:
        return [], []
    taken = {id(p.module) for p in prepared if p.leaf is None and p.swap.op != "decoding"}
    blocks = {id(p.module) for p in prepared if p.swap.op == "block" or p.block is not None}
    leaves = {id(p.module): KnownLeaf(*p.leaf) for p in prepared if p.leaf is not None}
    leaves |= {id(p.act[0]): KnownLeaf(p.act[1], None, None) for p in prepared if p.act is not None}
    bind = _binder(settings.sources)
    found: list[Prepared] = []
    foreign: dict[str, list[str]] = {}  # by the reason
    seen: set[int] = set()
    for prefix, root in roots:
        for path, group in _lists(root):
            for place, block in group:
                if id(block) in seen or id(block) in taken or _inside(block, blocks):
                    continue
                seen.add(id(block))
                where = ".".join(filter(None, (prefix, path, place)))
                name = class_of(block).__name__
                if not _may_be(where, name, block, settings, devices_of(block, auto)):
                    continue
                if (why := odd_class(class_of(block)) or _scripted(block)) is not None:
                    foreign.setdefault(why, []).append(where)
                    continue
                kind = _kind_of(block, leaves, numbers_of(block), bind, settings.sources, not auto)
                if kind is not None:
                    found.append(_prepare(where, name, block, kind))
    notes = [
        f"blocks are not captured, `{paths[0]}`"
        + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
        + f": {why}; their norms and activations are looked at one by one"
        for why, paths in foreign.items()
    ]
    return found, notes


def _scripted(block: nn.Module) -> str | None:
    """Why a block with a scripted module inside is none: nothing can be asked of that one's code,
    and it has no tables of its tensors."""
    for path, module in block.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            return f"their `{path}` is a ScriptModule"
    return None


def _inside(block: nn.Module, blocks: set[int]) -> bool:
    return any(id(m) in blocks for m in block.modules())


def _lists(root: nn.Module) -> Iterator[tuple[str, list[tuple[str, nn.Module]]]]:
    """The innermost lists of blocks, by their names: of modules that have norms and several layers
    each. A list of several classes inside of a block is its parts, not blocks, and so is one that
    has less than half of a block's layers."""
    lists = {
        path: list(m)
        for path, m in root.named_modules()
        if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) and all(map(_is_block, m))
    }
    for path in [p for p, held in lists.items() if len({type(m) for m in held}) > 1]:
        if any(path.startswith(f"{other}.") for other in lists if other != path):
            del lists[path]
    for path, blocks in list(lists.items()):
        below = [p for p in lists if p != path and p.startswith(f"{path}." if path else "")]
        inner = [block for p in below for block in lists[p]]
        if inner and 2 * len(_layers_of(inner)) < len(_layers_of(blocks)):
            for p in below:
                del lists[p]
    for path, blocks in lists.items():
        if not any(
            other != path and other.startswith(f"{path}." if path else "") for other in lists
        ):
            names = root.get_submodule(path)._modules
            yield path, list(zip(names, blocks, strict=True))


def _layers_of(modules: Sequence[nn.Module]) -> set[int]:
    return {id(m) for held in modules for m in held.modules() if _is_layer(m)}


def _is_layer(module: nn.Module) -> bool:
    """Whether it is a linear layer, a quantizer's own among them."""
    if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
        return True
    sizes = (module.__dict__.get(n) for n in ("in_features", "out_features"))
    return all(type(size) is int for size in sizes)


def _is_block(module: nn.Module | None) -> bool:
    if module is None or hasattr(module, "save_pretrained"):  # an empty place; a whole model
        return False
    norms = sum("norm" in type(m).__name__.lower() and not m._modules for m in module.modules())
    return len(_layers_of([module])) >= 2 and norms >= 1 and bool(module._modules)


def _may_be(
    path: str, name: str, block: nn.Module, settings: Settings, wanted: frozenset[str]
) -> bool:
    if settings.include is not None and not matches(settings.include, path, name):
        return False
    cls = class_of(block)
    if type(block) is not cls:
        return False
    if swap.foreign_forward(block) is not None:
        return False
    table = attention_table()
    for _, function in chosen_attention(block.modules(), table):
        if function is not None and not is_own(function):
            return False
    if strange_names(block) is not None or any(map(hides, block.modules())):
        return False
    planned = settings.device
    devices = {planned} if planned else {p.device.type for p in block.parameters()}
    dtypes = {p.dtype for p in block.parameters() if p.is_floating_point()}
    if not devices <= wanted or not dtypes & set(KERNEL_DTYPES):
        return False
    each = ((f"{path}.{p}" if p else path, class_of(m).__name__) for p, m in block.named_modules())
    left = {where for where, of in each if matches(settings.exclude, where, of)}
    settings.left_out.update(left)
    return not left  # also where a part of it shall stay as it is


def _binder(sources: Sources) -> Bind:
    """A callable that binds our own kernels, which `refusal` has found to be there."""
    kernels: dict[str, Kernel] = {op: sources.kernel(op, block=True) for op in OPS}  # type: ignore[misc]

    def bind(op: str, params: Mapping[str, Any], into: int = 0) -> Callable[..., Any]:
        kernel = kernels[op]
        return kernel.bind_into(into, dict(params)) if into else kernel.bind(dict(params))

    return bind


def _kind_of(
    block: nn.Module,
    leaves: Mapping[int, KnownLeaf],
    numbers: tuple[tuple[str, str], ...],
    bind: Bind,
    sources: Sources,
    past: bool,
) -> Kind | None:
    known: dict[str, KnownLeaf] = {}
    parts: list[Any] = []
    numbered: dict[str, set[str]] = {}
    for path, name in numbers:
        numbered.setdefault(path, set()).add(name)
    walls: list[str] = []
    read: dict[str, nn.Module] = {}
    for path, m in block.named_modules():
        if any(path.startswith(f"{w}.") for w in walls):
            continue
        own = tuple(
            (n, None if p is None else (type(p), p.dtype, tuple(p.shape), is_dense(p)))
            for n, p in (*m._parameters.items(), *m._buffers.items())
        )
        if path and is_wall(m):
            walls.append(path)
            parts.append((path, Same(type(m)), own))  # see `code_of`
            continue
        read[path] = m
        leaf = leaves.get(id(m))
        if leaf is not None:
            known[path] = leaf
        ignored = numbered.get(path, set()) | {"processor"}
        processor = m.__dict__.get("processor")
        parts.append((
            path, code_of(m), attributes_of(m, ignore=ignored), own, leaf, tuple(m._modules),
            None if processor is None else (*code_of(processor), repr(vars(processor))),
        ))  # fmt: skip
    versions = tuple(sources.kernel(op, block=True).version for op in OPS)  # type: ignore[union-attr]
    table = attention_table()
    chosen = tuple(chosen_attention(block.modules(), table))
    around = functions_around(block)
    key = (tuple(parts), numbers, versions, chosen, past, around)
    try:
        found = _kinds.get(key)
    except TypeError:  # an attribute that has no key
        return None
    if found is None:
        while len(_kinds) >= _MOST_KINDS:
            _kinds.pop(next(iter(_kinds), None), None)  # another thread may have been first
        found = _kinds[key] = Kind(
            class_of(block).__name__, known, numbers, bind, past, around, choice_of(block),
            _as_planned(read, numbered),
        )  # fmt: skip
    return found


def _as_planned(
    read: Mapping[str, nn.Module], numbered: Mapping[str, set[str]]
) -> Callable[[nn.Module], bool]:
    """A function that tells of a block whether the classes, settings, children and processors of
    its modules are those of `read`, by their paths; it holds none of them. Whatever is called as it
    stands may be another one by now."""
    parts = []
    for path, m in read.items():
        processor = m.__dict__.get("processor")
        parts.append((
            tuple(filter(None, path.split("."))),
            Part(m, called=True, ignore=numbered.get(path, ())),
            tuple(m._modules),
            None if processor is None else ProcessorPart(processor, ()),
        ))  # fmt: skip

    def as_planned(block: nn.Module) -> bool:
        walls: list[tuple[str, ...]] = []
        for path, part, children, processor in parts:
            if any(path[: len(wall)] == wall for wall in walls):
                continue
            module: Any = block
            for name in path:
                module = module._modules.get(name)
                if module is None:
                    return False
            if path and is_wall(module):
                walls.append(path)
                continue
            if not part.is_same(module) or tuple(module._modules) != children:
                return False
            held = module.__dict__.get("processor")
            if processor is not None and not processor.is_proven(held):
                return False
        return True

    return as_planned


def forget() -> None:
    """Drop all that was captured, and known of captures."""
    _kinds.clear()
    looping.clear()


def _prepare(path: str, name: str, block: nn.Module, kind: Kind) -> Prepared:
    original = type(block).forward
    mark: Any = Mark(path, name, kind)
    kind.blocks[block] = True
    opaque.foresee(kind.number, kind)

    def made() -> Forward:
        anchor = anchor_of(block)
        forward = adapter(original, kind, anchor, _numbers_in(block))
        if anchor:
            opaque.register(block, anchor, forward, names_of(original))
        return forward

    return Prepared(block, made, mark)


def _numbers_in(block: nn.Module) -> int:
    """How many numbers its matrices have."""
    return sum(p.numel() for p in block.parameters() if p.ndim > 1)


def adapter(
    original: Forward, kind: Kind, anchor: tuple[str, ...] = (), weights: int = 0
) -> Forward:
    """What stands as the forward of a candidate.

    Args:
        anchor, weights: of the block, for compiled graphs: see `opaque.call_compiled`. Without an
            anchor they trace the original.
    """
    number, names = kind.number, names_of(original)
    autocast, grad_enabled = torch.is_autocast_enabled, torch.is_grad_enabled
    distributed = torch.distributed.is_available()
    lookup, known = kind.lookup, kind._known
    own = coded(original)
    code = own.__code__

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            if anchor:
                result = opaque.call_compiled(self, anchor, weights, names, number, args, kwargs)
                if result is not None:
                    return result
            return original(self, *args, **kwargs)
        # its class is another one, or was patched
        if type(self).forward is not original or own.__code__ is not code:
            return type(self).forward(self, *args, **kwargs)
        if watched():  # asked first: a trace notes each size that is read
            return original(self, *args, **kwargs)
        variant, call, tensors, cache = lookup(args, kwargs, self)
        if (
            call is None
            or not tensors
            or (variant is None and (call[1] in known or is_deferred()))
            or (autocast("cuda" if tensors[0].is_cuda else "cpu") and kind.left_to_autocast())
            or hooks_on_all()
            or layers_replaced()
            or (grad_enabled() and may_record(self, tensors, is_idle))
            or (distributed and _is_partitioned(self))
        ):
            return original(self, *args, **kwargs)
        if variant is None:
            made = _outside(
                lambda: kind.decide(self, call, tensors, lambda: original(self, *args, **kwargs))
            )
            return _own(made) if current_operator() is not None else made
        if not (variant.same(self) and variant.given(tensors)):
            return original(self, *args, **kwargs)
        if variant.packs and self not in _packed:
            _outside(lambda: _pack(self, variant.packs))
        return variant.run(self, tensors, cache)

    return forward


def _outside(function: Callable[[], Any]) -> Any:
    """`function()`, outside of a compiled graph whose operator is called now."""
    if current_operator() is None or _in_capture():
        return function()
    return apart(function)


def _own(made: Any) -> Any:
    """The same in memory that this thread allocates, as a graph expects of its operator."""
    return pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, made)


def _in_capture() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _is_partitioned(block: nn.Module) -> bool:
    """Whether a parameter is a DTensor or empty: FSDP2 has gathered them by now."""
    if not torch.distributed.is_initialized():
        return False
    return any(is_dtensor(p) or p.numel() == 0 for p in block.parameters())


def _pack(block: nn.Module, groups: Sequence[Sequence[str]]) -> None:
    """Make one of the weights that one product serves; the first fused call of a block does it."""
    if _in_capture():
        return
    moved: list[tuple[Any, ...]] = []
    _packed[block] = moved
    if any("_hf_hook" in m.__dict__ for m in block.modules()):
        return  # offloading gives them other memory at each call
    for group in groups:
        layers = [block.get_submodule(path) for path in group]
        # first whether they are plain: a quantized layer's `weight` may be a method
        if not packing.can_pack(layers) or layers[0].weight.dtype == torch.float32:
            continue  # in fp32 cuBLAS sums a wider product in another order, 1.4 times as far off
        try:
            packs = packing.pack(layers)
        except torch.cuda.OutOfMemoryError:
            return  # a speed-up only: `project` calls the layers one by one
        moved += [tuple(weakref.ref(p) for p in parameters) for parameters in packs]
