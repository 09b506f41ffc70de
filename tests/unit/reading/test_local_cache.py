"""What was fetched is kept once for all processes of a host, whole, within its bytes, while it may be wanted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from converter import sweep
from converter.errors import CacheError, CacheNotOwnedError
from converter.reading import file_locks, local_cache
from converter.reading.local_cache import (
    DIRECTORY,
    LocalCache,
    find_local_root,
    open_local_cache,
    open_local_root,
    remove_unheld,
)
from converter.storage.requests import GivenUpError

ONE, TWO = "fingerprint one", "fingerprint two"
PIECE = "rows-0-0123456789abcdef"
MARKERS = 80
"""Bytes of the files that stand beside the pieces, which count too."""


class Fetch:
    """Gives parts, and counts how often it was asked."""

    def __init__(self, *parts: bytes, seconds: float = 0.0) -> None:
        self.parts, self.seconds, self.count = parts, seconds, 0

    def __call__(self) -> Sequence[bytes]:
        self.count += 1
        time.sleep(self.seconds)
        return self.parts


def get(cache: LocalCache, fetch: Fetch, name: str = PIECE, *, anew: bool = False) -> list[bytes]:
    parts, _ = cache.get(name, [len(part) for part in fetch.parts], fetch, anew=anew)
    return [part.to_pybytes() for part in parts]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file() and not path.name.startswith("."))


def test_a_piece_is_fetched_once(tmp_path: Path) -> None:
    fetch = Fetch(b"one", b"", b"three")
    cache = LocalCache(str(tmp_path), ONE, None)
    for _ in range(3):
        assert get(cache, fetch) == [b"one", b"", b"three"]
    assert get(LocalCache(str(tmp_path), ONE, None), fetch) == [b"one", b"", b"three"]
    assert cache.get(PIECE, [3, 0, 5], fetch)[1]
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
        (found,), is_copy = first.result(10)
        assert found.to_pybytes() == b"one"
        assert not is_copy


def test_a_lock_that_is_never_let_go_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cache, "_NUM_LOCKS", 1)
    monkeypatch.setattr(file_locks, "WAIT_SECONDS", 0.2)
    cache, given_up = LocalCache(str(tmp_path), ONE, None), threading.Event()
    get(cache, Fetch(b"one"))
    (lock,) = tmp_path.rglob(".lock-0")
    # So that a wait without end fails.
    timer = threading.Timer(30, given_up.set)
    timer.start()
    try:
        with open(lock) as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            for number in range(1, 4):
                ((found,), is_copy) = cache.get(f"rows-{number}-0123456789abcdef", [3], lambda: [b"two"], given_up)
                assert (found.to_pybytes(), is_copy) == (b"two", False)
                monkeypatch.setattr(file_locks, "WAIT_SECONDS", math.inf)
    finally:
        timer.cancel()
    assert len(names(tmp_path)) == 4


@contextlib.contextmanager
def locked_by_another(path: Path) -> Iterator[None]:
    """As by a process that is stopped while it decides, or a sweep that is."""
    with open(path) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def test_who_holds_the_counter_for_ever_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_locks, "WAIT_SECONDS", 0.2)
    cache = LocalCache(str(tmp_path), ONE, None)
    get(cache, Fetch(b"one"))
    with locked_by_another(tmp_path / DIRECTORY / ".used"):
        for number in range(1, 4):
            ((found,), is_copy) = cache.get(f"rows-{number}-0123456789abcdef", [3], lambda: [b"two"])
            assert (found.to_pybytes(), is_copy) == (b"two", False)
            # It is waited for once.
            monkeypatch.setattr(file_locks, "WAIT_SECONDS", 1000.0)
        assert get(cache, Fetch(b"one")) == [b"one"]
    assert names(tmp_path) == [PIECE]
    root = tmp_path / DIRECTORY
    (said,) = caplog.messages
    assert said == (
        f"{root} cannot be used (another process holds the lock of {root / '.used'}): what is not there is fetched "
        "each time."
    )


def test_who_is_cancelled_does_not_wait_for_the_counter(tmp_path: Path) -> None:
    cache, given_up = LocalCache(str(tmp_path), ONE, None), threading.Event()
    get(cache, Fetch(b"one"))
    given_up.set()
    with locked_by_another(tmp_path / DIRECTORY / ".used"):
        ((found,), is_copy) = cache.get("rows-1-0123456789abcdef", [3], lambda: [b"two"], given_up)
    assert (found.to_pybytes(), is_copy) == (b"two", False)
    assert names(tmp_path) == [PIECE]


def test_a_sweep_that_is_stopped_keeps_no_reader_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_locks, "WAIT_SECONDS", 0.2)
    LocalCache(str(tmp_path), ONE, None).release()
    (held,) = tmp_path.rglob(".held")
    with locked_by_another(held):
        assert open_local_cache(str(tmp_path), ONE, None) is None
    (said,) = caplog.messages
    assert said == (
        f"{tmp_path} cannot be used (another process holds the lock of {held}): everything is fetched each time."
    )
    assert open_local_cache(str(tmp_path), ONE, None) is not None


def test_a_sweep_of_what_is_old_keeps_rows_that_were_read_lately(tmp_path: Path) -> None:
    for fingerprint in (ONE, TWO):
        get(LocalCache(str(tmp_path), fingerprint, None), Fetch(fingerprint.encode()))
    for path in [*tmp_path.rglob("*")]:
        os.utime(path, (0, 0))
    # Nothing is fetched: only a use is noted, at its begin and at its end.
    held = LocalCache(str(tmp_path), ONE, None)
    (file,) = [path for path in tmp_path.rglob(".held") if path.stat().st_mtime]
    os.utime(file, (0, 0))
    held.release()
    assert sweep(tmp_path, older_than=3600, dry_run=True).num_bytes == len(TWO)
    assert sweep(tmp_path, older_than=3600).num_bytes == len(TWO)
    assert [path.read_bytes() for path in tmp_path.rglob(PIECE)] == [ONE.encode()]
    assert sweep(tmp_path).num_bytes == len(ONE)


def test_a_folder_without_its_lock_file_is_swept(tmp_path: Path) -> None:
    # A process was killed, or had no descriptor left, after it had made the folder.
    LocalCache(str(tmp_path), ONE, None).release()
    (held,) = tmp_path.rglob(".held")
    held.unlink()
    (held.parent / PIECE).write_bytes(b"one")
    (tmp_path / DIRECTORY / ("0" * 32)).mkdir()
    sweep(tmp_path, dry_run=True)
    assert names(tmp_path) == [PIECE]
    sweep(tmp_path)
    assert os.listdir(tmp_path / DIRECTORY) == [".owner"]


def test_a_piece_of_another_size_is_not_taken(tmp_path: Path) -> None:
    cache = LocalCache(str(tmp_path), ONE, None)
    get(cache, Fetch(b"one"))
    (path,) = tmp_path.rglob(PIECE)
    path.write_bytes(b"on")
    assert get(cache, Fetch(b"one")) == [b"one"]


@pytest.mark.parametrize("is_damaged", [True, False])
@pytest.mark.parametrize("may_go", [True, False])
def test_what_is_fetched_anew_replaces_what_was_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_damaged: bool, may_go: bool
) -> None:
    cache, fetch = LocalCache(str(tmp_path), ONE, None), Fetch(b"one", b"three")
    assert get(cache, fetch) == [b"one", b"three"]
    (path,) = tmp_path.rglob(PIECE)
    if is_damaged:
        path.write_bytes(b"damaged!")
    if not may_go:

        def refuse(*_args: object) -> None:
            raise PermissionError(errno.EPERM, "another user's, in a folder where that counts")

        monkeypatch.setattr(os, "unlink", refuse)
        monkeypatch.setattr(os, "rename", refuse)
    assert get(cache, fetch, anew=True) == [b"one", b"three"]
    assert fetch.count == 2
    assert caplog.messages == ([f"{path} was damaged, and is fetched again."] if is_damaged else [])
    monkeypatch.undo()
    assert get(cache, fetch) == ([b"dam", b"aged!"] if is_damaged and not may_go else [b"one", b"three"])
    assert fetch.count == 2


def test_an_answer_that_is_too_short_is_not_kept(tmp_path: Path) -> None:
    cache = LocalCache(str(tmp_path), ONE, None)
    assert [part.to_pybytes() for part in cache.get(PIECE, [5], lambda: [b"one"])[0]] == [b"one"]
    assert names(tmp_path) == []


def test_what_does_not_fit_is_fetched_each_time_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = LocalCache(str(tmp_path), ONE, MARKERS + 150)
    pieces = {f"rows-{number}-{number:016x}": Fetch(bytes([number]) * 100) for number in range(3)}
    with caplog.at_level(logging.WARNING, logger="converter"):
        for _ in range(2):
            for name, fetch in pieces.items():
                assert get(cache, fetch, name) == [fetch.parts[0]]
    assert [fetch.count for fetch in pieces.values()] == [1, 2, 2]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / DIRECTORY} is full ({MARKERS + 150} bytes are used): what does not fit is fetched each time."
    ]


def test_rows_that_nobody_reads_make_room(tmp_path: Path) -> None:
    old = LocalCache(str(tmp_path), ONE, MARKERS + 250)
    get(old, Fetch(b"1" * 200))
    new = LocalCache(str(tmp_path), TWO, MARKERS + 250)
    fetch = Fetch(b"2" * 200)
    get(new, fetch)
    get(new, fetch)
    assert fetch.count == 2, "rows that are held made room"
    del old
    newer = LocalCache(str(tmp_path), TWO, MARKERS + 250)
    get(newer, fetch)
    get(newer, fetch)
    assert fetch.count == 3
    # The owner's mark, the counter, and the rows of one fingerprint.
    assert len(list((tmp_path / DIRECTORY).iterdir())) == 3


KEEPER = """
import logging, sys
from converter.reading.local_cache import LocalCache
logging.disable(logging.WARNING)
cache = LocalCache(sys.argv[1], sys.argv[2], int(sys.argv[3]))
print("ready", flush=True)
sys.stdin.readline()
for number in range(60):
    content = bytes([number]) * 100_000
    # Names that no other process has.
    (found,), _ = cache.get(f"rows-{number}-{int(sys.argv[4]):016x}", [len(content)], lambda: [content])
    assert found.to_pybytes() == content
