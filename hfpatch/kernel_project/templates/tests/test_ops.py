"""The operators against the reference in fp64, gradients, torch.compile, bad input."""

import pytest
import torch

#: A result may differ from the reference by the rounding of its dtype, and no more.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [(0,), (1,), (7,), (3, 64), (2, 5, 1001)]

#: Operator to the number of its inputs.
OPS = {"relu_squared": 1}


def draw(count, shape, dtype, device):
    torch.manual_seed(0)
    return [torch.randn(shape, device=device).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_matches_the_reference(kernel, device, op, dtype, shape):
    inputs = draw(OPS[op], shape, dtype, device)
    expected = getattr(kernel.reference, op)(*[x.double() for x in inputs])
    tolerance = TOLERANCE[dtype]
    result = getattr(kernel, op)(*inputs)
    torch.testing.assert_close(
        result, expected.to(dtype), rtol=tolerance, atol=tolerance, equal_nan=True
    )


@pytest.mark.parametrize("op", OPS)
def test_views_and_special_values(kernel, device, op):
    for change in (lambda x: x.t(), lambda x: x[:, 1:], lambda x: x[::2]):
        inputs = [change(x) for x in draw(OPS[op], (12, 40), torch.float32, device)]
        expected = getattr(kernel.reference, op)(*inputs)
        torch.testing.assert_close(getattr(kernel, op)(*inputs), expected)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0], device=device)
    inputs = [special] * OPS[op]
    expected = getattr(kernel.reference, op)(*inputs)
    torch.testing.assert_close(getattr(kernel, op)(*inputs), expected, equal_nan=True)


@pytest.mark.parametrize("op", OPS)
def test_gradients(kernel, device, op):
    inputs = [x.requires_grad_() for x in draw(OPS[op], (5, 33), torch.float32, device)]
    grad = torch.randn(5, 33, device=device)
    ours = torch.autograd.grad(getattr(kernel, op)(*inputs), inputs, grad)
    theirs = torch.autograd.grad(getattr(kernel.reference, op)(*inputs), inputs, grad)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("op", OPS)
def test_the_operator_is_what_torch_expects(kernel, device, op):
    """Schema, fake and autograd; and no graph break under torch.compile."""
    inputs = [x.requires_grad_() for x in draw(OPS[op], (4, 16), torch.float32, device)]
    torch.library.opcheck(getattr(kernel.ops, op).default, tuple(inputs))
    compiled = torch.compile(getattr(kernel, op), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), getattr(kernel.reference, op)(*inputs))


def test_bad_input_is_refused(kernel, device):
    with pytest.raises(RuntimeError, match="expected float32, float16 or bfloat16"):
        kernel.relu_squared(torch.ones(3, dtype=torch.int64, device=device))
    with pytest.raises(RuntimeError, match="one shape, dtype and device"):
        kernel.ops.relu_squared_backward(torch.ones(3, device=device), torch.ones(4, device=device))


def test_the_layer_is_its_function(kernel, device):
    (x,) = draw(1, (3, 8), torch.float32, device)
    torch.testing.assert_close(kernel.layers.ReLUSquared()(x), kernel.relu_squared(x))
