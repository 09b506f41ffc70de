"""`make_spark_converter` as Petastorm has it: a DataFrame is written as plain Parquet, and read by its loaders."""

from __future__ import annotations

import atexit
import logging
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from converter.petastorm.reader import make_batch_reader
from converter.petastorm.spark.writing import WriteOptions, forget, write_or_find
from converter.petastorm.store import open_store
from converter.petastorm.summary import as_it_is_called
from converter.petastorm.warning import call, warn_once
from converter.storage.at_once import at_once
from converter.storage.databricks import is_on_databricks
from converter.storage.opening import open_storage
from converter.storage.urls import shown_url

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from converter.petastorm.reader import Reader

logger = logging.getLogger(__name__)

DEFAULT_ROW_GROUP_SIZE_BYTES = 32 * 1024 * 1024
_RECOMMENDED_FILE_BYTES = 50 * 1024 * 1024
_CODECS = ("uncompressed", "bzip2", "gzip", "lz4", "snappy", "deflate", "zstd")
_DTYPES = ("float32", "float64", None)
_FILE_AVAILABILITY_WAIT_TIMEOUT_SECS = 30
_LOOK_SECONDS = 0.1
_WORKERS_COUNT = 4
_DEFAULT_BATCH_SIZE = 32
_CHECK_THREADS = 16
_RANK_VARIABLES = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("RANK", "WORLD_SIZE"),
)

DeleteDirHandler = Callable[[str], None]


def _delete_directory(url: str) -> None:
    storage = open_storage(as_it_is_called(url))
    if storage.exists:
        storage.delete_tree()


_delete_dir_handler: DeleteDirHandler = _delete_directory


def register_delete_dir_handler(handler: DeleteDirHandler | None) -> None:
    """Delete the folders of conversions by this function of their URL; None for the default."""
    global _delete_dir_handler
    _delete_dir_handler = _delete_directory if handler is None else handler


class SparkDatasetConverter:
    """Rows that `make_spark_converter` wrote, or found under a URL. Can be pickled and read by other processes.

    ```python
    from converter.petastorm.spark import SparkDatasetConverter, make_spark_converter

    spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, "file:///tmp/petastorm-example")
    old = make_spark_converter(df)
    with old.make_torch_dataloader(batch_size=2, num_epochs=1) as loader:
        print(sum(len(batch["y"]) for batch in loader), len(old))
    old.delete()
    ```
    """

    PARENT_CACHE_DIR_URL_CONF = "petastorm.spark.converter.parentCacheDirUrl"

    def __init__(
        self, cache_dir_url: str, file_urls: Sequence[str], dataset_size: int, *, is_ours: bool = True
    ) -> None:
        self.cache_dir_url = cache_dir_url
        self.file_urls = list(file_urls)
        self.dataset_size = dataset_size
        self._is_ours = is_ours

    def __len__(self) -> int:
        return self.dataset_size

    def make_tf_dataset(
        self,
        batch_size: int | None = None,
        prefetch: int | None = None,
        num_epochs: int | None = None,
        workers_count: int | None = None,
        shuffling_queue_capacity: int | None = None,
        **petastorm_reader_kwargs: Any,
    ) -> TFDatasetContextManager:
        """A context manager for a `tf.data.Dataset` of namedtuples of batches.

        Args:
            batch_size: rows of a batch; None for 32.
            prefetch: batches made ahead of use; None lets TensorFlow choose.
            num_epochs: None for endless.
            workers_count: reader threads; None for 4.
            shuffling_queue_capacity: rows that are mixed; None for the reader's order.
            petastorm_reader_kwargs: other arguments of `make_batch_reader`.
        """
        arguments = self._reader_arguments(petastorm_reader_kwargs, num_epochs, workers_count)
        return TFDatasetContextManager(
            self.file_urls,
            arguments,
            batch_size=batch_size or _DEFAULT_BATCH_SIZE,
            prefetch=prefetch,
            shuffling_queue_capacity=shuffling_queue_capacity or 0,
        )

    def make_torch_dataloader(
        self,
        batch_size: int = 32,
        num_epochs: int | None = None,
        workers_count: int | None = None,
        shuffling_queue_capacity: int = 0,
        data_loader_fn: Callable[..., Any] | None = None,
        **petastorm_reader_kwargs: Any,
    ) -> TorchDatasetContextManager:
        """A context manager for a `converter.petastorm.pytorch.DataLoader`, or for what `data_loader_fn` makes.

        Args:
            batch_size: rows of a batch.
            num_epochs: None for endless.
            workers_count: reader threads; None for 4.
            shuffling_queue_capacity: rows that are mixed; 0 for the reader's order.
            data_loader_fn: called with `reader`, `batch_size` and `shuffling_queue_capacity`.
            petastorm_reader_kwargs: other arguments of `make_batch_reader`.
        """
        arguments = self._reader_arguments(petastorm_reader_kwargs, num_epochs, workers_count)
        return TorchDatasetContextManager(
            self.file_urls,
            arguments,
            batch_size=batch_size,
            shuffling_queue_capacity=shuffling_queue_capacity,
            data_loader_fn=data_loader_fn,
        )

    def delete(self) -> None:
        """Delete what `make_spark_converter` wrote. The files of a URL that you gave are never deleted."""
        if not self._is_ours:
            logger.info("%s was not written by make_spark_converter, so delete() leaves it.", self.cache_dir_url)
            return
        forget(self.cache_dir_url)
        _delete_dir_handler(self.cache_dir_url)
        _deleted.add(self.cache_dir_url)

    @staticmethod
    def _reader_arguments(given: dict[str, Any], num_epochs: int | None, workers_count: int | None) -> dict[str, Any]:
        _check_rank_and_size_consistent_with_horovod(given)
        return {**given, "num_epochs": num_epochs, "workers_count": workers_count or _WORKERS_COUNT}


