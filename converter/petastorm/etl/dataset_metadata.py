"""Writes a store's schema and counts of row groups beside its files, and reads them."""

from __future__ import annotations

import contextlib
import json
import logging
import posixpath
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from converter.errors import SourceError
from converter.petastorm import places, stored_schema, summary
from converter.petastorm.fs_utils import FilesystemResolver
from converter.petastorm.pickle_records import PetastormMetadataError
from converter.petastorm.store import Store, open_store
from converter.petastorm.stored_schema import ROW_GROUPS_PER_FILE_KEY, ROWGROUPS_INDEX_KEY, UNISCHEMA_KEY
from converter.petastorm.unischema import Unischema
from converter.sources.spark.confs import changed_confs
from converter.storage.at_once import at_once

__all__ = [
    "ROW_GROUPS_PER_FILE_KEY",
    "UNISCHEMA_KEY",
    "PetastormMetadataError",
    "PetastormMetadataGenerationError",
    "RowGroupPiece",
    "get_schema",
    "get_schema_from_dataset_url",
    "infer_or_load_unischema",
    "load_row_groups",
    "materialize_dataset",
]

logger = logging.getLogger(__name__)

_FOOTER_THREADS = 8
_LEVEL, _BLOCK_BYTES = "parquet.summary.metadata.level", "parquet.block.size"
_SPARK_COLUMNS_KEY = b"org.apache.spark.sql.parquet.row.metadata"
_ADVICE = (
    "Use materialize_dataset(…) of converter.petastorm.etl.dataset_metadata to write it with the files, or "
    "converter.petastorm.etl.petastorm_generate_metadata for files that are there."
)


class PetastormMetadataGenerationError(SourceError):
    """The metadata of a store could not be written."""


class RowGroupPiece(NamedTuple):
    """One row group of a store."""

    path: str
    """The file's path on its filesystem."""

    row_group: int
    """Its number in the file."""

    partition_keys: list[tuple[str, Any]]
    """The partition columns of the file with their values."""


