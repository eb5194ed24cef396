"""Adapters of the well-known packages, against stand-ins of ours: PyTorch functions and layers with
the names and signatures of the published ones, which this machine cannot run."""

from __future__ import annotations

import inspect
import json
import shutil
import tracemalloc
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from packages import package
from server import HubServer, Status
from torch import nn
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm

import hfpatch
from hfpatch import cli
from hfpatch.errors import KernelLoadError
from hfpatch.hub import HubOptions
from hfpatch.hub.adapters import ADAPTERS, adapter_for, repos_for
from hfpatch.hub.adapters.base import Need, borrow, only, params_of
from hfpatch.hub.download import download
from hfpatch.hub.inspection import inspect_hub, inspect_local
from hfpatch.hub.kernel import hub_kernel
from hfpatch.hub.spec import HubSpec
from hfpatch.hub.standing import Finding
from hfpatch.ops import OPS

ACTIVATION = """
import torch.nn.functional as F

def silu(out, x): return out.copy_(F.silu(x))
def gelu(out, x): return out.copy_(F.gelu(x))
def gelu_tanh(out, x): return out.copy_(F.gelu(x, approximate="tanh"))
def gelu_quick(out, x): return out.copy_(x * (1.702 * x).sigmoid())
def silu_and_mul(out, x):
    a, b = x.chunk(2, -1)
    return out.copy_(F.silu(a) * b)
def mul_and_silu(out, x):
    a, b = x.chunk(2, -1)
    return out.copy_(a * F.silu(b))
def gelu_and_mul(out, x):
    a, b = x.chunk(2, -1)
    return out.copy_(F.gelu(a) * b)
def gelu_tanh_and_mul(out, x):
    a, b = x.chunk(2, -1)
    return out.copy_(F.gelu(a, approximate="tanh") * b)
"""
_NORM = """
import torch
def _rms(x, w, eps):
    y = x.float()
    return w * (y * (y.pow(2).mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
"""
RMSNORM = (
    _NORM
    + """
def apply_rms_norm(input, weight, eps): return _rms(input, weight, eps)
"""
)
LAYER_NORM = (
    _NORM
    + """
def dropout_add_ln_fwd(input, gamma, beta, rowscale, colscale, x0_subset, z_subset, dropout_p,
                       epsilon, rowscale_const, z_numrows, gen, residual_in_fp32, is_rms_norm):
    assert input.dim() == 2 and dropout_p == 0 and rowscale_const == 1
    if is_rms_norm:
        return [_rms(input, gamma, epsilon)]
    return [torch.nn.functional.layer_norm(input, gamma.shape, gamma, beta, epsilon)]
"""
)
FLASH_ATTN_OPS = (
    _NORM
    + """
def rms_norm_fn(x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-6,
                dropout_p=0.0, rowscale=None, prenorm=False, residual_in_fp32=False,
                zero_centered_weight=False):
    total = x if residual is None else x + residual
    y = _rms(total, weight + 1 if zero_centered_weight else weight, eps)
    return (y, total) if prenorm else y
def layer_norm_fn(x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-6,
                  dropout_p=0.0, rowscale=None, prenorm=False):
    total = x if residual is None else x + residual
    y = torch.nn.functional.layer_norm(total, weight.shape, weight, bias, eps)
    return (y, total) if prenorm else y
"""
)
_ROPE = """
def _turn(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
"""
LIGER = (
    "import torch\nfrom . import layers\n"
    + _ROPE
    + """
def liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q.copy_(_turn(q, cos, sin)), k.copy_(_turn(k, cos, sin))
"""
)
LIGER_LAYERS = (
    _NORM
    + """
from torch import nn
class LigerRMSNorm(nn.Module):
    def forward(self, hidden_states): return _rms(hidden_states, self.weight, self.variance_epsilon)
class LigerSwiGLUMLP(nn.Module):
    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
class LigerGEGLUMLP(nn.Module):
    def forward(self, x):
        gate = nn.functional.gelu(self.gate_proj(x), approximate="tanh")
        return self.down_proj(gate * self.up_proj(x))
"""
)
ROTARY = (
    "import torch\n"
    + _ROPE
    + """
def apply_rotary_transformers(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _turn(q, cos, sin), _turn(k, cos, sin)
"""
)
STAND_INS: dict[str, tuple[str, dict[str, str]]] = {
    "activation": (ACTIVATION, {}),
    "rmsnorm": (RMSNORM, {}),
    "layer-norm": (LAYER_NORM, {}),
    "flash-attn-ops": (FLASH_ATTN_OPS, {}),
    "liger-kernels": (LIGER, {"layers.py": LIGER_LAYERS}),
    "rotary": (ROTARY, {}),
}


