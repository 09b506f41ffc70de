"""A column as a tensor: its dtype, its shape, its nulls.

`dtype_of` says which NumPy dtype an Arrow type becomes; each framework derives its own dtypes from NumPy's.

Dates and times stay integers until a batch is handed out: a framework without a time type takes the integers, and
NumPy's time types are free views of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from converter.errors import UnsupportedTypeError
from converter.markup import MAX_NAME_SIGNS, shortened, table, text

Kind = TypeVar("Kind")

FloatDtype = Literal["float32", "float64"]

OBJECT_DTYPES = frozenset({"str", "bytes"})
"""Dtypes whose values are Python objects: one for each row, or for each element of its lists."""

_SCALARS: dict[pa.DataType, str] = {
    pa.bool_(): "bool",
    pa.int8(): "int8",
    pa.int16(): "int16",
    pa.int32(): "int32",
    pa.int64(): "int64",
    pa.float32(): "float32",
    pa.float64(): "float64",
    pa.date32(): "datetime64[D]",
    pa.string(): "str",
    pa.large_string(): "str",
    pa.binary(): "bytes",
    pa.large_binary(): "bytes",
}

DTYPES = frozenset(_SCALARS.values()) | {"datetime64[us]", "uint8", "uint16", "float16"}
"""Every dtype that a column can have."""

BYTE_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float32", "float64")
"""Dtypes that the bytes of a binary column can be declared to hold."""

DeclaredShape = Sequence[int] | tuple[str, Sequence[int]] | None
"""A row's shape; for bytes that hold numbers, dtype and shape; None if rows differ in shape."""

_MAX_ROW_BYTES = 2**31 - 1
"""Bytes of one tensor: Parquet counts the bytes of a value in 32 bits."""

_MAX_NDIM = 31
"""Dimensions of one row: NumPy had at most 32 before its version 2, and a batch adds one."""

_MAX_SHOWN = 40
"""Columns that a schema's `repr` lists."""

HEADINGS = ("name", "dtype", "shape", "nulls")
"""What a table of columns says of each."""


def dtype_of(arrow_type: pa.DataType) -> str | None:
    """The dtype of one value of this Arrow type, or None if it has no tensor form.

    >>> dtype_of(pa.timestamp("us", tz="UTC")), dtype_of(pa.month_day_nano_interval())
    ('datetime64[us]', None)
    """
    if pa.types.is_timestamp(arrow_type):
        return "datetime64[us]"
    if pa.types.is_decimal(arrow_type):
        return "float64"
    return _SCALARS.get(arrow_type)


def split_declared(name: str, declared: DeclaredShape) -> tuple[str | None, Sequence[int] | None]:
    """The dtype (None unless declared) and the shape of a declared row.

    >>> split_declared("v", ("float32", (512,))), split_declared("v", (8, 8))
    (('float32', (512,)), (None, (8, 8)))

    Raises:
        TypeError: it is no tuple or list.
        ValueError: bytes cannot hold numbers of this dtype.
    """
    if declared is None:
        return None, None
    if not isinstance(declared, (list, tuple)):
        raise TypeError(f"shapes: {name!r} needs a shape such as (8, 8), or ('float32', (512,)), got {declared!r:.80}.")
    parts: Any = declared
    if len(parts) != 2 or not isinstance(parts[1], (list, tuple)):
        return None, parts
    dtype, shape = str(parts[0]), parts[1]
    if dtype not in BYTE_DTYPES:
        raise ValueError(f"shapes: {name!r} has the dtype {dtype!r}; bytes can be {', '.join(BYTE_DTYPES)}.")
    return dtype, shape


def by_column(option: str, given: Any, values: str) -> dict[str, Any]:
    """An option that is a list of names, or a dict of name to `values`, as such a dict; None where none is given.

    >>> by_column("standardize", ["x"], "(mean, std)")
    {'x': None}

    Raises:
        TypeError: it is neither.
    """
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if given is None:
        return {}
    if not (is_list or isinstance(given, Mapping)) or not all(isinstance(name, str) for name in given):
        raise TypeError(f"{option} must be a list of names, or a dict of name to {values}, got {given!r:.80}.")
    return dict(given) if isinstance(given, Mapping) else dict.fromkeys(given)


def checked(value: Any, kind: type[Kind]) -> Kind:
    """A value of a JSON document; raises TypeError unless its type is exactly `kind` (True is no int)."""
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {value!r:.80}")
    return value


def checked_count(value: Any) -> int:
    """A count of a JSON document, from 0 to 2**62: the sum of two fits an int64."""
    if not 0 <= checked(value, int) <= 1 << 62:
        raise ValueError(f"expected a count, found {value!r:.80}")
    return int(value)


