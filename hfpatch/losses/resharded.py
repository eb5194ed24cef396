"""Whether FSDP2 gives a head's weight back before its logits may be read.

A unit's parameters are whole while its forward runs. With ``reshard_after_forward=True`` they are
given back behind it, so logits that are made later have no weight. By default that is so for all
units but the root, which has the head.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn


def is_resharded(head: nn.Module) -> bool:
    """Whether an FSDP2 unit has this module's parameters and reshards them behind its forward. True
    too where this torch keeps what is asked for elsewhere."""
    states = sys.modules.get("torch.distributed._composable_state")
    references = getattr(states, "_module_state_mapping", None)
    if not references:  # nothing is imported for this
        return False
    try:
        return any(
            group._reshard_after_forward
            for group in _groups(list(references.values()))
            for p in group.fsdp_params
            if head is p._module_info.module
            or any(head is m for m in p._module_info.shared_modules)
        )
    except AttributeError:
        return True


def _groups(references: list[Any]) -> Iterator[Any]:
    for reference in references:
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.12 a unit has one at most; other states have none
            groups = [getattr(state, "_fsdp_param_group", None)]
        yield from (g for g in groups if g is not None)
