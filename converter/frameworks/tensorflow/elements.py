"""What an element of a `tf.data.Dataset` is: the specs of its columns, their tensors, and features, labels, weights."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf

from converter.loading.batches import Batch, first_batch, numpy_batches, times_as_integers
from converter.loading.epochs import as_generator
from converter.loading.names import Names
from converter.plan import EpochPlan
from converter.reading.data_files import DataFiles
from converter.reading.gather import new_array
from converter.reading.objects import to_numpy
from converter.reading.ragged import RaggedRows, ragged_values
from converter.reading.runs import LENGTH_SUFFIX, NOT_PADDED, VALID_SUFFIX, Run
from converter.reading.source import ELEMENT_VALID_SUFFIX, INNER_LENGTH_SUFFIX, BatchSource
from converter.reading.windows import read_runs
from converter.schema import Field
from converter.sequences import SEQUENCE_LENGTH

_TEXTS_AT_ONCE = 1 << 17
"""Texts that are objects at the same time: each takes some 60 bytes, and 24 more in TensorFlow."""

_ALIGNMENT_BYTES = 64
"""The alignment of memory that TensorFlow uses without a copy (`EIGEN_MAX_ALIGN_BYTES`)."""


def pack_flat(places: Any) -> Callable[[Sequence[Any]], Any]:
    """A function that makes a batch of a list of tensors; `places` is the batch with indexes instead of tensors."""
    if isinstance(places, int):
        return lambda tensors: tensors[places]
    if isinstance(places, dict):
        return lambda tensors: {name: tensors[place] for name, place in places.items()}
    parts = [pack_flat(part) for part in places]
    return lambda tensors: tuple(part(tensors) for part in parts)


class Packer:
    """Turns a batch's columns into what a model gets: features, or a tuple with labels and weights."""

    def __init__(self, names: Sequence[str], features: Names | None, labels: Names | None, weights: str | None) -> None:
        self._has_labels = labels is not None
        if labels is None and weights is not None:
            raise ValueError(f"weights={weights!r} needs labels: TensorFlow takes (features, labels, weights).")
        taken: dict[str, str] = {}
        if not isinstance(weights, (str, type(None))):
            raise TypeError(f"weights must be the name of one column, got {weights!r:.80}.")
        self._weights = None if weights is None else _check_names("weights", weights, names, taken)
        self._labels = None if labels is None else _check_names("labels", labels, names, taken)
        if features is not None:
            self._features: Names = _check_names("features", features, names, taken)
        else:
            self._features = [name for name in names if name not in taken]
            if not self._features:
                raise ValueError(
                    "labels and weights leave no column for the features. Name fewer labels, or more columns=…."
                )

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        """What the model gets of a batch."""
        features = _pick(batch, self._features)
        if self._labels is None:
            return features
        labels = _pick(batch, self._labels)
        return (features, labels) if self._weights is None else (features, labels, _pick(batch, self._weights))


def _pick(batch: Mapping[str, Any], names: Names) -> Any:
    return batch[names] if isinstance(names, str) else {name: batch[name] for name in names}


def _check_names(argument: str, given: Any, names: Sequence[str], taken: dict[str, str]) -> Names:
    """The columns that an argument names, checked: they exist, and no other argument names them."""
    is_single = isinstance(given, str)
    listed = [given] if is_single else given
    if not isinstance(listed, (list, tuple)) or not listed or not all(isinstance(name, str) for name in listed):
        raise TypeError(f"{argument} must be a column's name or a list of them, got {given!r:.80}.")
    for name in listed:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{argument}: a batch has no column {name!r}.{hint} It has {', '.join(map(repr, names))}.")
        if name in taken:
            raise ValueError(f"{argument}: column {name!r} is named by {taken[name]} already.")
        taken[name] = argument
    return given if is_single else list(listed)


