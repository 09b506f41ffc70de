"""Sequences against a few lines of Python: every table, stride, gap, selection, shard and resumed epoch is the same."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import itertools
import json
import math
import pickle
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from converter import (
    DatasetConverter,
    NullValueError,
    NumPy,
    ReadError,
    SourceError,
    make_delta_converter,
    make_parquet_converter,
)
from tests.properties import examples

RAW = struct.Struct("<2h")


class Raw:
    """Decodes what `RAW` packs, and counts the rows."""

    dtype, shape = "int16", (2,)

    def __init__(self) -> None:
        self.num_rows = 0

    def decode(self, values: pa.LargeBinaryArray) -> np.ndarray[Any, Any]:
        self.num_rows += len(values)
        return np.array([np.frombuffer(value.as_buffer(), "<i2") for value in values]).reshape(-1, 2)


Row = tuple[int, int, int]
"""The number of the file, the key, the time."""


def write(folder: Path, files: Sequence[Sequence[tuple[int, int]]], row_group_size: int = 3) -> list[Row]:
    """Write a file for each list of (key, time); return all rows in order."""
    rows: list[Row] = []
    for number, file in enumerate(files):
        places = range(len(rows), len(rows) + len(file))
        table = pa.table(
            {
                "key": pa.array([key for key, _ in file], pa.int32()),
                "time": pa.array([time for _, time in file], pa.int64()),
                "x": pa.array([float(place) for place in places], pa.float32()),
                "pair": pa.array([[place, -place] for place in places], pa.list_(pa.int16(), 2)),
                "word": pa.array([f"w{place}" for place in places]),
                "raw": pa.array([RAW.pack(place, -place) if place % 4 else None for place in places], pa.binary()),
                "odd": pa.array([place if place % 3 else None for place in places], pa.int32()),
            }
        )
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=row_group_size)
        rows += [(number, key, time) for key, time in file]
    return rows


def expected_of(
    rows: Sequence[Row],
    live: Sequence[int],
    length: int,
    *,
    stride: int,
    max_gap: int | None,
    is_padded: bool,
) -> list[list[int]]:
    """The rows of each sequence, in the order of their first rows: what `sequences` promises, one row at a time."""
    chains: list[list[int]] = []
    of_key: dict[int, list[int]] = {}
    # Files of a key one after the other in time.
    for row in sorted(live, key=lambda row: (rows[row][2] // 100, row)):
        _, key, time = rows[row]
        chain = of_key.get(key)
        if chain is None or (max_gap is not None and time - rows[chain[-1]][2] > max_gap):
            chain = of_key[key] = []
            chains.append(chain)
        chain.append(row)
    found = [
        chain[start : start + length]
        for chain in chains
        for start in range(0, len(chain), stride)
        if is_padded or start + length <= len(chain)
    ]
    return sorted(found)


def padded(sequences: Sequence[Sequence[int]], length: int) -> np.ndarray[Any, Any]:
    return np.array([[*sequence, *[-1] * (length - len(sequence))] for sequence in sequences]).reshape(-1, length)


def read(converter: DatasetConverter, **options: Any) -> dict[str, np.ndarray[Any, Any]]:
    with converter.make_batch_reader(batch_size=5, with_row_index="row", nulls="mask", **options) as reader:
        batches = list(reader)
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def check(found: dict[str, np.ndarray[Any, Any]], sequences: Sequence[Sequence[int]], length: int) -> None:
    """Every column holds the rows that the row numbers name, and zeros behind a sequence's end."""
    rows = padded(sequences, length)
    np.testing.assert_array_equal(found["row"], rows)
    is_own = rows >= 0
    np.testing.assert_array_equal(found["x"], np.where(is_own, rows, 0).astype(np.float32), strict=True)
    np.testing.assert_array_equal(found["pair"], np.where(is_own[..., None], np.stack([rows, -rows], -1), 0))
    assert found["word"].tolist() == [[f"w{row}" if row >= 0 else "" for row in sequence] for sequence in rows.tolist()]
    np.testing.assert_array_equal(found["raw__valid"], is_own & (rows % 4 > 0))
    raw = np.where(found["raw__valid"][..., None], np.stack([rows, -rows], -1), 0)
    np.testing.assert_array_equal(found["raw"], raw.astype(np.int16), strict=True)
    np.testing.assert_array_equal(found["odd__valid"], is_own & (rows % 3 > 0))
    np.testing.assert_array_equal(found["odd"], np.where(found["odd__valid"], rows, 0))
    if "__length" in found:
        assert found["__length"].tolist() == [len(sequence) for sequence in sequences]


