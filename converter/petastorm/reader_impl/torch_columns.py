"""Columns and rows of a reader with the types that torch has, and batches of tensors made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from converter.frameworks.torch.tensors import split_run, tensor_of_array
from converter.petastorm.reader_impl.batch_runs import blocks_of, has_columns
from converter.petastorm.reader_impl.columns import Columns, check_exact
from converter.reading.runs import Run

Array = npt.NDArray[Any]
Transform = Callable[[Any], Any]

_TEXTS = frozenset({str, np.str_, bytes, np.bytes_, Decimal})
_COLUMN_WISE = (torch.as_tensor, torch.tensor)
_WIDER = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.bool_): np.uint8}


def sanitize_types(row_as_dict: MutableMapping[Any, Any]) -> None:
    """Give arrays and booleans the types that torch has, in place: uint16 as int32, uint32 as int64, bool as uint8.

    Raises:
        TypeError: an array of text or of objects, or None; the message names the field.
    """
    for name, value in row_as_dict.items():
        row_as_dict[name] = _sanitized(name, value)


def _sanitized(name: Any, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "SUO":
            raise TypeError(
                f"Pytorch does not support arrays of string or object classes. Found in field {name}. Leave it out "
                "with schema_fields, or turn it into numbers in a TransformSpec."
            )
        wider = _WIDER.get(value.dtype)
        return value if wider is None else value.astype(wider)
    if isinstance(value, np.bool_):
        return np.uint8(value)
    if value is None:
        raise TypeError(
            f"Pytorch does not support nullable fields. Found None in {name}. Fill it in a TransformSpec, or leave "
            "such rows out with a predicate."
        )
    return value


def sanitized_block(block: Mapping[Any, Any], *, is_batched: bool) -> Columns:
    """The columns with torch's types: those of a reader of batches as arrays, others as the values of rows.

    Raises:
        TypeError: see `sanitize_types`. Rows may hold text; arrays may not.
    """
    convert = _sanitized if is_batched else _sanitized_values
    return {name: convert(name, column) for name, column in block.items()}


def _sanitized_values(name: Any, column: Array) -> Array:
    if column.ndim > 1:
        return _sanitized(name, column)  # type: ignore[no-any-return]
    if column.dtype == np.bool_:
        return column.astype(np.uint8)
    if column.dtype != object or set(map(type, column.tolist())) <= _TEXTS:
        return column
    values = np.empty(len(column), object)
    for number, value in enumerate(column):
        values[number] = _sanitized(name, value)
    return values


def sanitized_row(row: Any) -> dict[Any, Any]:
    """A row as a dict with torch's types; a window as a dict of such dicts.

    Raises:
        TypeError: see `sanitize_types`.
    """
    if isinstance(row, Mapping):
        return {offset: sanitized_row(each) for offset, each in row.items()}
    values = dict(row._asdict())
    sanitize_types(values)
    return values


def decimal_friendly_collate(batch: Sequence[Any]) -> Any:
    """Rows joined as torch's `default_collate` joins them, with decimals and texts as they are.

    >>> decimal_friendly_collate([{"price": Decimal("1.5"), "id": 1}, {"price": Decimal("2"), "id": 2}])
    {'price': [Decimal('1.5'), Decimal('2')], 'id': tensor([1, 2])}

    Raises:
        ValueError: a tensor would round whole numbers, because there are floating ones in other rows; or lists
            differ in length.
    """
    return _joined_values(None, batch)


def _joined_values(name: Any, values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, (Decimal, str, bytes)):
        return values
    if isinstance(first, Mapping):
        return {key: _joined_values(key, [row[key] for row in values]) for key in first}
    if isinstance(first, Sequence):
        lengths = sorted({*map(len, values)})
        if len(lengths) > 1:
            raise ValueError(
                f"Column {name!r} has lists of {' and '.join(map(str, lengths[:3]))} values, expected one length in a "
                "batch. Pad them in a TransformSpec, or return arrays and join them by a collate_fn."
            )
        return [_joined_values(name, each) for each in zip(*values, strict=True)]
    found = default_collate(list(values))
    if isinstance(found, torch.Tensor):
        _check_whole_numbers(name, values, found.dtype)
    return found


def _check_whole_numbers(name: Any, values: Sequence[Any], dtype: torch.dtype) -> None:
    """Raise ValueError if a tensor of this type would round whole numbers among values of several types."""
    kinds = {getattr(value, "dtype", type(value)) for value in values} if dtype.is_floating_point else set()
    if len(kinds) < 2:
        return
    wholes = [whole.reshape(-1) for value in values if (whole := _whole_numbers(value)) is not None]
    for kind in {whole.dtype for whole in wholes}:
        check_exact(name, torch.cat([whole for whole in wholes if whole.dtype == kind]), dtype)


def _whole_numbers(value: Any) -> torch.Tensor | None:
    """A value of a row as a tensor, if it is made of whole numbers."""
    if isinstance(value, torch.Tensor):
        is_whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        return value if is_whole else None
    array = np.asarray(value)
    return torch.as_tensor(array) if array.dtype.kind in "iu" else None


def _tensor_of(name: Any, column: Any) -> torch.Tensor:
    if isinstance(column, np.ndarray) and column.dtype.kind in "mM":
        raise TypeError(
            f"Pytorch does not support times. Found {column.dtype} in field {name}. Leave it out with schema_fields, "
            "or turn it into numbers in a TransformSpec, as astype('int64') does."
        )
    return tensor_of(column)


def tensor_of_rows(name: Any, column: Any) -> torch.Tensor:
    """A column's numbers as a tensor, also if they are objects because they have several types.

    Raises:
        TypeError: the column holds no numbers.
        ValueError: a tensor would round some of them.
    """
    if not _is_of_objects(column):
        return _tensor_of(name, column)
    found = _joined_values(name, column.tolist())
    return found if isinstance(found, torch.Tensor) else tensor_of(column)


def tensor_of(column: Any) -> torch.Tensor:
    """A column's numbers as a tensor in the same memory, or in its own where torch cannot use that.

    Raises:
        TypeError: the column holds no numbers.
    """
    if isinstance(column, torch.Tensor):
        return column
    return tensor_of_array(column)


def collated(run: Run) -> Iterator[dict[Any, Any]]:
    """Yield a run's batches as if `decimal_friendly_collate` had joined their rows: numbers as views of the columns."""
    columns: Columns = dict(run.columns)
    tensors = {name: _tensor_of(name, column) for name, column in columns.items() if not _is_of_objects(column)}
    batches: Iterable[Mapping[Any, Any]] = split_run(tensors, run.batch_size) if tensors else _nothing(run)
    if len(tensors) == len(columns):
        for batch in batches:
            yield nested(batch)
        return
    for number, batch in enumerate(batches):
        rows = slice(number * run.batch_size, (number + 1) * run.batch_size)
        yield nested(
            {
                name: batch[name] if name in batch else _joined_values(name, column[rows].tolist())
                for name, column in columns.items()
            }
        )


