"""The footers of Parquet files, read at once: schema, row groups, nulls and lengths of lists."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from converter.errors import SourceError
from converter.parsed_footer import END_BYTES, Formats, ParsedFooter, parse_end
from converter.places import (
    count_leaves,
    is_bytes_type,
    is_list,
    leaf_types,
    list_of,
    refuse_encrypted,
    value_bytes_of,
)
from converter.portable.footers import end_of, open_footer
from converter.sources.parquet.texts import UnknownTexts, lengths_in, more_bytes, unknown_texts
from converter.storage.at_once import LinkedEvent, at_once
from converter.storage.directory import Storage

_FOOTER_THREADS = 8
INT96 = b"converter.int96"
"""Marks times of which a file does not say whether they have a zone."""

_SPARK_SCHEMA, SPARK_TYPE = b"org.apache.spark.sql.parquet.row.metadata", b"converter.spark_type"
_UNEVEN = (0, 0)
_REMEDY = "Restore the file from a copy, or name the other files instead."


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """What the footer of a file says."""

    name: str
    num_bytes: int
    schema: pa.Schema
    row_group_rows: npt.NDArray[np.int64]
    row_group_bytes: npt.NDArray[np.int64]
    """What each row group takes in memory, all columns."""

    leaf_nulls: npt.NDArray[np.int64]
    """For each leaf column how many values are null; -1 if unknown."""

    leaf_bytes: npt.NDArray[np.int64]
    """What each leaf column takes in memory: a dictionary or a run may store it in a tenth of that."""

    unknown_texts: dict[int, UnknownTexts]
    """Leaf columns of texts whose size the writer did not tell."""

    list_lengths: dict[int, set[tuple[int, int]]]
    """For each leaf column of lists, values divided by rows in each row group: quotient and remainder."""

    formats: Formats
    """Of its first row group."""

    footer_crc32: int
    stamp: int | None
    """`Storage.look`."""

    digest: str

    @property
    def num_rows(self) -> int:
        """The rows of all row groups."""
        return int(self.row_group_rows.sum())


def formats_of(footers: Iterable[Footer]) -> Formats | None:
    """The formats of all these files together; None if there are none."""
    formats = {footer.formats for footer in footers}
    if not formats:
        return None
    codecs, encodings = zip(*formats, strict=True)
    return Formats(frozenset().union(*codecs), frozenset().union(*encodings))


def look_at(
    storage: Storage, names: Sequence[str], *, remedy: str = _REMEDY, given_up: threading.Event | None = None
) -> list[Footer]:
    """Read the footers of files, several at a time; they come in the order of `names`.

    Requests end once `given_up` is set.

    Raises:
        GivenUpError: `given_up` was set while a store was waited for.
        SourceError: a file is gone, or damaged, and then the message ends with `remedy`; or it cannot be reached.
    """
    last: list[_Kind] = []
    # An error must not end the caller's other requests.
    own = LinkedEvent(given_up)
    footers = at_once(
        functools.partial(_read_footer, storage, last, own, remedy), names, threads_count=_FOOTER_THREADS, given_up=own
    )
    return _with_lengths(storage, footers, own, remedy)


def _with_lengths(storage: Storage, footers: list[Footer], given_up: threading.Event, remedy: str) -> list[Footer]:
    """The footers with the sizes of texts that their writer did not tell, by the first such file of each schema."""
    known: list[tuple[pa.Schema, dict[int, int]]] = []
    found = []
    for footer in footers:
        if footer.unknown_texts:
            schema = footer.schema
            lengths = next((lengths for other, lengths in known if other is schema or other.equals(schema)), None)
            if lengths is None:
                with _named_errors(f"{storage.url}/{footer.name}", remedy):
                    lengths = lengths_in(storage, footer.name, footer.num_bytes, footer.unknown_texts, given_up)
                known.append((schema, lengths))
            found.append(_longer(footer, lengths))
        else:
            found.append(footer)
    return found


def _longer(footer: Footer, lengths: Mapping[int, int]) -> Footer:
    """A footer with texts of these lengths, by leaf column, where their size is unknown."""
    more = more_bytes(footer.unknown_texts, lengths)
    leaf_bytes = footer.leaf_bytes.copy()
    for leaf, num_bytes in more.items():
        leaf_bytes[leaf] += num_bytes.sum()
    return replace(footer, row_group_bytes=footer.row_group_bytes + sum(more.values()), leaf_bytes=leaf_bytes)


@contextlib.contextmanager
def _named_errors(path: str, remedy: str) -> Iterator[None]:
    """Name the file in errors, and say what to do."""
    try:
        yield
    except FileNotFoundError as error:
        raise SourceError(f"{path} is not there. {remedy}", path=path) from error
    except OSError as error:
        cause = str(error).rstrip(". ")
        advice = "Check that it is a file that you may read, and that its store is up."
        raise SourceError(f"{path} cannot be read: {cause}. {advice}", path=path) from error
    except (pa.ArrowException, ValueError) as error:
        cause = str(error).rstrip(". \n")
        raise SourceError(f"{path} is no Parquet file that can be read: {cause}. {remedy}", path=path) from error


class _Kind(NamedTuple):
    """What most files have in common: derived once and shared."""

    stored: pq.ParquetSchema
    metadata: Mapping[bytes, bytes]
    schema: pa.Schema
    levels: list[tuple[bool, int]]
    """For each leaf column whether it may be null, and how deep lists stand in lists (0: no lists)."""

    value_bytes: list[int | None]
    """For each leaf column the bytes of a value in memory; None for texts."""


def _kind_of(parquet: pq.ParquetFile, last: list[_Kind]) -> _Kind:
    """The kind of a file; `last` is that of the file before, which most share."""
    stored, metadata = parquet.metadata.schema, parquet.metadata.metadata or {}
    for kind in last:
        if kind.stored.equals(stored) and kind.metadata == metadata:
            return kind
    # Without the metadata of pandas and Spark, but with the types that only Spark has.
    types = _spark_types(metadata)
    columns = [stored.column(leaf) for leaf in range(parquet.metadata.num_columns)]
    parts = [
        part.with_nullable(True)
        if part.name not in types
        else pa.field(part.name, part.type, metadata=(part.metadata or {}) | {SPARK_TYPE: types[part.name].encode()})
        for part in _with_text(parquet.schema_arrow, columns)
    ]
    levels = [(column.max_definition_level > 0, column.max_repetition_level) for column in columns]
    value_bytes = [value_bytes_of(kind) for part in parquet.schema_arrow for kind in leaf_types(part.type)]
    last[:] = [_Kind(stored, metadata, pa.schema(parts), levels, value_bytes)]
    return last[0]


def _with_text(schema: pa.Schema, columns: Sequence[pq.ColumnSchema]) -> Iterator[pa.Field]:
    """The columns of a file, with ENUM as text and INT96 as a point in time, as Spark has them.

    Arrow reads bytes, and times without a zone.
    """
    leaves = iter(columns)

    def with_text(part: pa.Field) -> pa.Field:
        kind = part.type
        if pa.types.is_struct(kind):
            members = [with_text(kind.field(index)) for index in range(kind.num_fields)]
            return part.with_type(pa.struct(members))
        if is_list(kind):
            return part.with_type(list_of(kind, with_text(kind.value_field)))
        if pa.types.is_map(kind):
            return part.with_type(pa.map_(with_text(kind.key_field), with_text(kind.item_field)))
        # Names that are no UTF-8 raise here, where the file is known, and nowhere later.
        _ = getattr(kind, "tz", None), getattr(kind, "extension_name", None)
        first, *_ = [next(leaves, None) for _ in range(count_leaves(part.type))]
        if first is not None and first.physical_type == "INT96" and pa.types.is_timestamp(kind):
            return part.with_type(pa.timestamp(kind.unit, "UTC")).with_metadata({**(part.metadata or {}), INT96: b""})
        is_enum = first is not None and first.logical_type.type == "ENUM" and is_bytes_type(part.type)
        return part.with_type(pa.string()) if is_enum else part

    yield from map(with_text, schema)


def _read_footer(storage: Storage, last: list[_Kind], given_up: threading.Event, remedy: str, name: str) -> Footer:
    path = f"{storage.url}/{name}"
    with _named_errors(path, remedy):
        # Before the file is opened, so that a later write gives another stamp.
        num_bytes, stamp = storage.look(name, given_up)
        with storage.open_parquet(name, num_bytes, given_up) as opened:
            num_bytes = opened.size()
            end = end_of(opened)
            footer = parse_end(end)
            refuse_encrypted(path, footer)
            parquet = open_footer(end, coerce_int96_timestamp_unit="us")
            # The footer has every page's place, size and range, so other rows give another digest.
            digest = hashlib.sha256(end[:-END_BYTES]).hexdigest()
            kind = _kind_of(parquet, last)
            nulls, lengths = _sum_leaves(footer, kind)
            sizes = [footer.decoded_bytes(leaf, each) for leaf, each in enumerate(kind.value_bytes)]
            ends = [footer.list_bytes(leaf, depth) for leaf, (_, depth) in enumerate(kind.levels)]
            shape = len(sizes), len(footer.row_group_rows)
            values = np.array([size for size, _ in sizes], np.int64).reshape(shape)
            in_memory = values + np.array(ends, np.int64).reshape(shape)
            return Footer(
                name=name,
                num_bytes=num_bytes,
                schema=kind.schema,
                row_group_rows=np.array(footer.row_group_rows, np.int64),
                row_group_bytes=in_memory.sum(axis=0),
                leaf_nulls=nulls,
                leaf_bytes=in_memory.sum(axis=1),
                unknown_texts=unknown_texts(footer, kind.stored, [numbers for _, numbers in sizes], values),
                list_lengths=lengths,
                formats=footer.formats(),
                footer_crc32=zlib.crc32(end),
                stamp=stamp,
                digest=digest,
            )


def _sum_leaves(footer: ParsedFooter, kind: _Kind) -> tuple[npt.NDArray[np.int64], dict[int, set[tuple[int, int]]]]:
    """Nulls and list lengths of each leaf column, as `Footer` keeps them."""
    num_leaves = len(footer.leaf_types)
    if not num_leaves == len(kind.levels) == len(kind.value_bytes):
        raise ValueError(f"its footer describes {num_leaves} columns, and its schema has {len(kind.levels)}")
    nulls = np.zeros(num_leaves, np.int64)
    lengths: dict[int, set[tuple[int, int]]] = {}
    for leaf, (is_nullable, depth) in enumerate(kind.levels):
        if not is_nullable:
            continue
        counts = footer.counts(leaf)
        total, is_counted = 0, True
        for num_rows, (num_values, _, absent) in zip(footer.row_group_rows, counts, strict=True):
            is_counted = is_counted and absent is not None
            total += absent or 0
            if depth and num_rows:
                # A null or empty list counts as one value; a row group may hold only such lists.
                length = divmod(num_values, num_rows)
                if absent or (absent is None and length == (1, 0)):
                    length = _UNEVEN
                if absent != num_rows:
                    lengths.setdefault(leaf, set()).add(length)
        # For lists the count includes null elements.
        nulls[leaf] = total if is_counted and not (depth and total) else -1
    return nulls, lengths


def _spark_types(metadata: Mapping[bytes, bytes]) -> dict[str, str]:
    """Columns of Spark types that Parquet does not have, whose stored values do not mean what they are."""
    try:
        fields = json.loads(metadata[_SPARK_SCHEMA])["fields"]
        types = {str(part["name"]): part["type"] for part in fields}
    except (KeyError, ValueError, TypeError):
        return {}
    # Of a user's type Spark writes a class.
    classes = {name: str(kind.get("class") if isinstance(kind, dict) else kind) for name, kind in types.items()}
    return {
        name: kind
        for name, kind in classes.items()
        if kind.startswith(("variant", "interval", "geometry", "geography", "org.apache.spark.", "time("))
    }
