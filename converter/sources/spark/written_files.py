"""The files that Spark's own writer made, as reports: read from their footers, joined with those of the tasks.

Nothing is assumed of the layout: how Spark cuts rows into files is its own business. Only where the codes of categories
depend on the task, each file must hold the rows of one task, and that is checked.
"""

from __future__ import annotations

import functools
import posixpath
import re
import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from converter.categories import sorted_values
from converter.errors import CacheError
from converter.parsed_footer import ParsedFooter, parse_end
from converter.places import leaf_types, value_bytes_of
from converter.portable.categories import values_in
from converter.portable.footers import add_span, column_of, end_of
from converter.sources.spark.reports import in_order
from converter.sources.spark.schema import SparkColumn
from converter.storage.at_once import at_once
from converter.storage.directory import FileInfo, Storage

if TYPE_CHECKING:
    from converter.portable.records import PackReport

_FILE_NAME = re.compile(r"part-([0-9]{5,})-.*[-.]c[0-9]{3,}(-[0-9a-z_-]+)?\..*")


def reports_of_files(directory: Storage, observed: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """A report for each file with rows, from its footer; the first also has what was observed."""
    files = [(match, info) for info in directory.list() if (match := _FILE_NAME.fullmatch(info.name))]
    given_up = threading.Event()
    read = functools.partial(_footer, directory, given_up)
    footers = at_once(read, [info for _, info in files], given_up=given_up)
    reports = []
    for (match, info), (footer, sums, crc) in zip(files, footers, strict=True):
        report: dict[str, Any] = {
            "name": info.name,
            "bytes": info.num_bytes,
            "footer_crc32": crc,
            "rows": list(footer.row_group_rows),
            "row_group_bytes": sums.pop("row_group_bytes", []),
            "digests": [],
            "nulls": {},
            "shapes": {},
            "odd_rows": {},
            **sums,
        }
        if report["rows"]:
            reports.append((int(match[1]), report))
    reports = in_order(reports)
    if reports:
        reports[0][1].update(observed)
    return reports


def with_packs(
    reports: list[tuple[int, dict[str, Any]]],
    packs: Sequence[PackReport],
    columns: Sequence[SparkColumn],
    directory: Storage,
) -> list[tuple[int, dict[str, Any]]]:
    """The reports of files, with those of the tasks that packed their rows.

    Raises:
        CacheError: a file holds the rows of several tasks whose codes have different meanings.
    """
    if not reports:
        return reports
    _, first = reports[0]
    nulls = np.sum([pack["nulls"] for pack in packs], axis=0).tolist()
    first["nulls"] = dict(zip([column.name for column in columns], nulls, strict=True))
    first["digests"] = [pack["digest"] for pack in packs]
    coded = [column for column in columns if column.categories is not None and column.kind == "scalar"]
    if not _are_apart(reports, packs, coded) and not all(_have_same_codes(packs, column) for column in coded):
        raise CacheError(
            f"Spark wrote {directory.url}, but not each task's rows into files of its own, as an extension does that "
            "exchanges rows before they are written (spark.sql.extensions). So the codes of categories= are lost. Turn "
            "the extension off, or pass writer='executors'.",
            path=directory.url,
        )
    return [*reports, *((pack["partition"], {"categories": pack["categories"]}) for pack in packs)]


def _are_apart(
    reports: Sequence[tuple[int, Mapping[str, Any]]], packs: Sequence[PackReport], coded: Sequence[SparkColumn]
) -> bool:
    """Whether each file holds rows of one task, by all that footers tell: how many, and the bounds of codes."""
    files: dict[int, list[Mapping[str, Any]]] = {}
    for partition, report in reports:
        files.setdefault(partition, []).append(report)
    if files.keys() != {pack["partition"] for pack in packs}:
        return False
    for pack in packs:
        own = files[pack["partition"]]
        if sum(sum(report["rows"]) for report in own) != pack["rows"]:
            return False
        for column in coded:
            spans = [report["spans"][column.name] for report in own if column.name in report["spans"]]
            used = np.flatnonzero(pack["categories"][column.name]["counts"])
            bounds = [min(span[1] for span in spans), max(span[2] for span in spans)] if spans else []
            if bounds and (not len(used) or bounds != [used[0], used[-1]]):
                return False
    return True


def _have_same_codes(packs: Sequence[PackReport], column: SparkColumn) -> bool:
    """Whether a code of a column means the same in all tasks, and in the dataset."""
    assert column.categories is not None
    kind = column.categories["kind"]
    known = sorted((values_in(pack["categories"][column.name], kind) for pack in packs), key=len)
    whole = known[-1] if column.categories["values"] is not None else sorted_values(known, kind)
    return all(values.equals(whole[: len(values)]) for values in known)


def _footer(directory: Storage, given_up: threading.Event, info: FileInfo) -> tuple[ParsedFooter, dict[str, Any], int]:
    """A file's footer, its sums over all row groups, and its digest."""
    path = posixpath.join(directory.url, info.name)
    try:
        with directory.open_parquet(info.name, info.num_bytes, given_up) as opened:
            end = end_of(opened)
            footer = parse_end(end)
            sums = _sum_footer(footer, pq.ParquetFile(opened)) if not footer.is_encrypted else {}
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CacheError(
            f"Spark wrote {path}, but the driver cannot read its footer ({str(error).rstrip('.')}). Choose a cache_dir "
            "that the driver and every executor share, or convert again.",
            path=path,
        ) from error
    if footer.is_encrypted:
        raise CacheError(
            f"Spark encrypted columns of {path}, which cannot be read without its keys. Unset "
            "spark.hadoop.parquet.crypto.factory.class, or pass writer='executors', which does not encrypt.",
            path=path,
        )
    return footer, sums, zlib.crc32(end)


def _sum_footer(footer: ParsedFooter, parquet: pq.ParquetFile) -> dict[str, Any]:
    """`portable.footers.sum_footer` for a file that may be damaged."""
    spans: dict[str, list[float]] = {}
    column_bytes: dict[str, int] = {}
    schema = parquet.schema_arrow
    in_memory = np.zeros(len(footer.row_group_rows), np.int64)
    kinds = [kind for part in schema for kind in leaf_types(part.type)]
    for leaf, leaf_type in enumerate(kinds):
        column = parquet.schema.column(leaf)
        name = column_of(column)
        sizes, _ = footer.decoded_bytes(leaf, value_bytes_of(leaf_type))
        in_memory += np.array(sizes, np.int64)
        in_memory += np.array(footer.list_bytes(leaf, column.max_repetition_level), np.int64)
        column_bytes[name] = sum(sizes)
        index = schema.get_field_index(name)
        if column.max_repetition_level or index < 0 or column.physical_type in ("BYTE_ARRAY", "INT96"):
            continue
        kind = schema.field(index).type
        for group in range(len(footer.row_group_rows)):
            bounds = footer.bounds(group, leaf, kind)
            if bounds is not None and not pa.types.is_fixed_size_binary(kind):
                # Dates and times as stored integers: Python's end with the year 9999.
                values = [bound.value if pa.types.is_temporal(kind) else bound.as_py() for bound in bounds]
                add_span(spans, name, *map(float, values))
    return {"spans": spans, "column_bytes": column_bytes, "row_group_bytes": in_memory.tolist()}
