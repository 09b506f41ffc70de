"""The section `stores` of read.py: a cache on a real HDFS and on Azurite, both on this machine, as ratios.

    python tests/bench/read.py --only stores                  # some ten minutes on two cores
    python tests/bench/read.py --only stores --quick          # small: does it run at all?

The servers start by themselves, as for the tests, and end with the section; they share the cores with what is timed,
and their CPU is in no figure. Ours runs with its defaults: on a network store that is zstd for the
columns that it makes a fifth smaller, on a local disk no
compression. HDFS has Hadoop's own block size, and one replica.

Write: classic Spark, local[2], from Parquet sources, in turns (A B C A B C …) after one of each that does not count,
with the disk's buffers flushed and the JVM's garbage collected before each; the whole of `make_spark_converter` with
the `delete` of its entry, beside `df.write.parquet` to the same HDFS.

Read: "raw" asks hdfs-native for the same byte ranges of the same files in the order of an epoch of ours, with as many
threads, and drops what it gets; it opens each file once an epoch, and undoes no compression.

Counts: requests to Azurite as a proxy in a process of its own sees them, on HDFS as the package asks its store; what
ends with the file, and is of no row group, is its footer, and all else is data. Delay: by the same proxy, for each
request. A round trip is the time that a delay adds, over that delay: what is asked at once counts once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import write
from peers_read import timed_epoch, touch
from read import BATCH_SIZE, Bench, Epoch, Opened, Way, apart, in_turns, print_table, print_ways, say, short

import converter
from converter.reading.windows import open_files
from converter.storage.at_once import MAX_REQUESTS_AT_ONCE
from converter.storage.hdfs import HdfsStore
from converter.storage.ranges import MAX_REQUEST_BYTES, Range

DELAY_SECONDS = 0.05
LONG_DELAY_SECONDS = 2.0
"""So long that the time of a first batch tells how often it waited for it: work that goes on meanwhile takes less."""

HDFS_NAMES = ("tab", "emb")
FRAMES = ("tab", "emb", "img")
CODECS = {"auto": "auto", "none": "none"}
COLUMNS: dict[str, list[str] | None] = {
    "all 41 columns": None,
    "4 columns side by side": ["id", "f0", "f1", "f2"],
    "4 columns far apart": ["id", "f10", "f20", "f30"],
}

Part = tuple[str, int, int]
"""A file's name, the first byte, and the one behind the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Something that we wrote to a store."""

    url: str
    options: dict[str, Any] = field(default_factory=dict)

    def open(self) -> Any:
        return converter.open_converter(self.url, storage_options=self.options)


def run(bench: Bench) -> None:
    """Start the servers, write, read, count, delay."""
    # The servers are those of the tests, which stand two folders above.
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import pytest

    try:
        with tempfile.TemporaryDirectory() as folder, servers(Path(folder)) as (hdfs_url, azurite):
            measure(bench, hdfs_url, azurite)
    except pytest.skip.Exception as error:
        print(f"Not run: {error}\n")


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[tuple[str, Any]]:
    from tests.servers.azurite import start_azurite
    from tests.servers.hdfs import DEFAULT_BLOCK_BYTES, start_hdfs

    (folder / "hdfs").mkdir()
    (folder / "azurite").mkdir()
    # Our files have the server's blocks; Spark's client says its own size, which is this one.
    with (
        start_azurite(folder / "azurite") as azurite,
        start_hdfs(folder / "hdfs", block_bytes=DEFAULT_BLOCK_BYTES) as hdfs,
    ):
        yield hdfs.url, azurite


