"""Files that disagree: a column has one type, wide enough for all, or is refused by name."""

from __future__ import annotations

import datetime as dt
import decimal
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from converter import (
    SourceError,
    UnsupportedTypeError,
    make_parquet_converter,
    places,
)
from tests.unit.sources.parquet.known_files import (
    read,
    write,
)


def test_files_of_other_columns_are_named(tmp_path: Path) -> None:
    write(tmp_path, "a.parquet", {"id": [1], "x": [1.0]})
    write(tmp_path, "b.parquet", {"id": [1], "x": ["text"]})
    with pytest.raises(SourceError, match=r"b\.parquet has other columns than .*a\.parquet: 'x' is string, and double"):
        make_parquet_converter(tmp_path)


def test_tensors_of_one_width_and_two_shapes_are_refused_without_their_manifest(tmp_path: Path) -> None:
    def write_tensors(name: str, ndim: int, shape: list[int]) -> None:
        told = {"converter.dtype": "float32", "converter.ndim": str(ndim), "converter.shape": json.dumps(shape)}
        schema = pa.schema([pa.field("m", pa.binary(24), metadata=told)])
        values = pa.array([np.arange(6, dtype="<f4").tobytes()], pa.binary(24))
        pq.write_table(pa.table({"m": values}, schema=schema), tmp_path / name)

    write_tensors("a.parquet", 2, [2, 3])
    write_tensors("b.parquet", 2, [2, 3])
    assert make_parquet_converter(tmp_path).head(2)["m"].shape == (2, 2, 3)
    for ndim, shape in ((2, [3, 2]), (1, [6])):
        write_tensors("b.parquet", ndim, shape)
        with pytest.raises(SourceError, match=r"b\.parquet has other columns than .*a\.parquet: 'm' is .* of shape \["):
            make_parquet_converter(tmp_path)


def test_a_column_and_a_member_of_one_name_in_two_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "0.parquet", {"id": [0, 1], "a.b": [7, 8]})
    write(tmp_path, "1.parquet", {"id": [2, 3], "a": [{"b": 1}, {"b": 2}]})
    with pytest.raises(
        SourceError, match=r"1\.parquet has other columns than .*0\.parquet: 'a\.b' is \[a\]\.\[b\], and"
    ):
        make_parquet_converter(tmp_path)
    assert len(make_parquet_converter(tmp_path, columns=["id"])) == 4


def test_what_is_looked_at_grows_with_the_columns_and_not_with_their_square(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = []
    count = places.count_leaves
    monkeypatch.setattr(places, "count_leaves", lambda kind: looked_at.append(kind) or count(kind))
    for number in range(2):
        write(tmp_path, f"{number}.parquet", {f"c{column}": [1.0] for column in range(300)})
    converter = make_parquet_converter(tmp_path)
    assert len(read(converter)) == 300
    # Each time a file is opened, once for all columns and once for each.
    assert len(looked_at) < 300 * 20


def test_files_may_differ_in_what_may_be_null_and_lists_may_say_their_length(tmp_path: Path) -> None:
    for name, nullable in (("a", True), ("b", False)):
        schema = pa.schema([pa.field("id", pa.int64(), nullable=nullable)])
        pq.write_table(pa.table([[1, 2]], schema=schema), tmp_path / f"{name}.parquet")
    assert read(make_parquet_converter(tmp_path))["id"].tolist() == [1, 2, 1, 2]
    pair = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))
    write(tmp_path / "fixed", "x.parquet", {"pair": pair})
    assert read(make_parquet_converter(tmp_path / "fixed"), nulls="mask")["pair"].tolist() == [[1, 2], [0, 0], [3, 4]]
    pq.write_table(pa.table([[1], [2]], names=["x", "x"]), tmp_path / "twice.parquet")
    with pytest.raises(SourceError, match="several columns called 'x'"):
        make_parquet_converter(tmp_path / "twice.parquet")
    write(tmp_path / "times", "x.parquet", {"t": pa.array([-1, -1001, 1500], pa.timestamp("ns"))})
    found = read(make_parquet_converter(tmp_path / "times"))["t"].view("int64").tolist()
    assert found == [-1, -2, 1]


def test_decimals_of_any_width_are_one_type(tmp_path: Path) -> None:
    """Arrow notes in a file which width it had; Parquet and Spark do not have it."""
    values = [decimal.Decimal("1.25"), decimal.Decimal("-3.50")]
    for number, kind in enumerate((pa.decimal32, pa.decimal64, pa.decimal128, pa.decimal256)):
        columns = {"x": pa.array(values, kind(5, 2)), "l": pa.array([values, []], pa.list_(kind(5, 2)))}
        write(tmp_path, f"{number}.parquet", columns)
    with make_parquet_converter(tmp_path) as converter:
        found = read(converter, ragged="nested")
        assert found["x"].tolist() == [1.25, -3.5] * 4
        assert len(converter.where([("x", ">", decimal.Decimal("1.2"))])) == 4
        assert len(converter.where([("x", "=", decimal.Decimal("-3.50"))])) == 4


