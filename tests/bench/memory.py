#!/usr/bin/env python3
"""The memory that `plan()` tells, beside what reading reaches, epoch after epoch.

    python tests/bench/memory.py --data DIR                        # every way to read: some hours for 400 epochs
    python tests/bench/memory.py --data DIR --epochs 40 --only text hdfs

Each line is a process of its own, watched from outside: its anonymous memory beyond what it had when the loader was
made, every 3 ms; with worker processes that of the one that has most. Arrow's idle pages are part of it. The first
tenth of the epochs does not count for the slope. A slow consumer sleeps 20 ms at every fiftieth batch.

emb and tab are read.py's rows, which Spark makes where DIR has none: a cache entry, and the same as Spark's own
Parquet. The other rows are made by pyarrow and Pillow. HDFS and Azurite are those of the tests. Prints Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from read import BATCH_SIZE, apart, machine, make_rows, print_table, say, slope_of

import converter

MAKERS = {"torch": "make_torch_dataloader", "numpy": "make_batch_reader", "tensorflow": "make_tf_dataset"}
MOST_TOLD, MOST_SLOPE_MB = 1.5, 0.05
"""The goals: told divided by reached, in the median line, and what an epoch may add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """One way to read."""

    rows: str
    """The name of the rows."""

    kind: str = "parquet"
    """`cache`, or `parquet` for files that somebody else wrote."""

    framework: str = "numpy"
    consumer: str = "fast"
    view: str = ""
    """A method of the converter, called before: `where`, `sequences`, `balance`, or `mix` with itself."""

    options: dict[str, Any] = field(default_factory=lambda: {"shuffle": True})


SHUFFLED = {"shuffle": True}
EMB, TAB = functools.partial(Situation, rows="emb"), functools.partial(Situation, rows="tab")
SITUATIONS: dict[str, Situation] = {
    "emb, torch": EMB(kind="cache", framework="torch"),
    "emb, torch, slow consumer": EMB(kind="cache", framework="torch", consumer="slow"),
    "emb, NumPy": EMB(kind="cache"),
    "emb, NumPy, in order": EMB(kind="cache", options={}),
    "emb, TensorFlow": EMB(kind="cache", framework="tensorflow"),
    "emb, two worker processes": EMB(kind="cache", framework="torch", options=SHUFFLED | {"num_workers": 2}),
    "emb, filtered while read": EMB(kind="cache", options=SHUFFLED | {"filters": [["label", "<", 300]]}),
    "emb, where": EMB(kind="cache", view="where"),
    "emb, balanced": EMB(kind="cache", view="balance"),
    "emb, mixed with itself": EMB(kind="cache", view="mix"),
    "emb, a shard of four": EMB(kind="cache", options=SHUFFLED | {"cur_shard": 1, "shard_count": 4}),
    "emb, Spark's Parquet": EMB(),
    "emb, Spark's Parquet, in order": EMB(options={}),
    "emb, Spark's Parquet, slow consumer": EMB(consumer="slow"),
    "tab, torch": TAB(kind="cache", framework="torch"),
    "tab, torch, slow consumer": TAB(kind="cache", framework="torch", consumer="slow"),
    "tab, NumPy": TAB(kind="cache"),
    "tab, one stack": TAB(kind="cache", framework="torch", options=SHUFFLED | {"stack": "floats"}),
    "tab, TensorFlow": TAB(kind="cache", framework="tensorflow"),
    "tab, Spark's Parquet": TAB(),
    "tab, sequences of 24": TAB(kind="cache", view="sequences"),
    "doubles as floats": Situation(rows="doubles"),
    "nulls as masks": Situation(rows="nulls", options=SHUFFLED | {"nulls": "mask"}),
    "text": Situation(rows="text"),
    "ragged, nested": Situation(rows="ragged", options=SHUFFLED | {"ragged": "nested"}),
    "ragged, padded": Situation(rows="ragged", options=SHUFFLED | {"ragged": "pad"}),
    "ragged, TensorFlow": Situation(rows="ragged", framework="tensorflow", options=SHUFFLED | {"ragged": "nested"}),
    "pictures, decoded": Situation(rows="pictures", framework="torch"),
    "photographs, decoded": Situation(rows="photographs", options=SHUFFLED | {"ragged": "nested", "batch_size": 16}),
    "phrases": Situation(rows="phrases"),
    "tokens, nested": Situation(rows="tokens", options=SHUFFLED | {"ragged": "nested"}),
    "text, mixed with itself": Situation(rows="text", view="mix"),
    "few of many columns, Azurite": Situation(
        rows="wide on Azurite", options=SHUFFLED | {"columns": [f"x{number}" for number in range(0, 200, 20)]}
    ),
    "hdfs": Situation(rows="vectors on HDFS"),
    "azurite": Situation(rows="vectors on Azurite"),
    "azurite, slow consumer": Situation(rows="vectors on Azurite", consumer="slow"),
    "azurite, local copies": Situation(rows="vectors on Azurite", options=SHUFFLED | {"local_cache_dir": "made"}),
}


