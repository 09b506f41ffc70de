"""One version of a Delta table becomes a manifest: its log is read, its rows are not, and nothing is written.

deltalake reads the log; the reader of every other dataset reads the rows. The manifest holds what the log says of a
file (values of partition columns, deleted rows, names of columns in the file), so that ranks, workers and resumed runs
read the same rows whatever happens to the table.

A file whose rows the log counts is not opened beforehand unless it is large: it is read whole, like a row group.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from converter.errors import SourceError
from converter.manifest import Manifest
from converter.places import is_list
from converter.schema import DeclaredShape, Schema
from converter.sources.delta.bounds import wrapped_bounds
from converter.sources.delta.columns import comparable_columns, table_columns
from converter.sources.delta.deletions import deleted_rows
from converter.sources.delta.files import RulesIn, TableFiles, place_files
from converter.sources.delta.log import (
    check_commits,
    check_features,
    copy_of,
    first_replayed,
    open_table,
    read_actions,
    read_log_folder,
)
from converter.sources.parquet.columns import Column
from converter.sources.parquet.fields import choose_columns, plan_fields, statistics_of
from converter.storage.directory import FileInfo, Storage, StorageOptions
from converter.storage.opening import open_storage

logger = logging.getLogger(__name__)


def read_snapshot(
    url: str,
    *,
    version: int | None,
    timestamp: dt.datetime | None,
    columns: Sequence[str] | None,
    float_dtype: str | None,
    shapes: Mapping[str, DeclaredShape],
    standardized: Collection[str] = (),
    storage_options: StorageOptions | None,
    timeout_seconds: float,
    rules_in: RulesIn | None = None,
) -> tuple[Storage, Manifest]:
    """The folder that holds the files of a version, and their manifest.

    Files that `rules_in` rules out are not opened, and their rows are not live.

    Raises:
        SourceError: it is no Delta table, has no such version or no rows, its log is damaged, or it needs a feature
            that is not known here.
        SourceChangedError: a data file, or one of deletion vectors, is gone.
        UnsupportedTypeError: columns have no tensor form; all of them are named.
        ValueError: `columns`, `shapes` or filters name a column that does not exist.
    """
    storage = open_storage(url, storage_options, timeout_seconds)
    log = read_log_folder(storage)
    table = open_table(storage, log, version=version, timestamp=timestamp)
    number = int(table.version())
    described = f"version {number} of the Delta table {storage.url}"
    remedy = (
        f"It belongs to {described}. VACUUM removes files that newer versions no longer use: take a newer version, or "
        f"keep these rows with {copy_of(storage.url, number)} while they are there."
    )
    check_commits(storage, log, number)
    check_features(table, described, storage.url, number)
    actions = read_actions(table, described, storage, log)
    no_rows = SourceError(
        f"{described[0].upper()}{described[1:]} has no rows, so there is nothing to train on. Check the version.",
        path=storage.url,
    )
    if not actions.num_rows:
        raise no_rows
    mapping = str(table.metadata().configuration.get("delta.columnMapping.mode", "none"))
    schema_json = table.schema().to_json()
    wrapped = set() if '"timestamp"' not in schema_json else _wrapped_bounds(storage, log, number)
    every_column = table_columns(json.loads(schema_json), mapping, actions, wrapped)
    counts = Counter(column.name for column in every_column)
    for column in every_column:
        column.is_twice = counts[column.name] > 1
    by_name = {column.name: column for column in every_column}
    try:
        wanted = choose_columns(by_name, columns=columns, shapes=shapes)
    except ValueError as error:
        raise ValueError(f"{error} (in {described})") from None
    _tell_of_times_without_zone(wanted, actions["path"], described)
    root, names = place_files(storage, actions["path"].to_pylist(), described)
    files = TableFiles(root, names, actions, remedy)
    # A declared shape need not be derived from footers.
    has_lists = any(is_list(column.source.arrow_type) and column.name not in shapes for column in wanted)
    if rules_in is not None:
        before = plan_fields(wanted, float_dtype=float_dtype, shapes=shapes, standardized=standardized)
        try:
            files.leave_closed(rules_in, wanted, before)
        except ValueError as error:
            left_out = next((name for name in by_name if f"no column {name!r}" in str(error)), None)
            hint = "" if left_out is None else f" The table has {left_out!r}; add it to columns=…."
            raise ValueError(f"{error}{hint} (in {described})") from None
    files.look_into(wanted, has_lists=has_lists)
    fields = plan_fields(wanted, float_dtype=float_dtype, shapes=shapes, standardized=standardized)
    selection = files.select(deleted_rows(table, storage, log, described=described, version=number, remedy=remedy))
    if rules_in is None and not (files.row_group_rows if selection is None else selection.counts).any():
        raise no_rows
    # With the names, because a copy of the table with commits of its own has the same id.
    content = json.dumps(["delta", str(table.metadata().id), number, names])
    return root, Manifest(
        schema=Schema(tuple(fields)),
        file_names=tuple(names),
        file_bytes=files.num_bytes,
        row_group_file=files.row_group_file,
        row_group_rows=files.row_group_rows,
        row_group_bytes=files.row_group_bytes,
        row_group_index=files.row_group_index,
        fingerprint=hashlib.sha256(content.encode()).hexdigest()[:32],
        num_rows=int(files.row_group_rows.sum()),
        float_dtype=float_dtype or "float64",
        statistics=statistics_of(wanted, fields),
        source_columns={column.name: column.source for column in wanted},
        compared_columns=comparable_columns(every_column),
        selection=selection,
        version=number,
        remedy=remedy,
        formats=files.formats,
    )


def _wrapped_bounds(storage: Storage, log: Mapping[str, FileInfo], version: int) -> set[str] | None:
    """`wrapped_bounds` of whichever checkpoint deltalake has read: it listed the log after we did, and before this."""
    later = read_log_folder(storage)
    return wrapped_bounds(storage, {**log, **later}, range(max(0, first_replayed(log, version) - 1), version + 1))


def _tell_of_times_without_zone(wanted: Sequence[Column], paths: pa.ChunkedArray, described: str) -> None:
    """Log a warning for columns whose values a folder's name shows as Spark wrote them before Delta 3.3.

    They have no zone: Spark takes them for the zone of its session, and deltalake for UTC, in which it writes its own,
    with six digits behind the seconds. Spark leaves zeros at the end out.
    """
    for column in wanted:
        kind = column.source.arrow_type
        if column.source.values is None or not pa.types.is_timestamp(kind) or kind.tz is None:
            continue
        # One with a zone ends with Z.
        without = rf"(^|/){re.escape(column.name)}=[^/.]*[0-9](\.[0-9]{{1,5}})?/"
        if pc.any(pc.match_substring_regex(paths, without)).as_py():
            logger.warning(
                "The times of partition column %r in %s have no zone and are taken for UTC. Spark takes them for the "
                "zone of its session: if they were written in another one, they are wrong here. Leave the column out "
                "with columns=…, or write it anew with Spark.",
                column.name, described,
            )  # fmt: skip


def find_location(spark: Any, name: str) -> str:
    """The folder of a table that Spark's catalog knows.

    Raises:
        SourceError: the catalog has no such Delta table.
    """
    quoted = name if "`" in name else ".".join(f"`{part}`" for part in name.split("."))
    try:
        return str(spark.sql(f"DESCRIBE DETAIL {quoted}").select("location").first()["location"])
    except Exception as error:
        cause = str(error).strip().splitlines() or [type(error).__name__]
        raise SourceError(
            f"Spark's catalog does not say where {name!r} is ({cause[0][:300].rstrip('.')}). Pass the path of the "
            "table."
        ) from error
