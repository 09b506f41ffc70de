"""Stores for the tests of Petastorm's interface, written by pyarrow and by our own metadata."""

from __future__ import annotations

import decimal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter.petastorm.codecs import CompressedImageCodec, CompressedNdarrayCodec, NdarrayCodec
from converter.petastorm.etl.dataset_metadata import write_metadata
from converter.petastorm.unischema import Unischema, UnischemaField
from converter.petastorm.warning import PetastormDeprecationWarning

NUM_ROWS, FILE_ROWS, GROUP_ROWS = 100, 25, 5
"""Four files of five row groups each."""

SCHEMA = Unischema(
    "Drive",
    [
        UnischemaField("id", np.int64, ()),
        UnischemaField("group", np.int32, ()),
        UnischemaField("city", np.str_, ()),
        UnischemaField("speed", np.float32, ()),
        UnischemaField("rank", np.int16, (), None, True),
        UnischemaField("note", np.str_, (), None, True),
        UnischemaField("price", decimal.Decimal, ()),
        UnischemaField("picture", np.uint8, (4, 6, 3), CompressedImageCodec("png")),
        UnischemaField("matrix", np.float64, (2, 3), NdarrayCodec()),
        UnischemaField("ragged", np.int32, (None,), CompressedNdarrayCodec()),
        UnischemaField("maybe", np.uint16, (2,), NdarrayCodec(), True),
        UnischemaField("tags", np.str_, (None,)),
    ],
)
ARROW_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), False),
        pa.field("group", pa.int32(), False),
        pa.field("city", pa.string(), False),
        pa.field("speed", pa.float32(), False),
        ("rank", pa.int16()),
        ("note", pa.string()),
        ("price", pa.decimal128(10, 2)),
        ("picture", pa.binary()),
        ("matrix", pa.binary()),
        ("ragged", pa.binary()),
        ("maybe", pa.binary()),
        ("tags", pa.list_(pa.string())),
    ]
)


class Stored(NamedTuple):
    """A store, and its rows as they were given."""

    url: str
    path: Path
    rows: list[dict[str, Any]]


def row_of(number: int) -> dict[str, Any]:
    generator = np.random.default_rng(number)
    return {
        "id": np.int64(number),
        "group": np.int32(number % 7),
        "city": f"city{number % 3}",
        "speed": np.float32(number / 3),
        "rank": None if number % 4 == 0 else np.int16(number),
        "note": None if number % 5 == 0 else f"note {number}",
        "price": decimal.Decimal(number) / 4,
        "picture": generator.integers(0, 256, (4, 6, 3), np.uint8),
        "matrix": generator.random((2, 3)),
        "ragged": np.arange(number % 4, dtype=np.int32),
        "maybe": None if number % 2 else np.array([number, 7], np.uint16),
        "tags": [f"t{number}", "all"],
    }


def encoded(row: dict[str, Any]) -> dict[str, Any]:
    """A row as a Parquet file holds it."""
    stored = dict(row)
    for name, field in SCHEMA.fields.items():
        if field.codec is not None and row[name] is not None:
            stored[name] = bytes(field.codec.encode(field, row[name]))
    return stored


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    path = tmp_path_factory.mktemp("petastorm") / "store"
    path.mkdir()
    rows = [row_of(number) for number in range(NUM_ROWS)]
    for start in range(0, NUM_ROWS, FILE_ROWS):
        table = pa.Table.from_pylist([encoded(row) for row in rows[start : start + FILE_ROWS]], ARROW_SCHEMA)
        pq.write_table(table, path / f"part-{start:05}.parquet", row_group_size=GROUP_ROWS)
    url = path.as_uri()
    write_metadata(url, SCHEMA)
    return Stored(url, path, rows)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """A store of plain Parquet in folders of partitions: city as text, group as whole numbers."""
    path = tmp_path_factory.mktemp("plain") / "store"
    rows = [
        {"id": number, "speed": number / 4, "pair": [number, -number], "city": f"c{number % 2}", "group": number % 3}
        for number in range(60)
    ]
    for city in ("c0", "c1"):
        for group in range(3):
            own = [row for row in rows if row["city"] == city and row["group"] == group]
            folder = path / f"city={city}" / f"group={group}"
            folder.mkdir(parents=True)
            columns = {name: [row[name] for row in own] for name in ("id", "speed", "pair")}
            pq.write_table(pa.table(columns), folder / "part.parquet", row_group_size=4)
    return Stored(path.as_uri(), path, rows)


@pytest.fixture(autouse=True)
def _without_the_warning_of_a_move() -> Iterator[None]:
    """The warning comes once in a process, in whichever test is the first; a test of its own looks at it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PetastormDeprecationWarning)
        yield
