"""The user's function of a batch: what it gets, what it may give back, and what happens when it fails."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import gc
import itertools
import multiprocessing
import pickle
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pyspark import cloudpickle as untyped_cloudpickle
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from converter import DatasetConverter
from converter.dataset import borrow_files
from converter.frameworks.torch import workers
from converter.storage.opening import open_storage
from tests.columns import ID, SCALARS, TENSORS, Column, assert_batch
from tests.entries import write_converter

NUM_ROWS = 101
COLUMNS = (*SCALARS, TENSORS[0])
WINDOW = 20
BATCH = 9
STEPS = 12
WAYS = ("numpy", "torch", "processes")
Batch = dict[str, Any]


@pytest.fixture(scope="module")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    """Two files of several row groups, every kind of column."""
    partitions = [[range(60)], [range(60, NUM_ROWS)]]
    with write_converter(tmp_path_factory.mktemp("rows"), COLUMNS, partitions, row_group_bytes=900) as found:
        assert found._manifest.num_row_groups > 6
        yield found


def make(converter: DatasetConverter, way: str, transform: Any, **options: Any) -> Any:
    known: dict[str, Any] = {"batch_size": BATCH, "shuffle_window_rows": WINDOW, "transform": transform} | options
    if way == "numpy":
        return converter.make_batch_reader(**known)
    return converter.make_torch_dataloader(**{"num_workers": 2 if way == "processes" else 0} | known)


@pytest.fixture
def no_process_goes_on() -> Iterator[None]:
    """What a test leaves by mistake ends with it, so that the next one begins without processes."""
    yield
    for one in gc.get_objects():
        if type(one) is _MultiProcessingDataLoaderIter:
            one._shutdown_workers()


def ids_of(batches: Any) -> list[int]:
    return [row for batch in batches for row in batch["id"].tolist()]


def reader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("converter-read")]


def unchanged(batch: Batch) -> Batch:
    return batch


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_may_have_room_for_more_rows_than_there_will_ever_be(converter: DatasetConverter, way: str) -> None:
    with make(converter, way, None, batch_size=2**63) as loader:
        assert [len(batch["id"]) for batch in loader] == [NUM_ROWS]


# What it gets


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_transform_that_changes_nothing_changes_nothing(converter: DatasetConverter, way: str, shuffle: bool) -> None:
    with (
        make(converter, way, unchanged, shuffle=shuffle) as loader,
        make(converter, way, None, shuffle=shuffle) as plain,
    ):
        assert len(loader) == len(plain) == STEPS
        batches, expected = list(loader), list(plain)
    assert len(batches) == STEPS
    assert ids_of(batches) == ids_of(expected)
    for batch, other in zip(batches, expected, strict=True):
        assert_batch(batch, COLUMNS, other["id"].tolist())
        assert_batch(other, COLUMNS, other["id"].tolist())


@pytest.mark.parametrize("way", ["numpy", "torch"])
def test_it_gets_whole_batches_of_numpy_arrays(converter: DatasetConverter, way: str) -> None:
    got: list[Batch] = []

    def look(batch: Batch) -> Batch:
        got.append({name: column.copy() for name, column in batch.items()})
        return batch

    with make(converter, way, look, workers_count=3) as loader:
        assert ids_of(loader) == list(range(NUM_ROWS))
    assert sorted(len(batch["id"]) for batch in got) == [2, *[BATCH] * 11]
    for batch in got:
        assert type(batch) is dict
        assert all(type(column) is np.ndarray for column in batch.values())
        first = int(batch["id"][0])
        assert first % BATCH == 0
        assert_batch(batch, COLUMNS, range(first, min(first + BATCH, NUM_ROWS)))


def sizes(batch: Batch) -> Batch:
    return {"rows": np.full(len(batch["id"]), len(batch["id"]))}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_last_short_batch_comes_too_unless_it_is_dropped(
    converter: DatasetConverter, way: str, drop_last: bool
) -> None:
    with make(converter, way, sizes, drop_last=drop_last) as loader:
        batches = list(loader)
    expected = [BATCH] * 11 + ([] if drop_last else [2])
    assert [len(batch["rows"]) for batch in batches] == expected
    assert [batch["rows"].tolist() for batch in batches] == [[size] * size for size in expected]


@pytest.mark.parametrize("way", WAYS)
def test_it_sees_what_other_arguments_add(converter: DatasetConverter, way: str) -> None:
    options: dict[str, Any] = {"columns": ["id", "x"], "stack": {"x": ["a_int8", "a_float32"]}, "with_row_index": "row"}
    options |= {"uneven": "pad", "cur_shard": 0, "shard_count": 2}
    with make(converter, way, unchanged, **options) as loader:
        batches = list(loader)
    assert all(list(batch) == ["id", "x", "row", "__valid"] for batch in batches)
    assert all(batch["row"].tolist() == batch["id"].tolist() for batch in batches)
    assert [valid for batch in batches for valid in batch["__valid"].tolist()] == [True] * 50 + [False]


def test_it_sees_masks_and_lengths(tmp_path: Any) -> None:
    columns = (ID, Column(name="x", dtype="int32", nullable=True), Column(name="words", dtype="int32", shape=None))
    with write_converter(tmp_path, columns, [[range(50)]], row_group_bytes=300) as converter:
        for way in ("numpy", "torch"):
            keys: list[list[str]] = []

            def look(batch: Batch, keys: Any = keys) -> Batch:
                keys.append(list(batch))
                return {"total": batch["words"].sum(axis=1) * batch["x__valid"]}

            with make(converter, way, look, nulls="mask", ragged="pad") as loader:
                total = [row for batch in loader for row in batch["total"].tolist()]
            assert keys == [["id", "x", "x__valid", "words", "words__length"]] * 6
            words, valid = columns[2].values(range(50)), columns[1].valid(range(50))
            assert total == [int(row.sum()) * ok for row, ok in zip(words, valid.tolist(), strict=True)]


# What it gives back


def reshaped(batch: Batch) -> Batch:
    vector = batch["vector"]
    return {
        "z": np.stack([vector, vector + 1], axis=1),
        "id": batch["id"],
        "a": vector.sum(axis=1, dtype=np.float64),
        "text length": np.array([len(text) for text in batch["text"]]),
    }


@pytest.mark.parametrize("way", WAYS)
def test_columns_may_come_and_go_and_change_shape_in_the_order_that_it_says(
    converter: DatasetConverter, way: str
) -> None:
    by_name = {column.name: column for column in COLUMNS}
    with make(converter, way, reshaped, shuffle=True) as loader:
        batches = list(loader)
    assert sorted(ids_of(batches)) == list(range(NUM_ROWS))
    for batch in batches:
        assert list(batch) == ["z", "id", "a", "text length"]
        ids = batch["id"].tolist()
        vector = by_name["vector"].values(ids)
        np.testing.assert_array_equal(np.asarray(batch["z"]), np.stack([vector, vector + 1], axis=1), strict=True)
        np.testing.assert_array_equal(np.asarray(batch["a"]), vector.sum(axis=1, dtype=np.float64), strict=True)
        assert batch["text length"].tolist() == [len(text) for text in by_name["text"].values(ids)]
        assert all(isinstance(column, np.ndarray if way == "numpy" else torch.Tensor) for column in batch.values())


def odd_arrays(batch: Batch) -> Batch:
    rows = batch["id"]
    frozen = rows * 2
    frozen.flags.writeable = False
    wide = np.stack([rows, rows + 1, rows + 2, rows + 3], axis=1)
    return {
        "id": rows,
        "frozen": frozen,
        "backwards": (rows[::-1].copy())[::-1],
        "every other": np.repeat(rows, 2)[::2],
        "columns": wide[:, ::2],
        "fortran": np.asfortranarray(wide),
        "broadcast": np.broadcast_to(rows[:, None], (len(rows), 3)),
        "half": (rows / 2).astype(np.float16),
        "flag": rows % 2 == 0,
        "list": rows.tolist(),
        "tensor": torch.from_numpy(rows + 0),
        "unsigned": rows.astype(np.uint16),
        "complex": rows * 1j,
        "no width": np.empty((len(rows), 0), np.float32),
        # To NumPy the stride of an axis of length 1 means nothing.
        "flipped": rows[:, None].astype(np.float32)[:, ::-1],
    }


@pytest.mark.parametrize("way", WAYS)
def test_arrays_of_any_layout_and_dtype_arrive(converter: DatasetConverter, way: str) -> None:
    with make(converter, way, odd_arrays, columns=["id"], shuffle=True) as loader:
        batches = list(loader)
    for batch in batches:
        expected = {name: np.asarray(column) for name, column in odd_arrays({"id": np.asarray(batch["id"])}).items()}
        assert list(batch) == list(expected)
        for name, column in batch.items():
            np.testing.assert_array_equal(np.asarray(column), expected[name], strict=True, err_msg=name)
        if way != "numpy":
            assert all(column.is_contiguous() for column in batch.values())
            # They belong to the caller.
            for column in batch.values():
                column.zero_()


def times_and_texts(batch: Batch) -> Batch:
    days = batch["id"].astype("datetime64[D]")
    return {
        "id": batch["id"],
        "D": days,
        "us": days.astype("datetime64[us]") + np.timedelta64(7, "us"),
        "s": days.astype("datetime64[s]"),
        "ns": days.astype("datetime64[ns]"),
        "fixed": np.array([f"ž{row}" for row in batch["id"]]),
        "objects": np.array([f"ž{row}" for row in batch["id"]], object),
        "bytes": np.array([b"x%d" % row for row in batch["id"]]),
        "list": [f"ž{row}" for row in batch["id"]],
    }


@pytest.mark.parametrize("way", WAYS)
def test_times_and_texts_arrive_as_those_of_a_column_do(converter: DatasetConverter, way: str) -> None:
    with make(converter, way, times_and_texts, columns=["id"]) as loader:
        batches = list(loader)
    microseconds = 86_400_000_000
    for batch in batches:
        ids = batch["id"].tolist()
        for name in ("fixed", "objects", "list"):
            assert list(batch[name]) == [f"ž{row}" for row in ids]
        assert list(batch["bytes"]) == [b"x%d" % row for row in ids]
        if way == "numpy":
            assert {name: batch[name].dtype.str[1:] for name in ("D", "us", "s", "ns")} == {
                "D": "M8[D]", "us": "M8[us]", "s": "M8[s]", "ns": "M8[ns]",
            }  # fmt: skip
            assert batch["D"][0] == np.datetime64(dt.date(1970, 1, 1) + dt.timedelta(ids[0]))
            continue
        assert all(isinstance(batch[name], list) for name in ("fixed", "objects", "list", "bytes"))
        assert (batch["D"].dtype, batch["D"].tolist()) == (torch.int32, ids)
        for name, extra in (("us", 7), ("s", 0), ("ns", 0)):
            assert batch[name].dtype == torch.int64
            assert batch[name].tolist() == [row * microseconds + extra for row in ids], name


def doubled_in_place(batch: Batch) -> Batch:
    for name in ("id", "a_int32", "vector"):
        batch[name] *= 2
    batch["text"][:] = "changed"
    del batch["raw"]
    return batch


@pytest.mark.one_in(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_may_be_changed_in_place(converter: DatasetConverter, way: str, shuffle: bool) -> None:
    by_name = {column.name: column for column in COLUMNS}
    with make(converter, way, doubled_in_place, shuffle=shuffle, num_epochs=2, workers_count=3) as loader:
        batches = list(loader)
    for epoch in (batches[:STEPS], batches[STEPS:]):
        assert sorted(ids_of(epoch)) == list(range(0, 2 * NUM_ROWS, 2))
        for batch in epoch:
            ids = [row // 2 for row in batch["id"].tolist()]
            for name in ("a_int32", "vector"):
                np.testing.assert_array_equal(np.asarray(batch[name]), by_name[name].values(ids) * 2, strict=True)
            np.testing.assert_array_equal(np.asarray(batch["a_int64"]), by_name["a_int64"].values(ids), strict=True)
            assert list(batch["text"]) == ["changed"] * len(ids)
            assert "raw" not in batch
    assert_batch(next(iter(converter.make_batch_reader(batch_size=BATCH))), COLUMNS, range(BATCH))


# What it may not give back


def fewer(batch: Batch) -> Batch:
    return {"id": batch["id"][1:]}


def more(batch: Batch) -> Batch:
    return {"id": batch["id"], "x": np.zeros((len(batch["id"]) + 1, 2))}


def ragged(batch: Batch) -> Batch:
    return {"id": batch["id"], "x": [list(range(row % 3)) for row in range(len(batch["id"]))]}


WRONG: list[tuple[Any, type[Exception], str]] = [
    (fewer, ValueError, "transform returned column 'id' with 8 rows; the batch has 9 rows"),
    (more, ValueError, "transform returned column 'x' with 10 rows; the batch has 9 rows"),
    (ragged, ValueError, "transform returned column 'x' as rows of different shapes, which make no array"),
    (
        lambda batch: {"x": np.ma.masked_less(batch["id"], 8)},
        ValueError,
        "transform returned column 'x' as a masked array, and tensors have no mask",
    ),
    (lambda batch: batch["id"], TypeError, "transform must return a dict of column name to .*, got ndarray"),
    (lambda _: None, TypeError, "transform must return a dict .*, got NoneType"),
    (lambda batch: [batch], TypeError, "transform must return a dict .*, got list"),
    (lambda batch: {0: batch["id"]}, TypeError, "transform must return a dict of column name"),
    (lambda _: {}, ValueError, "transform returned no columns"),
    (lambda _: {"x": 3}, ValueError, "transform returned column 'x' with a single value; the batch has 9 rows"),
    (lambda batch: {"x": batch["id"].sum()}, ValueError, "transform returned column 'x' with a single value"),
    (lambda _: {"x": "text"}, ValueError, "transform returned column 'x' with a single value"),
    (lambda _: {"x": None}, ValueError, "transform returned column 'x' with a single value"),
]


@pytest.mark.parametrize(("transform", "kind", "said"), WRONG, ids=map(str, range(len(WRONG))))
@pytest.mark.parametrize("way", ["numpy", "torch"])
def test_what_is_no_batch_is_refused_and_says_why(
    converter: DatasetConverter, way: str, transform: Any, kind: Any, said: str
) -> None:
    with make(converter, way, transform, columns=["id"]) as loader:
        with pytest.raises(kind, match=said):
            list(loader)
        assert not reader_threads()


@pytest.mark.usefixtures("no_process_goes_on")
@pytest.mark.parametrize("number", [0, 2, 4])
def test_what_is_no_batch_is_refused_in_processes_too(converter: DatasetConverter, number: int) -> None:
    transform, kind, said = WRONG[number]
    with make(converter, "processes", transform, columns=["id"]) as loader, pytest.raises(kind, match=said):
        list(loader)


def nothing() -> Batch:
    return {}


@pytest.mark.parametrize(
    ("transform", "said"),
    [
        (3, "transform must be a function of a batch, got 3"),
        ("f", "transform must be a function of a batch, got 'f'"),
        (nothing, "transform must take a batch .* takes 0 arguments"),
        (lambda one, two, three: {"x": one, "y": two, "z": three}, "transform must take a batch .* takes 3 arguments"),
        (lambda batch, *, key: {"x": batch, "y": key}, "transform must take a batch"),
        (lambda *, key=1: {"x": key}, "transform must take a batch"),
        (lambda **columns: columns, "transform must take a batch"),
    ],
    ids=["number", "text", "nothing", "three", "keyword", "keywords alone", "columns as keywords"],
)
def test_what_is_no_function_of_a_batch_is_refused_at_once(
    converter: DatasetConverter, transform: Any, said: str
) -> None:
    for build in (converter.make_batch_reader, converter.make_torch_dataloader, converter.plan):
        with pytest.raises(TypeError, match=said):
            build(transform=transform)


class Scale:
    """A transform with parameters of its own."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, batch: Batch) -> Batch:
        return {"id": batch["id"] * self.factor}

    def method(self, batch: Batch) -> Batch:
        return self(batch)

    def with_noise(self, batch: Batch, generator: np.random.Generator) -> Batch:
        assert isinstance(generator, np.random.Generator)
        return self(batch)


