"""What goes wrong in the field, and what the user is told. The texts are part of the API."""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from converter import (
    CacheError,
    ConverterError,
    DatasetConverter,
    EmptyShardError,
    MissingDependencyError,
    NullValueError,
    SourceError,
    UnsupportedTypeError,
    make_spark_converter,
    start_local_spark,
    sweep,
)
from tests.folders import directories_below, files_below
from tests.processes import error_of, run_python
from tests.rows import assert_same, concatenate, known_rows, known_values

pytestmark = pytest.mark.short

MARKER = "converter-v1/.owner"
NOWHERE = r"cache_dir=….*CONVERTER_CACHE_DIR.*converter\.cacheDir"


@pytest.fixture(scope="module")
def converter(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    df = known_rows(spark, 100, nulls=True).select("id", "int", "float", "string", "array<float>", "ragged", "date")
    with make_spark_converter(df, cache_dir=tmp_path_factory.mktemp("cache")) as made:
        yield made


@pytest.mark.parametrize("options", [{}, {"categories": ["s"]}, {"categories": ["words"]}])
def test_text_that_is_no_utf8_is_named_with_its_row(spark: SparkSession, tmp_path: Path, options: Any) -> None:
    bad = "IF(id = 13, CAST(X'61ff62' AS string), 'é')"
    df = spark.range(0, 20, 1, 2).selectExpr(f"{bad} AS s", f"array('a', {bad}, NULL) AS words")
    df = df.select(*(options.get("categories") or ["words"]))
    name = df.columns[0]
    said = rf"Column '{name}' has text that is no UTF-8 in row 3 of partition 1: b'a\\xffb'"
    with pytest.raises(SourceError, match=said):
        make_spark_converter(df, cache_dir=tmp_path, **options)
    assert files_below(tmp_path) == [MARKER]
    # Spark's own writer looks at no text; whoever reads it does.
    with (
        pytest.raises(SourceError, match=rf"'{name}' has (text that is no UTF-8|the value b'a\\xffb')"),
        make_spark_converter(df, cache_dir=tmp_path, writer="spark", **options) as converter,
    ):
        converter.head(20)


def convert_on_a_cluster(folder: str) -> dict[str, Any]:
    spark = start_local_spark(
        "cluster", master="local-cluster[1,1,1024]", conf={"spark.sql.session.timeZone": "America/New_York"}
    )
    rows = spark.range(0, 10, 1, 2)
    result: dict[str, Any] = {"nowhere": error_of(lambda: make_spark_converter(rows))}

    # A path that means another directory in each process: disks that are not shared.
    os.makedirs(f"{folder}/driver")
    os.chdir(f"{folder}/driver")
    result["not shared"] = error_of(lambda: make_spark_converter(rows, cache_dir="/proc/self/cwd/cache"))
    result["driver sees"] = files_below(f"{folder}/driver")
    result["driver's folders"] = directories_below(Path(folder) / "driver")

    with make_spark_converter(known_rows(spark, 100), cache_dir=f"{folder}/shared") as converter:
        with converter.make_batch_reader(ragged="nested") as reader:
            assert_same(concatenate(list(reader)), known_values(np.arange(100)))
        result["shared"] = len(converter)
    result["shared at the end"] = files_below(f"{folder}/shared")
    os.environ["CONVERTER_CACHE_DIR"] = f"{folder}/from environment"
    with make_spark_converter(rows) as converter:
        result["from environment"] = converter.url
    spark.stop()
    return result


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `convert_on_a_cluster` saw, whose executor is a process with a working directory of its own."""
    folder = tmp_path_factory.mktemp("cluster")
    result = run_python(convert_on_a_cluster, str(folder), environment={"SPARK_WORKER_DIR": str(folder / "worker")})
    return result | {"folder": str(folder)}


@pytest.mark.long("a cluster, 15 s")
def test_a_cluster_needs_to_be_told_where_the_cache_goes(cluster: dict[str, Any]) -> None:
    kind, text = cluster["nowhere"]
    assert kind == "CacheNotConfiguredError"
    assert re.search(r"the cluster 'local-cluster\[1,1,1024\]'.*" + NOWHERE, text)
    assert cluster["from environment"].startswith(f"file://{cluster['folder']}/from%20environment/converter-v1/")


@pytest.mark.long("a cluster")
def test_a_cluster_that_shares_a_directory_converts(cluster: dict[str, Any]) -> None:
    assert cluster["shared"] == 100
    assert cluster["shared at the end"] == [MARKER]


@pytest.mark.long("a cluster")
def test_a_directory_that_the_driver_does_not_share_is_named(cluster: dict[str, Any]) -> None:
    kind, text = cluster["not shared"]
    assert kind == "CacheError"
    assert re.search(
        r"executors wrote file:///proc/self/cwd/cache/converter-v1/.*, but as seen by the driver "
        r"the file of an executor is not there\. .* Choose a cache_dir that the driver and every executor share\.",
        text,
    )
    assert cluster["driver sees"] == [f"cache/{MARKER}"]
    assert cluster["driver's folders"] == ["cache", "cache/converter-v1"]


def test_a_cache_dir_that_is_a_file_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for cache_dir in (file, file / "below"):
        with pytest.raises(CacheError, match=rf"{re.escape(str(file))}.* is a file, where a directory was expected"):
            make_spark_converter(spark.range(3), cache_dir=cache_dir)
    assert file.read_text() == "mine"


def test_a_cache_dir_that_cannot_be_written_is_refused(spark: SparkSession) -> None:
    with pytest.raises(
        CacheError, match=r"The cache directory file:///proc/nowhere cannot be written: .*Choose"
    ) as one:
        make_spark_converter(spark.range(3), cache_dir="/proc/nowhere")
    assert one.value.path == "file:///proc/nowhere"
    assert isinstance(one.value.__cause__, OSError)


def test_a_cache_dir_that_is_not_local_is_refused(spark: SparkSession) -> None:
    with pytest.raises(CacheError, match=r"cache_dir='memory://.*' is in this process's memory"):
        make_spark_converter(spark.range(3), cache_dir="memory://cache")


@pytest.mark.parametrize("url", ["s3://bucket/cache", "dbfs:/cache", "nonsense://cache"])
def test_a_store_that_nobody_here_knows_is_refused_with_the_url(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    # Not a folder of that name, wherever the program happens to run.
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConverterError, match=re.escape(url)):
        make_spark_converter(spark.range(3), cache_dir=url).delete()
    assert not list(tmp_path.iterdir())


def test_an_empty_cache_dir_is_refused(spark: SparkSession) -> None:
    with pytest.raises(ValueError, match="must be a non-empty str or path, got ''"):
        make_spark_converter(spark.range(3), cache_dir="")


def test_a_cache_dir_that_is_no_path_is_refused(spark: SparkSession) -> None:
    with pytest.raises(TypeError, match=r"str, bytes or os\.PathLike"):
        make_spark_converter(spark.range(3), cache_dir=5)  # type: ignore[arg-type]


def test_unsupported_columns_are_named_before_anything_is_written(spark: SparkSession, cache_dir: Path) -> None:
    df = spark.sql("SELECT 1 AS fine, map('a', NULL) AS m, NULL AS no, struct(NULL AS n) AS s")
    match = r"(?s)^3 columns cannot.*'m\.value' has.*'no' has.*'s\.n' has"
    with pytest.raises(UnsupportedTypeError, match=match) as raised:
        make_spark_converter(df, cache_dir=cache_dir)
    assert raised.value.column == "m.value"
    assert "fine" not in str(raised.value)
    assert not cache_dir.exists()


@pytest.mark.parametrize("column", ["int", "string", "array<float>", "ragged"])
def test_a_null_is_refused_by_name(converter: DatasetConverter, column: str) -> None:
    match = rf"Column '{column}' holds nulls, and nulls='raise'\..*columns=….*nulls='mask' \(adds '{column}__valid'\)"
    for make in (converter.make_torch_dataloader, converter.make_batch_reader):
        with pytest.raises(NullValueError, match=match) as raised:
            make(columns=["id", column])
        assert raised.value.column == column
    for nulls in ("raise", {"id": 0}):
        with pytest.raises(NullValueError, match=match):
            converter.make_batch_reader(columns=["id", column], nulls=nulls)


def test_rows_of_different_lengths_are_refused_by_name(converter: DatasetConverter) -> None:
    with pytest.raises(SourceError, match=r"Column 'ragged' has rows of different lengths.*ragged='pad'") as raised:
        converter.make_torch_dataloader(columns=["ragged"], nulls="mask")
    assert raised.value.column == "ragged"


def test_a_dataframe_without_rows_is_refused(spark: SparkSession, cache_dir: Path) -> None:
    for df in (spark.range(0), known_rows(spark, 50).where("id < 0"), spark.range(10).where("id > 10").repartition(3)):
        with pytest.raises(SourceError, match=r"The DataFrame has no rows.*Check its filters"):
            make_spark_converter(df, cache_dir=cache_dir)
    assert files_below(cache_dir) == [MARKER]
    assert directories_below(cache_dir) == ["converter-v1"]


def test_a_dataframe_without_columns_is_refused(spark: SparkSession, cache_dir: Path) -> None:
    with pytest.raises(SourceError, match="The DataFrame has no columns"):
        make_spark_converter(spark.range(3).select(), cache_dir=cache_dir)


def test_a_stream_is_refused(spark: SparkSession, cache_dir: Path) -> None:
    with pytest.raises(SourceError, match=r"A streaming DataFrame has no end.*foreachBatch"):
        make_spark_converter(spark.readStream.format("rate").load(), cache_dir=cache_dir)
    assert not cache_dir.exists()


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (pd.DataFrame({"x": [1]}), r"got pandas\..*DataFrame\. Pass spark\.createDataFrame\(…\) of it"),
        ("/data/table", r"got builtins\.str\. It does not read a path: call make_parquet_converter\(…\) for Parquet"),
        (Path("/data/table"), r"got pathlib\..*make_delta_converter\(…\) for a Delta table.* or pass spark\.read\."),
        (None, r"needs a Spark DataFrame, got builtins\.NoneType"),
        (Path("/data"), r"needs a Spark DataFrame, got pathlib\."),
        ([{"x": 1}], r"needs a Spark DataFrame, got builtins\.list"),
    ],
)
def test_what_is_no_dataframe_is_refused(cache_dir: Path, value: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        make_spark_converter(value, cache_dir=cache_dir)
    assert not cache_dir.exists()


def test_a_bar_without_tqdm_is_refused_before_anything_is_written(
    spark: SparkSession, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if it were not installed.
    monkeypatch.setitem(sys.modules, "tqdm", None)
    match = r"progress=True needs tqdm, which is not installed: pip install tqdm, or 'spark-tensor-converter\[spark\]'"
    with pytest.raises(MissingDependencyError, match=match):
        make_spark_converter(spark.range(3), cache_dir=cache_dir, progress=True)
    assert not cache_dir.exists()
    with make_spark_converter(spark.range(3), cache_dir=cache_dir) as converter:
        assert len(converter) == 3


def test_the_path_of_a_delta_table_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "_delta_log").mkdir()
    for path in (tmp_path, str(tmp_path)):
        with pytest.raises(TypeError, match=r"That path is a Delta table: call make_delta_converter\(…\)"):
            make_spark_converter(path)


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ("1 AS x, 2 AS x, 3 AS y", "x"),
        ("named_struct('b', 1) AS a, 2 AS `a.b`", r"a\.b"),
        ("1 AS X, 2 AS x", "[xX]"),
    ],
)
def test_columns_of_one_name_are_refused(spark: SparkSession, cache_dir: Path, columns: str, name: str) -> None:
    with pytest.raises(SourceError, match=rf"Several columns are called '{name}'.*Rename them") as raised:
        make_spark_converter(spark.sql(f"SELECT {columns}"), cache_dir=cache_dir)
    assert re.fullmatch(name, str(raised.value.column))
    assert not cache_dir.exists()


def test_columns_that_would_get_the_name_of_a_mask_are_not_lost(spark: SparkSession, cache_dir: Path) -> None:
    df = spark.sql("SELECT id, IF(id = 1, NULL, id) AS x, id + 100 AS x__valid FROM range(3)")
    with make_spark_converter(df, cache_dir=cache_dir) as made, pytest.raises(ValueError, match="x__valid"):
        made.make_batch_reader(nulls="mask")


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"float_dtype": "float16"}, ValueError, "float_dtype must be 'float32', 'float64' or None, got 'float16'"),
        ({"compression": "gzip"}, ValueError, "compression must be one of auto, none, lz4, .*, got 'gzip'"),
        ({"row_group_bytes": 10}, ValueError, "row_group_bytes must be at least 1024, got 10"),
        ({"shapes": ["x"]}, TypeError, r"shapes must be a dict of column name to shape"),
        ({"shapes": {"x": 3}}, ValueError, r"shapes\['x'\] must be a tuple of sizes above 0, .* got 3"),
        ({"shapes": {"x": (2, -1)}}, ValueError, r"shapes\['x'\] must be a tuple of sizes above 0"),
        ({"shapes": {"x": (True, 4)}}, ValueError, r"shapes\['x'\] must be a tuple of sizes above 0"),
        ({"shuffle_rows_seed": 2**63}, ValueError, r"shuffle_rows_seed must be below 2\*\*62"),
        ({"row_group_bytes": "8MB"}, TypeError, "row_group_bytes must be an integer, got '8MB'"),
        ({"shapes": {"nope": (2,)}}, ValueError, "shapes names the column 'nope', which does not exist"),
        ({"shapes": {"id": (2,)}}, ValueError, "shapes names the column 'id', which is no array"),
        ({"cache_key": 5}, TypeError, "cache_key must be a str, e.g. 'flights-2026-11-20', got 5"),
        ({"cache_key": " "}, ValueError, "cache_key must name the rows"),
        ({"delete_on_exit": "no"}, TypeError, "delete_on_exit must be True or False, got 'no'"),
        ({"progress": 1}, TypeError, "progress must be True or False, got 1"),
        ({"storage_options": ["secret"]}, TypeError, "storage_options must be a dict of keyword arguments, got a list"),
    ],
)
def test_bad_options_of_the_conversion_are_named(
    spark: SparkSession, cache_dir: Path, options: Any, kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=match):
        make_spark_converter(spark.range(3), cache_dir=cache_dir, **options)
    assert not cache_dir.exists()


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"batch_size": -1}, ValueError, "batch_size must be at least 1, got -1"),
        ({"batch_size": 1.5}, TypeError, r"batch_size must be an integer, got 1\.5"),
        ({"batch_size": "32"}, TypeError, "batch_size must be an integer, got '32'"),
        ({"batch_size": None}, TypeError, "batch_size must be an integer, got None"),
        ({"num_epochs": 0}, ValueError, "num_epochs must be at least 1, got 0"),
        ({"columns": ["idd"]}, ValueError, r"columns: There is no column 'idd'\. Did you mean 'id'\?"),
        ({"columns": "id"}, TypeError, "columns must be a list of names, got 'id'"),
        ({"columns": []}, ValueError, "columns must name at least one column"),
        ({"columns": ["id", "id"]}, ValueError, "each once"),
        ({"stack": {"x": ["float", "string"]}}, ValueError, "stack: column 'string' of 'x' has dtype str"),
        ({"stack": {"id": ["float"]}}, ValueError, "stack: 'id' is a column already"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"shuffle_window_rows": 0}, ValueError, "shuffle_window_rows must be at least 1"),
        ({"workers_count": 0}, ValueError, "workers_count must be at least 1"),
        ({"cur_shard": 0}, ValueError, "cur_shard and shard_count go together, got cur_shard=0 and shard_count=None"),
        ({"cur_shard": 3, "shard_count": 3}, ValueError, "0 <= cur_shard < shard_count, got cur_shard=3"),
        ({"cur_shard": 0, "shard_count": 101}, EmptyShardError, "100 rows cannot be divided among 101 shards"),
        ({"uneven": "all"}, ValueError, "uneven must be 'drop', 'pad', 'keep' or None, got 'all'"),
        ({"nulls": "drop"}, ValueError, "nulls must be 'raise', 'mask' or a dict of fill values, got 'drop'"),
        ({"nulls": {"idd": 0}}, ValueError, r"nulls: There is no column 'idd'\. Did you mean 'id'\?"),
        ({"nulls": {"int": 0.5}, "columns": ["int"]}, (TypeError, ValueError), "'int'"),
        ({"nulls": {"int": 2**40}, "columns": ["int"]}, (TypeError, ValueError), "'int'"),
        ({"nulls": {"int": "zero"}, "columns": ["int"]}, (TypeError, ValueError), "'int'"),
        ({"nulls": {"string": 5}, "columns": ["string"]}, (TypeError, ValueError), "'string'"),
        ({"nulls": {"array<float>": [1, 2]}, "columns": ["array<float>"]}, (TypeError, ValueError), "'array<float>'"),
        ({"nulls": {"ragged": 5}, "columns": ["ragged"], "ragged": "pad"}, (TypeError, ValueError), "'ragged'"),
        ({"ragged": "cut"}, ValueError, "ragged must be 'raise', 'pad' or 'nested', got 'cut'"),
        ({"num_workers": -1}, ValueError, "num_workers must be at least 0"),
    ],
)
def test_bad_options_of_a_loader_are_named(converter: DatasetConverter, options: Any, kind: Any, match: str) -> None:
    with pytest.raises(kind, match=match):
        converter.make_torch_dataloader(**{"columns": ["id"]} | options)


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"older_than": "1h"}, TypeError, "older_than must be seconds or a datetime.timedelta, got '1h'"),
        ({"older_than": True}, TypeError, "older_than must be seconds"),
        ({"older_than": -1}, ValueError, "older_than must be at least 0 seconds, got -1"),
        ({"kept": 1}, TypeError, "kept must be True or False, got 1"),
        ({"dry_run": "yes"}, TypeError, "dry_run must be True or False, got 'yes'"),
    ],
)
def test_bad_options_of_a_sweep_are_named(cache_dir: Path, options: Any, kind: Any, match: str) -> None:
    with pytest.raises(kind, match=match):
        sweep(cache_dir, **options)


def test_statistics_of_a_column_that_is_not_there_offer_the_nearest(converter: DatasetConverter) -> None:
    with pytest.raises(KeyError, match=r"There is no column 'idd'\. Did you mean 'id'\?"):
        converter.statistics["idd"]
    assert converter.statistics.get("idd") is None


def test_a_date_can_be_filled_with_a_date(converter: DatasetConverter) -> None:
    fill = np.datetime64("2000-01-01")
    with converter.make_batch_reader(columns=["id", "date"], nulls={"date": fill}, batch_size=100) as reader:
        (batch,) = list(reader)
    expected = known_values(batch["id"])["date"]
    differs = batch["date"] != expected
    assert differs.any()
    assert (batch["date"][differs] == fill).all()


def test_a_deleted_converter_says_so(spark: SparkSession, cache_dir: Path) -> None:
    with make_spark_converter(spark.range(3), cache_dir=cache_dir) as made:
        loader = made.make_torch_dataloader()
    for make in (made.make_torch_dataloader, made.make_batch_reader):
        with pytest.raises(CacheError, match=r"The converter of file://.* was deleted.*Convert again") as raised:
            make()
        assert raised.value.path == made.url
    # A loader that was made before notices when it reads.
    with pytest.raises(ConverterError, match=r"part-.*\.parquet is not there\. Was the converter deleted"):
        list(loader)
    assert len(made) == 3


def test_a_closed_loader_says_so(converter: DatasetConverter) -> None:
    for make in (converter.make_torch_dataloader, converter.make_batch_reader):
        with make(columns=["id"]) as loader:
            pass
        with pytest.raises(ConverterError, match=r"This loader was closed: its `with` block has ended"):
            iter(loader)


def read_pickled(path: str) -> dict[str, list[str]]:
    converter = pickle.loads(Path(path).read_bytes())

    def read(num_workers: int) -> Any:
        with converter.make_torch_dataloader(num_workers=num_workers) as loader:
            return list(loader)

    return {"threads": error_of(lambda: read(0)), "processes": error_of(lambda: read(2))}


def test_a_copy_where_the_files_are_not_says_so(spark: SparkSession, tmp_path: Path) -> None:
    with make_spark_converter(spark.range(3), cache_dir=tmp_path / "cache") as made:
        (tmp_path / "pickle").write_bytes(pickle.dumps(made))
    for kind, text in run_python(read_pickled, str(tmp_path / "pickle")).values():
        assert kind == "SourceChangedError"
        assert re.search(
            r"part-.*\.parquet is not there\..*can be read on its own machine only; choose a shared cache_dir", text
        )


@pytest.mark.parametrize(
    ("code", "match"),
    [
        ("raise ValueError(f'city {x} is unknown')", r"ValueError: city 7 is unknown\.$"),
        ("return {}['Atlantis']", r"KeyError: 'Atlantis'\.$"),
        ("return 1 // (x - 7)", r"ZeroDivisionError: integer division or modulo by zero\.$"),
        ("raise type('NoSuchCity', (Exception,), {})('Atlantis')", r"cities\.NoSuchCity: Atlantis\.$"),
        ("raise ValueError('first line\\nlast line')", r"ValueError: first line"),
    ],
)
def test_a_udf_that_raises_is_named_and_leaves_nothing(
    spark: SparkSession, cache_dir: Path, code: str, match: str
) -> None:
    scope: dict[str, Any] = {"__name__": "cities"}
    body = f"    if x == 7:\n        {code}\n    return x\n"
    exec(f"def fails(x):\n{body}", scope)
    fails = F.udf(scope["fails"], "long")
    df = spark.range(0, 10, 1, 2).select(fails("id").alias("x"))
    with pytest.raises(CacheError, match=rf"^Spark could not write the cache into .*: {match}") as raised:
        make_spark_converter(df, cache_dir=cache_dir)
    assert len(str(raised.value)) < 400
    assert type(raised.value.__cause__).__name__ == "PythonException"
    assert "Traceback" in str(raised.value.__cause__)
    assert files_below(cache_dir) == [MARKER]
    assert directories_below(cache_dir) == ["converter-v1"]


@pytest.mark.parametrize(
    ("expression", "match"),
    [
        ("id DIV (id - 7)", r"\[DIVIDE_BY_ZERO\]"),
        ("IF(id = 7, raise_error('bad row'), id)", "bad row"),
        ("CAST(IF(id = 7, 'seven', '1') AS INT)", r"\[CAST_INVALID_INPUT\].*'seven'"),
    ],
)
def test_an_expression_that_fails_is_named_and_leaves_nothing(
    spark: SparkSession, cache_dir: Path, expression: str, match: str
) -> None:
    df = spark.range(0, 10, 1, 2).select(F.expr(expression).alias("x"))
    with pytest.raises(CacheError, match=rf"^Spark could not write the cache into .*: .*{match}") as raised:
        make_spark_converter(df, cache_dir=cache_dir)
    assert len(str(raised.value)) < 800
    assert raised.value.__cause__ is not None
    assert files_below(cache_dir) == [MARKER]


def test_input_files_that_are_gone_are_named(spark: SparkSession, cache_dir: Path, tmp_path: Path) -> None:
    spark.range(0, 10, 1, 2).write.parquet(str(tmp_path / "table"))
    df = spark.read.parquet(str(tmp_path / "table"))
    for path in (tmp_path / "table").glob("part-*.parquet"):
        path.unlink()
    with pytest.raises(CacheError, match=r"Spark could not write the cache into .*: .*table/part-"):
        make_spark_converter(df, cache_dir=cache_dir)
    assert files_below(cache_dir) == [MARKER]
