"""Petastorm's Spark converter under its old names: what is written, found again, read and deleted."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from deltalake import write_deltalake
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from converter import make_spark_converter as make_tensors
from converter import start_local_spark
from converter.petastorm import PetastormDeprecationWarning, TransformSpec
from converter.petastorm.pytorch import BatchedDataLoader, DataLoader
from converter.petastorm.spark import SparkDatasetConverter, make_spark_converter, register_delete_dir_handler
from converter.petastorm.spark import spark_dataset_converter as module
from converter.sources.spark.identity import gather_evidence
from tests.parity import golden_tables
from tests.processes import finish, start_python

CONF = SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF


@pytest.fixture(autouse=True)
def _cache_dir(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for names in module._RANK_VARIABLES:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    spark.conf.set(CONF, tmp_path.as_uri())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PetastormDeprecationWarning)
        yield
    spark.conf.unset(CONF)


def folder_of(converter: SparkDatasetConverter) -> Path:
    return Path(urlsplit(converter.cache_dir_url).path)


def numbers(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(count, numPartitions=2)


def ids_of(converter: SparkDatasetConverter, **options: Any) -> list[int]:
    with converter.make_torch_dataloader(batch_size=7, num_epochs=1, **options) as loader:
        return [int(number) for batch in loader for number in batch["id"]]


@pytest.mark.filterwarnings("ignore:Tensorflow will convert all unicode")
def test_columns_have_the_dtypes_of_petastorm(spark: SparkSession) -> None:
    rows = [
        (False, 0.125, 2.5, 1, -3, 7, "Oslo", b"\x01", 5),
        (True, 0.25, -2.5, 2, 4, 8, "NYC", b"\x02", 6),
    ]
    kinds = "b boolean, f float, d double, s short, i int, l long, t string, y binary, t8 byte"
    converter = make_spark_converter(spark.createDataFrame(rows, kinds).coalesce(1))
    assert len(converter) == 2
    with converter.make_tf_dataset(num_epochs=1, shuffle_row_groups=False) as dataset:
        batch = next(iter(dataset))
    names = ("b", "f", "d", "s", "i", "l", "t", "y", "t8")
    assert [getattr(batch, name).dtype.name for name in names] == [
        "bool", "float32", "float32", "int16", "int32", "int64", "string", "string", "int8",
    ]  # fmt: skip
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        expected = [value.encode() if isinstance(value, str) else value for value in column]
        assert getattr(batch, name).numpy().tolist() == expected
    with converter.make_torch_dataloader(num_epochs=1, schema_fields=["b", "f", "d", "s", "i", "l", "t8"]) as loader:
        (tensors,) = loader
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "b": torch.uint8, "f": torch.float32, "d": torch.float32, "s": torch.int16, "i": torch.int32, "l": torch.int64,
        "t8": torch.int8,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float32", ("float", "float")), ("float64", ("double", "double")), (None, ("float", "double"))],
)
def test_dtype_decides_what_floats_become(dtype: str | None, expected: tuple[str, str], spark: SparkSession) -> None:
    df = numbers(spark, 3).selectExpr("float(id) AS f", "array(double(id), 0.5D) AS d", "double(id) AS `a.b`")
    converter = make_spark_converter(df, dtype=dtype)
    stored = pq.read_schema(next(folder_of(converter).glob("*.parquet")))
    assert (str(stored.field("f").type), str(stored.field("d").type.value_type)) == expected
    assert str(stored.field("a.b").type) == expected[1]


def test_vectors_become_arrays_of_one_length(spark: SparkSession) -> None:
    df = spark.createDataFrame([(Vectors.dense([1.0, 2.0, 3.0]),), (Vectors.sparse(3, {1: 5.0}),)], ["v"]).coalesce(1)
    with make_spark_converter(df).make_torch_dataloader(num_epochs=1, shuffle_row_groups=False) as loader:
        (batch,) = loader
    assert batch["v"].dtype == torch.float32
    assert batch["v"].tolist() == [[1, 2, 3], [0, 5, 0]]


def test_an_equal_dataframe_is_written_once(spark: SparkSession, tmp_path: Path) -> None:
    first = make_spark_converter(numbers(spark, 10))
    assert make_spark_converter(numbers(spark, 10)).cache_dir_url == first.cache_dir_url
    others = [
        make_spark_converter(numbers(spark, 20)),
        make_spark_converter(numbers(spark, 10), parquet_row_group_size_bytes=1 << 20),
        make_spark_converter(numbers(spark, 10), compression_codec="snappy"),
        make_spark_converter(numbers(spark, 10), dtype=None),
    ]
    assert len({first.cache_dir_url, *(other.cache_dir_url for other in others)}) == 5
    spark.conf.set(CONF, f"{tmp_path.as_uri()}/")
    assert make_spark_converter(numbers(spark, 10)).cache_dir_url == first.cache_dir_url
    spark.conf.set(CONF, f"{tmp_path.as_uri()}/other")
    assert make_spark_converter(numbers(spark, 10)).cache_dir_url != first.cache_dir_url
    spark.conf.set(CONF, tmp_path.as_uri())
    first.delete()
    assert not folder_of(first).exists()
    assert folder_of(others[0]).exists()
    again = make_spark_converter(numbers(spark, 10))
    assert again.cache_dir_url != first.cache_dir_url
    assert sorted(ids_of(again)) == list(range(10))


@pytest.mark.parametrize("mode", ["overwrite", "append"])
def test_an_equal_dataframe_is_written_anew_when_its_files_have_changed(
    mode: str, spark: SparkSession, tmp_path: Path
) -> None:
    source = (tmp_path / "source").as_uri()
    numbers(spark, 3).write.parquet(source)
    first = make_spark_converter(spark.read.parquet(source))
    # Unchanged files are written once.
    assert make_spark_converter(spark.read.parquet(source)).cache_dir_url == first.cache_dir_url
    spark.range(100, 103, numPartitions=2).write.mode(mode).parquet(source)
    second = make_spark_converter(spark.read.parquet(source))
    assert sorted(ids_of(second)) == [*range(3 if mode == "append" else 0), *range(100, 103)]
    assert make_spark_converter(spark.read.parquet(source)).cache_dir_url == second.cache_dir_url
    assert sorted(ids_of(first)) == list(range(3))


def convert_changing_tables(folder: str) -> dict[str, list[dict[str, Any]]]:
    """For frames of a Delta table and of files, after each change: where they were written, their rows and Spark's."""
    warnings.simplefilter("ignore", PetastormDeprecationWarning)
    settings = golden_tables.CONF | {"spark.sql.warehouse.dir": f"{folder}/warehouse", CONF: f"file://{folder}/cache"}
    spark = start_local_spark("changes", master="local[2]", conf=settings)
    table, files, text = f"{folder}/table", f"{folder}/files", Path(folder, "text")

    def table_now() -> DataFrame:
        return spark.read.format("delta").load(table)

    def files_now() -> DataFrame:
        return spark.read.parquet(files)

    def cached() -> DataFrame:
        df = table_now().where("id > 1")
        df.cache().count()
        return df

    frames = {
        "table": table_now,
        "version 0": lambda: spark.read.format("delta").option("versionAsOf", 0).load(table),
        "limited table": lambda: table_now().orderBy("id").limit(6),
        "joined tables": lambda: table_now().join(table_now().selectExpr("id + 1 AS id"), "id"),
        "counted table": lambda: table_now().agg(F.count("*").alias("id")),
        "newest row": lambda: spark.range(1000).join(table_now().agg(F.max("id").alias("id")), "id"),
        "crossed": lambda: spark.range(1).selectExpr("id AS zero").crossJoin(table_now().agg(F.count("*").alias("id"))),
        "limited files": lambda: files_now().orderBy(F.desc("id")).limit(6),
        "subquery": lambda: spark.sql(
            f"SELECT id FROM range(9) WHERE id < (SELECT max(id) - 95 FROM parquet.`{files}`)"
        ),
        # Spark makes a join of it, and Delta a list of values of the table in it.
        "subquery of a table": lambda: spark.range(1000).where(f"id IN (SELECT max(id) FROM delta.`{table}`)"),
        "joined with files": lambda: table_now().join(files_now(), "id"),
        "cached": cached,
        "RDD": lambda: spark.createDataFrame(
            spark.sparkContext.textFile(str(text)).map(lambda row: (int(row),)), "id long"
        ),
    }
    vectors = {"delta.enableDeletionVectors": "true"}
    changes: list[Callable[[], object]] = [
        lambda: spark.range(95).coalesce(1).write.format("delta").options(**vectors).save(table),
        lambda: spark.sql(f"DELETE FROM delta.`{table}` WHERE id = 3"),
        # Another process would do so: Spark notes in a conf what it has committed itself.
        lambda: write_deltalake(table, pa.table({"id": [200, 201]}), mode="append"),
    ]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in frames}
    for number, change in enumerate(changes):
        spark.catalog.clearCache()
        change()
        spark.range(97 + number).coalesce(1).write.mode("overwrite").parquet(files)
        text.write_text(f"{number}\n")
        for name, frame in frames.items():
            truth = sorted(row.id for row in frame().collect())
            made = [make_spark_converter(frame())]
            if number == 0:
                made.append(make_spark_converter(frame()))
            with make_tensors(frame(), cache_dir=f"{folder}/tensors") as own, own.make_batch_reader() as reader:
                rows = sorted(int(one) for batch in reader for one in batch["id"])
            urls = [converter.cache_dir_url for converter in made]
            is_proven = gather_evidence(frame()) is not None
            found_rows = sorted(ids_of(made[-1]))
            result = {"urls": urls, "rows": found_rows, "own": rows, "truth": truth, "is proven": is_proven}
            found[name].append(result)
    spark.stop()
    return found


