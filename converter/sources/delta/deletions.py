"""Deletion vectors as masks."""

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
                f"or convert a DataFrame of it: {copy_of(storage.url, version)}.",
                path=storage.url,
            ) from storage.harmless(error)
        if "not found" in str(error).lower():
            # VACUUM removes them as it does data files, also where newer versions go on with the data file.
            raise SourceChangedError(
                f"Which rows are deleted in {said} (deletion vectors) cannot be read: {cause_of(storage, error)}. "
                f"{remedy}",
                path=storage.url,
            ) from storage.harmless(error)
        raise SourceError(
            f"Which rows are deleted in {said} (deletion vectors) cannot be read: {cause_of(storage, error)}. Convert "
            f"a DataFrame of it: {copy_of(storage.url, version)}.",
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
            noted = json.loads(storage.below(LOG_FOLDER).read(name)).get("numDeletedRecordsOpt")
    if isinstance(noted, int) and noted != count:
        raise SourceError(
            f"{count:,} rows are deleted in {said} by its deletion vectors, and {noted:,} by {LOG_FOLDER}/{name}: a "
            "file is another one than it was. Restore the table from a copy.",
            path=storage.url,
        )


def _has_no_vectors(storage: Storage, log: Mapping[str, FileInfo], version: int) -> bool:
    """Whether certainly no file of a version has deleted rows: no commit names any, and no checkpoint may."""
    commits = [name for name in log if COMMIT_PATTERN.fullmatch(name) and int(name[:20]) <= version]
    is_whole = first_replayed(log, version) == 0 and len(commits) == version + 1
    return is_whole and not any(_VECTOR.search(storage.below(LOG_FOLDER).read(name)) for name in commits)
