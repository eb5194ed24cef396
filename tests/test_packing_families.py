"""Every family's packed layers: each group that it asks for is one product in its block's call.

Packing is for GPUs; here it is made to take place on the CPU. tests/gpu/test_cuda_packing.py has
the same on a GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import blocks_vae
import pytest
import test_joint_blocks
import torch
import zoo
from blocks_single import ROWS
from packs import captured_groups_of, groups_of, one_product, share_storage
from support.captured import paths
from test_blocks_single import assert_equal_numbers, build, call_of
from torch import nn

import hfpatch
from hfpatch import packing

JOINT = test_joint_blocks.ROWS
#: Blocks with no linear layers side by side.
WITHOUT = {"resnet", "resnet with a shortcut", "resnet of a VAE", *blocks_vae.ROWS}
#: FLUX.2's single blocks come with one layer for q, k, v and the MLP.
GROUPS = {
    "wan": ["qkv", "kv"],
    "wan image to video": ["qkv", "kv", "kv"],
    "unet": ["qkv", "kv"],
    "unet self-attention twice": ["qkv", "qkv"],
    "unet cross-attention alone": ["kv", "kv"],
    "transformer without cross-attention": ["qkv"],
    "pixart": ["qkv", "kv"],
    "z-image": ["qkv", "gate, up"],
    "lumina 2": ["qkv", "gate, up"],
    "cogvideox": ["qkv"],
    "mochi": ["qkv", "qkv"],
    "ltx-2": ["qkv", "kv", "kv"] * 2,
    "sana": ["qkv", "kv"],
}


@pytest.fixture(autouse=True)
def _packed_on_the_cpu(kernels_module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that `packing` asks of a parameter, except for the GPU."""

    def own(p: torch.Tensor) -> bool:
        return (
            type(p) is nn.Parameter
            and p.is_contiguous()
            and not p.is_inference()
            and p.nbytes % packing.ALIGNMENT == 0
            and p.untyped_storage().nbytes() == p.nbytes
        )

    monkeypatch.setattr(packing, "_own", own)


def check(root: nn.Module, run: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """Apply, look at every group, run, restore; returns the groups.

    Those of captured blocks stay apart in fp32: see `test_half_precision`."""
    groups = groups_of(root)
    state = {k: v.clone() for k, v in root.state_dict().items()}
    assert not any(share_storage(g) for g in groups)
    with torch.no_grad():
        expected = run()
        hfpatch.apply(root, blocks=True)
        for _ in range(2):  # the first call of a captured block decides, the second packs
            run()
        assert paths(root)
        captured = captured_groups_of(root)
        assert all(share_storage(g) for g in groups)
        assert not any(share_storage(g) for g in captured)
        with one_product(monkeypatch) as seen:
            got = run()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert all(seen.get(id(g[0])) for g in groups), "a group was not one product"
    hfpatch.restore(root)
    assert not any(share_storage(g) for g in groups)
    assert all(torch.equal(v, state[k]) for k, v in root.state_dict().items())
    return [*groups, *captured]


@pytest.mark.parametrize("name", sorted(set(ROWS) - WITHOUT))
def test_single_stream(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS[name]
    root, given = build(row), call_of(row)
    groups = check(root, lambda: root.block(**given), monkeypatch)
    if name in GROUPS:
        assert [len(g) for g in groups] == [3 if k == "qkv" else 2 for k in GROUPS[name]]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("row", JOINT, ids=lambda row: row.zoo)
def test_joint(row: Any, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = zoo.ENTRIES[row.zoo]
    model, inputs = test_joint_blocks.build(row)
    inputs = test_joint_blocks.of_batch(inputs, batch)
    groups = check(model, lambda: entry.run(model, inputs), monkeypatch)
    streams = {id(g[0]) for g in groups}
    assert len(streams) == len(groups) and all(len(g) in (3, 4) for g in groups)
    blocks = [m for m in model.modules() if type(m).__name__.endswith("TransformerBlock")]
    assert len(groups) >= len(blocks) - (2 if row.zoo == "flux2" else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        *("z-image", "lumina 2", "cogvideox", "mochi", "ltx-2", "sana"),
        *("unet", "pixart", "wan all in one dtype"),
    ],
)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    row = ROWS[name]
    root = build(row, dtype)
    hfpatch.apply(root)
    for _ in range(2):
        root.block(**call_of(row, dtype=dtype))
    groups = [*groups_of(root), *captured_groups_of(root)]
    assert groups and all(share_storage(g) for g in groups)
    for call in row.calls:
        make = functools.partial(call_of, row, call, dtype, (2, 10))
        assert_equal_numbers(root, make, dtype)
