"""Is a model's result the same with hfpatch? What `hfpatch apply-check` does with each model."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hfpatch
from hfpatch.apply import modules_of
from hfpatch.bench.spread import Gain, Spread
from hfpatch.foreign.memory import bits
from hfpatch.inputs import Inputs, NoInputs, cast, sample_inputs
from hfpatch.inputs.of_pipelines import denoiser_of, pipeline_inputs
from hfpatch.planning.plan import Candidate

if TYPE_CHECKING:
    from collections.abc import Iterator

_T = TypeVar("_T")

PASSED, FAILED, NOT_COMPARED = "passed", "failed", "not compared"
#: How many times farther than the original the patched model may be from the result in fp64. Two
#: right results of many roundings differ by tenths; a wrong formula by orders of magnitude.
FACTOR = 2.0
#: Without a result in fp64: how far the two may be apart, relative to the largest value.
APART = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}
#: Decoding steps that are compared.
_STEPS = 3
#: Turns of each way that are timed, and calls before each: captured blocks are decided by then.
_ROUNDS, _WARMUP = 7, 2
#: Runs that are looked at until all captured blocks ran fused in one. A first call decides a kind,
#: and where that fuses one block, the next one's input may lie otherwise in memory: another kind.
_RUNS = 4
#: A tensor whose values in fp64 are less than this share of the largest is made of roundings alone.
_ROUNDINGS = 1e-12


@dataclass(frozen=True)
class How:
    """What is checked.

    Attributes:
        arguments: of `hfpatch.apply`; `mode="training"` compares gradients too.
        timed: measure a forward with and without the kernels.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    timed: bool = False

    @property
    def training(self) -> bool:
        return self.arguments.get("mode") == "training"


def check_model(name: str, model: nn.Module, how: How) -> tuple[dict[str, Any], Any]:
    """Apply, compare, restore, compare: (the result as data, the report of `apply`).

    `status` in the result is "passed", "failed" or "not compared", the last two with a `reason`.
    """
    model.eval()
    result: dict[str, Any] = {"part": name or type(model).__name__, "status": PASSED}
    inputs: Inputs | None = None
    try:
        inputs = sample_inputs(model)
    except NoInputs as e:
        _settle(result, NOT_COMPARED, str(e))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    before = None
    try:
        before = None if inputs is None else _Run(model, inputs, how)
    except Exception as e:  # the model's own: it has no gradients here, say
        inputs, said = None, (str(e).splitlines() or [""])[0]
        _settle(result, NOT_COMPARED, f"the model itself fails: {type(e).__name__}: {said}")
    truth = None if before is None else _truth(model, inputs or {}, how, result, before)
    ran = set() if inputs is None else _modules_run(model, inputs)
    report = hfpatch.apply(model, strict=True, **how.arguments)
    blocks = _Blocks()
    try:
        patched = None
        if before is not None:
            # Captured blocks and decoding steps answer their first call with the original's result.
            _Run(model, inputs or {}, how, before)
            called = {id(m) for path, m in model.named_modules() if path in ran}
            patched = blocks.compared(model, called, lambda: _Run(model, inputs or {}, how, before))
            ran = _with_decoders(ran, report, model)
    finally:
        same = all(torch.equal(bits(v), bits(state[k])) for k, v in model.state_dict().items())
        restored = hfpatch.restore(model)
    result |= {
        "swapped": len(report.swaps),
        "state_dict untouched": same,
        "restored": restored == len(report.swaps),
    }
    if not same:
        _settle(result, FAILED, "the state dict was changed")
    if not result["restored"]:
        _settle(result, FAILED, "`restore` took back another number of swaps")
    if inputs is None or before is None or patched is None:
        return result, report
    blocks.tell(result, len(report.swaps))
    _compare(result, before, patched, truth, model)
    after = _Run(model, inputs, how, before)
    result["bit-equal after restore"] = before.same_bits(after)
    if not result["bit-equal after restore"]:
        # What is not repeatable says nothing.
        if before.same_bits(_Run(model, inputs, how, before)):
            _settle(result, FAILED, "the restored model computes other bits than before")
        elif not after.same_bits(_Run(model, inputs, how, before)):
            result["bit-equal after restore"] = None
            _settle(result, NOT_COMPARED, "the original gives other bits each time")
        else:
            _settle(result, FAILED, "the restored model computes other bits than before")
    # A block's last copy in a stack may have a part that no call reaches; its other copies have.
    places = {_place(path) for path in ran}
    missed = [s.path for s in report.swaps if _place(s.path) not in places]
    lost = [path for path in blocks.uncalled if _place(path) not in places]
    if lost:
        _settle(
            result,
            NOT_COMPARED,
            f"{len(lost)} captured blocks were not called by the inputs that were made, "
            f"`{lost[0]}` among them",
        )
    if missed:
        _settle(
            result,
            NOT_COMPARED,
            f"{len(missed)} of {len(report.swaps)} swapped modules were not called by the inputs "
            f"that were made, `{missed[0] or result['part']}` among them",
        )
    if how.timed:
        result["time"] = _timed(model, inputs, how)
    return result, report


