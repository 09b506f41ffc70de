"""Thrift's compact protocol, read safely: values, or IndexError and ValueError, whatever the bytes are."""

from __future__ import annotations

from typing import Any

_MAX_DEPTH = 16
_MAX_VARINT_BITS = 63

TRUE, FALSE, _BYTE, I16, I32, I64, _DOUBLE, BINARY, LIST, _SET, STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12
"""Types of Thrift's compact protocol."""


def read_struct(data: bytes, place: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """A Thrift struct in the compact protocol: values by field number, and the place behind it.

    Structs are dicts, lists are lists, binaries are bytes.

    Raises:
        IndexError: the data end within it.
        ValueError: the bytes are no such struct.
    """
    fields: dict[int, Any] = {}
    number = 0
    while head := data[place]:
        place += 1
        if head >> 4:
            number += head >> 4
        else:
            number, place = read_integer(data, place)
        fields[number], place = read_value(data, place, head & 0x0F, depth)
    return fields, place + 1


def read_varint(data: bytes, place: int) -> tuple[int, int]:
    """An unsigned integer of seven bits a byte, and the place behind it."""
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
        if shift > _MAX_VARINT_BITS:
            raise ValueError("a number has too many bytes")


def read_integer(data: bytes, place: int) -> tuple[int, int]:
    """A signed integer, and the place behind it."""
    value, place = read_varint(data, place)
    return (value >> 1) ^ -(value & 1), place


def read_value(data: bytes, place: int, kind: int, depth: int) -> tuple[Any, int]:
    """A value of a type, and the place behind it."""
    if kind in (I32, I64, I16):
        return read_integer(data, place)
    if kind in (TRUE, FALSE):
        return kind == TRUE, place
    if kind == STRUCT:
        if depth == _MAX_DEPTH:
            raise ValueError("structs are nested too deeply")
        return read_struct(data, place, depth + 1)
    if kind == BINARY:
        size, place = read_varint(data, place)
        return slice_of(data, place, size), place + size
    if kind in (LIST, _SET):
        return read_list(data, place, depth)
    if kind in (_BYTE, _DOUBLE):
        size = 1 if kind == _BYTE else 8
        return slice_of(data, place, size), place + size
    raise ValueError(f"a field has Thrift's type {kind}")


def slice_of(data: bytes, place: int, size: int) -> bytes:
    """So many bytes from a place on. Raises IndexError if there are fewer."""
    if place + size > len(data):
        raise IndexError("the data end within a value")
    return data[place : place + size]


def read_list_head(data: bytes, place: int) -> tuple[int, int, int]:
    """How many elements of which type, and where the first one is."""
    head = data[place]
    size, place = (head >> 4, place + 1) if head >> 4 != 15 else read_varint(data, place + 1)
    # Each element has at least a byte.
    if size > len(data) - place:
        raise IndexError("the data end within a list")
    return size, head & 0x0F, place


def read_list(data: bytes, place: int, depth: int) -> tuple[list[Any], int]:
    """A list of values, and the place behind it."""
    size, kind, place = read_list_head(data, place)
    if kind in (TRUE, FALSE):
        # In a list each boolean has a byte of its own.
        return [byte == TRUE for byte in slice_of(data, place, size)], place + size
    if depth == _MAX_DEPTH:
        raise ValueError("lists are nested too deeply")
    values = []
    for _ in range(size):
        value, place = read_value(data, place, kind, depth + 1)
        values.append(value)
    return values, place


def zigzag(raw: bytes) -> int:
    """The integer whose bytes were matched as a whole."""
    value = 0
    for byte in reversed(raw):
        value = value << 7 | byte & 0x7F
    return (value >> 1) ^ -(value & 1)
