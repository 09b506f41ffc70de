"""The public face: a dataset that hands its rows out as tensors. What it does is a line or three that call a room.

Long, because four methods show the same twenty arguments in `help()` and in editors, and explain each of them once.
"""

from __future__ import annotations

import contextlib
import html
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from converter.arguments import (
    check_flag,
    check_fractions,
    check_integer,
)
from converter.cache import leases
from converter.errors import SourceError
from converter.frameworks.numpy import BatchReader
from converter.holding import Holding, holdings
from converter.loading.batches import numpy_batches
from converter.loading.epochs import as_generator
from converter.loading.forecast import LoaderPlan, check_steps, describe_plan, say_steps, suggest_mixing
from converter.loading.names import only_named
from converter.loading.options import LoaderOptions
from converter.manifest import Manifest
from converter.reading.gather import Array
from converter.reading.nulls import Nulls
from converter.reading.ragged import Ragged
from converter.reading.runs import NOT_PADDED
from converter.reading.source import BatchSource, Transform
from converter.reading.windows import open_files
from converter.scans.filters import Filters, say_filters
from converter.scans.passes import resolve_filters, scan_all_statistics, split
from converter.schema import Schema
from converter.state import Uneven
from converter.statistics import ColumnStatistics, StatisticsByColumn
from converter.storage.directory import Storage

if TYPE_CHECKING:
    from converter.frameworks.tensorflow.dataset import TFDataset
    from converter.frameworks.torch.loader import TorchDataLoader


logger = logging.getLogger(__name__)


