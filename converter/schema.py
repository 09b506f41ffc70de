"""A column as a tensor: its dtype, its shape, its nulls.

One table stands here and nowhere else: which Arrow type becomes which NumPy
dtype. Spark's types come to it through Arrow, torch's and TensorFlow's are
derived from NumPy's by the module of each framework.

Why dates and times are kept as integers until the last moment: a framework
that has no time type takes the integers, and NumPy's own is a free view of them.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa

from converter.errors import UnsupportedTypeError

Kind = TypeVar("Kind")

FloatDtype = Literal["float32", "float64"]

_MAX_NDIM = 32
"""NumPy's own limit before its version 2."""

OBJECT_DTYPES = frozenset({"str", "bytes"})
"""Dtypes that a framework can only hold as one Python object per row."""

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


_MOST_SHOWN = 40
"""Columns that a schema's `repr` lists."""

DTYPES = frozenset(_SCALARS.values()) | {"datetime64[us]", "uint8"}
"""Every dtype that a column can have."""


def dtype_of(arrow_type: pa.DataType) -> str | None:
    """The dtype of one value of this Arrow type, or None if it has no tensor form.

    >>> dtype_of(pa.timestamp("us", tz="UTC")), dtype_of(pa.map_(pa.string(), pa.int32()))
    ('datetime64[us]', None)
    """
    if pa.types.is_timestamp(arrow_type):
        return "datetime64[us]"
    if pa.types.is_decimal(arrow_type):
        return "float64"
    return _SCALARS.get(arrow_type)


BYTE_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float32", "float64")
"""What the bytes of a binary column can be declared to be."""

DeclaredShape = Sequence[int] | tuple[str, Sequence[int]] | None
"""The shape of a row; of bytes that are numbers the dtype and the shape; None where rows differ."""


def split_declared(name: str, declared: DeclaredShape) -> tuple[str | None, Sequence[int] | None]:
    """The dtype, where one is said, and the shape of a declared row.

    >>> split_declared("v", ("float32", (512,))), split_declared("v", (8, 8))
    (('float32', (512,)), (None, (8, 8)))

    Raises:
        ValueError: it names another dtype than bytes can be.
    """
    if declared is None:
        return None, None
    given: Any = declared
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"shapes: {name!r} needs a shape such as (8, 8), or ('float32', (512,)), got {given!r}.")
    if len(given) != 2 or not isinstance(given[1], (list, tuple)):
        return None, given
    dtype, shape = str(given[0]), given[1]
    if dtype not in BYTE_DTYPES:
        raise ValueError(f"shapes: {name!r} has the dtype {dtype!r}; bytes can be {', '.join(BYTE_DTYPES)}.")
    return dtype, shape


_MAX_ROW_BYTES = 2**31 - 1
"""Of a tensor: Parquet counts the bytes of a value in 32 bits."""

_MAX_NDIM = 31
"""NumPy has 32, of which one is the rows'."""


def checked(value: Any, kind: type[Kind]) -> Kind:
    """A value of a JSON document, which must be of exactly this type: True is no int.

    Raises:
        TypeError: it is of another type.
    """
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {value!r:.80}")
    return value


