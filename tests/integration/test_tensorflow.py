"""`make_tf_dataset`: the rows and the order of the NumPy reader, as TensorFlow and Keras take them."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import itertools
import json
import logging
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from converter import (
    ConverterError,
    DatasetConverter,
    NullValueError,
    SourceError,
    StateMismatchError,
    make_parquet_converter,
    open_converter,
)
from converter.frameworks import prompt
from converter.frameworks.tensorflow import DatasetState, DatasetStateCallback
from converter.frameworks.tensorflow import iterator as iterator_module
from converter.frameworks.tensorflow.elements import stretches_in, stretches_of
from converter.loading.options import LoaderOptions
from converter.reading import windows
from converter.reading.runs import Run
from tests.columns import ALL, ID, RAGGED, SCALARS, TENSORS, Column
from tests.entries import write_converter
from tests.processes import finish, run_python, start_python
from tests.waiting import wait_until

pytestmark = pytest.mark.short

NUM_ROWS = 103
PARTITIONS = [[range(40), range(40, 60)], [range(60, NUM_ROWS)]]
MIXED: dict[str, Any] = {"shuffle": True, "seed": 5, "shuffle_window_rows": 40}


@pytest.fixture(scope="module")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    folder = tmp_path_factory.mktemp("tf")
    with write_converter(folder, ALL, PARTITIONS, row_group_bytes=900) as found:
        assert found._manifest.num_row_groups > 8
        yield found


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    folder = tmp_path_factory.mktemp("vectors")
    with write_converter(folder, (ID, SCALARS[6], TENSORS[0]), PARTITIONS, row_group_bytes=200) as found:
        yield found


def ids(batches: Any) -> list[int]:
    return [int(one) for batch in batches for one in batch["id"].numpy()]


def numpy_ids(batches: Any) -> list[int]:
    return [int(one) for batch in batches for one in batch["id"]]


def no_reader_runs() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("converter-read")]


# Columns -----------------------------------------------------------------------------------------


def test_only_the_columns_that_are_named_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A null in a column that nobody asked for ends nothing, and its bytes are not read."""
    rows: dict[str, Any] = {"x": [1.0, 2.0], "y": [3, 4], "w": [1.0, 1.0], "z": [None, 5], "maybe": [None, 7.0]}
    pq.write_table(pa.table(rows), tmp_path / "x.parquet")
    converter = make_parquet_converter(tmp_path)
    read: list[tuple[str, ...]] = []
    source_of = DatasetConverter._source

    def source(self: DatasetConverter, options: LoaderOptions) -> Any:
        found = source_of(self, options)
        read.append(tuple(field.name for field in found.fields))
        return found

    monkeypatch.setattr(DatasetConverter, "_source", source)
    ways: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"features": "x", "labels": "y"}, ("x", "y")),
        ({"features": ["x"], "labels": ["y"], "weights": "w"}, ("x", "y", "w")),
        ({"features": "s", "labels": "y", "stack": {"s": ["x", "w"], "unused": ["y"]}}, ("x", "w", "y")),
        ({"features": ["maybe", "maybe__valid"], "labels": "y", "nulls": "mask"}, ("maybe", "y")),
        ({"features": ["row", "x"], "labels": "y", "with_row_index": "row"}, ("x", "y")),
        ({"features": "row", "labels": "y", "with_row_index": "row"}, ("y",)),
    ]
    for options, expected in ways:
        with converter.make_tf_dataset(batch_size=2, **options) as dataset:
            assert len(list(dataset)) == 1
        assert read[-1] == expected
    # What a transform uses is not known, nor is what was said outright changed.
    with converter.make_tf_dataset(features="x", nulls="mask", transform=lambda batch: batch) as dataset:
        assert set(read[-1]) == set(rows)
    with converter.make_tf_dataset(features="x", columns=["x", "y"]) as dataset:
        assert read[-1] == ("x", "y")
    with pytest.raises(NullValueError, match="'z'"):
        converter.make_tf_dataset(labels="y", columns=["x", "y", "z"])
    with pytest.raises(ValueError, match=r"features: a batch has no column 'nothing'\. It has 'x', 'y', 'w'"):
        converter.make_tf_dataset(features="nothing", labels="y", nulls="mask")


# Rows and order --------------------------------------------------------------------------------

