"""The log's bounds leave out no row, whatever writers and deltalake made of them."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from converter import (
    make_delta_converter,
)
from converter.sources.delta import files as delta_files
from converter.sources.delta.bounds import wrapped_bounds
from converter.sources.delta.log import checkpoints_of, read_log_folder
from tests.unit.sources.delta.known_delta import (
    BEGINNING,
    FAR,
    MICROSECOND,
    append_each,
    assert_filtered,
    change_commit,
    five_files,
    ids_of,
    rows_of,
    with_vector,
    write_log,
)


def test_statistics_that_are_damaged_are_none(tmp_path: Path) -> None:
    path = five_files(tmp_path / "table")
    change_commit(path, 1, lambda action: action.get("add", {}).update({"stats": "{{"}))
    change_commit(path, 2, lambda action: action.get("add", {}).pop("stats", None))
    assert ids_of(path) == list(range(50))
    assert_filtered(path, [("id", ">=", 15)], range(15, 50))


def test_bounds_whose_zone_lost_its_seconds_lose_no_row(tmp_path: Path) -> None:
    path, at = tmp_path / "table", dt.datetime(1850, 1, 1, 11, 6, 32, tzinfo=dt.timezone.utc)
    write_deltalake(path, pa.table({"at": pa.array([at, None], pa.timestamp("us", "UTC"))}))
    entry = path / "_delta_log" / f"{0:020}.json"
    lines = [json.loads(line) for line in entry.read_text().splitlines()]
    for line in lines:
        if "add" in line:
            stats = json.loads(line["add"]["stats"])
            # In Berlin, then 53 minutes and 28 seconds ahead.
            stats |= {bounds: {"at": "1850-01-01T12:00:00.000+00:53"} for bounds in ("minValues", "maxValues")}
            line["add"]["stats"] = json.dumps(stats)
    entry.write_text("\n".join(map(json.dumps, lines)))
    converter = make_delta_converter(path)
    assert len(rows_of(converter, nulls={"at": 0})["at"]) == 2
    for sign in ("=", "<=", ">="):
        assert len(converter.where([("at", sign, at)])) == 1


@pytest.mark.parametrize("precision", [20, 38])
@pytest.mark.parametrize("sign", [1, -1])
def test_decimals_that_64_bits_do_not_hold_are_found(tmp_path: Path, precision: int, sign: int) -> None:
    # deltalake writes the largest number of 64 bits as their bound.
    values = [decimal.Decimal(sign * number) for number in (1, 93 * 10**17, 93 * 10**17 + 10**15, 9 * 10**19)]
    rows = {"part": [0, 1, 2, 3], "v": pa.array(values, pa.decimal128(precision, 0))}
    write_deltalake(tmp_path / "table", pa.table(rows), partition_by=["part"])
    converter = make_delta_converter(tmp_path / "table")
    assert len(rows_of(converter)["v"]) == 4
    for value in values:
        for sign_of, wanted in (("=", 1), ("<=", sum(one <= value for one in values))):
            assert len(converter.where([("v", sign_of, value)])) == wanted


def test_a_day_beyond_pythons_can_be_asked_for(tmp_path: Path) -> None:
    days = pa.array([2932897, 0], pa.int32()).cast(pa.date32())
    write_deltalake(tmp_path / "table", pa.table({"day": days}))
    assert len(make_delta_converter(tmp_path / "table").where([("day", "=", days[0])])) == 1


def test_bounds_of_the_rows_that_are_left_are_believed(tmp_path: Path) -> None:
    for number, bounds in enumerate(((0, 9), (-5, 90), (1, 8), (4, 4))):
        stats = {
            "numRecords": 10,
            "minValues": {"id": bounds[0]},
            "maxValues": {"id": bounds[1]},
            "nullCount": {"id": 0},
        }
        path = with_vector(tmp_path / str(number), [0, 9], stats=stats)
        assert ids_of(path) == list(range(1, 9))


def test_a_footer_in_which_nan_is_the_largest_number_contradicts_no_bound(tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.mkdir()
    x = [2.0, 5.0, 3.0, 1.0, 20.125, NAN]
    pq.write_table(pa.table({"id": range(6), "x": x}), path / "a.parquet", row_group_size=3, use_dictionary=False)
    # As Spark writes it, where Arrow leaves NaN out.
    content = (path / "a.parquet").read_bytes()
    start = len(content) - 8 - struct.unpack("<i", content[-8:-4])[0]
    footer = content[start:].replace(struct.pack("<d", 20.125), struct.pack("<d", NAN))
    (path / "a.parquet").write_bytes(content[:start] + footer)
    found = pq.read_metadata(path / "a.parquet").row_group(1).column(1).statistics
    assert math.isnan(found.max)
    # Of the rows that are left, the log says: one of 20.125.
    stats = {"numRecords": 6, "minValues": {"x": 20.125}, "maxValues": {"x": 20.125}, "nullCount": {"id": 0, "x": 0}}
    write_log(path, {"id": "long", "x": "double"}, [{"path": "a.parquet", "stats": stats}])
    assert ids_of(path) == list(range(6))
    assert_filtered(path, [("x", ">", 20)], [4, 5])


def test_files_of_nothing_but_nulls_are_told_apart(tmp_path: Path) -> None:
    tables = [{"id": [0, 1], "x": pa.array([None, None], pa.int64())}, {"id": [2, 3], "x": [None, 5]}]
    path = append_each(tmp_path / "table", tables)
    assert_filtered(path, [("x", "=", 5)], [3])
    assert_filtered(path, [("x", "!=", 4)], [3])
    assert_filtered(path, pc.field("x").is_null(), [0, 1, 2])
    assert_filtered(path, pc.field("x").is_valid(), [3])


NAN, INF = float("nan"), float("inf")

LONG = decimal.Decimal("1234567890123456.1234567891")

PRUNED: dict[str, tuple[pa.Array, list[tuple[Any, list[int]]]]] = {
    "NaN": (
        pa.array([1.0, NAN, 2.0, NAN, NAN, None, -0.0, INF, -INF]),
        [
            ([("x", ">", 1)], [1, 2, 3, 4, 7]),
            ([("x", ">=", NAN)], [1, 3, 4]),
            ([("x", "<", NAN)], [0, 2, 6, 7, 8]),
            ([("x", "<", 1)], [6, 8]),
            ([("x", "!=", 2)], [0, 1, 3, 4, 6, 7, 8]),
            ([("x", "=", 0.0)], [6]),
            ([("x", "not in", [1.0])], [1, 2, 3, 4, 6, 7, 8]),
            (pc.is_nan(pc.field("x")), [1, 3, 4]),
            (~(pc.field("x") > 1), [0, 1, 3, 4, 6, 8]),
            (pc.field("x").is_null(), [5]),
        ],
    ),
    "strings": (
        pa.array(["a" * 200, "a" * 199 + "b", "z" * 31 + "🐟" * 20, "\U0010ffff" * 40, "é" * 100, "", "\0", None]),
        [
            ([("x", "=", "a" * 200)], [0]),
            ([("x", "=", "a" * 199 + "b")], [1]),
            ([("x", ">=", "z" * 31 + "🐟" * 20)], [2, 3, 4]),
            ([("x", ">", "\U0010ffff" * 31)], [3]),
            ([("x", "=", "é" * 100)], [4]),
            ([("x", "<", "a")], [5, 6]),
        ],
    ),
    "times": (
        pa.array([0, 1, 999, -1, -999, -1001, 253402300799999999, -62135596800000000], pa.timestamp("us", "UTC")),
        [
            ([("x", ">=", BEGINNING + 999 * MICROSECOND)], [2, 6]),
            ([("x", "=", BEGINNING + MICROSECOND)], [1]),
            ([("x", "=", BEGINNING - MICROSECOND)], [3]),
            ([("x", "<=", BEGINNING - 999 * MICROSECOND)], [4, 5, 7]),
            ([("x", "=", FAR)], [6]),
        ],
    ),
    # Python has no such days; Arrow, Delta and Parquet do.
    "far days": (
        pa.array([0, -800000, 2932896, 2932897], pa.date32()),
        [([("x", ">", dt.date(1970, 1, 1))], [2, 3]), ([("x", "<=", dt.date(1970, 1, 1))], [0, 1])],
    ),
    "far times": (
        pa.array([0, 253402300800000000, -62135596800000001], pa.timestamp("us")),
        [([("x", ">", BEGINNING)], [1]), ([("x", "<=", BEGINNING)], [0, 2])],
    ),
    "decimals": (
        pa.array([LONG, LONG + decimal.Decimal("1e-10"), decimal.Decimal("-1e-10"), None], pa.decimal128(38, 10)),
        [
            ([("x", "=", LONG)], [0]),
            ([("x", ">", LONG)], [1]),
            ([("x", "<", decimal.Decimal(0))], [2]),
        ],
    ),
    "whole numbers": (
        pa.array([2**63 - 1, -(2**63), 2**53 + 1, 2**53]),
        [
            ([("x", "=", 2**53 + 1)], [2]),
            ([("x", ">", 2**53)], [0, 2]),
            ([("x", ">", float(2**53))], [0, 2]),
            ([("x", "<", 1 - 2**63)], [1]),
        ],
    ),
    "narrow floats": (
        pa.array([0.1, 0.2, 16777216, None], pa.float32()),
        [([("x", "=", 0.1)], [0]), ([("x", "<=", 0.2)], [0, 1]), ([("x", ">", 0.1)], [1, 2])],
    ),
    "bytes and flags": (
        pa.array([b"\xff" * 100, b"", b"a", None]),
        [([("x", "=", b"\xff" * 100)], [0]), ([("x", "<", b"a")], [1]), ([("x", ">", b"\xff" * 50)], [0])],
    ),
}  # fmt: skip


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", PRUNED)
@pytest.mark.parametrize(
    ("num_rows", "has_large_files"),
    [
        (1, False),
        (3, True),
        pytest.param(1, True, marks=pytest.mark.long("as the pairs above")),
        pytest.param(3, False, marks=pytest.mark.long("as the pairs above")),
    ],
)
def test_pruning_leaves_out_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, num_rows: int, has_large_files: bool
) -> None:
    if has_large_files:
        monkeypatch.setattr(delta_files, "_LARGE_FILE_BYTES", 0)
    column, filters = PRUNED[case]
    table = pa.table({"id": np.arange(len(column)), "x": column})
    for start in range(0, len(column), num_rows):
        write_deltalake(str(tmp_path / "table"), table.slice(start, num_rows), mode="append")
    with make_delta_converter(tmp_path / "table", float_dtype=None) as converter:
        for one, expected in filters:
            assert sorted(rows_of(converter.where(one), columns=["id"])["id"]) == expected, one


def test_bounds_of_before_a_column_was_widened_to_doubles_leave_out_no_row(tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.mkdir()
    pq.write_table(pa.table({"id": [0], "x": pa.array([0.1], pa.float32())}), path / "one.parquet")
    stats = {"numRecords": 1, "minValues": {"x": 0.1}, "maxValues": {"x": 0.1}, "nullCount": {"x": 0}}
    file = {"path": "one.parquet", "stats": stats}
    write_log(path, {"id": "long", "x": "double"}, [file], features=["typeWidening"])

    def change(action: dict[str, Any]) -> None:
        if "metaData" in action:
            schema = json.loads(action["metaData"]["schemaString"])
            schema["fields"][1]["metadata"] = {"delta.typeChanges": [{"fromType": "float", "toType": "double"}]}
            action["metaData"]["schemaString"] = json.dumps(schema)

    change_commit(path, 0, change)
    # What was the float 0.1 is a little more as a double.
    assert_filtered(path, [("x", ">", 0.1)], [0])


def test_nan_in_a_list_is_found_in_what_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "table"
    write_deltalake(path, pa.table({"id": [0, 1], "x": [5.0, math.nan]}))
    write_deltalake(path, pa.table({"id": [2, 3], "x": [1.0, 7.0]}), mode="append")
    many = [float(number) for number in range(100, 200)] + [math.nan, 1.0] + [9.0] * 100
    for listed in (many, iter(many), pa.array(many), np.array(many)):
        assert sorted(ids_of(path, filters=[("x", "in", listed)])) == [1, 2]
    assert sorted(ids_of(path, filters=[("x", "not in", iter([5.0, 7.0]))])) == [1, 2]


def test_a_checkpoint_that_appears_while_the_table_is_opened_is_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """deltalake lists the log after we did, and may read it from a checkpoint that was not there before."""
    path = append_each(tmp_path / "table", [{"id": [number], "x": [BEGINNING]} for number in range(3)])
    DeltaTable(path).create_checkpoint()
    listed, looked = [], []

    def without_checkpoint_first(storage: Any) -> Any:
        listed.append(read_log_folder(storage))
        return {name: info for name, info in listed[-1].items() if len(listed) > 1 or name.endswith(".json")}

    def look(storage: Any, log: Any, versions: range) -> set[str] | None:
        looked.append(sorted(checkpoints_of(log, versions)))
        return wrapped_bounds(storage, log, versions)

    monkeypatch.setattr("converter.sources.delta.snapshot.read_log_folder", without_checkpoint_first)
    monkeypatch.setattr("converter.sources.delta.snapshot.wrapped_bounds", look)
    assert ids_of(path) == [0, 1, 2]
    append_each(tmp_path / "table", [{"id": [3], "x": [BEGINNING]}])
    assert ids_of(path) == [0, 1, 2, 3]
    assert looked == [[2], [2]]
