"""One table of calls to every op over lists of tensors, which `list_proofs.py`, the fuzzer and
compute-sanitizer's tests go through, as `op_samples.py` is for the other ops.

An op of HFP_LIST_OP_TABLE without a row fails `test_every_op_over_lists_has_a_sample`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import c_api
import torch
from op_samples import DTYPES, F32
from torch import Tensor

#: No dimension, nothing in it, no whole vector, more than a chunk of every op.
SHAPES = ((300, 57), (7,), (), (0, 3), (4097,), (2, 3, 64), (8192,))
INF = float("inf")

#: The tensors of a call by the names of its schema: a list of them, or one of one element.
Made = dict[str, Any]


@dataclass(frozen=True)
class ListSample:
    """One way to call an op.

    Attributes:
        op: its name in HFP_LIST_OP_TABLE.
        label: tells the samples of one op apart.
        lists: the dtype of each list of one tensor for each parameter; None: that of the call.
        numbers: tensors of one element. One whose argument is a list: as many, one more each.
        scalars: the rest of the arguments.
        public: the scalars of the package's function, where they are others.
        dtypes: those that the call takes.
        alone: whether what becomes of a tensor does not depend on the others of its list.
    """

    op: str
    label: str
    lists: dict[str, torch.dtype | None]
    numbers: dict[str, float]
    scalars: dict[str, Any]
    public: dict[str, Any] | None = None
    dtypes: Sequence[torch.dtype] = field(default_factory=lambda: DTYPES)
    alone: bool = True

    @property
    def id(self) -> str:
        return f"{self.op}-{self.label}" if self.label else self.op

    @property
    def schema(self) -> c_api.Op:
        return c_api.LIST_OPS[self.op]

    @property
    def written(self) -> list[str]:
        """The lists that the op changes."""
        return [n for kind, n in self.schema.arguments if "!" in kind and n in self.lists]

    def make(
        self,
        dtype: torch.dtype,
        device: str = "cpu",
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        change: Callable[[Tensor], Tensor] = lambda t: t,
    ) -> Made:
        """Fresh tensors, always the same; `change` lays those of a parameter out."""
        generator = torch.Generator().manual_seed(0)
        made: Made = {}
        for name, kind in self.lists.items():
            values = [torch.randn(shape, generator=generator) for shape in shapes]
            if name.endswith("sqs"):  # second moments
                values = [v.square() for v in values]
            made[name] = [change(v.to(kind or dtype).to(device)) for v in values]
        for name, value in self.numbers.items():
            kind = {n: k for k, n in self.schema.arguments}[name]
            count = len(shapes) if kind.endswith("[]") else 1
            several = [torch.full((), value + i).to(device) for i in range(count)]
            made[name] = several if kind.endswith("[]") else several[0]
        return made

    def arguments(self, made: Made) -> tuple[Any, ...]:
        """Those of the raw operator, in the order of its schema."""
        absent = {True: [], False: None}
        return tuple(
            made.get(name, absent[kind.endswith("[]")])
            if kind.startswith("Tensor")
            else self.scalars[name]
            for kind, name in self.schema.arguments
        )

    def results(self, made: Made, returned: Any) -> list[Tensor]:
        """What a call has changed, and what it returned: of a norm, without its partial sums."""
        changed = [t for name in self.written for t in made[name]]
        if isinstance(returned, tuple):
            returned = returned[0]
        return changed if returned is None else [*changed, returned]

    def call(self, kernels: Any, made: Made) -> list[Tensor]:
        """The raw operator's results."""
        operator = getattr(kernels.ops, self.op).default
        return self.results(made, operator(*self.arguments(made)))

    def call_public(self, kernels: Any, made: Made) -> list[Tensor]:
        scalars = self.scalars if self.public is None else self.public
        given = {**scalars, **made}
        if "lr_tensor" in given:
            given["lr"] = given.pop("lr_tensor")
        return self.results(made, getattr(kernels, self.op)(**given))


HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "maximize": 0}
STATE = {"params": None, "grads": None, "exp_avgs": None, "exp_avg_sqs": None}
WIDE = {"params": None, "grads": None, "exp_avgs": F32, "exp_avg_sqs": F32}

LIST_SAMPLES = [
    ListSample("adamw_step", "", STATE, {"steps": 3.0}, HYPER),
    ListSample(
        "adamw_step",
        "scaled",
        {**WIDE, "max_exp_avg_sqs": F32},
        {"steps": 1.0, "lr_tensor": 3e-3, "clip_coef": 0.5, "grad_scale": 8.0, "found_inf": 0.0},
        {**HYPER, "lr": 0.0, "maximize": 1},
    ),
    ListSample(
        "adamw_step", "masters", {**WIDE, "masters": F32}, {"steps": 3.0}, HYPER, dtypes=DTYPES[1:]
    ),
    ListSample("grad_norm", "", {"tensors": None}, {}, {"norm_type": 0}, {}, alone=False),
    ListSample(
        "grad_norm",
        "largest",
        {"tensors": None},
        {},
        {"norm_type": 1},
        {"norm_type": INF},
        alone=False,
    ),
    ListSample("clip_grads", "", {"grads": None}, {"total_norm": 9.0}, {"max_norm": 0.5}),
    ListSample("scale_grads", "", {"grads": None}, {"factor": 0.75}, {}),
]
LISTS_BY_ID = {s.id: s for s in LIST_SAMPLES}
LISTS_FIRST = {s.op: s for s in reversed(LIST_SAMPLES)}
#: For tests of every sample in every dtype that it takes.
LISTS_OF_DTYPES = [(s.id, dtype) for s in LIST_SAMPLES for dtype in s.dtypes]
