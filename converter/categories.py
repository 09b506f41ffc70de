"""Values of a column that arrive as codes 0…n-1, for embeddings: which values there are, and in which order."""

from __future__ import annotations

import base64
import datetime as dt
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from converter.errors import SourceError
from converter.schema import Field, by_column, checked

Codes = npt.NDArray[np.int32]
Unseen = Literal["raise", "null"]
CategoriesOption = Sequence[str] | Mapping[str, Sequence[Any] | None] | None
"""Names of columns; with values where the data do not decide them."""

MAX_CATEGORIES = 1_000_000
"""More values than an embedding has rows are a mistake, such as a key; each process holds them all in memory."""

_KINDS = {
    "str": pa.large_string(), "bool": pa.bool_(), "int64": pa.int64(), "datetime64[D]": pa.date32(),
}  # fmt: skip
"""The types of categories. Whole numbers of any width are held as int64."""

_DTYPES = {"str": "str", "bool": "bool", "datetime64[D]": "datetime64[D]"} | dict.fromkeys(
    ("int8", "int16", "int32", "int64"), "int64"
)


def kind_of(name: str, dtype: str) -> str:
    """How the values of a column, or the elements of its arrays, are held as categories.

    Raises:
        ValueError: the column's values are no categories.
    """
    if dtype not in _DTYPES:
        raise ValueError(
            f"categories: column {name!r} holds {dtype}; categories are strings, whole numbers, booleans or dates."
        )
    return _DTYPES[dtype]


def check_categories(categories: Any, dtypes: Mapping[str, str], unseen: Any) -> dict[str, Categories | None]:
    """The columns of categories that a user named, with the values that they gave; None where the data decide.

    Args:
        categories: a list of names, or a dict of name to values (None: those of the data, sorted).
        dtypes: the dtype of each column.
        unseen: what a value is that is none of those given.

    Raises:
        TypeError: it is neither.
        ValueError: a column does not exist, cannot have categories, or its values are no categories of it.
    """
    if unseen not in ("raise", "null"):
        raise ValueError(f"unseen must be 'raise' or 'null', got {unseen!r:.80}.")
    given = by_column("categories", categories, "values")
    checked_ones: dict[str, Categories | None] = {}
    for name, values in given.items():
        if name not in dtypes:
            names = ", ".join(map(repr, list(dtypes)[:20]))
            raise ValueError(f"categories names the column {name!r}, which does not exist. The columns are {names}.")
        kind = kind_of(name, dtypes[name])
        checked_ones[name] = None if values is None else _of_values(name, kind, values, unseen)
    return checked_ones


def _of_values(name: str, kind: str, values: Any, unseen: Unseen) -> Categories:
    # Arrays of NumPy and Arrow, and pandas' series and indexes.
    as_list = getattr(values, "tolist", None) or getattr(values, "to_pylist", None)
    values = as_list() if callable(as_list) else values
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise TypeError(
            f"categories: {name!r} needs a list of values, or None for those of the data, got {values!r:.80}."
        )
    values = [value.item() if isinstance(value, np.generic) else value for value in values]
    expected = {"str": str, "bool": bool, "int64": int, "datetime64[D]": dt.date}[kind]
    odd = next((value for value in values if type(value) is not expected), None)
    if odd is not None or None in values:
        raise ValueError(f"categories: {odd!r} is no value of column {name!r}, whose values are of {kind}.")
    try:
        array = pa.array(values, _KINDS[kind])
    except OverflowError as error:
        raise ValueError(
            f"categories: a value of column {name!r} is too large for 64 bits. Leave it out of the list."
        ) from error
    return Categories(values=check_values(name, array), unseen=unseen, are_given=True)


def check_values(name: str, values: pa.Array) -> pa.Array:
    """The values, unless one comes twice or there are more than `MAX_CATEGORIES`.

    Raises:
        ValueError, SourceError: so.
    """
    if len(values) > MAX_CATEGORIES:
        raise SourceError(
            f"Column {name!r} has {len(values):,} different values, and at most {MAX_CATEGORIES:,} can be categories. "
            "Is it a key? Take it out of categories=, or replace rare values.",
            column=name,
        )
    if pc.count_distinct(values).as_py() != len(values):
        twice = pc.value_counts(values)
        first = twice.filter(pc.greater(twice.field("counts"), 1)).field("values")[0].as_py()
        raise ValueError(f"categories: {first!r} comes twice among the values of column {name!r}.")
    return values


