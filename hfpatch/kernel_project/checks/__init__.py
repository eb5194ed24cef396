"""`hfpatch kernel check`: what the Hub demands of a kernel, as a table.

One file per subject: the project (`project`), its Python (`python`), the built variants
(`variants`), their libraries (`library`, which reads ELF files by `elf`), and what they do when
they are loaded (`loading`). The demands are those of kernels' "Kernel requirements" page.
"""

from hfpatch.kernel_project.checks.row import Row
from hfpatch.kernel_project.checks.table import as_table, check_project

__all__ = ["Row", "as_table", "check_project"]
