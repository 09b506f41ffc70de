"""URLs, patterns, folders and links: which files they name, and which partition values."""

from __future__ import annotations

import decimal
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import (
    CacheError,
    SourceError,
    make_parquet_converter,
)
from converter.holding import Holding
from converter.storage.directory import FileInfo, Storage
from tests.unit.sources.parquet.known_files import (
    put,
    read,
    write,
)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_files_are_read_in_the_order_of_their_names_and_never_touched(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        write(tmp_path / ("deep" if number == 1 else ""), f"part-{number}.parquet", {"id": np.arange(10) + 10 * number})
    write(tmp_path, "_ignored.parquet", {"id": [99]})
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".hidden").mkdir()
    write(tmp_path / ".hidden", "part-0.parquet", {"id": [98]})
    before = content(tmp_path)
    with make_parquet_converter(tmp_path) as converter:
        assert len(converter) == 30
        assert converter.url == f"file://{tmp_path}"
        assert read(converter)["id"].tolist() == [*range(10, 20), *range(10), *range(20, 30)]
        assert sorted(read(converter, shuffle=True, seed=3)["id"].tolist()) == list(range(30))
        assert converter.statistics["id"].max == 29
        converter.delete()
        with pytest.raises(CacheError, match="was closed, so it has no rows any more"):
            converter.make_batch_reader()
    assert content(tmp_path) == before


def test_several_paths_are_read_in_their_order(tmp_path: Path) -> None:
    one = write(tmp_path / "a", "x.parquet", {"id": [1, 2]})
    two = write(tmp_path / "b" / "c", "y.parquet", {"id": [3]})
    assert read(make_parquet_converter([str(two), one]))["id"].tolist() == [3, 1, 2]
    assert read(make_parquet_converter([tmp_path / "b", one, one]))["id"].tolist() == [3, 1, 2]
    assert read(make_parquet_converter(one))["id"].tolist() == [1, 2]
    assert read(make_parquet_converter(f"file://{one}"))["id"].tolist() == [1, 2]


@pytest.mark.parametrize("inside", ["", "part=1", "deep/er"])
def test_a_delta_table_is_refused_by_name(tmp_path: Path, inside: str) -> None:
    (tmp_path / "_delta_log").mkdir()
    write(tmp_path / inside, "x.parquet", {"id": [1]})
    for path in (tmp_path, tmp_path / inside, tmp_path / inside / "x.parquet"):
        with pytest.raises(SourceError, match=f"file://{tmp_path} is a Delta table: its files also hold rows"):
            make_parquet_converter(path)


def test_what_is_not_there_or_no_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=rf"^file://{tmp_path}/nowhere does not exist\. Check the path"):
        make_parquet_converter(tmp_path / "nowhere")
    with pytest.raises(SourceError, match=r"nowhere/x\.parquet does not exist\. Check the path"):
        make_parquet_converter([tmp_path / "nowhere" / "x.parquet"])
    with pytest.raises(SourceError, match=r"memory://.*/nowhere does not exist"):
        make_parquet_converter("memory://kept/nowhere")
    with pytest.raises(SourceError, match=r"nowhere/\*\.parquet matches no Parquet files"):
        make_parquet_converter(tmp_path / "nowhere" / "*.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"empty holds no Parquet files \(names that end with \.parquet\)"):
        make_parquet_converter(tmp_path / "empty")
    write(tmp_path / "part", "k=1.parquet", {"id": [1]})
    (tmp_path / "part" / "day=1").mkdir()
    write(tmp_path / "part" / "day=1", "x.parquet", {"id": [1]})
    with pytest.raises(SourceError, match=r"k=1\.parquet is partitioned by nothing, and .*x\.parquet by day"):
        make_parquet_converter(tmp_path / "part")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 no, not really PAR1")
    with pytest.raises(SourceError, match=r"x\.parquet is no Parquet file that can be read"):
        make_parquet_converter(tmp_path / "x.parquet")
    write(tmp_path / "none", "x.parquet", {"id": pa.array([], pa.int64())})
    with pytest.raises(SourceError, match=r"/none/x\.parquet has no rows"):
        make_parquet_converter(tmp_path / "none" / "x.parquet")
    write(tmp_path / "none", "y.parquet", {"id": pa.array([], pa.int64())})
    with pytest.raises(SourceError, match="/none has no rows"):
        make_parquet_converter(tmp_path / "none")


def test_no_path_is_refused() -> None:
    for value in ([], None, 5, {}, [5], [b"x"], b"x"):
        with pytest.raises(TypeError, match="make_parquet_converter needs a path"):
            make_parquet_converter(value)  # type: ignore[arg-type]


def test_folders_above_many_files_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write(tmp_path / "a" / "b", f"f{number:02d}.parquet", {"id": [number]}) for number in range(50)]
    listed: list[str] = []
    list_folder = Storage.list

    def list_and_count(storage: Storage) -> Any:
        listed.append(storage.path())
        return list_folder(storage)

    monkeypatch.setattr(Storage, "list", list_and_count)
    with make_parquet_converter([str(file) for file in files]) as converter:
        assert len(converter) == 50
    assert len(listed) == len(set(listed))


