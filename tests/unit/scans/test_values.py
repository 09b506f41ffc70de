"""Values are compared exactly, as Spark compares them, whatever their type and precision."""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import math
import operator
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import DatasetConverter, make_parquet_converter
from converter.scans import filters as scans_filters
from tests.unit.scans.tables import MIDNIGHT, UTC, VALUES, rows_selected


@pytest.mark.parametrize(
    "value", [dt.date(1970, 1, 5), np.datetime64("1970-01-05"), pd.Timestamp("1970-01-05")], ids=repr
)
def test_a_day_is_compared_with_a_day(known: DatasetConverter, value: Any) -> None:
    expected = [row for row, day in enumerate(VALUES["day"]) if day < dt.date(1970, 1, 5)]
    assert rows_selected(known, [("day", "<", value)]) == expected


@pytest.mark.parametrize(
    ("precision", "scale"),
    [
        (38, 38),
        *(
            pytest.param(*decimal, marks=pytest.mark.long("the same with other numbers of digits"))
            for decimal in [(1, 1), (12, 9), (18, 4), (18, 9), (38, 0), (38, 10), (38, 18)]
        ),
    ],
)
def test_decimals_are_compared_with_the_doubles_that_they_are_in_a_batch(
    tmp_path: Path, precision: int, scale: int
) -> None:
    random = np.random.default_rng(precision + scale)
    digits = random.integers(1, precision + 1, 60).tolist()
    whole = [int("".join(map(str, random.integers(0, 10, count)))) * (-1) ** count for count in digits]
    whole += [5 * 10 ** max(0, precision - 3), 5 * 10 ** max(0, precision - 3) + 1, 0]
    values = [Decimal((int(one < 0), tuple(map(int, str(abs(one)))), -scale)) for one in whole]
    table = pa.table({"id": range(len(values)), "x": pa.array(values, pa.decimal128(precision, scale))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=20)
    with make_parquet_converter(tmp_path, float_dtype="float64") as converter:
        with converter.make_batch_reader(batch_size=len(values)) as reader:
            held = next(iter(reader))["x"].tolist()
        for row in range(0, len(values), 13):
            near = [held[row], math.nextafter(held[row], math.inf), math.nextafter(held[row], -math.inf)]
            for value, known in [*((one, held) for one in near), (values[row], values), (Decimal("1e60"), values)]:
                for sign, compare in COMPARED.items():
                    expected = [number for number, one in enumerate(known) if compare(one, value)]
                    assert rows_selected(converter, [("x", sign, value)]) == expected
            listed = [near[0], values[row - 1], 3, 10**40, math.nan, Decimal("0.5")]
            expected = [
                number for number, (one, double) in enumerate(zip(values, held, strict=True))
                if double == near[0] or one in (values[row - 1], 3, Decimal("0.5"))
            ]  # fmt: skip
            assert rows_selected(converter, [("x", "in", listed)]) == expected
            others = [number for number in range(len(values)) if number not in expected]
            assert rows_selected(converter, [("x", "not in", listed)]) == others


HOUR_NS = 3_600_000_000_000
COMPARED = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


MAKERS = [
    lambda nanoseconds: np.datetime64(nanoseconds, "ns"),
    pd.Timestamp,
    lambda nanoseconds: pd.Timestamp(nanoseconds, tz="Asia/Tokyo"),
    lambda nanoseconds: pa.scalar(nanoseconds, pa.timestamp("ns")),
    lambda nanoseconds: pa.scalar(nanoseconds, pa.timestamp("ns", "Asia/Tokyo")),
]
NANOSECONDS = [HOUR_NS + 7000, HOUR_NS + 7001, HOUR_NS + 6999, -(10**18)]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("sign", "nanoseconds", "make"),
    [
        *itertools.product([*COMPARED, "in", "not in"], NANOSECONDS, MAKERS[:1]),
        *itertools.product([">=", "in"], NANOSECONDS, MAKERS[1:]),
    ],
)
def test_times_finer_than_a_column_are_compared_exactly(
    known: DatasetConverter, sign: str, nanoseconds: int, make: Callable[[int], Any]
) -> None:
    compare = COMPARED.get(sign) or COMPARED["=" if sign == "in" else "!="]
    expected = []
    for row, at in enumerate(VALUES["at"]):
        microseconds = (
            None if at is None else (at - dt.datetime(1970, 1, 1, tzinfo=UTC)) // dt.timedelta(microseconds=1)
        )
        if microseconds is not None and compare(1000 * microseconds, nanoseconds):
            expected.append(row)
    value = make(nanoseconds)
    assert rows_selected(known, [("at", sign, [value] if "in" in sign else value)]) == expected


