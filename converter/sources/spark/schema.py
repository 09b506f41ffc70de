"""A Spark schema becomes columns to write: structs flattened, and a remedy for types without tensor form.

Works on the schema's JSON, which classic Spark and Spark Connect give alike, so
nothing here imports Spark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from converter.categories import MAX_CATEGORIES, check_categories, kind_of
from converter.decoders.decoder import ColumnDecoder, Decoder, ndim_of, skips_errors
from converter.decoders.npy import is_settled
from converter.errors import SourceError
from converter.schema import DeclaredShape, Field, Schema, dtype_of, raise_unsupported, split_declared
from converter.sources.types import arrow_type_of

if TYPE_CHECKING:
    from converter.portable.records import CategoriesSpec, ColumnSpec

_MOST_MEMBERS = 8
"""How many members of a struct an error writes out."""

_SQL_NAMES = {"byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkColumn:
    """A column to write: how Spark selects it, and how the executors store it."""

    name: str
    path: tuple[str, ...]
    kind: str
    """`scalar`, `tensor`, `vector`, `matrix`, `bytes` (numbers of a declared dtype and shape), or `decoded`."""

    dtype: str
    ndim: int
    shape: tuple[int, ...] | None
    narrowed_from: str | None
    is_decimal: bool = False
    element: str = "double"
    """Spark's name for the type of one number."""

    decoder: Decoder | None = None
    """For `decoded`: what makes tensors of its bytes, before they are written."""

    categories: CategoriesSpec | None = None
    """How its values become codes; None if they stay values."""

    def select(self, name: str) -> str:
        """The column as a SQL expression on the user's DataFrame, called `name`; decimals as doubles.

        Spark rounds a decimal to the nearest double; Arrow's own cast does not (3 becomes 3.0000002 as float32).
        SQL, because a thousand `Column` objects cost the driver more than a second.
        """
        value = _quoted(self.path)
        if self.is_decimal:
            value = f"CAST({value} AS {'array<' * self.ndim}double{'>' * self.ndim})"
        return f"{value} AS {name}"

    @property
    def fixed_bytes(self) -> int | None:
        """Bytes of one value in Arrow as Spark sends it; None if rows differ."""
        if self.kind != "scalar" or self.dtype in ("str", "bytes"):
            return None
        return 8 if self.narrowed_from else np.dtype(self.dtype).itemsize

    def without_null_elements(self) -> str:
        """Code that replaces null elements by zeros and keeps the column's type."""
        names = [f"x{depth}" if self.ndim > 1 else "x" for depth in range(self.ndim)]
        code = f"F.coalesce({names[-1]}, F.lit(0).cast({_SQL_NAMES.get(self.element, self.element)!r}))"
        for inside, around in zip(
            reversed(names), reversed([f"F.col({_quoted(self.path)!r})", *names[:-1]]), strict=True
        ):
            code = f"F.transform({around}, lambda {inside}: {code})"
        return code

    def spec(self) -> ColumnSpec:
        """What the executors need to know, as plain values."""
        shape = None if self.shape is None else list(self.shape)
        return {
            "name": self.name, "kind": self.kind, "dtype": self.dtype, "ndim": self.ndim, "shape": shape,
            "decode": None if self.decoder is None else ColumnDecoder(self.decoder), "categories": self.categories,
        }  # fmt: skip


def plan_columns(
    schema: Mapping[str, Any],
    *,
    float_dtype: str | None,
    shapes: Mapping[str, DeclaredShape],
    is_case_sensitive: bool = True,
) -> list[SparkColumn]:
    """The columns to write, from a Spark schema's JSON (`df.schema.jsonValue()`): structs flattened, types checked.

    Raises:
        UnsupportedTypeError: columns have no tensor form; all of them are named, with the cast to write.
        SourceError: two columns would have one name.
        ValueError: `shapes` names a column that does not exist or is no array.
    """
    unsupported: dict[str, tuple[str, str]] = {}
    columns: list[SparkColumn] = []
    for name, path, spark_type in _flatten(schema["fields"], ()):
        planned = _plan_column(name, path, spark_type, float_dtype, shapes)
        if isinstance(planned, SparkColumn):
            columns.append(planned)
        else:
            unsupported[name] = planned
    raise_unsupported(unsupported)
    names = [column.name for column in columns]
    counted = Counter(names if is_case_sensitive else map(str.casefold, names))
    twice = sorted({name for name in names if counted[name if is_case_sensitive else name.casefold()] > 1})
    if twice:
        raise SourceError(
            f"Several columns are called {', '.join(map(repr, twice))} (a member of a struct is called "
            "'struct.member'). Rename them before converting.",
            column=twice[0],
        )
    for name in shapes:
        column = next((column for column in columns if column.name == name), None)
        if column is None or column.kind == "scalar":
            problem = "does not exist" if column is None else "is no array"
            raise ValueError(f"shapes names the column {name!r}, which {problem}. The columns are {names[:20]}.")
        if column.kind != "bytes" and split_declared(name, shapes[name])[0] is not None:
            raise ValueError(f"shapes: the arrays of {name!r} are {column.dtype}; declare only their shape.")
    if not columns:
        raise SourceError("The DataFrame has no columns. Select at least one before converting.")
    return columns


