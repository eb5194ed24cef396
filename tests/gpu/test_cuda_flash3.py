"""FlashAttention-3 in fused blocks: its numbers, who chooses it, graphs, streams, models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import hfpatch
from hfpatch.blocks import flash3
from hfpatch.blocks.attention import fastest
from hfpatch.graphs import recording as graphs

pytestmark = pytest.mark.gpu


class Calls:
    """Attention that FlashAttention-3 computed; its proofs are not among it."""

    def __init__(self) -> None:
        self.count = 0

    def take(self) -> int:
        """How many since the last time."""
        count, self.count = self.count, 0
        return count


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    seen, compute = Calls(), flash3.attention

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.count += 1
        return compute(q, k, v)

    monkeypatch.setattr(flash3, "attention", attention)
    return seen


@pytest.fixture(autouse=True)
def _usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must be there, on its GPU; each test proves it anew."""
    monkeypatch.delenv("HFPATCH_ATTENTION", raising=False)
    why = flash3.describe().get("problem")
    if why is None and torch.cuda.get_device_capability() != flash3.CAPABILITY:
        why = "the current GPU has not compute capability 9.0"
    if why is not None:
        pytest.skip(f"FlashAttention-3: {why}")
    monkeypatch.setattr(flash3, "_proofs", {})


@pytest.fixture
def any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """No work is too small for it."""
    monkeypatch.setattr(flash3, "LARGE", 0.0)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


#: A layer of LTX-Video at 49 frames: 1.2e11 FLOP.
LTX = (2, 2688, 32, 64)


def large() -> tuple[Tensor, Tensor, Tensor]:
    return draw(*LTX), draw(*LTX), draw(*LTX)


def relative(out: Tensor, truth: Tensor) -> float:
    return ((out.double() - truth).norm() / truth.norm()).item()


def truth_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In fp64."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    weights = torch.softmax(q @ k.transpose(2, 3) * q.shape[-1] ** -0.5, -1)
    return (weights @ v).transpose(1, 2)


def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def tensors(layout: str, shape: tuple[int, int, int, int], keys: int, dtype: torch.dtype) -> Any:
    batch, length, heads, dim = shape
    if layout == "packed":  # q apart, k and v views of one product
        kv = draw(batch, keys, 2, heads, dim, dtype=dtype)
        return draw(*shape, dtype=dtype), kv[:, :, 0], kv[:, :, 1]
    if layout == "all packed":
        qkv = draw(batch, max(length, keys), 3, heads, dim, dtype=dtype)
        return qkv[:, :length, 0], qkv[:, :keys, 1], qkv[:, :keys, 2]
    if layout == "heads first":
        return [
            draw(batch, heads, n, dim, dtype=dtype).transpose(1, 2) for n in (length, keys, keys)
        ]
    return [draw(batch, n, heads, dim, dtype=dtype) for n in (length, keys, keys)]


@pytest.mark.usefixtures("any_work")
@pytest.mark.filterwarnings("ignore:hfpatch. FlashAttention-3:RuntimeWarning")  # no fp16 in a build
@pytest.mark.parametrize("layout", ["apart", "packed", "all packed", "heads first"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "keys"),
    [
        ((1, 1, 1, 64), 1),
        ((2, 13, 3, 64), 77),
        ((1, 4250, 2, 128), 4250),
        ((2, 2688, 2, 64), 2688),
        ((1, 333, 3, 128), 4099),
        ((3, 1024, 2, 72), 1000),
        ((1, 500, 2, 256), 500),
    ],
)
def test_numbers(
    layout: str, dtype: torch.dtype, shape: tuple[int, int, int, int], keys: int, calls: Calls
) -> None:
    q, k, v = tensors(layout, shape, keys, dtype)
    before = [t.clone() for t in (q, k, v)]
    truth = truth_of(q, k, v)
    out = fastest(q, k, v, None)
    if calls.take() == 0:  # a build without this dtype or head dim
        assert flash3._proofs[q.device, dtype, shape[-1]] is not None
        assert dtype != torch.bfloat16 or shape[-1] not in (64, 128)
    limit = 1.25 * relative(torchs(q, k, v), truth) + torch.finfo(dtype).eps
    assert relative(out, truth) <= limit
    assert out.shape == q.shape and out.dtype == dtype
    assert torch.equal(fastest(q, k, v, None), out)  # the same bits at every call
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True))


