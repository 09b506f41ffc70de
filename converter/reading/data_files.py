"""Data files as they are now: checked against the manifest, opened once, decoded a row group at a time.

A column is undone when it is asked for, so that what was undone for the one before
it can be let go of: the next one's pages then land in memory that is still in the
cache. What Arrow must decode is decoded for all such columns at once.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import threading
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from converter.errors import CacheCorruptError, ConverterError, ReadError, SourceChangedError, SourceError
from converter.footers import ParsedFooter, parse_end
from converter.manifest import Level, Manifest, Place
from converter.memory import Room, give_back_idle
from converter.portable import tasks
from converter.reading.decode import (
    Array,
    Decoded,
    Nulls,
    check_fill,
    decode,
    fills_elements,
    floor_times,
    gregorian_days,
    has_fill,
    null_element_error,
    null_error,
    signed,
)
from converter.reading.local_cache import LocalCache, piece_name
from converter.reading.pages import Chunk, PlainColumn, find_plain_column
from converter.schema import Field
from converter.sources.parquet.columns import refuse_encrypted
from converter.storage.directory import Storage
from converter.storage.ranges import Data, Fetched, PartialFile, Range, Turn, at_once, merge_ranges
from converter.storage.store import GivenUpError

_MAX_OPEN_FILES = 256
_MAX_KEPT_FOOTERS = 16
_LOOK_SECONDS = 0.05
_CUT_TEXT_BYTES = 64
"""Of a longer text some writers keep a part as its bound in the footer."""

_DATETIME_NOTE, _INT96_NOTE = b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96"
_SPARK_VERSION = b"org.apache.spark.version"
_FIRST_SAME_TIME = dt.datetime(1900, 1, 1)  # noqa: DTZ001 (of UTC, as Arrow counts)
"""From here on both calendars, and all offsets of time zones, are the same."""

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
        fills = {} if isinstance(nulls, str) else nulls
        self.fills = {
            field.name: check_fill(field, fills[field.name]) if field.name in fills else 0 for field in fields
        }
        self._lock = threading.Lock()
        self._open: OrderedDict[int, OpenFile] = OrderedDict()
        self._opening: dict[int, futures.Future[OpenFile]] = {}
        self.room = Room()
        # With the reader that has these files, closed or forgotten.
        weakref.finalize(self, give_back_idle).atexit = False

    def row_groups(self, numbers: Sequence[int], fetched: Mapping[int, FetchedGroup] | None = None) -> list[RowGroup]:
        """Row groups by their numbers in the dataset; `fetched` is what lies behind a network.

        Raises:
            NullValueError: a column has nulls that no policy covers.
            SourceChangedError: a file is not what the manifest says.
            ReadError: a row group cannot be decoded.
        """
        return [self._row_group(number, None if fetched is None else fetched[number]) for number in numbers]

    def check_mapped(self, groups: Sequence[RowGroup]) -> None:
        """Raise SourceChangedError if somebody wrote into a mapped file before the rows of these were copied."""
        if self.manifest.source_columns is None or not self.storage.is_local:
            return
        for file in {group.file.number: group.file for group in groups}.values():
            name = self.manifest.file_names[file.number]
            # Of a file that is gone the mapping keeps what was there.
            with contextlib.suppress(FileNotFoundError):
                if self.storage.identity(name) != file.identity:
                    raise written_again(self.storage, self.manifest, file.number)

    def _row_group(self, number: int, fetched: FetchedGroup | None) -> RowGroup:
        with named_read_errors(self.storage, self.manifest, number):
            if fetched is not None:
                fetched.file.check_heads(self.manifest.row_group_in_file(number), fetched.parts)
                found = RowGroup(self, number, fetched.file, fetched.parts)
                if fetched.is_copy:
                    # A flipped bit of a text would be found by whoever makes strings of them, too late to fetch it.
                    found.validate()
                return found
            return RowGroup(self, number, self._open_file(int(self.manifest.row_group_file[number])), None)

    def fetch(
        self,
        numbers: Sequence[int],
        given_up: threading.Event | None = None,
        turn: Turn | None = None,
        pool: futures.ThreadPoolExecutor | None = None,
        *,
        anew: bool = False,
    ) -> dict[int, FetchedGroup]:
        """The bytes of the wanted columns, row group by row group, all asked for at once when it is their turn.

        What this host keeps of them is not believed where they are fetched `anew`.

        Raises:
            SourceChangedError: a file is not what the manifest says.
            ReadError: a file cannot be reached.
        """
        manifest, storage = self.manifest, self.storage
        file_of = {number: int(manifest.row_group_file[number]) for number in numbers}

        def open_file(item: tuple[int, int]) -> OpenFile:
            with named_read_errors(storage, manifest, item[1]):
                return self._open_file(item[0], given_up)

        first = {file: number for number, file in file_of.items()}
        # Held until they are read: more may be on their way than are kept open.
        opened = dict(zip(first, at_once(open_file, list(first.items())), strict=True))
        files = {number: opened[file] for number, file in file_of.items()}
        if self._local_cache is not None:
            cache = self._local_cache
            kept = at_once(
                lambda one: self._fetch_kept(cache, one, files[one], given_up, anew=anew), numbers, turn=turn, pool=pool
            )
            return dict(zip(numbers, kept, strict=True))
        wanted = [(number, part) for number in numbers for part in self._ranges(number, files[number])]
        parts: dict[int, list[tuple[int, Data]]] = {number: [] for number in numbers}
        fetched = at_once(lambda item: self._fetch_part(*item, given_up), wanted, turn=turn, pool=pool)
        for (number, (start, _)), data in zip(wanted, fetched, strict=True):
            parts[number].append((start, data))
        self._check_stamps(numbers, given_up)
        return {number: FetchedGroup(files[number], Fetched(found)) for number, found in parts.items()}

    def _check_stamps(self, numbers: Sequence[int], given_up: threading.Event | None) -> None:
        """Raise SourceChangedError if a file from which row groups were just fetched was written again before that."""
        if self.manifest.file_stamps is None:
            return

        def check(number: int) -> None:
            with named_read_errors(self.storage, self.manifest, number):
                check_stamp(self.storage, self.manifest, int(self.manifest.row_group_file[number]), given_up)

        at_once(check, list({int(self.manifest.row_group_file[number]): number for number in numbers}.values()))

    def _fetch_kept(
        self, cache: LocalCache, number: int, opened: OpenFile, given_up: threading.Event | None, *, anew: bool
    ) -> FetchedGroup:
        """A row group's bytes, from this host's disk if they were fetched before."""
        ranges = self._ranges(number, opened)
        file = int(self.manifest.row_group_file[number])
        known = [
            None if one is None else int(one[file]) for one in (self.manifest.file_footers, self.manifest.file_stamps)
        ]
        name = piece_name("rows", number, (ranges, *known))

        def fetch() -> list[Data]:
            parts = at_once(lambda part: self._fetch_part(number, part, given_up), ranges)
            self._check_stamps([number], given_up)
            # Before others are given it.
            found = Fetched([(start, part) for (start, _), part in zip(ranges, parts, strict=True)])
            with named_read_errors(self.storage, self.manifest, number):
                opened.check_heads(self.manifest.row_group_in_file(number), found)
            return parts

        parts, is_copy = cache.get(name, [end - start for start, end in ranges], fetch, given_up, anew=anew)
        fetched = Fetched([(start, part) for (start, _), part in zip(ranges, parts, strict=True)])
        return FetchedGroup(opened, fetched, is_copy)

    def _ranges(self, number: int, opened: OpenFile) -> list[Range]:
        with named_read_errors(self.storage, self.manifest, number):
            return merge_ranges(opened.ranges(opened.row_groups(self.manifest.row_group_in_file(number))))

    def _fetch_part(self, number: int, part: Range, given_up: threading.Event | None) -> Data:
        with named_read_errors(self.storage, self.manifest, number):
            return read_part(self.storage, self.manifest, int(self.manifest.row_group_file[number]), part, given_up)

    def open_footer(self, file: int, given_up: threading.Event | None = None, *, anew: bool = False) -> pa.NativeFile:
        """A data file, to read its footer from; what this host keeps is not believed where that is read `anew`."""
        manifest, cache = self.manifest, self._local_cache
        if self.storage.is_local or manifest.file_footers is None:
            return self.storage.open_parquet(manifest.file_names[file], given_up=given_up)
        # A footer is known by its digest, so that no request is needed for the size.
        digest = int(manifest.file_footers[file])

        def fetch(start: int, end: int) -> Data:
            def read() -> Data:
                return read_part(self.storage, manifest, file, (start, end), given_up)

            if cache is None:
                return read()
            piece = piece_name("footer", file, (start, end, digest))
            (part,), _ = cache.get(piece, [end - start], lambda: [read()], given_up, anew=anew)
            return part

        return pa.PythonFile(PartialFile(int(manifest.file_bytes[file]), fetch), mode="r")

    def _open_file(self, file: int, given_up: threading.Event | None = None) -> OpenFile:
        """Who comes while a file is being opened gets the same file or error: its footer is asked for once."""
        while True:
            with self._lock:
                opening = self._opening.get(file)
                if opening is None:
                    own = self._opening[file] = futures.Future()
            if opening is None:
                return self._open_for_all(file, own, given_up)
            while not opening.done():
                if given_up is not None and given_up.is_set():
                    raise GivenUpError(f"{self.manifest.file_names[file]} is not wanted any more")
                futures.wait([opening], _LOOK_SECONDS)
            # Who gave up did so for itself alone.
            with contextlib.suppress(GivenUpError):
                return opening.result()

    def _open_for_all(self, file: int, opening: futures.Future[OpenFile], given_up: threading.Event | None) -> OpenFile:
        error: BaseException | None = None
        try:
            opened = self._open_alone(file, given_up)
        except BaseException as raised:
            error = raised
            raise
        finally:
            with self._lock:
                self._opening.pop(file, None)
            if error is None:
                opening.set_result(opened)
            else:
                opening.set_exception(error if isinstance(error, Exception) else GivenUpError("interrupted"))
        return opened

    def _open_alone(self, file: int, given_up: threading.Event | None) -> OpenFile:
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
        try:
            try:
                opened = OpenFile(self, file, given_up)
            except (ConverterError, pa.ArrowException, ValueError):
                if self._local_cache is None:
                    raise
                # The store's own bytes, if only this host's copy was damaged.
                opened = OpenFile(self, file, given_up, anew=True)
        except (ConverterError, pa.ArrowException, ValueError):
            if not self.storage.is_local:
                check_stamp(self.storage, self.manifest, file, given_up)
            raise
        with self._lock:
            self._open[file] = opened
            while len(self._open) > _MAX_OPEN_FILES:
                self._open.popitem(last=False)
        return opened

    def may_keep_chunks(self) -> bool:
        """Whether there is room for what is known of another row group."""
        with self._lock:
            return sum(file.num_kept_chunks for file in self._open.values()) < _MAX_KEPT_CHUNKS


@dataclass(frozen=True, slots=True)
class FetchedGroup:
    """What lies behind a network of a row group, and the file that it is part of."""

    file: OpenFile
    parts: Fetched
    is_copy: bool = False
    """Whether this host had kept them."""


class OpenFile:
    """A data file whose footer was read once; on a local disk it is mapped into memory."""

    def __init__(
        self, files: DataFiles, file: int, given_up: threading.Event | None = None, *, anew: bool = False
    ) -> None:
        self._storage, self._manifest, self._name = files.storage, files.manifest, files.manifest.file_names[file]
        self.verify_checksums = files.verify_checksums
        self.number, self.identity = file, self._storage.identity(self._name)
        self.buffer: pa.Buffer | None = None
        self._known = known_footer(self._storage, self._manifest, file)
        if self._known is not None:
            self.metadata, self.footer = self._known.metadata, self._known.footer
            schema = self.metadata.schema.to_arrow_schema()
        else:
            with files.open_footer(file, given_up, anew=anew) as opened:
                self.footer = check_file(self._storage, self._manifest, file, opened)
                # Of a mapped file this is the mapping itself.
                self.buffer = opened.read_buffer() if self.identity is not None else None
                parquet = pq.ParquetFile(opened if self.buffer is None else pa.BufferReader(self.buffer))
                self.metadata, schema = parquet.metadata, parquet.schema_arrow
        self.places = find_places(self._manifest, list(files.fields), schema)
        check_bounds(self._storage, self._manifest, file, OwnFooter(self.metadata, self.footer), schema)
        self.footer.keep(self._leaves)
        self._chunks: dict[int, dict[str, Chunk | list[Array]]] = {}
        self.plain: dict[str, PlainColumn] = {}
        for name, place in self.places.items():
            if place is not None and not is_julian(self.metadata, place):
                found = find_plain_column(self.metadata, place, files.fields[name])
                if found is not None:
                    self.plain[name] = found

    def check_heads(self, index: int, fetched: Fetched) -> None:
        """Raise SourceChangedError if what was fetched of a row group does not begin as the manifest says."""
        if self._known is not None:
            self._known.check_heads(index, self._leaves, fetched)

    @property
    def num_kept_chunks(self) -> int:
        """How many columns of row groups are known."""
        return len(self._chunks) * len(self.plain)

    def plain_chunks(self, index: int, files: DataFiles) -> dict[str, Chunk | list[Array]]:
        """Of a row group the columns that may be plain: where they lie, or once they were read, their views."""
        found = self._chunks.get(index)
        if found is None:
            found = {}
            for name, column in self.plain.items():
                chunk = column.find_chunk(self.footer.chunk(index, column.leaf), self.footer.row_group_rows[index])
                if chunk is not None:
                    found[name] = chunk
            if files.may_keep_chunks():
                self._chunks[index] = found
        return found

    def row_groups(self, index: int) -> list[int]:
        """The numbers of the row groups that are meant by one in the manifest: itself, or all of the file for -1."""
        rows = self.footer.row_group_rows
        return [index] if index >= 0 else [index for index, num_rows in enumerate(rows) if num_rows]

    def ranges(self, indices: Sequence[int]) -> list[Range]:
        """Where the wanted columns of row groups lie in the file."""
        return find_ranges(self._manifest, self.number, self.footer, indices, self._leaves)

    @property
    def _leaves(self) -> list[int]:
        return [leaf for place in self.places.values() if place is not None for leaf in place.leaves]

    def plain_values(self, name: str, chunk: Chunk, fetched: Fetched | None) -> list[Array] | None:
        """A plain column's values in a row group; None where Arrow must decode them."""
        buffer = self.buffer
        if fetched is not None:
            buffer = fetched.slice(chunk.start, chunk.end)
            chunk = chunk._replace(start=0, end=chunk.end - chunk.start)
        return self.plain[name].values(buffer, chunk, verify_checksums=self.verify_checksums)

    def read(self, indices: Sequence[int], places: Sequence[Place], fetched: Fetched | None) -> list[pa.ChunkedArray]:
        """These columns of row groups, decoded by Arrow."""
        if fetched is None:
            return self._read(pa.BufferReader(self.buffer), indices, places)
        read = functools.partial(read_part, self._storage, self._manifest, self.number)
        return self._read(_open_partial(self._manifest, self.number, read, fetched), indices, places)

    def _read(self, opened: pa.NativeFile, indices: Sequence[int], places: Sequence[Place]) -> list[pa.ChunkedArray]:
        parquet = pq.ParquetFile(
            opened,
            metadata=self.metadata,
            page_checksum_verification=self.verify_checksums,
            coerce_int96_timestamp_unit="us",
        )
        return read_places(parquet, indices, places)


