"""Files of a web server are read, in parts, and nothing else is taken for them."""

from __future__ import annotations

import faulthandler
import functools
import gc
import itertools
import os
import pickle
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.http import HTTPFileSystem

from converter import (
    CacheError,
    ConverterError,
    DatasetConverter,
    SourceChangedError,
    SourceError,
    make_parquet_converter,
    mix,
)
from converter.cache import roots
from converter.petastorm import make_batch_reader
from converter.petastorm.pytorch import DataLoader
from converter.petastorm.store import Store
from converter.reading import ahead
from converter.sources.parquet.footers import look_at
from converter.storage.opening import open_storage
from tests.processes import run_python
from tests.servers.proxy import Proxy
from tests.unit.petastorm.readers import told_when_stopped
from tests.waiting import wait_until


class RangeHandler(SimpleHTTPRequestHandler):
    """A web server that lists folders, and answers with parts of files."""

    has_ranges: ClassVar[bool] = True
    has_times: ClassVar[bool] = True
    num_off: ClassVar[int] = 0
    num_busy: ClassVar[int] = 0
    num_cut: ClassVar[int] = 0
    silent: ClassVar[str] = ""
    is_asked: ClassVar[threading.Event]
    """Set when the file `silent` is asked for, which is answered once `may_answer` is set."""
    may_answer: ClassVar[threading.Event]

    def send_header(self, keyword: str, value: str) -> None:
        if keyword != "Last-Modified" or self.has_times:
            super().send_header(keyword, value)

    def is_busy(self) -> bool:
        """Whether this request is refused for now."""
        if type(self).num_busy:
            type(self).num_busy -= 1
            self.send_error(503)
            return True
        return False

    def do_HEAD(self) -> None:
        if not self.is_busy():
            super().do_HEAD()

    def do_GET(self) -> None:
        path, wanted = Path(self.translate_path(self.path)), self.headers.get("Range", "")
        if path.name == self.silent:
            self.is_asked.set()
            self.may_answer.wait()
        if self.is_busy():
            return None
        # As nginx: what would be compressed has no parts.
        is_whole = not self.has_ranges or "gzip" in self.headers.get("Accept-Encoding", "")
        if not path.is_file() or not wanted or is_whole:
            return super().do_GET()
        first, last = wanted.removeprefix("bytes=").split("-")
        content = path.read_bytes()[int(first) : int(last) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Range", f"bytes {int(first) + self.num_off}-{last}/{path.stat().st_size}")
        self.end_headers()
        if type(self).num_cut:
            type(self).num_cut -= 1
            content = content[: len(content) // 2]
            self.close_connection = True
        self.wfile.write(content)
        return None

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A web server of a folder; its URL."""
    monkeypatch.setattr(RangeHandler, "num_busy", 0)
    monkeypatch.setattr(RangeHandler, "num_cut", 0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(RangeHandler, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def first_batch(converter: DatasetConverter) -> dict[str, Any]:
    with converter.make_batch_reader(batch_size=4) as reader:
        return dict(next(iter(reader)))


def test_files_of_a_web_server_are_read(tmp_path: Path, web: str) -> None:
    urls = []
    for day in (1, 2):
        (tmp_path / f"table/day={day}/at=a%20b").mkdir(parents=True)
        pq.write_table(pa.table({"id": [day, day + 10]}), tmp_path / f"table/day={day}/at=a%20b/ä b.parquet")
        urls.append(f"{web}/table/day={day}/at=a%2520b/%C3%A4%20b.parquet")
    for wanted, folder, rows in ((urls[:1], "/day=1/at=a%20b", [1, 11]), (urls, "", [1, 11, 2, 12])):
        with make_parquet_converter(wanted, timeout_seconds=10) as converter:
            assert converter.url == f"{web}/table{folder}"
            # Another process finds the same place.
            for one in (converter, pickle.loads(pickle.dumps(converter))):
                assert first_batch(one)["id"].tolist() == rows
    with make_parquet_converter(urls, timeout_seconds=10) as converter:
        # Its times have seconds.
        os.utime(tmp_path / "table/day=2/at=a%20b/ä b.parquet", (0, 0))
        with (
            pytest.raises(SourceChangedError, match=rf"{web}/table/day=2/at=a%20b/ä b.parquet was written again"),
            converter.make_batch_reader(batch_size=4) as reader,
        ):
            list(reader)
    for place in ("/table", "/table/", "", "/nowhere.parquet"):
        with pytest.raises(SourceError, match=rf"{web}{place.rstrip('/')} is not there, or is a page.* name each file"):
            make_parquet_converter(web + place, timeout_seconds=10)
    with pytest.raises(CacheError, match=f"{web}/table.* cannot"):
        roots.open_root(f"{web}/table", None, 10)
    with pytest.raises(ValueError, match="has a user's name or password in it") as caught:
        make_parquet_converter(web.replace("//", "//me:hidden@"))
    assert "hidden" not in str(caught.value)


def test_clients_and_connections_end_with_their_converters(tmp_path: Path, web: str) -> None:
    urls = []
    for number in range(3):
        pq.write_table(pa.table({"id": [number] * 4}), tmp_path / f"{number}.parquet")
        urls.append(f"{web}/{number}.parquet")

    def read() -> None:
        with make_parquet_converter(urls, timeout_seconds=10) as converter:
            assert first_batch(converter)["id"].tolist() == [0, 0, 0, 0]

    def held() -> tuple[int, int]:
        gc.collect()
        return sum(type(one) is HTTPFileSystem for one in gc.get_objects()), len(os.listdir("/proc/self/fd"))

    read()
    before = held()
    for _ in range(5):
        read()
    # The server closes its ends in threads of its own.
    wait_until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)), seconds=10)


def read_before_and_after_forks(url: str) -> None:
    """Three forked children read, collect garbage, and end as processes do; the parent reads between them."""
    with make_parquet_converter(url, timeout_seconds=10) as converter:
        for _ in range(3):
            assert first_batch(converter)["id"].tolist() == [1, 2]
            if not (pid := os.fork()):
                # Else nobody would know what a child waits for.
                faulthandler.dump_traceback_later(60, exit=True)
                try:
                    assert first_batch(converter)["id"].tolist() == [1, 2]
                    gc.collect()
                    weakref.finalize._exitfunc()  # type: ignore[attr-defined]
                except BaseException:  # noqa: BLE001 (else the child would go on as its parent does)
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.long("a process of its own, 4 s")
def test_a_forked_child_does_not_close_the_connections_of_its_parent(
    tmp_path: Path, web: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that connections stay open.
    monkeypatch.setattr(RangeHandler, "protocol_version", "HTTP/1.1")
    pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "a.parquet")
    # In a process of its own: a child would close what other tests have left open, and wait for ever for adlfs'.
    run_python(read_before_and_after_forks, f"{web}/a.parquet")


def test_two_web_servers_are_two_stores(tmp_path: Path, web: str) -> None:
    pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match="are on two stores"):
        make_parquet_converter([f"{web}/a.parquet", f"{web.replace('127.0.0.1', 'localhost')}/a.parquet"])
    with make_parquet_converter(f"{web}/a.parquet") as converter:
        assert first_batch(converter)["id"].tolist() == [1, 2]
        assert converter.describe()["url"] == f"{web}/a.parquet"


def test_a_web_server_that_is_busy_is_asked_again(tmp_path: Path, web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "a.parquet")
    monkeypatch.setattr("converter.storage.store._FIRST_PAUSE_SECONDS", 0.01)
    for num_busy in range(1, 6):
        monkeypatch.setattr(RangeHandler, "num_busy", num_busy)
        with make_parquet_converter(f"{web}/a.parquet", timeout_seconds=30) as converter:
            assert first_batch(converter)["id"].tolist() == [1, 2]
        assert RangeHandler.num_busy == 0
    monkeypatch.setattr(RangeHandler, "num_busy", 10_000)
    with pytest.raises(SourceError, match=r"could not be reached for 0.5 seconds .* 503"):
        make_parquet_converter(f"{web}/a.parquet", timeout_seconds=0.5)


def test_a_server_without_tls_is_not_asked_for_it_again(web: str) -> None:
    with pytest.raises(SourceError, match="WRONG_VERSION_NUMBER"):
        make_parquet_converter(f"{web.replace('http:', 'https:')}/a.parquet", timeout_seconds=60)


def test_a_body_that_is_cut_is_asked_for_again(tmp_path: Path, web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"id": range(1000)}), tmp_path / "a.parquet")
    monkeypatch.setattr(RangeHandler, "num_cut", 3)
    with make_parquet_converter(f"{web}/a.parquet", timeout_seconds=30) as converter:
        assert first_batch(converter)["id"].tolist() == [0, 1, 2, 3]
    assert RangeHandler.num_cut == 0


def test_a_web_server_without_ranges_is_refused(tmp_path: Path, web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"id": range(100_000)}), tmp_path / "a.parquet")
    monkeypatch.setattr(RangeHandler, "has_ranges", False)
    with pytest.raises(SourceError, match=r"ignores Range requests and answers with whole files"):
        make_parquet_converter(f"{web}/a.parquet", timeout_seconds=10)


def test_another_part_than_was_asked_for_is_not_taken_for_it(
    tmp_path: Path, web: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"id": range(1000)}), tmp_path / "a.parquet")
    monkeypatch.setattr(RangeHandler, "num_off", 8)
    with pytest.raises(SourceError, match=r"was asked for the bytes \d+ to \d+, and gave bytes \d+-\d+/\d+"):
        make_parquet_converter(f"{web}/a.parquet", timeout_seconds=10)


def test_what_is_kept_of_one_place_is_not_read_at_another(
    tmp_path: Path, web: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Of plain pages without statistics: the footers, sizes and times are the same.
    for name, ids in (("train", [1, 2]), ("val", [3, 4])):
        (tmp_path / name).mkdir()
        table = pa.table({"id": pa.array(ids, pa.int64())})
        pq.write_table(table, tmp_path / name / "a.parquet", write_statistics=False, use_dictionary=False)
        os.utime(tmp_path / name / "a.parquet", (1_700_000_000, 1_700_000_000))
    kept = tmp_path / "kept"

    def rows_of(name: str) -> list[int]:
        with (
            make_parquet_converter(f"{web}/{name}/a.parquet", timeout_seconds=10) as converter,
            converter.make_batch_reader(batch_size=4, local_cache_dir=kept) as reader,
        ):
            found: list[int] = next(iter(reader))["id"].tolist()
            return found

    assert [rows_of("train"), rows_of("val"), rows_of("train")] == [[1, 2], [3, 4], [1, 2]]
    assert len([file for file in kept.rglob("rows-*") if file.is_file()]) == 2
    # Of a server that does not tell when a file was written nothing is kept.
    monkeypatch.setattr(RangeHandler, "has_times", False)
    assert rows_of("val") == [3, 4]
    assert "local_cache_dir is not used" in caplog.text


def interrupt_footers(url: str, num_files: int, is_masked: bool) -> float:
    """How many seconds after Ctrl-C the reading of footers ends, if it ends with it."""
    storage = open_storage(url, None, 60)
    if is_masked:
        # The signal then goes to another thread, and does not wake who waits: as beside Polars, which handles SIGINT.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    sent: list[float] = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(1, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        look_at(storage, [f"{number}.parquet" for number in range(num_files)])
    return time.monotonic() - sent[0]


@pytest.mark.long("starts processes and waits a second in each before Ctrl-C")
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("num_files", [1, 40])
def test_an_interrupt_ends_the_reading_of_footers(
    web: str, monkeypatch: pytest.MonkeyPatch, num_files: int, is_masked: bool
) -> None:
    monkeypatch.setattr(RangeHandler, "num_busy", 10_000)
    assert run_python(interrupt_footers, web, num_files, is_masked) < 30


def test_a_store_that_is_only_read_is_named() -> None:
    with pytest.raises(OSError, match="the store cannot create a file only if there is none"):
        open_storage("https://localhost:1/x", timeout_seconds=5).put_if_absent("a", b"1")


def test_an_iteration_that_is_closed_while_the_server_is_silent_leaves_the_others_alone(
    tmp_path: Path, web: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"id": range(100_000)}), path, row_group_size=10_000, compression="none", use_dictionary=False
    )
    for name in ("is_asked", "may_answer"):
        monkeypatch.setattr(RangeHandler, name, threading.Event(), raising=False)
    monkeypatch.setattr(ahead, "_PATIENCE_SECONDS", 0.1)
    converter = make_parquet_converter(f"{web}/a.parquet")
    with converter.make_torch_dataloader(batch_size=1000, num_epochs=2) as loader:
        one, other = iter(loader), iter(loader)
        rows = [next(other)["id"]]
        next(one)
        monkeypatch.setattr(RangeHandler, "silent", "a.parquet")
        thread = threading.Thread(target=lambda: list(one))
        thread.start()
        assert RangeHandler.is_asked.wait(30)
        closing = threading.Timer(0.5, RangeHandler.may_answer.set)
        closing.start()
        one.close()
        thread.join(30)
        closing.join()
        rows += [batch["id"] for batch in other]
    assert [number for batch in rows for number in batch.tolist()] == [*range(100_000)] * 2


# Text is not read by the native engine for Petastorm's; without a row before, the footers are asked for first.
@pytest.mark.parametrize("may_wait", [True, False])
@pytest.mark.parametrize("kind", ["rows", "transform", "mixture"])
def test_a_loader_is_closed_while_another_thread_waits_for_a_silent_server(
    tmp_path: Path, web: str, monkeypatch: pytest.MonkeyPatch, kind: str, may_wait: bool
) -> None:
    # More than what is fetched with a footer, and kept.
    ids = pa.array(range(100_000))
    for name in "ab":
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"id": ids}), path, row_group_size=10_000, compression="none", use_dictionary=False)
    for name in ("is_asked", "may_answer"):
        monkeypatch.setattr(RangeHandler, name, threading.Event(), raising=False)
    monkeypatch.setattr(ahead, "_PATIENCE_SECONDS", 0.1)
    rows = make_parquet_converter([f"{web}/{name}.parquet" for name in "ab"])
    converter = mix({"one": rows, "other": rows.where([("id", "<", 50_000)])}) if kind == "mixture" else rows
    transform = (lambda batch: batch) if kind == "transform" else None
    loader = converter.make_torch_dataloader(batch_size=1000, num_epochs=None, transform=transform)
    batches = iter(loader)
    next(batches)
    monkeypatch.setattr(RangeHandler, "silent", "b.parquet")
    if not may_wait:
        # As while another thread collects garbage.
        monkeypatch.setattr(ahead, "may_wait", lambda: False)
    told: list[str] = []

    def read() -> None:
        try:
            for _ in batches:
                pass
        except ConverterError as error:
            told.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert RangeHandler.is_asked.wait(30)
        loader.close()
        thread.join(30)
        assert told == ["This loader was closed: its `with` block has ended. Make a new one."]
    finally:
        RangeHandler.may_answer.set()
        loader.close()
        thread.join()


@pytest.mark.filterwarnings("ignore:make_batch_reader is Petastorm's interface")
@pytest.mark.parametrize("columns", [["id"], ["id", "text"]], ids=" ".join)
@pytest.mark.parametrize("num_before", [0, 1], ids=["at its first row", "later"])
def test_a_petastorm_reader_is_stopped_while_the_server_is_silent(
    tmp_path: Path, web: str, monkeypatch: pytest.MonkeyPatch, columns: list[str], num_before: int
) -> None:
    for name in "ab":
        pq.write_table(pa.table({"id": [1, 2], "text": ["a", "b"]}), tmp_path / f"{name}.parquet")
    for name in ("is_asked", "may_answer"):
        monkeypatch.setattr(RangeHandler, name, threading.Event(), raising=False)
    urls = [f"{web}/{name}.parquet" for name in "ab"]
    reader = make_batch_reader(urls, columns, workers_count=1, num_epochs=None)
    for _ in range(num_before):
        next(reader)
    monkeypatch.setattr(RangeHandler, "silent", "b.parquet")
    try:
        told = told_when_stopped(reader, reader, RangeHandler.is_asked)
    finally:
        RangeHandler.may_answer.set()
    assert told == ["Trying to read a sample after a reader"]


@pytest.mark.filterwarnings("ignore:make_batch_reader is Petastorm's interface")
def test_a_petastorm_loader_that_shuffles_is_stopped_while_the_server_is_silent(
    tmp_path: Path, web: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        pq.write_table(pa.table({"id": range(100 * number, 100 * number + 100)}), tmp_path / f"{number}.parquet")
    for name in ("is_asked", "may_answer"):
        monkeypatch.setattr(RangeHandler, name, threading.Event(), raising=False)
    reader = make_batch_reader([f"{web}/{number}.parquet" for number in range(2)], num_epochs=None)
    batches = iter(DataLoader(reader, batch_size=10, shuffling_queue_capacity=50))
    next(batches)
    monkeypatch.setattr(RangeHandler, "silent", "1.parquet")
    try:
        told = told_when_stopped(reader, batches, RangeHandler.is_asked)
    finally:
        RangeHandler.may_answer.set()
    assert told == ["Trying to read a sample after a reader"]


@pytest.mark.filterwarnings("ignore:make_batch_reader is Petastorm's interface")
@pytest.mark.parametrize("capacity", [None, 0, 50], ids=["reader", "loader", "loader that shuffles"])
def test_what_petastorms_cache_keeps_is_not_fetched_again_and_ends_with_its_reader(
    tmp_path: Path, web: str, capacity: int | None
) -> None:
    num_files = 3
    for number in range(num_files):
        ids = range(100 * number, 100 * number + 100)
        pq.write_table(pa.table({"id": ids}), tmp_path / f"{number}.parquet", row_group_size=20)
    kept = tmp_path / "kept"
    with Proxy(int(web.rpartition(":")[2])) as proxy:
        with make_batch_reader(
            [f"http://127.0.0.1:{proxy.port}/{number}.parquet" for number in range(num_files)],
            cache_type="local-disk", cache_location=str(kept), cache_size_limit=1 << 30,
        ) as reader:  # fmt: skip
            loader = None if capacity is None else DataLoader(reader, 10, shuffling_queue_capacity=capacity)

            def gets_of_an_epoch() -> int:
                proxy.forget()
                batches = [batch.id for batch in reader] if loader is None else [batch["id"] for batch in loader]
                assert sorted(int(number) for batch in batches for number in batch) == list(range(100 * num_files))
                return proxy.count("GET")

            assert gets_of_an_epoch() > num_files
            if loader is None:
                reader.reset()
            # Each file's footer tells whether it is the same.
            assert gets_of_an_epoch() == num_files
            assert list(kept.rglob("rows-*"))
        assert not list(kept.rglob("rows-*"))


@pytest.mark.filterwarnings("ignore:make_batch_reader is Petastorm's interface")
@pytest.mark.parametrize(
    ("columns", "is_opened"),
    [(["id"], False), (["id", "text"], False), (["id", "text"], True)],
    ids=["native", "by the reader", "while it is read"],
)
def test_a_file_that_a_petastorm_reader_no_longer_finds_is_told(
    tmp_path: Path, web: str, monkeypatch: pytest.MonkeyPatch, columns: list[str], is_opened: bool
) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1, 2], "text": ["a", "b"]}), file)
    open_file = Store._open

    def open_and_remove(store: Store, *arguments: Any) -> Any:
        opened = open_file(store, *arguments)
        file.unlink(missing_ok=True)
        return opened

    with make_batch_reader([f"{web}/a.parquet"], columns, num_epochs=None) as reader:
        next(reader)
        if is_opened:
            monkeypatch.setattr(Store, "_open", open_and_remove)
        else:
            file.unlink()
        with pytest.raises(SourceChangedError, match=r"a\.parquet is (gone|not there)"):
            list(itertools.islice(reader, 100))
