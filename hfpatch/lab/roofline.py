"""Where counters cannot be read: bytes and operations over time, against this machine's."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hfpatch.bench.peaks import copy_call, product_call
from hfpatch.lab.alone import measuring
from hfpatch.lab.checking import copied
from hfpatch.lab.subjects import Inputs, Subject
from hfpatch.lab.turns import as_data, calls_of, in_turns


def measured(subject: Subject, sizes: dict[str, float]) -> dict[str, Any]:
    """A call's time and its shares of the speed of a copy and of a matrix product.

    Bytes are those of `work(**kwargs)` of ref.py, else of all tensors once. Operations are those of
    `work`, else of the reference's matrix products; None where it has none.
    """
    inputs = subject.make(0, sizes)
    work = subject.work(inputs)
    flops = work.get("flops") or _products(subject, inputs)
    dtype = _dtype(inputs)
    copy, product = copy_call(subject.device), product_call(subject.device, dtype)
    calls = {
        "v": calls_of(subject, inputs, subject.run),
        "copy": [copy[0]],
        "product": [product[0]],
    }
    graphs = {"v": subject.capturable, "copy": True, "product": True}
    with measuring():
        times = in_turns(calls, subject.device.type == "cuda", graphs)
    us = as_data(times["v"])
    copied_at = copy[1] / as_data(times["copy"])["median"] / 1e3  # GB/s
    computed_at = product[1] / as_data(times["product"])["median"] / 1e3  # GFLOP/s
    moved = work.get("bytes", 0.0) / us["median"] / 1e3
    return {
        "us": us,
        "bytes": work.get("bytes"),
        "flops": flops,
        "GB/s": moved,
        "copy GB/s": copied_at,
        "of copy": moved / copied_at,
        "GFLOP/s": None if flops is None else flops / us["median"] / 1e3,
        "product GFLOP/s": computed_at,
        "of arithmetic": None if flops is None else flops / us["median"] / 1e3 / computed_at,
        "dtype": str(dtype).removeprefix("torch."),
    }


def _dtype(inputs: Inputs) -> torch.dtype:
    tensors = [t for t in inputs.values() if isinstance(t, Tensor) and t.is_floating_point()]
    return tensors[0].dtype if tensors else torch.float32


def _products(subject: Subject, inputs: Inputs) -> float | None:
    if subject.refer is None:
        return None
    counter = FlopCounterMode(display=False)
    with contextlib.suppress(Exception), counter:  # what it cannot count is not known
        subject.refer(copied(inputs))
    return float(counter.get_total_flops()) or None