def scaled(batch: Batch, *, factor: int) -> Batch:
    return Scale(factor)(batch)


@pytest.mark.parametrize(
    "transform",
    [
        Scale(3),
        Scale(3).method,
        Scale(3).with_noise,
        functools.partial(scaled, factor=3),
        lambda *arguments: Scale(3)(arguments[0]),
        lambda batch, factor=3: Scale(factor)(batch),
    ],
    ids=["object", "method", "method with generator", "partial", "star", "default"],
)
@pytest.mark.parametrize("way", ["numpy", "torch"])
def test_any_callable_of_a_batch_will_do(converter: DatasetConverter, way: str, transform: Any) -> None:
    with make(converter, way, transform, columns=["id"], batch_size=50) as loader:
        assert ids_of(loader) == list(range(0, 3 * NUM_ROWS, 3))


def test_a_function_that_does_not_say_its_arguments_gets_a_batch(converter: DatasetConverter) -> None:
    assert ids_of(make(converter, "numpy", dict, columns=["id"])) == list(range(NUM_ROWS))


# Random numbers


def noisy(batch: Batch, generator: np.random.Generator) -> Batch:
    valid = {"__valid": batch["__valid"]} if "__valid" in batch else {}
    return {"id": batch["id"], "noise": generator.random((len(batch["id"]), 2)), **valid}


