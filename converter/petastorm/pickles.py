"""Pickles as data: a small machine that reads their bytes into plain records, and runs nothing.

Petastorm keeps a store's schema and its row-group index as pickles. A pickle is a program, and anyone who can write
into a store can write one that deletes files. So nothing here unpickles: the machine knows the opcodes that real stores
have and the names in `pickle_records`, and builds strings, numbers, tuples, lists, `Name`s and `Record`s. It imports,
calls and evaluates nothing that a pickle names. What it does not know is a `PetastormMetadataError` that says so.

Time and memory are bounded: a step costs a few microseconds and some hundred bytes, and `max_steps` bounds the steps.
A value that a pickle refers to again is shared, not copied.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

from converter.petastorm.pickle_records import (
    DICT,
    DICTS,
    FROZEN_SET,
    HELPERS,
    SET,
    SETS,
    Name,
    NotUnderstoodError,
    OldText,
    PetastormMetadataError,
    Record,
    Value,
    kind_of,
    known_name,
)

MAX_BYTES = 128 << 20
"""pyarrow itself reads no footer with a string of more than 100 MB."""

MAX_STEPS = 1_000_000
"""Enough for a schema of 20,000 fields."""

_MAX_STACK = 100_000
_MAX_MARKS = 1_000
_MAX_DIGITS = 80
_MAX_LONG_BYTES = 32

_ESCAPE = re.compile(rb"""\\(?:x([0-9a-fA-F]{2})|([nrt\\'"]))""")
_ESCAPED = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}
_WHOLE = re.compile(rb"[+-]?[0-9]{1,%d}" % _MAX_DIGITS)


def read_pickle(data: bytes, subject: str, *, max_steps: int = MAX_STEPS) -> tuple[Value, int]:
    r"""What a pickle says, as plain values, and the number of steps that saying it took.

    Raises:
        PetastormMetadataError: it is cut, has an opcode or a name that no store of Petastorm's has, or is too large;
            `subject` says in the message what was read.

    >>> read_pickle(b"\x80\x02cnumpy\nint64\nK\x05\x86.", "the schema")[0]
    (Name(module='numpy', name='int64'), 5)
    """
    if len(data) > MAX_BYTES:
        raise _refusal(subject, f"it has {len(data):,} bytes, and {MAX_BYTES:,} are the most that is read")
    machine = _Machine(data, max_steps)
    try:
        return machine.run(), machine.num_steps
    except NotUnderstoodError as error:
        raise _refusal(subject, f"{error} (at byte {machine.opcode_position:,})") from None


def _refusal(subject: str, cause: str) -> PetastormMetadataError:
    return PetastormMetadataError(
        f"The pickle of {subject} cannot be understood: {cause}. Nothing in it was run. If you trust the store, write "
        "its metadata again with converter.petastorm.etl.petastorm_generate_metadata --unischema_class."
    )


class _Machine:
    """Reads opcode by opcode; see `pickletools` for what each one means."""

    def __init__(self, data: bytes, max_steps: int) -> None:
        self.num_steps = 0
        self.opcode_position = 0
        self._data, self._max_steps = data, max_steps
        self._position = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Value:
        """The value at STOP."""
        data, stack = self._data, self._stack
        while True:
            self.opcode_position = self._position
            code = self._take(1)[0]
            if code == 0x2E:
                break
            self.num_steps += 1
            if self.num_steps > self._max_steps:
                raise NotUnderstoodError(f"it has more than {self._max_steps:,} opcodes")
            method = _OPCODES.get(code)
            if method is None:
                raise NotUnderstoodError(f"it has the opcode {_opcode_name(data[self.opcode_position])}")
            method(self)
            if len(stack) > _MAX_STACK or len(self._marks) > _MAX_MARKS:
                raise NotUnderstoodError("it nests values too deeply")
        if len(stack) != 1 or self._marks:
            raise NotUnderstoodError(f"it ends with {len(stack)} values instead of one")
        value: Value = stack[0]
        return value

    # What follows takes bytes from the pickle.

    def _take(self, num_bytes: int) -> bytes:
        stop = self._position + num_bytes
        if stop > len(self._data):
            raise NotUnderstoodError("it is cut off")
        taken = self._data[self._position : stop]
        self._position = stop
        return taken

    def _sized(self, width: int) -> bytes:
        """Bytes whose number stands before them."""
        return self._take(int.from_bytes(self._take(width), "little"))

    def _line(self) -> bytes:
        stop = self._data.find(b"\n", self._position)
        if stop < 0:
            raise NotUnderstoodError("it is cut off")
        line = self._data[self._position : stop]
        self._position = stop + 1
        return line

    def _text(self, data: bytes, encoding: str = "utf-8") -> str:
        try:
            return data.decode(encoding, "surrogatepass" if encoding == "utf-8" else "strict")
        except UnicodeDecodeError:
            raise NotUnderstoodError(f"it has a text that is not {encoding}") from None

    # What follows works on the stack.

    def _pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise NotUnderstoodError("it takes a value that is not there")
        return self._stack.pop()

    def _pop_many(self, count: int) -> tuple[Any, ...]:
        return tuple(self._pop() for _ in range(count))[::-1]

    def _pop_to_mark(self) -> list[Any]:
        if not self._marks:
            raise NotUnderstoodError("it takes values back to a mark that is not there")
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _top(self, kind: str, made_by: frozenset[Name]) -> Record:
        record = self._pop()
        if not isinstance(record, Record) or record.made_by not in made_by:
            raise NotUnderstoodError(f"it adds to {kind_of(record)} as if it were a {kind}")
        self._stack.append(record)
        return record

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self._stack.append(value)

    def mark(self) -> None:
        """MARK."""
        self._marks.append(len(self._stack))

    def protocol(self) -> None:
        """PROTO."""
        if (number := self._take(1)[0]) > 5:
            raise NotUnderstoodError(f"it is of protocol {number}")

    def frame(self) -> None:
        """FRAME: says how many bytes may be fetched at once, which is of no use here."""
        self._take(8)

    def small(self, width: int, *, is_signed: bool = False) -> None:
        """BININT, BININT1, BININT2."""
        self.push(int.from_bytes(self._take(width), "little", signed=is_signed))

    def whole(self, *, is_long: bool) -> None:
        """INT and LONG: digits."""
        line = self._line()
        if not is_long and line in (b"00", b"01"):
            self.push(line == b"01")
            return
        digits = line.removesuffix(b"L") if is_long else line
        if not _WHOLE.fullmatch(digits):
            raise NotUnderstoodError(f"it has a whole number of {len(digits)} characters that is none")
        self.push(int(digits))

    def long(self, width: int) -> None:
        """LONG1 and LONG4."""
        count = int.from_bytes(self._take(width), "little")
        if count > _MAX_LONG_BYTES:
            raise NotUnderstoodError(f"it has a whole number of {count:,} bytes")
        self.push(int.from_bytes(self._take(count), "little", signed=True))

    def real(self) -> None:
        """FLOAT: digits."""
        try:
            self.push(float(self._line()[:_MAX_DIGITS]))
        except ValueError:
            raise NotUnderstoodError("it has a number that is none") from None

    def binary_real(self) -> None:
        """BINFLOAT."""
        self.push(struct.unpack(">d", self._take(8))[0])

    def quoted(self) -> None:
        """STRING: as Python 2 prints it."""
        line = self._line().strip()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
            raise NotUnderstoodError("it has a text without quotes")
        plain = _ESCAPE.sub(lambda found: bytes.fromhex(found[1].decode()) if found[1] else _unescaped(found[2]), line)
        self.push(OldText(plain[1:-1]))

    def old_text(self, width: int) -> None:
        """SHORT_BINSTRING and BINSTRING."""
        self.push(OldText(self._sized(width)))

    def raw_bytes(self, width: int) -> None:
        """SHORT_BINBYTES, BINBYTES and BINBYTES8."""
        self.push(self._sized(width))

    def text(self, width: int) -> None:
        """SHORT_BINUNICODE, BINUNICODE and BINUNICODE8."""
        self.push(self._text(self._sized(width)))

    def text_line(self) -> None:
        """UNICODE."""
        self.push(self._text(self._line(), "raw-unicode-escape"))

    def tuple_of(self, count: int) -> None:
        """TUPLE1, TUPLE2, TUPLE3."""
        self.push(self._pop_many(count))

    def tuple_to_mark(self) -> None:
        """TUPLE."""
        self.push(tuple(self._pop_to_mark()))

    def list_to_mark(self) -> None:
        """LIST."""
        self.push(self._pop_to_mark())

    def dict_to_mark(self) -> None:
        """DICT."""
        self.push(Record(DICT, pairs=self._pairs(self._pop_to_mark())))

    def frozenset_to_mark(self) -> None:
        """FROZENSET."""
        self.push(Record(FROZEN_SET, items=self._pop_to_mark()))

    def append(self, *, is_one: bool) -> None:
        """APPEND and APPENDS."""
        values = [self._pop()] if is_one else self._pop_to_mark()
        target = self._pop()
        if type(target) is not list:
            raise NotUnderstoodError(f"it appends to {kind_of(target)}")
        target += values
        self.push(target)

    def set_items(self, *, is_one: bool) -> None:
        """SETITEM and SETITEMS."""
        pairs = self._pairs(list(self._pop_many(2)) if is_one else self._pop_to_mark())
        record = self._top("dictionary", DICTS)
        if record.pairs is None:
            record.pairs = []
        record.pairs += pairs

    def add_items(self) -> None:
        """ADDITEMS."""
        items = self._pop_to_mark()
        record = self._top("set", SETS)
        if record.items is None:
            record.items = []
        record.items += items

    def _pairs(self, values: list[Any]) -> list[tuple[Any, Any]]:
        if len(values) % 2:
            raise NotUnderstoodError("it has a key without a value")
        return list(zip(values[::2], values[1::2], strict=True))

    def put(self, width: int) -> None:
        """PUT (digits), BINPUT, LONG_BINPUT."""
        value = self._pop()
        self.push(value)
        self._memo[self._number(width)] = value

    def memoize(self) -> None:
        """MEMOIZE."""
        value = self._pop()
        self.push(value)
        self._memo[len(self._memo)] = value

    def get(self, width: int) -> None:
        """GET (digits), BINGET, LONG_BINGET."""
        number = self._number(width)
        if number not in self._memo:
            raise NotUnderstoodError("it refers to a value that it never had")
        self.push(self._memo[number])

    def _number(self, width: int) -> int:
        if width:
            return int.from_bytes(self._take(width), "little")
        line = self._line()
        if not _WHOLE.fullmatch(line):
            raise NotUnderstoodError("it refers to a value by something that is no number")
        return int(line)

    # What follows names things, or says how they were made.

    def global_lines(self) -> None:
        """GLOBAL."""
        self.push(known_name(self._text(self._line()), self._text(self._line())))

    def global_on_stack(self) -> None:
        """STACK_GLOBAL."""
        module, name = self._pop_many(2)
        if type(module) is not str or type(name) is not str:
            raise NotUnderstoodError("it names something by values that are no texts")
        self.push(known_name(module, name))

    def make(self) -> None:
        """REDUCE and NEWOBJ: one calls, the other makes; here both only write down of what."""
        made_by, args = self._pop_many(2)
        if not isinstance(made_by, Name) or type(args) is not tuple:
            raise NotUnderstoodError(f"it calls {kind_of(made_by)} with {kind_of(args)}")
        self.push(HELPERS.get(made_by, Record)(made_by, args))

    def build(self) -> None:
        """BUILD."""
        record, state = self._pop_many(2)
        if not isinstance(record, Record) or record.state is not None:
            raise NotUnderstoodError(f"it gives a state to {kind_of(record)} that has or takes none")
        record.state = state
        self.push(record)


_OPCODES: dict[int, Callable[[_Machine], None]] = {
    ord("("): _Machine.mark,
    ord("N"): lambda machine: machine.push(None),
    0x88: lambda machine: machine.push(True),
    0x89: lambda machine: machine.push(False),
    ord("I"): lambda machine: machine.whole(is_long=False),
    ord("L"): lambda machine: machine.whole(is_long=True),
    ord("J"): lambda machine: machine.small(4, is_signed=True),
    ord("K"): lambda machine: machine.small(1),
    ord("M"): lambda machine: machine.small(2),
    0x8A: lambda machine: machine.long(1),
    0x8B: lambda machine: machine.long(4),
    ord("F"): _Machine.real,
    ord("G"): _Machine.binary_real,
    ord("S"): _Machine.quoted,
    ord("T"): lambda machine: machine.old_text(4),
    ord("U"): lambda machine: machine.old_text(1),
    ord("B"): lambda machine: machine.raw_bytes(4),
    ord("C"): lambda machine: machine.raw_bytes(1),
    0x8E: lambda machine: machine.raw_bytes(8),
    ord("V"): _Machine.text_line,
    ord("X"): lambda machine: machine.text(4),
    0x8C: lambda machine: machine.text(1),
    0x8D: lambda machine: machine.text(8),
    ord(")"): lambda machine: machine.push(()),
    0x85: lambda machine: machine.tuple_of(1),
    0x86: lambda machine: machine.tuple_of(2),
    0x87: lambda machine: machine.tuple_of(3),
    ord("t"): _Machine.tuple_to_mark,
    ord("]"): lambda machine: machine.push([]),
    ord("l"): _Machine.list_to_mark,
    ord("a"): lambda machine: machine.append(is_one=True),
    ord("e"): lambda machine: machine.append(is_one=False),
    ord("}"): lambda machine: machine.push(Record(DICT)),
    ord("d"): _Machine.dict_to_mark,
    ord("s"): lambda machine: machine.set_items(is_one=True),
    ord("u"): lambda machine: machine.set_items(is_one=False),
    0x8F: lambda machine: machine.push(Record(SET)),
    0x90: _Machine.add_items,
    0x91: _Machine.frozenset_to_mark,
    ord("p"): lambda machine: machine.put(0),
    ord("q"): lambda machine: machine.put(1),
    ord("r"): lambda machine: machine.put(4),
    0x94: _Machine.memoize,
    ord("g"): lambda machine: machine.get(0),
    ord("h"): lambda machine: machine.get(1),
    ord("j"): lambda machine: machine.get(4),
    0x80: _Machine.protocol,
    0x95: _Machine.frame,
    ord("c"): _Machine.global_lines,
    0x93: _Machine.global_on_stack,
    ord("R"): _Machine.make,
    0x81: _Machine.make,
    ord("b"): _Machine.build,
}
"""What real stores have. Left out, among others: INST and OBJ, which call; PERSID and EXT, which look things up."""


def _unescaped(sign: bytes) -> bytes:
    return _ESCAPED.get(sign, sign)


def _opcode_name(code: int) -> str:
    import pickletools

    return next((info.name for info in pickletools.opcodes if ord(info.code) == code), f"0x{code:02x}")
