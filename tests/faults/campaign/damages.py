"""What may happen to the bytes of a file: bits and bytes, cuts, repeats, swaps; and values of JSON, rows, footers.

Each kind of damage is made from a generator alone, so that a step that holds a seed is the same damage each time.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from converter.parsed_footer import parse_end
from tests.faults.footer_fuzz import mutated_file

Edit = Callable[[bytearray, random.Random], None]

_STRANGE = (
    None, True, False, -1, 0, 1, 2, 7, 2**31, 2**53, 2**63 - 1, 2**63, 10**40, 1.5, -0.0, 1e308, "", "a", "0", "ž" * 40,
    "a" * 5000, "../../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "x\x00y", "%2e%2e", "float32", "int64",
    "str", [], {}, [[]], [None], {"a": {}}, "9" * 25, "1970-01-01", "null",
)  # fmt: skip
_VALUE = re.compile(rb'[:\[]\s*("[^"\\]*"|-?[0-9]+|true|false|null)')
_MARKED = (0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF)
"""Bytes at the edge of what is counted in 32 bits, or not at all."""


def _place(data: bytearray, chance: random.Random) -> int:
    return chance.randrange(len(data))


def _flip(data: bytearray, chance: random.Random) -> None:
    data[_place(data, chance)] ^= 1 << chance.randrange(8)


def _flips(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.choice((2, 5, 20))):
        _flip(data, chance)


def _set(data: bytearray, chance: random.Random) -> None:
    data[_place(data, chance)] = chance.choice(_MARKED) if chance.random() < 0.5 else chance.randrange(256)


def _leave_out(data: bytearray, chance: random.Random) -> None:
    place = _place(data, chance)
    del data[place : place + chance.choice((1, 1, 4, 30))]


def _put_in(data: bytearray, chance: random.Random) -> None:
    place = _place(data, chance)
    data[place:place] = chance.randbytes(chance.choice((1, 1, 4, 30)))


def _copy(data: bytearray, chance: random.Random) -> None:
    place, other, size = _place(data, chance), _place(data, chance), chance.choice((1, 4, 30, 300))
    part = data[other : other + size]
    data[place : place + len(part)] = part


def _swap(data: bytearray, chance: random.Random) -> None:
    first, second = sorted((_place(data, chance), _place(data, chance)))
    size = min(second - first, len(data) - second, chance.choice((1, 4, 30, 300)))
    data[first : first + size], data[second : second + size] = (
        data[second : second + size],
        data[first : first + size],
    )


def _repeat(data: bytearray, chance: random.Random) -> None:
    place = _place(data, chance)
    data[place:place] = data[place : place + chance.choice((1, 4, 30, 300))] * chance.choice((1, 1, 3, 40))


def _zeros(data: bytearray, chance: random.Random) -> None:
    """A block that was never written."""
    place, size = _place(data, chance), chance.choice((1, 8, 64, 512))
    data[place : place + size] = bytes(len(data[place : place + size]))


def _cut(data: bytearray, chance: random.Random) -> None:
    del data[_place(data, chance) :]


def _count(data: bytearray, chance: random.Random) -> None:
    """A number of few bytes becomes one of many."""
    place = _place(data, chance)
    data[place : place + 1] = bytes([chance.randrange(128, 256)] * chance.randrange(1, 9))


_EDITS: dict[str, Edit] = {
    "flip": _flip, "flips": _flips, "set": _set, "leave out": _leave_out, "put in": _put_in, "copy": _copy,
    "swap": _swap, "repeat": _repeat, "zeros": _zeros, "cut": _cut, "count": _count,
}  # fmt: skip
_WHOLE = ("gone", "empty", "junk", "twice", "longer", "other")

BYTES = (*_EDITS, *_WHOLE)
"""What may happen to any file."""

OF_JSON = ("json", "json", "json", "lines", "deep", *BYTES)
OF_MANIFEST = ("near",) * 20 + ("very deep", *OF_JSON)
OF_SMALL_JSON = ("deep",) * 8 + ("very deep", *OF_JSON)
OF_COMMIT = OF_JSON
"""Not very deep: delta-rs takes as much stack as JSON is deep (converter/SECURITY.md)."""

OF_PARQUET = ("footer", "footer", "end", "end", "head", "head", "head", *BYTES)
OF_CHECKPOINT = ("rows", "rows", "deep", *OF_PARQUET)


def damage(data: bytes, how: str, seed: int, *, whole: bytes, others: Sequence[bytes]) -> bytes | None:
    """The bytes of a file after damage of a kind; None if the file is gone.

    Args:
        data: its bytes now.
        how: the kind, one of those above.
        seed: which bytes, and what they become.
        whole: its bytes when they were not damaged yet.
        others: other files of its kind, one of which may stand in its place.
    """
    chance = random.Random(seed)
    if how == "gone":
        return None
    if how == "empty":
        return b""
    if how == "junk":
        return chance.randbytes(len(data))
    if how == "twice":
        return data + data
    if how == "longer":
        return data + chance.choice((b"x", b"\n", b"\0", b"{}", b"PAR1"))
    if how == "other":
        return chance.choice(others) if others else data
    if not data:
        return data
    if how == "json":
        return edit_json(data, chance)
    if how == "near":
        return _edit_near(data, chance)
    if how == "lines":
        return _edit_lines(data, chance)
    if how in ("deep", "very deep") and whole[-4:] != b"PAR1":
        return _deepen(data, chance, (100, 3000) if how == "deep" else (100_000,))
    if how == "rows":
        return _edit_rows(whole, chance)
    if how == "footer" and whole[-4:] == b"PAR1":
        return mutated_file(whole, chance)
    edited = bytearray(data)
    if how == "head" and (places := _heads(whole)):
        # What describes a page, and the levels behind it.
        start = min(chance.choice(places), len(edited) - 1)
        part = edited[start : start + 40]
        _EDITS[chance.choice(("flip", "flip", "set", "set", "count", "leave out"))](part, chance)
        edited[start : start + 40] = part
        return bytes(edited)
    if how == "end" and whole[-4:] == b"PAR1":
        # A footer of as many bytes.
        start = max(0, len(edited) - 8 - int.from_bytes(whole[-8:-4], "little"))
        part = edited[start:]
        _EDITS[chance.choice(("flip", "flip", "set", "copy", "swap"))](part, chance)
        edited[start:] = part[: len(edited) - start]
        return bytes(edited)
    _EDITS[how if how in _EDITS else "flip"](edited, chance)
    return bytes(edited)


def _heads(whole: bytes) -> list[int]:
    """Where the pages of column chunks begin."""
    if whole[-4:] != b"PAR1":
        return []
    footer = parse_end(whole[-8 - int.from_bytes(whole[-8:-4], "little") :])
    places = []
    for group in range(len(footer.row_group_rows)):
        for leaf in range(len(footer.leaf_types)):
            chunk = footer.chunk(group, leaf)
            places += [chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset]
    return places


def _edit_lines(data: bytes, chance: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    place, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    kind = chance.randrange(4)
    if kind == 0:
        del lines[place]
    elif kind == 1:
        lines.insert(place, lines[other])
    elif kind == 2:
        lines[place], lines[other] = lines[other], lines[place]
    else:
        lines.insert(place, chance.choice((b"\n", b"{}\n", b"null\n", b"[]\n", b'{"add":null}\n', b'{"txn":{}}\n')))
    return b"".join(lines)


def edit_json(data: bytes, chance: random.Random) -> bytes:
    """JSON, or lines of it, with some values replaced by strange ones or by others that stand there."""
    lines = data.split(b"\n")
    numbers = [number for number, line in enumerate(lines) if line.strip()]
    if not numbers:
        return data
    number = chance.choice(numbers)
    try:
        whole = [json.loads(lines[number])]
    except (ValueError, RecursionError):
        return data
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        _edit_value(whole, chance)
    lines[number] = json.dumps(whole[0], separators=(",", ":")).encode() if whole else b""
    return b"\n".join(lines)


def _deepen(data: bytes, chance: random.Random, depths: Sequence[int]) -> bytes:
    """JSON in which a value became many brackets: more than a parser's stack may hold."""
    depth = chance.choice(depths)
    left, right = chance.choice(((b"[", b"]"), (b'{"a":', b"}")))
    deep = left * depth + b"1" + right * depth
    places = [found.span(1) for found in _VALUE.finditer(data)]
    start, stop = chance.choice(places) if places else (0, len(data))
    return data[:start] + deep + data[stop:]


