"""Beside `kernels.kernelize` and transformers' `use_kernels`: before, after, with our layers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import kernels
import pytest
import torch
import zoo
from kernels import LayerRepository, LocalLayerRepository, Mode, use_kernel_mapping
from kernels.layer.layer import _CACHED_LAYER, _validate_layer
from packages import build_files
from server import HubServer, python_path
from torch import nn
from transformers import activations
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hfpatch


def llama() -> nn.Module:
    model: nn.Module = zoo.ENTRIES["llama"].build(torch.float32)
    return model.eval().requires_grad_(False)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(torch.arange(10).reshape(1, 10)).logits
    return output


def norms(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, LlamaRMSNorm)]


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kernelize` knows LlamaRMSNorm as "RMSNorm", as transformers declares it where it takes the
    installed version of `kernels`."""
    monkeypatch.setattr(LlamaRMSNorm, "kernel_layer_name", "RMSNorm", raising=False)


@pytest.fixture
def local(kernels_dir: Path, kernels_module: ModuleType) -> dict[str, dict[str, object]]:
    """A mapping of `kernels` to our own build."""
    repo = LocalLayerRepository(kernels_dir, layer_name="LlamaRMSNorm")
    return {"RMSNorm": {"cpu": repo}}


def kernelize(model: nn.Module, mapping: dict[str, dict[str, object]]) -> None:
    with use_kernel_mapping(mapping, inherit_mapping=False):  # type: ignore[arg-type]
        kernels.kernelize(model, mode=Mode.INFERENCE, device="cpu")


def test_kernelized_before(local: dict[str, dict[str, object]]) -> None:
    model = llama()
    expected = logits(model)
    kernelize(model, local)
    forwards = {n: model.get_submodule(n).__dict__["forward"] for n in norms(model)}
    report = hfpatch.apply(model)
    foreign = {s.path: s.reason for s in report.skips if s.kind == "foreign"}
    assert set(foreign) == set(norms(model))
    assert all("gave it `LlamaRMSNorm` of `hfpatch-kernels`" in r for r in foreign.values())
    assert {s.op for s in report.swaps} == {"gated"}
    (note,) = report.notes
    assert f"{len(foreign)} of its modules keep those kernels" in note
    torch.testing.assert_close(logits(model), expected)
    hfpatch.restore(model)
    assert {n: model.get_submodule(n).__dict__["forward"] for n in norms(model)} == forwards


def test_kernelized_before_without_a_kernel(kernels_module: ModuleType) -> None:
    """`kernelize` writes the class's own forward to what it has no kernel for: ours to swap."""
    model = llama()
    kernelize(model, {})
    held = {n: model.get_submodule(n).__dict__["forward"] for n in norms(model)}
    report = hfpatch.apply(model)
    assert {s.path for s in report.swaps} >= set(norms(model)) and not report.notes
    hfpatch.restore(model)
    assert {n: model.get_submodule(n).__dict__["forward"] for n in norms(model)} == held


@pytest.mark.parametrize("empty", [False, True])
def test_kernelized_after(local: dict[str, dict[str, object]], empty: bool) -> None:
    """It writes over our swaps, also where it has nothing to put there: said, and swapped again."""
    model = llama()
    expected = logits(model)
    swapped = {s.path for s in hfpatch.apply(model).swaps}
    kernelize(model, {} if empty else local)
    status = hfpatch.status(model)
    lost = {s.path for s in status.skips if "written over" in s.reason}
    assert lost == set(norms(model)) and {s.path for s in status.swaps} == swapped - lost
    assert all("call `hfpatch.apply` again" in s.reason for s in status.skips if s.path in lost)
    torch.testing.assert_close(logits(model), expected)
    report = hfpatch.apply(model)
    # decoding steps read the norms' own formula
    assert {s.path for s in report.swaps} == (swapped if empty else swapped - lost - {""})
    assert not [s for s in hfpatch.status(model).skips if "written over" in s.reason]
    torch.testing.assert_close(logits(model), expected)
    hfpatch.restore(model)
    torch.testing.assert_close(logits(model), expected)


def test_a_part_that_was_restored_was_not_written_over(kernels_module: ModuleType) -> None:
    model = llama()
    hfpatch.apply(model)
    assert hfpatch.restore(model.model.layers[0]) > 0  # type: ignore[union-attr, index]
    assert not [s for s in hfpatch.status(model).skips if s.kind == "foreign"]


