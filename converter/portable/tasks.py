"""What Spark's executors run: one partition's Arrow batches become Parquet files.

This module travels **by value**: the executors need pyarrow and numpy, and need
not know this package. So it imports nothing of ours but `moments` and `redaction`, which travel
with it, defines no classes at its top (a class by value would be another class on the other side), and speaks in
plain dicts and JSON.

One pass, bounded memory: batches are collected until a row group is full, then
written and forgotten. Bad data is not an exception here: a task that raises is
run again by Spark, to fail again, and its message comes back inside a hundred
lines of JVM stack. A finding is a row of the result instead.

How a value is stored, and why, is DESIGN.md's section 4: arrays whose rows have
one length as FIXED_LEN_BYTE_ARRAY (read at 10 to 13 GB/s, where a list column is
read at 1.4), of varying length as BINARY, scalars as themselves.
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

from converter.portable.deadlines import answer_in, seconds_for
from converter.portable.filesystems import close_whole, open_filesystem, open_new
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
    open_parquet_file,
    write_row_group,
)
from converter.portable.redaction import hide_secrets, shows_secrets
from converter.portable.tensors import as_binary, encode, next_layout, stored, with_shapes, without_placeholders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


REPORT_SCHEMA = "partition long, report string"
"""What a task returns, as Spark writes a schema: one row for each file, or one for each finding."""

FINDING = "converter finding: "
PROBE_NAME = "probe"

_MAX_ROW_GROUP_ROWS = 64 << 20
"""Of more rows pyarrow makes several row groups (`max_row_group_length`), whatever it is told."""

_FROZEN = "CONVERTER_FROZEN_PROCESS"
_MAX_FREEZES = 3
_FEW_OBJECTS = 10_000

_COALESCE_ROWS = 4096
_COALESCE_BYTES = 2 << 20


def make_write_partition(spec: dict[str, Any]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function for `DataFrame.mapInArrow` that writes its partition as `spec` says.

    `spec` has `directory` (a path), `store` (None for local disks, else the fsspec
    `protocol`, its `options` and `timeout_seconds`), `columns` (one dict for each input column, by
    position: `name`, `kind`, `dtype`, `ndim`, `shape`), `row_group_bytes`,
    `file_bytes`, `compression` (`auto`: of each column what pays) and, where readers lie behind a network, `end_bytes`:
    how many bytes of all files' footers and heads may be reported.
    """

    def write_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        _freeze_garbage_collector()
        context = TaskContext.get()
        assert context is not None
        partition, attempt = context.partitionId(), context.taskAttemptId()
        try:
            for report in _write(batches, spec, partition=partition, attempt=attempt):
                yield _report_batch([partition], [json.dumps(report)])
        except Exception as error:
            if spec["store"] is None or not shows_secrets(error, spec["store"]["options"]):
                raise
            # Spark writes it into its logs, with those behind it.
            said = hide_secrets(f"{type(error).__name__}: {error}", spec["store"]["options"])
            raise OSError(said) from None

    return write_partition


def _freeze_garbage_collector() -> None:
    """Let the objects of the modules that are imported by now be left out of garbage collection.

    Spark's Python worker collects after every task: with pandas and pyarrow imported that is some 10 ms (30 on a busy
    machine), nine tenths of what a task of few rows costs. The second task of a process still finds new modules; a
    few times are enough, and more could keep a user's objects for ever. They are counted in the environment, because
    this module is new in every task.
    """
    pid, _, times = os.environ.get(_FROZEN, "").partition(":")
    done = int(times) if pid == str(os.getpid()) else 0
    if done < _MAX_FREEZES and len(gc.get_objects()) > _FEW_OBJECTS:
        gc.collect()
        gc.freeze()
        os.environ[_FROZEN] = f"{os.getpid()}:{done + 1}"


def _report_batch(partitions: list[int], reports: list[str]) -> pa.RecordBatch:
    columns = [pa.array(partitions, pa.int64()), pa.array(reports, pa.string())]
    return pa.RecordBatch.from_arrays(columns, names=["partition", "report"])