def checked_count(value: Any) -> int:
    """A count of a JSON document, from 0 to 2**62, so that two of them can be added."""
    if not 0 <= checked(value, int) <= 1 << 62:
        raise ValueError(f"expected a count, found {value!r:.80}")
    return int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One column as it arrives in a batch.

    >>> Field(name="image", dtype="float32", shape=(8, 8))
    Field(name='image', dtype='float32', shape=(8, 8), has_nulls=False)
    """

    name: str
    """The column's name; of a struct's member `a.b`."""

    dtype: str
    """A NumPy dtype's name, or `str` or `bytes`."""

    shape: tuple[int, ...] | None = ()
    """The shape of one row: `()` for a scalar, None where rows differ in length."""

    has_nulls: bool = False
    """Whether at least one row of the dataset is null."""

    ragged_ndim: int = field(default=1, repr=False)
    """Where rows differ in shape, how many dimensions each of them has."""

    has_null_elements: bool = field(default=False, repr=False)
    """Whether an element of an array may be null, so that masks are of elements, too."""

    is_jagged: bool = field(default=False, repr=False)
    """Whether the inner lists of one row may differ in length."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"Field {self.name!r} has dtype {self.dtype!r}; known are {', '.join(sorted(DTYPES))}.")
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
        """How many dimensions a row has."""
        return self.ragged_ndim if self.shape is None else len(self.shape)

    @property
    def shown_shape(self) -> str:
        """The shape of a row as a table shows it."""
        if self.shape is not None:
            return str(self.shape)
        return "ragged" if self.ragged_ndim == 1 else f"ragged, {self.ragged_ndim} dimensions"

    @property
    def is_object(self) -> bool:
        """Whether a value is a Python object instead of a number."""
        return self.dtype in OBJECT_DTYPES

    @property
    def is_scalar_number(self) -> bool:
        """Whether a row is one number, so that several such columns can be stacked."""
        return self.shape == () and not self.is_object and not self.dtype.startswith("datetime64")

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of the numbers in the file: dates are int32 days, times int64 microseconds."""
        return np.dtype({"datetime64[D]": "int32", "datetime64[us]": "int64"}.get(self.dtype, self.dtype))

    def to_json(self) -> dict[str, Any]:
        """This field as plain JSON values."""
        shape = None if self.shape is None else list(self.shape)
        known = {"name": self.name, "dtype": self.dtype, "shape": shape, "has_nulls": self.has_nulls}
        known |= {name: True for name in ("has_null_elements", "is_jagged") if getattr(self, name)}
        return known | ({"ragged_ndim": self.ragged_ndim} if self.shape is None else {})

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Field:
        """The inverse of `to_json`; checks what it is given."""
        shape = value["shape"]
        found = cls(
            name=checked(value["name"], str),
            dtype=checked(value["dtype"], str),
            shape=None if shape is None else tuple(map(checked_count, checked(shape, list))),
            has_nulls=checked(value["has_nulls"], bool),
            ragged_ndim=checked_count(value["ragged_ndim"]) if shape is None else 1,
            has_null_elements=checked(value.get("has_null_elements", False), bool),
            is_jagged=checked(value.get("is_jagged", False), bool),
        )
        row_bytes = 0 if found.is_object else math.prod(found.shape or ()) * found.stored_dtype.itemsize
        if found.ndim > _MAX_NDIM or row_bytes > _MAX_ROW_BYTES:
            raise ValueError(f"column {found.name!r} has the shape {found.shape}, which no tensor can have")
        return found


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns of a dataset, in order.

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

    def __repr__(self) -> str:
        rows = [_HEADINGS, *self._cells()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([f"Schema({_count_columns(len(self))})", *lines, *self._more()])

    def _repr_html_(self) -> str:
        head, *rows = (
            "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
            for tag, row in [("th", _HEADINGS), *(("td", row) for row in self._cells())]
        )
        more = "".join(f"<p>{line}</p>" for line in self._more())
        return f"<table>{head}{''.join(rows)}</table>{more}"

    def _cells(self) -> list[tuple[str, ...]]:
        """The columns that are shown, as text."""
        return [
            (
                field.name if field.name.isprintable() else repr(field.name),
                field.dtype,
                field.shown_shape,
                "yes" if field.has_nulls else "no",
            )
            for field in self.fields[:_MOST_SHOWN]
        ]

    def _more(self) -> list[str]:
        hidden = len(self) - _MOST_SHOWN
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
        return next((field for field in self.fields if field.name == name), None)

    def explain_missing(self, name: str) -> str:
        """A sentence for whoever asked for a column that is not there, with the nearest name."""
        near = get_close_matches(name, self.names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        shown = ", ".join(map(repr, self.names[:20])) + (", …" if len(self) > 20 else "")
        return f"There is no column {name!r}.{hint} The columns are {shown}."

    def to_json(self) -> list[dict[str, Any]]:
        """The fields as plain JSON values."""
        return [field.to_json() for field in self.fields]

    @classmethod
    def from_json(cls, value: Any) -> Schema:
        """The inverse of `to_json`; checks what it is given."""
        return cls(tuple(Field.from_json(field) for field in checked(value, list)))


_HEADINGS = ("name", "dtype", "shape", "nulls")


def _count_columns(count: int) -> str:
    return f"{count:,} column{'' if count == 1 else 's'}"


def raise_unsupported(found: Mapping[str, tuple[str, str]]) -> None:
    """Raise one error for all columns without a tensor form: `{column: (type, what to write)}`."""
    if not found:
        return
    lines = [f"  {name!r} has type {type_name}: {remedy}" for name, (type_name, remedy) in found.items()]
    raise UnsupportedTypeError(
        f"{len(found)} column{'s' if len(found) > 1 else ''} cannot become tensors. "
        "Drop, select or cast before converting:\n" + "\n".join(lines),
        column=next(iter(found)),
    )
