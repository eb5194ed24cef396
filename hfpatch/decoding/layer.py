"""From a causal language model to its description, or why there is none.

No list of class names decides: a small replica of the model's own class and configuration is run,
every stage of it explained (analysis.py), the explanation proven over decoding steps with a cache
(proof.py), and then read off the model, which must be built as the replica is (likeness.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn

from hfpatch import forks
from hfpatch.decoding import cache as caches
from hfpatch.decoding.analysis import Analysis
from hfpatch.decoding.likeness import check_likeness
from hfpatch.decoding.proof import Proof, prove, with_rounding
from hfpatch.decoding.replica import NoReplica, make_replica, rope_limit, text_config
from hfpatch.decoding.rules import Number, Recipe, Unexplained
from hfpatch.decoding.spec import Model
from hfpatch.decoding.surroundings import attention_functions, check_attention, check_cache
from hfpatch.proof.around import writable_around
from hfpatch.proof.copies import CannotReplicateError, deep_copied
from hfpatch.proof.keys import classes_read_once, code_of
from hfpatch.proof.proving import one_thread, outside_modes
from hfpatch.proof.surroundings import functions_of_torch, replaced_function
from hfpatch.proof.unchanged import hooks_on_all
from hfpatch.text import told


@dataclass(frozen=True)
class Described:
    """A model's description, and what of its forward was proven (see `proof.Proof`)."""

    model: Model
    proof: Proof
    limit: int | None  # sequences must be shorter: from there on RoPE is another

    @property
    def output(self) -> type:
        """The class of what its forward returns."""
        return self.proof.output


@dataclass(frozen=True)
class Proven:
    """A recipe and the replica of which it is proven."""

    recipe: Recipe
    replica: nn.Module
    proof: Proof
    live: frozenset[tuple[str, str]]  # attributes that the recipe reads off a model


# One proof serves every model of one class, code and configuration. The last ones are kept.
_proofs: dict[Any, Proven | str] = {}
_MOST = 16
_lock = forks.lock(waits=True)


def describe(model: nn.Module, planned: bool = False) -> Described:
    """What `model` computes in a decoding step, with its live tensors.

    Args:
        planned: the weights may be on the meta device, of a plan for when they are loaded.

    Raises:
        Unexplained: the grammar does not explain it; the text names the stage.
    """
    with outside_modes():  # it is asked in calls too
        proven = proof_of(model)
        if isinstance(proven, str):
            raise Unexplained(proven)
        check_attention(model)
        check_cache()
        with classes_read_once():  # anew: the proof has run their code
            recipe = proven.recipe
            check_likeness(model, proven.replica, proven.live, recipe.opaque, planned, recipe.lists)
        limit = rope_limit(text_config(model.config))
        return Described(proven.recipe.read(model), proven.proof, limit)


def forget() -> None:
    """Drop all proofs."""
    _proofs.clear()


def proof_of(model: Any) -> Proven | str:
    """What explains a model of this class and configuration, proven; or why nothing does."""
    with _lock, torch.random.fork_rng(devices=[]), one_thread():
        return _proof_of(model)


def _proof_of(model: Any) -> Proven | str:
    implementation = _implementation(model)
    classes = {type(m): m for m in model.modules()}
    codes = frozenset(code_of(m) for m in classes.values())
    try:
        config = _written(model.config)
    except NoReplica as e:
        return str(e)
    attention = attention_functions(model)
    around = functions_of_torch(classes.values(), attention)
    key = (type(model), implementation, config, codes, around)
    if key not in _proofs:
        # What passes is not remembered: the next `apply` may find it gone.
        if (name := replaced_function(classes.values(), attention)) is not None:
            # the replica says nothing of what such a function does elsewhere
            return f"`{name}`, which its code names, was replaced"
        if hooks_on_all():
            return "hooks on all modules are registered, or a call of modules of somebody's own"
        _proofs[key] = _writes_around(classes.values()) or _prove(model, implementation)
        while len(_proofs) > _MOST:
            del _proofs[next(iter(_proofs))]
    return _proofs[key]


def _written(config: Any) -> str:
    """All that a configuration says, as a text: equal ones build equal models.

    Raises:
        NoReplica: somebody put something into it that no text says, such as a tensor or an object
            of their own.
    """
    try:
        # a copy, since to write it copies what it holds, by the code of whatever that is
        text: str = deep_copied(config, "its config").to_json_string(use_diff=False)
    except CannotReplicateError as e:
        raise NoReplica(str(e)) from e
    except Exception as e:  # what a config holds may fail as it likes
        raise NoReplica(f"its config cannot be written as a text ({told(e)})") from e
    return text


def _writes_around(modules: Iterable[nn.Module]) -> str | None:
    """That the own code of a module may write to what is around it: a small model that is built and
    run would do so too."""
    for module in modules:
        if (name := writable_around(module)) is not None:
            return (
                f"the code of `{type(module).__name__}` names `{name}`, which is no part of it, "
                "and which a proof could write to"
            )
    return None


def _implementation(model: Any) -> str:
    """By what the replica computes attention: in fp64 on a CPU, where flash attention is none."""
    chosen = getattr(text_config(model.config), "_attn_implementation", None) or "eager"
    return chosen if chosen in ("eager", "sdpa") else "eager"


def _prove(model: Any, implementation: str) -> Proven | str:
    # first what needs no replica: linear attention keeps its sizes there, and takes minutes in fp64
    if (other := caches.other_layer(model.config)) is not None:
        return f"attention: layer {other[0]} of its cache is a `{other[1]}`, which no step extends"
    try:
        replica = make_replica(model, implementation)
        try:
            analysis = Analysis(replica)
        except Exception as e:  # any class's own
            return f"a small model of its class does not run ({type(e).__name__}: {e})"
        recipe = with_rounding(analysis.recipe(), analysis)
        proof = prove(recipe, replica)
    except (NoReplica, Unexplained) as e:
        return str(e)
    except Exception as e:  # a model of another kind may lack anything
        return f"it could not be examined ({type(e).__name__}: {e})"
    return Proven(recipe, replica, proof, frozenset(_live(recipe)))


def _live(rule: Any) -> set[tuple[str, str]]:
    """(path, attribute) of all numbers that a recipe reads off a model."""
    if isinstance(rule, Number):
        return {(p[2], p[3]) for p in rule.places if p[1] == "attribute"}
    if isinstance(rule, tuple):
        return set().union(*map(_live, rule))
    if not is_dataclass(rule) or isinstance(rule, type):
        return set()
    found = set().union(*(_live(getattr(rule, f.name)) for f in fields(rule)))
    path = getattr(rule, "path", None)
    for name in (getattr(rule, "eps", None), getattr(rule, "scaling", None)):
        if isinstance(name, str) and isinstance(path, str):
            found.add((path, name))
    return found
