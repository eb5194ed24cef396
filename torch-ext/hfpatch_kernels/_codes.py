"""Names of the integer codes that the operators take; the values are those of hfpatch.h."""

import torch

ACTIVATIONS = {
    "gelu": 0,
    "gelu_tanh": 1,
    "gelu_sigmoid": 2,
    "silu": 3,
    "relu": 4,
}
GELU_APPROXIMATIONS = {"none": 0, "tanh": 1, "sigmoid": 2}
CASTS = {"none": 0, "input": 1, "weight": 2}
MODULATION_CASTS = {"none": 0, "input": 1}
NORMS = {"rms": 0, "layer": 1}
GRAD_NORMS = {2.0: 0, float("inf"): 1}
GATES = {"silu": 0, "sigmoid": 1}

GELU_ERF, GELU_TANH, GELU_SIGMOID, SILU, RELU = range(5)
CAST_NONE, CAST_INPUT, CAST_WEIGHT = range(3)
NEED_WEIGHT, NEED_BIAS = 1, 2
NORM_CHUNK = 16384


def reject(argument, got, names):
    """Raise the error for a name that is not in ``names``."""
    expected = ", ".join(repr(name) for name in names)
    raise ValueError("`{}`: expected one of {}, got {!r}".format(argument, expected, got))


def constants(*numbers):
    """The numbers as constants of the graph that `torch.compile` is tracing; else as they are.

    With ``dynamic=True`` Dynamo traces a Python number from a default, a global or a closure as a
    symbol, and fails with an assertion when two autograd functions of one graph use it. The
    operators specialize on such a number anyway.
    """
    if not torch.compiler.is_compiling():
        return numbers
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return tuple(guard_scalar(number) for number in numbers)
