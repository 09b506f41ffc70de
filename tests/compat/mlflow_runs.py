"""Logs runs of several kinds of converters to MLflow, as a training would; `mlflow_cases.py` reads them elsewhere.

python mlflow_runs.py FOLDER URI…: a run of each kind in each tracking store, and its rows in FOLDER/<kind>.npz.

This imports nothing of the repository, so that the package is the installed one.
"""

from __future__ import annotations

import datetime as dt
import shutil
import sys
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import write_deltalake

import converter
from converter import (
    DatasetConverter,
    make_delta_converter,
    make_parquet_converter,
    make_spark_converter,
    mix,
    open_converter,
    start_local_spark,
)

SECRET = "planted-0123456789-secret"
NUM_WIDE = 5000


def table_of(num_rows: int, *, start: int = 0) -> pa.Table:
    ids = np.arange(start, start + num_rows)
    days = [dt.date(2026, 1, 1) + dt.timedelta(int(number) % 50) for number in ids]
    pairs = pa.array([[float(number), 1.0] for number in ids], pa.list_(pa.float64(), 2))
    return pa.table({"id": ids, "x": ids / 7, "y": ids % 3, "day": days, "pair": pairs, "name": [f"n{i}" for i in ids]})


def rows_of(part: DatasetConverter) -> dict[str, Any]:
    """All rows in an order that depends on seed and fingerprint."""
    with part.make_batch_reader(batch_size=len(part), shuffle=True, seed=3) as reader:
        (batch,) = reader
    return {name: values.astype(str) if values.dtype == object else values for name, values in batch.items()}


def main(folder: Path, uris: list[str]) -> None:
    assert not Path(converter.__file__).is_relative_to(Path(__file__).parents[2])

    def log(kind: str, part: DatasetConverter, context: str = "training") -> None:
        # All have one name in one experiment, as the runs of a project have.
        for uri in uris:
            mlflow.set_tracking_uri(uri)
            mlflow.set_experiment("rides")
            with mlflow.start_run(run_name=kind):
                mlflow.log_input(part.mlflow_dataset(name="rides"), context=context)
        np.savez(folder / f"{kind}.npz", **rows_of(part))

    for start in (0, 40, 80):
        write_deltalake(folder / "table", table_of(40, start=start), mode="append")
    log("older version", make_delta_converter(folder / "table", version=1))
    log("fewer columns", make_delta_converter(folder / "table", version=1, columns=["id", "y"]))
    log("newest version", make_delta_converter(folder / "table"))
    view = make_delta_converter(folder / "table", version=1, standardize=["x"], categories=["name"])
    view = view.where([("day", ">", dt.date(2026, 1, 9)), ("x", "<=", np.inf)]).split({"a": 0.7, "b": 0.3}, seed=2)["a"]
    log("view", view)
    # Later than the runs.
    write_deltalake(folder / "table", table_of(7), mode="overwrite")

    for name in ("kept", "changed", "gone"):
        (folder / name).mkdir()
        pq.write_table(table_of(60), folder / name / "a.parquet")
        files = make_parquet_converter(f"{folder}/{name}/*.parquet", storage_options={"account_key": SECRET})
        log(f"files that are {name}", files)
    some = make_delta_converter(folder / "table", version=1).where([("y", "in", {0, 2})])
    log("mixture", mix({"a": some, "b": make_parquet_converter(folder / "kept")}, source="from", stop=90))
    pq.write_table(table_of(60, start=1), folder / "changed" / "a.parquet")
    shutil.rmtree(folder / "gone")

    wide = pa.table({f"sensor_{number:05d}.temperature": [0.5, 1.5] for number in range(NUM_WIDE)})
    pq.write_table(wide, folder / "wide.parquet")
    log("wide", make_parquet_converter(folder / "wide.parquet", columns=wide.column_names))

    spark = start_local_spark()
    frame = spark.createDataFrame(table_of(50).to_pandas()[["id", "x", "y"]])
    cache = folder / "cache"
    written = make_spark_converter(frame, cache_dir=cache, cache_key="rides-1", delete_on_exit=False)
    log("entry", written)
    log("validation", open_converter(cache, cache_key="rides-1").where([("y", "=", 1)]), "validation")
    with make_spark_converter(frame.limit(20), cache_dir=cache) as short_lived:
        log("deleted entry", short_lived)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
