"""The decoding functions by the C interface on a GPU; on the CPU: `test_c_api_decode.py`.

What the kernels' own paths are is visited by `test_decoding_engine.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import decode_proofs as proofs
import pytest
import torch
from c_api import Library
from decode_samples import BY_ID, CHOICES, STEPS
from proofs import assert_no_growth, in_threads

pytestmark = pytest.mark.gpu
TESTS = Path(__file__).resolve().parents[1]
OF_DTYPE = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str
)  # fmt: skip
#: Weights of 8 bits are the CPU's.
SAMPLES = [s for s in (*STEPS, *CHOICES) if not getattr(s, "eight_bits", False)]
EVERY = pytest.mark.parametrize("name", [s.id for s in SAMPLES])
BATCHES = [s.id for s in SAMPLES if s.op == "decode_step" and s.rows > 1]


@pytest.fixture(scope="module")
def library(kernels_module: ModuleType) -> Library:
    return Library(kernels_module.calls.library())


@OF_DTYPE
@EVERY
def test_numbers_and_memory(library: Library, name: str, dtype: torch.dtype) -> None:
    proofs.numbers(library, BY_ID[name], dtype, "cuda")
    proofs.memory(library, BY_ID[name], dtype, "cuda")


@OF_DTYPE
@pytest.mark.parametrize("name", BATCHES)
def test_rows(library: Library, name: str, dtype: torch.dtype) -> None:
    sample = BY_ID[name]
    proofs.keys_stay(library, sample, dtype, "cuda")
    proofs.rows_are_their_own(library, sample, dtype, "cuda")
    for value in (float("nan"), float("inf"), -float("inf")):
        proofs.odd_values(library, sample, dtype, value, "cuda")


def test_threads_with_a_stream_each(library: Library) -> None:
    """Each with results, scratch memory and cache of its own."""
    expected = {}
    for sample in SAMPLES:
        made = sample.make(torch.bfloat16, library.size, "cuda")
        proofs.call(library, sample, made)
        expected[sample.id] = proofs.results(made)

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(3 * len(SAMPLES)):
                sample = SAMPLES[(i + 5 * index) % len(SAMPLES)]
                made = sample.make(torch.bfloat16, library.size, "cuda")
                proofs.call(library, sample, made)
                proofs.assert_equal(proofs.results(made), expected[sample.id], sample.id)

    in_threads(work, 8)


def test_no_growth_in_memory(library: Library) -> None:
    for sample in (STEPS[0], CHOICES[1]):
        made = sample.make(torch.bfloat16, library.size, "cuda")

        def repeat(times: int, sample: object = sample, made: object = made) -> None:
            for _ in range(times):
                proofs.call(library, sample, made)  # type: ignore[arg-type]

        assert_no_growth(repeat, 2000, sample.op)


WRONG = """
import sys, torch
import c_api
from decode_samples import STEPS
library = c_api.Library(sys.argv[1])
made = STEPS[0].make(torch.float32, library.size, "cuda")
place = 2 + 5 + 1 + 12  # plan, numbers; embedding, head, final norm; a rope; q of the first layer
view = c_api.dltensor(made.arguments[3][place].cpu())
view.device.device_type = 2
made.arguments[3][place] = view
print(library.status("decode_step", *made.arguments), library.last_error())
"""


def test_host_memory_in_a_model_is_named(library: Library) -> None:
    paths = [str(TESTS), str(TESTS / "kernels"), str(TESTS.parent)]
    done = subprocess.run(
        [sys.executable, "-c", WRONG, str(library.path)],
        env={**os.environ, "HFPATCH_CHECK_POINTERS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith(
        "-2 hfp_decode_step: `layers[0].attention.q.weight` must point to memory of cuda:0"
    )
