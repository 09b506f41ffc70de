"""A Delta table's log: which version is meant, whether the log is whole, which files the version has."""

from __future__ import annotations

import bisect
import contextlib
import datetime as dt
import importlib
import itertools
import json
import math
import re
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from converter.errors import MissingDependencyError, SourceError
from converter.storage.directory import FileInfo, Storage

LOG_FOLDER = "_delta_log"
_HINT = "_last_checkpoint"

_SEARCH_SECONDS = 3.0
_MAX_ROWS = 2**36
"""No file has that many rows: their masks alone would be 64 GB."""

_MANY_VERSIONS = 1_000_000
"""deltalake searches that many versions in some 40 ms."""
COMMIT_PATTERN = re.compile(r"[0-9]{20}\.json")
CHECKPOINT_PATTERN = re.compile(r"[0-9]{20}\.checkpoint\.")
_PART = re.compile(r"([0-9]{20})\.checkpoint\.[0-9]{10}\.([0-9]{10})\.parquet")

_TOTALS = re.compile(r"[0-9]{20}\.crc")
_SMALL_COMMIT_BYTES = 128
"""A smaller commit is read to see whether it holds an action."""

_FEATURES = frozenset(
    {"columnMapping", "deletionVectors", "timestampNtz", "typeWidening", "typeWidening-preview", "v2Checkpoint",
     "vacuumProtocolCheck", "variantType", "variantType-preview", "variantShredding", "variantShredding-preview"}
)  # fmt: skip
"""Reader features that are read correctly here. Columns of variants are refused one by one."""


def copy_of(url: str, version: int) -> str:
    """For a message: the call that reads the same version through Spark."""
    return f"make_spark_converter(spark.read.format('delta').option('versionAsOf', {version}).load({url!r}))"


def read_log_folder(storage: Storage) -> Mapping[str, FileInfo]:
    """The files in the folder of the log, by name."""
    path = storage.path()
    if unquote(path) != path:
        # If a folder of the decoded name exists, its rows would be read.
        raise SourceError(
            f"{storage.url} has a percent sign in its path that deltalake takes for an encoded sign: it would "
            f"open {unquote(path)}. Rename the folder, or convert a DataFrame of the table with make_spark_converter.",
            path=storage.url,
        )
    if not any(info.name == LOG_FOLDER and storage.leads_to_folder(info) for info in storage.list()):
        if not storage.exists:
            raise SourceError(
                f"{storage.url} does not exist. Check the path, and that this machine can see it.", path=storage.url
            )
        raise SourceError(
            f"{storage.url} is no Delta table: it holds no folder {LOG_FOLDER}. For Parquet files call "
            "make_parquet_converter(…).",
            path=storage.url,
        )
    return {info.name: info for info in storage.below(LOG_FOLDER).list()}


def checkpoints_of(log: Mapping[str, FileInfo], versions: range) -> dict[int, list[str]]:
    """The checkpoints of some versions, and the files of each. One in parts counts once all of them are there."""
    found: dict[int, list[str]] = {}
    parts: dict[tuple[int, int], list[str]] = {}
    for name in log:
        if not CHECKPOINT_PATTERN.match(name) or int(name[:20]) not in versions:
            continue
        part = _PART.fullmatch(name)
        if part is None:
            found.setdefault(int(name[:20]), []).append(name)
        else:
            parts.setdefault((int(part[1]), int(part[2])), []).append(name)
    for (version, count), names in parts.items():
        if len(names) == count:
            found.setdefault(version, []).extend(names)
    return found


def first_replayed(log: Mapping[str, FileInfo], version: int) -> int:
    """The version after the last checkpoint up to `version`: commits are read from there on."""
    return 1 + max(checkpoints_of(log, range(version + 1)), default=-1)


def check_commits(storage: Storage, log: Mapping[str, FileInfo], version: int) -> None:
    """Refuse a log in which a commit that is read for this version is empty."""
    first = first_replayed(log, version)
    for name, info in log.items():
        if (
            not COMMIT_PATTERN.fullmatch(name)
            or info.num_bytes >= _SMALL_COMMIT_BYTES
            or not first <= int(name[:20]) <= version
        ):
            continue
        if not storage.below(LOG_FOLDER).read(name).strip(b" \t\r\n{}"):
            # deltalake would silently leave out its rows.
            raise SourceError(
                f"{storage.url}/{LOG_FOLDER}/{name} holds no action: the commit of a version was cut. Restore it from "
                "a copy.",
                path=f"{storage.url}/{LOG_FOLDER}/{name}",
            )


