#!/usr/bin/env python3
"""How long `make_spark_converter` takes beside `df.write.parquet` of the same frame, in one run, as ratios.

    python tests/bench/write.py                  # all of it, some minutes on two cores
    python tests/bench/write.py --rows 0.1       # a tenth of the rows

Frames, from Parquet sources, in local[2]: tab = 2 M rows of a long and 40 floats, emb = 200 k rows of a long, a
float[512] of incompressible values and a label, img = 20 k rows of 10 kB of binary. Each pair is run in turns (A B A B
…) after one warm-up of both, with the disk's buffers flushed and the JVM's garbage collected before each run; the
median of each is compared. "Without statistics" and "without digest" are the same conversion with that part of the
executors' work left out, and in brackets what the whole takes against it. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from converter import make_spark_converter, start_local_spark
from converter.manifest import Manifest
from converter.portable import moments, parquet_file, tasks
from converter.schema import Field, Schema
from converter.statistics import ColumnStatistics

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
            os.sync()
            collect_garbage()
            start = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def collect_garbage() -> None:
    """Let no way pay for what another one has left in the JVM."""
    session = SparkSession.getActiveSession()
    assert session is not None
    session._jvm.System.gc()


def convert(df: DataFrame, folder: str) -> None:
    """One conversion, and the end of its entry."""
    make_spark_converter(df, cache_dir=f"{folder}/cache", progress=False).delete()


def without(part: str, run: Callable[[], None]) -> None:
    """Run with a part of what the executors do left out; the module travels by value, so changed as it is here."""
    patches: dict[str, tuple[Any, str, Any]] = {
        "statistics": (tasks, "add_values", lambda *_: None),
        "digest": (parquet_file, "zlib", SimpleNamespace(crc32=lambda _, before=0: before)),
    }
    with mock.patch.object(*patches[part]):
        run()


def compare(df: DataFrame, folder: str, repeats: int) -> dict[str, float]:
    """Median seconds of Spark's own write, of ours, and of ours without its statistics and without its digest."""

    def write() -> None:
        df.write.mode("overwrite").parquet(f"{folder}/out")

    def ours() -> None:
        convert(df, folder)

    return in_turns(
        {
            "write": write,
            "ours": ours,
            "statistics": lambda: without("statistics", ours),
            "digest": lambda: without("digest", ours),
        },
        repeats,
    )


def big_manifest() -> tuple[float, float, float, float]:
    """Seconds to write and to load a manifest of 10^5 row groups × 41 columns, its megabytes, and those of memory."""
    fields = [Field(name=f"f{index}", dtype="float32") for index in range(41)]
    counted = moments.new_moments(1)
    moments.add_values(counted, np.random.default_rng(0).random((1000, 1)), moments.new_scratch())
    closed = moments.close_moments(counted)
    manifest = Manifest(
        schema=Schema(tuple(fields)),
        file_names=tuple(f"data-{'0' * 32}/part-{file:05d}-{file:08x}-0000.parquet" for file in range(10_000)),
        file_bytes=np.full(10_000, 84_123_456),
        row_group_file=np.repeat(np.arange(10_000), 10),
        row_group_rows=np.full(100_000, 50_123),
        row_group_bytes=np.full(100_000, 8_412_345),
        fingerprint="0" * 32,
        num_rows=100_000 * 50_123,
        statistics={field.name: ColumnStatistics(field=field, null_count=0, closed=closed) for field in fields},
    )
    start = time.perf_counter()
    data = manifest.to_json()
    written = time.perf_counter()
    Manifest.from_json(data, path="manifest.json")
    loaded = time.perf_counter()
    tracemalloc.start()
    Manifest.from_json(manifest.to_json(), path="manifest.json")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return written - start, loaded - written, len(data) / 1e6, peak / 1e6


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
        print(
            "| frame | df.write.parquet | make_spark_converter | ratio | goal | without statistics | without digest |"
        )
        print("|---|---|---|---|---|---|---|")
        for name, frame in made.items():
            found = compare(frame, folder, options.repeats)
            parts = " | ".join(
                f"{found[part]:.2f} s ({found['ours'] / found[part]:.2f})" for part in ("statistics", "digest")
            )
            times = f"{found['write']:.2f} s | {found['ours']:.2f} s | {found['ours'] / found['write']:.2f}"
            print(f"| {name} | {times} | ≤ {GOALS[name]} | {parts} |", flush=True)
        tenth = made["tab"].where(f"id < {int(200_000 * options.rows)}")
        memory = {}
        growth = in_turns({"tenth": lambda: convert(tenth, folder)}, options.repeats)
        memory["tenth"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        growth |= in_turns({"whole": lambda: convert(made["tab"], folder)}, options.repeats)
        memory["whole"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        small = spark.range(0, 200_000, 1, 2000).select("id", F.rand(seed=1).alias("x"))
        found = in_turns(
            {
                "write": lambda: small.write.mode("overwrite").parquet(f"{folder}/out"),
                "ours": lambda: convert(small, folder),
            },
            max(1, options.repeats // 2),
        )
    print("\n| also | found | ratio | goal |\n|---|---|---|---|")
    ratio = growth["whole"] / growth["tenth"]
    print(f"| tab whole against a tenth | {growth['whole']:.2f} s / {growth['tenth']:.2f} s | {ratio:.1f} | ≤ 10.5 |")
    ratio = found["ours"] / found["write"]
    print(
        f"| 2,000 partitions of a small frame | {found['ours']:.2f} s / {found['write']:.2f} s | {ratio:.2f} | ≤ 1.2 |"
    )
    ratio = memory["whole"] / memory["tenth"]
    print(
        f"| peak memory of the driver's Python | {memory['whole']:.0f} MB / {memory['tenth']:.0f} MB | {ratio:.2f} | |"
    )
    written, loaded, size, peak = big_manifest()
    print(f"| manifest of 10^5 row groups × 41 columns: written, loaded | {written:.3f} s, {loaded:.3f} s | | < 1 s |")
    print(f"| the same: file, memory | {size:.1f} MB, {peak:.0f} MB | | < 100 MB |")
    spark.stop()


if __name__ == "__main__":
    main()
