"""The functions of HFP_DECODE_TABLE by the C interface, for every instruction set: numbers against
fp64, memory, layouts, threads, odd values and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import c_api
import decode_proofs as proofs
import pytest
import torch
from c_api import CONSTANTS, KernelError, Library
from decode_proofs import (
    CACHE,
    COUNTERS,
    EMBEDS,
    HIDDEN,
    IDS,
    IDS_OUT,
    LOGITS,
    MASK,
    MODEL,
    POSITIONS,
    TEXT,
    WORKSPACE,
    call,
    results,
)
from decode_samples import BY_ID, CHOICES, SAMPLES, STEPS, ChoiceSample, Made, StepSample
from proofs import assert_no_growth, assert_same_bits, in_threads
from support.decoders import Shape

# ruff: noqa: F811  (fixtures that are imported, and used as parameters)
from test_c_api import (
    built,  # noqa: F401  (fixtures, as is `lib`)
    lib,  # noqa: F401
)
from torch import Tensor

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OF_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
EVERY = pytest.mark.parametrize("name", BY_ID)
OF_STEPS = pytest.mark.parametrize("name", [s.id for s in STEPS])
OF_BATCHES = pytest.mark.parametrize("name", [s.id for s in STEPS if s.rows > 1])
ODD = [float("nan"), float("inf"), -float("inf")]
OK, INVALID = CONSTANTS["HFP_OK"], CONSTANTS["HFP_INVALID_ARGUMENT"]


# -------------------------------------------------------------------------------------------------
# The table


def test_every_function_has_a_sample() -> None:
    assert {s.op for s in SAMPLES} == set(c_api.DECODE_OPS)


def described(sample: StepSample) -> tuple[list[int], list[float], list[bool], int, int]:
    """The plan, the numbers, which tensors there are; layers and ropes."""
    plan, numbers, *tensors = sample.make(torch.float32, lambda *_: 1).arguments[MODEL]
    layers, ropes = plan[:2].tolist()
    there = [t is not None for t in tensors]
    return plan.tolist(), numbers.tolist(), there, layers, ropes


def columns(values: list[Any], head: int, width: int, layers: int) -> list[set[Any]]:
    """By its place in a layer's description, what stands there in the layers."""
    assert len(values) == head + width * layers
    return [set(values[head + i :: width]) for i in range(width)]


def test_samples_have_all_of_the_description() -> None:
    """Every number of the plan and of the numbers is one thing here and another there, and every
    tensor is there; those that may be missing are not everywhere."""
    found: dict[tuple[str, int], set[Any]] = {}
    for sample in STEPS:
        plan, numbers, there, layers, ropes = described(sample)
        parts = [
            ("head of the plan", [{v} for v in plan[:3]]),
            ("head of the numbers", [{v} for v in numbers[:5]]),
            ("model's tensors", [{v} for v in there[:5]]),
            ("plan", columns(plan, 3 + 2 * ropes, CONSTANTS["HFP_DECODE_PLAN"], layers)),
            ("numbers", columns(numbers, 5 + ropes, CONSTANTS["HFP_DECODE_NUMBERS"], layers)),
            ("tensors", columns(there, 5 + ropes, CONSTANTS["HFP_DECODE_TENSORS"], layers)),
        ]
        for r in range(ropes):
            parts.append(("ropes", [{v} for v in (*plan[3 + 2 * r :][:2], numbers[5 + r])]))
        for part, values in parts:
            for i, value in enumerate(values):
                found.setdefault((part, i), set()).update(value)
    always = {("model's tensors", 0), ("model's tensors", 1)}
    always |= {("tensors", i) for i in (12, 14, 16, 18, 22, 24)}  # q, k, v, o, up, down
    alike = {place for place, values in found.items() if len(values) < 2} - always
    assert not alike
    assert all(found[place] == {True} for place in always)


# -------------------------------------------------------------------------------------------------
# Numbers, memory and rows: `decode_proofs.py`


