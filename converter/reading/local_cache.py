"""Copies of fetched bytes on this host's own disk: shared by its processes, bounded, complete or absent.

    <local_cache_dir>/converter-local-v1/.owner                     ownership marker
    <local_cache_dir>/converter-local-v1/.used                      bytes used or reserved; locked while one decides
    <local_cache_dir>/converter-local-v1/<fingerprint>/.held        locked by each process that reads these rows
    <local_cache_dir>/converter-local-v1/<fingerprint>/.lock-<n>    locked by the process that fetches a piece
    <local_cache_dir>/converter-local-v1/<fingerprint>/<piece>      the wanted columns of a row group, or a footer

A piece appears whole, by a rename. Pieces that do not fit are fetched each time: rows in use never make room, because
the next epoch wants them again. Unused rows make room, the oldest first. Locks are the kernel's, so a killed process
leaves none.

All processes share one counter. Bytes are reserved before they are written, by a half piece with their number in its
name, which a listing counts too. After a deletion the counter may be too high, so a listing comes before any refusal.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import logging
import os
import re
import shutil
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO
from urllib.parse import unquote

import pyarrow as pa

from converter.cache.owners import warn_of_writers
from converter.errors import CacheError, CacheNotOwnedError
from converter.reading.file_locks import is_at, lock, removed_again, unlock
from converter.storage.handles import opened
from converter.storage.local import LocalStorage
from converter.storage.ranges import Data
from converter.storage.requests import GivenUpError

logger = logging.getLogger(__name__)

DIRECTORY = "converter-local-v1"
_OWNER = ".owner"
_OWNER_BYTES = b'{"package": "spark-tensor-converter", "format_version": 1}\n'
_USED = ".used"
_USED_NUM_BYTES = 21
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_PART = re.compile(r"\.[0-9a-f]{32}-(\d+)\.part")
_OURS = re.compile(rf"\.held|\.lock-\d+|{_PART.pattern}|(rows|footer)-\d+-[0-9a-f]{{16}}")
_FREE_SHARE = 0.9
"""The share of the free disk that may be used, unless the user sets a limit."""

_NUM_LOCKS = 64
_MAX_TRIES = 100
"""How often a file is opened again because another process removed it meanwhile; a guess."""


class LocalCache:
    """The pieces of one dataset on this host; threads and processes share it.

    Raises:
        CacheNotOwnedError: our subdirectory exists, holds something and was not made by us.
        CacheError: it cannot be written.
    """

    def __init__(self, directory: str, fingerprint: str, max_bytes: int | None) -> None:
        self.directory, self.max_bytes = directory, max_bytes
        self.root = open_local_root(directory)
        self._folder = os.path.join(self.root, hashlib.sha256(fingerprint.encode()).hexdigest()[:32])
        self._has_listed = False
        self._is_full = False
        self._stuck: set[int] = set()
        """Locks that were waited for in vain."""

        held = self._hold()
        self.release = weakref.finalize(self, _let_go, held)
        """Lets others remove the pieces; this object is of no use then."""

    def _hold(self) -> int:
        path = os.path.join(self._folder, ".held")
        for _ in range(_MAX_TRIES):
            try:
                os.makedirs(self._folder, exist_ok=True)
                held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except (FileExistsError, FileNotFoundError):
                if os.path.lexists(self._folder) and not os.path.isdir(self._folder):
                    raise
                # Another process made room and removed the folder before the file was there.
                continue
            try:
                lock(held, fcntl.LOCK_SH, path)
                # Another process may have made room in between and removed the folder with the file.
                if is_at(held, path):
                    _note_use(held)
                    return held
            except BaseException:
                os.close(held)
                raise
            os.close(held)
        raise removed_again(path)

    def get(
        self,
        name: str,
        sizes: Sequence[int],
        fetch: Callable[[], Sequence[Data]],
        given_up: threading.Event | None = None,
        *,
        anew: bool = False,
    ) -> tuple[list[pa.Buffer], bool]:
        """A piece's parts, of these sizes, and whether they come from the disk; else from `fetch`, and then kept.

        With `anew` they are fetched, and replace the piece on the disk if it differs.
        """
        kept = self._read(name, sizes)
        if kept is not None and not anew:
            return kept, True
        with self._fetching(name, given_up):
            kept = self._read(name, sizes)
            if kept is not None and not anew:
                return kept, True
            fetched = fetch()
            parts = [part if isinstance(part, pa.Buffer) else pa.py_buffer(part) for part in fetched]
            if kept is not None and parts != kept:
                logger.warning("%s was damaged, and is fetched again.", os.path.join(self._folder, name))
                # A piece of another user may not be ours to remove: then it stays.
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self._folder, name))
                    kept = None
            if kept is None and [part.size for part in parts] == list(sizes):
                self._keep(name, fetched, given_up)
            return parts, False

    def _read(self, name: str, sizes: Sequence[int]) -> list[pa.Buffer] | None:
        try:
            with pa.memory_map(os.path.join(self._folder, name)) as mapped:
                if mapped.size() != sum(sizes):
                    return None
                whole = mapped.read_buffer()
        except OSError:
            # It is absent, or cannot be read: then it is fetched.
            return None
        starts = itertools.accumulate(sizes, initial=0)
        return [whole.slice(start, size) for start, size in zip(starts, sizes, strict=False)]

    @contextlib.contextmanager
    def _fetching(self, name: str, given_up: threading.Event | None) -> Iterator[None]:
        """Hold the lock of a piece: one process of this host fetches it. After a minute others fetch it, too."""
        number = int(hashlib.sha256(name.encode()).hexdigest(), 16) % _NUM_LOCKS
        try:
            file = os.open(os.path.join(self._folder, f".lock-{number}"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            # The disk is full, or the folder is gone: then each process fetches for itself.
            self._say_full(f"{error.strerror or error}")
            yield
            return
        try:
            try:
                seconds = 0.0 if number in self._stuck else None
                lock(file, fcntl.LOCK_EX, name, given_up=given_up, seconds=seconds)
            except TimeoutError:
                # Its holder is stopped, or was killed while a forked child has it, too.
                self._stuck.add(number)
            yield
        finally:
            unlock(file)

    def _keep(self, name: str, parts: Sequence[Data], given_up: threading.Event | None) -> None:
        if self._is_full:
            return
        num_bytes = sum(map(len, parts))
        aside = os.path.join(self._folder, f".{uuid.uuid4().hex}-{num_bytes}.part")
        try:
            file = self._reserve(aside, num_bytes, given_up)
            if file is None:
                return
            with file:
                file.writelines(parts)
                file.flush()
                # A network filesystem reports failed writes at a close: it must come before the piece has its name.
                os.close(os.dup(file.fileno()))
                # With the root locked, or a listing could miss both names. Before the file's own lock is released:
                # without a lock it would count as the half piece of a killed process.
                with _locked(self.root, fcntl.LOCK_SH, given_up):
                    os.rename(aside, os.path.join(self._folder, name))
        except GivenUpError:
            # The parts are there. Keeping them is not worth a wait.
            return
        except TimeoutError as error:
            if not self._is_full:
                self._is_full = True
                logger.warning("%s cannot be used (%s): what is not there is fetched each time.", self.root, error)
        except OSError as error:
            self._say_full(f"{error.strerror or error}")
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                logger.debug("Could not keep %s: %s", name, error)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(aside)

    def _reserve(self, aside: str, num_bytes: int, given_up: threading.Event | None) -> BinaryIO | None:
        """The half piece, empty and locked, its bytes counted; None if there is no room for them."""
        with _locked(self.root, fcntl.LOCK_EX, given_up) as counter:
            used = _read_used(counter) if self._has_listed else None
            self._has_listed = True
            if used is None or used + num_bytes > self._limit(used):
                used = _list_used(self.root)
            num_missing = used + num_bytes - self._limit(used)
            if num_missing > 0:
                remove_unheld(self.root, least_bytes=num_missing)
                used = _list_used(self.root)
            limit = self._limit(used)
            if used + num_bytes > limit:
                _write_used(counter, used)
                self._say_full(f"{limit} bytes are used")
                return None
            # Counted first: a process killed in between leaves a counter that is too high, which a listing corrects.
            _write_used(counter, used + num_bytes)
            file = open(aside, "xb")  # noqa: SIM115 (it outlives this lock)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except BaseException:
                file.close()
                raise
            return file

    def _limit(self, used: int) -> int:
        if self.max_bytes is not None:
            return self.max_bytes
        return int((shutil.disk_usage(self.root).free + used) * _FREE_SHARE)

    def _say_full(self, why: str) -> None:
        if not self._is_full:
            self._is_full = True
            logger.warning("%s is full (%s): what does not fit is fetched each time.", self.root, why)


def open_local_cache(directory: str, fingerprint: str, max_bytes: int | None) -> LocalCache | None:
    """The pieces of a dataset on this host; None, with a warning, if the disk is full or another process locks them.

    Raises:
        CacheNotOwnedError, CacheError: as `LocalCache`.
    """
    try:
        return LocalCache(directory, fingerprint, max_bytes)
    except TimeoutError as error:
        logger.warning("%s cannot be used (%s): everything is fetched each time.", directory, error)
        return None
    except PermissionError as error:
        raise CacheError(
            f"local_cache_dir={directory!r} belongs to another user: {error}. Choose a folder of your own.",
            path=directory,
        ) from error
    except (CacheError, OSError) as error:
        cause = error.__cause__ if isinstance(error, CacheError) else error
        if not isinstance(cause, OSError) or cause.errno not in (errno.ENOSPC, errno.EDQUOT):
            if isinstance(error, CacheError):
                raise
            raise _unwritable(directory, error) from error
        logger.warning("%s is full (%s): everything is fetched each time.", directory, cause.strerror or cause)
        return None


def piece_name(kind: str, number: int, content: object) -> str:
    """The file name of a piece; `content` says which bytes it holds.

    >>> piece_name("rows", 7, [(0, 100)])
    'rows-7-a3c2371438bda252'
    """
    return f"{kind}-{number}-{hashlib.sha256(repr(content).encode()).hexdigest()[:16]}"


_FILE_URL = re.compile(r"file:(//(localhost)?(?=/)|(?=/[^/]))", re.IGNORECASE)
_OTHER_URL = re.compile(r"[a-z][a-z0-9+.-]+:/|.*://", re.IGNORECASE)


def _plain_path(directory: str) -> str:
    found = _FILE_URL.match(directory)
    return unquote(directory[found.end() :]) if found else directory


def open_local_root(directory: str) -> str:
    """Our own subdirectory of a user's directory, made and marked if it is missing."""
    path = _plain_path(directory)
    if not path or _OTHER_URL.match(path):
        raise ValueError(f"local_cache_dir must be a folder of this machine, got {directory!r:.80}.")
    root = os.path.join(os.path.abspath(os.path.expanduser(path)), DIRECTORY)
    owner = os.path.join(root, _OWNER)
    try:
        os.makedirs(root, exist_ok=True)
        if not os.path.exists(owner):
            if any(not name.startswith(_OWNER) for name in os.listdir(root)) and not os.path.exists(owner):
                raise CacheNotOwnedError(
                    f"{root} holds files but not the marker {_OWNER} of this package, so it is left alone. "
                    "Choose another local_cache_dir, or empty that folder.",
                    path=root,
                )
            aside = f"{owner}.{uuid.uuid4().hex}.tmp"
            try:
                with open(aside, "xb") as file:
                    file.write(_OWNER_BYTES)
                os.replace(aside, owner)
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(aside)
        # Not refused: several users may share the disk of a machine on purpose.
        warn_of_writers(LocalStorage(root), option="local_cache_dir")
    except OSError as error:
        raise _unwritable(directory, error) from error
    return root


