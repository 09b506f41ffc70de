"""Which rows a process reads in an epoch, and in what order.

Pure: the same manifest, seed, epoch, window and shard give the same plan on
every machine, for any number of threads and workers. Nothing here opens a file.

The order of an epoch is a sequence of positions. Row groups are permuted across
the dataset, taken together into windows, and rows are permuted inside a window;
without shuffling both permutations are the identity. A shard is a range of
positions, so it is cut by arithmetic, to the row.

Why arithmetic instead of a shuffled list: a plan costs memory per row group, not
per row, and any position can be found again from one integer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from converter.errors import EmptyShardError

Uneven = Literal["drop", "keep"]

DEFAULT_WINDOW_BYTES = 48 << 20
"""Rows that are decoded and mixed together, in bytes of all columns: a guess between a
quick first batch and good mixing, to be replaced by a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One of `count` parts of a dataset: disjoint, without gaps.

    Elsewhere: torch `rank`/`world_size`, tf.data `shard(num_shards, index)`,
    Petastorm `cur_shard`/`shard_count`.

    >>> [Shard(index=i, count=3).rows(10) for i in range(3)]
    [range(0, 3), range(3, 6), range(6, 10)]
    """

    index: int = 0
    """Which part, in `[0, count)`."""

    count: int = 1
    """How many parts there are; at least 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"A shard needs 0 <= cur_shard < shard_count, got {self.index} of {self.count}.")

    def rows(self, num_rows: int) -> range:
        """The positions of this part; sizes differ by at most one."""
        return range(num_rows * self.index // self.count, num_rows * (self.index + 1) // self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shuffle:
    """A reproducible permutation: `seed` chooses it, `fingerprint` ties it to the rows."""

    seed: int
    fingerprint: str

    def permutation(self, size: int, *, epoch: int, window: int | None) -> npt.NDArray[np.int64]:
        """A uniform permutation of `range(size)`: of one window's rows, or (None) of the row groups.

        Philox's raw output is promised never to change between NumPy versions, `Generator.permutation`
        is not; so the permutation is the order of raw numbers, and a resumed run finds its rows again.
        """
        digest = hashlib.sha256(f"{self.fingerprint}/{self.seed}/{epoch}".encode()).digest()
        stream = 0 if window is None else window + 1
        generator = np.random.Philox(key=int.from_bytes(digest[:16], "little"), counter=[0, 0, 0, stream])
        return np.argsort(generator.random_raw(size)).astype(np.int64, copy=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of one window that one process reads at a stretch."""

    window: int
    """The window's number in the epoch."""

    row_groups: npt.NDArray[np.int64]
    """The window's row groups, in the epoch's order."""

    window_rows: int
    """Rows of the whole window."""

    start: int
    """First wanted position within the window."""

    stop: int
    """One past the last wanted position within the window."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochPlan:
    """One process's share of one epoch: its positions, its batches, the windows they come from."""

    epoch: int
    batch_size: int
    drop_last: bool
    shuffle: Shuffle | None
    segments: tuple[range, ...]
    """Positions in the epoch's order that this process reads, ascending."""

    group_order: npt.NDArray[np.int64]
    group_starts: npt.NDArray[np.int64]
    """Position of each ordered row group's first row, and at the end the number of rows."""

    window_starts: npt.NDArray[np.int64]
    """For each window the index of its first row group in the order, and at the end their number."""

    @property
    def num_rows(self) -> int:
        """Rows that this process reads in the epoch, those of a dropped last batch included."""
        return sum(len(segment) for segment in self.segments)

    @property
    def num_batches(self) -> int:
        """Batches that this process yields in the epoch.

        >>> import numpy as np
        >>> plan = plan_epoch(np.array([6, 4]), batch_size=4, window_rows=6)
        >>> plan.num_rows, plan.num_batches
        (10, 3)
        """
        whole, rest = divmod(self.num_rows, self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def pieces(self, first_batch: int = 0, stop_batch: int | None = None) -> Iterator[Piece]:
        """The windows' parts that hold batches `[first_batch, stop_batch)`, in order."""
        stop_batch = self.num_batches if stop_batch is None else min(stop_batch, self.num_batches)
        first_row = first_batch * self.batch_size
        stop_row = min(stop_batch * self.batch_size, self.num_rows)
        rows_before = 0
        for segment in self.segments:
            start = segment.start + max(first_row - rows_before, 0)
            stop = segment.start + min(stop_row - rows_before, len(segment))
            rows_before += len(segment)
            if start < stop:
                yield from self._windows(start, stop)

    def _windows(self, start: int, stop: int) -> Iterator[Piece]:
        positions = self.group_starts[self.window_starts]
        window = int(np.searchsorted(positions, start, side="right")) - 1
        while start < stop:
            begin, end = int(positions[window]), int(positions[window + 1])
            if start < end:
                groups = self.group_order[self.window_starts[window] : self.window_starts[window + 1]]
                yield Piece(
                    window=window,
                    row_groups=groups,
                    window_rows=end - begin,
                    start=start - begin,
                    stop=min(stop, end) - begin,
                )
                start = min(stop, end)
            window += 1

    def batch_runs(self) -> list[range]:
        """All batches, cut into runs that begin in one window each: the unit of work of a worker process."""
        positions = self.group_starts[self.window_starts]
        starts: list[int] = []
        rows_before = 0
        for segment in self.segments:
            # A batch belongs to the window in which its first row lies.
            inside = positions[(positions > segment.start) & (positions < segment.stop)]
            starts += [rows_before, *(rows_before + inside - segment.start).tolist()]
            rows_before += len(segment)
        firsts = sorted({-(-start // self.batch_size) for start in starts})
        firsts = [first for first in firsts if first < self.num_batches]
        stops = [*firsts[1:], self.num_batches] if firsts else []
        return [range(first, stop) for first, stop in zip(firsts, stops, strict=True)]


def plan_epoch(
    row_group_rows: npt.NDArray[np.int64],
    *,
    batch_size: int,
    window_rows: int,
    epoch: int = 0,
    shuffle: Shuffle | None = None,
    shard: Shard | None = None,
    uneven: Uneven = "drop",
    drop_last: bool = False,
) -> EpochPlan:
    """The plan of `shard` for one epoch over row groups of these sizes.

    `uneven` says what happens where the shards' sizes differ: `"drop"` gives all as many rows as
    the smallest has, so that every rank takes equally many steps (the dropped row of a larger
    shard is another one in each epoch); `"keep"` reads every row, and steps may differ.

    Raises:
        EmptyShardError: there are fewer rows than shards.
    """
    part = shard or Shard()
    order = np.arange(len(row_group_rows), dtype=np.int64)
    if shuffle is not None:
        order = shuffle.permutation(len(row_group_rows), epoch=epoch, window=None)
    starts = np.zeros(len(order) + 1, dtype=np.int64)
    np.cumsum(row_group_rows[order], out=starts[1:])
    num_rows = int(starts[-1])
    if num_rows < part.count:
        raise EmptyShardError(
            f"{num_rows} rows cannot be divided among {part.count} shards: at least one would be empty. "
            "Use fewer shards (shard_count), or more rows."
        )
    return EpochPlan(
        epoch=epoch,
        batch_size=batch_size,
        drop_last=drop_last,
        shuffle=shuffle,
        segments=_segments(part, num_rows, epoch=epoch, uneven=uneven),
        group_order=order,
        group_starts=starts,
        window_starts=_cut_windows(starts, window_rows),
    )


def _segments(shard: Shard, num_rows: int, *, epoch: int, uneven: Uneven) -> tuple[range, ...]:
    rows = shard.rows(num_rows)
    if uneven == "keep" or len(rows) == num_rows // shard.count:
        return (rows,)
    # One row too many. Which one is left out moves with the epoch, so that none is left out for ever.
    dropped = rows.start + epoch % len(rows)
    return tuple(part for part in (range(rows.start, dropped), range(dropped + 1, rows.stop)) if len(part))


def _cut_windows(group_starts: npt.NDArray[np.int64], window_rows: int) -> npt.NDArray[np.int64]:
    """Consecutive row groups together until a window has `window_rows` rows; one row group at least."""
    bounds = [0]
    last = len(group_starts) - 1
    while bounds[-1] < last:
        wanted = group_starts[bounds[-1]] + window_rows
        bounds.append(min(max(int(np.searchsorted(group_starts, wanted)), bounds[-1] + 1), last))
    return np.asarray(bounds, dtype=np.int64)


def default_window_rows(num_rows: int, num_bytes: int) -> int:
    """Rows of about `DEFAULT_WINDOW_BYTES`, from the size of all columns: the order may not depend on `columns`."""
    if not num_rows:
        return 1
    return max(1, DEFAULT_WINDOW_BYTES * num_rows // max(num_bytes, 1))


def check_integer(name: str, value: Any, *, least: int) -> int:
    """An argument that must be an integer of at least `least`; names it in the error."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")
    return int(value)
