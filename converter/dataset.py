"""The public face: `make_spark_converter` and the `DatasetConverter` it returns."""

from __future__ import annotations

import atexit
import html
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from converter import cache
from converter.columns import Nulls, Ragged
from converter.errors import CacheError
from converter.manifest import Manifest
from converter.plan import Shard, Shuffle, Uneven, check_integer, default_window_rows
from converter.schema import FloatDtype, Schema
from converter.sources.spark import DEFAULT_ROW_GROUP_BYTES, check_write_options, write_dataframe
from converter.storage import Storage, StorageOptions
from converter.windows import BatchSource, check_policies, default_workers_count, resolve_names

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from converter.frameworks.numpy import BatchReader
    from converter.frameworks.torch import TorchDataLoader

logger = logging.getLogger(__name__)

_owned: weakref.WeakSet[DatasetConverter] = weakref.WeakSet()


class DatasetConverter:
    """Rows on disk, handed out as tensors.

    Made by `make_spark_converter`, not by hand. `len()` is the number of rows. As a context manager it
    removes the cached files at the end. It can be pickled: a copy reads, and never deletes.
    """

    def __init__(self, *, root: Storage, key: str, manifest: Manifest, float_dtype: str, owner: bool) -> None:
        self._root = root
        self._key = key
        self._manifest = manifest
        self._float_dtype = float_dtype
        self._owner_pid = os.getpid() if owner else None
        self._deleted = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (_unpickle, (self._root, self._key, self._manifest, self._float_dtype))

    def __len__(self) -> int:
        return self._manifest.num_rows

    @property
    def schema(self) -> Schema:
        """The columns: name, dtype, shape of a row, whether there are nulls."""
        return self._manifest.schema

    @property
    def url(self) -> str:
        """The folder of the cache entry."""
        return self._root.below(self._key).url

    @property
    def fingerprint(self) -> str:
        """A digest of the rows in order: equal where another write gave the same rows in the same layout."""
        return self._manifest.fingerprint

    def __repr__(self) -> str:
        manifest = self._manifest
        state = ", deleted" if self._deleted else ""
        return (
            f"DatasetConverter({manifest.num_rows:,} rows × {len(manifest.schema)} columns, "
            f"{manifest.num_bytes / 1e6:,.1f} MB in {len(manifest.file_names)} files, {self.url}{state})"
        )

    def _repr_html_(self) -> str:
        cells = [
            (
                field.name,
                field.dtype,
                "ragged" if field.shape is None else str(field.shape),
                "nulls" if field.has_nulls else "",
            )
            for field in self.schema
        ]
        rows = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
        head = "<tr><th>column</th><th>dtype</th><th>shape</th><th></th></tr>"
        return f"<p>{html.escape(repr(self))}</p><table>{head}{rows}</table>"

    def __enter__(self) -> DatasetConverter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.delete()

    def delete(self) -> None:
        """Remove the cached files; does nothing the second time, and nothing in a copy in another process."""
        if self._deleted:
            return
        self._deleted = True
        _owned.discard(self)
        if self._owner_pid == os.getpid():
            cache.delete(self._root, self._key, self._manifest)

    def make_torch_dataloader(
        self,
        *,
        batch_size: int = 32,
        num_epochs: int | None = 1,
        columns: Sequence[str] | None = None,
        stack: Mapping[str, Sequence[str]] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        shuffle_window_rows: int | None = None,
        cur_shard: int | None = None,
        shard_count: int | None = None,
        uneven: Uneven = "drop",
        drop_last: bool = False,
        nulls: Nulls = "raise",
        ragged: Ragged = "raise",
        workers_count: int | None = None,
        num_workers: int = 0,
    ) -> TorchDataLoader:
        """A real `torch.utils.data.DataLoader` over the rows, and a context manager that closes it.

        A batch is a `dict` of tensors of shape `(batch_size, *field.shape)`; the last batch of an epoch may be
        shorter. `len()` is exact before the first row is read.

        Args:
            batch_size: rows of a batch.
            num_epochs: epochs of one iteration; None for ever.
            columns: names of columns and stacks, in the order of the batch's keys; None for all.
            stack: `{"x": ["f0", "f1"]}` makes of scalar columns one tensor `(rows, 2)`. They do not arrive alone as
                well, unless `columns` names them. One dtype is kept, a mix becomes the converter's `float_dtype`.
            shuffle: permute row groups across the dataset, then rows across a window; another order in each epoch,
                the same for the same seed and rows.
            seed: which order.
            shuffle_window_rows: rows that are mixed together; None for about 48 MB of them.
            cur_shard: which part of `shard_count` this process reads. Both or none.
            shard_count: how many parts there are: the number of processes that train together.
            uneven: `"drop"` gives all shards equally many rows (the dropped ones move with the epoch),
                `"keep"` gives them all rows, and one batch more to some.
            drop_last: leave out a last batch that is shorter than the others.
            nulls: `"raise"`; `"mask"`, which adds `<name>__valid` for columns that have nulls, and zeros in their
                places; or `{column: fill value}`.
            ragged: for rows of different lengths: `"raise"`; `"pad"` with zeros, which adds `<name>__length`;
                or `"nested"`, a jagged tensor.
            workers_count: reader threads; None for one a core, up to four.
            num_workers: processes, as torch means it. Threads are faster, unless code of yours holds the GIL.

        Raises:
            CacheError: the converter was deleted.
            EmptyShardError: there are fewer rows than shards.
            MissingDependencyError: torch is not installed.
            NullValueError: a wanted column has nulls, and `nulls="raise"`.
            SourceError: a wanted column has rows of different lengths, and `ragged="raise"`.
            ValueError, TypeError: an argument is wrong; the message names it.
        """
        source = self._source(
            batch_size=batch_size,
            columns=columns,
            stack=stack,
            shuffle=shuffle,
            seed=seed,
            shuffle_window_rows=shuffle_window_rows,
            cur_shard=cur_shard,
            shard_count=shard_count,
            uneven=uneven,
            drop_last=drop_last,
            nulls=nulls,
            ragged=ragged,
            workers_count=workers_count,
        )
        check_integer("num_workers", num_workers, least=0)
        from converter.frameworks.torch import TorchDataLoader

        return TorchDataLoader(source, num_epochs=_check_epochs(num_epochs), num_workers=num_workers)

    def make_batch_reader(
        self,
        *,
        batch_size: int = 32,
        num_epochs: int | None = 1,
        columns: Sequence[str] | None = None,
        stack: Mapping[str, Sequence[str]] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        shuffle_window_rows: int | None = None,
        cur_shard: int | None = None,
        shard_count: int | None = None,
        uneven: Uneven = "drop",
        drop_last: bool = False,
        nulls: Nulls = "raise",
        ragged: Ragged = "raise",
        workers_count: int | None = None,
    ) -> BatchReader:
        """The same rows in the same order as `dict[str, numpy.ndarray]`; no framework needed.

        Arguments and errors are those of `make_torch_dataloader`. Dates and times arrive as
        `datetime64[D]` and `datetime64[us]` (UTC), strings and bytes as object arrays.
        """
        source = self._source(
            batch_size=batch_size,
            columns=columns,
            stack=stack,
            shuffle=shuffle,
            seed=seed,
            shuffle_window_rows=shuffle_window_rows,
            cur_shard=cur_shard,
            shard_count=shard_count,
            uneven=uneven,
            drop_last=drop_last,
            nulls=nulls,
            ragged=ragged,
            workers_count=workers_count,
        )
        from converter.frameworks.numpy import BatchReader

        return BatchReader(source, _check_epochs(num_epochs))

    def _source(
        self,
        *,
        batch_size: int,
        columns: Sequence[str] | None,
        stack: Mapping[str, Sequence[str]] | None,
        shuffle: bool,
        seed: int,
        shuffle_window_rows: int | None,
        cur_shard: int | None,
        shard_count: int | None,
        uneven: Uneven,
        drop_last: bool,
        nulls: Nulls,
        ragged: Ragged,
        workers_count: int | None,
    ) -> BatchSource:
        """Check every argument, by name, before anything is read."""
        if self._deleted:
            raise CacheError(
                f"The converter's cache at {self.url} was deleted, so it has no rows any more. Convert again, or make "
                "loaders before delete() and inside the `with` block.",
                path=self.url,
            )
        manifest = self._manifest
        check_integer("batch_size", batch_size, least=1)
        check_integer("seed", seed, least=0)
        if uneven not in ("drop", "keep"):
            raise ValueError(f"uneven must be 'drop' or 'keep', got {uneven!r}.")
        if (cur_shard is None) != (shard_count is None):
            raise ValueError(
                f"cur_shard and shard_count go together, got cur_shard={cur_shard} and shard_count={shard_count}."
            )
        shard = Shard()
        if cur_shard is not None and shard_count is not None:
            shard = Shard(
                index=check_integer("cur_shard", cur_shard, least=0),
                count=check_integer("shard_count", shard_count, least=1),
            )
        window_rows = default_window_rows(manifest.num_rows, int(manifest.row_group_bytes.sum()))
        if shuffle_window_rows is not None:
            window_rows = check_integer("shuffle_window_rows", shuffle_window_rows, least=1)
        threads = default_workers_count()
        if workers_count is not None:
            threads = check_integer("workers_count", workers_count, least=1)
        names, stacks = resolve_names(manifest.schema, columns, stack, self._float_dtype)
        source = BatchSource(
            storage=self._root.below(self._key),
            manifest=manifest,
            names=names,
            stacks=stacks,
            nulls=nulls,
            ragged=ragged,
            batch_size=batch_size,
            drop_last=drop_last,
            shuffle=Shuffle(seed=seed, fingerprint=manifest.fingerprint) if shuffle else None,
            shard=shard,
            uneven=uneven,
            window_rows=window_rows,
            workers_count=threads,
        )
        check_policies(source)
        source.num_batches()
        return source


