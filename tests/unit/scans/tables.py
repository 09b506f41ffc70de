"""Tables whose rows are known, for tests of passes, and how their rows are read."""

from __future__ import annotations

import datetime as dt
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from converter import DatasetConverter
from converter.errors import SourceError
from converter.scans.passes import resolve_filters
from tests.columns import ARROW_TYPES, Column
from tests.entries import write_batches

NAN = float("nan")
INF = float("inf")
UTC = dt.timezone.utc
NUM_ROWS = 120


def write_table(
    directory: Path, columns: Mapping[str, tuple[str, Sequence[Any]]], *, step: int | None = None, **options: Any
) -> DatasetConverter:
    """Columns `{name: (dtype, values)}`, `step` rows a file; None stands for null."""
    num_rows = len(next(iter(columns.values()))[1])
    size = step or num_rows
    partitions = [
        [
            pa.RecordBatch.from_arrays(
                [pa.array(values[start : start + size], ARROW_TYPES[dtype]) for dtype, values in columns.values()],
                names=[f"c{index}" for index in range(len(columns))],
            )
        ]
        for start in range(0, num_rows, size)
    ]
    plans = [Column(name=name, dtype=dtype).plan() for name, (dtype, _) in columns.items()]
    return write_batches(directory, plans, partitions, **options)


def known_columns() -> dict[str, tuple[str, list[Any]]]:
    """Every kind of single value; `sorted` and `day` grow with the row, so that footers rule row groups out."""
    rows = range(NUM_ROWS)
    special = [NAN, INF, -INF, -0.0, 0.0, 1.5]
    return {
        "id": ("int64", list(rows)),
        "sorted": ("int32", [row // 3 - 10 for row in rows]),
        "small": ("int8", [None if row % 7 == 3 else row % 11 - 5 for row in rows]),
        "x": ("float32", [None if row % 10 == 9 else special[row % 6] if row % 4 == 0 else row / 4 for row in rows]),
        "y": ("float64", [row / 8 - 5 for row in rows]),
        "flag": ("bool", [None if row % 13 == 5 else row % 3 == 0 for row in rows]),
        "day": ("datetime64[D]", [dt.date(1969, 12, 20) + dt.timedelta(days=row // 2) for row in rows]),
        "at": (
            "datetime64[us]",
            [
                None
                if row % 17 == 2
                else dt.datetime(1970, 1, 1, tzinfo=UTC) + dt.timedelta(hours=row % 30, microseconds=7)
                for row in rows
            ],
        ),
        "text": ("str", [None if row % 9 == 4 else ["", "a", "ab", "b", "žlu🐟", "z" * 40][row % 6] for row in rows]),
        "raw": ("bytes", [[b"", b"\x00", b"\xff\xfe", b"abc"][row % 4] for row in rows]),
    }


COLUMNS = known_columns()
VALUES = {name: values for name, (_, values) in COLUMNS.items()}


def rows_of(converter: DatasetConverter, **options: Any) -> list[int]:
    """The numbers in the dataset of the rows that a reader gives, in its order."""
    column = converter.schema.names[0]
    reader = converter.make_batch_reader(
        **{"columns": [column], "nulls": "mask", "with_row_index": "the row", "batch_size": 7} | options
    )
    return [row for batch in reader for row in batch["the row"].tolist()]


def rows_selected(converter: DatasetConverter, filters: Any) -> list[int]:
    """The rows that a filter leaves, without reading them."""
    manifest, rows = converter._manifest, []
    selection = resolve_filters(converter._storage, manifest, filters)
    starts = (np.cumsum(manifest.row_group_rows) - manifest.row_group_rows).tolist()
    for row_group, (start, num_rows) in enumerate(zip(starts, manifest.row_group_rows.tolist(), strict=True)):
        rows += (start + np.flatnonzero(selection.mask(row_group, num_rows))).tolist()
    return rows


def rows_that(converter: DatasetConverter, filters: Any) -> list[int]:
    """The rows that a filter leaves; none where it says that none passes."""
    try:
        part = converter.where(filters)
    except SourceError as error:
        assert "passes the filters" in str(error)  # noqa: PT017
        return []
    found = rows_of(part)
    assert len(part) == len(found)
    return found


# Filters

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt, "<=": operator.le,
    ">=": operator.ge, "in": lambda value, known: value in known, "not in": lambda value, known: value not in known,
}  # fmt: skip


def passes(row: int, filters: Any, values: Mapping[str, Sequence[Any]] = VALUES) -> bool:
    """What a filter says of one row, as Spark has it."""
    groups = [filters] if isinstance(filters[0], tuple) else filters
    return any(all(_holds(values[name][row], how, value) for name, how, value in group) for group in groups)


def _holds(value: Any, how: str, known: Any) -> bool:
    if "in" not in how:
        return value is not None and known is not None and _COMPARE[how](above(value), above(known))
    if value is None or (how == "not in" and None in known):
        return how == "not in" and known == []
    return _COMPARE[how](above(value), [above(one) for one in known if one is not None])


def above(one: Any) -> tuple[bool, Any]:
    """A value's place by Spark's rule: NaN is above all numbers, and equal to itself."""
    return (one != one, 0.0 if one != one else one)


MIDNIGHT = dt.datetime(1970, 1, 2)  # noqa: DTZ001


def sorted_rows(directory: Path) -> DatasetConverter:
    """A hundred rows in row groups that each cover their own range, two files."""
    columns = {"id": ("int64", list(range(100))), "half": ("float32", [row / 2 for row in range(100)])}
    found = write_table(directory, columns, step=50, row_group_bytes=120)
    assert found._manifest.row_group_rows.tolist() == [10] * 10
    return found
