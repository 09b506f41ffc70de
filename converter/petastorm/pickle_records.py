"""The plain records that a pickle is read into, and the names that one may have."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from converter.errors import SourceError

_NAMES = {
    "builtins": "bool bytes dict float frozenset int list long object set str tuple unicode",
    "collections": "OrderedDict defaultdict",
    "_codecs": "encode",
    "copyreg": "_reconstructor __newobj__",
    "decimal": "Decimal",
    "numpy": (
        "dtype bool bool_ int8 int16 int32 int64 intc longlong uint8 uint16 uint32 uint64 uintc ulonglong float16 "
        "float32 float64 complex64 complex128 str_ string_ unicode_ bytes_ object_ datetime64 timedelta64"
    ),
    "numpy.core.multiarray": "scalar",
    "petastorm.codecs": "ScalarCodec NdarrayCodec CompressedNdarrayCodec CompressedImageCodec",
    "petastorm.etl.rowgroup_indexers": "SingleFieldIndexer FieldNotNullIndexer",
    "petastorm.unischema": "Unischema UnischemaField",
    "pyspark.serializers": "_restore",
    "pyspark.sql.types": (
        "ArrayType BinaryType BooleanType ByteType CharType DateType DecimalType DoubleType FloatType IntegerType "
        "LongType MapType NullType ShortType StringType StructField StructType TimestampNTZType TimestampType "
        "VarcharType"
    ),
}
KNOWN_NAMES = {module: frozenset(names.split()) for module, names in _NAMES.items()}
"""What a pickle may name, by module."""

_RENAMED_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg", "numpy._core.multiarray": "numpy.core.multiarray"}
_OLD_PACKAGES = re.compile(r"^(?:av\.(?:ml|experimental\.deepdrive)\.)?dataset_toolkit\.")


class PetastormMetadataError(SourceError):
    """Metadata beside a store's files are missing, lack what is needed, or cannot be understood."""


class UnreadableStoreError(PetastormMetadataError, RuntimeError):
    """`make_reader` cannot read the schema of a store; a RuntimeError, as Petastorm raises it."""


class Name(NamedTuple):
    """A class or function that a pickle names. It is never looked up."""

    module: str
    """As Python 3 and the newest Petastorm call it."""

    name: str


class OldText(bytes):
    """A `str` of Python 2, which may be text or bytes."""

    __slots__ = ()


@dataclass(slots=True, eq=False, repr=False)
class Record:
    """What an object would be made of: nothing is made of it here.

    Records may refer to themselves, as a hostile pickle can say so: walk them with a bound.
    """

    made_by: Name
    args: tuple[Any, ...] = ()
    state: Any = None
    pairs: list[tuple[Any, Any]] | None = None
    """Keys and values that a dictionary was given."""

    items: list[Any] | None = None
    """Members that a set was given."""


Value: TypeAlias = "bool | int | float | str | bytes | tuple[Any, ...] | list[Any] | Name | Record | None"

DICT, SET, FROZEN_SET = Name("builtins", "dict"), Name("builtins", "set"), Name("builtins", "frozenset")
ORDERED_DICT, DEFAULT_DICT = Name("collections", "OrderedDict"), Name("collections", "defaultdict")
UNISCHEMA_FIELD = Name("petastorm.unischema", "UnischemaField")
DICTS = frozenset({DICT, ORDERED_DICT, DEFAULT_DICT})
SETS = frozenset({SET, FROZEN_SET})


class NotUnderstoodError(Exception):
    """Why the machine stops."""


def known_name(module: str, name: str) -> Name:
    """A name by what it is called today.

    Raises:
        NotUnderstoodError: it is none of the names that a schema or an index is made of.

    >>> known_name("av.ml.dataset_toolkit.codecs", "NdarrayCodec"), known_name("__builtin__", "set")
    (Name(module='petastorm.codecs', name='NdarrayCodec'), Name(module='builtins', name='set'))
    """
    canonical = _RENAMED_MODULES.get(module) or _OLD_PACKAGES.sub("petastorm.", module, count=1)
    if name not in KNOWN_NAMES.get(canonical, ()):
        raise NotUnderstoodError(f"it names {shown(f'{module}.{name}')}, which is nothing that a schema is made of")
    return Name(canonical, name)


def _encoded(_: Name, args: tuple[Any, ...]) -> bytes:
    """How protocols 0 to 2 write bytes of Python 3."""
    if len(args) == 2 and type(args[0]) is str and args[1] in ("latin1", "latin-1"):
        try:
            return args[0].encode("latin-1")
        except UnicodeEncodeError:
            pass
    raise NotUnderstoodError("it has bytes that are none")


def _no_bytes(made_by: Name, args: tuple[Any, ...]) -> Any:
    """How protocols 0 to 2 write bytes of length 0."""
    return Record(made_by, args) if args else b""


def _reconstructed(_: Name, args: tuple[Any, ...]) -> Record:
    """How protocols 0 and 1 make an object: the class, its base, and what the base is made of."""
    if len(args) != 3 or not isinstance(args[0], Name) or not isinstance(args[1], Name):
        raise NotUnderstoodError("it makes an object of values that are no class")
    made_by, _base, content = args
    return Record(made_by, tuple(content) if isinstance(content, (tuple, list)) else ())


def _made(_: Name, args: tuple[Any, ...]) -> Record:
    if not args or not isinstance(args[0], Name):
        raise NotUnderstoodError("it makes an object of values that are no class")
    return Record(args[0], args[1:])


def _restored(_: Name, args: tuple[Any, ...]) -> Record:
    """How a named tuple was written where PySpark had replaced the way of pickling them."""
    if len(args) != 3 or args[0] not in ("UnischemaField", b"UnischemaField") or type(args[2]) is not tuple:
        raise NotUnderstoodError("it has a named tuple that is no UnischemaField")
    return Record(UNISCHEMA_FIELD, args[2])


HELPERS: Mapping[Name, Callable[[Name, tuple[Any, ...]], Any]] = {
    Name("_codecs", "encode"): _encoded,
    Name("builtins", "bytes"): _no_bytes,
    Name("copyreg", "_reconstructor"): _reconstructed,
    Name("copyreg", "__newobj__"): _made,
    Name("pyspark.serializers", "_restore"): _restored,
}
"""Functions that pickles call to make an object, and what is written down instead."""


def kind_of(value: Any) -> str:
    """What a value is, for a message. Its content stays out: it may be long, or lead back to itself."""
    if isinstance(value, Record):
        return f"a record of {value.made_by.name}"
    return f"the name {value.module}.{value.name}" if isinstance(value, Name) else f"a {type(value).__name__}"


def shown(text: str) -> str:
    """A text from a store, short enough for a message and without control characters."""
    return repr(text if len(text) <= 80 else f"{text[:80]}…")
