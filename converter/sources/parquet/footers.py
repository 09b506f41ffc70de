"""What each file says of itself, read at once."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from converter.errors import SourceError
from converter.parsed_footer import END_BYTES, ParsedFooter, parse_end
from converter.places import count_leaves, refuse_encrypted
from converter.portable.footers import end_of
from converter.storage.at_once import at_once
from converter.storage.directory import Storage

_FOOTER_THREADS = 8
_SPARK_SCHEMA, SPARK_TYPE = b"org.apache.spark.sql.parquet.row.metadata", b"converter.spark_type"
_UNEVEN = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """What a file says of itself."""

    name: str
    num_bytes: int
    schema: pa.Schema
    row_group_rows: npt.NDArray[np.int64]
    row_group_bytes: npt.NDArray[np.int64]
    leaf_nulls: npt.NDArray[np.int64]
    """For each column of values how many of them are null; -1 where that is not said."""

    leaf_bytes: npt.NDArray[np.int64]
    list_lengths: dict[int, set[tuple[int, int]]]
    """For each column of values of lists how many of them a row has, and how many are left over, by row group."""

    footer_crc32: int
    stamp: int | None
    """`Storage.look`."""

    digest: str

    @property
    def num_rows(self) -> int:
        """The rows of all row groups."""
        return int(self.row_group_rows.sum())


def look_at(storage: Storage, names: Sequence[str]) -> list[Footer]:
    """The footers of files, in order, read at once."""
    last: list[_Kind] = []
    given_up = threading.Event()
    return at_once(
        functools.partial(_read_footer, storage, last, given_up),
        names,
        threads_count=_FOOTER_THREADS,
        given_up=given_up,
    )


class _Kind(NamedTuple):
    """What files have in common, as most do: told once, and kept once."""

    stored: pq.ParquetSchema
    noted: Mapping[bytes, bytes]
    schema: pa.Schema
    levels: list[tuple[bool, bool]]
    """For each column of values whether it may be null, and whether it is of lists."""


def _kind_of(parquet: pq.ParquetFile, last: list[_Kind]) -> _Kind:
    metadata = parquet.metadata
    stored, noted = metadata.schema, metadata.metadata or {}
    for known in last[-1:]:
        if known.stored.equals(stored) and known.noted == noted:
            return known
    # Without what pandas or Spark noted beside the columns, but with the types that only Spark has.
    types = _spark_types(noted)
    columns = [stored.column(leaf) for leaf in range(metadata.num_columns)]
    schema = pa.schema(
        [
            one.with_nullable(True)
            if one.name not in types
            else pa.field(one.name, one.type, metadata=(one.metadata or {}) | {SPARK_TYPE: types[one.name].encode()})
            for one in _with_text(parquet.schema_arrow, columns)
        ]
    )
    levels = [(column.max_definition_level > 0, column.max_repetition_level > 0) for column in columns]
    last[:] = [_Kind(stored, noted, schema, levels)]
    return last[0]


def _with_text(schema: pa.Schema, columns: Sequence[pq.ColumnSchema]) -> Iterator[pa.Field]:
    """The columns of a file, those of ENUM as the text that they are; to Arrow they are bytes."""
    leaves = iter(columns)

    def with_text(one: pa.Field) -> pa.Field:
        if pa.types.is_struct(one.type):
            return one.with_type(pa.struct([with_text(one.type.field(index)) for index in range(one.type.num_fields)]))
        first, *_ = [next(leaves, None) for _ in range(count_leaves(one.type))]
        is_enum = first is not None and first.logical_type.type == "ENUM" and is_bytes_type(one.type)
        return one.with_type(pa.string()) if is_enum else one

    yield from map(with_text, schema)


def _read_footer(storage: Storage, last: list[_Kind], given_up: threading.Event, name: str) -> Footer:
    path = f"{storage.url}/{name}"
    try:
        # Before: what is written meanwhile has another one.
        num_bytes, stamp = storage.look(name, given_up)
        with storage.open_parquet(name, num_bytes, given_up) as opened:
            num_bytes = opened.size()
            end = end_of(opened)
            footer = parse_end(end)
            refuse_encrypted(path, footer)
            parquet = pq.ParquetFile(opened, coerce_int96_timestamp_unit="us")
            # It names every page's place, size and range: other rows give another one.
            digest = hashlib.sha256(end[:-END_BYTES]).hexdigest()
            kind = _kind_of(parquet, last)
            noted = {
                "name": name, "num_bytes": num_bytes, "footer_crc32": zlib.crc32(end), "stamp": stamp, "digest": digest
            }  # fmt: skip
            return _footer_of(footer, kind, **noted)
    except FileNotFoundError as error:
        raise SourceError(f"{path} is not there.", path=path) from error
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {str(error).rstrip()}.", path=path) from error
    except (pa.ArrowException, ValueError) as error:
        said = str(error).rstrip(". \n")
        raise SourceError(f"{path} is no Parquet file that can be read: {said}.", path=path) from error


def _footer_of(footer: ParsedFooter, kind: _Kind, **said: Any) -> Footer:
    num_leaves = len(footer.leaf_types)
    if num_leaves != len(kind.levels):
        raise ValueError(f"its footer describes {num_leaves} columns, and its schema has {len(kind.levels)}")
    nulls = np.zeros(num_leaves, np.int64)
    sizes = np.zeros(num_leaves, np.int64)
    lengths: dict[int, set[tuple[int, int]]] = {}
    for leaf, (is_nullable, is_list) in enumerate(kind.levels):
        counts = footer.counts(leaf)
        sizes[leaf] = sum([raw_bytes for _, raw_bytes, _ in counts])
        if not is_nullable:
            continue
        total, is_known = 0, True
        for num_rows, (num_values, _, absent) in zip(footer.row_group_rows, counts, strict=True):
            is_known = is_known and absent is not None
            total += absent or 0
            if is_list and num_rows:
                # A list that is null or empty counts as a number, and so may row groups of nothing else.
                length = divmod(num_values, num_rows)
                if absent or (absent is None and length == (1, 0)):
                    length = _UNEVEN
                if absent != num_rows:
                    lengths.setdefault(leaf, set()).add(length)
        # Of lists it counts those within them as well.
        nulls[leaf] = total if is_known and not (is_list and total) else -1
    return Footer(
        schema=kind.schema,
        row_group_rows=np.array(footer.row_group_rows, np.int64),
        row_group_bytes=np.array(footer.row_group_bytes, np.int64),
        leaf_nulls=nulls,
        leaf_bytes=sizes,
        list_lengths=lengths,
        **said,
    )


def _spark_types(metadata: Mapping[bytes, bytes]) -> dict[str, str]:
    """The columns that Spark wrote of types which Parquet does not have: what is there is not what they mean."""
    try:
        fields = json.loads(metadata[_SPARK_SCHEMA])["fields"]
        types = {str(one["name"]): one["type"] for one in fields}
    except (KeyError, ValueError, TypeError):
        return {}
    found = {name: kind if isinstance(kind, str) else str(kind.get("class", "")) for name, kind in types.items()}
    return {
        name: kind
        for name, kind in found.items()
        if kind.startswith(("variant", "interval", "geometry", "geography", "org.apache.spark.", "time("))
    }


def is_bytes_type(kind: pa.DataType) -> bool:
    """Whether a type's values are bytes."""
    variable = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    return bool(variable or pa.types.is_fixed_size_binary(kind))
