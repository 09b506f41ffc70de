"""The table's log: which version, is it whole, which files."""

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
"""More than a file has: of as many rows masks alone are 64 GB."""

_MANY_VERSIONS = 1_000_000
"""deltalake looks for so many versions in some 40 ms."""
COMMIT_PATTERN = re.compile(r"[0-9]{20}\.json")
CHECKPOINT_PATTERN = re.compile(r"[0-9]{20}\.checkpoint\.")

_TOTALS = re.compile(r"[0-9]{20}\.crc")
_SMALL_COMMIT_BYTES = 128
"""Below this a commit is looked at whether it says anything."""

_FEATURES = frozenset(
    {"columnMapping", "deletionVectors", "timestampNtz", "typeWidening", "typeWidening-preview", "v2Checkpoint",
     "vacuumProtocolCheck", "variantType", "variantType-preview", "variantShredding", "variantShredding-preview"}
)  # fmt: skip
"""What a reader must know of a table, where it is read rightly. Columns of variants are refused one by one."""


def copy_of(url: str, version: int) -> str:
    """The call that reads the same version through Spark, for a message."""
    return f"make_spark_converter(spark.read.format('delta').option('versionAsOf', {version}).load({url!r}))"


# --- The log ----------------------------------------------------------------------------------------------------------


def read_log_folder(storage: Storage) -> Mapping[str, FileInfo]:
    """What stands in the folder of the log, by name."""
    path = storage.path()
    if unquote(path) != path:
        # Where there is a folder of the decoded name its rows would come.
        raise SourceError(
            f"{storage.url} has a percent sign in its path that deltalake takes for an encoded sign: it would look "
            f"into {unquote(path)}. Rename the folder, or convert a DataFrame of the table with make_spark_converter.",
            path=storage.url,
        )
    if not any(info.name == LOG_FOLDER and storage.leads_to_folder(info) for info in storage.list()):
        if not storage.exists:
            raise SourceError(f"{storage.url} does not exist.", path=storage.url)
        raise SourceError(
            f"{storage.url} is no Delta table: it holds no folder {LOG_FOLDER}. For Parquet files say "
            "make_parquet_converter(…).",
            path=storage.url,
        )
    return {info.name: info for info in storage.below(LOG_FOLDER).list()}


def first_replayed(log: Mapping[str, FileInfo], version: int) -> int:
    """The version behind the last checkpoint: from there on commits are read."""
    return 1 + max(
        (int(name[:20]) for name in log if CHECKPOINT_PATTERN.match(name) and int(name[:20]) <= version), default=-1
    )


def check_commits(storage: Storage, log: Mapping[str, FileInfo], version: int) -> None:
    """Refuse a log in which a commit between the last checkpoint and this version says nothing."""
    first = first_replayed(log, version)
    for name, info in log.items():
        if (
            not COMMIT_PATTERN.fullmatch(name)
            or info.num_bytes >= _SMALL_COMMIT_BYTES
            or not first <= int(name[:20]) <= version
        ):
            continue
        if not storage.below(LOG_FOLDER).read(name).strip(b" \t\r\n{}"):
            # Its rows would silently be missing.
            raise SourceError(
                f"{storage.url}/{LOG_FOLDER}/{name} holds no action: the commit of a version was cut. Restore it from "
                "a copy.",
                path=f"{storage.url}/{LOG_FOLDER}/{name}",
            )


def open_table(
    storage: Storage, log: Mapping[str, FileInfo], *, version: int | None, timestamp: dt.datetime | None
) -> Any:
    """A version of the table, as deltalake has it."""
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
            f"The Delta table {storage.url} cannot be opened{asked}: {cause_of(storage, error)}."
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
        f" {LOG_FOLDER}/{_HINT} names a checkpoint that is gone or not whole. It is no more than a hint: where all "
        "commits are there, the table can be opened once that file is removed."
    )


def _damaged_in(storage: Storage, log: Mapping[str, FileInfo], version: int | None) -> str:
    """Which files that make a version are none that can be read, as part of a message; deltalake does not name them."""
    newest = max((int(name[:20]) for name in log if COMMIT_PATTERN.fullmatch(name)), default=-1)
    version = newest if version is None else version
    first, folder, found = first_replayed(log, version), storage.below(LOG_FOLDER), []
    # The newest first, which are the likeliest to be cut; it is a message only, and not waited for long.
    deadline = time.monotonic() + _SEARCH_SECONDS
    for name in sorted(log, reverse=True) if version <= newest else ():
        is_commit = COMMIT_PATTERN.fullmatch(name) is not None and first <= int(name[:20]) <= version
        if not is_commit and not (CHECKPOINT_PATTERN.match(name) and int(name[:20]) == first - 1):
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
    return f" Damaged: {', '.join(f'{LOG_FOLDER}/{name}' for name in reversed(found))}." if found else ""


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
        if COMMIT_PATTERN.fullmatch(name)
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
        head = storage.below(LOG_FOLDER).read(f"{versions[place]:020}.json").split(b"\n", 1)[0]
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


def cause_of(storage: Storage, error: Exception) -> str:
    """Why deltalake failed, in one line without secrets."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return storage.without_secrets(lines[0].strip().rstrip(".")[:300])


def check_features(table: Any, said: str, url: str, version: int) -> None:
    """Refuse what this reader does not know of a table."""
    protocol = table.protocol()
    unknown = sorted(set(protocol.reader_features or ()) - _FEATURES)
    if unknown or protocol.min_reader_version > 3:
        needs = ", ".join(unknown) or f"reader version {protocol.min_reader_version}"
        raise SourceError(
            f"{said[0].upper()}{said[1:]} needs what this package does not know how to read: {needs}. Convert a "
            f"DataFrame of it: {copy_of(url, version)}.",
            path=url,
        )


def read_actions(table: Any, said: str, storage: Storage, log: Mapping[str, FileInfo]) -> pa.Table:
    """The files with rows, in the order of their names, so that each who opens the version has the same order."""
    try:
        actions = storage.wait_for(lambda: pa.table(table.get_add_actions(flatten=True)))
    except Exception as error:  # noqa: BLE001 (deltalake has errors of several kinds for one cause)
        raise SourceError(
            f"The log of {said} cannot be read: {cause_of(storage, error)}."
            f"{_damaged_in(storage, log, table.version())}",
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
    if noted_at < min(version, first_replayed(log, version)):
        return
    name = f"{noted_at:020}.crc"
    try:
        noted = json.loads(storage.below(LOG_FOLDER).read(name))
        expected = int(noted["numFiles"]), int(noted["tableSizeBytes"])
        if noted_at < version:
            said += f" (as of version {noted_at})"
            older = open_table(storage, log, version=noted_at, timestamp=None)
            actions = storage.wait_for(lambda: pa.table(older.get_add_actions(flatten=True)))
    except Exception:  # noqa: BLE001 (nobody needs it; Spark does without, too)
        return
    found = actions.num_rows, int(pc.sum(actions["size_bytes"]).as_py() or 0)
    if found != expected:
        raise SourceError(
            f"The log of {said} is damaged: its commits name {found[0]:,} files of {found[1]:,} bytes, and "
            f"{LOG_FOLDER}/{name} says {expected[0]:,} of {expected[1]:,}. Restore the log from a copy.",
            path=f"{storage.url}/{LOG_FOLDER}/{name}",
        )
