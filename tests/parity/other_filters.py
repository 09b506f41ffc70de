"""Random filters of a file's columns, and the rows that DuckDB's WHERE leaves.

DuckDB has Spark's order: NaN equals itself and is above infinity, both zeros are equal, text and bytes are compared by
their bytes, and nothing passes a comparison with a null. It compares a FLOAT with a DOUBLE as doubles, as Spark does.
Two rules are made to match. Times of nanoseconds are compared by their microseconds, which is what a batch holds. And
whole numbers of 64 bits meet no floats, because DuckDB would compare both as doubles, and a converter compares them
exactly.

DuckDB is asked twice: about the cells in a table of its own, which is the truth, and about the file. There it skips
row groups and pages by their statistics.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa

from tests.parity.other_readers import Cells, Leaf, moment

Group = list[tuple[str, str, Any]]

_SIGNS = ("=", "!=", "<", ">", "<=", ">=")
_NUM_DRAWN = 4


class Answer(NamedTuple):
    """The numbers of the rows that a filter leaves."""

    of_cells: list[int]

    of_file: list[int] | None
    """None if the filter has a column that the file's own query would compare in another way."""


def make_filters(chance: random.Random, cells: Cells, leaves: dict[str, Leaf], count: int) -> list[list[Group]]:
    """Filters of columns that can be compared: any of the groups, all of a group."""
    names = [name for name, leaf in leaves.items() if _can_be_compared(leaf)]
    return [
        [
            [_draw(chance, name, cells[name], leaves[name]) for name in chance.choices(names, k=chance.randint(1, 2))]
            for _ in range(chance.choice((1, 1, 2)))
        ]
        for _ in range(count)
    ]


def _can_be_compared(leaf: Leaf) -> bool:
    kind = leaf.type
    if pa.types.is_decimal256(kind):
        return False
    if leaf.depth:
        return leaf.depth == 1 and not (pa.types.is_floating(kind) or pa.types.is_decimal(kind))
    return True


def _draw(chance: random.Random, name: str, cells: list[Any], leaf: Leaf) -> tuple[str, str, Any]:
    present = [cell for cell in cells if cell is not None]
    if leaf.depth:
        present = [cell for row in present for cell in row if cell is not None]
    values = [_value(chance, present, leaf.type) for _ in range(_NUM_DRAWN)]
    if leaf.depth:
        return (name, "contains", values[0]) if chance.random() < 0.5 else (name, "contains any", values[:2])
    if pa.types.is_boolean(leaf.type):
        return name, chance.choice(("=", "!=")), values[0]
    sign = chance.choice((*_SIGNS, *_SIGNS, "in", "not in"))
    if sign in _SIGNS:
        return name, sign, values[0]
    return name, sign, [*values[: chance.randint(1, _NUM_DRAWN)], *([None] if chance.random() < 0.15 else [])]


def _value(chance: random.Random, present: list[Any], kind: pa.DataType) -> Any:
    """A value to compare with: mostly one of the column's, or one close by."""
    cell = chance.choice(present) if present else None
    if pa.types.is_boolean(kind):
        return chance.random() < 0.5
    if pa.types.is_floating(kind):
        if cell is None or chance.random() < 0.2:
            return chance.choice((math.nan, math.inf, -math.inf, 0.0, -0.0, 0.1))
        word = np.uint64(cell).view(np.float64) if kind.bit_width == 64 else np.uint32(cell).view(np.float32)
        return float(word)
    if pa.types.is_decimal(kind):
        return 0 if cell is None else cell
    if pa.types.is_timestamp(kind):
        return moment((cell or 0) + chance.choice((0, 0, 0, 1 if (cell or 0) < 2**50 else -1)))
    if pa.types.is_date(kind):
        return moment((cell or 0) * 86_400_000_000).date()
    if isinstance(cell, int) or "int" in str(kind) or pa.types.is_time(kind) or pa.types.is_duration(kind):
        is_narrow = pa.types.is_integer(kind) and kind.bit_width < 64
        if chance.random() < 0.1:
            return chance.choice((2**63 - 1, -(2**63), *((math.nan, math.inf, -math.inf) if is_narrow else ())))
        if chance.random() < 0.1 and is_narrow:
            return (cell or 0) + 0.5
        return (cell or 0) + chance.choice((0, 0, 1, -1))
    if cell is None:
        return b"a" if "binary" in str(kind) else "a"
    return cell + cell[:1] if chance.random() < 0.2 else cell