def test_files_of_two_stores_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "a.parquet", {"id": [1, 2]})
    put(f"memory:/{tmp_path}/a.parquet", [3, 4])
    for urls in ([str(tmp_path), f"memory:/{tmp_path}"], [f"memory:/{tmp_path}", str(tmp_path)]):
        with pytest.raises(SourceError, match=r"are on two stores\. Make a converter of each"):
            make_parquet_converter(urls)


def test_patterns_name_folders_at_any_depth_and_of_a_choice_and_a_name_is_itself(tmp_path: Path) -> None:
    for number, name in enumerate(("run[1]/a", "run1/a", "g/0", "g/x/1", "g/x/y/2", "g/.hidden/3", "{a,b}/c", "{a}/c")):
        write((tmp_path / name).parent, f"{Path(name).name}.parquet", {"id": [number]})
    for pattern, rows in (
        ("run[1]", [0]), ("run[12]", [1]), ("run[1]/*.parquet", [1]), ("g/**/*.parquet", [2, 3, 4]),
        ("g/**", [2, 3, 4]),
        ("g/**/y", [4]), ("g/**/x/**/2.parquet", [4]), ("{run1,no,g/x/y}", [1, 4]), ("g/{0,x/1}.parquet", [2, 3]),
        ("{a,b}", [6]), ("{g}/?.parquet", [2]), ("{a,b}*", [6]),
    ):  # fmt: skip
        if pattern == "{a,b}*":
            with pytest.raises(SourceError, match="matches no Parquet files"):
                make_parquet_converter(tmp_path / pattern)
            continue
        assert sorted(read(make_parquet_converter(tmp_path / pattern))["id"].tolist()) == rows, pattern


def test_partitions_that_a_choice_names_are_columns(tmp_path: Path) -> None:
    rides = tmp_path / "rides"
    for year in (2024, 2025, 2026):
        write(rides / f"year={year}" / "m=1", "x.parquet", {"id": [year]})
    for pattern in (
        "year=202{5,6}/**", "{year=2025,year=2026}", "{year=2025/m=1,year=2026}", "year={2025,2026}/m={1,2}/x.parquet"
    ):  # fmt: skip
        found = read(make_parquet_converter(rides / pattern))
        assert {name: values.tolist() for name, values in found.items()} == {
            "id": [2025, 2026], "year": [2025, 2026], "m": [1, 1],
        }  # fmt: skip
    # What is named without a choice is no partition, as Spark has it.
    assert set(read(make_parquet_converter(rides / "year=2025"))) == {"id", "m"}
    # So where one is named, and others are chosen, the year is none either.
    for urls in (["year=2024", "{year=2025,year=2026}"], ["{year=2025/m=1,year=2024/m=1/x.parquet}", "year=2026"]):
        found = read(make_parquet_converter([rides / url for url in urls]))
        assert (sorted(found), sorted(found["id"].tolist())) == (["id", "m"], [2024, 2025, 2026])
    # Of a file that is named twice the name that says more, in any order.
    for both in ([rides, rides / "year=2025"], [rides / "year=2025", rides]):
        assert sorted(read(make_parquet_converter(both))["year"].tolist()) == [2024, 2025, 2026]


def test_partitions_that_a_choice_in_a_url_names_are_decoded_once(tmp_path: Path) -> None:
    for name in ("a%3Ab", "c"):
        write(tmp_path / f"ts={name}", "x.parquet", {"id": [1]})
    for pattern in (f"{tmp_path}/{{ts=a%3Ab,ts=c}}", f"file://{tmp_path}/{{ts=a%253Ab,ts=c}}"):
        assert read(make_parquet_converter(pattern))["ts"].tolist() == ["a:b", "c"]


def test_links_are_followed_and_not_around_in_a_circle(tmp_path: Path) -> None:
    write(tmp_path / "data" / "day=2", "x.parquet", {"id": [2]})
    write(tmp_path / "elsewhere", "x.parquet", {"id": [1]})
    (tmp_path / "data" / "day=1").symlink_to("../elsewhere")
    (tmp_path / "data" / "y.parquet").symlink_to(write(tmp_path / "other", "z", {"id": [3]}))
    (tmp_path / "data" / "day=2" / "up").symlink_to("..")
    (tmp_path / "elsewhere" / "back").symlink_to("../data")
    for pattern in ("day=*", "*/*.parquet", "day=*/**"):
        found = read(make_parquet_converter(tmp_path / "data" / pattern))
        assert (found["day"].tolist(), found["id"].tolist()) == ([1, 2], [1, 2])
    (tmp_path / "data" / "y.parquet").unlink()
    # What is there without the link is not taken twice, unless the link is named.
    (tmp_path / "data" / "day=0").symlink_to("day=2")
    assert read(make_parquet_converter(tmp_path / "data"))["id"].tolist() == [1, 2]
    assert read(make_parquet_converter(tmp_path / "data" / "day=[02]"))["id"].tolist() == [2, 2]
    write(tmp_path / "data" / "_kept", "x.parquet", {"id": [4]})
    (tmp_path / "data" / "day=4").symlink_to("_kept")
    assert read(make_parquet_converter(tmp_path / "data"))["id"].tolist() == [1, 2, 4]


