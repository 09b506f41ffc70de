"""The rows of a converter as a Spark DataFrame, with the numbers that loaders give them: for predictions.

Executors read the row groups with this package and its readers, so any store and any view works that a loader reads.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from converter.arguments import check_integer
from converter.errors import SourceError, UnsupportedTypeError
from converter.loading.names import resolve_names
from converter.manifest import Manifest
from converter.pickled import Stamp
from converter.reading.data_files import DataFiles
from converter.reading.decode import decode
from converter.reading.ragged import ragged_values
from converter.scans.columns import read_columns
from converter.schema import Field
from converter.storage.directory import Storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_BATCH_ROWS = 1 << 14
_PARTITION_BYTES = 64 << 20
_LEAST_PARTITIONS = 8

_DDL: Mapping[pa.DataType, str] = {
    pa.bool_(): "boolean", pa.int8(): "tinyint", pa.int16(): "smallint", pa.int32(): "int", pa.int64(): "bigint",
    pa.float32(): "float", pa.float64(): "double", pa.string(): "string", pa.binary(): "binary", pa.date32(): "date",
    pa.timestamp("us", "UTC"): "timestamp", pa.timestamp("us"): "timestamp_ntz",
}  # fmt: skip
_CASTS: Mapping[pa.DataType, pa.DataType] = {
    pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.uint64(): pa.decimal128(20),
    pa.float16(): pa.float32(), pa.large_string(): pa.string(), pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(), pa.binary_view(): pa.binary(), pa.date64(): pa.date32(),
}  # fmt: skip
"""Types that Spark does not have, and the ones that hold their values."""


def rows_in_spark(
    storage: Storage,
    manifest: Manifest,
    spark: Any,
    *,
    columns: Sequence[str] | None,
    with_row_index: str | None,
    partitions: int | None,
) -> DataFrame:
    """What `DatasetConverter.to_spark` returns.

    Raises:
        SourceError: the elements of this converter are no rows of its files, each once.
        ValueError, TypeError: an argument is wrong; the message names it.
    """
    if manifest.sequences is not None or manifest.draws is not None:
        raise SourceError(
            "to_spark: the elements of this converter are sequences, or rows that come several times. Call it on the "
            "converter that they were made of; with_row_index gives both the same numbers."
        )
    # Before anything is made of the bytes and numbers in the files.
    stored = replace(manifest, decoders={}, scales={}, float_dtype="float64")
    names, _ = resolve_names(stored, columns, None)
    if with_row_index is not None and (not isinstance(with_row_index, str) or with_row_index in names):
        raise ValueError(f"with_row_index must be a name that no column has, got {with_row_index!r:.80}.")
    types = {name: _spark_type(manifest, manifest.schema[name]) for name in names}
    if with_row_index is not None:
        types[with_row_index] = pa.int64()
    wanted = np.flatnonzero(manifest.live_rows > 0)
    num_bytes = int(manifest.row_group_bytes[wanted].sum())
    count = max(_LEAST_PARTITIONS, -(-num_bytes // _PARTITION_BYTES))
    if partitions is not None:
        count = check_integer("partitions", partitions, least=1)
    work = pickle.dumps((Stamp(), storage, stored, list(names), with_row_index, pa.schema(types), wanted))
    ddl = ", ".join(f"`{name.replace('`', '``')}` {_ddl_of(kind)}" for name, kind in types.items())
    numbers = spark.range(0, len(wanted), 1, max(1, min(count, len(wanted))))
    found: DataFrame = numbers.mapInArrow(_make_reader(work, storage.options), ddl)
    return found


def _make_reader(work: bytes, options: Mapping[str, Any]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """The function for `mapInArrow`; it is pickled by value, so that an executor without this package says so."""

    def read_rows(batches: Iterator[Any]) -> Iterator[Any]:
        try:
            from converter.to_spark import read_row_groups
        except ImportError as error:
            import sys

            raise RuntimeError(
                f"to_spark needs spark-tensor-converter in the executors' Python, and {sys.executable} has none "
                f"({error}). Install it there, in the version of the driver."
            ) from error
        for batch in batches:
            yield from read_row_groups(work, options, batch.column(0).to_pylist())

    return read_rows


def read_row_groups(work: bytes, options: Mapping[str, Any], numbers: Sequence[int]) -> Iterator[pa.RecordBatch]:
    """Yield the live rows of some row groups; `numbers` count those that have any."""
    _, storage, manifest, names, row_index, schema, wanted = pickle.loads(work)  # noqa: S301 (it came with the task)  # nosec B301
    storage.lend(options)
    fields = [manifest.schema[name] for name in names]
    files = DataFiles(storage, manifest, fields)
    starts = np.cumsum(manifest.row_group_rows) - manifest.row_group_rows
    for row_group in wanted[numbers].tolist():
        table = read_columns(files, row_group)
        arrays = [table.column(field.name) for field in fields]
        if manifest.source_columns is None:
            # A user's own bytes stay bytes, whatever was declared of them.
            arrays = [
                _unpacked(column, field, table.schema.field(field.name))
                for column, field in zip(arrays, fields, strict=True)
            ]
        rows = starts[row_group] + np.arange(int(manifest.row_group_rows[row_group]))
        if row_index is not None:
            arrays.append(pa.chunked_array([pa.array(rows)]))
        cast = [_cast(array, kind) for array, kind in zip(arrays, schema.types, strict=True)]
        found = pa.table(cast, schema=schema)
        if manifest.selection is not None:
            found = found.filter(pa.array(manifest.selection.mask(row_group, len(rows))))
        yield from found.combine_chunks().to_batches(_BATCH_ROWS)


def _unpacked(column: pa.ChunkedArray, field: Field, stored: pa.Field) -> pa.ChunkedArray:
    """A column of a cache's arrays, which stand there as bytes, as lists; others as they are."""
    kind = column.type
    is_bytes = pa.types.is_fixed_size_binary(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    if not is_bytes or field.is_object:
        return column
    decoded = decode(column, field, fill=0, stored=stored)
    if isinstance(decoded.values, pa.Array):
        rows = ragged_values(decoded.values, field)
        values, lengths = pa.array(rows.values), rows.level_lengths()
    else:
        values, lengths = pa.array(np.ascontiguousarray(decoded.values).reshape(-1)), []
        count = len(decoded.values)
        for size in field.shape or ():
            lengths.append(np.full(count, size))
            count *= size
    lists: Any = values
    for depth, sizes in reversed(list(enumerate(lengths))):
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes))).astype(np.int32)
        # Arrow takes nulls of lists from those of their offsets.
        mask = None if depth or decoded.valid is None else pa.array(~decoded.valid)
        lists = pa.ListArray.from_arrays(pa.array(offsets), lists, mask=mask)
    return pa.chunked_array([lists])


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """The column in the type that Spark gets."""
    if pa.types.is_timestamp(kind) and not pa.types.is_timestamp(column.type) and column.type != pa.date32():
        column = column.cast(pa.int64())
    # Times finer than Spark's are cut, as a loader cuts them.
    is_time = pa.types.is_timestamp(kind) or pa.types.is_time(column.type) or pa.types.is_duration(column.type)
    return pc.cast(column, kind, safe=not is_time)