def make_spark_converter(
    df: DataFrame,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    float_dtype: FloatDtype | None = "float32",
    shapes: Mapping[str, Sequence[int]] | None = None,
    row_group_bytes: int = DEFAULT_ROW_GROUP_BYTES,
    compression: str = "auto",
    storage_options: StorageOptions | None = None,
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
        float_dtype: what doubles and decimals become: `"float32"`, `"float64"`, or None (doubles stay, decimals
            become float64). One logged line for each narrowed column.
        shapes: `{"image": (8, 8)}` declares the shape of one row of an array column; a row that does not fit
            fails the write.
        row_group_bytes: size of the pieces that are read at once, in memory, all columns together.
        compression: `"auto"` (none on a local disk), `"none"`, `"lz4"`, `"zstd"` or `"snappy"`.
        storage_options: keyword arguments of the fsspec filesystem; not kept anywhere.
        delete_on_exit: remove the files when this interpreter ends, if nobody did before.
        progress: show a bar while writing; None where stderr is a terminal or a notebook looks. Needs tqdm.

    Raises:
        CacheNotConfiguredError: on a cluster or on Spark Connect, and nobody said where the cache goes.
        CacheNotOwnedError: our subdirectory of `cache_dir` exists and was made by somebody else.
        CacheError: the directory is a file, not writable, not shared with the driver, or Spark's job failed (its
            own error is `__cause__`).
        NullValueError: an array column has null elements.
        SourceError: no rows, no columns, a stream, or rows that contradict `shapes`.
        TypeError: `df` is no Spark DataFrame.
        UnsupportedTypeError: columns have no tensor form; all of them are named.
        ValueError: an option has a value it cannot have.
    """
    check_write_options(float_dtype=float_dtype, row_group_bytes=row_group_bytes, compression=compression)
    root, key, manifest = write_dataframe(
        df,
        cache_dir=None if cache_dir is None else os.fspath(cache_dir),
        float_dtype=float_dtype,
        shapes=shapes,
        row_group_bytes=row_group_bytes,
        compression=compression,
        storage_options=storage_options,
        progress=progress,
    )
    converter = DatasetConverter(
        root=root, key=key, manifest=manifest, float_dtype=float_dtype or "float64", owner=True
    )
    logger.info("Wrote %s", converter)
    if delete_on_exit:
        _owned.add(converter)
    return converter


def _unpickle(root: Storage, key: str, manifest: Manifest, float_dtype: str) -> DatasetConverter:
    return DatasetConverter(root=root, key=key, manifest=manifest, float_dtype=float_dtype, owner=False)


def _check_epochs(num_epochs: int | None) -> int | None:
    return None if num_epochs is None else check_integer("num_epochs", num_epochs, least=1)


@atexit.register
def _delete_owned() -> None:
    """Remove what this process wrote and nobody deleted."""
    for converter in list(_owned):
        try:
            converter.delete()
        except (OSError, CacheError) as error:
            logger.warning("Could not delete %s at exit: %s", converter.url, error)