def _is_of_objects(column: Any) -> bool:
    return isinstance(column, np.ndarray) and column.dtype.kind in "OSU"


def _nothing(run: Run) -> Iterator[dict[Any, Any]]:
    return ({} for _ in range(0, run.num_rows, run.batch_size))


def nested(columns: Mapping[Any, Any]) -> dict[Any, Any]:
    """Columns of windows, by offset and then by name; others as they are."""
    if not columns or not isinstance(next(iter(columns)), tuple):
        return dict(columns)
    by_offset: dict[Any, dict[Any, Any]] = {}
    for (offset, name), column in columns.items():
        by_offset.setdefault(offset, {})[name] = column
    return by_offset


def row_dicts(columns: Mapping[Any, Any]) -> list[dict[Any, Any]]:
    """The rows as dicts, for a user's function that takes rows."""
    names = list(columns)
    rows = (dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True))
    return [nested(row) for row in rows] if isinstance(names[0], tuple) else list(rows)


def tensor_blocks(reader: Any, transform: Transform, most_rows: int) -> Iterator[Columns]:
    """The rows of a reader as columns that torch takes: tensors, or arrays if `transform` is `torch.as_tensor` alone.

    A user's function is called as Petastorm calls it: for each column of a row group, or, if the reader hands out rows,
    for a list of each single value. `most_rows` rows of a reader without columns are joined.

    Raises:
        TypeError: a field has no form as a tensor, see `sanitize_types`.
        ValueError, RuntimeError: torch makes no tensor of a row's value, or rows differ in shape.
    """
    is_batched = bool(getattr(reader, "batched_output", False))
    is_column_wise = getattr(transform, "func", transform) in _COLUMN_WISE
    for block in _sanitized_blocks(reader, most_rows, is_batched=is_batched):
        if not is_batched and not is_column_wise:
            yield {name: _each_transformed(name, column, transform) for name, column in block.items()}
        elif transform is torch.as_tensor:
            yield {name: _numbers(name, column) for name, column in block.items()}
        else:
            yield {name: torch.as_tensor(transform(_numbers(name, column))) for name, column in block.items()}


def _sanitized_blocks(reader: Any, most_rows: int, *, is_batched: bool) -> Iterator[Columns]:
    if has_columns(reader):
        for block in blocks_of(reader):
            yield sanitized_block(block, is_batched=is_batched)
        return
    rows: list[Mapping[Any, Any]] = []
    for row in reader:
        rows.append(sanitized_row(row))
        if len(rows) == most_rows:
            yield _joined(rows)
            rows = []
    if rows:
        yield _joined(rows)


def _joined(rows: Sequence[Mapping[Any, Any]]) -> Columns:
    """Rows as columns of objects."""
    columns: Columns = {}
    for name in rows[0]:
        columns[name] = np.empty(len(rows), object)
        for number, row in enumerate(rows):
            columns[name][number] = row[name]
    return columns


def _numbers(name: Any, column: Array) -> Array:
    """A column as an array that torch takes; what it refuses raises torch's own error."""
    if column.dtype != object:
        return _tensor_of(name, column).numpy()
    values = column.tolist()
    if all(isinstance(value, np.ndarray) for value in values):
        joined = torch.stack([tensor_of(value) for value in values])
    else:
        joined = torch.as_tensor(values)
    _check_whole_numbers(name, values, joined.dtype)
    return joined.numpy()


def _each_transformed(name: Any, column: Array, transform: Transform) -> torch.Tensor:
    made = [torch.as_tensor(transform([value])) for value in column]
    joined = torch.cat(made)
    _check_whole_numbers(name, made, joined.dtype)
    return joined
