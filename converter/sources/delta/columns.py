"""Delta's schema as columns of the manifest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from converter.places import SourceColumn
from converter.sources.delta.bounds import bounds_array, typed_bound
from converter.sources.parquet.columns import Column

_MAX_COMPARED_COLUMNS = 4
"""Enough to tell files apart, at 5 µs a file each."""

_NUM_LOOKED_AT = 100
"""Of how many files bounds are counted, to find the columns that tell files apart."""

_COMPARABLE: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_integer, pa.types.is_temporal, pa.types.is_floating, pa.types.is_string, pa.types.is_decimal,
)  # fmt: skip

_CHAR_METADATA = "__CHAR_VARCHAR_TYPE_STRING"

_PRIMITIVES: dict[str, pa.DataType] = {
    "boolean": pa.bool_(), "byte": pa.int8(), "short": pa.int16(), "integer": pa.int32(), "long": pa.int64(),
    "float": pa.float32(), "double": pa.float64(), "date": pa.date32(), "string": pa.string(), "binary": pa.binary(),
    "timestamp": pa.timestamp("us", "UTC"), "timestamp_ntz": pa.timestamp("us"),
}  # fmt: skip


def table_columns(
    schema: Mapping[str, Any], mapping: str, actions: pa.Table, wrapped: Collection[str] | None
) -> list[Column]:
    """The columns with the members of structs in the struct's place; bounds in `wrapped` (None: all) are not known."""
    found: list[Column] = []
    num_files = actions.num_rows

    def add(one: Mapping[str, Any], above: tuple[str, ...], path: tuple[str, ...], ids: tuple[int, ...]) -> None:
        metadata = one.get("metadata") or {}
        names = (*above, str(one["name"]))
        path = (
            *path,
            str(metadata.get("delta.columnMapping.physicalName", one["name"]) if mapping != "none" else one["name"]),
        )
        if mapping == "id":
            ids = (*ids, int(metadata["delta.columnMapping.id"]))
        kind = one["type"]
        if isinstance(kind, Mapping) and kind["type"] == "struct":
            for member in kind["fields"]:
                add(member, names, path, ids)
            return
        written = str(metadata.get(_CHAR_METADATA, kind))
        # Spark fills up with blanks while it reads.
        is_padded = written.startswith("char(")
        name, arrow_type = ".".join(names), pa.null() if is_padded else _arrow_type(kind)
        partition = f"partition.{name}"
        if not above and partition in actions.column_names:
            values = pc.cast(bounds_array(actions, partition), arrow_type)
            source = SourceColumn(arrow_type=arrow_type, values=values.dictionary_encode())
            found.append(Column(name=name, source=source, null_count=1 if values.null_count else 0, num_bytes=0))
            return
        key = ".".join(path)
        nulls = bounds_array(actions, f"null_count.{key}")
        # Its bounds were written as floats are, 0.1 say, which a double is not.
        is_unknown = any(change.get("fromType") == "float" for change in metadata.get("delta.typeChanges") or ())
        is_unknown |= kind == "timestamp" and (wrapped is None or key in wrapped)
        source = SourceColumn(
            arrow_type=arrow_type,
            path=path,
            field_ids=ids,
            ignores_case=True,
            least=None if is_unknown else typed_bound(actions, f"min.{key}", arrow_type),
            most=None if is_unknown else typed_bound(actions, f"max.{key}", arrow_type),
            null_counts=nulls,
        )
        is_counted = nulls is not None and not nulls.null_count
        null_count = int(pc.sum(nulls).as_py() or 0) if is_counted and num_files else None
        found.append(
            Column(
                name=name, source=source, null_count=null_count, type_name=written if is_padded else _type_name(kind)
            )
        )

    for one in schema["fields"]:
        add(one, (), (), ())
    return found


def comparable_columns(columns: Sequence[Column]) -> dict[str, SourceColumn]:
    """The columns whose bounds, which the log knows, tell files apart best, whether they are wanted or not."""
    found: list[tuple[int, Column]] = []
    for is_kind in _COMPARABLE:
        for column in columns:
            bounds = [one for one in (column.source.least, column.source.most) if one is not None]
            if len(bounds) == 2 and is_kind(column.source.arrow_type):
                some = spread_over(np.arange(len(bounds[0])), _NUM_LOOKED_AT)
                found.append((sum(pc.count_distinct(one.take(some)).as_py() for one in bounds), column))
    found.sort(key=lambda one: -one[0])
    return {column.name: column.source for _, column in found[:_MAX_COMPARED_COLUMNS]}


def _arrow_type(kind: Any) -> pa.DataType:
    """The type in Arrow; that of nulls where there is no tensor form."""
    if isinstance(kind, Mapping):
        if kind["type"] == "array" and not isinstance(kind["elementType"], Mapping):
            return pa.list_(_arrow_type(kind["elementType"]))
        if kind["type"] == "array" and kind["elementType"]["type"] == "array":
            return pa.list_(_arrow_type(kind["elementType"]))
        return pa.null()
    if kind.startswith("decimal("):
        precision, scale = kind.removeprefix("decimal(").removesuffix(")").split(",")
        return pa.decimal128(int(precision), int(scale))
    return _PRIMITIVES.get(kind, pa.null())


def _type_name(kind: Any) -> str:
    return str(kind["type"]) if isinstance(kind, Mapping) else str(kind)


def spread_over(numbers: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """At most so many of these, from the first to the last."""
    return numbers[np.linspace(0, len(numbers) - 1, min(len(numbers), count)).astype(np.int64)]