def noise_of(batches: Any) -> list[list[list[float]]]:
    return [batch["noise"].tolist() for batch in batches]


def test_random_numbers_are_the_same_for_any_threads_processes_and_frameworks(converter: DatasetConverter) -> None:
    options: dict[str, Any] = {"columns": ["id"], "shuffle": True, "seed": 4, "num_epochs": 2}
    expected = noise_of(make(converter, "numpy", noisy, **options))
    assert len(expected) == 2 * STEPS
    assert len({one[0][0] for one in expected}) == 2 * STEPS
    ways: list[tuple[str, dict[str, Any]]] = [
        (way, {"workers_count": workers_count, "prefetch_batches": prefetch_batches})
        for way in ("numpy", "torch")
        for workers_count in (1, 4)
        for prefetch_batches in (None, 1, 7)
    ]
    for way, changes in [*ways, ("processes", {}), ("processes", {"num_workers": 1}), ("numpy", {"columns": None})]:
        with make(converter, way, noisy, **options | changes) as loader:
            assert noise_of(loader) == expected, (way, changes)


def test_random_numbers_are_others_for_another_seed_epoch_and_batch_and_not_for_another_run(
    converter: DatasetConverter,
) -> None:
    found: dict[tuple[int, int], Any] = {}
    for seed in (0, 1):
        with make(converter, "numpy", noisy, columns=["id"], seed=seed) as loader:
            for epoch in (0, 1):
                found[seed, epoch] = noise_of(loader)
            loader.set_epoch(0)
            assert noise_of(loader) == found[seed, 0]
    values = [one for runs in found.values() for batch in runs for row in batch for one in row]
    assert len(set(values)) == len(values) == 4 * NUM_ROWS * 2
    assert 0.45 < np.mean(values) < 0.55


