"""Training steps of whole models: time, peak of memory, and what is kept for the backward.

python benchmarks/training.py --output benchmarks/results/training-h100.json   # a GPU, all cases
python benchmarks/training.py --saved   # a CPU: bytes that autograd keeps of a layer, by way

Each peer runs in a process of its own (Liger replaces functions of transformers). A step is
forward and backward with random weights and tokens, gradients set to None before; milliseconds are
the least of three rounds' medians. Cases come in order of importance and stop where `--budget`
seconds are spent. Before them, gradients are checked against fp64.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

MARK = "RESULT "


class Case(NamedTuple):
    """A model and a batch. checkpoint: of activations; lora: rank of adapters, 0: all weights;
    sequences: in each row, told by their positions; wide: adapters in fp32, as PEFT makes them."""

    name: str
    rows: int
    tokens: int
    checkpoint: bool = False
    lora: int = 0
    sequences: int = 1
    wide: bool = False


CASES = {
    c.name: c
    for c in (
        Case("llama-1b", 4, 2048),
        Case("qwen3-0.6b", 4, 4096),
        Case("gemma3-1b", 4, 2048),
        Case("llama-8b-8-layers-checkpointed", 1, 8192, checkpoint=True),
        Case("llama-1b-lora-16", 4, 2048, lora=16),
        Case("llama-1b-packed", 1, 8192, sequences=16),
        Case("llama-1b-lora-16-fp32", 4, 2048, lora=16, wide=True),
    )
}
#: (case, way), the most important first.
RUNS = (
    *(("llama-1b", way) for way in ("hfpatch", "liger", "eager")),
    *((name, way) for name in CASES if name != "llama-1b" for way in ("hfpatch", "liger")),
    ("llama-1b-lora-16", "eager"),
    ("llama-1b", "compile"),
    *((name, "eager") for name in CASES if name not in ("llama-1b", "llama-1b-lora-16")),
    ("llama-1b-lora-16", "compile"),
    ("llama-8b-8-layers-checkpointed", "compile"),
    ("qwen3-0.6b", "compile"),
    ("gemma3-1b", "compile"),
)


def config_of(name: str, layers: int | None = None) -> Any:
    """The model's shape, as its release has it."""
    from transformers import Gemma3TextConfig, LlamaConfig, Qwen3Config

    if name.startswith("llama-1b"):
        config: Any = LlamaConfig(
            vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
            num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True,
            max_position_embeddings=8192,
        )  # fmt: skip
    elif name.startswith("llama-8b"):
        config = LlamaConfig(
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=8,
            num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
        )  # fmt: skip
    elif name.startswith("qwen3"):
        config = Qwen3Config(
            vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
            num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
            max_position_embeddings=8192,
        )  # fmt: skip
    else:
        config = Gemma3TextConfig(
            vocab_size=262144, hidden_size=1152, intermediate_size=6912, num_hidden_layers=26,
            num_attention_heads=4, num_key_value_heads=1, head_dim=256, sliding_window=512,
            max_position_embeddings=8192,
        )  # fmt: skip
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    return config


