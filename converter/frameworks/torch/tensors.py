"""Batches as torch tensors: made from NumPy's memory, split from runs, and copied to their device.

A run is split into batches, not sliced: 2.0 µs per tensor instead of 3.3. `unsafe_split` gives each batch its own
version counter, so that a write into one does not break the backward pass of another.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from converter.errors import ConverterError, SourceError
from converter.loading.batches import times_as_integers
from converter.loading.epochs import as_generator
from converter.reading.meter import Meter
from converter.reading.objects import as_lists
from converter.reading.ragged import ragged_values
from converter.reading.runs import LENGTH_SUFFIX, Run
from converter.reading.source import INNER_LENGTH_SUFFIX, BatchSource
from converter.schema import Field

logger = logging.getLogger(__name__)

_TENSORS_AT_ONCE = 512
"""Below the 700 new objects that start Python's garbage collector."""

_OWN_MEMORIES = 32
"""Up to so many columns each have a memory of their own on their way from a worker process."""

Batch = dict[str, Any]
"""A batch: tensors, and lists for strings and bytes."""


class Placement:
    """Where batches are to be: in page-locked memory or on a device, copied ahead of use."""

    def __init__(self, device: Any, pin_memory: bool | None) -> None:
        self.device = None if device is None else _device(device)
        self._is_cuda = self.device is not None and self.device.type == "cuda"
        self.pins = self._is_cuda if pin_memory is None else pin_memory
        if self.pins and not torch.cuda.is_available():
            logger.info("pin_memory has no effect: there is no CUDA device on this machine.")
            self.pins = False
        self._stream: Any = None

    @property
    def is_needed(self) -> bool:
        """Whether batches must be touched at all."""
        return self.pins or (self.device is not None and self.device.type != "cpu")

    def place(self, items: Iterator[Any], meter: Meter) -> Iterator[Any]:
        """Yield the items with their tensors in place. The next item is copied while one is used."""
        if not self.is_needed:
            yield from items
            return
        ahead: tuple[Any, Any] | None = None
        with contextlib.closing(as_generator(items)) as source:
            for item in source:
                began = time.perf_counter()
                begun = self._begin(item)
                meter.add("copy", began, time.perf_counter())
                if ahead is not None:
                    yield self._finish(*ahead)
                ahead = begun
        if ahead is not None:
            yield self._finish(*ahead)

    def _begin(self, item: Any) -> tuple[Any, Any]:
        if not self._is_cuda:
            return _map_tensors(item, self._move), None
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            placed = _map_tensors(item, self._move)
            return placed, self._stream.record_event()

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        # A jagged tensor consists of several and cannot be pinned.
        pinned = tensor.pin_memory() if self.pins and not tensor.is_nested else tensor
        return pinned if self.device is None else pinned.to(self.device, non_blocking=True)

    def _finish(self, placed: Any, copied: Any) -> Any:
        if copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            # The memory belongs to another stream, which must not reuse it before this stream is done with it.
            _map_tensors(placed, lambda tensor: tensor.record_stream(current))
        return placed


def _device(device: Any) -> torch.device:
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        cause = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"device must be a torch device, e.g. 'cuda' or 'cpu', got {device!r:.80} ({cause})."
        ) from error
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device={device!r}: this machine has no CUDA device that torch can use. Leave it out, or pass 'cpu'."
        )
    return parsed


def _map_tensors(item: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """An item with `function` applied to its tensors: a batch, or a tuple of a run's columns and the run."""
    if isinstance(item, tuple):
        return (_map_tensors(item[0], function), *item[1:])
    return {name: function(value) if isinstance(value, torch.Tensor) else value for name, value in item.items()}


def make_tensors(batch: Mapping[str, Any]) -> Batch:
    """A batch of NumPy arrays as tensors; strings and bytes as lists.

    Raises:
        TypeError: torch has no such dtype.
    """
    tensors = {}
    for name, column in batch.items():
        try:
            tensors[name] = _tensor(column)
        except TypeError as error:
            raise TypeError(
                f"Column {name!r} of the transform's batch has the dtype {column.dtype}, which torch's tensors lack. "
                "Convert it to numbers, e.g. with astype('float32')."
            ) from error
    return tensors


def _has_numbers(cells: np.ndarray[Any, Any]) -> bool | None:
    """Whether the arrays inside of an array of objects are of numbers, told by the first one; None if there is none."""
    for cell in cells:
        if not isinstance(cell, np.ndarray) or cell.dtype.kind != "O":
            return isinstance(cell, np.ndarray)
        if (found := _has_numbers(cell)) is not None:
            return found
    return None


def _tensor(column: np.ndarray[Any, Any]) -> Any:
    if column.dtype.kind in "OSU":
        is_lists = len(column) > 0 and isinstance(column[0], np.ndarray) and _has_numbers(column) is not True
        return as_lists(column) if is_lists else column.tolist()
    if column.dtype.kind == "M":
        column = times_as_integers(column)
    # torch does not take the other byte order.
    return tensor_of_array(column.astype(column.dtype.newbyteorder("="), copy=False))


def tensor_of_array(array: Any) -> torch.Tensor:
    """An array's numbers as a tensor in the same memory, or in its own where torch cannot use that.

    Raises:
        TypeError: torch has no such dtype.
    """
    array = np.require(array, requirements=["C", "W"])
    # To NumPy the stride of an axis of length 1 means nothing; torch refuses some.
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)


