"""Schemas and indexes of row groups as Petastorm pickles them: read from plain records, and written as such."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, cast

import numpy as np

from converter.petastorm.codecs import (
    CompressedImageCodec,
    CompressedNdarrayCodec,
    NamedSparkType,
    NdarrayCodec,
    ScalarCodec,
)
from converter.petastorm.etl import RowGroupIndexerBase
from converter.petastorm.etl.rowgroup_indexers import FieldNotNullIndexer, SingleFieldIndexer
from converter.petastorm.pickle_records import (
    DEFAULT_DICT,
    DICT,
    DICTS,
    KNOWN_NAMES,
    ORDERED_DICT,
    SET,
    SETS,
    UNISCHEMA_FIELD,
    Name,
    OldText,
    PetastormMetadataError,
    Record,
    kind_of,
    shown,
)
from converter.petastorm.pickle_writing import write_pickle
from converter.petastorm.pickles import read_pickle
from converter.petastorm.unischema import Unischema, UnischemaField

MAX_INDEX_STEPS = 20_000_000
"""Enough for an index of a million values; so many take some 20 seconds."""

_SCHEMA, _INDEX = "the schema", "the index of row groups"
_MAX_AXES = 64
_MAX_DEPTH = 8
_MAX_SIZE = 2**31
_NAMED_STATE = {"DecimalType": ("precision", "scale"), "CharType": ("length",), "VarcharType": ("length",)}
_DTYPE = re.compile(r"[<>|=]?(?:[iuf][1248]|c8|c16|b1|[SU][0-9]{1,7}|[Mm]8)")
_UNITS = frozenset({"Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic"})

_ALIASES = {"bool": "bool_", "string_": "bytes_", "unicode_": "str_", "intc": "int32", "uintc": "uint32"}
_NUMPY_TYPES = sorted(KNOWN_NAMES["numpy"] - {"dtype"} - _ALIASES.keys())
_PLAIN_TYPES: Mapping[Name, Any] = {
    Name("decimal", "Decimal"): Decimal,
    Name("builtins", "bool"): bool,
    Name("builtins", "bytes"): bytes,
    Name("builtins", "float"): float,
    Name("builtins", "int"): int,
    Name("builtins", "str"): str,
    Name("builtins", "object"): object,
}
_PYTHON_2_TYPES: Mapping[Name, Any] = {Name("builtins", "long"): int, Name("builtins", "unicode"): str}
VALUE_TYPES: Mapping[Name, Any] = {
    **{Name("numpy", name): getattr(np, canonical) for name, canonical in _ALIASES.items()},
    **{Name("numpy", name): getattr(np, name) for name in _NUMPY_TYPES},
    **_PYTHON_2_TYPES,
    **_PLAIN_TYPES,
}
"""What a field's `numpy_dtype` may be, by the names that pickles have for it."""

NAMES_OF_TYPES: Mapping[Any, Name] = {kind: name for name, kind in VALUE_TYPES.items()}
"""The names by which Petastorm 0.13 knows them."""

_OWN_ATTRIBUTES = frozenset(
    {"_name", "_fields", "_get_namedtuple", "fields", "create_schema_view", "as_spark_schema", "make_namedtuple"}
    | {"make_namedtuple_tf", "from_arrow_schema"}
)
"""What Petastorm's Unischema has besides its fields, which are attributes unless they have one of these names."""


def schema_of_pickle(data: bytes) -> Unischema:
    """The schema that a pickle describes. Nothing in it is run.

    Raises:
        PetastormMetadataError: it is none, or has something in it that is not known.
    """
    root, num_steps = read_pickle(data, _SCHEMA)
    return _Translation(_SCHEMA, num_steps).schema(root)


def indexes_of_pickle(data: bytes) -> dict[str, RowGroupIndexerBase]:
    """The indexes of row groups that a pickle describes. Nothing in it is run.

    Raises:
        PetastormMetadataError: it holds none, or something that is not known.
    """
    root, num_steps = read_pickle(data, _INDEX, max_steps=MAX_INDEX_STEPS)
    return _Translation(_INDEX, num_steps).indexes(root)


