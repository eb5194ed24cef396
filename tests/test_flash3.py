"""When fused blocks use FlashAttention-3: its rules, on a CPU, with operators in its place."""

from __future__ import annotations

import json
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import hfpatch
from hfpatch import attention, cli
from hfpatch.blocks import flash3
from hfpatch.blocks.attention import fastest
from hfpatch.graphs import recording as graphs

SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(out!)? out=None, "
    "float? softmax_scale=None, bool is_causal=False, int num_splits=0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2).float() for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class Fake:
    """Packages of the kind that `flash3.PACKAGES` names, and what their operators were called
    with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []  # what came after q, k, v
        self.compute: Callable[[Tensor, Tensor, Tensor], Tensor] = exact
        self._patch = monkeypatch
        self._libraries: list[torch.library.Library] = []

    def install(self, distribution: str, folder: str, schema: str | None = SCHEMA) -> None:
        """With None for the schema, the module is there and its operator is not."""
        self._patch.setitem(flash3.PACKAGES, distribution, folder)
        self._patch.setitem(sys.modules, folder, ModuleType(folder))
        self._patch.setitem(sys.modules, f"{folder}._C", ModuleType(f"{folder}._C"))
        if schema is not None:
            library = torch.library.Library(folder, "FRAGMENT")
            library.define(f"fwd{schema}")
            library.impl("fwd", self._run, "CPU")
            self._libraries.append(library)
        flash3.find.cache_clear()

    def _run(self, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Any:
        self.calls.append(args)
        out = self.compute(q, k, v).to(q.dtype).contiguous()
        return out, out.new_empty(0), out.new_empty(0), out.new_empty(0)

    def close(self) -> None:
        for library in self._libraries:
            library._destroy()


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """No package is installed, no work is too small, and the CPU passes for the right GPU."""
    fake = Fake(monkeypatch)
    monkeypatch.setattr(flash3, "PACKAGES", {})
    monkeypatch.setattr(flash3, "_proofs", {})
    monkeypatch.setattr(flash3, "_forms", {})
    monkeypatch.setattr(attention, "_kernels", {})
    monkeypatch.setattr(flash3, "LARGE", 0.0)
    monkeypatch.setattr(flash3, "_capability", lambda device: flash3.CAPABILITY)
    monkeypatch.delenv("HFPATCH_ATTENTION", raising=False)
    flash3.find.cache_clear()
    yield fake
    fake.close()
    flash3.find.cache_clear()


@pytest.fixture
def fake(nothing: Fake) -> Fake:
    nothing.install("fake-fa3", "hfpatch_fake_fa3")
    return nothing


def qkv(dtype: torch.dtype = torch.bfloat16, dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """q, and k and v as views of a packed product."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 24, 3, dim, generator=generator).to(dtype)
    packed = torch.randn(2, 40, 3, 2, 3, dim, generator=generator).to(dtype)[:, :, 1]
    return q, packed[:, :, 0], packed[:, :, 1]


def used(fake: Fake, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> bool:
    """Whether attention runs on the operator; a proof is not counted. The result is right."""
    before = len(fake.calls)
    proofs = len(flash3._proofs)
    out = fastest(q, k, v, mask)
    expected = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=mask
    ).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    return len(fake.calls) - before - (len(flash3._proofs) - proofs) > 0


# ------------------------------------------------------------------------------ selection


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_computes_attention(fake: Fake, dtype: torch.dtype) -> None:
    for _ in range(2):
        assert used(fake, *qkv(dtype))
    one_split = (None, None, None, False, 1)  # all else is as the operator has it
    assert fake.calls == [one_split] * 3  # the proof, and the two
    assert fastest(*qkv(dtype), None).is_contiguous()


@pytest.mark.parametrize(
    ("shape", "keys", "large"),
    [
        ((2, 2688, 32, 64), 2688, True),  # LTX-Video
        ((1, 4608, 24, 128), 4608, True),  # FLUX.1
        ((1, 20280, 12, 128), 20280, True),  # Wan 2.1
        ((1, 20280, 12, 128), 512, False),  # Wan 2.1 and its text
        ((2, 8064, 32, 64), 128, False),  # LTX-Video and its text
        ((2, 4096, 10, 64), 4096, False),  # SDXL
        ((2, 1024, 20, 64), 1024, False),
    ],
)
def test_work_that_pays(shape: tuple[int, ...], keys: int, large: bool) -> None:
    q = torch.empty(shape, device="meta")
    k = torch.empty(shape[0], keys, *shape[2:], device="meta")
    assert flash3._pays(q, k) is large


def test_small_work_finds_no_package(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash3, "LARGE", 1e11)
    assert not used(fake, *qkv())
    assert not flash3._proofs and not fake.calls