def decoded_columns(columns: Sequence[SparkColumn], decoders: Mapping[str, Decoder]) -> list[SparkColumn]:
    """The columns, those with a decoder as the tensors that executors are to write.

    Raises:
        ValueError: a decoder would need a look at the rows first.
    """
    changed = []
    for column in columns:
        decoder = decoders.get(column.name)
        if decoder is None:
            changed.append(column)
            continue
        if not is_settled(decoder) or skips_errors(decoder):
            how = (
                "on_error='raise'" if skips_errors(decoder) else "a dtype and a shape, e.g. NumPy('float32', (28, 28))"
            )
            raise ValueError(
                f"decode: with decode_at='write' the decoder of column {column.name!r} needs {how}: rows are decoded "
                "while they are written, before any other is known."
            )
        changed.append(
            replace(
                column,
                kind="decoded",
                dtype=decoder.dtype,
                ndim=ndim_of(decoder),
                shape=decoder.shape,
                decoder=decoder,
            )
        )
    return changed


def with_categories(columns: Sequence[SparkColumn], categories: Any, unseen: Any) -> list[SparkColumn]:
    """The columns, with those that become codes marked; `categories` as `make_spark_converter` takes them.

    Raises:
        TypeError, ValueError: as `check_categories`.
    """
    kinds = {column.name: (column.dtype, () if column.kind == "scalar" else (column.ndim,)) for column in columns}
    given = check_categories(categories, kinds, unseen)
    marked = []
    for column in columns:
        if column.name not in given:
            marked.append(column)
            continue
        values = given[column.name]
        spec: CategoriesSpec = {
            "kind": kind_of(column.name, column.dtype),
            "values": None if values is None else values.to_json()["values"],
            "unseen": unseen,
            "most": MAX_CATEGORIES,
        }
        marked.append(replace(column, categories=spec))
    return marked


def batch_schema_of(columns: Sequence[SparkColumn]) -> Schema:
    """The columns as batches will have them, as far as is known before they are written."""
    return Schema(
        tuple(
            Field(
                name=column.name,
                dtype=column.dtype,
                # The shape of an array is known once all rows were seen.
                shape=() if column.kind == "scalar" else column.shape or (1,) * column.ndim,
                categories=None if column.categories is None else (),
            )
            for column in columns
        )
    )


