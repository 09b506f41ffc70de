"""Batches of NumPy arrays: runs of rows are cut to the batch size, then the user's transform is applied.

A run is what one window yields (`reading/windows.py`). Without a transform, cutting is slicing. With one, reader
threads call it ahead of use, and its batches keep their order.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from converter.loading.epochs import as_generator
from converter.plan import EpochPlan
from converter.reading.ahead import read_ahead
from converter.reading.data_files import DataFiles
from converter.reading.meter import Every, Meter
from converter.reading.objects import to_numpy
from converter.reading.ragged import ragged_values
from converter.reading.runs import Run
from converter.reading.source import BatchSource, Transform
from converter.reading.windows import open_files, read_runs
from converter.schema import Field

Batch = dict[str, npt.NDArray[Any]]


def numpy_batches(
    source: BatchSource, plan: EpochPlan, files: DataFiles, batches: range | None = None
) -> Generator[Batch, None, None]:
    """Yield the plan's batches, or those numbered in `batches`, as NumPy arrays, after the user's transform."""
    with contextlib.closing(as_generator(read_runs(source, plan, files, batches))) as runs:
        if source.transform is None:
            for run in runs:
                yield from cut_batches(source, run)
            return
        transform = _Transform(source, plan)
        numbered = ((run, number) for run in runs for number in range(-(-run.num_rows // run.batch_size)))
        threads = source.workers_count
        ahead = source.prefetch_batches or 2 * threads
        timed = _timed(transform, files.meter)
        transformed = read_ahead(
            timed, numbered, workers_count=threads, ahead=ahead, meter=files.meter, pool="transform"
        )
        with contextlib.closing(as_generator(transformed)) as transformed_batches:
            yield from transformed_batches


def _timed(transform: _Transform, meter: Meter) -> Callable[[tuple[Run, int]], Batch]:
    """The same function, with its calls timed: each one, or one in sixteen if they are quick."""
    every = Every()

    def timed(numbered: tuple[Run, int]) -> Batch:
        if not every.is_next():
            return transform(numbered)
        began, cpu_began = time.perf_counter(), time.thread_time()
        batch = transform(numbered)
        cpu_seconds, ended = time.thread_time() - cpu_began, time.perf_counter()
        meter.add("transform", began, ended, cpu_seconds=cpu_seconds, weight=every.weight)
        every.took(ended - began)
        return batch

    return timed


def first_batch(source: BatchSource, files: DataFiles | None = None) -> Batch:
    """The first batch of epoch 0; reads only the row groups that hold it."""
    with contextlib.closing(numpy_batches(source, source.plan(0), files or open_files(source), range(1))) as batches:
        return next(batches)


def times_as_integers(column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Dates as int32 days and times as int64 microseconds, for frameworks that have no type for them.

    Raises:
        ValueError: a time is NaT.
    """
    if np.isnat(column).any():
        raise ValueError("transform returned NaT, which has no tensor form. Fill or drop it in transform.")
    if column.dtype == np.dtype("datetime64[D]"):
        return column.astype("int64").astype("int32")
    return column.astype("datetime64[us]").view("int64")


def cut_batches(source: BatchSource, run: Run) -> Iterator[Batch]:
    """Yield a run's batches as NumPy arrays."""
    for start in range(0, run.num_rows, run.batch_size):
        yield _cut_batch(source, run, start)


def _cut_batch(source: BatchSource, run: Run, start: int) -> Batch:
    stop = min(start + run.batch_size, run.num_rows)
    batch: Batch = {}
    for name, column in run.columns.items():
        batch |= _finish(source, name, column[start:stop])
    return batch


