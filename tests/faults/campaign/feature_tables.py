"""Tables of all kinds of columns in small batches, row groups and files, and what batches must hold of each row.

What a row holds follows from a number alone. No Spark is needed: its tasks run in this process.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from converter import DatasetConverter, make_parquet_converter
from converter.decoders import NumPy
from converter.portable.records import CategoriesSpec
from converter.schema import Scale
from converter.sources.spark.schema import SparkColumn
from tests.entries import write_batches
from tests.unit.portable.one_column import plan

Row = dict[str, Any]

TYPES = {
    "id": pa.int64(),
    "word": pa.string(),
    "code": pa.int64(),
    "tags": pa.list_(pa.string()),
    "names": pa.list_(pa.string()),
    "x": pa.float32(),
    "pair": pa.list_(pa.int32()),
    "wide": pa.list_(pa.float32()),
    "bag": pa.list_(pa.float32()),
    "grid": pa.list_(pa.list_(pa.int64())),
    "made": pa.binary(),
    "drawn": pa.binary(),
}
CODED = ("word", "code", "tags")
"""Columns of categories."""

DECODED = {"made": NumPy("float32", (2,), on_error="skip"), "drawn": NumPy("float32", None)}
"""Columns of arrays as bytes; rows without an array in the first are left out. The arrays of the second one differ."""

_BROKEN = b"no array"
_SCALE = Scale(3.5, 2.0)
_WORDS = ("a", "b", "c", "d", "é", "")
_CODES = (7, -1, 10**12, 3)
_SHAPES: dict[str, tuple[int, ...] | None] = {"pair": (2,), "wide": (70,), "bag": None, "grid": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A data set, and the cells that batches must have of each row by its id: None where one is null."""

    converter: DatasetConverter
    rows: dict[int, Row]


def make_known(step: dict[str, Any], folder: Path, like: Known | None = None) -> Known | None:
    """The data set that a step describes; None if a column of categories has no value, which is refused.

    With `like`, the categories are those of that one, given to this one, in which others are null.
    """
    chance = random.Random(step["number"])
    rows = list(_rows(chance, step["first_id"]))
    whole = [row for row in rows if row["made"] != _BROKEN]
    # Executors that decode do not write the others, so that their values are none.
    values = {name: _values_in(whole if step["source"] == "tasks" else rows, name) for name in CODED}
    if like is not None:
        values = {name: list(like.converter.schema[name].categories or ()) for name in CODED}
    is_given = like is not None or step["is_given"]
    if is_given and like is None:
        # In an order of the user's own.
        values = {name: chance.sample(found, len(found)) for name, found in values.items()}
    has_arrays = all(any(row[name] is not None for row in whole) for name in DECODED)
    if not whole or not all(values.values()) or not has_arrays:
        return None
    made = _written if step["source"] == "tasks" else _of_files
    converter = made(step, rows, values if is_given else None, folder)
    return Known(converter=converter, rows={row["id"]: _expected(row, values) for row in whole})


def _rows(chance: random.Random, first_id: int) -> Iterator[Row]:
    """Rows in stretches that are alike: for a while, a column is null, of one shape, of another one or of any."""
    row_id = first_id
    for _ in range(chance.randint(1, 6)):
        kinds = {name: chance.choice(("null", "one", "other", "any", "any")) for name in TYPES}
        for _ in range(chance.randint(1, 25)):
            yield {"id": row_id} | {name: _cell(chance, name, kinds[name]) for name in TYPES if name != "id"}
            row_id += 1


def _cell(chance: random.Random, name: str, kind: str) -> Any:
    if kind == "null" or (kind == "any" and chance.random() < 0.2):
        return None
    length = {"one": 2, "other": 3}.get(kind, chance.randrange(4))
    words = {"one": _WORDS[:2], "other": _WORDS[2:4]}.get(kind, _WORDS)
    if name == "word":
        return chance.choice(words)
    if name == "code":
        return chance.choice(_CODES[:2] if kind == "one" else _CODES)
    if name in ("tags", "names"):
        found = [chance.choice(words) for _ in range(length)]
        return [None if name == "names" and kind == "any" and chance.random() < 0.2 else word for word in found]
    if name == "grid":
        return [
            [chance.randrange(100) for _ in range(length)] for _ in range(chance.randrange(3) if kind == "any" else 2)
        ]
    if name == "x":
        return chance.randrange(-800, 800) / 8
    if name in DECODED:
        if name == "made" and kind != "one" and chance.random() < 0.1:
            return _BROKEN
        return _stored([float(chance.randrange(100)) for _ in range(2 if name == "made" else length)])
    shape = _SHAPES[name]
    return [float(chance.randrange(100)) for _ in range(length if shape is None else shape[0])]


