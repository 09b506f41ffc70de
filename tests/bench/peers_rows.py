#!/usr/bin/env python3
"""Epochs of one way to read rows, ours or a peer's, in a process of its own; started by `rows.py`.

    PYTHON peers_rows.py '{"name": "array", "path": "data/rows", "rows_per_key": 10000, "num_workers": 2,
        "max_seconds": 30, "epochs": 1}'

Prints what it found as one line of JSON, the last of its output. At import it needs nothing but NumPy: peers have
environments of their own.
"""

from __future__ import annotations

import json
import math
import operator
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from peers_read import timed_epoch, tree_cpu_seconds

FLOATS = [f"x{column}" for column in range(10)]
"""The columns that are handed out; `x0` counts the rows."""

NUM_KEYS = 200
LENGTH = 16
"""Rows of a sequence."""

BATCH_SIZE = 256
ROWS_BATCH_SIZE = 1024
TF_BUFFER, PETASTORM_BUFFER = 10_000, 2048
"""Sequences in a peer's shuffle buffer."""

NUM_THREADS = os.cpu_count() or 1

Job = dict[str, Any]
Epoch = dict[str, Any]
Batches = Callable[[], Iterable[Any]]


# --- The clock --------------------------------------------------------------------------------------------------------


def epochs_of(batches: Batches, job: Job, length: int = LENGTH) -> list[Epoch]:
    """One epoch to be warm, of half the time at most, and one that counts, or up to ten short ones."""
    cpu_seconds = time.process_time if job["name"] == "ours" else tree_cpu_seconds
    timed_epoch(lambda: checked(batches(), job, length), max_seconds=job["max_seconds"] / 2)
    found: list[Epoch] = []
    while not found or (len(found) < 10 and sum(epoch["seconds"] for epoch in found) < 2):
        found.append(timed_epoch(batches, max_seconds=job["max_seconds"], cpu_seconds=cpu_seconds))
    return found


def checked(batches: Iterable[Any], job: Job, length: int) -> Iterator[Any]:
    """The batches; the first must hold whole sequences, each of one key, in a random order."""
    for number, batch in enumerate(batches):
        if not number:
            first = np.asarray(batch["x0"] if "x0" in batch else batch["x"][..., 0])
            counts = first.reshape(len(first), -1).astype(np.int64)
            num_values = sum(math.prod(column.shape) for column in batch.values())
            keys = counts // job["rows_per_key"]
            are_whole = first.dtype == np.float32 and num_values == len(first) * length * len(FLOATS)
            are_of_a_key = counts.shape[1] == length and (np.diff(counts) == 1).all() and (keys == keys[:, :1]).all()
            is_shuffled = (np.diff(counts[:, 0]) < 0).any()
            if not (are_whole and are_of_a_key and is_shuffled):
                shapes = {name: tuple(column.shape) for name, column in batch.items()}
                raise ValueError(f"the first batch is not {length} rows of a key each, shuffled: {shapes}")
        yield batch


# --- The jobs ---------------------------------------------------------------------------------------------------------


def ours(job: Job) -> list[Epoch]:
    """Rows, or sequences of them, of a cache entry or of plain Parquet files."""
    from converter import make_parquet_converter, open_converter

    options = {"stack": {"x": FLOATS}, "columns": ["x"]} if job["is_stacked"] else {"columns": FLOATS}
    with make_parquet_converter(job["path"]) if job["is_parquet"] else open_converter(job["path"]) as made:
        if job["is_rows"]:
            with made.make_torch_dataloader(batch_size=ROWS_BATCH_SIZE, shuffle=True, **options) as loader:
                return epochs_of(lambda: loader, job, length=1)
        sequences = made.sequences(LENGTH, by="key", order_by="time")
        with sequences, sequences.make_torch_dataloader(batch_size=BATCH_SIZE, shuffle=True, **options) as loader:
            return epochs_of(lambda: loader, job)


