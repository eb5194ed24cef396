"""All patch families. The registry asks them in the order of their rank, and imports them when the
first model is looked at: `import hfpatch` alone takes half the time without."""

from hfpatch.blocks.basic import BasicBlocks
from hfpatch.blocks.cogvideox import CogVideoXBlocks
from hfpatch.blocks.flux import FLUX, FLUX_SINGLE
from hfpatch.blocks.flux2 import FLUX2, FLUX2_SINGLE
from hfpatch.blocks.hunyuan_more import (
    HUNYUAN_IMAGE,
    HUNYUAN_IMAGE_SINGLE,
    HUNYUAN_VIDEO15,
)
from hfpatch.blocks.hunyuan_video import HUNYUAN_VIDEO, HUNYUAN_VIDEO_SINGLE
from hfpatch.blocks.ltx import LtxBlocks
from hfpatch.blocks.ltx2 import Ltx2Blocks
from hfpatch.blocks.ltx_vae import LtxVaeBlocks, LtxVaeConvolutions, LtxVaeUpsamplers
from hfpatch.blocks.mochi import MochiBlocks
from hfpatch.blocks.qwen_image import QWEN_IMAGE
from hfpatch.blocks.resnet import ResnetBlocks
from hfpatch.blocks.sana import SanaBlocks
from hfpatch.blocks.sandwich import Lumina2Blocks, ZImageBlocks
from hfpatch.blocks.sd3 import SD3
from hfpatch.blocks.transformer_2d import Transformer2DModels
from hfpatch.blocks.wan import WanBlocks
from hfpatch.leaves.activations import Activations
from hfpatch.leaves.attention import AttentionProcessors
from hfpatch.leaves.gated_norms import GatedNorms
from hfpatch.leaves.glu import GatedMlps
from hfpatch.leaves.norms import Norms
from hfpatch.leaves.recall import FullMasks, RopeTables
from hfpatch.proof.subject import Family

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
