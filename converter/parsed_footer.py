"""A Parquet file's footer, read without Arrow, so that no damaged footer can end the process.

Arrow decodes a column's metadata when it is used, and pyarrow does not catch what that code throws: a damaged codec,
type or statistic ends the interpreter ("terminate called after throwing an instance of 'parquet::ParquetException'";
pyarrow 18 to 26). Here the answer is values or a ValueError, whatever the bytes are.

A footer is Thrift in the compact protocol (parquet.thrift, `FileMetaData`). One regular expression matches a column
chunk in the layout of Arrow, parquet-java, DuckDB and Polars; other layouts are read field by field. A chunk takes
2.4 µs by the expression, 9.5 field by field, and 2.0 in pyarrow.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from converter.chunk_bounds import bound
from converter.chunk_layout import chunk_pattern, unencoded_pattern
from converter.thrift import (
    LIST,
    STRUCT,
    read_integer,
    read_list,
    read_list_head,
    read_struct,
    read_value,
    zigzag,
)

MAGIC, _ENCRYPTED_MAGIC = b"PAR1", b"PARE"
END_BYTES = 8
"""The footer's length and the magic number, which follow the footer."""

PLAIN, RLE, BIT_PACKED = 0, 3, 4
_UNCHANGED = frozenset([PLAIN, RLE, BIT_PACKED])
"""Encodings by which texts take as many bytes in a file as in memory; levels alone are shorter."""

_DELTA_LENGTHS, _DELTA_TEXTS = 6, 7

