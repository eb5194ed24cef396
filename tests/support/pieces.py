"""Losses without logits in small pieces, so that every size has several."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from hfpatch.losses import head_loss


def small_pieces(monkeypatch: pytest.MonkeyPatch, size: int) -> list[int]:
    """Pieces of `size` bytes, at least five rows; how many logits existed at a time is appended."""
    monkeypatch.setattr(head_loss, "CHUNK_BYTES", size)
    monkeypatch.setattr(head_loss, "ROWS_BYTES", size)
    monkeypatch.setattr(head_loss, "LEAST", 5)
    sizes: list[int] = []
    made = head_loss._logits

    def counted(*args: Any) -> Tensor:
        logits = made(*args)
        sizes.append(logits.numel())
        return logits

    monkeypatch.setattr(head_loss, "_logits", counted)
    return sizes