@pytest.mark.parametrize("link", ["log", "table", "partition", "below", "file"])
def test_links_into_a_delta_table_are_refused_as_well(tmp_path: Path, link: str) -> None:
    table, named = tmp_path / "table", tmp_path / "named"
    write(table / "p=1", "x.parquet", {"id": [1]})
    (table / "_delta_log").mkdir()
    if link == "log":
        (tmp_path / "log").mkdir()
        (table / "_delta_log").rmdir()
        (table / "_delta_log").symlink_to("../log")
    if link == "below":
        named.mkdir()
    place, target = {
        "log": (named, table), "table": (named, table), "partition": (named, table / "p=1"),
        "below": (named / "q", table / "p=1"), "file": (named, table / "p=1" / "x.parquet"),
    }[link]  # fmt: skip
    place.symlink_to(target)
    with pytest.raises(SourceError, match="is a Delta table: its files also hold rows that were deleted"):
        make_parquet_converter(named)


def test_files_of_other_names_are_left_out_with_a_warning_or_taken_where_they_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["a.parquet", "b.PARQUET", "c.pq", "d.parq", "000000_0", "e.txt", "f.txt", "g.txt"]
    for number, name in enumerate(names[:5]):
        write(tmp_path, name, {"id": [number]})
    for name in names[5:]:
        (tmp_path / name).write_text("x")
    (tmp_path / "empty").touch()
    for url in (tmp_path, tmp_path / "*", tmp_path / "**"):
        caplog.clear()
        assert sorted(read(make_parquet_converter(url))["id"].tolist()) == [0, 1, 2, 3]
        assert f"Left out in file://{tmp_path}, as the names do not end with .parquet: 000000_0, e.txt, " in caplog.text
        assert caplog.text.count("and 1 more. If they hold rows, name all files in a list.") == 1
    caplog.clear()
    assert len(make_parquet_converter(tmp_path / "*.parquet")) == 1
    assert sorted(read(make_parquet_converter([tmp_path / name for name in names[:5]]))["id"]) == [0, 1, 2, 3, 4]
    assert caplog.text == ""


def test_a_scheme_has_no_case_and_a_chain_is_said_to_be_one(tmp_path: Path) -> None:
    write(tmp_path, "x.parquet", {"id": [1]})
    assert len(make_parquet_converter(f"FILE://{tmp_path}")) == 1
    for chain in ("zip://a/*.parquet::file:///x.zip", "simplecache::file:///x"):
        with pytest.raises(ValueError, match="is a chain of filesystems"):
            make_parquet_converter(chain)


@pytest.mark.parametrize("scheme", ["", "file://", "memory:/"])
def test_a_name_with_a_question_mark_is_itself_before_it_is_a_pattern(tmp_path: Path, scheme: str) -> None:
    for number, name in enumerate(("a?b", "axb")):
        write(tmp_path / name, "f.parquet", {"id": [number]})
        put(f"memory:/{tmp_path}/{name}/f.parquet", [number])
    for pattern, rows in (("a?b", [0]), ("a?b/f.parquet", [0]), ("?xb", [1]), ("a?[b]", [0, 1])):
        assert sorted(read(make_parquet_converter(f"{scheme}{tmp_path}/{pattern}"))["id"].tolist()) == rows, pattern


def test_partitions_of_numbers_beyond_64_bits_stay_apart(tmp_path: Path) -> None:
    for last in (0, 1):
        write(tmp_path / f"p=1234567890123456789{last}", "a.parquet", {"id": [last]})
    converter = make_parquet_converter(tmp_path)
    assert len(converter.where([("p", "=", decimal.Decimal(12345678901234567890))])) == 1


def test_a_file_is_read_where_its_folder_may_not_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"id": [1]}), tmp_path / "a.parquet")
    (tmp_path / "below").mkdir()
    pq.write_table(pa.table({"id": [2]}), tmp_path / "below/b.parquet")
    whole = Storage.list

    def refuse(self: Storage) -> list[FileInfo]:
        # Root may list everything.
        if self.path() == str(tmp_path):
            raise PermissionError(13, "Permission denied", self.path())
        return whole(self)

    monkeypatch.setattr(Storage, "list", refuse)
    for place, ids in (("a.parquet", [1]), ("below", [2]), ("below/b.parquet", [2])):
        with make_parquet_converter(tmp_path / place) as converter:
            assert read(converter)["id"].tolist() == ids
    with pytest.raises(SourceError, match="Permission denied"):
        make_parquet_converter(tmp_path)


def test_converters_that_are_never_closed_leave_nothing(tmp_path: Path) -> None:
    """As in a notebook: there is nothing to release, so nothing need be kept until the process ends."""
    pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "a.parquet")

    def count() -> int:
        gc.collect()
        return sum(type(one) is Holding for one in gc.get_objects())

    before = count()
    for _ in range(5):
        converter = make_parquet_converter(tmp_path)
        assert len(converter) == 2
        del converter
    assert count() == before
