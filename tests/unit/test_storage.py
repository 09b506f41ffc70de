"""What a cache asks of a filesystem: one contract, kept by every kind of store."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from converter.errors import CacheError
from converter.storage.databricks import python_path_of, spark_url_of
from converter.storage.directory import Storage, open_storage

NOBODY = 65534


class StorageContract:
    """What every store must do.

    A member gives two fixtures: `storage`, a directory that does not exist yet, and `forbidden`, one with a file "a"
    of which nothing may be done; None where a store knows no permissions.
    """

    has_folders = True
    """Whether an empty folder is anything at all."""

    refuses_lists = True
    """Whether the folder `forbidden` may not be listed either."""

    def open(self, url: str) -> Storage:
        """The same place once more, as another process would open it."""
        return open_storage(url)

    def test_what_was_put_is_read(self, storage: Storage) -> None:
        storage.make_directory()
        assert storage.put_if_absent("a", b"\x00whole\xff")
        assert storage.read("a") == b"\x00whole\xff"
        assert storage.size("a") == 7

    def test_what_is_there_exists(self, storage: Storage) -> None:
        storage.make_directory()
        storage.put_if_absent("a", b"1")
        assert storage.exists
        assert not storage.below("nowhere").exists
        assert not storage.below("nowhere", "deeper").exists
        assert storage.size("a") == 1

    def test_an_empty_file_can_be_put(self, storage: Storage) -> None:
        storage.make_directory()
        assert storage.put_if_absent("a", b"")
        assert storage.size("a") == 0
        assert not storage.put_if_absent("a", b"late")

    def test_the_first_put_wins_and_stays(self, storage: Storage) -> None:
        storage.make_directory()
        assert storage.put_if_absent("a", b"first") is True
        assert storage.put_if_absent("a", b"second, longer") is False
        assert storage.read("a") == b"first"
        assert [info.name for info in storage.list()] == ["a"]

    def test_a_deleted_name_can_be_put_again(self, storage: Storage) -> None:
        storage.make_directory()
        storage.put_if_absent("a", b"first")
        storage.delete_file("a")
        assert storage.put_if_absent("a", b"second")
        assert storage.read("a") == b"second"

    def test_a_file_that_is_written_again_has_another_stamp(self, storage: Storage) -> None:
        storage.make_directory()
        storage.put_if_absent("a", b"same")
        seen = storage.look("a")
        assert seen[0] == 4
        assert seen[1] is not None
        assert storage.look("a") == self.open(storage.url).look("a") == seen
        storage.delete_file("a")
        with pytest.raises(FileNotFoundError):
            storage.look("a")
        # HDFS counts milliseconds.
        time.sleep(0.005)
        storage.put_if_absent("a", b"sane")
        assert storage.look("a")[0] == 4
        assert storage.look("a")[1] not in (None, seen[1])

    def test_a_file_below_a_folder_that_was_listed_is_asked_for_anew(self, storage: Storage) -> None:
        below = storage.below("day=1")
        below.make_directory()
        below.put_if_absent("a", b"same")
        assert [info.name for info in below.list()] == ["a"]
        seen = storage.look("day=1/a")
        assert self.open(storage.url).look("day=1/a") == seen
        time.sleep(0.005)
        other = self.open(storage.url).below("day=1")
        other.delete_file("a")
        other.put_if_absent("a", b"longer")
        assert storage.look("day=1/a")[0] == storage.size("day=1/a") == 6
        assert storage.look("day=1/a")[1] != seen[1]

    def test_exactly_one_of_eight_racing_puts_wins_and_is_whole(self, storage: Storage) -> None:
        storage.make_directory()
        interval = sys.getswitchinterval()
        # Let threads take turns within a put, not only between two.
        sys.setswitchinterval(1e-6)
        try:
            for round_number in range(10):
                start = threading.Barrier(8)

                def put(number: int, name: str = f"a{round_number}", start: threading.Barrier = start) -> bool:
                    start.wait()
                    return storage.put_if_absent(name, bytes([number]) * 10_000)

                with ThreadPoolExecutor(8) as pool:
                    won = list(pool.map(put, range(8)))
                assert won.count(True) == 1
                assert storage.read(f"a{round_number}") == bytes([won.index(True)]) * 10_000
        finally:
            sys.setswitchinterval(interval)
        assert [info.name for info in storage.list()] == [f"a{number}" for number in range(10)]

    def test_a_list_has_files_and_directories_by_name(self, storage: Storage) -> None:
        storage.below("b").make_directory()
        storage.put_if_absent("c", b"123")
        storage.put_if_absent("a", b"1")
        storage.below("b").put_if_absent("inner", b"12")
        found = storage.list()
        assert [(info.name, info.num_bytes, info.is_directory, info.is_link) for info in found] == [
            ("a", 1, False, False),
            ("b", 0, True, False),
            ("c", 3, False, False),
        ]

    def test_a_directory_that_is_not_there_is_empty(self, storage: Storage) -> None:
        assert storage.list() == []
        assert storage.below("x", "y").list() == []

    def test_a_missing_file_has_no_size_and_cannot_be_read(self, storage: Storage) -> None:
        storage.make_directory()
        assert storage.size("a") is None
        with pytest.raises(FileNotFoundError, match="a"):
            storage.read("a")
        with pytest.raises(FileNotFoundError, match="a"):
            storage.open_parquet("a")

    def test_a_directory_has_no_size(self, storage: Storage) -> None:
        storage.below("b").make_directory()
        storage.below("b").put_if_absent("inner", b"1")
        assert storage.size("b") is None

    def test_deleting_what_is_gone_does_nothing(self, storage: Storage) -> None:
        storage.delete_directory_if_empty()
        storage.make_directory()
        storage.delete_file("a")
        storage.put_if_absent("a", b"1")
        storage.delete_file("a")
        storage.delete_file("a")
        assert storage.list() == []

    def test_only_an_empty_directory_is_removed(self, storage: Storage) -> None:
        below = storage.below("b")
        below.make_directory()
        below.put_if_absent("a", b"1")
        below.delete_directory_if_empty()
        assert below.read("a") == b"1"
        below.delete_file("a")
        below.delete_directory_if_empty()
        assert storage.list() == []

    def test_making_a_directory_twice_keeps_what_is_in_it(self, storage: Storage) -> None:
        storage.make_directory()
        storage.put_if_absent("a", b"1")
        storage.make_directory()
        assert storage.read("a") == b"1"

    def test_a_change_by_somebody_else_is_seen(self, storage: Storage) -> None:
        storage.make_directory()
        other = self.open(storage.url)
        assert storage.list() == []
        assert storage.size("a") is None
        other.put_if_absent("a", b"12")
        assert [info.name for info in storage.list()] == ["a"]
        assert storage.size("a") == 2
        other.delete_file("a")
        assert storage.list() == []
        assert storage.size("a") is None

    def test_a_file_opened_for_parquet_is_read_at_any_place(self, storage: Storage) -> None:
        storage.make_directory()
        storage.put_if_absent("a", bytes(range(100)))
        with storage.open_parquet("a") as file:
            assert file.size() == 100
            file.seek(90)
            assert file.read() == bytes(range(90, 100))
            file.seek(10)
            assert file.read(2) == bytes([10, 11])

    def test_pickle_keeps_the_place(self, storage: Storage) -> None:
        storage.make_directory()
        storage.put_if_absent("a", b"1")
        again = pickle.loads(pickle.dumps(storage))
        assert again.url == storage.url
        assert again.read("a") == b"1"
        below = pickle.loads(pickle.dumps(storage.below("b", "c")))
        assert below.url == storage.below("b", "c").url
        assert below.path("d") == storage.below("b", "c").path("d")

    def test_what_is_not_allowed_is_said_at_once(self, forbidden: Storage | None) -> None:
        if forbidden is None:
            # The member says that there is no such place.
            return
        for ask in (
            lambda: forbidden.put_if_absent("b", b"1"),
            lambda: forbidden.put_if_absent("a", b"2"),
            lambda: forbidden.read("a"),
            lambda: forbidden.look("a"),
            lambda: forbidden.size("a"),
            lambda: forbidden.open_parquet("a"),
            lambda: forbidden.touch("a"),
            lambda: forbidden.delete_file("a"),
            *([forbidden.list] if self.refuses_lists else []),
        ):
            # It would be a TimeoutError if it had been asked until the deadline.
            with pytest.raises(PermissionError, match=r"/forbidden|^\[Errno 13\] Permission denied$"):
                ask()

    def test_a_place_is_named_without_a_slash_at_its_end(self, storage: Storage) -> None:
        assert not storage.url.endswith("/")
        assert storage.below("b").url == f"{storage.url}/b"
        assert storage.url in repr(storage)


class RemoteStorageContract(StorageContract):
    """What every store must do that is no disk."""

    def test_of_a_part_beyond_the_end_there_is_what_there_is(self, storage: Storage) -> None:
        storage.make_directory()
        storage.put_if_absent("a", b"0123456789")
        parts = {(3, 5): b"34", (8, 20): b"89", (10, 12): b"", (20, 30): b""}
        assert {part: bytes(storage.read_part("a", *part)) for part in parts} == parts
        storage.put_if_absent("empty", b"")
        assert bytes(storage.read_part("empty", 0, 5)) == b""


class TestLocal(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return open_storage(tmp_path / "cache")

    @pytest.fixture
    def forbidden(self, tmp_path: Path) -> Iterator[Storage]:
        storage = open_storage(tmp_path / "forbidden")
        storage.make_directory()
        storage.put_if_absent("a", b"1")
        os.chmod(storage.path(), 0)
        user = os.geteuid()
        try:
            if user == 0:
                # To whom everything is allowed, unless it is somebody else meanwhile.
                os.seteuid(NOBODY)
            yield storage
        finally:
            os.seteuid(user)
            os.chmod(storage.path(), 0o700)
        assert [info.name for info in storage.list()] == ["a"]
        assert storage.read("a") == b"1"

    def test_a_local_directory_is_local(self, storage: Storage, tmp_path: Path) -> None:
        assert storage.is_local
        assert storage.url == f"file://{tmp_path}/cache"
        assert storage.path("a", "b") == f"{tmp_path}/cache/a/b"

    def test_no_temporary_file_is_left(self, storage: Storage, tmp_path: Path) -> None:
        storage.make_directory()
        storage.put_if_absent("a", b"1")
        storage.put_if_absent("a", b"2")
        assert [path.name for path in (tmp_path / "cache").iterdir()] == ["a"]

    def test_a_put_into_a_missing_directory_fails_and_leaves_nothing(self, storage: Storage, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="cache/a"):
            storage.put_if_absent("a", b"1")
        assert list(tmp_path.iterdir()) == []

    def test_a_disk_without_hard_links_is_explained(
        self, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def link(source: str, target: str) -> None:
            raise PermissionError(1, "Operation not permitted", source, None, target)

        storage.make_directory()
        monkeypatch.setattr("os.link", link)
        with pytest.raises(CacheError, match=r"cannot create hard links \(Operation not permitted\)") as raised:
            storage.put_if_absent("a", b"1")
        assert raised.value.path == storage.url
        assert list((tmp_path / "cache").iterdir()) == []

    @pytest.mark.parametrize("names", [(), ("below",), ("far", "below")])
    def test_a_file_is_no_directory(self, tmp_path: Path, names: tuple[str, ...]) -> None:
        (tmp_path / "cache").write_bytes(b"a file")
        storage = open_storage(tmp_path / "cache").below(*names)
        with pytest.raises(CacheError, match="is a file, where a directory was expected"):
            storage.make_directory()
        assert (tmp_path / "cache").read_bytes() == b"a file"

    def test_nothing_stands_below_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "cache").write_bytes(b"a file")
        storage = open_storage(tmp_path / "cache")
        assert storage.list() == []
        assert storage.below("x").list() == []
        assert storage.size("x") is None

    @pytest.mark.parametrize("form", ["{}", "{}/", "file://{}", "file:{}", "file://{}/", "{}/x/.."])
    def test_every_way_to_write_a_local_path_is_one_place(self, tmp_path: Path, form: str) -> None:
        assert open_storage(form.format(tmp_path)).url == f"file://{tmp_path}"
        assert open_storage(form.format(tmp_path)).path("a") == f"{tmp_path}/a"

    def test_a_relative_path_is_made_absolute(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert open_storage("cache").url == f"file://{tmp_path}/cache"

    def test_the_home_directory_can_be_meant(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        assert open_storage("~/cache").url == f"file://{tmp_path}/cache"

    @pytest.mark.parametrize("name", ["a b", "a#b", "a?b", "a%20b", "é", "a=b&c", "a@b", "a:b", "[x]*", "a\tb\nc"])
    def test_any_folder_name_is_one_place_before_and_after_pickling(self, tmp_path: Path, name: str) -> None:
        storage = open_storage(tmp_path / name)
        storage.make_directory()
        storage.put_if_absent("a", b"1")
        assert (tmp_path / name / "a").read_bytes() == b"1"
        assert pickle.loads(pickle.dumps(storage)).path("a") == storage.path("a")
        assert pickle.loads(pickle.dumps(storage)).read("a") == b"1"
        assert [info.name for info in storage.list()] == ["a"]


class TestMemory(RemoteStorageContract):
    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        url = f"memory://{uuid.uuid4().hex}"
        yield open_storage(url)
        filesystem = fsspec.filesystem("memory")
        if filesystem.exists(url):
            filesystem.rm(url, recursive=True)

    @pytest.fixture
    def forbidden(self) -> None:
        """A process may do everything in its own memory."""

    def test_memory_is_not_local(self, storage: Storage) -> None:
        assert not storage.is_local

    def test_pickle_drops_the_options(self) -> None:
        storage = open_storage("memory://place", {"account_key": "very-secret"})
        assert storage._filesystem.options == {"account_key": "very-secret"}
        data = pickle.dumps(storage)
        assert b"very-secret" not in data
        assert b"account_key" not in data
        assert pickle.loads(data)._filesystem.options == {}


@pytest.mark.parametrize("url", ["", "  ", b"/data"])
def test_a_place_that_is_no_text_is_refused(url: object) -> None:
    with pytest.raises(ValueError, match="A storage URL must be a non-empty str or path, got"):
        open_storage(url)  # type: ignore[arg-type]


@pytest.mark.parametrize("url", [None, 7])
def test_a_place_that_is_no_path_is_refused(url: object) -> None:
    with pytest.raises(TypeError, match=r"str, bytes or os\.PathLike object"):
        open_storage(url)  # type: ignore[arg-type]


def test_secrets_of_a_url_are_not_shown() -> None:
    storage = open_storage("memory://user:secret@host/place?sig=hidden")
    assert "secret" not in storage.url
    assert "hidden" not in storage.url
    assert "secret" not in repr(storage)


# Databricks: what Spark and Python call the same place.


@pytest.mark.parametrize(
    ("url", "path", "spark_url"),
    [
        ("dbfs:/cache", "/dbfs/cache", "dbfs:/cache"),
        ("dbfs:///a/b/", "/dbfs/a/b/", "dbfs:/a/b/"),
        ("dbfs:/Volumes/main/ml/v/cache", "/Volumes/main/ml/v/cache", "dbfs:/Volumes/main/ml/v/cache"),
        ("dbfs:/VolumesOfMine/cache", "/dbfs/VolumesOfMine/cache", "dbfs:/VolumesOfMine/cache"),
        ("dbfs:/a b#c", "/dbfs/a b#c", "dbfs:/a b#c"),
    ],
)
def test_a_place_on_databricks_has_two_names(url: str, path: str, spark_url: str) -> None:
    assert python_path_of(url) == path
    assert spark_url_of(path) == spark_url


@pytest.mark.parametrize("path", ["/data/cache", "/dbfsx/cache", "/home/Volumes/x", "/dbfs", "/Volumes"])
def test_other_places_have_one(path: str) -> None:
    assert spark_url_of(path) == f"file://{path}"


def test_a_place_of_databricks_is_explained_elsewhere() -> None:
    with pytest.raises(ValueError, match=r"dbfs:/cache is reached through /dbfs, which this machine does not have"):
        open_storage("dbfs:/cache")


@pytest.mark.parametrize("url", ["/Volumes/main/ml/cache", "file:/dbfs/cache"])
def test_a_path_of_databricks_makes_no_folder_elsewhere(url: str) -> None:
    with pytest.raises(ValueError, match=r"is reached through /(Volumes|dbfs), which this machine does not have"):
        open_storage(url)


def test_a_file_is_created_once_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("converter.storage.databricks._DATABRICKS_MOUNTS", (f"{tmp_path}/",))
    monkeypatch.delattr("os.link")
    storage = open_storage(tmp_path / "cache")
    storage.make_directory()
    assert storage.put_if_absent("a", b"first")
    assert not storage.put_if_absent("a", b"second")
    assert storage.read("a") == b"first"
    assert [info.name for info in storage.list()] == ["a"]


def test_hurries_that_overlap_end_each_by_itself() -> None:
    storage = open_storage("memory://hurries", timeout_seconds=120)
    store = storage._filesystem
    first, second = storage.hurried(5), storage.hurried(7)
    first.__enter__()
    second.__enter__()
    assert store.timeout_seconds == 5
    first.__exit__(None, None, None)
    assert store.timeout_seconds == 7
    second.__exit__(None, None, None)
    assert store.timeout_seconds == 120
