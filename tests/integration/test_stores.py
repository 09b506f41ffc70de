"""HDFS and Azure's blobs keep the contract of every store, and what goes wrong there is named, in time."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import multiprocessing
import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs
from azure.storage.blob import BlobClient
from deltalake import DeltaTable, write_deltalake
from hdfs_native import Client

from converter import (
    ConverterError,
    DatasetConverter,
    SourceError,
    make_delta_converter,
    make_parquet_converter,
    open_converter,
    sweep,
)
from converter.cache import entries, roots
from converter.cache.removal import SweepReport
from converter.portable import deadlines, filesystems, tasks
from converter.sources.delta import files
from converter.storage.directory import Storage
from converter.storage.opening import open_storage
from converter.storage.requests import GivenUpError
from tests.contracts.storage import RemoteStorageContract
from tests.faults.small_entries import KEY, OTHER_KEY, plan_write, write_data
from tests.processes import run_python
from tests.servers.proxy import Proxy
from tests.waiting import meet, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.servers.azurite import Azurite, BlobAccount, SlowAzurite
    from tests.servers.hdfs import Hdfs
    from tests.servers.s3 import S3


def blobs(account: BlobAccount, *, timeout_seconds: float = 20, **options: Any) -> Storage:
    """A folder of a new container."""
    url = f"{account.url(account.new_container())}/some/folder"
    return open_storage(url, options or {"connection_string": account.connection_string}, timeout_seconds)


class TestHdfs(RemoteStorageContract):
    @pytest.fixture
    def storage(self, hdfs: Hdfs, request: pytest.FixtureRequest) -> Storage:
        return open_storage(f"{hdfs.url}/contract/{abs(hash(request.node.name))}/cache")

    @pytest.fixture
    def forbidden(self, hdfs: Hdfs, monkeypatch: pytest.MonkeyPatch) -> Storage:
        storage = open_storage(f"{hdfs.url}/forbidden", timeout_seconds=20)
        storage.make_directory()
        storage.put_if_absent("a", b"1")
        Client(hdfs.url).set_permission("/forbidden", 0o700)
        monkeypatch.setenv("HADOOP_USER_NAME", "bob")
        return open_storage(storage.url, timeout_seconds=20)


class TestAzure(RemoteStorageContract):
    @pytest.fixture
    def storage(self, azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> Storage:
        # For whoever opens the place anew.
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite.connection_string)
        self.connection_string = azurite.connection_string
        return blobs(azurite)

    @pytest.fixture
    def forbidden(self, azurite: Azurite) -> Storage:
        """Of a signature that allows to look at tags alone."""
        container = azurite.new_container()
        url = f"{azurite.url(container)}/forbidden"
        open_storage(url, {"connection_string": azurite.connection_string}, 20).put_if_absent("a", b"1")
        signature = azurite.sas(container, permission="t")
        text = azurite.connection_string.replace(f"AccountKey={azurite.key}", f"SharedAccessSignature={signature}")
        return open_storage(url, {"connection_string": text}, 20)

    def open(self, url: str) -> Storage:
        return open_storage(url, {"connection_string": self.connection_string})

    def test_a_container_is_never_removed(self, azurite: Azurite) -> None:
        url = azurite.url(azurite.new_container())
        storage = open_storage(url, {"connection_string": azurite.connection_string})
        storage.delete_directory_if_empty()
        assert storage.put_if_absent("a", b"1")


class TestS3(RemoteStorageContract):
    # The emulator looks at a policy where one object is asked for, and not where a folder is.
    refuses_lists = False

    @pytest.fixture
    def storage(self, s3: S3, monkeypatch: pytest.MonkeyPatch) -> Storage:
        # For whoever opens the place anew.
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret)
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.options["endpoint_url"])
        return open_storage(f"{s3.url(s3.new_bucket())}/some/folder", s3.options, 20)

    @pytest.fixture
    def forbidden(self, s3: S3) -> Storage:
        bucket = s3.new_bucket()
        storage = open_storage(f"{s3.url(bucket)}/forbidden", s3.options, 20)
        storage.put_if_absent("a", b"1")
        denied = {"Effect": "Deny", "Principal": "*", "Action": "s3:*", "Resource": f"arn:aws:s3:::{bucket}/*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [denied]})
        store = s3fs.S3FileSystem(**s3.options, skip_instance_cache=True)
        store.call_s3("put_bucket_policy", Bucket=bucket, Policy=policy)
        return storage


def test_a_bucket_that_is_missing_is_named_and_not_made(s3: S3) -> None:
    storage = open_storage("s3://no-such-bucket/cache", s3.options, timeout_seconds=10)
    storage.make_directory()
    for ask in (storage.list, lambda: storage.put_if_absent("a", b"1"), lambda: storage.read("a")):
        with pytest.raises(OSError, match="there is no bucket 'no-such-bucket'; check its name, or create it"):
            ask()


def put_rows(storage: Storage, name: str, ids: list[int]) -> None:
    content = io.BytesIO()
    pq.write_table(pa.table({"id": ids}), content)
    assert storage.put_if_absent(name, content.getvalue())


def rows_of(converter: DatasetConverter) -> list[int]:
    with converter, converter.make_batch_reader(batch_size=100) as reader:
        return sorted(number for batch in reader for number in batch["id"].tolist())


def test_an_endpoint_that_refuses_connections_is_waited_for(s3: S3) -> None:
    storage = open_storage(f"{s3.url(s3.new_bucket())}/table", s3.options, 20)
    put_rows(storage, "a.parquet", [1, 2, 3])
    with socket.socket() as taken:
        # Bound and not listening: connections to it are refused.
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        options = {**s3.options, "endpoint_url": f"http://127.0.0.1:{port}"}
        with pytest.raises(ConverterError, match=r"could not be reached for 1 seconds \(timeout_seconds\)"):
            make_parquet_converter(storage.url, storage_options=options, timeout_seconds=1)
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(make_parquet_converter, storage.url, storage_options=options, timeout_seconds=60)
            # Longer than the client itself tries again.
            time.sleep(8)
            assert not opening.done()
            taken.close()
            with Proxy(int(s3.options["endpoint_url"].rpartition(":")[2]), port=port):
                assert rows_of(opening.result()) == [1, 2, 3]


def test_the_copies_of_a_delta_version_are_those_of_its_files_whatever_is_filtered(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files as large as this are cut into row groups, unless a filter leaves them out: then others have their numbers.
    monkeypatch.setattr(files, "_LARGE_FILE_BYTES", 0)
    plain = deltalake.WriterProperties(
        compression="UNCOMPRESSED",
        max_row_group_size=500,
        default_column_properties=deltalake.ColumnProperties(dictionary_enabled=False),
    )
    for part in range(4):
        ids = pa.array(range(1000 * part, 1000 * part + 1000))
        rows = pa.table({"id": ids, "part": pa.array([part] * 1000)})
        write_deltalake(tmp_path / "table", rows, mode="append", partition_by=["part"], writer_properties=plain)
    bucket = s3.new_bucket()
    store = s3fs.S3FileSystem(**s3.options, skip_instance_cache=True)
    store.put(f"{tmp_path}/table/", f"{bucket}/table/", recursive=True)

    def read(filters: Any, directory: Path | None) -> list[int]:
        converter = make_delta_converter(f"s3://{bucket}/table", filters=filters, storage_options=s3.options)
        kept = {} if directory is None else {"local_cache_dir": str(directory)}
        with converter, converter.make_batch_reader(batch_size=100, columns=["id"], **kept) as reader:
            return [number for batch in reader for number in batch["id"].tolist()]

    late = [("part", ">=", 2)]
    truth = {None: read(None, None), "late": read(late, None)}
    assert sorted(truth[None]) == list(range(4000))
    assert sorted(truth["late"]) == list(range(2000, 4000))
    for number, order in enumerate([(None, "late", None), ("late", None, "late")]):
        for name in order:
            assert read(late if name else None, tmp_path / str(number)) == truth[name]


class Uploads:
    """What is being uploaded to a bucket; no listing of objects shows it."""

    def __init__(self, s3: S3) -> None:
        self.bucket = s3.new_bucket()
        self.url = f"{s3.url(self.bucket)}/cache"
        self._store = s3fs.S3FileSystem(**s3.options, skip_instance_cache=True)

    def begin(self, path: str) -> None:
        """As a writer that is killed before its file is whole."""
        key = path.removeprefix(f"{self.bucket}/")
        upload = self._store.call_s3("create_multipart_upload", Bucket=self.bucket, Key=key)
        self._store.call_s3(
            "upload_part", Bucket=self.bucket, Key=key, UploadId=upload["UploadId"], PartNumber=1, Body=b"rows"
        )

    @property
    def names(self) -> list[str]:
        return sorted(upload["Key"] for upload in self._store.list_multipart_uploads(self.bucket))


@pytest.mark.parametrize("ends", ["commit", "abandon", "sweep", "delete"])
def test_what_killed_tasks_began_to_upload_is_given_up(s3: S3, ends: str) -> None:
    uploads = Uploads(s3)
    root = roots.open_root(uploads.url, s3.options)
    attempt = entries.begin(root, KEY, application_id="app-1")
    data = root.below(KEY).below(attempt.data_directory)
    manifest = write_data(root, attempt)
    held = entries.commit(root, attempt, manifest) if ends == "delete" else None
    uploads.begin(data.path("part-00009-00000009-0000.parquet"))
    uploads.begin(data.path("_temporary/0/_temporary/attempt_1/part-00000-00000000-0000.parquet"))
    # Of another attempt, and not of ours.
    uploads.begin(root.below(KEY).path(f"{attempt.data_directory}0/part-00009-00000009-0000.parquet"))
    uploads.begin(data.path("notes.bin"))
    uploads.begin(data.path("mine/part-00009-00000009-0000.parquet"))
    assert len(uploads.names) == 5
    if ends == "commit":
        entries.delete_unlisted(root, attempt, manifest)
    elif ends == "abandon":
        entries.abandon(root, attempt)
    elif held is not None:
        held.delete()
    else:
        # As if the driver had been killed, too.
        entries.release(attempt.intent)
        sweep(uploads.url, storage_options=s3.options)
    left = [name.partition(f"{attempt.data_directory}")[2] for name in uploads.names]
    assert sorted(left) == [
        "/mine/part-00009-00000009-0000.parquet",
        "/notes.bin",
        "0/part-00009-00000009-0000.parquet",
    ]
    if ends == "commit":
        entries.abandon(root, attempt)


def test_a_sweep_gives_up_what_outlived_its_driver_and_nothing_of_the_living(s3: S3) -> None:
    uploads = Uploads(s3)
    root = roots.open_root(uploads.url, s3.options)
    attempt = entries.begin(root, KEY, application_id="app-1")
    live = root.below(KEY).path(f"{attempt.data_directory}/part-00009-00000009-0000.parquet")
    # Their task began after a sweep had removed the rest, and was killed. No object is below that key.
    orphan = root.below(OTHER_KEY).path(f"{attempt.data_directory}/part-00009-00000009-0000.parquet")
    theirs = [
        root.below(OTHER_KEY).path(name) for name in (f"{attempt.data_directory}/notes.bin", "data/part-1.parquet")
    ]
    for path in (live, orphan, *theirs):
        uploads.begin(path)
    for dry_run in (True, False):
        sweep(uploads.url, storage_options=s3.options, dry_run=dry_run)
        kept = [live, *theirs, *([orphan] if dry_run else [])]
        assert uploads.names == sorted(path.removeprefix(f"{uploads.bucket}/") for path in kept)
    entries.abandon(root, attempt)


@pytest.mark.parametrize("ends", ["delete", "abandon", "sweep"])
def test_what_spark_marked_and_staged_on_s3_goes_with_its_folder(s3: S3, ends: str) -> None:
    uploads = Uploads(s3)
    root = roots.open_root(uploads.url, s3.options)
    attempt = entries.begin(root, KEY, application_id="app-1")
    held = entries.commit(root, attempt, write_data(root, attempt)) if ends == "delete" else None
    below = root.path("x").removeprefix(f"{uploads.bucket}/")[:-1]
    data = f"{KEY}/{attempt.data_directory}/"
    staged = [] if held else [f"{data}{name}" for name in ("__magic/", "__magic_job-1/", "__magic_job-1/x/1.pending")]
    foreign = [f"{OTHER_KEY}/", f"{OTHER_KEY}/notes.txt"]
    for name in (f"{KEY}/", data, *staged, *foreign):
        uploads._store.call_s3("put_object", Bucket=uploads.bucket, Key=f"{below}{name}", Body=b"")
    if held is not None:
        held.delete()
    elif ends == "abandon":
        entries.abandon(root, attempt)
    else:
        # As if the driver had been killed.
        entries.release(attempt.intent)
        assert sweep(uploads.url, storage_options=s3.options).num_attempts == 1
        assert sweep(uploads.url, storage_options=s3.options) == SweepReport()
    listed = uploads._store.call_s3("list_objects_v2", Bucket=uploads.bucket)["Contents"]
    names = [one["Key"].removeprefix(below) for one in listed]
    assert [name for name in names if not name.startswith(".")] == foreign


@pytest.mark.parametrize("is_committed", [False, True])
def test_a_sweep_gives_up_what_a_dead_writer_was_uploading_beside_another_one(s3: S3, is_committed: bool) -> None:
    uploads = Uploads(s3)
    root = roots.open_root(uploads.url, s3.options)
    dead, other = (entries.begin(root, KEY, application_id="app-1") for _ in range(2))
    manifest = write_data(root, other)
    held = entries.commit(root, other, manifest) if is_committed else None
    of_dead, of_other = (
        root.below(KEY).path(f"{attempt.data_directory}/part-00009-00000009-0000.parquet") for attempt in (dead, other)
    )
    uploads.begin(of_dead)
    uploads.begin(of_other)
    sweep(uploads.url, storage_options=s3.options, dry_run=True)
    assert len(uploads.names) == 2
    # As if a sweep had removed the intent while the driver's tasks ended.
    entries.release(dead.intent)
    root.below(KEY).delete_file(f"{dead.data_directory}.intent")
    sweep(uploads.url, storage_options=s3.options)
    # What is committed is whole: that was begun by a slower twin.
    assert uploads.names == ([] if is_committed else [of_other.removeprefix(f"{uploads.bucket}/")])
    if held is not None:
        held.delete()
    else:
        entries.abandon(root, other)


def test_a_task_that_fails_gives_up_what_it_was_uploading(s3: S3) -> None:
    uploads = Uploads(s3)
    # s3fs sends the first part at twice this size.
    root = roots.open_root(uploads.url, s3.options | {"default_block_size": 5 << 20})
    attempt = entries.begin(root, KEY, application_id="app-1")
    _, spec = plan_write(root, attempt)
    spec["file_bytes"] = 1 << 30
    seen = []

    def batches() -> Iterator[pa.RecordBatch]:
        for start in range(0, 3_000_000, 100_000):
            ids = pa.array(range(start, start + 100_000), pa.int64())
            yield pa.RecordBatch.from_arrays([ids, ids.cast(pa.float32())], names=["c0", "c1"])
        seen.append(uploads.names)
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        list(tasks._write(batches(), spec, partition=0, attempt=0))
    assert len(seen[0]) == 1
    assert uploads.names == []
    entries.abandon(root, attempt)


def test_who_may_not_list_uploads_deletes_all_the_same(s3: S3) -> None:
    uploads = Uploads(s3)
    root = roots.open_root(uploads.url, s3.options)
    attempt = entries.begin(root, KEY, application_id="app-1")
    data = root.below(KEY).below(attempt.data_directory)
    write_data(root, attempt)
    uploads.begin(data.path("part-00009-00000009-0000.parquet"))

    def refuse(self: Any, method: str, *arguments: Any, **options: Any) -> Any:
        assert method == "list_multipart_uploads"
        raise PermissionError("Access Denied")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3fs.S3FileSystem, "call_s3", refuse)
        entries.abandon(root, attempt)
    assert data.list() == []
    assert len(uploads.names) == 1


def test_objects_that_stand_for_folders_hide_no_file(s3: S3) -> None:
    # As S3's console and Hadoop make them.
    storage = open_storage(f"{s3.url(s3.new_bucket())}/table", s3.options, 20)
    for number in (1, 2):
        put_rows(storage.below(f"x={number}"), "a.parquet", [number])
    store = s3fs.S3FileSystem(**s3.options, skip_instance_cache=True)
    store.touch(f"{storage.path()}/", truncate=True)
    store.touch(f"{storage.path('x=1')}/", truncate=True)
    assert rows_of(make_parquet_converter(storage.url, storage_options=s3.options)) == [1, 2]
    assert rows_of(make_parquet_converter(f"{storage.url}/x=1", storage_options=s3.options)) == [1]


def test_clients_of_azure_and_their_connections_end_with_their_converters(azurite: Azurite) -> None:
    """adlfs holds each of its filesystems until the process ends."""
    storage, stream = blobs(azurite), io.BytesIO()
    pq.write_table(pa.table({"id": range(4)}), stream)
    assert storage.put_if_absent("a.parquet", stream.getvalue())
    options = {"connection_string": azurite.connection_string}

    def read() -> None:
        with (
            make_parquet_converter(storage.url, storage_options=options) as converter,
            converter.make_batch_reader(batch_size=4) as reader,
        ):
            assert [batch["id"].tolist() for batch in reader] == [[0, 1, 2, 3]]

    def held() -> tuple[int, ...]:
        gc.collect()
        kinds = [type(one).__name__ for one in gc.get_objects()]
        clients = map(kinds.count, ("AzureBlobFileSystem", "BlobServiceClient", "ClientSession"))
        return *clients, len(os.listdir("/proc/self/fd"))

    read()
    before = held()
    for _ in range(5):
        read()
    wait_until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)), seconds=10)


def test_forked_children_do_not_close_the_connections_of_azure_of_their_parent(azurite: Azurite) -> None:
    storage, stream = blobs(azurite), io.BytesIO()
    pq.write_table(pa.table({"id": range(4)}), stream)
    assert storage.put_if_absent("a.parquet", stream.getvalue())
    options = {"connection_string": azurite.connection_string}
    with make_parquet_converter(storage.url, storage_options=options, timeout_seconds=10) as converter:

        def read(**how: Any) -> list[list[int]]:
            with converter.make_torch_dataloader(batch_size=4, **how) as loader:
                return [batch["id"].tolist() for batch in loader]

        for _ in range(2):
            assert read() == [[0, 1, 2, 3]]
            assert read(num_workers=1, multiprocessing_context="fork") == [[0, 1, 2, 3]]
            if not (pid := os.fork()):
                status = 1
                with contextlib.suppress(BaseException):
                    assert read() == [[0, 1, 2, 3]]
                    gc.collect()
                    status = 0
                os._exit(status)
            assert os.waitpid(pid, 0)[1] == 0
        assert read() == [[0, 1, 2, 3]]


def test_a_blob_that_hides_a_folder_is_named(azurite: Azurite) -> None:
    options = {"connection_string": azurite.connection_string}
    container = azurite.new_container()
    storage = open_storage(f"{azurite.url(container)}/table", options, 20)
    for number in (1, 2):
        put_rows(storage.below(f"x={number}"), "a.parquet", [number])
    for name in ("table/x=1", "table"):
        with BlobClient.from_connection_string(azurite.connection_string, container, name) as blob:
            blob.upload_blob(b"")
        with pytest.raises(SourceError, match=rf"{container}/{name} is an empty blob, which hides the folder"):
            make_parquet_converter(storage.url, storage_options=options)


def test_a_folder_without_a_name_is_refused(s3: S3, azurite: Azurite) -> None:
    for url in (f"{s3.url(s3.new_bucket())}/a//b", f"{azurite.url(azurite.new_container())}/a//b"):
        with pytest.raises(ValueError, match=r"a folder without a name \(//\)"):
            open_storage(url, {"account_key": azurite.key})


def test_names_on_hdfs_are_taken_as_they_are(hdfs: Hdfs) -> None:
    storage = open_storage(f"{hdfs.url}/odd-names", timeout_seconds=20)
    for number, name in enumerate(("c=z", "c=a;b", "c=a")):
        storage.below(name).make_directory()
        put_rows(storage.below(name), "f;1.parquet", [number])
    assert storage.below("c=a;b").size("f;1.parquet")
    # Hadoop takes several slashes for one.
    for url in (storage.url, f"{hdfs.url}//odd-names", f"{hdfs.url}//odd-names//"):
        converter = make_parquet_converter(url)
        assert converter.url == storage.url
        assert rows_of(converter) == [0, 1, 2]
    storage.below("c=a;b").delete_tree()
    assert [info.name for info in storage.list()] == ["c=a", "c=z"]


@pytest.mark.parametrize("kind", ["beside", "all elsewhere", "another bucket"])
def test_a_shallow_clone_on_s3_names_files_of_other_folders(s3: S3, tmp_path: Path, kind: str) -> None:
    bucket, other = s3.new_bucket(), s3.new_bucket()
    for number in range(2):
        write_deltalake(tmp_path / "table", pa.table({"id": [number]}), mode="append")
    if kind != "beside":
        DeltaTable(tmp_path / "table").delete("id = 1")
    store = s3fs.S3FileSystem(**s3.options, skip_instance_cache=True)
    moved = f"{other if kind == 'another bucket' else bucket}/origin of it"
    commit = tmp_path / "table/_delta_log/00000000000000000000.json"
    actions = [json.loads(line) for line in commit.read_text().splitlines()]
    for add in (action["add"] for action in actions if "add" in action):
        store.put_file(str(tmp_path / "table" / add["path"]), f"{moved}/{add['path']}")
        add["path"] = f"s3a://{quote(moved)}/{add['path']}"
    commit.write_text("".join(json.dumps(action) + "\n" for action in actions))
    store.put(f"{tmp_path}/table/", f"{bucket}/deep/clone/", recursive=True)
    converter = make_delta_converter(f"s3://{bucket}/deep/clone", storage_options=s3.options)
    assert converter.url == f"s3://{bucket}" if kind == "beside" else f"s3://{moved}"
    assert rows_of(converter) == ([0, 1] if kind == "beside" else [0])


@pytest.mark.parametrize("kind", ["hdfs", "azure"])
def test_a_store_that_hangs_while_deltalake_asks_is_an_error_in_time(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_deltalake(tmp_path / "table", pa.table({"id": [1]}))
    if kind == "azure":
        slow: SlowAzurite = request.getfixturevalue("slow_azurite")
        url, options = f"{slow.url(slow.new_container())}/table", {"connection_string": slow.connection_string}
        hanging: Any = slow.proxy.hanging()
    else:
        hdfs: Hdfs = request.getfixturevalue("hdfs")
        url, options, hanging = f"{hdfs.url}/a-table-that-hangs", {}, hdfs.namenode.paused()
    storage = open_storage(url, options, 60)
    for file in (tmp_path / "table").rglob("*.*"):
        folder = storage.below("_delta_log") if file.parent.name == "_delta_log" else storage
        folder.make_directory()
        folder.put_if_absent(file.name, file.read_bytes())
    with contextlib.ExitStack() as stack:

        def load(*arguments: Any, **named: Any) -> Any:
            # From the moment on that deltalake is asked.
            stack.enter_context(hanging)
            return DeltaTable(*arguments, **named)

        monkeypatch.setattr(deltalake, "DeltaTable", load)
        begin = time.monotonic()
        with pytest.raises(SourceError, match=rf"{url} cannot be opened: .*for 3 seconds \(timeout_seconds\)"):
            make_delta_converter(url, storage_options=options, timeout_seconds=3)
        assert time.monotonic() - begin < 30
    monkeypatch.undo()
    assert rows_of(make_delta_converter(url, storage_options=options, timeout_seconds=60)) == [1]


# Races -------------------------------------------------------------------------------


def put(url: str, options: dict[str, Any], rounds: int, folder: str, me: str, other: str) -> list[bool]:
    storage = open_storage(url, options)
    won = []
    for number in range(rounds):
        meet(folder, number, me, other)
        won.append(storage.put_if_absent(f"round-{number}", me.encode() * 100))
    return won


@pytest.mark.parametrize("kind", ["hdfs", "azure"])
def test_of_two_processes_one_wins_each_round(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    server = request.getfixturevalue("hdfs" if kind == "hdfs" else "azurite")
    options = {} if kind == "hdfs" else {"connection_string": server.connection_string}
    url = f"{server.url}/race" if kind == "hdfs" else f"{server.url(server.new_container())}/race"
    open_storage(url, options).make_directory()
    rounds = 100
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(run_python, put, url, options, rounds, str(tmp_path), *names) for names in ("ab", "ba")]
        won = list(zip(*(result.result() for result in results), strict=True))
    assert [sum(pair) for pair in won] == [1] * rounds
    assert {pair[0] for pair in won} == {True, False}, "nobody was raced with"
    storage = open_storage(url, options)
    for number, (first, _) in enumerate(won):
        assert storage.read(f"round-{number}") == (b"a" if first else b"b") * 100


def read_in_a_forked_process(url: str, options: dict[str, Any]) -> list[str]:
    """What a forked child and its parent read, in an interpreter of their own: a fork copies the locks of threads."""

    def read() -> None:
        try:
            results.put(storage.read("a").decode())
        except OSError as error:
            results.put(str(error))

    storage = open_storage(url, options)
    storage.put_if_absent("a", b"1")
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=read)
    child.start()
    child.join(30)
    assert not child.is_alive()
    return [results.get(), storage.read("a").decode()]


def test_azure_works_on_in_a_forked_process(azurite: Azurite) -> None:
    url = f"{azurite.url(azurite.new_container())}/folder"
    options = {"connection_string": azurite.connection_string}
    assert run_python(read_in_a_forked_process, url, options) == ["1", "1"]


class Closing(io.RawIOBase):
    """A file of hdfs-native whose closing waits, or fails, before or after it is done."""

    def __init__(self, file: Any, *, before: Any = None, after: Any = None) -> None:
        self.file, self.before, self.after = file, before or (lambda: None), after or (lambda: None)

    def close(self) -> None:
        self.before()
        self.file.close()
        self.after()


def fail() -> None:
    raise OSError("the DataNode is gone")


def new_file(hdfs: Hdfs, name: str, data: bytes) -> tuple[Any, Any]:
    from hdfs_native import WriteOptions

    # Not one that fsspec keeps: a forked child forgets those, and hdfs-native then waits for threads it has not.
    filesystem = filesystems.open_filesystem(open_storage(f"{hdfs.url}/closing").store, retries_itself=False)
    filesystem.client.mkdirs("/closing")
    file = filesystem.client.create(f"/closing/{name}", WriteOptions(overwrite=True))
    if data:
        file.write(data)
    return filesystem, file


def is_open(filesystem: Any, name: str) -> bool:
    """Whether somebody still writes to a file: only then nobody may append to it."""
    try:
        filesystem.client.append(f"/closing/{name}").close()
    except (OSError, RuntimeError) as error:
        return "AlreadyBeingCreated" in str(error)
    return False


# One byte, several packets, and several blocks of 4 MB.
@pytest.mark.parametrize("num_bytes", [0, 1, 1_000_000, 9_000_000])
def test_a_file_of_hdfs_is_whole_when_it_was_closed(hdfs: Hdfs, num_bytes: int) -> None:
    data = os.urandom(num_bytes)
    for number in range(5):
        name = f"whole-{num_bytes}-{number}"
        filesystem, file = new_file(hdfs, name, data)
        filesystems.close_whole(filesystem, file, f"/closing/{name}", num_bytes)
        reader = filesystem.client.read(f"/closing/{name}")
        assert len(reader) == num_bytes
        assert not num_bytes or bytes(reader.read_range(0, num_bytes)) == data
        assert not is_open(filesystem, name)
        # What still waits in the background finds the file wherever it is now, or not at all.
        if number % 2:
            filesystem.client.rename(f"/closing/{name}", f"/closing/moved-{name}")
        else:
            filesystem.client.delete(f"/closing/{name}")
    wait_for_closing()
    assert filesystem.client.get_file_info(f"/closing/moved-{name[:-1]}3").length == num_bytes


def wait_for_closing() -> None:
    for thread in threading.enumerate():
        if thread.name == deadlines.CLOSING_THREAD:
            thread.join(20)
            assert not thread.is_alive()


def test_a_file_of_hdfs_that_is_not_whole_is_waited_for(hdfs: Hdfs) -> None:
    closed: list[bool] = []

    def wait() -> None:
        time.sleep(1)
        closed.append(True)

    filesystem, file = new_file(hdfs, "late", b"late" * 1000)
    filesystems.close_whole(filesystem, Closing(file, before=wait), "/closing/late", 4000)
    assert closed
    assert bytes(filesystem.client.read("/closing/late").read_range(0, 4000)) == b"late" * 1000
    wait_for_closing()


def test_a_file_of_hdfs_that_is_whole_is_not_waited_for(hdfs: Hdfs) -> None:
    go_on = threading.Event()
    filesystem, file = new_file(hdfs, "early", b"early")
    filesystems.close_whole(filesystem, Closing(file, after=lambda: go_on.wait(20)), "/closing/early", 5)
    assert not go_on.is_set()
    assert not is_open(filesystem, "early")
    go_on.set()
    wait_for_closing()


def test_a_file_of_hdfs_that_cannot_be_closed_is_an_error(hdfs: Hdfs) -> None:
    filesystem, file = new_file(hdfs, "lost", b"lost")
    with pytest.raises(OSError, match="the DataNode is gone"):
        filesystems.close_whole(filesystem, Closing(file, before=fail), "/closing/lost", 4)
    file.close()
    # What fails once the file is whole has lost nothing.
    filesystem, file = new_file(hdfs, "kept", b"kept")
    filesystems.close_whole(filesystem, Closing(file, after=lambda: (time.sleep(1), fail())), "/closing/kept", 4)
    assert bytes(filesystem.client.read("/closing/kept").read_range(0, 4)) == b"kept"
    wait_for_closing()


def test_hdfs_says_that_it_does_not_work_in_a_forked_process(hdfs: Hdfs) -> None:
    url = f"{hdfs.url}/forked"
    open_storage(url).make_directory()
    said, read = run_python(read_in_a_forked_process, url, {})
    assert "multiprocessing_context='spawn'" in said
    assert read == "1"


def collect_in_a_forked_process(url: str, path: str) -> int | None:
    """The exit status of a forked child that collects what its parent has left lying; None where it hangs."""
    gc.disable()
    open_storage(url).put_if_absent("a", b"1")
    ring: list[Any] = [Client(url).read(path)]
    ring.append(ring)
    del ring
    child = multiprocessing.get_context("fork").Process(target=gc.collect)
    child.start()
    child.join(30)
    status = child.exitcode
    child.kill()
    return status


def test_a_forked_process_does_not_wait_for_threads_of_hdfs_native(hdfs: Hdfs) -> None:
    assert run_python(collect_in_a_forked_process, f"{hdfs.url}/collected", "/collected/a") == 0


def modified(storage: Storage) -> float:
    """When the only file there was last written."""
    (info,) = storage.list()
    return info.modified


def test_a_time_is_renewed_without_creating_anything(azurite: Azurite, hdfs: Hdfs, s3: S3) -> None:
    in_bucket = open_storage(f"{s3.url(s3.new_bucket())}/renew", s3.options)
    for storage in (blobs(azurite), open_storage(f"{hdfs.url}/renew"), in_bucket):
        storage.make_directory()
        storage.put_if_absent("a", b"1")
        before = modified(storage)

        def is_renewed(storage: Storage = storage, before: float = before) -> bool:
            storage.touch("a")
            return modified(storage) > before

        # Stores that count whole seconds show it in the next one.
        wait_until(is_renewed, seconds=10)
        assert storage.read("a") == b"1"
        assert abs(storage.now() - time.time()) < 5
        storage.delete_file("a")
        with pytest.raises(FileNotFoundError):
            storage.touch("a")
        assert storage.list() == []


# What goes wrong ---------------------------------------------------------------------


@pytest.fixture
def slow(slow_azurite: SlowAzurite) -> Iterator[Storage]:
    storage = blobs(slow_azurite, timeout_seconds=60)
    storage.put_if_absent("a", b"whole")
    slow_azurite.proxy.forget()
    return storage


@pytest.mark.parametrize("status", [503, 429, 500])
def test_what_passes_is_asked_again(slow_azurite: SlowAzurite, slow: Storage, status: int) -> None:
    slow_azurite.proxy.fail_next(3, status=status)
    assert slow.read("a") == b"whole"
    assert slow_azurite.proxy.count("GET") == 4


@pytest.mark.parametrize("status", [503, 429])
def test_a_renewal_is_asked_again_and_only_a_file_that_is_gone_is_said_to_be(
    slow_azurite: SlowAzurite, slow: Storage, status: int
) -> None:
    slow_azurite.proxy.fail_next(2, status=status, method="PUT")
    slow.touch("a")
    assert slow_azurite.proxy.count("PUT") == 3
    slow_azurite.proxy.fail_next(1, status=403, method="PUT")
    with pytest.raises(PermissionError):
        slow.touch("a")
    slow.delete_file("a")
    with pytest.raises(FileNotFoundError):
        slow.touch("a")


def test_a_reset_connection_is_made_again(slow_azurite: SlowAzurite, slow: Storage) -> None:
    slow_azurite.proxy.reset_next(2)
    assert slow.read("a") == b"whole"


def test_a_put_whose_answer_is_lost_has_won(slow_azurite: SlowAzurite, slow: Storage) -> None:
    slow_azurite.proxy.lose_next_answers(1, method="PUT")
    assert slow.put_if_absent("b", b"mine")
    assert slow.read("b") == b"mine"
    assert not slow.put_if_absent("b", b"another's")


@pytest.mark.parametrize("step", ["read", "put", "list"])
def test_what_hangs_is_a_named_error_in_time(slow_azurite: SlowAzurite, step: str) -> None:
    storage = blobs(slow_azurite, timeout_seconds=2)
    storage.put_if_absent("a", b"whole")
    steps = {"read": lambda: storage.read("a"), "put": lambda: storage.put_if_absent("b", b"1"), "list": storage.list}
    with slow_azurite.proxy.hanging():
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match=r"some/folder.* could not be reached for 2 seconds \(timeout_seconds\)"):
            steps[step]()
        assert time.monotonic() - begin < 30
    wait_for_requests()
    assert storage.read("a") == b"whole"


def test_who_gives_up_does_not_wait(slow_azurite: SlowAzurite, slow: Storage) -> None:
    given_up = threading.Event()
    with slow_azurite.proxy.hanging():
        threading.Timer(0.5, given_up.set).start()
        begin = time.monotonic()
        with pytest.raises(GivenUpError):
            slow.read_part("a", 0, 2, given_up)
        assert time.monotonic() - begin < 30
    wait_for_requests()


def wait_for_requests() -> None:
    """Until those that were given up have ended."""
    for thread in threading.enumerate():
        if thread.name == "converter-request":
            thread.join(60)


def test_a_server_that_is_away_is_named(azurite: Azurite) -> None:
    storage = blobs(azurite, timeout_seconds=3)
    storage.put_if_absent("a", b"1")
    with azurite.killed(), pytest.raises(TimeoutError, match="some/folder/a could not be reached for 3 seconds"):
        storage.read("a")
    assert storage.read("a") == b"1"


@pytest.mark.parametrize("fault", ["key", "expired", "container", "no permission"])
def test_what_does_not_pass_is_an_error_at_once_and_shows_no_secret(azurite: Azurite, fault: str) -> None:
    container = azurite.new_container()
    wrong_key = azurite.key.replace("E", "F")
    sas = azurite.sas(container, permission="l", valid_seconds=-60 if fault == "expired" else 600)
    secret = wrong_key if fault == "key" else sas
    text = azurite.connection_string.replace(f"AccountKey={azurite.key}", f"SharedAccessSignature={sas}")
    if fault == "key":
        text = azurite.connection_string.replace(azurite.key, wrong_key)
    if fault == "container":
        text, container = azurite.connection_string, "no-such-container"
    storage = open_storage(f"{azurite.url(container)}/folder", {"connection_string": text}, 60)
    begin = time.monotonic()
    kind = FileNotFoundError if fault == "container" else PermissionError
    with pytest.raises(kind) as raised:
        storage.put_if_absent("a", b"1")
    assert time.monotonic() - begin < 30
    shown = "".join(map(repr, (raised.value, raised.value.__cause__, storage, pickle.dumps(storage))))
    for part in (secret, secret.partition("sig=")[2] or secret):
        assert part not in shown
    assert ("sp=rcwdl" in str(raised.value)) == (fault in ("expired", "no permission"))


def test_a_container_that_is_not_there_is_no_empty_folder(azurite: Azurite) -> None:
    options = {"connection_string": azurite.connection_string}
    url = f"{azurite.url('no-such-container')}/folder"
    for ask in (
        lambda: make_parquet_converter(url, storage_options=options),
        lambda: make_delta_converter(url, storage_options=options),
        lambda: sweep(url, storage_options=options),
        lambda: open_converter(f"{url}/converter-v1/{'0' * 16}-{'0' * 16}", storage_options=options),
    ):
        with pytest.raises(ConverterError, match=r"no-such-container@.*there is no container 'no-such-container'"):
            ask()
    container = azurite.url(azurite.new_container())
    with pytest.raises(SourceError, match=r"/folder does not exist\. Check the path"):
        make_parquet_converter(f"{container}/folder", storage_options=options)
    with pytest.raises(SourceError, match="holds no Parquet files"):
        make_parquet_converter(container, storage_options=options)


def test_hdfs_that_is_paused_is_waited_for(hdfs: Hdfs) -> None:
    storage = open_storage(f"{hdfs.url}/paused-for-a-store", None, 60)
    storage.make_directory()
    storage.put_if_absent("a", b"1")
    threading.Timer(4, hdfs.namenode.resume).start()
    hdfs.namenode.pause()
    try:
        assert storage.read("a") == b"1"
    finally:
        hdfs.namenode.resume()


def test_hdfs_that_stays_paused_is_a_named_error_in_time(hdfs: Hdfs) -> None:
    storage = open_storage(f"{hdfs.url}/paused-for-a-store", None, 2)
    storage.make_directory()
    with hdfs.namenode.paused():
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match="/paused-for-a-store/a could not be reached for 2 seconds"):
            storage.put_if_absent("a", b"1")
        assert time.monotonic() - begin < 30
    wait_for_requests()


def write_as_somebody(url: str) -> str:
    try:
        open_storage(url).put_if_absent("a", b"1")
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return "written"


def test_hdfs_that_refuses_a_user_says_so_at_once(hdfs: Hdfs) -> None:
    storage = open_storage(f"{hdfs.url}/mine")
    storage.make_directory()
    begin = time.monotonic()
    said = run_python(write_as_somebody, storage.url, environment={"HADOOP_USER_NAME": "bob"})
    assert said.startswith("PermissionError: /mine/a: ")
    assert "user=bob" in said
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("host", ["lake.dfs.core.windows.net", "lake.dfs.core.chinacloudapi.cn"])
def test_a_url_without_account_is_of_the_account_where_spark_keeps_its_files(spark: SparkSession, host: str) -> None:
    """Synapse and Fabric start their sessions so."""
    confs = spark.sparkContext._jsc.hadoopConfiguration()
    before = confs.get("fs.defaultFS")
    key = {"account_key": "a2V5"}
    with pytest.raises(ValueError, match=r"abfs://other/a names no account.*fs\.defaultFS"):
        open_storage("abfs://other/a", key)
    confs.set("fs.defaultFS", f"abfss://data@{host}/synapse")
    try:
        storage = open_storage("abfs://other/a", key)
        named = open_storage("abfs://other/a", key | {"account_name": "named"})
        with ThreadPoolExecutor(1) as threads:
            # No session is active in this thread.
            assert threads.submit(open_storage, "abfs://other/a", key).result().url == storage.url
    finally:
        confs.set("fs.defaultFS", before)
    assert storage.url == f"abfs://other@{host}/a"
    assert storage._filesystem.filesystem().service_client.primary_hostname == host.replace("dfs", "blob")
    assert named.url == "abfs://other@named.dfs.core.windows.net/a"
