"""The functions that users call: converters of a DataFrame, Parquet files, a Delta table or cache entry; `sweep`.

Longer than others, because three of them take the same options and each says what they mean there.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from converter.arguments import check_cache_key, check_flag, check_integer, check_timestamp
from converter.cache import entries, finding, roots, sweeps
from converter.cache.entries import HeldEntry
from converter.cache.removal import SweepReport
from converter.categories import CategoriesOption, Unseen
from converter.dataset import DatasetConverter, Owner
from converter.decoders.decoder import Decoder, check_decode
from converter.errors import CacheError, CacheNotOwnedError, SourceError
from converter.holding import Holding
from converter.lineage import remaking
from converter.lineage.recipe import with_entrys_recipe, with_recipe
from converter.loading.options import all_rows
from converter.manifest import Manifest
from converter.reading.local_cache import find_local_root, remove_unheld
from converter.scaling import StandardizeOption, check_standardize, standardized_names
from converter.scans.categories import with_categories, with_other_categories
from converter.scans.filters import Filters, list_values
from converter.scans.parts import select_rows
from converter.scans.pruning import rule_in_files
from converter.scans.scales import with_scales
from converter.scans.undecodable import with_decoders
from converter.schema import DeclaredShape, FloatDtype
from converter.sources.delta.snapshot import find_location, read_snapshot
from converter.sources.parquet.fields import read_footers
from converter.sources.spark import identity
from converter.sources.spark.options import DEFAULT_ROW_GROUP_BYTES, check_write_options
from converter.sources.spark.write import write_dataframe
from converter.storage.directory import Storage, StorageOptions
from converter.storage.opening import open_storage
from converter.storage.store import TIMEOUT_SECONDS, check_timeout
from converter.storage.urls import shown_url, stored_url

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger(__name__)


def make_spark_converter(
    df: DataFrame,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_key: str | None = None,
    float_dtype: FloatDtype | None = "float32",
    shapes: Mapping[str, DeclaredShape] | None = None,
    decode: Mapping[str, Decoder] | None = None,
    decode_at: Literal["read", "write"] = "read",
    categories: CategoriesOption = None,
    unseen: Unseen = "raise",
    standardize: StandardizeOption = None,
    row_group_bytes: int = DEFAULT_ROW_GROUP_BYTES,
    compression: str = "auto",
    shuffle_rows_seed: int | None = None,
    writer: str = "auto",
    storage_options: StorageOptions | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    delete_on_exit: bool = True,
    progress: bool | None = None,
) -> DatasetConverter:
    """Write `df` once into a cache directory, and return a converter that reads its rows as tensors.

    Spark's executors write Parquet files in one pass and keep the order of the rows: a sorted DataFrame is read sorted.
    The driver commits one manifest last, so readers never see an unfinished write.

    Example:
        ```python
        with make_spark_converter(df) as converter:
            with converter.make_torch_dataloader(batch_size=1024, shuffle=True) as loader:
                for batch in loader:
                    ...
        ```

    Args:
        df: a Spark DataFrame, classic or Connect. Structs are flattened to columns `a.b`; numeric arrays (nested
            ones too) and vectors become tensors, arrays of strings lists. An array of structs becomes an array for each
            member, `items.price`; a map becomes two, `m.key` and `m.value`. Day-time intervals and times of day are
            int64 microseconds, year-month intervals int32 months.
        cache_dir: a directory that the driver and every executor can reach; the cache is a subdirectory of it. None:
            the environment variable CONVERTER_CACHE_DIR, else the Spark conf converter.cacheDir, else, in local mode,
            the user's cache folder.
        cache_key: a name for these rows, e.g. `"flights-2026-11-20"`. An entry with this name, schema and write
            options is reused by any process, machine and Spark version: you promise that the rows are the same.
            None: an entry is reused only in this process, and only if plan, confs and input files prove that the rows
            are the same (over Connect never). Exception: a version of a Delta table, or columns and plain filters of
            it, is recognised in every process (classic Spark only).
        float_dtype: the dtype of doubles and decimals: `"float32"`, `"float64"`, or None (doubles stay, decimals
            become float64). Columns that lose precision are logged.
        shapes: `{"image": (8, 8)}` declares the shape of one row of an array column, or that a binary column holds
            uint8 numbers of that shape; `{"vector": ("float32", (512,))}` that it holds numbers of another dtype,
            little-endian. If a row does not fit, the write fails.
        decode: `{"photo": Image(size=(224, 224)), "features": NumPy()}` makes tensors of the bytes of binary columns.
            The cache holds the bytes; reader threads decode them. An object of your own can be a decoder, too: see
            `converter.decoders.Decoder`.
        decode_at: `"read"` keeps the bytes and decodes them in each epoch. `"write"` lets the executors decode
            them once and keeps the tensors: larger (a JPEG some ten times), and read as fast as any array. They
            need the library for it, and `NumPy` its dtype and shape. Rows that `on_error="skip"` leaves out are never
            written; a logged line counts them. What a decoder of your own makes is found again by `cache_key` alone,
            with which you promise its code, too. Another value in it and an edit of its own file (or script, or cell)
            are noticed. Changes in what that file imports or reads, and in installed packages, are not: choose another
            key then.
        categories: `["carrier", "origin"]` hands these columns out as int32 codes 0…n-1, as an embedding takes them, in
            the sorted order of their values; `schema["carrier"].categories` lists the values.
            `{"carrier": train.schema["carrier"].categories}` gives them the codes of another converter. Strings, whole
            numbers, booleans and dates can be categories, and the elements of arrays of them. Filters and `split`
            take the values. Rows that `on_error="skip"` leaves out have values as well, unless decoded at `"write"`.
        unseen: what a value is that is none of the categories that you gave: `"raise"`, or `"null"`.
        standardize: `["dep_delay", "distance"]` hands these columns out as (x − mean) / std, by the statistics of these
            rows; `schema["distance"].scale` has the two numbers, and `{"distance": train.schema["distance"].scale}`
            takes those of another converter. Integers and doubles are computed in double precision (a cache stores such
            doubles as doubles) and arrive as `float_dtype`. A null that is masked becomes 0, the mean. Filters and
            `statistics` know the numbers as they were written.
        row_group_bytes: uncompressed bytes of a row group, all columns together. Readers read whole row groups.
        compression: `"auto"` (none on a local disk; elsewhere zstd for the columns that it makes smaller), `"none"`,
            `"lz4"`, `"zstd"` or `"snappy"`.
        shuffle_rows_seed: write the rows in a random order (one shuffle in Spark). The same seed and input partitions
            give the same order. Use it if the rows are sorted by something that the model learns, such as the label.
        writer: `"executors"` write with pyarrow; `"spark"` uses Spark's own Parquet writer, with its own credentials
            and, on HDFS, as the user of its JVM, and stores codes of categories where executors have pyarrow; `"auto"`
            lets an executor write a small test file, and uses Spark's writer only if that fails.
        storage_options: keyword arguments of the fsspec filesystem, such as credentials. For Azure `credential` may
            be an object of azure-identity, or a function that returns a token. Secrets are never shown or stored.
        timeout_seconds: how long a remote store may be unreachable before an error is raised.
        delete_on_exit: remove the entry at the end of the `with` block, or when the interpreter exits. False keeps it
            for later runs with the same `cache_key`, and for `open_converter`, until `delete()`, or a `sweep` with
            `kept=True` or this `cache_key`. With True, a kept entry may be reused and is not removed. With False, only
            kept entries are reused.
        progress: show how many of Spark's tasks are done, in a notebook or on stderr. None: in a notebook or a
            terminal, if tqdm is installed.

    Raises:
        CacheNotConfiguredError: Spark runs on a cluster or through Connect, and no cache directory is configured.
        CacheNotOwnedError: the subdirectory of `cache_dir` that is used holds files that this package did not make.
        CacheError: the directory is a file, not writable, or not shared with the driver; or Spark's job failed (its
            own error is `__cause__`).
        MissingDependencyError: `progress=True` and tqdm is not installed; or a package that a URL needs is missing.
        NullValueError: a numeric array has null elements, or a nested array a null inner array.
        SourceError: `df` has no rows or no columns, is a stream, or has rows that contradict `shapes`; or Spark cannot
            be reached any more.
        TypeError: `df` is no Spark DataFrame, or an option has a wrong type.
        UnsupportedTypeError: columns have no tensor form; the message names all of them.
        ValueError: an option has a wrong value.
    """
    check_write_options(
        float_dtype=float_dtype, row_group_bytes=row_group_bytes, compression=compression, writer=writer, shapes=shapes
    )
    if decode_at not in ("read", "write"):
        raise ValueError(f"decode_at must be 'read' or 'write', got {decode_at!r:.80}.")
    check_flag("delete_on_exit", delete_on_exit)
    if progress is not None:
        check_flag("progress", progress)
    check_cache_key(cache_key)
    if shuffle_rows_seed is not None:
        shuffle_rows_seed = check_integer("shuffle_rows_seed", shuffle_rows_seed, least=0)
        if shuffle_rows_seed >= 2**62:
            raise ValueError(f"shuffle_rows_seed must be below 2**62, got {shuffle_rows_seed}.")
    entry = write_dataframe(
        df,
        cache_dir=None if cache_dir is None else os.fspath(cache_dir),
        cache_key=cache_key,
        float_dtype=float_dtype,
        shapes=shapes,
        decode=decode,
        decode_at=decode_at,
        categories=categories,
        unseen=unseen,
        standardize=standardize,
        row_group_bytes=row_group_bytes,
        compression=compression,
        shuffle_rows_seed=shuffle_rows_seed,
        writer=writer,
        storage_options=storage_options,
        timeout_seconds=check_timeout(timeout_seconds),
        is_kept=not delete_on_exit,
        progress=progress,
        complete=with_other_categories,
    )
    # Only delete() removes an entry that is kept.
    decode = decode if decode_at == "read" else None
    converter = hold_entry(entry, delete_on_exit=delete_on_exit and not entry.manifest.is_kept, decode=decode)
    with contextlib.ExitStack() as unless_returned:
        # A Ctrl-C would leave a converter that nobody has.
        unless_returned.push(converter)
        logger.info("Use %s", converter)
        # Without a lease, as on a full disk, the sweep would take this entry for unused.
        if entry.lease is not None:
            sweeps.sweep_after_write(entry.root)
        unless_returned.pop_all()
    return converter


def open_converter(
    url: str | os.PathLike[str],
    *,
    cache_key: str | None = None,
    decode: Mapping[str, Decoder] | None = None,
    storage_options: StorageOptions | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> DatasetConverter:
    """Open a committed cache entry, in any process and at any time; needs neither Spark nor the DataFrame.

    The end of a `with` block does not remove the entry; `delete()` does.

    Example:
        ```python
        make_spark_converter(df, cache_dir="/data/cache", cache_key="flights", delete_on_exit=False)
        with open_converter("/data/cache", cache_key="flights") as converter:  # In another process.
            ...
        ```

    Args:
        url: the entry's `converter.url`; or, with `cache_key`, the `cache_dir` of `make_spark_converter`.
        cache_key: the name that the entry was written with.
        decode: as in `make_spark_converter`, instead of the decoders that the entry was written with. Only decoders of
            your own must be given again, because their code is not stored.
        storage_options: as in `make_spark_converter`.
        timeout_seconds: how long a remote store may be unreachable before an error is raised.

    Raises:
        CacheNotOwnedError: `url` is not a cache entry.
        CacheError: the entry was not committed, or was deleted; or no entry has this `cache_key`, or several have,
            and the message lists them.
        CacheCorruptError: the manifest cannot be read, or a file is missing or has another size.
        ValueError, TypeError: an option has a wrong value or type.
    """
    location = os.fspath(url)
    check_cache_key(cache_key)
    check_timeout(timeout_seconds)
    manifest: Manifest | None
    with _named_store_errors(location, CacheError):
        try:
            if cache_key is None or finding.names_entry(location):
                root, key, manifest = finding.open_entry(location, storage_options, timeout_seconds)
            else:
                name_hash = identity.hash_of_name(cache_key)
                root, key, manifest = finding.find_named(
                    location, cache_key, name_hash, storage_options, timeout_seconds
                )
        except CacheNotOwnedError:
            folder = open_storage(location, storage_options, timeout_seconds)
            with contextlib.suppress(PermissionError):
                if folder.has_folders:
                    # Raises a better error if the container itself is missing.
                    folder.list()
            raise
        shown = root.below(key).url
        if cache_key is not None and not key.startswith(identity.hash_of_name(cache_key)):
            raise CacheError(f"{shown} was not written with cache_key={cache_key!r}. Leave cache_key out.", path=shown)
        if manifest is None:
            raise CacheError(f"There is no committed cache entry at {shown}: write it again.", path=shown)
        entry = entries.adopt(root, key, manifest)
        if entry is None:
            raise CacheError(f"{shown} was deleted by another process just now: write it again.", path=shown)
        if entry.damage is not None:
            entry.release_lease()
            raise entry.damage
    return hold_entry(entry, delete_on_exit=False, decode=decode)


def hold_entry(
    entry: HeldEntry, *, delete_on_exit: bool, decode: Mapping[str, Decoder] | None = None
) -> DatasetConverter:
    """The converter of a committed entry that this process uses."""
    holding = Holding(entry=entry, delete_on_exit=delete_on_exit)
    try:
        manifest = with_entrys_recipe(_settled(entry.folder, entry.manifest, decode), entry.folder.url, decode)
    except BaseException:
        holding.close(delete=delete_on_exit)
        raise
    return DatasetConverter(storage=entry.folder, manifest=manifest, holding=holding, is_owner=True)


def _settled(
    storage: Storage,
    manifest: Manifest,
    decode: Mapping[str, Decoder] | None,
    categories: CategoriesOption = None,
    *,
    unseen: Unseen = "raise",
    standardize: StandardizeOption = None,
) -> Manifest:
    """The manifest with what its columns become; the first shapes, the values and the means may take a pass."""
    dtypes = {field.name: field.dtype if field.shape == () else "array" for field in manifest.schema}
    decoders = check_decode(decode, dtypes)
    if decoders or manifest.decoders:
        # First, because it may leave rows out, whose values then count for nothing.
        manifest = with_decoders(storage, manifest, decoders)
    manifest = with_categories(storage, manifest, categories, unseen)
    scales = check_standardize(standardize, manifest.batch_schema)
    if scales or manifest.scales:
        manifest = replace(manifest, scales={**manifest.scales, **scales})
        manifest = with_scales(manifest, functools.partial(all_rows, storage))
    return manifest


def make_parquet_converter(
    url_or_urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    columns: Sequence[str] | None = None,
    float_dtype: FloatDtype | None = "float32",
    shapes: Mapping[str, DeclaredShape] | None = None,
    decode: Mapping[str, Decoder] | None = None,
    categories: CategoriesOption = None,
    unseen: Unseen = "raise",
    standardize: StandardizeOption = None,
    storage_options: StorageOptions | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> DatasetConverter:
    """Read existing Parquet files through a converter, without a copy; `delete()` never touches them.

    This call reads only the footers of the files. The rows keep the order of the files' names.

    >>> import tempfile, pyarrow as pa, pyarrow.parquet as pq
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pq.write_table(pa.table({"x": [1.0, 2.0], "y": [0, 1]}), f"{folder}/part.parquet")
    ...     with make_parquet_converter(folder) as converter:
    ...         converter.head(2)["x"]
    array([1., 2.], dtype=float32)

    Types arrive as from Spark. In addition:

    | in the files | as |
    | --- | --- |
    | uint8, uint16, uint32 | the next wider signed integer |
    | uint64 | int64; a number of 2**63 or more is a SourceError that names it, its column and its file |
    | float16 | float32 |
    | INT96 | times in microseconds, also outside the years 1677 to 2262, where nanoseconds overflow |
    | BYTE_ARRAY annotated as UTF8, STRING, ENUM or JSON | text; a SourceError if it is not valid UTF-8 |
    | BYTE_ARRAY without annotation | bytes, or numbers if `shapes` declares them |
    | lists of numbers | tensors; the loader's `nulls` and `ragged` apply to null elements and varying lengths |
    | TIME, Arrow's durations, Spark's intervals | microseconds or months, as from Spark |

    Args:
        url_or_urls: a folder, a file, a pattern (`sales/*/day-?.parquet`), or a list of them. Names that begin with
            `_` or `.` are skipped; names that do not end with `.parquet`, `.parq` or `.pq` are skipped with a warning.
            A file named in a list may have any name. A folder `year=2026` below a given folder or pattern becomes a
            column. Links are followed. In some of the files a column may be missing, all null, or of a narrower number
            type.
        columns: the columns to read; None for all.
        float_dtype: as in `make_spark_converter`; narrowed while reading.
        shapes: `{"image": (8, 8)}` gives the lists of a column that shape; None lets its rows differ. A binary column
            becomes uint8 numbers of that shape, or with `{"vector": ("float32", (512,))}` little-endian numbers of
            that dtype. Without a declaration, lists have one length if each row group's numbers divide evenly among
            its rows; a row that does not fit is an error while reading.
        decode: as in `make_spark_converter`.
        categories: as in `make_spark_converter`; one pass over these columns finds their values, unless you give them.
        unseen: as in `make_spark_converter`.
        standardize: as in `make_spark_converter`; one pass over these columns finds means and deviations, unless given.
        storage_options: as in `make_spark_converter`.
        timeout_seconds: how long a remote store may be unreachable before an error is raised.

    Raises:
        SourceError: there are no files or no rows; a column has different types in the files, and no type can hold
            all of them; or it is a Delta table, whose files also hold deleted rows.
        UnsupportedTypeError: columns have no tensor form; the message names all of them.
        ValueError, TypeError: an option has a wrong value or type.
    """
    urls = [url_or_urls] if isinstance(url_or_urls, (str, os.PathLike)) else url_or_urls
    are_urls = isinstance(urls, Sequence) and all(isinstance(url, (str, os.PathLike)) for url in urls)
    if not are_urls or not urls:
        # Of a list only the part that is wrong, because the other URLs may hold secrets.
        parts = urls if isinstance(urls, (list, tuple)) else ()
        wrong = next((url for url in parts if not isinstance(url, (str, os.PathLike))), urls)
        raise TypeError(f"make_parquet_converter needs a path or URL, or a list of them, got {wrong!r:.80}.")
    _check_source_options(columns, shapes, float_dtype)
    names = [os.fspath(url) for url in urls]
    with _named_store_errors(names[0]):
        storage, manifest = read_footers(
            names,
            columns=columns,
            float_dtype=float_dtype,
            shapes=shapes or {},
            standardized=standardized_names(standardize),
            storage_options=storage_options,
            timeout_seconds=check_timeout(timeout_seconds),
        )
        manifest = _settled(storage, manifest, decode, categories, unseen=unseen, standardize=standardize)
    options = _options_of(columns, float_dtype, shapes, unseen)
    manifest = with_recipe(manifest, "parquet", {"urls": list(map(stored_url, names))}, options)
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
    decode: Mapping[str, Decoder] | None = None,
    categories: CategoriesOption = None,
    unseen: Unseen = "raise",
    standardize: StandardizeOption = None,
    storage_options: StorageOptions | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    spark: SparkSession | None = None,
) -> DatasetConverter:
    """Read one version of a Delta table through a converter, without a copy; `delete()` never touches it.

    The version is fixed when the converter is made: all ranks, workers and pickled copies read the same rows, even if
    the table changes. Rows in deletion vectors are left out. Spark is not needed. Times of partition columns that have
    no zone in the log, as Spark wrote them before Delta 3.3, are taken for UTC, with a warning.

    Example:
        ```python
        with make_delta_converter("/data/rides_delta", version=3) as converter:
            reader = converter.make_batch_reader(batch_size=1024)
        ```

    Args:
        table: a path or URL; or, with `spark=`, the name of a table in its catalog.
        version: the number of a version; None for the latest.
        timestamp: read the latest version at or before this time; UTC if it has no time zone.
        columns: the columns to read; None for all. Members of structs are columns `a.b`.
        filters: as in `DatasetConverter.where`. Files are skipped by their partition and by the log's statistics
            before they are opened, then row groups, then rows.
        float_dtype: as in `make_spark_converter`; narrowed while reading.
        shapes: as in `make_parquet_converter`. Without a declaration, a column of lists has a fixed length if the
            footers of a hundred files show only one length.
        decode: as in `make_spark_converter`.
        categories: as in `make_spark_converter`; one pass over these columns finds their values, unless you give them.
        unseen: as in `make_spark_converter`.
        standardize: as in `make_spark_converter`; one pass over these columns finds means and deviations, unless given.
        storage_options: as in `make_spark_converter`.
        timeout_seconds: how long a remote store may be unreachable before an error is raised.
        spark: a session whose catalog knows `table`.

    Raises:
        MissingDependencyError: the extra `delta` is not installed.
        SourceError: there is no Delta table, no such version, or no rows; its log is damaged; or it needs a feature
            that is not supported: the message names the feature and says what to do instead.
        SourceChangedError: a data file of this version is gone.
        UnsupportedTypeError: columns have no tensor form; the message names all of them.
        ValueError, TypeError: an option has a wrong value or type.
    """
    if not isinstance(table, (str, os.PathLike)) or not os.fspath(table).strip():
        raise TypeError(f"make_delta_converter needs a path, a URL or the name of a table, got {table!r:.80}.")
    name = os.fspath(table)
    if version is not None and timestamp is not None:
        raise ValueError("version and timestamp both choose the version; pass only one of them.")
    _check_source_options(columns, shapes, float_dtype)
    values = None if filters is None else list_values(filters)
    with _named_store_errors(name):
        location = name if spark is None else find_location(spark, name)
        storage, manifest = read_snapshot(
            location,
            version=None if version is None else check_integer("version", version, least=0),
            timestamp=check_timestamp(timestamp),
            columns=columns,
            float_dtype=float_dtype,
            shapes=shapes or {},
            standardized=standardized_names(standardize),
            storage_options=storage_options,
            timeout_seconds=check_timeout(timeout_seconds),
            rules_in=None if values is None else functools.partial(rule_in_files, values),
        )
        if values is not None:
            manifest = select_rows(storage, manifest, values)
        manifest = _settled(storage, manifest, decode, categories, unseen=unseen, standardize=standardize)
    options = _options_of(columns, float_dtype, shapes, unseen) | {"filters": values}
    manifest = with_recipe(manifest, "delta", {"url": stored_url(location), "version": manifest.version}, options)
    return DatasetConverter(storage=storage, manifest=manifest, holding=Holding(), is_owner=True)


# What remakes converters stands below these functions, and calls them.
remaking.openers |= {
    "cache": open_converter,
    "parquet": make_parquet_converter,
    "delta": make_delta_converter,
    "view": Owner.of,
}


@contextlib.contextmanager
def _named_store_errors(url: str, kind: type[SourceError | CacheError] = SourceError) -> Iterator[None]:
    """Raise a store's error as `kind`, with the URL and without secrets."""
    try:
        yield
    except OSError as error:
        shown = shown_url(url)
        raise kind(f"{shown} cannot be read: {str(error).rstrip('.')}.", path=shown) from error


