"""Lists of text or bytes: they stay Arrow's until a batch is cut, and only then become Python objects.

Each row is an object array of `str` or `bytes`, or with one more dimension of such arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from converter.schema import Field


def decode_text(array: pa.Array, field: Field, fill: Any) -> pa.Array:
    """Texts or bytes in one type for all files of a window, nulls replaced by `fill`; with None they stay.

    Raises:
        pyarrow.ArrowInvalid: a text is not UTF-8.
    """
    empty: Any = "" if field.dtype == "str" else b""
    objects = pc.cast(array, pa.large_string() if field.dtype == "str" else pa.large_binary())
    if field.dtype == "str":
        _check_text(objects, field)
    return objects if fill is None or not objects.null_count else pc.fill_null(objects, fill or empty)


def _check_text(array: pa.Array, field: Field) -> None:
    """Raise ArrowInvalid if text is not UTF-8: when strings are made, its file is no longer known."""
    if not len(array):
        return
    _, offsets, data = array.buffers()
    start, stop = np.frombuffer(offsets, np.int64, len(array) + 1, array.offset * 8)[[0, -1]].tolist()
    if data is None or not 0 <= start < stop <= data.size:
        is_ascii = start == stop
    else:
        raw = np.frombuffer(data, np.uint8, stop - start, start)
        whole = raw[: len(raw) // 8 * 8].view(np.uint64)
        # Most text is ASCII, which is valid however it is cut: a tenth of the time of validating each text.
        highest = int(np.bitwise_or.reduce(whole)) if len(whole) else 0
        is_ascii = not highest & 0x8080808080808080 and not (raw[len(whole) * 8 :] & 0x80).any()
    if not is_ascii:
        try:
            array.validate(full=True)
        except pa.ArrowInvalid as error:
            raise pa.ArrowInvalid(f"column {field.name!r} has text that is no UTF-8 ({error})") from error


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
