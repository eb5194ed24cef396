"""The C interface refuses bad calls: a status, a message naming the argument, nothing written."""

from __future__ import annotations

import ctypes
import json
import math
import re
import threading
from pathlib import Path

import c_api
import pytest
import torch
from c_api import CONSTANTS, DLDataType, DLDevice, DLTensor, Library, dltensor, int64_array
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

F16, BF16 = torch.float16, torch.bfloat16
NONE, INPUT, WEIGHT = (CONSTANTS["HFP_CAST_" + name] for name in ("NONE", "INPUT", "WEIGHT"))
SILU = CONSTANTS["HFP_ACT_SILU"]
INVALID = CONSTANTS["HFP_INVALID_ARGUMENT"]


@pytest.fixture(scope="session")
def built() -> Path:
    library = c_api.built_library()
    if library is None:
        pytest.skip("no C++ compiler: set CXX, or install g++")
    return library


def changed(tensor, **fields):
    t = dltensor(tensor)
    for name, value in fields.items():
        setattr(t, name, value)
    t.keep = tensor  # the memory outlives the view
    return t


X, W, OUT = torch.ones(4, 8), torch.ones(8), torch.ones(4, 8)
HUGE = int64_array([2**40, 2**40])
FLOAT8 = DLDataType(10, 8, 1)


def rms(out=OUT, x=X, weight=W, bias=None, eps=1e-6, offset=0.0, cast=INPUT):
    return ("rms_norm", out, x, weight, bias, eps, offset, cast)


NAN, INF = float("nan"), float("inf")


def clamped(up=X, activation=SILU, alpha=1.0, gate_min=-INF, up_max=1.0, up_offset=0.0,
            clamp_activated=0):  # fmt: skip
    limits = (gate_min, 1.0, -INF, up_max)
    return ("gated_clamped", OUT, X, up, activation, alpha, *limits, up_offset, clamp_activated)