def _unwritable(directory: str, error: OSError) -> CacheError:
    return CacheError(
        f"local_cache_dir={directory!r} cannot be written: {error.strerror or error}. Choose a directory on a disk "
        "of this machine that this process may create files in.",
        path=directory,
    )


def find_local_root(directory: str) -> str | None:
    """Our own subdirectory of a local directory if there is one; makes nothing."""
    root = os.path.join(os.path.abspath(os.path.expanduser(_plain_path(directory))), DIRECTORY)
    return root if os.path.isfile(os.path.join(root, _OWNER)) else None


def remove_unheld(
    root: str, *, least_bytes: int | None = None, older_than_seconds: float = 0.0, dry_run: bool = False
) -> tuple[int, int]:
    """Remove unused rows: all, or the oldest until `least_bytes` are free. Returns how many files and bytes.

    Rows whose last use is less than `older_than_seconds` ago stay.
    """
    num_files = num_bytes = 0
    folders = []
    for entry in _entries(root):
        with contextlib.suppress(FileNotFoundError):
            if entry.is_dir(follow_symlinks=False) and _FINGERPRINT.fullmatch(entry.name):
                folders.append((_last_use(entry.path), entry.path))
    now = time.time()
    for used, folder in sorted(folders):
        if least_bytes is not None and num_bytes >= least_bytes:
            break
        if older_than_seconds and now - used < older_than_seconds:
            continue
        # Rows in use stay, and so do those of another user.
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError, BlockingIOError, PermissionError),
            opened(folder, root) as handle,
        ):
            # Made if it is missing: a process that was killed, or had no descriptor left, leaves a folder without it.
            flags = os.O_RDWR | os.O_CLOEXEC | (0 if dry_run else os.O_CREAT)
            held = os.open(".held", flags, 0o666, dir_fd=handle)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not is_at(held, ".held", folder=handle):
                    # Another process removed these rows before the lock was ours, and they may be in use again.
                    continue
                # Under the lock no process begins to use the folder: `_hold` checks that its file is still there.
                # So that file goes last: whoever makes a new one finds no piece that is about to go.
                for piece in sorted(_entries(folder), key=lambda piece: piece.name == ".held"):
                    if not _OURS.fullmatch(piece.name):
                        continue
                    size = piece.stat(follow_symlinks=False).st_size
                    num_files, num_bytes = num_files + 1, num_bytes + size
                    if not dry_run:
                        os.unlink(piece.name, dir_fd=handle)
                if not dry_run:
                    # It fails if a file that is not ours lies there.
                    with contextlib.suppress(OSError):
                        os.rmdir(folder)
            finally:
                unlock(held)
    return num_files, num_bytes


