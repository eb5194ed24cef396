"""The cases of `sharded.Ranks`: FSDP2, tensor and context parallel, ZeRO-3's empty parameters.

Every case builds the same model twice from one seed: one stays plain, and the other is patched and
sharded in either order. Numbers must agree, kernels must run or a reason must be in the report, and
`restore` must give back the unpatched sharded model, to the bit.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import zoo
from sharded import Rank, blocks_of, case, close_to, full, kernels_run
from support.captured import captured
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import hfpatch
from hfpatch import swap
from hfpatch.regions.kind import runs_seen
from hfpatch.regions.offer import forget

Shard_ = Callable[[nn.Module, Rank], None]
ORDERS = ("patch first", "shard first")
MODES = ("inference", "training")


def build(name: str, rank: Rank) -> nn.Module:
    return zoo.ENTRIES[name].build().to(rank.device)


def inputs_of(name: str, rank: Rank, model: nn.Module, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    inputs = zoo.ENTRIES[name].inputs(model, generator=generator)
    return {k: v.to(rank.device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}


def even_inputs_of(name: str, rank: Rank, model: nn.Module) -> dict[str, Any]:
    """What context parallel takes: texts of an even length, no mask (diffusers fails on one)."""
    inputs = inputs_of(name, rank, model) | {"return_dict": False}
    text = inputs["encoder_hidden_states"]
    inputs["encoder_hidden_states"] = text[:, : text.shape[1] // 2 * 2]
    if "txt_ids" in inputs:
        inputs["txt_ids"] = inputs["txt_ids"][: text.shape[1] // 2 * 2]
    if "encoder_attention_mask" in inputs:
        inputs["encoder_attention_mask"] = None
    return inputs


def outputs(name: str, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    result = model(**inputs)
    return full(
        result[0] if inputs.get("return_dict") is False else zoo.ENTRIES[name].output(result)
    )


def patch(model: nn.Module, mode: str, order: str, shard: Shard_, rank: Rank) -> hfpatch.Report:
    if order == "patch first":
        report = hfpatch.apply(model, mode=mode)
        shard(model, rank)
        return report
    shard(model, rank)
    return hfpatch.apply(model, mode=mode)


def check(
    name: str,
    mode: str,
    order: str,
    shard: Shard_,
    rank: Rank,
    reason: str | None = None,
    inputs_for: Callable[..., dict[str, Any]] = inputs_of,
) -> nn.Module:
    """The whole of a case; `reason` must be in the report of a model that was sharded first."""
    plain, model, twin = (build(name, rank) for _ in range(3))
    shard(twin, rank)
    report = patch(model, mode, order, shard, rank)
    patched = bool(report.swaps)
    assert patched or reason is not None
    if reason is not None and order == "shard first":
        reasons = [s.reason for s in report.skips]
        reasons += [c.reason for c in hfpatch.status(model).plan.candidates]
        assert any(reason in r for r in reasons), reasons
    inputs = inputs_for(name, rank, plain)
    if mode == "inference":
        with torch.no_grad():
            with kernels_run(patched):
                ours = outputs(name, model, inputs)
            close_to(ours, outputs(name, plain, inputs))
    else:
        _check_gradients(name, plain, model, rank)
    assert bool(hfpatch.status(model).swaps) == patched
    hfpatch.restore(model)
    assert not hfpatch.status(model).swaps
    with torch.no_grad():
        with kernels_run(False):
            ours = outputs(name, model, inputs)
        theirs = outputs(name, twin, inputs)
        if rank.device.type == "cpu":
            assert torch.equal(ours, theirs), "not the original after restore"
        else:  # cuBLAS may pick another algorithm on a second call
            close_to(ours, theirs, "output after restore")
    return model


def _of_squares(name: str, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    return outputs(name, model, inputs).square().mean()


def _its_own(name: str, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    return model(**inputs, labels=inputs["input_ids"]).loss  # type: ignore[no-any-return]


def _check_gradients(
    name: str,
    plain: nn.Module,
    model: nn.Module,
    rank: Rank,
    loss_of: Callable[[str, nn.Module, dict[str, Any]], torch.Tensor] = _of_squares,
) -> None:
    """One training step: gradients equal those of the mean loss over the ranks' own batches."""
    data = _sharded_data(model)
    seeds = range(dist.get_world_size()) if data else [0]
    losses = [loss_of(name, plain, inputs_of(name, rank, plain, s)) for s in seeds]
    (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
    own = rank.index if data else 0
    # the head makes its logits where somebody watches operators, as `kernels_run` does
    with kernels_run() if loss_of is _of_squares else contextlib.nullcontext():
        loss = loss_of(name, model, inputs_of(name, rank, plain, own))
    loss.backward()
    close_to(loss.detach(), losses[own].detach(), "loss")
    ours = dict(model.named_parameters())
    for path, p in plain.named_parameters():
        if p.grad is None:
            continue
        got = ours[path].grad
        assert got is not None, path
        close_to(full(got), p.grad, f"gradient of `{path}`")


def _sharded_data(model: nn.Module) -> bool:
    """Whether the ranks see data of their own (FSDP) or the same (tensor parallel)."""
    return any("FSDP" in type(m).__name__ for m in model.modules())


# FSDP2 -------------------------------------------------------------------------------------------


def fsdp(model: nn.Module, rank: Rank) -> None:
    for block in blocks_of(model):
        fully_shard(block, mesh=rank.mesh)
    fully_shard(model, mesh=rank.mesh)


for _name, _mode, _order in itertools.product(("llama", "ltx", "flux"), MODES, ORDERS):
    case(f"fsdp2-{_name}-{_mode}-{_order}")(functools.partial(check, _name, _mode, _order, fsdp))


def fsdp_in_bf16(model: nn.Module, rank: Rank) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks_of(model):
        fully_shard(block, mesh=rank.mesh, mp_policy=policy)
    fully_shard(model, mesh=rank.mesh, mp_policy=policy)


def served_layers(order: str, shard: Shard_, rank: Rank) -> None:
    """Decoder layers are trained by their own functions, on weights that FSDP2 has gathered; also
    in a dtype that none of the parameters had at `apply`."""
    from hfpatch.training import stages

    model = build("llama", rank)
    patch(model, "training", order, shard, rank)
    outputs("llama", model, inputs_of("llama", rank, model)).square().mean().backward()
    count, front = [0], stages.front

    def counted(*args: Any) -> Any:
        count[0] += 1
        return front(*args)

    stages.front = counted
    try:
        outputs("llama", model, inputs_of("llama", rank, model)).square().mean().backward()
    finally:
        stages.front = front
    assert count == [len(blocks_of(model))]


for _order in ORDERS:
    for _shard in (fsdp, fsdp_in_bf16):
        case(f"fsdp2-llama-served layers-{_shard.__name__}-{_order}")(
            functools.partial(served_layers, _order, _shard)
        )


def models_own_loss(order: str, back: bool, rank: Rank) -> None:
    """FSDP2 hangs a hook on all that a model returns, the logits too, behind the model's loss.

    back: it gives the head's weight back behind the forward, where logits are still to be had."""
    from hfpatch.losses.deferred_tensor import DeferredLogits, _Head

    def shard(model: nn.Module, rank: Rank) -> None:
        for block in blocks_of(model):
            fully_shard(block, mesh=rank.mesh)
        fully_shard(model, mesh=rank.mesh, **({"reshard_after_forward": True} if back else {}))

    plain, model = build("llama", rank), build("llama", rank)
    plain.train(), model.train()
    report = patch(model, "training", order, shard, rank)
    assert any(s.op == "linear_cross_entropy" for s in report.swaps)
    of = mock.Mock(side_effect=DeferredLogits.of)
    made = mock.Mock(side_effect=_Head.product)
    with (
        mock.patch.object(DeferredLogits, "of", of),
        mock.patch.object(_Head, "product", lambda head: made(head)),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        _check_gradients("llama", plain, model, rank, _its_own)
    assert any("`reshard_after_forward=True`" in str(w.message) for w in told) == back
    assert of.call_count == (0 if back else 1)
    assert not made.called
    if back:
        logits = model(**inputs_of("llama", rank, plain, rank.index)).logits
        assert torch.isfinite(logits.float().sum())


for _order, _back in itertools.product(ORDERS, (False, True)):
    case(f"fsdp2-llama-its own loss-{_order}-given back={_back}")(
        functools.partial(models_own_loss, _order, _back)
    )


def optimizer(options: dict[str, Any], rank: Rank) -> None:
    """Each rank updates its parts of the DTensors, of which some have no element, in our kernel."""
    from hfpatch.optim import AdamW

    models = [build("llama", rank).to(options.pop("dtype", torch.float32)) for _ in range(2)]
    for model in models:  # a parameter of one row: the other ranks have none of it
        model.extra = nn.Parameter(torch.linspace(-1, 1, 5, device=rank.device)[None])
        fsdp(model, rank)
    theirs, ours = (
        make(m.parameters(), lr=0.05, **options)
        for make, m in zip((torch.optim.AdamW, AdamW), models, strict=True)
    )
    with mock.patch("hfpatch.optim.adamw") as handed_over:
        for step in range(3):
            for a, b in zip(*(m.parameters() for m in models), strict=True):
                generator = torch.Generator(device=rank.device).manual_seed(step)
                part = a.to_local()
                values = torch.randn(part.shape, generator=generator, device=rank.device)
                a.grad, b.grad = (
                    DTensor.from_local(
                        values.to(part.dtype), p.device_mesh, p.placements,
                        shape=p.shape, stride=p.stride(),
                    )
                    for p in (a, b)
                )  # fmt: skip
            version = next(iter(models[1].parameters()))._version
            theirs.step(), ours.step()
            assert next(iter(models[1].parameters()))._version > version
    assert not handed_over.called
    for (path, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        close_to(full(b), full(a), path)
    kept = ours.state_dict()["state"][0]["exp_avg"]
    assert type(kept) is DTensor
    close_to(full(kept), full(theirs.state_dict()["state"][0]["exp_avg"]), "exp_avg")


for _name, _options in {
    "plain": {},
    "amsgrad, maximize": {"amsgrad": True, "maximize": True},
    "counted on the device": {"capturable": True} if torch.cuda.is_available() else {"fused": True},
}.items():
    case(f"fsdp2-AdamW-{_name}")(functools.partial(optimizer, _options))


def clipping(dtype: torch.dtype, rank: Rank) -> None:
    """Rows over the ranks, an uneven number of them, columns, one row alone, and a whole copy."""
    from hfpatch.optim import clip_grad_norm_

    shapes = [((8, 6), Shard(0)), ((5, 3), Shard(0)), ((6, 8), Shard(1)), ((1, 4), Shard(0))]
    shapes.append(((7,), Replicate()))

    def made() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(3)
        params = []
        for shape, place in shapes:
            values = torch.randn(2, *shape, generator=generator).to(rank.device, dtype)
            p, grad = (distribute_tensor(v, rank.mesh, [place]) for v in values)
            params.append(nn.Parameter(p))
            params[-1].grad = grad
        return params

    for most in (0.5, 1e9, float("inf")):
        ours = made()
        version = ours[0].grad._version  # type: ignore[union-attr]
        with mock.patch("torch.nn.utils.clip_grad_norm_") as handed_over:
            total = clip_grad_norm_(ours, most)
        assert not handed_over.called
        exact = torch.cat([full(p.grad).double().flatten() for p in made()]).norm()
        torch.testing.assert_close(full(total).double(), exact, rtol=1e-6, atol=0)
        for a, b in zip(ours, made(), strict=True):
            wanted = full(b.grad).double() * min(1.0, most / (exact.item() + 1e-6))
            off = (full(a.grad).double() - wanted).abs().max() / wanted.abs().max()
            assert off < 2 * torch.finfo(dtype).eps, (most, off)
        assert ours[0].grad._version > version  # type: ignore[union-attr]
    # columns with gaps, and memory that two share, which PyTorch scales twice
    wide, held = (torch.ones(4, 6, dtype=dtype, device=rank.device) for _ in range(2))
    odd = []
    for part in (wide[:, ::2], held, held):
        grad = DTensor.from_local(part, rank.mesh, [Shard(0)])
        odd.append(nn.Parameter(torch.zeros_like(grad)))
        odd[-1].grad = grad
    clip_grad_norm_(odd, 0.5, norm_type=float("inf"))
    expected = torch.full_like(wide, 0.5)
    expected[:, 1::2] = 1.0
    torch.testing.assert_close(wide, expected)
    torch.testing.assert_close(held, torch.full_like(held, 0.25))
    by_largest = clip_grad_norm_(made(), 0.5, norm_type=float("inf"))
    assert full(by_largest).item() == max(full(p.grad).abs().max().item() for p in made())
    for norm_type in (2.0, float("inf")):
        wrong = made()
        if rank.index == 1:
            wrong[1].grad.to_local().fill_(float("nan"))  # type: ignore[union-attr]
        before = full(wrong[0].grad).clone()
        with pytest.raises(RuntimeError, match="total norm of the gradients is nan"):
            clip_grad_norm_(wrong, 0.5, norm_type, error_if_nonfinite=True)
        assert torch.equal(full(wrong[0].grad), before)
        assert full(clip_grad_norm_(wrong, 0.5, norm_type)).isnan()
        assert all(full(p.grad).isnan().all() for p in wrong)  # as in PyTorch


for _dtype in (torch.float32, torch.bfloat16):
    case(f"clip_grad_norm_ of DTensors-{_dtype}")(functools.partial(clipping, _dtype))


# DDP ---------------------------------------------------------------------------------------------


def ddp(options: dict[str, bool], order: str, rank: Rank) -> None:
    """The model's own loss: DDP looks through all that a model returns for what has gradients."""
    plain, model = build("llama", rank).train(), build("llama", rank).train()
    if order == "patch first":
        report = hfpatch.apply(model, mode="training")
    whole = nn.parallel.DistributedDataParallel(model, **options)
    if order == "shard first":
        report = hfpatch.apply(whole, mode="training")
    assert {"linear_cross_entropy", "layer"} <= {s.op for s in report.swaps}
    for step in range(2):  # a static graph is looked at in the first
        plain.zero_grad(), whole.zero_grad()
        seeds = range(2 * step, 2 * step + dist.get_world_size())
        losses = [_its_own("llama", plain, inputs_of("llama", rank, plain, s)) for s in seeds]
        (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
        loss = _its_own("llama", whole, inputs_of("llama", rank, plain, seeds[rank.index]))
        loss.backward()
        close_to(loss.detach(), losses[rank.index].detach(), "loss")
        for (path, p), ours in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert p.grad is not None and ours.grad is not None, path
            close_to(ours.grad, p.grad, f"gradient of `{path}`")


for _option, _order in itertools.product(
    ("find_unused_parameters", "static_graph", "gradient_as_bucket_view"), ORDERS
):
    case(f"ddp-llama-its own loss-{_option}-{_order}")(
        functools.partial(ddp, {_option: True}, _order)
    )


# FSDP1 -------------------------------------------------------------------------------------------


def fsdp1(use_orig_params: bool, order: str, rank: Rank) -> None:
    """It leaves plain tensors where parameters were: a norm must not run without its weight."""
    plain, model = (build("llama", rank) for _ in range(2))
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            if ours.dim() == 1:  # of a norm: another factor for each column
                factors = torch.linspace(0.5, 1.5, ours.numel(), device=rank.device)
                ours.copy_(factors), theirs.copy_(factors)
    if order == "patch first":
        assert hfpatch.apply(model, mode="training").swaps
    wrap = functools.partial(
        FullyShardedDataParallel, device_id=rank.device, use_orig_params=use_orig_params
    )
    blocks = model.model.layers
    for i, block in enumerate(blocks):
        blocks[i] = wrap(block)
    whole = wrap(model)
    if order == "shard first":
        report = hfpatch.apply(whole, mode="training")
        assert ({s.op for s in report.swaps} >= {"gated", "rms_norm"}) == use_orig_params
        assert "could not be examined" not in str(report)
    for autocast, off in ((False, 1e-4), (True, 3e-2)):
        plain.zero_grad(), whole.zero_grad()
        with torch.autocast(rank.device.type, torch.bfloat16, enabled=autocast):
            losses = [
                outputs("llama", plain, inputs_of("llama", rank, plain, s)).square().mean()
                for s in range(dist.get_world_size())
            ]
            with kernels_run():
                own = inputs_of("llama", rank, plain, rank.index)
                loss = outputs("llama", whole, own).square().mean()
        (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
        loss.backward()
        torch.testing.assert_close(loss, losses[rank.index], rtol=off, atol=0)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), float("inf"))
        torch.testing.assert_close(whole.clip_grad_norm_(float("inf")), norm, rtol=off, atol=0)


for _whole, _order in itertools.product((False, True), ORDERS):
    case(f"fsdp1-llama-training-use_orig_params={_whole}-{_order}")(
        functools.partial(fsdp1, _whole, _order)
    )


# Tensor parallel ---------------------------------------------------------------------------------


def no_auto_plan() -> str | None:
    """Why this transformers cannot do what `auto_plan` does, if so."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    if "tp_plan" in inspect.signature(apply_tensor_parallelism).parameters:
        return None
    return "this transformers (5.17, say) takes no plan and refuses a vocabulary of an odd size"


def auto_plan(model: nn.Module, rank: Rank) -> None:
    """What `from_pretrained(tp_plan="auto")` does, on a model that is there already."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan = {}
    for pattern, style in model.tp_plan.items():  # type: ignore[union-attr]
        before, star, after = pattern.partition("*")
        paths = [f"{before}{i}{after}" for i in range(len(blocks_of(model)))] if star else [before]
        for path in paths:
            module = model.get_submodule(path)
            held = [n for n, p in module._parameters.items() if p is not None]
            plan |= {f"{path}.{n}": style for n in held}
            plan[path] = style
    apply_tensor_parallelism(model, rank.mesh, plan)


def megatron(model: nn.Module, rank: Rank, *, local: bool = True) -> None:
    """DTensor weights by `parallelize_module`: gate and up by columns, down by rows."""
    for block in blocks_of(model):
        plan = {
            "mlp.gate_proj": ColwiseParallel(use_local_output=local),
            "mlp.up_proj": ColwiseParallel(use_local_output=local),
            "mlp.down_proj": RowwiseParallel(),
        }
        if not local:
            plan["mlp.down_proj"] = RowwiseParallel(input_layouts=Shard(-1))
        parallelize_module(block, rank.mesh, plan)


def norms_by_tokens(model: nn.Module, rank: Rank) -> None:
    """Norms with DTensor weights, called with DTensors: each process' tokens count as its own."""
    for block in blocks_of(model):
        paths = [p for p, m in block.named_modules() if "RMSNorm" in type(m).__name__]
        plan = {p: SequenceParallel(use_local_output=True) for p in paths}
        parallelize_module(block, rank.mesh, plan)


for _name, _order in itertools.product(("llama", "ltx"), ORDERS):
    case(f"tp-norms-{_name}-inference-{_order}")(
        functools.partial(check, _name, "inference", _order, norms_by_tokens, reason="is a DTensor")
    )
for _name, _mode, _order in itertools.product(("llama", "qwen3"), MODES, ORDERS):
    case(f"tp-auto-{_name}-{_mode}-{_order}")(
        functools.partial(check, _name, _mode, _order, auto_plan)
    )
for _mode, _order in itertools.product(MODES, ORDERS):
    case(f"tp-dtensor-{_mode}-{_order}")(functools.partial(check, "llama", _mode, _order, megatron))
    case(f"tp-dtensor-outputs-{_mode}-{_order}")(
        functools.partial(check, "llama", _mode, _order, functools.partial(megatron, local=False))
    )


# DeepSpeed ZeRO-3 --------------------------------------------------------------------------------


def zero3(model: nn.Module, rank: Rank) -> None:
    """As DeepSpeed's ZeRO-3 keeps a model: each rank has a part of each parameter, whose `data` is
    empty but while its module runs; hooks on every module gather and release them."""
    parts: dict[nn.Parameter, tuple[torch.Tensor, torch.Size]] = {}
    for p in model.parameters():
        flat = p.data.flatten()
        padded = torch.nn.functional.pad(flat, (0, flat.numel() % dist.get_world_size()))
        parts[p] = (padded.chunk(dist.get_world_size())[rank.index].clone(), p.shape)

    def gather(module: nn.Module, *_: Any) -> None:
        for p in module._parameters.values():
            if p is not None:
                part, shape = parts[p]
                whole = part.new_empty(part.numel() * dist.get_world_size())
                dist.all_gather_into_tensor(whole, part)
                p.data = whole[: shape.numel()].view(shape)

    def release(module: nn.Module, *_: Any) -> None:
        for p in module._parameters.values():
            if p is not None:
                p.data = p.data.new_empty(0)

    for module in model.modules():
        module.register_forward_pre_hook(gather)
        module.register_forward_hook(release)
        release(module)


for _name, _order in itertools.product(("llama", "ltx", "flux"), ORDERS):
    case(f"zero3-{_name}-inference-{_order}")(
        functools.partial(check, _name, "inference", _order, zero3, reason="ZeRO-3")
    )


# Context parallel --------------------------------------------------------------------------------


def context_parallel(kind: str) -> Shard_:
    def shard(model: nn.Module, rank: Rank) -> None:
        from diffusers import ContextParallelConfig

        config = ContextParallelConfig(**{f"{kind}_degree": dist.get_world_size()})
        # on the CPU, diffusers divides by the number of accelerators
        count = max(torch.accelerator.device_count(), 1)
        with mock.patch("torch.accelerator.device_count", return_value=count):
            model.enable_parallelism(config=config)  # type: ignore[operator]

    return shard


# Ring attention needs a backend that returns the log-sum-exp, which the native one does not.
for _name, _kind, _order in itertools.product(("ltx", "flux", "wan"), ("ulysses",), ORDERS):
    case(f"context-{_kind}-{_name}-{_order}")(
        functools.partial(
            check,
            _name,
            "inference",
            _order,
            context_parallel(_kind),
            reason="attention is split over several GPUs",
            inputs_for=even_inputs_of,
        )
    )


# Captured blocks --------------------------------------------------------------------------------


def over_captures(
    name: str,
    order: str,
    shard: Shard_,
    runs: bool,
    rank: Rank,
    inputs_for: Callable[..., dict[str, Any]] = inputs_of,
) -> None:
    """No block has a file within reach. `runs`: fused calls serve a model that was
    patched first; one that was sharded first they serve or leave to the original."""
    plain, model = (build(name, rank) for _ in range(2))
    inputs = inputs_for(name, rank, plain)
    forget()
    with captured():
        patch(model, "inference", order, shard, rank)
        with torch.no_grad():
            expected = outputs(name, plain, inputs)
            for _ in range(2):
                close_to(outputs(name, model, inputs), expected)
            marks = [m for b in blocks_of(model) if (m := swap.swapped(b)) is not None]
            with runs_seen(m.details.kind for m in marks) as seen:
                close_to(outputs(name, model, inputs), expected)
        if order == "patch first":
            assert len(marks) == len(blocks_of(model))
            assert (len(seen) == len(marks)) == runs, (len(seen), len(marks))
        if runs:  # an optimizer's step; ZeRO-3 has its numbers elsewhere
            with torch.no_grad():
                for parameter in (*plain.parameters(), *model.parameters()):
                    parameter.mul_(1.01)
                close_to(outputs(name, model, inputs), outputs(name, plain, inputs), "after a step")
        hfpatch.restore(model)
    forget()


_CAPTURED = ("sana", "ltx", "flux", "wan")
for _name, _order in itertools.product(_CAPTURED, ORDERS):
    case(f"captured-fsdp2-{_name}-{_order}")(
        functools.partial(over_captures, _name, _order, fsdp, True)
    )
    case(f"captured-zero3-{_name}-{_order}")(
        functools.partial(over_captures, _name, _order, zero3, False)
    )
    if _name != "sana":  # diffusers has no plan for it
        case(f"captured-context-{_name}-{_order}")(
            functools.partial(
                over_captures, _name, _order, context_parallel("ulysses"), False,
                inputs_for=even_inputs_of,
            )
        )  # fmt: skip
