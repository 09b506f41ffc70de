"""Data files as they are now: checked against the manifest, opened once, decoded a row group at a time.

A column is undone when it is asked for, so that what was undone for the one before
it can be let go of: the next one's pages then land in memory that is still in the
cache. What Arrow must decode is decoded for all such columns at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from converter.columns import Array, Decoded, Nulls, check_fill, decode, has_fill, null_error
from converter.errors import ConverterError, ReadError, SourceChangedError
from converter.local_cache import LocalCache, piece_name
from converter.manifest import Manifest
from converter.pages import Chunk, PlainColumn, find_plain_column
from converter.ranges import Fetched, PartialFile, Range, at_once, merge_ranges
from converter.schema import Field
from converter.sources import executor
from converter.storage import Storage
from converter.stores import GivenUpError

_MAX_OPEN_FILES = 256
_MAX_KEPT_CHUNKS = 1 << 15
"""Of all open files: some 10 MB. Finding them anew takes 10 µs each."""


class DataFiles:
    """The files of a dataset, each opened once while it is in use; threads share it."""

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        fields: Sequence[Field],
        *,
        nulls: Nulls,
        verify_checksums: bool,
        local_cache: LocalCache | None = None,
    ) -> None:
        self.storage, self.manifest, self.nulls, self.verify_checksums = storage, manifest, nulls, verify_checksums
        self._local_cache = local_cache
        self.fields = {field.name: field for field in fields}
        names = manifest.schema.names
        places = manifest.column_indices or range(len(names))
        self.leaves = {field.name: places[names.index(field.name)] for field in fields}
        fills = {} if isinstance(nulls, str) else nulls
        self.fills = {
            field.name: check_fill(field, fills[field.name]) if field.name in fills else 0 for field in fields
        }
        self._lock = threading.Lock()
        self._open: OrderedDict[int, OpenFile] = OrderedDict()

    def row_groups(self, numbers: Sequence[int], given_up: threading.Event | None = None) -> list[RowGroup]:
        """Row groups by their numbers in the dataset; what of them lies behind a network is fetched at once.

        Raises:
            NullValueError: a column has nulls that no policy covers.
            SourceChangedError: a file is not what the manifest says.
            ReadError: a row group cannot be decoded, or its file not be reached.
        """
        if self.storage.is_local:
            return [self._row_group(number, None) for number in numbers]
        fetched = self._fetch(numbers, given_up)
        return [self._row_group(number, fetched[number]) for number in numbers]

    def _row_group(self, number: int, fetched: Fetched | None) -> RowGroup:
        with named_read_errors(self.storage, self.manifest, number):
            return RowGroup(self, number, self._open_file(int(self.manifest.row_group_file[number])), fetched)

    def _fetch(self, numbers: Sequence[int], given_up: threading.Event | None) -> dict[int, Fetched]:
        """The bytes of the wanted columns, row group by row group."""
        manifest, storage = self.manifest, self.storage
        missing = {int(manifest.row_group_file[number]): number for number in numbers}
        with self._lock:
            missing = {file: number for file, number in missing.items() if file not in self._open}

        def open_file(item: tuple[int, int]) -> None:
            with named_read_errors(storage, manifest, item[1]):
                self._open_file(item[0])

        at_once(open_file, list(missing.items()))
        if self._local_cache is not None:
            cache = self._local_cache
            return dict(zip(numbers, at_once(lambda one: self._fetch_kept(cache, one, given_up), numbers), strict=True))
        wanted = [(number, part) for number in numbers for part in self._ranges(number)]
        parts: dict[int, list[tuple[int, bytes]]] = {number: [] for number in numbers}
        fetched = at_once(lambda item: self._fetch_part(*item, given_up), wanted)
        for (number, (start, _)), data in zip(wanted, fetched, strict=True):
            parts[number].append((start, data))
        return {number: Fetched(found) for number, found in parts.items()}

    def _fetch_kept(self, cache: LocalCache, number: int, given_up: threading.Event | None) -> Fetched:
        """A row group's bytes, from this host's disk if they were fetched before."""
        ranges = self._ranges(number)
        footers, file = self.manifest.file_footers, int(self.manifest.row_group_file[number])
        name = piece_name("rows", number, (ranges, None if footers is None else int(footers[file])))

        def fetch() -> list[bytes]:
            return at_once(lambda part: self._fetch_part(number, part, given_up), ranges)

        parts = cache.get(name, [end - start for start, end in ranges], fetch, given_up)
        return Fetched([(start, part) for (start, _), part in zip(ranges, parts, strict=True)])

    def _ranges(self, number: int) -> list[Range]:
        file = self._open_file(int(self.manifest.row_group_file[number]))
        return merge_ranges(file.ranges(self.manifest.row_group_in_file(number)))

    def _fetch_part(self, number: int, part: Range, given_up: threading.Event | None) -> bytes:
        with named_read_errors(self.storage, self.manifest, number):
            name = self.manifest.file_names[int(self.manifest.row_group_file[number])]
            data = self.storage.read_part(name, *part, given_up)
            if len(data) != part[1] - part[0]:
                raise OSError(f"{len(data)} bytes came where {part[1] - part[0]} were asked for")
            return data

    def open_footer(self, file: int) -> pa.NativeFile:
        """A data file, to read its footer from."""
        manifest, storage, name = self.manifest, self.storage, self.manifest.file_names[file]
        if self._local_cache is None or manifest.file_footers is None:
            # A footer is known by its digest, so that no request is needed for the size.
            return storage.open_parquet(name, None if manifest.file_footers is None else int(manifest.file_bytes[file]))
        cache, digest = self._local_cache, int(manifest.file_footers[file])

        def fetch(start: int, end: int) -> bytes:
            piece = piece_name("footer", file, (start, end, digest))
            (part,) = cache.get(piece, [end - start], lambda: [storage.read_part(name, start, end)])
            return bytes(part)

        return pa.PythonFile(PartialFile(int(manifest.file_bytes[file]), fetch), mode="r")

    def _open_file(self, file: int) -> OpenFile:
        name = self.manifest.file_names[file]
        identity = self.storage.identity(name)
        with self._lock:
            found = self._open.get(file)
            if found is not None and identity is not None:
                if found.identity == identity:
                    self._open.move_to_end(file)
                    return found
                # Not what was mapped: the mapping may end where the file now does.
                del self._open[file]
            elif found is not None and not self.storage.is_local:
                self._open.move_to_end(file)
                return found
        opened = OpenFile(self, file)
        with self._lock:
            self._open[file] = opened
            while len(self._open) > _MAX_OPEN_FILES:
                self._open.popitem(last=False)
        return opened

    def may_keep_chunks(self) -> bool:
        """Whether there is room for what is known of another row group."""
        with self._lock:
            return sum(file.num_kept_chunks for file in self._open.values()) < _MAX_KEPT_CHUNKS


class OpenFile:
    """A data file whose footer was read once; on a local disk it is mapped into memory."""

    def __init__(self, files: DataFiles, file: int) -> None:
        self._storage, self._name = files.storage, files.manifest.file_names[file]
        self.verify_checksums = files.verify_checksums
        self.identity = self._storage.identity(self._name)
        self._leaves = list(files.leaves.values())
        self._num_bytes = int(files.manifest.file_bytes[file])
        with files.open_footer(file) as opened:
            check_file(self._storage, files.manifest, file, opened)
            # Of a mapped file this is the mapping itself.
            self.buffer = opened.read_buffer() if self.identity is not None else None
            parquet = pq.ParquetFile(opened if self.buffer is None else pa.BufferReader(self.buffer))
            self.metadata, schema = parquet.metadata, parquet.schema_arrow
        # A struct's numbers lie below the column itself, so that places and names part; those are decoded.
        is_plain = len(schema) == self.metadata.num_columns
        self._chunks: dict[int, dict[str, Chunk | list[Array]]] = {}
        self.plain: dict[str, PlainColumn] = {}
        for name, leaf in files.leaves.items():
            found = find_plain_column(self.metadata, leaf, files.fields[name], schema.field(leaf)) if is_plain else None
            if found is not None:
                self.plain[name] = found

    @property
    def num_kept_chunks(self) -> int:
        """How many columns of row groups are known."""
        return len(self._chunks) * len(self.plain)

    def plain_chunks(self, index: int, files: DataFiles) -> dict[str, Chunk | list[Array]]:
        """Of a row group the columns that may be plain: where they lie, or once they were read, their views."""
        found = self._chunks.get(index)
        if found is None:
            found = {}
            group = self.metadata.row_group(index) if self.plain else None
            for name, column in self.plain.items():
                chunk = column.find_chunk(group)
                if chunk is not None:
                    found[name] = chunk
            if files.may_keep_chunks():
                self._chunks[index] = found
        return found

    def ranges(self, index: int) -> list[Range]:
        """Where the wanted columns of a row group lie in the file."""
        group = self.metadata.row_group(index)
        found = []
        for leaf in self._leaves:
            chunk = group.column(leaf)
            start = chunk.data_page_offset
            if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                start = min(start, chunk.dictionary_page_offset)
            found.append((start, start + chunk.total_compressed_size))
        return found

    def plain_values(self, name: str, chunk: Chunk, fetched: Fetched | None) -> list[Array] | None:
        """A plain column's values in a row group; None where Arrow must decode them."""
        buffer = self.buffer
        if fetched is not None:
            buffer = fetched.slice(chunk.start, chunk.end)
            chunk = chunk._replace(start=0, end=chunk.end - chunk.start)
        return self.plain[name].values(buffer, chunk, verify_checksums=self.verify_checksums)

    def read(self, index: int, leaves: Sequence[int], fetched: Fetched | None) -> pa.Table:
        """These columns of a row group, decoded by Arrow."""
        if fetched is None:
            return self._read(pa.BufferReader(self.buffer), index, leaves)
        partial = PartialFile(
            self._num_bytes, lambda start, end: self._storage.read_part(self._name, start, end), fetched
        )
        return self._read(pa.PythonFile(partial, mode="r"), index, leaves)

    def _read(self, opened: pa.NativeFile, index: int, leaves: Sequence[int]) -> pa.Table:
        parquet = pq.ParquetFile(
            opened,
            metadata=self.metadata,
            page_checksum_verification=self.verify_checksums,
            coerce_int96_timestamp_unit="us",
        )
        return parquet.reader.read_row_group(index, column_indices=leaves, use_threads=False)


