"""What a dataset is on disk: it survives JSON, and nothing that contradicts itself is believed."""

from __future__ import annotations

import base64
import contextlib
import copy
import datetime as dt
import json
import pickle
import random
import re
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter import DatasetConverter, Image
from converter.categories import Categories
from converter.dataset import borrow_files
from converter.errors import CacheCorruptError, CacheError, ConverterError
from converter.manifest import FORMAT_VERSION, FileEnd, Manifest, Origin, fingerprint_of
from converter.schema import Field, Scale, Schema
from converter.selection import select
from converter.statistics import ColumnStatistics
from tests.columns import ID, RAGGED, SCALARS, TENSORS, Column
from tests.entries import write_converter
from tests.properties import examples

ATTEMPT = "0123456789abcdef" * 2
PATH = "file:///cache/manifest.json"


def file_name(number: int) -> str:
    return f"data-{ATTEMPT}/part-{number:05d}-0000000a-0000.parquet"


PAIR, TEXT = Field(name="x", dtype="float32", shape=(2,)), Field(name="é \"'", dtype="str", has_nulls=True)
STATISTICS = ColumnStatistics(
    field=PAIR,
    null_count=0,
    shortest=2,
    longest=2,
    row_group_span=0.1,
    closed={
        "count": np.array([5.0, 4.0]),
        "shift": np.array([1 / 3, -1e300]),
        "offset": np.array([1e-17, 0.0]),
        "m2": np.array([0.1, 2.0]),
        "nans": 1,
        "min": -np.inf,
        "max": 1e-300,
    },
)


def make_manifest(rows: list[list[int]]) -> Manifest:
    """One inner list for each file: the rows of its row groups."""
    flat = [count for groups in rows for count in groups]
    return Manifest(
        schema=Schema((PAIR, TEXT)),
        file_names=tuple(file_name(number) for number in range(len(rows))),
        file_bytes=np.arange(len(rows), dtype=np.int64) + 100,
        row_group_file=np.repeat(np.arange(len(rows)), [len(groups) for groups in rows]).astype(np.int64),
        row_group_rows=np.array(flat, np.int64),
        row_group_bytes=np.arange(len(flat), dtype=np.int64) * 7 + 1,
        fingerprint="f" * 32,
        num_rows=sum(flat),
        float_dtype="float64",
        is_kept=True,
        statistics={"x": STATISTICS, "é \"'": ColumnStatistics(field=TEXT, null_count=3)},
    )


def same(one: Manifest, other: Manifest) -> bool:
    arrays = ("file_bytes", "row_group_file", "row_group_rows", "row_group_bytes")
    plain = ("schema", "file_names", "fingerprint", "num_rows", "float_dtype", "is_kept")
    return (
        all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)
        and all(getattr(one, name) == getattr(other, name) for name in plain)
        and repr(one.statistics) == repr(other.statistics)
    )


manifests = st.lists(st.lists(st.integers(0, 2**40), max_size=4), max_size=5).map(make_manifest)


@given(manifests)
@examples(50)
def test_a_manifest_survives_json(manifest: Manifest) -> None:
    again = Manifest.from_json(manifest.to_json(), path=PATH)
    assert same(again, manifest)
    assert again.to_json() == manifest.to_json()
    assert again.row_group_rows.dtype == np.int64


@given(manifests)
@examples(20)
def test_a_manifest_survives_pickle(manifest: Manifest) -> None:
    assert same(pickle.loads(pickle.dumps(manifest)), manifest)


def with_ends(*ends: bytes) -> Manifest:
    """A manifest of as many files, which knows how they end."""
    footers = np.array(list(map(zlib.crc32, ends)), np.int64)
    known = tuple(FileEnd(end, end[:4]) for end in ends)
    return replace(make_manifest([[1]] * len(ends)), file_ends=known, file_footers=footers)


@given(st.lists(st.binary(max_size=200), max_size=5))
@examples(50)
def test_the_ends_of_files_survive_json_and_older_manifests_have_none(ends: list[bytes]) -> None:
    known = with_ends(*ends)
    assert Manifest.from_json(known.to_json(), path=PATH).file_ends == known.file_ends
    assert pickle.loads(pickle.dumps(known)).file_ends == known.file_ends
    older = json.loads(known.to_json())
    del older["files"]["footers"], older["files"]["heads"]
    assert Manifest.from_json(json.dumps(older).encode(), path=PATH).file_ends is None
    assert "footers" not in json.loads(replace(known, file_ends=None).to_json())["files"]


