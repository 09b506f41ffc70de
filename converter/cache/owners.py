"""Whether another user may have planted a cache, or may replace one: owners and modes of folders on local disks.

In a folder that every user may write to, a name says nothing about who made what bears it: rows of a stranger could
lie where this user's are expected. There the owner decides. Elsewhere those who may write were let in on purpose, such
as a group that shares a cache, and nothing is asked.
"""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import pwd
import stat
import tempfile
from collections.abc import Iterator

from converter.errors import CacheNotOwnedError
from converter.storage.databricks import is_on_databricks
from converter.storage.directory import Storage

logger = logging.getLogger(__name__)

_warned: set[str] = set()
"""The directories of which this process has warned."""


def check_owner(directory: Storage, *names: str) -> None:
    """Raise CacheNotOwnedError if another user may have planted a directory, or one of these names in it.

    Example:
        >>> from converter.storage.opening import open_storage
        >>> check_owner(open_storage("/tmp"))
    """
    path = directory.path()
    if not _has_owners(directory):
        return
    for planted in (path, *(directory.path(name) for name in names)):
        owner = _stranger_at(planted)
        if owner is not None:
            raise CacheNotOwnedError(
                f"{planted} belongs to {owner}, in a folder that every user may write to, so it is not used. "
                "Choose a cache_dir that only you, or a group that you trust, may write to.",
                path=directory.url,
            )


def warn_of_writers(directory: Storage, option: str = "cache_dir") -> None:
    """Log once if every user may replace a directory or add to it, or if a stranger may have made one above it.

    `option` is the name under which the user chose the directory.

    Example:
        >>> import tempfile
        >>> from converter.storage.opening import open_storage
        >>> with tempfile.TemporaryDirectory() as folder:  # In a sticky folder, and only this user may write to it.
        ...     warn_of_writers(open_storage(folder))
    """
    if not _has_owners(directory) or directory.path() in _warned:
        return
    path = directory.real_path()
    for folder in _folders_to(path):
        mode = os.stat(folder).st_mode
        # In a sticky folder, as /tmp is, users may add files but not replace those of others.
        if mode & stat.S_IWOTH and (folder == path or not mode & stat.S_ISVTX):
            cause = f"every user may write to {folder}"
            remedy = f"Remove that right with chmod o-w {folder}, or choose another {option}"
        elif (owner := _stranger_at(folder)) is not None:
            cause = f"{folder} belongs to {owner}, in a folder that every user may write to"
            remedy = f"If you do not trust its owner, choose another {option}"
        else:
            continue
        _warned.add(directory.path())
        logger.warning("Other users may replace rows in %s: %s. %s.", directory.path(), cause, remedy)
        return


def _has_owners(directory: Storage) -> bool:
    """Whether the modes of files decide who may write, as on a POSIX disk."""
    return directory.is_local and not is_on_databricks(directory.path())


def _folders_to(path: str) -> Iterator[str]:
    """Each folder on the way to a path, itself too, without `/`."""
    parts = path.strip("/").split("/")
    return ("/" + "/".join(parts[:count]) for count in range(1, len(parts) + 1))


def _stranger_at(path: str) -> str | None:
    """Who owns a name in a folder where every user may create it; None if that is this user or a trusted one."""
    folder = posixpath.dirname(path)
    try:
        status, above = os.lstat(path), os.stat(folder)
    except FileNotFoundError:
        return None
    # Root may do anything, and so may the owner of the folder, whom the user trusts by naming it.
    trusted = {os.geteuid(), 0, above.st_uid}
    if not above.st_mode & stat.S_IWOTH or status.st_uid in trusted or status.st_uid == _uid_in(folder):
        return None
    try:
        return f"the user {pwd.getpwuid(status.st_uid).pw_name}"
    except KeyError:
        return f"the user with the number {status.st_uid}"


def _uid_in(folder: str) -> int | None:
    """Who owns what this process creates in a folder: a network disk may know its user by another number."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_uid
    return None
