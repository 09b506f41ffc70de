"""Parquet files as they stand become a manifest: their footers are read, their rows are not, and nothing is written.

What a footer cannot say is found out while reading, and checked there: that all
lists of a column have one length is concluded from how many numbers a row group
has, and a row of another length is an error that names the file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from converter.errors import SourceError
from converter.manifest import Manifest
from converter.schema import Field, Schema, dtype_of, raise_unsupported
from converter.sources import executor
from converter.statistics import ColumnStatistics
from converter.storage import Storage, StorageOptions, open_storage

_DELTA_LOG = "_delta_log"
_FOOTER_THREADS = 8
_MAGIC_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    name: str
    num_bytes: int
    metadata: pq.FileMetaData
    schema: pa.Schema
    footer_crc32: int
    digest: str


def read_footers(
    urls: Sequence[str],
    *,
    columns: Sequence[str] | None,
    float_dtype: str | None,
    shapes: Mapping[str, Sequence[int] | None],
    storage_options: StorageOptions | None,
    timeout_seconds: float,
) -> tuple[Storage, Manifest]:
    """The folder that holds all of the files, and what they are.

    Raises:
        SourceError: there are no files or no rows, files differ in their columns, or it is a Delta table.
        UnsupportedTypeError: columns have no tensor form; all of them are named.
        ValueError: `columns` or `shapes` name a column that does not exist.
    """
    storage, names = _find_files(urls, storage_options, timeout_seconds)
    with ThreadPoolExecutor(_FOOTER_THREADS, thread_name_prefix="converter-footers") as pool:
        files = list(pool.map(functools.partial(_read_footer, storage), names))
    files = [file for file in files if file.metadata.num_rows]
    if not files:
        raise SourceError(f"{storage.url} has no rows, so there is nothing to train on.", path=storage.url)
    schema = files[0].schema
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise SourceError(
            f"{storage.url}/{files[0].name} has several columns called {twice[0]!r}; rename them with Spark.",
            column=twice[0],
        )
    for file in files:
        if not file.schema.equals(schema):
            raise SourceError(
                f"{storage.url}/{file.name} has other columns than {files[0].name}: "
                f"{_difference(file.schema, schema)}. Give the files that agree, or read them with Spark and convert "
                "the DataFrame.",
                path=f"{storage.url}/{file.name}",
            )
    fields, leaves = _plan_fields(files, schema, columns=columns, float_dtype=float_dtype, shapes=shapes)
    groups = [[file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)] for file in files]
    rows = np.array([group.num_rows for of_file in groups for group in of_file], np.int64)
    content = json.dumps([[field.to_json() for field in fields], [[file.name, file.digest] for file in files]])
    return storage, Manifest(
        schema=Schema(tuple(fields)),
        file_names=tuple(file.name for file in files),
        file_bytes=np.array([file.num_bytes for file in files], np.int64),
        file_footers=np.array([file.footer_crc32 for file in files], np.int64),
        row_group_file=np.repeat(np.arange(len(files)), [len(of_file) for of_file in groups]).astype(np.int64),
        row_group_rows=rows,
        row_group_bytes=np.array([group.total_byte_size for of_file in groups for group in of_file], np.int64),
        fingerprint=hashlib.sha256(content.encode()).hexdigest()[:32],
        num_rows=int(rows.sum()),
        float_dtype=float_dtype or "float64",
        statistics=_statistics(files, fields, leaves),
        column_indices=tuple(leaves),
    )


def _find_files(
    urls: Sequence[str], storage_options: StorageOptions | None, timeout_seconds: float
) -> tuple[Storage, list[str]]:
    """The folder above all files, and their names below it, in the order of the names."""
    places = [open_storage(url, storage_options, timeout_seconds) for url in urls]
    paths = [place.path() for place in places]
    for place in places:
        _refuse_delta(place)
    is_file = [place.is_at_a_file for place in places]
    folders = [posixpath.dirname(path) if alone else path for path, alone in zip(paths, is_file, strict=True)]
    common = posixpath.commonpath(folders)
    root = places[0].above(common)
    found: list[str] = []
    for place, path, alone in zip(places, paths, is_file, strict=True):
        below = posixpath.relpath(path, common)
        if alone:
            found.append(below)
            continue
        names = [posixpath.normpath(posixpath.join(below, name)) for name in sorted(_walk(place))]
        if not names:
            raise SourceError(f"{place.url} holds no Parquet files (names that end with .parquet).", path=place.url)
        found += names
    return root, list(dict.fromkeys(found))


def _walk(folder: Storage) -> Iterator[str]:
    """The Parquet files below a folder; what begins with `_` or `.` is no data, as Spark sees it."""
    for info in folder.list():
        if info.name.startswith(("_", ".")):
            continue
        if info.is_directory:
            if "=" in info.name:
                raise SourceError(
                    f"{folder.url}/{info.name} is a folder of a partitioned table, whose column is in the name alone. "
                    "Read it with Spark and convert the DataFrame.",
                    path=f"{folder.url}/{info.name}",
                )
            yield from (f"{info.name}/{name}" for name in _walk(folder.below(info.name)))
        elif info.name.endswith((".parquet", ".parq")):
            yield info.name


def _refuse_delta(place: Storage) -> None:
    """Refuse a Delta table's folder, or one within it: the files alone would bring deleted rows back."""
    path = place.path()
    while True:
        folder = place.above(path)
        if any(info.name == _DELTA_LOG and info.is_directory for info in folder.list()):
            raise SourceError(
                f"{folder.url} is a Delta table: its files also hold rows that were deleted or replaced, which would "
                "come back. Convert a DataFrame of it: make_spark_converter(spark.read.format('delta').load(…)).",
                path=folder.url,
            )
        if posixpath.dirname(path) in (path, ""):
            return
        path = posixpath.dirname(path)


