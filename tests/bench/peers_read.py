#!/usr/bin/env python3
"""Epochs of a peer in its own environment, timed by the clock that `read.py` uses for all; started by that program.

    PYTHON peers_read.py '{"peer": "ray", "path": "data/tab", "shuffle": true, "batch_size": 1024,
        "max_seconds": 20, "epochs": 2}'

Reads once to be warm and then for the figures, and prints those as one line of JSON, the last of its output. At import
it needs nothing but Python itself: `read.py` takes its clock from here, so that every loader is measured by the same.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

SHUFFLED_ROWS = 100_000
"""Rows in a peer's shuffle buffer: about half of what one of our windows holds of the table with 41 columns."""

_byte_at = ctypes.c_ubyte.from_address


def touch(batch: Any) -> int:
    """Read one element of every column, by the cheapest way that is the same for all; the batch's rows."""
    for column in batch.values():
        if isinstance(column, list):
            _ = column[0]
        elif hasattr(column, "data_ptr"):
            # Indexing a tensor would cost five times as much, and be most of what is measured of a fast loader.
            _ = _byte_at(column.data_ptr()).value
    if not isinstance(column, list) and not hasattr(column, "data_ptr"):
        # TensorFlow's are whole when they are handed over, and to ask each of 41 for its memory takes 100 µs, twice as
        # long as it took to get them.
        _ = memoryview(column)[(0,) * column.ndim]
    return len(column) if isinstance(column, list) else int(column.shape[0])


def timed_epoch(
    batches: Callable[[], Iterable[Any]],
    *,
    max_seconds: float = float("inf"),
    cpu_seconds: Callable[[], float] = time.process_time,
) -> dict[str, Any]:
    """Rows, seconds and CPU seconds of one epoch, from the start of the iteration to its end.

    An epoch that is not over after `max_seconds` is left, and then counts from behind its first batch: what a loader
    has in its buffers by then is left uncounted, so what it took to fill them is too.
    """
    rows = first_rows = 0
    begin_cpu = first_cpu = cpu_seconds()
    begin = first = time.perf_counter()
    is_cut = False
    for batch in batches():
        rows += touch(batch)
        now = time.perf_counter()
        if not first_rows:
            first_rows, first, first_cpu = rows, now, cpu_seconds()
        elif now - begin > max_seconds:
            is_cut = True
            break
    end, end_cpu = time.perf_counter(), cpu_seconds()
    if is_cut:
        rows, begin, begin_cpu = rows - first_rows, first, first_cpu
    return {"rows": rows, "seconds": end - begin, "cpu_seconds": end_cpu - begin_cpu, "is_cut": is_cut}


