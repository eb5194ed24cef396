"""Step times of full-size models, random weights: eager, hfpatch, torch.compile, in turns.

python benchmarks/models.py --output benchmarks/results/models-h100.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import families
import joint
import single_stream
import torch

import hfpatch
from hfpatch.bench.timing import queued_milliseconds, step_milliseconds
from hfpatch.blocks import flash3
from hfpatch.env import versions

DEVICE, DTYPE = "cuda", torch.bfloat16
Call = Callable[[], Any]


def ltx(frames: int) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], Any]]:
    """LTX-Video 2B, 512 x 768, batch 2 (classifier-free guidance)."""
    from diffusers import LTXVideoTransformer3DModel

    with torch.device(DEVICE):
        model = LTXVideoTransformer3DModel().to(DTYPE).eval()
    f, h, w = (frames - 1) // 8 + 1, 512 // 32, 768 // 32
    inputs = {
        "hidden_states": torch.randn(2, f * h * w, 128, device=DEVICE, dtype=DTYPE),
        "encoder_hidden_states": torch.randn(2, 128, 4096, device=DEVICE, dtype=DTYPE),
        "timestep": torch.tensor([500, 500], device=DEVICE),
        "encoder_attention_mask": torch.ones(2, 128, device=DEVICE, dtype=DTYPE),
        "num_frames": f,
        "height": h,
        "width": w,
        "rope_interpolation_scale": (8 / 25, 32, 32),
        "return_dict": False,
    }
    return model, lambda m: m(**inputs)


def llama_8b(tokens: int) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], Any]]:
    """Llama-8B shape: a prefill of `tokens`, or one decoding step after 512 for tokens == 1."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
    )
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).to(DTYPE).eval()
    if tokens > 1:
        ids = torch.randint(0, 128256, (1, tokens), device=DEVICE)
        return model, lambda m: m(ids, use_cache=False, logits_to_keep=1)
    prompt = torch.randint(0, 128256, (1, 512), device=DEVICE)
    token = prompt[:, :1]
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(prompt, past_key_values=cache)

    def step(m: torch.nn.Module) -> Any:
        logits = m(token, past_key_values=cache).logits
        cache.crop(-1)  # the token of this step
        return (logits,)

    return model, step


CASES: dict[str, Callable[[], tuple[torch.nn.Module, Callable[[torch.nn.Module], Any]]]] = {
    "ltx-video 49 frames": lambda: ltx(49),
    "ltx-video 161 frames": lambda: ltx(161),
    "llama-8b prefill 2048": lambda: llama_8b(2048),
    "llama-8b decode": lambda: llama_8b(1),
    **single_stream.CASES,
    **joint.CASES,
    **families.CASES,
}


def launches(call: Call) -> int:
    """CUDA kernels that one call launches."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    return sum(e.count for e in profile.key_averages() if e.device_type.name == "CUDA")


def peak_gib(call: Call) -> float:
    """The most memory that tensors held during one call, the model's included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


#: A way to run a model: what it takes to be in it, and a step.
Way = tuple[Callable[[], AbstractContextManager[None]], Call]
WARM_UP, STEPS, QUEUED = 3, 5, 10  # a turn: steps to warm up, waited for one by one, queued


def rounds(step_ms: float) -> int:
    """How often each way of running a model gets its turn: steps for about 8 s, at least one turn.

    A fast model waits for the host, whose speed varies, so it gets more turns.
    """
    turn_ms = (WARM_UP + STEPS + QUEUED) * step_ms
    return max(1, min(5, round(8000 / turn_ms)))


def timed(row: dict[str, Any], name: str, call: Call) -> None:
    """Adds the time of a step that the device is waited for, and of one among queued steps.

    Measured in turns with others, the least counts: other work on the host only ever adds time.
    """
    for key, ms in (
        (f"{name}_ms", step_milliseconds(call, warmup=WARM_UP, steps=STEPS)),
        (f"{name}_queued_ms", queued_milliseconds(call, warmup=0, steps=QUEUED)),
    ):
        row[key] = min(ms, row.get(key, ms))


def in_turns(row: dict[str, Any], ways: dict[str, Way]) -> None:
    """Adds the times of all ways, each of which gets as many turns as the others."""
    state, call = ways["eager"]
    with state():
        row["rounds"] = rounds(step_milliseconds(call, warmup=1, steps=3))
    for _ in range(row["rounds"]):
        for name, (state, call) in ways.items():
            with state():
                timed(row, name, call)


@contextmanager
def applied(model: torch.nn.Module, **options: Any) -> Iterator[None]:
    hfpatch.apply(model, **options)
    try:
        yield
    finally:
        hfpatch.restore(model)


@contextmanager
def called_compiled(calls: dict[torch.nn.Module, Any]) -> Iterator[None]:
    """The modules are called by what `Module.compile` made of them."""
    for module, call in calls.items():
        module._compiled_call_impl = call
    try:
        yield
    finally:
        for module in calls:
            del module._compiled_call_impl  # None would be another module to what was compiled


