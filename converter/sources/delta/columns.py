"""A Delta table's schema and log become columns: where files hold them, their types, bounds and null counts."""

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
from converter.sources.types import arrow_type_of

_MAX_COMPARED_COLUMNS = 4
"""Enough to tell files apart; each costs 5 µs for a file."""

_NUM_LOOKED_AT = 100
"""How many files are looked at to find the columns that tell files apart."""

_COMPARABLE: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_integer, pa.types.is_temporal, pa.types.is_floating, pa.types.is_string, pa.types.is_decimal,
)  # fmt: skip

_CHAR_METADATA = "__CHAR_VARCHAR_TYPE_STRING"


def table_columns(
    schema: Mapping[str, Any], mapping: str, actions: pa.Table, wrapped: Collection[str] | None
) -> list[Column]:
    """The columns, structs and maps as their members. Bounds of columns in `wrapped` (None: all) are dropped."""
    columns: list[Column] = []
    num_files = actions.num_rows

    def add(
        field: Mapping[str, Any],
        above: tuple[str, ...],
        stored_above: tuple[str, ...],
        ids_above: tuple[int | str, ...],
        *,
        num_lists: int,
    ) -> None:
        metadata = field.get("metadata") or {}
        names = (*above, str(field["name"]))
        stored_name = metadata.get("delta.columnMapping.physicalName", field["name"])
        path = (*stored_above, str(field["name"] if mapping == "none" else stored_name))
        ids = (*ids_above, int(metadata["delta.columnMapping.id"])) if mapping == "id" else ids_above
        add_type(field["type"], metadata=metadata, names=names, path=path, ids=ids, num_lists=num_lists)

    def add_type(
        kind: Any,
        *,
        metadata: Mapping[str, Any],
        names: tuple[str, ...],
        path: tuple[str, ...],
        ids: tuple[int | str, ...],
        num_lists: int,
    ) -> None:
        inner, depth = kind, num_lists
        while isinstance(inner, Mapping) and inner["type"] == "array":
            inner, depth = inner["elementType"], depth + 1
        if isinstance(inner, Mapping) and inner["type"] == "struct":
            for member in inner["fields"]:
                add(member, names, path, ids, num_lists=depth)
            return
        if isinstance(inner, Mapping) and inner["type"] == "map":
            for part in ("key", "value"):
                ids_of_part = (*ids, part) if mapping == "id" else ids
                add_type(
                    inner[f"{part}Type"],
                    metadata=metadata,
                    names=(*names, part),
                    path=(*path, part),
                    ids=ids_of_part,
                    num_lists=depth + 1,
                )
            return
        type_name = str(metadata.get(_CHAR_METADATA, kind))
        # Spark pads such values with blanks while it reads.
        is_padded = type_name.startswith("char(")
        name, arrow_type = ".".join(names), pa.null() if is_padded else _arrow_type(kind)
        for _ in range(num_lists if not pa.types.is_null(arrow_type) else 0):
            arrow_type = pa.list_(arrow_type)
        partition = f"partition.{name}"
        if len(names) == 1 and partition in actions.column_names and not pa.types.is_null(arrow_type):
            values = pc.cast(bounds_array(actions, partition), arrow_type)
            source = SourceColumn(arrow_type=arrow_type, values=values.dictionary_encode())
            # None if a file does not say how many rows it has.
            rows = pc.filter(bounds_array(actions, "num_records"), pc.is_null(values))
            null_count = None if rows.null_count else int(pc.sum(rows).as_py() or 0)
            columns.append(Column(name=name, source=source, null_count=null_count, num_bytes=0))
            return
        key = ".".join(path)
        # The log counts the nulls of whole arrays and maps only.
        nulls = None if num_lists else bounds_array(actions, f"null_count.{key}")
        # Bounds from before floats became doubles: 0.1 is written, and the double is a little more.
        is_unknown = any(change.get("fromType") == "float" for change in metadata.get("delta.typeChanges") or ())
        is_unknown |= kind == "timestamp" and (wrapped is None or key in wrapped)
        source = SourceColumn(
            arrow_type=arrow_type,
            path=path,
            field_ids=ids,
            ignores_case=True,
            least=None if is_unknown or num_lists else typed_bound(actions, f"min.{key}", arrow_type),
            most=None if is_unknown or num_lists else typed_bound(actions, f"max.{key}", arrow_type),
            null_counts=nulls,
        )
        is_counted = nulls is not None and not nulls.null_count
        null_count = int(pc.sum(nulls).as_py() or 0) if is_counted and num_files else None
        if not is_padded:
            type_name = str(kind["type"]) if isinstance(kind, Mapping) else str(kind)
        columns.append(
            Column(name=name, source=source, null_count=null_count, type_name=type_name, is_in_lists=num_lists > 0)
        )

    for top_field in schema["fields"]:
        add(top_field, (), (), (), num_lists=0)
    return columns


def comparable_columns(columns: Sequence[Column]) -> dict[str, SourceColumn]:
    """The columns whose bounds in the log tell files apart best, whether they are wanted or not."""
    ranked: list[tuple[int, Column]] = []
    for is_kind in _COMPARABLE:
        for column in columns:
            bounds = [bound for bound in (column.source.least, column.source.most) if bound is not None]
            if len(bounds) == 2 and is_kind(column.source.arrow_type):
                sample = spread_over(np.arange(len(bounds[0])), _NUM_LOOKED_AT)
                ranked.append((sum(pc.count_distinct(bound.take(sample)).as_py() for bound in bounds), column))
    ranked.sort(key=lambda counted: -counted[0])
    return {column.name: column.source for _, column in ranked[:_MAX_COMPARED_COLUMNS]}


def _arrow_type(kind: Any) -> pa.DataType:
    """The type in Arrow; Arrow's null type if there is no tensor form."""
    if not isinstance(kind, Mapping):
        return arrow_type_of(kind) or pa.null()
    if kind["type"] != "array":
        return pa.null()
    element = kind["elementType"]
    is_plain = not isinstance(element, Mapping) or element["type"] == "array"
    return pa.list_(_arrow_type(element)) if is_plain else pa.null()


def spread_over(numbers: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """At most `count` of the numbers, evenly from the first to the last."""
    return numbers[np.linspace(0, len(numbers) - 1, min(len(numbers), count)).astype(np.int64)]
