"""What a denoiser computes anew at every step although it is the same: kept between the steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.compiler import is_compiling

from hfpatch.blocks.masks import masks_nothing
from hfpatch.blocks.memo import current_capture, stream_of
from hfpatch.blocks.opaque import trace_whole
from hfpatch.direct_calls import has_own_call
from hfpatch.leaves.custom import CustomSubject
from hfpatch.proof.contract import Contract
from hfpatch.proof.keys import BLANK_NAMES, OWNED_BY_WRAPPERS, attributes_of, code_of
from hfpatch.proof.library import HOOKS, hooks_of_libraries, is_installed, odd_code
from hfpatch.proof.replicas import replicate
from hfpatch.proof.subject import (
    Family,
    Forward,
    Subject,
    Tensor,
    class_of,
    coded,
    forward_of_class,
    watched,
)
from hfpatch.proof.unchanged import (
    Part,
    ProcessorPart,
    calls_otherwise,
    hooks_on_all,
)

#: What comparisons found. The last ones are kept.
compared: dict[Any, tuple[float, float] | str] = {}
_MOST = 64


class RecallSubject(CustomSubject):
    """A module whose own forward still runs, on less or less often; the results are the same."""

    op = "recall"
    source = "hfpatch"
    own = True

    def __init__(
        self, module: nn.Module, title: str, make: Callable[[Forward], Forward], family: Any
    ) -> None:
        super().__init__(module, family)
        self.title = title
        self._make = make

    def compare(self) -> tuple[float, float] | str:
        """Of equal code and settings it is asked once."""
        m = self.module
        tensors = tuple(
            (n, None if p is None else (p.dtype, p.device)) for n, p in self.parameters().items()
        )
        key = (type(self.family), code_of(m), attributes_of(m), tensors)
        if key not in compared:
            compared[key] = self.family.compare(m)
            while len(compared) > _MOST:
                del compared[next(iter(compared))]
        return compared[key]

    def parameters(self) -> dict[str, Tensor | None]:
        """Those whose dtypes and devices a comparison hangs on."""
        return dict(self.module._parameters)

    def forward(self, original: Forward, contract: Contract) -> Forward:
        made, of_class = self._make(original), class_of(self.module).forward
        own = coded(of_class)
        code = own.__code__
        # below it there may be a recording, which runs what the class has when it is called
        other = forward_of_class if original is of_class else original

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            now = made
            if not is_compiling() and not (
                type(self).forward is of_class and own.__code__ is code
            ):  # it was patched since
                now = other
            return now(self, *args, **kwargs)

        return forward


class RopeTables(Family):
    """LTX-Video's RoPE tables: 25 small kernels in fp32 a step, from sizes that do not change.

    Kept are the tables of one sample, each value once; the module's have it twice.
    """

    name = "rope tables"
    pattern = re.compile(r"^LTXVideoRotaryPosEmbed$")
    rank = 6
    replacement: ClassVar[Any] = None
    differentiable = True

    def examine(self, module: nn.Module) -> Subject | str | None:
        if (why := odd_code(module)) is not None:
            return why
        if _settings(module) is None:
            return "it holds more than numbers, so its tables may change"
        # Numbers that it holds are part of what is recalled; what its code calls is looked at.
        same = Part(module, called=True, ignore=frozenset(module.__dict__)).is_same

        def make(original: Forward) -> Forward:
            return _recalling_tables(original, same)

        return RecallSubject(module, "RoPE tables kept between steps", make, self)

    def compare(self, module: nn.Module) -> tuple[float, float] | str:
        """Tables of small sizes, first made and then recalled, against the module's own."""
        x = torch.empty(2, 1, 1)
        module, original = replicate(module), type(module).forward
        forward = _recalling_tables(original, lambda _: True)
        for sizes in ((2, 3, 4), (2, 3, 4), (3, 2, 2)):
            expected = original(module, x, *sizes, (0.5, 32, 32))
            got = forward(module, x, *sizes, (0.5, 32, 32))
            if any(not torch.equal(a, b) for a, b in zip(got, expected, strict=True)):
                return "its tables do not hold each value twice"
        return 0.0, 0.0


