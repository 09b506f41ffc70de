"""A rank's rows in the order of an epoch: read from the files, or, if they are few, taken from memory.

A table of the size of MNIST fits in one window of the native reader. Such rows are kept between epochs: to permute
60,000 rows of 784 bytes takes some 5 ms of a processor, and to decompress them some 100.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from converter.loading.epochs import as_generator
from converter.permutations import permutation
from converter.plan import EpochPlan
from converter.reading.ahead import read_ahead
from converter.reading.data_files import DataFiles
from converter.reading.gather import gather
from converter.reading.runs import VALID_SUFFIX, Columns
from converter.reading.source import BatchSource
from converter.reading.windows import open_files, read_runs

_KEPT_BYTES = 64 << 20
"""Rows of fewer bytes are kept in memory; a guess, a little more than a window."""

_PIECE_BYTES = 4 << 20
"""How much is gathered at a time from memory: a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows that follow each other in an epoch: whole batches, but for the last one of the epoch."""

    columns: Columns
    """The columns, and masks of them by their names with `__valid`."""

    num_rows: int

    def __getitem__(self, rows: slice) -> Part:
        start, stop, _ = rows.indices(self.num_rows)
        return Part(columns={name: column[rows] for name, column in self.columns.items()}, num_rows=stop - start)


class Rows:
    """The rows of a source, in any order of batches. Copies that are sent to other processes read them anew."""

    def __init__(self, source: BatchSource) -> None:
        self.source = source
        self.num_processes = 1
        """How many processes read these rows together."""

        self._files: tuple[int, DataFiles] | None = None
        self._kept: Columns | None = None
        self._is_small = int(source.manifest.row_group_bytes[source.manifest.live_rows > 0].sum()) <= _KEPT_BYTES

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": None, "_kept": None}

    def plan(self, epoch: int) -> EpochPlan:
        """All rows of an epoch."""
        return self.source.plan(epoch)

    def parts(self, epoch: int, batches: Sequence[range]) -> Generator[Part, None, None]:
        """Yield the rows of some batches of an epoch, in order."""
        kept = self.keep()
        if kept is not None:
            yield from self._of_kept(kept, epoch, batches)
            return
        plan, size = self.plan(epoch), self.source.batch_size
        num_rows = self.source.manifest.num_live_rows
        segments = tuple(range(part.start * size, min(part.stop * size, num_rows)) for part in batches)
        plan = replace(plan, segments=segments, num_padded=0, num_dropped=0)
        with contextlib.closing(as_generator(read_runs(self.source, plan, self._opened()))) as runs:
            for run in runs:
                yield Part(columns=run.columns, num_rows=run.num_rows)

    def keep(self) -> Columns | None:
        """All rows in the table's order, read now if they were not yet; None if they are too many to be kept."""
        if self._kept is None and self._is_small:
            source = replace(self.source, shuffle=None, batch_size=1)
            columns: list[Columns] = []
            num_bytes = 0
            with contextlib.closing(as_generator(read_runs(source, source.plan(0), open_files(source)))) as runs:
                for run in runs:
                    columns.append(run.columns)
                    num_bytes += sum(column.nbytes for column in run.columns.values())
                    if num_bytes > 2 * _KEPT_BYTES:
                        # The log of the table said less.
                        self._is_small = False
                        return None
            joined = {name: self._joined(name, [part[name] for part in columns]) for name in columns[0]}
            self._kept = {name: column for name, column in joined.items() if not self._is_full_mask(name, column)}
        return self._kept

    def _joined(self, name: str, parts: Sequence[Any]) -> Any:
        """A column in one piece; bytes of one length as an array that can be gathered without looking at lengths."""
        if not isinstance(parts[0], pa.Array):
            return parts[0] if len(parts) == 1 else np.concatenate(parts)
        whole = pa.concat_arrays(parts)
        field = self.source.field_of(name)
        length = None if field is None or field.dtype != "bytes" or field.shape is None else equal_length(whole)
        if not length:
            return whole
        _, offsets, data = whole.buffers()
        first = int(np.frombuffer(offsets, np.int64, 1, whole.offset * 8)[0])
        return pa.Array.from_buffers(pa.binary(length), len(whole), [None, data.slice(first, length * len(whole))])

    def _is_full_mask(self, name: str, column: Any) -> bool:
        is_mask = name.endswith(VALID_SUFFIX) and name not in self.source.names
        return is_mask and isinstance(column, np.ndarray) and bool(column.all())

    def _of_kept(self, kept: Columns, epoch: int, batches: Sequence[range]) -> Generator[Part, None, None]:
        num_rows, size = self.source.manifest.num_live_rows, self.source.batch_size
        order = None if self.source.shuffle is None else permutation(f"deltatorch/{epoch}", num_rows).astype(np.int32)
        row_bytes = sum(column.nbytes for column in kept.values()) / num_rows
        step = max(1, int(_PIECE_BYTES / (row_bytes * size)))

        def pieces() -> Iterator[slice]:
            for part in batches:
                for first in range(part.start, part.stop, step):
                    yield slice(first * size, min(min(first + step, part.stop) * size, num_rows))

        def take(piece: slice) -> Part:
            rows = piece if order is None else order[piece]
            columns = {name: gather([column], rows) for name, column in kept.items()}
            return Part(columns=columns, num_rows=piece.stop - piece.start)

        threads = self.source.workers_count
        with contextlib.closing(read_ahead(take, pieces(), workers_count=threads, ahead=threads + 1)) as parts:
            yield from parts

    def _opened(self) -> DataFiles:
        pid = os.getpid()
        # After a fork, their lock may be held by a thread that exists only in the parent.
        if self._files is None or self._files[0] != pid:
            self._files = (pid, open_files(self.source, self.num_processes))
        return self._files[1]


def cut_parts(parts: Iterable[Part], ranges: Iterable[range], batch_size: int) -> Iterator[tuple[Part, range, bool]]:
    """Cut parts, which hold the batches of `ranges` in order, at the ends of the ranges.

    Yields each piece, the numbers of its batches, and whether a range ends with it.
    """
    wanted = iter(ranges)
    left = next(wanted, range(0))
    for part in parts:
        start = 0
        while start < part.num_rows:
            stop = min(start + len(left) * batch_size, part.num_rows)
            count = -(-(stop - start) // batch_size)
            yield part[start:stop], left[:count], count == len(left)
            left = left[count:] if count < len(left) else next(wanted, range(0))
            start = stop


def equal_length(values: pa.Array) -> int | None:
    """How many bytes each row has; None if rows differ."""
    if pa.types.is_fixed_size_binary(values.type):
        return int(values.type.byte_width)
    edges = np.frombuffer(values.buffers()[1], np.int64, len(values) + 1, values.offset * 8)
    sizes = np.diff(edges)
    return int(sizes[0]) if len(sizes) and not (sizes != sizes[0]).any() else None
