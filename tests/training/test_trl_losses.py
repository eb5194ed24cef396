"""The losses of preferences, rewards and distillation beside TRL's own code, where it is installed.

TRL has most of them as methods of its trainers: these are called on a stand-in that has a trainer's
settings, with a model of a head alone. Values and gradients, of random hidden states and weights.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hfpatch import loss

BATCH, TOKENS, WIDTH, CLASSES = 6, 9, 16, 57
BETA = 0.3
Head = Any


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there."""


def trainer_of(where: str, name: str) -> Any:
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    return getattr(importlib.import_module(where), name)


def drawn(seed: int, *shape: int) -> Tensor:
    return 0.5 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Data:
    """Hidden states of rows that begin with a prompt and end in padding."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.hidden, self.weight, self.reference = (
            drawn(2, BATCH, TOKENS, WIDTH),
            drawn(3, CLASSES, WIDTH),
            drawn(4, CLASSES, WIDTH),
        )
        self.ids = torch.randint(CLASSES, (BATCH, TOKENS + 1), generator=generator)
        self.mask = torch.ones_like(self.ids)
        self.mask[:, :3] = 0
        for row in range(BATCH):
            self.mask[row, TOKENS + 1 - row % 4 :] = 0
        self.target = self.ids.masked_fill(self.mask == 0, -100)[:, 1:]
        self.counted = self.target != -100

    def log_probs(self, hidden: Tensor, weight: Tensor, target: Tensor | None = None) -> Tensor:
        target = self.target if target is None else target
        every = F.log_softmax(hidden @ weight.T, -1)
        found = every.gather(-1, target.clamp(min=0)[..., None])[..., 0]
        return torch.where(target == -100, 0.0, found)

    def model(self, hidden: Tensor, weight: Tensor) -> Any:
        """What TRL calls: a model with a fused head."""

        def called(*, labels: Tensor, fused_lm_head: bool, **_: Any) -> Any:
            assert fused_lm_head
            found = self.log_probs(hidden, weight, labels[:, 1:])
            zeros = torch.zeros_like(found)
            return SimpleNamespace(
                log_probs=found, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(),
                log_sum_sq_probs=zeros, aux_loss=None,
            )  # fmt: skip

        return called

    def inputs(self) -> dict[str, Tensor]:
        return {
            "input_ids": self.ids,
            "attention_mask": torch.ones_like(self.ids),
            "completion_mask": self.mask,
        }


def stand_in(**settings: Any) -> Any:
    """A trainer as its methods see it; what they only count or log is taken as it comes."""
    trainer = MagicMock()
    trainer.accelerator.device = torch.device("cpu")
    trainer.accelerator.num_processes = 1
    for gather in ("gather_for_metrics", "gather"):
        getattr(trainer.accelerator, gather).side_effect = lambda x: x
    trainer.accelerator.reduce.side_effect = lambda x, reduction: x
    trainer.model.training = True
    trainer._metrics = {"train": defaultdict(list)}
    trainer._total_train_tokens, trainer._tp_size = 0, 1
    for name, value in {"aux_loss_enabled": False, **settings}.items():
        setattr(trainer, name, value)
    return trainer


def assert_alike(ours: Any, theirs: Any, data: Data) -> None:
    """Both are functions of (hidden, weight)."""
    found = []
    for function in (ours, theirs):
        x, w = (t.clone().requires_grad_() for t in (data.hidden, data.weight))
        value = function(x, w)
        found.append([value.detach(), *torch.autograd.grad(value, (x, w))])
    assert found[1][1].abs().max() > 0
    for name, a, b in zip(("loss", "hidden", "weight"), *found, strict=True):
        assert a.shape == b.shape, name
        assert (a - b).abs().max() <= 1e-5 * b.abs().max().clamp(min=1e-2), name


def means(data: Data, hidden: Tensor, weight: Tensor, average: bool) -> tuple[Tensor, Tensor]:
    sums = data.log_probs(hidden, weight).sum(-1)
    return (sums / data.counted.sum(-1) if average else sums).chunk(2)  # type: ignore[return-value]


DPO = (
    "sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm",
)  # fmt: skip


@pytest.mark.parametrize("kind", DPO)
def test_dpo(kind: str) -> None:
    trainer, data = trainer_of("trl", "DPOTrainer"), Data()
    smoothing = 0.1 if kind in ("robust", "exo_pair", "aot", "aot_unpaired") else 0.0
    before = data.log_probs(data.hidden, data.reference)

    def theirs(x: Tensor, w: Tensor) -> Tensor:
        self = stand_in(
            beta=BETA, label_smoothing=smoothing, loss_types=[kind], loss_weights=[1.0],
            ld_alpha=None, precompute_ref_logps=False, f_divergence_type="reverse_kl",
            use_weighting=False, args=SimpleNamespace(
                gradient_checkpointing_kwargs=None, discopop_tau=0.05
            ),
        )  # fmt: skip
        self.model.is_gradient_checkpointing = self.model.is_activation_checkpointing = False
        self.ref_model = data.model(data.hidden, data.reference)
        found = trainer._compute_loss(self, data.model(x, w), data.inputs(), False)
        return found  # type: ignore[no-any-return]

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return loss.linear_dpo(
            x, w, data.target, reference=before, beta=BETA, loss_type=kind,
            label_smoothing=smoothing,
        ).loss  # fmt: skip

    assert_alike(ours, theirs, data)


@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
def test_kto(kind: str) -> None:
    trainer, data = trainer_of("trl", "KTOTrainer"), Data()
    desirable = torch.tensor([1, 0, 0, 1, 1, 0]).bool()
    before = data.log_probs(data.hidden, data.reference)
    others = drawn(8, BATCH).abs() - 2, drawn(9, BATCH) - 4  # of answers to other prompts

    def theirs(x: Tensor, w: Tensor) -> Tensor:
        self = stand_in(
            beta=BETA, loss_type=kind, calculate_KL=kind == "kto", precompute_ref_logps=True,
            desirable_weight=1.3, undesirable_weight=0.7,
        )  # fmt: skip
        self._compute_kl_logps.side_effect = lambda *_: others[0]
        inputs = data.inputs() | {
            "label": desirable,
            "ref_logps": before.sum(-1),
            "ref_KL_logps": others[1],
        }
        found = trainer._compute_loss(self, data.model(x, w), inputs, False)
        return found  # type: ignore[no-any-return]

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return loss.linear_kto(
            x, w, data.target, desirable, reference=before, kl=(others[0] - others[1]).mean(),
            beta=BETA, loss_type=kind, desirable_weight=1.3, undesirable_weight=0.7,
        ).loss  # fmt: skip

    assert_alike(ours, theirs, data)


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo", "simpo"])
def test_cpo(kind: str) -> None:
    trainer, data = trainer_of("trl.experimental.cpo", "CPOTrainer"), Data()
    smoothing = 0.1 if kind in ("sigmoid", "simpo") else 0.0

    def theirs(x: Tensor, w: Tensor) -> Tensor:
        self = stand_in(
            beta=BETA, loss_type=kind, label_smoothing=smoothing, simpo_gamma=0.4, alpha=0.0
        )
        chosen, rejected = means(data, x, w, kind in ("ipo", "simpo"))
        found = trainer.cpo_loss(self, chosen, rejected)[0].mean()
        return found  # type: ignore[no-any-return]

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return loss.linear_cpo(
            x, w, data.target, beta=BETA, loss_type=kind, label_smoothing=smoothing,
            simpo_gamma=0.4, cpo_alpha=0.0,
        ).loss  # fmt: skip

    assert_alike(ours, theirs, data)


def test_orpo() -> None:
    trainer, data = trainer_of("trl.experimental.orpo", "ORPOTrainer"), Data()
    half = BATCH // 2

    def theirs(x: Tensor, w: Tensor) -> Tensor:
        chosen, rejected = means(data, x, w, average=True)
        ratio = trainer.odds_ratio_loss(stand_in(beta=BETA), chosen, rejected)[0].mean()
        tokens = data.log_probs(x, w)[:half].sum() / data.counted[:half].sum()
        return -tokens - ratio  # type: ignore[no-any-return]

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return loss.linear_orpo(x, w, data.target, beta=BETA).loss

    assert_alike(ours, theirs, data)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_jsd(beta: float, temperature: float) -> None:
    trainer, data = trainer_of("trl.experimental.gkd", "GKDTrainer"), Data()
    teacher = drawn(7, BATCH, TOKENS, WIDTH) @ data.reference.T

    def theirs(x: Tensor, w: Tensor) -> Tensor:
        found = trainer.generalized_jsd_loss(
            x @ w.T, teacher, data.target, beta=beta, temperature=temperature
        )
        return found  # type: ignore[no-any-return]

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return loss.linear_jsd(
            x, w, loss.Teacher(teacher), mask=data.counted, beta=beta, temperature=temperature
        )

    assert_alike(ours, theirs, data)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beta", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "luspo", "sapo"])
def test_grpo(kind: str, beta: float, level: str) -> None:
    trainer, data = trainer_of("trl", "GRPOTrainer"), Data()
    advantages = drawn(5, BATCH) * 3
    mask = data.counted.long()
    old = (data.log_probs(data.hidden, data.weight) + drawn(6, BATCH, TOKENS)) * mask
    before = data.log_probs(data.hidden, data.reference)
    items = torch.tensor(40.0)
    bounds = {"epsilon_low": 0.2, "epsilon_high": 2.0 if kind == "cispo" else 0.3}

    def theirs(x: Tensor, w: Tensor) -> Tensor:
        self = stand_in(
            beta=beta, loss_type=kind, importance_sampling_level=level, top_entropy_quantile=1.0,
            off_policy_mask_threshold=None, use_vllm=False, _entropy_bonus_enabled=False,
            current_gradient_accumulation_steps=1, max_completion_length=12, **bounds,
            args=SimpleNamespace(
                delta=1.6, use_bias_correction_kl=False, sapo_temperature_pos=1.0,
                sapo_temperature_neg=1.05, steps_per_generation=1,
            ),
        )  # fmt: skip
        entropies = torch.zeros(BATCH, TOKENS)
        found = data.log_probs(x, w)
        self._get_per_token_logps_and_entropies.side_effect = lambda *_, **__: (
            found,
            entropies,
            None,
        )
        inputs = {
            "prompt_ids": data.ids[:, :1],
            "prompt_mask": torch.ones_like(data.ids[:, :1]),
            "completion_ids": data.ids[:, 1:],
            "completion_mask": mask,
            "advantages": advantages,
            "old_per_token_logps": old,
            "ref_per_token_logps": before,
            "num_items_in_batch": items,
        }
        value = trainer._compute_loss(self, None, inputs)
        return value  # type: ignore[no-any-return]

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return loss.linear_grpo(
            x, w, data.target, advantages, old_log_probs=old, ref_log_probs=before, beta=beta,
            delta=1.6, loss_type=kind, importance_sampling_level=level, max_completion_length=12,
            num_items=items, **bounds,
        ).loss  # fmt: skip

    assert_alike(ours, theirs, data)
