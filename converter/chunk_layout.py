"""The usual layout of a column chunk in a Parquet footer, as regular expressions over Thrift's compact protocol."""

from __future__ import annotations

import functools
import re

from converter.thrift import BINARY, FALSE, I16, I32, I64, LIST, STRUCT, TRUE

_VARINT = rb"[\x80-\xff]{0,9}[\x00-\x7f]"


def _heads(*kinds: int) -> bytes:
    """A field's first byte: how far its number is from the one before, and its type."""
    return b"[" + b"".join(re.escape(bytes([step << 4 | kind])) for step in range(1, 16) for kind in kinds) + b"]"


def _list_of(kind: int, element: bytes, most: int) -> bytes:
    sizes = (re.escape(bytes([size << 4 | kind])) + b"(?:%b){%d}" % (element, size) for size in range(most + 1))
    return b"(?:" + b"|".join(sizes) + b")"


@functools.cache
def chunk_pattern() -> re.Pattern[bytes]:
    """A column chunk as common writers lay it out, with the values that `parsed_footer` takes.

    Compiled at first use: it takes some 50 ms.
    """
    sizes = sorted(range(128), key=lambda size: (size not in (4, 8), size))
    string = b"(?:" + b"|".join(re.escape(bytes([size])) + b".{%d}" % size for size in sizes) + b")"
    number = b"%b%b" % (_heads(I16, I32, I64), _VARINT)
    truth, text = _heads(TRUE, FALSE), _heads(BINARY) + string
    numbers = _list_of(I64, _VARINT, 14)
    struct = rb"(?:%b|%b%b)*\x00" % (number, _heads(LIST), numbers)
    rest = b"(?:%b|%b(?:%b|%b)|%b%b|%b)*" % (
        number, _heads(LIST), _list_of(STRUCT, struct, 6), numbers, _heads(STRUCT), struct, truth,
    )  # fmt: skip
    # max, min, null_count, then max_value and min_value; or without the two that were deprecated.
    common = rb"(?:\x18%b\x18%b\x16|\x36)(%b)(?:(?:\x16%b\x18|\x28)(%b)\x18(%b))?[\x11\x12]{0,2}\x00" % (
        string, string, _VARINT, _VARINT, string, string,
    )  # fmt: skip
    statistics = rb"(?:%b|((?:%b|%b|%b)*\x00))" % (common, number, text, truth)
    metadata = (
        rb"\x15([\x00-\x7f])\x19(%b)\x19%b" % (_list_of(I32, _VARINT, 8), _list_of(BINARY, string, 5))
        + rb"\x15([\x00-\x7f])\x16(%b)\x16(%b)\x16(%b)\x26(%b)" % (_VARINT, _VARINT, _VARINT, _VARINT)
        # The dictionary's place, and statistics: the distance from the field before tells which of them it is.
        + rb"(?:\x26(%b))?(?:(?(8)\x1c|\x3c)%b)?(%b)\x00" % (_VARINT, statistics, rest)
    )
    # A chunk's place in the file, its metadata, and where the indexes of its pages are.
    return re.compile(rb"\x26%b\x1c%b(?:%b)*\x00" % (_VARINT, metadata, number), re.DOTALL)


@functools.cache
def unencoded_pattern() -> re.Pattern[bytes]:
    """What follows a chunk's statistics (group 13), up to the bytes of its texts (`SizeStatistics`, its field 1).

    Before them may stand the numbers of pages of each encoding, and the place and size of a bloom filter.
    """
    page_counts = _list_of(STRUCT, rb"(?:%b%b)*\x00" % (_heads(I32), _VARINT), 6)
    return re.compile(
        rb"(?:%b%b)?(?:%b%b){0,2}%b\x16(%b)"
        % (_heads(LIST), page_counts, _heads(I32, I64), _VARINT, _heads(STRUCT), _VARINT),
        re.DOTALL,
    )
