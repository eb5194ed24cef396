"""The formulas as HuggingFace modules write them: what the peers eager and torch.compile run."""

from __future__ import annotations

from typing import Any

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


def group_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """The same without a gate, of groups of 128 columns (of all, where there are fewer)."""
    y = x.to(torch.float32).reshape(*x.shape[:-1], -1, min(128, x.shape[-1]))
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * y.flatten(-2).to(x.dtype)


def rms_norm_silu(x: Tensor, addend: Tensor) -> Tensor:
    """diffusers' `RMSNorm` without a weight, and what stands around it in LTX-Video's VAE."""
    x = x + addend
    variance = x.float().pow(2).mean(-1, keepdim=True)
    return F.silu((x * torch.rsqrt(variance + EPS)).to(x.dtype))


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


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`DeepseekV4MLP` of transformers."""
    return F.silu(gate.clamp(max=10.0)) * up.clamp(min=-10.0, max=10.0)


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


def losses_and_log_probs(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row, with the logarithm of its sum, as reinforcement learning asks for them."""
    wide = logits.float()
    lse = wide.logsumexp(-1)
    log_probs = wide - lse.unsqueeze(-1)
    loss = F.nll_loss(log_probs, target, reduction="none")
    return loss, lse, log_probs.to(logits.dtype)


#: `num_experts_per_tok` of Mixtral.
EXPERTS_OF_A_TOKEN = 2


def load_balancing_loss(logits: Tensor) -> Tensor:
    """`load_balancing_loss_func` of transformers' `MixtralForCausalLM`, without a mask."""
    probs = logits.float().softmax(-1)
    chosen = probs.topk(EXPERTS_OF_A_TOKEN, dim=-1).indices
    shares = F.one_hot(chosen, logits.shape[-1]).float().mean(0)
    return (shares * probs.mean(0)).sum() * logits.shape[-1]


def balance(logits: Tensor) -> Tensor:
    """What the kernel keeps for the gradient: shares, mean probabilities, tokens."""
    probs = logits.float().softmax(-1)
    chosen = probs.topk(EXPERTS_OF_A_TOKEN, dim=-1).indices
    shares = F.one_hot(chosen, logits.shape[-1]).float().mean(0).sum(0)
    return torch.cat((shares, probs.mean(0), shares.new_tensor([logits.shape[0]])))


def mean_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)


# ------------------------------------------------------------------------------ rows


def group_norm_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`ResnetBlock2D` of diffusers."""
    return F.silu(F.group_norm(x, groups_of(weight), weight, bias, EPS))


def group_norm_silu_channels_last(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The same of images in `torch.channels_last`, which PyTorch knows by four dimensions."""
    images = x.unsqueeze(2).permute(0, 3, 1, 2)
    return group_norm_silu(images, weight, bias).permute(0, 2, 3, 1).squeeze(2)


def groups_of(weight: Tensor) -> int:
    """32, as in every UNet and VAE, but in tests of a few channels."""
    return min(32, weight.shape[0])


def topk(x: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = x.topk(min(50, x.shape[-1]), -1)
    return values, indices


def softmax(x: Tensor) -> Tensor:
    return F.softmax(x, -1)


def softmax_gradient(grad: Tensor, y: Tensor) -> Tensor:
    scaled = grad.float() * y.float()
    return (scaled - y.float() * scaled.sum(-1, keepdim=True)).to(y.dtype)


def fused_softmax_gradient(grad: Tensor, y: Tensor) -> Tensor:
    return torch._softmax_backward_data(grad, y, -1, y.dtype)


def sample_by_sorting(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """The warpers of transformers' `generate`, one after the other; `torch.multinomial` waits for
    the device, so the draw is its formula, the least of exponential variates."""
    x = logits.float() / temperature
    x = x.masked_fill(x < x.topk(min(top_k, x.shape[-1]), -1).values[..., -1:], float("-inf"))
    ascending, order = x.sort(dim=-1)
    drop = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    drop[..., -1:] = False
    p = x.masked_fill(drop.scatter(-1, order, drop), float("-inf")).softmax(-1)
    return (p / torch.empty_like(p).exponential_()).argmax(-1)


# ------------------------------------------------------------------------------ pointwise


def add_silu(x: Tensor, bias: Tensor) -> Tensor:
    return F.silu(x + bias)


def mul_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a * b + c


# ------------------------------------------------------------------------------ optimizer

#: Betas so near 1 that a step more or less is no other result.
ADAMW: dict[str, Any] = {
    "lr": 1e-3,
    "beta1": 0.999,
    "beta2": 0.999,
    "weight_decay": 0.01,
    "eps": 1e-8,
}


def our_adamw(package: Any, p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor) -> Any:
    lists = [t.unbind(0) for t in (p, g, m, v)]
    package.adamw_step(*lists, [step] * len(p), **ADAMW)
    return p, m, v


def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor) -> tuple[Tensor, ...]:
    """`torch.optim.AdamW(foreach=True)`, over all parameters at once."""
    lr, beta1, beta2 = ADAMW["lr"], ADAMW["beta1"], ADAMW["beta2"]
    p.mul_(1 - lr * ADAMW["weight_decay"])
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    root = v.sqrt().div_((1 - beta2**step).sqrt()).add_(ADAMW["eps"])
    p.sub_(m / root * (lr / (1 - beta1**step)))
    return p, m, v


def fused_adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor) -> tuple[Tensor, ...]:
    ps, gs, ms, vs = (t.unbind(0) for t in (p, g, m, v))
    steps = [step] * len(ps)
    torch._fused_adamw_(ps, gs, ms, vs, [], steps, amsgrad=False, maximize=False, **ADAMW)
    return p, m, v


def clip(g: Tensor, total: Tensor) -> Tensor:
    """`torch.nn.utils.clip_grads_with_norm_`."""
    torch._foreach_mul_(g.unbind(0), torch.clamp(0.9999 / (total + 1e-6), max=1.0)[0])
    return g


def scale(g: Tensor, factor: Tensor) -> Tensor:
    torch._foreach_mul_(g.unbind(0), factor[0])
    return g
