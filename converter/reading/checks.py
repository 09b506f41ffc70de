"""Checks that a file is the one in the manifest; if not, raises an error that names the file.

Nothing is decoded here. Every reader opens files and names errors through a `DataFile`.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from converter.errors import CacheCorruptError, ConverterError, ReadError, SourceChangedError, SourceError
from converter.manifest import Manifest
from converter.parsed_footer import ParsedFooter, parse_end
from converter.places import Level, Place, refuse_encrypted
from converter.portable.footers import end_of
from converter.reading.calendars import is_julian
from converter.storage.directory import Storage
from converter.storage.ranges import Data, Fetched, PartialFile, Range
from converter.storage.requests import GivenUpError
from converter.storage.urls import file_url

_CUT_TEXT_BYTES = 64
"""Some writers shorten the bound of a text that is longer than this."""


class StoredFooter(NamedTuple):
    """The footer of a remote file as its manifest holds it."""

    metadata: pq.FileMetaData
    parsed: ParsedFooter

    heads: npt.NDArray[np.uint32]
    """`FileEnd.heads` as `(row groups, columns)`."""


@dataclass(frozen=True, slots=True, eq=False)
class DataFile:
    """One file of a dataset, as the manifest describes it."""

    storage: Storage
    manifest: Manifest
    number: int
    """In the manifest."""

    @property
    def name(self) -> str:
        """Relative to the dataset's folder."""
        return self.manifest.file_names[self.number]

    @property
    def path(self) -> str:
        """As errors show it."""
        return file_url(self.storage.url, self.name)

    @property
    def num_bytes(self) -> int:
        """The size that the manifest says."""
        return int(self.manifest.file_bytes[self.number])

    def read(self, part: Range, given_up: threading.Event | None = None) -> Data:
        """Some bytes of a remote file, in one request.

        Raises:
            SourceChangedError: the file ends before.
            OSError: as `Storage.read_part`.
        """
        data = self.storage.read_part(self.name, *part, given_up)
        num_wanted = part[1] - part[0]
        if len(data) != num_wanted:
            self.check_stamp(given_up)
            if self.manifest.file_stamps is not None and self.manifest.file_stamps[self.number]:
                raise OSError(f"{len(data)} bytes came, expected {num_wanted}")
            raise self.changed(f"ends before byte {part[1]}: it was cut after it was written")
        return data

    @contextlib.contextmanager
    def open_partial(self, fetched: Fetched) -> Iterator[pa.NativeFile]:
        """The file for Arrow; bytes that are not in `fetched` are requested.

        Raises:
            pyarrow.ArrowInvalid: the bytes are damaged. Arrow raises an OSError then too, as a store that fails does.
        """
        failures: list[OSError] = []

        def fetch(start: int, end: int) -> Data:
            try:
                return self.read((start, end))
            except OSError as error:
                failures.append(error)
                raise

        try:
            yield pa.PythonFile(PartialFile(self.num_bytes, fetch, fetched), mode="r")
        except OSError as error:
            if failures:
                raise
            raise pa.ArrowInvalid(str(error)) from error

    def stored_footer(self) -> StoredFooter | None:
        """The footer if the manifest holds it; None on a local disk, where reading it costs nothing.

        It saves one request for each remote file; the heads notice a replaced file, which the footer would have.

        Raises:
            CacheCorruptError: the manifest contradicts itself.
        """
        manifest = self.manifest
        if self.storage.is_local or manifest.file_ends is None:
            return None
        end, num_leaves = manifest.file_ends[self.number], len(manifest.schema)
        first, stop = np.searchsorted(manifest.row_group_file, [self.number, self.number + 1])
        try:
            parsed = parse_end(end.footer)
            group_rows = manifest.row_group_rows[first:stop].tolist()
            if len(parsed.leaf_types) != num_leaves or list(parsed.row_group_rows) != group_rows:
                raise ValueError("it is of other columns or rows")
            metadata = pq.read_metadata(pa.BufferReader(end.footer))
            return StoredFooter(metadata, parsed, end.heads_of(int(stop - first), num_leaves))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise CacheCorruptError(
                f"The manifest does not hold the footer of {self.path} ({error}). {manifest.remedy}", path=self.path
            ) from error

    def check(self, opened: pa.NativeFile) -> ParsedFooter:
        """The footer of the opened file, whose size, digest and stamp are compared with the manifest.

        Raises:
            SourceChangedError: the file has another size or another footer than the manifest says.
            SourceError: it has encrypted columns.
            ValueError: the footer is damaged.
        """
        manifest = self.manifest
        if opened.size() != self.num_bytes:
            raise self.changed(
                f"has {opened.size()} bytes, expected {self.num_bytes}: it was changed or cut after it was written"
            )
        end = end_of(opened)
        if manifest.file_footers is not None and zlib.crc32(end) != manifest.file_footers[self.number]:
            raise self.changed(
                "has another footer than it was written with: it was replaced by a file of the same size, or is damaged"
            )
        opened.seek(0)
        if self.storage.is_local:
            self.check_stamp()
        footer = parse_end(end)
        refuse_encrypted(self.path, footer)
        return footer

    def check_stamp(self, given_up: threading.Event | None = None) -> None:
        """Raise SourceChangedError if the file was written again after the converter was made.

        For a remote file this is a request, made after the data arrived: it vouches for them.
        """
        stamps = self.manifest.file_stamps
        # 0: the store has no stamps.
        if stamps is not None and (self.storage.look(self.name, given_up)[1] or 0) != stamps[self.number]:
            raise self.written_again()

    def check_bounds(self, metadata: pq.FileMetaData, footer: ParsedFooter, schema: pa.Schema) -> None:
        """Raise SourceChangedError if the footer contradicts the column bounds in the table's log.

        The log has no digest of a file. A file in its place may have as many bytes and rows, but hardly the same
        bounds. The log's bounds may be wider, or cover live rows only; they never lie to one side of the footer's.
        """
        compared_columns = self.manifest.compared_columns
        level = Level(schema if compared_columns else ())
        for name, column in compared_columns.items():
            place = column.find(level)
            if place is None or place.field.type != column.arrow_type or is_julian(metadata, place):
                continue
            log_bounds = [None if bounds is None else bounds[self.number] for bounds in (column.least, column.most)]
            log_range = [None if bound is None else _comparable(bound) for bound in log_bounds]
            footer_range = _range_in_footer(footer, place)
            if None in log_range or footer_range is None:
                continue
            (log_least, log_most), (least, most) = log_range, footer_range
            if (least < log_least and most < log_most) or (least > log_least and most > log_most):
                raise self.changed(
                    f"has values of {name!r} from {least!s:.80} to {most!s:.80}, expected {log_least!s:.80} to "
                    f"{log_most!s:.80} by the table's log: it was replaced"
                )

    def written_again(self) -> SourceChangedError:
        """The error for a file that changed after the converter was made."""
        return self.changed("was written again after the converter was made")

    def rows_changed(self, row_group: int, num_rows: int) -> SourceChangedError:
        """The error for a row group that has another number of rows than the manifest says."""
        num_expected = self.manifest.row_group_rows[row_group]
        return self.changed(f"has {num_rows} rows, expected {num_expected}: the file was replaced")

    def changed(self, how: str) -> SourceChangedError:
        """The error for a file that is not what the manifest says; `how` continues its path."""
        return SourceChangedError(f"{self.path} {how}. {self.manifest.remedy}", path=self.path)

    @contextlib.contextmanager
    def named_errors(self, row_group: int) -> Iterator[None]:
        """Make errors inside name this file and a row group of it (a number in the dataset).

        Raises:
            SourceChangedError: the file is gone.
            ReadError: the row group cannot be decoded, or the store cannot be reached.
        """
        try:
            yield
        except FileNotFoundError as error:
            remedy = (
                "Was the converter deleted, or is this another machine than the one that wrote the cache? A cache on a "
                "local disk can be read on its own machine only; choose a shared cache_dir."
            )
            if self.manifest.source_columns is not None:
                remedy = self.manifest.remedy
            raise SourceChangedError(f"{self.path} is not there. {remedy}", path=self.path) from error
        except SourceError as error:
            if error.path is not None:
                raise
            raise type(error)(f"{error} (Found in {self.path}.)", column=error.column, path=self.path) from error
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, (ConverterError, GivenUpError)):
                raise
            index = max(self.manifest.row_group_in_file(row_group), 0)
            is_unreachable = not self.storage.is_local and type(error) in (OSError, TimeoutError)
            # Arrow's messages may have several lines.
            cause = " ".join(str(error).split()).rstrip(".")
            if "would result in out of bounds" in cause:
                raise SourceError(
                    f"Row group {index} of {self.path} has times that microseconds cannot hold ({cause}). Leave them "
                    "out with columns=…, or replace them with Spark, and convert the DataFrame.",
                    path=self.path,
                ) from error
            if is_unreachable or isinstance(error, PermissionError):
                happened = f"fetched: {cause}."
            elif self.manifest.source_columns is None:
                happened = f"decoded: {cause}. The file is damaged. {self.manifest.remedy}"
            else:
                happened = (
                    f"decoded: {cause}. The file is damaged, or pyarrow {pa.__version__} cannot read it. Restore it "
                    "from a copy, write it again with another writer, or leave it out."
                )
            message = f"Row group {index} of {self.path} cannot be {happened}"
            raise ReadError(message, path=self.path, row_group=index) from error


