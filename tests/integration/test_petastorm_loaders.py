"""Petastorm's readers in TensorFlow: rows, batches and windows as datasets, and as the tensors of a v1 graph."""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import gc
import importlib.util
import logging
import sys
import warnings
import weakref
from collections import namedtuple
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from converter.frameworks import prompt
from converter.petastorm import PetastormDeprecationWarning, TransformSpec, make_batch_reader, make_reader, tf_utils
from converter.petastorm.blocks import collect
from converter.petastorm.codecs import CompressedNdarrayCodec, NdarrayCodec
from converter.petastorm.columns import to_objects
from converter.petastorm.etl.dataset_metadata import write_metadata
from converter.petastorm.ngram import NGram
from converter.petastorm.predicates import in_lambda
from converter.petastorm.reader_impl.tf_columns import checked_value, tf_column, tf_value
from converter.petastorm.tf_utils import make_batched_dataset, make_petastorm_dataset, tf_tensors
from converter.petastorm.unischema import Unischema, UnischemaField
from converter.petastorm.weighted_sampling_reader import WeightedSamplingReader
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.short,
    pytest.mark.filterwarnings("ignore:Tensorflow will convert all unicode strings:UnicodeWarning"),
]

v1 = tf.compat.v1

NUM_ROWS, FILE_ROWS, GROUP_ROWS = 60, 20, 7
DAY = dt.date(1969, 12, 30)
NANOSECONDS = 86_400 * 10**9

SCHEMA = Unischema(
    "Drive",
    [
        UnischemaField("id", np.int64, ()),
        UnischemaField("speed", np.float32, ()),
        UnischemaField("flag", np.bool_, ()),
        UnischemaField("city", np.str_, ()),
        UnischemaField("price", decimal.Decimal, ()),
        UnischemaField("time", np.datetime64, ()),
        UnischemaField("small", np.uint16, (2,), NdarrayCodec()),
        UnischemaField("matrix", np.float64, (2, 3), NdarrayCodec()),
        UnischemaField("ragged", np.uint32, (None,), CompressedNdarrayCodec()),
        UnischemaField("cloud", np.float32, (None, None), NdarrayCodec()),
        UnischemaField("tags", np.str_, (None,)),
        UnischemaField("rank", np.int16, (), None, True),
        UnischemaField("note", np.str_, (), None, True),
        UnischemaField("maybe", np.int32, (None,), NdarrayCodec(), True),
    ],
)
NULLABLE = ("rank", "note", "maybe")
FIELDS = [name for name in SCHEMA.fields if name not in NULLABLE]


def row_of(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "speed": number / 3,
        "flag": number % 2 == 0,
        "city": f"Ø{number % 3}",
        "price": decimal.Decimal(number) / 4,
        "time": np.datetime64("2020-01-01", "us") + number * 1_000_001,
        "small": np.array([number, 65_535], np.uint16),
        "matrix": np.full((2, 3), number / 2),
        "ragged": np.arange(2**32 - 10, 2**32 - 10 + number % 4).astype(np.uint32),
        "cloud": np.full((number % 3, number % 2 + 1), number, np.float32),
        "tags": [f"t{number}"] * (number % 3),
        "rank": None if number == 40 else number,
        "note": None if number == 40 else f"note {number}",
        "maybe": None if number == 40 else np.arange(2, dtype=np.int32),
    }


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with a schema of Petastorm's: three files."""
    path = tmp_path_factory.mktemp("petastorm")
    for start in range(0, NUM_ROWS, FILE_ROWS):
        rows = [row_of(number) for number in range(start, start + FILE_ROWS)]
        for row in rows:
            for name, field in SCHEMA.fields.items():
                if field.codec is not None and row[name] is not None:
                    row[name] = bytes(field.codec.encode(field, row[name]))
        types = {
            "speed": pa.float32(),
            "price": pa.decimal128(10, 2),
            "rank": pa.int16(),
            "tags": pa.list_(pa.string()),
        }
        arrays = {name: pa.array([row[name] for row in rows], types.get(name)) for name in SCHEMA.fields}
        pq.write_table(pa.table(arrays), path / f"{start:05}.parquet", row_group_size=GROUP_ROWS)
    write_metadata(path.as_uri(), SCHEMA)
    return path.as_uri()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plain store: two files of four row groups."""
    path = tmp_path_factory.mktemp("plain")
    for start in (0, 30):
        numbers = range(start, start + 30)
        columns = {
            "id": pa.array(numbers, pa.int32()),
            "speed": pa.array([number / 4 for number in numbers], pa.float32()),
            "pair": [[number, -number] for number in numbers],
            "city": [f"Ø{number}" for number in numbers],
            "price": pa.array([decimal.Decimal(number) for number in numbers], pa.decimal128(10, 2)),
            "day": [DAY + dt.timedelta(number) for number in numbers],
            "time": pa.array(np.arange(30).astype("datetime64[s]"), pa.timestamp("us")),
            "rank": pa.array([None if number == 40 else number for number in numbers], pa.int32()),
            "note": [None if number == 40 else str(number) for number in numbers],
            "born": [None if number == 40 else DAY for number in numbers],
            "flag": [None if number == 40 else True for number in numbers],
        }
        pq.write_table(pa.table(columns), path / f"{start}.parquet", row_group_size=8)
    return path.as_uri()


PLAIN = ["id", "speed", "pair", "city", "price", "day", "time"]


@pytest.fixture(autouse=True)
def _without_the_warning_of_a_move() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PetastormDeprecationWarning)
        yield


class Rows:
    """A reader of one's own: it hands out rows, and nothing else."""

    ngram = None
    batched_output = False
    last_row_consumed = False

    def __init__(self, reader: Any) -> None:
        self._reader, self.schema = reader, reader.schema

    def __iter__(self) -> Rows:
        return self

    def __next__(self) -> Any:
        return next(self._reader)


