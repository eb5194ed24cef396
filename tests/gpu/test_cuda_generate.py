"""`generate` on a GPU: each mode of it on a patched model and on the model unpatched, and the loop
that does not wait for the GPU after every token."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from typing import Any

import pytest
import torch

# ruff: noqa: F401
from decoding.families import FAMILIES, make, prompts
from decoding.loop_cases import (
    accepted,
    loops_of,
    on,
    pair_of,
    test_a_cache_goes_on_between_both,
    test_a_default_device_that_is_another,
    test_a_generate_of_the_users_stays,
    test_a_hook_in_the_middle_of_a_text,
    test_a_mode,
    test_a_model_that_changes_under_a_streamer,
    test_a_streamer_gets_each_token_once,
    test_a_streamer_that_raises_leaves_the_cache_usable,
    test_a_text_that_ends_behind_its_last_engine_step,
    test_a_text_that_no_engine_steps_in,
    test_a_text_that_outgrows_its_room_and_ends_by_one_of_three,
    test_another_text_in_the_middle_of_one,
    test_copies_restore_and_pickles,
    test_greedy_tokens_are_chosen_by_the_steps,
    test_hooks_of_the_model_itself_are_called,
    test_nothing_is_kept,
    test_texts_of_several_threads_choose_their_own_tokens,
    test_what_goes_to_transformers_loop,
)
from support.nearness import assert_as_near
from support.steps import drawn
from transformers import Qwen3Config, Qwen3ForCausalLM

import hfpatch
from hfpatch.decoding import kept

pytestmark = pytest.mark.gpu


@pytest.fixture
def device(kernels_module: object) -> str:
    return "cuda"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(device: str, family: str) -> None:
    """Greedy and sampled texts of left-padded rows, to an end in their middle."""
    plain, patched = pair_of(family, device)
    inputs = on(device, prompts(3))
    for more in ({"do_sample": False}, {"do_sample": True, "top_k": 30}):
        for end in (None, 7, 123):
            texts = []
            for model in (plain, patched):
                torch.manual_seed(5)
                texts.append(model.generate(**inputs, max_new_tokens=20, eos_token_id=end, **more))
            assert torch.equal(texts[1], texts[0])
    # Phi-3 prepares its inputs by code of its own, so that transformers' loop stays
    assert loops_of(patched) >= 6 or family.startswith("phi3")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "llama"])
def test_half_types_follow_the_original(device: str, family: str, dtype: torch.dtype) -> None:
    """Teacher forced: steps are no farther from fp32 than the original's."""
    assert_as_near(drawn(family, dtype, device, tokens=40), dtype, family)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_text_that_leaves_the_graph_for_few_keys(device: str, rows: int) -> None:
    """It ends at 1,024 keys, in the middle of a text whose steps choose its tokens; the next text
    is a short one again."""
    plain, patched = pair_of("llama", device)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 150, (rows, 1017), generator=generator).to(device)
    for given in (ids, ids[:, -9:]):
        texts = [
            m.generate(given, max_new_tokens=16, do_sample=False, pad_token_id=0, eos_token_id=None)
            for m in (plain, patched)
        ]
        assert torch.equal(*texts)
    graphs = kept.decoders[patched].engines[rows, 1].graphs
    assert {key[-2] for key in graphs._graphs} == {graphs._few_keys, 0}


def test_threads_write_each_its_own_text(device: str) -> None:
    plain, patched = pair_of("qwen3", device)
    more: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    given = [
        {k: v[i : i + 1] for k, v in on(device, prompts(4, padding=0)).items()} for i in range(4)
    ]
    wanted = [plain.generate(**own, **more) for own in given]
    got: dict[int, torch.Tensor] = {}

    def write(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            got[i] = patched.generate(**given[i], **more).cpu()

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[i], wanted[i].cpu()) for i in range(4))


