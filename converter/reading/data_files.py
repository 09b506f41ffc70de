"""Data files as they are now: checked against the manifest, opened once, decoded a row group at a time.

A column is undone when it is asked for, so that what was undone for the one before
it can be let go of: the next one's pages then land in memory that is still in the
cache. What Arrow must decode is decoded for all such columns at once.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent import futures

import pyarrow as pa
import pyarrow.parquet as pq

from converter.errors import ConverterError
from converter.manifest import Manifest
from converter.memory import Room, give_back_idle
from converter.places import Place
from converter.reading.calendars import is_julian
from converter.reading.checks import (
    OwnFooter,
    check_bounds,
    check_file,
    check_stamp,
    known_footer,
    named_read_errors,
    read_part,
    written_again,
)
from converter.reading.gather import Array
from converter.reading.local_cache import LocalCache, piece_name
from converter.reading.nulls import Nulls, check_fill
from converter.reading.pages import Chunk, PlainColumn, find_plain_column
from converter.reading.row_groups import MAX_KEPT_CHUNKS, FetchedGroup, RowGroup
from converter.reading.stored import find_places, find_ranges, open_partial, read_places
from converter.schema import Field
from converter.storage.at_once import Turn, at_once
from converter.storage.directory import Storage
from converter.storage.ranges import Data, Fetched, PartialFile, Range, merge_ranges
from converter.storage.requests import GivenUpError

_MAX_OPEN_FILES = 256
_LOOK_SECONDS = 0.05


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
            return sum(file.num_kept_chunks for file in self._open.values()) < MAX_KEPT_CHUNKS


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
        return self._read(open_partial(self._manifest, self.number, read, fetched), indices, places)

    def _read(self, opened: pa.NativeFile, indices: Sequence[int], places: Sequence[Place]) -> list[pa.ChunkedArray]:
        parquet = pq.ParquetFile(
            opened,
            metadata=self.metadata,
            page_checksum_verification=self.verify_checksums,
            coerce_int96_timestamp_unit="us",
        )
        return read_places(parquet, indices, places)
