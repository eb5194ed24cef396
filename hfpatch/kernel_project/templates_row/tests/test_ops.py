"""The operators against the reference in fp64, gradients, torch.compile, bad input."""

import pytest
import torch

#: A result may differ from the reference by the rounding of its dtype, and no more.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [(0, 8), (1,), (3, 1), (7, 33), (2, 5, 1001), (70000, 3), (2, 4096)]
#: Of the weight: None is no weight, and it need not have the dtype of x.
WEIGHTS = [None, *TOLERANCE]


def draw(shape, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def weight_of(width, dtype, device):
    return None if dtype is None else 1 + 0.5 * draw((width,), dtype, device, seed=1)


def wide(tensor):
    return None if tensor is None else tensor.double()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_matches_the_reference(kernel, device, dtype, weight, shape):
    x, w = draw(shape, dtype, device), weight_of(shape[-1], weight, device)
    expected = kernel.reference.rms_norm(x.double(), wide(w), 1e-5).to(dtype)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(kernel.rms_norm(x, w, 1e-5), expected, **tolerance)
    before = x.clone()
    written = kernel.rms_norm_(x, w, 1e-5)
    assert written is x
    torch.testing.assert_close(x, expected, **tolerance)
    assert torch.equal(kernel.rms_norm(before, w, 1e-5), x)


def test_views_and_special_values(kernel, device):
    for change in (lambda x: x.t(), lambda x: x[:, 1:], lambda x: x[::2]):
        x = change(draw((12, 40), torch.float32, device))
        torch.testing.assert_close(kernel.rms_norm(x), kernel.reference.rms_norm(x))
    w = weight_of(80, torch.float32, device)[::2]
    x = draw((3, 40), torch.float32, device)
    torch.testing.assert_close(kernel.rms_norm(x, w), kernel.reference.rms_norm(x, w))
    for value in (float("nan"), float("inf"), 1e18, 0.0):
        x = draw((3, 40), torch.float32, device)
        x[1, 7] = value
        expected = kernel.reference.rms_norm(x)
        torch.testing.assert_close(kernel.rms_norm(x), expected, equal_nan=True)


@pytest.mark.parametrize("weight", [None, torch.float32], ids=str)
def test_gradients(kernel, device, weight):
    x, w = draw((5, 33), torch.float32, device), weight_of(33, weight, device)
    inputs = [t.requires_grad_() for t in (x, w) if t is not None]
    grad = draw((5, 33), torch.float32, device, seed=2)
    ours = torch.autograd.grad(kernel.rms_norm(*inputs), inputs, grad)
    theirs = torch.autograd.grad(kernel.reference.rms_norm(*inputs), inputs, grad)
    torch.testing.assert_close(ours, theirs)


def test_gradients_keep_the_dtypes(kernel, device):
    x = draw((5, 33), torch.bfloat16, device).requires_grad_()
    w = weight_of(33, torch.float32, device).requires_grad_()
    kernel.rms_norm(x, w).sum().backward()
    assert (x.grad.dtype, w.grad.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("weight", [None, torch.float32], ids=str)
def test_the_operator_is_what_torch_expects(kernel, device, weight):
    """Schema, fake, autograd and what is written to; and no graph break under torch.compile."""
    x, w = draw((4, 16), torch.float32, device), weight_of(16, weight, device)
    torch.library.opcheck(kernel.ops.rms_norm_.default, (x.clone(), w, 1e-6))
    compiled = torch.compile(kernel.rms_norm_, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x.clone(), w), kernel.reference.rms_norm(x, w))
    inputs = [t.requires_grad_() for t in (x, w) if t is not None]
    torch.library.opcheck(kernel.ops.rms_norm.default, (x, w, 1e-6))
    compiled = torch.compile(kernel.rms_norm, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), kernel.reference.rms_norm(*inputs))


def test_bad_input_is_refused(kernel, device):
    x = draw((3, 8), torch.float32, device)
    with pytest.raises(RuntimeError, match="expected float32, float16 or bfloat16"):
        kernel.rms_norm(x.long())
    with pytest.raises(RuntimeError, match="expected float32, float16 or bfloat16"):
        kernel.rms_norm(x, torch.ones(8, device=device, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="expected a weight of 8 elements"):
        kernel.rms_norm(x, torch.ones(7, device=device))
    with pytest.raises(RuntimeError, match="got one without dimensions"):
        kernel.rms_norm(x[0, 0])
    with pytest.raises(RuntimeError, match="expected a contiguous tensor"):
        kernel.rms_norm_(x.t())
    with pytest.raises(RuntimeError, match="has no gradient"):
        kernel.rms_norm_(x.clone().requires_grad_())


def test_the_layer_is_its_function(kernel, device):
    x, layer = draw((3, 8), torch.float32, device), kernel.layers.RMSNorm()
    layer.weight, layer.variance_epsilon = torch.nn.Parameter(x[0].clone()), 1e-5
    torch.testing.assert_close(layer(x), kernel.rms_norm(x, layer.weight, 1e-5))
