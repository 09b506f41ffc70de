"""Standardised columns from real Spark: the numbers come from the statistics of the write, whoever writes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession

from converter import NumPy, make_parquet_converter, make_spark_converter, open_converter
from tests.folders import files_below

DELAY = np.arange(300) * 0.5 - 20


@pytest.mark.short
@pytest.mark.parametrize("writer", ["executors", "spark"])
def test_columns_arrive_standardised_in_every_framework(spark: SparkSession, tmp_path: Path, writer: str) -> None:
    df = spark.range(0, 300, 1, 3).selectExpr("id", "id * 0.5D - 20 AS delay", "array(float(id), 2f) AS pair")
    options: dict[str, Any] = {"cache_dir": tmp_path, "writer": writer, "standardize": ["delay", "pair"]}
    with make_spark_converter(df, **options) as converter:
        assert converter.schema["delay"].scale == pytest.approx((DELAY.mean(), DELAY.std()), rel=1e-6)
        expected = (DELAY - DELAY.mean()) / DELAY.std()
        np.testing.assert_allclose(converter.head(300)["delay"], expected, atol=1e-5)
        with open_converter(converter.url) as opened:
            np.testing.assert_allclose(opened.head(300)["delay"], expected, atol=1e-5)
        with converter.make_tf_dataset(batch_size=100, features=["delay"], labels="id") as dataset:
            for features, labels in dataset:
                np.testing.assert_allclose(features["delay"].numpy(), expected[labels.numpy()], atol=1e-5)
        with converter.make_torch_dataloader(batch_size=100, stack={"x": ["delay"]}) as loader:
            np.testing.assert_allclose(next(iter(loader))["x"].numpy()[:, 0], expected[:100], atol=1e-5)


@pytest.mark.short
@pytest.mark.parametrize("source", ["executors", "spark", "parquet"])
def test_doubles_around_a_large_mean_keep_their_differences(spark: SparkSession, tmp_path: Path, source: str) -> None:
    seconds = "1.7e9D + id"
    df = spark.range(0, 300, 1, 1).selectExpr(
        "id", f"{seconds} AS x", f"CAST({seconds} AS decimal(15, 2)) AS d", f"array({seconds}, 0D) AS pair"
    )
    expected = (np.arange(300) - 149.5) / np.arange(300).std()
    if source == "parquet":
        df.write.parquet(str(tmp_path / "rows"))
        converter = make_parquet_converter(tmp_path / "rows", standardize=["x", "d", "pair"])
    else:
        converter = make_spark_converter(
            df, cache_dir=tmp_path / "cache", writer=source, standardize=["x", "d", "pair"]
        )
    with converter, converter.make_batch_reader(batch_size=300, shuffle=False, stack={"both": ["x", "d"]}) as reader:
        batch = next(iter(reader))
        head = converter.head(300)
    assert {batch["both"].dtype, head["x"].dtype, head["pair"].dtype} == {np.dtype("float32")}
    for values in (head["x"], head["d"], batch["both"][:, 0], batch["both"][:, 1]):
        np.testing.assert_allclose(values, expected, atol=1e-6)
    mean, std = converter.schema["pair"].scale or (0, 0)
    np.testing.assert_allclose(head["pair"][:, 0], (np.arange(300) + 1.7e9 - mean) / std, rtol=1e-6)


def test_other_numbers_are_another_entry(spark: SparkSession, tmp_path: Path) -> None:
    df = spark.range(10).selectExpr("id * 1.0D AS x")
    urls = set()
    for standardize in (None, ["x"], {"x": (1, 2)}):
        with make_spark_converter(df, cache_dir=tmp_path, cache_key="rows", standardize=standardize) as converter:
            urls.add(converter.url.rpartition("/")[2])
    assert len(urls) == 3


def test_rows_that_are_left_out_do_not_count(spark: SparkSession, tmp_path: Path) -> None:
    good = io.BytesIO()
    np.save(good, np.zeros(2, np.float32))
    rows = [(float(row), good.getvalue() if row < 4 else b"no array") for row in range(6)]
    df = spark.createDataFrame(rows, "x double, y binary")
    decode = {"y": NumPy("float32", (2,), on_error="skip")}
    with make_spark_converter(df, cache_dir=tmp_path, decode=decode, standardize=["x"]) as converter:
        assert converter.schema["x"].scale == pytest.approx((1.5, np.arange(4).std()))
        assert converter.statistics["x"].max == 3


def test_arrays_that_turn_out_ragged_are_refused_and_leave_nothing(spark: SparkSession, tmp_path: Path) -> None:
    df = spark.range(10).selectExpr("IF(id = 3, array(1f), array(1f, 2f)) AS x")
    with pytest.raises(ValueError, match="column 'x' is float32 of shape ragged; only numbers of one shape"):
        make_spark_converter(df, cache_dir=tmp_path, standardize=["x"])
    assert [path for path in files_below(tmp_path) if not path.endswith(".owner")] == []