class RowGroup:
    """The wanted columns of a row group."""

    def __init__(self, files: DataFiles, number: int, file: OpenFile, fetched: Fetched | None) -> None:
        self._files, self._number, self._file, self._fetched = files, number, file, fetched
        self.num_rows = int(files.manifest.row_group_rows[number])
        self._index = files.manifest.row_group_in_file(number)
        self._plain = file.plain_chunks(self._index, files)
        self._decoded: dict[str, Decoded] = {}
        self._decode([name for name in files.fields if name not in self._plain])

    def parts(self, name: str) -> list[Any]:
        """A column's values in the arrays that they lie in, in order: numbers `(rows, *shape)`, or one Arrow array.

        Read-only, and of memory that may be the mapped file's.
        """
        known = self._plain.get(name)
        if isinstance(known, list):
            return known
        with named_read_errors(self._files.storage, self._files.manifest, self._number):
            found = None
            if name not in self._decoded:
                found = None if known is None else self._file.plain_values(name, known, self._fetched)
                if found is None:
                    self._decode([name])
                    # Known from now on: the next one who asks lets Arrow decode it together with the others.
                    self._plain.pop(name, None)
            found = [self._decoded[name].values] if found is None else found
            num_rows = sum(map(len, found))
            if num_rows != self.num_rows:
                # Whoever gathers rows relies on it.
                raise pa.ArrowInvalid(f"column {name!r} has {num_rows} rows instead of {self.num_rows}")
            is_view = known is not None and known.codec is None and name not in self._decoded and len(found) == 1
            # What was fetched is let go of with this row group.
            if is_view and self._fetched is None and not self._file.verify_checksums:
                self._plain[name] = found
        return found

    def mask(self, name: str) -> npt.NDArray[np.bool_]:
        """Where a column is not null, once its values were asked for."""
        found = self._decoded[name].valid if name in self._decoded else None
        return np.ones(self.num_rows, np.bool_) if found is None else found

    def validate(self) -> None:
        """Raise ReadError if what Arrow decoded contradicts itself."""
        with named_read_errors(self._files.storage, self._files.manifest, self._number):
            for decoded in self._decoded.values():
                if isinstance(decoded.values, pa.Array):
                    decoded.values.validate(full=True)

    def _decode(self, names: Sequence[str]) -> None:
        if not names:
            return
        files = self._files
        table = self._file.read(self._index, [files.leaves[name] for name in names], self._fetched)
        for position, name in enumerate(names):
            field, stored = files.fields[name], table.schema.field(position)
            decoded = decode(table.column(position), field, fill=files.fills[name], stored=stored)
            self._decoded[name] = decoded
            if decoded.valid is not None and files.nulls != "mask" and not has_fill(files.nulls, field):
                selection = files.manifest.selection
                live = None if selection is None else selection.live_rows(self._number)
                num_nulls = int((~(decoded.valid if live is None else decoded.valid[live])).sum())
                if num_nulls:
                    raise null_error(field, count=num_nulls)


