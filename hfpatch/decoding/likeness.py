"""Whether a model is built as its replica, in other sizes: nothing stands in it that a proof of the
replica would not have seen."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hfpatch import swap
from hfpatch.decoding.replica import NoReplica, of_steps, text_config
from hfpatch.decoding.rules import Unexplained
from hfpatch.direct_calls import has_own_call
from hfpatch.proof.keys import (
    BLANK_NAMES,
    OWNED_BY_WRAPPERS,
    is_brought,
    names_read,
    value_key,
)
from hfpatch.proof.library import odd_code
from hfpatch.proof.subject import class_of, is_dense
from hfpatch.proof.unchanged import is_bound, is_hooked

#: What no forward computes with.
_IDLE = frozenset(
    {
        *("config", "generation_config", "name_or_path", "padding_idx", "warnings_issued"),
        *("layer_idx", "hf_device_map", "is_loaded_in_8bit", "_is_hf_initialized"),
        # read where a call brings no positions, and such calls are the original's (Described.axes)
        "rope_deltas",
        # of RoPE that changes with the length, which steps are only used before (Described.limit)
        *("max_seq_len_cached", "long_inv_freq"),
    }
)
#: A layer's switch for activation checkpointing, and who does it.
_CHECKPOINTING = ("gradient_checkpointing", "_gradient_checkpointing_func")
_CAPTURING = "transformers.utils.output_capturing"


def check_likeness(
    model: nn.Module,
    replica: nn.Module,
    read: frozenset[tuple[str, str]],
    opaque: tuple[str, ...] = (),
    planned: bool = False,
    lists: frozenset[str] = frozenset(),
) -> None:
    """Args:
        read: (path, attribute) of the numbers that are read off the model itself.
        opaque: paths of modules that are called as they are.
        lists: paths of lists of modules that are all alike, one for each head.
        planned: whether weights on the meta device are taken for ones that will be loaded.

    Raises:
        Unexplained: the model differs; the text says where and how.
    """
    try:
        takes_part = of_steps(model)
    except NoReplica as e:
        raise Unexplained(str(e)) from e
    called = tuple(f"{path}." for path in opaque)

    def small_path(path: str) -> str:
        """Where on the replica, which has another number of heads, the like of a module is."""
        parent = path.rpartition(".")[0]
        return f"{parent}.0" if parent in lists else path

    configs = text_config(model.config), text_config(replica.config)
    ours, theirs = (
        {
            path: m
            for path, m in root.named_modules()
            if takes_part(path) and not path.startswith(called)
        }
        for root in (model, replica)
    )
    for path in dict.fromkeys((*theirs, *ours)):
        where = f"`{path}`" if path else "the model"
        like = small_path(path)
        if path not in ours and like != path:
            continue
        if like not in theirs or path not in ours:
            which = "a further" if path in ours else "no"
            raise Unexplained(f"it has {which} module `{path}`")
        mine, small = ours[path], theirs[like]
        if class_of(mine) is not type(small):
            own, expected = class_of(mine), type(small)
            names = [c.__name__ for c in (own, expected)]
            if names[0] == names[1]:  # of another module, as a quantized layer
                names = [f"{c.__module__}.{c.__qualname__}" for c in (own, expected)]
            raise Unexplained(
                f"{where} is a `{names[0]}`, expected the `{names[1]}` that its class builds"
            )
        if (why := odd_code(mine)) is not None:
            raise Unexplained(f"{where}: {why}")
        if (why := what_wraps(mine, root=not path)) is not None:
            raise Unexplained(f"{where} {why}")
        _check_tensors(where, mine, small)
        _check_attributes(path, where, mine, small, read, configs)
        _check_config(where, model, mine, replica, small)
    _check_parameters(ours, planned)


def check_layer_likeness(
    model: nn.Module,
    replica: nn.Module,
    read: frozenset[tuple[str, str]],
    layers: Sequence[str],
    opaque: frozenset[str],
) -> None:
    """The same for the layers alone, as training needs it: products may be modules of any kind, a
    layer may have hooks, and parameters may be spread or of several dtypes.

    Args:
        layers: their paths.
        opaque: paths of the products.

    Raises:
        Unexplained: the model differs; the text says where and how.
    """
    configs = text_config(model.config), text_config(replica.config)
    for top in layers:
        try:
            layer = model.get_submodule(top)
        except AttributeError as e:  # taken out, as a student's of a teacher, or a stage's
            raise Unexplained(f"it has no module `{top}`") from e
        ours = dict(layer.named_modules(prefix=top))
        theirs = dict(replica.get_submodule(top).named_modules(prefix=top))
        hidden = tuple(f"{path}." for path in opaque if path.startswith(f"{top}."))
        for path in dict.fromkeys((*theirs, *ours)):
            if path in opaque and path in ours:
                continue
            if path.startswith(hidden):
                continue
            if path not in theirs or path not in ours:
                raise Unexplained(f"it has {'a further' if path in ours else 'no'} module `{path}`")
            mine, small = ours[path], theirs[path]
            if class_of(mine) is not type(small):
                raise Unexplained(
                    f"`{path}` is a `{class_of(mine).__name__}`, expected the "
                    f"`{type(small).__name__}` that its class builds"
                )
            if (why := odd_code(mine)) is not None:
                raise Unexplained(f"`{path}`: {why}")
            if (why := what_wraps(mine, root=path == top)) is not None:
                raise Unexplained(f"`{path}` {why}")
            _check_tensors(f"`{path}`", mine, small)
            known = read if path != top else read | {(path, name) for name in _CHECKPOINTING}
            _check_attributes(path, f"`{path}`", mine, small, known, configs)


def what_wraps(module: nn.Module, *, root: bool = False) -> str | None:
    """Whose hooks or forward stand on a module that a decoding step would not call; or None.

    Hooks on the model itself (`root`) fire as ever.
    """
    foreign = swap.foreign_forward(module)
    if foreign is not None:
        return f"is not its class's: {foreign}"
    forward = module.__dict__.get("forward")
    if not root and forward is not None and not is_bound(module, forward):
        return "has a forward that somebody put around ours"
    if "_call_impl" in module.__dict__:
        return "has a `_call_impl` of its own"
    if not root and has_own_call(module.__dict__):
        return "is called by what `Module.compile`, or somebody, put on it"
    if not root and is_hooked(module) and not only_captures(module):
        return "has hooks"
    d = module.__dict__
    for held in (d["_modules"], d["_parameters"], d["_buffers"]):
        if hidden := d.keys() & held.keys():
            return f"has an attribute that hides its `{min(hidden)}`"
    return None


def only_captures(module: nn.Module) -> bool:
    """Whether its hooks are those by which transformers collects `output_hidden_states` and the
    like, where a call asks for them: they stay on a model and do nothing else."""
    d = module.__dict__
    others = ("_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_hf_hook")
    return not any(d.get(name) for name in others) and all(
        getattr(hook, "__module__", "") == _CAPTURING for hook in d["_forward_hooks"].values()
    )


def _check_tensors(where: str, mine: nn.Module, small: nn.Module) -> None:
    held = (mine._parameters, small._parameters), (mine._buffers, small._buffers)
    for ours, theirs in held:
        for name in dict.fromkeys((*theirs, *ours)):
            a, b = ours.get(name), theirs.get(name)
            if (a is None) != (b is None):
                raise Unexplained(f"{where} has {'no' if a is None else 'a further'} `{name}`")
            if a is not None and b is not None and a.dim() != b.dim():
                raise Unexplained(f"{where}: `{name}` has {a.dim()} dimensions, not {b.dim()}")


def _check_parameters(modules: dict[str, nn.Module], planned: bool) -> None:
    first: Any = None
    held = (
        (f"{path}.{name}".lstrip("."), p)
        for path, module in modules.items()
        for name, p in module._parameters.items()
        if p is not None
    )
    for name, p in held:
        first = p if first is None else first
        if type(p) is torch.Tensor:  # `functional_call` puts such there
            raise Unexplained(f"`{name}` is no parameter, but a tensor")
        if type(p) is not nn.Parameter or type(p.data) is not torch.Tensor:
            raise Unexplained(f"`{name}` is no plain tensor, but a `{type(p.data).__name__}`")
        if not is_dense(p):
            raise Unexplained(f"the memory of `{name}` does not hold its values as they are")
        if p.is_meta and not planned:
            raise Unexplained(
                f"`{name}` is on the meta device; load its weights, then call apply again"
            )
        if p.dtype != first.dtype or p.device != first.device:
            raise Unexplained(
                f"its parameters are of several dtypes or devices: `{name}` is {p.dtype} on "
                f"{p.device}, others {first.dtype} on {first.device}"
            )


def _check_attributes(
    path: str,
    where: str,
    ours: nn.Module,
    theirs: nn.Module,
    read: frozenset[tuple[str, str]],
    configs: tuple[Any, Any],
) -> None:
    """Args:
    configs: of the text model and of its replica.
    """
    mine, small, named = _attributes(ours), _attributes(theirs), names_read(theirs)
    for name in dict.fromkeys((*small, *mine)):
        if name in _IDLE or (path, name) in read:
            continue
        if name not in named and (name[0] == "_" or name not in small):
            continue  # somebody's mark
        if name[0] == "_" and name not in small and hasattr(ours, "config_class"):
            continue  # `from_pretrained` leaves some on its models, which no forward reads
        if name not in small or name not in mine:
            which = "an" if name in mine else "no"
            raise Unexplained(f"{where} has {which} attribute `{name}`")
        expected = _as_in_config(small[name], *configs)
        if not _alike(mine[name], expected):
            raise Unexplained(f"{where}: `{name}` is {mine[name]!r:.80}, expected {expected!r:.80}")


def _as_in_config(value: Any, config: Any, small: Any) -> Any:
    """What stands on the model where `value` stands on its replica: a dict of the replica's config
    has smaller sizes (`mrope_section`), so the model has that of its own config there."""
    if not isinstance(value, dict):
        return value
    name = next((key for key, held in vars(small).items() if held is value), None)
    return value if name is None else vars(config).get(name, value)


def _check_config(where: str, model: Any, mine: nn.Module, replica: Any, small: nn.Module) -> None:
    """A module whose class takes the model's configuration has that, or one that says the same."""
    own = mine.__dict__.get("config")
    if own is model.config or small.__dict__.get("config") is not replica.config:
        return
    if own is None or own.to_dict() != model.config.to_dict():
        raise Unexplained(f"{where} has another `config` than the model")


def _attributes(module: nn.Module) -> dict[str, Any]:
    skipped = BLANK_NAMES | OWNED_BY_WRAPPERS
    return {k: v for k, v in module.__dict__.items() if k not in skipped and not is_brought(v)}


def _alike(ours: Any, theirs: Any) -> bool:
    """Equal, except in size."""
    if ours is theirs or (type(ours) is int and type(theirs) is int):
        return True
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, (tuple, list, torch.Size)):
        return len(ours) == len(theirs) and all(map(_alike, ours, theirs))
    if isinstance(ours, types.MethodType):
        return ours.__func__ is theirs.__func__
    return bool(value_key(ours) == value_key(theirs))
