"""What was fetched, kept on this host's own disk: shared by its processes, bounded, complete or absent.

    <local_cache_dir>/converter-local-v1/.owner                     ownership marker
    <local_cache_dir>/converter-local-v1/<fingerprint>/.held        locked by whoever reads these rows
    <local_cache_dir>/converter-local-v1/<fingerprint>/.lock-<n>    locked while a piece is fetched, by one
    <local_cache_dir>/converter-local-v1/<fingerprint>/<piece>      the wanted columns of a row group, or a footer

A piece appears by a rename, whole. What does not fit is fetched again each time:
nothing of the rows that are being read makes room, because in the next epoch it
would be wanted again. Rows that nobody holds make room, the oldest first. Locks are
the kernel's, so a process that is killed leaves none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import unquote

import pyarrow as pa

from converter.errors import CacheError, CacheNotOwnedError
from converter.ranges import Data
from converter.stores import GivenUpError

logger = logging.getLogger(__name__)

DIRECTORY = "converter-local-v1"
_OWNER = ".owner"
_OWNER_BYTES = b'{"package": "spark-tensor-converter", "format_version": 1}\n'
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_OURS = re.compile(r"\.held|\.lock-\d+|\.[0-9a-f]{32}\.part|(rows|footer)-\d+-[0-9a-f]{16}")
_FREE_SHARE = 0.9
"""Of what is free on the disk, where nobody says how much may be used."""

_NUM_LOCKS = 64
_LOOK_SECONDS = 0.05
_COUNT_SECONDS = 1.0
_ABANDONED_SECONDS = 3600.0


class LocalCache:
    """The pieces of one dataset on this host; threads and processes share it.

    Raises:
        CacheNotOwnedError: our subdirectory exists, holds something and was not made by us.
        CacheError: it cannot be written.
    """

    def __init__(self, directory: str, fingerprint: str, max_bytes: int | None) -> None:
        self.root = open_local_root(directory)
        self._folder = os.path.join(self.root, hashlib.sha256(fingerprint.encode()).hexdigest()[:32])
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._counted: tuple[float, int] = (-_COUNT_SECONDS, 0)
        self._is_full = False
        held = self._hold()
        weakref.finalize(self, os.close, held)
        self._remove_abandoned()

    def _remove_abandoned(self) -> None:
        """Half pieces of processes that were killed."""
        for entry in list(os.scandir(self._folder)):
            with contextlib.suppress(FileNotFoundError):
                if entry.name.endswith(".part") and time.time() - entry.stat().st_mtime > _ABANDONED_SECONDS:
                    os.unlink(entry.path)

    def _hold(self) -> int:
        while True:
            path = os.path.join(self._folder, ".held")
            try:
                os.makedirs(self._folder, exist_ok=True)
                held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except (FileExistsError, FileNotFoundError):
                if os.path.lexists(self._folder) and not os.path.isdir(self._folder):
                    raise
                # Whoever makes room removed the folder while it was made, or before the file was.
                continue
            fcntl.flock(held, fcntl.LOCK_SH)
            # Whoever made room in between has removed the folder with the file.
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(held).st_ino == os.stat(path).st_ino:
                    return held
            os.close(held)

    def get(
        self,
        name: str,
        sizes: Sequence[int],
        fetch: Callable[[], Sequence[Data]],
        given_up: threading.Event | None = None,
    ) -> list[pa.Buffer]:
        """A piece's parts, of these sizes: from the disk, else from `fetch`, and then kept if there is room."""
        found = self._read(name, sizes)
        if found is not None:
            return found
        with self._fetching(name, given_up):
            found = self._read(name, sizes)
            if found is not None:
                return found
            fetched = fetch()
            if [len(part) for part in fetched] == list(sizes):
                self._keep(name, fetched)
            return [part if isinstance(part, pa.Buffer) else pa.py_buffer(part) for part in fetched]

    def remove(self, kind: str, numbers: Sequence[int]) -> bool:
        """Let go of pieces that are not what they should be; whether there were any."""
        wanted = tuple(f"{kind}-{number}-" for number in numbers)
        try:
            names = [name for name in os.listdir(self._folder) if name.startswith(wanted)]
        except OSError:
            # Somebody removed the folder.
            return False
        for name in names:
            logger.warning("%s was damaged, and is fetched again.", os.path.join(self._folder, name))
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder, name))
        return bool(names)

    def _read(self, name: str, sizes: Sequence[int]) -> list[pa.Buffer] | None:
        try:
            with pa.memory_map(os.path.join(self._folder, name)) as mapped:
                if mapped.size() != sum(sizes):
                    return None
                whole = mapped.read_buffer()
        except OSError:
            # Not there, or out of reach with its folder: then it is fetched.
            return None
        found, start = [], 0
        for size in sizes:
            found.append(whole.slice(start, size))
            start += size
        return found

    @contextlib.contextmanager
    def _fetching(self, name: str, given_up: threading.Event | None) -> Iterator[None]:
        """Be the one on this host who fetches a piece."""
        number = int(hashlib.sha256(name.encode()).hexdigest(), 16) % _NUM_LOCKS
        try:
            lock = os.open(os.path.join(self._folder, f".lock-{number}"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            # Full of files, or the folder is gone: then each fetches for itself.
            self._say_full(f"{error.strerror or error}")
            yield
            return
        try:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if given_up is not None and given_up.is_set():
                        raise GivenUpError(f"{name} is not wanted any more") from None
                    time.sleep(_LOOK_SECONDS)
            yield
        finally:
            os.close(lock)

    def _keep(self, name: str, parts: Sequence[Data]) -> None:
        aside = os.path.join(self._folder, f".{uuid.uuid4().hex}.part")
        try:
            if self._is_full or not self._has_room(sum(map(len, parts))):
                return
            with open(aside, "xb") as file:
                file.writelines(parts)
            os.rename(aside, os.path.join(self._folder, name))
        except OSError as error:
            self._say_full(f"{error.strerror or error}")
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                logger.debug("Could not keep %s: %s", name, error)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(aside)

    def _has_room(self, num_bytes: int) -> bool:
        with self._lock:
            counted, used = self._counted
            if time.monotonic() - counted >= _COUNT_SECONDS:
                used = _bytes_below(self.root)
                counted = time.monotonic()
            limit = self._max_bytes
            if limit is None:
                limit = int((shutil.disk_usage(self.root).free + used) * _FREE_SHARE)
            if used + num_bytes > limit:
                remove_unheld(self.root, until_bytes=limit - num_bytes)
                used, counted = _bytes_below(self.root), time.monotonic()
            if used + num_bytes > limit:
                self._counted = counted, used
                self._say_full(f"{limit} bytes are used")
                return False
            self._counted = counted, used + num_bytes
            return True

    def _say_full(self, why: str) -> None:
        if not self._is_full:
            self._is_full = True
            logger.warning("%s is full (%s): what does not fit is fetched each time.", self.root, why)


def open_local_cache(directory: str, fingerprint: str, max_bytes: int | None) -> LocalCache | None:
    """The pieces of a dataset on this host; None, and a warning, where the disk is full already.

    Raises:
        CacheNotOwnedError, CacheError: as `LocalCache`.
    """
    try:
        return LocalCache(directory, fingerprint, max_bytes)
    except PermissionError as error:
        raise CacheError(
            f"local_cache_dir={directory!r} is another user's: {error}. Choose a folder of your own.", path=directory
        ) from error
    except (CacheError, OSError) as error:
        cause = error.__cause__ if isinstance(error, CacheError) else error
        if not isinstance(cause, OSError) or cause.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        logger.warning("%s is full (%s): everything is fetched each time.", directory, cause.strerror or cause)
        return None


def piece_name(kind: str, number: int, content: object) -> str:
    """The file name of a piece; `content` says which bytes it holds.

    >>> piece_name("rows", 7, [(0, 100)])
    'rows-7-a3c2371438bda252'
    """
    return f"{kind}-{number}-{hashlib.sha256(repr(content).encode()).hexdigest()[:16]}"


def _plain_path(directory: str) -> str:
    return unquote(directory.removeprefix("file://")) if directory.startswith("file://") else directory


def open_local_root(directory: str) -> str:
    """Our own subdirectory of a user's directory, made and marked where it is missing."""
    directory = _plain_path(directory)
    if not directory or "://" in directory:
        raise ValueError(f"local_cache_dir must be a folder of this machine, got {directory!r}.")
    root = os.path.join(os.path.abspath(os.path.expanduser(directory)), DIRECTORY)
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
            with open(aside, "xb") as file:
                file.write(_OWNER_BYTES)
            os.replace(aside, owner)
    except OSError as error:
        raise CacheError(
            f"local_cache_dir={directory!r} cannot be written: {error.strerror or error}. Choose a directory on a disk "
            "of this machine that this process may create files in.",
            path=root,
        ) from error
    return root


def find_local_root(directory: str) -> str | None:
    """Our own subdirectory of a local directory if there is one; makes nothing."""
    root = os.path.join(os.path.abspath(os.path.expanduser(_plain_path(directory))), DIRECTORY)
    return root if os.path.isfile(os.path.join(root, _OWNER)) else None


def remove_unheld(root: str, *, until_bytes: int = -1, dry_run: bool = False) -> tuple[int, int]:
    """Remove rows that no process holds, the oldest first, until so few bytes are used; files and bytes removed."""
    num_files = num_bytes = 0
    used = _bytes_below(root)
    folders = [entry for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    folders = [entry for entry in folders if _FINGERPRINT.fullmatch(entry.name)]
    for entry in sorted(folders, key=lambda entry: entry.stat().st_mtime):
        if used <= until_bytes:
            break
        # Another user's is theirs to remove.
        with contextlib.suppress(FileNotFoundError, BlockingIOError, PermissionError):
            held = os.open(os.path.join(entry.path, ".held"), os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Under the lock, so that nobody begins to hold what goes: who opens it next looks whether it is there.
                for piece in list(os.scandir(entry.path)):
                    if not _OURS.fullmatch(piece.name):
                        continue
                    size = piece.stat(follow_symlinks=False).st_size
                    num_files, num_bytes, used = num_files + 1, num_bytes + size, used - size
                    if not dry_run:
                        os.unlink(piece.path)
                if not dry_run:
                    # Unless a stranger's file stands there.
                    with contextlib.suppress(OSError):
                        os.rmdir(entry.path)
            finally:
                os.close(held)
    return num_files, num_bytes


def _bytes_below(root: str) -> int:
    found = 0
    for folder in os.scandir(root):
        if folder.is_dir(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):
                for piece in os.scandir(folder.path):
                    with contextlib.suppress(FileNotFoundError):
                        found += piece.stat(follow_symlinks=False).st_size
    return found