@OF_DTYPE
@EVERY
def test_numbers(lib, name: str, dtype: torch.dtype) -> None:
    proofs.numbers(lib, BY_ID[name], dtype)


@OF_DTYPE
@EVERY
def test_memory_and_any_alignment(lib, name: str, dtype: torch.dtype) -> None:
    proofs.memory(lib, BY_ID[name], dtype)


@OF_DTYPE
@OF_STEPS
def test_keys_before_and_behind_stay(lib, name: str, dtype: torch.dtype) -> None:
    proofs.keys_stay(lib, BY_ID[name], dtype)


@OF_DTYPE
@OF_BATCHES
def test_a_row_is_its_own(lib, name: str, dtype: torch.dtype) -> None:
    proofs.rows_are_their_own(lib, BY_ID[name], dtype)


@OF_DTYPE
@pytest.mark.parametrize("value", ODD)
@OF_BATCHES
def test_odd_values_stay_in_their_row(lib, name: str, value: float, dtype: torch.dtype) -> None:
    proofs.odd_values(lib, BY_ID[name], dtype, value)


@OF_DTYPE
@EVERY
def test_repeats_and_threads(lib, name: str, dtype: torch.dtype) -> None:
    """Whatever the scratch memory holds, and however many threads there are."""
    sample = BY_ID[name]
    first = sample.make(dtype, lib.size)
    call(lib, sample, first)
    for threads in (0, 1, 2, 3, 5):
        made = sample.make(dtype, lib.size, threads=threads)
        made.arguments[made.scratch].fill_(float("nan") if sample.op == "decode_step" else -3)
        call(lib, sample, made)
        for what, value in made.written.items():
            bits = first.written[what]
            assert torch.equal(value.view(torch.uint8), bits.view(torch.uint8)), (what, threads)


def test_null_strides_and_byte_offsets(lib) -> None:
    sample = STEPS[0]
    plain, made = (sample.make(torch.float32, lib.size) for _ in range(2))
    call(lib, sample, plain)
    model = made.arguments[MODEL]  # kept, as its memory is what the views are of
    made.arguments[MODEL] = [None if t is None else c_api.dltensor(t) for t in model]
    for view in filter(None, made.arguments[MODEL]):
        view.strides = None
        view.byte_offset = 4 * view.shape[0]  # of rows that need not be there
        view.data -= view.byte_offset
    call(lib, sample, made)
    assert_same_bits(results(made), results(plain), "NULL strides")


# -------------------------------------------------------------------------------------------------
# Choices, and other ways to say the same


def test_logits_of_one_row_are_not_those_of_another(lib) -> None:
    """A NaN in a row's logits chooses in that row alone."""
    sample = CHOICES[1]
    plain, made = (sample.make(torch.float32, lib.size) for _ in range(2))
    call(lib, sample, plain)
    logits = made.arguments[4]
    logits[0, -1] = float("nan")
    call(lib, sample, made)
    assert int(made.written["ids"][0]) == logits.shape[1] - 1
    assert torch.equal(made.written["ids"][1:], plain.written["ids"][1:])


# -------------------------------------------------------------------------------------------------
# What is refused


def unchanged(made: Made, before: list[Tensor]) -> None:
    for now, was in zip(results(made), before, strict=True):
        assert torch.equal(now.view(torch.uint8), was.view(torch.uint8)), "a refused call wrote"


def refused(lib, sample: StepSample | ChoiceSample, made: Made, message: str) -> None:
    before = [r.clone() for r in results(made)]
    with pytest.raises(KernelError, match=message) as e:
        call(lib, sample, made)
    assert e.value.status == INVALID
    unchanged(made, before)


