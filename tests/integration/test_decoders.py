"""Decoders on what Spark wrote: the cache holds the bytes, its manifest and key say how they are decoded."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from converter import (
    DatasetConverter,
    Image,
    NumPy,
    SourceError,
    make_delta_converter,
    make_spark_converter,
    open_converter,
)
from tests.folders import files_below
from tests.repository import REPOSITORY

NUM_ROWS, NULL_ROW = 40, 11
DECODE: dict[str, Any] = {"photo": Image(size=(6, 5)), "features": NumPy()}


class Backwards:
    """Says one dtype and gives another."""

    dtype = "float32"
    shape = (2, 3)

    def __init__(self, held: Any = None) -> None:
        self.held = held

    def decode(self, values: pa.LargeBinaryArray) -> np.ndarray[Any, Any]:
        return np.zeros((len(values), 2, 3), np.int64)


def picture(number: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).integers(0, 256, (6, 5, 3), np.uint8)


def rows(bad: int | None = None) -> pa.Table:
    photos: list[bytes | None] = []
    features = []
    for number in range(NUM_ROWS):
        stream = io.BytesIO()
        PIL.Image.fromarray(picture(number)).save(stream, "PNG")
        photos.append(stream.getvalue())
        stream = io.BytesIO()
        np.save(stream, np.full((2, 3), number, np.float32))
        features.append(stream.getvalue())
    photos[NULL_ROW] = None
    if bad is not None:
        photos[bad] = b"no picture"
    columns = {
        "id": range(NUM_ROWS),
        "photo": pa.array(photos, pa.binary()),
        "features": pa.array(features, pa.binary()),
    }
    return pa.table(columns)


def frame(spark: SparkSession, bad: int | None = None) -> DataFrame:
    return spark.createDataFrame(rows(bad).to_pylist(), "id long, photo binary, features binary").repartition(3, "id")


def check(batches: list[dict[str, Any]]) -> None:
    ids = np.concatenate([np.asarray(batch["id"]) for batch in batches])
    photos = np.concatenate([np.asarray(batch["photo"]) for batch in batches])
    features = np.concatenate([np.asarray(batch["features"]) for batch in batches])
    assert sorted(ids.tolist()) == list(range(NUM_ROWS))
    for id_, photo, feature in zip(ids.tolist(), photos, features, strict=True):
        np.testing.assert_array_equal(photo, 0 if id_ == NULL_ROW else picture(id_))
        np.testing.assert_array_equal(feature, np.full((2, 3), id_))


@pytest.mark.short
@pytest.mark.parametrize("writer", ["executors", "spark"])
def test_tensors_arrive_in_every_framework(spark: SparkSession, tmp_path: Path, writer: str) -> None:
    with make_spark_converter(frame(spark), cache_dir=tmp_path, writer=writer, decode=DECODE) as converter:
        assert converter.schema["photo"].shape == (6, 5, 3)
        assert converter.schema["features"].dtype == "float32"
        for copy in (converter, pickle.loads(pickle.dumps(converter))):
            with copy.make_batch_reader(batch_size=7, shuffle=True, nulls="mask") as reader:
                check(list(reader))
        with converter.make_torch_dataloader(batch_size=7, shuffle=True, nulls={"photo": 0}) as loader:
            check(list(loader))
        with converter.make_tf_dataset(batch_size=7, shuffle=True, nulls="mask") as dataset:
            assert dataset.element_spec["photo"].shape.as_list() == [None, 6, 5, 3]
            check(list(dataset))


def test_a_delta_tables_bytes_are_decoded_where_they_are(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "table", rows())
    converter = make_delta_converter(tmp_path / "table", decode=DECODE)
    with converter.make_batch_reader(batch_size=7, nulls="mask") as reader:
        check(list(reader))
    part = make_delta_converter(tmp_path / "table", filters=[("id", "<", 5)], decode=DECODE)
    assert part.head(5)["photo"].shape == (5, 6, 5, 3)


class Halves:
    """A user's decoder: the picture's bytes are not looked at."""

    dtype, shape = "uint8", (1,)

    def decode(self, values: pa.LargeBinaryArray) -> np.ndarray[Any, Any]:
        return np.array([[len(value.as_buffer()) % 256] for value in values], np.uint8)


def test_an_entry_knows_its_decoders_and_asks_for_the_users_own(spark: SparkSession, tmp_path: Path) -> None:
    options: dict[str, Any] = {"cache_dir": tmp_path, "cache_key": "photos", "delete_on_exit": False}
    df = frame(spark)
    with contextlib.ExitStack() as stack:

        def convert(decode: Any) -> DatasetConverter:
            return stack.enter_context(make_spark_converter(df, decode=decode, **options))

        converter = convert(DECODE)
        with open_converter(converter.url) as opened:
            assert opened.schema == converter.schema
            with opened.make_batch_reader(batch_size=7, nulls="mask") as reader:
                check(list(reader))
        with open_converter(converter.url, decode={"photo": Image(size=(3, 3))}) as opened:
            assert opened.schema["photo"].shape == (3, 3, 3)
        # What a column is belongs to the key.
        own = convert({"photo": Halves()})
        assert convert(DECODE).url == converter.url
        assert own.url not in (converter.url, convert(None).url)
        with pytest.raises(
            ValueError, match=r"'photo' was declared with a decoder of your own, .*Halves.*decode=\{'photo': …\}"
        ):
            open_converter(own.url)
        with open_converter(own.url, decode={"photo": Halves()}) as opened:
            assert opened.head(2)["photo"].shape == (2, 1)


def test_what_cannot_be_decoded_is_refused_before_anything_is_written(spark: SparkSession, tmp_path: Path) -> None:
    for decode, said in (
        ({"id": Image()}, "column 'id' has the type int64; only binary columns are decoded"),
        ({"phto": Image()}, "'phto', which does not exist. The columns are 'id', 'photo', 'features'"),
        ({"photo": Image}, r"is a class; pass an object of it"),
        ({"photo": object()}, "has no dtype, no shape, no decode"),
        ([Image()], "decode must be a dict of column name to decoder"),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            make_spark_converter(frame(spark), cache_dir=tmp_path, decode=decode)  # type: ignore[arg-type]
        assert not files_below(tmp_path)


@pytest.mark.parametrize("writer", ["executors", "spark"])
def test_rows_that_are_no_pictures_are_left_out_of_the_cache_too(
    spark: SparkSession, tmp_path: Path, writer: str, caplog: pytest.LogCaptureFixture
) -> None:
    decode = {"photo": Image(size=(6, 5), on_error="skip")}
    with make_spark_converter(frame(spark, bad=3), cache_dir=tmp_path, writer=writer, decode=decode) as converter:
        assert len(converter) == NUM_ROWS - 1
        assert "1 of 40 rows cannot be decoded and are left out" in caplog.text
        with converter.make_batch_reader(batch_size=7, nulls="mask") as reader:
            assert 3 not in {int(id_) for batch in reader for id_ in batch["id"]}
        assert converter.statistics["id"].null_count == 0


def test_an_entry_whose_rows_cannot_be_decoded_is_removed_again(spark: SparkSession, tmp_path: Path) -> None:
    df = frame(spark).selectExpr("id", "binary('text') as photo")
    with pytest.raises(SourceError, match="No row of 'photo' can be decoded"):
        make_spark_converter(df, cache_dir=tmp_path, decode={"photo": Image(on_error="skip")})
    assert [path for path in files_below(tmp_path) if not path.endswith(".owner")] == []


@pytest.mark.parametrize("writer", ["executors", "spark"])
def test_executors_decode_once_if_asked(spark: SparkSession, tmp_path: Path, writer: str) -> None:
    decode: dict[str, Any] = {"photo": Image(size=(6, 5)), "features": NumPy("float32", (2, 3))}
    options: dict[str, Any] = {"cache_dir": tmp_path, "writer": writer, "decode": decode, "decode_at": "write"}
    with make_spark_converter(frame(spark), **options) as converter:
        field = converter.schema["photo"]
        assert (field.dtype, field.shape, field.decoder) == ("uint8", (6, 5, 3), "")
        assert converter.statistics["features"].mean == pytest.approx((NUM_ROWS - 1) / 2)
        with converter.make_batch_reader(batch_size=7, shuffle=True, nulls="mask") as reader:
            check(list(reader))
        with open_converter(converter.url) as opened, opened.make_torch_dataloader(nulls="mask") as loader:
            check(list(loader))
    assert [path for path in files_below(tmp_path) if not path.endswith(".owner")] == []


class Scaled:
    """A decoder with a parameter."""

    dtype = "float32"
    shape = (1,)

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def decode(self, values: pa.LargeBinaryArray) -> np.ndarray[Any, Any]:
        first = np.array([value.as_py()[0] for value in values], np.float32)
        return (first * np.float32(self.factor))[:, None]


@pytest.mark.parametrize("cache_key", [None, "scaled"])
def test_a_decoder_of_the_users_own_is_known_by_its_parameters_and_its_code(
    spark: SparkSession, tmp_path: Path, cache_key: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "converter")

    class Shifted(Scaled):
        def decode(self, values: pa.LargeBinaryArray) -> np.ndarray[Any, Any]:
            return super().decode(values) + np.float32(1)

    first = Shifted

    class Shifted(Scaled):  # type: ignore[no-redef]  # As where a cell of a notebook is edited and run again.
        def decode(self, values: pa.LargeBinaryArray) -> np.ndarray[Any, Any]:
            return super().decode(values) + np.float32(2)

    df = spark.createDataFrame(pa.table({"x": pa.array([b"\x01", b"\x02"], pa.binary())}))
    with contextlib.ExitStack() as stack:

        def convert(decoder: Any) -> DatasetConverter:
            converter = make_spark_converter(
                df, cache_dir=tmp_path, decode={"x": decoder}, decode_at="write", cache_key=cache_key
            )
            return stack.enter_context(converter)

        def values_of(converter: DatasetConverter) -> list[float]:
            with converter.make_batch_reader(batch_size=10) as reader:
                return sorted(np.concatenate([batch["x"][:, 0] for batch in reader]).tolist())

        made = [convert(decoder) for decoder in (Scaled(2), Scaled(3), first(2), Shifted(2))]
        assert [values_of(converter) for converter in made] == [[2, 4], [3, 6], [3, 5], [4, 6]]
        # Without a cache_key it is written anew: code may read what nobody looks at.
        assert (convert(Scaled(2)).url == made[0].url) == (cache_key is not None)
        assert ("your own decoders of 'x' make is written for this call alone" in caplog.text) == (cache_key is None)


PROGRAM = """
import sys, zipfile, numpy as np, pyarrow as pa
from converter import make_spark_converter, start_local_spark
sys.path.insert(0, sys.argv[2])
from in_archive import Zeros
class Own(Zeros):
    def __init__(self, factor): self.factor = factor
