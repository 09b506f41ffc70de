"""Rows into memory of the caller's own, in the plan's order, each copied once."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from converter import memory

Array = npt.NDArray[Any]

_BLOCK_NUMBERS = 640_000
_FEW = 4

WIDE_BYTES = 256
_WIDE_STEP_BYTES = 120_000
"""Below 128 kB malloc keeps memory. TensorFlow makes it forget all larger pieces at once, in the whole process: at
256 kB a step 1.6 M rows of 2 kB a second instead of 3.1."""

_POOLED_BYTES = 1 << 16

_UNSIGNED = {1: pa.uint8(), 2: pa.uint16(), 4: pa.uint32(), 8: pa.uint64()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Scalar columns that arrive as one `(rows, k)` array."""

    name: str
    columns: tuple[str, ...]
    dtype: str


def gather(parts: Sequence[Array | pa.Array], rows: npt.NDArray[np.integer[Any]] | slice) -> Array | pa.Array:
    """The wanted rows of a window, whose row groups' columns are `parts`, in memory of their own."""
    if isinstance(parts[0], pa.Array):
        together = pa.chunked_array(parts)
        if isinstance(rows, slice):
            taken = together.slice(rows.start, rows.stop - rows.start)
        else:
            taken = together.take(pa.array(rows))
            if taken.num_chunks == 1:
                return taken.chunk(0)
        # Combining copies, so that no batch holds on to the row groups it was cut from.
        return pa.concat_arrays(taken.chunks) if taken.num_chunks else pa.array([], together.type)
    shape, dtype = parts[0].shape[1:], parts[0].dtype
    if isinstance(rows, slice):
        return np.concatenate(_slices(parts, rows), out=new_array((rows.stop - rows.start, *shape), dtype))
    if len(parts) > 1 and dtype.itemsize * int(np.prod(shape)) >= WIDE_BYTES:
        return _gather_wide(parts, rows)
    # Into memory that is let go of at once, and so is warm the next time: a column of it stays in the cache.
    return _take(joined(parts), rows)


def joined(parts: Sequence[Array]) -> Array:
    """Parts of a column, one after the other, in one array."""
    if len(parts) == 1:
        return parts[0]
    num_rows = sum(map(len, parts))
    return np.concatenate(parts, out=new_array((num_rows, *parts[0].shape[1:]), parts[0].dtype))


def _take(values: Array, rows: npt.NDArray[np.integer[Any]]) -> Array:
    """The wanted rows, which must be within bounds: nobody checks that again.

    Arrow gathers numbers at half of NumPy's cost: 0.42 against 0.83 ns for each of 290,000 floats, 1.1 against 2.1 for
    longs; rows of 160 bytes at 21.3 against 22.6.
    """
    num_bytes = values.dtype.itemsize * math.prod(values.shape[1:])
    if not num_bytes or not len(rows):
        return np.empty((len(rows), *values.shape[1:]), values.dtype)
    if not values.flags.aligned:
        # A view of a mapped file; Arrow expects numbers in their places.
        values = np.concatenate([values], out=new_array(values.shape, values.dtype))
    kind = _UNSIGNED.get(num_bytes) or pa.binary(num_bytes)
    column = pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])
    taken = pc.take(column, pa.array(rows), boundscheck=False)
    found: Array = np.frombuffer(taken.buffers()[1], values.dtype, count=len(rows) * math.prod(values.shape[1:]))
    return found.reshape(len(rows), *values.shape[1:])


def new_array(shape: tuple[int, ...], dtype: Any) -> Array:
    """An array without content, of the caller's own.

    Large ones are of `memory.blocks`. Others are of Arrow's pool where that is mimalloc (its default): memory that one
    window let go of comes back to the next one still mapped. NumPy's large arrays are mapped anew each time, and the
    first touch of each page costs more than the copy: 275 against 145 ms for a million rows of 2 kB gathered into one,
    176 against 92 for a plain copy.
    """
    dtype = np.dtype(dtype)
    num_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if num_bytes >= memory.LARGE_BYTES and memory.IS_SUPPORTED:
        return memory.blocks.new_array(shape, dtype)
    if num_bytes < _POOLED_BYTES or pa.default_memory_pool().backend_name != "mimalloc":
        return np.empty(shape, dtype)
    return np.frombuffer(pa.allocate_buffer(num_bytes), dtype).reshape(shape)