"""


def used_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "fingerprints",
    [
        pytest.param([ONE, ONE, ONE], id="of-one-job", marks=pytest.mark.long("starts three more interpreters")),
        pytest.param([ONE, TWO], id="of-two-jobs"),
    ],
)
def test_processes_count_their_bytes_together(tmp_path: Path, fingerprints: list[str]) -> None:
    limit = 2_000_000
    keepers = [
        subprocess.Popen(
            [sys.executable, "-c", KEEPER, str(tmp_path), fingerprint, str(limit), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number, fingerprint in enumerate(fingerprints)
    ]
    try:
        for keeper in keepers:
            assert keeper.stdout is not None
            assert keeper.stdout.readline() == "ready\n"
        for keeper in keepers:
            assert keeper.stdin is not None
            keeper.stdin.write("go\n")
            keeper.stdin.flush()
        for keeper in keepers:
            keeper.communicate(timeout=60)
            assert keeper.returncode == 0
    finally:
        for keeper in keepers:
            keeper.kill()
            keeper.communicate()
    assert limit - 100_000 < used_bytes(tmp_path) <= limit
    assert int((tmp_path / DIRECTORY / ".used").read_bytes()) == used_bytes(tmp_path)


class SlowParts(list[bytes]):
    """Waits in the middle of being written."""

    def __init__(self, folder: Path, content: bytes) -> None:
        super().__init__([content])
        self.folder, self.begun, self.go = folder, threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        if list(self.folder.rglob("*.part")):
            self.begun.set()
            self.go.wait(10)
        return super().__iter__()


def test_what_is_being_written_is_counted_whole(tmp_path: Path) -> None:
    limit = MARKERS + 250
    parts, fetch = SlowParts(tmp_path, b"1" * 200), Fetch(b"2" * 100)
    first, second = LocalCache(str(tmp_path), ONE, limit), LocalCache(str(tmp_path), TWO, limit)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(first.get, PIECE, [200], lambda: parts)
        try:
            assert parts.begun.wait(10)
            assert get(second, fetch) == [b"2" * 100]
        finally:
            parts.go.set()
        done.result(10)
    assert [path.stat().st_size for path in tmp_path.rglob(PIECE)] == [200]


@pytest.mark.parametrize("damaged", [None, b"", b"\0" * 21, b"nonsense", b"9" * 20 + b"\n"])
def test_a_counter_that_is_gone_or_damaged_is_found_anew(tmp_path: Path, damaged: bytes | None) -> None:
    cache, counter = LocalCache(str(tmp_path), ONE, MARKERS + 250), tmp_path / DIRECTORY / ".used"
    for number in range(3):
        get(cache, Fetch(b"%d" % number * 100), f"rows-{number}-{number:016x}")
        if damaged is None:
            counter.unlink()
        else:
            counter.write_bytes(damaged)
    assert len(names(tmp_path)) == 2


def test_a_counter_that_is_too_high_costs_no_rows(tmp_path: Path) -> None:
    get(LocalCache(str(tmp_path), TWO, None), Fetch(b"2" * 100))
    cache = LocalCache(str(tmp_path), ONE, MARKERS + 200)
    for number in range(2):
        get(cache, Fetch(b"%d" % number * 50), f"rows-{number}-{number:016x}")
        (tmp_path / DIRECTORY / ".used").write_bytes(b"%020d\n" % 1000)
    assert len(names(tmp_path)) == 3


def test_what_was_counted_too_low_before_is_listed_by_who_begins(tmp_path: Path) -> None:
    get(LocalCache(str(tmp_path), ONE, MARKERS + 150), Fetch(b"1" * 100))
    held = LocalCache(str(tmp_path), ONE, MARKERS + 150)
    # As after a power cut, where the file was not written and the piece was.
    (tmp_path / DIRECTORY / ".used").write_bytes(b"%020d\n" % 0)
    get(LocalCache(str(tmp_path), TWO, MARKERS + 150), Fetch(b"2" * 100))
    assert names(tmp_path) == [PIECE]
    del held


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
from converter.reading.local_cache import LocalCache
cache = LocalCache(sys.argv[1], sys.argv[2], None)
def fetch():
    print("fetching", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
cache.get(sys.argv[3], [3], fetch)
"""


