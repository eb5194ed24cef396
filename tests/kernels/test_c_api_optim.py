"""AdamW, the gradient norm and clipping through the C interface on the CPU, against fp64."""

# ruff: noqa: F811  (fixtures of test_c_api)

from __future__ import annotations

import itertools
import math
import random
import re

import pytest
import torch
from c_api import (
    CONSTANTS,
    HfpTensorList,
    KernelError,
    Library,
    dltensor,
    printed,
    tensor_list,
)
from test_c_api import (  # noqa: F401  (fixtures)
    BF16,
    DTYPES,
    F16,
    F32,
    INVALID,
    Canary,
    built,
    lib,
    same_bits,
    seed,
)
from tolerances import ROUNDING, SUBNORMAL, assert_close, tolerance

SHAPES = [(300, 257), (7,), (), (0, 3), (4097,), (2, 3, 64), (1,)]
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
#: (params, grads, moments, with masters)
TYPES = [
    (F32, F32, F32, False),
    *[(t, t, t, False) for t in (F16, BF16)],
    *[(t, t, F32, False) for t in (F16, BF16)],
    *[(t, t, F32, True) for t in (F16, BF16)],
    *[(t, F32, F32, True) for t in (F16, BF16)],
]


class State:
    """The lists of one call, all between canaries."""

    def __init__(self, p_type, g_type, m_type, master, amsgrad, shapes=SHAPES, step=3.0):
        def fill(dtype, make):
            found = [Canary(shape, dtype) for shape in shapes]
            for c in found:
                c.out.copy_(make(c.out.shape))
            return found

        self.masters = fill(F32, torch.randn) if master else []
        self.params = fill(p_type, torch.randn)
        self.grads = fill(g_type, torch.randn)
        self.exp_avgs = fill(m_type, torch.randn)
        self.exp_avg_sqs = fill(m_type, torch.rand)
        self.tops = fill(m_type, torch.rand) if amsgrad else []
        self.steps = [torch.tensor(step + i) for i, _ in enumerate(shapes)]

    def lists(self):
        names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "tops", "masters")
        return [[c.check() for c in getattr(self, name)] for name in names]

    def run(self, lib, maximize=0, tensors=(None,) * 4, **changed):
        numbers = (HYPER | changed).values()
        lib.call("adamw_step", *self.lists(), self.steps, *tensors, *numbers, maximize)
        self.lists()  # the canaries


def expected(state, factor, lr):
    """Per parameter (p, m, v, top) in fp64, and the sizes of the terms of p and m."""
    params, grads, ms, vs, tops, masters = state.lists()
    for i, t in enumerate(state.steps):
        p = (masters or params)[i].double()
        g, m0, v0 = grads[i].double() * factor, ms[i].double(), vs[i].double()
        m = m0 + (1 - HYPER["beta1"]) * (g - m0)
        v = HYPER["beta2"] * v0 + (1 - HYPER["beta2"]) * g * g
        top = torch.maximum(tops[i].double(), v) if tops else v
        c1, c2 = 1 - HYPER["beta1"] ** t.double(), 1 - HYPER["beta2"] ** t.double()
        slope = lr / c1 / (top.sqrt() / c2.sqrt() + HYPER["eps"])
        after = p - lr * HYPER["weight_decay"] * p - slope * m
        yield after, m, v, top, p.abs() + slope * (m0.abs() + g.abs()), m0.abs() + g.abs()


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_step(lib, types, amsgrad):
    p_type, _, m_type, master = types
    for maximize, scaled in itertools.product((0, 1), (False, True)):
        state = State(*types, amsgrad)
        lr, coef, scale = 3e-3, 0.37, 8.0
        tensors = (torch.tensor(lr), torch.tensor(coef), torch.tensor(scale), torch.tensor(0.0))
        factor = (coef / scale if scaled else 1.0) * (-1 if maximize else 1)
        truth = list(expected(state, factor, lr if scaled else HYPER["lr"]))
        grads = [g.clone() for g in state.lists()[1]]
        state.run(lib, maximize, tensors if scaled else (None,) * 4)
        params, after_grads, ms, vs, tops, masters = state.lists()
        assert all(map(torch.equal, grads, after_grads))
        for i, (p, m, v, top, size, m_size) in enumerate(truth):
            what = f"{types} {amsgrad} {tuple(p.shape)}"

            def half(y, dtype):
                return ROUNDING[dtype] * y.abs() + SUBNORMAL[dtype]

            inside = tolerance("adamw")
            bound = inside * size
            assert_close(params[i], p, bound + 1.01 * half(p, p_type), what + " p")
            assert_close(ms[i], m, inside * m_size + half(m, m_type), what + " m")
            assert_close(vs[i], v, inside * v + half(v, m_type), what + " v")
            if amsgrad:
                assert_close(tops[i], top, inside * top + half(top, m_type), what + " top")
            if master:
                assert_close(masters[i], p, bound, what + " master")
                assert same_bits(params[i], masters[i].to(p_type))


