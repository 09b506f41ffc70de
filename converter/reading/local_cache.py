"""What was fetched, kept on this host's own disk: shared by its processes, bounded, complete or absent.

    <local_cache_dir>/converter-local-v1/.owner                     ownership marker
    <local_cache_dir>/converter-local-v1/.used                      bytes used or promised; locked while one decides
    <local_cache_dir>/converter-local-v1/<fingerprint>/.held        locked by whoever reads these rows
    <local_cache_dir>/converter-local-v1/<fingerprint>/.lock-<n>    locked while a piece is fetched, by one
    <local_cache_dir>/converter-local-v1/<fingerprint>/<piece>      the wanted columns of a row group, or a footer

A piece appears by a rename, whole. What does not fit is fetched again each time:
nothing of the rows that are being read makes room, because in the next epoch it
would be wanted again. Rows that nobody holds make room, the oldest first. Locks are
the kernel's, so a process that is killed leaves none.

All processes count together. Bytes are promised before they are written, by a half
piece with their number in its name, so that a listing finds what the counter says;
it may say more, after a deletion, and nothing is refused before a listing.
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
from typing import BinaryIO
from urllib.parse import unquote

import pyarrow as pa

from converter.errors import CacheError, CacheNotOwnedError
from converter.storage.ranges import Data
from converter.storage.requests import GivenUpError

logger = logging.getLogger(__name__)

DIRECTORY = "converter-local-v1"
_OWNER = ".owner"
_OWNER_BYTES = b'{"package": "spark-tensor-converter", "format_version": 1}\n'
_USED = ".used"
_USED_NUM_BYTES = 21
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_PART = re.compile(r"\.[0-9a-f]{32}(?:-(\d+))?\.part")
"""Without a number of bytes it is of an older version of this package."""

_OURS = re.compile(rf"\.held|\.lock-\d+|{_PART.pattern}|(rows|footer)-\d+-[0-9a-f]{{16}}")
_FREE_SHARE = 0.9
"""Of what is free on the disk, where nobody says how much may be used."""

_NUM_LOCKS = 64
_LOOK_SECONDS = 0.05


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
        self._has_listed = False
        self._is_full = False
        held = self._hold()
        weakref.finalize(self, os.close, held)

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
            if _is_at(held, path):
                return held
            os.close(held)

    def get(
        self,
        name: str,
        sizes: Sequence[int],
        fetch: Callable[[], Sequence[Data]],
        given_up: threading.Event | None = None,
        *,
        anew: bool = False,
    ) -> tuple[list[pa.Buffer], bool]:
        """A piece's parts, of these sizes: from the disk, else from `fetch`, and then kept; whether from the disk.

        What is on the disk is not believed where it is fetched `anew`, and gives way if it is another.
        """
        found = self._read(name, sizes)
        if found is not None and not anew:
            return found, True
        with self._fetching(name, given_up):
            found = self._read(name, sizes)
            if found is not None and not anew:
                return found, True
            fetched = fetch()
            parts = [part if isinstance(part, pa.Buffer) else pa.py_buffer(part) for part in fetched]
            if found is not None and parts != found:
                logger.warning("%s was damaged, and is fetched again.", os.path.join(self._folder, name))
                # Another user's may be theirs to remove: then it stays.
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self._folder, name))
                    found = None
            if found is None and [part.size for part in parts] == list(sizes):
                self._keep(name, fetched)
            return parts, False

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
            _unlock(lock)

    def _keep(self, name: str, parts: Sequence[Data]) -> None:
        if self._is_full:
            return
        num_bytes = sum(map(len, parts))
        aside = os.path.join(self._folder, f".{uuid.uuid4().hex}-{num_bytes}.part")
        try:
            file = self._reserve(aside, num_bytes)
            if file is None:
                return
            with file:
                file.writelines(parts)
                file.flush()
                # A network's filesystem says at a close what it could not write: before the piece has its name.
                os.close(os.dup(file.fileno()))
                # Nobody lists meanwhile, who would perhaps see neither name. And before its own lock ends: without
                # it, this is the half piece of a process that was killed.
                with _locked(self.root, fcntl.LOCK_SH):
                    os.rename(aside, os.path.join(self._folder, name))
        except OSError as error:
            self._say_full(f"{error.strerror or error}")
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                logger.debug("Could not keep %s: %s", name, error)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(aside)

    def _reserve(self, aside: str, num_bytes: int) -> BinaryIO | None:
        """The half piece, empty and locked, and its bytes counted; None where there is no room for them."""
        with _locked(self.root, fcntl.LOCK_EX) as counter:
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
            # Counted first: who is killed in between leaves a number that is too high, which the next listing mends.
            _write_used(counter, used + num_bytes)
            file = open(aside, "xb")  # noqa: SIM115 (it outlives this lock)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except BaseException:
                file.close()
                raise
            return file

    def _limit(self, used: int) -> int:
        if self._max_bytes is not None:
            return self._max_bytes
        return int((shutil.disk_usage(self.root).free + used) * _FREE_SHARE)

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


def remove_unheld(root: str, *, least_bytes: int | None = None, dry_run: bool = False) -> tuple[int, int]:
    """Remove rows that no process holds: all, or the oldest until so many bytes are free; files and bytes removed."""
    num_files = num_bytes = 0
    folders = []
    for entry in _entries(root):
        with contextlib.suppress(FileNotFoundError):
            if entry.is_dir(follow_symlinks=False) and _FINGERPRINT.fullmatch(entry.name):
                folders.append((entry.stat(follow_symlinks=False).st_mtime, entry.path))
    for _, folder in sorted(folders):
        if least_bytes is not None and num_bytes >= least_bytes:
            break
        # Another user's is theirs to remove.
        with contextlib.suppress(FileNotFoundError, BlockingIOError, PermissionError):
            held = os.open(os.path.join(folder, ".held"), os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Under the lock, so that nobody begins to hold what goes: who opens it next looks whether it is there.
                for piece in _entries(folder):
                    if not _OURS.fullmatch(piece.name):
                        continue
                    size = piece.stat(follow_symlinks=False).st_size
                    num_files, num_bytes = num_files + 1, num_bytes + size
                    if not dry_run:
                        os.unlink(piece.path)
                if not dry_run:
                    # Unless a stranger's file stands there.
                    with contextlib.suppress(OSError):
                        os.rmdir(folder)
            finally:
                _unlock(held)
    return num_files, num_bytes


@contextlib.contextmanager
def _locked(root: str, kind: int) -> Iterator[int]:
    """The counter's file, locked among all processes of this host: for a decision or a rename, never for data."""
    path = os.path.join(root, _USED)
    while True:
        try:
            # Another user's may be opened, and not created, where the folder is sticky.
            counter = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            counter = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            # Whoever may write into the root may count.
            with contextlib.suppress(OSError):
                os.fchmod(counter, os.stat(root).st_mode & 0o666)
        try:
            fcntl.flock(counter, kind)
            if _is_at(counter, path):
                yield counter
                return
        finally:
            _unlock(counter)


