#!/usr/bin/env python3
"""How fast elements that are made of several rows arrive, beside plain rows and the peers, as ratios.

    python tests/bench/rows.py                       # all of it, with the peers: some ten minutes on two cores
    python tests/bench/rows.py --quick               # small, without the peers: does it run at all?
    python tests/bench/rows.py --only sequences --without-peers

sequences: 2 M rows sorted by key and time, 10,000 of each of 200 keys, with ten float columns. Sequences are 16 rows of
a key that follow each other, a new one at each row, shuffled, in batches of 256; plain rows are shuffled in batches of
1,024. What is compared is the number of floats that are handed out each second. We read what `make_spark_converter`
wrote, and eight plain Parquet files that each hold an eighth of every key's time, so that sequences go on in the next
file. The peers have the same rows in the form that each needs:

- Petastorm's NGram: Parquet files with its schema. Its sequences do not cross row groups, and in a row group the time
  must not decrease; so a row group holds one key's rows, 1,000 of them: it hands out whole row groups, and those of
  10,000 rows take some ten seconds each. A thread for each core, a buffer of 2,048 sequences, collated to tensors a
  batch at a time.
- tf.data: the columns in memory, or one array of them; windows of as many keys at a time as there are cores, and a
  buffer of 10,000 sequences.
- a torch Dataset: one array in memory, an item is a slice of it; in this process, and in two workers.

views: rows of two sources one after the other and mixed, 2 M of ten floats and 200,000 of float32[512]; rows balanced
by a label of which one in a hundred is rare; and 400,000 lists of log-normal lengths (sigma 1, 4,000 at most), padded,
in buckets and not. All in one process, in turns.

Each way of `sequences` runs in turns (A B C A B C …), each turn in a fresh process, which reads once to be warm and
checks that the first batch holds whole sequences, and then reads for the figures. Medians are compared. "CPU" is that
of all threads and child processes. An epoch that is not over after `--peer-seconds` is left, and counts from behind its
first batch; then notes count sequences as rows.

Petastorm has an environment of its own, made by pip on first use; read.py uses the same. Prints Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import pyarrow as pa
import pyarrow.parquet as pq
import read
from peers_rows import FLOATS, LENGTH, NUM_KEYS
from pyspark.sql import functions as F
from read import Epoch, Goal, Peers, UnavailableError, apart, in_turns, print_ratios, print_table, say

import converter

JOBS_SCRIPT = Path(__file__).with_name("peers_rows.py")
NUM_FILES = 8
NGRAM_ROWS = 1000
"""Rows of Petastorm's row groups at most."""


# --- The jobs ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Way(read.Way):
    """One way to read; its rates count values, and so does its CPU."""

    num_values: int
    """Values of an element."""

    @property
    def rates(self) -> list[float]:
        return [self.num_values * epoch["rows"] / epoch["seconds"] for epoch in self.epochs]

    @property
    def cpu(self) -> float:
        """Median CPU nanoseconds of a value."""
        return statistics.median(1e9 * epoch["cpu_seconds"] / epoch["rows"] / self.num_values for epoch in self.epochs)


@dataclass(slots=True)
class Bench:
    """What every section needs."""

    options: argparse.Namespace
    folder: str
    versions: dict[str, str]
    """Of what each job ran with."""

    _peers: Peers = field(init=False)

    def __post_init__(self) -> None:
        self._peers = Peers(self.options)

    def run(self, name: str, **options: Any) -> list[Epoch]:
        """Do a job in a fresh process."""
        is_peer, is_petastorm = name != "ours", name.startswith("petastorm")
        if self.options.without_peers and is_peer:
            raise UnavailableError("not run: left out by an option")
        variables = {"PYTHONWARNINGS": "ignore", "TF_CPP_MIN_LOG_LEVEL": "2"}
        if not is_petastorm:
            # That of this program, wherever it came from.
            variables["PYTHONPATH"] = os.path.dirname(os.path.dirname(os.path.abspath(converter.__file__)))
        python = self._peers._python("petastorm") if is_petastorm else sys.executable
        max_seconds = self.options.peer_seconds if is_peer else 300.0
        job = {"name": name, "max_seconds": max_seconds, "epochs": 1} | options
        found = self._peers._run(python, job, script=JOBS_SCRIPT, variables=variables)
        if found["epochs"]:
            self.versions[name] = found["versions"]
        return found["epochs"]

    def way(self, name: str, num_rows: int, num_values: int, **options: Any) -> Way:
        run = functools.partial(self.run, name, **options)
        return Way(run=run, num_rows=num_rows, num_values=num_values, warms_itself=True)


