"""Deletion vectors, decoded by deltalake, become masks: which rows of a file a version still has."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from converter.errors import SourceChangedError, SourceError
from converter.selection import Mask
from converter.sources.delta.log import COMMIT_PATTERN, LOG_FOLDER, cause_of, copy_of, first_replayed
from converter.storage.directory import FileInfo, Storage

_VECTOR = re.compile(rb'"deletionVector"\s*:\s*\{')


def deleted_rows(
    table: Any, storage: Storage, log: Mapping[str, FileInfo], *, described: str, version: int, remedy: str
) -> dict[str, Mask]:
    """For each file with deleted rows, by its full path, which of its rows are left."""
    if "deletionVectors" not in (table.protocol().reader_features or ()):
        return {}
    try:
        left: dict[str, Mask] = {}
        for batch in storage.wait_for(lambda: list(pa.RecordBatchReader.from_stream(table.deletion_vectors()))):
            for path, kept in zip(batch.column("filepath").to_pylist(), batch.column("selection_vector"), strict=True):
                # By its path in the store, which is the same for every spelling of its URL.
                left[(storage.path_of(path) or path).strip("/")] = np.asarray(
                    kept.values.to_numpy(zero_copy_only=False), np.bool_
                )
    except Exception as error:  # noqa: BLE001 (deltalake has errors of several kinds for one cause)
        if "TypeWidening" in str(error) and _has_no_vectors(storage, log, version):
            # deltalake refuses to read vectors of all tables with this feature.
            return {}
        if "not found" in str(error).lower() and not storage.is_local and quote(storage.path()) != storage.path():
            raise SourceError(
                f"The deletion vectors of {described} cannot be read: deltalake encodes special characters of the path "
                f"twice when it opens them. Rename the folder, or convert a DataFrame of it: "
                f"{copy_of(storage.url, version)}.",
                path=storage.url,
            ) from storage.harmless(error)
        if "not found" in str(error).lower():
            # VACUUM removes old vectors, even if newer versions still use their data file.
            raise SourceChangedError(
                f"The deletion vectors of {described} cannot be read: {cause_of(storage, error)}. {remedy}",
                path=storage.url,
            ) from storage.harmless(error)
        raise SourceError(
            f"The deletion vectors of {described} cannot be read: {cause_of(storage, error)}. Convert a DataFrame of "
            f"it: {copy_of(storage.url, version)}.",
            path=storage.url,
        ) from storage.harmless(error)
    _check_deleted(sum(int(np.count_nonzero(~kept)) for kept in left.values()), storage, log, described, version)
    return left


def _check_deleted(count: int, storage: Storage, log: Mapping[str, FileInfo], described: str, version: int) -> None:
    """Compare with the count that Spark may have written beside the commit: it detects a vector of another version."""
    expected = _counted(storage, log, version, "numDeletedRecordsOpt")
    if expected is not None and expected != count:
        raise SourceError(
            f"The deletion vectors of {described} delete {count:,} rows, expected {expected:,} by "
            f"{LOG_FOLDER}/{_checksum_file(version)}: a file was replaced. Restore the table from a copy.",
            path=storage.url,
        )


def _checksum_file(version: int) -> str:
    return f"{version:020}.crc"


def _counted(storage: Storage, log: Mapping[str, FileInfo], version: int, name: str) -> int | None:
    """A number that Spark wrote beside a version's commit; None if there is none."""
    if _checksum_file(version) not in log:
        return None
    with contextlib.suppress(Exception):
        counted = json.loads(storage.below(LOG_FOLDER).read(_checksum_file(version))).get(name)
        return counted if isinstance(counted, int) else None
    return None


def _has_no_vectors(storage: Storage, log: Mapping[str, FileInfo], version: int) -> bool:
    """Whether no file of a version has deleted rows for sure: Spark counted none, or none of all commits names one."""
    if _counted(storage, log, version, "numDeletionVectorsOpt") == 0:
        return True
    commits = [name for name in log if COMMIT_PATTERN.fullmatch(name) and int(name[:20]) <= version]
    is_whole = first_replayed(log, version) == 0 and len(commits) == version + 1
    return is_whole and not any(_VECTOR.search(storage.below(LOG_FOLDER).read(name)) for name in commits)
