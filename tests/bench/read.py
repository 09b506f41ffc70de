#!/usr/bin/env python3
"""How fast the cache is read beside what the machine can do, a hand-written loop and the peers, in one run, as ratios.

    python tests/bench/read.py                         # all of it, with the peers: an hour or more on two cores
    python tests/bench/read.py --quick                 # small, without the peers: does it run at all?
    python tests/bench/read.py --only tab emb --data DIR
    python tests/bench/read.py --only stores           # HDFS and Azurite: stores.py says what is measured there
    python tests/bench/read.py --only delta            # Delta tables: delta.py says so

Rows: tab = 2 M of a long and 40 floats, emb = 200 k of a long, a float[512] and a label, img = 20 k of a long and
10 kB of binary, ragged = 500 k of a long and 0 to 63 floats. We read what `make_spark_converter` wrote; the others, and
`make_parquet_converter`, what `df.write.parquet` wrote of the same rows. Batches have 1024 rows, and one element of
each of their tensors is read. The ways of a table run in turns (A B C A B C …) after one epoch of each that does not
count, and medians are compared. "CPU" is that of all threads and child processes. An epoch that did not hand out every
row is left out, and said.

The limit decodes windows of about 48 MB on two threads and gathers each column once, into memory that is warm, by a
permutation made before; it makes no batches. "Limit, joined" reads row group by row group, as one must who shuffles
row groups across files, and joins them before it gathers. The plain limit copies where the limit gathers.

Peers run in environments of their own, made by pip on first use (some 18 GB with PyTorch's default builds), each turn
in a fresh process that warms up first: so an idle Ray costs the others nothing. Prints Markdown.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import platform
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import platformdirs
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pyspark
import torch
from peers_read import timed_epoch, touch
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from write import frames

import converter
from converter.plan import DEFAULT_WINDOW_BYTES

BATCH_SIZE = 1024
FLOATS = [f"f{column}" for column in range(40)]
STACK: dict[str, Any] = {"stack": {"x": FLOATS}, "columns": ["id", "x"]}
LIMIT_WINDOW_BYTES = 48 << 20
PEERS_SCRIPT = Path(__file__).with_name("peers_read.py")
PETASTORM_PYTHONS = ("3.10", "3.11", "3.9")
# What Petastorm 0.13.1 still runs with: it asks for an old setuptools, and imports names that newer pyarrow lost.
_WITH_PETASTORM = ("petastorm==0.13.1", "pyarrow==14.0.2", "numpy<2", "pandas<2.3", "pyspark==3.5.*")
# The same as ours, so that only the peer differs.
_WITH_OURS = (f"torch=={torch.__version__.partition('+')[0]}", f"numpy=={np.__version__}", f"pyarrow=={pa.__version__}")
REQUIREMENTS = {
    "petastorm": [*_WITH_PETASTORM, "torch==2.7.1", "setuptools<70"],
    "petastorm_tf": [*_WITH_PETASTORM, "tensorflow-cpu==2.21.0", "setuptools<70"],
    # ray.data imports pydantic, which its extra does not bring; read_delta asks deltalake for the files.
    "ray": ["ray[data]==2.60.0", "pydantic", "deltalake==1.6.6", *_WITH_OURS],
    # It asks for a deltalake of any age, but none since 1.0 has what it calls.
    "deltatorch": ["deltatorch==0.0.3", "deltalake==0.25.5", "pandas", *_WITH_OURS],
}
TITLES = {
    "petastorm": "Petastorm",
    "petastorm_tf": "Petastorm in TensorFlow",
    "ray": "Ray Data",
    "deltatorch": "DeltaTorch",
}
# What a user's shell may say about another Python or another Spark.
_SCRUBBED = ("PYTHONHOME", "PYTHONPATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_HOME", "VIRTUAL_ENV")

Epoch = dict[str, Any]
T = TypeVar("T")


class UnavailableError(Exception):
    """Something that is measured is not there; the text says why, and stands in the table."""


# --- The rows ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Some rows on disk, written both ways."""

    num_rows: int
    url: str
    """Our cache entry."""

    parquet: str | None
    """What `df.write.parquet` made of the same rows, where it is needed."""

    @property
    def folder(self) -> str:
        return self.url.removeprefix("file://")


@dataclass(slots=True, kw_only=True)
class Recipes:
    """How each set of rows is made; `make` runs in a process of its own, so that no JVM lives beside what is timed."""

    spark: SparkSession
    folder: str
    scale: float

    def make(self, name: str) -> Rows:
        kind, _, count = name.partition("-")
        recipe = getattr(self, f"_{kind}")
        df, options = recipe(int(count)) if count else recipe()
        made = converter.make_spark_converter(
            df,
            cache_dir=f"{self.folder}/cache",
            cache_key=name,
            delete_on_exit=False,
            progress=False,
            **options,
        )
        with made:
            parquet = f"{self.folder}/source/{name}"
            return Rows(
                num_rows=len(made), url=made.url, parquet=parquet if os.path.exists(f"{parquet}/_SUCCESS") else None
            )

    def _source(self, name: str) -> DataFrame:
        source = f"{self.folder}/source"
        # The three of them are written together.
        if not os.path.exists(f"{source}/img/_SUCCESS"):
            shutil.rmtree(source, ignore_errors=True)
            frames(self.spark, source, self.scale)
        return self.spark.read.parquet(f"{source}/{name}")

    def _tab(self) -> tuple[DataFrame, dict[str, Any]]:
        return self._source("tab"), {}

    def _emb(self) -> tuple[DataFrame, dict[str, Any]]:
        return self._source("emb"), {}

    def _img(self) -> tuple[DataFrame, dict[str, Any]]:
        return self._source("img"), {}

    def _ragged(self) -> tuple[DataFrame, dict[str, Any]]:
        numbers = F.array(*[F.rand(seed=element).cast("float") for element in range(63)])
        length = F.pmod(F.hash("id"), F.lit(64))
        df = self.spark.range(0, int(500_000 * self.scale), 1, 4).select(
            "id", F.slice(numbers, F.lit(1), length).alias("numbers")
        )
        path = f"{self.folder}/source/ragged"
        df.write.mode("overwrite").parquet(path)
        return self.spark.read.parquet(path), {}

    def _wide(self) -> tuple[DataFrame, dict[str, Any]]:
        columns = [F.rand(seed=column).cast("float").alias(f"f{column}") for column in range(1000)]
        return self.spark.range(0, int(20_000 * self.scale), 1, 4).select(*columns), {}

    def _tiny(self) -> tuple[DataFrame, dict[str, Any]]:
        few = self._source("tab").where(F.col("id") < int(200_000 * self.scale))
        return few, {"row_group_bytes": 1000 * (8 + 4 * len(FLOATS))}

    def _huge(self) -> tuple[DataFrame, dict[str, Any]]:
        return self._source("tab"), {"row_group_bytes": 128 << 20}

    def _files(self, count: int) -> tuple[DataFrame, dict[str, Any]]:
        return self._source("tab").repartition(count), {}

    def _times(self, count: int) -> tuple[DataFrame, dict[str, Any]]:
        """The rows of tab so many times over."""
        tab = self._source("tab")
        return functools.reduce(DataFrame.union, [tab] * count), {}

    def _sorted(self) -> tuple[DataFrame, dict[str, Any]]:
        half = int(2_000_000 * self.scale) // 2
        label = (F.col("id") >= half).cast("int").alias("label")
        return self._source("tab").orderBy("id").select(label, *FLOATS), {}

    def _mixed(self) -> tuple[DataFrame, dict[str, Any]]:
        return self._sorted()[0], {"shuffle_rows_seed": 7}


