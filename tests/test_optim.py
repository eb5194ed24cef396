"""`hfpatch.optim` against PyTorch's: numbers, checkpoints, scalers, schedulers, what it leaves."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from expect import relative_error
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import hfpatch.optim
from hfpatch import handover, optim

HYPER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99)}
SHAPES = [(60, 33), (7,), (), (0, 3), (2000,), (4, 3, 8)]


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compiled kernels must be there, and nothing is handed over without a test saying so."""
    monkeypatch.setattr(optim, "_warned_clip", set())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*hands over to PyTorch")
        yield


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def set_gradients(params: list[nn.Parameter], seed: int, dtype: torch.dtype) -> None:
    """The same values whatever the dtype of the parameters, representable in `dtype`."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(dtype).to(p.dtype)


def train(
    make: Callable[..., torch.optim.Optimizer],
    dtype: torch.dtype,
    steps: int = 100,
    values: torch.dtype | None = None,
    **hyper: Any,
) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    params = parameters(values or dtype)
    params = [nn.Parameter(p.detach().to(dtype)) for p in params]
    optimizer = make(params, **(HYPER | hyper))
    for step in range(steps):
        set_gradients(params, step, values or dtype)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hyper", [{}, {"amsgrad": True}, {"maximize": True}], ids=str)
def test_hundred_steps(dtype: torch.dtype, hyper: dict[str, Any]) -> None:
    """No farther from fp64 than PyTorch's own optimizer in that dtype, and one rounding."""
    truth, _ = train(torch.optim.AdamW, torch.float64, values=dtype, foreach=False, **hyper)
    theirs, _ = train(torch.optim.AdamW, dtype, foreach=False, **hyper)
    ours, _ = train(optim.AdamW, dtype, **hyper)
    again, _ = train(optim.AdamW, dtype, **hyper)
    assert all(map(torch.equal, ours, again))
    a, b, t = (torch.cat([p.detach().flatten() for p in some]) for some in (ours, theirs, truth))
    assert relative_error(a, t) <= relative_error(b, t) + torch.finfo(dtype).eps