class DatasetConverter:
    """Rows on disk, handed out as tensors.

    Made by `make_spark_converter`, not by hand. `len()` is the number of rows. As a context manager it
    removes the cached files at the end. It can be pickled: a copy reads, and never deletes.
    """

    def __init__(self, *, storage: Storage, manifest: Manifest, holding: Holding, is_owner: bool) -> None:
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
            holdings.add(holding)

    def __reduce__(self) -> tuple[Any, ...]:
        return (borrow_files, (self._storage, self._manifest, leases.this_host()))

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
        options = LoaderOptions(
            batch_size=num_rows,
            # A window of more row groups would be decoded whole.
            shuffle_window_rows=num_rows,
            nulls="mask",
            ragged="nested",
            cur_shard=0,
            shard_count=1,
        )
        source = self._source(options)
        batches = as_generator(numpy_batches(source, source.plan(0), open_files(source), range(1)))
        with contextlib.closing(batches):
            return next(batches)

    @property
    def statistics(self) -> Mapping[str, ColumnStatistics]:
        """For each column nulls, NaNs, minimum, maximum, mean, spread; of tensors also element by element.

        Taken while writing; where Spark's own writer wrote, by one pass over the rows at first use.
        """
        if self._statistics is None:
            self._statistics = scan_all_statistics(self.schema, self._whole)
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
        return self._source(
            LoaderOptions(batch_size=1 << 16, columns=columns, nulls="mask", ragged="pad", cur_shard=0, shard_count=1)
        )

    def __repr__(self) -> str:
        state = self._state or self._holding.state
        version = "" if self.version is None else f", version {self.version}"
        return f"DatasetConverter({self._manifest.summary}, {self.url}{version}{f', {state}' if state else ''})"

    def _repr_html_(self) -> str:
        origin = self._manifest.origin
        said = "" if origin is None else f"<p>{html.escape(origin.summary)}</p>"
        return f"<p>{html.escape(repr(self))}</p>{said}{self.schema._repr_html_()}"

    def __enter__(self) -> DatasetConverter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._holding.leaving(error, self.url):
            self._close(delete=self._holding.delete_on_exit and self._is_owner)

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
                the columns that they name counts the rows first; `where` does that once for many loaders, and says how
                values are compared.
            shuffle: permute row groups across the dataset, then rows across a window; another order in each epoch,
                the same for the same seed and rows.
            seed: which order.
            shuffle_window_rows: rows that are mixed together; None for about 48 MB of them, `"all"` for a uniform
                permutation of all rows, which are then in memory at once. If the data are sorted by what the model
                must learn, batches vary more than after a perfect shuffle: 11 times as much with the default window,
                2 M rows and batches of 1,024 (tests/bench/RESULTS.md has other windows and their speeds). Then write
                with `shuffle_rows_seed=…`: the default window is as good as a perfect shuffle.
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
        options = LoaderOptions.of(locals())
        source = self._source(options)
        check_steps(source, options.num_epochs)
        check_integer("num_workers", num_workers, least=0)
        check_flag("persistent_workers", persistent_workers)
        if persistent_workers and not num_workers:
            raise ValueError("persistent_workers=True needs num_workers above 0.")
        if pin_memory is not None:
            check_flag("pin_memory", pin_memory)
        from converter.frameworks.torch.loader import TorchDataLoader

        return TorchDataLoader(
            source,
            num_epochs=options.num_epochs,
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
        options = LoaderOptions.of(locals())
        if features is not None and columns is None and transform is None:
            named = only_named(self.schema, stack, (features, labels, weights), (with_row_index, NOT_PADDED))
            options = replace(options, **named)
        source = self._source(options)
        check_steps(source, options.num_epochs)
        if prefetch is not None:
            check_integer("prefetch", prefetch, least=1)
        from converter.frameworks.tensorflow.dataset import TFDataset

        return TFDataset(
            source,
            num_epochs=options.num_epochs,
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
        options = LoaderOptions.of(locals())
        source = self._source(options)
        check_steps(source, options.num_epochs)
        return BatchReader(source, options.num_epochs)

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
        options = LoaderOptions.of(locals())
        source = self._source(replace(options, filters=None))
        return describe_plan(source, num_epochs=options.num_epochs, is_filtered=filters is not None)

    def where(self, filters: Filters) -> DatasetConverter:
        """A converter of the rows for which `filters` hold, on the same files; one pass over the columns they name.

        Its rows are counted, so its loaders know their length; it can be pickled to the ranks of a training, who then
        need no pass of their own. Closing it deletes nothing.

        Args:
            filters: as `make_torch_dataloader` takes them. Tuples follow Spark: NaN equals NaN and is greater than any
                other number, `-0.0` equals `0.0`, and a comparison with null is never true, so `not in` a list that
                holds None keeps nothing. Arrow evaluates an expression by its own rules, where NaN is neither equal
                to, less nor greater than any number. Columns are compared as they are stored (in a cache, doubles are
                stored as the `float_dtype`). A number is rounded to float32 before it is compared with a float32
                column; Spark compares doubles. Statistics of files do not tell of NaN: `x > 5` skips row groups if
                `x <= inf` is asked for as well.

        Raises:
            SourceError: no row passes.
            ValueError, TypeError: the filters are not understood, or do not fit the columns.
        """
        self._check_open()
        return self._part(self._where(filters))

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
        bounds = check_fractions(fractions)
        check_integer("seed", seed, least=0)
        parts = dict(zip(fractions, split(self._storage, self._manifest, bounds, by=by, seed=seed), strict=True))
        for name, selection in parts.items():
            if not selection.num_rows:
                raise SourceError(f"The part {name!r} of {len(self)} rows would be empty. Give it a larger fraction.")
        return {name: self._part(replace(self._manifest, selection=one)) for name, one in parts.items()}

    def _where(self, filters: Filters) -> Manifest:
        found = resolve_filters(self._storage, self._manifest, filters)
        if not found.num_rows:
            raise SourceError(f"No row of {self.url} passes the filters {say_filters(filters)}.")
        return replace(self._manifest, selection=found)

    def _part(self, manifest: Manifest) -> DatasetConverter:
        return DatasetConverter(storage=self._storage, manifest=manifest, holding=self._holding, is_owner=False)

    def _check_open(self) -> None:
        self._holding.check(self.url, self._state)

    def _source(self, options: LoaderOptions) -> BatchSource:
        """What a loader reads. Every argument is checked before the filters' pass begins."""
        self._check_open()
        source = options.make_source(self._storage, self._manifest)
        if options.filters is not None:
            source = options.of_rows(source, self._where(options.filters))
        if options.shuffle and not self._has_suggested:
            self._has_suggested = suggest_mixing(source)
        say_steps(source)
        return source


def borrow_files(storage: Storage, manifest: Manifest, host: str | None = None) -> DatasetConverter:
    """The converter of files that somebody else holds; `host` is where it was pickled."""
    if storage.is_local and host not in (None, leases.this_host()):
        # Another machine may have its own copy of the files, written at another time.
        manifest = replace(manifest, file_stamps=None)
    return DatasetConverter(storage=storage, manifest=manifest, holding=Holding(), is_owner=False)
