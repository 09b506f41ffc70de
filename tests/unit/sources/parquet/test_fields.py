"""Parquet files as they stand: whoever wrote them, their rows arrive, or the file and column that cannot are named."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import os
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from converter import (
    CacheError,
    DatasetConverter,
    NullValueError,
    ReadError,
    SourceChangedError,
    SourceError,
    UnsupportedTypeError,
    make_parquet_converter,
    places,
)
from converter.cache import leases
from converter.manifest import Manifest
from converter.parsed_footer import ParsedFooter
from converter.reading import gather, windows
from converter.reading.checks import check_file
from converter.storage.directory import FileInfo, Storage
from converter.storage.store import Store
from tests.encrypted import write_encrypted
from tests.known_rows import concatenate, run_python

TIMES = np.array(["1969-12-31T23:59:59.999999", "2026-11-21T01:02:03", "9999-01-01"], "datetime64[us]").tolist()


def write(folder: Path, name: str, columns: dict[str, Any], **options: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / name, **options)
    return folder / name


def read(converter: DatasetConverter, **options: Any) -> dict[str, Any]:
    with converter.make_batch_reader(**{"batch_size": 7} | options) as reader:
        return concatenate(list(reader))


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


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("version", ["1.0", "2.6"])
def test_every_type_arrives(tmp_path: Path, compression: str, dictionary: bool, version: str) -> None:
    columns = {
        "bool": pa.array([True, False, True]),
        "byte": pa.array([-128, 0, 127], pa.int8()),
        "short": pa.array([-(2**15), 0, 2**15 - 1], pa.int16()),
        "int": pa.array([-(2**31), 0, 2**31 - 1], pa.int32()),
        "long": pa.array([-(2**63), 0, 2**63 - 1], pa.int64()),
        "float": pa.array([-1.5, np.inf, 3e38], pa.float32()),
        "double": pa.array([0.1, -np.inf, 1e300], pa.float64()),
        "decimal": pa.array([decimal.Decimal("3.00"), decimal.Decimal("-0.25"), decimal.Decimal("1e9")],
                            pa.decimal128(20, 2)),
        "date": pa.array([dt.date(1, 1, 1), dt.date(1970, 1, 1), dt.date(9999, 12, 31)]),
        "utc": pa.array(TIMES, pa.timestamp("us", tz="UTC")),
        "ms": pa.array([time.replace(microsecond=0) for time in TIMES], pa.timestamp("ms")),
        "text": pa.array(["", "žluťoučký 🐟", "a" * 300]),
        "bytes": pa.array([b"", b"\x00\xff", b"x"]),
        "category": pa.array(["a", "b", "a"]).dictionary_encode(),
        "pair": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int16())),
        "wide": pa.array([[0.1, 2], [3, 4], [5, 6]], pa.large_list(pa.float64())),
        "fixed": pa.array([[1, 2, 3]] * 3, pa.list_(pa.float32(), 3)),
        "flags": pa.array([[True], [False], [True]]),
    }  # fmt: skip
    write(tmp_path, "x.parquet", columns, compression=compression, use_dictionary=dictionary, version=version)
    converter = make_parquet_converter(tmp_path)
    found = read(converter)
    for name in ("bool", "byte", "short", "int", "long", "float"):
        np.testing.assert_array_equal(found[name], columns[name].to_numpy(zero_copy_only=False), strict=True)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found["double"], np.array([0.1, -np.inf, 1e300]).astype("float32"), strict=True)
    np.testing.assert_array_equal(found["decimal"], np.array([3, -0.25, 1e9], "float32"), strict=True)
    np.testing.assert_array_equal(found["date"], np.array(["0001-01-01", "1970-01-01", "9999-12-31"], "datetime64[D]"))
    np.testing.assert_array_equal(found["utc"], np.array(TIMES, "datetime64[us]"), strict=True)
    whole = np.array([time.replace(microsecond=0) for time in TIMES], "datetime64[us]")
    np.testing.assert_array_equal(found["ms"], whole, strict=True)
    assert found["text"].tolist() == ["", "žluťoučký 🐟", "a" * 300]
    assert found["bytes"].tolist() == [b"", b"\x00\xff", b"x"]
    assert found["category"].tolist() == ["a", "b", "a"]
    np.testing.assert_array_equal(found["pair"], np.array([[1, 2], [3, 4], [5, 6]], "int16"), strict=True)
    np.testing.assert_array_equal(found["wide"], np.array([[0.1, 2], [3, 4], [5, 6]], "float32"), strict=True)
    np.testing.assert_array_equal(found["fixed"], np.array([[1, 2, 3]] * 3, "float32"), strict=True)
    np.testing.assert_array_equal(found["flags"], np.array([[True], [False], [True]]), strict=True)
    assert read(make_parquet_converter(tmp_path, float_dtype=None))["double"].tolist() == [0.1, -np.inf, 1e300]


def annotate_as_enum(path: Path, name: str) -> None:
    """Let the footer say ENUM of a column of text: none of the writers here does."""
    raw = path.read_bytes()
    start = len(raw) - 8 - int.from_bytes(raw[-8:-4], "little")
    at = raw.index(bytes([len(name)]) + name.encode(), start)
    # `ConvertedType` 0 becomes 4, and of the union `LogicalType` the first member the fourth.
    for said, wanted in ((b"\x25\x00", b"\x25\x08"), (b"\x4c\x1c\x00\x00", b"\x4c\x4c\x00\x00")):
        at = raw.index(said, at)
        raw = raw[:at] + wanted + raw[at + len(wanted) :]
    path.write_bytes(raw)


def test_the_annotation_tells_text_from_bytes(tmp_path: Path) -> None:
    inner = pa.array([{"key": "k", "dishes": [{"tags": ["x"], "size": {"value": b"v"}}]}])
    links = pa.array([{"url": "x", "label": "y"}])
    columns = {"menu": inner, "links": links, "currency": ["PLN"], "raw": [b"\xff"], "text": ["t"]}
    json_text = pa.array(['{"a": 1}'], pa.json_())
    for name, store_schema in (("a", False), ("b", True)):
        path = write(tmp_path, f"{name}.parquet", columns | {"json": json_text}, store_schema=store_schema)
        annotate_as_enum(path, "currency")
        annotate_as_enum(path, "label")
        assert pq.read_schema(path).field("currency").type in (pa.binary(), pa.string())
    chosen = ["currency", "links.label", "raw", "text", "json", "menu.key"]
    converter = make_parquet_converter(tmp_path, columns=chosen)
    assert [one.dtype for one in converter.schema] == ["str", "str", "bytes", "str", "str", "str"]
    found = read(converter)
    assert [found[name].tolist() for name in chosen] == [
        ["PLN"] * 2, ["y"] * 2, [b"\xff"] * 2, ["t"] * 2, ['{"a": 1}'] * 2, ["k"] * 2
    ]  # fmt: skip
    assert len(converter.where([("json", "=", '{"a": 1}'), ("currency", "=", "PLN")])) == 2


def test_old_spark_times_arrive(tmp_path: Path) -> None:
    write(tmp_path, "x.parquet", {"t": pa.array(TIMES, pa.timestamp("us"))}, use_deprecated_int96_timestamps=True)
    np.testing.assert_array_equal(read(make_parquet_converter(tmp_path))["t"], np.array(TIMES, "datetime64[us]"))


def test_nulls_follow_the_policy(tmp_path: Path) -> None:
    pair = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32()))
    write(tmp_path, "x.parquet", {"id": pa.array([1, None, 3]), "pair": pair, "text": pa.array(["a", None, "c"])})
    converter = make_parquet_converter(tmp_path, shapes={"pair": (2,)})
    for name in ("id", "text", "pair"):
        with pytest.raises(NullValueError, match=f"Column '{name}' holds"):
            read(converter, columns=[name])
    found = read(converter, nulls="mask")
    assert found["id"].tolist() == [1, 0, 3]
    assert found["pair"].tolist() == [[1, 2], [0, 0], [3, 4]]
    assert [found[f"{name}__valid"].tolist() for name in ("id", "pair", "text")] == [[True, False, True]] * 3
    # The footer says how many places are null, and not whether of rows or of elements.
    assert found["pair__element_valid"].tolist() == [[True, True], [False, False], [True, True]]
    assert converter.statistics["pair"].element_mean.tolist() == [2, 3]
    assert [converter.statistics[name].null_count for name in ("id", "pair")] == [1, 1]


def test_columns_without_nulls_in_files_that_do_not_count_them_are_read(tmp_path: Path) -> None:
    write(tmp_path, "x.parquet", {"id": [1, 2, 3]}, write_statistics=False)
    assert read(make_parquet_converter(tmp_path))["id"].tolist() == [1, 2, 3]
    write(tmp_path, "y.parquet", {"id": pa.array([None, 2])}, write_statistics=False)
    with pytest.raises(NullValueError, match="Column 'id' holds 1 null"):
        read(make_parquet_converter(tmp_path))


def test_lists_of_several_lengths_are_ragged(tmp_path: Path) -> None:
    write(tmp_path, "x.parquet", {"x": [[1, 2], [3], [4, 5, 6, 7]]})
    converter = make_parquet_converter(tmp_path)
    assert converter.schema["x"].shape is None
    with pytest.raises(SourceError, match="Column 'x' has rows of different lengths"):
        converter.make_batch_reader()
    found = read(converter, ragged="pad")
    assert found["x"].tolist() == [[1, 2, 0, 0], [3, 0, 0, 0], [4, 5, 6, 7]]
    assert found["x__length"].tolist() == [2, 1, 4]


def test_lists_that_only_seem_to_have_one_length_are_an_error_whose_remedy_works(tmp_path: Path) -> None:
    write(tmp_path, "x.parquet", {"x": [[1, 2], [3], [4, 5, 6]]})
    converter = make_parquet_converter(tmp_path)
    with pytest.raises(
        SourceError, match=r"'x' has a row of [13] values where 2 were expected. Say shapes=\{'x': None"
    ):
        read(converter)
    remedied = make_parquet_converter(tmp_path, shapes={"x": None})
    assert [row.tolist() for row in read(remedied, ragged="nested")["x"]] == [[1, 2], [3], [4, 5, 6]]


def test_declared_shapes_are_given_and_checked(tmp_path: Path) -> None:
    nested = pa.array([[[1, 2, 3], [4, 5, 6]]] * 2, pa.list_(pa.list_(pa.int32())))
    write(tmp_path, "x.parquet", {"flat": [[1.0, 2, 3, 4]] * 2, "nested": nested})
    found = read(make_parquet_converter(tmp_path, shapes={"flat": (2, 2), "nested": (2, 3)}))
    assert found["flat"].tolist() == [[[1, 2], [3, 4]]] * 2
    assert found["nested"].tolist() == [[[1, 2, 3], [4, 5, 6]]] * 2
    for shapes in ({"flat": (5,)}, {"nested": (3, 2)}):
        with pytest.raises(SourceError, match=r"values where . were expected"):
            read(make_parquet_converter(tmp_path, shapes=shapes, columns=list(shapes)))
    undeclared = read(make_parquet_converter(tmp_path, columns=["nested"]), ragged="pad")
    assert undeclared["nested"].tolist() == [[[1, 2, 3], [4, 5, 6]]] * 2


@pytest.mark.parametrize(
    "cuts", [(b"ab", b"\xff\xfe"), (b"ab", b"\xc3", b"\xa9"), (b"x" * 64 + "é".encode()[:1], "é".encode()[1:] + b"x")]
)
def test_text_that_is_no_text_is_named_with_its_file(tmp_path: Path, cuts: tuple[bytes, ...]) -> None:
    offsets = np.cumsum([0, *map(len, cuts)]).astype(np.int32)
    text = pa.Array.from_buffers(pa.string(), len(cuts), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(cuts))])
    write(tmp_path, "a.parquet", {"s": ["right", "", "é"]})
    write(tmp_path, "b.parquet", {"s": text})
    converter = make_parquet_converter(tmp_path)
    for make in (converter.make_batch_reader, converter.make_torch_dataloader):
        match = r"b\.parquet cannot be decoded: column 's' has text that is no UTF-8"
        with pytest.raises(ReadError, match=match), make(batch_size=2) as loader:
            list(loader)


@pytest.mark.parametrize("ragged", ["pad", "nested"])
def test_null_elements_and_inner_lists_as_tensors_of_torch(tmp_path: Path, ragged: str) -> None:
    x = pa.array([[1, None], [3, 4], None], pa.list_(pa.float32()))
    words = pa.array([[1, None, 3], [], [4]], pa.list_(pa.int32()))
    deep = pa.array([[[1], [2, 3]], [], [[4, 5]]], pa.list_(pa.list_(pa.int32())))
    write(tmp_path, "x.parquet", {"x": x, "words": words, "deep": deep})
    converter = make_parquet_converter(tmp_path, shapes={"x": (2,)})
    options: dict[str, Any] = {"nulls": "mask", "ragged": ragged, "batch_size": 3}
    if ragged == "nested":
        match = r"ragged='pad' \(adds 'deep__length' and 'deep__inner_length'\)"
        with pytest.raises(SourceError, match=match), converter.make_torch_dataloader(**options) as loader:
            list(loader)
        options["columns"] = ["x", "words"]
    with converter.make_torch_dataloader(**options) as loader, converter.make_batch_reader(**options) as reader:
        (batch,), (known,) = loader, reader
    assert list(batch) == list(known)
    for name, column in known.items():
        found = [one.numpy() for one in batch[name].unbind()]
        assert [one.tolist() for one in found] == [one.tolist() for one in column]
        assert batch[name].dtype == torch.from_numpy(np.concatenate([one.reshape(-1) for one in column])).dtype


KINDS = [pa.bool_(), pa.int8(), pa.uint8(), pa.uint64(), pa.int64(), pa.float32(), pa.float64(), pa.decimal128(9, 2)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("size", [-1, 2])
def test_null_elements_of_one_shape_follow_the_policy(tmp_path: Path, kind: pa.DataType, size: int) -> None:
    rows = [[1, None], None, [0, 1], [None, None]]
    # The second file has no null, and its row group the same keys and shapes.
    for name, part in (("a", rows), ("b", [[1, 1], [0, 0]])):
        typed = [None if row is None else [None if one is None else bool(one) for one in row] for row in part]
        lists = pa.array(typed if kind == pa.bool_() else part, pa.list_(kind, size))
        write(tmp_path, f"{name}.parquet", {"id": np.arange(len(part)), "x": lists})
    converter = make_parquet_converter(tmp_path, shapes={"x": (2,)})
    with pytest.raises(NullValueError, match=r"Column 'x' (holds 1 null|has arrays with null elements).*a\.parquet"):
        read(converter)
    valid = [[True, False], [False, False], [True, True], [False, False], [True, True], [True, True]]
    for options in ({}, {"shuffle": True, "seed": 3}, {"batch_size": 1}):
        found = read(converter, nulls="mask", **options)
        order = np.argsort([*(found["id"][:4] + 0), *(found["id"][4:] + 4)]) if not options.get("shuffle") else None
        assert found["x__element_valid"].dtype == bool
        assert found["x"].shape == found["x__element_valid"].shape == (6, 2)
        assert not found["x"][~found["x__element_valid"]].any()
        if order is not None:
            assert found["x__valid"].tolist() == [True, False, True, True, True, True]
            assert found["x__element_valid"].tolist() == valid
            assert found["x"].tolist() == [[1, 0], [0, 0], [0, 1], [0, 0], [1, 1], [0, 0]]
    filled = read(converter, nulls={"x": 1})
    assert "x__valid" not in filled
    assert filled["x"].tolist() == [[1, 1], [1, 1], [0, 1], [1, 1], [1, 1], [0, 0]]
    assert read(converter, nulls={"x": [0, 1]})["x"].tolist()[:2] == [[1, 1], [0, 1]]
    known = converter.statistics["x"]
    assert (known.null_count, known.min, known.max, known.element_mean) == (1, 0, 1, None)
    assert known.mean == 4 / 7


def test_null_elements_of_nested_lists_follow_the_policy(tmp_path: Path) -> None:
    rows = [[[1, 2, 3], None], None, [[4, None, 6], [7, 8, 9]]]
    write(tmp_path, "x.parquet", {"x": pa.array(rows, pa.list_(pa.list_(pa.int32())))})
    converter = make_parquet_converter(tmp_path, shapes={"x": (2, 3)})
    found = read(converter, nulls="mask")
    assert found["x"].tolist() == [[[1, 2, 3], [0] * 3], [[0] * 3] * 2, [[4, 0, 6], [7, 8, 9]]]
    assert found["x__element_valid"].tolist() == (found["x"] != 0).tolist()
    assert read(converter, nulls={"x": -1})["x"].tolist() == [
        [[1, 2, 3], [-1] * 3], [[-1] * 3] * 2, [[4, -1, 6], [7, 8, 9]]
    ]  # fmt: skip
    with pytest.raises(SourceError, match="'x' has a row of 3 values where 2 were expected"):
        read(make_parquet_converter(tmp_path, shapes={"x": (2, 2)}), nulls="mask")
    # As rows that may differ an inner list that is null has no length.
    with pytest.raises(NullValueError, match="'x' has arrays whose inner arrays are null"):
        read(make_parquet_converter(tmp_path), nulls="mask", ragged="pad")


@pytest.mark.parametrize("options", [{}, {"batch_size": 1}, {"batch_size": 2}])
def test_null_elements_of_ragged_rows_follow_the_policy(tmp_path: Path, options: Any) -> None:
    write(tmp_path, "a.parquet", {"x": pa.array([[1, None, 3], None, []], pa.list_(pa.int16()))})
    write(tmp_path, "b.parquet", {"x": pa.array([[5], [6, 7]], pa.list_(pa.int16()))})
    converter = make_parquet_converter(tmp_path)
    for nulls, said in (("raise", "holds 1 null, and nulls='raise'"), ({"x": 9}, "holds 1 null, for which no number")):
        with pytest.raises(NullValueError, match=f"'x' {said}"):
            read(converter, ragged="pad", nulls=nulls)
    with converter.make_batch_reader(**{"batch_size": 5} | options, ragged="pad", nulls="mask") as reader:
        batches = list(reader)
    assert {tuple(batch) for batch in batches} == {("x", "x__length", "x__valid", "x__element_valid")}
    assert all(batch["x"].shape == batch["x__element_valid"].shape for batch in batches)
    pairs = [pair for batch in batches for pair in zip(batch["x"], batch["x__element_valid"], strict=True)]
    values = [row[valid].tolist() for row, valid in pairs]
    assert values == [[1, 3], [], [], [5], [6, 7]]
    assert [size for batch in batches for size in batch["x__length"].tolist()] == [3, 0, 0, 1, 2]
    nested = read(converter, ragged="nested", nulls="mask", **options)
    assert [row.tolist() for row in nested["x"]] == [[1, 0, 3], [], [], [5], [6, 7]]
    assert [row.tolist() for row in nested["x__element_valid"]] == [[True, False, True], [], [], [True], [True, True]]
    # What an empty row is not.
    assert nested["x__valid"].tolist() == [True, False, True, True, True]
    known = converter.statistics["x"]
    assert (known.null_count, known.shortest, known.longest, known.min, known.max) == (1, 0, 3, 1, 7)


def test_a_number_stands_for_null_elements_of_ragged_rows(tmp_path: Path) -> None:
    write(tmp_path, "a.parquet", {"x": pa.array([[1, None, 3], [], [None]], pa.list_(pa.int16()))})
    converter = make_parquet_converter(tmp_path)
    with pytest.raises(NullValueError, match=r"'x' has arrays with null elements.*or nulls=\{'x': 0\}"):
        read(converter, ragged="pad")
    assert read(converter, ragged="pad", nulls={"x": 9})["x"].tolist() == [[1, 9, 3], [0, 0, 0], [9, 0, 0]]


def test_lists_whose_elements_cannot_be_null_have_a_mask_of_their_rows(tmp_path: Path) -> None:
    kind = pa.list_(pa.field("element", pa.float32(), nullable=False))
    write(tmp_path, "x.parquet", {"x": pa.array([[1, 2], None, [3, 4]], kind)})
    found = read(make_parquet_converter(tmp_path, shapes={"x": (2,)}), nulls="mask")
    assert found["x__valid"].tolist() == [True, False, True]
    assert "x__element_valid" not in found


JAGGED = [[[1], [2, 3]], [], [[4, 5], [6, 7]], None, [[], [8]], [[9]]]


@pytest.mark.parametrize("batch_size", [1, 2, 6])
@pytest.mark.parametrize("nulls", [False, True])
def test_inner_lists_of_different_lengths_follow_the_policy(tmp_path: Path, batch_size: int, nulls: bool) -> None:
    rows: Any = [row or [] for row in JAGGED]
    if nulls:
        rows = [[[None if one in (3, 9) else one for one in inner] for inner in row] for row in rows]
        rows[3] = None
    for name, part in (("a", rows[:2]), ("b", rows[2:])):
        write(tmp_path, f"{name}.parquet", {"x": pa.array(part, pa.list_(pa.list_(pa.int32())))})
    converter = make_parquet_converter(tmp_path)
    policy = {"nulls": "mask"} if nulls else {}
    with converter.make_batch_reader(batch_size=batch_size, ragged="pad", **policy) as reader:
        batches = list(reader)
    # The second file alone has a null, and an empty list counts as one.
    keys = ("x", "x__length", "x__inner_length", "x__valid", "x__element_valid")
    assert {tuple(batch) for batch in batches} == {keys if nulls else keys[:3]}
    found = []
    for batch in batches:
        assert batch["x"].shape[:2] == batch["x__inner_length"].shape
        for row, box, inner in zip(batch["x"], batch["x__length"], batch["x__inner_length"], strict=True):
            found.append([row[place, :size].tolist() for place, size in enumerate(inner[: box[0]])])
            assert not row[np.arange(row.shape[1]) >= inner[:, None]].any()
        if nulls:
            is_there = np.arange(batch["x"].shape[2]) < batch["x__inner_length"][..., None]
            np.testing.assert_array_equal(batch["x__element_valid"], is_there & (batch["x"] != 0))
    expected = [[[one or 0 for one in inner] for inner in row or []] for row in rows]
    assert found == expected
    nested = read(converter, batch_size=batch_size, ragged="nested", **policy)
    for name in ("x", "x__element_valid")[: 1 + nulls]:
        listed = [[inner.tolist() for inner in row] for row in nested[name]]
        assert listed == (
            expected if name == "x" else [[[one != 0 for one in inner] for inner in row] for row in expected]
        )
    assert (converter.statistics["x"].min, converter.statistics["x"].longest) == (1, 4)
    shuffled = read(converter, shuffle=True, seed=1, ragged="nested", **policy)["x"]
    assert sorted([inner.tolist() for inner in row] for row in shuffled) == sorted(expected)


def test_what_is_added_for_inner_lists_takes_nobodys_name(tmp_path: Path) -> None:
    nested = pa.array([[[1], [2, 3]]], pa.list_(pa.list_(pa.int32())))
    write(tmp_path, "x.parquet", {"x": nested, "x__inner_length": [1]})
    with pytest.raises(ValueError, match="'x__inner_length' is a column already, and would be added for 'x'"):
        read(make_parquet_converter(tmp_path), ragged="pad")


@pytest.mark.parametrize("way", ["column", "list", "filter", "dictionary"])
def test_unsigned_numbers_of_64_bits_are_int64_where_they_fit(tmp_path: Path, way: str) -> None:
    def put(values: list[int]) -> DatasetConverter:
        column = pa.array(
            [[one, 0] for one in values] if way == "list" else values, pa.list_(kind) if way == "list" else kind
        )
        column = column.dictionary_encode() if way == "dictionary" else column
        write(tmp_path, "x.parquet", {"id": np.arange(len(values)), "u": column})
        return make_parquet_converter(tmp_path)

    kind, most = pa.uint64(), 2**63 - 1
    converter = put([0, most, 5])
    assert converter.schema["u"].dtype == "int64"
    found = read(converter)["u"]
    assert found.dtype == np.int64
    assert found.tolist() == ([[0, 0], [most, 0], [5, 0]] if way == "list" else [0, most, 5])
    if way != "list":
        # Its bounds in the footer are unsigned numbers.
        assert read(converter.where([("u", ">", 5)]))["id"].tolist() == [1]
        assert read(converter.where(pc.field("u") >= most))["id"].tolist() == [1]
        assert (converter.statistics["u"].min, converter.statistics["u"].max) == (0, most)
    converter = put([0, 2**64 - 1, 5])
    with pytest.raises(
        SourceError, match=r"Column 'u' has the unsigned number 18446744073709551615.*x\.parquet"
    ) as caught:
        read(converter.where([("u", "<", 5)]) if way == "filter" else converter)
    assert caught.value.column == "u"
    assert str(caught.value.path).endswith("x.parquet")


def test_columns_are_chosen_beside_ones_that_have_no_tensor_form(tmp_path: Path) -> None:
    struct = pa.array([{"a": 1, "b": [1, 2]}] * 2)
    mapped = pa.array([[("k", 1)]] * 2, pa.map_(pa.string(), pa.int32()))
    write(
        tmp_path, "x.parquet", {"s": struct, "id": [1, 2], "m": mapped, "t.a": [3, 4], "u": np.array([1, 2], "m8[s]")}
    )
    with pytest.raises(UnsupportedTypeError, match="2 columns cannot become tensors") as raised:
        make_parquet_converter(tmp_path)
    assert all(f"'{name}' has type" in str(raised.value) for name in ("m", "u"))
    found = read(make_parquet_converter(tmp_path, columns=["t.a", "s.b", "s.a"]))
    expected = {"t.a": [3, 4], "s.b": [[1, 2], [1, 2]], "s.a": [1, 1]}
    assert {name: column.tolist() for name, column in found.items()} == expected
    write(tmp_path, "x.parquet", {"s": struct, "s.a": [3, 4]})
    with pytest.raises(SourceError, match=r"several columns called 's\.a'"):
        make_parquet_converter(tmp_path)


def test_files_of_other_columns_are_named(tmp_path: Path) -> None:
    write(tmp_path, "a.parquet", {"id": [1], "x": [1.0]})
    write(tmp_path, "b.parquet", {"id": [1], "x": ["text"]})
    with pytest.raises(SourceError, match=r"b\.parquet has other columns than .*a\.parquet: 'x' is string, and double"):
        make_parquet_converter(tmp_path)


@pytest.mark.parametrize("inside", ["", "part=1", "deep/er"])
def test_a_delta_table_is_refused_by_name(tmp_path: Path, inside: str) -> None:
    (tmp_path / "_delta_log").mkdir()
    write(tmp_path / inside, "x.parquet", {"id": [1]})
    for path in (tmp_path, tmp_path / inside, tmp_path / inside / "x.parquet"):
        with pytest.raises(SourceError, match=f"file://{tmp_path} is a Delta table: its files also hold rows"):
            make_parquet_converter(path)


def test_what_is_not_there_or_no_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=rf"^file://{tmp_path}/nowhere does not exist\.$"):
        make_parquet_converter(tmp_path / "nowhere")
    with pytest.raises(SourceError, match=r"nowhere/x\.parquet does not exist\.$"):
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
    with pytest.raises(SourceError, match="has no rows"):
        make_parquet_converter(tmp_path / "none")


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"columns": ["idd"]}, ValueError, r"columns: There is no column 'idd'\. Did you mean 'id'\?"),
        ({"columns": "id"}, TypeError, "columns must be a list of names, got 'id'"),
        ({"columns": []}, TypeError, "columns must be a list of names"),
        ({"shapes": {"no": (2,)}}, ValueError, "shapes: There is no column 'no'"),
        ({"shapes": {"id": (2,)}}, ValueError, "shapes names the column 'id', which is no array"),
        ({"shapes": {"id": (-2,)}}, ValueError, r"shapes\['id'\] must be a tuple of sizes above 0"),
        ({"float_dtype": "float16"}, ValueError, "float_dtype must be"),
        ({"storage_options": [1]}, TypeError, "storage_options must be a dict"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, options: Any, kind: Any, match: str) -> None:
    write(tmp_path, "x.parquet", {"id": [1, 2]})
    with pytest.raises(kind, match=match):
        make_parquet_converter(tmp_path, **options)


def test_no_path_is_refused() -> None:
    for value in ([], None, 5, {}, [5], [b"x"], b"x"):
        with pytest.raises(TypeError, match="make_parquet_converter needs a path"):
            make_parquet_converter(value)  # type: ignore[arg-type]


def test_files_that_change_are_noticed(tmp_path: Path) -> None:
    path = write(tmp_path, "x.parquet", {"id": np.arange(100)})
    converter = make_parquet_converter(tmp_path)
    write(tmp_path, "x.parquet", {"id": np.arange(101)})
    with pytest.raises(SourceChangedError, match=r"x\.parquet has .* bytes instead of"):
        read(converter)
    path.unlink()
    with pytest.raises(SourceChangedError, match=r"x\.parquet is not there"):
        read(converter)


def test_a_flipped_bit_is_found_where_checksums_were_written(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 2**60, 5000)
    path = write(tmp_path, "x.parquet", {"id": values}, write_page_checksum=True, compression="none",
                 use_dictionary=False)  # fmt: skip
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(bytes(damaged))
    converter = make_parquet_converter(tmp_path)
    assert (read(converter)["id"] != values).sum() == 1
    with pytest.raises(ReadError, match=r"Row group 0 of .*x\.parquet cannot be decoded"):
        read(converter, verify_checksums=True)


def test_the_fingerprint_is_of_the_files_and_the_columns(tmp_path: Path) -> None:
    write(tmp_path / "a", "x.parquet", {"id": [1, 2], "x": [1.0, 2.0]})
    write(tmp_path / "b", "x.parquet", {"id": [1, 2], "x": [1.0, 2.0]})
    write(tmp_path / "c", "x.parquet", {"id": [1, 3], "x": [1.0, 2.0]})
    one, two, three = (make_parquet_converter(tmp_path / name) for name in "abc")
    assert one.fingerprint == two.fingerprint != three.fingerprint
    assert make_parquet_converter(tmp_path / "a", columns=["id"]).fingerprint != one.fingerprint


def test_a_copy_reads_the_same_rows(tmp_path: Path) -> None:
    write(tmp_path, "x.parquet", {"id": np.arange(50)}, row_group_size=10)
    converter = make_parquet_converter(tmp_path)
    copy = pickle.loads(pickle.dumps(converter.where([("id", ">", 24)])))
    assert read(copy)["id"].tolist() == list(range(25, 50))
    parts = converter.split({"train": 0.8, "val": 0.2})
    assert sorted([*read(parts["train"])["id"], *read(parts["val"])["id"]]) == list(range(50))
    assert len(parts["val"]) == 10


def test_filters_compare_as_the_column_is(tmp_path: Path) -> None:
    numbers = np.arange(20_000_000, 20_000_200)
    columns = {
        "double": np.arange(200) / 10, "long": numbers, "int": numbers.astype("int32"),
        "zero": np.where(np.arange(200) % 2, 0.0, -0.0).astype("float32"),
        "some": pa.array([None if row % 4 == 0 else row for row in range(200)]),
    }  # fmt: skip
    write(tmp_path, "x.parquet", columns, row_group_size=50)
    converter = make_parquet_converter(tmp_path)
    for filters, expected in (
        ([("double", "=", 0.1)], 1), ([("double", ">", 0.1)], 198), ([("double", "<=", 0.1)], 2),
        ([("double", "in", [0.1, 0.3, 7])], 3), ([("long", "<", 2.00001e7)], 100), ([("int", "<", 2.00001e7)], 100),
        ([("long", "<", np.float64(20_000_100))], 100), ([("long", "<", 20_000_000.5)], 1), ([("int", "=", 2e7)], 1),
        ([("zero", "=", 0.0)], 200), ([("zero", "in", [0.0])], 200), ([("some", "in", [None, 3, 5])], 2),
        ([("some", "not in", [3])], 149), ([("long", "<", float("inf"))], 200),
    ):  # fmt: skip
        assert len(converter.where(filters)) == expected, filters
    for nothing in ([("zero", "not in", [0.0])], [("some", "not in", [None, 3])], [("some", "=", None)]):
        with pytest.raises(SourceError, match="No row of"):
            converter.where(nothing)


def put(url: str, ids: list[int]) -> None:
    """A file of plain pages: others of as many numbers have the same size and the same footer."""
    content = io.BytesIO()
    pq.write_table(pa.table({"id": ids}), content, compression="none", use_dictionary=False, write_statistics=False)
    fsspec.filesystem("memory").pipe_file(url.removeprefix("memory:/"), content.getvalue())


def test_what_a_host_keeps_is_of_the_file_that_was_looked_at(tmp_path: Path) -> None:
    put("memory://kept/day=1/a.parquet", [1, 2, 5])
    with make_parquet_converter("memory://kept") as before:
        assert read(before, local_cache_dir=tmp_path)["id"].tolist() == [1, 2, 5]
        put("memory://kept/day=1/a.parquet", [1, 4, 5])
        with make_parquet_converter("memory://kept") as after:
            assert read(after, local_cache_dir=tmp_path)["id"].tolist() == [1, 4, 5]
            assert read(after)["id"].tolist() == [1, 4, 5]
        assert read(before, local_cache_dir=tmp_path)["id"].tolist() == [1, 2, 5]
        with pytest.raises(SourceChangedError, match=r"a\.parquet was written again since it was looked at"):
            read(before)


@pytest.mark.parametrize("num_rows", [2, 5000])
def test_a_remote_file_of_another_size_is_no_damaged_one(tmp_path: Path, num_rows: int) -> None:
    put(f"memory://size{num_rows}/a.parquet", list(range(3000)))
    with make_parquet_converter(f"memory://size{num_rows}") as converter:
        put(f"memory://size{num_rows}/a.parquet", list(range(num_rows)))
        for look in (read, lambda one: read(one, local_cache_dir=tmp_path), lambda one: one.statistics):
            with pytest.raises(SourceChangedError, match=r"a\.parquet "):
                look(converter)


@pytest.mark.parametrize(("num_workers", "processes_count"), [(0, 3), (2, 6)])
def test_ranks_and_their_workers_share_a_line(
    num_workers: int, processes_count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = tmp_path / "said"

    def share_line(_: Store, count: int) -> None:
        # In a file, as worker processes say it too.
        with said.open("a") as file:
            file.write(f"{count}\n")

    monkeypatch.setattr(Store, "share_line", share_line)
    put("memory://shared/f0.parquet", list(range(12)))
    with (
        make_parquet_converter("memory://shared") as converter,
        converter.make_torch_dataloader(
            batch_size=2,
            cur_shard=1,
            shard_count=3,
            num_workers=num_workers,
            multiprocessing_context="fork" if num_workers else None,
        ) as loader,
    ):
        assert len(list(loader)) == 2
    assert set(said.read_text().split()) == {str(processes_count)}


def test_what_a_line_does_not_take_at_once_is_asked_for_window_by_window(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        put(f"memory://windows/f{number:02d}.parquet", list(range(5 * number, 5 * number + 5)))
    with make_parquet_converter("memory://windows") as converter:
        monkeypatch.setattr("converter.storage.requests._SLOW_BYTES_PER_SECOND", 1e-9)
        monkeypatch.setattr("converter.storage.requests._TIME_USED", 0)
        read_range, asked = Store.read_range, []

        def read_slowly(store: Store, path: str, start: int, *arguments: Any) -> Any:
            # Not the footers, which begin with the file where it is this small.
            if start:
                asked.append(int(path[-10:-8]) // 5)
            time.sleep(0.002)
            return read_range(store, path, start, *arguments)

        monkeypatch.setattr(Store, "read_range", read_slowly)
        with converter.make_torch_dataloader(batch_size=25, shuffle_window_rows=25, prefetch_batches=6) as batches:
            assert [batch["id"].tolist() for batch in batches] == [list(range(at, at + 25)) for at in range(0, 150, 25)]
    assert len(asked) == 30
    # Threads that began one after the other may arrive the other way round, but never far from it.
    assert all(window <= number // 5 + 1 for number, window in enumerate(asked)), asked


class Hanging:
    """Requests of Parquet's data that hang from some moment on, and whose they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.is_over = threading.Event(), threading.Event()
        self.asked: list[tuple[str, int]] = []
        read_range = Store.read_range

        def read(store: Store, path: str, start: int, end: int, given_up: threading.Event | None = None) -> Any:
            self.asked.append((path, start))
            if self.has_begun.is_set():
                store.ask(lambda _: self.is_over.wait(60), path=path, given_up=given_up)
            return read_range(store, path, start, end, given_up)

        monkeypatch.setattr(Store, "read_range", read)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    found = Hanging(monkeypatch)
    yield found
    found.is_over.set()


