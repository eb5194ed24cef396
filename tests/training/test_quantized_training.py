"""QLoRA: adapters on bitsandbytes' layers of 4 and 8 bits, trained patched beside unpatched.

bitsandbytes' CPU backend computes them, so these are its own kernels and roundings. Its layers are
called as the modules they are; what lies between them is fused.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_layers import build, layers_of
from torch import Tensor

import hfpatch
import hfpatch.optim

pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

BF16 = torch.bfloat16
#: By name: bits, dtype, whether autocast is on, gradient checkpointing (reentrant or not, or none)
#: and more of PEFT's configuration. `prepare_model_for_kbit_training` makes norms and head fp32.
KINDS: dict[str, tuple[int, torch.dtype, bool, bool | None, dict[str, Any]]] = {
    "4 bits": (4, torch.float32, False, None, {}),
    "4 bits, bf16": (4, BF16, False, None, {}),
    "4 bits, bf16, checkpointed": (4, BF16, False, False, {}),
    "4 bits, bf16, checkpointed, autocast": (4, BF16, True, True, {}),
    "4 bits, DoRA": (4, torch.float32, False, None, {"use_dora": True}),
    "4 bits, dropout": (4, torch.float32, False, None, {"lora_dropout": 0.5}),
    "8 bits": (8, torch.float32, False, None, {}),
    "8 bits, bf16": (8, BF16, False, None, {}),
    "8 bits, bf16, checkpointed": (8, BF16, False, True, {}),
}


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # bitsandbytes tells of each cast
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Path]:
    """A small Llama in a file; rows of whole blocks of 64."""
    found = {}
    for dtype in (torch.float32, BF16):
        found[dtype] = tmp_path_factory.mktemp(str(dtype))
        build("Llama", dtype, intermediate_size=128).save_pretrained(found[dtype])
    return found


def quantized(folder: Path, bits: int, dtype: torch.dtype) -> Any:
    options: dict[str, Any] = {"load_in_8bit": True}
    if bits == 4:
        options = {
            "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": dtype,
        }  # fmt: skip
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=transformers.BitsAndBytesConfig(**options),
        dtype=dtype,
        device_map="cpu",
    )


def adapted(kind: str, saved: dict[torch.dtype, Path], prepared: bool = True) -> Any:
    bits, dtype, _, reentrant, more = KINDS[kind]
    model = quantized(saved[dtype], bits, dtype)
    if prepared:
        model = peft.prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=reentrant is not None,
            gradient_checkpointing_kwargs={"use_reentrant": bool(reentrant)},
        )
    torch.manual_seed(1)
    options = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", **more}
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, **options))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    return model.train()


def text(seed: int = 1) -> dict[str, Tensor]:
    ids = torch.randint(3, 99, (2, 24), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def step(model: Any, autocast: bool, seed: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)  # dropout
    with torch.autocast("cpu", BF16, enabled=autocast):
        loss = model(**text(seed)).loss
    loss.backward()
    return loss.detach(), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """How far all gradients are from others, of these."""
    assert ours.keys() == theirs.keys()
    off = sum((ours[n].double() - g.double()).square().sum() for n, g in theirs.items())
    return float((off / sum(g.double().square().sum() for g in theirs.values())) ** 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_as_its_twin(kind: str, saved: dict[torch.dtype, Path], tmp_path: Path) -> None:
    _, dtype, autocast, _, _ = KINDS[kind]
    twin, model = adapted(kind, saved), adapted(kind, saved)
    report = hfpatch.apply(model, mode="training")
    assert layers_of(report) == 2, report
    assert not report.skips
    (ours, grads), (theirs, own) = (step(m, autocast) for m in (model, twin))
    assert ours.dtype == theirs.dtype
    half = dtype == BF16
    assert grads and all("lora" in name for name in grads)
    torch.testing.assert_close(ours, theirs, rtol=2e-3 if half else 1e-5, atol=0)
    assert apart(grads, own) <= (2e-2 if half else 1e-5)
    losses: list[list[float]] = []
    for m, kept in ((model, hfpatch.optim.AdamW), (twin, torch.optim.AdamW)):
        optimizer = kept([p for p in m.parameters() if p.requires_grad], lr=1e-3)
        losses.append([])
        for seed in range(4):
            losses[-1].append(step(m, autocast, seed)[0].item())
            optimizer.step()
    assert losses[0] == pytest.approx(losses[1], abs=1e-2 if half else 1e-4)
    # what a patched model writes, an unpatched one reads
    model.save_pretrained(tmp_path)
    hfpatch.restore(model)
    assert not any("forward" in vars(m) and "hfpatch" in repr(m.forward) for m in model.modules())
    weights = peft.utils.load_peft_weights(str(tmp_path), device="cpu")
    peft.set_peft_model_state_dict(twin, weights)
    for name, p in peft.get_peft_model_state_dict(model).items():
        assert torch.equal(p, weights[name]), name
    assert torch.equal(step(model, autocast)[0], step(twin, autocast)[0])


@pytest.mark.parametrize("kind", ["4 bits", "8 bits"])
def test_adapters_that_are_merged_and_taken_off(kind: str, saved: dict[torch.dtype, Path]) -> None:
    """Merging quantizes the sum anew, by PEFT's own code: to the same bits."""
    twin, model = adapted(kind, saved).eval(), adapted(kind, saved).eval()
    hfpatch.apply(model, mode="training")
    with model.disable_adapter(), twin.disable_adapter():
        ours, theirs = (m(**text()).loss.detach() for m in (model, twin))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    ours, theirs = (m(**text()).loss.detach() for m in (model, twin))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    model, twin = model.merge_and_unload(), twin.merge_and_unload()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert p.dtype == q.dtype and torch.equal(p, q), name
    with torch.no_grad():
        ours, theirs = (m(**text()).loss for m in (model, twin))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
        hfpatch.restore(model)
        assert torch.equal(model(**text()).loss, theirs)


@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_put_in_after(bits: int, saved: dict[torch.dtype, Path]) -> None:
    found = []
    for patched in (False, True):
        model = quantized(saved[torch.float32], bits, torch.float32)
        if patched:
            assert layers_of(hfpatch.apply(model, mode="training")) == 2
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        torch.manual_seed(1)
        options = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
        found.append(step(peft.get_peft_model(model, options).train(), False))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=0)
    assert apart(found[1][1], found[0][1]) <= 1e-5


@pytest.mark.parametrize("prepared", [True, False])
def test_bf16_is_no_farther_from_fp32(prepared: bool, saved: dict[torch.dtype, Path]) -> None:
    """The gradients by 4-bit weights that are computed in bf16, over several texts; norms and head
    in fp32 (prepared), or in bf16."""
    twin, model, wide = (adapted("4 bits, bf16", saved, prepared) for _ in range(3))
    wide.float()
    for m in wide.modules():
        if type(m).__name__ == "Linear4bit":
            m.compute_dtype = torch.float32
    assert layers_of(hfpatch.apply(model, mode="training")) == 2
    errors = torch.zeros(2)
    for seed in range(6):
        truth = step(wide, False, seed)[1]
        errors += torch.tensor([apart(step(m, False, seed)[1], truth) for m in (model, twin)]) ** 2
    ours, theirs = errors.sqrt()
    assert theirs > 0
    assert ours <= 1.1 * theirs, (ours, theirs)
