"""Training: gradients, checkpointing, optimizers, Accelerator, Trainer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import trainer
from row import NOISE, Case, Row, forward, only
from torch import nn

GROUP = "Training"
RECORDED = (
    'In the default `mode="inference"` calls that autograd records are computed by the original, '
    'or by its formula on PyTorch\'s operators; `mode="training"` has kernels with gradients.'
)
PARTS = 'Fused blocks have no gradient: in `mode="training"` their parts that have one are patched.'
NOTHING = "None of its modules has a kernel with a gradient that gains anything over PyTorch's own."
#: Gradients pass the model twice, and sums over a batch follow: twice the noise of a forward.
GRADIENT_NOISE = 4 * NOISE[torch.float32]


def loss_of(case: Case, model: nn.Module, inputs: dict[str, Any] | None = None) -> torch.Tensor:
    return case.output(model(**(inputs or case.inputs()))).float().pow(2).mean()


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Parameters, gradients and mode come back afterwards."""
    state = {k: v.detach().clone() for k, v in model.named_parameters()}
    wanted = {k: v.requires_grad for k, v in model.named_parameters()}
    modes = {p: m.training for p, m in model.named_modules()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.grad = None
                p.requires_grad_(wanted[name])
                p.copy_(state[name])
        for path, module in model.named_modules():
            module.training = modes[path]


def gradients(case: Case, model: nn.Module) -> Any:
    """Loss, and every parameter's gradient."""
    with as_it_was(model):
        model.requires_grad_(True)
        loss = loss_of(case, model)
        loss.backward()
        grads = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
        return loss.detach(), _as_one(grads)


def _as_one(grads: dict[str, torch.Tensor]) -> tuple[list[str], torch.Tensor]:
    """The names, and all gradients as one vector: some are no more than rounding noise."""
    return sorted(grads), torch.cat([grads[k].flatten() for k in sorted(grads)])


def input_gradient(case: Case, model: nn.Module) -> Any:
    """Parameters frozen, as in guidance by gradients or prompt tuning."""
    with as_it_was(model):
        model.requires_grad_(False)
        inputs = case.inputs()
        if "input_ids" in inputs:
            ids = inputs.pop("input_ids")
            name, x = "inputs_embeds", model.get_input_embeddings()(ids).detach()
        else:
            name = "sample" if "sample" in inputs else "hidden_states"
            x = inputs[name]
        x = x.clone().requires_grad_(True)
        loss = loss_of(case, model, inputs | {name: x})
        (grad,) = torch.autograd.grad(loss, x)
        return loss.detach(), grad


def checkpointing(case: Case, model: nn.Module) -> nn.Module:
    if case.column.is_denoiser:
        model.enable_gradient_checkpointing()
    else:
        model.gradient_checkpointing_enable()
    return model


def gradients_in_train_mode(case: Case, model: nn.Module) -> Any:
    """Checkpointing runs in `train()` only; dropout draws the same numbers again."""
    with as_it_was(model):
        model.train().requires_grad_(True)
        torch.manual_seed(1)
        loss = loss_of(case, model)
        loss.backward()
        grads = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
        return loss.detach(), _as_one(grads)


def train_and_eval(case: Case, model: nn.Module) -> Any:
    """`train()`, a call with dropout from a seed, `eval()`, a call."""
    model.train()
    torch.manual_seed(1)
    first = forward(case, model)
    model.eval()
    return first, forward(case, model)


def accumulated(case: Case, model: nn.Module) -> Any:
    """Two optimizer steps of two accumulated batches, then a call."""
    with as_it_was(model):
        model.requires_grad_(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        losses = []
        for step in range(4):
            loss = loss_of(case, model) / 2
            loss.backward()
            losses.append(loss.detach())
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        return torch.stack(losses), forward(case, model)


def frozen_but(case: Case, model: nn.Module) -> Any:
    """Only norms train: gradients must reach them through frozen layers."""
    with as_it_was(model):
        for name, p in model.named_parameters():
            p.requires_grad_("norm" in name)
        if not any(p.requires_grad for p in model.parameters()):
            next(model.parameters()).requires_grad_(True)
        loss = loss_of(case, model)
        loss.backward()
        grads = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
        return loss.detach(), _as_one(grads)


def _steps(case: Case, mixed: str) -> int:
    return 50 if mixed == "no" and case.column.name in ("llama", "bert") else 5


def accelerated(mixed: str) -> Callable[[Case, Any], Any]:
    def run(case: Case, model: nn.Module) -> Any:
        """The losses of `Accelerator` with AdamW and accumulation."""
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        held = model.__dict__.get("forward")
        accelerator = Accelerator(cpu=True, mixed_precision=mixed, gradient_accumulation_steps=2)
        with as_it_was(model):
            model.train().requires_grad_(True)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            prepared, optimizer = accelerator.prepare(model, optimizer)
            torch.manual_seed(1)
            losses = []
            for _ in range(_steps(case, mixed)):
                with accelerator.accumulate(prepared):
                    loss = loss_of(case, prepared)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
            accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        model.__dict__.pop("forward", None)
        # with it the next Accelerator returns the model as it is, and nothing runs under autocast
        model.__dict__.pop("_is_accelerate_prepared", None)
        if held is not None:
            model.__dict__["forward"] = held
        return torch.stack(losses)

    return run


def trained(case: Case, model: nn.Module) -> Any:
    """The losses that `Trainer` logs in 50 steps."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            result = self.model(input_ids=input_ids)
            logits = case.output(result).float()
            width = logits.shape[-1]
            loss = nn.functional.cross_entropy(logits.reshape(-1, width), labels.flatten() % width)
            return {"loss": loss, "logits": logits}

    g = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 199, (8, 12), generator=g)
    rows = [{"input_ids": i, "labels": i} for i in ids]
    with as_it_was(model):
        model.requires_grad_(True)
        steps = trainer.logged(WithLoss(), rows, case.path("trainer"), 50)
    return torch.tensor([e["loss"] for e in steps])


#: 50 steps of AdamW amplify the rounding noise of the first; a curve that is wrong differs by 1.
CURVE_NOISE = 1e-3


def _training(title: str, do: Any, run: Any, **settings: Any) -> Row:
    why = {"original": NOTHING, "partly": PARTS}
    return Row(
        GROUP,
        title,
        do,
        run,
        mode="training",
        why=why | settings.pop("why", {}),
        noise=settings.pop("noise", GRADIENT_NOISE),
        **settings,
    )


def second_derivatives(case: Case, model: nn.Module) -> Any:
    """A gradient penalty: the square of the input's gradient, by every parameter."""
    from rows_compile import embedded
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with as_it_was(model), sdpa_kernel(SDPBackend.MATH):
        name, x, rest = embedded(case, model)
        model.requires_grad_(True)
        x.requires_grad_(True)
        loss = loss_of(case, model, rest | {name: x})
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (1e3 * grad.pow(2).sum()).backward()
        grads = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
        return grad.detach(), _as_one(grads)


def data_parallel(case: Case, model: nn.Module) -> Any:
    """`DistributedDataParallel` in a group of one process.

    Gloo's group joins its threads when it is freed, and holds the interpreter's lock that they may
    be waiting for: a run hung there. So it never is freed.
    """
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{case.path('meeting')}", rank=0, world_size=1
    )
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
    try:
        with as_it_was(model):
            model.requires_grad_(True)
            wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
            loss = loss_of(case, wrapped)
            loss.backward()
            grads = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
            return loss.detach(), _as_one(grads)
    finally:
        dist.destroy_process_group()


def _same(case: Case, model: Any) -> Any:
    return model


ROWS = (
    Row(
        GROUP,
        'gradients, `mode="inference"`',
        run=gradients,
        why={"original": RECORDED, "partly": RECORDED},
        noise=GRADIENT_NOISE,
    ),
    _training('gradients, `mode="training"`', _same, gradients),
    _training("gradient of the input, parameters frozen", _same, input_gradient),
    _training("only the norms trained", _same, frozen_but),
    _training("gradient checkpointing", checkpointing, gradients_in_train_mode),
    _training(
        "second derivatives (`create_graph=True`)",
        _same,
        second_derivatives,
        # a sum over products of two gradients
        noise=4 * GRADIENT_NOISE,
    ),
    Row(GROUP, "`train()` with dropout and `eval()`", run=train_and_eval),
    _training("gradient accumulation", _same, accumulated),
    _training("`DistributedDataParallel`", _same, data_parallel),
    _training(
        "`Accelerator`, 50 steps (5 where models are larger)",
        _same,
        accelerated("no"),
        noise=CURVE_NOISE,
        slow=True,
    ),
    _training(
        '`Accelerator(mixed_precision="bf16")`',
        _same,
        accelerated("bf16"),
        slow=True,
        noise=NOISE[torch.bfloat16],
    ),
    _training(
        "`Trainer`, 50 steps",
        _same,
        trained,
        noise=CURVE_NOISE,
        slow=True,
        unless=only(
            "llama bert", "Tested on Llama and BERT; `Accelerator` above trains every family."
        ),
    ),
)
