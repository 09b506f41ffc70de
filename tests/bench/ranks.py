#!/usr/bin/env python3
"""What the thousandth rank costs: requests to the store, leases, planning, copies on the local disk, memory.

    python tests/bench/ranks.py                      # some ten minutes on two cores
    python tests/bench/ranks.py --only plan --quick  # small: does it run at all?

opening: 1,000 ranks on 125 hosts open one entry on Azurite, and on HDFS; both run on this machine. Every rank is a
process of its own, with `LOCAL_WORLD_SIZE=8` and the name of its host. First the first ranks of all hosts open at
once, and stay; then the second ranks of all hosts, which end again, and so on. A proxy counts the requests to Azurite.
The NameNode counts its own, among them the steps of writing a lease and, as waves take a minute or two, some renewals
(Append and Complete). Renewals are counted while the 125 stay.

plan: the part of one of 4,096 ranks in an epoch of 10^10 rows in 10^6 row groups, shuffled, and its first window.

cold: eight ranks of a host start with an empty `local_cache_dir`, all at once, on Azurite behind the proxy; each reads
all rows, or its own part. Counts are bytes of data that were asked for.

memory: eight ranks of a host read their parts of 400,000 float32[512] for three epochs, shuffled. Private memory is
what no file stands behind, beyond what a rank had when its loader was made, at the moment when it is most, summed over
ranks; pages of files are counted once for all of them.

Prints Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from memory import anonymous_bytes
from read import BATCH_SIZE, apart, make_rows, print_table, say
from stores import ProxyBeside

import converter
from converter.cache import leases
from converter.plan import Shuffle, plan_epoch
from converter.positions import Shard

RANKS_PER_HOST = 8
PLANNED_RANKS, PLANNED_ROWS, PLANNED_ROW_GROUPS = 4096, 10**10, 10**6
SECTIONS = ("opening", "plan", "cold", "memory")
MILLION = 1_000_000
_NAMENODE_COUNTS_SECONDS = 12.0
"""Hadoop brings its counts up to date every ten seconds."""


def main() -> None:
    """Run the sections that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--quick", action="store_true", help="small: does it run at all?")
    parser.add_argument("--data", help="where read.py's rows are kept and taken from again (default: nowhere)")
    options = parser.parse_args()
    # The servers are those of the tests, which stand two folders above.
    sys.path.insert(0, str(Path(__file__).parents[2]))
    for section in options.only:
        say(section)
        print(f"### {section}\n")
        {"opening": opening, "plan": plan, "cold": cold, "memory": memory}[section](options)


# --- Ranks ------------------------------------------------------------------------------------------------------------


def of_a_host(host: str, local_rank: int) -> None:
    """Make this process what a launcher starts on a host of that name."""
    os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS_PER_HOST), "LOCAL_RANK": str(local_rank)}
    leases.this_host = lambda: host


def open_entry(url: str, options: Mapping[str, Any], host: str, local_rank: int, barrier: Any, end: str) -> None:
    """A rank that opens the rows together with others, and ends once the file `end` exists."""
    of_a_host(host, local_rank)
    barrier.wait()
    with converter.open_converter(url, storage_options=options):
        barrier.wait()
        # No event: where a process that waits for one has died, who sets it waits for ever.
        while not os.path.exists(end):
            time.sleep(0.1)


def forked() -> ForkContext:
    """Ranks are forked from this process, which must have no thread of a store's by then."""
    return multiprocessing.get_context("fork")


@contextlib.contextmanager
def running(processes: Sequence[ForkProcess]) -> Iterator[None]:
    """These processes until the end of the block, when they must be about to end."""
    for process in processes:
        process.start()
    try:
        yield
    finally:
        until = time.monotonic() + 60
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.exitcode != 0:
                say(f"{process.name} ended with {process.exitcode}")
            process.kill()


# --- Opening ----------------------------------------------------------------------------------------------------------