def check_pipeline(pipeline: Any, how: How) -> tuple[dict[str, Any], Any]:
    """The same of a diffusers pipeline: two steps from embeddings of a prompt to pictures."""
    result: dict[str, Any] = {"part": type(pipeline).__name__, "status": PASSED}
    try:
        inputs = pipeline_inputs(pipeline)
    except NoInputs as e:
        return _settle(result, NOT_COMPARED, str(e)), None
    try:
        with _calls_seen(m for _, m in modules_of(pipeline)) as called:
            before = outputs_of(pipeline(**inputs, **seeded(pipeline)))
    except Exception as e:  # the pipeline's own demands, whatever they are
        reason = f"{type(e).__name__}: {e}".splitlines()[0]
        return _settle(result, NOT_COMPARED, f"a call with made-up inputs ended: {reason}"), None
    report = hfpatch.apply(pipeline, strict=True, **how.arguments)
    blocks = _Blocks()
    try:
        pipeline(**inputs, **seeded(pipeline))  # what is decided at a first call
        patched = blocks.compared(
            pipeline, called, lambda: outputs_of(pipeline(**inputs, **seeded(pipeline)))
        )
    finally:
        restored = hfpatch.restore(pipeline)
    result |= {"swapped": len(report.swaps), "restored": restored == len(report.swaps)}
    blocks.tell(result, len(report.swaps))
    if not result["restored"]:
        _settle(result, FAILED, "`restore` took back another number of swaps")
    again = outputs_of(pipeline(**inputs, **seeded(pipeline)))
    result["bit-equal after restore"] = _same_bits(before, again)
    if not result["bit-equal after restore"]:
        _settle(result, FAILED, "the restored pipeline computes other bits than before")
    _apart(result, before, patched, dtype_of(denoiser_of(pipeline)))
    return result, report


def _settle(result: dict[str, Any], status: str, reason: str) -> dict[str, Any]:
    """The status; a failure stays one, and the first reason for what was not compared."""
    if status == FAILED or result["status"] == PASSED:
        result |= {"status": status, "reason": reason}
    return result


#: Why a block whose kind is fused ran as it is.
_NEW = f"each of {_RUNS + 1} calls in turn was of a kind that none before it was"
_REFUSED = "the call or the block is not as it was when a call of its kind was proven"


