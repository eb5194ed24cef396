"""What `apply` plans for decoding: a swap of the model's forward, or why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from hfpatch import swap
from hfpatch.decoding.candidates import is_candidate
from hfpatch.decoding.kept import Choice
from hfpatch.ops import OPS
from hfpatch.planning.plan import Skip, Swap
from hfpatch.planning.settings import Settings, matches
from hfpatch.proof.subject import class_of, forward_of_class

# What explains a model is imported by the first that generates text: most models do not.
if TYPE_CHECKING:
    from hfpatch.proof.proofs import Prepared

OP = "decoding"
#: By what `apply(decoding=…)` is given.
CHOICES = {
    "auto": Choice(frozenset({"cpu", "cuda"})),
    "int8": Choice(frozenset({"cpu"}), eight_bits=True),
    True: Choice(frozenset({"cpu", "cuda"})),
    False: Choice(frozenset()),
}
#: What the reason of a skip of it begins with.
_SKIPPED = "decoding: "


def check_choice(value: Any) -> Choice:
    """The steps to serve.

    Raises:
        TypeError, ValueError: it is neither "auto" nor "int8" nor a bool.
    """
    if not isinstance(value, (bool, str)):
        raise TypeError(f"`decoding` must be 'auto', 'int8', True or False, got {value!r}")
    if value not in CHOICES:
        raise ValueError(f"`decoding` must be 'auto', 'int8', True or False, got {value!r}")
    return CHOICES[value]


def in_vain(value: Any, settings: Settings) -> list[str]:
    """What to say of `decoding=True` or "int8" under a mode that serves no step."""
    if settings.training and (value is True or value == "int8"):
        return [
            f"`decoding={value!r}` serves no step under mode='training': apply again with "
            "mode='inference' to generate"
        ]
    return []


def missed(value: Any, skips: Iterable[Skip]) -> Iterator[str]:
    """What to warn of where `decoding=True` or "int8" asked for more than there is."""
    for skip in skips if value is True or value == "int8" else ():
        if skip.reason.startswith(_SKIPPED) and skip.kind != "excluded":
            reason = skip.reason.removeprefix(_SKIPPED)
            which = f"the steps of `{skip.class_name}` stay as they are"
            yield f"`decoding={value!r}`: {which}: {reason}"


def offer(
    roots: Sequence[tuple[str, nn.Module]], settings: Settings, choice: Choice
) -> tuple[list[Prepared], list[Skip]]:
    """The models that generate text, each with the swap of its forward or why it has none.

    Args:
        roots: (name of the component or "", module) pairs.
        choice: what was asked for.
    """
    prepared: list[Prepared] = []
    skips: list[Skip] = []
    if settings.training:
        return prepared, skips
    for name, root in {id(m): (n, m) for n, m in reversed(roots)}.values():
        if not is_candidate(root):
            continue
        class_name = class_of(root).__name__
        if settings.include is not None and not matches(settings.include, name, class_name):
            continue
        outcome = _decide(name, class_name, root, settings, choice)
        if isinstance(outcome, Skip):
            skips.append(outcome)
        else:
            prepared.append(outcome)
    return prepared, skips


def _decide(
    name: str, class_name: str, root: nn.Module, settings: Settings, choice: Choice
) -> Prepared | Skip:
    def skip(kind: str, reason: str) -> Skip:
        return Skip(name, class_name, kind, _SKIPPED + reason)

    if matches(settings.exclude, name, class_name):
        return skip("excluded", "matched by `exclude`")
    if not any("local" in (settings.sources.choices.of(op) or ()) for op in OPS):
        return skip("off", "its kernels are those of the local build, which `kernels=` leaves out")
    assumed = settings.sources.assumed
    if assumed is not None and (why := assumed.lacks()) is not None:
        return skip("unavailable", why)
    foreign = swap.foreign_forward(root)
    if foreign is not None:
        return skip("foreign", foreign)
    from hfpatch.decoding import loop, step  # they import transformers
    from hfpatch.decoding.layer import describe
    from hfpatch.decoding.rules import Unexplained
    from hfpatch.proof.proofs import Prepared

    try:
        described = describe(root, planned=settings.device is not None)
    except Unexplained as e:
        return skip("unexplained", str(e))
    device = described.model.device
    planned = settings.device or device.type
    if choice.eight_bits and planned != "cpu":
        on = device if settings.device is None else planned
        return skip("unsupported", f"weights of 8 bits are for a CPU, the model lies on {on}")
    if planned != device.type or assumed is not None:
        settings.sources.note(
            "decoding steps are planned by what the model computes; whether the kernels take its "
            "sizes, `apply` finds out where the weights are"
        )
    elif (why := step.unsupported(described.model)) is not None:
        kind = "unavailable" if "no decoding kernels" in why else "unsupported"
        return skip(kind, why)
    entry = Swap(
        name,
        class_name,
        OP,
        f"decoding steps of up to {step.MOST_ROWS.get(planned, 0)} rows in one call"
        + (", weights of 8 bits" if choice.eight_bits else ""),
        "local",
        "",
        (planned,),
        0.0,
        0.0,
    )

    def make() -> Any:
        return step.adapter(forward_of_class, root, described, choice)

    def over(forward: Any) -> Any:
        return step.adapter(forward, root, described, choice)

    own = loop.method_for(root)
    brings = {} if own is None else {"generate": own}
    return Prepared(root, make, entry, over=over, brings=brings)
