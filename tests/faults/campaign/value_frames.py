"""Random frames of all types, with the edges of each, and random filters of their columns. Made from a number alone."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

Kind = tuple[Any, ...]
"""A type: `("leaf", "int")`, `("array", kind)`, `("struct", {name: kind})`, `("map", kind, kind)` or `("vector",)`."""

INF, NAN = float("inf"), float("nan")
UTC = dt.timezone.utc

_time = dt.datetime.fromisoformat
_FIRST_TIME, _LAST_TIME = _time("0001-01-03"), _time("9999-12-30T23:59:59.999999")
"""PySpark has no times nearer to the edges of Python's: it asks for the day before."""

_TEXTS = ("", "a", "b", "row", "žluťoučký 🐟", "tab\tnull\0end", "long " * 50, "A", "ab", " a ", "10", "é")
_POOLS: dict[str, tuple[Any, ...]] = {
    "boolean": (True, False),
    "tinyint": (-128, 127, 0, 1, -1, 5),
    "smallint": (-(2**15), 2**15 - 1, 0, 1, -1, 300),
    "int": (-(2**31), 2**31 - 1, 0, 1, -1, 16_777_217),
    "bigint": (-(2**63), 2**63 - 1, 0, 1, -1, 2**53 + 1, 2**40),
    "float": (NAN, NAN, INF, -INF, 0.0, -0.0, 0.5, -2.5, 7.25, 2.0**-149, -(2.0**-126), 3.4028234663852886e38, 1e6),
    "double": (NAN, NAN, INF, -INF, 0.0, -0.0, 0.1, 1 / 3, -2.5, 7.25, 1e300, 5e-324, -2.2250738585072014e-308, 1e-40,
               1.7976931348623157e308, 16_777_217.0, 3.4028235677973366e38),
    "decimal(5,0)": tuple(map(Decimal, ("-99999", "99999", "0", "1", "-1"))),
    "decimal(18,2)": tuple(map(Decimal, ("-9999999999999999.99", "0.01", "0", "7.25", "16777217"))),
    "decimal(38,10)": tuple(map(Decimal, ("-1234567890123456789012345678.0123456789", "0.0000000001", "0", "2.5"))),
    "date": (dt.date.min, dt.date.max, dt.date(1582, 10, 15), dt.date(1582, 10, 4), dt.date(1969, 12, 31),
             dt.date(1970, 1, 1), dt.date(2000, 2, 29), dt.date(2026, 1, 31)),
    "timestamp": tuple(
        time.replace(tzinfo=UTC)
        for time in (_FIRST_TIME, _LAST_TIME, *map(_time, (
            "1969-12-31T23:59:59.999999", "1970-01-01", "2026-11-01T05:30:00", "2026-11-01T06:30:00",
            "1883-11-18T17:00:00", "1582-10-10T01:02:03.000004",
        )))
    ),
    "timestamp_ntz": (_FIRST_TIME, _LAST_TIME, _time("2026-03-08T02:30:00"), _time("1970-01-01"),
                      _time("1582-10-10T01:02:03.000004")),
    "string": _TEXTS,
    "binary": (b"", b"\0", b"\0\xff", b"\xff\xfe\xfd", b"abc" * 20),
    "interval day to second": (dt.timedelta(0), dt.timedelta(days=-100_000_000), dt.timedelta(microseconds=-1),
                               dt.timedelta(days=100_000_000, microseconds=7), dt.timedelta(hours=5)),
}  # fmt: skip
LEAVES = (*_POOLS, "float", "double")
NUM_FILTERS = 24
"""Of each frame."""

_NUMBERS = ("tinyint", "smallint", "int", "bigint", "float", "double", "decimal(18,2)", "boolean", "date", "timestamp")
"""Leaves of arrays."""

