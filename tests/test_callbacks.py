"""hfpatch for the length of a training, and of a generation."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch.utils.data import Dataset

import hfpatch
from hfpatch.announce import logger

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))


@pytest.fixture
def log() -> Any:
    """What the logger `hfpatch` gets at "info"."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    hfpatch.set_verbosity("info")
    yield records
    logger.removeHandler(handler)
    logger.setLevel(level)


# ------------------------------------------------------------------------------ Trainer


class Tokens(Dataset):  # type: ignore[type-arg]
    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.fails and index == 3:
            raise RuntimeError("a bad sample")
        ids = torch.arange(8) + index
        return {"input_ids": ids, "labels": ids}


def trainer_of(model: Any, folder: Path, callback: Any, fails: bool = False) -> Any:
    import transformers

    class Watch(transformers.TrainerCallback):
        swaps = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.swaps = len(hfpatch.status(kwargs["model"]).swaps)

    arguments = transformers.TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to="none",
        save_steps=2, disable_tqdm=True, seed=0,
    )  # fmt: skip
    watch = Watch()
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Tokens(fails), callbacks=[callback, watch]
    )
    trainer.watch = watch
    return trainer


def test_a_training_is_patched_logged_and_restored(tmp_path: Path, log: list[str]) -> None:
    model = zoo.ENTRIES["llama"].build()
    before = [dict(m.__dict__) for m in model.modules()]
    callback = hfpatch.callbacks.TrainerCallback(exclude="LlamaMLP")
    trainer = trainer_of(model, tmp_path, callback)
    trainer.train()
    assert callback.report.plan.mode == "training"
    assert trainer.watch.swaps == len(callback.report.swaps) > 0
    assert not hfpatch.status(model).swaps
    for module, old in zip(model.modules(), before, strict=True):
        assert module.__dict__.get("forward") is old.get("forward")
    assert [line for line in log if "swapped" in line] == [callback.report.headline]
    assert log[-1] == "restored after the training"
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    (entry,) = (e for e in state["log_history"] if "hfpatch_swapped" in e)
    assert entry == {
        "step": 0,
        "hfpatch_swapped": len(callback.report.swaps),
        "hfpatch_left_alone": len(callback.report.skips),
    }


def test_a_training_that_raises_is_made_good_by_the_next(tmp_path: Path) -> None:
    model = zoo.ENTRIES["llama"].build()
    callback = hfpatch.callbacks.TrainerCallback()
    with pytest.raises(RuntimeError, match="a bad sample"):
        trainer_of(model, tmp_path, callback, fails=True).train()
    assert hfpatch.status(model).swaps
    trainer_of(model, tmp_path, callback).train()
    assert not hfpatch.status(model).swaps


def test_a_model_that_was_patched_stays_so(tmp_path: Path) -> None:
    model = zoo.ENTRIES["llama"].build()
    report = hfpatch.apply(model, include="LlamaRMSNorm")
    trainer_of(model, tmp_path, hfpatch.callbacks.TrainerCallback()).train()
    after = hfpatch.status(model)
    assert {s.path for s in after.swaps} == {s.path for s in report.swaps}
    assert after.plan.mode == "inference"


# ------------------------------------------------------------------------------ diffusers


def pipeline() -> Any:
    from _ltx_random import build_pipeline

    pipe = build_pipeline(False, torch.device("cpu"), torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: Any, callback: Any, steps: int = 4) -> Any:
    embeds = torch.zeros(1, 8, 256)
    mask = torch.ones(1, 8)
    return pipe(
        prompt_embeds=embeds, prompt_attention_mask=mask, negative_prompt_embeds=embeds,
        negative_prompt_attention_mask=mask, height=32, width=32, num_frames=9,
        num_inference_steps=steps, callback_on_step_end=callback, output_type="latent",
        generator=torch.Generator().manual_seed(0),
    ).frames  # fmt: skip


def test_a_generation_is_patched_from_its_second_step(log: list[str]) -> None:
    from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback

    pipe, seen = pipeline(), []

    class Watch(PipelineCallback):
        tensor_inputs = ["latents"]  # noqa: RUF012

        def callback_fn(self, pipe: Any, step: int, time: Any, given: Any) -> Any:
            seen.append(len(hfpatch.status(pipe).swaps))
            return given

    plain = generate(pipe, None)
    callback = hfpatch.callbacks.PipelineCallback(exclude="vae.*")
    patched = generate(pipe, MultiPipelineCallbacks([Watch(), callback, Watch()]))
    count = len(callback.report.swaps)
    # before and after ours, at the end of each of four steps
    assert seen == [0, count, count, count, count, count, count, 0] and count > 0
    assert (patched - plain).abs().max() < 1e-4
    assert log == [callback.report.headline, "restored after the last step"]


def test_a_generation_that_is_cut_off(log: list[str]) -> None:
    pipe = pipeline()
    callback = hfpatch.callbacks.PipelineCallback()

    def cut(pipe: Any, step: int, time: Any, given: Any) -> Any:
        given = callback(pipe, step, time, given)
        if step == 1:
            raise KeyboardInterrupt
        return given

    with pytest.raises(KeyboardInterrupt):
        generate(pipe, cut)
    assert hfpatch.status(pipe).swaps
    callback.close()
    assert not hfpatch.status(pipe).swaps
    with pytest.raises(KeyboardInterrupt):
        generate(pipe, cut)
    generate(pipe, callback)
    assert not hfpatch.status(pipe).swaps


def test_one_step_is_left_alone() -> None:
    pipe = pipeline()
    callback = hfpatch.callbacks.PipelineCallback()
    callback(type("Pipe", (), {"num_timesteps": 1})(), 0, None, {})
    assert callback.report is None
    assert not hfpatch.status(pipe).swaps


def test_a_pipeline_that_does_not_say_how_many_steps_there_are() -> None:
    from diffusers import (
        ErnieImagePipeline,
        ErnieImageTransformer2DModel,
        FlowMatchEulerDiscreteScheduler,
    )

    small = ErnieImageTransformer2DModel(
        hidden_size=64, num_attention_heads=4, num_layers=1, ffn_hidden_size=96, in_channels=16,
        out_channels=16, text_in_dim=48, rope_axes_dim=(4, 6, 6),
    ).eval()  # fmt: skip
    pipe = ErnieImagePipeline(
        transformer=small, vae=None, text_encoder=None, tokenizer=None,
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip
    seen = []

    def generate(callback: Any) -> Any:
        def watched(pipe: Any, step: int, time: Any, given: Any) -> Any:
            given = callback(pipe, step, time, given)
            seen.append(len(hfpatch.status(pipe).swaps))
            return given

        return pipe(
            prompt_embeds=[torch.ones(5, 48)], negative_prompt_embeds=[torch.zeros(5, 48)],
            height=64, width=64, num_inference_steps=3, output_type="latent",
            generator=torch.Generator().manual_seed(0), callback_on_step_end=watched,
        ).images  # fmt: skip

    assert not hasattr(pipe, "num_timesteps")
    plain = generate(lambda pipe, step, time, given: given)
    callback = hfpatch.callbacks.PipelineCallback()
    patched = generate(callback)
    count = len(callback.report.swaps)
    assert seen == [0, 0, 0, count, count, 0] and count > 0
    assert (patched - plain).abs().max() < 1e-4
