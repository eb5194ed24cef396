"""What `hfpatch bench model` runs: a model or a pipeline, its inputs, and what a call of it is."""

from __future__ import annotations

import argparse
import copy
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hfpatch import loading
from hfpatch.check import dtype_of, seeded
from hfpatch.inputs import Inputs, NoInputs, Sizes, cast, sample_inputs
from hfpatch.inputs.of_pipelines import denoiser_of, pipeline_inputs

#: Sizes by the flag that asks for them.
FLAGS = {
    "length": "--seq-len",
    "height": "--height",
    "width": "--width",
    "frames": "--num-frames",
}


@dataclass
class Subject:
    """One model or pipeline.

    Attributes:
        model: what `hfpatch.apply` takes.
        inputs: of a forward; None for a pipeline.
        shapes: of what goes in, by name.
        call: one call, as it is timed.
        compared: the call whose outputs are compared: a forward where `call` generates.
        count, unit: what a call gets done: so many tokens, steps or calls.
        twin: of a pipeline: its outputs by a copy in another dtype, from the same latents.
    """

    title: str
    model: Any
    device: torch.device
    dtype: torch.dtype
    inputs: Inputs | None
    shapes: dict[str, Any]
    call: Callable[[], Any]
    compared: Callable[[], Any]
    count: int
    unit: str
    twin: Callable[[torch.dtype], Any] | None = None

    def compiled_modules(self) -> list[nn.Module]:
        """What torch.compile is given: the model, of a pipeline the one that takes the steps."""
        return [self.model if isinstance(self.model, nn.Module) else denoiser_of(self.model)]


def load(args: argparse.Namespace) -> Subject:
    """The model that the command line names, with inputs of the sizes that it names.

    Raises:
        ValueError: there is no such model, or no inputs can be made; says what to do.
    """
    sizes = Sizes(
        {
            name: value
            for name, value in (
                ("length", args.seq_len),
                ("height", args.height),
                ("width", args.width),
                ("frames", args.num_frames),
            )
            if value is not None
        }
    )
    given: Inputs | None = None
    if ".py:" in args.model:
        title, model, given = _from_function(args)
    else:
        path = Path(args.model)
        title = path.resolve().name if path.is_dir() else loading.title(args.model)
        args.model = loading.located(args, weights=not args.random_weights)
        parts, pipeline = loading.models(args)
        if pipeline is not None:
            model = pipeline
        elif len(parts) == 1:
            model = parts[0][1]
        else:
            names = ", ".join(name for name, _ in parts)
            raise ValueError(
                f"`{title}`: its pipeline could not be built here; measure a part of it: "
                f"--subfolder with one of {names}"
            )
    try:
        if isinstance(model, nn.Module):
            found = _of_model(title, model.eval(), given, sizes, args)
        else:
            found = _of_pipeline(title, model, sizes, args)
    except NoInputs as e:
        raise ValueError(
            f"{e}. Name a function that returns `(model, inputs)` instead: FILE.py:function"
        ) from e
    if unused := sizes.unused():
        raise ValueError(
            f"{FLAGS[unused[0]]}: the inputs of `{title}` have no such size; leave it out"
        )
    return found


def _from_function(args: argparse.Namespace) -> tuple[str, Any, Inputs | None]:
    """The model that a function of the user's returns, alone or as `(model, inputs)`."""
    path, _, name = args.model.rpartition(":")
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"`{args.model}`: no such file `{path}`; expected FILE.py:function")
    if args.subfolder:
        raise ValueError(f"--subfolder {args.subfolder}: `{args.model}` returns one model")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"`{path}` cannot be imported; expected a Python file")
    module = importlib.util.module_from_spec(spec)
    with loading.explained(args.model):
        spec.loader.exec_module(module)
        function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"`{path}` has no function `{name}`")
    with loading.explained(args.model):
        returned = function()
    if isinstance(returned, tuple) and len(returned) != 2:
        raise ValueError(
            f"`{args.model}` returned a tuple of {len(returned)}: expected a model, or "
            "`(model, inputs)` with a dict of the forward's arguments"
        )
    model, inputs = returned if isinstance(returned, tuple) else (returned, None)
    if not (isinstance(model, nn.Module) or hasattr(model, "components")):
        raise ValueError(
            f"`{args.model}` returned a {type(model).__name__}: expected a `torch.nn.Module`, a "
            "diffusers pipeline, or `(model, inputs)` with a dict of the forward's arguments"
        )
    if inputs is not None and not isinstance(inputs, dict):
        raise ValueError(
            f"`{args.model}` returned inputs of type {type(inputs).__name__}: expected a dict of "
            "the forward's arguments"
        )
    return name, model.to(args.device), inputs


