"""What runs in other processes."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch
from row import Case, forward
from torch import nn


def call(state: bytes, column: str) -> np.ndarray[Any, Any]:
    """The output of a pickled model for pickled inputs; it comes back unpatched and clean."""
    torch.set_num_threads(1)
    model, inputs = pickle.loads(state)
    from columns import COLUMNS

    with torch.no_grad():
        return COLUMNS[column].entry.output(model(**inputs)).numpy()


class Computed(torch.utils.data.Dataset[torch.Tensor]):
    """One item: the model's output."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        self.model, self.case = model, case

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        torch.set_num_threads(1)
        return forward(self.case, self.model)