def packed(ends: bytes) -> str:
    return base64.b64encode(zlib.compress(ends)).decode()


WRONG_ENDS = {
    "no text": ({"zlib": 7}, "rror: "),
    "no base64": ({"zlib": "?" * 8}, "rror: "),
    "not compressed": ({"zlib": base64.b64encode(b"onetwo").decode()}, "rror: "),
    "cut": ({"zlib": packed(b"onetwo")[:8]}, "rror: "),
    "of other bytes": ({"zlib": packed(b"onetwO")}, "footers do not agree with their digests"),
    "more than they say": ({"zlib": packed(b"onetwo!")}, "footers do not have their sizes"),
    "a mountain": ({"zlib": packed(bytes(1 << 26))}, "footers do not have their sizes"),
    "fewer than they say": ({"zlib": packed(b"onetw")}, "footers do not have their sizes"),
    "of fewer files": ({"bytes": [6]}, "rror: "),
    "cut elsewhere": ({"bytes": [2, 4]}, "footers do not agree with their digests"),
    "sizes below nothing": ({"bytes": [-1, 7]}, "footer sizes are not between 0 and 8388608 bytes"),
    "the same ones again and again": (
        {"bytes": [(1 << 23) - 1, 1 - (1 << 23)] * 1000, "zlib": packed(bytes(1 << 23))},
        "footer sizes are not between 0 and 8388608 bytes",
    ),
    "sizes that are text": ({"bytes": ["3", "3"]}, "rror: "),
    "sizes without end": ({"bytes": [1 << 62, 6]}, "footer sizes are not between 0 and 8388608 bytes"),
    "no sizes": ({"bytes": None}, "rror: "),
}


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        *(("footers", kind) for kind in WRONG_ENDS),
        # Heads are digests themselves; their number is compared with the footer's once a file is opened.
        *(("heads", kind) for kind, (_, said) in WRONG_ENDS.items() if "digests" not in said),
    ],
)
def test_ends_that_are_not_those_of_the_files_are_corrupt(part: str, kind: str) -> None:
    changed = json.loads(with_ends(b"one", b"two").to_json())
    change, said = WRONG_ENDS[kind]
    changed["files"][part].update(change)
    tracemalloc.start()
    try:
        with pytest.raises(CacheCorruptError, match=rf"is not a manifest.*{said}"):
            Manifest.from_json(json.dumps(changed).encode(), path=PATH)
        # Nobody can make it unpack more than it says.
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@given(st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=5))
@examples(50)
def test_a_row_group_knows_its_number_within_its_file(rows: list[list[int]]) -> None:
    manifest = make_manifest(rows)
    expected = [number for groups in rows for number in range(len(groups))]
    assert [manifest.row_group_in_file(group) for group in range(manifest.num_row_groups)] == expected


def test_statistics_survive_json_exactly() -> None:
    again = Manifest.from_json(make_manifest([[3]]).to_json(), path=PATH).statistics
    assert list(again) == ["x", "é \"'"]
    found = again["x"]
    assert (found.field, found.null_count, found.shortest, found.longest) == (PAIR, 0, 2, 2)
    assert (found.row_group_span, found.nan_count, found.min, found.max) == (0.1, 1, -np.inf, 1e-300)
    assert found.closed is not None
    assert STATISTICS.closed is not None
    for name in ("count", "shift", "offset", "m2"):
        np.testing.assert_array_equal(found.closed[name], STATISTICS.closed[name])
    text = again["é \"'"]
    assert (text.null_count, text.shortest, text.closed, text.min, text.mean) == (3, None, None, None, None)


