"""`hfpatch.capi`: arrays of NumPy and tensors of other frameworks through the C library."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import c_api
import numpy as np
import pytest
import torch

from hfpatch import capi

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")


@pytest.fixture(scope="module")
def path() -> Path:
    found = c_api.built_library()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def library(path: Path) -> capi.Library:
    return capi.Library(path)


def test_numpy(library: capi.Library) -> None:
    x = np.random.default_rng(0).standard_normal((4, 6, 33)).astype(np.float32)
    weight = np.linspace(0.5, 2, 33, dtype=np.float32)
    out = np.empty((2, 6, 33), np.float32)
    library.rms_norm(out, x[::2], weight, None, 1e-6, 0.0, capi.HFP_CAST_NONE)
    wide = x[::2].astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_torch_by_dlpack(library: capi.Library, dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 40, dtype=dtype).transpose(0, 1)
    out = torch.empty(x.shape, dtype=dtype)
    library.gelu(out, x, capi.HFP_ACT_GELU_ERF)
    expected = torch.nn.functional.gelu(x.double())
    atol = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)


class _Bfloat16:
    """An array of ml_dtypes: NumPy knows its type by its size alone."""

    def __init__(self, bits: np.ndarray) -> None:
        self.dtype = type("dtype", (), {"name": "bfloat16"})
        self.__array_interface__ = {**bits.__array_interface__, "typestr": "<V2"}


def test_bfloat16_of_ml_dtypes(library: capi.Library) -> None:
    x, out = torch.linspace(-3, 3, 17).bfloat16().reshape(1, 17), torch.empty(1, 17).bfloat16()
    bits = [t.view(torch.int16).numpy() for t in (out, x)]
    library.silu(*map(_Bfloat16, bits))
    torch.testing.assert_close(
        out.double(), torch.nn.functional.silu(x.double()), rtol=2**-8, atol=0
    )
    with pytest.raises(TypeError, match="`x` must hold numbers"):
        library.silu(bits[0], np.zeros((1, 17), "V2"))


def test_a_list_and_its_sizes(library: capi.Library) -> None:
    tensors = [np.full(5, 3, np.float32), torch.full((2, 2), 4.0)]
    norm, partials = np.empty(1, np.float32), np.empty(library.norm_partials(tensors), np.float32)
    library.grad_norm(norm, partials, tensors, capi.HFP_GRAD_NORM_L2)
    assert norm[0] == pytest.approx((5 * 9 + 4 * 16) ** 0.5)


def test_a_raw_dltensor(library: capi.Library) -> None:
    x, out = np.float32([1, 2, 3, 4]), np.zeros(4, np.float32)
    view = capi.dltensor(x.ctypes.data, [2], (2, 32), strides=[1])
    library.silu(out[:2], view)
    np.testing.assert_allclose(out, [0.7310586, 1.7615942, 0, 0], rtol=1e-6)


def test_errors_are_the_librarys(library: capi.Library) -> None:
    x = np.ones((2, 4), np.float32)
    with pytest.raises(capi.HfpatchError, match=r"^hfp_silu: `out` must have shape \[2, 4\]") as e:
        library.silu(np.empty(4, np.float32), x)
    assert e.value.status == capi.HFP_INVALID_ARGUMENT
    with pytest.raises(capi.HfpatchError, match="`x` must be a tensor, got NULL"):
        library.silu(x, None)
    with pytest.raises(
        capi.HfpatchError, match="must be float32, float16 or bfloat16, got float64"
    ):
        library.silu(x, x.astype(np.float64))


def test_what_c_cannot_be_given(library: capi.Library) -> None:
    x = np.ones(4, np.float32)
    frozen = x.copy()
    frozen.flags.writeable = False
    library.silu(x, frozen)
    with pytest.raises(ValueError, match="`out` must be writable, got a read-only array"):
        library.silu(frozen, x)
    with pytest.raises(TypeError, match=r"`x` must be a NumPy array, .* got list"):
        library.silu(x, [1.0])
    with pytest.raises(TypeError, match=r"`x` cannot be shared by `__dlpack__`"):
        library.silu(x, torch.ones(4, requires_grad=True))
    with pytest.raises(TypeError, match="`x` must hold numbers of this machine's byte order"):
        library.silu(x, x.astype(">f4"))
    with pytest.raises(ValueError, match="`k` must fit 64 bits, got 18446744073709551616"):
        library.topk(x, x, x, 2**64)
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        library.topk(x, x, x, 2.5)
    with pytest.raises(ValueError, match=r"`grads\[0\]` must be writable"):
        library.scale_grads([frozen], x[:1])


def test_another_version_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    source.write_text("int hfp_abi_version(void) { return 1; }")
    other = tmp_path / "other.so"
    subprocess.run(["g++", "-xc", "-shared", "-fPIC", source, "-o", other], check=True)
    with pytest.raises(capi.HfpatchError, match=r"must have the interface's version \d+, got 1"):
        capi.Library(other)


def test_an_older_library_lacks_a_function(tmp_path: Path) -> None:
    source = tmp_path / "older.c"
    source.write_text(f"int hfp_abi_version(void) {{ return {capi.ABI_VERSION}; }}")
    older = tmp_path / "older.so"
    subprocess.run(["g++", "-xc", "-shared", "-fPIC", source, "-o", older], check=True)
    x = np.ones(4, np.float32)
    with pytest.raises(capi.HfpatchError, match=r"hfp_silu: .* lacks this function"):
        capi.Library(older).silu(x, x)


def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFPATCH_LIBRARY", "/nonexistent/libhfpatch.so")
    with pytest.raises(OSError, match=r"/nonexistent/libhfpatch\.so.*`hfpatch clib DIR`"):
        capi.Library()


def test_the_folder_works_without_hfpatch_and_torch(tmp_path: Path, path: Path) -> None:
    shutil.copytree(ROOT / "hfpatch" / "capi", tmp_path / "hfpatch_capi")
    script = (
        "import sys; sys.modules['torch'] = sys.modules['hfpatch'] = None\n"
        "import array, hfpatch_capi as capi\n"
        "x, out = array.array('f', [1, 2, 3]), array.array('f', [0] * 3)\n"
        "at = lambda a: capi.dltensor(a.buffer_info()[0], [3], (2, 32))\n"
        "capi.Library(sys.argv[1]).silu(at(out), at(x))\n"
        "print([round(v, 4) for v in out])\n"
    )
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "[0.7311, 1.7616, 2.8577]\n", done.stderr
