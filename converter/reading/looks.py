"""One file opened for one look, for passes that answer a question."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from converter.manifest import Manifest
from converter.parsed_footer import ParsedFooter
from converter.reading.calendars import floor_times
from converter.reading.checks import (
    KnownFooter,
    OwnFooter,
    check_bounds,
    check_file,
    check_stamp,
    known_footer,
    named_read_errors,
    read_part,
    rows_changed,
)
from converter.reading.decode import signed
from converter.reading.stored import constant_column, find_places, find_ranges, open_partial, read_places
from converter.storage.at_once import at_once
from converter.storage.directory import Storage
from converter.storage.ranges import Data, Fetched, Range, merge_ranges

_MAX_KEPT_FOOTERS = 16


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
            opened = open_partial(manifest, file, read)
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
    return open_partial(manifest, file, read, fetched)


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
