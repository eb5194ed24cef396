"""hfpatch for the length of a generation with a diffusers pipeline."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

import diffusers.callbacks

from hfpatch.announce import logger
from hfpatch.context import applied
from hfpatch.report import Report


class PipelineCallback(diffusers.callbacks.PipelineCallback):  # type: ignore[misc]
    """Applies hfpatch in a generation, reports to the log, and restores before it is decoded.

        pipe(prompt, callback_on_step_end=hfpatch.callbacks.PipelineCallback())

    A pipeline calls back at the end of a step, so the first step runs unpatched, and what follows
    the last step (the VAE) too. For all of a generation write `with hfpatch.applied(pipe): …`. The
    report goes to the logger `hfpatch`: one line at the level "info", the table at "debug". A
    generation that is interrupted or raises stays patched: the next one, or `close()`, restores.

    Args:
        arguments: those of `hfpatch.apply`.

    Attributes:
        report: of the generation that runs, or of the last one; None before the first.
    """

    tensor_inputs: ClassVar[list[str]] = []

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments
        self.report: Report | None = None
        self._stack = ExitStack()

    def callback_fn(
        self, pipeline: Any, step_index: int, timesteps: Any, callback_kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """What the pipeline calls at the end of each step; `callback_kwargs` stay as they are."""
        last = _is_last(pipeline, step_index, timesteps)
        if step_index == 0:
            self._stack.close()  # of a generation that did not end
            if not last:
                self.report = report = self._stack.enter_context(
                    applied(pipeline, **self.arguments)
                )
                logger.info(report.headline)
                logger.debug("%s", report)
        elif last:
            self.close()
            logger.info("restored after the last step")
        return callback_kwargs

    def close(self) -> None:
        """Restore now, as after a generation that did not end."""
        self._stack.close()


def _is_last(pipeline: Any, step_index: int, timestep: Any) -> bool:
    """Whether a step is a generation's last. Few pipelines (ERNIE-Image, LEDITS++) do not say how
    many there are; theirs end with their scheduler's last timestep."""
    count = getattr(pipeline, "num_timesteps", None)
    if count is not None:
        return bool(step_index + 1 >= count)
    return bool(timestep == pipeline.scheduler.timesteps[-1])