def _last_use(folder: str) -> float:
    """When rows began or ceased to be read, or were fetched, in seconds since 1970."""
    times = [os.stat(folder, follow_symlinks=False).st_mtime]
    with contextlib.suppress(FileNotFoundError):
        times.append(os.stat(os.path.join(folder, ".held"), follow_symlinks=False).st_mtime)
    return max(times)


def _note_use(held: int) -> None:
    # Another user's file may have no other times.
    with contextlib.suppress(OSError):
        os.utime(held)


def _let_go(held: int) -> None:
    _note_use(held)
    os.close(held)


@contextlib.contextmanager
def _locked(root: str, kind: int, given_up: threading.Event | None) -> Iterator[int]:
    """The counter's file, locked among all processes of this host; held for a decision or a rename, not for I/O."""
    path = os.path.join(root, _USED)
    for _ in range(_MAX_TRIES):
        try:
            # In a sticky folder another user's file may be opened, but not created.
            counter = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            counter = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            # Every user that may write into the root may count.
            with contextlib.suppress(OSError):
                os.fchmod(counter, os.stat(root).st_mode & 0o666)
        try:
            lock(counter, kind, path, given_up=given_up)
            if is_at(counter, path):
                yield counter
                return
        finally:
            unlock(counter)
    raise removed_again(path)


