#!/usr/bin/env python3
"""Programs written for Petastorm, with `petastorm` and with `converter.petastorm` in their imports, as ratios.

    python tests/bench/from_petastorm.py                     # all of it: an hour on two cores
    python tests/bench/from_petastorm.py --quick             # small, once: does it run at all?
    python tests/bench/from_petastorm.py --only images ngram --data DIR
    python tests/bench/from_petastorm.py --only tables --without-peers

One text serves both, peers_petastorm.py, and each turn is a fresh process: it reads once to be warm, and then for the
figures; the ways of a table run in turns (A B A B …), and medians are compared. Readers have a thread for each core. An
epoch that is not over after `--peer-seconds` is left, and counts from behind its first batch. "Memory" is the most that
a process had beyond what it had when its imports were done.

tables: tab (2 M rows of a long and 40 floats) and emb (200 k rows of a long, a float[512] and a label), as Spark wrote
them (`read.py`), through `make_batch_reader`, in batches of 1,024, shuffled in a buffer of 100,000 rows and not.
images: 20,000 pictures with three scalars, PNGs of 64×64 and JPEGs of 224×224 (quality 90, cut out of photographs, as
in `images.py`), through `make_reader`, in batches of 256 with a buffer of 2,048 rows, and row by row; and scalars alone
row by row. tensorflow: tab and emb through `make_petastorm_dataset` and a converter's `make_tf_dataset`. ngram: windows
of 16 rows of ten floats. opening: stores of 5,000 files, with Petastorm's metadata and without.

Petastorm has environments of its own, made by pip on first use (some 8 GB); read.py and images.py use the same.
`converter.petastorm` writes the stores. Prints Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import images
import numpy as np
import platformdirs
import pyarrow as pa
import pyarrow.parquet as pq
import read
from peers_petastorm import FLOATS, LENGTH
from read import Epoch, Goal, Peers, Way, apart, in_turns, print_ratios, print_table, print_ways, say

import converter

SCRIPT = Path(__file__).with_name("peers_petastorm.py")
OURS, THEIRS = "ours", "Petastorm"
PACKAGES = {OURS: "converter.petastorm", THEIRS: "petastorm"}
NUM_PICTURES, NUM_SCALARS, NUM_FILES = 20_000, 500_000, 5_000
PICTURES_OF_A_GROUP, NUM_KEYS, ROWS_OF_A_KEY, ROWS_OF_A_WINDOWED_GROUP = 1_000, 200, 10_000, 1_000


# --- Running ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Bench:
    """What every section needs."""

    options: argparse.Namespace
    folder: str
    versions: dict[str, str] = field(default_factory=dict)
    memory: dict[str, list[int]] = field(default_factory=dict)
    """Bytes of each turn, by the names of the ways."""

    _peers: Peers = field(init=False)

    def __post_init__(self) -> None:
        self._peers = Peers(self.options)

    def size(self, number: int) -> int:
        return number if not self.options.quick else number // 20

    def run(self, way: str, package: str, program: str, **options: Any) -> list[Epoch]:
        """A program in a fresh process with one of the packages."""
        variables = {"PYTHONWARNINGS": "ignore", "TF_CPP_MIN_LOG_LEVEL": "2"}
        python = sys.executable
        if package == THEIRS:
            environment = "petastorm_tf" if program.startswith("tf") else "petastorm_images"
            python = self._peers._python(environment)
        else:
            variables["PYTHONPATH"] = os.path.dirname(os.path.dirname(os.path.abspath(converter.__file__)))
        job = {
            "package": PACKAGES[package],
            "name": program,
            "shuffle": False,
            "max_seconds": self.options.peer_seconds,
        }
        found = self._peers._run(python, {"epochs": 1} | job | options, script=SCRIPT, variables=variables)
        framework = {"tf": " in TensorFlow", "torch": " in torch"}.get(program.partition("_")[0], "")
        self.versions[f"{package}{framework}"] = found["versions"]
        self.memory.setdefault(way, []).append(found["memory_bytes"])
        return found["epochs"]

    def pair(self, title: str, program: str, num_rows: int, **options: Any) -> dict[str, Way]:
        """Both packages' ways to run a program."""
        return {
            f"{package}: {title}": Way(
                run=functools.partial(self.run, f"{package}: {title}", package, program, **options),
                num_rows=num_rows,
                warms_itself=True,
            )
            for package in PACKAGES
        }


def compare(bench: Bench, ways: Mapping[str, Way], least: Mapping[str, float | None]) -> None:
    """Run ways in turns and print their figures; `least` has the goal of each pair."""
    in_turns(ways, bench.options.repeats)
    print_ways(ways)
    print_ratios(ways, [Goal(f"{OURS}: {title}", f"{THEIRS}: {title}", goal) for title, goal in least.items()])
    print_memory(bench, list(least))