_FILTERED = tuple(leaf for leaf in LEAVES if not leaf.startswith("interval"))
_SIGNS = ("=", "==", "!=", "<", ">", "<=", ">=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a frame: its type, and how its values are drawn."""

    name: str
    kind: Kind
    null_share: float = 0.0
    lengths: tuple[int, int] = (2, 2)
    """The least and the greatest length of arrays; of the same length if they are equal."""

    element_null_share: float = 0.0
    few: int | None = None
    """How many different values it has at most; None for any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Columns and rows; the first column is `id`."""

    columns: tuple[Column, ...]
    rows: list[tuple[Any, ...]]
    filters: list[list[list[tuple[str, str, Any]]]]

    @property
    def schema(self) -> str:
        """Spark's words for it, with arrays for vectors."""
        return ", ".join(f"{quoted(column.name)} {ddl(column.kind)}" for column in self.columns)


def quoted(name: str) -> str:
    """A column's name as Spark's SQL takes any name."""
    return f"`{name.replace('`', '``')}`"


def ddl(kind: Kind) -> str:
    """Spark's name of a type."""
    if kind[0] == "leaf":
        return str(kind[1])
    if kind[0] == "array":
        return f"array<{ddl(kind[1])}>"
    if kind[0] == "map":
        return f"map<{ddl(kind[1])},{ddl(kind[2])}>"
    if kind[0] == "struct":
        return f"struct<{','.join(f'`{name}`:{ddl(member)}' for name, member in kind[1].items())}>"
    return "array<double>"


def leaves_of(name: str, kind: Kind) -> Iterator[tuple[str, str, int]]:
    """The columns that a batch has of one: name, leaf, and how many dimensions a row has."""
    if kind[0] == "leaf":
        yield name, kind[1], 0
    elif kind[0] == "vector":
        yield name, "double", 1
    elif kind[0] == "struct":
        for member, inner in kind[1].items():
            yield from leaves_of(f"{name}.{member}", inner)
    elif kind[0] == "map":
        yield f"{name}.key", kind[1][1], 1
        yield f"{name}.value", kind[2][1], 1
    elif kind[1][0] == "struct":
        for member, inner in kind[1][1].items():
            yield f"{name}.{member}", inner[1], 1
    else:
        for inner_name, leaf, ndim in leaves_of(name, kind[1]):
            yield inner_name, leaf, ndim + 1


def cells_of(name: str, kind: Kind, cell: Any) -> Iterator[tuple[str, Any]]:
    """What each of these columns has of a cell, as Spark hands it to Python."""
    if kind[0] == "struct":
        for member, inner in kind[1].items():
            yield from cells_of(f"{name}.{member}", inner, None if cell is None else cell[member])
    elif kind[0] == "map":
        yield f"{name}.key", None if cell is None else cell["key"]
        yield f"{name}.value", None if cell is None else cell["value"]
    elif kind[0] == "array" and kind[1][0] == "struct":
        for member in kind[1][1]:
            yield f"{name}.{member}", None if cell is None else [element[member] for element in cell]
    elif kind[0] == "vector":
        yield name, None if cell is None else cell.toArray().tolist()
    else:
        yield name, cell


def make_frame(number: int) -> Frame:
    """The frame of a number."""
    chance = random.Random(f"frame {number}")
    num_rows = chance.choice((0, 1, 2, 7, 30, 30, 100, 300))
    columns = [Column(name="id", kind=("leaf", "bigint"))]
    names = ["a", "b c", "žluť", "x.y", "D", "end_", "k`k", "_1", "NaN", "select", "i8", "s p"]
    for name in names[: chance.randint(6, 12)]:
        columns.append(_make_column(name, chance))
    makers = [_maker(column, chance) for column in columns[1:]]
    rows = [(number, *(make() for make in makers)) for number in range(num_rows)]
    frame = Frame(columns=tuple(columns), rows=rows, filters=[])
    for _ in range(NUM_FILTERS):
        groups = chance.choice((1, 1, 2, 3))
        frame.filters.append([
            [_make_comparison(frame, chance) for _ in range(chance.choice((1, 1, 2, 3)))] for _ in range(groups)
        ])  # fmt: skip
    return frame


def _make_column(name: str, chance: random.Random) -> Column:
    leaf: Kind = ("leaf", chance.choice(LEAVES))
    number: Kind = ("leaf", chance.choice(_NUMBERS))
    text: Kind = ("leaf", chance.choice(("string", "binary")))
    member: Kind = ("leaf", chance.choice(_NUMBERS))
    few = chance.choice((None, None, 1, 3))
    kinds: list[tuple[int, Kind]] = [
        (12, leaf),
        (4, ("array", number)),
        (2, ("array", text)),
        (2, ("array", ("array", number))),
        (2, ("struct", {"m": leaf, "n": ("struct", {"x.y": text, "v": ("array", number)})})),
        (1, ("map", ("leaf", chance.choice(("string", "int"))), member)),
        (1, ("array", ("struct", {"p": member, "q": text}))),
        (1, ("vector",)),
    ]
    kind = chance.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]
    length = chance.randint(1, 3)
    return Column(
        name=name,
        kind=kind,
        null_share=chance.choice((0.0, 0.0, 0.2, 0.2, 1.0 if chance.random() < 0.2 else 0.5)),
        lengths=(length, length) if chance.random() < 0.5 else (0, 4),
        element_null_share=0.3 if kind == ("array", text) and chance.random() < 0.4 else 0.0,
        few=few if kind[0] == "leaf" else None,
    )


