"""Cached files exist as long as they are wanted, and nothing that is not ours is ever touched."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession

from converter import CacheNotOwnedError, DatasetConverter, make_spark_converter, start_local_spark
from converter.cache import sweeps
from converter.sources.spark import identity
from tests.folders import files_below
from tests.processes import finish, run_python, start_python
from tests.waiting import slow_rows, wait_until

pytestmark = pytest.mark.short

MARKER = "converter-v1/.owner"
kept: list[DatasetConverter] = []


def folder_of(converter: DatasetConverter) -> Path:
    return Path(converter.url.removeprefix("file://"))


def ids_of(converter: DatasetConverter) -> list[int]:
    with converter.make_batch_reader(columns=["id"], batch_size=1000) as reader:
        return np.concatenate([batch["id"] for batch in reader]).tolist()


def test_an_entry_exists_until_its_block_ends(spark: SparkSession, cache_dir: Path) -> None:
    with make_spark_converter(spark.range(0, 10, 1, 2), cache_dir=cache_dir) as converter:
        folder = folder_of(converter)
        assert (folder / "manifest.json").is_file()
        assert len(list(folder.glob("data-*/part-*.parquet"))) == 2
        assert len(list(folder.glob("lease-*.json"))) == 1
        assert len(files_below(cache_dir)) == 5
    assert files_below(cache_dir) == [MARKER]
    assert [path.name for path in cache_dir.rglob("*") if path.is_dir()] == ["converter-v1"]


def test_an_entry_is_gone_when_its_block_fails(spark: SparkSession, cache_dir: Path) -> None:
    converter = make_spark_converter(spark.range(10), cache_dir=cache_dir)
    assert folder_of(converter).is_dir()
    with pytest.raises(ZeroDivisionError, match="in training"), converter:
        raise ZeroDivisionError("in training")
    assert files_below(cache_dir) == [MARKER]
    assert not folder_of(converter).exists()


def test_deleting_again_does_nothing(spark: SparkSession, cache_dir: Path) -> None:
    with make_spark_converter(spark.range(10), cache_dir=cache_dir) as converter:
        converter.delete()
        assert files_below(cache_dir) == [MARKER]
        other = make_spark_converter(spark.range(10), cache_dir=cache_dir)
        converter.delete()
        assert ids_of(other) == list(range(10))
    assert ids_of(other) == list(range(10))
    other.delete()
    assert files_below(cache_dir) == [MARKER]


def test_what_somebody_else_removed_is_no_error(spark: SparkSession, cache_dir: Path) -> None:
    converter = make_spark_converter(spark.range(10), cache_dir=cache_dir)
    shutil.rmtree(cache_dir)
    converter.delete()
    assert not cache_dir.exists()


def test_two_converters_share_a_directory(spark: SparkSession, cache_dir: Path) -> None:
    one = make_spark_converter(spark.range(10), cache_dir=cache_dir)
    two = make_spark_converter(spark.range(11).where("id < 10"), cache_dir=cache_dir)
    assert one.url != two.url
    one.delete()
    assert ids_of(two) == list(range(10))
    two.delete()
    assert files_below(cache_dir) == [MARKER]


def test_a_copy_deletes_nothing(spark: SparkSession, cache_dir: Path) -> None:
    with make_spark_converter(spark.range(10), cache_dir=cache_dir) as converter:
        with pickle.loads(pickle.dumps(converter)) as copy:
            assert ids_of(copy) == list(range(10))
        assert ids_of(converter) == list(range(10))
    assert files_below(cache_dir) == [MARKER]


def test_the_users_files_stay(spark: SparkSession, cache_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache_dir.mkdir()
    (cache_dir / "mine.csv").write_text("a,b")
    (cache_dir / "my-data").mkdir()
    (cache_dir / "my-data" / "part-00000-00000000-0000.parquet").write_text("not yours")
    converter = make_spark_converter(spark.range(10), cache_dir=cache_dir)
    folder = folder_of(converter)
    (data,) = folder.glob("data-*/")
    (folder.parent / "notes.txt").write_text("beside the entries")
    (folder / "notes.txt").write_text("in the entry")
    (data / "notes.txt").write_text("in the data")
    (data / "part-1.parquet").write_text("in the data, too")
    (data / "part-00009-00000009-0009.parquet").mkdir()
    before = {path: path.stat().st_mtime_ns for path in cache_dir.rglob("*.txt")}
    assert ids_of(converter) == list(range(10))
    converter.delete()
    assert files_below(cache_dir) == sorted(
        [
            MARKER,
            f"converter-v1/{folder.name}/{data.name}/notes.txt",
            f"converter-v1/{folder.name}/{data.name}/part-1.parquet",
            f"converter-v1/{folder.name}/notes.txt",
            "converter-v1/notes.txt",
            "mine.csv",
            "my-data/part-00000-00000000-0000.parquet",
        ]
    )
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert (data / "part-00009-00000009-0009.parquet").is_dir()
    assert f"Left 3 files in file://{data} that this package did not write" in caplog.text


def test_a_link_in_the_entry_is_not_followed(spark: SparkSession, cache_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "part-00000-00000000-0000.parquet"
    target.write_text("not yours")
    converter = make_spark_converter(spark.range(10), cache_dir=cache_dir)
    (data,) = folder_of(converter).glob("data-*/")
    (data / "part-00009-00000009-0009.parquet").symlink_to(target)
    (data / "part-00009-00000009-0010.parquet").symlink_to(target.parent)
    converter.delete()
    assert target.read_text() == "not yours"


def test_a_folder_that_is_not_ours_is_left_alone(spark: SparkSession, cache_dir: Path) -> None:
    (cache_dir / "converter-v1").mkdir(parents=True)
    (cache_dir / "converter-v1" / "thesis.tex").write_text("mine")
    with pytest.raises(CacheNotOwnedError, match=r"converter-v1 holds files but not the marker \.owner") as raised:
        make_spark_converter(spark.range(10), cache_dir=cache_dir)
    assert raised.value.path == f"file://{cache_dir}/converter-v1"
    assert files_below(cache_dir) == ["converter-v1/thesis.tex"]


@pytest.mark.parametrize("delete_on_exit", [True, False])
@pytest.mark.parametrize("where", ["remember", "settled", "sweep_after_write"])
def test_a_ctrl_c_after_the_commit_leaves_nothing_that_nobody_holds(
    spark: SparkSession, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, where: str, delete_on_exit: bool
) -> None:
    @contextlib.contextmanager
    def settled(df: Any) -> Iterator[Any]:
        yield df
        raise KeyboardInterrupt

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    place: Any = sweeps if where == "sweep_after_write" else identity
    monkeypatch.setattr(place, where, settled if where == "settled" else interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_spark_converter(spark.range(9), cache_dir=cache_dir, delete_on_exit=delete_on_exit)
    left = files_below(cache_dir)
    assert not [name for name in left if "lease" in name or "intent" in name]
    assert (left == ["converter-v1/.owner"]) == delete_on_exit


def end_with_entries(cache_dir: str) -> dict[str, str]:
    spark = start_local_spark("ends", master="local[1]")
    rows = spark.range(0, 10, 1, 1)
    held = make_spark_converter(rows, cache_dir=cache_dir)
    kept.append(held)
    forgotten = make_spark_converter(rows, cache_dir=cache_dir)
    stays = make_spark_converter(rows, cache_dir=cache_dir, delete_on_exit=False)
    folders = {"held": held, "forgotten": forgotten, "stays": stays}
    result = {name: str(folder_of(converter)) for name, converter in folders.items()}
    assert all((Path(folder) / "manifest.json").exists() for folder in result.values())
    del folders, held, forgotten, stays
    gc.collect()
    return result


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The folders of three entries whose interpreter has ended."""
    folders: dict[str, str] = run_python(end_with_entries, str(tmp_path_factory.mktemp("cache")))
    return folders


