"""Rows are gathered in the plan's order into memory of the caller's own, each copied once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from converter import memory

Array = npt.NDArray[Any]

_BLOCK_NUMBERS = 640_000
_MANY_COLUMNS, _MANY_BLOCK_BYTES = 64, 12 << 20
_LINE_BYTES = 64
_FEW = 4

WIDE_BYTES = 256
_WIDE_STEP_BYTES = 120_000
"""Below 128 kB malloc keeps memory even beside TensorFlow: 3.1 M rows of 2 kB a second, 1.6 M in steps of 256 kB."""

_POOLED_BYTES = 1 << 16

_UNSIGNED = {1: pa.uint8(), 2: pa.uint16(), 4: pa.uint32(), 8: pa.uint64()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Scalar columns that arrive as one `(rows, k)` array."""

    name: str
    columns: tuple[str, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowRows:
    """The wanted wide rows of a window, which are copied later, together with those of other windows."""

    parts: Sequence[Array]
    """Where they lie."""

    rows: npt.NDArray[np.integer[Any]]
    """Their numbers in these parts, one after the other."""

    check: Callable[[], None]
    """Raises an error if what the parts hold has changed; to be called once they were copied."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.parts[0].itemsize * math.prod(self.parts[0].shape[1:])

    @property
    def nbytes(self) -> int:
        """Bytes of the wanted rows."""
        return len(self.rows) * self.row_bytes

    @property
    def are_wide(self) -> bool:
        """Whether each row is copied on its own."""
        return self.row_bytes >= WIDE_BYTES

    @property
    def are_most(self) -> bool:
        """Whether the parts hold few other rows, so that they may stay in memory until the rows are copied."""
        return 5 * len(self.rows) >= 4 * sum(map(len, self.parts))

    def __getitem__(self, part: slice) -> WindowRows:
        return WindowRows(parts=self.parts, rows=self.rows[part], check=self.check)


def gather_windows(windows: Sequence[WindowRows], rows: npt.NDArray[np.integer[Any]]) -> Array:
    """The wanted rows of several windows, each copied once; `rows` are numbers in the windows one after the other."""
    parts: list[Array] = []
    places: list[Array] = []
    starts: dict[int, int] = {}
    num_rows = 0
    for window in windows:
        if id(window.parts) not in starts:
            starts[id(window.parts)] = num_rows
            parts += window.parts
            num_rows += sum(map(len, window.parts))
        places.append(window.rows.astype(np.int64) + starts[id(window.parts)])
    found = gather(parts, np.concatenate(places)[rows])
    for check in {id(window.parts): window.check for window in windows}.values():
        check()
    return found


def gather(parts: Sequence[Array | pa.Array], rows: npt.NDArray[np.integer[Any]] | slice) -> Array | pa.Array:
    """The wanted rows of a window, in new memory; `parts` are the column's values in its row groups."""
    if isinstance(parts[0], pa.Array):
        together = pa.chunked_array(parts)
        if isinstance(rows, slice):
            taken = together.slice(rows.start, rows.stop - rows.start)
        else:
            taken = together.take(as_arrow(rows))
            if taken.num_chunks == 1:
                return taken.chunk(0)
        # Combining copies, so that no batch keeps its row groups alive.
        return pa.concat_arrays(taken.chunks) if taken.num_chunks else pa.array([], together.type)
    shape, dtype = parts[0].shape[1:], parts[0].dtype
    if isinstance(rows, slice):
        return np.concatenate(_slices(parts, rows), out=new_array((rows.stop - rows.start, *shape), dtype))
    is_apart = len(parts) > 1 or not parts[0].flags.c_contiguous
    if is_apart and dtype.itemsize * int(np.prod(shape)) >= WIDE_BYTES:
        return _gather_wide(parts, rows)
    # The joined column is released at once, so its memory is still in the processor's cache for the next one.
    return take(joined(parts), rows)


def as_arrow(numbers: npt.NDArray[np.integer[Any]]) -> pa.Array:
    """Whole numbers as an Arrow array, in the same memory.

    `pa.array` would import pandas to see that they are no series: 0.6 s before the first batch.
    """
    kept = np.ascontiguousarray(numbers)
    return pa.Array.from_buffers(pa.from_numpy_dtype(kept.dtype), len(kept), [None, pa.py_buffer(kept)])


def gather_pages(
    pages: Iterable[Array | None], num_rows: int, rows: npt.NDArray[np.integer[Any]] | slice
) -> Array | None:
    """The wanted ones of `num_rows` wide rows that come page by page, each page copied while it is in the cache.

    One page's memory serves the next, where `gather` needs all pages at once: 200,000 rows of 2 kB in Spark's files
    took 30 ms instead of 43 to 100 in order, and 53 instead of 78 shuffled, in one thread.

    None if a page is None, or a row is wanted twice.
    """
    if isinstance(rows, slice):
        places, num_wanted = None, rows.stop - rows.start
    else:
        num_wanted = len(rows)
        # Others go into one row behind the wanted ones, which -1 is: leaving them out would copy a page first.
        places = np.full(num_rows, -1, rows.dtype)
        places[rows] = np.arange(num_wanted, dtype=rows.dtype)
        if np.count_nonzero(places >= 0) != num_wanted:
            return None
    wanted: Array | None = None
    start = 0
    for page in pages:
        if page is None:
            return None
        if wanted is None:
            wanted = new_array((num_wanted + 1, *page.shape[1:]), page.dtype)
            # Bytes are copied without a look at the numbers, also where those are not aligned.
            row_bytes = wanted.itemsize * math.prod(page.shape[1:])
            target = wanted.reshape(-1).view(np.uint8).reshape(num_wanted + 1, row_bytes)
        stop = start + len(page)
        source = page.reshape(len(page), -1).view(np.uint8)
        if places is not None:
            to = places[start:stop]
            if to.max() >= 0:
                target[to] = source
        else:
            assert isinstance(rows, slice)
            first, last = max(rows.start, start), min(rows.stop, stop)
            if first < last:
                target[first - rows.start : last - rows.start] = source[first - start : last - start]
            if stop >= rows.stop:
                break
        start = stop
    return None if wanted is None else wanted[:num_wanted]


def gather_views(parts: Sequence[pa.Array], rows: npt.NDArray[np.integer[Any]] | slice) -> pa.Array:
    """The wanted rows of a window of bytes, as views of the parts' memory: nothing but the views is copied."""
    together = pa.concat_arrays([part.cast(pa.binary_view()) for part in parts])
    validity, views, *data = together.buffers()
    taken = np.frombuffer(views, "V16", len(together), 16 * together.offset)[rows]
    if together.null_count:
        validity = pa.array(np.asarray(together.is_valid())[rows]).buffers()[1]
    return pa.Array.from_buffers(together.type, len(taken), [validity, pa.py_buffer(taken), *data])


def joined(parts: Sequence[Array]) -> Array:
    """Parts of a column, one after the other, in one array."""
    if len(parts) == 1 and parts[0].flags.c_contiguous:
        return parts[0]
    num_rows = sum(map(len, parts))
    return np.concatenate(parts, out=new_array((num_rows, *parts[0].shape[1:]), parts[0].dtype))


def take(values: Array, rows: npt.NDArray[np.integer[Any]]) -> Array:
    """The wanted rows; bounds are not checked.

    Arrow gathers numbers at half of NumPy's cost: 0.42 against 0.83 ns for each of 290,000 floats.
    """
    num_bytes = values.dtype.itemsize * math.prod(values.shape[1:])
    if not num_bytes or not len(rows):
        return np.empty((len(rows), *values.shape[1:]), values.dtype)
    # Arrow expects aligned numbers, which views of a mapped file need not be.
    is_aligned = values.flags.aligned
    aligned = values if is_aligned else np.concatenate([values], out=new_array(values.shape, values.dtype))
    kind = _UNSIGNED.get(num_bytes) or pa.binary(num_bytes)
    column = pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(aligned)])
    taken = pc.take(column, as_arrow(rows), boundscheck=False)
    numbers: Array = np.frombuffer(taken.buffers()[1], values.dtype, count=len(rows) * math.prod(values.shape[1:]))
    return numbers.reshape(len(rows), *values.shape[1:])


