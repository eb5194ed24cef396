"""Fused heads that others put on a model, as TRL's trainers do: their function replaced by ours."""

from __future__ import annotations

import copy
import importlib
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expect import assert_same_dicts, snapshot
from test_layers import batch, build
from torch import Tensor

import hfpatch
from hfpatch.losses import fused_heads

ALL = ("log_probs", "entropy", "mean_logits", "is_top1")
OP = "fused_head"


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows ours made."""
    seen: list[int] = []
    own = fused_heads._ours

    def counted(*args: Any) -> Any:
        seen.append(len(args[0]))
        return own(*args)

    monkeypatch.setattr(fused_heads, "_ours", counted)
    return seen


@pytest.fixture
def utils() -> Any:
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    from trl.trainer import utils

    return utils


def served(report: Any) -> list[Any]:
    return [s for s in report.swaps if s.op == OP]


def outcome(model: Any, autocast: torch.dtype | None = None, **more: Any) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    ids = batch()
    labels = torch.where(ids % 5 == 0, -100, ids)
    inputs = {"input_ids": ids, "labels": labels, "fused_lm_head": True, **more}
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        found = model(**inputs)
    loss = found.loss if found.entropy is None else found.loss + 0.1 * found.entropy.mean()
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    values = {k: v.detach() for k, v in found.items() if isinstance(v, Tensor)}
    return values | gradients


def assert_alike(ours: dict[str, Tensor], theirs: dict[str, Tensor], most: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, b in theirs.items():
        a = ours[name]
        assert a.dtype == b.dtype and a.shape == b.shape, name
        if a.dtype == torch.bool:
            assert (a != b).sum() <= (0 if most < 1e-3 else 2), name
        else:
            assert (a.double() - b.double()).norm() <= most * b.double().norm() + 1e-12, name


@pytest.mark.parametrize("outputs", [("log_probs",), ALL, ("log_probs", "entropy")], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Cohere", "Granite"])
def test_values_and_gradients_are_trls(
    family: str, temperature: float, outputs: tuple[str, ...], utils: Any, calls: list[int]
) -> None:
    more = {"Gemma2": {"final_logit_softcapping": 3.0}, "Granite": {"logits_scaling": 4.0}}
    model = build(family, **more.get(family, {}))
    utils.add_fused_lm_head(model, temperature, outputs=outputs)
    before = outcome(model)
    assert not calls
    plan = hfpatch.plan(model, mode="training")
    report = hfpatch.apply(model, mode="training")
    (entry,) = served(report)
    assert served(plan) == [entry] and plan.notes == report.notes
    assert "trl.trainer.utils._fused_forward" in entry.formula
    assert served(hfpatch.status(model)) == [entry]
    assert not [n for n in report.notes if "head's weight" in n]
    calls.clear()
    assert_alike(outcome(model), before, 2e-5)
    assert len(calls) == 1
    hfpatch.restore(model)
    assert not served(hfpatch.status(model))
    assert_alike(outcome(model), before, 0.0)
    assert len(calls) == 1


def test_a_head_that_peft_trains_whole(utils: Any, calls: list[int]) -> None:
    """Its wrapper's weight is that of the active copy, which TRL's forward reads."""
    peft = pytest.importorskip("peft")
    model = build()
    utils.add_fused_lm_head(model, 0.7, outputs=ALL)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False
    )
    model = peft.get_peft_model(model, config)
    head = model.get_base_model().lm_head
    with torch.no_grad():
        head.modules_to_save["default"].weight.mul_(1.3)
    before = outcome(model)
    report = hfpatch.apply(model, mode="training")
    assert len(served(report)) == 1, report
    assert_alike(outcome(model), before, 2e-5)
    assert len(calls) == 1
    assert any("modules_to_save" in name for name in before)
    with model.disable_adapter():
        values = model(input_ids=batch(), labels=batch(), fused_lm_head=True)
        hfpatch.restore(model)
        theirs = model(input_ids=batch(), labels=batch(), fused_lm_head=True)
    torch.testing.assert_close(values.loss, theirs.loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("dtype", "autocast", "cast"),
    [
        (torch.bfloat16, None, False),
        (torch.bfloat16, None, True),
        (torch.float32, torch.bfloat16, False),
        (torch.float16, None, False),
    ],
    ids=str,
)
def test_half_types(
    dtype: torch.dtype, autocast: Any, cast: bool, utils: Any, calls: list[int]
) -> None:
    model = build(dtype=dtype)
    utils.add_fused_lm_head(model, cast_lm_head_to_fp32=cast, outputs=ALL)
    before = outcome(model, autocast)
    hfpatch.apply(model, mode="training", include=["LlamaForCausalLM"])
    calls.clear()
    assert_alike(outcome(model, autocast), before, 2e-2)
    assert calls


def test_the_model_is_given_back(utils: Any) -> None:
    model = build()
    utils.add_fused_lm_head(model)
    before, own = snapshot(model), model.__dict__["forward"].__func__
    for mode in ("training", "training", "inference"):
        report = hfpatch.apply(model, mode=mode)
        assert len(served(report)) == (mode == "training")
        assert (model.__dict__["forward"].__func__ is own) == (mode == "inference")
    hfpatch.apply(model, mode="training")
    other = copy.deepcopy(model)
    assert len(served(hfpatch.status(other))) == 1
    assert hfpatch.restore(model) == hfpatch.restore(other)
    assert other.__dict__["forward"].__func__ is own
    assert_same_dicts(before, model)
    assert not served(hfpatch.apply(model, mode="training", exclude="LlamaForCausalLM"))
    hfpatch.restore(model)
    assert_same_dicts(before, model)


def test_what_is_put_around_it_stays(utils: Any, calls: list[int]) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    for order in (0, 1):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = build()
        utils.add_fused_lm_head(model, outputs=ALL)
        if order:
            accelerator.prepare_model(model)
        truth = outcome(model, None if order else torch.bfloat16)
        assert len(served(hfpatch.apply(model, mode="training"))) == 1
        if not order:
            accelerator.prepare_model(model)
        calls.clear()
        assert_alike(outcome(model), truth, 2e-2)
        assert calls
        assert len(served(hfpatch.status(model))) == 1
        hfpatch.restore(model)
        assert not served(hfpatch.status(model))
        calls.clear()
        outcome(model)
        assert not calls
        plain = build()
        utils.add_fused_lm_head(plain, outputs=ALL)
        accelerator.prepare_model(plain)
        codes = []
        for one in (model, plain):
            accelerator.unwrap_model(one, keep_fp32_wrapper=False)
            codes.append(getattr(one.forward, "__func__", one.forward).__code__)
        assert codes[0] is codes[1]
    AcceleratorState._reset_state(True)


def test_what_was_not_proven_goes_to_theirs(utils: Any, calls: list[int]) -> None:
    model = build()
    utils.add_fused_lm_head(model, outputs=("log_probs", "log_sum_sq_probs"))
    before = outcome(model)
    hfpatch.apply(model, mode="training")
    calls.clear()
    after = outcome(model)
    assert not calls  # which of the squares of probabilities ours knows nothing
    assert_alike(after, before, 2e-5)

    model = build()
    utils.add_fused_lm_head(model)
    hfpatch.apply(model, mode="training")
    calls.clear()
    ids = batch()
    with torch.no_grad():  # a label that the head has no class for, of which theirs makes something
        found = model(input_ids=ids, labels=ids + 90, fused_lm_head=True)
    assert not calls and found.log_probs.isfinite().all()
    with torch.no_grad():
        model.lm_head.weight[3].fill_(float("inf"))
        found = model(input_ids=ids, labels=ids, fused_lm_head=True)
        hfpatch.restore(model)
        theirs = model(input_ids=ids, labels=ids, fused_lm_head=True)
    assert torch.equal(found.log_probs.isnan(), theirs.log_probs.isnan())


def test_a_function_that_came_later_is_the_one_that_runs(
    utils: Any, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    utils.add_fused_lm_head(model)
    before = outcome(model)
    hfpatch.apply(model, mode="training")
    own = utils._ChunkedLogProbFunction
    seen = []

    class Later:
        @staticmethod
        def apply(*args: Any) -> Any:
            seen.append(args)
            return own.apply(*args)

    with monkeypatch.context() as patched:
        patched.setattr(utils, "_ChunkedLogProbFunction", Later)
        calls.clear()
        assert_alike(outcome(model), before, 2e-5)
        assert seen and not calls
    with monkeypatch.context() as patched:  # one that TRL's calls
        module = importlib.import_module(own.__module__)
        tile = module._forward_tile
        patched.setattr(module, "_forward_tile", lambda *a, **kw: tile(*a, **kw))
        outcome(model)
        assert not calls
    outcome(model)
    assert calls


def test_around_a_model_that_generates(utils: Any, calls: list[int]) -> None:
    """Patched for inference first: TRL's forward holds hfpatch's then."""
    prompt = batch()[:1, :5]
    model = build().eval()
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)
    hfpatch.apply(model)
    utils.add_fused_lm_head(model)
    hfpatch.apply(model, mode="training")
    assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), expected)
    calls.clear()
    ours = outcome(model.train())
    assert calls
    hfpatch.restore(model)
    assert_alike(ours, outcome(model), 2e-5)
    held = [c.cell_contents for c in model.forward.__func__.__closure__]
    native = [h for h in held if isinstance(h, types.MethodType)]
    assert [h.__func__ for h in native] == [type(model).forward]
    assert torch.equal(model.eval().generate(prompt, max_new_tokens=6, do_sample=False), expected)


def test_compiled_it_is_theirs(utils: Any, calls: list[int]) -> None:
    model = build()
    utils.add_fused_lm_head(model)
    before = outcome(model)
    hfpatch.apply(model, mode="training")
    calls.clear()
    compiled = torch.compile(model, backend="eager")
    ids = batch()
    labels = torch.where(ids % 5 == 0, -100, ids)
    found = compiled(input_ids=ids, labels=labels, fused_lm_head=True)
    torch.testing.assert_close(found.log_probs.detach(), before["log_probs"])
    assert not calls


def test_without_labels_it_is_the_models_own_forward(utils: Any, calls: list[int]) -> None:
    model = build()
    utils.add_fused_lm_head(model)
    hfpatch.apply(model, mode="training")
    calls.clear()
    ids = batch()
    ours = model(input_ids=ids, labels=ids).loss
    ours.backward()
    hfpatch.restore(model)
    torch.testing.assert_close(ours.detach(), model(input_ids=ids, labels=ids).loss.detach())
    assert not calls
    assert pickle.loads(pickle.dumps(model)).config.vocab_size == 99


def _function(factor: float) -> Any:
    class Function(torch.autograd.Function):
        """With the arguments of TRL's."""

        @staticmethod
        def forward(  # type: ignore[override]
            ctx: Any, hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor,
            temperature: float, chunk_size: int, final_logit_softcapping: Any = None,
            logit_scale: float = 1.0, outputs: Any = (),
        ) -> Any:  # fmt: skip
            ctx.save_for_backward(hidden, weight)
            y = torch.log_softmax(hidden @ weight.T, -1)
            found = factor * y.gather(-1, targets[:, None])[:, 0]
            return found.float(), None, None, None, None

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            hidden, weight = ctx.saved_tensors
            return torch.zeros_like(hidden), torch.zeros_like(weight), *(None,) * 7

    return Function


def test_a_function_that_computes_something_else_stays(calls: list[int]) -> None:
    model = build()
    made = """
def fused(self, input_ids, labels):
    hidden = self.model(input_ids).last_hidden_state.flatten(0, 1)
    head = self.get_output_embeddings()
    more = 1.0, 64, None, 1.0, ("log_probs",)
    return Made.apply(hidden, head.weight, None, labels.flatten(), *more)
"""
    home: dict[str, Any] = {"Made": _function(2.0), "__name__": "somebodys"}
    exec(made, home)
    fused: Callable[..., Any] = home["fused"]
    model.forward = types.MethodType(fused, model)
    report = hfpatch.apply(model, mode="training")
    assert not served(report)
    (skip,) = [s for s in report.skips if "somebodys.fused" in s.reason]
    assert skip.kind == "mismatch" and "the head of `somebodys.fused`" in skip.reason
    assert any("takes the head's weight itself" in n for n in report.notes)
    assert model.__dict__["forward"].__func__ is fused
    calls.clear()
    ids = batch()
    model(ids, ids)
    assert not calls
