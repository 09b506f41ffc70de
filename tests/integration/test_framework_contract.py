"""All frameworks keep one contract; a new one is one file and one class here."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from converter import DatasetConverter, make_parquet_converter
from converter.frameworks.tensorflow import iterator
from tests.contracts.frameworks import FrameworkContract
from tests.processes import run_python

pytestmark = pytest.mark.short


class TestNumpy(FrameworkContract):
    def make(self, converter: DatasetConverter, **options: Any) -> Any:
        return converter.make_batch_reader(**options)


class TestTorch(FrameworkContract):
    def make(self, converter: DatasetConverter, **options: Any) -> Any:
        return converter.make_torch_dataloader(**options)


class TestTorchWithWorkers(FrameworkContract):
    def make(self, converter: DatasetConverter, **options: Any) -> Any:
        return converter.make_torch_dataloader(num_workers=1, multiprocessing_context="fork", **options)

    def test_the_record_has_each_process_and_the_memory(self, converter: DatasetConverter) -> None:
        options: dict[str, Any] = {"batch_size": 10, "columns": ["id"], "num_epochs": 3, "shuffle_window_rows": 100}
        with converter.make_torch_dataloader(
            num_workers=2, multiprocessing_context="fork", shuffle=True, **options
        ) as loader:
            assert len(list(loader)) == 300
            stats = loader.stats()
        assert len(stats.processes) == 2
        for stage in ("decode", "gather"):
            counts = [done[stage].count for done in stats.processes]
            assert min(counts) > 0
            assert stats.stages[stage].count == sum(counts)
        assert stats.room_seconds == 0
        with converter.make_torch_dataloader(**options) as loader:
            for _ in loader:
                time.sleep(0.001)
            stats = loader.stats()
        assert stats.processes == ()
        # Two threads or more, and a loop that sleeps: they wait for room for most of the time.
        assert 0.5 * stats.seconds < stats.room_seconds
        assert stats.memory_bytes is not None
        assert 0 <= stats.memory_bytes < stats.told_memory_bytes == converter.plan(**options).peak_memory_bytes

    @pytest.mark.long("it starts a process that starts others")
    def test_a_transform_does_not_run_out_of_open_files(self, converter: DatasetConverter) -> None:
        assert run_python(count_with_few_files, converter.url) == [1000, 1000]


def count_with_few_files(url: str) -> list[int]:
    """The batches and rows of one that a transform made of each row, in a process that may open 128 files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    loader = make_parquet_converter(url).make_torch_dataloader(
        batch_size=1, columns=["id"], transform=spread, num_workers=2
    )
    with loader:
        batches = list(loader)
    return [len(batches), sum(len(batch["id"]) for batch in batches)]


def spread(batch: dict[str, Any]) -> dict[str, Any]:
    """Columns of several dtypes, and of a shape that differs from batch to batch."""
    wide = np.ones((1, int(batch["id"][0]) % 5), np.float32)
    return {"id": batch["id"], "half": batch["id"].astype(np.float16), "wide": wide, "text": np.array(["x"])}


class TestTensorFlow(FrameworkContract):
    # The first batch tells the dtypes and shapes.
    fails_later = False

    def make(self, converter: DatasetConverter, **options: Any) -> Any:
        return converter.make_tf_dataset(**options)

    def steps(self, loader: Any) -> int:
        return int(loader.cardinality())

    def array(self, values: Any) -> np.ndarray[Any, Any]:
        assert isinstance(values, tf.Tensor)
        found: np.ndarray[Any, Any] = values.numpy()
        return found


class TestTensorFlowsOwnIterator(TestTensorFlow):
    """As with a TensorFlow whose private parts have moved."""

    sees_steps = False

    @pytest.fixture(autouse=True)
    def no_private_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        iterator._find_eager_tensor.cache_clear()
        with monkeypatch.context() as moved:
            for name in ("data.ops.iterator_ops", "eager", "framework.ops"):
                moved.setitem(sys.modules, f"tensorflow.python.{name}", None)
            monkeypatch.setattr(iterator, "_OwnedIterator", iterator._find_owned_iterator())
            assert iterator._find_eager_tensor() is None
        iterator._find_eager_tensor.cache_clear()

    def test_a_loop_counts_its_batches(self, converter: DatasetConverter) -> None:
        with self.make(converter, batch_size=100, columns=["id"], shuffle=True) as dataset:
            batches = iter(dataset)
            assert isinstance(batches, iterator.CountedIterator)
            for used in range(1, 10):
                next(batches)
                assert dataset.state_dict() == dataset.state_dict(used)
            assert len(list(batches)) == 1
            assert dataset.state_dict()["epoch"] == 1

    def test_a_function_that_uses_batches_by_itself_says_so(self, converter: DatasetConverter) -> None:
        with self.make(converter, batch_size=100, columns=["id"]) as dataset:
            batches = iter(dataset)
            next(batches)
            assert batches.get_next()["id"].shape == (100,)
            with pytest.raises(ValueError, match=r"state_dict\(batches=…\)"):
                dataset.state_dict()


class TestTensorFlowWithCopies(TestTensorFlow):
    """As with a TensorFlow whose class of an eager tensor has moved."""

    @pytest.fixture(autouse=True)
    def no_eager_tensor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(iterator, "_find_eager_tensor", lambda: None)
