"""The files of a dataset, each checked and opened once and shared by threads; remote row groups are fetched here."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent import futures

import pyarrow as pa

from converter.errors import ConverterError
from converter.manifest import Manifest
from converter.memory import Room, give_back_idle
from converter.pool import Threads
from converter.reading.bounds import MAX_OPEN_FILES, most_metadata_chunks
from converter.reading.checks import DataFile
from converter.reading.local_cache import LocalCache, piece_name
from converter.reading.meter import Meter, WindowWork
from converter.reading.nulls import Nulls, check_fill
from converter.reading.open_file import OpenFile
from converter.reading.row_groups import MAX_KEPT_CHUNKS, FetchedGroup, RowGroup
from converter.schema import Field
from converter.storage.at_once import Turn, at_once
from converter.storage.directory import Storage
from converter.storage.ranges import Data, Fetched, PartialFile, Range, merge_ranges
from converter.storage.requests import GivenUpError

_LOOK_SECONDS = 0.05


class DataFiles:
    """The files of a dataset, each opened once while it is in use; threads share it."""

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        fields: Sequence[Field],
        *,
        nulls: Nulls = "mask",
        undecoded: Collection[str] = (),
        verify_checksums: bool = False,
        local_cache: LocalCache | None = None,
    ) -> None:
        self.storage, self.manifest, self.nulls, self.verify_checksums = storage, manifest, nulls, verify_checksums
        self._local_cache = local_cache
        self.fields = {field.name: field for field in fields}
        fills = {} if isinstance(nulls, str) else nulls
        self.fills = {
            field.name: check_fill(field, fills[field.name]) if field.name in fills else 0
            for field in fields
            if field.name not in undecoded
        }
        """What nulls become; nulls of a column that is decoded later stay until then."""
        self._lock = threading.Lock()
        self._open: OrderedDict[int, OpenFile] = OrderedDict()
        self._opening: dict[int, futures.Future[OpenFile]] = {}
        self.room = Room()
        self.meter = Meter()
        self.given_up = threading.Event()
        """Set once the loader is being closed, and a reader has waited for too long."""

        self.has_said_waiting = False
        """Whether a long wait for them was logged."""

        self.parts: tuple[DataFiles, ...] = ()
        """Of a mixture, the files of each source."""

        # At the end of the reader that has these files, if nobody closes them.
        self.release_idle = weakref.finalize(self, give_back_idle)
        self.release_idle.atexit = False

    def close(self) -> None:
        """Return idle memory: it takes a millisecond, in which an interrupt is dropped where something is freed."""
        for files in (self, *self.parts):
            files.release_idle()

    def give_up(self) -> None:
        """End the requests of all readers; who waits for them gets an error."""
        for files in (self, *self.parts):
            files.given_up.set()

    def file_of(self, number: int) -> DataFile:
        """The file of a row group."""
        return DataFile(self.storage, self.manifest, int(self.manifest.row_group_file[number]))

    def row_groups(
        self,
        numbers: Sequence[int],
        fetched: Mapping[int, FetchedGroup] | None = None,
        work: WindowWork | None = None,
    ) -> list[RowGroup]:
        """Row groups by their numbers in the dataset; remote ones are decoded from `fetched`. `work` is timed.

        Raises:
            NullValueError: a column has nulls that no policy covers.
            SourceChangedError: a file is not what the manifest says.
            ReadError: a row group cannot be decoded.
        """
        timed = WindowWork(self.meter) if work is None else work
        return [self._row_group(number, None if fetched is None else fetched[number], timed) for number in numbers]

    def check_mapped(self, groups: Sequence[RowGroup]) -> None:
        """Raise SourceChangedError if a mapped file was written into before the rows of these groups were copied."""
        if self.manifest.source_columns is None or not self.storage.is_local:
            return
        for group in {group.opened.file.number: group for group in groups}.values():
            opened = group.opened
            # A mapping keeps the content of a file that was removed.
            with opened.file.named_errors(group.number), contextlib.suppress(FileNotFoundError):
                if self.storage.identity(opened.file.name) != opened.identity:
                    raise opened.file.written_again()

    def _row_group(self, number: int, fetched: FetchedGroup | None, work: WindowWork) -> RowGroup:
        file = self.file_of(number)
        with file.named_errors(number):
            if fetched is None:
                with work.of("open"):
                    opened = self.open(file)
                with work.of("decode"):
                    return RowGroup(self, number, opened, None)
            with work.of("decode"):
                fetched.opened.check_heads(number, fetched.parts)
                row_group = RowGroup(self, number, fetched.opened, fetched.parts)
                if fetched.is_copy:
                    # Later, when strings are made of a damaged text, it is too late to fetch it again.
                    row_group.validate()
            return row_group

    def fetch(
        self,
        numbers: Sequence[int],
        given_up: threading.Event | None = None,
        turn: Turn | None = None,
        pool: Threads | None = None,
        *,
        anew: bool = False,
    ) -> dict[int, FetchedGroup]:
        """The bytes of the wanted columns by row group, all requested at once when it is their turn.

        With `anew` this host's copies are not used.

        Raises:
            SourceChangedError: a file is not what the manifest says.
            ReadError: a file cannot be reached.
        """
        files = {number: self.file_of(number) for number in numbers}

        def open_for(number: int) -> OpenFile:
            with files[number].named_errors(number):
                return self.open(files[number], given_up)

        number_of_file = {file.number: number for number, file in files.items()}
        # Held until they are read: more may be on their way than are kept open.
        opened_files = dict(zip(number_of_file, at_once(open_for, list(number_of_file.values())), strict=True))
        opened = {number: opened_files[file.number] for number, file in files.items()}
        if self._local_cache is not None:
            cache = self._local_cache
            groups = at_once(
                lambda number: self._fetch_kept(cache, number, opened[number], given_up, anew=anew),
                numbers,
                turn=turn,
                pool=pool,
            )
            return dict(zip(numbers, groups, strict=True))
        wanted = [(number, part) for number in numbers for part in self.ranges(number, opened[number])]
        parts: dict[int, list[tuple[int, Data]]] = {number: [] for number in numbers}
        fetched = at_once(lambda item: self._fetch_part(*item, given_up), wanted, turn=turn, pool=pool)
        for (number, (start, _)), data in zip(wanted, fetched, strict=True):
            parts[number].append((start, data))
        self._check_stamps(list(number_of_file.values()), given_up)
        return {number: FetchedGroup(opened[number], Fetched(group_parts)) for number, group_parts in parts.items()}

    def _check_stamps(self, numbers: Sequence[int], given_up: threading.Event | None) -> None:
        """Raise SourceChangedError if a file of these row groups, just fetched, was written again before that."""
        if self.manifest.file_stamps is None:
            return

        def check(number: int) -> None:
            file = self.file_of(number)
            with file.named_errors(number):
                file.check_stamp(given_up)

        at_once(check, numbers)

    def _fetch_kept(
        self, cache: LocalCache, number: int, opened: OpenFile, given_up: threading.Event | None, *, anew: bool
    ) -> FetchedGroup:
        """A row group's bytes, from this host's disk if they were fetched before."""
        ranges, file = self.ranges(number, opened), opened.file
        digests = (self.manifest.file_footers, self.manifest.file_stamps)
        evidence = [None if values is None else int(values[file.number]) for values in digests]
        # By the file's name: with filters, row groups of a Delta version have other numbers.
        name = piece_name("rows", file.number, (file.name, ranges, *evidence))

        def as_fetched(parts: Sequence[Data]) -> Fetched:
            return Fetched([(start, part) for (start, _), part in zip(ranges, parts, strict=True)])

        def fetch() -> list[Data]:
            parts = at_once(lambda part: self._fetch_part(number, part, given_up), ranges)
            self._check_stamps([number], given_up)
            # Before other processes read them.
            with file.named_errors(number):
                opened.check_heads(number, as_fetched(parts))
            return parts

        parts, is_copy = cache.get(name, [stop - start for start, stop in ranges], fetch, given_up, anew=anew)
        return FetchedGroup(opened, as_fetched(parts), is_copy)

    def ranges(self, number: int, opened: OpenFile) -> list[Range]:
        """The requests that fetch a row group's wanted columns."""
        with opened.file.named_errors(number):
            return merge_ranges(opened.ranges(opened.row_groups(number)))

    def _fetch_part(self, number: int, part: Range, given_up: threading.Event | None) -> Data:
        file = self.file_of(number)
        with file.named_errors(number):
            return file.read(part, given_up)

    def open_footer(self, file: DataFile, given_up: threading.Event | None, *, anew: bool) -> pa.NativeFile:
        """A data file, to read its footer from; with `anew` this host's copy of the footer is not used."""
        manifest, cache = self.manifest, self._local_cache
        if self.storage.is_local or manifest.file_footers is None:
            return self.storage.open_parquet(file.name, given_up=given_up)
        # A footer is known by its digest, so that no request is needed for the size.
        digest = int(manifest.file_footers[file.number])

        def fetch(start: int, stop: int) -> Data:
            if cache is None:
                return file.read((start, stop), given_up)
            piece = piece_name("footer", file.number, (start, stop, digest))
            (part,), _ = cache.get(
                piece, [stop - start], lambda: [file.read((start, stop), given_up)], given_up, anew=anew
            )
            return part

        return pa.PythonFile(PartialFile(file.num_bytes, fetch), mode="r")

    @contextlib.contextmanager
    def opened(self, number: int, given_up: threading.Event | None = None) -> Iterator[OpenFile]:
        """The open file of a row group; errors inside name both."""
        file = self.file_of(number)
        with file.named_errors(number):
            yield self.open(file, given_up)

    def open(self, file: DataFile, given_up: threading.Event | None = None) -> OpenFile:
        """The file, checked and open. Threads that ask at the same time share one opening, or its error."""
        while True:
            with self._lock:
                opening = self._opening.get(file.number)
                if opening is None:
                    own = self._opening[file.number] = futures.Future()
            if opening is None:
                try:
                    own.set_result(self._open_alone(file, given_up))
                except BaseException as error:
                    own.set_exception(error if isinstance(error, Exception) else GivenUpError("interrupted"))
                    raise
                finally:
                    with self._lock:
                        del self._opening[file.number]
                return own.result()
            while not opening.done():
                if given_up is not None and given_up.is_set():
                    raise GivenUpError(f"The read of {file.path} was cancelled")
                futures.wait([opening], _LOOK_SECONDS)
            # A thread that was cancelled says nothing about the file.
            with contextlib.suppress(GivenUpError):
                return opening.result()

    def _open_alone(self, file: DataFile, given_up: threading.Event | None) -> OpenFile:
        identity = self.storage.identity(file.name)
        with self._lock:
            opened = self._open.get(file.number)
            if opened is not None and opened.identity == identity:
                self._open.move_to_end(file.number)
                return opened
            # Another file than the mapped one may be shorter than the mapping.
            self._open.pop(file.number, None)
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
                file.check_stamp(given_up)
            raise
        with self._lock:
            self._open[file.number] = opened
            while len(self._open) > MAX_OPEN_FILES:
                self._open.popitem(last=False)
            num_chunks = sum(one.num_metadata_chunks for one in self._open.values())
            if num_chunks > most_metadata_chunks(self.manifest):
                opened.forget_metadata()
        return opened

    def may_keep_chunks(self) -> bool:
        """Whether the places of another row group's column chunks may be remembered."""
        with self._lock:
            return sum(file.num_kept_chunks for file in self._open.values()) < MAX_KEPT_CHUNKS
