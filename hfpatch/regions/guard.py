"""Whether a block is, at a call, what it was when its calls were captured."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from hfpatch.patches.keys import names_read
from hfpatch.patches.unchanged import Part, ProcessorPart, same_parts

_PLAIN = (int, float, bool, str, type(None))


def guard(
    block: nn.Module, read: Sequence[str], numbers: Sequence[tuple[str, str]]
) -> Callable[[nn.Module], bool]:
    """A function that tells whether the modules that a captured graph stands in for are those of
    now, in evaluation mode: classes, settings, what their code names of their configuration,
    processors, and nobody's hooks or forwards. It holds no module: the blocks of a list share it.

    Args:
        read: paths of those modules.
        numbers: attributes that number a block; they may differ.
    """
    modules = {path: block.get_submodule(path) for path in read}
    parts = [
        Part(
            module,
            tuple(filter(None, path.split("."))),
            called=path == "",
            ignore={name for where, name in numbers if where == path},
        )
        for path, module in modules.items()
    ]
    processors = [
        ProcessorPart(m.__dict__["processor"], tuple(path.split(".")))
        for path, m in modules.items()
        if "processor" in m.__dict__
    ]
    same = same_parts(parts, processors)
    rows = _rows(modules)
    table = attention_table()
    chosen = tuple(chosen_attention(modules.values(), table))

    def holds(root: nn.Module) -> bool:
        if not same(root):
            return False
        for name, function in chosen:
            if table.get(name) is not function:
                return False
        found: list[Any] = [root.__dict__]
        for above, name, read_config, values in rows:
            if name is not None:
                found.append(found[above]["_modules"][name].__dict__)
            if found[-1]["training"]:
                return False
            if read_config is not None:
                config = found[-1].get("config")
                try:
                    if config is None or read_config(config) != values:
                        return False
                except AttributeError:
                    return False
        return True

    return holds


def _rows(modules: dict[str, nn.Module]) -> list[tuple[int, str | None, Any, Any]]:
    """Modules above before below: (place of the one above, name, what reads its configuration, what
    that gave). A configuration that several modules hold is read once for all of them."""
    order = sorted(modules, key=lambda p: (p.count(".") + bool(p), p))
    places = {path: i for i, path in enumerate(order)}
    named: dict[int, set[str]] = {}
    first: dict[int, str] = {}
    for path in order:
        config = modules[path].__dict__.get("config")
        if config is not None:
            first.setdefault(id(config), path)
            named.setdefault(id(config), set()).update(names_read(modules[path]))
    rows: list[tuple[int, str | None, Any, Any]] = []
    for path in order:
        above, _, name = path.rpartition(".")
        config = modules[path].__dict__.get("config")
        read = values = None
        if config is not None and first[id(config)] == path:
            names = sorted(n for n in named[id(config)] if _is_setting(config, n))
            if names:
                read = operator.attrgetter(*names)
                values = read(config)
        rows.append((places.get(above, 0), name or None, read, values))
    return rows


def _is_setting(config: Any, name: str) -> bool:
    try:
        return isinstance(getattr(config, name), _PLAIN)
    except Exception:  # a property of any configuration's own
        return False


def attention_table() -> Any:
    """transformers' table of attention functions, empty where it is not loaded."""
    utils = sys.modules.get("transformers.modeling_utils")
    return getattr(utils, "ALL_ATTENTION_FUNCTIONS", {})


def chosen_attention(modules: Iterable[nn.Module], table: Any) -> Iterator[tuple[str, Any]]:
    """What the table has for the attention that the configurations of modules name."""
    configs = {id(c): c for m in modules if (c := m.__dict__.get("config")) is not None}
    names = {getattr(c, "_attn_implementation", None) for c in configs.values()}
    yield from ((n, table.get(n)) for n in sorted(n for n in names if isinstance(n, str)))