_CODECS = ("UNCOMPRESSED", "SNAPPY", "GZIP", "LZO", "BROTLI", "LZ4", "ZSTD", "LZ4_RAW")
_TYPES = ("BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
_ENCODINGS = (
    "PLAIN", "UNKNOWN", "PLAIN_DICTIONARY", "RLE", "BIT_PACKED", "DELTA_BINARY_PACKED", "DELTA_LENGTH_BYTE_ARRAY",
    "DELTA_BYTE_ARRAY", "RLE_DICTIONARY", "BYTE_STREAM_SPLIT",
)  # fmt: skip
LENGTH_BYTES = 4
"""Of the length that stands beside each text, and of a null's in memory."""

_LIST_BYTES = 4
"""Of the place where a list ends, in memory; a file has levels, of which thousands take a few bytes."""

_MAX_COUNT = 1 << 46
"""Rows, values or bytes of a file: sums of them stay below 64 bits."""


class ColumnChunk(NamedTuple):
    """A row group's part of a column of values."""

    physical_type: str
    codec: str
    """"UNKNOWN" if Parquet has none of this number."""

    encodings: frozenset[int]
    num_values: int
    raw_bytes: int
    """Before compression."""

    stored_bytes: int
    data_page_offset: int
    dictionary_page_offset: int | None
    null_count: int | None
    least: bytes | None
    """A lower bound, as Parquet stores a value of the physical type; None if it is not known."""

    most: bytes | None
    """An upper bound."""


class Formats(NamedTuple):
    """How values are stored, by Parquet's names."""

    codecs: frozenset[str]
    encodings: frozenset[str]
    """Also those of levels, which say where nulls and the ends of lists are."""


_RawChunk = re.Match[bytes] | dict[int, Any]
"""A column chunk in the usual layout, or its fields."""


class ParsedFooter:
    """The row groups of a Parquet file and their column chunks, as its footer describes them.

    Raises:
        ValueError: the bytes are no footer, or contradict themselves.
    """

    __slots__ = ("_groups", "_has_order", "is_encrypted", "leaf_types", "row_group_bytes", "row_group_rows")

    def __init__(self, data: bytes) -> None:
        try:
            metadata, groups = _read_file_metadata(data)
        except IndexError:
            raise ValueError("its footer is damaged: it ends too early") from None
        except ValueError as error:
            raise ValueError(f"its footer is damaged: {error}") from None
        schema, orders = metadata.get(2), metadata.get(7)
        if not isinstance(schema, tuple):
            raise ValueError("its footer has no schema")  # noqa: TRY004 (the bytes are wrong, not an argument)
        self.leaf_types: tuple[str, ...] = schema
        """The physical type of each column of values."""
        # Without them bounds are useless: a writer may have compared in any way (parquet.thrift, `ColumnOrder`).
        self._has_order: Sequence[bool] = [False] * len(self.leaf_types)
        if isinstance(orders, tuple) and len(orders) == len(self.leaf_types):
            self._has_order = orders
        self.is_encrypted = metadata.get(8) is not None
        """Whether columns may be encrypted, behind this plain footer."""
        self.row_group_rows = tuple(_integer(fields, 3, "rows") for fields, _ in groups)
        self.row_group_bytes = tuple(_integer(fields, 2, "bytes") for fields, _ in groups)
        # Else the last rows of a row group would be missing without a word.
        if _is_integer(metadata.get(3)) and metadata[3] != sum(self.row_group_rows):
            raise ValueError(
                f"its footer describes {metadata[3]} rows, and its row groups have {sum(self.row_group_rows)}"
            )
        for index, (_, chunks) in enumerate(groups):
            if len(chunks) != len(self.leaf_types):
                raise ValueError(
                    f"its footer describes {len(chunks)} columns of row group {index}, expected {len(self.leaf_types)}"
                )
        self._groups: list[Sequence[_RawChunk] | Mapping[int, _RawChunk]] = [chunks for _, chunks in groups]

    @property
    def num_rows(self) -> int:
        """The rows of all row groups."""
        return sum(self.row_group_rows)

    def keep(self, leaves: Iterable[int]) -> None:
        """Forget all column chunks but those of `leaves`, and the bytes of the others."""
        wanted = sorted(set(leaves))
        self._groups = [{leaf: _alone(group[leaf]) for leaf in wanted} for group in self._groups]

    def chunk(self, row_group: int, leaf: int) -> ColumnChunk:
        """A column of values in a row group.

        Raises:
            ValueError: the file has no such row group, or its footer contradicts itself.
        """
        if not 0 <= row_group < len(self._groups):
            raise ValueError(f"it has no row group {row_group}, its footer describes {len(self._groups)}")
        raw = self._groups[row_group][leaf]
        chunk = _from_match(raw) if isinstance(raw, re.Match) else _from_fields(raw, row_group, leaf)
        if chunk.physical_type != self.leaf_types[leaf]:
            raise ValueError(
                f"column {leaf} of row group {row_group} is {chunk.physical_type}, expected {self.leaf_types[leaf]}"
            )
        _check_counts(chunk.num_values, chunk.raw_bytes, chunk.stored_bytes)
        return chunk if chunk.least is None or self._has_order[leaf] else chunk._replace(least=None, most=None)

    def bounds(self, row_group: int, leaf: int, kind: pa.DataType) -> tuple[pa.Scalar, pa.Scalar] | None:
        """A lower and an upper bound of a column that Arrow reads as `kind`; None if they are not known.

        They need not be values of the column. NaNs are not counted.
        """
        chunk = self.chunk(row_group, leaf)
        least, most = (bound(raw, chunk.physical_type, kind) for raw in (chunk.least, chunk.most))
        return None if least is None or most is None else (least, most)

    def rows_of(self, row_groups: Sequence[int]) -> int:
        """The rows of some row groups. Raises ValueError if the file has no such row group."""
        rows = self.row_group_rows
        for index in row_groups:
            if not 0 <= index < len(rows):
                raise ValueError(f"it has no row group {index}, its footer describes {len(rows)}")
        return sum(rows[index] for index in row_groups)

    def counts(self, leaf: int) -> list[tuple[int, int, int | None]]:
        """For each row group a column's number of values, bytes before compression, and nulls (None if not known).

        Three values of `chunk` at a third of its cost: every column of every file is asked for them.

        Raises:
            ValueError: the footer contradicts itself.
        """
        counts = []
        for row_group, group in enumerate(self._groups):
            raw = group[leaf]
            if isinstance(raw, re.Match):
                num_values, raw_bytes, nulls, other = raw.group(4, 5, 9, 12)
                if other is None:
                    count = (zigzag(num_values), zigzag(raw_bytes), None if nulls is None else zigzag(nulls))
                    _check_counts(*count)
                    counts.append(count)
                    continue
            chunk = self.chunk(row_group, leaf)
            counts.append((chunk.num_values, chunk.raw_bytes, chunk.null_count))
        return counts

    def decoded_bytes(self, leaf: int, value_bytes: int | None) -> tuple[list[int], list[int]]:
        """For each row group the bytes that a column takes in memory, and how many texts of unknown length it has.

        `value_bytes` are those of a value; None for texts. Where lists end is not counted. Not every writer tells the
        size of texts that a dictionary or a common beginning makes shorter (Arrow from 19, Spark from 4 and delta-rs
        do, DuckDB and Polars do not; Arrow tells it without the common beginnings): these count as they are stored.

        Raises:
            ValueError: the footer contradicts itself.
        """
        counts = self.counts(leaf)
        num_unknown = [0] * len(counts)
        if value_bytes is not None:
            sizes = [max(raw_bytes, num_values * value_bytes) for num_values, raw_bytes, _ in counts]
        else:
            sizes = []
            for row_group, (num_values, raw_bytes, nulls) in enumerate(counts):
                # A null has no length in a file, and maybe nothing at all.
                sizes.append(raw_bytes + LENGTH_BYTES * (num_values if nulls is None else nulls))
                if self._encodings(row_group, leaf) <= _UNCHANGED:
                    continue
                told = self._told_bytes(row_group, leaf)
                if told is not None:
                    sizes[row_group] = max(raw_bytes, told + num_values * LENGTH_BYTES)
                if told is None or _DELTA_TEXTS in self._encodings(row_group, leaf):
                    num_unknown[row_group] = num_values - (nulls or 0)
        _check_counts(*sizes)
        return sizes, num_unknown

    def list_bytes(self, leaf: int, depth: int) -> list[int]:
        """For each row group the bytes in memory that say where a column's lists end.

        `depth` is how deep lists stand in lists; 0 if there are none. If the writer does not tell how many inner ones
        there are, each value counts as one.
        """
        return [self._num_lists(row_group, leaf, depth) * _LIST_BYTES for row_group in range(len(self._groups))]

    def _num_lists(self, row_group: int, leaf: int, depth: int) -> int:
        num_lists = self.row_group_rows[row_group] if depth else 0
        if depth > 1:
            raw = self._groups[row_group][leaf]
            fields = read_struct(raw.group(), 0)[0] if isinstance(raw, re.Match) else raw
            sizes: Any = _of_struct(_of_struct(fields, 3), 16)
            levels = sizes.get(2)
            num_values = self.chunk(row_group, leaf).num_values
            is_told = isinstance(levels, list) and len(levels) == depth + 1 and all(map(_is_integer, levels))
            if is_told and min(levels) >= 0 and levels[0] == num_lists and sum(levels) == num_values:
                # A value begins a list in all that are deeper than its level.
                num_lists += sum(sum(levels[:level]) for level in range(2, depth + 1))
            else:
                num_lists += (depth - 1) * num_values
        return num_lists

    def has_deltas(self, row_group: int, leaf: int) -> bool:
        """Whether texts are stored as what they differ in, or in length: of these Arrow makes no dictionary."""
        return not self._encodings(row_group, leaf).isdisjoint((_DELTA_LENGTHS, _DELTA_TEXTS))

    def _encodings(self, row_group: int, leaf: int) -> frozenset[int]:
        raw = self._groups[row_group][leaf]
        return _encodings(raw[2]) if isinstance(raw, re.Match) else self.chunk(row_group, leaf).encodings

    def _told_bytes(self, row_group: int, leaf: int) -> int | None:
        """The bytes of the texts of a column chunk, each as often as it stands there; None if the writer tells none."""
        raw = self._groups[row_group][leaf]
        if isinstance(raw, re.Match):
            found = unencoded_pattern().match(raw[13])
            return None if found is None else zigzag(found[1])
        sizes = raw[3].get(16)
        told = sizes.get(1) if isinstance(sizes, dict) else None
        return told if _is_integer(told) else None

    def formats(self) -> Formats:
        """How the first row group is stored; costs a tenth of its chunks."""
        chunks = [self._groups[0][leaf] for leaf in range(len(self.leaf_types))] if self._groups else []
        usual = {raw.group(2, 3) for raw in chunks if isinstance(raw, re.Match)}
        known = [(_name_in(_CODECS, codec[0] >> 1), _encodings(encodings)) for encodings, codec in usual]
        for leaf, raw in enumerate(chunks):
            if not isinstance(raw, re.Match):
                chunk = self.chunk(0, leaf)
                known.append((chunk.codec, chunk.encodings))
        encodings = frozenset().union(*(numbers for _, numbers in known))
        return Formats(
            frozenset(codec for codec, _ in known), frozenset(_name_in(_ENCODINGS, number) for number in encodings)
        )


def _alone(raw: _RawChunk) -> _RawChunk:
    """The same chunk, without the footer that a match holds."""
    return raw.re.fullmatch(raw.group()) or raw if isinstance(raw, re.Match) else raw


def _check_counts(*counts: int | None) -> None:
    for count in counts:
        if count is not None and not 0 <= count <= _MAX_COUNT:
            raise ValueError(f"its footer describes a column of {count} values or bytes")


def parse_end(end: bytes) -> ParsedFooter:
    """The footer of a file, from its bytes from the footer on.

    Raises:
        ValueError: they are not the end of a Parquet file, or the footer is damaged.
    """
    if end[-4:] == _ENCRYPTED_MAGIC:
        raise ValueError("its footer is encrypted; read it with Spark, which has the keys, and convert the DataFrame")
    if len(end) < END_BYTES or end[-4:] != MAGIC:
        raise ValueError("it does not end as a Parquet file does")
    length = int.from_bytes(end[-END_BYTES:-4], "little")
    if length != len(end) - END_BYTES:
        raise ValueError(f"its footer has {len(end) - END_BYTES} bytes, expected {length}")
    return ParsedFooter(end[:-END_BYTES])


def _read_file_metadata(data: bytes) -> tuple[dict[int, Any], list[tuple[dict[int, Any], list[_RawChunk]]]]:
    """The fields of the file's metadata except its row groups; and each row group's fields and chunks."""
    fields: dict[int, Any] = {}
    groups: list[tuple[dict[int, Any], list[_RawChunk]]] = []
    place = number = 0
    while head := data[place]:
        place += 1
        if head >> 4:
            number += head >> 4
        else:
            number, place = read_integer(data, place)
        kind = head & 0x0F
        if number == 2 and kind == LIST:
            fields[2], place = _read_again(data, place, 2, _leaf_types)
        elif number == 7 and kind == LIST:
            fields[7], place = _read_again(data, place, 7, _have_order)
        elif number == 4 and kind == LIST:
            size, element, place = read_list_head(data, place)
            if element != STRUCT and size:
                raise ValueError("its row groups are no structs")
            groups = []
            for _ in range(size):
                group, place = _read_row_group(data, place)
                groups.append(group)
        else:
            fields[number], place = read_value(data, place, kind, 0)
    return fields, groups


_last_lists: dict[int, tuple[bytes, tuple[Any, ...]]] = {}
"""The schema (2) and the orders (7) that were read last: most files of a dataset have the same bytes there."""


def _read_again(
    data: bytes, place: int, number: int, values_of: Callable[[list[Any]], tuple[Any, ...]]
) -> tuple[tuple[Any, ...], int]:
    """The values of a list, and the place behind it; not parsed again if its bytes are the last one's."""
    raw, values = _last_lists.get(number, (b"", ()))
    if raw and data.startswith(raw, place):
        return values, place + len(raw)
    elements, end = read_list(data, place, 0)
    values = values_of(elements)
    _last_lists[number] = (data[place:end], values)
    return values, end


def _read_row_group(data: bytes, place: int) -> tuple[tuple[dict[int, Any], list[_RawChunk]], int]:
    fields: dict[int, Any] = {}
    chunks: list[_RawChunk] = []
    match = chunk_pattern().match
    number = 0
    while head := data[place]:
        place += 1
        if head >> 4:
            number += head >> 4
        else:
            number, place = read_integer(data, place)
        if number == 1 and head & 0x0F == LIST:
            size, element, place = read_list_head(data, place)
            if element != STRUCT and size:
                raise ValueError("its columns are no structs")
            chunks = []
            for _ in range(size):
                matched = match(data, place)
                if matched is not None:
                    chunks.append(matched)
                    place = matched.end()
                else:
                    chunk, place = read_struct(data, place)
                    chunks.append(chunk)
        else:
            fields[number], place = read_value(data, place, head & 0x0F, 0)
    return (fields, chunks), place + 1


def _leaf_types(elements: list[Any]) -> tuple[str, ...]:
    """The physical types of a schema's elements that hold values, without the structs and lists around them."""
    if not all(isinstance(element, dict) for element in elements):
        raise ValueError("its schema has elements that are no structs")
    return tuple(_name_in(_TYPES, element.get(1)) for element in elements if not element.get(5))


def _have_order(elements: list[Any]) -> tuple[bool, ...]:
    """For each column of values whether its bounds have the order that its type defines."""
    return tuple(isinstance(element, dict) and 1 in element for element in elements)


def _integer(fields: Mapping[int, Any], number: int, unit: str) -> int:
    value = fields.get(number)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"its footer describes a row group of {value!s:.40} {unit}")
    return value


