"""Hooks of accelerate and diffusers, before and after apply. (On a GPU: tests/gpu.)"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
import zoo_models
from accelerate import cpu_offload, cpu_offload_with_hook, disk_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers.hooks import HookRegistry
from diffusers.hooks import ModelHook as DiffusersHook
from expect import assert_same_dicts, expected_swaps, relative_error, snapshot
from support.captured import ALL, captured
from torch import nn

import hfpatch
from hfpatch import swap
from hfpatch.errors import PatchError
from hfpatch.planning import sites
from hfpatch.regions.kind import runs_seen
from hfpatch.regions.offer import Mark, forget


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


class Counting(ModelHook):
    calls = 0

    def pre_forward(self, module: nn.Module, *args: object, **kwargs: object):  # type: ignore
        self.calls += 1
        return args, kwargs


def hook_every_module(model: nn.Module, directory: Path) -> Counting:
    """All but the activations inside gated MLPs: a hook there is a reason not to fuse over them."""
    hook = Counting()
    for path, module in model.named_modules():
        if not path.endswith("act_fn"):
            add_hook_to_module(module, hook)
    return hook


PLACEMENTS: dict[str, Callable[[nn.Module, Path], object]] = {
    "sequential offload": lambda m, d: cpu_offload(m, "cpu"),
    "model offload": lambda m, d: cpu_offload_with_hook(m, "cpu"),
    "disk offload": lambda m, d: disk_offload(m, str(d), "cpu"),
    "hooks everywhere": hook_every_module,
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("order", ["patch first", "hooks first"])
@pytest.mark.parametrize("name", ["llama", "ltx"])
def test_accelerate_hooks_in_either_order(
    name: str, order: str, placement: str, tmp_path: Path
) -> None:
    entry = zoo.ENTRIES[name]
    plain = entry.build(torch.float32)
    inputs = entry.inputs(plain, torch.float32)
    hfpatch.apply(plain)
    # the same kernels without hooks, on tensors aligned alike (files are mapped by pages, PyTorch
    # aligns what it allocates): must be equal bit for bit
    expected = entry.run(plain, inputs)
    hfpatch.restore(plain)
    original = entry.run(plain, inputs)

    model = entry.build(torch.float32)
    if order == "patch first":
        swaps = expected_swaps(model)
        hfpatch.apply(model)
        hook = PLACEMENTS[placement](model, tmp_path)
        hooked = None
    else:
        hook = PLACEMENTS[placement](model, tmp_path)
        hooked = snapshot(model)
        swaps = expected_swaps(model)
        hfpatch.apply(model)
    assert len(hfpatch.status(model).swaps) == len(swaps)
    if placement in ("sequential offload", "disk offload"):
        assert {p.device.type for p in model.parameters()} == {"meta"}
    got = entry.run(model, inputs)
    if name == "ltx":  # a fused block with hooks inside hands over to its parts: other roundings
        assert relative_error(got, expected) < 1e-6
    else:
        assert torch.equal(got, expected)
    if isinstance(hook, Counting):
        # every module that is called fires its hook, the patched ones too
        assert hook.calls >= len(swaps)

    assert hfpatch.restore(model) == len(swaps)
    if hooked is not None:
        assert_same_dicts(hooked, model, tensors=False)
    assert torch.equal(entry.run(model, inputs), original)
    if placement == "hooks everywhere":
        assert "_hf_hook" in model.get_submodule(next(iter(swaps))).__dict__


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("order", ["patch first", "hooks first"])
@pytest.mark.parametrize("name", ["sana", *(("ltx", "flux", "wan", "sd15-unet") if ALL else ())])
def test_captures_of_blocks_that_have_a_file(
    name: str, order: str, placement: str, tmp_path: Path
) -> None:
    entry = zoo.ENTRIES[name]
    model = entry.build(torch.float32)
    inputs = entry.inputs(model, torch.float32)
    original = entry.run(model, inputs)
    forget()
    with captured():
        for step in ("patch", "hooks") if order == "patch first" else ("hooks", "patch"):
            if step == "patch":
                hfpatch.apply(model)
            else:
                PLACEMENTS[placement](model, tmp_path)
        for _ in range(2):
            assert relative_error(entry.run(model, inputs), original) < 1e-5
        marks = [m for b in model.modules() if isinstance(m := _mark(b), Mark)]
        with runs_seen(m.kind for m in marks) as seen:  # type: ignore[attr-defined]
            assert relative_error(entry.run(model, inputs), original) < 1e-5
    # hooks on layers alone, which bring weights, and on the block let it run fused
    fused = {"model offload": True, "hooks everywhere": False}.get(placement)
    assert fused is None or bool(seen) is fused, (seen, marks)
    assert marks or order == "hooks first"
    hfpatch.restore(model)
    forget()
    assert torch.equal(entry.run(model, inputs), original)


def _mark(module: nn.Module) -> Any:
    swapped = swap.swapped(module)
    return None if swapped is None else swapped.details


def test_a_vae_under_sequential_offload() -> None:
    """Of a residual block only the norm that it calls has weights, so hooks inside let it be."""
    vae = zoo_models.ltx_vae().eval()
    cpu_offload(vae, "cpu", offload_buffers=bool(vae._parameters))
    x = torch.randn(1, 3, 9, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = vae.encode(x).latent_dist.mean
        swaps = {s.path: s.op for s in hfpatch.apply(vae).swaps}
        got = vae.encode(x).latent_dist.mean
    assert swaps == expected_swaps(vae)
    assert any(type(vae.get_submodule(p)).__name__ == "LTXVideoResnetBlock3d" for p in swaps)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", ["patch first", "hooks first"])
def test_removing_the_hooks_leaves_the_patch(order: str) -> None:
    entry = zoo.ENTRIES["llama"]
    model = entry.build(torch.float32)
    inputs = entry.inputs(model, torch.float32)
    original = entry.run(model, inputs)
    if order == "patch first":
        hfpatch.apply(model)
        hook_every_module(model, Path())
    else:
        hook_every_module(model, Path())
        hfpatch.apply(model)
    swapped = len(hfpatch.status(model).swaps)
    patched = entry.run(model, inputs)
    remove_hook_from_module(model, recurse=True)
    # with hooks inside, decoding steps are left alone
    expected = len(expected_swaps(model)) - (order == "hooks first")
    assert len(hfpatch.status(model).swaps) == expected and (
        order == "patch first" or swapped == expected
    )
    assert torch.equal(entry.run(model, inputs), patched)
    hfpatch.restore(model)
    assert torch.equal(entry.run(model, inputs), original)
    assert not hfpatch.status(model).swaps


def wrap_in_every_way(model: nn.Module) -> None:
    """All of these copy what they find on the forward to themselves."""
    norm, mlp = model.get_submodule("model.norm"), model.get_submodule("model.layers.0.mlp")
    for name in ("first", "second"):
        HookRegistry.check_if_exists_or_initialize(norm).register_hook(DiffusersHook(), name)
    for module in (norm, mlp, model):
        add_hook_to_module(module, ModelHook())
    held = mlp.forward

    @functools.wraps(held)
    def around(*args: object, **kwargs: object) -> object:
        return held(*args, **kwargs)

    mlp.forward = around
    model.kept_by_somebody = model.forward
    norm.kept_by_somebody = norm._old_forward


def notes_on_forwards(model: nn.Module) -> list[object]:
    """What wrappers say of what they wrap, and what they wrap, from the outside."""
    found: list[object] = []
    for path in ("", "model.norm", "model.layers.0.mlp"):
        module = model.get_submodule(path)
        wrapper = module.forward
        while wrapper is not None:
            function = getattr(wrapper, "__func__", wrapper)
            notes = {k: v for k, v in vars(function).items() if k != "__wrapped__"}
            names = [getattr(function, n, None) for n in functools.WRAPPER_ASSIGNMENTS]
            signature = str(inspect.signature(function))
            found.append((path, type(wrapper), notes, names, signature))
            wrapper = getattr(wrapper, "__wrapped__", None)
        kept = getattr(module, "kept_by_somebody", None)
        found.append(getattr(kept, "__func__", type(kept)))
    return found


def test_restore_leaves_nothing_on_wrappers_that_came_after_apply() -> None:
    entry = zoo.ENTRIES["llama"]
    untouched = entry.build(torch.float32)
    wrap_in_every_way(untouched)
    expected = notes_on_forwards(untouched)

    model = entry.build(torch.float32)
    inputs = entry.inputs(model, torch.float32)
    original = entry.run(model, inputs)
    hfpatch.apply(model)
    first = copy.deepcopy(model)  # has the same adapters
    wrap_in_every_way(model)
    second = copy.deepcopy(model)
    swaps = len(hfpatch.status(model).swaps)
    hfpatch.restore(model)
    assert notes_on_forwards(model) == expected
    assert torch.equal(entry.run(model, inputs), original)
    assert len(hfpatch.status(first).swaps) == swaps == hfpatch.restore(first)
    hfpatch.restore(second)
    # a function is not copied: what it wraps is the first model's
    assert notes_on_forwards(second) == expected


def test_a_failing_apply_leaves_wrappers_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.ENTRIES["llama"].build(torch.float32)
    hfpatch.apply(model)
    wrap_in_every_way(model)
    before = notes_on_forwards(model)

    def failing(*args: object) -> None:
        raise OSError("this failed")

    monkeypatch.setattr(swap, "_write", failing)
    with pytest.raises(PatchError, match="this failed"):
        hfpatch.apply(model, include="model.layers.1.*")
    assert notes_on_forwards(model) == before


@pytest.mark.parametrize(
    ("device", "expected"), [(0, "cuda"), ("cuda:1", "cuda"), (torch.device("cpu"), "cpu")]
)
def test_where_a_hook_moves_a_module(device: object, expected: str) -> None:
    """A number is a GPU's, also where none is, as of a plan for another machine."""
    module = nn.Linear(2, 2)
    assert sites.execution_device(module) is None
    hook: Any = ModelHook()
    hook.execution_device = device
    add_hook_to_module(module, hook)
    assert sites.execution_device(module) == expected
    add_hook_to_module(module, ModelHook(), append=True)
    assert sites.execution_device(module) == expected


