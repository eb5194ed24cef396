"""Loss curves on real English, of SmolLM2-135M's real weights and of small models: in fp32 a
patched model's curve is the original's, in bf16 it is no farther from that of fp32."""

from __future__ import annotations

import copy

import pytest
import torch
from support.curves import _smollm2, curve, draws_of, trained
from support.nearness import assert_as_near
from test_layers import build
from test_mini_convergence import text


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


@pytest.fixture
def _weights() -> None:
    try:
        _smollm2.gguf_file()
    except FileNotFoundError as e:
        pytest.skip(str(e))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("steps", "tokens"),
    # the loss's gradients are made in its backward, and, with more tokens than the 576 that the
    # hidden states are wide, in its forward
    [(50, 64), (6, 640)],
)
@pytest.mark.usefixtures("_weights")
def test_a_curve_in_fp32_is_the_originals(steps: int, tokens: int) -> None:
    theirs, ours = (curve(patched, steps, tokens) for patched in (False, True))
    apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"{steps} steps of {tokens} tokens: loss {theirs[0]:.4f} to {theirs[-1]:.4f}, ", end="")
    print(f"{apart:.2g} apart at most")
    assert apart <= 1e-4, (ours, theirs)
    assert theirs[-1] != theirs[0]  # it was trained


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("_weights")
def test_a_curve_in_bf16_is_no_farther_from_fp32() -> None:
    exact = curve(False, 200, 32)
    theirs, ours = (curve(patched, 200, 32, torch.bfloat16) for patched in (False, True))
    assert exact[0] != exact[-1]
    draws = draws_of(ours, theirs, exact, 10)
    print("SmolLM2", ", ".join(f"{d.ours:.3g}/{d.theirs:.3g}" for d in draws))
    assert_as_near(draws, torch.bfloat16, "SmolLM2's loss")


#: Other weights, and another place in the text.
SEEDS = 6


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2"])
def test_curves_of_small_models_in_bf16_are_no_farther_from_fp32(family: str) -> None:
    """200 steps from the same weights."""
    draws = []
    for seed in range(SEEDS):
        start = build(family)
        torch.manual_seed(seed)
        with torch.no_grad():
            for p in start.parameters():
                p.add_(0.02 * torch.randn_like(p))
        start.to(torch.bfloat16)
        data = text(99, 1, 24, 200).roll(29 * seed, 0)
        exact = trained(copy.deepcopy(start).float(), data, False, 1e-3)
        theirs, ours = (trained(copy.deepcopy(start), data, p, 1e-3) for p in (False, True))
        assert sum(exact[-50:]) < 0.97 * sum(exact[:50]), "it was not trained"
        draws += draws_of(ours, theirs, exact, 1)
    print(family, ", ".join(f"{d.ours:.3g}/{d.theirs:.3g}" for d in draws))
    assert_as_near(draws, torch.bfloat16, f"{family}'s loss")