def open_table(
    storage: Storage, log: Mapping[str, FileInfo], *, version: int | None, timestamp: dt.datetime | None
) -> Any:
    """A version of the table as a `deltalake.DeltaTable`."""
    try:
        deltalake = importlib.import_module("deltalake")
    except ImportError as error:
        raise MissingDependencyError(
            "Reading a Delta table needs deltalake: pip install 'spark-tensor-converter[delta]'."
        ) from error

    def load(version: int | None) -> Any:
        table_url, options = storage.delta_place()
        return deltalake.DeltaTable(table_url, version=version, storage_options=options)

    wanted = version

    def open_wanted() -> Any:
        # Kept outside, so that an error names the version that the time stands for.
        nonlocal wanted
        if timestamp is not None:
            wanted = _version_of(storage, log, timestamp, load(None).metadata().configuration)
        # deltalake would search up to the given version, even beyond the newest.
        if wanted is not None and wanted > _MANY_VERSIONS and wanted > load(None).version():
            raise LookupError("there is no such version")
        return load(wanted)

    try:
        return storage.wait_for(open_wanted)
    except SourceError:
        raise
    except TimeoutError as error:
        text = str(error).rstrip(".")
        raise SourceError(f"The Delta table {storage.url} cannot be opened: {text}.", path=storage.url) from error
    except Exception as error:  # noqa: BLE001 (deltalake has errors of several kinds for one cause)
        at_version = "" if wanted is None else f" at version {wanted}"
        latest_hint = ""
        if wanted is not None:
            with contextlib.suppress(Exception):
                latest = storage.wait_for(lambda: load(None).version())
                latest_hint = f" Its latest version is {latest}; older logs may be gone."
        raise SourceError(
            f"The Delta table {storage.url} cannot be opened{at_version}: {cause_of(storage, error)}."
            f"{_damaged_in(storage, log, wanted)}{_checkpoint_hint(error)}{latest_hint} Spark may be able to open it: "
            "pass a DataFrame of it to make_spark_converter.",
            path=storage.url,
        ) from storage.harmless(error)


def _checkpoint_hint(error: Exception) -> str:
    """Part of a message: what to do if `_last_checkpoint` names a checkpoint that is not there."""
    # The name alone is in every error of reading it, e.g. if that is forbidden.
    if f"{_HINT} hint" not in str(error):
        return ""
    return (
        f" {LOG_FOLDER}/{_HINT} names a checkpoint that is gone or not whole. That file is only a hint: if all "
        "commits are there, the table can be opened once it is removed."
    )


def _damaged_in(storage: Storage, log: Mapping[str, FileInfo], version: int | None) -> str:
    """Part of a message: which files of the log cannot be parsed, because deltalake does not name them."""
    newest = max((int(name[:20]) for name in log if COMMIT_PATTERN.fullmatch(name)), default=-1)
    last = newest if version is None else version
    first, folder, damaged = first_replayed(log, last), storage.below(LOG_FOLDER), []
    # The newest first, which are the likeliest to be cut. For a message only, so not for long.
    deadline = time.monotonic() + _SEARCH_SECONDS
    for name in sorted(log, reverse=True) if last <= newest else ():
        is_commit = COMMIT_PATTERN.fullmatch(name) is not None and first <= int(name[:20]) <= last
        if not is_commit and not (CHECKPOINT_PATTERN.match(name) and int(name[:20]) == first - 1):
            continue
        if time.monotonic() > deadline:
            break
        try:
            content = folder.read(name)
        except Exception:  # noqa: BLE001 (the message blames the store already)
            break
        try:
            if name.endswith(".json"):
                actions = [json.loads(line) for line in content.splitlines() if line.strip()]
                is_log = all(
                    isinstance(action, dict) and all(isinstance(part, dict) for part in action.values())
                    for action in actions
                )
            else:
                is_log = pq.ParquetFile(pa.BufferReader(content)).metadata is not None
        except Exception:  # noqa: BLE001 (any failure means damage)
            is_log = False
        if not is_log:
            damaged.append(name)
    return f" Damaged: {', '.join(f'{LOG_FOLDER}/{name}' for name in reversed(damaged))}." if damaged else ""