@pytest.mark.parametrize("way", WAYS)
def test_random_numbers_go_on_where_a_run_is_resumed(converter: DatasetConverter, way: str) -> None:
    options: dict[str, Any] = {"columns": ["id"], "shuffle": True, "num_epochs": 2}
    batches, states = [], []
    with make(converter, "numpy", noisy, **options) as loader:
        states.append(loader.state_dict())
        for batch in loader:
            batches.append((batch["id"].tolist(), batch["noise"].tolist()))
            states.append(loader.state_dict())
    for step in (1, 17) if way == "processes" else range(len(states)):
        with make(pickle.loads(pickle.dumps(converter)), way, noisy, **options) as fresh:
            fresh.load_state_dict(states[step])
            found = [(batch["id"].tolist(), batch["noise"].tolist()) for batch in fresh]
        assert found == batches[step:], step


@pytest.mark.parametrize("uneven", ["drop", "pad", "keep"])
def test_random_numbers_are_others_on_another_shard(converter: DatasetConverter, uneven: str) -> None:
    found = []
    for index in range(4):
        shard: dict[str, Any] = {"cur_shard": index, "shard_count": 4, "uneven": uneven, "batch_size": 5}
        with make(converter, "numpy", noisy, columns=["id"], **shard) as loader:
            for batch in loader:
                # A row that makes the steps even is another shard's, and its random numbers may be so, too.
                found += batch["noise"][batch.get("__valid", np.ones(len(batch["id"]), bool))].ravel().tolist()
    assert len(set(found)) == len(found) == 2 * (100 if uneven == "drop" else NUM_ROWS)