@pytest.mark.parametrize("result", [LOGITS, HIDDEN, WORKSPACE])
def test_results_lie_apart(built: Path, result: int) -> None:
    """No result shares memory with another tensor of the call, those of the model among them."""
    library = Library(built)
    sample = StepSample("apart", Shape(layers=1), masked=True, hidden=True)
    names = ["logits", "hidden", "workspace"]

    def over(made: Made, other: Tensor) -> None:
        """Puts the result where `other` begins."""
        mine = made.arguments[result]
        size = max(mine.numel() * mine.element_size(), other.numel() * other.element_size()) + 64
        memory = torch.zeros(size, dtype=torch.uint8)
        flat = other.contiguous().view(-1).view(torch.uint8)
        memory[: len(flat)] = flat
        other.set_(memory[: len(flat)].view(other.dtype).view(other.shape))  # type: ignore[call-overload]
        bytes_ = mine.numel() * mine.element_size()
        made.arguments[result] = memory[:bytes_].view(mine.dtype).view(mine.shape)

    made = sample.make(torch.float32, library.size)
    places = [i for i, t in enumerate(made.arguments[MODEL]) if t is not None]
    for place in places:
        made = sample.make(torch.float32, library.size)
        over(made, made.arguments[MODEL][place])
        refused(library, sample, made, rf"`{names[result]}` must not overlap `model\[{place}\]`")
    others = {"cache": CACHE, "ids": IDS, "positions": POSITIONS, "mask": MASK}
    others |= {n: i for i, n in enumerate(names) if i != result}
    for name, at in others.items():
        made = sample.make(torch.float32, library.size)
        value = made.arguments[at]
        over(made, value.table if isinstance(value, c_api.Addressed) else value)
        mine = names[result]
        pair = rf"`{mine}` must not overlap `{name}`|`{name}` must not overlap `{mine}`"
        refused(library, sample, made, pair)
    made = sample.make(torch.float32, library.size)
    embeds = torch.ones(sample.rows, sample.tokens, 64)
    made.arguments[EMBEDS], made.arguments[IDS] = embeds, None
    over(made, embeds)
    refused(library, sample, made, rf"`{names[result]}` must not overlap `embeds`")


def test_choices_lie_apart(built: Path) -> None:
    library = Library(built)
    sample = ChoiceSample("apart", rows=4, vocab=24, ends=2, counters=7)
    made = sample.make(torch.float32, library.size)
    logits, ends = made.arguments[4], made.arguments[5]
    inside = {"logits": logits.view(-1).view(torch.int64), "ends": ends}
    for name, memory in inside.items():
        for at in (IDS_OUT, COUNTERS):
            made = sample.make(torch.float32, library.size)
            made.arguments[4], made.arguments[5] = logits, ends
            whole = torch.zeros(16, dtype=torch.int64)
            whole[: len(memory)] = memory[:16]
            if name == "ends":
                made.arguments[5] = whole[: len(ends)]
                made.arguments[at] = whole[: made.arguments[at].numel()]
            else:
                made.arguments[at] = memory[: made.arguments[at].numel()]
            with pytest.raises(KernelError, match=r"must not overlap|must be exactly the view"):
                call(library, sample, made)


def numbers_of(sample: StepSample, library: Library, place: int, at: int, value: float) -> Made:
    """The call with one of its plan's numbers (place 0) or numbers (1) changed."""
    made = sample.make(torch.float32, library.size)
    made.arguments[MODEL][place][at] = value
    return made


