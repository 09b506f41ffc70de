"""An entry is used again only when it provably holds the same rows; doubt writes afresh and is never an error.

A case that must not be stale is first shown to be used again while nothing changes: else it could not fail.
"""

from __future__ import annotations

import datetime as dt
import inspect
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceReader

from converter import (
    CacheError,
    DatasetConverter,
    SourceChangedError,
    make_spark_converter,
    open_converter,
    start_local_spark,
    sweep,
)
from converter.petastorm import spark as petastorm
from converter.sources.spark import identity, input_files, write
from converter.sources.spark.local import find_java_home
from tests.folders import files_below
from tests.processes import run_python
from tests.repository import REPOSITORY
from tests.servers.connect import only_connect_server

MARKER = "converter-v1/.owner"
LONG_AGO = 1_600_000_000 * 10**9

Convert = Callable[..., DatasetConverter]
Frame = Callable[[], DataFrame]


def rows_in(converter: DatasetConverter) -> list[tuple[Any, ...]]:
    with converter.make_batch_reader(batch_size=1000, ragged="nested") as reader:
        batches = list(reader)
    columns = [np.concatenate([batch[name] for batch in batches]).tolist() for name in converter.schema.names]
    return list(zip(*columns, strict=True))


def truth(df: DataFrame) -> list[tuple[Any, ...]]:
    """What Spark itself gives for the frame now."""
    return [tuple(row) for row in df.select("*").collect()]


def settings(spark: SparkSession) -> list[tuple[str, str]]:
    return sorted((row[0], row[1]) for row in spark.sql("SET").collect())


def folder_of(converter: DatasetConverter) -> Path:
    return Path(converter.url.removeprefix("file://"))


@pytest.fixture
def convert(spark: SparkSession, cache_dir: Path) -> Iterator[Convert]:
    """`make_spark_converter` that gives the session's confs back, and whose entries leave nothing behind."""
    made: list[DatasetConverter] = []

    def convert_and_keep_confs(df: DataFrame, **options: Any) -> DatasetConverter:
        before = settings(spark)
        made.append(make_spark_converter(df, cache_dir=cache_dir, **options))
        assert settings(spark) == before
        return made[-1]

    yield convert_and_keep_confs
    for converter in made:
        converter.delete()
    assert files_below(cache_dir) == ([MARKER] if made else [])


@pytest.fixture
def changed_conf(spark: SparkSession) -> Iterator[Callable[[str, str], None]]:
    """Change a conf until the test ends."""
    before: dict[str, str | None] = {}

    def change(name: str, value: str) -> None:
        before.setdefault(name, spark.conf.get(name, None))
        spark.conf.set(name, value)

    yield change
    for name, value in before.items():
        if value is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, value)


def write_numbers(folder: Path, *numbers: int, name: str = "part-0.parquet", at: int | None = LONG_AGO) -> Path:
    """A Parquet file of these numbers, as `id` and `twice`, changed when `at` says (None: now)."""
    folder.mkdir(exist_ok=True)
    table = pa.table({"id": pa.array(numbers, pa.int64()), "twice": pa.array([2 * one for one in numbers], pa.int64())})
    pq.write_table(table, folder / name, use_dictionary=False, compression="none")
    if at is not None:
        os.utime(folder / name, ns=(at, at))
    return folder / name


def age(folder: Path) -> None:
    """Let every file below be one that was changed long ago."""
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, ns=(LONG_AGO, LONG_AGO))


def check_never_stale(
    convert: Convert,
    frame: Frame,
    change: Callable[[], Any],
    *,
    after: Frame | None = None,
    is_reused: bool | None = True,
) -> None:
    """Used again until `change` (with None: maybe), not afterwards; what is read is what Spark gives, each time."""
    one = convert(frame())
    first = truth(frame())
    assert rows_in(one) == first
    again = convert(frame())
    assert is_reused is None or (again.url == one.url) == is_reused
    assert rows_in(again) == first
    change()
    changed = (after or frame)()
    other = convert(changed)
    second = truth(changed)
    assert rows_in(other) == second
    assert other.url != one.url
    # What was converted before stays what it was.
    assert rows_in(one) == first


# Files -----------------------------------------------------------------------


@pytest.mark.parametrize("later", [5_000_000, 10**9, 0], ids=["5 ms later", "1 s later", "at the same time"])
def test_a_file_overwritten_with_the_same_name_and_size_is_read_again(
    spark: SparkSession, tmp_path: Path, convert: Convert, later: int
) -> None:
    source = tmp_path / "source"
    file = write_numbers(source, 1, 2, 3)
    size = file.stat().st_size

    def overwrite() -> None:
        write_numbers(source, 7, 8, 9, at=LONG_AGO + later)
        assert file.stat().st_size == size

    check_never_stale(convert, lambda: spark.read.parquet(str(source)).select("id", "twice"), overwrite)


def test_an_overwritten_file_is_read_again_by_a_held_frame(
    spark: SparkSession, tmp_path: Path, convert: Convert
) -> None:
    write_numbers(tmp_path / "source", 1, 2, 3)
    df = spark.read.parquet(str(tmp_path / "source"))
    check_never_stale(convert, lambda: df, lambda: write_numbers(tmp_path / "source", 7, 8, 9, at=LONG_AGO + 10**7))


def test_an_overwritten_file_is_read_again_over_many_nodes(
    spark: SparkSession, tmp_path: Path, convert: Convert
) -> None:
    source = tmp_path / "source"
    write_numbers(source, 1, 2, 3, 4)

    def frame() -> DataFrame:
        rows = spark.read.parquet(str(source)).where("id > 1").groupBy("id").agg(F.sum("twice").alias("sum"))
        return rows.orderBy(F.desc("id"))

    check_never_stale(convert, frame, lambda: write_numbers(source, 6, 7, 8, 9, at=LONG_AGO + 10**7))


@pytest.mark.short
def test_an_appended_file_is_read(spark: SparkSession, tmp_path: Path, convert: Convert) -> None:
    source = tmp_path / "source"
    write_numbers(source, 1, 2, 3)
    check_never_stale(
        convert,
        lambda: spark.read.parquet(str(source)).orderBy("id"),
        lambda: write_numbers(source, 4, 5, name="part-1.parquet"),
    )


@pytest.mark.short
@pytest.mark.parametrize("kind", ["csv", "parquet", "view", "two folders"])
@pytest.mark.parametrize("is_older_first", [True, False])
def test_a_frame_from_before_a_file_grew_is_not_taken_for_one_from_after(
    spark: SparkSession, tmp_path: Path, convert: Convert, kind: str, is_older_first: bool
) -> None:
    """Spark reads each file to the length that it had when the frame was made."""
    folder, name = tmp_path / "grows", f"grows_{uuid.uuid4().hex}"
    folder.mkdir()

    def write(*numbers: int) -> None:
        if kind == "csv":
            with open(folder / "a.csv", "a") as file:
                file.writelines(f"{number},{2 * number}\n" for number in numbers)
        else:
            # More row groups after those that the older frame knows.
            pq.write_table(pa.table({"id": numbers, "twice": numbers}), folder / "a.parquet", row_group_size=10)
        age(folder)

    def frame() -> DataFrame:
        if kind == "csv":
            return spark.read.schema("id long, twice long").csv(str(folder))
        if kind == "two folders":
            return spark.read.parquet(str(folder)).union(spark.read.parquet(str(tmp_path / "still")))
        if kind == "view":
            spark.read.parquet(str(folder)).createOrReplaceTempView(name)
            return spark.table(name)
        return spark.read.parquet(str(folder))

    write(*range(100))
    write_numbers(tmp_path / "still", 1, 2, 3)
    older = frame()
    write(*range(100 if kind == "csv" else 2000))
    newer = frame()
    converted = [convert(df) for df in ((older, newer) if is_older_first else (newer, older))]
    counts = [len(converter) for converter in converted]
    assert counts == [df.count() for df in ((older, newer) if is_older_first else (newer, older))]
    assert counts[0] != counts[1]
    assert convert(frame()).url == converted[1 if is_older_first else 0].url
    spark.catalog.dropTempView(name)


@pytest.mark.parametrize("how", ["two relations", "as many bytes in all"])
def test_frames_that_know_other_lengths_of_the_same_files_are_told_apart(
    spark: SparkSession, tmp_path: Path, convert: Convert, how: str
) -> None:
    folder = tmp_path / "lines"
    folder.mkdir()

    def write(*counts: int) -> DataFrame:
        for number, count in enumerate(counts):
            (folder / f"{number}.csv").write_text("".join(f"{one:04}\n" for one in range(count)))
        age(folder)
        return spark.read.schema("id long").csv(str(folder))

    older = write(100, 300)
    newer = write(300, 100) if how == "as many bytes in all" else write(300, 300)
    few, many = "id < 150", "id >= 150"
    frames = (
        [older, newer] if how != "two relations" else [df.where(few).union(newer.where(many)) for df in (older, newer)]
    )
    converted = [convert(df) for df in frames]
    assert [len(converter) for converter in converted] == [df.count() for df in frames]
    assert converted[0].url != converted[1].url
    assert convert(frames[1]).url == converted[1].url


