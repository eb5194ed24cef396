"""Chat with SmolLM2-135M-Instruct (real weights) or a model of yours, with and without hfpatch.

    python examples/llm_generate.py --compare --output chat.png
    python examples/llm_generate.py --prompt "Why is the sky blue?" --max-new-tokens 128 --stream
    python examples/llm_generate.py --model Qwen/Qwen3-0.6B --batch-size 8 --sample --compare
    python examples/llm_generate.py --compare --compile --output three-ways.png

The same tokens are expected with and without hfpatch: greedy ones, or those of one seed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _common import (
    Output,
    add_device_arguments,
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

TURNS = 5  # timed generations of each way by default; their median counts, beside its spread
MEASURED_TOKENS = 64  # at least so many are timed, however short the answer is
PARTS = 4  # of an answer, whose tokens the table times apart
SEED = 0


@dataclass
class Run:
    """One way to answer.

    Attributes:
        tokens, answer: up to where the model ends it.
        measured_tokens: how many each timed generation made, past that end if need be.
        seconds: of the median generation, the prompt's processing included.
        all_seconds: of every generation.
        tokens_per_second: measured_tokens / seconds, of each text.
        first_token_seconds: until the first token was there, median.
        ms_a_token: of each further token, in order, medians.
    """

    tokens: list[int]
    answer: str
    measured_tokens: int
    seconds: float
    all_seconds: list[float]
    tokens_per_second: float
    first_token_seconds: float
    ms_a_token: list[float]


class Clock:
    """A streamer that notes when tokens come, of all texts at once."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt:
            self.times.append(time.perf_counter())
        self._prompt = False

    def end(self) -> None:
        pass


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt", default="What is the capital of France? What is it known for?")
    parser.add_argument("--max-new-tokens", type=at_least(1), default=64)
    parser.add_argument("--model", help="Hub id or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--batch-size", type=at_least(1), default=1, help="so many answers at once")
    parser.add_argument("--sample", action="store_true", help=f"draw tokens, with seed {SEED}")
    parser.add_argument("--stream", action="store_true", help="print the answer as it is made")
    parser.add_argument("--output", type=Path, help="with --compare: the times as a picture")
    parser.add_argument(
        "--turns", type=at_least(1), default=TURNS, help="timed answers of each way"
    )
    parser.add_argument("--compare", action="store_true", help="run the original too")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="with --compare: also the original compiled, on a static cache",
    )
    add_device_arguments(parser)
    args = parser.parse_args(argv)
    if not args.prompt.strip():
        parser.error("argument --prompt: expected some text, got none")
    if args.stream and args.batch_size > 1:
        parser.error("argument --stream: expected --batch-size 1, got more than one answer")
    if args.output is not None and not args.compare:
        parser.error("argument --output: shows what --compare measures; add --compare")
    if args.compile and not args.compare:
        parser.error(
            "argument --compile: is one of the ways that --compare measures; add --compare"
        )
    resolve_device(parser, args)
    return args