def check_file(storage: Storage, manifest: Manifest, file: int, opened: pa.NativeFile) -> None:
    """Raise SourceChangedError unless an open data file has the size and the footer that the manifest says."""
    path = f"{storage.url}/{manifest.file_names[file]}"
    if opened.size() != manifest.file_bytes[file]:
        raise SourceChangedError(
            f"{path} has {opened.size()} bytes instead of {manifest.file_bytes[file]}: it was changed or cut after it "
            "was written. Convert again.",
            path=path,
        )
    if manifest.file_footers is not None and executor.footer_crc32(opened) != manifest.file_footers[file]:
        raise SourceChangedError(
            f"{path} has another footer than it was written with: it was replaced by a file of the same size, or is "
            "damaged. Convert again.",
            path=path,
        )
    opened.seek(0)


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
        raise SourceChangedError(
            f"{path} is not there. Was the converter deleted, or is this machine another one than the one that "
            "wrote it? A cache on a local disk can be read on its own machine only; choose a shared cache_dir.",
            path=path,
        ) from error
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, (ConverterError, GivenUpError)):
            raise
        index = manifest.row_group_in_file(row_group)
        if not storage.is_local and type(error) in (OSError, PermissionError, TimeoutError):
            raise ReadError(
                f"Row group {index} of {path} cannot be fetched: {error}.", path=path, row_group=index
            ) from error
        raise ReadError(
            f"Row group {index} of {path} cannot be decoded: {error}. The file is damaged; convert again.",
            path=path,
            row_group=index,
        ) from error


@contextlib.contextmanager
def opened_row_group(storage: Storage, manifest: Manifest, row_group: int) -> Iterator[tuple[pq.ParquetFile, int]]:
    """The open file of a row group and the row group's number in it; what goes wrong inside is named.

    Raises:
        SourceChangedError: the file is gone or has another size than the manifest says.
        ReadError: the row group cannot be decoded.
    """
    file = int(manifest.row_group_file[row_group])
    with (
        named_read_errors(storage, manifest, row_group),
        storage.open_parquet(manifest.file_names[file]) as opened,
    ):
        check_file(storage, manifest, file, opened)
        yield pq.ParquetFile(opened, coerce_int96_timestamp_unit="us"), manifest.row_group_in_file(row_group)
