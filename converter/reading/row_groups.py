"""One row group of an open file: its wanted columns, each decoded once."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from converter.categories import Categories
from converter.errors import SourceError
from converter.reading.checks import place_of_row
from converter.reading.decode import Decoded, decode
from converter.reading.gather import WIDE_BYTES, Array, gather_pages, joined, take
from converter.reading.lists import map_chunks, map_values
from converter.reading.nulls import fills_elements, has_fill, null_element_error, null_error
from converter.reading.open_file import OpenFile
from converter.reading.pages import Chunk
from converter.schema import Field
from converter.storage.ranges import Fetched

if TYPE_CHECKING:
    from converter.reading.data_files import DataFiles

MAX_KEPT_CHUNKS = 1 << 17
"""Over all open files: some 10 MB. Finding one anew takes 10 µs."""


@dataclass(frozen=True, slots=True)
class FetchedGroup:
    """The bytes of a remote row group's wanted columns, and its file."""

    opened: OpenFile
    parts: Fetched
    is_copy: bool = False
    """Whether the bytes come from this host's disk."""


class RowGroup:
    """The wanted columns of a row group."""

    def __init__(self, files: DataFiles, number: int, opened: OpenFile, fetched: Fetched | None) -> None:
        self._files, self.number, self.opened, self._fetched = files, number, opened, fetched
        self.num_rows = int(files.manifest.row_group_rows[number])
        self._indices = opened.row_groups(number)
        self._plain = [opened.plain_chunks(index, files) for index in self._indices]
        self._decoded: dict[str, Decoded] = {}
        missing = set[str]().union(*(files.fields.keys() - chunks.keys() for chunks in self._plain))
        self._decode([name for name in files.fields if name in missing] if missing else [])

    def parts(self, name: str) -> list[Any]:
        """A column's values in the arrays that they lie in, in order: numbers `(rows, *shape)`, or one Arrow array.

        Read-only, and of memory that may be the mapped file's.
        """
        with self.opened.file.named_errors(self.number):
            return self._parts(name)

    def columns(self, names: Sequence[str]) -> list[Array]:
        """The values of scalar columns, each in one array; as `parts`."""
        with self.opened.file.named_errors(self.number):
            return [joined(self._parts(name)) for name in names]

    def _parts(self, name: str) -> list[Any]:
        parts = None if name in self._decoded else self._with_codes(name, self._plain_parts(name))
        if parts is None:
            if name not in self._decoded:
                self._decode([name])
                # In the next epoch Arrow decodes it together with the others.
                for chunks in self._plain:
                    chunks.pop(name, None)
            parts = [self._decoded[name].values]
        num_rows = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        if num_rows != self.num_rows:
            # `gather` relies on it.
            raise pa.ArrowInvalid(f"column {name!r} has {num_rows} rows, expected {self.num_rows}")
        return parts

    def field(self, name: str) -> Field:
        """A column as it is wanted."""
        return self._files.fields[name]

    def pages(self, name: str) -> Iterator[Array | None] | None:
        """A column's values, page by page as they are decompressed; None, and no more, if Arrow must decode them.

        There are no such pages if the values lie in memory already, or are codes of a file's own.
        """
        chunks = [kept for kept in (chunks.get(name) for chunks in self._plain) if isinstance(kept, Chunk)]
        categories = self._files.manifest.categories.get(name)
        has_tables = categories is not None and categories.tables is not None
        is_compressed = len(chunks) == len(self._plain) and all(chunk.codec is not None for chunk in chunks)
        if name in self._decoded or has_tables or not is_compressed:
            return None
        return self._pages(name, chunks)

    def _pages(self, name: str, chunks: Sequence[Chunk]) -> Iterator[Array | None]:
        with self.opened.file.named_errors(self.number):
            for chunk in chunks:
                yield from self.opened.plain_pages(name, chunk, self._fetched)

    def _with_codes(self, name: str, parts: list[Array] | None) -> list[Array] | None:
        """The same, with a file's own codes of categories translated."""
        categories = self._files.manifest.categories.get(name)
        table = None if categories is None else (categories.tables or {}).get(self.opened.file.number)
        if parts is None or table is None:
            return parts
        # As unsigned numbers, so that a damaged code is too large, not counted from the end.
        codes = [np.require(part.view(np.uint32), requirements="A") for part in parts]
        if any(len(part) and part.max() >= len(table) for part in codes):
            raise pa.ArrowInvalid(f"column {name!r} has a code that is none of its categories")
        return [take(table, part) for part in codes]

    def _plain_parts(self, name: str) -> list[Array] | None:
        """A column's values as they lie in the pages; None if Arrow must decode them."""
        if len(self._plain) == 1 and isinstance(kept := self._plain[0].get(name), list):
            return kept
        parts: list[Array] = []
        for chunks in self._plain:
            chunk = chunks.get(name)
            if chunk is None or isinstance(chunk, list):
                values = chunk
            else:
                values = self.opened.plain_values(name, chunk, self._fetched)
            if values is None:
                return None
            is_view = isinstance(chunk, Chunk) and self._is_view(name, chunk) and len(values) == 1
            # Fetched bytes are released with this row group.
            if is_view and self._fetched is None and not self.opened.verify_checksums:
                chunks[name] = values
            parts += values
        return parts

    def is_mapped(self, name: str) -> bool:
        """Whether a column's values are the mapped file's memory, once they were asked for."""
        chunks = [chunks.get(name) for chunks in self._plain]
        if self._fetched is not None or name in self._decoded:
            return False
        return all(isinstance(chunk, list) or (chunk is not None and self._is_view(name, chunk)) for chunk in chunks)

    def _is_view(self, name: str, chunk: Chunk) -> bool:
        """Whether a chunk's values are its own bytes: narrowed ones are copies, which would stay with the file."""
        return chunk.codec is None and not self.opened.plain[name].is_narrowed

    def mask(self, name: str) -> npt.NDArray[np.bool_]:
        """Where a column is not null, once its values were asked for."""
        valid = self._decoded[name].valid if name in self._decoded else None
        return np.ones(self.num_rows, np.bool_) if valid is None else valid

    def element_mask(self, name: str) -> Any:
        """Where a column's elements are not null, as `Decoded.element_mask`, once its values were asked for."""
        field = self._files.fields[name]
        if name in self._decoded:
            return self._decoded[name].element_mask(field)
        # Plain values have no null elements.
        return np.ones((self.num_rows, *(field.shape or ())), np.bool_)

    def validate(self) -> None:
        """Raise ReadError if what Arrow decoded contradicts itself."""
        with self.opened.file.named_errors(self.number):
            for decoded in self._decoded.values():
                if isinstance(decoded.values, pa.Array):
                    decoded.values.validate(full=True)

    def _decode(self, names: Sequence[str]) -> None:
        if not names:
            return
        files, places = self._files, self.opened.places
        # Three times: its pages, the columns as the file has them, and as they are wanted.
        files.room.look(3 * int(files.manifest.row_group_bytes[self.number]))
        stored = {name: place for name in names if (place := places[name]) is not None}
        columns = dict(zip(stored, self.opened.read(self._indices, list(stored.values()), self._fetched), strict=True))
        for name in names:
            field, place = files.fields[name], stored.get(name)
            if place is None:
                columns[name] = self.opened.read_absent(name, self._indices, self.num_rows, self._fetched)
            categories = files.manifest.categories.get(name)
            if categories is not None and categories.are_coded:
                columns[name] = categories.global_codes(columns[name], self.opened.file.number)
            elif categories is not None:
                columns[name] = self._codes_of(categories, name, columns[name])
            decoded = decode(
                columns[name],
                field,
                fill=files.fills.get(name),
                stored=None if place is None else place.field,
                is_foreign=files.manifest.source_columns is not None,
            )
            self._decoded[name] = decoded
            self._check_nulls(decoded, field)

    def _codes_of(self, categories: Categories, name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
        """The codes of a column's values, or of the elements of its lists; rows that are not live may have others.

        Raises:
            SourceError: a live row has a value that is none of the categories.
        """
        has_unseen = False

        def look_up(values: pa.Array) -> pa.Array:
            nonlocal has_unseen
            codes = categories.codes_of(values)
            has_unseen |= codes.null_count != values.null_count
            return codes

        codes = map_chunks(column, functools.partial(map_values, function=look_up))
        if has_unseen and categories.unseen == "raise":
            self._refuse_unseen(categories, name, column)
        return codes

    def _refuse_unseen(self, categories: Categories, name: str, column: pa.ChunkedArray) -> None:
        """Raise SourceError for the first live row with a value that is none of the categories, if there is one."""
        files = self._files
        selection = files.manifest.selection
        selected = None if selection is None else selection.live_rows(self.number)
        live = np.arange(self.num_rows) if selected is None else selected

        def first_unseen(start: int, stop: int) -> Any:
            found: list[Any] = []

            def look(values: pa.Array) -> pa.Array:
                found.append(categories.first_unseen(values))
                return values

            map_chunks(column.take(pa.array(live[start:stop])), functools.partial(map_values, function=look))
            return next((value for value in found if value is not None), None)

        start, stop = 0, len(live)
        if first_unseen(start, stop) is None:
            return
        while stop - start > 1:
            middle = (start + stop) // 2
            start, stop = (middle, stop) if first_unseen(start, middle) is None else (start, middle)
        row = int(files.manifest.row_group_rows[: self.number].sum()) + int(live[start])
        found_value = first_unseen(start, stop)
        if isinstance(found_value, bytes) and categories.kind == "str":
            raise SourceError(
                f"Column {name!r} has text that is no UTF-8 in {place_of_row(files.storage, files.manifest, row)}: "
                f"{found_value!r:.80}. Mend or drop such rows with Spark, or take the column out of categories=.",
                column=name,
                path=self.opened.file.path,
            )
        raise SourceError(
            f"Column {name!r} has the value {found_value!r} in "
            f"{place_of_row(files.storage, files.manifest, row)}, which is none of its {len(categories.values):,} "
            "categories. Pass unseen='null' when the converter is made, or other categories, or leave such rows out "
            "with where().",
            column=name,
            path=self.opened.file.path,
        )

    def _check_nulls(self, decoded: Decoded, field: Field) -> None:
        """Raise NullValueError if a live row is null, or an element of one, and no policy covers it."""
        nulls, selection = self._files.nulls, self._files.manifest.selection
        live = None if selection is None else selection.live_rows(self.number)
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


def gather_wide_pages(groups: Sequence[RowGroup], name: str, rows: Any) -> Array | None:
    """The wanted rows of a wide column of numbers, from the compressed pages of all groups; None if it has none."""
    field = groups[0].field(name)
    if field.is_object or not field.shape or field.stored_dtype.itemsize * math.prod(field.shape) < WIDE_BYTES:
        return None
    pages = [found for group in groups if (found := group.pages(name)) is not None]
    if len(pages) < len(groups):
        return None
    return gather_pages(itertools.chain.from_iterable(pages), sum(group.num_rows for group in groups), rows)
