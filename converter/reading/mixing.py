"""Reads a mixture: each source's rows in its own order, interleaved by threads a few batches at a time."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from converter.garbage import may_wait
from converter.mixing import CYCLE_ROWS
from converter.plan import EpochPlan
from converter.pool import Threads
from converter.positions import take_positions
from converter.reading.ahead import close_generator, read_ahead
from converter.reading.bounds import is_wide, memory_bound, mixed_bytes, mixed_element_bytes
from converter.reading.data_files import DataFiles
from converter.reading.gather import WindowRows, gather, gather_windows, is_joint, take_columns
from converter.reading.ragged import ragged_values
from converter.reading.runs import Columns, Run, mark_padding
from converter.reading.source import BatchSource
from converter.storage.at_once import LinkedEvent
from converter.storage.requests import GivenUpError

ReadPlans = Callable[
    [BatchSource, Iterator[EpochPlan], int, DataFiles, threading.Event], Generator[Columns, None, None]
]

_FIRST_PART = 8


def mixed_runs(
    source: BatchSource, plan: EpochPlan, files: DataFiles, batches: range | None, read_plans: ReadPlans
) -> Iterator[Run]:
    """Yield the batches of a mixture, or those numbered in `batches`, in order."""
    mixing, size = source.mixing, plan.batch_size
    assert mixing is not None
    wanted = range(plan.num_batches) if batches is None else batches
    first_row, stop_row = wanted.start * size, min(wanted.stop * size, plan.num_rows)
    spans = list(take_positions(plan.segments, first_row, stop_row))
    edges = [(mixing.places(plan.epoch, span.start), mixing.places(plan.epoch, span.stop)) for span in spans]
    if files.room.most_bytes is None:
        files.room.most_bytes = memory_bound(source, plan)
    over, is_copied_here = threading.Event(), is_wide(source)
    with contextlib.ExitStack() as opened:
        streams: list[_Stream] = []
        for number, (part, part_files) in enumerate(zip(source.parts, files.parts, strict=True)):
            ranges = [range(begin[number], end[number]) for begin, end in edges]
            num_rows = sum(map(len, ranges))
            given_up = LinkedEvent(part_files.given_up)
            columns = read_plans(part, _plans(part, ranges), num_rows, part_files, given_up)
            stream = _Stream(columns, given_up, over, has_thread=not is_copied_here)
            streams.append(opened.enter_context(contextlib.closing(stream)))

        def jobs() -> Iterator[_Job]:
            for rows in _cut(range(stop_row - first_row), source):
                own = tuple(take_positions(spans, rows.start, rows.stop))
                counts = mixing.taken(plan.epoch, own).tolist()
                # Narrow sources are read at the same time, and nobody waits for them: an earlier job may be done.
                results = [stream.take(count) for stream, count in zip(streams, counts, strict=True)]
                yield _Job(spans=own, results=results, first_batch=(first_row + rows.start) // size)

        def run_of(job: _Job) -> Run:
            ids, rows = mixing.interleave(plan.epoch, job.spans)
            parts = [columns for result in job.results for columns in result()]
            columns = _interleaved(source, parts, ids, rows)
            return Run(columns=columns, batch_size=size, num_rows=len(ids), first_batch=job.first_batch)

        # Wide rows are copied here, and narrow ones by the sources' own threads: more would wait for each other.
        workers_count = source.workers_count if is_copied_here else max(1, source.workers_count // 2)
        # Set before the threads are waited for: they may wait for a store.
        ends = [over, *(stream.given_up for stream in streams)]
        runs = read_ahead(
            run_of,
            jobs(),
            workers_count=workers_count,
            ahead=workers_count + 1,
            given_up=ends,
            meter=files.meter,
            pool="read",
        )
        with contextlib.closing(runs):
            for run in runs:
                yield mark_padding(run, plan) if source.uneven == "pad" else run


def _plans(source: BatchSource, ranges: Iterable[range]) -> Iterator[EpochPlan]:
    """The plans of ranges of a source's endless stream of epochs."""
    num_rows = source.manifest.num_live_rows
    for rows in ranges:
        begin = rows.start
        while begin < rows.stop:
            epoch, first = divmod(begin, num_rows)
            end = min(num_rows, first + rows.stop - begin)
            yield replace(source.plan(epoch), segments=(range(first, end),), num_padded=0, num_dropped=0)
            begin += end - first


