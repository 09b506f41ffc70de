"""Reuses the memory of large arrays, and limits how much memory readers take.

Reading needs a few large arrays, window after window, and new memory costs more than the copy into it. Arrow's pool
(mimalloc 3) keeps freed pages for a second, for each thread: 200 MB in use became 420 MB resident. So large arrays get
memory of our own. When the last view of an array ends, its memory serves the next array of about its size. Lent and
idle memory together stay close to the most that was lent at one time.

An array owns its memory: it is not used again while an array, a tensor or a view of either needs it.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

LARGE_BYTES = 4 << 20
"""Arrays of this size or more get memory of our own: large, so that there are few mappings."""

IS_SUPPORTED = hasattr(mmap, "MAP_ANONYMOUS")

_FIT = 1.5
"""Memory may be larger than its array by this factor: windows of whole row groups differ in size."""

SPARE = 9 / 8
"""Lent and idle memory may be more than was lent at one time by this factor.

An epoch's first window is read in two parts, and the first part is an eighth.
"""


class _Lent:
    """Owns the memory of one array."""

    def __init__(self, blocks: Blocks, block: mmap.mmap, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._returned, self._block = blocks.returned, block
        self.__array_interface__ = np.ndarray(shape, dtype, buffer=block).__array_interface__

    def __del__(self) -> None:
        # The garbage collector may call this while the lock is held, so it takes none.
        self._returned.append(self._block)


class Blocks:
    """Blocks of memory, lent to arrays or idle."""

    def __init__(self) -> None:
        self.returned: deque[mmap.mmap] = deque()
        self._lock = threading.Lock()
        self._idle: list[mmap.mmap] = []
        self._lent_bytes = self._most_lent_bytes = 0

    def new_array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """An array whose content is undefined, of at least `LARGE_BYTES`."""
        num_bytes = dtype.itemsize * math.prod(shape)
        with self._lock:
            self._take_back()
            fits = [block for block in self._idle if num_bytes <= len(block) <= _FIT * num_bytes]
            if fits:
                block = min(fits, key=len)
                self._idle.remove(block)
            else:
                # Four sizes between powers of two: windows of nearly one size then share memory.
                step = 1 << max(num_bytes.bit_length() - 3, mmap.PAGESIZE.bit_length())
                size = -(-num_bytes // step) * step
                self._give_back(size)
                try:
                    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                except OSError:
                    # The system may limit mappings. NumPy raises MemoryError if there is no memory.
                    return np.empty(shape, dtype)
                # The first touch of huge pages costs less.
                with contextlib.suppress(OSError, AttributeError):
                    block.madvise(mmap.MADV_HUGEPAGE)
            self._lent_bytes += len(block)
            self._most_lent_bytes = max(self._most_lent_bytes, self._lent_bytes)
        return np.asarray(_Lent(self, block, shape, dtype))

    def drop_idle(self) -> None:
        """Return idle memory to the system."""
        # The garbage collector may call this while this thread holds the lock. Then the memory stays idle.
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._take_back()
            self._idle.clear()
            self._most_lent_bytes = self._lent_bytes
        finally:
            self._lock.release()

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Lent bytes, and idle bytes."""
        # A signal's handler may ask while this thread holds the lock.
        if self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()
        return self._lent_bytes, sum(map(len, tuple(self._idle)))

    def _take_back(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                block = self.returned.popleft()
                self._lent_bytes -= len(block)
                self._idle.append(block)

    def _give_back(self, wanted_bytes: int) -> None:
        """Return the memory that was idle longest, until there is room for so many bytes more."""
        most = SPARE * max(self._most_lent_bytes, self._lent_bytes + wanted_bytes)
        spare = most - self._lent_bytes - wanted_bytes - sum(map(len, self._idle))
        while spare < 0 and self._idle:
            spare += len(self._idle.pop(0))


blocks = Blocks()


def _begin_anew() -> None:
    # Another thread of the parent may have held the lock.
    global blocks
    blocks = Blocks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def give_back_idle() -> None:
    """Return idle memory to the system, that of Arrow's pool too."""
    blocks.drop_idle()
    pa.default_memory_pool().release_unused()


def anonymous_bytes() -> int | None:
    """Resident memory of this process that belongs to no file; None if the system does not tell."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            _, resident, shared, *_ = file.read(256).split()
    except OSError:
        return None
    return (int(resident) - int(shared)) * mmap.PAGESIZE


class Room:
    """Keeps the memory of one reader's threads below a bound: Arrow's pool must release its idle pages in time.

    The pool keeps freed pages for a second: 250 MB in use became 570 MB resident. A release takes a millisecond, and
    touching released pages again takes 0.15 ms a MB. So pages are released only if the bound would be passed.
    """

    def __init__(self) -> None:
        self.most_bytes: int | None = None
        """The bound; None for no bound."""

        # A signal's handler may ask while this thread holds it.
        self._lock = threading.RLock()
        self._coming: dict[int, int] = {}
        self._before = anonymous_bytes()

    def look(self, num_bytes: int) -> None:
        """Announce how much this thread allocates until its next look, and release idle pages if that is too much."""
        if self.most_bytes is None or self._before is None:
            return
        with self._lock:
            self._coming[threading.get_ident()] = num_bytes
            if self._grown_bytes() + sum(self._coming.values()) > self.most_bytes:
                pa.default_memory_pool().release_unused()
                # What remains is in use. What exceeds the bound is the caller's: kept batches, or a model.
                self._before += max(0, self._grown_bytes() - self.most_bytes)

    def done(self) -> None:
        """Announce that this thread allocates nothing more for now."""
        with self._lock:
            self._coming.pop(threading.get_ident(), None)

    @property
    def grown_bytes(self) -> int | None:
        """By how much the process has grown since the reader was made, mapped files left out; None if unknown."""
        if self._before is None:
            return None
        with self._lock:
            return self._grown_bytes()

    def _grown_bytes(self) -> int:
        now = anonymous_bytes() or 0
        self._before = min(self._before or 0, now)
        return now - self._before
