"""A Parquet store as the old readers see it: files, row groups, partition values and the schema beside them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from converter.errors import ReadError, SourceChangedError, SourceError
from converter.petastorm import stored_schema
from converter.petastorm.summary import as_it_is_called, read_summary
from converter.petastorm.unischema import Unischema, unischema_of_arrow
from converter.places import Place, count_leaves
from converter.reading.calendars import in_todays_calendar
from converter.reading.local_cache import LocalCache, piece_name
from converter.sources.parquet.listing import find_files
from converter.storage.at_once import at_once
from converter.storage.directory import Storage
from converter.storage.opening import open_storage
from converter.storage.ranges import Data, PartialFile
from converter.storage.store import TIMEOUT_SECONDS

_FOOTER_THREADS, _FILES_AT_ONCE = 8, 16
_MAX_KEPT_FOOTERS = 256

Stamp = tuple[int, int | None] | None
"""A file's size and its time or ETag as a number; None if its bytes are copies, which are those of one stamp."""


class StoreNotFoundError(SourceError, FileNotFoundError):
    """There is no folder or file under a URL; `.path` names it."""


class RowGroup(NamedTuple):
    """One row group of a store."""

    file: int
    """The number of its file, in the order of their names."""

    number: int
    """Its number in the file."""


@dataclass(frozen=True, kw_only=True)
class Store:
    """The files that a reader was given. Threads share it; nothing stays open between two reads."""

    storage: Storage
    """The folder above all files."""

    names: tuple[str, ...]
    """The files below it, sorted."""

    partitions: tuple[Mapping[str, str | None], ...]
    """For each file the values of the partition columns, as texts."""

    local_cache: LocalCache | None = None
    """Where this host keeps copies of what was fetched."""

    _footers: dict[int, tuple[pq.FileMetaData | bytes, Stamp]] = field(default_factory=dict)
    """Footers, or digests of them, each with the stamp that its file had before the footer was read."""

    _stamps: dict[int, tuple[int, int | None]] = field(default_factory=dict)

    @functools.cached_property
    def metadata(self) -> Mapping[bytes, bytes]:
        """The key-value metadata of `_common_metadata`; empty without that file.

        Raises:
            PetastormMetadataError: the file is damaged.
        """
        found = read_summary(self.storage)
        return {} if found is None else found[1]

    @property
    def partition_names(self) -> tuple[str, ...]:
        """The columns that folders name instead of files."""
        return tuple(self.partitions[0])

    @functools.cached_property
    def arrow_schema(self) -> pa.Schema:
        """The columns of the first file."""
        return self.footer(0).schema.to_arrow_schema()

    def path(self, file: int) -> str:
        """A file's URL, for people."""
        return f"{self.storage.url}/{self.names[file]}"

    @functools.cached_property
    def partition_types(self) -> dict[str, pa.DataType]:
        """The type of each partition column: int64 if all of its values are whole numbers, else string."""
        types: dict[str, pa.DataType] = {}
        for name in self.partition_names:
            texts = {values[name] for values in self.partitions}
            types[name] = pa.int64() if all(_is_whole(text) for text in texts) else pa.string()
        return types

    def stored_schema(self) -> Unischema | None:
        """The schema that was stored beside the files; None if there is none.

        Raises:
            PetastormMetadataError: it cannot be understood.
        """
        return stored_schema.read_schema(self.metadata)

    def inferred_schema(self) -> Unischema:
        """The schema that the files themselves have; columns without a form are left out, with a warning."""
        return unischema_of_arrow(self.arrow_schema, self.partition_types, omit_unsupported_fields=True)

    def row_groups(self) -> list[RowGroup]:
        """All row groups, file by file. Their numbers come from the stored counts, or from the footers.

        Raises:
            SourceError: a file cannot be read.
        """
        return [RowGroup(file, number) for file, count in enumerate(self.counts) for number in range(count)]

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of row groups of each file, as stored beside the files, or from the footers.

        Raises:
            SourceError: a file cannot be read.
        """
        stored = stored_schema.row_groups_per_file(self.metadata) or {}
        is_stored = stored.keys() >= set(self.names)
        # A file that is said to have none would never be opened, and so never found to be another.
        counted = [file for file, name in enumerate(self.names) if not is_stored or not stored[name]]
        parts = [counted[start : start + _FILES_AT_ONCE] for start in range(0, len(counted), _FILES_AT_ONCE)]
        found = at_once(self._count, parts, threads_count=_FOOTER_THREADS, given_up=threading.Event())
        by_file = dict(zip(counted, itertools.chain(*found), strict=True))
        return tuple(by_file[file] if file in by_file else stored[name] for file, name in enumerate(self.names))

    def _count(self, files: Sequence[int]) -> list[int]:
        """The number of row groups of some files: one thread takes many, or threads would cost more than files."""
        return [self.footer(file).num_row_groups for file in files]

    def footer(self, file: int) -> pq.FileMetaData:
        """A file's footer, read once."""
        kept = self._footers.get(file)
        return self._open(file)[0].metadata if kept is None or isinstance(kept[0], bytes) else kept[0]

    @functools.cached_property
    def digest(self) -> bytes:
        """A text that is another one if a file has another footer, or there are other files."""
        files = [(name, _digest(self.footer(file)).hex()) for file, name in enumerate(self.names)]
        return hashlib.sha256(repr(files).encode()).hexdigest().encode()

    def _look(self, file: int, given_up: threading.Event | None) -> Stamp:
        if self.local_cache is not None and not self.storage.is_local:
            return None
        try:
            return self.storage.look(self.names[file], given_up)
        except FileNotFoundError as error:
            path = self.path(file)
            raise SourceChangedError(f"{path} is gone. Make the reader again.", path=path) from error

    def read(self, row_group: RowGroup, columns: Sequence[str], given_up: threading.Event | None = None) -> pa.Table:
        """These columns of a row group, as `open_row_group` reads them; again if its file changes meanwhile."""
        try:
            return self.open_row_group(row_group, given_up)(columns)
        except SourceChangedError:
            # By a file with the same footer, perhaps, which is as good.
            return self.open_row_group(row_group, given_up)(columns)

    def open_row_group(
        self, row_group: RowGroup, given_up: threading.Event | None = None
    ) -> Callable[[Sequence[str]], pa.Table]:
        """A function that reads columns of a row group. It may be called several times: all of them are of one file.

        Partition columns are strings; a column that the file lacks is null. Requests end once `given_up` is set.

        Raises:
            ReadError: the row group cannot be read; `.path` and `.row_group` say which.
            SourceChangedError: its file is gone, or is another one than before; also while it was read.
            SourceError: a column has old times that Spark counted by another calendar.
        """
        file, index = row_group
        path = self.path(file)
        with self._named_errors(row_group):
            parquet, stamp = self._open(file, given_up)
        if parquet.metadata.num_row_groups != self.counts[file]:
            raise SourceChangedError(
                f"{path} has {parquet.metadata.num_row_groups} row groups, expected {self.counts[file]}: the file "
                "was replaced, or the counts in _common_metadata are old. Write the metadata again.",
                path=path,
            )
        num_rows = parquet.metadata.row_group(index).num_rows

        def read(columns: Sequence[str]) -> pa.Table:
            stored = [name for name in columns if name in parquet.schema_arrow.names]
            with self._named_errors(row_group):
                table = parquet.read_row_group(index, columns=stored, use_threads=False)
                # After the bytes: nothing else tells that they came from the file of the footer.
                is_same = self._look(file, given_up) == stamp
            if not is_same:
                raise self._replaced(file)
            return self._with_other_columns(_in_todays_calendar(table, parquet), file, columns, num_rows)

        return read

    @contextlib.contextmanager
    def _named_errors(self, row_group: RowGroup) -> Iterator[None]:
        path = self.path(row_group.file)
        try:
            yield
        except FileNotFoundError as error:
            raise SourceChangedError(f"{path} is gone. Make the reader again.", path=path) from error
        except (pa.ArrowException, OSError, ValueError) as error:
            cause = str(error).rstrip(". \n")
            raise ReadError(
                f"Row group {row_group.number} of {path} cannot be read: {cause}.",
                path=path,
                row_group=row_group.number,
            ) from error

    def _with_other_columns(self, table: pa.Table, file: int, columns: Sequence[str], num_rows: int) -> pa.Table:
        """A file's columns with those of its folders and those that it lacks, in this order."""
        arrays = dict(zip(table.column_names, table.columns, strict=True))
        for name in columns:
            if name in self.partitions[file]:
                arrays[name] = pa.chunked_array(
                    [pa.repeat(pa.scalar(self.partitions[file][name], pa.string()), num_rows)]
                )
            elif name not in arrays:
                kind = self.arrow_schema.field(name).type if name in self.arrow_schema.names else pa.null()
                arrays[name] = pa.chunked_array([pa.nulls(num_rows, kind)])
        return pa.table({name: arrays[name] for name in columns})

    def _open(self, file: int, given_up: threading.Event | None = None) -> tuple[pq.ParquetFile, Stamp]:
        """A file, and its stamp from before it was opened.

        Raises:
            SourceChangedError: it has another footer than before.
        """
        stamp, kept = self._look(file, given_up), self._footers.get(file)
        if kept is not None and kept[1] == stamp:
            footer = None if isinstance(kept[0], bytes) else kept[0]
            return self._parquet(file, footer, stamp, given_up), stamp
        parquet = self._parquet(file, None, stamp, given_up)
        may_keep = len(self._footers) < _MAX_KEPT_FOOTERS or len(self.names) <= _MAX_KEPT_FOOTERS
        known = parquet.metadata if may_keep else _digest(parquet.metadata)
        # Another thread may have opened the file before.
        known, _ = self._footers.setdefault(file, (known, stamp))
        if known != (_digest(parquet.metadata) if isinstance(known, bytes) else parquet.metadata):
            raise self._replaced(file)
        self._footers[file] = known, stamp
        return parquet, stamp

    def _replaced(self, file: int) -> SourceChangedError:
        path = self.path(file)
        return SourceChangedError(f"{path} was replaced since it was opened. Make the reader again.", path=path)

    def _parquet(
        self, file: int, footer: pq.FileMetaData | None, stamp: Stamp, given_up: threading.Event | None
    ) -> pq.ParquetFile:
        name, path = self.names[file], self.path(file)
        try:
            source = self._source(file, given_up, None if stamp is None else stamp[0])
            return pq.ParquetFile(source, metadata=footer, coerce_int96_timestamp_unit="us")
        except FileNotFoundError as error:
            raise SourceChangedError(f"{path} is gone. Make the reader again.", path=path) from error
        except (pa.ArrowException, OSError, ValueError) as error:
            cause = str(error).rstrip(". \n")
            raise SourceError(f"{path} is no Parquet file that can be read: {cause}.", path=path) from error
        except KeyError as error:
            raise SourceError(f"{name!r} is not a file of {self.storage.url}.", path=path) from error

    def _source(self, file: int, given_up: threading.Event | None, num_bytes: int | None) -> Any:
        """A file to read from; of a remote one what was fetched before comes from this host's disk."""
        name, cache = self.names[file], self.local_cache
        if self.storage.is_local or cache is None:
            return self.storage.open_parquet(name, num_bytes, given_up)
        if file not in self._stamps:
            self._stamps[file] = self.storage.look(name, given_up)
        size, stamp = self._stamps[file]
        if stamp is None:
            # Nothing would tell copies of another file of this size.
            return self.storage.open_parquet(name, num_bytes, given_up)

        def read(start: int, stop: int) -> list[Data]:
            data = self.storage.read_part(name, start, stop, given_up)
            if self.storage.look(name, given_up) != (size, stamp):
                # Its bytes would be kept as those of the file before.
                raise self._replaced(file)
            return [data]

        def fetch(start: int, stop: int) -> Data:
            piece = piece_name("rows", file, (name, start, stop, size, stamp))
            parts, _ = cache.get(piece, [stop - start], lambda: read(start, stop), given_up)
            return parts[0]

        return pa.PythonFile(PartialFile(size, fetch), mode="r")


