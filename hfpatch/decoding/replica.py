"""A small copy of a model, of the same class and number of layers, that proofs run in its place.

Its configuration is the model's own with smaller sizes, its parameters are random: no bias is zero,
no norm's weight is one, so that every stage shows in the results.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

#: Sizes of a replica. `head_dim` is what hidden size over heads is where a configuration has none.
HEADS, HEAD_DIM, INNER, VOCAB, WINDOW = 4, 32, 96, 128, 9
#: Sizes of mixtures of experts, under all names that they have, at most.
_EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), INNER),
    **dict.fromkeys(("n_group", "topk_group"), 1),
}
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

    Where it holds the text model's as a part, that part is made smaller.

    Raises:
        NoReplica: a size is not where configurations have it.
    """
    text = text_config(config)
    if text is not config:
        name = next((n for n, value in vars(config).items() if value is text), None)
        if name is None:
            raise NoReplica("its config holds that of the text model in a place that is not known")
        whole = copy.deepcopy(config)
        setattr(whole, name, shrunk(text))
        return whole
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
            _leave_out(small, name)
    for name, most in _EXPERTS.items():
        experts = getattr(config, name, None)
        if type(experts) is int and experts > most:
            setattr(small, name, most)
    if getattr(config, "sliding_window", None) is not None:
        small.sliding_window = WINDOW
    for part in rope_parts(small):
        sections = part.get("mrope_section")  # frequencies of each axis of a position
        if isinstance(sections, (list, tuple)):
            part["mrope_section"] = [size * HEAD_DIM // head_dim for size in sections]
        for name in ("short_factor", "long_factor"):  # one of each frequency
            if isinstance(factors := part.get(name), (list, tuple)):
                part[name] = list(factors)[: max(1, len(factors) * HEAD_DIM // head_dim)]
    return small


def _leave_out(config: Any, token: str) -> None:
    """Take a token out of a configuration, which may be none of a smaller vocabulary; some classes
    say that it is a number and refuse None: these get the first."""
    from huggingface_hub.errors import StrictDataclassFieldValidationError

    try:
        setattr(config, token, None)
    except StrictDataclassFieldValidationError:
        setattr(config, token, 0)


def rope_parts(config: Any) -> list[dict[str, Any]]:
    """What a configuration says of RoPE: of all layers, or of each kind of them."""
    found: dict[int, dict[str, Any]] = {}
    for name in ("rope_parameters", "rope_scaling"):
        whole = getattr(config, name, None)
        if isinstance(whole, dict):
            kinds = [part for part in whole.values() if isinstance(part, dict)]
            found |= {id(part): part for part in (kinds or [whole])}
    return list(found.values())


def has_axes(config: Any) -> bool:
    """Whether positions may have several axes, an image's rows and columns."""
    return any("mrope_section" in part for part in rope_parts(config))


def rope_limit(config: Any) -> int | None:
    """The length of a sequence from which on its frequencies, or its queries' factors, are others.
    None: they stay."""
    limits = []
    for part in rope_parts(config):
        kind = str(part.get("rope_type"))
        if kind == "longrope" or part.get("llama_4_scaling_beta"):
            limits.append(part.get("original_max_position_embeddings"))
        elif "dynamic" in kind:
            limits.append(getattr(config, "max_position_embeddings", None))
    if not limits:
        return None
    return min(limit if type(limit) is int else 0 for limit in limits)


def make_replica(model: nn.Module, implementation: str) -> nn.Module:
    """A small model of `model`'s class in fp64 on the CPU, its attention by `implementation`.

    The random state of the process is as it was after it.

    Raises:
        NoReplica: the class does not build one from a small configuration.
    """
    config: Any = shrunk(model.config)
    text = text_config(config)
    text._attn_implementation = implementation
    if getattr(text, "_experts_implementation", None) is not None:
        text._experts_implementation = "eager"  # others have no fp64
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), _float32_default():
            torch.default_generator.manual_seed(0)  # not those of GPUs, which nobody puts back
            replica: nn.Module = (
                type(model)(config) if text is config else _with_a_decoder(type(model), config)
            )
    except NoReplica:
        raise
    except Exception as e:  # any class's own
        raise NoReplica(
            f"its class builds no small model from its config ({type(e).__name__}: {e})"
        ) from e
    replica = replica.double().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in replica.parameters():
            if not parameter.is_meta:
                parameter.copy_(_random_values(parameter, generator))
    return replica


def decoder_of(model: Any) -> nn.Module:
    """The text model inside of one that takes more than text.

    Raises:
        NoReplica: there is none of its own.
    """
    text = text_config(model.config)
    found: nn.Module = model.get_decoder()
    if found is not model and getattr(found, "config", None) is text:
        return found
    raise NoReplica("its text model is not a part of it with a configuration of its own")


def _with_a_decoder(cls: Any, config: Any) -> nn.Module:
    """A model of more than text, of which only what text needs has memory: the rest, whatever its
    size, is on `meta`."""
    with torch.device("meta"):
        whole: Any = cls(config)
    part = decoder_of(whole)
    path = next(p for p, m in whole.named_modules() if m is part)
    parent, _, name = path.rpartition(".")
    setattr(whole.get_submodule(parent), name, type(part)(part.config))
    head = whole.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise NoReplica("it has no output embeddings")
    head.to_empty(device="cpu")
    built: nn.Module = whole
    _give_memory(built)
    return built


def _give_memory(model: nn.Module) -> None:
    """To a model's first parameter: where that lies is what transformers calls its device."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                own = torch.empty_like(parameter, device="cpu")
                module._parameters[name] = nn.Parameter(own, requires_grad=False)
                return


def of_steps(model: Any) -> Callable[[str], bool]:
    """Whether the module at a path takes part in a step over text alone: all do where a model is
    one of text; else the text model, the head, and what holds them.

    Raises:
        NoReplica: see `decoder_of`.
    """
    if text_config(model.config) is model.config:
        return lambda path: True
    decoder, head = decoder_of(model), model.get_output_embeddings()
    inside = [p for p, m in model.named_modules() if m is decoder or m is head]

    def takes_part(path: str) -> bool:
        return not path or any(
            path == p or path.startswith(f"{p}.") or p.startswith(f"{path}.") for p in inside
        )

    return takes_part


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
        # one call in a hundred casts, and a proof makes tens of thousands
        if func is _FLOAT:
            return args[0].double()
        for value in args:
            if value is _FP32:
                args = tuple(map(_widened, args))
                break
        if not kwargs:
            return func(*args)
        for value in kwargs.values():
            if value is _FP32:
                kwargs = {k: _widened(v) for k, v in kwargs.items()}
                break
        return func(*args, **kwargs)


_FLOAT, _FP32 = Tensor.float, torch.float32


def _widened(value: Any) -> Any:
    return torch.float64 if value is _FP32 else value


def without_casts_in(modules: bool) -> AbstractContextManager[Any]:
    """What `reference` computes a description in: it has no casts of its own where that is in fp64,
    so that only `modules` of a model, called as they are, need the mode, which costs as much as a
    small operator."""
    return WithoutCasts() if modules else nullcontext()


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
    """Whether two results in fp64 are one, apart from the order of sums."""
    if a.shape != b.shape or not a.numel():
        return False
    return bool((a - b).abs().max() <= tolerance * b.abs().max())
