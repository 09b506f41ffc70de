"""Parquet files with one thing wrong each, as they are known from the regressions of Parquet's readers.

    python -m tests.faults.bad_parquet

A random edit seldom meets these: an index behind the dictionary's end, an unknown codec, encoding or type, a negative
or an overflowing size, levels that begin no row, a schema without end. Each file has one column in one row group. Its
pages and its footer are taken apart, one thing is edited, and they are put together again with the offsets that fit.

A case ends with the rows of the file that was edited, or with an error of this package in at most three lines that
names the file. Anything else is printed as a violation. The case is printed before it runs, so that a parent knows
which one ended the process.
"""

from __future__ import annotations

import contextlib
import decimal
import os
import resource
import struct
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from converter import ConverterError, UnsupportedTypeError, make_parquet_converter
from tests.faults.footer_fuzz import _no_longer_than

_MAX_MEMORY_BYTES = 12 << 30
_MAX_SECONDS = 30
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _STRUCT = 1, 2, 3, 7, 8, 9, 12
_I32, _I64 = 5, 6

Fields = dict[int, list[Any]]
"""A struct of Thrift: for each field its type and its value."""


def decode(data: bytes, place: int, kind: int = _STRUCT) -> tuple[Any, int]:
    """A value of Thrift's compact protocol, and the place behind it."""
    if kind in (_TRUE, _FALSE):
        return None, place
    if kind == _BYTE:
        return data[place], place + 1
    if kind == _DOUBLE:
        return data[place : place + 8], place + 8
    if kind == _STRUCT:
        fields: Fields = {}
        number = 0
        while data[place]:
            step, inner = data[place] >> 4, data[place] & 15
            assert step, "no struct of Parquet's has so many fields between two"
            number, place = number + step, place + 1
            value, place = decode(data, place, inner)
            fields[number] = [inner, value]
        return fields, place + 1
    if kind == _LIST:
        size, inner, place = data[place] >> 4, data[place] & 15, place + 1
        if size == 15:
            size, place = _varint(data, place)
        values = []
        for _ in range(size):
            # A boolean in a list is a byte of its own.
            value, place = decode(data, place, _BYTE if inner in (_TRUE, _FALSE) else inner)
            values.append(value)
        return [inner, values], place
    number, place = _varint(data, place)
    if kind == _BINARY:
        return data[place : place + number], place + number
    return (number >> 1) ^ -(number & 1), place


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte, place = data[place], place + 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, place


def _as_varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _as_varint(value >> 7)


def encode(value: Any, kind: int = _STRUCT) -> bytes:
    """The bytes of what `decode` gave."""
    if kind in (_TRUE, _FALSE):
        return b""
    if kind == _BYTE:
        return bytes([value])
    if kind == _DOUBLE:
        return bytes(value)
    if kind == _STRUCT:
        found, last = b"", 0
        for number, (inner, each) in sorted(value.items()):
            found += bytes([(number - last) << 4 | inner]) + encode(each, inner)
            last = number
        return found + b"\0"
    if kind == _LIST:
        inner, values = value
        head = bytes([min(len(values), 15) << 4 | inner]) + (_as_varint(len(values)) if len(values) > 14 else b"")
        return head + b"".join(encode(each, _BYTE if inner in (_TRUE, _FALSE) else inner) for each in values)
    if kind == _BINARY:
        return _as_varint(len(value)) + value
    return _as_varint((value << 1 ^ value >> 63) & (2**64 - 1))


