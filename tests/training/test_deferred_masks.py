"""Masks of several sequences in a row: made when they are read, which patched layers do not."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
import transformers
from decoding.families import device
from expect import assert_same_dicts, snapshot
from torch import Tensor
from training.test_layers import assert_equal, batch, build, gradients, lora

import hfpatch
from hfpatch.training import masked_body
from hfpatch.training.deferred_mask import DeferredMask

ROWS = ((5, 8), (6, 7))
OP = "packed_mask"


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there."""


class Count:
    """How many masks were put off, and how many of these were made."""

    given = 0
    made = 0


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    found = Count()
    of, make = DeferredMask.of, DeferredMask.made

    def counted(*args: Any) -> Any:
        found.given += 1
        return of(*args)

    def read(self: DeferredMask) -> Tensor:
        found.made += self._made is None
        return make(self)

    monkeypatch.setattr(DeferredMask, "of", staticmethod(counted))
    monkeypatch.setattr(DeferredMask, "made", read)
    return found


def packed(rows: int = 2) -> dict[str, Any]:
    positions = [torch.cat([torch.arange(n) for n in row]) for row in ROWS[:rows]]
    ids = batch(rows)
    given = {"position_ids": torch.stack(positions).to(device()), "use_cache": False}
    return {"input_ids": ids, "labels": ids, **given}


def patched(model: Any) -> Any:
    report = hfpatch.apply(model, mode="training")
    assert [s.path for s in report.swaps if s.op == OP] == ["model"]
    return report


# model, masks, more settings
FAMILIES = (
    ("Llama", 1, {}),
    ("Qwen2", 2, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("Qwen3", 1, {}),
    ("Mistral", 1, {"sliding_window": 4}),
    ("Phi3", 1, {"sliding_window": 4}),
    ("Gemma3", 2, {"sliding_window": 4}),
    ("Cohere2", 2, {"sliding_window": 4}),
    ("SmolLM3", 1, {}),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("family", "masks", "more"), FAMILIES, ids=lambda v: str(v)[:8])
def test_none_is_made(
    family: str, masks: int, more: dict[str, Any], rows: int, dtype: torch.dtype, count: Count
) -> None:
    model = build(family, dtype, **more)
    theirs = gradients(model, **packed(rows))
    patched(model)
    assert_equal(gradients(model, **packed(rows)), theirs, 2e-5 if dtype == torch.float32 else 4e-2)
    assert (count.given, count.made) == (masks, 0)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_nothing_in_a_step_is_as_large_as_a_mask(family: str) -> None:
    length = 2048
    model = build(family, **({"sliding_window": 4, "head_dim": 16} if family == "Gemma3" else {}))
    positions = torch.arange(length).remainder(128)[None].to(device())
    ids = torch.arange(length).remainder(90)[None].add(3).to(device())
    inputs = {"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": False}

    def largest() -> int:
        with torch.profiler.profile(profile_memory=True, record_shapes=True) as found:
            gradients(model, **inputs)
        sizes = [e.self_cpu_memory_usage for e in found.events()]  # negative: what is given back
        shapes = [s for e in found.events() for s in e.input_shapes]
        return max(*sizes, *(torch.Size(s).numel() for s in shapes if s))

    assert largest() >= length * length
    patched(model)
    assert largest() < length * length // 2


def test_a_window_alone(count: Count) -> None:
    """One sequence that is longer than the window has such a mask too."""
    model = build("Mistral", sliding_window=4)
    theirs = gradients(model)
    inputs: dict[str, Any] = {"use_cache": False}
    patched(model)
    assert_equal(gradients(model, **inputs), theirs)
    assert (count.given, count.made) == (1, 0)
    model.config.sliding_window = 13  # of which a mask says nothing more than its absence
    theirs = gradients(model, **inputs)
    assert count.given == 1
    hfpatch.restore(model)
    assert_equal(gradients(model, **inputs), theirs)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool, count: Count) -> None:
    model = build()
    theirs = gradients(model, **packed())
    patched(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert_equal(gradients(model, **packed()), theirs)
    assert (count.given, count.made) == (1, 0)


def test_a_layer_that_runs_as_it_is_is_given_the_mask(count: Count) -> None:
    model, twin = build(), build()
    patched(model)
    seen: list[Any] = []
    for m in (model, twin):
        m.model.layers[1].self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
        )
    assert_equal(gradients(model, **packed()), gradients(twin, **packed()))
    ours, theirs = seen
    assert (
        type(ours) is Tensor and torch.equal(ours, theirs) and tuple(ours.shape) == (2, 1, 13, 13)
    )
    assert (count.given, count.made) == (1, 1)