WAYS: list[dict[str, Any]] = [
    {},
    MIXED,
    MIXED | {"shuffle_window_rows": "all"},
    MIXED | {"drop_last": True},
    MIXED | {"cur_shard": 1, "shard_count": 3},
    MIXED | {"cur_shard": 2, "shard_count": 3, "uneven": "pad"},
    MIXED | {"cur_shard": 0, "shard_count": 3, "uneven": "keep"},
    MIXED | {"filters": [("id", ">", 30)]},
    MIXED | {"num_epochs": 3},
    MIXED | {"with_row_index": "row", "stack": {"s": ["a_int8", "a_float32"]}},
    MIXED | {"prefetch_batches": 1, "workers_count": 3, "prefetch": 2},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("batch_size", [1, 7, 50, 200])
@pytest.mark.long("15 s")
def test_batches_are_those_of_the_numpy_reader(
    converter: DatasetConverter, options: dict[str, Any], batch_size: int
) -> None:
    of_numpy = {name: value for name, value in options.items() if name != "prefetch"}
    wanted_columns = {"columns": [column.name for column in (*SCALARS, *TENSORS)], "batch_size": batch_size}
    if "stack" in options:
        wanted_columns["columns"] = ["id", "s", "grid"]
    with (
        converter.make_batch_reader(**wanted_columns, **of_numpy) as reader,
        converter.make_tf_dataset(**wanted_columns, **options) as dataset,
    ):
        assert len(dataset) == len(reader) == int(dataset.cardinality())
        for _ in range(3):
            batches, wanted = list(dataset), list(reader)
            assert len(batches) == len(wanted)
            for batch, known in zip(batches, wanted, strict=True):
                assert_batch(batch, known)
                tf.nest.assert_same_structure(batch, dataset.element_spec)
                for name, spec in dataset.element_spec.items():
                    assert spec.is_compatible_with(batch[name])


def assert_batch(batch: dict[str, Any], known: dict[str, Any]) -> None:
    assert list(batch) == list(known) or sorted(batch) == sorted(known)
    for name, values in known.items():
        found = batch[name].numpy()
        if values.dtype == object:
            text = [one.encode() if isinstance(one, str) else one for one in values]
            assert found.tolist() == text, name
        elif values.dtype.kind == "M":
            dtype = np.int32 if values.dtype == np.dtype("datetime64[D]") else np.int64
            np.testing.assert_array_equal(found, values.astype(np.int64).astype(dtype), strict=True)
        else:
            np.testing.assert_array_equal(found, values, strict=True)


def test_shards_part_the_rows(vectors: DatasetConverter) -> None:
    parts = []
    for index in range(4):
        with vectors.make_tf_dataset(batch_size=8, cur_shard=index, shard_count=4, uneven="keep", **MIXED) as dataset:
            parts += ids(dataset)
    assert sorted(parts) == list(range(NUM_ROWS))


def test_a_dataset_for_ever_has_no_end(vectors: DatasetConverter) -> None:
    with vectors.make_tf_dataset(batch_size=25, num_epochs=None, **MIXED) as dataset:
        assert int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
        found = ids(dataset.take(15))
    with vectors.make_batch_reader(batch_size=25, num_epochs=None, **MIXED) as reader:
        assert found == numpy_ids(itertools.islice(reader, 15))


# Specs, features and labels --------------------------------------------------------------------


def test_the_spec_says_everything(converter: DatasetConverter) -> None:
    with converter.make_tf_dataset(batch_size=10, drop_last=True, ragged="nested") as dataset:
        spec = dataset.element_spec
    assert spec["a_bool"] == tf.TensorSpec((10,), tf.bool)
    assert spec["text"] == tf.TensorSpec((10,), tf.string)
    assert spec["day"] == tf.TensorSpec((10,), tf.int32)
    assert spec["at"] == tf.TensorSpec((10,), tf.int64)
    assert spec["cube"] == tf.TensorSpec((10, 2, 1, 2), tf.float64)
    assert spec["words"] == tf.RaggedTensorSpec((None, None), tf.int32, ragged_rank=1)
    with converter.make_tf_dataset(columns=["id", "grid"]) as dataset:
        assert dataset.element_spec == {
            "id": tf.TensorSpec((None,), tf.int64),
            "grid": tf.TensorSpec((None, 2, 3), "int32"),
        }


def test_features_labels_and_weights_have_their_places(converter: DatasetConverter) -> None:
    columns = ["id", "vector", "a_int8", "a_float32"]
    with converter.make_tf_dataset(columns=columns, labels="a_int8") as dataset:
        features, label = next(iter(dataset))
        assert list(features) == ["id", "vector", "a_float32"]
        assert label.dtype == tf.int8
    with converter.make_tf_dataset(
        columns=columns, features="vector", labels=["a_int8", "id"], weights="a_float32"
    ) as dataset:
        vector, labels, weights = next(iter(dataset))
        assert vector.shape == (32, 3)
        assert list(labels) == ["a_int8", "id"]
        assert weights.dtype == tf.float32
        assert labels["id"].numpy().tolist() == list(range(32))
        # In a graph as well as in an eager loop.
        total = dataset.reduce(np.int64(0), lambda sum_, batch: sum_ + tf.reduce_sum(batch[1]["id"]))
        assert int(total) == sum(range(NUM_ROWS))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"labels": "a_int9"}, ValueError, "labels: a batch has no column 'a_int9'. Did you mean 'a_int8'"),
        ({"labels": "id", "columns": ["vector"]}, ValueError, "labels: a batch has no column 'id'"),
        ({"labels": "id", "features": ["id", "vector"]}, ValueError, "column 'id' is named by labels already"),
        ({"labels": ["id", "id"]}, ValueError, "column 'id' is named by labels already"),
        ({"weights": "id"}, ValueError, "weights='id' needs labels"),
        ({"labels": "id", "weights": ["grid"]}, TypeError, "weights must be"),
        ({"labels": 3}, TypeError, "labels must be a column's name"),
        ({"labels": []}, TypeError, "labels must be a column's name"),
        ({"labels": "id", "columns": ["id"]}, ValueError, "leave no column for the features"),
        ({"prefetch": 0}, ValueError, "prefetch must be"),
        ({"batch_size": 0}, ValueError, "batch_size must be"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    converter: DatasetConverter, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        converter.make_tf_dataset(**{"columns": ["id", "vector", "a_int8", "grid"]} | options)
    assert text in str(caught.value)


def test_a_batch_larger_than_the_rows_with_drop_last_gives_nothing(vectors: DatasetConverter) -> None:
    with vectors.make_tf_dataset(batch_size=NUM_ROWS + 1, drop_last=True) as dataset:
        assert len(dataset) == 0
        assert list(dataset) == []


# Policies --------------------------------------------------------------------------------------


def test_ragged_rows_are_padded_or_nested_or_refused(converter: DatasetConverter) -> None:
    with pytest.raises(SourceError, match="words"):
        converter.make_tf_dataset(columns=["id", "words"])
    wanted = RAGGED.values(range(NUM_ROWS))
    with converter.make_tf_dataset(columns=["id", "words"], ragged="nested", batch_size=9) as dataset:
        rows = [row for batch in dataset for row in batch["words"].to_list()]
        assert rows == [row.tolist() for row in wanted]
        assert [int(batch["words"].nrows()) for batch in dataset.map(lambda batch: batch)][:2] == [9, 9]
    with converter.make_tf_dataset(columns=["id", "words"], ragged="pad", batch_size=9) as dataset:
        for batch in dataset:
            for row, length, number in zip(batch["words"], batch["words__length"], batch["id"], strict=True):
                assert row.numpy()[: int(length)].tolist() == wanted[int(number)].tolist()
                assert not row.numpy()[int(length) :].any()


def test_nulls_are_refused_masked_or_filled(tmp_path: Path) -> None:
    some = Column(name="some", dtype="float32", nullable=True)
    with write_converter(tmp_path, (ID, some), [[range(50)]]) as converter:
        with pytest.raises(NullValueError, match="some"):
            converter.make_tf_dataset()
        with converter.make_tf_dataset(nulls="mask", batch_size=50) as dataset:
            (batch,) = dataset
            assert batch["some__valid"].numpy().tolist() == some.valid(range(50)).tolist()
        with converter.make_tf_dataset(nulls={"some": -1}, batch_size=50) as dataset:
            (batch,) = dataset
            np.testing.assert_array_equal(batch["some"].numpy(), some.values(range(50), fill=-1))


@pytest.mark.parametrize("ragged", ["pad", "nested"])
@pytest.mark.parametrize("batch_size", [2, 5])
def test_null_elements_and_inner_lists_are_those_of_the_numpy_reader(
    tmp_path: Path, ragged: Any, batch_size: int
) -> None:
    x = pa.array([[1, None], [3, 4], None, [5, 6], [None, 8]], pa.list_(pa.float32()))
    words = pa.array([[1, None, 3], [], [4], None, [5]], pa.list_(pa.int32()))
    deep = pa.array([[[1], [2, 3]], [], [[4, None]], None, [[], [5]]], pa.list_(pa.list_(pa.int32())))
    pq.write_table(pa.table({"x": x, "words": words, "deep": deep}), tmp_path / "x.parquet")
    options: dict[str, Any] = {"nulls": "mask", "ragged": ragged, "batch_size": batch_size}
    converter = make_parquet_converter(tmp_path, shapes={"x": (2,)})
    with converter.make_tf_dataset(**options) as dataset, converter.make_batch_reader(**options) as reader:
        for way in (dataset, dataset.map(lambda batch: batch)):
            for batch, known in zip(way, reader, strict=True):
                assert list(batch) == list(known)
                for name, column in known.items():
                    found = batch[name]
                    assert dataset.element_spec[name].is_compatible_with(found)
                    if isinstance(found, tf.RaggedTensor):
                        listed = [
                            [one.tolist() for one in row] if row.dtype == object else row.tolist() for row in column
                        ]
                        assert found.to_list() == listed
                    else:
                        np.testing.assert_array_equal(found.numpy(), column, strict=True)


# Transforms ------------------------------------------------------------------------------------


def test_a_transform_decides_the_spec(vectors: DatasetConverter) -> None:
    def transform(batch: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
        noise = random.normal(size=len(batch["id"])).astype("float32")
        return {"id": batch["id"], "noisy": batch["vector"] + noise[:, None], "text": batch["id"].astype(str)}

    with (
        vectors.make_tf_dataset(transform=transform, batch_size=10, **MIXED) as dataset,
        vectors.make_batch_reader(transform=transform, batch_size=10, **MIXED) as reader,
    ):
        assert dataset.element_spec["noisy"] == tf.TensorSpec((None, 3), tf.float32)
        for batch, known in zip(dataset, reader, strict=True):
            np.testing.assert_array_equal(batch["noisy"].numpy(), known["noisy"])
            assert batch["text"].numpy().tolist() == [str(one).encode() for one in known["id"].tolist()]


@pytest.mark.parametrize(
    ("later", "text"),
    [
        (lambda batch: {"x": batch["id"].astype("float32")}, "column 'x' as float32"),
        (lambda batch: {"x": batch["vector"][:, :2]}, "column 'x'"),
        (lambda batch: {"y": batch["id"]}, r"returned columns \['y'\]"),
        (lambda _: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_transform_that_changes_its_mind_is_named(vectors: DatasetConverter, later: Any, text: str) -> None:
    def transform(batch: dict[str, Any]) -> Any:
        return later(batch) if batch["id"][0] >= 40 else {"x": batch["id"]}

    with vectors.make_tf_dataset(transform=transform, batch_size=10) as dataset:
        with pytest.raises(tf.errors.OpError, match=text) as caught:
            list(dataset)
        assert type(caught.value.__cause__).__name__ in str(caught.value)
        assert no_reader_runs()


def test_a_transform_without_a_tensor_form_is_refused_at_once(vectors: DatasetConverter) -> None:
    with pytest.raises(TypeError, match="column 'x'"):
        vectors.make_tf_dataset(transform=lambda batch: {"x": np.array([{}] * len(batch["id"]))})


# Epochs and states -----------------------------------------------------------------------------


def test_an_iteration_that_is_left_repeats_and_one_that_ends_moves_on(vectors: DatasetConverter) -> None:
    with (
        vectors.make_tf_dataset(batch_size=10, **MIXED) as dataset,
        vectors.make_batch_reader(batch_size=10, **MIXED) as reader,
    ):
        epochs = [numpy_ids(reader) for _ in range(5)]
        for _ in dataset:
            break
        assert ids(dataset.take(3)) == epochs[0][:30]
        assert ids(dataset) == epochs[0]
        assert ids(dataset.map(lambda batch: batch)) == epochs[1]
        assert ids(dataset.repeat(2)) == epochs[2] + epochs[3]
        dataset.set_epoch(1)
        assert ids(dataset) == epochs[1]
        first, second = iter(dataset), iter(dataset)
        pairs = list(zip(first, second, strict=True))
        assert ids(one for one, _ in pairs) == ids(one for _, one in pairs) == epochs[2]


def test_other_transformations_of_tensorflow_work(vectors: DatasetConverter) -> None:
    with vectors.make_tf_dataset(batch_size=10, **MIXED) as dataset:
        assert len(list(dataset.unbatch())) == NUM_ROWS
        cached = dataset.cache()
        assert ids(cached) == ids(cached)

        @tf.function
        def total(batches: tf.data.Dataset) -> Any:
            found = tf.constant(0, tf.int64)
            for batch in batches:
                found += tf.reduce_sum(batch["id"])
            return found

        assert int(total(dataset)) == sum(range(NUM_ROWS))
        zipped = tf.data.Dataset.zip((dataset, dataset))
        assert all((one["id"].numpy() == other["id"].numpy()).all() for one, other in zipped)


@pytest.mark.parametrize("step", [0, 1, 4, 10, 11])
def test_a_state_continues_with_the_next_row_here_and_in_numpy(vectors: DatasetConverter, step: int) -> None:
    with vectors.make_tf_dataset(batch_size=10, **MIXED) as dataset:
        whole = [one for _ in range(3) for one in ids(dataset)]
        dataset.set_epoch(0)
        head = ids(itertools.islice(dataset, step))
        state = json.loads(json.dumps(dataset.state_dict()))
        assert len(json.dumps(state)) < 1000
    assert head == whole[: len(head)]
    with vectors.make_tf_dataset(batch_size=10, **MIXED) as dataset:
        dataset.load_state_dict(state)
        rest = ids(dataset)
        assert head + rest == whole[: len(head) + len(rest)]
        assert ids(dataset) == whole[len(head) + len(rest) :][:NUM_ROWS]
    with vectors.make_batch_reader(batch_size=3, **MIXED) as reader:
        reader.load_state_dict(state)
        assert numpy_ids(reader) == rest
    with vectors.make_tf_dataset(batch_size=10) as dataset, pytest.raises(StateMismatchError):
        dataset.load_state_dict(state)


@pytest.mark.parametrize(("batches", "rest_of_ranks"), [(9, [0, 0, 1]), (10, [3, 3, 4])])
def test_ranks_begin_the_next_epoch_together(tmp_path: Path, batches: int, rest_of_ranks: list[int]) -> None:
    """Also if a rank has no row left in an epoch, and others have one."""
    pq.write_table(pa.table({"id": range(10)}), tmp_path / "a.parquet")
    options: dict[str, Any] = {"shuffle": True, "seed": 1, "uneven": "keep"}
    with make_parquet_converter(tmp_path) as converter:
        with converter.make_batch_reader(batch_size=1, cur_shard=0, shard_count=1, **options) as reader:
            state = reader.state_dict(batches=batches)
        found, epochs = [], []
        for rank in range(3):
            with converter.make_tf_dataset(batch_size=2, cur_shard=rank, shard_count=3, **options) as dataset:
                dataset.load_state_dict(state)
                found.append(len(ids(dataset)))
                epochs.append(dataset.state_dict()["epoch"])
                assert len(ids(dataset)) in (3, 4)
    assert found == rest_of_ranks
    assert len(set(epochs)) == 1


@pytest.mark.parametrize("num_epochs", [1, None])
def test_an_epoch_that_was_read_to_its_end_is_not_read_again_if_it_is_named(
    vectors: DatasetConverter, num_epochs: int | None
) -> None:
    """As in a loop over epochs that begins with the one of its checkpoint."""
    with vectors.make_tf_dataset(batch_size=10, num_epochs=num_epochs, **MIXED) as dataset:
        dataset.set_epoch(1)
        iterator = iter(dataset)
        num_batches = -(-len(vectors) // 10)
        whole = ids(itertools.islice(iterator, num_batches))
        state = dataset.state_dict(batches=num_batches)
        del iterator
    with vectors.make_tf_dataset(batch_size=10, **MIXED) as dataset:
        dataset.load_state_dict(state)
        dataset.set_epoch(1)
        assert ids(dataset) == []
        dataset.set_epoch(2)
        later = ids(dataset)
        assert sorted(later) == sorted(whole)
        # Named once more, it is asked for.
        dataset.set_epoch(1)
        assert ids(dataset) == whole
        # And without a name the next one begins.
        dataset.load_state_dict(state)
        assert ids(dataset) == later


def test_a_state_that_nobody_can_know_is_asked_for(vectors: DatasetConverter) -> None:
    with vectors.make_tf_dataset(batch_size=10, **MIXED) as dataset:
        mapped = iter(dataset.map(lambda batch: batch))
        next(mapped)
        next(mapped)
        with pytest.raises(ValueError, match="batches="):
            dataset.state_dict()
        state = dataset.state_dict(batches=2)
        del mapped
        dataset.load_state_dict(state)
        rest = ids(dataset)
        dataset.set_epoch(0)
        assert ids(dataset)[20:] == rest


def test_an_iteration_that_was_asked_for_counts_before_its_first_batch(vectors: DatasetConverter) -> None:
    with vectors.make_tf_dataset(batch_size=10, **MIXED) as dataset:
        ids(dataset)
        after_one = dataset.state_dict(batches=1)
        iterator = iter(dataset)
        state = dataset.state_dict(batches=0)
        assert after_one["epoch"] == 0
        assert (state["epoch"], state["past"]) == (1, [])
        assert dataset.state_dict(batches=1)["epoch"] == 1
        second = ids(iterator)
        dataset.load_state_dict(state)
        assert ids(dataset) == second


def test_many_texts_are_objects_in_stretches() -> None:
    run = Run(columns={}, batch_size=10, num_rows=57, first_batch=0)
    assert list(stretches_of(run, most_rows=25)) == [(0, 2, 10), (20, 2, 10), (40, 1, 10), (50, 1, 7)]
    assert list(stretches_of(run, most_rows=None)) == [(0, 5, 10), (50, 1, 7)]
    assert list(stretches_of(run, most_rows=1)) == [(first, 1, 10) for first in range(0, 50, 10)] + [(50, 1, 7)]


def test_the_epoch_after_a_resumed_one_is_whole_though_that_was_left_at_its_last_batch(
    vectors: DatasetConverter,
) -> None:
    with vectors.make_tf_dataset(batch_size=10, **MIXED) as dataset:
        made = dataset.map(lambda batch: batch).prefetch(2)
        for _ in range(6):
            dataset.set_epoch(0)
            dataset.load_state_dict(dataset.state_dict(batches=3))
            resumed = [ids([batch]) for batch in itertools.islice(made, dataset.remaining)]
            assert len(resumed) == len(dataset) - 3
            assert sorted(ids(made)) == list(range(len(vectors)))


@pytest.mark.parametrize("read_all", [list, lambda dataset: dataset.reduce(0, lambda count, _: count + 1)])
def test_where_another_loop_has_read_all_the_place_in_this_one_is_asked_for(
    vectors: DatasetConverter, read_all: Callable[[Any], Any]
) -> None:
    with vectors.make_tf_dataset(batch_size=10, **MIXED) as dataset:
        whole = ids(dataset)
        dataset.set_epoch(0)
        iterator = iter(dataset)
        found = ids(itertools.islice(iterator, 3))
        read_all(dataset)
        found += ids(itertools.islice(iterator, 1))
        with pytest.raises(ValueError, match="batches="):
            dataset.state_dict()
        state = dataset.state_dict(batches=4)
        assert found == whole[:40]
        # A loop that counts its steps has none left.
        ids(itertools.islice(iterator, len(dataset) - 4))
        assert dataset.state_dict()["epoch"] == 1
        dataset.load_state_dict(state)
        assert ids(dataset) == whole[40:]


@pytest.mark.parametrize("ask", [lambda dataset: dataset.remaining, lambda dataset: dataset.state_dict()])
def test_asking_where_tensorflow_reads_ahead_changes_no_state(
    vectors: DatasetConverter, ask: Callable[[Any], Any]
) -> None:
    with vectors.make_tf_dataset(batch_size=10, **MIXED) as dataset:
        whole = ids(dataset)
        dataset.set_epoch(0)
        given = iter(dataset.map(lambda batch: batch).prefetch(100))
        found = ids(itertools.islice(given, 5))
        wait_until(lambda: dataset._has_given_all, seconds=20)
        with contextlib.suppress(ValueError):
            ask(dataset)
        state = dataset.state_dict(batches=5)
        del given
        dataset.load_state_dict(state)
        assert found + ids(dataset) == whole


def test_a_checkpoint_of_tensorflow_holds_the_state(vectors: DatasetConverter, tmp_path: Path) -> None:
    step = tf.Variable(0)
    with vectors.make_tf_dataset(batch_size=10, **MIXED) as dataset:
        whole = ids(dataset)
        dataset.set_epoch(0)
        checkpoint = tf.train.Checkpoint(step=step, data=DatasetState(dataset))
        for _ in dataset:
            step.assign_add(1)
            if int(step) == 4:
                path = checkpoint.save(str(tmp_path / "model"))
                break
    with vectors.make_tf_dataset(batch_size=10, **MIXED) as dataset:
        other = tf.Variable(0)
        tf.train.Checkpoint(step=other, data=DatasetState(dataset)).restore(path)
        assert int(other) == 4
        assert ids(dataset) == whole[40:]


def test_a_peek_in_the_middle_does_not_hold_the_epoch_back(vectors: DatasetConverter) -> None:
    with (
        vectors.make_tf_dataset(batch_size=10, **MIXED) as dataset,
        vectors.make_batch_reader(batch_size=10, **MIXED) as reader,
    ):
        epochs = [numpy_ids(reader) for _ in range(2)]
        found: list[int] = []
        for step, batch in enumerate(dataset):
            found += batch["id"].numpy().tolist()
            if step == 4:
                next(iter(dataset))
                rest = dataset.state_dict()
        assert found == epochs[0]
        assert ids(dataset) == epochs[1]
        dataset.load_state_dict(rest)
        assert ids(dataset) == epochs[0][50:]


@pytest.mark.parametrize("use", ["get_next", "function", "two"])
def test_batches_that_are_used_in_other_ways_are_counted_or_asked_for(vectors: DatasetConverter, use: str) -> None:
    with vectors.make_tf_dataset(batch_size=10, **MIXED) as dataset:
        whole = ids(dataset)
        dataset.set_epoch(0)
        iterator = iter(dataset)
        next(iterator)
        if use == "get_next":
            iterator.get_next()
            dataset.load_state_dict(dataset.state_dict())
            assert ids(dataset) == whole[20:]
            return
        if use == "function":
            tf.function(lambda one: next(one))(iterator)  # noqa: PLW0108 (TensorFlow traces no builtin)
        else:
            other = iter(dataset)
            next(other)
        with pytest.raises(ValueError, match="batches="):
            dataset.state_dict()


@tf.function
def rest_of(iterator: Any) -> Any:
    rows = tf.TensorArray(tf.int64, 0, dynamic_size=True, infer_shape=False, element_shape=(None,))
    for batch in iterator:
        rows = rows.write(rows.size(), batch["id"])
    return rows.concat()


@pytest.mark.parametrize("used", [0, 1, 7, 10, 11])
@pytest.mark.parametrize("by", ["argument", "closure"])
def test_tensorflow_goes_on_where_an_eager_loop_has_stopped(vectors: DatasetConverter, used: int, by: str) -> None:
    with vectors.make_tf_dataset(batch_size=10, **MIXED) as dataset:
        epochs = [ids(dataset), ids(dataset)]
        dataset.set_epoch(0)
        iterator = iter(dataset)
        assert ids(itertools.islice(iterator, used)) == epochs[0][: used * 10]
        if by == "argument":
            rest = rest_of(iterator).numpy().tolist()
        else:
            one = tf.function(lambda: iterator.get_next()["id"])
            rest = [int(row) for _ in range(used, 11) for row in one().numpy()]
        assert rest == epochs[0][used * 10 :]
        assert list(iterator) == []
        assert ids(dataset) == epochs[1]
    assert no_reader_runs()


@pytest.mark.parametrize("meanwhile", ["epoch", "set_epoch", "load", "other"])
def test_an_iterator_goes_on_with_its_own_rows_whatever_the_dataset_does(
    vectors: DatasetConverter, meanwhile: str
) -> None:
    for go_on in (ids, lambda iterator: rest_of(iterator).numpy().tolist()):
        with vectors.make_tf_dataset(batch_size=10, **MIXED) as dataset:
            whole = ids(dataset)
            dataset.set_epoch(0)
            state = dataset.state_dict(8)
            iterator = iter(dataset)
            found = ids(itertools.islice(iterator, 2))
            if meanwhile == "epoch":
                ids(dataset)
            elif meanwhile == "set_epoch":
                dataset.set_epoch(2)
            elif meanwhile == "load":
                dataset.load_state_dict(state)
            else:
                next(iter(dataset))
            assert found + go_on(iterator) == whole


def test_what_was_resumed_and_used_up_has_no_more_rows_elsewhere(vectors: DatasetConverter) -> None:
    with vectors.make_tf_dataset(batch_size=10, **MIXED) as dataset:
        epochs = [ids(dataset), ids(dataset)]
        dataset.set_epoch(0)
        dataset.load_state_dict(dataset.state_dict(5))
        iterator = iter(dataset)
        assert ids(itertools.islice(iterator, 6)) == epochs[0][50:]
        assert rest_of(iterator).numpy().tolist() == []
        assert ids(dataset) == epochs[1]


def test_an_end_within_a_transform_is_an_error(vectors: DatasetConverter) -> None:
    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        if 55 in batch["id"]:
            next(iter(tf.data.Dataset.range(0)))
        return batch

    def ended(batch: dict[str, Any]) -> dict[str, Any]:
        if 55 in batch["id"]:
            iter(tf.data.Dataset.range(0)).get_next()
        return batch

    for one in (transform, ended):
        with vectors.make_tf_dataset(batch_size=10, transform=one) as dataset, pytest.raises(tf.errors.OpError):
            ids(dataset)


def test_what_a_transform_hands_out_stays_its_own(vectors: DatasetConverter) -> None:
    table = pa.allocate_buffer(8 * 16 * 4)
    shared = np.frombuffer(table, np.float32).reshape(8, 16)
    shared[...] = 1

    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        rows = len(batch["id"])
        return {"x": shared[:rows], "y": shared[:rows]}

    with vectors.make_tf_dataset(batch_size=8, transform=transform) as dataset:
        for _ in range(3):
            for batch in dataset.map(lambda batch: (batch["x"] + 1.0, batch["y"])):
                assert np.all(batch[0] == 2)
                assert np.all(batch[1] == 1)
        kept = list(dataset)
        shared[...] = 5
        assert all(np.all(batch["x"] == 1) for batch in kept)


def test_an_iterator_tells_of_its_types_as_others_do(vectors: DatasetConverter) -> None:
    with vectors.make_tf_dataset(batch_size=8, columns=["id"]) as dataset:
        iterator = iter(dataset)
        assert iterator.element_spec == dataset.element_spec
        assert tf.compat.v1.data.get_output_types(iterator) == {"id": tf.int64}
        assert iterator.output_shapes["id"].as_list() == [None]


def test_tensors_share_the_memory_of_their_window(vectors: DatasetConverter) -> None:
    with vectors.make_tf_dataset(batch_size=8, columns=["id"], shuffle=True, shuffle_window_rows="all") as dataset:
        batches = [np.asarray(memoryview(batch["id"])) for batch in dataset]
    distances = np.diff([batch.ctypes.data for batch in batches]).tolist()
    # The first eighth of a window is read for itself.
    assert len(batches) == 13
    assert distances.count(batches[0].nbytes) >= 10


def test_threads_that_share_an_iterator_have_each_row_once(vectors: DatasetConverter) -> None:
    found: list[list[int]] = [[], []]
    with vectors.make_tf_dataset(batch_size=1, num_epochs=20, **MIXED) as dataset:
        iterator = iter(dataset)
        threads = [threading.Thread(target=lambda rows=rows: rows.extend(ids(iterator))) for rows in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert dataset.state_dict()["epoch"] == 20
    assert sorted(found[0] + found[1]) == sorted(list(range(NUM_ROWS)) * 20)


def test_rows_do_not_begin_again_behind_an_error(vectors: DatasetConverter) -> None:
    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        if 55 in batch["id"]:
            raise ValueError("a bad row")
        return batch

    with vectors.make_tf_dataset(batch_size=10, transform=transform) as dataset:
        assert ids(dataset.ignore_errors()) == list(range(50))
        iterator = iter(dataset)
        assert ids(itertools.islice(iterator, 5)) == list(range(50))
        with pytest.raises(tf.errors.OpError, match="a bad row"):
            next(iterator)
        assert list(iterator) == []


def test_the_next_iteration_begins_anew_after_an_error(vectors: DatasetConverter) -> None:
    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        if 55 in batch["id"]:
            raise ValueError("a bad row")
        return batch

    with vectors.make_tf_dataset(batch_size=10, transform=transform) as dataset:
        mapped = dataset.map(lambda batch: batch["id"] + 1)
        for _ in range(2):
            iterator = iter(mapped)
            assert [row for batch in itertools.islice(iterator, 5) for row in batch.numpy()] == list(range(1, 51))
            with pytest.raises(tf.errors.OpError, match="a bad row"):
                next(iterator)
            del iterator


@pytest.mark.parametrize("odd", [None, 7, ["a"]], ids=str)
def test_a_column_that_is_text_only_in_part_is_refused(vectors: DatasetConverter, odd: Any) -> None:
    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        text = np.array([f"row {number}" for number in batch["id"]], object)
        text[3] = odd
        return {"text": text}

    with pytest.raises(TypeError, match="column 'text' as object, which has no TensorFlow type"):
        vectors.make_tf_dataset(batch_size=10, transform=transform)


def test_a_time_that_is_none_is_refused(vectors: DatasetConverter) -> None:
    with pytest.raises(ValueError, match="NaT"):
        vectors.make_tf_dataset(transform=lambda batch: {"day": np.full(len(batch["id"]), "NaT", "M8[D]")})


# Keras -----------------------------------------------------------------------------------------


class Seen(keras.callbacks.Callback):
    """Counts steps by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.steps.append(0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps[-1] += 1


def make_model() -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    return model


def test_keras_fits_evaluates_and_predicts(vectors: DatasetConverter) -> None:
    options: dict[str, Any] = {"batch_size": 10, "features": "vector", "labels": "a_float32", **MIXED}
    model, seen = make_model(), Seen()
    with vectors.make_tf_dataset(**options) as dataset, vectors.make_tf_dataset(**options) as validation:
        model.fit(dataset, epochs=3, validation_data=validation, callbacks=[seen], shuffle=False, verbose=0)
        assert seen.steps == [11, 11, 11]
        # The model that was not built yet peeked at the first batch; that moved nothing.
        assert dataset.state_dict()["epoch"] == 3
        assert np.isfinite(model.evaluate(dataset, verbose=0))
        assert model.predict(dataset.map(lambda features, _: features), verbose=0).shape == (NUM_ROWS, 1)


def test_a_callback_writes_the_state_beside_the_model(vectors: DatasetConverter, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 10, "features": "vector", "labels": "id", **MIXED}
    path = tmp_path / "state.json"

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 7:
                raise KeyboardInterrupt

    with vectors.make_tf_dataset(**options) as dataset:
        epochs = [[int(one) for _, label in dataset for one in label] for _ in range(2)]
        dataset.set_epoch(0)
        model, callback = make_model(), DatasetStateCallback(dataset, path, save_freq=3)
        with pytest.raises(KeyboardInterrupt):
            model.fit(dataset, epochs=2, callbacks=[callback, Stop()], shuffle=False, verbose=0)
    with vectors.make_tf_dataset(**options) as dataset:
        dataset.load_state_dict(json.loads(path.read_text()))
        assert [int(one) for _, label in dataset for one in label] == epochs[0][60:]
        dataset.set_epoch(0)
        make_model().fit(dataset, epochs=1, callbacks=[DatasetStateCallback(dataset, path)], shuffle=False, verbose=0)
        dataset.load_state_dict(json.loads(path.read_text()))
        assert [int(one) for _, label in dataset for one in label] == epochs[1]
    with pytest.raises(ValueError, match="save_freq"):
        DatasetStateCallback(dataset, path, save_freq=0)


def test_a_callback_counts_executions_of_several_steps_and_no_peeks(vectors: DatasetConverter, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 10, "features": "vector", "labels": "id", **MIXED}
    path = tmp_path / "state.json"

    class Peek(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            next(iter(dataset))
            if batch == 7:
                raise KeyboardInterrupt

    with vectors.make_tf_dataset(**options) as dataset:
        epochs = [[int(one) for _, label in dataset for one in label] for _ in range(2)]
        dataset.set_epoch(0)
        model = make_model()
        model.compile(keras.optimizers.SGD(0.0), "mse", steps_per_execution=4)
        callback = DatasetStateCallback(dataset, path, save_freq=3)
        with pytest.raises(KeyboardInterrupt):
            model.fit(dataset, callbacks=[Peek(), callback], shuffle=False, verbose=0)
        dataset.load_state_dict(json.loads(path.read_text()))
        assert [int(one) for _, label in dataset for one in label] == epochs[0][40:]
        dataset.set_epoch(0)
        model.fit(dataset, callbacks=[callback], shuffle=False, verbose=0)
        dataset.load_state_dict(json.loads(path.read_text()))
        assert [int(one) for _, label in dataset for one in label] == epochs[1]


def state_of_fit(
    vectors: DatasetConverter, path: Path, given: Callable[[Any], Any], *, batches: int, **fit: Any
) -> tuple[list[int], list[int]]:
    """The rows that come after the state that a fit wrote, and those that come after so many batches of ten."""
    options: dict[str, Any] = {"batch_size": 10, "features": "vector", "labels": "id", "drop_last": True, **MIXED}
    with vectors.make_tf_dataset(**options) as dataset, vectors.make_tf_dataset(**options) as other:
        whole = [int(one) for _ in range(12) for _, label in other for one in label]
        model = make_model()
        if "steps_per_execution" in fit:
            model.compile(keras.optimizers.SGD(0.0), "mse", steps_per_execution=fit.pop("steps_per_execution"))
        callbacks = fit.pop("callbacks", lambda _: [])(dataset)
        validation = fit.pop("validation", lambda _: {})(dataset)
        callbacks.append(DatasetStateCallback(dataset, path, save_freq=fit.pop("save_freq", "epoch")))
        model.fit(given(dataset), callbacks=callbacks, shuffle=False, verbose=0, **validation, **fit)
        other.load_state_dict(json.loads(path.read_text()))
        found = [int(one) for _ in range(2) for _, label in other for one in label]
    return found, whole[10 * batches :][: len(found)]


class LookAtEnds(keras.callbacks.Callback):
    """Uses the dataset where an epoch, or its last batch, ends."""

    def __init__(self, dataset: Any) -> None:
        super().__init__()
        self.dataset = dataset

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 9:
            next(iter(self.dataset))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.dataset.state_dict(batches=0)
        for _ in self.dataset.take(1):
            pass


FITS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "plain": (lambda dataset: dataset, {"epochs": 2, "batches": 20}),
    "validated": (
        lambda dataset: dataset,
        {"epochs": 1, "batches": 10, "validation": lambda dataset: {"validation_data": dataset.take(2)}},
    ),
    # It reads epochs 1 and 3, `fit` 0 and 2.
    "validated on itself": (
        lambda dataset: dataset,
        {"epochs": 2, "batches": 30, "validation": lambda dataset: {"validation_data": dataset}},
    ),
    "looked at": (lambda d: d, {"epochs": 2, "batches": 20, "callbacks": lambda dataset: [LookAtEnds(dataset)]}),
    "read ahead": (
        lambda dataset: dataset.repeat().prefetch(4),
        {"epochs": 7, "steps_per_epoch": 8, "batches": 56, "save_freq": 1},
    ),
    "executions": (lambda dataset: dataset, {"epochs": 3, "batches": 30, "steps_per_execution": 4}),
    "executions over epochs": (
        lambda dataset: dataset.repeat(),
        {"epochs": 3, "steps_per_epoch": 10, "batches": 36, "steps_per_execution": 4},
    ),
}


@pytest.mark.parametrize("name", FITS)
def test_a_callbacks_state_is_of_the_batches_that_the_model_saw(
    vectors: DatasetConverter, tmp_path: Path, name: str
) -> None:
    given, options = FITS[name]
    found, expected = state_of_fit(vectors, tmp_path / "state.json", given, **options)
    assert found
    assert found == expected


def test_a_callback_saves_at_the_steps_of_a_model_checkpoint_in_a_second_fit_too(
    vectors: DatasetConverter, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"batch_size": 10, "features": "vector", "labels": "id", "drop_last": True}
    at: dict[str, list[int]] = {"model": [], "state": []}
    count = 0

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            nonlocal count
            count += 1

    class Model(keras.callbacks.ModelCheckpoint):
        def _save_model(self, *_: Any, **__: Any) -> None:
            at["model"].append(count)

    class Data(DatasetStateCallback):
        def _save(self) -> None:
            at["state"].append(count)
            super()._save()

    with vectors.make_tf_dataset(**options) as dataset:
        model = make_model()
        callbacks = [
            Count(),
            Model(tmp_path / "model.weights.h5", save_freq=6, save_weights_only=True),
            Data(dataset, tmp_path / "state.json", save_freq=6),
        ]
        for _ in range(3):
            model.fit(dataset, callbacks=callbacks, shuffle=False, verbose=0)
    assert at["model"] == at["state"] == [6, 12, 18, 24, 30]


def test_a_peek_does_not_stand_for_what_tensorflow_uses(vectors: DatasetConverter) -> None:
    with vectors.make_tf_dataset(batch_size=10, **MIXED) as dataset:
        next(iter(dataset))
        mapped = iter(dataset.map(lambda batch: batch))
        for _ in range(5):
            next(mapped)
        with pytest.raises(ValueError, match="batches="):
            dataset.state_dict()
        del mapped
        dataset.set_epoch(0)
        assert dataset.state_dict()["past"] == []
        iterator = iter(dataset)
        next(iterator)
        assert dataset.state_dict()["past"] == [[1, 10]]
        iterator.get_next_as_optional()
        with pytest.raises(ValueError, match="batches="):
            dataset.state_dict()


@pytest.mark.parametrize("how", ["load_state_dict", "set_epoch"])
def test_an_iterator_from_before_counts_no_more(vectors: DatasetConverter, how: str) -> None:
    with vectors.make_tf_dataset(batch_size=10) as dataset:
        old = iter(dataset)
        for _ in range(3):
            next(old)
        begin = 3 if how == "load_state_dict" else 0
        dataset.load_state_dict(dataset.state_dict()) if begin else dataset.set_epoch(0)
        next(iter(dataset))
        next(old)
        assert dataset.state_dict()["past"] == [[1, 10 * begin + 10]]
        # Nor does its end: the next iteration begins as it was told.
        dataset.load_state_dict(dataset.state_dict()) if begin else dataset.set_epoch(0)
        list(old)
        assert dataset.state_dict()["epoch"] == 0


def test_an_asynchronous_checkpoint_holds_the_state_of_its_moment(vectors: DatasetConverter, tmp_path: Path) -> None:
    step = tf.Variable(0)
    with vectors.make_tf_dataset(batch_size=10, **MIXED) as dataset:
        whole = ids(dataset)
        dataset.set_epoch(0)
        checkpoint = tf.train.Checkpoint(step=step, data=DatasetState(dataset))
        for number, _ in enumerate(dataset, 1):
            step.assign_add(1)
            # From the second save on TensorFlow runs a graph that it has made of the first ones.
            if number in (1, 2, 4):
                options = tf.train.CheckpointOptions(enable_async=True)
                path = checkpoint.save(str(tmp_path / "model"), options=options)
            if number == 8:
                break
        checkpoint.sync()
    with vectors.make_tf_dataset(batch_size=10, **MIXED) as dataset:
        other = tf.Variable(0)
        tf.train.Checkpoint(step=other, data=DatasetState(dataset)).restore(path)
        assert int(other) == 4
        assert ids(dataset) == whole[40:]


def stop_and_fork(url: str) -> int:
    """Stop a fit in the middle, then read with torch's forked workers, which collect their parent's garbage."""
    import gc

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 5

    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        gc.collect()
        return batch

    converter = open_converter(url)
    with converter.make_tf_dataset(batch_size=2, features="vector", labels="id") as dataset:
        make_model().fit(dataset, callbacks=[Stop()], shuffle=False, verbose=0)
    with converter.make_torch_dataloader(
        batch_size=20, num_workers=2, transform=transform, multiprocessing_context="fork", columns=["id"]
    ) as loader:
        return sum(len(batch["id"]) for batch in loader)


@pytest.mark.long("a process of its own, 17 s")
def test_torchs_workers_do_not_wait_for_threads_of_tensorflow(vectors: DatasetConverter) -> None:
    assert run_python(stop_and_fork, vectors.url) == NUM_ROWS


# Strategies ------------------------------------------------------------------------------------


def read_mirrored(url: str) -> Any:
    """Two replicas on one machine: the rows of each, with the whole dataset and with one for each input pipeline."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    options: dict[str, Any] = {"batch_size": 10, "columns": ["id"], "shuffle": True}
    found = []
    with open_converter(url).make_tf_dataset(**options) as dataset:
        for batch in strategy.experimental_distribute_dataset(dataset):
            found.append([part.numpy().tolist() for part in strategy.experimental_local_results(batch["id"])])

    def make(context: Any) -> Any:
        return open_converter(url).make_tf_dataset(
            **options | {"batch_size": context.get_per_replica_batch_size(10)},
            cur_shard=context.input_pipeline_id,
            shard_count=context.num_input_pipelines,
        )

    by_function = []
    for batch in strategy.distribute_datasets_from_function(make):
        by_function += [part.numpy().tolist() for part in strategy.experimental_local_results(batch["id"])]
    return found, by_function


@pytest.mark.long("a process of its own, 25 s")
def test_mirrored_replicas_read_every_row_once(vectors: DatasetConverter) -> None:
    batches, by_function = run_python(read_mirrored, vectors.url)
    assert sorted(itertools.chain(*itertools.chain(*batches))) == list(range(NUM_ROWS))
    assert [[len(part) for part in batch] for batch in batches[:-1]] == [[5, 5]] * 10
    assert sorted(itertools.chain(*by_function)) == list(range(NUM_ROWS))


def read_as_worker(url: str, shard: dict[str, Any]) -> Any:
    """A worker of two, as TF_CONFIG says: its rows, how many steps it was told of, and what it was warned of."""
    logs = io.StringIO()
    logging.getLogger("converter").addHandler(logging.StreamHandler(logs))
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rows = []
    with open_converter(url).make_tf_dataset(batch_size=10, columns=["id"], shuffle=True, **shard) as dataset:
        for batch in strategy.experimental_distribute_dataset(dataset):
            rows += [part.numpy().tolist() for part in strategy.experimental_local_results(batch["id"])]
        return [rows, len(dataset), logs.getvalue()]


@pytest.mark.parametrize("shard", [{"uneven": "keep"}, {"cur_shard": 0, "shard_count": 1}], ids=["found", "whole"])
@pytest.mark.long("processes of their own, 42 s")
def test_workers_of_tf_config_read_every_row_once(vectors: DatasetConverter, shard: dict[str, Any]) -> None:
    import socket

    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    workers = [f"127.0.0.1:{port}" for port in ports]
    configs = [json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": one}}) for one in (0, 1)]
    with (
        start_python(read_as_worker, vectors.url, shard, environment={"TF_CONFIG": configs[0]}) as first,
        start_python(read_as_worker, vectors.url, shard, environment={"TF_CONFIG": configs[1]}) as second,
    ):
        parts, steps, warnings = zip(finish(first), finish(second), strict=True)
    cut = ["experimental_distribute_dataset cuts each batch into 2 steps" in text for text in warnings]
    if "shard_count" in shard:
        assert cut == [False, False]
        assert steps == (11, 11) == tuple(map(len, parts))
        assert [[len(part) for part in own[:-1]] for own in parts] == [[5] * 10] * 2
    else:
        assert cut == [True, True]
    assert sorted(itertools.chain(*parts[0], *parts[1])) == list(range(NUM_ROWS))
    assert all(len(part) <= 5 for part in itertools.chain(*parts))


# Lifecycle -------------------------------------------------------------------------------------


def test_a_closed_dataset_says_so_and_leaves_no_thread(vectors: DatasetConverter) -> None:
    with vectors.make_tf_dataset(batch_size=5, **MIXED) as dataset:
        iterator = iter(dataset)
        next(iterator)
    assert no_reader_runs()
    with pytest.raises(tf.errors.OpError, match="ConverterError: This loader was closed"):
        next(iterator)
    with pytest.raises(tf.errors.OpError, match="ConverterError: This loader was closed") as caught:
        next(iter(dataset))
    assert isinstance(caught.value.__cause__, ConverterError)


def test_a_dataset_that_is_closed_while_tensorflow_prefetches_ends(vectors: DatasetConverter) -> None:
    with vectors.make_tf_dataset(batch_size=1, num_epochs=None, **MIXED) as dataset:
        iterator = iter(dataset.prefetch(4))
        next(iterator)
    assert no_reader_runs()


@pytest.mark.parametrize("ahead", [None, 1])
def test_who_awaits_a_batch_while_another_thread_closes_the_dataset_is_told_so(
    vectors: DatasetConverter, ahead: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told "generator already executing". python -m tests.faults.campaign lives --case 48:834 --steps 1"""
    closing, may_end = threading.Event(), threading.Event()

    def slow_to_close(*arguments: Any) -> Iterator[Any]:
        try:
            yield from stretches_in(*arguments)
        finally:
            closing.set()
            assert may_end.wait(40)

    monkeypatch.setattr("converter.frameworks.tensorflow.dataset.stretches_in", slow_to_close)
    dataset = vectors.make_tf_dataset(batch_size=1, num_epochs=None, **MIXED)
    iterator = iter(dataset if ahead is None else dataset.prefetch(ahead))
    next(iterator)
    closer = threading.Thread(target=dataset.close)
    closer.start()
    assert closing.wait(40)
    with pytest.raises(tf.errors.OpError, match="ConverterError: This loader was closed"):
        list(itertools.islice(iterator, NUM_ROWS))
    may_end.set()
    closer.join()
    assert no_reader_runs()


def test_an_iterator_that_is_collected_leaves_no_thread(vectors: DatasetConverter) -> None:
    with vectors.make_tf_dataset(batch_size=1, num_epochs=None, **MIXED) as dataset:
        iterator = iter(dataset)
        next(iterator)
        assert not no_reader_runs()
        del iterator
        assert no_reader_runs()


def test_a_dataset_that_is_let_go_of_lets_go_of_its_files(vectors: DatasetConverter) -> None:
    def num_mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count(vectors.url.removeprefix("file://"))

    before = num_mapped()
    kept = vectors.make_tf_dataset(batch_size=10)
    assert len(ids(kept)) == NUM_ROWS
    assert num_mapped() > before
    known = weakref.ref(kept)
    del kept
    assert num_mapped() == before
    assert known() is None


@pytest.mark.long("7 s")
def test_what_was_made_of_a_dataset_holds_it(vectors: DatasetConverter) -> None:
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    made = [
        vectors.make_tf_dataset(batch_size=10).map(lambda batch: batch).prefetch(2).repeat(2).take(11),
        strategy.experimental_distribute_dataset(vectors.make_tf_dataset(batch_size=10)),
        strategy.distribute_datasets_from_function(lambda _: vectors.make_tf_dataset(batch_size=10)),
        iter(vectors.make_tf_dataset(batch_size=10)),
        iter(vectors.make_tf_dataset(batch_size=10).map(lambda batch: batch)),
        iter(strategy.experimental_distribute_dataset(vectors.make_tf_dataset(batch_size=10))),
    ]
    gc.collect()
    for one in made:
        assert ids(one) == list(range(NUM_ROWS))
        gc.collect()


def test_a_file_that_is_gone_is_named_in_tensorflows_error(tmp_path: Path) -> None:
    with write_converter(tmp_path, (ID,), PARTITIONS) as converter, converter.make_tf_dataset() as dataset:
        for path in tmp_path.rglob("*.parquet"):
            path.unlink()
        with pytest.raises(tf.errors.OpError, match=r"SourceChangedError: .*\.parquet is not there"):
            list(dataset)
        assert no_reader_runs()


def leave_in_the_middle(url: str) -> str:
    """End the interpreter with iterators under way."""
    dataset = open_converter(url).make_tf_dataset(batch_size=1, num_epochs=None)
    leave_in_the_middle.kept = iter(dataset), iter(dataset.prefetch(8))  # type: ignore[attr-defined]
    return str([next(one)["id"].numpy().tolist() for one in leave_in_the_middle.kept])  # type: ignore[attr-defined]


@pytest.mark.long("a process of its own, 22 s")
def test_an_interpreter_ends_with_iterators_under_way(vectors: DatasetConverter) -> None:
    assert run_python(leave_in_the_middle, vectors.url) == "[[0], [0]]"


def free_in_a_readers_thread(url: str) -> list[bool]:
    """The collector frees TensorFlow's iterators, which read ahead, in threads that TensorFlow waits for."""
    gather, is_held, may_collect, is_collected = (windows.gather, *(threading.Event() for _ in range(3)))

    def gather_late(*arguments: Any) -> Any:
        if is_held.is_set():
            is_held.clear()
            may_collect.wait()
            gc.collect()
            is_collected.set()
        return gather(*arguments)

    windows.gather = gather_late  # type: ignore[assignment]
    gc.disable()
    found = []
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "shuffle_window_rows": 20, "workers_count": 1}
    for prefetch in (64, None):
        with open_converter(url).make_tf_dataset(num_epochs=None, prefetch=prefetch, **options) as dataset:
            iterator = iter(dataset if prefetch else dataset.map(lambda batch: batch).prefetch(64))
            next(iterator)
            is_held.set()
            lost: list[Any] = [iterator]
            lost.append(lost)
            del iterator, lost
            # TensorFlow takes what was read, and waits for the next window.
            time.sleep(2)
            may_collect.set()
            found.append(is_collected.wait(60))
            may_collect.clear()
            is_collected.clear()
    return found


@pytest.mark.long("a process of its own, 25 s")
def test_an_iterator_that_reads_ahead_is_freed_in_the_thread_that_it_waits_for(vectors: DatasetConverter) -> None:
    assert run_python(free_in_a_readers_thread, vectors.url) == [True, True]


@pytest.mark.parametrize("ragged", ["pad", "nested"])
def test_batches_that_come_late_are_the_same(
    converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch, ragged: Any
) -> None:
    """TensorFlow is told that there is nothing yet, and asks again."""
    monkeypatch.setattr(prompt, "_ANSWER_SECONDS", 0.0)
    nothings = []
    monkeypatch.setattr(prompt.Prompt, "__next__", told(prompt.Prompt.__next__, nothings))
    options: dict[str, Any] = {"batch_size": 10, "nulls": "mask", "ragged": ragged, "shuffle": True, "num_epochs": 2}
    with converter.make_tf_dataset(**options) as one, converter.make_tf_dataset(**options) as other:
        expected = list(one)
        found = list(other.map(lambda batch: batch))
    assert len(nothings) > 2
    assert len(found) == len(expected) == 22
    for batch, wanted in zip(found, expected, strict=True):
        assert batch.keys() == wanted.keys()
        for name, column in batch.items():
            assert str(column) == str(wanted[name])


def read_without_eager_execution(url: str) -> list[int]:
    """Ragged rows in a program of TensorFlow 1, some of which come late."""
    tf.compat.v1.disable_eager_execution()
    prompt._ANSWER_SECONDS = 0.0
    found: list[int] = []
    with tf.Graph().as_default(), open_converter(url) as converter:
        dataset = converter.make_tf_dataset(batch_size=10, columns=["id", RAGGED.name], nulls="mask", ragged="nested")
        batch = tf.compat.v1.data.make_one_shot_iterator(dataset).get_next()
        with dataset, tf.compat.v1.Session() as session, contextlib.suppress(tf.errors.OutOfRangeError):
            while True:
                numbers, values = session.run((batch["id"], batch[RAGGED.name]))
                assert values.row_splits.shape == (len(numbers) + 1,)
                found += numbers.tolist()
    return found


@pytest.mark.long("a process of its own, 23 s")
def test_ragged_rows_come_in_a_graph(converter: DatasetConverter) -> None:
    assert run_python(read_without_eager_execution, converter.url) == list(range(NUM_ROWS))


def told(function: Callable[..., Any], nothings: list[Any]) -> Callable[..., Any]:
    """The function of a `Prompt`, which notes each time that there is nothing yet."""

    def noting(self: Any) -> Any:
        answer = function(self)
        if answer is self._nothing:
            nothings.append(answer)
        return answer

    return noting


def use_both(url: str) -> list[int]:
    """Torch and TensorFlow in one process."""
    converter = open_converter(url)
    with converter.make_torch_dataloader(batch_size=10) as loader, converter.make_tf_dataset(batch_size=10) as dataset:
        return [
            int(one["id"].sum()) - int(tf.reduce_sum(other["id"])) for one, other in zip(loader, dataset, strict=True)
        ]


@pytest.mark.long("a process of its own, 23 s")
def test_torch_and_tensorflow_work_in_one_process(vectors: DatasetConverter) -> None:
    assert run_python(use_both, vectors.url) == [0] * 11


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="PyTorch's CPU build has no Triton.")
@pytest.mark.long("a process of its own, 23 s")
def test_pytorch_trains_beside_tensorflow_once_triton_was_imported_first() -> None:
    # As the README says; the other way round the process aborts, in their own libraries.
    program = """
import triton
import tensorflow
import torch

layer = torch.nn.Linear(3, 1)
optimizer = torch.optim.Adam(layer.parameters())
layer(torch.ones(2, 3)).sum().backward()
optimizer.step()
print("trained", float(tensorflow.reduce_sum(tensorflow.ones(3))))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("trained 3.0\n")


@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_state_can_be_saved_after_an_interrupt_before_the_first_batch(
    converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch, prefetch: int | None
) -> None:
    options: dict[str, Any] = {"batch_size": 10, "columns": ["id"], "prefetch": prefetch, **MIXED}
    with converter.make_tf_dataset(**options) as dataset:
        expected = [batch["id"].numpy().tolist() for batch in dataset]
        dataset.set_epoch(0)

        def interrupt(iterator: Any, of: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(iterator_module, "_count", interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(iter(dataset))
        state = json.loads(json.dumps(dataset.state_dict()))
    with converter.make_tf_dataset(**options) as other:
        other.load_state_dict(state)
        assert [batch["id"].numpy().tolist() for batch in other] == expected
