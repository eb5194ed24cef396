"""`hfpatch.apply` on models that live on, or are offloaded to and from, a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import zoo
from expect import assert_same_dicts, expected_swaps, relative_error, snapshot
from support.nearness import assert_as_near
from support.samples import SEEDS, Sample, draws_and_like, moved

import hfpatch

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernels must be there; convolutions in true fp32, or TF32 hides everything."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(zoo.ENTRIES))
def test_numbers_and_restore(name: str, dtype: torch.dtype) -> None:
    count, like = draws_and_like(name, dtype)
    draws = []
    for seed in range(SEEDS):
        sample = Sample(zoo.ENTRIES[name], dtype, seed, count // SEEDS, device="cuda")
        model = sample.model
        before = snapshot(model)
        report = hfpatch.apply(model)
        assert {s.path: s.op for s in report.swaps} == expected_swaps(model)
        kernels = [s for s in report.swaps if s.op != "recall"]
        assert all(s.source == "local" and s.devices == ("cuda",) for s in kernels)
        draws += sample.draws()
        hfpatch.restore(model)
        assert_same_dicts(before, model)
        # cuBLAS may pick another algorithm on a second call; the module code is the very same
        again = sample.entry.run(model, sample.inputs[0])
        torch.testing.assert_close(again, sample.originals[0])
    assert_as_near(draws, dtype, name, like)


def test_patched_on_the_cpu_then_moved() -> None:
    entry = zoo.ENTRIES["llama"]
    model = entry.build(torch.bfloat16)
    inputs = entry.inputs(model, torch.bfloat16)
    report = hfpatch.apply(model)
    assert {s.devices for s in report.swaps} == {("cpu",)}
    model, inputs = model.cuda(), moved(inputs, "cuda")
    names = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        patched = entry.run(model, inputs)
    names = [e.key for e in profile.key_averages()]
    assert any("rms_norm" in n for n in names), names  # the kernel ran, proven at the first call
    hfpatch.restore(model)
    torch.testing.assert_close(patched, entry.run(model, inputs), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("order", ["patch first", "offload first"])
@pytest.mark.parametrize("method", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_offloaded_pipeline(method: str, order: str) -> None:
    entry = zoo.PIPELINES["ltx-pipeline"]
    plain = entry.build(torch.float32)
    inputs = entry.inputs(plain, torch.float32)
    given = moved(inputs, "cuda")
    expected = entry.run(plain.to("cuda"), given)
    pipe = entry.build(torch.float32)
    if order == "offload first":
        getattr(pipe, method)()
    parts = [m for m in pipe.components.values() if isinstance(m, torch.nn.Module)]
    swapped = sum(len(expected_swaps(m)) for m in parts)
    assert len(hfpatch.apply(pipe).swaps) == swapped
    if order == "patch first":
        getattr(pipe, method)()
    result = entry.run(pipe, given)
    assert relative_error(result.cpu(), expected.cpu()) < 1e-3
    hooked = [m for m in pipe.transformer.modules() if hasattr(m, "_hf_hook")]
    assert hooked
    weights = {p.device.type for p in pipe.transformer.parameters()}
    assert weights <= {"cpu", "meta", "cuda"}
    assert hfpatch.restore(pipe) == swapped
    assert not hfpatch.status(pipe).swaps
    again = entry.run(pipe, given)
    assert relative_error(again.cpu(), expected.cpu()) < 1e-3
    pipe.remove_all_hooks()


def test_device_map_dispatch() -> None:
    from accelerate import dispatch_model

    entry = zoo.ENTRIES["llama"]
    for first in (True, False):
        model = entry.build(torch.float32)
        inputs = entry.inputs(model, torch.float32)
        expected = entry.run(model, inputs)
        device_map = {
            "model.embed_tokens": "cpu",
            "model.layers.0": 0,
            "model.layers.1": "cpu",
            "model.norm": 0,
            "model.rotary_emb": 0,
            "lm_head": 0,
        }
        if first:
            hfpatch.apply(model, decoding=False)
        model = dispatch_model(model, device_map, main_device="cuda:0", force_hooks=True)
        if not first:
            hfpatch.apply(model, decoding=False)
        assert len(hfpatch.status(model).swaps) == len(expected_swaps(model))
        assert relative_error(entry.run(model, inputs).cpu(), expected) < 1e-4
        assert hfpatch.restore(model) == len(expected_swaps(model))
        assert relative_error(entry.run(model, inputs).cpu(), expected) < 1e-4


def test_compiled_patched_model_is_inductors() -> None:
    entry = zoo.ENTRIES["llama"]
    model = entry.build(torch.float32).cuda()
    inputs = moved(entry.inputs(model, torch.float32), "cuda")
    expected = entry.run(model, inputs)
    hfpatch.apply(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    assert relative_error(entry.run(compiled, inputs), expected) < 1e-5


def load_torch_libraries() -> None:
    """cuBLAS and attention read their kernels from disk at the first call, for longer than `apply`
    takes; where this is a machine's first test, nothing else has made that call."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.randn(64, 64, device="cuda", dtype=dtype)
        F.linear(x @ x, x, x[0])
    q = torch.randn(1, 32, 64, 64, device="cuda", dtype=torch.bfloat16)
    for mask in (None, q.new_zeros(64, 64)):
        F.scaled_dot_product_attention(q, q, q, mask)
    torch.cuda.synchronize()


@pytest.mark.alone
def test_apply_is_quick_on_the_full_ltx_transformer() -> None:
    from diffusers import LTXVideoTransformer3DModel

    with torch.device("cuda"):
        model = LTXVideoTransformer3DModel().to(torch.bfloat16)
    hfpatch.plan(torch.nn.Sequential(torch.nn.LayerNorm(8)).cuda())  # loads the library
    load_torch_libraries()
    from hfpatch.proof.proofs import forget_proofs

    forget_proofs()
    report = hfpatch.apply(model)
    assert len(report.swaps) == len(expected_swaps(model))
    assert report.plan.seconds < 1.0