def print_values(ways: Mapping[str, Way]) -> None:
    head = ["", "values/s", "from – to", "CPU ns / value", "note"]
    print_table(head, [[name, *way.cells()] for name, way in ways.items()])


# --- Sequences --------------------------------------------------------------------------------------------------------

OURS_ROWS, OURS, OURS_STACKED = "ours, rows", "ours, sequences", "ours, sequences, one stack"
FILES_ROWS, FILES = f"ours, rows, keys in {NUM_FILES} files", f"ours, keys in {NUM_FILES} files"
NGRAM = "Petastorm, NGram"
TF_DATA, TF_ARRAY = "tf.data, windows", "tf.data, windows of one array"
ARRAY, ARRAY_WORKERS = "torch Dataset, num_workers=0", "torch Dataset, num_workers=2"


def write_sequences(folder: str, rows_per_key: int) -> str:
    """Write the rows in all forms; return the URL of our cache entry."""
    num_rows = NUM_KEYS * rows_per_key
    spark = converter.start_local_spark("rows", conf={"spark.driver.memory": "4g"})
    numbers = [F.rand(seed=column).cast("float").alias(name) for column, name in enumerate(FLOATS)]
    df = spark.range(0, num_rows, 1, 4).select(
        F.expr(f"int(id div {rows_per_key})").alias("key"),
        (F.col("id") % rows_per_key).alias("time"),
        # What the jobs check.
        F.col("id").cast("float").alias("x0"),
        *numbers[1:],
    )
    made = converter.make_spark_converter(
        df, cache_dir=f"{folder}/cache", cache_key="sequences", delete_on_exit=False, progress=False
    )
    with made, made.make_batch_reader(batch_size=num_rows) as reader:
        columns = next(iter(reader))
    spark.stop()
    table = pa.table({name: columns[name] for name in ("key", "time", *FLOATS)})
    np.save(f"{folder}/rows.npy", np.stack([columns[name] for name in FLOATS], axis=1))
    for form in ("petastorm", "files"):
        os.mkdir(f"{folder}/{form}")
    row_group_size = min(NGRAM_ROWS, rows_per_key)
    pq.write_table(table, f"{folder}/petastorm/rows.parquet", row_group_size=row_group_size, use_dictionary=False)
    parts = columns["time"] * NUM_FILES // rows_per_key
    for part in range(NUM_FILES):
        pq.write_table(
            table.filter(pa.array(parts == part)), f"{folder}/files/part-{part}.parquet", use_dictionary=["key"]
        )
    return made.url


