"""Which rows a process reads in an epoch, and in what order.

Pure: the same manifest, seed, epoch, window and shard give the same plan on
every machine, for any number of threads and workers. Nothing here opens a file.

The order of an epoch is a sequence of positions. Row groups are permuted across
the dataset, taken together into windows, and rows are permuted inside a window;
without shuffling both permutations are the identity. A shard is a range of
positions, so it is cut by arithmetic, to the row.

Resuming is the same arithmetic once more. What a run has read is said by its
number of shards and the rows that each of them has done; what is left is a few
ranges of positions, and those are cut anew among any number of shards. So a state
is a few integers, whatever happened before.

Why arithmetic instead of a shuffled list: a plan costs memory per row group, not
per row, and any position can be found again from one integer.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from converter.errors import EmptyShardError, StateMismatchError

Uneven = Literal["drop", "pad", "keep"]
UNEVEN = ("drop", "pad", "keep")

Past = tuple[tuple[int, int], ...]
"""What was read of an epoch: (number of shards, rows that each of them has done), one after the other."""

STATE_VERSION = 1

_MAX_CUTS = 1 << 19
"""Pieces that the stretches of a state may cut an epoch into, all together: 512 shards that change 40 times, or 10,000
that change 8 times. Four times as many took ten seconds and a gigabyte, so what has more is refused."""

_STRETCH_CUTS = 64
"""What a stretch costs whatever its size, counted in pieces."""

_MAX_EPOCH = 1 << 62
"""Worker processes are told the epoch as an int64."""

DEFAULT_WINDOW_BYTES = 48 << 20
"""Rows that are decoded and mixed together, in bytes of all columns: a guess between a
quick first batch and good mixing, to be replaced by a measurement."""


DEFAULT_WINDOW_GROUPS = 64
"""Row groups of a window unless its rows are given: each costs an opening, and of ten thousand small files a window of
as many bytes would open all before the first batch."""


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
        Each number's lowest bits are its index, so that all differ, whatever way they are sorted; sorting
        them takes 4.9 ns a row where sorting indices by them takes 11.7.
        """
        digest = hashlib.sha256(f"{self.fingerprint}/{self.seed}/{epoch}".encode()).digest()
        stream = 0 if window is None else window + 1
        generator = np.random.Philox(key=int.from_bytes(digest[:16], "little"), counter=[0, 0, 0, stream])
        index_bits = np.uint64((1 << max(size - 1, 0).bit_length()) - 1)
        numbers = generator.random_raw(size)
        numbers &= ~index_bits
        numbers |= np.arange(size, dtype=np.uint64)
        numbers.sort()
        numbers &= index_bits
        return numbers.view(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of one window that one process reads at a stretch."""

    window: int
    """The window's number in the epoch."""

    row_groups: npt.NDArray[np.int64]
    """The window's row groups, in the epoch's order."""

    window_rows: int
    """Rows of the whole window."""

    spans: tuple[range, ...]
    """The wanted positions within the window, in order."""

    @property
    def num_rows(self) -> int:
        """How many rows are wanted."""
        return sum(map(len, self.spans))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochPlan:
    """One process's share of one epoch: its positions, its batches, the windows they come from."""

    epoch: int
    batch_size: int
    drop_last: bool
    shuffle: Shuffle | None
    segments: tuple[range, ...]
    """Positions in the epoch's order that this process reads, in order."""

    num_padded: int
    """How many of the last rows are read elsewhere too, so that all shards have equally many."""

    num_dropped: int
    """How many rows no shard reads, so that all have equally many."""

    group_order: npt.NDArray[np.int64]
    group_starts: npt.NDArray[np.int64]
    """Position of each ordered row group's first row, and at the end the number of rows."""

    window_starts: npt.NDArray[np.int64]
    """For each window the index of its first row group in the order, and at the end their number."""

    @property
    def num_rows(self) -> int:
        """Rows that this process reads in the epoch, those of a dropped last batch included."""
        return sum(map(len, self.segments))

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

    def first_position(self, batch: int) -> int:
        """The position of a batch's first row: its name, whatever the shards and the batches before it were."""
        return next(iter(take_positions(self.segments, batch * self.batch_size, batch * self.batch_size + 1)))[0]

    def pieces(self, first_batch: int = 0, stop_batch: int | None = None) -> Iterator[Piece]:
        """The windows' parts that hold batches `[first_batch, stop_batch)`, in order."""
        stop_batch = self.num_batches if stop_batch is None else min(stop_batch, self.num_batches)
        stop_row = min(stop_batch * self.batch_size, self.num_rows)
        positions = self.group_starts[self.window_starts]
        at = -1
        spans: list[range] = []
        for span in take_positions(self.segments, first_batch * self.batch_size, stop_row):
            start = span.start
            while start < span.stop:
                window = int(np.searchsorted(positions, start, side="right")) - 1
                stop = min(span.stop, int(positions[window + 1]))
                if window != at and spans:
                    yield self._piece(at, spans)
                    spans = []
                at = window
                spans.append(range(start, stop))
                start = stop
        if spans:
            yield self._piece(at, spans)

    def _piece(self, window: int, spans: Sequence[range]) -> Piece:
        first, last = (int(index) for index in self.window_starts[window : window + 2])
        begin, end = int(self.group_starts[first]), int(self.group_starts[last])
        return Piece(
            window=window,
            row_groups=self.group_order[first:last],
            window_rows=end - begin,
            spans=tuple(range(span.start - begin, span.stop - begin) for span in spans),
        )

    def first_pieces(self, pieces: Iterator[Piece], num_rows: int) -> Iterator[Piece]:
        """The pieces, the first one cut behind about so many rows: so that a first batch need not wait for a window.

        Not one of a single row group: that may be large, and would be decoded twice at once.
        """
        for piece in pieces:
            if num_rows < piece.num_rows and len(piece.row_groups) > 1:
                for part in (range(num_rows), range(num_rows, piece.num_rows)):
                    spans = tuple(take_positions(piece.spans, part.start, part.stop))
                    yield dataclasses.replace(piece, spans=spans)
            else:
                yield piece
            yield from pieces

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
    past: Past = (),
    window_groups: int | None = None,
) -> EpochPlan:
    """The plan of `shard` for one epoch over row groups of these sizes, or for what `past` has left of it.

    A window has as many row groups as make `window_rows` rows, and at most `window_groups` of them.

    `uneven` says what happens where the shards' sizes differ: `"drop"` gives all as many rows as
    the smallest has, so that every rank takes equally many steps (the dropped row of a larger
    shard is another one in each epoch); `"pad"` gives all as many as the largest has, the smaller
    ones by a row that is read twice; `"keep"` reads every row once, and steps may differ.

    Raises:
        EmptyShardError: there are fewer rows than shards.
    """
    part = shard or Shard()
    order = np.arange(len(row_group_rows), dtype=np.int64)
    if shuffle is not None:
        order = shuffle.permutation(len(row_group_rows), epoch=epoch, window=None)
    # What has no row to give is not opened, and makes no window.
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
    num_left = _count(left)
    segments, num_padded = _share(left, part, epoch=epoch, uneven=uneven)
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


