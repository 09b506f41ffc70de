"""Values straight from the pages of a mapped file, where their bytes already are the numbers.

Our writer puts a column of numbers without nulls into one page of each row group, plain and
uncompressed. Then a view of the mapped file costs nothing, where decoding copies: of 2 kB
rows that was 205 of 720 ms a million rows, of 41 scalars 57 of 183. Pages of other writers
are mostly plain as well, behind a compression that Arrow undoes at the speed of copying where
numbers do not compress. And lists: for each number Arrow decodes two levels, while all that
matters here is that every row has the declared length, and that the bytes of the levels
prove. Embeddings in Spark's files took 1.7 s of a CPU a million rows, and take 0.55.

Whatever is not proven, from a page's own header and levels, is decoded by Arrow.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from converter.parsed_footer import BIT_PACKED, PLAIN, RLE, ColumnChunk
from converter.places import Place
from converter.portable.tensors import DTYPE_METADATA
from converter.schema import Field
from converter.thrift import read_struct, read_varint

Array = npt.NDArray[Any]

_PHYSICAL = {
    np.dtype("int32"): "INT32",
    np.dtype("int64"): "INT64",
    np.dtype("float32"): "FLOAT",
    np.dtype("float64"): "DOUBLE",
}
_FILE_DTYPES = {pa.int8(): "int32", pa.int16(): "int32", pa.int32(): "int32", pa.int64(): "int64",
                pa.float32(): "float32", pa.float64(): "float64", pa.date32(): "int32"}  # fmt: skip
"""How a type's numbers lie in a page. Parquet has no integers of fewer than 32 bits."""

_PLAIN = {PLAIN, RLE, BIT_PACKED}
"""Encodings of chunks whose values are plain: the other two are of levels."""

_CODECS = {"UNCOMPRESSED": None, "SNAPPY": "snappy", "ZSTD": "zstd"}
_DATA_PAGE = 0

_HEADER_BYTES = 64
_MAX_HEADER_BYTES = 1 << 14
"""With the shortest and longest value of long ones."""

_SIZE_BYTES = 4
_MAX_LEVEL_BYTES = 8
"""More than levels can take for a value: no damaged header may ask for all of the memory."""

_MAX_PERIOD_RUNS = 4096
_KEPT_LEVELS = 8


class Chunk(NamedTuple):
    """A row group's part of a column, as its footer describes it."""

    start: int
    end: int
    num_values: int
    codec: str | None


