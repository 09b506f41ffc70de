"""Columns of rows that wait to be handed out: NumPy arrays or torch tensors, joined and taken by row."""

from __future__ import annotations

import functools
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


def join(parts: Sequence[Any], name: Any = None) -> Any:
    """Parts of a column one after the other. Rows of different shapes become an array of arrays.

    Numbers that no type holds all become objects.

    Raises:
        ValueError: tensors of different types hold such numbers; the message names the column.
    """
    if len(parts) == 1:
        return parts[0]
    if not isinstance(parts[0], np.ndarray):
        import torch

        return torch.cat(_tensors_alike(parts, name))
    parts = _in_one_type(parts)
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


def alike(column: Any, other: Any, taken: Rows, name: Any = None) -> tuple[Any, Any]:
    """Both columns with one type that holds the taken rows of the first one, and those of the other one.

    Raises:
        ValueError: they are tensors, and no type does; the message names the column.
    """
    if not isinstance(column, np.ndarray) or not isinstance(other, np.ndarray):
        column, other = _tensors_alike((column, other), name, taken)
        return column, other
    if column.dtype == other.dtype and column.shape[1:] == other.shape[1:]:
        return column, other
    if object in (column.dtype, other.dtype) or column.shape[1:] != other.shape[1:]:
        return as_objects(column), as_objects(other)
    integers = next((one.dtype for one in (column, other) if one.dtype.kind in "iu" and one.itemsize == 8), None)
    if is_mixed(column) or (integers is not None and "f" in (column.dtype.kind, other.dtype.kind)):
        dtype = (
            column.dtype if is_mixed(column) else np.dtype([("integer", integers), ("real", "f8"), ("is_real", "?")])
        )
        if other.dtype.kind == "f" or np.can_cast(other.dtype, dtype["integer"]):
            return _as_mixed(column, dtype), _as_mixed(other, dtype)
        return as_objects(column), as_objects(other)
    column, other = _in_one_type((column, other), taken)
    dtype = np.result_type(column, other)
    return column.astype(dtype, copy=False), other.astype(dtype, copy=False)


def _tensors_alike(tensors: Sequence[Any], name: Any, taken: Rows | None = None) -> list[Any]:
    """Tensors as one type that holds their values; of the first one, only the taken rows are values."""
    import torch

    dtype = functools.reduce(torch.promote_types, (each.dtype for each in tensors))
    for each in tensors:
        if dtype.is_floating_point and not each.dtype.is_floating_point:
            check_exact(name, take_rows(each, taken) if taken is not None and each is tensors[0] else each, dtype)
    return [each.to(dtype) for each in tensors]


def check_exact(name: Any, whole: Any, dtype: Any) -> None:
    """Raise ValueError if a floating type would round whole numbers, both of torch."""
    found = whole.to(dtype)
    is_other = (found.to(whole.dtype) != whole) | (found >= 2.0**63)
    if is_other.any():
        raise ValueError(
            f"Column {name!r} has the whole number {whole[is_other][0].item()} and, in another row, a null or a "
            f"floating number: a tensor of {dtype} would round it. Fill nulls or cast the column in a TransformSpec, "
            "or leave such rows out with a predicate."
        )


def _in_one_type(parts: Sequence[npt.NDArray[Any]], taken: Rows | slice = slice(None)) -> Sequence[npt.NDArray[Any]]:
    """Parts that NumPy joins without another value, as objects if no type holds all.

    NumPy itself takes the finest unit of times, in which the year 9999 is none, and makes doubles of whole numbers
    beside floats, or beside unsigned ones. Of the first part, only the taken rows are values.
    """
    dtypes = {part.dtype for part in parts}
    kinds = {dtype.kind for dtype in dtypes}
    wanted: np.dtype[Any] | None = None
    if len(dtypes) > 1 and kinds == {"M"}:
        # The coarsest.
        wanted = next(unit for unit in dtypes if all(np.promote_types(unit, other) == other for other in dtypes))
    elif kinds <= set("iuf") and any(dtype.kind != "f" and dtype.itemsize == 8 for dtype in dtypes):
        wanted = np.dtype("i8") if "f" not in kinds else np.result_type(*dtypes)
    if len(dtypes) == 1 or wanted is None:
        return parts
    found = [part.astype(wanted) for part in parts]
    for one, part in zip(found, parts, strict=True):
        rows = taken if part is parts[0] else slice(None)
        if not _is_same(one[rows], part[rows]):
            return [as_objects(part) for part in parts]
    return found


def _is_same(found: npt.NDArray[Any], values: npt.NDArray[Any]) -> bool:
    """Whether a cast has kept all values. Doubles hold the whole numbers up to 2**53."""
    if values.dtype.kind in "iu" and found.dtype.kind == "f":
        return not values.size or max(-int(values.min()), int(values.max())) <= 2**53
    return np.array_equal(found.astype(values.dtype), values, equal_nan=True) and not (
        values.dtype.kind == "u" and (found < 0).any()
    )


def is_mixed(column: Any) -> bool:
    """Whether rows are integers or floats, each as exact as it came: a row group with a null has floats."""
    return isinstance(column, np.ndarray) and column.dtype.names is not None


def unmixed(column: Any) -> Any:
    """Rows of a mixed column as integers, as floats if there is one among them, or as objects if that would round.

    Other columns as they are.
    """
    if not is_mixed(column):
        return column
    is_real, integers = column["is_real"], column["integer"]
    if not is_real.any():
        return integers.copy()
    found = np.where(is_real, column["real"], integers)
    whole = integers[~is_real]
    return found if _is_same(whole.astype("f8"), whole) else as_objects(column)


def _as_mixed(column: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if is_mixed(column):
        return column
    mixed = np.zeros(column.shape, dtype)
    is_real = column.dtype.kind == "f"
    mixed["real" if is_real else "integer"], mixed["is_real"] = column, is_real
    return mixed
