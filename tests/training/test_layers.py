"""Decoder layers under autograd: their gradients, what they keep, and when they step aside."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from decoding.families import device
from torch import Tensor, nn

import hfpatch
from hfpatch.training import lora as lora_layers
from hfpatch.training import stages
from hfpatch.training.attend import Call, Passed

VOCAB = 99
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = (
    "Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma2", "Gemma3", "Olmo", "Olmo2", "Phi",
    "Phi3", "Cohere", "Cohere2", "Granite", "StableLm", "SmolLM3", "Glm", "Glm4", "Starcoder2",
    "Arcee", "Exaone4", "Ernie4_5",
)  # fmt: skip
Model = Any


def build(family: str = "Llama", dtype: torch.dtype = torch.float32, **more: Any) -> Model:
    config_name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, config_name)(**(SMALL | more))
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():  # no norm's weight is one, no bias zero
        for p in model.parameters():
            if p.dim() < 2:
                p.add_(0.2 * torch.randn_like(p))
    return model.to(device(), dtype).train()


def batch(rows: int = 2, tokens: int = 13) -> Tensor:
    ids = torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(1))
    return ids.to(device())


def gradients(model: Model, **inputs: Any) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    ids = batch()
    model(**{"input_ids": ids, "labels": ids, **inputs}).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], most: float = 2e-5) -> None:
    assert ours.keys() == theirs.keys()
    whole = max(t.norm() for t in theirs.values())
    for name, g in theirs.items():
        assert (ours[name] - g).norm() <= most * (g.norm() + 1e-2 * whole), name


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often either half ran as a function of its own since the last `apply`."""
    count = {"front": 0, "back": 0}

    def counted(name: str) -> Callable[..., Any]:
        function = getattr(stages, name)

        def call(*args: Any) -> Any:
            count[name] += 1
            return function(*args)

        return call

    for name in count:
        monkeypatch.setattr(stages, name, counted(name))
    apply = hfpatch.apply

    def applied(*args: Any, **kwargs: Any) -> Any:
        report = apply(*args, **kwargs)
        count.update(front=0, back=0)  # those of proofs
        return report

    monkeypatch.setattr(hfpatch, "apply", applied)
    return count


