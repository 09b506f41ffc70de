"""Loaders of torch batches: what collating rows gives, each row once in a pass, and what happens at the edges."""

from __future__ import annotations

import contextlib
import decimal
import functools
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from converter.petastorm import TransformSpec, make_batch_reader, make_reader, pytorch
from converter.petastorm.ngram import NGram
from converter.petastorm.predicates import in_lambda
from converter.petastorm.pytorch import (
    BatchedDataLoader,
    DataLoader,
    InMemBatchedDataLoader,
    LoaderBase,
    decimal_friendly_collate,
)
from tests.unit.petastorm.conftest import NUM_ROWS, Stored
from tests.unit.petastorm.readers import KINDS, BatchReader, BlockReader, RowBlockReader, RowReader, numbered

LOADERS = (DataLoader, BatchedDataLoader)
CAPACITIES = (0, 1, 3, 11, 1000)

NUMBERS: dict[str, Callable[[int], Any]] = {
    "int8": np.int8, "uint8": np.uint8, "int16": np.int16, "uint16": np.uint16, "int32": np.int32,
    "uint32": np.uint32, "int64": np.int64, "float16": np.float16, "float32": np.float32, "float64": np.float64,
    "bool": lambda number: np.bool_(number % 2),
    "vector": lambda number: np.full(3, number, np.float32),
    "matrix of uint16": lambda number: np.full((2, 2), number, np.uint16),
    "vector of uint32": lambda number: np.full(2, number, np.uint32),
    "vector of bool": lambda number: np.array([number % 2, 1], np.bool_),
}  # fmt: skip
OBJECTS: dict[str, Callable[[int], Any]] = {
    "text": lambda number: f"row {number}",
    "bytes": lambda number: b"%d" % number,
    "decimal": lambda number: decimal.Decimal(number) / 4,
}


def rows_of(values: dict[str, Callable[[int], Any]], count: int) -> list[dict[str, Any]]:
    return [
        {name.replace(" ", "_"): value(number) for name, value in {"id": np.int64, **values}.items()}
        for number in range(count)
    ]


def assert_equal(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        for name, value in expected.items():
            assert_equal(actual[name], value)
    elif isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert torch.equal(actual, expected)
    else:
        assert actual == expected


def mixed_rows(number: int) -> BlockReader:
    """Whole numbers in the first blocks, and a null, which makes doubles of them, in the last one."""
    return BlockReader([{"x": np.int64(each)} for each in (number, 2, 3, 4)] + [{"x": np.float64("nan")}], 2)


TO_CPU = functools.partial(torch.as_tensor, device="cpu")
MIXED = pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DataLoader, {}),
        (DataLoader, {"shuffling_queue_capacity": 100}),
        (BatchedDataLoader, {}),
        (BatchedDataLoader, {"shuffling_queue_capacity": 100}),
        (BatchedDataLoader, {"transform_fn": TO_CPU}),
        (BatchedDataLoader, {"transform_fn": TO_CPU, "shuffling_queue_capacity": 100}),
        (InMemBatchedDataLoader, {}),
        (InMemBatchedDataLoader, {"transform_fn": TO_CPU}),
    ],
)


@pytest.mark.parametrize("loader", LOADERS)
def test_rows_of_a_loader_that_was_left_do_not_come_again(plain: Stored, loader: Any) -> None:
    with make_batch_reader(plain.url, schema_fields=["id"]) as reader:
        left = iter(loader(reader, batch_size=7, shuffling_queue_capacity=9))
        next(left)
        for others in (reader, loader(reader, batch_size=7, shuffling_queue_capacity=9)):
            with pytest.raises(RuntimeError, match="A loader with a shuffling queue reads this reader's rows"):
                next(iter(others))
        left.close()
        with pytest.raises(RuntimeError, match="or make the reader again"):
            next(reader)
    with make_batch_reader(plain.url, schema_fields=["id"]) as reader:
        batches = loader(reader, batch_size=7, shuffling_queue_capacity=9)
        assert sorted(ids_of(batches)) == sorted(ids_of(batches)) == list(range(60))


