"""Entries, states and pickles of this version, kept in the repository: what a later version must still read.

    python -m tests.compat.keep        # makes tests/compat/kept-<version>/, with Spark; half a minute

Each release keeps its own, before it is tagged, and never changes those of others: see converter/COMPATIBILITY.md.
The archives hold cache directories, `index.json` the rows, fingerprints and states. The pickles are of protocol 0,
whose texts have no lengths, so that the path of a cache can be replaced.
"""

from __future__ import annotations

import ast
import datetime as dt
import io
import json
import pickle
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import converter
from converter import DatasetConverter, make_spark_converter, mix, open_converter
from tests.documented import public_names

FOLDER = Path(__file__).parent
NUM_ROWS = 24
BATCH_SIZE = 3
BATCHES_DONE = 3
PLACE = "/the-cache-of-the-kept-pickles"
"""Where the cache lies for the pickles, until a test puts it elsewhere."""

FLAT = ("id", "flag", "tiny", "small", "whole", "single", "double", "money", "maybe", "text", "raw", "day", "pair")
"""Columns that need no newer format of the manifest than the first."""

ENTRIES: dict[str, dict[str, Any]] = {
    "flat": {"writer": "executors"},
    "executors": {"writer": "executors"},
    "spark": {"writer": "spark"},
    "compressed": {"writer": "executors", "compression": "zstd", "float_dtype": "float64"},
    "coded": {"writer": "executors", "categories": ["text"], "standardize": ["small"]},
}
"""The entries, and the options that they are written with."""

LOADERS: dict[str, dict[str, Any]] = {
    "in-order": {},
    "shuffled": {"shuffle": True, "seed": 7},
    "windows": {"shuffle": True, "seed": 7, "shuffle_window_rows": 8},
    "second-epoch": {"shuffle": True, "seed": 3, "num_epochs": 2},
    "rank-1-of-2": {"shuffle": True, "seed": 7, "cur_shard": 1, "shard_count": 2},
    "rank-0-of-2-kept": {"shuffle": True, "seed": 7, "cur_shard": 0, "shard_count": 2, "uneven": "keep"},
    "rank-4-of-5-padded": {"cur_shard": 4, "shard_count": 5, "uneven": "pad", "num_epochs": 2},
}
"""Loaders, of which one is left after some batches."""

BUCKETED: dict[str, Any] = {
    "batch_size": BATCH_SIZE, "columns": ["id", "ragged"], "ragged": "pad", "shuffle": True, "bucket_by": "ragged"
}  # fmt: skip

COLUMNS = {
    "id": "id",
    "flag": "id % 3 = 0",
    "tiny": "CAST(id - 12 AS tinyint)",
    "small": "CAST(id * 100 AS smallint)",
    "whole": "CAST(id * -70000 AS int)",
    "single": "CAST(id / 4 AS float)",
    "double": "id / 8D",
    "money": "CAST(id * 1.25 AS decimal(12, 2))",
    "text": "concat('row ', CAST(id % 4 AS string))",
    "maybe": "CASE WHEN id % 5 = 0 THEN NULL ELSE CAST(id AS int) END",
    "raw": "unhex(concat('0', CAST(id % 8 AS string), 'FF'))",
    "day": "date_add(DATE'2026-01-01', CAST(id AS int))",
    "moment": "timestamp_micros(1767225600000000 + id * 1000001)",
    "pair": "array(CAST(id AS float), CAST(-id AS float))",
    "matrix": "array(array(id, id + 1), array(id + 2, id + 3))",
    "ragged": "transform(slice(array(1, 2, 3), 1, CAST(id % 4 AS int)), x -> CAST(x + id AS int))",
    "words": "CASE WHEN id % 2 = 0 THEN array('a', 'b') ELSE array('c') END",
    "inner": "named_struct('a', CAST(id AS int), 'b', id * 2)",
}
"""Each column as Spark computes it."""


