"""The public face: `make_spark_converter` and the `DatasetConverter` it returns."""

from __future__ import annotations

import atexit
import concurrent.futures.thread
import contextlib
import datetime as dt
import functools
import html
import logging
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from converter.cache import entries
from converter.errors import CacheError, CacheNotOwnedError, ConverterError, SourceError
from converter.frameworks.numpy import BatchReader, as_generator, check_steps, numpy_batches, say_steps, takes_generator
from converter.loading.forecast import LoaderPlan, describe_plan
from converter.manifest import Manifest
from converter.plan import DEFAULT_WINDOW_GROUPS, UNEVEN, Shard, Shuffle, Uneven, check_integer, default_window_rows
from converter.reading.decode import Array, Nulls, Ragged
from converter.reading.local_cache import find_local_root, remove_unheld
from converter.reading.windows import (
    ELEMENT_VALID_SUFFIX,
    INNER_LENGTH_SUFFIX,
    LENGTH_SUFFIX,
    NOT_PADDED,
    VALID_SUFFIX,
    BatchSource,
    Transform,
    check_policies,
    default_workers_count,
    give_up_fetching,
    resolve_names,
)
from converter.scans.filters import (
    Filters,
    list_values,
    resolve_filters,
    rule_in_files,
    say_filters,
    scan_statistics,
    split_by_key,
    split_by_rows,
)
from converter.schema import DeclaredShape, FloatDtype, Schema, split_declared
from converter.selection import Selection
from converter.shards import find_shard
from converter.sources.delta.snapshot import find_location, read_snapshot
from converter.sources.parquet.columns import read_footers
from converter.sources.spark import identity
from converter.sources.spark.write import DEFAULT_ROW_GROUP_BYTES, check_write_options, write_dataframe
from converter.statistics import ColumnStatistics, StatisticsByColumn
from converter.storage.directory import Storage, StorageOptions, open_storage
from converter.storage.store import TIMEOUT_SECONDS, check_timeout, shown_url

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from converter.frameworks.tensorflow.dataset import TFDataset
    from converter.frameworks.torch.loader import TorchDataLoader


logger = logging.getLogger(__name__)

_MAX_SWEPT = 64
"""Entries that a conversion looks at when it cleans up: each costs a listing."""


_TORCH_ARGUMENTS = ("num_workers", "persistent_workers", "multiprocessing_context", "device", "pin_memory")

_FEW_ROW_GROUPS = 8
_CLUSTERED_SPAN = 0.25
"""A row group that covers less of a column's range than this holds neighbours: of mixed rows it covers nearly all."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Holding:
    """This process's hold on an entry.

    Lives until it is closed or the interpreter ends, also where nobody holds its converter any more: loaders may
    still read. A hold on files that are not ours (`root` is None) ends and touches nothing.
    """

    root: Storage | None = None
    key: str = ""
    manifest: Manifest | None = None
    lease: entries.Lease | None = None
    delete_on_exit: bool = False
    pid: int = 0
    state: str = ""
    has_failed: bool = False
    """It could not be closed, so that is tried again."""

    def __post_init__(self) -> None:
        self.pid = os.getpid()

    def close(self, *, delete: bool) -> None:
        """Let go, once; what fails can be tried again, and is at the interpreter's end."""
        if self.state and not self.has_failed:
            return
        # Said first: nobody begins to read what is about to go, and of two threads one lets it go.
        self.state, self.has_failed = "deleted" if delete and self.root is not None else "closed", False
        try:
            self._let_go(delete=delete)
        except BaseException:
            # Its lease is not renewed any more: a sweep may take it, so there is nothing to read in any case.
            self.state, self.has_failed = "closed", True
            # Also where the next try is the end of a block, or of the interpreter.
            self.delete_on_exit = self.delete_on_exit or delete
            raise
        _holdings.discard(self)

    def _let_go(self, *, delete: bool) -> None:
        if self.pid != os.getpid() or self.root is None or self.manifest is None:
            return
        if delete:
            identity.forget(self.key)
            entries.delete(self.root, self.key, self.manifest, self.lease)
        else:
            entries.let_go(self.root, self.key, self.manifest, self.lease)


_holdings: set[_Holding] = set()