def open_store(
    urls: Sequence[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    open_cache: Callable[[Storage], LocalCache | None] = lambda _: None,
) -> Store:
    """The store at these URLs: a folder, or files.

    Raises:
        StoreNotFoundError: there is no such folder or file.
        SourceError: there are no Parquet files, or they lie on several stores.
    """
    plain = [as_it_is_called(_without_double_slashes(url)) for url in urls]
    try:
        storage, partitions = find_files(plain, storage_options, TIMEOUT_SECONDS)
    except SourceError as error:
        for url in plain:
            if not _is_there(url, storage_options):
                raise StoreNotFoundError(str(error), path=error.path) from error
        raise
    names = tuple(sorted([*partitions, *_named_again(storage, partitions, plain)]))
    return Store(
        storage=storage,
        names=names,
        partitions=tuple(partitions[name] for name in names),
        local_cache=open_cache(storage),
    )


def _is_there(url: str, storage_options: Mapping[str, Any] | None) -> bool:
    folder = open_storage(url, storage_options, TIMEOUT_SECONDS)
    return folder.exists or not folder.has_folders


def _named_again(storage: Storage, names: Iterable[str], urls: Sequence[str]) -> Iterator[str]:
    """The files of URLs that a list has more than once: they are read as often."""
    for url, count in Counter(urls).items():
        if count > 1:
            path = storage.path_of(url)
            for name in names:
                own = storage.path(name)
                if own == path or own.startswith(f"{path}/"):
                    yield from [name] * (count - 1)


def _in_todays_calendar(table: pa.Table, parquet: pq.ParquetFile) -> pa.Table:
    """Columns of a file, old dates counted as today where Spark 2 or its LEGACY mode counted them otherwise."""
    leaf = 0
    for top, field_in_file in enumerate(parquet.schema_arrow):
        if field_in_file.name in table.column_names:
            at = table.column_names.index(field_in_file.name)
            place = Place(leaf, top, (), field_in_file)
            stored = table.column(at)
            column = in_todays_calendar(stored, parquet.metadata, place)
            table = table if column is stored else table.set_column(at, field_in_file.name, column)
        leaf += count_leaves(field_in_file.type)
    return table


def _digest(footer: pq.FileMetaData) -> bytes:
    sink = io.BytesIO()
    footer.write_metadata_file(sink)
    return hashlib.sha256(sink.getvalue()).digest()


def load_schema(store: Store) -> Unischema:
    """The stored schema, else the one that the files have."""
    return store.stored_schema() or store.inferred_schema()


def _without_double_slashes(url: str) -> str:
    scheme, sign, path = url.partition("://")
    if not sign:
        return url
    return f"{scheme}://{'/' * path.startswith('/')}{'/'.join(part for part in path.split('/') if part)}"


def _is_whole(text: str | None) -> bool:
    return text is not None and text.isascii() and text.removeprefix("-").isdigit() and abs(int(text)) < 2**63
