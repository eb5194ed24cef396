"""Training steps of other kinds of models, and of adapters of all kinds: they are the twin's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from test_layers import build, layers_of
from torch import Tensor, nn

import hfpatch
from hfpatch.coverage.small_transformers import shrunk
from hfpatch.inputs import sample_inputs


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


Found = tuple[Tensor, dict[str, Tensor]]


def step(model: Any, inputs: dict[str, Any]) -> Found:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)  # dropout
    loss = model(**inputs).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def assert_same(ours: Found, theirs: Found, most: float = 5e-4) -> None:
    assert ours[0].dtype == theirs[0].dtype
    torch.testing.assert_close(ours[0], theirs[0], rtol=most, atol=1e-6)
    assert ours[1].keys() == theirs[1].keys()
    whole = max(g.abs().max() for g in theirs[1].values())
    for name, g in theirs[1].items():
        apart = (ours[1][name] - g).abs().max()
        assert apart <= most * max(g.abs().max(), 1e-2 * whole), (name, apart)


def assert_trains_as(model: Any, twin: Any, inputs: dict[str, Any]) -> None:
    """Loss and gradients, then two steps of an optimizer, then without the patches."""
    assert_same(step(model, inputs), step(twin, inputs))
    for m in (model, twin):
        optimizer = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.02)
        for _ in range(2):
            step(m, inputs)
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            optimizer.step()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=name)
    assert_same(step(model, inputs), step(twin, inputs), 2e-3)
    hfpatch.restore(model)
    assert not any("forward" in vars(m) for m in model.modules())
    model.load_state_dict(twin.state_dict())
    assert torch.equal(step(model, inputs)[0], step(twin, inputs)[0])


#: Class, and what its labels are: of each token, of a batch's rows, of an answer.
MODELS = {
    "RobertaForSequenceClassification": "rows",
    "ElectraForTokenClassification": "tokens",
    "AlbertForMaskedLM": "tokens",
    "DistilBertForSequenceClassification": "rows",
    "T5ForConditionalGeneration": "answer",
    "BartForConditionalGeneration": "answer",
    "WhisperForConditionalGeneration": "answer",
    "ViTForImageClassification": "rows",
    "Dinov2ForImageClassification": "rows",
    "ConvNextForImageClassification": "rows",
    "MixtralForCausalLM": "tokens",
    "OlmoeForCausalLM": "tokens",
    "GptOssForCausalLM": "tokens",
    "MambaForCausalLM": "tokens",
    "FalconForCausalLM": "tokens",
    "GPTNeoXForCausalLM": "tokens",
    "LlavaForConditionalGeneration": "tokens",
    "InternVLForConditionalGeneration": "tokens",
    "MllamaForConditionalGeneration": "tokens",
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_other_kinds(name: str) -> None:
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    config = shrunk(cls.config_class())
    if MODELS[name] == "answer":
        config.decoder_start_token_id, config.pad_token_id = 1, 0
    twin = cls(config).train()
    inputs = dict(sample_inputs(twin))
    generator = torch.Generator().manual_seed(1)
    if MODELS[name] == "tokens":
        labels = inputs["input_ids"].clone()
        if "Token" in name:
            labels = labels % 2
        labels[:, 0] = -100
    elif MODELS[name] == "rows":
        rows = next(v for v in inputs.values() if isinstance(v, Tensor)).shape[0]
        labels = torch.randint(2, (rows,), generator=generator)
    else:
        inputs = {k: v for k, v in inputs.items() if not k.startswith("decoder_")}
        labels = torch.randint(3, 90, (2, 6), generator=generator)
        rows = next(v for v in inputs.values() if isinstance(v, Tensor)).shape[0]
        labels = labels[:1].expand(rows, -1).contiguous()
    model = copy.deepcopy(twin)
    report = hfpatch.apply(model, mode="training")
    assert report.swaps, report
    assert_trains_as(model, twin, {**inputs, "labels": labels})


def test_layers_that_hold_the_sections_of_rope() -> None:
    """Of its config, whose sections are as wide as its own heads and not as a replica's."""
    torch.manual_seed(0)
    cls = transformers.Qwen2VLForConditionalGeneration
    twin = cls(shrunk(cls.config_class())).train()
    inputs = dict(sample_inputs(twin))
    model = copy.deepcopy(twin)
    report = hfpatch.apply(model, mode="training")
    assert layers_of(report) == 2, [s.reason for s in report.skips]
    assert_trains_as(model, twin, {**inputs, "labels": inputs["input_ids"].clone()})


PRODUCTS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
#: By kind: PEFT's configuration, and its options.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoHa": ("LoHaConfig", {"target_modules": PRODUCTS, "init_weights": False}),
    "LoKr": ("LoKrConfig", {"target_modules": PRODUCTS, "init_weights": False}),
    "VeRA": ("VeraConfig", {"target_modules": ["q_proj"], "init_weights": False, "r": 8}),
    "OFT": ("OFTConfig", {"target_modules": PRODUCTS, "r": 0, "oft_block_size": 8}),
    "IA3": (
        "IA3Config",
        {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "norms": ("LNTuningConfig", {"target_modules": ["input_layernorm", "norm"]}),
    "prefix": ("PrefixTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 6}),
    "prompt": ("PromptTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 6}),
    "a saved head": (
        "LoraConfig",
        {"target_modules": PRODUCTS, "modules_to_save": ["lm_head"], "init_lora_weights": False},
    ),
    "tokens": ("LoraConfig", {"target_modules": PRODUCTS, "trainable_token_indices": [3, 4]}),
}


def adapted(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    peft = pytest.importorskip("peft")
    name, options = ADAPTERS[kind]
    model = build("Llama", dtype)
    torch.manual_seed(1)
    return peft.get_peft_model(model, getattr(peft, name)(**options)).train()


def text() -> dict[str, Tensor]:
    ids = torch.randint(3, 99, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_of_all_kinds(kind: str) -> None:
    twin = adapted(kind)
    model = copy.deepcopy(twin)
    # an adapter around a norm is a module of another kind: such a layer keeps its own forward
    assert layers_of(hfpatch.apply(model, mode="training")) == (0 if kind == "norms" else 2)
    assert_trains_as(model, twin, text())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["LoHa", "LoKr", "VeRA", "OFT", "IA3", "prefix"])
def test_adapters_that_give_a_wider_dtype_under_autocast(kind: str, dtype: torch.dtype) -> None:
    twin = adapted(kind, dtype)
    model, wide = copy.deepcopy(twin), copy.deepcopy(twin).float()
    hfpatch.apply(model, mode="training")
    found = []
    for m in (model, twin, wide):
        with torch.autocast("cpu", torch.bfloat16, enabled=m is not wide):
            found.append(step(m, text()))
    ours, theirs, truth = found
    assert ours[0].dtype == theirs[0].dtype
    for name, true in truth[1].items():
        own, original = (f[1][name].float() - true.float() for f in (ours, theirs))
        eps = torch.finfo(torch.bfloat16).eps * true.norm()
        assert own.norm() <= 1.5 * original.norm() + eps, name
