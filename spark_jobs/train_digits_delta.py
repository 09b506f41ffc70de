#!/usr/bin/env python3
"""Train a PyTorch model on images in a Delta table, before and after the table changes: Delta → converter → torch.

The rows are the 1,797 handwritten digits of scikit-learn: an image (PNG), its label, and who labelled it. In version 0
there are blank images, and one annotator's labels are wrong. Spark then appends the rest of the digits, deletes the
blank images (which only marks their rows, in deletion vectors) and corrects the labels. Version 0 is trained on before
and after that, and gives the same batches; then the new version is. No row is copied, and no id column is needed. One
fifth of the digits is held out.

    python spark_jobs/train_digits_delta.py
    spark-submit --packages io.delta:delta-spark_4.2_2.13:4.4.0 spark_jobs/train_digits_delta.py
    spark-submit --master spark://host:7077 --packages io.delta:delta-spark_4.2_2.13:4.4.0 \
        spark_jobs/train_digits_delta.py --table /shared/digits

This needs delta-spark, scikit-learn and the extra `images`. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from delta.tables import DeltaTable
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits
from torch import nn

from converter import DatasetConverter, Image, make_delta_converter, start_local_spark

DELTA = {
    "spark.jars.packages": "io.delta:delta-spark_4.2_2.13:4.4.0",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # The defaults, 200 and 50, are meant for large tables.
    "spark.sql.shuffle.partitions": "2",
    "spark.databricks.delta.snapshotPartitions": "1",
}
SCHEMA = "number int, image binary, label long, annotator string, part string"
LEAST_IMAGE_BYTES = 80
"""A PNG of 8 × 8 pixels that is smaller shows nothing."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, train on version 0 twice and on the last one, print one JSON line."""
    options = parse(arguments)
    spark = start_local_spark("train_digits_delta", conf=DELTA)
    with tempfile.TemporaryDirectory() as scratch:
        table = options.table or str(Path(scratch) / "digits")
        rows = make_rows()
        write(spark, table, [row for row in rows if is_early(row)], mode="errorifexists")
        runs = [train(table, 0, options)]
        write(spark, table, [row for row in rows if not is_early(row)], mode="append")
        changed = DeltaTable.forPath(spark, table)
        changed.delete(f"octet_length(image) < {LEAST_IMAGE_BYTES}")
        changed.update("part = 'train' AND annotator = 'b'", {"label": "pmod(label - 1, 10)"})
        history = changed.history().orderBy("version").collect()
        for commit in history:
            print(f"Version {commit['version']}: {commit['operation']}", flush=True)
        runs += [train(table, 0, options), train(table, history[-1]["version"], options)]
    spark.stop()
    vectors = sum(int(commit["operationMetrics"].get("numDeletionVectorsAdded", 0)) for commit in history)
    result = {
        "operations": [commit["operation"] for commit in history],
        "deletion_vectors": vectors,
        "runs": runs,
        "version_0_gave_the_same_batches": runs[0]["batches"] == runs[1]["batches"],
    }
    print(json.dumps({"job": "train_digits_delta", **result}))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", help="folder or URL of the table, which must not exist yet and is kept: on a "
                        "cluster one that all machines share (default: a temporary folder)")  # fmt: skip
    parser.add_argument("--epochs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle and the model; default: %(default)s")
    return parser.parse_args(arguments)


def make_rows() -> list[dict[str, Any]]:
    """The digits as they came in: each tenth image is blank, and annotator b reads one too many. Not if held out."""
    digits = load_digits()
    rows = []
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        is_held_out = number % 5 == 0
        annotator = "abc"[number % 3]
        is_wrong = annotator == "b" and not is_held_out
        is_blank = number % 10 == 3
        file = io.BytesIO()
        PIL.Image.fromarray((pixels * (0 if is_blank else 15)).astype(np.uint8)).save(file, "PNG")
        rows.append(
            {
                "number": number,
                "image": file.getvalue(),
                "label": int(digit + is_wrong) % 10,
                "annotator": annotator,
                "part": "held_out" if is_held_out else "train",
            }
        )
    return rows


def is_early(row: dict[str, Any]) -> bool:
    """Whether the row is in version 0 already; what is held out is, so that all versions are measured alike."""
    return row["part"] == "held_out" or row["number"] < 1000


def write(spark: SparkSession, table: str, rows: list[dict[str, Any]], *, mode: str) -> None:
    """One more version of the table."""
    writer = spark.createDataFrame(rows, SCHEMA).write.format("delta").mode(mode)
    writer.partitionBy("part").option("delta.enableDeletionVectors", "true").save(table)


def pixels(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The images as numbers from 0 to 1."""
    return batch["image"].float() / 240


def train(table: str, version: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train on one version of the table from the start; what it had, what the loader gave, how well the model does."""
    torch.manual_seed(options.seed)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    seen = hashlib.sha256()
    # Grey pictures of 8 × 8 pixels, decoded in the reader threads: tensors of shape (rows, 1, 8, 8).
    decode = {"image": Image(mode="L", size=(8, 8), layout="CHW")}
    with make_delta_converter(table, version=version, decode=decode) as digits:
        known, held_out = (digits.where([("part", "=", part)]) for part in ("train", "held_out"))
        with known.make_torch_dataloader(
            batch_size=options.batch_size, columns=["image", "label"], shuffle=True, seed=options.seed
        ) as loader:
            for _ in range(options.epochs):
                for batch in loader:
                    loss = nn.functional.cross_entropy(model(pixels(batch)), batch["label"])
                    optimizer.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    seen.update(batch["image"].numpy())
                    seen.update(batch["label"].numpy())
        accuracy = measure(held_out, model, options.batch_size)
        print(
            f"Version {version}: {len(known)} rows, accuracy on {len(held_out)} held-out digits {accuracy:.3f}",
            flush=True,
        )
        return {
            "version": version,
            "rows": len(digits),
            "fingerprint": digits.fingerprint,
            "batches": seen.hexdigest(),
            "accuracy": round(accuracy, 4),
        }


@torch.no_grad()
def measure(dataset: DatasetConverter, model: nn.Module, batch_size: int) -> float:
    """The part of the rows that the model gets right."""
    right = 0
    with dataset.make_torch_dataloader(batch_size=batch_size, columns=["image", "label"]) as loader:
        for batch in loader:
            right += int((model(pixels(batch)).argmax(dim=1) == batch["label"]).sum())
    return right / len(dataset)


if __name__ == "__main__":
    main()