@dataclass(frozen=True, slots=True)
class PlainColumn:
    """A column of a file whose values can be used as they lie in its pages, where those are plain."""

    leaf: int
    file_dtype: np.dtype[Any]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    row_values: int
    """Values that the file counts for a row: a list's numbers; one for a tensor in fixed bytes."""

    value_bytes: int
    has_definitions: bool
    has_repetitions: bool
    regular: dict[tuple[bytes, int], bool] = dataclasses.field(default_factory=dict, compare=False)
    """What repetition levels were found to be; those of most pages are the same bytes."""

    def find_chunk(self, chunk: ColumnChunk, num_rows: int) -> Chunk | None:
        """Where the values of a row group of so many rows lie, unless the footer says that they are not plain.

        What the footer cannot say is found in the pages.
        """
        start, num_values = chunk.data_page_offset, chunk.num_values
        if (
            chunk.codec not in _CODECS
            or chunk.dictionary_page_offset is not None
            or not _PLAIN.issuperset(chunk.encodings)
            or not num_values
            or num_values != num_rows * self.row_values
            or start < 0
        ):
            return None
        return Chunk(start, start + chunk.stored_bytes, num_values, _CODECS[chunk.codec])

    def values(self, buffer: pa.Buffer, chunk: Chunk, *, verify_checksums: bool = False) -> list[Array] | None:
        """A chunk's values, page by page, in order; None where they must be decoded by Arrow.

        Uncompressed pages are views of the buffer, which holds the whole file.

        Raises:
            pyarrow.ArrowException, OSError, ValueError: a page is damaged.
        """
        start, end, left, codec = chunk
        found: list[Array] = []
        if end > buffer.size:
            return None
        decompress = None if codec is None else pa.Codec(codec).decompress
        while left:
            header = _read_page_header(buffer, start, end)
            if header is None:
                return None
            num_bytes, page_bytes, stored_bytes, num_values, checksum, *encodings = header
            levels = page_bytes - num_values * self.value_bytes
            start += num_bytes
            if start + stored_bytes > end or num_values > left or not 0 <= levels <= num_values * _MAX_LEVEL_BYTES + 8:
                return None
            page = buffer.slice(start, stored_bytes)
            if verify_checksums and checksum is not None and zlib.crc32(page) != checksum & 0xFFFFFFFF:
                raise ValueError("a page's checksum is not that of its bytes")
            if decompress is not None:
                page = decompress(page, page_bytes)
            elif stored_bytes != page_bytes:
                return None
            if not self._has_all(page, levels, num_values, *encodings):
                return None
            rows = np.frombuffer(page, self.file_dtype, offset=levels)
            if self.file_dtype != self.dtype:
                # As Arrow narrows: what is beyond a float32 becomes infinite.
                with np.errstate(over="ignore"):
                    rows = rows.astype(self.dtype)
            found.append(rows.reshape(-1, *self.shape) if self.shape else rows)
            start += stored_bytes
            left -= num_values
        return found

    def _has_all(
        self, page: pa.Buffer, levels: int, num_values: int, definition_encoding: Any, repetition_encoding: Any
    ) -> bool:
        """Whether as many bytes stand before the values as levels say of themselves, and no row is odd.

        A null or an empty list has levels but no value. So if what the levels leave is as long as all values are,
        every row is there and whole.
        """
        place = 0
        if self.has_repetitions:
            if repetition_encoding != RLE or num_values % self.row_values:
                return False
            place = _end_of_levels(page, 0)
            if place > levels:
                return False
            said = (page.slice(_SIZE_BYTES, place - _SIZE_BYTES).to_pybytes(), num_values)
            is_regular = self.regular.get(said)
            if is_regular is None:
                if len(self.regular) == _KEPT_LEVELS:
                    self.regular.clear()
                is_regular = self.regular[said] = _is_regular(said[0], self.row_values, num_values)
            if not is_regular:
                return False
        if self.has_definitions:
            if definition_encoding != RLE or place + _SIZE_BYTES > levels:
                return False
            place = _end_of_levels(page, place)
        return place == levels


def find_plain_column(metadata: pq.FileMetaData, place: Place, field: Field) -> PlainColumn | None:
    """How a column's values can be used as they lie in the file; None where they must be decoded in any case."""
    leaf, stored = place.leaf, place.field
    column = metadata.schema.column(leaf)
    shape: tuple[int, ...] | None = field.shape
    # A member of a struct is null where the struct is.
    if shape is None or field.is_object or field.dtype == "bool" or place.members:
        return None
    if (stored.metadata or {}).get(DTYPE_METADATA.encode(), field.dtype.encode()) != field.dtype.encode():
        # Of other numbers: an error where they are decoded.
        return None
    dtype, row_numbers = field.stored_dtype, math.prod(shape)
    row_bytes = row_numbers * dtype.itemsize
    common = {"leaf": leaf, "dtype": dtype, "shape": shape, "has_definitions": column.max_definition_level > 0}
    if pa.types.is_fixed_size_binary(stored.type):
        if not shape or stored.type.byte_width != row_bytes or column.max_definition_level > 1:
            return None
        return PlainColumn(file_dtype=dtype, row_values=1, value_bytes=row_bytes, has_repetitions=False, **common)
    is_list = _is_list(stored.type)
    numbers = stored.type.value_type if is_list else stored.type
    file_dtype = _file_dtype(field, numbers)
    if file_dtype is None or column.physical_type != _PHYSICAL[file_dtype]:
        return None
    if is_list != bool(shape) or column.max_repetition_level != is_list or not row_numbers:
        return None
    if not is_list and column.max_definition_level > 1:
        return None
    return PlainColumn(
        file_dtype=file_dtype,
        row_values=row_numbers,
        value_bytes=file_dtype.itemsize,
        has_repetitions=is_list,
        **common,
    )


def _is_list(stored: pa.DataType) -> bool:
    return bool(pa.types.is_list(stored) or pa.types.is_large_list(stored) or pa.types.is_fixed_size_list(stored))


