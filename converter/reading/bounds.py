"""Predicts how many bytes reading takes: the columns of an epoch, and the peak memory."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from converter.manifest import Manifest
from converter.memory import SPARE
from converter.plan import EpochPlan
from converter.reading.decoding import decoded_bytes_ahead
from converter.reading.gather import WIDE_BYTES
from converter.reading.source import BatchSource
from converter.storage.ranges import FREE_GAP_BYTES

CUT_BYTES = 8 << 20
"""How many bytes of sequences are cut together: a few batches."""

_BASE_BYTES = 64 << 20
"""Threads, their allocators and a file's footer, whatever the data: measured 20 to 45 MB."""

MAX_OPEN_FILES = 256
"""How many files are open at once."""

_METADATA_CHUNK_BYTES, _SCHEMA_COLUMN_BYTES = 1536, 288
"""Of a column chunk in Arrow's form of a footer (945 bytes in a footer of eight row groups, some 1,500 in one of a
single row group), and of a column in an open file's schema."""

_BASE_CHUNKS, _MOST_CHUNKS = 1 << 14, 1 << 17
"""Of a thousand columns in many files they would be gigabytes. Parsing one anew takes 1.3 µs: ten columns of a
thousand, in row groups of 20,000 rows, are read in half of the time if all are kept."""

_VARIABLE_COPIES, _PLAIN_COPIES = 3, 2
"""Copies of a window while it is read, beside the result: of strings and ragged rows, and of plain numbers.

Windows of 46 MiB of text took 294 MiB of Arrow's pool, with two threads.
"""

_INDEX_BYTES = 3 * 8
"""For each row of a permuted window: the random number, its place, and the place taken."""


def most_metadata_chunks(manifest: Manifest) -> int:
    """How many column chunks of the footers of open files are kept as Arrow has them."""
    return min(max(manifest.num_row_groups * len(manifest.schema), _BASE_CHUNKS), _MOST_CHUNKS)


def bytes_decoded(source: BatchSource, num_rows: int) -> int:
    """Bytes of the wanted columns in `num_rows` rows, as the files have them."""
    manifest = source.manifest
    stacked = {name: np.dtype(stack.dtype).itemsize for stack in source.stacks for name in stack.columns}
    num_bytes = 0.0
    for field in source.stored_fields:
        statistics = manifest.statistics.get(field.name)
        if field.shape is not None and source.has_element_mask(field.name):
            num_bytes += num_rows * math.prod(field.shape)
        if field.has_nulls and source.nulls == "mask":
            num_bytes += num_rows
        if field.shape is not None and not field.is_object:
            itemsize = max(field.stored_dtype.itemsize, stacked.get(field.name, 0))
            num_bytes += num_rows * itemsize * math.prod(field.shape)
        elif statistics is not None and statistics.num_bytes is not None:
            num_bytes += statistics.num_bytes * num_rows / manifest.num_rows
        else:
            num_bytes += int(manifest.row_group_bytes.sum()) * num_rows / manifest.num_rows
    if source.row_index is not None:
        num_bytes += num_rows * 8
    return int(num_bytes)


def element_bytes(source: BatchSource) -> int:
    """Bytes of one row or sequence; of texts and ragged rows only their references."""
    num_bytes = 0
    stacks = {stack.name: stack for stack in source.stacks}
    for name in source.names:
        steps = 1 if source.sequences is None else len(source.sequences.steps_of(source.steps_name(name)))
        if name in stacks:
            num_bytes += steps * len(stacks[name].columns) * np.dtype(stacks[name].dtype).itemsize
        else:
            field = source.schema[name]
            itemsize = 8 if field.is_object else field.stored_dtype.itemsize
            num_bytes += steps * itemsize * math.prod(field.shape or ())
    return num_bytes


def mixed_element_bytes(source: BatchSource) -> int:
    """Bytes of one row or sequence of a mixture, with its texts and ragged rows."""
    return element_bytes(source) + max(map(_variable_bytes, source.parts))


def _variable_bytes(part: BatchSource) -> int:
    if not any(field.is_object or field.shape is None for field in part.stored_fields):
        return 0
    steps = 1 if part.sequences is None else max(len(part.sequences.steps_of(name)) for name in part.schema.names)
    return steps * math.ceil(bytes_decoded(part, part.manifest.num_rows) / part.manifest.num_rows)


