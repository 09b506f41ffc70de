"""Parts of remote files: which of them one request fetches, and the bytes that were fetched.

A request costs as much as some hundred kilobytes. So parts that are near each other are one request, with the gap
between them; at most a twenty-fifth of all bytes is wasted so, unless the parts are tiny. A request is never much
larger than 8 MB, so that several share the line.
"""

from __future__ import annotations

import bisect
import io
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

Data: TypeAlias = "bytes | pa.Buffer"
Range = tuple[int, int]
"""Start and stop (exclusive), in bytes."""

MAX_REQUEST_BYTES = 8 << 20
_MAX_WASTE = 0.04
FREE_GAP_BYTES = 64 << 10
"""A gap up to this size is cheaper than another request, on any network."""

_FEW_REQUESTS = 2
_TAIL_BYTES = 64 << 10
"""How much of a file's end is fetched for its footer: more than most footers have."""


def merge_ranges(wanted: Sequence[Range]) -> list[Range]:
    """The ranges to request so that all wanted bytes are fetched: in order, without overlaps.

    >>> merge_ranges([(0, 100), (100, 200), (5_000_000, 9_000_000)])
    [(0, 200), (5000000, 9000000)]
    """
    parts: list[list[int]] = []
    for start, end in sorted(wanted):
        if parts and start <= parts[-1][1]:
            parts[-1][1] = max(parts[-1][1], end)
        else:
            parts.append([start, end])
    budget = _MAX_WASTE * sum(end - start for start, end in parts)
    joined: set[int] = set()
    gaps = sorted((parts[at][0] - parts[at - 1][1], at) for at in range(1, len(parts)))
    for number, (gap, at) in enumerate(gaps):
        if gap > budget and (gap > FREE_GAP_BYTES or len(parts) - number <= _FEW_REQUESTS):
            break
        budget -= gap
        joined.add(at)
    merged: list[Range] = []
    for at, (start, end) in enumerate(parts):
        merged.append((merged.pop()[0] if at in joined else start, end))
    return [part for start, end in merged for part in _cut(start, end)]


def _cut(start: int, end: int) -> list[Range]:
    """Parts of equal size; larger than `MAX_REQUEST_BYTES` by up to a quarter if that saves a request."""
    count = max(1, -(-(end - start) // (MAX_REQUEST_BYTES + MAX_REQUEST_BYTES // 4)))
    edges = [start + (end - start) * number // count for number in range(count + 1)]
    return list(itertools.pairwise(edges))


class Fetched:
    """Parts of one file in memory."""

    def __init__(self, parts: Sequence[tuple[int, Data]]) -> None:
        self._starts = [start for start, _ in parts]
        self._buffers = [data if isinstance(data, pa.Buffer) else pa.py_buffer(data) for _, data in parts]

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(buffer.size for buffer in self._buffers)

    def slice(self, start: int, end: int) -> pa.Buffer:
        """These bytes of the file; without a copy if one request brought them.

        Raises:
            ValueError: they were not fetched.
        """
        slices, place = [], start
        while place < end:
            at = bisect.bisect_right(self._starts, place) - 1
            if at < 0 or place >= self._starts[at] + self._buffers[at].size:
                raise ValueError(f"byte {place} of the file is not there")
            first = place - self._starts[at]
            part = self._buffers[at].slice(first, min(end - place, self._buffers[at].size - first))
            slices.append(part)
            place += part.size
        return slices[0] if len(slices) == 1 else pa.py_buffer(b"".join(slices))


class PartialFile(io.RawIOBase):
    """A file for Arrow, parts of which are in memory; other parts are fetched."""

    def __init__(self, size: int, fetch: Callable[[int, int], Data], fetched: Fetched | None = None) -> None:
        self._size, self._fetch, self._fetched = size, fetch, fetched
        self._place = 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The place that is read next."""
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place."""
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def read(self, size: int | None = -1) -> Any:
        """The next bytes, fewer at the end."""
        start = self._place
        end = self._size if size is None or size < 0 else min(start + size, self._size)
        self._place = max(start, end)
        if start >= end:
            return b""
        if self._fetched is not None:
            try:
                return self._fetched.slice(start, end)
            except ValueError:
                pass
        if self._size - start <= _TAIL_BYTES:
            first = max(0, self._size - _TAIL_BYTES)
            self._fetched = Fetched([(first, self._fetch(first, self._size))])
            return self._fetched.slice(start, end)
        return self._fetch(start, end)