def _options_of(columns: Any, float_dtype: Any, shapes: Any, unseen: Any) -> dict[str, Any]:
    """The options of files as a recipe keeps them, without those that the manifest has."""
    listed = None if columns is None else list(columns)
    return {"columns": listed, "float_dtype": float_dtype, "shapes": shapes, "unseen": unseen}


def _check_source_options(columns: Any, shapes: Any, float_dtype: Any) -> None:
    check_write_options(
        float_dtype=float_dtype, row_group_bytes=DEFAULT_ROW_GROUP_BYTES, compression="auto", writer="auto",
        shapes=shapes, may_differ=True,
    )  # fmt: skip
    is_list = isinstance(columns, Sequence) and not isinstance(columns, str) and len(columns) > 0
    if columns is not None and not (is_list and all(isinstance(name, str) for name in columns)):
        raise TypeError(f"columns must be a list of names, got {columns!r:.80}.")


def sweep(
    cache_dir: str | os.PathLike[str],
    *,
    older_than: float | dt.timedelta = 0,
    kept: bool = False,
    cache_key: str | None = None,
    dry_run: bool = False,
    storage_options: StorageOptions | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> SweepReport:
    """Remove the entries and unfinished writes in `cache_dir` that no live process holds.

    Entries that were written with `delete_on_exit=False` stay, unless you pass `kept=True` or their `cache_key`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sweep(folder, kept=True, dry_run=True).num_entries
    0

    Args:
        cache_dir: the directory that was given to `make_spark_converter`, or to a loader as `local_cache_dir`.
        older_than: remove only entries, and local copies, that were unused for so many seconds (or a timedelta). S3 and
            its like keep no time of a folder, so there it counts from when an entry was written.
        kept: remove kept entries too.
        cache_key: remove only the entries of this name, kept or not.
        dry_run: count, and remove nothing.
        storage_options: as in `make_spark_converter`.
        timeout_seconds: how long a remote store may be unreachable before an error is raised.

    Returns:
        How many entries, unfinished writes, files and bytes were removed, and where; and how many kept entries stay.

    Raises:
        CacheNotOwnedError: the subdirectory of `cache_dir` that is used holds files that this package did not make.
        CacheError: the directory is a file, or the store failed.
        ValueError, TypeError: an option has a wrong value or type.
    """
    if isinstance(older_than, bool) or not isinstance(older_than, (int, float, dt.timedelta)):
        raise TypeError(f"older_than must be seconds or a datetime.timedelta, got {older_than!r:.80}.")
    seconds = older_than.total_seconds() if isinstance(older_than, dt.timedelta) else float(older_than)
    if not seconds >= 0:
        raise ValueError(f"older_than must be at least 0 seconds, got {older_than}.")
    check_flag("kept", kept)
    check_cache_key(cache_key)
    check_flag("dry_run", dry_run)
    directory = os.fspath(cache_dir)
    report = SweepReport()
    with _named_store_errors(directory, CacheError):
        root = roots.find_root(directory, storage_options, check_timeout(timeout_seconds))
        if root is not None:
            name_hash = None if cache_key is None else identity.hash_of_name(cache_key)
            report = sweeps.sweep_root(
                root, older_than_seconds=seconds, kept=kept, name_hash=name_hash, dry_run=dry_run
            )
        local = find_local_root(directory) if cache_key is None else None
        if local is not None:
            num_files, num_bytes = remove_unheld(local, older_than_seconds=seconds, dry_run=dry_run)
            report += SweepReport(num_files=num_files, num_bytes=num_bytes, urls=(local,) if num_files else ())
    return report
