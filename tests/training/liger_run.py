"""A training with Liger's own loss on a CPU, by Triton's interpreter: what test_liger.py runs.

The interpreter is chosen when Triton is imported, so this is a process of its own. It cannot run
Liger's norms and MLPs (a Python float has no `.to`). Arguments: when `apply` comes ("never",
"before" Liger or "behind" it), and a folder.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
from test_layers import build
from test_trainers import arguments, padded, tokens, trained
from transformers import Trainer, TrainingArguments

import hfpatch
from hfpatch.callbacks import TrainerCallback


def main(when: str, folder: str) -> None:
    torch.set_num_threads(1)
    others = dict.fromkeys(("rope", "rms_norm", "swiglu"), False)
    model = build()
    before = [] if when != "before" else list(hfpatch.apply(model, mode="training").notes)
    callback = TrainerCallback()
    trainer = Trainer(
        model,
        arguments(
            TrainingArguments, Path(folder), use_liger_kernel=True,
            liger_kernel_config={"fused_linear_cross_entropy": True, **others},
        ),
        train_dataset=[{"input_ids": t} for t in tokens(32, 1)],  # type: ignore[arg-type]
        data_collator=padded,
        callbacks=[callback] if when == "behind" else [],
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = trained(trainer)
    status = hfpatch.status(model).notes
    report = callback.report.notes if callback.report else before
    hfpatch.restore(model)
    print(
        json.dumps(
            {
                "losses": found.losses,
                "norms": found.norms,
                "weights": {n: w.tolist() for n, w in found.weights.items()},
                "warned": [str(w.message) for w in seen if "hfpatch" in str(w.message)],
                "report": list(report),
                "status": list(status),
                "forward": model.forward.__func__.__module__,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