def _version_of(
    storage: Storage, log: Mapping[str, FileInfo], timestamp: dt.datetime, configuration: Mapping[str, str]
) -> int:
    """The last version at this time or before, as Spark counts time.

    With in-commit timestamps, commits from some version on hold their own time. Earlier commits have the time of their
    file, adjusted so that times rise. (deltalake always uses the file's.)
    """
    # In milliseconds, cut and not rounded.
    commits = {
        int(name.removesuffix(".json")): math.floor(info.modified * 1000 + 1e-3)
        for name, info in log.items()
        if COMMIT_PATTERN.fullmatch(name)
    }
    versions = sorted(commits)
    if not versions:
        raise SourceError(
            f"The log of {storage.url} has no commit files, so timestamp= cannot be used. Pass version=.",
            path=storage.url,
        )
    wanted = math.floor(timestamp.timestamp() * 1000 + 1e-3)
    first_within = len(versions)
    if configuration.get("delta.enableInCommitTimestamps") == "true":
        enabled = int(configuration.get("delta.inCommitTimestampEnablementVersion") or 0)
        first_within = bisect.bisect_left(versions, enabled)
    before = [commits[version] for version in versions[:first_within]]
    times = list(itertools.accumulate(before, lambda last, time: max(last + 1, time)))

    def time_within(index: int) -> int:
        head = storage.below(LOG_FOLDER).read(f"{versions[index]:020}.json").split(b"\n", 1)[0]
        return int(json.loads(head)["commitInfo"]["inCommitTimestamp"])

    # The times within commits only rise: a binary search reads few of them.
    low, high = first_within, len(versions)
    while low < high:
        middle = (low + high) // 2
        if time_within(middle) <= wanted:
            low = middle + 1
        else:
            high = middle
    index = low - 1 if low > first_within else bisect.bisect_right(times, wanted) - 1
    if index < 0:
        began = dt.datetime.fromtimestamp((times[0] if times else time_within(0)) / 1000, dt.timezone.utc)
        raise SourceError(
            f"The Delta table {storage.url} has no version of {timestamp.isoformat()}: its log begins with version "
            f"{versions[0]} at {began.isoformat()}.",
            path=storage.url,
        )
    return versions[index]


def cause_of(storage: Storage, error: Exception) -> str:
    """Why deltalake failed, in one line without secrets."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return storage.without_secrets(lines[0].strip().rstrip(".")[:300])


def check_features(table: Any, described: str, url: str, version: int) -> None:
    """Refuse a table with a reader feature that is not known here."""
    protocol = table.protocol()
    unknown = sorted(set(protocol.reader_features or ()) - _FEATURES)
    if unknown or protocol.min_reader_version > 3:
        needs = ", ".join(unknown) or f"reader version {protocol.min_reader_version}"
        raise SourceError(
            f"{described[0].upper()}{described[1:]} needs features that this package does not know: {needs}. Convert a "
            f"DataFrame of it: {copy_of(url, version)}.",
            path=url,
        )


def read_actions(table: Any, described: str, storage: Storage, log: Mapping[str, FileInfo]) -> pa.Table:
    """The files with rows, sorted by name, so that every process has the same order."""
    try:
        actions = storage.wait_for(lambda: pa.table(table.get_add_actions(flatten=True)))
    except Exception as error:  # noqa: BLE001 (deltalake has errors of several kinds for one cause)
        raise SourceError(
            f"The log of {described} cannot be read: {cause_of(storage, error)}."
            f"{_damaged_in(storage, log, table.version())}",
            path=storage.url,
        ) from storage.harmless(error)
    _check_totals(actions, described, storage, log, int(table.version()))
    actions = actions.sort_by("path")
    counts = actions["num_records"]
    # An impossible count is dropped; the footer is read instead.
    is_possible = pc.and_(pc.greater_equal(counts, 0), pc.less(counts, _MAX_ROWS))
    index = actions.column_names.index("num_records")
    actions = actions.set_column(index, "num_records", pc.if_else(is_possible, counts, None))
    # A missing count is not zero rows.
    return actions.filter(pc.fill_null(pc.not_equal(actions["num_records"], 0), True)).combine_chunks()


def _check_totals(
    actions: pa.Table, described: str, storage: Storage, log: Mapping[str, FileInfo], version: int
) -> None:
    """Compare with the totals that Spark writes beside a commit: they show that a commit lost a line.

    Other writers write none; then the newest older version with totals is compared.
    """
    counted_at = max(
        (int(name[:20]) for name in log if _TOTALS.fullmatch(name) and int(name[:20]) <= version), default=-1
    )
    if counted_at < min(version, first_replayed(log, version)):
        return
    name, as_of, counted = f"{counted_at:020}.crc", "", actions
    try:
        totals = json.loads(storage.below(LOG_FOLDER).read(name))
        expected = int(totals["numFiles"]), int(totals["tableSizeBytes"])
        if counted_at < version:
            as_of = f" (as of version {counted_at})"
            older = open_table(storage, log, version=counted_at, timestamp=None)
            counted = storage.wait_for(lambda: pa.table(older.get_add_actions(flatten=True)))
    except Exception:  # noqa: BLE001 (the totals are optional: Spark reads the table without them, too)
        return
    actual = counted.num_rows, int(pc.sum(counted["size_bytes"]).as_py() or 0)
    if actual != expected:
        raise SourceError(
            f"The log of {described}{as_of} is damaged: its commits name {actual[0]:,} files of {actual[1]:,} bytes, "
            f"and {LOG_FOLDER}/{name} says {expected[0]:,} of {expected[1]:,}. Restore the log from a copy.",
            path=f"{storage.url}/{LOG_FOLDER}/{name}",
        )