def opening(options: argparse.Namespace) -> None:
    """Open by all ranks; count."""
    num_hosts, watched_seconds = (5, 70) if options.quick else (125, 180)
    head = ["store", "who opens", "requests to the store", "for each rank", "of them", "seconds, all together"]
    rows: list[list[str]] = []
    renewals: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for store, started in (("Azurite", started_azurite), ("HDFS", started_hdfs)):
            with started(Path(folder)) as (url, storage_options, counted):
                entry_url = apart(commit, url, storage_options)
                counted()
                arguments = (entry_url, storage_options, num_hosts, watched_seconds)
                first, others, ended, renewed = open_all(*arguments, counted)
                for who, (found, count, seconds) in {
                    f"the first rank of each of {num_hosts} hosts": first,
                    f"the {RANKS_PER_HOST - 1} others of each, in turns": others,
                    "all": (first[0] + others[0], first[1] + others[1], first[2] + others[2]),
                    "the others, when they end": ended,
                }.items():
                    what = ", ".join(f"{number:,} {name}" for name, number in sorted(found.items()))
                    rows.append(
                        [
                            store,
                            who,
                            f"{found.total():,}",
                            f"{found.total() / count:.2f}",
                            what or "none",
                            f"{seconds:.1f}" if seconds else "",
                        ]
                    )
                per_minute = renewed.total() * 60 / watched_seconds
                what = ", ".join(f"{number:,} {name}" for name, number in sorted(renewed.items()))
                renewals.append([store, f"{num_hosts}", f"{per_minute:.0f}", f"{what} in {watched_seconds} s"])
    print_table(head, rows)
    print_table(["store", "hosts that hold the entry", "requests a minute", "of them"], renewals)


Counted = Callable[[], Counter[str]]
Opened = tuple[Counter[str], int, float]


def open_all(
    url: str, options: Mapping[str, Any], num_hosts: int, watched_seconds: float, counted: Counted
) -> tuple[Opened, Opened, Opened, Counter[str]]:
    """What the first ranks of all hosts ask for; the others; these when they end; and the first ones afterwards."""
    context = forked()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ending:
        ends = Path(folder)
        (first, seconds), stop = begin(context, url, options, num_hosts, 0, ends / "0", counted)
        ending.enter_context(stop)
        others, ended, others_seconds = Counter[str](), Counter[str](), 0.0
        for local_rank in range(1, RANKS_PER_HOST):
            leave = ends / str(local_rank)
            (found, lasted), left = begin(context, url, options, num_hosts, local_rank, leave, counted)
            with left:
                leave.touch()
            others, others_seconds = others + found, others_seconds + lasted
            ended += counted()
            say(f"{urlsplit(url).scheme}: rank {local_rank} of {num_hosts} hosts: {lasted:.1f} s")
        say("watching renewals")
        time.sleep(watched_seconds)
        renewed = counted()
        (ends / "0").touch()
    num_others = num_hosts * (RANKS_PER_HOST - 1)
    return (first, num_hosts, seconds), (others, num_others, others_seconds), (ended, num_others, 0.0), renewed


def begin(
    context: ForkContext,
    url: str,
    options: Mapping[str, Any],
    num_hosts: int,
    local_rank: int,
    end: Path,
    counted: Counted,
) -> tuple[tuple[Counter[str], float], contextlib.ExitStack]:
    """Let a rank of each host open the entry, all at once; what they asked for, the seconds, and what ends them."""
    barrier = context.Barrier(num_hosts + 1)
    processes = [
        context.Process(
            target=open_entry, args=(url, options, f"host-{number}", local_rank, barrier, str(end)), daemon=True
        )
        for number in range(num_hosts)
    ]
    stack = contextlib.ExitStack()
    stack.enter_context(running(processes))
    barrier.wait(120)
    start = time.perf_counter()
    barrier.wait(120)
    seconds = time.perf_counter() - start
    return (counted(), seconds), stack


def commit(url: str, options: Mapping[str, Any]) -> str:
    """In a process of its own: write a small entry that is kept; its URL."""
    from converter.cache import roots
    from tests.faults.small_entries import KEY, commit_entry

    root = roots.open_root(url, options)
    commit_entry(root, is_kept=True).release_lease()
    return f"{root.url}/{KEY}"


@contextlib.contextmanager
def started_azurite(folder: Path) -> Iterator[tuple[str, dict[str, Any], Counted]]:
    """An empty container, what opens it, and a function that counts the requests since it was called last."""
    from tests.servers.azurite import BlobAccount, start_azurite

    (folder / "azurite").mkdir()
    with start_azurite(folder / "azurite") as azurite, ProxyBeside(azurite.port) as proxy:
        url = azurite.url(azurite.new_container())
        options = {"connection_string": BlobAccount(proxy.port).connection_string}
        yield url, options, lambda: Counter(map(what_azure_does, proxy.requests()))


def what_azure_does(request: Any) -> str:
    """A request in a word or two."""
    if "comp=list" in request.path:
        return "listings"
    name = request.path.partition("?")[0].rpartition("/")[2]
    noun = "leases" if name.startswith("lease-") else name
    return f"{request.method} {noun}"