def test_first_step_of_small_gradients(lib):
    """Bias correction must not cancel: after one step from nothing, p moves by lr, whatever g."""
    for scale in (1e-30, 1e-4, 1e4):
        p, g = torch.zeros(100), torch.full((100,), scale)
        m, v = torch.zeros(100), torch.zeros(100)
        hyper = HYPER | {"eps": 0.0, "weight_decay": 0.0, "beta2": 0.9999999}
        lists = ([p], [g], [m], [v], [], [], [torch.tensor(1.0)])
        if scale * scale * 1e-7 < 1e-37:  # v is subnormal or 0: its root has no digits left
            continue
        lib.call("adamw_step", *lists, None, None, None, None, *hyper.values(), 0)
        assert_close(p, torch.full((100,), -1e-2).double(), 1e-2 * 2.0**-19, str(scale))


def test_found_inf_changes_nothing(lib):
    state = State(F32, F32, F32, False, True)
    before = [[t.clone() for t in some] for some in state.lists()]
    state.run(lib, tensors=(None, None, None, torch.tensor(1.0)))
    for old, new in zip(before, state.lists(), strict=True):
        assert all(map(torch.equal, old, new))


def test_nan_and_infinity(lib):
    p, m, v, top = torch.ones(4), torch.zeros(4), torch.zeros(4), torch.ones(4)
    g = torch.tensor([math.nan, math.inf, 1.0, -math.inf])
    lists = ([p], [g], [m], [v], [top], [], [torch.tensor(1.0)])
    lib.call("adamw_step", *lists, None, None, None, None, *HYPER.values(), 0)
    assert p.isnan().tolist() == [True, True, False, True]
    assert top.isnan().tolist() == [True, False, False, False]


def test_strided_alike(lib):
    """Any dense layout: the elements of a parameter meet in the order of memory."""
    base = State(F32, F32, F32, False, False, shapes=[(4, 6, 5)])
    turned = [[t.permute(2, 0, 1) for t in some] for some in base.lists()]
    want = [[t.clone() for t in some] for some in base.lists()]
    numbers = (None,) * 4 + tuple(HYPER.values()) + (0,)
    lib.call("adamw_step", *turned, base.steps, *numbers)
    lib.call("adamw_step", *want, base.steps, *numbers)
    for some, other in zip(base.lists(), want, strict=True):
        assert all(map(torch.equal, some, other))


# --- the norm, and clipping ---------------------------------------------------------------------


def norm_of(lib, tensors, kind=CONSTANTS["HFP_GRAD_NORM_L2"]):
    norm = Canary((), F32)
    count = lib.dll.hfp_norm_partials(tensor_list(tensors))
    partials = Canary((count,), F32)
    lib.call("grad_norm", norm.out, partials.out, list(tensors), kind)
    partials.check()
    return norm.check()


LISTS = [
    [(3, 5), (), (0,), (100_003,), (16384,), (16385,), (40, 1000)],
    [(1,)],
    [(0, 4)],
]


@pytest.mark.parametrize("shapes", LISTS, ids=str)
@pytest.mark.parametrize("dtypes", [*[[t] for t in DTYPES], DTYPES], ids=str)
def test_norm(lib, shapes, dtypes):
    tensors = [torch.randn(s).to(t) for s, t in zip(shapes, itertools.cycle(dtypes), strict=False)]
    flat = torch.cat([t.flatten().double() for t in tensors])
    got = norm_of(lib, tensors)
    truth = flat.norm()
    assert_close(got, truth, tolerance("norm of a list") * truth, "L2")
    assert same_bits(got, norm_of(lib, tensors))
    largest = flat.abs().max() if flat.numel() else torch.tensor(0.0)
    assert norm_of(lib, tensors, CONSTANTS["HFP_GRAD_NORM_INF"]).item() == largest.item()


