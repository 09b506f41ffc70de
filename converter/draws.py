"""Which elements an epoch has if some come more often than others: how many times each, anew in each epoch.

Counts are exact, not left to chance: a class gets its share of each epoch to the row, and its elements take turns; an
element with a weight of its own comes as often as expected, rounded up or down.
"""

from __future__ import annotations

import hashlib
import os
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from converter.permutations import permutation, random_numbers

Numbers = npt.NDArray[np.int64]
Counts = npt.NDArray[np.unsignedinteger[Any]]

_KEPT_EPOCHS = 2

_counting = threading.RLock()
"""Held while an epoch's counts are made, which all threads then share; a signal's handler may ask for them as well."""


def _renew_lock() -> None:
    """In a forked child: another thread of the parent may have held it."""
    global _counting
    _counting = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Classes:
    """Elements in classes. Each class is gone through in an order of its own, again and again.

    So each of its elements comes once before any comes twice, also from one epoch to the next.
    """

    order: npt.NDArray[np.integer[Any]]
    """The elements, class by class."""

    sizes: Numbers
    """How many elements each class has."""

    quotas: Numbers
    """How many of each class come in an epoch."""

    def __len__(self) -> int:
        return len(self.order)

    def parts(self) -> tuple[npt.NDArray[Any], ...]:
        """What tells two of them apart."""
        return self.order, self.sizes, self.quotas

    def counts(self, name: str, epoch: int) -> Numbers:
        """How many times each element comes in an epoch."""
        counts = np.zeros(len(self.order), np.int64)
        start = 0
        for number, (size, quota) in enumerate(zip(self.sizes.tolist(), self.quotas.tolist(), strict=True)):
            members = self.order[start : start + size]
            start += size
            if not quota or not size:
                continue
            (first, begin), (last, end) = divmod(epoch * quota, size), divmod((epoch + 1) * quota, size)
            own = f"{name}/{number}"
            if first < last:
                # What is left of the first round, whole rounds, and the beginning of the last one.
                counts[members[permutation(f"{own}/{first}", size)[begin:]]] += 1
                counts[members] += last - first - 1
                begin = 0
            if end > begin:
                counts[members[permutation(f"{own}/{last}", size)[begin:end]]] += 1
        return counts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expected:
    """Elements with an expected number each; the numbers sum to a whole number."""

    numbers: npt.NDArray[np.float64]
    total: int

    def __len__(self) -> int:
        return len(self.numbers)

    def parts(self) -> tuple[npt.NDArray[Any], ...]:
        """What tells two of them apart."""
        return (self.numbers,)

    def counts(self, name: str, epoch: int) -> Numbers:
        """How many times each element comes in an epoch: its number, rounded up or down.

        Systematic sampling in a random order (Madow, 1949).
        """
        counts = np.floor(self.numbers).astype(np.int64)
        num_left = self.total - int(counts.sum())
        order = permutation(f"{name}/{epoch}", len(counts))
        ends = np.cumsum((self.numbers - counts)[order])
        if num_left <= 0 or ends[-1] <= 0:
            return counts
        ends *= num_left / ends[-1]
        ends[-1] = num_left
        offset = int(random_numbers(f"{name}/{epoch}", 1, stream=1)[0]) / 2**64
        picked = np.diff(np.floor(ends + offset), prepend=np.floor(offset)).astype(np.int64)
        counts[order] += picked
        return counts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draws:
    """How many times each live element comes in each epoch; their sum is the same in all of them."""

    kind: Classes | Expected
    num_rows: int
    """Elements of an epoch."""

    starts: Numbers
    """The number of each row group's first live element among all, and at the end how many there are."""

    seed: int
    _kept: dict[int, Counts] = field(default_factory=dict, repr=False)

    @property
    def digest(self) -> str:
        """Equal for the same draws from the same elements."""
        content = hashlib.sha256(f"{self.num_rows}/{self.seed}".encode())
        for part in self.kind.parts():
            content.update(np.ascontiguousarray(part).tobytes())
        return content.hexdigest()[:32]

    def of_epoch(self, epoch: int) -> Counts:
        """How many times each live element comes."""
        with _counting:
            # Not looked up twice: a handler that asks for other epochs may remove it meanwhile.
            kept = self._kept.get(epoch)
            if kept is None:
                counts = self.kind.counts(f"{self.seed}/{len(self.kind)}", epoch)
                kept = counts.astype(np.min_scalar_type(int(counts.max())))
                while len(self._kept) >= _KEPT_EPOCHS:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[epoch] = kept
            return kept

    def row_group_counts(self, epoch: int) -> Numbers:
        """How many elements of each row group come in an epoch."""
        ends = np.concatenate(([0], np.cumsum(self.of_epoch(epoch), dtype=np.int64)))
        counts: Numbers = np.diff(ends[self.starts])
        return counts

    def repeats(self, row_group: int, epoch: int) -> Counts:
        """How many times each live element of a row group comes."""
        start, stop = self.starts[row_group : row_group + 2]
        return self.of_epoch(epoch)[start:stop]

    @property
    def num_bytes(self) -> int:
        """The most memory that draws take, while an epoch's are made."""
        return len(self.kind) * (8 + 5 * 8)

    def __getstate__(self) -> tuple[Any, ...]:
        return (self.kind, self.num_rows, self.starts, self.seed)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        for name, value in zip(("kind", "num_rows", "starts", "seed"), state, strict=True):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_kept", {})