def make_pack_batches(spec: dict[str, Any]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function for `DataFrame.mapInArrow` that packs tensors to BINARY for Spark's own writer.

    What it finds in the data can only be raised here: `FINDING` marks it in the text.
    """

    def pack_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        _freeze_garbage_collector()
        for batch in _coalesce(batches):
            packed = []
            for column, array in zip(spec["columns"], batch.columns, strict=True):
                values = encode(array, column)
                if "finding" in values:
                    raise ValueError(FINDING + json.dumps(values["finding"] | {"column": column["name"]}))
                packed.append(values["array"] if "array" in values else as_binary(values, fixed=None))
            yield pa.RecordBatch.from_arrays(packed, names=[f"c{index}" for index in range(len(packed))])

    return pack_batches


def make_probe(
    directory: str, store: dict[str, Any] | None
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function for `DataFrame.mapInArrow` that tries to write one small file where the cache goes."""

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
            said = hide_secrets(f"{type(error).__name__}: {error}", {} if store is None else store["options"])
            answer = {"pyarrow": pa.__version__, "error": said}
        yield _report_batch([0], [json.dumps(answer)])

    return probe


def fold_reports(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Reports pass; the moments they carry are merged into one, so that the driver holds one set and not one a task."""
    totals: dict[str, Any] = {}
    for batch in batches:
        passed = []
        for text in batch.column("report").to_pylist():
            report = json.loads(text)
            totals = add_moments(totals, report.pop("moments", {}))
            passed.append(json.dumps(report))
        yield _report_batch(batch.column("partition").to_pylist(), passed)
    closing = json.dumps({"moments": {name: to_json(closed) for name, closed in totals.items()}})
    yield _report_batch([-1], [closing])


def add_moments(totals: dict[str, Any], moments: dict[str, Any]) -> dict[str, Any]:
    """Closed moments by column, with those of another report (as JSON) merged in."""
    merged = dict(totals)
    for name, document in moments.items():
        closed, before = from_json(document), merged.get(name)
        if before is not None and len(before["count"]) != len(closed["count"]):
            # Elsewhere the rows had another shape, so their elements do not correspond.
            before, closed = flatten_moments(before), flatten_moments(closed)
        merged[name] = closed if before is None else merge_moments(before, closed)
    return merged


def _coalesce(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Small batches together: Spark is told to send few rows at once where rows may be wide."""
    held: list[pa.RecordBatch] = []
    rows = num_bytes = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        held.append(batch)
        rows += batch.num_rows
        num_bytes += batch.nbytes
        if rows >= _COALESCE_ROWS or num_bytes >= _COALESCE_BYTES:
            yield _together(held)
            held, rows, num_bytes = [], 0, 0
    if held:
        yield _together(held)


def _together(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    columns = [pa.concat_arrays([batch.column(index) for batch in batches]) for index in range(batches[0].num_columns)]
    return pa.RecordBatch.from_arrays(columns, schema=batches[0].schema)


def _write(
    batches: Iterator[pa.RecordBatch], spec: dict[str, Any], *, partition: int, attempt: int
) -> list[dict[str, Any]]:
    """Write all batches; the reports of the finished files, or one finding alone."""
    columns = spec["columns"]
    # How each tensor column is stored: a shape once one is known, "ragged" for ever after a second one.
    layout: dict[str, Any] = {}
    odd_rows: dict[str, int] = {}
    pending: list[pa.Table] = []
    pending_rows = pending_bytes = rows_seen = 0
    moments: dict[str, dict[str, Any]] = {}
    scratch = new_scratch()
    lengths: dict[str, list[int]] = {}
    closed_moments: dict[str, dict[str, Any]] = {}
    reports: list[dict[str, Any]] = []
    file: dict[str, Any] | None = None

    def close_file() -> None:
        nonlocal file
        if file is not None:
            shapes = {name: None if shape == "ragged" else list(shape) for name, shape in layout.items()}
            report = close_parquet_file(file) | {"shapes": shapes}
            # So many files there are where no partition is empty: what is too much then is not even told.
            num_files, heads = partition + 1 + len(reports), file["heads"]
            if heads is not None and num_files * (len(file["end"]) + len(heads)) <= spec["end_bytes"]:
                report["end"] = [base64.b64encode(zlib.compress(part)).decode() for part in (file["end"], heads)]
            reports.append(report)
            file = None

    def write_rows(num_rows: int | None = None) -> None:
        """Write the first `num_rows` pending rows (None: all) as one row group."""
        nonlocal file, pending, pending_rows, pending_bytes
        table = pa.concat_tables([without_placeholders(part, layout, columns) for part in pending])
        if file is None:
            name = f"part-{partition:05d}-{attempt:08x}-{len(reports):04d}.parquet"
            codecs = choose_codecs(table) if spec["compression"] == "auto" else spec["compression"]
            # What is written at last is all that there is; else the file ends with a row group beyond its size.
            expected = table.nbytes if num_rows is None else spec["file_bytes"] + 2 * spec["row_group_bytes"]
            file = open_parquet_file(spec, name, with_shapes(table.schema, layout, columns), codecs, expected)
        write_row_group(file, table.slice(0, num_rows))
        pending = [table.slice(num_rows)] if num_rows is not None and num_rows < table.num_rows else []
        pending_rows, pending_bytes = sum(part.num_rows for part in pending), sum(part.nbytes for part in pending)
        if file["bytes"] >= spec["file_bytes"]:
            close_file()

    try:
        for batch in _coalesce(batches):
            encoded = {}
            for column, array in zip(columns, batch.columns, strict=True):
                encoded[column["name"]] = values = encode(array, column)
                if "finding" in values:
                    finding = values["finding"] | {"column": column["name"]}
                    if "row" in finding:
                        finding["row"] += rows_seen
                    discard(file, reports, spec)
                    return [{"finding": finding}]
            after = next_layout(layout, encoded, odd_rows, rows_seen)
            for column in columns:
                _add_to_lengths(lengths, column["name"], encoded[column["name"]])
                values = encoded[column["name"]]
                _add_to_moments(moments, closed_moments, column, values, layout=after, scratch=scratch)
            for name, shape in after.items():
                before = layout.get(name)
                # Columns of one file have one type; a file of nulls alone was opened as BINARY.
                if before not in (None, shape) or (before is None and shape != "ragged" and file is not None):
                    if pending:
                        write_rows()
                    close_file()
            layout = after
            table = pa.table({name: stored(values, layout.get(name)) for name, values in encoded.items()})
            pending.append(table)
            pending_rows, pending_bytes = pending_rows + table.num_rows, pending_bytes + table.nbytes
            rows_seen += batch.num_rows
            # Cutting at one and a half keeps the last row group between a half and one and a half.
            while pending_rows > 1 and (
                pending_bytes >= 1.5 * spec["row_group_bytes"] or pending_rows > _MAX_ROW_GROUP_ROWS
            ):
                num_rows = max(1, pending_rows * spec["row_group_bytes"] // max(pending_bytes, 1))
                write_rows(min(num_rows, _MAX_ROW_GROUP_ROWS))
        if pending:
            write_rows()
        close_file()
    except BaseException:
        discard(file, reports, spec)
        raise
    for report in reports:
        report["odd_rows"] = odd_rows
    if reports:
        for name, opened in moments.items():
            _close_into(closed_moments, name, opened)
        reports[-1]["moments"] = {name: to_json(closed) for name, closed in closed_moments.items()}
        reports[-1]["lengths"] = lengths
    return reports


def _add_to_moments(
    moments: dict[str, Any],
    closed: dict[str, Any],
    column: dict[str, Any],
    values: dict[str, Any],
    *,
    layout: dict[str, Any],
    scratch: dict[str, Any],
) -> None:
    """Count one batch of one column into the task's statistics, while it is in the cache."""
    name, shape = column["name"], layout.get(column["name"])
    if column["kind"] == "scalar":
        numbers = _scalar_numbers(values["array"], column["dtype"])
        if numbers is None:
            return
        num_elements = 1
    else:
        numbers = values["values"].view(np.dtype(column["dtype"]))
        whole = int(np.prod(shape)) if isinstance(shape, tuple) else 0
        num_elements = whole if 0 < whole <= MAX_ELEMENTS else 1
    opened = moments.get(name)
    if opened is None or len(opened["count"]) != num_elements:
        if opened is not None:
            _close_into(closed, name, opened)
        moments[name] = opened = new_moments(num_elements)
    add_values(opened, numbers.reshape(-1, num_elements), scratch)


def _add_to_lengths(lengths: dict[str, list[int]], name: str, values: dict[str, Any]) -> None:
    """Keep the fewest and the most numbers of a tensor's row."""
    if "sizes" in values and not values["empty"]:
        present = values["sizes"] if values["valid"] is None else values["sizes"][values["valid"]]
        least, most = int(present.min()), int(present.max())
        before = lengths.get(name, [least, most])
        lengths[name] = [min(before[0], least), max(before[1], most)]


def _close_into(closed: dict[str, Any], name: str, opened: dict[str, Any]) -> None:
    part, before = close_moments(opened), closed.get(name)
    if before is not None and len(before["count"]) != len(part["count"]):
        before, part = flatten_moments(before), flatten_moments(part)
    closed[name] = part if before is None else merge_moments(before, part)


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
