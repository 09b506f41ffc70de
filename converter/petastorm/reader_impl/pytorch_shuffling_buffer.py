"""Buffers of torch columns, from which batches are taken: first in, first out, or in random order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from converter.petastorm.reader_impl.column_pool import ColumnPool
from converter.petastorm.reader_impl.columns import join, num_rows_of
from converter.petastorm.reader_impl.shuffling_buffer import check_retrieval, check_room

_SEEDS = 1 << 32


def torch_seed() -> int:
    """A seed that repeats after `torch.manual_seed`, as the order of Petastorm's buffers does."""
    return int(torch.randint(_SEEDS, (), dtype=torch.int64))


class BatchedShufflingBufferBase(ABC):
    """What columns of rows are put into and batches taken out of, each row once. For use by one thread.

    Args:
        batch_size: rows of a batch; the last one may have fewer.
    """

    def __init__(self, batch_size: int = 1) -> None:
        self.batch_size = batch_size
        self._done_adding = False

    def add_many(self, items: Iterable[Any]) -> None:
        """Add rows: one tensor for each column, or what torch makes a tensor of."""
        self._add_many([torch.as_tensor(column) for column in items])

    @abstractmethod
    def _add_many(self, items: Sequence[torch.Tensor]) -> None: ...

    @abstractmethod
    def retrieve(self) -> list[torch.Tensor]:
        """Take a batch out: one tensor for each column."""

    @abstractmethod
    def can_add(self) -> bool:
        """Whether rows may be added now."""

    @abstractmethod
    def can_retrieve(self) -> bool:
        """Whether a batch may be taken out now."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Rows that wait."""

    def finish(self) -> None:
        """No more rows come, so the buffer may become empty."""
        self._done_adding = True


class BatchedNoopShufflingBuffer(BatchedShufflingBufferBase):
    """Hands batches out in the order in which rows came.

    >>> buffer = BatchedNoopShufflingBuffer(batch_size=2)
    >>> buffer.add_many([[1, 2, 3]])
    >>> buffer.retrieve(), buffer.can_retrieve()
    ([tensor([1, 2])], False)
    """

    def __init__(self, batch_size: int = 1) -> None:
        super().__init__(batch_size)
        self._parts: list[list[torch.Tensor]] = []
        self._start = 0
        """Rows of the first part that were taken out."""

        self._size = 0

    def _add_many(self, items: Sequence[torch.Tensor]) -> None:
        self._parts.append(list(items))
        self._size += len(items[0])

    def retrieve(self) -> list[torch.Tensor]:
        """Take the first rows out, at most `batch_size`."""
        wanted = min(self._size, self.batch_size)
        self._size -= wanted
        taken: list[list[torch.Tensor]] = []
        while self._parts and (wanted or not taken):
            part = self._parts[0]
            stop = min(self._start + wanted, len(part[0]))
            taken.append([column[self._start : stop] for column in part])
            wanted -= stop - self._start
            self._start = stop
            if stop == len(part[0]):
                self._parts.pop(0)
                self._start = 0
        return [join(columns) for columns in zip(*taken, strict=True)]

    def can_add(self) -> bool:
        """True: rows may always be added."""
        return True

    def can_retrieve(self) -> bool:
        """Whether a whole batch waits; after `finish()` one row is enough."""
        return self._size >= (1 if self._done_adding else max(1, self.batch_size))

    @property
    def size(self) -> int:
        """Rows that wait."""
        return self._size


class BatchedRandomShufflingBuffer(BatchedShufflingBufferBase):
    """Hands out batches of random rows among those that wait.

    Args:
        shuffling_buffer_capacity: rows may be added while fewer than this wait.
        min_after_retrieve: a batch may be taken out while at least this many rows wait beside the others of the batch,
            or after `finish()`.
        extra_capacity: `add_many` may exceed the capacity by this many rows. No memory is reserved for them.
        batch_size: rows of a batch; the last one may have fewer.
        seed: makes the order repeat; None takes it from torch's global generator.
    """

    def __init__(
        self,
        shuffling_buffer_capacity: int,
        min_after_retrieve: int,
        extra_capacity: int = 1000,
        batch_size: int = 1,
        *,
        seed: int | np.random.Generator | None = None,
    ) -> None:
        super().__init__(batch_size)
        self._capacity, self._extra_capacity = shuffling_buffer_capacity, extra_capacity
        self._min_after_retrieve = min_after_retrieve
        self._pool = ColumnPool(np.random.default_rng(torch_seed() if seed is None else seed))

    def add_many(self, items: Iterable[Any]) -> None:
        """Add rows: one tensor for each column, or what torch makes a tensor of.

        Raises:
            RuntimeError: `finish()` was called, the buffer is full, or there are more rows than `extra_capacity`.
        """
        super().add_many(items)

    def _add_many(self, items: Sequence[torch.Tensor]) -> None:
        columns = dict(enumerate(items))
        check_room(self, num_rows_of(columns), self._capacity, self._extra_capacity, is_done=self._done_adding)
        self._pool.add(columns)

    def retrieve(self) -> list[torch.Tensor]:
        """Take random rows out, at most `batch_size`.

        Raises:
            RuntimeError: too few rows wait.
        """
        check_retrieval(self)
        return list(self._pool.draw(min(self.batch_size, self.size)).values())

    def can_add(self) -> bool:
        """Whether fewer rows wait than the capacity, and `finish()` was not called."""
        return self.size < self._capacity and not self._done_adding

    def can_retrieve(self) -> bool:
        """Whether enough rows wait; after `finish()` one is enough."""
        needed = max(1, self._min_after_retrieve + self.batch_size - 1)
        return self.size >= (1 if self._done_adding else needed)

    @property
    def size(self) -> int:
        """Rows that wait."""
        return self._pool.num_rows