def _of_model(
    title: str, model: Any, given: Inputs | None, sizes: Sizes, args: argparse.Namespace
) -> Subject:
    if args.steps is not None:
        raise ValueError(f"--steps: `{title}` is no pipeline; leave it out")
    if given is None:
        inputs = sample_inputs(model, batch=args.batch_size or 1, sizes=sizes)
    else:
        inputs = pytree.tree_map(
            lambda v: v.to(args.device) if isinstance(v, torch.Tensor) else v, given
        )
        if args.batch_size is not None:
            raise ValueError(f"--batch-size: `{args.model}` returns its own inputs")
    ids = inputs.get("input_ids")

    def compared() -> Any:
        return model(**inputs)

    call, unit = compared, "calls"
    count = 1
    if isinstance(ids, torch.Tensor):
        count, unit = ids.numel(), "tokens"
    if args.new_tokens is not None:
        generate = getattr(model, "generate", None)
        if generate is None or not isinstance(ids, torch.Tensor):
            raise ValueError(
                f"--new-tokens {args.new_tokens}: `{type(model).__name__}` has no `generate` for "
                "a text; leave it out to time a forward"
            )
        new = args.new_tokens
        start = {k: v for k, v in inputs.items() if k not in ("use_cache", "decoder_input_ids")}
        start.setdefault("attention_mask", torch.ones_like(ids))

        def call() -> Any:
            return generate(
                **start, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
            )

        count, unit = ids.shape[0] * new, "new tokens"
    weight = next(iter(model.parameters()), None)
    device = torch.device(args.device) if weight is None else weight.device
    dtype = _dtype_of(inputs) if weight is None else dtype_of(model)
    shapes = {k: list(v.shape) for k, v in inputs.items() if isinstance(v, torch.Tensor)}
    return Subject(title, model, device, dtype, inputs, shapes, call, compared, count, unit)


def _dtype_of(inputs: Inputs) -> torch.dtype:
    """What a model without a parameter computes in."""
    tensors = (v for v in pytree.tree_leaves(inputs) if isinstance(v, torch.Tensor))
    return next((t.dtype for t in tensors if t.is_floating_point()), torch.get_default_dtype())


def _of_pipeline(title: str, pipeline: Any, sizes: Sizes, args: argparse.Namespace) -> Subject:
    if args.new_tokens is not None:
        raise ValueError(f"--new-tokens {args.new_tokens}: `{title}` is a pipeline; leave it out")
    inputs = pipeline_inputs(pipeline, batch=args.batch_size or 1, sizes=sizes)
    steps = 1
    if "num_inference_steps" in inputs:
        steps = inputs["num_inference_steps"] = args.steps or inputs["num_inference_steps"]
    denoiser = denoiser_of(pipeline)

    def call() -> Any:
        return pipeline(**inputs, **seeded(pipeline))

    dtype = dtype_of(denoiser)

    def twin(wide: torch.dtype) -> Any:
        latents: list[Any] = []  # another dtype would draw others
        prepare = pipeline.prepare_latents

        def noted(*args: Any, **kwargs: Any) -> Any:
            latents.append(prepare(*args, **kwargs))
            return latents[-1]

        pipeline.prepare_latents = noted
        try:
            call()
        finally:
            del pipeline.prepare_latents
        other = copy.deepcopy(pipeline).to(wide)
        other.prepare_latents = lambda *args, **kwargs: cast(latents[0], dtype, wide)
        return other(**cast(inputs, dtype, wide), **seeded(other))

    shapes = {
        k: list(v.shape) if isinstance(v, torch.Tensor) else v
        for k, v in inputs.items()
        if isinstance(v, (torch.Tensor, int)) and not isinstance(v, bool)
    }
    device = next(denoiser.parameters()).device
    return Subject(title, pipeline, device, dtype, None, shapes, call, call, steps, "steps", twin)
