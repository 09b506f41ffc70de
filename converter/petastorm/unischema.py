"""Petastorm's schema: fields with a NumPy dtype, a shape and a codec, seen as Spark's schema or as a namedtuple."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from converter.errors import ConverterWarning
from converter.petastorm.columns import convert_column, in_one_array, scalar_type, stored_values, to_column
from converter.petastorm.errors import DecodeFieldError

_UNISCHEMA_FIELD_ORDER = "preserve_input_order"
"""The order of a schema's fields: as they were given, or `"alphabetical"`, as Petastorm's first releases had it."""

_SPARK_TYPES: dict[Any, str] = {
    np.int8: "ByteType",
    np.uint8: "ShortType",
    np.int16: "ShortType",
    np.uint16: "IntegerType",
    np.int32: "IntegerType",
    np.int64: "LongType",
    np.float32: "FloatType",
    np.float64: "DoubleType",
    np.bytes_: "StringType",
    np.str_: "StringType",
    np.bool_: "BooleanType",
}


_PLAIN_TYPES = (
    pa.bool_(), pa.int8(), pa.uint8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(),
)  # fmt: skip


class UnischemaField(NamedTuple):
    """One column: what its values are, and how they are stored.

    Two fields are equal if all but their codecs are.

    >>> UnischemaField("id", np.int32, ()) == UnischemaField("id", np.int32, (), codec="any")
    True
    """

    name: str
    """The column's name."""

    numpy_dtype: Any
    """The class of the values, such as `np.int32`, `np.str_`, `np.datetime64` or `Decimal`."""

    shape: tuple[int | None, ...]
    """The shape of one value; None stands for a size that differs from row to row."""

    codec: Any = None
    """How a value is stored; None for numbers, texts, times, and lists of them."""

    nullable: bool | None = False
    """Whether values may be None."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple) or not hasattr(other, "_fields"):
            return False
        return _without_codec(self) == _without_codec(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(_without_codec(self))


def _without_codec(field: Any) -> tuple[Any, ...]:
    return tuple(getattr(field, name, None) for name in ("name", "numpy_dtype", "shape", "nullable"))


class Unischema:
    """Names and fields of a store's rows.

    Each field is an attribute, too, unless `Unischema` itself has one of its name.

    >>> schema = Unischema("Rides", [UnischemaField("id", np.int64, ()), UnischemaField("fare", np.float32, ())])
    >>> schema.fare.numpy_dtype.__name__, list(schema.fields)
    ('float32', ['id', 'fare'])
    """

    def __init__(self, name: str, fields: Iterable[UnischemaField]) -> None:
        self._name = name
        ordered = list(fields)
        if _is_alphabetical():
            ordered.sort(key=lambda field: field.name)
        self._fields: OrderedDict[str, UnischemaField] = OrderedDict((field.name, field) for field in ordered)
        for field in ordered:
            if hasattr(self, field.name):
                warnings.warn(
                    f"Can not create dynamic property {field.name} because it conflicts with an existing property of "
                    "Unischema",
                    ConverterWarning,
                    stacklevel=2,
                )
            else:
                setattr(self, field.name, field)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} has neither a field nor an attribute {name!r}.")

    @property
    def __name__(self) -> str:
        """The name that the schema was given."""
        return self._name

    @property
    def fields(self) -> OrderedDict[str, UnischemaField]:
        """The fields by name, in order."""
        return self._fields

    def __str__(self) -> str:
        lines = [
            f"  {type(field).__name__}('{field.name}', {_dtype_name(field.numpy_dtype)}, {field.shape}, {field.codec}, "
            f"{field.nullable}),\n"
            for field in self._fields.values()
        ]
        return f"{type(self).__name__}({self._name}, [\n{''.join(lines)}])"

    def create_schema_view(self, fields: Sequence[UnischemaField | str]) -> Unischema:
        """A schema of some of the fields: those given, and those whose whole names match a regular expression.

        The fields are this schema's own, also where the given ones have other codecs or shapes.

        Raises:
            ValueError: a field is not of this schema, or an element is neither a field nor a text.
        """
        patterns = [field for field in fields if isinstance(field, str)]
        # Any tuple: fields that were unpickled may be of another class of this name.
        names = [field.name for field in fields if isinstance(field, tuple)]
        if len(names) + len(patterns) != len(fields):
            raise ValueError(
                'Elements of "fields" must be either a string (regular expressions) or an instance of UnischemaField '
                f"class; got {[field for field in fields if not isinstance(field, (str, tuple))]}."
            )
        unknown = [name for name in names if name not in self._fields]
        if unknown:
            raise ValueError(f"field {', '.join(map(repr, unknown))} does not belong to the schema {self}")
        names += [field.name for field in match_unischema_fields(self, patterns)]
        return Unischema(f"{self._name}_view", [self._fields[name] for name in dict.fromkeys(names)])

    def create_derived_schema(self, suffix: str, fields: Iterable[UnischemaField]) -> Unischema:
        """A schema of other fields, named after this one."""
        return Unischema(self._name + suffix, fields)

    def as_spark_schema(self) -> Any:
        """The stored columns as Spark's `StructType`.

        Raises:
            ValueError: a field without a codec has a shape, or a dtype that Spark has no type for.
            ImportError: PySpark is not installed.
        """
        import pyspark.sql.types as sql_types

        return sql_types.StructType(
            [
                sql_types.StructField(field.name, _field_spark_dtype(field), bool(field.nullable))
                for field in self._fields.values()
            ]
        )

    def make_namedtuple(self, **kargs: Any) -> Any:
        """A row as a namedtuple; there must be a value for each field.

        >>> schema = Unischema("Rides", [UnischemaField("id", np.int64, ())])
        >>> schema.make_namedtuple(id=7)
        Rides_view(id=7)
        """
        return self._get_namedtuple()(**kargs)

    def make_namedtuple_tf(self, *args: Any, **kargs: Any) -> Any:
        """A row as a namedtuple, from values in the fields' order or by name."""
        return self._get_namedtuple()(*args, **kargs)

    def _get_namedtuple(self) -> Any:
        return _namedtuple_of(self._name, self._fields)

    @classmethod
    def from_arrow_schema(cls, parquet_dataset: Any, omit_unsupported_fields: bool = True) -> Unischema:
        """The schema of a store's files and of the folders they lie in; see `unischema_of_arrow`.

        `parquet_dataset` is a `pyarrow.parquet.ParquetDataset`, or an object with the parts that it had before
        pyarrow 15: `pieces` and `partitions`.

        Raises:
            ValueError: a type has no form, and `omit_unsupported_fields` is False.
            RuntimeError: a partition column is neither text nor of whole numbers.
        """
        if hasattr(parquet_dataset, "pieces"):
            schema = parquet_dataset.pieces[0].get_metadata().schema.to_arrow_schema()
            partitions = {each.name: each.dictionary.type for each in parquet_dataset.partitions or ()}
        else:
            partitioning = getattr(parquet_dataset, "partitioning", None)
            names = partitioning.schema.names if partitioning is not None else ()
            whole = parquet_dataset.schema
            partitions = {name: whole.field(name).type for name in names if name in whole.names}
            schema = pa.schema([field for field in whole if field.name not in partitions])
        return unischema_of_arrow(schema, partitions, omit_unsupported_fields=omit_unsupported_fields)


