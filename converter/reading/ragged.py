"""Rows of different lengths: from lists or bytes, padded or split; each framework makes its nested tensors itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from converter.portable.tensors import as_binary, header_bytes
from converter.reading.gather import Array
from converter.schema import Field

Ragged = Literal["raise", "pad", "nested"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedRows:
    """Rows that differ in shape."""

    values: Array
    """All numbers, or texts or bytes as objects, row after row."""

    offsets: npt.NDArray[np.int64]
    """Where each row's numbers begin, and where the last one's end."""

    shapes: npt.NDArray[np.int64]
    """Each row's shape: `(rows, ndim)`; zeros for a null row. The longest of its lists counts on each level."""

    lengths: tuple[npt.NDArray[np.int64], ...] | None = None
    """The lengths of the lists on each level, row after row; None if each row is one block."""

    @classmethod
    def of_lists(cls, values: Array, lengths: Sequence[npt.NDArray[np.int64]]) -> RaggedRows:
        """Rows of nested lists, from the lengths of the lists on each level."""
        num_rows, counts = len(lengths[0]), np.ones(len(lengths[0]), np.int64)
        shapes = np.zeros((num_rows, len(lengths)), np.int64)
        for axis, sizes in enumerate(lengths):
            ends = np.cumsum(counts)
            starts, filled = ends - counts, counts > 0
            if len(sizes):
                shapes[filled, axis] = np.maximum.reduceat(sizes, starts[filled])
            counts = _sums_of(sizes, counts)
        return cls(values=values, offsets=_offsets_of(counts), shapes=shapes, lengths=tuple(lengths))

    @property
    def is_block(self) -> npt.NDArray[np.bool_]:
        """For each row whether its lists on each level have one length, so that it is an array."""
        is_block, counts, most = np.ones((3, len(self.shapes)), np.int64)
        for sizes, longest in zip(self.lengths or (), self.shapes.T, strict=False):
            # On every level, for lists that are all empty have no values to count.
            counts, most = _sums_of(sizes, counts), most * longest
            is_block &= counts == most
        return is_block.astype(np.bool_)

    def level_lengths(self) -> list[npt.NDArray[np.int64]]:
        """The lengths of the lists on each level, row after row."""
        if self.lengths is not None:
            return list(self.lengths)
        lengths, repeats = [], np.ones(len(self.shapes), np.int64)
        for sizes in self.shapes.T:
            # A row's size along the axis, as often as the row has lists on it.
            lengths.append(np.repeat(sizes, repeats))
            repeats = repeats * sizes
        return lengths

    def to_arrow(self, *, is_jagged: bool) -> pa.Array:
        """The rows as they wait to be gathered; `ragged_values` is the inverse."""
        if is_jagged:
            rows = pa.array(self.values.view(np.uint8) if self.values.dtype == np.bool_ else self.values)
            for sizes in reversed(self.level_lengths()):
                rows = pa.LargeListArray.from_arrays(pa.array(_offsets_of(sizes)), rows)
            return rows
        sizes = np.diff(self.offsets)
        has_shapes = self.shapes.shape[1] > 1
        values = np.ascontiguousarray(self.values, self.values.dtype.newbyteorder("<"))
        encoded = {"values": values, "sizes": sizes, "valid": None, "shape": None}
        packed = as_binary(encoded | {"shapes": self.shapes if has_shapes else None}, fixed=None)
        return pc.cast(packed, pa.large_binary())

    def pad(self, padding: Any = 0) -> tuple[Array, npt.NDArray[np.int64]]:
        """The rows as `(rows, *longest)`, padded with zeros; and their sizes, `(rows,)` or `(rows, ndim)`.

        >>> rows = RaggedRows(values=np.array([1, 2, 3]), offsets=np.array([0, 1, 3]), shapes=np.array([[1], [2]]))
        >>> rows.pad()[0].tolist()
        [[1, 0], [2, 3]]
        """
        num_rows, ndim = self.shapes.shape
        longest = self._longest()
        padded = np.zeros((num_rows, *longest), self.values.dtype)
        if self.values.dtype == object:
            padded[...] = padding
        if ndim == 1:
            padded[np.arange(longest[0]) < self.shapes] = self.values
            return padded, self.shapes[:, 0]
        padded.reshape(-1)[self._places(ndim)] = self.values
        return padded, self.shapes

    def pad_inner_lengths(self) -> npt.NDArray[np.int64]:
        """How many numbers each innermost list has: `(rows, *longest[:-1])`, zeros if a row has no list there.

        >>> rows = RaggedRows.of_lists(np.array([1, 2, 3]), [np.array([2, 0]), np.array([1, 2])])
        >>> rows.pad()[0].tolist(), rows.pad_inner_lengths().tolist()
        ([[[1, 0], [2, 3]], [[0, 0], [0, 0]]], [[1, 2], [0, 0]])
        """
        num_rows, ndim = self.shapes.shape
        padded = np.zeros((num_rows, *self._longest()[:-1]), np.int64)
        padded.reshape(-1)[self._places(ndim - 1)] = self.level_lengths()[-1]
        return padded

    def to_lists(self) -> list[Any]:
        """Each row as nested Python lists.

        >>> RaggedRows.of_lists(np.array(["a", "b", "c"], object), [np.array([2, 0, 1])]).to_lists()
        [['a', 'b'], [], ['c']]
        """
        parts: list[Any] = self.values.tolist()
        for sizes in reversed(self.level_lengths()):
            parts = [parts[start:stop] for start, stop in pairwise(_offsets_of(sizes).tolist())]
        return parts

    def _longest(self) -> list[int]:
        num_rows, ndim = self.shapes.shape
        longest: list[int] = self.shapes.max(axis=0).tolist() if num_rows else [0] * ndim
        return longest

    def _places(self, depth: int) -> npt.NDArray[np.int64]:
        """Where the parts at a level of nesting stand in the padded array."""
        places = np.arange(len(self.shapes))
        for sizes, longest in zip(self.level_lengths()[:depth], self._longest(), strict=False):
            within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            places = np.repeat(places * longest, sizes) + within
        return places

    def split(self) -> npt.NDArray[np.object_]:
        """Each row as an array of its own shape; if its inner lists differ, as an object array of arrays."""
        rows = _objects(self.values, self.offsets)
        if self.shapes.shape[1] == 1:
            return rows
        is_block = self.is_block
        if not is_block.all():
            parts = self.values
            for sizes in reversed(self.level_lengths()):
                parts = _objects(parts, _offsets_of(sizes))
            rows[~is_block] = parts[~is_block]
        for index in np.flatnonzero(is_block).tolist():
            rows[index] = rows[index].reshape(self.shapes[index])
        return rows


