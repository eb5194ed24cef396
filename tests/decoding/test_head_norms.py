"""Norms of queries and keys of which each head has its own weights: what a description says of
them, and what happens to one of them while a model is patched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoding.families import make, prompts
from support.nearness import assert_as_near
from support.steps import WIDE, drawn
from torch import Tensor, nn

import hfpatch
from hfpatch.decoding import kept
from hfpatch.decoding.layer import describe
from hfpatch.decoding.rules import Unexplained

ROWS, LIST = "cohere-head-norms", "stablelm-head-norms"
_GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}


def text(model: Any) -> Tensor:
    found: Tensor = model.generate(**prompts(), **_GREEDY)
    return found


def logits(model: Any) -> Tensor:
    """Of each step of a fixed text, behind its prompt."""
    ids = prompts(2, 14, 0)["input_ids"]
    with torch.no_grad():
        cache = model(ids[:, :8], use_cache=True).past_key_values
        found = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(8, 14)]
    return torch.cat(found, 1)


def patched(model: Any) -> Any:
    report = hfpatch.apply(model, include=type(model).__name__)
    assert [s.op for s in report.swaps] == ["decoding"], report
    return model


def norms_of(model: Any) -> tuple[nn.Module, nn.Module]:
    """Those of queries and of keys of a layer."""
    attention = model.model.layers[1].self_attn
    if hasattr(attention, "q_norm"):
        return attention.q_norm, attention.k_norm
    return attention.q_layernorm, attention.k_layernorm


def test_a_description_holds_the_models_own_tensors() -> None:
    model = make(ROWS)
    a = describe(model).model.layers[1].attention
    for norm, module in zip((a.q_norm, a.k_norm), norms_of(model), strict=True):
        assert norm is not None and norm.by_head and norm.kind == "layer" and not norm.rounded
        assert norm.weight is module.weight and norm.weights == () and norm.bias is None


@pytest.mark.parametrize("heads", [(8, 1), (2, 2)], ids=["more than the replica's", "fewer"])
def test_a_description_holds_each_heads_own_tensors(heads: tuple[int, int]) -> None:
    model = make(LIST, num_attention_heads=heads[0], num_key_value_heads=heads[1])
    a = describe(model).model.layers[1].attention
    for norm, module, count in zip((a.q_norm, a.k_norm), norms_of(model), heads, strict=True):
        own = [m.weight for m in module.norms]
        assert norm is not None and norm.by_head and norm.weight is None and norm.biases == ()
        assert len(own) == len(norm.weights) == count
        assert all(given is weight for given, weight in zip(norm.weights, own, strict=True))


def _in_place(norm: Any) -> None:
    with torch.no_grad():
        _last(norm).mul_(-2)


def _behind_the_counter(norm: Any) -> None:
    _last(norm).data.mul_(-2)


def _moved(norm: Any) -> None:
    weight = norm.norms[-1].weight if hasattr(norm, "norms") else norm.weight
    weight.data = weight.data * -2


def _another_parameter(norm: Any) -> None:
    held = norm.norms[-1] if hasattr(norm, "norms") else norm
    held.weight = nn.Parameter(held.weight.detach() * -2)


def _exchanged(norm: Any) -> None:
    """Two heads' norms change places, or their rows."""
    if hasattr(norm, "norms"):
        first, last = norm.norms[0], norm.norms[-1]
        norm.norms[0], norm.norms[-1] = last, first
    else:
        norm.weight = nn.Parameter(norm.weight.detach().flip(0))


def _last(norm: Any) -> Tensor:
    """The weight of the last head."""
    found: Tensor = norm.norms[-1].weight if hasattr(norm, "norms") else norm.weight[-1]
    return found


def _hooked(norm: Any) -> None:
    held = norm.norms[-1] if hasattr(norm, "norms") else norm
    held.register_forward_hook(lambda module, args, y: y * -2)


def _own_epsilon(norm: Any) -> None:
    if hasattr(norm, "norms"):
        norm.norms[-1].eps = 9.0
    else:
        norm.variance_epsilon = 9.0