class DatasetConverter:
    """Rows on disk, handed out as tensors.

    Made by `make_spark_converter`, not by hand. `len()` is the number of rows. As a context manager it
    removes the cached files at the end. It can be pickled: a copy reads, and never deletes.
    """

    def __init__(self, *, storage: Storage, manifest: Manifest, holding: _Holding, is_owner: bool) -> None:
        self._storage = storage
        self._manifest = manifest
        self._holding = holding
        self._is_owner = is_owner
        self._state = ""
        self._has_suggested = False
        is_known = manifest.selection is None and all(
            field.is_object or (field.name in manifest.statistics and manifest.statistics[field.name].closed)
            for field in manifest.schema
        )
        self._statistics = StatisticsByColumn(manifest.statistics) if is_known else None
        if is_owner:
            _holdings.add(holding)

    def __reduce__(self) -> tuple[Any, ...]:
        return (borrow_files, (self._storage, self._manifest, entries.this_host()))

    def __len__(self) -> int:
        return self._manifest.num_live_rows

    @property
    def schema(self) -> Schema:
        """The columns: name, dtype, shape of a row, whether there are nulls."""
        return self._manifest.schema

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns' names, in order."""
        return self._manifest.schema.names

    def head(self, n: int = 5) -> dict[str, Array]:
        """The first `n` rows in the dataset's order (all rows if there are fewer), as NumPy arrays.

        Reads only the row groups that hold them, whatever shard this process is. A column that has nulls also gives
        `<name>__valid`, with zeros where a value is missing; rows of different lengths are an object array of arrays.

        ```python
        converter.head(3)["label"]  # array([0, 4, 1])
        ```

        Raises:
            CacheError: the converter was deleted.
            ValueError, TypeError: `n` is not a whole number of at least 1.
        """
        num_rows = min(check_integer("n", n, least=1), len(self))
        source = self._source(
            batch_size=num_rows,
            # A window of more row groups would be decoded whole.
            shuffle_window_rows=num_rows,
            nulls="mask",
            ragged="nested",
            cur_shard=0,
            shard_count=1,
        )
        batches = as_generator(numpy_batches(source, source.plan(0), source.open_files(), range(1)))
        with contextlib.closing(batches):
            return next(batches)

    @property
    def statistics(self) -> Mapping[str, ColumnStatistics]:
        """For each column nulls, NaNs, minimum, maximum, mean, spread; of tensors also element by element.

        Taken while writing; where Spark's own writer wrote, by one pass over the rows at first use.
        """
        if self._statistics is None:
            # A column that is called like another one's mask or lengths is read in a pass of its own.
            names = self.schema.names
            suffixes = (VALID_SUFFIX, ELEMENT_VALID_SUFFIX, LENGTH_SUFFIX, INNER_LENGTH_SUFFIX)
            later = [name for name in names if name.endswith(suffixes)]
            found: dict[str, ColumnStatistics] = {}
            for part in ([name for name in names if name not in later], *([name] for name in later)):
                if part:
                    found |= scan_statistics(self._whole(part))
            self._statistics = StatisticsByColumn((name, found[name]) for name in names)
        return self._statistics

    @property
    def url(self) -> str:
        """The folder of the cache entry, or of your data."""
        return self._storage.url

    @property
    def fingerprint(self) -> str:
        """A digest of the rows in order: equal where another write gave the same rows in the same layout."""
        return self._manifest.live_fingerprint

    @property
    def version(self) -> int | None:
        """The version of the Delta table that is read, as it was found when the converter was made; None elsewhere."""
        return self._manifest.version

    @property
    def cache_key(self) -> str | None:
        """The name that the cache entry was given; None where it has none, and for files that are not ours."""
        return None if self._manifest.origin is None else self._manifest.origin.cache_key

    def _whole(self, columns: Sequence[str]) -> BatchSource:
        """All rows of these columns, for a pass of our own, whatever shard this process is."""
        return self._source(batch_size=1 << 16, columns=columns, nulls="mask", ragged="pad", cur_shard=0, shard_count=1)

    def __repr__(self) -> str:
        manifest = self._manifest
        state = self._state or self._holding.state
        state = f", {state}" if state else ""
        part = "" if manifest.selection is None else f" of {manifest.num_rows:,}"
        version = "" if manifest.version is None else f", version {manifest.version}"
        return (
            f"DatasetConverter({manifest.num_live_rows:,}{part} rows × {len(manifest.schema)} columns, "
            f"{manifest.num_bytes / 1e6:,.1f} MB in {len(manifest.file_names)} files, {self.url}{version}{state})"
        )

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>{self._origin_html()}{self.schema._repr_html_()}"

    def _origin_html(self) -> str:
        origin = self._manifest.origin
        if origin is None:
            return ""
        name = "" if origin.cache_key is None else f"cache_key {origin.cache_key!r}, "
        user = f"{origin.user} on " if origin.user else ""
        said = f"{name}written {origin.created} of {origin.source} by {user}{origin.host} ({origin.application_id})"
        return f"<p>{html.escape(said)}</p>"

    def __enter__(self) -> DatasetConverter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        root, delete = self._holding.root, self._holding.delete_on_exit and self._is_owner
        if root is None or error is None:
            self._close(delete=delete)
            return
        # Who was interrupted, or whose store is away, is not kept for another `timeout_seconds`.
        hurries = isinstance(error, ConverterError) or not isinstance(error, Exception)
        try:
            with root.hurried(entries.HURRY_SECONDS) if hurries else contextlib.nullcontext():
                self._close(delete=delete)
        except (OSError, CacheError) as failure:
            # The first error is the one to be seen.
            logger.warning("Could not let go of %s: %s; sweep(…) removes what is left.", self.url, failure)

    def delete(self) -> None:
        """Remove the cache entry: at once if nobody else uses it, else when the last one lets go.

        Where it raises, it can be called again; else it does nothing the second time, and nothing in a copy that came
        to another process.
        """
        self._close(delete=True)

    def _close(self, *, delete: bool) -> None:
        if self._is_owner:
            self._holding.close(delete=delete)
        self._state = self._state or (self._holding.state if self._is_owner else "closed")

    def make_torch_dataloader(
        self,
        *,
        batch_size: int = 32,
        num_epochs: int | None = 1,
        columns: Sequence[str] | None = None,
        stack: Mapping[str, Sequence[str]] | None = None,
        filters: Filters | None = None,
        shuffle: bool = False,
        seed: int = 0,
        shuffle_window_rows: int | Literal["all"] | None = None,
        cur_shard: int | None = None,
        shard_count: int | None = None,
        uneven: Uneven | None = None,
        drop_last: bool = False,
        transform: Transform | None = None,
        with_row_index: str | None = None,
        nulls: Nulls = "raise",
        ragged: Ragged = "raise",
        workers_count: int | None = None,
        prefetch_batches: int | None = None,
        verify_checksums: bool = False,
        local_cache_dir: str | os.PathLike[str] | None = None,
        local_cache_bytes: int | None = None,
        num_workers: int = 0,
        persistent_workers: bool = False,
        multiprocessing_context: Any = None,
        device: Any = None,
        pin_memory: bool | None = None,
    ) -> TorchDataLoader:
        """A real `torch.utils.data.DataLoader` over the rows, and a context manager that closes it.

        A batch is a `dict` of tensors of shape `(batch_size, *field.shape)`; the last batch of an epoch may be
        shorter. `len()` is exact before the first row is read. `state_dict()` and `load_state_dict()` resume with the
        very next row, also with another number of shards.

        Args:
            batch_size: rows of a batch.
            num_epochs: epochs of one iteration; None for ever.
            columns: names of columns and stacks, in the order of the batch's keys; None for all.
            stack: `{"x": ["f0", "f1"]}` makes of scalar columns one tensor `(rows, 2)`. They do not arrive alone as
                well, unless `columns` names them. One dtype is kept, a mix becomes the converter's `float_dtype`.
            filters: read only the rows for which they hold: tuples `(column, operator, value)` in a list (all of them
                must hold), a list of such lists (one of them must), or a `pyarrow.compute` expression. One pass over
                the columns that they name counts the rows first; `where` does that once for many loaders.
                Tuples follow Spark: NaN equals NaN and is greater than any other number, `-0.0` equals `0.0`, and a
                comparison with null is never true, so `not in` a list that holds None keeps nothing. Arrow evaluates
                an expression by its own rules, where NaN is neither equal to, less nor greater than any number.
                Columns are compared as they are stored (in a cache, doubles are stored as the `float_dtype`). A
                number is rounded to float32 before it is compared with a float32 column; Spark compares doubles.
                Statistics of files do not tell of NaN: `x > 5` skips row groups if `x <= inf` is asked for as well.
            shuffle: permute row groups across the dataset, then rows across a window; another order in each epoch,
                the same for the same seed and rows.
            seed: which order.
            shuffle_window_rows: rows that are mixed together; None for about 48 MB of them, `"all"` for a uniform
                permutation of all rows, which are then in memory at once. Of data that are sorted by what the model
                must learn, batches of b rows from windows of g out of G row groups spread about
                √(1 + (b/g)(1 − g/G)) times as much as mixed ones. Measured with 2 M rows that are sorted by a label,
                batches of 1,024, against a perfect shuffle (tests/bench/RESULTS.md has the speeds beside them):

                | window | spread |
                | --- | --- |
                | 2 of 41 row groups | 23 |
                | the default, 6 to 7 of them | 11 |
                | 10 | 8.1 |
                | 20 | 4.3 |
                | "all" | 1.00 |
                | the default, after `shuffle_rows_seed=…` at the write, the better remedy | 1.00 |
            cur_shard: which part of `shard_count` this process reads. Both or none: then they are found in
                torch.distributed, or the environment of torchrun, Horovod, MPI or Slurm, again until the first
                iteration begins; `cur_shard=0, shard_count=1` reads all rows.
            shard_count: how many parts there are: the number of processes that train together.
            uneven: what to do if the rows cannot be divided evenly among the shards. `"drop"`: all shards get equally
                many rows (other rows are dropped in each epoch). `"pad"`: all get as many as the largest shard (adds a
                boolean column `"__valid"`, False for a row that another shard reads too). `"keep"`: each row comes
                once, and some shards may take one more batch. None: `"drop"` with `shuffle=True`, else `"keep"`, so
                that evaluation and prediction lose no row.
            drop_last: leave out a last batch that is shorter than the others.
            transform: your function of a whole batch as `dict[str, numpy.ndarray]`, which returns one: columns may
                come, go and change shape, the number of rows may not. Where it takes a second argument, that is a
                `numpy.random.Generator` seeded by seed, epoch and batch. It runs in the reader threads; where it
                holds the GIL, say `num_workers`.
            with_row_index: add a column of this name with each row's number in the dataset, for writing predictions
                back.
            nulls: `"raise"`; `"mask"`, which adds `<name>__valid` for columns that have nulls, and zeros in their
                places; or `{column: fill value}`. Of arrays in files of yours whose elements may be null (Parquet's
                footers count null elements, null rows and empty rows together), the mask of the rows has
                `<name>__element_valid` beside it, of the values' shape, False for all elements of a null row. A fill
                value fills elements and null rows; of rows of different shapes it is one number, and fills elements
                alone.
            ragged: for rows of different shapes: `"raise"`; `"pad"` with zeros, which adds `<name>__length` (the number
                of values, or of nested arrays the sizes, `(rows, ndim)`); or `"nested"`, a jagged tensor, whose rows
                may differ in their first size alone. Inner lists of one row may differ in length in files of yours:
                `"pad"` then adds `<name>__inner_length` as well, how many values each innermost list has
                (`(rows, *longest[:-1])`), and sizes are those of the longest; `"nested"` is an error for torch, a
                RaggedTensor of TensorFlow, and an object array of arrays in NumPy.
            workers_count: reader threads; None for one a core, up to four.
            prefetch_batches: batches that are read (and transformed) ahead of use; None for one window a thread, and
                with a transform two batches a thread. The order does not depend on it.
            verify_checksums: check every page that is read against the checksum that was written with it, and raise
                ReadError where a bit was flipped. Reading then takes one and a half to two times as long. Files that
                others wrote may have no checksums; then nothing is checked.
            local_cache_dir: a directory on this machine's disk, where what was fetched from a network is kept for
                later epochs and for other processes on this machine. Bounded: what does not fit is fetched each time;
                rows that no process reads any more make room. `sweep` empties it.
            local_cache_bytes: how much of that disk may be used, by all processes together; None for nine tenths of
                what is free.
            num_workers: processes, as torch means it. Threads are faster, unless code of yours holds the GIL.
            persistent_workers: keep those processes from one iteration to the next.
            multiprocessing_context: how they are started: `"fork"`, `"spawn"` or `"forkserver"`; None for Python's way.
            device: where batches are to arrive, e.g. `"cuda"`: copied ahead of use, asynchronously.
            pin_memory: copy through page-locked memory; None for yes where `device` is a GPU.

        Raises:
            CacheError: the converter was deleted.
            EmptyShardError: there are fewer rows than shards.
            MissingDependencyError: torch is not installed.
            NullValueError: a wanted column has nulls, and `nulls="raise"`.
            SourceError: a wanted column has rows of different lengths, and `ragged="raise"`; or no row passes the
                filters.
            ValueError, TypeError: an argument is wrong; the message names it.
        """
        source = self._source(**_without(locals(), "self", "num_epochs", *_TORCH_ARGUMENTS))
        check_steps(source, num_epochs)
        check_integer("num_workers", num_workers, least=0)
        _check_flag("persistent_workers", persistent_workers)
        if persistent_workers and not num_workers:
            raise ValueError("persistent_workers=True needs num_workers above 0.")
        if pin_memory is not None:
            _check_flag("pin_memory", pin_memory)
        from converter.frameworks.torch.loader import TorchDataLoader

        return TorchDataLoader(
            source,
            num_epochs=_check_epochs(num_epochs),
            num_workers=num_workers,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
            device=device,
            pin_memory=pin_memory,
        )

    def make_tf_dataset(  # noqa: D417 (the others are described once)
        self,
        *,
        batch_size: int = 32,
        num_epochs: int | None = 1,
        features: str | Sequence[str] | None = None,
        labels: str | Sequence[str] | None = None,
        weights: str | None = None,
        columns: Sequence[str] | None = None,
        stack: Mapping[str, Sequence[str]] | None = None,
        filters: Filters | None = None,
        shuffle: bool = False,
        seed: int = 0,
        shuffle_window_rows: int | Literal["all"] | None = None,
        cur_shard: int | None = None,
        shard_count: int | None = None,
        uneven: Uneven | None = None,
        drop_last: bool = False,
        transform: Transform | None = None,
        with_row_index: str | None = None,
        nulls: Nulls = "raise",
        ragged: Ragged = "raise",
        workers_count: int | None = None,
        prefetch_batches: int | None = None,
        prefetch: int | None = None,
        verify_checksums: bool = False,
        local_cache_dir: str | os.PathLike[str] | None = None,
        local_cache_bytes: int | None = None,
    ) -> TFDataset:
        """A real `tf.data.Dataset` of the same rows in the same order, and a context manager that closes it.

        An element is a `dict` of tensors by column name; with `labels` it is `(features, labels)`, with `weights`
        `(features, labels, weights)`, as Keras takes them. The cardinality is exact, so Keras needs no
        `steps_per_epoch`. Each iteration is an epoch (`num_epochs` of them), shuffled anew; one that is left early
        repeats, a peek by Keras, say. Strings and bytes arrive as `tf.string`, dates and times as int32 days and
        int64 microseconds, `ragged="nested"` as `tf.RaggedTensor`.

        The arguments that are not named here, and the errors, are those of `make_torch_dataloader`.

        ```python
        with converter.make_tf_dataset(batch_size=256, shuffle=True, labels="y") as dataset:
            model.fit(dataset, epochs=3, shuffle=False)  # Shuffled already; Keras would warn.
        ```

        A `tf.distribute` strategy divides each batch among its replicas, so there `batch_size` is the global one, and
        it reads a few batches ahead, so an iteration over so few that is left early may not repeat.
        Every worker of MultiWorkerMirroredStrategy reads its own part of the rows, as TF_CONFIG says, or `cur_shard`
        and `shard_count` do. There take `distribute_datasets_from_function`: `experimental_distribute_dataset` cuts
        each worker's batches once more, into as many steps as there are workers, and its cardinality does not say so;
        a loop over it has all the rows. With `cur_shard=0, shard_count=1` it is right as well: every worker reads all
        rows, and takes its part of each batch. (Keras 3 itself cannot `fit` with several workers: keras-team/keras
        issue 20585.)

        Args:
            batch_size: rows of a batch.
            num_epochs: epochs of one iteration; None for ever.
            features: the columns that the model is given: a list for a `dict`, one name for a bare tensor; None for
                all that neither `labels` nor `weights` names. If given, without `columns` and `transform`, only the
                columns that features, labels and weights name are read.
            labels: likewise, what it is to learn.
            weights: the column of the samples' weights.
            drop_last: leave out a last batch that is shorter than the others; the others then have a static shape.
            transform: as for the torch loader; it is applied to a first batch when the dataset is made, because
                TensorFlow must know dtypes and shapes beforehand.
            prefetch: batches that TensorFlow keeps ahead, beside the windows that reader threads do. They count as
                used, for `state_dict()` and for whether an epoch has ended.

        Raises:
            MissingDependencyError: TensorFlow is not installed.
            ValueError, TypeError: an argument is wrong; the message names it.
        """
        arguments = _without(locals(), "self", "num_epochs", "features", "labels", "weights", "prefetch")
        if features is not None and columns is None and transform is None:
            arguments |= _only_named(self.schema, stack, (features, labels, weights), (with_row_index, NOT_PADDED))
        source = self._source(**arguments)
        check_steps(source, num_epochs)
        if prefetch is not None:
            check_integer("prefetch", prefetch, least=1)
        from converter.frameworks.tensorflow.dataset import TFDataset

        return TFDataset(
            source,
            num_epochs=_check_epochs(num_epochs),
            features=features,
            labels=labels,
            weights=weights,
            prefetch=prefetch,
        )

    def make_batch_reader(
        self,
        *,
        batch_size: int = 32,
        num_epochs: int | None = 1,
        columns: Sequence[str] | None = None,
        stack: Mapping[str, Sequence[str]] | None = None,
        filters: Filters | None = None,
        shuffle: bool = False,
        seed: int = 0,
        shuffle_window_rows: int | Literal["all"] | None = None,
        cur_shard: int | None = None,
        shard_count: int | None = None,
        uneven: Uneven | None = None,
        drop_last: bool = False,
        transform: Transform | None = None,
        with_row_index: str | None = None,
        nulls: Nulls = "raise",
        ragged: Ragged = "raise",
        workers_count: int | None = None,
        prefetch_batches: int | None = None,
        verify_checksums: bool = False,
        local_cache_dir: str | os.PathLike[str] | None = None,
        local_cache_bytes: int | None = None,
    ) -> BatchReader:
        """The same rows in the same order as `dict[str, numpy.ndarray]`; no framework needed.

        Arguments and errors are those of `make_torch_dataloader`. Dates and times arrive as
        `datetime64[D]` and `datetime64[us]` (UTC), strings and bytes as object arrays.
        """
        source = self._source(**_without(locals(), "self", "num_epochs"))
        check_steps(source, num_epochs)
        return BatchReader(source, _check_epochs(num_epochs))

    def plan(
        self,
        *,
        batch_size: int = 32,
        num_epochs: int | None = 1,
        columns: Sequence[str] | None = None,
        stack: Mapping[str, Sequence[str]] | None = None,
        filters: Filters | None = None,
        shuffle: bool = False,
        seed: int = 0,
        shuffle_window_rows: int | Literal["all"] | None = None,
        cur_shard: int | None = None,
        shard_count: int | None = None,
        uneven: Uneven | None = None,
        drop_last: bool = False,
        transform: Transform | None = None,
        with_row_index: str | None = None,
        nulls: Nulls = "raise",
        ragged: Ragged = "raise",
        workers_count: int | None = None,
        prefetch_batches: int | None = None,
        verify_checksums: bool = False,
        local_cache_dir: str | os.PathLike[str] | None = None,
        local_cache_bytes: int | None = None,
    ) -> LoaderPlan:
        """What a loader with these arguments would do, without reading a row: steps, rows, window, bytes, memory.

        With `filters` the counts are unknown; those of a converter from `where` are known.
        """
        source = self._source(**_without(locals(), "self", "num_epochs", "filters"))
        return describe_plan(source, num_epochs=_check_epochs(num_epochs), is_filtered=filters is not None)

    def where(self, filters: Filters) -> DatasetConverter:
        """A converter of the rows for which `filters` hold, on the same files; one pass over the columns they name.

        Its rows are counted, so its loaders know their length; it can be pickled to the ranks of a training, who then
        need no pass of their own. Closing it deletes nothing.

        Args:
            filters: as `make_torch_dataloader` takes them. Tuples follow Spark: NaN equals NaN and is greater than any
                other number, and a comparison with null is never true. Arrow evaluates an expression by its own rules.

        Raises:
            SourceError: no row passes.
            ValueError, TypeError: the filters are not understood, or do not fit the columns.
        """
        self._check_open()
        return self._part(self._resolve(filters))

    def split(
        self, fractions: Mapping[str, float], *, by: str | None = None, seed: int = 0
    ) -> dict[str, DatasetConverter]:
        """Converters of disjoint parts of the rows, on the same files: `split({"train": 0.9, "val": 0.1})`.

        Args:
            fractions: how much each part is to have, above 0 and together at most 1.
            by: a column of keys (whole numbers, booleans, dates, times, strings or bytes): rows of one key are in one
                part, on every machine and in every version the same one. The parts' sizes are then as the keys fall.
                None: rows by themselves, at random, in sizes that are exact to a row.
            seed: another one splits otherwise.

        Raises:
            SourceError: a part would be empty.
            ValueError, TypeError: an argument is wrong; the message names it.
        """
        self._check_open()
        bounds = _check_fractions(fractions)
        check_integer("seed", seed, least=0)
        if by is None:
            found = split_by_rows(self._manifest, bounds, seed=seed)
        else:
            field = self._manifest.schema.get(by) if isinstance(by, str) else None
            if field is None:
                raise ValueError(f"by: {self._manifest.schema.explain_missing(str(by))}")
            if field.shape != () or field.dtype.startswith("float"):
                raise ValueError(
                    f"by: column {by!r} has dtype {field.dtype}; a key is a whole number, a time or a text."
                )
            found = split_by_key(self._storage, self._manifest, field, bounds, seed=seed)
        for name, selection in zip(fractions, found, strict=True):
            if not selection.num_rows:
                raise SourceError(f"The part {name!r} of {len(self)} rows would be empty. Give it a larger fraction.")
        return {name: self._part(selection) for name, selection in zip(fractions, found, strict=True)}

    def _resolve(self, filters: Filters) -> Selection:
        found = resolve_filters(self._storage, self._manifest, filters)
        if not found.num_rows:
            raise SourceError(f"No row of {self.url} passes the filters {say_filters(filters)}.")
        return found

    def _part(self, selection: Selection) -> DatasetConverter:
        manifest = replace(self._manifest, selection=selection)
        return DatasetConverter(storage=self._storage, manifest=manifest, holding=self._holding, is_owner=False)

    def _check_open(self) -> None:
        """Raise CacheError where there are no rows any more."""
        state = self._state or self._holding.state
        if state:
            raise CacheError(
                f"The converter of {self.url} was {state}, so it has no rows any more. Convert again, or "
                "make loaders before delete() and inside the `with` block.",
                path=self.url,
            )
        if self._holding.lease is not None and self._holding.lease.lost:
            raise CacheError(
                f"This process gave no sign of life for {3 * entries.RENEW_SECONDS:.0f} seconds or longer, so its "
                f"cache entry {self.url} was taken for abandoned and swept. Convert again.",
                path=self.url,
            )

    def _suggest_mixing(self, source: BatchSource) -> None:
        """Say once that a window cannot mix what lies far apart, where the rows are sorted by a column that is read."""
        manifest = source.manifest
        is_small = manifest.num_row_groups < _FEW_ROW_GROUPS or source.window_rows >= manifest.num_live_rows
        if self._has_suggested or is_small:
            return
        clustered = []
        for field in source.fields:
            known = manifest.statistics.get(field.name)
            if known is None or known.row_group_span is None or known.row_group_span > _CLUSTERED_SPAN:
                continue
            # Where nobody took the extremes yet, a whole number may be one: rather no advice than a wrong one.
            is_row_number = field.dtype == "int64" and (
                known.closed is None or known.max - known.min + 1 == manifest.num_rows
            )
            if not is_row_number:
                clustered.append(field.name)
        if clustered:
            self._has_suggested = True
            logger.info(
                "The rows are sorted or clustered by %s, and shuffling mixes windows of %d rows. If the model learns "
                "from it, write with shuffle_rows_seed=….",
                ", ".join(map(repr, clustered[:5])),
                source.window_rows,
            )

    def _source(
        self,
        *,
        batch_size: int,
        columns: Sequence[str] | None = None,
        stack: Mapping[str, Sequence[str]] | None = None,
        filters: Filters | None = None,
        shuffle: bool = False,
        seed: int = 0,
        shuffle_window_rows: int | Literal["all"] | None = None,
        cur_shard: int | None = None,
        shard_count: int | None = None,
        uneven: Uneven | None = None,
        drop_last: bool = False,
        transform: Transform | None = None,
        with_row_index: str | None = None,
        nulls: Nulls = "raise",
        ragged: Ragged = "raise",
        workers_count: int | None = None,
        prefetch_batches: int | None = None,
        verify_checksums: bool = False,
        local_cache_dir: str | os.PathLike[str] | None = None,
        local_cache_bytes: int | None = None,
    ) -> BatchSource:
        """Check every argument, by name, before anything is read."""
        self._check_open()
        for name, flag in (("shuffle", shuffle), ("drop_last", drop_last), ("verify_checksums", verify_checksums)):
            _check_flag(name, flag)
        check_integer("batch_size", batch_size, least=1)
        check_integer("seed", seed, least=0)
        if uneven is not None and uneven not in UNEVEN:
            raise ValueError(f"uneven must be 'drop', 'pad', 'keep' or None, got {uneven!r}.")
        if prefetch_batches is not None:
            check_integer("prefetch_batches", prefetch_batches, least=1)
        if local_cache_bytes is not None:
            check_integer("local_cache_bytes", local_cache_bytes, least=1)
        if with_row_index is not None and (not isinstance(with_row_index, str) or not with_row_index):
            raise TypeError(f"with_row_index must be the name of a column to add, got {with_row_index!r}.")
        if transform is not None:
            if not callable(transform):
                raise TypeError(f"transform must be a function of a batch, got {transform!r}.")
            takes_generator(transform)
        shard = _check_shard(cur_shard, shard_count)
        threads = default_workers_count()
        if workers_count is not None:
            threads = check_integer("workers_count", workers_count, least=1)
        manifest = self._manifest
        names, stacks = resolve_names(manifest, columns, stack)
        source = BatchSource(
            storage=self._storage,
            manifest=manifest,
            names=names,
            stacks=stacks,
            nulls=nulls,
            ragged=ragged,
            batch_size=batch_size,
            drop_last=drop_last,
            shuffle=None,
            shard=shard,
            # Training takes equal steps; who reads in order evaluates or predicts, and wants every row.
            uneven=uneven or ("drop" if shuffle else "keep"),
            window_rows=_check_window(shuffle_window_rows, manifest),
            window_groups=DEFAULT_WINDOW_GROUPS if shuffle_window_rows is None else None,
            workers_count=threads,
            is_shard_found=cur_shard is None,
            seed=seed,
            row_index=with_row_index,
            transform=transform,
            prefetch_batches=prefetch_batches,
            verify_checksums=verify_checksums,
            local_cache_dir=None if local_cache_dir is None else os.fspath(local_cache_dir),
            local_cache_bytes=local_cache_bytes,
        )
        check_policies(source, is_filtered=filters is not None)
        if filters is not None:
            manifest = replace(manifest, selection=self._resolve(filters))
            source = replace(source, manifest=manifest, window_rows=_check_window(shuffle_window_rows, manifest))
        if shuffle:
            source = replace(source, shuffle=Shuffle(seed=seed, fingerprint=manifest.live_fingerprint))
            self._suggest_mixing(source)
        say_steps(source)
        return source


