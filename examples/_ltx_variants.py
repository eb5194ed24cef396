"""Ways to run LTX-Video, and what one generation with each of them takes."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import _ltx_attention
import numpy as np
import torch
from _common import now
from _ltx_profile import Counts, Recording
from _pictures import to_pixels

import hfpatch

NEGATIVE_PROMPT = "worst quality, inconsistent motion, blurry, jittery, distorted"
FPS = 24
PROMPT_TOKENS = 128
PROFILE_STEPS = 3  # the second is recorded: the first has values to compute once, the last ends


@dataclass(frozen=True)
class Variant:
    """How the pipeline runs. `attention`: another backend than the one that the rest has."""

    kernels: bool = False
    compiled: bool = False
    graphs: bool = False
    attention: str | None = None

    @property
    def name(self) -> str:
        parts = [
            word
            for word, chosen in (
                ("kernels", self.kernels),
                ("compile", self.compiled),
                ("graphs", self.graphs),
            )
            if chosen
        ]
        name = " + ".join(parts) or "eager"
        return f"{name}, {self.attention}" if self.attention else name

    @property
    def stem(self) -> str:
        """The name as a part of a file's."""
        return self.name.replace(" + ", "+").replace(", ", "-").strip("_")


EAGER, KERNELS = Variant(), Variant(kernels=True)


def chosen_variants(args: argparse.Namespace) -> list[Variant]:
    """What the flags ask for: one variant, or under --compare all that they name."""
    if not args.compare:
        return [Variant(args.optimized, args.compile, args.cuda_graphs)]
    variants = [EAGER]
    if args.compile:
        variants.append(Variant(compiled=True))
    variants.append(KERNELS)
    if args.compile:
        variants.append(Variant(kernels=True, compiled=True))
    if args.cuda_graphs:
        variants.append(Variant(kernels=True, graphs=True))
    if args.difference:
        variants.append(Variant(attention=args.difference))
    return variants


@contextmanager
def running(pipe: Any, variant: Variant, args: argparse.Namespace) -> Iterator[Any]:
    """The pipeline as this variant; yields hfpatch's report, None without the kernels."""
    model, report = pipe.transformer, None
    try:
        if variant.attention:
            _ltx_attention.use(model, variant.attention)
        if variant.kernels:
            report = hfpatch.apply(pipe, cuda_graphs=variant.graphs)
        if variant.compiled:
            model.compile(dynamic=False)
        yield report
    finally:
        if variant.compiled:
            model._compiled_call_impl = None  # what `Module.compile` sets
            torch.compiler.reset()
        hfpatch.restore(pipe)
        if variant.attention:
            _ltx_attention.use(model, args.attention_backend)
        gc.collect()  # so that the next one's peak memory is its own


# -------------------------------------------------------------------------------------------------
# One generation


class Clock:
    """Points in time. On a GPU they are events, so that the host need not wait at each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._started = now(device)
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def stop(self) -> tuple[float, list[float]]:
        """Seconds in all, once the device is done, and at each mark after the first."""
        total = now(self.device) - self._started
        first, *rest = self._marks
        if self.device.type == "cuda":
            return total, [first.elapsed_time(mark) / 1e3 for mark in rest]
        return total, [mark - first for mark in rest]


@dataclass(frozen=True)
class Generation:
    """One run of the pipeline; all times in seconds.

    Attributes:
        frames: uint8 [batch, frames, height, width, 3]; None if it was not decoded.
        latents: the denoised ones, fp32 on the CPU.
        seconds: from the call to the pixels in the host's memory.
        prepare_seconds: before the denoising loop: the text encoder and the first noise.
        steps: each denoising step, the scheduler's part included.
        decode_seconds: after the loop: the VAE and the copy to the host.
    """

    frames: np.ndarray | None
    latents: torch.Tensor
    seconds: float
    prepare_seconds: float
    steps: tuple[float, ...]
    decode_seconds: float

    @property
    def denoise_seconds(self) -> float:
        return sum(self.steps)


def prompt_arguments(pipe: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The prompt, for a pipeline without a text encoder as random embeddings that stand for it."""
    if pipe.text_encoder is not None:
        return {
            "prompt": [args.prompt] * args.batch_size,
            "negative_prompt": [NEGATIVE_PROMPT] * args.batch_size,
        }
    shape = (args.batch_size, PROMPT_TOKENS, pipe.transformer.config.caption_channels)
    arguments: dict[str, Any] = {}
    for prefix, text in (("", args.prompt), ("negative_", NEGATIVE_PROMPT)):
        generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
        embeds = torch.randn(shape, generator=generator)
        arguments[f"{prefix}prompt_embeds"] = embeds.to(args.device, args.dtype)
        arguments[f"{prefix}prompt_attention_mask"] = torch.ones(shape[:2], device=args.device)
    return arguments


