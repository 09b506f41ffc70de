"""Parquet files become a manifest, and their columns tensors: dtype, shape and nulls from footers alone."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from converter.errors import SourceError
from converter.manifest import Manifest
from converter.places import is_bytes_type, is_list
from converter.portable.tensors import DTYPE_METADATA, NDIM_METADATA, SHAPE_METADATA
from converter.schema import OBJECT_DTYPES, DeclaredShape, Field, Schema, dtype_of, raise_unsupported, split_declared
from converter.sources.parquet.columns import Column, merge_columns
from converter.sources.parquet.footers import Footer, formats_of, look_at
from converter.sources.parquet.listing import find_files, partition_columns
from converter.statistics import ColumnStatistics
from converter.storage.directory import Storage, StorageOptions

_REMEDY = "Make the converter again."


def read_footers(
    urls: Sequence[str],
    *,
    columns: Sequence[str] | None,
    float_dtype: str | None,
    shapes: Mapping[str, DeclaredShape],
    standardized: Collection[str] = (),
    storage_options: StorageOptions | None,
    timeout_seconds: float,
) -> tuple[Storage, Manifest]:
    """The folder that holds all of the files, and their manifest.

    Raises:
        SourceError: there are no files or no rows, files contradict each other, or it is a Delta table.
        UnsupportedTypeError: columns have no tensor form; all of them are named.
        ValueError: `columns` or `shapes` name a column that does not exist.
    """
    storage, partitions = find_files(urls, storage_options, timeout_seconds)
    manifest = manifest_of(
        storage, partitions, columns=columns, float_dtype=float_dtype, shapes=shapes, standardized=standardized
    )
    return storage, manifest


def manifest_of(
    storage: Storage,
    partitions: Mapping[str, Mapping[str, str | None]],
    *,
    columns: Sequence[str] | None = None,
    float_dtype: str | None = "float32",
    shapes: Mapping[str, DeclaredShape] | None = None,
    standardized: Collection[str] = (),
    given_up: threading.Event | None = None,
) -> Manifest:
    """The manifest of Parquet files, in this order: all that a source needs that knows its files.

    Args:
        storage: the folder that the names are relative to.
        partitions: for each file's name the values of its partition columns, which are not in the file.
        columns: the columns to read; None for all.
        float_dtype: what floats become while reading; None keeps the stored type.
        shapes: as `make_parquet_converter` takes them.
        standardized: columns that stay doubles, because they are to be standardised.
        given_up: ends the requests to a store once it is set.

    Raises:
        SourceError, UnsupportedTypeError, ValueError: as `read_footers`.
        GivenUpError: `given_up` was set while a store was waited for.
    """
    shapes = shapes or {}
    files = [file for file in look_at(storage, list(partitions), given_up=given_up) if file.num_rows]
    if not files:
        url = storage.below(next(iter(partitions))).url if len(partitions) == 1 else storage.url
        raise SourceError(
            f"{url} has no rows, so there is nothing to train on. Check what was written there.", path=url
        )
    by_name = merge_columns(storage.url, files) | partition_columns(
        storage.url,
        {file.name: partitions[file.name] for file in files},
        {file.name: file.num_rows for file in files},
    )
    wanted = choose_columns(by_name, columns=columns, shapes=shapes)
    fields = plan_fields(wanted, float_dtype=float_dtype, shapes=shapes, standardized=standardized)
    content = json.dumps(
        [
            [field.to_json() for field in fields],
            [[file.name, file.digest] for file in files],
            {column.name: column.source.values.to_pylist() for column in wanted if column.source.values is not None},
        ],
        default=str,
    )
    rows = np.concatenate([file.row_group_rows for file in files])
    return Manifest(
        schema=Schema(tuple(fields)),
        file_names=tuple(file.name for file in files),
        file_bytes=np.array([file.num_bytes for file in files], np.int64),
        file_footers=np.array([file.footer_crc32 for file in files], np.int64),
        file_stamps=_stamps_of(files),
        row_group_file=np.repeat(np.arange(len(files)), [len(file.row_group_rows) for file in files]).astype(np.int64),
        row_group_rows=rows,
        row_group_bytes=np.concatenate([file.row_group_bytes for file in files]),
        fingerprint=hashlib.sha256(content.encode()).hexdigest()[:32],
        num_rows=int(rows.sum()),
        float_dtype=float_dtype or "float64",
        statistics=statistics_of(wanted, fields),
        source_columns={column.name: column.source for column in wanted},
        remedy=_REMEDY,
        formats=formats_of(files),
    )


def _stamps_of(files: Sequence[Footer]) -> npt.NDArray[np.int64] | None:
    if all(file.stamp is None for file in files):
        return None
    return np.array([file.stamp or 0 for file in files], np.int64)


def choose_columns(
    by_name: Mapping[str, Column], *, columns: Sequence[str] | None, shapes: Mapping[str, DeclaredShape]
) -> list[Column]:
    """The wanted columns, each once.

    Raises:
        ValueError: a name in `columns` or `shapes` does not exist.
        SourceError: a file has several columns of a name, or files disagree about a wanted column.
    """
    schema = Schema(tuple(Field(name=name, dtype="bool") for name in by_name))
    wanted = list(by_name if columns is None else columns)
    for option, names in (("columns", wanted), ("shapes", shapes)):
        for name in names:
            if name not in by_name:
                raise ValueError(f"{option}: {schema.explain_missing(name)}")
            if by_name[name].is_twice:
                raise SourceError(f"There are several columns called {name!r}; rename them with Spark.", column=name)
    for name in wanted:
        if (disagreement := by_name[name].disagreement) is not None:
            raise disagreement
    return [by_name[name] for name in dict.fromkeys(wanted)]


def plan_fields(
    columns: Sequence[Column],
    *,
    float_dtype: str | None,
    shapes: Mapping[str, DeclaredShape],
    standardized: Collection[str] = (),
) -> list[Field]:
    """The columns as tensors; those that are to be `standardized` stay doubles, which narrowing would round.

    Raises:
        UnsupportedTypeError: some have no tensor form; all of them are named.
        ValueError: `shapes` names a column that is no array.
    """
    fields, unsupported = [], {}
    for column in columns:
        planned = _plan_field(column, "float64" if column.name in standardized else float_dtype, shapes)
        if isinstance(planned, Field):
            fields.append(planned)
        else:
            unsupported[column.name] = planned
    raise_unsupported(unsupported)
    return fields


def _plan_field(
    column: Column, float_dtype: str | None, shapes: Mapping[str, DeclaredShape]
) -> Field | tuple[str, str]:
    """The column as a tensor, or the name of its type and what to do instead."""
    kind, ndim, metadata = column.source.arrow_type, 0, column.metadata
    while is_list(kind):
        kind, ndim = kind.value_type, ndim + 1
    dtype = dtype_of(kind)
    is_bytes = is_bytes_type(column.source.arrow_type) and DTYPE_METADATA not in metadata
    if is_bytes and column.name in shapes:
        return _plan_bytes(column, shapes[column.name])
    if DTYPE_METADATA in metadata:
        # A file of a cache, read without the cache's manifest.
        dtype, ndim = metadata[DTYPE_METADATA], int(metadata[NDIM_METADATA])
    elif dtype is None:
        remedy = (
            "leave it out with columns=…, or read it with Spark and call make_spark_converter, whose error gives the "
            "expressions that keep its values"
        )
        if pa.types.is_fixed_size_binary(kind) and not ndim:
            remedy = f"declare its bytes as numbers, e.g. shapes={{{column.name!r}: ({kind.byte_width},)}}, or {remedy}"
        return str(column.type_name or column.source.arrow_type), remedy
    elif float_dtype is not None and (pa.types.is_float64(kind) or pa.types.is_decimal(kind)):
        dtype = float_dtype
    shape: tuple[int, ...] | None = ()
    if ndim and dtype in OBJECT_DTYPES:
        if shapes.get(column.name) is not None:
            raise ValueError(f"shapes: the lists of {column.name!r} are {dtype}, and lists of text have no one shape.")
        shape = None
    elif ndim:
        shape = None if column.is_in_lists else _shape_of(column, ndim)
        if column.name in shapes:
            declared_dtype, declared = split_declared(column.name, shapes[column.name])
            if declared_dtype is not None:
                raise ValueError(f"shapes: the lists of {column.name!r} are {dtype}; declare only their shape.")
            shape = None if declared is None else tuple(declared)
    elif column.name in shapes:
        raise ValueError(f"shapes names the column {column.name!r}, which is no array.")
    return Field(
        name=column.name,
        dtype=dtype,
        shape=shape,
        has_nulls=column.null_count != 0,
        ragged_ndim=ndim if shape is None else 1,
        has_null_elements=ndim > 0 and column.has_null_elements,
        is_jagged=ndim > 1 and shape is None and DTYPE_METADATA not in metadata,
        unit=column.unit,
    )


def _plan_bytes(column: Column, declared: DeclaredShape) -> Field:
    """A binary column whose bytes are numbers of a declared dtype and shape."""
    dtype, shape = split_declared(column.name, declared)
    if shape is None or not len(shape):
        raise ValueError(f"shapes: the bytes of {column.name!r} need a shape, e.g. (28, 28), or ('float32', (512,)).")
    kind, row_bytes = column.source.arrow_type, math.prod(shape) * np.dtype(dtype or "uint8").itemsize
    if pa.types.is_fixed_size_binary(kind) and kind.byte_width != row_bytes:
        raise ValueError(
            f"shapes: rows of {column.name!r} have {kind.byte_width} bytes, and {dtype or 'uint8'} of shape "
            f"{tuple(shape)} takes {row_bytes}."
        )
    return Field(name=column.name, dtype=dtype or "uint8", shape=tuple(shape), has_nulls=column.null_count != 0)


def _shape_of(column: Column, ndim: int) -> tuple[int, ...] | None:
    """The length that all lists of a column can have, by how many values each row group has; None if they differ."""
    if DTYPE_METADATA in column.metadata:
        shape = column.metadata.get(SHAPE_METADATA)
        return None if shape is None else tuple(json.loads(shape))
    if ndim == 1 and column.list_size is not None:
        return (column.list_size,)
    if ndim > 1 or len(column.lengths) != 1:
        return None
    ((length, rest),) = column.lengths
    return None if rest or not length else (length,)


def statistics_of(columns: Sequence[Column], fields: Sequence[Field]) -> dict[str, ColumnStatistics]:
    """Nulls and bytes of the columns whose nulls are counted in footers or a log."""
    return {
        column.name: ColumnStatistics(field=field, null_count=column.null_count, num_bytes=column.num_bytes)
        for column, field in zip(columns, fields, strict=True)
        if column.null_count is not None
    }
