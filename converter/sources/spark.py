"""A Spark DataFrame becomes a manifest: its executors write the cache, the driver commits it.

Works on classic Spark and on Spark Connect, because it uses `mapInArrow`, which
both have, and nothing of the JVM. One pass over the data: no counting job, no
sampling job, no `df.cache()`.

The executors need pyarrow and numpy, not this package: the write function
travels by value. Columns travel under names of ours (`c0`, `c1`, …), because
`mapInArrow` refuses names with dots (tried on Spark 4.2), and keep their true
names in the files.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from converter import cache, identity
from converter.errors import (
    CacheCorruptError,
    CacheError,
    ConverterError,
    NullValueError,
    SourceError,
    UnsupportedTypeError,
)
from converter.manifest import Manifest, fingerprint_of
from converter.schema import Field, Schema, dtype_of, raise_unsupported
from converter.sources import executor, moments
from converter.statistics import ColumnStatistics
from converter.storage import Storage, StorageOptions

logger = logging.getLogger(__name__)

FILE_BYTES = 512 << 20
"""A data file is closed once it is this large, so that a huge partition makes several files."""

DEFAULT_ROW_GROUP_BYTES = 8 << 20
"""Small enough that a window of some 48 MB mixes several places of the dataset, large enough that
decoding, not opening, is what costs: a guess, to be replaced by a measurement."""

COMPRESSIONS = ("auto", "none", "lz4", "zstd", "snappy")

_ARROW_OF_SPARK: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_REMEDIES = {
    "map": "take the keys you need, e.g. df.withColumn({name!r}, F.col({name!r})['key'])",
    "void": "drop it, it is always null, or cast it, e.g. F.col({name!r}).cast('int')",
    "variant": "extract a typed value, e.g. F.try_variant_get({name!r}, '$.field', 'double')",
    "interval": "cast it to a number, e.g. F.col({name!r}).cast('long')",
    "geo": "store it as bytes, e.g. F.expr('ST_AsBinary(…)')",
    "time": "cast it to a number, e.g. F.expr('time_to_micros({name})')",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A column to write: how to select it in Spark, and what the executors are told."""

    name: str
    path: tuple[str, ...]
    kind: str
    dtype: str
    ndim: int
    shape: tuple[int, ...] | None
    narrowed_from: str | None

    def spec(self) -> dict[str, Any]:
        shape = None if self.shape is None else list(self.shape)
        return {"name": self.name, "kind": self.kind, "dtype": self.dtype, "ndim": self.ndim, "shape": shape}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A committed entry that this process uses."""

    root: Storage
    key: str
    manifest: Manifest
    lease: cache.Lease


def write_dataframe(
    df: Any,
    *,
    cache_dir: str | None,
    cache_key: str | None,
    float_dtype: str | None,
    shapes: Mapping[str, Sequence[int]] | None,
    row_group_bytes: int,
    compression: str,
    shuffle_rows_seed: int | None,
    storage_options: StorageOptions | None,
    is_kept: bool,
    progress: bool | None,
) -> Entry:
    """The entry of `df`: one that provably holds its rows, else a new one, written once."""
    _check_dataframe(df)
    columns = plan_columns(df.schema.jsonValue(), float_dtype=float_dtype, shapes=shapes or {})
    session = df.sparkSession
    is_connect = type(session).__module__.startswith("pyspark.sql.connect")
    chosen = cache.choose_cache_dir(
        cache_dir,
        spark_conf=session.conf.get(cache.SPARK_CONF, None),
        master=session.conf.get("spark.master", None) or "unknown",
        is_connect=is_connect,
    )
    root = cache.open_root(chosen, storage_options)
    write_options = {
        "float_dtype": float_dtype,
        "shapes": {name: list(shape) for name, shape in (shapes or {}).items()},
        "row_group_bytes": row_group_bytes,
        "compression": compression,
        "shuffle_rows_seed": shuffle_rows_seed,
    }
    schema = df.schema.json()
    if cache_key is not None:
        key = identity.entry_key(f"key:{cache_key}", schema=schema, write_options=write_options)
        evidence, bucket, candidates = None, "", [key]
    else:
        key = identity.entry_key(None, schema=schema, write_options=write_options)
        bucket = f"{root.url}/{key.partition('-')[2]}"
        evidence = identity.gather_evidence(df)
        candidates = identity.recall(bucket, df, evidence)
    for candidate in candidates:
        adopted = _adopt(root, candidate)
        if adopted is not None:
            logger.info("Reuse %s: it holds the same rows.", root.below(candidate).url)
            return Entry(root=root, key=candidate, manifest=adopted[0], lease=adopted[1])
    if cache_key is not None:
        _log_other_entries(root, key, cache_key)
    for column in columns:
        if column.narrowed_from:
            logger.info("Column %r: %s becomes %s.", column.name, column.narrowed_from, column.dtype)
    attempt = cache.begin(root, key, application_id=session.conf.get("spark.app.id", None) or "unknown")
    spec = {
        "directory": root.below(key).path(attempt.data_directory),
        "columns": [column.spec() for column in columns],
        "row_group_bytes": row_group_bytes,
        "file_bytes": FILE_BYTES,
        "compression": "none" if compression == "auto" else compression,
    }
    try:
        reports = _run_write(
            df,
            columns,
            spec,
            session=session,
            is_connect=is_connect,
            shuffle_rows_seed=shuffle_rows_seed,
            progress=progress,
        )
        manifest = _manifest_from(
            reports, columns, directory=attempt.data_directory, is_kept=is_kept, float_dtype=float_dtype
        )
        cache.delete_unlisted(root, attempt, manifest)
        manifest, lease = cache.commit(root, attempt, manifest)
    except BaseException:
        # Also on Ctrl-C: what was written has no manifest, and must not stay either.
        cache.abandon(root, attempt)
        raise
    identity.remember(bucket, df, evidence, key)
    return Entry(root=root, key=key, manifest=manifest, lease=lease)


def _adopt(root: Storage, key: str) -> tuple[Manifest, cache.Lease] | None:
    """A committed entry whose files are all there; a damaged one is removed, so that it is written again."""
    try:
        adopted = cache.adopt(root, key)
    except CacheCorruptError as error:
        logger.warning("Write again what is damaged: %s", error)
        root.below(key).delete_file(cache.MANIFEST)
        return None
    if adopted is not None:
        try:
            cache.check_files(root.below(key), adopted[0])
        except CacheError as error:
            logger.warning("Write again what is damaged: %s", error)
            cache.delete(root, key, *adopted)
            return None
    return adopted


def _log_other_entries(root: Storage, key: str, cache_key: str) -> None:
    """Say so when the key is known, but with another schema or other write options."""
    named = key.partition("-")[0]
    others = [info.name for info in root.list() if info.name.startswith(named) and info.name != key]
    if others:
        logger.info(
            "cache_key=%r has %d entries with another schema or other write options; write a new one.",
            cache_key,
            len(others),
        )


def _check_dataframe(df: Any) -> None:
    if all(hasattr(df, name) for name in ("mapInArrow", "sparkSession", "isStreaming")):
        if df.isStreaming:
            raise SourceError(
                "A streaming DataFrame has no end, so it cannot be converted. Convert a batch of it, "
                "e.g. in foreachBatch."
            )
        return
    kind = f"{type(df).__module__}.{type(df).__qualname__}"
    hint = "Pass what spark.read or spark.sql returns."
    if isinstance(df, str):
        hint = "A string is not read: pass spark.read.parquet(…) or spark.table(…) of it."
    elif kind.startswith("pandas."):
        hint = "Pass spark.createDataFrame(…) of it."
    raise TypeError(f"make_spark_converter needs a Spark DataFrame, got {kind}. {hint}")


def plan_columns(
    schema: Mapping[str, Any], *, float_dtype: str | None, shapes: Mapping[str, Sequence[int]]
) -> list[_Column]:
    """The columns to write, from a Spark schema's JSON (`df.schema.jsonValue()`): structs flattened, types checked.

    Raises:
        UnsupportedTypeError: columns have no tensor form; all of them are named, with the cast to write.
        SourceError: two columns would have one name.
        ValueError: `shapes` names a column that does not exist or is no array.
    """
    unsupported: dict[str, tuple[str, str]] = {}
    columns: list[_Column] = []
    for name, path, spark_type in _flatten(schema["fields"], ()):
        found = _plan_column(name, path, spark_type, float_dtype, shapes)
        if isinstance(found, _Column):
            columns.append(found)
        else:
            unsupported[name] = found
    raise_unsupported(unsupported)
    names = [column.name for column in columns]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise SourceError(
            f"Several columns are called {', '.join(map(repr, twice))} (a member of a struct is called "
            "'struct.member'). Rename them before converting.",
            column=twice[0],
        )
    for name in shapes:
        column = next((column for column in columns if column.name == name), None)
        if column is None or column.kind == "scalar":
            what = "does not exist" if column is None else "is no array"
            raise ValueError(f"shapes names the column {name!r}, which {what}. The columns are {names[:20]}.")
    if not columns:
        raise SourceError("The DataFrame has no columns. Select at least one before converting.")
    return columns


def _flatten(fields: Sequence[Mapping[str, Any]], above: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    for field in fields:
        path = (*above, str(field["name"]))
        kind = field["type"]
        if isinstance(kind, Mapping) and kind["type"] == "struct":
            yield from _flatten(kind["fields"], path)
        else:
            yield ".".join(path), path, kind


def _plan_column(
    name: str, path: tuple[str, ...], spark_type: Any, float_dtype: str | None, shapes: Mapping[str, Sequence[int]]
) -> _Column | tuple[str, str]:
    """The column, or its type's name and what to write instead."""
    kind, ndim, element = "scalar", 0, spark_type
    if isinstance(element, Mapping) and element["type"] == "udt":
        if str(element.get("class", "")).endswith(("ml.linalg.VectorUDT", "mllib.linalg.VectorUDT")):
            kind, ndim, element = "vector", 1, "double"
        elif "MatrixUDT" in str(element.get("class", "")):
            return (
                "matrix",
                f"make arrays of it, e.g. F.udf(lambda m: m.toArray().tolist(), 'array<array<double>>')({name!r})",
            )
        else:
            element = element["sqlType"]
    while isinstance(element, Mapping) and element["type"] == "array":
        kind, ndim, element = "tensor", ndim + 1, element["elementType"]
    arrow = _arrow_type(element)
    dtype = None if arrow is None else dtype_of(arrow)
    if dtype is None or (ndim and (dtype in ("str", "bytes") or dtype.startswith("datetime64"))):
        return _type_name(spark_type), _remedy(name, element, ndim)
    narrowed_from = None
    if arrow == pa.float64() and float_dtype is not None:
        narrowed_from = "double" if float_dtype != "float64" else None
        dtype = float_dtype
    elif pa.types.is_decimal(arrow):
        narrowed_from, dtype = str(element), float_dtype or "float64"
    shape = tuple(int(size) for size in shapes[name]) if name in shapes and kind != "scalar" else None
    return _Column(name=name, path=path, kind=kind, dtype=dtype, ndim=ndim, shape=shape, narrowed_from=narrowed_from)