spark = start_local_spark(master="local[1]")
df = spark.createDataFrame(pa.table({"x": pa.array([b"a"], pa.binary())}))
spark.sparkContext.addPyFile(sys.argv[3])
from sent_by_spark import Zeros as Sent
for decoder in (Own(1), Own(2), Zeros(), Sent()):
    options = {"decode": {"x": decoder}, "decode_at": "write", "cache_key": "own", "delete_on_exit": False}
    print(make_spark_converter(df, cache_dir=sys.argv[1], **options).url)
spark.stop()
"""


def test_a_program_finds_what_its_own_decoder_has_made_until_it_is_edited(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "deps.zip", "w") as archive:
        decode = "    def decode(self, values): return np.zeros((len(values), 1), np.float32)\n"
        archive.writestr(
            "in_archive.py", f"import numpy as np\nclass Zeros:\n    dtype, shape = 'float32', (1,)\n{decode}"
        )
    program, sent = tmp_path / "program.py", tmp_path / "apart" / "sent_by_spark.py"
    sent.parent.mkdir()
    sent.write_text(f"import numpy as np\nclass Zeros:\n    dtype, shape = 'float32', (1,)\n{decode}")
    urls = []
    for text in (PROGRAM, "# Edited.\n" + PROGRAM, PROGRAM.replace("self.factor = factor", "self.factor = -factor")):
        # A file that was written in the tick of the clock in which a program begins is taken for a later one.
        time.sleep(0.05)
        program.write_text(text)
        command = [sys.executable, str(program), str(tmp_path / "cache"), str(tmp_path / "deps.zip"), str(sent)]
        paths = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(tmp_path / "deps.zip")])}
        told = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | paths)
        urls.append(told.stdout.split())
    assert len(set(urls[0])) == 4
    assert urls[1] == urls[0]
    assert urls[2][2:] == urls[0][2:]
    assert not {*urls[2][:2]} & {*urls[0]}


def test_pictures_of_many_sizes_are_ragged_in_the_cache_too(spark: SparkSession, tmp_path: Path) -> None:
    df = frame(spark).where(f"id <> {NULL_ROW}")
    with make_spark_converter(df, cache_dir=tmp_path, decode={"photo": Image()}, decode_at="write") as converter:
        # They happen to have one size.
        assert converter.schema["photo"].shape == (6, 5, 3)
        np.testing.assert_array_equal(converter.head(1)["photo"][0], picture(int(converter.head(1)["id"][0])))


@pytest.mark.parametrize("writer", ["executors", "spark"])
def test_executors_leave_out_what_cannot_be_decoded_if_asked(
    spark: SparkSession, tmp_path: Path, writer: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = {3, 17}
    df = frame(spark).withColumn(
        "photo", F.when(F.col("id").isin(*bad), F.lit(b"no picture")).otherwise(F.col("photo"))
    )
    decode = {"photo": Image(size=(6, 5), on_error="skip"), "features": NumPy("float32", (2, 3), on_error="skip")}
    options: dict[str, Any] = {"cache_dir": tmp_path, "writer": writer, "decode_at": "write", "decode": decode}
    with make_spark_converter(df, **options) as converter:
        assert len(converter) == NUM_ROWS - len(bad)
        with converter.make_batch_reader(batch_size=NUM_ROWS, nulls="mask") as reader:
            (batch,) = reader
    assert sorted(batch["id"].tolist()) == [row for row in range(NUM_ROWS) if row not in bad]
    for row, photo, features in zip(batch["id"].tolist(), batch["photo"], batch["features"], strict=True):
        np.testing.assert_array_equal(photo, 0 if row == NULL_ROW else picture(row))
        np.testing.assert_array_equal(features, np.full((2, 3), row))
    assert "2 rows cannot be decoded and are left out." in caplog.text
    assert ("The first is row" in caplog.text) == (writer == "executors")

    nothing = frame(spark).selectExpr("id", "binary('text') AS photo")
    with pytest.raises(SourceError, match="No row of 'photo' can be decoded"):
        make_spark_converter(nothing, **options | {"decode": {"photo": decode["photo"]}})
    assert [path for path in files_below(tmp_path) if not path.endswith(".owner")] == []


@pytest.mark.parametrize("writer", ["executors", "spark"])
@pytest.mark.parametrize("has_null", [False, True])
def test_executors_find_the_shape_of_decoders_without_one(
    spark: SparkSession, tmp_path: Path, writer: str, has_null: bool
) -> None:
    stream = io.BytesIO()
    np.save(stream, np.float32(2.5))
    df = frame(spark).withColumn("number", F.lit(stream.getvalue()))
    if not has_null:
        df = df.where(f"id <> {NULL_ROW}")
    decode = {"photo": Image(), "features": NumPy("float32", None, ndim=2), "number": NumPy("float32", ())}
    options: dict[str, Any] = {"cache_dir": tmp_path, "writer": writer, "decode": decode, "decode_at": "write"}
    with make_spark_converter(df, **options) as converter:
        assert [converter.schema[name].shape for name in decode] == [(6, 5, 3), (2, 3), ()]
        assert converter.statistics["number"].mean == 2.5
        with converter.make_batch_reader(batch_size=NUM_ROWS, nulls="mask") as reader:
            (batch,) = reader
    assert batch["number"].tolist() == [2.5] * len(batch["id"])
    for row, photo, features in zip(batch["id"].tolist(), batch["photo"], batch["features"], strict=True):
        np.testing.assert_array_equal(photo, 0 if row == NULL_ROW else picture(row))
        np.testing.assert_array_equal(features, np.full((2, 3), row))


@pytest.mark.parametrize("writer", ["executors", "spark"])
def test_a_decoded_number_may_be_null(spark: SparkSession, tmp_path: Path, writer: str) -> None:
    stream = io.BytesIO()
    np.save(stream, np.int32(7))
    df = spark.createDataFrame([(0, stream.getvalue()), (1, None)], "id int, x binary").coalesce(1)
    options: dict[str, Any] = {"cache_dir": tmp_path, "writer": writer, "decode_at": "write"}
    with make_spark_converter(df, decode={"x": NumPy("int32", ())}, **options) as converter:
        rows = converter.head()
        assert (rows["x"].tolist(), rows["x__valid"].tolist()) == ([7, 0], [True, False])
    with pytest.raises(ValueError, match="column 'x' cannot give single numbers of uint8"):
        make_spark_converter(df, decode={"x": NumPy("uint8", ())}, **options)


def test_what_executors_cannot_decode_is_named_and_leaves_nothing(spark: SparkSession, tmp_path: Path) -> None:
    for options, said in (
        (
            {"decode": {"photo": Image(size=(6, 5))}},
            r"Column 'photo' cannot be decoded in row \d+ of partition \d+: .*no JPEG",
        ),
        (
            {"decode": {"features": NumPy()}},
            "with decode_at='write' the decoder of column 'features' needs a dtype and a",
        ),
        (
            {"decode": {"features": Backwards()}},
            r"decode: .*Backwards.* of column 'features' is no decoder: decode\(\) returned int64 .* expected float32",
        ),
        (
            {"decode": {"features": Backwards(threading.Lock())}},
            "the decoder of column 'features' cannot be sent to the executors: .*lock.* or pass decode_at='read'",
        ),
        ({"decode": {}, "decode_at": "now"}, "decode_at must be 'read' or 'write', got 'now'"),
    ):
        with pytest.raises((SourceError, ValueError, TypeError), match=said):
            make_spark_converter(frame(spark, bad=3), cache_dir=tmp_path, **{"decode_at": "write", **options})  # type: ignore[arg-type]
        assert [path for path in files_below(tmp_path) if not path.endswith(".owner")] == []