def _edit_value(whole: list[Any], chance: random.Random) -> None:
    places: list[tuple[Any, Any]] = []
    waiting: list[Any] = [whole]
    while waiting:
        holder = waiting.pop()
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            places.append((holder, key))
            if isinstance(holder[key], (dict, list)):
                waiting.append(holder[key])
    if not places:
        return
    holder, key = chance.choice(places) if chance.random() < 0.5 else _from_above(whole, chance)
    inner = holder[key]
    if isinstance(inner, str) and inner.startswith("{") and chance.random() < 0.8:
        # JSON within JSON, such as a file's statistics.
        holder[key] = edit_json(inner.encode(), chance).decode()
        return
    kind = chance.randrange(6)
    if kind == 0:
        other, other_key = chance.choice(places)
        # A copy: what holds itself is no JSON.
        holder[key] = json.loads(json.dumps(other[other_key]))
    elif kind == 1 and holder is not whole:
        del holder[key]
    elif kind == 2 and isinstance(holder, list) and len(holder) > 1:
        chance.shuffle(holder)
    elif kind == 3 and isinstance(holder, dict):
        holder[chance.choice(("", "x", "tables", "footers", "deletionVector", "partitionValues"))] = holder.pop(key)
    elif kind == 4 and type(inner) is int:
        holder[key] = inner + chance.choice((-1, 1, 1, 100, -100))
    else:
        # A copy: the lists among them may be damaged later.
        holder[key] = json.loads(json.dumps(chance.choice(_STRANGE)))


