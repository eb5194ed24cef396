"""Attention processors of diffusers, by the processor convention (`get_processor`).

They are listed so that the report is complete; the norms and projections inside an attention are
sites of their own and are patched one by one.
"""

from __future__ import annotations

import re

from torch import nn

from hfpatch.proof.subject import Family, Subject


class AttentionProcessors(Family):
    name = "attention"
    pattern = re.compile(r"Attention|Attn")
    rank = 10

    def examine(self, module: nn.Module) -> Subject | str | None:
        processor = module.__dict__.get("processor")
        if processor is None:
            return None
        name = type(processor).__name__
        return f"no fused kernel for `{name}` yet; the modules inside are looked at one by one"