@pytest.mark.parametrize("hyper", [{}, {"amsgrad": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("ours_first", [True, False])
def test_state_dicts_go_both_ways(hyper: dict[str, Any], ours_first: bool) -> None:
    makers = [optim.AdamW, torch.optim.AdamW]
    first, second = makers if ours_first else makers[::-1]
    params, before = train(first, torch.float32, steps=5, **hyper)
    other = [nn.Parameter(p.detach().clone()) for p in params]
    after = second(other, lr=0.5)
    saved = before.state_dict()
    after.load_state_dict(copy.deepcopy(saved))
    loaded = after.state_dict()
    assert loaded["param_groups"] == saved["param_groups"]
    assert list(loaded["state"]) == list(saved["state"])
    for i, values in saved["state"].items():
        assert list(loaded["state"][i]) == list(values)
        for name, value in values.items():
            got = loaded["state"][i][name]
            assert got.dtype == value.dtype and torch.equal(got, value), name
    for step in range(5):
        for some, optimizer in ((params, before), (other, after)):
            set_gradients(some, 50 + step, torch.float32)
            optimizer.step()
    for a, b in zip(params, other, strict=True):
        torch.testing.assert_close(a, b)


def test_groups_and_a_scheduler() -> None:
    def run(make: Callable[..., torch.optim.Optimizer]) -> list[nn.Parameter]:
        params = parameters()
        groups: list[dict[str, Any]] = [
            {"params": params[:2], "weight_decay": 0.0, "lr": 1e-3},
            {"params": params[2:], "betas": (0.8, 0.9), "amsgrad": True},
        ]
        optimizer = make(groups, **HYPER)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        for step in range(10):
            set_gradients(params, step, torch.float32)
            if step % 3 == 0:
                params[0].grad = None  # its steps are behind the others'
            optimizer.step()
            scheduler.step()
        return params

    for a, b in zip(run(optim.AdamW), run(torch.optim.AdamW), strict=True):
        torch.testing.assert_close(a, b)


def test_a_learning_rate_that_is_a_tensor() -> None:
    ours, _ = train(optim.AdamW, torch.float32, steps=3, lr=torch.tensor(1e-2))
    number, _ = train(optim.AdamW, torch.float32, steps=3)
    assert all(map(torch.equal, ours, number))


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("overflow", [False, True])
def test_grad_scaler_and_clipping(fused: bool | None, overflow: bool) -> None:
    def run(make: Callable[..., Any], clip: Callable[..., Tensor], unscale: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
        optimizer = make(model.parameters(), fused=fused, **HYPER)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
            loss = model(x).square().mean()
            if overflow and step == 2:
                loss = loss * torch.tensor(float("inf"))
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
                clip(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        counts = [s["step"] for s in optimizer.state.values()]
        assert {c.item() for c in counts} == {3.0 if overflow else 4.0}
        return [*model.parameters(), torch.tensor(scaler.get_scale())]

    for unscale in (False, True):
        ours = run(optim.AdamW, optim.clip_grad_norm_, unscale)
        theirs = run(torch.optim.AdamW, nn.utils.clip_grad_norm_, unscale)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


def test_layouts() -> None:
    """Dense layouts have the kernel; a gradient laid out otherwise is PyTorch's, and right."""

    def run(make: Callable[..., Any], mixed: bool) -> list[nn.Parameter]:
        torch.manual_seed(0)
        params = [
            nn.Parameter(torch.randn(6, 5).t()),
            nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        ]
        optimizer = make(params, **HYPER)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn_like(p)
                if mixed:
                    p.grad = p.grad.contiguous()
            optimizer.step()
        return params

    for mixed in (False, True):
        theirs = run(torch.optim.AdamW, mixed)
        if mixed:
            with pytest.warns(UserWarning, match="2 × a gradient or state with other strides"):
                ours = run(optim.AdamW, mixed)
        else:
            ours = run(optim.AdamW, mixed)
        for a, b in zip(ours, theirs, strict=True):
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b)


class Wrapped(Tensor):
    """A tensor subclass, as a sharded or quantized parameter is one."""


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.randn(4, dtype=torch.float64), "dtype torch.float64"),
        (lambda: torch.randn(4, dtype=torch.complex64), "dtype torch.complex64"),
        (lambda: torch.randn(4).as_subclass(Wrapped), "`Wrapped` is a tensor subclass"),
        (lambda: torch.randn(8)[::2], "strides with gaps or overlaps"),
    ],
    ids=["fp64", "complex", "subclass", "gaps"],
)
def test_what_is_handed_over(make: Callable[[], Tensor], why: str) -> None:
    def run(kind: Callable[..., Any], value: Tensor) -> list[Tensor]:
        plain = nn.Parameter(torch.ones(5))
        other = value.clone() if value.is_contiguous() else torch.zeros(8)[::2].copy_(value)
        other.requires_grad_()
        optimizer = kind([plain, other], **HYPER)
        for _ in range(2):
            plain.grad, other.grad = torch.ones(5), torch.ones_like(other.detach())
            optimizer.step()
        return [plain.detach(), other.detach()]

    torch.manual_seed(0)
    value = make()
    with pytest.warns(UserWarning, match="hands over") as caught:
        ours = run(optim.AdamW, value)
    messages = [str(w.message) for w in caught if "hands over" in str(w.message)]
    assert len(messages) == 1 and f"1 × {why}" in messages[0]
    for a, b in zip(ours, run(torch.optim.AdamW, value), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -0.1),
        ("lr", torch.tensor(-0.1)),
        ("lr", math.inf),
        ("weight_decay", -0.1),
        ("weight_decay", math.inf),
        ("eps", math.inf),
    ],
)
def test_numbers_that_the_kernel_refuses_are_handed_over(name: str, value: Any) -> None:
    """Such as a schedule that overshoots: PyTorch asks once, in the constructor."""
    trained = []
    for make in (optim.AdamW, torch.optim.AdamW):
        params = parameters()
        optimizer = make(params, **HYPER)
        set_gradients(params, 0, torch.float32)
        optimizer.step()
        optimizer.param_groups[0][name] = value
        if make is optim.AdamW:
            with pytest.warns(UserWarning, match=f"hands over .*{name}="):
                optimizer.step()
        else:
            optimizer.step()
        trained.append((params, [optimizer.state[p]["step"] for p in params]))
    (ours, our_steps), (theirs, their_steps) = trained
    assert our_steps == their_steps
    torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_sparse_gradients_are_the_error_of_pytorch() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = optim.AdamW(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()


def test_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "local_kernel", lambda op, device: "no compiled kernels here")
    with pytest.warns(UserWarning, match=r"6 × no compiled kernels here"):
        ours, _ = train(optim.AdamW, torch.float32, steps=3)
    theirs, _ = train(torch.optim.AdamW, torch.float32, steps=3)
    assert all(map(torch.equal, ours, theirs))


