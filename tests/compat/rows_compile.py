"""torch.compile, export and the contexts that change what an operator does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from row import NOISE, Case, Row, forward, only
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

GROUP = "Compilers and contexts"
COMPILING = (
    "While a model is compiled the swapped modules hand over to their originals, which inductor "
    "fuses with their neighbours: the graph is the unpatched model's."
)
REGIONS = (
    "The compiled layers hand over to their originals, which inductor fuses with their neighbours; "
    "the modules outside of them are patched."
)

AUTOCAST = (
    "Fused blocks hand calls under autocast over to their originals, with one warning; the modules "
    "outside of them, and their gated MLPs, run their own kernels."
)
TWO_DTYPES = (
    "Under autocast the gated norm has tensors of two dtypes (Bamba: a bf16 gate of an fp32 input; "
    "Qwen3-Next: an fp32 weight, for a result in bf16): such calls are handed back, with one "
    "warning; its kernel takes one dtype."
)


def compiled(**settings: Any) -> Callable[[Case, Any], Any]:
    def do(case: Case, model: nn.Module) -> nn.Module:
        return torch.compile(model, **({"backend": "eager"} | settings))

    return do


def compiled_in_place(case: Case, model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def repeated_blocks(case: Case, model: nn.Module) -> nn.Module:
    model.compile_repeated_blocks(backend="eager")
    return model


def regions(case: Case, model: nn.Module) -> nn.Module:
    from accelerate.utils import compile_regions

    return compile_regions(model, backend="eager")


def every_layer(case: Case, model: nn.Module) -> nn.Module:
    """`compile` on each layer of each list, in place."""
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for layer in module:
                layer.compile(backend="eager")
    return model


def two_sizes(case: Case, model: nn.Module) -> Any:
    """A second call with another batch size."""
    first = forward(case, model)
    inputs = {k: _halved(v) for k, v in case.inputs().items()}
    with torch.no_grad():
        return first, case.output(model(**inputs))


def _halved(value: Any) -> Any:
    batched = isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == 2
    return torch.cat((value, value)) if batched else value


def exported(case: Case, model: nn.Module) -> Any:
    """The exported program's own output: it must hold no operator of ours."""
    with torch.no_grad():
        program = torch.export.export(model, (), case.inputs(), strict=False)
        targets = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
        result = program.module()(**case.inputs())
    return case.output(result), sorted(t for t in targets if "hfpatch" in t)


def eager_and_compiled(case: Case, model: nn.Module) -> Any:
    """The same model compiled and called without: the second uses the kernels."""
    compiled_model = torch.compile(model, backend="eager")
    with torch.no_grad():
        return case.output(compiled_model(**case.inputs())), forward(case, model)


def in_context(make: Callable[[], Any]) -> Callable[[Case, Any], Any]:
    def run(case: Case, model: nn.Module) -> Any:
        with make():
            output = case.output(model(**case.inputs()))
        return output.clone()

    return run


def autocast(dtype: torch.dtype) -> Callable[[], Any]:
    def make() -> Any:
        stack = torch.autocast("cpu", dtype)
        return _Both(torch.no_grad(), stack)

    return make


class _Both:
    def __init__(self, *contexts: Any) -> None:
        self.contexts = contexts

    def __enter__(self) -> None:
        for c in self.contexts:
            c.__enter__()

    def __exit__(self, *exc: Any) -> None:
        for c in reversed(self.contexts):
            c.__exit__(*exc)


def functional(case: Case, model: nn.Module) -> Any:
    """`torch.func.functional_call` with other parameters."""
    state = {k: v * 0.9 for k, v in model.named_parameters()}
    with torch.no_grad():
        result = torch.func.functional_call(model, state, (), case.inputs())
    return case.output(result)


def embedded(case: Case, model: Any) -> tuple[str, torch.Tensor, dict[str, Any]]:
    """The name and value of the input that derivatives are taken by, and the others."""
    inputs = case.inputs()
    if "input_ids" not in inputs:
        name = "sample" if "sample" in inputs else "hidden_states"
        return name, inputs.pop(name), inputs
    ids = inputs.pop("input_ids")
    return "inputs_embeds", model.get_input_embeddings()(ids).detach(), inputs


def vmapped(case: Case, model: nn.Module) -> Any:
    """A batch of batches; and a plain call, which must not meet what was kept of it."""
    name, x, rest = embedded(case, model)

    def call(x: torch.Tensor) -> torch.Tensor:
        return case.output(model(**rest, **{name: x}))

    with torch.no_grad():
        return torch.func.vmap(call)(torch.stack([x, x * 0.5])), call(x * 0.7)


def functional_gradient(case: Case, model: nn.Module) -> Any:
    name, x, rest = embedded(case, model)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return case.output(model(**rest, **{name: x})).pow(2).mean()

    with sdpa_kernel(SDPBackend.MATH):
        return torch.func.grad(loss)(x)


