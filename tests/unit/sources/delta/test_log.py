"""The log: which version is meant, what a damaged log is, and what is said of it."""

from __future__ import annotations

import datetime as dt
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from converter import (
    SourceError,
    make_delta_converter,
)
from tests.unit.sources.delta.known_delta import (
    FAR,
    actions_of,
    append,
    append_each,
    change_commit,
    commit,
    file_of,
    five_files,
    ids_of,
)


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


def test_a_time_before_the_first_commit_is_refused(tmp_path: Path) -> None:
    path = five_files(tmp_path / "table")
    for moment in ("2000-01-01", "0001-01-01", dt.datetime(2000, 1, 1, tzinfo=dt.timezone.utc)):
        with pytest.raises(SourceError, match=r"has no version of .*: its log begins with version 0 at 20"):
            make_delta_converter(path, timestamp=moment)
    for moment in ("2999-01-01T00:00:00+05:00", FAR):
        assert ids_of(path, timestamp=moment) == list(range(50))


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
        SourceError, match=r"table cannot be opened: .*[Jj]son.* Damaged: _delta_log/0{19}1\.json\. Spark may be able"
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


@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_checkpoint_in_parts_counts_once_all_of_them_are_there(tmp_path: Path, num_parts: int) -> None:
    path = five_files(tmp_path / "table")
    DeltaTable(str(path)).create_checkpoint()
    (path / "_delta_log" / "_last_checkpoint").unlink()
    (checkpoint,) = (path / "_delta_log").glob("*.checkpoint.parquet")
    actions = pq.read_table(checkpoint)
    checkpoint.unlink()
    parts = (actions.slice(0, 3), actions.slice(3))
    for number, part in enumerate(parts[:num_parts], 1):
        pq.write_table(part, checkpoint.with_name(f"{4:020}.checkpoint.{number:010}.{2:010}.parquet"))
    assert ids_of(path) == list(range(50))
    commit(path, 1).write_bytes(b"")
    if num_parts == 2:
        assert ids_of(path) == list(range(50))
    else:
        with pytest.raises(SourceError, match=r"00001\.json holds no action: the commit of a version was cut"):
            make_delta_converter(path)


def test_a_path_that_deltalake_reads_otherwise_is_refused(tmp_path: Path) -> None:
    """It would list the log of one folder, and read that of the other."""
    five_files(tmp_path / "a b")
    append_each(tmp_path / "x", [{"id": [7]}])
    for name in ("a%20b", "50%", "%zz", "a#b?c"):
        shutil.copytree(tmp_path / "x", tmp_path / name)
        if name == "a%20b":
            with pytest.raises(SourceError, match=r"takes for an encoded sign: it would open \S+/a b\. Rename"):
                make_delta_converter(tmp_path / name)
        else:
            assert ids_of(tmp_path / name) == [7]


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


def test_a_damaged_version_that_a_time_stands_for_is_named(tmp_path: Path) -> None:
    for number in range(3):
        write_deltalake(tmp_path, pa.table({"id": [number]}), mode="append")
    DeltaTable(tmp_path).create_checkpoint()
    commits = sorted((tmp_path / "_delta_log").glob("*.json"))
    commits[0].write_text('{"add": ')
    for number, file in enumerate(commits):
        os.utime(file, (1_700_000_000 + 60 * number,) * 2)
    moment = dt.datetime.fromtimestamp(1_700_000_030, dt.timezone.utc)
    with pytest.raises(
        SourceError, match=r"cannot be opened at version 0: .*Damaged: _delta_log/0+\.json.* version is 2"
    ):
        make_delta_converter(tmp_path, timestamp=moment)


def test_a_table_that_does_not_exist_is_told_from_a_folder_that_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=rf"^file://{tmp_path}/nowhere does not exist\. Check the path"):
        make_delta_converter(tmp_path / "nowhere")
    with pytest.raises(SourceError, match=rf"file://{tmp_path} is no Delta table: it holds no folder _delta_log"):
        make_delta_converter(tmp_path)