def _is_at(file: int, path: str) -> bool:
    """Whether an open file still has its name: somebody may have removed it with its folder."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), os.stat(path))
    return False


def _unlock(file: int) -> None:
    # Not by closing it alone: a process that was forked meanwhile has it open too.
    fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def _read_used(counter: int) -> int | None:
    """None where it was never written, or is damaged."""
    found = os.pread(counter, _USED_NUM_BYTES + 1, 0)
    return int(found) if re.fullmatch(rb"\d{20}\n", found) else None


def _write_used(counter: int, used: int) -> None:
    os.pwrite(counter, b"%020d\n" % used, 0)


def _list_used(root: str) -> int:
    """Bytes that are used or promised, found anew, by who holds the counter; half pieces of the dead go."""
    found = len(_OWNER_BYTES) + _USED_NUM_BYTES
    for folder in _entries(root):
        if folder.is_dir(follow_symlinks=False):
            for piece in _entries(folder.path):
                part = _PART.fullmatch(piece.name)
                try:
                    if part is None:
                        found += piece.stat(follow_symlinks=False).st_size
                    elif not _remove_if_abandoned(piece.path):
                        found += int(part[1] or 0)
                except FileNotFoundError:
                    # Somebody swept, or let go of it.
                    continue
    return found


def _remove_if_abandoned(part: str) -> bool:
    """Whether this half piece was of a process that is no more."""
    # Another user's is counted, and theirs to remove.
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
    """What lies there, before any of it is changed; nothing where the folder is gone."""
    with contextlib.suppress(FileNotFoundError):
        return list(os.scandir(folder))
    return []
