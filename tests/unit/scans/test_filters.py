"""A filter leaves the rows that a look at each row leaves, or is refused by name."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter import DatasetConverter, make_parquet_converter
from converter.errors import SourceError
from converter.scans import filters as scans_filters
from converter.selection import hash_numbers
from tests.properties import examples
from tests.rows import ODD_NAMES
from tests.unit.scans.tables import (
    _COMPARE,
    MIDNIGHT,
    NAN,
    NUM_ROWS,
    UTC,
    VALUES,
    passes,
    rows_of,
    rows_selected,
    rows_that,
    write_table,
)


def _conditions(name: str) -> st.SearchStrategy[tuple[str, str, Any]]:
    present = sorted({value for value in VALUES[name] if value is not None and value == value})
    value = st.sampled_from(present)
    if name in ("id", "sorted", "small"):
        value |= st.integers(-12, 130) | st.integers(-12, 130).map(lambda one: one + 0.5)
    if name in ("x", "y"):
        value |= st.sampled_from([NAN, 1000.0, -1000.0]) | st.integers(-5, 30)
    some = st.lists(value, max_size=4) | st.lists(value | st.none(), max_size=4)
    compare = [how for how in _COMPARE if "in" not in how]
    return st.tuples(st.just(name), st.sampled_from(compare), value) | st.tuples(
        st.just(name), st.sampled_from(["in", "not in"]), some
    )


CONDITION = st.sampled_from(list(VALUES)).flatmap(_conditions)
ALL_OF = st.lists(CONDITION, min_size=1, max_size=3)


@examples(120)
@given(filters=ALL_OF | st.lists(ALL_OF, min_size=1, max_size=3))
def test_a_filter_leaves_the_rows_that_a_look_at_each_row_leaves(known: DatasetConverter, filters: Any) -> None:
    assert rows_that(known, filters) == [row for row in range(NUM_ROWS) if passes(row, filters)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("how", sorted(_COMPARE))
@pytest.mark.parametrize("name", list(VALUES))
def test_every_operator_works_on_every_kind_of_value(known: DatasetConverter, name: str, how: str) -> None:
    present = sorted({value for value in VALUES[name] if value is not None and value == value})
    value: Any = [present[0], present[len(present) // 2]] if "in" in how else present[len(present) // 2]
    expected = [row for row in range(NUM_ROWS) if passes(row, [(name, how, value)])]
    found = rows_selected(known, [(name, how, value)])
    if how == "not in":
        # Nulls have a test of their own.
        found = [row for row in found if VALUES[name][row] is not None]
    assert 0 < len(expected) < NUM_ROWS or name == "flag"
    assert found == expected


EXPRESSIONS: list[tuple[Any, Callable[[pd.DataFrame], Any]]] = [
    (pc.field("id") < 10, lambda df: df["id"] < 10),
    ((pc.field("id") < 10) | (pc.field("sorted") > 25), lambda df: (df["id"] < 10) | (df["sorted"] > 25)),
    (pc.field("id") > pc.field("sorted") * 4, lambda df: df["id"] > df["sorted"] * 4),
    (pc.field("y") + pc.field("sorted") > 3.5, lambda df: df["y"] + df["sorted"] > 3.5),
    (~(pc.field("id") < 100), lambda df: ~(df["id"] < 100)),
    (pc.field("small").is_null(), lambda df: df["small"].isna()),
    (pc.field("small").is_valid() & (pc.field("sorted") > 5), lambda df: df["small"].notna() & (df["sorted"] > 5)),
    (pc.field("text").isin(["a", "b"]), lambda df: df["text"].isin(["a", "b"])),
    (pc.match_substring(pc.field("text"), "b"), lambda df: df["text"].str.contains("b", na=False)),
    (pc.utf8_length(pc.field("text")) == 0, lambda df: df["text"] == ""),
    (pc.year(pc.field("day")) == 1969, lambda df: df["day"].map(lambda day: day.year) == 1969),
    (pc.field("flag"), lambda df: df["flag"].map(lambda flag: flag is True)),
    (~pc.field("flag"), lambda df: df["flag"].map(lambda flag: flag is False)),
    (pc.field("x").is_nan(), lambda df: df["x"].map(lambda x: x is not None and x != x)),
    (
        pc.if_else(pc.field("id") > 60, pc.field("y") > 5, pc.field("y") < -4),
        lambda df: ((df["id"] > 60) & (df["y"] > 5)) | ((df["id"] <= 60) & (df["y"] < -4)),
    ),
    (pc.field("id").cast("string") == "17", lambda df: df["id"] == 17),
    (pc.scalar(True), lambda df: df["id"] >= 0),
]  # fmt: skip


@pytest.mark.parametrize(("expression", "expected"), EXPRESSIONS)
def test_an_expression_leaves_what_pandas_leaves(known: DatasetConverter, expression: Any, expected: Any) -> None:
    frame = pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in VALUES.items()})
    frame = frame.astype({"id": "int64", "sorted": "int64", "y": "float64"})
    mask = np.asarray(expected(frame)).astype(bool)
    assert mask.any()
    assert rows_that(known, expression) == np.flatnonzero(mask).tolist()


@pytest.mark.parametrize(
    ("filters", "rows"),
    [
        ([("n", "==", 1)], [0]),
        ([("n", "!=", 1)], [2, 3, 5]),
        ([("n", "<", 100)], [0, 2, 3, 5]),
        ([("n", "in", [1, 6])], [0, 5]),
        ([("n", "not in", [1])], [2, 3, 5]),
        ([("n", "not in", [77])], [0, 2, 3, 5]),
        ([("s", "!=", "a")], [2, 3, 4]),
        ([("s", "not in", ["a"])], [2, 3, 4]),
        ([("n", "not in", [1, None])], []),
        ([("n", "not in", [])], [0, 1, 2, 3, 4, 5]),
        ([("n", "in", [])], []),
        ([("n", "in", [6, None])], [5]),
        ([("n", "<", Decimal("NaN"))], [0, 2, 3, 5]),
        ([("n", ">", None)], []),
        ([("x", "==", NAN)], [1]),
        ([("x", "!=", NAN)], [0, 3, 4, 5]),
        ([("x", "<", NAN)], [0, 3, 4, 5]),
        ([("x", "<=", NAN)], [0, 1, 3, 4, 5]),
        ([("x", ">", NAN)], []),
        ([("x", ">=", NAN)], [1]),
        ([("x", ">", 5.0)], [1, 5]),
        ([("x", ">=", 6)], [1, 5]),
        ([("x", "in", [NAN, 4.0])], [1, 3]),
        ([("x", "not in", [1.0, NAN])], [3, 4, 5]),
        ([("x", "not in", [1.0, None])], []),
        ([("n", "<", NAN)], [0, 2, 3, 5]),
        ([("n", ">", NAN)], []),
        ([("n", "==", NAN)], []),
        ([("n", "!=", NAN)], [0, 2, 3, 5]),
        ([("x", "<", 100)], [0, 3, 4, 5]),
        ([("x", "!=", 1.0)], [1, 3, 4, 5]),
        ([("x", "in", [1.0, 4.0])], [0, 3]),
        ([("x", "not in", [1.0])], [1, 3, 4, 5]),
        (~(pc.field("n") == 1), [2, 3, 5]),
        (~(pc.field("x") < 100), [1]),
        (pc.field("n").is_null(), [1, 4]),
        (pc.field("x").is_null(nan_is_null=True), [1, 2]),
        (pc.field("n").is_valid() & pc.field("s").is_valid(), [0, 2, 3, 5]),
        ([[("n", "==", 1)], [("x", "==", 5.0)]], [0, 4]),
    ],
    ids=str,
)
def test_a_comparison_with_null_keeps_nothing_and_nan_is_as_spark_has_it(
    with_gaps: DatasetConverter, filters: Any, rows: list[int]
) -> None:
    assert rows_that(with_gaps, filters) == rows


NEW_YORK = dt.timezone(dt.timedelta(hours=-5))


@pytest.mark.parametrize(
    "value",
    [
        MIDNIGHT,
        MIDNIGHT.replace(tzinfo=UTC),
        dt.datetime(1970, 1, 1, 19, tzinfo=NEW_YORK),
        pd.Timestamp("1970-01-02"),
        pd.Timestamp("1970-01-01 19:00", tz="America/New_York"),
        dt.date(1970, 1, 2),
        np.datetime64("1970-01-02T00:00:00.000000"),
        np.datetime64("1970-01-02"),
    ],
    ids=repr,
)
def test_a_time_is_meant_in_utc_unless_it_says_its_zone(known: DatasetConverter, value: Any) -> None:
    midnight = MIDNIGHT.replace(tzinfo=UTC)
    later = [row for row, at in enumerate(VALUES["at"]) if at is not None and at > midnight]
    assert rows_that(known, [("at", ">", value)]) == later
    before = [row for row, at in enumerate(VALUES["at"]) if at is not None and at <= midnight]
    assert rows_that(known, [("at", "<=", value)]) == before


@pytest.mark.parametrize("zone", [None, UTC, NEW_YORK], ids=str)
def test_times_in_a_list_are_meant_in_the_same_way(known: DatasetConverter, zone: Any) -> None:
    known_time = VALUES["at"][40]
    value = known_time.replace(tzinfo=None) if zone is None else known_time.astimezone(zone)
    expected = [row for row, at in enumerate(VALUES["at"]) if at == known_time]
    assert 0 < len(expected) < 10
    assert rows_that(known, [("at", "in", [value])]) == expected
    assert rows_that(known, [("at", "==", value)]) == expected


NAMES = (
    *ODD_NAMES, "a", "ab", "abc", "dot", "dot.ted", "back\\slash", "tab\there", "new\nline", "(", "true", "and",
    "FieldRef", "id > 3", "", " ",
)  # fmt: skip


@pytest.fixture(scope="module")
def oddly_named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    """Columns whose names are hard to find in a text; each has numbers of its own."""
    columns = {name: ("int64", [100 * index + row for row in range(40)]) for index, name in enumerate(NAMES)}
    with write_table(tmp_path_factory.mktemp("names"), columns, step=20) as found:
        yield found


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", NAMES)
def test_a_column_is_found_whatever_its_name(oddly_named: DatasetConverter, name: str) -> None:
    first = 100 * NAMES.index(name)
    for filters in (
        [(name, ">", first + 30)],
        pc.field(name) > first + 30,
        [(name, "in", range(first + 31, first + 90))],
    ):
        assert rows_selected(oddly_named, filters) == list(range(31, 40))
    other = NAMES[NAMES.index(name) - 1]
    both = [(name, ">", first + 30), (other, "<", 100 * NAMES.index(other) + 35)]
    assert rows_selected(oddly_named, both) == list(range(31, 35))
    by_key = oddly_named.split({"one": 0.5, "two": 0.5}, by=name, seed=4)
    reference = hash_numbers(np.arange(first, first + 40), 4) >> np.uint64(63)
    assert rows_of(by_key["two"]) == np.flatnonzero(reference).tolist()


def test_a_column_whose_name_begins_another_ones_is_its_own_key(tmp_path: Path) -> None:
    columns = {"a.b": ("int64", list(range(60))), "a": ("int64", [row // 6 for row in range(60)])}
    with write_table(tmp_path, columns) as converter:
        parts = converter.split({"one": 0.5, "two": 0.5}, by="a", seed=3)
        expected = hash_numbers(np.arange(60) // 6, 3) >> np.uint64(63)
        assert rows_of(parts["two"]) == np.flatnonzero(expected).tolist()
        assert rows_that(converter, [("a", "==", 5)]) == list(range(30, 36))


@pytest.mark.parametrize(
    "expression",
    [
        (pc.field("group") == 5) & (pc.field(0) >= 50),
        pc.field(1) == 5,
        (pc.field(0) >= 50) & (pc.field(1) == 5),
        pc.field(0) == pc.field("id"),
    ],
    ids=str,
)
def test_a_column_that_is_meant_by_its_place_is_that_one_or_refused(numbers: DatasetConverter, expression: Any) -> None:
    frame = pa.table({"id": range(100), "group": [row % 10 for row in range(100)]})
    expected = frame.filter(expression)["id"].to_pylist()
    try:
        found = rows_that(numbers, expression)
    except ValueError as error:
        assert "filters" in str(error)  # noqa: PT017
        return
    assert found == expected


def test_members_may_come_in_any_collection(numbers: DatasetConverter) -> None:
    for members in (
        [1, 2],
        (1, 2),
        {1, 2},
        frozenset({1, 2}),
        range(1, 3),
        np.array([1, 2]),
        iter([1, 2]),
        {1: 0, 2: 0},
    ):
        assert rows_that(numbers, [("id", "in", members)]) == [1, 2]


# What is no filter


@pytest.mark.parametrize(
    ("filters", "kind", "said"),
    [
        ([("idd", ">", 3)], ValueError, r"filters: There is no column 'idd'\. Did you mean 'id'\?"),
        (pc.field("smal") > 3, ValueError, r"filters: There is no column 'smal'\. Did you mean 'small'\?"),
        ([("vector", ">", 3)], ValueError, "column 'vector' is a tensor"),
        (pc.field("vector").is_valid(), ValueError, "column 'vector' is a tensor"),
        ([("words", "==", b"")], ValueError, "column 'words' is a tensor"),
        ([("id", ">", "x")], (TypeError, ValueError), "filters: .*'id'"),
        ([("at", ">", "1970-01-02")], (TypeError, ValueError), "filters: .*'at'"),
        ([("id", "in", ["x"])], (TypeError, ValueError), "filters: .*'id'"),
        ([("id", "==", {"a": 1})], (TypeError, ValueError), "filters: .*'id'"),
        ([("id", "between", (1, 2))], ValueError, r"filters: 'between' is no operator; use one of =, =="),
        ([("id", ["in"], (1, 2))], (TypeError, ValueError), r"filters: \['in'\] is no operator"),
        ([("small", "in", "12")], TypeError, "filters: 'small' in needs a list of values, got '12'"),
        ([("text", "not in", "ab")], TypeError, "filters: 'text' not in needs a list of values, got 'ab'"),
        ([("id", "in", 5)], TypeError, "filters: 'id' in needs a list of values, got 5"),
        ("id > 3", TypeError, "filters must be tuples .*; got 'id > 3'"),
        (("id", ">", 3), TypeError, "filters must be tuples"),
        ([["id", ">", 3]], TypeError, "filters must be tuples"),
        ([("id", ">")], TypeError, r"filters must be tuples .*; got \('id', '>'\)"),
        ([(1, ">", 3)], TypeError, "filters must be tuples"),
        ([("id", ">", 3), [("id", "<", 9)]], TypeError, "filters must be tuples"),
        ([], TypeError, "filters must be tuples"),
        ([[]], TypeError, "filters must be tuples"),
        ({"id": 3}, TypeError, "filters must be tuples"),
        (3, TypeError, "filters must be tuples"),
        (pc.field("id"), TypeError, "filters must give true or false for each row; id gives int64"),
        (pc.field("id") + 1, TypeError, "filters must give true or false for each row"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_filter_names_itself(odd_kinds: DatasetConverter, filters: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        odd_kinds.where(filters)
    for make in (odd_kinds.make_batch_reader, odd_kinds.make_torch_dataloader):
        with pytest.raises(kind, match=said):
            make(filters=filters, ragged="pad")


def test_no_filters_are_no_filter(numbers: DatasetConverter) -> None:
    assert rows_of(numbers, filters=None) == list(range(100))
    with pytest.raises(TypeError, match="filters must be tuples"):
        numbers.where(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("filters", [[("id", ">", 1000)], pc.field("id") < 0, [("id", "in", [])]], ids=str)
def test_where_no_row_passes_that_is_said(numbers: DatasetConverter, filters: Any) -> None:
    with pytest.raises(SourceError, match=rf"No row of {re.escape(numbers.url)} passes the filters"):
        numbers.where(filters)
    with pytest.raises(SourceError, match="passes the filters"):
        numbers.make_torch_dataloader(filters=filters)
    with pytest.raises(SourceError, match="passes the filters"):
        numbers.where([("id", "<", 50)]).where([("id", ">", 50)])


@pytest.mark.parametrize(
    "expression",
    [
        pc.field("id") / 0 > 3,
        pc.field("id") + (2**63 - 1) > 3,
        pc.field("id").cast("int8") > 300 - 290,
    ],
    ids=["divide by zero", "overflow", "cast"],
)
def test_an_expression_that_fails_on_a_row_is_to_blame_and_not_the_file(
    known: DatasetConverter, expression: Any
) -> None:
    wide = known.where(expression) if "int8" in str(expression) else None
    if wide is not None:
        assert rows_of(wide) == list(range(11, NUM_ROWS))
        return
    with pytest.raises((ValueError, ArithmeticError), match="filters"):
        known.where(expression)


def test_lists_of_filters_are_read_once_only() -> None:
    filters = [[("x", "in", iter([1, 2])), ("y", "==", "in")], [("z", "not in", (one for one in "ab"))]]
    found = scans_filters.list_values(filters)
    assert found == [[("x", "in", [1, 2]), ("y", "==", "in")], [("z", "not in", ["a", "b"])]]
    assert scans_filters.list_values(found) == found
    for strange in ("x > 1", None, 5, [("x", "in", "text")], [("x", ">")], []):
        assert scans_filters.list_values(strange) == strange  # type: ignore[arg-type]


@pytest.mark.parametrize("of", [list, iter, np.array, pa.array, pd.Series])
def test_lists_are_compared_alike_whatever_holds_them(tmp_path: Path, of: Any) -> None:
    columns = {
        "id": [0, 1, 2, None],
        "zero": [-0.0, 0.0, 1.0, None],
        "single": pa.array([0.1, 0.2, 0.3, None], pa.float32()),
        "price": pa.array([Decimal("0.50"), Decimal("1.00"), Decimal("2.00"), None], pa.decimal128(5, 2)),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=2)
    with make_parquet_converter(tmp_path) as converter:
        for name, sign, values, expected in (
            ("id", "in", [1.5, 2.0], [2]),
            ("id", "not in", [1.5, 2.0], [0, 1]),
            ("zero", "in", [0.0], [0, 1]),
            ("zero", "not in", [0.0], [2]),
            ("single", "in", [0.1, 0.3], [0, 2]),
        ):
            assert rows_of(converter.where([(name, sign, of(values))])) == expected, (name, sign)
        if of is not iter:
            with pytest.raises(SourceError, match="No row"):
                converter.where([("id", "in", of([1.5]))])
        for one in (Decimal("1.5"), pa.scalar(1.5), np.float32(1.5)):
            assert rows_of(converter.where([("id", "not in", [one, 2])])) == [0, 1]
        assert rows_of(converter.where([("single", "==", Decimal("0.1"))])) == [0]
        with pytest.raises(SourceError, match="No row"):
            # As in SQL.
            converter.where([("id", "not in", pa.array([1, None]))])
        with pytest.raises(SourceError, match="No row"):
            converter.where([("id", "in", [pa.scalar(None, pa.int64())])])
