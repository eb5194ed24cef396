"""The loss of a causal language model with its gradient, in training: time and memory by peers.

python benchmarks/loss.py --output benchmarks/results/loss-h200.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers.loss.loss_utils import ForCausalLMLoss

import hfpatch.loss
from hfpatch.bench import results

Tensor = torch.Tensor
Loss = Callable[[Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """Logits of a batch of sequences."""

    model: str
    batch: int
    length: int
    classes: int


CASES = (
    Case("Llama 2", 4, 2048, 32000),
    Case("Llama 3", 4, 2048, 128256),
    Case("Qwen 3", 4, 2048, 151936),
    Case("Gemma 3", 2, 2048, 262144),
)


def ways(items: Tensor) -> dict[str, Loss]:
    """Each divides by `items`, as in `Trainer`; a peer that is not installed is left out."""

    def eager(logits: Tensor, labels: Tensor) -> Tensor:
        return ForCausalLMLoss(logits, labels, logits.shape[-1], items)

    def fused(logits: Tensor, labels: Tensor) -> Tensor:
        return hfpatch.loss.causal_lm(logits, labels, logits.shape[-1], items)

    found: dict[str, Loss] = {"transformers": eager}
    found["torch.compile"] = torch.compile(eager, dynamic=False)
    try:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
    except ImportError as e:
        print("Liger:", e)
    else:

        def liger(logits: Tensor, labels: Tensor) -> Tensor:
            """As its own models do: over the logits, the sum divided afterwards."""
            target = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
            apply = LigerCrossEntropyFunction.apply
            loss = apply(logits.view(-1, logits.shape[-1]), target, None, -100, 0.0, 0.0, "sum")
            return loss[0] / items

        found["Liger"] = liger
    found["hfpatch"] = fused
    return found


def step(way: Loss, made: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """As in a model: the logits are a result, whose gradient goes on to the layer before."""
    source = made.requires_grad_()
    logits = source.view_as(source)
    loss = way(logits, labels)
    (gradient,) = torch.autograd.grad(loss, logits)
    return loss.detach(), gradient


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """A row; a peer that cannot do this is left out of it, with the reason."""
    row: dict[str, Any] = case._asdict() | {"ms": {}, "peak_gib": {}, "error": {}, "failed": {}}
    shape = (case.batch, case.length, case.classes)
    kept = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(case.classes, shape[:2], device="cuda")
    peers = ways(torch.tensor(case.batch * (case.length - 1), device="cuda"))
    times: dict[str, list[float]] = {name: [] for name in peers}
    truth: Tensor | None = None
    for number in range(rounds + 2):
        for name in [name for name in peers if name not in row["failed"]]:
            logits = kept.clone()  # Liger writes over them
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            try:
                loss, gradient = step(peers[name], logits, labels)
            except Exception as e:
                row["failed"][name] = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
                continue
            end.record()
            end.synchronize()
            if number >= 2:
                times[name].append(start.elapsed_time(end))
            # the most: in some rounds what the peer before has left is freed meanwhile
            peak = (torch.cuda.max_memory_allocated() - before) / 2**30
            row["peak_gib"][name] = max(peak, row["peak_gib"].get(name, 0.0))
            part = gradient[0, :8].double()
            truth = part if truth is None else truth
            row["error"][name] = ((part - truth).norm() / truth.norm()).item()
            del loss, gradient, logits
    row["ms"] = {name: median(found) for name, found in times.items() if found}
    return row


def table(rows: list[dict[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row["ms"]))
    shown = Table(title="loss and gradient, bf16, ms (GiB)", title_justify="left", box=None)
    for name in ("model", "B, S, V", *names):
        shown.add_column(name, justify="left" if name in ("model", "B, S, V") else "right")
    for row in rows:
        cells = [
            f"{row['ms'][n]:.2f} ({row['peak_gib'][n]:.1f})" if n in row["ms"] else "failed"
            for n in names
        ]
        shown.add_row(row["model"], f"{row['batch']}, {row['length']}, {row['classes']}", *cells)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, metavar="JSON")
    parser.add_argument("--commit", help="what was measured; default: git's HEAD")
    parser.add_argument("--rounds", type=int, default=11, help="default 11")
    args = parser.parse_args()
    result = results.head("loss", torch.device("cuda"), args.commit)
    result |= {"dtype": "bfloat16", "rows": []}
    for case in CASES:
        result["rows"].append(measure(case, args.rounds))
        if args.output:  # after each, so that a run that is cut off keeps what it measured
            results.write(result, args.output)
    console = Console(width=140)
    console.print(table(result["rows"]))
    for row in result["rows"]:
        for name, why in row["failed"].items():
            console.print(f"{name} failed on {row['model']}: {why}", markup=False)


if __name__ == "__main__":
    main()
