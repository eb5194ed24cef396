"""LoRA on the head: PEFT's, by a model's own loss, without logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.nearness import assert_as_near, draw
from support.pieces import small_pieces
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import hfpatch
from hfpatch.losses import head_loss
from hfpatch.losses.deferred_logits import DeferredLogits

peft = pytest.importorskip("peft")

CLASSES = 97
LENGTHS = {"in the forward": 24, "in the backward": 7}


@pytest.fixture(autouse=True)
def pieces(kernels_module: object, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Small pieces, both ways of making gradients, and how many logits existed at a time."""
    monkeypatch.setattr(head_loss, "TIME_FIRST", frozenset())
    return small_pieces(monkeypatch, 2048)


def wrapped(
    kind: str = "llama",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    targets: tuple[str, ...] = ("lm_head",),
    **options: Any,
) -> Any:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": CLASSES,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model: Any
    if kind == "bert":  # a bias
        dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model, targets = BertForMaskedLM(BertConfig(**sizes, **dropouts)), ("decoder",)
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=kind == "tied"))
    how = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, **options}
    config = peft.LoraConfig(target_modules=list(targets), **how)
    return peft.get_peft_model(model.to(dtype), config).train()


def head_of(model: Any) -> Any:
    return model.get_output_embeddings()


def batch(length: int, seed: int = 1) -> dict[str, Tensor]:
    ids = torch.randint(3, CLASSES, (2, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def patched(model: Any) -> Any:
    report = hfpatch.apply(model, mode="training", include="Linear")
    assert [s.op for s in report.swaps] == ["linear_cross_entropy"], report
    return model


def step(model: Any, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    grads = [p.grad.flatten().to(loss) for p in model.parameters() if p.grad is not None]
    return loss.detach(), torch.cat(grads)


def assert_near(ours: Any, theirs: Any, most: float = 2e-5) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert (a - b).abs().max() <= most * b.abs().max()


@pytest.mark.parametrize("way", LENGTHS)
@pytest.mark.parametrize("targets", [("lm_head",), ("lm_head", "q_proj", "down_proj")], ids=len)
@pytest.mark.parametrize("kind", ["llama", "tied", "bert"])
def test_as_its_twin_without_logits(
    kind: str, targets: tuple[str, ...], way: str, pieces: list[int]
) -> None:
    twin = wrapped(kind, targets=targets)
    model = patched(copy.deepcopy(twin))
    pieces.clear()
    given = batch(LENGTHS[way])
    assert_near(step(model, given), step(twin, given))
    assert pieces and max(pieces) <= 11 * CLASSES
    head = head_of(model)
    assert head.base_layer.weight.grad is None
    assert all(side["default"].weight.grad.any() for side in (head.lora_A, head.lora_B))
    assert not [n for n in hfpatch.status(model).notes if "made whole" in n]
    hfpatch.restore(model)
    assert "forward" not in head.__dict__
    assert_near(step(model, given), step(twin, given), 0.0)


@pytest.mark.parametrize("way", LENGTHS)
@pytest.mark.parametrize("mixed", ["all half", "fp32 adapters", "autocast", "autocast, half base"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_are_as_near(dtype: torch.dtype, mixed: str, way: str) -> None:
    """PEFT makes adapters of half models fp32, which are then the head's part that is learned."""
    losses, gradients = [], []
    for seed in range(10):
        half = mixed != "autocast"
        twin = wrapped(dtype=dtype if half else torch.float32, seed=seed)
        head = head_of(twin)
        assert head.lora_A["default"].weight.dtype == torch.float32
        if mixed == "all half":
            twin.to(dtype)
        wide = copy.deepcopy(twin).double()
        model = patched(copy.deepcopy(twin))
        given = batch(LENGTHS[way], seed)
        found = []
        for m in (model, twin, wide):
            on = mixed.startswith("autocast") and m is not wide
            with torch.autocast("cpu", dtype, enabled=on):
                loss = m(**given).loss
            loss.backward()
            own = head_of(m)
            sides = [own.lora_A["default"].weight, own.lora_B["default"].weight]
            if m is not wide:
                assert {p.grad.dtype for p in sides} == {sides[0].dtype}
            found.append((loss.detach(), [p.grad.double().flatten() for p in sides]))
        losses.append(draw(*(f[0] for f in found)))
        gradients.append(draw(*(torch.cat(f[1]) for f in found)))
        assert not [n for n in hfpatch.status(model).notes if "made whole" in n]
    assert_as_near(losses, dtype, "loss", like=8)
    assert_as_near(gradients, dtype, "gradients")


@pytest.mark.parametrize("options", [{"learned": True}, {"frozen": "a"}, {"frozen": "b"}], ids=str)
@pytest.mark.parametrize("way", LENGTHS)
def test_what_is_learned(options: dict[str, Any], way: str) -> None:
    twin = wrapped(targets=("lm_head", "q_proj"))
    head = head_of(twin)
    if options.get("learned"):
        head.base_layer.weight.requires_grad_()
    else:
        side = head.lora_A if options["frozen"] == "a" else head.lora_B
        side["default"].weight.requires_grad_(False)
    model = patched(copy.deepcopy(twin))
    given = batch(LENGTHS[way])
    assert_near(step(model, given), step(twin, given))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)


def _read(model: Any, given: dict[str, Tensor]) -> Tensor:
    output = model(**given)
    return output.loss + 1e-2 * output.logits.float().logsumexp(-1).square().mean()


def _by_hook(model: Any, given: dict[str, Tensor]) -> Tensor:
    output = model(**given)
    output.logits.register_hook(lambda g: g * 3.0)
    return output.loss  # type: ignore[no-any-return]


def _biased(model: Any, given: dict[str, Tensor]) -> Tensor:
    ids = given["input_ids"]
    logits = model(input_ids=ids).logits + torch.linspace(-1, 1, CLASSES)
    logits = torch.tanh(logits / 3.0) * 3.0
    return F.cross_entropy(logits[:, :-1, 3:].reshape(-1, CLASSES - 3), ids[:, 1:].flatten() - 3)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * grad * x / x.numel()


def _function(model: Any, given: dict[str, Tensor]) -> Tensor:
    return _Mean.apply(model(**given).logits)  # type: ignore[no-any-return]


def _twice(model: Any, given: dict[str, Tensor]) -> Tensor:
    model.set_attn_implementation("eager")
    loss = model(**given).loss
    head = head_of(model)
    chosen = [head.lora_A["default"].weight, head.lora_B["default"].weight]
    found = torch.autograd.grad(loss, chosen, create_graph=True)
    return loss + sum(g.square().sum() for g in found)  # type: ignore[no-any-return]


def _checkpointed(model: Any, given: dict[str, Tensor]) -> Tensor:
    loss: Any = torch.utils.checkpoint.checkpoint(
        lambda ids: model(input_ids=ids, labels=given["labels"]).loss,
        given["input_ids"],
        use_reentrant=False,
    )
    return loss  # type: ignore[no-any-return]


USES: list[Callable[[Any, dict[str, Tensor]], Tensor]] = [
    _read, _by_hook, _biased, _function, _twice, _checkpointed,
]  # fmt: skip


@pytest.mark.parametrize("use", USES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("way", LENGTHS)
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_other_uses_of_the_logits(kind: str, use: Any, way: str) -> None:
    twin = wrapped(kind)
    model = patched(copy.deepcopy(twin))
    found = []
    for m in (model, twin):
        loss = use(m, batch(LENGTHS[way]))
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in m.parameters() if p.requires_grad)])
    assert_near(*found, 1e-4)


def test_logits_that_are_read_are_the_originals() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        twin = wrapped(dtype=dtype)
        model = patched(copy.deepcopy(twin))
        given = batch(9)
        logits = model(**given).logits
        assert type(logits) is DeferredLogits
        assert torch.equal(logits, twin(**given).logits)
        with torch.no_grad():
            assert torch.equal(model(**given).logits, twin(**given).logits)


def test_an_odd_number_of_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the head has more classes there, of no probability."""
    for length in LENGTHS.values():
        model = patched(wrapped(dtype=torch.bfloat16).to(torch.bfloat16))
        expected = step(model, batch(length))
        with monkeypatch.context() as patch:
            patch.setattr(head_loss, "PADDED", frozenset({"cpu"}))
            assert_near(step(model, batch(length)), expected, 2e-2)


@pytest.mark.parametrize(("rows", "why"), [(1, None), (9, "must match")])
@pytest.mark.parametrize("part", ["adapter", "bias"])
def test_sizes_that_are_not_the_heads(part: str, rows: int, why: str | None) -> None:
    """PyTorch adds what is of one column to all classes, and refuses others in the forward."""
    twin = wrapped()
    model = patched(copy.deepcopy(twin))
    said = []
    for m in (model, twin):
        head = head_of(m)
        if part == "bias":
            head.base_layer.bias = torch.nn.Parameter(torch.linspace(-1, 1, rows))
        else:
            side = head.lora_B["default"]
            side.weight = torch.nn.Parameter(side.weight.detach()[:rows].clone())
        if why is not None:
            with pytest.raises(RuntimeError, match=why) as raised:
                m(**batch(9))
            said.append(str(raised.value))
    if why is None:
        assert_near(step(model, batch(9)), step(twin, batch(9)))
    else:
        assert said[0] == said[1]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"lora_dropout": 0.1}, "its adapter has dropout"),
    "DoRA": ({"use_dora": True}, "its adapter is a variant of LoRA (DoRA, or another)"),
    "a bias": ({"lora_bias": True, "bias": "none"}, "its adapter has a bias"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_that_are_not_plain(name: str) -> None:
    options, why = REFUSED[name]
    twin = wrapped(kind="bert" if name == "a bias" else "llama", **options)
    model = copy.deepcopy(twin)
    report = hfpatch.apply(model, mode="training", include="Linear")
    (skip,) = [s for s in report.skips if "deferred" in s.reason]
    assert skip.reason == f"its logits cannot be deferred: {why}"
    found = []
    for m in (model, twin):
        torch.manual_seed(3)
        found.append(step(m, batch(9)))
    assert_near(*found, 0.0)


def _second(model: Any) -> None:
    model.add_adapter("second", peft.LoraConfig(target_modules=["lm_head"], r=3))
    model.base_model.set_adapter(["default", "second"])


def _switched_off(model: Any) -> None:
    model.base_model.disable_adapter_layers()
    head_of(model).base_layer.weight.requires_grad_()


def _merged(model: Any) -> None:
    model.merge_adapter()
    head_of(model).base_layer.weight.requires_grad_()


def _hooked(model: Any) -> None:
    head_of(model).base_layer.register_forward_hook(lambda m, args, out: out * 2)


def _hooked_side(model: Any) -> None:
    head_of(model).lora_B["default"].register_forward_hook(lambda m, args, out: out * 2)


def _rescaled(model: Any) -> None:
    head_of(model).scaling["default"] = 3.0  # which is still a plain one


CHANGES: list[tuple[Callable[[Any], None], str | None]] = [
    (_second, "it has 2 adapters at a time"),
    (_switched_off, "its adapter is switched off, or merged into the weight"),
    (_merged, "its adapter is switched off, or merged into the weight"),
    (_hooked, "something stands on the layer inside of the adapter"),
    (_hooked_side, "its adapter is no plain one"),
    (_rescaled, None),
]


@pytest.mark.parametrize(("change", "why"), CHANGES, ids=lambda p: getattr(p, "__name__", ""))
def test_what_changes_behind_apply(change: Any, why: str | None) -> None:
    twin = wrapped(targets=("lm_head", "q_proj"))
    model = patched(copy.deepcopy(twin))
    for m in (model, twin):
        torch.manual_seed(5)
        change(m)
    assert_near(step(model, batch(9)), step(twin, batch(9)))
    said = [n for n in hfpatch.status(model).notes if "made whole" in n]
    assert [n.rpartition("whole: ")[2] for n in said] == ([] if why is None else [why])