def _arrow_type(spark_type: Any) -> pa.DataType | None:
    if not isinstance(spark_type, str):
        return None
    if spark_type.startswith("decimal"):
        return pa.decimal128(38, 10)
    if spark_type.startswith(("string", "char", "varchar")):
        return pa.string()
    return _ARROW_OF_SPARK.get(spark_type)


def _type_name(spark_type: Any) -> str:
    if isinstance(spark_type, str):
        return spark_type
    if spark_type["type"] == "array":
        return f"array<{_type_name(spark_type['elementType'])}>"
    if spark_type["type"] == "map":
        return f"map<{_type_name(spark_type['keyType'])},{_type_name(spark_type['valueType'])}>"
    return str(spark_type["type"])


def _remedy(name: str, element: Any, ndim: int) -> str:
    kind = element if isinstance(element, str) else str(element["type"])
    if ndim:
        if kind == "struct":
            return f"take one member, e.g. F.col({name!r} + '.member')"
        return f"make numbers of its elements, e.g. F.transform({name!r}, lambda x: x.cast('long')), or join them"
    for start, remedy in _REMEDIES.items():
        if kind.startswith(start):
            return remedy.replace("{name!r}", repr(name)).replace("{name}", name)
    if kind.startswith("geo"):
        return _REMEDIES["geo"]
    return f"cast it, e.g. F.col({name!r}).cast('string')"


