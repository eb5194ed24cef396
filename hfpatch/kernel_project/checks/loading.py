"""What a variant does when it is loaded, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from hfpatch.kernel_project.checks.row import Row

_CODE = """
import sys
from pathlib import Path
import kernels
from kernels.layer.layer import _validate_layer
from torch import nn
try:
    kernel = kernels.get_local_kernel(Path(sys.argv[1]))
except Exception as e:
    sys.exit(f"{type(e).__name__}: {e}".splitlines()[0])
missing = [name for name in kernel.__all__ if not hasattr(kernel, name)]
if missing:
    sys.exit(f"`__all__` lists {missing}, which are not there")
layers = getattr(kernel, "layers", None)
found = [c for c in vars(layers).values() if isinstance(c, type) and issubclass(c, nn.Module)
         and c.__module__ == layers.__name__] if layers is not None else []
for layer in found:
    _validate_layer(check_cls=layer, cls=layer, repo=layer.__name__)
print(len(kernel.__all__), "names,", len(found), "layers")
"""


def rows(variant: Path) -> Iterator[Row]:
    """A row if the variant fits this system, else one that says why it was not loaded."""
    from kernels import VariantRejected
    from kernels.variants import get_variants_local, resolve_variants

    what = "`kernels` loads it"
    _, trace = resolve_variants(get_variants_local(variant.parent))
    decision = next((d for d in trace if d.variant.variant_str == variant.name), None)
    if decision is None or isinstance(decision, VariantRejected):
        why = decision.reason if isinstance(decision, VariantRejected) else "it is not a variant"
        yield Row(variant.name, what, note=f"not for this system: {why}")
        return
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CODE, str(variant)],
            capture_output=True, text=True, timeout=300, check=False, cwd=variant.parent,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        yield Row(variant.name, what, "it did not end within 300 s", "load it by hand")
        return
    if done.returncode == 0:
        yield Row(variant.name, what, note=done.stdout.strip())
        return
    lines = done.stderr.strip().splitlines()
    problem = lines[-1] if lines else f"the process ended with status {done.returncode}"
    yield Row(variant.name, what, problem, f"`kernels.get_local_kernel(Path('{variant}'))`")
