"""Columns of rows that wait to be handed out: NumPy arrays or torch tensors, joined and taken by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from converter.reading.gather import new_array, take

Columns = dict[Any, Any]
"""NumPy arrays or torch tensors of the same rows, by name."""

Rows = npt.NDArray[np.int64]


def num_rows_of(columns: Mapping[Any, Any]) -> int:
    """The rows of columns; 0 if there is no column."""
    return len(next(iter(columns.values()))) if columns else 0


def row_bytes_of(columns: Mapping[Any, Any]) -> int:
    """The bytes of a row, without those of objects."""
    num_rows = max(1, num_rows_of(columns))
    return max(1, sum(int(column.nbytes) for column in columns.values()) // num_rows)


def join(parts: Sequence[Any]) -> Any:
    """Parts of a column one after the other. Rows of different shapes become an array of arrays."""
    if len(parts) == 1:
        return parts[0]
    if not isinstance(parts[0], np.ndarray):
        import torch

        return torch.cat(list(parts))
    parts = _in_one_unit(parts)
    kinds = {(part.dtype == object, part.shape[1:]) for part in parts}
    return np.concatenate(parts if len(kinds) == 1 else [as_objects(part) for part in parts])


def take_rows(column: Any, rows: Rows) -> Any:
    """The wanted rows of a column, in memory of their own."""
    if not isinstance(column, np.ndarray):
        import torch

        return column.index_select(0, torch.from_numpy(rows).to(column.device))
    # Arrow gathers numbers at half of NumPy's cost, and reuses memory.
    return column[rows] if column.dtype == object or is_mixed(column) else take(column, rows)


def put_rows(column: Any, rows: Rows, values: Any) -> None:
    """Replace rows of a column."""
    if isinstance(column, np.ndarray):
        column[rows] = values
        return
    import torch

    column.index_copy_(0, torch.from_numpy(rows).to(column.device), values)


def empty_like(column: Any, num_rows: int) -> Any:
    """A column without content of the same kind."""
    shape = (num_rows, *column.shape[1:])
    if not isinstance(column, np.ndarray):
        return column.new_empty(shape)
    # Memory of earlier pools is used again.
    is_foreign = column.dtype == object or is_mixed(column)
    return np.empty(shape, column.dtype) if is_foreign else new_array(shape, column.dtype)


def as_objects(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The rows as objects: arrays, or NumPy's numbers."""
    if column.dtype == object and column.ndim == 1:
        return column
    objects = np.empty(len(column), object)
    for number in range(len(column)):
        objects[number] = unmixed(column[number : number + 1])[0]
    return objects


def alike(column: Any, other: Any, taken: Rows) -> tuple[Any, Any]:
    """Both columns with one type that holds the taken rows of the first one, and those of the other one."""
    if not isinstance(column, np.ndarray) or not isinstance(other, np.ndarray):
        return column, other
    column, other = _in_one_unit((column, other), taken)
    if column.dtype == other.dtype and column.shape[1:] == other.shape[1:]:
        return column, other
    if object in (column.dtype, other.dtype) or column.shape[1:] != other.shape[1:]:
        return as_objects(column), as_objects(other)
    integers = next((one.dtype for one in (column, other) if one.dtype.kind in "iu" and one.itemsize == 8), None)
    if is_mixed(column) or (integers is not None and "f" in (column.dtype.kind, other.dtype.kind)):
        dtype = (
            column.dtype if is_mixed(column) else np.dtype([("integer", integers), ("real", "f8"), ("is_real", "?")])
        )
        return _as_mixed(column, dtype), _as_mixed(other, dtype)
    dtype = np.result_type(column, other)
    return column.astype(dtype), other.astype(dtype)


def _in_one_unit(parts: Sequence[npt.NDArray[Any]], taken: Rows | slice = slice(None)) -> Sequence[npt.NDArray[Any]]:
    """Times in the coarsest of their units: NumPy takes the finest, and the year 9999 is none in nanoseconds.

    As objects if that would cut them. Of the first part, only the taken rows are times.
    """
    units = {part.dtype for part in parts}
    if len(units) == 1 or any(unit.kind != "M" for unit in units):
        return parts
    # The finest unit is the one that NumPy takes.
    coarsest = next(unit for unit in units if all(np.promote_types(unit, other) == other for other in units))
    found = [part.astype(coarsest) for part in parts]
    for one, part in zip(found, parts, strict=True):
        rows = taken if part is parts[0] else slice(None)
        if not np.array_equal(one[rows].astype(part.dtype), part[rows], equal_nan=True):
            return [as_objects(part) for part in parts]
    return found


def is_mixed(column: Any) -> bool:
    """Whether rows are integers or floats, each as exact as it came: a row group with a null has floats."""
    return isinstance(column, np.ndarray) and column.dtype.names is not None


def unmixed(column: Any) -> Any:
    """Rows of a mixed column as integers, or as floats if there is one among them; other columns as they are."""
    if not is_mixed(column):
        return column
    is_real = column["is_real"]
    return np.where(is_real, column["real"], column["integer"]) if is_real.any() else column["integer"].copy()


def _as_mixed(column: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if is_mixed(column):
        return column
    mixed = np.zeros(column.shape, dtype)
    is_real = column.dtype.kind == "f"
    mixed["real" if is_real else "integer"], mixed["is_real"] = column, is_real
    return mixed
