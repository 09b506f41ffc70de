"""One version of a table: its rows are the same wherever and however it is read."""

from __future__ import annotations

import base64
import datetime as dt
import itertools
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake

from converter import (
    NullValueError,
    SourceError,
    StateMismatchError,
    make_delta_converter,
)
from tests.processes import run_python
from tests.rows import concatenate
from tests.unit.sources.delta.known_delta import (
    append,
    append_each,
    five_files,
    ids_of,
    rows_of,
)

KEY = base64.b64encode(b"a key that nobody may see").decode()


def test_the_version_that_was_found_is_told(tmp_path: Path) -> None:
    table = five_files(tmp_path / "t")
    newest, old = make_delta_converter(table), make_delta_converter(table, version=1)
    assert (newest.version, old.version) == (4, 1)
    assert newest.where([("id", ">", 30)]).version == 4
    assert "/t, version 1)" in repr(old)
    assert pickle.loads(pickle.dumps(old)).version == 1


def test_versions_have_their_rows(tmp_path: Path) -> None:
    path = five_files(tmp_path / "table")
    for version in range(5):
        assert ids_of(path, version=version) == list(range(10 * version + 10))
    assert ids_of(path, version=np.int64(1)) == list(range(20))
    assert ids_of(path) == ids_of(Path(f"{path}/")) == list(range(50))
    with make_delta_converter(path.as_uri()) as converter:
        assert converter.url == path.as_uri()
        assert f"50 rows × 1 columns, 0.0 MB in 5 files, {path.as_uri()}" in repr(converter)


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
            "abfss://data@no-such-account.dfs.core.windows.net/table", storage_options=options, timeout_seconds=0.1
        )
    error: BaseException | None = caught.value
    while error is not None:
        assert KEY not in f"{error} {error!r} {error.args}"
        error = error.__cause__ or error.__context__


def test_a_filter_on_a_column_that_is_left_out_says_so(tmp_path: Path) -> None:
    path = append_each(tmp_path / "table", [{"id": [1], "x": [2]}])
    with pytest.raises(ValueError, match=r"no column 'x'.* The table has 'x'; add it to columns=…"):
        make_delta_converter(path, columns=["id"], filters=[("x", "=", 2)])


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


@pytest.mark.long("starts a Python")
def test_a_fingerprint_is_the_same_in_another_process(tmp_path: Path) -> None:
    path = five_files(tmp_path / "table")
    assert run_python(fingerprints, str(path), 1) == fingerprints(str(path), 1)


def test_a_fingerprint_is_of_the_rows_of_a_version(tmp_path: Path) -> None:
    path = append_each(tmp_path / "table", [{"id": np.arange(10) + 10 * one, "x": [0.5] * 10} for one in range(3)])
    found = [fingerprints(str(path), version) for version in range(3)]
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


def test_head_of_a_version_leaves_out_what_was_deleted_before(tmp_path: Path) -> None:
    table = five_files(tmp_path / "t")
    DeltaTable(table).delete("id % 2 = 0")
    assert sorted(make_delta_converter(table, filters=[("id", "<", 10)]).head(3)["id"].tolist()) == [1, 3, 5]
    assert make_delta_converter(table, version=4).columns == ("id",)
