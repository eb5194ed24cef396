"""Each leaf class that is swapped in any model of both libraries, with one thing of it changed.

`apply` refuses the mutated class, or what it computes then is what the mutated class computes.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mutated_classes import MUTATIONS, calls_of, mutated
from support.swapped_leaves import leaves_of
from torch import Tensor, nn

import hfpatch
from hfpatch.progress import disable_progress_bars, enable_progress_bars

#: Of the normal run.
SAMPLE = r"\((llama|gemma2|bert|t5|phi3|convnext)\)$"
PARTS = 48
#: What no call can notice, so that such a class is never swapped.
REFUSED = ("a counter", "a switch")


@pytest.fixture(autouse=True)
def _quiet(kernels_module: object) -> Iterator[None]:
    import diffusers
    import transformers

    levels = [(lib.logging, lib.logging.get_verbosity()) for lib in (transformers, diffusers)]
    disable_progress_bars()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logging, _ in levels:
                logging.set_verbosity_error()
            yield
        finally:
            for logging, level in levels:
                logging.set_verbosity(level)
            enable_progress_bars()


def _result(module: nn.Module, call: tuple[Tensor, ...]) -> Any:
    try:
        with torch.no_grad():
            return module(*call)
    except Exception as e:  # the module's own
        return type(e)


def _gradients(module: nn.Module, call: tuple[Tensor, ...]) -> Any:
    """Of a call's inputs and of the parameters; None where there is none."""
    given = tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in call)
    leaves = [x for x in (*given, *module.parameters()) if x.requires_grad]
    try:
        with torch.enable_grad():
            y = module(*given)
            upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
            return torch.autograd.grad(y, leaves, upstream.to(y.dtype), allow_unused=True)
    except Exception as e:  # the module's own
        return type(e)


def _like_gradients(found: Any, expected: Any, exact: Any) -> bool:
    """As `_alike`; a sum over all rows may cancel, so against the largest of each."""
    if not isinstance(expected, tuple) or not isinstance(found, tuple):
        return found is expected
    true = exact if isinstance(exact, tuple) else (None,) * len(expected)
    for y, want, best in zip(found, expected, true, strict=True):
        if y is None or want is None:
            if (
                y is not want
                and not (y is None and not want.any())
                and not (want is None and not y.any())
            ):
                return False
            continue
        if not torch.equal(y.isnan(), want.isnan()):
            return False
        y, want = y.double().nan_to_num(), want.double().nan_to_num()
        allowed = 1e-3 * want.abs().max() + 1e-9 if want.numel() else 0.0
        if best is not None and want.numel():
            allowed = allowed + 4 * (want - best.nan_to_num()).abs().max()
        if not bool(((y - want).abs() <= allowed).all()):
            return False
    return True


def _alike(y: Any, expected: Any, exact: Any) -> bool:
    """`exact`: the same in fp64. Where that takes it far from fp32, as in a GELU's tail, `y` may
    be as far."""
    if not isinstance(expected, Tensor) or not isinstance(y, Tensor):
        return y is expected
    if y.shape != expected.shape or y.dtype != expected.dtype:
        return False
    if not torch.equal(y.isnan(), expected.isnan()):
        return False
    y, expected = y.double().nan_to_num(), expected.double().nan_to_num()
    allowed = 2e-4 * expected.abs().amax(-1, keepdim=True) + 1e-12
    if isinstance(exact, Tensor):
        allowed = allowed + 4 * (expected - exact.nan_to_num()).abs().amax(-1, keepdim=True)
    return bool(((y - expected).abs() <= allowed).all())


def check(cls: type, module: nn.Module, mutation: str, folder: Path, mode: str) -> str:
    """What came of it."""
    with torch.no_grad():
        for p in module.parameters():  # ones and zeros hide what becomes of them
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.2 + 0.5)
    for m in module.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0  # two draws differ
    calls = calls_of(module)
    if not calls:
        return "no calls"
    changed = mutated(module, mutation, folder)
    if changed is None:
        return "no such thing"
    twin = copy.deepcopy(changed)
    model = nn.Sequential()
    model.add_module("norm", changed)
    model.train(mode == "training")
    swapped = any(s.path == "norm" for s in hfpatch.apply(model, mode=mode).swaps)
    where = (f"{cls.__module__}.{cls.__name__}", mutation)
    if mutation in REFUSED:
        assert not swapped, where
        return "refused"
    trained = mode == "training"
    for training in (False, True) if mutation == "in training" else (trained,):
        for m in (model, twin):
            m.train(training)
        for call in calls:
            exact = _result(copy.deepcopy(twin).double(), tuple(x.double() for x in call))
            assert _alike(_result(changed, call), _result(twin, call), exact), (*where, call)
            exact = _gradients(copy.deepcopy(twin).double(), tuple(x.double() for x in call))
            pair = _gradients(changed, call), _gradients(twin, call)
            assert _like_gradients(*pair, exact), (*where, "gradients", call)
    return "right" if swapped else "refused"


def _run(
    found: dict[type, nn.Module], folder: Path, share: int, mode: str
) -> tuple[Counter[str], int]:
    """How often each came of a mutation; how many classes are swapped as they are."""
    outcomes: Counter[str] = Counter()
    swapped = 0
    for i, (cls, module) in enumerate(found.items()):
        # else it may be another thing that a mutated class is refused for
        swapped += check(cls, copy.deepcopy(module), "nothing", folder, mode) == "right"
        for mutation in MUTATIONS[1:][i % share :: share]:
            outcomes[check(cls, copy.deepcopy(module), mutation, folder, mode)] += 1
    return outcomes, swapped


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_sample(mode: str, tmp_path: Path) -> None:
    found = leaves_of(SAMPLE)
    outcomes, swapped = _run(found, tmp_path, 4, mode)
    assert len(found) >= 8 and swapped >= 4
    assert outcomes["refused"] >= 10 and outcomes["right"] >= 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("part", range(PARTS))
def test_every_class(part: int, mode: str, tmp_path: Path) -> None:
    """Of all models in so many parts, each in less than the time that a test may take."""
    found = leaves_of("", diffusers=True, part=(part, PARTS))
    outcomes, swapped = _run(found, tmp_path, 1, mode)
    print(f"part {part}: {len(found)} classes, {swapped} swapped as they are, {dict(outcomes)}")
    assert outcomes["no calls"] <= outcomes.total() / 2
    assert swapped or not found