def _file_dtype(field: Field, stored: pa.DataType) -> np.dtype[Any] | None:
    """The numbers of a page, where they are the field's own or doubles that it narrows; else None."""
    if field.dtype == "datetime64[us]":
        return np.dtype("int64") if pa.types.is_timestamp(stored) and stored.unit == "us" else None
    is_narrowed = field.dtype == "float32" and stored == pa.float64()
    is_days = field.dtype == "datetime64[D]" and stored == pa.date32()
    if stored not in _FILE_DTYPES or not (is_narrowed or is_days or stored == pa.from_numpy_dtype(field.dtype)):
        return None
    return np.dtype(_FILE_DTYPES[stored])


def _end_of_levels(page: pa.Buffer, place: int) -> int:
    """Where levels end that begin at `place` with their own size."""
    return place + _SIZE_BYTES + int.from_bytes(page.slice(place, _SIZE_BYTES).to_pybytes(), "little")


def _is_regular(levels: bytes, row_values: int, num_values: int) -> bool:
    """Whether repetition levels begin a row every `row_values` values and nowhere else.

    Levels are runs: a bit that is repeated, or groups of eight bits (parquet.thrift, RLE with a bit width of 1).
    Every writer repeats itself when rows do, after a few rows. So runs are decoded one by one up to the first end of
    a run that is also the end of a row, and what follows must be the same bytes again.
    """
    found = _decode_runs(levels, 0, row_values, num_values, only_first=True)
    if found is None:
        return False
    period_bytes, period_values = found
    repeats, rest = divmod(num_values, period_values)
    data, whole = np.frombuffer(levels, np.uint8), repeats * period_bytes
    if whole > len(data) or not np.array_equal(data[period_bytes:whole], data[: whole - period_bytes]):
        return False
    if not rest:
        return whole == len(data)
    return _decode_runs(levels, whole, row_values, rest, only_first=False) == (len(data) - whole, rest)


def _decode_runs(
    levels: bytes, start: int, row_values: int, num_values: int, *, only_first: bool
) -> tuple[int, int] | None:
    """Decode runs from `start`, where a row begins; the bytes and values of those that were regular.

    Ends at the values' end, or with `only_first` where the end of a run is the end of a row, too. None if a row
    begins in the wrong place, or no end was found soon.
    """
    place, done = start, 0
    for _ in range(_MAX_PERIOD_RUNS):
        try:
            header, place = read_varint(levels, place)
        except IndexError:
            return None
        count = header >> 1
        if header & 1:
            bits = np.unpackbits(np.frombuffer(levels[place : place + count], np.uint8), bitorder="little")
            # The last group of eight may be longer than the values.
            bits, place = bits[: num_values - done], place + count
            starts, count = np.flatnonzero(bits == 0) + done, len(bits)
            wanted = np.arange(-(-done // row_values) * row_values, done + count, row_values)
            if not np.array_equal(starts, wanted):
                return None
        else:
            if place >= len(levels) or levels[place] > 1 or done + count > num_values:
                return None
            value, place = levels[place], place + 1
            begun = -(-(done + count) // row_values) - -(-done // row_values)
            if begun != (0 if value else count):
                return None
        if not count:
            return None
        done += count
        if done == num_values or (only_first and done % row_values == 0):
            return place - start, done
    return None


def _read_page_header(
    buffer: pa.Buffer, start: int, end: int
) -> tuple[int, int, int, int, int | None, Any, Any] | None:
    """What is needed of the header of a plain data page of the first version; None of any other, or a damaged one.

    Its own bytes; the page's bytes, and those that it takes in the file; its values; the checksum of its bytes, if
    any; and the encodings of its definition and repetition levels.
    """
    for most in (_HEADER_BYTES, _MAX_HEADER_BYTES):
        try:
            found, num_bytes = read_struct(buffer.slice(start, min(most, end - start)).to_pybytes(), 0)
        except (IndexError, ValueError):
            continue
        page = found.get(5)
        if found.get(1) != _DATA_PAGE or not isinstance(page, dict) or page.get(2) != PLAIN:
            return None
        page_bytes, stored_bytes, num_values = found.get(2, 0), found.get(3, 0), page.get(1, 0)
        for number in (page_bytes, stored_bytes, num_values):
            if not isinstance(number, int) or number <= 0:
                return None
        checksum = found.get(4)
        if not (checksum is None or isinstance(checksum, int)):
            return None
        return num_bytes, page_bytes, stored_bytes, num_values, checksum, page.get(3), page.get(4)
    return None
