"""What diffusers' training scripts do, with small models: adapters or the whole denoiser, trained
by accelerate, patched beside unpatched.

Noise prediction with the loss weighted by min-SNR (Stable Diffusion) and flow matching (FLUX, LTX,
Wan); gradient accumulation and checkpointing, bf16 with fp32 adapters, an EMA of the weights, a
picture by the trained model, adapters that are saved, loaded and fused.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import pytest
import small_pipelines
import torch
import zoo
from diffusers.optimization import get_scheduler
from diffusers.training_utils import (
    EMAModel,
    cast_training_params,
    compute_density_for_timestep_sampling,
    compute_loss_weighting_for_sd3,
    compute_snr,
)
from diffusers.utils import convert_state_dict_to_diffusers
from torch import Tensor, nn

import hfpatch

STEPS = 6  # calls of the model; every second one is a step of the optimizer
TARGETS = ["to_k", "to_q", "to_v", "to_out.0"]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


class Kind(NamedTuple):
    """One call of a script. adapted: only adapters are trained. more: of PEFT's configuration."""

    model: str
    mixed: str = "no"
    checkpointed: bool = False
    adapted: bool = True
    prediction: str = "epsilon"
    gamma: float | None = 5.0
    ema: bool = False
    more: dict[str, Any] = {}  # noqa: RUF012  # read only


KINDS = {
    "SD": Kind("sd", gamma=None),
    "SD, min-SNR, checkpointed": Kind("sd", checkpointed=True),
    "SD, velocity, bf16": Kind("sd", mixed="bf16", prediction="v_prediction"),
    "SD, bf16, checkpointed": Kind("sd", mixed="bf16", checkpointed=True),
    "SD, DoRA": Kind("sd", more={"use_dora": True}),
    "SD, feed-forward too": Kind("sd", more={"target_modules": [*TARGETS, "proj_in", "net.2"]}),
    "SD, whole, EMA": Kind("sd", adapted=False, ema=True),
    "SDXL": Kind("sdxl"),
    "FLUX": Kind("flux"),
    "FLUX, bf16, checkpointed": Kind("flux", mixed="bf16", checkpointed=True),
    "FLUX, whole": Kind("flux", adapted=False),
    "LTX": Kind("ltx", checkpointed=True),
    "LTX, bf16": Kind("ltx", mixed="bf16"),
    "Wan": Kind("wan"),
}


def denoiser(kind: Kind) -> tuple[Any, Any]:
    """(pipeline or None, model): its weights as a bf16 file has them, adapters not zero."""
    pipe = None if kind.model == "ltx" else getattr(small_pipelines, kind.model)()
    if pipe is None:
        model = zoo.ENTRIES["ltx"].build()
    else:
        model = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    model.to(BF16).float()
    if kind.adapted:
        peft = pytest.importorskip("peft")
        model.requires_grad_(False)
        torch.manual_seed(1)
        options = {"target_modules": TARGETS, "init_lora_weights": "gaussian", **kind.more}
        model.add_adapter(peft.LoraConfig(r=4, lora_alpha=4, **options))
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.05)
    if kind.mixed == "bf16" and kind.adapted:
        model.to(BF16)
        cast_training_params(model, dtype=torch.float32)
    if kind.checkpointed:
        model.enable_gradient_checkpointing()
    return pipe, model.train()


def weighted(loss: Tensor, weights: Tensor) -> Tensor:
    return (loss.mean(dim=tuple(range(1, loss.dim()))) * weights).mean()