class RowGroup:
    """The wanted columns of a row group."""

    def __init__(self, files: DataFiles, number: int, file: OpenFile, fetched: Fetched | None) -> None:
        self._files, self._number, self.file, self._fetched = files, number, file, fetched
        self.num_rows = int(files.manifest.row_group_rows[number])
        self._indices = file.row_groups(files.manifest.row_group_in_file(number))
        num_rows = file.footer.rows_of(self._indices)
        if num_rows != self.num_rows:
            raise rows_changed(files.storage, files.manifest, number, num_rows)
        self._plain = [file.plain_chunks(index, files) for index in self._indices]
        self._decoded: dict[str, Decoded] = {}
        self._decode([name for name in files.fields if any(name not in plain for plain in self._plain)])

    def parts(self, name: str) -> list[Any]:
        """A column's values in the arrays that they lie in, in order: numbers `(rows, *shape)`, or one Arrow array.

        Read-only, and of memory that may be the mapped file's.
        """
        with named_read_errors(self._files.storage, self._files.manifest, self._number):
            found = None if name in self._decoded else self._plain_parts(name)
            if found is None:
                if name not in self._decoded:
                    self._decode([name])
                    # Known from now on: the next one who asks lets Arrow decode it together with the others.
                    for plain in self._plain:
                        plain.pop(name, None)
                found = [self._decoded[name].values]
            num_rows = sum(map(len, found))
            if num_rows != self.num_rows:
                # Whoever gathers rows relies on it.
                raise pa.ArrowInvalid(f"column {name!r} has {num_rows} rows instead of {self.num_rows}")
        return found

    def _plain_parts(self, name: str) -> list[Array] | None:
        """A column's values as they lie in the pages; None where Arrow must decode them."""
        parts: list[Array] = []
        for plain in self._plain:
            known = plain.get(name)
            found = (
                known
                if known is None or isinstance(known, list)
                else (self.file.plain_values(name, known, self._fetched))
            )
            if found is None:
                return None
            is_view = isinstance(known, Chunk) and known.codec is None and len(found) == 1
            # What was fetched is let go of with this row group.
            if is_view and self._fetched is None and not self.file.verify_checksums:
                plain[name] = found
            parts += found
        return parts

    def mask(self, name: str) -> npt.NDArray[np.bool_]:
        """Where a column is not null, once its values were asked for."""
        found = self._decoded[name].valid if name in self._decoded else None
        return np.ones(self.num_rows, np.bool_) if found is None else found

    def element_mask(self, name: str) -> Any:
        """Where a column's elements are not null, as `Decoded.element_mask`, once its values were asked for."""
        field = self._files.fields[name]
        if name in self._decoded:
            return self._decoded[name].element_mask(field)
        # Plain values are whole.
        return np.ones((self.num_rows, *(field.shape or ())), np.bool_)

    def validate(self) -> None:
        """Raise ReadError if what Arrow decoded contradicts itself."""
        with named_read_errors(self._files.storage, self._files.manifest, self._number):
            for decoded in self._decoded.values():
                if isinstance(decoded.values, pa.Array):
                    decoded.values.validate(full=True)

    def _decode(self, names: Sequence[str]) -> None:
        if not names:
            return
        files, places = self._files, self.file.places
        # Its pages, as they are in the file, and as they are wanted.
        files.room.look(3 * int(files.manifest.row_group_bytes[self._number]))
        stored = {name: place for name in names if (place := places[name]) is not None}
        columns = dict(zip(stored, self.file.read(self._indices, list(stored.values()), self._fetched), strict=True))
        for name in names:
            field, place = files.fields[name], stored.get(name)
            if place is None:
                columns[name] = constant_column(files.manifest, name, self.file.number, self.num_rows)
            decoded = decode(
                columns[name],
                field,
                fill=files.fills[name],
                stored=None if place is None else place.field,
                is_foreign=files.manifest.source_columns is not None,
            )
            self._decoded[name] = decoded
            self._check_nulls(decoded, field)

    def _check_nulls(self, decoded: Decoded, field: Field) -> None:
        """Raise NullValueError if a live row is null, or an element of one, and no policy covers it."""
        nulls, selection = self._files.nulls, self._files.manifest.selection
        live = None if selection is None else selection.live_rows(self._number)
        is_masked = nulls == "mask"
        if decoded.valid is not None and not (is_masked and field.has_nulls) and not has_fill(nulls, field):
            num_nulls = int((~(decoded.valid if live is None else decoded.valid[live])).sum())
            if num_nulls and is_masked:
                raise pa.ArrowInvalid(f"column {field.name!r} holds nulls where none were counted")
            if num_nulls:
                raise null_error(field, count=num_nulls, nulls=nulls)
        is_covered = (is_masked and field.has_null_elements) or fills_elements(nulls, field)
        with_null = None if is_covered else decoded.rows_with_null_elements()
        if with_null is not None and (with_null if live is None else with_null[live]).any():
            raise null_element_error(field, is_masked=is_masked)


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


