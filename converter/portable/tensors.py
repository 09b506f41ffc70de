"""Writes a column of lists: the numbers of a row become the bytes of one Parquet value."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from converter.portable.categories import encode_categories, note_elements
from converter.portable.texts import find_bad_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converter.portable.records import (
        ColumnSpec,
        Encoded,
        EncodedColumn,
        EncodedLists,
        EncodedTensor,
        FindingReport,
        Layout,
        Numbers,
        Shape,
        Vocabulary,
    )

DTYPE_METADATA, NDIM_METADATA, SHAPE_METADATA = "converter.dtype", "converter.ndim", "converter.shape"
"""A tensor's dtype and shape in the metadata of a file's field: other programs have no manifest."""


def stored_dtype(dtype: str) -> np.dtype[Any]:
    """How numbers are stored, little-endian: days as int32, times as int64 microseconds since 1970."""
    stored_name = {"datetime64[D]": "int32", "datetime64[us]": "int64"}.get(dtype, dtype)
    kind: np.dtype[Any] = np.dtype(stored_name).newbyteorder("<")
    return kind


def next_layout(
    layout: Layout,
    encoded: dict[str, EncodedColumn],
    odd_rows: dict[str, int],
    row_numbers: Numbers,
) -> Layout:
    """The layout after one more batch; notes the first row that differs from those before it.

    `row_numbers` are those of the batch's rows in the partition.
    """
    after = dict(layout)
    for name, values in encoded.items():
        if "array" in values or values["empty"]:
            continue
        before, shape = layout.get(name), values["shape"]
        if shape is not None and 0 not in shape and before in (None, shape):
            after[name] = shape
            continue
        after[name] = "ragged"
        if name not in odd_rows and before != "ragged":
            shapes, valid = _row_shapes(values), values["valid"]
            first = shapes[np.argmax(valid)] if valid is not None else shapes[0]
            differs = (shapes != (first if before is None else before)).any(axis=1)
            odd_rows[name] = int(row_numbers[np.argmax(differs if valid is None else differs & valid)])
    return after


def _row_shapes(values: Mapping[str, Any]) -> Numbers:
    """The shape of each row, `(rows, ndim)`."""
    if values["shapes"] is not None:
        return np.asarray(values["shapes"])
    if values["shape"] is not None:
        return np.broadcast_to(np.array(values["shape"], np.int64), (len(values["sizes"]), len(values["shape"])))
    return np.asarray(values["sizes"])[:, None]


def stored(values: EncodedColumn, shape: Shape) -> pa.Array:
    """The array that goes into the file; of type null while every row so far was null."""
    if "array" in values:
        return values["array"]
    if values["empty"] and shape is None:
        return pa.nulls(len(values["sizes"]))
    return as_binary(values, fixed=shape if isinstance(shape, tuple) else None)


def without_placeholders(table: pa.Table, layout: Layout, columns: list[ColumnSpec]) -> pa.Table:
    """The table with its null columns typed, now that a row group of them must be written."""
    for index, column in enumerate(columns):
        if column["kind"] not in ("scalar", "lists") and pa.types.is_null(table.schema.field(index).type):
            shape = layout.get(column["name"], "ragged")
            width = -1 if not isinstance(shape, tuple) else int(np.prod(shape)) * stored_dtype(column["dtype"]).itemsize
            table = table.set_column(index, column["name"], pa.nulls(table.num_rows, pa.binary(width)))
    return table


def with_shapes(schema: pa.Schema, layout: Layout, columns: list[ColumnSpec]) -> pa.Schema:
    """The schema with the dtype and the shape of each tensor's bytes in its field's metadata."""
    for index, column in enumerate(columns):
        if column["kind"] not in ("scalar", "lists"):
            shape = layout.get(column["name"], "ragged")
            ndim = len(column["shape"]) if column["shape"] is not None else column["ndim"]
            metadata = {DTYPE_METADATA: column["dtype"], NDIM_METADATA: str(ndim)}
            if isinstance(shape, tuple):
                metadata[SHAPE_METADATA] = json.dumps(list(shape))
            schema = schema.set(index, schema.field(index).with_metadata(metadata))
    return schema


def encode(array: pa.Array, column: ColumnSpec, vocabulary: Vocabulary | None = None) -> Encoded:
    """One batch of one column, ready to store; or a finding, if the data are bad. Categories change `vocabulary`."""
    if column["decode"] is not None:
        decoded = _encode_decoded(array, column)
        if column["kind"] != "scalar" or "finding" in decoded:
            return decoded
        # A number for each row. Below it is a column as any other.
        array = _single_numbers(decoded)
    if (finding := _find_bad_text(array)) is not None:
        return finding
    if vocabulary is not None and column["kind"] == "scalar":
        return encode_categories(array, vocabulary)
    if vocabulary is not None and (finding := note_elements(array, vocabulary)) is not None:
        return finding
    if column["kind"] == "scalar":
        target = _ARROW[column["dtype"]]
        return {"array": array if array.type == target else pc.cast(array, target, safe=False)}
    if column["kind"] == "lists":
        return _encode_lists(array, column)
    if column["kind"] == "bytes":
        return _encode_bytes(array, column)
    encoded = {"tensor": _encode_tensor, "vector": _encode_vector, "matrix": _encode_matrix}[column["kind"]](
        array, column
    )
    declared = column["shape"]
    if declared is None or "finding" in encoded or encoded["empty"]:
        return encoded
    if column["ndim"] > 1:
        if encoded["shape"] == tuple(declared):
            return encoded
        shapes, valid = _row_shapes(encoded), encoded["valid"]
        differs = (shapes != np.array(declared)).any(axis=1) if shapes.shape[1] == len(declared) else shapes[:, 0] >= 0
        row = np.argmax(differs if valid is None else differs & valid)
        return _wrong_shape(row, f"shape {tuple(shapes[row].tolist())}", f"shape {tuple(declared)}")
    size = int(np.prod(declared))
    present = encoded["sizes"] if encoded["valid"] is None else encoded["sizes"][encoded["valid"]]
    wrong = np.flatnonzero(present != size)
    if len(wrong):
        row = wrong[0] if encoded["valid"] is None else np.flatnonzero(encoded["valid"])[wrong[0]]
        return _wrong_shape(row, f"{present[wrong[0]]} numbers", f"{size} numbers")
    encoded["shape"] = tuple(declared)
    return encoded


def _find_bad_text(array: pa.Array) -> FindingReport | None:
    """The first row whose text, or the text in its lists, is no UTF-8."""
    kind, texts, lists = array.type, array, []
    while pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return None
    while texts.type != kind:
        lists.append(texts)
        texts = texts.flatten()
    bad = find_bad_text(texts)
    if bad is None:
        return None
    row, found = bad
    for level in reversed(lists):
        lengths = pc.fill_null(pc.list_value_length(level), 0).to_numpy(zero_copy_only=False)
        row = int(np.searchsorted(np.cumsum(lengths), row, side="right"))
    return {"finding": {"kind": "text", "row": row, "found": repr(found)}}


def _encode_lists(array: pa.Array, column: ColumnSpec) -> EncodedLists | FindingReport:
    """Lists that stay lists: Parquet holds null elements, and text."""
    target = _ARROW[column["dtype"]]
    for _ in range(column["ndim"]):
        target = pa.list_(target)
    lists = array if array.type == target else pc.cast(array, target, safe=False)
    valid = None if not array.null_count else np.asarray(array.is_valid())
    level, sizes = lists, np.ones(len(lists), np.int64)
    for depth in range(column["ndim"]):
        if depth and level.null_count:
            return {"finding": {"kind": "null_element"}}
        lengths = pc.fill_null(pc.list_value_length(level), 0).to_numpy(zero_copy_only=False)
        ends, total = np.cumsum(sizes), np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))
        sizes, level = total[ends] - total[ends - sizes], level.flatten()
    return {"array": lists, "elements": level, "sizes": sizes, "valid": valid, "empty": lists.null_count == len(lists)}


def _wrong_shape(row: Any, found: str, expected: str) -> FindingReport:
    return {"finding": {"kind": "shape", "row": int(row), "found": found, "expected": expected}}


def _encode_bytes(array: pa.Array, column: ColumnSpec) -> EncodedTensor | FindingReport:
    """Rows of bytes that are little-endian numbers of the declared shape."""
    assert column["shape"] is not None
    valid = None if not array.null_count else np.asarray(array.is_valid())
    present = pc.cast(array if valid is None else array.drop_null(), pa.large_binary())
    dtype, row_numbers = np.dtype(column["dtype"]).newbyteorder("<"), math.prod(column["shape"])
    lengths = np.asarray(pc.binary_length(present))
    wrong = np.flatnonzero(lengths != row_numbers * dtype.itemsize)
    if len(wrong):
        row = wrong[0] if valid is None else np.flatnonzero(valid)[wrong[0]]
        return _wrong_shape(row, f"{lengths[wrong[0]]} bytes", f"{row_numbers * dtype.itemsize} bytes")
    values = np.empty(0, dtype)
    if len(present):
        _, offsets, data = present.buffers()
        start = int(np.frombuffer(offsets, np.int64, count=1, offset=present.offset * 8)[0])
        values = np.frombuffer(data, np.uint8, count=int(lengths.sum()), offset=start).view(dtype)
    sizes = np.full(len(array), row_numbers) if valid is None else valid * row_numbers
    shape = tuple(column["shape"])
    return {"values": values, "sizes": sizes, "valid": valid, "shape": shape, "shapes": None, "empty": not len(present)}


def _encode_decoded(array: pa.Array, column: ColumnSpec) -> EncodedTensor | FindingReport:
    """Rows of bytes as the tensors that the column's decoder makes of them."""
    decode = column["decode"]
    assert decode is not None
    valid = None if not array.null_count else np.asarray(array.is_valid())
    present = pc.cast(array if valid is None else array.drop_null(), pa.large_binary())
    try:
        values, present_shapes = decode(present)
    except ImportError as error:
        return {"finding": {"kind": "no_library", "found": f"{type(error).__name__}: {error}"}}
    except Exception as error:  # noqa: BLE001  # A decoder may be a user's.
        bad = decode_alone(array, column)
        if type(error).__name__ == "WrongDecoderError" and len(bad) in (0, len(present)):
            return {"finding": {"kind": "decoder", "found": str(error)}}
        return {
            "finding": {"kind": "undecodable", "row": next(iter(bad), 0), "found": f"{type(error).__name__}: {error}"}
        }
    shapes = present_shapes
    if valid is not None:
        shapes = np.zeros((len(array), present_shapes.shape[1]), np.int64)
        shapes[valid] = present_shapes
    return _encoded(np.ascontiguousarray(values, values.dtype.newbyteorder("<")), valid, shapes)


