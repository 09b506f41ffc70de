"""Parquet files that pyarrow, DuckDB and Polars write of a random table, with options that are drawn as well."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from tests.parity.other_frames import LEAVES

Options = dict[str, Any]


def _is_text(kind: pa.DataType) -> bool:
    return any(name in str(kind) for name in ("string", "binary"))


def _width(kind: pa.DataType) -> int:
    """The bits of a scalar as Parquet stores it; 0 for bits and bytes."""
    if _is_text(kind) or pa.types.is_decimal(kind) or pa.types.is_boolean(kind) or pa.types.is_float16(kind):
        return 0
    return 64 if kind.bit_width == 64 else 32


_ENCODINGS: dict[str, Callable[[pa.DataType], bool]] = {
    "PLAIN": lambda kind: True,
    "DELTA_BINARY_PACKED": lambda kind: _width(kind) in (32, 64) and not pa.types.is_floating(kind),
    # DuckDB 2.0.1 has it for no bytes of one length, which decimals and halves are.
    "BYTE_STREAM_SPLIT": lambda kind: _width(kind) in (32, 64),
    "DELTA_LENGTH_BYTE_ARRAY": _is_text,
    "DELTA_BYTE_ARRAY": _is_text,
    "RLE": pa.types.is_boolean,
}  # fmt: skip


def write_with_pyarrow(table: pa.Table, path: Path, chance: random.Random) -> Options:
    """Write a file with pyarrow, and return the options."""
    scalars = {field.name: field.type for field in table.schema
               if not pa.types.is_nested(field.type) and not pa.types.is_dictionary(field.type)}  # fmt: skip
    has_dictionary: bool | list[str] = chance.choice((True, False, False))
    encodings: dict[str, str] = {}
    if not has_dictionary and chance.random() < 0.7:
        for name, kind in scalars.items():
            fits = [encoding for encoding, takes in _ENCODINGS.items() if takes(kind)]
            encodings[name] = chance.choice(fits)
    elif has_dictionary and chance.random() < 0.5:
        has_dictionary = chance.sample(table.column_names, chance.randint(1, table.num_columns))
    # Times of 96 bits have no encoding of their own.
    is_old = chance.random() < 0.25
    options: Options = {
        "compression": chance.choice(("none", "snappy", "gzip", "brotli", "zstd", "lz4")),
        "data_page_version": chance.choice(("1.0", "2.0")),
        "use_dictionary": has_dictionary,
        "column_encoding": None if is_old else encodings or None,
        "row_group_size": chance.choice((None, None, 1, 7, 33, 64)),
        "data_page_size": chance.choice((None, None, 1, 40, 500)),
        "write_batch_size": chance.choice((None, None, 1, 8)),
        "max_rows_per_page": chance.choice((None, None, 1, 5, 50)),
        "dictionary_pagesize_limit": chance.choice((None, None, 1, 30)),
        "write_page_index": chance.random() < 0.5,
        "write_page_checksum": chance.random() < 0.5,
        "write_statistics": chance.choice((True, True, False, table.column_names[:1])),
        "store_schema": chance.random() < 0.7,
        "store_decimal_as_integer": chance.random() < 0.4,
        "use_compliant_nested_type": chance.random() < 0.8,
        "use_deprecated_int96_timestamps": is_old,
        "use_content_defined_chunking": chance.random() < 0.2,
    }
    given = {name: value for name, value in options.items() if value is not None}
    of_writer = {name: value for name, value in given.items() if name != "row_group_size"}
    with pq.ParquetWriter(path, table.schema, **of_writer) as writer:
        size = given.get("row_group_size")
        if chance.random() < 0.2:
            # A row group without rows.
            writer.write_table(table.slice(0, 0))
        writer.write_table(table, row_group_size=size)
        if chance.random() < 0.1:
            writer.write_table(table.slice(0, 0))
    return given


def write_with_duckdb(table: pa.Table, path: Path, chance: random.Random) -> Options:
    """Write a file with DuckDB, and return the options."""
    codec = chance.choice(("uncompressed", "snappy", "gzip", "zstd", "brotli", "lz4", "lz4_raw"))
    options: Options = {
        "compression": codec,
        "compression_level": chance.choice((1, 3)) if codec == "zstd" and chance.random() < 0.5 else None,
        "parquet_version": chance.choice(("v1", "v2")),
        "row_group_size": chance.choice((None, None, 1, 7, 64)),
        "dictionary_size_limit": chance.choice((None, None, 1, 3)),
        "string_dictionary_page_size_limit": chance.choice((None, None, 16)),
        "dictionary_compression_ratio_threshold": chance.choice((None, 0, 100)),
        "data_page_size_limit": chance.choice((None, None, 64)),
        "bloom_filter_false_positive_ratio": chance.choice((None, 0.5)),
        "write_bloom_filter": chance.choice((None, True, False)),
        "write_page_index": chance.choice((None, True, False)),
        "field_ids": chance.choice((None, "auto")),
        "write_timestamp_as_int96": chance.choice((None, None, None, True)),
    }
    given = {name: value for name, value in options.items() if value is not None}
    text = "".join(f", {name} {value!r}" for name, value in given.items())
    for index, field in enumerate(table.schema):
        if pa.types.is_fixed_size_list(field.type) and table[index].null_count:
            # DuckDB 2.0.1 writes a null ARRAY as several values, which is no Parquet: see test_other_writers.py.
            table = table.set_column(index, field.name, table[index].cast(pa.list_(field.type.value_type)))
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("rows", table)
        connection.execute(f"COPY (SELECT * FROM rows) TO '{path}' (FORMAT parquet{text})")
    return given


def write_with_polars(table: pa.Table, path: Path, chance: random.Random) -> Options:
    """Write a file with Polars, and return the options."""
    options: Options = {
        "compression": chance.choice(("uncompressed", "snappy", "gzip", "brotli", "zstd", "lz4")),
        "statistics": chance.choice((True, False, "full", {"min": True, "max": False, "null_count": True})),
        "row_group_size": chance.choice((None, None, 1, 7, 64)),
        "data_page_size": chance.choice((None, None, 1, 100)),
    }
    frame = pl.DataFrame(table)
    casts = []
    for name, kind in frame.schema.items():
        if kind == pl.String and chance.random() < 0.3:
            texts = frame[name].drop_nulls().unique(maintain_order=True)
            casts.append(pl.col(name).cast(chance.choice((pl.Categorical(), pl.Enum(texts)))))
    frame = frame.with_columns(casts)
    is_sunk = chance.random() < 0.2
    if is_sunk:
        frame.lazy().sink_parquet(path, **options)
    else:
        frame.write_parquet(path, **options)
    return options | {"casts": [str(cast) for cast in casts], "is_sunk": is_sunk}


WRITERS: dict[str, tuple[Callable[[pa.Table, Path, random.Random], Options], list[str]]] = {
    # pyarrow 26 ends the process when it slices a string view.
    "pyarrow": (write_with_pyarrow, [name for name in LEAVES if name != "string view"]),
    "DuckDB": (write_with_duckdb, [name for name in LEAVES if name not in ("decimal 76", "duration", "float16")]),
    "Polars": (write_with_polars, [name for name in LEAVES if name != "decimal 76"]),
}
"""For each writer how it writes a table, and the scalar types that it has."""
