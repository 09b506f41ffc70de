"""What a Spark task runs: one partition's Arrow batches become Parquet files, and one row of report for each.

It travels by value, as all of this folder: the executors need pyarrow and NumPy, and need not have this package.

One pass, bounded memory: batches are collected until a row group is full, then written and forgotten. Bad data is not
an exception here: Spark would run the task again, to fail again, and its message would arrive inside a hundred lines
of JVM stack. A finding is a row of the result instead.

How a value is stored: arrays whose rows have one length as FIXED_LEN_BYTE_ARRAY (read at 10 to 13 GB/s; a list column
at 1.4), of varying length as BINARY, scalars as themselves; text in arrays, members of structs in arrays and of maps as
lists, which may have null elements.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from converter.portable.categories import new_vocabulary, report_of, settle, with_codes
from converter.portable.deadlines import answer_in, seconds_for
from converter.portable.filesystems import close_filesystems, close_whole, open_filesystem, open_new
from converter.portable.moments import (
    MAX_ELEMENTS,
    add_values,
    close_moments,
    flatten_moments,
    from_json,
    merge_moments,
    new_moments,
    new_scratch,
    to_json,
)
from converter.portable.parquet_file import (
    choose_codecs,
    close_parquet_file,
    discard,
    ends_of,
    is_given_up,
    open_parquet_file,
    write_row_group,
)
from converter.portable.redaction import hide_secrets, shows_secrets
from converter.portable.tensors import (
    encode,
    next_layout,
    stored,
    stored_dtype,
    with_shapes,
    without_placeholders,
)
from converter.portable.undecodable import decode_first

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from converter.portable.records import (
        ClosedMoments,
        ColumnSpec,
        EncodedColumn,
        FileReport,
        Finding,
        FindingReport,
        Layout,
        Numbers,
        OpenFile,
        OpenMoments,
        Scratch,
        Skipped,
        SkippedReport,
        StoreSpec,
        WriteSpec,
    )


REPORT_SCHEMA = "partition long, report string"
"""What a task returns, as Spark writes a schema: one row for each file, or one for a finding."""

FINDING = "converter finding: "
"""Marks a finding in the text of an error, if a task can report in no other way."""

PROBE_NAME = "probe"

_MAX_ROW_GROUP_ROWS = 64 << 20
"""More rows pyarrow cuts into several row groups (`max_row_group_length`)."""

_FROZEN = "CONVERTER_FROZEN_PROCESS"
_MAX_FREEZES, _FEW_OBJECTS = 3, 10_000
_COALESCE_ROWS, _COALESCE_BYTES = 4096, 2 << 20


def make_write_partition(spec: WriteSpec) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function for `DataFrame.mapInArrow` that writes its partition as `spec` says, and yields reports."""

    def write_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        freeze_garbage_collector()
        context = TaskContext.get()
        assert context is not None
        partition, attempt = context.partitionId(), context.taskAttemptId()
        try:
            for report in _write(batches, spec, partition=partition, attempt=attempt):
                yield _report_batch([partition], [json.dumps(report)])
        except Exception as error:
            if spec["store"] is None or not shows_secrets(error, spec["store"]["options"]):
                raise
            # Spark logs a task's error, with its causes.
            raise OSError(hide_secrets(f"{type(error).__name__}: {error}", spec["store"]["options"])) from None
        finally:
            close_filesystems()

    return write_partition


def freeze_garbage_collector() -> None:
    """Leave the modules that are imported by now out of garbage collections.

    Spark's Python worker collects after every task. With pandas and pyarrow imported that takes 10 to 30 ms, nine
    tenths of a task of few rows. The second task of a process still imports modules, so it is done up to three times;
    more could keep a user's objects alive. The environment counts, because this module is new in every task.

    Reaches into: gc.freeze and os.environ of Spark's Python worker (CPython 3.11, pyspark 4.2).
    Without it: each task takes 10 to 30 ms longer.
    """
    pid, _, times = os.environ.get(_FROZEN, "").partition(":")
    num_freezes = int(times) if pid == str(os.getpid()) else 0
    if num_freezes < _MAX_FREEZES and len(gc.get_objects()) > _FEW_OBJECTS:
        gc.collect()
        gc.freeze()
        os.environ[_FROZEN] = f"{os.getpid()}:{num_freezes + 1}"


def _report_batch(partitions: list[int], reports: list[str]) -> pa.RecordBatch:
    columns = [pa.array(partitions, pa.int64()), pa.array(reports, pa.string())]
    return pa.RecordBatch.from_arrays(columns, names=["partition", "report"])


