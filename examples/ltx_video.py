"""Text to video with LTX-Video, with and without hfpatch's kernels.

    python examples/ltx_video.py --compare                      # Lightricks/LTX-Video, from the Hub
    python examples/ltx_video.py --compare --random-weights     # nothing to download
    python examples/ltx_video.py --prompt "A lighthouse at dusk" --output lighthouse.mp4

With random weights the model has the real architecture, so the times are real, but the video is
noise. On a CPU they come in a small size that finishes in seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
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
from _ltx_random import build_pipeline
from _pictures import pixel_difference, save_comparison, save_videos, to_pixels

import hfpatch

PROMPT = "A clear mountain stream runs over mossy stones, sunlight flickering on the water"
NEGATIVE_PROMPT = "worst quality, inconsistent motion, blurry, jittery, distorted"
FPS = 24
# What --height, --width, --num-frames and --steps are when not given.
FULL_SIZE = {"height": 512, "width": 768, "num_frames": 49, "steps": 30}
SMALL_SIZE = {"height": 128, "width": 192, "num_frames": 17, "steps": 20}
PROMPT_TOKENS = 128


@dataclass
class Timing:
    """One generation: seconds in all, seconds in the denoising loop, denoising steps a second."""

    seconds: float
    denoise_seconds: float
    iterations_per_second: float


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
    add_device_arguments(parser)
    args = parser.parse_args(argv)

    resolve_device(parser, args)
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
    if importlib.util.find_spec("imageio_ffmpeg") is None:  # said now, not after the generation
        parser.error("writing the mp4 needs ffmpeg: run `pip install imageio-ffmpeg`")


def load_pipeline(args: argparse.Namespace) -> Any:
    """The LTX pipeline on args.device, from the Hub or with random weights."""
    from diffusers import LTXPipeline

    if args.random_weights:
        pipe = build_pipeline(args.random_weights == "full", args.device, args.dtype)
    else:
        try:
            pipe = LTXPipeline.from_pretrained(args.model, torch_dtype=args.dtype)
        except (OSError, ValueError) as e:  # not there, or not a name that could be there
            sys.exit(
                f"error: `--model {args.model}` could not be loaded: {e}\n"
                "Give the Hub id or folder of an LTX-Video pipeline, or use --random-weights."
            )
    return pipe.to(args.device)


def prompt_arguments(pipe: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The prompt, for a pipeline without a text encoder as random embeddings that stand for it."""
    if pipe.text_encoder is not None:
        return {
            "prompt": [args.prompt] * args.batch_size,
            "negative_prompt": [NEGATIVE_PROMPT] * args.batch_size,
        }
    shape = (args.batch_size, PROMPT_TOKENS, pipe.transformer.config.caption_channels)
    arguments: dict[str, Any] = {}
    for prefix, text in (("", args.prompt), ("negative_", NEGATIVE_PROMPT)):
        generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
        embeds = torch.randn(shape, generator=generator)
        arguments[f"{prefix}prompt_embeds"] = embeds.to(args.device, args.dtype)
        arguments[f"{prefix}prompt_attention_mask"] = torch.ones(shape[:2], device=args.device)
    return arguments


def generate(
    pipe: Any, args: argparse.Namespace, label: str, steps: int
) -> tuple[np.ndarray, Timing]:
    """Frames [batch, frames, height, width, 3] in 0..255 and how long they took."""
    pipe.set_progress_bar_config(desc=label, unit="step")
    denoised = 0.0

    def on_step_end(_: Any, step: int, __: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        nonlocal denoised
        if step == steps - 1:
            denoised = now(args.device)
        return tensors

    arguments = prompt_arguments(pipe, args)
    if pipe.vae.config.timestep_conditioning:  # LTX-Video 0.9.1 and later
        arguments |= {"decode_timestep": 0.05, "decode_noise_scale": 0.025}
    started = now(args.device)
    frames = pipe(
        **arguments,
        height=args.height,
        width=args.width,
        num_frames=args.num_frames,
        num_inference_steps=steps,
        guidance_scale=args.guidance_scale,
        frame_rate=FPS,
        generator=torch.Generator().manual_seed(args.seed),  # on the CPU: the same on any device
        callback_on_step_end=on_step_end,
        output_type="np",
    ).frames
    ended = now(args.device)
    loop = denoised - started
    return to_pixels(frames), Timing(ended - started, loop, steps / loop)


def measure(
    pipe: Any, args: argparse.Namespace, label: str, out: Output
) -> tuple[np.ndarray, Timing]:
    """Warm up, generate, and say how long it took."""
    if args.compile:
        torch.compiler.reset()
        pipe.transformer.compile(dynamic=False)
    if args.warmup_iterations:
        generate(pipe, args, f"{label}, warm-up", max(2, args.warmup_iterations))
    frames, timing = generate(pipe, args, label, args.steps)
    out.say(
        f"{label:>8}: {timing.seconds:.2f} s, of it {timing.denoise_seconds:.2f} s denoising: "
        f"{timing.iterations_per_second:.2f} it/s"
    )
    return frames, timing


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    out = Output(args.json)
    result: dict[str, Any] = {
        "device": device_name(args.device),
        "dtype": dtype_name(args.dtype),
        "weights": f"random ({args.random_weights})" if args.random_weights else args.model,
        "compiled": args.compile,
        "prompt": args.prompt,
        "runs": {},
        "files": [],
    }
    for name in ("batch_size", "num_frames", "height", "width", "steps", "warmup_iterations",
                 "guidance_scale", "seed"):  # fmt: skip
        result[name] = getattr(args, name)
    pipe = load_pipeline(args)
    out.say(
        f"LTX-Video, {result['weights']} weights{', compiled' if args.compile else ''}\n"
        f"  device      {result['device']}\n"
        f"  precision   {result['dtype']}\n"
        f"  resolution  {args.width} x {args.height}\n"
        f"  frames      {args.num_frames}, batch {args.batch_size}\n"
        f"  steps       {args.steps}, after {args.warmup_iterations} to warm up"
    )

    frames: dict[str, np.ndarray] = {}
    timings: dict[str, Timing] = {}
    if args.compare or not args.optimized:
        frames["original"], timings["original"] = measure(pipe, args, "original", out)
    if args.optimized:
        report = hfpatch.apply(pipe)
        result["report"] = report.to_dict()
        out.say(f"\n{report}\n")
        frames["patched"], timings["patched"] = measure(pipe, args, "patched", out)
    result["runs"] = {label: asdict(timing) for label, timing in timings.items()}

    main_label = "patched" if args.optimized else "original"
    files = save_videos(frames[main_label], args.output, FPS)
    if args.compare:
        original, patched = timings["original"], timings["patched"]
        result["speed_up"] = original.seconds / patched.seconds
        result["denoise_speed_up"] = original.denoise_seconds / patched.denoise_seconds
        result |= asdict(pixel_difference(frames["original"], frames["patched"]))
        files += save_videos(
            frames["original"], args.output.with_stem(f"{args.output.stem}_original"), FPS
        )
        files.append(
            save_comparison(
                frames["original"],
                frames["patched"],
                args.output.with_name(f"{args.output.stem}_compare.png"),
            )
        )
        out.say(
            f"speed-up: {result['speed_up']:.2f}x ({result['denoise_speed_up']:.2f}x denoising)\n"
            f"largest pixel difference: {result['max_pixel_difference']} of 255 "
            f"(mean {result['mean_pixel_difference']:.4f})"
        )
    result["files"] = [str(file) for file in files]
    out.say("wrote " + ", ".join(result["files"]))
    out.finish(result)


if __name__ == "__main__":
    main()