def noise_loss(kind: Kind, pipe: Any, model: Any, dtype: torch.dtype, g: torch.Generator) -> Tensor:
    """Of latents that are noised, by the noise or the velocity, weighted by min-SNR."""
    schedule = diffusers.DDPMScheduler(prediction_type=kind.prediction)
    with torch.no_grad():
        pixels = torch.rand(2, 3, 16, 16, generator=g) * 2 - 1
        latents = pipe.vae.encode(pixels).latent_dist.sample(g) * pipe.vae.config.scaling_factor
    noise = torch.randn(latents.shape, generator=g)
    steps = torch.randint(1000, (2,), generator=g)
    inputs: dict[str, Any] = {"encoder_hidden_states": torch.randn(2, 7, 48, generator=g).to(dtype)}
    if kind.model == "sdxl":
        inputs["added_cond_kwargs"] = {
            "text_embeds": torch.randn(2, 32, generator=g).to(dtype),
            "time_ids": torch.tensor([[16.0, 16, 0, 0, 16, 16]] * 2),
        }
    noised = schedule.add_noise(latents, noise, steps).to(dtype)
    found = model(noised, steps, **inputs, return_dict=False)[0]
    is_velocity = kind.prediction == "v_prediction"
    target = schedule.get_velocity(latents, noise, steps) if is_velocity else noise
    losses = nn.functional.mse_loss(found.float(), target.float(), reduction="none")
    if kind.gamma is None:
        return losses.mean()
    snr = compute_snr(schedule, steps)
    weights = torch.minimum(snr, torch.full_like(snr, kind.gamma)) / (snr + is_velocity)
    return weighted(losses, weights)


def flow_loss(kind: Kind, pipe: Any, model: Any, dtype: torch.dtype, g: torch.Generator) -> Tensor:
    """Of latents on their way to noise, by the direction."""
    entry = zoo.ENTRIES["ltx" if kind.model == "ltx" else "wan" if kind.model == "wan" else "flux"]
    inputs = dict(entry.sample(model, g))
    if kind.model == "flux":
        inputs["encoder_hidden_states"] = torch.randn(2, 7, 32, generator=g)
        inputs["pooled_projections"] = torch.randn(2, 32, generator=g)
    if kind.model == "wan":
        text = model.config.text_dim
        inputs["hidden_states"] = torch.randn(2, model.config.in_channels, 2, 4, 4, generator=g)
        inputs["encoder_hidden_states"] = torch.randn(2, 6, text, generator=g)
    latents = inputs["hidden_states"]
    noise = torch.randn(latents.shape, generator=g)
    density = compute_density_for_timestep_sampling("logit_normal", 2, 0.0, 1.0, generator=g)
    sigma = density.view(-1, *[1] * (latents.dim() - 1))
    inputs["hidden_states"] = (1 - sigma) * latents + sigma * noise
    inputs["timestep"] = density if kind.model == "flux" else (density * 1000).long()
    floats = {k: v.to(dtype) for k, v in inputs.items() if is_float(v)}
    found = model(**inputs | floats, return_dict=False)[0]
    weighting = compute_loss_weighting_for_sd3("none", density)
    losses = (found.float() - (noise - latents)).square()
    return weighted(losses, weighting)


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class Trained(NamedTuple):
    losses: list[float]
    gradients: dict[str, Tensor]  # those of the first step of the optimizer
    weights: dict[str, Tensor]
    averages: list[Tensor]
    picture: Tensor | None
    pipe: Any
    model: Any
    report: Any


def trained(kind: Kind, patched: bool) -> Trained:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    pipe, model = denoiser(kind)
    plain = model
    report = hfpatch.apply(model, mode="training") if patched else None
    parameters = [p for p in model.parameters() if p.requires_grad]
    accelerator = Accelerator(cpu=True, mixed_precision=kind.mixed, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=STEPS)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    average = None
    if kind.ema:
        average = EMAModel(
            plain.parameters(), decay=0.9, model_cls=type(plain), model_config=plain.config
        )
    dtype = BF16 if kind.mixed == "bf16" and kind.adapted else torch.float32
    loss_of = noise_loss if kind.model.startswith("sd") else flow_loss
    losses, gradients = [], {}
    for i in range(STEPS):
        with accelerator.accumulate(model):
            g = torch.Generator().manual_seed(i)
            loss = loss_of(kind, pipe, model, dtype, g)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                if not gradients:
                    gradients = {
                        n: p.grad.clone() for n, p in plain.named_parameters() if p.grad is not None
                    }
                accelerator.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and average is not None:
            average.step(plain.parameters())
        losses.append(loss.item())
    averages: list[Tensor] = []
    if average is not None:
        averages = [p.clone() for p in average.shadow_params]
    weights = {n: p.detach().clone() for n, p in plain.named_parameters() if p.requires_grad}
    model = accelerator.unwrap_model(model)
    assert model is plain
    picture = drawn(pipe) if kind.model == "sd" and kind.mixed == "no" else None
    return Trained(losses, gradients, weights, averages, picture, pipe, model, report)