def _name_in(names: tuple[str, ...], number: Any) -> str:
    return names[number] if _is_integer(number) and 0 <= number < len(names) else "UNKNOWN"


def _from_fields(chunk: Mapping[int, Any], row_group: int, leaf: int) -> ColumnChunk:
    """A column chunk from its fields (parquet.thrift, `ColumnChunk` and `ColumnMetaData`)."""
    metadata: Any = chunk.get(3)
    fields: Mapping[int, Any] = metadata if isinstance(metadata, dict) else {}
    numbers: list[Any] = [fields.get(number) for number in (1, 4, 5, 6, 7, 9)]
    dictionary_page, encodings, statistics = fields.get(11), fields.get(2), fields.get(12)
    if not all(map(_is_integer, numbers)) or not isinstance(encodings, list):
        raise ValueError(f"its footer lacks metadata of column {leaf} of row group {row_group}")
    kind, codec, num_values, raw_bytes, stored_bytes, data_page = numbers
    bounds = _bounds_in(statistics if isinstance(statistics, dict) else {})
    return ColumnChunk(
        _name_in(_TYPES, kind), _name_in(_CODECS, codec), frozenset(filter(_is_integer, encodings)),
        num_values, raw_bytes, stored_bytes, data_page,
        dictionary_page if _is_integer(dictionary_page) else None, *bounds,
    )  # fmt: skip


