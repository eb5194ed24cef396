"""Numbers that nobody's sample has: what a kernel or a forward is asked beside random ones."""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor

#: What rows are multiplied by, as far as a dtype holds the result.
SCALES = (1.0, 1e-3, 1e-7, 1e-20, 1e-40, 30.0, 1e3, 1.5e4, 6e4, 1e10, 1e18, 1e30, 3e38)
#: From a tensor in fp32 with at least one dimension, and the largest number of its dtype, to one of
#: the same shape. The same numbers each time.
Pattern = Callable[[Tensor, float], Tensor]


def _unit(x: Tensor) -> Tensor:
    """With a largest number of about 1."""
    x = x.nan_to_num(0.0, 1.0, -1.0)
    return x / x.abs().max().clamp_min(torch.finfo(torch.float32).tiny)


def _scaled(scale: float) -> Pattern:
    return lambda x, largest: x * min(scale, largest)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _of_every_size(x: Tensor, largest: float) -> Tensor:
    rows = _rows(_unit(x)).clone()
    scales = [s for s in SCALES if s <= largest / 8] + [largest / 8]
    for i, scale in enumerate(scales):
        rows[i :: len(scales)] *= scale
    return rows.view(x.shape)


def _largest(x: Tensor, largest: float) -> Tensor:
    return _unit(x) * (largest / 8)


def _of_zeros(x: Tensor, largest: float) -> Tensor:
    made = torch.zeros_like(x)
    made[..., ::2] = -0.0
    return made


def _equal_rows(x: Tensor, largest: float) -> Tensor:
    return _rows(x)[:1].expand(_rows(x).shape).reshape(x.shape)


def _one_hot(x: Tensor, largest: float) -> Tensor:
    rows = _rows(x)
    at = torch.arange(rows.shape[0], device=x.device) % rows.shape[1]
    made = torch.zeros_like(rows)
    made[torch.arange(rows.shape[0], device=x.device), at] = 1.0
    return made.view(x.shape)


def _with(value: float, every: bool) -> Pattern:
    """In one place of every second row; or everywhere in the last one."""

    def pattern(x: Tensor, largest: float) -> Tensor:
        made = x.clone()
        rows = _rows(made)
        if every:
            rows[-1] = value
        else:
            rows[::2, rows.shape[1] // 2] = value
        return made

    return pattern


#: Finite ones, by what they are called.
FINITE: dict[str, Pattern] = {
    "rows of every size": _of_every_size,
    "numbers as large as the dtype holds": _largest,
    **{f"numbers times {s:g}": _scaled(s) for s in (1e-20, 1e-7, 1e-3, 1e3, 1e5)},
    "zeros": _of_zeros,
    "one number everywhere": lambda x, largest: torch.full_like(x, 3.0),
    "numbers far from zero": lambda x, largest: x + 100.0,
    "no negative numbers": lambda x, largest: x.abs(),
    "no positive numbers": lambda x, largest: -x.abs(),
    "many zeros": lambda x, largest: x.clamp_min(0.0),
    "whole numbers": lambda x, largest: (x * 4).round(),
    "signs alone": lambda x, largest: torch.where(x < 0, -1.0, 1.0).to(x.dtype),
    "equal rows": _equal_rows,
    "sorted rows": lambda x, largest: x.sort(-1).values,
    "falling rows": lambda x, largest: x.sort(-1, descending=True).values,
    "one-hot rows": _one_hot,
}
#: The others.
SPECIAL: dict[str, Pattern] = {
    f"{name} {'in whole rows' if every else 'in rows'}": _with(value, every)
    for name, value in (("NaN", float("nan")), ("inf", float("inf")), ("-inf", -float("inf")))
    for every in (False, True)
}
#: Those that make different numbers of equal ones.
PARTING = (
    *("sorted rows", "falling rows", "one-hot rows"),
    *(name for name in SPECIAL if name.endswith("in rows")),
)
#: What is asked of a call that differs from others in its sizes.
FEW = ("rows of every size", "numbers times 100000", "zeros", "NaN in rows", "inf in rows")
#: What gradients are asked of: of larger numbers some are nothing but roundings, times these.
OF_GRADIENTS = ("numbers times 1000", "zeros", "many zeros", "no negative numbers", "equal rows")
#: Of a weight.
OF_WEIGHTS: dict[str, Pattern] = {
    "ones": lambda x, largest: torch.ones_like(x),
    **{k: FINITE[k] for k in ("zeros", "no positive numbers", "no negative numbers")},
    "numbers times 1000": FINITE["numbers times 1000"],
}
#: Of whole numbers, all of which are among those given, or zero: they may be places.
OF_PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "one number everywhere": lambda x: x.max().expand(x.shape),
    "numbers the other way round": lambda x: x.flatten().flip(0).view(x.shape),
    "zeros in its first half": lambda x: _half_zeros(x),
}
#: Of truth values.
OF_TRUTHS: dict[str, Callable[[Tensor], Tensor]] = {
    "no truth": torch.zeros_like,
    "truth everywhere": torch.ones_like,
    "the opposite": torch.logical_not,
    "truth values the other way round": OF_PLACES["numbers the other way round"],
}


def _half_zeros(x: Tensor) -> Tensor:
    made = x.clone()
    made[..., : x.shape[-1] // 2] = 0
    return made


def is_a_table(t: Tensor) -> bool:
    """Whether each column is there twice, as in tables of RoPE, or more often, as in masks: who
    reads one of two equal numbers reads the other."""
    if not t.dim() or t.shape[-1] < 2 or t.layout != torch.strided:
        return False
    rows = t.detach().reshape(-1, t.shape[-1])[:_ROWS_OF_TABLES].float()
    return int(torch.unique(rows, dim=1).shape[1]) <= (t.shape[-1] + 1) // 2


#: How many rows are looked at.
_ROWS_OF_TABLES = 64


def fill(t: Tensor, pattern: Pattern) -> bool:
    """Put a pattern made of a tensor's own numbers in their place, uncounted; whether it could."""
    if t.layout != torch.strided or not t.is_floating_point() or not t.numel():
        return False
    largest = torch.finfo(t.dtype).max
    values = t.detach().double() if t.dtype == torch.float64 else t.detach().float()
    made = pattern(values if t.dim() else values[None], min(largest, _MOST))
    return put(t, torch.where(made.isfinite(), made.clamp(-largest, largest), made))


#: What is computed in fp32 stays finite.
_MOST = torch.finfo(torch.float32).max


def put(t: Tensor, values: Tensor) -> bool:
    """Other values in a tensor's memory, uncounted; False where its elements share memory in
    another way than by repetition."""
    once = tuple(slice(0, 1) if s == 0 else slice(None) for s in t.stride())
    values = values.reshape(t.shape)
    with torch.inference_mode(t.is_inference()):
        target = t.data[once] if once else t.data
        try:
            target.copy_(values[once] if once else values)
        except RuntimeError:  # windows
            return False
    return True