@contextlib.contextmanager
def materialize_dataset(
    spark: Any,
    dataset_url: str,
    schema: Unischema,
    row_group_size_mb: int | None = None,
    use_summary_metadata: bool = False,
    filesystem_factory: Callable[[], Any] | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """Around the Spark job that writes a store: sets the size of row groups, then writes the metadata.

    ```python
    from pyspark.sql.types import LongType

    from converter.petastorm.codecs import NdarrayCodec, ScalarCodec
    from converter.petastorm.etl.dataset_metadata import materialize_dataset
    from converter.petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row

    Hello = Unischema(
        "Hello",
        [
            UnischemaField("id", np.int64, (), ScalarCodec(LongType())),
            UnischemaField("matrix", np.float32, (2, 3), NdarrayCodec()),
        ],
    )
    rows = [{"id": number, "matrix": np.full((2, 3), number, np.float32)} for number in range(100)]
    with materialize_dataset(spark, "file:///data/hello", Hello, row_group_size_mb=64):
        df = spark.createDataFrame([dict_to_spark_row(Hello, row) for row in rows], Hello.as_spark_schema())
        df.write.mode("overwrite").parquet("file:///data/hello")
    ```

    Works with classic Spark and with Spark Connect; afterwards all settings are what they were. Petastorm 0.13 can read
    the store, and the schema also stands there as JSON, which is what is read here. `use_summary_metadata` lets Spark
    write `_metadata` as well. `filesystem_factory` opens the filesystem for the metadata; else the URL and
    `storage_options` do.

    Raises:
        TypeError: `schema` is no Unischema.
        ValueError: the URL has no scheme, or the schema has a type or a codec that cannot be stored.
        PetastormMetadataGenerationError: there are no files to describe, or one cannot be read.
    """
    if not isinstance(schema, Unischema):
        raise TypeError(f"schema must be a Unischema of converter.petastorm.unischema, got {type(schema).__name__}.")
    # Before the job, which may take hours: a codec that cannot be described is refused now.
    stored_schema.describe_schema(schema)
    if filesystem_factory is None:
        url, options = place_of(classic_context(spark), dataset_url, storage_options)
    else:
        url, options = _place_on(filesystem_factory(), dataset_url, storage_options)
    with _job_settings(spark, row_group_size_mb, use_summary_metadata):
        yield
    write_metadata(url, schema, options)


def write_metadata(
    url: str,
    schema: Unischema,
    storage_options: Mapping[str, Any] | None = None,
    *,
    kept: Mapping[bytes, bytes] | None = None,
) -> None:
    """Write the schema and the counts of row groups beside the files that a URL names. Starts no Spark job.

    What `_common_metadata` holds otherwise stays, and of `kept` what it lacks. An index of row groups is dropped if the
    files are no longer those that it was built from.

    Raises:
        PetastormMetadataGenerationError: there are no files, or one cannot be read.
    """
    try:
        store = open_store([url], storage_options=storage_options)
        footers = at_once(
            lambda number: _told(store.footer(number)),
            range(len(store.names)),
            threads_count=_FOOTER_THREADS,
            given_up=threading.Event(),
        )
        counts = [told.num_row_groups for told in footers]
        columns, before = _written_before(store)
        whole = _with_later_columns(columns, [told.schema for told in footers])
        if added := whole.names[len(columns) :]:
            # Spark prefers its own list of the columns to them.
            listed = _with_listed(before.pop(_SPARK_COLUMNS_KEY, None), added, [told.listed for told in footers])
            before |= {} if listed is None else {_SPARK_COLUMNS_KEY: listed}
            whole = pa.schema([field.with_type(_known_to_spark(field.type)) for field in whole])
    except SourceError as error:
        raise PetastormMetadataGenerationError(
            f"The files are written, if there are any, but not their metadata: {error} Once that is mended, run "
            f"converter.petastorm.etl.petastorm_generate_metadata --dataset_url {url} --unischema_class ….",
            path=url,
        ) from error
    metadata = {**(kept or {}), **before}
    per_file = dict(zip(store.names, counts, strict=True))
    indexed = metadata.pop(stored_schema.INDEXED_FILES_KEY, None)
    if ROWGROUPS_INDEX_KEY in metadata and _are_counts(metadata, per_file) and indexed in (None, store.digest):
        metadata |= {} if indexed is None else {stored_schema.INDEXED_FILES_KEY: indexed}
    elif ROWGROUPS_INDEX_KEY in metadata:
        logger.warning("The index of row groups of %s is dropped: the files have changed. Build it again.", url)
        del metadata[ROWGROUPS_INDEX_KEY]
    # A schema without a pickle would be taken for older than the pickle that was there.
    metadata.pop(UNISCHEMA_KEY, None)
    metadata |= stored_schema.schema_entries(schema) | stored_schema.row_group_entries(per_file)
    summary.write_summary(store.storage, whole, metadata)


class _Told(NamedTuple):
    """What is kept of a file's footer."""

    num_row_groups: int
    schema: pq.ParquetSchema
    listed: bytes | None
    """Spark's own list of the columns, with types that Parquet has not."""


def _told(footer: pq.FileMetaData) -> _Told:
    return _Told(footer.num_row_groups, footer.schema, (footer.metadata or {}).get(_SPARK_COLUMNS_KEY))


def _with_later_columns(columns: pa.Schema, schemas: Sequence[pq.ParquetSchema]) -> pa.Schema:
    """The columns, and those that only other files have: Spark reads no others than stand in `_common_metadata`."""
    last = None
    for schema in schemas:
        if last is None or not schema.equals(last):
            last = schema
            for field in schema.to_arrow_schema():
                columns = columns if field.name in columns.names else columns.append(field.with_nullable(True))
    return columns


def _with_listed(before: bytes | None, added: Sequence[str], later: Sequence[bytes | None]) -> bytes | None:
    """Spark's list of the columns with those that later files' lists have too; None if one is in none of them."""
    if before is None:
        return None
    try:
        lists = [json.loads(text)["fields"] for text in dict.fromkeys([before, *later]) if text is not None]
        known = {field["name"]: field for fields in reversed(lists) for field in fields}
        first = {field["name"] for field in lists[0]}
        fields = [*lists[0], *({**known[name], "nullable": True} for name in added if name not in first)]
    except (ValueError, LookupError, TypeError):
        return None
    return json.dumps({"type": "struct", "fields": fields}).encode()


def _known_to_spark(kind: pa.DataType) -> pa.DataType:
    """The type, with Spark's times for INT96: Arrow takes these for nanoseconds, which Spark refuses."""
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_known_to_spark(kind.value_type)))
    return pa.timestamp("us", "UTC") if kind == pa.timestamp("ns") else kind


def _written_before(store: Store) -> tuple[pa.Schema, dict[bytes, bytes]]:
    """The columns and the metadata that stand beside the files; the first file's own if there are none."""
    try:
        if (found := summary.read_summary(store.storage)) is not None:
            return summary.columns_of(store.storage, found[0]), found[1]
    except PetastormMetadataError as error:
        logger.warning("The metadata that cannot be read are replaced: %s", error)
    return store.arrow_schema, dict(store.arrow_schema.metadata or {})