def publish(hub: HubServer, name: str) -> str:
    """A fork of a well-known package; its spec."""
    source, more = STAND_INS[name]
    hub.trust("fork")
    hub.put(f"fork/{name}-x", package(source, name=name, more=more))
    return f"fork/{name}-x@v1"


def inputs(op: str) -> tuple[tuple[torch.Tensor, ...], dict[str, object]]:
    """Tensors for an op's reference, and parameters that every adapter takes."""
    torch.manual_seed(0)
    x, w, b = torch.randn(3, 5, 64), torch.rand(64), torch.rand(64)
    cos, sin = torch.randn(1, 6, 32), torch.randn(1, 6, 32)
    q, k = torch.randn(2, 4, 6, 64), torch.randn(2, 2, 6, 64)
    table = {
        "silu": ((x,), {}),
        "gelu": ((x,), {"approximate": "tanh"}),
        "gated": ((x, x + 1), {"activation": "silu"}),
        "gated_packed": ((x,), {"activation": "silu", "gate_first": False}),
        "rms_norm": ((x, w, None), {"eps": 1e-5, "cast": "input"}),
        "layer_norm": ((x, w, b), {"eps": 1e-5}),
        "add_rms_norm": ((x, x + 1, w, None), {"eps": 1e-5, "cast": "input"}),
        "add_layer_norm": ((x, x + 1, w, b), {"eps": 1e-5}),
        "rope_qk": (
            (q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)),
            {"seq_dim": 2, "interleaved": False, "rotary_dim": 0},
        ),
    }
    return table[op]  # type: ignore[return-value]


ROWS = [(a.package, row) for a in ADAPTERS for row in a.rows]


@pytest.mark.parametrize(("name", "row"), ROWS, ids=[f"{n}-{r.op}" for n, r in ROWS])
def test_every_row_computes_its_op(name: str, row: object, hub: HubServer) -> None:
    """Values, shapes, inputs left alone, and the signature of the reference."""
    op: str = row.op  # type: ignore[attr-defined]
    kernel = hub_kernel(op, publish(hub, name), HubOptions())
    tensors, params = inputs(op)
    assert kernel.accepts is not None and kernel.accepts(params) is None
    reference = OPS[op].reference
    assert tuple(inspect.signature(kernel.fn).parameters) == tuple(
        inspect.signature(reference).parameters
    )
    before = [None if t is None else t.clone() for t in tensors]
    torch.testing.assert_close(kernel.fn(*tensors, **params), reference(*tensors, **params))
    for old, new in zip(before, tensors, strict=True):
        assert old is None or torch.equal(old, new), "it wrote to its input"
    strided = tuple(t if t is None or t.dim() != 3 else t.mT.contiguous().mT for t in tensors)
    torch.testing.assert_close(kernel.fn(*strided, **params), reference(*strided, **params))


def test_every_adapter_is_well_formed() -> None:
    assert len({a.package for a in ADAPTERS}) == len(ADAPTERS)
    for adapter in ADAPTERS:
        assert adapter_for(adapter.package) is adapter
        assert bool(adapter.rows) != bool(adapter.route), "it serves ops, or says who uses it"
        assert adapter.rows == () or adapter.package in STAND_INS
        for text in (*adapter.route_needs, *(n for row in adapter.rows for n in row.needs)):
            assert str(Need.parse(text)) == text
        assert all(row.op in OPS for row in adapter.rows)
        assert all(adapter.spec in repos_for(row.op) for row in adapter.rows)
    assert repos_for("norm_modulate") == ()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_parameters_that_an_adapter_does_not_take(activation: str, hub: HubServer) -> None:
    kernel = hub_kernel("gated_packed", publish(hub, "activation"), HubOptions())
    assert kernel.accepts is not None
    x = torch.randn(2, 16)
    for gate_first in (True, False):
        params = {"activation": activation, "gate_first": gate_first}
        if kernel.accepts(params) is None:
            expected = OPS["gated_packed"].reference(x, activation, gate_first)
            torch.testing.assert_close(kernel.fn(x, **params), expected)
        else:
            assert (activation, gate_first) not in {("silu", True), ("silu", False), ("gelu", True)}