BAD_CALLS = [
    (rms(x=None), r"hfp_rms_norm: `x` must be a tensor, got NULL"),
    (rms(out=None), r"`out` must be a tensor, got NULL"),
    (
        rms(weight=torch.ones(4)),
        r"hfp_rms_norm: `weight` must have shape \[8\] to match the last dimension of `x`, "
        r"got \[4\]",
    ),
    (rms(weight=torch.ones(1, 8)), r"`weight` must have shape \[8\].*got \[1, 8\]"),
    (rms(bias=torch.ones(9)), r"`bias` must have shape \[8\].*got \[9\]"),
    (
        rms(bias=torch.ones(8, dtype=F16)),
        r"`bias` must have the dtype of `weight` \(float32\), got float16; convert",
    ),
    (rms(weight=torch.ones(16)[::2]), r"`weight` must have stride 1 in its last dimension"),
    (rms(x=X.double()), r"`x` must be float32, float16 or bfloat16, got float64; convert"),
    (rms(x=X.to(torch.int8)), r"`x` must be float32.* got int8"),
    (rms(x=changed(X, dtype=FLOAT8)), r"`x` must be .* got DLPack type code 10 of 8 bits"),
    (rms(x=changed(X, dtype=DLDataType(2, 32, 4))), r"got float32 with 4 lanes"),
    (rms(x=torch.tensor(1.0)), r"`x` must have 1 to 64 dimensions, got 0"),
    (rms(x=changed(X, ndim=-1)), r"`x` must have 1 to 64 dimensions, got -1"),
    (rms(x=changed(X, ndim=65)), r"`x` must have 1 to 64 dimensions, got 65"),
    (rms(x=changed(X, shape=None)), r"`x` must have a shape, got shape == NULL"),
    (rms(x=changed(X, shape=int64_array([4, -8]))), r"sizes >= 0, got shape \[4, -8\]"),
    (rms(x=changed(X, shape=HUGE)), r"`x` must have fewer than 2\^63 bytes"),
    (rms(x=changed(X, strides=int64_array([2**62, 1]))), r"`x` must span fewer than 2\^63"),
    (rms(x=changed(X, strides=int64_array([-(2**63), 1]))), r"`x` must span fewer than 2\^63"),
    (rms(x=changed(X, data=None)), r"`x` must point to data, got data == NULL for shape"),
    (rms(x=changed(X, byte_offset=2)), r"`x` must be aligned to its element size of 4 bytes"),
    (rms(x=changed(X, byte_offset=2**63)), r"`x` must have a byte_offset below 2\^63"),
    (rms(x=changed(X, device=DLDevice(7, 0))), r"`x` must be on the CPU .*device type 7"),
    (rms(x=changed(X, device=DLDevice(2, -3))), r"`x` must have a CUDA device id >= 0, got -3"),
    (
        rms(weight=changed(W, device=DLDevice(2, 1))),
        r"`weight` must be on the device of `x` \(cpu:0\), got cuda:1; move",
    ),
    (rms(x=torch.ones(8, 4).t()), r"`x` must have stride 1 in its last dimension, got stride 4"),
    (
        rms(x=torch.ones(2, 4, 4, 4, 4, 8)[:, ::2, ::2, ::2, ::2].permute(4, 3, 2, 1, 0, 5)),
        r"`x` must have leading dimensions that merge into at most 3 strides.*contiguous",
    ),
    (rms(eps=-1e-6), r"`eps` must be finite and >= 0, got -1e-06"),
    (rms(eps=math.nan), r"`eps` must be finite and >= 0, got -?nan"),
    (rms(eps=math.inf), r"`eps` must be finite and >= 0, got inf"),
    (rms(offset=math.nan, cast=NONE), r"`weight_offset` must be finite, got -?nan"),
    (rms(offset=1.0), r"`weight_offset` must be 0 unless `cast` is 0 \(none\), got 1"),
    (rms(cast=3), r"`cast` must be 0 \(none\), 1 \(input\) or 2 \(weight\), got 3"),
    (rms(cast=-1), r"`cast` must be .* got -1"),
    (rms(out=torch.ones(4, 8, dtype=BF16)), r"`out` must be float32, got bfloat16"),
    (rms(weight=W.to(F16), cast=WEIGHT), r"`out` must be float16, got float32"),
    (
        rms(x=X.to(BF16), weight=W.to(F16), out=OUT.to(BF16)),
        r"`out` must be float32, got bfloat16",
    ),
    (rms(out=torch.ones(4, 9)), r"`out` must have shape \[4, 8\] to match `x`, got \[4, 9\]"),
    (rms(out=torch.ones(4, 16)[:, :8]), r"`out` must be contiguous"),
    (rms(x=torch.ones(0, 8)), r"`out` must have shape \[0, 8\]"),
    (("layer_norm", OUT, X, W, torch.ones(3), 1e-5), r"hfp_layer_norm: `bias` must have shape"),
    (("layer_norm", OUT, X, W, None, -1.0), r"hfp_layer_norm: `eps` must be"),
    (("gelu", OUT, X, 3), r"hfp_gelu: `approximate` must be 0 \(erf\), 1 .* got 3"),
    (("silu", torch.ones(32), X), r"hfp_silu: `out` must have shape \[4, 8\]"),
    (("gated", OUT, X, torch.ones(4, 7), 0), r"`up` must have the shape of `gate` \[4, 8\]"),
    (("gated", OUT, X, X.to(F16), 0), r"`up` must have the dtype of `gate` \(float32\)"),
    (("gated", OUT, X, X, 5), r"`activation` must be an activation: 0 \(gelu erf\).* got 5"),
    (clamped(up=torch.ones(4, 7)), r"`up` must have the shape of `gate` \[4, 8\]"),
    (clamped(up=X.to(F16)), r"`up` must have the dtype of `gate` \(float32\)"),
    (clamped(activation=5), r"`activation` must be an activation: 0 \(gelu erf\).* got 5"),
    (clamped(activation=0, alpha=1.5), r"`alpha` must be 1 unless `activation` is 3 .* got 1.5"),
    (clamped(alpha=NAN), r"`alpha` must be finite, got nan"),
    (clamped(gate_min=NAN), r"`gate_min` must be a number or infinite, got NaN"),
    (clamped(gate_min=INF), r"`gate_min` must be finite or -infinity, got inf"),
    (clamped(up_max=-INF), r"`up_max` must be finite or infinity, got -inf"),
    (clamped(up_max=NAN), r"`up_max` must be a number or infinite, got NaN"),
    (clamped(up_offset=INF), r"`up_offset` must be finite, got inf"),
    (clamped(clamp_activated=2), r"`clamp_activated` must be 0 or 1, got 2"),
    (
        ("gated_packed", torch.ones(4, 3), torch.ones(4, 7), 0, 1),
        r"`x` must have an even last dimension, the gate and up halves, got 7",
    ),
    (("gated_packed", OUT, X, 0, 1), r"`out` must have shape \[4, 4\] to match `x`, got \[4, 8\]"),
    (("gated_packed", torch.ones(4, 4), X, 0, 2), r"`gate_first` must be 0 or 1, got 2"),
]


