"""The files of one case: on a disk, or behind a network, which is a store in this process's memory."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import zlib
from pathlib import Path

import fsspec

from converter.portable.footers import end_of
from tests.faults.campaign.damaged_bases import LEASE, Base

_LONG_AGO = 1_700_000_000.0
"""So that a file that is written again has another time, however coarse the clock is."""


class Files:
    """The files of a base below a folder of a case, as they are now."""

    def __init__(self, base: Base, folder: Path, *, is_away: bool) -> None:
        self.base = base
        self.path = folder / "data set"
        self._memory = fsspec.filesystem("memory") if is_away else None
        self.url = f"memory://{folder.name}" if is_away else str(self.path)
        self._root = f"/{folder.name}"
        for name, data in base.files.items():
            is_sign = name.endswith((".intent", LEASE))
            self.put(name, data, None if is_sign else base.times.get(name, _LONG_AGO))

    def put(self, name: str, data: bytes | None, time: float | None = None) -> None:
        """Write a file, or remove it."""
        if self._memory is not None:
            path = f"{self._root}/{name}"
            if data is not None:
                self._memory.pipe_file(path, data)
            elif self._memory.exists(path):
                self._memory.rm_file(path)
            return
        place = self.path / name
        if data is None:
            place.unlink(missing_ok=True)
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        if time is not None:
            os.utime(place, (time, time))

    def get(self, name: str) -> bytes | None:
        """A file's bytes; None if it is gone."""
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):
            if self._memory is not None:
                content: bytes = self._memory.cat_file(f"{self._root}/{name}")
                return content
            return (self.path / name).read_bytes()
        return None

    def everything(self) -> dict[str, bytes | None]:
        """All files that are there."""
        if self._memory is not None:
            found = self._memory.find(self._root)
            return {name.removeprefix(f"{self._root}/"): self._memory.cat_file(name) for name in found}
        paths = [path for path in self.path.rglob("*") if not path.is_dir()]
        return {path.relative_to(self.path).as_posix(): path.read_bytes() for path in paths}

    def changed(self) -> set[str]:
        """The files of the base that are not as they were made."""
        return {name for name, data in self.base.files.items() if self.get(name) != data}

    def has_other_end(self, name: str) -> bool:
        """Whether a Parquet file has another size or another footer than it was made with."""
        data, whole = self.get(name), self.base.files[name]
        return data is None or len(data) != len(whole) or _crc_of_end(data) != _crc_of_end(whole)

    def has_other_pages(self, name: str) -> bool:
        """Whether the bytes before the footer differ."""
        whole = self.base.files[name]
        num_bytes = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
        return (self.get(name) or b"")[:num_bytes] != whole[:num_bytes]

    def close(self) -> None:
        """Remove what is in this process's memory."""
        if self._memory is not None and self._memory.exists(self._root):
            self._memory.rm(self._root, recursive=True)
        shutil.rmtree(self.path, ignore_errors=True)


def _crc_of_end(data: bytes) -> int:
    return zlib.crc32(end_of(io.BytesIO(data)))
