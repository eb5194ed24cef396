"""A few steps of transformers' `Trainer`, and what it logs of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn


def logged(
    model: nn.Module, rows: list[dict[str, Any]], folder: Path, steps: int, **arguments: Any
) -> list[dict[str, Any]]:
    """What it logs of each step; `arguments` are more of `TrainingArguments`."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
        **arguments,
    )
    trainer = Trainer(model, args, train_dataset=rows)  # type: ignore[arg-type]
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    found = [e for e in trainer.state.log_history if "loss" in e]
    assert len(found) == steps
    return found