def test_the_interpreters_end_deletes(ended: dict[str, str]) -> None:
    assert not Path(ended["held"]).exists()


def test_the_interpreters_end_deletes_what_nobody_holds_any_more(ended: dict[str, str]) -> None:
    assert not Path(ended["forgotten"]).exists()


def test_an_entry_can_outlive_its_interpreter(ended: dict[str, str]) -> None:
    folder = Path(ended["stays"])
    assert json.loads((folder / "manifest.json").read_bytes())["num_rows"] == 10
    assert len(list(folder.glob("data-*/part-*.parquet"))) == 1


def write_slowly(cache_dir: str, release: str) -> None:
    spark = start_local_spark("dies", master="local[2]")
    make_spark_converter(slow_rows(spark, release), cache_dir=cache_dir, row_group_bytes=1024)


@pytest.mark.long("a Spark of its own, 16 s")
def test_a_driver_that_is_killed_leaves_nothing_that_is_read(
    spark: SparkSession, cache_dir: Path, tmp_path: Path
) -> None:
    with start_python(write_slowly, str(cache_dir), str(tmp_path / "never")) as process:
        wait_until(lambda: process.poll() is not None or any(cache_dir.glob("converter-v1/*/data-*/part-*.parquet")))
        assert process.poll() is None, process.communicate()[1]
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
        left = files_below(cache_dir)
        # Its executors would hold the pipes of the process open until they give up.
        (tmp_path / "never").touch()
    assert not any(name.endswith("manifest.json") for name in left)
    (intent,) = cache_dir.glob("converter-v1/*/data-*.intent")
    written: dict[str, Any] = json.loads(intent.read_bytes())
    assert written["pid"] == process.pid
    assert written["application_id"].startswith("local-")

    with make_spark_converter(spark.range(0, 10, 1, 2), cache_dir=cache_dir) as converter:
        assert folder_of(converter) != intent.parent
        assert ids_of(converter) == list(range(10))
        assert len(list(cache_dir.glob("converter-v1/*/manifest.json"))) == 1
    assert not any(name.endswith("manifest.json") for name in files_below(cache_dir))