def test_what_the_kernel_does_not_take(fake: Fake) -> None:
    q, k, v = qkv()
    assert not used(fake, q, k, v, torch.ones(24, 40, dtype=torch.bool))
    assert not used(fake, *(t.float() for t in (q, k, v)))
    assert not used(fake, *qkv(dim=12))
    assert not used(fake, *qkv(dim=264))
    flat = torch.zeros(q.numel() + 8, dtype=q.dtype)
    late = flat[1 : 1 + q.numel()].view(q.shape)  # not at a multiple of 16 bytes
    assert not used(fake, late, k, v)
    odd = torch.zeros(2, 24, 3, 20, dtype=q.dtype)[..., :16]  # rows of 40 bytes
    assert not used(fake, odd, k, v)
    assert not used(fake, q.transpose(2, 3).contiguous().transpose(2, 3), k, v)
    assert not used(fake, q[:, :1].expand(2, 24, 3, 16), k, v)
    assert not used(fake, q, k, v[..., :8])
    assert used(fake, q.transpose(1, 2).contiguous().transpose(1, 2), k, v)
    # PyTorch's own errors
    with pytest.raises(RuntimeError):
        fastest(q, k[:, :, :1].expand(2, 40, 2, 16), v[:, :, :2], None)
    with pytest.raises(RuntimeError, match="dtype"):
        fastest(q, k.half(), v.half(), None)


def test_autograd_does_not_meet_it(fake: Fake) -> None:
    for i in range(3):
        tensors = [t.clone() for t in qkv()]
        tensors[i].requires_grad_()
        assert not used(fake, *tensors)
        fastest(*tensors, None).float().square().sum().backward()
        assert tensors[i].grad is not None
        with torch.no_grad():
            assert used(fake, *tensors)
        with torch.inference_mode():
            assert used(fake, *qkv())