def _single_numbers(decoded: EncodedTensor) -> pa.Array:
    """One number for each row that is not null."""
    values, valid = decoded["values"], decoded["valid"]
    if valid is None:
        return pa.array(values.view(values.dtype.newbyteorder("=")))
    numbers = np.zeros(len(valid), values.dtype.newbyteorder("="))
    numbers[valid] = values
    return pa.array(numbers, mask=~valid)


def decode_alone(array: pa.Array, column: ColumnSpec) -> dict[int, str]:
    """The rows that cannot be decoded alone, in order, each with its error. Null rows are none of them."""
    decode = column["decode"]
    assert decode is not None
    errors: dict[int, str] = {}
    for row in np.flatnonzero(np.asarray(array.is_valid())).tolist():
        try:
            decode(pc.cast(array[row : row + 1], pa.large_binary()))
        except Exception as error:  # noqa: BLE001  # A decoder may be a user's.
            errors[row] = f"{type(error).__name__}: {error}"
    return errors


def _encode_tensor(array: pa.Array, column: ColumnSpec) -> EncodedTensor | FindingReport:
    """Nested lists of numbers: every row's shape, and the numbers in C order."""
    valid = None if not array.null_count else np.asarray(array.is_valid())
    outer = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    # How many lists each row has on the level above, and the sizes on each level.
    level, counts, sizes = array.flatten(), outer, [outer]
    for _ in range(1, column["ndim"]):
        if level.null_count:
            return {"finding": {"kind": "null_element"}}
        lengths = pc.list_value_length(level).to_numpy(zero_copy_only=False).astype(np.int64)
        level = level.flatten()
        if len(lengths) and (lengths == lengths[0]).all():
            own = np.where(counts > 0, lengths[0], 0)
        else:
            own = np.zeros(len(counts), np.int64)
            own[counts > 0] = lengths[(np.cumsum(counts) - counts)[counts > 0]]
            if (lengths != np.repeat(own, counts)).any():
                return {"finding": {"kind": "jagged"}}
        sizes.append(own)
        counts = counts * own
    if level.null_count:
        return {"finding": {"kind": "null_element"}}
    return _encoded(_numbers(level, column["dtype"]), valid, np.stack(sizes, axis=1))


