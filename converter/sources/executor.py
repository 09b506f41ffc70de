"""What Spark's executors run: one partition's Arrow batches become Parquet files.

This module travels **by value**: the executors need pyarrow and numpy, and need
not know this package. So it imports nothing of ours but `moments`, which travels
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

import contextlib
import json
import os
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from converter.sources.moments import (
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPORT_SCHEMA = "partition long, report string"
"""What a task returns, as Spark writes a schema: one row for each file, or one for each finding."""

FINDING = "converter finding: "
PROBE_NAME = "probe"

_COALESCE_ROWS = 4096
_COALESCE_BYTES = 8 << 20


def make_write_partition(spec: dict[str, Any]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function for `DataFrame.mapInArrow` that writes its partition as `spec` says.

    `spec` has `directory` (a local path), `columns` (one dict for each input
    column, by position: `name`, `kind`, `dtype`, `ndim`, `shape`), `row_group_bytes`,
    `file_bytes` and `compression`.
    """

    def write_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        partition, attempt = context.partitionId(), context.taskAttemptId()
        for report in _write(batches, spec, partition=partition, attempt=attempt):
            yield _report_batch([partition], [json.dumps(report)])

    return write_partition


def _report_batch(partitions: list[int], reports: list[str]) -> pa.RecordBatch:
    columns = [pa.array(partitions, pa.int64()), pa.array(reports, pa.string())]
    return pa.RecordBatch.from_arrays(columns, names=["partition", "report"])


