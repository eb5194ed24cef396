"""What is known of a user's models and blocks, by their identity.

A `WeakKeyDictionary` asks its keys whether they are equal. A model's class may answer that by its
content, with a tensor or an error, and two models of equal content are two models all the same.
`torch.utils.weak.WeakIdKeyDictionary` goes by identity too, but looks `_fix_weakref` up on what it
is asked for: of a module that is `__getattr__`, which may be the user's and fails in 3 µs, at each
call of a model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")
_D = TypeVar("_D")


class PerObject(Generic[_K, _V]):
    """A dict by the identity of its keys, which it does not keep alive.

    Threads may share one: each access is one operation of a dict.
    """

    def __init__(self) -> None:
        # The reference is what tells a key from a later object in the same place.
        self._held: dict[int, tuple[weakref.ref[_K], _V]] = {}

    def __setitem__(self, key: _K, value: _V) -> None:
        held, at = self._held, id(key)

        def drop(gone: weakref.ref[_K]) -> None:
            found = held.get(at)
            if found is not None and found[0] is gone:
                held.pop(at, None)

        held[at] = weakref.ref(key, drop), value

    def get(self, key: _K) -> _V | None:
        """The value of an object, or None."""
        found = self._held.get(id(key))
        return found[1] if found is not None and found[0]() is key else None

    def __getitem__(self, key: _K) -> _V:
        found = self._held.get(id(key))
        if found is None or found[0]() is not key:
            raise KeyError(f"a `{type(key).__name__}`")  # its own text may be long, or an error
        return found[1]

    def __contains__(self, key: _K) -> bool:
        found = self._held.get(id(key))
        return found is not None and found[0]() is key

    def pop(self, key: _K, default: _D) -> _V | _D:
        """The value of an object, which is dropped, or `default`."""
        if key not in self:
            return default
        found = self._held.pop(id(key), None)  # another thread may have been first
        return default if found is None else found[1]

    def __len__(self) -> int:
        return len(self._held)

    def items(self) -> Iterator[tuple[_K, _V]]:
        """Those of now: what is added or dies meanwhile changes nothing."""
        for ref, value in self._held.copy().values():
            if (key := ref()) is not None:
                yield key, value