def _encoded(values: Numbers, valid: Numbers | None, shapes: Numbers) -> EncodedTensor:
    """Flat numbers and each row's shape, as `encode` gives them."""
    present = shapes if valid is None else shapes[valid]
    is_uniform = len(present) > 0 and bool((present == present[0]).all())
    return {
        "values": values,
        "sizes": shapes.prod(axis=1),
        "valid": valid,
        "shape": tuple(present[0].tolist()) if is_uniform else None,
        "shapes": shapes if shapes.shape[1] > 1 and not is_uniform else None,
        "empty": not len(present),
    }


def _encode_vector(array: pa.Array, column: ColumnSpec) -> EncodedTensor | FindingReport:
    """Spark's ml and mllib vectors: struct<type, size, indices, values>, dense where type is 1."""
    valid = None if not array.null_count else np.asarray(array.is_valid())
    kind, size, indices, numbers = (pc.struct_field(array, [name]) for name in ("type", "size", "indices", "values"))
    is_dense = pc.fill_null(pc.equal(kind, 1), False).to_numpy(zero_copy_only=False)
    stored = pc.fill_null(pc.list_value_length(numbers), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    values = _numbers(numbers.flatten(), column["dtype"])
    sizes = np.where(is_dense, stored, pc.fill_null(size, 0).to_numpy(zero_copy_only=False)).astype(np.int64)
    if not is_dense.all():
        starts = np.cumsum(sizes) - sizes
        # A dense row's numbers stand at 0, 1, 2, …; a sparse row names its places.
        within = np.arange(len(values)) - np.repeat(np.cumsum(stored) - stored, stored)
        places = within.copy()
        places[np.repeat(~is_dense, stored)] = indices.flatten().to_numpy(zero_copy_only=False)
        scattered = np.zeros(int(sizes.sum()), values.dtype)
        scattered[np.repeat(starts, stored) + places] = values
        values = scattered
    return _encoded(values, valid, sizes[:, None])


def _encode_matrix(array: pa.Array, column: ColumnSpec) -> EncodedTensor | FindingReport:
    """Matrices: struct<type, numRows, numCols, colPtrs, rowIndices, values, isTransposed>, dense where type is 1.

    Dense values and sparse pointers run along columns, or along rows where the matrix is transposed.
    """
    valid = None if not array.null_count else np.asarray(array.is_valid())
    present = array if valid is None else array.drop_null()

    def plain(name: str) -> Numbers:
        return np.asarray(pc.struct_field(present, [name]).to_numpy(zero_copy_only=False))

    def flat(rows: pa.Array, name: str) -> tuple[pa.Array, Numbers]:
        lists = pc.struct_field(rows, [name])
        return lists.flatten(), pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)

    shapes = np.zeros((len(array), 2), np.int64)
    shapes[slice(None) if valid is None else valid] = np.stack([plain("numRows"), plain("numCols")], axis=1)
    heights, widths = (shapes if valid is None else shapes[valid]).T
    is_sparse, is_transposed = plain("type") != 1, plain("isTransposed").astype(bool)
    numbers, stored = flat(present, "values")
    # Each stored number's row; its line (a column, or a row where the matrix is transposed), and its place there.
    owner = np.repeat(np.arange(len(present)), stored)
    line_length = np.where(is_transposed, widths, heights)[owner]
    within = np.arange(len(owner)) - np.repeat(np.cumsum(stored) - stored, stored)
    line, place = np.divmod(within, np.maximum(line_length, 1))
    if is_sparse.any():
        sparse, of_sparse = present.filter(pa.array(is_sparse)), is_sparse[owner]
        pointers, lengths = flat(sparse, "colPtrs")
        counts = np.diff(pointers.to_numpy(zero_copy_only=False))
        # Between the pointers of two matrices is no line.
        counts = np.delete(counts, np.cumsum(lengths)[:-1] - 1)
        lines = np.arange(len(counts)) - np.repeat(np.cumsum(lengths - 1) - (lengths - 1), lengths - 1)
        line[of_sparse] = np.repeat(lines, counts)
        place[of_sparse] = flat(sparse, "rowIndices")[0].to_numpy(zero_copy_only=False)
    row, column_of_row = np.where(is_transposed[owner], (line, place), (place, line))
    sizes = heights * widths
    values = np.zeros(int(sizes.sum()), np.dtype(column["dtype"]).newbyteorder("<"))
    values[(np.cumsum(sizes) - sizes)[owner] + row * widths[owner] + column_of_row] = _numbers(numbers, column["dtype"])
    return _encoded(values, valid, shapes)


