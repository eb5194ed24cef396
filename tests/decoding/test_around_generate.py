"""What people do around `generate`: adapters, offload, streamers, caches from elsewhere. Texts are
those of the model unpatched."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate
import pytest
import torch
from decoding.families import device, here, make, prompts
from transformers import DynamicCache

import hfpatch
from hfpatch.decoding import kept, loop

_GREEDY: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}


@pytest.fixture(autouse=True)
def _quiet(kernels_module: ModuleType) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def text(model: Any, rows: int = 1) -> torch.Tensor:
    out: torch.Tensor = model.generate(**prompts(rows), **_GREEDY)
    return out


def pair() -> tuple[Any, Any]:
    """A model, and one that was patched and has written a text."""
    plain = make("llama")
    patched = copy.deepcopy(plain)
    hfpatch.apply(patched)
    assert torch.equal(text(patched), text(plain))
    return plain, patched


def adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(7)
    config = peft.LoraConfig(
        r=4, lora_alpha=64, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(model, config).eval()


def test_an_adapter_that_comes_merges_and_goes() -> None:
    base, patched = pair()
    first = text(base)
    plain, ours = adapted(copy.deepcopy(base)), adapted(patched)
    assert torch.equal(text(ours), text(plain)) and not torch.equal(text(plain), first)
    for step in ("merge_adapter", "unmerge_adapter", "merge_and_unload"):
        found = [getattr(m, step)() for m in (plain, ours)]
        if step == "merge_and_unload":
            plain, ours = found
        steps = kept.decoders[patched].steps
        for _ in range(2):
            assert torch.equal(text(ours), text(plain)), step
    assert kept.decoders[patched].steps > steps  # merged weights are the layers' own


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offload_behind_apply(where: str, tmp_path: Path) -> None:
    plain, patched = pair()
    if where == "cpu":
        accelerate.cpu_offload(patched, execution_device=torch.device("cpu"))
    else:
        accelerate.disk_offload(patched, str(tmp_path), execution_device=torch.device("cpu"))
    assert torch.equal(text(patched), text(plain))


def test_a_cache_on_another_device_is_the_originals_error() -> None:
    plain, patched = pair()

    def cached(model: Any, other: str) -> DynamicCache:
        with torch.no_grad():
            cache: DynamicCache = model(**prompts(1), use_cache=True).past_key_values
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.to(other), layer.values.to(other)
        return cache

    for other in sorted({"meta", "cpu"} - {device()}):
        errors = []
        for model in (plain, patched):
            cache = cached(model, other)
            with pytest.raises(Exception) as raised, torch.no_grad():  # noqa: PT011
                model(here(torch.tensor([[5]])), past_key_values=cache)
            errors.append((type(raised.value), str(raised.value)))
        assert errors[0] == errors[1]
        steps = kept.decoders[patched].steps
        assert torch.equal(text(patched), text(plain))
        assert kept.decoders[patched].steps > steps


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_token_is_streamed_one_step_late_at_most(
    ahead: bool, sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "AHEAD", frozenset({"cpu"}) if ahead else frozenset())
    _, patched = pair()
    held = kept.decoders[patched]
    seen: list[int] = []

    class Streamer:
        """How many steps were there when a token came."""

        def put(self, _: torch.Tensor) -> None:
            seen.append(held.steps)

        def end(self) -> None:
            pass

    settings = {**_GREEDY, "do_sample": sample}
    before = held.steps
    patched.generate(**prompts(1), **settings, streamer=Streamer())
    # first the prompt; token n is chosen behind step n - 1
    late = [steps - before - n for n, steps in enumerate(seen[1:])]
    assert len(seen) == 11 and all(0 <= n <= 1 for n in late), late