@st.composite
def tables(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Files that are sorted by key and time, and in any order; a key that is in several has other times in each."""
    files = []
    for number in draw(st.permutations(range(draw(st.integers(1, 3))))):
        keys = draw(st.dictionaries(st.integers(-2, 3), st.integers(1, 9), min_size=1))
        times = {key: sorted(draw(st.lists(st.integers(0, 12), min_size=n, max_size=n))) for key, n in keys.items()}
        files.append([(key, 100 * number + time) for key in sorted(keys) for time in times[key]])
    return files


@given(
    tables(),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from([None, 0, 2, 90]),
    st.booleans(),
    st.integers(1, 7),
    st.sampled_from([None, 2, 3]),
)
@examples(80)
def test_they_are_those_of_the_rows(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[list[tuple[int, int]]],
    length: int,
    stride: int,
    max_gap: int | None,
    is_padded: bool,
    row_group_size: int,
    left_out: int | None,
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    rows = write(folder, files, row_group_size)
    live = [row for row in range(len(rows)) if left_out is None or row % left_out]
    if not live:
        return
    converter = make_parquet_converter(folder, decode={"raw": Raw()})
    if left_out is not None:
        converter = converter.where([("x", "in", [float(row) for row in live])])
    expected = expected_of(rows, live, length, stride=stride, max_gap=max_gap, is_padded=is_padded)
    options: dict[str, Any] = {"by": "key", "order_by": "time", "stride": stride, "max_gap": max_gap}
    options["partial"] = "pad" if is_padded else "drop"
    if not expected:
        longest = "the longest has [0-9]+"
        with pytest.raises(SourceError, match=rf"No key has {length} rows in a row: {longest}"):
            converter.sequences(length, **options)
        return
    sequences = converter.sequences(length, **options)
    assert len(sequences) == len(expected)
    check(read(sequences), expected, length)
    shuffled = read(sequences, shuffle=True, seed=3, shuffle_window_rows=4)
    order = np.lexsort(shuffled["row"].T[::-1])
    check({name: column[order] for name, column in shuffled.items()}, expected, length)
    if len(expected) >= 3:
        parts = [
            read(sequences, shuffle=True, seed=3, shuffle_window_rows=4, uneven="keep", cur_shard=shard, shard_count=3)
            for shard in range(3)
        ]
        np.testing.assert_array_equal(np.concatenate([part["row"] for part in parts]), shuffled["row"])


ROWS = [
    [(key, time) for key in range(4) for time in range(11)],
    [(key, 20 + time) for key in range(4) for time in range(5)],
]


@pytest.fixture
def converter(tmp_path: Path) -> DatasetConverter:
    write(tmp_path, ROWS)
    return make_parquet_converter(tmp_path, decode={"raw": Raw()})


@pytest.mark.parametrize("step", [1, 4, 9])
def test_an_epoch_goes_on_where_it_was_left(converter: DatasetConverter, step: int) -> None:
    sequences = converter.sequences(4, by="key", order_by="time")
    options: dict[str, Any] = {"shuffle": True, "seed": 5, "shuffle_window_rows": 7, "columns": ["x"]}
    with sequences.make_batch_reader(batch_size=3, **options) as reader:
        whole = np.concatenate([batch["x"] for batch in reader])
    with sequences.make_batch_reader(batch_size=3, **options) as reader:
        first = [batch["x"] for batch in itertools.islice(reader, step)]
        state = json.loads(json.dumps(reader.state_dict()))
    with sequences.make_batch_reader(batch_size=4, **options) as reader:
        reader.load_state_dict(state)
        rest = [batch["x"] for batch in reader]
    np.testing.assert_array_equal(np.concatenate([*first, *rest]), whole)
    with converter.make_batch_reader(**options) as reader, pytest.raises(ValueError, match=r"the rows \(fingerprint\)"):
        reader.load_state_dict(state)


def test_columns_may_come_from_some_rows_of_a_sequence(converter: DatasetConverter) -> None:
    steps: dict[str, Any] = {"x": range(4), "pair": [5, 0], "word": 1, "odd": 2}
    sequences = converter.sequences(6, by="key", order_by="time", steps=steps)
    assert [sequences.schema[name].shape for name in ("x", "pair", "time", "word")] == [(4,), (2, 2), (6,), ()]
    found = read(sequences)
    np.testing.assert_array_equal(found["x"], found["row"][:, :4])
    np.testing.assert_array_equal(found["pair"][..., 0], found["row"][:, [5, 0]])
    assert found["word"].tolist() == [f"w{row}" for row in found["row"][:, 1].tolist()]
    np.testing.assert_array_equal(found["odd__valid"], found["row"][:, 2] % 3 > 0)
    options: dict[str, Any] = {"batch_size": 100, "columns": ["word", "odd"], "nulls": "mask"}
    with sequences.make_torch_dataloader(**options) as loader, sequences.make_tf_dataset(**options) as dataset:
        (batch,), (element,) = list(loader), list(dataset)
    assert batch["word"] == element["word"].numpy().astype(str).tolist() == found["word"].tolist()
    np.testing.assert_array_equal(batch["odd__valid"].numpy(), element["odd__valid"].numpy())
    assert "sequences per epoch" in repr(sequences.plan())


def test_torch_tensorflow_stacks_and_processes_get_the_same(converter: DatasetConverter, tmp_path: Path) -> None:
    sequences = pickle.loads(pickle.dumps(converter.sequences(5, by="key", order_by="time", partial="pad")))
    options: dict[str, Any] = {
        "batch_size": 6,
        "shuffle": True,
        "seed": 1,
        "nulls": "mask",
        "stack": {"s": ["x", "time"]},
    }
    options["columns"] = ["s", "word", "pair", "odd", "raw"]
    with sequences.make_batch_reader(**options) as reader:
        expected = list(reader)
    assert expected[0]["s"].shape == (6, 5, 2)
    for num_workers in (0, 2):
        with sequences.make_torch_dataloader(num_workers=num_workers, **options) as loader:
            batches = list(loader)
        assert len(batches) == len(expected) == len(loader)
        for batch, wanted in zip(batches, expected, strict=True):
            assert batch["word"] == wanted["word"].tolist()
            for name in ("s", "pair", "odd", "odd__valid", "raw", "raw__valid", "__length"):
                np.testing.assert_array_equal(batch[name].numpy(), wanted[name], strict=True)
    with sequences.make_tf_dataset(**options) as dataset:
        for batch, wanted in zip(dataset, expected, strict=True):
            assert batch["word"].numpy().astype(str).tolist() == wanted["word"].tolist()
            for name in ("s", "pair", "odd", "odd__valid", "raw", "raw__valid", "__length"):
                np.testing.assert_array_equal(batch[name].numpy(), wanted[name], strict=True)


def test_a_stack_has_the_steps_of_its_columns(converter: DatasetConverter) -> None:
    steps = {"x": [0, 2], "odd": [0, 2], "time": [1]}
    sequences = converter.sequences(4, by="key", order_by="time", steps=steps)
    found = read(sequences, stack={"s": ["x", "odd"]}, columns=["s", "x"])
    assert found["s"].shape[1:] == found["s__valid"].shape[1:] == (2, 2)
    np.testing.assert_array_equal(found["s"][..., 0], found["row"][:, [0, 2]])
    with sequences.make_tf_dataset(nulls="mask", stack={"s": ["x", "odd"]}, columns=["s"]) as dataset:
        assert dataset.element_spec["s"].shape[1:] == (2, 2)
    with pytest.raises(ValueError, match=r"columns 'x' and 'time' of 's' have different steps in sequences\(\)"):
        read(sequences, stack={"s": ["x", "time"]})


@pytest.mark.parametrize("kind", ["int8", "int16", "int32", "int64", "uint8", "date32", "float32"])
def test_a_gap_may_be_larger_than_the_type_of_times(tmp_path: Path, kind: str) -> None:
    ends = {"float32": [-1e38, 1e38], "uint8": [0, 250], "date32": [-(2**31), 2**31 - 1]}
    least, most = ends.get(kind) or [np.iinfo(kind).min, np.iinfo(kind).max]
    times = pa.array([least, least, most, most], pa.int32() if kind == "date32" else kind)
    times = times.cast(pa.date32()) if kind == "date32" else times
    pq.write_table(pa.table({"t": times, "n": [0, 1, 2, 3]}), tmp_path / "0.parquet")
    gap: Any = dt.timedelta(days=10) if kind == "date32" else 10
    sequences = make_parquet_converter(tmp_path).sequences(2, order_by="t", max_gap=gap)
    assert read(sequences, columns=["n"])["n"].tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("num_files", [1, 4])
def test_gaps_between_decimals_are_exact(tmp_path: Path, num_files: int) -> None:
    """As doubles, 0.3 - 0.2 is less than 0.1 and 0.4 - 0.3 is more."""
    tenths = [decimal.Decimal(number) / 10 for number in [*range(20), 21, 22]]
    for part in range(num_files):
        share = slice(part * len(tenths) // num_files, (part + 1) * len(tenths) // num_files)
        table = pa.table({"t": pa.array(tenths[share], pa.decimal128(4, 1)), "n": list(range(len(tenths)))[share]})
        pq.write_table(table, tmp_path / f"{part}.parquet")
    opened = make_parquet_converter(tmp_path)
    for gap in (0.1, 0.19, np.float32(0.1)):
        found = read(opened.sequences(2, order_by="t", max_gap=gap), columns=["n"])["n"].tolist()
        assert found == [[first, first + 1] for first in range(21) if first != 19]
    for gap in (math.inf, 1e30, 1e308, 10**19):
        assert len(opened.sequences(2, order_by="t", max_gap=gap)) == 21
    assert len(opened.sequences(1, order_by="t", max_gap=0)) == 22


def test_no_gap_is_larger_than_infinity(tmp_path: Path) -> None:
    pq.write_table(pa.table({"t": [0, 5, 2**60]}), tmp_path / "a.parquet")
    assert len(make_parquet_converter(tmp_path).sequences(3, order_by="t", max_gap=math.inf)) == 1


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_files_may_meet_at_one_time(tmp_path: Path, names: str) -> None:
    for name, times in zip(names, ([5], [5, 9]), strict=True):
        pq.write_table(pa.table({"t": times}), tmp_path / f"{name}.parquet")
    found = read(make_parquet_converter(tmp_path).sequences(3, order_by="t"))["t"]
    assert found.tolist() == [[5, 5, 9]]


def test_rows_that_were_appended_to_a_delta_table_follow_in_time(tmp_path: Path) -> None:
    for part in range(4):
        times = [10 * part + time for _ in range(2) for time in range(5)]
        write_deltalake(tmp_path, pa.table({"key": [0] * 5 + [1] * 5, "time": times}), mode="append")
    sequences = make_delta_converter(tmp_path).sequences(20, by="key", order_by="time")
    expected = [10 * part + time for part in range(4) for time in range(5)]
    assert read(sequences)["time"].tolist() == [expected, expected]


def test_a_view_of_a_view(converter: DatasetConverter) -> None:
    sequences = converter.sequences(4, by="key", order_by="time")
    assert repr(sequences).startswith("DatasetConverter(52 sequences of 4 of 64 rows ×")
    late = sequences.where([("time", ">=", 20)])
    assert {int(time) for time in read(late)["time"][:, 0]} == {20, 21}
    parts = sequences.split({"train": 0.5, "test": 0.5}, by="key")
    keys = [set(np.unique(read(part)["key"]).tolist()) for part in parts.values()]
    assert keys[0] | keys[1] == {0, 1, 2, 3}
    assert not keys[0] & keys[1]
    assert sum(map(len, parts.values())) == len(sequences)
    assert sequences.statistics["x"].max == 63
    assert sequences.head(1)["x"].shape == (1, 4)
    assert sequences.fingerprint != converter.sequences(5, by="key").fingerprint
    assert sequences.plan(batch_size=10).steps_per_epoch == 6
    with pytest.raises(ValueError, match="the elements of this converter are sequences already"):
        sequences.sequences(2)


def test_keys_of_several_columns_text_and_times(tmp_path: Path) -> None:
    day = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)
    times = [day + dt.timedelta(hours=hour) for hour in (0, 1, 5, 6, 0, 1, 2, 3, 0, 1)]
    rows = {"a": ["x"] * 4 + ["y"] * 6, "b": [1] * 8 + [2] * 2, "t": times, "n": list(range(10))}
    pq.write_table(pa.table(rows), tmp_path / "0.parquet", row_group_size=3)
    whole = make_parquet_converter(tmp_path)
    options: dict[str, Any] = {"by": ["a", "b"], "order_by": "t"}
    assert read(whole.sequences(2, **options))["n"].tolist() == [[0, 1], [1, 2], [2, 3], [4, 5], [5, 6], [6, 7], [8, 9]]
    near = whole.sequences(2, max_gap=dt.timedelta(hours=1), **options)
    assert read(near)["n"].tolist() == [[0, 1], [2, 3], [4, 5], [5, 6], [6, 7], [8, 9]]
    assert read(whole.sequences(4, stride=3))["n"].tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    coded = make_parquet_converter(tmp_path, categories=["a"], standardize=["n"]).sequences(2, **options)
    assert read(coded)["a"].tolist() == [[0, 0]] * 3 + [[1, 1]] * 4
    assert abs(float(read(coded)["n"][0, 0]) + 1.5667) < 1e-3


def test_rows_that_delta_deleted_are_in_no_sequence(tmp_path: Path) -> None:
    table = pa.table({"key": [0] * 6 + [1] * 6, "time": [*range(6), *range(6)], "n": list(range(12))})
    write_deltalake(tmp_path, table)
    DeltaTable(tmp_path).delete("n = 2 OR n = 7")
    sequences = make_delta_converter(tmp_path).sequences(3, by="key", order_by="time", stride=2)
    assert read(sequences)["n"].tolist() == [[0, 1, 3], [3, 4, 5], [6, 8, 9], [9, 10, 11]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"length": 0}, "length must be at least 1"),
        ({"length": 2, "by": "no"}, "by: There is no column 'no'"),
        ({"length": 2, "by": "x"}, r"by: column 'x' is float32 of shape \(\); it needs a whole number"),
        ({"length": 2, "by": "pair"}, "by: column 'pair' is int16 of shape"),
        ({"length": 2, "by": "key", "order_by": "word"}, "order_by: column 'word' is str"),
        ({"length": 2, "by": ["key", "key"]}, "name a column twice"),
        ({"length": 2, "stride": 0}, "stride must be at least 1"),
        ({"length": 2, "partial": "keep"}, "partial must be 'drop' or 'pad'"),
        ({"length": 2, "max_gap": 1}, "max_gap needs order_by"),
        ({"length": 2, "order_by": "time", "max_gap": dt.timedelta(1)}, "max_gap must be a number, as order_by='time'"),
        ({"length": 2, "order_by": "time", "max_gap": -1}, "max_gap must be at least 0"),
        ({"length": 2, "order_by": "time", "max_gap": float("nan")}, "max_gap must be at least 0"),
        ({"length": 2, "order_by": "time", "max_gap": np.timedelta64(1, "s")}, "max_gap must be a number"),
        ({"length": 2, "by": 5}, "by must be a column's name or a list of them, got 5"),
        ({"length": 10**30}, "length must be at most"),
        ({"length": 2, "stride": 10**30}, "stride must be at most"),
        ({"length": 2, "steps": ["x"]}, "steps must be a dict of column name to numbers"),
        ({"length": 2, "steps": {"x": [2]}}, "steps: 'x' needs a list of numbers from 0 to 1"),
        ({"length": 2, "steps": {"x": 2}}, "steps: 'x' needs a list of numbers from 0 to 1"),
        ({"length": 2, "steps": {"x": []}}, "steps: 'x' needs a list of numbers from 0 to 1"),
        ({"length": 2, "steps": {"no": [0]}}, "steps: There is no column 'no'"),
    ],
)
def test_wrong_arguments_are_refused_by_name(converter: DatasetConverter, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        converter.sequences(**arguments)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            [[(0, 0), (0, 1), (1, 5), (1, 4)]],
            r"by 'key', 'time': row 3 .* has \(1, 4\) after \(1, 5\)\. .*WithinPartitions\('key', 'time'\)",
        ),
        ([[(0, 0), (1, 0), (0, 5)]], r"row 2 \(row 2 of .*0\.parquet\) has \(0, 5\) after \(1, 0\)"),
        (
            [[(0, 0), (1, 5), (1, 7)], [(1, 6), (2, 0)]],
            r"The rows of key=1 go on in row 3 \(row 0 of .*1\.parquet\) with time=6, within the times .* end with 7",
        ),
        ([[(0, 0), (0, 1)]], r"No key has 3 rows in a row: the longest has 2"),
    ],
)
def test_rows_that_make_no_sequences_are_named(tmp_path: Path, files: Any, said: str) -> None:
    write(tmp_path, files, row_group_size=2)
    with pytest.raises(SourceError, match=said):
        make_parquet_converter(tmp_path).sequences(3, by="key", order_by="time")


def test_nulls_and_ragged_rows_are_refused_by_name(tmp_path: Path) -> None:
    table = pa.table({"key": [0, 0, None], "time": [0, None, 2], "n": [1, 2, 3], "r": [[1], [1, 2], []]})
    pq.write_table(table, tmp_path / "0.parquet")
    rows = make_parquet_converter(tmp_path)
    for options, said in (
        ({"by": "key"}, r"Column 'key' is null in row 2"),
        ({"order_by": "time"}, "'time' is null in row 1"),
    ):
        with pytest.raises(NullValueError, match=said):
            rows.sequences(2, **options)  # type: ignore[arg-type]
    sequences = rows.sequences(2)
    with pytest.raises(SourceError, match="Column 'r' has rows of different lengths, so it cannot be in a sequence"):
        read(sequences, ragged="pad")
    assert read(sequences, columns=["n"])["n"].tolist() == [[1, 2], [2, 3]]


@pytest.mark.parametrize(
    ("steps", "is_touched"),
    [
        (range(10), lambda time: True),
        ([0, 8], lambda time: time < 39),
        ([9], lambda time: time >= 9),
        ([0, 1], lambda time: time < 32),
    ],
    ids=["all", "two", "last", "first"],
)
def test_rows_that_sequences_share_are_decoded_once(tmp_path: Path, steps: Any, is_touched: Any) -> None:
    write(tmp_path, [[(key, time) for time in range(40)] for key in (0, 1)], row_group_size=7)
    decoder = Raw()
    rows = make_parquet_converter(tmp_path, decode={"raw": decoder})
    sequences = rows.sequences(10, by="key", order_by="time", steps={"raw": steps})
    decoder.num_rows = 0
    found = read(sequences, columns=["raw"], shuffle=True, shuffle_window_rows="all")
    numbers = found["row"][:, list(steps)]
    np.testing.assert_array_equal(found["raw"][..., 0], np.where(numbers % 4, numbers, 0))
    assert decoder.num_rows == sum(bool(row % 4) and is_touched(row % 40) for row in range(80))


@pytest.mark.parametrize("suffix", ["__valid", "__element_valid"])
def test_a_column_of_the_users_named_like_a_mask_has_its_own_steps(suffix: str, tmp_path: Path) -> None:
    name = f"a{suffix}"
    pq.write_table(pa.table({"a": np.arange(6), name: np.arange(7, 13)}), tmp_path / "a.parquet")
    converter = make_parquet_converter(tmp_path)
    (batch,) = converter.sequences(3, steps={name: [2, 0]}).make_batch_reader(columns=[name])
    assert batch[name].tolist() == [[9, 7], [10, 8], [11, 9], [12, 10]]
    (batch,) = converter.sequences(2, steps={"a": 0}).make_batch_reader(columns=["a", name])
    assert batch["a"].tolist() == [0, 1, 2, 3, 4]
    assert batch[name].tolist() == [[7, 8], [8, 9], [9, 10], [10, 11], [11, 12]]


def test_a_row_of_a_sequence_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    raw = [RAW.pack(row, row) for row in range(8)]
    raw[5] = b"short"
    pq.write_table(pa.table({"time": range(8), "raw": raw}), tmp_path / "0.parquet", row_group_size=3)
    sequences = make_parquet_converter(tmp_path, decode={"raw": Raw()}).sequences(3, order_by="time")
    for shuffle in (False, True):
        with pytest.raises(ReadError, match=r"Column 'raw' cannot be decoded in row 5 .*0\.parquet"):
            read(sequences, shuffle=shuffle)
    ragged = make_parquet_converter(tmp_path, decode={"raw": NumPy("int16", None)}).sequences(3, order_by="time")
    with pytest.raises(SourceError, match=r"'raw' has rows of different shapes, .* or give its decoder a shape"):
        read(ragged, ragged="pad")


def test_a_window_of_decoded_sequences_is_sized_by_what_is_decoded(tmp_path: Path) -> None:
    picture = np.zeros((64, 64, 3), np.uint8)
    stream = io.BytesIO()
    np.savez_compressed(stream, x=picture)
    pq.write_table(
        pa.table({"time": range(9_000), "x": [stream.getvalue()] * 9_000}), tmp_path / "0.parquet", row_group_size=500
    )
    decoder = NumPy("uint8", picture.shape, key="x")
    sequences = make_parquet_converter(tmp_path, decode={"x": decoder}).sequences(4, order_by="time")
    plan = sequences.plan(batch_size=32, shuffle=True, workers_count=2)
    assert 3_000 < plan.window_rows < 4_500
    assert plan.peak_memory_bytes > 3 * 48e6
