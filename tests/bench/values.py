#!/usr/bin/env python3
"""What columns of categories, a thousand columns and columns of lists cost.

    python tests/bench/values.py                     # some ten minutes on two cores
    python tests/bench/values.py --only lists wide
    python tests/bench/values.py --quick             # small: does it run at all?

- `categories`: 2 M rows of eight columns with 2, 14, 100, 1,000, 10,000, 50, 5 and 300 different values. `int32` holds
  the codes, `text` the values; `categories` is the text with `categories=` of all eight. They are written by Spark's
  executors and by Spark's own writer, and read from what was written and from the files of `df.write.parquet`.
- `wide`: 400 MB of floats in 40 columns and in 1,000, each as one stack.
- `lists`: 400 k rows of 1 to 40 floats and of 1 to 8 texts, as `df.write.parquet` wrote them. The loops are
  what one would write by hand with pyarrow and torch: a batch at a time, in order. Ours is in order, too.

Batches have 1,024 rows (lists 256), and one element of each tensor is read. One loader runs all epochs of a way. The
ways run in turns after one that does not count, and medians are compared. Prints Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from converter import DatasetConverter, make_parquet_converter, make_spark_converter, start_local_spark

SIZES = (2, 14, 100, 1_000, 10_000, 50, 5, 300)
NAMES = [f"c{index}" for index in range(len(SIZES))]
LIST_BATCH_SIZE = 256

Ways = dict[str, Callable[[], float]]
"""Each runs one time and returns what is compared, usually seconds."""


def in_turns(ways: Ways, turns: int) -> dict[str, float]:
    """The median of each way."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, run in ways.items():
            measured = run()
            if turn:
                found[name].append(measured)
    return {name: statistics.median(measured) for name, measured in found.items()}


def epochs_of(
    open_loaders: contextlib.ExitStack,
    converter: DatasetConverter,
    *,
    batch_size: int = 1024,
    framework: str = "torch",
    **options: Any,
) -> Callable[[], float]:
    """Seconds of one epoch after another of one loader, or with `framework="numpy"` of one reader."""
    make = converter.make_batch_reader if framework == "numpy" else converter.make_torch_dataloader
    loader = open_loaders.enter_context(make(batch_size=batch_size, **options))

    def run() -> float:
        start = time.perf_counter()
        for batch in loader:
            for column in batch.values():
                # To index a nested tensor takes as long as to make it.
                column.size(0) if getattr(column, "is_nested", False) else column[0]
        return time.perf_counter() - start

    return run


def print_table(title: str, head: str, rows: list[tuple[str, str, str]]) -> None:
    print(f"\n{title}\n\n| way | {head} |\n| --- | --- | --- |")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def category_frames(spark: SparkSession, num_rows: int) -> dict[str, DataFrame]:
    """The rows as codes and as text."""
    codes = [(F.xxhash64("id", F.lit(index)) % size).alias(f"c{index}") for index, size in enumerate(SIZES)]
    drawn = spark.range(0, num_rows, 1, 2).select(*codes)
    whole = drawn.select(
        *(F.pmod(name, F.lit(size)).cast("int").alias(name) for name, size in zip(NAMES, SIZES, strict=True))
    )
    text = whole.select(*(F.format_string("value %05d", name).alias(name) for name in NAMES))
    return {"int32": whole, "text": text}


def categories(spark: SparkSession, folder: str, turns: int, *, is_quick: bool) -> None:
    num_rows = 20_000 if is_quick else 2_000_000
    rows = {name: f"{folder}/{name}" for name in ("int32", "text")}
    for name, df in category_frames(spark, num_rows).items():
        df.write.parquet(rows[name])
    coded: dict[str, dict[str, Any]] = {"int32": {}, "text": {}, "categories": {"categories": NAMES}}
    for writer in ("executors", "spark"):
        made = {
            name: functools.partial(
                make_spark_converter,
                spark.read.parquet(rows["int32" if name == "int32" else "text"]),
                cache_dir=folder,
                writer=writer,
                **arguments,
            )
            for name, arguments in coded.items()
        }

        def write(name: str, made: dict[str, Any] = made) -> float:
            start = time.perf_counter()
            converter = made[name](cache_key=str(time.time_ns()))
            seconds = time.perf_counter() - start
            converter.delete()
            return seconds

        found = in_turns({name: functools.partial(write, name) for name in made}, turns)
        print_table(
            f"Writing {num_rows:,} rows of eight columns, writer={writer!r}",
            "seconds | beside text",
            [(name, f"{seconds:.2f}", f"{seconds / found['text']:.2f}") for name, seconds in found.items()],
        )
    sources = {
        f"by writer={writer!r}": {
            "int32": make_spark_converter(spark.read.parquet(rows["int32"]), cache_dir=folder, writer=writer),
            "categories": make_spark_converter(
                spark.read.parquet(rows["text"]), cache_dir=folder, writer=writer, categories=NAMES
            ),
        }
        for writer in ("executors", "spark")
    }
    sources["Parquet files of Spark"] = {
        "int32": make_parquet_converter(rows["int32"]),
        "categories": make_parquet_converter(rows["text"], categories=NAMES),
    }
    for shuffle in (True, False):
        table = []
        for source, converters in sources.items():
            with contextlib.ExitStack() as loaders:
                ways = {name: epochs_of(loaders, one, shuffle=shuffle) for name, one in converters.items()}
                found = in_turns(ways, turns)
            table += [
                (f"{name}, {source}", f"{num_rows / seconds / 1e6:.1f}", f"{found['int32'] / seconds:.2f}")
                for name, seconds in found.items()
            ]
        print_table(f"Reading {'shuffled' if shuffle else 'in order'}, torch", "M rows/s | beside int32", table)
    for converters in sources.values():
        for converter in converters.values():
            converter.delete()


