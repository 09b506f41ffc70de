"""A file is what the manifest says, or an error that names it."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from converter.errors import CacheCorruptError, ConverterError, ReadError, SourceChangedError, SourceError
from converter.manifest import Manifest
from converter.parsed_footer import ParsedFooter, parse_end
from converter.places import Level, refuse_encrypted
from converter.portable.footers import end_of, head_of
from converter.reading.calendars import is_julian
from converter.storage.directory import Storage
from converter.storage.ranges import Data, Fetched, Range
from converter.storage.requests import GivenUpError

_CUT_TEXT_BYTES = 64
"""Of a longer text some writers keep a part as its bound in the footer."""


def read_part(
    storage: Storage, manifest: Manifest, file: int, part: Range, given_up: threading.Event | None = None
) -> Data:
    """Some bytes of a remote file, in one request.

    Raises:
        SourceChangedError: the file ends before.
        OSError: as `Storage.read_part`.
    """
    name = manifest.file_names[file]
    data = storage.read_part(name, *part, given_up)
    if len(data) != part[1] - part[0]:
        check_stamp(storage, manifest, file, given_up)
        if manifest.file_stamps is not None and manifest.file_stamps[file]:
            raise OSError(f"{len(data)} bytes came where {part[1] - part[0]} were asked for")
        path = f"{storage.url}/{name}"
        raise SourceChangedError(
            f"{path} ends before byte {part[1]}: it was cut after it was written. {manifest.remedy}", path=path
        )
    return data


@dataclass(frozen=True, slots=True)
class KnownFooter:
    """The footer of a remote file as its manifest holds it."""

    metadata: pq.FileMetaData
    footer: ParsedFooter

    heads: npt.NDArray[np.uint32]
    """`FileEnd.heads` as `(row groups, columns)`."""

    path: str
    remedy: str

    def check_heads(self, index: int, leaves: Sequence[int], fetched: Fetched) -> None:
        """Raise SourceChangedError if columns of a row group do not begin as the manifest says.

        A column's first page says its own checksum there: so another file in the place of this one is noticed.
        """
        for leaf in leaves:
            chunk = self.footer.chunk(index, leaf)
            start, num_bytes = head_of(chunk.data_page_offset, chunk.stored_bytes)
            if zlib.crc32(fetched.slice(start, start + num_bytes)) != self.heads[index, leaf]:
                raise SourceChangedError(
                    f"{self.path} holds other rows than were written there: it was replaced, or is damaged. "
                    f"{self.remedy}",
                    path=self.path,
                )


def known_footer(storage: Storage, manifest: Manifest, file: int) -> KnownFooter | None:
    """A file's footer if the manifest holds it; None on a local disk, where one costs nothing to read.

    Raises:
        CacheCorruptError: the manifest contradicts itself.
    """
    if storage.is_local or manifest.file_ends is None:
        return None
    end, num_leaves, path = manifest.file_ends[file], len(manifest.schema), f"{storage.url}/{manifest.file_names[file]}"
    first, last = np.searchsorted(manifest.row_group_file, [file, file + 1])
    try:
        footer = parse_end(end.footer)
        if (
            len(footer.leaf_types) != num_leaves
            or list(footer.row_group_rows) != manifest.row_group_rows[first:last].tolist()
        ):
            raise ValueError("it is of other columns or rows")
        metadata = pq.read_metadata(pa.BufferReader(end.footer))
        return KnownFooter(metadata, footer, end.heads_of(int(last - first), num_leaves), path, manifest.remedy)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CacheCorruptError(
            f"The manifest does not hold the footer of {path} ({error}). {manifest.remedy}", path=path
        ) from error


def check_file(storage: Storage, manifest: Manifest, file: int, opened: pa.NativeFile) -> ParsedFooter:
    """The footer of an open data file.

    Raises:
        SourceChangedError: the file has another size or another footer than the manifest says.
        SourceError: it has encrypted columns.
        ValueError: the footer is damaged.
    """
    path = f"{storage.url}/{manifest.file_names[file]}"
    if opened.size() != manifest.file_bytes[file]:
        raise SourceChangedError(
            f"{path} has {opened.size()} bytes instead of {manifest.file_bytes[file]}: it was changed or cut after it "
            f"was written. {manifest.remedy}",
            path=path,
        )
    end = end_of(opened)
    if manifest.file_footers is not None and zlib.crc32(end) != manifest.file_footers[file]:
        raise SourceChangedError(
            f"{path} has another footer than it was written with: it was replaced by a file of the same size, or is "
            f"damaged. {manifest.remedy}",
            path=path,
        )
    opened.seek(0)
    if storage.is_local:
        check_stamp(storage, manifest, file)
    footer = parse_end(end)
    refuse_encrypted(path, footer)
    return footer


def check_stamp(storage: Storage, manifest: Manifest, file: int, given_up: threading.Event | None = None) -> None:
    """Raise SourceChangedError if a file was written again since it was looked at.

    Behind a network that is a request of its own, made once the bytes are there: it says what they were.
    """
    if manifest.file_stamps is None:
        return
    # 0: the store says none.
    if (storage.look(manifest.file_names[file], given_up)[1] or 0) != manifest.file_stamps[file]:
        raise written_again(storage, manifest, file)


def written_again(storage: Storage, manifest: Manifest, file: int) -> SourceChangedError:
    """The error of a file that is not the one that was looked at."""
    path = f"{storage.url}/{manifest.file_names[file]}"
    return SourceChangedError(f"{path} was written again since it was looked at. {manifest.remedy}", path=path)


def check_bounds(
    storage: Storage,
    manifest: Manifest,
    file: int,
    read: OwnFooter | KnownFooter,
    schema: pa.Schema,
) -> None:
    """Raise SourceChangedError if a file's footer contradicts what its table's log says of the file's values.

    The log has no digest of a file; another one may well have as many bytes and rows, and hardly the same bounds. Those
    of the log may be wider, or of the rows that are not deleted alone; never do both lie on one side of the footer's.
    """
    level = Level(schema if manifest.compared_columns else ())
    for name, column in manifest.compared_columns.items():
        place = column.find(level)
        if place is None or place.field.type != column.arrow_type or is_julian(read.metadata, place):
            continue
        # Days may be beyond Python's.
        is_counted = pa.types.is_temporal(column.arrow_type)
        bounds = [None if one is None else one[file] for one in (column.least, column.most)]
        said = [None if one is None else one.value if is_counted else one.as_py() for one in bounds]
        known = [
            read.footer.bounds(group, place.leaf, column.arrow_type) for group in range(len(read.footer.row_group_rows))
        ]
        if None in said or not known or None in known:
            continue
        values = [[one.value if is_counted else one.as_py() for one in both] for both in known if both is not None]
        if pa.types.is_floating(column.arrow_type) and np.isnan(values).any():
            # Spark takes NaN for the largest number, so how large the others are is not known.
            continue
        found = [min(least for least, _ in values), max(most for _, most in values)]
        if isinstance(found[0], str) and any(len(one.encode()) >= _CUT_TEXT_BYTES for one in found):
            continue
        if (found[0] < said[0] and found[1] < said[1]) or (found[0] > said[0] and found[1] > said[1]):
            path = f"{storage.url}/{manifest.file_names[file]}"
            raise SourceChangedError(
                f"{path} has values of {name!r} from {found[0]!s:.80} to {found[1]!s:.80}, and from {said[0]!s:.80} to "
                f"{said[1]!s:.80} by the table's log: it is another file than it was. {manifest.remedy}",
                path=path,
            )


def rows_changed(storage: Storage, manifest: Manifest, row_group: int, num_rows: int) -> SourceChangedError:
    """What to say of a file that has another number of rows than it had."""
    path = f"{storage.url}/{manifest.file_names[int(manifest.row_group_file[row_group])]}"
    return SourceChangedError(
        f"{path} has {num_rows} rows instead of {manifest.row_group_rows[row_group]}: it is another file than it was. "
        f"{manifest.remedy}",
        path=path,
    )


@contextlib.contextmanager
def named_read_errors(storage: Storage, manifest: Manifest, row_group: int) -> Iterator[None]:
    """Let what goes wrong with a row group be named.

    Raises:
        SourceChangedError: its file is gone.
        ReadError: it cannot be decoded, or its store cannot be reached.
    """
    name = manifest.file_names[int(manifest.row_group_file[row_group])]
    path = f"{storage.url}/{name}"
    try:
        yield
    except FileNotFoundError as error:
        said = (
            "Was the converter deleted, or is this machine another one than the one that wrote it? A cache on a local "
            "disk can be read on its own machine only; choose a shared cache_dir."
        )
        if manifest.source_columns is not None:
            said = manifest.remedy
        raise SourceChangedError(f"{path} is not there. {said}", path=path) from error
    except SourceError as error:
        if error.path is not None:
            raise
        raise type(error)(f"{error} (Found in {path}.)", column=error.column, path=path) from error
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, (ConverterError, GivenUpError)):
            raise
        index = max(manifest.row_group_in_file(row_group), 0)
        if not storage.is_local and type(error) in (OSError, PermissionError, TimeoutError):
            raise ReadError(
                f"Row group {index} of {path} cannot be fetched: {error}.", path=path, row_group=index
            ) from error
        raise ReadError(
            f"Row group {index} of {path} cannot be decoded: {error}. The file is damaged. {manifest.remedy}",
            path=path,
            row_group=index,
        ) from error


class OwnFooter(NamedTuple):
    """A footer that was read from its file."""

    metadata: pq.FileMetaData
    footer: ParsedFooter
