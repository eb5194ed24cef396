"""What a capture and its proof run in the place of a block: nobody's own code runs on the model."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from hfpatch.proof.around import writable_around
from hfpatch.proof.copies import CannotReplicateError
from hfpatch.proof.library import HOOKS, hooks_of_libraries, is_installed
from hfpatch.proof.replicas import copied_apart
from hfpatch.proof.subject import class_of
from hfpatch.regions.capture import children, is_wall
from hfpatch.regions.guard import has_own_code
from hfpatch.regions.listening import is_idle


def stand_beside(block: nn.Module) -> nn.Module:
    """The block itself, or one with its very tensors and libraries' modules in which those of
    somebody's own classes, which are called as they stand, are copies that share nothing: their
    code may count its calls, and the original's call is the one that counts.

    Raises:
        CannotReplicateError: no such copy can be made, or somebody's hook would fire.
    """
    if (found := hooked(block)) is not None:
        raise CannotReplicateError(found[1])
    copies = {
        path: _copied(module, path)
        for path, module in _walls(block)
        if any(has_own_code(class_of(m)) for m in module.modules())
    }
    return _with(block, "", copies) if copies else block


def hooked(block: nn.Module, last: str | None = None) -> tuple[str, str] | None:
    """On which of the modules that a fused block calls somebody's hook or forward would fire in a
    proof beside the original's call, and why that is none; None where there is none now.

    Args:
        last: the path that was found before, which is looked at first.
    """
    places = dict(block.named_modules()) if last is None else _at(block, last)
    for path, module in places.items():
        if path and any(map(_counts, hooks_of_libraries(module))):
            return path, (
                f"`{path}` has a hook that keeps what calls gave, as a cache of diffusers does, "
                "which a proof cannot call beside the original"
            )
    walls = _walls(block) if last is None else places.items()
    for path, wall in walls:
        for m in wall.modules():
            what = ""
            if not is_installed(m.__dict__.get("forward")):
                what = "forward of an instance"
            elif any(not is_installed(h) for h in _hooks_of(m)) and not is_idle(m):
                what = "hook"
            if what:
                return path, (
                    f"`{path}` has somebody's {what}, which a proof cannot call beside the original"
                )
    return None if last is None else hooked(block)


def _at(block: nn.Module, path: str) -> dict[str, nn.Module]:
    """The module at `path` by it; nothing where it is gone."""
    found: Any = block
    for name in path.split("."):
        found = found._modules.get(name) if found is not None else None
    return {} if found is None else {path: found}


def _walls(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for below, child in children(module, path):
        if is_wall(child):
            yield below, child
        else:
            yield from _walls(child, below)


def _hooks_of(module: nn.Module) -> Iterator[Any]:
    for name in HOOKS:
        yield from module.__dict__[name].values()


def _counts(hook: Any) -> bool:
    """Whether a hook may keep something of a call: it says so, or is of somebody's own class."""
    own = any(
        not is_installed(getattr(type(hook), n, None)) for n in ("pre_forward", "post_forward")
    )
    return own or bool(getattr(hook, "_is_stateful", False))


def _copied(module: nn.Module, path: str) -> nn.Module:
    for m in module.modules():
        if (name := writable_around(m)) is not None:
            raise CannotReplicateError(
                f"the code of `{path}` names `{name}`, which is no part of it, and which a proof "
                "could write to"
            )
    try:
        return copied_apart(module, f"`{path}`")
    except CannotReplicateError:
        raise
    except Exception as e:  # any class's own
        raise CannotReplicateError(
            f"`{path}` cannot be copied, and a proof must not write to it ({type(e).__name__}: {e})"
        ) from e


def _with(module: nn.Module, path: str, copies: Mapping[str, nn.Module]) -> nn.Module:
    """The same module with copies in the place of some of those inside."""
    made: Any = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    for name, value in module.__dict__.items():  # our forward of a gated MLP calls those inside
        if isinstance(value, types.MethodType) and value.__self__ is module:
            made.__dict__[name] = types.MethodType(value.__func__, made)
    children: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        below = f"{path}.{name}".lstrip(".")
        if below in copies:
            children[name] = copies[below]
        elif child is not None and any(p.startswith(f"{below}.") for p in copies):
            children[name] = _with(child, below, copies)
        else:
            children[name] = child
    made.__dict__["_modules"] = children
    return made  # type: ignore[no-any-return]