def _read_footer(storage: Storage, name: str) -> _File:
    path = f"{storage.url}/{name}"
    try:
        with storage.open_parquet(name) as opened:
            num_bytes = opened.size()
            parquet = pq.ParquetFile(opened, coerce_int96_timestamp_unit="us")
            opened.seek(num_bytes - _MAGIC_BYTES)
            length = int.from_bytes(opened.read(4), "little")
            opened.seek(num_bytes - _MAGIC_BYTES - length)
            # It names every page's place, size and range: other rows give another one.
            digest = hashlib.sha256(opened.read(length)).hexdigest()
            crc = executor.footer_crc32(opened)
            # Without what pandas or Spark noted beside the columns.
            schema = pa.schema([field.with_nullable(True) for field in parquet.schema_arrow])
            return _File(
                name=name,
                num_bytes=num_bytes,
                metadata=parquet.metadata,
                schema=schema,
                footer_crc32=crc,
                digest=digest,
            )
    except FileNotFoundError as error:
        raise SourceError(f"{path} is not there.", path=path) from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SourceError(f"{path} is no Parquet file that can be read: {error}", path=path) from error


def _difference(one: pa.Schema, other: pa.Schema) -> str:
    names = list(dict.fromkeys([*one.names, *other.names]))
    for name in names:
        kinds = [schema.field(name).type if name in schema.names else "missing" for schema in (one, other)]
        if kinds[0] != kinds[1]:
            return f"{name!r} is {kinds[0]}, and {kinds[1]} there"
    return "the columns stand in another order"


def _plan_fields(
    files: Sequence[_File],
    schema: pa.Schema,
    *,
    columns: Sequence[str] | None,
    float_dtype: str | None,
    shapes: Mapping[str, Sequence[int] | None],
) -> tuple[list[Field], list[int]]:
    """The wanted columns, and for each the number of the leaf that holds its values in every file."""
    first_leaf, leaf = {}, 0
    for field in schema:
        first_leaf[field.name] = leaf
        leaf += _count_leaves(field.type)
    wanted = list(schema.names if columns is None else columns)
    known = Schema(tuple(Field(name=name, dtype="bool") for name in schema.names))
    for option, names in (("columns", wanted), ("shapes", shapes)):
        for name in names:
            if name not in known:
                raise ValueError(f"{option}: {known.explain_missing(name)}")
    fields, unsupported = [], {}
    for name in wanted:
        found = _plan_field(files, schema.field(name), first_leaf[name], float_dtype, shapes)
        if isinstance(found, Field):
            fields.append(found)
        else:
            unsupported[name] = found
    raise_unsupported(unsupported)
    return fields, [first_leaf[field.name] for field in fields]


