"""Delta tables without Spark: what is read of a version, what is never opened, and what is said of a damaged one.

The tables are written by deltalake, or their log by hand.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import itertools
import json
import math
import os
import pickle
import re
import shutil
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from converter import (
    DatasetConverter,
    NullValueError,
    ReadError,
    SourceChangedError,
    SourceError,
    StateMismatchError,
    make_delta_converter,
)
from converter.sources.delta import columns as delta_columns
from converter.sources.delta import files as delta_files
from tests.encrypted import write_encrypted
from tests.known_rows import concatenate, run_python

Rows = dict[str, list[Any]]
FAR = dt.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=dt.timezone.utc)
BEGINNING = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
LATER = dt.datetime(1980, 1, 1, tzinfo=dt.timezone.utc)
MICROSECOND = dt.timedelta(microseconds=1)
KEY = base64.b64encode(b"a key that nobody may see").decode()


def append(path: Path, columns: Mapping[str, Any], **options: Any) -> None:
    write_deltalake(str(path), pa.table(dict(columns)), mode="append", **options)


def append_each(path: Path, tables: Sequence[Mapping[str, Any]], **options: Any) -> Path:
    """A table of one file for each of these."""
    for one in tables:
        append(path, one, **options)
    return path


def five_files(path: Path) -> Path:
    """The numbers from 0 to 49, ten in each file, and a version for each."""
    return append_each(path, [{"id": np.arange(10) + 10 * number} for number in range(5)])


def rows_of(converter: DatasetConverter, **options: Any) -> Rows:
    with converter.make_batch_reader(**{"batch_size": 7, "nulls": "mask"} | options) as reader:
        return {name: column.tolist() for name, column in concatenate(list(reader)).items()}


def ids_of(path: Path, **options: Any) -> list[int]:
    return sorted(rows_of(make_delta_converter(path, **options), columns=["id"])["id"])


def test_the_version_that_was_found_is_told(tmp_path: Path) -> None:
    table = five_files(tmp_path / "t")
    newest, old = make_delta_converter(table), make_delta_converter(table, version=1)
    assert (newest.version, old.version) == (4, 1)
    assert newest.where([("id", ">", 30)]).version == 4
    assert "/t, version 1)" in repr(old)
    assert pickle.loads(pickle.dumps(old)).version == 1


def commit(path: Path, version: int) -> Path:
    return path / "_delta_log" / f"{version:020}.json"


def actions_of(path: Path, version: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in commit(path, version).read_text().splitlines()]


def change_commit(path: Path, version: int, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite the actions of a commit; `change` does so in place."""
    actions = actions_of(path, version)
    for action in actions:
        change(action)
    commit(path, version).write_text("".join(json.dumps(action) + "\n" for action in actions))


def file_of(path: Path, version: int) -> Path:
    """The only data file that a version added."""
    (added,) = (action["add"]["path"] for action in actions_of(path, version) if "add" in action)
    return path / unquote(added)


def write_log(path: Path, fields: Mapping[str, str], files: Sequence[Mapping[str, Any]], *, features: Any = ()) -> Path:
    """A log of one commit, with what it says of its files: a path, and what differs from the usual."""
    (path / "_delta_log").mkdir(parents=True, exist_ok=True)
    schema = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in fields.items()]
    protocol: dict[str, Any] = {"minReaderVersion": 1, "minWriterVersion": 2}
    if features:
        named = list(features)
        protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": named, "writerFeatures": named}
    metadata = {
        "id": "0f6e073b-58cf-479f-98b5-b669a1503c93", "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": schema}), "partitionColumns": [], "configuration": {},
        "createdTime": 0,
    }  # fmt: skip
    actions: list[dict[str, Any]] = [{"protocol": protocol}, {"metaData": metadata}]
    for file in files:
        found = path / file["path"]
        add = {"partitionValues": {}, "modificationTime": 0, "dataChange": True, "size": found.stat().st_size} | file
        if isinstance(add.get("stats"), dict):
            add["stats"] = json.dumps(add["stats"])
        actions.append({"add": add})
    commit(path, 0).write_text("".join(json.dumps(action) + "\n" for action in actions))
    return path


def write_vector(file: Path, deleted: Sequence[int]) -> dict[str, Any]:
    """A file with one deletion vector, and how a log names it: a roaring bitmap of one array."""
    bitmap = struct.pack("<iqiIIHHI", 1681511377, 1, 0, 12346, 1, 0, len(deleted) - 1, 16)
    data = bitmap + b"".join(struct.pack("<H", row) for row in deleted)
    file.write_bytes(b"\x01" + struct.pack(">i", len(data)) + data + struct.pack(">I", zlib.crc32(data)))
    return {
        "storageType": "p", "pathOrInlineDv": file.as_uri(), "offset": 1, "sizeInBytes": len(data),
        "cardinality": len(deleted),
    }  # fmt: skip