def test_random_numbers_of_a_part_are_as_reproducible(converter: DatasetConverter) -> None:
    part = converter.where([("id", ">=", 40)])
    expected = noise_of(make(part, "numpy", noisy, columns=["id"], shuffle=True))
    with make(part, "processes", noisy, columns=["id"], shuffle=True) as loader:
        assert noise_of(loader) == expected
    assert (
        noise_of(make(converter, "torch", noisy, columns=["id"], shuffle=True, filters=[("id", ">=", 40)])) == expected
    )


# When it fails


class OutOfInkError(Exception):
    """An exception that knows more than its text."""

    def __init__(self, message: str, colour: str = "black") -> None:
        super().__init__(message)
        self.colour = colour


class FailsAt:
    """Fails on the batch that begins with a row, as long as it is broken."""

    def __init__(self, row: int) -> None:
        self.row = row
        self.is_broken = True

    def __call__(self, batch: Batch) -> Batch:
        if self.is_broken and int(batch["id"][0]) == self.row:
            raise OutOfInkError(f"no ink for row {self.row}", "cyan")
        return batch


@pytest.mark.parametrize("step", [0, 4, STEPS - 1])
@pytest.mark.parametrize("way", ["numpy", "torch"])
def test_an_error_arrives_once_as_it_was_raised_and_the_loader_goes_on(
    converter: DatasetConverter, way: str, step: int
) -> None:
    transform = FailsAt(step * BATCH)
    with make(converter, way, transform, columns=["id"], workers_count=3) as loader:
        iterator = iter(loader)
        assert ids_of(itertools.islice(iterator, step)) == list(range(step * BATCH))
        with pytest.raises(OutOfInkError, match=f"^no ink for row {step * BATCH}$") as raised:
            next(iterator)
        assert raised.value.colour == "cyan"
        names = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
        assert names[-1] == "__call__"
        assert not reader_threads()
        # It ended with the error.
        assert list(iterator) == []
        # What was handed over counts, what failed does not.
        state = loader.state_dict()
        transform.is_broken = False
        assert ids_of(loader) == list(range(NUM_ROWS))
        loader.load_state_dict(state)
        assert ids_of(loader) == list(range(step * BATCH, NUM_ROWS))


