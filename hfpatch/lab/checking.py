"""Is a version right? Seeds and sizes against fp64, canaries, odd values, the same bits twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hfpatch.lab.guarded import guarded, same_bits
from hfpatch.lab.subjects import Inputs, Subject, Unfit

#: How far results may be from fp64 ones, in epsilons of the coarsest dtype among inputs and
#: results, relative to the largest value: sums in another order in fp32, a few roundings in a
#: half type.
EPSILONS = {torch.float64: 64, torch.float32: 64, torch.float16: 4, torch.bfloat16: 4}
Sizes = dict[str, float]


def check(subject: Subject, sizes: list[Sizes], seeds: int, derive: bool) -> dict[str, Any]:
    """Everything that a version must pass.

    Args:
        sizes: those that were named; the first is the one that is timed.
        seeds: how many draws of each.
        derive: whether odd sizes are made of the first, where only one was named.

    Returns:
        `passed`, and `rows` with `check`, `passed` (None: not made) and `found`.
    """
    rows: list[dict[str, Any]] = []

    def row(name: str, passed: bool | None, found: str) -> None:
        rows.append({"check": name, "passed": passed, "found": found})

    named = len(sizes)
    sizes = [*sizes, *(_derived(sizes[0]) if derive and named == 1 else [])]
    touched: list[str] = []
    written: list[str] = []
    for i, one in enumerate(sizes):
        said = ", ".join(f"{k}={v:g}" for k, v in one.items()) or "as `setup` has them"
        worst, limit, wrong, label = 0.0, 0.0, "", ""
        for seed in range(seeds):
            try:
                inputs = subject.make(seed, one)
                expected, label = _expected(subject, inputs)
            except Exception as e:
                if i < named:
                    raise
                wrong = ""
                row(f"sizes {said}", None, f"not a size of this subject: {_first_line(e)}")
                break
            got, outside, changed = _guarded_call(subject, inputs)
            touched += [t for t in outside if t not in touched]
            written += [t for t in changed if t not in written]
            worst, limit, wrong = _compare(subject, inputs, got, expected, worst)
            if wrong:
                wrong = f"seed {seed}: {wrong}"
                break
        else:
            row(
                f"sizes {said}",
                True,
                f"{worst:.1e} from {label}, {seeds} seeds; at most {limit:.1e}",
            )
        if wrong:
            row(f"sizes {said}", False, wrong)
    row("writes beyond its outputs", not touched, "; ".join(touched) or "canaries are whole")
    row("inputs unwritten", not written, ", ".join(written) or "all as they were")
    row("odd values", *_odd_values(subject, sizes[0]))
    row("the same bits twice", *_repeated(subject, sizes[0]))
    return {"passed": all(r["passed"] is not False for r in rows), "rows": rows}


def _derived(sizes: Sizes) -> list[Sizes]:
    """Odd ones: a little less of everything, and little of it."""
    whole = {k: v for k, v in sizes.items() if isinstance(v, int) and v > 1}
    if not whole:
        return []
    less = {**sizes, **{k: v - 1 for k, v in whole.items()}}
    little = {**sizes, **{k: max(1, v // 7 | 1) for k, v in whole.items()}}
    return [less] if less == little else [less, little]


def _first_line(e: Exception) -> str:
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0] if lines else ''}"


def copied(inputs: Inputs, wide: bool = False) -> Inputs:
    """Copies of all tensors; floating ones in fp64 if they shall be."""
    return {
        k: (v.double() if wide and v.is_floating_point() else v).clone()
        if isinstance(v, Tensor)
        else v
        for k, v in inputs.items()
    }


def _expected(subject: Subject, inputs: Inputs) -> tuple[dict[str, Tensor], str]:
    """The reference's results in fp64; in the inputs' own dtype where it knows no fp64."""
    try:
        return subject.reference(copied(inputs, wide=True)), "fp64"
    except Unfit:
        raise
    except Exception:
        return subject.reference(copied(inputs)), "the reference in its own dtype"


def _guarded_call(
    subject: Subject, inputs: Inputs
) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Results, canaries that were written over, and inputs that were."""
    held = guarded(inputs, subject.outputs, subject.inout)
    returned = subject.run(held.inputs)
    _wait(subject)
    results = {k: v.clone() for k, v in subject.results(held.inputs, returned).items()}
    changed = [
        f"`{name}`"
        for name, value in inputs.items()
        if isinstance(value, Tensor)
        and name not in subject.outputs
        and not same_bits(value, held.inputs[name])
    ]
    return results, held.touched(), changed


def _wait(subject: Subject) -> None:
    if subject.device.type == "cuda":
        torch.cuda.synchronize()