def _cut(rows: range, source: BatchSource) -> Iterator[range]:
    """The rows that are interleaved together: some batches. Of the first there are few, so that they come soon.

    Not of wide ones: 48 MB of them take some 10 ms, and a job more took 3 % of an epoch of 400 MB.
    """
    size = source.batch_size
    step = size * max(1, mixed_bytes(source) // max(1, mixed_element_bytes(source) * size))
    # If whole cycles are whole batches, the order of each job is that of the job before.
    in_cycles = step % math.lcm(size, CYCLE_ROWS)
    step -= in_cycles if in_cycles < step else 0
    first_part = 1 if is_wide(source) else _FIRST_PART
    start, stop = rows.start, rows.start + size * -(-step // (size * first_part))
    while start < rows.stop:
        yield range(start, min(stop, rows.stop))
        start, stop = stop, stop + step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Job:
    spans: tuple[range, ...]
    """Positions of the mixture."""

    results: Sequence[Callable[[], list[Columns]]]
    """What gives the rows of each source."""

    first_batch: int


class _Stream:
    """The rows of one source in order.

    A thread waits for narrow ones. Of wide ones there are only places to take, which took 8 % longer in a thread.
    """

    def __init__(
        self,
        columns: Generator[Columns, None, None],
        given_up: threading.Event,
        over: threading.Event,
        *,
        has_thread: bool,
    ) -> None:
        self._columns, self._over = columns, over
        self.given_up = given_up
        """Cancels the fetching of the source's files."""

        self._left: Columns | None = None
        self._thread = Threads(1, "converter-take") if has_thread else None

    def take(self, num_rows: int) -> Callable[[], list[Columns]]:
        """What gives the next rows, in parts, after those that were asked for before."""
        if self._thread is not None:
            return self._thread.submit(self._take, num_rows).result
        # An interrupt is raised at once: kept for the result, it would come some batches later, or not at all.
        taken = self._take(num_rows)
        return lambda: taken

    def _take(self, num_rows: int) -> list[Columns]:
        parts: list[Columns] = []
        while num_rows:
            if self._over.is_set():
                raise GivenUpError("The rows of a mixture are no longer wanted")
            columns = self._left if self._left is not None else next(self._columns)
            there = len(next(iter(columns.values())))
            self._left = None
            if there > num_rows:
                self._left = {name: column[num_rows:] for name, column in columns.items()}
                columns = {name: column[:num_rows] for name, column in columns.items()}
                there = num_rows
            parts.append(columns)
            num_rows -= there
        return parts

    def close(self) -> None:
        """End the thread and the reading; `over` and `given_up` are set by now."""
        if self._thread is not None:
            self._thread.shutdown(wait=may_wait(), cancel=True)
        # An interrupt while the thread was being started keeps the pool from waiting for it.
        close_generator(self._columns)


def _interleaved(source: BatchSource, parts: Sequence[Columns], ids: Any, rows: Any) -> Columns:
    """The rows of all sources, which lie in `parts` one source after the other, in the mixture's order."""
    alike = {name: _alike(source, name, parts) for name in parts[0]}
    plain = {name: own for name, own in alike.items() if all(map(is_joint, own))}
    taken = take_columns(plain, rows)
    columns: Columns = {}
    # As `columns=` has them; the column of the source stands where it was named.
    later = source.names[source.names.index(source.source_name) + 1 :] if source.source_name is not None else ()
    for name, own in alike.items():
        if later and name == later[0] and source.source_name is not None:
            columns[source.source_name] = ids.astype(np.int32)
        if name in taken:
            columns[name] = taken[name]
        elif isinstance(own[0], WindowRows):
            columns[name] = gather_windows(own, rows)
        else:
            # Texts of sequences are objects by now.
            is_object = isinstance(own[0], np.ndarray) and own[0].dtype == object
            columns[name] = np.concatenate(own)[rows] if is_object else gather(own, rows)
    if source.source_name is not None and not later:
        columns[source.source_name] = ids.astype(np.int32)
    return columns


def _alike(source: BatchSource, name: str, parts: Sequence[Mapping[str, Any]]) -> list[Any]:
    """A column's parts in one form: lists of a user's files and bytes of ours are not."""
    columns = [part[name] for part in parts]
    if any(isinstance(column, WindowRows) for column in columns):
        # Rows in a row were copied at once, those that were chosen from others were not.
        return [column if isinstance(column, WindowRows) else _copied(column) for column in columns]
    if not isinstance(columns[0], pa.Array) or len({column.type for column in columns}) == 1:
        return columns
    field = source.field_of(name)
    assert field is not None
    return [ragged_values(column, field).to_arrow(is_jagged=field.is_jagged) for column in columns]


def _copied(column: Any) -> WindowRows:
    """Rows that need no look at their file any more, among others that do."""
    return WindowRows(parts=[column], rows=np.arange(len(column)), check=lambda: None)