def tree_cpu_seconds() -> float:
    """CPU seconds of this process and of all that descend from it, those that ended included."""
    used: dict[int, tuple[int, float]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The second field is the name, in brackets, and may hold anything.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            used[int(entry.name)] = int(fields[1]), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    tree, added = {os.getpid()}, 1
    while added:
        found = {pid for pid, (parent, _) in used.items() if parent in tree} - tree
        added = len(found)
        tree |= found
    return sum(used[pid][1] for pid in tree)


def petastorm(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Two threads, one a core, and no buffer where the order is to stay."""
    from petastorm import make_batch_reader
    from petastorm.pytorch import BatchedDataLoader

    def batches() -> Iterator[Any]:
        with make_batch_reader(
            f"file://{os.path.abspath(job['path'])}",
            num_epochs=1,
            reader_pool_type="thread",
            workers_count=2,
            shuffle_row_groups=job["shuffle"],
        ) as reader:
            capacity = SHUFFLED_ROWS if job["shuffle"] else 0
            yield from BatchedDataLoader(reader, batch_size=job["batch_size"], shuffling_queue_capacity=capacity)

    return [timed_epoch(batches, max_seconds=job["max_seconds"]) for _ in range(job["epochs"] + 1)]


def petastorm_tf(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Two threads, as above, and rows that TensorFlow takes from row groups, shuffles and batches.

    `rebatch` cuts batches out of whole row groups, which leaves nothing to shuffle and is not in Petastorm's manuals.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf
    from petastorm import make_batch_reader
    from petastorm.tf_utils import make_petastorm_dataset

    def dataset_of(reader: Any) -> Any:
        groups = make_petastorm_dataset(reader)
        if job["rebatch"]:
            return groups.rebatch(job["batch_size"]).prefetch(tf.data.AUTOTUNE)
        # Measured: 126 k against 117 k rows/s of 41 columns, 133 k against 215 k where there are three.
        is_wide = len(reader.schema.fields) > 8
        rows = groups.unbatch() if is_wide else groups.flat_map(tf.data.Dataset.from_tensor_slices)
        rows = rows.shuffle(SHUFFLED_ROWS) if job["shuffle"] else rows
        return rows.batch(job["batch_size"]).prefetch(tf.data.AUTOTUNE)

    found: list[dict[str, Any]] = []
    while len(found) <= job["epochs"]:
        with make_batch_reader(
            f"file://{os.path.abspath(job['path'])}",
            num_epochs=1,
            reader_pool_type="thread",
            workers_count=2,
            shuffle_row_groups=job["shuffle"],
        ) as reader:
            # Building it takes up to half a second, which is no part of an epoch; only one that was left is built anew.
            batches = functools.partial(map, lambda batch: batch._asdict(), dataset_of(reader))
            while len(found) <= job["epochs"]:
                found.append(timed_epoch(batches, max_seconds=job["max_seconds"]))
                if found[-1]["is_cut"]:
                    break
    return found


def ray(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Two CPUs and a store of 2 GB; files and a buffer are shuffled where the order is not to stay."""
    import ray
    import ray.data

    ray.init(num_cpus=2, object_store_memory=2 << 30, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    read = ray.data.read_delta if job["is_delta"] else ray.data.read_parquet

    def batches() -> Iterable[Any]:
        dataset = read(job["path"], shuffle="files" if job["shuffle"] else None)
        return dataset.iter_torch_batches(
            batch_size=job["batch_size"],
            prefetch_batches=4,
            local_shuffle_buffer_size=SHUFFLED_ROWS if job["shuffle"] else None,
            local_shuffle_seed=0 if job["shuffle"] else None,
        )

    found = [
        timed_epoch(batches, max_seconds=job["max_seconds"], cpu_seconds=tree_cpu_seconds)
        for _ in range(job["epochs"] + 1)
    ]
    ray.shutdown()
    return found


def deltatorch(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows become Python objects one by one, in two workers as its manual has it, or in none where that is faster.

    Where the order is not to stay, the rows of each record batch are shuffled; there is no other buffer.
    """
    import numpy as np
    import pyarrow as pa
    from deltalake import DeltaTable
    from deltatorch import FieldSpec, create_pytorch_dataloader

    schema = DeltaTable(job["path"]).schema().to_pyarrow()
    lists = {field.name for field in schema if pa.types.is_list(field.type)}
    # Measured: 17 k rows/s with two workers against 12 k without of 41 numbers, 19 k against 36 k with a list of 512.
    num_workers = 0 if lists else 2
    loader = create_pytorch_dataloader(
        job["path"],
        id_field="id",
        # Without the transform, a list arrives as one tensor for each of its places.
        fields=[FieldSpec(name, transform=np.float32 if name in lists else None) for name in schema.names],
        batch_size=job["batch_size"],
        shuffle=job["shuffle"],
        num_workers=num_workers,
        # deltalake refuses to work in a process that was forked, which is torch's default.
        multiprocessing_context="spawn" if num_workers else None,
    )
    return [
        timed_epoch(lambda: loader, max_seconds=job["max_seconds"], cpu_seconds=tree_cpu_seconds)
        for _ in range(job["epochs"] + 1)
    ]


def main() -> None:
    job = json.loads(sys.argv[1])
    read, *packages = {
        "petastorm": (petastorm, "petastorm", "torch"),
        "petastorm_tf": (petastorm_tf, "petastorm", "tensorflow-cpu"),
        "ray": (ray, "ray", "torch", "deltalake"),
        "deltatorch": (deltatorch, "deltatorch", "torch", "deltalake"),
    }[job["peer"]]
    epochs = read(job)
    names = (packages[0], "pyarrow", "numpy", *packages[1:])
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    # The first epoch was the warm-up.
    print(json.dumps({"epochs": epochs[1:], "versions": f"{versions}, Python {platform.python_version()}"}))


if __name__ == "__main__":
    main()
