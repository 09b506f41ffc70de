"""What a writer notes of its Parquet file: column sizes and ranges from the footer, and the bytes that identify it."""

from __future__ import annotations

import os
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from converter.portable.records import OpenFile

HEAD_BYTES = 20
"""A page's header begins with its kind, its sizes and its checksum: at most 2, 12 and 6 bytes (parquet.thrift)."""


def end_of(file: Any) -> bytes:
    """A Parquet file's bytes from its footer on, which differ between files: they have each page's place and size."""
    file.seek(0, os.SEEK_END)
    num_bytes = file.tell()
    file.seek(max(num_bytes - 8, 0))
    length = int.from_bytes(file.read(4), "little")
    file.seek(max(num_bytes - 8 - length, 0))
    return bytes(file.read())


def open_footer(data: bytes | pa.Buffer, **options: Any) -> pq.ParquetFile:
    """The metadata and the schema of a Parquet file, of which `data` holds at least the bytes from its footer on.

    Raises:
        pyarrow.ArrowException: the footer is damaged. Arrow itself may raise OSError then, as a store that fails does.
    """
    try:
        return pq.ParquetFile(pa.BufferReader(data), **options)
    except OSError as error:
        raise pa.ArrowInvalid(str(error)) from error


def head_of(data_page_offset: int, stored_bytes: int) -> tuple[int, int]:
    """Where a column chunk that we wrote begins, and how many bytes of it hold its first page's sizes and checksum."""
    return data_page_offset, min(HEAD_BYTES, stored_bytes)


def heads_of(file: OpenFile) -> bytes | None:
    """The CRC-32 of each chunk's head, four bytes each, row group by row group; None if they were not collected."""
    beginnings = file["beginnings"]
    if beginnings is None:
        return None
    footer, checksums = file["footers"][0], []
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for chunk in map(group.column, range(footer.num_columns)):
            start, num_bytes = head_of(chunk.data_page_offset, chunk.total_compressed_size)
            head = beginnings.get(start, b"")
            # A short header, and the page behind it, were written one after the other.
            while 0 < len(head) < num_bytes and (more := beginnings.get(start + len(head))):
                head += more
            if len(head) < num_bytes:
                return None
            checksums.append(zlib.crc32(head[:num_bytes]))
    return np.array(checksums, "<u4").tobytes()


def column_of(leaf: pq.ColumnSchema) -> str:
    """The column that values belong to: those of lists lie below it, two names for each level."""
    name: str = leaf.path
    for _ in range(leaf.max_repetition_level):
        name = name.rpartition(".list.")[0]
    return name


def sum_footer(footer: pq.FileMetaData) -> tuple[dict[str, list[float]], dict[str, int]]:
    """The spans and the uncompressed bytes of a file's columns, over all row groups.

    A span is the sum of the row groups' ranges, and the least and the largest value. Only columns of single numbers
    have one.
    """
    spans: dict[str, list[float]] = {}
    column_bytes: dict[str, int] = {}
    groups = [footer.row_group(group) for group in range(footer.num_row_groups)]
    for index in range(footer.num_columns):
        column = footer.schema.column(index)
        name = column_of(column)
        chunks = [group.column(index) for group in groups]
        # Dates and times stay the integers that are stored: Python's own end with the year 9999.
        is_temporal = column.logical_type.type in ("DATE", "TIME", "TIMESTAMP")
        column_bytes[name] = sum(chunk.total_uncompressed_size for chunk in chunks)
        if column.max_repetition_level:
            continue
        for chunk in chunks:
            statistics = chunk.statistics
            if statistics is None or not statistics.has_min_max:
                continue
            bounds = (statistics.min_raw, statistics.max_raw) if is_temporal else (statistics.min, statistics.max)
            if isinstance(bounds[0], (str, bytes)):
                continue
            add_span(spans, name, *map(float, bounds))
    return spans, column_bytes


def add_span(spans: dict[str, list[float]], name: str, least: float, most: float) -> None:
    """Add a row group's range to those of a column."""
    if np.isfinite(most - least):
        before = spans.get(name, [0.0, least, most])
        spans[name] = [before[0] + most - least, min(before[1], least), max(before[2], most)]