def is_joint(values: Any) -> bool:
    """Whether these are rows of numbers, one after the other in memory."""
    return isinstance(values, np.ndarray) and values.dtype != object and values.nbytes > 0 and values.flags.c_contiguous


def take_columns(columns: Mapping[str, Sequence[Array]], rows: npt.NDArray[np.integer[Any]]) -> dict[str, Array]:
    """The wanted rows of columns of numbers, each of whose parts lie one after the other; bounds are not checked.

    One call of Arrow for all of them: after each call a thread waits for the GIL as long as another one computes.
    """
    if not columns or not len(rows):
        return {name: take(joined(parts), rows) for name, parts in columns.items()}
    arrays = [pa.chunked_array([_as_bytes(part) for part in parts if len(part)]) for parts in columns.values()]
    taken = pc.take(pa.Table.from_arrays(arrays, names=list(columns)), as_arrow(rows), boundscheck=False)
    return {
        name: _from_arrow(column, parts[0])
        for (name, parts), column in zip(columns.items(), taken.columns, strict=True)
    }


def _as_bytes(values: Array) -> pa.Array:
    """Rows of numbers as an Arrow array of bytes, which need not be aligned, without a copy."""
    kind = pa.binary(values.dtype.itemsize * math.prod(values.shape[1:]))
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _from_arrow(column: pa.ChunkedArray, like: Array) -> Array:
    """Rows of the dtype and shape of `like`, without a copy if they are in one chunk."""
    size, chunks = math.prod(like.shape[1:]), []
    for chunk in column.chunks:
        start, count = chunk.offset * size * like.itemsize, len(chunk) * size
        numbers: Array = np.frombuffer(chunk.buffers()[1], like.dtype, count=count, offset=start)
        chunks.append(numbers.reshape(len(chunk), *like.shape[1:]))
    return joined(chunks)