def specs_of_field(field: Field, rows: int | None, ragged: str) -> dict[str, Any]:
    """The specs of a field's tensors in an element, by name."""
    dtype = tf.string if field.is_object else field.stored_dtype
    if field.shape is not None:
        return {field.name: tf.TensorSpec((rows, *field.shape), dtype)}
    inner = (None,) * field.ndim
    if ragged == "pad":
        sizes = (rows,) if field.ndim == 1 else (rows, field.ndim)
        specs = {
            field.name: tf.TensorSpec((rows, *inner), dtype),
            field.name + LENGTH_SUFFIX: tf.TensorSpec(sizes, tf.int64),
        }
        if field.is_jagged:
            specs[field.name + INNER_LENGTH_SUFFIX] = tf.TensorSpec((rows, *inner[1:]), tf.int64)
        return specs
    return {field.name: tf.RaggedTensorSpec((None, *inner), dtype, ragged_rank=field.ndim)}


def spec_of(name: str, column: Any, rows: int | None, is_by_batch: bool) -> Any:
    """The spec of a column that a transform returned for the first batch."""
    column = as_tensor(column)
    inner = (None,) * (column.ndim - 1) if is_by_batch else column.shape[1:]
    return tf.TensorSpec((rows, *inner), dtype_of(name, column))


