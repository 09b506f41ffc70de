"""Converters and loaders of lives: known rows in an entry, in Parquet files and in a store, and whether they are right.

The rows are written once; a case copies the entry, which it may delete.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from converter import DatasetConverter, make_parquet_converter, open_converter
from tests.columns import ID, Column
from tests.entries import write_converter
from tests.faults.campaign.cases import Step, ViolationError, require

TEXT = Column(name="text", dtype="str")
VECTOR = Column(name="vector", dtype="float32", shape=(3,))
COLUMNS = (ID, TEXT, VECTOR)
NUM_ROWS = 600
SOURCES = ("entry", "parquet", "store")
STORE = "memory://lives"
WINDOW_ROWS = 60


def in_memory() -> str | None:
    """A folder for files that need not last, if there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def double(batch: dict[str, Any]) -> dict[str, Any]:
    """Add a column."""
    return {**batch, "double": batch["id"] * 2}


def slow_double(batch: dict[str, Any]) -> dict[str, Any]:
    """The same, in a millisecond."""
    time.sleep(0.001)
    return double(batch)


class TransformError(Exception):
    """What a transform raises."""


@dataclass(frozen=True, slots=True)
class FailAt:
    """A transform that fails in the batch of one row."""

    row: int

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.row in batch["id"]:
            raise TransformError(f"of row {self.row}")
        return batch


@dataclass(slots=True, kw_only=True)
class Rows:
    """The known rows, and their order in each kind of loader."""

    folder: Path
    """Written once: the entry and the Parquet files."""

    values: dict[str, Any]
    orders: dict[tuple[str, int | None, int], np.ndarray] = field(default_factory=dict)

    def write_store(self) -> None:
        """Put the same files where they must be fetched."""
        filesystem = fsspec.filesystem("memory")
        for path in sorted((self.folder / "parquet").glob("*.parquet")):
            with filesystem.open(f"/lives/{path.name}", "wb") as file:
                file.write(path.read_bytes())

    def open(self, source: str, cache_dir: Path) -> DatasetConverter:
        """A converter; of the entry in `cache_dir`."""
        if source == "entry":
            return open_converter(entry_in(cache_dir))
        return make_parquet_converter(STORE if source == "store" else self.folder / "parquet")

    def order(self, source: str, seed: int | None, epoch: int) -> np.ndarray:
        """The rows of an epoch in order, found once, by a plain reader of one thread."""
        known = self.orders.get((source, seed, epoch))
        if known is None:
            with self.open(source, self.folder / "cache") as converter:
                options: dict[str, Any] = {"batch_size": 100, "columns": ["id"], "workers_count": 1, **order_of(seed)}
                with converter.make_batch_reader(**options) as reader:
                    reader.set_epoch(epoch)
                    known = np.concatenate([batch["id"] for batch in reader])
            assert sorted(known.tolist()) == list(range(NUM_ROWS))
            assert seed is not None or known.tolist() == list(range(NUM_ROWS))
            self.orders[source, seed, epoch] = known
        return known


def write_rows(folder: Path) -> Rows:
    """Write the entry and the Parquet files."""
    partitions = [[range(first, first + 200)] for first in range(0, NUM_ROWS, 200)]
    # Not `with`: the entry stays.
    converter = write_converter(folder / "cache", COLUMNS, partitions, row_group_bytes=1500, delete_on_exit=False)
    converter.__exit__(None, None, None)
    ids = np.arange(NUM_ROWS)
    values = {column.name: column.values(ids) for column in COLUMNS}
    (folder / "parquet").mkdir()
    for number, some in enumerate(np.array_split(ids, 3)):
        vector = pa.FixedSizeListArray.from_arrays(pa.array(values["vector"][some].reshape(-1)), 3)
        text = pa.array([values["text"][row] for row in some.tolist()])
        table = pa.table({"id": pa.array(some), "text": text, "vector": vector})
        pq.write_table(table, folder / "parquet" / f"{number}.parquet", row_group_size=40)
    rows = Rows(folder=folder, values=values)
    rows.write_store()
    return rows


def entry_in(cache_dir: Path) -> str:
    """The folder of the one entry of a cache."""
    (entry,) = (path for path in (cache_dir / "converter-v1").iterdir() if path.is_dir())
    return str(entry)


def copy_entry(rows: Rows, cache_dir: Path) -> None:
    """An entry of a case's own."""
    shutil.copytree(rows.folder / "cache", cache_dir)


def order_of(seed: int | None) -> dict[str, Any]:
    """The options of an order."""
    return {"shuffle": False} if seed is None else {"shuffle": True, "seed": seed, "shuffle_window_rows": WINDOW_ROWS}


def transform_of(step: Step, order: np.ndarray) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """The transform of a step; one that fails does so at a place in the order."""
    if step["transform"] == "fail":
        return FailAt(int(order[step["fail_at"] % len(order)]))
    return {"none": None, "double": double, "slow": slow_double}[step["transform"]]


def make_loader(converter: DatasetConverter, step: Step, order: np.ndarray, folder: Path) -> Any:
    """The loader of a step."""
    options: dict[str, Any] = {
        "batch_size": step["batch_size"],
        "columns": [column.name for column in COLUMNS][: step["num_columns"]],
        "workers_count": step["threads"],
        "prefetch_batches": step["prefetch"],
        "transform": transform_of(step, order),
        **order_of(step["seed"]),
    }
    if step["local_cache"]:
        options["local_cache_dir"] = folder / "local"
    if step["kind"] == "numpy":
        return converter.make_batch_reader(**options)
    if step["kind"] == "tf":
        return converter.make_tf_dataset(**options, prefetch=step["tf_prefetch"])
    if step["num_workers"]:
        options |= {"num_workers": step["num_workers"], "persistent_workers": step["is_persistent"]}
        options |= {"multiprocessing_context": step["method"]}
    return converter.make_torch_dataloader(**options, device=step["device"])


def check_batch(rows: Rows, batch: Any, order: np.ndarray, num_before: int, transform: str) -> int:
    """Require that a batch has the next rows; returns how many."""
    ids = np.asarray(batch["id"])
    expected = order[num_before : num_before + len(ids)]
    if not len(ids) or not np.array_equal(ids, expected):
        raise ViolationError("rows come right and in order", f"after {num_before}: {ids}, expected {expected}")
    for name, column in batch.items():
        if name in ("vector", "double"):
            wanted = rows.values["vector"][ids] if name == "vector" else ids * 2
            is_right = np.array_equal(np.asarray(column), wanted)
        elif name == "text":
            listed = column.numpy().tolist() if hasattr(column, "numpy") else list(column)
            found = [text.decode() if isinstance(text, bytes) else text for text in listed]
            is_right = found == [rows.values["text"][row] for row in ids.tolist()]
        else:
            is_right = name == "id"
        if not is_right:
            raise ViolationError("rows come right and in order", f"column {name} of the rows {ids} is {column}")
    require(("double" in batch) == (transform in ("double", "slow")), "a transform is applied", f"{sorted(batch)}")
    return len(ids)


@contextlib.contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Let temporary files be made in a folder."""
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


@functools.cache
def import_tensorflow() -> None:
    """Once in a process; what it says at its start is its own."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    import tensorflow as tf  # noqa: F401
