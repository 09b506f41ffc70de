"""Windows are cut into runs: whole batches that lie one after the other in the same memory."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from converter.plan import EpochPlan
from converter.reading.ahead import read_ahead
from converter.reading.gather import Array
from converter.reading.meter import Meter
from converter.reading.sequences import SequencedRows, cut_columns

VALID_SUFFIX = "__valid"
LENGTH_SUFFIX = "__length"
NOT_PADDED = VALID_SUFFIX
"""The column that `uneven="pad"` adds to every batch: False for a row that another shard reads too."""

Columns = dict[str, Array | pa.Array]
"""Columns of the same rows: numbers, an Arrow array of strings, bytes or ragged rows, or sequences yet to be cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Batches that lie one after the other in the same memory."""

    columns: Columns
    batch_size: int
    num_rows: int
    """A multiple of `batch_size`; less than that only for the last batch of an epoch."""

    first_batch: int
    """The number in the plan of the first batch."""


def mark_padding(run: Run, plan: EpochPlan) -> Run:
    """The run with the column `NOT_PADDED`."""
    first_row = run.first_batch * run.batch_size
    is_own = np.arange(first_row, first_row + run.num_rows) < plan.num_rows - plan.num_padded
    return replace(run, columns={**run.columns, NOT_PADDED: is_own})


def cut_run(windows: Iterator[Columns], batch_size: int, num_rows: int, *, first_batch: int) -> Iterator[Run]:
    """Cut the first `num_rows` rows of the windows into runs of whole batches; the last may be short."""
    carry: Columns = {}
    carry_rows = 0
    left = num_rows
    batch = first_batch
    for columns in windows:
        available = min(_num_rows(columns), left - carry_rows)
        start = 0
        if carry_rows:
            start = min(batch_size - carry_rows, available)
            carry = {name: _join(carry[name], part[:start]) for name, part in columns.items()}
            carry_rows += start
            if carry_rows == batch_size:
                yield Run(columns=carry, batch_size=batch_size, num_rows=batch_size, first_batch=batch)
                batch += 1
                left -= batch_size
                carry, carry_rows = {}, 0
        stop = start + (available - start) // batch_size * batch_size
        if stop > start:
            yield Run(
                columns={name: part[start:stop] for name, part in columns.items()},
                batch_size=batch_size,
                num_rows=stop - start,
                first_batch=batch,
            )
            batch += (stop - start) // batch_size
            left -= stop - start
        if stop < available:
            # A copy, so that a few rows do not keep a window alive.
            carry = {name: _join(part[stop:available]) for name, part in columns.items()}
            carry_rows = available - stop
    if carry_rows:
        yield Run(columns=carry, batch_size=batch_size, num_rows=carry_rows, first_batch=batch)


def _num_rows(columns: Columns) -> int:
    return len(next(iter(columns.values())))


def cut_sequences(
    runs: Iterator[Run], *, batches_at_once: int, workers_count: int, meter: Meter, is_part: bool
) -> Generator[Run, None, None]:
    """Yield the runs in parts of some batches, whose sequences threads cut ahead of use."""

    def parts() -> Iterator[Run]:
        for run in runs:
            step = run.batch_size * batches_at_once
            for start in range(0, run.num_rows, step):
                stop = min(start + step, run.num_rows)
                columns = {name: column[start:stop] for name, column in run.columns.items()}
                first_batch = run.first_batch + start // run.batch_size
                yield replace(run, columns=columns, num_rows=stop - start, first_batch=first_batch)

    def cut(run: Run) -> Run:
        with meter.timed("gather"):
            return replace(run, columns=cut_columns(run.columns))

    cut_ahead = read_ahead(
        cut,
        parts(),
        workers_count=workers_count,
        ahead=2 * workers_count,
        meter=None if is_part else meter,
        pool="read",
    )
    with contextlib.closing(cut_ahead) as cut_runs:
        yield from cut_runs


def _join(*parts: Any) -> Any:
    parts = tuple(part.cut() if isinstance(part, SequencedRows) else part for part in parts)
    return pa.concat_arrays(parts) if isinstance(parts[0], pa.Array) else np.concatenate(parts)