def drawn(pipe: Any) -> Tensor:
    pipe.set_progress_bar_config(disable=True)
    g = torch.Generator().manual_seed(3)
    text, other = (torch.randn(1, 7, 48, generator=g) for _ in range(2))
    with torch.no_grad():
        return pipe(
            prompt_embeds=text,
            negative_prompt_embeds=other,
            height=16,
            width=16,
            num_inference_steps=2,
            output_type="pt",
            generator=g,
        ).images


def relative(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """How far all of one are from all of the other."""
    assert ours.keys() == theirs.keys() and ours
    off = sum((ours[n].double() - t.double()).square().sum() for n, t in theirs.items())
    return float((off / sum(t.double().square().sum() for t in theirs.values())) ** 0.5)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.exhaustive if "DoRA" in n else ()) for n in KINDS],
)
def test_a_script_trains_as_before(name: str) -> None:
    kind = KINDS[name]
    ours, theirs = trained(kind, True), trained(kind, False)
    assert ours.report.swaps
    left = {s.reason for s in ours.report.skips if s.class_name.endswith("Block")}
    assert all("no backward" in reason for reason in left), left
    assert len(set(theirs.losses)) == STEPS
    if kind.mixed == "no":
        assert ours.losses == pytest.approx(theirs.losses, rel=2e-4)
        assert relative(ours.gradients, theirs.gradients) <= 2e-5
        assert relative(ours.weights, theirs.weights) <= 1e-4
        for a, b in zip(ours.averages, theirs.averages, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    else:
        truth = trained(kind._replace(mixed="no"), False)
        off = [relative(t.gradients, truth.gradients) for t in (ours, theirs)]
        assert off[1] > 0
        assert off[0] <= 1.25 * off[1], off
        assert ours.losses == pytest.approx(theirs.losses, rel=3e-2)
    assert bool(theirs.averages) == kind.ema
    if ours.picture is not None and theirs.picture is not None:
        torch.testing.assert_close(ours.picture, theirs.picture, rtol=1e-3, atol=1e-3)
    hfpatch.restore(ours.model)
    assert not hfpatch.status(ours.model).swaps
    ours.model.load_state_dict(theirs.model.state_dict())
    if ours.picture is not None:
        assert torch.equal(drawn(ours.pipe), drawn(theirs.pipe))


@pytest.mark.parametrize("name", ["SD", "FLUX"])
def test_adapters_are_saved_loaded_and_fused(name: str, tmp_path: Path) -> None:
    """As a script ends: what a patched model writes goes into another pipeline, patched or not."""
    from peft import get_peft_model_state_dict

    run = trained(KINDS[name], True)
    part = "unet" if hasattr(run.pipe, "unet") else "transformer"
    state = get_peft_model_state_dict(run.model)
    if part == "unet":
        state = convert_state_dict_to_diffusers(state)
    run.pipe.save_lora_weights(str(tmp_path), **{f"{part}_lora_layers": state})
    found = []
    for patched in (False, True):
        pipe = copy.copy(getattr(small_pipelines, KINDS[name].model)())
        model = getattr(pipe, part)
        model.to(BF16).float()
        if patched:
            hfpatch.apply(model)
        pipe.load_lora_weights(str(tmp_path))
        (adapter,) = model.peft_config
        loaded = get_peft_model_state_dict(model, adapter_name=adapter)
        own = get_peft_model_state_dict(run.model)
        assert loaded.keys() == own.keys()
        assert all(torch.equal(loaded[k], own[k]) for k in own)
        if part == "unet":
            before = drawn(pipe)
            pipe.fuse_lora()
            fused = drawn(pipe)
            torch.testing.assert_close(fused, before, rtol=1e-3, atol=2e-3)
            pipe.unfuse_lora()
            pipe.unload_lora_weights()
            found.append(torch.stack([before, fused, drawn(pipe)]))
        else:
            pipe.fuse_lora()
            found.append(torch.cat([p.flatten() for p in model.state_dict().values()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=2e-3)
    if part == "unet":
        assert not torch.allclose(found[0][0], found[0][2], atol=1e-4), "the adapters did nothing"
