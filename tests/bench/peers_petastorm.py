#!/usr/bin/env python3
"""Programs that use Petastorm's names, run with Petastorm or `converter.petastorm`; started by `from_petastorm.py`.

    PYTHON peers_petastorm.py '{"package": "petastorm", "name": "torch_batches", "path": "data/tab", "loader":
        "BatchedDataLoader", "shuffle": true, "max_seconds": 30}'

Only the package's name differs: each program is a user's, with its imports changed. It runs once to be warm and then
for the figures, and prints those as one line of JSON, the last of its output, with the most memory that it had beyond
what it had when its imports were done. At import this file needs nothing but Python itself.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import io
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from peers_read import SHUFFLED_ROWS, timed_epoch

Job = dict[str, Any]
Epoch = dict[str, Any]
Batches = Callable[[], Iterable[Any]]

NUM_WORKERS = os.cpu_count() or 1
BATCH_SIZE, PICTURES_BATCH_SIZE = 1024, 256
PICTURES_BUFFER = 2048
LENGTH = 16
"""Rows of a window."""

FLOATS = [f"x{column}" for column in range(10)]


# --- The clock --------------------------------------------------------------------------------------------------------


def timed_rows(rows: Batches, *, max_seconds: float = float("inf")) -> Epoch:
    """An epoch of rows that are taken one by one; `timed_epoch` would cost as much as a fast reader."""
    begin_cpu, begin = time.process_time(), time.perf_counter()
    first, first_cpu, num_rows, is_cut = begin, begin_cpu, 0, False
    for num_rows, row in enumerate(rows(), 1):
        _ = row[0]
        if num_rows == 1:
            first, first_cpu = time.perf_counter(), time.process_time()
        elif not num_rows % 64 and time.perf_counter() - begin > max_seconds:
            is_cut = True
            break
    end, end_cpu = time.perf_counter(), time.process_time()
    if is_cut:
        num_rows, begin, begin_cpu = num_rows - 1, first, first_cpu
    return {"rows": num_rows, "seconds": end - begin, "cpu_seconds": end_cpu - begin_cpu, "is_cut": is_cut}


def epochs_of(items: Batches, job: Job, clock: Callable[..., Epoch] = timed_epoch) -> list[Epoch]:
    """One epoch to be warm, of half the time at most, and one that counts, or up to five short ones."""
    clock(items, max_seconds=job["max_seconds"] / 2)
    found: list[Epoch] = []
    while not found or (len(found) < 5 and sum(epoch["seconds"] for epoch in found) < 2):
        found.append(clock(items, max_seconds=job["max_seconds"]))
    return found


def resident_bytes(name: str) -> int:
    """`VmRSS`, the memory of this process, or `VmHWM`, the most that it had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak() -> int:
    """Let the most memory be counted from now on; what there is now."""
    # Linux sets the peak back where this is written.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


# --- The programs -----------------------------------------------------------------------------------------------------


def module(job: Job, name: str = "") -> Any:
    """A module of the package, by the name that both give it."""
    return importlib.import_module(f"{job['package']}.{name}" if name else job["package"])


def url_of(job: Job) -> str:
    return f"file://{os.path.abspath(job['path'])}"


def reader_options(job: Job) -> dict[str, Any]:
    """A thread for each core, in one pass."""
    options = {"num_epochs": 1, "reader_pool_type": "thread", "workers_count": NUM_WORKERS}
    return {**options, "shuffle_row_groups": job["shuffle"], **job.get("reader", {})}


def torch_batches(job: Job) -> list[Epoch]:
    """Any Parquet files → one of torch's loaders, with a buffer where rows are to be shuffled."""
    loader = getattr(module(job, "pytorch"), job["loader"])
    capacity = SHUFFLED_ROWS if job["shuffle"] else 0

    def batches() -> Iterator[Any]:
        with module(job).make_batch_reader(url_of(job), **reader_options(job)) as reader:
            yield from loader(reader, batch_size=BATCH_SIZE, shuffling_queue_capacity=capacity)

    return epochs_of(batches, job)


def torch_pictures(job: Job) -> list[Epoch]:
    """Pictures and scalars → the loader that the examples show."""
    loader = module(job, "pytorch").DataLoader
    capacity = PICTURES_BUFFER if job["shuffle"] else 0

    def batches() -> Iterator[Any]:
        with module(job).make_reader(url_of(job), **reader_options(job)) as reader:
            yield from loader(reader, batch_size=PICTURES_BATCH_SIZE, shuffling_queue_capacity=capacity)

    return epochs_of(batches, job)


