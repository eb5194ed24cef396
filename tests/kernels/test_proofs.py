"""What holds for every op of the table of samples, on the CPU; on a GPU: `test_cuda_proofs.py`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import op_samples
import proofs
import pytest
import torch
from op_samples import BY_ID, DIFFERENTIABLE, DTYPES, FIRST, PUBLIC, SAMPLES, Sample
from torch import Tensor

from hfpatch.ops import OPS as FORMULAS

EVERY = pytest.mark.parametrize("name", BY_ID)
OF_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
#: Odd halves and misaligned rows; whole vectors of every instruction set, with a rest.
WIDTHS = [34, 144]
TARGET = torch.arange(6)
#: Those whose gradient is a kernel, which nothing stands in for where a second one is asked for.
ONCE_DIFFERENTIABLE = {"softmax", "add_gelu", "add_silu", "mul_add"}
ONCE_DIFFERENTIABLE |= {"rope", "rope_qk"}  # linear: there is none


def test_every_op_has_a_sample(kernels_module: ModuleType) -> None:
    assert set(FIRST) == set(op_samples.c_api.OPS)
    namespace = kernels_module.ops.silu.default._schema.name.split("::")[0]
    names = {
        n.split("::")[1]
        for n in torch._C._dispatch_get_all_op_names()
        if n.startswith(namespace + "::")
    }
    assert names >= set(FIRST) | {name + "_out" for name in FIRST}


def opchecked(sample: Sample, tensors: dict[str, Tensor], kernels: ModuleType) -> list[Tensor]:
    """The results of a call that passes `opcheck`."""
    args = sample.arguments(tensors)
    operator = getattr(kernels.ops, sample.op).default
    results = sample.call_all(kernels, tensors)
    if len(sample.meant(results)) == len(results):
        torch.library.opcheck(operator, args)
        return results
    # Of scratch memory parts are not written, and opcheck would compare them.
    torch.library.opcheck(
        operator, args,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip
    traced = torch.compile(operator, backend="aot_eager", dynamic=True)(*args)
    traced = list(traced) if isinstance(traced, tuple) else [traced]
    assert all(map(torch.equal, sample.meant(traced), sample.meant(results)))
    return results


@OF_DTYPE
@pytest.mark.parametrize("name", FIRST)
def test_opcheck(name: str, dtype: torch.dtype, kernels_module: ModuleType) -> None:
    sample = FIRST[name]
    tensors = sample.make(dtype)
    results = opchecked(sample, tensors, kernels_module)
    args, outs = sample.arguments(tensors), map(torch.empty_like, results)
    out_form = getattr(kernels_module.ops, name + "_out").default
    if len(sample.meant(results)) == len(results):
        torch.library.opcheck(out_form, (*outs, *args))
        return
    written = list(outs)
    torch.compile(out_form, backend="aot_eager", dynamic=True)(*written, *args)
    assert all(map(torch.equal, sample.meant(written), sample.meant(results)))


@OF_DTYPE
@EVERY
def test_fakes_know_every_layout(name: str, dtype: torch.dtype, kernels_module: ModuleType) -> None:
    """The part of opcheck that depends on the layout; all of it: `test_cuda_proofs.py`."""
    sample = BY_ID[name]
    for layout in proofs.LAYOUTS:
        tensors = proofs.laid_out(sample, sample.make(dtype), layout)
        if tensors is None:
            continue
        real = sample.call(kernels_module, tensors)
        mode = torch._subclasses.FakeTensorMode()
        with mode:
            fakes = {k: mode.from_tensor(t) for k, t in tensors.items()}
            fake = sample.call(kernels_module, fakes)
        for f, r in zip(fake, real, strict=True):
            assert (f.shape, f.dtype, f.stride()) == (r.shape, r.dtype, r.stride()), layout


@OF_DTYPE
@pytest.mark.parametrize("width", WIDTHS)
@EVERY
def test_layouts(name: str, width: int, dtype: torch.dtype, kernels_module: ModuleType) -> None:
    proofs.layouts(BY_ID[name], kernels_module, dtype, "cpu", width)


@OF_DTYPE
@pytest.mark.parametrize(("width", "n"), [(34, 9), (144, 9), (1008, 37)])  # the last: in threads
@EVERY
def test_bits(
    name: str, width: int, n: int, dtype: torch.dtype, kernels_module: ModuleType
) -> None:
    proofs.repeats(BY_ID[name], kernels_module, dtype, "cpu", width, n)


@OF_DTYPE
@EVERY
def test_canaries(name: str, dtype: torch.dtype, kernels_module: ModuleType) -> None:
    for width in WIDTHS:
        proofs.canaries(BY_ID[name], kernels_module, dtype, "cpu", width)


@OF_DTYPE
def test_in_place(dtype: torch.dtype, kernels_module: ModuleType) -> None:
    found = [proofs.in_place(s, kernels_module, dtype, "cpu", w) for s in SAMPLES for w in WIDTHS]
    assert sum(found) > len(SAMPLES)


@OF_DTYPE
@EVERY
def test_zero_size(name: str, dtype: torch.dtype, kernels_module: ModuleType) -> None:
    proofs.zero_size(BY_ID[name], kernels_module, dtype, "cpu")


@OF_DTYPE
@EVERY
def test_odd_values(name: str, dtype: torch.dtype, kernels_module: ModuleType) -> None:
    proofs.odd_values(BY_ID[name], kernels_module, dtype, "cpu")


def test_threads(kernels_module: ModuleType) -> None:
    calls = proofs.calls_of(SAMPLES, kernels_module, torch.bfloat16, "cpu", 144)
    proofs.at_once(calls, "cpu")


@pytest.mark.parametrize("failing", [False, True])
def test_no_growth_in_memory(failing: bool, kernels_module: ModuleType) -> None:
    """A million calls over all ops, or fewer that are refused."""
    calls = 2000 if failing else 10**6 // len(FIRST) + 1
    for sample in FIRST.values():
        tensors = sample.make(torch.bfloat16, 2, 34)
        args = list(sample.arguments(tensors))
        operator = getattr(kernels_module.ops, sample.op).default
        if failing:
            args[0] = args[0].double()

        def repeat(times: int, operator: Any = operator, args: Any = args) -> None:
            for _ in range(times):
                try:
                    operator(*args)
                except RuntimeError:
                    assert failing
                else:
                    assert not failing

        proofs.assert_no_growth(repeat, calls, sample.op)


# -------------------------------------------------------------------------------------------------
# Gradients and compilation of the public functions


def differentiable(sample: Sample, tensors: dict[str, Tensor]) -> list[str]:
    return [
        name for name, t in tensors.items() if t.is_floating_point() and name not in sample.constant
    ]


def gradients(results: list[Tensor], leaves: list[Tensor], **options: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    seeds = [torch.randn(r.shape, generator=generator).to(r.dtype) for r in results]
    return list(torch.autograd.grad(results, leaves, seeds, **options))


def with_gradients(sample: Sample, dtype: torch.dtype, **options: Any) -> Any:
    """(tensors, those that require a gradient)."""
    tensors = sample.make(dtype, **options)
    leaves = [tensors[name].requires_grad_() for name in differentiable(sample, tensors)]
    return tensors, leaves


@pytest.mark.parametrize("name", [n for n, s in DIFFERENTIABLE.items() if s.op in FORMULAS])
def test_gradients_are_the_formulas(name: str, kernels_module: ModuleType) -> None:
    """Of the fp64 formula: `gradcheck` says that its gradient is its derivative, and ours in fp32
    is that gradient. The kernels take no fp64, so they cannot be differenced themselves."""
    sample = PUBLIC[name]
    tensors, leaves = with_gradients(sample, torch.float32, n=2, width=8)
    ours = gradients(sample.call_public(kernels_module, tensors, 8), leaves)
    wide = {
        k: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for k, t in tensors.items()
    }
    names = differentiable(sample, tensors)
    truth = gradients(sample.call_formula(wide, 8), [wide[n] for n in names])
    for n, a, e in zip(names, ours, truth, strict=True):
        assert a.dtype == tensors[n].dtype
        torch.testing.assert_close(a.double(), e, rtol=1e-5, atol=2e-5, msg=lambda m, n=n: n + m)

    def formula(*inputs: Tensor) -> tuple[Tensor, ...]:
        given = {**wide, **dict(zip(names, inputs, strict=True))}
        return tuple(sample.call_formula(given, 8))

    assert torch.autograd.gradcheck(formula, [wide[n] for n in names])


@pytest.mark.parametrize("name", [n for n in DIFFERENTIABLE if PUBLIC[n].op in FORMULAS])
def test_second_derivative_is_right_or_refused(name: str, kernels_module: ModuleType) -> None:
    """`gradgradcheck` needs fp64, so: that of the formula in fp64, or an error that says it."""
    sample = PUBLIC[name]
    tensors, leaves = with_gradients(sample, torch.float32, n=2, width=8)
    results = sample.call_public(kernels_module, tensors, 8)
    first = gradients(results, leaves, create_graph=True)
    total = sum(g.square().sum() for g in first)
    if sample.op in ONCE_DIFFERENTIABLE:
        with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
            torch.autograd.grad(total, leaves, allow_unused=True)
        return
    wide = {k: t.detach().double() if t.is_floating_point() else t for k, t in tensors.items()}
    for n in differentiable(sample, tensors):
        wide[n].requires_grad_()
    inputs = [wide[n] for n in differentiable(sample, tensors)]
    of_formula = gradients(sample.call_formula(wide, 8), inputs, create_graph=True)
    if not any(g.requires_grad for g in of_formula):  # constants: the formula is linear
        assert all(not g.requires_grad for g in first)
        return
    second = torch.autograd.grad(total, leaves, allow_unused=True)
    total = sum(g.square().sum() for g in of_formula)
    truth = torch.autograd.grad(total, inputs, allow_unused=True)
    for a, e in zip(second, truth, strict=True):
        assert (a is None) == (e is None)
        if e is not None:
            torch.testing.assert_close(a.double(), e, rtol=2e-4, atol=2e-4)


def compiles_once(sample: Sample, kernels: Any, *, grad: bool, device: str) -> None:
    """Without a graph break, and not again for four other batch sizes."""
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def compiled(tensors: dict[str, Tensor]) -> list[Tensor]:
        return sample.call_public(kernels, tensors)

    # None is another size of the sample: equal sizes are one symbol. None is so small that all rows
    # make one row of `partials`: PyTorch specializes on sizes of 1.
    for n in (12, 15, 21, 40, 900):
        if grad:
            tensors, leaves = with_gradients(sample, torch.float32, n=n, device=device)
        else:
            tensors, leaves = sample.make(torch.bfloat16, n=n, device=device), []
        with torch._dynamo.config.patch(error_on_recompile=True):
            actual = compiled(tensors)
        expected = sample.call_public(kernels, tensors)
        proofs.assert_close(actual, expected, sample.id)
        if grad:
            proofs.assert_close(gradients(actual, leaves), gradients(expected, leaves), sample.id)


@pytest.mark.parametrize(
    ("name", "grad"), [(n, False) for n in PUBLIC] + [(n, True) for n in DIFFERENTIABLE]
)
def test_compiles_once_for_all_batches(name: str, grad: bool, kernels_module: ModuleType) -> None:
    compiles_once(PUBLIC[name], kernels_module, grad=grad, device="cpu")


def test_one_number_in_two_autograd_functions(kernels_module: ModuleType) -> None:
    """Dynamo makes a symbol of a default's float, which two functions could not share."""
    k = kernels_module

    def twice(x: Tensor, w: Tensor) -> Tensor:
        x = k.layer_norm(k.layer_norm(k.rms_norm(k.rms_norm(x, w), w), w), w)
        return k.cross_entropy(x, TARGET) + k.cross_entropy(2 * x, TARGET)

    torch._dynamo.reset()
    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager", dynamic=True)
    leaves = [torch.randn(6, 34).requires_grad_(), torch.rand(34).requires_grad_()]
    actual = torch.autograd.grad(compiled(*leaves), leaves)
    proofs.assert_close(list(actual), list(torch.autograd.grad(twice(*leaves), leaves)), "twice")
