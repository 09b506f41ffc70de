"""Random frames of all types through every source, writer, policy and framework, and filters: Spark's own answers.

A process has one Spark session, and a pool of frames that are written when a case asks for them first. What Spark
collects of a frame is the truth, and one job answers all filters of a frame.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import operator
import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from converter import (
    DatasetConverter,
    SourceError,
    make_delta_converter,
    make_parquet_converter,
    make_spark_converter,
)
from tests.faults.campaign.cases import Campaign, Step, require
from tests.faults.campaign.value_cells import as_count, cut, is_same, plain_column
from tests.faults.campaign.value_frames import NUM_FILTERS, Column, Frame, cells_of, ddl, leaves_of, make_frame, quoted

_NUM_FRAMES = 100
"""Of the pool: most cases of a process find their frame written."""

_SOURCES = ("executors", "spark", "parquet", "int96", "delta")
_FRAMEWORKS = ("numpy", "numpy", "numpy", "torch", "tensorflow")


def _draw(chance: random.Random) -> list[Step]:
    frame = chance.randrange(_NUM_FRAMES)
    return [{"frame": frame, **_draw_step(chance)} for _ in range(chance.randint(3, 8))]


def _draw_step(chance: random.Random) -> Step:
    source = {"source": chance.choice(_SOURCES), "float_dtype": chance.choice(("float32", "float32", None))}
    kind = chance.choices(("read", "filter", "statistics"), (6, 5, 1))[0]
    if kind == "filter":
        return {"do": kind, **source, "filters": chance.sample(range(NUM_FILTERS), 6)}
    if kind == "statistics":
        return {"do": kind, **source}
    return {
        "do": kind,
        **source,
        "framework": chance.choice(_FRAMEWORKS),
        "nulls": chance.choice(("mask", "mask", "raise", "fill")),
        "ragged": chance.choice(("pad", "nested")),
        "batch_size": chance.choice((1, 3, 16, 1000)),
        "shuffle": chance.random() < 0.5,
        "seed": chance.randrange(100),
        "shards": chance.choice((1, 1, 2, 3)),
        "workers": chance.choice((1, 2)),
        "skipped": chance.choice((None, None, 0, 1)),
    }


class Written:
    """A frame, what Spark says of it, and the converters of what was written."""

    def __init__(self, spark: Any, frame: Frame, folder: Path) -> None:
        from pyspark.ml.linalg import VectorUDT
        from pyspark.sql.types import StructField, StructType

        self._spark, self.frame, self._folder = spark, frame, folder
        self.fields = {
            name: (leaf, ndim) for column in frame.columns for name, leaf, ndim in leaves_of(column.name, column.kind)
        }
        fields = zip(StructType.fromDDL(frame.schema).fields, frame.columns, strict=True)
        schema = StructType([
            StructField(field.name, VectorUDT()) if column.kind[0] == "vector" else field for field, column in fields
        ])  # fmt: skip
        made = spark.createDataFrame(frame.rows, schema)
        self._path("parquet").parent.mkdir(parents=True, exist_ok=True)
        made.write.option("parquet.block.size", "2000").parquet(str(self._path("parquet")))
        self._df = spark.read.schema(schema).parquet(str(self._path("parquet")))
        self.truth: dict[int, dict[str, Any]] = {}
        # A dict of Python's has not the order of the map.
        asked = [_in_order(column) if column.kind[0] == "map" else quoted(column.name) for column in frame.columns]
        for row in self._df.select(*asked).collect():
            cells = (cells_of(column.name, column.kind, row[column.name]) for column in frame.columns)
            self.truth[row["id"]] = dict(cell for part in cells for cell in part)
        self._converters: dict[tuple[str, str | None], DatasetConverter] = {}
        self._answers: list[set[int]] | None = None

    def _path(self, name: str) -> Path:
        return self._folder / name

    def answer(self, number: int) -> set[int]:
        """The ids that Spark leaves for a filter."""
        if self._answers is None:
            conditions = [condition(groups).alias(f"f{at}") for at, groups in enumerate(self.frame.filters)]
            rows = self._df.select("id", *conditions).collect()
            self._answers = [{row["id"] for row in rows if row[f"f{at}"]} for at in range(len(conditions))]
        return self._answers[number]

    def converter(self, source: str, float_dtype: Any) -> DatasetConverter:
        """The frame as a data set."""
        key = (source, float_dtype)
        if key not in self._converters:
            self._converters[key] = self._make(source, float_dtype)
        return self._converters[key]

    def _make(self, source: str, float_dtype: Any) -> DatasetConverter:
        if source in ("executors", "spark"):
            return make_spark_converter(
                self._df,
                cache_dir=self._folder / "cache",
                cache_key=f"{source} {float_dtype}",
                writer=source,
                float_dtype=float_dtype,
                row_group_bytes=2000,
                progress=False,
            )
        # In files of others a vector is a struct of its parts; Delta has no spans of time, and deltalake no vectors.
        left_out = [
            column.name
            for column in self.frame.columns
            if column.kind[0] == "vector" or (source == "delta" and "interval" in ddl(column.kind))
        ]
        columns = [
            name for name in self.fields if not any(name == one or name.startswith(f"{one}.") for one in left_out)
        ]
        # Footers do not show that rows differ in length.
        shapes = {
            name: None
            for name in columns
            if self.fields[name][1] and self._is_ragged(name) and self.fields[name][0] not in ("string", "binary")
        }
        if source == "delta":
            if not self._path("delta").exists():
                # Any name needs another one in the files.
                writer = self._df.drop(*left_out).write.format("delta").option("delta.columnMapping.mode", "name")
                writer.save(str(self._path("delta")))
            return make_delta_converter(self._path("delta"), columns=columns, float_dtype=float_dtype, shapes=shapes)
        if source == "int96" and not self._path("int96").exists():
            self._spark.conf.set("spark.sql.parquet.outputTimestampType", "INT96")
            self._spark.conf.set("spark.sql.parquet.writeLegacyFormat", "true")
            try:
                self._df.write.option("compression", "zstd").parquet(str(self._path("int96")))
            finally:
                self._spark.conf.unset("spark.sql.parquet.outputTimestampType")
                self._spark.conf.unset("spark.sql.parquet.writeLegacyFormat")
        return make_parquet_converter(self._path(source), columns=columns, float_dtype=float_dtype, shapes=shapes)

    def _is_ragged(self, name: str) -> bool:
        column = next(one for one in self.frame.columns if name == one.name or name.startswith(f"{one.name}."))
        return column.lengths[0] != column.lengths[1] or column.kind[0] == "map"

    def nulls(self, name: str) -> list[int]:
        """The ids of the rows in which a column is null."""
        return [number for number, cells in self.truth.items() if cells[name] is None]

    def has_null_elements(self, name: str) -> bool:
        """Whether a row of a column has an element that is null."""
        return any(isinstance(cells[name], list) and None in cells[name] for cells in self.truth.values())


def _in_order(column: Column) -> Any:
    """The keys and the values of a map."""
    from pyspark.sql import functions as sf

    whole = sf.col(quoted(column.name))
    parts = sf.struct(sf.map_keys(whole).alias("key"), sf.map_values(whole).alias("value"))
    return sf.when(whole.isNotNull(), parts).alias(column.name)


def condition(groups: Sequence[Sequence[tuple[str, str, Any]]]) -> Any:
    """A filter for Spark: any of the groups, all of a group."""
    return functools.reduce(
        operator.or_, [functools.reduce(operator.and_, [_compared(*one) for one in group]) for group in groups]
    )


def _compared(name: str, sign: str, value: Any) -> Any:
    from pyspark.sql import functions as sf

    column = sf.col(quoted(name))
    if sign == "contains":
        return sf.array_contains(column, literal(value))
    if sign == "contains any":
        return functools.reduce(operator.or_, [sf.array_contains(column, literal(one)) for one in value])
    if sign in ("in", "not in"):
        listed = column.isin([literal(one) for one in value])
        return listed if sign == "in" else ~listed
    signs: dict[str, Any] = {"=": operator.eq, "==": operator.eq, "!=": operator.ne, "<": operator.lt,
                             ">": operator.gt, "<=": operator.le, ">=": operator.ge}  # fmt: skip
    return signs[sign](column, literal(value))


def literal(value: Any) -> Any:
    """A value for Spark, exactly."""
    from pyspark.sql import functions as sf

    if isinstance(value, dt.datetime):
        if value.tzinfo is not None:
            return sf.timestamp_micros(sf.lit(as_count(value)))
        return sf.lit(f"{value:%Y-%m-%d %H:%M:%S.%f}".rjust(26, "0")).cast("timestamp_ntz")
    if isinstance(value, dt.date):
        return sf.lit(value.isoformat()).cast("date")
    if isinstance(value, bytes):
        return sf.unhex(sf.lit(value.hex()))
    return sf.lit(value)


class Pool:
    """The session, and the frames that were asked for."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self._spark, self._folder = spark, folder
        self._written: dict[int, Written] = {}

    def frame(self, number: int) -> Written:
        """A frame by its number."""
        if number not in self._written:
            self._written[number] = Written(self._spark, make_frame(number), self._folder / f"frame-{number}")
        return self._written[number]


