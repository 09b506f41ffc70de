"""One version of a Delta table becomes a manifest: its log is read, its rows are not, and nothing is written.

The log is read by deltalake, the rows by the reader of every other dataset. What the log says of a file (the value
of a partition column, which of its rows are deleted, under which names it holds the columns) is in the manifest, so
that ranks, workers and a run that goes on tomorrow read the same rows whatever happens to the table.

A file whose rows the log counts is not opened beforehand unless it is large: it is read as a whole, like a row group.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import datetime as dt
import hashlib
import importlib
import itertools
import json
import math
import posixpath
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import quote, unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from converter.errors import MissingDependencyError, SourceChangedError, SourceError
from converter.manifest import Manifest, SourceColumn
from converter.schema import DeclaredShape, Field, Schema
from converter.selection import Mask, Selection, select_some
from converter.sources.parquet.columns import (
    Column,
    Footer,
    choose_columns,
    count_in,
    count_kinds,
    is_list,
    look_at,
    plan_fields,
    statistics_of,
)
from converter.storage.directory import FileInfo, Storage, StorageOptions, open_storage

_LOG = "_delta_log"
_HINT = "_last_checkpoint"
_LARGE_FILE_BYTES = 32 << 20
"""A file above this is read row group by row group, for which its footer must be read beforehand."""

_SEARCH_SECONDS = 3.0
_MAX_ROWS = 2**36
"""More than a file has: of as many rows masks alone are 64 GB."""

_MANY_VERSIONS = 1_000_000
"""deltalake looks for so many versions in some 40 ms."""

_ABSOLUTE = re.compile(r"/|[A-Za-z][A-Za-z0-9+.-]*:/")
_COMMIT = re.compile(r"[0-9]{20}\.json")
_CHECKPOINT = re.compile(r"[0-9]{20}\.checkpoint\.")
_VECTOR = re.compile(rb'"deletionVector"\s*:\s*\{')
_SIDECARS = "_sidecars"
_TIME_BOUND = re.compile(r"add\.stats_parsed\.(?:min|max)Values\.(.*)")
_MOST_US = 2**63 // 1000
"""What 64 bits hold of nanoseconds: to the year 2262, and back to 1677."""

_TOTALS = re.compile(r"[0-9]{20}\.crc")
_SMALL_COMMIT_BYTES = 128
"""Below this a commit is looked at whether it says anything."""

_MAX_COMPARED_COLUMNS = 4
"""Enough to tell files apart, at 5 µs a file each."""

_NUM_LOOKED_AT = 100
"""Of how many files bounds are counted, to find the columns that tell files apart."""

_COMPARABLE: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_integer, pa.types.is_temporal, pa.types.is_floating, pa.types.is_string, pa.types.is_decimal,
)  # fmt: skip

_CHAR_METADATA = "__CHAR_VARCHAR_TYPE_STRING"
_NUM_SAMPLES, _NUM_LIST_SAMPLES = 4, 100
"""How many footers are read to say how large files are in memory, and to say whether lists have one length."""

_MINUTE_US = 60_000_000
_LAST_ODD_OFFSET_US = 3 * 365 * 86_400_000_000
"""Liberia's clocks were 44 minutes and 30 seconds behind until January 1972, the last with seconds (tz database)."""

_EXACT_DIGITS = 15
"""A decimal of so many digits is the same after it was a double."""

_TYPICAL_RATIO = 3.0
"""How many bytes in memory a byte of a compressed file is, where no file could be looked at."""

_FEATURES = frozenset(
    {"columnMapping", "deletionVectors", "timestampNtz", "typeWidening", "typeWidening-preview", "v2Checkpoint",
     "vacuumProtocolCheck", "variantType", "variantType-preview", "variantShredding", "variantShredding-preview"}
)  # fmt: skip
"""What a reader must know of a table, where it is read rightly. Columns of variants are refused one by one."""

RulesIn: TypeAlias = Callable[[Manifest], Mask]

_PRIMITIVES: dict[str, pa.DataType] = {
    "boolean": pa.bool_(), "byte": pa.int8(), "short": pa.int16(), "integer": pa.int32(), "long": pa.int64(),
    "float": pa.float32(), "double": pa.float64(), "date": pa.date32(), "string": pa.string(), "binary": pa.binary(),
    "timestamp": pa.timestamp("us", "UTC"), "timestamp_ntz": pa.timestamp("us"),
}  # fmt: skip