@contextlib.contextmanager
def started_hdfs(folder: Path) -> Iterator[tuple[str, dict[str, Any], Counted]]:
    """The same of HDFS, whose NameNode counts by itself, some seconds late."""
    from tests.servers.hdfs import start_hdfs

    (folder / "hdfs").mkdir()
    of_datanode = {"SendHeartbeat", "BlockReport", "BlockReceivedAndDeleted", "RegisterDatanode", "VersionRequest"}
    with start_hdfs(folder / "hdfs") as hdfs:
        before: Counter[str] = Counter()

        def counted() -> Counter[str]:
            nonlocal before
            time.sleep(_NAMENODE_COUNTS_SECONDS)
            now = Counter(
                {name: number for name, number in hdfs.num_operations().items()
                 if name not in of_datanode and not name.startswith("Overall")}
            )  # fmt: skip
            found, before = now - before, now
            return found

        yield f"{hdfs.url}/ranks", {}, counted


# --- Planning ---------------------------------------------------------------------------------------------------------


def plan(options: argparse.Namespace) -> None:
    """Plan a shard of a table that no machine holds."""
    num_row_groups = PLANNED_ROW_GROUPS // (100 if options.quick else 1)
    rows = []
    for is_shuffled in (True, False):
        seconds, num_bytes, num_batches = apart(plan_once, num_row_groups, is_shuffled)
        cells = [f"{num_row_groups:,}", f"{PLANNED_ROWS:.0e}", "yes" if is_shuffled else "no"]
        rows.append([*cells, f"{num_batches:,}", f"{seconds:.2f}", f"{num_bytes / MILLION:.0f}"])
    print_table(["row groups", "rows", "shuffled", "batches of the rank", "seconds", "MB at most"], rows)