def _numbers(array: pa.Array, dtype: str) -> Numbers:
    """Flat numbers without nulls as a little-endian NumPy array of `dtype`."""
    if pa.types.is_boolean(array.type):
        return np.asarray(pc.cast(array, pa.uint8()))
    if dtype.startswith("datetime64"):
        array = pc.cast(array, _ARROW[dtype]).view(pa.int32() if dtype == "datetime64[D]" else pa.int64())
    values = array.to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(values, dtype=stored_dtype(dtype))


def as_binary(encoded: Mapping[str, Any], *, fixed: tuple[int, ...] | None) -> pa.Array:
    """A tensor's rows as bytes: FIXED_LEN_BYTE_ARRAY when all have the shape `fixed`, else BINARY.

    In BINARY a row of several dimensions begins with its shape (see `header_bytes`).
    """
    values, sizes, valid = encoded["values"], encoded["sizes"], encoded["valid"]
    num_rows = len(sizes)
    validity = None if valid is None else pa.array(valid).buffers()[1]
    null_count = 0 if valid is None else int(num_rows - valid.sum())
    if fixed is not None:
        row_numbers = int(np.prod(fixed))
        if null_count:
            # A null row takes up its width all the same.
            full = np.zeros((num_rows, row_numbers), values.dtype)
            full[valid] = values.reshape(-1, row_numbers)
            values = full
        width = row_numbers * values.dtype.itemsize
        buffers = [validity, pa.py_buffer(values)]
        return pa.Array.from_buffers(pa.binary(width), num_rows, buffers, null_count)
    if _row_shapes(encoded).shape[1] > 1:
        values, sizes = _with_headers(encoded)
    offsets = np.concatenate(([0], np.cumsum(sizes) * values.dtype.itemsize))
    if offsets[-1] < 2**31:
        buffers = [validity, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(values)]
        return pa.Array.from_buffers(pa.binary(), num_rows, buffers, null_count)
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.large_binary(), num_rows, buffers, null_count)