def test_a_footer_is_asked_for_once_also_where_more_files_are_on_their_way_than_are_kept_open(
    monkeypatch: pytest.MonkeyPatch, hanging: Hanging
) -> None:
    for number in range(60):
        put(f"memory://many/f{number:02d}.parquet", [number])
    with make_parquet_converter("memory://many") as converter:
        monkeypatch.setattr("converter.reading.data_files._MAX_OPEN_FILES", 5)
        hanging.asked.clear()
        ids = read(converter, shuffle_window_rows=10, prefetch_batches=8, workers_count=4)["id"]
        assert ids.tolist() == list(range(60))
    assert sorted(hanging.asked) == sorted((f"/many/f{n:02d}.parquet", start) for n in range(60) for start in (0, 4))


def test_who_waits_for_a_file_that_cannot_be_opened_does_not_try_again(hanging: Hanging) -> None:
    content = io.BytesIO()
    pq.write_table(pa.table({"id": range(60)}), content, row_group_size=1)
    fsspec.filesystem("memory").pipe_file("/one/a.parquet", content.getvalue())
    with make_parquet_converter("memory://one", timeout_seconds=2) as converter:
        hanging.asked.clear()
        hanging.has_begun.set()
        with pytest.raises(ReadError, match=r"a\.parquet could not be reached for 2 seconds"):
            read(converter, batch_size=1, shuffle_window_rows=1, prefetch_batches=8, workers_count=4)
    # Who comes later than that asks once more.
    assert len(hanging.asked) <= 3