def find_ranges(
    manifest: Manifest, file: int, footer: ParsedFooter, indices: Sequence[int], leaves: Sequence[int]
) -> list[Range]:
    """Where columns of row groups lie in a file. Raises ValueError where its footer says that they lie elsewhere."""
    num_bytes, found = int(manifest.file_bytes[file]), []
    for index in indices:
        for leaf in leaves:
            chunk = footer.chunk(index, leaf)
            start = chunk.data_page_offset
            if chunk.dictionary_page_offset:
                start = min(start, chunk.dictionary_page_offset)
            end = start + chunk.stored_bytes
            if not 0 <= start <= end <= num_bytes:
                raise ValueError(f"a column is said to lie from byte {start} to {end} of {num_bytes}")
            found.append((start, end))
    return found


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
            start, num_bytes = tasks.head_of(chunk.data_page_offset, chunk.stored_bytes)
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
    end = tasks.end_of(opened)
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


def find_places(manifest: Manifest, names: Sequence[str], schema: pa.Schema) -> dict[str, Place | None]:
    """Where a file of this schema holds the columns; None for those that it does not hold."""
    if manifest.source_columns is not None:
        level = Level(schema)
        return {name: manifest.source_columns[name].find(level) for name in names}
    numbers = {name: number for number, name in enumerate(manifest.schema.names)}
    return {name: Place(numbers[name], numbers[name], (), schema.field(numbers[name])) for name in names}