def _are_counts(metadata: Mapping[bytes, bytes], per_file: Mapping[str, int]) -> bool:
    """Whether the stored numbers of row groups are these, or there are none."""
    try:
        return stored_schema.row_groups_per_file(metadata) in (None, per_file)
    except PetastormMetadataError:
        return False


def get_schema(dataset: Any) -> Unischema:
    """The schema that is stored with a dataset: a store of ours, or pyarrow's `ParquetDataset`.

    Raises:
        PetastormMetadataError: there is none, or it cannot be understood.
    """
    metadata = metadata_of(dataset)
    if metadata is None:
        raise PetastormMetadataError(f"Could not find _common_metadata file. {_ADVICE}")
    schema = stored_schema.read_schema(metadata)
    if schema is None:
        raise PetastormMetadataError(f"Could not find the unischema in the dataset common metadata file. {_ADVICE}")
    return schema


def get_schema_from_dataset_url(
    dataset_url_or_urls: str | Sequence[str],
    hdfs_driver: str = "libhdfs3",
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
) -> Unischema:
    """The schema that is stored with the dataset that a URL names, or beside the files of a list.

    Raises:
        ValueError: a URL has no scheme.
        FileNotFoundError: there is no such folder.
        PetastormMetadataError: there is no schema, or it cannot be understood.
    """
    places.note_driver(hdfs_driver)
    urls = places.checked_urls(dataset_url_or_urls)
    options = storage_options
    if filesystem is not None:
        urls, options = places.on_filesystem(urls, filesystem)
    folder = summary.open_folder(urls[0], options)
    if not folder.exists:
        raise FileNotFoundError(f"{folder.url} does not exist.")
    found = summary.read_summary(folder)
    if found is None:
        raise PetastormMetadataError(
            f"Could not find _common_metadata file in {folder.url}. {_ADVICE}", path=folder.url
        )
    schema = stored_schema.read_schema(found[1])
    if schema is None:
        raise PetastormMetadataError(
            f"Could not find the unischema in the dataset common metadata file of {folder.url}. {_ADVICE}",
            path=folder.url,
        )
    return schema


def infer_or_load_unischema(dataset: Any) -> Unischema:
    """The stored schema of a dataset; if it has none, the one that its files have.

    Raises:
        PetastormMetadataError: there is a stored schema, which cannot be understood.
    """
    stored = stored_schema.read_schema(metadata_of(dataset) or {})
    if stored is not None:
        return stored
    logger.info("The dataset has no stored schema: it comes from the files themselves.")
    return dataset.inferred_schema() if isinstance(dataset, Store) else Unischema.from_arrow_schema(dataset)


def load_row_groups(dataset: Any) -> list[RowGroupPiece]:
    """The row groups of a dataset, in the order of the files' paths; the indexes of row groups count in this order.

    Their numbers come from the stored metadata; without any, from the footers.

    Raises:
        PetastormMetadataError: there are metadata, but no counts of row groups for all files.
    """
    metadata = metadata_of(dataset)
    counts = None if metadata is None else stored_schema.row_groups_per_file(metadata)
    if metadata is not None and counts is None and not _has_row_groups(dataset):
        raise PetastormMetadataError(f"Could not find row group metadata in _common_metadata file. {_ADVICE}")
    if isinstance(dataset, Store):
        return [
            RowGroupPiece(dataset.storage.path(dataset.names[file]), index, list(dataset.partitions[file].items()))
            for file, index in dataset.row_groups()
        ]
    # Loads pandas.
    import pyarrow.dataset

    base = base_folder(dataset)
    pieces = []
    for fragment in sorted(dataset.fragments, key=lambda fragment: str(fragment.path)):
        name = posixpath.relpath(fragment.path, base)
        if counts is not None and name not in counts:
            raise PetastormMetadataError(f"_common_metadata knows no row groups of {name}. {_ADVICE}")
        count = fragment.num_row_groups if counts is None else counts[name]
        keys = list(pyarrow.dataset.get_partition_keys(fragment.partition_expression).items())
        pieces += [RowGroupPiece(fragment.path, number, keys) for number in range(count)]
    return pieces


def _has_row_groups(dataset: Any) -> bool:
    """Whether `_metadata` is there, in which Spark writes the footers of all files."""
    if isinstance(dataset, Store):
        return dataset.storage.size(summary.NAME_WITH_ROW_GROUPS) is not None
    path = posixpath.join(base_folder(dataset), summary.NAME_WITH_ROW_GROUPS)
    return bool(dataset.filesystem.get_file_info(path).type == pafs.FileType.File)


