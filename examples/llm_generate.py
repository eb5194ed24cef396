"""Chat with SmolLM2-135M-Instruct (real weights), with and without hfpatch's kernels.

    python examples/llm_generate.py --compare
    python examples/llm_generate.py --prompt "Why is the sky blue?" --max-new-tokens 128

Decoding is greedy: the same tokens are expected with and without the kernels.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from _common import (
    Output,
    add_device_arguments,
    add_way_arguments,
    at_least,
    device_name,
    dtype_name,
    now,
    resolve_device,
)
from _quiet import leave_out_unused
from _smollm2 import load

import hfpatch
from hfpatch.bench.spread import Gain, Spread

TURNS = 5  # timed generations of each way; their median counts, beside its spread
MEASURED_TOKENS = 64  # at least so many are timed, however short the answer is


@dataclass
class Run:
    """One way to answer.

    Attributes:
        tokens, answer: up to where the model ends it.
        measured_tokens: how many each timed generation made, past that end if need be.
        seconds: of the median generation, the prompt's processing included.
        all_seconds: of every generation.
        tokens_per_second: measured_tokens / seconds.
    """

    tokens: list[int]
    answer: str
    measured_tokens: int
    seconds: float
    all_seconds: list[float]
    tokens_per_second: float


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt", default="What is the capital of France? What is it known for?")
    parser.add_argument("--max-new-tokens", type=at_least(1), default=64)
    add_way_arguments(parser)
    add_device_arguments(parser)
    args = parser.parse_args(argv)
    if not args.prompt.strip():
        parser.error("argument --prompt: expected some text, got none")
    resolve_device(parser, args)
    return args


class Chat:
    """Greedy answers to one prompt."""

    def __init__(self, model: Any, tokenizer: Any, args: argparse.Namespace) -> None:
        self.model, self.tokenizer, self.device = model, tokenizer, args.device
        self.inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": args.prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        ).to(args.device)
        self.settings: dict[str, Any] = {
            "max_new_tokens": args.max_new_tokens,
            "do_sample": False,
        }
        if args.compile:
            # A static cache keeps the shapes of all steps equal, so that one graph serves them.
            self.settings |= {"cache_implementation": "static", "disable_compile": True}

    def answer(self) -> list[int]:
        """The new tokens."""
        return self._generate(**self.settings)

    def seconds(self) -> float:
        """Of `measured_tokens` new tokens, whatever they are."""
        started = now(self.device)
        count = self.measured_tokens
        made = self._generate(**self.settings | {"max_new_tokens": count, "min_new_tokens": count})
        seconds = now(self.device) - started
        assert len(made) == count
        return seconds

    @property
    def measured_tokens(self) -> int:
        return max(MEASURED_TOKENS, self.settings["max_new_tokens"])

    def _generate(self, **settings: Any) -> list[int]:
        output = self.model.generate(**self.inputs, **settings)
        return output[0, self.inputs["input_ids"].shape[1] :].tolist()

    def run(self, tokens: list[int], times: list[float]) -> Run:
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        seconds = statistics.median(times)
        count = self.measured_tokens
        return Run(tokens, text, count, seconds, times, count / seconds)


def measure(chat: Chat, compare: bool, compiled: bool) -> tuple[dict[str, Run], hfpatch.Report]:
    """The answers by label, and what was patched; the model is patched in the end.

    Original and patched take turns, so that both meet the same neighbours on the machine. Compiled,
    a change of sides would compile again, so all turns of one come before those of the other.
    """
    model = chat.model
    times: dict[str, list[float]] = {"original": [], "patched": []}
    if not compare:
        del times["original"]
    answers: dict[str, list[int]] = {}
    for turn in range(1 if compiled else TURNS):
        for label, timed in times.items():
            if label == "original":
                hfpatch.restore(model)
            else:
                report = hfpatch.apply(model)
            if compiled:
                torch.compiler.reset()
                model.compile(dynamic=False)
            if turn == 0:
                answers[label] = chat.answer()  # also warms up
                if compiled:
                    chat.seconds()  # compiles for the lengths that are timed
            timed += [chat.seconds() for _ in range(TURNS if compiled else 1)]
    return {label: chat.run(answers[label], timed) for label, timed in times.items()}, report


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Returns what --json prints."""
    args = parse_arguments(argv)
    out = Output(args.json)
    result: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct",
        "device": device_name(args.device),
        "dtype": dtype_name(args.dtype),
        "compiled": args.compile,
        "prompt": args.prompt,
        "max_new_tokens": args.max_new_tokens,
    }
    out.say(f"{result['model']} in {result['dtype']} on {result['device']}\n\n> {args.prompt}\n")
    try:
        model, tokenizer = load(args.dtype, args.device)
    except FileNotFoundError as e:
        sys.exit(f"error: {e}")

    runs, report = measure(Chat(model, tokenizer, args), args.compare, args.compile)
    out.say(f"{runs['patched'].answer}\n\n{report}\n")
    for label, run in runs.items():
        out.say(
            f"{label:>8}: {run.measured_tokens} tokens in "
            f"{Spread.of(run.all_seconds).text('s')}, {run.tokens_per_second:.1f} tokens/s"
        )
    if args.compare:
        original, patched = runs["original"], runs["patched"]
        result["identical"] = original.tokens == patched.tokens
        gain = Gain.of(original.all_seconds, patched.all_seconds)
        result["speed_up"], result["within_noise"] = gain.ratio, gain.within_noise
        out.say(
            f"speed-up: {gain}; token sequences {'identical' if result['identical'] else 'differ'}"
        )
    result["runs"] = {label: asdict(run) for label, run in runs.items()}
    result["report"] = report.to_dict()
    out.finish(result)
    return result


if __name__ == "__main__":
    leave_out_unused()
    main()
