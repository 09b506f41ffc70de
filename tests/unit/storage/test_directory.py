"""What a cache asks of a filesystem: one contract, kept by every kind of store."""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from converter.errors import CacheError
from converter.storage.directory import Storage
from converter.storage.handles import opened
from converter.storage.opening import open_storage
from tests.contracts.storage import RemoteStorageContract, StorageContract

NOBODY = 65534


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
        def link(source: str, target: str, **handles: int) -> None:
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


def test_a_ctrl_c_on_the_way_to_a_folder_closes_no_number_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the second time it may be the number of another thread's file."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    close, closed = os.close, []

    def close_and_fail(handle: int) -> None:
        closed.append(handle)
        close(handle)
        if len(closed) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "close", close_and_fail)
    with pytest.raises(KeyboardInterrupt), opened(f"{tmp_path}/a/b", str(tmp_path)):
        pass
    monkeypatch.undo()
    assert len(set(closed)) == len(closed) == 2
