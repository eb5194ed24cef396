"""Keys that a mask hides are left out of a captured block's attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from blocks_single import ROWS
from support.captured import captured
from test_blocks_single import Root, build, call_of, original
from torch import Tensor

import hfpatch
from hfpatch.regions import kept_keys

#: Of two samples, their masks, and (keys of each attention, whether it has a mask) that they take.
MASKS: dict[str, tuple[tuple[str, str], list[tuple[int, bool]]]] = {
    "nothing": (("1111111111", "1111111111"), [(10, False)]),
    "the end": (("1111110000", "1111110000"), [(6, False)]),
    "holes": (("1011110101", "1011110101"), [(7, False)]),
    "of each its own": (("1111111111", "1110000000"), [(10, False), (3, False)]),
    "a whole sample": (("1111111111", "0000000000"), [(10, True)]),
}


@pytest.fixture(autouse=True)
def _captured(kernels_module: object) -> Iterator[None]:
    with captured():
        yield


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """What attention is called with."""
    seen: list[tuple[int, bool]] = []
    plain = kept_keys.attention

    def attention(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        seen.append((k.shape[2], how.get("mask") is not None))
        return plain(q, k, v, **how)

    monkeypatch.setattr(kept_keys, "attention", attention)
    return seen


def ready(name: str) -> tuple[Root, dict[str, Any], Tensor]:
    """A root whose block is decided on, a call, and the call's mask."""
    row = ROWS[name]
    root, call = build(row), call_of(row, "mask")
    hfpatch.apply(root)
    run(root, call)
    return root, call, next(t for t in call.values() if getattr(t, "dtype", None) == torch.bool)


def run(root: Root, call: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        out: Tensor = root.block(**call)
    return out


@pytest.mark.parametrize("what", MASKS)
def test_masks(what: str, attended: list[tuple[int, bool]]) -> None:
    root, call, mask = ready("z-image")
    rows, expected = MASKS[what]
    mask.copy_(torch.tensor([[c == "1" for c in row] for row in rows]))
    for _ in range(2):
        attended.clear()
        found = run(root, call)
        assert attended == expected
        theirs = original(root.block, call)
        assert torch.equal(found.isnan(), theirs.isnan())
        torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_a_mask_is_looked_at_once(
    attended: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, call, mask = ready("lumina 2")
    run(root, call)
    looks: list[int] = []
    nonzero = Tensor.nonzero
    monkeypatch.setattr(Tensor, "nonzero", lambda t: (looks.append(1), nonzero(t))[1])
    run(root, call)
    assert not looks
    mask[:, 0] = False
    run(root, call)
    assert looks
    torch.testing.assert_close(run(root, call), original(root.block, call), rtol=1e-4, atol=1e-5)
    looks.clear()
    attended.clear()
    with torch.inference_mode():  # writes are not counted: it would be looked at by each block
        given = {k: v.clone() if isinstance(v, Tensor) else v for k, v in call.items()}
        for _ in range(2):
            run(root, given)
    assert not looks and {m for _, m in attended} == {True}
