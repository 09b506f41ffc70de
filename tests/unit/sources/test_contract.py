"""All sources keep one contract. A new source is one file and one class here, as the toy shows."""

from __future__ import annotations

from pathlib import Path

from deltalake import write_deltalake

from converter.cache.entries import load
from converter.cache.roots import open_root
from converter.manifest import Manifest
from converter.sources.delta.snapshot import read_snapshot
from converter.sources.parquet.fields import manifest_of, read_footers
from converter.sources.spark.schema import plan_columns
from converter.storage.directory import Storage
from converter.storage.opening import open_storage
from tests.contracts.sources import NUM_ROWS, TABLE, SourceContract, write_files
from tests.entries import KEY, write_batches


def read_list(path: Path) -> tuple[Storage, Manifest]:
    """A toy, which is all that a source needs: a text file names Parquet files beside it, one in each line."""
    names = path.read_text().splitlines()
    storage = open_storage(path.parent)
    return storage, manifest_of(storage, {name: {} for name in names})


class TestFileList(SourceContract):
    def write(self, folder: Path) -> None:
        names = [path.name for path in write_files(folder)]
        write_files(folder / "others")
        (folder / "files.txt").write_text("\n".join(names))

    def find(self, folder: Path) -> tuple[Storage, Manifest]:
        return read_list(folder / "files.txt")


class TestParquet(SourceContract):
    def write(self, folder: Path) -> None:
        write_files(folder)

    def find(self, folder: Path) -> tuple[Storage, Manifest]:
        return read_footers(
            [str(folder)], columns=None, float_dtype="float32", shapes={}, storage_options=None, timeout_seconds=60
        )


class TestDelta(SourceContract):
    def write(self, folder: Path) -> None:
        for start in range(0, NUM_ROWS, 250):
            write_deltalake(folder, TABLE.slice(start, 250), mode="append")

    def find(self, folder: Path) -> tuple[Storage, Manifest]:
        return read_snapshot(
            str(folder),
            version=None,
            timestamp=None,
            columns=None,
            float_dtype="float32",
            shapes={},
            storage_options=None,
            timeout_seconds=60,
        )


class TestCache(SourceContract):
    """An entry of the cache, as executors write it."""

    def write(self, folder: Path) -> None:
        vector, tags = ({"type": "array", "elementType": kind, "containsNull": False} for kind in ("float", "string"))
        types = {"id": "long", "x": "float", "text": "string", "vector": vector, "tags": tags}
        fields = [{"name": name, "type": kind, "nullable": name == "x", "metadata": {}} for name, kind in types.items()]
        plans = plan_columns({"type": "struct", "fields": fields}, float_dtype="float32", shapes={})
        names = [f"c{index}" for index in range(len(types))]
        partitions = [TABLE.slice(start, 250).rename_columns(names).to_batches() for start in range(0, NUM_ROWS, 250)]
        with write_batches(folder, plans, partitions, delete_on_exit=False):
            pass

    def find(self, folder: Path) -> tuple[Storage, Manifest]:
        root = open_root(str(folder))
        manifest = load(root, KEY)
        assert manifest is not None
        return root.below(KEY), manifest
