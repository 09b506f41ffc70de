"""What the driver reads of files that Spark wrote, and what it does if they are not those of the tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter.cache.removal import is_ours
from converter.errors import CacheError
from converter.portable.categories import encode_categories, new_vocabulary, report_of, settle
from converter.sources.spark import written_files
from converter.sources.spark.reports import in_order
from converter.sources.spark.schema import SparkColumn
from converter.storage.opening import open_storage
from tests.encrypted import write_encrypted


@pytest.mark.parametrize("plaintext_footer", [True, False])
def test_columns_that_spark_encrypted_are_refused_by_name(tmp_path: Path, plaintext_footer: bool) -> None:
    file = tmp_path / "part-00000-2f1c-c000.zstd.parquet"
    write_encrypted(file, {"c0": [1, 2], "c1": [3, 4]}, plaintext_footer=plaintext_footer)
    with pytest.raises(CacheError, match=rf"Spark .*{file.name}.* encrypt") as caught:
        written_files.reports_of_files(open_storage(str(tmp_path)), {})
    assert caught.value.path == f"file://{file}"


def test_the_thousandth_file_of_a_task_comes_after_the_ones_before_it(tmp_path: Path) -> None:
    names = [f"part-{task:05d}-2f1c-c{number}.zstd.parquet" for task in (7, 10) for number in (998, 999, 1000, 1001)]
    for name in names:
        pq.write_table(pa.table({"c0": [1]}), tmp_path / name)
    reports = written_files.reports_of_files(open_storage(str(tmp_path)), {})
    assert [(task, report["name"]) for task, report in reports] == [(int(name[5:10]), name) for name in names]


UUID = "0b54f2a6-7f43-4c0e-8d49-0d3d0c0f6f11"


@pytest.mark.parametrize("codec", ["", ".zstd"])
@pytest.mark.parametrize(
    "name",
    [
        f"{UUID}-c000",
        # S3A's staging committers add the id of the job.
        f"{UUID}-c000-job_202611300930471919207_0000",
        f"{UUID}-c000-7a4b36d1-2f0e-4d8f-9c0d-5b1c2f3a4e5d",
        # Databricks.
        f"tid-4320459746949313749-{UUID}-6688-1-c000",
        f"tid-2056548461317784044-{UUID}-16-1.c000",
    ],
)
def test_files_are_known_by_the_names_that_spark_and_committers_give(tmp_path: Path, name: str, codec: str) -> None:
    file = f"part-00003-{name}{codec}.parquet"
    pq.write_table(pa.table({"c0": [1]}), tmp_path / file)
    directory = open_storage(str(tmp_path))
    assert [(task, report["name"]) for task, report in written_files.reports_of_files(directory, {})] == [(3, file)]
    (info,) = directory.list()
    assert is_ours(info)
    assert is_ours(replace(info, name=f".{file}.crc"))
    assert not is_ours(replace(info, name=f"{file}.bak"))
    for mark in ("_started_4320459746949313749", "_committed_4320459746949313749", "_committed_vacuum123"):
        assert is_ours(replace(info, name=mark))


def test_reports_of_executors_are_in_the_order_of_tasks_and_files() -> None:
    # The last one has no file: it holds the moments of all tasks.
    files = [(7, f"part-00007-0000001f-{number}.parquet") for number in (9998, 9999, 10000)]
    expected = [(-1, {"moments": {}}), *((task, {"name": name}) for task, name in files), (10, {"name": "part-00010"})]
    assert in_order(sorted(expected, key=repr, reverse=True)) == expected


CODED = SparkColumn(
    name="x", path=("x",), kind="scalar", dtype="str", ndim=0, shape=None, narrowed_from=None,
    categories={"kind": "str", "values": None, "unseen": "raise", "most": 10},
)  # fmt: skip


def pack(partition: int, *texts: str | None) -> dict[str, Any]:
    """What a task reports that packed a column of these texts."""
    vocabulary = new_vocabulary(CODED.spec())
    encode_categories(pa.array(texts, pa.string()), vocabulary)
    settle(vocabulary)
    nulls = texts.count(None)
    return {
        "partition": partition, "rows": len(texts), "nulls": [nulls], "digest": str(partition),
        "categories": {"x": report_of(vocabulary)},
    }  # fmt: skip


def file(partition: int, rows: list[int], least: int, most: int) -> tuple[int, dict[str, Any]]:
    """What the footer of a file says; `least` and `most` are those of its codes."""
    spans = {"x": [0.0, float(least), float(most)]} if least <= most else {}
    return partition, {"rows": rows, "nulls": {}, "digests": [], "spans": spans}


def joined(tmp_path: Path, files: list[tuple[int, dict[str, Any]]], *packs: Any) -> list[tuple[int, dict[str, Any]]]:
    return written_files.with_packs(files, packs, [CODED], open_storage(str(tmp_path)))


def test_files_get_the_reports_of_their_tasks(tmp_path: Path) -> None:
    # The second partition has two files, the fourth has nulls alone.
    files = [file(0, [2], 0, 1), file(2, [1, 1], 0, 0), file(2, [1], 1, 1), file(3, [2], 0, -1)]
    packs = [pack(0, "b", "a"), pack(2, "z", "z", "zz"), pack(3, None, None)]
    reports = joined(tmp_path, files, *packs)
    assert reports[0][1]["nulls"] == {"x": 2}
    assert reports[0][1]["digests"] == ["0", "2", "3"]
    assert reports[4:] == [(task["partition"], {"categories": task["categories"]}) for task in packs]


@pytest.mark.parametrize(
    "files",
    [
        [file(0, [3], 0, 1), file(1, [2], 0, 1)],
        [file(0, [2], 0, 1)],
        [file(0, [4], 0, 2)],
        [file(0, [2], 0, 1), file(3, [2], 0, 2)],
        [file(0, [2], 0, 2), file(1, [2], 0, 1)],
    ],
    ids=["other rows", "one is missing", "in one file", "under other numbers", "other codes"],
)
def test_files_that_hold_the_rows_of_several_tasks_are_refused(tmp_path: Path, files: Any) -> None:
    with pytest.raises(
        CacheError, match=r"not each task's rows into files of its own.*Turn the extension off, or pass "
    ):
        joined(tmp_path, files, pack(0, "a", "b"), pack(1, "c", "d"))


def test_rows_may_be_exchanged_where_codes_mean_the_same(tmp_path: Path) -> None:
    files = [file(7, [5], 0, 2)]
    # A task that meets only the first values has the codes of the others.
    reports = joined(tmp_path, files, pack(0, "a", "b", "c"), pack(1, "a", "b"))
    assert [partition for partition, _ in reports] == [7, 0, 1]
    with pytest.raises(CacheError, match="the codes of categories= are lost"):
        joined(tmp_path, files, pack(0, "a", "b", "c"), pack(1, "b", "c"))