def test_clip_hands_over_other_norms() -> None:
    ours, theirs = parameters(), parameters()
    for some in (ours, theirs):
        set_gradients(some, 0, torch.float32)
    with pytest.warns(UserWarning, match=r"1 × norm_type=1.0"):
        got = optim.clip_grad_norm_(ours, 1.0, 1.0)
    assert torch.equal(got, nn.utils.clip_grad_norm_(theirs, 1.0, 1.0))
    optim.clip_grad_norm_(ours, 1.0, 1.0)  # the second time without a warning
    assert optim.clip_grad_norm_([], 1.0).item() == 0


def test_clip_hands_over_what_is_listed_twice() -> None:
    """As PyTorch takes it: counted twice, and scaled twice."""
    ours, theirs = parameters(), parameters()
    for some in (ours, theirs):
        set_gradients(some, 0, torch.float32)
    with pytest.warns(UserWarning, match=r"1 × a parameter listed twice"):
        got = optim.clip_grad_norm_([*ours, ours[0]], 1e-3)
    assert torch.equal(got, nn.utils.clip_grad_norm_([*theirs, theirs[0]], 1e-3))
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is None or torch.equal(a.grad, b.grad)


@pytest.mark.parametrize(
    ("name", "dtype", "why"),
    [
        ("exp_avg", torch.float64, ""),  # PyTorch takes none
        ("exp_avg_sq", torch.bfloat16, "states of torch.float32 and torch.bfloat16"),
        ("step", torch.float64, "a step count of torch.float64"),
    ],
    ids=str,
)
@pytest.mark.parametrize("place", [0, 2])
def test_state_of_another_dtype(place: int, name: str, dtype: torch.dtype, why: str) -> None:
    """In any place of the list: as PyTorch, which takes it or says why not."""

    def run(kind: Callable[..., Any]) -> list[Tensor] | str:
        params = [nn.Parameter(torch.ones(5)) for _ in range(3)]
        optimizer = kind(params, **HYPER)
        for _ in range(2):
            for p in params:
                p.grad = torch.ones(5)
            try:
                optimizer.step()
            except RuntimeError as e:
                return str(e)
            state = optimizer.state[params[place]]
            state[name] = state[name].to(dtype)
        return [p.detach() for p in params]

    theirs = run(torch.optim.AdamW)
    if not why:
        assert isinstance(theirs, str) and run(optim.AdamW) == theirs
        return
    with pytest.warns(UserWarning, match=f"1 × {why}"):
        ours = run(optim.AdamW)
    torch.testing.assert_close(ours, theirs)


