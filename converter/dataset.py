"""`DatasetConverter`, the object that users hold: rows on disk, read as tensors. Each method calls a room below.

Long, because four methods repeat the arguments of a loader for `help()` and editors; one of them explains them all.
"""

from __future__ import annotations

import datetime as dt
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from converter.arguments import check_flag, check_integer
from converter.cache import leases
from converter.errors import CacheError
from converter.frameworks.numpy import BatchReader
from converter.holding import Holding, holdings
from converter.layout import layout_of
from converter.lineage.tracking import make_mlflow_dataset
from converter.loading.batches import first_batch
from converter.loading.forecast import LoaderPlan, check_steps, describe_plan, log_uneven_shards, suggest_mixing
from converter.loading.options import LoaderOptions, all_rows
from converter.loading.verification import find_damage
from converter.manifest import Manifest
from converter.page import lifetime_of, page_of, place_of
from converter.pickled import Stamp
from converter.reading.gather import Array
from converter.reading.nulls import Nulls
from converter.reading.ragged import Ragged
from converter.reading.source import BatchSource, Transform
from converter.scans.distributions import MAX_BINS, check_distribution, histogram_of, quantiles_of
from converter.scans.draws import balance, sample
from converter.scans.filters import Filters
from converter.scans.parts import select_rows, split_rows
from converter.scans.passes import scan_all_statistics
from converter.scans.sequences import Partial, select_sequences
from converter.schema import Field, Schema
from converter.state import Uneven
from converter.statistics import ColumnStatistics, StatisticsByColumn, describe_column
from converter.storage.directory import Storage
from converter.to_spark import rows_in_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from converter.frameworks.tensorflow.dataset import TFDataset
    from converter.frameworks.torch.loader import TorchDataLoader