@pytest.mark.parametrize(
    ("filters", "is_all"),
    [
        ([("at", "<", np.datetime64("20000-01-01"))], True),
        ([("at", ">", np.datetime64("-290000-01-01", "s"))], True),
        ([("at", ">=", pa.scalar(2**62, pa.timestamp("s")))], False),
        ([("at", "<", dt.datetime.max.replace(tzinfo=UTC))], True),
        ([("at", ">", dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=14))))], True),
        ([("day", "<", np.datetime64("20000-01-01"))], True),
        ([("day", "in", [np.datetime64("20000-01-01")])], False),
        ([("at", ">", pd.NaT)], False),
        ([("at", "in", [pd.NaT, np.datetime64("NaT")])], False),
        ([("at", "not in", [dt.date(1970, 1, 1), pa.scalar(dt.date(1970, 1, 1), pa.date64())])], True),
    ],
    ids=str,
)
def test_times_beyond_a_column_or_none_at_all_are_compared(known: DatasetConverter, filters: Any, is_all: bool) -> None:
    name = filters[0][0]
    expected = [row for row, value in enumerate(VALUES[name]) if value is not None] if is_all else []
    assert rows_selected(known, filters) == expected


@pytest.mark.parametrize(
    ("filters", "keeps"),
    [
        ([("day", "<=", np.datetime64("1970-01-05T00:00:00.000000001"))], lambda day: day <= dt.date(1970, 1, 5)),
        ([("day", ">=", np.datetime64("1970-01-05T00:00:00.000000001"))], lambda day: day > dt.date(1970, 1, 5)),
        ([("day", "=", np.datetime64("1970-01-05T00:00:00.000000001"))], lambda _: False),
        ([("day", "=", pd.Timestamp("1970-01-05T09:00", tz="Asia/Tokyo"))], lambda day: day == dt.date(1970, 1, 5)),
        (
            [
                (
                    "day",
                    "in",
                    [pa.scalar(4, pa.date32()), np.datetime64("1970-01-05T00", "h"), MIDNIGHT + dt.timedelta(hours=1)],
                )
            ],
            lambda day: day == dt.date(1970, 1, 5),
        ),
    ],
)
def test_times_are_compared_with_days_exactly(
    known: DatasetConverter, filters: Any, keeps: Callable[[dt.date], bool]
) -> None:
    assert rows_selected(known, filters) == [row for row, day in enumerate(VALUES["day"]) if keeps(day)]


@pytest.mark.parametrize("kind", [pa.int8(), pa.int32(), pa.int64(), pa.uint8(), pa.uint64()], ids=str)
def test_whole_numbers_are_compared_with_floats_exactly(kind: pa.DataType) -> None:
    bits, is_signed = kind.bit_width, pa.types.is_signed_integer(kind)
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if is_signed else (0, 2**bits - 1)
    known = {least, least + 1, 0, 1, 2, most - 1, most, *({2**53, 2**53 + 1} if bits == 64 else ())}
    rows = pa.table({"x": pa.array(sorted(known), kind)})
    bounds = pa.table({"least": rows["x"], "most": rows["x"]})
    numbers = (0.5, -0.5, 1.0, 1.5, float(least), float(most), most + 0.5, least - 0.5, 2.0**53, 1e300, -1e300,
               math.inf, -math.inf, math.nan)  # fmt: skip
    for value in (*numbers, *map(Decimal, numbers[:-1]), 2**80, -(2**80), most, least, 128):
        compared: dict[str, Callable[[int], bool]] = {
            sign: functools.partial(lambda compare, one, value: compare(one, value), compare, value=value)
            for sign, compare in scans_filters._COMPARISONS.items()
        }
        if value != value:
            # NaN is above every number.
            compared |= {"<": lambda _: True, "<=": lambda _: True}
        compared["in"] = lambda one, value=value: one in (value, 1, 2.0)
        compared["not in"] = lambda one, value=value: one not in (value, 1, 2.0)
        for sign, passes in compared.items():
            asked = [value, 1, 2.0] if "in" in sign else value
            comparison = scans_filters._compare("x", sign, asked, rows.schema)
            expected = [passes(one) for one in sorted(known)]
            assert scans_filters.project(comparison.keeps, rows).to_pylist() == expected, (sign, value)
            if comparison.may_keep is not None:
                may_pass = scans_filters.project(comparison.may_keep, bounds).to_pylist()
                assert all(may for may, does in zip(may_pass, expected, strict=True) if does), (sign, value)