def forward_mode(case: Case, model: nn.Module) -> Any:
    name, x, rest = embedded(case, model)

    def call(x: torch.Tensor) -> torch.Tensor:
        return case.output(model(**rest, **{name: x}))

    with sdpa_kernel(SDPBackend.MATH):
        return torch.func.jvp(call, (x,), (torch.sin(3 * x),))


def traced(case: Case, model: nn.Module) -> Any:
    """The trace must load where hfpatch is not."""
    inputs = case.inputs()

    class Call(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self) -> torch.Tensor:
            return case.output(self.model(**inputs))

    with torch.no_grad():
        trace = torch.jit.trace(Call(), (), check_trace=False)
        return trace(), "hfpatch" in str(trace.inlined_graph)


def compiled_and_restored(case: Case, model: nn.Module) -> Any:
    """Compiled as it is, then restored, then patched again: the compiled model goes on."""
    import hfpatch

    patched = bool(hfpatch.status(model).swaps)
    compiled_model = torch.compile(model, backend="eager")
    outputs = [forward(case, compiled_model)]
    if patched:
        hfpatch.restore(model)
    outputs.append(forward(case, compiled_model))
    if patched:
        hfpatch.apply(compiled_model)
    return [*outputs, forward(case, compiled_model), forward(case, model)]


NO_REPEATED = "Its class has no `compile_repeated_blocks` (it is diffusers')."
TRANSFORMED = "The transforms of `torch.func` know PyTorch's operators: such calls are handed back."
#: Gradients pass the model twice: four times the noise of a forward.
GRADIENT_NOISE = 4e-5
ONE_FAMILY = (
    "Tested on other families: the captured graph is the unpatched model's, as the first row "
    "shows, and what a backend makes of it cannot differ."
)


def _compiled_row(title: str, *steps: Any, **settings: Any) -> Row:
    why = {"original": COMPILING, "partly": REGIONS}
    return Row(GROUP, title, *steps, thin=True, why=why, **settings)


ROWS = (
    _compiled_row("`torch.compile(model, fullgraph=True)`", compiled(fullgraph=True)),
    _compiled_row(
        "`torch.compile(model)`, AOTAutograd",
        compiled(backend="aot_eager"),
        unless=only("ltx llama", ONE_FAMILY),
    ),
    _compiled_row(
        "`torch.compile(model)`, inductor",
        compiled(backend="inductor"),
        unless=only("bert", ONE_FAMILY),
        generated=True,
    ),
    _compiled_row(
        "`torch.compile(dynamic=True)`, two batch sizes", compiled(dynamic=True), two_sizes
    ),
    _compiled_row("`model.compile()`", compiled_in_place),
    _compiled_row(
        "`model.compile_repeated_blocks()`",
        repeated_blocks,
        unless=only("denoiser", NO_REPEATED),
    ),
    _compiled_row(
        "regional compilation (`accelerate.utils.compile_regions`)",
        regions,
        unless=lambda c: (
            "accelerate's function fails on this class, patched or not."
            if c.name == "sd15-unet"
            else None
        ),
    ),
    _compiled_row("`layer.compile()` of every layer", every_layer),
    Row(
        GROUP, "compiled, and called without as well", run=eager_and_compiled, forwards=1, thin=True
    ),
    Row(
        GROUP, "compiled, restored, patched again", run=compiled_and_restored, forwards=1, thin=True
    ),
    _compiled_row("`torch.export.export`", run=exported, lasting=False),
    Row(
        GROUP,
        "`torch.jit.trace`",
        run=traced,
        lasting=False,
        why={"original": "The trace is the unpatched model's, so that it loads without hfpatch."},
    ),
    Row(GROUP, "`torch.inference_mode()`", run=in_context(torch.inference_mode), forwards=1),
    Row(
        GROUP,
        "`torch.autocast(dtype=torch.bfloat16)`",
        run=in_context(autocast(torch.bfloat16)),
        forwards=1,
        noise=NOISE[torch.bfloat16],
        why={"partly": AUTOCAST, "bamba:partly": TWO_DTYPES, "qwen3-next:partly": TWO_DTYPES},
    ),
    Row(GROUP, "`torch.func.functional_call`", run=functional, forwards=1),
    Row(GROUP, "`torch.func.vmap`, and a call without", run=vmapped, forwards=1),
    Row(
        GROUP,
        "`torch.func.grad`",
        run=functional_gradient,
        mode="training",
        noise=GRADIENT_NOISE,
        why={"original": TRANSFORMED},
    ),
    Row(GROUP, "`torch.func.jvp`", run=forward_mode, why={"original": TRANSFORMED}),
    Row(
        GROUP,
        "`apply(model, cuda_graphs=True)`",
        unless=only("", "CUDA graphs need a GPU, and are tested there by tests/gpu."),
    ),
)