def metadata_of(dataset: Any) -> Mapping[bytes, bytes] | None:
    """The key-value metadata of `_common_metadata`; None if the dataset has no such file."""
    if isinstance(dataset, Store):
        return dataset.metadata or None
    common = getattr(dataset, "common_metadata", None)
    if common is not None or not isinstance(dataset, pq.ParquetDataset):
        return None if common is None else dict(common.metadata or {})
    try:
        with dataset.filesystem.open_input_file(posixpath.join(base_folder(dataset), summary.NAME)) as file:
            return dict(pq.read_metadata(file).metadata or {})
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError) as error:
        raise PetastormMetadataError(f"_common_metadata is no Parquet footer that can be read: {error}.") from error


def base_folder(dataset: Any) -> str:
    """The folder of pyarrow's `ParquetDataset`: above all files, and above the folders of partition values."""
    folders = {posixpath.dirname(path) for path in dataset.files}
    base = posixpath.commonpath(folders) if folders else ""
    while "=" in posixpath.basename(base):
        base = posixpath.dirname(base)
    return base


def place_of(context: Any, url: str, storage_options: Mapping[str, Any] | None) -> tuple[str, Mapping[str, Any] | None]:
    """The URL and the options by which the native code opens what a classic Spark context knows by a URL.

    Raises:
        ValueError: the URL has no scheme.
    """
    places.checked_urls(url)
    if context is None or not url.startswith("hdfs:"):
        return url, storage_options
    resolver = FilesystemResolver(url, hadoop_configuration(context))
    return resolver.parsed_dataset_url().geturl(), {"user": context.sparkUser()} | dict(storage_options or {})


def _place_on(filesystem: Any, url: str, options: Mapping[str, Any] | None) -> tuple[str, Mapping[str, Any] | None]:
    """A place on a filesystem that a user opened. One of pyarrow's keeps its options secret: then the URL is opened."""
    if isinstance(getattr(filesystem, "fs", filesystem), pafs.LocalFileSystem) or ":" not in url.partition("/")[0]:
        # A path alone is enough where the filesystem is known.
        protocol = getattr(filesystem, "protocol", "file")
        named = (
            url if ":" in url.partition("/")[0] else f"{protocol if isinstance(protocol, str) else protocol[0]}://{url}"
        )
        return named, getattr(filesystem, "storage_options", options)
    try:
        urls, own_options = places.on_filesystem([url], filesystem)
    except ValueError:
        logger.info("The metadata go to %s as the URL says: a %s does not tell its options.", url, type(filesystem))
        return url, options
    return urls[0], {**(own_options or {}), **(options or {})}


def classic_context(spark: Any) -> Any:
    """The context of a classic session; None on Spark Connect."""
    try:
        return spark.sparkContext
    except (AttributeError, NotImplementedError):
        return None


def hadoop_configuration(context: Any) -> Any:
    """The JVM's Hadoop configuration.

    Reaches into: pyspark.SparkContext._jsc (pyspark 3.5 to 4.2).
    Without it: row groups have the size that the session's own settings give.
    """
    java_context = getattr(context, "_jsc", None)
    return None if java_context is None else java_context.hadoopConfiguration()


@contextlib.contextmanager
def _job_settings(spark: Any, row_group_size_mb: int | None, use_summary_metadata: bool) -> Iterator[None]:
    """Set what the job's writer of Parquet looks at, for a while."""
    wanted = {
        _LEVEL: "ALL" if use_summary_metadata else "NONE",
        "parquet.summary.metadata.propagate-errors": "true",
        # The writer looks at its size after so many rows: rows may be large.
        "parquet.block.size.row.check.min": "3",
        "parquet.row-group.size.row.check.min": "3",
    }
    if row_group_size_mb:
        wanted[_BLOCK_BYTES] = str(int(row_group_size_mb * 1024 * 1024))
    context = classic_context(spark)
    configuration = None if context is None else hadoop_configuration(context)
    # Of the whole application, where it can be: rows may be written by another session than this one.
    holder = spark if configuration is None else _Application(context.applicationId, configuration)
    with changed_confs(holder, wanted):
        yield


class _Application:
    """Hadoop's configuration of a Spark application, in the form of a session with confs.

    Two threads may write datasets at once, and the one that ends last must give back what was before both.
    """

    def __init__(self, application_id: str, configuration: Any) -> None:
        self.session_id = f"hadoop {application_id}"
        self.conf = self
        self._configuration = configuration

    def get(self, name: str, default: str | None = None) -> str | None:
        value = self._configuration.get(name)
        return default if value is None else str(value)

    def set(self, name: str, value: str) -> None:
        self._configuration.set(name, value)

    def unset(self, name: str) -> None:
        self._configuration.unset(name)
