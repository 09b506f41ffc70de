"""Locks of files among the processes of a host. They are the kernel's, so a killed process leaves none."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time

from converter.storage.requests import GivenUpError

_FIRST_PAUSE_SECONDS, _LOOK_SECONDS = 0.0005, 0.05
"""How long a wait for a lock sleeps: at first, and at most. Most locks are held for a decision or a rename."""

WAIT_SECONDS = 60.0
"""How long a lock is waited for, unless the caller says how long."""


def lock(
    file: int, kind: int, path: str, *, given_up: threading.Event | None = None, seconds: float | None = None
) -> None:
    """Lock a file among all processes of this host. Whoever has it may be stopped, so nobody waits for ever.

    Raises:
        GivenUpError: `given_up` was set meanwhile.
        TimeoutError: it was locked for `seconds`, a minute if None.
    """
    end, pause = time.monotonic() + (WAIT_SECONDS if seconds is None else seconds), _FIRST_PAUSE_SECONDS
    while not _try_lock(file, kind):
        if given_up is not None and given_up.is_set():
            raise GivenUpError(f"The wait for {path} was cancelled")
        if time.monotonic() > end:
            raise TimeoutError(f"another process holds the lock of {path}")
        time.sleep(pause)
        pause = min(2 * pause, _LOOK_SECONDS)


def _try_lock(file: int, kind: int) -> bool:
    """Lock a file unless another process has it locked; whether it is locked by us."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return True
    return False


def removed_again(path: str) -> FileNotFoundError:
    """The error for a file that other processes remove each time before it can be locked."""
    return FileNotFoundError(errno.ENOENT, "it is removed as often as it is made", path)


def is_at(file: int, path: str, *, folder: int | None = None) -> bool:
    """Whether an open file still has its name: another process may have removed it with its folder."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), os.stat(path, dir_fd=folder))
    return False


def unlock(file: int) -> None:
    """Let a lock go, and close its file."""
    # Closing it alone is not enough: a process that was forked meanwhile has it open too.
    fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)