def test_models_take_them(hub: HubServer) -> None:
    """A Llama's parts, each from another project; what none takes stays, with the reason."""
    config = LlamaConfig(hidden_size=64, intermediate_size=96)
    model = nn.Sequential(LlamaRMSNorm(64), LlamaMLP(config), nn.GELU(), nn.LayerNorm(64))
    model = model.eval().requires_grad_(False)
    x = torch.randn(2, 3, 64)
    expected = model(x)
    kernels = {
        "rms_norm": publish(hub, "rmsnorm"),
        "gated": publish(hub, "liger-kernels"),
        "gelu": publish(hub, "activation"),
        "layer_norm": publish(hub, "layer-norm"),
    }
    report = hfpatch.apply(model, kernels=kernels)
    assert {s.op: s.source for s in report.swaps} == kernels
    torch.testing.assert_close(model(x), expected)
    hfpatch.restore(model)
    mlp = nn.Sequential(
        LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=96, hidden_act="relu"))
    )
    (skip,) = hfpatch.apply(mlp.requires_grad_(False), kernels=kernels, include="LlamaMLP").skips
    assert (
        skip.kind == "unsupported" and "takes `activation` 'silu', 'gelu_tanh' only" in skip.reason
    )


def test_a_package_that_changed_is_refused(hub: HubServer) -> None:
    hub.trust("fork")
    hub.put("fork/a", package("def silu(x, out): return x\n", name="activation"))
    with pytest.raises(KernelLoadError, match=r"has `silu\(x, out\)`, expected `silu\(out, x\)`"):
        hub_kernel("silu", "fork/a@v1", HubOptions())
    with pytest.raises(KernelLoadError, match="has no `gelu`: hfpatch's adapter for `gelu` was"):
        hub_kernel("gelu", "fork/a@v1", HubOptions())
    with pytest.raises(KernelLoadError, match="serves no `layer_norm`; it serves `silu`, `gelu`"):
        hub_kernel("layer_norm", "fork/a@v1", HubOptions())
    hub.put("fork/b", package("", name="flash-attn3"))
    with pytest.raises(
        KernelLoadError, match="serves no op of hfpatch; it is used by transformers"
    ):
        hub_kernel("silu", "fork/b@v1", HubOptions())


def test_helpers() -> None:
    assert only(a=(1, 2))({"a": 2, "b": 9}) is None
    assert only(a=(1, 2))({"a": 3}) == "takes `a` 1, 2 only, this is 3"
    with pytest.raises(ValueError, match="is not of the form"):
        Need.parse("silu")
    assert params_of(torch, "no.such.thing") is None
    assert params_of(nn, "SiLU") == ("input",)
    assert borrow(nn.Linear, weight=torch.eye(3), bias=None)(torch.ones(2, 3)).sum() == 6


# ------------------------------------------------------------------------------ inspect