def test_a_removed_file_is_no_longer_read(spark: SparkSession, tmp_path: Path, convert: Convert) -> None:
    source = tmp_path / "source"
    write_numbers(source, 1, 2, 3)
    other = write_numbers(source, 4, 5, name="part-1.parquet")
    check_never_stale(convert, lambda: spark.read.parquet(str(source)).orderBy("id"), other.unlink)


def test_a_source_deleted_and_written_anew_is_read_again(spark: SparkSession, tmp_path: Path, convert: Convert) -> None:
    source = tmp_path / "source"
    spark.range(0, 5, 1, 1).write.parquet(str(source))
    age(source)

    def rewrite() -> None:
        shutil.rmtree(source)
        spark.range(5, 10, 1, 1).write.parquet(str(source))
        age(source)

    check_never_stale(convert, lambda: spark.read.parquet(str(source)), rewrite)


@pytest.mark.parametrize("kind", ["union", "join", "scalar subquery", "in subquery"])
def test_of_two_sources_one_that_changes_is_enough(
    spark: SparkSession, tmp_path: Path, convert: Convert, kind: str
) -> None:
    write_numbers(tmp_path / "one", 1, 2, 3)
    write_numbers(tmp_path / "two", 1, 2, 3)

    def frame() -> DataFrame:
        one, two = spark.read.parquet(str(tmp_path / "one")), spark.read.parquet(str(tmp_path / "two"))
        if kind == "union":
            return one.unionAll(two)
        if kind == "join":
            return one.join(two.withColumnRenamed("twice", "other"), "id").orderBy("id")
        wanted = {
            "scalar subquery": "SELECT id, (SELECT max(twice) FROM {two}) AS most FROM {one}",
            "in subquery": "SELECT id FROM {one} WHERE id IN (SELECT id FROM {two}) ORDER BY id",
        }
        return spark.sql(wanted[kind], one=one, two=two)

    check_never_stale(
        convert,
        frame,
        lambda: write_numbers(tmp_path / "two", 1, 2, 9, at=LONG_AGO + 10**7),
        is_reused=None if kind == "scalar subquery" else True,
    )


def test_files_changed_just_before_the_first_conversion_are_not_trusted(
    spark: SparkSession, tmp_path: Path, convert: Convert
) -> None:
    # However long it takes to convert them.
    write_numbers(tmp_path / "source", 1, 2, 3, at=time.time_ns() + 60 * 10**9)
    one, two = (convert(spark.read.parquet(str(tmp_path / "source"))) for _ in range(2))
    assert one.url != two.url
    assert rows_in(one) == rows_in(two) == [(1, 2), (2, 4), (3, 6)]


