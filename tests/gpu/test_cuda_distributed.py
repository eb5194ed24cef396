"""Two GPUs: sharded models over NCCL, kernels on the second device, a model over both.

The sharded cases are those that tests/sharding runs on the CPU: tests/sharded_cases.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sharded
import sharded_cases
import torch
import zoo
from accelerate import dispatch_model
from expect import expected_swaps, relative_error
from support.nearness import assert_as_near
from support.samples import SEEDS, Sample, draws_and_like, moved
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
    there, draws = torch.device("cuda", 1), []
    count, like = draws_and_like(name, dtype)
    for seed in range(SEEDS):
        with torch.cuda.device(0):
            sample = Sample(zoo.ENTRIES[name], dtype, seed, count // SEEDS, device=there)
            model = sample.model
            report = hfpatch.apply(model)
            assert {s.path: s.op for s in report.swaps} == expected_swaps(model)
            draws += sample.draws()
            patched = sample.entry.run(model, sample.inputs[0])
            assert torch.cuda.current_device() == 0
            assert patched.device == there
            hfpatch.restore(model)
            # cuBLAS may pick another algorithm on a second call
            again = sample.entry.run(model, sample.inputs[0])
            torch.testing.assert_close(again, sample.originals[0])
    assert_as_near(draws, dtype, name, like)


@pytest.mark.parametrize("name", MODELS)
def test_a_side_stream_of_the_second_device(name: str) -> None:
    """The result is there as soon as the side stream is done: nothing ran on another one."""
    entry = zoo.ENTRIES[name]
    there = torch.device("cuda", 1)
    model = entry.build(torch.bfloat16).to(there)
    inputs = moved(entry.inputs(model, torch.bfloat16), there)
    hfpatch.apply(model)
    entry.run(model, inputs)  # captures blocks, and answers as their leaves do
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


@pytest.mark.parametrize("name", ["llama", "t5-v1.1", "flux", "wan"])
def test_device_map_auto(name: str, tmp_path: Path) -> None:
    """`from_pretrained(device_map="auto")` with room for two thirds of the model on each GPU."""
    entry = zoo.ENTRIES[name]
    source = entry.build()
    room = sum(p.nbytes for p in source.parameters()) * 2 // 3
    source.save_pretrained(tmp_path)

    def load() -> nn.Module:
        model: nn.Module = type(source).from_pretrained(
            tmp_path, device_map="auto", max_memory={0: room, 1: 2 * room}
        )
        return model.eval()

    inputs = {
        k: v.to("cuda:0") if isinstance(v, torch.Tensor) else v
        for k, v in entry.inputs(source).items()
    }
    plain, model = load(), load()
    assert {p.device.index for p in model.parameters()} == {0, 1}
    expected = entry.run(plain, inputs)
    assert hfpatch.apply(model).swaps
    for _ in range(2):
        got = entry.run(model, inputs)
        assert got.device == expected.device
        assert relative_error(got.cpu(), expected.cpu()) < 2e-5
    hfpatch.restore(model)
    torch.testing.assert_close(entry.run(model, inputs), expected)


@pytest.mark.parametrize("order", ["patch first", "wrap first"])
@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_data_parallel(name: str, mode: str, order: str) -> None:
    """`nn.DataParallel`, which `Trainer` takes on two GPUs without a launcher: its copies of the
    modules for the second GPU must compute with their own parameters."""
    entry = zoo.ENTRIES[name]
    inputs = {
        k: v.to("cuda:0") if isinstance(v, torch.Tensor) else v
        for k, v in entry.inputs(None).items()
    }
    if name == "llama":
        inputs["use_cache"] = False  # a cache cannot be gathered
    plain, model = (entry.build().to("cuda:0").requires_grad_(True) for _ in range(2))
    if order == "patch first":
        hfpatch.apply(model, mode=mode)
    wrapped = nn.DataParallel(model, [0, 1])
    if order == "wrap first":
        hfpatch.apply(wrapped, mode=mode)
    assert hfpatch.status(model).swaps
    ours, theirs = entry.output(wrapped(**inputs)), entry.output(plain(**inputs))
    assert relative_error(ours.detach().cpu(), theirs.detach().cpu()) < 2e-5
    ours.square().mean().backward()
    theirs.square().mean().backward()
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    idle = got.keys() - expected.keys()  # DataParallel gives those zeros: a pooler's
    assert expected.keys() <= got.keys() and not any(got[n].any() for n in idle)
    error = sum((got[n] - g).square().sum() for n, g in expected.items())
    assert error.sqrt() < 1e-4 * sum(g.square().sum() for g in expected.values()).sqrt()
    hfpatch.restore(wrapped)
    assert not hfpatch.status(model).swaps
    with torch.no_grad():
        assert relative_error(entry.output(wrapped(**inputs)).cpu(), theirs.detach().cpu()) < 2e-5