KILLED_ASIDE = """
import os, signal, sys
from converter.reading.local_cache import LocalCache
def die(aside, path):
    print(os.path.getsize(aside), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
os.rename = die
cache = LocalCache(sys.argv[1], sys.argv[2], None)
cache.get(sys.argv[3], [100], lambda: [bytes(100)])
"""

FORKED = """
import os, sys, threading
from converter.reading.local_cache import LocalCache
cache = LocalCache(sys.argv[1], "one", None)
read, write = os.pipe()
forked, given_up = threading.Event(), threading.Event()
def fetch():
    fetching.set()
    forked.wait()
    return [b"too short to be kept"]
fetching = threading.Event()
thread = threading.Thread(target=cache.get, args=("rows-0-0000000000000000", [100], fetch))
thread.start()
fetching.wait()
if os.fork() == 0:
    # As a loader's worker, for as long as the other one lives.
    os.close(write)
    os.read(read, 1)
    os._exit(0)
forked.set()
thread.join()
threading.Timer(10, given_up.set).start()
cache.get("rows-0-0000000000000000", [100], fetch, given_up)
print("fetched again", flush=True)
os._exit(0)
"""

FULL = """
import logging, sys
from converter.reading.local_cache import LocalCache
logging.basicConfig(format="%(message)s", stream=sys.stdout)
cache, content = LocalCache(sys.argv[1], "one", 10**9), bytes(range(250)) * 2000
for number in range(6):
    found, _ = cache.get(f"rows-{number}-{number:016x}", [len(content)], lambda: [content])
    assert found[0].to_pybytes() == content
cache = None
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


def test_a_disk_that_fails_is_an_error_by_name_and_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Found by python -m tests.faults.campaign store.
    open_local_root(str(tmp_path))

    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    open_before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(local_cache.fcntl, "flock", fail)
    with pytest.raises(CacheError, match=r"local_cache_dir='.*' cannot be written: Input/output error\. Choose"):
        open_local_cache(str(tmp_path), ONE, None)
    assert len(os.listdir("/proc/self/fd")) == len(open_before)


@pytest.mark.parametrize("name", ["held", "used"])
def test_a_file_that_is_never_there_is_an_error_and_no_endless_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    # Found by python -m tests.faults.campaign store.
    cache = LocalCache(str(tmp_path), ONE, None)
    monkeypatch.setattr(local_cache, "is_at", lambda file, path: not path.endswith(name))
    if name == "held":
        with pytest.raises(CacheError, match="cannot be written: it is removed as often as it is made"):
            open_local_cache(str(tmp_path), ONE, None)
    else:
        parts, is_copy = cache.get("rows-0-0000000000000000", [4], lambda: [b"rows"])
        assert (parts[0].to_pybytes(), is_copy) == (b"rows", False)
        assert "is full (it is removed as often as it is made)" in caplog.text


def test_a_marker_that_cannot_be_put_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Found by python -m tests.faults.campaign store.
    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(local_cache.os, "replace", fail)
    with pytest.raises(CacheError, match="cannot be written: Input/output error"):
        open_local_root(str(tmp_path))
    assert not os.listdir(tmp_path / DIRECTORY)


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


def kill_before_the_rename(directory: Path, fingerprint: str) -> Path:
    """The half piece that is left."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED_ASIDE, str(directory), fingerprint, PIECE],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == ("100\n", -9), done.stderr
    (part,) = directory.rglob("*.part")
    return part


