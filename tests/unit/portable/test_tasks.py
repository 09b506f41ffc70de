"""What a task of Spark writes and reports: row groups of the asked size, or one finding and no file."""

from __future__ import annotations

import base64
import json
import traceback
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import TaskContext

from converter.portable import filesystems, tasks
from converter.portable.categories import values_in
from converter.portable.moments import from_json, mean_of
from converter.portable.records import CategoriesSpec
from tests.columns import ALL, ID, RAGGED, TENSORS, Column, record_batch
from tests.entries import make_spec, write
from tests.unit.portable.one_column import (
    INF,
    NAN,
    PAIR,
    ROW_BYTES,
    TRIPLE,
    WIDE,
    batches_of,
    files,
    finding_of,
    plan,
    read,
    read_all,
    wide_batch,
    write_one,
)


@pytest.mark.parametrize("nullable", [False, True])
def test_every_row_of_every_column_is_written_once(tmp_path: Path, nullable: bool) -> None:
    columns = [ID, *(Column(name=c.name, dtype=c.dtype, shape=c.shape, nullable=nullable) for c in ALL[1:])]
    plans = [column.plan() for column in columns]
    batches = [record_batch(columns, ids) for ids in (range(300), range(300, 301), range(301, 1000))]
    (report,) = write(batches, tmp_path, plans)
    assert files(tmp_path) == [report["name"]]
    assert sum(report["rows"]) == 1000
    assert report["bytes"] == (tmp_path / report["name"]).stat().st_size
    table = pq.read_table(tmp_path / report["name"])
    assert table.column_names == [column.name for column in columns]
    for column in columns:
        valid = column.valid(range(1000))
        assert report["nulls"][column.name] == 1000 - valid.sum()
        expected = column.values(list(range(1000)))
        if column.ndim:
            expected = [row.ravel().tolist() if ok else None for row, ok in zip(expected, valid, strict=True)]
            assert read(tmp_path, report, column) == expected
            assert report["shapes"][column.name] == (None if column.shape is None else list(column.shape))
            continue
        stored = table[column.name]
        if column.dtype.startswith("datetime64"):
            stored = stored.cast(pa.int32() if column.dtype == "datetime64[D]" else pa.int64())
            expected = expected.astype("int64")
        listed = expected if isinstance(expected, list) else expected.tolist()
        assert stored.to_pylist() == [value if ok else None for value, ok in zip(listed, valid, strict=True)]


NUMBERS = pa.list_(pa.float32())


def assert_row_groups(directory: Path, reports: list[dict[str, Any]], num_rows: int, row_group_bytes: int) -> None:
    counts = [count for report in reports for count in report["rows"]]
    sizes = [size for report in reports for size in report["row_group_bytes"]]
    assert sum(counts) == num_rows
    assert sizes == [count * ROW_BYTES for count in counts]
    assert all(0.5 * row_group_bytes <= size <= 1.5 * row_group_bytes for size in sizes), sizes
    for report in reports:
        footer = pq.read_metadata(directory / report["name"])
        assert [footer.row_group(index).num_rows for index in range(footer.num_row_groups)] == report["rows"]
    found = np.array(read_all(directory, reports, WIDE)).ravel()
    np.testing.assert_array_equal(found, np.arange(num_rows * 16))


@pytest.mark.one_in(7)
@pytest.mark.parametrize("num_rows", [10_000, 10_240, 12_799, 12_801, 15_000])
@pytest.mark.parametrize("batch_rows", [20_000, 4096, 700, 33])
def test_row_groups_have_about_the_asked_size(tmp_path: Path, num_rows: int, batch_rows: int) -> None:
    row_group_bytes = 2560 * ROW_BYTES
    cuts = [range(start, min(start + batch_rows, num_rows)) for start in range(0, num_rows, batch_rows)]
    reports = write_one(tmp_path, WIDE, *map(wide_batch, cuts), row_group_bytes=row_group_bytes)
    assert len(reports) == 1
    assert_row_groups(tmp_path, reports, num_rows, row_group_bytes)


def test_a_row_larger_than_a_row_group_is_one_of_its_own(tmp_path: Path) -> None:
    (report,) = write_one(tmp_path, WIDE, wide_batch(range(5)), row_group_bytes=16)
    assert report["rows"] == [1] * 5
    assert np.array(read(tmp_path, report, WIDE)).ravel().tolist() == list(range(80))


