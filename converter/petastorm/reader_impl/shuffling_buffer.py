"""Buffers of single rows: first in, first out, or in random order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from converter.petastorm.reader_impl.seeds import global_seed


class ShufflingBufferBase(ABC):
    """What rows are put into and taken out of again, each once. For use by one thread."""

    @abstractmethod
    def add_many(self, items: Sequence[Any]) -> None:
        """Add rows."""

    @abstractmethod
    def retrieve(self) -> Any:
        """Take one row out."""

    @abstractmethod
    def can_add(self) -> bool:
        """Whether rows may be added now."""

    @abstractmethod
    def can_retrieve(self) -> bool:
        """Whether a row may be taken out now."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Rows that wait."""

    @abstractmethod
    def finish(self) -> None:
        """No more rows come, so the buffer may become empty."""


class NoopShufflingBuffer(ShufflingBufferBase):
    """Hands rows out as they came.

    >>> buffer = NoopShufflingBuffer()
    >>> buffer.add_many([1, 2])
    >>> buffer.retrieve(), buffer.size
    (1, 1)
    """

    def __init__(self) -> None:
        self.store: deque[Any] = deque()

    def add_many(self, items: Sequence[Any]) -> None:
        """Add rows at the end."""
        self.store.extend(items)

    def retrieve(self) -> Any:
        """Take the first row out.

        Raises:
            IndexError: there is none.
        """
        return self.store.popleft()

    def can_add(self) -> bool:
        """True: rows may always be added."""
        return True

    def can_retrieve(self) -> bool:
        """Whether there is a row."""
        return bool(self.store)

    @property
    def size(self) -> int:
        """Rows that wait."""
        return len(self.store)

    def finish(self) -> None:
        """Do nothing: all rows may be taken out anyway."""


class RandomShufflingBuffer(ShufflingBufferBase):
    """Hands out a random one of the rows that wait.

    Args:
        shuffling_buffer_capacity: rows may be added while fewer than this wait.
        min_after_retrieve: rows may be taken out while at least this many wait, or after `finish()`.
        extra_capacity: `add_many` may exceed the capacity by this many rows. No memory is reserved for them.
        seed: makes the order repeat; None takes it from NumPy's global generator.
    """

    def __init__(
        self,
        shuffling_buffer_capacity: int,
        min_after_retrieve: int,
        extra_capacity: int = 1000,
        *,
        seed: int | np.random.Generator | None = None,
    ) -> None:
        self._capacity, self._extra_capacity = shuffling_buffer_capacity, extra_capacity
        self._min_after_retrieve = min_after_retrieve
        self._generator = np.random.default_rng(global_seed() if seed is None else seed)
        self._items: list[Any] = []
        self._done_adding = False

    def add_many(self, items: Sequence[Any]) -> None:
        """Add rows.

        Raises:
            RuntimeError: `finish()` was called, the buffer is full, or there are more rows than `extra_capacity`.
        """
        check_room(self, len(items), self._capacity, self._extra_capacity, is_done=self._done_adding)
        self._items.extend(items)

    def retrieve(self) -> Any:
        """Take a random row out.

        Raises:
            RuntimeError: too few rows wait.
        """
        check_retrieval(self)
        items, place = self._items, int(self._generator.integers(len(self._items)))
        items[place], items[-1] = items[-1], items[place]
        return items.pop()

    def can_add(self) -> bool:
        """Whether fewer rows wait than the capacity, and `finish()` was not called."""
        return len(self._items) < self._capacity and not self._done_adding

    def can_retrieve(self) -> bool:
        """Whether enough rows wait; after `finish()` one is enough."""
        return self.size >= (1 if self._done_adding else max(1, self._min_after_retrieve))

    @property
    def size(self) -> int:
        """Rows that wait."""
        return len(self._items)

    def finish(self) -> None:
        """No more rows come, so the buffer may become empty."""
        self._done_adding = True


def check_room(buffer: Any, num_added: int, capacity: int, extra_capacity: int, *, is_done: bool) -> None:
    """Raise RuntimeError if a buffer must not take so many rows now."""
    if is_done:
        raise RuntimeError("Can not call add_many after finish() was called.")
    if not buffer.can_add():
        raise RuntimeError(
            f"Can not add rows: {buffer.size} wait, and the capacity is {capacity}. Call add_many while can_add() is "
            "True."
        )
    if buffer.size + num_added > capacity + extra_capacity:
        raise RuntimeError(
            "Attempt to enqueue more elements than the capacity allows. Current size: "
            f"{buffer.size}, new size {buffer.size + num_added}, maximum allowed: {capacity + extra_capacity}"
        )


def check_retrieval(buffer: Any) -> None:
    """Raise RuntimeError if a buffer must not hand out a row now."""
    if not buffer.can_retrieve():
        raise RuntimeError(f"Can not retrieve: {buffer.size} rows wait. Call retrieve while can_retrieve() is True.")
