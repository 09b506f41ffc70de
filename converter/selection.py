"""Which rows of a dataset are live: what a filter, a split or a deletion leaves of each row group.

One idea for all of them, so that nothing else needs to know where rows went: a
plan counts live rows, a reader takes live rows, and both ask here.

A row group whose rows are all live or all dead costs nothing but its count; any
other costs a bit for each row. A selection is picklable and says its own digest,
because the order of an epoch depends on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]

_WORD = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selection:
    """The live rows of each row group. The arrays are not to be changed."""

    counts: npt.NDArray[np.int64]
    """For each row group how many of its rows are live."""

    starts: npt.NDArray[np.int64]
    """Where each row group's bits begin in `bits`, and at the end their number: none where all or none are live."""

    bits: npt.NDArray[np.uint8]
    """A bit for each row, the first row in the highest one."""

    @property
    def num_rows(self) -> int:
        """How many rows are live."""
        return int(self.counts.sum())

    @property
    def digest(self) -> str:
        """Equal for the same live rows of the same row groups."""
        content = hashlib.sha256(self.counts.astype("<i8").tobytes())
        content.update(self.bits.tobytes())
        return content.hexdigest()[:32]

    def live_rows(self, row_group: int) -> npt.NDArray[np.int64] | None:
        """The live rows of a row group by their numbers in it, ascending; None where all of them are."""
        count, (start, stop) = int(self.counts[row_group]), self.starts[row_group : row_group + 2]
        if start == stop:
            return None if count else np.empty(0, np.int64)
        return np.flatnonzero(np.unpackbits(self.bits[start:stop]))

    def mask(self, row_group: int, num_rows: int) -> Mask:
        """The live rows of a row group of so many rows as True."""
        live = self.live_rows(row_group)
        mask = np.full(num_rows, live is None)
        if live is not None:
            mask[live] = True
        return mask


def select(masks: Sequence[Mask]) -> Selection:
    """The selection of one mask for each row group, in order.

    >>> selection = select([np.array([True, False, True]), np.array([False]), np.array([True, True])])
    >>> selection.num_rows, selection.live_rows(0).tolist(), selection.live_rows(1).tolist(), selection.live_rows(2)
    (4, [0, 2], [], None)
    """
    counts = np.array([np.count_nonzero(mask) for mask in masks], np.int64)
    packed = [
        np.packbits(mask) if 0 < count < np.size(mask) else np.empty(0, np.uint8)
        for mask, count in zip(masks, counts, strict=True)
    ]
    starts = np.zeros(len(masks) + 1, np.int64)
    np.cumsum([len(one) for one in packed], out=starts[1:])
    return Selection(counts=counts, starts=starts, bits=np.concatenate([np.empty(0, np.uint8), *packed]))


def select_some(counts: npt.NDArray[np.int64], masks: Mapping[int, Mask]) -> Selection:
    """The selection of what masks say of a few row groups, and of the others by `counts` all rows, or none: 0.

    >>> selection = select_some(np.array([3, 2, 0]), {0: np.array([True, False, True])})
    >>> selection.counts.tolist(), selection.live_rows(0).tolist(), selection.live_rows(1), selection.live_rows(2).size
    ([2, 2, 0], [0, 2], None, 0)
    """
    counts = counts.copy()
    lengths = np.zeros(len(counts), np.int64)
    packed: list[npt.NDArray[np.uint8]] = []
    for row_group, mask in sorted(masks.items()):
        counts[row_group] = np.count_nonzero(mask)
        if 0 < counts[row_group] < len(mask):
            packed.append(np.packbits(mask))
            lengths[row_group] = len(packed[-1])
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return Selection(counts=counts, starts=starts, bits=np.concatenate([np.empty(0, np.uint8), *packed]))


def share_rows(num_rows: int, left: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many of the next `num_rows` rows each part gets, of which `left` are still to come in all.

    In proportion, the rest by largest remainder: so after the last row each part has exactly what it was to have.

    >>> share_rows(3, np.array([7, 2, 1])).tolist()
    [2, 1, 0]
    """
    rows_left = int(left.sum())
    # Python's integers: the product of two counts may be beyond 64 bits.
    exact = [divmod(num_rows * part, rows_left) for part in left.tolist()]
    counts = np.array([whole for whole, _ in exact], np.int64)
    largest = sorted(range(len(exact)), key=lambda part: -exact[part][1])
    counts[largest[: num_rows - int(counts.sum())]] += 1
    return counts


def split_rows(counts: npt.NDArray[np.int64], *, seed: bytes) -> npt.NDArray[np.int64]:
    """For each of a row group's rows the number of its part, of which part i has `counts[i]`.

    Which rows those are is random, by Philox's raw output, which NumPy promises never to change.
    """
    generator = np.random.Philox(key=int.from_bytes(hashlib.sha256(seed).digest()[:16], "little"))
    parts = np.empty(int(counts.sum()), np.int64)
    parts[np.argsort(generator.random_raw(len(parts)), kind="stable")] = np.repeat(np.arange(len(counts)), counts)
    return parts


def hash_numbers(values: npt.NDArray[np.integer[Any] | np.bool_], seed: int) -> npt.NDArray[np.uint64]:
    """A random-looking number for each whole number, the same for the same number whatever its width.

    The mixing of splitmix64 (Steele, Lea and Flood, 2014), a bijection of 64 bits.

    >>> a, b = hash_numbers(np.array([5, -1]), 0), hash_numbers(np.array([5, -1], np.int8), 0)
    >>> bool((a == b).all())
    True
    """
    hashes: npt.NDArray[np.uint64] = _mix(values.astype(np.int64).view(np.uint64) ^ _mix(_word_of(seed)))
    return hashes


def hash_bytes(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.uint64]:
    """A random-looking number for each run of bytes `data[offsets[i]:offsets[i + 1]]`.

    Eight bytes of all rows at once, so that the loop runs over the length of the longest and touches each byte once.
    """
    lengths = np.diff(offsets)
    hashes: npt.NDArray[np.uint64] = _mix(lengths.astype(np.uint64) ^ _mix(_word_of(seed)))
    # So that eight bytes can be read behind the last row's end.
    padded = np.concatenate([data, np.zeros(_WORD, np.uint8)])
    active = np.argsort(lengths, kind="stable")
    begin = np.searchsorted(lengths[active], 0, side="right")
    done = 0
    while begin < len(active):
        active = active[begin:]
        words = padded[(offsets[:-1][active] + done)[:, None] + np.arange(_WORD)]
        words[np.arange(_WORD) >= (lengths[active] - done)[:, None]] = 0
        hashes[active] = _mix(hashes[active] ^ _mix(words.view("<u8")[:, 0].astype(np.uint64)))
        done += _WORD
        begin = np.searchsorted(lengths[active], done, side="right")
    return hashes


def _word_of(seed: int) -> Any:
    """A seed of any size as 64 bits."""
    if seed < 1 << 64:
        return np.uint64(seed)
    return np.uint64(int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "little"))


def _mix(values: Any) -> Any:
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