@pytest.mark.parametrize("index", range(len(BAD_CALLS)))
def test_bad_call(built, index):
    (name, *arguments), message = BAD_CALLS[index]
    lib = Library(built)
    OUT.fill_(5)
    assert lib.status(name, *arguments) == INVALID
    assert re.search(message, lib.last_error()), lib.last_error()
    assert lib.last_error().startswith(f"hfp_{name}: ")
    assert OUT.eq(5).all(), "a failed call wrote"


def test_cuda_tensor_without_cuda_build(built):
    lib = Library(built)
    x, out = (changed(t, device=DLDevice(2, 0)) for t in (X, OUT))
    assert lib.status("silu", out, x) == CONSTANTS["HFP_NOT_AVAILABLE"]
    assert re.search(r"hfp_silu: this build has no CUDA kernels", lib.last_error())


def test_zero_size_needs_no_data(built):
    lib = Library(built)
    for shape in ([0, 8], [4, 0], [0, 0]):
        kept = int64_array(shape)
        x = changed(torch.ones(0, 8), data=None, shape=kept)
        out = changed(torch.ones(0, 8), data=None, shape=kept)
        assert lib.status("silu", out, x) == 0
        assert lib.status("layer_norm", out, x, None, None, 1e-5) == 0
        assert lib.status("gated", out, x, x, SILU) == 0


def test_build_info_and_table(built):
    lib = Library(built)
    info = json.loads(lib.dll.hfp_build_info())
    assert info["abi"] == lib.dll.hfp_abi_version() == CONSTANTS["HFP_ABI_VERSION"]
    assert info["devices"] == ["cpu"]
    assert info["cuda_archs"] == []
    assert info["compiler"]
    first = r"int32_t (hfp_\w+)\(\s*(?:DLTensor|const HfpTensorList)"
    functions = set(re.findall(first, c_api.HEADER.read_text()))
    assert functions == {op.function for op in c_api.CALLS.values()}


SIZES = st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 8, 2**31, 2**62, 2**63 - 1])
FLOATS = st.sampled_from([0.0, 1e-6, -1.0, math.nan, math.inf, 1e300])
INTS = st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 4, 5, 2**63 - 1])