def _edit_near(data: bytes, chance: random.Random) -> bytes:
    """A manifest in which a value became another of its type, so that it is found only by what it means."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return data
    if not isinstance(document, dict):
        return data
    lists = [document[name] for name in ("files", "row_groups") if document.get(name)]
    for _ in range(5):
        whole = [chance.choice(lists) if lists and chance.random() < 0.5 else document]
        holder, key = _from_above(whole, chance)
        inner = holder[key]
        if holder is whole or isinstance(inner, (bool, float, list, dict)) or inner is None:
            continue
        if isinstance(holder, list) and chance.random() < 0.5:
            # Its order, or how many there are.
            chance.choice((chance.shuffle, list.pop, lambda some: some.append(some[0])))(holder)
        elif isinstance(inner, int):
            holder[key] = inner + chance.choice((-1, 1))
        else:
            holder[key] = chance.choice((f"./{inner}", f"x/../{inner}", f"{inner}x"))
        break
    return json.dumps(document, separators=(",", ":")).encode()


def _from_above(whole: list[Any], chance: random.Random) -> tuple[Any, Any]:
    """A value by its way from the top, so that one that stands beside much is as likely as all of that."""
    holder: Any = whole
    while True:
        key = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        inner = holder[key]
        if not isinstance(inner, (dict, list)) or not inner or (holder is not whole and chance.random() < 0.15):
            return holder, key
        holder = inner


def _edit_rows(whole: bytes, chance: random.Random) -> bytes:
    """The rows of a checkpoint: some left out, twice, in another order, or with nulls in a column."""
    if whole[-4:] != b"PAR1":
        return edit_json(whole, chance)
    table = pq.read_table(pa.BufferReader(whole))
    rows = list(range(table.num_rows))
    kind = chance.randrange(5) if rows else chance.randrange(2, 5)
    if kind == 0:
        del rows[chance.randrange(len(rows))]
    elif kind == 1:
        rows.insert(chance.randrange(len(rows)), chance.choice(rows))
    elif kind == 2:
        chance.shuffle(rows)
    elif kind == 3:
        index = chance.randrange(table.num_columns)
        field = table.schema.field(index).with_nullable(True)
        table = table.set_column(index, field, pa.nulls(table.num_rows, field.type))
    else:
        table = table.drop_columns([chance.choice(table.column_names)])
    file = pa.BufferOutputStream()
    pq.write_table(table.take(pa.array(rows, pa.int64())), file)
    data: bytes = file.getvalue().to_pybytes()
    return data
