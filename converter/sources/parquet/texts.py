"""How long texts are that a dictionary makes shorter, if their writer did not tell: a column's first rows say it.

A dictionary alone does not: most rows may have one of its shortest texts. A column's part of a row group is small where
a dictionary made it so. It is read once for each schema: windows would else be ten times as large as they are told.
"""

from __future__ import annotations

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
"""What is read of a column at most: in a larger part most texts stand as they are."""

_ROWS = 1 << 16
_THREADS = 8


class UnknownTexts(NamedTuple):
    """A leaf column of texts in a file."""

    num_texts: npt.NDArray[np.int64]
    """How many texts of unknown length each row group has."""

    counted_bytes: npt.NDArray[np.int64]
    """What each row group counts so far."""

    row_group: int | None
    """The first one with such texts; None if it is too large to be read."""

    path: str


def unknown_texts(
    footer: ParsedFooter,
    schema: pq.ParquetSchema,
    num_unknown: Sequence[Sequence[int]],
    in_memory: npt.NDArray[np.int64],
) -> dict[int, UnknownTexts]:
    """The leaf columns of a footer that have texts of unknown length."""
    found = {}
    for leaf, numbers in enumerate(num_unknown):
        if any(numbers):
            first = next(row_group for row_group, number in enumerate(numbers) if number)
            is_small = footer.chunk(first, leaf).stored_bytes <= _MOST_BYTES
            path = schema.column(leaf).path
            found[leaf] = UnknownTexts(np.array(numbers, np.int64), in_memory[leaf], first if is_small else None, path)
    return found


def lengths_in(
    storage: Storage, name: str, num_bytes: int, texts: Mapping[int, UnknownTexts], given_up: threading.Event
) -> dict[int, int]:
    """The mean length of the first texts of each column in a file; of those that can be decoded.

    Raises:
        OSError: the file cannot be fetched. The sizes decide the order of a shuffle, so none may be missing.
    """
    asked = [leaf for leaf, text in texts.items() if text.row_group is not None]

    def look(leaves: Sequence[int]) -> list[tuple[int, int | None]]:
        # Opened once, so that the footer is fetched once.
        with storage.open_parquet(name, num_bytes, given_up) as opened:
            return [(leaf, _mean_length(opened, texts[leaf], is_local=storage.is_local)) for leaf in leaves]

    shares = [share for number in range(_THREADS) if (share := asked[number::_THREADS])]
    looks = at_once(look, shares, threads_count=_THREADS, given_up=given_up)
    return {leaf: length for found in looks for leaf, length in found if length is not None}


def _mean_length(opened: pa.NativeFile, text: UnknownTexts, *, is_local: bool) -> int | None:
    """The mean length of a leaf column's first texts, rounded up; None if there are only nulls, or damaged pages."""
    try:
        # As a dictionary the texts stay as small as they are stored.
        file = pq.ParquetFile(opened, read_dictionary=[text.path])
        batches = file.iter_batches(_ROWS, row_groups=[text.row_group], columns=[text.path], use_threads=False)
        values: Any = next(batches).column(0)
    except (pa.ArrowException, StopIteration):
        return None
    except OSError as error:
        # Arrow's own of damaged pages: who reads the column gets the error.
        if is_local and error.errno is None:
            return None
        raise
    while values.type.num_fields and not pa.types.is_dictionary(values.type):
        values = values.field(0) if pa.types.is_struct(values.type) else values.flatten()
    if not pa.types.is_dictionary(values.type):
        # Texts of a type of the user's own.
        return None
    indices = np.asarray(values.indices.drop_null())
    lengths = np.asarray(pc.binary_length(values.dictionary))
    return math.ceil(lengths[indices].mean()) if len(indices) else None


def more_bytes(texts: Mapping[int, UnknownTexts], lengths: Mapping[int, int]) -> dict[int, npt.NDArray[np.int64]]:
    """For each leaf column what its row groups take in memory, beside what is counted already."""
    return {
        leaf: np.maximum(0, text.num_texts * (lengths[leaf] + LENGTH_BYTES) - text.counted_bytes)
        for leaf, text in texts.items()
        if leaf in lengths
    }
