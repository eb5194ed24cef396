"""What the first `apply` of a process imports: what the model at hand needs, and no more."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hfpatch.planning.families import BLOCKS, all_families, named, of_block

#: What captures blocks of diffusers, where it is only offered.
CAPTURES = ("hfpatch.regions.capture", "hfpatch.regions.offer")
#: What captures blocks, explains decoders, records graphs, asks others' kernels, trains heads.
HEAVY = (
    *CAPTURES, "hfpatch.decoding.analysis", "hfpatch.decoding.step",
    "hfpatch.graphs.recording", "hfpatch.foreign.battery",
    "hfpatch.foreign.watch", "hfpatch.losses", "hfpatch.training.layer", "sympy", "torch._dynamo",
    "torch._inductor", "torch.export", "transformers", "diffusers",
)  # fmt: skip

CODE = """
import sys, torch
from torch import nn
{build}
before = set(sys.modules)
import hfpatch
hfpatch.apply(model)
hfpatch.status(model)
hfpatch.restore(model)
print(*sorted(set(sys.modules) - before))
"""
MODEL = "model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())"
LTX = """
from diffusers import LTXVideoTransformer3DModel
model = LTXVideoTransformer3DModel(
    num_layers=2, num_attention_heads=2, attention_head_dim=32, cross_attention_dim=64,
    caption_channels=32,
)
"""
LTX2 = LTX.replace("LTXV", "LTX2V").replace("caption_channels=32,", "")


def imported(build: str) -> set[str]:
    """By a process that patches a model and takes it back."""
    code = CODE.format(build=build)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("build", "block", "captures"),
    [(MODEL, None, False), (LTX, None, True), (LTX2, "ltx2", True)],
    ids=["small", "captured", "with a file"],
)
def test_no_more_than_the_model_needs(
    build: str, block: str | None, captures: bool, kernels_module: object
) -> None:
    """The libraries' own imports counted: PyTorch brings SymPy and dynamo where they are called."""
    brought = imported(build)
    heavy = [h for h in HEAVY if not (captures and h in CAPTURES)]
    assert not [n for n in brought for h in heavy if n == h or n.startswith(f"{h}.")]
    files = {f"hfpatch.blocks.{file}" for file, _ in BLOCKS.values()}
    assert brought & files == ({f"hfpatch.blocks.{block}"} if block else set())


def test_each_block_is_of_the_family_that_is_named() -> None:
    """The table that spares the imports says what the families' own patterns say."""
    for name in BLOCKS:
        assert [f for f in all_families() if f.name == "block" and f.pattern.search(name)] == [
            of_block(name)
        ]
        assert of_block(name) in named(name)
        assert [f for f in all_families() if f.pattern.search(name)] == [
            f for f in named(name) if f.pattern.search(name)
        ]
    assert len({of_block(name) for name in BLOCKS}) == len(BLOCKS)