def _run(steps: Sequence[Step], shared: Pool, folder: Path) -> Counter[str]:
    done: Counter[str] = Counter()
    for step in steps:
        written = shared.frame(step["frame"])
        try:
            converter = written.converter(step["source"], step["float_dtype"])
        except SourceError as error:
            require(not written.truth and "no row" in str(error).lower(), "a frame is converted", f"{error!r}")
            done["empty frames refused"] += 1
            continue
        require(len(converter) == len(written.truth), "all rows are there", f"{len(converter)} {len(written.truth)}")
        {"read": _read, "filter": _filter, "statistics": _statistics}[step["do"]](step, written, converter, done)
    return done


def _filter(step: Step, written: Written, converter: DatasetConverter, done: Counter[str]) -> None:
    for number in step["filters"]:
        _filter_by(number, step, written, converter, done)


def _filter_by(number: int, step: Step, written: Written, converter: DatasetConverter, done: Counter[str]) -> None:
    groups = written.frame.filters[number]
    leaves = {written.fields[name][0] for group in groups for name, _, _ in group}
    is_cache = step["source"] in ("executors", "spark")
    # A cache has doubles and decimals as `float_dtype`, and compares those.
    if is_cache and any(leaf.startswith("decimal") or (leaf == "double" and step["float_dtype"]) for leaf in leaves):
        return
    expected = written.answer(number)
    try:
        part = converter.where(groups)
        found = [one for batch in part.make_batch_reader(columns=["id"]) for one in batch["id"].tolist()]
    except SourceError as error:
        if "passes the filters" not in str(error):
            raise
        found = []
    done["filters"] += 1
    done["filters that leave some"] += 0 < len(expected) < len(written.truth)
    wrong = sorted(expected ^ {*found})
    told = f"{groups} differs in {[written.truth[one] for one in wrong[:2]]}"
    require(sorted(found) == sorted(expected), "a filter leaves the rows that Spark leaves", told[:3000])


