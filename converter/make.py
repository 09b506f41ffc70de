"""The five doors: from Spark, Parquet, Delta, an entry; and sweep."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from converter.arguments import check_cache_key, check_flag, check_integer
from converter.cache import entries, leases, removal, roots, sweeps
from converter.dataset import DatasetConverter
from converter.errors import CacheError, CacheNotOwnedError, SourceError
from converter.holding import Holding
from converter.manifest import Manifest
from converter.reading.local_cache import find_local_root, remove_unheld
from converter.scans.filters import Filters, list_values
from converter.scans.pruning import rule_in_files
from converter.schema import DeclaredShape, FloatDtype, split_declared
from converter.sources.delta.snapshot import find_location, read_snapshot
from converter.sources.parquet.fields import read_footers
from converter.sources.spark import identity
from converter.sources.spark.options import DEFAULT_ROW_GROUP_BYTES, check_write_options
from converter.sources.spark.write import write_dataframe
from converter.storage.directory import Storage, StorageOptions
from converter.storage.opening import open_storage
from converter.storage.store import TIMEOUT_SECONDS, check_timeout
from converter.storage.urls import shown_url

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


logger = logging.getLogger(__name__)

_MAX_SWEPT = 64
"""Entries that a conversion looks at when it cleans up: each costs a listing."""


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
    check_flag("delete_on_exit", delete_on_exit)
    if progress is not None:
        check_flag("progress", progress)
    check_cache_key(cache_key)
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
    check_cache_key(cache_key)
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
                leases.release(lease)
            raise damage
    return hold_entry(root, key, manifest, lease, delete_on_exit=False)


def hold_entry(
    root: Storage, key: str, manifest: Manifest, lease: leases.Lease | None, *, delete_on_exit: bool
) -> DatasetConverter:
    """The converter of a committed entry that this process uses."""
    holding = Holding(root=root, key=key, manifest=manifest, lease=lease, delete_on_exit=delete_on_exit)
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
    return DatasetConverter(storage=storage, manifest=manifest, holding=Holding(), is_owner=True)


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
    converter = DatasetConverter(storage=storage, manifest=manifest, holding=Holding(), is_owner=True)
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
) -> removal.SweepReport:
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
    check_flag("kept", kept)
    check_cache_key(cache_key)
    check_flag("dry_run", dry_run)
    report = removal.SweepReport()
    with _named_store_errors(os.fspath(cache_dir), CacheError):
        root = roots.find_root(os.fspath(cache_dir), storage_options, check_timeout(timeout_seconds))
        if root is not None:
            name_hash = None if cache_key is None else identity.hash_of_name(cache_key)
            report = sweeps.sweep_root(
                root, older_than_seconds=seconds, kept=kept, name_hash=name_hash, dry_run=dry_run
            )
        local = find_local_root(os.fspath(cache_dir)) if cache_key is None else None
        if local is not None:
            num_files, num_bytes = remove_unheld(local, dry_run=dry_run)
            report += removal.SweepReport(num_files=num_files, num_bytes=num_bytes, urls=(local,) if num_files else ())
    return report


def _sweep_a_little(root: Storage) -> None:
    """Remove what the dead left beside us, bounded, and never at the user's cost."""
    try:
        report = sweeps.sweep_root(root, older_than_seconds=0, max_entries=_MAX_SWEPT)
    except (OSError, CacheError) as error:
        logger.info("Did not sweep %s: %s", root.url, error)
        return
    if report.num_files:
        logger.info(
            "Swept %d files (%d bytes) that dead owners left in %s", report.num_files, report.num_bytes, root.url
        )