def read_places(parquet: pq.ParquetFile, indices: Sequence[int], places: Sequence[Place]) -> list[pa.ChunkedArray]:
    """Columns of row groups of an open file."""
    if not places:
        return []
    leaves = list(dict.fromkeys(leaf for place in places for leaf in place.leaves))
    table = parquet.reader.read_row_groups(indices, column_indices=leaves, use_threads=False)
    # The columns come in the order in which a leaf of theirs was first asked for.
    numbers = {top: number for number, top in enumerate(dict.fromkeys(place.top for place in places))}
    found = []
    for place in places:
        column = table.column(numbers[place.top])
        for member in place.members:
            # With the nulls of the struct around it.
            column = pc.struct_field(column, [column.type.get_field_index(member)])
        if isinstance(column.type, pa.BaseExtensionType):
            # Text that is said to be JSON; others are not read.
            column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
        if column.chunks and (pa.types.is_list_view(column.type) or pa.types.is_large_list_view(column.type)):
            column = pa.chunked_array([_without_views(chunk) for chunk in column.chunks])
        found.append(_in_todays_calendar(column, parquet.metadata, place))
    return found


def _without_views(array: pa.Array) -> pa.Array:
    """Views of lists as lists, whose values lie side by side; Arrow's own cast loses values where there are nulls."""
    is_large = pa.types.is_large_list_view(array.type)
    if not is_large and not pa.types.is_list_view(array.type):
        return array
    values = _without_views(array.flatten())
    sizes = np.asarray(pc.fill_null(pc.list_value_length(array), 0))
    ends = np.cumsum(sizes, dtype=np.int64)
    offsets = pa.array(np.concatenate([[0], ends]), pa.int64() if is_large else pa.int32())
    kind = pa.LargeListArray if is_large else pa.ListArray
    return kind.from_arrays(offsets, values, mask=pc.is_null(array) if array.null_count else None)