def _maker(column: Column, chance: random.Random) -> Callable[[], Any]:
    pool = None if column.few is None else [_leaf(column.kind[1], chance) for _ in range(column.few)]

    def make() -> Any:
        if chance.random() < column.null_share:
            return None
        return _value(column, column.kind, chance) if pool is None else chance.choice(pool)

    return make


def _value(column: Column, kind: Kind, chance: random.Random) -> Any:
    if kind[0] == "leaf":
        return _leaf(kind[1], chance)
    if kind[0] == "struct":
        # A member may be null in a struct that is not.
        return tuple(
            None if chance.random() < column.null_share / 2 else _value(column, member, chance)
            for member in kind[1].values()
        )
    length = chance.randint(*column.lengths)
    if kind[0] == "map":
        return {_leaf(kind[1][1], chance): _leaf(kind[2][1], chance) for _ in range(length)}
    if kind[0] == "vector":
        from pyspark.ml.linalg import Vectors

        values = [_leaf("double", chance) for _ in range(length)]
        if chance.random() < 0.5:
            return Vectors.dense(values)
        return Vectors.sparse(length, {index: value for index, value in enumerate(values) if chance.random() < 0.5})
    if kind[1][0] == "array":
        inner = chance.randint(*column.lengths)
        return [[_leaf(kind[1][1][1], chance) for _ in range(inner)] for _ in range(length)]
    if kind[1][0] == "struct":
        return [tuple(_leaf(member[1], chance) for member in kind[1][1].values()) for _ in range(length)]
    return [None if chance.random() < column.element_null_share else _leaf(kind[1][1], chance) for _ in range(length)]


def _leaf(leaf: str, chance: random.Random) -> Any:
    if chance.random() < 0.5:
        return chance.choice(_POOLS[leaf])
    if leaf in ("tinyint", "smallint", "int", "bigint"):
        bits = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}[leaf]
        return chance.randrange(-(2 ** (bits - 1)), 2 ** (bits - 1))
    if leaf in ("float", "double"):
        value = chance.uniform(-1, 1) * 10.0 ** chance.randint(-30, 30)
        return float(np.float32(value)) if leaf == "float" else value
    if leaf == "date":
        return dt.date.fromordinal(chance.randrange(1, dt.date.max.toordinal()))
    if leaf in ("timestamp", "timestamp_ntz"):
        time = _FIRST_TIME + (_LAST_TIME - _FIRST_TIME) * chance.random()
        return time.replace(tzinfo=UTC) if leaf == "timestamp" else time
    if leaf == "string":
        return "".join(chance.choice("abžé🐟 \n\"'") for _ in range(chance.randrange(6)))
    if leaf == "binary":
        return chance.randbytes(chance.randrange(9))
    return chance.choice(_POOLS[leaf])


def _make_comparison(frame: Frame, chance: random.Random) -> tuple[str, str, Any]:
    choices = [
        (column, index)
        for index, column in enumerate(frame.columns)
        if (column.kind[0] == "leaf" and column.kind[1] in _FILTERED)
        or (column.kind[0] == "array" and column.kind[1][0] == "leaf" and column.kind[1][1] not in ("float", "double")
            and not column.kind[1][1].startswith("decimal"))
    ]  # fmt: skip
    column, index = chance.choice(choices)
    present = [row[index] for row in frame.rows if row[index] is not None]
    if column.kind[0] == "array":
        values = [element for row in present for element in row if element is not None]
        leaf = column.kind[1][1]
        return (column.name, "contains", _drawn(leaf, values, chance)) if chance.random() < 0.5 else (
            column.name, "contains any", [_drawn(leaf, values, chance) for _ in range(chance.randint(1, 3))]
        )  # fmt: skip
    leaf = column.kind[1]
    if leaf == "boolean":
        return column.name, chance.choice(("=", "!=")), chance.random() < 0.5
    sign = chance.choice((*_SIGNS, "in", "not in"))
    if sign in _SIGNS:
        return column.name, sign, _drawn(leaf, present, chance)
    return column.name, sign, [_drawn(leaf, present, chance) for _ in range(chance.randrange(1, 4))]


def _drawn(leaf: str, present: list[Any], chance: random.Random) -> Any:
    return chance.choice(present) if present and chance.random() < 0.7 else _leaf(leaf, chance)