# --- The rows ---------------------------------------------------------------------------------------------------------


def doubles(random_numbers: np.random.Generator) -> pa.Table:
    values = random_numbers.normal(size=(200_000, 64))
    lists = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 64).cast(pa.list_(pa.float64()))
    return pa.table({"id": np.arange(len(values)), "x": lists})


def nulls(random_numbers: np.random.Generator) -> pa.Table:
    count = 1_000_000
    columns: dict[str, Any] = {"id": np.arange(count)}
    for number in range(8):
        is_null = random_numbers.random(count) < 0.1
        columns[f"x{number}"] = pa.array(random_numbers.random(count, np.float32), mask=is_null)
    return pa.table(columns)


def text(random_numbers: np.random.Generator) -> pa.Table:
    lengths = random_numbers.integers(20, 300, 300_000)
    letters = random_numbers.integers(97, 123, int(lengths.sum()), dtype=np.uint8).tobytes()
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    column = pa.StringArray.from_buffers(len(lengths), pa.py_buffer(offsets), pa.py_buffer(letters))
    return pa.table({"id": np.arange(len(lengths)), "x": column})


def ragged(random_numbers: np.random.Generator) -> pa.Table:
    lengths = random_numbers.integers(0, 200, 200_000)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    values = random_numbers.random(int(lengths.sum()), np.float32)
    return pa.table({"id": np.arange(len(lengths)), "x": pa.ListArray.from_arrays(offsets, values)})


def pictures(random_numbers: np.random.Generator) -> pa.Table:
    from PIL import Image

    encoded = []
    for _ in range(2_000):
        small = random_numbers.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(small).resize((128, 128)).save(file, "JPEG")
        encoded.append(file.getvalue())
    return pa.table({"id": np.arange(20_000), "x": pa.array(encoded * 10, pa.binary())})


def photographs(random_numbers: np.random.Generator) -> pa.Table:
    """Pictures of different sizes: a decoder without a size."""
    from PIL import Image

    encoded = []
    for _ in range(60):
        height, width = (int(side) for side in random_numbers.integers(600, 1800, 2))
        small = random_numbers.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(small).resize((width, height)).save(file, "JPEG")
        encoded.append(file.getvalue())
    return pa.table({"id": np.arange(600), "x": pa.array(encoded * 10, pa.binary())})


def phrases(random_numbers: np.random.Generator) -> pa.Table:
    """Texts that come again and again, so that a dictionary stores them in a byte each."""
    known = [bytes(random_numbers.integers(97, 123, int(size), dtype=np.uint8)).decode() for size in range(300, 500)]
    numbers = random_numbers.integers(0, len(known), 2_000_000).astype(np.int32)
    column = pa.DictionaryArray.from_arrays(pa.array(numbers), pa.array(known)).cast(pa.large_string())
    return pa.table({"id": np.arange(len(numbers)), "x": column})


def tokens(random_numbers: np.random.Generator) -> pa.Table:
    """Lists of few different numbers, which a dictionary stores in a byte each."""
    lengths = random_numbers.integers(0, 200, 400_000)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    values = random_numbers.integers(0, 200, int(lengths.sum()))
    return pa.table({"id": np.arange(len(lengths)), "x": pa.ListArray.from_arrays(offsets, values)})


