"""What may be removed: only files that this package or Spark's writer made, in our own `data-<attempt>` folders.

A file with any other name stays, and so does everything behind a link. Both are logged.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from converter.manifest import DATA_DIRECTORY, DATA_FILE
from converter.storage.directory import FileInfo, Storage

logger = logging.getLogger(__name__)

_STAGING = re.compile(r"_temporary|__magic(_job-.*)?")
"""Where Hadoop's committers work: FileOutputCommitter, and S3A's magic one, without `_job-…` before Hadoop 3.4."""

_SIDE_FILE = re.compile(
    rf"probe|_SUCCESS|\._SUCCESS\.crc|\.{DATA_FILE.pattern}\.crc"
    # Databricks' commit protocol, docs.databricks.com/en/archive/legacy/dbio-commit.html.
    r"|_(started|committed)_(vacuum)?[0-9]+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """What a sweep removed, or with `dry_run=True` would remove.

    >>> SweepReport(num_entries=1, num_files=2, num_bytes=4096).num_bytes
    4096
    """

    num_entries: int = 0
    """Committed entries."""

    num_attempts: int = 0
    """Unfinished writes."""

    num_files: int = 0
    """Data files of both."""

    num_bytes: int = 0
    """Size of those files."""

    urls: tuple[str, ...] = ()
    """The folders that held them."""

    num_kept: int = 0
    """Entries that stay because they were written with `delete_on_exit=False`."""

    def __add__(self, other: SweepReport) -> SweepReport:
        names = (field.name for field in fields(self))
        return SweepReport(**{name: getattr(self, name) + getattr(other, name) for name in names})


def is_ours(info: FileInfo) -> bool:
    """Whether a file in a data folder has a name that our writer, or Spark's, gives."""
    return not info.is_directory and bool(DATA_FILE.fullmatch(info.name) or _SIDE_FILE.fullmatch(info.name))


def is_link(directory: Storage, name: str) -> bool:
    """Whether a name in a directory is a link."""
    return any(info.name == name and info.is_link for info in directory.list())


def abort_uploads(directory: Storage) -> None:
    """Give up what our writers, or Spark's, have begun to upload to a data folder."""
    for name, number in directory.uploads():
        if _is_our_upload(name):
            directory.abort_upload(name, number)


def abort_orphaned(root: Storage, uploads: Sequence[tuple[str, str]], may_go_on: Callable[[str, str], bool]) -> None:
    """Give up uploads of tasks that outlived their driver, and the removal of what it wrote.

    `may_go_on` is asked for a key and one of its data folders, by what was listed after the uploads: a live writer's
    intent is there.
    """
    for name, number in uploads:
        key, _, rest = name.partition("/")
        folder, _, file = rest.partition("/")
        if DATA_DIRECTORY.fullmatch(folder) and _is_our_upload(file) and not may_go_on(key, folder):
            root.abort_upload(name, number)


def _is_our_upload(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return bool(DATA_FILE.fullmatch(file)) and (not folder or bool(_STAGING.fullmatch(folder.partition("/")[0])))


def delete_data(entry: Storage, directory_name: str) -> SweepReport:
    """Remove our data files of one attempt, what Spark's committer left there, and its folder if that is empty then."""
    if is_link(entry, directory_name):
        logger.warning("Left %s/%s alone: it is a link, which this package does not make.", entry.url, directory_name)
        return SweepReport()
    directory = entry.below(directory_name)
    abort_uploads(directory)
    foreign, num_files, num_bytes = [], 0, 0
    # Files first: a task that still works in a staging folder cannot keep them.
    for info in sorted(directory.list(), key=lambda info: info.is_directory):
        if is_ours(info):
            directory.delete_file(info.name)
            num_files, num_bytes = num_files + 1, num_bytes + info.num_bytes
        elif info.is_directory and not info.is_link and _STAGING.fullmatch(info.name):
            # In our own folder it is all ours. After a commit a task that ran twice, and lost, may make it anew.
            directory.below(info.name).delete_tree()
        else:
            foreign.append(info.name)
    if foreign:
        logger.warning(
            "Left %d files in %s that this package did not write: %s", len(foreign), directory.url, foreign[:3]
        )
    else:
        directory.delete_directory_if_empty()
    return SweepReport(num_files=num_files, num_bytes=num_bytes)