def rows(job: Job) -> list[Epoch]:
    """One namedtuple after the other, in Python."""

    def found() -> Iterator[Any]:
        with module(job).make_reader(url_of(job), **reader_options(job)) as reader:
            yield from reader

    return epochs_of(found, job, timed_rows)


def windows(job: Job) -> list[Epoch]:
    """NGrams of rows that follow one another, one after the other."""
    ngram = module(job, "ngram").NGram(
        {step: FLOATS if step else ["time", *FLOATS] for step in range(LENGTH)},
        delta_threshold=1,
        timestamp_field="time",
    )

    def found() -> Iterator[Any]:
        with module(job).make_reader(url_of(job), schema_fields=ngram, **reader_options(job)) as reader:
            yield from reader

    return epochs_of(found, job, timed_rows)


def tf_batches(job: Job) -> list[Epoch]:
    """Any Parquet files → a dataset of TensorFlow, as it comes or cut into batches."""
    make_dataset = module(job, "tf_utils").make_petastorm_dataset

    def batches() -> Iterator[Any]:
        with module(job).make_batch_reader(url_of(job), **reader_options(job)) as reader:
            dataset = make_dataset(reader)
            if job["is_cut"]:
                dataset = dataset.unbatch().batch(BATCH_SIZE)
            yield from (batch._asdict() for batch in dataset)

    return epochs_of(batches, job)


def tf_converter(job: Job) -> list[Epoch]:
    """The dataset of a converter whose rows Spark has written."""
    urls = sorted(f"file://{path}" for path in Path(job["path"]).absolute().glob("*.parquet"))
    made = module(job, "spark.spark_dataset_converter").SparkDatasetConverter(url_of(job), urls, job["dataset_size"])

    def batches() -> Iterator[Any]:
        with made.make_tf_dataset(
            batch_size=BATCH_SIZE, num_epochs=1, workers_count=NUM_WORKERS,
            shuffling_queue_capacity=SHUFFLED_ROWS if job["shuffle"] else None, shuffle_row_groups=job["shuffle"],
        ) as dataset:  # fmt: skip
            yield from (batch._asdict() for batch in dataset)

    return epochs_of(batches, job)


def opening(job: Job) -> list[Epoch]:
    """A reader of many small files: to its making, and to its first row."""
    make = getattr(module(job), job["reader_kind"])
    options = reader_options({**job, "shuffle": True})
    found = []
    # The first one is of few files, and pays for what is imported late.
    for path in (job["small_path"], job["path"]):
        begin_cpu, begin = time.process_time(), time.perf_counter()
        with make(url_of({"path": path}), **options) as reader:
            made = time.perf_counter()
            next(reader)
            first, first_cpu = time.perf_counter(), time.process_time()
        found.append(
            {"rows": 1, "seconds": first - begin, "to_make": made - begin, "cpu_seconds": first_cpu - begin_cpu}
        )
    return found[1:]


PROGRAMS: dict[str, tuple[Callable[[Job], list[Epoch]], tuple[str, ...]]] = {
    "torch_batches": (torch_batches, ("torch", "pytorch")),
    "torch_pictures": (torch_pictures, ("torch", "pytorch")),
    "rows": (rows, ()),
    "windows": (windows, ("ngram",)),
    "tf_batches": (tf_batches, ("tensorflow", "tf_utils")),
    "tf_converter": (tf_converter, ("tensorflow", "spark.spark_dataset_converter")),
    "opening": (opening, ()),
}
"""Each with the framework that it imports, and the module of the package that does."""


def main() -> None:
    job = json.loads(sys.argv[1])
    program, imports = PROGRAMS[job["name"]]
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if "torch" in imports:
        import torch

        torch.set_num_threads(1)
    elif imports:
        with contextlib.suppress(ImportError):
            importlib.import_module(imports[0])
    module(job)
    for name in imports[1:]:
        module(job, name)
    before = forget_peak()
    # Petastorm prints what it does at the end of each reader.
    with contextlib.redirect_stdout(io.StringIO()):
        epochs = program(job)
    memory_bytes = resident_bytes("VmHWM") - before
    names = [
        "pyarrow",
        "numpy",
        *({"torch": ["torch"], "tensorflow": ["tensorflow"]}.get(imports[0], []) if imports else []),
    ]
    if job["package"] == "petastorm":
        names.insert(0, "petastorm")
    print(json.dumps({"epochs": epochs, "memory_bytes": memory_bytes, "versions": ", ".join(map(version_of, names))}))


@functools.cache
def version_of(name: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"{name} {importlib.metadata.version(name)}"
    return f"{name} {importlib.metadata.version(f'{name}-cpu')}"


if __name__ == "__main__":
    main()