def row_sizes(lengths: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """How many elements each row has, from the lengths of its lists on each level.

    >>> row_sizes([np.array([2, 0]), np.array([1, 2])]).tolist()
    [3, 0]
    """
    counts = np.ones(len(lengths[0]), np.int64)
    for sizes in lengths:
        counts = _sums_of(sizes, counts)
    return counts


def _sums_of(sizes: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The sums of the first `counts[0]` sizes, of the next `counts[1]`, and so on."""
    ends, total = np.cumsum(counts), _offsets_of(sizes)
    sums: npt.NDArray[np.int64] = total[ends] - total[ends - counts]
    return sums


def _offsets_of(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))


def _objects(values: Array, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.object_]:
    """The slices of an array between offsets, as objects."""
    objects = np.empty(len(offsets) - 1, object)
    if len(objects):
        # `np.split` takes six times as long: 1.01 against 0.16 ms for 1,000 rows.
        objects[:] = [values[start:stop] for start, stop in pairwise(offsets.tolist())]
    return objects


def ragged_values(array: pa.Array, field: Field) -> RaggedRows:
    """Ragged rows from lists, or from bytes: numbers, preceded by the shape if rows have several dimensions.

    Texts and bytes become Python objects here.

    Raises:
        ValueError: the bytes are not what their writer would have written.
    """
    if pa.types.is_large_list(array.type):
        return _values_of_lists(array, field)
    offsets, shapes, places, raw = find_rows(array, field)
    values = raw.view(field.stored_dtype.newbyteorder("<"))
    if places is None:
        return RaggedRows(values=values.astype(field.stored_dtype), offsets=offsets, shapes=shapes)
    is_number = np.ones(len(values), bool)
    is_number[places] = False
    return RaggedRows(
        values=values[is_number].astype(field.stored_dtype, copy=False),
        offsets=_offsets_of(shapes.prod(axis=1)),
        shapes=shapes,
    )


def _values_of_lists(array: pa.Array, field: Field) -> RaggedRows:
    level, lengths = array, []
    for _ in range(field.ndim):
        sizes = pc.list_value_length(level)
        lengths.append(np.asarray(pc.fill_null(sizes, 0) if sizes.null_count else sizes).astype(np.int64))
        level = level.flatten()
    numbers = np.asarray(level.to_numpy(zero_copy_only=False))
    if field.is_object:
        return RaggedRows.of_lists(numbers, lengths)
    values = numbers.view(np.bool_).copy() if field.dtype == "bool" else numbers.astype(field.stored_dtype)
    return RaggedRows.of_lists(values, lengths)


def find_rows(
    array: pa.Array, field: Field
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64] | None, Array]:
    """For rows that are bytes: offsets of their numbers, their shapes, where the shapes are stored, and all bytes.

    Raises:
        ValueError: they are not what their writer would have written.
    """
    wrong = ValueError(f"column {field.name!r} has rows whose shape contradicts their length")
    stored = field.stored_dtype.newbyteorder("<")
    _, offsets_buffer, data = array.buffers()
    edges = np.frombuffer(offsets_buffer, np.int64, count=len(array) + 1, offset=array.offset * 8)
    num_bytes = int(edges[-1] - edges[0])
    raw = np.frombuffer(data, np.uint8, count=num_bytes, offset=int(edges[0])) if num_bytes else np.empty(0, np.uint8)
    offsets, rest = np.divmod(edges - edges[0], stored.itemsize)
    if rest.any():
        raise wrong
    sizes = np.diff(offsets)
    if field.ndim == 1:
        return offsets, sizes.reshape(-1, 1), None, raw
    header = header_bytes(field.ndim) // stored.itemsize
    present = np.flatnonzero(sizes)
    if (sizes[present] < header).any():
        raise wrong
    places = offsets[:-1][present][:, None] + np.arange(header)
    shapes = np.zeros((len(array), field.ndim), np.int64)
    if len(present):
        shapes[present] = np.ascontiguousarray(raw.view(stored)[places]).view("<i4")[:, : field.ndim]
    headers = np.zeros(len(array), np.int64)
    headers[present] = header
    if (shapes < 0).any() or (shapes.prod(axis=1) + headers != sizes).any():
        raise wrong
    return offsets, shapes, places, raw
