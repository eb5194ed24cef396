"""hfpatch for the length of a training with transformers' `Trainer`; those of TRL are Trainers."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import transformers

from hfpatch.announce import logger
from hfpatch.context import applied
from hfpatch.report import Report


class TrainerCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Applies hfpatch when a training begins, reports to the log, and restores when it ends.

        Trainer(model, args, train_dataset=data, callbacks=[hfpatch.callbacks.TrainerCallback()])

    The report goes to the logger `hfpatch` (one line at the level "info", the table at "debug"),
    and how many modules were swapped to the trainer's own log (`state.log_history`, so to
    trainer_state.json). A training that raises does not end: the model stays patched, and the next
    training, or `hfpatch.restore(model)`, restores it.

    Args:
        mode: "training", or "inference" for kernels in evaluation only.
        arguments: the other arguments of `hfpatch.apply`.

    Attributes:
        report: of the training that runs, or of the last one; None before the first.
    """

    def __init__(self, mode: str = "training", **arguments: Any) -> None:
        self.arguments = {"mode": mode, **arguments}
        self.report: Report | None = None
        self._stack = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Apply to `kwargs["model"]`."""
        self._stack.close()  # of a training that raised
        self.report = report = self._stack.enter_context(applied(kwargs["model"], **self.arguments))
        logger.info(report.headline)
        logger.debug("%s", report)
        state.log_history.append(
            {
                "step": state.global_step,
                "hfpatch_swapped": len(report.swaps),
                "hfpatch_left_alone": len(report.skips),
            }
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore."""
        self._stack.close()
        logger.info("restored after the training")
