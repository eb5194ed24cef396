"""Step times of full-size models, random weights: eager, hfpatch, torch.compile, in one run.

python benchmarks/models.py --output benchmarks/results/models-h100.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import joint
import single_stream
import torch

import hfpatch
from hfpatch.bench.timing import queued_milliseconds, step_milliseconds
from hfpatch.env import versions
from hfpatch.patches.blocks import flash3

DEVICE, DTYPE = "cuda", torch.bfloat16


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


def launches(call: Callable[[], Any]) -> int:
    """CUDA kernels that one call launches."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    return sum(e.count for e in profile.key_averages() if e.device_type.name == "CUDA")


def peak_gib(call: Callable[[], Any]) -> float:
    """The most memory that tensors held during one call, the model's included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def timed(row: dict[str, Any], name: str, call: Callable[[], Any]) -> None:
    """Adds the time of a step that the device is waited for, and of one among queued steps.

    Measured in turns with others, the least counts: other work on the host only ever adds time.
    """
    for key, ms in (
        (f"{name}_ms", step_milliseconds(call)),
        (f"{name}_queued_ms", queued_milliseconds(call)),
    ):
        row[key] = min(ms, row.get(key, ms))


def compiled_step(model: Any, step: Any, row: dict[str, Any], name: str) -> None:
    """Adds the time of the first call and that of a step, under torch.compile."""
    torch._dynamo.reset()
    fast = torch.compile(model, dynamic=False)
    start = time.perf_counter()
    step(fast)
    torch.cuda.synchronize()
    row[f"{name}_s"] = time.perf_counter() - start
    timed(row, f"{name}d", lambda: step(fast))


def compiled_blocks(model: Any, step: Any, row: dict[str, Any]) -> None:
    """The same with diffusers' `compile_repeated_blocks`, which compiles one block of each kind."""
    if not getattr(model, "_repeated_blocks", None):
        return
    torch._dynamo.reset()
    model.compile_repeated_blocks(dynamic=False)
    start = time.perf_counter()
    step(model)
    torch.cuda.synchronize()
    row["compile_blocks_s"] = time.perf_counter() - start
    timed(row, "compiled_blocks", lambda: step(model))
    for module in model.modules():
        module._compiled_call_impl = None


def measure(name: str, compiled: str) -> dict[str, Any]:
    model, step = CASES[name]()
    row: dict[str, Any] = {"case": name}
    with torch.no_grad():
        reference = step(model)[0].float()
        timed(row, "eager", lambda: step(model))
        row["eager_peak_gib"] = peak_gib(lambda: step(model))
        report = hfpatch.apply(model)
        row["swaps"], row["apply_s"] = len(report.swaps), report.plan.seconds
        timed(row, "patched", lambda: step(model))
        row["patched_peak_gib"] = peak_gib(lambda: step(model))
        patched = step(model)[0].float()
        row["attention"] = flash3.in_use()
        row["relative_difference"] = ((patched - reference).norm() / reference.norm()).item()
        if not name.startswith("llama"):  # a denoiser: one graph per step
            hfpatch.apply(model, cuda_graphs=True)
            timed(row, "graphs", lambda: step(model))
            graphed = step(model)[0].float()
            row["graphs_are_exact"] = torch.equal(graphed, patched)
            off = (graphed - patched).norm() / patched.norm()
            row["graphs_relative_difference"] = off.item()
            row["graphs_notes"] = list(hfpatch.status(model).plan.notes)
        if compiled == "whole":
            hfpatch.apply(model)
            compiled_step(model, step, row, "apply_and_compile")
        hfpatch.restore(model)
        for _ in range(2 if row["eager_ms"] < 150 else 0):  # those that may wait for the host
            timed(row, "eager", lambda: step(model))
            hfpatch.apply(model)
            timed(row, "patched", lambda: step(model))
            hfpatch.restore(model)
        if compiled == "whole":
            compiled_step(model, step, row, "compile")
        if compiled != "none":
            compiled_blocks(model, step, row)
        # Last: once the profiler was attached, every launch in this process takes the host longer.
        torch._dynamo.reset()
        row["eager_launches"] = launches(lambda: step(model))
        hfpatch.apply(model)
        row["patched_launches"] = launches(lambda: step(model))
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