@pytest.mark.parametrize(
    ("dtype", "stored", "shown"),
    [
        ("datetime64[D]", [-719_162, 2_932_896], [dt.date.min, dt.date.max]),
        ("datetime64[D]", [-719_163, 2_932_897], [-719_163, 2_932_897]),
        ("datetime64[D]", [-(2**31), 2**31 - 1], [-(2**31), 2**31 - 1]),
        ("datetime64[us]", [-62_135_596_800_000_001, 253_402_300_800_000_000], None),
        ("datetime64[us]", [-(2**63), 2**63 - 1], None),
    ],
)
def test_dates_and_times_that_python_does_not_have_are_shown_as_they_are_stored(
    dtype: str, stored: list[int], shown: list[Any] | None
) -> None:
    ones = dict.fromkeys(("count", "shift", "offset", "m2"), np.ones(1))
    closed = ones | {"nans": 0, "min": stored[0], "max": stored[1]}
    column = ColumnStatistics(field=Field(name="t", dtype=dtype), null_count=0, closed=closed)
    again = ColumnStatistics.from_json(column.field, json.loads(json.dumps(column.to_json())))
    least, most = shown or stored
    for statistics in (column, again):
        assert [statistics.min, statistics.max] == [least, most]
        assert repr(statistics) == f"ColumnStatistics(null_count=0, nan_count=0, min={least!r}, max={most!r})"


BOUNDLESS = dict.fromkeys(("count", "shift", "offset", "m2"), np.ones(1)) | {"nans": 0}


@pytest.mark.parametrize(("least", "most"), [(0, 1), (False, True), (1, 1), (True, True), (None, None)])
def test_the_bounds_of_booleans_survive_json_as_numbers_and_as_words(least: object, most: object) -> None:
    column = ColumnStatistics(
        field=Field(name="b", dtype="bool"), null_count=0, closed=BOUNDLESS | {"min": least, "max": most}
    )
    again = ColumnStatistics.from_json(column.field, json.loads(json.dumps(column.to_json())))
    shown = (None, None) if least is None else (bool(least), bool(most))
    assert (again.min, again.max) == (column.min, column.max) == shown
    assert all(type(bound) in (bool, type(None)) for bound in (again.min, again.max))


@pytest.mark.parametrize(("least", "most"), [(0, 2), (-1, 1), (True, False), ("x", "x"), (0.0, 1.0), (None, True)])
def test_booleans_have_no_other_bounds(least: object, most: object) -> None:
    field = Field(name="b", dtype="bool")
    column = ColumnStatistics(field=field, null_count=0, closed=BOUNDLESS | {"min": least, "max": most})
    with pytest.raises((TypeError, ValueError)):
        ColumnStatistics.from_json(field, json.loads(json.dumps(column.to_json())))


@pytest.mark.parametrize("cache_key", [None, "flights é \"'"])
def test_the_origin_survives_json_and_older_manifests_have_none(cache_key: str | None) -> None:
    origin = Origin.from_json(ORIGIN | {"cache_key": cache_key, "source": "version 3 of the Delta table s3://b/t"})
    known = replace(make_manifest([[1]]), origin=origin)
    assert Manifest.from_json(known.to_json(), path=PATH).origin == origin
    # Entries say with which options they were written, since they note it.
    assert "options" not in json.loads(known.to_json())["origin"]
    with_options = replace(known, origin=replace(origin, options={"writer": "auto", "shapes": {"x": [2]}}))
    assert Manifest.from_json(with_options.to_json(), path=PATH).origin == with_options.origin
    assert json.loads(with_options.to_json())["format_version"] == 1
    older = json.loads(known.to_json())
    del older["origin"]
    assert Manifest.from_json(json.dumps(older).encode(), path=PATH).origin is None


def test_other_rows_of_the_same_files_have_another_fingerprint() -> None:
    manifest = make_manifest([[4, 3], [2]])
    masks = [np.arange(rows) % 2 == 0 for rows in (4, 3, 2)]
    parts = [manifest, *(replace(manifest, selection=select(kept)) for kept in (masks, [~mask for mask in masks]))]
    assert len({part.live_fingerprint for part in parts}) == 3
    assert parts[1].live_fingerprint == replace(manifest, selection=select(masks)).live_fingerprint


def test_totals_are_sums() -> None:
    manifest = make_manifest([[3, 4], [], [5]])
    assert (manifest.num_rows, manifest.num_row_groups, manifest.num_bytes) == (12, 3, 303)


def document() -> dict[str, Any]:
    return json.loads(make_manifest([[3, 4], [5]]).to_json())