def print_memory(bench: Bench, titles: Sequence[str]) -> None:
    table = []
    for title in titles:
        both = [bench.memory.get(f"{package}: {title}") for package in PACKAGES]
        # The turn that warms the ways has none here, for each turn is a process of its own.
        shown = [f"{statistics.median(one) / 1e6:.0f} MB" if one else "–" for one in both]
        if both[0] and both[1]:
            ratio = statistics.median(both[0]) / statistics.median(both[1])
            table.append([title, *shown, f"{ratio:.2f}", "≤ 0.5", "met" if ratio <= 0.5 else "missed"])
        else:
            table.append([title, *shown, "–", "≤ 0.5", "not measured"])
    print_table(["memory", OURS, THEIRS, "ratio", "goal", ""], table)


# --- The stores -------------------------------------------------------------------------------------------------------


def describe(folder: str, fields: Sequence[tuple[str, Any, tuple[int, ...], Any]]) -> None:
    """Write Petastorm's metadata beside Parquet files."""
    from converter.petastorm.etl.dataset_metadata import write_metadata
    from converter.petastorm.unischema import Unischema, UnischemaField

    schema = Unischema("Rows", [UnischemaField(*own, False) for own in fields])
    write_metadata(f"file://{folder}", schema)


def once(folder: str, write: Callable[[str], None]) -> str:
    """A folder that is written unless an earlier run left it."""
    if not os.path.exists(folder):
        say(f"writing {folder}")
        unfinished = f"{folder} unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        os.makedirs(unfinished)
        write(unfinished)
        os.rename(unfinished, folder)
    return folder


def scalars_of(num_rows: int) -> dict[str, Any]:
    generator = np.random.default_rng(5)
    return {
        "id": np.arange(num_rows),
        "label": generator.integers(0, 10, num_rows).astype(np.int32),
        "weight": generator.random(num_rows, np.float32),
    }


def scalar_fields() -> list[tuple[str, Any, tuple[int, ...], Any]]:
    from pyspark.sql import types

    from converter.petastorm.codecs import ScalarCodec

    kinds = (
        ("id", np.int64, types.LongType),
        ("label", np.int32, types.IntegerType),
        ("weight", np.float32, types.FloatType),
    )
    return [(name, dtype, (), ScalarCodec(kind())) for name, dtype, kind in kinds]


def write_pictures(folder: str, values: Sequence[bytes], codec: str, side: int) -> None:
    from converter.petastorm.codecs import CompressedImageCodec

    table = pa.table({"image": pa.array(values, pa.binary()), **scalars_of(len(values))})
    size = len(table) // 4
    for part in range(4):
        path = f"{folder}/part-{part}.parquet"
        rows = table.slice(part * size, size if part < 3 else None)
        pq.write_table(rows, path, row_group_size=PICTURES_OF_A_GROUP, compression="snappy")
    describe(folder, [("image", np.uint8, (side, side, 3), CompressedImageCodec(codec)), *scalar_fields()])


def jpegs_of(bench: Bench) -> list[bytes]:
    """JPEGs of 224×224 that were cut out of photographs."""
    options = argparse.Namespace(**vars(bench.options) | {"verbose": False})
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/pictures.npz"
        cutter = images.Bench(options, folder)
        cutter.run("images_photographs", "photographs", path=path, num_rows=bench.size(NUM_PICTURES))
        with np.load(path) as found:
            data, edges = found["data"].tobytes(), found["edges"].tolist()
    return [data[start:stop] for start, stop in itertools.pairwise(edges)]


def pngs_of(jpegs: Sequence[bytes]) -> list[bytes]:
    """The middles of the same pictures as PNG, by the codec: it filters as OpenCV does, and its files are as large."""
    from PIL import Image

    from converter.petastorm.codecs import CompressedImageCodec
    from converter.petastorm.unischema import UnischemaField

    codec = CompressedImageCodec("png")
    field = UnischemaField("image", np.uint8, (64, 64, 3), codec, False)
    middles = (Image.open(io.BytesIO(jpeg)).crop((80, 80, 144, 144)) for jpeg in jpegs)
    return [bytes(codec.encode(field, np.asarray(middle))) for middle in middles]


def write_scalars(folder: str, num_rows: int) -> None:
    pq.write_table(pa.table(scalars_of(num_rows)), f"{folder}/rows.parquet", row_group_size=50_000)
    describe(folder, scalar_fields())


