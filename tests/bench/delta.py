"""The section `delta` of read.py: a Delta table read as it stands, beside the same files as Parquet, as ratios.

    python tests/bench/read.py --only delta

The table is made of the very files that `df.write.parquet` wrote, by hard links and a log that deltalake writes. The
one with deleted rows is written by Delta itself (10 % deleted, as deletion vectors), and compared with its own first
version. "By hand" is a loop over `DeltaTable.to_pyarrow_dataset().to_batches()`. DeltaTorch and Ray Data read the table
of Spark's files; DeltaTorch shuffles within record batches alone. Opening: a log of 100,000 files with statistics, all
of them hard links to two small files, in a process of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from peers_read import timed_epoch
from read import BATCH_SIZE, Bench, Goal, Opened, Way, apart, as_tensor, in_turns, print_ratios, print_table, print_ways

import converter

MANY_FILES, MOST_LINKS = 100_000, 50_000
DELTA, DELTA_PLAIN = "Delta, shuffled", "Delta, plain order"
PARQUET, PARQUET_PLAIN = "the same files as Parquet, shuffled", "the same files as Parquet, plain order"
WHOLE, DELETED = "written by Delta, shuffled", "10 % of its rows deleted, shuffled"
BY_HAND = "to_pyarrow_dataset by hand, plain order"
DELTATORCH, RAY = "DeltaTorch, shuffled", "Ray Data's read_delta, shuffled"
PEER_GOALS: dict[str, dict[str, float]] = {"tab": {DELTATORCH: 100, RAY: 20}, "emb": {}}


def run(bench: Bench) -> None:
    """Tables of tab and emb, then a log of many files."""
    rows = bench.rows["tab"]
    folder = os.path.dirname(os.path.dirname(str(rows.parquet)))
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for name in ("tab", "emb"):
            read_table(bench, name, scratch)
        num_files = MANY_FILES if not bench.options.quick else 1000
        write_log(f"{scratch}/many", num_files)
        seconds, megabytes = zip(*(apart(open_table, f"{scratch}/many") for _ in range(3)), strict=True)
        print_table(
            ["opening a log of", "seconds", "goal", "memory of the process", "goal"],
            [
                [
                    f"{num_files:,} files",
                    f"{statistics.median(seconds):.2f}",
                    "< 5",
                    f"{max(megabytes):.0f} MB",
                    "< 1 GB",
                ]
            ],
        )


def read_table(bench: Bench, name: str, scratch: str) -> None:
    """One table in turns."""
    source = str(bench.rows[name].parquet)
    table, deleted = f"{scratch}/{name}", f"{scratch}/{name}-deleted"
    link_table(source, table)
    num_left = apart(delete_rows, source, deleted)
    with Opened() as opened:

        def way(made: Any, num_rows: int, **options: Any) -> Way:
            loader = opened.enter(opened.enter(made).make_torch_dataloader(batch_size=BATCH_SIZE, **options))
            return Way(run=lambda: [timed_epoch(lambda: loader)], num_rows=num_rows)

        num_rows = bench.rows[name].num_rows
        ways = {
            DELTA: way(converter.make_delta_converter(table), num_rows, shuffle=True),
            DELTA_PLAIN: way(converter.make_delta_converter(table), num_rows),
            PARQUET: way(converter.make_parquet_converter(source), num_rows, shuffle=True),
            PARQUET_PLAIN: way(converter.make_parquet_converter(source), num_rows),
            WHOLE: way(converter.make_delta_converter(deleted, version=0), num_rows, shuffle=True),
            DELETED: way(converter.make_delta_converter(deleted), num_left, shuffle=True),
        }
        in_turns(ways, bench.options.repeats)
    others = {
        BY_HAND: by_hand(table, num_rows),
        DELTATORCH: bench.peers.way("deltatorch", bench.rows[name], shuffle=True, delta_table=table),
        RAY: bench.peers.way("ray", bench.rows[name], shuffle=True, delta_table=table),
    }
    # Turns of their own, so that none of ours is read while what they started comes to its end: right behind the loop
    # by hand, which leaves Arrow's pool in pieces, one of ours read embeddings at half its speed.
    in_turns(others, bench.options.repeats)
    ways |= others
    print(f"**{name}**\n")
    print_ways(ways)
    print_ratios(
        ways,
        [
            Goal(DELTA, PARQUET, 0.95),
            Goal(DELTA_PLAIN, PARQUET_PLAIN),
            Goal(DELETED, WHOLE, 0.7),
            Goal(DELTA, BY_HAND, 1.5),
            *(Goal(DELTA, peer, PEER_GOALS[name].get(peer)) for peer in (DELTATORCH, RAY)),
        ],
    )


def by_hand(table: str, num_rows: int) -> Way:
    """What one writes without any package."""
    import deltalake

    def batches() -> Iterator[dict[str, Any]]:
        for batch in deltalake.DeltaTable(table).to_pyarrow_dataset().to_batches(batch_size=BATCH_SIZE):
            if batch.num_rows:
                yield {name: as_tensor(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}

    return Way(run=lambda: [timed_epoch(batches)], num_rows=num_rows)


def link_table(source: str, table: str) -> None:
    """A Delta table of the same files."""
    import deltalake

    os.makedirs(table)
    for path in Path(source).glob("*.parquet"):
        os.link(path, f"{table}/{path.name}")
    deltalake.convert_to_deltalake(table)


def delete_rows(source: str, table: str) -> int:
    """A table that Delta wrote, of which every tenth row was deleted then; how many are left."""
    from pyspark.sql import functions as F

    conf = {
        "spark.jars.packages": "io.delta:delta-spark_4.2_2.13:4.4.0",
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    }
    spark = converter.start_local_spark("deleted rows", master="local[2]", conf=conf)
    df = spark.read.parquet(source)
    df.write.format("delta").option("delta.enableDeletionVectors", "true").save(table)
    spark.sql(f"DELETE FROM delta.`{table}` WHERE pmod(xxhash64(id), 10) = 0")
    num_left = df.where(F.pmod(F.xxhash64("id"), F.lit(10)) != 0).count()
    spark.stop()
    return num_left


def write_log(table: str, num_files: int) -> None:
    """A table of many files, all the same one, with the statistics that Delta writes."""
    os.makedirs(f"{table}/_delta_log")
    pq.write_table(pa.table({"id": list(range(10)), "x": [float(row) for row in range(10)]}), f"{table}/one.parquet")
    size = os.path.getsize(f"{table}/one.parquet")
    fields = [
        {"name": name, "type": kind, "nullable": True, "metadata": {}}
        for name, kind in (("id", "long"), ("x", "double"))
    ]
    schema = json.dumps({"type": "struct", "fields": fields})
    stats = json.dumps(
        {
            "numRecords": 10,
            "minValues": {"id": 0, "x": 0.0},
            "maxValues": {"id": 9, "x": 9.0},
            "nullCount": {"id": 0, "x": 0},
        }
    )
    with open(f"{table}/_delta_log/{0:020}.json", "w", encoding="utf-8") as log:
        protocol = {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}}
        metadata = {"id": "5a2c1d7e-0000-4000-8000-000000000000", "format": {"provider": "parquet", "options": {}},
                    "schemaString": schema, "partitionColumns": [], "configuration": {}, "createdTime": 0}  # fmt: skip
        log.write(f"{json.dumps(protocol)}\n{json.dumps({'metaData': metadata})}\n")
        for number in range(num_files):
            name = f"part-{number:06}.parquet"
            if number % MOST_LINKS == 0:
                shutil.copyfile(f"{table}/one.parquet", linked := f"{table}/{name}")
            else:
                os.link(linked, f"{table}/{name}")
            add = {
                "path": name,
                "partitionValues": {},
                "size": size,
                "modificationTime": 0,
                "dataChange": True,
                "stats": stats,
            }
            log.write(json.dumps({"add": add}) + "\n")
    shutil.copystat(f"{table}/one.parquet", f"{table}/_delta_log")


def open_table(table: str) -> tuple[float, float]:
    """Seconds, and megabytes of the whole process at most."""
    begin = time.perf_counter()
    made = converter.make_delta_converter(table)
    seconds = time.perf_counter() - begin
    assert len(made) == 10 * len(made._manifest.file_names)
    # What getrusage says is inherited from the process that started this one.
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return seconds, int(peak.split()[1]) / 1024
