#!/usr/bin/env python3
"""How long `make_spark_converter` takes beside `df.write.parquet` of the same frame, in one run, as ratios.

    python tests/bench/write.py                  # all of it, some minutes on two cores
    python tests/bench/write.py --rows 0.1       # a tenth of the rows

Frames, from Parquet sources, in local[2]: tab = 2 M rows of a long and 40 floats, emb = 200 k rows of a long, a
float[512] of incompressible values and a label, img = 20 k rows of 10 kB of binary. Each pair is run in turns (A B A B
…) after one warm-up of both; the median of each is compared. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from converter import make_spark_converter, start_local_spark

GOALS = {"tab": 0.7, "emb": 0.4, "img": 1.0}


def frames(spark: SparkSession, folder: str, share: float) -> dict[str, DataFrame]:
    """The three frames, read from Parquet files of their own."""
    made = {
        "tab": spark.range(0, int(2_000_000 * share), 1, 4).select(
            "id", *[F.rand(seed=column).cast("float").alias(f"f{column}") for column in range(40)]
        ),
        "emb": spark.range(0, int(200_000 * share), 1, 4).select(
            "id",
            F.array(*[F.rand(seed=element).cast("float") for element in range(512)]).alias("embedding"),
            (F.col("id") % 10).cast("int").alias("label"),
        ),
        "img": spark.range(0, int(20_000 * share), 1, 4).select(
            "id",
            F.concat(*[F.unhex(F.sha2(F.concat("id", F.lit(part)), 256)) for part in range(320)]).alias("image"),
        ),
    }
    for name, frame in made.items():
        frame.write.parquet(f"{folder}/{name}")
    return {name: spark.read.parquet(f"{folder}/{name}") for name in made}


def in_turns(ways: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """The median seconds of each way, run in turns after one run of each that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def compare(df: DataFrame, folder: str, repeats: int) -> tuple[float, float]:
    """Median seconds of Spark's own write, and of ours."""

    def write() -> None:
        df.write.mode("overwrite").parquet(f"{folder}/out")

    def convert() -> None:
        make_spark_converter(df, cache_dir=f"{folder}/cache", progress=False).delete()

    found = in_turns({"write": write, "convert": convert}, repeats)
    return found["write"], found["convert"]


def main(arguments: Any = None) -> None:
    """Run everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, default=1.0, help="share of the rows (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="counted runs of each way (default: %(default)s)")
    options = parser.parse_args(arguments)
    spark = start_local_spark("bench", master="local[2]", conf={"spark.driver.memory": "4g"})
    versions = f"Spark {pyspark.__version__}, pyarrow {pa.__version__}, Python {platform.python_version()}"
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {versions}\n")
    with tempfile.TemporaryDirectory() as folder:
        made = frames(spark, folder, options.rows)
        print("| frame | df.write.parquet | make_spark_converter | ratio | goal |\n|---|---|---|---|---|")
        for name, frame in made.items():
            theirs, ours = compare(frame, folder, options.repeats)
            print(f"| {name} | {theirs:.2f} s | {ours:.2f} s | {ours / theirs:.2f} | ≤ {GOALS[name]} |", flush=True)
        tenth = made["tab"].where(f"id < {int(200_000 * options.rows)}")
        found = in_turns(
            {
                "tenth": lambda: make_spark_converter(tenth, cache_dir=f"{folder}/cache", progress=False).delete(),
                "whole": lambda: make_spark_converter(
                    made["tab"], cache_dir=f"{folder}/cache", progress=False
                ).delete(),
            },
            options.repeats,
        )
        small = spark.range(0, 200_000, 1, 2000).select("id", F.rand(seed=1).alias("x"))
        theirs, ours = compare(small, folder, max(1, options.repeats // 2))
    print("\n| also | seconds | ratio | goal |\n|---|---|---|---|")
    growth = found["whole"] / found["tenth"]
    print(f"| tab whole against a tenth | {found['whole']:.2f} / {found['tenth']:.2f} | {growth:.1f} | ≤ 10.5 |")
    print(f"| 2,000 partitions of a small frame | {ours:.2f} / {theirs:.2f} | {ours / theirs:.2f} | ≤ 1.2 |")
    spark.stop()


if __name__ == "__main__":
    main()