def test_a_store_that_is_away_costs_no_copy(tmp_path: Path, hanging: Hanging) -> None:
    for number in range(20):
        put(f"memory://copied/f{number:02d}.parquet", [number])
    with make_parquet_converter("memory://copied", timeout_seconds=1) as converter:
        read(converter, local_cache_dir=tmp_path)
        copies = sorted(tmp_path.glob("*/*/rows-*"))
        assert len(copies) == 20
        copies.pop().unlink()
        hanging.asked.clear()
        hanging.has_begun.set()
        with pytest.raises(ReadError, match=r"\.parquet cannot be fetched: .*could not be reached for 1 seconds"):
            read(converter, local_cache_dir=tmp_path)
    assert sorted(tmp_path.glob("*/*/rows-*")) == copies
    assert len(hanging.asked) == 1


@pytest.mark.parametrize("instead", ["nothing", "a file"])
def test_a_local_cache_that_somebody_removes_costs_no_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, instead: str
) -> None:
    kept = tmp_path / "kept"
    for number in range(20):
        put(f"memory://removed/f{number:02d}.parquet", [number])
    with (
        make_parquet_converter("memory://removed") as converter,
        converter.make_batch_reader(batch_size=1, shuffle_window_rows=1, local_cache_dir=kept) as reader,
    ):
        found = []
        for batch in reader:
            if not found:
                # Not file by file, as new ones appear meanwhile.
                kept.rename(tmp_path / "elsewhere")
                if instead == "a file":
                    kept.touch()
            found += batch["id"].tolist()
        assert found == list(range(20))
    assert "what does not fit is fetched each time" in caplog.text