def make_pack_batches(spec: dict[str, Any]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function for `DataFrame.mapInArrow` that packs tensors to BINARY for Spark's own writer.

    What it finds in the data can only be raised here: `FINDING` marks it in the text.
    """

    def pack_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        shapes: dict[str, tuple[int, ...]] = {}
        for batch in _coalesce(batches):
            packed = []
            for column, array in zip(spec["columns"], batch.columns, strict=True):
                values = encode(array, column)
                name, shape = column["name"], values.get("shape")
                if column["ndim"] > 1 and shape is not None and shapes.setdefault(name, shape) != shape:
                    values = {"finding": {"kind": "ragged_nested"}}
                if "finding" in values:
                    raise ValueError(FINDING + json.dumps(values["finding"] | {"column": name}))
                packed.append(values["array"] if "array" in values else as_binary(values, fixed=None))
            yield pa.RecordBatch.from_arrays(packed, names=[f"c{index}" for index in range(len(packed))])

    return pack_batches


def make_probe(directory: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function for `DataFrame.mapInArrow` that tries to write one small file where the cache goes."""

    def probe(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        try:
            os.makedirs(directory, exist_ok=True)
            with open(os.path.join(directory, PROBE_NAME), "wb") as file:
                file.write(b"reached")
            answer = {"pyarrow": pa.__version__}
        except OSError as error:
            answer = {"pyarrow": pa.__version__, "error": f"{type(error).__name__}: {error}"}
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
            reports.append(_close_file(file) | {"shapes": shapes})
            file = None

    def write_rows(num_rows: int | None = None) -> None:
        """Write the first `num_rows` pending rows (None: all) as one row group."""
        nonlocal file, pending, pending_rows, pending_bytes
        table = pa.concat_tables([_without_placeholders(part, layout, columns) for part in pending])
        if file is None:
            name = f"part-{partition:05d}-{attempt:08x}-{len(reports):04d}.parquet"
            file = _open_file(spec, name, table.schema)
        _write_row_group(file, table.slice(0, num_rows))
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
                    _discard(file, reports, spec)
                    return [{"finding": finding}]
            after = _next_layout(layout, encoded, odd_rows, rows_seen)
            nested = {column["name"] for column in columns if column["ndim"] > 1}
            jagged = next((name for name in sorted(nested & after.keys()) if after[name] == "ragged"), None)
            if jagged is not None:
                _discard(file, reports, spec)
                return [{"finding": {"kind": "ragged_nested", "column": jagged}}]
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
            table = pa.table({name: _stored(values, layout.get(name)) for name, values in encoded.items()})
            pending.append(table)
            pending_rows, pending_bytes = pending_rows + table.num_rows, pending_bytes + table.nbytes
            rows_seen += batch.num_rows
            # Cutting at one and a half keeps the last row group between a half and one and a half.
            while pending_bytes >= 1.5 * spec["row_group_bytes"] and pending_rows > 1:
                write_rows(max(1, pending_rows * spec["row_group_bytes"] // pending_bytes))
        if pending:
            write_rows()
        close_file()
    except BaseException:
        _discard(file, reports, spec)
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


def _next_layout(
    layout: dict[str, Any], encoded: dict[str, dict[str, Any]], odd_rows: dict[str, int], rows_seen: int
) -> dict[str, Any]:
    """The layout after one more batch; notes the first row that differs from those before it."""
    after = dict(layout)
    for name, values in encoded.items():
        if "sizes" not in values or values["empty"]:
            continue
        before, shape = layout.get(name), values["shape"]
        if shape is not None and 0 not in shape and before in (None, shape):
            after[name] = shape
            continue
        after[name] = "ragged"
        if name not in odd_rows and before != "ragged":
            sizes, valid = values["sizes"], values["valid"]
            first = sizes[np.argmax(valid)] if valid is not None else sizes[0]
            usual = int(np.prod(before)) if before is not None else int(first)
            differs = sizes != usual if valid is None else (sizes != usual) & valid
            odd_rows[name] = rows_seen + int(np.argmax(differs))
    return after


def _stored(values: dict[str, Any], shape: Any) -> pa.Array:
    """What goes into the file; a null-typed placeholder while every row so far was null."""
    if "array" in values:
        return values["array"]
    if values["empty"] and shape is None:
        return pa.nulls(len(values["sizes"]))
    return as_binary(values, fixed=None if shape == "ragged" else shape)


def _without_placeholders(table: pa.Table, layout: dict[str, Any], columns: list[dict[str, Any]]) -> pa.Table:
    """The table with its placeholders typed, now that a row group of them must be written."""
    for index, column in enumerate(columns):
        if column["kind"] != "scalar" and pa.types.is_null(table.schema.field(index).type):
            shape = layout.get(column["name"], "ragged")
            width = -1 if shape == "ragged" else int(np.prod(shape)) * np.dtype(column["dtype"]).itemsize
            table = table.set_column(index, column["name"], pa.nulls(table.num_rows, pa.binary(width)))
    return table


def _open_file(spec: dict[str, Any], name: str, schema: pa.Schema) -> dict[str, Any]:
    """A new Parquet file that counts and digests what passes; a dict, because a class would not travel."""
    os.makedirs(spec["directory"], exist_ok=True)
    path = os.path.join(spec["directory"], name)
    raw = open(path, "wb", buffering=0)  # noqa: SIM115 (closed by _close_file or _discard)
    file: dict[str, Any] = {"name": name, "path": path, "raw": raw, "bytes": 0, "crc": 0}

    class Sink:
        """Counts bytes and keeps a running CRC-32, which costs a tenth of the write (sha256: a half)."""

        closed = False

        def write(self, data: Any) -> int:
            file["bytes"] += len(data)
            file["crc"] = zlib.crc32(data, file["crc"])
            view = memoryview(data).cast("B")
            while view:  # An unbuffered file may take only a part.
                view = view[raw.write(view) :]
            return len(data)

        def flush(self) -> None:
            pass

        def tell(self) -> int:
            return int(file["bytes"])

        def close(self) -> None:
            self.closed = True

        def readable(self) -> bool:
            return False

        def writable(self) -> bool:
            return True

        def seekable(self) -> bool:
            return False

    # Minimum and maximum of bytes mean nothing to a user and cost a comparison for each row.
    opaque = (pa.types.is_fixed_size_binary, pa.types.is_binary, pa.types.is_large_binary)
    comparable = [field.name for field in schema if not any(is_opaque(field.type) for is_opaque in opaque)]
    footers: list[pq.FileMetaData] = []
    file["footers"] = footers
    try:
        file["writer"] = pq.ParquetWriter(
            pa.PythonFile(Sink(), mode="w"),
            schema,
            compression=spec["compression"],
            use_dictionary=False,
            write_statistics=comparable,
            write_page_checksum=True,
            metadata_collector=footers,
        )
    except BaseException:
        raw.close()
        os.unlink(path)
        raise
    file |= {"rows": [], "row_group_bytes": [], "digests": [], "nulls": dict.fromkeys(schema.names, 0)}
    return file


def _write_row_group(file: dict[str, Any], table: pa.Table) -> None:
    file["writer"].write_table(table, row_group_size=table.num_rows)
    file["rows"].append(table.num_rows)
    file["row_group_bytes"].append(table.nbytes)
    # Taken before the footer, which names the writer's version: the digest is of the rows alone.
    file["digests"].append(f"{file['crc']:08x}")
    for name in table.column_names:
        file["nulls"][name] += table[name].null_count


def _close_file(file: dict[str, Any]) -> dict[str, Any]:
    file["writer"].close()
    file["raw"].close()
    return {
        "name": file["name"],
        "bytes": file["bytes"],
        "rows": file["rows"],
        "row_group_bytes": file["row_group_bytes"],
        "digests": file["digests"],
        "nulls": file["nulls"],
        "spans": sum_spans(file["footers"][0]),
    }


def sum_spans(footer: pq.FileMetaData) -> dict[str, float]:
    """For each column of single numbers the sum over the row groups of maximum minus minimum, from the footer."""
    spans: dict[str, float] = {}
    names = footer.schema.to_arrow_schema().names
    for index, name in enumerate(names):
        for group in range(footer.num_row_groups):
            statistics = footer.row_group(group).column(index).statistics
            if statistics is None or not statistics.has_min_max or isinstance(statistics.min, (str, bytes)):
                continue
            span = _as_number(statistics.max) - _as_number(statistics.min)
            if np.isfinite(span):
                spans[name] = spans.get(name, 0.0) + span
    return spans


def _as_number(value: Any) -> float:
    """Dates and times as days and microseconds since 1970, like everything else that is counted."""
    if hasattr(value, "toordinal") and not hasattr(value, "hour"):
        return float(value.toordinal() - 719163)
    if hasattr(value, "hour"):
        return float(np.datetime64(value.replace(tzinfo=None), "us").astype(np.int64))
    return float(value)


def _discard(file: dict[str, Any] | None, reports: list[dict[str, Any]], spec: dict[str, Any]) -> None:
    """Remove everything this task wrote: nobody will hear of it."""
    if file is not None:
        file["raw"].close()
        reports = [*reports, file]
    for report in reports:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(spec["directory"], report["name"]))


def encode(array: pa.Array, column: dict[str, Any]) -> dict[str, Any]:
    """One batch of one column, ready to store.

    A scalar gives `array`. A tensor gives `values` (flat numbers, row after row),
    `sizes` (numbers in each row), `valid` (or None), `shape` (None where rows
    differ) and `empty` (no row has a shape, all are null). Bad data gives `finding`.
    """
    if column["kind"] == "scalar":
        target = _ARROW[column["dtype"]]
        return {"array": array if array.type == target else pc.cast(array, target, safe=False)}
    encoded = {"tensor": _encode_tensor, "vector": _encode_vector, "matrix": _encode_matrix}[column["kind"]](
        array, column
    )
    declared = column["shape"]
    if declared is None or "finding" in encoded or encoded["empty"]:
        return encoded
    if column["ndim"] > 1:
        if tuple(encoded["shape"]) != tuple(declared):
            found, expected = f"shape {tuple(encoded['shape'])}", f"shape {tuple(declared)}"
            return {"finding": {"kind": "shape", "found": found, "expected": expected}}
        return encoded
    size = int(np.prod(declared))
    present = encoded["sizes"] if encoded["valid"] is None else encoded["sizes"][encoded["valid"]]
    wrong = np.flatnonzero(present != size)
    if len(wrong):
        row = wrong[0] if encoded["valid"] is None else np.flatnonzero(encoded["valid"])[wrong[0]]
        found, expected = f"{present[wrong[0]]} numbers", f"{size} numbers"
        return {"finding": {"kind": "shape", "row": int(row), "found": found, "expected": expected}}
    encoded["shape"] = tuple(declared)
    return encoded


def _encode_tensor(array: pa.Array, column: dict[str, Any]) -> dict[str, Any]:
    """Nested lists of numbers: every row's shape, and the numbers in C order."""
    valid = None if not array.null_count else np.asarray(array.is_valid())
    level, sizes, inner = array, None, []
    for depth in range(column["ndim"]):
        if depth and level.null_count:
            return {"finding": {"kind": "null_element"}}
        lengths = pc.fill_null(pc.list_value_length(level), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        level = level.flatten()
        if sizes is None:
            sizes = lengths
            continue
        inner.append(lengths)
        starts = np.concatenate(([0], np.cumsum(sizes)))
        sums = np.concatenate(([0], np.cumsum(lengths)))
        sizes = sums[starts[1:]] - sums[starts[:-1]]
    if level.null_count:
        return {"finding": {"kind": "null_element"}}
    values = _numbers(level, column["dtype"])
    outer = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    counts = outer if valid is None else outer[valid]
    if not len(counts):
        return {"values": values, "sizes": sizes, "valid": valid, "shape": None, "empty": True}
    levels = [counts, *inner]
    uniform = all(not len(lengths) or (lengths == lengths[0]).all() for lengths in levels)
    shape = tuple(int(lengths[0]) if len(lengths) else 0 for lengths in levels) if uniform else None
    if shape is None and column["ndim"] > 1:
        return {"finding": {"kind": "ragged_nested"}}
    return {"values": values, "sizes": sizes, "valid": valid, "shape": shape, "empty": False}


def _encode_vector(array: pa.Array, column: dict[str, Any]) -> dict[str, Any]:
    """Spark's ml and mllib vectors: struct<type, size, indices, values>, dense where type is 1."""
    valid = None if not array.null_count else np.asarray(array.is_valid())
    kind, size, indices, numbers = (pc.struct_field(array, [name]) for name in ("type", "size", "indices", "values"))
    is_dense = pc.fill_null(pc.equal(kind, 1), False).to_numpy(zero_copy_only=False)
    stored = pc.fill_null(pc.list_value_length(numbers), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    values = _numbers(numbers.flatten(), column["dtype"])
    sizes = np.where(is_dense, stored, pc.fill_null(size, 0).to_numpy(zero_copy_only=False)).astype(np.int64)
    if not is_dense.all():
        starts = np.cumsum(sizes) - sizes
        # A dense row's numbers stand at 0, 1, 2, …; a sparse row names its places.
        within = np.arange(len(values)) - np.repeat(np.cumsum(stored) - stored, stored)
        places = within.copy()
        places[np.repeat(~is_dense, stored)] = indices.flatten().to_numpy(zero_copy_only=False)
        scattered = np.zeros(int(sizes.sum()), values.dtype)
        scattered[np.repeat(starts, stored) + places] = values
        values = scattered
    counts = sizes if valid is None else sizes[valid]
    uniform = len(counts) > 0 and bool((counts == counts[0]).all())
    shape = (int(counts[0]),) if uniform else None
    return {"values": values, "sizes": sizes, "valid": valid, "shape": shape, "empty": not len(counts)}


def _encode_matrix(array: pa.Array, column: dict[str, Any]) -> dict[str, Any]:
    """Matrices: struct<type, numRows, numCols, colPtrs, rowIndices, values, isTransposed>, dense where type is 1.

    Dense values and sparse pointers run along columns, or along rows where the matrix is transposed.
    """
    valid = None if not array.null_count else np.asarray(array.is_valid())
    present = array if valid is None else array.drop_null()
    sizes = np.zeros(len(array), np.int64)
    if not len(present):
        return {"values": np.empty(0, column["dtype"]), "sizes": sizes, "valid": valid, "shape": None, "empty": True}

    def plain(name: str) -> np.ndarray[Any, Any]:
        return np.asarray(pc.struct_field(present, [name]).to_numpy(zero_copy_only=False))

    heights, widths = plain("numRows"), plain("numCols")
    height, width = int(heights[0]), int(widths[0])
    if (heights != height).any() or (widths != width).any():
        return {"finding": {"kind": "ragged_nested"}}
    is_dense, is_transposed = plain("type") == 1, plain("isTransposed").astype(bool)
    numbers = np.zeros((len(present), height, width), np.dtype(column["dtype"]).newbyteorder("<"))
    for transposed in (False, True):
        # What runs along columns is written through a view in which the axes are exchanged.
        target = numbers if transposed else numbers.transpose(0, 2, 1)
        outer = height if transposed else width
        rows = np.flatnonzero(is_dense & (is_transposed == transposed))
        if len(rows):
            values = pc.struct_field(present.take(pa.array(rows)), ["values"]).flatten()
            target[rows] = _numbers(values, column["dtype"]).reshape(len(rows), *target.shape[1:])
        rows = np.flatnonzero(~is_dense & (is_transposed == transposed))
        if len(rows):
            sparse = present.take(pa.array(rows))
            pointers = pc.struct_field(sparse, ["colPtrs"]).flatten().to_numpy(zero_copy_only=False)
            counts = np.diff(pointers.reshape(len(rows), outer + 1), axis=1)
            inner = pc.struct_field(sparse, ["rowIndices"]).flatten().to_numpy(zero_copy_only=False)
            values = pc.struct_field(sparse, ["values"]).flatten()
            places = np.repeat(np.tile(np.arange(outer), len(rows)), counts.ravel())
            target[np.repeat(rows, counts.sum(axis=1)), places, inner] = _numbers(values, column["dtype"])
    sizes[slice(None) if valid is None else valid] = height * width
    return {"values": numbers.ravel(), "sizes": sizes, "valid": valid, "shape": (height, width), "empty": False}


def _numbers(array: pa.Array, dtype: str) -> np.ndarray[Any, Any]:
    """Flat numbers without nulls as a little-endian NumPy array of `dtype`."""
    if pa.types.is_boolean(array.type):
        return np.asarray(pc.cast(array, pa.uint8()))
    values = array.to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(values, dtype=np.dtype(dtype).newbyteorder("<"))


def as_binary(encoded: dict[str, Any], *, fixed: Any) -> pa.Array:
    """A tensor's rows as bytes: FIXED_LEN_BYTE_ARRAY when all have the shape `fixed`, else BINARY."""
    values, sizes, valid = encoded["values"], encoded["sizes"], encoded["valid"]
    num_rows = len(sizes)
    validity = None if valid is None else pa.array(valid).buffers()[1]
    null_count = 0 if valid is None else int(num_rows - valid.sum())
    if fixed is not None:
        row_numbers = int(np.prod(fixed))
        if null_count:
            # A null row takes its place all the same.
            full = np.zeros((num_rows, row_numbers), values.dtype)
            full[valid] = values.reshape(-1, row_numbers)
            values = full
        width = row_numbers * values.dtype.itemsize
        buffers = [validity, pa.py_buffer(values)]
        return pa.Array.from_buffers(pa.binary(width), num_rows, buffers, null_count)
    ends = np.cumsum(sizes) * values.dtype.itemsize
    offsets = np.concatenate(([0], ends))
    if offsets[-1] < 2**31:
        buffers = [validity, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(values)]
        return pa.Array.from_buffers(pa.binary(), num_rows, buffers, null_count)
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.large_binary(), num_rows, buffers, null_count)


_ARROW: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "datetime64[D]": pa.date32(),
    "datetime64[us]": pa.timestamp("us"),
    "str": pa.string(),
    "bytes": pa.binary(),
}
