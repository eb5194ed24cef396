"""The rows of docs/compatibility.md that need a GPU: offloading with streams, real placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import zoo
from accelerate import cpu_offload, cpu_offload_with_hook, dispatch_model, infer_auto_device_map
from expect import relative_error
from torch import nn

import hfpatch

pytestmark = pytest.mark.gpu

#: fp32 through two layers, with reductions in another order.
NOISE = 1e-5
MODELS = ("ltx", "flux", "wan", "sd15-unet", "llama", "gemma3", "bamba", "t5-v1.1", "bert")


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compiled kernels must be there; products in true fp32, or TF32 hides everything."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    matmul = torch.backends.cuda.matmul  # its settings cannot be deleted, as monkeypatch would
    before, matmul.allow_tf32 = matmul.allow_tf32, False
    yield
    matmul.allow_tf32 = before


def group_offload(kind: str, **settings: object) -> Callable[[nn.Module], None]:
    def do(model: nn.Module) -> None:
        from diffusers.hooks import apply_group_offloading

        cuda, cpu = torch.device("cuda"), torch.device("cpu")
        apply_group_offloading(model, cuda, cpu, offload_type=kind, **settings)

    return do


def half_on_the_cpu(model: nn.Module) -> None:
    """What `device_map="auto"` does where the GPU has room for a part of the model."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    layers = sorted({type(layer).__name__ for m in lists for layer in m})
    size = sum(p.nbytes for p in model.parameters())
    device_map = infer_auto_device_map(model, {0: size * 2 // 3, "cpu": 4 * size}, layers)
    assert len(set(device_map.values())) == 2, device_map
    dispatch_model(model, device_map, main_device=0, force_hooks=True)


PLACEMENTS: dict[str, Callable[[nn.Module], object]] = {
    "model offload": lambda m: cpu_offload_with_hook(m, "cuda"),
    "sequential offload": lambda m: cpu_offload(m, "cuda", offload_buffers=True),
    "group offload, blocks": group_offload("block_level", num_blocks_per_group=1),
    "group offload, leaves": group_offload("leaf_level"),
    "group offload, blocks, streams": group_offload(
        "block_level", num_blocks_per_group=1, use_stream=True
    ),
    "group offload, leaves, streams": group_offload("leaf_level", use_stream=True),
    "group offload, streams and recorded": group_offload(
        "leaf_level", use_stream=True, record_stream=True
    ),
}


def unpatched(
    entry: zoo.Entry, place: Callable[[nn.Module], object], inputs: dict[str, object]
) -> torch.Tensor:
    """The output of the model that was placed and is not patched; skips where that fails."""
    model = entry.build(torch.float32)
    try:
        place(model)
        return entry.run(model, inputs)
    except Exception as e:  # the library's own limits are not what is tested
        pytest.skip(f"this placement fails for the unpatched model: {type(e).__name__}: {e}")


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("order", ["done before apply", "done after apply"])
@pytest.mark.parametrize("name", MODELS)
def test_placement_in_either_order(name: str, order: str, placement: str) -> None:
    """Called three times: the second is prefetched, and streams show their races from then on."""
    entry = zoo.ENTRIES[name]

    def inputs() -> dict[str, object]:
        given = entry.inputs(None)
        return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in given.items()}

    expected = unpatched(entry, PLACEMENTS[placement], inputs())
    model = entry.build(torch.float32)
    if order == "done before apply":
        PLACEMENTS[placement](model)
        hfpatch.apply(model)
    else:
        hfpatch.apply(model)
        PLACEMENTS[placement](model)
    assert hfpatch.status(model).swaps
    for _ in range(3):
        assert relative_error(entry.run(model, inputs()), expected) <= NOISE
    hfpatch.restore(model)
    assert not hfpatch.status(model).swaps
    # cuBLAS may pick another algorithm on a second call; the module code is the very same
    torch.testing.assert_close(entry.run(model, inputs()), expected)


@pytest.mark.parametrize("order", ["done before apply", "done after apply"])
@pytest.mark.parametrize("name", ["flux", "sd15-unet", "llama", "bert"])
def test_layers_on_two_devices(name: str, order: str) -> None:
    entry = zoo.ENTRIES[name]
    given = entry.inputs(None)
    inputs = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    expected = unpatched(entry, half_on_the_cpu, inputs)
    model = entry.build(torch.float32)
    if order == "done before apply":
        half_on_the_cpu(model)
        hfpatch.apply(model)
    else:
        hfpatch.apply(model)
        half_on_the_cpu(model)
    assert relative_error(entry.run(model, inputs), expected) <= NOISE
    hfpatch.restore(model)
    torch.testing.assert_close(entry.run(model, inputs), expected)


def test_every_kernel_runs_on_the_stream_of_the_caller() -> None:
    entry = zoo.ENTRIES["llama"]
    model = entry.build(torch.float32).cuda()
    inputs = {
        k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in entry.inputs(None).items()
    }
    hfpatch.apply(model)
    entry.run(model, inputs)  # captured blocks are the original's in their first call
    expected = entry.run(model, inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # a kernel on another stream would overtake this
        got = entry.run(model, inputs)
    stream.synchronize()
    assert torch.equal(got, expected)
