"""`apply` packs q, k and v of fused blocks on the GPU; every way out of that leads back."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import pytest
import test_joint_blocks
import torch
import zoo
from blocks_single import ROWS
from expect import relative_error
from packs import captured_groups_of, groups_of, one_product, share_storage
from support.captured import paths
from support.samples import moved
from test_blocks_single import build as build_block
from test_blocks_single import call_of, flat

import hfpatch

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there."""


def build() -> tuple[Any, dict[str, Any], torch.Tensor]:
    entry = zoo.ENTRIES["ltx"]
    model = entry.build(torch.bfloat16).cuda()
    inputs = {
        k: v.cuda() if isinstance(v, torch.Tensor) else v
        for k, v in entry.inputs(model, torch.bfloat16).items()
    }
    return model, inputs, entry.run(model, inputs)


def patch(model: Any, inputs: dict[str, Any]) -> None:
    """The first call of a captured block decides, the second packs."""
    hfpatch.apply(model)
    for _ in range(2):
        zoo.ENTRIES["ltx"].run(model, inputs)
    assert paths(model)


def storages(model: Any, layers: str = "qkv") -> set[int]:
    attn = model.transformer_blocks[0].attn1
    linears = [getattr(attn, f"to_{n}") for n in layers]
    return {m.weight.untyped_storage().data_ptr() for m in linears}


def allocated() -> int:
    """Bytes of tensors, without cuBLAS's workspace, which a process's first product takes."""
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def check(model: Any, inputs: dict[str, Any], expected: torch.Tensor) -> None:
    got = zoo.ENTRIES["ltx"].run(model, inputs)
    assert relative_error(got.cpu(), expected.cpu()) < 2e-2


def test_pack_and_restore() -> None:
    model, inputs, expected = build()
    parameters = dict(model.named_parameters())
    values = {k: v.clone() for k, v in parameters.items()}
    held = allocated()
    assert len(storages(model)) == 3
    patch(model, inputs)
    assert len(storages(model)) == 1
    assert allocated() <= held + (1 << 16)  # moved, not copied
    check(model, inputs, expected)
    assert all(
        p is parameters[k] and torch.equal(p, values[k]) for k, p in model.named_parameters()
    )
    patch(model, inputs)  # again: packed already
    assert len(storages(model)) == 1
    hfpatch.restore(model)
    assert len(storages(model)) == 3
    assert all(
        p is parameters[k] and torch.equal(p, values[k]) for k, p in model.named_parameters()
    )
    check(model, inputs, expected)


def test_saved_files_are_byte_identical(tmp_path: Path) -> None:
    model, inputs, _ = build()
    digests = []
    for name in ("before", "after"):
        model.save_pretrained(tmp_path / name)
        files = sorted((tmp_path / name).glob("*.safetensors"))
        digests.append([hashlib.sha256(f.read_bytes()).hexdigest() for f in files])
        patch(model, inputs)
    assert digests[0] and digests[0] == digests[1]


def test_offload_dtype_copy_and_reload() -> None:
    model, inputs, expected = build()
    patch(model, inputs)
    twin = copy.deepcopy(model)
    check(twin, inputs, expected)
    hfpatch.restore(twin)
    assert len(storages(model)) == 1  # the copy's restore is the copy's
    check(model.cpu().cuda(), inputs, expected)  # unpacked by the move
    assert len(storages(model)) == 3
    hfpatch.restore(model)
    patch(model, inputs)
    assert len(storages(model)) == 1
    state = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict({k: torch.zeros_like(v) for k, v in state.items()})
    model.load_state_dict(state)
    check(model, inputs, expected)


def test_a_changed_weight_is_used() -> None:
    model, inputs, expected = build()
    patch(model, inputs)
    for linear in (model.transformer_blocks[0].attn1.to_k, model.transformer_blocks[1].attn2.to_v):
        linear.weight.data.mul_(-1.5)
    got = zoo.ENTRIES["ltx"].run(model, inputs)
    assert relative_error(got.cpu(), expected.cpu()) > 2e-2
    hfpatch.restore(model)
    check(model, inputs, got)


def test_failure_unpacks(monkeypatch: pytest.MonkeyPatch) -> None:
    from hfpatch import swap

    model, inputs, expected = build()
    calls = []
    original = swap._remember

    def fail(slot: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("injected")
        return original(slot)

    monkeypatch.setattr(swap, "_remember", fail)
    with pytest.raises(hfpatch.errors.PatchError, match="put back"):
        hfpatch.apply(model)
    assert len(storages(model)) == 3
    check(model, inputs, expected)


# Every family ------------------------------------------------------------------------------------


def check_family(root: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups share storage and are one product each; no memory is gained, but for what blocks
    of a step share; restore undoes it."""
    groups = groups_of(root)
    values = {k: v.clone() for k, v in root.state_dict().items()}
    expected = run()
    held = allocated()
    hfpatch.apply(root)
    for _ in range(2):
        run()
    groups += captured_groups_of(root)
    assert all(share_storage(g) for g in groups)
    assert allocated() <= held + (1 << 17)
    with one_product(monkeypatch) as seen:
        got = run()
    assert all(seen.get(id(g[0])) for g in groups)
    assert relative_error(got.cpu(), expected.cpu()) < 2e-2
    hfpatch.restore(root)
    assert not any(share_storage(g) for g in groups)
    assert all(torch.equal(v, values[k]) for k, v in root.state_dict().items())


@pytest.mark.parametrize("name", [n for n in ROWS if not n.startswith("resnet")])
def test_every_single_stream_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = build_block(ROWS[name], torch.bfloat16).cuda()
    given = moved(call_of(ROWS[name], dtype=torch.bfloat16, shape=(2, 64)), "cuda")
    check_family(root, lambda: flat(root.block(**given)), monkeypatch)


@pytest.mark.parametrize("row", test_joint_blocks.ROWS, ids=lambda row: row.zoo)
def test_every_joint_family(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = test_joint_blocks.build(row, torch.bfloat16)
    model, inputs = model.cuda(), moved(inputs, "cuda")
    check_family(model, lambda: zoo.ENTRIES[row.zoo].run(model, inputs), monkeypatch)
