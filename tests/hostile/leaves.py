"""Leaves that are nearly a formula: what real code has made of norms, activations and MLPs."""

from __future__ import annotations

import random
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 48


def drawn(module: nn.Module) -> nn.Module:
    """Random parameters, the same for each module of a class."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            scale = p.shape[-1] ** -0.5 if p.ndim > 1 else 0.3
            p.copy_((p.ndim == 1) + scale * torch.randn(p.shape, generator=generator))
    return module


class PlainRMSNorm(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = 1e-6

    def scaled(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.scaled(x.float()).to(x.dtype)


class DetachedRMSNorm(PlainRMSNorm):
    def scaled(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps).detach()


class QuietRMSNorm(PlainRMSNorm):
    def scaled(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * r


class FrozenWeightRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight.detach() * self.scaled(x.float()).to(x.dtype)


class ScaledGradientLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.detach() + 0.5 * (y - y.detach())


class GradDependentRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if torch.is_grad_enabled() else y


class PerHeadRMSNorm(PlainRMSNorm):
    """Of rows of several heads, each of them normed."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, self.weight.shape[0]))
        return super().forward(heads).flatten(-2)


class ScalarRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__(1)


class LayerNorm2d(nn.LayerNorm):
    """Channels first where the input is an image, as ConvNeXt's is."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return super().forward(x)


class ByRankRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if x.dim() == 2 else 1)


class OneDimensionRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (1 if x.dim() == 1 else 0)


# State -------------------------------------------------------------------------------------------


class CountingRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class ListingRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.numel())
        return super().forward(x)


class TensorListRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.held = {"last": [torch.zeros(3)]}

    def forward(self, x: Tensor) -> Tensor:
        self.held["last"][0].add_(1)
        return super().forward(x)


class Config:
    def __init__(self) -> None:
        self.calls = 0
        self.inner = {"sizes": [1, 2]}


class ConfigRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def forward(self, x: Tensor) -> Tensor:
        self.config.calls += 1
        self.config.inner["sizes"].append(x.shape[-1])
        return super().forward(x)


class LockedRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            self.calls += 1
        return super().forward(x)


class ParentedRMSNorm(PlainRMSNorm):
    """It holds a module that is no child of it, in a list."""

    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.parent = [parent]

    def forward(self, x: Tensor) -> Tensor:
        self.parent[0].calls.append(1)
        return super().forward(x)


class AverageRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(x.float().mean(), alpha=0.1)
        return super().forward(x)


class Recorder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.average.add_(x.float().abs().mean())
        self.calls.add_(1)
        return x


class RecordingSiLU(nn.Module):
    """An activation whose child writes to its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder()

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.recorder(x))


class SeedingRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(5)
        random.seed(5)
        return super().forward(x)


class SettingRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("medium")
        return y


# Activations -------------------------------------------------------------------------------------


class StraightThroughGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + (F.gelu(x) - x).detach()


class ClippedGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(x)
        if y.requires_grad:
            y.register_hook(lambda g: g.clamp(-0.1, 0.1))
        return y


class FarClippedGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(x)
        if y.requires_grad:
            y.register_hook(lambda g: g.clamp(-100, 100))
        return y


class OwnSwish(torch.autograd.Function):
    """With the gradient of the formula."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        y = torch.sigmoid(x)
        return grad * (y * (1 + x * (1 - y)))


class DoubledSiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return 2 * g * s * (1 + x * (1 - s))


class DoubledSiLUActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return DoubledSiLU.apply(x)


class Swish(nn.Module):
    """x * sigmoid(beta * x), with a beta of its own."""

    def __init__(self, beta: float = 1.0, trained: bool = True) -> None:
        super().__init__()
        if trained:
            self.beta = nn.Parameter(torch.tensor(beta))
        else:
            self.register_buffer("beta", torch.tensor(beta))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


class NestedSwish(nn.Module):
    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        self.inner = Swish(beta)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


# Gated MLPs --------------------------------------------------------------------------------------


class SomeMLP(nn.Module):
    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, 80, bias=False)
        self.up_proj = nn.Linear(WIDTH, 80, bias=False)
        self.down_proj = nn.Linear(80, WIDTH, bias=False)
        self.act_fn = act or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class DetachedGateMLP(SomeMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)).detach() * self.up_proj(x))


class QuietMLP(SomeMLP):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.act_fn(self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))


class ByRankMLP(SomeMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if x.dim() == 2 else 1)


class Wide(nn.Linear):
    """A projection that computes in another dtype than it is asked in."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(torch.bfloat16)


class Tupled(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class TupledMLP(SomeMLP):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = gate[0] if isinstance(gate, tuple) else gate
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class DenseGatedAct(nn.Module):
    """As T5's, with what a class makes of its dropout."""

    place = "between"

    def __init__(self, dropout: nn.Module | None = None) -> None:
        super().__init__()
        self.wi_0 = nn.Linear(WIDTH, 80, bias=False)
        self.wi_1 = nn.Linear(WIDTH, 80, bias=False)
        self.wo = nn.Linear(80, WIDTH, bias=False)
        self.dropout = dropout or nn.Dropout(0.3)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.wi_0(x)) * self.wi_1(x)
        if self.place == "between":
            h = self.dropout(h)
        y = self.wo(h)
        return self.dropout(y) if self.place == "after" else y


class DroppedAfterGatedAct(DenseGatedAct):
    place = "after"


class NeverDroppedGatedAct(DenseGatedAct):
    place = "nowhere"


class DroppedFirstGatedAct(DenseGatedAct):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x))


class DroppedGateGatedAct(DenseGatedAct):
    """The same numbers, since factors commute; a hook of the dropout sees others."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.wo(self.dropout(self.act(self.wi_0(x))) * self.wi_1(x))
        return y


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2