def known_rows() -> dict[str, list[Any]]:
    """The same rows, computed without Spark and without the package."""
    ids = range(NUM_ROWS)
    first = dt.datetime(2026, 1, 1)  # noqa: DTZ001 (as Spark's times in UTC are read)
    return {
        "id": list(ids),
        "flag": [row % 3 == 0 for row in ids],
        "tiny": [row - 12 for row in ids],
        "small": [row * 100 for row in ids],
        "whole": [row * -70000 for row in ids],
        "single": [row / 4 for row in ids],
        "double": [row / 8 for row in ids],
        "money": [row * 1.25 for row in ids],
        "text": [f"row {row % 4}" for row in ids],
        "maybe": [None if row % 5 == 0 else row for row in ids],
        "raw": [f"0{row % 8}ff" for row in ids],
        "day": [(first + dt.timedelta(row)).date().isoformat() for row in ids],
        "moment": [(first + dt.timedelta(microseconds=row * 1000001)).isoformat() for row in ids],
        "pair": [[row, -row] for row in ids],
        "matrix": [[[row, row + 1], [row + 2, row + 3]] for row in ids],
        "ragged": [[number + row for number in range(1, row % 4 + 1)] for row in ids],
        "words": [["a", "b"] if row % 2 == 0 else ["c"] for row in ids],
        "inner.a": list(ids),
        "inner.b": [row * 2 for row in ids],
    }


def plain(values: Any) -> Any:
    """An array, or an object of one, as JSON has it."""
    if isinstance(values, np.ndarray):
        if values.dtype.kind == "M":
            return [None if np.isnat(value) else value.item().isoformat() for value in values.ravel()]
        return [plain(value) for value in values]
    if isinstance(values, (list, tuple)):
        return [plain(value) for value in values]
    if isinstance(values, bytes):
        return values.hex()
    return values.item() if isinstance(values, np.generic) else values


def read(made: DatasetConverter) -> dict[str, list[Any]]:
    """All rows in their order; None where there is none, and what was coded or scaled as it was before."""
    with made.make_batch_reader(batch_size=7, nulls="mask", ragged="nested") as reader:
        batches = list(reader)
    columns: dict[str, list[Any]] = {}
    for name in batches[0]:
        columns[name] = [value for batch in batches for value in plain(batch[name])]
    for name in [name for name in columns if name.endswith("__valid")]:
        mask = columns.pop(name)
        original = name.removesuffix("__valid")
        columns[original] = [value if valid else None for value, valid in zip(columns[original], mask, strict=True)]
    for field in made.schema:
        if field.categories is not None:
            columns[field.name] = [field.categories[code] for code in columns[field.name]]
        if field.scale is not None:
            scaled = np.array(columns[field.name], np.float64) * field.scale.std + field.scale.mean
            columns[field.name] = np.round(scaled).astype(int).tolist()
    return columns


def leave(loader: Any) -> dict[str, Any]:
    """The state of a loader after some batches, and the ids that it hands out from there."""
    ids, state = [], {}
    for batches_done, batch in enumerate(loader, 1):
        if batches_done == BATCHES_DONE:
            state, ids = loader.state_dict(), []
        else:
            ids += np.asarray(batch["id"]).tolist()
    return {"state": json.loads(json.dumps(state)), "ids": ids}


def states_of(made: DatasetConverter) -> dict[str, Any]:
    """A state of each kind of loader with each set of arguments."""
    states: dict[str, Any] = {}
    for name, options in LOADERS.items():
        for kind in ("make_batch_reader", "make_torch_dataloader", "make_tf_dataset"):
            with getattr(made, kind)(batch_size=BATCH_SIZE, columns=["id"], **options) as loader:
                states[f"{kind} {name}"] = {"options": options, **leave(loader)}
    for name in ("filtered", "split", "mixed"):
        part = part_of(made, name)
        with part.make_batch_reader(batch_size=BATCH_SIZE, columns=["id"], shuffle=True, seed=5) as reader:
            states[f"{name} shuffled"] = leave(reader)
    with made.make_batch_reader(**BUCKETED) as reader:
        states["bucketed shuffled"] = leave(reader)
    return states


