"""The disk of a case, which may be full or read-only, and its clock, which may jump or stand still.

Where this process may mount, the disk is a small tmpfs in a mount namespace of its own, which ends with the process.
Elsewhere it is a folder, and the calls of the actors fail as they would there.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FINE, FULL, READ_ONLY = "fine", "full", "read-only"

_PAGE_BYTES = 4096
_CLONE_NEWNS = 0x20000
_MS_RDONLY, _MS_REMOUNT, _MS_REC, _MS_PRIVATE = 0x1, 0x20, 0x4000, 0x40000
_MNT_DETACH = 0x2
_TICK_SECONDS = 0.012
"""A file's time may be one tick of the kernel old."""

_WORLD_BYTES = 1 << 16
_libc = ctypes.CDLL(None, use_errno=True)


class World:
    """What the processes of a case share: the store's clock, and how the disk is where it cannot be mounted.

    The store's clock is the time of its files, which this machine gives them. Here it is a function of that time, so
    that it can jump: from some moments on it has another offset, or stands still.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _WORLD_BYTES)
        self._version = -1
        self._told: dict[str, Any] = {"disk": FINE, "pieces": [[0.0, 0.0, 1]]}
        self._write()

    def _write(self) -> None:
        text = json.dumps(self._told).encode()
        self._memory[8 : 12 + len(text)] = len(text).to_bytes(4, "little") + text
        self._version += 1
        self._memory[:8] = self._version.to_bytes(8, "little", signed=True)

    def _read(self) -> dict[str, Any]:
        version = int.from_bytes(self._memory[:8], "little", signed=True)
        if version != self._version:
            stop = 12 + int.from_bytes(self._memory[8:12], "little")
            self._told, self._version = json.loads(self._memory[12:stop]), version
        return self._told

    @property
    def disk(self) -> str:
        """How calls to the disk must fail."""
        return str(self._read()["disk"])

    @disk.setter
    def disk(self, how: str) -> None:
        self._told["disk"] = how
        self._write()

    def at(self, seconds: float) -> float:
        """The store's time of a moment."""
        start, base, rate = next(piece for piece in reversed(self._read()["pieces"]) if piece[0] <= seconds)
        return float(base + rate * (seconds - start))

    def now(self) -> float:
        """The store's time now."""
        return self.at(time.time())

    @property
    def stands_still(self) -> bool:
        """Whether the store's clock does."""
        return not self._read()["pieces"][-1][2]

    def set_clock(self, *, jump_seconds: float = 0.0, rate: int | None = None, is_right: bool = False) -> None:
        """Let the store's clock jump, stand still (rate 0) or go on (1), or be right again."""
        time.sleep(_TICK_SECONDS)
        pieces, real = self._told["pieces"], time.time()
        base = real if is_right else self.at(real) + jump_seconds
        pieces.append([real, base, pieces[-1][2] if rate is None else rate])
        self._write()
        time.sleep(_TICK_SECONDS)

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()


def may_mount() -> bool:
    """Take this process into a mount namespace of its own, if it may have one; whether it may mount there."""
    if _libc.unshare(_CLONE_NEWNS) or _libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        return False
    with tempfile.TemporaryDirectory() as folder:
        path = folder.encode()
        if _libc.mount(b"tmpfs", path, b"tmpfs", 0, None):
            return False
        _libc.umount2(path, _MNT_DETACH)
    return True


class Disk:
    """The disk that a cache is on."""

    def __init__(self, folder: Path, world: World, *, is_mounted: bool) -> None:
        self.folder, self._world, self._is_mounted = folder, world, is_mounted
        self.how = FINE

    def fill(self, free_pages: int | None, free_inodes: int | None) -> bool:
        """Leave so much; None leaves as much as there is. Whether it could be done."""
        if not self._is_mounted:
            self.how = self._world.disk = FULL
            return True
        status = os.statvfs(self.folder)
        num_bytes, inodes = 16 << 20, 4096
        if free_pages is not None:
            num_bytes = max(1, status.f_blocks - status.f_bfree + free_pages) * _PAGE_BYTES
        if free_inodes is not None:
            inodes = status.f_files - status.f_ffree + free_inodes
        is_done = self._remount(0, f"size={num_bytes},nr_inodes={inodes}")
        self.how = FULL if is_done else self.how
        return is_done

    def refuse_writes(self) -> bool:
        """Be read-only. Whether it could be done: not while a file is open for writing."""
        if not self._is_mounted:
            self._world.disk = READ_ONLY
        elif not self._remount(_MS_RDONLY, ""):
            return False
        self.how = READ_ONLY
        return True

    def mend(self) -> None:
        """Be as it was."""
        self.how = self._world.disk = FINE
        if self._is_mounted and not self._remount(0, "size=16m,nr_inodes=4096"):
            raise OSError(ctypes.get_errno(), "the disk of the case cannot be mended")

    def _remount(self, flags: int, options: str) -> bool:
        return not _libc.mount(b"tmpfs", str(self.folder).encode(), b"tmpfs", _MS_REMOUNT | flags, options.encode())


@contextlib.contextmanager
def open_disk(folder: Path, world: World, *, is_mounted: bool) -> Iterator[Disk]:
    """A disk at `folder` if it can be mounted, else in memory if this machine has such a folder."""
    if not is_mounted:
        in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else folder
        folder = Path(tempfile.mkdtemp(prefix="kill-", dir=in_memory))
    elif _libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, b"size=16m,nr_inodes=4096"):
        raise OSError(ctypes.get_errno(), "cannot mount", str(folder))
    try:
        yield Disk(folder, world, is_mounted=is_mounted)
    finally:
        if is_mounted:
            _libc.umount2(str(folder).encode(), _MNT_DETACH)
        else:
            shutil.rmtree(folder, ignore_errors=True)
