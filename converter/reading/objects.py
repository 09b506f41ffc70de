"""Lists of text or bytes: they stay Arrow's until a batch is cut, and only then become Python objects.

Each row is an object array of `str` or `bytes`, or with one more dimension of such arrays.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from converter.errors import SourceError
from converter.portable.texts import find_bad_text
from converter.schema import Field


def to_numpy(array: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
    """An Arrow array as Arrow itself makes NumPy's of it, texts and bytes as objects of Python."""
    import_pandas()
    made: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return made


@functools.cache
def import_pandas() -> None:
    """Import pandas, if it is there, as Arrow does before its first array for NumPy: it swallows a Ctrl-C meanwhile."""
    with contextlib.suppress(Exception):
        importlib.import_module("pandas")


def decode_text(array: pa.Array, field: Field, fill: Any) -> pa.Array:
    """Texts or bytes in one type for all files of a window, nulls replaced by `fill`; with None they stay.

    Raises:
        SourceError: a text is not UTF-8.
    """
    empty: Any = "" if field.dtype == "str" else b""
    objects = pc.cast(array, pa.large_string() if field.dtype == "str" else pa.large_binary())
    if field.dtype == "str":
        _check_text(objects, field)
    return objects if fill is None or not objects.null_count else pc.fill_null(objects, fill or empty)


def _check_text(array: pa.Array, field: Field) -> None:
    """Raise SourceError if text is not UTF-8: when strings are made, its file is no longer known."""
    bad = find_bad_text(array)
    if bad is not None:
        where = f" in row {bad[0]} of a row group" if field.shape == () else ""
        raise SourceError(
            f"Column {field.name!r} has text that is no UTF-8{where}: {bad[1]!r}. If the file is not damaged, mend or "
            f"drop such rows with Spark, or make the column binary, e.g. F.col({field.name!r}).cast('binary').",
            column=field.name,
        )


def decode_lists(values: pa.Array, lengths: Sequence[npt.NDArray[np.int64]], field: Field, fill: Any) -> pa.Array:
    """Rows of nested lists of these texts, as they wait to be gathered."""
    if isinstance(values.type, pa.BaseExtensionType):
        # JSON is text with a label.
        values = values.storage
    rows = decode_text(values, field, fill)
    for sizes in reversed(lengths):
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
        rows = pa.LargeListArray.from_arrays(pa.array(offsets), rows)
    return rows


def as_lists(rows: npt.NDArray[np.object_]) -> list[Any]:
    """Rows of a batch that are arrays of objects or flags as Python lists, to their innermost elements."""
    return [as_lists(row) if isinstance(row, np.ndarray) else row for row in rows.tolist()]