def test_what_happens_to_the_model_between_texts(device: str) -> None:
    """Weights changed, moved and replaced, adapters' hooks, another dtype, another device."""
    plain, patched = pair_of("qwen3", device)
    inputs = on(device, prompts(2))
    more: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}

    def change(model: Any, step: int) -> None:
        layer = model.model.layers[1]
        with torch.no_grad():
            if step == 0:
                layer.mlp.up_proj.weight.mul_(1.3)
            elif step == 1:
                weight = layer.mlp.down_proj.weight
                layer.mlp.down_proj.weight = torch.nn.Parameter(weight.flip(0).clone())
            elif step == 2:
                layer.self_attn.v_proj.weight.data = layer.self_attn.v_proj.weight.data * 0.5
            elif step == 3:
                layer.mlp.register_forward_hook(lambda m, a, y: y * 1.5)
            elif step == 4:
                layer.mlp._forward_hooks.clear()
            elif step == 5:
                model.to("cpu").to(device)
            else:
                model.to(torch.float64).to(torch.float32)

    for step in range(7):
        for model in (plain, patched):
            change(model, step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(patched.generate(**inputs, **more), plain.generate(**inputs, **more))


@pytest.mark.parametrize(("rows", "served"), [(17, True), (40, True), (128, True), (129, False)])
def test_many_rows(device: str, rows: int, served: bool) -> None:
    """Products of more than 16 are cuBLASLt's; more than 128 are the original's."""
    plain, patched = pair_of("qwen3", device)
    inputs = on(device, prompts(rows))
    more = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": [7, 123], "pad_token_id": 1}
    expected = plain.generate(**inputs, **more)
    for _ in range(2):  # the first steps are judged
        before = kept.decoders[patched].steps
        assert torch.equal(patched.generate(**inputs, **more), expected)
    assert (kept.decoders[patched].steps > before) is served


def test_memory_of_many_texts(device: str) -> None:
    """A cache's memory goes with the cache; engines do not grow."""
    _, patched = pair_of("llama", device)
    inputs = on(device, prompts(2))
    sizes = []
    for i in range(30):
        patched.generate(**inputs, max_new_tokens=6, do_sample=i % 2 == 0, eos_token_id=None)
        sizes.append(torch.cuda.memory_allocated())
    assert sizes[-1] == sizes[10]
    hfpatch.restore(patched)
    assert patched not in kept.decoders


@pytest.mark.parametrize("rows", [1, 4])
def test_memory_beside_the_cache_is_a_twentieth_of_the_weights(device: str, rows: int) -> None:
    """While a text is written, its prompt's graph and its step's included."""
    wide = {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 128, "vocab_size": 32000}
    config = Qwen3Config(num_hidden_layers=8, num_key_value_heads=2, num_attention_heads=16, **wide)
    with torch.device(device):  # of the size of 1B: PyTorch's 32 MiB for products count as well
        plain = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    patched = copy.deepcopy(plain)
    hfpatch.apply(patched)
    inputs = on(device, prompts(rows, 100))
    more = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    more |= {"return_dict_in_generate": True}
    plain.generate(**inputs, **more)
    weights = sum(p.numel() * p.element_size() for p in patched.parameters())
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        out = patched.generate(**inputs, **more)
        assert kept.decoders[patched].steps
        used = torch.cuda.memory_allocated() - before
        a_token = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        cache = rows * 160 * a_token
        assert cache < used <= cache + 0.05 * weights, (used - cache) / weights
        del out
        gc.collect()
        assert torch.cuda.memory_allocated() - before <= 0.05 * weights
    assert kept.decoders[patched].prompts_served


def test_a_deleted_model_gives_its_memory_back(device: str) -> None:
    """After one pass of Python's collector, its graphs included."""
    config = Qwen3Config(hidden_size=1024, num_hidden_layers=8, vocab_size=32000)
    left = []
    for _ in range(2):
        with torch.device(device):
            model: Any = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
        hfpatch.apply(model)
        for rows in (1, 2):
            for _ in range(2):
                inputs = on(device, prompts(rows, 100))
                model.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=None)
        assert kept.decoders[model].steps and kept.decoders[model].prompts_served
        del model, inputs
        gc.collect()
        left.append(torch.cuda.memory_allocated())
    assert left[1] <= left[0] + 2**20, left
