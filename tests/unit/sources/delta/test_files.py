"""A version's files: which are opened, how they become row groups, and what if they changed."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import math
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from converter import (
    NullValueError,
    ReadError,
    SourceChangedError,
    SourceError,
    make_delta_converter,
)
from converter.sources.delta import columns as delta_columns
from converter.sources.delta import files as delta_files
from tests.encrypted import write_encrypted
from tests.unit.sources.delta.known_delta import (
    FAR,
    MICROSECOND,
    append_each,
    assert_filtered,
    change_commit,
    file_of,
    five_files,
    ids_of,
    rows_of,
    write_log,
    write_vector,
)

LATER = dt.datetime(1980, 1, 1, tzinfo=dt.timezone.utc)


@pytest.mark.parametrize("version", [0, 1, 2])
def test_a_data_file_that_is_gone_is_named(tmp_path: Path, version: int) -> None:
    path = five_files(tmp_path / "table")
    file = file_of(path, version)
    file.unlink()
    said = (
        rf"{file.as_uri()} is not there\. It belongs to version 4 of the Delta table {path.as_uri()}\. VACUUM removes "
        rf".* take a newer version, or keep these rows with make_spark_converter\(.*'versionAsOf', 4\)\.load"
    )
    for read in (rows_of, lambda converter: converter.where([("id", ">=", 0)]), lambda converter: converter.statistics):
        with pytest.raises(SourceChangedError, match=said) as caught:
            read(make_delta_converter(path))
        assert caught.value.path == file.as_uri()


def swap_for_others(file: Path, ids: Any) -> None:
    """Another Parquet file of the same size in its place."""
    size = file.stat().st_size
    pq.write_table(pa.table({"id": pa.array(ids, pa.int64())}), file, compression="none", write_statistics=False)
    data = file.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    assert len(data) <= size
    file.write_bytes(data[:footer] + bytes(size - len(data)) + data[footer:])


@pytest.mark.parametrize(
    ("swap", "said"),
    [
        (lambda file: file.write_bytes(file.read_bytes() + b"x"), "has .* bytes"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "has .* bytes"),
        (lambda file: pq.write_table(pa.table({"id": range(1000)}), file), "has .* bytes"),
        (lambda file: swap_for_others(file, range(4)), "has 4 rows, expected 10"),
    ],
)
def test_a_data_file_that_is_another_one_is_named(tmp_path: Path, swap: Any, said: str) -> None:
    path = append_each(tmp_path / "table", [{"id": range(10)}] * 9)
    files = [file.name for file in sorted(path.glob("*.parquet"))]
    # One whose footer nobody reads when the table is opened.
    swap(path / files[1])
    converter = make_delta_converter(path)
    for read in (rows_of, lambda converter: converter.where([("id", ">=", 0)])):
        with pytest.raises(SourceChangedError, match=rf"{files[1]} {said}.*It belongs to version 8"):
            read(converter)


@pytest.mark.parametrize("columns", [None, ["b"]])
def test_an_encrypted_data_file_is_refused_by_name(tmp_path: Path, columns: list[str] | None) -> None:
    path = append_each(tmp_path / "table", [{"a": [1, 2], "b": [3, 4]}])
    (file,) = path.glob("*.parquet")
    write_encrypted(file, {"a": [1, 2], "b": [3, 4]}, plaintext_footer=True)
    (entry,) = (path / "_delta_log").glob("*.json")
    entry.write_text(re.sub(r'"size":[0-9]+', f'"size":{file.stat().st_size}', entry.read_text()))
    with pytest.raises(SourceError, match=rf"{file.name} has encrypted columns.* Read it with Spark"):
        make_delta_converter(path, columns=columns)


def test_a_data_file_of_no_parquet_is_named(tmp_path: Path) -> None:
    path = append_each(tmp_path / "table", [{"id": range(10)}] * 9)
    file = sorted(path.glob("*.parquet"))[1]
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(ReadError, match=rf"{file.name} cannot be decoded.* Restore it from a copy"):
        rows_of(make_delta_converter(path))


def test_a_filter_does_not_make_windows_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [{"id": np.arange(1000) + 1000 * day, "day": [day] * 1000} for day in range(10)]
    path = append_each(tmp_path / "table", tables, partition_by=["day"])
    monkeypatch.setattr("converter.plan.DEFAULT_WINDOW_BYTES", 3000)
    whole = make_delta_converter(path)
    window_rows = whole.plan(shuffle=True).window_rows
    assert 0 < window_rows < 1000
    filters = [("day", "=", 3)]
    for part in (whole.where(filters), make_delta_converter(path, filters=filters)):
        assert len(part) == 1000
        # Each file is of another size on disk, and so, by what a few of them tell, in memory.
        assert part.plan(shuffle=True).window_rows == pytest.approx(window_rows, rel=0.1)


def assert_only_reads(path: Path, versions: Sequence[int], filters: Any, expected: Sequence[int]) -> None:
    """The files of other versions are damaged, so that they cannot have been read."""
    kept = {file_of(path, version) for version in versions}
    for file in path.rglob("*.parquet"):
        if file not in kept and "_delta_log" not in str(file):
            file.write_bytes(b"x" * file.stat().st_size)
    assert_filtered(path, filters, expected)


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """No footer is read before it is needed."""
    monkeypatch.setattr(delta_files, "_NUM_SAMPLES", 0)


def test_files_of_other_partitions_are_never_opened(tmp_path: Path, few_samples: None) -> None:
    tables = [{"id": [number], "p": pa.array([value])} for number, value in enumerate(["a", "b/ %=ž", None, "d"])]
    for number, (filters, versions) in enumerate(
        [
            ([("p", "=", "b/ %=ž")], [1]),
            ([("p", "in", ["a", "d"])], [0, 3]),
            ([("p", "!=", "a")], [1, 3]),
            ([[("p", "=", "a")], [("id", "=", 3)]], [0, 3]),
            (pc.field("p").is_null(), [2]),
            (~(pc.field("p") == "a"), [1, 3]),
        ]
    ):
        path = append_each(tmp_path / str(number), tables, partition_by=["p"])
        assert_only_reads(path, versions, filters, versions)


def test_files_beyond_the_bounds_in_the_log_are_never_opened(tmp_path: Path, few_samples: None) -> None:
    # When no clock's offset had seconds any more.
    tables = [
        {"id": [0], "x": [1.0], "s": ["a" * 300], "t": pa.array([LATER - MICROSECOND], pa.timestamp("us", "UTC"))},
        {"id": [1], "x": [2.0], "s": ["b" * 300], "t": pa.array([LATER + 999 * MICROSECOND],
                                                               pa.timestamp("us", "UTC"))},
        {"id": [2], "x": [-5.0], "s": ["z" * 300], "t": pa.array([FAR], pa.timestamp("us", "UTC"))},
    ]  # fmt: skip
    for number, (filters, versions) in enumerate(
        [
            ([("x", ">", 0), ("x", "<=", math.inf), ("id", ">", 0)], [1]),
            ([("id", "=", 1)], [1]),
            ([("id", "in", [1, 7])], [1]),
            ([("x", "<", 1.5)], [0, 2]),
            ([("s", ">", "c")], [2]),
            ([("s", "<", "aaaa")], []),
            ([("t", ">", LATER + dt.timedelta(milliseconds=1))], [2]),
            ([("t", "<", LATER)], [0]),
            # NaN, which no bounds show, is above every number.
            ([("id", ">", 0), ("x", "<", 3), ("s", "<", "c")], [1]),
        ]
    ):
        path = append_each(tmp_path / str(number), tables)
        # Behind a bound that is cut a row may lie, so that a file may be read in vain.
        if versions:
            assert_only_reads(path, versions, filters, versions)
        else:
            with pytest.raises(SourceError, match="No row of"):
                make_delta_converter(path, filters=filters)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("has_large_files", [False, True])
@pytest.mark.parametrize("filters", [[("id", ">", 119)], [("p", "=", "b")], pc.field("id") + 0 > 119])
def test_of_files_that_are_ruled_out_not_even_the_footer_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filters: Any, has_large_files: bool
) -> None:
    if has_large_files:
        monkeypatch.setattr(delta_files, "_LARGE_FILE_BYTES", 0)
    # Lists, for whose lengths a hundred footers are looked at.
    tables = [
        {"id": [10 * number], "p": ["ab"[number // 12]], "list": [[1.0, 2.0]], "more": [[0.5] * (number + 1)]}
        for number in range(15)
    ]
    path = append_each(tmp_path / "table", tables, partition_by=["p"])
    whole = make_delta_converter(path)
    for version in range(12):
        file_of(path, version).unlink()
    if isinstance(filters, pc.Expression):
        # What an expression computes is not known of a file that is not read.
        with pytest.raises(SourceChangedError, match=r"part-.* is not there"):
            make_delta_converter(path, filters=filters)
        return
    with make_delta_converter(path, filters=filters) as part:
        assert sorted(rows_of(part, columns=["id", "list"])["id"]) == [120, 130, 140]
        assert part.schema["list"].shape == (2,)
        assert part.fingerprint != whole.fingerprint
    with pytest.raises(SourceError, match=r"No row of .* passes the filters"):
        make_delta_converter(path, filters=[("id", ">", 140)])


def test_files_without_statistics_are_read(tmp_path: Path) -> None:
    path = five_files(tmp_path / "table")
    for version in range(5):
        change_commit(path, version, lambda action: action.get("add", {}).pop("stats", None))
    with make_delta_converter(path) as converter:
        assert len(converter) == 50
        assert sorted(rows_of(converter, shuffle=True)["id"]) == list(range(50))
        assert converter.statistics["id"].max == 49
        # Of no column is it known that it has no nulls; there are none, so that nothing is said.
        assert len(rows_of(converter, nulls="raise")["id"]) == 50
    assert_filtered(path, [("id", "<", 12)], range(12))


def test_a_log_that_counts_wrongly_is_noticed(tmp_path: Path) -> None:
    path = five_files(tmp_path / "table")
    change_commit(path, 1, lambda action: action.get("add", {}).update({"stats": '{"numRecords": 11}'}))
    with pytest.raises(SourceChangedError, match=r"has 10 rows, expected 11"):
        rows_of(make_delta_converter(path))


@pytest.mark.parametrize("count", [-1, -3, 10**15])
def test_a_count_that_cannot_be_is_none(tmp_path: Path, count: int) -> None:
    path = five_files(tmp_path / "table")
    change_commit(path, 1, lambda action: action.get("add", {}).update({"stats": json.dumps({"numRecords": count})}))
    assert ids_of(path) == list(range(50))
    assert_filtered(path, [("id", ">=", 15)], range(15, 50))


def test_large_files_are_read_row_group_by_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table"
    path.mkdir()
    names = ["a.parquet", "b.parquet", "c.parquet"]
    for number, name in enumerate(names):
        pq.write_table(pa.table({"id": np.arange(100) + 100 * number}), path / name, row_group_size=17)
    vector = write_vector(path / "vector.bin", [0, 16, 17, 18, 50, 99])
    files = [{"path": name, "stats": {"numRecords": 100}} for name in names]
    write_log(path, {"id": "long"}, [files[0], files[1] | {"deletionVector": vector}, files[2]],
              features=["deletionVectors"])  # fmt: skip
    left = [number for number in range(300) if number - 100 not in (0, 16, 17, 18, 50, 99)]
    small = make_delta_converter(path)
    monkeypatch.setattr(delta_files, "_LARGE_FILE_BYTES", 0)
    large = make_delta_converter(path)
    assert (small._manifest.num_row_groups, large._manifest.num_row_groups) == (3, 18)
    for converter in (small, large, pickle.loads(pickle.dumps(large))):
        assert len(converter) == len(left)
        assert rows_of(converter)["id"] == left
        for options in ({"seed": 1}, {"seed": 2, "shuffle_window_rows": 30}):
            assert sorted(rows_of(converter, shuffle=True, **options)["id"]) == left
        parts = [rows_of(converter, cur_shard=shard, shard_count=4, uneven="keep")["id"] for shard in range(4)]
        assert list(itertools.chain(*parts)) == left
        assert rows_of(converter.where([("id", ">", 105), ("id", "<", 125)]))["id"] == [
            number for number in left if 105 < number < 125
        ]
    (path / "b.parquet").unlink()
    with pytest.raises(SourceChangedError, match=r"b\.parquet is not there\. It belongs to version 0"):
        make_delta_converter(path)


def test_null_elements_that_no_footer_showed_are_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [[[1.0, 2.0]], [[3.0, None]], [[5.0, 6.0]]]
    path = append_each(tmp_path, [{"x": pa.array(row, pa.list_(pa.float32()))} for row in rows])
    # In the order in which their rows are numbered.
    names = [path / name for name in make_delta_converter(path)._manifest.file_names]
    whole = [index for index, name in enumerate(names) if pq.read_table(name)["x"].to_pylist() != rows[1]]
    monkeypatch.setattr(delta_columns, "spread_over", lambda numbers, _: numbers[whole[:1]])
    monkeypatch.setattr(delta_files, "spread_over", lambda numbers, _: numbers[whole[:1]])
    converter = make_delta_converter(path)
    with pytest.raises(
        NullValueError, match=r"footers that were read did not show.*pass nulls=\{'x': 0\}\. \(Found in"
    ):
        rows_of(converter)
    assert sorted(rows_of(converter, nulls={"x": 9})["x"]) == [[1, 2], [3, 9], [5, 6]]


def test_a_folder_that_the_log_calls_a_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    """First seen in `python -m tests.faults.campaign damaged_bytes --case 42:679 --steps 1,6`."""
    path = append_each(tmp_path / "table", [{"id": [1, 2]}])
    (path / "folder").mkdir()

    def change(action: dict[str, Any]) -> None:
        if "add" in action:
            action["add"]["path"] = "folder"

    change_commit(path, 0, change)
    with pytest.raises(SourceError, match=r"folder cannot be read: .*directory\. Check that it is a file that you may"):
        make_delta_converter(path)