def sequences(bench: Bench) -> None:
    """Sequences of 16 rows of ten floats, shuffled, from 2 M rows of 200 keys."""
    rows_per_key = 250 if bench.options.quick else 10_000
    say("writing the rows")
    url = apart(write_sequences, bench.folder, rows_per_key)
    # What was just written is on its way to the disk for a while.
    os.sync()
    num_rows, num_sequences = NUM_KEYS * rows_per_key, NUM_KEYS * (rows_per_key - LENGTH + 1)
    folders = {name: f"{bench.folder}/{name}" for name in ("files", "petastorm")}
    shared = {"rows_per_key": rows_per_key}

    def own(path: str, *, is_rows: bool = False, is_stacked: bool = False) -> Way:
        options = shared | {"path": path, "is_rows": is_rows, "is_stacked": is_stacked, "is_parquet": path != url}
        num_elements, length = (num_rows, 1) if is_rows else (num_sequences, LENGTH)
        return bench.way("ours", num_elements, length * len(FLOATS), **options)

    def in_memory(name: str, **options: Any) -> Way:
        array = {"path": f"{bench.folder}/rows.npy"}
        return bench.way(name, num_sequences, LENGTH * len(FLOATS), **shared | array | options)

    def ngrams() -> list[Epoch]:
        job = shared | {"path": folders["petastorm"]}
        if not os.path.exists(f"{folders['petastorm']}/_common_metadata"):
            bench.run("petastorm_describe", **job)
        return bench.run("petastorm", **job)

    group_rows = min(NGRAM_ROWS, rows_per_key)
    num_ngrams = num_rows // group_rows * (group_rows - LENGTH + 1)
    ways = {
        OURS_ROWS: own(url, is_rows=True),
        OURS: own(url),
        OURS_STACKED: own(url, is_stacked=True),
        FILES_ROWS: own(folders["files"], is_rows=True),
        FILES: own(folders["files"]),
        NGRAM: Way(run=ngrams, num_rows=num_ngrams, num_values=LENGTH * len(FLOATS), warms_itself=True),
        TF_DATA: in_memory("tf_data", is_stacked=False),
        TF_ARRAY: in_memory("tf_data", is_stacked=True),
        ARRAY: in_memory("array", num_workers=0),
        ARRAY_WORKERS: in_memory("array", num_workers=2),
    }
    in_turns(ways, bench.options.turns)
    print_values(ways)
    best = max((ARRAY, ARRAY_WORKERS), key=lambda name: statistics.median(ways[name].rates or [0.0]))
    goals = [
        Goal(OURS, OURS_ROWS, 0.5),
        Goal(OURS_STACKED, OURS_ROWS, 0.5),
        Goal(FILES, OURS_ROWS, 0.5),
        Goal(FILES, FILES_ROWS),
        Goal(OURS, NGRAM, 100),
        Goal(OURS, TF_DATA, 20),
        Goal(OURS_STACKED, TF_ARRAY, 20),
        Goal(OURS, best, 5),
        Goal(OURS_STACKED, best, 5),
    ]
    print_ratios(ways, goals)


# --- Views ------------------------------------------------------------------------------------------------------------


def measure_views(folder: str, scale: float, turns: int) -> dict[str, dict[str, list[float]]]:
    """For each table the figures of its ways: rows of a second, or padded values beside true ones."""
    generator = np.random.default_rng(0)
    num_rows, num_wide, num_lists = (int(scale * rows) for rows in (2_000_000, 200_000, 400_000))
    os.mkdir(f"{folder}/views")
    lengths = np.minimum(np.exp(generator.normal(3.5, 1, num_lists)).astype(np.int64) + 1, 4000)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    tables = {
        "tab": {"id": np.arange(num_rows), "rare": (generator.random(num_rows) < 0.01)}
        | {name: generator.random(num_rows, np.float32) for name in FLOATS},
        "emb": {
            "id": np.arange(num_wide),
            "x": pa.FixedSizeListArray.from_arrays(generator.random(num_wide * 512, np.float32), 512),
        },
        "lists": {
            "id": np.arange(num_lists),
            "x": pa.ListArray.from_arrays(
                pa.array(offsets, pa.int32()), pa.array(np.arange(offsets[-1], dtype=np.int32))
            ),
        },
    }
    for name, columns in tables.items():
        # One row of float32[512] is 2 kB.
        size = 10_000 if name == "emb" else 100_000
        path = f"{folder}/views/{name}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=size, compression="none", use_dictionary=False)
    made = {name: converter.make_parquet_converter(f"{folder}/views/{name}.parquet") for name in tables}
    found: dict[str, dict[str, list[float]]] = {}

    def measure(title: str, ways: Mapping[str, Callable[[], float]]) -> None:
        found[title] = {name: [] for name in ways}
        for turn in range(turns + 1):
            for name, run in ways.items():
                figure = run()
                if turn:
                    found[title][name].append(figure)

    with contextlib.ExitStack() as opened:

        def rows_of(*converters: Any, **options: Any) -> Callable[[], float]:
            given = {"batch_size": 1024, "shuffle": True, **options}
            loaders = [opened.enter_context(part.make_torch_dataloader(**given)) for part in converters]

            def run() -> float:
                start, rows = time.perf_counter(), 0
                for loader in loaders:
                    for batch in loader:
                        rows += len(batch[next(iter(batch))])
                return rows / (time.perf_counter() - start)

            return run

        for name, columns in (("tab", FLOATS), ("emb", ["x"])):
            half = len(made[name]) // 2
            parts = {"a": made[name].where([("id", "<", half)]), "b": made[name].where([("id", ">=", half)])}
            some = {"a": 0.9, "b": 0.1}
            measure(
                f"mix, {name}",
                {
                    "one after the other": rows_of(*parts.values(), columns=columns),
                    "mixed, half and half": rows_of(converter.mix(parts), columns=columns),
                    "mixed, nine of ten": rows_of(converter.mix(parts, some, stop=2 * half), columns=columns),
                },
            )
        measure(
            "balance, tab",
            {
                "all rows": rows_of(made["tab"], columns=[*FLOATS, "rare"]),
                "balanced": rows_of(made["tab"].balance("rare"), columns=[*FLOATS, "rare"]),
            },
        )

        def padding_of(**options: Any) -> Callable[[], float]:
            loader = opened.enter_context(
                made["lists"].make_torch_dataloader(batch_size=256, shuffle=True, ragged="pad", **options)
            )

            def run() -> float:
                padded = true = 0
                for batch in loader:
                    padded, true = padded + batch["x"].numel(), true + int(batch["x__length"].sum())
                return padded / true

            return run

        measure(
            "padded values / true ones, lists", {"as they come": padding_of(), "bucket_by": padding_of(bucket_by="x")}
        )
        lists = {"batch_size": 256, "ragged": "pad"}
        measure(
            "rows of lists",
            {
                "as they come": rows_of(made["lists"], **lists),
                "bucket_by": rows_of(made["lists"], bucket_by="x", **lists),
            },
        )
    return found