@pytest.mark.usefixtures("no_process_goes_on")
def test_an_error_in_a_process_keeps_its_class_and_its_text(converter: DatasetConverter) -> None:
    with make(converter, "processes", FailsAt(4 * BATCH), columns=["id"]) as loader:
        iterator = iter(loader)
        with pytest.raises(OutOfInkError, match="no ink for row 36") as raised:
            list(iterator)
        assert "__call__" in str(raised.value)
        assert list(iterator) == []
    with make(converter, "processes", unchanged, columns=["id"]) as loader:
        assert ids_of(loader) == list(range(NUM_ROWS))


@pytest.mark.usefixtures("no_process_goes_on")
def test_an_error_in_a_process_leaves_no_process(converter: DatasetConverter) -> None:
    assert not multiprocessing.active_children()
    with make(converter, "processes", FailsAt(4 * BATCH), columns=["id"]) as loader:
        # The error is kept, as a debugger or a notebook keeps the last one.
        with pytest.raises(OutOfInkError, match="no ink for row 36") as raised:
            list(loader)
        assert not multiprocessing.active_children()
    assert raised.value.__traceback__ is not None


def stops(batch: Batch) -> Batch:
    raise StopIteration


@pytest.mark.usefixtures("no_process_goes_on")
@pytest.mark.parametrize("way", WAYS)
def test_a_stray_stop_iteration_does_not_look_like_the_end(converter: DatasetConverter, way: str) -> None:
    with make(converter, way, stops, columns=["id"]) as loader, pytest.raises((RuntimeError, StopIteration)) as raised:
        assert list(loader) != []
    assert "StopIteration" in f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize("way", WAYS)
