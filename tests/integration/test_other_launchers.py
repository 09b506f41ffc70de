"""Ranks that others than torch start find their parts by themselves: MPI, JAX, Keras, a barrier stage of Spark.

All are real processes, which open the rows by their URL or get a converter. In each of two shuffled epochs every row
comes once, each rank reads in the order that one process gives for its part, and all take equally many steps.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from converter import DatasetConverter, make_spark_converter, open_converter, start_local_spark
from tests.compat.launchers import make_environment
from tests.processes import finish, run_python, start_python
from tests.servers.process import free_port

NUM_ROWS = 240
NUM_EPOCHS = 2
SHUFFLED: dict[str, Any] = {"batch_size": 10, "shuffle": True, "seed": 3, "shuffle_window_rows": 40}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    """Two files of several row groups."""
    # These import torch, which takes three seconds: most ranks import this module and need no torch.
    from tests.columns import ID, TENSORS
    from tests.entries import write_converter

    partitions = [[range(100)], [range(100, NUM_ROWS)]]
    with write_converter(tmp_path_factory.mktemp("rows"), (ID, TENSORS[0]), partitions, row_group_bytes=200) as found:
        assert found._manifest.num_row_groups > 8
        yield found


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a Python with JAX is, and mpiexec."""
    return make_environment(tmp_path_factory.mktemp("python"), "jax", "mpich") / "bin"


def steps_of(batches: Iterable[Any]) -> list[list[int]]:
    """The rows of each step."""
    return [batch["id"].tolist() for batch in batches]


def assert_parted(rows: DatasetConverter, parts: Sequence[Any], *, ranks: int) -> None:
    """`parts` are what the ranks tell: rank, number of ranks, and the rows of each step in each epoch."""
    expected = []
    for rank in range(ranks):
        with rows.make_batch_reader(**SHUFFLED, cur_shard=rank, shard_count=ranks) as reader:
            expected.append([rank, ranks, [steps_of(reader) for _ in range(NUM_EPOCHS)]])
    assert list(parts) == expected
    for epoch in range(NUM_EPOCHS):
        steps = [epochs[epoch] for _, _, epochs in parts]
        assert len(set(map(len, steps))) == 1
        assert sorted(itertools.chain(*itertools.chain(*steps))) == list(range(NUM_ROWS))


# MPI -----------------------------------------------------------------------------------------


def note_steps(url: str, folder: str) -> None:
    """Read two epochs, and leave what this rank tells in `folder`."""
    with open_converter(url) as converter, converter.make_batch_reader(**SHUFFLED) as reader:
        plan = converter.plan(**SHUFFLED)
        told = [plan.cur_shard, plan.shard_count, [steps_of(reader) for _ in range(NUM_EPOCHS)]]
    Path(folder, f"{plan.cur_shard}.json").write_text(json.dumps(told))


def test_ranks_of_mpiexec_read_every_row_once(rows: DatasetConverter, programs: Path, tmp_path: Path) -> None:
    command = [programs / "mpiexec", "-n", "3", programs / "python"]
    run_python(note_steps, rows.url, str(tmp_path), command=command)
    assert_parted(rows, [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())], ranks=3)


# Keras and JAX -------------------------------------------------------------------------------


def fit(batches: Any, **options: Any) -> list[float]:
    """In each epoch of Keras, how many rows the model did not get exactly once."""
    import keras
    from keras import ops

    class RowsNotOnce(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="rows_not_once")
            self.times = self.add_weight(shape=(NUM_ROWS,), initializer="zeros")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            rows = ops.one_hot(ops.cast(ops.reshape(y_true, (-1,)), "int32"), NUM_ROWS)
            self.times.assign(self.times + ops.sum(rows, axis=0))

        def result(self) -> Any:
            return ops.sum(ops.cast(self.times != 1, "float32"))

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-6), "mse", metrics=[RowsNotOnce()])
    history = model.fit(batches, epochs=NUM_EPOCHS, shuffle=False, verbose=0, **options).history
    return [float(number) for number in history["rows_not_once"]]


@contextmanager
def logged(to: io.StringIO) -> Iterator[None]:
    """Write what the package logs in the block `to` a text."""
    handler = logging.StreamHandler(to)
    logging.getLogger("converter").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("converter").removeHandler(handler)