def read_snapshot(
    url: str,
    *,
    version: int | None,
    timestamp: dt.datetime | None,
    columns: Sequence[str] | None,
    float_dtype: str | None,
    shapes: Mapping[str, DeclaredShape],
    storage_options: StorageOptions | None,
    timeout_seconds: float,
    rules_in: RulesIn | None = None,
) -> tuple[Storage, Manifest]:
    """The folder that holds the files of a version, and what they are.

    `rules_in` says of a manifest's files whether a row of them may be wanted; where not, they are not opened, and their
    rows are not live.

    Raises:
        SourceError: it is no Delta table, has no such version or no rows, its log is damaged, or it needs what cannot
            be read rightly.
        SourceChangedError: a data file, or one of deletion vectors, is gone.
        UnsupportedTypeError: columns have no tensor form; all of them are named.
        ValueError: `columns`, `shapes` or filters name a column that does not exist.
    """
    storage = open_storage(url, storage_options, timeout_seconds)
    log = _read_log_folder(storage)
    table = _open(storage, log, version=version, timestamp=timestamp)
    version = int(table.version())
    said = f"version {version} of the Delta table {storage.url}"
    remedy = (
        f"It belongs to {said}. VACUUM removes files that newer versions no longer use: take a newer version, or keep "
        f"these rows with {_copy_of(storage.url, version)} while they are there."
    )
    _check_commits(storage, log, version)
    _check_features(table, said, storage.url, version)
    actions = _actions(table, said, storage, log)
    no_rows = SourceError(
        f"{said[0].upper()}{said[1:]} has no rows, so there is nothing to train on.", path=storage.url
    )
    if not actions.num_rows:
        raise no_rows
    mapping = str(table.metadata().configuration.get("delta.columnMapping.mode", "none"))
    described = table.schema().to_json()
    wrapped = _wrapped_bounds(storage, log, version) if '"timestamp"' in described else set()
    columns_of = _columns(json.loads(described), mapping, actions, wrapped)
    counts = Counter(column.name for column in columns_of)
    for column in columns_of:
        column.is_twice = counts[column.name] > 1
    known = {column.name: column for column in columns_of}
    try:
        wanted = choose_columns(known, columns=columns, shapes=shapes)
    except ValueError as error:
        raise ValueError(f"{error} (in {said})") from None
    root, names = _place_files(storage, actions["path"].to_pylist(), said)
    files = _Files(root, names, actions, remedy)
    # A declared shape need not be found out.
    has_lists = any(is_list(column.source.arrow_type) and column.name not in shapes for column in wanted)
    if rules_in is not None:
        before = plan_fields(wanted, float_dtype=float_dtype, shapes=shapes)
        try:
            files.leave_closed(rules_in, wanted, before)
        except ValueError as error:
            left_out = next((name for name in known if f"no column {name!r}" in str(error)), None)
            more = "" if left_out is None else f" The table has {left_out!r}; add it to columns=…."
            raise ValueError(f"{error}{more} (in {said})") from None
    files.look_into(wanted, has_lists=has_lists)
    fields = plan_fields(wanted, float_dtype=float_dtype, shapes=shapes)
    selection = files.select(_deleted(table, storage, log, said=said, version=version, remedy=remedy))
    if rules_in is None and not (files.row_group_rows if selection is None else selection.counts).any():
        raise no_rows
    # With the names, because a copy of a table that went its own way has the same id.
    content = json.dumps(["delta", str(table.metadata().id), version, names])
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
        compared_columns=_comparable_columns(columns_of),
        selection=selection,
        version=version,
        remedy=remedy,
    )


def find_location(spark: Any, name: str) -> str:
    """Where a table of a catalog stands.

    Raises:
        SourceError: the catalog has no such Delta table.
    """
    quoted = name if "`" in name else ".".join(f"`{part}`" for part in name.split("."))
    try:
        return str(spark.sql(f"DESCRIBE DETAIL {quoted}").select("location").first()["location"])
    except Exception as error:
        cause = str(error).strip().splitlines() or [type(error).__name__]
        raise SourceError(f"Spark's catalog does not say where {name!r} is: {cause[0][:300]}") from error


def _copy_of(url: str, version: int) -> str:
    return f"make_spark_converter(spark.read.format('delta').option('versionAsOf', {version}).load({url!r}))"


# --- The log ----------------------------------------------------------------------------------------------------------


def _read_log_folder(storage: Storage) -> Mapping[str, FileInfo]:
    """What stands in the folder of the log, by name."""
    path = storage.path()
    if unquote(path) != path:
        # Where there is a folder of the decoded name its rows would come.
        raise SourceError(
            f"{storage.url} has a percent sign in its path that deltalake takes for an encoded sign: it would look "
            f"into {unquote(path)}. Rename the folder, or convert a DataFrame of the table with make_spark_converter.",
            path=storage.url,
        )
    if not any(info.name == _LOG and storage.leads_to_folder(info) for info in storage.list()):
        if not storage.exists:
            raise SourceError(f"{storage.url} does not exist.", path=storage.url)
        raise SourceError(
            f"{storage.url} is no Delta table: it holds no folder {_LOG}. For Parquet files say "
            "make_parquet_converter(…).",
            path=storage.url,
        )
    return {info.name: info for info in storage.below(_LOG).list()}