class Chat:
    """Answers of a model to one prompt; `compiled`: on a static cache, whose tensors keep their
    shapes, so that one compiled step serves all of an answer."""

    def __init__(
        self, model: Any, tokenizer: Any, args: argparse.Namespace, compiled: bool = False
    ) -> None:
        self.model, self.tokenizer, self.device = model, tokenizer, args.device
        self.inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": args.prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        ).to(args.device)
        self.rows = args.batch_size
        self.inputs = {k: v.repeat(self.rows, 1) for k, v in self.inputs.items()}
        self.settings: dict[str, Any] = {
            "max_new_tokens": args.max_new_tokens,
            "do_sample": args.sample,
        }
        if compiled:
            self.settings["cache_implementation"] = "static"
            if args.device.type == "cpu":  # on a GPU transformers compiles by itself
                self.settings["disable_compile"] = True
                model.compile(dynamic=False)

    def answer(self, streamed: bool = False) -> list[int]:
        """The new tokens of all texts, one text after the other."""
        streamer = None
        if streamed:
            from transformers import TextStreamer

            streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        return self._generate(**self.settings, streamer=streamer)

    def seconds(self) -> list[float]:
        """Until `measured_tokens` new tokens were there, whatever they are, and each of them."""
        started, clock = now(self.device), Clock()
        count = self.measured_tokens
        lengths = {"max_new_tokens": count, "min_new_tokens": count}
        made = self._generate(**self.settings | lengths, streamer=clock)
        seconds = now(self.device) - started
        assert len(made) == count * self.rows == len(clock.times) * self.rows
        return [seconds, *(t - started for t in clock.times)]

    @property
    def measured_tokens(self) -> int:
        return max(MEASURED_TOKENS, self.settings["max_new_tokens"])

    def _generate(self, **settings: Any) -> list[int]:
        torch.manual_seed(SEED)
        output = self.model.generate(**self.inputs, **settings)
        return output[:, self.inputs["input_ids"].shape[1] :].flatten().tolist()

    def run(self, tokens: list[int], times: list[list[float]]) -> Run:
        first = tokens[: len(tokens) // self.rows]
        text = self.tokenizer.decode(first, skip_special_tokens=True)
        all_seconds = [whole for whole, *_ in times]
        seconds = statistics.median(all_seconds)
        count = self.measured_tokens
        gaps = [[b - a for a, b in itertools.pairwise(t[1:])] for t in times]
        return Run(
            tokens,
            text,
            count,
            seconds,
            all_seconds,
            count / seconds,
            statistics.median(t[1] for t in times),
            [1e3 * statistics.median(of_one) for of_one in zip(*gaps, strict=True)],
        )


def chats_of(
    model: Any, tokenizer: Any, args: argparse.Namespace
) -> tuple[dict[str, Chat], hfpatch.Report]:
    """The ways to answer by label, and what was patched. Each has a model of its own over the same
    weights."""
    chats: dict[str, Chat] = {}
    if args.compare:
        chats["original"] = Chat(twin(model), tokenizer, args)
    if args.compile:
        chats["compiled"] = Chat(twin(model), tokenizer, args, compiled=True)
    report = hfpatch.apply(model)
    chats["patched"] = Chat(model, tokenizer, args)
    return chats, report


def twin(model: Any) -> Any:
    """Another model over the same weights."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def measure(chats: dict[str, Chat], turns: int) -> dict[str, Run]:
    """The answers by label. The ways take turns, so that all meet the same neighbours on the
    machine."""
    answers: dict[str, list[int]] = {}
    for label, chat in chats.items():
        answers[label] = chat.answer()  # also warms up
        if label == "compiled":
            chat.seconds()  # compiles for the lengths that are timed
    times: dict[str, list[list[float]]] = {label: [] for label in chats}
    for _ in range(turns):
        for label, chat in chats.items():
            times[label].append(chat.seconds())
    return {label: chat.run(answers[label], times[label]) for label, chat in chats.items()}


def table(runs: dict[str, Run]) -> str:
    """Time to the first token, and milliseconds a token in the parts of an answer."""
    count = len(next(iter(runs.values())).ms_a_token)
    ends = [count * (i + 1) // PARTS for i in range(PARTS)]
    spans = [(a, b) for a, b in itertools.pairwise([0, *ends]) if b > a]
    head = [f"tokens {a + 2}-{b + 1}" for a, b in spans]
    rows = [["", "first token, ms", *(f"{h}, ms each" for h in head)]]
    for label, run in runs.items():
        parts = [statistics.median(run.ms_a_token[a:b]) for a, b in spans]
        rows.append([label, *(f"{x:.2f}" for x in (1e3 * run.first_token_seconds, *parts))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows
    )


def save_picture(runs: dict[str, Run], title: str, file: Path) -> None:
    """Milliseconds a token over the answer, and until the first token.

    Raises:
        SystemExit: matplotlib is not there.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        sys.exit("error: `--output` needs matplotlib; run `pip install matplotlib`")
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (first, each) = pyplot.subplots(
        1, 2, figsize=(10, 4), width_ratios=[1, 3], layout="constrained"
    )
    for label, run in runs.items():
        (bar,) = first.bar(label, 1e3 * run.first_token_seconds)
        each.plot(range(2, len(run.ms_a_token) + 2), run.ms_a_token, color=bar.get_facecolor())
        each.plot([], [], color=bar.get_facecolor(), label=label)
    first.set_ylabel("ms to the first token")
    each.set_xlabel("token of the answer")
    each.set_ylabel("ms")
    each.set_ylim(bottom=0)
    each.legend()
    figure.suptitle(title)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def load_any(name: str | None, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """(model in eval mode, tokenizer).

    Raises:
        OSError, ValueError: there is none of that name, or it is no language model.
    """
    if name is None:
        return load(dtype, device)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
    return model, AutoTokenizer.from_pretrained(name)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Returns what --json prints."""
    args = parse_arguments(argv)
    out = Output(args.json)
    result: dict[str, Any] = {
        "model": args.model or "SmolLM2-135M-Instruct",
        "device": device_name(args.device),
        "dtype": dtype_name(args.dtype),
        "compiled": args.compile,
        "prompt": args.prompt,
        "max_new_tokens": args.max_new_tokens,
        "batch_size": args.batch_size,
        "sampled": args.sample,
    }
    out.say(f"{result['model']} in {result['dtype']} on {result['device']}\n\n> {args.prompt}\n")
    try:
        model, tokenizer = load_any(args.model, args.dtype, args.device)
    except (OSError, ValueError) as e:
        sys.exit(f"error: {e}")

    chats, report = chats_of(model, tokenizer, args)
    if args.stream:
        with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
            chats["patched"].answer(streamed=True)
    runs = measure(chats, args.turns)
    if not args.stream:
        out.say(runs["patched"].answer)
    out.say(f"\n{report}\n")
    for label, run in runs.items():
        out.say(
            f"{label:>8}: {run.measured_tokens} tokens in "
            f"{Spread.of(run.all_seconds).text('s')}, {run.tokens_per_second:.1f} tokens/s"
            + (f" of each of {args.batch_size} texts" if args.batch_size > 1 else "")
        )
    out.say(f"\n{table(runs)}\n")
    if args.compare:
        original, patched = runs["original"], runs["patched"]
        result["identical"] = original.tokens == patched.tokens
        gain = Gain.of(original.all_seconds, patched.all_seconds)
        result["speed_up"], result["within_noise"] = gain.ratio, gain.within_noise
        if args.compile:
            over = Gain.of(runs["compiled"].all_seconds, patched.all_seconds)
            result["speed_up_over_compiled"] = over.ratio
            out.say(f"speed-up over the compiled original: {over}")
        if args.output is not None:
            save_picture(runs, f"{result['model']}, {result['device']}", args.output)
            out.say(f"picture: {args.output}")
            result["picture"] = str(args.output)
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
