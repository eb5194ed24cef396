"""The loss of a language model from its last hidden states, and a whole training step.

python benchmarks/head_loss.py --output benchmarks/results/head-loss-h200.json

Peers in turns: eager PyTorch (the head, then transformers' loss), torch.compile, Liger's fused
linear cross entropy where it is installed. Forward and backward, gradients of hidden states and
weight; milliseconds (the least of the medians of three rounds) and the peak of memory beside the
inputs. The step is Llama-3.2-1B's shape with random weights, 4 x 2048 tokens, in bf16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import hfpatch
from hfpatch.bench import results
from hfpatch.losses.head_loss import linear_cross_entropy


class Case(NamedTuple):
    """A head and the tokens of a batch."""

    model: str
    tokens: int
    hidden: int
    classes: int


CASES = (
    Case("Llama-3.2-1B", 8192, 2048, 128256),
    Case("Llama-3.1-8B", 8192, 4096, 128256),
    Case("Qwen3-0.6B", 16384, 1024, 151936),
    Case("Gemma3-1B", 8192, 1152, 262144),
    Case("GPT2-large", 8192, 1280, 50257),  # rows of logits begin at odd addresses
    Case("Granite-3.3-2B", 8192, 2048, 49159),
)
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def ways() -> dict[str, Way]:
    """Loss of hidden [N, H], weight [V, H], target [N]."""

    def eager(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w).float(), t)

    found: dict[str, Way] = {"eager": eager, "torch.compile": torch.compile(eager, dynamic=False)}
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    except ImportError as e:
        print("Liger:", e)
    else:
        apply = LigerFusedLinearCrossEntropyFunction.apply
        found["Liger"] = lambda x, w, t: apply(x, w, t)[0]
    found["hfpatch"] = lambda x, w, t: linear_cross_entropy(x, w, t)
    return found


def timed(run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """(median ms, GiB that it takes at most)."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, times = torch.cuda.memory_allocated(), []
    for _ in range(repeats):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times), (torch.cuda.max_memory_allocated() - before) / 2**30


def in_turns(runs: dict[str, Callable[[], Any]], repeats: int = 7) -> dict[str, Any]:
    """Of each way, ms and GiB; why, where it fails."""
    row: dict[str, Any] = {"ms": {}, "peak_gib": {}, "failed": {}}
    for number in range(4):
        for name, run in runs.items():
            if name in row["failed"]:
                continue
            try:
                ms, gib = timed(run, 2 if number == 0 else repeats)
            except Exception as e:
                row["failed"][name] = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
                continue
            if number:  # the first round warms up
                row["ms"][name] = min(ms, row["ms"].get(name, ms))
                row["peak_gib"][name] = max(gib, row["peak_gib"].get(name, gib))
    return row


def errors(peers: dict[str, Way], x: Tensor, w: Tensor, t: Tensor) -> dict[str, float]:
    """Of the weight's gradient, relative to that of fp32 products, over some classes."""

    def of(way: Way, x: Tensor, w: Tensor) -> Tensor:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(way(x, w, t), w)[0][:4096].double()

    n = 1024
    x, t = x[:n], t[:n]
    truth = of(peers["eager"], x.float(), w.float())
    found = {}
    for name, way in peers.items():
        if name != "torch.compile":  # another shape, another compilation
            found[name] = ((of(way, x, w) - truth).norm() / truth.norm()).item()
    return found


def measure(case: Case) -> dict[str, Any]:
    peers = ways()
    torch.manual_seed(0)
    x = torch.randn(case.tokens, case.hidden, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(case.classes, case.hidden, device="cuda", dtype=torch.bfloat16) * 0.02
    t = torch.randint(case.classes, (case.tokens,), device="cuda")
    x.requires_grad_()
    w.requires_grad_()

    def run(way: Way) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(way(x, w, t), [x, w])

    found = in_turns({name: run(way) for name, way in peers.items()})
    return case._asdict() | found | {"weight_gradient_error": errors(peers, x, w, t)}


def step_of_a_model() -> dict[str, Any]:
    """A training step, forward and backward."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    ids = torch.randint(128256, (4, 2048), device="cuda")
    row: dict[str, Any] = {"ms": {}, "peak_gib": {}, "loss": {}}

    def make() -> Any:
        torch.manual_seed(0)
        with torch.device("cuda"):
            return LlamaForCausalLM(config).to(torch.bfloat16).train()

    def liger() -> Any:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        model = make()
        _apply_liger_kernel_to_instance(model=model)
        return model

    def patched(**kwargs: Any) -> Any:
        model = make()
        hfpatch.apply(model, mode="training", **kwargs)
        return model

    makers: dict[str, Callable[[], Any]] = {
        "eager": make,
        "hfpatch, whole logits": lambda: patched(exclude="lm_head"),
        "hfpatch": patched,
        "Liger": liger,  # the last: it replaces functions of transformers for all that come after
    }
    for name, maker in makers.items():
        torch.cuda.empty_cache()
        try:
            model = maker()
        except ImportError as e:
            print(name, e)
            continue

        def step(model: Any = model) -> Any:
            model.zero_grad(set_to_none=True)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            return loss

        row["loss"][name] = step().item()
        step()
        rounds = [timed(step, 5) for _ in range(3)]
        row["ms"][name] = min(ms for ms, _ in rounds)
        row["peak_gib"][name] = torch.cuda.max_memory_allocated() / 2**30
        del model, step
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, metavar="JSON")
    parser.add_argument("--commit", help="what was measured; default: git's HEAD")
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="those heads, and no step")
    args = parser.parse_args()
    result = results.head("head loss", torch.device("cuda"), args.commit)
    result |= {"dtype": "bfloat16", "rows": []}

    def write() -> None:  # after each, so that a run that is cut off keeps what it measured
        if args.output:
            results.write(result, args.output)

    for case in CASES:
        if args.only and case.model not in args.only:
            continue
        result["rows"].append(measure(case))
        print(result["rows"][-1])
        write()
        torch.cuda.empty_cache()
    if not args.only:
        result["step"] = step_of_a_model()
        print(result["step"])
    write()


if __name__ == "__main__":
    main()
