#!/usr/bin/env python3
"""Files that a real Spark wrote, and what it reads in them: every type with a tensor form, in every way to write it.

The tests write those of the Spark that they run with. Those of Spark 3.5 are kept beside this file, because both cannot
be in one environment; they were written by

    python tests/parity/spark_files.py        # by the Python of an environment with pyspark 3.5
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa

FRAME = """
        SELECT id, id % 2 = 0 AS flag, CAST(id - 100 AS BYTE) i8, CAST(id * 300 - 30000 AS SHORT) i16,
          CAST(id * 20000000 - 2000000000 AS INT) i32, (id - 100) * 90000000000000000 i64,
          CASE id % 5 WHEN 0 THEN FLOAT('NaN') WHEN 1 THEN FLOAT('-Infinity') ELSE CAST(id / 7 AS FLOAT) END f32,
          CASE id % 5 WHEN 0 THEN DOUBLE('NaN') WHEN 1 THEN DOUBLE('Infinity') ELSE id / 7 END f64,
          CAST(id / 7 AS DECIMAL(9, 3)) d9, CAST(-id / 7 AS DECIMAL(18, 6)) d18, CAST(id / 7 AS DECIMAL(38, 18)) d38,
          CAST(id * 1e30 AS DECIMAL(38, 0)) d0, CAST(id / 700 AS DECIMAL(3, 2)) d3,
          date_add(DATE'1583-01-01', CAST(id * 15000 AS INT)) day,
          timestamp_micros((id - 100) * 1000003 * 86400) time,
          CAST(timestamp_micros(-id * 1000001 * 86399) AS TIMESTAMP_NTZ) ntz,
          CASE WHEN id % 7 = 0 THEN '' WHEN id % 3 > 0 THEN repeat('ž', CAST(id % 9 AS INT)) END text,
          CASE WHEN id % 5 > 0 THEN CAST(CAST(id AS STRING) AS BINARY) END bytes,
          CASE WHEN id % 4 > 0 THEN id END some, CASE WHEN id % 4 > 0 THEN sequence(1, id % 4) END list,
          transform(sequence(1, id % 3), i -> CAST(i / 10 AS DECIMAL(12, 2))) decimals,
          CASE WHEN id % 6 > 0 THEN array(array(id, 1L), array(2L, 3L)) END nested,
          CASE WHEN id % 6 > 0 THEN named_struct('a', nullif(id, 2), 'b', named_struct('c', CAST(id AS STRING),
            'l', array(id)), 'd', CAST(id AS DECIMAL(12, 1))) END struct,
          array(id, id + 1) pair
        FROM range(0, 200, 1, 1)
    """

WAYS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "as it is": ({}, {}),
    "INT96": ({"spark.sql.parquet.outputTimestampType": "INT96"}, {}),
    "milliseconds": ({"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MILLIS"}, {}),
    "legacy": ({"spark.sql.parquet.writeLegacyFormat": "true"}, {}),
    "second version": ({}, {"parquet.writer.version": "PARQUET_2_0", "compression": "zstd"}),
    "second version, plain": ({}, {"parquet.writer.version": "PARQUET_2_0", "parquet.enable.dictionary": "false",
                                   "compression": "uncompressed"}),
    "gzip": ({}, {"compression": "gzip"}),
    "lz4": ({}, {"compression": "lz4"}),
    "lz4 raw": ({}, {"compression": "lz4_raw"}),
    "plain": ({}, {"compression": "uncompressed", "parquet.enable.dictionary": "false"}),
    "small": ({}, {"parquet.block.size": "3000", "parquet.page.size": "100", "parquet.page.row.count.limit": "7",
                   "parquet.block.size.row.check.min": "10", "parquet.page.size.row.check.min": "3"}),
    "filters of Bloom": ({}, {"parquet.bloom.filter.enabled": "true"}),
}  # fmt: skip
"""For each way the session's confs and the writer's options."""

OLD_FILES = Path(__file__).with_name("spark-3.5.9")
OLD_WAYS = ("as it is", "INT96", "milliseconds", "legacy", "gzip", "plain", "small")


def main() -> None:
    """Write one file in each way, and as an Arrow file what Spark reads in it."""
    from pyspark import __version__
    from pyspark.sql import SparkSession

    if __version__ != OLD_FILES.name.removeprefix("spark-"):
        raise SystemExit(f"This is Spark {__version__}; the files are of {OLD_FILES.name}.")
    confs = {"spark.sql.session.timeZone": "America/New_York", "spark.ui.enabled": "false"}
    builder: Any = SparkSession.builder
    spark = builder.master("local[1]").config(map=confs).getOrCreate()
    shutil.rmtree(OLD_FILES, ignore_errors=True)
    OLD_FILES.mkdir()
    for way in OLD_WAYS:
        changed, options = WAYS[way]
        for name, value in changed.items():
            spark.conf.set(name, value)
        with tempfile.TemporaryDirectory() as folder:
            spark.sql(FRAME).write.options(**options).parquet(f"{folder}/x")
            for name in changed:
                spark.conf.unset(name)
            frame = spark.read.parquet(f"{folder}/x").orderBy("id")
            table = pa.Table.from_batches(frame._collect_as_arrow())
            (written,) = Path(folder, "x").glob("*.parquet")
            shutil.copyfile(written, OLD_FILES / f"{way}.parquet")
        with pa.OSFile(str(OLD_FILES / f"{way}.arrow"), "wb") as file:
            options = pa.ipc.IpcWriteOptions(compression="zstd")
            with pa.ipc.new_file(file, table.schema, options=options) as writer:
                writer.write_table(table)
    spark.stop()


if __name__ == "__main__":
    main()
