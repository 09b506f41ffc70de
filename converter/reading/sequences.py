"""Sequences of rows: each row is decoded once for all sequences of a shuffle window, and sequences are cut on demand.

A window keeps its rows, in the order of time, and where each sequence begins among them; a sequence of 16 rows then
costs no 16 copies while it waits. A few batches at a time are cut into arrays `(sequences, steps, *shape)`, in threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from converter.manifest import Manifest
from converter.reading.gather import Array, take
from converter.reading.objects import to_numpy
from converter.sequences import Numbers, Sequences


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Which rows of a window are kept, and where its sequences begin among them."""

    row_groups: list[int]
    """Those of the window, then others that its sequences reach into."""

    rows: Array
    """The kept rows, as numbers in these row groups one after the other."""

    offsets: Array
    """Where each wanted sequence begins in `rows`."""

    lengths: Array | None
    """How many rows each has; None if all are whole."""


class _Places:
    """Finds live rows in row groups that are read together; asking for a row adds its row group."""

    def __init__(self, manifest: Manifest, live_starts: Numbers) -> None:
        assert manifest.sequences is not None
        self._rows, self._live_starts, self._sizes = manifest.sequences.rows, live_starts, manifest.row_group_rows
        self.starts: dict[int, int] = {}
        self._end = 0

    def add(self, row_group: int) -> int:
        """The place of a row group's first row."""
        if row_group not in self.starts:
            self.starts[row_group] = self._end
            self._end += int(self._sizes[row_group])
        return self.starts[row_group]

    def numbers_of(self, row_group: int, rows: Numbers) -> Numbers:
        """The numbers of some rows of a row group among all live rows; `rows` are live."""
        live = None if self._rows is None else self._rows.live_rows(row_group)
        return int(self._live_starts[row_group]) + (rows if live is None else np.searchsorted(live, rows))

    def of_range(self, start: int, stop: int) -> list[Numbers]:
        """The places of the live rows from `start` to `stop`, in parts."""
        parts = []
        row_group = int(np.searchsorted(self._live_starts, start, side="right")) - 1
        while start < stop:
            end = min(stop, int(self._live_starts[row_group + 1]))
            if start < end:
                first = int(self._live_starts[row_group])
                parts.append(self._of_live(row_group, np.arange(start - first, end - first)))
            start, row_group = max(start, end), row_group + 1
        return parts

    def of_numbers(self, numbers: Numbers) -> Numbers:
        """The places of any live rows."""
        row_groups = np.searchsorted(self._live_starts, numbers, side="right") - 1
        order = np.argsort(row_groups, kind="stable")
        places = np.empty(len(numbers), np.int64)
        found, firsts = np.unique(row_groups[order], return_index=True)
        for row_group, part in zip(found.tolist(), np.split(order, firsts[1:]), strict=True):
            places[part] = self._of_live(row_group, numbers[part] - self._live_starts[row_group])
        return places

    def _of_live(self, row_group: int, numbers: Numbers) -> Numbers:
        live = None if self._rows is None else self._rows.live_rows(row_group)
        return self.add(row_group) + (numbers if live is None else live[numbers])


def live_starts_of(manifest: Manifest) -> Numbers:
    """The number of each row group's first live row among all that sequences are made of, and at the end how many."""
    return np.concatenate(([0], np.cumsum(manifest.of_rows.live_rows)))