def generate(
    pipe: Any,
    args: argparse.Namespace,
    label: str,
    steps: int,
    *,
    decode: bool = True,
    after_step: Callable[[int], None] = lambda _: None,
) -> Generation:
    """Run the pipeline once under a progress bar.

    Args:
        decode: whether the VAE makes frames of the latents.
        after_step: called with the number of each step, from 0, when it has been launched.
    """
    pipe.set_progress_bar_config(desc=label, unit="step")
    last: dict[str, torch.Tensor] = {}

    def on_step_end(_: Any, step: int, __: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        clock.mark()
        last.update(tensors)
        after_step(step)
        return tensors

    def progress_bar(*bar_args: Any, **bar_kwargs: Any) -> Any:
        clock.mark()  # the pipeline asks for it when the loop begins
        return type(pipe).progress_bar(pipe, *bar_args, **bar_kwargs)

    arguments = prompt_arguments(pipe, args)
    if pipe.vae.config.timestep_conditioning:  # LTX-Video 0.9.1 and later
        arguments |= {"decode_timestep": 0.05, "decode_noise_scale": 0.025}
    pipe.progress_bar = progress_bar
    clock = Clock(args.device)
    try:
        frames = pipe(
            **arguments,
            height=args.height,
            width=args.width,
            num_frames=args.num_frames,
            num_inference_steps=steps,
            guidance_scale=args.guidance_scale,
            frame_rate=FPS,
            generator=torch.Generator().manual_seed(args.seed),  # on the CPU: the same anywhere
            callback_on_step_end=on_step_end,
            output_type="pt" if decode else "latent",
        ).frames
        pixels = to_pixels(frames) if decode else None
        total, (loop, *ends) = clock.stop()
    finally:
        del pipe.progress_bar
    return Generation(
        pixels,
        last["latents"].float().cpu(),
        total,
        loop,
        tuple(end - start for start, end in zip([loop, *ends], ends, strict=False)),
        total - ends[-1],
    )


# -------------------------------------------------------------------------------------------------
# Measuring a variant


@dataclass(frozen=True)
class Measurement:
    """One variant.

    Attributes:
        runs: each generation.
        apply_seconds: what `hfpatch.apply` took; 0 without the kernels.
        first_step_seconds: the very first step of this variant, compilation included.
        peak_gib: most GPU memory that tensors held in a generation; None on a CPU.
        counts: of one denoising step; None if it was not profiled.
        report: hfpatch's, as a dict.
    """

    variant: Variant
    runs: tuple[Generation, ...]
    apply_seconds: float
    first_step_seconds: float
    peak_gib: float | None
    counts: Counts | None
    report: dict[str, Any] | None

    @property
    def generation(self) -> Generation:
        """The one of median time."""
        return sorted(self.runs, key=lambda run: run.seconds)[len(self.runs) // 2]

    @property
    def step_ms(self) -> float:
        """Median milliseconds of a step. The first, which fills caches, counts only alone."""
        steps = self.generation.steps
        return statistics.median(steps[1:] or steps) * 1e3

    @property
    def iterations_per_second(self) -> float:
        return len(self.generation.steps) / self.generation.denoise_seconds


def measure(
    pipe: Any,
    args: argparse.Namespace,
    variant: Variant,
    repeats: int,
    say: Callable[[object], None],
    files: list[Path],
) -> Measurement:
    """Warm up, generate, and count what a step launches (with --profile: also write it down)."""
    with running(pipe, variant, args) as report:
        if report is not None:
            say(f"\n{report}\n")
        first = None
        if args.warmup_iterations:
            steps = max(2, args.warmup_iterations)
            first = generate(pipe, args, f"{variant.name}, warm-up", steps).steps[0]
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(args.device)
        runs = tuple(generate(pipe, args, variant.name, args.steps) for _ in range(repeats))
        peak = None
        if args.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(args.device) / 2**30
        counts = None
        if args.compare or args.profile is not None:
            counts = profile_step(pipe, args, variant, files)
    return Measurement(
        variant,
        runs,
        report.plan.seconds if report is not None else 0.0,
        runs[0].steps[0] if first is None else first,
        peak,
        counts,
        report.to_dict() if report is not None else None,
    )


def once_more(pipe: Any, args: argparse.Namespace, measured: Measurement) -> Measurement:
    """With one more generation, after others had their turn."""
    with running(pipe, measured.variant, args):
        label = measured.variant.name
        generate(pipe, args, f"{label}, warm-up", max(2, args.warmup_iterations))
        run = generate(pipe, args, label, args.steps)
    return replace(measured, runs=(*measured.runs, run))


def profile_step(
    pipe: Any, args: argparse.Namespace, variant: Variant, files: list[Path]
) -> Counts:
    """What one denoising step does; with --profile, traces and tables of it and of the decoding."""
    step, decoding = Recording(args.device), Recording(args.device)

    def after_step(number: int) -> None:
        if number == 0:
            step.start()
        elif number == 1:
            step.stop()
        elif args.profile is not None:
            decoding.start()

    whole = args.profile is not None
    label = f"{variant.name}, profile"
    generate(pipe, args, label, PROFILE_STEPS, decode=whole, after_step=after_step)
    if whole:
        decoding.stop()
        stem = args.profile / variant.stem
        text = stem.with_name(f"{stem.name}.txt")
        text.write_text(
            step.table(f"{variant.name}, one denoising step")
            + "\n"
            + decoding.table(f"{variant.name}, decoding"),
            encoding="utf-8",
        )
        files += [
            step.save_trace(stem.with_name(f"{stem.name}.step.json")),
            decoding.save_trace(stem.with_name(f"{stem.name}.decode.json")),
            text,
        ]
    return step.counts()