class Scale(NamedTuple):
    """What a column is standardised by: its numbers arrive as `(x - mean) / std`.

    >>> Scale(12.6, 40.2).mean
    12.6
    """

    mean: float
    std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One column as it arrives in a batch.

    >>> Field(name="image", dtype="float32", shape=(8, 8))
    Field(name='image', dtype='float32', shape=(8, 8), has_nulls=False)
    """

    name: str
    """The column's name; `a.b` for member `b` of struct `a`."""

    dtype: str
    """The name of a NumPy dtype, or `"str"` or `"bytes"`."""

    shape: tuple[int, ...] | None = ()
    """The shape of one row: `()` for a scalar, None if rows differ in shape."""

    has_nulls: bool = False
    """Whether at least one row of the dataset is null."""

    ragged_ndim: int = field(default=1, repr=False)
    """Dimensions of a row, if rows differ in shape."""

    has_null_elements: bool = field(default=False, repr=False)
    """Whether elements of arrays may be null; then masks cover elements, too."""

    is_jagged: bool = field(default=False, repr=False)
    """Whether the inner lists of one row may differ in length."""

    unit: str = field(default="", repr=False)
    """What whole numbers count, if they are a time of day or an interval: `"µs"` or `"months"`; else empty."""

    has_no_zone: bool = field(default=False, repr=False, compare=False)
    """Whether times were TIMESTAMP_NTZ in Spark, so that they are that again in `to_spark`. Of entries that were
    written before this was noted, no column says so."""

    decoder: str = field(default="", repr=False)
    """The name of the decoder that makes it from the bytes in the files; empty if nothing is decoded."""

    categories: tuple[Any, ...] | None = field(default=None, repr=False)
    """The value of each code, if values arrive as codes."""

    scale: Scale | None = field(default=None, repr=False)
    """The mean and the standard deviation, if numbers arrive standardised."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(
                f"Field {self.name!r} has dtype {self.dtype!r}; expected one of {', '.join(sorted(DTYPES))}."
            )
        if self.shape is not None and any(size < 0 for size in self.shape):
            raise ValueError(f"Field {self.name!r} needs a shape of sizes >= 0, got {self.shape}.")
        if self.shape == () and self.has_null_elements:
            raise ValueError(f"Field {self.name!r} is a single value, which has no elements.")
        if self.ragged_ndim < 1:
            raise ValueError(f"Field {self.name!r} needs at least one dimension, got {self.ragged_ndim}.")
        if self.ndim > _MAX_NDIM:
            raise ValueError(f"Field {self.name!r} has {self.ndim} dimensions; NumPy arrays have at most {_MAX_NDIM}.")

    @property
    def ndim(self) -> int:
        """Dimensions of a row."""
        return self.ragged_ndim if self.shape is None else len(self.shape)

    @property
    def shown_shape(self) -> str:
        """The shape of a row as a table shows it."""
        if self.shape is not None:
            return str(self.shape)
        return "ragged" if self.ragged_ndim == 1 else f"ragged, {self.ragged_ndim} dimensions"

    @property
    def shown_dtype(self) -> str:
        """The dtype as a table shows it, with what it was made of."""
        if self.categories is not None:
            return f"{self.dtype} ({len(self.categories):,} categories)"
        note = self.decoder or ("standardized" if self.scale else self.unit)
        return self.dtype + (f" ({note})" if note else "")

    @property
    def cells(self) -> tuple[str, str, str]:
        """What a table says of the column beside its name: dtype, shape, and whether there are nulls."""
        return self.shown_dtype, self.shown_shape, "yes" if self.has_nulls else "no"

    @property
    def is_object(self) -> bool:
        """Whether values are Python objects (text or bytes), not numbers."""
        return self.dtype in OBJECT_DTYPES

    @property
    def is_scalar_number(self) -> bool:
        """Whether a row is one number, so that several such columns can be stacked."""
        return self.shape == () and not self.decoder and not self.is_object and not self.dtype.startswith("datetime64")

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The NumPy dtype in the file: dates are int32 days, times int64 microseconds, since 1970."""
        return np.dtype({"datetime64[D]": "int32", "datetime64[us]": "int64"}.get(self.dtype, self.dtype))

    def to_json(self) -> dict[str, Any]:
        """This field as plain JSON values."""
        shape = None if self.shape is None else list(self.shape)
        document = {"name": self.name, "dtype": self.dtype, "shape": shape, "has_nulls": self.has_nulls}
        document |= {name: True for name in ("has_null_elements", "is_jagged", "has_no_zone") if getattr(self, name)}
        document |= {"unit": self.unit} if self.unit else {}
        return document | ({"ragged_ndim": self.ragged_ndim} if self.shape is None else {})

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Field:
        """Read a field from the JSON values that `to_json` returned.

        Raises:
            KeyError: a value is missing.
            TypeError: a value has another type than `to_json` gives it.
            ValueError: the dtype is unknown, or the shape is not one that a tensor can have.
        """
        shape = value["shape"]
        field = cls(
            name=checked(value["name"], str),
            dtype=checked(value["dtype"], str),
            shape=None if shape is None else tuple(map(checked_count, checked(shape, list))),
            has_nulls=checked(value["has_nulls"], bool),
            ragged_ndim=checked_count(value["ragged_ndim"]) if shape is None else 1,
            has_null_elements=checked(value.get("has_null_elements", False), bool),
            is_jagged=checked(value.get("is_jagged", False), bool),
            unit=checked(value.get("unit", ""), str),
            has_no_zone=checked(value.get("has_no_zone", False), bool),
        )
        row_bytes = 0 if field.is_object else math.prod(field.shape or ()) * field.stored_dtype.itemsize
        if row_bytes > _MAX_ROW_BYTES:
            raise ValueError(f"column {field.name!r} has the shape {field.shape}, which no tensor can have")
        return field


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns of a dataset, in order; `schema["x"]` is the column of that name.

    >>> schema = Schema((Field(name="x", dtype="float32"), Field(name="y", dtype="int64")))
    >>> schema.names
    ('x', 'y')
    >>> schema["y"].dtype
    'int64'
    >>> schema
    Schema(2 columns)
    name  dtype    shape  nulls
    x     float32  ()     no
    y     int64    ()     no
    """

    fields: tuple[Field, ...]
    _by_name: dict[str, Field] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # The first of a name counts; a search of a thousand columns for each of them takes a third of an epoch.
        object.__setattr__(self, "_by_name", {field.name: field for field in reversed(self.fields)})

    def __repr__(self) -> str:
        shown = self.fields[:_MAX_SHOWN]
        names = [field.name if field.name.isprintable() else repr(field.name) for field in shown]
        rows = [HEADINGS, *((name, *field.cells) for name, field in zip(names, shown, strict=True))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([f"Schema({_count_columns(len(self))})", *lines, *self._more()])

    def _repr_html_(self) -> str:
        cells = ((shortened(field.name, MAX_NAME_SIGNS), *field.cells) for field in self.fields[:_MAX_SHOWN])
        rows = (tuple(map(text, row)) for row in cells)
        return table(HEADINGS, rows) + "".join(f"<p>{line}</p>" for line in self._more())

    def _more(self) -> list[str]:
        hidden = len(self) - _MAX_SHOWN
        return [f"… and {_count_columns(hidden)} more"] if hidden > 0 else []

    @property
    def names(self) -> tuple[str, ...]:
        """The columns' names, in order."""
        return tuple(field.name for field in self.fields)

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __getitem__(self, name: str) -> Field:
        field = self.get(name)
        if field is None:
            raise KeyError(self.explain_missing(name))
        return field

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def get(self, name: str) -> Field | None:
        """The column of this name, or None."""
        return self._by_name.get(name)

    def explain_missing(self, name: str) -> str:
        """An error text for a missing column, with the nearest name."""
        near = get_close_matches(name, self.names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        shown = ", ".join(map(repr, self.names[:20])) + (", …" if len(self) > 20 else "")
        return f"There is no column {name!r}.{hint} The columns are {shown}."

    def to_json(self) -> list[dict[str, Any]]:
        """The fields as plain JSON values."""
        return [field.to_json() for field in self.fields]

    @classmethod
    def from_json(cls, value: Any) -> Schema:
        """Read a schema from the JSON values that `to_json` returned; errors are those of `Field.from_json`."""
        return cls(tuple(Field.from_json(field) for field in checked(value, list)))


def _count_columns(count: int) -> str:
    return f"{count:,} column{'' if count == 1 else 's'}"


def raise_unsupported(columns: Mapping[str, tuple[str, str]]) -> None:
    """Raise one error for all columns without a tensor form, given as `{column: (type, what to write)}`."""
    if not columns:
        return
    lines = [f"  {name!r} has type {type_name}: {remedy}" for name, (type_name, remedy) in columns.items()]
    raise UnsupportedTypeError(
        f"{_count_columns(len(columns))} cannot become tensors. Drop, select or cast before converting:\n"
        + "\n".join(lines),
        column=next(iter(columns)),
    )