def is_wide(source: BatchSource) -> bool:
    """Whether a row is so wide that it is copied on its own."""
    return element_bytes(source) >= WIDE_BYTES


def mixed_bytes(source: BatchSource) -> int:
    """How many bytes of a mixture are interleaved together; wide rows are looked for in whole windows each time."""
    return (48 if is_wide(source) else 16) << 20


def cuts_first_window(source: BatchSource) -> bool:
    """Whether an epoch's first window is read in two parts, so that the first batch is quick.

    Not of a remote window, which would be fetched twice for it; nor of sequences with decoders: an eighth of them has
    most of the rows, which would be decoded twice.
    """
    return source.storage.is_local and (source.sequences is None or not source.decoders or source.shuffle is None)


def memory_bound(source: BatchSource, plan: EpochPlan) -> int:
    """The most bytes that reading takes in any epoch, besides mapped files and batches that the caller keeps.

    `plan` is the plan of any epoch. `memory.Room` makes readers keep to the bound.
    """
    if source.parts:
        own = sum(memory_bound(part, part.plan(0)) for part in source.parts)
        # Being interleaved, waiting, and in use; narrow columns are joined before.
        num_steps, num_bytes = 2 * source.workers_count + 3, source.batch_size * mixed_element_bytes(source)
        return own + num_steps * max(mixed_bytes(source), 2 * num_bytes) + _transformed_bytes(source, num_bytes)
    is_variable = any(field.is_object or field.shape is None for field in source.stored_fields)
    window_rows = _most_in_a_window(source, source.manifest.row_group_rows, plan)
    window_bytes = bytes_decoded(source, window_rows)
    file_bytes = _most_in_a_window(source, source.manifest.row_group_bytes, plan)
    if is_variable:
        # Rows differ in size, and so do row groups; a mask takes a byte for each element.
        has_mask = any(field.shape is None and source.has_element_mask(field.name) for field in source.stored_fields)
        window_bytes = max(window_bytes, file_bytes * (2 if has_mask else 1))
    batch_bytes = math.ceil(window_bytes / window_rows) * source.batch_size
    # A source of a mixture is read on into its next epoch.
    num_windows = source.windows_ahead if source.is_part else len(plan.window_starts) - 1
    # Each part of the first window takes a thread, which decodes all texts and lists of it. What is counted for other
    # columns is enough for both.
    workers_count = min(source.workers_count, num_windows + (is_variable and cuts_first_window(source)))
    # Windows read ahead, and the one in use, which at first is the last of the previous epoch.
    in_flight = min(source.windows_ahead, num_windows) + 1
    if is_variable:
        in_work = _VARIABLE_COPIES * window_bytes
    elif is_plain(source):
        in_work = _most_gathered(source, window_rows)
    else:
        # The columns as Arrow decodes them (a float32 may be a double in the file), and one row group's pages.
        in_work = max(window_bytes, min(file_bytes, 2 * window_bytes))
        in_work += min(int(source.manifest.row_group_bytes.max()), 2 * window_bytes)
        in_work += _bytes_before_narrowing(source)
    if source.shuffle is not None:
        in_work += window_rows * _INDEX_BYTES
    peak = _BASE_BYTES + in_flight * window_bytes + workers_count * in_work
    peak += (most_metadata_chunks(source.manifest) - _BASE_CHUNKS) * _METADATA_CHUNK_BYTES
    num_files, num_columns = len(source.manifest.file_names), len(source.manifest.schema)
    peak += min(num_files, MAX_OPEN_FILES) * num_columns * _SCHEMA_COLUMN_BYTES
    peak += int((SPARE - 1) * in_flight * window_bytes) + (4 if is_variable else 2) * batch_bytes
    if not source.storage.is_local:
        # Fetched bytes, and the client's own copy of them.
        peak += 2 * workers_count * (window_bytes + _gap_bytes(source, plan, max(0, file_bytes - window_bytes)))
    peak += _transformed_bytes(source, batch_bytes)
    if source.sequences is not None:
        # Each row group may reach into another one. What is cut waits in parts, of a batch at least.
        peak += 2 * (in_flight * window_bytes + workers_count * in_work)
        peak += 4 * source.workers_count * max(CUT_BYTES, 2 * source.batch_size * element_bytes(source))
        # Whole windows are decoded, with the rows that they reach into.
        peak += (in_flight + workers_count) * 2 * window_rows * source.decoded_row_bytes
    if source.manifest.draws is not None:
        # What is drawn may be some rows again and again, and each epoch draws others.
        peak += source.manifest.draws.num_bytes + 2 * in_flight * window_bytes
    if source.decoders and source.sequences is None:
        peak += decoded_bytes_ahead(source)
    return peak


