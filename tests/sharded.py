"""Two processes that run a case each, for tests/sharding (gloo, CPU) and tests/gpu (NCCL).

The processes live as long as a `Ranks` does: starting them costs more than all the cases. A case
that fails or does not end takes them down, and the next one starts a fresh pair.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

WORLD = 2
COLLECTIVE = datetime.timedelta(seconds=60)  # one collective
START = 240  # seconds for two processes to import everything, on a busy machine

Case = Callable[["Rank"], None]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    """Add a case under `name`: a function of the rank that raises if something is wrong."""

    def add(function: Case) -> Case:
        CASES[name] = function
        return function

    return add


@dataclass(frozen=True)
class Rank:
    """Where a case runs."""

    index: int
    device: torch.device
    mesh: DeviceMesh


class Failed(AssertionError):
    """A case failed on a rank; the message has its traceback."""


class Ranks:
    """`WORLD` processes in one process group."""

    def __init__(self, device_type: str, cases: str = "sharded_cases") -> None:
        """cases: the module that fills CASES in each process."""
        self.device_type, self._cases = device_type, cases
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def run(self, name: str, seconds: float = 120) -> None:
        """Run a case on every rank.

        Raises:
            Failed: it failed on a rank, or did not end within `seconds`.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send(name)
        deadline = time.monotonic() + seconds
        problems = []
        for i, pipe in enumerate(self._pipes):
            # once a rank has failed, the others wait for it in vain
            left = 2.0 if problems else deadline - time.monotonic()
            problem = self._receive(pipe, left)
            if problem is not None:
                problems.append(f"rank {i}: {problem}")
        if problems:
            self.close()
            raise Failed("\n".join(problems))

    @staticmethod
    def _receive(pipe: Any, seconds: float) -> str | None:
        if not pipe.poll(max(seconds, 0)):
            return "did not answer in time"
        try:
            problem: str | None = pipe.recv()
        except EOFError:
            return "its process ended"
        return problem

    def _start(self) -> None:
        context = mp.get_context("spawn")
        meeting = Path(tempfile.mkdtemp()) / "meeting"
        for i in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(i, self.device_type, str(meeting), theirs, self._cases),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        problems = [p for pipe in self._pipes if (p := self._receive(pipe, START)) is not None]
        if problems:
            self.close()
            raise Failed("\n".join(problems))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def _serve(index: int, device_type: str, meeting: str, pipe: Any, cases: str) -> None:
    """The life of one process: join the group, then run what comes through the pipe."""
    try:
        rank = _join(index, device_type, meeting)
        importlib.import_module(cases)
    except BaseException:
        pipe.send(traceback.format_exc())
        return
    pipe.send(None)
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            return
        problem = None
        try:
            torch.manual_seed(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                CASES[name](rank)
        except BaseException:
            problem = traceback.format_exc()
        pipe.send(problem)


def _join(index: int, device_type: str, meeting: str) -> Rank:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(WORLD)}
    device = torch.device(device_type, index if device_type == "cuda" else None)
    if device_type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False  # convolutions in true fp32, as products are
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=f"file://{meeting}",
        rank=index,
        world_size=WORLD,
        timeout=COLLECTIVE,
        device_id=device if device_type == "cuda" else None,
    )
    mesh = dist.init_device_mesh(device_type, (WORLD,))
    sys.modules["__main__"].__dict__.setdefault("__file__", __file__)
    return Rank(index, device, mesh)


# What the cases share ----------------------------------------------------------------------------


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts calls of hfpatch's own operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.namespace.startswith("_hfpatch_kernels")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def kernels_run(some: bool = True) -> Iterator[None]:
    """Assert that kernels of hfpatch run in the body, or that none does."""
    with _Counter() as counter:
        yield
    assert (counter.calls > 0) == some, f"{counter.calls} calls of hfpatch's operators"


def close_to(ours: torch.Tensor, theirs: torch.Tensor, what: str = "output") -> None:
    """Within what another order of additions, in collectives and kernels, changes in fp32."""
    # 2^-23 times the roughly thousand roundings of two layers of width 100
    error = ((ours - theirs).norm() / theirs.norm().clamp_min(1e-12)).item()
    assert error < 2e-5, f"{what}: off by {error:.1e}"


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor."""
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks of a model, of all its lists of them."""
    names = ("layers", "blocks", "transformer_blocks", "single_transformer_blocks")
    return [
        block
        for path, part in model.named_modules()
        if isinstance(part, nn.ModuleList) and path.rpartition(".")[2] in names
        for block in part
    ]
