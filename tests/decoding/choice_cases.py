"""What `hfp_decode_choose` writes, on whichever device; a test module that imports these has a
fixture `device`."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from decoding.families import make

from hfpatch.decoding.engine import Engine
from hfpatch.decoding.greedy import SLOTS, Chain, Chooser, Ends
from hfpatch.decoding.layer import describe
from hfpatch.errors import DecodingError

PAD = 3


def call_on(device: str) -> Any:
    """The C functions of an engine, for logits of any width."""
    call = _call_on(device)
    call._rows_workspace = None  # that of another width
    return call


@functools.cache
def _call_on(device: str) -> Any:
    return Engine(describe(make("llama").to(device)).model, 1)._call


def some_logits(rows: int, vocab: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Few values, so that the greatest is there more than once; one row has a NaN."""
    logits = torch.randint(-40, 40, (rows, 1, vocab)).to(dtype)
    if rows > 2:
        logits[1, 0, vocab // 2 :] = float("nan")
    return logits.to(device)


def greatest(logits: torch.Tensor) -> torch.Tensor:
    """Each row's first greatest; on the CPU: the sanitizer complains of PyTorch's kernel."""
    return logits[:, 0].float().cpu().argmax(-1)


@pytest.mark.parametrize("vocab", [1, 7, 1000, 32003, 151936])
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("ends", [None, 0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_each_token_and_what_the_next_step_reads(
    device: str, dtype: torch.dtype, ends: int | None, rows: int, vocab: int
) -> None:
    call = call_on(device)
    ids = torch.full((rows, 1), -7, device=device)
    counters = torch.arange(rows + 2, device=device)
    start = torch.randint(0, 50, (rows, 1), device=device)
    first = [some_logits(rows, vocab, dtype, device) for _ in range(2 * SLOTS + 1)]
    # tokens that are chosen, so that rows do end
    found = torch.stack([greatest(step) for step in first]).unique().tolist()
    given = None if ends is None else Ends(tuple(found[:: max(1, len(found) // 3)][:ends]), PAD)
    unfinished = torch.tensor([row % 4 != 3 for row in range(rows)], device=device)
    chain = Chain(start, unfinished, given)
    chooser = Chooser(call, ids, counters, given)
    chooser.begin(chain)
    assert chain.ids.tolist() == start.tolist()
    open_rows, before = unfinished.tolist(), start[:, 0].tolist()
    for number, logits in enumerate(first, 1):
        chooser.launch(logits)
        chain.launched()
        chain.accept()
        wanted = greatest(logits).tolist()
        if given is not None:
            wanted = [w if o else PAD for w, o in zip(wanted, open_rows, strict=True)]
            open_rows = [
                o and w not in given.tokens for w, o in zip(wanted, open_rows, strict=True)
            ]
            assert chain.unfinished is not None
            assert chain.unfinished.tolist() == open_rows
        assert chain.tokens_of(number) == ids[:, 0].tolist() == wanted
        assert chain.ids[:, 0].tolist() == wanted
        assert counters.tolist() == [i + number for i in range(rows + 2)]
        if number > 1:
            assert chain.tokens_of(number - 1) == before  # still there
        before = wanted


def test_a_step_of_no_use_leaves_the_text_as_it_was(device: str) -> None:
    ends = Ends((5,), PAD)
    start = torch.tensor([[1], [2]], device=device)
    chooser = Chooser(call_on(device), torch.zeros_like(start), start[0, :0], ends)
    chain = Chain(start, torch.ones(2, dtype=torch.bool, device=device), ends)
    logits = torch.zeros(2, 1, 9, device=device)
    logits[0, 0, 5], logits[1, 0, 8] = 1, 1
    for _ in range(3):  # the same step again and again
        chooser.begin(chain)
        chooser.launch(logits)
        chain.launched()
        assert chain.ids.tolist() == [[1], [2]]
    chain.accept()
    assert chain.ids.tolist() == [[5], [8]]
    assert chain.unfinished is not None and chain.unfinished.tolist() == [False, True]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ids", lambda t: t[:1]),
        ("ids", lambda t: t.int()),
        ("text", lambda t: t[:-1]),
        ("counters", lambda t: t.float()),
        ("counters", lambda t: t[None]),
        ("ends", lambda t: t.int()),
        ("logits", lambda t: t[..., :0]),
        ("logits", lambda t: t.double()),
    ],
)
def test_bad_arguments(device: str, name: str, change: Any) -> None:
    given: dict[str, torch.Tensor] = {
        "ids": torch.full((2,), -7, device=device),
        "counters": torch.zeros(3, dtype=torch.int64, device=device),
        "text": torch.zeros(5, dtype=torch.int64, device=device),
        "logits": torch.zeros(2, 1, 9, device=device),
        "ends": torch.zeros(1, dtype=torch.int64, device=device),
    }
    given[name] = change(given[name])
    with pytest.raises(DecodingError, match=f"`{name}`"):
        call_on(device).choose(**given, pad=0)
    assert given["ids"].unique().tolist() == [-7]


def test_results_lie_apart(device: str) -> None:
    whole = torch.zeros(8, dtype=torch.int64, device=device)
    logits = torch.zeros(2, 1, 9, device=device)
    with pytest.raises(DecodingError, match=r"`text`|`ids`"):
        call_on(device).choose(whole[:2], None, whole[1:6], logits, None, 0)