def _range_in_footer(footer: ParsedFooter, place: Place) -> tuple[Any, Any] | None:
    """A column's least and largest value by its file's footer; None if the footer has no usable bounds."""
    kind, pairs = place.field.type, []
    for row_group in range(len(footer.row_group_rows)):
        bounds = footer.bounds(row_group, place.leaf, kind)
        if bounds is None:
            return None
        pairs.append([_comparable(bound) for bound in bounds])
    # Spark writes NaN as the maximum, which hides the largest number.
    if not pairs or (pa.types.is_floating(kind) and np.isnan(pairs).any()):
        return None
    least, most = min(least for least, _ in pairs), max(most for _, most in pairs)
    if isinstance(least, str) and any(len(text.encode()) >= _CUT_TEXT_BYTES for text in (least, most)):
        return None
    return least, most


def _comparable(bound: pa.Scalar) -> Any:
    """A value that can be compared: the count for days and times, which may lie beyond Python's."""
    return bound.value if pa.types.is_temporal(bound.type) else bound.as_py()


def place_of_row(storage: Storage, manifest: Manifest, row: int) -> str:
    """Where a row is, in words: its number in the dataset, in its file, and the file."""
    row_group = int(np.searchsorted(np.cumsum(manifest.row_group_rows), row, side="right"))
    file = int(manifest.row_group_file[row_group])
    first = int(manifest.row_group_rows[: np.searchsorted(manifest.row_group_file, file)].sum())
    return f"row {row:,} (row {row - first:,} of {file_url(storage.url, manifest.file_names[file])})"