def test_breaking_off_leaves_no_thread_and_no_process(converter: DatasetConverter, way: str) -> None:
    with make(converter, way, unchanged, columns=["id"], workers_count=3) as loader:
        iterator = iter(loader)
        next(iterator)
        del iterator
        assert not reader_threads()
        held = iter(loader)
        next(held)
    assert not reader_threads()
    with contextlib.suppress(Exception):
        next(held)
    del held, loader
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("workers_count", "prefetch_batches"), [(1, 1), (1, 4), (3, 2), (2, None)])
def test_no_more_is_transformed_ahead_than_was_said(
    converter: DatasetConverter, workers_count: int, prefetch_batches: int | None
) -> None:
    begun: list[int] = []

    def count(batch: Batch) -> Batch:
        begun.append(int(batch["id"][0]))
        return batch

    options: dict[str, Any] = {"workers_count": workers_count, "prefetch_batches": prefetch_batches}
    most = prefetch_batches or 2 * workers_count
    with make(converter, "numpy", count, columns=["id"], **options) as reader:
        for step, _ in enumerate(reader):
            # One is being used, and while it is, so many others may have been begun.
            assert step + 1 <= len(begun) <= step + 1 + most
    assert sorted(begun) == list(range(0, NUM_ROWS, BATCH))


# To other processes


@pytest.mark.parametrize("method", ["spawn", "forkserver", multiprocessing.get_context("spawn")])
def test_what_cannot_be_sent_to_a_process_is_refused_at_once_and_works_in_threads(
    converter: DatasetConverter, method: Any
) -> None:
    offset = 5
    transform = lambda batch: {"id": batch["id"] + offset}  # noqa: E731
    with pytest.raises(
        TypeError, match=r"transform cannot be sent to worker processes \((spawn|forkserver)\): .*num_workers=0"
    ):
        make(converter, "processes", transform, multiprocessing_context=method)
    with make(converter, "torch", transform, columns=["id"]) as loader:
        assert ids_of(loader) == list(range(offset, NUM_ROWS + offset))
    # Fork does not send it.
    with make(converter, "processes", transform, columns=["id"], multiprocessing_context="fork") as loader:
        assert ids_of(loader) == list(range(offset, NUM_ROWS + offset))


def test_a_provider_of_tokens_that_cannot_be_sent_is_refused_by_name(converter: DatasetConverter) -> None:
    def on_azure(provider: Any) -> DatasetConverter:
        lake = open_storage("abfss://data@lake.dfs.core.windows.net/a", {"credential": provider})
        return borrow_files(lake, converter._manifest)

    said = r"storage_options\['credential'\] cannot be sent .* top of a module, pass an object of azure-identity"
    with pytest.raises(TypeError, match=said):
        make(on_azure(lambda: "token"), "processes", None, multiprocessing_context="spawn")
    make(on_azure(lambda: "token"), "processes", None, multiprocessing_context="fork")
    make(on_azure(provide), "processes", None, multiprocessing_context="spawn")
    # Spark pickles with this one, which sends the function itself.
    cloudpickle: Any = untyped_cloudpickle
    assert cloudpickle.loads(cloudpickle.dumps(on_azure(lambda: "token")))._storage.options["credential"]() == "token"


def provide() -> str:
    return "token"


def test_what_can_be_sent_is_not_refused(converter: DatasetConverter) -> None:
    loader = make(converter, "processes", scaled_by_two, multiprocessing_context="spawn", columns=["id"])
    assert len(loader) == STEPS
    assert not multiprocessing.active_children()


def scaled_by_two(batch: Batch) -> Batch:
    return {"id": batch["id"] * 2}


def test_without_torchs_private_parts_processes_end_with_their_iterator(converter: DatasetConverter) -> None:
    with make(converter, "torch", None, columns=["id"]) as loader:
        loader._end_workers(object())
        assert ids_of(loader) == list(range(NUM_ROWS))


def test_credentials_go_along_only_while_a_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not workers.is_starting_process()
    multiprocessing.context.set_spawning_popen(object())
    try:
        assert workers.is_starting_process()
        monkeypatch.delattr(multiprocessing.context, "get_spawning_popen")
        assert not workers.is_starting_process()
    finally:
        multiprocessing.context.set_spawning_popen(None)


def test_making_a_loader_does_not_settle_how_processes_start(
    converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", None)
    make(converter, "processes", None, columns=["id"])
    assert multiprocessing.get_start_method(allow_none=True) is None
    make(converter, "processes", scaled_by_two, columns=["id"])
    # Else the user's own set_start_method would be refused from then on.
    assert multiprocessing.get_start_method(allow_none=True) is None