def _hands_over(run: Callable[..., Any], parameters: int, gradients: int) -> None:
    """So many share memory, and what `run` returns is as with PyTorch's own."""
    with pytest.warns(UserWarning, match="hands over") as caught:
        ours = run(optim.AdamW, optim.clip_grad_norm_)
    messages = " ".join(str(w.message) for w in caught)
    assert f"{parameters} × memory that parameters share" in messages
    assert f"{gradients} × memory that gradients share" in messages
    theirs = run(torch.optim.AdamW, nn.utils.clip_grad_norm_)
    torch.testing.assert_close(ours, theirs)


def test_tied_by_their_memory() -> None:
    """Parameters whose `.data` are one, and gradients: PyTorch takes one after the other."""

    def run(kind: Callable[..., Any], clip: Callable[..., Tensor]) -> list[Tensor]:
        plain, first = (nn.Parameter(torch.ones(6)) for _ in range(2))
        second, empty = nn.Parameter(first.data), [nn.Parameter(torch.ones(0)) for _ in range(2)]
        params = [plain, first, *empty, second]
        optimizer = kind(params, **HYPER)
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            first.grad = second.grad.view(2, 3).view(6)  # type: ignore[union-attr]
            clip(params, 1e-3)
            optimizer.step()
        return [plain.detach(), first.detach()]

    _hands_over(run, parameters=2, gradients=1)


def test_parts_of_a_parameter_that_are_parameters() -> None:
    """Memory in common that begins elsewhere in each of them, as where a product of queries, keys
    and values has one weight, and its parts are parameters too."""

    def run(kind: Callable[..., Any], clip: Callable[..., Tensor]) -> list[Tensor]:
        whole, *others = (nn.Parameter(torch.ones(size)) for size in (36, 5, 4))
        parts = [nn.Parameter(whole.data[at : at + 12]) for at in (12, 24)]
        gradients = torch.ones(8)
        optimizer = kind([parts[1], *others, whole, parts[0]], **HYPER)
        for _ in range(2):
            for p in (*parts, whole):
                p.grad = torch.ones_like(p)
            others[0].grad, others[1].grad = gradients[:5], gradients[4:]
            clip(others, 1e-3)
            optimizer.step()
        return [whole.detach(), gradients]

    _hands_over(run, parameters=3, gradients=1)


def test_warnings_point_at_the_users_line() -> None:
    (p,) = params = [nn.Parameter(torch.ones(3, dtype=torch.float64))]
    p.grad = torch.ones_like(p)
    bare, scheduled = optim.AdamW(params), optim.AdamW(params)
    torch.optim.lr_scheduler.ConstantLR(scheduled)
    for call in (
        lambda: optim.clip_grad_norm_(params, 1.0),
        lambda: bare.step(),
        lambda: scheduled.step(),
    ):
        with pytest.warns(UserWarning, match="hands over") as caught:
            call()
        assert [w.filename for w in caught if "hands over" in str(w.message)] == [__file__]


def test_fp16_does_not_divide_by_zero() -> None:
    """A default `eps` and small second moments are zero in fp16: PyTorch's unfused step is inf."""
    found = []
    for make, hyper in ((optim.AdamW, {}), (torch.optim.AdamW, {"fused": True})):
        p = nn.Parameter(torch.ones(3, dtype=torch.float16))
        optimizer = make([p], lr=1e-2, **hyper)
        for _ in range(3):
            p.grad = torch.tensor([1e-3, 1e-4, 0.0], dtype=torch.float16)
            optimizer.step()
        found.append(p.detach())
    assert found[0].isfinite().all()
    torch.testing.assert_close(*found)  # by two kernels


def test_step_counts_on_the_host_take_one_tensor() -> None:
    """Not one for each of them, which took as long as all the rest of the launch."""
    params = parameters()
    optimizer = optim.AdamW(params)
    set_gradients(params, 0, torch.float32)
    optimizer.step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        optimizer.step()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::add_"] == len(params)
    assert counts.get("aten::_to_copy", 0) == 0
    assert all(optimizer.state[p]["step"] == 2 for p in params)


