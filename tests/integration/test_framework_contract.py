"""All frameworks keep one contract; a new one is one file and one class here."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from converter import DatasetConverter
from tests.contracts.frameworks import FrameworkContract


class TestNumpy(FrameworkContract):
    def make(self, converter: DatasetConverter, **options: Any) -> Any:
        return converter.make_batch_reader(**options)


class TestTorch(FrameworkContract):
    def make(self, converter: DatasetConverter, **options: Any) -> Any:
        return converter.make_torch_dataloader(**options)


class TestTorchWithWorkers(FrameworkContract):
    def make(self, converter: DatasetConverter, **options: Any) -> Any:
        return converter.make_torch_dataloader(num_workers=1, multiprocessing_context="fork", **options)


class TestTensorFlow(FrameworkContract):
    def make(self, converter: DatasetConverter, **options: Any) -> Any:
        return converter.make_tf_dataset(**options)

    def steps(self, loader: Any) -> int:
        return int(loader.cardinality())

    def array(self, values: Any) -> np.ndarray[Any, Any]:
        assert isinstance(values, tf.Tensor)
        found: np.ndarray[Any, Any] = values.numpy()
        return found