def _first_replayed(log: Mapping[str, FileInfo], version: int) -> int:
    """The version behind the last checkpoint: from there on commits are read."""
    return 1 + max(
        (int(name[:20]) for name in log if _CHECKPOINT.match(name) and int(name[:20]) <= version), default=-1
    )


def _check_commits(storage: Storage, log: Mapping[str, FileInfo], version: int) -> None:
    """Refuse a log in which a commit between the last checkpoint and this version says nothing."""
    first = _first_replayed(log, version)
    for name, info in log.items():
        if (
            not _COMMIT.fullmatch(name)
            or info.num_bytes >= _SMALL_COMMIT_BYTES
            or not first <= int(name[:20]) <= version
        ):
            continue
        if not storage.below(_LOG).read(name).strip(b" \t\r\n{}"):
            # Its rows would silently be missing.
            raise SourceError(
                f"{storage.url}/{_LOG}/{name} holds no action: the commit of a version was cut. Restore it from a "
                "copy.",
                path=f"{storage.url}/{_LOG}/{name}",
            )


def _open(storage: Storage, log: Mapping[str, FileInfo], *, version: int | None, timestamp: dt.datetime | None) -> Any:
    try:
        deltalake = importlib.import_module("deltalake")
    except ImportError as error:
        raise MissingDependencyError(
            "Reading a Delta table needs deltalake: pip install 'spark-tensor-converter[delta]'."
        ) from error

    def load(version: int | None) -> Any:
        place, options = storage.delta_place()
        return deltalake.DeltaTable(place, version=version, storage_options=options)

    def opened() -> Any:
        # What went wrong is said of the version that the time stands for.
        nonlocal version
        if timestamp is not None:
            version = _version_of(storage, log, timestamp, load(None).metadata().configuration)
        # deltalake counts up to the version that is asked for, beyond the newest as well.
        if version is not None and version > _MANY_VERSIONS and version > load(None).version():
            raise LookupError("there is no such version")
        return load(version)

    try:
        return storage.wait_for(opened)
    except SourceError:
        raise
    except TimeoutError as error:
        raise SourceError(f"The Delta table {storage.url} cannot be opened: {error}.", path=storage.url) from error
    except Exception as error:  # noqa: BLE001 (deltalake has errors of several kinds for one cause)
        asked = "" if version is None else f" at version {version}"
        known = ""
        if asked:
            # What there is instead, if that can be found.
            with contextlib.suppress(Exception):
                latest = storage.wait_for(lambda: load(None).version())
                known = f" Its latest version is {latest}; of old ones the log may have been cleaned up."
        raise SourceError(
            f"The Delta table {storage.url} cannot be opened{asked}: {_cause(storage, error)}."
            f"{_damaged_in(storage, log, version)}{_lost_hint(error)}{known} What deltalake "
            "cannot open Spark may: convert a DataFrame of it with make_spark_converter.",
            path=storage.url,
        ) from storage.harmless(error)


def _lost_hint(error: Exception) -> str:
    """What to say where the log's hint names a checkpoint that is not there, as part of a message."""
    # Its name alone stands in every error of asking for it, also where it may not be read.
    if f"{_HINT} hint" not in str(error):
        return ""
    return (
        f" {_LOG}/{_HINT} names a checkpoint that is gone or not whole. It is no more than a hint: where all commits "
        "are there, the table can be opened once that file is removed."
    )


def _damaged_in(storage: Storage, log: Mapping[str, FileInfo], version: int | None) -> str:
    """Which files that make a version are none that can be read, as part of a message; deltalake does not name them."""
    newest = max((int(name[:20]) for name in log if _COMMIT.fullmatch(name)), default=-1)
    version = newest if version is None else version
    first, folder, found = _first_replayed(log, version), storage.below(_LOG), []
    # The newest first, which are the likeliest to be cut; it is a message only, and not waited for long.
    deadline = time.monotonic() + _SEARCH_SECONDS
    for name in sorted(log, reverse=True) if version <= newest else ():
        is_commit = _COMMIT.fullmatch(name) is not None and first <= int(name[:20]) <= version
        if not is_commit and not (_CHECKPOINT.match(name) and int(name[:20]) == first - 1):
            continue
        if time.monotonic() > deadline:
            break
        try:
            content = folder.read(name)
        except Exception:  # noqa: BLE001 (the store has been said to be at fault already)
            break
        try:
            if name.endswith(".json"):
                said = [json.loads(line) for line in content.splitlines() if line.strip()]
                is_log = all(isinstance(one, dict) and all(isinstance(x, dict) for x in one.values()) for one in said)
            else:
                is_log = pq.ParquetFile(pa.BufferReader(content)).metadata is not None
        except Exception:  # noqa: BLE001 (whatever it is: it cannot be read)
            is_log = False
        if not is_log:
            found.append(name)
    return f" Damaged: {', '.join(f'{_LOG}/{name}' for name in reversed(found))}." if found else ""


