"""Readers over rows in memory: of rows alone, of batches alone, and of columns; and a reader that is stopped."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from converter.petastorm.unischema import Unischema, UnischemaField

Columns = Mapping[str, Any]


def column_of(values: Sequence[Any]) -> Any:
    """Values of rows as a column: one array of numbers, or objects."""
    if all(isinstance(value, (np.ndarray, np.generic)) for value in values):
        kinds = {(value.dtype, value.shape) for value in values}
        if len(kinds) == 1 and next(iter(kinds))[0].kind in "biufcM":
            return np.stack(values)
    objects = np.empty(len(values), object)
    for number, value in enumerate(values):
        objects[number] = value
    return objects


def schema_of(row: Mapping[str, Any]) -> Unischema:
    fields = [UnischemaField(name, np.asarray(value).dtype.type, np.shape(value)) for name, value in row.items()]
    return Unischema("Fake", fields)


class RowReader:
    """Hands out the rows as namedtuples; like a user's own reader it has nothing else."""

    batched_output = False
    ngram: Any = None

    def __init__(self, rows: Sequence[Mapping[str, Any]], seed: int | None = None) -> None:
        self.rows = rows
        self.schema = schema_of(rows[0])
        self.num_taken = 0
        self.stopped = self.last_row_consumed = False
        self.calls: list[str] = []
        if seed is not None:
            self.seed = seed

    def __iter__(self) -> RowReader:
        return self

    def __next__(self) -> Any:
        if self.stopped:
            raise RuntimeError("Trying to read a sample after the reader was stopped")
        if self.num_taken == len(self.rows):
            self.last_row_consumed = True
            raise StopIteration
        self.num_taken += 1
        return self.schema.make_namedtuple(**self.rows[self.num_taken - 1])

    def reset(self) -> None:
        if not self.last_row_consumed:
            raise NotImplementedError("Currently do not support resetting a reader while in the middle of iteration.")
        self.num_taken, self.last_row_consumed = 0, False

    def stop(self) -> None:
        self.stopped = True
        self.calls.append("stop")

    def join(self) -> None:
        self.calls.append("join")


class BatchReader(RowReader):
    """Hands out batches of `group_rows` rows as namedtuples of arrays."""

    batched_output = True

    def __init__(self, rows: Sequence[Mapping[str, Any]], group_rows: int = 7, seed: int | None = None) -> None:
        super().__init__(rows, seed)
        self.group_rows = group_rows

    def columns(self) -> Columns:
        if self.stopped or self.num_taken == len(self.rows):
            super().__next__()
        part = self.rows[self.num_taken : self.num_taken + self.group_rows]
        self.num_taken += len(part)
        return {name: column_of([row[name] for row in part]) for name in part[0]}

    def __next__(self) -> Any:
        return self.schema.make_namedtuple(**self.columns())


class BlockReader(BatchReader):
    """Hands out batches, and columns."""

    def next_block(self) -> Columns:
        return self.columns()


class RowBlockReader(BlockReader):
    """Hands out rows, and columns."""

    batched_output = False

    def __next__(self) -> Any:
        return RowReader.__next__(self)


KINDS = (RowReader, BatchReader, BlockReader, RowBlockReader)
"""Every kind of reader."""


def numbered(count: int) -> list[dict[str, Any]]:
    """Rows of numbers alone."""
    return [{"id": np.int64(number), "pair": np.full(2, number / 2, np.float32)} for number in range(count)]


def told_when_stopped(reader: Any, elements: Iterable[Any], is_begun: threading.Event) -> list[str]:
    """How the RuntimeErrors begin that a thread gets which takes `elements` when another thread stops their reader."""
    told: list[str] = []

    def read() -> None:
        try:
            for _ in elements:
                pass
        except RuntimeError as error:
            told.append(str(error).partition(" created")[0])

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    assert is_begun.wait(60)
    stopping = threading.Thread(target=reader.stop, daemon=True)
    stopping.start()
    for thread in (stopping, reading):
        thread.join(30)
        assert not thread.is_alive()
    return told
