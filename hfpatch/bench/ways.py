"""Ways to run one model, measured in turns: as it is, patched, as graphs, compiled.

Outputs are compared before anything is timed: a way whose outputs are wrong gets no time.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hfpatch
from hfpatch.bench.spread import Gain
from hfpatch.bench.subjects import Subject
from hfpatch.check import APART, FACTOR, decoded, distance, outputs_of, same_draws
from hfpatch.inputs import cast

Call = Callable[[], Any]
NAMES = ("eager", "patched", "graphs", "compile", "blocks")
#: A turn of a way lasts about this long, so that a short call is not timed once.
_TURN_SECONDS, _MOST_CALLS = 0.2, 50
#: A recorded graph replays from its third call on.
_GRAPH_WARMUP = 3


class Unavailable(Exception):
    """A way that this machine or this model has not; the message says why."""


@dataclass
class Measured:
    """What one way came to. Times are one value a round; memory in bytes.

    Attributes:
        wall_ms: a call that is waited for; the median of a turn.
        queued_ms, host_ms: CUDA only: a call among queued ones; until it returns, the device idle.
        first_call_s: with whatever is recorded or compiled then.
        launches: CUDA kernels of a call; on a CPU operators that Python called, None where
            generated code runs, which is no operator.
        from_eager, from_exact: root mean square distances, relative.
        problem: why it has no times.
        failed: whether `problem` is a failure, and no way that is not to be had here.
    """

    name: str
    wall_ms: list[float] = field(default_factory=list)
    queued_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    first_call_s: float | None = None
    apply_s: float | None = None
    swapped: int | None = None
    launches: int | None = None
    peak_bytes: int | None = None
    from_eager: float | None = None
    from_exact: float | None = None
    problem: str = ""
    failed: bool = False

    def as_data(self, eager: Measured) -> dict[str, Any]:
        """For JSON: medians with the least and the most of the rounds; `speed-up` over eager."""
        found: dict[str, Any] = {"way": self.name}
        if self.problem:
            kind = "failed" if self.failed else "unavailable"
            found[kind] = self.problem
        for key in ("wall_ms", "queued_ms", "host_ms"):
            times = getattr(self, key)
            if times:
                found[key] = {
                    "median": statistics.median(times),
                    "least": min(times),
                    "most": max(times),
                    "rounds": len(times),
                }
        if self.wall_ms and eager.wall_ms and self is not eager:
            gain = Gain.of(eager.wall_ms, self.wall_ms)
            found["speed-up"] = gain.ratio
            found["within noise"] = None if gain.count == 1 else gain.within_noise
        for key in (
            "first_call_s", "apply_s", "swapped", "launches", "peak_bytes", "from_eager",
            "from_exact",
        ):  # fmt: skip
            if getattr(self, key) is not None:
                found[key] = getattr(self, key)
        return found


def measure(
    subject: Subject, names: Sequence[str], rounds: int, warmup: int
) -> tuple[dict[str, Measured], str]:
    """All ways by name, eager first and always, and what `from_exact` is a distance from: "fp32",
    "fp64" (of a model in fp32) or "" where no copy of the model in it ran."""
    order = ["eager", *(n for n in names if n != "eager")]
    found = {name: Measured(name) for name in order}
    with torch.no_grad():
        exact, label = _exact(subject)
        states: dict[str, Callable[[], AbstractContextManager[Any]]] = {}
        eager: list[torch.Tensor] = []
        for name in order:
            row = found[name]
            try:
                states[name] = _state(name, subject, row)
                with states[name]():
                    start = time.perf_counter()
                    subject.call()
                    _wait(subject)
                    row.first_call_s = time.perf_counter() - start
                    for _ in range(_GRAPH_WARMUP if name == "graphs" else 0):
                        subject.call()
                    got = _outputs(subject)
                    if name == "eager":
                        eager = got
                _judge(row, got, eager, exact, subject.dtype)
            except Unavailable as e:
                row.problem = str(e)
            except Exception as e:  # the other ways are worth having
                row.problem, row.failed = _said(e), True
                if name == "eager":
                    raise ValueError(f"the model did not run: {row.problem}") from e
        timed = [name for name in order if not found[name].problem]
        take_turns(subject, states, {name: found[name] for name in timed}, rounds, warmup)
        for name in timed:
            with states[name]():
                subject.call()
                found[name].peak_bytes = _peak(subject)
        # Last: once the profiler was attached, every launch in this process takes longer.
        for name in timed:
            with states[name]():
                if subject.device.type == "cuda" or name not in _uncounted(subject):
                    found[name].launches = _launches(subject)
    return found, label


def _said(e: Exception) -> str:
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0] if lines else ''}"


# Ways -------------------------------------------------------------------------------------------


def _state(name: str, subject: Subject, row: Measured) -> Callable[[], AbstractContextManager[Any]]:
    """What it takes to be in a way, as often as is wanted."""
    if name == "eager":
        return nullcontext
    if name == "graphs" and subject.device.type != "cuda":
        raise Unavailable(f"CUDA graphs need a GPU; this is on the {subject.device.type}")
    if name in ("patched", "graphs"):
        return lambda: _applied(subject, row, name == "graphs")
    modules = subject.compiled_modules() if name == "compile" else _repeated(subject)
    calls = {}
    for module in modules:
        module.compile(dynamic=False)
        calls[id(module)] = module, module._compiled_call_impl
        del module._compiled_call_impl
    return lambda: _called_compiled(calls)


@contextmanager
def _applied(subject: Subject, row: Measured, graphs: bool) -> Iterator[None]:
    report = hfpatch.apply(subject.model, cuda_graphs=graphs)
    if row.apply_s is None:  # the first: later ones find their proofs made
        row.apply_s, row.swapped = report.plan.seconds, len(report.swaps)
    try:
        yield
    finally:
        hfpatch.restore(subject.model)


@contextmanager
def _called_compiled(calls: dict[int, tuple[nn.Module, Any]]) -> Iterator[None]:
    """The modules are called by what `Module.compile` made of them."""
    for module, call in calls.values():
        module._compiled_call_impl = call
    try:
        yield
    finally:
        for module, _ in calls.values():
            del module._compiled_call_impl  # None would be another module to what was compiled


def _repeated(subject: Subject) -> list[nn.Module]:
    """The blocks that stand in lists of several of one class, the outermost."""
    found: list[nn.Module] = []

    def search(module: nn.Module) -> None:
        for child in module.children():
            kinds = {type(block) for block in child.children()}
            if isinstance(child, nn.ModuleList) and len(child) > 1 and len(kinds) == 1:
                found.extend(child)
            else:
                search(child)

    for module in subject.compiled_modules():
        search(module)
    if not found:
        raise Unavailable("the model has no list of blocks of one class")
    return found


# Comparing --------------------------------------------------------------------------------------


def _outputs(subject: Subject) -> list[torch.Tensor]:
    with same_draws():
        found = outputs_of(subject.compared())
    return found + _steps(subject, subject.model, subject.inputs)


def _steps(subject: Subject, model: Any, inputs: Any) -> list[torch.Tensor]:
    """Logits of decoding steps on the same tokens, where `generate` is timed: generated ones may
    part at a tie without being wrong."""
    return decoded(model, inputs) if subject.unit == "new tokens" else []


def _exact(subject: Subject) -> tuple[list[torch.Tensor], str]:
    """Outputs of a copy of the model in fp32, or in fp64 where the model is in fp32."""
    wide, label = (
        (torch.float64, "fp64") if subject.dtype == torch.float32 else (torch.float32, "fp32")
    )
    if subject.inputs is None:
        try:
            with same_draws():
                return ([], "") if subject.twin is None else (outputs_of(subject.twin(wide)), label)
        except Exception:  # memory, or a part that insists on a dtype
            return [], ""
    try:
        twin: Any = copy.deepcopy(subject.model).to(wide)
        if hasattr(twin, "set_experts_implementation"):  # grouped products know no fp64
            twin.set_experts_implementation("eager")
        inputs = cast(subject.inputs, subject.dtype, wide)
        if wide == torch.float64:
            inputs = cast(inputs, torch.float32, wide)
        with same_draws():
            found = outputs_of(twin(**inputs))
        return found + _steps(subject, twin, inputs), label
    except Exception:  # memory, or a module that insists on a dtype
        return [], ""


def _judge(
    row: Measured,
    got: list[torch.Tensor],
    eager: list[torch.Tensor],
    exact: list[torch.Tensor],
    dtype: torch.dtype,
) -> None:
    """Adds the distances; a way that is too far off fails."""
    if not eager:
        row.problem, row.failed = "the model returns no floating tensor to compare", True
        return
    if [t.shape for t in got] != [t.shape for t in eager]:
        row.problem, row.failed = "outputs have other shapes than eager ones", True
        return
    row.from_eager = distance(got, eager)
    odd = any(not torch.equal(a.isfinite(), b.isfinite()) for a, b in zip(got, eager, strict=True))
    wrong = odd or not row.from_eager < APART[dtype]
    if exact and [t.shape for t in exact] == [t.shape for t in eager]:
        row.from_exact = distance(got, exact)
        if row.name in ("patched", "graphs"):  # a compiler may fuse roundings away, or add some
            limit = FACTOR * max(distance(eager, exact), torch.finfo(dtype).eps)
            wrong |= not row.from_exact <= limit
    if wrong:
        said = "" if row.from_exact is None else f", {row.from_exact:.2e} from the exact ones"
        what = "NaN or infinity in other places than" if odd else f"{row.from_eager:.2e} from"
        row.problem, row.failed = f"outputs are wrong: {what} eager ones{said}", True


# Measuring --------------------------------------------------------------------------------------


def _wait(subject: Subject) -> None:
    if subject.device.type == "cuda":
        torch.cuda.synchronize()


def take_turns(
    subject: Subject,
    states: Mapping[str, Callable[[], AbstractContextManager[Any]]],
    rows: Mapping[str, Measured],
    rounds: int,
    warmup: int,
) -> None:
    """Time each way once a round, so that what slows the machine down for a while meets all."""
    for _ in range(rounds):
        for name, row in rows.items():
            with states[name]():
                _turn(subject, row, warmup)


def _turn(subject: Subject, row: Measured, warmup: int) -> None:
    """One round of one way: medians over the calls of a turn."""
    for _ in range(max(warmup, _GRAPH_WARMUP if row.name == "graphs" else 0)):
        subject.call()
    walls: list[float] = []
    hosts: list[float] = []
    while not walls or (sum(walls) < _TURN_SECONDS and len(walls) < _MOST_CALLS):
        _wait(subject)
        start = time.perf_counter()
        subject.call()
        hosts.append(time.perf_counter() - start)
        _wait(subject)
        walls.append(time.perf_counter() - start)
    row.wall_ms.append(1e3 * statistics.median(walls))
    if subject.device.type == "cuda":
        row.host_ms.append(1e3 * statistics.median(hosts))
        start = time.perf_counter()
        for _ in walls:
            subject.call()
        _wait(subject)
        row.queued_ms.append(1e3 * (time.perf_counter() - start) / len(walls))


def _peak(subject: Subject) -> int | None:
    """The most memory during a call, the model's included: of tensors on a GPU, of the process on
    Linux; None elsewhere."""
    if subject.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        subject.call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    if sys.platform != "linux":
        return None
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        subject.call()
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    lines = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(lines[0].split()[1]) * 1024 if lines else None


def _uncounted(subject: Subject) -> tuple[str, ...]:
    """Ways of which operators say nothing on a CPU: generated code, and decoding steps in one call,
    which are not used while operators are watched."""
    return ("compile", "blocks", *(("patched",) if subject.unit == "new tokens" else ()))


def _launches(subject: Subject) -> int | None:
    """CUDA kernels of one call; on a CPU the operators."""
    if subject.device.type != "cuda":  # no dispatch mode: it would turn decoding steps off
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            subject.call()
        return sum("::" in e.name and not _inside(e) for e in profile.events())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        subject.call()
        torch.cuda.synchronize()
    return sum(int(e.count) for e in profile.key_averages() if e.device_type.name == "CUDA")


def _inside(event: Any) -> bool:
    """Whether an operator called this one."""
    parent = event.cpu_parent
    return parent is not None and ("::" in parent.name or _inside(parent))
