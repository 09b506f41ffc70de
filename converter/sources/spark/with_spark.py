"""Writes the cache with Spark's own Parquet writer, which has its own credentials and stores.

Used when the executors cannot reach the store themselves, or have no pyarrow.
Executors that have Python pack arrays to BINARY, which is read four times as fast as the
lists that they stay otherwise, and text of categories to codes. The same job observes
what executors would report: lengths, and a digest of all rows; or the tasks' own reports.
The layout is read from the footers, never assumed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from converter.errors import CacheError
from converter.portable.packing import REPORT_COLUMN, make_pack_batches
from converter.portable.tensors import header_bytes, stored_dtype
from converter.sources.spark.schema import SparkColumn
from converter.sources.spark.written_files import reports_of_files, with_packs
from converter.storage.directory import Storage

if TYPE_CHECKING:
    from converter.portable.records import PackReport

_SPARK_TYPES = {
    "bool": "boolean",
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "float32": "float",
    "float64": "double",
    "datetime64[D]": "date",
    "datetime64[us]": "timestamp_ntz",
    "str": "string",
    "bytes": "binary",
}
_CODECS = {"auto": "zstd", "none": "uncompressed", "lz4": "lz4_raw", "zstd": "zstd", "snappy": "snappy"}

# Times as microseconds in every version (INT96 overflows for readers outside 1677 to 2262); dates of any year as they
# are (Spark 3.5 refuses those before 1582); one form of lists; no V-Order, which re-sorts: the order is promised.
WRITE_CONFS = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.writeLegacyFormat": "false",
    "spark.sql.parquet.vorder.enabled": "false",
    "spark.sql.parquet.vorder.default": "false",
}


def write_with_spark(
    selected: Any, columns: Sequence[SparkColumn], spec: Mapping[str, Any], *, directory: Storage, packed: bool
) -> list[tuple[int, dict[str, Any]]]:
    """Write `selected` (columns `c0`, `c1`, …) as Parquet into `directory`; return reports as executors would."""
    from pyspark.sql import Observation, functions

    named = [(f"c{index}", column) for index, column in enumerate(columns)]
    for column in columns:
        # A matrix is a struct of several arrays: only Python makes one row of numbers of it.
        if column.kind == "matrix" and not packed:
            return [(0, {"finding": {"kind": "matrix", "column": column.name}})]
        if column.decoder is not None and not packed:
            found = "Spark's own writer is used without Python, as over Connect before 4.1 beside nested arrays"
            return [(0, {"finding": {"kind": "no_library", "column": column.name, "found": found}})]
    observations = [Observation()]
    skipping = [column["name"] for column in spec["columns"] if column["skips_errors"]]
    lists: list[tuple[str, SparkColumn]] = []
    if packed:
        lists = [(name, column) for name, column in named if column.kind == "tensor" and column.ndim > 1]
        if skipping:
            observations.append(Observation())
            selected = selected.observe(observations[-1], functions.count(functions.lit(1)).alias("rows_before"))
        nested = [metric for name, column in lists for metric in _level_metrics(functions, column, name)]
        if nested:
            observations.append(Observation())
            selected = selected.observe(observations[-1], *nested)
        types = [(name, _packed_type(column)) for name, column in named]
        schema = ", ".join(f"{name} {kind}" for name, kind in [*types, (REPORT_COLUMN, "string")])
        stored = selected.mapInArrow(make_pack_batches(spec["columns"]), schema)
    else:
        stored = selected.select(*(_plain(functions, column, name) for name, column in named))
    # The place is a column until the write, because Spark 3.5 refuses to observe an expression that is not
    # deterministic.
    stored = stored.withColumn("place", functions.monotonically_increasing_id())
    metrics = [functions.count(functions.lit(1)).alias("rows_after")]
    if packed:
        # As one text: Spark 3.5 gives Python an array that was observed as an object of Java.
        metrics.append(functions.array_join(functions.collect_set(REPORT_COLUMN), ",").alias("reports"))
    else:
        metrics += _row_metrics(functions, named)
    for name, column in named:
        if column.kind == "lists":
            metrics += _list_metrics(functions, column, name)
        elif column.kind != "scalar":
            is_bytes = packed or column.kind == "bytes"
            metrics += (_byte_metrics if is_bytes else _level_metrics)(functions, column, name)
            metrics += _extreme_places(functions, column, name, packed=packed)
    options = {
        "compression": _CODECS[spec["compression"]],
        "parquet.block.size": str(spec["row_group_bytes"]),
        "parquet.enable.dictionary": "false",
        "parquet.compression.codec.zstd.level": "1",
        "parquet.vorder.enabled": "false",
        # A session may ask for `_metadata`, which nobody here would read or delete.
        "parquet.summary.metadata.level": "NONE",
        # Files of other names would not be known for ours.
        "mapreduce.output.basename": "part",
    }
    if not packed:
        # Reading looks up a dictionary's values once, instead of each row's: 1.7 times as fast for the whole batch.
        options |= {f"parquet.enable.dictionary#{column.name}": "true" for column in columns if column.categories}
    observed_rows = stored.observe(observations[0], *metrics).select(*(name for name, _ in named))
    renamed = observed_rows.toDF(*(column.name for column in columns))
    # The folder belongs to this attempt alone; "append" because it may exist already.
    renamed.write.options(**options).mode("append").parquet(directory.spark_url)
    observed = {name: value for observation in observations for name, value in observation.get.items()}
    reports_text = observed.get("reports") or ""
    packs: list[PackReport] = sorted(json.loads(f"[{reports_text}]"), key=lambda pack: pack["partition"])
    if (
        "rows_after" not in observed
        or not all(f"{name}_least_0" in observed for name, _ in lists)
        or (packed and sum(pack["rows"] for pack in packs) != observed["rows_after"])
    ):
        raise CacheError(
            f"Spark {selected.sparkSession.version} wrote {directory.url} but did not return its observations, so "
            "shapes are not known. Pass writer='executors'.",
            path=directory.url,
        )
    summary = _summary(named, observed)
    if "finding" in summary:
        return [(0, summary)]
    reports = reports_of_files(directory, summary)
    num_found = sum(sum(report["rows"]) for _, report in reports)
    if num_found != observed["rows_after"]:
        raise CacheError(
            f"Spark wrote {observed['rows_after']:,} rows into {directory.url}, but its files have {num_found:,}: some "
            "were removed, or added, meanwhile. Convert again.",
            path=directory.url,
        )
    if packed:
        reports = with_packs(reports, packs, columns, directory)
    # Spark Connect before 4.1 answers only one of two observations: then nobody knows how many there were.
    num_skipped = observed.get("rows_before", observed["rows_after"]) - observed["rows_after"]
    return [*reports, (0, {"left_out": {"columns": skipping, "rows": num_skipped}})] if num_skipped else reports


def _summary(named: Sequence[tuple[str, SparkColumn]], observed: Mapping[str, Any]) -> dict[str, Any]:
    """What was observed of all rows as parts of a report, or as a finding."""
    shapes, extreme_rows, lengths, null_elements = {}, {}, {}, {}
    for name, column in named:
        if column.kind == "scalar":
            continue
        if column.kind == "lists":
            if observed[f"{name}_null_list"]:
                return {"finding": {"kind": "null_element", "column": column.name}}
            if observed[f"{name}_most"] is not None:
                lengths[column.name] = [observed[f"{name}_least"], observed[f"{name}_most"]]
            null_elements[column.name] = observed[f"{name}_null_element"] or 0
            continue
        for kind in ("null_element", "jagged"):
            if observed.get(f"{name}_{kind}"):
                return {"finding": {"kind": kind, "column": column.name}}
        shape = _observed_shape(column, name, observed)
        if shape == "unknown":
            continue
        if column.shape is not None:
            declared = list(column.shape)
            fits = isinstance(shape, list) and int(np.prod(shape)) == _row_size(column)
            if not fits or (column.kind == "tensor" and column.ndim > 1 and shape != declared):
                return {"finding": _wrong_shape(column, name, observed)}
            shape = declared
        shapes[column.name] = shape
        extreme_rows[column.name] = [observed[f"{name}_{bound}_place"] for bound in ("least", "most")]
        if _has_no_numbers(column, name, observed):
            lengths[column.name] = [0, 0]
    return {
        "nulls": {column.name: observed.get(f"{name}_nulls") or 0 for name, column in named},
        "shapes": shapes,
        "extreme_rows": extreme_rows,
        "lengths": lengths,
        "null_elements": null_elements,
        "digests": [f"{observed.get('digest') or 0:x}"],
        "seen": {
            column.name: json.loads(observed[f"{name}_values"])
            for name, column in named
            if f"{name}_values" in observed
        },
    }


def _plain(functions: Any, column: SparkColumn, name: str) -> Any:
    """The column with its element type, a tensor as a list: what Spark can do without Python."""
    value = functions.col(name)
    if column.kind == "vector":
        from pyspark.ml.functions import vector_to_array

        # vector_to_array refuses null.
        return functions.when(value.isNotNull(), vector_to_array(value, column.dtype)).alias(name)
    if column.kind == "bytes":
        ndim = len(column.shape or ())
        header = np.zeros(header_bytes(ndim) // 4, "<i4")
        header[: ndim if len(header) else 0] = (column.shape or ())[: len(header)]
        # The header that `portable.tensors.as_binary` writes.
        return functions.concat(functions.lit(bytearray(header.tobytes())), value).alias(name) if len(header) else value
    if column.dtype == "datetime64[us]":
        # A cast to a time without zone would shift by the session's zone; the instant itself is stored.
        return value.alias(name)
    return value.cast(_spark_type(column)).alias(name)


def _spark_type(column: SparkColumn) -> str:
    """The column's type in SQL: its elements' in as many arrays as it has dimensions."""
    return f"{'array<' * column.ndim}{_SPARK_TYPES[column.dtype]}{'>' * column.ndim}"


def _packed_type(column: SparkColumn) -> str:
    """The type of a packed column in SQL."""
    if column.kind == "scalar":
        return _spark_type(column) if column.categories is None else "int"
    return _spark_type(column) if column.kind == "lists" else "binary"


def _row_metrics(functions: Any, named: Sequence[tuple[str, SparkColumn]]) -> list[Any]:
    """What tasks report themselves if they have Python: a digest of all rows, nulls, and the values of categories.

    A row's hash includes its place, so the order of rows counts too.
    """
    digest = functions.xxhash64("place", *_told_apart(functions, named), *(name for name, _ in named))
    metrics = [functions.bit_xor(digest).alias("digest")]
    for name, column in named:
        metrics.append(functions.sum(functions.col(name).isNull().cast("long")).alias(f"{name}_nulls"))
        if column.categories is not None and column.kind == "scalar":
            is_date = column.categories["kind"] == "datetime64[D]"
            values = functions.collect_set(functions.unix_date(name) if is_date else functions.col(name))
            # As one text, as the reports above: neither Spark 3.5 nor Connect before 4.1 gives Python an array.
            metrics.append(functions.to_json(values).alias(f"{name}_values"))
    return metrics


def _told_apart(functions: Any, named: Sequence[tuple[str, SparkColumn]]) -> list[Any]:
    """What a hash of the values ignores: which are null, and where inner lists end."""
    hashed = []
    for name, column in named:
        level = functions.col(name)
        hashed.append(level.isNull())
        if column.kind not in ("scalar", "bytes"):
            hashed.append(functions.size(level))
            for _ in range(column.ndim - 1):
                hashed.append(functions.transform(level, functions.size))
                level = functions.flatten(level)
        if column.kind == "lists":
            hashed.append(functions.transform(level, lambda element: element.isNull()))
    return hashed


def _list_metrics(functions: Any, column: SparkColumn, name: str) -> list[Any]:
    """Fewest and most elements of a row of lists that stay lists, null elements, and inner lists that are null."""
    level = functions.col(name)
    is_present, has_null_list = level.isNotNull(), functions.lit(False)
    for _ in range(column.ndim - 1):
        has_null = functions.exists(level, lambda element: element.isNull())
        has_null_list = has_null_list | functions.coalesce(has_null, functions.lit(False))
        level = functions.flatten(level)
    size = functions.when(is_present, functions.size(level))
    null_elements = functions.size(functions.filter(level, lambda element: element.isNull()))
    return [
        functions.min(size).cast("long").alias(f"{name}_least"),
        functions.max(size).cast("long").alias(f"{name}_most"),
        functions.sum(functions.when(is_present, null_elements).cast("long")).alias(f"{name}_null_element"),
        functions.sum(has_null_list.cast("long")).alias(f"{name}_null_list"),
    ]


def _has_header(column: SparkColumn) -> bool:
    """Whether only a packed row itself says its shape: of a matrix, and of a decoder without one."""
    return column.kind == "matrix" or (column.kind == "decoded" and column.shape is None and column.ndim > 1)


def _byte_metrics(functions: Any, column: SparkColumn, name: str) -> list[Any]:
    """Fewest and most numbers of a packed row; for a `bytes` column fewest and most bytes."""
    value = functions.col(name)
    header = header_bytes(len(column.shape) if column.shape is not None else column.ndim)
    sizes = functions.when(value.isNotNull(), functions.length(value) - header)
    shapes = []
    if _has_header(column):
        # A row's bytes begin with its sizes.
        header_of_row = functions.hex(functions.substring(value, 1, header))
        shapes = [
            functions.min(header_of_row).alias(f"{name}_first_shape"),
            functions.max(header_of_row).alias(f"{name}_last_shape"),
        ]
    itemsize = functions.lit(1 if column.kind == "bytes" else stored_dtype(column.dtype).itemsize)
    return [
        (functions.min(sizes) / itemsize).cast("long").alias(f"{name}_least"),
        (functions.max(sizes) / itemsize).cast("long").alias(f"{name}_most"),
        *shapes,
    ]


def _extreme_places(functions: Any, column: SparkColumn, name: str, *, packed: bool) -> list[Any]:
    """The places of the rows with the fewest and with the most numbers."""
    value, place = functions.col(name), functions.col("place")
    if packed or column.kind == "bytes":
        size = functions.length(value)
    else:
        for _ in range(column.ndim - 1):
            value = functions.flatten(value)
        size = functions.size(value)
    # The size of null would be -1.
    size = functions.when(functions.col(name).isNotNull(), size)
    return [
        functions.min_by(place, size).alias(f"{name}_least_place"),
        functions.max_by(place, size).alias(f"{name}_most_place"),
    ]


def _has_no_numbers(column: SparkColumn, name: str, observed: Mapping[str, Any]) -> bool:
    """Whether every row is an empty list, or one of empty lists."""
    if f"{name}_most" in observed:
        return not observed[f"{name}_most"]
    return any(not observed[f"{name}_most_{depth}"] for depth in range(column.ndim))


def _level_metrics(functions: Any, column: SparkColumn, name: str) -> list[Any]:
    """Fewest and most elements of the lists on each level, and whether an element is null."""
    metrics, level = [], functions.col(name)
    is_present, is_jagged = level.isNotNull(), functions.lit(False)
    for depth in range(column.ndim):
        if depth:
            inner = functions.transform(level, functions.size)
            least, most = functions.array_min(inner), functions.array_max(inner)
            is_jagged = is_jagged | functions.coalesce(least != most, functions.lit(False))
            level = functions.flatten(level)
        else:
            least = most = functions.when(is_present, functions.size(level))
        metrics.append(functions.min(least).alias(f"{name}_least_{depth}"))
        metrics.append(functions.max(most).alias(f"{name}_most_{depth}"))
    has_null = functions.coalesce(functions.exists(level, lambda element: element.isNull()), is_present)
    metrics.append(functions.sum(has_null.cast("long")).alias(f"{name}_null_element"))
    metrics.append(functions.sum(is_jagged.cast("long")).alias(f"{name}_jagged"))
    return metrics


def _observed_shape(column: SparkColumn, name: str, observed: Mapping[str, Any]) -> Any:
    """The shape of all rows as a list; None if rows differ; `"unknown"` if all rows are null."""
    if f"{name}_least_0" in observed:
        levels = [(observed[f"{name}_least_{depth}"], observed[f"{name}_most_{depth}"]) for depth in range(column.ndim)]
    else:
        levels = [(observed[f"{name}_least"], observed[f"{name}_most"])]
    if levels[0][1] is None:
        return "unknown"
    if _has_header(column):
        first, last = observed[f"{name}_first_shape"], observed[f"{name}_last_shape"]
        shape = np.frombuffer(bytes.fromhex(first), "<i4").tolist()[: column.ndim]
        return shape if first == last and 0 not in shape else None
    if any(least != most or not most for least, most in levels):
        return None
    return [most for _, most in levels]


def _wrong_shape(column: SparkColumn, name: str, observed: Mapping[str, Any]) -> dict[str, Any]:
    """The finding of a row that does not have the declared shape."""
    declared = column.shape or ()
    if column.ndim > 1 and f"{name}_most_0" in observed:
        largest = tuple(observed[f"{name}_most_{depth}"] for depth in range(column.ndim))
        return {"kind": "shape", "column": column.name, "found": f"shape {largest}", "expected": f"shape {declared}"}
    expected, unit = _row_size(column), "bytes" if column.kind == "bytes" else "numbers"
    keys = [f"{name}_{bound}{level}" for bound in ("least", "most") for level in ("", "_0")]
    sizes = [observed[key] for key in keys if key in observed]
    size = next((size for size in sizes if size != expected), sizes[0])
    return {"kind": "shape", "column": column.name, "found": f"{size} {unit}", "expected": f"{expected} {unit}"}


def _row_size(column: SparkColumn) -> int:
    """How many numbers a row of the declared shape has; for a `bytes` column how many bytes."""
    itemsize = np.dtype(column.dtype).itemsize if column.kind == "bytes" else 1
    return int(np.prod(column.shape or ())) * itemsize