def sorted_values(arrays: Sequence[pa.Array], kind: str) -> pa.Array:
    """The different values in arrays, sorted: text by its code points. Nulls are no value."""
    together = pa.chunked_array([array.cast(_KINDS[kind]) for array in arrays], _KINDS[kind])
    values = pc.unique(together).drop_null()
    return values.take(pc.array_sort_indices(values))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Categories:
    """The values of a column whose batches hold codes."""

    values: pa.Array
    """The value of each code; none is null."""

    unseen: Unseen = "raise"
    """What a value that is none of them is: an error, or null."""

    tables: Mapping[int, Codes] | None = None
    """If the files hold codes: for each file whose codes are its own, what each of them is here. None: they hold the
    values."""

    are_given: bool = field(default=False)
    """Whether the user gave the values, so that a value may be none of them."""

    @property
    def are_coded(self) -> bool:
        """Whether the files hold codes, not the values."""
        return self.tables is not None

    @property
    def kind(self) -> str:
        """The dtype of the values."""
        return next(kind for kind, arrow_type in _KINDS.items() if arrow_type == self.values.type)

    def field_of(self, stored: Field) -> Field:
        """The column as batches have it."""
        may_be_unseen = self.unseen == "null" and self.are_given
        has_nulls = stored.has_nulls or (may_be_unseen and stored.shape == ())
        has_null_elements = stored.has_null_elements or (may_be_unseen and stored.shape != ())
        return replace(
            stored,
            dtype="int32",
            has_nulls=has_nulls,
            has_null_elements=has_null_elements,
            categories=tuple(self.values.to_pylist()),
        )

    def value_field_of(self, stored: Field) -> Field:
        """The column as its values are compared: in filters and in `split`."""
        return replace(stored, dtype=self.kind) if self.are_coded else stored

    def codes_of(self, array: pa.Array) -> pa.Array:
        """The codes of values; null where they are null, or none of these."""
        if pa.types.is_dictionary(array.type):
            # Each different value is looked up once.
            return _take(self.codes_of(array.dictionary), array.indices)
        return pc.index_in(array.cast(self.values.type), self.values)

    def first_unseen(self, array: pa.Array) -> Any:
        """The first value that has no code, None if all have; `array` without lists around the values."""
        codes = self.codes_of(array)
        if codes.null_count == array.null_count:
            return None
        value = array.filter(pc.and_(pc.is_null(codes), pc.is_valid(array)))[0]
        try:
            return value.as_py()
        except UnicodeDecodeError:
            return bytes((value.value if isinstance(value, pa.DictionaryScalar) else value).as_buffer())

    def global_codes(self, column: pa.ChunkedArray, file: int) -> pa.ChunkedArray:
        """The codes that a file's own codes stand for."""
        table = (self.tables or {}).get(file)
        if table is None:
            return column
        codes = pa.array(table)
        return pa.chunked_array([_take(codes, chunk) for chunk in column.chunks], pa.int32())

    def values_of(self, column: pa.ChunkedArray, file: int) -> pa.ChunkedArray:
        """The values of a file's codes."""
        codes = self.global_codes(column, file)
        return pa.chunked_array([self.values.take(chunk) for chunk in codes.chunks], self.values.type)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = self.values.cast(pa.int32()) if self.kind == "datetime64[D]" else self.values
        document = {"kind": self.kind, "values": values.to_pylist(), "unseen": self.unseen, "are_given": self.are_given}
        if self.tables is None:
            return document
        tables = {str(file): _packed(table) for file, table in self.tables.items()}
        return document | {"tables": tables}

    @classmethod
    def from_json(cls, name: str, value: Mapping[str, Any], num_files: int) -> Categories:
        """The inverse of `to_json`; checks every value.

        Raises:
            KeyError, TypeError, ValueError: it is not what `to_json` returns.
        """
        kind = checked(value["kind"], str)
        expected = {"str": str, "bool": bool, "int64": int, "datetime64[D]": int}[kind]
        listed: list[Any] = [checked(item, expected) for item in checked(value["values"], list)]
        if len(listed) > MAX_CATEGORIES:
            raise ValueError(f"column {name!r} has {len(listed)} categories")
        values = (
            pa.array(listed, pa.int32()).cast(pa.date32())
            if kind == "datetime64[D]"
            else pa.array(listed, _KINDS[kind])
        )
        if value["unseen"] not in ("raise", "null"):
            raise ValueError(f"column {name!r} has unseen={value['unseen']!r}")
        tables = None
        if "tables" in value:
            tables = {int(file): _unpacked(table) for file, table in checked(value["tables"], dict).items()}
            if any(not 0 <= file < num_files or _is_outside(table, len(values)) for file, table in tables.items()):
                raise ValueError(f"column {name!r} has codes that are none")
        return cls(
            values=check_values(name, values),
            unseen=value["unseen"],
            tables=tables,
            are_given=checked(value["are_given"], bool),
        )


def _take(table: pa.Array, indices: pa.Array) -> pa.Array:
    """`table.take(indices)`, at half its cost: it looks at the least and largest index, not at each of them."""
    table, indices = _without_validity(table), _without_validity(indices)
    bounds = pc.min_max(indices)
    are_inside = bounds["max"].is_valid and 0 <= bounds["min"].as_py() <= bounds["max"].as_py() < len(table)
    return pc.take(table, indices, boundscheck=not are_inside)


def _without_validity(numbers: pa.Array) -> pa.Array:
    """The same numbers, without bits of which each says "not null"."""
    if numbers.null_count or numbers.buffers()[0] is None:
        return numbers
    return pa.Array.from_buffers(numbers.type, len(numbers), [None, numbers.buffers()[1]], 0, numbers.offset)


def _is_outside(table: Codes, num_values: int) -> bool:
    return bool(len(table)) and not 0 <= table.min() <= table.max() < num_values


def _packed(table: Codes) -> str:
    return base64.b64encode(zlib.compress(table.astype("<i4").tobytes())).decode()


def _unpacked(text: Any) -> Codes:
    # At most one byte more than there can be, however large the content is.
    raw = zlib.decompressobj().decompress(base64.b64decode(checked(text, str), validate=True), 4 * MAX_CATEGORIES + 1)
    return np.frombuffer(raw, "<i4").astype(np.int32)
