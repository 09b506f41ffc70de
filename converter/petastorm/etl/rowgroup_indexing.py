"""Builds indexes of row groups, keeps them beside a store's files, and reads them."""

from __future__ import annotations

import copy
import functools
import operator
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from converter.petastorm import stored_schema, summary
from converter.petastorm.etl import RowGroupIndexerBase
from converter.petastorm.etl.dataset_metadata import metadata_of, place_of
from converter.petastorm.etl.rowgroup_indexers import FieldNotNullIndexer, SingleFieldIndexer
from converter.petastorm.pickle_records import PetastormMetadataError
from converter.petastorm.places import note_driver
from converter.petastorm.row_groups import partition_value
from converter.petastorm.store import RowGroup, Store, open_store
from converter.petastorm.stored_schema import ROWGROUPS_INDEX_KEY
from converter.petastorm.unischema import Unischema, decode_column
from converter.storage.at_once import at_once

__all__ = ["ROWGROUPS_INDEX_KEY", "build_rowgroup_index", "get_row_group_indexes"]

_THREADS = 8


def build_rowgroup_index(
    dataset_url: str,
    spark_context: Any,
    indexers: Sequence[RowGroupIndexerBase],
    hdfs_driver: str = "libhdfs3",
) -> None:
    """Index columns of a store, and keep the indexes beside its files. Indexes that are there already are replaced.

    The columns are read in this process, without a Spark job. `spark_context` tells where `hdfs:///` is, and may be
    None.

    Raises:
        TypeError: an indexer is none of this package: no other one could be read again.
        ValueError: an indexer names a column that the store lacks, or two have one name.
        PetastormMetadataError: the store has no schema.
    """
    note_driver(hdfs_driver)
    for indexer in indexers:
        if type(indexer) not in (SingleFieldIndexer, FieldNotNullIndexer):
            raise TypeError(
                f"An index by {type(indexer).__name__} cannot be stored: only SingleFieldIndexer and "
                "FieldNotNullIndexer can be read again, as code in a store is never run."
            )
    if len({indexer.index_name for indexer in indexers}) < len(indexers):
        raise ValueError("Two indexers have one name. Give each index a name of its own.")
    url, options = place_of(spark_context, dataset_url, None)
    store = open_store([url], storage_options=options)
    schema = store.stored_schema()
    if schema is None:
        raise PetastormMetadataError(
            f"{dataset_url} has no stored schema. Write it with materialize_dataset(…) or petastorm_generate_metadata.",
            path=dataset_url,
        )
    # An indexer may be used for several stores.
    built = _build(store, schema, [copy.deepcopy(indexer) for indexer in indexers])
    found = summary.read_summary(store.storage)
    assert found is not None
    footer, metadata = found
    columns = summary.columns_of(store.storage, footer)
    counts = dict.fromkeys(store.names, 0) | Counter(store.names[one.file] for one in store.row_groups())
    # An index counts row groups file by file: these are its files.
    entries = stored_schema.row_group_entries(counts) | stored_schema.index_entries(built)
    entries[stored_schema.INDEXED_FILES_KEY] = store.digest
    summary.write_summary(store.storage, columns, metadata | entries)


def get_row_group_indexes(dataset: Any) -> dict[str, RowGroupIndexerBase]:
    """The indexes of a dataset (a store of ours, or pyarrow's `ParquetDataset`) by their names.

    Raises:
        ValueError: there are none.
        PetastormMetadataError: they cannot be understood.
    """
    metadata = metadata_of(dataset) or {}
    if ROWGROUPS_INDEX_KEY not in metadata:
        raise ValueError(
            "Row groups index is not available in the dataset metadata file. Build it with build_rowgroup_index(…)."
        )
    return dict(stored_schema.read_indexes(metadata))


def _build(store: Store, schema: Unischema, indexers: list[Any]) -> list[Any]:
    names = list(dict.fromkeys(name for indexer in indexers for name in indexer.column_names))
    if unknown := [name for name in names if name not in schema.fields]:
        raise ValueError(
            f"{store.storage.url} has no column {', '.join(unknown)} to index. It has {', '.join(schema.fields)}."
        )

    def index(numbered: tuple[int, RowGroup]) -> list[Any]:
        number, row_group = numbered
        values = _decoded(store, schema, row_group, names)
        own = copy.deepcopy(indexers)
        for indexer in own:
            indexer.index_values(values[indexer.column_names[0]], number)
        return own

    row_groups = list(enumerate(store.row_groups()))
    indexed = at_once(index, row_groups, threads_count=_THREADS, given_up=threading.Event())
    # In the order of the row groups, so that an index is the same whenever it is built.
    return [functools.reduce(operator.add, parts) for parts in zip(indexers, *indexed, strict=True)]


def _decoded(store: Store, schema: Unischema, row_group: RowGroup, names: Sequence[str]) -> dict[str, Any]:
    """Some columns of a row group, as a reader hands them out."""
    table = store.read(row_group, names)
    columns: dict[str, Any] = {}
    for name in names:
        column = table.column(name)
        if name in store.partition_names:
            # All rows of a file have one value.
            columns[name] = [partition_value(schema, name, text.as_py()) for text in column[:1]]
        else:
            columns[name] = decode_column(schema.fields[name], column)
    return columns
