"""Whether a text mask masks nothing: attention without a bias has faster kernels."""

from __future__ import annotations

from torch.utils.weak import WeakTensorKeyDictionary

from hfpatch.blocks.memo import current_reader, recording, stream_of
from hfpatch.proof.subject import Tensor, version

#: Of each mask: how often it had been written to when it was looked at, and what was found.
_known = WeakTensorKeyDictionary()


def masks_nothing(mask: Tensor) -> bool:
    """Whether `mask`, [batch, tokens] of 1 and 0, is known to be 1 everywhere.

    Looking costs one synchronization per mask, not per step: pipelines pass the same tensor. False
    of inference tensors, whose writes are not counted, and for another's CUDA graph, at whose
    replays the mask may hold something else. Ours asks again before each replay.
    """
    counted = version(mask)
    if counted is None or mask.is_meta or mask.ndim != 2:
        return False
    if recording():
        reader = current_reader()
        return reader is not None and reader.all_ones(mask)
    if stream_of(mask) is None:
        return False
    held = _known.get(mask, None)  # type: ignore[no-untyped-call]
    if held is None or held[0] != counted:
        held = _known[mask] = counted, bool((mask == 1).all())
    return bool(held[1])