@dataclass
class Whole:
    """A Parquet file of one column, taken apart."""

    footer: Fields
    pages: list[tuple[Fields, bytes]]
    """Each page's header and its bytes."""

    @property
    def chunk(self) -> Fields:
        """`ColumnMetaData` of the only column."""
        return self.footer[4][1][1][0][1][1][1][0][3][1]

    @property
    def row_group(self) -> Fields:
        return self.footer[4][1][1][0]

    @property
    def schema(self) -> list[Fields]:
        """`SchemaElement` of the root and of what is below it."""
        return self.footer[2][1][1]

    def join(self, moved: dict[int, int]) -> bytes:
        """The bytes of the file; `moved` are fields of the column chunk that are not as they should be."""
        body, starts = b"PAR1", []
        for header, page in self.pages:
            starts.append(len(body))
            body += encode(header) + page
        has_dictionary = self.pages[0][0][1][1] == 2
        self.chunk[9][1] = starts[1 if has_dictionary else 0]
        if has_dictionary:
            self.chunk[11][1] = starts[0]
        self.chunk[7][1] = len(body) - 4
        for field, value in moved.items():
            self.chunk[field] = [_I64, value]
        footer = encode(self.footer)
        return body + footer + struct.pack("<i", len(footer)) + b"PAR1"


def take_apart(data: bytes) -> Whole:
    """The pages and the footer of a file of one column."""
    size = int.from_bytes(data[-8:-4], "little")
    footer, _ = decode(data, len(data) - 8 - size)
    whole = Whole(footer, [])
    place = whole.chunk[11][1] if 11 in whole.chunk else whole.chunk[9][1]
    end = place + whole.chunk[7][1]
    while place < end:
        header, place = decode(data, place)
        whole.pages.append((header, data[place : place + header[3][1]]))
        place += header[3][1]
    return whole


def _columns() -> dict[str, tuple[pa.Array, dict[str, Any]]]:
    numbers = [None if row % 7 == 3 else row * 1000 for row in range(50)]
    few = [None if row % 7 == 3 else row % 3 for row in range(50)]
    texts = [None if row % 7 == 3 else "x" * (row % 5) for row in range(50)]
    plain = {"use_dictionary": False, "compression": "none"}

    def encoded(name: str) -> dict[str, Any]:
        return plain | {"column_encoding": {"x": name}}

    return {
        "plain": (pa.array(numbers), plain),
        "no nulls": (pa.array(range(50)), plain),
        "snappy": (pa.array(numbers), plain | {"compression": "snappy"}),
        "zstd": (pa.array(texts), plain | {"compression": "zstd"}),
        "dictionary": (pa.array(few), {"compression": "none"}),
        "dictionary of texts": (pa.array(texts), {"compression": "none"}),
        "texts": (pa.array(texts), plain),
        "lists": (pa.array([[row, row + 1] for row in range(50)], pa.list_(pa.int32())), plain),
        "floats": (pa.array(np.arange(50.0)), encoded("BYTE_STREAM_SPLIT")),
        "deltas": (pa.array(numbers), encoded("DELTA_BINARY_PACKED")),
        "lengths": (pa.array(texts), encoded("DELTA_LENGTH_BYTE_ARRAY")),
        "prefixes": (pa.array(texts), encoded("DELTA_BYTE_ARRAY")),
        "flags": (pa.array([row % 3 == 0 for row in range(50)]), encoded("RLE")),
        "decimals": (pa.array([decimal.Decimal(row) for row in range(50)], pa.decimal128(20, 2)), plain),
        "second pages": (pa.array(numbers), plain | {"data_page_version": "2.0"}),
        "second pages of lists": (
            pa.array([[row] * (row % 4) for row in range(50)], pa.list_(pa.int64())),
            plain | {"data_page_version": "2.0"},
        ),
    }  # fmt: skip


Edit = Callable[[Whole], dict[int, int] | None]
"""Edits a file, and returns fields of its column chunk that are to stay wrong."""


def _set(part: Callable[[Whole], Fields], field: int, value: Any, kind: int | None = None) -> Edit:
    def edit(whole: Whole) -> None:
        fields = part(whole)
        fields[field] = [kind or fields.get(field, [_I32])[0], value]

    return edit


def _chunk(whole: Whole) -> Fields:
    return whole.chunk


def _row_group(whole: Whole) -> Fields:
    return whole.row_group


def _leaf(whole: Whole) -> Fields:
    return whole.schema[-1]


def _header(whole: Whole) -> Fields:
    return whole.pages[-1][0]