def make_rows(folder: str, names: Sequence[str], scale: float) -> dict[str, Rows]:
    """All the named rows; those that an earlier run left in `folder` are taken as they are."""
    spark = None
    found = {}
    for name in names:
        known = Path(folder, f"{name}.json")
        if not known.exists():
            if spark is None:
                spark = converter.start_local_spark("bench", conf={"spark.driver.memory": "4g"})
            begin = time.perf_counter()
            rows = Recipes(spark=spark, folder=folder, scale=scale).make(name)
            known.write_text(json.dumps({"num_rows": rows.num_rows, "url": rows.url, "parquet": rows.parquet}))
            say(f"made {name} in {time.perf_counter() - begin:.0f} s")
        found[name] = Rows(**json.loads(known.read_text()))
    if spark is not None:
        spark.stop()
    return found


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """What a function returns in a fresh process that ends with it."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def say(text: str) -> None:
    """Progress, beside the tables."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


# --- The clock --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Way:
    """One way to read the rows."""

    run: Callable[[], list[Epoch]]
    num_rows: int
    warms_itself: bool = False
    epochs: list[Epoch] = field(default_factory=list)
    """Those that count: whole ones, and those that were cut at the time limit."""

    wrong_rows: list[int] = field(default_factory=list)
    """How many rows those epochs had that ended by themselves with another number than there are."""

    problem: str = ""

    @property
    def rates(self) -> list[float]:
        return [epoch["rows"] / epoch["seconds"] for epoch in self.epochs]

    @property
    def rate(self) -> float:
        """Median rows a second."""
        return statistics.median(self.rates)

    @property
    def cpu(self) -> float:
        """Median CPU seconds of a million rows."""
        return statistics.median(1e6 * epoch["cpu_seconds"] / epoch["rows"] for epoch in self.epochs)

    def take_turn(self, *, counts: bool) -> None:
        if self.problem or (self.warms_itself and not counts):
            return
        try:
            epochs = self.run()
        except UnavailableError as error:
            # It may have taken minutes to fail, so it gets no further turn; what it did before counts.
            self.problem = str(error)
            return
        if counts:
            whole = [epoch for epoch in epochs if epoch["rows"] == self.num_rows or epoch.get("is_cut")]
            self.epochs += [epoch for epoch in whole if epoch["rows"]]
            self.wrong_rows += [epoch["rows"] for epoch in epochs if epoch not in whole]

    def cells(self) -> list[str]:
        """Rows a second, their range, CPU, and what is to be said of them."""
        if not self.epochs:
            return ["–", "–", "–", self.problem or f"all epochs left out, with {self.wrong_rows} rows"]
        notes = [self.problem] if self.problem else []
        if self.wrong_rows:
            wrong = ", ".join(f"{rows:,}" for rows in self.wrong_rows)
            of = len(self.wrong_rows) + len(self.epochs)
            notes.append(f"left out: {len(self.wrong_rows)} of {of} epochs, which had {wrong} rows")
        num_cut = sum(bool(epoch.get("is_cut")) for epoch in self.epochs)
        if num_cut:
            rows = statistics.median(epoch["rows"] for epoch in self.epochs if epoch.get("is_cut"))
            notes.append(f"{num_cut} of {len(self.epochs)} cut at the time limit, after {rows:,.0f} rows")
        low, high = min(self.rates), max(self.rates)
        return [short(self.rate), f"{short(low)} – {short(high)}", f"{self.cpu:.2f}", "; ".join(notes)]


def in_turns(ways: Mapping[str, Way], repeats: int) -> None:
    """Run all ways one after the other, and that so many times after a first time that does not count."""
    for turn in range(repeats + 1):
        for name, way in ways.items():
            say(f"turn {turn} of {repeats}: {name}")
            way.take_turn(counts=turn > 0)


def short(number: float) -> str:
    """Three digits of rows a second."""
    return f"{number / 1e6:.2f} M" if number >= 1e6 else f"{number / 1e3:.3g} k" if number >= 1e3 else f"{number:.3g}"


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(row) + " |")
    print(flush=True)


def print_ways(ways: Mapping[str, Way]) -> None:
    head = ["", "rows/s", "from – to", "CPU s / M rows", "note"]
    print_table(head, [[name, *way.cells()] for name, way in ways.items()])


@dataclass(frozen=True, slots=True)
class Goal:
    """What one way is to be against another one, in rows a second."""

    way: str
    against: str
    least: float | None = None
    """None where nothing was promised."""


def print_ratios(ways: Mapping[str, Way], goals: Sequence[Goal]) -> None:
    rows = []
    for goal in goals:
        wanted = "" if goal.least is None else f"≥ {goal.least:g}"
        if ways[goal.way].epochs and ways[goal.against].epochs:
            ratio = ways[goal.way].rate / ways[goal.against].rate
            verdict = "" if goal.least is None else "met" if ratio >= goal.least else "missed"
            rows.append([goal.way, goal.against, f"{ratio:.2f}", wanted, verdict])
        else:
            rows.append([goal.way, goal.against, "–", wanted, "not measured"])
    print_table(["", "against", "ratio", "goal", ""], rows)