def make_spark_converter(
    df: DataFrame,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_key: str | None = None,
    float_dtype: FloatDtype | None = "float32",
    shapes: Mapping[str, DeclaredShape] | None = None,
    row_group_bytes: int = DEFAULT_ROW_GROUP_BYTES,
    compression: str = "auto",
    shuffle_rows_seed: int | None = None,
    writer: str = "auto",
    storage_options: StorageOptions | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    delete_on_exit: bool = True,
    progress: bool | None = None,
) -> DatasetConverter:
    """Write `df` once into a cache directory; the converter hands its rows out as tensors.

    Spark's executors write Parquet, in one pass and in the order of partitions, so a sorted DataFrame is read
    sorted. The driver commits one manifest last: a run that dies leaves nothing that a later one would read.

    Example:
        ```python
        with make_spark_converter(df) as converter:
            with converter.make_torch_dataloader(batch_size=1024, shuffle=True) as loader:
                for batch in loader:
                    ...
        ```

    Args:
        df: a Spark DataFrame, classic or Connect. Structs are flattened to columns `a.b`; numeric arrays (nested
            ones too) and vectors become tensors.
        cache_dir: a directory that the driver and every executor see; we live in a subdirectory of it. None:
            the environment variable CONVERTER_CACHE_DIR, else the Spark conf converter.cacheDir, else, in local
            mode, the user's cache folder.
        cache_key: a name for these rows, e.g. `"flights-2026-11-20"`. An entry of this name, schema and write options
            is used again, by any process, machine and Spark version; that the rows are still those is your promise.
            None: a DataFrame is used again only within this process, and only where plan, confs and input files prove
            that it is the same rows; one that is a version of a Delta table, or columns and plain filters of it, is
            known by that version in every process (classic Spark alone shows it).
        float_dtype: what doubles and decimals become: `"float32"`, `"float64"`, or None (doubles stay, decimals
            become float64). One logged line for each narrowed column.
        shapes: `{"image": (8, 8)}` declares the shape of one row of an array column, or that the bytes of a binary
            column are uint8 numbers of that shape; `{"vector": ("float32", (512,))}` that they are numbers of another
            dtype, little-endian. A row that does not fit fails the write.
        row_group_bytes: size of the pieces that are read at once, in memory, all columns together.
        compression: `"auto"` (none on a local disk; behind a network zstd for the columns that it makes smaller),
            `"none"`, `"lz4"`, `"zstd"` or `"snappy"`.
        shuffle_rows_seed: write the rows in a random order (one shuffle in Spark), the same for the same seed and
            input partitions: the remedy for data that are sorted by what the model must learn.
        writer: `"executors"` write with pyarrow; `"spark"` lets Spark's own Parquet writer do it, with its own
            credentials and, on HDFS, as the user of its JVM; `"auto"` asks an executor to write a small file and takes
            the second where it cannot.
        storage_options: keyword arguments of the fsspec filesystem: credentials and the like. For Azure `credential`
            may be an object of azure-identity, or a function that gives a token. No secret is shown or stored.
        timeout_seconds: how long a remote store may be out of reach before that is an error.
        delete_on_exit: remove the entry at the end of the `with` block, or of this interpreter. False keeps it for the
            next one that has the same `cache_key`, and for `open_converter`, until `delete()`, or a `sweep` that names
            it. A kept entry is also read by converters with True, which leave it; what those wrote themselves is never
            taken for kept, but written once more.
        progress: show how many of Spark's tasks are done, in a notebook or on stderr. None: in a notebook or a
            terminal, if tqdm is installed.

    Raises:
        CacheNotConfiguredError: on a cluster or on Spark Connect, and nobody said where the cache goes.
        CacheNotOwnedError: our subdirectory of `cache_dir` exists and was made by somebody else.
        CacheError: the directory is a file, not writable, not shared with the driver, or Spark's job failed (its
            own error is `__cause__`).
        MissingDependencyError: `progress=True`, and tqdm is not installed; or a package that a URL needs.
        NullValueError: an array column has null elements.
        SourceError: no rows, no columns, a stream, or rows that contradict `shapes`.
        TypeError: `df` is no Spark DataFrame.
        UnsupportedTypeError: columns have no tensor form; all of them are named.
        ValueError: an option has a value it cannot have.
    """
    declared: Any = shapes
    if isinstance(shapes, Mapping):
        are_shapes = {name: isinstance(shape, (list, tuple)) for name, shape in shapes.items()}
        declared = {name: split_declared(name, one)[1] if are_shapes[name] else one for name, one in shapes.items()}
    check_write_options(
        float_dtype=float_dtype, row_group_bytes=row_group_bytes, compression=compression, writer=writer,
        shapes=declared,
    )  # fmt: skip
    _check_flag("delete_on_exit", delete_on_exit)
    if progress is not None:
        _check_flag("progress", progress)
    _check_cache_key(cache_key)
    if shuffle_rows_seed is not None and check_integer("shuffle_rows_seed", shuffle_rows_seed, least=0) >= 2**62:
        raise ValueError(f"shuffle_rows_seed must be below 2**62, got {shuffle_rows_seed}.")
    entry = write_dataframe(
        df,
        cache_dir=None if cache_dir is None else os.fspath(cache_dir),
        cache_key=cache_key,
        float_dtype=float_dtype,
        shapes=shapes,
        row_group_bytes=row_group_bytes,
        compression=compression,
        shuffle_rows_seed=shuffle_rows_seed,
        writer=writer,
        storage_options=storage_options,
        timeout_seconds=check_timeout(timeout_seconds),
        is_kept=not delete_on_exit,
        progress=progress,
    )
    # An entry that somebody keeps on purpose is deleted by delete() alone.
    is_passing = delete_on_exit and not entry.manifest.is_kept
    converter = hold_entry(entry.root, entry.key, entry.manifest, entry.lease, delete_on_exit=is_passing)
    logger.info("Use %s", converter)
    _sweep_a_little(entry.root)
    return converter


