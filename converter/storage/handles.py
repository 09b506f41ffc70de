"""A local directory held open while files in it are made or removed, so that nobody can lead the step elsewhere.

A path is looked up anew at each call. A process that may write to a folder on the way can put a link in its place
between a check and a removal, and the removal would happen behind the link. A handle stays on the directory that was
opened; on the way to it no link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

# Linux opens with O_PATH whatever may only be searched, not listed; others have no such flag.
_DIRECTORY = os.O_DIRECTORY | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)


@contextlib.contextmanager
def opened(path: str, base: str) -> Iterator[int]:
    """A handle of the directory at `path`; a link is followed in `base`, which is its beginning, and not below.

    Raises:
        FileNotFoundError: a part of the path is missing.
        NotADirectoryError: a part of the path below `base` is a link, or a file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, opened(folder, folder) as handle:
        ...     os.mkdir("a", dir_fd=handle)
        ...     os.listdir(folder)
        ['a']
    """
    handle = os.open(base, _DIRECTORY)
    try:
        for name in path[len(base) :].split("/"):
            if name:
                try:
                    inner = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
                except OSError as error:
                    if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                        raise
                    text = "A link or a file, where a folder of the cache was expected"
                    raise NotADirectoryError(errno.ENOTDIR, text, path) from error
                # Exchanged first: after a Ctrl-C between both, the end would close a number that may be another file's.
                handle, outer = inner, handle
                os.close(outer)
        yield handle
    finally:
        os.close(handle)


def remove_tree(name: str, handle: int) -> None:
    """Remove a folder of an open directory with all that is in it; links in it are removed themselves."""
    # Not shutil.rmtree: before Python 3.11 it takes no handle.
    for _, folders, files, inner in os.fwalk(name, topdown=False, follow_symlinks=False, dir_fd=handle):
        for file in files:
            os.unlink(file, dir_fd=inner)
        for folder in folders:
            try:
                os.rmdir(folder, dir_fd=inner)
            except NotADirectoryError:
                # A link to a folder is listed as one.
                os.unlink(folder, dir_fd=inner)
    os.rmdir(name, dir_fd=handle)
