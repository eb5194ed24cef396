"""Compiles torch.compile's peers in several processes before anything is measured.

Inductor keeps what it compiled on disk, so the measuring process then finds nearly all of it there:
what would be most of a run's time is shared out over the machine's cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import torch

from hfpatch.bench.cases import CASES
from hfpatch.bench.inputs import Shape
from hfpatch.bench.ops import Task, inputs_of
from hfpatch.bench.peers import function_of, prepare

COMPILED = ("compile", "max-autotune")

Order = tuple[str, Shape, torch.dtype, str, str]


def default_jobs(device: str) -> int:
    """Processes that compile: on a GPU machine half the cores, up to 8."""
    return max(1, min(8, (os.cpu_count() or 1) // 2)) if device == "cuda" else 1


def compile_ahead(
    tasks: list[Task], peers: tuple[str, ...], device: str, jobs: int
) -> Iterator[str]:
    """Fill inductor's cache for these tasks; yields a line for each that is done.

    A failure is not reported here: the measuring process meets it again and says whose it is.
    """
    orders: list[Order] = [
        (task.case.name, task.shape, task.dtype, peer, device)
        for peer in peers
        if peer in COMPILED
        for task in tasks
    ]
    if jobs < 2 or not orders:
        return
    context = get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_start) as pool:
        futures = {pool.submit(_compile, order): order for order in orders}
        for future in as_completed(futures):
            name, _, _, peer, _ = futures[future]
            yield f"{peer} of {name}"


def count(tasks: list[Task], peers: tuple[str, ...]) -> int:
    return len(tasks) * sum(peer in COMPILED for peer in peers)


def _start() -> None:
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # the processes are many enough
    torch.set_num_threads(1)


def _compile(order: Order) -> None:
    name, shape, dtype, peer, device = order
    (case,) = (c for c in CASES if c.name == name)
    torch._dynamo.reset()
    fn: Any = function_of(peer, case, None)
    try:
        with torch.no_grad():
            prepare(peer, case, fn, inputs_of(Task(case, shape, dtype), torch.device(device)))()
    except Exception:  # met again, and reported, where it is measured
        return
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()  # the other processes need room too
