"""The operators of training: fakes, layouts, cross entropy, and a model that learns the same."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.multiprocessing.reductions import StorageWeakRef

import hfpatch

F = torch.nn.functional
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -------------------------------------------------------------------------------------------------
# Gradients of norms


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (5, 3), (700, 96), (40, 600), (2, 300, 5000)])
@pytest.mark.parametrize("needs", [0, 1, 2, 3])
def test_fake_has_the_sizes_of_the_real(
    shape: tuple[int, ...], needs: int, kernels_module: ModuleType
) -> None:
    x, w, b = tensor(*shape), tensor(shape[-1]), tensor(shape[-1], dtype=torch.bfloat16)
    operator = kernels_module.ops.layer_norm_backward.default
    real = operator(x, x, w, b, 1e-5, needs)
    mode = torch._subclasses.FakeTensorMode()
    with mode:
        convert = [mode.fake_tensor_converter.from_real_tensor(mode, t) for t in (x, x, w, b)]
        fake = operator(*convert, 1e-5, needs)
    for a, e in zip(fake, real, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (e.shape, e.dtype, e.stride())


def test_expanded_gradient(kernels_module: ModuleType) -> None:
    """`sum().backward()` hands down a gradient without memory of its own: strides of 0."""
    for function in (
        lambda x, w: kernels_module.rms_norm(x, w, cast="input"),
        lambda x, w: kernels_module.layer_norm(x, w),
        lambda x, w: kernels_module.silu(x) * w,
        lambda x, w: kernels_module.gated(x, x * w),
        lambda x, w: kernels_module.gated_packed(x),
    ):
        leaves = [tensor(6, 4, 10).requires_grad_(), tensor(10).requires_grad_()]
        y = function(*leaves)
        y.sum().backward()
        seed = torch.ones(y.shape)
        again = torch.autograd.grad(function(*leaves), leaves, seed, allow_unused=True)
        for leaf, g in zip(leaves, again, strict=True):
            assert (leaf.grad is None) == (g is None)
            assert g is None or torch.equal(leaf.grad, g)


def test_symbolic_shapes_with_gradients(kernels_module: ModuleType) -> None:
    """One graph from a few rows to more than `partials` has rows for; one more only where
    `partials` has a single row, since PyTorch specializes on sizes of 1."""
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(
        # Literals: of a default's float Dynamo makes a symbol first, and starts again without it.
        lambda x, w: kernels_module.rms_norm(x, w, None, 1e-6, 0.0, "input").sum(),
        fullgraph=True,
        backend=counter,
        dynamic=True,
    )
    w = tensor(64).requires_grad_()
    graphs = []
    for rows in (100, 700, 900, 30000, 40000, 9, 16):
        x = tensor(rows, 64)
        (actual,) = torch.autograd.grad(compiled(x, w), w)
        (expected,) = torch.autograd.grad(kernels_module.rms_norm(x, w, cast="input").sum(), w)
        torch.testing.assert_close(actual, expected)
        graphs.append(counter.frame_count)
    assert graphs == [1, 1, 1, 1, 1, 2, 2]


# -------------------------------------------------------------------------------------------------
# Cross entropy


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("smoothing", "cap"), [(0.0, 0.0), (0.1, 20.0)])
@pytest.mark.parametrize("with_loss", [None, False, True], ids=lambda v: f"with_loss={v}")
def test_cross_entropy(
    smoothing: float,
    cap: float,
    with_loss: bool | None,
    dtype: torch.dtype,
    reduction: str,
    kernels_module: ModuleType,
) -> None:
    if with_loss and reduction == "none":
        pytest.skip("refused; `test_cross_entropy_errors`")
    logits = (tensor(3, 4, 33, dtype=torch.float32) * 5).to(dtype)
    target = torch.arange(12).view(3, 4)
    target[1, 2] = -100

    def formula(x: Tensor) -> Tensor:
        z = cap * torch.tanh(x / cap) if cap else x
        loss = F.cross_entropy(
            z.flatten(0, 1), target.flatten(), reduction=reduction, label_smoothing=smoothing
        )
        return loss.view(3, 4) if reduction == "none" else loss

    x = logits.clone().requires_grad_()
    options = {"label_smoothing": smoothing, "softcap": cap, "gradient_with_loss": with_loss}
    loss = kernels_module.cross_entropy(x, target, reduction, **options)
    wide = logits.double().requires_grad_()
    expected = formula(wide)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    seed = tensor(1, *loss.shape)[0]
    (actual,) = torch.autograd.grad(loss, x, seed)
    (truth,) = torch.autograd.grad(expected, wide, seed.double())
    assert actual.dtype == dtype
    eps = torch.finfo(dtype).eps
    bound = eps * truth.abs() + 1e-6 * truth.abs().max() + torch.finfo(dtype).smallest_normal * eps
    assert ((actual.double() - truth).abs() <= bound).all()
    with torch.no_grad():
        without = kernels_module.cross_entropy(logits, target, reduction, **options)
    assert torch.equal(without, loss)


@pytest.mark.parametrize("with_loss", [False, True])
def test_cross_entropy_of_ignored_rows(with_loss: bool, kernels_module: ModuleType) -> None:
    x = tensor(4, 9).requires_grad_()
    target = torch.full((4,), -100)
    loss = kernels_module.cross_entropy(x, target, gradient_with_loss=with_loss)
    assert loss.isnan()  # as torch's
    loss.backward()
    assert (x.grad == 0).all()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_of_no_row(reduction: str, kernels_module: ModuleType) -> None:
    x, target = torch.empty(2, 0, 7).requires_grad_(), torch.empty(2, 0, dtype=torch.int64)
    loss = kernels_module.cross_entropy(x, target, reduction)
    assert loss.isnan() if reduction == "mean" else loss == 0
    (gradient,) = torch.autograd.grad(loss, x)
    assert gradient.shape == x.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [int, float, "scalar", "element"])
@pytest.mark.parametrize("with_loss", [False, True])
def test_cross_entropy_over_items(
    with_loss: bool, kind: Any, dtype: torch.dtype, kernels_module: ModuleType
) -> None:
    """Three batches whose losses are divided by the tokens of all of them: the sum of the losses is
    the mean over all, and so are the gradients."""
    logits, target = tensor(9, 21, dtype=dtype), torch.arange(9)
    target[4] = -100
    items: Any = {"scalar": torch.tensor(8), "element": torch.tensor([8.0])}.get(kind)
    items = kind(8) if items is None else items
    x = logits.clone().requires_grad_()
    losses = [
        kernels_module.cross_entropy(
            x[i : i + 3], target[i : i + 3], num_items=items, gradient_with_loss=with_loss
        )
        for i in (0, 3, 6)
    ]
    assert all(loss.shape == losses[0].shape for loss in losses)
    for loss in losses:
        loss.sum().backward()
    whole = logits.double().requires_grad_()
    expected = F.cross_entropy(whole, target)
    expected.backward()
    torch.testing.assert_close(sum(losses).double().sum(), expected, rtol=1e-6, atol=1e-6)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(x.grad.double(), whole.grad, rtol=eps, atol=1e-7)


def test_gradient_of_cross_entropy_more_than_once(kernels_module: ModuleType) -> None:
    """What is kept is neither given away nor scaled as long as the graph stays."""
    x, target = tensor(6, 50).requires_grad_(), torch.arange(6)
    loss = kernels_module.cross_entropy(x, target)
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    first.zero_()
    (thrice,) = torch.autograd.grad(loss, x, torch.tensor(3.0), retain_graph=True)
    thrice.mul_(2)
    (last,) = torch.autograd.grad(loss, x)
    (expected,) = torch.autograd.grad(F.cross_entropy(x, target), x)
    torch.testing.assert_close(last, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(thrice, 6 * expected, rtol=1e-6, atol=1e-9)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(loss, x)


def test_gradient_of_cross_entropy_goes_with_the_graph(kernels_module: ModuleType) -> None:
    """A loss that is kept, for a log, keeps no gradient."""
    x, target = tensor(6, 50).requires_grad_(), torch.arange(6)
    loss = kernels_module.cross_entropy(x, target)
    (gradient,) = torch.autograd.grad(loss, x)
    memory = StorageWeakRef(gradient.untyped_storage())
    assert not memory.expired()
    del gradient
    assert memory.expired()
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(loss, x)


@pytest.mark.parametrize("with_loss", [False, True])
def test_cross_entropy_of_logits_that_change(with_loss: bool, kernels_module: ModuleType) -> None:
    """As of any saved tensor: an error, not another gradient."""
    x = tensor(3, 8).requires_grad_()
    logits = x * 1
    loss = kernels_module.cross_entropy(logits, torch.arange(3), gradient_with_loss=with_loss)
    logits.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_scaled_loss_of_fp16(kernels_module: ModuleType) -> None:
    """A gradient scaler's factor comes before the rounding, where fp16 would lose the gradient."""
    x, target = tensor(4096, 16, dtype=torch.float16).requires_grad_(), torch.arange(4096) % 16
    (kept,) = torch.autograd.grad(kernels_module.cross_entropy(x, target) * 65536, x)
    wide = x.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(F.cross_entropy(wide, target) * 65536, wide)
    torch.testing.assert_close(kept.double(), truth, rtol=1e-3, atol=0)


