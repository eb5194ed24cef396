"""All patch families. The registry asks them in the order of their rank, and imports them when the
first model is looked at: `import hfpatch` alone takes half the time without."""

from hfpatch.patches.activations import Activations
from hfpatch.patches.attention import AttentionProcessors
from hfpatch.patches.base import Family
from hfpatch.patches.blocks.basic import BasicBlocks
from hfpatch.patches.blocks.cogvideox import CogVideoXBlocks
from hfpatch.patches.blocks.flux import FLUX, FLUX_SINGLE
from hfpatch.patches.blocks.flux2 import FLUX2, FLUX2_SINGLE
from hfpatch.patches.blocks.hunyuan_more import (
    HUNYUAN_IMAGE,
    HUNYUAN_IMAGE_SINGLE,
    HUNYUAN_VIDEO15,
)
from hfpatch.patches.blocks.hunyuan_video import HUNYUAN_VIDEO, HUNYUAN_VIDEO_SINGLE
from hfpatch.patches.blocks.ltx import LtxBlocks
from hfpatch.patches.blocks.ltx2 import Ltx2Blocks
from hfpatch.patches.blocks.ltx_vae import LtxVaeBlocks, LtxVaeConvolutions, LtxVaeUpsamplers
from hfpatch.patches.blocks.mochi import MochiBlocks
from hfpatch.patches.blocks.qwen_image import QWEN_IMAGE
from hfpatch.patches.blocks.resnet import ResnetBlocks
from hfpatch.patches.blocks.sana import SanaBlocks
from hfpatch.patches.blocks.sandwich import Lumina2Blocks, ZImageBlocks
from hfpatch.patches.blocks.sd3 import SD3
from hfpatch.patches.blocks.transformer_2d import Transformer2DModels
from hfpatch.patches.blocks.wan import WanBlocks
from hfpatch.patches.gated_norms import GatedNorms
from hfpatch.patches.glu import GatedMlps
from hfpatch.patches.norms import Norms
from hfpatch.patches.recall import FullMasks, RopeTables

#: Blocks in which text and image tokens attend to each other.
JOINT: tuple[Family, ...] = (
    FLUX,
    FLUX_SINGLE,
    FLUX2,
    FLUX2_SINGLE,
    HUNYUAN_VIDEO,
    HUNYUAN_VIDEO_SINGLE,
    HUNYUAN_VIDEO15,
    HUNYUAN_IMAGE,
    HUNYUAN_IMAGE_SINGLE,
    QWEN_IMAGE,
    SD3,
)

FAMILIES: tuple[Family, ...] = tuple(
    sorted(
        (
            LtxBlocks(),
            WanBlocks(),
            BasicBlocks(),
            CogVideoXBlocks(),
            MochiBlocks(),
            Ltx2Blocks(),
            SanaBlocks(),
            ZImageBlocks(),
            Lumina2Blocks(),
            *JOINT,
            RopeTables(),
            FullMasks(),
            ResnetBlocks(),
            LtxVaeBlocks(),
            LtxVaeConvolutions(),
            LtxVaeUpsamplers(),
            Transformer2DModels(),
            AttentionProcessors(),
            GatedMlps(),
            GatedNorms(),
            Norms(),
            Activations(),
        ),
        key=lambda f: f.rank,
    )
)

__all__ = ["FAMILIES"]