def leave_an_iterator_unfinished() -> None:
    """In a process of its own, whose end follows."""
    for number in range(300):
        put(f"memory://left/f{number:03d}.parquet", [number])
    hanging = Hanging(pytest.MonkeyPatch())
    converter = make_parquet_converter("memory://left", timeout_seconds=600)
    reader = converter.make_batch_reader(batch_size=4, shuffle_window_rows=8, prefetch_batches=16)
    globals()["kept"] = iterator = iter(reader)
    next(iterator)
    hanging.has_begun.set()


def test_the_interpreters_end_does_not_wait_for_a_store_that_hangs() -> None:
    run_python(leave_an_iterator_unfinished)


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


def test_a_footer_is_read_once_where_a_filter_looks_at_its_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a.parquet", {"id": range(300), "x": [1, 2, 3] * 100}, row_group_size=3)
    looked_at: list[int] = []

    def check(storage: Storage, manifest: Manifest, file: int, opened: pa.NativeFile) -> ParsedFooter:
        looked_at.append(file)
        return check_file(storage, manifest, file, opened)

    monkeypatch.setattr("converter.reading.data_files.check_file", check)
    monkeypatch.setattr("converter.reading.looks.check_file", check)
    with make_parquet_converter(tmp_path) as converter:
        assert len(converter.where([("x", "=", 2)])) == 100
        # One for the bounds and one for the rows, and of several threads those that came first.
        assert len(looked_at) < 12


