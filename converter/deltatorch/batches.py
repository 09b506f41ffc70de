"""Rows become batches as torch's default collate makes them, several batches at a time.

A chunk is what workers send: the sizes of some batches, and for each key all of their rows in one tensor (or list), so
that a chunk costs a few messages and not a few for each batch. It consists of plain tuples, lists and dicts, which
torch's thread that pins memory knows.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from converter.deltatorch.fields import FieldSpec, decode_and_transform_record
from converter.deltatorch.recipes import Recipe
from converter.deltatorch.rows import Part
from converter.deltatorch.values import Values

Batch = Any
"""A dict of tensors and lists; with a user's `collate_fn`, what that returns."""

Chunk = tuple[list[int], Any]
"""The sizes of batches, and their columns by key as `(kind, values)`; without sizes a list of ready batches."""

_ROWS, _LISTS, _READY = "rows", "lists", "ready"
"""Kinds: rows of a tensor or list; a tensor of lists, each element of which is a tensor; a list of ready values."""


class ByColumn:
    """Makes chunks column by column; calls the user's functions row by row."""

    def __init__(self, recipe: Recipe, values: Values) -> None:
        self._recipe, self._values = recipe, values

    @property
    def has_functions(self) -> bool:
        """Whether something is called for each row."""
        return self._recipe.has_functions

    def chunk(self, part: Part, sizes: list[int]) -> Chunk:
        """The batches of a part, which have these sizes."""
        computed = self._compute(part)
        columns: dict[str, Any] = {}
        shared: set[str] = set()
        for key, number in self._recipe.keys.items():
            node = self._recipe.nodes[number]
            if node.functions:
                columns[key] = collate(computed[number], sizes)
            elif node.shape is not None:
                columns[key] = _of_numbers(self._values.numbers(part, node.column, node.shape), sizes)
            else:
                columns[key] = self._of_column(part, node.column, sizes)
            kind, values = columns[key]
            if node.column in shared and isinstance(values, torch.Tensor):
                # A write into one key must not change another.
                columns[key] = kind, values.clone()
            if node.column:
                shared.add(node.column)
        return sizes, columns

    def _compute(self, part: Part) -> dict[int, list[Any]]:
        """The values of all nodes that functions make, row after row as DeltaTorch would call them."""
        nodes = self._recipe.nodes
        called = [number for number, node in enumerate(nodes) if node.functions]
        inputs = {node.parent: None for node in nodes if node.functions and node.parent not in called}
        given = {number: self._given(part, number) for number in inputs}
        if len(called) == 1:
            # Most often: a loop of its own costs least.
            (number,) = called
            found = given[nodes[number].parent]
            for function in nodes[number].functions:
                found = [function(value) for value in found]
            return {number: list(found)}
        made: dict[int, list[Any]] = {number: [] for number in called}
        for values in zip(*given.values(), strict=True):
            row = dict(zip(given, values, strict=True))
            for number in called:
                value = row[nodes[number].parent]
                for function in nodes[number].functions:
                    value = function(value)
                row[number] = value
                made[number].append(value)
        return made

    def _given(self, part: Part, number: int) -> Sequence[Any]:
        node = self._recipe.nodes[number]
        if node.shape is None:
            return self._values.objects(part, node.column)
        numbers = self._values.numbers(part, node.column, node.shape)
        # A function may write into what it gets, which others would see: the bytes may be the table's own.
        return list(numbers.copy()) if isinstance(numbers, np.ndarray) else numbers

    def _of_column(self, part: Part, name: str, sizes: list[int]) -> tuple[str, Any]:
        """A column that no field changes, in the dtypes that Python's numbers get."""
        field, column = self._values.field(name), part.columns[name]
        self._values.check_no_nulls(part, name)
        if field.is_object and field.shape == ():
            return _ROWS, self._values.objects(part, name)
        if isinstance(column, np.ndarray) and not field.has_null_elements:
            return (_ROWS if column.ndim == 1 else _LISTS), torch.from_numpy(_widened(column))
        return collate(self._values.objects(part, name), sizes)