USE_KERNELS = """
import sys
import transformers.utils, transformers.utils.import_utils as bounds
# transformers 5.23 asks for kernels 0.18, which the package index does not have yet
bounds.is_kernels_available = transformers.utils.is_kernels_available = lambda *_, **__: True
from transformers.utils import kernel_config
kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES += ["cpu"]  # it lists accelerators only
import kernels, torch, hfpatch
from transformers import KernelConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
torch.manual_seed(0)
config = LlamaConfig(vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                     num_attention_heads=4)
model = LlamaForCausalLM(config).eval().requires_grad_(False)
ids = torch.arange(10).reshape(1, 10)
expected = model(ids).logits
mapping = {"RMSNorm": f"{sys.argv[1]}:LlamaRMSNorm"}
model.set_use_kernels(True, KernelConfig(mapping, use_local_kernel=True))
own = kernels.get_local_kernel(__import__("pathlib").Path(sys.argv[1])).layers.LlamaRMSNorm.forward
norms = [n for n, m in model.named_modules() if isinstance(m, LlamaRMSNorm)]
assert norms and all(model.get_submodule(n).forward.__func__ is own for n in norms)
torch.testing.assert_close(model(ids).logits, expected)
report = hfpatch.apply(model)
assert "`use_kernels=True`" in report.notes[0], report
assert {s.path for s in report.skips if s.kind == "foreign"} == set(norms), report
assert {s.op for s in report.swaps} == {"gated"}
torch.testing.assert_close(model(ids).logits, expected)

# patched first, kernelized afterwards, and again by each change of the mode
model = LlamaForCausalLM(config).eval().requires_grad_(False)
expected = model(ids).logits
swapped = {s.path for s in hfpatch.apply(model).swaps}
model.set_use_kernels(True, KernelConfig({}))
hfpatch.apply(model)
before = {s.path for s in hfpatch.status(model).swaps}
assert before == swapped, (before, swapped)
model.train(); model.eval()
lost = {s.path for s in hfpatch.status(model).skips if "written over" in s.reason}
assert lost == set(norms), lost
assert {s.path for s in hfpatch.apply(model).swaps} == swapped
torch.testing.assert_close(model(ids).logits, expected)
"""


@pytest.mark.slow
def test_use_kernels(kernels_dir: Path, tmp_path: Path) -> None:
    """transformers' KernelConfig takes our layers; `train()` kernelizes again, which is said."""
    env = os.environ | {
        "PYTHONPATH": python_path(),
        "HF_HUB_OFFLINE": "1",
        "HFPATCH_CONFIG": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", USE_KERNELS, str(kernels_dir)],
        env=env, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_our_published_layers_by_layer_repository(hub: HubServer, kernels_dir: Path) -> None:
    hub.trust("me")
    hub.put("me/hfpatch-kernels", build_files(kernels_dir))
    model = llama()
    expected = logits(model)
    repo = LayerRepository("me/hfpatch-kernels", layer_name="LlamaRMSNorm", version=1)
    try:
        kernelize(model, {"RMSNorm": {"cpu": repo}})
    finally:
        _CACHED_LAYER.pop(repo, None)
    torch.testing.assert_close(logits(model), expected)
    reason = next(s.reason for s in hfpatch.apply(model).skips if s.kind == "foreign")
    assert "gave it `LlamaRMSNorm` of `me/hfpatch-kernels`" in reason


class Packed(nn.Module):
    """What the gated layers stand in for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return nn.functional.silu(first) * second


#: Layer to a module of the class that adopts it.
ADOPTERS = {
    "LlamaRMSNorm": lambda: LlamaRMSNorm(64),
    "GemmaRMSNorm": lambda: GemmaRMSNorm(64),
    "LayerNorm": lambda: nn.LayerNorm(64),
    "GELU": lambda: nn.GELU(approximate="tanh"),
    "QuickGELU": activations.QuickGELUActivation,
    "SiLU": activations.SiLUActivation,
    "SiluAndMul": Packed,
    "GeluAndMul": Packed,
    "GeluTanhAndMul": Packed,
}


def test_our_layers_are_pure_and_compute_what_their_adopters_do(kernels_module: ModuleType) -> None:
    """`kernels` refuses a layer with a constructor, members, or another signature."""
    layers = kernels_module.layers
    assert set(ADOPTERS) == set(layers.__all__)
    x = torch.randn(3, 64)
    for name, make in ADOPTERS.items():
        module, layer = make(), getattr(layers, name)
        _validate_layer(check_cls=type(module), cls=layer, repo=name)  # type: ignore[arg-type]
        if name.startswith("Gelu"):
            approximate = "tanh" if "Tanh" in name else "none"
            first, second = x.chunk(2, dim=-1)
            expected = nn.functional.gelu(first, approximate=approximate) * second
        else:
            expected = module(x)
        torch.testing.assert_close(layer.forward(module, x), expected)
