"""A head that PEFT trains whole beside adapters (`modules_to_save`): the copy that is active is
served, and what the wrapper does with it is PEFT's."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.nearness import assert_as_near, draw
from support.pieces import small_pieces
from torch import Tensor
from training.test_adapted_heads import CLASSES, LENGTHS, assert_near, batch, step
from transformers import LlamaConfig, LlamaForCausalLM

import hfpatch
from hfpatch.losses import head_loss
from hfpatch.losses.deferred_logits import DeferredLogits

peft = pytest.importorskip("peft")
INSIDE = "base_model.model.lm_head.modules_to_save.default"


@pytest.fixture(autouse=True)
def pieces(kernels_module: object, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Small pieces, both ways of making gradients, and how many logits existed at a time."""
    monkeypatch.setattr(head_loss, "TIME_FIRST", frozenset())
    return small_pieces(monkeypatch, 2048)


def plain(tied: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=CLASSES, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def options() -> Any:
    return peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False
    )


def wrapped(**more: Any) -> Any:
    model = peft.get_peft_model(plain(**more), options()).train()
    with torch.no_grad():  # unlike the original
        model.get_base_model().lm_head.modules_to_save["default"].weight.mul_(1.1)
    return model


def patched(model: Any) -> Any:
    report = hfpatch.apply(model, mode="training", include="Linear")
    assert [(s.path, s.op) for s in report.swaps] == [(INSIDE, "linear_cross_entropy")], report
    assert not report.skips
    return model


@pytest.mark.parametrize("way", LENGTHS)
@pytest.mark.parametrize("tied", [False, True])
def test_as_its_twin_without_logits(tied: bool, way: str, pieces: list[int]) -> None:
    twin = wrapped(tied=tied)
    model = patched(copy.deepcopy(twin))
    given = batch(LENGTHS[way])
    pieces.clear()
    assert_near(step(model, given), step(twin, given))
    assert pieces and max(pieces) <= 11 * CLASSES
    assert type(model(**given).logits) is DeferredLogits
    head = model.get_base_model().lm_head
    assert head.modules_to_save["default"].weight.grad.any()
    assert head.original_module.weight.grad is None
    assert not [n for n in hfpatch.status(model).notes if "made whole" in n]
    hfpatch.restore(model)
    assert "forward" not in head.modules_to_save["default"].__dict__
    assert_near(step(model, given), step(twin, given), 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_are_as_near(dtype: torch.dtype) -> None:
    """PEFT widens LoRA's adapters alone: the copy of the head is of the model's dtype."""
    losses, gradients = [], []
    for seed in range(10):
        twin = wrapped(dtype=dtype, seed=seed)
        wide = copy.deepcopy(twin).double()
        model = patched(copy.deepcopy(twin))
        given, found = batch(24, seed), []
        for m in (model, twin, wide):
            loss = m(**given).loss
            loss.backward()
            own = m.get_base_model().lm_head.modules_to_save["default"].weight
            found.append((loss.detach(), own.grad))
        losses.append(draw(*(f[0] for f in found)))
        gradients.append(draw(*(f[1] for f in found)))
    assert_as_near(losses, dtype, "loss", like=8)
    assert_as_near(gradients, dtype, "gradients")


def test_put_in_behind_apply(pieces: list[int]) -> None:
    """PEFT copies the head with our forward on it, which serves the copy."""
    model, twin = plain(), plain()
    hfpatch.apply(model, mode="training", include="Linear")
    torch.manual_seed(3)
    model = peft.get_peft_model(model, options()).train()
    torch.manual_seed(3)
    twin = peft.get_peft_model(twin, options()).train()
    pieces.clear()
    assert_near(step(model, batch(24)), step(twin, batch(24)))
    assert pieces and max(pieces) <= 11 * CLASSES


def _off(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def _another(model: Any) -> None:
    torch.manual_seed(8)
    model.add_adapter("second", options())
    model.set_adapter("second")
    with torch.no_grad():
        model.get_base_model().lm_head.modules_to_save["second"].weight.mul_(0.7)


@pytest.mark.parametrize("change", [_off, _another], ids=lambda f: f.__name__)
def test_another_copy_behind_apply(change: Any, pieces: list[int]) -> None:
    """It runs as it is, and is served behind another `apply`."""
    twin = wrapped()
    model = patched(copy.deepcopy(twin))
    before = step(twin, batch(9))[0]
    for m in (model, twin):
        change(m)
        m.get_base_model().model.embed_tokens.requires_grad_()  # all else may be frozen
    theirs = step(twin, batch(9))
    assert abs(theirs[0] - before) > 1e-3
    pieces.clear()
    assert_near(step(model, batch(9)), theirs)
    assert not pieces
    report = hfpatch.apply(model, mode="training", include="Linear")
    name = "original_module" if change is _off else "modules_to_save.second"
    served = [s.path for s in hfpatch.status(model).swaps if s.op == "linear_cross_entropy"]
    assert f"base_model.model.lm_head.{name}" in served, report
    assert_near(step(model, batch(9)), theirs)
    assert pieces


def test_a_wrapper_with_a_hook_is_left_alone() -> None:
    twin = wrapped()
    model = copy.deepcopy(twin)
    for m in (model, twin):
        m.get_base_model().lm_head.register_forward_hook(lambda module, args, y: 2 * y)
    report = hfpatch.apply(model, mode="training", include="*lm_head")
    assert not report.swaps
    (skip,) = report.skips
    assert (skip.path, skip.class_name) == ("base_model.model.lm_head", "ModulesToSaveWrapper")
    assert "the head is a `ModulesToSaveWrapper`" in skip.reason
    assert_near(step(model, batch(9)), step(twin, batch(9)))


def _fused(self: Any, input_ids: Tensor, labels: Tensor, **_: Any) -> Any:
    hidden = self.model(input_ids=input_ids).last_hidden_state
    logits = F.linear(hidden[:, :-1], self.lm_head.weight).float()
    loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    return types.SimpleNamespace(loss=loss)


def test_a_forward_that_takes_the_copys_weight_is_said() -> None:
    model = wrapped()
    base = model.get_base_model()
    base.forward = types.MethodType(_fused, base)
    report = hfpatch.apply(model, mode="training")
    (note,) = [n for n in report.notes if "the head's weight" in n]
    assert note.startswith(f"`{INSIDE}`: ")


def test_what_is_saved_is_loaded(tmp_path: Any) -> None:
    model = patched(wrapped())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(**batch(24)).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(plain(), tmp_path)
    ours = model.get_base_model().lm_head.modules_to_save["default"].weight
    theirs = loaded.get_base_model().lm_head.modules_to_save["default"].weight
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, model.get_base_model().lm_head.original_module.weight)
