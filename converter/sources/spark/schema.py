"""A Spark schema becomes columns to write: structs and maps flattened, and a remedy for types without tensor form.

Works on the schema's JSON, which classic Spark and Spark Connect give alike, so
nothing here imports Spark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from converter.categories import MAX_CATEGORIES, check_categories, kind_of
from converter.decoders.decoder import ColumnDecoder, Decoder, ndim_of, skips_errors
from converter.decoders.npy import is_settled
from converter.errors import SourceError
from converter.schema import OBJECT_DTYPES, DeclaredShape, Field, Schema, dtype_of, raise_unsupported, split_declared
from converter.sources.types import arrow_type_of

if TYPE_CHECKING:
    from converter.portable.records import CategoriesSpec, ColumnSpec

LIST, KEYS, VALUES = 0, 1, 2
"""Steps on the way to a column, beside the names of members: into each element, to a map's keys, to its values."""

_MICROSECONDS, _MONTHS = "µs", "months"

_SQL_NAMES = {"byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint"}
_ZEROS = {"date": "1970-01-01", "timestamp": "1970-01-01", "time(": "00:00:00"}
"""What Spark casts to a day or a time that is stored as 0, by the beginning of the type's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkColumn:
    """A column to write: how Spark selects it, and how the executors store it."""

    name: str
    path: tuple[str, ...]
    kind: str
    """`scalar`, `tensor`, `vector`, `matrix`, `bytes` (numbers of a declared dtype and shape), `decoded` (by a
    decoder), or `lists` (of texts or bytes, and members of structs in arrays and of maps)."""

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

    steps: tuple[str | int, ...] = ()
    """How Spark gets at the column, if it is in arrays of structs or in maps; else empty."""

    unit: str = ""
    """As in `Field.unit`."""

    def select(self, name: str) -> str:
        """The column as a SQL expression on the user's DataFrame, called `name`; decimals as doubles.

        Spark rounds a decimal to the nearest double; Arrow's own cast does not (3 becomes 3.0000002 as float32).
        SQL, because a thousand `Column` objects cost the driver more than a second.
        """
        return f"{self._selected()} AS {name}"

    def _selected(self) -> str:
        if not self.steps and not self.unit:
            value = _quoted(self.path)
            return f"CAST({value} AS {'array<' * self.ndim}double{'>' * self.ndim})" if self.is_decimal else value
        steps = self.steps or self.path
        steps += (LIST,) * (self.ndim - sum(step in (LIST, KEYS, VALUES) for step in steps))
        first, *inner = steps
        return self._sql(_quoted([str(first)]), inner)

    def _sql(self, value: str, steps: Sequence[str | int], depth: int = 0) -> str:
        """What `steps` lead to from a SQL expression, each number converted.

        Spark reads one member of an array of structs as `array.member`; `transform`, which it does not compile, is
        slower.
        """
        if not steps:
            return self._converted(value)
        first, *inner = steps
        if isinstance(first, str):
            return self._sql(f"{value}.{_quoted([first])}", inner, depth)
        if first != LIST:
            return self._sql(f"map_{'keys' if first == KEYS else 'values'}({value})", [LIST, *inner], depth)
        element = f"x{depth}"
        of_element = self._sql(element, inner, depth + 1)
        names = [step for step in inner if isinstance(step, str)]
        member = f".{_quoted(names)}" if names else ""
        if of_element == element + member and inner[: len(names)] == names:
            return value + member
        return f"transform({value}, {element} -> {of_element})"

    def _converted(self, value: str) -> str:
        """A number of SQL from a decimal, an interval or a time; any other value unchanged."""
        if self.is_decimal:
            return f"CAST({value} AS double)"
        if self.unit == _MONTHS:
            return f"CAST(CAST({value} AS INTERVAL MONTH) AS INT)"
        if self.element.startswith("time("):
            # Spark 4.1 has no time_to_micros.
            return f"time_diff('MICROSECOND', time'00:00:00', {value})"
        if self.unit:
            # In seconds, exactly: a cast to BIGINT would drop what is less than one.
            return f"CAST(CAST(CAST({value} AS INTERVAL DAY TO SECOND) AS DECIMAL(19, 6)) * 1000000 AS BIGINT)"
        return value

    @property
    def fixed_bytes(self) -> int | None:
        """Bytes of one value in Arrow as Spark sends it; None if rows differ."""
        # What a decoder makes a number of comes as bytes.
        if self.kind != "scalar" or self.dtype in ("str", "bytes") or self.decoder is not None:
            return None
        return 8 if self.narrowed_from else np.dtype(self.dtype).itemsize

    @property
    def code(self) -> str:
        """Code that names the column, for messages."""
        return f"F.expr({self._selected()!r})" if self.steps else f"F.col({_quoted(self.path)!r})"

    def without_null_elements(self) -> str:
        """Code that replaces null elements by zeros and keeps the column's type."""
        names = [f"x{depth}" if self.ndim > 1 else "x" for depth in range(self.ndim)]
        zero = next((text for kind, text in _ZEROS.items() if self.element.startswith(kind)), 0)
        code = f"F.coalesce({names[-1]}, F.lit({zero!r}).cast({_SQL_NAMES.get(self.element, self.element)!r}))"
        for inside, around in zip(reversed(names), reversed([self.code, *names[:-1]]), strict=True):
            code = f"F.transform({around}, lambda {inside}: {code})"
        return code

    def spec(self) -> ColumnSpec:
        """What the executors need to know, as plain values."""
        shape = None if self.shape is None else list(self.shape)
        return {
            "name": self.name, "kind": self.kind, "dtype": self.dtype, "ndim": self.ndim, "shape": shape,
            "decode": None if self.decoder is None else ColumnDecoder(self.decoder),
            "skips_errors": self.decoder is not None and skips_errors(self.decoder), "categories": self.categories,
        }  # fmt: skip