def test_inspect_runs_nothing(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither trust nor a build for this system is needed, and no code of it runs."""
    deadly = "raise SystemExit('it was imported')\n"
    source = deadly + "from .impl import silu\n"
    source += "def rms_norm_fast(x, w): pass\ndef _hidden(): pass\n"
    layers = deadly + "import torch\nclass Norm(torch.nn.Module):\n"
    layers += "    def forward(self, hidden_states): pass\n"
    more = {"impl.py": deadly + "def silu(x): pass\n", "layers.py": layers}
    hub.put("nobody/k", package(source, variant="torch-xpu", more=more), branch="v3")
    hub.put("nobody/k", package(source, variant="torch-xpu", more=more), branch="v12")
    found = inspect_hub("nobody/k")
    assert found.source == "nobody/k@v12"
    assert found.functions == {"silu": ("x",), "rms_norm_fast": ("x", "w")}
    assert found.layers == {"Norm": ("hidden_states",)}
    assert [(s.op, s.problem) for s in found.ops] == [("silu", "")]
    assert found.candidates == {"rms_norm": ("rms_norm_fast",)}
    ((variant, why),) = found.variants
    assert variant == "torch-xpu" and "does not match system backend" in why
    assert cli.main(["inspect", "nobody/k@v3"]) == 0
    text = capsys.readouterr().out
    assert "publisher: `nobody` is not trusted by the Hub; to load it: `--trust-kernel" in text
    assert "signature: not signed" in text
    assert "silu: served by `silu`" in text and "rms_norm: perhaps rms_norm_fast; wrap it" in text
    assert cli.main(["inspect", "nobody/k", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["name"] == "toy"
    assert told["publisher"]["answer"] is told["signature"]["answer"] is False


@pytest.mark.parametrize("below", ["", "toy/"])
@pytest.mark.parametrize("form", ["[{}]", "({})", "names()", "[]"])
def test_inspect_shows_what_a_package_exports(form: str, below: str, tmp_path: Path) -> None:
    """What `__all__` names, where it is a list; else all that is not private. Also where the
    package lies in a folder of its name, and where a module only passes a layer on."""
    source = "from .impl import silu, Norm\ndef other(x): pass\ndef _inner(x, y): pass\n"
    source += "__all__ = " + form.format("'silu', '_inner'") + "\n"
    impl = "def silu(x): pass\nclass Norm:\n    def forward(self, hidden_states): pass\n"
    more = {"impl.py": impl, "layers.py": "from .impl import Norm as Layer\n"}
    for path, data in package(source, more=more).items():
        where = path.replace("torch-cpu/", f"torch-cpu/{below}") if path.endswith(".py") else path
        (tmp_path / where).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / where).write_bytes(data)
    found = inspect_local(tmp_path)
    second = {"other": ("x",)} if form == "names()" else {"_inner": ("x", "y")}
    assert found.functions == ({} if form == "[]" else {"silu": ("x",), **second})
    assert found.layers == {"Layer": ("hidden_states",)}


@pytest.mark.parametrize("name", ["__init__.py", "inner.py", "metadata.json", "lib.so"])
def test_inspect_does_not_hold_a_large_file(name: str, tmp_path: Path) -> None:
    """Of 2 GiB that lie in a file: none of it is needed to refuse it, or to leave it alone."""
    for path, data in package("from .inner import silu\n", more={"inner.py": ""}).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    folder = tmp_path / "build" / "torch-cpu"
    inspect_local(tmp_path)  # what it imports is no part of what it takes
    large = folder / name
    with large.open("ab") as file:
        file.truncate(2 << 30)  # sparse
    tracemalloc.start()
    try:
        if name == "lib.so":
            inspect_local(tmp_path)
        else:
            with pytest.raises(KernelLoadError, match="larger than"):
                inspect_local(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_inspect_does_not_hold_many_files(tmp_path: Path) -> None:
    """Each is small enough, all of them are not."""
    names = [f"m{i}" for i in range(64)]
    source = "".join(f"from .{n} import f{n}\n" for n in names)
    more = {f"{n}.py": f"def f{n}(x): pass\n#" + "x" * (500 << 10) for n in names}
    for path, data in package(source, more=more).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    more.clear()
    tracemalloc.start()
    try:
        with pytest.raises(KernelLoadError, match="bytes of Python"):
            inspect_local(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_inspect_says_who_vouches_for_a_kernel(
    toy: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = inspect_hub("toy/kernel")
    assert found.publisher == Finding(True, "`toy` is trusted by the Hub")
    assert found.signature == Finding(False, "not signed")
    toy.put("toy/kernel", package() | {"build/torch-cpu/metadata.json.sigstore": b"{}"}, "v2")
    assert inspect_hub("toy/kernel").signature.words.startswith("not valid: the signature of")
    toy.fail("GET", "/overview", Status(403))
    unsaid = inspect_hub(HubSpec.parse("toy/kernel@v1")).publisher
    assert unsaid.answer is None and "the Hub does not say whether `toy` is trusted" in unsaid.words
    toy.heal()
    download(HubSpec.parse("toy/kernel@v1"), HubOptions())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    told = inspect_hub("toy/kernel").publisher
    assert told.answer is True and "`toy` was trusted by the Hub on 20" in told.words
    assert inspect_hub("toy/kernel").signature == Finding(False, "not signed")
    shutil.rmtree(tmp_path / "state")
    unknown = inspect_hub("toy/kernel").publisher
    assert unknown.answer is None and "was never asked here" in unknown.words


def test_inspect_of_a_known_package_and_of_our_own(
    hub: HubServer, kernels_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(hub, "activation")
    served = inspect_hub("fork/activation-x").ops
    assert [(s.op, s.problem) for s in served] == [("silu", ""), ("gelu", ""), ("gated_packed", "")]
    hub.put("fork/flash", package("def flash_attn_func(q, k, v): pass\n", name="flash-attn2"))
    assert "set_attn_implementation" in str(inspect_hub("fork/flash"))
    assert "this one has no `flash_attn_varlen_func`" in str(inspect_hub("fork/flash"))
    ours = inspect_local(kernels_dir)
    assert ours.publisher.answer is ours.signature.answer is None
    assert {s.op for s in ours.ops} == set(OPS)
    assert cli.main(["inspect", str(kernels_dir)]) == 0
    assert "rms_norm: served by `rms_norm`" in capsys.readouterr().out


def test_inspect_of_what_is_not_there(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.put("nobody/empty", {"README.md": b""}, branch="v1")
    hub.put("nobody/unversioned", package(), branch="main")
    for name, reason in (
        ("nobody/absent", "Repository nobody/absent not found"),
        ("nobody/empty", "could not be inspected"),
        ("nobody/unversioned", "has no version branch"),
        (str(tmp_path), "holds no `build/<variant>/`"),
        ("nonsense", "is not a Hub kernel"),
    ):
        assert cli.main(["inspect", name]) == (2 if name == "nonsense" else 1)
        assert reason in capsys.readouterr().err