class _Blocks:
    """What became of captured blocks: whether each ran fused, the compared run alone says."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.fused = 0
        self.left: list[str] = []
        self.missed: list[str] = []
        self.uncalled: list[str] = []
        self.why = ""  # those that are missed did not run fused

    def compared(self, model: Any, called: set[int], run: Callable[[], _T]) -> _T:
        """What a patched model gives when no call of its blocks is of a new kind any more.

        Args:
            called: ids of modules that a call runs.
        """
        for _ in range(_RUNS):
            self._clear()
            with self._watched(model, called):
                result = run()
            if not self.missed or self.why != _NEW:
                break
        return result

    @contextmanager
    def _watched(self, model: Any, called: set[int]) -> Iterator[None]:
        from hfpatch import swap
        from hfpatch.regions.kind import runs_seen

        candidates: list[tuple[str, nn.Module, Any]] = [
            (path, module, mark.details)
            for path, module in modules_of(model)
            if (mark := swap.swapped(module)) is not None and isinstance(mark.details, Candidate)
        ]
        kinds = list({id(c.kind): c.kind for *_, c in candidates}.values())
        before = sum(kind.decisions for kind in kinds)
        with runs_seen(kinds) as seen:
            yield
        for path, module, candidate in candidates:
            now = candidate.now(path, module)
            if id(module) in seen:
                self.fused += 1
            elif id(module) not in called:
                self.uncalled.append(path)
            elif now.reason:  # the original runs it, or its parts do
                self.left.append(path)
            else:
                self.missed.append(path)
                self.why = candidate.kind.unfit or _REFUSED
        if self.missed and sum(kind.decisions for kind in kinds) > before:
            self.why = _NEW

    def tell(self, result: dict[str, Any], swapped: int) -> None:
        """Add to the result how many were compared, and whether anything of ours was."""
        every = self.fused + len(self.left) + len(self.missed) + len(self.uncalled)
        if every:
            result["blocks"] = {
                "fused": self.fused,
                "left": len(self.left),
                "not run": len(self.missed),
                "not called": len(self.uncalled),
            }
        if self.missed:
            _settle(
                result,
                NOT_COMPARED,
                f"{len(self.missed)} of {every} captured blocks did not run fused, "
                f"`{self.missed[0]}` among them: {self.why}",
            )
        result["hfpatch computed"] = bool(swapped or self.fused)
        if not result["hfpatch computed"]:
            result["note"] = (
                "nothing of hfpatch was compared: no module was swapped and no block ran fused"
            )


# Running ----------------------------------------------------------------------------------------


class _Run:
    """Outputs and, in training, gradients of one forward of a model; else decoding steps' logits.

    The first run finds out whether the model decodes; those compared with it are `like` it.
    """

    def __init__(
        self, model: nn.Module, inputs: Inputs, how: How, like: _Run | None = None
    ) -> None:
        self.outputs = outputs_of(_forward(model, inputs))
        self.gradients = _gradients(model, inputs) if how.training else []
        self.steps: list[Tensor] = []
        if like is None and not how.training:
            with suppress(Exception):  # no causal language model, or one with another cache
                self.steps = decoded(model, inputs)
        elif like is not None and like.steps:
            self.steps = decoded(model, inputs)

    def same_bits(self, other: _Run) -> bool:
        return all(
            _same_bits(some, others)
            for some, others in (
                (self.outputs, other.outputs),
                (self.gradients, other.gradients),
                (self.steps, other.steps),
            )
        )


@contextmanager
def same_draws() -> Iterator[None]:
    """For models that draw numbers in eval mode too."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def _forward(model: nn.Module, inputs: Inputs) -> Any:
    with torch.no_grad(), same_draws():
        return model(**copy.copy(inputs))


