"""What the examples share: arguments, devices, clocks, output."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from typing import Any

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """--device, --dtype, --json."""
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="precision (default: bfloat16 on a GPU, float32 on a CPU)"
    )
    parser.add_argument(
        "--json", action="store_true", help="the result as JSON on stdout, all else on stderr"
    )


def resolve_device(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Replaces args.device and args.dtype by a torch.device and a torch.dtype."""
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        parser.error(f"argument --device: expected cpu, cuda or cuda:N, got {name!r}")
    if device.type not in ("cpu", "cuda"):
        parser.error(f"argument --device: expected cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        parser.error(
            f"argument --device: {name!r} is not there, PyTorch sees "
            f"{torch.cuda.device_count()} GPUs; use --device cpu"
        )
    args.device = device
    args.dtype = DTYPES[args.dtype or ("bfloat16" if device.type == "cuda" else "float32")]


def at_least(minimum: int) -> Any:
    """An argparse type: an integer no smaller than `minimum`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"expected at least {minimum}, got {value}")
        return value

    return parse


def device_name(device: torch.device) -> str:
    """For people: `cuda:0 (NVIDIA H100 80GB HBM3)`, `cpu (x86_64, 8 threads)`."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({platform.machine()}, {torch.get_num_threads()} threads)"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def now(device: torch.device) -> float:
    """Seconds on the clock once the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Output:
    """Text for people on stdout; under `--json` on stderr, with stdout for the JSON alone."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def say(self, text: object = "") -> None:
        print(text, file=sys.stderr if self.as_json else sys.stdout, flush=True)

    def finish(self, result: dict[str, Any]) -> None:
        if self.as_json:
            print(json.dumps(result, indent=2))