def test_epochs_without_end_go_on_with_the_next_epoch(plain: Stored) -> None:
    with make_batch_reader(plain.url, schema_fields=["id"], num_epochs=None, seed=1) as reader:
        firsts = []
        for _ in range(3):
            left = iter(DataLoader(reader, batch_size=60, shuffling_queue_capacity=60))
            firsts.append(tuple(next(left)["id"].tolist()))
            left.close()
    assert len(set(firsts)) == 3


@MIXED
def test_whole_numbers_beside_a_null_become_doubles(kind: Any, options: dict[str, Any]) -> None:
    for number in (7, 2**53 + 2):
        values = [each for batch in kind(mixed_rows(number), batch_size=5, **options) for each in batch["x"].tolist()]
        assert sorted(each for each in values if each == each) == [2, 3, 4, number]


@MIXED
def test_whole_numbers_that_a_tensor_would_round_are_named(kind: Any, options: dict[str, Any]) -> None:
    for number in (2**53 + 1, 2**63 - 1):
        with pytest.raises(ValueError, match=rf"Column 'x' has the whole number {number} and, in another row, a null"):
            list(kind(mixed_rows(number), batch_size=5, **options))


def test_arrays_of_whole_numbers_that_a_tensor_would_round_are_named() -> None:
    rows = [{"v": np.array([2**53 + 1])}, {"v": np.array([0.5])}]
    with pytest.raises(ValueError, match="Column 'v' has the whole number 9007199254740993"):
        decimal_friendly_collate(rows)


def ids_of(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["id"].tolist()]


# What a batch holds -------------------------------------------------------------------------------------------------


