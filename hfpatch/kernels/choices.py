"""The user's choice of kernel sources: what `kernels=`, HFPATCH_KERNELS and a config file say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hfpatch.ops import OPS
from hfpatch.text import meant

#: One source: "hub", "local", "torch", "org/name@v1", a registered name, or a function.
Source = str | Callable[..., Tensor]
#: What `kernels=` takes for one op, or for all of them; a sequence is an order of preference.
KernelChoice = Source | Sequence[Source] | None

RESERVED = ("hub", "local", "torch")
DEFAULT_ORDER: tuple[Source, ...] = ("local", "torch")
#: The key, beside ops, for every op that has no entry of its own.
EVERY_OP = "*"


@dataclass(frozen=True)
class Choices:
    """Sources by op, in order of preference; None switches an op off."""

    by_op: Mapping[str, tuple[Source, ...] | None]
    named: frozenset[str] = frozenset()  # ops with one source that the user named
    order: tuple[Source, ...] | None = DEFAULT_ORDER  # of the other ops

    @classmethod
    def parse(cls, kernels: Any) -> Choices:
        """From None, one choice for every op, or {op: choice} with "*" for the others.

        Raises:
            TypeError, ValueError: it is something else, or names an op that there is not.
        """
        if kernels is None:
            return cls({})
        if not isinstance(kernels, Mapping):
            if not isinstance(kernels, str | Sequence):
                raise TypeError(
                    "`kernels` must be None, a source name, a sequence of them in order of "
                    f"preference, or a dict of op to those, got {type(kernels).__name__}"
                )
            kernels = {EVERY_OP: kernels}
        by_op: dict[str, tuple[Source, ...] | None] = {}
        named = set()
        order: tuple[Source, ...] | None = DEFAULT_ORDER
        for op, choice in kernels.items():
            sources = _sources(op, choice)
            single = sources is not None and not _is_list(choice)
            if op == EVERY_OP:
                order = sources
                named |= {o for o in OPS if single and o not in kernels}
                continue
            require_op(op)
            by_op[op] = sources
            if single:
                named.add(op)
        return cls(by_op, frozenset(named), order)

    def of(self, op: str) -> tuple[Source, ...] | None:
        """The sources of an op; None: switched off."""
        return self.by_op.get(op, self.order)

    def explicit(self, op: str) -> bool:
        """Whether one source was named for the op, rather than an order of preference."""
        return op in self.named


def require_op(op: str) -> None:
    """Raises ValueError if there is no such op."""
    if not isinstance(op, str) or op not in OPS:
        raise ValueError(
            f"unknown op `{op}`.{meant(op, OPS)} The ops are: {', '.join(sorted(OPS))}"
        )


def _is_list(choice: Any) -> bool:
    return isinstance(choice, Sequence) and not isinstance(choice, str | bytes)


def _sources(op: str, choice: Any) -> tuple[Source, ...] | None:
    if choice is None:
        return None
    if not _is_list(choice):
        return (_source(op, choice),)
    if not choice:
        raise ValueError(f"`kernels[{op!r}]` is an empty list; None switches the op off")
    return tuple(_source(op, c) for c in choice)


def _source(op: str, choice: Any) -> Source:
    if isinstance(choice, str):
        return choice
    if callable(choice):
        function: Callable[..., Tensor] = choice
        return function
    raise TypeError(
        f"`kernels[{op!r}]` must be a source name, a function, a sequence of these or None, got "
        f"{type(choice).__name__}"
    )


def parse_variable(text: str) -> Any:
    """The value of HFPATCH_KERNELS as a `kernels=` argument.

    "hub,local,torch" is an order of preference; "rms_norm=org/name@v1;*=local,torch" goes by op.
    One source without a comma is a named one; "none" switches an op off, alone every op.

    Raises:
        ValueError: an entry is neither, or an op has two.
    """
    if "=" not in text:
        return {EVERY_OP: _variable_choice(text)}
    choices = {}
    for entry in filter(None, (e.strip() for e in text.split(";"))):
        op, equals, value = entry.partition("=")
        if not equals:
            raise ValueError(f"expected `op=source` in {entry!r}, entries separated by `;`")
        if (op := op.strip()) in choices:
            raise ValueError(f"`{op}` stands there twice; an order of preference is `{op}=a,b`")
        choices[op] = _variable_choice(value)
    return choices


def _variable_choice(text: str) -> Any:
    names = [n.strip() for n in text.split(",") if n.strip()]
    if not names:
        raise ValueError(f"expected sources separated by `,`, got {text!r}")
    if names == ["none"]:
        return None
    return names if "," in text else names[0]
