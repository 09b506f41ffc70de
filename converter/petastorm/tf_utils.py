"""A reader's rows in TensorFlow, with Petastorm's names: as a `tf.data.Dataset`, or as the tensors of a v1 graph."""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from converter.errors import ConverterWarning, MissingDependencyError
from converter.petastorm.ngram import NGram
from converter.petastorm.reader import STOPPED
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

from converter.frameworks.prompt import from_generator
from converter.petastorm.reader_impl.tf_columns import (
    Leaf,
    ShapesDifferError,
    checked_value,
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
    Rows are made when a loop asks for them; add `.prefetch(…)` to make them ahead.

    ```python
    from converter.petastorm import make_batch_reader
    from converter.petastorm.tf_utils import make_petastorm_dataset

    with make_batch_reader("file:///data/rides", schema_fields=["fare"]) as reader:
        for batch in make_petastorm_dataset(reader):
            print(batch.fare.shape)
    ```

    Raises:
        ValueError: a field has no TensorFlow type.
    """
    if reader.ngram:
        leaves = _leaves_of_windows(reader.schema, reader.ngram)
        pack: Callable[..., Any] = functools.partial(make_namedtuple_tf_ngram, reader.schema, reader.ngram)
    else:
        leaves = [Leaf(key=name, field=field) for name, field in reader.schema.fields.items()]
        pack = reader.schema.make_namedtuple_tf
    for leaf in leaves:
        tf_type_of(leaf.field.numpy_dtype)
    if getattr(reader, "batched_output", False):
        return _dataset_of_batches(reader)
    if hasattr(reader, "next_block"):
        return _asked_late(_dataset_of_columns(reader, leaves, pack))
    return _asked_late(_dataset_of_rows(reader, leaves, pack))


class _Held:
    """What a dataset reads, until its reader is stopped: TensorFlow keeps a dataset's function to the process's end."""

    def __init__(self, reader: Any, held: Any = None) -> None:
        self._held = reader if held is None else held
        if hasattr(reader, "at_stop"):
            reader.at_stop(self._let_go)

    def get(self) -> Any:
        """It. Raises RuntimeError if the reader is stopped."""
        # Once: another thread may stop the reader.
        held = self._held
        if held is None:
            raise RuntimeError(STOPPED)
        return held

    def _let_go(self) -> None:
        self._held = None


def _asked_late(dataset: Any) -> Any:
    """The dataset without the `prefetch` that TensorFlow adds: it would take rows from the reader that no loop gets."""
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return dataset.with_options(options)


def make_batched_dataset(
    reader: Any, *, batch_size: int, shuffling_queue_capacity: int = 0, drop_remainder: bool = False
) -> Any:
    """A `tf.data.Dataset` of batches of `batch_size` rows of a batch reader.

    The last may have fewer rows, or is left out with `drop_remainder`. TensorFlow cuts the batches from columns that
    hold many of them.

    Raises:
        ValueError: a field has no TensorFlow type.
    """
    schema = reader.schema
    fields = list(schema.fields.values())
    num_rows = batch_size if drop_remainder else None
    specs = [tf.TensorSpec((None, num_rows, *field.shape), tf_type_of(field.numpy_dtype)) for field in fields]

    passes = itertools.count()
    held = _Held(reader)

    def generate() -> Iterator[Any]:
        reader = held.get()
        _reset_if_consumed(reader)
        generator = generator_of(reader, next(passes), fallback=global_seed)
        for run in _batch_runs(reader, batch_size, shuffling_queue_capacity, generator):
            columns = [tf_column(field, run.columns[field.name]) for field in fields]
            whole = run.num_rows // batch_size * batch_size
            for start, stop, size in ((0, whole, batch_size), (whole, run.num_rows, run.num_rows - whole)):
                if stop > start and (size == batch_size or not drop_remainder):
                    parts = (column[start:stop] for column in columns)
                    num_batches = (stop - start) // size
                    yield schema.make_namedtuple_tf(
                        *(part.reshape(num_batches, size, *part.shape[1:]) for part in parts)
                    )

    stretches = from_generator(generate, schema.make_namedtuple_tf(*specs), v1.data.Dataset)
    return _asked_late(stretches.flat_map(without_autograph(v1.data.Dataset.from_tensor_slices)))


def _batch_runs(reader: Any, batch_size: int, capacity: int, generator: np.random.Generator) -> Iterator[Run]:
    if capacity <= 0:
        return runs_in_order(blocks_of(reader), batch_size)
    runs = native_runs(reader, batch_size=batch_size, capacity=capacity, generator=generator)
    if runs is not None:
        return runs
    return shuffled_runs(blocks_of(reader), batch_size, ColumnPool(generator), min_left=capacity - 1)


def _dataset_of_batches(reader: Any) -> Any:
    """A dataset of the namedtuples of a batch reader."""
    schema = reader.schema
    fields = list(schema.fields.values())
    specs = [tf.TensorSpec((None, *field.shape), tf_type_of(field.numpy_dtype)) for field in fields]
    held = _Held(reader)

    def generate() -> Iterator[Any]:
        reader = held.get()
        _reset_if_consumed(reader)
        for block in blocks_of(reader):
            yield schema.make_namedtuple_tf(*(tf_column(field, block[field.name]) for field in fields))

    dataset = from_generator(generate, schema.make_namedtuple_tf(*specs), v1.data.Dataset)
    dataset = _asked_late(dataset.filter(without_autograph(lambda batch: tf.shape(batch[0])[0] > 0)))
    _cut_by_columns(dataset, reader)
    return dataset


def _cut_by_columns(dataset: Any, reader: Any) -> None:
    """Let `dataset.unbatch().batch(…)` cut whole columns: row by row TensorFlow takes ten times as long."""
    unbatch, flat_map = dataset.unbatch, dataset.flat_map

    def rows(*arguments: Any, **options: Any) -> Any:
        return _cut_again(unbatch(*arguments, **options), reader)

    def flat_mapped(map_func: Any, *arguments: Any, **options: Any) -> Any:
        mapped = flat_map(map_func, *arguments, **options)
        return _cut_again(mapped, reader) if map_func in _SLICES else mapped

    dataset.unbatch, dataset.flat_map = rows, flat_mapped


_SLICES = (tf.data.Dataset.from_tensor_slices, v1.data.Dataset.from_tensor_slices)


def _cut_again(rows: Any, reader: Any) -> Any:
    """The rows, whose `batch` makes the batches of the reader's columns instead."""
    batch = rows.batch

    def batches(batch_size: Any, drop_remainder: Any = False, *arguments: Any, **options: Any) -> Any:
        if not isinstance(batch_size, int) or batch_size < 1 or not isinstance(drop_remainder, bool):
            return batch(batch_size, drop_remainder, *arguments, **options)
        return make_batched_dataset(reader, batch_size=batch_size, drop_remainder=drop_remainder)

    rows.batch = batches
    return rows


def _dataset_of_columns(reader: Any, leaves: Sequence[Leaf], pack: Callable[..., Any]) -> Any:
    """A dataset of rows that TensorFlow cuts from columns."""
    held = _Held(reader, _Pieces(reader, leaves))

    def generate() -> Iterator[Any]:
        pieces = held.get()
        _reset_if_consumed(pieces.reader)
        yield from pieces

    def slices(*columns: Any) -> Any:
        return _slices(leaves, pack, columns)

    signature = tuple(spec for leaf in leaves for spec in leaf.specs)
    return from_generator(generate, signature, v1.data.Dataset).flat_map(without_autograph(slices))


def _slices(leaves: Sequence[Leaf], pack: Callable[..., Any], columns: Sequence[Any]) -> Any:
    """A dataset of the rows of some columns."""
    own, left = [], list(columns)
    for leaf in leaves:
        own.append(left[: leaf.num_columns])
        left = left[leaf.num_columns :]
    if not any(leaf.is_varying for leaf in leaves):
        return v1.data.Dataset.from_tensor_slices(pack(*(part[0] for part in own)))

    def packed(*sliced: Any) -> Any:
        rows = zip(leaves, own, sliced, strict=True)
        return pack(*(leaf.row(part, row) for leaf, part, row in rows))

    # The flat columns are not sliced: the bounds of each row say what belongs to it.
    sliced = tuple(tuple(part[1:]) if leaf.is_varying else (part[0],) for leaf, part in zip(leaves, own, strict=True))
    return v1.data.Dataset.from_tensor_slices(sliced).map(without_autograph(packed))


class _Pieces:
    """A reader's rows as columns for TensorFlow, in pieces: one row, then two, then four, up to a bound.

    So a loop that stops early has taken few rows more than it used. The next iteration begins with the next piece.
    """

    def __init__(self, reader: Any, leaves: Sequence[Leaf]) -> None:
        self.reader, self._leaves = reader, leaves
        self._lock = threading.Lock()
        self._block: Mapping[Any, Any] = {}
        self._start = self._most_rows = 0

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        num_rows = 1
        while True:
            with self._lock:
                try:
                    piece = self._next(num_rows)
                except StopIteration:
                    return
            yield piece
            num_rows *= 2

    def _next(self, num_rows: int) -> tuple[Any, ...]:
        if self._start == num_rows_of(self._block) or getattr(self.reader, "stopped", False):
            # A stopped reader raises here.
            self._block, self._start = self.reader.next_block(), 0
            self._most_rows = max(1, min(_PIECE_ROWS, _PIECE_BYTES // row_bytes_of(self._block)))
        count = min(num_rows, self._most_rows, num_rows_of(self._block) - self._start)
        while True:
            start, stop = self._start, self._start + count
            try:
                piece = tuple(column for leaf in self._leaves for column in leaf.columns(self._block, start, stop))
            except ShapesDifferError:
                raise
            except (RuntimeError, ValueError):
                if count == 1:
                    raise
                # The rows before the one that has no tensor are to come, as if rows were made one by one.
                count //= 2
            else:
                self._start = stop
                return piece


def _dataset_of_rows(reader: Any, leaves: Sequence[Leaf], pack: Callable[..., Any]) -> Any:
    """A dataset of the rows of an object that hands out rows only."""
    held = _Held(reader)

    def generate() -> Iterator[Any]:
        reader = held.get()
        if reader.ngram:
            for window in _ngrams_generator(reader):
                yield True, *window
            return
        _reset_if_consumed(reader)
        for row in reader:
            yield True, *_sanitize_field_tf_types(row, reader.schema)

    def packed(_: Any, *values: Any) -> Any:
        for leaf, value in zip(leaves, values, strict=True):
            value.set_shape(leaf.field.shape)
        return pack(*values)

    is_row = tf.TensorSpec((), tf.bool)
    signature = (is_row, *(tf.TensorSpec(None, leaf.dtype) for leaf in leaves))
    rows = from_generator(generate, signature, v1.data.Dataset).filter(without_autograph(lambda is_row, *_: is_row))
    return rows.map(without_autograph(packed))


def _reset_if_consumed(reader: Any) -> None:
    if getattr(reader, "last_row_consumed", False):
        warnings.warn(_RESET_READER_WARN, ConverterWarning, stacklevel=2)
        reader.reset()


def tf_tensors(reader: Any, shuffling_queue_capacity: int = 0, min_after_dequeue: int = 0) -> Any:
    """Tensors that hold the reader's next element each time they are evaluated: a namedtuple.

    Of a reader with windows `{offset: namedtuple}`. At the end `tf.errors.OutOfRangeError` is raised.

    ```python
    import tensorflow.compat.v1 as tf

    from converter.petastorm import make_batch_reader
    from converter.petastorm.tf_utils import tf_tensors

    with tf.Graph().as_default(), make_batch_reader("file:///data/rides", schema_fields=["fare"]) as reader:
        tensors = tf_tensors(reader)
        with tf.Session() as session:
            print(session.run(tensors).fare.shape)
    ```

    Args:
        reader: of `make_reader` or `make_batch_reader`.
        shuffling_queue_capacity: rows that wait to be shuffled; 0 for the reader's order. Needs queue runners.
        min_after_dequeue: rows that stay in that queue.

    Raises:
        ValueError: a field has no TensorFlow type, or a batch reader is to be shuffled.
    """
    is_batched = bool(getattr(reader, "batched_output", False))
    if is_batched and shuffling_queue_capacity > 0:
        raise ValueError(
            "shuffling_queue_capacity can not be used with a reader that produces batched_output, since each batch is "
            "a row group. Pass shuffle_rows=True to make_batch_reader, or shuffle the rows of the dataset that "
            "make_petastorm_dataset makes."
        )
    schema, ngram = reader.schema, reader.ngram
    dtypes = _schema_to_tf_dtypes_ngram(schema, ngram) if ngram else _schema_to_tf_dtypes(schema)

    def read(_: Any) -> list[Any]:
        element = next(reader)
        if ngram:
            return list(_sanitize_and_flatten(element, schema))
        if is_batched:
            return [tf_column(schema.fields[name], value) for name, value in element._asdict().items()]
        return list(_sanitize_field_tf_types(element, schema))

    tensors = tf.numpy_function(read, [tf.constant(1)], dtypes)
    if shuffling_queue_capacity > 0:
        tensors = _shuffling_queue(shuffling_queue_capacity, min_after_dequeue, dtypes, tensors)
    if ngram:
        return _unflatten_and_set_shape(schema, ngram, tensors)
    return _set_shape_to_named_tuple(schema, schema.make_namedtuple_tf(*tensors), is_batched)


def _shuffling_queue(capacity: int, min_after_dequeue: int, dtypes: Sequence[Any], tensors: Sequence[Any]) -> Any:
    queue = v1.RandomShuffleQueue(capacity, min_after_dequeue, dtypes)
    # Others find the number of waiting rows by this name.
    queue.size(name=RANDOM_SHUFFLING_QUEUE_SIZE)
    v1.train.add_queue_runner(v1.train.QueueRunner(queue, [queue.enqueue(tensors)]))
    taken = queue.dequeue()
    return taken if isinstance(taken, list) else [taken]


def _sanitize_field_tf_types(sample: Any, schema: Unischema | None = None) -> Any:
    """A row or a batch with values that TensorFlow can take; with a schema, of its types.

    Raises:
        RuntimeError: a value is None.
        ValueError: a number is none of its field's.
    """
    if schema is not None:
        return type(sample)(
            **{name: checked_value(schema.fields[name], each) for name, each in sample._asdict().items()}
        )
    return type(sample)(**{name: tf_value(name, value) for name, value in sample._asdict().items()})


def _schema_to_tf_dtypes(schema: Unischema) -> list[Any]:
    """The TensorFlow types of the fields, in order."""
    return [tf_type_of(field.numpy_dtype) for field in schema.fields.values()]


def _schema_to_tf_dtypes_ngram(schema: Unischema, ngram: NGram) -> list[Any]:
    """The TensorFlow types of a window's fields, offset by offset."""
    return [tf_type_of(leaf.field.numpy_dtype) for leaf in _leaves_of_windows(schema, ngram)]


def _leaves_of_windows(schema: Unischema, ngram: NGram) -> list[Leaf]:
    return [
        Leaf(key=(offset, name), field=field)
        for offset in sorted(ngram.fields)
        for name, field in ngram.get_schema_at_timestep(schema, offset).fields.items()
    ]


def _flatten(data: Mapping[int, Any]) -> Any:
    """A window of namedtuples as one namedtuple; the number of the row is added to each name."""
    flat = {
        f"{name}_{number}": value
        for number, offset in enumerate(sorted(data))
        for name, value in data[offset]._asdict().items()
    }
    return namedtuple("flattened", flat)(**flat)  # noqa: PYI024 (the names are known at run time)


def make_namedtuple_tf_ngram(unischema: Unischema, ngram: NGram, *args: Any, **kargs: Mapping[str, Any]) -> Any:
    """A window as `{offset: namedtuple}`, from values in order or from dicts by offset."""
    window, values = {}, list(args)
    for offset in range(min(ngram.fields), max(ngram.fields) + 1):
        view = ngram.get_schema_at_timestep(unischema, offset)
        count = len(view.fields)
        window[offset] = view.make_namedtuple_tf(*values[:count], **kargs.get(str(offset), {}))
        values = values[count:]
    return window


def _set_shape(schema: Unischema, fields_as_dict: Mapping[str, Any], batched_output: bool | None = None) -> None:
    """Tell TensorFlow the shapes that the schema declares."""
    for name, tensor in fields_as_dict.items():
        if tensor.get_shape().dims is None:
            shape = schema.fields[name].shape
            tensor.set_shape((None, *shape) if batched_output else shape)


def _set_shape_to_named_tuple(schema: Unischema, fields: Any, batched_output: bool | None) -> Any:
    _set_shape(schema, fields._asdict(), batched_output)
    return fields


def _unflatten_and_set_shape(schema: Unischema, ngram: NGram, fields_as_list: Sequence[Any]) -> Any:
    """A window of tensors from a flat list of them."""
    window = make_namedtuple_tf_ngram(schema, ngram, *fields_as_list)
    for row in window.values():
        _set_shape(schema, row._asdict())
    return window


def _ngrams_generator(reader: Any) -> Iterator[Any]:
    """Yield a reader's windows as flat namedtuples of values that TensorFlow can take."""
    _reset_if_consumed(reader)
    for window in reader:
        yield _sanitize_and_flatten(window, reader.schema)


def _sanitize_and_flatten(ngram: Mapping[int, Any], schema: Unischema | None = None) -> Any:
    return _flatten({offset: _sanitize_field_tf_types(row, schema) for offset, row in ngram.items()})