@pytest.mark.parametrize("batch_rows", [20_000, 512])
def test_a_partition_beyond_the_size_of_a_file_is_cut_into_several(tmp_path: Path, batch_rows: int) -> None:
    row_group_bytes, file_bytes, num_rows = 512 * ROW_BYTES, 2048 * ROW_BYTES, 10_000
    cuts = [range(start, min(start + batch_rows, num_rows)) for start in range(0, num_rows, batch_rows)]
    reports = write_one(
        tmp_path, WIDE, *map(wide_batch, cuts), row_group_bytes=row_group_bytes, file_bytes=file_bytes, partition=7
    )
    assert len(reports) == 5
    assert [report["name"] for report in reports] == [f"part-00007-00000001-{index:04d}.parquet" for index in range(5)]
    assert files(tmp_path) == [report["name"] for report in reports]
    assert all(report["bytes"] < file_bytes + 1.6 * row_group_bytes for report in reports)
    assert_row_groups(tmp_path, reports, num_rows, row_group_bytes)


def test_no_rows_make_no_file_and_no_folder(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    assert write([], directory, [WIDE]) == []
    assert write_one(directory, WIDE, wide_batch(range(0))) == []
    assert not directory.exists()


def test_empty_batches_between_others_change_nothing(tmp_path: Path) -> None:
    with_empty = write_one(
        tmp_path / "a", WIDE, *(wide_batch(range(a, b)) for a, b in [(0, 0), (0, 9), (9, 9), (9, 20)])
    )
    without = write_one(tmp_path / "b", WIDE, wide_batch(range(20)))
    assert with_empty == without


def test_a_finding_after_files_were_closed_leaves_none_of_them(tmp_path: Path) -> None:
    good = [wide_batch(range(start, start + 5000)) for start in (0, 5000, 10_000)]
    bad = pa.array([[1.0, None]], pa.list_(pa.float64()))
    seen: list[list[str]] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in batches_of(*good, bad):
            seen.append(files(tmp_path))
            yield batch

    reports = write(batches(), tmp_path, [WIDE], row_group_bytes=64 << 10, file_bytes=256 << 10)
    assert finding_of(reports)["kind"] == "null_element"
    assert len(seen[-1]) > 2
    assert files(tmp_path) == []


class TaskKilled(BaseException):
    """What ends a task from outside is no Exception."""


@pytest.mark.parametrize("kind", [ValueError, TaskKilled, KeyboardInterrupt])
@pytest.mark.parametrize("num_batches", [0, 1, 3])
def test_an_error_in_the_middle_passes_and_leaves_no_file(
    tmp_path: Path, kind: type[BaseException], num_batches: int
) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield from batches_of(*(wide_batch(range(start * 5000, start * 5000 + 5000)) for start in range(num_batches)))
        assert bool(files(tmp_path)) == bool(num_batches)
        raise kind("the rows before failed")

    with pytest.raises(kind, match="the rows before failed"):
        write(batches(), tmp_path, [WIDE], row_group_bytes=64 << 10, file_bytes=256 << 10)
    assert files(tmp_path) == []


@pytest.mark.parametrize("num_batches", [1, 3])
@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_task_whose_driver_gave_up_leaves_no_file(tmp_path: Path, num_batches: int, *, is_given_up: bool) -> None:
    intent = tmp_path / "data-1.intent"
    intent.touch()

    def batches() -> Iterator[pa.RecordBatch]:
        yield from batches_of(*(wide_batch(range(start * 5000, start * 5000 + 5000)) for start in range(num_batches)))
        # Spark breaks off the rows of a task that it kills, which looks like their end.
        if is_given_up:
            intent.unlink()

    sizes = {"row_group_bytes": 64 << 10, "file_bytes": 256 << 10}
    spec = make_spec(tmp_path / "data-1", [WIDE], **sizes) | {"intent": str(intent)}
    reports = tasks._write(batches(), spec, partition=0, attempt=1)
    assert len(reports) >= num_batches
    assert files(tmp_path / "data-1") == ([] if is_given_up else [report["name"] for report in reports])


def test_a_store_that_does_not_say_whether_the_driver_gave_up_keeps_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    with monkeypatch.context() as patched:
        patched.setattr(filesystems.os, "stat", refuse)
        is_gone = filesystems.is_gone(None, str(tmp_path / "intent"))
    assert not is_gone
    assert filesystems.is_gone(None, str(tmp_path / "intent"))


def test_what_a_client_says_leaves_a_task_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark writes a task's error into its logs, with the errors behind it."""
    key = "a-key-that-nobody-may-see"

    def say(text: str, cause: str) -> None:
        def fail(*_: Any, **__: Any) -> None:
            try:
                raise ValueError(cause)
            except ValueError as error:
                raise RuntimeError(text) from error

        monkeypatch.setattr(tasks, "_write", fail)

    context = SimpleNamespace(partitionId=lambda: 0, taskAttemptId=lambda: 0)
    monkeypatch.setattr(TaskContext, "get", staticmethod(lambda: context))
    spec = {"store": {"protocol": "abfs", "options": {"account_key": key}, "timeout_seconds": 1}}
    write_partition = tasks.make_write_partition(spec)
    for text, cause in (
        (f"refused: {key}", "x"),
        ("refused", f"{key} is wrong"),
        ("refused: PUT https://host/c/b?comp=block&sig=abcd", "x"),
        ("refused", "Connection timeout to host https://host/c/b?sig=abcd"),
    ):
        say(text, cause)
        with pytest.raises(OSError, match=r"^RuntimeError: refused") as raised:
            next(write_partition(iter(())))
        shown = "".join(traceback.format_exception(raised.value))
        assert key not in shown
        assert "abcd" not in shown
    say("refused", "x")
    with pytest.raises(RuntimeError, match=r"^refused$"):
        next(write_partition(iter(())))


@pytest.mark.parametrize(("partition", "is_told"), [(0, True), (1, True), (2, False), (10**6, False)])
def test_the_end_of_a_file_is_told_while_those_of_as_many_files_are_kept(
    tmp_path: Path, partition: int, is_told: bool
) -> None:
    def report(end_bytes: int, attempt: int = 1) -> dict[str, Any]:
        spec = make_spec(tmp_path, [ID.plan()], end_bytes=end_bytes)
        (found,) = tasks._write(iter([record_batch([ID], [1])]), spec, partition=partition, attempt=attempt)
        return found

    before = report(0)
    assert "end" not in before
    data = (tmp_path / before["name"]).read_bytes()
    end = data[-8 - int.from_bytes(data[-8:-4], "little") :]
    # One column, one row group: one head of four bytes.
    found = report(2 * (len(end) + 4), attempt=2)
    assert zlib.crc32(end) == found["footer_crc32"]
    assert ("end" in found) == is_told
    if is_told:
        footer, heads = (zlib.decompress(base64.b64decode(part)) for part in found["end"])
        assert footer == end
        assert heads == zlib.crc32(data[4:24]).to_bytes(4, "little")


def test_no_row_group_has_more_rows_than_pyarrow_writes_into_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "_MAX_ROW_GROUP_ROWS", 100)
    (report,) = write([record_batch([ID], range(start, start + 70)) for start in (0, 70, 140)], tmp_path, [ID.plan()])
    assert report["rows"] == [100, 100, 10]
    assert pq.read_table(tmp_path / report["name"])["id"].to_pylist() == list(range(210))