def test_cross_entropy_of_slices(kernels_module: ModuleType) -> None:
    """Next tokens are a slice of the tokens; the logits lose their last position."""
    logits, ids = tensor(3, 6, 20), torch.arange(18).view(3, 6)
    results = []
    for x, t in ((logits[:, :-1], ids[:, 1:]), (logits[:, :-1].clone(), ids[:, 1:].clone())):
        x = x.detach().requires_grad_()
        loss = kernels_module.cross_entropy(x, t, "none")
        loss.backward(tensor(5, 3).t())
        results.append((loss, x.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_cross_entropy_gradient_over_the_logits(kernels_module: ModuleType) -> None:
    """The out form may write over the logits, which saves their size in memory."""
    x, target = tensor(5, 40, dtype=torch.bfloat16), torch.arange(5)
    _, lse = kernels_module.ops.cross_entropy.default(x, target, -100, 0.0, 0.0)
    args = (torch.ones(5), x, target, lse, -100, 0.0, 0.0)
    expected = kernels_module.ops.cross_entropy_backward.default(*args)
    kernels_module.ops.cross_entropy_backward_out.default(x, *args)
    assert torch.equal(x, expected)


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"reduction": "avg"}, ValueError, "`reduction`: expected one of 'none'.*got 'avg'"),
        ({"target": torch.zeros(3)}, RuntimeError, "`target` must be int64, got float32"),
        ({"target": torch.zeros(2, dtype=torch.int64)}, RuntimeError, "`target` must have shape"),
        ({"label_smoothing": 2.0}, RuntimeError, "`label_smoothing`"),
        ({"logits": torch.zeros(3)}, RuntimeError, "`logits` must have at least 2 dimensions"),
        ({"num_items": 0}, ValueError, "`num_items`: expected a number above 0, got 0"),
        (
            {"num_items": float("nan")},
            ValueError,
            "`num_items`: expected a number above 0, got nan",
        ),
        ({"num_items": torch.ones(2)}, ValueError, "`num_items`: expected one element.*shape .2."),
        (
            {"num_items": 3, "reduction": "sum"},
            ValueError,
            "`num_items`: expected a reduction of 'mean', got 'sum'; divide the result by it",
        ),
        (
            {"gradient_with_loss": True, "reduction": "none"},
            ValueError,
            "`gradient_with_loss`: expected a reduction of 'mean' or 'sum', got 'none'",
        ),
    ],
)
def test_cross_entropy_errors(
    change: dict[str, Any], error: type[Exception], word: str, kernels_module: ModuleType
) -> None:
    arguments = {"logits": tensor(3, 5), "target": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(error, match=word):
        kernels_module.cross_entropy(**{**arguments, **change})
    if error is RuntimeError:
        logits = {**arguments, **change}.pop("logits").requires_grad_()
        with pytest.raises(error, match=word):
            kernels_module.cross_entropy(**{**arguments, **change, "logits": logits})


# -------------------------------------------------------------------------------------------------
# A model


def gradient(model: torch.nn.Module, loss_of: Any) -> tuple[float, Tensor]:
    """The loss, and the gradients of all parameters as one fp64 vector."""
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return loss.item(), torch.cat([p.grad.double().flatten() for p in model.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "rate"), [("llama", 0.05), ("gemma3", 2e-3)])
def test_a_patched_model_learns_the_same(
    name: str, rate: float, dtype: torch.dtype, kernels_module: ModuleType
) -> None:
    """Gradients at the same weights, along a run in fp64: an error cannot hide in a trajectory that
    rounding moved, nor add up to one. SGD, where a gradient of the wrong size shows."""
    model = zoo.ENTRIES[name].build(dtype)
    ids = torch.randint(
        model.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1)
    )

    def eager_loss(m: torch.nn.Module) -> Tensor:
        logits = m(input_ids=ids, use_cache=False).logits[:, :-1]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide.flatten(0, 1), ids[:, 1:].flatten())

    def fused_loss(m: torch.nn.Module) -> Tensor:
        return kernels_module.cross_entropy(
            m(input_ids=ids, use_cache=False).logits[:, :-1], ids[:, 1:]
        )

    truth, plain, ours = (copy.deepcopy(model).train() for _ in range(3))
    truth.double()
    assert hfpatch.apply(ours, mode="training").swaps
    losses = []
    for step in range(20):
        if step in (0, 9, 19):
            plain.load_state_dict(truth.state_dict())  # rounds
            ours.load_state_dict(plain.state_dict())
            rounded = copy.deepcopy(truth)
            rounded.load_state_dict(plain.state_dict())
            _, expected = gradient(rounded, eager_loss)
            eager, fused = (
                (gradient(m, f)[1] - expected).norm() / expected.norm()
                for m, f in ((plain, eager_loss), (ours, fused_loss))
            )
            # Both errors sum up tens of independent roundings of the same sizes. The ratio of two
            # such norms has a standard deviation of about 1 / sqrt(tens): three of them are half.
            # To that comes the one rounding that a fused op may add.
            assert fused <= 1.5 * eager + torch.finfo(dtype).eps, (step, fused, eager)
        losses.append(gradient(truth, eager_loss)[0])
        with torch.no_grad():
            for p in truth.parameters():
                p -= rate * p.grad
    assert losses[-1] < 0.8 * losses[0]  # the weights were those of a model that learns