def test_files_of_two_stores_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "a.parquet", {"id": [1, 2]})
    put(f"memory:/{tmp_path}/a.parquet", [3, 4])
    for urls in ([str(tmp_path), f"memory:/{tmp_path}"], [f"memory:/{tmp_path}", str(tmp_path)]):
        with pytest.raises(SourceError, match=r"are on two stores\. Make a converter of each"):
            make_parquet_converter(urls)


def test_a_file_that_was_written_again_is_noticed_though_its_footer_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "a.parquet", {"id": [1, 2, 5]})
    converter = make_parquet_converter(tmp_path)
    pickled = pickle.dumps(converter)
    before, content_before = file.stat(), file.read_bytes()
    write(tmp_path, "a.parquet", {"id": [1, 4, 5]})
    assert len(file.read_bytes()) == len(content_before)
    for look in (read, lambda one: one.where([("id", ">", 0)]), lambda one: one.statistics):
        for one in (converter, pickle.loads(pickled)):
            with pytest.raises(SourceChangedError, match=r"a\.parquet was written again since it was looked at"):
                look(one)
    file.write_bytes(content_before)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read(converter)["id"].tolist() == [1, 2, 5]
    # Elsewhere the same files may have been written at another time.
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    monkeypatch.setattr(leases, "this_host", lambda: "another")
    assert read(pickle.loads(pickled))["id"].tolist() == [1, 2, 5]