def _hook(module: Any, args: Any, kwargs: Any) -> None:
    assert type(kwargs["attention_mask"]) is Tensor


def _hook_behind(module: Any, args: Any, kwargs: Any, result: Any) -> None:
    assert type(kwargs["attention_mask"]) is Tensor


@pytest.mark.parametrize("where", ["before", "behind", "all", "forward", "other layer"])
def test_who_is_given_what_a_layer_is_given_sees_the_mask(where: str, count: Count) -> None:
    model = build()
    theirs = gradients(model, **packed())
    patched(model)
    layer, handle = model.model.layers[1], None
    if where == "before":
        layer.register_forward_pre_hook(_hook, with_kwargs=True)
    elif where == "behind":
        layer.register_forward_hook(_hook_behind, with_kwargs=True)
    elif where == "all":
        handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    elif where == "forward":
        own = layer.forward
        layer.forward = lambda *args, **kwargs: (_hook(layer, args, kwargs), own(*args, **kwargs))[
            1
        ]
    else:
        hfpatch.restore(layer)
    try:
        assert_equal(gradients(model, **packed()), theirs)
    finally:
        if handle is not None:
            handle.remove()
    assert (count.given, count.made) == (0, 0)


def test_hooks_that_are_given_no_mask(count: Count) -> None:
    model = build()
    patched(model)
    model.model.layers[0].register_forward_hook(lambda *_: None)
    model.model.register_forward_pre_hook(lambda *_: None)
    found = model(**packed(), output_hidden_states=True)
    assert len(found.hidden_states) == 3
    assert (count.given, count.made) == (1, 0)