def test_the_document_that_the_corruptions_start_from_is_sound() -> None:
    assert same(Manifest.from_json(json.dumps(document()).encode(), path=PATH), make_manifest([[3, 4], [5]]))


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"null", b"[]", b"7", b'"text"', b"{}", b"\xff\xfe\x00", b"PAR1\x00\x00", b"[" * 200_000],
    ids=["empty", "cut", "null", "list", "number", "string", "no keys", "no text", "parquet", "deep"],
)
def test_bytes_that_are_no_manifest_are_corrupt(data: bytes) -> None:
    with pytest.raises(CacheCorruptError, match=r"manifest\.json is not a manifest that this package wrote") as raised:
        Manifest.from_json(data, path=PATH)
    assert raised.value.path == PATH


@pytest.mark.parametrize("length", range(0, 200, 17))
def test_a_manifest_that_was_cut_is_corrupt(length: int) -> None:
    with pytest.raises(CacheCorruptError, match="is not a manifest"):
        Manifest.from_json(make_manifest([[3, 4], [5]]).to_json()[:length], path=PATH)


@pytest.mark.parametrize(
    "key", ["format_version", "fingerprint", "num_rows", "schema", "files", "row_groups", "statistics"]
)
def test_a_manifest_without_one_of_its_parts_is_corrupt(key: str) -> None:
    changed = document()
    del changed[key]
    with pytest.raises(CacheCorruptError, match=rf"is not a manifest .*KeyError: '{key}'"):
        Manifest.from_json(json.dumps(changed).encode(), path=PATH)


ORIGIN = {"cache_key": None, "created": "", "host": "", "application_id": "", "user": "", "source": ""}