def test_a_column_and_a_member_of_one_name_in_two_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "0.parquet", {"id": [0, 1], "a.b": [7, 8]})
    write(tmp_path, "1.parquet", {"id": [2, 3], "a": [{"b": 1}, {"b": 2}]})
    with pytest.raises(
        SourceError, match=r"1\.parquet has other columns than .*0\.parquet: 'a\.b' is \[a\]\.\[b\], and"
    ):
        make_parquet_converter(tmp_path)
    assert len(make_parquet_converter(tmp_path, columns=["id"])) == 4


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


@pytest.mark.parametrize("plaintext_footer", [True, False])
def test_encrypted_columns_are_refused_by_name(tmp_path: Path, plaintext_footer: bool) -> None:
    write_encrypted(tmp_path / "x.parquet", {"a": [1, 2], "b": [3, 4]}, plaintext_footer=plaintext_footer)
    for columns in (None, ["b"]):
        with pytest.raises(SourceError, match=rf"{tmp_path}/x\.parquet .*encrypted"):
            make_parquet_converter(tmp_path, columns=columns)


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


def test_times_that_microseconds_cannot_count_are_named(tmp_path: Path) -> None:
    write(tmp_path, "a.parquet", {"t": pa.array([0, 2**62, None], pa.timestamp("ms"))})
    converter = make_parquet_converter(tmp_path)
    with pytest.raises(SourceError, match="Column 't' has times that microseconds cannot count"):
        read(converter, nulls="mask")


