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


def check(cls: type, module: nn.Module, mutation: str, folder: Path) -> str:
    """What came of it."""
    with torch.no_grad():
        for p in module.parameters():  # ones and zeros hide what becomes of them
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.2 + 0.5)
    calls = calls_of(module)
    if not calls:
        return "no calls"
    changed = mutated(module, mutation, folder)
    if changed is None:
        return "no such thing"
    twin = copy.deepcopy(changed)
    model = nn.Sequential()
    model.add_module("norm", changed)
    swapped = any(s.path == "norm" for s in hfpatch.apply(model).swaps)
    where = (f"{cls.__module__}.{cls.__name__}", mutation)
    if mutation in REFUSED:
        assert not swapped, where
        return "refused"
    for training in (False, True) if mutation == "in training" else (False,):
        for m in (model, twin):
            m.train(training)
        for call in calls:
            exact = _result(copy.deepcopy(twin).double(), tuple(x.double() for x in call))
            assert _alike(_result(changed, call), _result(twin, call), exact), (*where, call)
    return "right" if swapped else "refused"


def _run(only: str, folder: Path, share: int) -> tuple[int, Counter[str], Counter[str]]:
    found = leaves_of(only, diffusers=not only)
    outcomes: Counter[str] = Counter()
    as_they_are: Counter[str] = Counter()
    for i, (cls, module) in enumerate(found.items()):
        for mutation in ("nothing", *MUTATIONS[i % share :: share]):
            outcome = check(cls, copy.deepcopy(module), mutation, folder)
            (as_they_are if mutation == "nothing" else outcomes)[outcome] += 1
    return len(found), outcomes, as_they_are


def test_a_sample(tmp_path: Path) -> None:
    count, outcomes, as_they_are = _run(SAMPLE, tmp_path, 4)
    assert count >= 8 and outcomes["refused"] >= 10 and outcomes["right"] >= 1
    # else it would be another thing that they are refused for
    assert as_they_are["right"] >= 4, as_they_are


@pytest.mark.exhaustive
def test_every_class(tmp_path: Path) -> None:
    count, outcomes, as_they_are = _run("", tmp_path, 1)
    print(f"{count} classes, mutations {dict(outcomes)}, as they are {dict(as_they_are)}")
    assert count >= 200 and outcomes.total() >= 10 * count
    assert outcomes["no calls"] <= outcomes.total() / 10
    assert as_they_are["right"] >= 0.4 * count
