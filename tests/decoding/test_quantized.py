"""Steps with weights of 8 bits, for those who ask for them: right for the weights that they have,
and near the model's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from decode_samples import rows_of_numbers
from decoding.families import make, prompts
from support.decoders import decoder, random_shape, table
from support.engines import SMALL, arguments, check, padded, pass_held_to

import hfpatch
from hfpatch.decoding import kept, step
from hfpatch.decoding.engine import Engine, unsupported
from hfpatch.decoding.quantized import eight_bits, rows_of_bytes, weights_of, with_weights
from hfpatch.decoding.spec import Model

Tensor = torch.Tensor
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def as_numbers(model: Model) -> Model:
    """The model that one with weights of 8 bits is, in numbers."""
    return with_weights(model, rows_of_numbers)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 1), (5, 7), (8, 64), (1, 33)], ids=str)
def test_a_weight_is_rounded_by_half_a_step_at_most(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = torch.randn(shape[0] * 2, shape[1], generator=torch.Generator().manual_seed(0))
    weight = (weight * torch.logspace(-3, 3, len(weight))[:, None]).to(dtype)[::2]  # strided
    weight[0] = 0
    rows = rows_of_bytes(weight)
    assert rows.dtype == torch.int8 and rows.shape == (shape[0], shape[1] + 4)
    step = weight.float().abs().amax(1, keepdim=True) / 127
    off = (rows_of_numbers(rows) - weight.float()).abs()
    assert bool((off <= 0.501 * step).all()) and not bool(rows_of_numbers(rows)[0].any())
    greatest = weight.float().abs().argmax(1, keepdim=True)
    torch.testing.assert_close(
        rows_of_numbers(rows).gather(1, greatest), weight.float().gather(1, greatest)
    )


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        rows_of_bytes(torch.tensor([[1.0, number]]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_random_decoders(kernels_module: ModuleType, dtype: torch.dtype, seed: int) -> None:
    model = eight_bits(decoder(random_shape(seed), dtype, seed=seed))
    rows, tokens, length = (1, 2, 3, 5, 16)[seed % 5], 1 + seed % 4, (0, 5, 64, 130)[seed % 4]
    ids, positions = arguments(model, rows, tokens, length, seed)
    mask = padded(rows, length + tokens, length) if seed % 3 == 0 else None
    cache = table(model, rows, length, length + tokens + 2)
    engine = Engine(model, rows, tokens, package=kernels_module)
    check(engine, ids, positions, cache, mask, seed, as_numbers(model))


@pytest.mark.parametrize("name", list(SMALL))
def test_every_kernel(kernels_module: ModuleType, name: str) -> None:
    shape, rows, tokens, length, masked = SMALL[name]
    model = eight_bits(decoder(shape, torch.float32, seed=3))
    ids, positions = arguments(model, rows, tokens, length)
    mask = padded(rows, length + tokens, length) if masked else None
    engine = Engine(model, rows, tokens, package=kernels_module)
    cache = table(model, rows, length, length + tokens)
    check(engine, ids, positions, cache, mask, 0, as_numbers(model))


@pytest.mark.parametrize("level", ["avx2", "baseline"])
def test_other_instruction_sets(kernels_dir: Path, level: str) -> None:
    pass_held_to(level, Path(__file__), "random_decoders")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w[:, :-1].contiguous(), r"`head.weight` must have shape \[-1, \d+ \+ 4\]"),
        (lambda w: w.t().contiguous().t(), "`head.weight` must have contiguous rows"),
        (lambda w: w.to(torch.int16), "`head.weight`"),
        (lambda w: w.view(torch.uint8), "`head.weight`"),
    ],
)
def test_bad_weights_are_named(kernels_module: ModuleType, change: Any, said: str) -> None:
    model = eight_bits(decoder(random_shape(0), torch.float32))
    model = replace(model, head=replace(model.head, weight=change(model.head.weight)))
    found = unsupported(model, 1, package=kernels_module)
    assert found is not None
    assert re.search(said, found), found


# -------------------------------------------------------------------------------------------------
# Models


def logits_of(model: Any, ids: Tensor) -> Tensor:
    """Teacher forced, token by token."""
    with torch.no_grad():
        out = model(ids[:, :4], use_cache=True, logits_to_keep=1)
        rows = [out.logits[:, -1]]
        for i in range(4, ids.shape[1]):
            out = model(ids[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
            rows.append(out.logits[:, -1])
    return torch.stack(rows).double()


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "phi3", "mixtral"])
def test_a_model(name: str, kernels_module: ModuleType) -> None:
    model = make(name)
    ids = torch.arange(12)[None] % 7 + 3
    original = logits_of(model, ids)
    report = hfpatch.apply(model, decoding="int8")
    (entry,) = (s for s in report.swaps if s.op == "decoding")
    assert entry.formula == "decoding steps of up to 16 rows in one call, weights of 8 bits"
    found = logits_of(model, ids)
    relative = ((found - original)[1:].norm() / original[1:].norm()).item()
    assert 1e-5 < relative < 0.1, "0 would mean that the weights are the model's own"
    (note,) = (n for n in hfpatch.status(model).notes if n.startswith("decoding: "))
    assert note.endswith("weights of 8 bits") and kept.decoders[model].steps >= 6
    hfpatch.restore(model)
    assert torch.equal(logits_of(model, ids), original)
    hfpatch.apply(model)
    logits_of(model, ids)
    assert not any("8 bits" in n for n in hfpatch.status(model).notes)


def test_generate_takes_them(kernels_module: ModuleType) -> None:
    model = make("llama")
    hfpatch.apply(model, decoding="int8")
    settings = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    first = model.generate(**prompts(3), **settings)
    assert torch.equal(model.generate(**prompts(3), **settings), first)
    assert kept.decoders[model].steps >= 12


def test_weights_that_change_are_rounded_again(kernels_module: ModuleType) -> None:
    model = make("llama")
    ids = torch.arange(10)[None] + 3
    hfpatch.apply(model, decoding="int8")
    logits_of(model, ids)
    held = kept.decoders[model]
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(3)
    logits_of(model, ids)  # its first step is the original's, beside which the engine is judged
    found, steps = logits_of(model, ids), held.steps
    fresh = make("llama")
    with torch.no_grad():
        fresh.model.layers[0].mlp.down_proj.weight.mul_(3)
    hfpatch.apply(fresh, decoding="int8")
    logits_of(fresh, ids)
    assert torch.equal(found, logits_of(fresh, ids)) and steps > 6
    assert len(weights_of(held.described.model)) == 4 * 7 + 1


def _one_column(weight: torch.nn.Parameter) -> None:
    weight.data[:, 5] = 0


def _rows(weight: torch.nn.Parameter) -> None:
    weight.data[2:9] *= 2


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a product": lambda m: m.model.layers[0].mlp.down_proj.weight.data.mul_(3),
    "rows": lambda m: _rows(m.model.layers[1].self_attn.q_proj.weight),
    "a column": lambda m: _one_column(m.model.layers[1].mlp.up_proj.weight),
    "the head": lambda m: m.lm_head.weight.data.add_(0.1),
    "a merged adapter": lambda m: _merge(m),
}


def _merge(model: Any) -> None:
    """PEFT writes through `.data`."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(7)
    config = peft.LoraConfig(
        r=4, lora_alpha=64, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    peft.get_peft_model(model, config).merge_and_unload().eval()


@pytest.mark.parametrize("change", CHANGES)
def test_writes_that_pytorch_does_not_count_are_noticed(
    change: str, kernels_module: ModuleType
) -> None:
    model, fresh = make("llama"), make("llama")
    ids = torch.arange(10)[None] + 3
    hfpatch.apply(model, decoding="int8")
    before = [logits_of(model, ids) for _ in range(2)][1]
    for one in (model, fresh):
        CHANGES[change](one)
    hfpatch.apply(fresh, decoding="int8")
    found, wanted = ([logits_of(m, ids) for _ in range(2)][1] for m in (model, fresh))
    assert torch.equal(found, wanted) and not torch.equal(found, before)
    assert kept.decoders[model].steps > 9


def test_weights_that_cannot_be_rounded_are_tried_once(
    kernels_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def counted(model: Model) -> Model:
        tried.append(1)
        return eight_bits(model)

    monkeypatch.setattr(step, "eight_bits", counted)
    model = make("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(float("nan"))
    hfpatch.apply(model, decoding="int8")
    for _ in range(3):
        logits_of(model, torch.arange(10)[None] + 3)
    assert len(tried) == 1


@pytest.mark.parametrize("choice", ["int4", "8", ""])
def test_another_choice_is_refused(choice: str) -> None:
    model = make("llama")
    with pytest.raises(ValueError, match="`decoding` must be 'auto', 'int8', True or False"):
        hfpatch.apply(model, decoding=choice)
    assert not hfpatch.status(model).swaps


def test_where_there_are_none_a_warning_says_why(kernels_module: ModuleType) -> None:
    model = make("llama")
    model.model.layers[0].mlp.register_forward_hook(lambda m, a, y: y * 2)
    with pytest.warns(RuntimeWarning, match="`decoding='int8'`: the steps of `LlamaForCausalLM`"):
        hfpatch.apply(model, decoding="int8")


def test_a_weight_that_is_mended_is_taken_up(kernels_module: ModuleType) -> None:
    """While it is not finite there is nothing to round, and the original serves."""
    model = make("llama")
    weight = model.model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        held, weight[0, 0] = weight[0, 0].clone(), float("inf")
    hfpatch.apply(model, decoding="int8")
    ids = torch.arange(10)[None] + 3
    with pytest.warns(RuntimeWarning, match="a weight holds a number that is not finite"):
        logits_of(model, ids)
    assert kept.decoders[model].steps == 0
    with torch.no_grad():
        weight[0, 0] = held
    logits_of(model, ids)
    assert kept.decoders[model].steps > 3
