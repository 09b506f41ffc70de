"""In which order the elements of several sources come: exact proportions in each block, by arithmetic.

Positions of the mixture stand for places in each source's own stream of epochs. So a shard, a resumed epoch or a worker
process finds its part of every source without reading what is before it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from converter.permutations import permutation

Numbers = npt.NDArray[np.int64]

BLOCK_ROWS = 4096
"""Elements in which proportions are exact, rounded to whole elements."""

_PATTERNS = 16
"""Different orders of blocks in an epoch."""

CYCLE_ROWS = _PATTERNS * BLOCK_ROWS
"""After so many elements the same orders come again."""

_REMEMBERED_ROWS = 1 << 20
"""Most elements whose order is remembered: some 5 MB."""


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
        return _pattern(self._name(epoch), _shares(weights, size), number % _PATTERNS)

    def _name(self, epoch: int) -> str:
        return f"{'/'.join(self.names)}/{self.seed}/{epoch}"

    def interleave(self, epoch: int, spans: Sequence[range]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int32]]:
        """The source of each position of some spans, and its place among their elements, one source after the other."""
        rows = spans[0] if len(spans) == 1 else range(0)
        in_blocks = self.num_rows // BLOCK_ROWS * BLOCK_ROWS
        if rows and len(rows) % CYCLE_ROWS == 0 and len(rows) <= _REMEMBERED_ROWS and rows.stop <= in_blocks:
            counts = _shares(self._weights_at(epoch), BLOCK_ROWS)
            return _lay_out_cycles(self._name(epoch), counts, rows.start % CYCLE_ROWS, len(rows))
        return _lay_out([part for span in spans for part in self._patterns(epoch, span)])

    def _patterns(self, epoch: int, span: range) -> Iterator[tuple[Pattern, range]]:
        """The orders that make up a span, and which part of each: of many blocks at a time, as few calls as can be."""
        start = span.start
        num_blocks = self.num_rows // BLOCK_ROWS
        in_blocks, in_cycle = num_blocks * BLOCK_ROWS, min(num_blocks, _PATTERNS) * BLOCK_ROWS
        while start < span.stop:
            is_whole = start < in_blocks
            number, inside = divmod(start, in_cycle) if is_whole else (num_blocks, start - in_blocks)
            pattern = self._cycle(epoch) if is_whole else self.block(epoch, number)
            size = min(in_blocks - start + inside, in_cycle) if is_whole else len(pattern.ids)
            stop = min(span.stop, start - inside + size)
            yield pattern, range(inside, inside + stop - start)
            start = stop

    def _cycle(self, epoch: int) -> Pattern:
        """The order of an epoch's first whole blocks, which comes again and again."""
        counts = _shares(self._weights_at(epoch), BLOCK_ROWS)
        return _cycle(self._name(epoch), counts, min(self.num_rows // BLOCK_ROWS, _PATTERNS))

    def taken(self, epoch: int, spans: Sequence[range]) -> Numbers:
        """How many elements of each source are in some spans."""
        found = np.zeros(len(self.names), np.int64)
        for span in spans:
            begin, end = self.places(epoch, span.start), self.places(epoch, span.stop)
            found += [last - first for first, last in zip(begin, end, strict=True)]
        return found

    def places(self, epoch: int, position: int) -> list[int]:
        """How many elements of each source come before a position, in all epochs."""
        number, inside = divmod(position, BLOCK_ROWS)
        before = self.counts(epoch, number * BLOCK_ROWS)
        if inside:
            before = before + self.block(epoch, number).before(inside)
        changes = [*sorted(first for first in self.weights if first < epoch), epoch]
        # Python's integers: an epoch below 2**62 may be so far away that 64 bits do not hold the product.
        places: list[int] = before.tolist()
        for first, stop in itertools.pairwise(changes):
            counts = self.counts(first, self.num_rows).tolist()
            places = [place + (stop - first) * count for place, count in zip(places, counts, strict=True)]
        return places

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
    """The order of the elements of a block, or of several."""

    ids: npt.NDArray[np.intp]
    """The source of each; as NumPy needs them for an index: from bytes it makes them anew each time."""

    ranks: npt.NDArray[np.int32]
    """How many of its source come before it."""

    counts: Numbers
    """Elements of each source."""

    def before(self, position: int) -> Numbers:
        """How many elements of each source come before a position."""
        if position == len(self.ids):
            return self.counts
        return np.bincount(self.ids[:position], minlength=len(self.counts))


@functools.lru_cache(maxsize=4 * _PATTERNS)
def _pattern(name: str, counts: tuple[int, ...], number: int) -> Pattern:
    """One of the orders of an epoch's blocks. They come again: to sort for each block takes as long as to read it."""
    size = sum(counts)
    order = permutation(name, size, stream=number)
    ids = np.repeat(np.arange(len(counts)), counts)[order]
    ranks = np.empty(size, np.int32)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    ranks[np.argsort(ids, kind="stable")] = np.arange(size) - starts
    return Pattern(ids=ids, ranks=ranks, counts=np.array(counts, np.int64))


@functools.lru_cache(maxsize=8)
def _cycle(name: str, counts: tuple[int, ...], num_blocks: int) -> Pattern:
    """The first blocks of an epoch as one: to lay out a row takes 0.8 ns, and 2.4 block by block."""
    blocks = [_pattern(name, counts, number) for number in range(num_blocks)]
    before = np.arange(num_blocks)[:, None] * np.array(counts)
    ranks = [block.ranks + rows.astype(np.int32)[block.ids] for block, rows in zip(blocks, before, strict=True)]
    return Pattern(
        ids=np.concatenate([block.ids for block in blocks]),
        ranks=np.concatenate(ranks),
        counts=num_blocks * np.array(counts, np.int64),
    )


@functools.lru_cache(maxsize=2)
def _lay_out_cycles(
    name: str, counts: tuple[int, ...], start: int, num_rows: int
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int32]]:
    """`_lay_out` of as many rows as some cycles have, from a row of a cycle on."""
    cycle = _cycle(name, counts, _PATTERNS)
    whole = [(cycle, range(CYCLE_ROWS))] * (num_rows // CYCLE_ROWS)
    parts = [(cycle, range(start, CYCLE_ROWS)), *whole[1:], (cycle, range(start))] if start else whole
    found = _lay_out(parts)
    for numbers in found:
        # Others get them, too.
        numbers.flags.writeable = False
    return found


def _lay_out(
    parts: Sequence[tuple[Pattern, range]],
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int32]]:
    """The source of each row of some parts of patterns, and its place among their rows, one source after the other."""
    edges = [(pattern.before(part.start), pattern.before(part.stop)) for pattern, part in parts]
    taken = np.sum([after - before for before, after in edges], axis=0)
    base = np.cumsum(taken) - taken
    num_rows = sum(len(part) for _, part in parts)
    ids, places = np.empty(num_rows, np.int8), np.empty(num_rows, np.int32)
    done = 0
    for (pattern, part), (before, after) in zip(parts, edges, strict=True):
        own, into = pattern.ids[part.start : part.stop], slice(done, done + len(part))
        ids[into] = own
        np.add((base - before).astype(np.int32)[own], pattern.ranks[part.start : part.stop], out=places[into])
        base += after - before
        done = into.stop
    return ids, places


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


def never_come(names: Sequence[str], weights: Sequence[float], num_rows: int) -> list[str]:
    """The sources that have a weight, but no element among so many.

    >>> never_come(("web", "books"), (1.0, 0.001), 100)
    ['books']
    """
    counts = share(weights, num_rows).tolist()
    return [name for name, weight, count in zip(names, weights, counts, strict=True) if weight and not count]


def rows_until(sizes: tuple[int, ...], weights: tuple[float, ...], *, is_first: bool) -> int:
    """Elements of an epoch that ends when the first source has been gone through once, or when all have.

    Each source that has a weight must come in a block.
    """
    wanted = np.array([weight > 0 for weight in weights])
    size, per_block = np.array(sizes)[wanted], share(weights, BLOCK_ROWS)[wanted]
    blocks = int((size // per_block).min()) if is_first else int((size // per_block).max())
    rest = size - blocks * per_block
    rows = range(BLOCK_ROWS, -1, -1) if is_first else range(BLOCK_ROWS + 1)
    for num_rows in rows:
        found = share(weights, num_rows)[wanted]
        if (found <= rest).all() if is_first else (found >= rest).all():
            return blocks * BLOCK_ROWS + num_rows
    return blocks * BLOCK_ROWS + BLOCK_ROWS