def with_vector(path: Path, deleted: Sequence[int], *, ids: Any = range(10), stats: Any = None) -> Path:
    """A table of one file some of whose rows are deleted."""
    path.mkdir()
    pq.write_table(pa.table({"id": pa.array(ids, pa.int64())}), path / "one.parquet")
    vector = write_vector(path / "vector.bin", deleted)
    return write_log(
        path, {"id": "long"},
        [{"path": "one.parquet", "stats": stats or {"numRecords": len(ids)}, "deletionVector": vector}],
        features=["deletionVectors"],
    )  # fmt: skip


def assert_filtered(path: Path, filters: Any, expected: Sequence[Any], *, column: str = "id") -> None:
    """These rows are left, whichever way the filters are said."""
    for options in ({}, {"filters": filters}):
        with make_delta_converter(path, float_dtype=None, **options) as converter:
            part = converter if options else converter.where(filters)
            assert len(part) == len(expected)
            assert sorted(rows_of(part)[column]) == sorted(expected)


# What is no such table ------------------------------------------------------------------------------------------------


def test_what_is_no_table_is_said(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1]}), tmp_path / "x.parquet")
    table = five_files(tmp_path / "table")
    for place in (tmp_path, tmp_path / "x.parquet", table / "_delta_log"):
        with pytest.raises(SourceError, match=r"is no Delta table: .* make_parquet_converter") as caught:
            make_delta_converter(place)
        assert caught.value.path == place.as_uri()
    (tmp_path / "empty" / "_delta_log").mkdir(parents=True)
    with pytest.raises(SourceError, match="empty cannot be opened"):
        make_delta_converter(tmp_path / "empty")


@pytest.mark.parametrize("version", [5, 10**6, 10**7, 2**63, 2**80])
def test_a_version_that_is_not_there_is_refused_at_once(tmp_path: Path, version: int) -> None:
    path = five_files(tmp_path / "table")
    with pytest.raises(SourceError, match=rf"cannot be opened at version {version}: .* Its latest version is 4"):
        make_delta_converter(path, version=version)


def test_versions_have_their_rows(tmp_path: Path) -> None:
    path = five_files(tmp_path / "table")
    for version in range(5):
        assert ids_of(path, version=version) == list(range(10 * version + 10))
    assert ids_of(path, version=np.int64(1)) == list(range(20))
    assert ids_of(path) == ids_of(Path(f"{path}/")) == list(range(50))
    with make_delta_converter(path.as_uri()) as converter:
        assert converter.url == path.as_uri()
        assert f"50 rows × 1 columns, 0.0 MB in 5 files, {path.as_uri()}" in repr(converter)


def test_a_time_before_the_first_commit_is_refused(tmp_path: Path) -> None:
    path = five_files(tmp_path / "table")
    for moment in ("2000-01-01", "0001-01-01", dt.datetime(2000, 1, 1, tzinfo=dt.timezone.utc)):
        with pytest.raises(SourceError, match=r"has no version of .*: its log begins with version 0 at 20"):
            make_delta_converter(path, timestamp=moment)
    for moment in ("2999-01-01T00:00:00+05:00", FAR):
        assert ids_of(path, timestamp=moment) == list(range(50))