def _statistics(step: Step, written: Written, converter: DatasetConverter, done: Counter[str]) -> None:
    for name, statistics in converter.statistics.items():
        leaf, ndim = written.fields[name]
        nulls = len(written.nulls(name))
        require(statistics.null_count == nulls, "nulls are counted", f"{name}: {statistics.null_count}, {nulls}")
        if not ndim and leaf in ("tinyint", "smallint", "int", "bigint", "date"):
            present = [cells[name] for cells in written.truth.values() if cells[name] is not None]
            if present:
                told = (statistics.min, statistics.max)
                counts = [as_count(one) for one in told]
                wanted = [as_count(min(present)), as_count(max(present))]
                require(counts == wanted, "the least and the greatest value are known", f"{name}: {told} {wanted}")
        done["statistics"] += 1


def _read(step: Step, written: Written, converter: DatasetConverter, done: Counter[str]) -> None:
    names = [name for name in converter.columns if name == "id" or not _is_skipped(name, step["skipped"])]
    framework, ragged = step["framework"], step["ragged"]
    schema = converter.schema
    if framework == "torch" and ragged == "nested":
        # A jagged tensor has rows of one dimension.
        names = [name for name in names if schema[name].shape is not None or written.fields[name][1] == 1]
    fills = {name: _fill(schema[name]) for name in names if schema[name].has_nulls and schema[name].shape == ()}
    nulls: Any = fills if step["nulls"] == "fill" else step["nulls"]
    if step["nulls"] == "fill":
        names = [
            name for name in names if name in fills or not (written.nulls(name) or written.has_null_elements(name))
        ]
        names = [name for name in names if name in fills or not schema[name].has_nulls]
    options: dict[str, Any] = {
        "columns": names, "batch_size": step["batch_size"], "shuffle": step["shuffle"], "seed": step["seed"],
        "nulls": nulls, "ragged": ragged, "workers_count": step["workers"], "uneven": "keep",
    }  # fmt: skip
    shards = min(step["shards"], max(1, len(written.truth)))
    try:
        batches = [
            batch for shard in range(shards)
            for batch in _batches(converter, framework, options | {"cur_shard": shard, "shard_count": shards})
        ]  # fmt: skip
    except Exception as error:
        # TensorFlow has errors of its own, which say what was raised.
        named = (
            re.search(r"Column '(.*?)' (?:has|holds) ", str(error))
            if "NullValueError" in f"{error!r} {error}"
            else None
        )
        if named is None:
            raise
        is_right = step["nulls"] == "raise" and bool(written.nulls(named[1]) or written.has_null_elements(named[1]))
        require(is_right, "a null is refused where there is one", f"{error!r}")
        done["nulls refused"] += 1
        return
    if nulls == "raise":
        held = [name for name in names if written.nulls(name) or written.has_null_elements(name)]
        require(not held, "a null is refused where there is one", f"{held}")
    ids = [one for batch in batches for one in plain_column(batch["id"])]
    require(sorted(ids) == sorted(written.truth), "each row comes once", f"{sorted(ids)}")
    for name in names:
        at = 0
        for batch in batches:
            at += _compare(batch, name, ids[at:], written, schema[name], fills if nulls is fills else {})
        done["cells compared"] += at
    done["reads"] += 1
    done[f"reads with {framework}"] += 1


