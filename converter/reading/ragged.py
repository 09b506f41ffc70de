"""Rows that differ in shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
    """All numbers, row after row."""

    offsets: npt.NDArray[np.int64]
    """Where each row's numbers begin, and where the last one's end."""

    shapes: npt.NDArray[np.int64]
    """Each row's shape: `(rows, ndim)`; zeros for a null row. Of lists that differ in length the longest counts."""

    lengths: tuple[npt.NDArray[np.int64], ...] | None = None
    """How long the lists of each level are, of all rows one after the other; None where each row is one block."""

    @classmethod
    def of_lists(cls, values: Array, lengths: Sequence[npt.NDArray[np.int64]]) -> RaggedRows:
        """Rows of nested lists, by the lengths of the lists on each level."""
        num_rows, counts = len(lengths[0]), np.ones(len(lengths[0]), np.int64)
        shapes = np.zeros((num_rows, len(lengths)), np.int64)
        for axis, sizes in enumerate(lengths):
            ends = np.cumsum(counts)
            starts, filled = ends - counts, counts > 0
            if len(sizes):
                shapes[filled, axis] = np.maximum.reduceat(sizes, starts[filled])
            total = _offsets_of(sizes)
            counts = total[ends] - total[starts]
        return cls(values=values, offsets=_offsets_of(counts), shapes=shapes, lengths=tuple(lengths))

    @property
    def is_block(self) -> npt.NDArray[np.bool_]:
        """For each row whether all of its lists of one level have one length, so that it is an array."""
        found: npt.NDArray[np.bool_] = np.diff(self.offsets) == self.shapes.prod(axis=1)
        return found

    def level_lengths(self) -> list[npt.NDArray[np.int64]]:
        """How long the lists of each level are, of all rows one after the other."""
        if self.lengths is not None:
            return list(self.lengths)
        found, repeats = [], np.ones(len(self.shapes), np.int64)
        for sizes in self.shapes.T:
            # A row's size along the axis, as often as the row has such parts.
            found.append(np.repeat(sizes, repeats))
            repeats = repeats * sizes
        return found

    def to_arrow(self, *, is_jagged: bool) -> pa.Array:
        """The rows as they wait to be gathered; `ragged_values` is the inverse."""
        if is_jagged:
            found = pa.array(self.values.view(np.uint8) if self.values.dtype == np.bool_ else self.values)
            for sizes in reversed(self.level_lengths()):
                found = pa.LargeListArray.from_arrays(pa.array(_offsets_of(sizes)), found)
            return found
        sizes = np.diff(self.offsets)
        has_shapes = self.shapes.shape[1] > 1
        values = np.ascontiguousarray(self.values, self.values.dtype.newbyteorder("<"))
        encoded = {"values": values, "sizes": sizes, "valid": None, "shape": None}
        packed = as_binary(encoded | {"shapes": self.shapes if has_shapes else None}, fixed=None)
        return pc.cast(packed, pa.large_binary())

    def pad(self) -> tuple[Array, npt.NDArray[np.int64]]:
        """The rows as `(rows, *longest)`, zeros where a row has no number; and their sizes.

        Sizes are `(rows,)` where rows have one dimension, else `(rows, ndim)`.

        >>> rows = RaggedRows(values=np.array([1, 2, 3]), offsets=np.array([0, 1, 3]), shapes=np.array([[1], [2]]))
        >>> rows.pad()[0].tolist()
        [[1, 0], [2, 3]]
        """
        num_rows, ndim = self.shapes.shape
        longest = self._longest()
        padded = np.zeros((num_rows, *longest), self.values.dtype)
        if ndim == 1:
            padded[np.arange(longest[0]) < self.shapes] = self.values
            return padded, self.shapes[:, 0]
        if self.lengths is not None:
            padded.reshape(-1)[self._places(ndim)] = self.values
            return padded, self.shapes
        owner = np.repeat(np.arange(num_rows), np.diff(self.offsets))
        left = np.arange(len(owner)) - self.offsets[:-1][owner]
        place, stride = np.zeros(len(owner), np.int64), 1
        for axis in range(ndim - 1, -1, -1):
            left, index = np.divmod(left, self.shapes[:, axis][owner])
            place += index * stride
            stride *= longest[axis]
        padded.reshape(num_rows, stride)[owner, place] = self.values
        return padded, self.shapes

    def pad_inner_lengths(self) -> npt.NDArray[np.int64]:
        """How many numbers each innermost list has: `(rows, *longest[:-1])`, zeros where a row has no list.

        >>> rows = RaggedRows.of_lists(np.array([1, 2, 3]), [np.array([2, 0]), np.array([1, 2])])
        >>> rows.pad()[0].tolist(), rows.pad_inner_lengths().tolist()
        ([[[1, 0], [2, 3]], [[0, 0], [0, 0]]], [[1, 2], [0, 0]])
        """
        num_rows, ndim = self.shapes.shape
        padded = np.zeros((num_rows, *self._longest()[:-1]), np.int64)
        padded.reshape(-1)[self._places(ndim - 1)] = self.level_lengths()[-1]
        return padded

    def _longest(self) -> list[int]:
        num_rows, ndim = self.shapes.shape
        found: list[int] = self.shapes.max(axis=0).tolist() if num_rows else [0] * ndim
        return found

    def _places(self, depth: int) -> npt.NDArray[np.int64]:
        """Where the parts that are so many levels deep stand among the padded ones."""
        places = np.arange(len(self.shapes))
        for sizes, longest in zip(self.level_lengths()[:depth], self._longest(), strict=False):
            within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            places = np.repeat(places * longest, sizes) + within
        return places

    def split(self) -> npt.NDArray[np.object_]:
        """Each row as an array of its own shape; where its inner lists differ, as an object array of arrays."""
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


def _offsets_of(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))


def _objects(values: Array, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.object_]:
    """The stretches of an array, as objects."""
    found = np.empty(len(offsets) - 1, object)
    if len(found):
        found[:] = np.split(values, offsets[1:-1])
    return found


def ragged_values(array: pa.Array, field: Field) -> RaggedRows:
    """Rows that differ in shape, from lists, or from bytes: numbers, and before those of several dimensions the shape.

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
    values = numbers.view(np.bool_).copy() if field.dtype == "bool" else numbers.astype(field.stored_dtype)
    return RaggedRows.of_lists(values, lengths)


def find_rows(
    array: pa.Array, field: Field
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64] | None, Array]:
    """Where the numbers of rows that are bytes begin, their shapes, where what says the shapes stands, and all bytes.

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
