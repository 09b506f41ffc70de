"""Lists of any form rebuilt around other values, with the same lengths and nulls: no work per row, no copy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from converter.errors import NullValueError
from converter.places import is_list, list_of
from converter.schema import Field

_OWN_BUFFERS = {pa.list_(pa.null(), 1).id: 1, pa.list_view(pa.null()).id: 3, pa.large_list_view(pa.null()).id: 3}
"""How many buffers lists have besides those of their values: validity, and offsets, and sizes."""


def around(lists: pa.Array, values: pa.Array) -> pa.Array:
    """The lists, or a map as lists, with other values in the place of theirs (`lists.values`)."""
    kind = list_of(lists.type, pa.field("element", values.type))
    buffers = lists.buffers()[: _OWN_BUFFERS.get(lists.type.id, 2)]
    return pa.Array.from_buffers(kind, len(lists), buffers, lists.null_count, lists.offset, [values])


def member_of(array: pa.Array, member: str | int) -> pa.Array:
    """A member of structs, by its name, or of maps, by its number; of structs or maps in lists as lists."""
    kind = array.type
    if pa.types.is_struct(kind):
        # Arrow gives a map as a list of structs if only its keys or only its values are read.
        number = kind.get_field_index(member) if isinstance(member, str) else min(member, kind.num_fields - 1)
        # Unlike `flatten`, this keeps the nulls of the struct.
        return pc.struct_field(array, [number])
    return around(array, member_of(array.values, member))


def map_values(array: pa.Array, function: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """A function of the innermost values of nested lists; of the array itself if it has no lists."""
    if not is_list(array.type):
        return function(array)
    return around(array, map_values(array.values, function))


def map_chunks(column: pa.ChunkedArray, function: Callable[[pa.Array], pa.Array]) -> pa.ChunkedArray:
    """A function of each chunk of a column; of an array without rows if it has no chunk, for the type."""
    return pa.chunked_array([function(chunk) for chunk in column.chunks or [pa.array([], column.type)]])


def without_views(array: pa.Array) -> pa.Array:
    """List views as lists; Arrow's own cast loses values where there are nulls."""
    is_large = pa.types.is_large_list_view(array.type)
    if not is_large and not pa.types.is_list_view(array.type):
        return array
    values = without_views(array.flatten())
    sizes = np.asarray(pc.fill_null(pc.list_value_length(array), 0))
    ends = np.cumsum(sizes, dtype=np.int64)
    offsets = pa.array(np.concatenate([[0], ends]), pa.int64() if is_large else pa.int32())
    kind = pa.LargeListArray if is_large else pa.ListArray
    return kind.from_arrays(offsets, values, mask=pc.is_null(array) if array.null_count else None)


def list_lengths(lists: pa.Array) -> npt.NDArray[np.int64]:
    """How many elements each list has; a null list has none."""
    sizes = pc.list_value_length(lists)
    return np.asarray(pc.fill_null(sizes, 0) if sizes.null_count else sizes).astype(np.int64)


def flatten_lists(array: pa.Array, field: Field) -> tuple[pa.Array, list[npt.NDArray[np.int64]]]:
    """The innermost values of nested lists, and the lengths of the lists on each level; a null row has none.

    Raises:
        NullValueError: an inner list is null.
    """
    level, lengths = array, []
    for depth in range(field.ragged_ndim):
        if depth and level.null_count:
            raise NullValueError(
                f"Column {field.name!r} has arrays whose inner arrays are null, which have no length. Replace them "
                "with Spark and convert the DataFrame, or leave the column out with columns=….",
                column=field.name,
            )
        lengths.append(list_lengths(level))
        level = level.flatten()
    return level, lengths
