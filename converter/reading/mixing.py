"""Reads a mixture: each source's rows in its own order, interleaved by threads a few batches at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from converter.plan import EpochPlan
from converter.positions import take_positions
from converter.reading.ahead import read_ahead
from converter.reading.bounds import element_bytes, is_wide, mixed_bytes
from converter.reading.data_files import DataFiles
from converter.reading.gather import WindowRows, gather, gather_windows
from converter.reading.ragged import ragged_values
from converter.reading.runs import Columns, Run, mark_padding
from converter.reading.source import BatchSource

ReadRuns = Callable[[BatchSource, EpochPlan, DataFiles], Iterator[Run]]


def mixed_runs(
    source: BatchSource, plan: EpochPlan, files: DataFiles, batches: range | None, read_runs: ReadRuns
) -> Iterator[Run]:
    """Yield the batches of a mixture, or those numbered in `batches`, in order."""
    mixing, size = source.mixing, plan.batch_size
    assert mixing is not None
    wanted = range(plan.num_batches) if batches is None else batches
    first_row, stop_row = wanted.start * size, min(wanted.stop * size, plan.num_rows)
    spans = list(take_positions(plan.segments, first_row, stop_row))
    edges = [(mixing.places(plan.epoch, span.start), mixing.places(plan.epoch, span.stop)) for span in spans]
    step = size * max(1, mixed_bytes(source) // max(1, element_bytes(source) * size))
    with contextlib.ExitStack() as opened:
        streams = [
            opened.enter_context(
                contextlib.closing(
                    _Stream(
                        part, part_files, [(int(begin[number]), int(end[number])) for begin, end in edges], read_runs
                    )
                )
            )
            for number, (part, part_files) in enumerate(zip(source.parts, files.parts, strict=True))
        ]

        def jobs() -> Iterator[_Job]:
            for start in range(0, stop_row - first_row, step):
                stop = min(start + step, stop_row - first_row)
                own = tuple(take_positions(spans, start, stop))
                counts = mixing.taken(plan.epoch, own).tolist()
                parts = [part for stream, count in zip(streams, counts, strict=True) for part in stream.take(count)]
                yield _Job(spans=own, parts=parts, first_batch=(first_row + start) // size)

        def run_of(job: _Job) -> Run:
            ids, rows = mixing.interleave(plan.epoch, job.spans)
            columns = _interleaved(source, job.parts, ids, rows)
            return Run(columns=columns, batch_size=size, num_rows=len(ids), first_batch=job.first_batch)

        # Wide rows are copied here, and narrow ones by the sources' own threads: more would wait for each other.
        workers_count = source.workers_count if is_wide(source) else max(1, source.workers_count // 2)
        runs = read_ahead(run_of, jobs(), workers_count=workers_count, ahead=workers_count + 1)
        with contextlib.closing(runs):
            for run in runs:
                yield mark_padding(run, plan) if source.uneven == "pad" else run


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Job:
    spans: tuple[range, ...]
    """Positions of the mixture."""

    parts: Sequence[Columns]
    """The rows of all sources, one source after the other."""

    first_batch: int


class _Stream:
    """The rows of one source, in ranges of its endless stream of epochs."""

    def __init__(
        self, source: BatchSource, files: DataFiles, ranges: Sequence[tuple[int, int]], read_runs: ReadRuns
    ) -> None:
        self._source, self._files, self._read_runs = source, files, read_runs
        self._columns = self._read(ranges)
        self._left: Columns | None = None

    def _read(self, ranges: Sequence[tuple[int, int]]) -> Generator[Columns, None, None]:
        num_rows = self._source.manifest.num_live_rows
        for start, stop in ranges:
            begin = start
            while begin < stop:
                epoch, first = divmod(begin, num_rows)
                end = min(num_rows, first + stop - begin)
                plan = replace(self._source.plan(epoch), segments=(range(first, end),), num_padded=0, num_dropped=0)
                runs: Any = self._read_runs(self._source, plan, self._files)
                with contextlib.closing(runs):
                    for run in runs:
                        yield run.columns
                begin += end - first

    def take(self, num_rows: int) -> list[Columns]:
        """The next rows, in parts."""
        parts: list[Columns] = []
        while num_rows:
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
        self._columns.close()


def _interleaved(source: BatchSource, parts: Sequence[Columns], ids: Any, rows: Any) -> Columns:
    """The rows of all sources, which lie in `parts` one source after the other, in the mixture's order."""
    columns: Columns = {}
    # As `columns=` has them; the column of the source stands where it was named.
    later = source.names[source.names.index(source.source_name) + 1 :] if source.source_name is not None else ()
    for name in parts[0]:
        if later and name == later[0] and source.source_name is not None:
            columns[source.source_name] = ids.astype(np.int32)
        alike = _alike(source, name, parts)
        if isinstance(alike[0], WindowRows):
            columns[name] = gather_windows(alike, rows)
            continue
        # Texts of sequences are objects by now.
        is_object = isinstance(alike[0], np.ndarray) and alike[0].dtype == object
        columns[name] = np.concatenate(alike)[rows] if is_object else gather(alike, rows)
    if source.source_name is not None and not later:
        columns[source.source_name] = ids.astype(np.int32)
    return columns


def _alike(source: BatchSource, name: str, parts: Sequence[Mapping[str, Any]]) -> list[Any]:
    """A column's parts in one form: lists of a user's files and bytes of ours are not."""
    columns = [part[name] for part in parts]
    if not isinstance(columns[0], pa.Array) or len({column.type for column in columns}) == 1:
        return columns
    field = source.field_of(name)
    assert field is not None
    return [ragged_values(column, field).to_arrow(is_jagged=field.is_jagged) for column in columns]
