"""Modules that kernels take over under autocast, and how they are compared with the unpatched."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, Phi3Config, T5Config
from transformers.activations import NewGELUActivation, QuickGELUActivation
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5DenseGatedActDense, T5LayerNorm

import hfpatch
from hfpatch.proof.proofs import forget_proofs

WIDTH = 64


def _diffusers(name: str, *args: Any, **kwargs: Any) -> nn.Module:
    from diffusers.models import activations, normalization

    module = normalization if hasattr(normalization, name) else activations
    made: nn.Module = getattr(module, name)(*args, **kwargs)
    return made


class GELUBehindALayer(nn.Module):
    """In operators of its own, where diffusers calls PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.proj(x)
        return 0.5 * h * (1 + torch.tanh(0.7978845608028654 * (h + 0.044715 * h * h * h)))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "LlamaRMSNorm": lambda: LlamaRMSNorm(WIDTH),
    "Qwen3RMSNorm": lambda: Qwen3RMSNorm(WIDTH),
    "GemmaRMSNorm": lambda: GemmaRMSNorm(WIDTH),
    "T5LayerNorm": lambda: T5LayerNorm(WIDTH),
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "LayerNorm without weights": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "diffusers RMSNorm": lambda: _diffusers("RMSNorm", WIDTH, 1e-6),
    "FP32LayerNorm": lambda: _diffusers("FP32LayerNorm", WIDTH),
    "NewGELUActivation": NewGELUActivation,
    "QuickGELUActivation": QuickGELUActivation,
    "GELU behind a layer": GELUBehindALayer,
    "LlamaMLP": lambda: LlamaMLP(LlamaConfig(hidden_size=WIDTH, intermediate_size=96)),
    "Phi3MLP": lambda: Phi3MLP(Phi3Config(hidden_size=WIDTH, intermediate_size=96)),
    "T5DenseGatedActDense": lambda: T5DenseGatedActDense(
        T5Config(d_model=WIDTH, d_ff=96, feed_forward_proj="gated-gelu", dropout_rate=0.0)
    ),
    "GEGLU": lambda: _diffusers("GEGLU", WIDTH, 96),
}
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Kernels(TorchDispatchMode):
    """Names of the operators that a call runs: of `hfpatch_kernels`, and those that cast."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in ("aten", "prim"):
            self.names.append(func._schema.name.split("::")[1])
        self.casts += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


#: Operators of modules here that autocast runs in fp32 on a GPU, and not on the CPU.
_IN_FP32 = ("layer_norm", "rms_norm", "pow.Tensor_Scalar", "rsqrt")


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Autocast of the CPU with these operators in fp32, so that it does what that of CUDA does."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def wide(value: Any) -> Any:
        half = isinstance(value, torch.Tensor) and value.dtype in HALVES
        return value.float() if half else value

    def in_fp32(operator: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return operator(*map(wide, args), **{k: wide(v) for k, v in kwargs.items()})

        return run

    forget_proofs()
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in _IN_FP32:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, in_fp32(operator), "AutocastCPU")
        yield
    forget_proofs()


@dataclass
class Pair:
    """A patched module, and the same one that is as it was."""

    patched: nn.Module
    plain: nn.Module

    @staticmethod
    def of(module: nn.Module, device: str = "cpu", **settings: Any) -> Pair:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + (p.dim() == 1))
        model = nn.Sequential(module.to(device))
        plain = copy.deepcopy(model)
        report = hfpatch.apply(model, **settings)
        assert report.swaps, report
        return Pair(model, plain)


def draw(dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    x = torch.randn(3, 7, WIDTH, generator=torch.Generator().manual_seed(1))
    return x.to(device, dtype)


def noise(*dtypes: torch.dtype) -> float:
    """A few roundings, relative: of the narrowest dtype, or a reduction in another order."""
    return max(4.0 * torch.finfo(t).eps for t in dtypes)


def off(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def call(
    module: nn.Module, x: torch.Tensor, autocast: torch.dtype, recorded: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The result under autocast and, if `recorded`, every gradient, computed outside of it."""
    x = x.clone().requires_grad_(recorded)
    module.zero_grad()
    with torch.set_grad_enabled(recorded), torch.autocast(x.device.type, autocast):
        y = module(x)
    if not recorded:
        return y, {}
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    y.backward(upstream.to(y.device, y.dtype))
    found = {"input": x.grad, **{k: p.grad for k, p in module.named_parameters()}}
    return y.detach(), {k: g for k, g in found.items() if g is not None}


def check(pair: Pair, x: torch.Tensor, autocast: torch.dtype, recorded: bool) -> None:
    """A kernel runs, and says nothing; dtypes are the original's, and so are the numbers."""
    try:
        expected = call(pair.plain, x, autocast, recorded)
    except RuntimeError:
        return  # dtypes that PyTorch does not mix there
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(pair.patched, x, autocast, recorded)  # proves it
    with Kernels() as seen:
        got = call(pair.patched, x, autocast, recorded)
    assert seen.names, "no kernel ran"
    dtypes = {x.dtype, autocast, *(p.dtype for p in pair.plain.parameters())}
    limit = noise(*dtypes)
    assert got[0].dtype == expected[0].dtype and off(got[0], expected[0]) <= limit
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert got[1][name].dtype == gradient.dtype, name
        assert off(got[1][name], gradient) <= limit, name


def check_module(name: str, autocast: torch.dtype, recorded: bool, device: str) -> None:
    """Values, gradients and the dtypes of both, for inputs and weights of every dtype."""
    for own in (torch.float32, autocast):
        settings = {"mode": "training" if recorded else "inference", "kernels": "local"}
        pair = Pair.of(MODULES[name]().to(own), device, **settings)
        for dtype in DTYPES:
            check(pair, draw(dtype, device), autocast, recorded)


def gated_norm() -> nn.Module:
    groups = signature(BambaRMSNormGated).parameters.get("group_size")  # not in older transformers
    return BambaRMSNormGated(WIDTH, **({} if groups is None else {"group_size": WIDTH}))


def check_gated_norm(autocast: torch.dtype, device: str) -> None:
    norm = gated_norm().to(device)
    plain = copy.deepcopy(norm)
    assert hfpatch.apply(nn.Sequential(norm)).swaps
    for dtype in DTYPES:
        x, gate = draw(dtype, device), draw(dtype, device).flip(0)
        with torch.no_grad(), torch.autocast(device, autocast):
            norm(x, gate)
            with Kernels() as seen:
                got = norm(x, gate)
            expected = plain(x, gate)
        assert seen.names == ["gated_rms_norm"] and got.dtype == expected.dtype
        assert off(got, expected) <= noise(dtype, torch.float32)