@pytest.mark.parametrize("first", ["a", "c"])
def test_a_column_without_a_value_in_a_file_takes_its_type_from_the_others(tmp_path: Path, first: str) -> None:
    structs = pa.array([{"x": 1, "y": "p"}, {"x": 2, "y": None}])
    columns = {
        "s": pa.array(["v", None]), "n": [1, 2], "f": pa.array([[1, 2], [3, 4]], pa.list_(pa.int16(), 2)),
        "l": [[1], [2, 3]], "day": pa.array([dt.date(2026, 11, 22)] * 2), "t": structs,
    }  # fmt: skip
    write(tmp_path, "b.parquet", {"id": [2, 3], **columns})
    nothing = {name: pa.nulls(2) for name in columns}
    # pandas has a type for lists none of which holds anything.
    write(tmp_path, f"{first}.parquet", {"id": [0, 1], **nothing, "l": pa.array([[], []], pa.list_(pa.null()))})
    with make_parquet_converter(tmp_path) as converter:
        found = read(converter, nulls="mask", ragged="pad")
        rows = np.argsort(found["id"])
        assert sorted(converter.schema.names) == ["day", "f", "id", "l", "n", "s", "t.x", "t.y"]
        assert converter.schema["f"].shape == (2,)
        assert found["s"][rows].tolist()[2] == "v"
        assert found["n"][rows].tolist()[2:] == [1, 2]
        assert found["f"][rows].tolist()[2:] == [[1, 2], [3, 4]]
        assert found["l"][rows].tolist() == [[0, 0], [0, 0], [1, 0], [2, 3]]
        assert found["l__length"][rows].tolist() == [0, 0, 1, 2]
        assert found["t.x"][rows].tolist()[2:] == [1, 2]
        for name in ("s", "n", "f", "day", "t.x", "t.y"):
            valid = found[f"{name}__valid"][rows].tolist()
            assert valid == [False, False, True, name not in ("s", "t.y")]
        assert len(converter.where([("s", "=", "v")])) == 1
        assert len(converter.where(pc.field("n").is_null())) == 2
        assert converter.statistics["n"].null_count == 2
    with pytest.raises(UnsupportedTypeError, match="'s'"):
        make_parquet_converter(tmp_path / f"{first}.parquet", columns=["id", "s"])


def lists(columns: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: column.tolist() for name, column in columns.items()}


class Pair(pa.ExtensionType):  # type: ignore[misc]
    """Two numbers, without a hash, as pyarrow's own class of it leaves it."""

    def __init__(self) -> None:
        super().__init__(pa.struct([("a", pa.int64()), ("b", pa.int64())]), "tests.pair")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Pair:
        return cls()


def test_columns_behind_one_of_a_registered_type_are_theirs(tmp_path: Path) -> None:
    pa.register_extension_type(Pair())
    try:
        pairs = pa.StructArray.from_arrays([pa.array([1, 2]), pa.array([3, 4])], ["a", "b"])
        table = pa.table({"pair": pa.ExtensionArray.from_storage(Pair(), pairs), "z": [7, 8], "w": [70, 80]})
        pq.write_table(table, tmp_path / "a.parquet")
        with make_parquet_converter(tmp_path, columns=["z", "w"]) as converter:
            assert lists(read(converter)) == {"z": [7, 8], "w": [70, 80]}
            assert lists(read(converter.where([("w", ">", 75)]))) == {"z": [8], "w": [80]}
    finally:
        pa.unregister_extension_type("tests.pair")


def test_times_of_int96_have_no_zone_where_other_files_say_so(tmp_path: Path) -> None:
    """A program that wrote INT96 once, and microseconds later."""
    times = np.array(["2026-01-01T12:00:00"] * 3, "M8[us]")
    for kinds in itertools.permutations(["int96", "micros"]):
        for number, kind in enumerate(kinds):
            for name, values in {"x": pa.array(times), "lists": pa.array([list(times)] * 3)}.items():
                folder = tmp_path / name
                folder.mkdir(exist_ok=True)
                path = folder / f"{number}.parquet"
                pq.write_table(pa.table({"x": values}), path, use_deprecated_int96_timestamps=kind == "int96")
        for name in ("x", "lists"):
            with make_parquet_converter(tmp_path / name).make_batch_reader(batch_size=6) as reader:
                assert np.array_equal(next(iter(reader))["x"].ravel(), np.resize(times, 6 if name == "x" else 18))
