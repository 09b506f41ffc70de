"""One column in every form in which a file may store it, and how what comes back is compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tests.columns import SCALARS, Column

IDS = list(range(57))
NUMBERS = tuple(column for column in SCALARS if column.dtype not in ("str", "bytes"))
OBJECTS = tuple(column for column in SCALARS if column.dtype in ("str", "bytes"))


def chunked(array: pa.Array, form: str) -> pa.ChunkedArray:
    """The same rows as the reader may meet them: whole, cut out of a larger array, or in several pieces."""
    if form == "offset":
        around = pa.concat_arrays([array.slice(5, 3), array, array.slice(0, 2)])
        return pa.chunked_array([around.slice(3, len(array))])
    if form == "chunks":
        return pa.chunked_array([array.slice(0, 10), array.slice(10, 0), array.slice(10)])
    return pa.chunked_array([array])


def stored(column: Column, way: str, ids: list[int] = IDS) -> pa.Array:
    """A tensor column as it stands in a file: bytes of one width, bytes of any width, or lists."""
    if way == "list":
        # Spark's own writer knows lists of one level.
        return flat(column).arrow(ids)
    shape = column.shape or ()
    # Where the width is not said, a row of several dimensions says its shape: int32, filled up to eights of bytes.
    is_headed = way != "fixed" and len(shape) > 1
    header = np.array([*shape, *[0] * (len(shape) % 2)], "<i4").tobytes() if is_headed else b""
    pairs = zip(column.values(ids), column.valid(ids), strict=True)
    rows = [header + row.tobytes() if ok else None for row, ok in pairs]
    width = int(np.prod(column.shape)) * np.dtype(column.dtype).itemsize if way == "fixed" else -1
    kind = pa.large_binary() if way == "large" else pa.binary(width)
    return pa.array(rows, kind)


def flat(column: Column) -> Column:
    """The same values as a list of one level; the field keeps the shape."""

    class Flat(Column):
        @property
        def ndim(self) -> int:
            return 1

        def values(self, ids: Any, *, fill: Any = 0) -> Any:
            found = super().values(ids, fill=fill)
            return found if isinstance(found, list) else found.reshape(len(ids), -1)

    return Flat(name=column.name, dtype=column.dtype, shape=column.shape, nullable=column.nullable)


def nullable(column: Column) -> Column:
    return Column(name=column.name, dtype=column.dtype, shape=column.shape, nullable=True)


def as_stored(values: np.ndarray) -> np.ndarray:
    """Dates are int32 days, times int64 microseconds."""
    if values.dtype.kind == "M":
        return values.astype("int32" if values.dtype == "datetime64[D]" else "int64")
    return values


def assert_same(found: Any, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected, strict=True)
