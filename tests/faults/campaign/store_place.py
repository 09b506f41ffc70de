"""What stands in the store of a case, seen and changed without its client; and the tables of a user."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tests.faults.campaign.store_faults import clock
from tests.faults.campaign.store_memory import ROOTS, URLS, Disk

Ids = npt.NDArray[np.int64]

ROWS_OF_FILE, NUM_FILES = 20, 3
NUM_ROWS = ROWS_OF_FILE * NUM_FILES
_FIRST_IDS = {"parquet": 900_000, "delta": 950_000}
_OTHER_ID = 970_000
"""The first row of a Parquet file that was written again."""

_MEMORY = "/dev/shm"
"""A disk in memory, where there is one: commits call fsync."""


def table_of(ids: Ids) -> pa.Table:
    """Rows of which each column says which row it is."""
    return pa.table({"id": ids, "x": ids.astype(np.float32)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Two data sets of a user, written once and copied into each case that reads them."""

    folder: Path
    files: dict[str, dict[str, bytes]]
    ids: dict[str, Ids]
    rewritten: bytes
    """The first Parquet file with other rows."""


def write_tables(folder: Path) -> Tables:
    """A folder of Parquet files and a Delta table."""
    import deltalake

    (folder / "parquet").mkdir()
    for table, first in _FIRST_IDS.items():
        for number in range(NUM_FILES):
            rows = table_of(np.arange(ROWS_OF_FILE) + first + ROWS_OF_FILE * number)
            if table == "parquet":
                pq.write_table(rows, folder / table / f"part-{number}.parquet", row_group_size=7)
            else:
                deltalake.write_deltalake(str(folder / table), rows, mode="append")
    files = {
        table: {
            str(path.relative_to(folder)): path.read_bytes() for path in (folder / table).rglob("*") if path.is_file()
        }
        for table in _FIRST_IDS
    }
    ids = {
        # In the order of the files' names, which Delta draws.
        table: np.concatenate(
            [
                pq.read_table(pa.BufferReader(data))["id"].to_numpy()
                for name, data in sorted(of_table.items())
                if name.endswith(".parquet")
            ]
        )
        for table, of_table in files.items()
    }
    sink = pa.BufferOutputStream()
    pq.write_table(table_of(np.arange(ROWS_OF_FILE) + _OTHER_ID), sink, row_group_size=7)
    # What is there by now stays, and need not be looked at by each collection.
    gc.collect()
    gc.freeze()
    return Tables(folder=folder, files=files, ids=ids, rewritten=sink.getvalue().to_pybytes())


class Place:
    """The folder of a case in its store; names are below it."""

    def __init__(self, store: str) -> None:
        self.is_local, self.disk = store == "local", Disk(store)
        if self.is_local:
            parent = _MEMORY if os.access(_MEMORY, os.W_OK) else None
            self.url = self.root = tempfile.mkdtemp(prefix="store-", dir=parent)
        else:
            self.url, self.root = URLS[store], ROOTS[store]
        self._aged_seconds = 0.0

    def close(self) -> None:
        """Remove what is on the local disk."""
        if self.is_local:
            shutil.rmtree(self.root, ignore_errors=True)

    def files(self, below: str = "") -> dict[str, int]:
        """The files below a folder, by name, and their sizes."""
        if not self.is_local:
            prefix = f"{self.root}/{below}".rstrip("/") + "/"
            start = len(self.root) + 1
            return {
                path[start:]: len(blob.data) for path, blob in self.disk.view.blobs.items() if path.startswith(prefix)
            }
        found = {}
        for folder, _, names in os.walk(os.path.join(self.root, below)):
            for name in names:
                path = os.path.join(folder, name)
                found[os.path.relpath(path, self.root)] = os.stat(path).st_size
        return found

    def folders(self, below: str) -> list[str]:
        """The folders below a folder, empty ones too."""
        if not self.is_local:
            start = len(self.root) + 1
            prefix = f"{self.root}/{below}/"
            return sorted(path[start:] for path in self.disk.view.folders if path.startswith(prefix))
        walked = os.walk(os.path.join(self.root, below))
        return sorted(
            os.path.relpath(os.path.join(folder, name), self.root) for folder, names, _ in walked for name in names
        )

    def read(self, name: str) -> bytes | None:
        """A file's content; None if it is not there."""
        if self.is_local:
            with contextlib.suppress(OSError):
                return Path(self.root, name).read_bytes()
            return None
        blob = self.disk.view.blobs.get(f"{self.root}/{name}")
        return None if blob is None else blob.data

    def put(self, name: str, data: bytes) -> None:
        """Write a file, or write it again."""
        if not self.is_local:
            self.disk.put(f"{self.root}/{name}", data)
            return
        path = Path(self.root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(self.root, "aside")
        aside.write_bytes(data)
        os.replace(aside, path)

    def remove(self, name: str) -> None:
        """Let a file be gone."""
        if self.is_local:
            os.unlink(os.path.join(self.root, name))
        else:
            self.disk.remove(f"{self.root}/{name}")

    def touch(self, path: str) -> None:
        """Let a file, by its path in the store, be written now if it is there."""
        if self.is_local:
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)
        elif path in self.disk.view.blobs:
            self.disk.touch(path)

    def now(self) -> float:
        """The time, to be compared with an earlier one."""
        return self._aged_seconds + time.time() if self.is_local else clock.time()

    def idle_seconds(self, path: str) -> float:
        """How long ago a file, by its path in the store, was written."""
        if self.is_local:
            return time.time() - os.stat(path).st_mtime
        return clock.time() - self.disk.view.blobs[path].modified

    def age(self, seconds: float, paths: Collection[str] | None = None) -> None:
        """Let time pass; on a disk all files are older then, or those of these paths."""
        self._aged_seconds += seconds
        if not self.is_local:
            clock.sleep(seconds)
            return
        walked = os.walk(self.root)
        below = [os.path.join(folder, name) for folder, folders, names in walked for name in (*folders, *names)]
        for path in below if paths is None else paths:
            then = os.stat(path).st_mtime - seconds
            os.utime(path, (then, then))
