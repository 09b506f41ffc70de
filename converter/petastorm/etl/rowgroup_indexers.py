"""Indexes of row groups: which of them hold a value, and which hold any value at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from converter.petastorm.etl import RowGroupIndexerBase


class SingleFieldIndexer(RowGroupIndexerBase):
    """Which row groups hold a value of one column: a text, a number, or an element of an array of those.

    >>> indexer = SingleFieldIndexer("by_id", "id")
    >>> indexer.index_values(np.array([7, 7, 9]), 4)
    >>> indexer.get_row_group_indexes(9), indexer.get_row_group_indexes(8)
    ({4}, set())
    """

    def __init__(self, index_name: str, index_field: str) -> None:
        self._index_name = index_name
        self._column_name = index_field
        self._index_data: dict[Any, set[int]] = {}

    def __add__(self, other: Any) -> SingleFieldIndexer:
        if not isinstance(other, SingleFieldIndexer):
            raise TypeError(
                f"A {type(self).__name__} can be added to another one only, got {type(other).__name__}. Make sure "
                "Spark map function return the same indexer type"
            )
        _check_columns(self, other)
        for value in other.indexed_values:
            self.add_row_groups(value, other.get_row_group_indexes(value))
        return self

    @property
    def index_name(self) -> str:
        """The name by which selectors ask for it."""
        return self._index_name

    @property
    def column_names(self) -> list[str]:
        """The one column that it is built from."""
        return [self._column_name]

    @property
    def indexed_values(self) -> list[Any]:
        """The values that it knows."""
        return list(self._index_data)

    def get_row_group_indexes(self, value_key: Any) -> set[int]:
        """The numbers of the row groups that hold a value; empty if none does."""
        return self._index_data.get(value_key, set())

    def build_index(self, decoded_rows: Sequence[Mapping[str, Any]], piece_index: int) -> dict[Any, set[int]]:
        """Add the rows of a row group.

        Raises:
            ValueError: there are no rows.
            TypeError: a value is an array of more than one axis.
        """
        self.index_values(_column_of(decoded_rows, self._column_name), piece_index)
        return self._index_data

    def index_values(self, values: npt.NDArray[Any] | Sequence[Any], row_group: int) -> None:
        """Add a row group's values of the column, decoded."""
        for value in _distinct(values):
            self._index_data.setdefault(value, set()).add(row_group)

    def add_row_groups(self, value: Any, row_groups: Iterable[int]) -> None:
        """Say that these row groups hold a value."""
        self._index_data.setdefault(value, set()).update(row_groups)


class FieldNotNullIndexer(RowGroupIndexerBase):
    """Which row groups hold any value of a column, not nulls alone."""

    def __init__(self, index_name: str, index_field: str) -> None:
        self._index_name = index_name
        self._column_name = index_field
        self._index_data: set[int] = set()

    def __add__(self, other: Any) -> FieldNotNullIndexer:
        if not isinstance(other, FieldNotNullIndexer):
            raise TypeError(
                f"A {type(self).__name__} can be added to another one only, got {type(other).__name__}. Make sure "
                "Spark map function return the same indexer type"
            )
        _check_columns(self, other)
        self.add_row_groups(other.get_row_group_indexes())
        return self

    @property
    def index_name(self) -> str:
        """The name by which selectors ask for it."""
        return self._index_name

    @property
    def column_names(self) -> list[str]:
        """The one column that it is built from."""
        return [self._column_name]

    @property
    def indexed_values(self) -> list[Any]:
        """A text that stands for all values."""
        return ["Field is Not Null"]

    def get_row_group_indexes(self, value_key: Any = None) -> set[int]:  # noqa: ARG002 (there is one answer)
        """The numbers of the row groups that hold a value."""
        return self._index_data

    def build_index(self, decoded_rows: Sequence[Mapping[str, Any]], piece_index: int) -> set[int]:
        """Add the rows of a row group.

        Raises:
            ValueError: there are no rows.
        """
        self.index_values(_column_of(decoded_rows, self._column_name), piece_index)
        return self._index_data

    def index_values(self, values: npt.NDArray[Any] | Sequence[Any], row_group: int) -> None:
        """Add a row group's values of the column, decoded."""
        if any(value is not None for value in values):
            self._index_data.add(row_group)

    def add_row_groups(self, row_groups: Iterable[int]) -> None:
        """Say that these row groups hold a value."""
        self._index_data.update(row_groups)


def _check_columns(own: RowGroupIndexerBase, other: RowGroupIndexerBase) -> None:
    if own.column_names != other.column_names:
        raise ValueError(
            f"An index of {own.column_names[0]!r} and one of {other.column_names[0]!r} cannot be added. Make sure "
            "indexers in Spark map function index the same fields"
        )


def _column_of(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    if not len(rows):
        raise ValueError(f"Cannot build index for empty rows, column '{name}'")
    return [row[name] for row in rows]


def _distinct(values: npt.NDArray[Any] | Sequence[Any]) -> Iterable[Any]:
    """The values without nulls, each once; of arrays their elements. Numbers and texts come as Python's own."""
    if isinstance(values, np.ndarray) and values.dtype != object:
        if values.ndim > 2:
            raise TypeError(
                f"Only values and arrays of one axis can be indexed, got an array of {values.ndim - 1} axes."
            )
        # Days and times have no form in Python that is equal to them.
        return np.unique(values) if values.dtype.kind in "mM" else np.unique(values).tolist()
    distinct: dict[Any, None] = {}
    for value in values:
        if isinstance(value, np.ndarray):
            distinct.update(dict.fromkeys(_distinct(value[np.newaxis])))
        elif isinstance(value, (np.str_, np.bytes_)):
            # NumPy's `item` leaves out zeros at the end.
            distinct[value[:]] = None
        elif isinstance(value, np.generic) and value.dtype.kind not in "mM":
            distinct[value.item()] = None
        elif value is not None:
            distinct[value] = None
    return distinct