def first_call_s(call: Call) -> float:
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def compiled_ways(model: Any, step: Any, row: dict[str, Any], compiled: str) -> dict[str, Way]:
    """torch.compile of the model, patched and as it is, or of its blocks alone; adds what the first
    call of each takes. All stay compiled while others have their turns."""
    ways: dict[str, Way] = {}
    if compiled == "whole":
        fast = torch.compile(model, dynamic=False)
        call = partial(step, fast)
        ways["apply_and_compiled"] = (partial(applied, model), call)
        with applied(model):
            row["apply_and_compile_s"] = first_call_s(call)
        ways["compiled"] = (nullcontext, call)
        row["compile_s"] = first_call_s(call)
    if compiled != "none" and getattr(model, "_repeated_blocks", None):
        model.compile_repeated_blocks(dynamic=False)  # one block of each kind
        calls = {m: m._compiled_call_impl for m in model.modules() if m._compiled_call_impl}
        ways["compiled_blocks"] = (partial(called_compiled, calls), partial(step, model))
        with called_compiled(calls):
            row["compile_blocks_s"] = first_call_s(partial(step, model))
    return ways


def measure(name: str, compiled: str) -> dict[str, Any]:
    model, step = CASES[name]()
    row: dict[str, Any] = {"case": name}
    call = partial(step, model)

    def warm() -> torch.Tensor:
        for _ in range(WARM_UP):
            call()
        result: torch.Tensor = call()[0].float()
        return result

    with torch.no_grad():
        ways: dict[str, Way] = {
            "eager": (nullcontext, call),
            "patched": (partial(applied, model), call),
        }
        reference = warm()
        row["eager_peak_gib"] = peak_gib(call)
        report = hfpatch.apply(model)
        row["swaps"], row["apply_s"] = len(report.swaps), report.plan.seconds
        patched = warm()
        row["attention"] = flash3.in_use()
        row["patched_peak_gib"] = peak_gib(call)
        row["relative_difference"] = ((patched - reference).norm() / reference.norm()).item()
        if not name.startswith("llama"):  # a denoiser: one graph per step
            ways["graphs"] = (partial(applied, model, cuda_graphs=True), call)
            hfpatch.apply(model, cuda_graphs=True)
            graphed = warm()
            row["graphs_are_exact"] = torch.equal(graphed, patched)
            off = (graphed - patched).norm() / patched.norm()
            row["graphs_relative_difference"] = off.item()
            row["graphs_notes"] = list(hfpatch.status(model).plan.notes)
        hfpatch.restore(model)
        in_turns(row, ways | compiled_ways(model, step, row, compiled))
        # Last: once the profiler was attached, every launch in this process takes the host longer.
        torch._dynamo.reset()
        row["eager_launches"] = launches(call)
        hfpatch.apply(model)
        row["patched_launches"] = launches(call)
    row["speedup"] = row["eager_ms"] / row["patched_ms"]
    return row


def measured_apart(name: str, compiled: str) -> dict[str, Any]:
    """`measure` in a process of its own: neither the profiler nor memory of another case is there.

    Raises:
        RuntimeError: it failed; says with what.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "row.json"
        command = [sys.executable, __file__, "--only", name, "--compile", compiled]
        command += ["--commit", "-", "--output", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not output.exists():
            raise RuntimeError(f"`{name}` was not measured:\n{done.stderr[-2000:]}")
        row: dict[str, Any] = json.loads(output.read_text())["rows"][0]
        return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", action="append", choices=list(CASES))
    parser.add_argument(
        "--compile",
        choices=("whole", "blocks", "none"),
        default="whole",
        help="torch.compile as a peer: the model (about a minute each), its repeated blocks, not",
    )
    parser.add_argument("--commit", help="commit that was measured; default: git's HEAD")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the rows in --output that are of the same commit and device",
    )
    args = parser.parse_args()
    head = (
        args.commit
        or subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    names = args.only or list(CASES)
    rows: list[dict[str, Any]] = []
    result = {
        "suite": "models",
        "device": torch.cuda.get_device_name(),
        "commit": head,
        "versions": versions() | {"cuda": torch.version.cuda or ""},
        "dtype": "bfloat16",
        "rows": rows,
    }
    if args.resume and args.output and args.output.exists():
        old = json.loads(args.output.read_text())
        if all(old[key] == result[key] for key in ("commit", "device")):
            rows += old["rows"]
    failed, several = 0, len(names) > 1
    for name in names:
        if any(row["case"] == name for row in rows):
            continue
        compiled = "none" if name == "llama-8b decode" else args.compile
        try:
            rows.append((measured_apart if several else measure)(name, compiled))
        except RuntimeError as e:
            if not several:
                raise
            print(e, file=sys.stderr)
            failed += 1
            continue
        print(json.dumps(rows[-1]), flush=True)
        if args.output:  # after each, so that a run that is cut off keeps what it measured
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(result, indent=1) + "\n")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