def test_a_frame_whose_table_or_files_have_changed_is_written_anew(tmp_path: Path) -> None:
    with start_python(convert_changing_tables, str(tmp_path)) as process:
        # 91 conversions.
        found = finish(process, seconds=300)
    for name, times in found.items():
        for each in times:
            assert (each["rows"], each["own"]) == (each["truth"], each["truth"]), name
            # What Delta answers from its log, too, though Spark's plan does not show it.
            assert not each["is proven"], name
        # Found again if nothing has changed, unless it is not known what they read.
        is_known = name not in ("subquery", "subquery of a table", "cached", "RDD")
        assert (len({*times[0]["urls"]}) == 1) == is_known, name
        assert len({each["urls"][0] for each in times}) == (1 if name == "version 0" else len(times)), name


def test_casts_that_were_cached_before_files_changed_are_not_those_of_now(spark: SparkSession, tmp_path: Path) -> None:
    source = tmp_path / "source.parquet"
    pq.write_table(pa.table({"x": [0.5, 1.5]}), source)
    cached = spark.read.parquet(str(source)).withColumn("x", F.col("x").cast("float")).cache()
    assert cached.count() == 2
    try:
        pq.write_table(pa.table({"x": [2.5, 3.5]}), source)
        converter = make_spark_converter(spark.read.parquet(str(source)), dtype="float32")
        assert pq.read_table(folder_of(converter))["x"].to_pylist() == [2.5, 3.5]
    finally:
        cached.unpersist(blocking=True)