class DatasetConverter:
    """Rows on disk, read as batches of tensors.

    `make_spark_converter`, `make_parquet_converter`, `make_delta_converter` and `open_converter` make one. `len()` is
    the number of rows. It can be pickled: the copy reads the same files and never deletes them.

    ```python
    with make_spark_converter(df) as converter:  # the end of the block removes the cached files
        print(len(converter), converter.schema, converter.url)
        print(converter.columns, converter.fingerprint, converter.version, converter.cache_key)
        with converter.make_torch_dataloader(batch_size=1024, shuffle=True) as loader:
            for batch in loader:
                ...
    ```
    """

    def __init__(self, *, storage: Storage, manifest: Manifest, holding: Holding, is_owner: bool) -> None:
        self._storage = storage
        self._manifest = manifest
        self._holding = holding
        self._is_owner = is_owner
        self._state = ""
        self._has_suggested = False
        self._statistics = _written_statistics(manifest.of_rows)
        if is_owner and holding.entry is not None:
            holdings.add(holding)

    def __reduce__(self) -> tuple[Any, ...]:
        host = self._holding.made_on or leases.this_host()
        return (_unpickled, (Stamp(), self._storage, self._manifest, host))

    def __len__(self) -> int:
        return self._manifest.num_live_rows

    @property
    def schema(self) -> Schema:
        """The columns: name, dtype, shape of a row, whether there are nulls.

        It also has the values of categories, and the mean and deviation of standardised columns:

        ```python
        with make_spark_converter(df, categories=["y"]) as converter:
            size = len(converter.schema["y"].categories)  # (0, 1)
            embedding = torch.nn.Embedding(size, 8)  # in Keras: keras.layers.Embedding(size, 8)
        ```
        """
        return self._manifest.element_schema

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns' names, in order."""
        return self.schema.names

    def head(self, n: int = 5) -> dict[str, Array]:
        """The first `n` rows in the dataset's order (all rows if there are fewer), as NumPy arrays.

        Arrays have shape `(n, *field.shape)`. Reads only the row groups that hold these rows, whatever shard this
        process is. A column with nulls has zeros in their places, and a boolean column `<name>__valid`. A column whose
        rows differ in length is an object array of arrays.

        ```python
        converter.head(3)["label"]  # array([0, 4, 1])
        ```

        Raises:
            CacheError: the converter was deleted.
            ValueError, TypeError: `n` is not a whole number of at least 1.
        """
        num_rows = min(check_integer("n", n, least=1), len(self))
        # A larger window would decode more row groups.
        options = LoaderOptions(
            batch_size=num_rows, shuffle_window_rows=num_rows, nulls="mask", ragged="nested", cur_shard=0, shard_count=1
        )
        return first_batch(self._source(options))

    @property
    def statistics(self) -> Mapping[str, ColumnStatistics]:
        """Statistics of each column: nulls, NaNs, minimum, maximum, mean, standard deviation.

        Usually they were computed while the rows were written. For Parquet files, Delta tables, `where`, `split` and
        Spark's own writer, the first use reads all rows once.

        ```python
        age = converter.statistics["age"]
        print(age.null_count, age.min, age.max, age.mean, age.std)
        ```

        Raises:
            CacheError: the converter was deleted before a pass could be made.
            ReadError: the pass could not read a file.
        """
        if self._statistics is None:
            self._statistics = scan_all_statistics(self._as_stored, self._all_rows)
        return self._statistics

    def describe(self) -> dict[str, Any]:
        """What is known of the rows without reading any, as values that JSON can hold: `converter show` prints it.

        ```python
        told = converter.describe()
        print(told["rows"], told["bytes"], [column["name"] for column in told["columns"]])
        ```

        Returns:
            `url` (of a single Parquet file that was named, the file), `version` (of a Delta table), `rows`, `bytes`,
            `files` and `row_groups` of the files, `cache_key`, `written` (when and by whom a cache entry was written),
            `fingerprint`;

            `layout`, None for a mixture: `least`, `median` and `most` of `file_rows`, `row_group_rows` and
            `row_group_bytes` (in memory, all columns), counting rows that views or a Delta table leave out. Those of
            row groups are None for a Delta table, most of whose files are not opened. `codecs` and `encodings` are
            Parquet's names, of the first row groups of the files whose footers were read; None if none was, as of a
            cache on a local disk;

            `write_options`, of a cache entry the arguments of `make_spark_converter`; `compression` says what `"auto"`
            became on a local disk. None for other sources, and for entries of versions that did not keep them;

            and for each of the `columns` its `name`, `dtype`, `shape` (None if rows differ) and number of `categories`,
            and, where statistics were taken while writing, `nulls`, `min`, `max` and `mean`.
        """
        manifest, statistics = self._manifest, self._statistics or StatisticsByColumn({})
        return {
            "url": place_of(self._storage, manifest),
            "version": self.version,
            "rows": len(self),
            "bytes": manifest.num_bytes,
            "files": len(manifest.file_names),
            "row_groups": manifest.num_row_groups,
            "cache_key": self.cache_key,
            "written": None if manifest.origin is None else manifest.origin.summary,
            "fingerprint": self.fingerprint,
            "layout": layout_of(manifest),
            "write_options": None if manifest.origin is None else manifest.origin.options,
            "columns": [describe_column(field, statistics.get(field.name)) for field in self.schema],
        }

    def mlflow_dataset(self, *, name: str | None = None) -> Any:
        """The rows as an MLflow dataset, by which a run says what it was trained on, and leads back to it.

        ```python
        mlflow.log_input(converter.mlflow_dataset(), context="training")
        # In another process, on another day:
        source = mlflow.data.get_source(mlflow.get_run(run_id).inputs.dataset_inputs[0])
        converter = source.load()  # the same rows; a SourceChangedError if the data have changed
        ```

        The source says which rows they are: a cache entry, Parquet files or a version of a Delta table; the options
        that change what arrives; and views such as `where` and `split`. It never holds a secret: `load` takes
        `storage_options`. It also takes `decode=` with decoders of your own, whose code is not stored. A cache entry
        that was written without `delete_on_exit=False` cannot be loaded once it is deleted. Filters that are
        expressions of pyarrow, and lists of more than 100,000 values, are not stored: `load` then raises an error.

        The digest is the `fingerprint` and four signs of the source. The profile has rows, bytes, and what `load` does.

        Args:
            name: what MLflow shows; None for the `cache_key`, the table and its version, or the folder.

        Returns:
            An `mlflow.data.Dataset`.

        Raises:
            MissingDependencyError: MLflow is not installed.
            ValueError, TypeError: MLflow cannot keep the name.
        """
        # By the folder, also of a single file: a run's dataset keeps its name.
        return make_mlflow_dataset(self.describe() | {"url": self.url}, self.schema, self._manifest.recipe, name=name)

    def verify(self, *, every_row: bool = False) -> list[str]:
        """Look for damage in the files: a line for each damaged one, no line if there is none.

        Size, footer, number of rows and the places of the columns are compared with what is known of each file.

        ```python
        assert converter.verify(every_row=True) == []
        ```

        Args:
            every_row: read all rows, too: each page is decoded, and compared with its checksum if it has one. This ends
                at the first damage.

        Raises:
            CacheError: the converter was deleted.
        """
        check_flag("every_row", every_row)
        return find_damage(*self._opened_files(), every_row=every_row)

    def quantiles(self, name: str, levels: Sequence[float] = (0.05, 0.25, 0.5, 0.75, 0.95)) -> Array:
        """The quantiles of a column's numbers, dates or times, by one pass over it. Nulls and NaNs are left out.

        Of dates and times, and of numbers among which one is infinite, it is the nearest one. Exact up to a million
        rows. Of more rows they are those of a random million: the part of the rows below an estimate then differs from
        the level by at most 0.0014, in 19 of 20 cases.

        ```python
        low, median, high = converter.quantiles("y", [0.05, 0.5, 0.95])
        ```

        Returns:
            One number for each level, shape `(len(levels),)`: float64, or the dtype of dates and times.

        Raises:
            CacheError: the converter was deleted.
            ValueError: the column does not exist or has no single numbers, or a level is outside 0 to 1.
        """
        check_distribution(name, self._as_stored)
        return quantiles_of(self._all_rows([name]), name, levels)

    def histogram(self, name: str, bins: int = 64) -> tuple[Array, Array]:
        """How a column's numbers, dates or times are distributed from the smallest to the largest, by one pass over it.

        ```python
        counts, edges = converter.histogram("y", bins=20)  # plt.stairs(counts, edges)
        ```

        Args:
            name: the column.
            bins: how many parts of equal width, at most 64.

        Returns:
            The counts, shape `(bins,)`, and the edges, shape `(bins + 1,)`, as `numpy.histogram` gives them. Nulls and
            numbers that are not finite are left out.

        Raises:
            CacheError: the converter was deleted.
            ValueError, TypeError: the column does not exist or has no single numbers, or `bins` is not from 1 to 64.
        """
        check_distribution(name, self._as_stored)
        if check_integer("bins", bins, least=1) > MAX_BINS:
            raise ValueError(f"bins must be at most {MAX_BINS}, got {bins}.")
        return histogram_of(self._all_rows([name]), name, bins)

    @property
    def url(self) -> str:
        """The folder of the cache entry, or of your data."""
        return self._storage.url

    @property
    def fingerprint(self) -> str:
        """A digest of the rows and their order. Equal digests mean the same rows in the same layout."""
        return self._manifest.live_fingerprint

    @property
    def version(self) -> int | None:
        """The version of the Delta table that is read; None for other sources."""
        return self._manifest.version

    @property
    def cache_key(self) -> str | None:
        """The `cache_key` that the cache entry was written with; None without one."""
        return None if self._manifest.origin is None else self._manifest.origin.cache_key

    @property
    def _as_stored(self) -> Schema:
        """The columns before they are decoded or standardised."""
        return replace(self._manifest.of_rows, decoders={}, scales={}).batch_schema

    def _all_rows(self, columns: Sequence[str]) -> BatchSource:
        self._check_open()
        return all_rows(self._storage, self._manifest.of_rows, columns)

    def __repr__(self) -> str:
        state = self._state or self._holding.state
        version = "" if self.version is None else f", version {self.version}"
        place = place_of(self._storage, self._manifest)
        return f"DatasetConverter({self._manifest.summary}, {place}{version}{f', {state}' if state else ''})"

    def _repr_html_(self) -> str:
        state = self._state or self._holding.state
        lifetime = state or lifetime_of(self._manifest, self._holding, is_owner=self._is_owner)
        return page_of(repr(self), self._storage, self._manifest, self.schema, lifetime=lifetime, has_files=not state)

    def __enter__(self) -> DatasetConverter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._holding.leaving(error, self.url):
            self._close(delete=self._holding.delete_on_exit and self._is_owner)

    def delete(self) -> None:
        """Remove the cache entry: now if no other process uses it, else when the last one closes it.

        Your own files (Parquet, Delta) are never removed. What a `with` block has kept can be removed after it. Calling
        it again does nothing, unless the first call raised.
        On a pickled copy it only closes the copy.

        ```python
        converter = make_spark_converter(df)
        converter.delete()
        ```

        Raises:
            CacheError, OSError: the store could not be reached; call it again later, or run `sweep`.
        """
        self._close(delete=True)

    def _close(self, *, delete: bool) -> None:
        if self._is_owner:
            self._holding.close(delete=delete)
        self._state = self._holding.state if self._is_owner else "closed"

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
        bucket_by: str | None = None,
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
        """A real `torch.utils.data.DataLoader` over the rows. Leaving its `with` block ends its threads and processes.

        A batch is a `dict` of tensors of shape `(batch_size, *field.shape)`; the last batch of an epoch may be
        shorter. Dates are int32 days and times int64 microseconds since 1970 (UTC); strings and bytes are lists.
        `len()` is exact before the first row is read. `state_dict()` and `load_state_dict()` resume with the very next
        row, also with another number of shards.

        ```python
        with converter.make_torch_dataloader(batch_size=256, shuffle=True, seed=7, columns=["x", "y"]) as loader:
            for batch in loader:
                loss = model(batch["x"]).mean()
        ```

        Args:
            batch_size: rows of a batch.
            num_epochs: epochs of one iteration; None for endless.
            columns: names of columns and stacks, in the order of the batch's keys; None for all.
            stack: `{"x": ["f0", "f1"]}` makes one tensor `(rows, 2)` of two scalar columns. These columns are then in
                the batch only as part of it, unless `columns` names them. Columns of one dtype keep it; others become
                `float_dtype`.
            filters: read only the rows that pass: a list of tuples `(column, operator, value)` (all must hold), a list
                of such lists (at least one must hold), or a `pyarrow.compute` expression. One pass over the filtered
                columns counts the rows first. `where` makes that pass once for many loaders; its documentation says how
                values are compared. Of arrays, `("tags", "contains", "red")` keeps rows with an element that equals
                the value, and `("tags", "contains any", ["red", "blue"])` with one that equals any of them.
            shuffle: permute row groups across the dataset, then rows across a window. Each epoch has another order;
                the same seed and rows give the same order.
            seed: the seed of the order and of the generators that `transform` gets.
            shuffle_window_rows: rows that are mixed together; None for about 48 MB of them, `"all"` for a uniform
                permutation of all rows, which needs memory for all of them. If the rows are sorted by what the model
                learns, batches vary more than after a perfect shuffle: 11 times as much with the default window, 2 M
                rows and batches of 1,024 (tests/bench/RESULTS.md). Write such rows with `shuffle_rows_seed=…`: then
                the default window is as good as a perfect shuffle.
            bucket_by: hand out rows of similar length together, by the lengths of this column's arrays or texts or by
                its whole numbers, so that `ragged="pad"` adds few zeros. The rows of each shuffle window are sorted and
                cut into up to 32 buckets of 2,048 or more, which come in random order; in a bucket lengths rise or
                fall. The more rows a window has, the better batches mix, and the less they pad. Needs `shuffle=True`.
                States go on with any batch size and number of shards.
            cur_shard: which of `shard_count` parts this process reads, from 0. Pass both or neither. Without them the
                rank is found in torch.distributed or jax.distributed, or in the environment of torchrun, Horovod, MPI
                or Slurm, when the first iteration begins. `cur_shard=0, shard_count=1` reads all rows. Ranks of
                torch.distributed that shuffle first compare what they are about to read: those that disagree get an
                error, and for those that do not come the others wait a minute.
            shard_count: how many parts there are: the number of processes that train together.
            uneven: what to do if the rows cannot be divided evenly among the shards. `"drop"`: all shards get equally
                many rows; each epoch drops other rows, fewer than there are shards (and fewer than that each time that
                a resume changes their number). `"pad"`: all get as many as the largest shard, and a boolean
                column `"__valid"` is False for a row that another shard reads too. `"keep"`: each row comes once, and
                some shards may take one more batch. None: `"drop"` with `shuffle=True`, else `"keep"`, so that
                evaluation and prediction lose no row.
            drop_last: leave out a last batch that is shorter than the others.
            transform: your function that takes a whole batch (`dict[str, numpy.ndarray]`) and returns one. It may add,
                remove and reshape columns; the number of rows must stay. If it has a second parameter, it gets a
                `numpy.random.Generator` seeded by seed, epoch and batch. It runs in the reader threads; if it holds the
                GIL, set `num_workers`.
            with_row_index: add a column of this name with each row's number in the dataset (int64), so that
                predictions can be joined to rows.
            nulls: `"raise"`; `"mask"`: adds a boolean `<name>__valid` for each column that has nulls, and puts zeros
                in their places; or `{column: fill value}`. Arrays whose elements may be null (numeric arrays only in
                your own Parquet files) also get `<name>__element_valid` in the values' shape, False for all elements of
                a null row. A fill value fills elements and null rows; for rows of different shapes it is one value, and
                fills elements only.
            ragged: for rows of different shapes: `"raise"`; `"pad"`: zeros at the end, and `<name>__length` holds each
                row's size (`(rows,)`, for nested arrays `(rows, ndim)`); or `"nested"`: a jagged tensor, whose rows
                may differ in their first size only. If inner lists of one row may differ in length (in your own
                Parquet files, of text, and inside arrays of structs or maps), `"pad"` adds `<name>__inner_length`
                (`(rows, *longest[:-1])`); `"nested"` is an error for torch, a RaggedTensor for TensorFlow, and an
                object array of arrays for NumPy. Arrays of strings or bytes are Python lists in any case, and padded
                with empty ones only by `"pad"`. To `transform`, nested rows are object arrays of arrays; what it
                returns so is a list of arrays for torch, and an error for TensorFlow.
            workers_count: reader threads; None for one per core, at most four.
            prefetch_batches: batches that are read (and transformed) ahead of use; None for one window per thread,
                with a transform two batches per thread. It does not change the order.
            verify_checksums: check each page against its checksum, and raise ReadError if they differ. Reading then
                takes 1.5 to 2 times as long. Files without checksums are not checked.
            local_cache_dir: a directory on this machine's disk that keeps row groups of a remote store for later epochs
                and for other processes on this machine. Row groups that do not fit are fetched each time. Those that no
                process uses any more are removed to make room. `sweep` empties it.
            local_cache_bytes: how much of that disk all processes together may use; None for nine tenths of the free
                space.
            num_workers: worker processes, as in torch. Threads are faster, unless your `transform` holds the GIL.
            persistent_workers: keep the worker processes from one iteration to the next.
            multiprocessing_context: how worker processes start: `"fork"`, `"spawn"` or `"forkserver"`; None for
                Python's default.
            device: the device to copy batches to, e.g. `"cuda"`. They are copied ahead of use, asynchronously.
            pin_memory: copy through page-locked memory; None: only if `device` is a GPU.

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

    def make_tf_dataset(  # noqa: D417 (make_torch_dataloader describes the others)
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
        bucket_by: str | None = None,
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
        """A real `tf.data.Dataset` of the same rows in the same order. Leaving its `with` block ends its threads.

        An element is a `dict` of tensors by column name; with `labels` it is `(features, labels)`, with `weights`
        `(features, labels, weights)`, as Keras takes them. The cardinality is exact, so Keras needs no
        `steps_per_epoch`. Each iteration takes `num_epochs` epochs, each in another order. An iteration that stops
        early, as when Keras peeks at a batch, starts over. Strings and bytes are `tf.string`, dates int32 days, times
        int64 microseconds, and `ragged="nested"` gives a `tf.RaggedTensor`.

        Arguments that are not described here, and the other errors, are those of `make_torch_dataloader`.

        ```python
        with converter.make_tf_dataset(batch_size=256, shuffle=True, features="x", labels="y") as dataset:
            keras_model.fit(dataset, epochs=3, shuffle=False)  # Shuffled already; Keras would warn.
        ```

        **Strategies.** A `tf.distribute` strategy divides each batch among its replicas, so `batch_size` is the global
        one. It reads a few batches ahead. If your loop stops within the last few batches, the next iteration may
        therefore begin with the next epoch instead of starting over.

        **Several workers.** Each worker of MultiWorkerMirroredStrategy reads its own part of the rows (from TF_CONFIG,
        or `cur_shard` and `shard_count`). Use `distribute_datasets_from_function`. Do not use
        `experimental_distribute_dataset`, which would cut each batch again, into more steps than the cardinality says;
        it is right only with `cur_shard=0, shard_count=1`, where every worker reads all rows and takes its part of each
        batch. Keras 3 itself cannot `fit` with several workers (keras-team/keras issue 20585). On JAX it can: pass
        `auto_shard_dataset=False` to `keras.distribution.DataParallel`, or Keras divides each process's rows once more.

        Args:
            batch_size: rows of a batch.
            num_epochs: epochs of one iteration; None for endless.
            features: the columns that the model gets: a list for a `dict`, one name for a bare tensor; None for all
                columns that `labels` and `weights` do not name. With `features`, and without `columns` and `transform`,
                only the columns of features, labels and weights are read.
            labels: the columns that the model learns, given like `features`.
            weights: the column of sample weights.
            drop_last: leave out a last batch that is shorter than the others; then batches have a static shape.
            transform: as in `make_torch_dataloader`. It is called for one batch when the dataset is made, because
                TensorFlow must know dtypes and shapes beforehand.
            prefetch: batches that TensorFlow prefetches, in addition to what reader threads read ahead. They count as
                used, in `state_dict()` and at the end of an epoch.

        Raises:
            MissingDependencyError: TensorFlow is not installed.
            ValueError, TypeError: an argument is wrong; the message names it.
        """
        options = LoaderOptions.of(locals()).narrowed_to(self.schema, features, labels, weights)
        source = self._source(options)
        check_steps(source, options.num_epochs)
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
        bucket_by: str | None = None,
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

        Arrays have shape `(rows, *field.shape)`. Dates and times are `datetime64[D]` and `datetime64[us]` (UTC),
        strings and bytes object arrays. Arguments and errors are those of `make_torch_dataloader`.

        ```python
        with converter.make_batch_reader(batch_size=256, columns=["x", "y"]) as reader:
            means = [batch["x"].mean() for batch in reader]
        ```

        Raises:
            ValueError, TypeError: an argument is wrong; the message names it.
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
        bucket_by: str | None = None,
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

        Arguments and errors are those of `make_torch_dataloader`. With `filters` the counts are None, because they need
        a pass over the rows; a converter from `where` has made that pass already.

        ```python
        plan = converter.plan(batch_size=256, shuffle=True, cur_shard=0, shard_count=4)
        print(plan.steps_per_epoch, plan.peak_memory_bytes)
        ```

        Raises:
            ValueError, TypeError: an argument is wrong; the message names it.
        """
        options = LoaderOptions.of(locals())
        source = self._source(options, runs_filters=False)
        return describe_plan(source, num_epochs=options.num_epochs, is_filtered=filters is not None)

    def where(self, filters: Filters) -> DatasetConverter:
        """A converter of the rows that pass `filters`, on the same files. Closing it deletes nothing.

        One pass over the filtered columns counts the rows, so its loaders know their length; row groups that Parquet
        statistics exclude are skipped. Pickle it to the ranks of a training: they need no pass of their own.

        ```python
        adults = converter.where([("age", ">=", 18), ("country", "in", ["DE", "FR"])])
        print(len(adults))
        ```

        Args:
            filters: as in `make_torch_dataloader`. Tuples follow Spark: NaN equals NaN and is greater than any other
                number, `-0.0` equals `0.0`, and a comparison with null is never true, so `not in` a list with None
                keeps nothing. A `pyarrow.compute` expression follows Arrow: NaN is neither equal to, less nor greater
                than any number. Columns are compared as stored (a cache stores doubles as `float_dtype`), and a number
                is rounded to float32 before it is compared with a float32 column (Spark compares doubles instead).
                Parquet statistics do not count NaN, which passes `x > 5`: row groups are skipped only if the filter
                also has `x <= inf`.

        Raises:
            CacheError: the converter was deleted.
            SourceError: no row passes.
            ValueError, TypeError: the filters are not understood, or do not fit the columns.
        """
        self._check_open()
        return self._part(select_rows(self._storage, self._manifest, filters))

    def split(
        self, fractions: Mapping[str, float], *, by: str | None = None, seed: int = 0
    ) -> dict[str, DatasetConverter]:
        """Converters of disjoint parts of the rows, on the same files. Closing them deletes nothing.

        ```python
        parts = converter.split({"train": 0.9, "val": 0.1}, seed=7)
        with parts["train"].make_torch_dataloader(batch_size=256, shuffle=True) as loader:
            ...
        ```

        Args:
            fractions: the part of the rows that each name gets: each above 0, together at most 1.
            by: a column of keys (integers, booleans, dates, times, strings or bytes). All rows of a key are in the same
                part, which depends only on key and seed, so the size of a part is only roughly its fraction. None: rows
                are chosen at random, and sizes are exact to a row.
            seed: another seed gives another split.

        Raises:
            CacheError: the converter was deleted.
            SourceError: a part would be empty.
            ValueError, TypeError: an argument is wrong; the message names it.
        """
        self._check_open()
        parts = split_rows(self._storage, self._manifest, fractions, by=by, seed=seed)
        return {name: self._part(manifest) for name, manifest in parts.items()}

    def to_spark(
        self,
        spark: Any,
        *,
        columns: Sequence[str] | None = None,
        with_row_index: str | None = None,
        partitions: int | None = None,
    ) -> DataFrame:
        """The rows as a Spark DataFrame, with the numbers that loaders give them: predictions are joined to it.

        ```python
        import pandas as pd

        with converter.make_batch_reader(batch_size=1024, columns=["x"], with_row_index="row") as reader:
            parts = [pd.DataFrame({"row": batch["row"], "predicted": batch["x"].sum(axis=1)}) for batch in reader]
        predictions = spark.createDataFrame(pd.concat(parts))
        converter.to_spark(spark, with_row_index="row").join(predictions, "row").show()
        ```

        Columns come as the files hold them: before they are decoded, standardised or made codes; a cache has numbers in
        its `float_dtype`. Arrays are lists. Members of structs are columns of their own. Rows that `where` or `split`
        left out, or a Delta table has deleted, are not there. Spark reads them when it needs them, and again each time:
        until then the converter must not be deleted.

        Args:
            spark: the session, classic or Connect. Its executors need this package.
            columns: some of the columns.
            with_row_index: the name of a column for each row's number; a loader's `with_row_index` gives the same.
            partitions: partitions of the DataFrame; None for one for 64 MB, at least 8.

        Raises:
            CacheError: the converter was deleted.
            SourceError: the elements are sequences, or rows that come several times.
            ValueError, TypeError: an argument is wrong; the message names it.
        """
        self._check_open()
        return rows_in_spark(
            self._storage,
            self._manifest,
            spark,
            columns=columns,
            with_row_index=with_row_index,
            partitions=partitions,
        )

    def sequences(
        self,
        length: int,
        *,
        by: str | Sequence[str] | None = None,
        order_by: str | None = None,
        stride: int = 1,
        max_gap: float | dt.timedelta | None = None,
        partial: Partial = "drop",
        steps: Mapping[str, Sequence[int] | int] | None = None,
    ) -> DatasetConverter:
        """A converter whose elements are `length` rows of one key that follow each other, on the same files.

        A column of shape `(rows, *shape)` arrives as `(sequences, length, *shape)`. Sequences overlap unless `stride`
        is `length`; they cross row groups and files, never keys. With `shuffle` they are permuted as rows are, and all
        that is true of rows is true of them: `len()`, shards, states, `plan`. One pass over `by` and `order_by` finds
        them. `where` and `split` afterwards choose sequences by their first rows; call them before to choose the rows
        that sequences are made of. Closing it deletes nothing.

        Of a column with a decoder each shuffle window is decoded as a whole, so that a row that many sequences share is
        decoded once; the default window is then about 48 MB of decoded rows.

        ```python
        hours = converter.sequences(24, by="country", stride=6, partial="pad")
        with hours.make_torch_dataloader(batch_size=64, shuffle=True) as loader:
            for batch in loader:
                past, future = batch["y"][:, :18], batch["y"][:, 18:]
        ```

        Args:
            length: rows of a sequence.
            by: the column of keys, or several, whose values are whole numbers, dates, times or texts; None if all rows
                belong together. In each file rows must be sorted by keys and time, as
                `df.repartition("key").sortWithinPartitions("key", "time")` writes them. If several files have rows of a
                key, its sequences go on in the file whose rows are next in time; their times must not overlap.
            order_by: the column of times (or numbers), which must not decrease within a key in a file. Rows of one time
                keep their order in a file; where two files meet at one time, either may come first. A cache stores
                doubles as `float_dtype`, which is too coarse for seconds since 1970: convert them to timestamps.
            stride: how many rows after a sequence the next one of its key begins.
            max_gap: sequences do not cross a larger gap between two times: a `datetime.timedelta`, or for a column of
                numbers a number.
            partial: what becomes of rows at a key's end that are too few: `"drop"`, or `"pad"`: zeros follow them, and
                a column `"__length"` says how many rows of each sequence are its own. The number of a row is then -1
                in the column of `with_row_index`.
            steps: `{"x": range(12), "y": [12, 15], "key": 0}` takes a column from these rows of a sequence only; from a
                single row without a dimension for it.

        Raises:
            CacheError: the converter was deleted.
            NullValueError: a key or a time is null.
            SourceError: rows are not sorted, or no key has `length` rows.
            ValueError, TypeError: an argument is wrong; the message names it.
        """
        self._check_open()
        manifest = select_sequences(
            self._storage,
            self._manifest,
            length,
            by=by,
            order_by=order_by,
            stride=stride,
            max_gap=max_gap,
            partial=partial,
            steps=steps,
        )
        return self._part(manifest)

    def balance(
        self,
        by: str,
        *,
        weights: Mapping[Any, float] | None = None,
        num_rows: int | None = None,
        seed: int = 0,
    ) -> DatasetConverter:
        """A converter whose epochs have each class equally often, on the same files. Closing it deletes nothing.

        The rows of a rare class come again and again, those of a frequent one in turns: each row of a class once before
        any of them comes twice, also from one epoch to the next. The counts are exact in every epoch, and each epoch
        draws anew. One pass over `by` finds the classes, which take four bytes of memory for each row.

        ```python
        balanced = converter.balance("y")
        with balanced.make_torch_dataloader(batch_size=256, shuffle=True, seed=7) as loader:
            labels = [batch["y"] for batch in loader]
        ```

        The copies of a row come in one shuffle window. If a class is so rare that its rows come many times, pass a
        large `shuffle_window_rows`, or `"all"`. Choose rows before with `where`, `split` and `sequences`; a sequence
        has the class of its first row.

        Args:
            by: the column of classes: whole numbers, booleans, dates, times or texts; values of a column of categories.
            weights: `{"cat": 2, "dog": 1}` gives cats twice as often as dogs; None for equally often.
            num_rows: rows of an epoch; None for as many as the converter has.
            seed: another seed draws other rows.

        Raises:
            CacheError: the converter was deleted.
            NullValueError: a row has no class.
            SourceError: there are more than 100,000 classes.
            ValueError, TypeError: an argument is wrong; the message names it.
        """
        self._check_open()
        manifest = balance(self._storage, self._manifest, by, weights=weights, num_rows=num_rows, seed=seed)
        return self._part(manifest)

    def sample(
        self,
        weights: str | Mapping[Any, float],
        *,
        by: str | None = None,
        num_rows: int | None = None,
        replacement: bool = True,
        seed: int = 0,
    ) -> DatasetConverter:
        """A converter whose epochs have each row as often as its weight says, on the same files.

        With a column of weights, a row that is expected 2.3 times comes two or three times: counts are rounded, not
        left to chance, and sum to `num_rows` in every epoch. With weights of values, each value comes exactly as often
        as its rows together, which take turns as in `balance`. Each epoch draws anew. Closing it deletes nothing.

        ```python
        with_positives = converter.sample({0: 1.0, 1: 5.0}, by="y")
        few = converter.sample("age", num_rows=100, replacement=False)
        ```

        Args:
            weights: the column of weights, or a dict with the weight of a row of each value of `by`.
            by: the column of the values in a dict of weights.
            num_rows: rows of an epoch; None for as many as the converter has.
            replacement: whether a row may come several times in an epoch.
            seed: another seed draws other rows.

        Raises:
            CacheError: the converter was deleted.
            NullValueError: a row has no weight.
            ValueError, TypeError: a weight is below 0 or of no value, all are 0, or another argument is wrong; the
                message names it.
        """
        self._check_open()
        manifest = sample(
            self._storage,
            self._manifest,
            weights,
            by=by,
            num_rows=num_rows,
            replacement=replacement,
            seed=seed,
        )
        return self._part(manifest)

    def _part(self, manifest: Manifest) -> DatasetConverter:
        return DatasetConverter(storage=self._storage, manifest=manifest, holding=self._holding, is_owner=False)

    @staticmethod
    def _owner_of(view: DatasetConverter) -> DatasetConverter:
        return DatasetConverter(storage=view._storage, manifest=view._manifest, holding=view._holding, is_owner=True)

    @staticmethod
    def _files_of(converter: DatasetConverter) -> tuple[Storage, Manifest]:
        """What an open converter reads, for one that is made of several."""
        return converter._opened_files()

    def _opened_files(self) -> tuple[Storage, Manifest]:
        self._check_open()
        return self._storage, self._manifest

    def _check_open(self) -> None:
        self._holding.check(self.url, self._state)
        if self._holding.made_on and not self._storage.exists:
            raise CacheError(
                f"{self.url} is not on this machine ({socket.gethostname()}): this converter was made on "
                f"{self._holding.made_on.partition('/')[0]}, in a folder of that machine alone. Choose a cache_dir, or "
                "data, that all machines share: a network folder, HDFS, abfs.",
                path=self.url,
            )

    def _source(self, options: LoaderOptions, *, runs_filters: bool = True) -> BatchSource:
        self._check_open()
        source = options.make_source(self._storage, self._manifest, runs_filters=runs_filters)
        if options.shuffle and not self._has_suggested:
            self._has_suggested = suggest_mixing(source)
        log_uneven_shards(source)
        return source