@pytest.mark.parametrize("when", ["before the rows are read", "after the rows were read"])
def test_files_that_change_while_they_are_written_prove_nothing(
    spark: SparkSession, tmp_path: Path, convert: Convert, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    source = tmp_path / "source"
    write_numbers(source, 1, 2, 3)
    looks = []
    look_at = identity.look_at

    def look_and_change(paths: list[str], *rest: Any) -> Any:
        looks.append(paths)
        if when.startswith("after") and len(looks) == 2:
            write_numbers(source, 7, 8, 9, at=LONG_AGO + 10**7)
        inputs = look_at(paths, *rest)
        if when.startswith("before") and len(looks) == 1:
            write_numbers(source, 7, 8, 9, at=LONG_AGO + 10**7)
        return inputs

    with monkeypatch.context() as patched:
        patched.setattr(identity, "look_at", look_and_change)
        one = convert(spark.read.parquet(str(source)))
    assert len(looks) == 2
    changed = convert(spark.read.parquet(str(source)))
    assert rows_in(changed) == [(7, 14), (8, 16), (9, 18)]
    # The first state again, which is what the first look saw.
    write_numbers(source, 1, 2, 3)
    restored = convert(spark.read.parquet(str(source)))
    assert rows_in(restored) == [(1, 2), (2, 4), (3, 6)]
    assert len({one.url, changed.url, restored.url}) == 3


@pytest.mark.parametrize("exchanged", ["link", "link of a link", "link of a file", "source", "part=1", "part=1/of=2"])
def test_files_that_others_take_the_place_of_while_they_are_written_prove_nothing(
    spark: SparkSession, tmp_path: Path, convert: Convert, monkeypatch: pytest.MonkeyPatch, exchanged: str
) -> None:
    """Afterwards they are where they were, and as they were."""
    leaf = Path("part=1/of=2/by=3")
    for name, numbers in (("source", (1, 2, 3)), ("other", (7, 8, 9))):
        (tmp_path / name / leaf.parent).mkdir(parents=True)
        write_numbers(tmp_path / name / leaf, *numbers)
    link, second, way = tmp_path / "link", tmp_path / "second", tmp_path / "source"
    if exchanged.startswith("link of a file"):
        way = link
        (link / leaf).mkdir(parents=True)
        link, (file,) = link / leaf / "part-0.parquet", (tmp_path / "source" / leaf).iterdir()
        link.symlink_to(file)
    elif exchanged.startswith("link"):
        link.symlink_to("source")
        second.symlink_to(link)
        way = second if exchanged.endswith("of a link") else link

    def exchange(target: str) -> None:
        if exchanged.startswith("link"):
            link.unlink()
            link.symlink_to((tmp_path / target / leaf / "part-0.parquet") if exchanged.endswith("file") else target)
            return
        folder = "" if exchanged == "source" else exchanged
        one, other = tmp_path / "source" / folder, tmp_path / "other" / folder
        one.rename(tmp_path / "aside")
        other.rename(one)
        (tmp_path / "aside").rename(other)

    looks, look_at = [], identity.look_at

    def look_and_exchange(*given: Any) -> Any:
        looks.append(given)
        if len(looks) == 2:
            exchange("source")
        inputs = look_at(*given)
        if len(looks) == 1:
            exchange("other")
        return inputs

    def frame() -> DataFrame:
        return spark.read.parquet(str(way)).select("id", "twice")

    with monkeypatch.context() as patched:
        patched.setattr(identity, "look_at", look_and_exchange)
        one = convert(frame())
    assert len(looks) == 2
    assert rows_in(one) == [(7, 14), (8, 16), (9, 18)]
    two, three = (convert(frame()) for _ in range(2))
    assert rows_in(two) == [(1, 2), (2, 4), (3, 6)] == truth(frame())
    assert one.url != two.url == three.url


@pytest.mark.parametrize(
    ("kind", "text", "before", "after"),
    [
        ("csv", "1;2,3;4\n5;6,7;8\n", {"sep": ","}, {"sep": ";"}),
        ("csv", "1,2\n3,4\n", {"header": False}, {"header": True}),
        ("csv", "1,2\n3,4\n", {"nullValue": "9"}, {"nullValue": "4"}),
        ("json", '{"a": "1", "b": "x"}\n{"a": "2", "b": 3}\n', {}, {"dropFieldIfAllNull": True, "lineSep": "}\n"}),
    ],
    ids=["sep", "header", "null", "json"],
)
def test_other_options_of_a_reader_are_other_rows(
    spark: SparkSession, tmp_path: Path, convert: Convert, kind: str, text: str, before: Any, after: Any
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / f"rows.{kind}").write_text(text)
    age(tmp_path / "source")

    def frame(options: Any) -> DataFrame:
        reader = spark.read.format(kind).schema("a string, b string").options(**options)
        return reader.load(str(tmp_path / "source")).fillna("none")

    check_never_stale(convert, lambda: frame(before), lambda: None, after=lambda: frame(after))


def test_a_table_is_read_again_after_an_insert(spark: SparkSession, tmp_path: Path, convert: Convert) -> None:
    warehouse = Path(spark.conf.get("spark.sql.warehouse.dir").removeprefix("file:")) / "numbers"
    spark.sql("CREATE TABLE numbers USING parquet AS SELECT id FROM range(0, 3, 1, 1)")
    try:
        age(warehouse)

        def insert() -> None:
            spark.sql("INSERT INTO numbers SELECT id + 100 FROM range(0, 3, 1, 1)")
            age(warehouse)

        check_never_stale(convert, lambda: spark.table("numbers").orderBy("id"), insert)
    finally:
        spark.sql("DROP TABLE numbers")


def test_a_folder_that_a_frame_knows_from_two_times_is_told_from_itself(
    spark: SparkSession, tmp_path: Path, convert: Convert
) -> None:
    source = tmp_path / "source"
    write_numbers(source, 1, 2)
    old = spark.read.parquet(str(source))
    write_numbers(source, 3, name="part-1.parquet")
    new, again = (spark.read.parquet(str(source)) for _ in range(2))
    # Spark takes all three for one plan.
    frames = [old.unionAll(new), again.unionAll(new), old.unionAll(again)]
    made = [convert(frame) for frame in frames]
    assert [sorted(rows_in(converter)) for converter in made] == [sorted(truth(frame)) for frame in frames]
    assert made[0].url == made[2].url != made[1].url


def test_a_file_that_is_read_twice_is_other_rows(spark: SparkSession, tmp_path: Path, convert: Convert) -> None:
    # Spark takes the two for one plan, and tells the same files.
    one, two = (str(write_numbers(tmp_path / name, 1, 2, 3)) for name in ("one", "two"))
    for paths in ([one, two], [one, one, two], [one, two, two]):
        frame = spark.read.parquet(*paths)
        assert sorted(rows_in(convert(frame))) == sorted(truth(frame))


@pytest.fixture
def partitioned(spark: SparkSession, tmp_path: Path) -> Iterator[str]:
    """A table in the catalog with two partitions, by its name."""
    for value in (1, 2):
        (tmp_path / "table").mkdir(exist_ok=True)
        write_numbers(tmp_path / "table" / f"p={value}", 10 * value, 10 * value + 1)
    name = f"partitioned_{uuid.uuid4().hex}"
    columns = "(id BIGINT, twice BIGINT, p INT)"
    spark.sql(f"CREATE TABLE {name} {columns} USING parquet PARTITIONED BY (p) LOCATION '{tmp_path}/table'")
    spark.sql(f"MSCK REPAIR TABLE {name}")
    yield name
    spark.sql(f"DROP TABLE {name}")


@pytest.mark.parametrize("how", ["renamed", "exchanged", "added again"])
def test_files_that_a_catalog_gives_other_values_are_other_rows(
    spark: SparkSession, tmp_path: Path, convert: Convert, partitioned: str, how: str
) -> None:
    def change() -> None:
        change_table = f"ALTER TABLE {partitioned}"
        if how == "renamed":
            spark.sql(f"{change_table} PARTITION (p=1) RENAME TO PARTITION (p=7)")
        elif how == "exchanged":
            for value, other in ((1, 2), (2, 1)):
                spark.sql(f"{change_table} PARTITION (p={value}) SET LOCATION '{tmp_path}/table/p={other}'")
        else:
            spark.sql(f"{change_table} DROP PARTITION (p=1)")
            spark.sql(f"{change_table} ADD PARTITION (p=5) LOCATION '{tmp_path}/table/p=1'")

    # Spark tells the same files before and after.
    check_never_stale(convert, lambda: spark.table(partitioned).where("p > 0").orderBy("id"), change, is_reused=False)


def test_partitions_that_spark_answers_for_from_their_names_are_no_proof(
    spark: SparkSession, convert: Convert, partitioned: str, tmp_path: Path, changed_conf: Callable[[str, str], None]
) -> None:
    changed_conf("spark.sql.optimizer.metadataOnly", "true")

    def frame() -> DataFrame:
        return spark.table(partitioned).where("p = 1").crossJoin(spark.table(partitioned).agg(F.max("p").alias("last")))

    def change() -> None:
        write_numbers(tmp_path / "table" / "p=9", 90)
        spark.sql(f"ALTER TABLE {partitioned} ADD PARTITION (p=9)")

    check_never_stale(convert, lambda: frame().orderBy("id"), change, is_reused=False)


def test_names_of_folders_that_were_read_in_another_time_zone_are_other_rows(
    spark: SparkSession, tmp_path: Path, convert: Convert, changed_conf: Callable[[str, str], None]
) -> None:
    (tmp_path / "times").mkdir()
    write_numbers(tmp_path / "times" / "at=2020-01-01 00%3A00%3A00", 1, 2)

    def made_in(zone: str) -> DataFrame:
        changed_conf("spark.sql.session.timeZone", zone)
        frame = spark.read.parquet(str(tmp_path / "times")).selectExpr("id", "unix_micros(at) AS at").orderBy("id")
        changed_conf("spark.sql.session.timeZone", "UTC")
        return frame

    frames = [made_in(zone) for zone in ("UTC", "Asia/Tokyo")]
    one, other, again = (convert(frame) for frame in [*frames, made_in("UTC")])
    assert one.url == again.url != other.url
    assert [rows_in(converter) for converter in (one, other)] == [truth(frame) for frame in frames]


@pytest.mark.parametrize("kind", ["csv", "orc"])
def test_times_that_were_read_in_another_zone_of_the_jvm_are_other_rows(
    spark: SparkSession, tmp_path: Path, convert: Convert, kind: str
) -> None:
    time_of = {"csv": "'2020-01-01 00:00:00'", "orc": "timestamp'2020-01-01 00:00:00'"}
    spark.range(0, 1, 1, 1).selectExpr(f"{time_of[kind]} AS at").write.format(kind).save(str(tmp_path / "times"))
    age(tmp_path / "times")
    zones, before = spark._jvm.java.util.TimeZone, spark.conf.get("spark.sql.session.timeZone")
    held = zones.getDefault()
    if kind == "csv":
        # Readers of ORC ask the JVM even if the session has a zone.
        spark.conf.unset("spark.sql.session.timeZone")
    try:
        check_never_stale(
            convert,
            lambda: (
                spark.read.schema("at timestamp")
                .format(kind)
                .load(str(tmp_path / "times"))
                .selectExpr("unix_micros(at) AS at")
            ),
            lambda: zones.setDefault(zones.getTimeZone("Asia/Tokyo")),
        )
    finally:
        zones.setDefault(held)
        spark.conf.set("spark.sql.session.timeZone", before)


def test_what_the_language_of_the_jvm_decides_is_other_rows(spark: SparkSession, convert: Convert) -> None:
    locales = spark._jvm.java.util.Locale
    held = locales.getDefault()
    try:
        check_never_stale(
            convert,
            lambda: spark.range(0, 3, 1, 1).selectExpr("id", "upper(concat('éi', id)) AS text"),
            lambda: locales.setDefault(locales.forLanguageTag("tr-TR")),
        )
    finally:
        locales.setDefault(held)


@pytest.mark.parametrize("key", [None, "a key"])
@pytest.mark.parametrize("seed", [None, 5])
def test_rows_that_were_cached_under_other_names_are_not_those_of_now(
    spark: SparkSession, tmp_path: Path, convert: Convert, key: str | None, seed: int | None
) -> None:
    def write_structs(*numbers: int) -> None:
        table = pa.table({"pair": [{"id": one, "twice": 2 * one} for one in numbers]})
        pq.write_table(table, tmp_path / "pairs.parquet")

    write_structs(1, 2, 3)
    # As columns are converted: each member is one, under a name of our own.
    cached = spark.read.parquet(str(tmp_path / "pairs.parquet")).select("pair.*").cache()
    assert cached.count() == 3
    try:
        write_structs(7, 8, 9)
        df = spark.read.parquet(str(tmp_path / "pairs.parquet"))
        expected = [tuple(row.pair) for row in df.collect()]
        assert sorted(rows_in(convert(df, cache_key=key, shuffle_rows_seed=seed))) == expected
        assert expected == [(7, 14), (8, 16), (9, 18)]
    finally:
        cached.unpersist(blocking=True)


def test_a_view_of_another_session_is_read_with_its_confs(
    spark: SparkSession, tmp_path: Path, convert: Convert
) -> None:
    (tmp_path / "times.csv").write_text("2020-01-01 00:00:00\n")
    os.utime(tmp_path / "times.csv", ns=(LONG_AGO, LONG_AGO))
    other, view = spark.newSession(), f"times_{uuid.uuid4().hex}"
    other.read.schema("at timestamp").csv(str(tmp_path / "times.csv")).createGlobalTempView(view)
    frame = spark.table(f"global_temp.{view}").select(F.unix_micros("at").alias("at"))
    for zone in ("UTC", "Asia/Tokyo"):
        other.conf.set("spark.sql.session.timeZone", zone)
        assert rows_in(convert(frame)) == truth(frame)
    spark.catalog.dropGlobalTempView(view)


def test_when_a_file_was_written_is_no_proof(spark: SparkSession, tmp_path: Path, convert: Convert) -> None:
    def frame() -> DataFrame:
        times = spark.read.parquet(str(tmp_path / "source"))
        return times.selectExpr("id", "unix_micros(_metadata.file_modification_time) AS at").orderBy("id")

    write_numbers(tmp_path / "source", 1, 2)
    held = frame()
    # As long as it was.
    write_numbers(tmp_path / "source", 1, 2, at=LONG_AGO + 10**9)
    assert rows_in(convert(held)) == truth(held)
    assert rows_in(convert(frame())) == truth(frame()) != truth(held)


def test_what_petastorms_converter_compares_has_the_names_of_folders_and_no_times_of_files(
    spark: SparkSession, tmp_path: Path, partitioned: str, changed_conf: Callable[[str, str], None]
) -> None:
    (tmp_path / "times").mkdir()
    write_numbers(tmp_path / "times" / "at=2020-01-01 00%3A00%3A00", 1, 2)
    frames = []
    for zone in ("UTC", "Asia/Tokyo", "UTC"):
        changed_conf("spark.sql.session.timeZone", zone)
        frames.append(spark.read.parquet(str(tmp_path / "times")))
    found = [identity.inputs_of(frame) for frame in frames]
    assert found[0] == found[2] != found[1]
    assert None not in found
    times = spark.read.parquet(str(tmp_path / "times")).select("_metadata.file_modification_time")
    assert identity.inputs_of(times) is None
    assert identity.inputs_of(spark.table(partitioned).where("p > 0")) is None
    assert identity.inputs_of(spark.range(3).where("id > 1")) == identity.inputs_of(spark.range(3)) is not None
    for moment in ("current_date()", "cast(' Today' AS date)", "unix_timestamp()"):
        assert identity.inputs_of(spark.range(3).selectExpr(moment)) is None, moment


# Plans -----------------------------------------------------------------------


def test_renamed_columns_are_other_rows(spark: SparkSession, tmp_path: Path, convert: Convert) -> None:
    write_numbers(tmp_path / "source", 1, 2, 3)

    def frame(*names: str) -> DataFrame:
        return spark.read.parquet(str(tmp_path / "source")).toDF(*names)

    for names in (("x", "y"), ("twice", "id")):
        check_never_stale(convert, lambda: frame("id", "twice"), lambda: None, after=lambda names=names: frame(*names))
        assert convert(frame(*names)).schema.names == names


def test_columns_that_trade_places_are_other_rows(spark: SparkSession, tmp_path: Path, convert: Convert) -> None:
    write_numbers(tmp_path / "source", 1, 2, 3)

    def frame(first: str, second: str) -> DataFrame:
        return spark.read.parquet(str(tmp_path / "source")).select(F.col(first).alias("x"), F.col(second).alias("y"))

    check_never_stale(convert, lambda: frame("id", "twice"), lambda: None, after=lambda: frame("twice", "id"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("1", "2"),
        ("'a'", "'b'"),
        ("concat('a', 'b, c', string(id))", "concat('a, b', 'c', string(id))"),
        ("concat(string(id), '1')", "concat(string(id), 1.0D)"),
        ("split_part('a, b.c', '.', int(id % 2 + 1))", "split_part('a.b, c', '.', int(id % 2 + 1))"),
        ("string(id) IN ('1, 2', '3')", "string(id) IN ('1', '2, 3')"),
        ("nullif('3', string(id)) IS NULL", "nullif(3L, id - 1) IS NULL"),
    ],
    ids=["number", "string", "commas", "type", "folded", "in", "null"],
)
def test_another_literal_is_other_rows(
    spark: SparkSession, tmp_path: Path, convert: Convert, before: str, after: str
) -> None:
    write_numbers(tmp_path / "source", 1, 2, 3)

    def frame(value: str) -> DataFrame:
        return spark.read.parquet(str(tmp_path / "source")).select("id", F.expr(value).alias("value"))

    check_never_stale(convert, lambda: frame(before), lambda: None, after=lambda: frame(after))


@pytest.mark.parametrize("is_held", [False, True], ids=["made anew", "held"])
@pytest.mark.parametrize(
    "sql",
    [
        "rand()",
        "uuid()",
        "shuffle(array(1, 2, 3, 4, 5, 6, 7, 8, 9))",
        "current_timestamp()",
        "localtimestamp()",
        "cast('now' as timestamp)",
        "hash(now())",
        "reflect('java.lang.System', 'nanoTime')",
    ],
)
def test_what_differs_each_time_is_written_each_time(
    spark: SparkSession, convert: Convert, sql: str, is_held: bool
) -> None:
    def frame() -> DataFrame:
        return spark.range(0, 50, 1, 2).select("id", F.expr(sql).alias("value"))

    held = frame()
    one, two = (convert(held if is_held else frame()) for _ in range(2))
    assert one.url != two.url
    # A held plan has drawn its seed already.
    if not is_held or not sql.startswith(("rand", "uuid", "shuffle")):
        assert rows_in(one) != rows_in(two)


@pytest.mark.parametrize("is_held", [False, True], ids=["made anew", "held"])
@pytest.mark.parametrize("rows", ["VALUES (1), (2) AS t(id)", "range(2)"])
@pytest.mark.parametrize(
    "sql",
    [
        "SELECT id, unix_micros(now()) AS x FROM {rows}",
        "SELECT id, unix_micros(cast('now' AS timestamp)) AS x FROM {rows}",
        "SELECT id, hash(reflect('java.lang.System', 'nanoTime')) AS x FROM {rows}",
        "SELECT id FROM {rows} WHERE unix_micros(now()) > id",
        "SELECT id FROM {rows} WHERE id NOT IN (SELECT unix_micros(now()) + id FROM {rows})",
        "SELECT id, second(cast('\\tnow' AS timestamp)) AS x FROM {rows}",
        "SELECT id FROM {rows} WHERE crc32(aes_encrypt('x', '0000111122223333')) % 2 < 9",
        # The same again in a minute, and another time when it is written.
        "SELECT id, second(localtimestamp()) AS x FROM {rows}",
    ],
)
def test_what_spark_computes_while_it_optimizes_is_written_each_time(
    spark: SparkSession, convert: Convert, sql: str, rows: str, is_held: bool
) -> None:
    held = spark.sql(sql.replace("{rows}", rows))
    one, two = (convert(held if is_held else spark.sql(sql.replace("{rows}", rows))) for _ in range(2))
    assert one.url != two.url


def test_expressions_that_spark_does_not_show_are_no_proof(spark: SparkSession, convert: Convert) -> None:
    """In the JSON of a plan they are null."""
    ids = [F.col("id"), F.unix_micros(F.current_timestamp()).alias("now")]
    one, two = (
        convert(spark.range(3).withColumn("a", F.lit(1)).unpivot(ids, ["a"], "name", "value")) for _ in range(2)
    )
    assert one.url != two.url


def test_a_random_source_in_a_union_is_written_each_time(spark: SparkSession, convert: Convert) -> None:
    def frame() -> DataFrame:
        return spark.range(5).select(F.lit(0.5).alias("x")).unionAll(spark.range(50).select(F.rand().alias("x")))

    one, two = convert(frame()), convert(frame())
    assert one.url != two.url
    assert rows_in(one) != rows_in(two)


def test_a_redefined_view_is_read_again(spark: SparkSession, tmp_path: Path, convert: Convert) -> None:
    write_numbers(tmp_path / "one", 1, 2, 3)
    write_numbers(tmp_path / "two", 7, 8, 9)
    try:
        spark.read.parquet(str(tmp_path / "one")).createOrReplaceTempView("numbers")
        check_never_stale(
            convert,
            lambda: spark.sql("SELECT id FROM numbers"),
            lambda: spark.read.parquet(str(tmp_path / "two")).createOrReplaceTempView("numbers"),
        )
        spark.createDataFrame(pa.table({"id": [4, 5]})).createOrReplaceTempView("numbers")
        check_never_stale(
            convert,
            lambda: spark.table("numbers"),
            lambda: spark.createDataFrame(pa.table({"id": [5, 4]})).createOrReplaceTempView("numbers"),
        )
    finally:
        spark.catalog.dropTempView("numbers")


@pytest.mark.parametrize("place", ["alone", "in a union", "over a file", "mapInArrow"])
def test_a_python_function_is_never_trusted(spark: SparkSession, tmp_path: Path, convert: Convert, place: str) -> None:
    source = tmp_path / "source"
    write_numbers(source, 1, 2, 3)
    secret = tmp_path / "secret"
    secret.write_text("1")

    # They read a file that no plan names. No annotations: PySpark would look for a kind of pandas UDF in them.
    def plus_secret(number):  # type: ignore[no-untyped-def]
        return number + int(secret.read_text())

    def map_batches(batches):  # type: ignore[no-untyped-def]
        for batch in batches:
            number = int(secret.read_text())
            yield pa.record_batch([pa.array([one + number for one in batch.column(0).to_pylist()])], names=["id"])

    function = F.udf(plus_secret, "long")

    def frame() -> DataFrame:
        rows = spark.range(0, 3, 1, 1)
        if place == "over a file":
            rows = spark.read.parquet(str(source))
        if place == "mapInArrow":
            return rows.mapInArrow(map_batches, "id long")
        changed = rows.select(function("id").alias("id"))
        return spark.range(0, 2, 1, 1).unionAll(changed) if place == "in a union" else changed

    check_never_stale(convert, frame, lambda: secret.write_text("100"), is_reused=False)
    held = frame()
    check_never_stale(convert, lambda: held, lambda: secret.write_text("7"), is_reused=False)


def test_a_plan_that_the_session_prints_short_hides_nothing(
    spark: SparkSession, tmp_path: Path, convert: Convert, changed_conf: Callable[[str, str], None]
) -> None:
    write_numbers(tmp_path / "source", 1, 2)
    aside = tmp_path / "aside"

    add = F.udf(lambda number: number + int(aside.read_text()), "long")

    def frame() -> DataFrame:
        counts = spark.read.parquet(str(tmp_path / "source")).groupBy("id", "twice").count()
        return counts.select("id", add("count").alias("sum")).orderBy("id")

    aside.write_text("1")
    for length in (100, 1000, 2000):
        changed_conf("spark.sql.maxPlanStringLength", str(length))
        check_never_stale(convert, frame, lambda length=length: aside.write_text(str(length)), is_reused=False)


def test_a_function_of_ones_own_in_the_jvm_is_no_proof(spark: SparkSession, tmp_path: Path, convert: Convert) -> None:
    spark.createDataFrame([(Vectors.dense([1.0, 2.0]),)], ["v"]).write.parquet(str(tmp_path / "source"))
    age(tmp_path / "source")
    vectors = spark.read.parquet(str(tmp_path / "source"))
    assert convert(vectors).url == convert(vectors).url
    # Spark's ML has it as one.
    arrays = vectors.select(vector_to_array("v").alias("a"))
    assert convert(arrays).url != convert(arrays).url


def test_a_redefined_python_function_is_called_again(spark: SparkSession, convert: Convert) -> None:
    def frame() -> DataFrame:
        return spark.range(0, 3, 1, 1).selectExpr("change(id) AS id")

    try:
        spark.udf.register("change", lambda number: number + 1, "long")
        check_never_stale(
            convert,
            frame,
            lambda: spark.udf.register("change", lambda number: number + 2, "long"),
            is_reused=False,
        )
    finally:
        spark.sql("DROP TEMPORARY FUNCTION change")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spark.sql.session.timeZone", "Asia/Kolkata"),
        ("spark.sql.ansi.enabled", "false"),
        ("spark.sql.caseSensitive", "true"),
        ("spark.sql.parquet.int96RebaseModeInRead", "LEGACY"),
    ],
)
def test_other_confs_may_be_other_rows(
    spark: SparkSession, tmp_path: Path, convert: Convert, changed_conf: Any, name: str, value: str
) -> None:
    write_numbers(tmp_path / "source", 1, 2, 3)

    def frame() -> DataFrame:
        rows = spark.read.parquet(str(tmp_path / "source"))
        return rows.select("id", F.hour(F.timestamp_seconds("id")).alias("hour"), F.col("twice").cast("byte"))

    check_never_stale(convert, frame, lambda: changed_conf(name, value))


