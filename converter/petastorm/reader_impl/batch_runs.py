"""A reader's rows as runs of whole batches: in the reader's order, or shuffled through a pool of rows in columns."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from converter.errors import ConverterError
from converter.petastorm.native import ShuffledRuns, native_manifest
from converter.petastorm.reader import Reader
from converter.petastorm.reader_impl.column_pool import ColumnPool
from converter.petastorm.reader_impl.columns import Columns, join, num_rows_of, row_bytes_of
from converter.reading.runs import Run
from converter.storage.requests import GivenUpError

_PIECE_BYTES = 8 << 20
"""Rows that are drawn at once: enough that a call for each column costs nothing beside the copy (a guess)."""


def has_columns(reader: Any) -> bool:
    """Whether a reader hands out columns; others hand out rows one by one, such as a user's own."""
    return hasattr(reader, "next_block") or bool(getattr(reader, "batched_output", False))


def blocks_of(reader: Any) -> Iterator[Columns]:
    """The rows of a reader as columns, in the schema's order; those of windows have keys `(offset, name)`."""
    if not hasattr(reader, "next_block"):
        for batch in reader:
            yield batch._asdict()
        return
    names = list(reader.schema.fields)
    while True:
        try:
            block = reader.next_block()
        except StopIteration:
            return
        yield {name: block[name] for name in names} if set(names) == block.keys() else block


def native_runs(
    reader: Any, *, batch_size: int, capacity: int, generator: np.random.Generator
) -> Generator[Run, None, None] | None:
    """Shuffled runs by the native engine; None if only the reader itself can read its rows.

    That is so with code of the user's, with columns that are no numbers, and if rows were taken from the reader.
    """
    if not isinstance(reader, Reader) or not reader.is_fresh:
        return None
    work = reader.work
    manifest = native_manifest(work, reader.given_up)
    if manifest is None:
        return None
    if reader.seed is None:
        # So that the order repeats for users who seed the global generators.
        work = replace(work, order=replace(work.order, seed=int(generator.integers(1 << 32))))
    runs = ShuffledRuns(work, manifest, batch_size=batch_size, window_rows=capacity, given_up=reader.given_up)
    return _checked_runs(reader, runs, manifest.num_live_rows)


def _checked_runs(reader: Reader, runs: Iterable[Run], epoch_rows: int) -> Generator[Run, None, None]:
    num_rows = 0
    try:
        for run in runs:
            if reader.stopped:
                break
            reader.begin()
            num_rows += run.num_rows
            yield run
        else:
            reader.finish()
            return
    except GeneratorExit:
        reader.leave(-(-num_rows // epoch_rows))
        raise
    except (ConverterError, GivenUpError):
        if not reader.stopped:
            raise
    # It raises what a stopped reader raises.
    reader.next_block()


def runs_in_order(blocks: Iterable[Mapping[Any, Any]], batch_size: int) -> Iterator[Run]:
    """Runs of blocks one after the other. Only a batch that spans blocks is joined from them."""
    waiting: list[Columns] = []
    num_waiting = 0
    for block in blocks:
        num_rows, start = num_rows_of(block), 0
        if num_waiting:
            start = min(batch_size - num_waiting, num_rows)
            waiting.append(slice_rows(block, 0, start))
            num_waiting += start
            if num_waiting == batch_size:
                yield _joined(waiting, batch_size)
                waiting, num_waiting = [], 0
        stop = start + (num_rows - start) // batch_size * batch_size
        if stop > start:
            yield run_of(slice_rows(block, start, stop), batch_size)
        if stop < num_rows:
            waiting.append(slice_rows(block, stop, num_rows))
            num_waiting += num_rows - stop
    if num_waiting:
        yield _joined(waiting, batch_size)


def shuffled_runs(
    blocks: Iterable[Mapping[Any, Any]], batch_size: int, pool: ColumnPool, *, min_left: int
) -> Iterator[Run]:
    """Runs of rows drawn from a pool, in which at least `min_left` rows wait until the last block has come."""
    row_bytes = 1
    for block in blocks:
        if num_rows_of(block):
            pool.add(block)
            row_bytes = row_bytes_of(block)
            yield from _drawn(pool, batch_size, pool.num_rows - min_left, _PIECE_BYTES // row_bytes)
    yield from _drawn(pool, batch_size, pool.num_rows, _PIECE_BYTES // row_bytes)
    if pool.num_rows:
        yield run_of(pool.draw(pool.num_rows), batch_size)


def _drawn(pool: ColumnPool, batch_size: int, num_rows: int, piece_rows: int) -> Iterator[Run]:
    """Whole batches of at most `num_rows` rows."""
    # A float in one batch must not round the integers of another one.
    left, most = num_rows // batch_size, 1 if pool.has_mixed_types else max(1, piece_rows // batch_size)
    while left > 0:
        yield run_of(pool.draw(min(most, left) * batch_size), batch_size)
        left -= most


def run_of(columns: Columns, batch_size: int) -> Run:
    """Batches that lie one after the other in the same columns."""
    return Run(columns=columns, batch_size=batch_size, num_rows=num_rows_of(columns), first_batch=0)


def slice_rows(block: Mapping[Any, Any], start: int, stop: int) -> Columns:
    """Some rows of each column, in the same memory."""
    return {name: column[start:stop] for name, column in block.items()}


def _joined(parts: list[Columns], batch_size: int) -> Run:
    return run_of({name: join([part[name] for part in parts], name) for name in parts[0]}, batch_size)
