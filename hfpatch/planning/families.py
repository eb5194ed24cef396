"""All patch families, in the order of their rank.

Those of whole blocks have a file each, which is imported when a model has a class of that name:
most models have one or none of them, and all together are half of what an `apply` would import.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from importlib import import_module

from hfpatch.leaves.activations import Activations
from hfpatch.leaves.attention import AttentionProcessors
from hfpatch.leaves.gated_norms import GatedNorms
from hfpatch.leaves.glu import GatedMlps
from hfpatch.leaves.norms import Norms
from hfpatch.leaves.recall import FullMasks, RopeTables
from hfpatch.proof.subject import Family

#: By the name of the class: where in `hfpatch.blocks` its subject is.
BLOCKS = {
    "CogVideoXBlock": ("cogvideox", "CogVideoXSubject"),
    "MochiTransformerBlock": ("mochi", "MochiSubject"),
    "LTX2VideoTransformerBlock": ("ltx2", "Ltx2Subject"),
    "SanaTransformerBlock": ("sana", "SanaSubject"),
    # blocks in which text and image tokens attend to each other
    "Flux2TransformerBlock": ("flux2", "Flux2Subject"),
    "Flux2SingleTransformerBlock": ("flux2", "Flux2SingleSubject"),
    "HunyuanVideoTransformerBlock": ("hunyuan_video", "HunyuanVideoSubject"),
    "HunyuanVideoSingleTransformerBlock": ("hunyuan_video", "HunyuanVideoSingleSubject"),
    "HunyuanVideo15TransformerBlock": ("hunyuan_more", "HunyuanVideo15Subject"),
    "HunyuanImageTransformerBlock": ("hunyuan_more", "HunyuanImageSubject"),
    "HunyuanImageSingleTransformerBlock": ("hunyuan_more", "HunyuanImageSingleSubject"),
    # of UNets and VAEs
    "ResnetBlock2D": ("resnet", "ResnetSubject"),
    "LTXVideoResnetBlock3d": ("ltx_vae", "LtxResnetSubject"),
    "LTXVideoCausalConv3d": ("ltx_vae", "LtxConvSubject"),
    "LTXVideoUpsampler3d": ("ltx_vae", "LtxUpsamplerSubject"),
    "Transformer2DModel": ("transformer_2d", "Transformer2DSubject"),
}

#: Those of convolutions, and of what holds blocks: no capture takes their place.
NEVER_CAPTURED = frozenset(
    {
        *("ResnetBlock2D", "LTXVideoResnetBlock3d", "LTXVideoCausalConv3d", "LTXVideoUpsampler3d"),
        "Transformer2DModel",
    }
)

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
    from hfpatch.blocks.parts import BlockFamily

    file, subject = BLOCKS[name]
    return BlockFamily(name, getattr(import_module(f"hfpatch.blocks.{file}"), subject))


def named(name: str) -> tuple[Family, ...]:
    """The families that may want a module whose class has this name."""
    blocks = (of_block(name),) if name in BLOCKS else ()
    return tuple(sorted((*blocks, *_LEAVES), key=lambda f: f.rank))


@functools.cache
def all_families() -> tuple[Family, ...]:
    """Every family; imports all of them."""
    return tuple(sorted((*map(of_block, BLOCKS), *_LEAVES), key=lambda f: f.rank))


@contextlib.contextmanager
def without_files(names: frozenset[str] | None = None) -> Iterator[None]:
    """No block of these classes has a file of its own meanwhile, in no thread: they are captured as
    those of any other model. For benchmarks and tests.

    Args:
        names: of classes of `BLOCKS`; by default all transformer blocks.
    """
    before = dict(BLOCKS)
    for name in before.keys() - NEVER_CAPTURED if names is None else names:
        del BLOCKS[name]
    all_families.cache_clear()
    try:
        yield
    finally:
        BLOCKS.clear()
        BLOCKS.update(before)
        all_families.cache_clear()