def views(bench: Bench) -> None:
    """Mixed, balanced and bucketed rows beside plain ones: rows of a second, and what padding costs."""
    scale = 0.02 if bench.options.quick else 1.0
    goals = {"mixed, half and half": "≥ 0.8", "bucket_by": ""}
    for title, ways in apart(measure_views, bench.folder, scale, bench.options.turns).items():
        first = statistics.median(next(iter(ways.values())))
        is_padding = title.startswith("padded")
        lines = []
        for name, figures in ways.items():
            median = statistics.median(figures)
            extremes = (median, min(figures), max(figures))
            shown = [f"{figure:.2f}" if is_padding else f"{figure / 1e6:.2f} M" for figure in extremes]
            goal = "≤ 1.15" if is_padding and name == "bucket_by" else goals.get(name, "")
            lines.append([name, shown[0], f"{shown[1]} – {shown[2]}", f"{median / first:.2f}", goal])
        print_table([title, "median", "from – to", "beside the first", "goal"], lines)


SECTIONS: dict[str, Callable[[Bench], None]] = {"sequences": sequences, "views": views}
"""Each measures and prints its tables; the folder that it is given is its own."""


def main(arguments: Any = None) -> None:
    """Run everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", choices=SECTIONS, metavar="NAME", help=f"of {', '.join(SECTIONS)} (default: all)")
    add("--turns", type=int, help="turns of each way (default: 3)")
    add("--quick", action="store_true", help="a fortieth of the rows, one turn, no peers unless --peers says where")
    add("--peers", help="where the environments are (default: in the user's cache folder)")
    add("--without-peers", action="store_true", help="leave the peers out")
    add("--peer-seconds", type=float, default=30.0, help="most seconds of a peer's epoch (default: %(default)s)")
    add("--petastorm-python", help=f"a Python of Petastorm's time: {', '.join(read.PETASTORM_PYTHONS)}")
    options = parser.parse_args(arguments)
    options.turns = options.turns or (1 if options.quick else 3)
    options.without_peers = options.without_peers or (options.quick and options.peers is None)
    options.peers = options.peers or platformdirs.user_cache_path("spark-tensor-converter-bench")
    print(f"{read.machine()}, {options.turns} turns{', a fortieth of the rows' * options.quick}\n", flush=True)
    versions: dict[str, str] = {}
    for name in [name for name in SECTIONS if name in (options.only or SECTIONS)]:
        before = os.getloadavg()[0]
        print(f"### {name}: {SECTIONS[name].__doc__}\n", flush=True)
        with tempfile.TemporaryDirectory(prefix=name) as folder:
            SECTIONS[name](Bench(options, folder, versions))
        print(f"Load of the machine: {before:.1f} before, {os.getloadavg()[0]:.1f} after.\n", flush=True)
    for name, found in versions.items():
        print(f"{name} ran with {found}.")


if __name__ == "__main__":
    main()