def lay_out(manifest: Manifest, row_groups: Numbers, wanted: Any, live_starts: Numbers, epoch: int) -> Layout:
    """The layout of a window; `wanted` are the numbers of sequences among those that begin in its row groups."""
    sequences, selection, draws = manifest.sequences, manifest.selection, manifest.draws
    assert sequences is not None
    assert selection is not None
    places = _Places(manifest, live_starts)
    numbers = []
    for row_group in row_groups.tolist():
        places.add(row_group)
        live = selection.live_rows(row_group)
        rows = np.arange(int(manifest.row_group_rows[row_group])) if live is None else live
        begins = places.numbers_of(row_group, rows)
        numbers.append(begins if draws is None else np.repeat(begins, draws.repeats(row_group, epoch)))
    first = np.concatenate(numbers)[wanted]
    owner = np.repeat(np.arange(len(row_groups)), [len(part) for part in numbers])[wanted]
    lengths = np.full(len(first), sequences.length)
    if sequences.begins is not None:
        ends = np.append(sequences.begins, live_starts[-1])
        lengths = np.minimum(lengths, ends[np.searchsorted(sequences.begins, first, side="right")] - first)
    # Each row group's rows, and as many more as its last sequences reach.
    last = np.full(len(row_groups), -1, np.int64)
    np.maximum.at(last, owner, first + lengths)
    starts, bases = live_starts[row_groups], np.zeros(len(row_groups), np.int64)
    kept: list[Numbers] = []
    num_kept = 0
    for index, (start, stop) in enumerate(zip(starts.tolist(), last.tolist(), strict=True)):
        bases[index] = num_kept
        kept += places.of_range(start, stop)
        num_kept += max(0, stop - start)
    offsets = first + (bases - starts)[owner]
    short = np.flatnonzero(lengths < sequences.length)
    if len(short) and len(sequences.links.last):
        follow = _follow(sequences, first[short], live_starts)
        kept.append(places.of_numbers(follow.numbers.reshape(-1)))
        offsets[short] = num_kept + np.arange(len(short)) * sequences.length
        lengths[short] = follow.lengths
    rows = np.concatenate(kept) if kept else np.empty(0, np.int64)
    if len(rows) and int(manifest.row_group_rows[list(places.starts)].sum()) < 1 << 31:
        rows = rows.astype(np.int32)
    return Layout(
        row_groups=list(places.starts),
        rows=rows,
        offsets=offsets,
        lengths=lengths if sequences.is_padded else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Followed:
    numbers: Numbers
    """The live rows of each sequence, `(sequences, length)`; the last one again where it ends early."""

    lengths: Numbers


def _follow(sequences: Sequences, first: Numbers, live_starts: Numbers) -> _Followed:
    """The rows of sequences that go on in another stretch."""
    assert sequences.begins is not None
    links, begins = sequences.links, np.append(sequences.begins, live_starts[-1])
    numbers = np.empty((len(first), sequences.length), np.int64)
    numbers[:, 0] = first
    lengths = np.full(len(first), sequences.length)
    current, goes_on = first, np.ones(len(first), np.bool_)
    for step in range(1, sequences.length):
        link = np.minimum(np.searchsorted(links.last, current), len(links.last) - 1)
        is_linked = links.last[link] == current
        following = np.where(is_linked, links.next[link], current + 1)
        begin = np.minimum(np.searchsorted(begins, current + 1), len(begins) - 1)
        ends_here = goes_on & ~is_linked & (begins[begin] == current + 1)
        lengths[ends_here] = step
        goes_on = goes_on & ~ends_here
        current = np.where(goes_on, following, current)
        numbers[:, step] = current
    return _Followed(numbers=numbers, lengths=lengths)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequencedRows:
    """A column of a window's rows, and where sequences begin among them; as long as there are sequences."""

    values: Any
    """The rows, an array or Arrow's texts."""

    offsets: Array
    lengths: Array | None
    steps: tuple[int, ...]
    shape: tuple[int, ...]
    """The dimensions of a sequence: none for a single step."""

    fill: Any
    """What follows a sequence that ends early."""

    at: Array | None = None
    """Where each of the window's rows is among `values`, if not all are there, or one stands for several."""

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return int(self.values.nbytes)

    def __getitem__(self, rows: slice) -> SequencedRows:
        lengths = None if self.lengths is None else self.lengths[rows]
        return replace(self, offsets=self.offsets[rows], lengths=lengths)

    def cut(self, index: Array | None = None) -> npt.NDArray[Any]:
        """The sequences as one array, `(sequences, steps, *shape)`; `index` is `places()`."""
        places = self.places() if index is None else index
        shape = (len(self), len(self.steps))
        if isinstance(self.values, pa.Array):
            taken = to_numpy(self.values.take(pa.array(places)))
            array: npt.NDArray[Any] = taken.astype(object, copy=False).reshape(shape)
        else:
            array = take(np.ascontiguousarray(self.values), places).reshape(*shape, *self.values.shape[1:])
        if self.lengths is not None and (self.lengths <= max(self.steps)).any():
            array = array if array.flags.writeable else array.copy()
            array[np.array(self.steps) >= self.lengths[:, None]] = self.fill
        return array.reshape(len(self), *self.shape, *array.shape[2:])

    def places(self) -> Array:
        """The row of each step of each sequence, one after the other."""
        steps = np.array(self.steps, np.int64)
        if self.lengths is None:
            places = self.offsets[:, None] + steps
        else:
            places = self.offsets[:, None] + np.minimum(steps, self.lengths[:, None] - 1)
        places = places.reshape(-1)
        if self.at is not None:
            return self.at[places]
        return places.astype(np.int32 if len(self.values) < 1 << 31 else np.int64, copy=False)

    def needed(self, rows: Array) -> tuple[SequencedRows, Array]:
        """The same with each row once that a sequence takes, and which of the window's rows these are.

        `rows` are the numbers of the window's rows, of which some may be the same.
        """
        places = np.unique(self.places())
        _, firsts, at_needed = np.unique(rows[places], return_index=True, return_inverse=True)
        at = np.zeros(len(rows), np.int64)
        at[places] = at_needed.reshape(-1)
        return replace(self, at=at), places[firsts]


def cut_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of sequences as arrays; others stay. Columns of the same steps share their places."""
    places: dict[tuple[int, ...], Array] = {}
    found: dict[str, Any] = {}
    for name, column in columns.items():
        if not isinstance(column, SequencedRows):
            found[name] = column
            continue
        if column.at is not None:
            found[name] = column.cut()
            continue
        if column.steps not in places:
            places[column.steps] = column.places()
        found[name] = column.cut(places[column.steps])
    return found