@dataclass(kw_only=True, eq=False)
class _Opened:
    """A reader that is open inside a `with` block."""

    file_urls: Sequence[str]
    arguments: dict[str, Any]
    reader: Reader | None = None

    def open(self) -> Reader:
        _wait_file_available(self.file_urls)
        self.reader = make_batch_reader(list(self.file_urls), **self.arguments)
        return self.reader

    def close(self) -> None:
        if self.reader is not None:
            self.reader.stop()
            self.reader.join()


class TFDatasetContextManager:
    """Entering it gives a `tf.data.Dataset`; leaving it ends its reader."""

    def __init__(
        self,
        file_urls: Sequence[str],
        arguments: dict[str, Any],
        *,
        batch_size: int,
        prefetch: int | None,
        shuffling_queue_capacity: int,
    ) -> None:
        self._opened = _Opened(file_urls=file_urls, arguments=arguments)
        self._batch_size, self._prefetch, self._capacity = batch_size, prefetch, shuffling_queue_capacity

    @property
    def reader(self) -> Reader | None:
        """The reader, once entered."""
        return self._opened.reader

    def __enter__(self) -> Any:
        import tensorflow as tf

        from converter.petastorm.tf_utils import make_batched_dataset

        dataset = make_batched_dataset(
            self._opened.open(), batch_size=self._batch_size, shuffling_queue_capacity=self._capacity
        )
        return dataset.prefetch(tf.data.AUTOTUNE if self._prefetch is None else self._prefetch)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()


class TorchDatasetContextManager:
    """Entering it gives a loader of torch tensors; leaving it ends its reader."""

    def __init__(
        self,
        file_urls: Sequence[str],
        arguments: dict[str, Any],
        *,
        batch_size: int,
        shuffling_queue_capacity: int,
        data_loader_fn: Callable[..., Any] | None,
    ) -> None:
        self._opened = _Opened(file_urls=file_urls, arguments=arguments)
        self._batch_size, self._capacity = batch_size, shuffling_queue_capacity
        self._data_loader_fn = data_loader_fn
        self.loader: Any = None

    @property
    def reader(self) -> Reader | None:
        """The reader, once entered."""
        return self._opened.reader

    def __enter__(self) -> Any:
        from converter.petastorm.pytorch import DataLoader

        make = self._data_loader_fn or DataLoader
        reader = self._opened.open()
        try:
            self.loader = make(reader=reader, batch_size=self._batch_size, shuffling_queue_capacity=self._capacity)
        except BaseException:
            self._opened.close()
            raise
        return self.loader

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()