def _of_struct(fields: Mapping[int, Any], number: int) -> Mapping[int, Any]:
    """A struct in a struct; an empty one if there is none."""
    found = fields.get(number)
    return found if isinstance(found, dict) else {}


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bounds_in(statistics: Mapping[int, Any]) -> tuple[int | None, bytes | None, bytes | None]:
    """The number of nulls, the lower and the upper bound; bounds of the form before Parquet 2.4 are ignored.

    Writers then compared bytes and unsigned numbers as if they were signed (PARQUET-251, PARQUET-686).
    """
    nulls: Any
    nulls, most, least = statistics.get(3), statistics.get(5), statistics.get(6)
    is_counted = _is_integer(nulls) and 0 <= nulls <= _MAX_COUNT
    if not isinstance(least, bytes) or not isinstance(most, bytes):
        least = most = None
    return (nulls if is_counted else None), least, most


def _from_match(match: re.Match[bytes]) -> ColumnChunk:
    kind, encodings, codec, num_values, raw_bytes, stored_bytes, data_page, dictionary_page = match.groups()[:8]
    nulls, most, least, other = match.groups()[8:12]
    if other is not None:
        bounds = _bounds_in(read_struct(other, 0)[0])
    else:
        # A string is its length and its bytes.
        bounds = (
            None if nulls is None else zigzag(nulls),
            None if least is None else least[1:],
            None if most is None else most[1:],
        )
    return ColumnChunk(
        _name_in(_TYPES, kind[0] >> 1), _name_in(_CODECS, codec[0] >> 1), _encodings(encodings),
        zigzag(num_values), zigzag(raw_bytes), zigzag(stored_bytes), zigzag(data_page),
        None if dictionary_page is None else zigzag(dictionary_page), *bounds,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _encodings(raw: bytes) -> frozenset[int]:
    return frozenset(read_list(raw, 0, 0)[0])