def new_array(shape: tuple[int, ...], dtype: Any) -> Array:
    """An array without content, of the caller's own.

    Large ones come from `memory.blocks`, others from Arrow's pool if that is mimalloc, its default: both reuse memory
    of earlier windows. NumPy maps large arrays anew each time, and the first touch of each page costs more than the
    copy: 275 against 145 ms for a million rows of 2 kB.
    """
    kind = np.dtype(dtype)
    num_bytes = kind.itemsize * int(np.prod(shape, dtype=np.int64))
    if num_bytes >= memory.LARGE_BYTES and memory.IS_SUPPORTED:
        return memory.blocks.new_array(shape, kind)
    if num_bytes < _POOLED_BYTES or pa.default_memory_pool().backend_name != "mimalloc":
        return np.empty(shape, kind)
    return np.frombuffer(pa.allocate_buffer(num_bytes), kind).reshape(shape)


def _gather_wide(parts: Sequence[Array], rows: npt.NDArray[np.integer[Any]]) -> Array:
    """Copy wide rows straight from the arrays they lie in, without joining those first.

    Each row lies in one piece; between two rows of an array there may be other bytes.
    """
    wanted = new_array((len(rows), *parts[0].shape[1:]), parts[0].dtype)
    num_bytes = wanted.dtype.itemsize * math.prod(wanted.shape[1:])
    filled = [part for part in parts if len(part)]
    bases = [part.ctypes.data for part in filled]
    ends = [base + (len(part) - 1) * part.strides[0] + num_bytes for base, part in zip(bases, filled, strict=True)]
    lowest = min(zip(bases, range(len(filled)), strict=True))[1]
    places = np.concatenate([base - bases[lowest] + np.arange(len(part)) * part.strides[0]
                             for base, part in zip(bases, filled, strict=True)])  # fmt: skip
    everywhere = _rows_at_every_byte(filled[lowest][:1], max(ends) - bases[lowest] - num_bytes + 1, num_bytes)
    if everywhere is None:
        return take(joined(parts), rows)
    target, taken = wanted.reshape(-1).view(np.uint8).reshape(len(rows), num_bytes), places[rows]
    # In steps that stay in the cache: indexing makes a copy of its own.
    step = max(1, _WIDE_STEP_BYTES // num_bytes)
    for start in range(0, len(rows), step):
        stop = start + step
        target[start:stop] = everywhere[taken[start:stop]]
    return wanted


def _rows_at_every_byte(first_row: Array, num_places: int, num_bytes: int) -> Array | None:
    """Rows of `num_bytes` bytes that begin at every byte from `first_row` on, in all arrays that follow in memory.

    NumPy gathers from one array only, and without the GIL if it holds bytes. Most of these rows lie between the
    arrays: only rows whose place was computed from an array may be taken.

    Reaches into: memory between arrays, by numpy.lib.stride_tricks.as_strided (NumPy 2.4).
    Without it: arrays are joined first, which copies twice: 317 against 210 ms for a million rows of 2 kB.
    """
    as_strided = getattr(np.lib.stride_tricks, "as_strided", None)
    if as_strided is None:
        return None
    raw = first_row.reshape(-1).view(np.uint8)
    rows: Array = as_strided(raw, shape=(num_places, num_bytes), strides=(1, 1), writeable=False)
    return rows


def gather_stack(
    groups: Iterable[Sequence[Array]],
    num_rows: int,
    rows: npt.NDArray[np.integer[Any]] | slice,
    num_columns: int,
    dtype: str,
) -> Array:
    """Scalar columns as an array `(rows, num_columns)`; `groups` are the columns of each row group, `num_rows` in all.

    The window is transposed, then whole rows are gathered, so one cache miss serves all columns.
    """
    wanted = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
    if wanted * _FEW < num_rows:
        # The first batches of an epoch must not wait for a whole window.
        taken = [[gather(parts, rows) for parts in zip(*groups, strict=True)]]
        return gather_stack(taken, wanted, slice(0, wanted), num_columns, dtype)
    window = new_array((num_rows, num_columns), dtype)
    (_transpose_many if num_columns >= _MANY_COLUMNS else _transpose_few)(groups, window)
    if isinstance(rows, slice):
        return window if wanted == num_rows else window[rows].copy()
    return take(window, rows)


def _transpose_few(groups: Iterable[Sequence[Array]], window: Array) -> None:
    """Copy the columns of row groups into the rows of `window`, block by block.

    Each block is one gather without the GIL: 0.53 ns for each number of 40 columns, 0.84 column by column.
    """
    num_columns, dtype = window.shape[1], window.dtype
    # Odd, or the numbers of a row would share few cache lines.
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


def _transpose_many(groups: Iterable[Sequence[Array]], window: Array) -> None:
    """The same in larger blocks, each joined by one call: with many columns a call for each would take too long.

    A number of 1,000 columns takes 1.0 ns, and 1.7 in the other way; of 10 columns 0.7 and 0.6.
    """
    num_columns, dtype = window.shape[1], window.dtype
    line, most_rows = _LINE_BYTES // dtype.itemsize, max(1, _MANY_BLOCK_BYTES // (num_columns * dtype.itemsize))
    lent = new_array((num_columns * (most_rows + 2 * line),), dtype)
    offset = 0
    for columns in groups:
        num_blocks = -(-len(columns[0]) // most_rows)
        block_rows = -(-len(columns[0]) // max(num_blocks, 1))
        for start in range(0, len(columns[0]), block_rows or 1):
            num = min(block_rows, len(columns[0]) - start)
            # Columns lie an odd number of cache lines apart, or the numbers of a row would share few of them.
            width = (-(-num // line) | 1) * line
            gap = np.zeros(width - num, dtype)
            block = lent[: num_columns * width]
            parts = [gap] * (2 * num_columns)
            is_whole = num == len(columns[0])
            parts[::2] = columns if is_whole else [column[start : start + num] for column in columns]
            np.concatenate(parts, out=block, casting="unsafe")
            window[offset : offset + num] = block.reshape(num_columns, width)[:, :num].T
            offset += num


@functools.lru_cache(maxsize=4)
def _row_order(num_columns: int, num_rows: int) -> pa.Array:
    """Where each number of `num_rows` rows lies in a block of columns, row after row."""
    rows, columns = np.arange(num_rows, dtype=np.int32), np.arange(num_columns, dtype=np.int32)
    return as_arrow((rows[:, None] + columns * np.int32(num_rows)).reshape(-1))


def _slices(parts: Sequence[Array], rows: slice) -> list[Array]:
    """The slices of `parts` that make up `rows` of their concatenation."""
    slices, offset = [], 0
    for part in parts:
        start, stop = max(rows.start - offset, 0), min(rows.stop - offset, len(part))
        if start < stop:
            slices.append(part[start:stop])
        offset += len(part)
    return slices
