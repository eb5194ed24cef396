"""The suite `ops`: time of each op and of its peers, by shape and dtype."""

from __future__ import annotations

import fnmatch
import functools
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hfpatch.bench.cases import CASES, Case
from hfpatch.bench.inputs import Shape, bytes_of, label, make_inputs, takes_a_dtype
from hfpatch.bench.peers import OURS, function_of, prepare
from hfpatch.bench.shapes import shapes_of
from hfpatch.bench.timing import Call, Replay, cpu_microseconds, interleaved

Tensor = torch.Tensor

_MAX_SETS = 64
#: Calls of a warm graph: the host launches a graph in 3 us, which is more than the smallest calls.
_WARM_CALLS = 32
_TARGET_US = 2000.0
#: How far our result may be from the eager one for the row to be a measurement of the same thing.
_SAME = 0.02


@dataclass(frozen=True)
class Task:
    """One line of the result."""

    case: Case
    shape: Shape
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.case.name} {label(self.shape)} {str(self.dtype)[6:]}"


def select(
    package: Any,
    device: str,
    ops: list[str] | None = None,
    shapes: list[str] | None = None,
    dtypes: list[str] | None = None,
) -> tuple[list[Task], list[str]]:
    """The tasks that the filters leave, and the ops that this build has not.

    Args:
        package: the kernel package.
        device: "cuda" or "cpu".
        ops: operators, names of cases, or globs of either.
        shapes: `4x1024x2048`: instead of the table's, for the cases with as many dimensions.
        dtypes: "bfloat16", ...; default: bf16 and a few shapes in the others, on the CPU fp32 and
            bf16. Cases whose inputs are all fp32 are measured in fp32 alone.

    Raises:
        ValueError: a filter that leaves nothing, or a malformed shape.
    """
    cases = [c for c in CASES if not ops or any(_matches(c, pattern) for pattern in ops)]
    if not cases:
        known = ", ".join(dict.fromkeys(c.op for c in CASES))
        raise ValueError(f"--op {', '.join(ops or [])}: no such op; there are: {known}")
    missing = sorted({c.op for c in cases if not hasattr(package.ops, c.op)})
    tasks = [
        Task(case, shape, dtype)
        for case in cases
        if case.op not in missing
        for shape, dtype in _variants(case, device, shapes, dtypes)
    ]
    if not tasks:
        if missing:
            raise ValueError(f"the kernel build has no {', '.join(missing)}: build it again")
        if dtypes and not any(takes_a_dtype(c.inputs) for c in cases):
            raise ValueError(
                f"--dtype {', '.join(dtypes)}: the inputs of the selected ops are float32; "
                "expected float32, or no --dtype"
            )
        kinds = dict.fromkeys("x".join(shapes_of(c.shapes, device)[0]) for c in cases)
        raise ValueError(
            f"--shape {', '.join(shapes or [])}: no selected op has as many dimensions; expected "
            f"{', '.join(kinds)}"
        )
    return tasks, missing


def _matches(case: Case, pattern: str) -> bool:
    return fnmatch.fnmatchcase(case.name, pattern) or fnmatch.fnmatchcase(case.op, pattern)


def _variants(
    case: Case, device: str, shapes: list[str] | None, dtypes: list[str] | None
) -> Iterator[tuple[Shape, torch.dtype]]:
    table = shapes_of(case.shapes, device)
    chosen: list[Shape] = list(table)
    if shapes:
        sizes = [_parse(text) for text in shapes]
        chosen = [dict(zip(table[0], s, strict=True)) for s in sizes if len(s) == len(table[0])]
    if dtypes:
        wanted = [getattr(torch, name) for name in dtypes]
        if not takes_a_dtype(case.inputs):
            wanted = [dtype for dtype in wanted if dtype == torch.float32]
        yield from ((shape, dtype) for dtype in wanted for shape in chosen)
        return
    if not takes_a_dtype(case.inputs):
        yield from ((shape, torch.float32) for shape in chosen)
        return
    if device == "cpu":
        both = (torch.float32, torch.bfloat16)
        yield from ((shape, dtype) for dtype in both for shape in chosen)
        return
    yield from ((shape, torch.bfloat16) for shape in chosen)
    if case.extra_dtypes and not shapes:
        for dtype in (torch.float16, torch.float32):
            yield from ((shape, dtype) for shape in shapes_of(case.extra_dtypes, device))


def _parse(text: str) -> list[int]:
    parts = text.replace("×", "x").split("x")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--shape {text}: expected sizes with x between them, such as 4x1024x2048")
    return [int(part) for part in parts]


# ------------------------------------------------------------------------------ measuring


