"""What was fetched is kept once for all processes of a host, whole, within its bytes, while it may be wanted."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from converter import local_cache, sweep
from converter.errors import CacheError, CacheNotOwnedError
from converter.local_cache import (
    DIRECTORY,
    LocalCache,
    find_local_root,
    open_local_cache,
    open_local_root,
    remove_unheld,
)
from converter.stores import GivenUpError

ONE, TWO = "fingerprint one", "fingerprint two"
PIECE = "rows-0-0123456789abcdef"


class Fetch:
    """Gives parts, and counts how often it was asked."""

    def __init__(self, *parts: bytes, seconds: float = 0.0) -> None:
        self.parts, self.seconds, self.count = parts, seconds, 0

    def __call__(self) -> Sequence[bytes]:
        self.count += 1
        time.sleep(self.seconds)
        return self.parts


def get(cache: LocalCache, fetch: Fetch, name: str = PIECE) -> list[bytes]:
    return [part.to_pybytes() for part in cache.get(name, [len(part) for part in fetch.parts], fetch)]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file() and not path.name.startswith("."))


def test_a_piece_is_fetched_once(tmp_path: Path) -> None:
    fetch = Fetch(b"one", b"", b"three")
    cache = LocalCache(str(tmp_path), ONE, None)
    for _ in range(3):
        assert get(cache, fetch) == [b"one", b"", b"three"]
    assert get(LocalCache(str(tmp_path), ONE, None), fetch) == [b"one", b"", b"three"]
    assert fetch.count == 1
    assert names(tmp_path) == [PIECE]


def test_another_fingerprint_shares_nothing(tmp_path: Path) -> None:
    assert get(LocalCache(str(tmp_path), ONE, None), Fetch(b"one")) == [b"one"]
    assert get(LocalCache(str(tmp_path), TWO, None), Fetch(b"two")) == [b"two"]


def test_threads_that_want_a_piece_together_fetch_it_once(tmp_path: Path) -> None:
    fetch = Fetch(b"one", seconds=0.2)
    caches = [LocalCache(str(tmp_path), ONE, None) for _ in range(2)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: get(caches[number % 2], fetch), range(8)))
    assert found == [[b"one"]] * 8
    assert fetch.count == 1


def test_who_gives_up_waits_for_nobody(tmp_path: Path) -> None:
    cache, given_up = LocalCache(str(tmp_path), ONE, None), threading.Event()
    begun, go = threading.Event(), threading.Event()

    def fetch() -> list[bytes]:
        begun.set()
        go.wait(10)
        return [b"one"]

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, PIECE, [3], fetch)
        begun.wait(10)
        second = pool.submit(cache.get, PIECE, [3], fetch, given_up)
        given_up.set()
        with pytest.raises(GivenUpError):
            second.result(10)
        go.set()
        assert first.result(10)[0].to_pybytes() == b"one"


def test_a_piece_of_another_size_is_not_taken(tmp_path: Path) -> None:
    cache = LocalCache(str(tmp_path), ONE, None)
    get(cache, Fetch(b"one"))
    (path,) = tmp_path.rglob(PIECE)
    path.write_bytes(b"on")
    assert get(cache, Fetch(b"one")) == [b"one"]


def test_an_answer_that_is_too_short_is_not_kept(tmp_path: Path) -> None:
    cache = LocalCache(str(tmp_path), ONE, None)
    assert [part.to_pybytes() for part in cache.get(PIECE, [5], lambda: [b"one"])] == [b"one"]
    assert names(tmp_path) == []


def test_what_does_not_fit_is_fetched_each_time_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = LocalCache(str(tmp_path), ONE, 150)
    pieces = {f"rows-{number}-{number:016x}": Fetch(bytes([number]) * 100) for number in range(3)}
    with caplog.at_level(logging.WARNING, logger="converter"):
        for _ in range(2):
            for name, fetch in pieces.items():
                assert get(cache, fetch, name) == [fetch.parts[0]]
    assert [fetch.count for fetch in pieces.values()] == [1, 2, 2]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / DIRECTORY} is full (150 bytes are used): what does not fit is fetched each time."
    ]


def test_rows_that_nobody_reads_make_room(tmp_path: Path) -> None:
    old = LocalCache(str(tmp_path), ONE, 250)
    get(old, Fetch(b"1" * 200))
    new = LocalCache(str(tmp_path), TWO, 250)
    fetch = Fetch(b"2" * 200)
    get(new, fetch)
    get(new, fetch)
    assert fetch.count == 2, "rows that are held made room"
    del old
    newer = LocalCache(str(tmp_path), TWO, 250)
    get(newer, fetch)
    get(newer, fetch)
    assert fetch.count == 3
    assert len(list((tmp_path / DIRECTORY).iterdir())) == 2


def test_a_full_disk_is_said_once_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def rename(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), source)

    cache, fetch = LocalCache(str(tmp_path), ONE, None), Fetch(b"one")
    monkeypatch.setattr(os, "rename", rename)
    with caplog.at_level(logging.WARNING, logger="converter"):
        for _ in range(3):
            assert get(cache, fetch) == [b"one"]
    assert fetch.count == 3
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".part")]


KILLED = """
import os, signal, sys
from converter.local_cache import LocalCache
cache = LocalCache(sys.argv[1], sys.argv[2], None)
def fetch():
    print("fetching", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
cache.get(sys.argv[3], [3], fetch)
"""


def test_a_folder_that_somebody_removes_costs_no_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = LocalCache(str(tmp_path), ONE, None)
    fetch = Fetch(b"one")
    get(cache, fetch)
    shutil.rmtree(tmp_path / DIRECTORY)
    assert [get(cache, fetch) for _ in range(3)] == [[b"one"]] * 3
    assert fetch.count == 4
    assert len(caplog.records) == 1


@pytest.mark.parametrize("call", ["makedirs", "open"])
def test_a_disk_that_is_full_already_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    open_local_root(str(tmp_path))

    def refuse(path: object, *arguments: object, **options: object) -> int:
        if str(path).startswith(str(tmp_path)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(path, *arguments, **options)

    original = getattr(os, call)
    monkeypatch.setattr(local_cache.os, call, refuse)
    assert open_local_cache(str(tmp_path), ONE, None) is None
    assert "is full (No space left on device): everything is fetched each time" in caplog.text
    monkeypatch.undo()
    assert open_local_cache(str(tmp_path), ONE, None) is not None


def test_a_process_that_is_killed_leaves_no_lock_and_no_half_piece(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), ONE, PIECE],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "fetching\n", done.stderr
    assert done.returncode == -9
    assert names(tmp_path) == []
    assert get(LocalCache(str(tmp_path), ONE, None), Fetch(b"one")) == [b"one"]


def test_sweep_removes_what_nobody_holds_and_nothing_of_others(tmp_path: Path) -> None:
    held, fetch = LocalCache(str(tmp_path), ONE, None), Fetch(b"one")
    get(held, fetch)
    get(LocalCache(str(tmp_path), TWO, None), Fetch(b"two"))
    (path,) = [path for path in tmp_path.rglob(PIECE) if path.read_bytes() == b"two"]
    (path.parent / "thesis.tex").write_bytes(b"precious")
    (tmp_path / "mine").mkdir()
    assert sweep(tmp_path, dry_run=True).num_bytes == 3
    assert path.exists()
    assert sweep(tmp_path).num_bytes == 3
    assert not path.exists()
    assert (path.parent / "thesis.tex").read_bytes() == b"precious"
    assert (tmp_path / "mine").is_dir()
    assert get(held, fetch) == [b"one"]
    assert fetch.count == 1
    del held
    sweep(tmp_path)
    assert names(tmp_path) == ["thesis.tex"]


def test_whoever_makes_room_and_whoever_begins_to_read_do_not_meet(tmp_path: Path) -> None:
    root, stop = open_local_root(str(tmp_path)), threading.Event()

    def make_room() -> None:
        while not stop.is_set():
            remove_unheld(root)

    thread = threading.Thread(target=make_room)
    thread.start()
    try:
        for number in range(200):
            cache = LocalCache(str(tmp_path), ONE, None)
            fetch = Fetch(b"%d" % number)
            assert get(cache, fetch) == get(cache, fetch)
            assert fetch.count <= 1
            del cache
    finally:
        stop.set()
        thread.join()


def test_a_directory_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / DIRECTORY).mkdir()
    (tmp_path / DIRECTORY / "thesis.tex").write_bytes(b"precious")
    with pytest.raises(CacheNotOwnedError, match="holds files but not the marker"):
        LocalCache(str(tmp_path), ONE, None)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CacheError, match=r"local_cache_dir='.*file' cannot be written: Not a directory"):
        LocalCache(str(tmp_path / "file"), ONE, None)


@pytest.mark.parametrize("directory", ["", "hdfs://x/y", "s3://bucket"])
def test_a_local_cache_is_a_folder_of_this_machine(directory: str) -> None:
    with pytest.raises(ValueError, match="local_cache_dir must be a folder of this machine"):
        open_local_root(directory)


def test_a_folder_is_named_by_a_path_or_an_encoded_url(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    assert open_local_root((tmp_path / "a b").as_uri()) == str(tmp_path / "a b" / DIRECTORY)
    assert find_local_root(str(tmp_path / "a b")) == find_local_root((tmp_path / "a b").as_uri()) is not None


def test_another_users_rows_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        with_pieces = LocalCache(str(tmp_path), name, None)
        with_pieces.get("rows-0-0000000000000000", [4], lambda: [b"rows"])
        del with_pieces
    root = open_local_root(str(tmp_path))
    first, _ = (entry.path for entry in os.scandir(root) if entry.is_dir())
    whole = os.open

    def refuse(path: str, *arguments: int, **options: int) -> int:
        # Root may open everything.
        if path == os.path.join(first, ".held"):
            raise PermissionError(13, "Permission denied", path)
        return whole(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    num_files, _ = remove_unheld(root)
    assert num_files > 0
    assert [entry.path for entry in os.scandir(root) if entry.is_dir()] == [first]
    name = next(name for name in ("one", "two") if hashlib.sha256(name.encode()).hexdigest()[:32] in first)
    with pytest.raises(CacheError, match=r"is another user's: .*Permission denied.* Choose a folder of your own"):
        open_local_cache(str(tmp_path), name, None)
