"""A small copy of a model, of the same class and number of layers, that proofs run in its place.

Its configuration is the model's own with smaller sizes, its parameters are random: no bias is zero,
no norm's weight is one, so that every stage shows in the results.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

#: Sizes of a replica. `head_dim` is what hidden size over heads is where a configuration has none.
HEADS, HEAD_DIM, INNER, VOCAB, WINDOW = 4, 32, 96, 128, 9
#: Layers up to which a replica is made in full.
MOST_LAYERS = 256


class NoReplica(Exception):
    """Why no small copy can be made; the text is for the report."""


def text_config(config: Any) -> Any:
    """The part of a configuration that says how the decoder is built."""
    get = getattr(config, "get_text_config", None)
    return config if get is None else get(decoder=True)


def head_counts(config: Any) -> tuple[int, int, int]:
    """(heads, key heads, head_dim) that a decoder's configuration says.

    Raises:
        NoReplica: it says none.
    """
    heads = getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    if type(heads) is not int or type(hidden) is not int:
        raise NoReplica("its config has no number `num_attention_heads` or `hidden_size`")
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, key_heads, getattr(config, "head_dim", None) or hidden // heads


def shrunk(config: Any) -> Any:
    """A copy of the configuration with smaller sizes, and all else as it is.

    The relations of sizes stay: one key head, one for each query head or in between; heads that are
    together as wide as the hidden state, or not; window layers, whose window is small.

    Raises:
        NoReplica: a size is not where configurations have it.
    """
    if text_config(config) is not config:
        raise NoReplica("its config holds that of the text model as a part")
    small = copy.deepcopy(config)
    heads, key_heads, head_dim = head_counts(config)
    layers = getattr(config, "num_hidden_layers", None)
    if type(layers) is not int or not 0 < layers <= MOST_LAYERS:
        raise NoReplica(f"its config's `num_hidden_layers` is {layers!r}")
    wide = config.hidden_size == heads * head_dim
    sizes = {
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS if key_heads == heads else 1 if key_heads == 1 else HEADS // 2,
        "hidden_size": HEADS * HEAD_DIM if wide else HEADS * HEAD_DIM // 2 + 16 * HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INNER,
        "vocab_size": VOCAB,
    }
    for name, value in sizes.items():
        if getattr(config, name, None) is not None:
            setattr(small, name, value)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(config, name, None) is not None:
            setattr(small, name, None)
    if getattr(config, "sliding_window", None) is not None:
        small.sliding_window = WINDOW
    return small


def make_replica(model: nn.Module, implementation: str) -> nn.Module:
    """A small model of `model`'s class in fp64 on the CPU, its attention by `implementation`.

    The random state of the process is as it was after it.

    Raises:
        NoReplica: the class does not build one from a small configuration.
    """
    config: Any = shrunk(model.config)
    config._attn_implementation = implementation
    if getattr(config, "_experts_implementation", None) is not None:
        config._experts_implementation = "eager"  # others have no fp64
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), _float32_default():
            torch.manual_seed(0)
            replica: nn.Module = type(model)(config)
    except Exception as e:  # any class's own
        raise NoReplica(
            f"its class builds no small model from its config ({type(e).__name__}: {e})"
        ) from e
    replica = replica.double().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in replica.parameters():
            parameter.copy_(_random_values(parameter, generator))
    return replica


@contextmanager
def _float32_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _random_values(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Of a norm's weight or a bias: around 0.7, far from 0 and 1. Of a matrix: such that what it
    gives is about as large as what it is given."""
    values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    if parameter.dim() < 2:
        return 0.7 + 0.3 * values
    return values / math.sqrt(parameter.shape[-1])


class WithoutCasts(TorchFunctionMode):
    """Code that asks for fp32 gets fp64: what a model casts to fp32 inside stays exact."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        kwargs = {k: _widened(v) for k, v in (kwargs or {}).items()}
        return func(*map(_widened, args), **kwargs)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class Recording:
    """First input and output of every module's call, by path, and how often it was called."""

    def __init__(self, model: nn.Module) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.calls: dict[str, int] = {}
        self._model = model
        self._handles: list[Any] = []

    def __enter__(self) -> Recording:
        for path, module in self._model.named_modules():
            self._handles.append(module.register_forward_hook(self._hook(path), with_kwargs=True))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.calls[path] = self.calls.get(path, 0) + 1
            given = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
            result = output[0] if isinstance(output, tuple) and output else output
            if given is not None and isinstance(result, Tensor):
                # copies: OLMo clamps in place what its products give
                self.inputs[path], self.outputs[path] = given.clone(), result.clone()

        return hook


def same(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> bool:
    """Whether two results in fp64 are one, but for the order of sums."""
    if a.shape != b.shape or not a.numel():
        return False
    return bool((a - b).abs().max() <= tolerance * b.abs().max())