def test_an_attention_function_of_another_is_given_the_mask(
    count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = build()
    theirs = gradients(model, **packed())
    own, seen = ALL_ATTENTION_FUNCTIONS["sdpa"], []

    def other(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        seen.append(type(mask))
        return own(module, q, k, v, mask, **kwargs)

    patched(model)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", other)
    assert_equal(gradients(model, **packed()), theirs)
    assert seen == [Tensor, Tensor]
    assert (count.given, count.made) == (1, 1)


def test_more_sequences_than_are_computed_in_turn(count: Count) -> None:
    """PyTorch's attention is given the mask, which is made once for all layers."""
    ids = torch.arange(160).remainder(90)[None].add(3).to(device())
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    inputs["position_ids"] = torch.arange(160).remainder(2)[None].to(device())
    model = build()
    theirs = gradients(model, **inputs)
    patched(model)
    assert_equal(gradients(model, **inputs), theirs)
    assert (count.given, count.made) == (1, 1)


@pytest.mark.parametrize("kind", ["eager", "flex_attention"])
def test_other_kinds_of_attention(kind: str, count: Count) -> None:
    """Set before or behind the patch: masks of theirs say more, or are no tensors."""
    inputs = packed()
    for behind in (False, True):
        model, twin = build(), build()
        for m in (model, twin):
            if m is twin or not behind:
                m.set_attn_implementation(kind)
        hfpatch.apply(model, mode="training")
        model.set_attn_implementation(kind)
        with torch.no_grad():  # flex attention has no backward on a CPU
            ours, theirs = (m(**inputs).loss for m in (model, twin))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
        if kind == "eager":
            assert_equal(gradients(model, **inputs), gradients(twin, **inputs))
    assert count.given == 0


def test_attentions_are_given_back(count: Count) -> None:
    model, twin = build(attn_implementation="eager"), build(attn_implementation="eager")
    hfpatch.apply(model, mode="training")
    ours, theirs = (m(**packed(), output_attentions=True).attentions for m in (model, twin))
    assert len(ours) == len(theirs) == 2
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert count.given == 0


def _others() -> list[dict[str, Any]]:
    padding = torch.ones(2, 13, dtype=torch.int64)
    padding[0, :4] = 0
    whole = torch.ones(13, 13, dtype=torch.bool).tril().expand(2, 1, 13, 13)
    return [
        {"use_cache": True},  # of which transformers makes no mask
        {"past_key_values": transformers.DynamicCache()},
        {"attention_mask": padding.to(device())},
        {"attention_mask": whole.to(device())},
        {"is_causal": False},
        {"position_ids": None},
        {"position_ids": torch.arange(13).expand(2, -1).to(device())},
    ]


@pytest.mark.parametrize("which", range(7))
def test_other_arguments_are_the_models_own(which: int, count: Count) -> None:
    model = build()
    theirs = gradients(model, **(packed() | _others()[which]))
    patched(model)
    assert_equal(gradients(model, **(packed() | _others()[which])), theirs)
    assert count.given == 0


def test_positions_that_are_not_counted_from_zero(count: Count) -> None:
    model = build("Mistral", sliding_window=4)
    inputs = packed()
    inputs["position_ids"] = torch.tensor([[*range(7, 12), *range(3, 11)], [0, 0, *range(11)]])
    inputs["position_ids"] = inputs["position_ids"].to(device())
    theirs = gradients(model, **inputs)
    patched(model)
    assert_equal(gradients(model, **inputs), theirs)
    assert (count.given, count.made) == (1, 0)


def test_under_adapters(count: Count) -> None:
    model = lora(build(), target_modules=["q_proj", "down_proj"])
    theirs = gradients(model, **packed())
    report = hfpatch.apply(model, mode="training")
    assert [s.path for s in report.swaps if s.op == OP] == ["base_model.model.model"]
    assert_equal(gradients(model, **packed()), theirs)
    assert (count.given, count.made) == (1, 0)


def test_one_row_of_positions_for_all(count: Count) -> None:
    model = build()
    inputs = packed() | {"position_ids": packed(1)["position_ids"]}
    theirs = gradients(model, **inputs)
    patched(model)
    assert_equal(gradients(model, **inputs), theirs)
    assert (count.given, count.made) == (1, 0)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [False, True])
def test_without_gradients(training: bool, context: Any, count: Count) -> None:
    model = build().train(training)
    with context():
        theirs = model(**packed()).loss
    patched(model)
    with context():
        torch.testing.assert_close(model(**packed()).loss, theirs, rtol=1e-5, atol=0)
    assert (count.given, count.made) == (int(training and context is torch.no_grad), 0)


def test_positions_of_another_dtype_are_the_models_own(count: Count) -> None:
    model = build()
    inputs = packed() | {"position_ids": packed()["position_ids"].int()}
    theirs = gradients(model, **inputs)
    patched(model)
    assert_equal(gradients(model, **inputs), theirs)
    assert count.given == 0


def test_a_forward_that_stands_on_the_body_stays(count: Count) -> None:
    model = build()
    own = model.model.forward
    model.model.forward = lambda *args, **kwargs: own(*args, **kwargs)
    theirs = gradients(model, **packed())
    report = hfpatch.apply(model, mode="training")
    (skip,) = [s for s in report.skips if s.path == "model"]
    assert skip.kind == "foreign" and not [s for s in report.swaps if s.op == OP]
    assert_equal(gradients(model, **packed()), theirs)
    assert count.given == 0


def test_the_forwards_signature_stays() -> None:
    model = build()
    before = inspect.signature(model.model.forward)
    patched(model)
    assert inspect.signature(model.model.forward) == before


def test_a_function_that_somebody_has_put_there(
    count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    model, calls = build(), []
    own = modeling_llama.create_causal_mask

    def other(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    theirs = gradients(model, **packed())
    patched(model)
    with monkeypatch.context() as there:
        there.setattr(modeling_llama, "create_causal_mask", other)
        assert_equal(gradients(model, **packed()), theirs)
        assert calls == [1] and count.given == 0
        report = hfpatch.apply(model, mode="training")
        assert not [s for s in report.swaps if s.op == OP]
        (skip,) = [s for s in report.skips if s.path == "model"]
        assert skip.kind == "mismatch" and "not transformers' own" in skip.reason
    calls.clear()
    patched(model)
    assert_equal(gradients(model, **packed()), theirs)
    assert not calls and count.given == 1


def test_masks_that_say_more_are_found_at_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    own = masking_utils.sdpa_mask

    def fewer(*args: Any, **kwargs: Any) -> Any:
        mask = own(*args, **kwargs)
        return None if mask is None else mask & (torch.arange(mask.shape[-1]) != 6)

    monkeypatch.setitem(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", fewer)
    found = masked_body.body_of(build().model)
    assert isinstance(found, str) and "say something else" in found
    monkeypatch.undo()
    assert isinstance(masked_body.body_of(build().model), masked_body.Body)


def test_the_model_is_given_back(count: Count) -> None:
    model = build()
    theirs, before = gradients(model, **packed()), snapshot(model)
    for _ in range(2):
        patched(model)
    assert [s.op for s in hfpatch.status(model).swaps].count(OP) == 1
    twin = copy.deepcopy(model)
    bare = pickle.loads(pickle.dumps(model))
    assert "forward" not in bare.model.__dict__
    assert_equal(gradients(twin, **packed()), theirs)
    assert (count.given, count.made) == (1, 0)
    hfpatch.restore(twin)
    hfpatch.restore(model)
    model.zero_grad(set_to_none=True)
    assert_same_dicts(before, model)
    assert "forward" not in twin.model.__dict__
    report = hfpatch.apply(model, mode="training", exclude="LlamaModel")
    assert not [s for s in report.swaps if s.op == OP]
    assert_equal(gradients(model, **packed()), theirs)
    assert count.given == 1


def test_compiled_the_model_makes_its_own(count: Count) -> None:
    model = build()
    theirs = gradients(model, **packed())
    patched(model)
    compiled: Any = torch.compile(model, backend="eager")
    model.zero_grad(set_to_none=True)
    compiled(**packed()).loss.backward()
    assert_equal({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, theirs)
    assert count.given == 0


def _given(window: int | None = None) -> tuple[Any, Tensor]:
    """A mask that is put off, and the same made."""
    model = build() if window is None else build("Mistral", sliding_window=window)
    body = masked_body.body_of(model.model)
    assert isinstance(body, masked_body.Body)
    maker = masked_body._Maker(body.chain[-1], body.names[-1])
    arguments = {
        "config": model.config, "inputs_embeds": torch.zeros(2, 13, 8, device=device()),
        "attention_mask": None, "past_key_values": None, "position_ids": packed()["position_ids"],
    }  # fmt: skip
    made = maker._function(**arguments)
    found = maker(**arguments)
    assert type(found) is DeferredMask and type(made) is Tensor
    arguments["position_ids"].zero_()  # theirs was made by then
    return found, made


@pytest.mark.parametrize("window", [None, 4])
def test_whatever_reads_it_reads_the_mask(window: int | None) -> None:
    for read in (
        lambda m: m.clone(),
        lambda m: m[:, :, 3:, :5],
        lambda m: torch.where(m, 1.0, -1e4),
        lambda m: ~m & True,
        lambda m: m.to(torch.float32).sum(-1),
        lambda m: torch.stack([m, m]),
        lambda m: copy.deepcopy(m),
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: torch.from_numpy(m.cpu().numpy()),
        lambda m: m.detach().contiguous().view(2, 13, 13),
        lambda m: torch.tensor(m.tolist()),
        lambda m: torch.nn.functional.scaled_dot_product_attention(
            *(torch.ones(2, 4, 13, 8, device=device()),) * 3, attn_mask=m
        ),
    ):
        deferred, made = _given(window)
        assert deferred.shape == made.shape and deferred.dtype == made.dtype
        assert deferred.device == made.device and deferred.dim() == 4
        assert deferred._made is None
        ours, theirs = read(deferred), read(made)
        assert type(ours) is Tensor and torch.equal(ours, theirs)
    deferred, made = _given(window)
    assert repr(deferred) == repr(made)


def test_a_mask_that_is_written_to_is_the_one_that_is_read() -> None:
    deferred, made = _given()
    deferred[0, 0, 3] = False
    made[0, 0, 3] = False
    assert torch.equal(deferred.clone(), made)


def test_made_inside_of_a_checkpoint_it_is_no_part_of_what_that_runs() -> None:
    """One that chooses what to keep notes the operators of its first run, and counts on them."""
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    deferred, made = _given()
    seen: list[Any] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(op)
        return CheckpointPolicy.MUST_SAVE

    def layer(x: Tensor) -> Tensor:
        return torch.where(deferred, x, 0.0).sin()

    x = torch.ones(2, 1, 13, 13, device=device(), requires_grad=True)
    y = checkpoint(
        layer, x, use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )  # fmt: skip
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad != 0, made)
    assert not [op for op in seen if "bitwise_and" in str(op) or "cumsum" in str(op)]