def open_converter(
    url: str | os.PathLike[str],
    *,
    cache_key: str | None = None,
    storage_options: StorageOptions | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> DatasetConverter:
    """A committed cache entry again: without Spark, without the DataFrame, in another process, on another day.

    Leaving a `with` block lets go and deletes nothing; `delete()` deletes.

    Args:
        url: what `converter.url` was; or, with `cache_key`, the `cache_dir` of `make_spark_converter`.
        cache_key: the name that the entry was written with.
        storage_options: keyword arguments of the fsspec filesystem.
        timeout_seconds: how long a remote store may be out of reach before that is an error.

    Raises:
        CacheNotOwnedError: `url` is no entry of a cache.
        CacheError: the entry was not committed, or was deleted; or there is no entry, or more than one, of this
            `cache_key`, and the message lists what there is.
        CacheCorruptError: its manifest, or a file's size, is not what was committed.
    """
    url = os.fspath(url)
    _check_cache_key(cache_key)
    check_timeout(timeout_seconds)
    manifest: Manifest | None
    with _named_store_errors(url, CacheError):
        try:
            if cache_key is None or entries.names_entry(url):
                root, key, manifest = entries.open_entry(url, storage_options, timeout_seconds)
            else:
                name_hash = identity.hash_of_name(cache_key)
                root, key, manifest = entries.find_named(url, cache_key, name_hash, storage_options, timeout_seconds)
                url = root.below(key).url
        except CacheNotOwnedError:
            place = open_storage(url, storage_options, timeout_seconds)
            with contextlib.suppress(PermissionError):
                if place.has_folders:
                    # It raises where the container itself is missing.
                    place.list()
            raise
        shown = shown_url(url)
        if cache_key is not None and not key.startswith(identity.hash_of_name(cache_key)):
            raise CacheError(f"{shown} was not written with cache_key={cache_key!r}. Leave cache_key out.", path=shown)
        if manifest is None:
            raise CacheError(f"There is no committed cache entry at {shown}: write it again.", path=shown)
        adopted = entries.adopt(root, key, manifest)
        if adopted is None:
            raise CacheError(f"{shown} was deleted a moment ago: write it again.", path=shown)
        manifest, lease, damage = adopted
        if damage is not None:
            if lease is not None:
                entries.release(lease)
            raise damage
    return hold_entry(root, key, manifest, lease, delete_on_exit=False)


def hold_entry(
    root: Storage, key: str, manifest: Manifest, lease: entries.Lease | None, *, delete_on_exit: bool
) -> DatasetConverter:
    """The converter of a committed entry that this process uses."""
    holding = _Holding(root=root, key=key, manifest=manifest, lease=lease, delete_on_exit=delete_on_exit)
    return DatasetConverter(storage=root.below(key), manifest=manifest, holding=holding, is_owner=True)


def make_parquet_converter(
    url_or_urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    columns: Sequence[str] | None = None,
    float_dtype: FloatDtype | None = "float32",
    shapes: Mapping[str, DeclaredShape] | None = None,
    storage_options: StorageOptions | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> DatasetConverter:
    """The same object over Parquet files as they stand, without a copy; `delete()` never touches them.

    Footers are read, rows are not. The files are taken in the order of their names.

    Types arrive as those of Spark do, and beside them:

    | in the files | as |
    | --- | --- |
    | uint8, uint16, uint32 | the next wider signed integer |
    | uint64 | int64; a number of 2**63 or more is a SourceError that names it, its column and its file |
    | float16 | float32 |
    | INT96 | times in microseconds, also beyond 1677 to 2262, where readers of nanoseconds wrap |
    | BYTE_ARRAY annotated as UTF8, STRING, ENUM or JSON | text; text that is no UTF-8 is a ReadError |
    | BYTE_ARRAY without annotation | bytes, or with `shapes=` the numbers that they are |
    | lists of numbers | tensors; null elements follow `nulls`, lists of different lengths `ragged` of the loader |

    Args:
        url_or_urls: a folder, a file, a pattern (`sales/*/day-?.parquet`), or several of them. What begins with `_` or
            `.` is left out, and with a warning what does not end with `.parquet`, `.parq` or `.pq`; a file named in a
            list may have any name. `year=2026` in the name of a folder below the one that is named, or that a pattern
            chose, is a column. Links are followed. Files may lack a column, have no value in it, or hold it as a
            narrower number.
        columns: the columns to take; None for all.
        float_dtype: as in `make_spark_converter`; narrowed while reading.
        shapes: `{"image": (8, 8)}` gives the lists of a column that shape, and None lets its rows differ. A binary
            column becomes bytes of that shape (uint8), or `{"vector": ("float32", (512,))}` what its bytes are,
            little-endian. Where nothing is said, lists have one length if their numbers can be divided so among the
            rows of each row group; a row that does not fit is an error while reading.
        storage_options: keyword arguments of the fsspec filesystem: credentials and the like. For Azure `credential`
            may be an object of azure-identity, or a function that gives a token. No secret is shown or stored.
        timeout_seconds: how long a remote store may be out of reach before that is an error.

    Raises:
        SourceError: there are no files or no rows, two files hold a column as types of which none is wide enough, or
            it is a Delta table, whose files also hold rows that were deleted.
        UnsupportedTypeError: columns have no tensor form; all of them are named.
        ValueError, TypeError: an option has a value it cannot have.
    """
    if isinstance(url_or_urls, (str, os.PathLike)):
        url_or_urls = [url_or_urls]
    are_paths = isinstance(url_or_urls, Sequence) and all(isinstance(one, (str, os.PathLike)) for one in url_or_urls)
    if not are_paths or not url_or_urls:
        raise TypeError(f"make_parquet_converter needs a path or URL, or a list of them, got {url_or_urls!r}.")
    _check_source_options(columns, shapes, float_dtype)
    urls = [os.fspath(url) for url in url_or_urls]
    with _named_store_errors(urls[0]):
        storage, manifest = read_footers(
            urls,
            columns=columns,
            float_dtype=float_dtype,
            shapes=shapes or {},
            storage_options=storage_options,
            timeout_seconds=check_timeout(timeout_seconds),
        )
    return DatasetConverter(storage=storage, manifest=manifest, holding=_Holding(), is_owner=True)


def make_delta_converter(
    table: str | os.PathLike[str],
    *,
    version: int | None = None,
    timestamp: dt.datetime | str | None = None,
    columns: Sequence[str] | None = None,
    filters: Filters | None = None,
    float_dtype: FloatDtype | None = "float32",
    shapes: Mapping[str, DeclaredShape] | None = None,
    storage_options: StorageOptions | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    spark: SparkSession | None = None,
) -> DatasetConverter:
    """The same object over one version of a Delta table, without a copy; `delete()` never touches it.

    The version is found once, so ranks, workers and a run that goes on tomorrow read the same rows whatever happens
    to the table in between. Rows of deletion vectors are left out. Spark is not needed.

    Args:
        table: a path or URL, or with `spark=` the name of a table in its catalog.
        version: the number of a version; None for the latest one.
        timestamp: the latest version of a time or before; without a zone it is UTC.
        columns: the columns to take; None for all. Members of structs are columns `a.b`.
        filters: as in `DatasetConverter.where`. Files are left out by their partition and by what the log says of
            their values before they are opened, then row groups, then rows.
        float_dtype: as in `make_spark_converter`; narrowed while reading.
        shapes: `{"image": (8, 8)}` gives the lists of a column that shape, and None lets its rows differ. A binary
            column becomes bytes of that shape (uint8), or `{"vector": ("float32", (512,))}` what its bytes are,
            little-endian. Where nothing is said, lists have one length if they do in a hundred files; a row that does
            not fit is an error while reading.
        storage_options: keyword arguments of the fsspec filesystem: credentials and the like. No secret is shown or
            stored.
        timeout_seconds: how long a remote store may be out of reach before that is an error.
        spark: a session whose catalog knows `table`.

    Raises:
        MissingDependencyError: the extra `delta` is not installed.
        SourceError: it is no Delta table, has no such version or no rows, its log is damaged, or it needs a feature
            that cannot be read rightly; the message names it and says what to do instead.
        SourceChangedError: a data file of this version is gone.
        UnsupportedTypeError: columns have no tensor form; all of them are named.
        ValueError, TypeError: an option has a value it cannot have.
    """
    if not isinstance(table, (str, os.PathLike)) or not os.fspath(table).strip():
        raise TypeError(f"make_delta_converter needs a path, a URL or the name of a table, got {table!r}.")
    name = os.fspath(table)
    if version is not None and timestamp is not None:
        raise ValueError("version and timestamp both say which version; give one of them.")
    if version is not None:
        version = check_integer("version", version, least=0)
    if isinstance(timestamp, str):
        try:
            # Python 3.10 does not know the letter.
            timestamp = dt.datetime.fromisoformat(re.sub("[zZ]$", "+00:00", timestamp))
        except ValueError as error:
            raise ValueError(f"timestamp must be such as '2026-11-21T12:00:00', got {timestamp!r}.") from error
    if timestamp is not None and not isinstance(timestamp, dt.datetime):
        raise TypeError(f"timestamp must be a datetime, or a string such as '2026-11-21T12:00:00', got {timestamp!r}.")
    if timestamp is not None and timestamp.tzinfo is None:
        timestamp = timestamp.replace(tzinfo=dt.timezone.utc)
    _check_source_options(columns, shapes, float_dtype)
    filters = None if filters is None else list_values(filters)
    with _named_store_errors(name):
        storage, manifest = read_snapshot(
            name if spark is None else find_location(spark, name),
            version=version,
            timestamp=timestamp,
            columns=columns,
            float_dtype=float_dtype,
            shapes=shapes or {},
            storage_options=storage_options,
            timeout_seconds=check_timeout(timeout_seconds),
            rules_in=None if filters is None else functools.partial(rule_in_files, filters),
        )
    converter = DatasetConverter(storage=storage, manifest=manifest, holding=_Holding(), is_owner=True)
    return converter if filters is None else converter.where(filters)


@contextlib.contextmanager
def _named_store_errors(url: str, kind: type[SourceError | CacheError] = SourceError) -> Iterator[None]:
    """Let what a store says be an error of ours that names the URL, without what may be secret in it."""
    try:
        yield
    except OSError as error:
        shown = shown_url(url)
        raise kind(f"{shown} cannot be read: {error}.", path=shown) from error


def _check_source_options(columns: Any, shapes: Any, float_dtype: Any) -> None:
    if shapes is not None and not isinstance(shapes, Mapping):
        raise TypeError(f"shapes must be a dict of column to shape, got {shapes!r}.")
    split = {name: split_declared(name, declared)[1] for name, declared in (shapes or {}).items()}
    declared = {name: shape for name, shape in split.items() if shape is not None}
    check_write_options(
        float_dtype=float_dtype, row_group_bytes=DEFAULT_ROW_GROUP_BYTES, compression="auto", writer="auto",
        shapes=declared,
    )  # fmt: skip
    is_list = isinstance(columns, Sequence) and not isinstance(columns, str) and len(columns) > 0
    if columns is not None and not (is_list and all(isinstance(name, str) for name in columns)):
        raise TypeError(f"columns must be a list of names, got {columns!r}.")


def sweep(
    cache_dir: str | os.PathLike[str],
    *,
    older_than: float | dt.timedelta = 0,
    kept: bool = False,
    cache_key: str | None = None,
    dry_run: bool = False,
    storage_options: StorageOptions | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> entries.SweepReport:
    """Remove what dead owners left in `cache_dir`: entries and half-written attempts that nobody alive holds.

    Entries kept with `delete_on_exit=False` stay, unless `kept` or `cache_key` says otherwise.

    Args:
        cache_dir: the directory that was given to `make_spark_converter`, or to a loader as `local_cache_dir`.
        older_than: seconds (or a timedelta) since an owner's last sign of life. 0 removes whatever holds no live
            lease.
        kept: remove kept entries too.
        cache_key: remove the entries of this name, kept or not, and nothing else.
        dry_run: count, and remove nothing.
        storage_options: keyword arguments of the fsspec filesystem.
        timeout_seconds: how long a remote store may be out of reach before that is an error.

    Returns:
        How many entries, attempts, files and bytes were removed, and where; and how many kept entries were left.
    """
    if isinstance(older_than, bool) or not isinstance(older_than, (int, float, dt.timedelta)):
        raise TypeError(f"older_than must be seconds or a datetime.timedelta, got {older_than!r}.")
    seconds = older_than.total_seconds() if isinstance(older_than, dt.timedelta) else float(older_than)
    if not seconds >= 0:
        raise ValueError(f"older_than must be at least 0 seconds, got {older_than}.")
    _check_flag("kept", kept)
    _check_cache_key(cache_key)
    _check_flag("dry_run", dry_run)
    report = entries.SweepReport()
    with _named_store_errors(os.fspath(cache_dir), CacheError):
        root = entries.find_root(os.fspath(cache_dir), storage_options, check_timeout(timeout_seconds))
        if root is not None:
            name_hash = None if cache_key is None else identity.hash_of_name(cache_key)
            report = entries.sweep_root(
                root, older_than_seconds=seconds, kept=kept, name_hash=name_hash, dry_run=dry_run
            )
        local = find_local_root(os.fspath(cache_dir)) if cache_key is None else None
        if local is not None:
            num_files, num_bytes = remove_unheld(local, dry_run=dry_run)
            report += entries.SweepReport(num_files=num_files, num_bytes=num_bytes, urls=(local,) if num_files else ())
    return report


def _sweep_a_little(root: Storage) -> None:
    """Remove what the dead left beside us, bounded, and never at the user's cost."""
    try:
        report = entries.sweep_root(root, older_than_seconds=0, max_entries=_MAX_SWEPT)
    except (OSError, CacheError) as error:
        logger.info("Did not sweep %s: %s", root.url, error)
        return
    if report.num_files:
        logger.info(
            "Swept %d files (%d bytes) that dead owners left in %s", report.num_files, report.num_bytes, root.url
        )


def borrow_files(storage: Storage, manifest: Manifest, host: str | None = None) -> DatasetConverter:
    """The converter of files that somebody else holds; `host` is where it was pickled."""
    if storage.is_local and host not in (None, entries.this_host()):
        # Another machine may have its own copy of the files, written at another time.
        manifest = replace(manifest, file_stamps=None)
    return DatasetConverter(storage=storage, manifest=manifest, holding=_Holding(), is_owner=False)


def _without(arguments: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """A method's arguments as they were given, to be checked in one place."""
    return {name: value for name, value in arguments.items() if name not in names}


def _only_named(
    schema: Schema,
    stack: Mapping[str, Sequence[str]] | None,
    named: Sequence[str | Sequence[str] | None],
    added: Sequence[str | None],
) -> dict[str, Any]:
    """The arguments `columns` and `stack` for the names of features, labels and weights alone.

    A mask or a length is read with its column; `added` are names that no column has. Nothing is changed if a name is
    unknown: the dataset raises that error, and knows all names.
    """
    stacks = stack if isinstance(stack, Mapping) else {}
    wanted: dict[str, None] = {}
    for names in named:
        for name in [names] if isinstance(names, str) else names or ():
            suffixes = (ELEMENT_VALID_SUFFIX, VALID_SUFFIX, INNER_LENGTH_SUFFIX, LENGTH_SUFFIX)
            bases = [name, *(name.removesuffix(suffix) for suffix in suffixes)] if isinstance(name, str) else []
            base = next((one for one in bases if one in schema or one in stacks), None)
            if base is not None:
                wanted[base] = None
            elif name not in added:
                return {}
    if not wanted:
        return {}
    return {"columns": list(wanted), "stack": {name: stacks[name] for name in stacks if name in wanted} or None}


def _check_shard(cur_shard: Any, shard_count: Any) -> Shard:
    if (cur_shard is None) != (shard_count is None):
        raise ValueError(
            f"cur_shard and shard_count go together, got cur_shard={cur_shard} and shard_count={shard_count}."
        )
    if cur_shard is None:
        return find_shard()
    return Shard(
        index=check_integer("cur_shard", cur_shard, least=0), count=check_integer("shard_count", shard_count, least=1)
    )


def _check_window(window_rows: Any, manifest: Manifest) -> int:
    """How many live rows are mixed together; by default those among as many bytes, whatever part of them is live.

    What has no live row is not read, so its bytes do not count: a filter by day would else mix a row group alone.
    """
    if window_rows is None:
        read = manifest.row_group_bytes[manifest.live_rows > 0]
        found = default_window_rows(manifest.num_live_rows, int(read.sum()))
    elif window_rows == "all":
        found = manifest.num_rows
    else:
        if isinstance(window_rows, str):
            raise ValueError(f"shuffle_window_rows must be a number of rows, 'all' or None, got {window_rows!r}.")
        found = check_integer("shuffle_window_rows", window_rows, least=1)
    return max(1, min(found, manifest.num_live_rows))


def _check_fractions(fractions: Any) -> list[float]:
    """Where the parts end, as fractions of all rows."""
    what = "fractions must be a dict of name to a number above 0, together at most 1, e.g. {'train': 0.9, 'val': 0.1}"
    if not isinstance(fractions, Mapping) or not fractions:
        raise TypeError(f"{what}; got {fractions!r}.")
    for fraction in fractions.values():
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
            raise TypeError(f"{what}; got {fractions!r}.")
    if not all(fraction > 0 for fraction in fractions.values()):
        raise ValueError(f"{what}; got {fractions!r}.")
    # Summed without rounding: thirds are to be whole.
    bounds = [math.fsum(list(fractions.values())[: count + 1]) for count in range(len(fractions))]
    if bounds[-1] > 1 + 1e-9:
        raise ValueError(f"{what}; got {fractions!r}, together {bounds[-1]}.")
    return [1.0 if abs(bound - 1) < 1e-9 else bound for bound in bounds]


def _check_cache_key(cache_key: Any) -> None:
    if cache_key is not None and not isinstance(cache_key, str):
        raise TypeError(f"cache_key must be a str, e.g. 'flights-2026-11-20', got {cache_key!r}.")
    if cache_key is not None and not cache_key.strip():
        raise ValueError(f"cache_key must name the rows, e.g. 'flights-2026-11-20', got {cache_key!r}.")


def _check_flag(name: str, flag: Any) -> None:
    if not isinstance(flag, bool):
        raise TypeError(f"{name} must be True or False, got {flag!r}.")


def _check_epochs(num_epochs: int | None) -> int | None:
    return None if num_epochs is None else check_integer("num_epochs", num_epochs, least=1)


def _close_remote() -> None:
    """Let go of what lies behind a network while its clients still live, which end before `atexit` has its turn.

    A thread of the user's that is not over yet may still read: then the last turn must do.
    """
    pooled = concurrent.futures.thread._threads_queues  # noqa: SLF001
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    # Of ours some may just begin, and stand in no queue yet.
    if all(thread.daemon or thread.name.startswith("converter-") or thread in pooled for thread in others):
        give_up_fetching()
        _close_all(is_remote=True)


# Before the one of concurrent.futures, without whose threads nobody can be asked; there is no public way.
getattr(threading, "_register_atexit", atexit.register)(_close_remote)


@atexit.register
def _close_all(*, is_remote: bool = False) -> None:
    """Let go of everything at the interpreter's end, and delete what is to be deleted then."""
    for holding in list(_holdings):
        if is_remote and (holding.root is None or holding.root.is_local):
            continue
        root = holding.root
        try:
            # Who failed before is not waited for as long again.
            with (
                root.hurried(entries.HURRY_SECONDS)
                if root is not None and holding.has_failed
                else contextlib.nullcontext()
            ):
                holding.close(delete=holding.delete_on_exit)
        except (OSError, CacheError) as error:
            logger.warning("Could not close %s/%s at exit: %s", getattr(root, "url", ""), holding.key, error)
        finally:
            # One try at the end: at the next turn the clients of remote stores are gone.
            _holdings.discard(holding)
