"""What a reader hands out of one piece of its rows: namedtuples, windows of them, or the columns that are left.

The one place where rows become Python objects, because Petastorm's interface hands out rows.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from converter.petastorm.blocks import Block, take_rows
from converter.petastorm.codecs import CompressedNdarrayCodec, NdarrayCodec
from converter.petastorm.ngram import NGram
from converter.petastorm.unischema import Unischema, UnischemaField


class Elements:
    """The elements of a piece, in order. Several threads may take from `elements` without a lock."""

    def __init__(
        self, elements: Iterator[Any], places: Iterator[Any], columns: Callable[[int], dict[Any, Any]]
    ) -> None:
        self.elements = elements
        self._places = places
        self._columns = columns

    @property
    def num_left(self) -> int:
        """Elements that were not taken yet."""
        return operator.length_hint(self._places)

    def columns(self) -> dict[Any, Any]:
        """All elements as columns, if no other thread has seen them yet."""
        return self._columns(self.num_left)

    def take_columns(self) -> dict[Any, Any] | None:
        """Take what is left, as columns, while other threads may take elements; None if nothing is left."""
        # One step of the interpreter, so that each place goes to one thread only.
        left = len(list(self._places))
        return self._columns(left) if left else None


NOTHING = Elements(iter(()), iter(()), lambda _: {})


def batches(block: Block, schema: Unischema) -> Elements:
    """One batch: the whole block."""
    listed = iter([schema.make_namedtuple(**block)] if len(next(iter(block.values()), ())) else [])
    return Elements(listed, listed, lambda _: block)


def rows(block: Block, schema: Unischema) -> Elements:
    """The rows of a block, each as a namedtuple."""
    num_rows = len(next(iter(block.values()), ()))
    first, *others = [_values_of(field, block[name]) for name, field in schema.fields.items()]
    places = iter(first)
    # One by one: a list of all of them is twice as slow, because Python's garbage collector goes through it.
    # Not strict: `take_columns` takes the rest of the places, not of the other columns.
    made = map(functools.partial(tuple.__new__, class_of(schema)), zip(places, *others, strict=False))
    return Elements(made, places, lambda left: take_rows(block, slice(num_rows - left, None)))


def windows(block: Block, schema: Unischema, ngram: NGram) -> Elements:
    """The windows of a block's rows, each as `{offset: namedtuple}`. Windows that overlap share their rows."""
    starts = ngram.starts(_as_times(block[ngram.timestamp_name]))
    base = min(ngram.fields)
    offsets = range(base, base + ngram.length)
    views = {offset: ngram.get_schema_at_timestep(schema, offset) for offset in offsets}
    made = {tuple(view.fields): _rows_of(block, view) for view in views.values()}
    steps = [(offset, made[tuple(views[offset].fields)], offset - base) for offset in offsets]

    def window(start: int) -> dict[int, Any]:
        return {offset: at_offset[start + step] for offset, at_offset, step in steps}

    def columns(left: int) -> dict[tuple[int, str], npt.NDArray[Any]]:
        own = starts[len(starts) - left :]
        return {
            (offset, name): block[name][own + offset - base] for offset, view in views.items() for name in view.fields
        }

    places = iter(starts.tolist())
    return Elements(map(window, places), places, columns)


def class_of(schema: Unischema) -> Any:
    """The class of a schema's rows."""
    return type(schema.make_namedtuple_tf(*[None] * len(schema.fields)))


def _rows_of(block: Block, schema: Unischema) -> list[Any]:
    kind = class_of(schema)
    if not schema.fields:
        # An offset between others.
        return [kind()] * len(next(iter(block.values()), ()))
    columns = [_values_of(field, block[name]) for name, field in schema.fields.items()]
    # Without the frame of a function of Python for each row, which `_make` is.
    return list(map(functools.partial(tuple.__new__, kind), zip(*columns, strict=True)))


def _values_of(field: UnischemaField, column: npt.NDArray[Any]) -> Iterable[Any]:
    """The values of a column; arrays without dimensions stay arrays, which NumPy hands out as numbers."""
    is_array = isinstance(field.codec, (NdarrayCodec, CompressedNdarrayCodec))
    if is_array and column.ndim == 1 and column.dtype != object:
        return [*map(np.asarray, column)]
    return column


def _as_times(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values if values.dtype != object or not len(values) else np.array(values.tolist())
