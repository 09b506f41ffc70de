"""In which order the elements of several sources come: exact proportions in each block, by arithmetic.

Positions of the mixture stand for places in each source's own stream of epochs. So a shard, a resumed epoch or a worker
process finds its part of every source without reading what is before it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from converter.permutations import permutation

Numbers = npt.NDArray[np.int64]

BLOCK_ROWS = 4096
"""Elements in which proportions are exact, rounded to whole elements."""

_PATTERNS = 16
"""Different orders of blocks in an epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """Which source each position of an epoch is from."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """Elements of each source's own epoch."""

    weights: Mapping[int, tuple[float, ...]]
    """The weights from an epoch on; from 0 on at least."""

    num_rows: int
    """Elements of an epoch of the mixture."""

    seed: int

    def counts(self, epoch: int, num_rows: int) -> Numbers:
        """How many of the first `num_rows` elements of an epoch, at the end of a block, are from each source."""
        weights = self._weights_at(epoch)
        whole, rest = divmod(num_rows, BLOCK_ROWS)
        counts: Numbers = whole * np.array(_shares(weights, BLOCK_ROWS)) + np.array(_shares(weights, rest))
        return counts

    def block(self, epoch: int, number: int) -> Pattern:
        """The order of a block."""
        begin = number * BLOCK_ROWS
        size = min(BLOCK_ROWS, self.num_rows - begin)
        weights = self._weights_at(epoch)
        name = f"{'/'.join(self.names)}/{self.seed}/{epoch}"
        return _pattern(name, _shares(weights, size), number % _PATTERNS)

    def interleave(self, epoch: int, spans: Sequence[range]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int32]]:
        """The source of each position of some spans, and its place among their elements, one source after the other."""
        taken = self.taken(epoch, spans)
        base = (np.cumsum(taken) - taken).astype(np.int32)
        num_rows = sum(map(len, spans))
        ids, places = np.empty(num_rows, np.int8), np.empty(num_rows, np.int32)
        done = 0
        for span in spans:
            start = span.start
            while start < span.stop:
                number, inside = divmod(start, BLOCK_ROWS)
                stop = min(span.stop, (number + 1) * BLOCK_ROWS)
                pattern, end = self.block(epoch, number), inside + stop - start
                before, after = pattern.before(inside), pattern.before(end)
                own, into = pattern.ids[inside:end], slice(done, done + end - inside)
                ids[into] = own
                np.add((base - before)[own], pattern.ranks[inside:end], out=places[into])
                base += after - before
                start, done = stop, into.stop
        return ids, places

    def taken(self, epoch: int, spans: Sequence[range]) -> Numbers:
        """How many elements of each source are in some spans."""
        found = np.zeros(len(self.names), np.int64)
        for span in spans:
            found += self.places(epoch, span.stop) - self.places(epoch, span.start)
        return found

    def places(self, epoch: int, position: int) -> Numbers:
        """How many elements of each source come before a position, in all epochs."""
        number, inside = divmod(position, BLOCK_ROWS)
        before = self.counts(epoch, number * BLOCK_ROWS)
        if inside:
            before = before + self.block(epoch, number).before(inside)
        changes = [*sorted(first for first in self.weights if first < epoch), epoch]
        for first, stop in itertools.pairwise(changes):
            before = before + (stop - first) * self.counts(first, self.num_rows)
        return before

    def _weights_at(self, epoch: int) -> tuple[float, ...]:
        return self.weights[max(first for first in self.weights if first <= epoch)]

    def largest_shares(self) -> list[float]:
        """The largest part of an epoch that each source ever has."""
        return [
            max(weights[number] / sum(weights) for weights in self.weights.values())
            for number in range(len(self.names))
        ]

    def with_weights(self, weights: tuple[float, ...], *, from_epoch: int) -> Mixing:
        """The same with other weights from an epoch on."""
        kept = {first: before for first, before in self.weights.items() if first < from_epoch}
        return replace(self, weights={**kept, from_epoch: weights})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pattern:
    """The order of a block's elements."""

    ids: npt.NDArray[np.int8]
    """The source of each."""

    ranks: npt.NDArray[np.int32]
    """How many of its source come before it in the block."""

    counts: npt.NDArray[np.int32]
    """Elements of each source."""

    def before(self, position: int) -> npt.NDArray[np.int32]:
        """How many elements of each source come before a position."""
        if position == len(self.ids):
            return self.counts
        return np.bincount(self.ids[:position], minlength=len(self.counts)).astype(np.int32)


@functools.lru_cache(maxsize=4 * _PATTERNS)
def _pattern(name: str, counts: tuple[int, ...], number: int) -> Pattern:
    """One of the orders of an epoch's blocks. They come again: to sort for each block takes as long as to read it."""
    size = sum(counts)
    order = permutation(name, size, stream=number)
    ids = np.repeat(np.arange(len(counts), dtype=np.int8), counts)[order]
    ranks = np.empty(size, np.int32)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    ranks[np.argsort(ids, kind="stable")] = np.arange(size) - starts
    return Pattern(ids=ids, ranks=ranks, counts=np.array(counts, np.int32))


@functools.lru_cache(maxsize=64)
def _shares(weights: tuple[float, ...], num_rows: int) -> tuple[int, ...]:
    return tuple(share(weights, num_rows).tolist())


def share(weights: Sequence[float] | npt.NDArray[np.float64], num_rows: int) -> Numbers:
    """How many of some elements each weight has: in proportion, the rest by largest remainder.

    >>> share((0.7, 0.3), 11).tolist()
    [8, 3]
    """
    exact = np.array(weights) * (num_rows / np.sum(weights))
    counts: Numbers = np.floor(exact).astype(np.int64)
    largest = np.argsort(counts - exact, kind="stable")
    counts[largest[: num_rows - int(counts.sum())]] += 1
    return counts


def rows_until(sizes: tuple[int, ...], weights: tuple[float, ...], *, is_first: bool) -> int:
    """Elements of an epoch that ends when the first source has been gone through once, or when all have.

    Raises:
        ValueError: a weight is too small for a block to have an element of its source.
    """
    in_block = share(weights, BLOCK_ROWS)
    wanted = np.array([weight > 0 for weight in weights])
    if not in_block[wanted].all():
        raise ValueError(f"weights: a weight is less than one in {BLOCK_ROWS:,}. Leave its source out, or raise it.")
    size, per_block = np.array(sizes)[wanted], in_block[wanted]
    blocks = int((size // per_block).min()) if is_first else int((size // per_block).max())
    rest = size - blocks * per_block
    rows = range(BLOCK_ROWS, -1, -1) if is_first else range(BLOCK_ROWS + 1)
    for num_rows in rows:
        found = share(weights, num_rows)[wanted]
        if (found <= rest).all() if is_first else (found >= rest).all():
            return blocks * BLOCK_ROWS + num_rows
    return blocks * BLOCK_ROWS + BLOCK_ROWS
