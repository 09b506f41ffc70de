"""Petastorm's metadata, mutated: pickles of schemas and of indexes in every protocol, JSON, and programs of our own.

    python -m tests.faults.petastorm_fuzz FIRST COUNT
    python -m tests.faults.petastorm_fuzz bombs

Each case is made from its number alone. It ends with what stands in the metadata, or with a PetastormMetadataError;
any other end, a program that the metadata start, an import, or a case that takes long or much memory is printed as a
violation.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import pickle
import random
import resource
import sys
import time
import traceback
import tracemalloc
from collections.abc import Callable
from typing import Any

from converter.petastorm.pickle_records import KNOWN_NAMES, PetastormMetadataError
from converter.petastorm.pickles import MAX_STEPS
from converter.petastorm.stored_schema import (
    JSON_SCHEMA_KEY,
    ROW_GROUPS_PER_FILE_KEY,
    ROWGROUPS_INDEX_KEY,
    UNISCHEMA_KEY,
    index_entries,
    read_indexes,
    read_schema,
    row_groups_per_file,
    schema_entries,
)
from tests.petastorm_pickles import PROTOCOLS, dumps, fake_indexes, fake_schema

_MAX_MEMORY_BYTES = 8 << 30
_MAX_SECONDS = 5
_MAX_BYTES_OF_A_CASE = 64 << 20

_FORBIDDEN_EVENTS = ("import", "exec", "compile", "os.", "subprocess.", "pickle.find_class", "socket.", "shutil.")
_PROGRAMS = [
    b"cos\nsystem\n(S'echo harmed'\ntR.",
    b"cbuiltins\neval\n(S'1 / 0'\ntR.",
    b"c__builtin__\n__import__\n(S'antigravity'\ntR.",
    b"(S'echo harmed'\nios\nsystem\n.",
    b"(cos\nsystem\nS'echo harmed'\no.",
    b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0becho harmed\x85R.",
    b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93\x8c\x02os\x8c\x06system\x86R.",
    b"cnumpy\nload\n(S'/etc/passwd'\ntR.",
    b"cpetastorm.codecs\nnp.load\n.",
    b"P1234\n.",
    b"\x82\x01.",
]


def bases() -> list[tuple[bytes, bytes, Callable[[dict[bytes, bytes]], Any]]]:
    """Key, value, and what reads it."""
    made: list[tuple[bytes, bytes, Callable[[dict[bytes, bytes]], Any]]] = []
    for protocol in PROTOCOLS:
        for in_python in (False, True):
            made.append((UNISCHEMA_KEY, dumps(fake_schema(), protocol, in_python=in_python), read_schema))
            made.append((ROWGROUPS_INDEX_KEY, dumps(fake_indexes(), protocol, in_python=in_python), read_indexes))
    schema = read_schema({UNISCHEMA_KEY: made[0][1]})
    assert schema is not None
    made += [(key, value, read_schema) for key, value in schema_entries(schema).items()]
    indexes = read_indexes({ROWGROUPS_INDEX_KEY: made[1][1]})
    made += [(key, value, read_indexes) for key, value in index_entries(list(indexes.values())).items()]
    counts = json.dumps({f"day={day}/part-{day}.parquet": day for day in range(9)}).encode()
    return [*made, (ROW_GROUPS_PER_FILE_KEY, counts, row_groups_per_file)]


def mutate(data: bytes, chance: random.Random) -> bytes:
    """Some bytes changed, moved, left out or put in; now and then a program among them, or a name changed."""
    harmed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        place, kind = chance.randrange(len(harmed)), chance.randrange(11)
        size = chance.choice((1, 1, 2, 4, 9, 40))
        if kind == 0:
            harmed[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            harmed[place] = chance.randrange(256)
        elif kind == 2:
            del harmed[place : place + size]
        elif kind == 3:
            harmed[place:place] = chance.randbytes(size)
        elif kind == 4:
            other = chance.randrange(len(harmed))
            harmed[place : place + size] = harmed[other : other + size]
        elif kind == 5:
            # Opcodes, instead of bytes that are within texts most of the time.
            harmed[place] = chance.choice(b"(.0123:FGIJKLMNPQRSTUVXabcdeghijlopqrstu}]\x80\x81\x82\x85\x8a\x8e\x93\x94")
        elif kind == 6:
            harmed[place:place] = chance.choice(_PROGRAMS)[: chance.choice((-1, -1, 40, 8))]
        elif kind == 7:
            # What is counted in eight, sixteen or 32 bits.
            harmed[place : place + 4] = chance.choice((b"\xff" * 4, b"\0" * 4, b"\x7f" * 4, b"\xff\xff\xff\x7f"))
        elif kind == 8:
            module = chance.choice(sorted(KNOWN_NAMES))
            name = chance.choice(sorted(KNOWN_NAMES[module]))
            harmed[place:place] = f"c{module}\n{name}\n".encode()
        elif kind == 9:
            del harmed[place:]
        else:
            harmed[place:place] = bytes(harmed[place : place + size]) * chance.choice((2, 50, 500))
        harmed = harmed or bytearray(b".")
    return bytes(harmed)


def mutate_json(data: bytes, chance: random.Random) -> bytes:
    """JSON with some values replaced by others, which stand there or elsewhere."""
    whole = [json.loads(data)]
    for _ in range(chance.choice((1, 1, 2, 5))):
        places: list[tuple[Any, Any]] = []
        waiting: list[Any] = [whole]
        while waiting:
            holder = waiting.pop()
            for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
                places.append((holder, key))
                if isinstance(holder[key], (dict, list)):
                    waiting.append(holder[key])
        holder, key = chance.choice(places)
        other, other_key = chance.choice(places)
        strange = [
            None,
            True,
            -1,
            0,
            2**31,
            10**40,
            1.5,
            float("nan"),
            "",
            "a" * 1000,
            "numpy.load",
            "U99999999",
            [],
            {},
        ]
        kind = chance.randrange(4)
        if kind == 0:
            # A copy: what holds itself is no JSON.
            holder[key] = json.loads(json.dumps(other[other_key]))
        elif kind == 1 and len(holder) > 1:
            del holder[key]
        elif kind == 2 and isinstance(holder, dict):
            holder[f"{key}{chance.randrange(9)}"] = holder.pop(key)
        else:
            holder[key] = chance.choice(strange)
    return json.dumps(whole[0] if whole else None).encode()


def bombs() -> list[tuple[str, bytes]]:
    """Pickles that would grow beyond all bounds if they were copied, or that claim a size that they lack."""
    lists = b"\x80\x04]\x94" + b"".join(b"](" + b"h%c" % number * 9 + b"e\x94" for number in range(250)) + b"."
    tuples = b"\x80\x04)\x94" + b"".join(b"h%ch%c\x86\x94" % (number, number) for number in range(250)) + b"."
    spark = b"\x80\x02cpyspark.sql.types\nArrayType\nq\0)\x81q\x01}(X\x0b\0\0\0elementTypeh\x01ub"
    codec = b"cpetastorm.codecs\nScalarCodec\n)\x81}X\x0b\0\0\0_spark_type" + spark[2:] + b"sb"
    field = b"cpetastorm.unischema\nUnischemaField\n(X\x01\0\0\0acnumpy\nint8\n)" + codec + b"\x89t\x81"
    many = field + b"q\x05" + b"".join(b"X\x04\0\0\0%04dh\x05" % number for number in range(9_000))
    index = b"cpetastorm.etl.rowgroup_indexers\nSingleFieldIndexer\n)\x81}(X\x0b\0\0\0_index_nameX\x01\0\0\0a"
    index += b"X\x0c\0\0\0_column_nameX\x01\0\0\0aX\x0b\0\0\0_index_data}("
    numbers = b"\x8f(" + b"".join(b"J" + number.to_bytes(4, "little") for number in range(50_000)) + b"\x90q\x09"
    index += (
        b"K\x00" + numbers + b"".join(b"J" + number.to_bytes(4, "little") + b"h\x09" for number in range(1, 50_000))
    )
    return [
        ("lists of lists", lists),
        ("tuples of tuples", tuples),
        ("an array of itself", b"\x80\x02cpetastorm.unischema\nUnischema\n)\x81}(X\x05\0\0\0_nameX\x01\0\0\0n"
         b"X\x07\0\0\0_fieldsccollections\nOrderedDict\n)R(X\x01\0\0\0a" + field + b"uub."),
        ("one field, many times", b"\x80\x02cpetastorm.unischema\nUnischema\n)\x81}(X\x05\0\0\0_nameX\x01\0\0\0n"
         b"X\x07\0\0\0_fieldsccollections\nOrderedDict\n)R(X\x01\0\0\0a" + many + b"uub."),
        ("one set, many times", b"\x80\x04}X\x01\0\0\0a" + index + b"uubs."),
        ("marks", b"\x80\x02" + b"(" * 5_000_000 + b"."),
        ("values", b"\x80\x02" + b"]" * 5_000_000 + b"."),
        ("a long text that is not there", b"\x80\x02X\xff\xff\xff\x7fabc."),
        ("a long text that is not there, in 64 bits", b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc."),
        ("a long number", b"\x80\x02\x8b\xff\xff\xff\x7f."),
        ("a long number of digits", b"I" + b"9" * 5_000_000 + b"\n."),
        ("a far place", b"\x80\x02Nr\xff\xff\xff\xffj\xff\xff\xff\xff."),
        ("a tower of tuples", b"\x80\x02N" + b"\x85" * 300_000 + b"."),
        ("a tower of dictionaries", b"\x80\x02N" + b"".join([b"}NN" + b"s"] * 60_000) + b"."),
        ("a tower of states", b"\x80\x02" + b"cnumpy\ndtype\n)R" * 30_000 + b"b" * 29_999 + b"."),
    ]  # fmt: skip


class Guard:
    """Notes what the metadata start; hooks of Python's own audit cannot be removed, so it is switched."""

    def __init__(self) -> None:
        self.is_on = False
        self.events: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self.is_on and event.startswith(_FORBIDDEN_EVENTS):
            self.events.append(f"{event} {args[:1]}"[:200])

    def run(self, label: str, read: Callable[[dict[bytes, bytes]], Any], metadata: dict[bytes, bytes]) -> str | None:
        """What is wrong with the end of a case; None if nothing is."""
        # The processor's seconds: another program on the machine is no fault of the reader's.
        begun, self.events, self.is_on = time.process_time(), [], True
        try:
            read(metadata)
        except PetastormMetadataError as error:
            wrong = None if 20 < len(str(error)) < 1_000 else f"a message of {len(str(error))} characters"
        except BaseException as error:  # noqa: BLE001 (all others are violations)
            where = traceback.extract_tb(error.__traceback__)[-1]
            wrong = f"{type(error).__name__}: {error!s:.200} at {where.filename}:{where.lineno}"
        else:
            wrong = None
        finally:
            self.is_on = False
        if self.events:
            wrong = f"started {self.events[:3]}"
        if (seconds := time.process_time() - begun) > _MAX_SECONDS:
            wrong = f"took {seconds:.1f} s"
        return None if wrong is None else f"{label}: {wrong}"


