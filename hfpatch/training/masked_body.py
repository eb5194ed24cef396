"""The forward of a model's body, whose masks of several sequences are made when they are read.

A body makes one mask [B, 1, S, S] or two of transformers' functions before its first layer. Patched
layers do not read them where they say no more than which tokens are of one sequence, and how many
keys a token sees. So the body's own code runs, as a function that finds ours under the names of
these functions: ours gives a `DeferredMask` then. What they make is compared with what that says on
small samples, when the model is patched.

That is so only in calls in which every layer is ours and nobody else is given its arguments; in all
others, and for all other arguments, the model's own functions make what they make.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from hfpatch import swap
from hfpatch.other_globals import takes_others, with_closure, with_globals
from hfpatch.proof.library import is_own
from hfpatch.proof.proving import quietly
from hfpatch.proof.subject import Forward, class_of, watched
from hfpatch.proof.unchanged import calls_otherwise, hooks_on_all
from hfpatch.training import packed
from hfpatch.training.adapted_by import OP
from hfpatch.training.deferred_mask import DeferredMask

#: `Swap.op` of a body.
MASK = "packed_mask"
#: transformers' functions by name, and whether their masks have a window.
_FUNCTIONS = {"create_causal_mask": False, "create_sliding_window_causal_mask": True}
#: Their arguments that are given here.
_ARGUMENTS = frozenset(
    {"config", "inputs_embeds", "attention_mask", "past_key_values", "position_ids"}
)
#: Attention whose mask is bool [B, 1, S, S].
_KIND = "sdpa"
_DEPTH = 6  # of decorators
#: Whose hooks on layers look at floats and at what has gradients: FSDP2's.
_HOOKS_OF = "torch.distributed."


@dataclass(frozen=True)
class Body:
    """A body's forward, as its class has it, and what its masks are made by.

    chain: the forward and what its decorators hold, the outermost first. names: of the functions
    in the innermost one's globals.
    """

    chain: tuple[types.FunctionType, ...]
    names: tuple[str, ...]
    codes: tuple[types.CodeType, ...]


def body_of(module: nn.Module) -> Body | str | None:
    """None where the module's class calls none of these functions; why not, where they, or the
    code that calls them, are not as transformers has them."""
    chain = tuple(_chain(class_of(module).forward))
    config = getattr(module, "config", None)
    if not chain or config is None:
        return None
    own = chain[-1]
    names = tuple(n for n in _FUNCTIONS if n in own.__code__.co_names)
    if not names:
        return None
    if not takes_others(own.__code__):
        return "its masks are made before its layers: its code uses its globals as a whole"
    for name in names:
        if not _is_known(own, name):
            return f"its masks are made before its layers: `{name}` is not transformers' own"
        if not set(inspect.signature(_maker(name)).parameters) >= _ARGUMENTS:
            return f"its masks are made before its layers: `{name}` takes other arguments here"
        if not _is_as_said(_maker(name), slides=_FUNCTIONS[name], config=config):
            return f"its masks are made before its layers: those of `{name}` say something else"
    return Body(chain, names, tuple(f.__code__ for f in chain))


def _chain(forward: Any) -> Iterator[types.FunctionType]:
    """A forward and what it wraps, each with the next in one of its cells; nothing if it is built
    in another way."""
    found: list[types.FunctionType] = []
    while isinstance(forward, types.FunctionType) and len(found) < _DEPTH:
        found.append(forward)
        inner = getattr(forward, "__wrapped__", None)
        if inner is None:
            return iter(found)
        if _cell_of(forward, inner) is None:
            return iter(())
        forward = inner
    return iter(())


def _cell_of(function: types.FunctionType, held: Any) -> int | None:
    """The number of the one cell that holds it."""
    found = [i for i, cell in enumerate(function.__closure__ or ()) if _content(cell) is held]
    return found[0] if len(found) == 1 else None


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _masking() -> Any:
    from transformers import masking_utils

    return masking_utils


def _maker(name: str) -> Any:
    return getattr(_masking(), name, None)


def _is_known(function: types.FunctionType, name: str) -> bool:
    found = function.__globals__.get(name)
    return isinstance(found, types.FunctionType) and found is _maker(name) and is_own(found)


# --- what a function makes ------------------------------------------------------------------------


class _Config:
    """A model's configuration with some settings otherwise."""

    def __init__(self, config: Any, **settings: Any) -> None:
        self.__dict__.update(settings, _hfpatch_config=config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_hfpatch_config"], name)


def _is_as_said(function: Any, *, slides: bool, config: Any) -> bool:
    """Whether a function's masks say what is claimed of them, on small samples."""
    samples = (
        [[*range(5), *range(8)]],
        [[*range(3, 9), *range(2), *range(5)], [0, *range(1), *range(11)]],
        [[*range(13)]],
    )
    try:
        with quietly("cpu"), torch.device("cpu"), torch.no_grad():
            for window in (3, 6) if slides else (3,):
                settings = {"_attn_implementation": _KIND, "is_causal": True}
                seen = _Config(config, sliding_window=window, **settings)
                for rows in samples if slides else samples[:2]:
                    positions = torch.tensor(rows)
                    mask = function(
                        config=seen, inputs_embeds=torch.zeros(len(rows), 13, 4),
                        attention_mask=None, past_key_values=None, position_ids=positions,
                    )  # fmt: skip
                    own = window if slides else None
                    if packed.sequences_of(mask, positions, own, len(rows)) is None:
                        return False
    except Exception:  # of another version
        return False
    return True


# --- a call ---------------------------------------------------------------------------------------


def adapter(body: Body, containers: Sequence[str]) -> Forward:
    """The forward of a body. containers: where its layers are, as paths from it."""
    original = body.chain[0]
    makers = {name: _Maker(body.chain[-1], name) for name in body.names}
    other: types.FunctionType = with_globals(body.chain[-1], makers)
    for outer, inner in zip(body.chain[-2::-1], body.chain[:0:-1], strict=True):
        cells = list(outer.__closure__ or ())
        at = _cell_of(outer, inner)
        assert at is not None
        cells[at] = types.CellType(other)
        around = with_closure(outer, tuple(cells))
        around.__wrapped__ = other  # type: ignore[attr-defined]
        other = around

    def unchanged(self: nn.Module) -> bool:
        return (
            class_of(self).forward is original
            and all(f.__code__ is c for f, c in zip(body.chain, body.codes, strict=True))
            and tuple(_chain(original)) == body.chain
        )

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (
            not (self.training or torch.is_grad_enabled())
            or is_compiling()
            or not unchanged(self)
            or not _are_ours(self, containers)
        ):
            return type(self).forward(self, *args, **kwargs)
        return other(self, *args, **kwargs)

    return forward


def _are_ours(body: nn.Module, containers: Sequence[str]) -> bool:
    """Whether each layer has our forward, and nobody else is given what it is called with."""
    if hooks_on_all():
        return False
    try:
        layers = [m for path in containers for m in body.get_submodule(path)._modules.values()]
    except AttributeError:  # it was built anew
        return False
    return all(layer is not None and _is_ours(layer) for layer in layers)


def _is_ours(layer: nn.Module) -> bool:
    state = layer.__dict__
    mark = swap.adapter_of(state.get("forward"))
    if mark is None or getattr(mark.details, "op", None) != OP:
        return False
    if state.get("_compiled_call_impl") is not None or _calls_otherwise(type(layer)):
        return False
    return all(
        getattr(state[kind].get(key), "__module__", "").startswith(_HOOKS_OF)
        for kind, given in (
            ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
            ("_forward_hooks", "_forward_hooks_with_kwargs"),
        )
        for key in state[given]
    )


def _calls_otherwise(cls: type[nn.Module]) -> bool:
    """Whether calling a layer runs more than PyTorch's own call and transformers' checkpoint."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    own = GradientCheckpointingLayer.__dict__.get("__call__")  # until transformers 5.23
    called: Any = cls
    return called.__call__ is not own if own is not None else calls_otherwise(cls)


class _Maker:
    """What a body's code finds in place of a function that makes a mask."""

    def __init__(self, own: types.FunctionType, name: str) -> None:
        self._live, self._name, self._slides = own.__globals__, name, _FUNCTIONS[name]
        self._function = own.__globals__[name]
        self._code = self._function.__code__
        self._interface = _masking().ALL_MASK_ATTENTION_FUNCTIONS[_KIND]
        self._signature = inspect.signature(self._function)
        functools.update_wrapper(self, self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        now = self._live[self._name]
        if now is self._function and now.__code__ is self._code:
            found = self._deferred(args, kwargs)
            if found is not None:
                return found
        return now(*args, **kwargs)

    def _deferred(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DeferredMask | None:
        """None where the function makes something else, or nothing, or where that is not known."""
        try:
            given = self._signature.bind(*args, **kwargs).arguments
        except TypeError:  # the function's own error
            return None
        config, x = given.pop("config"), given.pop("inputs_embeds")
        positions = given.pop("position_ids", None)
        parameters = self._signature.parameters
        if any(v is not None and v is not parameters[n].default for n, v in given.items()):
            return None
        if not _serves(x, positions) or not self._is_that(config):
            return None
        rows, length = x.shape[:2]
        window = getattr(config, "sliding_window", None) if self._slides else None
        if self._slides and (type(window) is not int or window < 1):
            return None
        positions = positions.expand(rows, -1)
        begins = packed.beginnings(positions)
        sequences = packed.sequences_from(begins, window)
        if len(sequences.lengths) == rows and (window is None or window >= length):
            return None  # PyTorch's attention is told by `is_causal`
        # what it reads of the embeddings is how they look; the positions may be written to
        like, kept = x.detach().new_empty(()).expand(x.shape), positions.clone()
        function = self._function

        def make() -> Tensor:
            made: Tensor = function(
                config=config, inputs_embeds=like, attention_mask=None, past_key_values=None,
                position_ids=kept,
            )  # fmt: skip
            return made

        found: DeferredMask = DeferredMask.of(make, sequences, rows, length)
        return found

    def _is_that(self, config: Any) -> bool:
        known = _masking().ALL_MASK_ATTENTION_FUNCTIONS
        return (
            getattr(config, "_attn_implementation", None) == _KIND
            and bool(getattr(config, "is_causal", True))
            and known.get(_KIND) is self._interface
        )


def _serves(x: Any, positions: Any) -> bool:
    if type(x) is not Tensor or type(positions) is not Tensor or x.dim() != 3:
        return False
    if x.device.type not in ("cpu", "cuda") or positions.device != x.device or not x.numel():
        return False
    if positions.dtype != torch.int64 or positions.dim() != 2 or x.shape[1] < 2:
        return False
    if positions.shape[1] != x.shape[1] or positions.shape[0] not in (1, x.shape[0]):
        return False
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return (
        not torch.is_inference_mode_enabled()
        and not positions.is_inference()
        and not watched()
        and not torch._C._len_torch_dispatch_stack()
    )
