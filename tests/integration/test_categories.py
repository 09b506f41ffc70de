"""Categories from real Spark: the pass that writes finds the values, whoever writes, and the key knows them.

Spark's own writer stores codes, too, where executors have Python; each task has codes of its own then.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from converter import CacheError, DatasetConverter, SourceError, make_spark_converter, open_converter
from converter.portable import packing
from converter.sources.spark import choose, reports, run, schema
from converter.sources.spark.confs import changed_confs
from tests.folders import files_below

WAYS = ("executors", "spark", "lists")

CARRIERS = ["AA", "B6", "DL", "UA", "é"]


def frame(spark: SparkSession, partitions: int = 4) -> DataFrame:
    """Rows of which each partition meets other values first; every tenth carrier is null."""
    return spark.range(0, 1000, 1, partitions).selectExpr(
        "id",
        f"IF(id % 10 = 0, NULL, element_at(array{tuple(CARRIERS)}, int((id + id div 250) % 5) + 1)) AS carrier",
        "date_add(date'2020-01-01', int(id % 3)) AS day",
        "struct(id % 7 AS number) AS place",
        "id % 2 = 0 AS flag",
    )


def expected_carrier(id_: int) -> str | None:
    return None if id_ % 10 == 0 else CARRIERS[(id_ + id_ // 250) % 5]


def check(converter: DatasetConverter, categories: tuple[str, ...] = tuple(CARRIERS)) -> None:
    assert converter.schema["carrier"].categories == categories
    with converter.make_batch_reader(batch_size=64, shuffle=True, nulls="mask") as reader:
        ids = []
        for batch in reader:
            ids += batch["id"].tolist()
            for id_, code, valid in zip(batch["id"], batch["carrier"], batch["carrier__valid"], strict=True):
                assert (categories[code] if valid else None) == expected_carrier(int(id_))
            np.testing.assert_array_equal(batch["day"], batch["id"] % 3)
            np.testing.assert_array_equal(batch["place.number"], batch["id"] % 7)
            np.testing.assert_array_equal(batch["flag"], batch["id"] % 2 == 0)
    assert sorted(ids) == list(range(1000))


NAMES = ["carrier", "day", "place.number", "flag"]


def convert(df: DataFrame, way: str, cache_dir: Path, **options: Any) -> DatasetConverter:
    """A converter that was written in this way; `lists` is what Spark's writer does where executors have no pyarrow."""
    with pytest.MonkeyPatch.context() as patched:
        if way == "lists":
            patched.setattr(run, "choose_writer", lambda *_, **__: "lists")
        return make_spark_converter(df, cache_dir=cache_dir, writer="spark" if way == "lists" else way, **options)


def data_files(converter: DatasetConverter) -> list[Path]:
    return sorted(Path(converter.url.removeprefix("file://")).glob("data-*/*"))


def stored_types(converter: DatasetConverter, column: str) -> set[str]:
    """How the files hold a column."""
    return {str(pq.read_schema(path).field(column).type) for path in data_files(converter)}


def values_of(converter: DatasetConverter, column: str) -> list[Any]:
    """The values of a column, by its codes, in the order of `id`."""
    categories = converter.schema[column].categories
    assert categories is not None
    rows = converter.head(len(converter))
    masks = rows.get(f"{column}__valid", np.ones(len(converter), np.bool_))
    found = [categories[code] if valid else None for code, valid in zip(rows[column], masks, strict=True)]
    return [found[place] for place in np.argsort(rows["id"])]


@pytest.mark.short
@pytest.mark.parametrize("way", WAYS)
def test_the_pass_that_writes_finds_the_values(spark: SparkSession, tmp_path: Path, way: str) -> None:
    with convert(frame(spark), way, tmp_path, categories=NAMES) as converter:
        check(converter)
        counts = converter.statistics["carrier"].counts
        assert counts is not None
        assert counts.tolist() == [sum(expected_carrier(id_) == carrier for id_ in range(1000)) for carrier in CARRIERS]
        with open_converter(converter.url) as opened:
            check(opened)
            assert len(opened.where([("carrier", "==", "é")])) == counts[-1]
        with converter.make_tf_dataset(batch_size=100, features=["carrier"], labels="id", nulls="mask") as dataset:
            features, _ = next(iter(dataset))
            assert features["carrier"].dtype.name == "int32"