def test_bad_descriptions(built: Path) -> None:
    """Every number of a description that must be one of some."""
    library, sample = Library(built), STEPS[1]
    ropes = 1
    head = 3 + 2 * ropes
    fields = ["before_attention", "after_attention", "before_mlp", "after_mlp", "attention.q_norm",
              "attention.k_norm", "attention.heads", "attention.key_heads", "attention.head_dim",
              "attention.rope", "attention.norm_across", "attention.norm_after_rope",
              "attention.window", "mlp.activation", "parallel"]  # fmt: skip
    assert len(fields) == CONSTANTS["HFP_DECODE_PLAN"]
    for i, name in enumerate(fields):
        for layer in range(2):
            at = head + layer * len(fields) + i
            made = numbers_of(sample, library, 0, at, -2)
            refused(library, sample, made, rf"`layers\[{layer}\].{name}` must")
    for at, value, name in ((0, 0, "plan.layers"), (0, 3, "model"), (1, -1, "plan.ropes"),
                            (2, 3, "final_norm"), (3, 2, "ropes.interleaved"),
                            (4, -1, "ropes.rounded")):  # fmt: skip
        refused(library, sample, numbers_of(sample, library, 0, at, value), rf"`{name}` must")
    names = ["embedding_scale", "logit_scale", "logit_softcap", "final_norm", "final_norm",
             "ropes.scaling"]  # fmt: skip
    for at, name in enumerate(names):
        made = numbers_of(sample, library, 1, at, float("inf"))
        refused(library, sample, made, rf"`{name}` must be finite")
    tail = ["attention.scale", "attention.softcap", "attention.clip", "residual_multiplier"]
    norms = [name for name in fields[:6] for _ in range(2)]
    assert len(norms + tail) == CONSTANTS["HFP_DECODE_NUMBERS"]
    plan = sample.make(torch.float32, library.size).arguments[MODEL][0]
    for i, name in enumerate(norms + tail):
        if i < 12 and not plan[head + i // 2]:  # there is no such norm
            continue
        made = numbers_of(sample, library, 1, 5 + ropes + i, float("nan"))
        refused(library, sample, made, rf"`layers\[0\].{name}` must be finite")


def test_tensors_that_nobody_would_read_are_refused(built: Path) -> None:
    """Of what the model has not: they would not be looked at either."""
    library, sample = Library(built), STEPS[5]
    first = 2 + 1 + 2 + 2  # plan and numbers, embedding, head and final norm
    model = sample.make(torch.float32, library.size).arguments[MODEL]
    names = {2: "after_attention.weight", 7: "after_mlp.bias", 8: "attention.q_norm.weight",
             21: "mlp.gate.bias"}  # fmt: skip
    for at, name in names.items():
        assert model[first + at] is None
        made = sample.make(torch.float32, library.size)
        made.arguments[MODEL][first + at] = torch.ones(3)
        refused(library, sample, made, rf"`layers\[0\].{name}` must be NULL where")
    made = sample.make(torch.float32, library.size)
    made.arguments[MODEL][first - 2] = torch.ones(16)
    refused(library, sample, made, "`final_norm.weight` must be NULL where")


def test_lengths_addresses_and_ids(built: Path) -> None:
    """What the CPU can see of the tables before it writes."""
    library, sample = Library(built), STEPS[0]
    for at, value, message in (
        (0, -1, r"`cache\[0\]` must be a length >= 0, got -1"),
        (0, 2**63 - 1, r"`cache\[0\]` must be a length"),
        (0, 11, r"`cache\[3\]` must be a capacity of at least 12 keys"),
        (1, 0, r"`cache\[1\]` must be the aligned address of layer 0's keys"),
        (5, 6, r"`cache\[5\]` must be the aligned address of layer 1's values"),
        (6, 9, r"`cache\[6\]` must be a capacity of at least 10 keys for layer 1, got 9"),
    ):
        made = sample.make(torch.float32, library.size)
        made.arguments[CACHE].table[at] = value
        refused(library, sample, made, message)
    for value in (-1, 19, 2**40):
        made = sample.make(torch.float32, library.size)
        made.arguments[IDS][1, 0] = value
        refused(library, sample, made, rf"`ids` must be from 0 to 18, got {value}")


@pytest.mark.parametrize("number", [0, -1, -(2**63), 2**63 - 1])
def test_texts_numbers_and_addresses(built: Path, number: int) -> None:
    library, sample = Library(built), CHOICES[1]
    made = sample.make(torch.float32, library.size)
    made.arguments[TEXT].table[1] = number
    refused(library, sample, made, rf"`text\[1\]` must be the number of a step.*got {number}")
    made = sample.make(torch.float32, library.size)
    for at, value, what in ((3, 0, "tokens"), (3, 4, "tokens"), (4, 0, "`unfinished`"),
                            (5, 1, "report")):  # fmt: skip
        made = sample.make(torch.float32, library.size)
        made.arguments[TEXT].table[at] = value
        refused(library, sample, made, rf"`text\[{at}\]` must be the aligned address of .*{what}")


@pytest.mark.parametrize("shape", [(0, 1), (2, 0), (0, 0), (2**8, 2**9)], ids=str)
def test_steps_of_nothing_or_too_much(built: Path, shape: tuple[int, int]) -> None:
    library, sample = Library(built), STEPS[0]
    made = sample.make(torch.float32, library.size)
    made.arguments[POSITIONS] = torch.zeros(shape, dtype=torch.int64)
    refused(library, sample, made, "`positions` must have a number of elements from 1 to 65536")
    with pytest.raises(KernelError, match=r"`rows` \* `tokens` must be from 1 to 65536"):
        library.size("hfp_decode_workspace", made.arguments[MODEL], *shape, 0)


def test_a_choice_without_rows(built: Path) -> None:
    library, sample = Library(built), CHOICES[1]
    made = sample.make(torch.float32, library.size)
    empty = torch.zeros(0, dtype=torch.int64)
    made.arguments[IDS_OUT], made.arguments[TEXT] = empty, torch.zeros(3, dtype=torch.int64)
    made.arguments[4] = torch.zeros(0, sample.vocab)
    call(library, sample, made)
    assert made.written["counters"].tolist() == [0, 1, 2, 3, 4]


# -------------------------------------------------------------------------------------------------
# Threads and memory of the process


def test_calls_from_several_threads(built: Path) -> None:
    """Each with results, scratch memory and cache of its own, beside others and refused ones."""
    library = Library(built)
    expected = {}
    for sample in SAMPLES:
        made = sample.make(torch.bfloat16, library.size)
        call(library, sample, made)
        expected[sample.id] = results(made)

    def work(index: int) -> None:
        for i in range(3 * len(SAMPLES)):
            sample = SAMPLES[(i + 5 * index) % len(SAMPLES)]
            made = sample.make(torch.bfloat16, library.size, threads=i % 3)
            call(library, sample, made)
            for got, want in zip(results(made), expected[sample.id], strict=True):
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), sample.id
            made.arguments[0] = torch.zeros(1 + index)
            with pytest.raises(KernelError, match=rf"got .*\b{1 + index}\b|must"):
                call(library, sample, made)

    in_threads(work, 4)


