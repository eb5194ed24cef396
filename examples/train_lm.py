"""Fine-tune SmolLM2-135M (real weights) on hfpatch's own documentation, patched and not.

    python examples/train_lm.py
    python examples/train_lm.py --device cuda --dtype float32 --steps 50 --batch-size 4

Both see the same tokens in the same order, each in a process of its own, so that the peak of the
memory is its own too. The loss curves are drawn in one picture.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
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
from _smollm2 import load, unpacked

import hfpatch
import hfpatch.optim
from hfpatch.bench.spread import Gain, Spread

DOCS = Path(__file__).resolve().parent.parent / "docs"
WAYS = ("original", "patched")
CLIP = 1.0


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, help="a file to train on (default: the pages of docs)")
    parser.add_argument("--steps", type=at_least(3), default=8)
    parser.add_argument("--batch-size", type=at_least(1), default=1)
    parser.add_argument("--sequence-length", type=at_least(2), default=64, help="in tokens")
    parser.add_argument(
        "--batches", type=at_least(1), default=2, help="after so many the text begins anew"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--output", type=Path, default=Path("outputs/train_lm.png"))
    add_device_arguments(parser)
    args = parser.parse_args(argv)
    if args.text is not None and not args.text.is_file():
        parser.error(f"argument --text: expected a file, got {str(args.text)!r}")
    if not args.learning_rate > 0:
        parser.error(f"argument --learning-rate: expected more than 0, got {args.learning_rate}")
    resolve_device(parser, args)
    return args


def batches(tokenizer: Any, args: argparse.Namespace) -> torch.Tensor:
    """Token ids [steps, batch size, sequence length], one text behind the other.

    They come again soon, so that a few steps are enough for a loss that falls.
    """
    files = [args.text] if args.text else sorted(DOCS.glob("*.md"))
    text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    distinct = min(args.batches, args.steps)
    shape = (distinct, args.batch_size, args.sequence_length)
    wanted = torch.Size(shape).numel()
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    if not len(ids):
        raise ValueError("`--text`: expected a text, got an empty file")
    ids = ids.repeat(-(-wanted // len(ids)))[:wanted].view(shape)
    return ids[torch.arange(args.steps) % distinct]


def train(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Losses, seconds of each step, the peak of the memory in bytes and what was patched."""
    leave_out_unused()
    model, tokenizer = load(args.dtype, args.device)
    model.train()
    data = batches(tokenizer, args)
    report = None
    optimizer: torch.optim.Optimizer
    if way == "patched":
        report = hfpatch.apply(model, mode="training")
        optimizer = hfpatch.optim.AdamW(model.parameters(), lr=args.learning_rate)
        clip = hfpatch.optim.clip_grad_norm_
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
        clip = torch.nn.utils.clip_grad_norm_
    losses, seconds = [], []
    for ids in data.to(args.device):
        started = now(args.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        clip(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        seconds.append(now(args.device) - started)
    return {
        "losses": torch.stack(losses).tolist(),
        "all_seconds": seconds[1:],  # the first one allocates, and proves for what it meets
        "seconds": statistics.median(seconds[1:]),
        "peak_bytes": _peak(args.device),
        "report": None if report is None else report.to_dict(),
    }


def _peak(device: torch.device) -> int | None:
    """Of the GPU's tensors, or of this process; None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def save_picture(runs: dict[str, dict[str, Any]], title: str, output: Path) -> Path:
    """A PNG: the loss curves, and below how far the patched one is from the original."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    curves, apart = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = range(1, len(runs["original"]["losses"]) + 1)
    curves.plot(steps, runs["original"]["losses"], color="#bbbbbb", linewidth=5, label="original")
    curves.plot(steps, runs["patched"]["losses"], color="#4477aa", linewidth=1.5, label="patched")
    curves.set_ylabel("loss (nats per token)")
    curves.legend(frameon=False)
    pairs = zip(runs["patched"]["losses"], runs["original"]["losses"], strict=True)
    apart.plot(steps, [a - b for a, b in pairs], color="#4477aa", linewidth=1.5)
    apart.set_ylabel("patched − original")
    apart.set_xlabel("step")
    for axes in (curves, apart):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, linewidth=0.3)
    figure.suptitle(title, fontsize=10)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    return output


def table(runs: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'':>8}  {'a step':>22}  {'peak memory':>11}  {'first loss':>10}  {'last loss':>10}"]
    for way, run in runs.items():
        peak = "unknown" if run["peak_bytes"] is None else f"{run['peak_bytes'] / 2**30:.2f} GiB"
        lines.append(
            f"{way:>8}  {Spread.of(run['all_seconds']).text('s'):>22}  {peak:>11}  "
            f"{run['losses'][0]:>10.4f}  {run['losses'][-1]:>10.4f}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Returns what --json prints."""
    args = parse_arguments(argv)
    out = Output(args.json)
    try:
        unpacked()  # once, before two processes want it
    except FileNotFoundError as e:
        sys.exit(f"error: {e}")
    result: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct",
        "device": device_name(args.device),
        "dtype": dtype_name(args.dtype),
        "steps": args.steps,
        "tokens_per_step": args.batch_size * args.sequence_length,
    }
    title = (
        f"{result['model']} in {result['dtype']} on {result['device']}, "
        f"{args.steps} steps of {result['tokens_per_step']} tokens"
    )
    out.say(title + "\n")
    runs: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        # A new process: what the other one has left in caches and pools does not count.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            runs[way] = pool.apply(train, (way, args))
    gain = Gain.of(runs["original"]["all_seconds"], runs["patched"]["all_seconds"])
    pairs = zip(runs["patched"]["losses"], runs["original"]["losses"], strict=True)
    result["largest_difference"] = max(abs(a - b) for a, b in pairs)
    result["speed_up"], result["within_noise"] = gain.ratio, gain.within_noise
    out.say(table(runs))
    out.say(f"\nspeed-up: {gain}; losses differ by {result['largest_difference']:.1e} at most")
    try:
        result["picture"] = str(save_picture(runs, title, args.output))
        out.say(f"loss curves: {result['picture']}")
    except ImportError:
        out.say("no picture: matplotlib is not installed; run `pip install 'hfpatch[examples]'`")
    result["runs"] = runs
    out.finish(result)
    return result


if __name__ == "__main__":
    leave_out_unused()
    main()