def unischema_of_arrow(
    schema: pa.Schema, partitions: Mapping[str, pa.DataType], *, omit_unsupported_fields: bool = True
) -> Unischema:
    """The schema of columns that need no codec: first those of the partitions, then the files'.

    Numbers, texts, bytes, times, dates and decimals are fields of shape `()`, lists of them of shape `(None,)`. Others
    are left out with a warning.

    Raises:
        ValueError: a type has no form, and `omit_unsupported_fields` is False.
        RuntimeError: a partition column is neither text nor of whole numbers.
    """
    fields = [UnischemaField(name, _partition_dtype(name, kind), (), None, False) for name, kind in partitions.items()]
    for column in schema:
        if column.name in partitions:
            continue
        if pa.types.is_list(column.type) and _is_nested(column.type.value_type):
            _warn_of_omission(f"[ARROW-1644] Ignoring unsupported structure {column.type!r} for field {column.name!r}")
            continue
        try:
            dtype = _numpy_and_codec_from_arrow_type(column.type)
        except ValueError:
            if not omit_unsupported_fields:
                raise
            _warn_of_omission(f"Column {column.name!r} has an unsupported field {column.type!r}. Ignoring...")
            continue
        shape = (None,) if pa.types.is_list(column.type) else ()
        fields.append(UnischemaField(column.name, dtype, shape, None, column.nullable))
    return Unischema("inferred_schema", fields)


