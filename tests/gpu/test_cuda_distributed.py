"""Two GPUs: sharded models over NCCL, kernels on the second device, a model over both.

The sharded cases are those that tests/sharding runs on the CPU: tests/sharded_cases.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sharded
import sharded_cases
import torch
import zoo
from accelerate import dispatch_model
from expect import expected_swaps, relative_error
from torch import nn

import hfpatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
assert sharded_cases.ORDERS  # the import filled sharded.CASES

#: Norms of each formula, activations, gated products, whole blocks, convolutions.
MODELS = ["llama", "gemma2", "t5-v1.1", "bert", "bamba", "ltx", "flux", "sd15-unet", "wan"]


@pytest.fixture(scope="module")
def ranks(kernels_dir: object) -> Iterator[sharded.Ranks]:
    pair = sharded.Ranks("cuda")
    yield pair
    pair.close()


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernels must be there; convolutions in true fp32, or TF32 hides everything."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("name", list(sharded.CASES))
def test_sharded(name: str, ranks: sharded.Ranks) -> None:
    if name.startswith("tp-auto") and (why := sharded_cases.no_auto_plan()) is not None:
        pytest.skip(why)
    ranks.run(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_model_on_the_second_device(name: str, dtype: torch.dtype) -> None:
    """A kernel launches on its tensor's device and stream, whatever the current device is."""
    entry = zoo.ENTRIES[name]
    model = entry.build(dtype)
    inputs = entry.inputs(model, dtype)
    truth = entry.reference(model, inputs)
    there = torch.device("cuda", 1)
    model.to(there)
    moved = {k: v.to(there) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    with torch.cuda.device(0):
        original = entry.run(model, moved)
        report = hfpatch.apply(model)
        assert {s.path: s.op for s in report.swaps} == expected_swaps(model)
        patched = entry.run(model, moved)
        torch.cuda.synchronize(there)
        assert torch.cuda.current_device() == 0
        assert patched.device == there
        error = relative_error(patched.cpu(), truth)
        limit = relative_error(original.cpu(), truth)
        assert error <= limit + torch.finfo(dtype).eps, (error, limit)
        hfpatch.restore(model)
        # cuBLAS may pick another algorithm on a second call
        torch.testing.assert_close(entry.run(model, moved), original)


@pytest.mark.parametrize("name", MODELS)
def test_a_side_stream_of_the_second_device(name: str) -> None:
    """The result is there as soon as the side stream is done: nothing ran on another one."""
    entry = zoo.ENTRIES[name]
    there = torch.device("cuda", 1)
    model = entry.build(torch.bfloat16).to(there)
    inputs = {
        k: v.to(there) if isinstance(v, torch.Tensor) else v
        for k, v in entry.inputs(model, torch.bfloat16).items()
    }
    hfpatch.apply(model)
    expected = entry.run(model, inputs)
    stream = torch.cuda.Stream(there)
    stream.wait_stream(torch.cuda.current_stream(there))
    with torch.cuda.device(0), torch.cuda.stream(stream):
        got = entry.run(model, inputs)
        stream.synchronize()
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("order", ["patch first", "dispatch first"])
def test_a_model_over_two_devices(order: str) -> None:
    entry = zoo.ENTRIES["llama"]

    def dispatched(model: nn.Module) -> nn.Module:
        device_map = {
            "model.embed_tokens": 0,
            "model.rotary_emb": 0,
            "model.layers.0": 0,
            "model.layers.1": 1,
            "model.norm": 1,
            "lm_head": 1,
        }
        return dispatch_model(model, device_map=device_map)

    plain = dispatched(entry.build())
    inputs = entry.inputs(plain)
    inputs["input_ids"] = inputs["input_ids"].to("cuda:0")
    expected = entry.run(plain, inputs)
    model = entry.build()
    if order == "dispatch first":
        dispatched(model)
    assert len(hfpatch.apply(model).swaps) == len(expected_swaps(model))
    if order == "patch first":
        dispatched(model)
    got = entry.run(model, inputs)
    assert got.device == expected.device
    assert relative_error(got.cpu(), expected.cpu()) < 2e-5
    hfpatch.restore(model)
    torch.testing.assert_close(entry.run(model, inputs), expected)
