"""Categories from real Spark: the pass that writes finds the values, whoever writes, and the key knows them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession

from converter import DatasetConverter, SourceError, make_spark_converter, open_converter
from tests.folders import files_below

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


@pytest.mark.short
@pytest.mark.parametrize("writer", ["executors", "spark"])
def test_the_pass_that_writes_finds_the_values(spark: SparkSession, tmp_path: Path, writer: str) -> None:
    with make_spark_converter(frame(spark), cache_dir=tmp_path, writer=writer, categories=NAMES) as converter:
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


def test_both_writers_make_the_same_rows(spark: SparkSession, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        converters = [
            stack.enter_context(make_spark_converter(frame(spark), cache_dir=tmp_path, writer=writer, categories=NAMES))
            for writer in ("executors", "spark")
        ]
        heads = [converter.head(1000) for converter in converters]
        assert converters[0].schema == converters[1].schema
    for name in heads[0]:
        np.testing.assert_array_equal(heads[0][name], heads[1][name])


@pytest.mark.parametrize("writer", ["executors", "spark"])
def test_held_out_rows_get_the_codes_of_the_others(spark: SparkSession, tmp_path: Path, writer: str) -> None:
    df = frame(spark)
    options: dict[str, Any] = {"cache_dir": tmp_path, "writer": writer}
    with make_spark_converter(df.where("carrier <> 'B6'"), categories=["carrier"], **options) as train:
        known = train.schema["carrier"].categories
        assert known == ("AA", "DL", "UA", "é")
        before = files_below(tmp_path)
        with pytest.raises(SourceError, match=r"has the value 'B6'.*, which is none of its categories"):
            make_spark_converter(df, categories={"carrier": known}, **options)
        assert set(files_below(tmp_path)) == set(before)
        with make_spark_converter(df, categories={"carrier": known}, unseen="null", **options) as held_out:
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