def test_parameters_of_several_kinds_in_a_group() -> None:
    """Two dtypes and one that is handed over: three lists, each parameter in its own."""
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    trained = []
    for make in (optim.AdamW, torch.optim.AdamW):
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(9, generator=generator).to(dtypes[i % 3]) for i in range(9)]
        params = [nn.Parameter(value) for value in values]
        optimizer = make(params, **HYPER)
        for step in range(3):
            set_gradients(params, step, torch.bfloat16)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
        trained.append(params)
    for ours, theirs in zip(*trained, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_closure_hooks_and_pickle() -> None:
    (p,) = params = [nn.Parameter(torch.ones(3))]
    optimizer = optim.AdamW(params)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert calls == ["before", "after"]
    again = copy.deepcopy(optimizer)
    assert again.state_dict()["state"][0]["step"] == 1
    assert isinstance(again, torch.optim.AdamW)


def test_a_model_learns_the_same() -> None:
    """Twenty steps of a small Llama, with clipping: the same losses within fp32 noise."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip

    def losses(make: Callable[..., Any], clip: Callable[..., Tensor]) -> list[float]:
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        optimizer = make(model.parameters(), lr=3e-3)
        tokens = torch.randint(64, (4, 16))
        found = []
        for _ in range(20):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            clip(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    ours = losses(hfpatch.optim.AdamW, hfpatch.optim.clip_grad_norm_)
    theirs = losses(torch.optim.AdamW, nn.utils.clip_grad_norm_)
    assert ours[-1] < ours[0] - 1
    # a relative difference of 2^-24 in a step grows with the steps: 20 x 2^-24 x a few
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- steps in one pass


class Passes:
    """How the steps of an optimizer were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slow = 0
        real = optim.AdamW._step_group

        def counted(*args: Any) -> None:
            self.slow += 1
            real(*args)

        monkeypatch.setattr(optim.AdamW, "_step_group", counted)

    def step(self, optimizer: torch.optim.Optimizer) -> str:
        before = self.slow
        optimizer.step()
        return "slow" if self.slow > before else "quick"


def twins(**hyper: Any) -> tuple[optim.AdamW, optim.AdamW]:
    """Of equal parameters; the second never in one pass."""
    found = []
    for _ in range(2):
        params = parameters()
        set_gradients(params, 0, torch.float32)
        found.append(optim.AdamW(params, **(HYPER | hyper)))
    found[1]._what_is_kept = lambda: None  # type: ignore[method-assign]
    return found[0], found[1]


def assert_same_bits(quick: optim.AdamW, slow: optim.AdamW) -> None:
    for ours, theirs in zip(
        quick.param_groups[0]["params"], slow.param_groups[0]["params"], strict=True
    ):
        assert torch.equal(ours, theirs)
        assert quick.state[ours].keys() == slow.state[theirs].keys()
        for name, value in quick.state[ours].items():
            assert torch.equal(value, slow.state[theirs][name]), name
            assert value._version == slow.state[theirs][name]._version, name
        assert ours._version == theirs._version


@pytest.mark.parametrize("hyper", [{}, {"amsgrad": True}, {"maximize": True}, {"fused": True}])
def test_from_the_third_step_on_in_one_pass(
    hyper: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes(monkeypatch)
    quick, slow = twins(**hyper)
    seen = []
    for step in range(6):
        for optimizer in (quick, slow):
            set_gradients(optimizer.param_groups[0]["params"], step, torch.float32)
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        seen.append(passes.step(quick))
        assert passes.step(slow) == "slow"
        assert_same_bits(quick, slow)
    assert seen == ["slow", "slow", "quick", "quick", "quick", "quick"]


def _no_gradient(optimizer: optim.AdamW) -> None:
    optimizer.param_groups[0]["params"][2].grad = None


def _other_state(optimizer: optim.AdamW) -> None:
    for p, entry in list(optimizer.state.items()):
        optimizer.state[p] = {name: value.clone() + 1 for name, value in entry.items()}


def _one_tensor_of_the_state(optimizer: optim.AdamW) -> None:
    entry = optimizer.state[optimizer.param_groups[0]["params"][0]]
    entry["exp_avg"] = entry["exp_avg"] * 0.5


def _loaded(optimizer: optim.AdamW) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _another_parameter(optimizer: optim.AdamW) -> None:
    new = nn.Parameter(torch.linspace(-1, 1, 5))
    new.grad = torch.ones(5)
    optimizer.param_groups[0]["params"].append(new)


def _a_group_less_one(optimizer: optim.AdamW) -> None:
    optimizer.param_groups[0]["params"].pop(1)


def _learning_rate(optimizer: optim.AdamW) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)


def _weights_moved(optimizer: optim.AdamW) -> None:
    first = optimizer.param_groups[0]["params"][0]
    first.data = first.data.t().contiguous().t()
    assert first.grad is not None
    first.grad = first.grad.t().contiguous().t()


def _strided_gradient(optimizer: optim.AdamW) -> None:
    first = optimizer.param_groups[0]["params"][0]
    assert first.grad is not None
    first.grad = first.grad.t().contiguous().t()


def _switches(optimizer: optim.AdamW) -> None:
    optimizer.param_groups[0].update(maximize=True, weight_decay=0.0, betas=(0.5, 0.6))


@pytest.mark.parametrize(
    "change",
    [
        _no_gradient, _other_state, _one_tensor_of_the_state, _loaded, _another_parameter,
        _a_group_less_one, _learning_rate, _weights_moved, _strided_gradient, _switches,
    ],
)  # fmt: skip
def test_what_changes_between_steps(
    change: Callable[[optim.AdamW], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes(monkeypatch)
    quick, slow = twins()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a gradient's strides are not its parameter's
        for step in range(8):
            for optimizer in (quick, slow):
                set_gradients(optimizer.param_groups[0]["params"], step, torch.float32)
                if step == 4:
                    change(optimizer)
            how = passes.step(quick)
            slow.step()
            assert_same_bits(quick, slow)
            assert step != 3 or how == "quick"


def test_a_pass_is_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that share memory: nothing is written, no step counted, before the slow one."""
    passes = Passes(monkeypatch)
    made = twins()
    for optimizer in made:
        params = optimizer.param_groups[0]["params"]
        for step in range(3):
            set_gradients(params, step, torch.float32)
            optimizer.step()
        params[4].data = params[0].data.view(-1)[:1980]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(2):
            for optimizer in made:
                params = optimizer.param_groups[0]["params"]
                set_gradients(params[:4] + params[5:], step, torch.float32)
                params[4].grad = torch.ones(1980)
                optimizer.state[params[4]]["exp_avg"] = torch.zeros(1980)
                optimizer.state[params[4]]["exp_avg_sq"] = torch.zeros(1980)
                assert passes.step(optimizer) == "slow"
    assert_same_bits(*made)


def test_a_profiler_sees_the_operator() -> None:
    quick, slow = twins()
    for step in range(3):
        for optimizer in (quick, slow):
            set_gradients(optimizer.param_groups[0]["params"], step, torch.float32)
            optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        quick.step()
    assert any("adamw_step" in event.key for event in profile.key_averages())
    slow.step()
    assert_same_bits(quick, slow)
    assert quick._kept is not None and not quick._kept[0].refused


def test_copies_of_an_optimizer_keep_nothing() -> None:
    quick, _ = twins()
    for _ in range(3):
        quick.step()
    other = copy.deepcopy(quick)
    assert other._kept is None
    before = [p.detach().clone() for p in quick.param_groups[0]["params"]]
    set_gradients(other.param_groups[0]["params"], 5, torch.float32)
    for _ in range(3):
        other.step()
    assert all(map(torch.equal, before, quick.param_groups[0]["params"]))
