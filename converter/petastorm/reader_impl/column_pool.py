"""Rows wait in columns, and pieces of them are drawn in random order: each column is gathered once for a piece."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from converter.petastorm.reader_impl.columns import (
    Columns,
    Rows,
    alike,
    empty_like,
    is_mixed,
    num_rows_of,
    put_rows,
    take_rows,
    unmixed,
)


class ColumnPool:
    """Rows in columns, to which rows are added, and from which rows are drawn at random, each once.

    A row stays in its slot until it is drawn, and new rows take free slots. So a row is copied twice, however many rows
    wait. The columns grow with the rows that wait, not with the capacity that a user gave.

    >>> pool = ColumnPool(np.random.default_rng(0))
    >>> pool.add({"id": np.arange(5)})
    >>> len(set(pool.draw(3)["id"].tolist())), pool.num_rows
    (3, 2)
    """

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator
        self._columns: Columns = {}
        self._slots: Rows = np.zeros(0, np.int64)
        """All slots; the first `num_rows` of them are taken."""

        self.num_rows = 0
        """Rows that wait."""

    @property
    def has_mixed_types(self) -> bool:
        """Whether the types of a column depend on the rows that are drawn together."""
        return any(map(is_mixed, self._columns.values()))

    def add(self, columns: Mapping[Any, Any]) -> None:
        """Add rows."""
        num_added = num_rows_of(columns)
        self._grow(self.num_rows + num_added, columns)
        taken, free = self._slots[: self.num_rows], self._slots[self.num_rows : self.num_rows + num_added]
        for name, values in columns.items():
            self._columns[name], added = alike(self._columns[name], values, taken, name)
            put_rows(self._columns[name], free, added)
        self.num_rows += num_added

    def draw(self, num_rows: int) -> Columns:
        """Take so many rows out, in random order."""
        chosen = self._generator.choice(self.num_rows, num_rows, replace=False)
        slots = self._slots[chosen]
        left = self.num_rows - num_rows
        # Slots that stay, but stand behind the new end, take the places of chosen ones before it.
        stays = np.ones(num_rows, np.bool_)
        stays[chosen[chosen >= left] - left] = False
        self._slots[chosen[chosen < left]] = self._slots[left : self.num_rows][stays]
        self._slots[left : self.num_rows] = slots
        self.num_rows = left
        drawn = {name: unmixed(take_rows(column, slots)) for name, column in self._columns.items()}
        for column in self._columns.values():
            if isinstance(column, np.ndarray) and column.dtype == object:
                # Or the pool would keep them alive.
                column[slots] = None
        return drawn

    def _grow(self, num_slots: int, columns: Mapping[Any, Any]) -> None:
        num_before = len(self._slots)
        if num_slots <= num_before:
            return
        num_after = max(num_slots, num_before + num_before // 2)
        for name, values in columns.items():
            grown = empty_like(self._columns.get(name, values), num_after)
            if num_before:
                grown[:num_before] = self._columns[name]
            self._columns[name] = grown
        self._slots = np.concatenate((self._slots, np.arange(num_before, num_after)))