def _run_write(
    df: Any,
    columns: Sequence[_Column],
    spec: dict[str, Any],
    *,
    session: Any,
    is_connect: bool,
    shuffle_rows_seed: int | None,
    progress: bool | None,
) -> list[tuple[int, dict[str, Any]]]:
    """Run the write job; the reports of all tasks, in the order of partitions."""
    from pyspark.sql import functions as F

    selected = df.select(
        *(F.col(".".join(f"`{part.replace('`', '``')}`" for part in column.path)) for column in columns)
    ).toDF(*(f"c{index}" for index in range(len(columns))))
    if shuffle_rows_seed is not None:
        selected = _shuffled(selected, shuffle_rows_seed)
    with (
        _travels_by_value(),
        identity.changed_confs(session, _batch_confs(columns, str(session.version))),
        _job_description(session, is_connect),
        _progress(session, is_connect, progress),
    ):
        job = selected.mapInArrow(executor.make_write_partition(spec), executor.REPORT_SCHEMA)
        if any(column.kind != "scalar" for column in columns):
            # A tensor's moments are up to 100 kB a task: they are merged before they reach the driver.
            job = job.repartition(1).mapInArrow(executor.fold_reports, executor.REPORT_SCHEMA)
        try:
            rows = job.collect()
        except Exception as error:
            raise CacheError(
                f"Spark could not write the cache into {spec['directory']}: {_short_cause(error)}",
                path=spec["directory"],
            ) from error
    reports = [(int(row["partition"]), json.loads(row["report"])) for row in rows]
    for _, report in reports:
        if "finding" in report:
            raise _error_of(report["finding"])
    return sorted(reports, key=lambda item: (item[0], item[1].get("name", "")))