def plan_once(num_row_groups: int, is_shuffled: bool) -> tuple[float, int, int]:
    """Seconds, bytes beyond what this process had, and batches of one rank."""
    rows = np.full(num_row_groups, PLANNED_ROWS // num_row_groups, np.int64)
    before, peak, is_over = anonymous_bytes(os.getpid()), [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.001):
            peak.append(anonymous_bytes(os.getpid()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    epoch = plan_epoch(
        rows,
        batch_size=BATCH_SIZE,
        window_rows=300_000,
        epoch=3,
        shuffle=Shuffle(seed=1, fingerprint="rows") if is_shuffled else None,
        shard=Shard(index=PLANNED_RANKS // 3, count=PLANNED_RANKS),
    )
    next(epoch.pieces())
    seconds = time.perf_counter() - start
    is_over.set()
    watcher.join()
    return seconds, max(peak) - before, epoch.num_batches


# --- Cold -------------------------------------------------------------------------------------------------------------


def read_all(
    url: str, options: Mapping[str, Any], folder: str, local_rank: int, whole: bool, barrier: Any, queue: Any
) -> None:
    """A rank that reads its part of the rows, or all of them, through copies on this host."""
    of_a_host("host-0", local_rank)
    shard = (0, 1) if whole else (local_rank, RANKS_PER_HOST)
    barrier.wait()
    with (
        converter.open_converter(url, storage_options=options) as opened,
        opened.make_batch_reader(
            batch_size=BATCH_SIZE,
            shuffle=True,
            local_cache_dir=folder,
            cur_shard=shard[0],
            shard_count=shard[1],
            ragged="nested",
        ) as reader,
    ):
        queue.put(sum(len(batch["id"]) for batch in reader))


def cold(options: argparse.Namespace) -> None:
    """Eight ranks of a host that has no copy yet."""
    num_rows = 20_000 if options.quick else 200_000
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        from tests.servers.azurite import BlobAccount, start_azurite

        (Path(folder) / "azurite").mkdir()
        with start_azurite(Path(folder) / "azurite") as azurite, ProxyBeside(azurite.port) as proxy:
            direct = {"connection_string": azurite.connection_string}
            counted = {"connection_string": BlobAccount(proxy.port).connection_string}
            url, num_bytes = apart(write_numbers, azurite.url(azurite.new_container()), direct, num_rows)
            context = forked()
            for whole in (True, False):
                local = Path(folder, f"local-{whole}")
                barrier, queue = context.Barrier(RANKS_PER_HOST), context.SimpleQueue()
                processes = [
                    context.Process(
                        target=read_all, args=(url, counted, str(local), rank, whole, barrier, queue), daemon=True
                    )
                    for rank in range(RANKS_PER_HOST)
                ]
                proxy.requests()
                with running(processes):
                    read = [queue.get() for _ in processes]
                ranges = Counter(
                    (request.path.partition("?")[0], request.range)
                    for request in proxy.requests()
                    if request.method == "GET" and ".parquet" in request.path
                )
                fetched = sum(size_of(asked) * times for (_, asked), times in ranges.items())
                rows.append(
                    [
                        "all rows" if whole else "an eighth",
                        f"{sum(read):,}",
                        f"{num_bytes / MILLION:.1f}",
                        f"{fetched / MILLION:.1f}",
                        f"{fetched / num_bytes:.3f}",
                        str(max(ranges.values())),
                    ]
                )
    head = [
        "each rank reads",
        "rows handed out",
        "MB of the files",
        "MB fetched",
        "ratio",
        "times a range was asked for",
    ]
    print_table(head, rows)


def size_of(asked: str | None) -> int:
    """Bytes of a range such as `bytes=0-9`."""
    assert asked is not None
    first, _, last = asked.removeprefix("bytes=").partition("-")
    return int(last) - int(first) + 1


def write_numbers(url: str, options: Mapping[str, Any], num_rows: int) -> tuple[str, int]:
    """In a process of its own: an entry of numbers that cannot be compressed; its URL and the bytes of its files."""
    rng = np.random.default_rng(0)
    spark = converter.start_local_spark("ranks")
    with tempfile.TemporaryDirectory() as folder:
        import pyarrow as pa
        import pyarrow.parquet as pq

        numbers = pa.FixedSizeListArray.from_arrays(pa.array(rng.random(num_rows * 32, dtype=np.float32)), 32)
        pq.write_table(pa.table({"id": np.arange(num_rows), "x": numbers}), Path(folder, "rows.parquet"))
        made = converter.make_spark_converter(
            spark.read.parquet(folder), cache_dir=url, storage_options=options, delete_on_exit=False
        )
    with made:
        found = made.url, made._manifest.num_bytes
    spark.stop()
    return found


# --- Memory -----------------------------------------------------------------------------------------------------------


def read_part(url: str, local_rank: int, num_epochs: int, barrier: Any, queue: Any) -> None:
    """A rank that reads its part, shuffled, and says what it was told."""
    of_a_host("host-0", local_rank)
    options: dict[str, Any] = {
        "batch_size": BATCH_SIZE, "shuffle": True, "cur_shard": local_rank, "shard_count": RANKS_PER_HOST,
    }  # fmt: skip
    with converter.open_converter(url) as opened, opened.make_batch_reader(**options) as reader:
        queue.put(opened.plan(**options).peak_memory_bytes)
        barrier.wait()
        for _ in range(num_epochs):
            for _batch in reader:
                pass
        barrier.wait()


def memory(options: argparse.Namespace) -> None:
    """Eight ranks of a host, watched together."""
    num_epochs = 1 if options.quick else 3
    with tempfile.TemporaryDirectory() as temporary:
        folder = os.path.join(os.path.abspath(options.data or temporary), "scale-1")
        os.makedirs(folder, exist_ok=True)
        url = apart(make_rows, folder, ["emb"], 1.0)["emb"].url
        context = forked()
        barrier, queue = context.Barrier(RANKS_PER_HOST + 1), context.SimpleQueue()
        ranks = [
            context.Process(target=read_part, args=(url, rank, num_epochs, barrier, queue), daemon=True)
            for rank in range(RANKS_PER_HOST)
        ]
        with running(ranks):
            told = sum(queue.get() for _ in ranks)
            pids = [rank.pid or 0 for rank in ranks]
            before = sum(map(anonymous_bytes, pids))
            barrier.wait()
            private = pages = separate = 0
            while barrier.n_waiting < RANKS_PER_HOST:
                private = max(private, sum(map(anonymous_bytes, pids)) - before)
                shared, own = map(sum, zip(*map(file_bytes, pids), strict=True))
                pages, separate = max(pages, shared), max(separate, own)
                time.sleep(0.05)
            barrier.wait()
    cells = [told, private, pages, separate]
    head = ["ranks", "told, all", "private, all", "pages of files", "pages, if each rank had its own"]
    print_table(head, [[str(RANKS_PER_HOST), *(f"{cell / MILLION:,.0f} MB" for cell in cells)]])


def file_bytes(pid: int) -> tuple[int, int]:
    """A process's part in the pages of files that it shares with others, and all that it has mapped of them."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
        sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest}
    with open(f"/proc/{pid}/status", encoding="ascii") as lines:
        resident = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile"))
    return sizes["Pss_File"], resident


if __name__ == "__main__":
    main()
