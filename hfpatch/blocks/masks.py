"""What a mask masks: attention without one has faster kernels."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hfpatch.blocks.memo import current_reader, for_a_graph, recording, stream_of
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


def may_look(mask: Tensor) -> bool:
    """Whether the host may read a mask now, once a step: where that does not end or change a
    recording, and where writes to the mask are counted, so that it is not each block's wait."""
    recorded = mask.is_cuda and (for_a_graph() or torch.cuda.is_current_stream_capturing())
    return not mask.is_inference() and not recorded


#: Samples that may attend one by one: one launch each, and a copy.
_MAX_ALONE = 4


def kept_keys(mask: Tensor) -> list[slice | Tensor]:
    """The keys that all samples attend to; of each sample, if they differ; [] to use the mask."""
    rows = mask.flatten(1)
    if rows.shape[0] > 1 and bool((rows == rows[:1]).all()):
        rows = rows[:1]
    if rows.shape[0] > _MAX_ALONE:
        return []
    kept: list[slice | Tensor] = []
    for row in rows:
        index = row.nonzero().flatten()
        count = index.shape[0]
        if count == 0:  # attention to nothing is what the mask's kernel makes of it
            return []
        # padding at the end is the common case, and needs no copy of the rest
        kept.append(slice(count) if int(index[-1]) == count - 1 else index)
    return kept