def test_bf16_at_the_models_head_dims_is_proven(calls: Calls) -> None:
    for dim in (64, 128):
        q = draw(1, 4608, 24, dim)
        fastest(q, q, q, None)
    assert calls.take() == 2
    device = q.device
    assert flash3._proofs == {(device, torch.bfloat16, d): None for d in (64, 128)}
    assert len(flash3.in_use()) == 2


def test_small_work_is_pytorchs(calls: Calls) -> None:
    q = draw(2, 4096, 10, 64)
    fastest(q, q, q, None)
    assert calls.take() == 0 and not flash3._proofs


def test_the_proof_draws_no_random_numbers(calls: Calls) -> None:
    q, k, v = large()
    states = torch.random.get_rng_state(), torch.cuda.get_rng_state()
    fastest(q, k, v, None)
    assert calls.take() == 1
    after = torch.random.get_rng_state(), torch.cuda.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(states, after, strict=True))


@pytest.mark.usefixtures("any_work")
def test_misaligned_views_are_pytorchs() -> None:
    """The kernel does not look at it itself."""
    q = draw(2, 64, 2, 72)[..., 4:68]  # begins 8 bytes after a multiple of 16
    k = v = draw(2, 64, 2, 68)[..., :64]  # rows of 136 bytes
    aligned = [t.contiguous() for t in (q, k, v)]
    assert flash3.serves(*aligned)
    for mixed in ((q, *aligned[1:]), (aligned[0], k, aligned[2]), (*aligned[:2], v)):
        assert not flash3.serves(*mixed)


# ------------------------------------------------------------------------------ whose choice


def test_gradients_are_not_its(calls: Calls) -> None:
    q, k, v = large()
    q.requires_grad_()
    assert not flash3.serves(q, k, v)
    with torch.no_grad():
        fastest(q, k, v, None)
    with torch.inference_mode():
        fastest(*large(), None)
    assert calls.take() == 2


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"])
def test_pytorchs_own_choice_holds(backend: str, calls: Calls) -> None:
    q, k, v = large()
    with sdpa_kernel(getattr(SDPBackend, backend)):
        got = fastest(q, k, v, None)
    assert calls.take() == 0
    torch.testing.assert_close(got, fastest(q, k, v, None), rtol=2e-2, atol=2e-2)
    assert calls.take() == 1