def as_tensor(column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A column as TensorFlow can take it: dates and times as integers, text as objects."""
    if column.dtype.kind == "M":
        return times_as_integers(column)
    return column.astype(object) if column.dtype.kind in "SUT" else column


def dtype_of(name: str, column: np.ndarray[Any, Any]) -> Any:
    """The TensorFlow type of a column that a transform returned."""
    try:
        if column.dtype == object and not pa.array(column.reshape(-1), pa.large_binary()).null_count:
            return tf.string
        return tf.as_dtype(column.dtype if column.dtype != object else "?")
    except (TypeError, pa.ArrowException) as error:
        raise TypeError(
            f"transform returned column {name!r} as {column.dtype}, which has no TensorFlow type. Return numbers, "
            "booleans or text; rows of different shapes must be padded, which ragged='pad' does."
        ) from error


def stretched(spec: Any) -> Any:
    """The spec of a stretch of batches."""
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec((None, *spec.shape), spec.dtype, ragged_rank=spec.ragged_rank + 1)
    return tf.TensorSpec((None, *spec.shape), spec.dtype)


def stretches_of(run: Run, *, most_rows: int | None) -> Iterator[tuple[int, int, int]]:
    """Yield the stretches of batches in a run, a batch at least: first row, number of batches, rows of each batch."""
    size = run.batch_size
    whole, rest = divmod(run.num_rows, size)
    step = max(1, (run.num_rows if most_rows is None else most_rows) // size)
    for first in range(0, whole, step):
        yield first * size, min(step, whole - first), size
    if rest:
        yield whole * size, 1, rest


def components(source: BatchSource, name: str, column: Any, num_batches: int) -> Batch:
    """The tensors of a stretch's column, by name, with the batches as first dimension."""
    field = source.field_of(name)
    if isinstance(column, np.ndarray) and column.dtype == object:
        return {name: column.reshape(num_batches, -1, *column.shape[1:])}
    if isinstance(column, np.ndarray):
        return {name: _aligned(column).reshape(num_batches, -1, *column.shape[1:])}
    assert field is not None
    if field.is_object and field.shape == ():
        return {name: to_numpy(column).reshape(num_batches, -1)}
    rows = ragged_values(column, field)
    if source.ragged == "pad":
        return {key: padded[np.newaxis] for key, padded in source.padded(name, rows).items()}
    return {name: _ragged(rows)}


def owned(column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy of a transform's column.

    TensorFlow may compute in place. That would change a table from which the transform returns parts, or a column that
    it returns by two names, and would crash on a memory-mapped file.
    """
    if column.dtype.isbuiltin != 1 or column.dtype == object:
        return np.array(column, order="C")
    return _copied(column)


def _copied(column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    copied = new_array(column.shape, column.dtype)
    copied[...] = column
    return copied


def _aligned(column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Numbers in aligned memory. TensorFlow would copy others under the GIL, into newly mapped memory."""
    return _copied(column) if column.ctypes.data % _ALIGNMENT_BYTES else column


def _ragged(rows: RaggedRows) -> Any:
    """Rows as a RaggedTensor of one batch."""
    splits = [np.array([0, len(rows.shapes)])]
    splits += [np.concatenate(([0], np.cumsum(lengths))) for lengths in rows.level_lengths()]
    # TensorFlow makes floats of no objects.
    values = tf.constant(rows.values, tf.string) if rows.values.dtype == object else rows.values
    return tf.RaggedTensor.from_nested_row_splits(values, splits, validate=False)


def find_specs(source: BatchSource, files: DataFiles) -> dict[str, Any]:
    """The specs of a batch's columns, by name."""
    rows = source.batch_size if source.drop_last else None
    if source.transform is not None:
        if not source.num_batches():
            raise ValueError("transform has no batch to be called for, so its columns are unknown. Use more rows.")
        batch = first_batch(source, files)
        return {name: spec_of(name, column, rows, _is_by_batch(source)) for name, column in batch.items()}
    stacks = {stack.name: stack for stack in source.stacks}
    specs: dict[str, Any] = {}
    sequences = source.sequences
    for name in source.names:
        is_of_source = sequences is None or name == source.source_name
        steps = () if is_of_source or sequences is None else sequences.shape_of(source.steps_name(name))
        if name in stacks:
            members = stacks[name].columns
            specs[name] = tf.TensorSpec((rows, *steps, len(members)), stacks[name].dtype)
            if source.has_mask(members):
                specs[name + VALID_SUFFIX] = tf.TensorSpec((rows, *steps, len(members)), tf.bool)
            continue
        field = source.schema[name]
        if sequences is not None and not is_of_source:
            field = sequences.field_of(field)
        specs |= specs_of_field(field, rows, source.ragged)
        if source.has_mask([name]):
            specs[name + VALID_SUFFIX] = tf.TensorSpec((rows, *steps), tf.bool)
        if source.has_element_mask(name):
            whole = specs_of_field(replace(field, dtype="bool"), rows, source.ragged)
            specs[name + ELEMENT_VALID_SUFFIX] = whole[name]
    if source.row_index is not None:
        specs[source.row_index] = tf.TensorSpec((rows, *(() if sequences is None else (sequences.length,))), tf.int64)
    if sequences is not None and sequences.is_padded:
        specs[SEQUENCE_LENGTH] = tf.TensorSpec((rows,), tf.int64)
    if source.uneven == "pad":
        specs[NOT_PADDED] = tf.TensorSpec((rows,), tf.bool)
    return specs


def stretches_in(
    source: BatchSource, plan: EpochPlan, files: DataFiles, specs: Mapping[str, Any]
) -> Generator[tuple[Batch, int], None, None]:
    """Yield a plan's batches in stretches, each with its number of batches: as many as lie together in one size."""
    most_rows = _most_rows(source)
    if source.transform is not None:
        with contextlib.closing(numpy_batches(source, plan, files)) as transformed:
            for batch in transformed:
                yield _check_transformed(batch, specs), 1
        return
    with contextlib.closing(as_generator(read_runs(source, plan, files))) as runs:
        for run in runs:
            for start, num_batches, num_rows in stretches_of(run, most_rows=most_rows):
                rows = slice(start, start + num_batches * num_rows)
                batches: Batch = {}
                for name, column in run.columns.items():
                    batches |= components(source, name, column[rows], num_batches)
                yield batches, num_batches


def _is_by_batch(source: BatchSource) -> bool:
    """Whether batches may differ in shape."""
    return any(field.shape is None for field in source.fields)


def _most_rows(source: BatchSource) -> int | None:
    """Rows of a stretch at most, if it has more than one batch; None for any number."""
    if _is_by_batch(source):
        return 1
    return _TEXTS_AT_ONCE if any(field.is_object for field in source.fields) else None


def _check_transformed(batch: Batch, specs: Mapping[str, Any]) -> Batch:
    """A transformed batch with one more dimension in front; raises if it differs from the first one."""
    if set(batch) != set(specs):
        raise ValueError(
            f"transform returned columns {list(batch)} for one batch and {list(specs)} for the first one; a "
            "tf.data.Dataset needs the same ones for every batch."
        )
    stretch: Batch = {}
    for name, spec in specs.items():
        column = as_tensor(batch[name])
        if dtype_of(name, column) != spec.dtype or not spec.shape.is_compatible_with(column.shape):
            raise TypeError(
                f"transform returned column {name!r} as {column.dtype} of shape {column.shape}, and for the first "
                f"batch as {spec.dtype.name} of shape {tuple(spec.shape)}. Return one dtype and one shape of rows for "
                "every batch."
            )
        stretch[name] = owned(column)[np.newaxis]
    return stretch