def _flatten(fields: Sequence[Mapping[str, Any]], above: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    for field in fields:
        path = (*above, str(field["name"]))
        kind = field["type"]
        if isinstance(kind, Mapping) and kind["type"] == "struct":
            yield from _flatten(kind["fields"], path)
        else:
            yield ".".join(path), path, kind


def _plan_column(
    name: str, path: tuple[str, ...], spark_type: Any, float_dtype: str | None, shapes: Mapping[str, DeclaredShape]
) -> SparkColumn | tuple[str, str]:
    """The column, or the name of its type and what to write instead."""
    kind, ndim, element = "scalar", 0, spark_type
    if isinstance(element, Mapping) and element["type"] == "udt":
        if str(element.get("class", "")).endswith(("ml.linalg.VectorUDT", "mllib.linalg.VectorUDT")):
            kind, ndim, element = "vector", 1, "double"
        elif str(element.get("class", "")).endswith(("ml.linalg.MatrixUDT", "mllib.linalg.MatrixUDT")):
            kind, ndim, element = "matrix", 2, "double"
        else:
            element = element["sqlType"]
    while isinstance(element, Mapping) and element["type"] == "array":
        kind, ndim, element = "tensor", ndim + 1, element["elementType"]
    arrow = _arrow_type(element)
    dtype = None if arrow is None else dtype_of(arrow)
    if arrow is None or dtype is None or (ndim and (dtype in ("str", "bytes") or dtype.startswith("datetime64"))):
        return _type_name(spark_type), _remedy(path, element, ndim)
    narrowed_from = None
    if arrow == pa.float64() and float_dtype is not None:
        narrowed_from = "double" if float_dtype != "float64" else None
        dtype = float_dtype
    elif pa.types.is_decimal(arrow):
        narrowed_from, dtype = str(element), float_dtype or "float64"
    declared_dtype, declared = split_declared(name, shapes.get(name))
    if kind == "scalar" and arrow == pa.binary() and declared is not None:
        kind, ndim, dtype = "bytes", len(declared), declared_dtype or "uint8"
    shape = tuple(int(size) for size in declared) if declared is not None and kind != "scalar" else None
    return SparkColumn(
        name=name,
        path=path,
        kind=kind,
        dtype=dtype,
        ndim=ndim,
        shape=shape,
        narrowed_from=narrowed_from,
        is_decimal=pa.types.is_decimal(arrow),
        element=str(element),
    )


def _arrow_type(spark_type: Any) -> pa.DataType | None:
    return arrow_type_of(spark_type) if isinstance(spark_type, str) else None


def _type_name(spark_type: Any) -> str:
    """A type as Spark's SQL writes it; a user-defined type by its class."""
    if isinstance(spark_type, str):
        return _SQL_NAMES.get(spark_type, spark_type)
    if spark_type["type"] == "array":
        return f"array<{_type_name(spark_type['elementType'])}>"
    if spark_type["type"] == "map":
        return f"map<{_type_name(spark_type['keyType'])},{_type_name(spark_type['valueType'])}>"
    if spark_type["type"] == "udt":
        return str(spark_type.get("pyClass") or spark_type.get("class") or "udt").rpartition(".")[2]
    return str(spark_type["type"])


def _quoted(path: Sequence[str]) -> str:
    """A column's name as Spark's SQL accepts it, whatever characters it has."""
    return ".".join("`" + part.replace("`", "``") + "`" for part in path)


def _remedy(path: Sequence[str], element: Any, ndim: int) -> str:
    """What to write instead of a column without tensor form: code that runs as it is."""
    kind = element if isinstance(element, str) else str(element["type"])
    column, sql = f"F.col({_quoted(path)!r})", _quoted(path)
    if ndim and kind == "struct":
        arrays = _arrays_of_members(column, element, ndim, path[-1])
        return f"make an array of each member, e.g. {_replaced(path, arrays)}"
    if ndim:
        for _ in range(ndim - 1):
            column = f"F.flatten({column})"
        return f"make numbers of its elements, e.g. F.transform({column}, lambda x: {_as_number('x', element)})"
    if kind == "map":
        arrays = {
            f"{path[-1]}_{part}": _array_of(f"F.map_{part}({column})", element[f"{part[:-1]}Type"])
            for part in ("keys", "values")
        }
        key = "key" if element["keyType"] == "string" else 1
        return f"select the keys you need, as {column}[{key!r}], or make arrays, e.g. {_replaced(path, arrays)}"
    if kind == "void":
        return f"drop it, it is always null, or cast it, e.g. {column}.cast('int')"
    if kind == "variant":
        return f"extract a typed value, e.g. F.try_variant_get({column}, '$.field', 'double')"
    if "interval" in kind:
        return f"cast it to a number, e.g. {column}.cast('long')"
    if kind.startswith("geo"):
        return f"store it as bytes, e.g. F.expr({f'ST_AsBinary({sql})'!r})"
    if kind.startswith("time"):
        return f"cast it to a number, e.g. F.expr({f'time_to_micros({sql})'!r})"
    return f"cast it, e.g. {column}.cast('string')"


_NUMBER_OF = {
    "date": "F.unix_date({})",
    "timestamp": "F.unix_micros({})",
    "timestamp_ntz": "F.unix_micros({}.cast('timestamp'))",
    "string": "F.xxhash64({})",
    "binary": "F.length({})",
    "map": "F.size({})",
    "array": "F.size({})",
    "struct": "F.xxhash64({})",
    "void": "{}.cast('int')",
}


def _as_number(value: str, spark_type: Any) -> str:
    """Code that makes a number of a value inside an array; the value itself if it is a number."""
    arrow = _arrow_type(spark_type)
    dtype = None if arrow is None else dtype_of(arrow)
    if dtype is not None and dtype not in ("str", "bytes") and not dtype.startswith("datetime64"):
        return value
    kind = spark_type if isinstance(spark_type, str) else str(spark_type["type"])
    kind = "string" if kind.startswith(("char", "varchar", "string")) else kind
    return _NUMBER_OF.get(kind, "{}.cast('long')").format(value)


def _array_of(array: str, element: Any) -> str:
    """Code that makes an array of numbers."""
    number = _as_number("x", element)
    return array if number == "x" else f"F.transform({array}, lambda x: {number})"


def _arrays_of_members(column: str, struct: Mapping[str, Any], ndim: int, prefix: str) -> dict[str, str]:
    """Code that makes an array of each of the first members of an array of structs, by the name that it gets."""
    arrays = {}
    for field in struct["fields"][:_MOST_MEMBERS]:
        name = str(field["name"])
        code = _as_number(f"x[{name!r}]", field["type"])
        for depth in range(ndim):
            inner = column if depth == ndim - 1 else f"y{depth}"
            code = f"F.transform({inner}, lambda {'x' if depth == 0 else f'y{depth - 1}'}: {code})"
        arrays[f"{prefix}_{name}"] = code
    return arrays


def _replaced(path: Sequence[str], arrays: Mapping[str, str]) -> str:
    """Code that replaces a column of the DataFrame by these arrays."""
    added = ", ".join(f"{code}.alias({name!r})" for name, code in arrays.items())
    if len(path) == 1:
        return f"df.select('*', {added}).drop({path[0]!r})"
    parent = f"F.col({_quoted(path[:1])!r}).dropFields({_quoted(path[1:])!r})"
    return f"df.select('*', {added}).withColumn({path[0]!r}, {parent})"
