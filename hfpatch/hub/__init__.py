"""Kernels from the HuggingFace Kernel Hub: pinned, verified before they are imported, adapted.

`load` turns a spec ("org/name@v1") into a package; `adapters` knows how the well-known packages
call what our ops are; `lock`, `download` and `inspection` are behind the commands of those names.
Everything is built on `kernels` (variants, metadata, digests, dependencies, import) and
`huggingface_hub` (cache, downloads).
"""

from hfpatch.hub.options import HubOptions
from hfpatch.hub.spec import HubSpec

__all__ = ["HubOptions", "HubSpec"]
