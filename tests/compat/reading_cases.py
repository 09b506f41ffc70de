#!/usr/bin/env python3
"""What must hold wherever rows are read, without Spark: `matrix.py --reading` runs these in its environments.

Prints one JSON line for each case: `{case, ok, seconds, detail}`. The package is the installed one, not the checkout's.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pickle
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import converter

REPOSITORY = Path(__file__).resolve().parents[2]
# Put last: the installed package is what is tried.
sys.path.append(str(REPOSITORY))
from tests.compat.keep import BATCH_SIZE, ENTRIES, LOADERS, part_of, read  # noqa: E402
from tests.compat.kept import RELEASES, ids_from  # noqa: E402

KINDS = {"NumPy": "make_batch_reader", "torch": "make_torch_dataloader", "TensorFlow": "make_tf_dataset"}
LIBRARIES = ("numpy", "pyarrow", "fsspec", "pandas", "torch", "tensorflow-cpu", "deltalake")


def started(_: Path) -> str:
    """The versions of everything."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES]
    assert not Path(converter.__file__).is_relative_to(REPOSITORY)
    return ", ".join([f"Python {platform.python_version()}", *versions])


def entries(folder: Path) -> str:
    """The rows, types and fingerprints of the entries that each release has kept."""
    for release in RELEASES:
        for name in ENTRIES:
            kept = release.index["entries"][name]
            with release.unpack(name, folder / release.folder.name / name) as made:
                assert made.fingerprint == kept["fingerprint"], name
                assert read(made) == {column: release.index["rows"][column] for column in made.schema.names}, name
                assert made.verify(every_row=True) == [], name
    return f"{len(ENTRIES)} entries"


def states(kind: str) -> Callable[[Path], str]:
    """A case: kept states are resumed at their very row by this kind of loader."""

    def resumed(folder: Path) -> str:
        for release in RELEASES:
            kept = release.index["entries"]["executors"]["states"]
            with release.unpack("executors", folder / release.folder.name) as made:
                for name, options in LOADERS.items():
                    with getattr(made, KINDS[kind])(batch_size=BATCH_SIZE, columns=["id"], **options) as loader:
                        one = kept[f"{KINDS[kind]} {name}"]
                        assert ids_from(loader, one["state"]) == one["ids"], name
        return f"{len(LOADERS)} states"

    return resumed


def tensors(kind: str) -> Callable[[Path], str]:
    """A case: a loader hands out the very numbers, nulls and texts, in its framework's types."""

    def handed_out(folder: Path) -> str:
        release = RELEASES[-1]
        with (
            release.unpack("executors", folder) as made,
            getattr(made, KINDS[kind])(batch_size=5, nulls="mask", ragged="pad") as loader,
        ):
            batches = list(loader)
        rows = release.index["rows"]
        for name in ("id", "flag", "tiny", "whole", "single", "double", "pair", "matrix", "inner.b"):
            values = np.concatenate([np.asarray(batch[name]) for batch in batches])
            assert values.tolist() == rows[name], name
        masked = [bool(valid) for batch in batches for valid in batch["maybe__valid"]]
        assert masked == [value is not None for value in rows["maybe"]]
        lengths = [int(length) for batch in batches for length in batch["ragged__length"]]
        assert lengths == list(map(len, rows["ragged"]))
        return f"{len(lengths)} rows"

    return handed_out


def pickles(folder: Path) -> str:
    """A converter that was pickled elsewhere, and one that is pickled here."""
    release = RELEASES[-1]
    with release.unpack("executors", folder) as made:
        for name in ("whole", "filtered", "split", "mixed"):
            found = release.unpickle(name, folder)
            assert len(found) == len(made if name == "whole" else part_of(made, name)), name
            assert len(pickle.loads(pickle.dumps(found))) == len(found)
    return "4 pickles"


def parquet(folder: Path) -> str:
    """Files as they are: every encoding that this pyarrow writes by default, filtered and split."""
    table = pa.table(
        {
            "id": np.arange(1000),
            "x": np.linspace(0, 1, 1000),
            "s": pa.array([f"row {row}" for row in range(1000)]).dictionary_encode(),
            "v": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(3000, dtype="f4")), 3),
            "n": pa.array([None if row % 7 == 0 else row for row in range(1000)], pa.int32()),
        }
    )
    for number, options in enumerate(({}, {"compression": "zstd"}, {"data_page_version": "2.0"})):
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=100, **options)
    made = converter.make_parquet_converter(str(folder), float_dtype=None)
    with made.make_batch_reader(batch_size=128, nulls={"n": -1}) as reader:
        batches = list(reader)
    ids = np.concatenate([batch["id"] for batch in batches])
    assert ids.tolist() == list(range(1000)) * 3
    assert np.array_equal(np.concatenate([batch["x"] for batch in batches]), np.tile(np.linspace(0, 1, 1000), 3))
    vectors = np.tile(np.arange(3000.0).reshape(-1, 3), (3, 1))
    assert np.array_equal(np.concatenate([batch["v"] for batch in batches]), vectors)
    assert [value for batch in batches for value in batch["s"]] == [f"row {row}" for row in range(1000)] * 3
    assert len(made.where([("id", ">=", 990), ("n", "not in", [995])])) < 30
    parts = made.split({"a": 0.5, "b": 0.5}, by="s")
    assert sum(map(len, parts.values())) == 3000
    assert made.statistics["x"].max == 1
    return "3,000 rows"


def delta(folder: Path) -> str:
    """A version of a table that this deltalake writes."""
    from deltalake import write_deltalake

    for mode in ("append", "append", "overwrite"):
        write_deltalake(str(folder), pa.table({"id": np.arange(100)}), mode=mode)
    numbers = [len(converter.make_delta_converter(str(folder), version=version)) for version in range(3)]
    assert numbers == [100, 200, 100]
    return "3 versions"


CASES: dict[str, Callable[[Path], str]] = {
    "started": started,
    "entries": entries,
    "pickles": pickles,
    "parquet": parquet,
    "delta": delta,
    **{f"{kind}: tensors": tensors(kind) for kind in KINDS},
    **{f"{kind}: states": states(kind) for kind in KINDS},
}


def main() -> None:
    """Run each case."""
    for name, case in CASES.items():
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                ok, detail = True, case(Path(folder))
            except Exception as error:  # noqa: BLE001 (a case that fails is a result)
                traceback.print_exc()
                ok, detail = False, f"{type(error).__name__}: {error}"
        seconds = round(time.perf_counter() - begin, 2)
        print(json.dumps({"case": name, "ok": ok, "seconds": seconds, "detail": detail}), flush=True)


if __name__ == "__main__":
    main()