def pickle_of_schema(schema: Unischema) -> bytes:
    """The pickle of a schema as Petastorm 0.13 reads it.

    Raises:
        ValueError: a field has a type or a codec that Petastorm does not know.
    """
    fields = {name: _field_record(field) for name, field in schema.fields.items()}
    attributes = {name: field for name, field in fields.items() if name not in _OWN_ATTRIBUTES and name[:2] != "__"}
    ordered = Record(ORDERED_DICT, pairs=list(fields.items()))
    state = {"_name": schema.__name__, "_fields": ordered, **attributes}
    return write_pickle(Record(Name("petastorm.unischema", "Unischema"), state=_dict_record(state)))


def pickle_of_indexes(indexers: Sequence[RowGroupIndexerBase]) -> bytes:
    """The pickle of indexes of row groups as Petastorm 0.13 reads it.

    Raises:
        ValueError: an indexed value is of a type that has no form in a pickle of ours.
        TypeError: an indexer is none of this package.
    """
    return write_pickle(_dict_record({indexer.index_name: _indexer_record(indexer) for indexer in indexers}))


class _Translation:
    """Makes objects of records, each of which is looked at no more often than there were steps to make them.

    So a pickle that refers to one record a billion times costs no more than one that is as long without that.
    """

    def __init__(self, subject: str, num_steps: int) -> None:
        self._subject = subject
        self._looks_left = 2 * num_steps + 1_000
        self._codecs: dict[int, Any] = {}

    def schema(self, record: Any) -> Unischema:
        """A Unischema."""
        state = self._state(self._made_by(record, "petastorm.unischema", "Unischema"))
        fields = [self._field(field) for _, field in self._pairs(state.get("_fields"))]
        names = [field.name for field in fields]
        if len(set(names)) < len(names):
            raise self._refusal("two of its fields have one name")
        return Unischema(self._text(state.get("_name")), fields)

    def indexes(self, record: Any) -> dict[str, RowGroupIndexerBase]:
        """Indexes by name."""
        return {self._text(name): self._indexer(indexer) for name, indexer in self._pairs(record)}

    def _field(self, record: Any) -> UnischemaField:
        values = self._made_by(record, *UNISCHEMA_FIELD).args
        if not 3 <= len(values) <= 5:
            raise self._refusal(f"a field has {len(values)} parts instead of 5")
        name, kind, shape, codec, nullable = (*values, None, False)[:5]
        return UnischemaField(
            self._text(name), self._type(kind), self._shape(shape), self._codec(codec), self._flag(nullable)
        )

    def _type(self, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, Record):
            return self._dtype(value)
        if isinstance(value, Name) and value in VALUE_TYPES:
            return VALUE_TYPES[value]
        raise self._refusal(f"a field's values are of {kind_of(value)}")

    def _shape(self, value: Any) -> tuple[int | None, ...]:
        if not isinstance(value, (tuple, list)) or len(value) > _MAX_AXES:
            raise self._refusal(f"a field's shape is {kind_of(value)}")
        self._look(len(value))
        sizes = [self._scalar(size) if isinstance(size, Record) else size for size in value]
        if not all(size is None or (type(size) is int and 0 <= size < _MAX_SIZE) for size in sizes):
            raise self._refusal("a field's shape has a size that is no number")
        return tuple(sizes)

    def _flag(self, value: Any) -> bool | None:
        flag = self._scalar(value) if isinstance(value, Record) else value
        if flag is not None and (type(flag) not in (bool, int) or flag not in (0, 1)):
            raise self._refusal(f"a field is nullable by {kind_of(value)}")
        return None if flag is None else bool(flag)

    def _codec(self, record: Any) -> Any:
        if record is None:
            return None
        if id(record) not in self._codecs:
            self._codecs[id(record)] = self._new_codec(record)
        return self._codecs[id(record)]

    def _new_codec(self, record: Any) -> Any:
        if not isinstance(record, Record) or record.made_by.module != "petastorm.codecs":
            raise self._refusal(f"a field's codec is {kind_of(record)}")
        state = {} if record.state is None else self._state(record)
        name = record.made_by.name
        if name == "ScalarCodec":
            return ScalarCodec(self._spark_type(state.get("_spark_type")))
        if name == "CompressedImageCodec":
            quality = state.get("_quality", 80)
            if type(quality) is not int or not 0 <= quality <= 100:
                raise self._refusal("a picture's quality is no number up to 100")
            return CompressedImageCodec(self._text(state.get("_image_codec")).removeprefix("."), quality)
        return NdarrayCodec() if name == "NdarrayCodec" else CompressedNdarrayCodec()

    def _spark_type(self, value: Any, depth: int = 0) -> NamedSparkType:
        self._look(1)
        name = value.made_by if isinstance(value, Record) else value
        if not isinstance(name, Name) or name.module != "pyspark.sql.types" or depth > _MAX_DEPTH:
            raise self._refusal(f"a codec's Spark type is {kind_of(value)}")
        state = self._state(value) if isinstance(value, Record) and value.state is not None else {}
        arguments: tuple[Any, ...] = tuple(state[key] for key in _NAMED_STATE.get(name.name, ()) if key in state)
        if not all(type(argument) is int and 0 <= argument < _MAX_SIZE for argument in arguments):
            raise self._refusal(f"a {name.name} has no sizes that are numbers")
        if name.name == "ArrayType":
            arguments = (
                self._spark_type(state.get("elementType"), depth + 1),
                self._flag(state.get("containsNull")) is not False,
            )
        try:
            return NamedSparkType(name.name, arguments)
        except (ValueError, TypeError) as error:
            raise self._refusal(str(error)) from None

    def _indexer(self, record: Any) -> RowGroupIndexerBase:
        if not isinstance(record, Record) or record.made_by.module != "petastorm.etl.rowgroup_indexers":
            raise self._refusal(f"an index is {kind_of(record)}")
        state = self._state(record)
        name, column = self._text(state.get("_index_name")), self._text(state.get("_column_name"))
        if record.made_by.name == "FieldNotNullIndexer":
            filled = FieldNotNullIndexer(name, column)
            filled.add_row_groups(self._numbers(state.get("_index_data")))
            return filled
        by_value = SingleFieldIndexer(name, column)
        for value, row_groups in self._pairs(state.get("_index_data")):
            by_value.add_row_groups(self._scalar(value), self._numbers(row_groups))
        return by_value

    def _numbers(self, record: Any) -> set[int]:
        if not isinstance(record, Record) or record.made_by not in SETS:
            raise self._refusal(f"numbers of row groups are {kind_of(record)}")
        numbers = record.items if record.items is not None else next(iter(record.args), [])
        if not isinstance(numbers, (list, tuple)):
            raise self._refusal(f"numbers of row groups are {kind_of(numbers)}")
        self._look(len(numbers))
        if not all(type(number) is int and 0 <= number < _MAX_SIZE for number in numbers):
            raise self._refusal("a row group has no number")
        return set(numbers)

    def _scalar(self, value: Any) -> Any:
        """A value that an index knows, as Python has it; days and times as NumPy has them."""
        if type(value) in (str, bytes, int, float, bool):
            return value
        if isinstance(value, OldText):
            return self._text(value)
        if not isinstance(value, Record):
            raise self._refusal(f"a value is {kind_of(value)}")
        args = value.args
        if value.made_by == Name("decimal", "Decimal") and len(args) == 1:
            text = self._text(args[0])
            if re.fullmatch(r"-?(?:[0-9.]{1,80}(?:E[+-]?[0-9]{1,9})?|s?NaN|Infinity)", text):
                try:
                    return Decimal(text)
                except ArithmeticError:
                    pass
        if value.made_by != Name("numpy.core.multiarray", "scalar") or len(args) != 2 or not isinstance(args[1], bytes):
            raise self._refusal(f"a value is {kind_of(value)}")
        dtype, data = self._dtype(args[0]), args[1]
        if len(data) != dtype.itemsize:
            raise self._refusal(f"a value of {len(data)} bytes should be a {dtype}")
        if dtype.kind == "S":
            return bytes(data).rstrip(b"\0")
        if dtype.kind == "U":
            # NumPy itself fails with a SystemError at four bytes that are no sign.
            try:
                return data.decode("utf-32-be" if dtype.str[0] == ">" else "utf-32-le").rstrip("\0")
            except UnicodeDecodeError:
                raise self._refusal("a value is a text that is none") from None
        value = np.frombuffer(data, dtype)[0]
        return value if dtype.kind in "mM" else value.item()

    def _dtype(self, record: Any) -> np.dtype[Any]:
        self._look(1)
        args = self._made_by(record, "numpy", "dtype").args
        code = self._text(args[0]) if args else ""
        state = record.state if isinstance(record.state, tuple) else ()
        if not _DTYPE.fullmatch(code):
            raise self._refusal(f"NumPy has no dtype {shown(code)} for a value")
        dtype = np.dtype(code)
        order = self._text(state[1]) if len(state) > 1 else "="
        if order not in ("<", ">", "=", "|"):
            raise self._refusal(f"a dtype has the order of bytes {shown(order)}")
        if dtype.kind in "mM" and len(state) > 8:
            dtype = np.dtype(f"{dtype.kind}8[{self._unit(state[8])}]")
        return np.dtype(f"{order}{dtype.str[1:]}") if order in "<>" else dtype

    def _unit(self, metadata: Any) -> str:
        """The unit of a time, such as `25us`."""
        details = metadata[1] if isinstance(metadata, tuple) and len(metadata) == 2 else None
        if isinstance(details, tuple) and len(details) >= 2:
            unit = self._text(OldText(details[0]) if isinstance(details[0], bytes) else details[0])
            if unit in _UNITS and type(details[1]) is int and 1 <= details[1] < _MAX_SIZE:
                return unit if details[1] == 1 else f"{details[1]}{unit}"
        raise self._refusal("a time has no unit")

    def _made_by(self, record: Any, module: str, name: str) -> Record:
        self._look(1)
        if not isinstance(record, Record) or record.made_by != (module, name):
            raise self._refusal(f"{kind_of(record)} stands where a {name} was expected")
        return record

    def _state(self, record: Record) -> dict[str, Any]:
        return {self._text(name): value for name, value in self._pairs(record.state)}

    def _pairs(self, record: Any) -> Sequence[tuple[Any, Any]]:
        """The keys and values of a dictionary, given one by one or when it was made."""
        if not isinstance(record, Record) or record.made_by not in DICTS:
            raise self._refusal(f"{kind_of(record)} stands where a dictionary was expected")
        pairs: Iterable[Any] = record.pairs or ()
        if record.pairs is None and record.made_by == ORDERED_DICT and record.args:
            pairs = record.args[0] if isinstance(record.args[0], (list, tuple)) else ()
        made = list(pairs)
        self._look(len(made))
        if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in made):
            raise self._refusal("a dictionary has a key without a value")
        return [(key, value) for key, value in made]

    def _text(self, value: Any) -> str:
        if isinstance(value, OldText):
            try:
                return value.decode()
            except UnicodeDecodeError:
                return value.decode("latin-1")
        if isinstance(value, Record) and value.made_by == Name("numpy.core.multiarray", "scalar"):
            value = self._scalar(value)
        if type(value) is not str:
            raise self._refusal(f"{kind_of(value)} stands where a text was expected")
        return value

    def _look(self, count: int) -> None:
        self._looks_left -= count
        if self._looks_left < 0:
            raise self._refusal("it refers to the same values again and again")

    def _refusal(self, cause: str) -> PetastormMetadataError:
        return PetastormMetadataError(
            f"The pickle of {self._subject} describes something else: {cause}. Nothing in it was run. If you trust the "
            "store, write its metadata again with converter.petastorm.etl.petastorm_generate_metadata."
        )