def test_confs_that_spark_hides_may_be_other_rows(
    spark: SparkSession, tmp_path: Path, convert: Convert, changed_conf: Callable[[str, str], None]
) -> None:
    (tmp_path / "rows.csv").write_text("1\nx\n")
    os.utime(tmp_path / "rows.csv", ns=(LONG_AGO, LONG_AGO))
    name = "spark.sql.columnNameOfCorruptRecord"
    changed_conf(name, "bad_url")
    frame = (
        spark.read.schema("a int, bad_url string")
        .csv(str(tmp_path / "rows.csv"))
        .select(F.coalesce("a", F.lit(0)).alias("a"), F.coalesce("bad_url", F.lit("none")).alias("bad_url"))
    )
    # Spark asks for it when it reads.
    check_never_stale(convert, lambda: frame, lambda: changed_conf(name, "no_url"))


@pytest.mark.parametrize("how", ["conf", "option"])
def test_files_that_may_be_left_out_are_no_proof(
    spark: SparkSession, tmp_path: Path, convert: Convert, changed_conf: Callable[[str, str], None], how: str
) -> None:
    write_numbers(tmp_path / "source", 1, 2)
    reader = spark.read
    if how == "conf":
        changed_conf("spark.sql.files.ignoreMissingFiles", "true")
    else:
        reader = reader.option("ignoreCorruptFiles", "true")
    one, two = (convert(reader.parquet(str(tmp_path / "source"))) for _ in range(2))
    assert one.url != two.url