def test_an_empty_table_is_refused(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "a"), pa.table({"id": pa.array([], pa.int64())}))
    path = five_files(tmp_path / "b")
    DeltaTable(str(path)).delete()
    for one, version in ((tmp_path / "a", 0), (path, 5)):
        with pytest.raises(SourceError, match=rf"Version {version} of the Delta table \S+ has no rows"):
            make_delta_converter(one)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "both": ({"version": 0, "timestamp": "2026-01-01"}, ValueError, "version and timestamp"),
    "version bool": ({"version": True}, TypeError, "version must be an integer, got True"),
    "version float": ({"version": 1.0}, TypeError, "version must be an integer, got 1.0"),
    "version text": ({"version": "1"}, TypeError, "version must be an integer, got '1'"),
    "version negative": ({"version": -1}, ValueError, "version must be at least 0"),
    "timestamp number": ({"timestamp": 5}, TypeError, "timestamp must be a datetime"),
    "timestamp day": ({"timestamp": dt.date(2026, 1, 1)}, TypeError, "timestamp must be a datetime"),
    "timestamp text": ({"timestamp": "yesterday"}, ValueError, "'yesterday'"),
    "columns text": ({"columns": "id"}, TypeError, "columns must be a list of names"),
    "columns none": ({"columns": []}, TypeError, "columns must be a list of names"),
    "columns unknown": (
        {"columns": ["no"]}, ValueError,
        r"columns: There is no column 'no'. The columns are 'id'. \(in version 4 of the Delta table"),
    "filters text": ({"filters": "id"}, TypeError, "filters must be tuples"),
    "filters none": ({"filters": []}, TypeError, "filters must be tuples"),
    "filters unknown": ({"filters": [("no", "=", 1)]}, ValueError, "filters: There is no column 'no'"),
    "filters unknown expression": ({"filters": pc.field("no") > 1}, ValueError, "filters: There is no column 'no'"),
    "filters kind": ({"filters": [("id", "=", "x")]}, ValueError, "filters: column 'id' .* cannot be compared"),
    "filters all": ({"filters": [("id", ">", 100)]}, SourceError, "No row of .* passes the filters"),
    "float_dtype": ({"float_dtype": "float16"}, ValueError, "float_dtype must be"),
    "shapes scalar": ({"shapes": {"id": (2,)}}, ValueError, "shapes names the column 'id', which is no array"),
    "shapes unknown": ({"shapes": {"no": (2,)}}, ValueError, "shapes: There is no column 'no'"),
    "storage_options": ({"storage_options": "key"}, TypeError, "storage_options must be a dict .* got a str"),
    "timeout negative": ({"timeout_seconds": -1}, ValueError, "timeout_seconds must be above 0"),
    "timeout text": ({"timeout_seconds": "x"}, TypeError, "timeout_seconds must be a number"),
    "spark": ({"spark": 5}, SourceError, "Spark's catalog does not say where"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_an_option_that_cannot_be_is_named(tmp_path: Path, case: str) -> None:
    options, kind, said = WRONG[case]
    with pytest.raises(kind, match=said):
        make_delta_converter(five_files(tmp_path / "table"), **options)


@pytest.mark.parametrize("table", [5, None, "", " ", b"x"])
def test_a_table_is_a_path_or_a_name(table: Any) -> None:
    with pytest.raises(TypeError, match=r"path|PathLike"):
        make_delta_converter(table)


def test_no_secret_is_shown_where_a_store_cannot_be_reached() -> None:
    options = {"account_key": KEY}
    with pytest.raises((OSError, SourceError), match=r"could not be reached|cannot be opened") as caught:
        make_delta_converter(
            "abfss://data@no-such-account.dfs.core.windows.net/table", storage_options=options, timeout_seconds=0.5
        )
    error: BaseException | None = caught.value
    while error is not None:
        assert KEY not in f"{error} {error!r} {error.args}"
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize("features", [["inTheFuture"], ["columnMapping", "inTheFuture"]])
def test_a_feature_that_nobody_knows_is_named_with_the_remedy(tmp_path: Path, features: list[str]) -> None:
    path = five_files(tmp_path / "table")

    def change(action: dict[str, Any]) -> None:
        if "protocol" in action:
            versions = {"minReaderVersion": 3, "minWriterVersion": 7}
            action["protocol"] = versions | {"readerFeatures": features, "writerFeatures": features}

    change_commit(path, 0, change)
    with pytest.raises(SourceError, match=r"inTheFuture.* make_spark_converter"):
        make_delta_converter(path)


# Damage ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [None, 3])
def test_a_commit_that_is_missing_in_the_middle_is_noticed(tmp_path: Path, version: int | None) -> None:
    path = five_files(tmp_path / "table")
    commit(path, 2).unlink()
    with pytest.raises(SourceError, match=r"cannot be opened.* gap"):
        make_delta_converter(path, version=version)
    assert ids_of(path, version=1) == list(range(20))


def test_a_missing_beginning_is_noticed(tmp_path: Path) -> None:
    path = five_files(tmp_path / "table")
    commit(path, 0).unlink()
    with pytest.raises(SourceError, match="table cannot be opened"):
        make_delta_converter(path)


@pytest.mark.parametrize("content", [b'{"add": {"path": "x', b"\xff\xfe\x00", b'{"add": 5}\n', b"[" * 200_000])
def test_a_commit_that_is_damaged_is_noticed(tmp_path: Path, content: bytes) -> None:
    path = five_files(tmp_path / "table")
    commit(path, 1).write_bytes(content)
    with pytest.raises(
        SourceError, match=r"table cannot be opened: .*[Jj]son.* Damaged: _delta_log/0{19}1\.json\. What deltalake"
    ):
        make_delta_converter(path)


@pytest.mark.parametrize("content", [b"", b"\n" * 99, b"\r\n" * 7, b"{}\n"])
def test_a_commit_of_nothing_is_noticed(tmp_path: Path, content: bytes) -> None:
    path = five_files(tmp_path / "table")
    commit(path, 1).write_bytes(content)
    with pytest.raises(SourceError, match=r"00001\.json holds no action: the commit of a version was cut"):
        make_delta_converter(path)
    # Neither those of before are touched by it, nor those that a checkpoint has seen.
    assert ids_of(path, version=0) == list(range(10))


def test_a_commit_of_nothing_that_a_checkpoint_has_seen_is_no_matter(tmp_path: Path) -> None:
    path = five_files(tmp_path / "table")
    DeltaTable(str(path)).create_checkpoint()
    commit(path, 1).write_bytes(b"")
    assert ids_of(path) == list(range(50))


def test_a_path_that_deltalake_reads_otherwise_is_refused(tmp_path: Path) -> None:
    """It would list the log of one folder, and read that of the other."""
    five_files(tmp_path / "a b")
    append_each(tmp_path / "x", [{"id": [7]}])
    for name in ("a%20b", "50%", "%zz", "a#b?c"):
        shutil.copytree(tmp_path / "x", tmp_path / name)
        if name == "a%20b":
            with pytest.raises(SourceError, match=r"takes for an encoded sign: it would look into \S+/a b\. Rename"):
                make_delta_converter(tmp_path / name)
        else:
            assert ids_of(tmp_path / name) == [7]


def test_names_in_other_cases_are_the_same_column(tmp_path: Path) -> None:
    """As CONVERT TO DELTA takes files whose names differ so."""
    (tmp_path / "t").mkdir()
    pq.write_table(pa.table({"ID": [1, 2]}), tmp_path / "t" / "a.parquet")
    pq.write_table(pa.table({"iD": [3]}), tmp_path / "t" / "b.parquet")
    said = [({"path": f"{name}.parquet", "stats": {"numRecords": rows, "nullCount": {"ID": 0}}}) for name, rows in
            (("a", 2), ("b", 1))]  # fmt: skip
    path = write_log(tmp_path / "t", {"ID": "long"}, said)
    assert sorted(rows_of(make_delta_converter(path))["ID"]) == [1, 2, 3]
    assert_filtered(path, [("ID", ">=", 2)], [2, 3], column="ID")


@pytest.mark.parametrize("nulls", ["raise", "mask", {"id": 5}])
def test_a_file_without_a_column_that_the_log_counts_no_null_of_is_named(tmp_path: Path, nulls: Any) -> None:
    (tmp_path / "t").mkdir()
    pq.write_table(pa.table({"other": [1, 2]}), tmp_path / "t" / "a.parquet")
    stats = {"numRecords": 2, "nullCount": {"id": 0}}
    path = write_log(tmp_path / "t", {"id": "long", "other": "long"}, [{"path": "a.parquet", "stats": stats}])
    with pytest.raises(SourceChangedError, match=r"a\.parquet has no column 'id', although the table's log says"):
        rows_of(make_delta_converter(path), nulls=nulls)


def test_nulls_that_the_log_does_not_count_are_no_zeros(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    pq.write_table(pa.table({"id": [1, None]}), tmp_path / "t" / "a.parquet")
    stats = {"numRecords": 2, "nullCount": {"id": 0}}
    path = write_log(tmp_path / "t", {"id": "long"}, [{"path": "a.parquet", "stats": stats}])
    for nulls, kind in (("mask", ReadError), ("raise", NullValueError)):
        with pytest.raises(kind, match="null"):
            rows_of(make_delta_converter(path), nulls=nulls)
    assert rows_of(make_delta_converter(path), nulls={"id": 5})["id"] == [1, 5]


def test_a_column_and_a_member_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    pq.write_table(pa.table({"a.b": [1], "a": [{"b": 2}], "id": [3]}), tmp_path / "t" / "a.parquet")
    path = write_log(tmp_path / "t", {"a.b": "long", "id": "long"}, [{"path": "a.parquet"}])
    struct_of = {"type": "struct", "fields": [{"name": "b", "type": "long", "nullable": True, "metadata": {}}]}

    def add_struct(action: dict[str, Any]) -> None:
        if "metaData" in action:
            schema = json.loads(action["metaData"]["schemaString"])
            schema["fields"].append({"name": "a", "type": struct_of, "nullable": True, "metadata": {}})
            action["metaData"]["schemaString"] = json.dumps(schema)

    change_commit(path, 0, add_struct)
    with pytest.raises(SourceError, match=r"several columns called 'a\.b'"):
        make_delta_converter(path)
    assert rows_of(make_delta_converter(path, columns=["id"]))["id"] == [3]


def test_a_filter_on_a_column_that_is_left_out_says_so(tmp_path: Path) -> None:
    path = append_each(tmp_path / "table", [{"id": [1], "x": [2]}])
    with pytest.raises(ValueError, match=r"no column 'x'.* The table has 'x'; add it to columns=…"):
        make_delta_converter(path, columns=["id"], filters=[("x", "=", 2)])


def lose_files(path: Path, version: int) -> None:
    """Take the lines that name files out of a commit."""
    left = [action for action in actions_of(path, version) if "add" not in action]
    commit(path, version).write_text("".join(json.dumps(action) + "\n" for action in left))


def test_a_commit_that_lost_a_line_is_noticed_where_spark_noted_what_there_is(tmp_path: Path) -> None:
    path = five_files(tmp_path / "table")
    noted = commit(path, 4).with_suffix(".crc")
    total = sum(file_of(path, version).stat().st_size for version in range(5))
    noted.write_text(json.dumps({"tableSizeBytes": total, "numFiles": 5}))
    assert ids_of(path) == list(range(50))
    lose_files(path, 2)
    with pytest.raises(
        SourceError, match=rf"version 4 .* is damaged: its commits name 4 files .*{noted.name} says 5 of"
    ):
        make_delta_converter(path)
    assert ids_of(path, version=3) == [*range(20), *range(30, 40)]
    for content in ("{", "[]", "{}", '{"numFiles": null, "tableSizeBytes": 1}', '{"numFiles": Infinity}'):
        noted.write_text(content)
        assert len(ids_of(path)) == 40
    noted.unlink()
    noted.mkdir()
    assert len(ids_of(path)) == 40


def test_a_lost_line_is_noticed_behind_another_writers_version(tmp_path: Path) -> None:
    path = five_files(tmp_path / "table")
    noted = commit(path, 3).with_suffix(".crc")
    total = sum(file_of(path, version).stat().st_size for version in range(4))
    noted.write_text(json.dumps({"tableSizeBytes": total, "numFiles": 4}))
    assert ids_of(path) == list(range(50))
    lose_files(path, 2)
    with pytest.raises(SourceError, match=rf"version 4 .*\(as of version 3\) is damaged: .*{noted.name} says 4 of"):
        make_delta_converter(path)
    assert len(ids_of(path, version=2)) == 20
    # Behind a checkpoint the commits are not read, and need not be there.
    DeltaTable(str(path)).create_checkpoint()
    append(path, {"id": [50]})
    assert len(ids_of(path)) == 41


@pytest.mark.parametrize("damage", ["cut", "zeros", "empty", "gone"])
@pytest.mark.parametrize("is_cleaned", [False, True])
def test_a_checkpoint_that_is_damaged_is_noticed(tmp_path: Path, damage: str, is_cleaned: bool) -> None:
    path = five_files(tmp_path / "table")
    DeltaTable(str(path)).create_checkpoint()
    append(path, {"id": [50]})
    if is_cleaned:
        for version in range(5):
            commit(path, version).unlink()
    assert ids_of(path) == list(range(51))
    (checkpoint,) = (path / "_delta_log").glob("*.checkpoint.parquet")
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes({"cut": whole[:500], "zeros": bytes(len(whole))}.get(damage, b""))
    if damage == "gone":
        checkpoint.unlink()
    with pytest.raises(
        SourceError,
        match="table cannot be opened" + ("" if damage == "gone" else f".* Damaged: _delta_log/{checkpoint.name}"),
    ):
        make_delta_converter(path)


def test_statistics_that_are_damaged_are_none(tmp_path: Path) -> None:
    path = five_files(tmp_path / "table")
    change_commit(path, 1, lambda action: action.get("add", {}).update({"stats": "{{"}))
    change_commit(path, 2, lambda action: action.get("add", {}).pop("stats", None))
    assert ids_of(path) == list(range(50))
    assert_filtered(path, [("id", ">=", 15)], range(15, 50))


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


def two_of_one_size(path: Path) -> tuple[Path, Path]:
    files = sorted(path.glob("*.parquet"), key=lambda file: (file.stat().st_size, file.name))
    return next(pair for pair in itertools.pairwise(files) if len({one.stat().st_size for one in pair}) == 1)


@pytest.mark.parametrize(
    "key",
    [
        np.arange(90),
        np.linspace(-3, 7, 90),
        np.linspace(0, 1, 90).astype(np.float32),
        [f"row {number:02}" for number in range(90)],
        [f"{number:02} of a text that is longer than what a log keeps, 日本" for number in range(90)],
        np.arange(90).astype("datetime64[D]"),
        pa.array(range(0, 9 * 10**16, 10**15), pa.timestamp("us", "UTC")),
        pa.array(range(0, 9 * 10**16, 10**15), pa.timestamp("us")),
        pa.array([decimal.Decimal(number) / 4 for number in range(90)], pa.decimal128(9, 2)),
        pa.array([decimal.Decimal(number) / 4 for number in range(90)], pa.decimal128(30, 2)),
    ],
    ids=[
        "integers",
        "doubles",
        "floats",
        "texts",
        "long-texts",
        "days",
        "times",
        "local-times",
        "decimals",
        "long-decimals",
    ],
)
def test_files_that_changed_places_are_noticed_though_they_are_of_one_size(tmp_path: Path, key: Any) -> None:
    path = append_each(
        tmp_path / "table", [{"key": key[10 * one : 10 * one + 10], "x": np.ones(10)} for one in range(9)]
    )
    one, other = two_of_one_size(path)
    reads: list[Callable[[DatasetConverter], Any]] = [
        rows_of, lambda found: rows_of(found, columns=["x"]), lambda found: found.where([("x", ">=", 0.0)]),
    ]  # fmt: skip
    for read in reads:
        read(make_delta_converter(path))
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    for read in reads:
        for columns in (None, ["x"]):
            with pytest.raises(SourceChangedError, match=r"has values of 'key' from .* by the table's log") as caught:
                read(make_delta_converter(path, columns=columns))
            assert str(caught.value.path).endswith((one.name, other.name))


def test_files_are_told_apart_by_the_columns_that_differ(tmp_path: Path) -> None:
    alike = {f"size{number}": np.full(10, number) for number in range(6)}
    path = append_each(tmp_path / "table", [alike | {"x": np.linspace(one, one + 1, 10)} for one in range(9)])
    one, other = two_of_one_size(path)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    with pytest.raises(SourceChangedError, match=r"has values of 'x' from"):
        rows_of(make_delta_converter(path))


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


def test_a_hint_at_a_checkpoint_that_is_gone_is_named(tmp_path: Path) -> None:
    path = five_files(tmp_path / "table")
    hint = path / "_delta_log" / "_last_checkpoint"
    hint.write_text('{"version": 3, "size": 5}')
    with pytest.raises(SourceError, match=r"_delta_log/_last_checkpoint names a checkpoint that is gone .* is removed"):
        make_delta_converter(path)
    hint.unlink()
    assert ids_of(path) == list(range(50))


def test_the_log_may_be_a_link_and_a_time_end_with_z(tmp_path: Path) -> None:
    path = five_files(tmp_path / "table")
    (path / "_delta_log").rename(tmp_path / "log")
    (path / "_delta_log").symlink_to(tmp_path / "log")
    assert ids_of(path, timestamp="2999-01-01T00:00:00Z") == list(range(50))


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
    with pytest.raises(ReadError, match=rf"{file.name} cannot be decoded.* It belongs to version 8"):
        rows_of(make_delta_converter(path))


# Deletion vectors -----------------------------------------------------------------------------------------------------


def test_rows_of_a_deletion_vector_are_left_out(tmp_path: Path) -> None:
    path = with_vector(tmp_path / "table", [0, 3, 9])
    left = [1, 2, 4, 5, 6, 7, 8]
    with make_delta_converter(path) as converter:
        assert len(converter) == 7
        assert rows_of(converter)["id"] == left
        assert sorted(rows_of(converter, shuffle=True, seed=1)["id"]) == left
        assert rows_of(pickle.loads(pickle.dumps(converter)))["id"] == left
        assert (converter.statistics["id"].min, converter.statistics["id"].max) == (1, 8)
        halves = converter.split({"a": 0.5, "b": 0.5})
        assert sorted(row for half in halves.values() for row in rows_of(half)["id"]) == left
    assert_filtered(path, [("id", ">", 2)], [4, 5, 6, 7, 8])


def test_nulls_in_deleted_rows_are_none(tmp_path: Path) -> None:
    stats = {"numRecords": 4, "nullCount": {"id": 2}, "minValues": {"id": 1}, "maxValues": {"id": 2}}
    path = with_vector(tmp_path / "a", [0, 2], ids=[None, 1, None, 2], stats=stats)
    assert rows_of(make_delta_converter(path), nulls="raise")["id"] == [1, 2]
    path = with_vector(tmp_path / "b", [0], ids=[None, 1, None, 2], stats=stats)
    with pytest.raises(NullValueError, match="Column 'id' holds 1 null"):
        rows_of(make_delta_converter(path), nulls="raise")


def test_a_table_whose_rows_are_all_deleted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="has no rows"):
        make_delta_converter(with_vector(tmp_path / "table", range(10)))


@pytest.mark.parametrize("damage", ["cut", "zeros", "empty", "another bit"])
def test_a_deletion_vector_that_is_damaged_is_noticed(tmp_path: Path, damage: str) -> None:
    path = with_vector(tmp_path / "table", [0, 3])
    vector = path / "vector.bin"
    whole = vector.read_bytes()
    flipped = whole[:-6] + bytes([whole[-6] ^ 1]) + whole[-5:]
    vector.write_bytes({"cut": whole[:-9], "zeros": bytes(len(whole)), "another bit": flipped}.get(damage, b""))
    with pytest.raises(SourceError, match=r"Which rows are deleted in version 0 .* cannot be read: "):
        make_delta_converter(path)


def test_a_deletion_vector_that_is_gone_is_said_with_its_version(tmp_path: Path) -> None:
    path = with_vector(tmp_path / "table", [0, 3])
    converter = make_delta_converter(path)
    (path / "vector.bin").unlink()
    with pytest.raises(
        SourceChangedError, match=r"deleted in version 0 .*vector\.bin.* VACUUM removes .* newer version"
    ):
        make_delta_converter(path)
    # Who opened it before knows the rows.
    assert rows_of(converter)["id"] == [1, 2, 4, 5, 6, 7, 8, 9]


def test_a_deletion_vector_of_another_version_is_noticed_where_spark_counted(tmp_path: Path) -> None:
    path = with_vector(tmp_path / "table", [0, 3])
    noted = path / "_delta_log" / f"{0:020}.crc"
    for count in (2, None):
        noted.write_text(json.dumps({"numDeletedRecordsOpt": count}))
        assert len(make_delta_converter(path)) == 8
    noted.write_text(json.dumps({"numDeletedRecordsOpt": 3}))
    with pytest.raises(SourceError, match=r"^2 rows are deleted in version 0 .* and 3 by _delta_log/0+\.crc"):
        make_delta_converter(path)


# Columns --------------------------------------------------------------------------------------------------------------


def test_a_column_of_newer_versions_is_not_there_in_older_ones(tmp_path: Path) -> None:
    path = append_each(tmp_path / "table", [{"id": [1, 2]}, {"id": [3], "y": [1.5]}], schema_mode="merge")
    with pytest.raises(ValueError, match=r"There is no column 'y'.* \(in version 0 of the Delta table"):
        make_delta_converter(path, version=0, columns=["y"])
    with pytest.raises(ValueError, match=r"filters: There is no column 'y'.* \(in version 0 of the Delta table"):
        make_delta_converter(path, version=0, filters=[("y", ">", 1)])
    found = rows_of(make_delta_converter(path))
    assert sorted(zip(found["id"], found["y"], found["y__valid"], strict=True)) == [
        (1, 0, False), (2, 0, False), (3, 1.5, True),
    ]  # fmt: skip
    assert_filtered(path, [("y", ">", 1)], [3])
    assert_filtered(path, pc.field("y").is_null(), [1, 2])


def test_the_order_does_not_depend_on_the_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Lists, whose footers are looked at in more files, and which take more memory in some of them.
    lists = [pa.array([[float(one)] * (one % 3 * 40)] * 100, pa.list_(pa.float64())) for one in range(30)]
    path = append_each(
        tmp_path / "table", [{"id": np.arange(100) + 100 * n, "list": one} for n, one in enumerate(lists)]
    )
    monkeypatch.setattr("converter.arguments.default_window_rows", lambda _, num_bytes: num_bytes % 997 + 100)
    whole, part = make_delta_converter(path), make_delta_converter(path, columns=["id"])
    assert whole.fingerprint == part.fingerprint
    assert rows_of(whole, columns=["id"], shuffle=True, seed=3) == rows_of(part, shuffle=True, seed=3)


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


# Pruning --------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("case", PRUNED)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("has_large_files", [False, True])
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


# Files with and without what the log may say --------------------------------------------------------------------------


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


def test_nan_in_a_list_is_found_in_what_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "table"
    write_deltalake(path, pa.table({"id": [0, 1], "x": [5.0, math.nan]}))
    write_deltalake(path, pa.table({"id": [2, 3], "x": [1.0, 7.0]}), mode="append")
    many = [float(number) for number in range(100, 200)] + [math.nan, 1.0] + [9.0] * 100
    for listed in (many, iter(many), pa.array(many), np.array(many)):
        assert sorted(ids_of(path, filters=[("x", "in", listed)])) == [1, 2]
    assert sorted(ids_of(path, filters=[("x", "not in", iter([5.0, 7.0]))])) == [1, 2]


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


# One version, wherever it is read -------------------------------------------------------------------------------------


def test_a_copy_a_part_and_a_split_have_the_rows(tmp_path: Path) -> None:
    path = five_files(tmp_path / "table")
    with make_delta_converter(path, version=2) as converter:
        append(path, {"id": [99]})
        copy = pickle.loads(pickle.dumps(converter))
        assert rows_of(copy, shuffle=True, seed=4) == rows_of(converter, shuffle=True, seed=4)
        assert sorted(rows_of(copy)["id"]) == list(range(30))
        parts = converter.split({"train": 0.8, "val": 0.2})
        assert [len(part) for part in parts.values()] == [24, 6]
        assert sorted(row for part in parts.values() for row in rows_of(part)["id"]) == list(range(30))
        by_key = converter.split({"train": 0.5, "val": 0.5}, by="id")
        assert sorted(row for part in by_key.values() for row in rows_of(part)["id"]) == list(range(30))
        part = pickle.loads(pickle.dumps(converter.where([("id", ">", 12)])))
        assert sorted(rows_of(part)["id"]) == list(range(13, 30))
        known = converter.statistics["id"]
        assert (known.min, known.max, known.mean, known.null_count) == (0, 29, 14.5, 0)


def test_a_converter_touches_nothing(tmp_path: Path) -> None:
    path = five_files(tmp_path / "table")
    before = {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in path.rglob("*")}
    with make_delta_converter(path) as converter:
        rows_of(converter)
        converter.delete()
    assert {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in path.rglob("*")} == before


def fingerprints(path: str, version: int) -> list[str]:
    with make_delta_converter(path, version=version) as converter:
        return [converter.fingerprint, converter.where([("id", ">", 4)]).fingerprint]


def test_a_fingerprint_is_of_the_rows_of_a_version(tmp_path: Path) -> None:
    path = append_each(tmp_path / "table", [{"id": np.arange(10) + 10 * one, "x": [0.5] * 10} for one in range(3)])
    found = [fingerprints(str(path), version) for version in range(3)]
    assert run_python(fingerprints, str(path), 1) == found[1]
    assert len({one for two in found for one in two}) == 6
    assert make_delta_converter(path, version=1, columns=["id"]).fingerprint == found[1][0]
    assert make_delta_converter(path.as_uri(), version=1, float_dtype=None).fingerprint == found[1][0]
    other = append_each(tmp_path / "other", [{"id": np.arange(10) + 10 * one, "x": [0.5] * 10} for one in range(3)])
    assert fingerprints(str(other), 1) != found[1]
    moved = shutil.copytree(path, tmp_path / "moved")
    assert fingerprints(str(moved), 1) == found[1]


def test_a_state_continues_its_version_and_is_refused_by_another(tmp_path: Path) -> None:
    path = five_files(tmp_path / "table")
    options: dict[str, Any] = {
        "batch_size": 4, "shuffle": True, "seed": 3, "shuffle_window_rows": 12, "cur_shard": 0, "shard_count": 1,
    }  # fmt: skip
    with make_delta_converter(path, version=2).make_batch_reader(**options) as reader:
        whole = concatenate(list(reader))["id"].tolist()
        reader.set_epoch(0)
        first = [batch["id"].tolist() for _, batch in zip(range(3), reader, strict=False)]
        assert list(itertools.chain(*first)) == whole[:12]
        state = json.loads(json.dumps(reader.state_dict(batches=3)))
    append(path, {"id": [99]})
    with make_delta_converter(path, version=2).make_batch_reader(**options) as reader:
        reader.load_state_dict(state)
        assert concatenate(list(reader))["id"].tolist() == whole[12:]
    for other in (make_delta_converter(path, version=1), make_delta_converter(path),
                  make_delta_converter(path, version=2, filters=[("id", ">", 0)])):  # fmt: skip
        with other.make_batch_reader(**options) as reader, pytest.raises(StateMismatchError, match=r"other|another"):
            reader.load_state_dict(state)


def test_a_damaged_version_that_a_time_stands_for_is_named(tmp_path: Path) -> None:
    for number in range(3):
        write_deltalake(tmp_path, pa.table({"id": [number]}), mode="append")
    DeltaTable(tmp_path).create_checkpoint()
    commits = sorted((tmp_path / "_delta_log").glob("*.json"))
    commits[0].write_text('{"add": ')
    for number, commit in enumerate(commits):
        os.utime(commit, (1_700_000_000 + 60 * number,) * 2)
    moment = dt.datetime.fromtimestamp(1_700_000_030, dt.timezone.utc)
    with pytest.raises(
        SourceError, match=r"cannot be opened at version 0: .*Damaged: _delta_log/0+\.json.* version is 2"
    ):
        make_delta_converter(tmp_path, timestamp=moment)


def test_null_elements_and_inner_lists_of_a_table_follow_the_policy(tmp_path: Path) -> None:
    kinds = {"x": pa.list_(pa.float32()), "deep": pa.list_(pa.list_(pa.int32()))}
    parts = [
        {"x": [[1, 2], [3, 4]], "deep": [[[1]], [[2], [3]]]},
        {"x": [[5, None], None], "deep": [[[4], [5, 6]], None]},
    ]
    tables = [{"id": [number, number], **{name: pa.array(part[name], kinds[name]) for name in kinds}}
              for number, part in enumerate(parts)]  # fmt: skip
    converter = make_delta_converter(append_each(tmp_path, tables), shapes={"x": (2,)})
    with pytest.raises(NullValueError, match="Column 'x' holds 1 null"):
        rows_of(converter, columns=["x"], nulls="raise")
    for batch_size in (1, 4):
        found = rows_of(converter, ragged="pad", batch_size=batch_size, columns=["id", "x"])
        order = sorted(range(4), key=lambda row: (found["id"][row], row))
        assert [found["x"][row] for row in order] == [[1, 2], [3, 4], [5, 0], [0, 0]]
        assert [found["x__valid"][row] for row in order] == [True, True, True, False]
        assert [found["x__element_valid"][row] for row in order] == [[True] * 2, [True] * 2, [True, False], [False] * 2]
    deep = rows_of(converter, ragged="pad", batch_size=4, columns=["id", "deep"])
    order = sorted(range(4), key=lambda row: (deep["id"][row], row))
    assert [deep["deep"][row] for row in order] == [
        [[1, 0], [0, 0]], [[2, 0], [3, 0]], [[4, 0], [5, 6]], [[0, 0], [0, 0]]
    ]  # fmt: skip
    assert [deep["deep__inner_length"][row] for row in order] == [[1, 0], [1, 1], [1, 2], [0, 0]]


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


def test_head_of_a_version_leaves_out_what_was_deleted_before(tmp_path: Path) -> None:
    table = five_files(tmp_path / "t")
    DeltaTable(table).delete("id % 2 = 0")
    assert sorted(make_delta_converter(table, filters=[("id", "<", 10)]).head(3)["id"].tolist()) == [1, 3, 5]
    assert make_delta_converter(table, version=4).columns == ("id",)


def test_a_table_that_does_not_exist_is_told_from_a_folder_that_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=rf"^file://{tmp_path}/nowhere does not exist\.$"):
        make_delta_converter(tmp_path / "nowhere")
    with pytest.raises(SourceError, match=rf"file://{tmp_path} is no Delta table: it holds no folder _delta_log"):
        make_delta_converter(tmp_path)
