"""What happens to a patched model is noticed within the call; what is taken back is gone."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from decoding.families import make, prompts
from torch import nn

import hfpatch
from hfpatch.decoding import kept, step
from hfpatch.decoding.engine import Engine
from hfpatch.decoding.layer import forget
from hfpatch.decoding.rules import Unexplained
from hfpatch.errors import DecodingError

_GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}


def patched(name: str = "llama", **more: Any) -> Any:
    model = make(name, **more)
    hfpatch.apply(model)
    return model


def write(model: Any, rows: int = 1) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out: torch.Tensor = model.generate(**prompts(rows), **_GREEDY)
    return out


def steps_of(model: Any) -> int:
    held = kept.decoders.get(model)
    return 0 if held is None else held.steps


def check(model: Any, *, served: bool) -> None:
    """Its text is that of the model unpatched, and steps served it or did not."""
    other = copy.deepcopy(model)
    hfpatch.restore(other)
    before = steps_of(model)
    wanted = write(other)
    assert torch.equal(write(model), wanted)
    assert (steps_of(model) > before) == served


class _Doubled(nn.Module):
    """What an adapter does to a linear layer."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    @property
    def weight(self) -> nn.Parameter:
        return self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(x)


def _layer(model: Any) -> Any:
    return model.model.layers[1]


def _hook(model: Any) -> None:
    _layer(model).mlp.register_forward_hook(lambda m, a, y: y * 1.5)


def _pre_hook(model: Any) -> None:
    _layer(model).register_forward_pre_hook(lambda m, a: (a[0] * 1.5, *a[1:]))


def _adapter(model: Any) -> None:
    attention = _layer(model).self_attn
    attention.q_proj = _Doubled(attention.q_proj)


def _own_forward(model: Any) -> None:
    mlp = _layer(model).mlp
    mlp.forward = lambda x: 0.5 * type(mlp).forward(mlp, x)


def _another_scale(model: Any) -> None:
    _layer(model).self_attn.scaling *= 0.5


def _another_epsilon(model: Any) -> None:
    _layer(model).input_layernorm.variance_epsilon = 0.3


def _new_weight(model: Any) -> None:
    mlp = _layer(model).mlp
    mlp.up_proj.weight = nn.Parameter(torch.randn_like(mlp.up_proj.weight))


def _moved_weight(model: Any) -> None:
    weight = _layer(model).mlp.up_proj.weight
    weight.data = weight.data * 1.1


def _in_place(model: Any) -> None:
    with torch.no_grad():
        _layer(model).mlp.up_proj.weight.mul_(1.1)


def _fewer_layers(model: Any) -> None:
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2


def _other_frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5