def _count_leaves(kind: pa.DataType) -> int:
    return sum(_count_leaves(kind.field(index).type) for index in range(kind.num_fields)) if kind.num_fields else 1


def _plan_field(
    files: Sequence[_File],
    column: pa.Field,
    leaf: int,
    float_dtype: str | None,
    shapes: Mapping[str, Sequence[int] | None],
) -> Field | tuple[str, str]:
    """The column as a tensor, or its type's name and what to do instead."""
    said = {key.decode(): value.decode() for key, value in (column.metadata or {}).items()}
    kind, ndim = column.type, 0
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind, ndim = kind.value_type, ndim + 1
    if pa.types.is_dictionary(kind) and not ndim:
        kind = kind.value_type
    dtype = dtype_of(kind)
    if executor.DTYPE_METADATA in said:
        # Packed by this package, in a cache whose manifest is elsewhere.
        dtype, ndim = said[executor.DTYPE_METADATA], int(said[executor.NDIM_METADATA])
    elif dtype is None or (ndim and (dtype in ("str", "bytes") or dtype.startswith("datetime64"))):
        return str(column.type), "leave it out with columns=…, or read it with Spark and convert the DataFrame"
    elif float_dtype is not None and (pa.types.is_float64(kind) or pa.types.is_decimal(kind)):
        dtype = float_dtype
    nulls = _null_count(files, leaf)
    shape: tuple[int, ...] | None = ()
    if ndim:
        is_fixed = pa.types.is_fixed_size_list(column.type) and ndim == 1
        shape = (column.type.list_size,) if is_fixed else _shape_of(files, leaf, ndim, said)
        if column.name in shapes:
            declared = shapes[column.name]
            shape = None if declared is None else tuple(declared)
    elif column.name in shapes:
        raise ValueError(f"shapes names the column {column.name!r}, which is no array.")
    return Field(
        name=column.name,
        dtype=dtype,
        shape=shape,
        has_nulls=nulls is None or nulls > 0,
        ragged_ndim=ndim if shape is None else 1,
    )


def _shape_of(files: Sequence[_File], leaf: int, ndim: int, said: Mapping[str, str]) -> tuple[int, ...] | None:
    """The one length that all lists of a column can have, by how many numbers each row group has of it."""
    if executor.DTYPE_METADATA in said:
        shape = said.get(executor.SHAPE_METADATA)
        return None if shape is None else tuple(json.loads(shape))
    lengths = {
        divmod(group.column(leaf).num_values, group.num_rows)
        for file in files
        for group in map(file.metadata.row_group, range(file.metadata.num_row_groups))
        if group.num_rows
    }
    if ndim > 1 or len(lengths) != 1:
        return None
    ((length, rest),) = lengths
    return None if rest or not length else (length,)


def _null_count(files: Sequence[_File], leaf: int) -> int | None:
    """Nulls of a column; None where a footer does not say, or counts those within lists as well."""
    total = 0
    for file in files:
        for index in range(file.metadata.num_row_groups):
            statistics = file.metadata.row_group(index).column(leaf).statistics
            if statistics is None or not statistics.has_null_count:
                return None
            total += statistics.null_count
    is_nested = files[0].metadata.schema.column(leaf).max_repetition_level > 0
    return None if is_nested and total else total


def _statistics(files: Sequence[_File], fields: Sequence[Field], leaves: Sequence[int]) -> dict[str, ColumnStatistics]:
    """What footers say of the columns: nulls, where they are counted, and sizes."""
    footers = [executor.sum_footer(file.metadata) for file in files]
    found = {}
    for field, leaf in zip(fields, leaves, strict=True):
        nulls = _null_count(files, leaf)
        if nulls is None:
            continue
        num_bytes = sum(footer["column_bytes"].get(field.name, 0) for footer in footers)
        found[field.name] = ColumnStatistics(field=field, null_count=nulls, num_bytes=num_bytes)
    return found