def make(case: Case, way: str, device: str, layers: int | None = None) -> Any:
    """The model in bf16, patched as `way` says, ready to train."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config_of(case.name, layers), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model = model.to(torch.bfloat16).train()
    model.config.use_cache = False
    if way == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    if case.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if case.lora:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        config = LoraConfig(r=case.lora, target_modules=targets)
        model = get_peft_model(model, config, autocast_adapter_dtype=case.wide)
    if way == "hfpatch":
        import hfpatch

        report = hfpatch.apply(model, mode="training")
        print(str(report)[:3000], file=sys.stderr)
    if way == "compile":
        model = torch.compile(model)
    return model


def timed(step: Callable[[], Any], rounds: int = 3, repeats: int = 5) -> dict[str, float]:
    """ms and GiB of a step that has warmed up."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    least = float("inf")
    for _ in range(rounds):
        times = []
        for _ in range(repeats):
            event: Any = torch.cuda.Event
            start, end = event(True), event(True)
            start.record()
            step()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        least = min(least, median(times))
    return {"ms": least, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def kernels_of(step: Callable[[], Any], most: int = 45) -> list[dict[str, Any]]:
    """Where the GPU's time goes in one step: names, calls and ms, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    rows = [
        {"name": e.key[:110], "calls": e.count, "ms": round(e.device_time_total / 1e3, 3)}
        for e in found.key_averages()
    ]
    return sorted(rows, key=lambda r: -float(r["ms"]))[:most]


def one(name: str, way: str) -> dict[str, Any]:
    """A case's row for one way, in this process."""
    case = CASES[name]
    model = make(case, way, "cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    vocab = config_of(name).vocab_size
    ids = torch.randint(vocab, (case.rows, case.tokens), device="cuda", generator=generator)

    more = {}
    if case.sequences > 1:
        length = case.tokens // case.sequences
        more["position_ids"] = torch.arange(length, device="cuda").repeat(case.rows, case.sequences)

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False, **more).loss
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    loss = step().item()
    step()
    row: dict[str, Any] = {"case": name, "way": way, "loss": loss, **timed(step)}
    if way == "hfpatch":
        import hfpatch

        row["layers"] = sum(s.op == "layer" for s in hfpatch.status(model).swaps)
        torch.backends.cuda.enable_cudnn_sdp(False)
        step()
        row["with_flash_attention"] = timed(step, rounds=2)
        torch.backends.cuda.enable_cudnn_sdp(True)
        step()
    if way in ("hfpatch", "liger"):
        row["kernels"] = kernels_of(step)
    return row


# --- gradients against fp64 -----------------------------------------------------------------------


def check(device: str = "cuda") -> dict[str, Any]:
    """Gradients of two layers of each shape: eager's and ours', as far from fp32 weights' own."""
    import hfpatch

    found: dict[str, Any] = {}
    for name in ("llama-1b", "qwen3-0.6b", "gemma3-1b"):
        case = CASES[name]._replace(rows=2, tokens=512)
        model = make(case, "eager", device, layers=2)
        generator = torch.Generator(device).manual_seed(2)
        ids = torch.randint(
            config_of(name).vocab_size, (2, 512), device=device, generator=generator
        )

        def gradients(model: Any, ids: Tensor = ids) -> dict[str, Tensor]:
            model.zero_grad(set_to_none=True)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            return {n: p.grad.float() for n, p in model.named_parameters()}

        eager = gradients(model)
        report = hfpatch.apply(model, mode="training")
        ours = gradients(model)
        hfpatch.restore(model)
        wide = gradients(model.double())
        worst: dict[str, Any] = {"worst": 0.0}
        for parameter, truth in wide.items():
            scale = truth.norm()
            theirs = ((eager[parameter] - truth).norm() / scale).item()
            own = ((ours[parameter] - truth).norm() / scale).item()
            if theirs and own / theirs > worst["worst"]:
                worst = {"worst": own / theirs, "of": parameter, "ours": own, "eager": theirs}
        layers = sum(s.op == "layer" for s in report.swaps)
        found[name] = {"layers": layers, "skipped": [str(s)[:200] for s in report.skips], **worst}
        del model, eager, ours, wide
        if device == "cuda":
            torch.cuda.empty_cache()
    return found


# --- what autograd keeps --------------------------------------------------------------------------


def saved(way: str, name: str, rows: int = 1, tokens: int = 256) -> dict[str, float]:
    """Bytes per token and layer that autograd keeps, each storage once, without parameters."""
    kept = []
    for layers in (1, 2):
        case = CASES[name]
        model = make(case, way, "cpu", layers)
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        storages: dict[int, int] = {}
        held: list[Tensor] = []

        def pack(t: Tensor, own: Any = own, into: Any = storages, held: Any = held) -> Tensor:
            s = t.untyped_storage()
            if s.data_ptr() not in own and t.numel() > 1:
                into[s.data_ptr()] = s.nbytes()
                held.append(t)
            return t

        ids = torch.randint(1000, (rows, tokens))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        kept.append(sum(storages.values()))
        del loss, model, held
    each = (kept[1] - kept[0]) / (rows * tokens)
    whole = config_of(name).num_hidden_layers * each * CASES[name].rows * CASES[name].tokens
    return {"bytes_per_token_and_layer": each, "gib_of_all_layers": whole / 2**30}


def drive(output: Path | None, budget: float, only: str | None, commit: str | None) -> None:
    """All runs in processes of their own, until the time is spent."""
    from hfpatch.bench import results

    started = time.monotonic()
    result: dict[str, Any] = results.head("training", torch.device("cuda"), commit)
    result |= {"dtype": "bfloat16", "rows": [], "failed": {}, "not_run": []}
    runs: list[list[str]] = [["--check"], *(["--one", case, way] for case, way in RUNS)]
    for arguments in runs:
        name = " ".join(arguments[1:]) or "check"
        if only is not None and not re.search(only, name):
            continue
        left = budget - (time.monotonic() - started)
        if left < 12:
            result["not_run"].append(name)
            continue
        command = [sys.executable, __file__, *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=left)
            lines = [x for x in done.stdout.splitlines() if x.startswith(MARK)]
            row = json.loads(lines[-1].removeprefix(MARK)) if lines else None
            why = "\n".join((done.stderr or "").splitlines()[-12:])
        except subprocess.TimeoutExpired:
            row, why = None, "the budget ended"
        if row is None:
            result["failed"][name] = why
            print(name, "FAILED:", why[-1500:], flush=True)
        else:
            result["check" if name == "check" else "rows"] = (
                row if name == "check" else [*result["rows"], row]
            )
            shown = {k: v for k, v in row.items() if k != "kernels"}
            print(json.dumps(shown)[:1500], f"[{time.monotonic() - started:.0f} s]", flush=True)
        if output is not None:
            output.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, metavar="JSON")
    parser.add_argument("--budget", type=float, default=235, help="seconds for all")
    parser.add_argument(
        "--only", help="runs in whose name (CASE WAY, check) this regular expression is"
    )
    parser.add_argument("--commit", help="what was measured; default: git's HEAD")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "WAY"), help="one run in this process")
    parser.add_argument("--check", action="store_true", help="gradients in this process")
    parser.add_argument("--saved", action="store_true", help="what autograd keeps, on a CPU")
    parser.add_argument("--ways", default="eager,hfpatch", help="of --saved")
    args = parser.parse_args()
    if args.one:
        print(MARK + json.dumps(one(*args.one)))
    elif args.check:
        print(MARK + json.dumps(check("cuda" if torch.cuda.is_available() else "cpu")))
    elif args.saved:
        for name in CASES:
            if not CASES[name].checkpoint and CASES[name].sequences == 1:
                for way in args.ways.split(","):
                    print(name, way, json.dumps(saved(way, name)), flush=True)
    else:
        drive(args.output, args.budget, args.only, args.commit)


if __name__ == "__main__":
    main()