def wide(spark: SparkSession, folder: str, turns: int, *, is_quick: bool) -> None:
    num_bytes = 4_000_000 if is_quick else 400_000_000
    converters: dict[int, DatasetConverter] = {}
    for num_columns in (40, 1000):
        numbers = [F.rand(seed=column).cast("float").alias(f"f{column}") for column in range(num_columns)]
        df = spark.range(0, num_bytes // (4 * num_columns), 1, 2).select(*numbers)
        converters[num_columns] = make_spark_converter(df, cache_dir=folder, cache_key=f"wide{num_columns}")
    for shuffle in (True, False):
        with contextlib.ExitStack() as loaders:
            ways: Ways = {}
            for number, converter in converters.items():
                stack = {"features": [f"f{column}" for column in range(number)]}
                ways[f"{number:,} columns as a stack"] = epochs_of(loaders, converter, stack=stack, shuffle=shuffle)
            ways["1,000 columns, each a tensor"] = epochs_of(loaders, converters[1000], shuffle=shuffle)
            found = in_turns(ways, turns)
        first = found["40 columns as a stack"]
        print_table(
            f"Reading {num_bytes / 1e6:.0f} MB of floats {'shuffled' if shuffle else 'in order'}, torch",
            "MB/s | beside 40 columns",
            [(name, f"{num_bytes / seconds / 1e6:.0f}", f"{first / seconds:.2f}") for name, seconds in found.items()],
        )
    for converter in converters.values():
        converter.delete()


def by_hand(folder: str, column: str, make: Callable[[pa.Array], Any]) -> float:
    """Seconds of a loop over the batches of a column."""
    start = time.perf_counter()
    for path in sorted(Path(folder).glob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(LIST_BATCH_SIZE, columns=[column]):
            make(batch.column(0))
    return time.perf_counter() - start


def rows_of(column: pa.Array) -> Iterator[torch.Tensor]:
    return map(torch.from_numpy, column.to_numpy(zero_copy_only=False))


def texts_of(column: pa.Array) -> Any:
    rows = np.empty(len(column), object)
    rows[:] = [np.array(row, object) for row in column.to_pylist()]
    return rows


def lists(spark: SparkSession, folder: str, turns: int, *, is_quick: bool) -> None:
    num_rows = 8_000 if is_quick else 400_000
    floats = "transform(sequence(1, 1 + int(pmod(xxhash64(id), 40))), i -> float(pmod(xxhash64(id, i), 1000)) / 7)"
    words = "transform(sequence(1, 1 + int(pmod(xxhash64(id), 8))), i -> concat('word', pmod(xxhash64(id, i), 5000)))"
    drawn = spark.range(0, num_rows, 1, 2)
    drawn.select(F.expr(floats).cast("array<float>").alias("x"), F.expr(words).alias("words")).write.parquet(folder)
    converter = make_parquet_converter(folder)
    table = []

    def nested(column: pa.Array) -> Any:
        return torch.nested.nested_tensor(list(rows_of(column)), layout=torch.jagged)

    def padded(column: pa.Array) -> Any:
        return torch.nn.utils.rnn.pad_sequence(list(rows_of(column)), batch_first=True)

    cases: list[tuple[str, str, Callable[[pa.Array], Any], dict[str, Any]]] = [
        ("floats, padded", "x", padded, {"ragged": "pad"}),
        ("floats, torch.nested", "x", nested, {"ragged": "nested"}),
        ("texts, torch: list[list[str]]", "words", pa.Array.to_pylist, {"ragged": "nested"}),
        ("texts, NumPy objects", "words", texts_of, {"framework": "numpy"}),
    ]
    for name, column, make, options in cases:
        options |= {"batch_size": LIST_BATCH_SIZE, "columns": [column]}
        with contextlib.ExitStack() as loaders:
            ways: Ways = {
                "loop": functools.partial(by_hand, folder, column, make),
                "ours": epochs_of(loaders, converter, **options),
                "ours, shuffled": epochs_of(loaders, converter, shuffle=True, **options),
            }
            found = in_turns(ways, turns)
        table += [
            (f"{name}: {way}", f"{num_rows / seconds / 1e3:.0f}", f"{found['loop'] / seconds:.1f}")
            for way, seconds in found.items()
        ]
    print_table(f"Reading {num_rows:,} rows of lists from Spark's files", "k rows/s | beside the loop", table)


SECTIONS = {"categories": categories, "wide": wide, "lists": lists}


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="default: all")
    parser.add_argument("--quick", action="store_true", help="few rows, one turn")
    parser.add_argument("--turns", type=int, default=5, help="default: %(default)s")
    options = parser.parse_args()
    spark = start_local_spark("values", master="local[2]")
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Python {platform.python_version()}")
    for name in options.only:
        folder = tempfile.mkdtemp(prefix=name)
        try:
            SECTIONS[name](spark, f"{folder}/rows", 1 if options.quick else options.turns, is_quick=options.quick)
        finally:
            shutil.rmtree(folder)
    spark.stop()


if __name__ == "__main__":
    main()