def _unpickled(stamp: Stamp, storage: Storage, manifest: Manifest, host: str) -> DatasetConverter:  # noqa: ARG001
    """The copy of a pickled converter; the version was checked when `stamp` was read, before the rest."""
    return borrow_files(storage, manifest, host)


class Owner(DatasetConverter):
    """Makes converters that end a view's use of a cache entry: for views whose first converter nothing else holds."""

    @classmethod
    def of(cls, view: DatasetConverter) -> DatasetConverter:
        """The rows of a view; its end releases the entry."""
        return cls._owner_of(view)


def borrow_files(storage: Storage, manifest: Manifest, host: str | None = None) -> DatasetConverter:
    """The converter of files that another process holds; `host` is where it was pickled."""
    holding = Holding()
    if storage.is_local and host not in (None, leases.this_host()):
        # Another machine may have its own copy of the files, written at another time.
        manifest = replace(manifest, file_stamps=None)
        holding.made_on = str(host)
    return DatasetConverter(storage=storage, manifest=manifest, holding=holding, is_owner=False)


def _written_statistics(manifest: Manifest) -> StatisticsByColumn | None:
    """The statistics that the writers took; None if they are not complete, or not of these rows alone."""
    is_complete = manifest.selection is None and all(
        _is_complete(field, manifest.statistics.get(field.name), is_counted=field.name in manifest.categories)
        for field in manifest.schema
    )
    if not is_complete:
        return None
    schema = manifest.batch_schema
    columns = {name: replace(column, field=schema[name]) for name, column in manifest.statistics.items()}
    return StatisticsByColumn(columns)


def _is_complete(field: Field, statistics: ColumnStatistics | None, *, is_counted: bool) -> bool:
    """Whether the writers took all statistics of a column: moments of numbers, rows of categories, lengths of lists."""
    if statistics is None:
        return False
    if is_counted:
        return statistics.counts is not None
    if field.is_object:
        return field.shape == () or statistics.longest is not None
    return statistics.closed is not None
