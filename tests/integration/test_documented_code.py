"""Every ```python block of the docstrings and of the README runs, on rows of real Spark; the reference renders."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pdoc
import pdoc.render
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
import torch
from deltalake import write_deltalake
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import converter as package
from converter import DatasetConverter, make_spark_converter
from converter.petastorm.etl.dataset_metadata import write_metadata
from converter.petastorm.unischema import Unischema, UnischemaField
from tests.documented import PACKAGE, PAGES, docstring_of, python_blocks
from tests.repository import REPOSITORY

pytestmark = pytest.mark.short

RUN_ELSEWHERE = ("start_local_spark(", "converter.frameworks.transformers", "mlflow", "dataset.digest")
"""Blocks that other tests run: in a process of their own, or with what is not installed here."""

DOORS = ("make_spark_converter", "make_parquet_converter", "make_delta_converter", "open_converter")


def blocks() -> Iterator[Any]:
    texts = {"README.md": (REPOSITORY / "README.md").read_text()}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module))]
        texts[str(path.relative_to(PACKAGE))] = "\n\n".join(map(docstring_of, nodes))
    for name, text in texts.items():
        for number, block in enumerate(python_blocks(text), 1):
            if not any(part in block for part in RUN_ELSEWHERE):
                yield pytest.param(block, id=f"{name}-{number}")


def keras_model(*, by_name: bool) -> Any:
    """A model of the column `x`: as a dict of one, or alone."""
    inputs = keras.Input((4,), name="x")
    model = keras.Model({"x": inputs} if by_name else inputs, keras.layers.Dense(1)(inputs))
    model.compile(loss="mse")
    return model


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the blocks call `/data`: rides as Parquet and as a Delta table of 4 versions, and bytes."""
    directory = tmp_path_factory.mktemp("data")
    rides = pa.table({"distance": np.arange(4000.0), "fare": np.arange(4000.0), "user": np.arange(4000) % 50})
    for year in (2025, 2026):
        (directory / "rides" / f"year={year}").mkdir(parents=True)
        pq.write_table(rides, directory / "rides" / f"year={year}" / "rides.parquet")
    for _ in range(4):
        write_deltalake(directory / "rides_delta", rides, mode="append")
    (directory / "features").mkdir()
    features = pa.table({"features": [np.full(4, number, "<f4").tobytes() for number in range(10)]})
    pq.write_table(features, directory / "features" / "features.parquet")
    digits = pa.table({"id": range(70), "image": [bytes(784)] * 70, "label": [number % 10 for number in range(70)]})
    write_deltalake(directory / "digits", digits)
    (directory / "hello_world").mkdir()
    pq.write_table(pa.table({"id": range(10)}), directory / "hello_world" / "rows.parquet")
    write_metadata((directory / "hello_world").as_uri(), Unischema("Hello", [UnischemaField("id", np.int64, ())]))
    return directory


@pytest.fixture(scope="module")
def names(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the blocks take for granted."""
    x, y = F.array(*(F.rand(seed).cast("float") for seed in range(4))), (F.col("id") % 2).alias("y")
    df = spark.range(2100).select(x.alias("x"), y)
    rows = spark.range(2100).select(
        x.alias("x"), y, y.alias("label"), (F.col("id") % 90).alias("age"), F.lit("DE").alias("country")
    )
    with make_spark_converter(rows, cache_dir=tmp_path_factory.mktemp("cache")) as converter:
        yield {
            "df": df, "spark": spark, "converter": converter, "other": converter.where([("age", "<", 45)]),
            "model": torch.nn.Linear(4, 2), "np": np, "tf": tf, "torch": torch, "json": json, "key": "secret",
        }  # fmt: skip


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[DatasetConverter]]:
    """The converters that a block makes, which are deleted after it; their cache is the test's own."""
    monkeypatch.setenv("CONVERTER_CACHE_DIR", str(tmp_path / "cache"))
    converters: list[DatasetConverter] = []

    def recorded(door: Any) -> Any:
        def make(*arguments: Any, **options: Any) -> DatasetConverter:
            converters.append(door(*arguments, **options))
            return converters[-1]

        return make

    for name in DOORS:
        monkeypatch.setattr(package, name, recorded(getattr(package, name)))
    yield converters
    for converter in converters:
        converter.delete()


@pytest.mark.filterwarnings("ignore::converter.petastorm.PetastormDeprecationWarning")
@pytest.mark.filterwarnings("ignore::converter.deltatorch.MovedWarning")
@pytest.mark.parametrize("block", list(blocks()))
def test_a_block_of_code_runs(
    block: str, names: dict[str, Any], data: Path, made: list[DatasetConverter], tmp_path: Path
) -> None:
    code = (
        block.replace('"/data/', f'"{data}/')
        .replace('"file:///data/', f'"file://{data}/')
        .replace("abfss://data@account.dfs.core.windows.net/cache", f"{tmp_path}/c")
    )
    code = code.replace('{"account_key": key}', "{}")
    namespace = names | {name: getattr(package, name) for name in package.__all__} | {"directory": str(tmp_path)}
    if "model.fit(" in code:
        namespace |= {"model": keras_model(by_name=True), "keras_model": keras_model(by_name=False)}
    exec(compile(code, "block", "exec"), namespace)
    for name in ("loader", "dataset"):
        if hasattr(namespace.get(name), "close"):
            namespace[name].close()


@pytest.mark.long("5 s")
def test_the_whole_reference_renders_without_a_warning(tmp_path: Path) -> None:
    pdoc.render.configure(docformat="google")
    pdoc.pdoc(*PAGES, output_directory=tmp_path)
    for page, classes in PAGES.items():
        text = (tmp_path / f"{page.replace('.', '/')}.html").read_text()
        assert all(f'id="{name}"' in text for name in classes)