def placed(finding: Finding, column: str, row_numbers: Numbers, partition: int) -> Finding:
    """What was found in a batch, with the column, the partition and the number of the row in it."""
    finding["column"], finding["partition"] = column, partition
    if "row" in finding:
        finding["row"] = int(row_numbers[finding["row"]])
    return finding


def make_probe(
    directory: str, store: StoreSpec | None
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function for `DataFrame.mapInArrow` that tries to write a small file into the cache, and reports it."""

    def probe(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        path = f"{directory}/{PROBE_NAME}"

        def write(filesystem: Any) -> None:
            file = open_new(filesystem, directory, PROBE_NAME, num_bytes=0)
            num_bytes = file.write(b"reached")
            close_whole(filesystem, file, path, num_bytes)

        try:
            filesystem = open_filesystem(store)
            answer_in(seconds_for(store), lambda: write(filesystem), path)
            answer = {"pyarrow": pa.__version__}
        except Exception as error:  # noqa: BLE001 (each filesystem has errors of its own)
            text = hide_secrets(f"{type(error).__name__}: {error}", {} if store is None else store["options"])
            answer = {"pyarrow": pa.__version__, "error": text}
        finally:
            close_filesystems()
        yield _report_batch([0], [json.dumps(answer)])

    return probe


def ask_python(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For `DataFrame.mapInArrow`: reports which pyarrow an executor has."""
    for _ in batches:
        pass
    yield _report_batch([0], [json.dumps({"pyarrow": pa.__version__})])


def fold_reports(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The reports of many tasks, their moments merged into one report at the end: the driver then holds one set."""
    totals: dict[str, ClosedMoments] = {}
    for batch in batches:
        passed = []
        for text in batch.column("report").to_pylist():
            report = json.loads(text)
            totals = add_moments(totals, report.pop("moments", {}))
            passed.append(json.dumps(report))
        yield _report_batch(batch.column("partition").to_pylist(), passed)
    closing = json.dumps({"moments": {name: to_json(closed) for name, closed in totals.items()}})
    yield _report_batch([-1], [closing])


def add_moments(totals: dict[str, ClosedMoments], moments: dict[str, Any]) -> dict[str, ClosedMoments]:
    """Moments by column, with those of another report (as JSON) merged in."""
    merged = dict(totals)
    for name, document in moments.items():
        _merge_into(merged, name, from_json(document))
    return merged


def _merge_into(merged: dict[str, ClosedMoments], name: str, closed: ClosedMoments) -> None:
    before = merged.get(name)
    if before is not None and not before["count"].any() and not before["nans"]:
        # Rows that are all null have no shape.
        before = None
    elif before is not None and not closed["count"].any() and not closed["nans"]:
        return
    if before is not None and len(before["count"]) != len(closed["count"]):
        # The rows there had another shape, so their elements do not correspond.
        before, closed = flatten_moments(before), flatten_moments(closed)
    merged[name] = closed if before is None else merge_moments(before, closed)


def coalesce(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches, small ones put together: Spark is told to send few rows at once where rows may be wide."""
    held: list[pa.RecordBatch] = []
    rows = num_bytes = 0
    are_deep: bool | None = None
    for sent in batches:
        if not sent.num_rows:
            continue
        if are_deep is None:
            are_deep = any(map(_is_deep, sent.schema.types))
        columns = [_sound(column) for column in sent.columns] if are_deep else None
        batch = sent if columns is None else pa.RecordBatch.from_arrays(columns, schema=sent.schema)
        held.append(batch)
        rows += batch.num_rows
        num_bytes += batch.nbytes
        if rows >= _COALESCE_ROWS or num_bytes >= _COALESCE_BYTES:
            yield _together(held)
            held, rows, num_bytes = [], 0, 0
    if held:
        yield _together(held)


def _is_deep(kind: pa.DataType) -> bool:
    return any(pa.types.is_nested(kind.field(index).type) for index in range(kind.num_fields))


def _sound(array: pa.Array) -> pa.Array:
    """The same array, with the offsets that Spark 3.5 and 4.0 leave out where lists within lists are all empty.

    Arrow wants one offset even then, and reading it where there is none ends the process, as in `nbytes`.
    """
    kind = array.type
    is_list = pa.types.is_list(kind) or pa.types.is_map(kind)
    if array.offset or not (is_list or pa.types.is_struct(kind)):
        return array
    if not len(array):
        return pa.array([], kind)
    inner = [array.values] if is_list else [array.field(index) for index in range(kind.num_fields)]
    sound = [_sound(values) for values in inner]
    if all(one is other for one, other in zip(sound, inner, strict=True)):
        return array
    return pa.Array.from_buffers(kind, len(array), array.buffers()[: 1 + is_list], children=sound)


def _together(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    columns = [pa.concat_arrays([batch.column(index) for batch in batches]) for index in range(batches[0].num_columns)]
    return pa.RecordBatch.from_arrays(columns, schema=batches[0].schema)


def _write(
    batches: Iterator[pa.RecordBatch], spec: WriteSpec, *, partition: int, attempt: int
) -> Sequence[FileReport | FindingReport | SkippedReport]:
    """Write all batches; the reports of the finished files, or one finding alone."""
    columns = spec["columns"]
    # How each tensor column is stored: in one shape once it is known, "ragged" for ever after a second one.
    layout: Layout = {}
    odd_rows: dict[str, int] = {}
    pending: list[pa.Table] = []
    pending_rows = pending_bytes = rows_seen = 0
    moments: dict[str, OpenMoments] = {}
    vocabularies = {column["name"]: new_vocabulary(column) for column in columns if column["categories"] is not None}
    scratch = new_scratch()
    lengths: dict[str, list[int]] = {}
    null_elements: dict[str, int] = {}
    skipped: dict[str, Skipped] = {}
    closed_moments: dict[str, ClosedMoments] = {}
    reports: list[FileReport] = []
    file: OpenFile | None = None

    def close_file() -> None:
        nonlocal file
        if file is not None:
            report = close_parquet_file(file)
            report["shapes"] = {
                name: list(shape) if isinstance(shape, tuple) else None for name, shape in layout.items()
            }
            # At least so many files, if no partition is empty: footers that are too large in sum are not sent.
            num_files, ends = partition + 1 + len(reports), ends_of(file)
            if ends is not None and num_files * sum(map(len, ends)) <= spec["end_bytes"]:
                report["end"] = [base64.b64encode(zlib.compress(part)).decode() for part in ends]
            reports.append(report)
            file = None

    def sort_categories(batch: dict[str, EncodedColumn]) -> None:
        """Give the values so far the order of their codes, in the pending rows and in a batch that will follow."""
        nonlocal pending
        for name, vocabulary in vocabularies.items():
            codes = settle(vocabulary)
            if codes is not None:
                pending = [with_codes(part, name, codes) for part in pending]
                values = batch.get(name)
                if values is not None and "array" in values:
                    batch[name] = {"array": codes.take(values["array"])}

    def write_rows(num_rows: int | None = None) -> None:
        """Write the first `num_rows` pending rows (None: all) as one row group."""
        nonlocal file, pending, pending_rows, pending_bytes
        sort_categories({})
        table = pa.concat_tables([without_placeholders(part, layout, columns) for part in pending])
        if file is None:
            name = f"part-{partition:05d}-{attempt:08x}-{len(reports):04d}.parquet"
            codecs = choose_codecs(table) if spec["compression"] == "auto" else spec["compression"]
            # Without `num_rows` the file holds only these rows. Else its last row group may exceed its size.
            expected = table.nbytes if num_rows is None else spec["file_bytes"] + 2 * spec["row_group_bytes"]
            file = open_parquet_file(spec, name, with_shapes(table.schema, layout, columns), codecs, expected)
        write_row_group(file, table.slice(0, num_rows))
        pending = [table.slice(num_rows)] if num_rows is not None and num_rows < table.num_rows else []
        pending_rows, pending_bytes = sum(part.num_rows for part in pending), sum(part.nbytes for part in pending)
        if file["bytes"] >= spec["file_bytes"]:
            close_file()

    try:
        for whole in coalesce(batches):
            batch, decoded, row_numbers = decode_first(whole, columns, skipped, rows_seen)
            rows_seen += whole.num_rows
            if not batch.num_rows:
                continue
            encoded: dict[str, EncodedColumn] = {}
            for column, array in zip(columns, batch.columns, strict=True):
                name = column["name"]
                values = decoded.get(name) or encode(array, column, vocabularies.get(name))
                if "finding" in values:
                    discard(file, reports, spec)
                    return [{"finding": placed(values["finding"], name, row_numbers, partition)}]
                encoded[column["name"]] = values
            after = next_layout(layout, encoded, odd_rows, row_numbers)
            for column in columns:
                counted = encoded[column["name"]]
                _add_to_lengths(lengths, column["name"], counted)
                if "elements" in counted:
                    name = column["name"]
                    null_elements[name] = null_elements.get(name, 0) + counted["elements"].null_count
                if column["categories"] is None:
                    _add_to_moments(moments, closed_moments, column, counted, layout=after, scratch=scratch)
            for name, shape in after.items():
                before = layout.get(name)
                # A column has one type in a file; a column of nulls alone began as BINARY, also in what a file left.
                if before is None:
                    has_type = file is not None or (pending and not pa.types.is_null(pending[0].field(name).type))
                    is_other = has_type and shape != "ragged"
                else:
                    is_other = before != shape
                if is_other:
                    sort_categories(encoded)
                    if pending:
                        write_rows()
                    close_file()
            layout = after
            table = pa.table({name: stored(values, layout.get(name)) for name, values in encoded.items()})
            pending.append(table)
            pending_rows, pending_bytes = pending_rows + table.num_rows, pending_bytes + table.nbytes
            # Cutting at one and a half keeps the last row group between a half and one and a half.
            while pending_rows > 1 and (
                pending_bytes >= 1.5 * spec["row_group_bytes"] or pending_rows > _MAX_ROW_GROUP_ROWS
            ):
                num_rows = max(1, pending_rows * spec["row_group_bytes"] // max(pending_bytes, 1))
                write_rows(min(num_rows, _MAX_ROW_GROUP_ROWS))
        if pending:
            write_rows()
        close_file()
        if reports and is_given_up(spec):
            # Spark breaks off the input of a task that it kills, and Arrow takes that for the end of the rows. By the
            # time a store has the file, the driver may have cleaned up.
            discard(None, reports, spec)
    except BaseException:
        discard(file, reports, spec)
        raise
    for report in reports:
        report["odd_rows"] = odd_rows
    if reports:
        for name, opened in moments.items():
            _merge_into(closed_moments, name, close_moments(opened))
        reports[-1]["moments"] = {name: to_json(closed) for name, closed in closed_moments.items()}
        reports[-1]["lengths"] = lengths
        reports[-1]["categories"] = {name: report_of(vocabulary) for name, vocabulary in vocabularies.items()}
        reports[-1]["null_elements"] = null_elements
    return [*reports, {"skipped": skipped}] if skipped else reports


def _add_to_moments(
    moments: dict[str, OpenMoments],
    closed: dict[str, ClosedMoments],
    column: ColumnSpec,
    values: EncodedColumn,
    *,
    layout: Layout,
    scratch: Scratch,
) -> None:
    """Count one batch of one column into the task's statistics, while it is in the processor's cache."""
    name, shape = column["name"], layout.get(column["name"])
    if "array" in values:
        flat = values["elements"] if "elements" in values else values["array"]
        numbers = _scalar_numbers(flat, column["dtype"])
        if numbers is None:
            return
        num_elements = 1
    else:
        numbers = values["values"].view(stored_dtype(column["dtype"]).newbyteorder("="))
        whole = int(np.prod(shape)) if isinstance(shape, tuple) else 0
        num_elements = whole if 0 < whole <= MAX_ELEMENTS else 1
    opened = moments.get(name)
    if opened is None or len(opened["count"]) != num_elements:
        if opened is not None:
            _merge_into(closed, name, close_moments(opened))
        moments[name] = opened = new_moments(num_elements)
    add_values(opened, numbers.reshape(-1, num_elements), scratch)


def _add_to_lengths(lengths: dict[str, list[int]], name: str, values: EncodedColumn) -> None:
    """Keep the fewest and the most numbers of a tensor's row."""
    if "sizes" in values and not values["empty"]:
        present = values["sizes"] if values["valid"] is None else values["sizes"][values["valid"]]
        least, most = int(present.min()), int(present.max())
        before = lengths.get(name, [least, most])
        lengths[name] = [min(before[0], least), max(before[1], most)]


def _scalar_numbers(array: pa.Array, dtype: str) -> np.ndarray[Any, Any] | None:
    """The values of a scalar column that are not null, as numbers; None for strings and bytes."""
    if dtype in ("str", "bytes"):
        return None
    present = array.drop_null() if array.null_count else array
    if dtype == "bool":
        return np.asarray(pc.cast(present, pa.uint8()))
    if dtype.startswith("datetime64"):
        present = present.view(pa.int32() if dtype == "datetime64[D]" else pa.int64())
    return np.asarray(present.to_numpy(zero_copy_only=False))
