"""Numbers, also of lists of one length, straight from a file's pages without Arrow; checksums find flipped bits.

Our writer stores a column of numbers without nulls as one plain, uncompressed page per row group: a view of the mapped
file, where decoding takes 205 of 720 ms for a million rows of 2 kB. Other writers' pages are mostly plain as well, only
compressed. In lists Arrow decodes two levels for each number; here the bytes of the levels prove that all rows have the
declared length: embeddings in Spark's files take 0.55 CPU seconds a million rows instead of 1.7.

That every value is present is proven by its definition level. The page's size alone does not tell: fastparquet puts
eight bytes behind the values, as many as a null leaves out.

Columns that are not proven plain, from a page's own header and levels, are decoded by Arrow.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from converter.parsed_footer import BIT_PACKED, PLAIN, RLE, ColumnChunk
from converter.places import Place, is_bytes_type, is_list
from converter.portable.tensors import DTYPE_METADATA
from converter.reading.gather import Array
from converter.schema import Field
from converter.thrift import read_struct, read_varint, zigzag

_PHYSICAL = {
    np.dtype("int32"): "INT32",
    np.dtype("int64"): "INT64",
    np.dtype("float32"): "FLOAT",
    np.dtype("float64"): "DOUBLE",
}
_FILE_DTYPES = {pa.int8(): "int32", pa.int16(): "int32", pa.int32(): "int32", pa.int64(): "int64",
                pa.float32(): "float32", pa.float64(): "float64", pa.date32(): "int32"}  # fmt: skip
"""The dtype of a type's numbers in a page. Parquet has no integers of fewer than 32 bits."""

_PLAIN = {PLAIN, RLE, BIT_PACKED}
"""Encodings of chunks whose values are plain: the latter two encode levels."""

_CODECS = {"UNCOMPRESSED": None, "SNAPPY": "snappy", "ZSTD": "zstd"}
_DATA_PAGE = 0

_HEADER_BYTES = 64
_MAX_HEADER_BYTES = 1 << 14
"""Headers may hold the least and the largest value, which may be long."""