@pytest.mark.parametrize("shapes", [None, {"x": None}, {"x": (2,)}])
def test_null_elements_are_said_whatever_the_shape(tmp_path: Path, shapes: Any) -> None:
    write(tmp_path, "a.parquet", {"x": [[1, None], [2]]})
    with pytest.raises((NullValueError, SourceError), match=r"null elements|row of 1 values"):
        read(make_parquet_converter(tmp_path, shapes=shapes), ragged="pad")


def test_a_list_that_holds_nan_finds_it_though_no_footer_does(tmp_path: Path) -> None:
    x = np.arange(100.0)
    x[[5, 77]] = np.nan
    write(tmp_path, "x.parquet", {"x": x}, row_group_size=10)
    with make_parquet_converter(tmp_path, float_dtype=None) as converter:
        for listed, left in (([np.nan], [5, 77]), ([30.0, float("nan")], [5, 30, 77]), ([30.0], [30])):
            part = converter.where([("x", "in", listed)])
            np.testing.assert_array_equal(read(part)["x"], x[left])
        assert len(converter.where([("x", "not in", [30.0])])) == 99


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


def test_what_is_added_takes_nobodys_name_and_no_batch_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "x.parquet", {"x": pa.array([1, None]), "__valid": [1, 2]})
    converter = make_parquet_converter(tmp_path)
    with pytest.raises(ValueError, match="'__valid' is a column already, and would be added by uneven='pad'"):
        converter.make_batch_reader(uneven="pad", nulls="mask")
    with pytest.raises(ValueError, match="with_row_index: 'x__valid' is a column already"):
        converter.make_batch_reader(columns=["x"], nulls="mask", with_row_index="x__valid")
    with pytest.raises(ValueError, match="so an epoch has no batch, for ever with num_epochs=None"):
        converter.make_batch_reader(nulls="mask", batch_size=3, drop_last=True, num_epochs=None)
    converter.make_batch_reader(nulls="mask", batch_size=3, drop_last=True)
    assert "so an epoch has no batch" in caplog.text


