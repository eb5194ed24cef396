"""What other packages print by themselves, kept out of the examples' output."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

#: diffusers and transformers import these where they are installed, for quantized models and
#: adapters, which no example has. bitsandbytes then asks the Hub for a kernel, and torchao says
#: which of its libraries it could not load.
UNUSED = ("bitsandbytes", "peft", "torchao")


def leave_out_unused() -> None:
    """diffusers and transformers take them for not installed; before either is imported.

    For this whole process, so for one that runs nothing else.
    """
    for name in UNUSED:
        if name not in sys.modules:
            sys.modules[name] = None  # type: ignore[assignment]  # what Python calls "not there"


def silence_profiler() -> None:
    """PyTorch's profiler announces each start and stop on stderr; its failures are exceptions."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Those of transformers for a file of weights, and that of its reader of GGUF files."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    shown, bar = logging.is_progress_bar_enabled(), getattr(gguf, "tqdm", None)
    logging.disable_progress_bar()
    if bar is not None:  # which asks no setting
        gguf.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
        if bar is not None:
            gguf.tqdm = bar