def _bytes_before_narrowing(source: BatchSource) -> int:
    """What a row group's columns take while Arrow decodes them, beside what they are then.

    Each number of a list has 32 bits at least, and two levels of 16; growing them takes a quarter more. Texts of
    categories are decoded where they are stored as differences, of which Arrow makes no dictionary.
    """
    manifest = source.manifest
    if manifest.source_columns is None:
        return 0
    numbers = sum(
        math.prod(field.shape)
        for field in source.stored_fields
        if field.shape and not field.is_object and field.stored_dtype.itemsize < 4
    )
    num_bytes = 10 * int(manifest.row_group_rows.max()) * numbers
    has_texts = any(
        field.name in manifest.categories and manifest.categories[field.name].kind == "str"
        for field in source.stored_fields
    )
    if has_texts and manifest.formats is not None and any("DELTA_" in name for name in manifest.formats.encodings):
        num_bytes += 3 * int(manifest.row_group_bytes.max())
    return num_bytes


def _transformed_bytes(source: BatchSource, batch_bytes: int) -> int:
    """Batches that a transform has made or is given, ahead of use."""
    if source.transform is None:
        return 0
    return 2 * (source.prefetch_batches or 2 * source.workers_count) * batch_bytes


def _gap_bytes(source: BatchSource, plan: EpochPlan, most: int) -> int:
    """What is fetched of other columns, with a window, because it lies between wanted ones."""
    num_groups = _most_in_a_window(source, np.ones_like(source.manifest.row_group_rows), plan)
    return min(most, num_groups * len(source.stored_fields) * FREE_GAP_BYTES)


def is_plain(source: BatchSource) -> bool:
    """Whether the wanted columns are views of mapped files: ours, not compressed, without nulls."""
    manifest = source.manifest
    return (
        source.storage.is_local
        and manifest.source_columns is None
        and int(manifest.file_bytes.sum()) >= int(manifest.row_group_bytes.sum())
        and not any(field.has_nulls or field.dtype == "bool" for field in source.stored_fields)
    )


def _most_gathered(source: BatchSource, window_rows: int) -> int:
    """Bytes that are joined before rows are gathered from them: the largest narrow column or stack."""
    schema, stacks = source.manifest.schema, {stack.name: stack.columns for stack in source.stacks}
    dtypes = {stack.name: np.dtype(stack.dtype) for stack in source.stacks}
    most = 0
    for name in source.names:
        fields = [schema[member] for member in stacks.get(name, (name,))]
        row_bytes = sum(field.stored_dtype.itemsize * math.prod(field.shape or ()) for field in fields)
        if name in stacks:
            row_bytes = max(row_bytes, len(fields) * dtypes[name].itemsize)
        most = max(most, row_bytes if name in stacks or row_bytes < WIDE_BYTES else 0)
    return int(_PLAIN_COPIES * window_rows * most)


def _most_in_a_window(source: BatchSource, amounts: npt.NDArray[np.int64], plan: EpochPlan) -> int:
    """The largest sum over a window, in any epoch, of an amount that is given for each row group."""
    order = plan.group_order
    if source.shuffle is None:
        return int(np.add.reduceat(amounts[order], plan.window_starts[:-1]).max())
    # Each epoch cuts its windows from another order. At worst a window has the row groups that are densest in it,
    # lacks one row to be full, and then gets the largest of all.
    ordered, rows = amounts[order], source.manifest.elements_of(plan.epoch)[order]
    densest = np.argsort(-ordered / rows, kind="stable")
    before = np.cumsum(rows[densest]) - rows[densest]
    share = np.clip((source.window_rows - 1 - before) / rows[densest], 0, 1)
    most = int((ordered[densest] * share).sum()) + int(ordered.max())
    if source.window_groups is not None:
        most = min(most, int(np.sort(ordered)[-source.window_groups :].sum()))
    return min(most, int(ordered.sum()))