def _limit(subject: Subject, inputs: Inputs, name: str, result: Tensor) -> float:
    given = subject.settings.get("RTOL")
    if isinstance(given, Mapping):
        given = given.get(name)
    if given is not None:
        return float(given)
    dtypes = {t.dtype for t in inputs.values() if isinstance(t, Tensor)} | {result.dtype}
    limits = [EPSILONS[d] * torch.finfo(d).eps for d in dtypes if d in EPSILONS]
    return max(limits, default=0.0)


def _compare(
    subject: Subject,
    inputs: Inputs,
    got: dict[str, Tensor],
    expected: dict[str, Tensor],
    worst: float,
) -> tuple[float, float, str]:
    """The worst error so far, what is allowed, and what is wrong, if anything."""
    limit = 0.0
    if got.keys() != expected.keys():
        return worst, limit, f"results {sorted(got)}, expected {sorted(expected)}"
    for name, result in got.items():
        want = expected[name]
        title = f"`{name}`" if subject.outputs else "the result"
        if result.shape != want.shape and result.numel() == want.numel():
            want = want.reshape(result.shape)
        if result.shape != want.shape:
            return worst, limit, f"{title} is {list(result.shape)}, expected {list(want.shape)}"
        if not result.is_floating_point():
            if not torch.equal(result.double(), want.double()):
                count = int((result.double() != want.double()).sum())
                return worst, limit, f"{count} of {result.numel()} elements of {title} are others"
            continue
        x, y = result.double(), want.to(result.dtype).double()
        odd = x.isfinite() != y.isfinite()
        odd |= ~x.isfinite() & ~y.isfinite() & (x.isnan() != y.isnan())
        odd |= x.isinf() & y.isinf() & (x != y)
        if odd.any():
            at = [int(i) for i in odd.nonzero()[0]]
            count = int(odd.sum())
            return (
                worst,
                limit,
                (
                    f"{count} of {x.numel()} elements of {title} are {float(x[tuple(at)])}, or "
                    f"{float(y[tuple(at)])} where they should be, the first at {at}: not "
                    "written, or NaN and infinity in other places than the reference's"
                ),
            )
        real = y.isfinite()
        if not real.any():
            continue
        exact = want.double()[real]
        scale = exact.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
        error = float((x[real] - exact).abs().max() / scale)
        allowed = _limit(subject, inputs, name, result)
        limit = max(limit, allowed)
        if not error <= allowed:
            return (
                worst,
                limit,
                (
                    f"{title} is {error:.1e} from the reference, relative to its largest value; at "
                    f"most {allowed:.1e} is allowed (`RTOL` in ref.py sets it)"
                ),
            )
        worst = max(worst, error)
    return worst, limit, ""


def _odd_values(subject: Subject, sizes: Sizes) -> tuple[bool | None, str]:
    """NaN and infinities in each floating input, one after the other."""
    if subject.settings.get("SPECIAL") is False:
        return None, "not checked: `SPECIAL` is False"
    tried = 0
    inputs = subject.make(7, sizes)
    for name, value in inputs.items():
        if (
            not isinstance(value, Tensor)
            or not value.is_floating_point()
            or not value.numel()
            or (name in subject.outputs and name not in subject.inout)
        ):
            continue
        for odd in (float("nan"), float("inf"), -float("inf")):
            given = copied(inputs)
            place = (7919 * (tried + 1)) % value.numel()
            index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), value.shape))
            given[name][index] = odd
            expected, _ = _expected(subject, given)
            got, _, _ = _guarded_call(subject, given)
            _, _, wrong = _compare(subject, given, got, expected, 0.0)
            tried += 1
            if wrong:
                return False, f"{odd} in `{name}`: {wrong}"
    return (True, f"{tried} inputs with NaN or infinity") if tried else (None, "no floating input")


def _repeated(subject: Subject, sizes: Sizes) -> tuple[bool | None, str]:
    if subject.settings.get("DETERMINISTIC") is False:
        return None, "not checked: `DETERMINISTIC` is False"
    inputs = subject.make(11, sizes)
    first, _, _ = _guarded_call(subject, inputs)
    for _ in range(3):
        again, _, _ = _guarded_call(subject, inputs)
        other = [n for n in first if not same_bits(first[n], again[n])]
        if other:
            return False, f"`{other[0]}` has other bits in a second call"
    return True, "four calls"


def as_markdown(n: int, found: dict[str, Any]) -> str:
    """`correctness.md`."""
    verdict = "passed" if found["passed"] else "FAILED"
    lines = [
        f"# v{n}: {verdict}",
        "",
        f"`{found['file']}`, sha256 of it and its reference `{found['sha256'][:16]}`.",
        "",
        "| check | | found |",
        "|---|---|---|",
    ]
    said = {True: "ok", False: "**wrong**", None: "not made"}
    for r in found["rows"]:
        text = str(r["found"]).replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {r['check']} | {said[r['passed']]} | {text} |")
    return "\n".join([*lines, ""])