def _shuffled(df: Any, seed: int) -> Any:
    """The rows in a random order, the same for the same seed where the input's partitions and their order are the same.

    Rows are spread over partitions by a random number and sorted by it there: together a uniform permutation,
    without the sampling job that a global sort would run first.
    """
    from pyspark.sql import functions as F

    keys = {"_random_0": F.rand(seed), "_random_1": F.rand(seed + 1)}
    spread = df.withColumns(keys).repartition(*map(F.col, keys)).sortWithinPartitions(*keys)
    return spread.drop(*keys)


def _batch_confs(columns: Sequence[_Column], version: str) -> dict[str, str]:
    """How many rows Spark may hand to Python at once: by default 10,000, which for rows of 2 MB is 20 GB."""
    if all(column.kind == "scalar" and column.dtype != "bytes" for column in columns):
        return {}
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) >= (4, 2):
        return {"spark.sql.execution.arrow.maxBytesPerBatch": str(16 << 20)}
    # Older versions bound rows alone; the executor puts small batches together again.
    return {"spark.sql.execution.arrow.maxRecordsPerBatch": "64"}


def _error_of(finding: Mapping[str, Any]) -> ConverterError:
    """What an executor found in the data, as the error it is."""
    name = str(finding["column"])
    if finding["kind"] == "null_element":
        return NullValueError(
            f"Column {name!r} has arrays with null elements, which no tensor can hold. Replace them before converting, "
            f"e.g. F.transform({name!r}, lambda x: F.coalesce(x, F.lit(0.0))).",
            column=name,
        )
    if finding["kind"] == "shape":
        return SourceError(
            f"Column {name!r} has a row of {finding['size']} numbers, where shapes= declares {finding['expected']} "
            f"(row {finding['row']} of its partition). Correct the shape, or the row.",
            column=name,
        )
    return UnsupportedTypeError(
        f"Column {name!r} has nested arrays whose rows differ in shape, which no tensor can hold. Pad or cut them to "
        f"one shape before converting, or flatten them, e.g. F.flatten({name!r}).",
        column=name,
    )


