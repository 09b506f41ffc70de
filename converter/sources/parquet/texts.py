"""How long texts are that a dictionary stores once, if their writer did not tell: a dictionary of each column says it.

A look at its head, in one file, takes a request: cheap beside windows that are ten times as large as they are told.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from converter.parsed_footer import LENGTH_BYTES, ParsedFooter
from converter.storage.directory import Storage
from converter.thrift import read_struct

_HEAD_BYTES = 256
"""A page's header: that of a dictionary has no bounds, and takes some 20."""

_DICTIONARY_PAGE = 2
_MOST_BYTES = 1 << 31
"""A page's size is an int32."""


class UnknownTexts(NamedTuple):
    """A leaf column of texts in a file."""

    num_texts: npt.NDArray[np.int64]
    """How many texts of unknown length each row group has."""

    counted_bytes: npt.NDArray[np.int64]
    """What each row group counts so far."""

    dictionary_start: int | None
    """Where the first dictionary stands in the file."""


def unknown_texts(
    footer: ParsedFooter, num_unknown: Sequence[Sequence[int]], in_memory: npt.NDArray[np.int64]
) -> dict[int, UnknownTexts]:
    """The leaf columns of a footer that have texts of unknown length."""
    found = {}
    for leaf, numbers in enumerate(num_unknown):
        if any(numbers):
            first = next(row_group for row_group, number in enumerate(numbers) if number)
            start = footer.chunk(first, leaf).dictionary_page_offset
            found[leaf] = UnknownTexts(np.array(numbers, np.int64), in_memory[leaf], start)
    return found


def lengths_in(
    storage: Storage, name: str, num_bytes: int, texts: Mapping[int, UnknownTexts], given_up: threading.Event
) -> dict[int, int]:
    """The mean length of the texts in a file's first dictionary of each column; of those that can be read."""
    found: dict[int, int] = {}
    # Who reads the column learns what is wrong with the file.
    with contextlib.suppress(OSError), storage.open_parquet(name, num_bytes, given_up) as opened:
        for leaf, text in texts.items():
            if text.dictionary_start is not None and 0 <= text.dictionary_start < num_bytes:
                opened.seek(text.dictionary_start)
                length = _mean_length(bytes(opened.read(_HEAD_BYTES)))
                if length is not None:
                    found[leaf] = length
    return found


def _mean_length(head: bytes) -> int | None:
    """The mean length of a dictionary's texts, from the header of its page; None if it is another page."""
    try:
        header, _ = read_struct(head, 0)
    except (IndexError, ValueError):
        return None
    page = header.get(7)
    page_bytes, num_texts = header.get(2), page.get(1) if isinstance(page, dict) else None
    if header.get(1) != _DICTIONARY_PAGE or type(page_bytes) is not int or type(num_texts) is not int or num_texts < 1:
        return None
    return max(0, min(page_bytes, _MOST_BYTES) // num_texts + 1 - LENGTH_BYTES)


def more_bytes(texts: Mapping[int, UnknownTexts], lengths: Mapping[int, int]) -> dict[int, npt.NDArray[np.int64]]:
    """For each leaf column what its row groups take in memory, beside what is counted already."""
    return {
        leaf: np.maximum(0, texts[leaf].num_texts * (length + LENGTH_BYTES) - texts[leaf].counted_bytes)
        for leaf, length in lengths.items()
    }