def write_until_interrupted(cache_dir: str, release: str) -> dict[str, Any]:
    spark = start_local_spark("interrupted", master="local[2]")
    # One task waits for rows; beside it there is always one that is about to open its file.
    rows = slow_rows(spark, release, partitions=1).union(spark.range(0, 5000, 1, 5000))
    interrupted = False
    try:
        make_spark_converter(rows, cache_dir=cache_dir, row_group_bytes=1024)
    except KeyboardInterrupt:
        interrupted = True
    at_once = files_below(cache_dir)
    # The session can be used on, and has nothing else to do.
    with make_spark_converter(spark.range(0, 10, 1, 2), cache_dir=cache_dir) as converter:
        ids = ids_of(converter)
    spark.stop()
    return {"interrupted": interrupted, "at_once": at_once, "ids": ids, "later": files_below(cache_dir)}


@pytest.mark.long("a Spark of its own, 17 s")
def test_an_interrupted_write_leaves_nothing(cache_dir: Path, tmp_path: Path) -> None:
    def is_writing() -> bool:
        return len(list(cache_dir.glob("converter-v1/*/data-*/part-*.parquet"))) >= 3

    with start_python(write_until_interrupted, str(cache_dir), str(tmp_path / "never")) as process:
        wait_until(lambda: process.poll() is not None or is_writing())
        assert process.poll() is None, process.communicate()[1]
        # A terminal's Ctrl-C goes to the whole group: to the JVM and Spark's Python workers, too.
        os.killpg(process.pid, signal.SIGINT)
        result = finish(process, seconds=60)
    assert result == {"interrupted": True, "at_once": [MARKER], "ids": list(range(10)), "later": [MARKER]}
    assert [path.name for path in cache_dir.rglob("*") if path.is_dir()] == ["converter-v1"]
