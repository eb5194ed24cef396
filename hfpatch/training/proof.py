"""Plans of a replica's decoder layers, and the proof that their gradients are the original's.

A plan comes from the recipe that explains the model (`hfpatch.decoding`), and from what a layer of
the replica gives its attention function. It is proven by gradients: of the layer's input and of all
its parameters, in the model's dtype, where the model is, against the replica's own in fp64.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hfpatch import forks
from hfpatch.decoding.analysis import moved
from hfpatch.decoding.replica import WithoutCasts, same
from hfpatch.decoding.rules import LayerRule, Number, Recipe, Unexplained
from hfpatch.proof.trial import Limits
from hfpatch.training.attend import Argument, Call, Passed
from hfpatch.training.layer import CACHES, LayerPlan, Runner, mlp_parts, unsupported

_ROWS, _TOKENS = 2, 24
_NAME = "hfpatch_recorder"
_PROBE = "hfpatch_probe"
_lock = forks.lock(waits=True)


@dataclass(frozen=True)
class Seen:
    """What a replica's layer was given in a run of the whole: its keyword arguments."""

    path: str
    kwargs: dict[str, Any]


def layer_path(rule: LayerRule) -> str:
    """Where the layer of a recipe's rule is."""
    return rule.attention.path.rpartition(".")[0]