def _short_cause(error: Exception) -> str:
    """The one line of a Spark error that says why; the whole stays reachable as `__cause__`."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    python = [
        line
        for line in lines
        if line.partition(":")[0].endswith(("Error", "Exception")) and " " not in line.partition(":")[0]
    ]
    own = [line for line in python if not line.startswith(("org.apache.spark", "pyspark.errors"))]
    return (own or python or lines or [type(error).__name__])[-1 if own else 0][:500]


_TRAVELLING = (executor, moments)
_by_value_lock = threading.Lock()
_by_value_users = 0


@contextmanager
def _travels_by_value() -> Iterator[None]:
    """Let the executor's module be pickled by value, for the time of one call: registering is process-global."""
    global _by_value_users
    from pyspark import cloudpickle as untyped_cloudpickle

    cloudpickle: Any = untyped_cloudpickle

    with _by_value_lock:
        if _by_value_users == 0:
            for module in _TRAVELLING:
                cloudpickle.register_pickle_by_value(module)
        _by_value_users += 1
    try:
        yield
    finally:
        with _by_value_lock:
            _by_value_users -= 1
            if _by_value_users == 0:
                for module in _TRAVELLING:
                    cloudpickle.unregister_pickle_by_value(module)


@contextmanager
def _job_description(session: Any, is_connect: bool) -> Iterator[None]:
    """Name the job in Spark's UI, and give the user's own description back afterwards."""
    if is_connect:
        yield
        return
    context = session.sparkContext
    before = context.getLocalProperty("spark.job.description")
    context.setLocalProperty("spark.job.description", "converter: write the cache")
    try:
        yield
    finally:
        context.setLocalProperty("spark.job.description", before)