def test_all_ways_make_the_same_rows(spark: SparkSession, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        converters = [stack.enter_context(convert(frame(spark), way, tmp_path / way, categories=NAMES)) for way in WAYS]
        heads = [converter.head(1000) for converter in converters]
        assert converters[0].schema == converters[1].schema == converters[2].schema
        assert [stored_types(converter, "carrier") for converter in converters] == [{"int32"}, {"int32"}, {"string"}]
    for name in heads[0]:
        np.testing.assert_array_equal(heads[0][name], heads[1][name])
        np.testing.assert_array_equal(heads[0][name], heads[2][name])


@pytest.mark.parametrize("way", WAYS)
def test_held_out_rows_get_the_codes_of_the_others(spark: SparkSession, tmp_path: Path, way: str) -> None:
    df = frame(spark)
    where = "" if way == "lists" else r" in row \d+ of partition \d"
    with convert(df.where("carrier <> 'B6'"), way, tmp_path, categories=["carrier"]) as train:
        known = train.schema["carrier"].categories
        assert known == ("AA", "DL", "UA", "é")
        before = files_below(tmp_path)
        with pytest.raises(SourceError, match=rf"has the value 'B6'{where}, which is none of its categories"):
            convert(df, way, tmp_path, categories={"carrier": known})
        assert set(files_below(tmp_path)) == set(before)
        with convert(df, way, tmp_path, categories={"carrier": known}, unseen="null") as held_out:
            assert held_out.schema["carrier"].categories == known
            rows = held_out.head(1000)
            for id_, code, valid in zip(rows["id"], rows["carrier"], rows["carrier__valid"], strict=True):
                carrier = expected_carrier(int(id_))
                assert (known[code] if valid else None) == (carrier if carrier in known else None)


def test_other_categories_are_another_entry(spark: SparkSession, tmp_path: Path) -> None:
    df = frame(spark)
    options: dict[str, Any] = {"cache_dir": tmp_path, "cache_key": "flights"}
    with contextlib.ExitStack() as stack:
        urls = [
            stack.enter_context(make_spark_converter(df, categories=categories, **options)).url
            for categories in (None, ["carrier"], ["carrier"], {"carrier": [*CARRIERS, "ZZ"]}, ["day", "carrier"])
        ]
    assert urls[1] == urls[2]
    assert len(set(urls)) == 4


def flat(value: Any) -> list[Any]:
    """The elements of nested lists that are not null."""
    if isinstance(value, list):
        return [element for item in value for element in flat(item)]
    return [] if value is None else [value]


def decoded(codes: Any, valid: Any, categories: tuple[Any, ...]) -> Any:
    """The values of nested arrays of codes; None where they are null."""
    if isinstance(codes, np.ndarray):
        masks = [None] * len(codes) if valid is None else valid
        return [decoded(code, mask, categories) for code, mask in zip(codes, masks, strict=True)]
    return categories[codes] if valid is None or valid else None


@pytest.mark.parametrize("writer", ["executors", "spark"])
@pytest.mark.parametrize(
    "sql",
    [
        "array_repeat(int(7 * id - 3), int(id % 3))",
        "array(date_add(date'2026-11-25', int(-id)))",
        "array(id > 2, NULL)",
        "array(array(10L - id), array(id, 1L))",
    ],
    ids=["numbers", "dates", "booleans", "arrays of arrays"],
)
def test_the_elements_of_arrays_of_any_kind_are_categories(
    spark: SparkSession, tmp_path: Path, writer: str, sql: str
) -> None:
    df = spark.range(0, 5, 1, 2).selectExpr("id", f"{sql} AS x")
    values = [row.x for row in df.orderBy("id").collect()]
    with make_spark_converter(df, cache_dir=tmp_path, writer=writer, categories=["x"]) as converter:
        categories = converter.schema["x"].categories
        assert categories == tuple(sorted(set(flat(values))))
        with open_converter(converter.url) as opened, opened.make_batch_reader(ragged="nested", nulls="mask") as reader:
            (batch,) = reader
    assert decoded(batch["x"], batch.get("x__element_valid"), categories) == values


@pytest.mark.parametrize("writer", ["executors", "spark"])
def test_the_elements_of_arrays_are_categories_too(spark: SparkSession, tmp_path: Path, writer: str) -> None:
    tags = "array('x', IF(id % 4 = 0, NULL, 'y'), concat('z', id % 3))"
    df = spark.range(0, 60, 1, 3).selectExpr("id", f"IF(id % 9 = 0, NULL, {tags}) AS tags")
    options: dict[str, Any] = {"cache_dir": tmp_path, "writer": writer}
    for categories, unseen in ((["tags"], "raise"), ({"tags": ["z1", "y"]}, "null")):
        with (
            make_spark_converter(df, categories=categories, unseen=unseen, **options) as converter,  # type: ignore[arg-type]
            open_converter(converter.url) as opened,
        ):
            known = opened.schema["tags"].categories
            assert known == (("x", "y", "z0", "z1", "z2") if unseen == "raise" else ("z1", "y"))
            rows = opened.head(60)
            for id_ in range(60):
                if id_ % 9 == 0:
                    assert not rows["tags__valid"][id_]
                    continue
                expected = ["x", None if id_ % 4 == 0 else "y", f"z{id_ % 3}"]
                codes = [known.index(tag) if tag in known else None for tag in expected]
                valid = rows["tags__element_valid"][id_]
                found = zip(rows["tags"][id_], valid, strict=True)
                assert [int(code) if is_there else None for code, is_there in found] == codes


# Spark's own writer, with Python on the way -------------------------------------


def rows_of(*partitions: list[str | None]) -> Any:
    """A function for `mapInArrow` that makes each partition of these texts; `id` counts the rows."""

    def rows(batches: Any) -> Any:
        from pyspark import TaskContext

        for _ in batches:
            pass
        partition = TaskContext.get().partitionId()
        first, texts = sum(map(len, partitions[:partition])), partitions[partition]
        ids = pa.array(range(first, first + len(texts)), pa.int64())
        yield pa.record_batch([ids, pa.array(texts, pa.string())], names=["id", "text"])

    return rows


def all_of(partitions: list[list[str | None]]) -> list[str | None]:
    return [text for texts in partitions for text in texts]


def made_of(spark: SparkSession, *partitions: list[str | None]) -> DataFrame:
    return spark.range(0, len(partitions), 1, len(partitions)).mapInArrow(rows_of(*partitions), "id long, text string")


PARTITIONS: list[list[str | None]] = [["z", "y", None, "z"], [], ["a", None, "y"], [None, None], ["m"]]


@pytest.mark.parametrize("way", WAYS)
def test_each_partition_may_have_other_values(spark: SparkSession, tmp_path: Path, way: str) -> None:
    with convert(made_of(spark, *PARTITIONS), way, tmp_path, categories=["text"]) as converter:
        assert converter.schema["text"].categories == ("a", "m", "y", "z")
        assert values_of(converter, "text") == all_of(PARTITIONS)
        counts = converter.statistics["text"].counts
        assert counts is not None
        assert counts.tolist() == [1, 1, 2, 2]
        assert converter.statistics["text"].null_count == 4
        if way == "spark":
            with open_converter(converter.url) as opened:
                assert values_of(opened, "text") == all_of(PARTITIONS)
                assert len(opened.where([("text", "in", ["y", "m"])])) == 3


def test_a_partition_in_several_files_has_one_set_of_codes(spark: SparkSession, tmp_path: Path) -> None:
    texts: list[list[str | None]] = [[f"{part} {row % 7}" for row in range(50)] for part in ("b", "a")]
    with (
        changed_confs(spark, {"spark.sql.files.maxRecordsPerFile": "20"}),
        convert(made_of(spark, *texts), "spark", tmp_path, categories=["text"]) as converter,
    ):
        assert len(data_files(converter)) == 6
        assert values_of(converter, "text") == all_of(texts)


def test_values_that_come_late_are_translated(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_FIRST_BYTES", 1)
    df = spark.range(0, 30_000, 1, 2).selectExpr("id", "concat('late ', 10 - id div 1500 % 10) AS text")
    with convert(df, "spark", tmp_path, categories=["text"]) as converter:
        assert values_of(converter, "text") == [f"late {10 - row // 1500 % 10}" for row in range(30_000)]


@pytest.mark.parametrize("way", WAYS)
def test_more_values_than_the_limit_are_refused(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    for module in ("converter.categories", reports.__name__, schema.__name__):
        monkeypatch.setattr(f"{module}.MAX_CATEGORIES", 10)
    # The first in one task, the second in both together.
    for num_values in (24, 16):
        df = spark.range(0, num_values, 1, 2).selectExpr("id", "string(id) AS text")
        with pytest.raises(SourceError, match=r"'text' has (more than 10|\d\d) different values.*Is it a key\?"):
            convert(df, way, tmp_path, categories=["text"])
    assert files_below(tmp_path) == ["converter-v1/.owner"]


def test_a_column_of_nulls_has_no_categories(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="'text' has no value but null, so it has no categories"):
        convert(made_of(spark, [None], [None, None]), "spark", tmp_path, categories=["text"])
    with pytest.raises(SourceError, match="The DataFrame has no rows"):
        convert(made_of(spark, [], []), "spark", tmp_path, categories=["text"])


def exchange_before_writing(monkeypatch: pytest.MonkeyPatch, df: DataFrame) -> None:
    """As an extension of Spark may do: rows go to other tasks once they were observed."""
    to_df = type(df).toDF
    monkeypatch.setattr(type(df), "toDF", lambda self, *names: to_df(self.repartition(2), *names))


def test_codes_that_are_lost_are_an_error(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    df = made_of(spark, ["a", "b"], ["c", "d", "e"], ["e"])
    exchange_before_writing(monkeypatch, df)
    with pytest.raises(CacheError, match=r"not each task's rows into files of its own.*pass writer='executors'"):
        convert(df, "spark", tmp_path, categories=["text"])
    assert files_below(tmp_path) == ["converter-v1/.owner"]
    with convert(df, "lists", tmp_path, categories=["text"]) as converter:
        assert values_of(converter, "text") == ["a", "b", "c", "d", "e", "e"]


def test_codes_that_mean_the_same_everywhere_may_be_exchanged(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[list[str | None]] = [["b", "a", "c"], ["a", "b"], ["a"]]
    df = made_of(spark, *texts)
    exchange_before_writing(monkeypatch, df)
    with convert(df, "spark", tmp_path, categories=["text"]) as converter:
        assert stored_types(converter, "text") == {"int32"}
        assert values_of(converter, "text") == all_of(texts)
    # Codes of given values mean the same in all tasks.
    with convert(df, "spark", tmp_path, categories={"text": ["c", "b", "a"]}) as converter:
        assert converter.schema["text"].categories == ("c", "b", "a")
        assert values_of(converter, "text") == all_of(texts)


def test_executors_without_python_keep_the_values(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choose, "pythons", {choose._application_of(spark): "they have none"})
    monkeypatch.setattr(choose, "_executors_are_this_process", lambda session: False)
    with (
        caplog.at_level("INFO", "converter"),
        convert(made_of(spark, *PARTITIONS), "spark", tmp_path, categories=["text"]) as converter,
    ):
        assert stored_types(converter, "text") == {"string"}
        assert values_of(converter, "text") == all_of(PARTITIONS)
    assert "Spark writes the values of categories, not their codes: they have none" in caplog.messages


@pytest.mark.parametrize("way", WAYS)
def test_columns_of_all_kinds_stand_beside_categories(spark: SparkSession, tmp_path: Path, way: str) -> None:
    df = spark.range(0, 9, 1, 3).selectExpr(
        "id", "IF(id = 4, NULL, id / 8) AS x", "string(9 - id) AS text", "array(id, -id) AS pair",
        "IF(id % 4 = 1, NULL, array(string(id), 'all')) AS tags", "timestamp'2026-01-01 00:00:00' AS at",
        "id % 2 = 0 AS flag", "cast(id AS decimal(9, 2)) AS price", "encode(string(id), 'utf-8') AS raw",
    )  # fmt: skip
    with convert(df, way, tmp_path, categories=["text", "tags"]) as converter:
        assert stored_types(converter, "text") == {"string" if way == "lists" else "int32"}
        assert values_of(converter, "text") == [str(9 - row) for row in range(9)]
        assert converter.schema["tags"].categories == ("0", "2", "3", "4", "6", "7", "8", "all")
        with converter.make_batch_reader(batch_size=9, nulls="mask", ragged="nested") as reader:
            (rows,) = reader
    assert rows["x__valid"].tolist() == [row != 4 for row in range(9)]
    assert rows["x"][rows["x__valid"]].tolist() == [row / 8 for row in range(9) if row != 4]
    assert rows["pair"].tolist() == [[row, -row] for row in range(9)]
    assert [len(row) for row in rows["tags"]] == [0 if row % 4 == 1 else 2 for row in range(9)]
    assert rows["flag"].tolist() == [row % 2 == 0 for row in range(9)]
    assert rows["price"].tolist() == list(range(9))
    assert rows["raw"].tolist() == [str(row).encode() for row in range(9)]