@pytest.mark.parametrize("kind", [0, 1])
def test_norm_of_nan_and_infinity(lib, kind):
    for at in (0, 17, 39_999):
        x = torch.randn(40_000)
        x[at] = math.inf
        assert norm_of(lib, [torch.randn(5), x], kind).item() == math.inf
        x[at // 2] = math.nan
        assert norm_of(lib, [torch.randn(5), x], kind).isnan()


def test_clip(lib):
    for dtype, max_norm in itertools.product(DTYPES, (0.0, 0.5, 1e9, math.inf)):
        grads = [Canary(shape, dtype) for shape in SHAPES]
        for g in grads:
            g.out.copy_(torch.randn(g.out.shape))
        before = [g.out.clone() for g in grads]
        norm = norm_of(lib, [g.out for g in grads])
        lib.call("clip_grads", [g.out for g in grads], norm, max_norm)
        factor = min(1.0, max_norm / (norm.double().item() + 1e-6))
        for g, old in zip(grads, before, strict=True):
            truth = old.double() * factor
            bound = (
                tolerance("clip") * truth.abs() + ROUNDING[dtype] * truth.abs() + SUBNORMAL[dtype]
            )
            assert_close(g.check(), truth, bound, f"{dtype} {max_norm}")
            if factor == 1:
                assert same_bits(g.out, old)


def test_scale(lib):
    for dtype, factor in itertools.product(DTYPES, (0.0, -0.5, 1.0, 3.0, math.inf, math.nan)):
        grads = [Canary(shape, dtype) for shape in SHAPES]
        for g in grads:
            g.out.copy_(torch.randn(g.out.shape))
        before = [g.out.clone() for g in grads]
        lib.call("scale_grads", [g.out for g in grads], torch.tensor([factor]))
        for g, old in zip(grads, before, strict=True):
            expected = (old.float() * factor).to(dtype)
            number = expected == expected
            assert torch.equal(g.check().isnan(), ~number)
            assert same_bits(g.out[number], expected[number])


def test_lists_do_not_depend_on_the_threads(built):
    """The same bits with 1 and with 3 threads, which share tensors, and lists with empty ones."""
    code = (
        "import sys, hashlib, torch; sys.path.insert(0, sys.argv[2]); import c_api\n"
        "lib = c_api.Library(sys.argv[1]); torch.manual_seed(0)\n"
        "sizes = [0, 1, 1023, 1024, 1025, 0, 70001, 5, 33000, 2048, 0]\n"
        "p, g, m, v = ([torch.randn(n).abs() for n in sizes] for _ in range(4))\n"
        "steps = [torch.full((1,), float(i + 1)) for i in range(len(sizes))]\n"
        "none = (None,) * 4\n"
        "lib.call('adamw_step', p, g, m, v, [], [], steps, *none, 1e-2, .9, .99, 1e-8, .1, 0)\n"
        "half = [t.bfloat16() for t in p]\n"
        "lib.call('clip_grads', g + half, torch.tensor(9.0), 1.0)\n"
        "data = b''.join(t.float().numpy().tobytes() for t in [*p, *m, *v, *g, *half])\n"
        "print(hashlib.sha256(data).hexdigest())\n"
    )
    assert len({printed(code, built, threads=t) for t in (1, 3)}) == 1


def test_clip_by_nan(lib):
    g = torch.randn(100)
    lib.call("clip_grads", [g], torch.tensor(math.nan), 1.0)
    assert g.isnan().all()


# --- bad calls ----------------------------------------------------------------------------------

P, G, M, V = (torch.ones(4, 8) for _ in range(4))
H = torch.ones(16, dtype=BF16)


def step_call(params=(P,), grads=(G,), ms=(M,), vs=(V,), tops=(), masters=(), **changed):
    steps = changed.pop("steps", [torch.tensor(1.0)])
    names = ("lr_tensor", "clip_coef", "grad_scale", "found_inf")
    tensors = [changed.pop(name, None) for name in names]
    maximize = changed.pop("maximize", 0)
    lists = [list(x) for x in (params, grads, ms, vs, tops, masters)]
    return ("adamw_step", *lists, steps, *tensors, *(HYPER | changed).values(), maximize)


BAD = [
    (step_call(grads=()), r"hfp_adamw_step: `grads` must have 1 tensors like `params`, got 0"),
    (step_call(params=[None]), r"`params\[0\]` must be a tensor, got NULL"),
    (step_call([P, P], [G, None], [M] * 2, [V] * 2), r"`grads\[1\]` must be a tensor, got NULL"),
    (
        step_call(grads=[G.half()]),
        r"`grads` must have the dtype of `params` \(float32\), got",
    ),
    (
        step_call(ms=[M.half()]),
        r"`exp_avgs` must be of the dtype of `params` or float32, got",
    ),
    (step_call(vs=[V.half()]), r"`exp_avg_sqs` must have the dtype of `exp_avgs`"),
    (step_call(tops=[V.half()]), r"`max_exp_avg_sqs` must have the dtype of `exp_avgs`"),
    (step_call(tops=[V, V]), r"`max_exp_avg_sqs` must have no or 1 tensors like `params`, got 2"),
    (step_call(masters=[P]), r"`masters` must be empty for float32 params"),
    (
        step_call(params=[P.double()]),
        r"`params\[0\]` must be float32, float16 or bfloat16, got",
    ),
    (step_call([P, P.half()], [G] * 2, [M] * 2, [V] * 2), r"`params` must have one dtype"),
    (step_call(grads=[G[:2]]), r"`grads\[0\]` must have the shape and strides of `params\[0\]`"),
    (step_call(grads=[G.t()]), r"must have the shape and strides of `params\[0\]` \[4, 8\]"),
    (step_call(params=[torch.ones(8, 8)[::2]]), r"`params\[0\]` must have strides without gaps"),
    (step_call(grads=[torch.ones(1).expand(4, 8)]), r"without gaps or overlaps.*; copy it"),
    (step_call(steps=[]), r"`steps` must have 1 tensors like `params`, got 0"),
    (step_call(steps=[torch.ones(2)]), r"`steps` must be float32 of one element each"),
    (step_call(steps=[torch.ones((), dtype=F16)]), r"`steps` must be float32 of one element each"),
    (step_call(lr_tensor=torch.ones(2)), r"`lr_tensor` must be float32 of one element"),
    (step_call(found_inf=torch.ones(1, dtype=F16)), r"`found_inf` must be float32 of one element"),
    (step_call(lr=-1.0), r"`lr` must be finite and >= 0, got -1"),
    (step_call(beta1=1.0), r"`beta1` must be at least 0 and below 1, got 1"),
    (step_call(beta2=math.nan), r"`beta2` must be at least 0 and below 1"),
    (step_call(eps=-1e-8), r"`eps` must be finite and >= 0"),
    (step_call(weight_decay=math.inf), r"`weight_decay` must be finite and >= 0"),
    (step_call(maximize=2), r"`maximize` must be 0 or 1, got 2"),
    (("grad_norm", torch.ones(()), torch.ones(0), [], 0), r"`tensors` must hold at least one"),
    (("grad_norm", torch.ones(()), torch.ones(2), [P], 0), r"`partials` must have shape \[1\]"),
    (("grad_norm", torch.ones(2), torch.ones(1), [P], 0), r"`norm` must be float32 of one element"),
    (("grad_norm", torch.ones(()), torch.ones(1), [P], 2), r"`norm_type` must be 0 \(L2\) or 1"),
    (("clip_grads", [P], torch.ones(()), -1.0), r"`max_norm` must be >= 0, got -1"),
    (("clip_grads", [P], None, 1.0), r"`total_norm` must be a tensor, got NULL"),
    (("scale_grads", [P], None), r"`factor` must be a tensor, got NULL"),
    (("scale_grads", [P], torch.ones(2)), r"`factor` must be float32 of one element"),
    (("scale_grads", HfpTensorList(None, 2), torch.ones(())), r"`grads` must hold its tensors"),
    (("clip_grads", HfpTensorList(None, 2), torch.ones(()), 1.0), r"`grads` must hold its tensors"),
]


@pytest.mark.parametrize(("call", "words"), BAD, ids=[words[:48] for _, words in BAD])
def test_bad_input(built, call, words):
    library = Library(built)
    before = [t.clone() for t in (P, G, M, V)]
    assert library.status(*call) == INVALID
    message = library.last_error()
    assert re.search(words, message), message
    assert all(map(torch.equal, before, (P, G, M, V)))


# --- tensors that share memory ------------------------------------------------------------------


def overlapping():
    """(call, the message or None where the call is fine)."""
    p, g, m, v, x = (torch.ones(4, 8) for _ in range(5))
    part, steps = x.view(-1), [torch.tensor(1.0)] * 2
    two = {"params": [p, P], "grads": [g, g], "ms": [m, M], "vs": [v, V], "steps": steps}
    half = [torch.ones(16, dtype=BF16)]
    shared = "`{}` must not overlap `{}`, got tensors that share memory; clone one of them".format
    return [
        (step_call(**two), None),  # what is only read may be shared
        (step_call([p], [p]), shared("params[0]", "grads[0]")),
        (step_call(ms=[m], vs=[m]), shared("exp_avg_sqs[0]", "exp_avgs[0]")),
        (step_call(vs=[v], tops=[v]), shared("max_exp_avg_sqs[0]", "exp_avg_sqs[0]")),
        (step_call(**two | {"params": [p, p]}), shared("params[1]", "params[0]")),
        (step_call(**two | {"ms": [m, v]}), shared("exp_avg_sqs[0]", "exp_avgs[1]")),
        (step_call(half, half, [part[:16]], [part[16:]], masters=[V.view(-1)[:16]]),
         shared("params[0]", "grads[0]")),
        (step_call(half, [H], [part[:16]], [part[16:]], masters=[part[8:24]]),
         shared("masters[0]", "exp_avgs[0]")),
        (step_call([x], steps=[part[3]]), shared("params[0]", "steps[0]")),
        *[(step_call([x], **{name: part[31]}), shared("params[0]", name))
          for name in ("lr_tensor", "clip_coef", "grad_scale", "found_inf")],
        (("scale_grads", [x[1:], x[:-1]], torch.ones(())), shared("grads[1]", "grads[0]")),
        (("scale_grads", [x[2:], g, x[:2], m], torch.ones(())), None),
        (("scale_grads", [x[:0], x, x[:0]], torch.ones(())), None),
        (("scale_grads", [g, x], part[5]), shared("grads[1]", "factor")),
        (("clip_grads", [x, x], torch.ones(()), 1.0), shared("grads[1]", "grads[0]")),
        (("clip_grads", [x[0]], part[7], 1.0), shared("grads[0]", "total_norm")),
        (("clip_grads", [x[0]], part[8], 1.0), None),
        (("grad_norm", torch.ones(()), torch.ones(2), [x, x], 0), None),
        (("grad_norm", part[1], torch.ones(2), [p, x], 0), shared("norm", "tensors[1]")),
        (("grad_norm", torch.ones(()), part[1:2], [x], 0), shared("partials", "tensors[0]")),
        (("grad_norm", part[1], part[:2], [p, p], 0), shared("partials", "norm")),
        # More than a call has room for otherwise: the last tensor is looked at too.
        (("grad_norm", part[1], torch.ones(32), [p] * 31 + [x], 0), shared("norm", "tensors[31]")),
    ]  # fmt: skip


@pytest.mark.parametrize("case", range(len(overlapping())))
def test_overlaps(lib, case):
    call, message = overlapping()[case]
    if message is None:
        lib.call(*call)
        return
    with pytest.raises(KernelError, match=re.escape(f"hfp_{call[0]}: {message}")):
        lib.call(*call)


def test_overlaps_agree_with_a_count_of_bytes(lib):
    """Stretches of one buffer and of others, in any order: refused exactly if two share a byte."""
    rng, refused = random.Random(0), 0
    buffers = [torch.ones(4000) for _ in range(3)]
    for _ in range(600):
        grads, taken, clean = [], set(), True
        for _ in range(rng.choice((2, 9, 40))):
            buffer, begin, size = rng.randrange(3), rng.randrange(3970), rng.choice((0, 1, 30))
            grads.append(buffers[buffer][begin : begin + size])
            stretch = {(buffer, i) for i in range(begin, begin + size)}
            clean = clean and not stretch & taken
            taken |= stretch
        refused += not clean
        if clean:
            lib.call("scale_grads", grads, torch.ones(()))
        else:
            with pytest.raises(KernelError, match=r"`grads\[\d+\]` must not overlap `grads"):
                lib.call("scale_grads", grads, torch.ones(()))
    assert 100 < refused < 500


def test_partials_of_lists_that_are_refused(built):
    count = Library(built).dll.hfp_norm_partials
    assert count(None) == count(HfpTensorList(None, 2)) == count(tensor_list([])) == 0
    without_shape = dltensor(P)
    without_shape.shape = None
    assert count(tensor_list([None, P, without_shape, P])) == 2


def test_empty_lists(built):
    library = Library(built)
    library.call(*step_call((), (), (), (), steps=[]))
    library.call("clip_grads", [], torch.ones(()), 1.0)