def part_of(made: DatasetConverter, name: str) -> Any:
    """The part of a dataset that a state was kept of."""
    if name == "filtered":
        return made.where([("id", ">=", 5)])
    if name == "split":
        return made.split({"train": 0.7, "val": 0.3}, seed=1)["train"]
    return mix({"low": made.where([("id", "<", 9)]), "high": made.where([("id", ">=", 9)])})


def public_signatures() -> dict[str, list[list[str | None]] | None]:
    """Each public name; of a function each parameter, with its kind and the text of its default."""
    signatures: dict[str, list[list[str | None]] | None] = {}
    for public in public_names():
        is_function = isinstance(public.node, ast.FunctionDef)
        signatures[public.name] = _parameters(public.node.args) if is_function else None
    return signatures


def _parameters(arguments: ast.arguments) -> list[list[str | None]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + [ast.unparse(each) for each in arguments.defaults]
    named = [None if each is None else ast.unparse(each) for each in arguments.kw_defaults]
    return [
        *(["positional", each.arg, default] for each, default in zip(positional, defaults, strict=True)),
        *(["keyword", each.arg, default] for each, default in zip(arguments.kwonlyargs, named, strict=True)),
    ]


def main() -> None:
    """Write the entries with Spark, and keep them."""
    kept = FOLDER / f"kept-{converter.__version__}"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    spark = converter.start_local_spark("keep", master="local[2]", conf={"spark.sql.session.timeZone": "UTC"})
    index: dict[str, Any] = {"version": converter.__version__, "rows": known_rows(), "entries": {}}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, options in ENTRIES.items():
                cache_dir = Path(folder, name)
                columns = {each: sql for each, sql in COLUMNS.items() if name != "flat" or each in FLAT}
                df = spark.range(0, NUM_ROWS, 1, 2).selectExpr(*(f"{sql} AS {each}" for each, sql in columns.items()))
                with make_spark_converter(
                    df, cache_dir=cache_dir, cache_key=name, row_group_bytes=1024, delete_on_exit=False, **options
                ) as made:
                    assert read(made) == {each: index["rows"][each] for each in made.schema.names}, name
                    manifest = json.loads(next(cache_dir.rglob("manifest.json")).read_bytes())
                    assert manifest["format_version"] == (1 if name == "flat" else 2), name
                    entry: dict[str, Any] = {"fingerprint": made.fingerprint, "key": made.url.rpartition("/")[2]}
                    entry["dtypes"] = {field.name: str(field.dtype) for field in made.schema}
                    if name == "executors":
                        entry["states"] = states_of(made)
                index["entries"][name] = entry
                with tarfile.open(kept / f"{name}.tar.xz", "w:xz") as archive:
                    for path in sorted(path for path in cache_dir.rglob("*") if not path.name.startswith("lease-")):
                        member = archive.gettarinfo(path, path.relative_to(cache_dir).as_posix())
                        member.uid, member.gid, member.uname, member.gname = 0, 0, "", ""
                        archive.addfile(member, io.BytesIO(path.read_bytes()) if member.isfile() else None)
            opened = open_converter(Path(folder, "executors"), cache_key="executors")
            for name in ("whole", "filtered", "split", "mixed"):
                data = pickle.dumps(opened if name == "whole" else part_of(opened, name), protocol=0)
                place = str(Path(folder, "executors")).encode()
                assert place in data
                (kept / f"{name}.pickle").write_bytes(data.replace(place, PLACE.encode()))
    finally:
        spark.stop()
    (kept / "names.json").write_text(json.dumps(public_signatures(), indent=0) + "\n")
    (kept / "index.json").write_text(json.dumps(index) + "\n")
    print(f"{kept}: {sum(path.stat().st_size for path in kept.iterdir()):,} bytes")


if __name__ == "__main__":
    main()