@pytest.mark.usefixtures("every_batch_counts")
def test_the_reports_hold_each_columns_moments_once(tmp_path: Path) -> None:
    columns = [ID, *TENSORS, RAGGED]
    batches = [record_batch(columns, range(start, start + 100)) for start in range(0, 1000, 100)]
    plans = [column.plan() for column in columns]
    reports = write(batches, tmp_path, plans, row_group_bytes=4096, file_bytes=16 << 10)
    assert len(reports) > 1
    assert [index for index, report in enumerate(reports) if "moments" in report] == [len(reports) - 1]
    for column in columns:
        closed = from_json(reports[-1]["moments"][column.name])
        values = column.values(list(range(1000)))
        numbers = np.concatenate(values) if column.shape is None else np.asarray(values).reshape(1000, -1)
        numbers = numbers.reshape(-1, 1 if column.shape is None else numbers.shape[1]).astype(float)
        assert closed["count"].tolist() == [len(numbers)] * numbers.shape[1]
        np.testing.assert_allclose(mean_of(closed), numbers.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(np.sqrt(closed["m2"] / len(numbers)), numbers.std(axis=0), rtol=1e-9)
        assert (closed["min"], closed["max"]) == (numbers.min(), numbers.max())


@pytest.mark.usefixtures("every_batch_counts")
def test_moments_of_a_column_that_becomes_ragged_are_of_all_its_numbers(tmp_path: Path) -> None:
    rows = [[PAIR, PAIR], [PAIR, TRIPLE], [[7.0]]]
    reports = write_one(tmp_path, plan(), *(pa.array(batch, pa.list_(pa.float32())) for batch in rows))
    numbers = np.array([1, 2, 1, 2, 1, 2, 3, 4, 5, 7.0])
    closed = from_json(reports[-1]["moments"]["x"])
    assert closed["count"].tolist() == [10]
    np.testing.assert_allclose(mean_of(closed), [numbers.mean()], rtol=1e-12)
    np.testing.assert_allclose(closed["m2"], [numbers.var() * 10], rtol=1e-12)
    assert reports[-1]["lengths"] == {"x": [1, 3]}


@pytest.mark.usefixtures("every_batch_counts")
def test_a_batch_that_makes_a_column_ragged_keeps_its_categories(tmp_path: Path) -> None:
    # In each batch the values come in another order than the one that codes get.
    kind = replace(
        plan("scalar", "str", 0, name="kind"),
        categories=CategoriesSpec(kind="str", values=None, unseen="raise", most=1000),
    )
    kinds, lists = ["d", "c"] * 3 + ["b", "a", "d", "c"], [PAIR] * 6 + [TRIPLE] * 4
    batches = [
        pa.RecordBatch.from_arrays([pa.array(kinds[start:stop]), pa.array(lists[start:stop], NUMBERS)], ["c0", "c1"])
        for start, stop in ((0, 3), (3, 6), (6, 8), (8, 10))
    ]
    reports = write(batches, tmp_path, [kind, plan()])
    assert len(reports) == 2
    values = values_in(reports[-1]["categories"]["kind"], "str").to_pylist()
    assert [values[code] for code in read_all(tmp_path, reports, plan("scalar", "int32", 0, name="kind"))] == kinds
    assert read_all(tmp_path, reports, plan()) == lists


@pytest.mark.usefixtures("every_batch_counts")
@pytest.mark.parametrize("num_nulls", range(1000, 4500, 500))
def test_a_column_may_be_null_until_a_file_is_full(tmp_path: Path, num_nulls: int) -> None:
    ids = np.arange(num_nulls + 1000)
    lists = [None] * num_nulls + [PAIR] * 1000
    batches = [
        pa.RecordBatch.from_arrays(
            [pa.array(ids[at : at + 500]), pa.array(lists[at : at + 500], NUMBERS)], ["c0", "c1"]
        )
        for at in range(0, len(ids), 500)
    ]
    id_column = plan("scalar", "int64", 0, name="id")
    reports = write(batches, tmp_path, [id_column, plan()], row_group_bytes=5000, file_bytes=9000)
    assert len(reports) > 1
    assert read_all(tmp_path, reports, id_column) == ids.tolist()
    assert read_all(tmp_path, reports, plan()) == lists


def test_nulls_are_in_no_moment(tmp_path: Path) -> None:
    column = plan("scalar", "int64", 0)
    (report,) = write_one(tmp_path, column, pa.array([None, 5, None, 7]))
    closed = from_json(report["moments"]["x"])
    assert (closed["count"].tolist(), mean_of(closed).tolist(), closed["min"], closed["max"]) == ([2], [6.0], 5, 7)
    (report,) = write_one(tmp_path / "b", plan(), pa.array([None, PAIR, None], pa.list_(pa.float32())))
    closed = from_json(report["moments"]["x"])
    assert (closed["count"].tolist(), mean_of(closed).tolist()) == ([1, 1], PAIR)
    assert report["lengths"] == {"x": [2, 2]}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("values", [[INF, 1.0], [-INF, NAN], [NAN], [INF, -INF]], ids=str)
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_moments_are_json_that_every_parser_reads(tmp_path: Path, dtype: str, values: list[float]) -> None:
    scalar, tensor = plan("scalar", dtype, 0), plan("tensor", dtype, 1, name="y")
    kind = pa.float32() if dtype == "float32" else pa.float64()
    batch = pa.RecordBatch.from_arrays(
        [pa.array(values, kind), pa.array([[value] for value in values], pa.list_(kind))], names=["c0", "c1"]
    )
    (report,) = write([batch], tmp_path, [scalar, tensor])
    assert report["rows"] == [len(values)]
    # What the manifest keeps of them has to be JSON as the standard has it, without NaN and Infinity.
    assert json.loads(json.dumps(report["moments"], allow_nan=False)) == report["moments"]


def folded(reports: Sequence[dict[str, Any]], cuts: Sequence[int]) -> list[dict[str, Any]]:
    texts = [json.dumps(report) for report in reports]
    parts = [texts[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(texts)], strict=True)]
    batches = [tasks._report_batch([0] * len(part), part) for part in parts]
    out = list(tasks.fold_reports(iter(batches)))
    return [json.loads(text) for batch in out for text in batch.column("report").to_pylist()]