def _set(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(found: Any) -> None:
        for key in path[:-1]:
            found = found[key]
        found[path[-1]] = to

    return change


def _one_column_twice(found: dict[str, Any]) -> None:
    found["schema"][1]["name"] = "x"
    found["statistics"] = {"x": found["statistics"]["x"]}


CONTRADICTIONS = {
    "NaNs that are a list": (_set("statistics", "x", "moments", "nans", to=[1]), r"expected int, found \[1\]"),
    "NaNs that are NaN": (_set("statistics", "x", "moments", "nans", to=float("nan")), "NaN is not valid JSON"),
    "nulls that are infinite": (
        _set("statistics", "x", "null_count", to=float("inf")),
        "Infinity is not valid JSON",
    ),
    "a minimum that is NaN": (_set("statistics", "x", "moments", "min", to="nan"), "has values from nan to 1e-300"),
    "a minimum alone": (_set("statistics", "x", "moments", "max", to=None), "expected float, found None"),
    "moments of a text": (
        _set("statistics", "é \"'", "moments", to=document()["statistics"]["x"]["moments"]),
        "has moments",
    ),
    "a tensor without end": (_set("schema", 0, "shape", to=[2**40, 2**40]), "which no tensor can have"),
    "a text with a shape": (_set("schema", 1, "shape", to=[2]), r"of str has the shape \(2,\)"),
    "an origin that is no text": (_set("origin", to=ORIGIN | {"host": 7}), "expected str, found 7"),
    "an origin without a time": (_set("origin", to={"cache_key": None}), "KeyError: 'created'"),
    "options that are no object": (_set("origin", to=ORIGIN | {"options": []}), r"expected dict, found \[\]"),
    "kept by a text": (_set("is_kept", to="false"), "expected bool, found 'false'"),
    "rows that add up beyond 64 bits": (_set("row_groups", "rows", to=[2**62, 2**62, 2**63 - 1]), "rows do not add up"),
    "one size too many": (_set("files", "bytes", to=[1, 2, 3]), "files do not agree with their sizes"),
    "one size too few": (_set("files", "bytes", to=[1]), "files do not agree with their sizes"),
    "one file twice": (_set("files", "name", to=[file_name(0)] * 2), "files do not agree"),
    "names are one text": (_set("files", "name", to="ab"), "expected list, found 'ab'"),
    "sizes are text": (_set("files", "bytes", to=["many", "few"]), "ValueError"),
    "sizes are null": (_set("files", "bytes", to=[None, None]), "expected a list of integers"),
    "sizes are nested": (_set("files", "bytes", to=[[1], [2]]), "expected a list of integers"),
    "sizes are uneven": (_set("files", "bytes", to=[[1], [2, 3]]), "ValueError"),
    "size is one number": (_set("files", "bytes", to=7), "expected a list of integers"),
    "negative size": (_set("files", "bytes", to=[100, -1]), "files"),
    "a row group without bytes": (_set("row_groups", "bytes", to=[1, 2]), "row groups do not agree"),
    "a row group without file": (_set("row_groups", "file", to=[0, 0]), "row groups do not agree"),
    "a row group of no file": (_set("row_groups", "file", to=[0, 0, 2]), "row groups are not in file order"),
    "a row group before the first": (_set("row_groups", "file", to=[-1, 0, 1]), "row groups are not in file order"),
    "row groups out of order": (_set("row_groups", "file", to=[1, 0, 0]), "row groups are not in file order"),
    "rows do not add up": (_set("num_rows", to=13), "rows do not add up"),
    "negative rows": (_set("row_groups", "rows", to=[3, 10, -1]), "rows do not add up"),
    "rows that are fractions": (_set("row_groups", "rows", to=[3.5, 4.2, 5.9]), "integers"),
    "rows that are text": (_set("num_rows", to="twelve"), "expected int, found 'twelve'"),
    "rows that are no number": (_set("num_rows", to=None), "expected int, found None"),
    "rows beyond 64 bits": (_set("row_groups", "rows", to=[3, 4, 2**70]), "rror: "),
    "rows without end": (_set("num_rows", to=float("inf")), "rror: "),
    "version is text": (_set("format_version", to="1"), "version"),
    "version is null": (_set("format_version", to=None), "version"),
    "version is zero": (_set("format_version", to=0), "version"),
    "an unknown dtype": (_set("schema", 0, "dtype", to="garbage"), "dtype 'garbage'"),
    "a dtype that is Python objects": (_set("schema", 0, "dtype", to="object"), "dtype"),
    "a dtype that is a record": (_set("schema", 0, "dtype", to="int32,int32"), "dtype"),
    "a negative shape": (_set("schema", 0, "shape", to=[-2]), "expected a count, found -2"),
    "a shape that is text": (_set("schema", 0, "shape", to="ab"), "expected list, found 'ab'"),
    "a schema that is no list": (_set("schema", to={"x": 1}), "TypeError"),
    "a column without dtype": (_set("schema", 0, to={"name": "x", "shape": [], "has_nulls": False}), "KeyError"),
    "one column twice": (_one_column_twice, "columns share a name"),
    "statistics of no column": (_set("statistics", "z", to={}), "KeyError.*There is no column"),
    "moments of no length": (_set("statistics", "x", "moments", "offset", to="?"), "rror"),
    "moments of another length": (_set("statistics", "x", "moments", "offset", to="AAAA"), "rror"),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_a_manifest_that_contradicts_itself_is_corrupt(kind: str) -> None:
    change, said = CONTRADICTIONS[kind]
    changed = document()
    change(changed)
    with pytest.raises(CacheCorruptError, match=rf"manifest\.json is not a manifest.*{said}") as raised:
        Manifest.from_json(json.dumps(changed).encode(), path=PATH)
    assert raised.value.path == PATH


@pytest.mark.parametrize(
    "name",
    [
        "../" + file_name(0),
        f"data-{ATTEMPT}/../{file_name(0)}",
        f"data-{ATTEMPT}/../../../etc/passwd",
        "/" + file_name(0),
        "/etc/passwd",
        "file:///etc/passwd",
        "manifest.json",
        "part-00000-0000000a-0000.parquet",
        f"data-{ATTEMPT}/manifest.json",
        f"data-{ATTEMPT}/part-00000-0000000a-0000.parquet.bak",
        f"data-{ATTEMPT}/part-00000-0000000a-0000.parquet\n",
        f"data-{ATTEMPT}/part-00000-0000000A-0000.parquet",
        f"data-{ATTEMPT[:-1]}/part-00000-0000000a-0000.parquet",
        f"data-{ATTEMPT}//part-00000-0000000a-0000.parquet",
        f"data-{ATTEMPT}\\part-00000-0000000a-0000.parquet",
        f"data-{ATTEMPT}/part-٠٠٠٠٠-0000000a-0000.parquet",
        "",
    ],
)
def test_a_file_that_our_writer_cannot_have_named_is_refused(name: str) -> None:
    # Names are joined to a directory and later deleted.
    changed = document()
    changed["files"]["name"][1] = name
    with pytest.raises(CacheCorruptError, match="unexpected file name"):
        Manifest.from_json(json.dumps(changed).encode(), path=PATH)


def test_a_newer_format_asks_for_an_upgrade_and_is_not_called_corrupt() -> None:
    # A newer format may have changed anything else, so the version is looked at first.
    newer = json.dumps({"format_version": FORMAT_VERSION + 1, "all else": "unknown"}).encode()
    with pytest.raises(CacheError, match=r"format version 3; .* reads up to 2\. Upgrade") as raised:
        Manifest.from_json(newer, path=PATH)
    assert not isinstance(raised.value, CacheCorruptError)
    assert raised.value.path == PATH


def test_the_fingerprint_is_of_schema_rows_and_digests_in_order() -> None:
    schema, other = Schema((Field(name="x", dtype="int8"),)), Schema((Field(name="y", dtype="int8"),))
    one = fingerprint_of(schema, [[1, 2], [3]], [["a", "b"], ["c"]])
    assert one == fingerprint_of(schema, ((1, 2), (3,)), (("a", "b"), ("c",)))
    different = {
        fingerprint_of(other, [[1, 2], [3]], [["a", "b"], ["c"]]),
        fingerprint_of(schema, [[2, 1], [3]], [["a", "b"], ["c"]]),
        fingerprint_of(schema, [[1], [2, 3]], [["a"], ["b", "c"]]),
        fingerprint_of(schema, [[1, 2], [3]], [["b", "a"], ["c"]]),
        fingerprint_of(schema, [[1, 2], [3]], [["a", "b"], ["d"]]),
    }
    assert len(different | {one}) == 6


def test_the_fingerprint_of_a_given_dataset_does_not_change_between_versions() -> None:
    # It seeds the order of an epoch: another one would end the resuming of old runs.
    schema = Schema((Field(name="x", dtype="float32", shape=(2,)),))
    assert fingerprint_of(schema, [[1, 2]], [["a", "b"]]) == "0e5d18c77dd0af4ecc50921120e417ec"


def test_a_large_manifest_stays_small_in_memory() -> None:
    row_groups = 20_000
    large = replace(
        make_manifest([[1]]),
        file_names=tuple(f"data-{'0' * 32}/part-{file:05d}-{file:08x}-0000.parquet" for file in range(2_000)),
        file_bytes=np.full(2_000, 84_123_456),
        row_group_file=np.repeat(np.arange(2_000), 10),
        row_group_rows=np.full(row_groups, 50_123),
        row_group_bytes=np.full(row_groups, 8_412_345),
        num_rows=row_groups * 50_123,
    )
    tracemalloc.start()
    loaded = Manifest.from_json(large.to_json(), path="manifest.json")
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert loaded.row_group_rows.tolist() == large.row_group_rows.tolist()
    assert peak < 350 * row_groups
    assert kept < 100 * row_groups


# Tampered ---------------------------------------------------------------------------

REPLACEMENTS: list[Any] = [
    float("nan"), float("inf"), None, True, "", "7", "../../etc/passwd", "inf", "nan", [], [1], {}, {"a": 1},
    0, -1, 1, 2, 3, 2**31, 2**53, 2**62, 2**63, 2**64, 10**30, -(10**30), 0.5, 1e308,
]  # fmt: skip


def places(found: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON document."""
    if path:
        yield path
    steps = found if isinstance(found, dict) else range(len(found)) if isinstance(found, list) else ()
    for step in steps:
        yield from places(found[step], (*path, step))


def tamper(document: dict[str, Any], chance: random.Random) -> str:
    """Change one place, and say how."""
    # As often deep in a list as above it.
    by_depth: dict[int, list[tuple[Any, ...]]] = {}
    for path in places(document):
        by_depth.setdefault(len(path), []).append(path)
    path = chance.choice(by_depth[chance.choice(sorted(by_depth))])
    around: Any = document
    for step in path[:-1]:
        around = around[step]
    last, how = path[-1], chance.choice(["replace"] * 6 + ["delete", "duplicate", "swap", "grow"])
    if how == "delete":
        del around[last]
    elif how == "duplicate" and isinstance(around, list):
        around.insert(last, copy.deepcopy(around[last]))
    elif how == "swap":
        other = chance.choice(list(around) if isinstance(around, dict) else list(range(len(around))))
        around[last], around[other] = around[other], around[last]
    elif how == "grow" and type(around[last]) is int:
        around[last] += chance.choice([-1, 1, 1 << 40])
    else:
        around[last] = copy.deepcopy(chance.choice(REPLACEMENTS))
        how = f"replace by {around[last]!r}"
    return f"{how} at {path}"


def use(converter: DatasetConverter) -> None:
    """What a program asks of a converter."""
    repr(converter), len(converter), converter._repr_html_(), repr(converter.schema), converter.fingerprint
    statistics = converter.statistics
    repr(statistics)
    for column in statistics.values():
        assert column.element_mean is None or column.element_mean.shape == column.field.shape
        assert column.element_std is None or column.element_std.shape == column.field.shape
    converter.plan(batch_size=4, shuffle=True, nulls="mask", ragged="pad")
    with converter.make_batch_reader(batch_size=4, shuffle=True, nulls="mask", ragged="pad", workers_count=1) as reader:
        next(iter(reader))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[DatasetConverter]]:
    """Entries of every kind of column, with all that a manifest can say, and with as little as it may."""
    with contextlib.ExitStack() as stack:
        made = []
        for number, (columns, options) in enumerate(
            [
                (SCALARS[:6], {"row_group_bytes": 1 << 10}),
                (SCALARS[6:], {"end_bytes": 1 << 20}),
                (TENSORS, {"end_bytes": 1 << 20, "row_group_bytes": 1 << 10}),
                ((ID, RAGGED, Column(name="maybe", dtype="float32", nullable=True)), {}),
            ]
        ):
            partitions = [[range(7)], [range(7, 60)]]
            directory = tmp_path_factory.mktemp(f"tampered-{number}")
            made.append(stack.enter_context(write_converter(directory, columns, partitions, **options)))
        yield made


def outcome_of(sound: DatasetConverter, document: dict[str, Any]) -> str:
    """What comes of a document in the place of a converter's manifest."""
    try:
        use(borrow_files(sound._storage, Manifest.from_json(json.dumps(document).encode(), path=PATH)))
    except ConverterError as error:
        names_file = PATH in str(error) or sound.url in str(error)
        return type(error).__name__ if names_file else f"names no file: {error!r}"
    except Exception as error:  # noqa: BLE001 (what it is, the test says)
        return f"escapes: {error!r}"
    return "works"


@pytest.mark.parametrize("num_tampered", [300, pytest.param(1500, marks=pytest.mark.long("reads 1,500 datasets"))])
def test_a_tampered_manifest_works_or_is_an_error_that_names_the_file(
    written: list[DatasetConverter], num_tampered: int
) -> None:
    chance = random.Random(20261124)
    origin = Origin(cache_key="k", created="2026", host="h", application_id="a", user="u", source="DataFrame")
    outcomes: dict[str, int] = {}
    odd = []
    for number in range(num_tampered):
        sound = chance.choice(written)
        manifest = replace(sound._manifest, origin=origin if number % 2 else None)
        document = json.loads(manifest.to_json())
        how = [tamper(document, chance) for _ in range(chance.choice([1, 1, 1, 2]))]
        outcome = outcome_of(sound, document)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if outcome.startswith(("names", "escapes")):
            odd.append(f"{how}: {outcome}")
    assert not odd, "\n".join(odd[:40])
    assert outcomes["CacheCorruptError"] > num_tampered // 2
    assert outcomes["ReadError"] > 0
    assert outcomes["works"] > 0


def test_a_long_value_in_a_manifest_does_not_fill_the_screen() -> None:
    """Found by `python -m tests.faults.campaign damaged_bytes --case 2:4213`."""
    document = json.loads(make_manifest([[1]]).to_json())
    document["statistics"]["x"]["moments"]["min"] = "a" * 5000
    with pytest.raises(CacheCorruptError, match=re.escape(PATH)) as caught:
        Manifest.from_json(json.dumps(document).encode(), path=PATH)
    assert len(str(caught.value)) < 400


def with_values() -> dict[str, Any]:
    """A manifest's document whose columns are decoded, categories and standardised."""
    columns = (("photo", "bytes"), ("city", "int32"), ("day", "datetime64[D]"), ("x", "float32"))
    schema = Schema(tuple(Field(name=name, dtype=dtype) for name, dtype in columns))
    manifest = replace(
        make_manifest([[1]]),
        schema=schema,
        statistics={},
        decoders={"photo": Image(size=(2, 3))},
        categories={
            "city": Categories(values=pa.array(["a", "b"], pa.large_string()), tables={0: np.array([1, 0], np.int32)}),
            "day": Categories(values=pa.array([dt.date(1500, 1, 1)]), unseen="null", are_given=True),
        },
        scales={"x": Scale(1.5, 2.0)},
    )
    document: dict[str, Any] = json.loads(manifest.to_json())
    return document


def test_older_packages_open_what_they_understand_alone() -> None:
    assert with_values()["format_version"] == 2
    assert json.loads(make_manifest([[1]]).to_json())["format_version"] == 1


def test_what_columns_become_survives_json() -> None:
    document = with_values()
    read = Manifest.from_json(json.dumps(document).encode(), path=PATH)
    assert json.loads(read.to_json()) == document
    fields = {field.name: field for field in read.batch_schema}
    assert (fields["photo"].dtype, fields["photo"].shape, fields["photo"].decoder) == ("uint8", (2, 3, 3), "Image")
    assert fields["city"].categories == ("a", "b")
    assert fields["day"].categories == (dt.date(1500, 1, 1),)
    assert fields["x"].scale == (1.5, 2.0)
    assert read.categories["city"].global_codes(pa.chunked_array([pa.array([0, 1], pa.int32())]), 0).to_pylist() == [
        1,
        0,
    ]


@pytest.mark.parametrize(
    ("part", "name", "change"),
    [
        ("decoders", "photo", {"kind": "Unknown"}),
        ("decoders", "photo", {"mode": "CMYK"}),
        ("decoders", "photo", {"size": [0, 3]}),
        ("decoders", "photo", {"other": 1}),
        ("decoders", "photo", {"on_error": "hide"}),
        ("decoders", "photo", {"kind": "NumPy"}),
        ("categories", "city", {"kind": "float64"}),
        ("categories", "city", {"kind": "int64"}),
        ("categories", "city", {"values": ["a", "a"]}),
        ("categories", "city", {"values": ["a", None]}),
        ("categories", "city", {"values": ["a"]}),
        ("categories", "city", {"unseen": "guess"}),
        ("categories", "city", {"tables": {"1": "eJxjZGBgYAAAAAQAAQ=="}}),
        ("categories", "city", {"tables": {"0": "no base64"}}),
        ("categories", "day", {"kind": "str", "values": ["a"]}),
        ("scales", "x", [1.5, 0.0]),
        ("scales", "x", [1.5]),
        ("scales", "x", ["1.5", 2.0]),
    ],
)
def test_what_columns_cannot_become_is_corrupt(part: str, name: str, change: Any) -> None:
    document = with_values()
    document[part][name] = document[part][name] | change if isinstance(change, dict) else change
    with pytest.raises(CacheCorruptError, match="is not a manifest that this package wrote"):
        Manifest.from_json(json.dumps(document).encode(), path=PATH)


@pytest.mark.parametrize(
    ("part", "to"), [("decoders", "x"), ("scales", "photo"), ("categories", "x"), ("scales", "none")]
)
def test_a_column_that_cannot_become_that_is_corrupt(part: str, to: str) -> None:
    document = with_values()
    first = next(iter(document[part].values()))
    document[part] = {to: first}
    with pytest.raises(CacheCorruptError, match="is not a manifest that this package wrote"):
        Manifest.from_json(json.dumps(document).encode(), path=PATH)


def test_what_no_manifest_may_say_is_not_written() -> None:
    with pytest.raises(ValueError, match="Out of range float values"):
        replace(make_manifest([[4]]), statistics={"x": replace(STATISTICS, row_group_span=np.inf)}).to_json()
