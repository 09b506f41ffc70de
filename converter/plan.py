"""Which rows a process reads in an epoch, and in what order.

Pure: the same manifest, seed, epoch, window and shard give the same plan on every machine, for any number of threads
and workers. Nothing here opens a file.

The order of an epoch is a sequence of positions. Row groups are permuted across the dataset and cut into windows, and
rows are permuted inside a window; without shuffling both permutations are the identity. A shard is a range of
positions, exact to the row.

To resume, the ranges of positions that are left are cut again, among any number of shards. So a state is a few
integers.

Why arithmetic instead of a shuffled list: a plan costs memory per row group, not per row, and one integer finds any
position again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from converter.errors import EmptyShardError
from converter.permutations import permutation
from converter.positions import Shard, count_positions, remaining_positions, share_of, take_positions
from converter.state import Past, Uneven

DEFAULT_WINDOW_BYTES = 48 << 20
"""Bytes in memory of a window, all columns: a guess between a quick first batch and good mixing."""

DEFAULT_WINDOW_GROUPS = 64
"""Row groups of a window at most, by default: each may be a file, which is opened before the first batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shuffle:
    """A reproducible permutation of rows and row groups."""

    seed: int
    fingerprint: str
    """`Manifest.live_fingerprint`: other rows get another permutation."""

    def permutation(self, size: int, *, epoch: int, window: int | None) -> npt.NDArray[np.int64]:
        """A uniform permutation of `range(size)`: of one window's rows, or (None) of the row groups.

        A resumed run needs the same one.
        """
        return permutation(self._name(epoch), size, stream=0 if window is None else window + 1)

    def of_buckets(self, size: int, *, epoch: int, window: int) -> npt.NDArray[np.int64]:
        """A uniform permutation of a window's buckets."""
        return permutation(self._name(epoch) + "/buckets", size, stream=window)

    def _name(self, epoch: int) -> str:
        return f"{self.fingerprint}/{self.seed}/{epoch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of one window that one process reads together."""

    epoch: int
    window: int
    """The window's number in the epoch."""

    row_groups: npt.NDArray[np.int64]
    """The window's row groups, in the epoch's order."""

    window_rows: int
    """Rows of the whole window."""

    spans: tuple[range, ...]
    """The positions to read, within the window, in order."""

    is_cut: bool = False
    """Whether it is one of two that were one, and so have one permutation."""

    @property
    def num_rows(self) -> int:
        """Rows to read."""
        return sum(map(len, self.spans))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochPlan:
    """What one process reads in one epoch: its positions, batches and windows."""

    epoch: int
    batch_size: int
    drop_last: bool
    shuffle: Shuffle | None
    segments: tuple[range, ...]
    """The positions that this process reads, in order."""

    num_padded: int
    """How many of the last rows another shard reads, too, so that all shards have equally many."""

    num_dropped: int
    """Rows that no shard reads, so that all shards have equally many."""

    group_order: npt.NDArray[np.int64]
    """The row groups, in the epoch's order."""

    group_starts: npt.NDArray[np.int64]
    """The position of each one's first row, and at the end the number of rows."""

    window_starts: npt.NDArray[np.int64]
    """Each window's first index into `group_order`, and at the end the number of row groups."""

    @property
    def num_rows(self) -> int:
        """Rows that this process reads, including those of a dropped last batch."""
        return sum(map(len, self.segments))

    @property
    def num_batches(self) -> int:
        """Batches that this process yields.

        >>> import numpy as np
        >>> plan = plan_epoch(np.array([6, 4]), batch_size=4, window_rows=6)
        >>> plan.num_rows, plan.num_batches
        (10, 3)
        """
        whole, rest = divmod(self.num_rows, self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def first_position(self, batch: int) -> int:
        """The position of a batch's first row, which identifies it for any shards and batch sizes."""
        return next(iter(take_positions(self.segments, batch * self.batch_size, batch * self.batch_size + 1)))[0]

    def pieces(self, first_batch: int = 0, stop_batch: int | None = None) -> Iterator[Piece]:
        """The parts of windows that hold batches `[first_batch, stop_batch)`, in order."""
        num_batches = self.num_batches if stop_batch is None else min(stop_batch, self.num_batches)
        stop_row = min(num_batches * self.batch_size, self.num_rows)
        positions = self.group_starts[self.window_starts]
        current = -1
        spans: list[range] = []
        for span in take_positions(self.segments, first_batch * self.batch_size, stop_row):
            start = span.start
            while start < span.stop:
                window = int(np.searchsorted(positions, start, side="right")) - 1
                stop = min(span.stop, int(positions[window + 1]))
                if window != current and spans:
                    yield self._piece(current, spans)
                    spans = []
                current = window
                spans.append(range(start, stop))
                start = stop
        if spans:
            yield self._piece(current, spans)

    def _piece(self, window: int, spans: Sequence[range]) -> Piece:
        first, last = (int(index) for index in self.window_starts[window : window + 2])
        begin, end = int(self.group_starts[first]), int(self.group_starts[last])
        return Piece(
            epoch=self.epoch,
            window=window,
            row_groups=self.group_order[first:last],
            window_rows=end - begin,
            spans=tuple(range(span.start - begin, span.stop - begin) for span in spans),
        )

    def first_pieces(self, pieces: Iterator[Piece], num_rows: int) -> Iterator[Piece]:
        """The pieces, the first cut after `num_rows` rows: the first batch need not wait for a whole window.

        A piece of a single row group stays whole: it would be decoded twice.
        """
        for piece in pieces:
            if num_rows < piece.num_rows and len(piece.row_groups) > 1:
                for part in (range(num_rows), range(num_rows, piece.num_rows)):
                    spans = tuple(take_positions(piece.spans, part.start, part.stop))
                    yield dataclasses.replace(piece, spans=spans, is_cut=True)
            else:
                yield piece
            yield from pieces

    def batch_runs(self) -> list[range]:
        """All batches, in runs that begin in one window each: the unit of work of a worker process."""
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
    past: Past = (),
    window_groups: int | None = None,
) -> EpochPlan:
    """The plan of `shard` for one epoch, or for the part of it that `past` left.

    A window gets row groups until it has `window_rows` rows, but at most `window_groups` row groups.

    If the shards' sizes differ, `uneven="drop"` gives all as many rows as the smallest (each epoch drops other rows);
    `"pad"` gives all as many as the largest, the smaller ones by a row of another shard; `"keep"` reads each row once.

    Raises:
        EmptyShardError: there are fewer rows than shards.
    """
    part = shard or Shard()
    order = np.arange(len(row_group_rows), dtype=np.int64)
    if shuffle is not None:
        order = shuffle.permutation(len(row_group_rows), epoch=epoch, window=None)
    # Row groups without live rows are not opened.
    order = order[row_group_rows[order] > 0]
    starts = np.zeros(len(order) + 1, dtype=np.int64)
    np.cumsum(row_group_rows[order], out=starts[1:])
    num_rows = int(starts[-1])
    if num_rows < part.count:
        raise EmptyShardError(
            f"{num_rows} rows cannot be divided among {part.count} shards: at least one would be empty. "
            "Use fewer shards (shard_count), or more rows."
        )
    left = remaining_positions(num_rows, past, epoch=epoch, uneven=uneven)
    num_left = count_positions(left)
    segments, num_padded = share_of(left, part, epoch=epoch, uneven=uneven)
    return EpochPlan(
        epoch=epoch,
        batch_size=batch_size,
        drop_last=drop_last,
        shuffle=shuffle,
        segments=tuple(segments),
        num_padded=num_padded,
        num_dropped=num_left % part.count if uneven == "drop" else 0,
        group_order=order,
        group_starts=starts,
        window_starts=_cut_windows(starts, window_rows, window_groups),
    )


def _cut_windows(
    group_starts: npt.NDArray[np.int64], window_rows: int, window_groups: int | None
) -> npt.NDArray[np.int64]:
    """`EpochPlan.window_starts`: a window gets at least one row group, and more until it has `window_rows` rows."""
    bounds = [0]
    last = len(group_starts) - 1
    while bounds[-1] < last:
        stop_row = group_starts[bounds[-1]] + window_rows
        limit = last if window_groups is None else bounds[-1] + window_groups
        bounds.append(min(max(int(np.searchsorted(group_starts, stop_row)), bounds[-1] + 1), limit, last))
    return np.asarray(bounds, dtype=np.int64)


def default_window_rows(num_rows: int, num_bytes: int) -> int:
    """Rows of a window of `DEFAULT_WINDOW_BYTES`; of all columns, because the order must not depend on `columns`."""
    return max(1, DEFAULT_WINDOW_BYTES * num_rows // max(num_bytes, 1))