@pytest.mark.parametrize("failing", [False, True])
def test_no_growth_in_memory(built: Path, failing: bool) -> None:
    library, wanted = Library(built), INVALID if failing else OK
    for sample in (STEPS[0], CHOICES[1]):
        made = sample.make(torch.bfloat16, library.size, threads=1)
        arguments = [c_api.passed(a) for a in made.arguments]
        if failing:
            arguments[made.scratch] = None

        def repeat(times: int, name: str = sample.schema.function, given: Any = arguments) -> None:
            for _ in range(times):
                assert library.capi.status(name, *given, None) == wanted

        assert_no_growth(repeat, 2000, sample.op)


def test_sizes_of_workspaces(built: Path) -> None:
    """Of any numbers: a size, or a message that says which number is wrong."""
    library = Library(built)
    model = STEPS[0].make(torch.float32, library.size).arguments[MODEL]
    odd = (-(2**63), -1, 0, 1, 3, 4095, 2**16, 2**31, 2**62, 2**63 - 1)
    for rows, tokens, threads in itertools.product(odd, repeat=3):
        good = rows >= 1 and tokens >= 1 and rows * tokens <= 2**16 and 0 <= threads <= 4095
        given = ("hfp_decode_workspace", model, rows, tokens, threads)
        if good:
            assert rows * tokens < library.size(*given) < 2**40
            continue
        with pytest.raises(KernelError, match=r"`(rows` \* `tokens|threads)` must be from") as e:
            library.size(*given)
        assert e.value.status == INVALID
