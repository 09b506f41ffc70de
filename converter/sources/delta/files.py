"""The files of a version become row groups: small files whole, large ones by their footers."""

from __future__ import annotations

import dataclasses
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from converter.errors import SourceChangedError, SourceError
from converter.manifest import Manifest
from converter.parsed_footer import Formats
from converter.schema import Field, Schema
from converter.selection import Mask, Selection, select_some
from converter.sources.delta.columns import spread_over
from converter.sources.parquet.columns import Column, count_in, count_kinds
from converter.sources.parquet.fields import statistics_of
from converter.sources.parquet.footers import Footer, formats_of, look_at
from converter.storage.directory import Storage

_LARGE_FILE_BYTES = 32 << 20
"""A larger file is read row group by row group, so its footer must be read beforehand."""

_ABSOLUTE = re.compile(r"/|[A-Za-z][A-Za-z0-9+.-]*:/")
_NUM_SAMPLES, _NUM_LIST_SAMPLES = 4, 100
"""How many footers are read to estimate how large files are in memory, and whether lists have one length."""

_TYPICAL_RATIO = 3.0
"""Bytes in memory for each byte of a file, if no footer was read: a guess."""

RulesIn: TypeAlias = Callable[[Manifest], Mask]
"""Which files of a manifest may hold a wanted row."""


def place_files(storage: Storage, paths: Sequence[str], described: str) -> tuple[Storage, list[str]]:
    """The folder above all of the files, and their names below it. A shallow clone names files of another table."""
    if not any(_ABSOLUTE.match(path) for path in paths):
        return storage, [unquote(path) for path in paths]
    full = []
    for path in paths:
        below = storage.path_of(path) if _ABSOLUTE.match(path) else posixpath.join(storage.path(), unquote(path))
        if below is None:
            raise SourceError(
                f"{described[0].upper()}{described[1:]} has files on another store: {path}. Convert a DataFrame of it "
                "with make_spark_converter.",
                path=storage.url,
            )
        full.append(below)
    common = posixpath.commonpath([posixpath.dirname(path) for path in full])
    return storage.at(common), [posixpath.relpath(path, common) for path in full]