def _data_page(whole: Whole) -> Fields:
    """The data page's own part of its header, of either version."""
    fields: Fields = _header(whole)[5 if 5 in _header(whole) else 8][1]
    return fields


def _bytes(change: Callable[[bytes], bytes], page: int = -1) -> Edit:
    """Other bytes in a page, whose sizes fit."""

    def edit(whole: Whole) -> None:
        header, data = whole.pages[page]
        changed = change(data)
        for field in (2, 3):
            header[field][1] += len(changed) - len(data)
        whole.pages[page] = (header, changed)

    return edit


def _cut_dictionary(num_values: int, num_bytes: int) -> Edit:
    """A dictionary of fewer values than the indices name."""

    def edit(whole: Whole) -> None:
        whole.pages[0][0][7][1][1][1] = num_values
        _bytes(lambda data: data[:num_bytes], 0)(whole)

    return edit


def _nested(depth: int) -> Edit:
    """As many groups in one another above the column."""

    def edit(whole: Whole) -> None:
        group: Fields = {3: [_I32, 1], 4: [_BINARY, b"g"], 5: [_I32, 1]}
        whole.schema[1:1] = [group] * depth
        whole.chunk[3][1][1][:0] = [b"g"] * depth

    return edit


def _levels(change: bytes, start: int = 4) -> Edit:
    """Other bytes at the beginning of a page's levels."""
    return _bytes(lambda data: data[:start] + change + data[start + len(change) :])


_HUGE, _MOST = 2**62, 2**31 - 1