def test_a_link_to_another_file_of_the_same_times_is_other_rows(
    spark: SparkSession, tmp_path: Path, convert: Convert, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, number in (("a", 1), ("b", 2)):
        write_numbers(tmp_path / name, number, name="rows.parquet")
    (tmp_path / "current").symlink_to(tmp_path / "a")
    stat = os.stat

    def stat_of_one_tick(path: Any, **options: Any) -> Any:
        found = stat(path, **options)
        same = {"st_ctime_ns": LONG_AGO}
        return SimpleNamespace(
            **{name: getattr(found, name) for name in ("st_size", "st_mtime_ns", "st_dev", "st_ino")} | same
        )

    def relink() -> None:
        (tmp_path / "current").unlink()
        (tmp_path / "current").symlink_to(tmp_path / "b")

    monkeypatch.setattr(input_files, "os", SimpleNamespace(stat=stat_of_one_tick))
    monkeypatch.setattr(input_files, "_ways_to", lambda *_: {})
    check_never_stale(convert, lambda: spark.read.parquet(str(tmp_path / "current")), relink)


def test_other_confs_of_hadoop_may_be_other_rows(spark: SparkSession, tmp_path: Path, convert: Convert) -> None:
    spark.range(0, 3, 1, 1).write.orc(str(tmp_path / "source"))
    age(tmp_path / "source")
    hadoop, name = spark.sparkContext._jsc.hadoopConfiguration(), "orc.force.positional.evolution"
    try:
        # The column is read by its name, and then by its place.
        check_never_stale(
            convert,
            lambda: spark.read.schema("id bigint").orc(str(tmp_path / "source")),
            lambda: hadoop.set(name, "true"),
        )
    finally:
        hadoop.unset(name)


def test_confs_that_change_while_rows_are_written_prove_nothing(
    spark: SparkSession, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_numbers(tmp_path / "source", 1, 2, 3)
    name, looks, look_at = "spark.sql.parquet.int96RebaseModeInRead", [], identity.look_at

    def convert() -> DatasetConverter:
        return make_spark_converter(spark.read.parquet(str(tmp_path / "source")), cache_dir=cache_dir)

    def look_and_change(paths: list[str], *rest: Any) -> Any:
        looks.append(paths)
        if len(looks) == 2:
            spark.conf.set(name, "LEGACY")
        return look_at(paths, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(identity, "look_at", look_and_change)
        one = convert()
    assert len(looks) == 2
    # As it was at the first look.
    spark.conf.unset(name)
    with one, convert() as two, convert() as three:
        assert one.url != two.url == three.url


def test_threads_that_convert_at_once_leave_the_session_and_the_output_as_they_were(
    spark: SparkSession, cache_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before, output = settings(spark), sys.stdout

    def convert(number: int) -> list[tuple[Any, ...]]:
        # One column that Spark hands to Python in small batches, and one that it does not.
        df = spark.range(number).select("id", F.array(F.lit(0.5)).alias("x")) if number % 2 else spark.range(number)
        with make_spark_converter(df, cache_dir=cache_dir) as converter:
            return rows_in(converter)

    with ThreadPoolExecutor(3) as threads:
        for number, rows in enumerate(threads.map(convert, range(1, 13)), 1):
            print("told")
            assert [id_ for id_, *_ in rows] == list(range(number))
    assert settings(spark) == before
    assert sys.stdout is output
    assert capfd.readouterr().out == "told\n" * 12


@pytest.mark.parametrize("above", [False, True], ids=["itself", "below"])
def test_a_cached_plan_is_what_spark_says_it_is(
    spark: SparkSession, tmp_path: Path, convert: Convert, above: bool
) -> None:
    source = tmp_path / "source"
    write_numbers(source, 1, 2, 3)

    def frame() -> DataFrame:
        df = spark.read.parquet(str(source))
        return df.where("id < 1000").select("twice") if above else df

    uncached = convert(frame())
    cached = spark.read.parquet(str(source)).cache()
    try:
        assert cached.count() == 3
        write_numbers(source, 7, 8, 9, at=LONG_AGO + 10**7)
        first = convert(frame())
        assert rows_in(first) == truth(frame()) == rows_in(uncached)
    finally:
        cached.unpersist(blocking=True)
    check_never_stale(convert, frame, lambda: write_numbers(source, 4, 5, 6, at=LONG_AGO + 2 * 10**7))
    assert first.url != uncached.url


def test_a_held_frame_that_is_cached_later_is_what_spark_says(
    spark: SparkSession, tmp_path: Path, convert: Convert
) -> None:
    write_numbers(tmp_path / "source", 1, 2, 3)
    df = spark.read.parquet(str(tmp_path / "source"))
    convert(df)
    df.cache()
    try:
        df.count()
        write_numbers(tmp_path / "source", 7, 8, 9, at=LONG_AGO + 10**7)
        assert rows_in(convert(df)) == truth(df)
    finally:
        df.unpersist(blocking=True)
    assert rows_in(convert(df)) == truth(df) == [(7, 14), (8, 16), (9, 18)]


class NumbersSource(DataSource):
    """A Python data source of the numbers in the file that its option `path` names."""

    @classmethod
    def name(cls) -> str:
        return "numbers_of_a_file"

    def schema(self) -> str:
        return "id long"

    def reader(self, schema: Any) -> DataSourceReader:
        path = self.options["path"]

        class NumbersReader(DataSourceReader):
            def read(self, partition: Any) -> Iterator[tuple[int]]:
                with open(path, encoding="utf-8") as file:
                    for line in file:
                        yield (int(line),)

        return NumbersReader()


def test_a_python_data_source_is_never_trusted(spark: SparkSession, tmp_path: Path, convert: Convert) -> None:
    from pyspark import cloudpickle as untyped_cloudpickle

    cloudpickle: Any = untyped_cloudpickle
    path = tmp_path / "numbers.txt"
    path.write_text("1\n2\n")
    os.utime(path, ns=(LONG_AGO, LONG_AGO))
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        spark.dataSource.register(NumbersSource)
        check_never_stale(
            convert,
            lambda: spark.read.format("numbers_of_a_file").options(path=str(path)).load(),
            lambda: path.write_text("8\n9\n"),
            is_reused=False,
        )
    finally:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.mark.short
def test_lists_of_other_values_are_other_rows(spark: SparkSession, convert: Convert) -> None:
    values = [(1, "a"), (2, "b")]
    check_never_stale(
        convert,
        lambda: spark.createDataFrame(values, "x long, y string"),
        lambda: values.append((3, "c")),
        is_reused=None,
    )


@pytest.mark.short
def test_rows_that_a_users_function_makes_are_never_used_again(spark: SparkSession, convert: Convert) -> None:
    numbers = spark.sparkContext.parallelize([1, 2, 3], 1)
    for frame in (
        numbers.map(lambda _: (random.random(),)).toDF("x double"),
        spark.createDataFrame(numbers.map(lambda _: (random.random(),)), "x double"),
        spark.range(3).rdd.map(lambda _: (random.random(),)).toDF("x double"),
        numbers.map(lambda _: (random.random(),)).toDF("x double").crossJoin(spark.createDataFrame([(1,)], "y int")),
        spark.range(3).select(F.rand()).localCheckpoint(eager=False),
    ):
        assert convert(frame).url != convert(frame).url


# Used again ------------------------------------------------------------------


def local_frames(spark: SparkSession) -> dict[str, Callable[[int], DataFrame]]:
    """Frames whose rows are in the plan, of values that an argument moves."""
    return {
        "range": lambda more: spark.range(0, 30 + more, 1, 2),
        "arrow": lambda more: spark.createDataFrame(pa.table({"id": [1, 2, 3 + more], "x": ["a", "b", "c"]})),
        "pandas": lambda more: spark.createDataFrame(pd.DataFrame({"id": [1, 2, 3 + more], "x": [0.5, 1.5, 2.5]})),
        "values": lambda more: spark.sql(f"SELECT * FROM VALUES (1, 2.5D), (2, {more}D) AS t(id, x)"),
    }


@pytest.mark.parametrize("kind", ["range", "arrow", "pandas", "values"])
def test_rows_in_the_plan_are_used_again_and_other_ones_are_not(
    spark: SparkSession, convert: Convert, changed_conf: Any, kind: str
) -> None:
    changed_conf("spark.sql.execution.arrow.pyspark.enabled", "true")
    frame = local_frames(spark)[kind]
    check_never_stale(convert, lambda: frame(0), lambda: None, after=lambda: frame(1))


def test_a_held_list_is_used_again(spark: SparkSession, convert: Convert) -> None:
    values = [(index, index / 4) for index in range(50)]
    df = spark.createDataFrame(values, "x long, y double")
    one = convert(df)
    assert convert(df).url == one.url
    assert convert(df.select("*")).url == one.url
    less = convert(df.where("x > 10"))
    assert less.url != one.url
    assert convert(df.where("x > 10")).url == less.url
    assert convert(df.withColumnRenamed("y", "z")).url != one.url
    joined = df.join(spark.createDataFrame([(1, 7)], "x long, z long"), "x")
    assert convert(joined).url == convert(joined).url
    # Spark has its own copy: what becomes of the list is not seen.
    values.append((50, 0.0))
    again = convert(df)
    assert again.url == one.url
    assert rows_in(again) == values[:-1]
    # Equal values sent once more are another list.
    assert convert(spark.createDataFrame(values[:-1], "x long, y double")).url != one.url


@pytest.mark.parametrize("is_held", [False, True], ids=["made anew", "held"])
def test_the_same_rows_are_written_once(
    spark: SparkSession, tmp_path: Path, convert: Convert, caplog: pytest.LogCaptureFixture, is_held: bool
) -> None:
    write_numbers(tmp_path / "source", 1, 2, 3)
    write_numbers(tmp_path / "source", 4, 5, name="part-1.parquet")

    def frame() -> DataFrame:
        return spark.read.parquet(str(tmp_path / "source")).select("id", (F.col("twice") / 4).alias("half"))

    held = frame()
    one = convert(held)
    files = sorted(folder_of(one).glob("data-*/*"))
    before = [path.stat().st_mtime_ns for path in files]
    with caplog.at_level(logging.INFO, logger="converter"):
        two = convert(held if is_held else frame())
    assert two.url == one.url
    reuses = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Reuse")]
    assert reuses == [f"Reuse {one.url}: it holds the same rows."]
    assert not [record for record in caplog.records if "becomes float32" in record.getMessage()]
    assert [path.stat().st_mtime_ns for path in sorted(folder_of(one).glob("data-*/*"))] == before
    assert sorted(rows_in(two)) == sorted(rows_in(one)) == [(n, n / 2) for n in range(1, 6)]
    assert two.fingerprint == one.fingerprint


@pytest.mark.parametrize(
    "options",
    [
        {"float_dtype": "float64"}, {"row_group_bytes": 4096}, {"compression": "zstd"}, {"shuffle_rows_seed": 3},
        {"writer": "spark"}, {"shapes": {"pair": (2, 1)}},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
@pytest.mark.short
def test_other_write_options_are_another_entry(spark: SparkSession, convert: Convert, options: Any) -> None:
    df = spark.range(0, 9, 1, 2).select("id", F.array("id", "id").alias("pair"))
    one, two, three = convert(df), convert(df, **options), convert(df, **options)
    assert one.url != two.url
    assert two.url == three.url


def test_another_cache_directory_is_another_entry(spark: SparkSession, tmp_path: Path) -> None:
    df = spark.range(5)
    with (
        make_spark_converter(df, cache_dir=tmp_path / "one") as one,
        make_spark_converter(df, cache_dir=tmp_path / "two") as two,
    ):
        assert two.url.startswith(f"file://{tmp_path}/two/")
        assert rows_in(one) == rows_in(two)


@pytest.mark.short
def test_a_reused_entry_is_gone_with_its_last_converter(spark: SparkSession, cache_dir: Path) -> None:
    one = make_spark_converter(spark.range(0, 9, 1, 2), cache_dir=cache_dir)
    two = make_spark_converter(spark.range(0, 9, 1, 2), cache_dir=cache_dir)
    assert one.url == two.url
    one.delete()
    assert not (folder_of(two) / "manifest.json").exists()
    assert rows_in(two) == [(row,) for row in range(9)]
    # Deleted is deleted: nobody new shares what only waits for its last reader.
    three = make_spark_converter(spark.range(0, 9, 1, 2), cache_dir=cache_dir)
    assert three.url != two.url
    assert rows_in(two) == rows_in(three) == [(row,) for row in range(9)]
    two.delete()
    assert not folder_of(two).exists()
    assert rows_in(three) == [(row,) for row in range(9)]
    three.delete()
    assert files_below(cache_dir) == [MARKER]
    with make_spark_converter(spark.range(0, 9, 1, 2), cache_dir=cache_dir) as four:
        assert four.url not in {one.url, three.url}
    assert files_below(cache_dir) == [MARKER]


def test_what_is_kept_is_shared_with_nobody(spark: SparkSession, cache_dir: Path) -> None:
    df = spark.range(0, 9, 1, 2)
    made = [make_spark_converter(df, cache_dir=cache_dir, delete_on_exit=keeps) for keeps in (False, True, False, True)]
    assert len({converter.url for converter in made}) == 3
    assert made[1].url == made[3].url
    made[1].delete()
    made[3].delete()
    for kept in (made[0], made[2]):
        assert rows_in(kept) == [(row,) for row in range(9)]
        kept.delete()
    assert files_below(cache_dir) == [MARKER]


def test_a_damaged_entry_is_not_used_again(
    spark: SparkSession, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    df = spark.range(0, 9, 1, 2)
    one = make_spark_converter(df, cache_dir=cache_dir)
    next(folder_of(one).glob("data-*/*.parquet")).unlink()
    with make_spark_converter(df, cache_dir=cache_dir) as two:
        assert two.url != one.url
        assert rows_in(two) == [(row,) for row in range(9)]
    assert "Write a damaged entry again" in caplog.text
    one.delete()
    assert files_below(cache_dir) == [MARKER]


# cache_key -------------------------------------------------------------------


def keep_in_another_process(cache_dir: str) -> dict[str, Any]:
    spark = start_local_spark("another", master="local[1]", conf={"spark.sql.shuffle.partitions": "1"})
    df = spark.range(0, 40, 1, 2).select("id", (F.col("id") / 8).alias("x"), F.array("id", "id").alias("pair"))
    with make_spark_converter(df, cache_dir=cache_dir, cache_key="shared", delete_on_exit=False) as converter:
        result = described(converter)
    spark.stop()
    return result


def described(converter: DatasetConverter) -> dict[str, Any]:
    return {
        "url": converter.url,
        "rows": repr(rows_in(converter)),
        "statistics": {name: repr(one) for name, one in converter.statistics.items()},
        "means": repr(converter.statistics["pair"].element_mean),
        "fingerprint": converter.fingerprint,
    }


def open_without_spark(url: str) -> dict[str, Any]:
    """What `described` says in a Python that imports neither Spark nor this module."""
    functions = "\n".join(map(inspect.getsource, (rows_in, described)))
    code = f"""from __future__ import annotations
import json, sys
import numpy as np
from converter import open_converter
{functions}
with open_converter(sys.argv[1]) as converter:
    result = described(converter)
result["modules"] = [name for name in ("pyspark", "py4j") if name in sys.modules]
print(json.dumps(result))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, url], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_a_cache_key_is_known_in_every_process(
    spark: SparkSession, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written = run_python(keep_in_another_process, str(cache_dir))
    files = files_below(cache_dir)
    opened = open_without_spark(written["url"])
    assert opened.pop("modules") == []
    assert opened == written
    # Other rows under the same name are the user's promise; the schema and the options are ours.
    other = spark.range(100, 140).select("id", (F.col("id") / 8).alias("x"), F.array("id", "id").alias("pair"))
    before = settings(spark)
    with caplog.at_level(logging.INFO, logger="converter"):
        converter = make_spark_converter(other, cache_dir=cache_dir, cache_key="shared", delete_on_exit=False)
    assert settings(spark) == before
    with converter:
        assert described(converter) == written
    assert f"Reuse {written['url']}: it holds the same rows." in caplog.messages
    assert files_below(cache_dir) == files
    converter = open_converter(written["url"])
    converter.delete()
    assert files_below(cache_dir) == [MARKER]


@pytest.mark.short
def test_a_cache_key_with_another_schema_or_options_is_a_new_entry(
    spark: SparkSession, convert: Convert, caplog: pytest.LogCaptureFixture
) -> None:
    df = spark.range(0, 5, 1, 1)
    first = convert(df, cache_key="rows")
    assert not [text for text in caplog.messages if text.startswith("cache_key=")]
    converters = [first]
    for others, (frame, options) in enumerate(
        [(df.withColumnRenamed("id", "key"), {}), (df, {"compression": "zstd"}), (df, {"float_dtype": None})], start=1
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="converter"):
            converters.append(convert(frame, cache_key="rows", **options))
        count = f"{others} {'entry' if others == 1 else 'entries'}"
        assert [text for text in caplog.messages if text.startswith("cache_key=")] == [
            f"cache_key='rows' has entries with another schema or other write options ({count}); write a new one."
        ]
    assert len({converter.url for converter in converters}) == 4
    assert convert(df, cache_key="rows").url == first.url
    assert convert(df, cache_key="others").url not in {converter.url for converter in converters}
    assert convert(df).url not in {converter.url for converter in converters}


@pytest.mark.short
def test_a_kept_entry_is_read_by_all_and_deleted_by_none(
    spark: SparkSession, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    df = spark.range(0, 9, 1, 2)
    options: dict[str, Any] = {"cache_dir": cache_dir, "cache_key": "rows"}
    with make_spark_converter(df, **options) as passing:
        # Somebody wants these rows for longer than the one lives who wrote them: they are written for him.
        with caplog.at_level(logging.INFO, logger="converter"):
            kept = make_spark_converter(df, **options, delete_on_exit=False)
        assert kept.url != passing.url
        text = "cache_key='rows' has an entry that is deleted with its converter; write one that is kept."
        assert text in caplog.messages
        caplog.clear()
        with (
            caplog.at_level(logging.INFO, logger="converter"),
            make_spark_converter(df, **options) as reading,
        ):
            assert reading.url == kept.url
        (said,) = [text for text in caplog.messages if text.startswith("Reuse")]
        assert said.endswith("It was written with delete_on_exit=False, so delete() alone removes it.")
    assert not folder_of(passing).exists()
    with make_spark_converter(df, **options, delete_on_exit=False) as again:
        assert again.url == kept.url
        assert rows_in(again) == [(row,) for row in range(9)]
    kept.delete()
    assert files_below(cache_dir) == [MARKER]


def cut(folder: Path) -> None:
    path = next(folder.glob("data-*/*.parquet"))
    path.write_bytes(path.read_bytes()[:-10])


def remove_a_file(folder: Path) -> None:
    next(folder.glob("data-*/*.parquet")).unlink()


def remove_the_data(folder: Path) -> None:
    shutil.rmtree(next(folder.glob("data-*/")))


def break_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_bytes((folder / "manifest.json").read_bytes()[:-20])


def empty_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, remove_a_file, remove_the_data, break_the_manifest, empty_the_manifest])
@pytest.mark.short
def test_a_damaged_entry_is_written_again_with_a_warning(
    spark: SparkSession, cache_dir: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    df = spark.range(0, 30, 1, 2)
    options: dict[str, Any] = {"cache_dir": cache_dir, "cache_key": "damaged", "delete_on_exit": False}
    with make_spark_converter(df, **options) as first:
        folder = folder_of(first)
    damage(folder)
    before = settings(spark)
    with make_spark_converter(df, **options) as again:
        assert rows_in(again) == [(row,) for row in range(30)]
    assert settings(spark) == before
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.getMessage().startswith("Write a damaged entry again: ")
    assert folder.name in warning.getMessage()
    # Sound again, and nothing of the damaged one is left.
    assert len(list(folder.glob("data-*/"))) == 1
    with make_spark_converter(df, **options) as last:
        assert last.url == again.url
        last.delete()
    assert files_below(cache_dir) == [MARKER]


@pytest.mark.parametrize("cache_key", [None, "kept"])
def test_a_kept_entry_stays_until_it_is_swept(spark: SparkSession, cache_dir: Path, cache_key: str | None) -> None:
    with make_spark_converter(spark.range(7), cache_dir=cache_dir, cache_key=cache_key, delete_on_exit=False) as kept:
        assert sweep(cache_dir, older_than=0).num_entries == 0
        url = kept.url
    # Another conversion cleans up behind the dead, and this one is not.
    make_spark_converter(spark.range(3), cache_dir=cache_dir).delete()
    with open_converter(url) as again:
        assert rows_in(again) == [(row,) for row in range(7)]
    report = sweep(cache_dir, older_than=0)
    assert (report.num_entries, report.num_kept) == (0, 1)
    report = sweep(cache_dir, older_than=0, kept=True, dry_run=True)
    assert (report.num_entries, report.urls) == (1, (url,))
    assert sweep(cache_dir, older_than=0, kept=True).num_entries == 1
    assert files_below(cache_dir) == [MARKER]


def test_a_kept_entry_is_opened_and_swept_by_its_name(spark: SparkSession, cache_dir: Path) -> None:
    options: dict[str, Any] = {"cache_dir": cache_dir, "cache_key": "flights-2026-11-20", "delete_on_exit": False}
    with make_spark_converter(spark.range(7), **options) as kept:
        assert kept.cache_key == "flights-2026-11-20"
    with open_converter(cache_dir, cache_key="flights-2026-11-20") as named:
        assert (named.url, named.cache_key) == (kept.url, kept.cache_key)
        assert rows_in(named) == [(row,) for row in range(7)]
        origin = named._manifest.origin
        assert (origin.application_id, origin.source) == (spark.sparkContext.applicationId, "DataFrame")
        assert dt.datetime.fromisoformat(origin.created).utcoffset() == dt.timedelta(0)
        called = named.describe()["write_options"]
        assert (called["row_group_bytes"], called["compression"], called["delete_on_exit"]) == (8 << 20, "none", False)
    # A converter that deletes at its end uses it, and leaves it.
    with make_spark_converter(spark.range(7), cache_dir=cache_dir, cache_key="flights-2026-11-20") as passing:
        assert passing.url == kept.url
    with make_spark_converter(spark.range(9), row_group_bytes=1 << 20, **options) as other:
        assert other.url != kept.url
    with pytest.raises(CacheError, match="2 entries of cache_key='flights-2026-11-20'"):
        open_converter(cache_dir, cache_key="flights-2026-11-20")
    with pytest.raises(CacheError, match="has no entry of cache_key='flights': its 2 entries have 'flights-2026-11-2"):
        open_converter(cache_dir, cache_key="flights")
    assert sweep(cache_dir, cache_key="flights-2026-11-20").num_entries == 2
    assert files_below(cache_dir) == [MARKER]


def test_a_damaged_kept_entry_stays_where_a_converter_deletes_at_its_end(
    spark: SparkSession, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"cache_dir": cache_dir, "cache_key": "flights"}
    with make_spark_converter(spark.range(7), delete_on_exit=False, **options) as kept:
        file = next(folder_of(kept).glob("data-*/part-*"))
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with make_spark_converter(spark.range(7), **options) as passing:
        assert passing.url != kept.url
        assert rows_in(passing) == [(row,) for row in range(7)]
    assert "Write a damaged entry again" in caplog.text
    # Of the same size it is used again, so it says that it must be deleted.
    file.write_bytes(content[:-8] + bytes(8))
    with open_converter(cache_dir, cache_key="flights") as damaged:
        remedy = "Delete the entry and convert again: while it is kept, it is used as it is."
        with pytest.raises(SourceChangedError, match=remedy):
            rows_in(damaged)
    file.write_bytes(content)
    with open_converter(cache_dir, cache_key="flights") as again:
        assert rows_in(again) == [(row,) for row in range(7)]
        again.delete()


# Spark Connect ---------------------------------------------------------------


def convert_twice_over_connect(folder: str) -> dict[str, Any]:
    """For each case whether it was used again before and after a change, and whether each time it was the truth."""
    os.environ |= {
        "JAVA_HOME": str(find_java_home()),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    builder: Any = SparkSession.builder.remote("local[2]")
    spark = builder.config("spark.sql.shuffle.partitions", "1").getOrCreate()
    result: dict[str, Any] = {}

    def check(name: str, frame: Frame, change: Callable[[], Any]) -> None:
        cache_dir = f"{folder}/cache-{uuid.uuid4().hex}"
        before = settings(spark)
        one = make_spark_converter(frame(), cache_dir=cache_dir)
        first = rows_in(one) == truth(frame())
        two = make_spark_converter(frame(), cache_dir=cache_dir)
        first = first and rows_in(two) == truth(frame())
        change()
        three = make_spark_converter(frame(), cache_dir=cache_dir)
        result[name] = {
            "is true": first,
            "is true afterwards": rows_in(three) == truth(frame()),
            "is used again": two.url == one.url,
            "is used again afterwards": three.url == one.url,
            "confs": settings(spark) == before,
        }
        for converter in (one, two, three):
            converter.delete()
        result[name]["left"] = files_below(cache_dir)

    def view(df: DataFrame) -> None:
        df.createOrReplaceTempView("numbers")

    root = Path(folder)
    check("range", lambda: spark.range(0, 9, 1, 2), lambda: None)

    write_numbers(root / "one", 1, 2, 3)
    write_numbers(root / "two", 7, 8, 9)
    view(spark.read.parquet(str(root / "one")))
    table = spark.table("numbers")
    check("view over files", lambda: table, lambda: view(spark.read.parquet(str(root / "two"))))

    view(spark.createDataFrame(pa.table({"id": [1, 2, 3]})))
    local = spark.table("numbers")
    check("view over local rows", lambda: local, lambda: view(spark.createDataFrame(pa.table({"id": [7, 8, 9]}))))

    (root / "three").mkdir()
    (root / "three" / "rows.csv").write_text("1;2,3;4\n5;6,7;8\n")
    age(root / "three")

    def csv(sep: str) -> DataFrame:
        return spark.read.schema("a string, b string").csv(str(root / "three"), sep=sep)

    view(csv(","))
    text = spark.table("numbers")
    check("view with read options", lambda: text, lambda: view(csv(";")))

    held = spark.read.parquet(str(root / "one")).orderBy("id")
    check("overwritten files", lambda: held, lambda: write_numbers(root / "one", 6, 7, 8, at=LONG_AGO + 10**7))
    # Whether a held frame sees a new file is Spark's affair.
    check("held, appended files", lambda: held, lambda: write_numbers(root / "one", 4, name="part-1.parquet"))
    check(
        "appended files",
        lambda: spark.read.parquet(str(root / "one")).orderBy("id"),
        lambda: write_numbers(root / "one", 5, name="part-2.parquet"),
    )
    for name, options in (("types", {}), ("types under a cache_key", {"cache_key": "numbers"})):
        view(spark.range(3).selectExpr("int(id) AS x"))
        held = spark.table("numbers")
        result[name] = [held.schema["x"].dataType.typeName()]
        for expression in ("5000000000 + id", "id + 0.75D"):
            view(spark.range(3).selectExpr(f"{expression} AS x"))
            with make_spark_converter(held, cache_dir=f"{folder}/types", **options) as converter:
                result[name].append([converter.schema["x"].dtype, *rows_in(converter)])

    def check_meanwhile(name: str, frame: Frame, change: Callable[[], Any], change_back: Callable[[], Any]) -> None:
        run_write = write.run_write

        def write_others(*arguments: Any, **options: Any) -> Any:
            # Connect asks for the rows of a name when the job begins.
            change()
            try:
                return run_write(*arguments, **options)
            finally:
                change_back()

        write.run_write = write_others
        one = make_spark_converter(frame(), cache_dir=f"{folder}/meanwhile")
        write.run_write = run_write
        two = make_spark_converter(frame(), cache_dir=f"{folder}/meanwhile")
        result[name] = {
            "are true": [rows_in(converter) == truth(frame()) for converter in (one, two)],
            "is used again": one.url == two.url,
            "views": [table.name for table in spark.catalog.listTables()],
        }
        one.delete()
        two.delete()

    view(spark.range(5))
    check_meanwhile("view", lambda: spark.table("numbers"), lambda: view(spark.range(9)), lambda: view(spark.range(5)))
    write_numbers(root / "four", 1, 2)
    check_meanwhile(
        "folder",
        lambda: spark.read.parquet(str(root / "four")),
        lambda: write_numbers(root / "four", 9, name="more.parquet"),
        (root / "four" / "more.parquet").unlink,
    )
    hours = spark.createDataFrame(pa.table({"seconds": [0, 3600]})).selectExpr(
        "hour(timestamp_seconds(seconds)) AS hour"
    )
    zone = "spark.sql.session.timeZone"
    spark.conf.set(zone, "UTC")
    check_meanwhile(
        "zone", lambda: hours, lambda: spark.conf.set(zone, "Asia/Tokyo"), lambda: spark.conf.set(zone, "UTC")
    )
    spark.conf.set(petastorm.SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, f"file://{folder}/petastorm")
    for first in (0, 100):
        view(spark.range(first, first + 5))
        # No evidence is found for it.
        written = petastorm.make_spark_converter(spark.table("numbers").limit(3))
        result[f"petastorm {first}"] = pq.read_table(written.cache_dir_url)["id"].to_pylist()
    spark.stop()
    return result


@pytest.fixture(scope="module")
def connect(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `convert_twice_over_connect` saw."""
    with only_connect_server():
        result = run_python(convert_twice_over_connect, str(tmp_path_factory.mktemp("connect")))
    return json.loads(json.dumps(result))


@pytest.mark.parametrize(
    "case",
    [
        "range", "view over files", "view over local rows", "view with read options", "appended files",
        "held, appended files", "overwritten files",
    ],
)  # fmt: skip
def test_over_connect_nothing_is_stale(connect: dict[str, Any], case: str) -> None:
    assert connect[case]["is true"]
    assert connect[case]["is true afterwards"]
    assert case.startswith("held") or not connect[case]["is used again afterwards"]
    assert connect[case]["confs"]
    assert connect[case]["left"] == [MARKER]


def test_what_has_no_key_is_written_each_time_over_connect(connect: dict[str, Any]) -> None:
    """Its server does not show what a plan computes with, nor how long it takes files to be."""
    for case in (
        "range", "view over files", "view over local rows", "view with read options", "appended files",
        "overwritten files",
    ):  # fmt: skip
        assert not connect[case]["is used again"], case


@pytest.mark.parametrize("case", ["view", "folder", "zone"])
def test_what_changes_while_it_is_written_and_changes_back_is_written_as_it_was_over_connect(
    connect: dict[str, Any], case: str
) -> None:
    assert connect[case] == {"are true": [True, True], "is used again": False, "views": ["numbers"]}


@pytest.mark.parametrize("case", ["types", "types under a cache_key"])
def test_a_view_whose_types_change_is_written_with_those_of_now_over_connect(
    connect: dict[str, Any], case: str
) -> None:
    numbers = [[5_000_000_000], [5_000_000_001], [5_000_000_002]]
    assert connect[case] == ["integer", ["int64", *numbers], ["float32", [0.75], [1.75], [2.75]]]


def test_petastorms_frame_of_a_view_that_was_replaced_is_written_anew_over_connect(connect: dict[str, Any]) -> None:
    assert (connect["petastorm 0"], connect["petastorm 100"]) == ([0, 1, 2], [100, 101, 102])