def is_julian(metadata: pq.FileMetaData, place: Place) -> bool:
    """Whether a file counts old dates or times of a column by the Julian calendar, as Spark 2 and its LEGACY mode do.

    What it notes of that: `DataSourceUtils.datetimeRebaseSpec` in Spark's sources.
    """
    kind, stored = place.field.type, metadata.schema.column(place.leaf)
    is_int96 = stored.physical_type == "INT96"
    if not (pa.types.is_date32(kind) or (pa.types.is_timestamp(kind) and (kind.tz or is_int96))):
        return False
    noted = metadata.metadata or {}
    return (_INT96_NOTE if is_int96 else _DATETIME_NOTE) in noted or noted.get(_SPARK_VERSION, b"").startswith(b"2.")


def _in_todays_calendar(column: pa.ChunkedArray, metadata: pq.FileMetaData, place: Place) -> pa.ChunkedArray:
    if not is_julian(metadata, place):
        return column
    if pa.types.is_date(column.type):
        return gregorian_days(column)
    # The offsets of time zones differ, too, before they were agreed on.
    if pc.any(pc.less(floor_times(column).cast(pa.timestamp("us")), pa.scalar(_FIRST_SAME_TIME))).as_py():
        name = place.field.name
        raise SourceError(
            f"Column {name!r} has times before 1900 which Spark wrote by the calendar of its LEGACY mode; here they "
            "would be others. Leave it out with columns=…, or read it with Spark and convert the DataFrame.",
            column=name,
        )
    return column