def run_cases(first: int, count: int) -> list[str]:
    """The violations of some mutated metadata."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    # What an error's message needs, and what decodes a text of NumPy's, is imported before.
    import pickletools  # noqa: F401

    "".encode("utf-32-be"), "".encode("utf-32-le")

    logging.disable()
    guard, known, violations = Guard(), bases(), []
    # JSON is read most often, and mutated in the most ways.
    known += 4 * [base for base in known if base[0] in (JSON_SCHEMA_KEY, ROW_GROUPS_PER_FILE_KEY)]
    for number in range(first, first + count):
        chance = random.Random(number)
        key, value, read = known[number % len(known)]
        is_json = key in (JSON_SCHEMA_KEY, ROW_GROUPS_PER_FILE_KEY)
        metadata = {key: (mutate_json if is_json and chance.random() < 0.7 else mutate)(value, chance)}
        if key == JSON_SCHEMA_KEY and chance.random() < 0.3:
            metadata[UNISCHEMA_KEY] = mutate(known[0][1], chance)
        if wrong := guard.run(f"case {number}", read, metadata):
            violations.append(wrong)
    return violations


def _refused(read: Callable[[dict[bytes, bytes]], Any], metadata: dict[bytes, bytes]) -> None:
    read(metadata)
    raise AssertionError("was not refused")


def run_bombs() -> list[str]:
    """The violations of the bombs: all must be refused, in little time and, seen in a second pass, in little memory."""
    guard, violations = Guard(), []
    for name, data in bombs():
        for key, read in ((UNISCHEMA_KEY, read_schema), (ROWGROUPS_INDEX_KEY, read_indexes)):
            # Tracing takes four to six times as long as the reading itself.
            wrong = guard.run(name, functools.partial(_refused, read), {key: data})
            tracemalloc.start()
            with contextlib.suppress(PetastormMetadataError):
                _refused(read, {key: data})
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            # A step may keep a list in a memo.
            if peak > _MAX_BYTES_OF_A_CASE + min(MAX_STEPS * 200, 40 * len(data)):
                wrong = f"{name}: took {peak:,} bytes for {len(data):,}"
            violations += [wrong] if wrong else []
    return violations


def run_wrong_readers() -> list[str]:
    """The violations of readers that fail, or start what they are given: two, or no case could ever be one."""
    guard = Guard()
    ends = [
        guard.run("fails", lambda metadata: metadata[b"missing"], {}),
        guard.run("starts", lambda metadata: pickle.loads(metadata[b""]), {b"": b"ccolorsys\nrgb_to_hls\n."}),
    ]
    return [end for end in ends if end]


if __name__ == "__main__":
    others = {"bombs": run_bombs, "wrong": run_wrong_readers}
    for violation in others[sys.argv[1]]() if len(sys.argv) == 2 else run_cases(int(sys.argv[1]), int(sys.argv[2])):
        print(violation)