def plan_columns(
    schema: Mapping[str, Any],
    *,
    float_dtype: str | None,
    shapes: Mapping[str, DeclaredShape],
    standardized: Collection[str] = (),
    is_case_sensitive: bool = True,
) -> list[SparkColumn]:
    """The columns to write, from a Spark schema's JSON (`df.schema.jsonValue()`): structs flattened, types checked.

    Columns that are to be `standardized` stay doubles: narrowed, numbers around a large mean would be rounded.

    Raises:
        UnsupportedTypeError: columns have no tensor form; all of them are named, with the cast to write.
        SourceError: two columns would have one name.
        ValueError: `shapes` names a column that does not exist or is no array.
    """
    unsupported: dict[str, tuple[str, str]] = {}
    columns: list[SparkColumn] = []
    for leaf in _flatten(schema["fields"]):
        planned = _plan_column(leaf, "float64" if leaf.name in standardized else float_dtype, shapes)
        if isinstance(planned, SparkColumn):
            columns.append(planned)
        else:
            unsupported[leaf.name] = planned
    raise_unsupported(unsupported)
    names = [column.name for column in columns]
    counted = Counter(names if is_case_sensitive else map(str.lower, names))
    twice = sorted({name for name in names if counted[name if is_case_sensitive else name.lower()] > 1})
    if twice:
        raise SourceError(
            f"Several columns are called {', '.join(map(repr, twice))} (a member of a struct is called "
            "'struct.member', the keys of a map 'map.key'). Rename them before converting.",
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
        if not is_settled(decoder):
            raise ValueError(
                f"decode: with decode_at='write' the decoder of column {column.name!r} needs a dtype and a shape, e.g. "
                "NumPy('float32', (28, 28)): rows are decoded while they are written, before any other is known."
            )
        if decoder.shape == () and decoder.dtype in ("uint8", "uint16", "float16"):
            raise ValueError(
                f"decode: with decode_at='write' the decoder of column {column.name!r} cannot give single numbers of "
                f"{decoder.dtype}, which Spark has no type for. Give a wider dtype, or pass decode_at='read'."
            )
        changed.append(
            replace(
                column,
                kind="decoded" if ndim_of(decoder) else "scalar",
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
    given = check_categories(categories, {column.name: column.dtype for column in columns}, unseen)
    marked = []
    for column in columns:
        if column.name not in given:
            marked.append(column)
            continue
        if column.shape is not None or column.kind not in ("scalar", "lists", "tensor"):
            what = "has a shape by shapes=" if column.shape is not None else f"is a {column.kind}"
            raise ValueError(
                f"categories: column {column.name!r} {what}; categories are single values and the elements of arrays."
            )
        values = given[column.name]
        spec: CategoriesSpec = {
            "kind": kind_of(column.name, column.dtype),
            "values": None if values is None else values.to_json()["values"],
            "unseen": unseen,
            "most": MAX_CATEGORIES,
        }
        # A tensor's file has no place for the values of categories, a list's has.
        marked.append(replace(column, kind="lists" if column.kind == "tensor" else column.kind, categories=spec))
    return marked


def batch_schema_of(columns: Sequence[SparkColumn]) -> Schema:
    """The columns as batches will have them, as far as is known before they are written."""
    return Schema(
        tuple(
            Field(
                name=column.name,
                dtype=column.dtype,
                # The shape of an array is known once all rows were seen.
                shape=None if column.kind == "lists" else column.shape or (1,) * column.ndim,
                ragged_ndim=max(1, column.ndim),
                unit=column.unit,
                has_no_zone=column.element == "timestamp_ntz",
                categories=None if column.categories is None else (),
            )
            for column in columns
        )
    )


class _Leaf(NamedTuple):
    """A column of a schema, structs and maps flattened."""

    path: tuple[str, ...]
    """Its name after those of the structs around it; the members of a map are called `key` and `value`."""

    steps: tuple[str | int, ...]
    spark_type: Any
    num_lists: int
    """In how many arrays and maps it is, besides its own."""

    @property
    def name(self) -> str:
        """The column's name."""
        return ".".join(self.path)


def _flatten(
    fields: Sequence[Mapping[str, Any]],
    path: tuple[str, ...] = (),
    steps: tuple[str | int, ...] = (),
    num_lists: int = 0,
) -> Iterator[_Leaf]:
    for field in fields:
        name = str(field["name"])
        yield from _flatten_type(_Leaf((*path, name), (*steps, name), field["type"], num_lists))


def _flatten_type(leaf: _Leaf) -> Iterator[_Leaf]:
    inner, lists = leaf.spark_type, leaf.num_lists
    while isinstance(inner, Mapping) and inner["type"] == "array":
        inner, lists = inner["elementType"], lists + 1
    kind = inner["type"] if isinstance(inner, Mapping) else ""
    steps = (*leaf.steps, *(LIST,) * (lists - leaf.num_lists))
    # A struct without members is named as what has no tensor form.
    if kind == "struct" and inner["fields"]:
        yield from _flatten(inner["fields"], leaf.path, steps, lists)
    elif kind == "map":
        for part, step in (("key", KEYS), ("value", VALUES)):
            yield from _flatten_type(_Leaf((*leaf.path, part), (*steps, step), inner[f"{part}Type"], lists + 1))
    else:
        yield leaf


def _plan_column(
    leaf: _Leaf, float_dtype: str | None, shapes: Mapping[str, DeclaredShape]
) -> SparkColumn | tuple[str, str]:
    """The column, or the name of its type and what to write instead."""
    name, kind, ndim, element = leaf.name, "scalar", 0, leaf.spark_type
    if isinstance(element, Mapping) and element["type"] == "udt":
        if str(element.get("class", "")).endswith(("ml.linalg.VectorUDT", "mllib.linalg.VectorUDT")):
            kind, ndim, element = "vector", 1, "double"
        elif str(element.get("class", "")).endswith(("ml.linalg.MatrixUDT", "mllib.linalg.MatrixUDT")):
            kind, ndim, element = "matrix", 2, "double"
        else:
            element = element["sqlType"]
    while isinstance(element, Mapping) and element["type"] == "array":
        kind, ndim, element = "tensor", ndim + 1, element["elementType"]
    arrow, unit = _arrow_type(element), _unit_of(element)
    dtype = None if arrow is None else dtype_of(arrow)
    if unit:
        dtype = "int32" if unit == _MONTHS else "int64"
    if dtype is None or (leaf.num_lists and kind in ("vector", "matrix")):
        return _type_name(leaf.spark_type), _remedy(leaf, element, ndim)
    ndim += leaf.num_lists
    if ndim and (dtype in OBJECT_DTYPES or (leaf.num_lists and shapes.get(name) is None)):
        kind = "lists"
        if shapes.get(name) is not None:
            raise ValueError(f"shapes: the arrays of {name!r} are {dtype}, and arrays of text have no one shape.")
    elif leaf.num_lists:
        kind = "tensor"
    narrowed_from = None
    if arrow == pa.float64() and float_dtype is not None:
        narrowed_from = "double" if float_dtype != "float64" else None
        dtype = float_dtype
    elif arrow is not None and pa.types.is_decimal(arrow):
        narrowed_from, dtype = str(element), float_dtype or "float64"
    declared_dtype, declared = split_declared(name, shapes.get(name))
    if kind == "scalar" and arrow == pa.binary() and declared is not None:
        kind, ndim, dtype = "bytes", len(declared), declared_dtype or "uint8"
    shape = tuple(int(size) for size in declared) if declared is not None and kind != "scalar" else None
    return SparkColumn(
        name=name,
        path=leaf.path,
        kind=kind,
        dtype=dtype,
        ndim=ndim,
        shape=shape,
        narrowed_from=narrowed_from,
        is_decimal=arrow is not None and pa.types.is_decimal(arrow),
        element=str(element),
        steps=leaf.steps if leaf.num_lists else (),
        unit=unit,
    )


def _unit_of(spark_type: Any) -> str:
    """What the numbers count that an interval or a time of day becomes; empty for other types."""
    if not isinstance(spark_type, str):
        return ""
    if spark_type.startswith(("interval year", "interval month")):
        return _MONTHS
    return _MICROSECONDS if spark_type.startswith(("interval ", "time(")) else ""


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


def _is_struct(spark_type: Any) -> bool:
    """Whether it is a struct, or arrays of one; a user-defined type is none, though it may be stored as one."""
    while isinstance(spark_type, Mapping) and spark_type["type"] == "array":
        spark_type = spark_type["elementType"]
    return isinstance(spark_type, Mapping) and spark_type["type"] == "struct"


def _remedy(leaf: _Leaf, element: Any, ndim: int) -> str:
    """What to write instead of a column without tensor form: code that runs as it is."""
    kind = element if isinstance(element, str) else str(element["type"])
    column, sql = f"F.col({_quoted(leaf.path)!r})", _quoted(leaf.path)
    if _is_struct(leaf.spark_type):
        return f"leave it out, it has no members, e.g. df.drop({leaf.path[0]!r})"
    if leaf.num_lists:
        return f"leave it out with the column that holds it, e.g. df.drop({leaf.path[0]!r})"
    if ndim:
        for _ in range(ndim - 1):
            column = f"F.flatten({column})"
        if isinstance(element, Mapping) and str(element.get("class", "")).endswith("VectorUDT"):
            return (
                f"make arrays of its vectors, e.g. F.transform({column}, lambda x: vector_to_array(x)), after "
                "from pyspark.ml.functions import vector_to_array"
            )
        number = "int" if kind == "void" else "long"
        return f"make numbers of its elements, e.g. F.transform({column}, lambda x: x.cast({number!r}))"
    if kind == "void":
        return f"drop it, it is always null, or cast it, e.g. {column}.cast('int')"
    if kind == "variant":
        return f"extract a typed value, e.g. F.try_variant_get({column}, '$.field', 'double')"
    if kind.startswith("geo"):
        return f"store it as bytes, e.g. F.expr({f'ST_AsBinary({sql})'!r})"
    return f"cast it, e.g. {column}.cast('string')"
