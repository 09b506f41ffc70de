"""Filters leave the rows that Spark's own `where` leaves: NaN, infinities, zeros and nulls, whoever wrote the files."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import (
    DatasetConverter,
    SourceError,
    make_delta_converter,
    make_parquet_converter,
    make_spark_converter,
    open_converter,
)
from tests.parity.golden_tables import CONF
from tests.processes import finish, start_python

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

NUM_ROWS, NUM_FILTERS, SEED = 240, 200, 11
_AT_ONCE = 25
"""Queries in one job of Spark."""

NAN, INF = float("nan"), float("inf")
SIGNS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge,
}  # fmt: skip
POOLS: dict[str, list[Any]] = {
    "x": [NAN, INF, -INF, 0.0, -0.0, 0.1, 1 / 3, -2.5, 7.25, 1e300, 5e-324],
    # Exact as float32: Spark compares them as doubles.
    "f": [NAN, INF, -INF, 0.0, -0.0, 0.5, -2.5, 7.25, 1e6],
    "n": [0, 1, -3, 2**40, 2],
    "p": [NAN, INF, 1.5, -0.0],
}


def make_rows(seed: int) -> pa.Table:
    """Runs of ten rows, each of few values, so that files and row groups have odd minima and maxima."""
    chance = np.random.default_rng(seed)

    def runs(pool: Sequence[Any]) -> list[Any]:
        found: list[Any] = []
        while len(found) < NUM_ROWS:
            few = [pool[number] for number in chance.integers(0, len(pool), chance.integers(1, 4))]
            few += [None] * int(chance.integers(0, 2))
            found += [few[number] for number in chance.integers(0, len(few), 10)]
        return found

    kinds = {"x": pa.float64(), "f": pa.float32(), "n": pa.int64(), "p": pa.float64()}
    columns = {name: pa.array(runs(POOLS[name]), kind, from_pandas=False) for name, kind in kinds.items()}
    return pa.table({"id": pa.array(range(NUM_ROWS), pa.int64()), **columns})


def make_filters(seed: int, count: int) -> list[list[list[list[Any]]]]:
    """Lists of lists of comparisons, as JSON holds them: any of the lists, all of a list."""
    chance = np.random.default_rng(seed)

    def value(name: str) -> Any:
        pool = [*POOLS[name], 2.0, -1.0] if name != "n" else [*POOLS[name], NAN, 0.5, INF]
        return pool[int(chance.integers(len(pool)))]

    def comparison() -> list[Any]:
        name, sign = str(chance.choice(list(POOLS))), str(chance.choice([*SIGNS, "in", "not in"]))
        if sign in SIGNS:
            return [name, sign, None if chance.random() < 0.03 else value(name)]
        members = [value(name) for _ in range(int(chance.integers(0, 4)))]
        return [name, sign, [*members, None] if chance.random() < 0.2 else members]

    return [
        [[comparison() for _ in range(int(chance.integers(1, 4)))] for _ in range(int(chance.integers(1, 4)))]
        for _ in range(count)
    ]


def _condition(groups: Sequence[Sequence[Sequence[Any]]]) -> Column:
    """The same filters for Spark."""
    from pyspark.sql import functions as sf

    def one(name: str, sign: str, value: Any) -> Column:
        if sign in SIGNS:
            return SIGNS[sign](sf.col(name), sf.lit(value))
        found = sf.col(name).isin(value)
        return found if sign == "in" else ~found

    return functools.reduce(
        operator.or_, [functools.reduce(operator.and_, [one(*said) for said in group]) for group in groups]
    )


def ask_spark(root: str, seed: int, count: int, step: int) -> dict[str, dict[str, list[int]]]:
    """Write the rows in each way; for each way and each of its filters the ids that Spark leaves.

    Each way is asked every `step`-th filter. It runs in a process of its own, because it needs a Spark that has Delta.
    """
    from pyspark.sql import functions as sf

    from converter import start_local_spark

    # Spark itself skips row groups and files by minima and maxima in which other writers left NaN out.
    unskipped = {"spark.sql.parquet.filterPushdown": "false", "spark.databricks.delta.stats.skipping": "false"}
    # One task for each query, and no compiler for what runs once.
    few_tasks = {"spark.sql.files.openCostInBytes": "0", "spark.sql.files.minPartitionNum": "1",
                 "spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}  # fmt: skip
    conf = CONF | unskipped | few_tasks | {"spark.sql.warehouse.dir": f"{root}/warehouse"}
    spark = start_local_spark("filters", master="local[2]", conf=conf)
    filters = make_filters(seed, count)

    def ask(way: int, kind: str, path: str) -> dict[str, list[int]]:
        frame = spark.read.format(kind).load(path)
        numbers = range(way % step, count, step)
        found: dict[str, list[int]] = {str(number): [] for number in numbers}
        for start in range(0, len(numbers), _AT_ONCE):
            queries = [
                frame.where(_condition(filters[number])).select(sf.lit(number).alias("filter"), "id")
                for number in numbers[start : start + _AT_ONCE]
            ]
            for row in functools.reduce(lambda left, right: left.unionAll(right), queries).collect():
                found[str(row["filter"])].append(row["id"])
        return {number: sorted(ids) for number, ids in found.items()}

    try:
        places = _write(spark, Path(root), make_rows(seed))
        with ThreadPoolExecutor(len(places)) as pool:
            asked = [pool.submit(ask, way, *place) for way, place in enumerate(places.values())]
            return dict(zip(places, [answer.result() for answer in asked], strict=True))
    finally:
        spark.stop()


def _write(spark: SparkSession, root: Path, rows: pa.Table) -> dict[str, tuple[str, str]]:
    """The format and the place of each table that is asked; beside them caches of the same rows."""
    parts = spark.createDataFrame(rows).repartitionByRange(4, "id").sortWithinPartitions("id")
    (root / "arrow").mkdir()
    for number in range(4):
        some = rows.slice(number * NUM_ROWS // 4, NUM_ROWS // 4)
        pq.write_table(some, root / "arrow" / f"{number}.parquet", row_group_size=10)

    def cache(writer: str) -> None:
        made = make_spark_converter(
            parts, cache_dir=f"{root}/cache", cache_key=writer, writer=writer, float_dtype=None, delete_on_exit=False,
            row_group_bytes=1024,
        )  # fmt: skip
        (root / f"cache by {writer}").write_text(made.url)

    writes: list[Callable[[], None]] = [
        lambda: parts.write.option("parquet.block.size", "1").parquet(f"{root}/spark"),
        lambda: parts.write.partitionBy("p").parquet(f"{root}/folders"),
        lambda: parts.write.format("delta").save(f"{root}/delta"),
        lambda: cache("executors"),
        lambda: cache("spark"),
    ]
    with ThreadPoolExecutor(len(writes)) as pool:
        for written in [pool.submit(write) for write in writes]:
            written.result()
    return {"spark": ("parquet", f"{root}/spark"), "arrow": ("parquet", f"{root}/arrow"),
            "folders": ("parquet", f"{root}/folders"), "delta": ("delta", f"{root}/delta")}  # fmt: skip


def converters(root: Path) -> Iterator[tuple[str, DatasetConverter]]:
    """The converters of what was written, each with the name of the table that Spark was asked."""
    for name in ("spark", "arrow", "folders"):
        yield name, make_parquet_converter(root / name)
    yield "delta", make_delta_converter(root / "delta")
    for writer in ("executors", "spark"):
        yield "delta", open_converter((root / f"cache by {writer}").read_text())


def ids_that(converter: DatasetConverter, groups: Sequence[Sequence[Sequence[Any]]]) -> list[int]:
    """The ids that a filter leaves, in ascending order."""
    try:
        part = converter.where([[(name, sign, value) for name, sign, value in group] for group in groups])
    except SourceError as error:
        assert "passes the filters" in str(error)  # noqa: PT017
        return []
    return sorted(one for batch in part.make_batch_reader(columns=["id"]) for one in batch["id"].tolist())


def compare(root: Path, seed: int, count: int, answers: dict[str, dict[str, list[int]]]) -> tuple[int, list[str]]:
    """How many answers are some rows but not all; which filters leave other rows than Spark, by which converter."""
    filters = make_filters(seed, count)
    num_telling, wrong = 0, []
    for name, converter in converters(root):
        with converter:
            for number, expected in answers[name].items():
                groups = filters[int(number)]
                found = ids_that(converter, groups)
                num_telling += 0 < len(expected) < NUM_ROWS
                if found != expected:
                    wrong.append(f"{converter.url}: {json.dumps(groups)} leaves {found}, and in Spark {expected}")
    return num_telling, wrong


@pytest.mark.timeout(300)
def test_filters_leave_the_rows_that_spark_leaves(tmp_path: Path) -> None:
    with start_python(ask_spark, str(tmp_path), SEED, NUM_FILTERS, 4) as process:
        answers = finish(process, seconds=240)
    num_telling, wrong = compare(tmp_path, SEED, NUM_FILTERS, answers)
    assert num_telling > NUM_FILTERS // 2
    assert not wrong, f"{len(wrong)} differ: {wrong[:5]}"