_SIZE_BYTES = 4
_MAX_LEVEL_BYTES = 8
"""More than the levels of a value can take, so that a damaged header cannot ask for all memory."""

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
    """A column whose values are used as they lie in those of its pages that are plain."""

    leaf: int
    file_dtype: np.dtype[Any]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    row_values: int
    """Values that the file counts for a row: a list's numbers; one for a tensor in fixed bytes."""

    value_bytes: int
    """What a value takes in a page."""

    has_lengths: bool
    """Whether each value begins with its length: bytes of any length, which are used if all have the declared one."""

    max_definition_level: int
    """That of a value that is present; 0 if none can be null, and then there are no such levels."""

    has_repetitions: bool
    regular: dict[tuple[bytes, int], bool] = dataclasses.field(default_factory=dict, compare=False)
    """Whether repetition levels are regular, by their bytes: those of most pages are the same."""

    @property
    def is_narrowed(self) -> bool:
        """Whether the values are copies of those in the pages, of another type."""
        return self.file_dtype != self.dtype

    def find_chunk(self, chunk: ColumnChunk, num_rows: int) -> Chunk | None:
        """Where a row group's values lie; None if the footer shows that they are not plain.

        `pages` finds in the pages what the footer cannot tell.
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

    def pages(self, buffer: pa.Buffer, chunk: Chunk, *, verify_checksums: bool = False) -> Iterator[Array | None]:
        """A chunk's values, page by page, in order; None, and no more, if Arrow must decode them.

        There is a page at least. Uncompressed pages are views of the buffer, which holds the whole file; narrowed ones
        are copies.

        Raises:
            pyarrow.ArrowException, OSError, ValueError: a page is damaged.
        """
        start, end, left, codec = chunk
        decompress = None if codec is None else pa.Codec(codec).decompress
        while left:
            # A file that ends before its chunk has no header there.
            header = None if end > buffer.size else _read_page_header(buffer, start, end)
            if header is None:
                yield None
                return
            num_bytes, page_bytes, stored_bytes, num_values, checksum, *encodings = header
            levels = page_bytes - num_values * self.value_bytes
            start += num_bytes
            if start + stored_bytes > end or num_values > left or not 0 <= levels <= num_values * _MAX_LEVEL_BYTES + 8:
                yield None
                return
            page = buffer.slice(start, stored_bytes)
            if verify_checksums and checksum is not None and zlib.crc32(page) != checksum & 0xFFFFFFFF:
                raise ValueError("a page's checksum is not that of its bytes")
            if decompress is not None:
                page = decompress(page, page_bytes)
            rows = None
            if page.size == page_bytes and self._has_all(page, levels, num_values, *encodings):
                rows = self._rows_of(page, levels, num_values)
            # Only the caller keeps the page: its memory serves the next one.
            del page
            yield rows
            if rows is None:
                return
            del rows
            start += stored_bytes
            left -= num_values

    def _rows_of(self, page: pa.Buffer, levels: int, num_values: int) -> Array | None:
        if self.has_lengths:
            return self._bytes_of_one_length(page, levels, num_values)
        rows = np.frombuffer(page, self.file_dtype, offset=levels)
        if self.is_narrowed:
            # As Arrow narrows: a number beyond float32 becomes infinite.
            with np.errstate(over="ignore"):
                rows = rows.astype(self.dtype)
        return rows.reshape(-1, *self.shape) if self.shape else rows

    def _bytes_of_one_length(self, page: pa.Buffer, offset: int, num_values: int) -> Array | None:
        """The rows of a page of bytes, each behind its length; None unless all have the declared length."""
        lengths = np.ndarray(num_values, "<i4", page, offset, self.value_bytes)
        if (lengths != self.value_bytes - _SIZE_BYTES).any():
            return None
        inner = np.empty(self.shape, self.dtype).strides
        strides = (self.value_bytes, *inner)
        rows: Array = np.ndarray((num_values, *self.shape), self.dtype, page, offset + _SIZE_BYTES, strides)
        return rows

    def _has_all(
        self, page: pa.Buffer, levels: int, num_values: int, definition_encoding: Any, repetition_encoding: Any
    ) -> bool:
        """Whether every row is present and whole, and the levels end exactly where that many values begin."""
        offset = 0
        if self.has_repetitions:
            if repetition_encoding != RLE or num_values % self.row_values:
                return False
            offset = _end_of_levels(page, 0)
            if offset > levels:
                return False
            levels_read = (page.slice(_SIZE_BYTES, offset - _SIZE_BYTES).to_pybytes(), num_values)
            is_regular = self.regular.get(levels_read)
            if is_regular is None:
                if len(self.regular) == _KEPT_LEVELS:
                    self.regular.clear()
                is_regular = self.regular[levels_read] = _is_regular(levels_read[0], self.row_values, num_values)
            if not is_regular:
                return False
        if self.max_definition_level:
            if definition_encoding != RLE or offset + _SIZE_BYTES > levels:
                return False
            start, offset = offset + _SIZE_BYTES, _end_of_levels(page, offset)
            if offset != levels:
                return False
            definitions = page.slice(start, offset - start).to_pybytes()
            return _are_all(definitions, self.max_definition_level, num_values)
        return offset == levels


def find_plain_column(metadata: pq.FileMetaData, place: Place, field: Field) -> PlainColumn | None:
    """The column, if its values may be used as they lie in the file; None if Arrow must decode them in any case."""
    leaf, stored = place.leaf, place.field
    column = metadata.schema.column(leaf)
    shape: tuple[int, ...] | None = field.shape
    # A member of a struct is null where the struct is.
    if shape is None or field.is_object or field.dtype == "bool" or place.members:
        return None
    if (stored.metadata or {}).get(DTYPE_METADATA.encode(), field.dtype.encode()) != field.dtype.encode():
        # Other numbers than the field's: `decode` raises the error.
        return None
    dtype, row_numbers = field.stored_dtype, math.prod(shape)
    row_bytes = row_numbers * dtype.itemsize
    common = {"leaf": leaf, "dtype": dtype, "shape": shape, "max_definition_level": column.max_definition_level}
    if pa.types.is_fixed_size_binary(stored.type):
        if not shape or stored.type.byte_width != row_bytes or column.max_definition_level > 1:
            return None
        return PlainColumn(
            file_dtype=dtype, row_values=1, value_bytes=row_bytes, has_lengths=False, has_repetitions=False, **common
        )
    if is_bytes_type(stored.type):
        has_shapes = DTYPE_METADATA.encode() in (stored.metadata or {})
        if not row_bytes or has_shapes or column.physical_type != "BYTE_ARRAY" or column.max_definition_level > 1:
            return None
        value_bytes = _SIZE_BYTES + row_bytes
        return PlainColumn(
            file_dtype=dtype, row_values=1, value_bytes=value_bytes, has_lengths=True, has_repetitions=False, **common
        )
    has_lists = is_list(stored.type)
    numbers = stored.type.value_type if has_lists else stored.type
    file_dtype = _file_dtype(field, numbers)
    if file_dtype is None or column.physical_type != _PHYSICAL[file_dtype]:
        return None
    if has_lists != bool(shape) or column.max_repetition_level != has_lists or not row_numbers:
        return None
    if not has_lists and column.max_definition_level > 1:
        return None
    return PlainColumn(
        file_dtype=file_dtype,
        row_values=row_numbers,
        value_bytes=file_dtype.itemsize,
        has_lengths=False,
        has_repetitions=has_lists,
        **common,
    )


def _file_dtype(field: Field, stored: pa.DataType) -> np.dtype[Any] | None:
    """The dtype of the numbers in a page if they are the field's own, or doubles that it narrows; else None."""
    if field.dtype == "datetime64[us]":
        return np.dtype("int64") if pa.types.is_timestamp(stored) and stored.unit == "us" else None
    is_narrowed = field.dtype == "float32" and stored == pa.float64()
    is_days = field.dtype == "datetime64[D]" and stored == pa.date32()
    if stored not in _FILE_DTYPES or not (is_narrowed or is_days or stored == pa.from_numpy_dtype(field.dtype)):
        return None
    return np.dtype(_FILE_DTYPES[stored])