def _read_used(counter: int) -> int | None:
    """The counter; None if it was never written, or is damaged."""
    text = os.pread(counter, _USED_NUM_BYTES + 1, 0)
    return int(text) if re.fullmatch(rb"\d{20}\n", text) else None


def _write_used(counter: int, used: int) -> None:
    os.pwrite(counter, b"%020d\n" % used, 0)


def _list_used(root: str) -> int:
    """Bytes used or reserved, by a listing under the counter's lock; removes half pieces of dead processes."""
    used = len(_OWNER_BYTES) + _USED_NUM_BYTES
    for folder in _entries(root):
        if folder.is_dir(follow_symlinks=False):
            for piece in _entries(folder.path):
                part = _PART.fullmatch(piece.name)
                try:
                    if part is None:
                        used += piece.stat(follow_symlinks=False).st_size
                    elif not _remove_if_abandoned(piece.path):
                        used += int(part[1])
                except FileNotFoundError:
                    # Another process removed it meanwhile.
                    continue
    return used


def _remove_if_abandoned(part: str) -> bool:
    """Remove a half piece if its process is dead; whether it was removed."""
    # One of another user stays, and counts.
    with contextlib.suppress(BlockingIOError, PermissionError):
        file = os.open(part, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(part)
            return True
        finally:
            os.close(file)
    return False


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """The entries of a folder, listed before any is changed; none if the folder is gone."""
    with contextlib.suppress(FileNotFoundError):
        return list(os.scandir(folder))
    return []