def constant_column(manifest: Manifest, name: str, file: int, num_rows: int) -> pa.ChunkedArray:
    """A column that a file does not hold: the one value that is said of it elsewhere, or null."""
    assert manifest.source_columns is not None
    column = manifest.source_columns[name]
    if column.values is None:
        if column.null_counts is not None and column.null_counts[file].as_py() == 0:
            raise SourceChangedError(
                f"{manifest.file_names[file]} has no column {name!r}, of which the table's log says that it holds no "
                f"null there. {manifest.remedy}",
                path=manifest.file_names[file],
            )
        return pa.chunked_array([pa.nulls(num_rows, column.arrow_type)])
    return pa.chunked_array([pa.repeat(column.values[file].value.cast(column.arrow_type), num_rows)])


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


class LookedAt(NamedTuple):
    """A file that is open for one look."""

    parquet: pq.ParquetFile
    footer: ParsedFooter


class Footers:
    """The footers of the files that are looked through just now, each checked and read once for all its row groups."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[int, tuple[int, ...] | None], KnownFooter | OwnFooter] = OrderedDict()

    def get(self, file: int, identity: tuple[int, ...] | None) -> KnownFooter | OwnFooter | None:
        """What was read of a file that is still the same."""
        with self._lock:
            return self._found.get((file, identity))

    def keep(self, file: int, identity: tuple[int, ...] | None, footer: KnownFooter | OwnFooter) -> None:
        """Keep it while others are few."""
        with self._lock:
            self._found[file, identity] = footer
            while len(self._found) > _MAX_KEPT_FOOTERS:
                self._found.popitem(last=False)


@contextlib.contextmanager
def opened_file(
    storage: Storage,
    manifest: Manifest,
    row_group: int,
    given_up: threading.Event | None = None,
    *,
    footers: Footers | None = None,
    names: Sequence[str] = (),
) -> Iterator[LookedAt]:
    """The open file of a row group, of which the columns `names` will be read; what goes wrong inside is named.

    Raises:
        SourceChangedError: the file is gone or is another one than the manifest says.
        CacheCorruptError: the manifest contradicts itself.
        ReadError: the row group cannot be decoded.
    """
    file = int(manifest.row_group_file[row_group])
    name = manifest.file_names[file]
    with named_read_errors(storage, manifest, row_group):
        identity = storage.identity(name)
        footers = Footers() if footers is None else footers
        found = footers.get(file, identity)
        if found is None and (known := known_footer(storage, manifest, file)) is not None:
            footers.keep(file, identity, known)
            found = known
        read = functools.partial(read_part, storage, manifest, file, given_up=given_up)
        if isinstance(found, KnownFooter):
            with _open_known(manifest, row_group, names, found, read) as opened:
                yield LookedAt(pq.ParquetFile(opened, metadata=found.metadata), found.footer)
            return
        if found is None or storage.is_local:
            opened = storage.open_parquet(name, given_up=given_up)
        else:
            opened = _open_partial(manifest, file, read)
        with opened:
            footer = check_file(storage, manifest, file, opened) if found is None else found.footer
            metadata = None if found is None else found.metadata
            parquet = pq.ParquetFile(opened, metadata=metadata, coerce_int96_timestamp_unit="us")
            if found is None:
                own = OwnFooter(parquet.metadata, footer)
                check_bounds(storage, manifest, file, own, parquet.schema_arrow)
                footers.keep(file, identity, own)
            yield LookedAt(parquet, footer)
            if not storage.is_local:
                check_stamp(storage, manifest, file, given_up)


def _open_known(
    manifest: Manifest, row_group: int, names: Sequence[str], known: KnownFooter, read: Callable[[Range], Data]
) -> pa.NativeFile:
    """A file whose footer the manifest holds, with columns of a row group in memory."""
    file, index = int(manifest.row_group_file[row_group]), manifest.row_group_in_file(row_group)
    places = find_places(manifest, names, known.metadata.schema.to_arrow_schema())
    leaves = [leaf for place in places.values() if place is not None for leaf in place.leaves]
    ranges = merge_ranges(find_ranges(manifest, file, known.footer, [index], leaves))
    fetched = Fetched([(start, part) for (start, _), part in zip(ranges, at_once(read, ranges), strict=True)])
    known.check_heads(index, leaves, fetched)
    return _open_partial(manifest, file, read, fetched)


def _open_partial(
    manifest: Manifest, file: int, read: Callable[[Range], Data], fetched: Fetched | None = None
) -> pa.NativeFile:
    num_bytes = int(manifest.file_bytes[file])
    return pa.PythonFile(PartialFile(num_bytes, lambda start, end: read((start, end)), fetched), mode="r")


def read_columns(
    storage: Storage, manifest: Manifest, row_group: int, names: Sequence[str], opened: LookedAt
) -> pa.Table:
    """Columns of a row group of an open file by their names in the dataset, whichever way the file holds them.

    Raises:
        SourceChangedError: the file has other rows than the manifest says.
        pyarrow.ArrowException, OSError: they cannot be decoded.
    """
    index, num_rows = manifest.row_group_in_file(row_group), int(manifest.row_group_rows[row_group])
    parquet, footer = opened
    indices = [index] if index >= 0 else list(range(len(footer.row_group_rows)))
    found_rows = footer.rows_of(indices)
    if found_rows != num_rows:
        raise rows_changed(storage, manifest, row_group, found_rows)
    places = find_places(manifest, names, parquet.schema_arrow)
    stored = {name: place for name, place in places.items() if place is not None}
    columns = dict(zip(stored, read_places(parquet, indices, list(stored.values())), strict=True))
    for name in names:
        if name not in columns:
            columns[name] = constant_column(manifest, name, int(manifest.row_group_file[row_group]), num_rows)
        if manifest.source_columns is not None:
            columns[name] = signed(floor_times(columns[name]), name).cast(manifest.source_columns[name].arrow_type)
    return pa.table({name: columns[name] for name in names})