def test_a_choice_of_the_users_holds(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    for backends in ([SDPBackend.MATH], [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        with sdpa_kernel(backends):
            assert not used(fake, *qkv())
    monkeypatch.setenv("HFPATCH_ATTENTION", "torch")
    assert not used(fake, *qkv())
    monkeypatch.setenv("HFPATCH_ATTENTION", "")
    assert used(fake, *qkv())


def test_a_choice_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFPATCH_ATTENTION", "flash")
    message = "HFPATCH_ATTENTION is 'flash'; expected `torch`, or nothing"
    with pytest.raises(ValueError, match=message):
        hfpatch.apply(torch.nn.Linear(2, 2))


def test_the_choice_is_part_of_a_graphs_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HFPATCH_ATTENTION", raising=False)
    before = graphs.global_state()
    monkeypatch.setenv("HFPATCH_ATTENTION", "torch")
    assert graphs.global_state() != before


def test_compiled_code_does_without(fake: Fake) -> None:
    """Without a break in the graph; compiled blocks are the originals and never come here."""

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash3.attention(q, k, v) if flash3.serves(q, k, v) else q * 2

    q, k, v = qkv()
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v), q * 2)
    assert not fake.calls
    assert not torch.equal(step(q, k, v), q * 2)


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_devices(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None
) -> None:
    monkeypatch.setattr(flash3, "_capability", lambda device: capability)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not used(fake, *qkv())
    assert not fake.calls


# ------------------------------------------------------------------------------ proof


def test_one_proof_for_a_device_dtype_and_head_dim(fake: Fake) -> None:
    state = torch.random.get_rng_state()
    for _ in range(2):
        for dtype, dim in ((torch.bfloat16, 16), (torch.bfloat16, 32), (torch.float16, 16)):
            fastest(*qkv(dtype, dim), None)
    assert len(flash3._proofs) == 3 and len(fake.calls) == 3 + 6
    assert torch.equal(torch.random.get_rng_state(), state)


def raises(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise RuntimeError("This flash attention build does not support FP16.\nmore")


def unscaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return exact(q * q.shape[-1] ** 0.5, k, v)


def last_key_missed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return exact(q, k[:, :-8], v[:, :-8])


def reads_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As if v began where k does."""
    return exact(q, k, k)


def nan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.full_like(q, torch.nan)


def other_shape(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return exact(q, k, v)[:, :, :1].repeat(1, 1, 3, 1)


@pytest.mark.parametrize(
    ("compute", "why"),
    [
        (raises, "RuntimeError: This flash attention build does not support FP16.$"),
        (unscaled, r"it is off by \d.\d\de[+-]\d\d, expected <= 7.81e-03$"),
        (last_key_missed, "it is off by"),
        (reads_packed, "it is off by"),
        (nan, "it is off by nan"),
        (other_shape, "RuntimeError: The size of tensor a"),
    ],
)
def test_what_is_wrong_is_not_used(
    fake: Fake, compute: Callable[[Tensor, Tensor, Tensor], Tensor], why: str
) -> None:
    fake.compute = compute
    message = (
        r"^hfpatch: FlashAttention-3 \(`fake-fa3`\) is not used for bfloat16 at head dim 16 on "
        f"cpu, PyTorch's attention is: {why}"
    )
    with pytest.warns(RuntimeWarning, match=message) as caught:
        assert not used(fake, *qkv())
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert not used(fake, *qkv())
    assert len(fake.calls) == 1
    fake.compute = exact
    assert used(fake, *qkv(dim=32))


def test_a_warning_that_is_an_error_is_raised_once(fake: Fake) -> None:
    fake.compute = nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning):
            fastest(*qkv(), None)
        assert not used(fake, *qkv())


def test_no_memory_for_the_proof(fake: Fake) -> None:
    def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("full")

    fake.compute = full
    out = fastest(*qkv(), None)
    assert len(fake.calls) == 1 and not flash3._proofs
    fake.compute = exact
    torch.testing.assert_close(out, fastest(*qkv(), None), rtol=2e-2, atol=2e-2)
    assert used(fake, *qkv())


def test_a_capture_proves_nothing(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash3, "_capturing", lambda device: True)
    assert not used(fake, *qkv())
    assert not fake.calls and not flash3._proofs
    monkeypatch.setattr(flash3, "_capturing", lambda device: False)
    assert used(fake, *qkv())
    monkeypatch.setattr(flash3, "_capturing", lambda device: True)
    assert used(fake, *qkv())  # what a call without a graph is


def test_threads_prove_once(fake: Fake) -> None:
    barrier = threading.Barrier(4)

    def run() -> None:
        barrier.wait()
        fastest(*qkv(), None)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake.calls) == 1 + 4


# ------------------------------------------------------------------------------ packages


def test_none_is_installed(nothing: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash3, "PACKAGES", {"no-fa3": "hfpatch_no_fa3"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not used(nothing, *qkv())
    assert flash3.find() is None
    assert flash3.describe() == {"problem": "not installed"}


def test_the_first_that_can_be_called(nothing: Fake) -> None:
    nothing.install("old-fa3", "hfpatch_old_fa3", "(Tensor q, Tensor k, Tensor v) -> Tensor")
    package = flash3.find()
    assert package is not None and package.name == "old-fa3"
    assert package.problem == "its operator has no argument `num_splits`"
    nothing.install("fake-fa3", "hfpatch_fake_fa3")
    package = flash3.find()
    assert package is not None and package.name == "fake-fa3" and package.problem is None
    assert used(nothing, *qkv())


OLD = "(Tensor q, Tensor k, Tensor v, float softmax_scale, int num_splits=0) -> Tensor"


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (OLD, "its operator needs q, k, v, softmax_scale; expected q, k, v alone"),
        (None, "AttributeError: '_OpNamespace' 'hfpatch_odd_fa3' object has no attribute 'fwd'"),
    ],
)
def test_an_operator_of_another_version(nothing: Fake, schema: str | None, why: str) -> None:
    nothing.install("odd-fa3", "hfpatch_odd_fa3", schema)
    assert flash3.describe() == {"package": "odd-fa3", "problem": why}
    with pytest.warns(RuntimeWarning, match=why):
        assert not used(nothing, *qkv())


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError])
def test_a_package_for_another_torch(
    nothing: Fake, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(name: str) -> None:
        raise error("libc10_cuda.so: cannot open shared object file\nmore")

    monkeypatch.setattr(flash3, "PACKAGES", {"torch": "hfpatch_broken_fa3"})
    monkeypatch.setattr(flash3, "import_module", fail)
    problem = f"{error.__name__}: libc10_cuda.so: cannot open shared object file"
    package = {"package": f"torch {torch.__version__}", "problem": problem}
    assert flash3.describe() == package
    with pytest.warns(RuntimeWarning, match=problem):
        assert not used(nothing, *qkv())


def test_a_module_that_its_import_lacks(nothing: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only of the package itself it means that it is not there."""

    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'einops'", name="einops")

    monkeypatch.setattr(flash3, "PACKAGES", {"lacking-fa3": "hfpatch_lacking_fa3"})
    monkeypatch.setattr(flash3, "import_module", fail)
    package = flash3.find()
    assert package is not None
    assert package.problem == "ModuleNotFoundError: No module named 'einops'"


# ------------------------------------------------------------------------------ what one sees


def test_env_says_what_is_there(
    nothing: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> str:
        assert cli.main(["env"]) == 0
        return capsys.readouterr().out.splitlines()[-1].split(None, 1)[1]

    assert said() == "FlashAttention-3: not installed"
    nothing.install("fake-fa3", "hfpatch_fake_fa3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert said() == "FlashAttention-3: fake-fa3; no GPU of compute capability 9.0"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: (8 + i, 0))
    assert flash3.describe() == {"package": "fake-fa3"}
    monkeypatch.setenv("HFPATCH_ATTENTION", "torch")
    assert flash3.describe()["problem"] == "switched off by HFPATCH_ATTENTION"
    monkeypatch.undo()
    assert cli.main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["FlashAttention-3"]


def test_status_says_what_it_computed(fake: Fake, kernels_module: ModuleType) -> None:
    import zoo

    model = zoo.ENTRIES["ltx"].build(torch.float32)
    hfpatch.apply(model)
    assert hfpatch.status(model).notes == ()
    fastest(*qkv(), None)
    note = "attention: FlashAttention-3 (`fake-fa3`) for bfloat16 at head dim 16 on cpu, from 0e+00"
    assert hfpatch.status(model).notes == (f"{note} FLOP up",)
    hfpatch.restore(model)
    assert hfpatch.status(model).notes == ()