def assert_row(row: Any) -> None:
    expected = row_of(int(row.id))
    assert row.speed.numpy() == np.float32(expected["speed"])
    assert row.flag.numpy() == expected["flag"]
    assert row.city.numpy().decode() == expected["city"]
    assert decimal.Decimal(row.price.numpy().decode()) == expected["price"]
    assert row.time.numpy() == expected["time"].astype("datetime64[ns]").astype(np.int64)
    for name in ("small", "matrix", "ragged", "cloud"):
        np.testing.assert_array_equal(getattr(row, name), expected[name])
        assert getattr(row, name).shape == expected[name].shape
    assert [tag.decode() for tag in row.tags.numpy()] == expected["tags"]


# Rows ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda reader: reader, Rows], ids=["columns", "rows alone"])
def test_rows_have_their_values_types_and_shapes(url: str, wrap: Any) -> None:
    with make_reader(url, schema_fields=FIELDS, shuffle_row_groups=False) as reader:
        dataset = make_petastorm_dataset(wrap(reader))
        assert {name: (spec.dtype, tuple(spec.shape)) for name, spec in dataset.element_spec._asdict().items()} == {
            "id": (tf.int64, ()), "speed": (tf.float32, ()), "flag": (tf.bool, ()), "city": (tf.string, ()),
            "price": (tf.string, ()), "time": (tf.int64, ()), "small": (tf.int32, (2,)), "matrix": (tf.float64, (2, 3)),
            "ragged": (tf.int64, (None,)), "cloud": (tf.float32, (None, None)), "tags": (tf.string, (None,)),
        }  # fmt: skip
        rows = list(dataset)
    assert [int(row.id) for row in rows] == list(range(NUM_ROWS))
    assert type(rows[0]).__name__ == "Drive_view_view"
    for row in rows:
        assert_row(row)