def _gather_wide(parts: Sequence[Array], rows: npt.NDArray[np.integer[Any]]) -> Array:
    """Copy rows of many bytes from where they lie, in any of several arrays, each once.

    Put together first they would be copied twice (317 against 210 ms for a million rows of 2 kB). NumPy gathers from
    one array only, so all parts are seen as one: rows that begin at every byte from the lowest part's first one up to
    the highest part's last one. Only rows of the parts are ever taken from it, by addresses that are computed here.
    """
    wanted = new_array((len(rows), *parts[0].shape[1:]), parts[0].dtype)
    num_bytes = wanted.dtype.itemsize * math.prod(wanted.shape[1:])
    parts = [part for part in parts if len(part)]
    bases = [part.ctypes.data for part in parts]
    ends = [base + len(part) * num_bytes for base, part in zip(bases, parts, strict=True)]
    lowest = min(zip(bases, range(len(parts)), strict=True))[1]
    places = np.concatenate([base - bases[lowest] + np.arange(len(part)) * num_bytes
                             for base, part in zip(bases, parts, strict=True)])  # fmt: skip
    first = parts[lowest][:1].reshape(-1).view(np.uint8)
    span = max(ends) - bases[lowest] - num_bytes + 1
    # As bytes, of which NumPy gathers without the GIL.
    everywhere = np.lib.stride_tricks.as_strided(first, shape=(span, num_bytes), strides=(1, 1), writeable=False)
    target, taken = wanted.reshape(-1).view(np.uint8).reshape(len(rows), num_bytes), places[rows]
    # In steps that stay in the cache: indexing makes a copy of its own.
    step = max(1, _WIDE_STEP_BYTES // num_bytes)
    for start in range(0, len(rows), step):
        stop = start + step
        target[start:stop] = everywhere[taken[start:stop]]
    return wanted


def gather_stack(
    groups: Iterable[Sequence[Array]],
    num_rows: int,
    rows: npt.NDArray[np.integer[Any]] | slice,
    num_columns: int,
    dtype: str,
) -> Array:
    """Scalar columns as rows: `groups` has for each row group its columns, of `num_rows` rows in all.

    The result is `(rows, num_columns)`. The window is transposed block by block, then whole rows are gathered: a row
    is one run of memory, so one miss of the cache serves all columns.

    To transpose is to gather as well, always in the same order: 0.53 ns for each of 40 columns' numbers, and one long
    call without the GIL, where writing column by column into rows takes 0.84, and 1.1 with another thread beside it.
    """
    wanted = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
    if wanted * _FEW < num_rows:
        # The first batches of an epoch should not wait for all of a window.
        groups = [[gather(parts, rows) for parts in zip(*groups, strict=True)]]
        num_rows, rows = wanted, slice(0, wanted)
    window = new_array((num_rows, num_columns), dtype)
    # Odd, or the columns' numbers of a row would fall into few lines of the cache.
    block_rows = (_BLOCK_NUMBERS // num_columns) | 1
    block, order = new_array((num_columns, block_rows), dtype), _row_order(num_columns, block_rows)
    numbers = pa.Array.from_buffers(_UNSIGNED[window.itemsize], block.size, [None, pa.py_buffer(block)])
    offset = 0
    for columns in groups:
        for start in range(0, len(columns[0]), block_rows):
            num = min(block_rows, len(columns[0]) - start)
            for row, column in zip(block, columns, strict=True):
                row[:num] = column[start : start + num]
            taken = pc.take(numbers, order.slice(0, num * num_columns), boundscheck=False)
            transposed = np.frombuffer(taken.buffers()[1], dtype, count=num * num_columns)
            window[offset : offset + num] = transposed.reshape(num, num_columns)
            offset += num
    if isinstance(rows, slice):
        return window if wanted == num_rows else window[rows].copy()
    return _take(window, rows)


@functools.lru_cache(maxsize=4)
def _row_order(num_columns: int, num_rows: int) -> pa.Array:
    """Where the numbers of rows lie in columns of so many rows, row after row."""
    rows, columns = np.arange(num_rows, dtype=np.int32), np.arange(num_columns, dtype=np.int32)
    return pa.array((rows[:, None] + columns * np.int32(num_rows)).reshape(-1))


def _slices(parts: Sequence[Array], rows: slice) -> list[Array]:
    """The stretches of `parts`, one after the other, that make up `rows` of their concatenation."""
    found, offset = [], 0
    for part in parts:
        start, stop = max(rows.start - offset, 0), min(rows.stop - offset, len(part))
        if start < stop:
            found.append(part[start:stop])
        offset += len(part)
    return found