def _dict_record(values: Mapping[Any, Any]) -> Record:
    return Record(DICT, pairs=list(values.items()))


def _field_record(field: UnischemaField) -> Record:
    shape = tuple(None if size is None else int(size) for size in field.shape)
    nullable = None if field.nullable is None else bool(field.nullable)
    return Record(
        UNISCHEMA_FIELD,
        (str(field.name), _type_record(field.numpy_dtype), shape, _codec_record(field.codec), nullable),
    )


def _type_record(kind: Any) -> Name | Record | None:
    if isinstance(kind, np.dtype):
        return _dtype_record(kind)
    if kind is None or kind in NAMES_OF_TYPES:
        return None if kind is None else NAMES_OF_TYPES[kind]
    raise ValueError(f"Petastorm knows no values of {kind!r}.")


def _codec_record(codec: Any) -> Record | None:
    if codec is None:
        return None
    name = Name("petastorm.codecs", type(codec).__name__)
    if type(codec) is ScalarCodec:
        return Record(name, state=_dict_record({"_spark_type": _spark_record(codec.spark_type)}))
    if type(codec) is CompressedImageCodec:
        return Record(name, state=_dict_record({"_image_codec": f".{codec.image_codec}", "_quality": codec.quality}))
    if type(codec) in (NdarrayCodec, CompressedNdarrayCodec):
        return Record(name)
    raise ValueError(f"Petastorm 0.13 knows no codec {type(codec).__name__}.")


