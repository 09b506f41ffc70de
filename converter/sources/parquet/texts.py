"""How long texts are that a dictionary makes shorter, if their writer did not tell: a column's first rows say it.

A dictionary alone does not: most rows may have one of its shortest texts. They are read once for each schema: windows
would else be ten times as large as they are told.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from converter.parsed_footer import LENGTH_BYTES, ParsedFooter
from converter.storage.at_once import at_once
from converter.storage.directory import Storage

_MOST_BYTES = 8 << 20
"""What a column's first rows take at most, if their texts stand as they are."""

_BUFFER_BYTES = 2 << 20
"""What is fetched of a column at once: a dictionary and the first codes, in most files."""

_ROWS = 1 << 16
_FEW_ROWS = 16
_THREADS = 8


class UnknownTexts(NamedTuple):
    """A leaf column of texts in a file."""

    num_texts: npt.NDArray[np.int64]
    """How many texts of unknown length each row group has."""

    length_bytes: npt.NDArray[np.int64]
    """Those of the lengths of its texts and nulls."""

    counted_bytes: npt.NDArray[np.int64]
    """What each row group counts so far."""

    row_group: int
    """The first one with such texts."""

    num_rows: int
    """How many of its first rows are read."""

    has_deltas: bool
    """Whether Arrow can make no dictionary of it."""

    path: str


def unknown_texts(
    footer: ParsedFooter,
    schema: pq.ParquetSchema,
    num_unknown: Sequence[Sequence[int]],
    counted_bytes: npt.NDArray[np.int64],
) -> dict[int, UnknownTexts]:
    """The leaf columns of a footer that have texts of unknown length."""
    found = {}
    for leaf, numbers in enumerate(num_unknown):
        if any(numbers):
            first = next(row_group for row_group, number in enumerate(numbers) if number)
            counts = footer.counts(leaf)
            num_rows, raw_bytes = footer.row_group_rows[first], counts[first][1]
            found[leaf] = UnknownTexts(
                num_texts=np.array(numbers, np.int64),
                length_bytes=LENGTH_BYTES * np.array([num_values for num_values, _, _ in counts], np.int64),
                counted_bytes=counted_bytes[leaf],
                row_group=first,
                num_rows=min(_ROWS, max(1, num_rows * _MOST_BYTES // max(1, raw_bytes))),
                has_deltas=footer.has_deltas(first, leaf),
                path=schema.column(leaf).path,
            )
    return found


def lengths_in(
    storage: Storage, name: str, num_bytes: int, texts: Mapping[int, UnknownTexts], given_up: threading.Event
) -> dict[int, int]:
    """The mean length of the first texts of each column in a file; of those that can be decoded.

    Raises:
        OSError: the file cannot be fetched. The sizes decide the order of a shuffle, so none may be missing.
    """
    asked = list(texts)

    def look(leaves: Sequence[int]) -> list[tuple[int, int | None]]:
        # Opened once, so that the footer is fetched and parsed once.
        with storage.open_parquet(name, num_bytes, given_up) as opened:
            watched = _Watched(opened)
            # As a dictionary texts stay as small as they are stored; only the pages of the first rows are fetched.
            paths = [texts[leaf].path for leaf in leaves if not texts[leaf].has_deltas]
            file = pq.ParquetFile(watched, read_dictionary=paths, pre_buffer=False, buffer_size=_BUFFER_BYTES)
            return [(leaf, _mean_length(file, watched, texts[leaf])) for leaf in leaves]

    shares = [share for number in range(_THREADS) if (share := asked[number::_THREADS])]
    looks = at_once(look, shares, threads_count=_THREADS, given_up=given_up)
    return {leaf: length for found in looks for leaf, length in found if length is not None}


class _Watched(io.RawIOBase):
    """A file that notes an error of its store: of damaged pages Arrow raises the same kind."""

    def __init__(self, file: pa.NativeFile) -> None:
        super().__init__()
        self._file = file
        self.has_failed = False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._file.tell())

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._file.seek(offset, whence))

    def read(self, size: int = -1) -> bytes:
        try:
            return bytes(self._file.read(None if size < 0 else size))
        except OSError:
            self.has_failed = True
            raise


def _mean_length(file: pq.ParquetFile, watched: _Watched, text: UnknownTexts) -> int | None:
    """The mean length of a leaf column's first texts, rounded up; None if there are only nulls, or damaged pages."""
    try:
        # Of texts with common beginnings the footer does not say how long they may be.
        num_rows = min(text.num_rows, _FEW_ROWS) if text.has_deltas else text.num_rows
        num_texts, num_bytes = _sum_of_first(file, text, num_rows)
        if text.has_deltas:
            num_rows = min(text.num_rows, num_rows * _MOST_BYTES // max(1, num_bytes))
            num_texts, num_bytes = _sum_of_first(file, text, max(1, num_rows))
    except (pa.ArrowException, StopIteration):
        return None
    except OSError:
        if watched.has_failed:
            raise
        # Damage: who reads the column gets the error.
        return None
    return math.ceil(num_bytes / num_texts) if num_texts else None


def _sum_of_first(file: pq.ParquetFile, text: UnknownTexts, num_rows: int) -> tuple[int, int]:
    """How many texts the first rows have, and their bytes."""
    batches = file.iter_batches(num_rows, row_groups=[text.row_group], columns=[text.path], use_threads=False)
    values = _texts_in(next(batches).column(0))
    if pa.types.is_dictionary(values.type):
        lengths = np.asarray(pc.binary_length(values.dictionary))[np.asarray(values.indices.drop_null())]
    else:
        lengths = np.asarray(pc.binary_length(values.drop_null()))
    return len(lengths), int(lengths.sum())


def _texts_in(values: Any) -> Any:
    """The texts of a column, which may be in lists and structs, or of a type that is made of texts, as JSON is."""
    while isinstance(values.type, pa.BaseExtensionType) or (
        values.type.num_fields and not pa.types.is_dictionary(values.type)
    ):
        if isinstance(values.type, pa.BaseExtensionType):
            values = values.storage
        else:
            values = values.field(0) if pa.types.is_struct(values.type) else values.flatten()
    return values


def more_bytes(texts: Mapping[int, UnknownTexts], lengths: Mapping[int, int]) -> dict[int, npt.NDArray[np.int64]]:
    """For each leaf column what its row groups take in memory, beside what is counted already."""
    return {
        leaf: np.maximum(0, text.num_texts * lengths[leaf] + text.length_bytes - text.counted_bytes)
        for leaf, text in texts.items()
        if leaf in lengths
    }
