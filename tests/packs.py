"""Which linear layers of fused blocks are packed, asked of the families and seen in their calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import nn

from hfpatch.blocks import projections
from hfpatch.blocks.base import BlockSubject
from hfpatch.planning.families import all_families
from hfpatch.regions import offer


def groups_of(root: nn.Module) -> list[list[Any]]:
    """The groups that the fused blocks of `root` ask for."""
    groups: list[list[Any]] = []
    for module in root.modules():
        for family in all_families():
            subject = family.examine(module) if family.nominates(module) else None
            if isinstance(subject, BlockSubject):
                groups += subject.packs()
                break
    return groups


def captured_groups_of(root: nn.Module) -> list[list[Any]]:
    """The same of captured blocks, each group once, as far as calls have decided."""
    found: dict[tuple[int, ...], list[Any]] = {}
    for block in root.modules():
        for kind in offer._kinds.values():
            if block not in kind.blocks:
                continue
            for paths in (paths for variant in kind.decided for paths in variant.packs):
                group = [block.get_submodule(path) for path in paths]
                found[tuple(map(id, group))] = group
    return list(found.values())


def share_storage(group: list[Any]) -> bool:
    return len({linear.weight.untyped_storage().data_ptr() for linear in group}) == 1


@contextmanager
def one_product(patch: pytest.MonkeyPatch) -> Iterator[dict[int, bool]]:
    """{id of a group's first layer: whether the block's call found the group packed}."""
    seen: dict[int, bool] = {}
    real = projections._packed

    def packed(linears: Any, x: Any) -> Any:
        found = real(linears, x)
        seen[id(linears[0])] = found is not None
        return found

    with patch.context() as inner:
        inner.setattr(projections, "_packed", packed)
        yield seen
