"""A reader's rows in TensorFlow, with Petastorm's names: as a `tf.data.Dataset`, or as the tensors of a v1 graph."""

from __future__ import annotations

import contextlib
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from converter.errors import MissingDependencyError
from converter.petastorm.ngram import NGram
from converter.petastorm.reader_impl.batch_runs import blocks_of, native_runs, runs_in_order, shuffled_runs
from converter.petastorm.reader_impl.column_pool import ColumnPool
from converter.petastorm.reader_impl.columns import num_rows_of, row_bytes_of
from converter.petastorm.reader_impl.seeds import generator_of, global_seed
from converter.petastorm.unischema import Unischema
from converter.reading.runs import Run

try:
    import tensorflow as tf
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        "converter.petastorm.tf_utils needs TensorFlow, which is not installed: "
        "pip install 'spark-tensor-converter[tf,petastorm]'."
    ) from error

from converter.petastorm.reader_impl.tf_columns import (
    Leaf,
    nanoseconds_of_date,
    tf_column,
    tf_type_of,
    tf_value,
    without_autograph,
)

v1 = tf.compat.v1

RANDOM_SHUFFLING_QUEUE_SIZE = "random_shuffling_queue_size"
"""The name of the operation that tells how many rows wait in the queue of `tf_tensors`."""

_PIECE_BYTES, _PIECE_ROWS = 4 << 20, 4096
"""Rows that are handed to TensorFlow at once; both are guesses."""

_RESET_READER_WARN = (
    "Running multiple iterations over make_petastorm_dataset is not recommend for performance issue. Use Reader's "
    "num_epochs contructor arguments to set number of iterations, or use tf.data.Dataset's cache() function to cache "
    "data of first iteration before calling 'repeat' method of Datset class."
)

_numpy_to_tf_dtypes = tf_type_of
date_to_nsec_from_epoch = nanoseconds_of_date


def make_petastorm_dataset(reader: Any) -> Any:
    """A `tf.data.Dataset` of a reader's elements: namedtuples of tensors, of a row, or of a batch.

    Of a reader with windows the elements are `{offset: namedtuple}`. Iterating again resets the reader, with a warning.

    ```python
    from converter.petastorm import make_batch_reader
    from converter.petastorm.tf_utils import make_petastorm_dataset

    with make_batch_reader(url, num_epochs=1) as reader:
        for batch in make_petastorm_dataset(reader):
            print(batch.y.shape)
    ```

    Raises:
        ValueError: a field has no TensorFlow type.
    """
    if reader.ngram:
        leaves = _leaves_of_windows(reader.schema, reader.ngram)
        pack: Callable[..., Any] = lambda *values: make_namedtuple_tf_ngram(reader.schema, reader.ngram, *values)  # noqa: E731
    else:
        leaves = [Leaf(key=name, field=field) for name, field in reader.schema.fields.items()]
        pack = reader.schema.make_namedtuple_tf
    for leaf in leaves:
        tf_type_of(leaf.field.numpy_dtype)
    if getattr(reader, "batched_output", False):
        return _dataset_of_batches(reader)
    if hasattr(reader, "next_block"):
        return _dataset_of_columns(reader, leaves, pack)
    return _dataset_of_rows(reader, leaves, pack)
