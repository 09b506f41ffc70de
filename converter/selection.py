"""Which rows of a dataset are live, after filters, splits and deletions.

A plan counts live rows and a reader takes live rows; neither knows why the others are dead.

A row group whose rows are all live or all dead costs only its count; any other costs a bit for each row. A selection
has a digest, because the order of an epoch depends on it.
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
    """Live rows of each row group."""

    starts: npt.NDArray[np.int64]
    """Where each row group's bits begin in `bits`, and at the end their number; no bits if all or no rows are live."""

    bits: npt.NDArray[np.uint8]
    """One bit per row, as `np.packbits` orders them."""

    @property
    def num_rows(self) -> int:
        """Live rows of all row groups."""
        return int(self.counts.sum())

    @property
    def digest(self) -> str:
        """Equal for the same live rows of the same row groups."""
        content = hashlib.sha256(self.counts.astype("<i8").tobytes())
        content.update(self.bits.tobytes())
        return content.hexdigest()[:32]

    def live_rows(self, row_group: int) -> npt.NDArray[np.int64] | None:
        """The live rows of a row group as ascending indices; None if all are live."""
        count, (start, stop) = int(self.counts[row_group]), self.starts[row_group : row_group + 2]
        if start == stop:
            return None if count else np.empty(0, np.int64)
        return np.flatnonzero(np.unpackbits(self.bits[start:stop]))

    def mask(self, row_group: int, num_rows: int) -> Mask:
        """A boolean array of length `num_rows`: True for live rows."""
        live = self.live_rows(row_group)
        mask = np.full(num_rows, live is None)
        if live is not None:
            mask[live] = True
        return mask


def select(masks: Sequence[Mask]) -> Selection:
    """A selection from one mask for each row group, in order.

    >>> selection = select([np.array([True, False, True]), np.array([False]), np.array([True, True])])
    >>> selection.num_rows, selection.live_rows(0).tolist(), selection.live_rows(1).tolist(), selection.live_rows(2)
    (4, [0, 2], [], None)
    """
    return select_some(np.zeros(len(masks), np.int64), dict(enumerate(masks)))


def select_some(counts: npt.NDArray[np.int64], masks: Mapping[int, Mask]) -> Selection:
    """A selection from masks of some row groups; of the others `counts` says how many rows are live: all, or 0.

    >>> selection = select_some(np.array([3, 2, 0]), {0: np.array([True, False, True])})
    >>> selection.counts.tolist(), selection.live_rows(0).tolist(), selection.live_rows(1), selection.live_rows(2).size
    ([2, 2, 0], [0, 2], None, 0)
    """
    live = counts.copy()
    lengths = np.zeros(len(live), np.int64)
    packed = [np.empty(0, np.uint8)]
    for row_group, mask in sorted(masks.items()):
        live[row_group] = np.count_nonzero(mask)
        if 0 < live[row_group] < len(mask):
            packed.append(np.packbits(mask))
            lengths[row_group] = len(packed[-1])
    starts = np.zeros(len(live) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return Selection(counts=live, starts=starts, bits=np.concatenate(packed))


def share_rows(num_rows: int, left: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many of the next `num_rows` rows each part gets; `left` is how many each part is still to get in all.

    In proportion, the rest by largest remainder: so in the end each part has exactly its number of rows.

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
    """For each row of a row group the number of its part, at random; part i gets `counts[i]` rows.

    Uses Philox's raw output, which NumPy promises never to change.
    """
    generator = np.random.Philox(key=int.from_bytes(hashlib.sha256(seed).digest()[:16], "little"))
    parts = np.empty(int(counts.sum()), np.int64)
    parts[np.argsort(generator.random_raw(len(parts)), kind="stable")] = np.repeat(np.arange(len(counts)), counts)
    return parts


def hash_numbers(values: npt.NDArray[np.integer[Any] | np.bool_], seed: int) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of each whole number, whatever its width: splitmix64 (Steele, Lea and Flood, 2014), a bijection.

    >>> a, b = hash_numbers(np.array([5, -1]), 0), hash_numbers(np.array([5, -1], np.int8), 0)
    >>> bool((a == b).all())
    True
    """
    hashes: npt.NDArray[np.uint64] = _mix(values.astype(np.int64).view(np.uint64) ^ _mix(_word_of(seed)))
    return hashes


def hash_bytes(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of each run of bytes `data[offsets[i]:offsets[i + 1]]`.

    Each turn of the loop takes the next eight bytes of all rows that have some left.
    """
    lengths = np.diff(offsets)
    hashes: npt.NDArray[np.uint64] = _mix(lengths.astype(np.uint64) ^ _mix(_word_of(seed)))
    # So that eight bytes can be read past the last row's end.
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
        mixed = values + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))
