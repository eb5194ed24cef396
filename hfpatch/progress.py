"""Progress bars, as the other libraries of HuggingFace have them.

One appears on stderr of a terminal or in a notebook, for work that has lasted a second. Nowhere
else, and not where `hfpatch.disable_progress_bars()` or HF_HUB_DISABLE_PROGRESS_BARS says so.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

_T = TypeVar("_T")
#: Seconds of work before a bar appears: most models are patched sooner.
_DELAY = 1.0

_disabled = False


def disable_progress_bars() -> None:
    """Show no progress bar of hfpatch from now on.

    HF_HUB_DISABLE_PROGRESS_BARS=1 does it for all libraries of HuggingFace, and wins.
    """
    global _disabled
    _disabled = True


def enable_progress_bars() -> None:
    """Undo `disable_progress_bars`; warns where HF_HUB_DISABLE_PROGRESS_BARS forbids them."""
    global _disabled
    if _forbidden():
        warnings.warn(
            "hfpatch: HF_HUB_DISABLE_PROGRESS_BARS=1 is set, so no progress bar is shown; unset it",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    _disabled = False


def are_progress_bars_disabled() -> bool:
    """Whether `disable_progress_bars` or HF_HUB_DISABLE_PROGRESS_BARS says that there are none."""
    return _disabled or _forbidden()


def shown() -> bool:
    """Whether a bar would be seen here: a terminal or a notebook, and nobody forbids it."""
    return not are_progress_bars_disabled() and (_notebook() or _stream().isatty())


def track(items: Iterable[_T], text: str, unit: str, total: int | None = None) -> Iterator[_T]:
    """The items, under a bar while they are worked on."""
    with bar(text, unit, total if total is not None else _length(items)) as progress:
        for item in items:
            yield item
            progress.update()


@contextmanager
def bar(text: str, unit: str, total: int | None, scaled: bool = False) -> Iterator[Any]:
    """A bar of tqdm to call `update(n)` on, from any thread; it is gone when the block ends.

    Args:
        text: what stands before it.
        unit: of what it counts, e.g. "module", "B".
        total: how much there is to do; None if nobody knows.
        scaled: write 12.3M for a large number, as for bytes.
    """
    if not shown():
        yield _Nothing()
        return
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    with tqdm(
        desc=text, unit=unit, total=total, unit_scale=scaled, leave=False, delay=_DELAY,
        dynamic_ncols=True, file=_stream(),
    ) as progress:  # fmt: skip
        yield progress


def part_of(progress: Any) -> Any:
    """A class of bars that are not seen and move `progress`: for `hf_hub_download(tqdm_class=…)`,
    which would show a bar for each of the files that come at once."""
    from huggingface_hub import utils

    base: Any = utils.tqdm  # type: ignore[attr-defined]

    class Part(base):  # type: ignore[misc]
        monitor_interval = 0  # else tqdm starts a thread for the class, which never ends

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            progress.update(n or 0)
            return None

    return Part


class _Nothing:
    """What takes the calls where no bar is shown."""

    def update(self, n: float = 1) -> None:
        pass

    def set_postfix_str(self, text: str) -> None:
        pass


def _stream() -> Any:
    return sys.stderr


def _forbidden() -> bool:
    value = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "")
    return value.upper() in ("1", "ON", "YES", "TRUE")


def _notebook() -> bool:
    """Whether this is a Jupyter kernel, whose stderr is no terminal but shows bars."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


def _length(items: Iterable[Any]) -> int | None:
    return len(items) if isinstance(items, Sized) else None
