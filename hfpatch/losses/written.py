"""Whose forward writes to what its head gave.

Logits that are deferred are made where somebody writes to them (Chameleon's forward sets those of
image tokens to the least number), at each call. The code of the forward tells before any call.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterable, Iterator

from torch import nn

from hfpatch.losses.taken import forwards_of, heads_among
from hfpatch.proof.subject import class_of
from hfpatch.reading.source import tree_of
from hfpatch.reading.values import Unexplained


def writers(
    modules: Iterable[tuple[str, nn.Module]],
) -> Iterator[tuple[nn.Module, nn.Module, str]]:
    """(model, head, what to say) of each head among `modules`, by path, whose model's own forward
    writes to the logits. Nothing is run."""
    for owner, head, path, names in heads_among(modules):
        if any(_writes(function, names) for function in forwards_of(owner).own):
            yield (
                owner,
                head,
                f"`{path}`: the forward of `{class_of(owner).__name__}` writes to its logits, "
                "which need their whole memory then, as without hfpatch: the head's swap gains "
                "nothing there",
            )


def _writes(function: types.FunctionType, heads: set[str]) -> bool:
    """Whether an element of a variable is set that holds what an attribute of one of the names
    `heads` gave."""
    try:
        tree = tree_of(function)
    except Unexplained:  # a call will tell
        return False
    given: set[str] = set()
    written: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and _calls(node.value, heads):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            given |= {t.id for t in targets if isinstance(t, ast.Name)}
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            written |= {node.value.id} if isinstance(node.value, ast.Name) else set()
    return not given.isdisjoint(written)


def _calls(value: ast.expr | None, heads: set[str]) -> bool:
    called = value.func if isinstance(value, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in heads