def ask_duckdb(path: Path, cells: Cells, leaves: dict[str, Leaf], filters: Sequence[list[Group]]) -> list[Answer]:
    """The rows that each filter leaves."""
    compared = {name: leaf for name, leaf in leaves.items() if _can_be_compared(leaf)}
    held = pa.table({name: _array_of(cells[name], leaf) for name, leaf in compared.items()})
    in_file = {name for name, leaf in leaves.items() if not leaf.depth and leaf.column == name and _is_as_in_file(leaf)}
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("held", held.append_column("row of it", pa.array(range(held.num_rows), pa.int64())))
        connection.execute("CREATE TABLE cells AS SELECT * FROM held")
        answers = []
        for groups in filters:
            parameters: list[Any] = []
            condition = " OR ".join(
                "(" + " AND ".join(_condition(*item, parameters) for item in group) + ")" for group in groups
            )

            def rows(source: str, row: str, where: str = condition, given: list[Any] = parameters) -> list[int]:
                query = f"SELECT {row} FROM {source} WHERE {where} ORDER BY 1"
                return [number for (number,) in connection.execute(query, given).fetchall()]

            can_ask_file = all(name in in_file for group in groups for name, _, _ in group)
            file = f"read_parquet('{path}', file_row_number=true)"
            answers.append(
                Answer(rows("cells", '"row of it"'), rows(file, "file_row_number") if can_ask_file else None)
            )
    return answers


def _is_as_in_file(leaf: Leaf) -> bool:
    """Whether DuckDB compares a file's column as it compares the cells."""
    kind = leaf.type
    return not leaf.depth and not (
        pa.types.is_time(kind) or pa.types.is_duration(kind) or (pa.types.is_timestamp(kind) and kind.unit == "ns")
    )


def _array_of(cells: list[Any], leaf: Leaf) -> pa.Array:
    kind = leaf.type
    if leaf.depth:
        flat = [cell for row in cells for cell in row or ()]
        offsets = np.append(0, np.cumsum([len(row or ()) for row in cells])).astype(np.int32)
        mask = pa.array([row is None for row in cells], pa.bool_())
        inner = _array_of(flat, leaf._replace(depth=0))
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), inner, mask=mask)
    if pa.types.is_floating(kind):
        words = pa.array(cells, pa.uint64() if kind.bit_width == 64 else pa.uint32())
        return words.view(pa.float64() if kind.bit_width == 64 else pa.float32())
    if pa.types.is_timestamp(kind):
        return pa.array(cells, pa.int64()).view(pa.timestamp("us", kind.tz and "UTC"))
    if pa.types.is_date(kind):
        return pa.array(cells, pa.int32()).view(pa.date32())
    if pa.types.is_time(kind) or pa.types.is_duration(kind):
        return pa.array(cells, pa.int64())
    if "string" in str(kind):
        return pa.array(cells, pa.string())
    return pa.array(cells, pa.binary() if "binary" in str(kind) else kind)


def _condition(name: str, sign: str, value: Any, parameters: list[Any]) -> str:
    column = '"' + name.replace('"', '""') + '"'
    if sign == "contains":
        parameters.append(value)
        return f"list_contains({column}, ?)"
    if sign == "contains any":
        parameters.extend(value)
        return "(" + " OR ".join(f"list_contains({column}, ?)" for _ in value) + ")"
    if sign in ("in", "not in"):
        parameters.extend(value)
        return f"{column} {sign} ({', '.join('?' for _ in value)})"
    parameters.append(value)
    return f"{column} {sign} ?"
