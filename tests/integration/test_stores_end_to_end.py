"""A cache on HDFS and on Azure: every row once, in the order of a local one, by few requests, and nothing left."""

from __future__ import annotations

import _thread
import contextlib
import copy
import io
import json
import logging
import os
import pickle
import pwd
import re
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

import converter
from converter import (
    CacheError,
    ConverterError,
    DatasetConverter,
    ReadError,
    make_parquet_converter,
    make_spark_converter,
    open_converter,
)
from converter.errors import SourceChangedError
from converter.reading import windows
from converter.reading.local_cache import LocalCache
from converter.sources.spark.local import find_java_home
from converter.storage.directory import Storage
from converter.storage.opening import open_storage
from converter.storage.remote import RemoteStorage
from tests.integration.test_stores import wait_for_requests
from tests.processes import error_of, run_python
from tests.rows import assert_same, concatenate, known_rows, known_values
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.servers.azurite import Azurite, BlobAccount, SlowAzurite
    from tests.servers.hdfs import Hdfs
    from tests.servers.s3 import S3

NUM_ROWS = 500
KINDS = ("hdfs", "azure")

everywhere = pytest.mark.parametrize("place", [*KINDS, "s3"], indirect=True)


class Place:
    """A cache directory on a store, and what opens it."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url, self.options = url, options

    def convert(self, df: DataFrame, **options: Any) -> DatasetConverter:
        return make_spark_converter(df, cache_dir=self.url, storage_options=self.options, **options)

    def files(self) -> list[str]:
        def walk(storage: Any, before: str) -> Iterator[str]:
            for info in storage.list():
                if info.is_directory:
                    yield from walk(storage.below(info.name), f"{before}{info.name}/")
                else:
                    yield before + info.name

        return list(walk(open_storage(self.url, self.options), ""))


def on_azure(account: BlobAccount) -> Place:
    return Place(f"{account.url(account.new_container())}/cache", {"connection_string": account.connection_string})


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "azure":
        return on_azure(request.getfixturevalue("azurite"))
    if request.param == "s3":
        s3: S3 = request.getfixturevalue("s3")
        return Place(f"{s3.url(s3.new_bucket())}/cache", s3.options)
    hdfs: Hdfs = request.getfixturevalue("hdfs")
    return Place(f"{hdfs.url}/{abs(hash(request.node.name))}", {})


@pytest.mark.parametrize(
    ("place", "writer"),
    [*((kind, "executors") for kind in (*KINDS, "s3")), ("hdfs", "spark")],
    indirect=["place"],
)
def test_every_row_is_there_and_nothing_is_left(spark: SparkSession, place: Place, writer: str) -> None:
    df = known_rows(spark, NUM_ROWS, partitions=3)
    # Spark's writer must be told the shape of matrices.
    shapes = {"nested": (2, 3)}
    with place.convert(df, row_group_bytes=1 << 18, writer=writer, shapes=shapes) as made:
        assert made.url.startswith(f"{place.url}/converter-v1/")
        # How Spark's writer names a file.
        assert {"-c000" in name for name in made._manifest.file_names} == {writer == "spark"}
        if writer == "spark":
            # How its pages begin nobody has told.
            assert made._manifest.file_ends is None
        else:
            assert_ends(made)
        with made.make_batch_reader(batch_size=64, ragged="nested", nulls="mask") as reader:
            assert_same(concatenate(list(reader)), known_values(range(NUM_ROWS)))
        with made.make_batch_reader(batch_size=64, columns=["id"], shuffle=True, verify_checksums=True) as reader:
            shuffled = concatenate(list(reader))["id"]
        assert sorted(shuffled.tolist()) == list(range(NUM_ROWS))
        with open_converter(made.url, storage_options=place.options) as again:
            assert again.fingerprint == made.fingerprint
    assert place.files() == ["converter-v1/.owner"]


def assert_ends(made: DatasetConverter) -> None:
    """What the manifest knows of each file's footer and of its chunks' heads is what the file holds."""
    assert made._manifest.file_ends is not None
    for name, end in zip(made._manifest.file_names, made._manifest.file_ends, strict=True):
        data = made._storage.read(name)
        assert data.endswith(end.footer)
        assert len(end.footer) == int.from_bytes(data[-8:-4], "little") + 8
        starts = [chunk.data_page_offset for chunk in chunks(io.BytesIO(data))]
        assert np.frombuffer(end.heads, "<u4").tolist() == [zlib.crc32(data[start : start + 20]) for start in starts]


def without_footers(made: DatasetConverter) -> DatasetConverter:
    """The entry as older versions wrote it."""
    document = json.loads(made._storage.read("manifest.json"))
    del document["files"]["footers"], document["files"]["heads"]
    made._storage.delete_file("manifest.json")
    assert made._storage.put_if_absent("manifest.json", json.dumps(document).encode())
    return open_converter(made.url, storage_options=made._storage.options)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_order_is_that_of_a_local_cache(
    spark: SparkSession, place: Place, cache_dir: Path, num_workers: int
) -> None:
    df = spark.range(0, 4000, 1, 2).selectExpr("id", "cast(id as float) x", "array(id, id + 1) pair")
    options = {"batch_size": 100, "shuffle": True, "seed": 3, "num_workers": num_workers}
    with (
        place.convert(df, row_group_bytes=1 << 14) as remote,
        make_spark_converter(df, cache_dir=cache_dir, row_group_bytes=1 << 14, compression="zstd") as local,
        remote.make_torch_dataloader(**options) as there,
        local.make_torch_dataloader(**options) as here,
    ):
        # On a local disk they cost nothing to read.
        assert local._manifest.file_ends is None
        for one, other in zip(there, here, strict=True):
            assert {name: tensor.tolist() for name, tensor in one.items()} == {
                name: tensor.tolist() for name, tensor in other.items()
            }


def test_an_entry_is_known_by_its_key_and_a_dead_owners_is_swept(spark: SparkSession, place: Place) -> None:
    df = spark.range(1000)
    first = place.convert(df, cache_key="numbers", delete_on_exit=False)
    second = place.convert(df, cache_key="numbers", delete_on_exit=False)
    assert first.url == second.url
    assert sum(name.endswith("manifest.json") for name in place.files()) == 1
    # Both hold leases of this process, so nothing is swept.
    assert converter.sweep(place.url, storage_options=place.options).num_entries == 0
    first.delete()
    second.delete()
    assert place.files() == ["converter-v1/.owner"]


# Few requests ------------------------------------------------------------------------


@pytest.mark.parametrize("is_of_an_older_version", [False, True])
def test_row_groups_are_fetched_in_few_requests_and_footers_never_where_they_are_known(
    spark: SparkSession, slow_azurite: SlowAzurite, is_of_an_older_version: bool
) -> None:
    place = on_azure(slow_azurite)
    df = spark.range(0, 200_000, 1, 2).selectExpr("id", *(f"cast(id * {k} as float) f{k}" for k in range(9)))
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(place.convert(df, row_group_bytes=1 << 20))
        manifest = made._manifest
        footers = 0
        if is_of_an_older_version:
            made, footers = stack.enter_context(without_footers(made)), len(manifest.file_names)
        sizes = {}
        for columns in (None, ["id", "f0", "f1"]):
            with made.make_batch_reader(batch_size=1000, columns=columns) as reader:
                slow_azurite.proxy.forget()
                assert sum(len(batch["id"]) for batch in reader) == 200_000
                gets = [one for one in slow_azurite.proxy.requests if one.method == "GET" and ".parquet" in one.path]
                assert len(gets) - footers <= 2 * manifest.num_row_groups
                assert slow_azurite.proxy.count() == len(gets)
                num_first = len(gets)
                slow_azurite.proxy.forget()
                for _ in reader:
                    pass
                gets = [one for one in slow_azurite.proxy.requests if one.method == "GET"]
                assert num_first - footers == len(gets) <= manifest.num_row_groups
                parts = [one.range.removeprefix("bytes=").split("-") for one in gets if one.range]
                assert len(parts) == len(gets)
                sizes[columns is None] = sum(int(end) - int(start) + 1 for start, end in parts)
        assert sizes[True] <= 1.05 * manifest.file_bytes.sum()
        assert sizes[False] < 0.6 * sizes[True]


@pytest.mark.parametrize("names", [["id"], ["id", "f1", "f9"], ["f2", "f4", "f6", "f8"]], ids="-".join)
def test_little_is_fetched_beside_the_wanted_columns(
    spark: SparkSession, slow_azurite: SlowAzurite, names: list[str]
) -> None:
    place = on_azure(slow_azurite)
    df = spark.range(0, 100_000, 1, 1).selectExpr("id", *(f"cast(id * {k} as float) f{k}" for k in range(1, 10)))
    # Chunks that are larger than the gap for which nobody asks twice.
    with place.convert(df, row_group_bytes=1 << 21) as made:
        wanted = sum(
            chunk.total_compressed_size
            for file in made._manifest.file_names
            for chunk in chunks(io.BytesIO(made._storage.read(file)))
            if chunk.path_in_schema in names
        )
        slow_azurite.proxy.forget()
        with made.make_batch_reader(batch_size=1000, columns=names) as reader:
            for _ in reader:
                pass
        parts = [one.range.removeprefix("bytes=").split("-") for one in slow_azurite.proxy.requests if one.range]
        assert len(parts) == len(slow_azurite.proxy.requests) >= made._manifest.num_row_groups
        assert wanted <= sum(int(end) - int(start) + 1 for start, end in parts) <= 1.05 * wanted


def chunks(file: io.BytesIO) -> Iterator[pq.ColumnChunkMetaData]:
    footer = pq.read_metadata(file)
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        yield from (group.column(column) for column in range(group.num_columns))


@everywhere
def test_filters_and_splits_fetch_what_they_look_at_and_no_footer(
    spark: SparkSession, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int, int]] = []
    read_part = RemoteStorage.read_part

    def count(storage: Storage, name: str, start: int, end: int, *args: Any) -> Any:
        asked.append((name, start, end))
        return read_part(storage, name, start, end, *args)

    df = spark.range(0, 100_000, 1, 2).selectExpr("id", "cast(id * 0.5 as float) x", "id % 7 day")
    with place.convert(df, row_group_bytes=1 << 19) as made:
        manifest = made._manifest
        assert manifest.num_row_groups > len(manifest.file_names)
        sizes = {name: len(made._storage.read(name)) for name in manifest.file_names}
        monkeypatch.setattr(RemoteStorage, "read_part", count)
        monkeypatch.setattr(RemoteStorage, "size", None)
        # Of one row group the least and the largest value let a row pass.
        assert len(made.where([("id", "<", 100)])) == 100
        assert len(asked) == 1
        assert len(made.where([("day", "==", 3), ("x", ">=", 0)])) == 14_286
        made.split({"train": 0.5, "val": 0.5}, by="day")
        assert len(asked) == 1 + 2 * manifest.num_row_groups
        ends = dict(zip(manifest.file_names, manifest.file_ends or (), strict=True))
        assert all(end <= sizes[name] - len(ends[name].footer) for name, _, end in asked)


@pytest.mark.parametrize("windows_ahead", [1, 3, 8])
def test_windows_ahead_are_fetched_at_once_and_no_more(
    spark: SparkSession, slow_azurite: SlowAzurite, windows_ahead: int
) -> None:
    place = on_azure(slow_azurite)
    with place.convert(spark.range(0, 160_000, 1, 1), row_group_bytes=1 << 16) as made:
        rows = int(made._manifest.row_group_rows[0])
        options = {"batch_size": rows, "shuffle_window_rows": rows, "prefetch_batches": windows_ahead}
        with made.make_batch_reader(**options) as reader:
            for _ in reader:
                pass
            slow_azurite.proxy.forget()
            # So that all that are asked for at once are seen at once.
            slow_azurite.proxy.delay_seconds = 0.1
            num_rows = 0
            # A window is a batch here, and a row group, which is one request.
            for number, batch in enumerate(reader):
                assert slow_azurite.proxy.count() <= number + windows_ahead
                num_rows += len(batch["id"])
        assert num_rows == 160_000
        assert slow_azurite.proxy.count() == made._manifest.num_row_groups > 2 * windows_ahead
        assert slow_azurite.proxy.most_at_once <= windows_ahead
        assert slow_azurite.proxy.most_at_once > windows_ahead // 2


def test_the_first_batch_takes_few_round_trips(spark: SparkSession, slow_azurite: SlowAzurite) -> None:
    place = on_azure(slow_azurite)
    with place.convert(spark.range(0, 100_000, 1, 1)) as made:
        slow_azurite.proxy.forget()
        with made.make_batch_reader(batch_size=100) as reader:
            next(iter(reader))
        assert slow_azurite.proxy.count() <= 5


def test_a_rank_that_waits_for_the_store_says_so_once(
    spark: SparkSession, slow_azurite: SlowAzurite, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(windows, "WAIT_SECONDS", 0.4)
    with on_azure(slow_azurite).convert(spark.range(0, 1000, 1, 1)) as made:
        options: dict[str, Any] = {"batch_size": 100, "num_epochs": 2, "cur_shard": 3, "shard_count": 4}
        with caplog.at_level(logging.WARNING), made.make_batch_reader(**options) as reader:
            list(reader)
            assert "waited for data" not in caplog.text
            slow_azurite.proxy.delay_seconds = 1.2
            list(reader)
        said = re.findall(r"Shard 3 of 4 has waited for data from (\S+) for [01] seconds, and waits on", caplog.text)
        assert said == [made.url]


def read_ids(url: str, options: dict[str, Any], local_cache_dir: str) -> list[int]:
    with (
        open_converter(url, storage_options=options) as made,
        made.make_batch_reader(batch_size=1000, local_cache_dir=local_cache_dir) as reader,
    ):
        return [int(one) for batch in reader for one in batch["id"]]


def data_requests(slow_azurite: SlowAzurite) -> int:
    return sum(one.method == "GET" and ".parquet" in one.path for one in slow_azurite.proxy.requests)


def test_a_second_epoch_fetches_nothing_with_a_cache_on_this_host(
    spark: SparkSession, slow_azurite: SlowAzurite, tmp_path: Path
) -> None:
    place = on_azure(slow_azurite)
    with place.convert(spark.range(0, 100_000, 1, 2).selectExpr("id", "cast(id as string) s")) as made:
        with made.make_torch_dataloader(batch_size=1000, shuffle=True, local_cache_dir=tmp_path) as loader:
            slow_azurite.proxy.forget()
            first = [one for batch in loader for one in batch["id"].tolist()]
            assert data_requests(slow_azurite) > 0
            slow_azurite.proxy.forget()
            second = [one for batch in loader for one in batch["id"].tolist()]
            assert data_requests(slow_azurite) == 0
        assert sorted(first) == sorted(second) == list(range(100_000))
        assert first != second
        slow_azurite.proxy.forget()
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(run_python, read_ids, made.url, place.options, str(tmp_path)) for _ in range(2)]
            assert [one.result() for one in both] == [list(range(100_000))] * 2
        assert data_requests(slow_azurite) == 0
    assert converter.sweep(tmp_path).num_bytes > 0
    assert not list(tmp_path.rglob("rows-*"))


def read_ids_together(url: str, options: dict[str, Any], local_cache_dir: str, ready: str, go: str) -> list[int]:
    Path(ready).touch()
    wait_until(Path(go).exists)
    return read_ids(url, options, local_cache_dir)


def test_processes_that_begin_together_fetch_once_for_a_host(
    spark: SparkSession, slow_azurite: SlowAzurite, tmp_path: Path
) -> None:
    place = on_azure(slow_azurite)

    def fetched() -> list[tuple[str, str | None]]:
        found = [(one.path, one.range) for one in slow_azurite.proxy.requests if ".parquet" in one.path]
        slow_azurite.proxy.forget()
        return sorted(found, key=str)

    with place.convert(spark.range(0, 100_000, 1, 2), row_group_bytes=1 << 16) as made:
        fetched()
        assert run_python(read_ids, made.url, place.options, str(tmp_path / "one")) == list(range(100_000))
        of_one = fetched()
        assert len(of_one) == made._manifest.num_row_groups
        # So that each finds what the other one is fetching.
        slow_azurite.proxy.delay_seconds = 0.2
        ready, go = [tmp_path / "ready-0", tmp_path / "ready-1"], tmp_path / "go"
        with ThreadPoolExecutor(2) as pool:
            both = [
                pool.submit(
                    run_python, read_ids_together, made.url, place.options, str(tmp_path / "two"), str(one), str(go)
                )
                for one in ready
            ]
            wait_until(lambda: all(one.exists() for one in ready))
            go.touch()
            assert [one.result() for one in both] == [list(range(100_000))] * 2
        assert fetched() == of_one


def read_ids_with_small_files(url: str, options: dict[str, Any], local_cache_dir: str, max_bytes: int) -> list[Any]:
    """The ids, and what was said, where no file can become larger."""
    import resource

    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("converter").addHandler(handler)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
    return [read_ids(url, options, local_cache_dir), said]


def test_a_disk_that_takes_no_more_costs_no_row(spark: SparkSession, slow_azurite: SlowAzurite, tmp_path: Path) -> None:
    place = on_azure(slow_azurite)
    df = spark.range(0, 20_000, 1, 2).selectExpr("id", "sha2(cast(id as string), 256) s")
    with place.convert(df) as made, without_footers(made):
        num_bytes = 100_000
        assert int(made._manifest.file_bytes.min()) > 2 * num_bytes
        found, said = run_python(read_ids_with_small_files, made.url, place.options, str(tmp_path), num_bytes)
        assert found == list(range(20_000))
        (text,) = said
        assert text.endswith("is full (File too large): what does not fit is fetched each time.")
        # Footers are smaller.
        assert list(tmp_path.rglob("footer-*"))
        assert not [*tmp_path.rglob("rows-*"), *tmp_path.rglob("*.part")]


def test_damaged_copies_on_this_host_are_fetched_again(
    spark: SparkSession, slow_azurite: SlowAzurite, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = on_azure(slow_azurite)
    with place.convert(spark.range(0, 20_000, 1, 2)) as known, without_footers(known) as made:
        assert read_here(made, tmp_path) == list(range(20_000))
        copies = damage_copies(tmp_path)
        assert {path.name.partition("-")[0] for path in copies} == {"rows", "footer"}
        slow_azurite.proxy.forget()
        assert read_here(made, tmp_path) == list(range(20_000))
        assert data_requests(slow_azurite) > 0
        assert sum("was damaged, and is fetched again" in text for text in caplog.messages) == len(copies)
        slow_azurite.proxy.forget()
        assert read_here(made, tmp_path) == list(range(20_000))
        assert data_requests(slow_azurite) == 0


def test_who_meet_damaged_copies_together_read_every_row(
    spark: SparkSession, slow_azurite: SlowAzurite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, readers_count = on_azure(slow_azurite), 3
    met: dict[str, threading.Barrier] = {}
    get = LocalCache.get

    def get_together(cache: LocalCache, name: str, *args: Any, **kwargs: Any) -> list[pa.Buffer]:
        found = get(cache, name, *args, **kwargs)
        if name.startswith("rows-") and not kwargs.get("anew"):
            met.setdefault(name, threading.Barrier(readers_count)).wait(60)
        return found

    with place.convert(spark.range(0, 20_000, 1, 2)) as made:
        assert read_here(made, tmp_path) == list(range(20_000))
        assert damage_copies(tmp_path)
        monkeypatch.setattr(LocalCache, "get", get_together)
        # Whoever is first still fetches when the others find the same.
        slow_azurite.proxy.delay_seconds = 0.2
        with (
            made.make_batch_reader(batch_size=1000, local_cache_dir=tmp_path) as reader,
            ThreadPoolExecutor(readers_count) as pool,
        ):
            found = pool.map(lambda _: [int(one) for batch in reader for one in batch["id"]], range(readers_count))
            assert list(found) == [list(range(20_000))] * readers_count
    assert len(met) == 2


def damage_copies(local_cache_dir: Path) -> list[Path]:
    copies = [*local_cache_dir.rglob("rows-*"), *local_cache_dir.rglob("footer-*")]
    for path in copies:
        path.write_bytes(b"\xff" * path.stat().st_size)
    return copies


def read_here(made: DatasetConverter, local_cache_dir: Path) -> list[int]:
    with made.make_batch_reader(batch_size=1000, local_cache_dir=local_cache_dir) as reader:
        return [int(one) for batch in reader for one in batch["id"]]


@pytest.mark.parametrize("is_of_an_older_version", [False, True])
@everywhere
def test_a_file_in_the_place_of_another_one_is_noticed(
    spark: SparkSession, place: Place, tmp_path: Path, is_of_an_older_version: bool
) -> None:
    """Of the same size, as checksums of these numbers make it, with every page where it was."""
    df = spark.range(0, 2000, 1, 2).selectExpr("id", "id + 21 as x", "21 * id as y")
    ids = list(range(2000))
    with (
        place.convert(df, compression="none", row_group_bytes=1 << 13) as made,
        without_footers(made) if is_of_an_older_version else contextlib.nullcontext(made) as again,
    ):
        storage, (one, other) = made._storage, made._manifest.file_names
        assert len({len(storage.read(name)) for name in (one, other)}) == 1

        def exchange() -> None:
            for name, data in {one: storage.read(other), other: storage.read(one)}.items():
                storage.delete_file(name)
                assert storage.put_if_absent(name, data)

        exchange()
        said = "another footer than it was written with" if is_of_an_older_version else "other rows than were written"
        for columns in (["id"], ["x"], ["id", "y"], None):
            for options in ({}, {"local_cache_dir": tmp_path}):
                with (
                    again.make_batch_reader(batch_size=100, columns=columns, **options) as reader,
                    pytest.raises(SourceChangedError, match=rf"{one}.* {said}"),
                ):
                    next(iter(reader))
        with pytest.raises(SourceChangedError, match=said):
            again.where([("id", "<", 100)])
        exchange()
        # Nothing wrong was kept on this host. (HDFS's client still knows the blocks of before.)
        with (
            open_converter(made.url, storage_options=place.options) as anew,
            anew.make_batch_reader(batch_size=100, local_cache_dir=tmp_path) as reader,
        ):
            assert concatenate(list(reader))["id"].tolist() == ids


@pytest.mark.parametrize("share", [0, 0.5])
@pytest.mark.parametrize("is_of_an_older_version", [False, True])
@everywhere
def test_a_file_that_was_cut_is_noticed_and_named(
    spark: SparkSession, place: Place, tmp_path: Path, is_of_an_older_version: bool, share: float
) -> None:
    with (
        place.convert(spark.range(0, 2000, 1, 1), row_group_bytes=1 << 12) as made,
        without_footers(made) if is_of_an_older_version else contextlib.nullcontext(made) as again,
    ):
        (name,) = made._manifest.file_names
        data = made._storage.read(name)
        made._storage.delete_file(name)
        assert made._storage.put_if_absent(name, data[: int(len(data) * share)])
        orders = [{}, *({"shuffle": True, "seed": seed} for seed in range(3))]
        for options in ({}, {"local_cache_dir": tmp_path}):
            for order in orders:
                with again.make_batch_reader(batch_size=100, **order, **options) as reader:
                    with pytest.raises(SourceChangedError, match=rf"{name} .*Convert again") as raised:
                        list(reader)
                    assert str(raised.value.path).endswith(name)
        with pytest.raises(SourceChangedError, match=rf"{name} .*Convert again"):
            again.where([("id", ">", 1900)])


# Bounded memory ----------------------------------------------------------------------


def memory_of_a_slow_consumer(url: str, options: dict[str, Any], reading: dict[str, Any]) -> list[int]:
    """Rows, the anonymous memory that reading them took at most, and the bound that was told."""

    def anonymous() -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    with open_converter(url, storage_options=options) as made:
        bound = made.plan(**reading).peak_memory_bytes
        with made.make_batch_reader(**reading) as reader:
            before, peak, is_over = anonymous(), [0], threading.Event()

            def watch() -> None:
                while not is_over.wait(0.002):
                    peak[0] = max(peak[0], anonymous())

            watcher = threading.Thread(target=watch)
            watcher.start()
            num_rows = 0
            try:
                for batch in reader:
                    num_rows += len(batch["id"])
                    # Whoever fetches is faster by far.
                    time.sleep(0.02)
            finally:
                is_over.set()
                watcher.join()
    return [num_rows, peak[0] - before, bound]


def test_who_reads_slowly_over_a_network_holds_no_more_than_was_told(spark: SparkSession, place: Place) -> None:
    num_rows, num_bytes = 3_000_000, 3_000_000 * 21 * 8
    df = spark.range(0, num_rows, 1, 2).selectExpr("id", *(f"xxhash64(id, {number}) x{number}" for number in range(20)))
    with place.convert(df, row_group_bytes=1 << 20, compression="none", writer="executors") as made:
        reading = {"batch_size": 20_000, "shuffle_window_rows": 20_000}
        found, peak, bound = run_python(memory_of_a_slow_consumer, made.url, place.options, reading)
    assert found == num_rows
    # As large as a window of these rows at least, so that the watching is seen to work.
    assert 20_000 * 21 * 8 < peak < bound < num_bytes / 3


# Faults ------------------------------------------------------------------------------


def test_an_epoch_survives_a_store_that_goes_and_comes_back(spark: SparkSession, slow_azurite: SlowAzurite) -> None:
    place = on_azure(slow_azurite)
    with (
        place.convert(spark.range(0, 200_000, 1, 4), row_group_bytes=1 << 16) as made,
        made.make_batch_reader(batch_size=1000, shuffle_window_rows=10_000) as reader,
    ):
        found = []
        for number, batch in enumerate(reader):
            found.append(batch["id"])
            if number % 80 == 5:
                slow_azurite.proxy.fail_next(3, status=503)
                slow_azurite.proxy.reset_next(2)
        assert np.concatenate(found).tolist() == list(range(200_000))


def test_a_store_that_stays_away_is_a_named_error_in_time(spark: SparkSession, slow_azurite: SlowAzurite) -> None:
    place = on_azure(slow_azurite)
    with place.convert(spark.range(0, 200_000, 1, 1), row_group_bytes=1 << 16, timeout_seconds=3) as made:
        with made.make_batch_reader(batch_size=1000, shuffle_window_rows=10_000) as reader:
            iterator = iter(reader)
            next(iterator)
            with slow_azurite.proxy.hanging():
                begin = time.monotonic()
                with pytest.raises(ReadError, match=r"part-.* cannot be fetched: .*for 3 seconds") as raised:
                    list(iterator)
                assert time.monotonic() - begin < 30
        assert raised.value.path.startswith(made.url)
        wait_for_requests()


def test_who_stops_early_does_not_wait_for_a_store_that_hangs(spark: SparkSession, slow_azurite: SlowAzurite) -> None:
    place = on_azure(slow_azurite)
    with place.convert(spark.range(0, 200_000, 1, 1), row_group_bytes=1 << 16) as made:
        with made.make_batch_reader(batch_size=1000, shuffle_window_rows=10_000) as reader:
            iterator = iter(reader)
            next(iterator)
            with slow_azurite.proxy.hanging():
                time.sleep(0.3)
                begin = time.monotonic()
                iterator.close()
                assert time.monotonic() - begin < 30
        wait_for_requests()


def test_a_file_that_is_deleted_under_a_reader_is_named(spark: SparkSession, place: Place) -> None:
    with place.convert(spark.range(0, 1000, 1, 1)) as made:
        name = made._manifest.file_names[0]
        made._storage.delete_file(name)
        with pytest.raises(SourceChangedError, match="is not there") as raised:
            list(made.make_batch_reader(batch_size=100))
        assert raised.value.path == f"{made.url}/{name}"


@everywhere
def test_a_file_that_is_deleted_after_the_first_batch_is_named(
    spark: SparkSession, place: Place, request: pytest.FixtureRequest
) -> None:
    blocks = before = set()
    if place.url.startswith("hdfs:"):
        data: Path = request.getfixturevalue("hdfs").logs / "data"
        before = set(data.rglob("blk_*"))
    with place.convert(spark.range(0, 100_000, 1, 1), row_group_bytes=1 << 16) as made:
        (name,) = made._manifest.file_names
        if place.url.startswith("hdfs:"):
            num_bytes = int(made._manifest.file_bytes[0])
            blocks = {path for path in set(data.rglob("blk_*")) - before if path.stat().st_size == num_bytes}
            assert len(blocks) == 1
        assert made._manifest.num_row_groups > 8
        found: list[int] = []
        with made.make_batch_reader(batch_size=100, shuffle_window_rows=1000, prefetch_batches=1) as reader:
            iterator = iter(reader)
            found += next(iterator)["id"].tolist()
            # The reader has the footer, and most row groups are still to be fetched.
            made._storage.delete_file(name)
            # As from an open file, what a DataNode has not dropped yet is read from there.
            wait_until(lambda: not any(block.exists() for block in blocks))
            with pytest.raises(ConverterError) as raised:
                found.extend(one for batch in iterator for one in batch["id"].tolist())
        assert raised.value.path == f"{made.url}/{name}"
        assert isinstance(raised.value, SourceChangedError)
        assert f"{made.url}/{name} is not there" in str(raised.value)
        assert found == list(range(len(found)))
        assert len(found) < 50_000


# Secrets -----------------------------------------------------------------------------


def test_no_secret_is_shown_or_stored(spark: SparkSession, azurite: Azurite, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="converter")
    place = on_azure(azurite)
    shown: list[str] = []
    with place.convert(spark.range(0, 1000, 1, 2)) as made:
        shown += [repr(made), made._repr_html_(), repr(made._storage), made.url]
        shown.append(made._storage.read("manifest.json").decode())
        shown.append(repr(pickle.dumps(made)))
        name = made._manifest.file_names[0]
        made._storage.delete_file(name)
        with pytest.raises(ConverterError) as raised:
            list(made.make_batch_reader(batch_size=100))
        shown.append(repr(raised.getrepr(chain=True)))
    wrong = azurite.key.replace("E", "F")
    bad = azurite.connection_string.replace(azurite.key, wrong)
    with pytest.raises(CacheError) as failed:
        make_spark_converter(spark.range(10), cache_dir=place.url, storage_options={"connection_string": bad})
    shown.append("".join(str(failed.getrepr(chain=True, style="short"))))
    shown.append(caplog.text)
    shown.append(json.dumps(dict(spark.sparkContext.getConf().getAll())))
    for text in shown:
        assert azurite.key not in text
        assert wrong not in text


def test_a_loader_gives_its_worker_processes_the_credentials_and_nobody_else(
    spark: SparkSession, azurite: Azurite
) -> None:
    place = on_azure(azurite)
    workers = {"num_workers": 2, "multiprocessing_context": "spawn"}
    with (
        place.convert(spark.range(0, 3000, 1, 2), row_group_bytes=1 << 12) as made,
        made.make_torch_dataloader(batch_size=100, **workers) as loader,
    ):
        batches = iter(loader)
        found = next(batches)["id"].tolist()
        # The workers run.
        pickled = [pickle.dumps(one) for one in (made, loader.source, loader.dataset)]
        found += [one for batch in batches for one in batch["id"].tolist()]
        assert found == list(range(3000))
        pickled += [pickle.dumps(one) for one in (made, loader.dataset)]
        assert [azurite.key.encode() in text for text in pickled] == [False] * len(pickled)
        # What never leaves this process keeps them.
        with copy.deepcopy(made.make_torch_dataloader(batch_size=100)) as copied:
            assert sum(len(batch["id"]) for batch in copied) == 3000


@pytest.mark.parametrize("fault", ["key", "expired", "container"])
def test_what_a_store_refuses_is_named_by_every_way_in(spark: SparkSession, azurite: Azurite, fault: str) -> None:
    container = azurite.new_container()
    wrong_key = azurite.key.replace("E", "F")
    sas = azurite.sas(container, valid_seconds=-60)
    options, secret, cause = {
        "key": (azurite.connection_string.replace(azurite.key, wrong_key), wrong_key, "failed to authenticate"),
        "expired": (by_sas(azurite, sas), sas.partition("sig=")[2], "failed to authenticate.*sp=rcwdl"),
        "container": (azurite.connection_string, azurite.key, "there is no container 'no-such-container'"),
    }[fault]
    url = f"{azurite.url('no-such-container' if fault == 'container' else container)}/cache"
    given: dict[str, Any] = {"storage_options": {"connection_string": options}}
    entry_url = f"{url}/converter-v1/0123456789abcdef-0123456789abcdef"
    for call, named in (
        (lambda: make_spark_converter(spark.range(5), cache_dir=url, **given), url),
        (lambda: open_converter(entry_url, **given), entry_url),
        (lambda: make_parquet_converter(url, **given), url),
    ):
        with pytest.raises(ConverterError, match=f"{re.escape(named)} cannot be (read|written): .*{cause}") as raised:
            call()
        shown = "".join(traceback.format_exception(raised.value))
        assert secret not in shown
        assert unquote(secret) not in shown


def test_a_signature_that_ends_while_rows_are_read_is_an_error(spark: SparkSession, slow_azurite: SlowAzurite) -> None:
    place = on_azure(slow_azurite)
    container = place.url.partition("://")[2].partition("@")[0]
    with place.convert(spark.range(0, 20_000, 1, 1), row_group_bytes=1 << 14) as made:
        folder = made._manifest.file_names[0].partition("/")[0]
        sas = slow_azurite.sas(container, permission="rl", valid_seconds=8)
        options = {"connection_string": by_sas(slow_azurite, sas)}
        with (
            make_parquet_converter(f"{made.url}/{folder}", storage_options=options, timeout_seconds=5) as files,
            files.make_batch_reader(batch_size=500, shuffle_window_rows=2000, num_epochs=None) as reader,
        ):
            slow_azurite.proxy.delay_seconds = 0.05
            batches = iter(reader)
            assert next(batches)["id"].tolist() == list(range(500))
            # It reads epoch after epoch.
            with pytest.raises(ReadError, match=r"part-.* cannot be fetched: .*authenticate.*sp=rl") as raised:
                for _ in batches:
                    pass
        assert raised.value.path.startswith(made.url)
        shown = "".join(traceback.format_exception(raised.value))
        assert sas.partition("sig=")[2] not in shown
        assert unquote(sas.partition("sig=")[2]) not in shown


def by_sas(account: BlobAccount, sas: str) -> str:
    return f"BlobEndpoint={account.endpoint};SharedAccessSignature={sas}"


def test_ctrl_c_is_heard_while_a_store_hangs(slow_azurite: SlowAzurite) -> None:
    place = on_azure(slow_azurite)
    storage = open_storage(place.url, place.options, 60)
    storage.put_if_absent("a", b"1")
    with slow_azurite.proxy.hanging():
        threading.Timer(0.5, _thread.interrupt_main).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            storage.read("a")
        assert time.monotonic() - begin < 30
    wait_for_requests()


# Which side can write ----------------------------------------------------------------


def convert_on_azure(url: str, options: dict[str, str], python: str, confs: dict[str, str]) -> dict[str, Any]:
    """Convert with `auto` where the executors' Python is another program than the driver's."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("converter").addHandler(handler)
    logging.getLogger("converter").setLevel(logging.INFO)
    os.environ |= {
        "JAVA_HOME": str(find_java_home()),
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    builder: Any = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config(map=confs).getOrCreate()
    result: dict[str, Any] = {"error": "", "ids": [], "names": []}
    try:
        with make_spark_converter(spark.range(100), cache_dir=url, storage_options=options) as made:
            result["names"] = [name.rpartition("/")[2] for name in made._manifest.file_names]
            with made.make_batch_reader(batch_size=64) as reader:
                result["ids"] = [int(one) for batch in reader for one in batch["id"]]
    except CacheError as error:
        result["error"] = str(error)
    spark.stop()
    return result | {"said": [text for text in said if "Using Spark's own Parquet writer" in text]}


@pytest.mark.parametrize("has_driver", [True, False], ids=["executors-can", "executors-cannot"])
@pytest.mark.parametrize("has_key", [True, False], ids=["spark-can", "spark-cannot"])
def test_auto_takes_the_side_that_can_write(azurite: Azurite, tmp_path: Path, has_driver: bool, has_key: bool) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "adlfs.py").write_text("raise ModuleNotFoundError(\"No module named 'adlfs'\")\n")
    python = tmp_path / "python"
    path = "" if has_driver else f"PYTHONPATH={hidden}:$PYTHONPATH "
    python.write_text(f'#!/bin/sh\n{path}exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    confs = {name: value for name, value in azurite.spark_confs().items() if has_key or "account.key" not in name}
    place = on_azure(azurite)
    result = run_python(convert_on_azure, place.url, place.options, str(python), confs)
    if has_driver or has_key:
        assert not result["error"]
        assert result["ids"] == list(range(100))
        # How the executors, and how Spark's writer names a file.
        assert all(("-c000" in name) != has_driver for name in result["names"]), result["names"]
        assert bool(result["said"]) != has_driver
    else:
        assert "the executors cannot write to" in result["error"]
        assert "ImportError: Install adlfs" in result["error"]
        assert result["error"].endswith("Install adlfs there: executors get storage_options.")
        assert azurite.key not in result["error"]
    assert [name for name in place.files() if not name.endswith(".owner")] == []


# What a stranger found ---------------------------------------------------------------


def forget_to_close(url: str, options: dict[str, Any]) -> int:
    """Convert and read, and leave the rest to the interpreter's end."""
    spark = converter.start_local_spark("forgets")
    made = make_spark_converter(spark.range(100), cache_dir=url, storage_options=options)
    with made.make_torch_dataloader(batch_size=64) as loader:
        return sum(len(batch["id"]) for batch in loader)


def test_the_interpreters_end_deletes_a_cache_behind_a_network(place: Place) -> None:
    assert run_python(forget_to_close, place.url, place.options) == 100
    assert [name for name in place.files() if not name.endswith(".owner")] == []


def test_a_loader_is_left_at_once_while_footers_hang(spark: SparkSession, slow_azurite: SlowAzurite) -> None:
    place = on_azure(slow_azurite)
    with place.convert(spark.range(0, 1000, 1, 2)) as made, made.make_batch_reader(batch_size=100) as reader:
        iterator = iter(reader)
        with slow_azurite.proxy.hanging():
            # A real one: it wakes who waits for a thread.
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
            begin = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                next(iterator)
            assert time.monotonic() - begin < 30
        wait_for_requests()


def test_a_token_for_a_container_is_enough_to_read_what_is_in_it(spark: SparkSession, azurite: Azurite) -> None:
    container = azurite.new_container()
    url = f"{azurite.url(container)}/deep/parquet"
    storage = open_storage(url, {"connection_string": azurite.connection_string})
    table = io.BytesIO()
    pq.write_table(pa.table({"id": [1, 2, 3]}), table)
    storage.put_if_absent("x.parquet", table.getvalue())
    options = {"connection_string": by_sas(azurite, azurite.sas(container, permission="rl"))}
    for place in (url, f"{url}/?.parquet", f"{url}/{{x,y}}.parquet", f"{azurite.url(container)}/deep/**/[x].parquet"):
        with make_parquet_converter(place, storage_options=options) as made:
            assert len(made) == 3


def put_table(storage: Storage, name: str, ids: list[int]) -> None:
    """One row group of plain pages: files of other numbers have the same size and the same footer."""
    table, content = pa.table({"id": pa.array(ids, pa.int64())}), io.BytesIO()
    pq.write_table(table, content, compression="none", use_dictionary=False, write_statistics=False)
    storage.delete_file(name)
    assert storage.put_if_absent(name, content.getvalue())


@everywhere
def test_a_file_that_was_written_again_is_noticed_though_its_footer_is_the_same(place: Place, tmp_path: Path) -> None:
    storage = open_storage(place.url, place.options)
    storage.make_directory()
    put_table(storage, "a.parquet", [1, 2, 3])
    put_table(storage, "b.parquet", [4, 5, 6])

    def rows_of(made: DatasetConverter, **options: Any) -> list[int]:
        with made.make_batch_reader(batch_size=2, **options) as reader:
            found: list[int] = concatenate(list(reader))["id"].tolist()
            return found

    with make_parquet_converter(place.url, storage_options=place.options) as made:
        kept = {"local_cache_dir": tmp_path / "kept"}
        assert rows_of(made) == rows_of(made, **kept) == [1, 2, 3, 4, 5, 6]
        with made.make_batch_reader(batch_size=2) as reader:
            assert len(list(reader)) == 3
            put_table(storage, "b.parquet", [4, 7, 6])
            # The reader's footers and connections are of before.
            with pytest.raises(SourceChangedError, match=r"b\.parquet was written again after the converter was made"):
                list(reader)
        for look in (rows_of, lambda one: one.where([("id", ">", 0)]), lambda one: one.statistics):
            with pytest.raises(SourceChangedError, match=r"b\.parquet was written again after the converter was made"):
                look(made)
        # What this host keeps is of the rows that were looked at.
        assert rows_of(made, **kept) == [1, 2, 3, 4, 5, 6]
        copy = run_python(rows_elsewhere, pickle.dumps(made).hex(), made._storage.options)
        assert copy.endswith("b.parquet was written again after the converter was made. Make the converter again.")
    with make_parquet_converter(place.url, storage_options=place.options) as made:
        assert rows_of(made) == [1, 2, 3, 4, 7, 6]


def rows_elsewhere(pickled: str, options: dict[str, Any]) -> str:
    copy: DatasetConverter = pickle.loads(bytes.fromhex(pickled))
    copy._storage.lend(options)
    with copy.make_batch_reader(batch_size=2) as reader:
        try:
            list(reader)
        except SourceChangedError as error:
            return str(error)
    return ""


def test_the_account_of_a_url_is_that_of_its_connection_string(azurite: Azurite) -> None:
    with pytest.raises(
        ValueError, match="is in the account 'other', but the connection string is for 'devstoreaccount1'"
    ):
        open_converter(
            "abfs://c@other.dfs.core.windows.net/x", storage_options={"connection_string": azurite.connection_string}
        )


def write_with(url: str, options: dict[str, Any]) -> list[str]:
    """Who owns what is written, in a process that has been nobody else."""
    from hdfs_native import Client

    spark = converter.start_local_spark("user")
    with make_spark_converter(spark.range(10), cache_dir=url, storage_options=options) as made:
        path = made.url.removeprefix("hdfs://").partition("/")[2]
        return sorted({one.owner for one in Client(url).list_status(f"/{path}", recursive=True)})


@pytest.mark.parametrize("is_option", [True, False], ids=["option", "url"])
def test_hdfs_knows_the_user(hdfs: Hdfs, is_option: bool) -> None:
    from hdfs_native import Client

    path = f"/of-alice-{is_option}"
    open_storage(f"{hdfs.url}{path}").put_if_absent("x", b"")
    Client(hdfs.url).set_permission(path, 0o777)
    place = hdfs.url if is_option else hdfs.url.replace("://", "://alice@")
    owners = run_python(write_with, f"{place}{path}", {"user": "alice"} if is_option else {})
    assert owners == ["alice"]


OWN_USER = pwd.getpwuid(os.getuid()).pw_name


def folder_of_anybody(hdfs: Hdfs, path: str) -> Storage:
    from hdfs_native import Client

    storage = open_storage(f"{hdfs.url}{path}")
    storage.put_if_absent("x", b"")
    Client(hdfs.url).set_permission(path, 0o777)
    return storage


@pytest.mark.parametrize("is_option", [True, False], ids=["option", "url"])
def test_sparks_writer_is_refused_another_user_before_anything_is_written(
    spark: SparkSession, hdfs: Hdfs, is_option: bool
) -> None:
    storage = folder_of_anybody(hdfs, f"/of-nobody-{is_option}")
    url = storage.url if is_option else storage.url.replace("://", "://alice@")
    options = {"user": "alice"} if is_option else {}
    said = rf"to {storage.url} as '{OWN_USER}'.* name 'alice'\. Pass writer='executors'.*HADOOP_USER_NAME=alice"
    with pytest.raises(ValueError, match=said):
        make_spark_converter(spark.range(10), cache_dir=url, storage_options=options, writer="spark")
    assert [info.name for info in storage.list()] == ["x"]
    # Nor is the process somebody else from now on.
    assert "HADOOP_USER_NAME" not in os.environ


def test_sparks_writer_takes_the_user_of_its_own_jvm(
    spark: SparkSession, hdfs: Hdfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the option says, this process's environment says from then on.
    monkeypatch.setenv("HADOOP_USER_NAME", OWN_USER)
    place = Place(f"{hdfs.url}/of-myself", {"user": OWN_USER})
    with place.convert(spark.range(10), writer="spark") as made:
        assert all("-c000" in name for name in made._manifest.file_names)
        assert len(made) == 10
    assert place.files() == ["converter-v1/.owner"]


def convert_as_alice(url: str, python: str) -> list[str]:
    """With executors whose environment names somebody else, in a process that has been nobody else."""
    os.environ |= {
        "JAVA_HOME": str(find_java_home()),
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    builder: Any = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.executorEnv.HADOOP_USER_NAME", "bob").getOrCreate()
    return error_of(lambda: make_spark_converter(spark.range(10), cache_dir=url, storage_options={"user": "alice"}))


def test_auto_takes_nobody_who_writes_as_another_user(hdfs: Hdfs, tmp_path: Path) -> None:
    # With the driver's own program nobody would be asked.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    storage = folder_of_anybody(hdfs, "/of-others")
    kind, said = run_python(convert_as_alice, storage.url, str(python))
    assert kind == "CacheError"
    assert f"Neither writer can write to {storage.url}" in said
    assert "name the user alice, and HADOOP_USER_NAME another one" in said
    assert f"Spark's own writer writes as '{OWN_USER}'" in said
    assert said.endswith("HADOOP_USER_NAME=alice before Spark starts, or let the executors write.")
    assert [info.name for info in storage.below("converter-v1").list()] == [".owner"]


def test_a_store_that_cannot_be_reached_is_named(azurite: Azurite) -> None:
    dead = azurite.connection_string.replace(f":{azurite.port}/", ":1/")
    url = f"{azurite.url('nowhere')}/x"
    for call in (make_parquet_converter, converter.make_delta_converter, open_converter):
        target = f"{url}/converter-v1/0123456789abcdef-0123456789abcdef" if call is open_converter else url
        with pytest.raises(ConverterError, match=r"abfs://nowhere@.* cannot be read: .*2 seconds") as raised:
            call(target, storage_options={"connection_string": dead}, timeout_seconds=2)
        assert azurite.key not in str(raised.getrepr(chain=True))
