"""An open file of a dataset: where it holds the wanted columns, and whether fetched bytes are still theirs."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from converter.places import Place
from converter.portable.footers import end_of, head_of, open_footer
from converter.reading.calendars import is_julian
from converter.reading.checks import DataFile
from converter.reading.decode import is_text
from converter.reading.gather import Array
from converter.reading.pages import Chunk, PlainColumn, find_plain_column
from converter.reading.stored import constant_column, find_outlines, find_places, nulls_in, read_places
from converter.storage.ranges import Fetched, Range

if TYPE_CHECKING:
    from converter.reading.data_files import DataFiles


_DELTA_TEXTS = frozenset((6, 7))
"""DELTA_LENGTH_BYTE_ARRAY and DELTA_BYTE_ARRAY of the format's `Encodings.md`."""


class OpenFile:
    """A data file whose footer was read once; on a local disk it is mapped into memory."""

    def __init__(
        self, files: DataFiles, file: DataFile, given_up: threading.Event | None = None, *, anew: bool = False
    ) -> None:
        self.file, self.identity = file, file.storage.identity(file.name)
        self.verify_checksums = files.verify_checksums
        self.buffer: pa.Buffer | None = None
        self._heads: npt.NDArray[np.uint32] | None = None
        stored = file.stored_footer()
        if stored is not None:
            metadata, self.footer, self._heads = stored
            self.schema = metadata.schema.to_arrow_schema()
            assert file.manifest.file_ends is not None
            self._end: bytes | pa.Buffer = file.manifest.file_ends[file.number].footer
        else:
            with files.open_footer(file, given_up, anew=anew) as opened:
                self.footer = file.check(opened)
                # For a mapped file this is the mapping itself.
                self.buffer = opened.read_buffer() if self.identity is not None else None
                self._end = end_of(opened) if self.buffer is None else self.buffer
                parquet = open_footer(self._end)
                metadata, self.schema = parquet.metadata, parquet.schema_arrow
            file.check_bounds(metadata, self.footer, self.schema)
        self._metadata: pq.FileMetaData | None = metadata
        self.places = find_places(file.manifest, list(files.fields), self.schema)
        self._outlines = find_outlines(file.manifest, self.places, self.schema)
        wanted = [*self.places.values(), *(outline.place for outline in self._outlines.values())]
        self._leaves = [leaf for place in wanted if place is not None for leaf in place.leaves]
        self.footer.keep(self._leaves)
        self._dictionaries = [
            ".".join((self.schema.field(place.top).name, *map(str, place.members)))
            for name, place in self.places.items()
            if place is not None
            and name in file.manifest.categories
            and is_text(place.field.type)
            and self._may_be_dictionary(place)
        ]
        """Columns whose different values are looked up, not each of them."""

        self._chunks: dict[int, dict[str, Chunk | list[Array]]] = {}
        self.plain: dict[str, PlainColumn] = {}
        for name, place in self.places.items():
            is_plain = name not in files.manifest.categories or files.manifest.categories[name].are_coded
            if place is not None and is_plain and not is_julian(metadata, place):
                plain_column = find_plain_column(metadata, place, files.fields[name])
                if plain_column is not None:
                    self.plain[name] = plain_column

    def _may_be_dictionary(self, place: Place) -> bool:
        """Whether Arrow can look up the different values of a column: not of those that are stored as differences."""
        num_row_groups = len(self.footer.row_group_rows)
        return all(
            _DELTA_TEXTS.isdisjoint(self.footer.chunk(index, leaf).encodings)
            for index in range(num_row_groups)
            for leaf in place.leaves
        )

    def check_heads(self, number: int, fetched: Fetched) -> None:
        """Raise SourceChangedError if the columns of the dataset's row group do not begin as the manifest says.

        A column's first page begins with its own checksum, so this notices a file that replaced this one.
        """
        if self._heads is None:
            return
        index = self.file.manifest.row_group_in_file(number)
        for leaf in self._leaves:
            chunk = self.footer.chunk(index, leaf)
            start, num_bytes = head_of(chunk.data_page_offset, chunk.stored_bytes)
            if zlib.crc32(fetched.slice(start, start + num_bytes)) != self._heads[index, leaf]:
                raise self.file.changed("holds other rows than were written there: it was replaced, or is damaged")

    @property
    def metadata(self) -> pq.FileMetaData:
        """The footer as Arrow has it, parsed anew if it was forgotten."""
        metadata = self._metadata
        return open_footer(self._end).metadata if metadata is None else metadata

    @property
    def num_metadata_chunks(self) -> int:
        """How many column chunks Arrow's form of the footer describes; 0 once it was forgotten."""
        metadata = self._metadata
        return 0 if metadata is None else metadata.num_columns * metadata.num_row_groups

    def forget_metadata(self) -> None:
        """Keep the bytes of the footer alone, which need a tenth of the memory."""
        self._metadata = None

    @property
    def num_kept_chunks(self) -> int:
        """How many column chunks have their place remembered."""
        return len(self._chunks) * len(self.plain)

    def plain_chunks(self, index: int, files: DataFiles) -> dict[str, Chunk | list[Array]]:
        """The columns of a row group that may be plain: where they lie, or once they were read, their views."""
        chunks = self._chunks.get(index)
        if chunks is None:
            chunks = {}
            for name, column in self.plain.items():
                chunk = column.find_chunk(self.footer.chunk(index, column.leaf), self.footer.row_group_rows[index])
                if chunk is not None:
                    chunks[name] = chunk
            if files.may_keep_chunks():
                self._chunks[index] = chunks
        return chunks

    def row_groups(self, number: int) -> list[int]:
        """The row groups of this file that the dataset's row group consists of: one, or all that have rows.

        Raises:
            SourceChangedError: they have other rows than the manifest says.
        """
        index = self.file.manifest.row_group_in_file(number)
        rows = self.footer.row_group_rows
        indices = [index] if index >= 0 else [at for at, num_rows in enumerate(rows) if num_rows]
        num_rows = self.footer.rows_of(indices)
        if num_rows != self.file.manifest.row_group_rows[number]:
            raise self.file.rows_changed(number, num_rows)
        return indices

    def ranges(self, indices: Sequence[int]) -> list[Range]:
        """Where the wanted columns of row groups lie. Raises ValueError if the footer points outside the file."""
        ranges, num_bytes = [], self.file.num_bytes
        for index in indices:
            for leaf in self._leaves:
                chunk = self.footer.chunk(index, leaf)
                start = chunk.data_page_offset
                if chunk.dictionary_page_offset:
                    start = min(start, chunk.dictionary_page_offset)
                stop = start + chunk.stored_bytes
                if not 0 <= start <= stop <= num_bytes:
                    raise ValueError(f"its footer places a column at bytes {start} to {stop} of {num_bytes}")
                ranges.append((start, stop))
        return ranges

    def plain_values(self, name: str, chunk: Chunk, fetched: Fetched | None) -> list[Array] | None:
        """A plain column's values in a row group; None if Arrow must decode them."""
        found = list(self.plain_pages(name, chunk, fetched))
        return None if found[-1] is None else [rows for rows in found if rows is not None]

    def plain_pages(self, name: str, chunk: Chunk, fetched: Fetched | None) -> Iterator[Array | None]:
        """The same page by page; None, and no more, if Arrow must decode them."""
        if fetched is None:
            yield from self.plain[name].pages(self.buffer, chunk, verify_checksums=self.verify_checksums)
            return
        in_memory = chunk._replace(start=0, end=chunk.end - chunk.start)
        part = fetched.slice(chunk.start, chunk.end)
        try:
            yield from self.plain[name].pages(part, in_memory, verify_checksums=self.verify_checksums)
        except OSError as error:
            # The bytes are here, so it is damage, and no failure of the store.
            raise pa.ArrowInvalid(str(error)) from error

    def read(
        self, indices: Sequence[int], places: Sequence[Place], fetched: Fetched | None, most_rows: int | None = None
    ) -> list[pa.ChunkedArray]:
        """These columns of row groups, decoded by Arrow; with `most_rows` of no more than the first rows.

        Raises:
            ValueError: damaged pages have another number of values than the footer says.
        """
        with pa.BufferReader(self.buffer) if fetched is None else self.file.open_partial(fetched) as opened:
            parquet = pq.ParquetFile(
                opened,
                metadata=self.metadata,
                read_dictionary=self._dictionaries,
                page_checksum_verification=self.verify_checksums,
                coerce_int96_timestamp_unit="us",
            )
            columns = read_places(parquet, indices, places, most_rows)
        num_rows = self.footer.rows_of(indices)
        for place, column in zip(places, columns, strict=True):
            if len(column) != num_rows and most_rows is None:
                raise ValueError(f"{len(column)} values of column {place.field.name!r}, expected {num_rows}")
        return columns

    def read_absent(
        self, name: str, indices: Sequence[int], num_rows: int, fetched: Fetched | None, most_rows: int | None = None
    ) -> pa.ChunkedArray:
        """A column that the file does not hold: one value for all rows, nulls, or lists of nulls."""
        outline = self._outlines.get(name)
        if outline is None:
            return constant_column(self.file, name, num_rows)
        (column,) = self.read(indices, [outline.place], fetched, most_rows)
        return nulls_in(column, outline, self.file.manifest, name)