def make_spark_converter(
    df: DataFrame | str,
    parquet_row_group_size_bytes: int = DEFAULT_ROW_GROUP_SIZE_BYTES,
    compression_codec: str | None = None,
    dtype: str | None = "float32",
) -> SparkDatasetConverter:
    """Write a DataFrame under the folder that the conf names, once; or take the Parquet files of a URL as they are.

    The conf is `SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF`. What was written is deleted by `delete()`, or when
    the interpreter ends. The same DataFrame with the same options is written once in a process.

    Args:
        df: a DataFrame, classic or of Spark Connect, or the URL of a folder of Parquet files.
        parquet_row_group_size_bytes: uncompressed bytes of a row group.
        compression_codec: `"snappy"` and the like; None for no compression.
        dtype: what floats become: `"float32"`, `"float64"`, or None to keep their types.

    Raises:
        ValueError: the conf is not set or has no scheme, or `dtype` is another one.
        RuntimeError: the codec is unknown, or this runs on an executor.
    """
    spark = _get_spark_session()
    parent_url = _get_parent_cache_dir_url(spark)
    if isinstance(df, str):
        url = _normalize_databricks_dbfs_url(
            df,
            "On databricks runtime, if `df` argument is a string, it must be a dbfs fuse path like 'file:/dbfs/xxx' or "
            "a dbfs path like 'dbfs:/xxx'.",
        )
    else:
        codec = (compression_codec or "uncompressed").lower()
        if codec not in _CODECS:
            raise RuntimeError(
                f"compression_codec should be None or one of the following values: {', '.join(map(repr, _CODECS))}, "
                f"got {compression_codec!r}"
            )
        if dtype not in _DTYPES:
            raise ValueError(f"dtype {dtype} is not supported. Use 'float32' or float64")
        options = WriteOptions(
            row_group_size=parquet_row_group_size_bytes, codec=codec, dtype=dtype, parent_url=parent_url
        )
        url = write_or_find(df, options, lambda made: atexit.register(_delete_at_exit, made, os.getpid()))
    is_ours = not isinstance(df, str)
    converter = _converter_at(url, is_ours=is_ours)
    if is_ours:
        native = call("make_spark_converter(df", cache_dir=shown_url(parent_url), float_dtype=dtype)
        native = native.replace("(df(", "(df, ", 1)
    else:
        native = call("make_parquet_converter", shown_url(url))
    warn_once("make_spark_converter", lambda: f"with {native} as converter: ...", stacklevel=2)
    return converter


def _converter_at(url: str, *, is_ours: bool) -> SparkDatasetConverter:
    """The converter of the files in a folder; rows are counted in their footers."""
    store = open_store([url])
    numbers = range(len(store.names))
    num_rows = sum(footer.num_rows for footer in at_once(store.footer, numbers, given_up=threading.Event()))
    urls = [store.path(number) for number in numbers]
    _check_dataset_file_median_size(urls)
    return SparkDatasetConverter(url, urls, num_rows, is_ours=is_ours)


def _get_spark_session() -> SparkSession:
    """The session of this process; only a driver has one.

    Raises:
        RuntimeError: this runs on an executor.
    """
    from pyspark import TaskContext
    from pyspark.sql import SparkSession

    if TaskContext.get() is not None:
        raise RuntimeError("make_spark_converter cannot be called in executor code: make the converter on the driver.")
    return SparkSession.builder.getOrCreate()


def _get_parent_cache_dir_url(spark: SparkSession) -> str:
    name = SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF
    url = spark.conf.get(name, None)
    if url is None:
        raise ValueError(f"Please set the spark config {name}, for example to file:///tmp/cache.")
    url = str(url).rstrip("/")
    _check_parent_cache_dir_url(url, spark)
    return url


def _check_url(url: str) -> None:
    if not urlsplit(url).scheme:
        raise ValueError(
            f'ERROR! A scheme-less directory url ({url}) is no longer supported. Please prepend "file://" for local '
            "filesystem."
        )


def _check_parent_cache_dir_url(url: str, spark: SparkSession | None = None) -> None:
    """Refuse a URL without a scheme; warn of a folder that a cluster's nodes do not share."""
    _check_url(url)
    if "DATABRICKS_RUNTIME_VERSION" not in os.environ:
        return
    master = (spark or _get_spark_session()).conf.get("spark.master", "") or ""
    path = urlsplit(url).path
    if (
        not master.strip().lower().startswith("local")
        and urlsplit(url).scheme == "file"
        and (not path.startswith("/dbfs/") and not is_on_databricks(path))
    ):
        logger.warning(
            "Usually, when running on databricks spark cluster, you should specify a dbfs fuse path for %s, like: "
            "'file:/dbfs/path/to/cache_dir', otherwise, you should mount NFS to this directory '%s' on all nodes of "
            "the cluster, e.g. using EFS.",
            SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, url,
        )  # fmt: skip


