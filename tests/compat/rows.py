"""All rows of docs/compatibility.md, in the page's order."""

from __future__ import annotations

from collections.abc import Sequence

import rows_adapters
import rows_changes
import rows_compile
import rows_copies
import rows_introspection
import rows_placement
import rows_serving
import rows_steps
import rows_training
from row import Row

ROWS: Sequence[Row] = (
    *rows_placement.ROWS,
    *rows_compile.ROWS,
    *rows_training.ROWS,
    *rows_adapters.ROWS,
    *rows_changes.ROWS,
    *rows_copies.ROWS,
    *rows_serving.ROWS,
    *rows_steps.ROWS,
    *rows_introspection.ROWS,
)