def _is_skipped(name: str, parity: int | None) -> bool:
    return parity is not None and sum(name.encode()) % 2 == parity


def _fill(field: Any) -> Any:
    if field.dtype.startswith("datetime64"):
        return "2001-02-03"
    return {"str": "?", "bytes": b"?", "bool": True}.get(field.dtype, 7)


def _batches(converter: DatasetConverter, framework: str, options: dict[str, Any]) -> list[Any]:
    if framework == "numpy":
        with converter.make_batch_reader(**options) as reader:
            return list(reader)
    if framework == "torch":
        with converter.make_torch_dataloader(**options) as loader:
            return list(loader)
    with converter.make_tf_dataset(**options) as dataset:
        return list(dataset)


def _compare(batch: Any, name: str, ids: list[int], written: Written, field: Any, fills: dict[str, Any]) -> int:
    """Compare a column of a batch, whose rows are the first of `ids`; how many rows it has."""
    cells = plain_column(batch[name])
    valid = plain_column(batch[f"{name}__valid"]) if f"{name}__valid" in batch else [True] * len(cells)
    flags: list[Any] = [None] * len(cells)
    if f"{name}__element_valid" in batch:
        flags = cut(batch, name, plain_column(batch[f"{name}__element_valid"]))
    cells = cut(batch, name, cells)
    dtype = field.dtype if field.dtype.startswith("float") else "float64"
    for cell, is_valid, flag, number in zip(cells, valid, flags, ids, strict=False):
        expected = written.truth[number][name]
        if expected is None and name in fills:
            fill = fills[name]
            if field.dtype.startswith("datetime64"):
                fill = int(np.datetime64(fill).astype(field.dtype).astype(np.int64))
            same = cell in (fill, fill.encode() if isinstance(fill, str) else fill)
        else:
            law = is_valid == (expected is not None)
            require(law, "a null is where Spark has one", f"{name} of row {number}: {cell!r} {expected!r}")
            same = expected is None or is_same(cell, expected, dtype, valid=flag)
        told = f"{name} ({written.fields[name]}, {field.dtype} {field.shape}) of row {number}: {cell!r} {expected!r}"
        require(same, "a value is what Spark says", told[:2000])
    return len(cells)


@contextlib.contextmanager
def _shared(folder: Path) -> Iterator[Pool]:
    from converter import start_local_spark
    from tests.parity.golden_tables import CONF

    # PySpark gives times in the process's zone.
    os.environ["TZ"] = "UTC"
    time.tzset()
    conf = CONF | {"spark.sql.warehouse.dir": str(folder / "warehouse"), "spark.default.parallelism": "2"}
    spark = start_local_spark("values", master="local[2]", conf=conf)
    try:
        yield Pool(spark, folder)
    finally:
        spark.stop()


CAMPAIGN = Campaign(name="values", draw=_draw, run=_run, shared=_shared, max_seconds=180.0)