def _stored(numbers: list[float]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array(numbers, "float32"))
    return stream.getvalue()


def _values_in(rows: list[Row], name: str) -> list[Any]:
    cells = [row[name] for row in rows if row[name] is not None]
    return sorted({value for cell in cells for value in (cell if isinstance(cell, list) else [cell])})


def _expected(row: Row, values: dict[str, list[Any]]) -> Row:
    """The cells of a row: a value that is no category is null."""
    cells = dict(row)
    for name in CODED:
        known, cell = values[name], row[name]
        cells[name] = (
            [one if one in known else None for one in cell]
            if isinstance(cell, list)
            else cell
            if cell in known
            else None
        )
    for name in DECODED:
        cells[name] = None if row[name] is None else np.load(io.BytesIO(row[name])).tolist()
    if row["x"] is not None:
        cells["x"] = float(np.float32((row["x"] - _SCALE.mean) / _SCALE.std))
    return cells


def _columns(rows: list[Row]) -> list[pa.Array]:
    return [pa.array([row[name] for row in rows], kind) for name, kind in TYPES.items()]


def _written(
    step: dict[str, Any], rows: list[Row], values: dict[str, list[Any]] | None, folder: Path
) -> DatasetConverter:
    """An entry, as tasks of Spark write it that get few rows at a time."""
    chance = random.Random(step["number"] + 1)
    plans = [_plan(name, None if values is None else values.get(name)) for name in TYPES]
    partitions: list[list[pa.RecordBatch]] = [[] for _ in range(chance.randint(1, 3))]
    at = 0
    for number, partition in enumerate(partitions):
        end = len(rows) if number == len(partitions) - 1 else chance.randint(at, len(rows))
        while at < end:
            stop = min(end, at + chance.randint(1, 20))
            arrays = _columns(rows[at:stop])
            partition.append(pa.RecordBatch.from_arrays(arrays, [f"c{index}" for index in range(len(arrays))]))
            at = stop
    return write_batches(
        folder, plans, partitions, scales={"x": _SCALE}, row_group_bytes=step["row_group_bytes"],
        file_bytes=step["file_bytes"],
    )  # fmt: skip


def _plan(name: str, values: list[Any] | None) -> SparkColumn:
    kind, dtype, ndim = {
        "id": ("scalar", "int64", 0), "word": ("scalar", "str", 0), "code": ("scalar", "int64", 0),
        "tags": ("lists", "str", 1), "names": ("lists", "str", 1), "x": ("scalar", "float32", 0),
        "pair": ("tensor", "int32", 1), "wide": ("tensor", "float32", 1), "bag": ("tensor", "float32", 1),
        "grid": ("tensor", "int64", 2), "made": ("decoded", "float32", 1), "drawn": ("decoded", "float32", 1),
    }[name]  # fmt: skip
    column = plan(kind, dtype, ndim, DECODED[name].shape if name in DECODED else None, name=name)
    column = replace(column, decoder=DECODED.get(name))
    if name not in CODED:
        return column
    unseen: Any = "raise" if values is None else "null"
    return replace(
        column,
        categories=CategoriesSpec(kind="int64" if name == "code" else "str", values=values, unseen=unseen, most=1000),
    )


def _of_files(
    step: dict[str, Any], rows: list[Row], values: dict[str, list[Any]] | None, folder: Path
) -> DatasetConverter:
    """A user's Parquet files."""
    chance = random.Random(step["number"] + 2)
    folder.mkdir()
    at = number = 0
    while at < len(rows):
        stop = min(len(rows), at + chance.randint(1, 60))
        table = pa.Table.from_arrays(_columns(rows[at:stop]), list(TYPES))
        pq.write_table(
            table, folder / f"{number:03}.parquet", row_group_size=chance.choice((1, 7, 1000)),
            use_dictionary=chance.random() < 0.5, compression=chance.choice(("none", "zstd")),
        )  # fmt: skip
        at, number = stop, number + 1
    return make_parquet_converter(
        folder,
        shapes=_SHAPES,
        decode=DECODED,
        categories=list(CODED) if values is None else values,
        unseen="raise" if values is None else "null",
        standardize={"x": tuple(_SCALE)},
    )