def _settings(module: nn.Module) -> tuple[Any, ...] | None:
    """What a module holds, where these are numbers and words alone."""
    if module._parameters or module._buffers or module._modules:
        return None
    held = [
        (k, v)
        for k, v in module.__dict__.items()
        if k not in BLANK_NAMES and k not in OWNED_BY_WRAPPERS
    ]
    plain = all(type(v) in (int, float, str, bool, type(None)) for _, v in held)
    return tuple(held) if plain else None


class _Tables:
    """Cos and sin of one sample, each value once: half the memory."""

    def __init__(self, key: Any, wide: tuple[Tensor, ...]) -> None:
        self.key = key
        with torch.inference_mode(False):
            self._compact = tuple(t[..., ::2].contiguous() for t in wide)

    def of(self, batch: int) -> tuple[Tensor, ...]:
        """[B, S, D], each value twice. They are the caller's own, as those of the module are: who
        writes to them changes no others."""
        with torch.inference_mode(False):
            return tuple(_doubled(t, batch) for t in self._compact)


def _doubled(compact: Tensor, batch: int) -> Tensor:
    """[1, S, D / 2] as [batch, S, D]: one copy."""
    _, length, half = compact.shape
    pairs = compact.unsqueeze(-1).expand(batch, length, half, 2)
    return pairs.reshape(batch, length, 2 * half)


def _recalling_tables(original: Forward, same: Callable[[nn.Module], bool]) -> Forward:
    """`same`: whether the functions that its forward calls are those that were read."""
    held: _Tables | None = None

    def forward(
        self: nn.Module,
        hidden_states: Any,
        num_frames: Any = None,
        height: Any = None,
        width: Any = None,
        rope_interpolation_scale: Any = None,
        video_coords: Any = None,
    ) -> Any:
        nonlocal held
        if is_compiling() and video_coords is None:  # all samples have the same tables
            one = original(
                self, hidden_states[:1], num_frames, height, width, rope_interpolation_scale
            )
            return tuple(t.expand(hidden_states.shape[0], -1, -1) for t in one)
        sizes = (num_frames, height, width)
        scale = rope_interpolation_scale
        stream, settings = None, _settings(self)
        if (
            not is_compiling()
            and settings is not None
            and same(self)
            and type(hidden_states) is Tensor
            and not watched()
            and video_coords is None
            and all(type(s) is int for s in sizes)
            and (scale is None or all(type(s) in (int, float) for s in scale))
        ):
            stream = stream_of(hidden_states)
        if stream is None:
            rest = (num_frames, height, width, rope_interpolation_scale, video_coords)
            return original(self, hidden_states, *rest)
        key = (stream, hidden_states.device, sizes, scale and tuple(scale), settings)
        recalled, capture = held, current_capture()
        if capture is not None and recalled is not None and recalled.key[1:] == key[1:]:
            capture.kept.append(recalled)  # made by the call before the recording
        elif recalled is None or recalled.key != key:
            with torch.inference_mode(False):
                wide = original(self, torch.empty_like(hidden_states[:1, :0]), *sizes, scale)
            recalled = held = _Tables(key, wide)
        return recalled.of(hidden_states.shape[0])

    return forward