@given(
    kind=st.sampled_from(KINDS[1:]),
    names=st.sets(st.sampled_from([*NUMBERS, *OBJECTS]), max_size=4),
    num_rows=st.integers(1, 30),
    group_rows=st.integers(1, 12),
    batch_size=st.integers(1, 12),
)
def test_a_batch_is_what_collating_its_rows_gives(
    kind: Any, names: set[str], num_rows: int, group_rows: int, batch_size: int
) -> None:
    is_batched = kind is not RowBlockReader
    values = {name: value for name, value in NUMBERS.items() | OBJECTS.items() if name in names}
    if is_batched:
        values = {name: value for name, value in values.items() if name in NUMBERS}
    rows = rows_of(values, num_rows)
    actual = list(DataLoader(kind(rows, group_rows), batch_size))
    # A function that is not the default gets rows.
    collate = functools.partial(decimal_friendly_collate)
    collated = list(DataLoader(kind(rows, group_rows), batch_size, collate_fn=collate))
    assert len(actual) == len(collated) == -(-num_rows // batch_size)
    for batch, expected in zip(actual, collated, strict=True):
        assert_equal(batch, expected)
    if not is_batched:
        for batch, expected in zip(actual, DataLoader(RowReader(rows), batch_size), strict=True):
            assert_equal(batch, expected)


@pytest.mark.parametrize("kind", [RowReader, RowBlockReader])
def test_rows_of_numbers_have_torchs_types(kind: Any) -> None:
    (batch,) = DataLoader(kind(rows_of({**NUMBERS, **OBJECTS}, 5)), 5)
    assert {name: value.dtype for name, value in batch.items() if isinstance(value, torch.Tensor)} == {
        "id": torch.int64, "int8": torch.int8, "uint8": torch.uint8, "int16": torch.int16, "uint16": torch.uint16,
        "int32": torch.int32, "uint32": torch.uint32, "int64": torch.int64, "float16": torch.float16,
        "float32": torch.float32, "float64": torch.float64, "bool": torch.uint8, "vector": torch.float32,
        "matrix_of_uint16": torch.int32, "vector_of_uint32": torch.int64, "vector_of_bool": torch.uint8,
    }  # fmt: skip
    assert batch["matrix_of_uint16"].shape == (5, 2, 2)
    assert batch["text"][1:3] == ["row 1", "row 2"]
    assert batch["bytes"][0] == b"0"
    assert batch["decimal"][3] == decimal.Decimal("0.75")


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", [BatchReader, BlockReader])
def test_batches_of_numbers_have_torchs_types(kind: Any, loader: Any) -> None:
    (batch,) = loader(kind(rows_of(NUMBERS, 5)), 5)
    assert (batch["uint16"].dtype, batch["uint32"].dtype, batch["bool"].dtype) == (
        torch.int32, torch.int64, torch.uint8,
    )  # fmt: skip
    assert batch["vector_of_bool"].tolist() == [[number % 2, 1] for number in range(5)]


@pytest.mark.parametrize("kind", [RowReader, RowBlockReader])
def test_the_batched_loader_takes_rows_too(kind: Any) -> None:
    rows = rows_of(NUMBERS, 10)
    for actual, expected in zip(BatchedDataLoader(kind(rows), 4), DataLoader(kind(rows), 4), strict=True):
        assert_equal(actual, expected)


def test_the_last_batch_may_be_short() -> None:
    for loader in LOADERS:
        assert [len(batch["id"]) for batch in loader(BlockReader(numbered(10)), 4)] == [4, 4, 2]


def test_batches_may_be_written_into() -> None:
    for capacity in (0, 5):
        ids = []
        for batch in DataLoader(BlockReader(numbered(20)), 3, shuffling_queue_capacity=capacity):
            ids += batch["id"].tolist()
            batch["id"] += 1000
        assert sorted(ids) == list(range(20))


def test_columns_in_memory_that_must_not_change_are_copied() -> None:
    class Frozen(BlockReader):
        def columns(self) -> Any:
            block = dict(super().columns())
            for column in block.values():
                column.flags.writeable = False
            return block

    (batch,) = DataLoader(Frozen(numbered(3)), 3)
    batch["id"] += 1
    assert batch["id"].tolist() == [1, 2, 3]


def test_groups_of_several_types_are_joined_as_rows_would_be() -> None:
    blocks = [{"id": np.array([1, 2])}, {"id": np.array([0.5, np.nan])}]

    class Reader(BlockReader):
        def columns(self) -> Any:
            if not blocks:
                raise StopIteration
            return blocks.pop(0)

    first, second = DataLoader(Reader(numbered(4)), 3)
    assert first["id"].tolist() == [1, 2, 0.5]
    assert second["id"].isnan().all()


@pytest.mark.parametrize("capacity", [0, 100])
@pytest.mark.parametrize("loader", LOADERS)
def test_rows_of_several_shapes_are_refused_where_they_meet(loader: Any, capacity: int) -> None:
    rows = [{"id": np.int64(number), "x": np.zeros(1 + number // 7)} for number in range(14)]
    with pytest.raises(RuntimeError, match="equal size"):
        list(loader(BlockReader(rows), 14, shuffling_queue_capacity=capacity))


def test_rows_of_several_shapes_may_be_batches_of_one_row() -> None:
    rows = [{"x": np.zeros(number)} for number in range(4)]
    for kind in (RowReader, RowBlockReader):
        assert [batch["x"].shape for batch in DataLoader(kind(rows))] == [(1, 0), (1, 1), (1, 2), (1, 3)]


def test_decimals_and_texts_stay_what_they_are_when_collated() -> None:
    one, two = decimal.Decimal("1.0"), decimal.Decimal("1.1")
    assert_equal(
        decimal_friendly_collate(
            [{"price": one, "id": 1, "deep": {"text": "a"}}, {"price": two, "id": 2, "deep": {"text": "b"}}]
        ),
        {"price": [one, two], "id": torch.tensor([1, 2]), "deep": {"text": ["a", "b"]}},
    )
    prices, ids = decimal_friendly_collate(([one, 1], [two, 2]))
    assert prices == (one, two)
    assert ids.tolist() == [1, 2]
    assert decimal_friendly_collate([{}]) == {}


def test_a_row_is_given_torchs_types_in_place() -> None:
    row = {"a": np.array([1], np.uint16), "b": np.bool_(True), "c": np.array([1], np.int8), "d": "text"}
    pytorch._sanitize_pytorch_types(row)
    assert (row["a"].dtype, type(row["b"]), row["c"].dtype, row["d"]) == (np.int32, np.uint8, np.int8, "text")


# What is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", [RowReader, RowBlockReader])
def test_a_null_is_named(kind: Any, loader: Any) -> None:
    rows = [*numbered(3), {"id": np.int64(3), "pair": None}]
    with pytest.raises(TypeError, match=r"does not support nullable fields\. Found None in pair"):
        list(loader(kind(rows), 2))


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("value", [np.array(["a"]), np.array([b"a"]), np.array([None])])
@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_text_are_refused(kind: Any, value: Any, loader: Any) -> None:
    with pytest.raises(TypeError, match=r"arrays of string or object classes\. Found in field tags"):
        list(loader(kind([{"tags": value}] * 3), 2))


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("value", ["text", decimal.Decimal(1)])
def test_texts_of_a_batch_reader_are_refused(value: Any, loader: Any) -> None:
    with pytest.raises(TypeError, match="Found in field name"):
        list(loader(BlockReader([{"name": value}] * 3), 2))


@pytest.mark.parametrize(("value", "error"), [("text", ValueError), (decimal.Decimal(1), RuntimeError)])
@pytest.mark.parametrize("kind", [RowReader, RowBlockReader])
def test_the_batched_loader_refuses_texts_and_decimals_of_rows(kind: Any, value: Any, error: Any) -> None:
    with pytest.raises(error, match=r"too many dimensions 'str'|infer dtype of decimal"):
        list(BatchedDataLoader(kind([{"name": value}] * 3), 2))


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", KINDS)
def test_times_are_refused(kind: Any, loader: Any) -> None:
    # Rows alone are torch's own business.
    text = "datetime64" if kind is RowReader else r"does not support times. Found datetime64\[ns\] in field time"
    with pytest.raises(TypeError, match=text):
        list(loader(kind([{"time": np.datetime64(5, "ns")}] * 3), 2))


@pytest.mark.parametrize("loader", [*LOADERS, InMemBatchedDataLoader])
def test_a_batch_has_at_least_one_row(loader: Any) -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        loader(BlockReader(numbered(3)), 0)


def test_without_torch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    spec = importlib.util.spec_from_file_location("without_torch", pytorch.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"spark-tensor-converter\[torch,petastorm\]"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# The order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_comes_once_and_only_the_last_batch_is_short(kind: Any, loader: Any, capacity: int) -> None:
    batches = list(loader(kind(numbered(101)), 6, shuffling_queue_capacity=capacity))
    assert [len(batch["id"]) for batch in batches] == [6] * 16 + [5]
    assert sorted(ids_of(batches)) == list(range(101))
    for batch in batches:
        assert torch.equal(batch["pair"], (batch["id"] / 2).float()[:, None].expand(-1, 2))
    if not capacity:
        assert ids_of(batches) == list(range(101))


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_shuffling_queue_mixes_the_rows_that_wait_in_it(kind: Any, loader: Any) -> None:
    ids = ids_of(loader(kind(numbered(300), *[] if kind is RowReader else [10]), 5, shuffling_queue_capacity=60))
    assert sum(np.diff(ids) == 1) < 30
    # Before a row comes out, no more rows than the queue and the last group hold were read beyond it.
    assert max(number - place for place, number in enumerate(ids)) <= 60 + 10 + 5
    # Chance decides when a row leaves the queue, so that some stay longer than it is.
    assert max(place - number for place, number in enumerate(ids)) > 60


@pytest.mark.parametrize("loader", LOADERS)
def test_no_batch_comes_before_the_queue_is_full(loader: Any) -> None:
    reader = RowReader(numbered(1000))
    next(iter(loader(reader, 2, shuffling_queue_capacity=100)))
    assert 100 <= reader.num_taken <= 104


@pytest.mark.parametrize("loader", LOADERS)
def test_an_endless_reader_of_rows_is_read_as_batches_are_taken(loader: Any) -> None:
    reader = RowReader(numbered(10))
    batches = iter(loader(reader, 2))
    assert [next(batches)["id"].tolist(), reader.num_taken] == [[0, 1], 2]
    assert [next(batches)["id"].tolist(), reader.num_taken] == [[2, 3], 4]


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_readers_seed_decides_the_order_and_passes_differ(kind: Any, loader: Any) -> None:
    def passes(seed: int) -> list[list[int]]:
        batches = loader(kind(numbered(100), seed=seed), 5, shuffling_queue_capacity=50)
        return [ids_of(batches), ids_of(batches)]

    assert passes(0) == passes(0)
    assert passes(0)[0] != passes(0)[1]
    assert passes(0) != passes(1)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_seed_the_order_follows_the_generators_that_users_seed(kind: Any, loader: Any) -> None:
    def order(seed: int) -> list[int]:
        np.random.seed(seed)  # noqa: NPY002 (the generator that users seed)
        torch.manual_seed(seed)
        return ids_of(loader(kind(numbered(100)), 5, shuffling_queue_capacity=50))

    assert order(1) == order(1)
    assert order(1) != order(2)


# Passes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0, 11])
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_pass_resets_the_reader_and_repeats_no_row(
    kind: Any, loader: Any, capacity: int, caplog: pytest.LogCaptureFixture
) -> None:
    batches = loader(kind(numbered(10)), 4, shuffling_queue_capacity=capacity)
    for number in range(3):
        caplog.clear()
        assert sorted(ids_of(batches)) == list(range(10))
        warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        text = "Start a new pass of Petastorm DataLoader, reset underlying Petastorm reader to position 0."
        assert warned == [text] * (number > 0)


@pytest.mark.parametrize("loader", LOADERS)
def test_two_passes_at_once_are_refused(loader: Any) -> None:
    batches = loader(BlockReader(numbered(10)), 4)
    first = iter(batches)
    next(first)
    second = iter(batches)
    with pytest.raises(RuntimeError, match="You must finish a full pass of Petastorm DataLoader before making another"):
        next(second)
    assert sum(len(batch["id"]) for batch in first) == 6
    assert sorted(ids_of(batches)) == list(range(10))


@pytest.mark.parametrize("loader", LOADERS)
def test_a_pass_that_was_left_early_cannot_begin_again(loader: Any) -> None:
    batches = loader(BlockReader(numbered(30)), 4)
    for _ in batches:
        break
    with pytest.raises(NotImplementedError, match="in the middle of iteration"):
        next(iter(batches))


@pytest.mark.parametrize("loader", LOADERS)
def test_after_an_error_there_is_no_other_pass(loader: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(BlockReader):
        def next_block(self) -> Any:
            if self.num_taken:
                raise OSError("disk on fire")
            return super().next_block()

    batches = loader(Failing(numbered(30)), 4)
    with pytest.raises(OSError, match="disk on fire"):
        list(batches)
    assert "Iteration on Petastorm DataLoader raise error: OSError('disk on fire')" in caplog.text
    with pytest.raises(RuntimeError, match=r"last time iteration failed with error OSError\('disk on fire'\)"):
        next(iter(batches))


@pytest.mark.parametrize("loader", LOADERS)
def test_the_end_of_a_with_block_stops_the_reader(loader: Any) -> None:
    reader = BlockReader(numbered(30))
    with loader(reader, 4) as batches:
        assert isinstance(batches, loader)
        assert isinstance(batches, LoaderBase)
        running = iter(batches)
        next(running)
    assert reader.calls == ["stop", "join"]
    with pytest.raises(RuntimeError, match="was closed during this pass"):
        next(running)


def test_a_loader_of_ones_own_yields_what_it_implements() -> None:
    class Own(LoaderBase):
        def __init__(self) -> None:
            super().__init__()
            self.reader = BlockReader(numbered(2))
            self.reader.last_row_consumed = True

        def _iter_impl(self) -> Iterator[Any]:
            return iter([1, 2])

    own = Own()
    assert [list(own), list(own)] == [[1, 2], [1, 2]]


# The user's functions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0, 10])
@pytest.mark.parametrize("kind", KINDS)
def test_a_collate_function_gets_lists_of_rows(kind: Any, capacity: int) -> None:
    def collate(rows: Sequence[Any]) -> Any:
        assert isinstance(rows, list)
        assert all(type(row) is dict and list(row) == ["id", "pair", "flag"] for row in rows)
        assert all(isinstance(row["id"], np.int64) and isinstance(row["flag"], np.uint8) for row in rows)
        assert all(row["pair"].shape == (2,) for row in rows)
        return [int(row["id"]) for row in rows]

    rows = [{**row, "flag": np.bool_(True)} for row in numbered(23)]
    batches = list(DataLoader(kind(rows), 5, collate, capacity))
    assert [len(batch) for batch in batches] == [5, 5, 5, 5, 3]
    assert sorted(number for batch in batches for number in batch) == list(range(23))


def test_a_transform_gets_the_columns_of_a_batch_reader() -> None:
    calls: list[Any] = []

    def double(column: Any) -> Any:
        calls.append(column.shape)
        return torch.as_tensor(column) * 2

    batches = list(BatchedDataLoader(BlockReader(numbered(14)), 5, double))
    assert calls == [(7,), (7, 2)] * 2
    assert ids_of(batches) == list(range(0, 28, 2))


@pytest.mark.parametrize("kind", [RowReader, RowBlockReader])
def test_a_transform_gets_each_value_of_a_row_in_a_list(kind: Any) -> None:
    def halve(values: Any) -> Any:
        assert isinstance(values, list)
        assert len(values) == 1
        return torch.as_tensor(np.stack(values)) / 2

    batches = list(BatchedDataLoader(kind(numbered(9)), 5, halve))
    assert ids_of(batches) == [number / 2 for number in range(9)]
    assert batches[0]["pair"].shape == (5, 2)


@pytest.mark.parametrize("capacity", [0, 10])
@pytest.mark.parametrize("kind", KINDS)
def test_a_transform_that_only_says_where_takes_whole_columns(kind: Any, capacity: int) -> None:
    to_double = functools.partial(torch.as_tensor, dtype=torch.float64, device="cpu")
    batches = list(BatchedDataLoader(kind(numbered(20)), 6, to_double, capacity))
    assert {value.dtype for batch in batches for value in batch.values()} == {torch.float64}
    assert sorted(ids_of(batches)) == list(range(20))


def test_tensors_of_another_kind_than_numpys_are_shuffled() -> None:
    to_bfloat = functools.partial(torch.as_tensor, dtype=torch.bfloat16)
    batches = list(BatchedDataLoader(BlockReader(numbered(50)), 8, to_bfloat, 30))
    assert batches[0]["id"].dtype == torch.bfloat16
    assert sorted(ids_of(batches)) == list(range(50))


# In memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [3, 10, 20, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_at_most_the_capacity_is_loaded_and_the_reader_stopped(kind: Any, capacity: int) -> None:
    reader = kind(numbered(20))
    names, columns = pytorch._load_rows_into_mem(reader, torch.as_tensor, capacity)
    assert list(names) == ["id", "pair"]
    assert columns[0].tolist() == list(range(min(capacity, 20)))
    assert columns[1].shape == (min(capacity, 20), 2)
    assert reader.calls == ["stop", "join"]


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_from_memory_come_in_order_or_each_in_its_own(kind: Any) -> None:
    ordered = InMemBatchedDataLoader(kind(numbered(20)), 6, num_epochs=3)
    assert ids_of(ordered) == list(range(20)) * 3
    shuffled = InMemBatchedDataLoader(kind(numbered(20)), 6, num_epochs=3, shuffle=True, seed=7)
    sizes, ids = [], []
    for batch in shuffled:
        sizes.append(len(batch["id"]))
        ids += batch["id"].tolist()
        assert torch.equal(batch["pair"][:, 0] * 2, batch["id"].float())
    assert sizes == [6, 6, 6, 2] * 3
    epochs = [tuple(ids[start : start + 20]) for start in (0, 20, 40)]
    assert len(set(epochs)) == 3
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    # The order is torch's own for this seed and epoch, so that a run of Petastorm's repeats.
    generator = torch.Generator().manual_seed(8)
    assert epochs[1] == tuple(torch.randperm(20, generator=generator).tolist())


def test_what_is_written_into_a_batch_from_memory_is_not_in_the_next_epoch() -> None:
    ids = []
    for batch in InMemBatchedDataLoader(BlockReader(numbered(10)), 4, num_epochs=2):
        ids += batch["id"].tolist()
        batch["id"] += 100
    assert ids == list(range(10)) * 2


def test_a_loader_from_memory_is_iterated_once() -> None:
    with InMemBatchedDataLoader(BlockReader(numbered(10)), 4) as batches:
        next(iter(batches))
        with pytest.raises(RuntimeError, match="InMemBatchedDataLoader couldn't be used multiple times"):
            next(iter(batches))


def test_an_empty_reader_gives_no_batch() -> None:
    reader = BlockReader(numbered(3))
    reader.num_taken = 3
    for loader in LOADERS:
        for capacity in (0, 5):
            assert list(loader(reader, 4, shuffling_queue_capacity=capacity)) == []
    assert list(InMemBatchedDataLoader(reader, 4)) == []


# Real readers ---------------------------------------------------------------------------------------------------------

NUMBER_FIELDS = ["id", "speed", "group", "picture", "matrix"]


@pytest.mark.parametrize("capacity", [0, 30])
@pytest.mark.parametrize("loader", LOADERS)
def test_rows_of_a_store_come_once_in_each_pass(stored: Stored, loader: Any, capacity: int) -> None:
    with loader(make_reader(stored.url, schema_fields=NUMBER_FIELDS), 7, shuffling_queue_capacity=capacity) as batches:
        for _ in range(2):
            seen = list(batches)
            assert sorted(ids_of(seen)) == list(range(NUM_ROWS))
            for batch in seen:
                for number, picture in zip(batch["id"].tolist(), batch["picture"], strict=True):
                    np.testing.assert_array_equal(picture, stored.rows[number]["picture"])


@pytest.mark.parametrize("capacity", [0, 20, 1000])
@pytest.mark.parametrize("loader", LOADERS)
def test_batches_of_a_plain_store_come_once_in_each_pass(plain: Stored, loader: Any, capacity: int) -> None:
    reader = make_batch_reader(plain.url, schema_fields=["id", "speed", "pair"], num_epochs=2)
    with loader(reader, 7, shuffling_queue_capacity=capacity) as batches:
        for _ in range(2):
            seen = list(batches)
            assert sorted(ids_of(seen)) == sorted([*range(60)] * 2)
            assert [len(batch["id"]) for batch in seen] == [7] * 17 + [1]
            for batch in seen:
                assert torch.equal(batch["speed"], batch["id"] / 4)
                assert torch.equal(batch["pair"], torch.stack((batch["id"], -batch["id"]), 1))


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"transform_spec": TransformSpec(lambda frame: frame)},
        {"predicate": in_lambda(["id"], lambda number: number >= 0)},
        {"schema_fields": ["id", "speed", "group"]},
    ],
    ids=["native", "transform", "predicate", "partition"],
)
def test_the_order_repeats_with_the_readers_seed(plain: Stored, options: dict[str, Any], loader: Any) -> None:
    def passes(seed: int) -> list[list[int]]:
        reader = make_batch_reader(plain.url, **{"schema_fields": ["id", "speed"], "seed": seed} | options)
        with loader(reader, 7, shuffling_queue_capacity=40) as batches:
            return [ids_of(batches), ids_of(batches)]

    first = passes(3)
    assert first == passes(3)
    assert first[0] != first[1]
    assert first != passes(4)
    assert sorted(first[1]) == list(range(60))


@pytest.mark.parametrize("capacity", [0, 40])
@pytest.mark.parametrize("loader", LOADERS)
def test_a_pass_that_stays_open_leaves_no_thread_behind(plain: Stored, loader: Any, capacity: int) -> None:
    before = threading.active_count()
    reader = make_batch_reader(plain.url, schema_fields=["id", "speed"], num_epochs=None)
    with loader(reader, 5, shuffling_queue_capacity=capacity) as batches:
        running = iter(batches)
        next(running)
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="was closed during this pass"):
        next(running)


def test_a_reader_that_was_stopped_ends_the_pass_with_its_error(plain: Stored) -> None:
    reader = make_batch_reader(plain.url, schema_fields=["id", "speed"], num_epochs=None)
    with contextlib.closing(iter(DataLoader(reader, 5, shuffling_queue_capacity=40))) as running:
        next(running)
        reader.stop()
        with pytest.raises(RuntimeError, match="Trying to read a sample after"):
            list(running)


def test_a_reader_from_which_rows_were_taken_gives_the_rest(plain: Stored) -> None:
    reader = make_batch_reader(plain.url, schema_fields=["id", "speed"])
    with DataLoader(reader, 5, shuffling_queue_capacity=40) as batches:
        taken = next(reader).id.tolist()
        assert taken
        assert sorted(taken + ids_of(batches)) == list(range(60))


@pytest.mark.parametrize("collate", [decimal_friendly_collate, functools.partial(decimal_friendly_collate)])
def test_windows_are_batches_by_offset(stored: Stored, collate: Any) -> None:
    ngram = NGram({-1: ["id", "speed"], 0: ["id"]}, delta_threshold=1, timestamp_field="id")
    reader = make_reader(stored.url, schema_fields=ngram, shuffle_row_groups=False)
    with DataLoader(reader, 8, collate) as batches:
        first = next(iter(batches))
    assert {offset: list(row) for offset, row in first.items()} == {-1: ["id", "speed"], 0: ["id"]}
    assert torch.equal(first[-1]["id"] + 1, first[0]["id"])
    assert len(first[0]["id"]) == 8


def test_one_row_of_ones_own_reader_may_be_a_window() -> None:
    class Windows(RowReader):
        def __next__(self) -> Any:
            row = super().__next__()
            return {-1: row, 0: row}

    (batch,) = DataLoader(Windows(numbered(3)), 3)
    assert batch[-1]["id"].tolist() == batch[0]["id"].tolist() == [0, 1, 2]


def test_lists_of_several_lengths_are_named() -> None:
    with pytest.raises(ValueError, match=r"Column 'x' has lists of 2 and 3 values"):
        decimal_friendly_collate([{"x": [1, 2]}, {"x": [1, 2, 3]}])


@pytest.mark.parametrize("whole", [2**53 + 1, np.int64(2**53 + 1)])
@pytest.mark.parametrize("floating", [1.5, np.float64(1.5)])
def test_whole_numbers_beside_pythons_floats_that_a_tensor_would_round_are_named(whole: Any, floating: Any) -> None:
    with pytest.raises(ValueError, match=r"Column 'x' has the whole number 9007199254740993"):
        decimal_friendly_collate([{"x": whole}, {"x": floating}])
    assert decimal_friendly_collate([{"x": 2}, {"x": floating}])["x"].tolist() == [2, 1.5]


@pytest.mark.parametrize("loader", [BatchedDataLoader, InMemBatchedDataLoader])
@pytest.mark.parametrize("wrap", [float, np.float64, lambda each: np.array([each], np.float64)])
@pytest.mark.parametrize("transform", [None, lambda values: torch.as_tensor(np.asarray(values))])
def test_batched_loaders_name_whole_numbers_that_they_would_round(loader: Any, wrap: Any, transform: Any) -> None:
    is_array = isinstance(wrap(1), np.ndarray)
    whole: Any = np.array([2**53 + 1]) if is_array else np.int64(2**53 + 1)
    rows = [{"x": whole}, {"x": wrap(1.5)}]
    options = {} if transform is None else {"transform_fn": transform}
    if loader is InMemBatchedDataLoader:
        options["rows_capacity"] = 2
    with pytest.raises(ValueError, match=r"Column 'x' has the whole number 9007199254740993"):
        list(loader(RowReader(rows), batch_size=2, **options))


def test_numbers_that_numpy_has_not_are_joined_by_torch() -> None:
    def transform(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64 if values[0] else torch.bfloat16)

    (batch,) = BatchedDataLoader(RowReader([{"x": 0}, {"x": 2}]), batch_size=2, transform_fn=transform)
    assert batch["x"].dtype == torch.bfloat16
    assert batch["x"].tolist() == [0, 2]