def _version_of(
    storage: Storage, log: Mapping[str, FileInfo], timestamp: dt.datetime, configuration: Mapping[str, str]
) -> int:
    """The last version of a time or before, as Spark counts time.

    A commit's time stands in it where the table says so, from a version on; else it is that of its file, which never
    goes back. (deltalake takes the file's always.)
    """
    # In milliseconds; a file's finer time is cut, not rounded.
    commits = {
        int(name.removesuffix(".json")): math.floor(info.modified * 1000 + 1e-3)
        for name, info in log.items()
        if _COMMIT.fullmatch(name)
    }
    versions = sorted(commits)
    if not versions:
        raise SourceError(f"The log of {storage.url} holds no commit whose time could be told.", path=storage.url)
    wanted = math.floor(timestamp.timestamp() * 1000 + 1e-3)
    first_within = len(versions)
    if configuration.get("delta.enableInCommitTimestamps") == "true":
        enabled = int(configuration.get("delta.inCommitTimestampEnablementVersion") or 0)
        first_within = bisect.bisect_left(versions, enabled)
    before = [commits[one] for one in versions[:first_within]]
    times = list(itertools.accumulate(before, lambda last, time: max(last + 1, time)))

    def time_within(place: int) -> int:
        head = storage.below(_LOG).read(f"{versions[place]:020}.json").split(b"\n", 1)[0]
        return int(json.loads(head)["commitInfo"]["inCommitTimestamp"])

    # The times within commits only rise, so that a few of them tell.
    low, high = first_within, len(versions)
    while low < high:
        middle = (low + high) // 2
        if time_within(middle) <= wanted:
            low = middle + 1
        else:
            high = middle
    found = low - 1 if low > first_within else bisect.bisect_right(times, wanted) - 1
    if found < 0:
        began = dt.datetime.fromtimestamp((times[0] if times else time_within(0)) / 1000, dt.timezone.utc)
        raise SourceError(
            f"The Delta table {storage.url} has no version of {timestamp.isoformat()}: its log begins with version "
            f"{versions[0]} at {began.isoformat()}.",
            path=storage.url,
        )
    return versions[found]


