"""Which positions of an epoch each shard reads, and which are left to read: arithmetic on ranges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from converter.errors import StateMismatchError
from converter.state import Past, Uneven, shown_value

Positions = npt.NDArray[np.int64]

_MAX_CUTS = 1 << 19
"""Pieces into which a state may cut an epoch, e.g. 512 shards that change 40 times. Four times as many took 10 s and
1 GB."""

_STRETCH_CUTS = 64
"""The fixed cost of a stretch, counted in pieces."""


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
            raise ValueError(
                f"A shard needs 0 <= cur_shard < shard_count, got cur_shard={self.index} and shard_count={self.count}."
            )

    def rows(self, num_rows: int) -> range:
        """The positions of this part; sizes differ by at most one."""
        return range(num_rows * self.index // self.count, num_rows * (self.index + 1) // self.count)


def remaining_positions(num_rows: int, past: Past, *, epoch: int, uneven: Uneven) -> list[range]:
    """The positions of an epoch that are left to read after `past`, in the epoch's order.

    >>> remaining_positions(10, ((2, 3),), epoch=0, uneven="keep")
    [range(3, 5), range(8, 10)]

    Raises:
        StateMismatchError: no loader of `num_rows` rows can have read `past`, or it is too long.
    """
    starts = np.zeros(1 if num_rows else 0, dtype=np.int64)
    stops = starts + num_rows
    num_cuts = 0
    for count, rows_done in past:
        if count > num_rows:
            raise StateMismatchError(
                f"The state has {shown_value(count)} shards of {num_rows} rows: no loader has more shards than "
                "rows. It is damaged, or of other rows. Take another checkpoint, or start from the beginning."
            )
        num_cuts += _STRETCH_CUTS + count + len(starts)
        if num_cuts > _MAX_CUTS:
            raise StateMismatchError(
                f"The state cuts the epoch into more than {_MAX_CUTS} pieces: it was read with {len(past)} values of "
                f"shard_count, of up to {shown_value(max(count for count, _ in past))}. Restart the epoch with "
                "set_epoch()."
            )
        num_left = int((stops - starts).sum())
        first, stop = _undone(num_left, count, rows_done, epoch=epoch, uneven=uneven)
        starts, stops = _cut_ranges(starts, stops, first, stop)
    return [range(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]


def _undone(num_rows: int, count: int, rows_done: int, *, epoch: int, uneven: Uneven) -> tuple[Positions, Positions]:
    """Starts and stops of the rows left in each of `count` shards of `[0, num_rows)`."""
    size, rest = divmod(num_rows, count)
    index = np.arange(count + 1, dtype=np.int64)
    # As in `Shard.rows`, without a product that may exceed an int64.
    bounds = size * index + rest * index // count
    begins, ends = bounds[:-1], bounds[1:]
    done = min(rows_done, size + 1)
    if uneven != "drop":
        first, stop = begins + done, ends
    else:
        # The dropped row of a larger shard (see `share_of`) cuts the rest of it in two.
        dropped = begins + epoch % (size + 1)
        is_larger = ends - begins > size
        first = np.stack([begins + done, np.where(is_larger, np.maximum(dropped, begins + done) + 1, ends)], axis=1)
        stop = np.stack([np.where(is_larger, dropped, ends), ends], axis=1)
        first, stop = first.ravel(), stop.ravel()
    has_rows = first < stop
    return first[has_rows], stop[has_rows]


def _cut_ranges(starts: Positions, stops: Positions, first: Positions, stop: Positions) -> tuple[Positions, Positions]:
    """`take_positions` for many parts `[first, stop)` at once, which are in order and do not overlap."""
    if not len(first):
        return first, stop
    ends = np.cumsum(stops - starts)
    numbers = ends - (stops - starts)
    cuts = np.unique(np.concatenate([first, stop, ends]))
    part = np.searchsorted(first, cuts[:-1], side="right") - 1
    # -1: before the first part.
    is_wanted = (part >= 0) & (cuts[:-1] < stop[part])
    begins, lengths = cuts[:-1][is_wanted], np.diff(cuts)[is_wanted]
    segment = np.searchsorted(numbers, begins, side="right") - 1
    positions = starts[segment] + begins - numbers[segment]
    return positions, positions + lengths


def share_of(left: Sequence[range], shard: Shard, *, epoch: int, uneven: Uneven) -> tuple[list[range], int]:
    """The positions that one shard reads, and how many of its last rows another shard reads, too (0 or 1)."""
    num_rows = count_positions(left)
    rows = shard.rows(num_rows)
    own = list(take_positions(left, rows.start, rows.stop))
    if uneven == "drop" and len(rows) > num_rows // shard.count:
        # One row too many. Each epoch drops another one.
        dropped = epoch % len(rows)
        own = [*take_positions(own, 0, dropped), *take_positions(own, dropped + 1, len(rows))]
    elif uneven == "pad" and len(rows) * shard.count < num_rows:
        # The last row of the next larger shard: the same row wherever in the epoch a run is resumed.
        larger = (Shard(index=index, count=shard.count).rows(num_rows) for index in range(shard.index, shard.count))
        last = next(rows.stop for rows in larger if len(rows) * shard.count >= num_rows) - 1
        return [*own, *take_positions(left, last, last + 1)], 1
    return own, 0


def take_positions(segments: Sequence[range], start: int, stop: int) -> Iterator[range]:
    """The positions numbered `[start, stop)` in the concatenation of several ranges.

    >>> list(take_positions([range(3, 5), range(8, 10)], 1, 3))
    [range(4, 5), range(8, 9)]
    """
    begin = 0
    for segment in segments:
        part = segment[max(start - begin, 0) : max(stop - begin, 0)]
        if len(part):
            yield part
        begin += len(segment)


def count_positions(segments: Sequence[range]) -> int:
    """The total length of several ranges."""
    return sum(map(len, segments))