def test_a_stack_says_which_integers_may_be_rounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "x.parquet", {"i": [1, 2], "wide": [2**60, 1], "y": np.array([0.5, 1], "float32")})
    converter = make_parquet_converter(tmp_path)
    with caplog.at_level("INFO", logger="converter"):
        converter.make_batch_reader(stack={"s": ["i", "wide", "y"]})
    assert "Stack 's' makes float32 of columns whose integers may be beyond 16777216" in caplog.text
    for stack in ({3: ["i"]}, {"s": [1]}, {"": ["i"]}):
        with pytest.raises(TypeError, match="stack: "):
            converter.make_batch_reader(stack=stack)


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


def test_filters_of_kinds_that_arrow_does_not_compare(tmp_path: Path) -> None:
    columns = {
        "id": [0, 1, 2],
        "price": pa.array([decimal.Decimal("1.50"), decimal.Decimal("2.00"), decimal.Decimal("3.25")]),
        "day": [dt.date(2020, 1, 1), dt.date(2020, 1, 2), dt.date(2020, 1, 3)],
        "text": ["日本" * 20, "ü" * 65, "z"],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    noon = dt.datetime(2020, 1, 2, 12, tzinfo=dt.timezone.utc)
    with make_parquet_converter(tmp_path) as converter:
        for filters, expected in (
            ([("price", ">", 1)], [0, 1, 2]),
            ([("price", "==", 2)], [1]),
            ([("price", "<=", 2)], [0, 1]),
            ([("day", "in", [noon, dt.date(2020, 1, 3)])], [2]),
            ([("day", "in", [noon.replace(hour=0)])], [1]),
            ([("day", "not in", [noon])], [0, 1, 2]),
            ([("text", "in", ["日本" * 20])], [0]),
            ([("text", "not in", ["日本" * 20, "ü" * 65])], [2]),
            (pc.field("text").isin(["ü" * 65]), [1]),
        ):
            assert read(converter.where(filters))["id"].tolist() == expected, filters
        with pytest.raises(SourceError, match=r"No row of .* passes the filters given"):
            converter.where(pc.field("text").isin(["本" * 90]))


def test_a_store_that_is_away_is_not_the_files_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    put("memory://away/f0.parquet", [1])

    def hang(*_: Any, **__: Any) -> Any:
        raise TimeoutError("no answer")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", hang)
    with pytest.raises(
        SourceError, match=r"f0\.parquet cannot be read: .*could not be reached for 0\.3 seconds"
    ) as caught:
        make_parquet_converter("memory://away", timeout_seconds=0.3)
    assert "no Parquet file" not in str(caught.value)


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


def test_rows_of_a_file_that_is_written_into_meanwhile_are_not_handed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"id": range(1000)}), tmp_path / "a.parquet")
    content, gathered = (tmp_path / "a.parquet").read_bytes(), gather.gather

    def gather_and_write(*arguments: Any) -> Any:
        found = gathered(*arguments)
        with open(tmp_path / "a.parquet", "r+b") as file:
            file.write(content)
        return found

    with (
        make_parquet_converter(tmp_path) as converter,
        converter.make_batch_reader(batch_size=10) as reader,
    ):
        monkeypatch.setattr(windows, "gather", gather_and_write)
        with pytest.raises(SourceChangedError, match=r"a\.parquet was written again"):
            next(iter(reader))


def test_a_list_of_structs_says_how_its_values_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path, "x.parquet", {"items": [[{"price": 1.5}]]})
    remedy = r"leave it out with columns=…, or read it with Spark and call make_spark_converter, whose error gives"
    with pytest.raises(UnsupportedTypeError, match=rf"(?s)'items' has type list<.*{remedy} the expressions"):
        make_parquet_converter(path)


def test_the_columns_are_named_in_order(tmp_path: Path) -> None:
    converter = make_parquet_converter(write(tmp_path, "x.parquet", {"b": [1], "a": [2]}))
    assert converter.columns == ("b", "a")


def test_head_is_the_first_rows_whatever_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {
        "id": np.arange(10),
        "text": ["a", None] * 5,
        "count": pa.array([None, *range(9)], pa.int32()),
        "rows": [[1.0], [2.0, 3.0]] * 5,
        "day": pa.array([dt.date(2026, 1, 1)] * 10),
    }
    converter = make_parquet_converter(write(tmp_path, "x.parquet", columns, row_group_size=2))
    # Whatever shard this process is, and however the rows are divided elsewhere.
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    found = converter.head(3)
    assert list(found) == ["id", "text", "text__valid", "count", "count__valid", "rows", "day"]
    assert found["id"].tolist() == [0, 1, 2]
    assert found["text"][[0, 2]].tolist() == ["a", "a"]
    assert found["text__valid"].tolist() == [True, False, True]
    assert found["count"].tolist() == [0, 0, 1]
    assert found["count__valid"].tolist() == [False, True, True]
    assert [row.tolist() for row in found["rows"]] == [[1.0], [2.0, 3.0], [1.0]]
    assert found["day"].dtype == "datetime64[D]"
    assert len(converter.head()["id"]) == 5
    assert converter.head(10**12)["id"].tolist() == list(range(10))


def test_head_of_a_part_is_its_own_first_rows(tmp_path: Path) -> None:
    converter = make_parquet_converter(write(tmp_path, "x.parquet", {"id": np.arange(100)}, row_group_size=10))
    assert converter.where([("id", ">=", 37), ("id", "!=", 39)]).head(3)["id"].tolist() == [37, 38, 40]
    for part in converter.split({"train": 0.8, "val": 0.2}).values():
        assert part.head(4)["id"].tolist() == read(part)["id"].tolist()[:4]


def test_head_reads_no_row_group_that_it_does_not_need(tmp_path: Path) -> None:
    path = write(tmp_path, "x.parquet", {"id": np.arange(40)}, row_group_size=10, compression="zstd")
    row_group = pq.read_metadata(path).row_group(1).column(0)
    damaged = bytearray(path.read_bytes())
    start = row_group.dictionary_page_offset or row_group.data_page_offset
    damaged[start : start + row_group.total_compressed_size] = b"\xff" * row_group.total_compressed_size
    path.write_bytes(damaged)
    converter = make_parquet_converter(path)
    assert converter.head(10)["id"].tolist() == list(range(10))
    with pytest.raises(ReadError, match=r"x\.parquet"):
        converter.head(11)


def test_head_checks_its_argument_and_whether_there_are_rows(tmp_path: Path) -> None:
    converter = make_parquet_converter(write(tmp_path, "x.parquet", {"id": [1]}))
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        converter.head(0)
    with pytest.raises(TypeError, match=r"n must be an integer, got 2\.5"):
        converter.head(2.5)
    converter.delete()
    with pytest.raises(CacheError, match="was closed, so it has no rows any more"):
        converter.head()