def measure(bench: Bench, hdfs_url: str, azurite: Any) -> None:
    say("stores: writing")
    container = azurite.url(azurite.new_container())
    options = {"connection_string": azurite.connection_string}
    sources = {name: str(bench.rows[name].parquet) for name in FRAMES}
    seconds, urls = apart(write_to_stores, hdfs_url, container, options, sources, bench.options.repeats)
    print_writes(seconds)
    entries = {name: Entry(url=url) for name, url in urls.items()}
    print_sizes(entries)
    for name in HDFS_NAMES:
        read_hdfs(bench, name, {codec: entries[f"{name}, {codec}"] for codec in CODECS}, hdfs_url)
    with ProxyBeside(azurite.port) as proxy:
        from tests.servers.azurite import BlobAccount

        direct = Entry(url=urls["azure"], options=options)
        behind = Entry(url=urls["azure"], options={"connection_string": BlobAccount(proxy.port).connection_string})
        print_counts(behind, entries["tab, auto"], proxy)
        print_delayed(bench, direct, behind, proxy)
        print_round_trips(bench, behind, proxy)


# --- Write ------------------------------------------------------------------------------------------------------------


def write_to_stores(
    hdfs_url: str, container: str, options: dict[str, Any], sources: Mapping[str, str], repeats: int
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """In a process of its own: median seconds of each way to write each frame, and the entries that are kept."""
    # Where it is not said, a client of Hadoop's wants three replicas of the one DataNode.
    confs = {"spark.driver.memory": "4g", "spark.hadoop.dfs.replication": "1"}
    spark = converter.start_local_spark("bench", master="local[2]", conf=confs)
    seconds, urls = {}, {}
    try:
        for name, source in sources.items():
            df = spark.read.parquet(source)
            out, cache = f"{hdfs_url}/out", f"{hdfs_url}/written"
            ways: dict[str, Callable[[], None]] = {"write": lambda: df.write.mode("overwrite").parquet(out)}  # noqa: B023 (called in this turn)
            for codec, compression in CODECS.items() if name in HDFS_NAMES else [("auto", "auto")]:
                ways[codec] = lambda compression=compression: converter.make_spark_converter(  # type: ignore[misc]
                    df,  # noqa: B023
                    cache_dir=cache,  # noqa: B023
                    compression=compression,
                    progress=False,
                ).delete()
            say(f"stores: {name} is written to HDFS in turns")
            seconds[name] = write.in_turns(ways, repeats)
            kept = {"delete_on_exit": False, "progress": False}
            if name in HDFS_NAMES:
                for codec, compression in CODECS.items():
                    made = converter.make_spark_converter(
                        df, cache_dir=f"{hdfs_url}/read", cache_key=name, compression=compression, **kept
                    )
                    urls[f"{name}, {codec}"] = made.url
            if name == "tab":
                made = converter.make_spark_converter(
                    df, cache_dir=f"{container}/read", cache_key=name, storage_options=options, **kept
                )
                urls["azure"] = made.url
        small = spark.range(1000)
        seconds["1,000 rows of a long"] = write.in_turns(
            {
                "write": lambda: small.write.mode("overwrite").parquet(f"{hdfs_url}/out"),
                "auto": lambda: converter.make_spark_converter(
                    small, cache_dir=f"{hdfs_url}/written", progress=False
                ).delete(),
            },
            repeats,
        )
    finally:
        spark.stop()
    return seconds, urls


def print_writes(seconds: Mapping[str, Mapping[str, float]]) -> None:
    rows = []
    for name, found in seconds.items():
        has_goal = name in FRAMES
        ratio = found["auto"] / found["write"]
        verdict = ("met" if ratio <= 1 else "missed") if has_goal else ""
        plain = f"{found['none']:.2f} s ({found['none'] / found['write']:.2f})" if "none" in found else ""
        rows.append(
            [
                name, f"{found['write']:.2f} s", f"{found['auto']:.2f} s", f"{ratio:.2f}", "≤ 1" if has_goal else "",
                verdict, plain,
            ]
        )  # fmt: skip
    head = ["to HDFS", "df.write.parquet", "make_spark_converter", "ratio", "goal", "", "without compression"]
    print_table(head, rows)


def print_sizes(entries: Mapping[str, Entry]) -> None:
    """What the default makes of the bytes."""
    rows = []
    for name in HDFS_NAMES:
        sizes = {}
        for codec in CODECS:
            with entries[f"{name}, {codec}"].open() as made:
                sizes[codec] = int(made._manifest.file_bytes.sum())
        shown = [f"{size / 1e6:.0f} MB" for size in sizes.values()]
        rows.append([name, *shown, f"{sizes['auto'] / sizes['none']:.2f}"])
    print_table(["", "the default", "none", "ratio"], rows)


# --- Read -------------------------------------------------------------------------------------------------------------


def read_hdfs(bench: Bench, name: str, entries: Mapping[str, Entry], hdfs_url: str) -> None:
    """A shuffled epoch of torch's loader beside the client alone and beside the local disk."""
    rows = bench.rows[name]
    local, ours, raw = (f"{name}: {way}" for way in ("ours, local disk", "ours, HDFS", "raw hdfs-native"))
    with Opened() as opened:
        ways: dict[str, Way] = {local: opened.ours(rows, shuffle=True)}
        for codec, entry in entries.items():
            made = opened.enter(entry.open())
            loader = opened.enter(made.make_torch_dataloader(batch_size=BATCH_SIZE, shuffle=True))
            ways[f"{ours}, {codec}"] = Way(run=lambda data=loader: [timed_epoch(lambda: data)], num_rows=rows.num_rows)
            beside = Raw(hdfs_url, made)
            ways[f"{raw}, {codec}"] = Way(run=beside.run, num_rows=rows.num_rows)
        in_turns(ways, bench.options.repeats)
    print_ways(ways)
    table = []
    for codec in entries:
        measured = [ways[one] for one in (f"{ours}, {codec}", f"{raw}, {codec}", local)]
        if not all(way.epochs for way in measured):
            table.append([f"{ours}, {codec}", "–", "–", "–", "not measured"])
            continue
        own, client, disk = (way.rate for way in measured)
        least = min(0.7 * client, 0.8 * disk)
        verdict = "met" if own >= least else "missed"
        table.append([f"{ours}, {codec}", f"{own / client:.2f}", f"{own / disk:.2f}", short(least), verdict])
    head = ["", "of raw", "of the local disk", "goal: least of 0.7 and 0.8 of them, rows/s", ""]
    print_table(head, table)


def windows_of(made: Any) -> tuple[int, list[list[Part]]]:
    """How many threads read windows, and the requests of each window of the first shuffled epoch."""
    with made.make_batch_reader(batch_size=BATCH_SIZE, shuffle=True) as reader:
        source = reader._epochs.source
        files = open_files(source)

        def parts(number: int) -> list[Part]:
            file = files.file_of(number)
            return [(file.name, *part) for part in files.ranges(number, files.open(file))]

        return source.workers_count, [
            [part for number in piece.row_groups.tolist() for part in parts(number)]
            for piece in source.plan(0).pieces()
        ]


class Raw:
    """The same bytes by hdfs-native alone, for nobody."""

    def __init__(self, hdfs_url: str, made: Any) -> None:
        from hdfs_native import Client

        self._client = Client(hdfs_url)
        self._folder = urlsplit(made.url).path
        self._num_rows = len(made)
        self._workers_count, self._windows = windows_of(made)

    def run(self) -> list[Epoch]:
        names = {name for window in self._windows for name, _, _ in window}
        begin_cpu, begin = time.process_time(), time.perf_counter()
        files = {name: self._client.read(f"{self._folder}/{name}") for name in names}

        def read(part: Part) -> int:
            name, start, end = part
            return len(files[name].read_range(start, end - start))

        def read_window(window: Sequence[Part]) -> int:
            with ThreadPoolExecutor(min(len(window), MAX_REQUESTS_AT_ONCE)) as pool:
                return sum(pool.map(read, window))

        with ThreadPoolExecutor(self._workers_count) as pool:
            num_bytes = sum(pool.map(read_window, self._windows))
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
        is_whole = num_bytes == sum(end - start for window in self._windows for _, start, end in window)
        return [{"rows": self._num_rows if is_whole else 0, "seconds": seconds, "cpu_seconds": cpu_seconds}]


# --- Counts -----------------------------------------------------------------------------------------------------------


class ProxyBeside:
    """The tests' proxy before Azurite, in a process of its own, so that it takes no turn of this one's interpreter."""

    def __init__(self, server_port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve_proxy, args=(server_port, other), daemon=True)
        self.port = 0

    def __enter__(self) -> ProxyBeside:
        self._process.start()
        self.port = self._connection.recv()
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.send(None)
        self._process.join()

    def delay(self, seconds: float) -> None:
        """From now on."""
        self._ask(seconds)

    def requests(self) -> list[Any]:
        """Those since this was asked last."""
        return self._ask("requests")

    def _ask(self, question: Any) -> Any:
        self._connection.send(question)
        return self._connection.recv()


def serve_proxy(server_port: int, connection: Connection) -> None:
    from tests.servers.proxy import Proxy

    with Proxy(server_port) as proxy:
        connection.send(proxy.port)
        while (question := connection.recv()) is not None:
            found = None
            if question == "requests":
                found = list(proxy.requests)
                proxy.forget()
            else:
                proxy.delay_seconds = question
            connection.send(found)


@contextlib.contextmanager
def asked_of_hdfs() -> Iterator[list[Part]]:
    """What the package asks its store for in this block."""
    asked: list[Part] = []
    read_range = HdfsStore.read_range

    def counting(self: Any, path: str, start: Any = None, end: Any = None, given_up: Any = None) -> bytes:
        asked.append((path, start, end))
        return read_range(self, path, start, end, given_up)

    with mock.patch.object(HdfsStore, "read_range", counting):
        yield asked


def asked_of_azurite(requests: Sequence[Any]) -> list[Part]:
    """The parts of data files that were asked for."""
    found = []
    for request in requests:
        if request.method == "GET" and ".parquet" in request.path:
            first, _, last = str(request.range).removeprefix("bytes=").partition("-")
            found.append((request.path.partition("?")[0], int(first), int(last) + 1))
    return found


def read_once(loader: Any) -> int:
    return sum(map(touch, loader))


def print_counts(behind: Entry, on_hdfs: Entry, proxy: ProxyBeside) -> None:
    """Bytes and requests of the first epoch of a loader, shuffled."""
    rows, requests = [], []
    for title, columns in COLUMNS.items():
        for store, entry in {"HDFS": on_hdfs, "Azurite": behind}.items():
            say(f"stores: counting {title} on {store}")
            with (
                entry.open() as made,
                made.make_torch_dataloader(batch_size=BATCH_SIZE, shuffle=True, columns=columns) as loader,
            ):
                proxy.requests()
                with asked_of_hdfs() as asked:
                    num_rows = read_once(loader)
                asked = asked if store == "HDFS" else asked_of_azurite(proxy.requests())
                counted = Counted.of(made, loader.source, asked)
                known = made.plan(batch_size=BATCH_SIZE, columns=columns).bytes_per_epoch
            name = f"{store}: {title}"
            if num_rows != len(made):
                rows.append([name, *["–"] * 5, f"left out, with {num_rows:,} rows"])
                continue
            of_manifest, of_files = counted.num_bytes / known, counted.num_bytes / counted.wanted_bytes
            rows.append(
                [
                    name, f"{counted.num_bytes / 1e6:.1f}", f"{of_manifest:.3f}", f"{of_files:.3f}", "≤ 1.05",
                    "met" if max(of_manifest, of_files) <= 1.05 else "missed",
                ]
            )  # fmt: skip
            per_group = counted.num_data / counted.num_groups
            requests.append(
                [
                    name, str(counted.num_footers), str(counted.num_data), f"{per_group:.2f}", "≤ 2",
                    "met" if per_group <= 2 else "missed",
                ]
            )  # fmt: skip
            if counted.is_adjacent:
                per_started = counted.num_data / counted.started
                verdict = "met" if per_started <= 1 else "missed"
                requests[-1] += [f"{per_started:.2f}", "≤ 1", verdict]
                requests[-1] += [f"{counted.num_data * MAX_REQUEST_BYTES / counted.num_data_bytes:.2f}"]
            else:
                requests[-1] += [""] * 4
    head = ["tab, an epoch", "MB fetched", "of what the manifest knows", "of the columns in the files", "goal", ""]
    print_table(head, rows)
    print_table(
        [
            "tab, an epoch", "footers", "data requests", "a row group", "goal", "", "a started 8 MB of a row group",
            "goal", "", "8 MB fetched",
        ],
        requests,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What an epoch asked for, beside what it wanted."""

    num_groups: int
    num_footers: int
    num_data: int
    num_bytes: int
    """Of footers too."""

    num_data_bytes: int
    wanted_bytes: int
    """Of the wanted columns as they lie in the files, compressed."""

    started: int
    """Times 8 MB that the wanted columns of all row groups begin."""

    is_adjacent: bool

    @classmethod
    def of(cls, made: Any, source: Any, asked: Sequence[Part]) -> Counted:
        manifest, files = made._manifest, open_files(source)
        sizes = {
            name.rpartition("/")[2]: size
            for name, size in zip(manifest.file_names, manifest.file_bytes.tolist(), strict=True)
        }
        data: set[Part] = set()
        wanted, started, is_adjacent = 0, 0, True
        for number in range(manifest.num_row_groups):
            file = files.open(files.file_of(number))
            ranges: list[Range] = sorted(file.ranges(file.row_groups(number)))
            size = sum(end - start for start, end in ranges)
            wanted, started = wanted + size, started + -(-size // MAX_REQUEST_BYTES)
            is_adjacent = is_adjacent and ranges[-1][1] - ranges[0][0] == size
            name = manifest.file_names[int(manifest.row_group_file[number])].rpartition("/")[2]
            data |= {(name, *part) for part in files._ranges(number, file)}
        # The last row group's request may end with the file as well.
        is_footer = [
            end == sizes[name] and (name, start, end) not in data
            for name, start, end in ((path.rpartition("/")[2], start, end) for path, start, end in asked)
        ]
        fetched = [end - start for _, start, end in asked]
        return cls(
            num_groups=manifest.num_row_groups,
            num_footers=sum(is_footer),
            num_data=len(asked) - sum(is_footer),
            num_bytes=sum(fetched),
            num_data_bytes=sum(size for size, footer in zip(fetched, is_footer, strict=True) if not footer),
            wanted_bytes=wanted,
            started=started,
            is_adjacent=is_adjacent,
        )


# --- Delay ------------------------------------------------------------------------------------------------------------


def epoch_after(loader: Any, skipped: int) -> Epoch:
    """An epoch on the clock from where `skipped` rows were handed out."""
    rows = 0
    begin, begin_cpu = time.perf_counter(), time.process_time()
    for batch in loader:
        before, rows = rows, rows + touch(batch)
        if before < skipped <= rows:
            begin, begin_cpu = time.perf_counter(), time.process_time()
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    return {"rows": rows - skipped, "seconds": seconds, "cpu_seconds": cpu_seconds}


def print_delayed(bench: Bench, direct: Entry, behind: Entry, proxy: ProxyBeside) -> None:
    """Throughput behind the first window, with and without a delay of each request."""
    delayed, prompt = f"proxy, {1e3 * DELAY_SECONDS:.0f} ms", "proxy, no delay"
    with contextlib.ExitStack() as stack:
        ways: dict[str, Way] = {}
        for title, entry, seconds in (
            ("no proxy", direct, 0.0), (prompt, behind, 0.0), (delayed, behind, DELAY_SECONDS),
        ):  # fmt: skip
            made = stack.enter_context(entry.open())
            loader = stack.enter_context(made.make_torch_dataloader(batch_size=BATCH_SIZE, shuffle=True))
            # A window ends with the row group that fills it.
            skipped = loader.source.window_rows + int(made._manifest.row_group_rows.max())
            if skipped > 0.5 * len(made):
                print(f"Not measured: {len(made):,} rows are less than two windows.\n")
                return

            def run(data: Any = loader, first: int = skipped, delay: float = seconds) -> list[Epoch]:
                proxy.delay(delay)
                try:
                    return [epoch_after(data, first)]
                finally:
                    proxy.delay(0)

            ways[f"tab, Azurite: {title}"] = Way(run=run, num_rows=len(made) - skipped)
        in_turns(ways, bench.options.repeats)
    print_ways(ways)
    one, other = (ways[f"tab, Azurite: {title}"] for title in (delayed, prompt))
    row = ["–", "≥ 0.8", "not measured"]
    if one.epochs and other.epochs:
        ratio = one.rate / other.rate
        row = [f"{ratio:.2f}", "≥ 0.8", "met" if ratio >= 0.8 else "missed"]
    print_table(["tab, Azurite", "against", "ratio", "goal", ""], [[delayed, prompt, *row]])


def first_batch_seconds(entry: Entry, proxy: ProxyBeside) -> tuple[float, float, int, int]:
    """To open an entry and from there to the first batch; the requests of both."""
    proxy.requests()
    begin = time.perf_counter()
    with entry.open() as made:
        opened = time.perf_counter()
        num_opening = len(proxy.requests())
        again = time.perf_counter()
        with made.make_torch_dataloader(batch_size=BATCH_SIZE, shuffle=True) as loader:
            batches = iter(loader)
            touch(next(batches))
            end = time.perf_counter()
            num_first = len(proxy.requests())
            batches.close()
    wait_for_requests()
    proxy.requests()
    return opened - begin, end - again, num_opening, num_first


def wait_for_requests() -> None:
    """Until those that nobody waits for have ended."""
    for thread in threading.enumerate():
        if thread.name == "converter-request":
            thread.join()


def print_round_trips(bench: Bench, behind: Entry, proxy: ProxyBeside) -> None:
    """How often the first batch waited for the network, one time after the other."""
    found: dict[float, list[tuple[float, float, int, int]]] = {0.0: [], LONG_DELAY_SECONDS: []}
    for turn in range(max(3, bench.options.repeats) + 1):
        for delay, seconds in found.items():
            say(f"stores: first batch with {delay} s, turn {turn}")
            proxy.delay(delay)
            try:
                one = first_batch_seconds(behind, proxy)
            finally:
                proxy.delay(0)
            if turn:
                seconds.append(one)
    table = []
    for title, places in (
        ("open_converter", (0,)),
        ("make_torch_dataloader to the first batch", (1,)),
        ("both", (0, 1)),
    ):
        prompt, late = (statistics.median(sum(one[at] for at in places) for one in found[delay]) for delay in found)
        # There is no half of one; what is left of it is other work.
        trips = round((late - prompt) / LONG_DELAY_SECONDS)
        requests = statistics.median(sum(one[at + 2] for at in places) for one in found[LONG_DELAY_SECONDS])
        goal = ["≤ 5", "met" if trips <= 5 else "missed"] if 1 in places else ["", ""]
        table.append([title, f"{1e3 * prompt:.0f}", f"{requests:.0f}", f"{trips}", *goal])
    print_table(["tab, Azurite", "ms without delay", "requests sent by then", "round trips", "goal", ""], table)