def array(job: Job) -> list[Epoch]:
    """A torch Dataset whose items are slices of one array in memory."""
    import torch

    rows = np.load(job["path"])
    starts = np.arange(job["rows_per_key"] - LENGTH + 1)
    firsts = np.add.outer(np.arange(NUM_KEYS) * job["rows_per_key"], starts).reshape(-1)

    class Sequences(torch.utils.data.Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return len(firsts)

        def __getitem__(self, item: int) -> Any:
            first = firsts[item]
            return {"x": torch.from_numpy(rows[first : first + LENGTH])}

    loader = torch.utils.data.DataLoader(
        Sequences(),
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=job["num_workers"],
        persistent_workers=job["num_workers"] > 0,
    )
    return epochs_of(lambda: loader, job)


def tf_data(job: Job) -> list[Epoch]:
    """Windows of the rows of some keys at a time, in TensorFlow, of one tensor for each column or for all of them."""
    import tensorflow as tf

    rows = np.load(job["path"])
    if job["is_stacked"]:
        columns = {"x": tf.constant(rows)}
    else:
        columns = {name: tf.constant(np.ascontiguousarray(rows[:, column])) for column, name in enumerate(FLOATS)}
    rows_per_key = job["rows_per_key"]

    def whole(window: Any) -> Any:
        return tf.data.Dataset.zip({name: column.batch(LENGTH) for name, column in window.items()})

    def sequences_of(key: Any) -> Any:
        own = {name: column[key * rows_per_key : (key + 1) * rows_per_key] for name, column in columns.items()}
        return tf.data.Dataset.from_tensor_slices(own).window(LENGTH, shift=1, drop_remainder=True).flat_map(whole)

    keys = tf.data.Dataset.range(NUM_KEYS).shuffle(NUM_KEYS)
    # Measured on two cores, a tensor for each column: 6.4 k sequences/s; 3.9 k with flat_map, 4.0 k with AUTOTUNE.
    found = keys.interleave(sequences_of, cycle_length=NUM_THREADS, num_parallel_calls=NUM_THREADS)
    made = found.shuffle(TF_BUFFER).batch(BATCH_SIZE).prefetch(tf.data.AUTOTUNE)
    return epochs_of(lambda: made, job)


def petastorm_describe(job: Job) -> list[Epoch]:
    """Write what Petastorm wants beside its files."""
    import pickle

    import pyarrow.parquet
    from petastorm.codecs import ScalarCodec
    from petastorm.etl import dataset_metadata
    from petastorm.unischema import Unischema, UnischemaField
    from pyspark.sql.types import FloatType, IntegerType, LongType

    types = [("key", np.int32, IntegerType), ("time", np.int64, LongType)]
    types += [(name, np.float32, FloatType) for name in FLOATS]
    fields = [UnischemaField(name, dtype, (), ScalarCodec(kind()), False) for name, dtype, kind in types]
    paths = sorted(Path(job["path"]).glob("*.parquet"))
    counts = {path.name: pyarrow.parquet.read_metadata(path).num_row_groups for path in paths}
    known = {
        dataset_metadata.UNISCHEMA_KEY: pickle.dumps(Unischema("Rows", fields)),
        dataset_metadata.ROW_GROUPS_PER_FILE_KEY: json.dumps(counts).encode(),
    }
    plain = pyarrow.parquet.read_schema(paths[0])
    pyarrow.parquet.write_metadata(plain.with_metadata(known), os.path.join(job["path"], "_common_metadata"))
    return []


def petastorm(job: Job) -> list[Epoch]:
    """Petastorm's NGram, through its shuffling buffer, collated batch by batch: its DataLoader takes none."""
    import torch
    from petastorm import make_reader
    from petastorm.ngram import NGram
    from petastorm.reader_impl.shuffling_buffer import RandomShufflingBuffer

    torch.set_num_threads(1)
    # Their order in a row is none that one could rely on.
    floats_of = operator.attrgetter(*FLOATS)

    def sequences() -> Iterator[Any]:
        # It wants the time at one of the offsets at least.
        fields = {step: FLOATS if step else ["time", *FLOATS] for step in range(LENGTH)}
        buffer = RandomShufflingBuffer(PETASTORM_BUFFER, min_after_retrieve=PETASTORM_BUFFER // 2, extra_capacity=1)
        with make_reader(
            f"file://{os.path.abspath(job['path'])}",
            schema_fields=NGram(fields, delta_threshold=1, timestamp_field="time"),
            num_epochs=1,
            reader_pool_type="thread",
            workers_count=NUM_THREADS,
            shuffle_row_groups=True,
        ) as reader:
            for sequence in reader:
                buffer.add_many([sequence])
                if not buffer.can_add():
                    yield buffer.retrieve()
            buffer.finish()
            while buffer.can_retrieve():
                yield buffer.retrieve()

    def collate(batch: list[Any]) -> dict[str, Any]:
        rows = [[floats_of(sequence[step]) for step in range(LENGTH)] for sequence in batch]
        return {"x": torch.from_numpy(np.array(rows, np.float32))}

    def batches() -> Iterator[Any]:
        batch: list[Any] = []
        for sequence in sequences():
            batch.append(sequence)
            if len(batch) == BATCH_SIZE:
                yield collate(batch)
                batch = []
        if batch:
            yield collate(batch)

    return epochs_of(batches, job)


JOBS: dict[str, tuple[Callable[[Job], list[Epoch]], tuple[str, ...]]] = {
    "ours": (ours, ("torch",)),
    "array": (array, ("torch", "numpy")),
    "tf_data": (tf_data, ("tensorflow", "numpy")),
    "petastorm_describe": (petastorm_describe, ()),
    "petastorm": (petastorm, ("petastorm", "pyarrow", "numpy", "torch")),
}
"""What each does, and the modules whose versions are told."""


def main() -> None:
    job = json.loads(sys.argv[1])
    run, packages = JOBS[job["name"]]
    epochs = run(job)
    versions = ", ".join(f"{name} {sys.modules[name].__version__}" for name in packages)
    print(json.dumps({"epochs": epochs, "versions": f"{versions}, Python {platform.python_version()}"}))


if __name__ == "__main__":
    main()