# --- The limit --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowGroup:
    path: str
    index: int
    num_rows: int
    num_bytes: int


def row_groups(folder: str) -> list[RowGroup]:
    """All row groups of the Parquet files below `folder`, as their footers say."""
    found = []
    for path in sorted(map(str, Path(folder).rglob("*.parquet"))):
        metadata = pq.read_metadata(path)
        for index in range(metadata.num_row_groups):
            group = metadata.row_group(index)
            found.append(RowGroup(path, index, group.num_rows, group.total_byte_size))
    return found


def cut_windows(groups: Sequence[RowGroup]) -> list[list[RowGroup]]:
    """Neighbours in one file together until they have the window's bytes."""
    windows: list[list[RowGroup]] = []
    room = 0
    for group in groups:
        if room <= 0 or windows[-1][0].path != group.path:
            windows.append([])
            room = LIMIT_WINDOW_BYTES
        windows[-1].append(group)
        room -= group.num_bytes
    return windows


def numbers_of(column: pa.ChunkedArray) -> np.ndarray:
    """A column's memory as NumPy, without a copy; a row of known width is a row of bytes."""
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if pa.types.is_fixed_size_binary(array.type):
        width = array.type.byte_width
        raw = np.frombuffer(array.buffers()[1], np.uint8, len(array) * width, array.offset * width)
        # Four bytes at a time is how the numbers are moved.
        return raw.view(np.float32).reshape(len(array), width // 4)
    return array.to_numpy()


class Limit:
    """Decodes and gathers, and hands nothing to nobody."""

    def __init__(self, folder: str) -> None:
        self._windows = cut_windows(row_groups(folder))
        self._num_rows = sum(group.num_rows for window in self._windows for group in window)
        most = max(sum(group.num_rows for group in window) for window in self._windows)
        first = self._windows[0][0]
        columns = pq.ParquetFile(first.path).read_row_group(first.index).columns
        # Written once here, so that no epoch pays for their pages.
        self._out, self._joined = (
            [
                [np.ones((most, *numbers_of(column).shape[1:]), numbers_of(column).dtype) for column in columns]
                for _ in range(2)
            ]
            for _ in range(2)
        )
        generator = np.random.default_rng(0)
        sizes = {sum(group.num_rows for group in window) for window in self._windows}
        self._orders = {size: generator.permutation(size) for size in sorted(sizes)}
        narrow = {size: order.astype(np.int32) for size, order in self._orders.items()}
        if self._gather_seconds(most, narrow) < self._gather_seconds(most, self._orders):
            self._orders = narrow

    def _gather_seconds(self, size: int, orders: Mapping[int, np.ndarray]) -> float:
        """How long these indices take, at best of five."""
        seconds = []
        for _ in range(5):
            begin = time.perf_counter()
            for source, out in zip(self._joined[0], self._out[0], strict=True):
                np.take(source, orders[size], axis=0, out=out, mode="clip")
            seconds.append(time.perf_counter() - begin)
        return min(seconds)

    def run(self, *, shuffled: bool, joined: bool = False) -> list[Epoch]:
        windows: queue.SimpleQueue[list[RowGroup]] = queue.SimpleQueue()
        for window in self._windows:
            windows.put(window)

        def work(thread: int) -> int:
            rows = 0
            with contextlib.suppress(queue.Empty):
                while True:
                    rows += self._read(windows.get_nowait(), thread, shuffled=shuffled, joined=joined)
            return rows

        begin_cpu, begin = time.process_time(), time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            rows = sum(pool.map(work, range(2)))
        end = time.perf_counter()
        return [{"rows": rows, "seconds": end - begin, "cpu_seconds": time.process_time() - begin_cpu}]

    def _read(self, window: list[RowGroup], thread: int, *, shuffled: bool, joined: bool) -> int:
        opened = pq.ParquetFile(window[0].path, memory_map=True)
        if joined:
            tables = [opened.read_row_group(group.index, use_threads=False) for group in window]
        else:
            tables = [opened.read_row_groups([group.index for group in window], use_threads=False)]
        size = sum(table.num_rows for table in tables)
        for position, whole in enumerate(self._out[thread]):
            parts = [numbers_of(table.column(position)) for table in tables]
            source, out = parts[0], whole[:size]
            if joined:
                source = np.concatenate(parts, out=self._joined[thread][position][:size])
            if shuffled:
                np.take(source, self._orders[size], axis=0, out=out, mode="clip")
            else:
                np.copyto(out, source)
        return size


# --- The ways to read -------------------------------------------------------------------------------------------------


class Opened:
    """Converters and loaders of one section, closed at its end."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def enter(self, manager: Any) -> Any:
        return self._stack.enter_context(manager)

    def ours(self, rows: Rows, **options: Any) -> Way:
        made = self._stack.enter_context(converter.open_converter(rows.url))
        return self._way(made, rows, options)

    def parquet(self, rows: Rows, **options: Any) -> Way:
        """The same loader on files that Spark's own writer made."""
        make = getattr(converter, "make_parquet_converter", None)
        if make is None:
            return absent(rows, "not there: this version has no make_parquet_converter")
        return self._way(self._stack.enter_context(make(rows.parquet)), rows, options)

    def _way(self, made: Any, rows: Rows, options: Mapping[str, Any]) -> Way:
        loader = self._stack.enter_context(made.make_torch_dataloader(batch_size=BATCH_SIZE, **options))
        return Way(run=lambda: [timed_epoch(lambda: loader)], num_rows=rows.num_rows)


def absent(rows: Rows, why: str) -> Way:
    def run() -> list[Epoch]:
        raise UnavailableError(why)

    return Way(run=run, num_rows=rows.num_rows)


def hand_written(rows: Rows) -> Way:
    """What one writes without any package: Arrow's batches, each column as a tensor."""

    def batches() -> Iterator[dict[str, Any]]:
        for batch in pyarrow.dataset.dataset(rows.parquet, format="parquet").to_batches(batch_size=BATCH_SIZE):
            # Arrow gives an empty one where a row group ends with a batch.
            if batch.num_rows:
                yield {name: as_tensor(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}

    return Way(run=lambda: [timed_epoch(batches)], num_rows=rows.num_rows)


def as_tensor(column: pa.Array) -> Any:
    if pa.types.is_binary(column.type):
        return column.to_pylist()
    if not pa.types.is_list(column.type):
        numbers = column.to_numpy(zero_copy_only=False)
        return torch.from_numpy(numbers if numbers.flags.writeable else numbers.copy())
    values = column.flatten().to_numpy()
    lengths = np.diff(column.offsets.to_numpy())
    if (lengths == lengths[0]).all():
        return torch.from_numpy(values.reshape(len(column), -1).copy())
    padded = np.zeros((len(column), lengths.max()), values.dtype)
    padded[np.arange(lengths.max()) < lengths[:, None]] = values
    return torch.from_numpy(padded)


class Peers:
    """The peers' environments, made when they are first asked for."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._known: dict[str, str] = {}
        self._problems: dict[str, str] = {}
        self.versions: dict[str, str] = {}

    def way(
        self, peer: str, rows: Rows, *, shuffle: bool, rebatch: bool = False, delta_table: str | None = None
    ) -> Way:
        """A peer on what Spark wrote, or on the Delta table of the same rows."""

        def run() -> list[Epoch]:
            job = {
                "peer": peer,
                "path": delta_table or rows.parquet,
                "is_delta": delta_table is not None,
                "shuffle": shuffle,
                "rebatch": rebatch,
                "batch_size": BATCH_SIZE,
                "max_seconds": self._options.peer_seconds,
                "epochs": self._options.peer_epochs,
            }
            found = self._run(self._python(peer), job)
            self.versions[peer] = found["versions"]
            return found["epochs"]

        return Way(run=run, num_rows=rows.num_rows, warms_itself=True)

    def _run(
        self,
        python: str,
        job: Mapping[str, Any],
        *,
        script: Path = PEERS_SCRIPT,
        variables: Mapping[str, str] | None = None,
    ) -> Any:
        """What a script prints of a job, run by a Python with these environment variables beside the usual ones."""
        # Warm-up, epochs, and what it takes to start and end.
        most = (job["epochs"] + 1) * job["max_seconds"] + 120
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [python, str(script), json.dumps(job)],
                env=clean_environment() | dict(variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
            try:
                output, _ = process.communicate(timeout=most)
            except subprocess.TimeoutExpired:
                raise UnavailableError(f"did not end within {most:.0f} seconds") from None
            finally:
                # What it started too.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            errors.seek(0)
            if process.returncode:
                raise UnavailableError(last_line(errors.read()) or f"ended with {process.returncode}")
        return json.loads(last_line(output))

    def _python(self, peer: str) -> str:
        """The Python of a peer's environment."""
        if self._options.without_peers:
            raise UnavailableError("not run: left out by an option")
        if peer in self._problems:
            raise UnavailableError(self._problems[peer])
        if peer not in self._known:
            try:
                self._known[peer] = self._make_environment(peer)
            except (OSError, UnavailableError) as error:
                self._problems[peer] = f"no environment: {error}"
                raise UnavailableError(self._problems[peer]) from error
        return self._known[peer]

    def _make_environment(self, peer: str) -> str:
        is_old = peer.startswith("petastorm")
        chosen = self._options.petastorm_python if is_old else self._options.ray_python
        python = chosen or (find_python(PETASTORM_PYTHONS) if is_old else sys.executable)
        folder = Path(self._options.peers, peer)
        own = folder / "bin" / "python"
        # Written last, so that an environment whose making was interrupted is made anew.
        made = folder / "requirements.txt"
        wanted = "\n".join(REQUIREMENTS[peer])
        if made.exists() and made.read_text() == wanted:
            return str(own)
        say(f"making an environment for {TITLES[peer]} in {folder}")
        install([python, "-m", "venv", "--clear", str(folder)])
        install([str(own), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS[peer]])
        made.write_text(wanted)
        return str(own)


def find_python(versions: Sequence[str]) -> str:
    """A Python of one of these versions: on the PATH, or one that pyenv keeps."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for version in versions:
        on_path = shutil.which(f"python{version}")
        for candidate in (*([on_path] if on_path else []), *sorted(map(str, kept.glob(f"{version}.*/bin/python")))):
            # A name on the PATH may be pyenv's stand-in for a version that is not there.
            if subprocess.run([candidate, "--version"], capture_output=True, check=False).returncode == 0:
                return candidate
    raise UnavailableError(f"no Python {', '.join(versions)} found: name one with --petastorm-python")


def install(command: list[str]) -> None:
    """Run a command that must succeed; its error's last line is what it says."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environment())
    if done.returncode:
        raise UnavailableError(last_line(done.stderr) or f"{command[0]} ended with {done.returncode}")


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _SCRUBBED}


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


# --- The sections -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bench:
    """What every section needs."""

    rows: Mapping[str, Rows]
    options: argparse.Namespace
    peers: Peers


LIMIT, JOINED, PLAIN_LIMIT = "limit", "limit, joined", "plain limit"
OURS, OURS_PLAIN = "ours, shuffled", "ours, plain order"
VERIFIED = "ours, checksums verified, shuffled"
STACKED, STACKED_PLAIN = "ours, one stack, shuffled", "ours, one stack, plain order"
PARQUET, PARQUET_PLAIN = "ours on Spark's files, shuffled", "ours on Spark's files, plain order"
BY_HAND = "hand-written, plain order"
PETASTORM, PETASTORM_PLAIN = "Petastorm, shuffled", "Petastorm, plain order"
RAY, RAY_PLAIN = "Ray Data, shuffled", "Ray Data, plain order"


def loaders(bench: Bench, name: str, opened: Opened, **options: Any) -> dict[str, Way]:
    """Ours and the hand-written loop, in both orders where there are two."""
    rows = bench.rows[name]
    return {
        OURS: opened.ours(rows, shuffle=True, **options),
        OURS_PLAIN: opened.ours(rows, **options),
        PARQUET: opened.parquet(rows, shuffle=True, **options),
        PARQUET_PLAIN: opened.parquet(rows, **options),
        BY_HAND: hand_written(rows),
    }


def limits(bench: Bench, name: str) -> dict[str, Way]:
    rows = bench.rows[name]
    limit = Limit(rows.folder)
    return {
        LIMIT: Way(run=lambda: limit.run(shuffled=True), num_rows=rows.num_rows),
        JOINED: Way(run=lambda: limit.run(shuffled=True, joined=True), num_rows=rows.num_rows),
        PLAIN_LIMIT: Way(run=lambda: limit.run(shuffled=False), num_rows=rows.num_rows),
    }


def peers(bench: Bench, name: str) -> dict[str, Way]:
    rows = bench.rows[name]
    return {
        PETASTORM: bench.peers.way("petastorm", rows, shuffle=True),
        PETASTORM_PLAIN: bench.peers.way("petastorm", rows, shuffle=False),
        RAY: bench.peers.way("ray", rows, shuffle=True),
        RAY_PLAIN: bench.peers.way("ray", rows, shuffle=False),
    }


def tab(bench: Bench) -> None:
    """2 M rows of a long and 40 floats."""
    with Opened() as opened:
        ways = limits(bench, "tab") | loaders(bench, "tab", opened)
        ways |= {
            STACKED: opened.ours(bench.rows["tab"], shuffle=True, **STACK),
            STACKED_PLAIN: opened.ours(bench.rows["tab"], **STACK),
            VERIFIED: opened.ours(bench.rows["tab"], shuffle=True, verify_checksums=True),
        }
        ways |= peers(bench, "tab")
        in_turns(ways, bench.options.repeats)
    print_ways(ways)
    print_ratios(
        ways,
        [
            Goal(OURS, LIMIT, 0.8),
            Goal(OURS, JOINED),
            Goal(OURS_PLAIN, PLAIN_LIMIT),
            Goal(STACKED, LIMIT, 1.2),
            Goal(STACKED, OURS, 1.3),
            Goal(VERIFIED, OURS),
            Goal(OURS_PLAIN, BY_HAND, 1.5),
            Goal(PARQUET, OURS, 0.8),
            Goal(OURS, PETASTORM, 20),
            Goal(STACKED, PETASTORM, 35),
            Goal(OURS_PLAIN, PETASTORM_PLAIN),
            Goal(OURS, RAY, 20),
            Goal(STACKED, RAY, 35),
            Goal(OURS_PLAIN, RAY_PLAIN),
        ],
    )


def emb(bench: Bench) -> None:
    """200 k rows of a long, a float[512] of incompressible values and a label."""
    with Opened() as opened:
        ways = limits(bench, "emb") | loaders(bench, "emb", opened) | peers(bench, "emb")
        ways[VERIFIED] = opened.ours(bench.rows["emb"], shuffle=True, verify_checksums=True)
        in_turns(ways, bench.options.repeats)
    print_ways(ways)
    print_ratios(
        ways,
        [
            Goal(OURS, LIMIT, 0.8),
            Goal(OURS, JOINED),
            Goal(VERIFIED, OURS),
            Goal(OURS_PLAIN, PLAIN_LIMIT, 0.5),
            Goal(OURS_PLAIN, BY_HAND, 5),
            Goal(PARQUET_PLAIN, BY_HAND, 3),
            Goal(OURS, PETASTORM, 13),
            Goal(OURS_PLAIN, PETASTORM_PLAIN),
            Goal(OURS, RAY, 50),
            Goal(OURS_PLAIN, RAY_PLAIN),
        ],
    )


def img(bench: Bench) -> None:
    """20 k rows of a long and 10 kB of binary, which arrives as a list of bytes."""
    objects(bench, "img")


def ragged(bench: Bench) -> None:
    """500 k rows of a long and 0 to 63 floats, padded to the longest row of a batch."""
    objects(bench, "ragged", ragged="pad")


def objects(bench: Bench, name: str, **options: Any) -> None:
    with Opened() as opened:
        ways = loaders(bench, name, opened, **options)
        in_turns(ways, bench.options.repeats)
    print_ways(ways)
    print_ratios(ways, [Goal(OURS_PLAIN, BY_HAND), Goal(PARQUET_PLAIN, BY_HAND), Goal(OURS, OURS_PLAIN)])


def threads(bench: Bench) -> None:
    """One reader thread against two, shuffled."""
    with Opened() as opened:
        ways = {
            f"{name}, {count} thread{'s' * (count > 1)}": opened.ours(
                bench.rows[name], shuffle=True, workers_count=count
            )
            for name in ("tab", "emb")
            for count in (1, 2)
        }
        in_turns(ways, bench.options.repeats)
    print_ways(ways)
    print_ratios(ways, [Goal(f"{name}, 2 threads", f"{name}, 1 thread") for name in ("tab", "emb")])


def layouts(bench: Bench) -> None:
    """Rows that are cut badly, shuffled: bytes against those of tab."""
    titles = {
        "tab": "tab, row groups of 8 MB",
        "tiny": "a tenth of tab, row groups of 1,000 rows",
        "huge": "tab, row groups of 128 MB",
        "wide": "20 k rows of 1,000 floats",
    }
    with Opened() as opened:
        ways = {name: opened.ours(bench.rows[name], shuffle=True) for name in titles}
        in_turns(ways, bench.options.repeats)
    table = []
    row_bytes = dict.fromkeys(titles, 8 + 4 * len(FLOATS)) | {"wide": 4000}
    base = row_bytes["tab"] * ways["tab"].rate
    for name, way in ways.items():
        speed = row_bytes[name] * way.rate
        rate, extent, cpu, note = way.cells()
        table.append([titles[name], rate, extent, cpu, f"{speed / 1e6:,.0f}", f"{speed / base:.2f}", note])
    print_table(["", "rows/s", "from – to", "CPU s / M rows", "MB/s", "of tab's", "note"], table)


def first(bench: Bench) -> None:
    """From the call of make_torch_dataloader to the first batch, shuffled: the rows of tab in one file and in many."""
    table = []
    with contextlib.ExitStack() as stack:
        counts = (1, bench.options.files)
        opened = {
            count: stack.enter_context(converter.open_converter(bench.rows[f"files-{count}"].url)) for count in counts
        }
        seconds: dict[int, list[float]] = {count: [] for count in counts}
        for turn in range(max(3, bench.options.repeats) + 1):
            for count, made in opened.items():
                begin = time.perf_counter()
                with made.make_torch_dataloader(batch_size=BATCH_SIZE, shuffle=True, seed=turn) as loader:
                    batches = iter(loader)
                    touch(next(batches))
                    passed = time.perf_counter() - begin
                    # What reads ahead is to be over before the next one is timed.
                    batches.close()
                if turn:
                    seconds[count].append(passed)
    for count in counts:
        median, low, high = (1e3 * of(seconds[count]) for of in (statistics.median, min, max))
        verdict = "met" if median <= 150 else "missed"
        table.append(
            [f"{count:,} file{'s' * (count > 1)}", f"{median:.0f}", f"{low:.0f} – {high:.0f}", "≤ 150", verdict]
        )
    print_table(["the rows of tab in", "first batch after ms", "from – to", "goal", ""], table)


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def watch_memory(url: str, num_epochs: int, framework: str = "torch") -> dict[str, Any]:
    """In a process of its own: the peak over what it had before the loader was, and what it has after each epoch.

    Arrow's pool is empty after an epoch, but keeps 30 to 300 MB of pages, as chance will have it: in one run of 20
    epochs that is 4 MB more for each, in another 4 MB less. So it gives them back before anyone looks.
    """
    opened = converter.open_converter(url)
    make = opened.make_torch_dataloader if framework == "torch" else opened.make_tf_dataset
    with opened, make(batch_size=BATCH_SIZE, shuffle=True) as loader:
        plan = getattr(opened, "plan", None)
        planned = None if plan is None else plan(shuffle=True, batch_size=BATCH_SIZE).peak_memory_bytes
        before = peak = anonymous_bytes()
        is_over = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not is_over.wait(0.002):
                peak = max(peak, anonymous_bytes())

        after = []
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for _ in range(num_epochs):
                for batch in loader:
                    touch(batch)
                pa.default_memory_pool().release_unused()
                after.append(anonymous_bytes())
        finally:
            is_over.set()
            watcher.join()
    return {"before": before, "peak": peak, "after": after, "planned": planned}


def slope_of(values: Sequence[float]) -> float:
    """How much more each value is than the one before, as the median over all pairs: some odd ones do not move it."""
    pairs = itertools.combinations(enumerate(values), 2)
    return statistics.median((later - one) / (end - begin) for (begin, one), (end, later) in pairs)


def memory(bench: Bench) -> None:
    """Anonymous memory beyond what the process had when the loader was made, shuffled."""
    table = []
    for name, title, num_epochs in (
        ("tab", "tab", bench.options.memory_epochs),
        ("times-10", "tab ten times over", max(2, bench.options.memory_epochs // 10)),
    ):
        say(f"memory of {title}")
        found = apart(watch_memory, bench.rows[name].url, num_epochs)
        slope = slope_of(found["after"][1:]) / 1e6 if num_epochs > 3 else None
        table.append(
            [
                title,
                f"{bench.rows[name].num_rows:,}",
                f"{(found['peak'] - found['before']) / 1e6:.0f}",
                "not there" if found["planned"] is None else f"{found['planned'] / 1e6:.0f}",
                "–" if slope is None else f"{slope:+.2f}",
                str(num_epochs),
            ]
        )
    print_table(["", "rows", "peak MB", "plan() says MB", "MB more each epoch", "epochs"], table)


def batch_means(opened: Any, num_epochs: int, **options: Any) -> np.ndarray:
    """The mean label of each whole batch, over some epochs; the order is that of all columns."""
    means = []
    with opened.make_torch_dataloader(
        batch_size=BATCH_SIZE, shuffle=True, columns=["label"], drop_last=True, **options
    ) as loader:
        for _ in range(num_epochs):
            means += [batch["label"].double().mean().item() for batch in loader]
    return np.array(means)


def mean_window_groups(group_rows: np.ndarray, window_rows: float) -> float:
    """How many row groups a row's window has on average, where a window ends with the row group that fills it."""
    generator = np.random.default_rng(0)
    sizes, weights = [], []
    for _ in range(100):
        size = rows = 0
        for one in generator.permutation(group_rows):
            size, rows = size + 1, rows + one
            if rows >= window_rows:
                sizes.append(size)
                weights.append(rows)
                size = rows = 0
        sizes.append(size)
        weights.append(rows)
    return float(np.average(sizes, weights=weights))


def mixing(bench: Bench) -> None:
    """How far batches of rows that are sorted by a 0/1 label are from a perfect shuffle's, and at what speed."""
    num_rows = bench.rows["sorted"].num_rows
    perfect = np.sqrt(0.25 / BATCH_SIZE * (num_rows - BATCH_SIZE) / (num_rows - 1))
    settings: list[tuple[str, str, Any]] = [
        ("default window", "sorted", None),
        *((f"{share:.2g} of the rows", "sorted", max(1, int(num_rows * share))) for share in (0.03, 0.12, 0.25, 0.5)),
        ('shuffle_window_rows="all"', "sorted", "all"),
        ("shuffle_rows_seed, default window", "mixed", None),
    ]
    ways: dict[str, Way] = {}
    table: dict[str, list[str]] = {}
    with Opened() as opened, contextlib.ExitStack() as stack:
        for title, name, window in settings:
            rows = bench.rows[name]
            options = {} if window is None else {"shuffle_window_rows": window}
            try:
                ways[title] = opened.ours(rows, shuffle=True, **options)
            except (TypeError, ValueError) as error:
                ways[title] = absent(rows, f"not there: {error}")
                table[title] = ["–", "–", "–"]
                continue
            groups = row_groups(rows.folder)
            count = len(groups)
            window_rows = DEFAULT_WINDOW_BYTES * num_rows / sum(group.num_bytes for group in groups)
            if window is not None:
                window_rows = num_rows if window == "all" else window
            window_groups = mean_window_groups(np.array([group.num_rows for group in groups]), window_rows)
            formula = np.sqrt(1 + BATCH_SIZE / window_groups * (1 - window_groups / count))
            if name == "mixed":
                formula = 1.0
            made = stack.enter_context(converter.open_converter(rows.url))
            say(f"mixing: {title}")
            means = batch_means(made, bench.options.mixing_epochs, **options)
            # Around the mean of all rows, which is known.
            found = np.sqrt(((means - 0.5) ** 2).mean()) / perfect
            table[title] = [f"{window_groups:.1f} of {count}", f"{found:.2f}", f"{formula:.2f}"]
        in_turns(ways, bench.options.repeats)
    print_table(
        [
            "shuffled by",
            "row groups a window",
            "spread / perfect",
            "formula",
            "rows/s",
            "from – to",
            "CPU s / M rows",
            "note",
        ],
        [[title, *table[title], *way.cells()] for title, way in ways.items()],
    )


# --- TensorFlow -------------------------------------------------------------------------------------------------------

TF_GOALS = {"tab": 0.35, "tab, one stack": 0.6, "emb": 0.6}
TF_EPOCHS = 10
PETASTORM_TF = "Petastorm, eager"


def tensorflow(bench: Bench) -> None:
    """make_tf_dataset beside make_torch_dataloader, Petastorm, and TFRecord files of a tenth of the same rows."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    @tf.function
    def in_graph(dataset: Any) -> Any:
        rows = tf.constant(0, tf.int64)
        for batch in dataset:
            firsts = [tf.reshape(column, [-1])[0] for column in batch.values()]
            with tf.control_dependencies(firsts):
                rows += tf.shape(batch["id"], tf.int64)[0]
        return rows

    def eager(dataset: Any) -> Epoch:
        return timed_epoch(lambda: dataset)

    def graph(dataset: Any) -> Epoch:
        begin, cpu = time.perf_counter(), time.process_time()
        rows = int(in_graph(dataset))
        return {"rows": rows, "seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu}

    # TensorFlow takes a while to begin an iteration in a graph, however long that is.
    in_one = f"TensorFlow, in a graph, {TF_EPOCHS} epochs in one"
    for title, goal in TF_GOALS.items():
        name = title.split(",")[0]
        options = STACK if "stack" in title else {}
        rows = bench.rows[name]
        with Opened() as opened, tempfile.TemporaryDirectory() as folder:
            ways: dict[str, Way] = {}
            goals = []
            made = opened.enter(converter.open_converter(rows.url))
            records = write_records(tf, made, folder, options, rows.num_rows // 10)
            with made.make_tf_dataset(batch_size=BATCH_SIZE, **options) as dataset:
                again = tf.data.Dataset.from_tensors(next(iter(dataset))).repeat(rows.num_rows // BATCH_SIZE)
            num_again = rows.num_rows // BATCH_SIZE * BATCH_SIZE
            ways[f"{title}: one batch again and again, in a graph"] = Way(
                run=lambda data=again: [graph(data)], num_rows=num_again
            )
            for shuffle, order in ((True, "shuffled"), (False, "plain order")):
                dataset = opened.enter(made.make_tf_dataset(batch_size=BATCH_SIZE, shuffle=shuffle, **options))
                own = {"torch": opened.ours(rows, shuffle=shuffle, **options)}
                own["TensorFlow, eager"] = Way(run=lambda data=dataset: [eager(data)], num_rows=rows.num_rows)
                own["TensorFlow, in a graph"] = Way(run=lambda data=dataset: [graph(data)], num_rows=rows.num_rows)
                many = opened.enter(
                    made.make_tf_dataset(batch_size=BATCH_SIZE, shuffle=shuffle, num_epochs=TF_EPOCHS, **options)
                )
                own[in_one] = Way(run=lambda data=many: [graph(data)], num_rows=rows.num_rows * TF_EPOCHS)
                peer = records(shuffle)
                own["TFRecord, in a graph"] = Way(run=lambda data=peer: [graph(data)], num_rows=rows.num_rows // 10)
                if not options:
                    own[PETASTORM_TF] = bench.peers.way("petastorm_tf", rows, shuffle=shuffle)
                    goals.append(Goal(f"{title}: TensorFlow, eager, {order}", f"{title}: {PETASTORM_TF}, {order}", 20))
                if not options and not shuffle:
                    rebatched = f"{PETASTORM_TF}, rebatch"
                    own[rebatched] = bench.peers.way("petastorm_tf", rows, shuffle=False, rebatch=True)
                    goals.append(Goal(f"{title}: TensorFlow, eager, {order}", f"{title}: {rebatched}, {order}"))
                ways |= {f"{title}: {way}, {order}": found for way, found in own.items()}
                for way in ("TensorFlow, eager", "TensorFlow, in a graph", in_one):
                    goals.append(Goal(f"{title}: {way}, {order}", f"{title}: torch, {order}", goal))
                goals.append(
                    Goal(f"{title}: TensorFlow, in a graph, {order}", f"{title}: TFRecord, in a graph, {order}", 3)
                )
            in_turns(ways, bench.options.repeats)
        print_ways(ways)
        print_ratios(ways, goals)
    print_growth(bench)


def print_growth(bench: Bench) -> None:
    """Whether a process has the same memory after many epochs of tab, shuffled, as after a few."""
    num_epochs, most = bench.options.memory_epochs, 0.5
    table = []
    for title in ("torch", "TensorFlow, eager"):
        say(f"memory of {title}")
        found = apart(watch_memory, bench.rows["tab"].url, num_epochs, title.partition(",")[0])
        after = [(one - found["before"]) / 1e6 for one in found["after"]]
        slope = slope_of(after[1:])
        few, many = (f"{statistics.median(part):.0f}" for part in (after[1:4], after[-3:]))
        peak = f"{(found['peak'] - found['before']) / 1e6:.0f}"
        table.append([title, peak, few, many, f"{slope:+.2f}", f"≤ {most:g}", "met" if slope <= most else "missed"])
    head = ["tab, shuffled", "peak MB", "MB after 3 epochs", f"after {num_epochs}", "MB more each epoch", "goal", ""]
    print_table(head, table)


def write_records(tf: Any, made: Any, folder: str, options: Mapping[str, Any], num_rows: int) -> Callable[[bool], Any]:
    """The first rows as TFRecord files, and how TensorFlow reads those best."""
    features: dict[str, Any] = {}
    count, writers = 0, [tf.io.TFRecordWriter(f"{folder}/{part}.tfrecord") for part in range(4)]
    with made.make_batch_reader(batch_size=BATCH_SIZE, **options) as reader:
        for batch in reader:
            for name, column in batch.items():
                kind = tf.float32 if column.dtype.kind == "f" else tf.int64
                features[name] = tf.io.FixedLenFeature(column.shape[1:], kind)
            columns = {name: column.reshape(len(column), -1).tolist() for name, column in batch.items()}
            for row in range(min(len(batch["id"]), num_rows - count)):
                feature = {
                    name: tf.train.Feature(float_list=tf.train.FloatList(value=values[row]))
                    if features[name].dtype == tf.float32
                    else tf.train.Feature(int64_list=tf.train.Int64List(value=values[row]))
                    for name, values in columns.items()
                }
                example = tf.train.Example(features=tf.train.Features(feature=feature))
                writers[count * len(writers) // num_rows].write(example.SerializeToString())
                count += 1
            if count == num_rows:
                break
    for writer in writers:
        writer.close()
    with made.make_batch_reader(batch_size=BATCH_SIZE, shuffle=True, **options) as reader:
        window_rows = reader._epochs.source.window_rows

    def read(shuffle: bool) -> Any:
        files = tf.data.Dataset.list_files(f"{folder}/*.tfrecord", shuffle=shuffle)
        rows = files.interleave(
            tf.data.TFRecordDataset, cycle_length=4 if shuffle else 1, num_parallel_calls=tf.data.AUTOTUNE
        )
        rows = rows.shuffle(window_rows) if shuffle else rows
        return (
            rows.batch(BATCH_SIZE)
            .map(lambda batch: tf.io.parse_example(batch, features), num_parallel_calls=tf.data.AUTOTUNE)
            .prefetch(tf.data.AUTOTUNE)
        )

    return read


def stores(bench: Bench) -> None:
    """A cache on HDFS and on Azurite, Azure's emulator, all of them on this machine."""
    from stores import run

    run(bench)


def delta(bench: Bench) -> None:
    """Delta tables as they stand."""
    from delta import run

    run(bench)


SECTIONS: dict[str, tuple[Callable[[Bench], None], tuple[str, ...]]] = {
    "tab": (tab, ("tab",)),
    "emb": (emb, ("emb",)),
    "img": (img, ("img",)),
    "ragged": (ragged, ("ragged",)),
    "threads": (threads, ("tab", "emb")),
    "layouts": (layouts, ("tab", "wide", "tiny", "huge")),
    "first": (first, ("files-1", "files-{files}")),
    "memory": (memory, ("tab", "times-10")),
    "mixing": (mixing, ("sorted", "mixed")),
    "tensorflow": (tensorflow, ("tab", "emb")),
    "stores": (stores, ("tab", "emb", "img")),
    "delta": (delta, ("tab", "emb")),
}


def machine() -> str:
    """Where and with what this runs."""
    with open("/proc/cpuinfo", encoding="utf-8") as cpus:
        models = [line.partition(":")[2].strip() for line in cpus if line.startswith("model name")]
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    versions = (
        f"Spark {pyspark.__version__}, pyarrow {pa.__version__}, NumPy {np.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )
    return (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores ({models[0] if models else platform.machine()}), "
        f"{gigabytes:.0f} GB, {versions}"
    )


def main(arguments: Any = None) -> None:
    """Run everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", choices=SECTIONS, metavar="NAME", help=f"of {', '.join(SECTIONS)} (default: all)")
    add("--repeats", type=int, help="counted epochs of each way (default: 5)")
    add("--rows-scale", type=float, help="share of the rows (default: 1)")
    add("--data", help="where the rows are kept and taken from again (default: nowhere). After a change to how rows "
        "are written, name another folder")  # fmt: skip
    add("--quick", action="store_true", help="everything small, once, and no peers unless --peers says where")
    add("--files", type=int, help="how many files many are, in the section first (default: 10,000)")
    add("--peers", help="where the peers' environments are (default: in the user's cache folder)")
    add("--no-peers", action="store_true", help="leave the peers out")
    add("--peer-seconds", type=float, default=30.0, help="most seconds of a peer's epoch (default: %(default)s)")
    add(
        "--petastorm-python", help=f"a Python of Petastorm's time: {', '.join(PETASTORM_PYTHONS)} (default: looked for)"
    )
    add("--ray-python", default=sys.executable, help="a Python for Ray and DeltaTorch (default: this one)")
    options = parser.parse_args(arguments)
    options.repeats = options.repeats or (1 if options.quick else 5)
    options.rows_scale = options.rows_scale or (0.05 if options.quick else 1.0)
    options.files = options.files or (100 if options.quick else 10_000)
    options.memory_epochs = 4 if options.quick else 20
    options.mixing_epochs = 5 if options.quick else 20
    options.peer_epochs = 1 if options.quick else 2
    options.without_peers = options.no_peers or (options.quick and options.peers is None)
    options.peers = options.peers or platformdirs.user_cache_path("spark-tensor-converter-bench")
    wanted = [name for name in SECTIONS if name in (options.only or SECTIONS)]
    print(f"{machine()}, {options.rows_scale:g} of the rows, {options.repeats} turns\n", flush=True)
    with contextlib.ExitStack() as stack:
        folder = options.data or stack.enter_context(tempfile.TemporaryDirectory())
        folder = os.path.join(os.path.abspath(folder), f"scale-{options.rows_scale:g}")
        os.makedirs(folder, exist_ok=True)
        needed = [one.format(files=options.files) for name in wanted for one in SECTIONS[name][1]]
        rows = apart(make_rows, folder, list(dict.fromkeys(needed)), options.rows_scale)
        # What was just written is on its way to the disk for a while.
        os.sync()
        bench = Bench(rows, options, Peers(options))
        for name in wanted:
            section, _ = SECTIONS[name]
            before = os.getloadavg()[0]
            print(f"### {name}: {section.__doc__}\n", flush=True)
            section(bench)
            print(f"Load of the machine: {before:.1f} before, {os.getloadavg()[0]:.1f} after.\n", flush=True)
    for peer, versions in bench.peers.versions.items():
        print(f"{TITLES[peer]} ran with {versions}.")


if __name__ == "__main__":
    main()
