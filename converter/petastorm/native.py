"""The rows of a reader by the native engine, where no code of the user's and no object stands in between."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from converter.errors import ConverterError
from converter.loading.epochs import as_generator
from converter.loading.options import LoaderOptions
from converter.manifest import Manifest
from converter.petastorm.pieces import Recipe
from converter.petastorm.row_groups import Order
from converter.petastorm.unischema import UnischemaField
from converter.reading.data_files import DataFiles
from converter.reading.runs import Run
from converter.reading.source import BatchSource
from converter.reading.windows import open_files, read_runs
from converter.selection import select_some
from converter.sources.parquet.fields import manifest_of

Columns = Mapping[str, npt.NDArray[Any]]

_DTYPES = {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float32", "float64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a reader reads, as far as the native engine must know it."""

    recipe: Recipe
    order: Order
    num_epochs: int | None
    first_epoch: int


def native_manifest(work: Work, given_up: threading.Event | None = None) -> Manifest | None:
    """The rows of a reader of batches as a manifest; None if only the reader itself can read them.

    That is so with a user's function, a predicate or filters of rows, with nulls, with columns that are no numbers, and
    once `given_up` is set.
    """
    recipe, store = work.recipe, work.recipe.store
    is_plain = recipe.is_batched and recipe.predicate is None and recipe.filters is None
    if (
        not is_plain
        or (recipe.transform is not None and recipe.transform.func is not None)
        or not work.order.row_groups
    ):
        return None
    names = list(recipe.schema.fields)
    if set(names) & set(store.partition_names) or len(set(store.names)) < len(store.names):
        return None
    try:
        manifest = manifest_of(
            store.storage,
            dict(zip(store.names, store.partitions, strict=True)),
            columns=names,
            float_dtype=None,
            given_up=given_up,
        )
    except (ConverterError, ValueError):
        # The reader itself says what is wrong, or reads it.
        return None
    if not all(_is_alike(manifest, field) for field in recipe.schema.fields.values()):
        return None
    counts = np.zeros(manifest.num_row_groups, np.int64)
    files = [store.names.index(name) for name in manifest.file_names]
    found = np.bincount(manifest.row_group_file, minlength=len(files))
    if any(count and count != store.counts[file] for file, count in zip(files, found.tolist(), strict=True)):
        # A file is another than was counted, which the reader itself says.
        return None
    chosen = set(work.order.row_groups)
    for number in range(manifest.num_row_groups):
        place = (files[int(manifest.row_group_file[number])], manifest.row_group_in_file(number))
        if place in chosen:
            counts[number] = manifest.row_group_rows[number]
    if int(counts.sum()) == manifest.num_rows:
        return manifest
    return replace(manifest, selection=select_some(counts, {})) if counts.any() else None


def cache_options(work: Work) -> dict[str, Any]:
    """The options of a loader that keeps what it fetches where the reader does."""
    cache = work.recipe.store.local_cache
    return {} if cache is None else {"local_cache_dir": cache.directory, "local_cache_bytes": cache.max_bytes}


def _is_alike(manifest: Manifest, wanted: UnischemaField) -> bool:
    """Whether the native engine hands a column out as the reader does.

    It makes numbers of decimals, too, and wider ones of unsigned numbers, as Spark does.
    """
    field = manifest.schema[wanted.name]
    is_number = field.dtype in _DTYPES and not field.has_nulls and not field.has_null_elements
    is_wanted = np.dtype(wanted.numpy_dtype).name == field.dtype
    return is_number and is_wanted and field.shape is not None and len(wanted.shape) <= 1


class ShuffledRuns:
    """Whole batches in random order, over the epochs of a reader; only the very last one may be short.

    Requests end once `given_up` is set.

    Within an epoch each row comes once. A batch may hold the end of one epoch and the beginning of the next, as the
    batches of Petastorm's loaders do.
    """

    def __init__(
        self, work: Work, manifest: Manifest, *, batch_size: int, window_rows: int, given_up: threading.Event
    ) -> None:
        storage, num_rows = work.recipe.store.storage, manifest.num_live_rows
        self._given_up = given_up
        # A smaller buffer than our window would only shuffle worse.
        options = LoaderOptions(
            batch_size=batch_size,
            shuffle=True,
            seed=work.order.seed % (1 << 63),
            cur_shard=0,
            shard_count=1,
            **cache_options(work),
        )
        source = options.make_source(storage, manifest)
        if source.window_rows < window_rows:
            options = replace(options, shuffle_window_rows=min(window_rows, num_rows))
            source = options.make_source(storage, manifest)
        self._source: BatchSource = source
        self._num_rows = num_rows
        self._files: DataFiles = open_files(source)
        epochs = itertools.count(work.first_epoch)
        self._epochs = epochs if work.num_epochs is None else itertools.islice(epochs, work.num_epochs)

    def __iter__(self) -> Iterator[Run]:
        carry: list[Columns] = []
        carried = 0
        size = self._source.batch_size
        for epoch in self._epochs:
            begin = 0
            if carried:
                begin = min(size - carried, self._num_rows)
                carry += [run.columns for run in self._read(epoch, 0, begin)]
                carried += begin
            if carried == size:
                yield self._joined(carry, size)
                carry, carried = [], 0
            if begin == self._num_rows:
                continue
            with contextlib.closing(as_generator(self._read(epoch, begin, self._num_rows))) as runs:
                for run in runs:
                    if run.num_rows % size == 0:
                        yield run
                    else:
                        carry, carried = [run.columns], run.num_rows
        if carried:
            yield self._joined(carry, carried)

    def _read(self, epoch: int, start: int, stop: int) -> Iterator[Run]:
        plan = replace(self._source.plan(epoch), segments=(range(start, stop),), num_padded=0, num_dropped=0)
        return read_runs(self._source, plan, self._files, given_up=self._given_up)

    def _joined(self, parts: list[Columns], num_rows: int) -> Run:
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return Run(columns=columns, batch_size=self._source.batch_size, num_rows=num_rows, first_batch=0)
