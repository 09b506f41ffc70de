"""Writes plain records as the pickle that Petastorm itself would write of the objects.

Petastorm 0.13 reads no other form of a schema. So the bytes are put together here, without Petastorm or Spark, from
the opcodes of protocol 3, which every Python 3 reads.
"""

from __future__ import annotations

import struct
from typing import Any

from converter.petastorm.pickle_records import (
    DEFAULT_DICT,
    DICT,
    ORDERED_DICT,
    SET,
    UNISCHEMA_FIELD,
    Name,
    Record,
    Value,
)

_CALLED = frozenset(
    {DEFAULT_DICT, ORDERED_DICT, SET, Name("decimal", "Decimal"), Name("numpy", "dtype")}
    | {Name("numpy.core.multiarray", "scalar")}
)
"""What is made by calling it (REDUCE). All else is made by its class's `__new__` (NEWOBJ)."""


def write_pickle(value: Value) -> bytes:
    r"""The pickle of a value.

    >>> write_pickle((1, None))
    b'\x80\x03(K\x01Nt.'
    """
    writer = _Writer()
    writer.write(value)
    return b"\x80\x03" + bytes(writer.opcodes) + b"."


class _Writer:
    """Appends opcodes. A text, a name or a field that comes again is referred to."""

    def __init__(self) -> None:
        self.opcodes = bytearray()
        self._memo: dict[tuple[type, Any], int] = {}

    def write(self, value: Any) -> None:
        """Append what pushes a value."""
        if value is None or value is True or value is False:
            self.opcodes += {None: b"N", True: b"\x88", False: b"\x89"}[value]
        elif isinstance(value, Name):
            self._once(value, b"c" + f"{value.module}\n{value.name}\n".encode())
        elif isinstance(value, str):
            self._once(value, _sized(b"X", value.encode("utf-8", "surrogatepass")))
        elif isinstance(value, bytes):
            self.opcodes += _sized(b"B", value)
        elif isinstance(value, int):
            self._int(value)
        elif isinstance(value, float):
            self.opcodes += b"G" + struct.pack(">d", value)
        elif isinstance(value, tuple):
            self._sequence(value, b"t")
        elif isinstance(value, list):
            self._sequence(value, b"l")
        elif value.made_by != UNISCHEMA_FIELD:
            self._record(value)
        elif not self._referred(Record, id(value)):
            self._record(value)
            self._remember(Record, id(value))

    def _once(self, value: str | Name, opcodes: bytes) -> None:
        if not self._referred(type(value), value):
            self.opcodes += opcodes
            self._remember(type(value), value)

    def _referred(self, kind: type, key: Any) -> bool:
        """Append a reference to what was written before; False if it was not."""
        number = self._memo.get((kind, key))
        if number is not None:
            self.opcodes += b"j" + number.to_bytes(4, "little")
        return number is not None

    def _remember(self, kind: type, key: Any) -> None:
        number = self._memo[kind, key] = len(self._memo)
        self.opcodes += b"r" + number.to_bytes(4, "little")

    def _int(self, value: int) -> None:
        if 0 <= value < 256:
            self.opcodes += b"K" + value.to_bytes(1, "little")
        elif -(2**31) <= value < 2**31:
            self.opcodes += b"J" + value.to_bytes(4, "little", signed=True)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.opcodes += b"\x8a" + len(data).to_bytes(1, "little") + data

    def _sequence(self, values: tuple[Any, ...] | list[Any], end: bytes) -> None:
        if values == ():
            self.opcodes += b")"
            return
        self.opcodes += b"("
        for value in values:
            self.write(value)
        self.opcodes += end

    def _record(self, record: Record) -> None:
        if record.made_by == DICT:
            self.opcodes += b"}"
        else:
            self.write(record.made_by)
            # A set's members are what it is called with: its own opcodes came with protocol 4.
            self.write(record.args if record.items is None else (record.items,))
            self.opcodes += b"R" if record.made_by in _CALLED else b"\x81"
        if record.pairs:
            self.opcodes += b"("
            for key, value in record.pairs:
                self.write(key)
                self.write(value)
            self.opcodes += b"u"
        if record.state is not None:
            self.write(record.state)
            self.opcodes += b"b"


def _sized(opcode: bytes, data: bytes) -> bytes:
    return opcode + len(data).to_bytes(4, "little") + data