class FullMasks(Family):
    """A text mask that masks nothing is left out. In a compiled model, of which it is not known
    while it is traced, the blocks look at it when they are called."""

    name = "full masks"
    pattern = re.compile(r"^LTX2?VideoTransformer3DModel$")
    rank = 1
    replacement: ClassVar[Any] = None
    differentiable = True
    #: Class name to each mask's name and its position among the arguments after self.
    masks: ClassVar[dict[str, tuple[tuple[str, int], ...]]] = {
        "LTXVideoTransformer3DModel": (("encoder_attention_mask", 3),),
        "LTX2VideoTransformer3DModel": (
            ("encoder_attention_mask", 8),
            ("audio_encoder_attention_mask", 9),
        ),
    }

    def examine(self, module: nn.Module) -> Subject | str | None:
        masks = self.masks[class_of(module).__name__]
        code = getattr(_unwrapped(type(module).forward), "__code__", None)
        for name, place in masks:
            if code is None or code.co_varnames[place + 1] != name:
                return f"its forward does not take `{name}` as argument {place + 1}"
        for path, m in module.named_modules():
            if path and not (_is_block(path) or "processor" in m.__dict__):
                continue
            processor = m.__dict__.get("processor")
            why = odd_code(m) or (None if processor is None else odd_code(processor))
            if why is not None:
                return f"what becomes of the mask is not known: {why}"
        same = _same_readers(module)

        def make(original: Forward) -> Forward:
            for name, place in masks:
                original = _without_full_mask(original, name, place, same)
            return original

        names = ", ".join(f"`{name}`" for name, _ in masks)
        return RecallSubject(module, f"{names} left out where it masks nothing", make, self)

    def compare(self, module: nn.Module) -> tuple[float, float] | str:
        return 0.0, 0.0  # the argument is optional in these classes, and a bias of zeros adds none


def _is_block(path: str) -> bool:
    return path.rpartition(".")[0] == "transformer_blocks"


def _same_readers(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Whether the blocks of a model, and their attentions with their processors, are those of now,
    and nobody else's code is given what they are; it holds none of them."""
    readers: list[_Reader] = []
    for path, m in model.named_modules():
        if _is_block(path) or "processor" in m.__dict__:
            readers.append(_Reader(m, tuple(path.split("."))))
    return lambda root: not hooks_on_all() and all(one.is_same(root) for one in readers)


class _Reader(Part):
    """A module that is given the mask. It is called: its class's own code runs, which was read."""

    def __init__(self, module: nn.Module, path: tuple[str, ...]) -> None:
        super().__init__(module, path, called=True)
        processor = module.__dict__.get("processor")
        self._processor = None if processor is None else ProcessorPart(processor, path)

    def is_same(self, root: nn.Module) -> bool:
        if not super().is_same(root):
            return False
        if self._processor is not None and not self._processor.is_same(root):
            return False
        module: Any = root
        for name in self._path:
            module = module._modules[name]
        return (
            self._class.forward is self._forward
            and self._coded.__code__ is self._code
            and not calls_otherwise(type(module))
            and not _shows_its_arguments(module)
        )


def _shows_its_arguments(module: nn.Module) -> bool:
    """Whether somebody's own code is given a module's arguments: a forward or a hook of theirs.
    Those of libraries, which move and gather tensors, do not look into them."""
    d = module.__dict__
    if has_own_call(d) or not is_installed(d.get("forward")):
        return True
    hooks = [h for name in HOOKS for h in d[name].values()]
    for hook in hooks_of_libraries(module):
        hooks += [getattr(type(hook), n, None) for n in ("pre_forward", "new_forward")]
    return not all(map(is_installed, hooks))


def _unwrapped(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _without_full_mask(
    original: Forward, name: str, place: int, same: Callable[[nn.Module], bool]
) -> Forward:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get(name) if name in kwargs or len(args) <= place else args[place]
        if is_compiling():
            masks = {name: mask} if isinstance(mask, Tensor) and mask.ndim == 2 else {}
            return trace_whole(original, self, args, kwargs, masks)
        if type(mask) is Tensor and not watched() and same(self) and masks_nothing(mask):
            if name in kwargs:
                kwargs[name] = None
            else:
                args = (*args[:place], None, *args[place + 1 :])
        return original(self, *args, **kwargs)

    return forward