class Doubling(DiffusersHook):
    """A diffusers hook that changes the output, so that losing it shows."""

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return output * 2


class Replacing(DiffusersHook):
    """One that wraps the forward itself, as layerwise casting and group offload do."""

    def new_forward(self, module: nn.Module, *args: object, **kwargs: object) -> torch.Tensor:
        return self.fn_ref.original_forward(*args, **kwargs) + 1


@pytest.mark.parametrize(
    "hooks", [(Doubling,), (Replacing,), (Doubling, Replacing), (Replacing, Doubling)]
)
@pytest.mark.parametrize("order", ["patch first", "hooks first"])
def test_diffusers_hooks_in_either_order(
    order: str, hooks: tuple[type[DiffusersHook], ...]
) -> None:
    model = nn.Sequential(nn.LayerNorm(64)).requires_grad_(False)
    x = torch.randn(3, 64)

    def register() -> None:
        registry = HookRegistry.check_if_exists_or_initialize(model[0])
        for i, hook in enumerate(hooks):
            registry.register_hook(hook(), f"hook {i}")

    expected = model(x)
    for hook in hooks:
        expected = expected * 2 if hook is Doubling else expected + 1
    if order == "patch first":
        hfpatch.apply(model)
        register()
    else:
        register()
        hfpatch.apply(model)
    assert len(hfpatch.status(model).swaps) == 1
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    assert hfpatch.restore(model) == 1
    torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-6)
    registry = model[0]._diffusers_hook
    for i in reversed(range(len(hooks))):
        registry.remove_hook(f"hook {i}", recurse=False)
    assert torch.equal(model(x), nn.functional.layer_norm(x, (64,), *model[0].parameters()))


def test_layerwise_casting_and_group_offload_of_a_transformer() -> None:
    from diffusers.hooks import apply_layerwise_casting

    entry = zoo.ENTRIES["ltx"]
    for order in ("patch first", "hooks first"):
        model = entry.build(torch.float32)
        inputs = entry.inputs(model, torch.float32)
        reference = entry.build(torch.float32)
        apply_layerwise_casting(reference, torch.bfloat16, torch.float32)
        expected = entry.run(reference, inputs)
        if order == "patch first":
            hfpatch.apply(model)
            apply_layerwise_casting(model, torch.bfloat16, torch.float32)
        else:
            apply_layerwise_casting(model, torch.bfloat16, torch.float32)
            hfpatch.apply(model)
        assert hfpatch.status(model).swaps
        torch.testing.assert_close(entry.run(model, inputs), expected, rtol=1e-4, atol=1e-4)
        hfpatch.restore(model)
        assert torch.equal(entry.run(model, inputs), expected)