def train_on_jax(url: str, address: str, rank: int) -> Any:
    """One of two processes that train one model: its part, the rows that the model missed, by a generator and by a
    `tf.data.Dataset`, and what it was warned of before and after it told Keras not to divide rows."""
    import jax

    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    import keras

    keras.utils.set_random_seed(0)  # JAX refuses a model that begins with other weights in each process.
    logs = [io.StringIO(), io.StringIO()]
    converter = open_converter(url)
    features = {"features": "vector", "labels": "id"}
    with logged(logs[0]), converter.make_tf_dataset(**SHUFFLED, **features):
        keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    plan = converter.plan(**SHUFFLED)
    steps = []
    with converter.make_batch_reader(**SHUFFLED) as reader:

        def generate() -> Iterator[Any]:
            for _ in range(NUM_EPOCHS):
                for batch in reader:
                    steps.append(batch["id"].tolist())
                    yield batch["vector"], batch["id"]

        missed = [fit(generate(), steps_per_epoch=len(reader))]
        epochs = [steps[: len(reader)], steps[len(reader) :]]
    with logged(logs[1]), converter.make_tf_dataset(**SHUFFLED, **features) as dataset:
        missed.append(fit(dataset))
    return [[plan.cur_shard, plan.shard_count, epochs], missed, [log.getvalue() for log in logs]]


def test_processes_of_jax_read_every_row_once_and_train_one_model(rows: DatasetConverter, programs: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    options: dict[str, Any] = {"environment": {"KERAS_BACKEND": "jax"}, "command": [programs / "python"]}
    with (
        start_python(train_on_jax, rows.url, address, 0, **options) as first,
        start_python(train_on_jax, rows.url, address, 1, **options) as second,
    ):
        parts, missed, logs = zip(finish(first), finish(second), strict=True)
    assert_parted(rows, parts, ranks=2)
    assert missed == ([[0.0] * NUM_EPOCHS] * 2,) * 2
    for log in logs:
        assert ["Pass auto_shard_dataset=False" in text for text in log] == [True, False]


def fit_on(url: str) -> list[list[float]]:
    """The rows that one process of Keras misses, by a generator over torch's loader and by a `tf.data.Dataset`."""
    converter = open_converter(url)
    with converter.make_torch_dataloader(**SHUFFLED) as loader:
        by_loader = fit(
            ((batch["vector"], batch["id"]) for _ in range(NUM_EPOCHS) for batch in loader), steps_per_epoch=len(loader)
        )
    with converter.make_tf_dataset(**SHUFFLED, features="vector", labels="id") as dataset:
        return [by_loader, fit(dataset)]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_keras_gets_every_row_once_on_other_backends_too(rows: DatasetConverter, programs: Path, backend: str) -> None:
    environment = {"KERAS_BACKEND": backend}
    missed = run_python(fit_on, rows.url, environment=environment, command=[programs / "python"])
    assert missed == [[0.0] * NUM_EPOCHS] * 2


# Spark and TensorFlow ------------------------------------------------------------------------


def train_on_tensorflow(converter: DatasetConverter) -> Any:
    """A worker of MultiWorkerMirroredStrategy: its part, and how many rows all workers together got in each step."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    batches = strategy.distribute_datasets_from_function(lambda _: converter.make_tf_dataset(**SHUFFLED))
    epochs: list[list[list[int]]] = [[] for _ in range(NUM_EPOCHS)]
    sizes = []
    for epoch in epochs:
        for batch in batches:
            (ids,) = strategy.experimental_local_results(batch["id"])
            epoch.append(ids.numpy().tolist())
            size = strategy.run(tf.size, [batch["id"]])
            sizes.append(int(strategy.reduce(tf.distribute.ReduceOp.SUM, size, axis=None)))
    plan = converter.plan(**SHUFFLED)
    return [[plan.cur_shard, plan.shard_count, epochs], sizes]


def train_in_barrier_stage(folder: str) -> Any:
    """The URL of a converter, and what two workers tell that get it in a barrier stage of Spark."""
    import pyarrow as pa
    from pyspark import BarrierTaskContext

    def train(converter: DatasetConverter, _: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = BarrierTaskContext.get()
        rank = context.partitionId()
        host = context.getTaskInfos()[rank].address.partition(":")[0]
        cluster = {"worker": context.allGather(f"{host}:{free_port()}")}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
        yield pa.RecordBatch.from_pylist([{"told": json.dumps(train_on_tensorflow(converter))}])

    spark = start_local_spark("workers", master="local[2]")
    converter = make_spark_converter(spark.range(0, NUM_ROWS, 1, 8), cache_dir=folder, delete_on_exit=False)
    stage = spark.range(0, 2, 1, 2).mapInArrow(partial(train, converter), "told string", barrier=True)
    told = [json.loads(row.told) for row in stage.collect()]
    spark.stop()
    return [converter.url, told]


def test_workers_of_tensorflow_in_a_barrier_stage_read_every_row_once(tmp_path: Path) -> None:
    url, told = run_python(train_in_barrier_stage, str(tmp_path))
    parts, sizes = zip(*told, strict=True)
    with open_converter(url) as converter:
        assert_parted(converter, parts, ranks=2)
    assert sizes == ([20] * 12 * NUM_EPOCHS,) * 2
