"""DeepSpeed itself (not what `sharded_cases` imitates), for tests/sharding/test_deepspeed.py.

A training of four steps with a checkpoint that is written and read back, patched beside unpatched.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from sharded import Rank, case

import hfpatch

sys.path.insert(0, str(Path(__file__).resolve().parent / "training"))
from test_layers import build, layers_of, lora

STEPS = 4


def _config(stage: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": dtype == torch.bfloat16},
    }


def _trained(kind: str, stage: int, dtype: torch.dtype, order: str | None, rank: Rank) -> Any:
    """(losses, fp32 parameters, the report, the loss before and after a checkpoint was read)."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    model = build("Llama", dtype)
    if kind == "LoRA":
        model = lora(model)
    if kind == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    report = None
    if order == "patch first":
        report = hfpatch.apply(model, mode="training")
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(trained, 1e-3), config=_config(stage, dtype)
    )
    if order == "shard first":
        report = hfpatch.apply(model, mode="training")
    losses = []
    for i in range(STEPS):
        generator = torch.Generator().manual_seed(10 * i + rank.index)
        ids = torch.randint(3, 99, (2, 24), generator=generator)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    folder = [tempfile.mkdtemp() if rank.index == 0 else ""]
    torch.distributed.broadcast_object_list(folder)
    engine.save_checkpoint(folder[0])
    before = engine(input_ids=ids, labels=ids).loss.item()
    for p in trained:
        p.data.zero_()
    engine.load_checkpoint(folder[0])
    after = engine(input_ids=ids, labels=ids).loss.item()
    found = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            whole = safe_get_full_fp32_param(p) if stage == 3 else p
            found[name] = whole.detach().float().clone()
    if report is not None:
        hfpatch.restore(model)
        assert not hfpatch.status(model).swaps
        # the same without the patches, to the rounding
        plain = engine(input_ids=ids, labels=ids).loss.item()
        assert abs(plain - after) <= (1e-2 if dtype == torch.bfloat16 else 1e-5)
    return losses, found, report, before, after


def trains_as_before(kind: str, stage: int, dtype: torch.dtype, order: str, rank: Rank) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # patched first: DeepSpeed replaces functions of PyTorch's for good
        ours = _trained(kind, stage, dtype, order, rank)
        theirs = _trained(kind, stage, dtype, None, rank)
    report = ours[2]
    reasons = {s.reason for s in report.skips}
    if order == "shard first" and stage == 3:
        assert any("as DeepSpeed's ZeRO-3 leaves it" in r for r in reasons), reasons
    else:
        assert layers_of(report) == 2, reasons
        assert any(s.op == "linear_cross_entropy" for s in report.swaps)
    most = 3e-2 if dtype == torch.bfloat16 else 2e-5
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert abs(a - b) <= most, (ours[0], theirs[0])
    assert len(set(theirs[0])) == STEPS
    assert ours[1].keys() == theirs[1].keys()
    for name, p in theirs[1].items():
        torch.testing.assert_close(ours[1][name], p, rtol=most, atol=most, msg=name)
    assert ours[3] == ours[4], "not what the checkpoint had"


for _stage, _order in itertools.product((1, 2, 3), ("patch first", "shard first")):
    for _kind in ("plain", "LoRA", "checkpointed"):
        case(f"zero{_stage}-{_kind}-{_order}")(
            functools.partial(trains_as_before, _kind, _stage, torch.float32, _order)
        )
    case(f"zero{_stage}-bf16-{_order}")(
        functools.partial(trains_as_before, "plain", _stage, torch.bfloat16, _order)
    )