def layers_of(report: Any) -> int:
    return sum(s.op == "layer" for s in report.swaps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_families(family: str, dtype: torch.dtype, served: dict[str, int]) -> None:
    model = build(family, dtype)
    theirs = gradients(model)
    report = hfpatch.apply(model, mode="training")
    assert layers_of(report) == 2, [s.reason for s in report.skips]
    ours = gradients(model)
    assert served == {"front": 2, "back": 2}
    hfpatch.restore(model)
    truth = gradients(model.double())
    eps = torch.finfo(dtype).eps
    whole = max(t.norm() for t in truth.values())
    for name, true in truth.items():
        scale = true.norm() + 1e-3 * whole
        own, original = ((g[name].double() - true).norm() / scale for g in (ours, theirs))
        # a rounding more in each of two layers, forward and backward, or another order of sums
        assert own <= 1.3 * original + (24 if dtype == torch.float32 else 1) * eps, name


def test_both_halves_run_in_every_layer(served: dict[str, int]) -> None:
    model = build()
    hfpatch.apply(model, mode="training")
    gradients(model)
    assert served == {"front": 2, "back": 2}


def test_biases_and_half_of_them(served: dict[str, int]) -> None:
    model = build(attention_bias=True, mlp_bias=True)
    model.model.layers[0].self_attn.k_proj.bias.requires_grad_(False)
    theirs = gradients(model)
    hfpatch.apply(model, mode="training")
    assert_equal(gradients(model), theirs)
    assert served == {"front": 2, "back": 2}


def kept_by(model: Model, layers: int) -> int:
    """Bytes that autograd keeps, except for parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}
    held = []

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own and t.numel() > 1:
            found[storage.data_ptr()] = storage.nbytes()
            held.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model.model(input_ids=batch(1, 64), use_cache=False)
    return sum(found.values())


def test_what_is_kept_of_a_layer() -> None:
    sizes = []
    for layers in (1, 2):
        model = build(dtype=torch.bfloat16, num_hidden_layers=layers)
        hfpatch.apply(model, mode="training")
        sizes.append(kept_by(model, layers))
    # input and middle, queries with keys and values, attention's result, gate and up; lse
    hidden, inner, heads, key_heads, dim = 64, 96, 4, 2, 16
    columns = 2 * hidden + (heads + 2 * key_heads) * dim + heads * dim + 2 * inner
    assert sizes[1] - sizes[0] <= 64 * (2 * columns + 4 * heads) + 256


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool, before: bool, served: dict[str, int]) -> None:
    model = build(dtype=torch.float32)
    theirs = gradients(model)
    if before:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    hfpatch.apply(model, mode="training")
    if not before:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert_equal(gradients(model), theirs)
    assert served == {"front": 4, "back": 4}  # in the forward, and again in the backward
    kept: list[int] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model.model(input_ids=batch(1, 64), use_cache=False)
    assert max(kept) <= 64 * 64, "no more than a layer's input"


def products(model: Model) -> int:
    """How many products a step makes."""
    with torch.profiler.profile() as found:
        gradients(model)
    return sum(e.name in ("aten::mm", "aten::addmm") for e in found.events() or [])


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Phi", "Granite", "Starcoder2", "Gemma2"])
def test_checkpointing_does_not_make_a_layers_last_product_again(
    family: str, adapted: bool, served: dict[str, int]
) -> None:
    """Nothing that the backward needs comes behind it, but for a norm of it."""
    model: Model = build(family)
    ends = {"Phi": "fc2", "Starcoder2": "c_proj"}
    if adapted:
        model = lora(model, target_modules=[ends.get(family, "down_proj")])
        model.enable_input_require_grads()
    hfpatch.apply(model, mode="training")
    theirs = gradients(model)
    once = products(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    served.update(front=0, back=0)
    ours = gradients(model)
    assert all(torch.equal(ours[n], g) for n, g in theirs.items())
    assert served == {"front": 4, "back": 4}
    gated = family in ("Llama", "Granite", "Gemma2")
    # queries, keys and values in one, attention's, the MLP's first ones; x A^T, which is kept
    again = 2 + (2 if gated else 1) + (family == "Gemma2") + adapted
    assert products(model) - once == 2 * again


@pytest.mark.parametrize("late", [False, True])
def test_an_adapter_that_is_proven_inside_of_a_checkpoint(late: bool) -> None:
    """Checkpointing counts what is saved; what the proof saves is not the layer's."""
    lora_layers.is_proven.cache_clear()
    model: Model = build()
    twin: Model = build()
    if late:
        hfpatch.apply(model, mode="training")
    model, twin = (lora(m, target_modules=["down_proj", "q_proj"]) for m in (model, twin))
    if not late:
        hfpatch.apply(model, mode="training")
    for m in (model, twin):
        m.gradient_checkpointing_enable({"use_reentrant": False})
    assert_equal(gradients(model), gradients(twin))


def lora(model: Model, **more: Any) -> Model:
    peft = pytest.importorskip("peft")
    targets = more.pop("target_modules", ["q_proj", "v_proj", "gate_proj", "down_proj"])
    wide = more.pop("autocast_adapter_dtype", True)
    config = peft.LoraConfig(r=4, target_modules=targets, **more)
    torch.manual_seed(3)
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=wide)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    return model.train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=str)
def test_adapters_put_in_before(
    options: dict[str, Any], dtype: torch.dtype, served: dict[str, int]
) -> None:
    model = lora(build(dtype=dtype), **options)
    theirs = gradients(model)
    report = hfpatch.apply(model, mode="training")
    assert layers_of(report) == 2, [s.reason for s in report.skips]
    half = dtype == torch.bfloat16  # whose adapters PEFT makes fp32
    assert_equal(gradients(model), theirs, 3e-2 if half else 2e-5)
    # DoRA is a module that is called
    assert served == ({"front": 0, "back": 0} if options else {"front": 2, "back": 2})