def _normalize_databricks_dbfs_url(url: str, message: str) -> str:
    """A URL as Databricks' file system is mounted; elsewhere the URL itself."""
    if "DATABRICKS_RUNTIME_VERSION" not in os.environ:
        return url
    if url.startswith(("file:/dbfs/", "file:///dbfs/")):
        return url
    if url.startswith("dbfs:///"):
        return "file:/dbfs/" + url.removeprefix("dbfs:///")
    if url.startswith("dbfs:/") and not url.startswith("dbfs://"):
        return "file:/dbfs/" + url.removeprefix("dbfs:/")
    raise ValueError(message)


_deleted: set[str] = set()
"""What has been deleted already: at exit its store may be gone, and is not asked for it."""


def _delete_at_exit(url: str, pid: int) -> None:
    # A child of os.fork() that ends by sys.exit() runs this, too.
    if url in _deleted or pid != os.getpid():
        return
    try:
        _delete_dir_handler(url)
    except Exception as error:  # noqa: BLE001 (a user's handler may raise anything, and the interpreter is ending)
        logger.warning("Delete cache data %s failed due to %r", url, error)


def _check_rank_and_size_consistent_with_horovod(arguments: dict[str, Any]) -> bool:
    """Whether `cur_shard` and `shard_count` are those of the environment; warns if not. None are taken from it."""
    rank, size = _get_horovod_rank_and_size()
    given = arguments.get("cur_shard"), arguments.get("shard_count")
    if rank is None:
        return True
    if given == (None, None) and (rank, size) != (0, 1):
        # Petastorm only warned, and each process read all rows.
        arguments["cur_shard"], arguments["shard_count"] = rank, size
        logger.info("cur_shard=%d, shard_count=%d come from the environment.", rank, size)
        return True
    if given != (rank, size) and (rank, size) != (0, 1):
        logger.warning(
            "The petastorm reader arguments cur_shard(%s) and shard_count(%s) is not consistent with the environment's "
            "rank (%s) and size (%s).",
            *given, rank, size,
        )  # fmt: skip
        return False
    return True


def _get_horovod_rank_and_size() -> tuple[int | None, int | None]:
    for rank_name, size_name in _RANK_VARIABLES:
        rank, size = os.environ.get(rank_name), os.environ.get(size_name)
        if rank is not None and size is not None:
            return int(rank), int(size)
        if rank is not None or size is not None:
            return None, None
    return None, None


def _wait_file_available(urls: Sequence[str]) -> None:
    """Wait until all files are there.

    Raises:
        RuntimeError: some are not, after half a minute.
    """
    stop = time.monotonic() + _FILE_AVAILABILITY_WAIT_TIMEOUT_SECS
    missing = list(urls)
    while missing:
        there = at_once(_exists, missing, threads_count=_CHECK_THREADS, given_up=threading.Event())
        missing = [url for url, exists in zip(missing, there, strict=True) if not exists]
        if missing and time.monotonic() > stop:
            raise RuntimeError(
                "Timeout while waiting for all parquet-store files to appear at urls "
                f"{','.join(missing)}. Please check whether these files were saved successfully when materializing "
                "dataframe."
            )
        if missing:
            time.sleep(_LOOK_SECONDS)


def _exists(url: str) -> bool:
    folder, _, name = url.rpartition("/")
    return open_storage(as_it_is_called(folder)).size(name) is not None


def _check_dataset_file_median_size(urls: Sequence[str]) -> None:
    """Warn of many small files on a local disk."""
    paths = [urlsplit(url).path for url in urls if urlsplit(url).scheme == "file"]
    if len(paths) < 2 or len(paths) < len(urls):
        return
    sizes = [os.path.getsize(open_storage(as_it_is_called(url)).path()) for url in urls]
    median = statistics.median_high(sizes)
    if median < _RECOMMENDED_FILE_BYTES:
        logger.warning(
            "The median size %d B (< 50 MB) of the parquet files is too small. Total size: %d B. Increase the median "
            "file size by calling df.repartition(n) or df.coalesce(n), which might help improve the performance. "
            "Parquet files: %s, ...",
            median, sum(sizes), urls[0],
        )  # fmt: skip
