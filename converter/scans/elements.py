"""Which rows of lists have an element that passes a comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from converter.manifest import Manifest
from converter.places import is_list
from converter.reading.calendars import floor_times
from converter.reading.decode import decode, signed
from converter.reading.lists import list_lengths
from converter.reading.ragged import ragged_values
from converter.scans.filters import Comparison, element_type, evaluate
from converter.schema import Field


def with_flags(
    table: pa.Table, comparisons: Sequence[Sequence[Comparison]], manifest: Manifest, arrow_schema: pa.Schema
) -> pa.Table:
    """The table with a column of flags for each comparison of lists: whether one of a row's elements passes.

    Elements are compared in the type that `arrow_schema` gives them, whatever a file holds.
    """
    for comparison in (comparison for group in comparisons for comparison in group):
        if comparison.elements is not None:
            field = manifest.schema[comparison.name]
            kind = element_type(field, arrow_schema.field(comparison.name).type)
            elements, rows = _elements_of(table, field, kind, is_foreign=manifest.source_columns is not None)
            passes = evaluate(comparison.elements, pa.table({comparison.name: elements}))
            flags = np.zeros(table.num_rows, np.bool_)
            flags[rows[passes]] = True
            table = table.append_column(comparison.flag_name, pa.array(flags))
    return table


def _elements_of(
    table: pa.Table, field: Field, kind: pa.DataType, *, is_foreign: bool
) -> tuple[pa.ChunkedArray, npt.NDArray[np.int64]]:
    """The elements of a column's lists, and the row that each is in; a null list has none."""
    column = table.column(field.name)
    array = column.combine_chunks()
    rows = np.arange(len(array))
    if is_list(array.type):
        while is_list(array.type):
            rows = np.repeat(rows, list_lengths(array))
            array = array.flatten()
        array = array.storage if isinstance(array, pa.ExtensionArray) else array
        return signed(floor_times(pa.chunked_array([array])), field.name).cast(kind), rows
    stored = table.schema.field(field.name)
    decoded = decode(column, field, fill=0, stored=stored, is_foreign=is_foreign)
    if isinstance(decoded.values, pa.Array):
        ragged = ragged_values(decoded.values, field)
        numbers, sizes = ragged.values, np.diff(ragged.offsets)
    else:
        is_present = slice(None) if decoded.valid is None else decoded.valid
        numbers, rows = decoded.values[is_present].reshape(-1), rows[is_present]
        sizes = np.full(len(rows), math.prod(field.shape or ()))
    elements = pa.array(numbers)
    return pa.chunked_array([elements if elements.type == kind else elements.view(kind)]), np.repeat(rows, sizes)