#: What is done to one layer's norm, and whether steps serve the model that it then is.
CHANGES: dict[str, tuple[Callable[[Any], None], frozenset[str]]] = {
    "in place": (_in_place, frozenset({ROWS, LIST})),
    "in place, uncounted": (_behind_the_counter, frozenset({ROWS, LIST})),
    "moved": (_moved, frozenset({ROWS, LIST})),
    "another parameter": (_another_parameter, frozenset({ROWS, LIST})),
    "exchanged": (_exchanged, frozenset({ROWS, LIST})),
    "hooked": (_hooked, frozenset()),
    # of one module it is read, of one of several it is another than its class builds
    "another epsilon": (_own_epsilon, frozenset({ROWS})),
}


@pytest.mark.filterwarnings("ignore:.*decoding steps cannot be used")
@pytest.mark.parametrize("which", [0, 1], ids=["q", "k"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", [ROWS, "stablelm-parallel-head-norms"])
def test_a_change_of_one_heads_norm_is_noticed(name: str, change: str, which: int) -> None:
    plain = make(name)
    model = patched(copy.deepcopy(plain))
    before = logits(model)
    act, served = CHANGES[change]
    for one in (plain, model):
        act(norms_of(one)[which])
    steps, wanted = kept.decoders[model].steps, logits(plain)
    change_of_all = float((wanted - before).norm())
    assert change_of_all > 3e-3 * float(wanted.norm())
    assert float((logits(model) - wanted).norm()) < 1e-2 * change_of_all
    expected = ROWS in served if name == ROWS else LIST in served
    assert (kept.decoders[model].steps > steps) == expected, kept.notes(model)


@pytest.mark.parametrize("name", [ROWS, LIST])
def test_restore_leaves_every_bit(name: str) -> None:
    model = make(name)
    state = {k: (t.clone(), t.data_ptr()) for k, t in model.state_dict().items()}
    before = text(model)
    patched(model)
    assert torch.equal(text(model), before) and kept.decoders[model].steps > 5
    hfpatch.restore(model)
    assert model not in kept.decoders and torch.equal(text(model), before)
    for key, found in model.state_dict().items():
        assert torch.equal(found, state[key][0]) and found.data_ptr() == state[key][1], key


@pytest.mark.parametrize("name", [ROWS, LIST])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_no_farther_from_fp32(name: str, dtype: torch.dtype) -> None:
    assert_as_near(drawn(name, dtype, chosen=WIDE), dtype, name)


def test_a_list_that_is_no_longer_as_its_class_builds_it_is_refused() -> None:
    def cut(norm: Any) -> None:
        norm.norms = norm.norms[:-1]

    def emptied(norm: Any) -> None:
        norm.norms = nn.ModuleList()

    def other(norm: Any) -> None:
        norm.norms[-1] = nn.Identity()

    def with_bias(norm: Any) -> None:
        norm.norms[-1] = nn.LayerNorm(norm.norms[0].weight.shape[0])

    for act, why in (
        (emptied, r"it has no module `model.layers.1.self_attn.q_layernorm.norms.0`"),
        (other, r"`model.layers.1.self_attn.q_layernorm.norms.7` is a `Identity`"),
        (with_bias, r"`model.layers.1.self_attn.q_layernorm.norms.7` has a further `bias`"),
    ):
        model = make(LIST)
        act(norms_of(model)[0])
        with pytest.raises(Unexplained, match=why):
            describe(model)
    model = make(LIST)
    cut(norms_of(model)[0])
    report = hfpatch.apply(model, include=type(model).__name__)
    (skip,) = (s for s in report.skips if s.path == "")
    assert not report.swaps and "7 tensors, expected one for each of 8" in skip.reason


@pytest.mark.parametrize("name", [ROWS, LIST])
def test_training_leaves_such_layers_as_they_are(name: str) -> None:
    report = hfpatch.plan(make(name).train(), mode="training")
    reasons = {s.reason for s in report.skips}
    assert any("the norms of its queries and keys have weights for each head" in r for r in reasons)