def wide(random_numbers: np.random.Generator) -> pa.Table:
    """Many columns, of which few are read."""
    return pa.table({f"x{number}": random_numbers.random(400_000, np.float32) for number in range(200)})


def vectors(random_numbers: np.random.Generator) -> pa.Table:
    values = random_numbers.random((60_000, 256), np.float32)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 256).cast(pa.list_(pa.float32()))
    return pa.table({"id": np.arange(len(values)), "x": lists})


TABLES: dict[str, Callable[[np.random.Generator], pa.Table]] = {
    "doubles": doubles, "nulls": nulls, "text": text, "ragged": ragged, "pictures": pictures, "vectors": vectors,
    "photographs": photographs, "phrases": phrases, "tokens": tokens, "wide": wide,
}  # fmt: skip


def written(folder: Path, name: str) -> str:
    """A folder of four Parquet files, as pyarrow writes them; those of an earlier run are taken again."""
    found = folder / f"memory-{name}"
    if not found.exists():
        unfinished = folder / f"memory-{name}-unfinished"
        unfinished.mkdir(exist_ok=True)
        table = TABLES[name](np.random.default_rng(7))
        for part in range(4):
            size = table.num_rows // 4
            pq.write_table(table.slice(part * size, size), unfinished / f"{part}.parquet", row_group_size=size // 4)
        unfinished.rename(found)
    return str(found)


def uploaded(source: str, url: str, options: dict[str, Any]) -> str:
    """The same files in a store."""
    import fsspec

    for path in sorted(Path(source).iterdir()):
        with fsspec.open(f"{url}/{path.name}", "wb", **options) as file:
            file.write(path.read_bytes())
    return url


@contextlib.contextmanager
def placed(folder: Path, rows: str, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where rows lie, and what opens them."""
    name, _, store = rows.partition(" on ")
    if name in ("emb", "tab"):
        scaled = folder / "scale-1"
        scaled.mkdir(exist_ok=True)
        made = apart(make_rows, str(scaled), [name], 1.0)[name]
        yield (made.url if kind == "cache" else made.parquet), {}
    elif not store:
        yield written(folder, name), {}
    else:
        # The servers are those of the tests, which stand two folders above.
        sys.path.insert(0, str(Path(__file__).parents[2]))
        source = written(folder, name)
        with tempfile.TemporaryDirectory() as temporary:
            if store == "HDFS":
                from tests.servers.hdfs import start_hdfs

                with start_hdfs(Path(temporary)) as hdfs:
                    yield apart(uploaded, source, f"{hdfs.url}/rows", {}), {}
            else:
                from tests.servers.azurite import start_azurite

                with start_azurite(Path(temporary)) as azurite:
                    options = {"connection_string": azurite.connection_string}
                    yield apart(uploaded, source, azurite.url(azurite.new_container()), options), options


# --- The reader -------------------------------------------------------------------------------------------------------


def read(situation: Situation, url: str, storage_options: dict[str, Any], num_epochs: int, folder: str) -> None:
    """Read, and say on stdout when each epoch is over."""
    os.nice(19)
    opened: Any
    if situation.kind == "cache":
        opened = converter.open_converter(url, storage_options=storage_options)
    else:
        pictures = {"pictures": converter.Image(size=(128, 128)), "photographs": converter.Image()}
        decode = {"x": pictures[situation.rows]} if situation.rows in pictures else None
        opened = converter.make_parquet_converter(url, storage_options=storage_options, decode=decode)
    viewed = view(opened, situation.view)
    options: dict[str, Any] = {"batch_size": BATCH_SIZE} | situation.options
    if options.get("stack") == "floats":
        options["stack"] = {"x": [name for name in viewed.schema.names if viewed.schema[name].dtype == "float32"]}
    if "local_cache_dir" in options:
        options["local_cache_dir"] = folder
    if "filters" in options:
        options["filters"] = [tuple(one) for one in options["filters"]]
    planned = {name: value for name, value in options.items() if name != "num_workers"}
    with opened, getattr(viewed, MAKERS[situation.framework])(**options) as loader:
        print(viewed.plan(**planned).peak_memory_bytes, flush=True)
        sys.stdin.readline()
        for _ in range(num_epochs):
            for number, _batch in enumerate(loader):
                if situation.consumer == "slow" and number % 50 == random.randrange(50):
                    time.sleep(0.02)
            print("over", flush=True)


def view(opened: Any, name: str) -> Any:
    """What is read of a converter."""
    if name == "where":
        return opened.where([("label", "<", 300)])
    if name == "balance":
        return opened.balance("label")
    if name == "sequences":
        return opened.sequences(24, stride=24)
    if name == "mix":
        return converter.mix({"one": opened, "other": opened})
    return opened


# --- The watcher ------------------------------------------------------------------------------------------------------


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that no file stands behind; 0 once it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="ascii") as status:
        return next((int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon")), 0)
    return 0


def children_of(pid: int) -> list[int]:
    """The worker processes of a reader, also those of its fork server."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *children_of(child)]
    return found


def watch(job: dict[str, Any]) -> dict[str, Any]:
    """What such a reader tells, and the most memory of each of its epochs."""
    command = [sys.executable, __file__, "--child", json.dumps(job)]
    has_workers = "num_workers" in job["options"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        told, before = int(child.stdout.readline()), anonymous_bytes(child.pid)
        peaks, lines, is_over = [0], child.stdout, threading.Event()

        def listen() -> None:
            for _ in lines:
                peaks.append(0)
            is_over.set()

        listener = threading.Thread(target=listen)
        listener.start()
        child.stdin.write("\n")
        child.stdin.flush()
        # A worker process has what its parent had, as it is forked or makes the same imports.
        while not is_over.wait(0.003):
            pids = [child.pid, *(children_of(child.pid) if has_workers else [])]
            peaks[-1] = max(peaks[-1], max(map(anonymous_bytes, pids)) - before)
        listener.join()
    if child.returncode:
        raise SystemExit(f"the reader ended with {child.returncode}")
    return {"told": told, "peaks": peaks[:-1]}


def main() -> None:
    """Watch each way to read and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=400)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="ways whose name begins with one of these")
    parser.add_argument("--data", help="where rows are kept and taken from again (default: nowhere)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        job = json.loads(options.child)
        situation = Situation(**{name: job[name] for name in Situation.__slots__})
        read(situation, job["url"], job["storage_options"], job["epochs"], job["folder"])
        return
    wanted = {
        name: situation
        for name, situation in SITUATIONS.items()
        if options.only is None or name.startswith(tuple(options.only))
    }
    print(f"{machine()}, {options.epochs} epochs\n", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.data or temporary).absolute()
        folder.mkdir(exist_ok=True)
        table, ratios = [], []
        for name, situation in wanted.items():
            say(name)
            with placed(folder, situation.rows, situation.kind) as (url, storage_options):
                copies = tempfile.mkdtemp(dir=temporary)
                job = {one: getattr(situation, one) for one in Situation.__slots__}
                job |= {"url": url, "storage_options": storage_options, "epochs": options.epochs, "folder": copies}
                found = watch(job)
            peaks = [peak / 1e6 for peak in found["peaks"]]
            told, most, median = found["told"] / 1e6, max(peaks), statistics.median(peaks)
            slope = slope_of(peaks[len(peaks) // 10 :])
            ratios.append(told / most)
            cells = [name, f"{told:.0f}", f"{most:.0f}", f"{median:.0f}", f"{told / most:.2f}", f"{slope:+.3f}"]
            table.append([*cells, "yes" if most <= told else "NO", "yes" if abs(slope) <= MOST_SLOPE_MB else "NO"])
            say("\t".join(table[-1]))
        head = ["", "told MB", "most MB", "median epoch's most MB", "told / most", "MB more each epoch", "kept", "flat"]
        print_table(head, table)
        print(f"told / most, in the median line: {statistics.median(ratios):.2f} (goal: at most {MOST_TOLD}).")


if __name__ == "__main__":
    main()
