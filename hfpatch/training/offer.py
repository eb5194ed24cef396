"""What `apply(mode="training")` plans for decoder layers: a swap of each layer's forward, or why
there is none.

No list of class names decides. A small replica of the model is explained as for decoding
(`hfpatch.decoding`); each of its distinct layers becomes a plan, whose gradients are proven in the
model's dtype (proof.py); and the model's own layers must be built as the replica's are, except
their products, which may be modules of any kind.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hfpatch import swap
from hfpatch.announce import announce_in_call
from hfpatch.decoding.candidates import is_candidate
from hfpatch.decoding.layer import proof_of
from hfpatch.decoding.likeness import check_layer_likeness
from hfpatch.decoding.replica import head_counts, text_config
from hfpatch.decoding.rules import OpaqueRule, Unexplained
from hfpatch.errors import HfpatchError
from hfpatch.losses.taken import takers, unheard
from hfpatch.ops import KERNEL_DTYPES
from hfpatch.planning.plan import Skip, Swap
from hfpatch.planning.settings import Settings, matches
from hfpatch.proof.proofs import Prepared
from hfpatch.proof.subject import class_of
from hfpatch.training import proof
from hfpatch.training.adapted_by import OP
from hfpatch.training.layer import Case, LayerPlan, Served, adapter, mlp_parts, unchanged
from hfpatch.training.masked_body import MASK, body_of
from hfpatch.training.masked_body import adapter as body_adapter

_SKIPPED = "decoder layers: "
# What was proven of a class and configuration: by the replica, dtype and device. The replica of a
# proof is one object as long as the proof is kept.
_Errors = dict[LayerPlan, tuple[float, float]]
_proofs: dict[Any, tuple[nn.Module, _Errors | str]] = {}
_MOST = 32


def offer(
    roots: Sequence[tuple[str, nn.Module]], settings: Settings
) -> tuple[list[Prepared], list[Skip]]:
    """The decoder layers of all language models in `roots`, (name or "", module) pairs."""
    prepared: list[Prepared] = []
    skips: list[Skip] = []
    if not settings.training:
        return prepared, skips
    for path, model in _language_models(roots):
        name = class_of(model).__name__
        try:
            if not is_candidate(model):
                raise Unexplained(
                    f"`{name}` gives no logits of tokens, and only those of models that generate "
                    "text are fused"
                )
            layers = list(_layers(path, model, settings))
            prepared += layers
            for found in _bodies(path, model, layers, settings):
                (skips if isinstance(found, Skip) else prepared).append(found)  # type: ignore[arg-type]
        except Unexplained as e:
            if settings.include is None or matches(settings.include, path, name):
                skips.append(Skip(path, name, "unexplained", _SKIPPED + str(e)))
    return prepared, skips


def _language_models(roots: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Also those inside wrappers: PEFT's, a trainer's; and models of such a kind without a head,
    as rewards, classes and embeddings are trained with."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return
    seen: set[int] = set()
    inside: set[int] = set()
    for prefix, root in roots:
        for path, module in root.named_modules():
            if not isinstance(module, PreTrainedModel) or id(module) in seen:
                continue
            seen.add(id(module))
            headless = id(module) not in inside and _is_headless(module)
            if is_candidate(module) or (headless and not any(map(is_candidate, module.modules()))):
                inside.update(map(id, module.modules()))  # a model's body is no model of its own
                yield f"{prefix}.{path}".strip("."), module


def _is_headless(model: Any) -> bool:
    """Whether a model without a head is of a kind that generates text with one. Of kinds that fill
    in masked words too (BERT) it is an encoder."""
    from transformers.models.auto import modeling_auto as auto

    kind = getattr(model.config, "model_type", None)
    return (
        kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and kind not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        and not getattr(model.config, "is_encoder_decoder", False)
    )


def _layers(path: str, model: Any, settings: Settings) -> Iterator[Prepared]:
    """Raises Unexplained: why there are none."""
    if not all("local" in (settings.sources.choices.of(op) or ()) for op in _OPS):
        raise Unexplained("their kernels are those of the local build, which `kernels=` leaves out")
    if settings.sources.assumed is not None:
        raise Unexplained("planned for a device that is not here; asked where it is")
    proven = proof_of(model)
    if isinstance(proven, str):
        raise Unexplained(proven)
    recipe, replica = proven.recipe, proven.replica
    if any(isinstance(rule.mlp, OpaqueRule) for rule in recipe.layers):
        raise Unexplained(
            "the second half of a layer is no MLP of a known form, such as a mixture of experts"
        )
    norms = (n for r in recipe.layers for n in (r.attention.q_norm, r.attention.k_norm))
    if any(n is not None and n.heads is not None for n in norms):
        raise Unexplained("the norms of its queries and keys have weights for each head")
    opaque = frozenset(
        part.path
        for rule in recipe.layers
        for part in (
            *(rule.attention.q, rule.attention.k, rule.attention.v, rule.attention.o),
            *(p for p in mlp_parts(rule) if p is not None),
        )
    )
    paths = [proof.layer_path(rule) for rule in recipe.layers]
    check_layer_likeness(model, replica, proven.live, paths, opaque)
    sizes = head_counts(text_config(model.config))
    dtype, device = _place(model, paths, settings.device)
    worst = _proven(proven, dtype, device, None)
    cases: set[Case] = {(device.type, dtype, None)}
    for autocast in (torch.bfloat16, torch.float16) if dtype == torch.float32 else (dtype,):
        with contextlib.suppress(Unexplained):  # the original's forward then, and a call says so
            _proven(proven, dtype, device, autocast)
            cases.add((device.type, dtype, autocast))
    served = Served(functools.partial(_later, proven), cases, _watch_for_takers(model))
    plans = proof.plans(recipe, replica, head_counts(text_config(replica.config)))
    guards: list[Any] = []  # layers that are alike share one
    told: list[bool] = []
    for rule, small in zip(recipe.layers, plans, strict=True):
        inner = proof.layer_path(rule)
        module = model.get_submodule(inner)
        where, class_name = f"{path}.{inner}".strip("."), class_of(module).__name__
        if settings.include is not None and not matches(settings.include, where, class_name):
            continue
        if matches(settings.exclude, where, class_name):
            settings.left_out.add(where)
            continue
        if (why := swap.foreign_forward(module)) is not None:
            raise Unexplained(f"`{where}`: {why}")
        attention = model.get_submodule(rule.attention.path)
        if getattr(attention, "head_dim", sizes[2]) != sizes[2]:
            raise Unexplained(
                f"`{rule.attention.path}`: `head_dim` is {attention.head_dim}, expected {sizes[2]} "
                "as the configuration has it"
            )
        rope = rule.attention.rope
        rotary = 0 if rope is None else recipe.ropes[rope].read(model).dims
        factor = rule.residual_multiplier.value(model)
        plan = proof.for_sizes(small, sizes, rotary, factor)
        error, allowed = worst[small]
        entry = Swap(
            where, class_name, OP, "a decoder layer under autograd, in two functions", "local", "",
            (device.type,), error, allowed, settings.mode,
        )  # fmt: skip

        holds = next((same for same in guards if same(module)), None)
        if holds is None:
            holds = unchanged(module, plan)
            guards.append(holds)
        if not holds(module):
            raise Unexplained(f"`{where}`: something was put around its parts")

        own = class_of(module).forward

        def make(plan: LayerPlan = plan, same: Any = holds, own: Any = own) -> Any:
            return adapter(plan, served, same, own, told)

        yield Prepared(module, make, entry)


def _bodies(
    path: str, model: Any, layers: Sequence[Prepared], settings: Settings
) -> Iterator[Prepared | Skip]:
    """The modules that make the masks of layers that are swapped, where these can be made later."""
    ours = {id(p.module): p.swap.devices for p in layers}
    above: dict[str, tuple[list[str], tuple[str, ...]]] = {}
    for inner, module in model.named_modules():
        if id(module) in ours:
            container = inner.rpartition(".")[0]
            where = container.rpartition(".")[0]
            lists, _ = above.setdefault(where, ([], ours[id(module)]))
            if container not in lists:
                lists.append(container)
    for inner, (lists, devices) in above.items():
        module = model.get_submodule(inner)
        where, class_name = f"{path}.{inner}".strip("."), class_of(module).__name__
        if settings.include is not None and not matches(settings.include, where, class_name):
            continue
        if matches(settings.exclude, where, class_name):
            settings.left_out.add(where)
            continue
        body = body_of(module)
        if body is None:
            continue
        if (why := swap.foreign_forward(module)) is not None:
            yield Skip(where, class_name, "foreign", why)
            continue
        if isinstance(body, str):
            yield Skip(where, class_name, "mismatch", body)
            continue
        entry = Swap(
            where, class_name, MASK, "masks of several sequences in a row, made when they are read",
            "hfpatch", "", devices, 0.0, 0.0, settings.mode,
        )  # fmt: skip
        containers = [name[len(inner) :].strip(".") for name in lists]
        yield Prepared(module, functools.partial(body_adapter, body, containers), entry)


def _watch_for_takers(model: nn.Module) -> Callable[[nn.Module], None]:
    """Warns, once, of a forward that came above the model's head since, and leaves the head's swap
    without effect. The head is not called then, but the layers are."""
    said = frozenset(text for *_, text in takers(model.named_modules()))  # the report says these
    held = weakref.ref(model)
    told: list[bool] = []

    def look(layer: nn.Module) -> None:
        whole = held()
        # a copy of the model has the same adapters
        if told or whole is None or all(layer is not m for m in whole.modules()):
            return
        for text in unheard(whole, said):
            told.append(True)
            announce_in_call(text, stacklevel=5)

    return look


_OPS = ("rms_norm", "layer_norm", "rope", "gated")


def _place(
    model: nn.Module, paths: Sequence[str], planned: str | None
) -> tuple[torch.dtype, torch.device]:
    """The dtype and device of the layers' parameters that floats are; `planned`: the device type of
    a plan for one, wherever they are now."""
    found: dict[tuple[torch.dtype, str], torch.device] = {}
    for path in paths:
        for p in model.get_submodule(path).parameters():
            if p.dtype in KERNEL_DTYPES:
                device = p.device if planned is None else torch.device(planned)
                found.setdefault((p.dtype, device.type), device)
    devices = {device.type for device in found.values()} - {"meta"}
    if not found or not devices <= {"cpu", "cuda"} or len(devices) != 1:
        raise Unexplained(
            "their parameters are on "
            f"{', '.join(sorted(d.type for d in found.values())) or 'no device'}, in dtypes "
            "for which there are kernels"
        )
    kept = [(dtype, d) for (dtype, kind), d in found.items() if kind in devices]
    # half types first: of a model with adapters in fp32 they are the model's
    kept.sort(key=lambda pair: pair[0] == torch.float32)
    return kept[0]


def _proven(
    proven: Any, dtype: torch.dtype, device: torch.device, autocast: torch.dtype | None
) -> _Errors:
    recipe, replica = proven.recipe, proven.replica
    key = (id(replica), dtype, device.type, autocast)
    if key not in _proofs or _proofs[key][0] is not replica:
        _proofs[key] = replica, _prove(recipe, replica, dtype, device, autocast)
        while len(_proofs) > _MOST:
            del _proofs[next(iter(_proofs))]
    found = _proofs[key][1]
    if isinstance(found, str):
        raise Unexplained(found)
    return found


def _later(proven: Any, device: torch.device, case: Case) -> str | None:
    """Why the layers do not serve a case, for `Served`."""
    _, dtype, autocast = case
    try:
        _proven(proven, dtype, device, autocast)
    except Unexplained as e:
        return str(e)
    return None


def _prove(
    recipe: Any,
    replica: Any,
    dtype: torch.dtype,
    device: torch.device,
    autocast: torch.dtype | None,
) -> _Errors | str:
    try:
        with torch.random.fork_rng(devices=[]):
            plans = proof.plans(recipe, replica, head_counts(text_config(replica.config)))
            seen = proof.seen_by_layers(recipe, replica)
            found: _Errors = {}
            for plan, given in zip(plans, seen, strict=True):
                if plan not in found:
                    found[plan] = proof.prove(plan, given, replica, dtype, device, autocast)
    except Unexplained as e:
        return str(e)
    except HfpatchError:
        raise
    except Exception as e:  # a layer of another kind may lack anything
        return f"they could not be proven ({type(e).__name__}: {e})"
    return found