def whole_run(run: Run) -> Batch:
    """A run's columns as tensors that share their memory."""
    return {name: torch.from_numpy(column) for name, column in run.columns.items()}


def split_run(columns: Batch, batch_size: int) -> Iterator[Batch]:
    """Yield a run's batches, splitting a few hundred tensors at a time.

    Thousands at once would start Python's garbage collector: 90 of 140 ms in an epoch of 2 M rows and 41 columns.
    """
    names = list(columns)
    # A size of the user's may be more than torch's integers hold.
    batch_size = min(batch_size, max(1, *map(len, columns.values())))
    step = batch_size * max(1, _TENSORS_AT_ONCE // len(names))
    for few in zip(*(column.unsafe_split(step) for column in columns.values()), strict=True):
        parts = [column.unsafe_split(batch_size) for column in few]
        for batch in zip(*parts, strict=True):
            yield dict(zip(names, batch, strict=True))


def torch_batches(source: BatchSource, run: Run) -> Iterator[Batch]:
    """Yield a run's batches as tensors."""
    arrays = {
        name: column
        for name, column in run.columns.items()
        if isinstance(column, np.ndarray) and column.dtype != object
    }
    batches = split_run({name: torch.from_numpy(column) for name, column in arrays.items()}, run.batch_size)
    if len(arrays) == len(run.columns):
        yield from batches
        return
    if not arrays:
        batches = ({} for _ in range(0, run.num_rows, run.batch_size))
    for number, numbers in enumerate(batches):
        rows = slice(number * run.batch_size, (number + 1) * run.batch_size)
        batch: Batch = {}
        for name, column in run.columns.items():
            if name in numbers:
                batch[name] = numbers[name]
                continue
            part: Any = column[rows]
            if isinstance(part, np.ndarray):
                # Texts of sequences.
                batch[name] = part.tolist()
                continue
            field = source.field_of(name)
            assert field is not None
            if source.is_lists_of_objects(name):
                batch |= _lists(source, field, part)
            else:
                batch |= {name: part.to_pylist()} if field.is_object else _ragged(source, field, part)
        yield batch


def _lists(source: BatchSource, field: Field, part: Any) -> Batch:
    """Lists of texts or bytes, or their mask: as Python's lists, or padded, where the mask and lengths are tensors."""
    if source.ragged == "pad":
        return make_tensors(source.padded(field.name, ragged_values(part, field)))
    if field.is_object:
        # Arrow makes the lists and the texts in one go: 0.21 against 0.5 µs for a row of five texts.
        return {field.name: part.to_pylist()}
    return {field.name: ragged_values(part, field).to_lists()}


def _ragged(source: BatchSource, field: Field, part: Any) -> dict[str, torch.Tensor]:
    rows = ragged_values(part, field)
    if source.ragged == "pad":
        return {name: torch.from_numpy(column) for name, column in source.padded(field.name, rows).items()}
    # Rows of a jagged tensor may differ in their first dimension only; one that is 0 there has no others.
    has_parts = rows.shapes[:, 0] > 0
    sizes = rows.shapes[has_parts, 1:]
    if (len(sizes) and (sizes != sizes[0]).any()) or not rows.is_block[has_parts].all():
        added = repr(field.name + LENGTH_SUFFIX)
        added += f" and {field.name + INNER_LENGTH_SUFFIX!r}" if field.is_jagged else ""
        raise SourceError(
            f"Column {field.name!r} has rows that differ in more than their first dimension, which torch's nested "
            f"tensors cannot hold. Pass ragged='pad' (adds {added}).",
            column=field.name,
        )
    inner = sizes[0].tolist() if len(sizes) else [1] * (field.ndim - 1)
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(rows.shapes[:, 0])))
    # Counted, because rows of empty lists have parts, but no values.
    values = torch.from_numpy(rows.values.reshape(int(offsets[-1]), *inner))
    return {field.name: torch.nested.nested_tensor_from_jagged(values, torch.from_numpy(offsets))}