class ByRecord:
    """Makes a dict of each row, for a user's function of whole rows or of a list of them."""

    def __init__(self, fields: Sequence[FieldSpec], values: Values, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._fields, self._values, self._collate = tuple(fields), values, collate_fn

    has_functions = True

    def chunk(self, part: Part, sizes: list[int]) -> Chunk:
        """The batches of a part, which have these sizes."""
        records = self.records(part)
        return [], [self._collate(list(itertools.islice(records, size))) for size in sizes]

    def records(self, part: Part) -> Iterator[Any]:
        """Yield the rows, transformed when they are asked for."""
        names = list(dict.fromkeys(spec.name for spec in self._fields))
        columns = [self._values.objects(part, name) for name in names]
        for row in zip(*columns, strict=True):
            yield decode_and_transform_record(dict(zip(names, row, strict=True)), self._fields)


def cut(chunk: Chunk) -> Iterator[Batch]:
    """Yield the batches of a chunk."""
    sizes, columns = chunk
    if not sizes:
        yield from columns
        return
    names = list(columns)
    parts = (_CUTS[kind](values, sizes) for kind, values in columns.values())
    for batch in zip(*parts, strict=True):
        yield dict(zip(names, batch, strict=True))


def collate(values: Sequence[Any], sizes: list[int]) -> tuple[str, Any]:
    """Values of some batches as torch's default collate makes them: at once if all are alike, else batch by batch."""
    kinds = set(map(type, values))
    block = _BLOCKS.get(kinds.pop(), _no_block)(values) if len(kinds) == 1 else None
    if block is not None:
        return _ROWS, block
    ends = list(itertools.accumulate(sizes))
    return _READY, [default_collate(list(values[end - size : end])) for size, end in zip(sizes, ends, strict=True)]


def _no_block(values: Sequence[Any]) -> Any:
    """None, for values of other kinds."""
    del values


def _block_of_tensors(values: Sequence[Any]) -> Any:
    """Tensors of one dtype and shape in one; None if they differ."""
    if len({value.dtype for value in values}) > 1 or values[0].layout != torch.strided:
        return None
    # Looking at all shapes would take a third of the time of putting them together.
    with contextlib.suppress(RuntimeError):
        return default_collate(list(values))
    return None


def _block_of_arrays(values: Sequence[Any]) -> Any:
    """Arrays of numbers, of one dtype and shape, in one tensor; None if they differ or hold no numbers."""
    first = values[0]
    if not first.ndim or not first.size or first.dtype.kind not in "biuf":
        return None
    if len({value.shape for value in values}) > 1 or len({value.dtype for value in values}) > 1:
        return None
    # As numpy.stack, without a view of each.
    return torch.from_numpy(np.concatenate(values).reshape(len(values), *first.shape))


_BLOCKS: dict[type, Callable[[Sequence[Any]], Any]] = {
    torch.Tensor: _block_of_tensors,
    np.ndarray: _block_of_arrays,
    **dict.fromkeys((bool, int, float), lambda values: default_collate(list(values))),
    **dict.fromkeys((str, bytes), list),
}
"""How rows of some batches become one block, by their type."""


def _of_numbers(numbers: Any, sizes: list[int]) -> tuple[str, Any]:
    return (_ROWS, torch.from_numpy(numbers)) if isinstance(numbers, np.ndarray) else collate(numbers, sizes)


def _widened(column: Any) -> Any:
    """Numbers in the dtype that torch gives Python's; dates and times are whole numbers."""
    if column.dtype.kind in "iu":
        return column.astype(np.int64, copy=False)
    return column.astype(np.float64, copy=False) if column.dtype.kind == "f" else column


def _cut_rows(values: Any, sizes: list[int]) -> Iterator[Any]:
    if isinstance(values, torch.Tensor):
        # Each with a version counter of its own, so that a write into one does not break the backward pass of another.
        yield from values.unsafe_split_with_sizes(sizes)
        return
    start = 0
    for size in sizes:
        yield values[start : start + size]
        start += size


def _cut_lists(values: torch.Tensor, sizes: list[int]) -> Iterator[Any]:
    for batch in _cut_rows(values, sizes):
        yield _unbound(batch.permute(*range(1, batch.ndim), 0).contiguous())


def _unbound(tensor: torch.Tensor) -> Any:
    """Nested lists of the last dimension's tensors."""
    return tensor if tensor.ndim == 1 else [_unbound(part) for part in tensor.unbind(0)]


_CUTS: dict[str, Callable[[Any, list[int]], Iterator[Any]]] = {
    _ROWS: _cut_rows, _LISTS: _cut_lists, _READY: lambda values, _: iter(values),
}  # fmt: skip
