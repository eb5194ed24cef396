"""`apply` and first calls draw nothing from the user's random states, and seed none of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from torch import nn

import hfpatch
from hfpatch.decoding import layer as decoding_layer


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: what is proven depends on them."""


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The seeds of GPUs, which must be none. `torch.manual_seed` seeds their generators too, and
    what puts back a CPU's state does not put back theirs: a user's seed would be gone."""
    found: list[int] = []

    def noted(seed: int) -> None:
        found.append(seed)

    decoding_layer.forget()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", noted)
    torch.manual_seed(7)
    assert found.pop() == 7  # it goes there
    yield found
    assert found == []


def states() -> list[Any]:
    kind, keys, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), [kind, list(keys), *rest]]


def built(name: str) -> nn.Module:
    entry = zoo.ENTRIES[name]
    with pytest.MonkeyPatch.context() as patch:  # the zoo seeds what it builds
        patch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
        model: nn.Module = entry.build(torch.float32)
    return model


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "ltx", "flux", "sd15-unet"])
def test_random_states_are_left_alone(name: str, mode: str) -> None:
    entry, model = zoo.ENTRIES[name], built(name)
    inputs = entry.inputs(model, torch.float32)
    before = states()
    if mode == "training":
        hfpatch.apply(model, mode="training")
    else:
        hfpatch.apply(model, blocks=True)
    assert states() == before
    entry.run(model, inputs)
    assert states() == before
    if mode == "training":
        out = entry.output(model(**inputs))
        out.float().square().mean().backward()
        assert states() == before


def test_adapters_are_proven_without_seeding() -> None:
    peft = pytest.importorskip("peft")
    model = built("llama")
    options = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(model, options)
    ids = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    before = states()
    hfpatch.apply(model, mode="training")
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    assert states() == before