def measure(
    task: Task, package: Any, device: torch.device, peers: tuple[str, ...], copy: float | None
) -> dict[str, Any]:
    """One row of the result: microseconds by peer.

    Args:
        copy: bytes per second of a copy, for the floor; None on the CPU.
    """
    case = task.case
    torch._dynamo.reset()
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    with torch.no_grad(), torch.cuda.stream(stream):
        first = inputs_of(task, device)
        results = _tensors(case.ours(package, *first))
        if case.mode != "train":
            results = results[: case.outputs]
        # a loss and its gradient: the logits are read, and their gradient is written
        moved = bytes_of(*first, *results) + (bytes_of(*first) if case.mode == "train" else 0)
        row: dict[str, Any] = {
            "op": case.name,
            "shape": label(task.shape),
            "dtype": str(task.dtype)[6:],
            "bytes": moved,
        }
        if copy is not None:
            row["floor_us"] = moved / copy * 1e6
        del results
        sets = _sets(task, first, moved, device)
        calls, failed = _calls(task, package, peers, sets)
        if stream is None:
            row["cold_us"] = cpu_microseconds(calls)
        else:
            failed |= _measure_gpu(row, calls, stream, moved, device)
        if failed:
            row["failed"] = failed
    if moved > 2**28:
        del calls, sets, first
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return row


def _measure_gpu(
    row: dict[str, Any],
    calls: dict[str, list[Call]],
    stream: torch.cuda.Stream,
    moved: int,
    device: torch.device,
) -> dict[str, str]:
    """Adds the times to `row`; returns what failed, by peer."""
    failed: dict[str, str] = {}

    def times(calls: dict[str, list[Call]], warm: bool) -> dict[str, float]:
        replays = {}
        for name, of_peer in calls.items():
            chosen = of_peer[:1] * _WARM_CALLS if warm else of_peer
            replay = functools.partial(Replay, chosen, stream, _TARGET_US, keep=not warm)
            made = _try(replay, name, failed)
            if made is not None:
                replays[name] = made
        return interleaved(replays)

    copies = _copies(moved, len(next(iter(calls.values()))), device)
    row["cold_us"] = times(calls | copies, warm=False)
    row["copy_us"] = min(row["cold_us"].pop(name) for name in copies)
    if moved <= torch.cuda.get_device_properties(device).L2_cache_size:
        row["warm_us"] = times(calls, warm=True)
    return failed


def _copies(moved: int, count: int, device: torch.device) -> dict[str, list[Call]]:
    """Two ways of PyTorch's to read half of `moved` bytes and write them elsewhere.

    What a kernel of this size can reach: below some 200 MB it has not the speed of a large copy,
    since its start and its end, when few bytes are on their way, count.
    """
    half = max(1, moved // 4)  # elements of 2 bytes
    sources = [torch.randn(half, device=device, dtype=torch.bfloat16) for _ in range(count)]
    return {
        "copy by clone": [source.clone for source in sources],
        "copy by neg": [source.neg for source in sources],
    }


def _sets(
    task: Task, first: tuple[Tensor, ...], moved: int, device: torch.device
) -> list[tuple[Tensor, ...]]:
    """Input sets that, with their results, exceed twice the last cache."""
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        count = max(2, min(_MAX_SETS, math.ceil(2 * cache / max(moved, 1))))
    else:
        count = max(1, min(8, math.ceil(2**26 / max(moved, 1))))
    return [first, *(inputs_of(task, device) for _ in range(count - 1))]


def inputs_of(task: Task, device: torch.device) -> tuple[Tensor, ...]:
    """Fresh random inputs."""
    inputs = make_inputs(task.case.inputs, task.shape, task.dtype, device)
    return inputs if task.case.adjust is None else tuple(task.case.adjust(*inputs))


def _calls(
    task: Task, package: Any, peers: tuple[str, ...], sets: list[tuple[Tensor, ...]]
) -> tuple[dict[str, list[Call]], dict[str, str]]:
    """Calls on every set by peer, ours last; and what failed."""
    calls: dict[str, list[Call]] = {}
    failed: dict[str, str] = {}
    for peer in (*peers, OURS):
        fn = function_of(peer, task.case, package)
        if fn is None:
            continue

        def build(peer: str = peer, fn: Callable[..., Any] = fn) -> list[Call]:
            made = [prepare(peer, task.case, fn, inputs) for inputs in sets]
            made[0]()  # compiles
            return made

        made = _try(build, peer, failed)
        if made is not None:
            calls[peer] = made
    if "eager" in calls and OURS in calls:
        ours = function_of(OURS, task.case, package)
        assert ours is not None
        _require_same(task, prepare(OURS, task.case, ours, sets[0]), calls["eager"][0])
    return calls, failed


def _try(make: Callable[[], Any], peer: str, failed: dict[str, str]) -> Any:
    """`make()`; the failure of a peer is noted, one of ours is raised."""
    try:
        return make()
    except Exception as e:
        if peer == OURS:
            raise
        failed[peer] = f"{type(e).__name__}: {str(e).strip().splitlines()[0][:200]}"
        return None


def _require_same(task: Task, our_call: Call, eager_call: Call) -> None:
    """The row must compare two ways to the same numbers."""
    # copied before the next call, which may write to the same tensors
    ours, eager = ([t.detach().clone() for t in _tensors(c())] for c in (our_call, eager_call))
    for a, b in zip(ours, eager, strict=False):
        if not b.is_floating_point():
            continue
        x, y = a.float(), b.float().reshape(a.shape)
        off = float((x - y).norm() / y.norm().clamp_min(1e-30))
        if not off < _SAME:
            raise RuntimeError(
                f"{task}: ours and the eager formula differ by {off:.2g}, relative to its norm; "
                f"expected less than {_SAME}: the table's row does not compare the same things"
            )


def _tensors(results: Any) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results]
    return [t for t in results if isinstance(t, Tensor)]