def test_a_half_piece_of_a_process_that_was_killed_is_swept(tmp_path: Path) -> None:
    part = Path(LocalCache(str(tmp_path), ONE, None)._folder) / f".{'0' * 32}-100.part"
    part.write_bytes(bytes(100))
    assert sweep(tmp_path, dry_run=True).num_bytes == 100
    assert part.exists()
    assert sweep(tmp_path).num_bytes == 100
    assert not part.exists()


def test_a_half_piece_of_a_process_that_was_killed_is_never_used_and_makes_room(tmp_path: Path) -> None:
    held = LocalCache(str(tmp_path), ONE, MARKERS + 150)
    part = kill_before_the_rename(tmp_path, ONE)
    fetch = Fetch(b"1" * 100)
    assert get(held, fetch) == get(held, fetch) == [b"1" * 100]
    assert fetch.count == 1
    assert not part.exists()
    # And one that comes after this process has counted.
    other = Fetch(b"2" * 50)
    part = kill_before_the_rename(tmp_path, TWO)
    assert get(held, other, "rows-1-0123456789abcdef") == get(held, other, "rows-1-0123456789abcdef") == [b"2" * 50]
    assert other.count == 1
    assert not part.exists()


def test_who_shares_a_folder_shares_its_counter(tmp_path: Path) -> None:
    root = Path(open_local_root(str(tmp_path)))
    root.chmod(0o777)
    get(LocalCache(str(tmp_path), ONE, None), Fetch(b"one"))
    assert (root / ".used").stat().st_mode & 0o777 == 0o666