def _cases() -> dict[str, tuple[tuple[str, ...], Edit]]:
    """For each thing that is wrong the columns that are edited, and the edit."""
    numbers = ("plain", "no nulls", "snappy")
    every, second = tuple(_columns()), ("second pages", "second pages of lists")
    first = ("plain", "dictionary", "texts", "lists", "deltas", "second pages", "second pages of lists", "zstd")
    cases: dict[str, tuple[tuple[str, ...], Edit]] = {
        "codec LZO": (every, _set(_chunk, 4, 3)),
        "unknown codec": (every, _set(_chunk, 4, 99)),
        "codec of another": (every, _set(_chunk, 4, 2)),
        "negative codec": (numbers, _set(_chunk, 4, -1)),
        "old LZ4 of what is plain": (every, _set(_chunk, 4, 5)),
        "unknown physical type": (numbers, _set(_leaf, 1, 77)),
        "other physical type in the chunk": (every, _set(_chunk, 1, 4)),
        "96 bits": (("plain", "no nulls"), _set(_leaf, 1, 3)),
        "unknown repetition": (numbers, _set(_leaf, 3, 9)),
        "repeated": (("plain", "no nulls", "texts"), _set(_leaf, 3, 2)),
        "required": (("plain", "texts", "dictionary", "second pages"), _set(_leaf, 3, 0)),
        "unknown converted type": (("plain", "texts"), _set(_leaf, 6, 99, _I32)),
        "unknown logical type": (("plain",), _set(_leaf, 10, {13: [_STRUCT, {}]}, _STRUCT)),
        "logical type of another": (("plain", "deltas"), _set(_leaf, 10, {1: [_STRUCT, {}]}, _STRUCT)),
        "bytes of no length": (("decimals",), _set(_leaf, 2, 0)),
        "bytes of negative length": (("decimals",), _set(_leaf, 2, -9)),
        "bytes of huge length": (("decimals",), _set(_leaf, 2, _MOST)),
        "no precision": (("decimals",), _set(_leaf, 8, 0)),
        "negative scale": (("decimals",), _set(_leaf, 7, -3)),
        "scale beyond the precision": (("decimals",), _set(_leaf, 7, 30)),
        "more children than there are": (first, _set(lambda whole: whole.schema[0], 5, 1000)),
        "huge count of children": (first, _set(lambda whole: whole.schema[0], 5, _MOST)),
        "negative count of children": (first, _set(lambda whole: whole.schema[0], 5, -1)),
        "a leaf with children": (first, _set(_leaf, 5, 3, _I32)),
        "dictionary at the end": (("dictionary", "dictionary of texts"), lambda whole: {11: _HUGE}),
        "dictionary before the file": (("dictionary", "dictionary of texts"), lambda whole: {11: -5}),
        "dictionary behind the data": (
            ("dictionary", "dictionary of texts"), lambda whole: {11: whole.chunk[9][1] + 9}),
        "dictionary at the first byte": (("dictionary", "dictionary of texts"), lambda whole: {11: 0}),
        "dictionary where is none": (("plain", "texts"), lambda whole: {11: 4}),
        "index behind the dictionary": (("dictionary",), _cut_dictionary(1, 8)),
        "index behind the dictionary of texts": (("dictionary of texts",), _cut_dictionary(1, 4)),
        "empty dictionary": (("dictionary", "dictionary of texts"), _cut_dictionary(0, 0)),
        "dictionary of more values than bytes": (("dictionary", "dictionary of texts"), _cut_dictionary(_MOST, 16)),
        "negative dictionary": (("dictionary", "dictionary of texts"), _cut_dictionary(-1, 16)),
        "two dictionaries": (("dictionary",), lambda whole: whole.pages.insert(0, whole.pages[0])),
        "a length of a text beyond its page": (("texts",), _bytes(lambda data: data[:-4] + b"\xff\xff\xff\x7f")),
        "a negative length of a text": (("texts",), _bytes(lambda data: data[:-4] + b"\xff\xff\xff\xff")),
        "cut page": (every, _bytes(lambda data: data[: len(data) // 2])),
        "empty page": (every, _bytes(lambda data: b"")),
        "eight bytes too many": (
            ("plain", "no nulls", "texts", "lists", "floats"), _bytes(lambda data: data + bytes(8))),
        "zeros": (every, _bytes(lambda data: bytes(len(data)))),
        "ones": (every, _bytes(lambda data: b"\xff" * len(data))),
        "levels of a huge size": (first, _levels(b"\xff\xff\xff\x7f", 0)),
        "levels of a negative size": (first, _levels(b"\xff\xff\xff\xff", 0)),
        "levels of a run without end": (first, _levels(b"\xff\xff\xff\xff\x0f")),
        "levels beyond the greatest": (("plain", "texts", "lists"), _levels(b"\x64\x07")),
        "a list that begins in no row": (("lists",), _levels(b"\x64\x01")),
        "deltas in blocks of nothing": (("deltas", "lengths", "prefixes"), _bytes(
            lambda data: data[:4] + data[4 : 4 + data[0]] + b"\x00\x00" + data[6 + data[0] :])),
        "widths of 255 bits": (("deltas", "lengths", "prefixes"), _bytes(
            lambda data: data[: 4 + data[0]] + data[4 + data[0] :].replace(b"\x00", b"\xff"))),
        "pages that come twice": (every, lambda whole: whole.pages.append(whole.pages[-1])),
        "no pages": (("plain", "texts", "second pages"), lambda whole: whole.pages.append(
            (whole.pages.pop()[0] | {1: [_I32, 1]}, b""))),
        "unknown kind of page": (every, _set(_header, 1, 42)),
        "a page of an index": (every, _set(_header, 1, 1)),
        "other physical order of sizes": (every, lambda whole: {7: 1}),
        "negative size of the chunk": (every, lambda whole: {7: -1}),
        "huge size of the chunk": (every, lambda whole: {7: _HUGE}),
        "data before the file": (every, lambda whole: {9: -4}),
        "data behind the file": (every, lambda whole: {9: _HUGE}),
        "data in the footer": (every, lambda whole: {9: whole.chunk[7][1] + 12}),
    }  # fmt: skip
    for number in (-1, 0, 1, 49, 51, _MOST):
        cases[f"{number} values in a page"] = (every, _set(_data_page, 1, number))
        cases[f"{number} rows in a row group"] = (every, _set(_row_group, 3, number))
        cases[f"{number} values in a chunk"] = (every, _set(_chunk, 5, number))
    for number in (-1, 0, 3, _MOST):
        cases[f"a page of {number} bytes"] = (every, _set(_header, 2, number))
        cases[f"a stored page of {number} bytes"] = (every, _set(_header, 3, number))
        for field, name in ((5, "definition levels"), (6, "repetition levels")):
            cases[f"{name} of {number} bytes"] = (
                second,
                _set(_data_page, field, number),
            )
        cases[f"{number} nulls in a page"] = (second, _set(_data_page, 2, number))
        cases[f"{number} rows in a page"] = (second, _set(_data_page, 3, number))
    # Not 9: any bytes are numbers of BYTE_STREAM_SPLIT, and any are levels of BIT_PACKED.
    for number in (-1, 1, 3, 4, 5, 6, 7, 8, 10, 99):
        kinds = ("plain", "texts", "dictionary", "lists", "floats", "flags", "decimals")
        cases[f"encoding {number}"] = (kinds, _set(_data_page, 2, number))
    for number in (0, 99):
        cases[f"definition levels in encoding {number}"] = (("plain", "texts", "lists"), _set(_data_page, 3, number))
        cases[f"repetition levels in encoding {number}"] = (("lists",), _set(_data_page, 4, number))
    for depth in (30, 300, 3000):
        cases[f"{depth} groups deep"] = (("plain", "texts"), _nested(depth))
    return cases


def _rows(path: Path) -> list[Any]:
    """What a converter reads of the only column, whatever its name is."""
    with make_parquet_converter(path, float_dtype=None) as converter:
        (name,) = converter.columns
        shapes = {} if converter.schema[name].shape == () or converter.schema[name].is_object else {name: None}
    with (
        make_parquet_converter(path, float_dtype=None, shapes=shapes) as converter,
        converter.make_batch_reader(batch_size=7, nulls="mask", ragged="nested", workers_count=1) as reader,
    ):
        rows = []
        for batch in reader:
            valid = batch.get(f"{name}__valid", np.ones(len(batch[name]), bool))
            cells = (cell.tolist() if isinstance(cell, np.ndarray) else cell for cell in batch[name].tolist())
            rows += [cell if there else None for cell, there in zip(cells, valid, strict=True)]
        return rows


def run_cases() -> list[str]:
    """What is neither the right rows nor a named error."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    violations, num_refused = [], 0
    with tempfile.TemporaryDirectory() as top:
        bases, right = {}, {}
        for name, (column, options) in _columns().items():
            path = Path(top, "base.parquet")
            pq.write_table(pa.table({"x": column}), path, **options)
            bases[name], right[name] = path.read_bytes(), _rows(path)
            assert take_apart(bases[name]).join({}) == bases[name], name
        for case, (columns, edit) in _cases().items():
            for name in columns:
                os.write(1, f"case {case}, {name}\n".encode())
                whole = take_apart(bases[name])
                moved = edit(whole)
                path = Path(top, "edited.parquet")
                path.write_bytes(whole.join(moved or {}))
                try:
                    with _no_longer_than(_MAX_SECONDS):
                        rows = _rows(path)
                except UnsupportedTypeError:
                    # A type that has no tensor form, which is not the file's fault.
                    num_refused += 1
                except ConverterError as error:
                    num_refused += 1
                    if path.name not in str(error) or len(str(error).splitlines()) > 3:
                        violations.append(f"{case}, {name}: the error is {error!r:.600}")
                except BaseException as error:  # noqa: BLE001 (all others are violations)
                    violations.append(f"{case}, {name}: {error!r:.600}")
                else:
                    if rows != right[name]:
                        violations.append(f"{case}, {name}: reads {rows!r:.200} instead of {right[name]!r:.100}")
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
    print(f"refused {num_refused}")
    return violations


if __name__ == "__main__":
    for violation in run_cases():
        print(violation)
    sys.exit(0)