def header_bytes(ndim: int) -> int:
    """How long a row's shape is before its numbers: int32 little-endian sizes, filled up to whole eights of bytes."""
    return 0 if ndim == 1 else (4 * ndim + 7) // 8 * 8


def _with_headers(encoded: Mapping[str, Any]) -> tuple[Numbers, Numbers]:
    """The numbers with each row's shape before them, as numbers of the same width; and how many each row has now."""
    values, sizes, valid = encoded["values"], encoded["sizes"], encoded["valid"]
    shapes = _row_shapes(encoded)
    present = np.arange(len(sizes)) if valid is None else np.flatnonzero(valid)
    headers = np.zeros((len(present), header_bytes(shapes.shape[1]) // 4), "<i4")
    headers[:, : shapes.shape[1]] = shapes[present]
    headers = headers.view(values.dtype)
    longer = sizes.copy()
    longer[present] += headers.shape[1]
    places = (np.cumsum(longer) - longer)[present][:, None] + np.arange(headers.shape[1])
    whole = np.empty(int(longer.sum()), values.dtype)
    is_number = np.ones(len(whole), bool)
    is_number[places] = False
    whole[places] = headers
    whole[is_number] = values
    return whole, longer


_ARROW: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "datetime64[D]": pa.date32(),
    "datetime64[us]": pa.timestamp("us"),
    "str": pa.string(),
    "bytes": pa.binary(),
}