def remaining_positions(num_rows: int, past: Past, *, epoch: int, uneven: Uneven) -> list[range]:
    """The positions of an epoch that are left after `past`, in the order in which shards are cut from them.

    >>> remaining_positions(10, ((2, 3),), epoch=0, uneven="keep")
    [range(3, 5), range(8, 10)]

    Raises:
        StateMismatchError: no loader of so many rows can have read `past`, or it is too long to be followed.
    """
    starts = np.zeros(1 if num_rows else 0, dtype=np.int64)
    stops = starts + num_rows
    num_cuts = 0
    for count, rows_done in past:
        if count > num_rows:
            raise StateMismatchError(
                f"The state tells of {_shown(count)} shards of {num_rows} rows: no loader has more shards than rows. "
                "It is damaged, or of other rows."
            )
        num_cuts += _STRETCH_CUTS + count + len(starts)
        if num_cuts > _MAX_CUTS:
            raise StateMismatchError(
                f"The state cuts the epoch into more than {_MAX_CUTS} pieces: it has {len(past)} numbers of shards, up "
                f"to {_shown(max(count for count, _ in past))}. Begin the epoch anew with set_epoch()."
            )
        num_left = int((stops - starts).sum())
        first, stop = _undone(num_left, count, rows_done, epoch=epoch, uneven=uneven)
        starts, stops = _cut_ranges(starts, stops, first, stop)
    return [range(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]


def _undone(
    num_rows: int, count: int, rows_done: int, *, epoch: int, uneven: Uneven
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where the rows begin and stop that are left in each of `count` shards of `[0, num_rows)`."""
    size, rest = divmod(num_rows, count)
    index = np.arange(count + 1, dtype=np.int64)
    # As `Shard.rows` has it, without a product that an int64 might not hold.
    bounds = size * index + rest * index // count
    begins, ends = bounds[:-1], bounds[1:]
    done = min(rows_done, size + 1)
    if uneven != "drop":
        first, stop = begins + done, ends
    else:
        # What is dropped of a larger shard, see `_share`, parts what is left of it.
        dropped = begins + epoch % (size + 1)
        is_larger = ends - begins > size
        first = np.stack([begins + done, np.where(is_larger, np.maximum(dropped, begins + done) + 1, ends)], axis=1)
        stop = np.stack([np.where(is_larger, dropped, ends), ends], axis=1)
        first, stop = first.ravel(), stop.ravel()
    is_any = first < stop
    return first[is_any], stop[is_any]


def _cut_ranges(
    starts: npt.NDArray[np.int64],
    stops: npt.NDArray[np.int64],
    first: npt.NDArray[np.int64],
    stop: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """As `take_positions` of many parts `[first, stop)` at once, which are in order and do not overlap."""
    if not len(first):
        return first, stop
    ends = np.cumsum(stops - starts)
    numbers = ends - (stops - starts)
    cuts = np.unique(np.concatenate([first, stop, ends]))
    part = np.searchsorted(first, cuts[:-1], side="right") - 1
    # Before the first part there is none.
    is_wanted = (part >= 0) & (cuts[:-1] < stop[part])
    begins, lengths = cuts[:-1][is_wanted], np.diff(cuts)[is_wanted]
    segment = np.searchsorted(numbers, begins, side="right") - 1
    found = starts[segment] + begins - numbers[segment]
    return found, found + lengths


def _share(left: Sequence[range], shard: Shard, *, epoch: int, uneven: Uneven) -> tuple[list[range], int]:
    """What one shard reads of the positions that are left, and how many of its last rows are another's or its own."""
    num_rows = _count(left)
    rows = shard.rows(num_rows)
    own = list(take_positions(left, rows.start, rows.stop))
    if uneven == "drop" and len(rows) > num_rows // shard.count:
        # One row too many. Which one is left out moves with the epoch, so that none is left out for ever.
        dropped = epoch % len(rows)
        own = [*take_positions(own, 0, dropped), *take_positions(own, dropped + 1, len(rows))]
    elif uneven == "pad" and len(rows) * shard.count < num_rows:
        # The last row of the next shard that has one more: the same one wherever in the epoch a run is resumed.
        larger = (Shard(index=index, count=shard.count).rows(num_rows) for index in range(shard.index, shard.count))
        last = next(rows.stop for rows in larger if len(rows) * shard.count >= num_rows) - 1
        return [*own, *take_positions(left, last, last + 1)], 1
    return own, 0


def take_positions(segments: Sequence[range], start: int, stop: int) -> Iterator[range]:
    """The positions numbered `[start, stop)` of several ranges, one after the other.

    >>> list(take_positions([range(3, 5), range(8, 10)], 1, 3))
    [range(4, 5), range(8, 9)]
    """
    for segment in segments:
        part = segment[max(start, 0) : max(stop, 0)]
        if len(part):
            yield part
        start, stop = start - len(segment), stop - len(segment)


def _count(segments: Sequence[range]) -> int:
    return sum(map(len, segments))


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a run stands, and of which rows and order: what `state_dict()` holds."""

    fingerprint: str
    """Of the rows, and of which of them are selected."""

    shuffle: bool
    seed: int
    window_rows: int
    window_groups: int
    """Row groups that a window may have; 0 for any number."""

    uneven: Uneven
    epoch: int
    epochs_done: int
    """Epochs that the iteration had ended before this one."""

    past: Past

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON or `torch.save`."""
        known = {name: getattr(self, name) for name in _STATE_TYPES}
        return {"version": STATE_VERSION, **known, "past": [list(stretch) for stretch in self.past]}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> State:
        """The inverse of `to_dict`.

        Raises:
            StateMismatchError: this is no state of a loader of this package, or of a newer version of it.
        """
        try:
            version = value["version"]
            known = {name: value[name] for name in _STATE_TYPES}
            past = [tuple(stretch) for stretch in value["past"]]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise StateMismatchError(
                f"This is no state of a loader of this package ({type(error).__name__}: {error})."
            ) from error
        if type(version) is not int or version != STATE_VERSION:
            raise StateMismatchError(
                f"The state has version {_shown(version)}, and this package reads version {STATE_VERSION}."
            )
        wrong = {name: known[name] for name, kind in _STATE_TYPES.items() if type(known[name]) is not kind}
        # No loader counts to 2**62.
        wrong |= {
            name: known[name]
            for name in ("epoch", "epochs_done")
            if name not in wrong and not 0 <= known[name] < _MAX_EPOCH
        }
        stretches = [one for one in past if not (len(one) == 2 and all(type(part) is int and part > 0 for part in one))]
        if stretches:
            wrong["past"] = stretches[0]
        if wrong:
            shown = ", ".join(f"{name}={_shown(one)}" for name, one in wrong.items())
            raise StateMismatchError(f"The state holds values that no loader wrote: {shown}.")
        return cls(**known, past=tuple(past))

    def check(self, current: State) -> None:
        """Refuse to go on where `current`, the loader's own state, is of other rows or another order.

        Raises:
            StateMismatchError: the message says what differs.
        """
        names = ["fingerprint", "shuffle", "uneven"] + (
            ["seed", "window_rows", "window_groups"] if self.shuffle else []
        )
        what = {
            "fingerprint": "the rows (fingerprint)",
            "window_rows": "shuffle_window_rows",
            "window_groups": "shuffle_window_rows (row groups of a window)",
        }
        differs = [
            f"{what.get(name, name)} was {_shown(getattr(self, name))} and is {_shown(getattr(current, name))}"
            for name in names
            if getattr(self, name) != getattr(current, name)
        ]
        if differs:
            raise StateMismatchError(
                f"The state is of another run: {'; '.join(differs)}. Make the loader as it was, or begin anew."
            )

    def after(self, shard_count: int, rows_done: int) -> State:
        """The state once each of `shard_count` shards has done so many rows more."""
        past = self.past
        if rows_done:
            if past and past[-1][0] == shard_count:
                # Cut anew among as many shards, each gets what it had: so two stretches are one.
                past, rows_done = past[:-1], past[-1][1] + rows_done
            past = (*past, (shard_count, rows_done))
        return dataclasses.replace(self, past=past)


def _shown(value: Any) -> str:
    """A value of a state from elsewhere, short, whatever it is: Python does not print an integer of 5,000 digits."""
    if isinstance(value, (list, tuple)):
        shown = ", ".join(_shown(one) if not isinstance(one, (list, tuple)) else "[…]" for one in value[:4])
        return f"[{shown}{', …' if len(value) > 4 else ''}]"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    try:
        shown = repr(value)
    except Exception:  # noqa: BLE001 (its own `repr` may raise anything)
        shown = type(value).__name__
    return shown if len(shown) <= 200 else f"{shown[:200]}…"


_STATE_TYPES = {
    "fingerprint": str, "shuffle": bool, "seed": int, "window_rows": int, "window_groups": int, "uneven": str,
    "epoch": int, "epochs_done": int,
}  # fmt: skip


def _cut_windows(
    group_starts: npt.NDArray[np.int64], window_rows: int, window_groups: int | None
) -> npt.NDArray[np.int64]:
    """Consecutive row groups together until a window has `window_rows` rows; one row group at least."""
    bounds = [0]
    last = len(group_starts) - 1
    while bounds[-1] < last:
        wanted = group_starts[bounds[-1]] + window_rows
        most = last if window_groups is None else bounds[-1] + window_groups
        bounds.append(min(max(int(np.searchsorted(group_starts, wanted)), bounds[-1] + 1), most, last))
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
