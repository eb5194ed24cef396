"""The ops of hfpatch as subjects: their inputs, formulas and kernels, by the bench's cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hfpatch.bench.cases import CASES, Case
from hfpatch.bench.inputs import bytes_of, make_inputs
from hfpatch.bench.shapes import shapes_of

#: What `lab init --op` writes as v0.
TEMPLATE = '''"""`{name}` as hfpatch computes it. A version changes one thing in `run_kernel`."""

from hfpatch.lab import ops

CASE = ops.case_of({name!r})


def run_kernel(**inputs):
    """Takes the inputs by name, {words}; returns the result."""
    return ops.called(CASE, ops.kernels(), inputs)
'''


def case_of(name: str, device: str = "cpu") -> Case:
    """The case of an op that the bench measures, by its name or that of its operator.

    Raises:
        ValueError: there is none that the lab can run; says which there are.
    """
    usable = [c for c in CASES if c.mode == "forward" and not c.in_place]
    for case in usable:
        if name == case.name:
            return case
    for case in usable:
        if name == case.op:
            return case
    known = ", ".join(dict.fromkeys(c.op for c in usable))
    raise ValueError(f"--op {name}: no such op; there are: {known}")


def names_of(case: Case) -> list[str]:
    return [part.split()[0] for part in case.inputs.split(";")]


def template(name: str) -> str:
    case = case_of(name)
    return TEMPLATE.format(name=case.name, words=", ".join(f"`{n}`" for n in names_of(case)))


def sizes_of(case: Case, device: str) -> dict[str, int]:
    return dict(shapes_of(case.shapes, device)[0])


def inputs_of(
    case: Case, sizes: Mapping[str, float], dtype: torch.dtype, device: torch.device, seed: int
) -> dict[str, Any]:
    """The op's inputs by name."""
    torch.manual_seed(seed)
    shape = {k: int(v) for k, v in sizes.items()}
    made = make_inputs(case.inputs, shape, dtype, device)
    if case.adjust is not None:
        made = case.adjust(*made)
    return dict(zip(names_of(case), made, strict=True))


def kernels() -> Any:
    """The kernels that this installation has. Raises KernelLoadError where there are none."""
    from hfpatch.kernels.sources import local_package

    return local_package()


def called(case: Case, package: Any, inputs: Mapping[str, Any]) -> Any:
    module = getattr(package, "module", package)
    return _wanted(case, case.ours(module, *(inputs[n] for n in names_of(case))))


def eager(case: Case, inputs: Mapping[str, Any]) -> Any:
    function: Callable[..., Any] = case.eager
    return _wanted(case, function(*(inputs[n] for n in names_of(case))))


def _wanted(case: Case, returned: Any) -> Any:
    """Results without scratch."""
    if case.outputs is not None and isinstance(returned, tuple | list):
        return tuple(returned)[: case.outputs]
    return returned


def work(case: Case, inputs: Mapping[str, Any]) -> dict[str, float]:
    """Bytes that an op must move: inputs read and results written once."""
    returned = eager(case, inputs)
    results = returned if isinstance(returned, tuple | list) else (returned,)
    tensors = [t for t in (*inputs.values(), *results) if isinstance(t, torch.Tensor)]
    return {"bytes": float(bytes_of(*tensors))}
