"""One table of calls of the functions of HFP_DECODE_TABLE, which go by addresses: the fuzzer, the
vectors and the tests of the C interface go through it.

A function without a sample, and a number or a tensor of a model's description that no sample has,
fail `tests/kernels/test_c_api_decode.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import c_api
import torch
from support.decoders import Oracle, Shape, copied, decoder, table
from support.engines import arguments, padded
from torch import Tensor

from hfpatch.capi.signatures import CONSTANTS
from hfpatch.decoding.arguments import Arguments
from hfpatch.decoding.quantized import eight_bits, with_weights

#: `size("hfp_decode_workspace", …)`: how large a buffer must be.
Size = Callable[..., int]
SLOTS = CONSTANTS["HFP_DECODE_SLOTS"]


@dataclass
class Made:
    """One call.

    Attributes:
        arguments: those of the C function without the stream, results first.
        written: what it writes by the tensors' names, in the memory that addresses lead to too.
        expected: by the same names what must come, in fp64, and how far off it may be.
        scratch: the position of the workspace.
    """

    arguments: list[Any]
    written: dict[str, Tensor]
    expected: dict[str, tuple[Tensor, float]]
    scratch: int


@dataclass(frozen=True)
class StepSample:
    """A decoding step of a small model.

    Attributes:
        label: tells the samples apart.
        shape: the model's.
        rows, tokens, length: sequences, new tokens of each, keys in the cache.
        masked: left padding and holes.
        embeds: instead of ids.
        logits: those of "all" tokens, of the "last" one, of all in fp32 ("wide"), or "none".
        hidden: whether what the head is given is asked for.
        eight_bits: weights of 8 bits, which only the CPU takes.
    """

    op = "decode_step"
    label: str
    shape: Shape
    rows: int = 2
    tokens: int = 1
    length: int = 9
    masked: bool = False
    embeds: bool = False
    logits: str = "all"
    hidden: bool = False
    eight_bits: bool = False

    @property
    def id(self) -> str:
        return f"{self.op}-{self.label}"

    @property
    def schema(self) -> c_api.Op:
        return c_api.DECODE_OPS[self.op]

    def make(
        self, dtype: torch.dtype, size: Size, device: str = "cpu", seed: int = 0, threads: int = 0
    ) -> Made:
        """Fresh tensors, of a seed always the same."""
        model = decoder(self.shape, dtype, device, seed)
        like = model
        if self.eight_bits:
            model = eight_bits(model)
            like = with_weights(model, rows_of_numbers)
        cache = table(model, self.rows, self.length, self.length + self.tokens + 1, seed)
        ids, positions = arguments(model, self.rows, self.tokens, self.length, seed)
        keys = self.length + self.tokens
        mask = padded(self.rows, keys, self.length).bool().to(device) if self.masked else None
        embeds = model.embedding[ids] * 2 if self.embeds else None
        before = copied(cache)
        vocab, width = model.head.weight.shape[0], model.embedding.shape[1]
        kind = torch.float32 if self.logits == "wide" else dtype
        last = self.logits == "last"
        shape = (self.rows, 1 if last else self.tokens, vocab)
        logits = torch.full(shape, 7, dtype=kind, device=device)
        hidden = torch.full((self.rows, self.tokens, width), 7, dtype=dtype, device=device)
        described = Arguments(model).tensors
        count = size("hfp_decode_workspace", described, self.rows, self.tokens, threads)
        numbers, led = [self.length], {}
        for i, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
            numbers += [0, 0, k.shape[2]]
            led |= {1 + 3 * i: k, 2 + 3 * i: v}
        written = {"logits": logits, "hidden": hidden}
        written |= {f"keys[{i}]": k for i, k in enumerate(cache.keys)}
        written |= {f"values[{i}]": v for i, v in enumerate(cache.values)}
        if self.logits == "none":
            del written["logits"]
        if not self.hidden:
            del written["hidden"]

        def results(oracle: Oracle) -> list[Tensor]:
            found = oracle.step(ids, positions, before, mask, embeds)
            cut = found[0][:, -1:] if last else found[0]
            named = {"logits": cut, "hidden": found[1]}
            return [named[n] for n in ("logits", "hidden") if n in written] + [*found[2], *found[3]]

        pairs = zip(results(Oracle(like)), results(Oracle(like, dtype)), strict=True)
        return Made(
            arguments=[
                written.get("logits"),
                written.get("hidden"),
                torch.zeros(count, device=device),
                described,
                c_api.Addressed(numbers, led),
                None if self.embeds else ids,
                embeds,
                positions,
                mask,
                0,
                threads,
            ],
            written=written,
            expected={
                name: (true, _tolerance(dtype, true, rounded))
                for name, (true, rounded) in zip(written, pairs, strict=True)
            },
            scratch=2,
        )


def rows_of_numbers(rows: Tensor) -> Tensor:
    """The weight [out, in] that rows of 8-bit integers stand for, in fp32."""
    scale = rows[:, -4:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return rows[:, :-4].float() * scale


def _tolerance(dtype: torch.dtype, true: Tensor, rounded: Tensor) -> float:
    """fp32: sums of some hundred products; half types: a few times what the layers' own roundings,
    which may fall otherwise, come to."""
    largest = float(true.nan_to_num(0.0).abs().max())
    if dtype == torch.float32:
        return 3e-5 * largest
    roundings = float((rounded - true).nan_to_num(0.0).abs().max())
    return 4 * roundings + 2 * torch.finfo(dtype).eps * largest


@dataclass(frozen=True)
class ChoiceSample:
    """The choice of greedy tokens behind a step.

    Attributes:
        label: tells the samples apart.
        rows, vocab: of the logits.
        ends: how many tokens end a row; None: no row ends.
        counters: how many numbers get one more; None: NULL.
        report: whether the tokens are reported.
        number: of the step in the text.
    """

    op = "decode_choose"
    label: str
    rows: int = 3
    vocab: int = 19
    ends: int | None = None
    counters: int | None = None
    report: bool = False
    number: int = 1

    @property
    def id(self) -> str:
        return f"{self.op}-{self.label}"

    @property
    def schema(self) -> c_api.Op:
        return c_api.DECODE_OPS[self.op]

    def make(
        self, dtype: torch.dtype, size: Size, device: str = "cpu", seed: int = 0, threads: int = 0
    ) -> Made:
        """Fresh tensors, of a seed always the same; `threads` is not this function's."""
        g = torch.Generator().manual_seed(seed)
        rows, pad = self.rows, 2
        # few values, so that the greatest is there more than once; one row has a NaN
        logits = torch.randint(-9, 9, (rows, self.vocab), generator=g).to(dtype)
        logits[rows // 2, self.vocab // 2] = float("nan")
        ids = torch.full((rows,), -7)
        tokens = torch.full((SLOTS, rows), -7)
        unfinished = torch.tensor([row % 3 != 2 for row in range(rows)]).repeat(SLOTS, 1)
        greatest = logits.float().argmax(-1)
        ends = None if self.ends is None else greatest.unique()[: self.ends]
        slot = self.number % SLOTS
        open_rows = unfinished[(self.number - 1) % SLOTS] if ends is not None else None
        chosen = greatest if open_rows is None else torch.where(open_rows, greatest, pad)
        at_slot, still = tokens.clone(), unfinished.clone()
        at_slot[slot] = chosen
        if ends is not None and open_rows is not None:
            still[slot] = open_rows & ~torch.isin(chosen, ends)
        counters = None if self.counters is None else torch.arange(self.counters)
        count = size("hfp_row_workspace", rows, self.vocab)

        def there(t: Tensor | None) -> Any:
            return None if t is None else t.to(device)

        # without a copy where it is there: the bytes of a bool
        memory = {"tokens": there(tokens), "unfinished": there(unfinished.view(torch.uint8))}
        if self.report:
            memory["report"] = there(tokens.clone())
        led = {rows + i: t for i, t in enumerate(memory.values())}
        text = c_api.Addressed([self.number] * rows + [0, 0, 0], led)
        written = {"ids": there(ids), "text": text.table[:rows], **memory}
        want = {"ids": chosen, "text": torch.full((rows,), self.number + 1)}
        want |= {"tokens": at_slot, "unfinished": still, "report": at_slot}
        if counters is not None:
            written["counters"] = there(counters)
            want["counters"] = counters + 1
        return Made(
            arguments=[
                written["ids"],
                written.get("counters"),
                text,
                torch.zeros(count, dtype=torch.int64, device=device),
                there(logits),
                there(ends),
                pad,
            ],
            written=written,
            expected={name: (want[name].double(), 0.0) for name in written},
            scratch=3,
        )


_SMALL = Shape(layers=1, width=16, inner=12, vocab=19, heads=4, key_heads=2, dim=8)
_TWO_NORMS = replace(_SMALL, placement="both", offset=1.0, rounded=False)


def _step(label: str, shape: Shape = _SMALL, **options: Any) -> StepSample:
    return StepSample(label, shape, **options)


STEPS: list[StepSample] = [
    _step("", replace(_SMALL, layers=2), hidden=True),
    _step(
        "masked",
        replace(_SMALL, layers=2, windows=(40, None), sinks=True, softcap=3.0, qk_norm="head"),
        rows=3, tokens=2, length=70, masked=True,
    ),
    _step(
        "biases",
        replace(_SMALL, norm="layer", norm_bias=True, bias=True, placement="parallel_two"),
        logits="last", tokens=3, length=0,
    ),
    _step("both-norms", replace(_TWO_NORMS, qk_norm="across", clip=1.0), embeds=True),
    _step(
        "norms-behind",
        replace(_SMALL, qk_norm="after_rope", interleaved=True, rope_dims=4, ropes=2, layers=2,
                rope_rounded=False, rope_scaling=1.25, norm="layer", norm_bias=True,
                placement="after"),
        logits="none", hidden=True,
    ),
    _step(
        "numbers",
        replace(_SMALL, multiplier=0.5, embedding_scale=4.0, logit_scale=0.5, logit_softcap=2.0,
                activation="relu2", gated=False, rope_dims=None, tied=True, final_norm=False),
        logits="wide", masked=True,
    ),
    _step("strided", replace(_SMALL, packed=True, heads=3, key_heads=1, dim=5, width=11, inner=7,
                             activation="gelu", rope_dims=4), rows=1, tokens=4, length=5),
    _step("bytes", eight_bits=True, hidden=True),
]  # fmt: skip
CHOICES: list[ChoiceSample] = [
    ChoiceSample(""),
    ChoiceSample("ends", ends=1, counters=5, number=6),
    ChoiceSample("no-end", ends=0, report=True, number=4),
    ChoiceSample("one-row", rows=1, vocab=1, ends=1, counters=1, report=True),
]
SAMPLES: list[StepSample | ChoiceSample] = [*STEPS, *CHOICES]
BY_ID = {s.id: s for s in SAMPLES}