def _spark_record(kind: NamedSparkType) -> Record:
    name, arguments = Name("pyspark.sql.types", kind.name), kind.arguments
    if kind.name == "ArrayType":
        state = {"elementType": _spark_record(arguments[0]), "containsNull": bool(arguments[1])}
    else:
        state = dict(zip(_NAMED_STATE.get(kind.name, ()), arguments, strict=False))
        if kind.name == "DecimalType":
            # What Spark means by a decimal without digits.
            state = {"precision": 10, "scale": 0} | state | {"hasPrecisionInfo": True}
    return Record(name, state=_dict_record(state) if state else None)


def _indexer_record(indexer: RowGroupIndexerBase) -> Record:
    if isinstance(indexer, FieldNotNullIndexer):
        data = _set_record(indexer.get_row_group_indexes())
    elif isinstance(indexer, SingleFieldIndexer):
        data = Record(
            DEFAULT_DICT,
            (SET,),
            pairs=[
                (_value_record(value), _set_record(indexer.get_row_group_indexes(value)))
                for value in indexer.indexed_values
            ],
        )
    else:
        raise TypeError(f"An index by {type(indexer).__name__} cannot be stored.")
    state = {"_index_name": indexer.index_name, "_column_name": indexer.column_names[0], "_index_data": data}
    return Record(Name("petastorm.etl.rowgroup_indexers", type(indexer).__name__), state=_dict_record(state))


def _set_record(numbers: set[int]) -> Record:
    return Record(SET, items=sorted(int(number) for number in numbers))


def _value_record(value: Any) -> Any:
    if type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, Decimal):
        return Record(Name("decimal", "Decimal"), (str(value),))
    if isinstance(value, np.generic) and value.dtype.kind in "mM":
        return Record(Name("numpy.core.multiarray", "scalar"), (_dtype_record(value.dtype), value.tobytes()))
    if isinstance(value, (np.str_, np.bytes_)):
        # NumPy's `item` leaves out zeros at the end.
        return value[:]
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return _value_record(value.item())
    raise ValueError(f"A value of {type(value).__name__} cannot be stored in an index.")


def _dtype_record(dtype: np.dtype[Any]) -> Record:
    if dtype.kind not in "biufcSUmM":
        raise ValueError(f"Petastorm knows no values of {dtype!r}.")
    _, args, state = cast("tuple[Any, tuple[Any, ...], tuple[Any, ...]]", dtype.__reduce__())
    return Record(Name("numpy", "dtype"), tuple(args), state=tuple(state))