class TableFiles:
    """The files of a version as row groups."""

    def __init__(self, root: Storage, names: Sequence[str], actions: pa.Table, remedy: str) -> None:
        self.root, self.names, self.remedy = root, names, remedy
        self.num_bytes = actions["size_bytes"].to_numpy().astype(np.int64)
        counts = actions["num_records"].to_numpy(zero_copy_only=False)
        self.is_whole: Mask = ~np.isnan(counts.astype(np.float64)) & (self.num_bytes <= _LARGE_FILE_BYTES)
        self.is_closed: Mask = np.zeros(len(names), np.bool_)
        self.num_records = np.nan_to_num(counts.astype(np.float64)).astype(np.int64)
        self.row_group_file: npt.NDArray[np.int64]
        self.row_group_rows: npt.NDArray[np.int64]
        self.row_group_bytes: npt.NDArray[np.int64]
        self.row_group_index: npt.NDArray[np.int64]
        self.formats: Formats | None = None

    def leave_closed(self, rules_in: RulesIn, columns: Sequence[Column], fields: Sequence[Field]) -> None:
        """Leave out the files that hold no wanted row, if the log counts their rows."""
        every = np.arange(len(self.names), dtype=np.int64)
        unopened = Manifest(
            schema=Schema(tuple(fields)),
            file_names=tuple(self.names),
            file_bytes=self.num_bytes,
            row_group_file=every,
            row_group_rows=self.num_records,
            row_group_bytes=self.num_bytes,
            fingerprint="",
            num_rows=int(self.num_records.sum()),
            float_dtype="float64",
            statistics=statistics_of(columns, fields),
            source_columns={column.name: column.source for column in columns},
        )
        self.is_closed = ~rules_in(unopened) & (self.num_records > 0)
        self.is_whole |= self.is_closed

    def look_into(self, columns: Sequence[Column], *, has_lists: bool) -> None:
        """Read the footers of large files and of a sample of the others, and cut all files into row groups."""
        files = np.arange(len(self.names))
        small = files[self.is_whole]
        opened = files[self.is_whole & ~self.is_closed]
        few = spread_over(opened, _NUM_SAMPLES)
        samples = np.union1d(few, spread_over(opened, _NUM_LIST_SAMPLES)) if has_lists else few
        large = files[~self.is_whole]
        # Those that any columns need come first: by them texts of unknown length are counted.
        asked = list(dict.fromkeys([*large.tolist(), *few.tolist(), *samples.tolist()]))
        footers = dict(zip(asked, self._read(asked), strict=True))
        self._tell(columns, list(footers.values()))
        self.formats = formats_of(footers.values())
        # The same sample for any columns, because sizes in memory make the windows of a shuffle.
        sampled = [footers[number] for number in few.tolist()]
        in_files = sum(footer.num_bytes for footer in sampled)
        ratio = sum(int(footer.row_group_bytes.sum()) for footer in sampled) / in_files if in_files else _TYPICAL_RATIO
        parts = []
        for number in large.tolist():
            footer = footers[number]
            of_file = np.full(len(footer.row_group_rows), number)
            parts.append((of_file, footer.row_group_rows, footer.row_group_bytes, np.arange(len(of_file))))
        whole_bytes = (self.num_bytes[self.is_whole] * ratio).astype(np.int64)
        parts.append((small, self.num_records[self.is_whole], whole_bytes, np.full(len(small), -1)))
        of_file, rows, num_bytes, index = (np.concatenate(part).astype(np.int64) for part in zip(*parts, strict=True))
        order = np.argsort(of_file, kind="stable")
        order = order[rows[order] > 0]
        self.row_group_file, self.row_group_rows = of_file[order], rows[order]
        self.row_group_bytes, self.row_group_index = num_bytes[order], index[order]

    def _read(self, numbers: Sequence[int]) -> list[Footer]:
        try:
            footers = look_at(self.root, [self.names[number] for number in numbers], remedy=self.remedy)
        except SourceError as error:
            if error.__cause__ is None or isinstance(error.__cause__, (PermissionError, TimeoutError)):
                # The file has not changed, but cannot be read.
                raise
            raise SourceChangedError(str(error), path=error.path) from error
        for number, footer in zip(numbers, footers, strict=True):
            if footer.num_bytes != self.num_bytes[number]:
                path = f"{self.root.url}/{footer.name}"
                raise SourceChangedError(
                    f"{path} has {footer.num_bytes} bytes, expected {self.num_bytes[number]} by the log. {self.remedy}",
                    path=path,
                )
        return footers

    @staticmethod
    def _tell(columns: Sequence[Column], footers: Sequence[Footer]) -> None:
        """Note how long lists are. What the log counted stays as it is."""
        counts = count_kinds(footers)
        for column in columns:
            if column.source.values is None:
                seen = dataclasses.replace(column)
                count_in(seen, counts)
                column.lengths, column.has_null_elements = seen.lengths, seen.has_null_elements

    def select(self, left: Mapping[str, Mask]) -> Selection | None:
        """The rows that are neither deleted nor in a file that is left out; None if that is all rows.

        Rows beyond the end of a mask are live.
        """
        is_closed = self.is_closed[self.row_group_file]
        if not left and not is_closed.any():
            return None
        masks: dict[int, Mask] = {}
        folder = self.root.path().rstrip("/")
        names = enumerate(self.names) if left else ()
        numbers = {f"{folder}/{name}".strip("/"): number for number, name in names}
        for path, kept in left.items():
            number = numbers[path]
            first, stop = np.searchsorted(self.row_group_file, [number, number + 1])
            start = 0
            for group in range(first, stop):
                num_rows = int(self.row_group_rows[group])
                if not is_closed[group]:
                    mask = np.ones(num_rows, np.bool_)
                    part = kept[start : start + num_rows]
                    mask[: len(part)] = part
                    masks[group] = mask
                start += num_rows
        return select_some(np.where(is_closed, 0, self.row_group_rows), masks)
