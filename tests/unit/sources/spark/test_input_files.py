"""Files as a frame noted them, and as they are: what others may have done meanwhile is seen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from converter.sources.spark.input_files import Inputs, Listing, are_listed, look_at


def listing_of(**files: int) -> Listing:
    return Listing(
        roots=("/data",), partitions="", files=tuple((f"/data/{name}", size) for name, size in files.items())
    )


def inputs_of(**files: int) -> Inputs:
    return Inputs(files=tuple((f"file:///data/{name}", size, 0, ()) for name, size in files.items()), ways=())


@pytest.mark.parametrize("now", [{"a": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 4}, {"a": 1, "b": 3, "c": 5}, {"b": 3}])
def test_a_frame_knows_files_of_another_length_or_others_from_before(now: dict[str, int]) -> None:
    assert not are_listed(inputs_of(**now), [listing_of(a=1, b=3)])


def test_two_leaves_may_know_one_file_from_different_times() -> None:
    assert are_listed(inputs_of(a=1, b=3), [listing_of(a=1, b=3)])
    assert are_listed(inputs_of(a=1, b=3), [listing_of(a=1), listing_of(a=1, b=3)])
    assert not are_listed(inputs_of(a=1, b=3), [listing_of(a=1, b=2), listing_of(a=1, b=3)])


def test_files_are_looked_at_with_each_folder_below_what_was_named_and_each_link(tmp_path: Path) -> None:
    folder = tmp_path / "table" / "part=a b" / "of=1"
    folder.mkdir(parents=True)
    (folder / "rows").write_text("1")
    (tmp_path / "link").symlink_to("table")
    (tmp_path / "second").symlink_to(tmp_path / "link")
    root = f"{tmp_path}/second"
    looked = look_at([f"file://{root}/part=a%20b/of=1/rows"], [root], None)
    at = os.stat(folder / "rows")
    assert looked.files == (
        (f"file://{root}/part=a%20b/of=1/rows", 1, at.st_mtime_ns, (at.st_ctime_ns, at.st_dev, at.st_ino)),
    )
    assert [path for path, _ in looked.ways] == sorted(
        [f"{root}/part=a b/of=1", f"{root}/part=a b", root, f"{tmp_path}/link"]
    )
    # A file that was named has no folder of its own, and what lies beside it is nobody's.
    alone = look_at([f"file://{folder}/rows".replace(" ", "%20")], [f"{folder}/rows"], None)
    assert (alone.ways, alone.files[0][1:]) == ((), looked.files[0][1:])
