"""All patch families, in the order of their rank.

Those of whole blocks have a file each, which is imported when a model has a class of that name:
most models have one or none of them, and all together are half of what an `apply` would import.
"""

from __future__ import annotations

import functools
from importlib import import_module

from hfpatch.leaves.activations import Activations
from hfpatch.leaves.attention import AttentionProcessors
from hfpatch.leaves.gated_norms import GatedNorms
from hfpatch.leaves.glu import GatedMlps
from hfpatch.leaves.norms import Norms
from hfpatch.leaves.recall import FullMasks, RopeTables
from hfpatch.proof.subject import Family

#: By the name of the class: where in `hfpatch.blocks` its family is.
BLOCKS = {
    "LTXVideoTransformerBlock": ("ltx", "LTX"),
    "WanTransformerBlock": ("wan", "WAN"),
    "BasicTransformerBlock": ("basic", "BASIC"),
    "CogVideoXBlock": ("cogvideox", "COGVIDEOX"),
    "MochiTransformerBlock": ("mochi", "MOCHI"),
    "LTX2VideoTransformerBlock": ("ltx2", "LTX2"),
    "SanaTransformerBlock": ("sana", "SANA"),
    "ZImageTransformerBlock": ("sandwich", "Z_IMAGE"),
    "Lumina2TransformerBlock": ("sandwich", "LUMINA2"),
    # blocks in which text and image tokens attend to each other
    "FluxTransformerBlock": ("flux", "FLUX"),
    "FluxSingleTransformerBlock": ("flux", "FLUX_SINGLE"),
    "Flux2TransformerBlock": ("flux2", "FLUX2"),
    "Flux2SingleTransformerBlock": ("flux2", "FLUX2_SINGLE"),
    "HunyuanVideoTransformerBlock": ("hunyuan_video", "HUNYUAN_VIDEO"),
    "HunyuanVideoSingleTransformerBlock": ("hunyuan_video", "HUNYUAN_VIDEO_SINGLE"),
    "HunyuanVideo15TransformerBlock": ("hunyuan_more", "HUNYUAN_VIDEO15"),
    "HunyuanImageTransformerBlock": ("hunyuan_more", "HUNYUAN_IMAGE"),
    "HunyuanImageSingleTransformerBlock": ("hunyuan_more", "HUNYUAN_IMAGE_SINGLE"),
    "QwenImageTransformerBlock": ("qwen_image", "QWEN_IMAGE"),
    "JointTransformerBlock": ("sd3", "SD3"),
    # of UNets and VAEs
    "ResnetBlock2D": ("resnet", "RESNET"),
    "LTXVideoResnetBlock3d": ("ltx_vae", "LTX_VAE"),
    "LTXVideoCausalConv3d": ("ltx_vae", "LTX_VAE_CONVOLUTIONS"),
    "LTXVideoUpsampler3d": ("ltx_vae", "LTX_VAE_UPSAMPLERS"),
    "Transformer2DModel": ("transformer_2d", "TRANSFORMER_2D"),
}

#: All others, which look at classes of many names.
_LEAVES: tuple[Family, ...] = (
    RopeTables(),
    FullMasks(),
    AttentionProcessors(),
    GatedMlps(),
    GatedNorms(),
    Norms(),
    Activations(),
)


@functools.cache
def of_block(name: str) -> Family:
    """The family of a block whose class has this name, one of `BLOCKS`."""
    file, constant = BLOCKS[name]
    family: Family = getattr(import_module(f"hfpatch.blocks.{file}"), constant)
    return family


def named(name: str) -> tuple[Family, ...]:
    """The families that may want a module whose class has this name."""
    blocks = (of_block(name),) if name in BLOCKS else ()
    return tuple(sorted((*blocks, *_LEAVES), key=lambda f: f.rank))


@functools.cache
def all_families() -> tuple[Family, ...]:
    """Every family; imports all of them."""
    return tuple(sorted((*map(of_block, BLOCKS), *_LEAVES), key=lambda f: f.rank))