def seen_by_layers(recipe: Recipe, replica: Any) -> list[Seen]:
    """One run of the replica, as in training.

    Raises:
        Unexplained: a layer is called otherwise than with its input and keyword arguments.
    """
    found: dict[str, Seen] = {}
    handles = []

    def hook(path: str) -> Any:
        def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
            if len(args) != 1:
                raise Unexplained(f"`{path}`: it is called with {len(args)} positional arguments")
            found[path] = Seen(path, dict(kwargs))

        return keep

    paths = [layer_path(rule) for rule in recipe.layers]
    for path in paths:
        module = replica.get_submodule(path)
        handles.append(module.register_forward_pre_hook(hook(path), with_kwargs=True))
    try:
        with torch.no_grad(), WithoutCasts():
            replica(input_ids=torch.zeros(_ROWS, _TOKENS, dtype=torch.int64), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return [found[path] for path in paths]


def plans(recipe: Recipe, replica: Any, sizes: tuple[int, int, int]) -> list[LayerPlan]:
    """What each layer of the replica computes.

    Raises:
        Unexplained: a layer is none that can be had for training.
    """
    made: list[LayerPlan] = []
    known: dict[Any, LayerPlan] = {}
    for rule, seen in zip(recipe.layers, seen_by_layers(recipe, replica), strict=True):
        relative = _without_numbers(moved(rule, f"{seen.path}.", ""))
        tables = seen.kwargs.get("position_embeddings")
        turns = rule.attention.rope
        factor = rule.residual_multiplier.value(replica)
        windowed = rule.attention.window is not None
        key = (relative, turns, factor, windowed, type(tables), tuple(seen.kwargs))
        if key not in known:
            known[key] = _plan(recipe, relative, seen, replica, sizes, factor)
        made.append(known[key])
    return made


_NONE = Number((), "", 1.0)


def _without_numbers(rule: LayerRule) -> LayerRule:
    """The rule without what the call of the attention function says, and the factor of the sums."""
    a = replace(rule.attention, scale=_NONE, softcap=None, window=None, sinks=None)
    return replace(rule, attention=a, residual_multiplier=_NONE)


def _plan(
    recipe: Recipe,
    rule: LayerRule,
    seen: Seen,
    replica: Any,
    sizes: tuple[int, int, int],
    factor: float,
) -> LayerPlan:
    rotary_dim, interleaved, halves = 0, False, False
    if rule.attention.rope is not None:
        rope = recipe.ropes[rule.attention.rope].read(replica)
        rotary_dim, interleaved = rope.dims, rope.interleaved
        tables = seen.kwargs.get("position_embeddings")
        if type(tables) is not tuple or len(tables) != 2:
            raise Unexplained(f"`{seen.path}`: it is given no `position_embeddings`")
        first, second = tables[0].chunk(2, -1)
        halves = tables[0].shape[-1] == rotary_dim and torch.equal(first, second)
    call, cache, tells = _call(rule, seen, replica)
    plan = LayerPlan(rule, *sizes, rotary_dim, interleaved, halves, factor, call, cache, tells)
    if (why := unsupported(plan)) is not None:
        raise Unexplained(f"`{seen.path}`: {why}")
    return plan


# --- the call of the attention function -----------------------------------------------------------


@contextmanager
def _recorded(layer: nn.Module) -> Iterator[list[Any]]:
    """What the layer's attention function is called with; it computes causal attention."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls: list[Any] = []

    def function(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        calls.append((module, q, k, v, mask, kwargs))
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=kwargs.get("scaling"))
        return y.transpose(1, 2), None

    configs: dict[int, Any] = {
        id(m.config): m.config for m in layer.modules() if hasattr(m, "config")
    }
    before = [(c, c._attn_implementation) for c in configs.values()]
    with _lock:
        table: Any = ALL_ATTENTION_FUNCTIONS
        table[_NAME] = function
        try:
            for config, _ in before:
                config._attn_implementation = _NAME
            yield calls
        finally:
            for config, name in before:
                config._attn_implementation = name
            del table[_NAME]


def _named(*modules: nn.Module) -> frozenset[str]:
    """What the forwards of modules take by name."""
    found: set[str] = set()
    for module in modules:
        forward = inspect.unwrap(type(module).forward)
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        found |= {n for n, p in inspect.signature(forward).parameters.items() if p.kind in kinds}
    return frozenset(found)


def _call(rule: LayerRule, seen: Seen, replica: Any) -> tuple[Call, str | None, bool]:
    """How the attention function is called; the argument that is the cache, and whether its
    `update` is told the keyword arguments."""
    from transformers import DynamicCache

    what = f"`{seen.path}`: its attention"
    layer = copy.deepcopy(replica.get_submodule(seen.path)).train()
    module = layer.get_submodule(rule.attention.path)
    x = _input(layer, rule, torch.float64)
    mask = torch.zeros(_ROWS, 1, _TOKENS, _TOKENS, dtype=torch.float64)
    given = {n: v for n, v in seen.kwargs.items() if n not in ("attention_mask", *CACHES)}
    probe = object()
    passes_others = True
    with torch.no_grad(), WithoutCasts(), _recorded(layer) as calls:
        try:
            layer(x, attention_mask=mask, **given, **{_PROBE: probe})
        except TypeError:
            calls.clear()
            passes_others = False
            layer(x, attention_mask=mask, **given)
        if len(calls) != 1:
            raise Unexplained(f"{what} is not called through transformers' table of functions")
        (holder, _q, _k, _v, got_mask, kwargs) = calls[0]
        if holder is not module or got_mask is not mask:
            raise Unexplained(f"{what} is given another module or mask than its layer's")
        if passes_others:
            passes_others = kwargs.pop(_PROBE, None) is probe
        passed = []
        for name, value in given.items():
            if name == "position_embeddings":
                continue
            reaches = name in kwargs and kwargs[name] is value
            if name in kwargs and not reaches:
                raise Unexplained(f"{what} is given another `{name}` than the layer")
            off = (value is None or value is False) and name != "use_cache"  # seen below
            passed.append(Passed(name, reaches, off))
            kwargs.pop(name, None)
        own = tuple(_argument(name, value, module, what) for name, value in kwargs.items())
        calls.clear()
        cache = DynamicCache()
        kept: list[Any] = []
        plain_update = cache.update

        def update(k: Tensor, v: Tensor, index: int, *more: Any, **named: Any) -> Any:
            kept.append((k, v, index, more, named))
            return plain_update(k, v, index, *more, **named)

        cache.update = update
        index = getattr(module, "layer_idx", None)
        if "use_cache" in given:
            given["use_cache"] = True
        holds = next((n for n in CACHES if n in seen.kwargs), None)
        result = layer(x, attention_mask=mask, **given, **({} if holds is None else {holds: cache}))
        if not isinstance(result, Tensor):
            raise Unexplained(f"{what} returns a `{type(result).__name__}` where a cache is used")
    tells = False
    if len(kept) == 1 and kept[0][2:4] == (index, ()):
        named_too = kept[0][4]
        told, reaching = named_too.get("kwargs"), [p.name for p in passed if p.reaches]
        tells = (
            isinstance(told, dict)
            and set(told) == set(reaching)
            and all(told[n] is given[n] for n in reaching)
        )
        if named_too and not (tells and len(named_too) == 1):  # more than is known
            holds = None
    else:
        holds = None
    call = Call(own, tuple(passed), passes_others, _named(layer, module))
    return call, holds, tells and holds is not None


def _argument(name: str, value: Any, module: nn.Module, what: str) -> Argument:
    if name == "dropout" and value:
        raise Unexplained(f"{what} drops weights out")
    if value is None or value is False or value is True or (name == "dropout" and value == 0):
        return Argument(name, None, value)
    held = {**vars(module), **module._parameters}
    if isinstance(value, Tensor):
        names = [n for n, v in held.items() if v is value]
    else:
        said = {f"config.{n}": v for n, v in vars(getattr(module, "config", object)).items()}
        names = [n for n, v in (held | said).items() if type(v) is type(value) and v == value]
    named = [n for n in (name, f"config.{name}") if n in names]
    if named:
        return Argument(name, named[0])
    names = [n for n in names if "." not in n]
    if not names:
        raise Unexplained(f"{what} is given `{name}` = {value!r:.40}, which no attribute says")
    chosen = next((n for n in names if name[:4] in n), names[0])
    return Argument(name, chosen)


# --- the proof ------------------------------------------------------------------------------------


def _input(layer: nn.Module, rule: LayerRule, dtype: torch.dtype) -> Tensor:
    weight: Any = layer.get_submodule(mlp_parts(rule)[2].path).weight
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(_ROWS, _TOKENS, weight.shape[0], generator=generator, dtype=torch.float64)
    return x.to(dtype)


def prove(
    plan: LayerPlan,
    seen: Seen,
    replica: Any,
    dtype: torch.dtype,
    device: torch.device,
    autocast: torch.dtype | None = None,
) -> tuple[float, float]:
    """The worst error of the result and of any gradient, and what was allowed of it.

    Args:
        autocast: its dtype; None: without it.

    Errors are root mean squares relative to the fp64 gradient's; allowed is the original's in
    `dtype` and what a kernel may be off by (`hfpatch.proof.trial.Limits`): one rounding in half
    types.

    Raises:
        Unexplained: one is farther off; the text says which.
    """
    exact = copy.deepcopy(replica.get_submodule(seen.path)).train().requires_grad_(True)
    with torch.no_grad():
        for p in exact.parameters():
            p.copy_(p.to(dtype))
    x = _input(exact, plan.rule, dtype)
    generator = torch.Generator().manual_seed(6)
    grad = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(dtype)
    half = _in(exact, dtype, device)
    kwargs = _arguments(seen, x.dtype, device)
    before = torch.get_rng_state()
    truth = _gradients(exact, x.double(), grad.double(), _arguments(seen, torch.float64, "cpu"))
    if not torch.equal(before, torch.get_rng_state()):
        # its own results are apart from each other then, and as far apart could be any others
        raise Unexplained(
            f"`{seen.path}`: it draws random numbers in training, as a dropout does, which the "
            "function for training leaves out"
        )
    with _casting(device, autocast):
        theirs = _gradients(half, x.to(device), grad.to(device), kwargs)
    limits = Limits()
    rounds_to = dtype if autocast is None else autocast
    wide = rounds_to == torch.float32
    more = limits.kernel_fp32 * limits.gradient if wide else limits.kernel_half
    more *= torch.finfo(rounds_to).eps
    sizes = {name: _size(t) for name, t in truth.items() if t is not None}
    # a gradient that is 0 apart from rounding is no measure of its own error
    least = 1e-3 * median(sizes.values())
    worst = (0.0, 0.0)
    for halves in ((), ("front",), ("back",), ("front", "back")):
        run = Runner(plan, halves)
        with _casting(device, autocast):
            ours = _gradients(half, x.to(device), grad.to(device), kwargs, run)
        for name, true in truth.items():
            if ours[name] is None or theirs[name] is None or true is None:
                if not (ours[name] is theirs[name] is true):
                    raise Unexplained(f"`{seen.path}`: gradients of other tensors: `{name}`")
                continue
            # A bias's gradient is a sum over rows, which cancels where keys have it: what is summed
            # is as large as the weight's, of inputs of size 1.
            weight = sizes.get(f"{name.removesuffix('.bias')}.weight", 0.0)
            summed = weight if name.endswith(".bias") else 0.0
            scale = max(sizes[name], summed, least)
            error, original = (
                _size(t.double().cpu() - true) / scale for t in (ours[name], theirs[name])
            )
            allowed = original + more
            if not error <= allowed:
                raise Unexplained(
                    f"`{seen.path}`: the gradient of `{name}` is off by {error:.2g}, expected at "
                    f"most {allowed:.2g}"
                )
            worst = max(worst, (error, allowed))
    if plan.cache is not None and autocast is None:
        _check_cache(plan, seen, half, x.to(device), kwargs)
    return worst


def _casting(device: torch.device, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype)


def _size(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def _in(layer: nn.Module, dtype: torch.dtype, device: Any) -> nn.Module:
    half = copy.deepcopy(layer)
    for p in half.parameters():
        p.data = p.data.to(device, dtype)
    for module in half.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                wide = buffer.float() if buffer.is_floating_point() else buffer
                module._buffers[name] = wide.to(device)
    return half


def _arguments(seen: Seen, dtype: torch.dtype, device: Any) -> dict[str, Any]:
    kwargs = dict(seen.kwargs)
    tables = kwargs.get("position_embeddings")
    if type(tables) is tuple:
        kwargs["position_embeddings"] = tuple(t.to(device, dtype) for t in tables)
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            kwargs[name] = value.to(device)
    kwargs["attention_mask"] = None
    return kwargs


def _gradients(
    layer: nn.Module, x: Tensor, grad: Tensor, kwargs: dict[str, Any], run: Runner | None = None
) -> dict[str, Any]:
    x = x.clone().requires_grad_()
    names, parameters = zip(*layer.named_parameters(), strict=True)
    wide = x.dtype == torch.float64
    with torch.enable_grad(), _recorded(layer):
        if wide:
            with WithoutCasts():
                y = layer(x, **kwargs)
        else:
            y = layer(x, **kwargs) if run is None else run(layer, x, kwargs)
        if run is not None and y is None:
            raise Unexplained("a layer is not served under autocast")
        if not isinstance(y, Tensor):
            raise Unexplained(f"a layer returns a `{type(y).__name__}`, expected a tensor")
        found = torch.autograd.grad(y, [x, *parameters], grad.to(y.dtype), allow_unused=True)
    return {"result": y.detach(), **dict(zip(("input", *names), found, strict=True))}


def _check_cache(
    plan: LayerPlan, seen: Seen, layer: nn.Module, x: Tensor, kwargs: dict[str, Any]
) -> None:
    from transformers import DynamicCache

    kept = []
    index = layer.get_submodule(plan.rule.attention.path).layer_idx
    for run in (None, Runner(plan)):
        cache = DynamicCache()
        given = {**kwargs, str(plan.cache): cache}
        with torch.no_grad(), _recorded(layer):
            layer(x, **given) if run is None else run(layer, x, given)
        held: Any = cache.layers[index]
        kept.append((held.keys.double(), held.values.double()))
    eps = 8 * torch.finfo(x.dtype).eps
    if not all(same(a, b, eps) for a, b in zip(*kept, strict=True)):
        raise Unexplained(f"`{seen.path}`: other keys or values in the cache than the original's")


def for_sizes(
    plan: LayerPlan, sizes: tuple[int, int, int], rotary_dim: int, factor: float
) -> LayerPlan:
    """The replica's plan as that of the model, whose sizes are others."""
    heads, key_heads, head_dim = sizes
    return replace(
        plan, heads=heads, key_heads=key_heads, head_dim=head_dim, rotary_dim=rotary_dim,
        factor=factor,
    )  # fmt: skip
