"""Text to video with LTX-Video, with and without hfpatch's kernels.

    python examples/ltx_video.py --compare                      # Lightricks/LTX-Video, from the Hub
    python examples/ltx_video.py --compare --random-weights     # nothing to download
    python examples/ltx_video.py --compare --compile --cuda-graphs --difference --profile outputs
    python examples/ltx_video.py --prompt "A lighthouse at dusk" --output lighthouse.mp4

With random weights the model has the real architecture, so the times are real, but the video is
noise. On a CPU they come in a small size that finishes in seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import _ltx_attention
import _ltx_show
import torch
from _common import (
    Output,
    add_device_arguments,
    at_least,
    device_name,
    dtype_name,
    resolve_device,
)
from _ltx_variants import (
    EAGER,
    FPS,
    KERNELS,
    Measurement,
    Variant,
    chosen_variants,
    measure,
    once_more,
)
from _pictures import save_differences, save_videos
from _quiet import leave_out_unused

from hfpatch.bench.output import require_writable
from hfpatch.bench.spread import Spread
from hfpatch.env import versions

PROMPT = "A clear mountain stream runs over mossy stones, sunlight flickering on the water"
# What --height, --width, --num-frames and --steps are when not given.
FULL_SIZE = {"height": 512, "width": 768, "num_frames": 49, "steps": 30}
SMALL_SIZE = {"height": 128, "width": 192, "num_frames": 17, "steps": 20}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=f"Defaults: {FULL_SIZE}; with small random weights: {SMALL_SIZE}.",
    )
    add = parser.add_argument
    add("--model", default="Lightricks/LTX-Video", help="Hub id or folder (default: %(default)s)")
    add(
        "--random-weights",
        nargs="?",
        const="auto",
        choices=("auto", "small", "full"),
        help="build from the config instead; auto: small on a CPU, full on a GPU",
    )
    add("--prompt", default=PROMPT)
    add("--use-optimized-kernels", dest="optimized", action="store_true", default=True,
        help="apply hfpatch (the default)")  # fmt: skip
    add("--no-optimized-kernels", dest="optimized", action="store_false")
    add("--cuda-graphs", action="store_true",
        help="replay each step as one CUDA graph, with hfpatch's kernels; needs a GPU")  # fmt: skip
    add(
        "--attention-backend",
        metavar="NAME",
        help="of diffusers' set_attention_backend, for all variants; a wrong name lists them",
    )
    add(
        "--difference",
        nargs="?",
        const="auto",
        metavar="BACKEND",
        help="--compare, and also with eager under another attention backend, which shows how far "
        "two right results are apart (auto: the first that runs here and rounds differently)",
    )
    add(
        "--profile",
        type=Path,
        metavar="DIR",
        help="write traces and tables of a denoising step and of the decoding of each variant",
    )
    add("--repeats", type=at_least(1), default=1,
        help="generations per variant; the one of median time counts (default: 1)")  # fmt: skip
    add("--batch-size", type=at_least(1), default=1, help="videos at a time (default: 1)")
    add("--num-frames", type=at_least(1), help="8 k + 1")
    add("--height", type=at_least(32), help="pixels, a multiple of 32")
    add("--width", type=at_least(32), help="pixels, a multiple of 32")
    add("--steps", type=at_least(2), help="denoising steps; LTX-Video's schedule needs 2")
    add("--warmup-iterations", type=at_least(0), default=2,
        help="denoising steps before the clock starts; 1 counts as 2 (default: 2)")  # fmt: skip
    add("--guidance-scale", type=float, default=3.0, help="above 1: classifier-free guidance")
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path("outputs/ltx_video.mp4"), help="the video to write")
    parser.add_argument(
        "--compare", action="store_true", help="run the original too and compare the two"
    )
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile, of the original too if compared"
    )
    add_device_arguments(parser)
    args = parser.parse_args(argv)

    resolve_device(parser, args)
    args.compare = args.compare or args.difference is not None
    if args.random_weights == "auto":
        args.random_weights = "full" if args.device.type == "cuda" else "small"
    for name, value in (SMALL_SIZE if args.random_weights == "small" else FULL_SIZE).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    check_arguments(parser, args)
    return args


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends with exit code 2 and a message if the arguments make no video."""
    if args.num_frames % 8 != 1:
        below = max(1, (args.num_frames - 1) // 8 * 8 + 1)
        parser.error(
            "argument --num-frames: LTX-Video makes 8 k + 1 frames, "
            f"got {args.num_frames}; try {below} or {below + 8}"
        )
    for name in ("height", "width"):
        size = getattr(args, name)
        if size % 32:
            below = size // 32 * 32
            parser.error(
                f"argument --{name}: expected a multiple of 32, got {size}; "
                f"try {below} or {below + 32}"
            )
    if args.output.suffix.lower() != ".mp4":
        parser.error(f"argument --output: expected a name ending in .mp4, got {str(args.output)!r}")
    if args.compare and not args.optimized:
        parser.error("argument --compare: needs the optimized kernels; drop --no-optimized-kernels")
    if args.profile is not None and args.profile.exists() and not args.profile.is_dir():
        parser.error(f"argument --profile: {str(args.profile)!r} is a file, not a folder")
    if args.cuda_graphs:
        check_graphs(parser, args)
    check_attention(parser, args)
    if importlib.util.find_spec("imageio_ffmpeg") is None:  # said now, not after the generation
        parser.error("writing the mp4 needs ffmpeg: run `pip install imageio-ffmpeg`")


def check_graphs(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.device.type != "cuda":
        parser.error(f"argument --cuda-graphs: needs a GPU, the device is {args.device}")
    if not args.optimized:
        parser.error("argument --cuda-graphs: is a part of hfpatch; drop --no-optimized-kernels")
    if args.compile and not args.compare:
        parser.error(
            "argument --cuda-graphs: a compiled model runs without them; drop --compile, or add "
            "--compare to measure each alone"
        )


def check_attention(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Replaces --difference auto by a name."""
    name = args.attention_backend
    if name is not None:
        name = _ltx_attention.check(parser, args, "--attention-backend", name)
        args.attention_backend = name
    if args.difference == "auto":
        args.difference = _ltx_attention.another(name, args.device, args.dtype)
        if args.difference is None:
            parser.error("argument --difference: no second attention backend runs here")
    elif args.difference is not None:
        args.difference = _ltx_attention.check(parser, args, "--difference", args.difference)
        if args.difference == (name or _ltx_attention.default_backend()):
            parser.error(f"argument --difference: {args.difference!r} is what eager runs with")


def load_pipeline(args: argparse.Namespace) -> Any:
    """The LTX pipeline on args.device, from the Hub or with random weights."""
    from _ltx_random import build_pipeline  # diffusers, which reads what `leave_out_unused` did
    from diffusers import LTXPipeline

    if args.random_weights:
        pipe = build_pipeline(args.random_weights == "full", args.device, args.dtype)
    else:
        try:
            pipe = LTXPipeline.from_pretrained(args.model, dtype=args.dtype)
        except (OSError, ValueError) as e:  # not there, or not a name that could be there
            sys.exit(
                f"error: `--model {args.model}` could not be loaded: {e}\n"
                "Give the Hub id or folder of an LTX-Video pipeline, or use --random-weights."
            )
    pipe = pipe.to(args.device)
    if args.attention_backend is not None:
        try:
            _ltx_attention.use(pipe.transformer, args.attention_backend)
        except Exception as e:  # a kernel of the Hub that could not be fetched or loaded
            sys.exit(
                f"error: `--attention-backend {args.attention_backend}` could not be set: {e}\n"
                "Choose another: a name that is not one lists them."
            )
    return pipe


def make_folders(args: argparse.Namespace) -> None:
    """Now, since what cannot be written would be found out after minutes."""
    profile = args.profile / "trace.json" if args.profile is not None else None
    for flag, file in (("--output", args.output), ("--profile", profile)):
        try:
            if file is not None:
                require_writable(file)
        except OSError as e:
            sys.exit(f"error: `{flag}`: {e}")


def heading(args: argparse.Namespace, result: dict[str, Any]) -> str:
    repeats = f", median of {args.repeats}" if args.repeats > 1 else ""
    attention = args.attention_backend or "as the model has it"
    return (
        f"  device      {result['device']}\n"
        f"  precision   {result['dtype']}\n"
        f"  resolution  {args.width} x {args.height}\n"
        f"  frames      {args.num_frames}, batch {args.batch_size}\n"
        f"  steps       {args.steps}, after {args.warmup_iterations} to warm up{repeats}\n"
        f"  attention   {attention}"
    )


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """The settings, for the JSON."""
    result: dict[str, Any] = {
        "device": device_name(args.device),
        "dtype": dtype_name(args.dtype),
        "weights": f"random ({args.random_weights})" if args.random_weights else args.model,
    }
    for name in ("prompt", "batch_size", "num_frames", "height", "width", "steps",
                 "warmup_iterations", "repeats", "guidance_scale", "seed",
                 "attention_backend"):  # fmt: skip
        result[name] = getattr(args, name)
    result["versions"] = versions()
    return result


def beside(output: Path, ending: str) -> Path:
    """`film.mp4` → `film_<ending>`."""
    return output.with_name(f"{output.stem}_{ending}")


def compare(
    measured: list[Measurement], args: argparse.Namespace, result: dict[str, Any]
) -> list[Path]:
    """Videos and pictures of a comparison, and what it says in one line each."""
    frames = {m.variant.name: m.generation.frames for m in measured}
    eager = frames.pop(EAGER.name)
    kernels = result["runs"][KERNELS.name]
    result["speed_up"] = kernels["speed_up"]
    result["step_speed_up"] = kernels["step_speed_up"]
    files = save_videos(eager, beside(args.output, "eager.mp4"), FPS)
    files.append(save_differences(eager, frames, beside(args.output, "difference.png")))
    if _ltx_show.can_draw():
        title = f"LTX-Video, {args.width} × {args.height}, {args.num_frames} frames, "
        title += f"{args.steps} steps, {result['dtype']}, {result['device']}"
        chart = beside(args.output, "compare.png")
        files.append(_ltx_show.save_chart(result["runs"], title, chart))
    return files


def measure_all(
    pipe: Any, args: argparse.Namespace, variants: list[Variant], out: Output, traces: list[Path]
) -> list[Measurement]:
    """All variants, in turns, so that all meet the same neighbours on the machine.

    Not in turns where one is compiled, since each change of sides would compile it again.
    """
    turns = 1 if any(variant.compiled for variant in variants) else args.repeats
    measured = []
    for variant in variants:
        with explained(variant):
            measured.append(measure(pipe, args, variant, args.repeats // turns, out.say, traces))
    for _ in range(1, turns):
        for i, one in enumerate(measured):
            with explained(one.variant):
                measured[i] = once_more(pipe, args, one)
    return measured


@contextmanager
def explained(variant: Variant) -> Iterator[None]:
    """What a user can do something about ends in a message."""
    try:
        yield
    except torch.OutOfMemoryError as e:
        sys.exit(
            f"error: out of GPU memory in `{variant.name}`: {str(e).splitlines()[0]}\n"
            "Use fewer --num-frames, a lower --height and --width, or a smaller --batch-size."
        )
    except torch._dynamo.exc.TorchDynamoException as e:
        sys.exit(
            f"error: torch.compile failed in `{variant.name}`: {str(e).splitlines()[0]}\n"
            "It needs a C++ compiler, on a GPU also Triton; without --compile nothing is compiled."
        )


def verdict(result: dict[str, Any], backend: str) -> str:
    """The kernels' distance from eager beside that of two right results from each other."""
    key = "latents_relative_difference"
    ours = result["runs"][KERNELS.name][key]
    theirs = result["runs"][Variant(attention=backend).name][key]
    return (
        f"final latents, relative difference from eager: kernels {ours:.2e}, "
        f"eager under {backend} {theirs:.2e}"
    )


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Returns what --json prints."""
    args = parse_arguments(argv)
    out = Output(args.json)
    result = describe(args)
    if args.compare and not _ltx_show.can_draw():
        out.say(_ltx_show.NO_CHART)
    make_folders(args)
    out.say(f"loading LTX-Video, {result['weights']} weights")
    pipe = load_pipeline(args)
    out.say(heading(args, result))

    traces: list[Path] = []
    measured = measure_all(pipe, args, chosen_variants(args), out, traces)
    for run in measured:
        took = Spread.of([generation.seconds for generation in run.runs]).text("s")
        out.say(
            f"{run.variant.name}: {took}, of it "
            f"{run.generation.denoise_seconds:.2f} s denoising: "
            f"{run.iterations_per_second:.2f} it/s"
        )
    result["runs"] = {
        m.variant.name: _ltx_show.as_run(m, measured[0] if m is not measured[0] else None)
        for m in measured
    }

    shown = next((m for m in measured if m.variant == KERNELS), measured[0])
    files = save_videos(shown.generation.frames, args.output, FPS)
    document = beside(args.output, "compare.json")
    if args.compare:
        files += [*compare(measured, args, result), document]
    result["files"] = [str(file) for file in files + traces]
    if args.compare:
        document.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    out.say(f"\n{_ltx_show.as_table(result['runs'])}\n")
    if any(run.get("within_noise") for run in result["runs"].values()):
        out.say("~: within noise: the spreads of the generations overlap")
    if args.difference:
        out.say(verdict(result, args.difference))
    out.say("wrote " + ", ".join(result["files"]))
    out.finish(result)
    return result


if __name__ == "__main__":
    if not any(word.startswith("--model") for word in sys.argv):  # which may be quantized
        leave_out_unused()
    main()
