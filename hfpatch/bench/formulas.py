"""The formulas as HuggingFace modules write them: what the peers eager and torch.compile run."""

from __future__ import annotations

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

EPS = 1e-6


# ------------------------------------------------------------------------------ norms


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    """`LlamaRMSNorm` of transformers."""
    y = x.to(torch.float32)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * y.to(x.dtype)


def diffusers_norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """`RMSNorm` of diffusers, in one half dtype."""
    y = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + EPS)
    y = y.to(x.dtype)
    return y if weight is None else y * weight


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def fused_rms_norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def add_llama_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return llama_norm(total, weight), total


def add_fused_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return fused_rms_norm(total, weight), total


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return layer_norm(total, weight, bias), total


def bamba_norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """`BambaRMSNormGated` of transformers: the gate comes first."""
    y = x.to(torch.float32) * F.silu(gate.to(torch.float32))
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * y.to(x.dtype)


def qwen3_next_norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """`Qwen3NextRMSNormGated` of transformers: the norm comes first."""
    y = llama_norm(x, weight)
    return (y * F.silu(gate.to(torch.float32))).to(x.dtype)


# ------------------------------------------------------------------------------ AdaLN


def modulated_rms(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """LTX-Video."""
    return diffusers_norm(x) * (1 + scale) + shift


def modulated_layer(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Flux."""
    return layer_norm(x) * (1 + scale) + shift


def gate_residual(residual: Tensor, gate: Tensor, x: Tensor) -> Tensor:
    return residual + gate * x


def gated_modulated_rms(
    residual: Tensor, gate: Tensor, x: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    total = gate_residual(residual, gate, x)
    return total, modulated_rms(total, scale, shift)


def gated_modulated_layer(
    residual: Tensor, gate: Tensor, x: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    total = gate_residual(residual, gate, x)
    return total, modulated_layer(total, scale, shift)


# ------------------------------------------------------------------------------ activations


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def packed_geglu(x: Tensor) -> Tensor:
    """`GEGLU` of diffusers: the gate is the second half."""
    up, gate = x.chunk(2, dim=-1)
    return up * F.gelu(gate)


# ------------------------------------------------------------------------------ RoPE


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def llama_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """transformers, all in the dtype of x `[B, S, H, D]`; tables `[B, S, D]`."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return x * cos + rotate_half(x) * sin


def llama_rope_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return llama_rope(q, cos, sin), llama_rope(k, cos, sin)


def flux_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """diffusers' interleaved pairs, computed in fp32; x `[B, S, H, D]`, tables `[S, D]` fp32."""
    cos, sin = cos[None, :, None], sin[None, :, None]
    real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    rotated = torch.stack((-imaginary, real), dim=-1).flatten(-2)
    return (x.float() * cos + rotated.float() * sin).to(x.dtype)


def flux_rope_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return flux_rope(q, cos, sin), flux_rope(k, cos, sin)


def flux_qk(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Norm of each head, then RoPE (Flux)."""
    return flux_rope_qk(diffusers_norm(q, q_weight), diffusers_norm(k, k_weight), cos, sin)


def qwen3_qk(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Norm of each head, then RoPE (Qwen3)."""
    return llama_rope_qk(llama_norm(q, q_weight), llama_norm(k, k_weight), cos, sin)


def ltx_qk(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Norm over all heads of a token, then RoPE before the heads are split (LTX-Video)."""

    def one(x: Tensor, weight: Tensor) -> Tensor:
        y = F.rms_norm(x.flatten(2), weight.shape, weight, EPS)
        real, imaginary = y.reshape(*y.shape[:-1], -1, 2).unbind(-1)
        rotated = torch.stack((-imaginary, real), dim=-1).flatten(2)
        return (y.float() * cos.flatten(2) + rotated.float() * sin.flatten(2)).to(x.dtype)

    return one(q, q_weight), one(k, k_weight)


# ------------------------------------------------------------------------------ losses


def row_losses(logits: Tensor, target: Tensor) -> Tensor:
    """As transformers computes its losses: on an fp32 copy of the logits."""
    return F.cross_entropy(logits.float(), target, reduction="none")


def mean_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)