def _spark_type(manifest: Manifest, field: Field) -> pa.DataType:
    """The Arrow type of a column in Spark."""
    if manifest.source_columns is not None:
        return _plain(manifest.source_columns[field.name].arrow_type, field.name)
    categories = manifest.categories.get(field.name)
    dtype = field.dtype if categories is None else categories.kind
    objects = {"str": pa.string(), "bytes": pa.binary(), "datetime64[D]": pa.date32()}
    objects["datetime64[us]"] = pa.timestamp("us", None if field.has_no_zone else "UTC")
    kind = objects.get(dtype) or _plain(pa.from_numpy_dtype(np.dtype(dtype)), field.name)
    for _ in range(field.ndim):
        kind = pa.list_(kind)
    return kind


def _plain(kind: pa.DataType, name: str) -> pa.DataType:
    """A type that Spark has for the values of a type of Arrow."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type, name)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain(kind.value_type, name))
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_time(kind) or pa.types.is_duration(kind):
        return pa.int64()
    found = _CASTS.get(kind, kind)
    if found not in _DDL and not pa.types.is_decimal128(found):
        raise UnsupportedTypeError(
            f"to_spark: column {name!r} is {kind}, for which Spark has no type. Leave it out with columns=….",
            column=name,
        )
    return found


def _ddl_of(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"array<{_ddl_of(kind.value_type)}>"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    return _DDL[kind]
