"""Patch families: one file each. The registry asks them in the order of their rank."""

from hfpatch.patches.activations import Activations
from hfpatch.patches.attention import AttentionProcessors
from hfpatch.patches.base import Family
from hfpatch.patches.blocks.basic import BasicBlocks
from hfpatch.patches.blocks.ltx import LtxBlocks
from hfpatch.patches.blocks.resnet import ResnetBlocks
from hfpatch.patches.blocks.wan import WanBlocks
from hfpatch.patches.glu import GatedMlps
from hfpatch.patches.norms import Norms

FAMILIES: tuple[Family, ...] = tuple(
    sorted(
        (
            LtxBlocks(),
            WanBlocks(),
            BasicBlocks(),
            ResnetBlocks(),
            AttentionProcessors(),
            GatedMlps(),
            Norms(),
            Activations(),
        ),
        key=lambda f: f.rank,
    )
)

__all__ = ["FAMILIES", "Family"]
