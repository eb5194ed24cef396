"""Where compiled kernels of hfpatch's own may be on this machine, and which of them fits.

In the Hub's layout, a folder with `build/<variant>/`, they are (1) in the package, where
`pip install .` compiled them; (2) installed beside it, by a wheel `hfpatch-kernels-<backend>`;
(3) in the user's own folder, where `hfpatch setup` downloaded or compiled them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hfpatch.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.variants import Variant

#: The folder that the wheels `hfpatch-kernels-*` install, whichever backend they are for.
INSTALLED = "hfpatch_kernel_builds"


@dataclass(frozen=True)
class Found:
    """A build that fits this system: `backend` is given where it is not that of the torch here."""

    root: Path
    variant: str
    backend: str | None = None


def beside() -> list[Path]:
    """The folders with builds besides the package's own, the nearest first."""
    return [*_installed(), *(p for p in (own_folder(),) if p is not None and _has_builds(p))]


def _installed() -> list[Path]:
    """Those of installed wheels: a folder of that name is none, which any directory may have."""
    found = []
    for entry in dict.fromkeys(filter(None, sys.path)):
        folder = Path(entry) / INSTALLED
        if _has_builds(folder) and any(folder.parent.glob("hfpatch_kernels_*.dist-info")):
            found.append(folder)
    return found


def own_folder(make: bool = False) -> Path | None:
    """Where `hfpatch setup` puts builds of this version; None: no folder is the user's alone."""
    import hfpatch
    from hfpatch.hub.evidence import state_folder

    state = state_folder(make)
    return None if state is None else state / "kernels" / hfpatch.__version__


def _has_builds(folder: Path) -> bool:
    try:
        return (folder / "build").is_dir()
    except OSError:
        return False


def fitting(roots: Sequence[Path]) -> tuple[Found | None, str]:
    """The first build that fits this system, one for its torch's backend before one for the CPU;
    where there is none, what was found and why it does not fit.
    """
    from kernels.variants import get_variants_local, resolve_variant, variants_trace_str

    traces = []
    for backend in (None, "cpu"):  # a CUDA torch can use kernels that were built for the CPU only
        for root in roots:
            variants: list[Variant] = get_variants_local(root / "build")
            variant, trace = resolve_variant(variants, backend)
            if variant is not None:
                return Found(root, variant.variant_str, backend), ""
            if backend is None:
                traces.append(variants_trace_str(trace) if trace else f"  `{root}` is empty")
    return None, printable("\n".join(traces), 4000)