def outputs_of(result: Any) -> list[Tensor]:
    """Its floating tensors, in fp64 on the CPU."""
    return [
        leaf.detach().double().cpu()
        for leaf in pytree.tree_leaves(result)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def decoded(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The logits of the last tokens, one call each, behind a call that keeps keys of the others."""
    ids = inputs.get("input_ids")
    if not hasattr(model, "generate") or not isinstance(ids, Tensor) or ids.shape[-1] <= _STEPS:
        return []
    found: list[Tensor] = []
    with torch.no_grad(), same_draws():
        output = model(input_ids=ids[:, :-_STEPS], use_cache=True)
        name = "cache" if "cache" in output else "past_key_values"  # before transformers 5.24
        for at in range(ids.shape[1] - _STEPS, ids.shape[1]):
            more = {name: output[name], **_position(model, at, ids.shape[0])}
            one = model(input_ids=ids[:, at : at + 1], use_cache=True, **more)
            found += outputs_of(one.logits)
    return found


def _position(model: Any, at: int, rows: int) -> Inputs:
    """As `generate` gives it where positions have the axes of an image: a call without goes on from
    where the model last saw one, which its steps leave to it."""
    from hfpatch.decoding.replica import has_axes, text_config

    if not has_axes(text_config(model.config)):
        return {}
    return {"position_ids": torch.full((3, rows, 1), at, device=model.device)}


def _with_decoders(ran: set[str], report: Any, model: nn.Module) -> set[str]:
    """A forward does not reach a model's decoding steps; what counts is whether one was served."""
    from hfpatch.decoding.kept import decoders  # with what decodes, which not every model needs

    paths = {s.path for s in report.swaps if s.op == "decoding"}
    held = {path: decoders.get(model.get_submodule(path)) for path in paths}
    return ran - paths | {path for path, d in held.items() if d is not None and d.steps}


def _gradients(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Of the parameters, for outputs weighed with the same random numbers each time."""
    kept = {name: p.grad for name, p in model.named_parameters()}
    with torch.enable_grad(), same_draws():
        leaves = pytree.tree_leaves(model(**copy.copy(inputs)))
        loss: Any = 0.0
        generator = torch.Generator().manual_seed(5)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_floating_point():
                weights = torch.randn(leaf.shape, generator=generator).to(leaf.device)
                loss = loss + (leaf * weights.to(leaf.dtype)).double().sum() / leaf.numel()
        if isinstance(loss, Tensor):
            for p in model.parameters():
                p.grad = None
            loss.backward()  # type: ignore[no-untyped-call]
    found = [p.grad.double().cpu() for p in model.parameters() if p.grad is not None]
    for name, p in model.named_parameters():
        p.grad = kept[name]
    return found


@contextmanager
def _calls_seen(modules: Iterable[nn.Module]) -> Iterator[set[int]]:
    """The ids of those that are called meanwhile."""
    called: set[int] = set()
    handles = [
        m.register_forward_pre_hook(lambda module, _: called.add(id(module))) for m in modules
    ]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def _modules_run(model: nn.Module, inputs: Inputs) -> set[str]:
    """The paths of modules that a forward calls; a module with several paths has them all."""
    with _calls_seen(model.modules()) as called:
        _forward(model, inputs)
    every = model.named_modules(remove_duplicate=False)
    return {path for path, m in every if id(m) in called}


def _place(path: str) -> str:
    """A path without the numbers of layers."""
    return re.sub(r"\d+", "#", path)


def _truth(
    model: nn.Module, inputs: Inputs, how: How, result: dict[str, Any], like: _Run
) -> _Run | None:
    """What a copy of the model computes in fp64; None, with the reason, where it cannot."""
    try:
        twin: Any = copy.deepcopy(model).double()
        if hasattr(twin, "set_experts_implementation"):  # grouped products know no fp64
            twin.set_experts_implementation("eager")
        wide = inputs
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            wide = cast(wide, dtype, torch.float64)
        run = _Run(twin, wide, how, like)
    except Exception as e:  # memory, or a module that insists on a dtype
        result["against"] = f"the original; not fp64: {type(e).__name__}: {e}".splitlines()[0]
        return None
    result["against"] = "fp64"
    return run


def dtype_of(model: nn.Module) -> torch.dtype:
    found = getattr(model, "dtype", None)
    return found if isinstance(found, torch.dtype) else next(model.parameters()).dtype


def seeded(pipeline: Any) -> dict[str, Any]:
    pipeline.set_progress_bar_config(disable=True)
    return {"generator": torch.Generator().manual_seed(0)}


# Comparing --------------------------------------------------------------------------------------


def _same_bits(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())
        for a, b in zip(some, others, strict=True)
    )


def _compare(
    result: dict[str, Any], before: _Run, patched: _Run, truth: _Run | None, model: nn.Module
) -> None:
    dtype = dtype_of(model)
    if not before.outputs:
        _settle(result, NOT_COMPARED, "the model returns no floating tensor")
        return
    _apart(result, before.outputs, patched.outputs, dtype if truth is None else None)
    pairs = [("outputs", before.outputs, patched.outputs, truth and truth.outputs)]
    if before.gradients or patched.gradients:
        pairs.append(("gradients", before.gradients, patched.gradients, truth and truth.gradients))
    if before.steps:
        pairs.append(("decoding steps", before.steps, patched.steps, truth and truth.steps))
    for what, original, ours, exact in pairs:
        if not exact or len(original) != len(ours):
            if len(original) != len(ours):
                _settle(result, FAILED, f"{len(ours)} {what} in place of {len(original)}")
            elif what != "outputs" and distance(ours, original) > APART[dtype]:
                _settle(result, FAILED, f"{what} are not those of the original")
            continue
        theirs, mine = distance(original, exact), distance(ours, exact)
        result[f"error of {what}"] = {"original": theirs, "patched": mine}
        if not mine <= FACTOR * max(theirs, torch.finfo(dtype).eps):
            _settle(
                result,
                FAILED,
                f"{what} are {mine:.2e} from those in fp64, and the original's {theirs:.2e}",
            )


def _apart(
    result: dict[str, Any], before: list[Tensor], patched: list[Tensor], dtype: torch.dtype | None
) -> None:
    """The largest difference relative to the largest value, which decides where `dtype` is given;
    values that are not finite must be the same."""
    if [t.shape for t in before] != [t.shape for t in patched]:
        _settle(result, FAILED, "outputs have other shapes")
        return
    worst, finite = 0.0, True
    for a, b in zip(before, patched, strict=True):
        odd = ~a.isfinite()
        finite &= bool((odd == ~b.isfinite()).all())
        if a[~odd].numel():
            scale = a[~odd].abs().max().clamp_min(1e-30)
            worst = max(worst, float(((b - a)[~odd].abs().max() / scale).item()))
    result["relative difference"] = worst
    if not finite:
        _settle(result, FAILED, "NaN or infinity where the original has none, or none where it has")
    elif before and not any(bool(t.isfinite().any()) for t in before if t.numel()):
        _settle(result, NOT_COMPARED, "the original's outputs are NaN or infinite, all of them")
    elif dtype is not None and not worst < APART[dtype]:
        _settle(result, FAILED, f"outputs differ by {worst:.2e} of the largest value")


def distance(some: list[Tensor], exact: list[Tensor]) -> float:
    """The root mean square difference relative to that of the values, each tensor in units of its
    largest value, so that none hides another; but of a thousandth of all tensors' largest at least,
    and where the exact values are roundings alone (the gradient of a bias of keys is 0) of that
    largest: noise there says nothing of one beside the other."""
    sizes = [float(e[e.isfinite()].abs().max()) if e.isfinite().any() else 0.0 for e in exact]
    largest = max([*sizes, 1e-30])
    none, least = largest * _ROUNDINGS, largest * 1e-3
    differences = squares = 0.0
    for a, e, size in zip(some, exact, sizes, strict=True):
        real = e.isfinite() & a.isfinite()
        if real.any():
            unit = largest if size < none else max(size, least)
            differences += float(((a - e)[real] / unit).square().mean())
            squares += float((e[real] / unit).square().mean())
    return float((differences / max(squares, 1e-30)) ** 0.5)


# Time -------------------------------------------------------------------------------------------


def _timed(model: nn.Module, inputs: Inputs, how: How) -> dict[str, Any]:
    """Medians of a forward in milliseconds, measured in turns as `hfpatch bench model` does: what
    slows a machine down for a while meets both.

    Beside them the least and the quartiles of the turns, and whether the two are within noise:
    where these spreads overlap.
    """
    from hfpatch.bench.subjects import Subject
    from hfpatch.bench.ways import Measured, take_turns

    def call() -> Any:
        return _forward(model, inputs)

    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    subject = Subject(
        type(model).__name__, model, device, dtype_of(model), inputs, {}, call, call, 1, "calls"
    )

    @contextmanager
    def patched() -> Iterator[None]:
        hfpatch.apply(model, strict=True, **how.arguments)
        try:
            yield
        finally:
            hfpatch.restore(model)

    ways = {"original": Measured("original"), "patched": Measured("patched")}
    take_turns(subject, {"original": nullcontext, "patched": patched}, ways, _ROUNDS, _WARMUP)
    times = {name: way.wall_ms for name, way in ways.items()}
    found: dict[str, Any] = {}
    for name in times:
        spread = Spread.of(times[name])
        found[f"{name} ms"] = spread.median
        found[f"{name} least ms"] = min(times[name])
        found[f"{name} quartiles ms"] = [spread.low, spread.high]
    gain = Gain.of(times["original"], times["patched"])
    return found | {
        "turns": gain.count,
        "speed-up": gain.ratio,
        "within noise": gain.within_noise,
    }