@pytest.mark.parametrize("wrap", [lambda reader: reader, Rows], ids=["columns", "rows alone"])
def test_rows_that_come_late_are_the_same(url: str, wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow is told that there is nothing yet, in a form that it understands, and asks again."""
    monkeypatch.setattr(prompt, "_ANSWER_SECONDS", 0.0)
    num_waits: list[int] = []

    def wait(*arguments: Any) -> Any:
        num_waits.append(1)
        return futures.wait(*arguments)

    monkeypatch.setattr(prompt, "wait", wait)
    with make_reader(url, schema_fields=FIELDS, shuffle_row_groups=False) as reader:
        rows = list(make_petastorm_dataset(wrap(reader)))
    assert [int(row.id) for row in rows] == list(range(NUM_ROWS))
    for row in rows:
        assert_row(row)
    assert len(num_waits) > NUM_ROWS // GROUP_ROWS


def test_rows_of_one_shape_need_no_map(url: str) -> None:
    with make_reader(url, schema_fields=["id", "matrix"]) as reader:
        rows = list(make_petastorm_dataset(reader))
    assert all((row.matrix == int(row.id) / 2).numpy().all() for row in rows)


def test_decimals_have_no_zeros_at_their_end(url: str) -> None:
    with make_reader(url, schema_fields=["price"], shuffle_row_groups=False) as reader:
        prices = [row.price.numpy() for row in make_petastorm_dataset(reader).take(7)]
    assert prices == [b"0", b"0.25", b"0.5", b"0.75", b"1", b"1.25", b"1.5"]


@pytest.mark.parametrize("wrap", [lambda reader: reader, Rows], ids=["columns", "rows alone"])
@pytest.mark.parametrize("name", NULLABLE)
def test_a_null_in_a_row_is_named(url: str, name: str, wrap: Any) -> None:
    with make_reader(url, schema_fields=["id", name], shuffle_row_groups=False) as reader:
        rows = iter(make_petastorm_dataset(wrap(reader)))
        with pytest.raises(tf.errors.UnknownError, match=f'RuntimeError: Encountered "{name}"=None'):
            list(rows)


def test_a_loop_that_stops_early_leaves_the_rest_to_the_next(url: str) -> None:
    with make_reader(url, schema_fields=["id"], shuffle_row_groups=False) as reader:
        dataset = make_petastorm_dataset(reader)
        first = [int(row.id) for row in dataset.take(1)]
        rest = [int(row.id) for row in dataset]
    assert first == [0]
    assert rest == list(range(1, NUM_ROWS))


def test_a_row_is_taken_from_the_reader_when_a_loop_asks_for_it(url: str) -> None:
    with make_reader(url, schema_fields=["id"], shuffle_row_groups=False, reader_pool_type="dummy") as reader:
        rows = iter(make_petastorm_dataset(reader))
        for _ in range(NUM_ROWS):
            next(rows)
        assert not reader.last_row_consumed
        with pytest.raises(StopIteration):
            next(rows)
        assert reader.last_row_consumed


def test_a_stopped_reader_gives_no_more_rows(url: str) -> None:
    with make_reader(url, schema_fields=["id"], num_epochs=None) as reader:
        rows = iter(make_petastorm_dataset(reader))
        next(rows)
    with pytest.raises(tf.errors.UnknownError, match="Trying to read a sample after a reader"):
        list(rows)


def row_reader(url: str, plain: str) -> Any:
    del plain
    return make_reader(url, schema_fields=["id", "ragged"])


def batch_reader(url: str, plain: str) -> Any:
    del url
    return make_batch_reader(plain, schema_fields=["id", "speed"])


def mixed_readers(url: str, plain: str) -> Any:
    return WeightedSamplingReader([row_reader(url, plain) for _ in range(2)], [0.5, 0.5])


class OnlyRows:
    """A reader that hands out rows only."""

    def __init__(self, reader: Any) -> None:
        self.reader, self.schema, self.ngram = reader, reader.schema, reader.ngram
        self.at_stop = reader.at_stop

    def __iter__(self) -> Any:
        return iter(self.reader)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.reader.__exit__(*error)


@pytest.mark.parametrize("is_left", [False, True], ids=["whole", "left"])
@pytest.mark.parametrize(
    ("make", "wrap"),
    [
        (row_reader, make_petastorm_dataset),
        (batch_reader, make_petastorm_dataset),
        (batch_reader, lambda reader: make_batched_dataset(reader, batch_size=7)),
        (mixed_readers, make_petastorm_dataset),
        (lambda url, plain: OnlyRows(row_reader(url, plain)), make_petastorm_dataset),
        (lambda url, plain: windows_of(url), make_petastorm_dataset),
    ],
    ids=["rows", "batches", "exact batches", "mixture", "only rows", "windows"],
)
def test_a_stopped_reader_is_freed(url: str, plain: str, make: Any, wrap: Any, *, is_left: bool) -> None:
    # TensorFlow keeps a dataset's function as long as the process lives: with it, a client of the store.
    def iterate() -> Any:
        with make(url, plain) as reader:
            for _ in wrap(reader):
                if is_left:
                    break
        return weakref.ref(reader), weakref.ref(getattr(reader, "reader", reader))

    seen = iterate()
    wait_until(lambda: gc.collect() >= 0 and all(one() is None for one in seen))


@pytest.mark.parametrize("make", [make_reader, make_batch_reader])
def test_a_second_iteration_warns_and_resets_the_reader(url: str, plain: str, make: Any) -> None:
    with make(url if make is make_reader else plain, schema_fields=["id"]) as reader:
        dataset = make_petastorm_dataset(reader)
        passes = [sorted(np.concatenate([np.atleast_1d(element.id) for element in dataset]).tolist())]
        with pytest.warns(UserWarning, match="Running multiple iterations over make_petastorm_dataset"):
            passes.append(sorted(np.concatenate([np.atleast_1d(element.id) for element in dataset]).tolist()))
    assert passes[0] == passes[1] == list(range(60))


def test_repeat_warns_when_the_first_pass_has_ended(url: str) -> None:
    with make_reader(url, schema_fields=["id"]) as reader:
        rows = iter(make_petastorm_dataset(reader).repeat(2))
        for _ in range(NUM_ROWS):
            next(rows)
        with pytest.warns(UserWarning, match="Running multiple iterations over make_petastorm_dataset"):
            next(rows)
        assert len(list(rows)) == NUM_ROWS - 1


def test_repeat_after_cache_does_not_warn(url: str) -> None:
    with make_reader(url, schema_fields=["id"]) as reader:
        rows = make_petastorm_dataset(reader).cache().repeat(3)
        assert sorted(int(row.id) for row in rows) == sorted([*range(NUM_ROWS)] * 3)


def test_datasets_can_be_joined_mapped_and_batched(url: str) -> None:
    with contextlib.ExitStack() as stack:
        even, odd = (
            stack.enter_context(
                make_reader(
                    url,
                    schema_fields=["id"],
                    predicate=in_lambda(["id"], lambda number, rest=rest: number % 30 == rest),
                )
            )
            for rest in (0, 1)
        )
        dataset = make_petastorm_dataset(even).prefetch(10).concatenate(make_petastorm_dataset(odd))
        assert [batch.numpy().tolist() for batch in dataset.map(lambda row: row.id).batch(2)] in (
            [[a, 30 - a], [b, 32 - b]] for a in (0, 30) for b in (1, 31)
        )


@pytest.mark.parametrize("make", [make_reader, make_batch_reader])
def test_a_dataset_is_one_of_v1_too(url: str, plain: str, make: Any) -> None:
    with v1.Graph().as_default(), make(url if make is make_reader else plain, schema_fields=["id"]) as reader:
        dataset = make_petastorm_dataset(reader)
        assert v1.data.get_output_shapes(dataset).id.rank == (0 if make is make_reader else 1)
        element = v1.data.make_one_shot_iterator(dataset).get_next()
        num_elements = NUM_ROWS if make is make_reader else 8
        with v1.Session() as session:
            ids = [np.atleast_1d(session.run(element).id) for _ in range(num_elements)]
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(element)
    assert sorted(np.concatenate(ids).tolist()) == list(range(60))


def test_autograph_has_nothing_to_complain_about(url: str, plain: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), make_reader(url, schema_fields=FIELDS) as reader:
        next(iter(make_petastorm_dataset(reader)))
        with make_batch_reader(plain, schema_fields=PLAIN) as batches:
            next(iter(make_batched_dataset(batches, batch_size=4)))
    assert "AutoGraph" not in caplog.text


def test_a_mixture_of_readers_is_a_dataset(url: str) -> None:
    readers = [make_reader(url, schema_fields=["id", "ragged"], num_epochs=None) for _ in range(2)]
    with WeightedSamplingReader(readers, [0.5, 0.5]) as mixed:
        rows = list(make_petastorm_dataset(mixed).take(200))
    assert all(len(row.ragged) == int(row.id) % 4 for row in rows)


# Windows -------------------------------------------------------------------------------------------------------------


def windows_of(url: str) -> Any:
    ngram = NGram({-1: ["id", "ragged", "city"], 1: ["id", "matrix"]}, delta_threshold=1, timestamp_field="id")
    return make_reader(url, schema_fields=ngram, shuffle_row_groups=False)


def assert_window(window: Any) -> None:
    assert list(window) == [-1, 0, 1]
    assert window[0] == ()
    before, after = window[-1], window[1]
    assert before._fields == ("id", "city", "ragged")
    assert int(before.id) + 2 == int(after.id)
    np.testing.assert_array_equal(before.ragged, row_of(int(before.id))["ragged"])
    np.testing.assert_array_equal(after.matrix, row_of(int(after.id))["matrix"])


def test_windows_are_dicts_of_rows_by_offset(url: str) -> None:
    with windows_of(url) as reader:
        dataset = make_petastorm_dataset(reader)
        assert dataset.element_spec[-1].ragged == tf.TensorSpec((None,), tf.int64)
        assert dataset.element_spec[1].matrix == tf.TensorSpec((2, 3), tf.float64)
        windows = list(dataset)
    for window in windows:
        assert_window(window)
    # Each file has row groups of 7, 7 and 6 rows, and a window takes 3.
    assert [int(window[-1].id) for window in windows][:7] == [0, 1, 2, 3, 4, 7, 8]
    assert len(windows) == 3 * (5 + 5 + 4)


def test_windows_are_tensors_of_a_graph(url: str) -> None:
    with v1.Graph().as_default(), windows_of(url) as reader:
        tensors = tf_tensors(reader)
        assert tensors[1].matrix.shape == (2, 3)
        with v1.Session() as session:
            for _ in range(5):
                assert_window(session.run(tensors))


def test_a_window_can_be_made_flat_and_back(url: str) -> None:
    with windows_of(url) as reader:
        flat = next(iter(tf_utils._ngrams_generator(reader)))
        assert flat._fields == ("id_0", "city_0", "ragged_0", "id_2", "matrix_2")
        with tf.Graph().as_default():
            window = tf_utils._unflatten_and_set_shape(
                reader.schema, reader.ngram, [tf.constant(value) for value in flat]
            )
            with v1.Session() as session:
                assert_window(session.run(window))


# Batches -------------------------------------------------------------------------------------------------------------


def assert_batch(batch: Any) -> None:
    ids = batch.id.numpy().astype(np.int64)
    np.testing.assert_array_equal(batch.speed, ids / 4)
    np.testing.assert_array_equal(batch.pair, np.stack((ids, -ids), 1))
    assert [city.decode() for city in batch.city.numpy()] == [f"Ø{number}" for number in ids]
    assert [decimal.Decimal(price.decode()) for price in batch.price.numpy()] == ids.tolist()
    np.testing.assert_array_equal(batch.day, (ids - 2) * NANOSECONDS)
    np.testing.assert_array_equal(batch.time, ids % 30 * 10**9)


def test_batches_are_row_groups_with_values_types_and_shapes(plain: str) -> None:
    with make_batch_reader(plain, schema_fields=PLAIN, shuffle_row_groups=False) as reader:
        dataset = make_petastorm_dataset(reader)
        assert {name: (spec.dtype, tuple(spec.shape)) for name, spec in dataset.element_spec._asdict().items()} == {
            "id": (tf.int32, (None,)), "speed": (tf.float32, (None,)), "pair": (tf.int64, (None, None)),
            "city": (tf.string, (None,)), "price": (tf.string, (None,)), "day": (tf.int64, (None,)),
            "time": (tf.int64, (None,)),
        }  # fmt: skip
        batches = list(dataset)
    assert [len(batch.id) for batch in batches] == [8, 8, 8, 6] * 2
    assert np.concatenate([batch.id for batch in batches]).tolist() == list(range(60))
    for batch in batches:
        assert_batch(batch)


@pytest.mark.parametrize("name", ["rank", "note", "born", "flag"])
def test_a_null_in_a_batch_is_named(plain: str, name: str) -> None:
    with make_batch_reader(plain, schema_fields=[name]) as reader:
        batches = iter(make_petastorm_dataset(reader))
        with pytest.raises(tf.errors.UnknownError, match=f'RuntimeError: Encountered "{name}"=None'):
            list(batches)


@pytest.mark.parametrize("capacity", [0, 5, 1000])
@pytest.mark.parametrize(
    "options",
    [{}, {"transform_spec": TransformSpec(lambda frame: frame)}, {"schema_fields": PLAIN}],
    ids=["native", "transform", "objects"],
)
def test_exact_batches_have_each_row_once(plain: str, options: dict[str, Any], capacity: int) -> None:
    arguments = {"schema_fields": ["id", "speed", "pair"], "seed": 1} | options
    orders = []
    for _ in range(2):
        with make_batch_reader(plain, **arguments) as reader:
            batches = list(make_batched_dataset(reader, batch_size=7, shuffling_queue_capacity=capacity))
        assert [len(batch.id) for batch in batches] == [7] * 8 + [4]
        orders.append(np.concatenate([batch.id for batch in batches]).tolist())
        for batch in batches:
            np.testing.assert_array_equal(batch.speed, batch.id.numpy() / 4)
            if len(batch) == len(PLAIN):
                assert_batch(batch)
    assert sorted(orders[0]) == list(range(60))
    # With the reader's seed.
    assert orders[0] == orders[1]
    if capacity == 1000:
        assert np.sum(np.diff(orders[0]) == 1) < 12


@pytest.mark.parametrize("fields", [["id", "speed", "pair"], PLAIN])
@pytest.mark.parametrize(
    "rows_of",
    [lambda dataset: dataset.unbatch(), lambda dataset: dataset.flat_map(tf.data.Dataset.from_tensor_slices)],
    ids=["unbatch", "flat_map"],
)
def test_batches_that_are_cut_again_are_as_tensorflow_cuts_them(plain: str, rows_of: Any, fields: list[str]) -> None:
    def dataset() -> Any:
        return make_petastorm_dataset(make_batch_reader(plain, schema_fields=fields, seed=1))

    for options in ({"batch_size": 7}, {"batch_size": 7, "drop_remainder": True}, {"batch_size": 100}):
        # A `map` keeps TensorFlow's own `batch`.
        expected = rows_of(dataset()).map(lambda row: row).batch(**options)
        actual = rows_of(dataset()).batch(**options)
        assert actual.element_spec == expected.element_spec
        batches = list(actual)
        assert len(batches) == {7: 8 + ("drop_remainder" not in options), 100: 1}[options["batch_size"]]
        for batch, other in zip(batches, expected, strict=True):
            for column, wanted in zip(batch, other, strict=True):
                np.testing.assert_array_equal(column, wanted)
    by_tensor = rows_of(dataset()).batch(tf.constant(7, tf.int64))
    assert [len(batch.id) for batch in by_tensor] == [7] * 8 + [4]
    assert len(list(rows_of(dataset()))) == 60


def test_another_function_of_batches_is_tensorflows_own(plain: str) -> None:
    with make_batch_reader(plain, schema_fields=["id"]) as reader:
        ids = (
            make_petastorm_dataset(reader)
            .flat_map(lambda batch: tf.data.Dataset.from_tensor_slices(batch.id))
            .batch(60)
        )
        assert sorted(next(iter(ids)).numpy().tolist()) == list(range(60))


def test_exact_batches_come_in_another_order_in_the_next_pass(plain: str) -> None:
    spec = TransformSpec(lambda frame: frame)
    for options in ({}, {"transform_spec": spec}):
        with make_batch_reader(plain, schema_fields=["id"], seed=1, shuffle_row_groups=False, **options) as reader:
            dataset = make_batched_dataset(reader, batch_size=7, shuffling_queue_capacity=100)
            first = np.concatenate([batch.id for batch in dataset]).tolist()
            with pytest.warns(UserWarning, match="Running multiple iterations"):
                second = np.concatenate([batch.id for batch in dataset]).tolist()
        assert sorted(first) == sorted(second)
        assert first != second


# Tensors of a graph --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def session_with_queues() -> Iterator[Any]:
    with v1.Session() as session:
        coordinator = v1.train.Coordinator()
        threads = v1.train.start_queue_runners(session, coordinator)
        yield session
        coordinator.request_stop()
        coordinator.join(threads)


def test_each_run_of_a_graph_takes_the_next_row(url: str) -> None:
    with v1.Graph().as_default(), make_reader(url, schema_fields=FIELDS, shuffle_row_groups=False) as reader:
        tensors = tf_tensors(reader)
        assert [tuple(tensor.shape) for tensor in tensors] == [
            (), (), (), (), (), (), (2,), (2, 3), (None,), (None, None), (None,),
        ]  # fmt: skip
        with v1.Session() as session:
            rows = [session.run(tensors) for _ in range(NUM_ROWS)]
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(tensors)
    assert [row.id for row in rows] == list(range(NUM_ROWS))
    for row in rows:
        assert_row(tf.nest.map_structure(tf.constant, row))


def test_each_run_of_a_graph_takes_the_next_batch(plain: str) -> None:
    with v1.Graph().as_default(), make_batch_reader(plain, schema_fields=PLAIN, shuffle_row_groups=False) as reader:
        tensors = tf_tensors(reader)
        assert [tensor.shape.rank for tensor in tensors] == [1, 1, 2, 1, 1, 1, 1]
        with v1.Session() as session:
            batches = [session.run(tensors) for _ in range(8)]
    for batch in batches:
        assert_batch(tf.nest.map_structure(tf.constant, batch))


def test_a_queue_shuffles_the_rows_of_a_graph(url: str) -> None:
    with v1.Graph().as_default(), make_reader(url, schema_fields=["id", "matrix"], num_epochs=None) as reader:
        tensors = tf_tensors(reader, shuffling_queue_capacity=30, min_after_dequeue=20)
        assert tensors.matrix.shape == (2, 3)
        with session_with_queues() as session:
            rows = [session.run(tensors) for _ in range(40)]
            assert session.run(f"{tf_utils.RANDOM_SHUFFLING_QUEUE_SIZE}:0") >= 20
    assert np.sum(np.diff([row.id for row in rows]) == 1) < 10
    assert all((row.matrix == row.id / 2).all() for row in rows)


def test_a_queue_of_one_field_is_a_row_too(url: str) -> None:
    with v1.Graph().as_default(), make_reader(url, schema_fields=["id"], num_epochs=None) as reader:
        tensors = tf_tensors(reader, 10, 5)
        with session_with_queues() as session:
            assert session.run(tensors)._fields == ("id",)


def test_batches_are_not_shuffled_in_a_queue(plain: str) -> None:
    with (
        make_batch_reader(plain) as reader,
        pytest.raises(ValueError, match="shuffling_queue_capacity can not be used"),
    ):
        tf_tensors(reader, 100, 90)


def test_tensors_are_the_next_row_where_there_is_no_graph(url: str) -> None:
    with make_reader(url, schema_fields=FIELDS, shuffle_row_groups=False) as reader:
        assert [int(tf_tensors(reader).id) for _ in range(3)] == [0, 1, 2]
        assert_row(tf_tensors(reader))


# Types ----------------------------------------------------------------------------------------------------------------


def test_types_have_their_counterparts() -> None:
    same = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.float32, np.float64, np.bool_)
    assert all(tf_utils._numpy_to_tf_dtypes(kind) == tf.as_dtype(kind) for kind in same)
    others = {
        np.uint16: tf.int32, np.uint32: tf.int64, np.datetime64: tf.int64, decimal.Decimal: tf.string,
        np.bytes_: tf.string, np.dtype("uint16"): tf.int32,
    }  # fmt: skip
    assert {kind: tf_utils._numpy_to_tf_dtypes(kind) for kind in others} == others
    schema = Unischema("Some", [UnischemaField("b", np.uint8, ()), UnischemaField("a", decimal.Decimal, ())])
    assert tf_utils._schema_to_tf_dtypes(schema) == [tf.uint8, tf.string]


@pytest.mark.parametrize("kind", [np.uint64, np.complex64, object, "int32"])
def test_a_type_without_a_counterpart_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="Unknown mapping of numpy"):
        tf_utils._numpy_to_tf_dtypes(kind)


@pytest.mark.filterwarnings("error")
def test_text_becomes_bytes_with_a_warning() -> None:
    with pytest.warns(UnicodeWarning, match="convert all unicode strings back to bytes"):
        assert tf_utils._numpy_to_tf_dtypes(np.str_) == tf.string


def test_values_of_a_row_become_what_tensorflow_takes() -> None:
    days = [DAY, DAY + dt.timedelta(2)]
    values = {
        "int32": np.array([-(2**31), 5], np.int32),
        "uint16": np.array([2**16 - 1], np.uint16),
        "uint32": np.array([2**32 - 1], np.uint32),
        "one_uint16": np.uint16(2**16 - 1),
        "one_uint32": np.uint32(2**32 - 1),
        "decimal": decimal.Decimal("123.40"),
        "days": np.array(days),
        "times": np.array(days, "datetime64[D]"),
        "time": np.datetime64(days[0]),
        "texts": np.array(["a", "b"]),
        "empty": np.array([], np.str_),
    }
    kind = namedtuple("Row", values)  # noqa: PYI024
    row = tf_utils._sanitize_field_tf_types(kind(**values))
    assert type(row) is kind
    assert (row.int32.dtype, row.uint16.dtype, row.uint32.dtype) == (np.int32, np.int32, np.int64)
    assert (row.uint16.tolist(), row.uint32.tolist(), row.decimal) == ([2**16 - 1], [2**32 - 1], "123.4")
    assert (row.one_uint16.dtype, row.one_uint32.dtype) == (np.int32, np.int64)
    assert (int(row.one_uint16), int(row.one_uint32)) == (2**16 - 1, 2**32 - 1)
    assert row.days.tolist() == row.times.tolist() == [-2 * NANOSECONDS, 0]
    assert row.time == tf_utils.date_to_nsec_from_epoch(DAY) == -2 * NANOSECONDS
    assert row.texts == ["a", "b"]
    for far in (np.datetime64("9999-12-31", "us"), np.array(["1600-01-01", "NaT"], "M8[D]")):
        with pytest.raises(ValueError, match=r"'time' has the time .* beyond the years 1677 to 2262"):
            tf_utils._sanitize_field_tf_types(kind(**values | {"time": far}))
    with pytest.raises(RuntimeError, match='Encountered "int32"=None'):
        tf_utils._sanitize_field_tf_types(kind(**values | {"int32": None}))


@pytest.mark.parametrize("odd", [1.5, 2**16, -(2**15) - 1])
def test_numbers_that_the_declared_type_lacks_are_no_tensors(odd: float) -> None:
    number = UnischemaField("n", np.int16, ())
    with pytest.raises(ValueError, match=rf"'n' has the number {odd}, which is none of int16"):
        tf_column(number, collect(number, [1, odd]))
    assert tf_column(number, np.array([1, 2.0], object)).dtype == np.int16


@pytest.mark.parametrize(
    ("kind", "number"), [(np.int32, 2**40), (np.uint8, -1), (np.int64, 2**63), (np.bool_, 2), (np.uint16, 2**31)]
)
def test_whole_numbers_of_a_wider_type_are_no_tensors(kind: Any, number: int) -> None:
    field = UnischemaField("n", kind, ())
    wide = np.array([1, number], np.uint64 if number == 2**63 else np.int64)
    with pytest.raises(ValueError, match=rf"'n' has the number {number}, which is none of"):
        tf_column(field, wide)
    with pytest.raises(ValueError, match=rf"'n' has the number {number}, which is none of"):
        checked_value(field, wide[1])
    assert tf_column(field, wide[:1]).tolist() == [1]


@pytest.mark.parametrize("wrap", [lambda reader: reader, Rows], ids=["columns", "rows alone"])
def test_numbers_of_a_function_of_rows_are_not_cut(tmp_path: Path, wrap: Any) -> None:
    pq.write_table(pa.table({"id": [1]}), tmp_path / "a.parquet")
    write_metadata(tmp_path.as_uri(), Unischema("Some", [UnischemaField("id", np.int64, ())]))
    spec = TransformSpec(lambda row: {"id": row["id"] + 2**40}, edit_fields=[("id", np.int32, (), False)])
    with (
        make_reader(tmp_path.as_uri(), transform_spec=spec) as reader,
        pytest.raises(tf.errors.InvalidArgumentError, match="which is none of int32"),
    ):
        list(make_petastorm_dataset(wrap(reader)))


def test_decimals_keep_all_digits() -> None:
    value = decimal.Decimal("12345678901234567890.1234567890123456780")
    assert tf_value("x", value) == str(value)[:-1]
    column = tf_column(UnischemaField("x", decimal.Decimal, ()), np.array([value, decimal.Decimal("1E+2")], object))
    assert column.tolist() == [str(value)[:-1], "1E+2"]


NOON = np.datetime64("2020-01-01T12:00:00.123456")
PYTHONS_NOON = NOON.item().replace(tzinfo=dt.timezone.utc)


@pytest.mark.parametrize(
    "noon",
    [NOON, NOON.item(), PYTHONS_NOON.astimezone(dt.timezone(dt.timedelta(hours=2))), pd.Timestamp(NOON)],
    ids=["numpy", "python", "zone", "pandas"],
)
def test_times_in_objects_are_nanoseconds_of_utc(noon: Any) -> None:
    field, expected = UnischemaField("t", np.datetime64, ()), NOON.astype("M8[ns]").astype(np.int64)
    for others in ([], [noon], [dt.date(1970, 1, 1)]):
        column = to_objects([noon, *others])
        assert tf_column(field, column).tolist() == [expected, expected if others == [noon] else 0][: len(column)]
    assert tf_value("t", noon) == expected
    with pytest.raises(ValueError, match="'t' has the time 9999-12-31, which is beyond the years 1677 to 2262"):
        tf_column(field, to_objects([noon, dt.date(9999, 12, 31)]))
    with pytest.raises(ValueError, match="'t' has the time 9999-12-31, which is beyond the years 1677 to 2262"):
        tf_column(field, to_objects([dt.date(9999, 12, 31)]))
    for null in (None, np.datetime64("NaT")):
        with pytest.raises(RuntimeError, match='Encountered "t"=None'):
            tf_column(field, to_objects([noon, null]))


@pytest.mark.parametrize("make", [make_reader, make_batch_reader])
@pytest.mark.filterwarnings("ignore:Currently make_reader")
def test_a_null_time_is_named_and_rows_before_it_come(tmp_path: Path, make: Any) -> None:
    times = pa.array([NOON.item()] * 3 + [None], pa.timestamp("us"))
    pq.write_table(pa.table({"t": times}), tmp_path / "a.parquet")
    with make(tmp_path.as_uri()) as reader:
        rows = iter(make_petastorm_dataset(reader))
        if make is make_reader:
            assert {int(next(rows).t) for _ in range(3)} == {NOON.astype("M8[ns]").astype(np.int64)}
        with pytest.raises(tf.errors.UnknownError, match='Encountered "t"=None'):
            list(rows)


def test_rows_of_other_shapes_than_declared_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(4)}), tmp_path / "a.parquet")
    write_metadata(tmp_path.as_uri(), Unischema("Some", [UnischemaField("id", np.int64, ())]))
    spec = TransformSpec(
        lambda row: row | {"x": np.zeros(1 + int(row["id"]) % 2)}, edit_fields=[("x", np.float64, (1,), False)]
    )
    with make_reader(tmp_path.as_uri(), transform_spec=spec) as reader:
        rows = iter(make_petastorm_dataset(reader))
        with pytest.raises(tf.errors.UnknownError, match=r"Field 'x' has rows of the shapes \(1,\), \(2,\)"):
            list(rows)


def test_without_tensorflow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    spec = importlib.util.spec_from_file_location("without_tensorflow", tf_utils.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"spark-tensor-converter\[tf,petastorm\]"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_lists_that_are_all_empty_are_batched(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(5), "x": pa.array([[]] * 5, pa.list_(pa.int64()))}), tmp_path / "a.parquet")
    with make_batch_reader(tmp_path.as_uri()) as reader:
        assert [tuple(batch.x.shape) for batch in make_batched_dataset(reader, batch_size=2)] == [
            (2, 0),
            (2, 0),
            (1, 0),
        ]