@pytest.mark.parametrize(
    ("name", "values"),
    [("spark.sql.session.timeZone", ("UTC", "Asia/Tokyo")), ("spark.sql.ansi.enabled", ("true", "false"))],
)
def test_what_is_computed_under_other_confs_is_written_anew(
    spark: SparkSession, tmp_path: Path, name: str, values: tuple[str, str]
) -> None:
    source = tmp_path / "source.csv"
    source.write_text("2026-01-01 00:00:00\n")
    held, found = spark.conf.get(name), []
    try:
        for value in (values[0], *values):
            spark.conf.set(name, value)
            # There is no evidence of what a limit takes.
            times = spark.read.schema("at timestamp").csv(str(source)).limit(5).selectExpr("unix_micros(at) AS at")
            converter = make_spark_converter(times)
            found.append(converter.cache_dir_url)
            assert pq.read_table(folder_of(converter))["at"].to_pylist() == [times.first()[0]]
    finally:
        spark.conf.set(name, held)
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("name", ["spark.sql.files.ignoreCorruptFiles", "spark.sql.files.ignoreMissingFiles"])
def test_a_frame_that_may_lack_what_a_store_did_not_answer_is_written_anew(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    numbers(spark, 3).write.parquet((tmp_path / "source").as_uri())
    spark.conf.set(name, "true")
    try:
        one, two = (make_spark_converter(spark.read.parquet(str(tmp_path / "source"))) for _ in range(2))
    finally:
        spark.conf.unset(name)
    assert one.cache_dir_url != two.cache_dir_url


def test_frames_that_differ_in_the_names_of_their_columns_are_two(spark: SparkSession) -> None:
    # Nothing is known of a limit, and Spark's own comparison leaves names out.
    few = spark.range(10, numPartitions=1).selectExpr("id x", "id + 100 y").limit(3)
    for names, first in (("x id", "y b"), 0), (("x b", "y id"), 100), (("x c", "y id"), 100):
        converter = make_spark_converter(few.selectExpr(*names))
        assert sorted(ids_of(converter)) == list(range(first, first + 3))
    assert make_spark_converter(few.selectExpr("x c", "y id")).cache_dir_url == converter.cache_dir_url


def test_frames_from_before_a_file_grew_are_written_each_for_itself(spark: SparkSession, tmp_path: Path) -> None:
    """Spark reads a file to the length that it had when the frame was made. Two doubts are no proof."""

    def grow(first: int) -> DataFrame:
        with open(tmp_path / "log.csv", "a") as file:
            file.writelines(f"{number:04}\n" for number in range(first, first + 10))
        return spark.read.schema("id long").csv((tmp_path / "log.csv").as_uri())

    frames = [grow(first) for first in (0, 10, 20)]
    converted = [make_spark_converter(df) for df in frames]
    counts = [len(converter) for converter in converted]
    assert counts == [df.count() for df in frames]
    assert len(set(counts)) == 3


def test_the_codec_is_in_the_names_of_files(spark: SparkSession) -> None:
    assert not [url for url in make_spark_converter(numbers(spark, 3)).file_urls if "snappy" in url]
    snappy = make_spark_converter(numbers(spark, 3), compression_codec="SNAPPY")
    assert all(url.endswith(".snappy.parquet") for url in snappy.file_urls)
    with pytest.raises(RuntimeError, match="compression_codec should be None or one of"):
        make_spark_converter(numbers(spark, 3), compression_codec="zip")


def test_a_handler_deletes_instead(spark: SparkSession) -> None:
    converter = make_spark_converter(numbers(spark, 4))
    deleted: list[str] = []
    register_delete_dir_handler(deleted.append)
    try:
        converter.delete()
    finally:
        register_delete_dir_handler(None)
    assert deleted == [converter.cache_dir_url]
    assert folder_of(converter).exists()
    converter.delete()
    assert not folder_of(converter).exists()


@pytest.mark.parametrize("is_bare", [False, True], ids=["URL", "path"])
def test_files_of_a_url_are_read_and_never_deleted(spark: SparkSession, tmp_path: Path, is_bare: bool) -> None:
    folder = tmp_path / "mine"
    numbers(spark, 10).write.parquet(folder.as_uri())
    converter = make_spark_converter(str(folder) if is_bare else folder.as_uri())
    assert len(converter) == 10
    assert sorted(ids_of(converter)) == list(range(10))
    converter.delete()
    assert sorted(ids_of(converter)) == list(range(10))


def test_a_pickled_converter_reads_and_a_task_cannot_make_one(spark: SparkSession) -> None:
    converter = make_spark_converter(numbers(spark, 9))
    copy = pickle.loads(pickle.dumps(converter))
    assert sorted(ids_of(copy)) == list(range(9))

    def in_a_task(_: Any) -> list[Any]:
        with converter.make_torch_dataloader(batch_size=3, num_epochs=1) as loader:
            total = sum(len(batch["id"]) for batch in loader)
        try:
            make_spark_converter("file:///nowhere")
        except RuntimeError as error:
            return [total, str(error)]
        return [total]

    assert spark.sparkContext.parallelize([0], 1).mapPartitions(in_a_task).collect() == [
        9, "make_spark_converter cannot be called in executor code: make the converter on the driver.",
    ]  # fmt: skip


def test_arguments_of_readers_and_loaders_are_passed_on(spark: SparkSession) -> None:
    converter = make_spark_converter(numbers(spark, 40).withColumn("x", F.col("id") * 2))
    shards = [ids_of(converter, cur_shard=number, shard_count=2) for number in range(2)]
    assert sorted(shards[0] + shards[1]) == list(range(40))
    spec = TransformSpec(lambda frame: frame.assign(x=frame["x"] + 1))
    with converter.make_torch_dataloader(batch_size=40, num_epochs=1, transform_spec=spec) as loader:
        assert isinstance(loader, DataLoader)
        assert sorted(np.concatenate([batch["x"] for batch in loader]).tolist()) == list(range(1, 80, 2))
    with converter.make_torch_dataloader(data_loader_fn=BatchedDataLoader, num_epochs=1, batch_size=8) as loader:
        assert isinstance(loader, BatchedDataLoader)
        assert [len(batch["id"]) for batch in loader] == [8] * 5
    make = functools.partial(BatchedDataLoader, transform_fn=functools.partial(torch.as_tensor, dtype=torch.float64))
    with converter.make_torch_dataloader(data_loader_fn=make, num_epochs=1) as loader:
        assert next(iter(loader))["id"].dtype == torch.float64
    with pytest.raises(TypeError, match="unexpected keyword argument 'xyz'"), converter.make_torch_dataloader(xyz=1):
        pass
    with pytest.raises(TypeError, match="unexpected keyword argument 'xyz'"), converter.make_tf_dataset(xyz=1):
        pass


def test_epochs_are_endless_unless_a_number_is_given(spark: SparkSession) -> None:
    converter = make_spark_converter(numbers(spark, 10))
    with converter.make_torch_dataloader(batch_size=4) as loader:
        batches = iter(loader)
        rows = [number for _ in range(25) for number in next(batches)["id"].tolist()]
    assert len(rows) == 100
    assert sorted(rows) == sorted([*range(10)] * 10)
    with converter.make_tf_dataset(batch_size=4) as dataset:
        sizes = [len(batch.id) for batch in dataset.take(25)]
    assert sizes == [4] * 25


@pytest.mark.parametrize("capacity", [None, 20])
def test_batches_of_tensorflow_have_their_size_and_each_row_once(capacity: int | None, spark: SparkSession) -> None:
    converter = make_spark_converter(numbers(spark, 100).selectExpr("id", "array(id, -id) AS pair"))
    with converter.make_tf_dataset(
        batch_size=30, num_epochs=2, shuffling_queue_capacity=capacity, shuffle_row_groups=False
    ) as dataset:
        batches = list(dataset.as_numpy_iterator())
    assert [len(batch.id) for batch in batches] == [30] * 6 + [20]
    ids = np.concatenate([batch.id for batch in batches])
    assert sorted(ids) == sorted([*range(100)] * 2)
    assert (ids[:100].tolist() == list(range(100))) == (capacity is None)
    for batch in batches:
        np.testing.assert_array_equal(batch.pair, np.stack([batch.id, -batch.id], axis=1))


def test_the_environment_of_a_launcher_names_the_shard(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    converter = make_spark_converter(numbers(spark, 10))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    own = ids_of(converter)
    assert own == ids_of(converter, cur_shard=1, shard_count=2)
    assert 0 < len(own) < 10
    assert sorted(own + ids_of(converter, cur_shard=0, shard_count=2)) == list(range(10))
    assert "is not consistent with the environment's rank (1) and size (2)" in caplog.text


def test_files_that_are_gone_are_waited_for_and_named(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    numbers(spark, 10).write.parquet((tmp_path / "mine").as_uri())
    converter = make_spark_converter((tmp_path / "mine").as_uri())
    monkeypatch.setattr(module, "_FILE_AVAILABILITY_WAIT_TIMEOUT_SECS", 0.3)
    gone = Path(urlsplit(converter.file_urls[0]).path)
    gone.rename(gone.with_suffix(".away"))
    begun = time.monotonic()
    with (
        pytest.raises(RuntimeError, match=f"Timeout while waiting for all parquet-store files.*{gone.name}"),
        converter.make_torch_dataloader(),
    ):
        pass
    assert time.monotonic() - begun > 0.3


def test_many_small_files_are_warned_of(spark: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    make_spark_converter(numbers(spark, 11))
    assert "The median size" in caplog.text
    caplog.clear()
    make_spark_converter(numbers(spark, 12).coalesce(1))
    assert "The median size" not in caplog.text


def test_the_conf_must_be_set_to_a_url(spark: SparkSession) -> None:
    spark.conf.set(CONF, "/a/b/c")
    with pytest.raises(ValueError, match="scheme-less"):
        make_spark_converter(numbers(spark, 3))
    spark.conf.unset(CONF)
    with pytest.raises(ValueError, match=f"Please set the spark config {CONF}"):
        make_spark_converter(numbers(spark, 3))
    with pytest.raises(ValueError, match=f"Please set the spark config {CONF}"):
        make_spark_converter("file:///a")


def test_a_dtype_that_is_none_is_refused(spark: SparkSession) -> None:
    with pytest.raises(ValueError, match="dtype float16 is not supported"):
        make_spark_converter(numbers(spark, 3), dtype="float16")


def test_forms_of_databricks_are_made_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "15.4")
    for url in ("file:/dbfs/a/b", "file:///dbfs/a/b", "dbfs:/a/b", "dbfs:///a/b"):
        assert module._normalize_databricks_dbfs_url(url, "").replace("///", "/") == "file:/dbfs/a/b"
    with pytest.raises(ValueError, match="my text"):
        module._normalize_databricks_dbfs_url("dbfs://a/b", "my text")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of a program that has ended, and what it said: its URL, and the files before and after a fork."""
    folder = tmp_path_factory.mktemp("ended")
    program = f"""
import os, sys
from urllib.parse import urlsplit
from converter import make_spark_converter as make_tensors
from converter import start_local_spark
from converter.petastorm.spark import SparkDatasetConverter, make_spark_converter
spark = start_local_spark("atexit", master="local[1]")
spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, {folder.as_uri()!r})
converter = make_spark_converter(spark.range(5))
written = urlsplit(converter.cache_dir_url).path
print(converter.cache_dir_url, sorted(os.listdir(written)), sep="\\n", flush=True)
child = os.fork()
if child == 0:
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
print(sorted(os.listdir(written)) if os.path.exists(written) else "nothing")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    return folder, done.stdout.strip().splitlines()[-3:]


def test_what_was_written_goes_with_the_interpreter(ended: tuple[Path, list[str]]) -> None:
    folder, (url, files, _) = ended
    assert url.startswith(folder.as_uri())
    assert "part-00000" in files
    assert list(folder.iterdir()) == []


def test_a_forked_child_that_ends_leaves_what_its_parent_wrote(ended: tuple[Path, list[str]]) -> None:
    _, (_, before, after) = ended
    assert after == before


def test_old_days_stay_what_they_are_in_sparks_legacy_mode(spark: SparkSession) -> None:
    names = [f"spark.sql.parquet.{kind}RebaseModeInWrite" for kind in ("datetime", "int96")]
    for name in names:
        spark.conf.set(name, "LEGACY")
    try:
        converter = make_spark_converter(spark.sql("select date'1500-01-01' as d, timestamp'1500-01-01 12:00:00' as t"))
    finally:
        for name in names:
            spark.conf.unset(name)
    with converter.make_torch_dataloader(num_epochs=1, data_loader_fn=lambda reader, **_: list(reader)) as batches:
        assert [str(batches[0].d[0]), str(batches[0].t[0])[:10]] == ["1500-01-01", "1500-01-01"]


def test_a_cache_folder_with_a_percent_sign_is_deleted(spark: SparkSession, tmp_path: Path) -> None:
    spark.conf.set(CONF, f"{tmp_path.as_uri()}/my%20cache")
    converter = make_spark_converter(numbers(spark, 8))
    assert sorted(ids_of(converter)) == list(range(8))
    assert list((tmp_path / "my%20cache").rglob("*.parquet"))
    converter.delete()
    assert not list((tmp_path / "my%20cache").rglob("*.parquet"))


@pytest.mark.parametrize("count", [1, 2])
def test_folders_of_partitions_with_escaped_signs_are_read(spark: SparkSession, tmp_path: Path, count: int) -> None:
    for number in range(count):
        folder = tmp_path / "table" / f"k=10%3A3{number}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"id": [number]}), folder / "part.parquet")
    converter = make_spark_converter((tmp_path / "table").as_uri())
    assert sorted(ids_of(converter, schema_fields=["id"])) == list(range(count))


def test_a_name_in_which_spark_puts_variables_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    named = spark.range(1).toDF("a${b}")
    quoted = spark.range(1).toDF('a"${b}')
    for df in (
        named,
        named.select(F.struct("`a${b}`").alias("x")),
        named.select(F.array(F.struct("`a${b}`")).alias("x")),
    ):
        with pytest.raises(ValueError, match=r"Column 'a\$\{b\}' has a name in which Spark puts a variable"):
            make_spark_converter(df)
    with pytest.raises(ValueError, match="has a name in which Spark puts a variable"):
        make_spark_converter(quoted)
    assert not list(tmp_path.iterdir())
    # Not the column's own name, as a VectorAssembler notes those that it took.
    described = spark.range(1).withMetadata("id", {"attributes": [{"name": "cost_${x}"}]})
    assert ids_of(make_spark_converter(described)) == [0]


@pytest.mark.parametrize("is_all", [False, True])
def test_a_frame_whose_files_are_gone_is_written_anew(spark: SparkSession, is_all: bool) -> None:
    df = numbers(spark, 9)
    first = make_spark_converter(df)
    for path in list(folder_of(first).glob("*.parquet"))[: None if is_all else 1]:
        path.unlink()
    second = make_spark_converter(df)
    assert sorted(ids_of(second)) == list(range(9))
    assert make_spark_converter(df).cache_dir_url == second.cache_dir_url != first.cache_dir_url
