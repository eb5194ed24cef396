"""Kernels from the Kernel Hub: list, load, run, patch a model, measure against the local build.

    python examples/hub_kernels.py list kernels-community/activation
    python examples/hub_kernels.py run kernels-community/activation@v1 --op silu
    python examples/hub_kernels.py patch kernels-community/activation@v1 --op silu
    python examples/hub_kernels.py bench kernels-community/activation@v1 --op silu

`list` runs no code of the repository. The others download, verify and import it: a publisher that
the Hub does not mark as trusted needs --trust-remote-code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
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
from torch import nn

import hfpatch
from hfpatch.bench.spread import Gain, Spread
from hfpatch.errors import HfpatchError
from hfpatch.hub import HubOptions
from hfpatch.hub.inspection import inspect_hub
from hfpatch.hub.kernel import hub_kernel
from hfpatch.hub.spec import HubSpec
from hfpatch.kernels.sources import Kernel, local_package
from hfpatch.ops import OPS

WIDTH = 1024


class RMSNorm(nn.Module):
    """The RMS norm of most language models, in eager PyTorch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


#: Op to a module that computes it, and to the tensors and parameters of one call.
MODULES: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "rms_norm": lambda: RMSNorm(WIDTH),
}


def sample(op: str, rows: int, args: argparse.Namespace) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = torch.randn(rows, WIDTH, device=args.device, dtype=args.dtype)
    weight = torch.rand(WIDTH, device=args.device, dtype=args.dtype)
    if op == "rms_norm":
        return (x, weight, None), {"eps": 1e-6, "cast": "input"}
    if op == "layer_norm":
        return (x, weight, weight), {"eps": 1e-5}
    return (x,), {}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("list", "run", "patch", "bench"))
    parser.add_argument("kernel", help="org/name@v1; for `list` org/name as well")
    parser.add_argument("--op", choices=sorted(MODULES), default="silu")
    parser.add_argument("--rows", type=at_least(1), default=2048, help=f"rows of {WIDTH} values")
    parser.add_argument("--trust-remote-code", action="store_true")
    add_device_arguments(parser)
    args = parser.parse_args()
    resolve_device(parser, args)
    return args


def main() -> int:
    args = parse()
    out = Output(args.json)
    try:
        return {"list": show, "run": run, "patch": patch, "bench": bench}[args.what](args, out)
    except (HfpatchError, ValueError) as e:
        print(f"hub_kernels: {e}", file=sys.stderr)
        return 1


def options(args: argparse.Namespace) -> HubOptions:
    return HubOptions(trust_remote_code=args.trust_remote_code)


def show(args: argparse.Namespace, out: Output) -> int:
    """What the repository has, for which systems, and which ops it serves."""
    spec = HubSpec.parse(args.kernel, allow_branches=True)
    found = inspect_hub(spec if "@" in args.kernel else spec.repo)
    out.say(found)
    out.finish(found.to_dict())
    return 0


def run(args: argparse.Namespace, out: Output) -> int:
    """One call of the kernel, compared with the formula in fp64."""
    kernel = hub_kernel(args.op, args.kernel, options(args))
    tensors, params = sample(args.op, args.rows, args)
    y = kernel.bind(params)(*tensors)
    wide = (t if t is None else t.double() for t in tensors)
    truth = OPS[args.op].reference(*wide, **params)
    error = ((y.double() - truth).abs().max() / truth.abs().max()).item()
    out.say(f"{args.op} of {args.kernel} ({kernel.version}) on {device_name(args.device)}")
    out.say(f"{tuple(y.shape)} {dtype_name(y.dtype)}, largest error against fp64: {error:.1e}")
    out.finish({"kernel": args.kernel, "version": kernel.version, "error": error})
    return 0


def patch(args: argparse.Namespace, out: Output) -> int:
    """A model with the kernel in it, proven, and taken back."""
    model = nn.Sequential(MODULES[args.op](), nn.Linear(WIDTH, 8)).eval().requires_grad_(False)
    model = model.to(args.device, args.dtype)
    x = torch.randn(4, WIDTH, device=args.device, dtype=args.dtype)
    before = model(x)
    report = hfpatch.apply(
        model,
        kernels={args.op: args.kernel, "*": None},
        hub={"trust_remote_code": args.trust_remote_code},
    )
    out.say(report)
    difference = (model(x) - before).abs().max().item()
    out.say(f"largest difference of the outputs: {difference:.1e}")
    hfpatch.restore(model)
    out.finish(report.to_dict() | {"difference": difference})
    return 0 if report.swaps else 1


def bench(args: argparse.Namespace, out: Output) -> int:
    """Microseconds of a call: this kernel, the local build, PyTorch's own operators."""
    tensors, params = sample(args.op, args.rows, args)
    contenders: dict[str, Kernel | None] = {
        args.kernel: hub_kernel(args.op, args.kernel, options(args)),
        "local": _local(args.op, out),
        "torch": Kernel(args.op, OPS[args.op].aten, "torch"),
    }
    calls = {name: k.bind(params) for name, k in contenders.items() if k is not None}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(7):  # interleaved, so that a busy machine slows all of them alike
        for name, call in calls.items():
            times[name].append(_microseconds(lambda call=call: call(*tensors), args.device))
    spreads = {name: Spread.of(t) for name, t in times.items()}
    result = {name: spread.median for name, spread in spreads.items()}
    out.say(
        f"{args.op}, {args.rows} x {WIDTH} {dtype_name(args.dtype)}, {device_name(args.device)}: "
        "median of 7 means"
    )
    ranked = sorted(result, key=lambda name: result[name])
    for name in ranked:
        out.say(f"  {name:50} {spreads[name].text('us', '.1f')}")
    gain = Gain.of(times[ranked[1]], times[ranked[0]])
    out.say(f"the first against the second: {gain}")
    out.finish(
        {
            "op": args.op,
            "rows": args.rows,
            "microseconds": result,
            "quartiles": {name: [s.low, s.high] for name, s in spreads.items()},
            "within_noise": gain.within_noise,
        }
    )
    return 0


def _local(op: str, out: Output) -> Kernel | None:
    try:
        return local_package().kernel(op)
    except HfpatchError as e:
        out.say(f"no local build to compare with: {e}")
        return None


def _microseconds(call: Callable[[], Any], device: torch.device, calls: int = 20) -> float:
    call()
    start = now(device)
    for _ in range(calls):
        call()
    return (now(device) - start) / calls * 1e6


if __name__ == "__main__":
    sys.exit(main())
