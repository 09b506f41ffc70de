"""Deletion vectors: their rows are left out, and a damaged or lost vector is noticed."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from converter import (
    NullValueError,
    SourceChangedError,
    SourceError,
    make_delta_converter,
)
from tests.unit.sources.delta.known_delta import (
    assert_filtered,
    rows_of,
    with_vector,
)


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
    with pytest.raises(SourceError, match=r"The deletion vectors of version 0 .* cannot be read: "):
        make_delta_converter(path)


def test_a_deletion_vector_that_is_gone_is_said_with_its_version(tmp_path: Path) -> None:
    path = with_vector(tmp_path / "table", [0, 3])
    converter = make_delta_converter(path)
    (path / "vector.bin").unlink()
    with pytest.raises(
        SourceChangedError, match=r"vectors of version 0 .*vector\.bin.* VACUUM removes .* newer version"
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
    with pytest.raises(SourceError, match=r"vectors of version 0 .* delete 2 rows, expected 3 by _delta_log/0+\.crc"):
        make_delta_converter(path)
