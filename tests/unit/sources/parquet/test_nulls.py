"""Nulls of rows and of elements in existing files follow the reader's policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import (
    NullValueError,
    SourceError,
    make_parquet_converter,
)
from tests.unit.sources.parquet.known_files import (
    read,
    write,
)


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


def test_nulls_of_a_struct_are_seen_in_a_dictionary_that_pyarrow_does_not_count(tmp_path: Path) -> None:
    words = pa.array(["a", "b", "a"]).dictionary_encode()
    one = pa.StructArray.from_arrays([words], ["word"], mask=pa.array([False, True, False]))
    # The second struct of the first list is null.
    several = pa.ListArray.from_arrays(pa.array([0, 2, 2, 3], pa.int32()), one)
    write(tmp_path, "x.parquet", {"one": one, "several": several})
    footer = pq.read_metadata(tmp_path / "x.parquet").row_group(0)
    assert footer.column(0).statistics.null_count == 0, "pyarrow counts them: the workaround can go"
    converter = make_parquet_converter(tmp_path)
    with pytest.raises(NullValueError, match=r"Column 'one\.word' holds"):
        read(converter, columns=["one.word"])
    found = read(converter, nulls="mask", ragged="nested")
    assert found["one.word"].tolist() == ["a", "", "a"]
    assert found["one.word__valid"].tolist() == [True, False, True]
    assert [row.tolist() for row in found["several.word"]] == [["a", ""], [], ["a"]]
    assert [row.tolist() for row in found["several.word__element_valid"]] == [[True, False], [], [True]]


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
        match = r"Column 's' has text that is no UTF-8 in row [01] of a row group: b.*b\.parquet"
        with pytest.raises(SourceError, match=match), make(batch_size=2) as loader:
            list(loader)


@pytest.mark.parametrize("ragged", ["pad", "nested"])
def test_null_elements_and_inner_lists_as_tensors_of_torch(tmp_path: Path, ragged: str) -> None:
    import torch

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


@pytest.mark.one_in(5)
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
    with pytest.raises(SourceError, match="'x' has a row of 3 values, expected 2"):
        read(make_parquet_converter(tmp_path, shapes={"x": (2, 2)}), nulls="mask")
    # As rows that may differ an inner list that is null has no length.
    with pytest.raises(NullValueError, match="'x' has arrays whose inner arrays are null"):
        read(make_parquet_converter(tmp_path), nulls="mask", ragged="pad")


@pytest.mark.parametrize("options", [{}, {"batch_size": 1}, {"batch_size": 2}])
def test_null_elements_of_ragged_rows_follow_the_policy(tmp_path: Path, options: Any) -> None:
    write(tmp_path, "a.parquet", {"x": pa.array([[1, None, 3], None, []], pa.list_(pa.int16()))})
    write(tmp_path, "b.parquet", {"x": pa.array([[5], [6, 7]], pa.list_(pa.int16()))})
    converter = make_parquet_converter(tmp_path)
    for nulls, said in (
        ("raise", "holds 1 null, and nulls='raise'"),
        ({"x": 9}, "holds 1 null, which no value can fill"),
    ):
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


@pytest.mark.parametrize("shapes", [None, {"x": None}, {"x": (2,)}])
def test_null_elements_are_said_whatever_the_shape(tmp_path: Path, shapes: Any) -> None:
    write(tmp_path, "a.parquet", {"x": [[1, None], [2]]})
    with pytest.raises((NullValueError, SourceError), match=r"null elements|row of 1 values"):
        read(make_parquet_converter(tmp_path, shapes=shapes), ragged="pad")