def write_windows(folder: str, rows_of_a_key: int) -> None:
    """Rows of keys in the order of their time, a key's or a part of them in a row group."""
    from pyspark.sql import types

    from converter.petastorm.codecs import ScalarCodec

    num_rows = NUM_KEYS * rows_of_a_key
    generator = np.random.default_rng(0)
    numbers = np.arange(num_rows)
    columns = {"key": (numbers // rows_of_a_key).astype(np.int32), "time": numbers % rows_of_a_key}
    columns |= {name: generator.random(num_rows, np.float32) for name in FLOATS}
    size = min(ROWS_OF_A_WINDOWED_GROUP, rows_of_a_key)
    pq.write_table(pa.table(columns), f"{folder}/rows.parquet", row_group_size=size, use_dictionary=False)
    fields = [
        ("key", np.int32, (), ScalarCodec(types.IntegerType())),
        ("time", np.int64, (), ScalarCodec(types.LongType())),
    ]
    describe(folder, [*fields, *((name, np.float32, (), ScalarCodec(types.FloatType())) for name in FLOATS)])


def write_many(folder: str, num_files: int, *, is_described: bool) -> None:
    for number in range(num_files):
        pq.write_table(pa.table(scalars_of(20)), f"{folder}/part-{number:05}.parquet")
    if is_described:
        describe(folder, scalar_fields())


# --- The sections -----------------------------------------------------------------------------------------------------


def spark_rows(bench: Bench) -> dict[str, read.Rows]:
    scale = 0.05 if bench.options.quick else 1.0
    folder = os.path.join(bench.folder, f"scale-{scale:g}")
    os.makedirs(folder, exist_ok=True)
    found = apart(read.make_rows, folder, ["tab", "emb"], scale)
    os.sync()
    return found


def tables(bench: Bench) -> None:
    """`make_batch_reader` → `BatchedDataLoader` and `DataLoader`, of tab and emb."""
    for name, rows in spark_rows(bench).items():
        ways: dict[str, Way] = {}
        least: dict[str, float | None] = {}
        for (loader, goal), shuffle in itertools.product(
            (("BatchedDataLoader", 10), ("DataLoader", 30)), (True, False)
        ):
            title = f"{name}, {loader}, {'shuffled' if shuffle else 'plain'}"
            options = {"path": rows.parquet, "loader": loader, "shuffle": shuffle}
            ways |= bench.pair(title, "torch_batches", rows.num_rows, **options)
            least[title] = goal
        compare(bench, ways, least)


def pictures(bench: Bench) -> None:
    """`make_reader` → `DataLoader` over pictures and three scalars; and row by row."""
    folders = {}
    jpegs: list[bytes] = []
    for codec, side in (("png", 64), ("jpeg", 224)):
        folder = f"{bench.folder}/{codec}-{bench.size(NUM_PICTURES)}"
        if not os.path.exists(folder):
            jpegs = jpegs or jpegs_of(bench)
            values = jpegs if codec == "jpeg" else pngs_of(jpegs)
            once(folder, functools.partial(write_pictures, values=values, codec=codec, side=side))
        folders[f"{codec.upper()} {side}×{side}"] = folder
    os.sync()
    num_rows = bench.size(NUM_PICTURES)
    ways: dict[str, Way] = {}
    least: dict[str, float | None] = {}
    for name, folder in folders.items():
        for shuffle in (True, False):
            title = f"{name}, DataLoader, {'shuffled' if shuffle else 'plain'}"
            ways |= bench.pair(title, "torch_pictures", num_rows, path=folder, shuffle=shuffle)
            least[title] = 3
        ways |= bench.pair(f"{name}, row by row", "rows", num_rows, path=folder)
        least[f"{name}, row by row"] = 2
    compare(bench, ways, least)


def scalars(bench: Bench) -> None:
    """`make_reader`, three scalars, row by row."""
    num_rows = bench.size(NUM_SCALARS)
    folder = once(f"{bench.folder}/scalars-{num_rows}", functools.partial(write_scalars, num_rows=num_rows))
    compare(bench, bench.pair("scalars, row by row", "rows", num_rows, path=folder), {"scalars, row by row": 20})


def tensorflow(bench: Bench) -> None:
    """`make_petastorm_dataset` of a batch reader, and the converter's `make_tf_dataset`."""
    for name, rows in spark_rows(bench).items():
        ways: dict[str, Way] = {}
        least: dict[str, float | None] = {}
        for is_cut, title in ((False, f"{name}, row groups as they come"), (True, f"{name}, unbatch().batch(1024)")):
            ways |= bench.pair(title, "tf_batches", rows.num_rows, path=rows.parquet, is_cut=is_cut)
            least[title] = None if is_cut else 10
        for shuffle in (True, False):
            title = f"{name}, make_tf_dataset, {'shuffled' if shuffle else 'plain'}"
            options = {"path": rows.parquet, "dataset_size": rows.num_rows, "shuffle": shuffle}
            ways |= bench.pair(title, "tf_converter", rows.num_rows, **options)
            least[title] = 20
        compare(bench, ways, least)


def ngram(bench: Bench) -> None:
    """Windows of 16 rows of ten floats, one after the other."""
    rows_of_a_key = bench.size(ROWS_OF_A_KEY)
    folder = once(
        f"{bench.folder}/windows-{rows_of_a_key}", functools.partial(write_windows, rows_of_a_key=rows_of_a_key)
    )
    size = min(ROWS_OF_A_WINDOWED_GROUP, rows_of_a_key)
    num_windows = NUM_KEYS * rows_of_a_key // size * (size - LENGTH + 1)
    compare(bench, bench.pair("windows", "windows", num_windows, path=folder), {"windows": 20})


def opening(bench: Bench) -> None:
    """Stores of 5,000 small files: until there is a reader, and until there is a row."""
    num_files = bench.size(NUM_FILES)
    ways: dict[str, Way] = {}
    times: dict[str, list[Epoch]] = {}
    for kind, is_described in (("make_reader", True), ("make_batch_reader", False)):
        big, small = (
            once(
                f"{bench.folder}/{'store' if is_described else 'files'}-{count}",
                functools.partial(write_many, num_files=count, is_described=is_described),
            )
            for count in (num_files, 2)
        )
        ways |= bench.pair(kind, "opening", 1, path=big, small_path=small, reader_kind=kind)
    os.sync()
    in_turns(ways, bench.options.repeats)
    for name, way in ways.items():
        times[name] = way.epochs
    table = []
    for kind in ("make_reader", "make_batch_reader"):
        for part, text in (("to_make", "until there is a reader"), ("seconds", "until there is a row")):
            both = [times[f"{package}: {kind}"] for package in PACKAGES]
            if not all(both):
                table.append([kind, text, "–", "–", "–", "≥ 5", "not measured"])
                continue
            ours, theirs = (statistics.median(epoch[part] for epoch in one) for one in both)
            verdict = "met" if theirs >= 5 * ours else "missed"
            table.append([kind, text, f"{ours:.3f} s", f"{theirs:.3f} s", f"{theirs / ours:.1f}", "≥ 5", verdict])
    print_table([f"{num_files:,} files", "", OURS, THEIRS, "ratio", "goal", ""], table)
    print_memory(bench, ["make_reader", "make_batch_reader"])


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "tables": tables,
    "images": pictures,
    "scalars": scalars,
    "tensorflow": tensorflow,
    "ngram": ngram,
    "opening": opening,
}


def main(arguments: Any = None) -> None:
    """Run everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", choices=SECTIONS, metavar="NAME", help=f"of {', '.join(SECTIONS)} (default: all)")
    add("--repeats", type=int, help="turns of each way (default: 3)")
    add("--quick", action="store_true", help="a twentieth of the rows, one turn")
    add("--data", help="where the rows are kept and taken from again (default: nowhere)")
    add("--peers", help="where the environments are (default: in the user's cache folder)")
    add("--without-peers", action="store_true", help="leave Petastorm out")
    add("--peer-seconds", type=float, default=30.0, help="most seconds of an epoch (default: %(default)s)")
    add("--petastorm-python", help=f"a Python of Petastorm's time: {', '.join(read.PETASTORM_PYTHONS)}")
    add("--ray-python", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.repeats = options.repeats or (1 if options.quick else 3)
    options.peers = options.peers or platformdirs.user_cache_path("spark-tensor-converter-bench")
    images.enter_requirements()
    print(f"{read.machine()}, {options.repeats} turns{', a twentieth of the rows' * options.quick}\n", flush=True)
    with contextlib.ExitStack() as stack:
        folder = os.path.abspath(options.data or stack.enter_context(tempfile.TemporaryDirectory(prefix="petastorm")))
        os.makedirs(folder, exist_ok=True)
        bench = Bench(options, folder)
        for name in [name for name in SECTIONS if name in (options.only or SECTIONS)]:
            before = os.getloadavg()[0]
            print(f"### {name}: {SECTIONS[name].__doc__}\n", flush=True)
            SECTIONS[name](bench)
            print(f"Load of the machine: {before:.1f} before, {os.getloadavg()[0]:.1f} after.\n", flush=True)
    for name, versions in bench.versions.items():
        print(f"{name} ran with {versions}.")


if __name__ == "__main__":
    main()
