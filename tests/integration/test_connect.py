"""Spark Connect: the same rows, with nothing of the JVM within reach.

A local Connect server refuses to start beside a classic session, so it has a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.connect.client.retries import DefaultPolicy

from converter import DatasetConverter, Image, make_spark_converter
from converter.sources.spark.local import find_java_home
from tests.folders import files_below
from tests.processes import error_of, run_python
from tests.rows import assert_same, concatenate, known_rows, known_valid, known_values
from tests.servers.connect import only_connect_server
from tests.waiting import ReadStderr, rows_that_wait, wait_until

pytestmark = pytest.mark.short

CONF = {
    "spark.sql.session.timeZone": "America/New_York",
    # Hangs on a Python UDF over a Parquet scan without this (SPARK-58241).
    "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled": "false",
}


def read(converter: DatasetConverter, **options: Any) -> Any:
    with converter.make_batch_reader(batch_size=64, ragged="nested", **options) as reader:
        return concatenate(list(reader))


def png(number: int) -> bytes:
    """A picture of two by two pixels, all of one colour."""
    stream = io.BytesIO()
    PIL.Image.new("RGB", (2, 2), (number, 2 * number, 3)).save(stream, "PNG")
    return stream.getvalue()


def plain(value: Any) -> Any:
    """Arrays, and arrays in them, as lists of Python's numbers."""
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def start_session() -> Any:
    """A session of a server of its own."""
    # The server inherits them, and its Python workers are to be this Python.
    os.environ |= {
        "JAVA_HOME": str(find_java_home()),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    builder: Any = SparkSession.builder.remote("local[2]")
    for name, value in CONF.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def convert_over_connect(folder: str) -> dict[str, Any]:
    spark = start_session()
    cache_dir = f"{folder}/cache"
    result: dict[str, Any] = {"session": type(spark).__module__}

    with make_spark_converter(known_rows(spark, 300), cache_dir=cache_dir) as converter:
        assert_same(read(converter), known_values(np.arange(300)))
        result["rows"] = len(converter)
        frame = converter.where([("id", ">=", 7)]).to_spark(spark, columns=["id"], with_row_index="row")
        with converter.make_batch_reader(batch_size=64, columns=["id"], with_row_index="row") as reader:
            numbers = concatenate(list(reader))
        expected = dict(zip(numbers["id"].tolist(), numbers["row"].tolist(), strict=True))
        assert {row["id"]: row["row"] for row in frame.collect()} == {one: expected[one] for one in range(7, 300)}
        result["fingerprint"] = converter.fingerprint
        with converter.make_torch_dataloader(columns=["id"], batch_size=100) as loader:
            result["torch"] = [batch["id"].tolist() for batch in loader] == [
                list(range(start, start + 100)) for start in (0, 100, 200)
            ]
    with make_spark_converter(known_rows(spark, 300, nulls=True), cache_dir=cache_dir) as converter:
        found = read(converter, nulls="mask")
        masks = {name: found.pop(f"{name}__valid") for name in list(found) if f"{name}__valid" in found}
        assert_same(found, known_values(np.arange(300), nulls=True))
        assert_same(masks, known_valid(np.arange(300)))
    result["left"] = files_below(cache_dir)

    stderr = ReadStderr(f"{folder}/seen")
    with contextlib.redirect_stderr(stderr):
        make_spark_converter(rows_that_wait(spark, stderr.flag), cache_dir=cache_dir, progress=True).delete()
    result["progress"] = stderr.getvalue()
    stderr.flag.unlink()

    rows = spark.range(0, 10, 1, 2)
    images = rows.selectExpr("unhex(lpad(hex(id), 8, '0')) AS image")
    result["images"] = []
    for writer in ("executors", "spark"):
        written = make_spark_converter(images, cache_dir=f"{folder}/images", writer=writer, shapes={"image": (2, 2)})
        with written as converter:
            result["images"].append(read(converter)["image"].tolist())
        shutil.rmtree(f"{folder}/images")
    nested = rows.selectExpr("id", "array(string(id), NULL) AS tags", "map('k', id) AS m", "interval '1' day AS span")
    result["nested"] = []
    for writer in ("executors", "spark"):
        with make_spark_converter(nested, cache_dir=f"{folder}/nested", writer=writer) as converter:
            found = read(converter, nulls="mask")
            result["nested"].append(
                [[row.tolist() for row in found[name]] for name in ("tags", "tags__element_valid", "m.key", "m.value")]
                + [found["span"].tolist()]
            )
        shutil.rmtree(f"{folder}/nested")
    declared = spark.createDataFrame(
        [(row, png(row), "red" if row % 2 else "blue") for row in range(10)], "id int, photo binary, colour string"
    ).selectExpr(
        "*", "float(id) AS x",
        "transform(sequence(0, id % 3), i -> named_struct('price', i + id, 'sku', colour)) AS items",
    )  # fmt: skip
    arguments: dict[str, Any] = {
        "decode": {"photo": Image(size=(2, 2))}, "categories": ["colour", "items.sku"], "standardize": ["x"],
    }  # fmt: skip
    result["declared"] = []
    for options in ({"writer": "executors"}, {"writer": "spark"}, {"writer": "executors", "decode_at": "write"}):
        with make_spark_converter(declared, cache_dir=f"{folder}/declared", **arguments, **options) as converter:
            categories = [converter.schema[name].categories for name in arguments["categories"]]
            found = {name: plain(values) for name, values in read(converter).items()}
            result["declared"].append([found, categories])
        shutil.rmtree(f"{folder}/declared")
    # Each task of Spark's own writer has codes of its own, and reports what they are.
    rows_of_texts = spark.range(0, 30, 1, 3).selectExpr("IF(id % 7 = 0, NULL, string(2 - id div 10)) AS text")
    with make_spark_converter(
        rows_of_texts, cache_dir=f"{folder}/codes", writer="spark", categories=["text"]
    ) as converter:
        categories, found = converter.schema["text"].categories, read(converter, nulls="mask")
        counts = converter.statistics["text"].counts
        result["codes"] = [found["text"].tolist(), found["text__valid"].tolist(), categories, plain(counts)]
        (file, *_) = Path(converter.url.removeprefix("file://")).glob("data-*/*.parquet")
        result["codes"].append(str(pq.read_schema(file).field("text").type))
    shutil.rmtree(f"{folder}/codes")
    result["nowhere"] = error_of(lambda: make_spark_converter(rows))
    os.environ["CONVERTER_CACHE_DIR"] = f"{folder}/from environment"
    with make_spark_converter(rows):
        result["from environment"] = len(files_below(f"{folder}/from environment"))
    del os.environ["CONVERTER_CACHE_DIR"]
    spark.conf.set("converter.cacheDir", f"{folder}/from conf")
    with make_spark_converter(rows):
        result["from conf"] = len(files_below(f"{folder}/from conf"))
    result["failed job"] = error_of(
        lambda: make_spark_converter(spark.sql("SELECT id DIV (id - 7) AS x FROM range(10)"), cache_dir=cache_dir)
    )
    result["unsupported"] = error_of(
        lambda: make_spark_converter(spark.sql("SELECT map('a', NULL) AS m, NULL AS n"), cache_dir=cache_dir)
    )
    result["stream"] = error_of(
        lambda: make_spark_converter(spark.readStream.format("rate").load(), cache_dir=cache_dir)
    )
    result["left at the end"] = files_below(folder)
    spark.stop()
    return result


def lose_the_server(folder: str) -> dict[str, Any]:
    """Convert while the server ends; count how often Spark used up its retries, which take some ten minutes each."""
    spark = start_session()
    spark.client.set_retry_policies([DefaultPolicy(max_retries=2, initial_backoff=10, max_backoff=10)])
    begun = f"{folder}/begun"

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        Path(begun).touch()
        time.sleep(600)
        yield from batches

    def end_server() -> None:
        wait_until(Path(begun).exists)
        subprocess.run(["pkill", "-KILL", "-s", str(os.getsid(0)), "java"], check=True)

    slow = spark.range(0, 6, 1, 2).mapInArrow(rows, "id long")
    killer = threading.Thread(target=end_server)
    killer.start()
    told: list[str] = []

    def tell(message: Warning | str, *_: Any) -> None:
        # Spark gives back what a dead server holds in a thread of its own, for which nobody waits.
        if threading.current_thread() is threading.main_thread():
            told.append(str(message))

    warnings.simplefilter("always")
    warnings.showwarning = tell
    result: dict[str, Any] = {}
    for name, frame in (("killed", slow), ("dead", spark.range(5))):
        told.clear()
        result[name] = error_of(functools.partial(make_spark_converter, frame, cache_dir=f"{folder}/cache"))
        result[f"{name}: rounds"] = sum("[RETRIES_EXCEEDED]" in message for message in told)
        killer.join()
    result["left"] = files_below(f"{folder}/cache")
    print(json.dumps(result), flush=True)
    # Spark's own end would ask the server again.
    os._exit(0)


@pytest.fixture(scope="module")
def connect(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `convert_over_connect` saw; that its values are exact it has asserted itself."""
    with only_connect_server():
        return run_python(convert_over_connect, str(tmp_path_factory.mktemp("connect")))


def test_every_row_arrives_over_connect(connect: dict[str, Any]) -> None:
    assert connect["session"].startswith("pyspark.sql.connect.")
    assert connect["rows"] == 300
    assert connect["torch"] is True
    assert connect["left"] == ["converter-v1/.owner"]


def test_connect_writes_the_very_rows_that_classic_spark_writes(
    spark: SparkSession, cache_dir: Path, connect: dict[str, Any]
) -> None:
    with make_spark_converter(known_rows(spark, 300), cache_dir=cache_dir) as converter:
        assert converter.fingerprint == connect["fingerprint"]


def test_bytes_are_the_numbers_that_are_declared_over_connect(connect: dict[str, Any]) -> None:
    assert connect["images"] == [[[[0, 0], [0, number]] for number in range(10)]] * 2


def test_lists_of_text_maps_and_intervals_over_connect(connect: dict[str, Any]) -> None:
    tags, masks = [[str(row), ""] for row in range(10)], [[True, False]] * 10
    assert connect["nested"] == [[tags, masks, [["k"]] * 10, [[row] for row in range(10)], [86_400_000_000] * 10]] * 2


def test_structs_pictures_categories_and_scales_over_connect(connect: dict[str, Any]) -> None:
    rows = np.arange(10)
    expected = {
        "id": rows.tolist(),
        "photo": [[[[row, 2 * row, 3]] * 2] * 2 for row in range(10)],
        "colour": (rows % 2).tolist(),
        "x": pytest.approx(((rows - rows.mean()) / rows.std()).tolist(), rel=1e-5),
        "items.price": [[row + item for item in range(row % 3 + 1)] for row in range(10)],
        "items.sku": [[row % 2] * (row % 3 + 1) for row in range(10)],
    }
    assert connect["declared"] == [[expected, [["blue", "red"]] * 2]] * 3


def test_sparks_writer_stores_codes_over_connect(connect: dict[str, Any]) -> None:
    valid = [row % 7 != 0 for row in range(30)]
    codes = [(2 - row // 10) * valid[row] for row in range(30)]
    assert connect["codes"] == [codes, valid, ["0", "1", "2"], [8, 9, 8], "int32"]


def test_connect_needs_to_be_told_where_the_cache_goes(connect: dict[str, Any]) -> None:
    kind, text = connect["nowhere"]
    assert kind == "CacheNotConfiguredError"
    assert re.search(r"Spark Connect.*cache_dir=….*CONVERTER_CACHE_DIR.*converter\.cacheDir", text)
    assert connect["from environment"] == 5
    assert connect["from conf"] == 5


def test_the_bar_counts_tasks_over_connect(connect: dict[str, Any]) -> None:
    assert re.search(r"\rWriting the cache: \d of [23] tasks \[\d\d:\d\d\]", connect["progress"])
    assert "0 of 0" not in connect["progress"]


def test_errors_over_connect_are_ours(connect: dict[str, Any]) -> None:
    kind, text = connect["failed job"]
    assert kind == "CacheError"
    assert re.search(r"Spark could not write the cache into .*DIVIDE_BY_ZERO", text)
    assert len(text) < 1000
    kind, text = connect["unsupported"]
    assert kind == "UnsupportedTypeError"
    assert re.search(r"(?s)2 columns cannot.*'m\.value' has type void.*'n' has type void", text)
    kind, text = connect["stream"]
    assert kind == "SourceError"
    assert re.search("A streaming DataFrame has no end", text)
    assert all(name.endswith(".owner") for name in connect["left at the end"])


@pytest.mark.long("a Connect server of its own: 12 s")
def test_a_server_that_ends_in_a_write_is_waited_for_once(tmp_path: Path) -> None:
    with only_connect_server():
        seen = run_python(lose_the_server, str(tmp_path))
    kind, text = seen["killed"]
    assert kind == "CacheError"
    assert re.search(
        r"^Spark could not write the cache into .*: the server of Spark Connect cannot be reached \(", text
    )
    assert text.endswith("Make the DataFrame again in a new session once the server is back.")
    assert seen["killed: rounds"] == 1
    assert seen["dead: rounds"] == 1
    assert all(name.endswith(".owner") for name in seen["left"])