def _cause(storage: Storage, error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return storage.without_secrets(lines[0].strip().rstrip(".")[:300])


def _check_features(table: Any, said: str, url: str, version: int) -> None:
    protocol = table.protocol()
    unknown = sorted(set(protocol.reader_features or ()) - _FEATURES)
    if unknown or protocol.min_reader_version > 3:
        needs = ", ".join(unknown) or f"reader version {protocol.min_reader_version}"
        raise SourceError(
            f"{said[0].upper()}{said[1:]} needs what this package does not know how to read: {needs}. Convert a "
            f"DataFrame of it: {_copy_of(url, version)}.",
            path=url,
        )


def _actions(table: Any, said: str, storage: Storage, log: Mapping[str, FileInfo]) -> pa.Table:
    """The files with rows, in the order of their names, so that each who opens the version has the same order."""
    try:
        actions = storage.wait_for(lambda: pa.table(table.get_add_actions(flatten=True)))
    except Exception as error:  # noqa: BLE001 (deltalake has errors of several kinds for one cause)
        raise SourceError(
            f"The log of {said} cannot be read: {_cause(storage, error)}.{_damaged_in(storage, log, table.version())}",
            path=storage.url,
        ) from storage.harmless(error)
    _check_totals(actions, said, storage, log, int(table.version()))
    actions = actions.sort_by("path")
    counts = actions["num_records"]
    # What no file holds is no count; the footer says it then.
    is_likely = pc.and_(pc.greater_equal(counts, 0), pc.less(counts, _MAX_ROWS))
    place = actions.column_names.index("num_records")
    actions = actions.set_column(place, "num_records", pc.if_else(is_likely, counts, None))
    # A count that is not there is not a count of none.
    return actions.filter(pc.fill_null(pc.not_equal(actions["num_records"], 0), True)).combine_chunks()


def _check_totals(actions: pa.Table, said: str, storage: Storage, log: Mapping[str, FileInfo], version: int) -> None:
    """Compare with what Spark noted beside a commit, if it did: a log that lost a line is a log all the same.

    Other writers note nothing; then the newest version before theirs that Spark wrote is compared.
    """
    noted_at = max(
        (int(name[:20]) for name in log if _TOTALS.fullmatch(name) and int(name[:20]) <= version), default=-1
    )
    if noted_at < min(version, _first_replayed(log, version)):
        return
    name = f"{noted_at:020}.crc"
    try:
        noted = json.loads(storage.below(_LOG).read(name))
        expected = int(noted["numFiles"]), int(noted["tableSizeBytes"])
        if noted_at < version:
            said += f" (as of version {noted_at})"
            older = _open(storage, log, version=noted_at, timestamp=None)
            actions = storage.wait_for(lambda: pa.table(older.get_add_actions(flatten=True)))
    except Exception:  # noqa: BLE001 (nobody needs it; Spark does without, too)
        return
    found = actions.num_rows, int(pc.sum(actions["size_bytes"]).as_py() or 0)
    if found != expected:
        raise SourceError(
            f"The log of {said} is damaged: its commits name {found[0]:,} files of {found[1]:,} bytes, and "
            f"{_LOG}/{name} says {expected[0]:,} of {expected[1]:,}. Restore the log from a copy.",
            path=f"{storage.url}/{_LOG}/{name}",
        )


def _wrapped_bounds(storage: Storage, log: Mapping[str, FileInfo], version: int) -> set[str] | None:
    """The columns of which deltalake's bounds are others than the checkpoint's; None: it cannot be read.

    Spark writes bounds of times there as INT96, which deltalake reads as nanoseconds: the year 9999 becomes 1816.
    """
    newest = _first_replayed(log, version) - 1
    names = [name for name in log if _CHECKPOINT.match(name) and int(name[:20]) == newest]
    folder = storage.below(_LOG)
    found: set[str] = set()
    try:
        for name in names:
            if name.endswith(".json"):
                lines = [json.loads(line) for line in folder.read(name).splitlines() if line.strip()]
                sidecars = [line["sidecar"]["path"] for line in lines if line.get("sidecar")]
            else:
                sidecars = _look_for_wrapped(folder, name, found)
            for one in sidecars:
                _look_for_wrapped(folder.below(_SIDECARS), posixpath.basename(unquote(one)), found)
    except Exception:  # noqa: BLE001 (then nothing is known of them; whether it can be read is deltalake's to say)
        return None
    return found


def _look_for_wrapped(folder: Storage, name: str, found: set[str]) -> list[str]:
    """Add the columns whose bounds of times 64 bits do not hold; the other files that a checkpoint names."""
    with contextlib.closing(folder.open_parquet(name)) as source:
        checkpoint = pq.ParquetFile(source, coerce_int96_timestamp_unit="us")
        leaves = [checkpoint.schema.column(place) for place in range(len(checkpoint.schema))]
        times = [one.path for one in leaves if one.physical_type == "INT96" and _TIME_BOUND.fullmatch(one.path)]
        for path, values in _leaves_of(checkpoint.read(columns=times)) if times else ():
            micros = pc.abs(pc.cast(values, pa.int64()))
            known = _TIME_BOUND.fullmatch(path)
            if known and (pc.max(micros).as_py() or 0) >= _MOST_US:
                found.add(known[1])
        if "sidecar" not in checkpoint.schema_arrow.names:
            return []
        sidecars = checkpoint.read(columns=["sidecar.path"])["sidecar"]
        return [one["path"] for one in pc.drop_null(sidecars).to_pylist() if one["path"] is not None]


def _leaves_of(table: pa.Table) -> Iterator[tuple[str, pa.ChunkedArray]]:
    """The columns with the members of structs in the struct's place."""
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_struct(column.type):
            members = {field.name: pc.struct_field(column, place) for place, field in enumerate(column.type)}
            yield from ((f"{name}.{below}", values) for below, values in _leaves_of(pa.table(members)))
        else:
            yield name, column


def _columns(
    schema: Mapping[str, Any], mapping: str, actions: pa.Table, wrapped: Collection[str] | None
) -> list[Column]:
    """The columns with the members of structs in the struct's place; bounds in `wrapped` (None: all) are not known."""
    found: list[Column] = []
    num_files = actions.num_rows

    def add(one: Mapping[str, Any], above: tuple[str, ...], path: tuple[str, ...], ids: tuple[int, ...]) -> None:
        metadata = one.get("metadata") or {}
        names = (*above, str(one["name"]))
        path = (
            *path,
            str(metadata.get("delta.columnMapping.physicalName", one["name"]) if mapping != "none" else one["name"]),
        )
        if mapping == "id":
            ids = (*ids, int(metadata["delta.columnMapping.id"]))
        kind = one["type"]
        if isinstance(kind, Mapping) and kind["type"] == "struct":
            for member in kind["fields"]:
                add(member, names, path, ids)
            return
        written = str(metadata.get(_CHAR_METADATA, kind))
        # Spark fills up with blanks while it reads.
        is_padded = written.startswith("char(")
        name, arrow_type = ".".join(names), pa.null() if is_padded else _arrow_type(kind)
        partition = f"partition.{name}"
        if not above and partition in actions.column_names:
            values = pc.cast(_array(actions, partition), arrow_type)
            source = SourceColumn(arrow_type=arrow_type, values=values.dictionary_encode())
            found.append(Column(name=name, source=source, null_count=1 if values.null_count else 0, num_bytes=0))
            return
        key = ".".join(path)
        nulls = _array(actions, f"null_count.{key}")
        # Its bounds were written as floats are, 0.1 say, which a double is not.
        is_unknown = any(change.get("fromType") == "float" for change in metadata.get("delta.typeChanges") or ())
        is_unknown |= kind == "timestamp" and (wrapped is None or key in wrapped)
        source = SourceColumn(
            arrow_type=arrow_type,
            path=path,
            field_ids=ids,
            ignores_case=True,
            least=None if is_unknown else _bound(actions, f"min.{key}", arrow_type),
            most=None if is_unknown else _bound(actions, f"max.{key}", arrow_type),
            null_counts=nulls,
        )
        is_counted = nulls is not None and not nulls.null_count
        null_count = int(pc.sum(nulls).as_py() or 0) if is_counted and num_files else None
        found.append(
            Column(
                name=name, source=source, null_count=null_count, type_name=written if is_padded else _type_name(kind)
            )
        )

    for one in schema["fields"]:
        add(one, (), (), ())
    return found


def _comparable_columns(columns: Sequence[Column]) -> dict[str, SourceColumn]:
    """The columns whose bounds, which the log knows, tell files apart best, whether they are wanted or not."""
    found: list[tuple[int, Column]] = []
    for is_kind in _COMPARABLE:
        for column in columns:
            bounds = [one for one in (column.source.least, column.source.most) if one is not None]
            if len(bounds) == 2 and is_kind(column.source.arrow_type):
                some = _spread(np.arange(len(bounds[0])), _NUM_LOOKED_AT)
                found.append((sum(pc.count_distinct(one.take(some)).as_py() for one in bounds), column))
    found.sort(key=lambda one: -one[0])
    return {column.name: column.source for _, column in found[:_MAX_COMPARED_COLUMNS]}


def _arrow_type(kind: Any) -> pa.DataType:
    """The type in Arrow; that of nulls where there is no tensor form."""
    if isinstance(kind, Mapping):
        if kind["type"] == "array" and not isinstance(kind["elementType"], Mapping):
            return pa.list_(_arrow_type(kind["elementType"]))
        if kind["type"] == "array" and kind["elementType"]["type"] == "array":
            return pa.list_(_arrow_type(kind["elementType"]))
        return pa.null()
    if kind.startswith("decimal("):
        precision, scale = kind.removeprefix("decimal(").removesuffix(")").split(",")
        return pa.decimal128(int(precision), int(scale))
    return _PRIMITIVES.get(kind, pa.null())


def _type_name(kind: Any) -> str:
    return str(kind["type"]) if isinstance(kind, Mapping) else str(kind)


def _array(actions: pa.Table, name: str) -> Any:
    """A column of the log's statistics, or None."""
    if actions.column_names.count(name) != 1:
        return None
    column = actions[name]
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _bound(actions: pa.Table, name: str, arrow_type: pa.DataType) -> Any:
    """For each file a bound of its values, or None; times are cut to milliseconds there."""
    found = _array(actions, name)
    if found is None:
        return None
    try:
        found = pc.cast(found, arrow_type)
    except pa.ArrowException:
        # Of before the column's type was widened.
        return None
    if pa.types.is_floating(arrow_type):
        # NaN is taken for the largest number.
        return pc.if_else(pc.is_finite(found), found, None)
    if pa.types.is_decimal(arrow_type) and arrow_type.precision > _EXACT_DIGITS:
        # deltalake writes them as doubles, so that a bound may lie within the values.
        number = pc.cast(found, pa.float64())
        if arrow_type.scale == 0:
            # Of what 64 bits do not hold it writes the largest number that they do.
            number = pc.if_else(pc.less(pc.abs(number), 0.999 * 2.0**63), number, None)
        slack = pc.add(pc.multiply(pc.abs(number), 2.0**-50), 10.0**-arrow_type.scale)
        moved = pc.subtract(number, slack) if name.startswith("min.") else pc.add(number, slack)
        with contextlib.suppress(pa.ArrowException):
            return pc.cast(moved, arrow_type)
        return None
    if pa.types.is_timestamp(arrow_type):
        micros, is_least = pc.cast(found, pa.int64()), name.startswith("min.")
        if arrow_type.tz is not None:
            # Some writers cut the seconds off the offset of a zone, which had some before its clocks were agreed on.
            slack = pc.if_else(pc.less(micros, _LAST_ODD_OFFSET_US), -_MINUTE_US if is_least else _MINUTE_US, 0)
            micros = pc.add(micros, slack)
        return pc.cast(micros if is_least else pc.add(micros, 999), arrow_type)
    return found


def _deleted(
    table: Any, storage: Storage, log: Mapping[str, FileInfo], *, said: str, version: int, remedy: str
) -> dict[str, Mask]:
    """For each file with deleted rows, by its full path, which of them are left."""
    if "deletionVectors" not in (table.protocol().reader_features or ()):
        return {}
    try:
        found: dict[str, Mask] = {}
        for batch in storage.wait_for(lambda: list(pa.RecordBatchReader.from_stream(table.deletion_vectors()))):
            for path, kept in zip(batch.column("filepath").to_pylist(), batch.column("selection_vector"), strict=True):
                # By its path in the store, by which it is the same file however it was named.
                found[(storage.path_of(path) or path).strip("/")] = np.asarray(
                    kept.values.to_numpy(zero_copy_only=False), np.bool_
                )
    except Exception as error:  # noqa: BLE001 (deltalake has errors of several kinds for one cause)
        if "TypeWidening" in str(error) and _has_no_vectors(storage, log, version):
            # deltalake refuses all tables that allow it.
            return {}
        if "not found" in str(error).lower() and not storage.is_local and quote(storage.path()) != storage.path():
            raise SourceError(
                f"Which rows are deleted in {said} (deletion vectors) cannot be read: deltalake encodes the signs in "
                "its path that are no letters and digits twice where it looks for deletion vectors. Rename the folder, "
                f"or convert a DataFrame of it: {_copy_of(storage.url, version)}.",
                path=storage.url,
            ) from storage.harmless(error)
        if "not found" in str(error).lower():
            # VACUUM removes them as it does data files, also where newer versions go on with the data file.
            raise SourceChangedError(
                f"Which rows are deleted in {said} (deletion vectors) cannot be read: {_cause(storage, error)}. "
                f"{remedy}",
                path=storage.url,
            ) from storage.harmless(error)
        raise SourceError(
            f"Which rows are deleted in {said} (deletion vectors) cannot be read: {_cause(storage, error)}. Convert a "
            f"DataFrame of it: {_copy_of(storage.url, version)}.",
            path=storage.url,
        ) from storage.harmless(error)
    _check_deleted(sum(int(np.count_nonzero(~kept)) for kept in found.values()), storage, log, said, version)
    return found


def _check_deleted(count: int, storage: Storage, log: Mapping[str, FileInfo], said: str, version: int) -> None:
    """Compare with what Spark noted beside the commit, if it did: a vector of another version is whole as well."""
    name = f"{version:020}.crc"
    noted = None
    if name in log:
        with contextlib.suppress(Exception):
            noted = json.loads(storage.below(_LOG).read(name)).get("numDeletedRecordsOpt")
    if isinstance(noted, int) and noted != count:
        raise SourceError(
            f"{count:,} rows are deleted in {said} by its deletion vectors, and {noted:,} by {_LOG}/{name}: a file is "
            "another one than it was. Restore the table from a copy.",
            path=storage.url,
        )


def _has_no_vectors(storage: Storage, log: Mapping[str, FileInfo], version: int) -> bool:
    """Whether certainly no file of a version has deleted rows: no commit names any, and no checkpoint may."""
    commits = [name for name in log if _COMMIT.fullmatch(name) and int(name[:20]) <= version]
    is_whole = _first_replayed(log, version) == 0 and len(commits) == version + 1
    return is_whole and not any(_VECTOR.search(storage.below(_LOG).read(name)) for name in commits)


# --- The files --------------------------------------------------------------------------------------------------------


def _place_files(storage: Storage, paths: Sequence[str], said: str) -> tuple[Storage, list[str]]:
    """The folder above all of the files, and their names below it; a shallow clone names files of another table."""
    if not any(_ABSOLUTE.match(path) for path in paths):
        return storage, [unquote(path) for path in paths]
    full = []
    for path in paths:
        found = storage.path_of(path) if _ABSOLUTE.match(path) else posixpath.join(storage.path(), unquote(path))
        if found is None:
            raise SourceError(f"{said[0].upper()}{said[1:]} has files on another store: {path}.", path=storage.url)
        full.append(found)
    common = posixpath.commonpath([posixpath.dirname(path) for path in full])
    return storage.at(common), [posixpath.relpath(path, common) for path in full]


def _spread(numbers: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """At most so many of these, from the first to the last."""
    return numbers[np.linspace(0, len(numbers) - 1, min(len(numbers), count)).astype(np.int64)]


class _Files:
    """The files of a version as row groups: whole where they are small, else as their footers cut them."""

    def __init__(self, root: Storage, names: Sequence[str], actions: pa.Table, remedy: str) -> None:
        self.root, self.names, self.remedy = root, names, remedy
        self.num_bytes = actions["size_bytes"].to_numpy().astype(np.int64)
        counts = actions["num_records"].to_numpy(zero_copy_only=False)
        self.is_whole: Mask = ~np.isnan(counts.astype(np.float64)) & (self.num_bytes <= _LARGE_FILE_BYTES)
        self.is_closed: Mask = np.zeros(len(names), np.bool_)
        self.num_records = np.nan_to_num(counts.astype(np.float64)).astype(np.int64)
        self.row_group_file: npt.NDArray[np.int64]
        self.row_group_rows: npt.NDArray[np.int64]
        self.row_group_bytes: npt.NDArray[np.int64]
        self.row_group_index: npt.NDArray[np.int64]

    def leave_closed(self, rules_in: RulesIn, columns: Sequence[Column], fields: Sequence[Field]) -> None:
        """Note which files hold no row that may be wanted; what their rows are counts, so that the log must say it."""
        every = np.arange(len(self.names), dtype=np.int64)
        unopened = Manifest(
            schema=Schema(tuple(fields)),
            file_names=tuple(self.names),
            file_bytes=self.num_bytes,
            row_group_file=every,
            row_group_rows=self.num_records,
            row_group_bytes=self.num_bytes,
            fingerprint="",
            num_rows=int(self.num_records.sum()),
            float_dtype="float64",
            statistics=statistics_of(columns, fields),
            source_columns={column.name: column.source for column in columns},
        )
        self.is_closed = ~rules_in(unopened) & (self.num_records > 0)
        self.is_whole |= self.is_closed

    def look_into(self, columns: Sequence[Column], *, has_lists: bool) -> None:
        """Read the footers of large files, and of a few others that tell what all are like."""
        files = np.arange(len(self.names))
        small = files[self.is_whole]
        opened = files[self.is_whole & ~self.is_closed]
        few = _spread(opened, _NUM_SAMPLES)
        samples = np.union1d(few, _spread(opened, _NUM_LIST_SAMPLES)) if has_lists else few
        large = files[~self.is_whole]
        footers = dict(zip([*large.tolist(), *samples.tolist()], self._read([*large, *samples]), strict=True))
        self._tell(columns, list(footers.values()))
        # Of the same files whatever columns were chosen: sizes in memory make the windows of a shuffle.
        sampled = [footers[number] for number in few.tolist()]
        in_files = sum(footer.num_bytes for footer in sampled)
        ratio = sum(int(footer.row_group_bytes.sum()) for footer in sampled) / in_files if in_files else _TYPICAL_RATIO
        parts = []
        for number in large.tolist():
            footer = footers[number]
            of_file = np.full(len(footer.row_group_rows), number)
            parts.append((of_file, footer.row_group_rows, footer.row_group_bytes, np.arange(len(of_file))))
        whole_bytes = (self.num_bytes[self.is_whole] * ratio).astype(np.int64)
        parts.append((small, self.num_records[self.is_whole], whole_bytes, np.full(len(small), -1)))
        of_file, rows, num_bytes, index = (np.concatenate(one).astype(np.int64) for one in zip(*parts, strict=True))
        order = np.argsort(of_file, kind="stable")
        order = order[rows[order] > 0]
        self.row_group_file, self.row_group_rows = of_file[order], rows[order]
        self.row_group_bytes, self.row_group_index = num_bytes[order], index[order]

    def _read(self, numbers: Sequence[int]) -> list[Footer]:
        try:
            found = look_at(self.root, [self.names[number] for number in numbers])
        except SourceError as error:
            if error.__cause__ is None or isinstance(error.__cause__, (PermissionError, TimeoutError)):
                # It is as it was, but cannot be read.
                raise
            raise SourceChangedError(f"{error} {self.remedy}", path=error.path) from error
        for number, footer in zip(numbers, found, strict=True):
            if footer.num_bytes != self.num_bytes[number]:
                path = f"{self.root.url}/{footer.name}"
                raise SourceChangedError(
                    f"{path} has {footer.num_bytes} bytes, and {self.num_bytes[number]} by the log. {self.remedy}",
                    path=path,
                )
        return found

    @staticmethod
    def _tell(columns: Sequence[Column], footers: Sequence[Footer]) -> None:
        """How long lists are; what the log counted stays as it is."""
        counts = count_kinds(footers)
        for column in columns:
            if column.source.values is None:
                seen = dataclasses.replace(column)
                count_in(seen, counts)
                column.lengths, column.has_null_elements = seen.lengths, seen.has_null_elements

    def select(self, left: Mapping[str, Mask]) -> Selection | None:
        """The live rows, where some are deleted or not wanted. What a mask does not reach is live."""
        is_closed = self.is_closed[self.row_group_file]
        if not left and not is_closed.any():
            return None
        masks: dict[int, Mask] = {}
        folder = self.root.path().rstrip("/")
        names = enumerate(self.names) if left else ()
        numbers = {f"{folder}/{name}".strip("/"): number for number, name in names}
        for path, kept in left.items():
            number = numbers[path]
            first, behind = np.searchsorted(self.row_group_file, [number, number + 1])
            start = 0
            for group in range(first, behind):
                num_rows = int(self.row_group_rows[group])
                if not is_closed[group]:
                    mask = np.ones(num_rows, np.bool_)
                    part = kept[start : start + num_rows]
                    mask[: len(part)] = part
                    masks[group] = mask
                start += num_rows
        return select_some(np.where(is_closed, 0, self.row_group_rows), masks)