@pytest.mark.parametrize("cuts", [[], [1], [1, 2], [0, 3]], ids=str)
def test_folding_merges_moments_and_passes_everything_else(tmp_path: Path, cuts: list[int]) -> None:
    column = TENSORS[0]
    parts = [range(100), range(100, 250), range(250, 1000)]
    reports = [
        report
        for index, ids in enumerate(parts)
        for report in write([record_batch([column], ids)], tmp_path, [column.plan()], partition=index)
    ]
    found = folded(reports, cuts)
    assert found[:-1] == [{name: report[name] for name in report if name != "moments"} for report in reports]
    closed = from_json(found[-1]["moments"]["vector"])
    values = column.values(list(range(1000))).astype(float)
    assert closed["count"].tolist() == [1000] * 3
    np.testing.assert_allclose(mean_of(closed), values.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(np.sqrt(closed["m2"] / 1000), values.std(axis=0), rtol=1e-9)


def test_folding_reports_of_different_shapes_takes_all_numbers_alike(tmp_path: Path) -> None:
    rows = [PAIR, TRIPLE]
    reports = [
        report
        for index, row in enumerate(rows)
        for report in write_one(tmp_path, plan(), pa.array([row], pa.list_(pa.float32())), partition=index)
    ]
    closed = from_json(folded(reports, [1])[-1]["moments"]["x"])
    assert closed["count"].tolist() == [5]
    assert mean_of(closed).tolist() == [3.0]


def test_folding_passes_a_finding() -> None:
    finding = {"finding": {"kind": "null_element", "column": "x"}}
    assert folded([finding], []) == [finding, {"moments": {}}]


def test_a_probe_writes_its_file_and_says_which_pyarrow(tmp_path: Path) -> None:
    (answer,) = tasks.make_probe(str(tmp_path / "deep" / "down"), None)(iter(batches_of(pa.array([1]))))
    assert json.loads(answer.column("report")[0].as_py()) == {"pyarrow": pa.__version__}
    assert (tmp_path / "deep" / "down" / tasks.PROBE_NAME).read_bytes() == b"reached"


def test_an_executor_says_which_pyarrow_it_has() -> None:
    (answer,) = tasks.ask_python(iter(batches_of(pa.array([1]))))
    assert json.loads(answer.column("report")[0].as_py()) == {"pyarrow": pa.__version__}


def test_a_probe_that_cannot_write_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (answer,) = tasks.make_probe(str(tmp_path / "file" / "below"), None)(iter([]))
    assert "NotADirectoryError" in json.loads(answer.column("report")[0].as_py())["error"]


def test_empty_lists_in_lists_get_the_offset_that_old_sparks_leave_out() -> None:
    inner = pa.Array.from_buffers(
        pa.list_(pa.int64()), 0, [None, pa.py_buffer(b"")], children=[pa.array([], pa.int64())]
    )
    offsets = pa.py_buffer(np.zeros(3, np.int32))
    outer = pa.Array.from_buffers(pa.list_(inner.type), 2, [None, offsets], children=[inner])
    texts = pa.array(["a", "b"])
    structs = pa.StructArray.from_arrays([outer, texts], ["lists", "texts"])
    batch = pa.RecordBatch.from_arrays([outer, structs, texts], ["c0", "c1", "c2"])

    (found,) = tasks.coalesce(iter([batch]))

    for lists in (found["c0"], found["c1"].field("lists")):
        assert lists.values.buffers()[1].size == 4
        assert lists.to_pylist() == [[], []]
    assert found["c1"].field("texts").equals(texts)
    assert found["c2"].equals(texts)
    found.validate(full=True)
