#!/usr/bin/env python3
"""What columns of categories cost: written beside the same rows as text and as int32, and read beside int32.

    python tests/bench/values.py             # some five minutes on two cores
    python tests/bench/values.py --quick     # small: does it run at all?

Rows: 2 M of eight columns with 2, 14, 100, 1,000, 10,000, 50, 5 and 300 different values. `int32` holds the codes,
`text` the values; `categories` is the text with `categories=` of all eight, from Spark's executors and over the Parquet
files that `df.write.parquet` wrote. Batches have 1,024 rows, and one element of each tensor is read. The ways run in
turns after one that does not count, and medians are compared. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from converter import DatasetConverter, make_parquet_converter, make_spark_converter, start_local_spark

SIZES = (2, 14, 100, 1_000, 10_000, 50, 5, 300)


def frames(spark: SparkSession, num_rows: int) -> dict[str, DataFrame]:
    """The rows as codes and as text."""
    codes = [(F.xxhash64("id", F.lit(index)) % size).alias(f"c{index}") for index, size in enumerate(SIZES)]
    drawn = spark.range(0, num_rows, 1, 2).select(*codes)
    names = [f"c{index}" for index in range(len(SIZES))]
    whole = drawn.select(
        *(F.pmod(name, F.lit(size)).cast("int").alias(name) for name, size in zip(names, SIZES, strict=True))
    )
    text = whole.select(*(F.format_string("value %05d", name).alias(name) for name in names))
    return {"int32": whole, "text": text}


def time_epoch(converter: DatasetConverter, *, shuffle: bool) -> float:
    """Seconds of one epoch of a torch loader."""
    with converter.make_torch_dataloader(batch_size=1024, shuffle=shuffle) as loader:
        start = time.perf_counter()
        for batch in loader:
            for column in batch.values():
                column[0]
        return time.perf_counter() - start


def main() -> None:
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rows, one turn")
    parser.add_argument("--turns", type=int, default=7, help="default: %(default)s")
    options = parser.parse_args()
    num_rows, turns = (20_000, 1) if options.quick else (2_000_000, options.turns)
    names = [f"c{index}" for index in range(len(SIZES))]
    spark = start_local_spark("values", master="local[2]")
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    with tempfile.TemporaryDirectory() as folder:
        rows = {name: str(Path(folder) / name) for name in ("int32", "text")}
        for name, df in frames(spark, num_rows).items():
            df.write.parquet(rows[name])
        sources: dict[str, dict[str, Any]] = {
            "int32": {"df": spark.read.parquet(rows["int32"])},
            "text": {"df": spark.read.parquet(rows["text"])},
            "categories": {"df": spark.read.parquet(rows["text"]), "categories": names},
            "categories, writer='spark'": {
                "df": spark.read.parquet(rows["text"]),
                "categories": names,
                "writer": "spark",
            },
        }
        seconds: dict[str, list[float]] = {name: [] for name in sources}
        for turn in range(turns + 1):
            for name, arguments in sources.items():
                start = time.perf_counter()
                converter = make_spark_converter(cache_dir=folder, cache_key=f"{name}{turn}", **arguments)
                if turn:
                    seconds[name].append(time.perf_counter() - start)
                converter.delete()
        print(f"Writing {num_rows:,} rows, median of {turns}\n\n| way | seconds | beside text |\n| --- | --- | --- |")
        text = statistics.median(seconds["text"])
        for name, measured in seconds.items():
            print(f"| {name} | {statistics.median(measured):.2f} | {text / statistics.median(measured):.2f} |")
        converters = {name: make_spark_converter(cache_dir=folder, **arguments) for name, arguments in sources.items()}
        converters["Parquet of int32"] = make_parquet_converter(rows["int32"])
        converters["Parquet of text, categories"] = make_parquet_converter(rows["text"], categories=names)
        del converters["text"]
        for shuffle in (True, False):
            epochs: dict[str, list[float]] = {name: [] for name in converters}
            for turn in range(turns + 1):
                for name, converter in converters.items():
                    measured_seconds = time_epoch(converter, shuffle=shuffle)
                    if turn:
                        epochs[name].append(measured_seconds)
            order = "shuffled" if shuffle else "in order"
            print(
                f"\nReading {order}, torch, median of {turns}\n\n| way | M rows/s | beside int32 |\n| --- | --- | --- |"
            )
            int32 = statistics.median(epochs["int32"])
            for name, measured in epochs.items():
                median = statistics.median(measured)
                print(f"| {name} | {num_rows / median / 1e6:.2f} | {int32 / median:.2f} |")
        for converter in converters.values():
            converter.delete()
    spark.stop()


if __name__ == "__main__":
    main()