def _end_of_levels(page: pa.Buffer, offset: int) -> int:
    """Where the levels that begin at `offset` with their own size end."""
    return offset + _SIZE_BYTES + int.from_bytes(page.slice(offset, _SIZE_BYTES).to_pybytes(), "little")


def _are_all(levels: bytes, level: int, num_values: int) -> bool:
    """Whether that many levels are all `level`, the greatest of its column.

    Most writers repeat it in one run; Arrow and others may write groups of eight first.
    """
    width, offset, left = level.bit_length(), 0, num_values
    while left:
        try:
            header, offset = read_varint(levels, offset)
        except (IndexError, ValueError):
            return False
        count = header >> 1
        if header & 1:
            packed = np.frombuffer(levels[offset : offset + count * width], np.uint8)
            # The last group of eight may be longer than the values.
            count, offset = min(8 * count, left), offset + count * width
            bits = np.unpackbits(packed, bitorder="little")[: count * width]
            if len(bits) != count * width or (bits.reshape(count, width) @ (1 << np.arange(width)) != level).any():
                return False
        else:
            if count > left or levels[offset : offset + 1] != bytes([level]):
                return False
            offset += 1
        if not count:
            return False
        left -= count
    return offset == len(levels)


def _is_regular(levels: bytes, row_values: int, num_values: int) -> bool:
    """Whether repetition levels begin a row every `row_values` values and nowhere else.

    Levels are runs: a bit that is repeated, or groups of eight bits (parquet.thrift, RLE with a bit width of 1).
    All writers repeat the same bytes for equal rows. So runs are decoded up to the first run that ends with a row,
    and the rest must repeat those bytes.
    """
    period = _decode_runs(levels, 0, row_values, num_values, only_first=True)
    if period is None:
        return False
    period_bytes, period_values = period
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
    """Decode runs from `start`, where a row begins; how many bytes and values they have.

    Stops after the last value, or with `only_first` at the first run that ends with a row. None if a row begins in
    the wrong place, or no end is found soon.
    """
    offset, done = start, 0
    for _ in range(_MAX_PERIOD_RUNS):
        try:
            header, offset = read_varint(levels, offset)
        except IndexError:
            return None
        count = header >> 1
        if header & 1:
            bits = np.unpackbits(np.frombuffer(levels[offset : offset + count], np.uint8), bitorder="little")
            # The last group of eight may be longer than the values.
            bits, offset = bits[: num_values - done], offset + count
            starts, count = np.flatnonzero(bits == 0) + done, len(bits)
            wanted = np.arange(-(-done // row_values) * row_values, done + count, row_values)
            if not np.array_equal(starts, wanted):
                return None
        else:
            if offset >= len(levels) or levels[offset] > 1 or done + count > num_values:
                return None
            value, offset = levels[offset], offset + 1
            begun = -(-(done + count) // row_values) - -(-done // row_values)
            if begun != (0 if value else count):
                return None
        if not count:
            return None
        done += count
        if done == num_values or (only_first and done % row_values == 0):
            return offset - start, done
    return None


def _header_pattern() -> re.Pattern[bytes]:
    """A plain page's header of up to `_HEADER_BYTES`, as all writers lay it out: 2 µs, where Thrift's parts take 9."""
    number, name = rb"[\x80-\xff]{0,4}[\x00-\x7f]", rb"(?:\x04.{4}|\x08.{8}|\x00|\x01.)"
    statistics = rb"(?:[\x18\x28\x38\x48\x58\x68]%b|[\x16\x26\x36]%b|[\x11\x12\x21\x22])*\x00" % (name, number)
    page = rb"\x15(%b)\x15\x00\x15(%b)\x15(%b)(?:\x1c%b)?\x00" % (number, number, number, statistics)
    # With a checksum the page is the field behind it.
    checksum = rb"(?:\x15(%b)(\x1c)|\x2c)" % number
    return re.compile(rb"\x15\x00\x15(%b)\x15(%b)%b%b\x00" % (number, number, checksum, page), re.DOTALL)


_HEADER = _header_pattern().match
_count = functools.lru_cache(maxsize=1024)(zigzag)
"""Numbers that most pages of a file have in common."""


def _read_page_header(
    buffer: pa.Buffer, start: int, end: int
) -> tuple[int, int, int, int, int | None, Any, Any] | None:
    """The header of a plain data page of version 1; None for any other page, and for a damaged header.

    Its own bytes; the page's bytes, uncompressed and in the file; its values; its checksum, if any; the encodings of
    its definition and repetition levels.
    """
    head = buffer.slice(start, min(_HEADER_BYTES, end - start)).to_pybytes()
    match = _HEADER(head)
    if match is not None:
        page_bytes, stored_bytes, num_values = map(_count, match.group(1, 2, 5))
        checksum, definitions, repetitions = match.group(3, 6, 7)
        if min(page_bytes, stored_bytes, num_values) <= 0:
            return None
        checksum = None if checksum is None else zigzag(checksum)
        return match.end(), page_bytes, stored_bytes, num_values, checksum, _count(definitions), _count(repetitions)
    for most in (_HEADER_BYTES, _MAX_HEADER_BYTES):
        try:
            header, num_bytes = read_struct(buffer.slice(start, min(most, end - start)).to_pybytes(), 0)
        except (IndexError, ValueError):
            continue
        page = header.get(5)
        if header.get(1) != _DATA_PAGE or not isinstance(page, dict) or page.get(2) != PLAIN:
            return None
        page_bytes, stored_bytes, num_values = header.get(2, 0), header.get(3, 0), page.get(1, 0)
        for number in (page_bytes, stored_bytes, num_values):
            if not isinstance(number, int) or number <= 0:
                return None
        checksum = header.get(4)
        if not (checksum is None or isinstance(checksum, int)):
            return None
        return num_bytes, page_bytes, stored_bytes, num_values, checksum, page.get(3), page.get(4)
    return None