@st.composite
def hostile_tensor(draw):
    """Any DLTensor that fails validation before its memory would be read, or NULL."""
    ndim = draw(st.integers(1, 5))
    t = dltensor(X)
    t.ndim = draw(st.sampled_from([ndim, ndim, ndim, 0, -5, 2**31 - 1]))
    t.shape = int64_array(draw(st.lists(SIZES, min_size=5, max_size=5)))
    if draw(st.booleans()):
        t.strides = int64_array(draw(st.lists(SIZES, min_size=5, max_size=5)))
    else:
        t.strides = None
    t.dtype = DLDataType(draw(st.integers(0, 6)), draw(st.sampled_from([8, 16, 32, 64])), 1)
    t.device = DLDevice(draw(st.sampled_from([0, 1, 1, 1, 2, 9])), draw(st.integers(-1, 1)))
    t.data = draw(st.sampled_from([None, X.data_ptr(), X.data_ptr() + 1]))
    t.byte_offset = draw(st.sampled_from([0, 0, 1, 2**64 - 1]))
    return draw(st.sampled_from([t, t, t, None]))


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_hostile_calls(built, data):
    """Every random call is refused with a message, and the next good one works.

    `out` is never valid (float64), so whatever passes the other checks cannot be launched."""
    lib = Library(built)
    op = data.draw(st.sampled_from(sorted(c_api.OPS.values(), key=lambda o: o.name)))
    kinds = {"float": FLOATS, "int": INTS}
    values = [data.draw(kinds.get(kind, hostile_tensor())) for kind, _ in op.arguments]
    out = data.draw(st.sampled_from([None, OUT.double()]))
    assert lib.status(op.name, *[out] * op.outputs, *values) == INVALID
    assert lib.last_error().startswith(f"{op.function}: `")
    good = torch.empty(4, 8)
    lib.call("silu", good, X)
    torch.testing.assert_close(good, torch.nn.functional.silu(X))


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_hostile_lists(built, data):
    """The same with lists; the float64 steps, norm and total_norm are never valid."""
    lib = Library(built)
    never = [OUT.double()]
    lists = st.lists(hostile_tensor() | st.just(X) | st.just(W), min_size=1, max_size=3)
    lists = st.none() | st.just(lists).flatmap(lambda drawn: drawn)
    params = data.draw(lists)
    others = [data.draw(lists | st.just(params)) for _ in range(5)]
    scalars = [data.draw(st.none() | hostile_tensor()) for _ in range(4)]
    floats = [data.draw(FLOATS) for _ in range(5)]
    calls = {
        "adamw_step": (params, *others, never, *scalars, *floats, data.draw(INTS)),
        "grad_norm": (*never, data.draw(hostile_tensor()), params, data.draw(INTS)),
        "clip_grads": (params, *never, data.draw(FLOATS)),
        "scale_grads": (params, *never),
    }
    for name, arguments in calls.items():
        assert lib.status(name, *arguments) == INVALID
        assert lib.last_error().startswith(f"hfp_{name}: `")
    assert (X == 1).all() and (W == 1).all()


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_hostile_decoding(built, data):
    """The same with a model of any tensors, or as many as one layer has; the results, where there
    are any, are never valid."""
    lib = Library(built)
    op = data.draw(st.sampled_from(sorted(c_api.DECODE_OPS.values(), key=lambda o: o.name)))
    members = hostile_tensor() | st.just(X) | st.just(W)
    whole = 7 + CONSTANTS["HFP_DECODE_TENSORS"]
    kinds = {"float": FLOATS, "int": INTS}
    kinds["Tensor[]"] = (
        st.none()
        | st.lists(members, max_size=9)
        | st.lists(members, min_size=whole, max_size=whole)
    )
    values = [data.draw(kinds.get(kind, hostile_tensor())) for kind, _ in op.arguments]
    out = data.draw(st.sampled_from([None, OUT.double()]))
    assert lib.status(op.name, *[out] * op.outputs, *values) == INVALID
    assert lib.last_error().startswith(f"{op.function}: `")
    assert (X == 1).all() and (W == 1).all()


def test_message_is_per_thread(built):
    lib, seen = Library(built), []
    lib.status("silu", OUT, None)
    thread = threading.Thread(target=lambda: seen.append(lib.last_error()))
    thread.start()
    thread.join()
    assert seen == [""]
    assert "`x`" in lib.last_error()


def test_long_shape_is_cut(built):
    lib = Library(built)
    x = changed(X, ndim=64, shape=int64_array([10**9] * 64), strides=None)
    assert lib.status("silu", OUT, x) == INVALID
    assert re.search(r"\[1000000000, .*, \.\.\.\]$", lib.last_error())
    assert len(lib.last_error()) < 400
    assert ctypes.sizeof(DLTensor) == 48