def takes_generator(transform: Transform) -> bool:
    """Whether a transform has a second argument, for a random generator.

    Raises:
        TypeError: it takes neither one nor two arguments.
    """
    try:
        parameters = list(inspect.signature(transform).parameters.values())
    except ValueError:
        # A function written in C may have no signature.
        return False
    without_default = [parameter for parameter in parameters if parameter.default is parameter.empty]
    required = [parameter for parameter in without_default if parameter.kind in _POSITIONAL]
    takes_batch = any(parameter.kind in (*_POSITIONAL, parameter.VAR_POSITIONAL) for parameter in parameters)
    needs_keyword = any(parameter.kind is parameter.KEYWORD_ONLY for parameter in without_default)
    if not takes_batch or needs_keyword or len(required) > 2:
        raise TypeError(
            "transform must take a batch (dict[str, numpy.ndarray]) and, optionally, a numpy.random.Generator; "
            f"{transform!r} takes {len(required)} arguments."
        )
    return len(required) == 2


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class _Transform:
    """The user's function, called for one batch at a time by several threads."""

    def __init__(self, source: BatchSource, plan: EpochPlan) -> None:
        assert source.transform is not None
        self._source = source
        self._plan = plan
        self._transform = source.transform
        self._takes_generator = takes_generator(source.transform)

    def __call__(self, numbered: tuple[Run, int]) -> Batch:
        run, number = numbered
        batch = _cut_batch(self._source, run, number * run.batch_size)
        num_rows = min(run.batch_size, run.num_rows - number * run.batch_size)
        if not self._takes_generator:
            return _check_transformed(self._transform(batch), num_rows)
        return _check_transformed(self._transform(batch, self._generator(run.first_batch + number)), num_rows)

    def _generator(self, batch: int) -> np.random.Generator:
        """The generator of (seed, epoch, batch). The first row's position stands for the batch, so ranks differ."""
        seed = self._source.seed
        name = f"transform/{seed}/{self._plan.epoch}/{self._plan.first_position(batch)}"
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
        return np.random.Generator(np.random.Philox(key=key))


def _check_transformed(returned: Any, num_rows: int) -> Batch:
    """What a transform returned, checked: a dict of arrays with `num_rows` rows."""
    if not isinstance(returned, Mapping) or not all(isinstance(name, str) for name in returned):
        raise TypeError(f"transform must return a dict of column name to numpy.ndarray, got {type(returned).__name__}.")
    if not returned:
        raise ValueError("transform returned no columns; a batch needs at least one.")
    batch: Batch = {}
    for name, column in returned.items():
        try:
            array = np.asarray(column)
        except ValueError as error:
            raise ValueError(
                f"transform returned column {name!r} as rows of different shapes, which make no array ({error}). Pad "
                "or cut them to one shape."
            ) from error
        if array.ndim == 0 or len(array) != num_rows:
            rows = "a single value" if array.ndim == 0 else f"{len(array)} rows"
            raise ValueError(f"transform returned column {name!r} with {rows}; the batch has {num_rows} rows.")
        if np.ma.is_masked(column):
            # A tensor has no mask: what it hides would pass for values.
            raise ValueError(
                f"transform returned column {name!r} as a masked array, and tensors have no mask. Return its "
                "filled(…), and the mask as a column of its own if it is needed."
            )
        batch[name] = array
    return batch


def _finish(source: BatchSource, name: str, column: Any) -> Batch:
    field = source.field_of(name)
    if isinstance(column, pa.Array):
        assert field is not None
        if field.is_object and field.shape == ():
            return {name: to_numpy(column)}
        if field.is_object and field.ndim == 1 and source.ragged != "pad" and not column.null_count:
            # Arrow makes the rows, too: 0.25 against 0.4 µs for one of five texts.
            return {name: to_numpy(column)}
        rows = ragged_values(column, field)
        if field.dtype.startswith("datetime64"):
            rows = replace(rows, values=_as_times(rows.values, field))
        return source.padded(name, rows) if source.ragged == "pad" else {name: rows.split()}
    if field is not None and field.dtype.startswith("datetime64"):
        return {name: _as_times(column, field)}
    return {name: column}


def _as_times(column: npt.NDArray[Any], field: Field) -> npt.NDArray[Any]:
    """Days or microseconds as NumPy's times."""
    stored = column.view("int64") if field.dtype == "datetime64[us]" else column.astype("int64")
    return stored.view(field.dtype)