CHANGES = {
    **{f.__name__: (f, False) for f in (_hook, _pre_hook, _adapter, _own_forward)},
    **{f.__name__: (f, True) for f in (_new_weight, _moved_weight, _in_place, _another_scale)},
    **{f.__name__: (f, True) for f in (_another_epsilon, _other_frequencies)},
    "_fewer_layers": (_fewer_layers, True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed_within_the_call(name: str) -> None:
    change, served = CHANGES[name]
    model = patched()
    write(model)
    change(model)
    check(model, served=served)


def test_a_hook_that_goes_lets_steps_serve_again() -> None:
    model = patched()
    handle = _layer(model).mlp.register_forward_hook(lambda m, a, y: y * 1.5)
    check(model, served=False)
    handle.remove()
    check(model, served=True)


def test_training_and_autograd_go_to_the_original() -> None:
    model = patched()
    write(model)
    cache = None
    with torch.no_grad():
        cache = model(prompts(1)["input_ids"]).past_key_values
    before = steps_of(model)
    logits = model(torch.tensor([[5]]), past_key_values=cache).logits
    logits.sum().backward()
    assert model.lm_head.weight.grad is not None and steps_of(model) == before


def test_autocast_goes_to_the_original() -> None:
    model = patched()
    write(model)
    before = steps_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        write(model)
    assert steps_of(model) == before


def test_a_copy_a_pickle_and_another_dtype() -> None:
    model = patched()
    wanted = write(model)
    twin = copy.deepcopy(model)
    assert torch.equal(write(twin), wanted) and steps_of(twin) > 0
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(write(loaded), wanted) and "forward" not in loaded.__dict__
    model.to(torch.bfloat16)
    check(model, served=True)


def test_restore_frees_and_leaves_nothing() -> None:
    model = make("llama")
    before = {path: dict(m.__dict__) for path, m in model.named_modules()}
    wanted = write(model)
    for _ in range(3):
        hfpatch.apply(model)
        assert torch.equal(write(model), wanted)
        assert hfpatch.restore(model) > 0 and model not in kept.decoders
    assert {path: dict(m.__dict__) for path, m in model.named_modules()} == before
    assert torch.equal(write(model), wanted)
    hfpatch.apply(model)
    write(model)
    gone = weakref.ref(model)
    del model, before
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("value", [0, 1, 3])  # the prompt is the first
def test_a_streamer_that_restores_the_model(value: int) -> None:
    model, values = make("llama"), []
    wanted = write(model)

    class Restoring:
        def put(self, given: torch.Tensor) -> None:
            if len(values) == value:
                hfpatch.restore(model)
            values.append(given)

        def end(self) -> None:
            pass

    hfpatch.apply(model)
    text = model.generate(**prompts(1), **_GREEDY, streamer=Restoring())
    assert torch.equal(text, wanted) and len(values) == 9


def test_the_report_says_it_and_it_can_be_left_out() -> None:
    model = make("llama")
    swap = hfpatch.plan(model).swaps[0]
    assert (swap.path, swap.op, swap.class_name) == ("", "decoding", "LlamaForCausalLM")
    for arguments in ({"decoding": False}, {"mode": "training"}):
        report = hfpatch.apply(model, **arguments)
        assert not any("decoding" in (s.op, s.path) for s in report.swaps)
        assert model not in kept.decoders
    report = hfpatch.apply(model, exclude="LlamaForCausalLM")
    assert [s.kind for s in report.skips if s.path == ""] == ["excluded"]
    report = hfpatch.apply(model, kernels="torch")
    assert [s.kind for s in report.skips if s.path == ""] == ["off"]
    for wrong, error in (("always", ValueError), (1, TypeError), (None, TypeError)):
        with pytest.raises(error, match="`decoding`"):
            hfpatch.apply(model, decoding=wrong)


class _Wrong:
    """An engine that is off by a little too much."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def step(self, ids: Any, positions: Any, cache: Any, logits: Any, **kwargs: Any) -> None:
        self.inner.step(ids, positions, cache, logits, **kwargs)
        logits.mul_(1.001)


def test_an_engine_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    wanted = write(model)
    make_engine = step.make_engine
    monkeypatch.setattr(step, "make_engine", lambda *a: _Wrong(make_engine(*a)))
    hfpatch.apply(model)
    with pytest.warns(RuntimeWarning, match="decodes as it did: .* logits differ by 1.0e-03"):
        out = model.generate(**prompts(1), **_GREEDY)
    assert torch.equal(out, wanted) and steps_of(model) == 0
    assert "left as it was" in hfpatch.status(model).notes[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        assert torch.equal(model.generate(**prompts(1), **_GREEDY), wanted)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, DecodingError])
def test_a_step_that_fails_is_the_originals(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = patched()
    wanted = write(model)
    take = step.caches.take
    calls = []

    def failing(cache: Any, tokens: int, model: Any) -> Any:
        calls.append(tokens)
        if len(calls) == 3:
            raise error("no room")
        return take(cache, tokens, model)

    monkeypatch.setattr(step.caches, "take", failing)
    with pytest.warns(RuntimeWarning, match="no room|no memory"):
        out = model.generate(**prompts(1), **_GREEDY)
    assert torch.equal(out, wanted) and len(calls) > 4


_FULL = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: 12 bytes"


@pytest.mark.parametrize("where", ["make_engine", "take", "take, behind the proof", "a step"])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), RuntimeError(_FULL), RuntimeError("odd")], ids=str
)
def test_an_engine_that_cannot_be_had_is_the_originals(
    error: Exception, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's allocator on a CPU raises an error of no class of its own."""
    model = patched()
    wanted = write(model)
    kept.decoders[model].engines.clear()
    if where != "take, behind the proof":
        kept.decoders[model].trusted.clear()

    def fails(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as failing:
        if where == "a step":
            failing.setattr(Engine, "step", fails)
        elif where == "make_engine":
            failing.setattr(step, "make_engine", fails)
        else:
            failing.setattr(step.caches, "take", fails)
        with pytest.warns(RuntimeWarning, match="the engine failed|no memory"):
            assert torch.equal(model.generate(**prompts(1), **_GREEDY), wanted)
    assert torch.equal(write(model), wanted)


def test_engines_of_many_numbers_of_rows_do_not_pile_up() -> None:
    model = patched()
    plain = copy.deepcopy(model)
    hfpatch.restore(plain)
    for rows in (*range(1, 13), 2, 1):
        before = steps_of(model)
        for _ in range(2):
            assert torch.equal(write(model, rows), write(plain, rows))
        assert steps_of(model) > before and len(kept.decoders[model].engines) <= 8
    assert (1, 1) in kept.decoders[model].engines


def _registered(monkeypatch: pytest.MonkeyPatch, model: Any, name: str) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def louder(*args: Any, **kwargs: Any) -> Any:
        out, weights = sdpa_attention_forward(*args, **kwargs)
        return 1.3 * out, weights

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, louder)
    model.set_attn_implementation(name)


def _global_function(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module = sys.modules[transformers.LlamaForCausalLM.__module__]
    real = getattr(module, name)
    if name == "rotate_half":  # named by a function that the forward names
        monkeypatch.setattr(module, name, lambda x: 1.1 * real(x))
    else:
        monkeypatch.setattr(module, name, lambda q, k, *a, **kw: real(1.2 * q, k, *a, **kw))


def _global_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = nn.modules.module._global_forward_hooks
    monkeypatch.setitem(hooks, -1, lambda m, a, y: y * 1.2 if isinstance(m, nn.Linear) else None)


AROUND: dict[str, Callable[[pytest.MonkeyPatch, Any], object]] = {
    "attention of the user's": lambda patch, m: _registered(patch, m, "mine"),
    "the table of attentions": lambda patch, m: _registered(patch, m, "sdpa"),
    "a function": lambda patch, m: _global_function(patch, "apply_rotary_pos_emb"),
    "a function's function": lambda patch, m: _global_function(patch, "rotate_half"),
    "a hook on all modules": lambda patch, m: _global_hook(patch),
}


@pytest.mark.parametrize("when", ["before apply", "after a text"])
@pytest.mark.parametrize("what", AROUND)
def test_what_lies_around_a_model_is_looked_at(
    what: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched()  # what its class computes is known by now
    model = make("llama")
    if when == "after a text":
        hfpatch.apply(model)
        write(model)
        assert steps_of(model) > 0, kept.notes(model)
    AROUND[what](monkeypatch, model)
    if when == "before apply":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hfpatch.apply(model)
    check(model, served=False)
    monkeypatch.undo()
    if "hook" in what or "function" in what:
        check(model, served=when == "after a text" or "hook" in what)


@pytest.mark.parametrize("what", ["a function's function", "a hook on all modules"])
def test_what_passes_is_not_remembered(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a class computes is not asked under somebody's hook, and none is refused for good."""
    forget()
    AROUND[what](monkeypatch, make("llama"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(patched(), served=False)
    monkeypatch.undo()
    check(patched(), served=True)


def test_a_configuration_that_changes_is_another_proof() -> None:
    """Gemma 3 reads its softcap in each call."""
    model = patched("gemma3")
    write(model)
    model.config.final_logit_softcapping = 2.0
    logits = write(model), model(prompts(1)["input_ids"]).logits
    assert float(logits[1].abs().max()) <= 2.0
    check(model, served=True)


def test_settings_that_go_to_and_fro_are_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that drafts with the first layers sets their number twice for each few tokens: what is
    known of the model with all of them is kept meanwhile, and goes on serving."""
    model = patched("llama")
    plain = copy.deepcopy(model)
    hfpatch.restore(plain)
    early = {**_GREEDY, "max_new_tokens": 24, "assistant_early_exit": 1}
    described: list[Any] = []
    original = step.describe

    def counted(of: Any, *given: Any) -> Any:
        described.append(of.config.num_hidden_layers)
        return original(of, *given)

    monkeypatch.setattr(step, "describe", counted)
    for _ in range(2):
        before = steps_of(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text = model.generate(**prompts(1), **early)
        assert torch.equal(text, plain.generate(**prompts(1), **early))
        assert steps_of(model) > before
    assert described == [1]
    check(model, served=True)
    with torch.no_grad():  # weights that were written to while it was aside count
        model.model.layers[0].mlp.up_proj.weight.mul_(3)
    model.config.num_hidden_layers = 1
    check(model, served=False)
    model.model.layers[0].mlp.down_proj.weight.data = torch.ones_like(
        model.model.layers[0].mlp.down_proj.weight
    )
    model.config.num_hidden_layers = len(model.model.layers)
    check(model, served=True)


class _Halved(nn.Module):
    """What a quantization puts in the place of a linear layer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", linear.weight.detach().bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.get_buffer("weight").to(x.dtype))


@pytest.mark.parametrize("how", ["by its modules", "for good", "by its settings", "copied"])
def test_weights_that_a_model_had_are_freed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a description nothing is kept of the model before: to quantize it frees memory."""
    model = patched("llama")
    if how == "copied":
        monkeypatch.setitem(vars(step), "describe", _unexplained)
        model = copy.deepcopy(model)
    elif how == "for good":
        monkeypatch.setattr(step, "_LIMITS", dict.fromkeys(step._LIMITS, 0.0))
    write(model)
    if how == "by its settings":
        model.config.num_hidden_layers = 1
        write(model)
    mlp = model.model.layers[0].mlp
    weight = weakref.ref(mlp.up_proj.weight)
    mlp.up_proj = _Halved(mlp.up_proj).eval()
    write(model)
    gc.collect()
    assert weight() is None
    check(model, served=False)


def _unexplained(model: Any) -> Any:
    raise Unexplained("it is a test")


def test_a_model_that_is_described_again_goes_on() -> None:
    model = patched("llama")
    write(model)
    projection = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = _Halved(projection).eval()
    check(model, served=False)
    model.model.layers[0].mlp.up_proj = projection
    check(model, served=True)
