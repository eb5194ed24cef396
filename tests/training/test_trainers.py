"""Where people train: transformers' `Trainer`, accelerate, and TRL's trainers, with their own code.

A few steps each, of a tiny model, patched beside unpatched, with the same data and seed.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.pieces import small_pieces
from test_deferred_masks import Count, count
from test_layers import build, layers_of, lora
from torch import Tensor
from transformers import (
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import hfpatch

__all__ = ["count"]

STEPS = 6
Rows = list[dict[str, Any]]


def tokens(count: int, seed: int, least: int = 6, most: int = 16) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int, size: int = 1) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    return [number(3, 99, number(least, most)[0]) for _ in range(count)]


def arguments(kind: Any, folder: Path, **more: Any) -> Any:
    return kind(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, logging_steps=1,
        learning_rate=1e-3, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        seed=0, **more,
    )  # fmt: skip


class Trained(NamedTuple):
    """What a training leaves: of each step the loss and the gradients' norm; the parameters
    before and behind it."""

    losses: list[float]
    norms: list[float]
    before: dict[str, Tensor]
    weights: dict[str, Tensor]


def trained(trainer: Any) -> Trained:
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    log = trainer.state.log_history
    found, norms = ([e[n] for e in log if n in e] for n in ("loss", "grad_norm"))
    assert len(found) == len(norms) == STEPS
    assert all(norm > 0 for norm in norms)
    after = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    return Trained(found, norms, before, after)


def assert_trained_alike(ours: Trained, theirs: Trained, most: float, of_steps: float) -> None:
    """`most`: of each loss; `of_steps`: how far all parameters may end apart, as a share of the way
    that they went, and a tenth of that for each norm of the gradients. Adam makes steps of nearly
    one size of the smallest gradients too, whose signs roundings decide."""
    assert ours.losses == pytest.approx(theirs.losses, abs=most)
    assert ours.norms == pytest.approx(theirs.norms, rel=of_steps / 10)
    assert ours.weights.keys() == theirs.weights.keys()

    def way(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
        return sum((one[n] - other[n]).double().square().sum().item() for n in one) ** 0.5

    assert way(ours.before, theirs.before) == 0
    went = way(theirs.weights, theirs.before)
    assert went > 0
    assert way(ours.weights, theirs.weights) <= of_steps * went


def padded(rows: Rows) -> dict[str, Tensor]:
    width = max(len(r["input_ids"]) for r in rows)
    ids = torch.tensor([r["input_ids"] + [0] * (width - len(r["input_ids"])) for r in rows])
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.where(ids == 0, -100, ids),
    }


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 1e-4),
        ({"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}, 1e-4),
        ({"gradient_checkpointing": True}, 1e-4),
        ({"bf16": True}, 3e-2),
        ({"label_smoothing_factor": 0.1}, 1e-4),
        ({"optim": "adafactor", "neftune_noise_alpha": None}, 1e-4),
    ],
    ids=str,
)
def test_trainer(options: dict[str, Any], most: float, tmp_path: Path) -> None:
    rows = [{"input_ids": t} for t in tokens(32, 1)]
    found = []
    for patched in (False, True):
        model = build()
        if patched:
            assert layers_of(hfpatch.apply(model, mode="training")) == 2
        trainer = Trainer(
            model,
            arguments(TrainingArguments, tmp_path, **options),
            train_dataset=rows,  # type: ignore[arg-type]
            data_collator=padded,
        )
        found.append(trained(trainer))
    assert_trained_alike(found[1], found[0], most, 0.1 if options.get("bf16") else 1e-3)
    assert len(set(found[0].losses)) == STEPS


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}, 1e-4),
        ({"gradient_checkpointing": True, "neftune_noise_alpha": 5.0}, 1e-4),
        ({"gradient_checkpointing": True, "bf16": True}, 3e-2),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_trainer_without_padding(
    family: str, options: dict[str, Any], most: float, tmp_path: Path, count: Count
) -> None:
    rows = [{"input_ids": t, "labels": t} for t in tokens(48, 1)]
    found = []
    for patched in (False, True):
        model = build(family, **({"sliding_window": 4} if family == "Gemma3" else {}))
        model.config.use_cache = False
        if patched:
            assert layers_of(hfpatch.apply(model, mode="training")) == 2
        trainer = Trainer(
            model,
            arguments(TrainingArguments, tmp_path, **options),
            train_dataset=rows,  # type: ignore[arg-type]
            data_collator=DataCollatorWithFlattening(),
        )
        torch.manual_seed(0)  # of the noise
        found.append(trained(trainer))
    assert_trained_alike(found[1], found[0], most, 0.1 if options.get("bf16") else 1e-3)
    steps = STEPS * options.get("gradient_accumulation_steps", 1)
    assert (count.given, count.made) == (steps * (1 + (family == "Gemma3")), 0)


class _WithOwnLoss(Trainer):
    """A cross entropy and a z-loss by their operators, and metrics of the same logits."""

    accuracies: list[float]
    reads: bool

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs).logits[:, :-1].float()
        counted = labels != -100
        at = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        sums = torch.logsumexp(logits, -1)
        if self.reads:
            found = logits.detach().argmax(-1) == labels
            self.accuracies.append(found[counted].float().mean().item())
        return ((sums - at + 1e-2 * sums.square()) * counted).sum() / counted.sum()


@pytest.mark.parametrize("reads", [False, True])
def test_a_trainer_with_a_loss_of_its_own(reads: bool, tmp_path: Path) -> None:
    rows = [{"input_ids": t} for t in tokens(32, 1)]
    found, accuracies = [], []
    for patched in (False, True):
        model = build()
        if patched:
            hfpatch.apply(model, mode="training")
        trainer = _WithOwnLoss(
            model,
            arguments(TrainingArguments, tmp_path),
            train_dataset=rows,  # type: ignore[arg-type]
            data_collator=padded,
        )
        trainer.accuracies, trainer.reads = [], reads
        found.append(trained(trainer))
        accuracies.append(trainer.accuracies)
    assert_trained_alike(found[1], found[0], 1e-4, 1e-3)
    assert accuracies[0] == accuracies[1] and len(accuracies[0]) == STEPS * reads
    whole = [n for n in hfpatch.status(model).notes if "made whole: `detach` reads them" in n]
    assert bool(whole) == reads


def test_trainer_with_adapters_and_the_callback(tmp_path: Path) -> None:
    from hfpatch.callbacks import TrainerCallback

    rows = [{"input_ids": t} for t in tokens(32, 1)]
    found = []
    for patched in (False, True):
        callback = TrainerCallback()
        trainer = Trainer(
            lora(build()),
            arguments(TrainingArguments, tmp_path),
            train_dataset=rows,  # type: ignore[arg-type]
            data_collator=padded,
            callbacks=[callback] if patched else [],
        )
        found.append(trained(trainer))
    assert layers_of(callback.report) == 2
    assert_trained_alike(found[1], found[0], 1e-4, 1e-3)


def _measured(outputs: Any) -> dict[str, float]:
    logits, labels = (torch.as_tensor(x) for x in (outputs.predictions, outputs.label_ids))
    counted = labels[:, 1:] != -100
    hits = (logits[:, :-1].argmax(-1) == labels[:, 1:]) & counted
    return {"accuracy": (hits.sum() / counted.sum()).item()}


@pytest.mark.parametrize("with_adapters", [False, True])
def test_trainer_saves_measures_and_resumes(with_adapters: bool, tmp_path: Path) -> None:
    """A checkpoint of a patched run is the original's: either goes on from the other's."""
    from hfpatch.callbacks import TrainerCallback

    rows = [{"input_ids": t} for t in tokens(32, 1, 16, 17)]
    found: dict[Any, list[Any]] = {}
    for patched, start in ((True, None), (False, None), (True, False), (False, True)):
        folder = tmp_path / str(patched if start is None else f"{patched} from {start}")
        options = arguments(TrainingArguments, folder, eval_steps=2, eval_strategy="steps")
        options.save_strategy, options.save_steps = "steps", 3
        model = lora(build()) if with_adapters else build()
        trainer = Trainer(
            model,
            options,
            train_dataset=rows,  # type: ignore[arg-type]
            eval_dataset=rows[:6],  # type: ignore[arg-type]
            data_collator=padded,
            compute_metrics=_measured,
            callbacks=[TrainerCallback()] if patched else [],
        )
        before = None if start is None else str(tmp_path / str(start) / "checkpoint-3")
        trainer.train(resume_from_checkpoint=before)
        log = trainer.state.log_history
        assert not hfpatch.status(model).swaps  # the callback's restore
        found[patched, start] = [
            [(e["step"], e[name]) for e in log if name in e]
            for name in ("loss", "eval_loss", "eval_accuracy")
        ]
    truth = found[False, None]
    assert [len(x) for x in truth] == [STEPS, STEPS // 2, STEPS // 2]
    for series in found.values():
        for ours, theirs in zip(series, truth, strict=True):
            assert [s for s, _ in ours] == [s for s, _ in theirs]
            most = 0.03 if series[2] is ours else 1e-4  # of 90 tokens two may be nearly alike
            assert [x for _, x in ours] == pytest.approx([x for _, x in theirs], abs=most)


def test_accelerate(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    found = []
    for patched in (False, True):
        AcceleratorState._reset_state(True)
        model = build()
        if patched:
            hfpatch.apply(model, mode="training")
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
        found.append([])
        for step in range(6):
            with accelerator.accumulate(model):
                inputs = padded([{"input_ids": t} for t in tokens(2, step)])
                loss = model(**inputs).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            found[-1].append(loss.item())
    assert found[1] == pytest.approx(found[0], abs=3e-2)


# --- TRL ------------------------------------------------------------------------------------------


@pytest.fixture
def words() -> PreTrainedTokenizerFast:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 99)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<pad>")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture
def trl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """TRL, with data sets that are not hashed: some pairs of dill and pyarrow cannot."""
    found, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    numbers = iter(range(1 << 20))
    for name in ("generate_fingerprint", "update_fingerprint"):
        for module in (datasets.arrow_dataset, datasets.fingerprint):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *_, **__: f"{next(numbers):016x}")
    return found


def data_of(**columns: list[str]) -> Any:
    import datasets

    return datasets.Dataset.from_dict(columns)


def patch(model: Any, behind: bool) -> None:
    """behind: the trainer was made, which puts a fused head on the model: it is served then."""
    report = hfpatch.apply(model, mode="training")
    assert layers_of(report) == 2
    assert sum(s.op == "fused_head" for s in report.swaps) == behind
    assert bool([n for n in report.notes if "the head's weight itself" in n]) is False


def text(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packing": True, "max_length": 32},
        {"padding_free": True, "max_length": None},
        {"gradient_checkpointing": True, "bf16": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("behind", [False, True])
def test_trl_sft(
    options: dict[str, Any], behind: bool, words: Any, trl: Any, tmp_path: Path, count: Count
) -> None:
    data = data_of(text=[text(t) for t in tokens(64, 1)])
    found = []
    for patched in (False, True):
        model = build()
        if patched and not behind:
            patch(model, behind)
        args = arguments(
            trl.SFTConfig, tmp_path, **{"bf16": False, "gradient_checkpointing": False, **options}
        )
        trainer = trl.SFTTrainer(model, args, train_dataset=data, processing_class=words)
        if patched and behind:
            patch(model, behind)
        found.append(trained(trainer))
    half = bool(options.get("bf16"))
    assert_trained_alike(found[1], found[0], 3e-2 if half else 2e-4, 0.1 if half else 1e-3)
    in_a_row = "packing" in options or "padding_free" in options
    assert (count.given, count.made) == (STEPS * in_a_row, 0)


@pytest.mark.parametrize("with_adapters", [False, True])
@pytest.mark.parametrize("behind", [False, True])
def test_trl_dpo(with_adapters: bool, behind: bool, words: Any, trl: Any, tmp_path: Path) -> None:
    names = ("prompt", "chosen", "rejected")
    data = data_of(**{n: [text(t) for t in tokens(32, i)] for i, n in enumerate(names)})
    found = []
    for patched in (False, True):
        model = lora(build()) if with_adapters else build()
        reference = None if with_adapters else build()
        both = [one for one in (model, reference) if patched and one is not None]
        for one in both if not behind else ():
            patch(one, behind)
        args = arguments(trl.DPOConfig, tmp_path, bf16=False, gradient_checkpointing=False)
        trainer = trl.DPOTrainer(model, reference, args, train_dataset=data, processing_class=words)
        for one in both if behind else ():
            patch(one, behind)
        found.append(trained(trainer))
    assert_trained_alike(found[1], found[0], 2e-4, 1e-3)


def _rewarded(completions: list[str], **_: Any) -> list[float]:
    """Of equal answers alone it is the same: where all rewards are equal there is no gradient."""
    return [sum(int(w[1:]) / (i + 1) for i, w in enumerate(c.split())) for c in completions]


@pytest.mark.parametrize("behind", [False, True])
def test_trl_grpo(behind: bool, words: Any, trl: Any, tmp_path: Path) -> None:
    data = data_of(prompt=[text(t) for t in tokens(32, 1)])
    build().save_pretrained(tmp_path / "before")
    found = []
    for patched in (False, True):
        model = build()
        model.config._name_or_path = str(tmp_path / "before")  # TRL loads its reference from there
        if patched and not behind:
            patch(model, behind)
        # Of answers made just now, without a distance from a reference, the loss is 0 whatever
        # the model is.
        args = arguments(
            trl.GRPOConfig, tmp_path, bf16=False, gradient_checkpointing=False, num_generations=2,
            max_completion_length=5, num_iterations=2, beta=0.1,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model, _rewarded, args, train_dataset=data, processing_class=words
        )
        if patched and behind:
            patch(model, behind)
        found.append(trained(trainer))
        assert all(e["reward_std"] > 0 for e in trainer.state.log_history if "reward_std" in e)
    assert len({round(loss, 6) for loss in found[0].losses}) > 2
    assert_trained_alike(found[1], found[0], 1e-3, 1e-3)


#: By name: where the trainer is, its columns, and more of its configuration.
PREFERENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "KTO": ("trl", {}),
    "CPO": ("trl.experimental.cpo", {"max_length": 32}),
    "ORPO": ("trl.experimental.orpo", {"max_length": 32}),
    "RLOO": ("trl", {"beta": 0.0, "num_generations": 2, "max_completion_length": 5}),
    "DPO": ("trl", {"gradient_checkpointing": True, "bf16": True}),
    "OnlineDPO": ("trl.experimental.online_dpo", {"max_new_tokens": 6}),
    "A2PO": ("trl.experimental.a2po", {"max_completion_length": 6}),
}
_REWARDED = ("RLOO", "OnlineDPO", "A2PO")


def _right_or_wrong(completions: list[str], **_: Any) -> list[float]:
    return [float(len(c) % 2) for c in completions]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PREFERENCES)
def test_trl_others(name: str, words: Any, trl: Any, tmp_path: Path) -> None:
    _train_by(name, False, words, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("CPO", {}),
        ("CPO", {"loss_type": "simpo", "cpo_alpha": 0.0}),
        ("CPO", {"bf16": True}),
        ("ORPO", {}),
        ("ORPO", {"bf16": True, "gradient_checkpointing": True}),
    ],
    ids=str,
)
def test_trainers_that_read_all_logits(
    name: str, options: dict[str, Any], dtype: torch.dtype, words: Any, trl: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """They are made some at a time: their log-probabilities, and means that are logged."""
    pieces = small_pieces(monkeypatch, 2048)
    found, means = [], []
    for patched in (False, True):
        model = build(dtype=dtype)
        trainer = _trainer_of(name, {"max_length": 32, **options}, model, words, tmp_path)
        if patched:
            patch(model, False)
            pieces.clear()  # those of proofs
        found.append(trained(trainer))
        log = trainer.state.log_history
        means.append([e[n] for e in log for n in ("logits/chosen", "logits/rejected") if n in e])
    assert not [n for n in hfpatch.status(model).notes if "whole" in n]
    assert pieces and max(pieces) < 4 * 12 * 99  # of four sequences of at least twelve tokens
    half = bool(options.get("bf16"))
    most, of_steps = (3e-2, 0.1) if half else (1e-3, 1e-3)
    if dtype != torch.float32:  # losses of a few units are rounded, and updates, to it
        half, most, of_steps = True, 0.1, 0.8
    assert_trained_alike(found[1], found[0], most, of_steps)
    assert means[1] == pytest.approx(means[0], abs=2e-3 if half else 1e-5)


@pytest.mark.parametrize("name", ["OnlineDPO", "A2PO"])
def test_trainers_that_generate_and_read_all_logits(
    name: str, words: Any, trl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = small_pieces(monkeypatch, 2048)
    model = _train_by(name, False, words, tmp_path)
    assert not [n for n in hfpatch.status(model).notes if "whole" in n]
    assert pieces and max(pieces) < 2 * 6 * 99


def test_trl_kto_behind_its_trainer(words: Any, trl: Any, tmp_path: Path) -> None:
    _train_by("KTO", True, words, tmp_path)


def _trainer_of(name: str, options: dict[str, Any], model: Any, words: Any, tmp_path: Path) -> Any:
    where, _ = PREFERENCES[name]
    home = importlib.import_module(where)
    columns = {n: [text(t) for t in tokens(32, i)] for i, n in enumerate(("prompt", "chosen"))}
    if name == "KTO":
        columns["completion"] = columns.pop("chosen")
        columns["label"] = [i % 2 == 0 for i in range(32)]  # type: ignore[misc]
    elif name in _REWARDED:
        del columns["chosen"]
    else:
        columns["rejected"] = [text(t) for t in tokens(32, 2)]
    options = {"bf16": False, "gradient_checkpointing": False, **options}
    args = arguments(getattr(home, f"{name}Config"), tmp_path, **options)
    more: dict[str, Any] = {}
    if name in ("KTO", "DPO", "OnlineDPO"):
        more["ref_model"] = build()
    if name in _REWARDED:
        more["reward_funcs"] = _right_or_wrong if name == "A2PO" else _rewarded
    return getattr(home, f"{name}Trainer")(
        model, args=args, train_dataset=data_of(**columns), processing_class=words, **more
    )


def _train_by(name: str, behind: bool, words: Any, tmp_path: Path) -> Any:
    _, options = PREFERENCES[name]
    found = []
    for patched in (False, True):
        model = build()
        if patched and not behind:
            patch(model, behind)
        trainer = _trainer_of(name, options, model, words, tmp_path)
        if patched and behind:
            patch(model, behind)
        found.append(trained(trainer))
    half = bool(options.get("bf16"))
    assert_trained_alike(found[1], found[0], 3e-2 if half else 1e-3, 0.1 if half else 1e-3)
    return model


# --- somebody else's kernels ----------------------------------------------------------------------


def _liger(model: Any) -> None:
    """As Liger's own code patches an instance: its functions as methods of the modules."""

    def norm(self: Any, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)

    norm.__module__ = "liger_kernel.transformers.rms_norm"
    sys.modules.setdefault("liger_kernel", types.ModuleType("liger_kernel"))
    for one in model.model.layers:
        for module in (one.input_layernorm, one.post_attention_layernorm):
            module.forward = types.MethodType(norm, module)


@pytest.mark.parametrize("first", [False, True])
def test_liger_in_the_same_run_wins_and_is_said(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "liger_kernel", raising=False)
    model = build()
    if first:
        _liger(model)
    report = hfpatch.apply(model, mode="training")
    assert layers_of(report) == (0 if first else 2)
    if not first:
        _liger(model)
    said = str(hfpatch.status(model))
    assert "liger_kernel" in said, said
    sys.modules.pop("liger_kernel", None)