def test_the_switch_holds(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = large()
    monkeypatch.setenv("HFPATCH_ATTENTION", "torch")
    fastest(q, k, v, None)
    assert calls.take() == 0 and not flash3._proofs
    assert flash3.describe()["problem"] == "switched off by HFPATCH_ATTENTION"


# ------------------------------------------------------------------------------ graphs, streams


def captured(q: Tensor, k: Tensor, v: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fastest(q, k, v, None)
    return graph, out


def test_a_graph_gives_the_bits_of_a_call_without_one(calls: Calls) -> None:
    q, k, v = large()
    expected = fastest(q, k, v, None)
    graph, out = captured(q, k, v)
    assert calls.take() == 2
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
        q.copy_(q.roll(1, 1))
        expected = fastest(q, k, v, None)
    graph.replay()
    assert torch.equal(out, expected)


def test_a_capture_proves_nothing(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = large()
    monkeypatch.setenv("HFPATCH_ATTENTION", "torch")
    expected = fastest(q, k, v, None)  # cuDNN's plan cannot be made in a capture
    monkeypatch.delenv("HFPATCH_ATTENTION")
    graph, out = captured(q, k, v)
    assert calls.take() == 0 and not flash3._proofs
    graph.replay()
    assert torch.equal(out, expected)


def test_another_stream(calls: Calls) -> None:
    """What it reads was written on that stream just before, and what it writes is read there."""
    q, k, v = large()
    fastest(q, k, v, None)
    expected = fastest(q * 0.5, k, v, None) * 2
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            half = q * 0.5
            out = fastest(half, k, v, None) * 2
        stream.synchronize()
        assert torch.equal(out, expected)
    assert calls.take() == 12


def test_the_first_call_on_another_stream(calls: Calls) -> None:
    """With its proof."""
    q, k, v = large()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = fastest(q, k, v, None)
    stream.synchronize()
    assert calls.take() == 1
    assert torch.equal(out, fastest(q, k, v, None))


# ------------------------------------------------------------------------------ models


def ltx(layers: int) -> tuple[Any, dict[str, Any]]:
    """LTX-Video of full width at 49 frames, fewer layers."""
    from diffusers import LTXVideoTransformer3DModel

    with torch.device("cuda"):
        model = LTXVideoTransformer3DModel(num_layers=layers).to(torch.bfloat16).eval()
    frames, height, width = 7, 16, 24
    inputs = {
        "hidden_states": draw(2, frames * height * width, 128),
        "encoder_hidden_states": draw(2, 128, 4096),
        "timestep": torch.tensor([500, 500], device="cuda"),
        "encoder_attention_mask": torch.ones(2, 128, device="cuda", dtype=torch.bfloat16),
        "num_frames": frames,
        "height": height,
        "width": width,
        "rope_interpolation_scale": (8 / 25, 32, 32),
        "return_dict": False,
    }
    return model.requires_grad_(False), inputs


@pytest.mark.usefixtures("kernels_module")
class TestModel:
    def test_blocks_use_it_and_status_says_so(
        self, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, inputs = ltx(2)
        original = model(**inputs)[0]
        hfpatch.apply(model)
        assert calls.take() == 0
        patched = model(**inputs)[0]
        assert calls.take() == 2  # of each block; attention to the text is too little work
        (note,) = (n for n in hfpatch.status(model).notes if n.startswith("attention:"))
        package = flash3.find()
        assert package is not None
        assert note.startswith(f"attention: FlashAttention-3 (`{package.name}`) for bfloat16")
        monkeypatch.setenv("HFPATCH_ATTENTION", "torch")
        without = model(**inputs)[0]
        assert calls.take() == 0
        for out in (patched, without):
            assert relative(out, original.double()) < 2e-2
        assert not torch.equal(patched, without)

    def test_one_kernel_instead_of_another(self) -> None:
        model, inputs = ltx(1)
        hfpatch.apply(model)
        model(**inputs)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            model(**inputs)
            torch.cuda.synchronize()
        events = [e for e in profile.key_averages() if e.device_type.name == "CUDA"]
        found = {e.key: e.count for e in events if "flash::" in e.key and "Sm90" in e.key}
        assert sum(found.values()) == 1, [e.key for e in events]

    def test_cuda_graphs(self, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
        model, inputs = ltx(2)
        hfpatch.apply(model)
        eager = model(**inputs)[0]
        assert calls.take() == 2
        hfpatch.apply(model, cuda_graphs=True)
        results = [model(**inputs)[0] for _ in range(4)]
        # a call as it is, then the rehearsal and the recording; from then on replays
        assert calls.take() == 2 + 4
        assert len(graphs._graphs[model].recorded) == 1, hfpatch.status(model)
        assert torch.equal(results[0], eager)
        assert torch.equal(results[2], results[3])
        # cuBLAS may pick another algorithm for another workspace
        assert relative(results[3], eager.double()) < 2e-2
        monkeypatch.setenv("HFPATCH_ATTENTION", "torch")  # a call of another kind
        for _ in range(3):
            model(**inputs)
        assert calls.take() == 0
        assert len(graphs._graphs[model].recorded) == 2

    def test_a_backend_of_diffusers_holds(self, calls: Calls) -> None:
        from diffusers.models.attention_dispatch import attention_backend

        model, inputs = ltx(1)
        hfpatch.apply(model)
        expected = model(**inputs)[0]
        assert calls.take() == 1
        with attention_backend("_native_efficient"):
            out = model(**inputs)[0]
        assert calls.take() == 0
        assert relative(out, expected.double()) < 2e-2

    def test_a_compiled_model_does_without(self, calls: Calls) -> None:
        model, inputs = ltx(1)
        original = model(**inputs)[0]
        hfpatch.apply(model)
        compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
        out = compiled(**inputs)[0]
        assert calls.take() == 0
        assert relative(out, original.double()) < 2e-2
        torch._dynamo.reset()