def test_what_a_filesystem_says_at_a_close_costs_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, close, renamed = LocalCache(str(tmp_path), ONE, None), os.close, []
    dup = os.dup
    duplicates: set[int] = set()
    monkeypatch.setattr(os, "dup", lambda file: duplicates.add(found := dup(file)) or found)
    monkeypatch.setattr(os, "rename", lambda *paths: renamed.append(paths))

    def close_late(file: int) -> None:
        close(file)
        if file in duplicates:
            duplicates.remove(file)
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "close", close_late)
    assert get(cache, Fetch(b"one")) == [b"one"]
    assert not renamed
    assert names(tmp_path) == []


def test_a_process_that_was_forked_during_a_fetch_keeps_nobody_waiting(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "fetched again\n", done.stderr


def test_a_disk_that_becomes_full_during_a_write_is_said_once(tmp_path: Path) -> None:
    small_disk = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = 'mount -t tmpfs -o size=1200k none "$0" && '
    if (
        shutil.which("unshare") is None
        or subprocess.run([*small_disk, f"{mount}true", tmp_path], capture_output=True, check=False).returncode != 0
    ):
        pytest.skip("this machine lets nobody but root mount a disk")
    # Two pieces of 500 kB fit; then what is left, where nobody but the other namespace sees it.
    script = f'{mount}"$@" && find "$0" -name "*.part" && find "$0" -name "rows-*" | wc -l'
    done = subprocess.run(
        [*small_disk, script, tmp_path, sys.executable, "-c", FULL, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout.splitlines() == [
        f"{tmp_path / DIRECTORY} is full (No space left on device): what does not fit is fetched each time.",
        "2",
    ], done.stderr


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


def test_who_begins_to_read_while_room_is_made_keeps_its_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get(LocalCache(str(tmp_path), ONE, None), Fetch(b"old"))
    root, fetch, begun = open_local_root(str(tmp_path)), Fetch(b"new"), []
    listed, unlink = local_cache._entries, os.unlink

    def held_first(folder: str) -> list[os.DirEntry[str]]:
        return sorted(listed(folder), key=lambda entry: entry.name != ".held")

    def unlink_and_begin(name: str, *, dir_fd: int | None = None) -> None:
        unlink(name, dir_fd=dir_fd)
        if name == ".held":
            begun.append(LocalCache(str(tmp_path), ONE, None))
            assert get(begun[0], fetch) == [b"new"]

    monkeypatch.setattr(local_cache, "_entries", held_first)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink_and_begin)
        remove_unheld(root)
    assert get(begun[0], fetch) == [b"new"]
    assert fetch.count == 1


def test_two_that_make_room_do_not_remove_what_is_read_after_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get(LocalCache(str(tmp_path), ONE, None), Fetch(b"old"))
    (piece,) = tmp_path.rglob(PIECE)
    # Beside a file that is not ours the folder stays, and is used again.
    (piece.parent / "thesis.tex").write_bytes(b"precious")
    root, fetch, begun, flock = open_local_root(str(tmp_path)), Fetch(b"new"), [], fcntl.flock

    def another_is_faster(file: int, kind: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        remove_unheld(root)
        begun.append(LocalCache(str(tmp_path), ONE, None))
        assert get(begun[0], fetch) == [b"new"]
        flock(file, kind)

    monkeypatch.setattr(fcntl, "flock", another_is_faster)
    remove_unheld(root)
    assert get(begun[0], fetch) == [b"new"]
    assert fetch.count == 1


def test_a_directory_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / DIRECTORY).mkdir()
    (tmp_path / DIRECTORY / "thesis.tex").write_bytes(b"precious")
    with pytest.raises(CacheNotOwnedError, match="holds files but not the marker"):
        LocalCache(str(tmp_path), ONE, None)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CacheError, match=r"local_cache_dir='.*file' cannot be written: Not a directory"):
        LocalCache(str(tmp_path / "file"), ONE, None)


@pytest.mark.parametrize("directory", ["", "hdfs://x/y", "s3://bucket", "hdfs:/x", "dbfs:/x", "file://host/x"])
def test_a_local_cache_is_a_folder_of_this_machine(directory: str) -> None:
    with pytest.raises(ValueError, match="local_cache_dir must be a folder of this machine"):
        open_local_root(directory)


def test_a_folder_is_named_by_a_path_or_an_encoded_url(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    assert open_local_root((tmp_path / "a b").as_uri()) == str(tmp_path / "a b" / DIRECTORY)
    for url in (f"file:{tmp_path}/a%20b", f"file://localhost{tmp_path}/a%20b", f"FILE://{tmp_path}/a%20b"):
        assert open_local_root(url) == str(tmp_path / "a b" / DIRECTORY)
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
        folder = os.readlink(f"/proc/self/fd/{options['dir_fd']}") if "dir_fd" in options else ""
        if os.path.join(folder, path) == os.path.join(first, ".held"):
            raise PermissionError(13, "Permission denied", path)
        return whole(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    num_files, _ = remove_unheld(root)
    assert num_files > 0
    assert [entry.path for entry in os.scandir(root) if entry.is_dir()] == [first]
    name = next(name for name in ("one", "two") if hashlib.sha256(name.encode()).hexdigest()[:32] in first)
    with pytest.raises(CacheError, match=r"belongs to another user: .*Permission denied.* Choose a folder of your own"):
        open_local_cache(str(tmp_path), name, None)