@contextmanager
def _progress(session: Any, is_connect: bool, wanted: bool | None) -> Iterator[None]:
    """A bar of the write's tasks on stderr, where someone looks and tqdm is installed."""
    if wanted is False or is_connect or (wanted is None and not _somebody_looks()):
        yield
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        yield
        return
    tracker = session.sparkContext.statusTracker()
    before = set(tracker.getJobIdsForGroup())
    done = threading.Event()

    def watch() -> None:
        with tqdm(desc="Writing the cache", unit=" tasks", leave=False) as bar:
            while not done.wait(0.1):
                stages = [
                    tracker.getStageInfo(stage)
                    for job in set(tracker.getJobIdsForGroup()) - before
                    for stage in getattr(tracker.getJobInfo(job), "stageIds", ())
                ]
                infos = [info for info in stages if info is not None]
                bar.total = sum(info.numTasks for info in infos) or None
                bar.n = sum(info.numCompletedTasks for info in infos)
                bar.refresh()

    watcher = threading.Thread(target=watch, name="converter-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _somebody_looks() -> bool:
    if sys.stderr.isatty():
        return True
    ipython = sys.modules.get("IPython")
    return ipython is not None and type(ipython.get_ipython()).__name__ == "ZMQInteractiveShell"


def _manifest_from(
    reports: Sequence[tuple[int, Mapping[str, Any]]],
    columns: Sequence[_Column],
    *,
    directory: str,
    is_kept: bool,
    float_dtype: str | None,
) -> Manifest:
    """What the executors wrote, as one dataset.

    Raises:
        SourceError: there are no rows.
    """
    totals: dict[str, Any] = {}
    lengths: dict[str, list[int]] = {}
    for _, report in reports:
        totals = executor.add_moments(totals, report.get("moments", {}))
        for name, (least, most) in report.get("lengths", {}).items():
            before = lengths.get(name, [least, most])
            lengths[name] = [min(before[0], least), max(before[1], most)]
    reports = [(partition, report) for partition, report in reports if "rows" in report]
    files = [report for _, report in reports]
    rows = [report["rows"] for report in files]
    num_rows = sum(map(sum, rows))
    if not num_rows:
        raise SourceError(
            "The DataFrame has no rows, so there is nothing to train on. Check its filters and its source."
        )
    statistics = {}
    for column in columns:
        null_count = sum(report["nulls"][column.name] for report in files)
        shape = () if column.kind == "scalar" else _common_shape(column, reports)
        field = Field(name=column.name, dtype=column.dtype, shape=shape, has_nulls=null_count > 0)
        shortest, longest = lengths.get(column.name, (None, None))
        statistics[column.name] = ColumnStatistics(
            field=field, null_count=null_count, shortest=shortest, longest=longest, closed=totals.get(column.name)
        )
    schema = Schema(tuple(column.field for column in statistics.values()))
    return Manifest(
        schema=schema,
        file_names=tuple(f"{directory}/{report['name']}" for report in files),
        file_bytes=np.array([report["bytes"] for report in files], np.int64),
        row_group_file=np.repeat(np.arange(len(files)), [len(groups) for groups in rows]).astype(np.int64),
        row_group_rows=np.array([count for groups in rows for count in groups], np.int64),
        row_group_bytes=np.array([size for report in files for size in report["row_group_bytes"]], np.int64),
        fingerprint=fingerprint_of(schema, rows, [report["digests"] for report in files]),
        num_rows=num_rows,
        statistics=statistics,
        is_kept=is_kept,
        float_dtype=float_dtype or "float64",
    )


def _common_shape(column: _Column, reports: Sequence[tuple[int, Mapping[str, Any]]]) -> tuple[int, ...] | None:
    """The one shape of all rows, or None, with a warning that says where they differ."""
    found = [
        (report["shapes"][column.name], partition, report)
        for partition, report in reports
        if column.name in report["shapes"]
    ]
    if not found:
        return column.shape
    first = found[0][0]
    odd = next((item for item in found if item[0] is None or item[0] != first), None)
    if odd is None:
        return tuple(first)
    _, partition, report = odd
    row = report["odd_rows"].get(column.name)
    where = f"row {row} of partition {partition}" if row is not None else f"partition {partition}"
    logger.warning(
        "Column %r becomes ragged: its rows differ in shape, first seen at %s (%s). "
        "Declare shapes={%r: …} to refuse such rows.",
        column.name,
        where,
        report["name"],
        column.name,
    )
    return None


def check_write_options(*, float_dtype: Any, row_group_bytes: Any, compression: Any) -> None:
    """Refuse option values before any work is done, naming the option."""
    if float_dtype not in ("float32", "float64", None):
        raise ValueError(f"float_dtype must be 'float32', 'float64' or None, got {float_dtype!r}.")
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression must be one of {', '.join(COMPRESSIONS)}, got {compression!r}.")
    if isinstance(row_group_bytes, bool) or not isinstance(row_group_bytes, int):
        raise TypeError(f"row_group_bytes must be an integer, got {row_group_bytes!r}.")
    if row_group_bytes < 1024 or not math.isfinite(row_group_bytes):
        raise ValueError(f"row_group_bytes must be at least 1024, got {row_group_bytes}.")