def decode_column(field: UnischemaField, values: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
    """A stored column as the field's codec and dtype have it, rows first.

    The result is one array `(rows, *shape)` if all rows have one shape and none is null; else an array of objects.

    Raises:
        DecodeFieldError: a value cannot be decoded; the message names the field.
        ImportError: the codec needs a package that is not installed.
    """
    array = in_one_array(values)
    if not len(array) and field.shape and None not in field.shape and _is_number(field.numpy_dtype):
        return np.empty((0, *field.shape), field.numpy_dtype)  # type: ignore[arg-type]
    try:
        if not field.codec:
            return convert_column(field.numpy_dtype, array)
        decode = getattr(field.codec, "decode_column", None)
        if decode is not None:
            decoded: npt.NDArray[Any] = decode(field, array)
            return decoded
        # A codec need not be derived from DataframeColumnCodec.
        return to_column([None if row is None else field.codec.decode(field, row) for row in stored_values(array)])
    except ImportError:
        raise
    except Exception as error:  # a user's codec may raise anything
        raise DecodeFieldError(f'Decoding field "{field.name}" failed: {error}') from error


def dict_to_spark_row(unischema: Unischema, row_dict: Mapping[str, Any]) -> Any:
    """A row as Spark's `Row` of encoded values, in the schema's order. Nullable fields may be missing.

    Raises:
        ValueError: a field is missing or unknown, a value is None where it must not be, or has another dtype or shape.
        TypeError: a value is a list or an array, and the codec a `ScalarCodec`.
        ImportError: PySpark is not installed.
    """
    import pyspark.sql

    assert isinstance(unischema, Unischema), f"dict_to_spark_row needs a Unischema, got {type(unischema).__name__}"
    complete = dict(row_dict)
    insert_explicit_nulls(unischema, complete)
    if complete.keys() != unischema.fields.keys():
        raise ValueError(
            f"Dictionary fields \n{chr(10).join(sorted(complete))}\n do not match schema fields \n"
            f"{chr(10).join(unischema.fields)}"
        )
    row = pyspark.sql.Row(*[_encoded(field, complete[name]) for name, field in unischema.fields.items()])
    row.__fields__ = list(unischema.fields)
    return row


def _encoded(field: UnischemaField, value: Any) -> Any:
    if value is None:
        if not field.nullable:
            raise ValueError(f'Field {field.name} is not "nullable", but got passes a None value')
        return None
    if field.codec:
        return field.codec.encode(field, value)
    if isinstance(value, (np.str_, np.bytes_)):
        # NumPy's own conversion leaves out zeros at the end.
        return value[:]
    return value.tolist() if isinstance(value, np.generic) else value


def insert_explicit_nulls(unischema: Unischema, row_dict: dict[str, Any]) -> None:
    """Add None to a row for each nullable field that it lacks; the row is changed in place.

    Raises:
        ValueError: the row lacks a field that is not nullable.
    """
    for name, field in unischema.fields.items():
        if name not in row_dict:
            if not field.nullable:
                raise ValueError(f"Field {name} is not found in the row_dict, but is not nullable.")
            row_dict[name] = None


def match_unischema_fields(schema: Unischema, field_regex: Sequence[str] | None) -> list[UnischemaField]:
    """The fields whose whole names match one of the regular expressions, in the schema's order.

    Warns if fields match only with the beginnings of their names, which was enough in Petastorm's first releases.
    """
    patterns = field_regex or ()
    matched = [name for name in schema.fields if any(_fullmatch(pattern, name) for pattern in patterns)]
    by_beginning = [name for name in schema.fields if any(re.match(pattern, name) for pattern in patterns)]
    if matched != by_beginning:
        names = ", ".join(sorted(set(matched) ^ set(by_beginning)))
        warnings.warn(
            "schema_fields behavior has changed. Now, regular expression pattern must match the entire field name. The "
            f"change in the behavior affects the following fields: {names}",
            ConverterWarning,
            stacklevel=2,
        )
    return [schema.fields[name] for name in matched]


def _fullmatch(regex: str, string: str, flags: int = 0) -> re.Match[str] | None:
    return re.fullmatch(regex, string, flags)


def _is_alphabetical() -> bool:
    return _UNISCHEMA_FIELD_ORDER.lower() == "alphabetical"


def _is_number(numpy_dtype: Any) -> bool:
    kind = scalar_type(numpy_dtype)
    return isinstance(kind, type) and issubclass(kind, (np.number, np.bool_))


def _dtype_name(numpy_dtype: Any) -> str:
    return str(getattr(numpy_dtype, "__name__", numpy_dtype))


_namedtuples: dict[tuple[str, ...], Any] = {}


def _namedtuple_of(schema_name: str, field_names: Iterable[str]) -> Any:
    """The class of a schema's rows, one for each name and list of fields: tf.data compares classes."""
    names = sorted(field_names) if _is_alphabetical() else list(field_names)
    key = (schema_name, *names)
    if key not in _namedtuples:
        made = _new_gt_255_compatible_namedtuple(f"{schema_name}_view", names)
        # No module has this class under its name, so that pickle would not find it.
        made.__reduce__ = lambda row: (_restore_row, (schema_name, tuple(names), tuple(row)))
        _namedtuples[key] = made
    return _namedtuples[key]


def _new_gt_255_compatible_namedtuple(typename: str, field_names: Sequence[str], **options: Any) -> Any:
    return namedtuple(typename, field_names, **options)  # noqa: PYI024 (the names are known at run time)


def _restore_row(schema_name: str, field_names: Sequence[str], values: Iterable[Any]) -> Any:
    return _namedtuple_of(schema_name, field_names)(*values)


def _field_spark_dtype(field: UnischemaField) -> Any:
    if field.codec is not None:
        return field.codec.spark_dtype()
    if field.shape != ():
        raise ValueError(
            f"An instance of non-scalar UnischemaField '{field.name}' has codec set to None. Don't know how to guess a "
            "Spark type for it; give it a codec, such as NdarrayCodec()."
        )
    import pyspark.sql.types as sql_types

    name = _SPARK_TYPES.get(scalar_type(field.numpy_dtype))
    if name is None:
        raise ValueError(
            f"Was not able to map type {field.numpy_dtype} to a spark type. Give the field {field.name!r} a "
            "ScalarCodec."
        )
    return getattr(sql_types, name)()


def _warn_of_omission(text: str) -> None:
    warnings.warn(text, ConverterWarning, stacklevel=4)


def _partition_dtype(name: str, kind: pa.DataType) -> Any:
    value_type = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_string(value_type) or pa.types.is_large_string(value_type):
        return np.str_
    if pa.types.is_integer(value_type):
        return np.int64
    raise RuntimeError(
        f"Expected partition type to be one of currently supported types: string or int64. Got {value_type} for "
        f"{name!r}."
    )


def _is_nested(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_struct(kind))


def _numpy_and_codec_from_arrow_type(field_type: pa.DataType) -> Any:
    """The class of a column's values, or of the values in its lists: of the types that Petastorm knows, no others.

    A program that unpacks rows must not meet columns here that it did not meet there.
    """
    if pa.types.is_list(field_type):
        return _numpy_and_codec_from_arrow_type(field_type.value_type)
    if field_type in _PLAIN_TYPES:
        return np.dtype(field_type.to_pandas_dtype()).type
    if pa.types.is_decimal(field_type):
        return Decimal
    if pa.types.is_date(field_type) or pa.types.is_timestamp(field_type):
        return np.datetime64
    if pa.types.is_string(field_type):
        return np.str_
    if pa.types.is_binary(field_type) or pa.types.is_fixed_size_binary(field_type):
        return np.bytes_
    raise ValueError(f"Cannot auto-create unischema due to unsupported column type {field_type}")