@pytest.mark.parametrize("family", ["Llama", "Phi3", "Starcoder2"])
@pytest.mark.parametrize("trained", [False, True])
def test_adapters_in_all_products(family: str, trained: bool, served: dict[str, int]) -> None:
    """Packed weights, an MLP without a gate; with the weights below them trained too, or not."""
    model = build(family)
    names = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    model = lora(model, target_modules=sorted(names - {"lm_head"}))
    if trained:
        for name, p in model.named_parameters():
            p.requires_grad_("lm_head" not in name)
    theirs = gradients(model)
    hfpatch.apply(model, mode="training")
    assert_equal(gradients(model), theirs)
    assert served == {"front": 2, "back": 2}


def test_adapters_under_autocast(served: dict[str, int]) -> None:
    model = lora(build(dtype=torch.bfloat16))  # its adapters in fp32
    with torch.autocast(device(), torch.bfloat16):
        theirs = gradients(model)
        hfpatch.apply(model, mode="training")
        assert_equal(gradients(model), theirs, 3e-2)
    assert served == {"front": 2, "back": 2}


def test_adapters_of_other_kinds_and_states(served: dict[str, int]) -> None:
    """Several at once, one that is off, merged, with dropout: PEFT's own code runs."""
    model = lora(build(), lora_dropout=0.5)
    hfpatch.apply(model, mode="training")
    torch.manual_seed(5)
    ours = gradients(model)
    assert served == {"front": 0, "back": 0}
    hfpatch.restore(model)
    torch.manual_seed(5)
    assert_equal(ours, gradients(model))
    model = lora(build())
    hfpatch.apply(model, mode="training")
    with model.disable_adapter():
        ours = model(input_ids=batch()).logits
    assert served == {"front": 0, "back": 0}
    model.merge_adapter()
    merged = model(input_ids=batch()).logits
    assert served == {"front": 0, "back": 0}
    model.unmerge_adapter()
    whole = model(input_ids=batch()).logits
    assert served == {"front": 2, "back": 2}
    hfpatch.restore(model)
    torch.testing.assert_close(whole, merged, rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        torch.testing.assert_close(ours, model(input_ids=batch()).logits, rtol=1e-4, atol=1e-4)


def test_adapters_put_in_after() -> None:
    model = build()
    hfpatch.apply(model, mode="training")
    wrapped = lora(model)
    ours = gradients(wrapped)
    hfpatch.restore(wrapped)
    assert_equal(ours, gradients(wrapped))


def left_by(model: Model, ids: Tensor) -> int:
    """Bytes that are allocated after the body's forward and were not before."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        hidden = model.get_base_model().model(input_ids=ids, use_cache=False).last_hidden_state
    assert hidden.requires_grad
    return sum(e.self_cpu_memory_usage for e in found.key_averages())


def test_adapters_keep_no_normed_rows_nor_products() -> None:
    sizes = {}
    for way in ("eager", "ours"):
        model = lora(build(dtype=torch.bfloat16), autocast_adapter_dtype=False)
        if way == "ours":
            hfpatch.apply(model, mode="training")
        left_by(model, batch(2, 64))
        sizes[way] = left_by(model, batch(2, 64))
    assert 0 < sizes["ours"] < 0.65 * sizes["eager"], sizes


class Around(nn.Module):
    """An adapter made by hand: a product, and what goes before it and is added to it."""

    def __init__(self, base: nn.Linear, before: nn.Module, added: nn.Module) -> None:
        super().__init__()
        self.base, self.before, self.added = base, before, added

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        y: Tensor = self.base(x) + self.added(x)
        return y


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return x.mul_(0.5)


@pytest.mark.parametrize("path", ["self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj"])
@pytest.mark.parametrize("before", [nn.Dropout(0.3, inplace=True), nn.ReLU(inplace=True), Halves()])
def test_a_product_that_writes_to_its_input(path: str, before: nn.Module) -> None:
    """What it read is what it wrote, and not what would be made again."""
    model = build(num_hidden_layers=1)
    layer = model.model.layers[0]
    base = layer.get_submodule(path)
    layer.set_submodule(path, Around(base, before, nn.Linear(base.in_features, base.out_features)))
    torch.manual_seed(5)
    theirs = gradients(model)
    assert layers_of(hfpatch.apply(model, mode="training")) == 1
    torch.manual_seed(5)
    assert_equal(gradients(model), theirs)


class Buffered(nn.Linear):
    """All of these write their result to one buffer."""

    buffer = torch.empty(26, 96)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.mm(x.flatten(0, -2), self.weight.t(), out=self.buffer)
        return y.view(*x.shape[:-1], -1)


@torch.no_grad()
def test_a_gate_and_another_projection_with_one_buffer() -> None:
    """The gate is activated before the other projection writes over it."""
    model = build()
    twin = copy.deepcopy(model)
    assert layers_of(hfpatch.apply(model, mode="training")) == 2
    for m in (model, twin):
        for layer in m.model.layers:
            layer.mlp.gate_proj.__class__ = layer.mlp.up_proj.__class__ = Buffered
    got, expected = (m(input_ids=batch()).logits for m in (model, twin))
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("path", ["self_attn.q_proj", "mlp.down_proj"])
def test_a_forward_without_a_backward_leaves_nothing(path: str) -> None:
    """Also where a product saves what it gives, as a sigmoid does."""
    model = build(num_hidden_layers=1)
    layer = model.model.layers[0]
    base, made = layer.get_submodule(path), []
    last = nn.Sigmoid()
    added = nn.Sequential(nn.Linear(base.in_features, base.out_features), last)
    layer.set_submodule(path, Around(base, nn.Identity(), added))
    assert layers_of(hfpatch.apply(model, mode="training")) == 1
    last.register_forward_hook(lambda m, args, y: made.append(weakref.ref(y)))
    logits = model(input_ids=batch()).logits
    assert logits.requires_grad
    del logits
    gc.collect()
    assert len(made) == 1 and made[0]() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2", "Phi"])
def test_autocast_over_fp32_parameters(
    family: str, dtype: torch.dtype, served: dict[str, int]
) -> None:
    model = build(family)

    def found() -> dict[str, Tensor]:
        with torch.autocast(device(), dtype):
            return gradients(model)

    theirs = found()
    hfpatch.apply(model, mode="training")
    ours = found()
    assert served == {"front": 2, "back": 2}
    hfpatch.restore(model)
    truth = gradients(model.double())
    whole = max(t.norm() for t in truth.values())
    for name, true in truth.items():
        scale = true.norm() + 1e-2 * whole
        own, original = ((g[name].double() - true).norm() / scale for g in (ours, theirs))
        assert ours[name].dtype == torch.float32
        assert own <= 1.3 * original + torch.finfo(dtype).eps, name


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("at_apply", [torch.float32, torch.bfloat16], ids=str)
def test_another_dtype_than_at_apply(
    at_apply: torch.dtype, checkpointed: bool, served: dict[str, int]
) -> None:
    """As FSDP's mixed precision makes it: proven at its first call, and served from then on."""
    then = torch.bfloat16 if at_apply == torch.float32 else torch.float32
    model, twin = build(dtype=at_apply), build(dtype=at_apply).to(then)
    hfpatch.apply(model, mode="training")
    model.to(then)
    if checkpointed:
        for m in (model, twin):
            m.gradient_checkpointing_enable({"use_reentrant": False})
    state = torch.get_rng_state()
    ours = gradients(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert_equal(ours, gradients(twin), 3e-2 if then == torch.bfloat16 else 2e-5)
    served.update(front=0, back=0)  # those of the proof
    gradients(model)
    assert served == dict.fromkeys(("front", "back"), 4 if checkpointed else 2)


def test_another_dtype_that_cannot_be_proven_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from hfpatch.training import offer

    model, twin = build(), build(dtype=torch.bfloat16)
    hfpatch.apply(model, mode="training")
    model.bfloat16()
    monkeypatch.setattr(offer, "_proofs", {})
    monkeypatch.setattr(offer, "_prove", lambda *_: "its gradients are off")
    with pytest.warns(RuntimeWarning, match="called with bfloat16 on cpu.*gradients are off"):
        ours = gradients(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(model)
    assert_equal(ours, gradients(twin), 3e-2)


def _first_taken_out(model: Any) -> None:
    del model.model.layers[0]


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def _in_a_wrapper(model: Any) -> None:
    model.model = Wrapper(model.model)


def _another_table(model: Any) -> None:
    model.model.rotary_emb = Wrapper(model.model.rotary_emb)


@pytest.mark.parametrize("change", [_first_taken_out, _in_a_wrapper, _another_table])
def test_a_model_that_its_config_does_not_describe(change: Callable[[Any], None]) -> None:
    """As layers are taken out of a teacher for a student, or of a model for a pipeline's stage."""
    model, twin = build(), build()
    for m in (model, twin):
        change(m)
    report = hfpatch.apply(model, mode="training")
    assert layers_of(report) == 2 or any("decoder layers" in s.reason for s in report.skips)
    assert_equal(gradients(model), gradients(twin))


def test_models_without_a_head_are_in_the_report() -> None:
    """Rewards, classes, embeddings: their layers keep their own forward."""
    config = transformers.LlamaConfig(**SMALL)
    body = transformers.LlamaModel(config)
    wrapped = nn.ModuleDict({"encoder": body, "head": nn.Linear(64, 1)})
    rewards = transformers.LlamaForSequenceClassification(config)
    for model, path, name in (
        (body, "", "LlamaModel"),
        (wrapped, "encoder", "LlamaModel"),
        (rewards, "", "LlamaForSequenceClassification"),
    ):
        report = hfpatch.plan(model, mode="training")
        said = [(s.path, s.class_name) for s in report.skips if "decoder layers" in s.reason]
        assert said == [(path, name)]
        assert not any("decoder layers" in s.reason for s in hfpatch.plan(model).skips)
    encoder = transformers.BertModel(transformers.BertConfig(**SMALL))
    for other in (build(), encoder):
        skips = hfpatch.plan(other, mode="training").skips
        assert not any("decoder layers" in s.reason for s in skips)


def _only_norms(name: str) -> bool:
    return "norm" in name


def _only_the_middle(name: str) -> bool:
    return "layers.1" in name


def _no_embedding(name: str) -> bool:
    return "embed" not in name


def _one_product(name: str) -> bool:
    return name.endswith("0.self_attn.k_proj.weight")


@pytest.mark.parametrize(
    "trained",
    [_only_norms, _only_the_middle, _no_embedding, _one_product],
    ids=lambda f: f.__name__,
)
def test_frozen_parts(trained: Callable[[str], bool]) -> None:
    model = build(tie_word_embeddings=False)
    for name, p in model.named_parameters():
        p.requires_grad_(trained(name))
    theirs = gradients(model)
    hfpatch.apply(model, mode="training")
    assert_equal(gradients(model), theirs)


def test_padding_and_positions() -> None:
    mask = torch.ones(2, 13, dtype=torch.int64)
    mask[1, :5] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for implementation in ("sdpa", "eager"):
        model = build("Gemma2" if implementation == "eager" else "Llama")
        model.set_attn_implementation(implementation)
        inputs = {"attention_mask": mask, "position_ids": positions}
        theirs = gradients(model, **inputs)
        hfpatch.apply(model, mode="training")
        assert_equal(gradients(model, **inputs), theirs)


def test_a_cache_is_filled(served: dict[str, int]) -> None:
    model = build("Qwen3")
    found = []
    for _ in range(2):
        output = model(input_ids=batch(), use_cache=True)
        found.append([(c.keys.detach(), c.values.detach()) for c in output.past_key_values.layers])
        if len(found) == 1:
            hfpatch.apply(model, mode="training")
    assert served["front"] == 2
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_what_a_cache_holds_is_attended_to(family: str) -> None:
    model = build(family)
    twin = copy.deepcopy(model)
    hfpatch.apply(model, mode="training")
    ids, found = batch(), []
    for m in (model, twin):
        cache = transformers.DynamicCache(config=m.config)
        with torch.no_grad():
            m(input_ids=ids[:, :6], past_key_values=cache, use_cache=True)
        found.append(gradients(m, input_ids=ids[:, 6:], labels=ids[:, 6:], past_key_values=cache))
        assert cache.get_seq_length() == ids.shape[1]
    assert_equal(*found)


def test_a_checkpointed_layer_without_gradients_does_with_the_cache_what_its_class_does() -> None:
    # transformers 5.24 fills it then, 5.23 does not
    model = build()
    twin = copy.deepcopy(model)
    hfpatch.apply(model, mode="training")
    found = []
    for m in (model, twin):
        m.gradient_checkpointing_enable()
        cache = transformers.DynamicCache(config=m.config)
        with torch.no_grad():
            logits = m(input_ids=batch(), past_key_values=cache, use_cache=True).logits
        found.append((logits, torch.tensor(cache.get_seq_length())))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["past_key_values", "cache", "layer_past"])
def test_a_cache_by_any_name_is_what_it_is_to_the_layer(name: str, served: dict[str, int]) -> None:
    model = build()
    twin = copy.deepcopy(model)
    hfpatch.apply(model, mode="training")
    x = torch.randn(2, 5, SMALL["hidden_size"], generator=torch.Generator().manual_seed(0))
    tables = model.model.rotary_emb(x, torch.arange(5)[None])
    found = []
    for m in (model, twin):
        cache = transformers.DynamicCache(config=m.config)
        layer = m.model.layers[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a deprecated name
            y = layer(x, position_embeddings=tables, **{name: cache})
        found.append((y, torch.tensor(cache.get_seq_length())))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_arguments_that_no_layer_was_seen_with() -> None:
    passed = (Passed("position_ids", True, False), Passed("shift", False, True))
    call = Call((), passed, True, frozenset({"position_ids", "shift", "bias"}))
    assert call.reaching({"position_ids": 1, "shift": None, "other": 2}) == {
        "position_ids": 1,
        "other": 2,
    }
    assert call.reaching({"shift": 0.5}) is None  # seen as None, and it does not go on
    assert call.reaching({"bias": 0.5}) is None  # the layer takes it and was not seen with it
    assert Call((), passed, False, frozenset()).reaching({"other": 2}) is None


def test_dropped_attention_weights_leave_the_layer_alone() -> None:
    model = build(attention_dropout=0.1)
    report = hfpatch.apply(model, mode="training")
    assert layers_of(report) == 0
    assert any("drops weights out" in s.reason for s in report.skips)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("Phi", "resid_pdrop"),
        ("Phi3", "resid_pdrop"),
        ("StableLm", "hidden_dropout"),
        ("Starcoder2", "residual_dropout"),
    ],
)
def test_a_dropout_in_a_layer_leaves_it_alone(family: str, name: str) -> None:
    """A layer with one draws as its twin does; without, it is a function for training."""
    model = build(family, **{name: 0.2})
    twin = copy.deepcopy(model)
    report = hfpatch.apply(model, mode="training")
    assert layers_of(report) == 0
    assert any("draws random numbers" in s.reason for s in report.skips)
    found = []
    for m in (model, twin):
        torch.manual_seed(0)
        found.append((gradients(m), torch.get_rng_state()))
    assert_equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert layers_of(hfpatch.apply(build(family, **{name: 0.0}), mode="training")) == 2


@pytest.mark.parametrize(
    ("family", "name"), [("Phi", "resid_pdrop"), ("Starcoder2", "residual_dropout")]
)
def test_a_dropout_that_is_turned_on_later(family: str, name: str) -> None:
    model = build(family, **{name: 0.0})
    twin = copy.deepcopy(model)
    assert layers_of(hfpatch.apply(model, mode="training")) == 2
    found = []
    for m in (model, twin):
        for module in m.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2
            elif name in module.__dict__:
                setattr(module, name, 0.2)
        torch.manual_seed(0)
        found.append(gradients(m))
    assert_equal(*found)


def test_accumulated_retained_and_second_gradients() -> None:
    model = build()
    ids = batch()

    def several(way: str) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward(retain_graph=True)
        loss.backward()
        model(input_ids=ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    def second() -> list[Tensor]:
        weight = model.model.layers[0].mlp.up_proj.weight
        model.config._attn_implementation = "eager"
        y = model.model(input_ids=ids, use_cache=False).last_hidden_state.square().mean()
        (g,) = torch.autograd.grad(y, weight, create_graph=True)
        return list(torch.autograd.grad(g.square().sum(), list(model.model.parameters())))

    theirs = several("eager"), second()
    model.set_attn_implementation("sdpa")
    hfpatch.apply(model, mode="training")
    ours = several("ours"), second()
    for a, b in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-6


def test_somebody_else_in_the_layer_is_heard(served: dict[str, int]) -> None:
    model = build()
    theirs = gradients(model)
    hfpatch.apply(model, mode="training")
    heard: list[str] = []
    first, second = model.model.layers

    def hook(name: str) -> Any:
        return lambda *_: heard.append(name)

    first.register_forward_hook(hook("layer"))  # fires around whatever forward there is
    handles = [first.mlp.register_forward_hook(hook("mlp"))]
    assert_equal(gradients(model), theirs)
    assert heard == ["mlp", "layer"] and served == {"front": 1, "back": 1}
    handles[0].remove()
    handles = [second.self_attn.q_proj.register_forward_hook(hook("q"))]
    assert_equal(gradients(model), theirs)
    assert heard[-2:] == ["layer", "q"] and served == {"front": 2, "back": 3}
    handles[0].remove()
    own = type(first.mlp).forward
    first.mlp.forward = lambda x: heard.append("forward") or own(first.mlp, x)
    assert_equal(gradients(model), theirs)
    assert heard[-2:] == ["forward", "layer"] and served == {"front": 3, "back": 4}


def test_another_attention_function_is_the_one_that_is_called() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = build()
    theirs = gradients(model)
    hfpatch.apply(model, mode="training")
    calls: list[dict[str, Any]] = []
    sdpa: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def mine(module: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return sdpa(module, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = mine
    try:
        assert_equal(gradients(model), theirs)
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert len(calls) == 2 and calls[0]["scaling"] == 16**-0.5 and calls[0]["dropout"] == 0.0


def test_compiled_layers_are_the_originals() -> None:
    model = build()
    theirs = gradients(model)
    hfpatch.apply(model, mode="training")
    compiled = torch.compile(model, backend="aot_eager")
    model.zero_grad(set_to_none=True)
    ids = batch()
    compiled(input_ids=ids, labels=ids).loss.backward()
    assert_equal({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, theirs)


def test_restored_copied_and_pickled() -> None:
    model = build()
    before = {path: dict(m.__dict__) for path, m in model.named_modules()}
    names = list(model.state_dict())
    theirs = gradients(model)
    hfpatch.apply(model, mode="training")
    assert list(model.state_dict()) == names
    assert_equal(gradients(copy.deepcopy(model)), theirs)
    assert_equal(gradients(pickle.loads(pickle.dumps(model))), theirs)
    assert layers_of(hfpatch.status(model)) == 2
    hfpatch.restore(model)
    for path, module in model.named_modules():
        assert module.__dict__.keys() == before[path].keys(), path


def test_inference_mode_has_none() -> None:
    model = build()
    assert layers_of(hfpatch.apply(model)) == 0
    assert layers_of(hfpatch.apply(model, mode="training", exclude="*.layers.0")) == 1
    assert layers_of(hfpatch.apply(model, mode="training", kernels={"rope": None})) == 0
    assert layers_of(hfpatch.apply(model, mode="training")) == 2


class OtherLayer(transformers.models.llama.modeling_llama.LlamaDecoderLayer):
    """Adds something that no description says."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(hidden_states, *args, **kwargs) + 0.1 * hidden_states.tanh()


def test_a_layer_that_computes_something_else_keeps_its_forward() -> None:
    model = build()
    for one in model.model.layers:
        one.__class__ = OtherLayer
    theirs = gradients(model)
    report = hfpatch.apply(model, mode="training")
    assert layers_of(report) == 0
    assert any("OtherLayer" in s.reason for s in report.skips), [s.reason for s in report.skips]
    assert_equal(gradients(model), theirs)


def test_a_number_changed_afterwards_counts() -> None:
    model = build("Granite", residual_multiplier=0.5, attention_multiplier=0.3)
    hfpatch.apply(model, mode="training")
    for one in model.model.layers:
        one.input_layernorm.variance_epsilon = 0.5
        one.self_attn.scaling = 0.1
    ours = gradients(model)
    hfpatch.restore(model)
    assert_equal(ours, gradients(model))


def test_a_child_that_is_gone_or_built_anew() -> None:
    model = build()
    hfpatch.apply(model, mode="training")
    first = model.model.layers[0]
    first.mlp.down_proj = nn.Linear(96, 64)
    first.self_attn = nn.Sequential()
    with pytest.raises(TypeError):
        gradients(model)  # the original's own error


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_on_the_meta_device(autocast: bool, labels: bool) -> None:
    """Which autocast does not know: `torch.is_autocast_enabled("meta")` raises."""
    model, ids = build(), batch().to("meta")
    reference = copy.deepcopy(model).to("meta")
    assert layers_of(hfpatch.apply(model, mode="training")) > 0
    model.to("meta")
    inputs = {"input_ids": ids, **({"labels": ids} if labels else {})}
    for records in (True, False):
        with torch.set_grad_enabled(records), torch.autocast(device(), enabled=autocast):
            ours, theirs = model(**inputs), reference(**inputs)
        assert ours.logits.device.type == "meta"
        assert (ours.logits.shape, ours.logits.dtype) == (theirs.logits.shape, theirs.logits.dtype)
        assert not labels or ours.loss.shape == theirs.loss.shape


@pytest.mark.parametrize("before", [False, True])
def test_an_adapter_that_saves_sparse_tensors(before: bool) -> None:
    """PEFT's SHiRA adds a sparse tensor to a weight; sparse tensors have no storage to ask."""
    peft = pytest.importorskip("peft")
    model = build()
    if not before:
        hfpatch.apply(model, mode="training")
    targets = ["q_proj", "down_proj"]
    config = peft.ShiraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets)
    adapted = peft.get_peft_model(model, config)
    for name, p in adapted.named_parameters():
        if "shira" in name:  # zeros when they are new
            nn.init.normal_(p, generator=torch.Generator().manual_seed(0))
    if before:
        hfpatch.apply(adapted, mode="training")
    ours = gradients(adapted)
    hfpatch.restore(adapted if before else model)
    assert_equal(ours, gradients(adapted))
    assert any("shira" in name for name in ours)
