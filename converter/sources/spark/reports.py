"""The reports of all tasks become a manifest, or an error that names the column."""

from __future__ import annotations

import base64
import logging
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from converter.categories import MAX_CATEGORIES, Categories, Codes, check_values, sorted_values
from converter.errors import ConverterError, NullValueError, SourceError, UnsupportedTypeError
from converter.manifest import MAX_END_BYTES, FileEnd, Manifest, fingerprint_of, remedy_of
from converter.portable.categories import array_of, values_in
from converter.portable.tasks import add_moments
from converter.schema import Field, Schema
from converter.sources.spark.schema import SparkColumn
from converter.statistics import ColumnStatistics

if TYPE_CHECKING:
    from converter.portable.records import CategoriesReport

logger = logging.getLogger(__name__)

Vocabularies: TypeAlias = "Sequence[tuple[int, Mapping[str, CategoriesReport]]]"
"""For each partition the values of its columns of categories."""


def in_order(reports: list[tuple[int, dict[str, Any]]]) -> list[tuple[int, dict[str, Any]]]:
    """The reports of files by partition and name, in which the thousandth file of a task has a digit more."""
    return sorted(reports, key=lambda item: (item[0], [*map(_numbered, re.split(r"(\d+)", item[1].get("name", "")))]))


def _numbered(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdecimal() else (0, part)


def error_of(finding: Mapping[str, Any], columns: Sequence[SparkColumn]) -> ConverterError | TypeError:
    """The error for what an executor found in the data, or in a decoder."""
    name = str(finding["column"])
    quoted = f"`{name}`"
    if finding["kind"] == "null_element":
        column = next(column for column in columns if column.name == name)
        if column.kind == "lists":
            return NullValueError(
                f"Column {name!r} has arrays whose inner arrays are null, which have no length. Leave them out before "
                f"converting, e.g. F.filter({column.code}, lambda x: x.isNotNull()).",
                column=name,
            )
        no_size = " (drop rows whose inner array is null: it has no size to fill)" if column.ndim > 1 else ""
        return NullValueError(
            f"Column {name!r} has arrays with null elements, which a tensor cannot hold. Replace them before "
            f"converting, e.g. {column.without_null_elements()}{no_size}.",
            column=name,
        )
    if finding["kind"] == "shape":
        return SourceError(
            f"Column {name!r} has a row of {finding['found']}, but shapes= declares {finding['expected']}"
            + (f" (row {finding['row']} of partition {finding['partition']})" if "row" in finding else "")
            + ". Correct the shape, or the row.",
            column=name,
        )
    if finding["kind"] == "matrix":
        return UnsupportedTypeError(
            f"Column {name!r} has matrices, which Spark's own writer can write only with Python on the executors. "
            "Install pyarrow there, or pass writer='executors'.",
            column=name,
        )
    if finding["kind"] == "undecodable":
        return SourceError(
            f"Column {name!r} cannot be decoded in row {finding['row']} of partition {finding['partition']}: "
            f"{finding['found']}. Mend or drop the row, or pass on_error='skip' to the decoder.",
            column=name,
        )
    if finding["kind"] == "text":
        return SourceError(
            f"Column {name!r} has text that is no UTF-8 in row {finding['row']} of partition {finding['partition']}: "
            f"{finding['found']}. Mend or drop the row, or make the column binary, e.g. "
            f"F.col({quoted!r}).cast('binary').",
            column=name,
        )
    if finding["kind"] == "decoder":
        decoder = next(column.decoder for column in columns if column.name == name)
        return TypeError(f"decode: {decoder!r} of column {name!r} is no decoder: {finding['found']}.")
    if finding["kind"] == "no_library":
        return SourceError(
            f"The executors cannot decode column {name!r}: {finding['found']}. Install the library there (for Image: "
            "pillow and simplejpeg), or pass decode_at='read', which decodes where the rows are read.",
            column=name,
        )
    if finding["kind"] == "unseen":
        return SourceError(
            f"Column {name!r} has the value {finding['found']}"
            + (f" in row {finding['row']} of partition {finding['partition']}" if "row" in finding else "")
            + ", which is none of its categories. Pass unseen='null' or other categories.",
            column=name,
        )
    if finding["kind"] == "categories":
        return SourceError(
            f"Column {name!r} has more than {MAX_CATEGORIES:,} different values, which are too many for categories. Is "
            "it a key? Take it out of categories=, or replace rare values.",
            column=name,
        )
    return UnsupportedTypeError(
        f"Column {name!r} has a row whose inner arrays differ in length, so it is no tensor. Pad or cut them to one "
        f"length before converting, or flatten them, e.g. F.flatten(F.col({quoted!r})).",
        column=name,
    )


def manifest_from(
    reports: Sequence[tuple[int, Mapping[str, Any]]],
    columns: Sequence[SparkColumn],
    *,
    directory: str,
    is_kept: bool,
    float_dtype: str | None,
) -> Manifest:
    """The files that were written, as one dataset.

    Raises:
        SourceError: there are no rows.
    """
    totals: dict[str, Any] = {}
    lengths: dict[str, list[int]] = {}
    for _, report in reports:
        totals = add_moments(totals, report.get("moments", {}))
        for name, (least, most) in report.get("lengths", {}).items():
            before = lengths.get(name, [least, most])
            lengths[name] = [min(before[0], least), max(before[1], most)]
    skipped = _log_skipped(reports)
    vocabularies = [(partition, report["categories"]) for partition, report in reports if "categories" in report]
    reports = [(partition, report) for partition, report in reports if "rows" in report]
    files = [report for _, report in reports]
    rows = [report["rows"] for report in files]
    num_rows = sum(map(sum, rows))
    if not num_rows and skipped:
        names = ", ".join(map(repr, skipped))
        raise SourceError(
            f"No row of {names} can be decoded, so there is nothing to train on. Check the bytes, or pass another "
            "decoder.",
            column=skipped[0],
        )
    if not num_rows:
        raise SourceError(
            "The DataFrame has no rows, so there is nothing to train on. Check its filters and its source."
        )
    statistics = {}
    categories = {
        column.name: _categories_of(column, reports, _local_values(column, vocabularies))
        for column in columns
        if column.categories is not None and _has_values_of(column, reports, vocabularies)
    }
    for column in columns:
        null_count = sum(report["nulls"].get(column.name, 0) for report in files)
        shape: tuple[int, ...] | None = () if column.kind == "scalar" else None
        if column.kind not in ("scalar", "lists"):
            shape = _common_shape(column, reports, lengths.get(column.name))
        field = Field(
            name=column.name,
            dtype="int32" if column.name in categories and categories[column.name].are_coded else column.dtype,
            shape=shape,
            has_nulls=null_count > 0,
            ragged_ndim=column.ndim if shape is None else 1,
            has_null_elements=any(report.get("null_elements", {}).get(column.name, 0) for report in files),
            is_jagged=column.kind == "lists" and column.ndim > 1,
            unit=column.unit,
            has_no_zone=column.element == "timestamp_ntz",
        )
        shortest, longest = lengths.get(column.name, (None, None))
        spans = [report["spans"][column.name] for report in files if column.name in report["spans"]]
        statistics[column.name] = ColumnStatistics(
            field=field,
            null_count=null_count,
            shortest=shortest,
            longest=longest,
            row_group_span=_row_group_span(column, spans, num_row_groups=sum(map(len, rows))),
            num_bytes=sum(report["column_bytes"].get(column.name, 0) for report in files),
            closed=totals.get(column.name),
            counts=None if column.name not in categories else _counts_of(categories[column.name], column, vocabularies),
        )
    schema = Schema(tuple(column.field for column in statistics.values()))
    return Manifest(
        schema=schema,
        file_names=tuple(f"{directory}/{report['name']}" for report in files),
        file_bytes=np.array([report["bytes"] for report in files], np.int64),
        file_footers=np.array([report["footer_crc32"] for report in files], np.int64),
        file_ends=_ends_of(files),
        row_group_file=np.repeat(np.arange(len(files)), [len(groups) for groups in rows]).astype(np.int64),
        row_group_rows=np.array([count for groups in rows for count in groups], np.int64),
        row_group_bytes=np.array([size for report in files for size in report["row_group_bytes"]], np.int64),
        fingerprint=fingerprint_of(schema, rows, [report["digests"] for report in files], categories),
        num_rows=num_rows,
        statistics=statistics,
        categories=categories,
        is_kept=is_kept,
        remedy=remedy_of(is_kept=is_kept),
        float_dtype=float_dtype or "float64",
    )


def _log_skipped(reports: Sequence[tuple[int, Mapping[str, Any]]]) -> list[str]:
    """Say which rows were left out, in a line for each column; the columns."""
    found: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for partition, report in reports:
        for name, rows in report.get("skipped", {}).items():
            found.setdefault(name, []).append((partition, rows))
    for name, parts in found.items():
        partition, first = parts[0]
        logger.warning(
            "Column %r: %d rows cannot be decoded and are left out. The first is row %d of partition %d: %s",
            name, sum(rows["count"] for _, rows in parts), first["row"], partition, first["found"],
        )  # fmt: skip
    names_left_out: list[str] = []
    # Spark's own writer knows only how many there are.
    for rows in (report["left_out"] for _, report in reports if "left_out" in report):
        names = " or ".join(map(repr, rows["columns"]))
        logger.warning("Column %s: %d rows cannot be decoded and are left out.", names, rows["rows"])
        names_left_out += rows["columns"]
    return [*found, *names_left_out]


def _categories_of(
    column: SparkColumn, reports: Sequence[tuple[int, Mapping[str, Any]]], local: Mapping[int, pa.Array]
) -> Categories:
    """The values of all tasks together, sorted or as the user gave them; and what each file's codes are.

    Raises:
        SourceError: there are too many values, or none, or one that is none of those given.
    """
    name, spec = column.name, column.categories
    assert spec is not None
    given = None if spec["values"] is None else array_of(spec["values"], spec["kind"])
    seen = [array_of(report["seen"][name], spec["kind"]) for _, report in reports if name in report.get("seen", {})]
    values = sorted_values([*seen, *local.values()], spec["kind"]) if given is None else given
    if not len(values):
        raise SourceError(
            f"Column {name!r} has no value but null, so it has no categories. Take it out of categories=.", column=name
        )
    tables: dict[int, Codes] | None = None
    if seen:
        # Spark's own writer wrote the values.
        odd = seen[0].filter(pc.invert(pc.is_in(seen[0], values)))
        if len(odd) and spec["unseen"] == "raise":
            raise error_of({"kind": "unseen", "column": name, "found": repr(odd[0].as_py())}, [column])
    elif column.kind == "scalar":
        own = {partition: np.asarray(pc.index_in(known, values)) for partition, known in local.items()}
        tables = {
            number: own[partition].astype(np.int32)
            for number, (partition, _) in enumerate(reports)
            # Without a report of the task all tasks have the same codes.
            if partition in own and (own[partition] != np.arange(len(own[partition]))).any()
        }
    return Categories(
        values=check_values(name, values), unseen=spec["unseen"], are_given=given is not None, tables=tables
    )


def _has_values_of(
    column: SparkColumn, reports: Sequence[tuple[int, Mapping[str, Any]]], vocabularies: Vocabularies
) -> bool:
    """Whether the writer says which values there are; Spark alone does not for the elements of arrays."""
    return any(column.name in known for _, known in vocabularies) or any(
        column.name in report.get("seen", {}) for _, report in reports
    )


def _local_values(column: SparkColumn, vocabularies: Vocabularies) -> dict[int, pa.Array]:
    """The values of each partition, in the order of its codes."""
    if column.categories is None:
        return {}
    kind = column.categories["kind"]
    return {partition: values_in(known[column.name], kind) for partition, known in vocabularies if column.name in known}


def _counts_of(categories: Categories, column: SparkColumn, vocabularies: Vocabularies) -> npt.NDArray[np.int64] | None:
    """How many rows have each category; None if nobody counted."""
    local = _local_values(column, vocabularies)
    if not local:
        return None
    counts = np.zeros(len(categories.values), np.int64)
    for partition, known in vocabularies:
        if column.name in known:
            codes = np.asarray(pc.index_in(local[partition], categories.values))
            counts[codes] += np.array(known[column.name]["counts"], np.int64)
    return counts


def _ends_of(files: Sequence[Mapping[str, Any]]) -> tuple[FileEnd, ...] | None:
    """The bytes that readers fetch first, if all reports have them and they are not too many."""
    ends, num_bytes = [], 0
    for report in files:
        if "end" not in report:
            return None
        ends.append(FileEnd(*(zlib.decompress(base64.b64decode(part)) for part in report["end"])))
        num_bytes += sum(map(len, ends[-1]))
        if num_bytes > MAX_END_BYTES:
            return None
    return tuple(ends)


def _row_group_span(column: SparkColumn, spans: Sequence[Sequence[float]], *, num_row_groups: int) -> float | None:
    """The share of the column's range that a row group covers, on average."""
    if column.kind != "scalar" or not spans:
        return None
    sums, least, most = zip(*spans, strict=True)
    whole = max(most) - min(least)
    share = sum(sums) / num_row_groups / whole if 0 < whole < math.inf else math.inf
    # The sum of very large ranges is infinite, which no manifest may say.
    return share if share < math.inf else None


def _common_shape(
    column: SparkColumn, reports: Sequence[tuple[int, Mapping[str, Any]]], lengths: Sequence[int] | None
) -> tuple[int, ...] | None:
    """The shape that all rows have; None, with a warning that names two rows, if they differ."""
    shapes = [
        (report["shapes"][column.name], partition, report)
        for partition, report in reports
        if column.name in report["shapes"]
    ]
    if not shapes:
        return column.shape
    first = shapes[0][0]
    odd = next((item for item in shapes if item[0] is None or item[0] != first), None)
    if odd is None:
        return tuple(first)
    if lengths is not None and not lengths[1]:
        logger.warning("Column %r becomes ragged: all its arrays are empty. Check where it is filled.", column.name)
        return None
    remedy = "Give its decoder a shape" if column.decoder is not None else f"Declare shapes={{{column.name!r}: …}}"
    logger.warning(
        "Column %r becomes ragged: its rows differ in shape%s. %s to refuse such rows.",
        column.name,
        _where_rows_differ(column.name, reports, *odd[1:]),
        remedy,
    )
    return None


def _where_rows_differ(
    name: str, reports: Sequence[tuple[int, Mapping[str, Any]]], partition: int, report: Mapping[str, Any]
) -> str:
    """Two rows that differ, as part of a message."""
    if name not in report.get("extreme_rows", {}):
        row = report["odd_rows"].get(name)
        which = f"row {row} of partition {partition}" if row is not None else f"partition {partition}"
        return f", first seen at {which} ({report['name']})"
    least, most = report["extreme_rows"][name]
    if least == most:
        return " but not in how many numbers they have"
    files = {number: first["name"] for number, first in reversed(reports)}
    # Spark's monotonically_increasing_id: the row in the lower 33 bits, the partition above them.
    shortest, longest = (
        f"row {place & (2**33 - 1)} of partition {place >> 33} ({files.get(place >> 33, 'a file')})"
        for place in (least, most)
    )
    return f": the shortest is {shortest}, the longest {longest}"