def in_few_memories(batches: list[Batch]) -> list[Batch]:
    """The same batches for another process: tensors in shared memory, one for each column, of many for each dtype.

    A memory on its way to another process is an open file, and a process may have 1,024 of them. It is made here, where
    an error is told: what torch cannot send later is lost, and the trainer would wait for it. A tensor that is kept
    keeps its memory, and `torch.save` refuses tensors of two dtypes in one.

    Raises:
        ConverterError: there is too little shared memory, or no file may be opened for it.
    """
    parts = [(name, part) for batch in batches for name, value in batch.items() for part in _plain_parts(value)]
    if not parts or not all(hasattr(torch.UntypedStorage, name) for name in ("_new_shared", "_cdata")):
        return batches
    has_few_columns = len({name for name, _ in parts}) <= _OWN_MEMORIES

    def group_of(name: str, part: Any) -> tuple[str, torch.dtype]:
        return name if has_few_columns else "", part.dtype

    # By object, not by address: an array that a transform gives in each batch is one of its own for each.
    memories: dict[tuple[str, torch.dtype], dict[int, Any]] = {}
    for name, part in parts:
        memories.setdefault(group_of(name, part), {})[_memory_of(part)] = part.untyped_storage()
    places = {group: _shared_memory(of_group) for group, of_group in memories.items()}

    def moved(name: str, part: Any) -> Any:
        shared, starts = places[group_of(name, part)]
        start = starts[_memory_of(part)] // part.element_size() + part.storage_offset()
        return torch.empty(0, dtype=part.dtype).set_(shared, start, part.shape, part.stride())

    def sent(name: str, value: Any) -> Any:
        parts = [moved(name, part) for part in _plain_parts(value)]
        if len(parts) < 2:
            return parts[0] if parts else value
        return torch.nested.nested_tensor_from_jagged(*parts)

    return [{name: sent(name, value) for name, value in batch.items()} for batch in batches]


def _shared_memory(memories: Mapping[int, Any]) -> tuple[Any, dict[int, int]]:
    """A shared memory with copies of others, and at which byte each of them begins.

    Reaches into: torch.UntypedStorage._new_shared (torch 2.4 to 2.15).
    Without it: wide tables, and containers with little shared memory, need num_workers=0.
    """
    # Each begins where torch would let it begin.
    ends = np.cumsum([0, *(-(-memory.nbytes() // 64) * 64 for memory in memories.values())])
    starts = dict(zip(memories, ends.tolist(), strict=False))
    try:
        shared: Any = torch.UntypedStorage._new_shared(int(ends[-1]), device="cpu")  # type: ignore[no-untyped-call]  # noqa: SLF001
    except RuntimeError as error:
        raise ConverterError(
            f"A worker process cannot send {int(ends[-1]):,} bytes of batches, for there is too little shared memory "
            f"(/dev/shm), or too many files are open: {error}. Pass num_workers=0, which reads in threads, or a "
            "smaller shuffle_window_rows; or raise Docker's --shm-size or ulimit -n."
        ) from error
    for place, memory in memories.items():
        shared[starts[place] : starts[place] + memory.nbytes()].copy_(memory)
    return shared, starts


def _plain_parts(value: Any) -> tuple[Any, ...]:
    """The tensor, a nested one's values and offsets, or nothing of what is no tensor."""
    if not isinstance(value, torch.Tensor):
        return ()
    tensor: Any = value
    return (tensor.values(), tensor.offsets()) if tensor.is_nested else (tensor,)


def _memory_of(tensor: Any) -> int:
    """What is equal for tensors that are parts of one memory.

    Reaches into: torch.UntypedStorage._cdata (torch 2.4 to 2.15).
    Without it: as without _new_shared.
    """
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def identity(item: Any) -> Any:
    """The item itself, for a loader that has nothing to collate."""
    return item
