"""What a directory on every kind of store must do. A new kind passes these tests, and is complete."""

from __future__ import annotations

import pickle
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from converter.storage.directory import Storage
from converter.storage.opening import open_storage


class StorageContract:
    """What every store must do.

    Subclasses define two fixtures: `storage`, a directory that does not exist yet, and `forbidden`, a directory with a
    file "a" where every operation is refused (None if the store has no permissions).
    """

    has_folders = True
    """Whether an empty folder exists on this store."""

    refuses_lists = True
    """Whether listing the folder `forbidden` is refused too."""

    def open(self, url: str) -> Storage:
        """Open the same directory again, as another process would."""
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

    def test_a_rewritten_file_has_another_stamp(self, storage: Storage) -> None:
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

    def test_a_file_below_a_listed_folder_is_looked_up_again(self, storage: Storage) -> None:
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
        assert [(info.name, info.num_bytes, info.is_directory, info.is_link) for info in storage.list()] == [
            ("a", 1, False, False),
            ("b", 0, True, False),
            ("c", 3, False, False),
        ]

    def test_a_folder_is_known_by_its_name_and_a_file_is_none(self, storage: Storage) -> None:
        storage.below("b").make_directory()
        storage.below("b").put_if_absent("inner", b"12")
        storage.put_if_absent("a", b"1")
        assert [storage.has_folder(name) for name in ("a", "b", "c", "inner")] == [False, True, False, False]
        assert not storage.below("x").has_folder("b")

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

    @pytest.mark.parametrize("name", ["run[1]", "run*"])
    def test_a_tree_whose_name_looks_like_a_pattern_is_removed_alone(self, storage: Storage, name: str) -> None:
        names = {"run[1]", "run*", "run1", "run-of-somebody"}
        for each in names:
            for folder in (storage.below(each), storage.below(each, "x=[1]")):
                folder.make_directory()
                folder.put_if_absent("part", b"1")
        storage.below(name).delete_tree()
        assert storage.below(name).list() == storage.below(name, "x=[1]").list() == []
        left = {each for each in names if storage.below(each, "x=[1]").size("part") == 1}
        assert left == names - {name}
        storage.below(name).delete_tree()

    def test_making_a_directory_twice_keeps_what_is_in_it(self, storage: Storage) -> None:
        storage.make_directory()
        storage.put_if_absent("a", b"1")
        storage.make_directory()
        assert storage.read("a") == b"1"

    def test_a_change_by_another_client_is_seen(self, storage: Storage) -> None:
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

    def test_a_pickled_directory_is_the_same_place(self, storage: Storage) -> None:
        storage.make_directory()
        storage.put_if_absent("a", b"1")
        again = pickle.loads(pickle.dumps(storage))
        assert again.url == storage.url
        assert again.read("a") == b"1"
        below = pickle.loads(pickle.dumps(storage.below("b", "c")))
        assert below.url == storage.below("b", "c").url
        assert below.path("d") == storage.below("b", "c").path("d")

    def test_a_forbidden_operation_fails_at_once(self, forbidden: Storage | None) -> None:
        if forbidden is None:
            # This store has no permissions.
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
            # A TimeoutError would mean that the store had retried until the deadline.
            with pytest.raises(PermissionError, match=r"/forbidden|^\[Errno 13\] Permission denied$"):
                ask()

    def test_a_url_has_no_slash_at_its_end(self, storage: Storage) -> None:
        assert not storage.url.endswith("/")
        assert storage.below("b").url == f"{storage.url}/b"
        assert storage.url in repr(storage)


class RemoteStorageContract(StorageContract):
    """What every remote store must do."""

    def test_a_part_beyond_the_end_holds_only_the_bytes_before_the_end(self, storage: Storage) -> None:
        storage.make_directory()
        storage.put_if_absent("a", b"0123456789")
        parts = {(3, 5): b"34", (8, 20): b"89", (10, 12): b"", (20, 30): b""}
        assert {part: bytes(storage.read_part("a", *part)) for part in parts} == parts
        storage.put_if_absent("empty", b"")
        assert bytes(storage.read_part("empty", 0, 5)) == b""
