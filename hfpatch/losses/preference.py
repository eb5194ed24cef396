"""Losses of preferences and rewards over a head's log-probabilities, which need no logits.

Each is TRL's formula over `head_rows.linear_log_probs`: what comes after that has a number per
token at most, and is PyTorch's operators. Rows of pairs are as TRL has them: the chosen ones first,
the rejected ones behind, in the same order. No token is shifted here: `target` of a position is the
token that its hidden state predicts, and `ignore_index` stands at prompts and padding.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hfpatch.losses.head_loss import check_tensors, check_tensors_or_none
from hfpatch.losses.head_rows import linear_log_probs

#: Of `linear_dpo`.
DPO = ("sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
       "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm")  # fmt: skip
CPO = ("sigmoid", "hinge", "ipo", "simpo")
KTO = ("kto", "apo_zero_unpaired")
GRPO = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "luspo", "sapo")


class Preference(NamedTuple):
    """Of `linear_dpo`, `linear_cpo`, `linear_simpo`, `linear_orpo`.

    Attributes:
        loss: 0 dimensions, fp32; it alone has gradients.
        chosen_rewards, rejected_rewards: ``[B]``, ``beta`` times the log-probability, of DPO over
            the reference's.
        chosen_log_probs, rejected_log_probs: ``[B]``, in nats: of the whole sequence, or per token
            where the loss takes means.
        nll: the negative log-likelihood per token that is part of the loss; 0 where none is.
    """

    loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    chosen_log_probs: Tensor
    rejected_log_probs: Tensor
    nll: Tensor


class Kto(NamedTuple):
    """Of `linear_kto`.

    Attributes:
        loss: 0 dimensions, fp32; it alone has gradients.
        rewards: ``[B]``, ``beta * (log_probs - reference)``.
        log_probs: ``[B]``, of the sequences, in nats.
    """

    loss: Tensor
    rewards: Tensor
    log_probs: Tensor


class Grpo(NamedTuple):
    """Of `linear_grpo`.

    Attributes:
        loss: 0 dimensions, fp32; it alone has gradients.
        log_probs: ``[B, T]``, in nats; 0 where ignored. The `old_log_probs` of later steps.
        kl: the mean per token of the estimate of the divergence from the reference; 0 without one.
        clip_ratio: the share of tokens (of sequences, at that level) whose ratio was clipped.
    """

    loss: Tensor
    log_probs: Tensor
    kl: Tensor
    clip_ratio: Tensor


def linear_dpo(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    reference: Tensor | None,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> Preference:
    """Direct preference optimization (arXiv:2305.18290) and its variants, without logits.

    With the log-ratios of policy and reference, c of the chosen and r of the rejected sequence:

    | `loss_type` | loss of a pair | paper |
    |---|---|---|
    | ``sigmoid`` | ``-logsigmoid(beta (c - r))``, or smoothed (cDPO) | 2305.18290 |
    | ``hinge`` | ``relu(1 - beta (c - r))`` | 2305.10425 |
    | ``ipo`` | ``(c - r - 1 / (2 beta)) ** 2`` of means per token | 2310.12036 |
    | ``robust`` | sigmoid's, freed of `label_smoothing` flipped labels | 2403.00409 |
    | ``exo_pair`` | reverse KL to smoothed labels | 2402.00856 |
    | ``nca_pair`` | noise contrastive | 2402.05369 |
    | ``bco_pair`` | ``-logsigmoid(beta c) - logsigmoid(-beta r)`` | 2404.04656 |
    | ``sppo_hard`` | squares around ``0.5 / beta`` | 2405.00675 |
    | ``aot``, ``aot_unpaired`` | sigmoid's, of sorted batches | 2406.05882 |
    | ``apo_zero``, ``apo_down`` | anchored | 2408.06266 |
    | ``discopop`` | a blend by ``sigmoid(beta (c - r) / discopop_tau)`` | 2406.08414 |
    | ``sigmoid_norm`` | sigmoid's, of means per token | 2411.15124 |

    Args:
        hidden: ``[2 B, S, H]``, chosen before rejected; fp32, fp16, bf16 or fp64.
        weight: ``[V, H]``.
        target: ``[2 B, S]``, integers; `ignore_index` where nothing counts.
        bias: ``[V]`` or None.
        reference: log-probabilities of the reference model: ``[2 B, S]`` of `linear_log_probs`, or
            ``[2 B]`` of sequences. None: reference-free, as if it gave all the same.
        beta: more than 0.
        loss_type: one of the table.
        label_smoothing: the share of pairs that may be labelled wrongly, 0 to below 0.5; of
            sigmoid, robust, exo_pair (more than 0 there) and aot.
        ignore_index: tokens with this target do not count.
        scale: of the logits, as `linear_log_probs` has it.
        softcap: of the logits, as `linear_log_probs` has it.

    Returns:
        `Preference`; the loss is the mean over the pairs.

    Raises:
        TypeError: what is no tensor.
        ValueError: shapes that do not belong together; an odd number of rows; an option unknown or
            out of its range.
    """
    _known("loss_type", loss_type, DPO)
    _positive("beta", beta)
    least = "more than 0" if loss_type == "exo_pair" else "0"
    if not 0.0 <= label_smoothing < 0.5 or (loss_type == "exo_pair" and not label_smoothing):
        raise ValueError(
            f"`label_smoothing`: expected {least} to less than 0.5, got {label_smoothing}"
        )
    _pairs(hidden, weight, target)
    check_tensors_or_none(reference=reference)
    tokens = linear_log_probs(
        hidden, weight, target, bias, ignore_index=ignore_index, scale=scale, softcap=softcap
    )
    counted = (target != ignore_index).to(tokens.device)
    sums = tokens.sum(-1)
    before = _reference(reference, sums, counted)
    chosen, rejected = sums.chunk(2)
    c, r = (sums - before).chunk(2)
    lengths = counted.sum(-1).clamp(min=1).chunk(2)
    delta = c - r
    if loss_type in ("ipo", "sigmoid_norm"):
        delta = c / lengths[0] - r / lengths[1]
    elif loss_type == "aot":
        ref_chosen, ref_rejected = before.chunk(2)
        delta = (chosen - rejected).sort().values - (ref_chosen - ref_rejected).sort().values
    elif loss_type == "aot_unpaired":
        delta = c.sort().values - r.sort().values
    losses = _dpo_losses(loss_type, c, r, delta, beta, label_smoothing, discopop_tau)
    return _preference(losses.mean(), beta * c, beta * r, chosen, rejected)


def _dpo_losses(
    loss_type: str, c: Tensor, r: Tensor, delta: Tensor, beta: float, s: float, tau: float
) -> Tensor:
    """[B]; c, r: log-ratios; delta: their difference, normalized or sorted where the loss is."""
    z: Tensor = beta * delta
    if loss_type == "hinge":
        return F.relu(1 - z)
    if loss_type == "ipo":
        gap: Tensor = delta - 0.5 / beta
        return gap.square()
    if loss_type == "robust":
        clean: Tensor = s * F.logsigmoid(-z) - (1 - s) * F.logsigmoid(z)
        return clean.div(1 - 2 * s)
    if loss_type == "exo_pair":
        right, wrong = math.log1p(-s), math.log(s)
        return z.sigmoid() * (F.logsigmoid(z) - right) + (-z).sigmoid() * (F.logsigmoid(-z) - wrong)
    if loss_type == "nca_pair":
        both = F.logsigmoid(-beta * c) + F.logsigmoid(-beta * r)
        return -F.logsigmoid(beta * c) - 0.5 * both
    if loss_type == "bco_pair":
        return -F.logsigmoid(beta * c) - F.logsigmoid(-beta * r)
    if loss_type == "sppo_hard":
        return (c - 0.5 / beta).square() + (r + 0.5 / beta).square()
    if loss_type == "apo_zero":
        return (-beta * c).sigmoid() + (beta * r).sigmoid()
    if loss_type == "apo_down":
        return (beta * c).sigmoid() + (-z).sigmoid()
    if loss_type == "discopop":
        blend = (z / tau).sigmoid()
        return (1 - blend) * -F.logsigmoid(z) + blend * torch.exp(-z)
    if loss_type == "sigmoid_norm":
        s = 0.0
    return _smoothed(z, s)


def linear_cpo(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    simpo_gamma: float = 0.5,
    cpo_alpha: float = 1.0,
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> Preference:
    """Contrastive preference optimization (arXiv:2401.08417), which needs no reference model.

    The loss of DPO's forms without a reference, plus `cpo_alpha` times the negative log-likelihood
    of the chosen sequences per token. ``ipo`` and ``simpo`` take means per token; ``simpo`` wants a
    margin of `simpo_gamma` (arXiv:2405.14734). As TRL's, a mean over no token is NaN: of ``ipo``
    and ``simpo`` where a whole row is ignored, of the likelihood where all chosen rows are.

    Args, returns, raises:
        As `linear_dpo`; `loss_type`: sigmoid, hinge, ipo or simpo; `label_smoothing`: of sigmoid
        and simpo.
    """
    _known("loss_type", loss_type, CPO)
    _positive("beta", beta)
    if not 0.0 <= label_smoothing <= 0.5:
        raise ValueError(f"`label_smoothing`: expected 0 to 0.5, got {label_smoothing}")
    _pairs(hidden, weight, target)
    tokens = linear_log_probs(
        hidden, weight, target, bias, ignore_index=ignore_index, scale=scale, softcap=softcap
    )
    counted = (target != ignore_index).to(tokens.device)
    values = tokens.sum(-1)
    if loss_type in ("ipo", "simpo"):
        values = values / counted.sum(-1)
    chosen, rejected = values.chunk(2)
    delta = chosen - rejected
    if loss_type == "hinge":
        losses = F.relu(1 - beta * delta)
    elif loss_type == "ipo":
        losses = (delta - 0.5 / beta).square()
    else:
        margin = simpo_gamma if loss_type == "simpo" else 0.0
        losses = _smoothed(beta * delta - margin, label_smoothing)
    loss, nll = losses.mean(), torch.zeros_like(losses).sum()
    if cpo_alpha:
        half = len(tokens) // 2
        nll = -tokens[:half].sum() / counted[:half].sum()
        loss = loss + cpo_alpha * nll
    return _preference(loss, beta * chosen, beta * rejected, chosen, rejected, nll)


def linear_simpo(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> Preference:
    """SimPO (arXiv:2405.14734): ``-logsigmoid(beta (mean chosen - mean rejected) - gamma)``.

    `linear_cpo` with ``loss_type="simpo"``, ``simpo_gamma=gamma`` and ``cpo_alpha=0``: NaN where a
    whole row is ignored.
    """
    return linear_cpo(
        hidden, weight, target, bias, beta=beta, loss_type="simpo", simpo_gamma=gamma,
        cpo_alpha=0.0, label_smoothing=label_smoothing, ignore_index=ignore_index, scale=scale,
        softcap=softcap,
    )  # fmt: skip


def linear_orpo(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    nll_target: Tensor | None = None,
    beta: float = 0.1,
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> Preference:
    """Odds ratio preference optimization (arXiv:2403.07691).

    The negative log-likelihood of the chosen sequences per token, minus `beta` times the mean of
    ``logsigmoid(log_odds(chosen) - log_odds(rejected))``, of probabilities per token. As TRL's, it
    is NaN where a whole row is ignored: a mean over no token.

    Args:
        nll_target: ``[B, S]``: targets of the chosen sequences' likelihood, where more tokens count
            in it than in `target`: TRL's counts the prompt's too. None: those of `target`.

    Other arguments, returns, raises:
        As `linear_dpo`.
    """
    _positive("beta", beta)
    _pairs(hidden, weight, target)
    check_tensors_or_none(nll_target=nll_target)
    half = len(target) // 2
    merged = target
    if nll_target is not None:
        if nll_target.shape != target[:half].shape:
            raise ValueError(
                f"`nll_target`: expected shape {list(target[:half].shape)}, the chosen rows of "
                f"`target`, got {list(nll_target.shape)}"
            )
        own = target[:half]
        both = (own != ignore_index) & (nll_target != ignore_index) & (own != nll_target)
        if both.device.type == "cpu" and both.any():
            raise ValueError("`nll_target`: expected the tokens of `target` where both count")
        own = torch.where(own != ignore_index, own, nll_target)
        merged = torch.cat([own, target[half:]])
    tokens = linear_log_probs(
        hidden, weight, merged, bias, ignore_index=ignore_index, scale=scale, softcap=softcap
    )
    counted = (target != ignore_index).to(tokens.device)
    likely = target[:half] if nll_target is None else nll_target
    in_nll = (likely != ignore_index).to(tokens.device)
    nll = -torch.where(in_nll, tokens[:half], 0.0).sum() / in_nll.sum()
    values = torch.where(counted, tokens, 0.0).sum(-1) / counted.sum(-1)
    chosen, rejected = values.chunk(2)
    odds = (values - _log_of_rest(values)).chunk(2)
    loss = nll - beta * F.logsigmoid(odds[0] - odds[1]).mean()
    return _preference(loss, beta * chosen, beta * rejected, chosen, rejected, nll)


def _log_of_rest(x: Tensor) -> Tensor:
    """log(1 - exp(x)) of x below 0 in the form that is exact there (Maechler, 2012)."""
    small = x < -0.6931471805599453
    # each form sees only what it is used for: the other's gradient may be infinite
    far = torch.log1p(-torch.exp(torch.where(small, x, -1.0)))
    near = torch.log(-torch.expm1(torch.where(small, -0.5, x)))
    return torch.where(small, far, near)


def linear_kto(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    desirable: Tensor,
    bias: Tensor | None = None,
    *,
    reference: Tensor | None,
    kl: Tensor | float = 0.0,
    beta: float = 0.1,
    loss_type: str = "kto",
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> Kto:
    """Kahneman-Tversky optimization (arXiv:2402.01306), of single answers.

    With the log-ratio x of policy and reference: ``1 - sigmoid(beta (x - kl))`` of a desirable
    answer, ``1 - sigmoid(beta (kl - x))`` of another. ``apo_zero_unpaired`` (arXiv:2408.06266) has
    no `kl`.

    Args:
        hidden: ``[B, S, H]``.
        target: ``[B, S]``.
        desirable: ``[B]``, bool or integers: is the answer wanted?
        kl: the divergence from the reference, estimated on answers to other prompts: the mean of
            their log-ratios. It has no gradient and is taken as 0 where it is less.
        desirable_weight: factor of the desirable ones.
        undesirable_weight: factor of the others.

    Other arguments, raises:
        As `linear_dpo`.

    Returns:
        `Kto`; the loss is the mean over the answers, NaN left out, as TRL's.
    """
    _known("loss_type", loss_type, KTO)
    _positive("beta", beta)
    check_tensors(hidden=hidden, weight=weight, target=target, desirable=desirable)
    check_tensors_or_none(reference=reference)
    if desirable.shape != hidden.shape[:1]:
        raise ValueError(
            f"`desirable`: expected shape {list(hidden.shape[:1])}, got {list(desirable.shape)}"
        )
    tokens = linear_log_probs(
        hidden, weight, target, bias, ignore_index=ignore_index, scale=scale, softcap=softcap
    )
    sums = tokens.sum(-1)
    x = sums - _reference(reference, sums, (target != ignore_index).to(sums.device))
    base = torch.as_tensor(kl, dtype=x.dtype, device=x.device).detach().clamp(min=0)
    z = beta * (x - base) if loss_type == "kto" else beta * x
    wanted = desirable.to(x.device, torch.bool)
    losses = torch.where(
        wanted, desirable_weight * (-z).sigmoid(), undesirable_weight * z.sigmoid()
    )
    return Kto(losses.nanmean(), (beta * x).detach(), sums.detach())


def linear_grpo(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    bias: Tensor | None = None,
    *,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    beta: float = 0.0,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    max_completion_length: int | None = None,
    num_items: Tensor | float | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    temperature: float = 1.0,
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> Grpo:
    """Group relative policy optimization (arXiv:2402.03300) and its variants, without logits.

    A token's loss is ``-min(ratio A, clip(ratio, 1 - epsilon_low, 1 + epsilon_high) A)``, plus
    `beta` times ``exp(ref - new) - (ref - new) - 1`` (an estimate of the KL divergence).

    | `loss_type` | how tokens become one number | paper |
    |---|---|---|
    | ``grpo`` | mean per sequence, mean over sequences | 2402.03300 |
    | ``bnpo`` | mean over the batch's tokens | 2505.24864 |
    | ``dr_grpo`` | sum, over ``B * max_completion_length`` | 2503.20783 |
    | ``dapo`` | sum, over `num_items` (the batch's tokens where None) | 2503.14476 |
    | ``cispo`` | dapo's; the token is ``-min(ratio, epsilon_high) A log_prob`` | 2506.13585 |
    | ``luspo`` | sum per sequence, mean over sequences | 2602.05261 |
    | ``sapo`` | grpo's; a soft gate in place of the clip | 2511.20347 |

    Args:
        hidden: ``[B, T, H]``, of the completions' tokens.
        target: ``[B, T]``; `ignore_index` where nothing counts.
        advantages: ``[B]``, or ``[B, T]``.
        old_log_probs: ``[B, T]``, of the policy that sampled; None: the present one.
        ref_log_probs: ``[B, T]``, of the reference model; needed where `beta` is not 0.
        epsilon_low: how far the ratio goes below 1.
        epsilon_high: how far the ratio goes above 1; of cispo it is the bound.
        delta: an upper bound of the unclipped ratio too (INTELLECT-2), or None.
        importance_sampling_level: ``"token"``, or ``"sequence"`` (GSPO, arXiv:2507.18071): one
            ratio a sequence, of the mean of its tokens' log-ratios.
        temperature: what the logits are divided by, as in sampling.

    Other arguments, raises:
        As `linear_dpo`.

    Returns:
        `Grpo`. TRL divides further by its steps of accumulation, but dapo and cispo, whose
        `num_items` is where that goes.
    """
    _known("loss_type", loss_type, GRPO)
    _known("importance_sampling_level", importance_sampling_level, ("token", "sequence"))
    check_tensors(hidden=hidden, weight=weight, target=target, advantages=advantages)
    check_tensors_or_none(old_log_probs=old_log_probs, ref_log_probs=ref_log_probs)
    shape = tuple(target.shape)
    if target.dim() != 2:
        raise ValueError(f"`target`: expected [B, T], got {list(shape)}")
    if tuple(advantages.shape) not in (shape, shape[:1]):
        raise ValueError(
            f"`advantages`: expected shape {list(shape[:1])} or {list(shape)}, got "
            f"{list(advantages.shape)}"
        )
    for name, given in (("old_log_probs", old_log_probs), ("ref_log_probs", ref_log_probs)):
        if given is not None and tuple(given.shape) != shape:
            raise ValueError(f"`{name}`: expected shape {list(shape)}, got {list(given.shape)}")
    if beta and ref_log_probs is None:
        raise ValueError("`ref_log_probs`: expected them, since `beta` is not 0, got None")
    if loss_type == "dr_grpo" and not max_completion_length:
        raise ValueError(
            f"`max_completion_length`: expected it for 'dr_grpo', got {max_completion_length}"
        )
    new = linear_log_probs(
        hidden, weight, target, bias,
        ignore_index=ignore_index, scale=scale, softcap=softcap, temperature=temperature,
    )  # fmt: skip
    mask = (target != ignore_index).to(new.device)
    gain = advantages.to(new.device, new.dtype)
    gain = gain[:, None] if gain.dim() == 1 else gain
    old = new.detach() if old_log_probs is None else old_log_probs.to(new.device, new.dtype)
    # what stands in the place of ignored tokens may be anything
    log_ratio = torch.where(mask, new - old, 0.0)
    if importance_sampling_level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = log_ratio.exp()
    clipped = torch.zeros_like(ratio, dtype=torch.bool)
    if loss_type == "cispo":
        losses = -ratio.clamp(max=epsilon_high).detach() * gain * new
        clipped = (ratio > epsilon_high) & (gain > 0)
    elif loss_type == "sapo":
        gate = torch.where(gain > 0, sapo_temperature_pos, sapo_temperature_neg)
        losses = -((gate * (ratio - 1)).sigmoid() * 4 / gate) * gain
    else:
        bounded = ratio if delta is None else ratio.clamp(max=delta)
        inside = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
        losses = -torch.minimum(bounded * gain, inside * gain)
        clipped = ((bounded < 1 - epsilon_low) & (gain < 0)) | (
            (bounded > 1 + epsilon_high) & (gain > 0)
        )
    kl = torch.zeros_like(new)
    if beta and ref_log_probs is not None:
        gap = torch.where(mask, ref_log_probs.to(new.device, new.dtype) - new, 0.0)
        kl = torch.expm1(gap) - gap
        losses = losses + beta * kl
    losses = torch.where(mask, losses.expand(shape), 0.0)
    tokens = mask.sum()
    if loss_type in ("grpo", "sapo"):
        loss = (losses.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    elif loss_type == "luspo":
        loss = losses.sum(-1).mean()
    elif loss_type == "dr_grpo":
        loss = losses.sum() / (shape[0] * (max_completion_length or 1))
    elif loss_type == "bnpo" or num_items is None:
        loss = losses.sum() / tokens.clamp(min=1)
    else:
        items = torch.as_tensor(num_items, dtype=new.dtype, device=new.device)
        loss = losses.sum() / items.clamp(min=1)
    if clipped.shape[1] == 1 and importance_sampling_level == "sequence":
        share = clipped.float().mean()
    else:
        share = (clipped & mask).sum() / tokens.clamp(min=1)
    return Grpo(loss, new.detach(), (kl.detach().sum() / tokens.clamp(min=1)), share)


def _smoothed(z: Tensor, s: float) -> Tensor:
    return -F.logsigmoid(z) * (1 - s) - F.logsigmoid(-z) * s


def _preference(
    loss: Tensor,
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
    chosen: Tensor,
    rejected: Tensor,
    nll: Tensor | None = None,
) -> Preference:
    others = (chosen_rewards, rejected_rewards, chosen, rejected)
    nll = torch.zeros_like(loss) if nll is None else nll
    c_reward, r_reward, c, r = (x.detach() for x in others)
    return Preference(loss, c_reward, r_reward, c, r, nll.detach())


def _reference(reference: Tensor | None, sums: Tensor, counted: Tensor) -> Tensor:
    """[rows]."""
    if reference is None:
        return torch.zeros_like(sums)
    given = reference.detach().to(sums.device, sums.dtype)
    if given.shape == counted.shape:
        return torch.where(counted, given, 0.0).sum(-1)
    if given.shape != sums.shape:
        raise ValueError(
            f"`reference`: expected log-probabilities of shape {list(counted.shape)} or "
            f"{list(sums.shape)}, got {list(given.shape)}"
        )
    return given


def _pairs(hidden: Tensor, weight: Tensor, target: Tensor) -> None:
    check_tensors(hidden=hidden, weight=weight, target=target)
    if target.dim() != 2 or len(target) % 2:
        raise ValueError(
            "`target`: expected [2 B, S], the chosen rows before as many rejected ones, got "
            f"{list(target.shape)}"
        )


def _known(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"`{name}`: expected one of {', '.join(known)}, got {value!r}")


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"`{name}`: expected more than 0, got {value}")
