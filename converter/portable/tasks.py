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

import atexit
import base64
import contextlib
import datetime as dt
import gc
import inspect
import io
import json
import math
import os
import re
import threading
import time
import zlib
from collections import deque
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

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
from converter.portable.redaction import hide_secrets, shows_secrets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


REPORT_SCHEMA = "partition long, report string"
"""What a task returns, as Spark writes a schema: one row for each file, or one for each finding."""

DTYPE_METADATA, NDIM_METADATA, SHAPE_METADATA = "converter.dtype", "converter.ndim", "converter.shape"
"""What a file says of a tensor's bytes, beside the manifest: for whoever finds the file alone."""

FINDING = "converter finding: "
PROBE_NAME = "probe"
CLOSING_THREAD, WRITING_THREAD = "converter-close", "converter-write"
REQUEST_THREAD, TOKEN_THREAD = "converter-request", "converter-token"
_WAITING_BYTES = 32 << 20
"""Of a file on HDFS what may wait to be written before the next page is taken, beside the row group that is encoded."""

_STEP_BYTES = 8 << 20
"""What is handed to a client at once, and what hdfs-native may have taken and not yet sent; a guess."""

_SLOW_BYTES_PER_SECOND = 500_000
"""What a request may send takes longer by this, because its progress cannot be seen; of a line this slow. A guess."""

_HEAD_BYTES = 20
"""A page's header begins with its kind, its sizes and its checksum: at most 2, 12 and 6 bytes (parquet.thrift)."""

"""A nonce of 12 bytes and a tag of 16 (Parquet's Encryption.md, "Plaintext Footer")."""

_MAX_ROW_GROUP_ROWS = 64 << 20
"""Of more rows pyarrow makes several row groups (`max_row_group_length`), whatever it is told."""

_MAX_BEGINNINGS = 1 << 16
"""Writes whose beginnings are kept, some 10 MB; of a file with more of them the footer is read."""

_AZURE_BLOCK_BYTES = 8 << 20
"""adlfs sends 50 MB at once otherwise, which takes a slow line longer than a store may be silent."""

_AZURE_PATIENCE = {"initial_backoff": 0, "increment_base": 2, "random_jitter_range": 0.25, "total_retries": 5,
                   "connect_retries": 5, "read_retries": 5, "status_retries": 5}  # fmt: skip
"""Azure's own begins with 15 seconds: asked again after 2, 4, 8, 16 and 32 seconds, within the default time."""

_RENEW_SECONDS = 300.0
_ASK_AGAIN_SECONDS = 5.0
_SIGNATURE_SECONDS = 20.0
"""Of a signature: how long before its end another is asked for, as azure-core does; after a failure; waited for."""

_LAST_WAIT_SECONDS = 5.0

_LEAST_BLOCK_BYTES = 128 << 20
_BLOCK_STEP_BYTES = 1 << 20
"""Hadoop's default, and what NameNodes ask of a block's size at least."""

_FROZEN = "CONVERTER_FROZEN_PROCESS"
_MAX_FREEZES = 3
_FEW_OBJECTS = 10_000

_MAX_HEADER_BYTES = 64 << 10
"""A page's header holds, of statistics, at most 4 kB each."""

_MAX_PAGE_BYTES = 1 << 30
"""A page's size is a number of 32 bits."""

_SAMPLE_BYTES = 1 << 20
_LEAST_SAVING = 0.8

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
            file = _open_new(filesystem, directory, PROBE_NAME, num_bytes=0)
            num_bytes = file.write(b"reached")
            close_whole(filesystem, file, path, num_bytes)

        try:
            filesystem = open_filesystem(store)
            _answer_in(_seconds_for(store), lambda: write(filesystem), path)
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
            report = _close_file(file) | {"shapes": shapes}
            # So many files there are where no partition is empty: what is too much then is not even told.
            num_files, heads = partition + 1 + len(reports), file["heads"]
            if heads is not None and num_files * (len(file["end"]) + len(heads)) <= spec["end_bytes"]:
                report["end"] = [base64.b64encode(zlib.compress(part)).decode() for part in (file["end"], heads)]
            reports.append(report)
            file = None

    def write_rows(num_rows: int | None = None) -> None:
        """Write the first `num_rows` pending rows (None: all) as one row group."""
        nonlocal file, pending, pending_rows, pending_bytes
        table = pa.concat_tables([_without_placeholders(part, layout, columns) for part in pending])
        if file is None:
            name = f"part-{partition:05d}-{attempt:08x}-{len(reports):04d}.parquet"
            codecs = _choose_codecs(table) if spec["compression"] == "auto" else spec["compression"]
            # What is written at last is all that there is; else the file ends with a row group beyond its size.
            expected = table.nbytes if num_rows is None else spec["file_bytes"] + 2 * spec["row_group_bytes"]
            file = _open_file(spec, name, _with_shapes(table.schema, layout, columns), codecs, expected)
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
            while pending_rows > 1 and (
                pending_bytes >= 1.5 * spec["row_group_bytes"] or pending_rows > _MAX_ROW_GROUP_ROWS
            ):
                num_rows = max(1, pending_rows * spec["row_group_bytes"] // max(pending_bytes, 1))
                write_rows(min(num_rows, _MAX_ROW_GROUP_ROWS))
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
            shapes, valid = _row_shapes(values), values["valid"]
            first = shapes[np.argmax(valid)] if valid is not None else shapes[0]
            differs = (shapes != (first if before is None else before)).any(axis=1)
            odd_rows[name] = rows_seen + int(np.argmax(differs if valid is None else differs & valid))
    return after


def _row_shapes(values: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The shape of each row, `(rows, ndim)`."""
    if values["shapes"] is not None:
        return np.asarray(values["shapes"])
    if values["shape"] is not None:
        return np.broadcast_to(np.array(values["shape"], np.int64), (len(values["sizes"]), len(values["shape"])))
    return np.asarray(values["sizes"])[:, None]


def _stored(values: dict[str, Any], shape: Any) -> pa.Array:
    """What goes into the file; an array of type null while every row so far was null."""
    if "array" in values:
        return values["array"]
    if values["empty"] and shape is None:
        return pa.nulls(len(values["sizes"]))
    return as_binary(values, fixed=None if shape == "ragged" else shape)


def _without_placeholders(table: pa.Table, layout: dict[str, Any], columns: list[dict[str, Any]]) -> pa.Table:
    """The table with its null columns typed, now that a row group of them must be written."""
    for index, column in enumerate(columns):
        if column["kind"] != "scalar" and pa.types.is_null(table.schema.field(index).type):
            shape = layout.get(column["name"], "ragged")
            width = -1 if shape == "ragged" else int(np.prod(shape)) * np.dtype(column["dtype"]).itemsize
            table = table.set_column(index, column["name"], pa.nulls(table.num_rows, pa.binary(width)))
    return table


def _with_shapes(schema: pa.Schema, layout: dict[str, Any], columns: list[dict[str, Any]]) -> pa.Schema:
    """The schema that says, for each tensor, of what numbers and which shape its bytes are."""
    for index, column in enumerate(columns):
        if column["kind"] != "scalar":
            shape = layout.get(column["name"], "ragged")
            ndim = len(column["shape"]) if column["shape"] is not None else column["ndim"]
            said = {DTYPE_METADATA: column["dtype"], NDIM_METADATA: str(ndim)}
            if shape != "ragged":
                said[SHAPE_METADATA] = json.dumps(list(shape))
            schema = schema.set(index, schema.field(index).with_metadata(said))
    return schema


def open_filesystem(store: dict[str, Any] | None, **more: Any) -> Any:
    """The fsspec filesystem of a store; None for local disks."""
    if store is None:
        return None
    options = store["options"] | more
    if store["protocol"] in ("hdfs", "viewfs"):
        # fsspec's own class of this name needs libhdfs.
        import hdfs_native.fsspec as hdfs

        made = hdfs.HdfsFileSystem if store["protocol"] == "hdfs" else hdfs.ViewfsFileSystem
        options = dict(options)
        user = options.pop("user", None)
        # hdfs-native takes a user from the environment alone, and so for the whole process.
        if user is not None and os.environ.setdefault("HADOOP_USER_NAME", str(user)) != str(user):
            raise ValueError(f"the user {user} is not the one of HADOOP_USER_NAME, and a process can be one of them")
        found = made(**options)
        # Its own takes what follows a `;`, `?` or `#` off a path.
        found._strip_protocol = _plain_path  # type: ignore[method-assign]  # noqa: SLF001
        return found
    import fsspec

    if store["protocol"] == "abfs":
        # In one request: what it sends by default, 50 MB, takes a slow line too long.
        options = {"blocksize": _AZURE_BLOCK_BYTES} | options
    if callable(options.get("credential")) or hasattr(options.get("credential"), "get_token"):
        options = options | {"credential": _async_credential(options["credential"])}
    if callable(options.get("sas_token")):
        options = options | {"credential": _renewed_signature(options["sas_token"]), "sas_token": None}
    found = fsspec.filesystem(store["protocol"], **options)
    policy = getattr(getattr(getattr(found, "service_client", None), "_config", None), "retry_policy", None)
    for name, value in _AZURE_PATIENCE.items():
        if hasattr(policy, name):
            setattr(policy, name, value)
    return found


def _plain_path(path: Any) -> str:
    """A path on HDFS as it is, of a URL the part behind the cluster's name."""
    _, is_url, rest = str(path).partition("://")
    path = "/" + rest.partition("/")[2] if is_url else str(path)
    return path.rstrip("/") or "/"


def _async_credential(provider: Any) -> Any:
    """What adlfs takes for credentials, from a function that gives a token, or from an object of azure-identity.

    It is asked again before a token expires. A text alone does not say when, unless it is a JSON Web Token; then it
    is asked every few minutes.
    """
    import asyncio

    from azure.core.credentials import AccessToken

    def ask(scopes: tuple[str, ...]) -> AccessToken:
        found = provider.get_token(*scopes) if hasattr(provider, "get_token") else provider()
        if isinstance(found, str) and found:
            return AccessToken(found, token_expiry(found))
        if not isinstance(found, tuple) or not found[0]:
            kind = "an empty text" if found == "" else type(found).__name__
            raise TypeError(
                f"storage_options['credential'] gave {kind}, where a token was expected: let it return the token as a "
                "text, or an azure.core.credentials.AccessToken"
            )
        return AccessToken(*found[:2])

    def as_error(error: BaseException) -> Exception:
        # SystemExit and its like would end the loop that all requests run in, and a future refuses StopIteration.
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            return error
        return RuntimeError(f"storage_options['credential'] failed: it raised {type(error).__name__}")

    def ask_beside(scopes: tuple[str, ...]) -> asyncio.Future[AccessToken]:
        """Ask in a thread of its own: it may ask the network, which must not keep the loop, or never come back.

        Not in one of asyncio's, for which the interpreter's end waits.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[AccessToken] = loop.create_future()

        def settle(found: AccessToken | Exception) -> None:
            if answer.done():
                # Nobody waits any more.
                return
            if isinstance(found, Exception):
                answer.set_exception(found)
            else:
                answer.set_result(found)

        def run() -> None:
            found: AccessToken | Exception
            try:
                found = ask(scopes)
            except BaseException as error:  # noqa: BLE001 (raised where the answer is awaited)
                found = as_error(error)
            # The loop may be closed by now.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, found)

        threading.Thread(target=run, name=TOKEN_THREAD, daemon=True).start()
        return answer

    class Credential:
        async def get_token(self, *scopes: str, **_: Any) -> AccessToken:
            if not inspect.iscoroutinefunction(getattr(provider, "get_token", None)):
                return await ask_beside(scopes)
            try:
                return AccessToken(*(await provider.get_token(*scopes))[:2])
            except (Exception, asyncio.CancelledError):
                raise
            except BaseException as error:  # noqa: BLE001 (what is no error becomes one)
                raise as_error(error) from None

        async def close(self) -> None:
            pass

        async def __aenter__(self) -> Credential:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

    return Credential()


def _renewed_signature(provider: Callable[[], str]) -> Any:
    """What adlfs takes for a shared access signature that ends, from a function that gives one.

    It is asked again, in a thread beside, once five minutes are left of a signature, or half of a shorter one's time.
    """
    from azure.core.credentials import AzureSasCredential

    def ask() -> str:
        found = provider()
        if not isinstance(found, str) or "sig=" not in found:
            kind = "a text without sig=" if isinstance(found, str) else type(found).__name__
            raise TypeError(f"storage_options['sas_token'] gave {kind}, where a shared access signature was expected")
        return found.removeprefix("?")

    class Signature(AzureSasCredential):
        def __init__(self) -> None:
            super().__init__(ask())
            self._asking = threading.Lock()
            self._asked = threading.Event()
            self._ends = self._renew_at = 0.0
            self._error: Exception | None = None
            self._take(super().signature)

        @property
        def signature(self) -> str:
            now = time.time()
            if now > self._renew_at and self._asking.acquire(blocking=False):
                self._asked.clear()
                threading.Thread(target=self._renew, name=TOKEN_THREAD, daemon=True).start()
            if now > self._ends:
                # All requests of this process wait: there is none that could be sent. Not for ever, and once.
                if not isinstance(self._error, TimeoutError) and not self._asked.wait(_SIGNATURE_SECONDS):
                    self._error = TimeoutError("storage_options['sas_token'] gives no signature")
                if self._error is not None:
                    raise self._error
            return super().signature

        def _take(self, signature: str) -> None:
            now = time.time()
            self._ends = signature_expiry(signature)
            self._renew_at = now + max(self._ends - now - _RENEW_SECONDS, (self._ends - now) / 2)
            self.update(signature)
            self._error = None

        def _renew(self) -> None:
            try:
                self._take(ask())
            except BaseException as error:  # noqa: BLE001 (raised once the old one has ended)
                ended = RuntimeError(f"storage_options['sas_token'] failed: it raised {type(error).__name__}")
                self._error = error if isinstance(error, Exception) else ended
                # Each request asks again from then on.
                self._renew_at = min(time.time() + _ASK_AGAIN_SECONDS, self._ends)
            finally:
                self._asked.set()
                self._asking.release()

    return Signature()


def signature_expiry(signature: str) -> float:
    """When a shared access signature ends, in seconds since 1970; in ten minutes where it does not say."""
    with contextlib.suppress(ValueError, KeyError):
        # Python 3.10 reads neither a Z nor seven digits.
        text = re.sub(r"\.\d+", "", parse_qs(signature)["se"][0]).replace("Z", "+00:00")
        found = dt.datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=dt.timezone.utc)).timestamp()
    return time.time() + 600


def token_expiry(token: str) -> int:
    """When a token ends, in seconds since 1970: as a JSON Web Token says itself, else in ten minutes.

    azure-core asks for another one five minutes before.
    """
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
        payload = token.split(".")[1]
        expiry = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["exp"]
        return int(expiry)
    return int(time.time()) + 600


def _open_new(filesystem: Any, directory: str, name: str, *, num_bytes: int) -> Any:
    """A new file, to be written from its beginning to its end; of about so many bytes, or fewer.

    On HDFS it is one block: hdfs-native gives a file up when the NameNode is not told of a block before the next but
    one begins, which happens where DataNodes have much to do.
    """
    if filesystem is None:
        os.makedirs(directory, exist_ok=True)
        return open(os.path.join(directory, name), "wb", buffering=0)
    if not is_hdfs(filesystem):
        return filesystem.open(f"{directory}/{name}", "wb")
    filesystem.makedirs(directory, exist_ok=True)
    block_bytes = max(_LEAST_BLOCK_BYTES, -(-num_bytes // _BLOCK_STEP_BYTES) * _BLOCK_STEP_BYTES)
    return filesystem.open(f"{directory}/{name}", "wb", block_size=block_bytes)


def is_hdfs(filesystem: Any) -> bool:
    """Whether it is hdfs-native's."""
    return getattr(filesystem, "protocol", None) in ("hdfs", "viewfs")


def start_beside(call: Callable[[], None], name: str) -> None:
    """Start a thread that may hang in hdfs-native. Nobody waits for it but the interpreter's end, for some seconds.

    Not for ever, because the NameNode may not come back; but a thread that comes back from there while the
    interpreter ends takes the process down (Python unwinds it through Rust, which aborts).
    """

    def run() -> None:
        try:
            call()
        finally:
            atexit.unregister(wait)

    def wait() -> None:
        _ends.append(time.monotonic() + _LAST_WAIT_SECONDS)
        thread.join(max(0.0, _ends[0] - time.monotonic()))

    thread = threading.Thread(target=run, name=name, daemon=True)
    atexit.register(wait)
    thread.start()


_ends: list[float] = []
"""When the interpreter's end has waited long enough, once it waits."""


def _seconds_for(store: dict[str, Any] | None, num_bytes: int = 0) -> float:
    """How long a request that sends so many bytes may take; local disks are waited for."""
    return math.inf if store is None else float(store["timeout_seconds"] + num_bytes / _SLOW_BYTES_PER_SECOND)


def _answer_in(seconds: float, request: Callable[[], Any], path: str) -> Any:
    """What a request to a store returns; one that takes longer is left behind in its thread."""
    if seconds == math.inf:
        return request()
    found: list[Any] = []
    failed: list[BaseException] = []
    is_done = threading.Event()

    def run() -> None:
        try:
            found.append(request())
        except BaseException as error:  # noqa: BLE001 (raised where it is waited for)
            failed.append(error)
        finally:
            is_done.set()

    start_beside(run, REQUEST_THREAD)
    if not is_done.wait(seconds):
        raise _out_of_reach(path, seconds)
    if failed:
        raise failed[0]
    return found[0]


def _out_of_reach(path: str, seconds: float) -> TimeoutError:
    # The path last, because Spark's errors are cut.
    return TimeoutError(f"the store made no progress for {round(seconds, 1):g} seconds (timeout_seconds) at {path}")


def close_whole(filesystem: Any, raw: Any, path: str, num_bytes: int) -> None:
    """Close a new file of so many bytes; returns once the store has it whole.

    hdfs-native asks the NameNode to complete a file a moment before the DataNode has told it of the last block, and
    then waits half a second, a constant, before it asks again. Meanwhile the NameNode is asked here what can be read:
    it counts complete blocks alone, and where those are the whole file, giving up the lease closes it. 5 to 40 ms
    instead of 510 to 540. (Not before: a lease given up while the last block is on its way lets the NameNode recover
    that block, and the file is lost to its writer.)
    """
    if not num_bytes or not is_hdfs(filesystem):
        raw.close()
        return
    client = filesystem.client
    # Of versions that cannot, the NameNode is asked once more in the background; the file is whole already.
    can_give_up = hasattr(client, "recover_lease")
    is_closed = threading.Event()
    failed: list[BaseException] = []

    def close() -> None:
        try:
            raw.close()
        except BaseException as error:  # noqa: BLE001 (raised below, unless the file is whole)
            failed.append(error)
        finally:
            is_closed.set()
        # Else Python closes it again when it is forgotten, and waits for a NameNode that may be gone by then.
        io.IOBase.close(raw)

    start_beside(close, CLOSING_THREAD)
    pause = 0.002
    while not is_closed.wait(pause):
        pause = min(2 * pause, 0.1)
        # What this question fails with says nothing of the file; the closing itself will.
        with contextlib.suppress(Exception):
            if len(client.read(path)) == num_bytes and (not can_give_up or client.recover_lease(path)):
                return
    if failed:
        raise failed[0]


def _remove(filesystem: Any, directory: str, name: str) -> None:
    """Delete a file of ours; does nothing where it is gone."""
    with contextlib.suppress(FileNotFoundError):
        if filesystem is None:
            os.unlink(os.path.join(directory, name))
        else:
            filesystem.rm_file(f"{directory}/{name}")


def _choose_codecs(table: pa.Table) -> dict[str, str]:
    """For each column zstd where that saves a fifth of its first megabyte, else nothing.

    Numbers of a network's or a sensor's hardly become fewer bytes, and undoing it takes longer than to fetch the rest:
    40 columns of random floats from HDFS at 2.6 M rows/s as they are, and 2.3 M in 86 % of the bytes.
    """
    sample = table.slice(0, max(1, _SAMPLE_BYTES * table.num_rows // max(1, table.nbytes)))
    packed = io.BytesIO()
    pq.write_table(sample, packed, compression="zstd", use_dictionary=False, write_statistics=False)
    group = pq.ParquetFile(packed).metadata.row_group(0)
    chunks = [group.column(index) for index in range(group.num_columns)]
    return {
        name: "zstd" if chunk.total_compressed_size <= _LEAST_SAVING * chunk.total_uncompressed_size else "none"
        for name, chunk in zip(table.column_names, chunks, strict=True)
    }


def _open_file(
    spec: dict[str, Any], name: str, schema: pa.Schema, codecs: str | dict[str, str], num_bytes: int
) -> dict[str, Any]:
    """A new Parquet file that counts and digests what passes; a dict, because a class would not travel."""
    store, path = spec["store"], f"{spec['directory']}/{name}"
    # Not in the time of a request: to import a client takes seconds where all tasks begin together.
    filesystem = open_filesystem(store)
    raw = _answer_in(
        _seconds_for(store), lambda: _open_new(filesystem, spec["directory"], name, num_bytes=num_bytes), path
    )
    file: dict[str, Any] = {"name": name, "path": path, "store": store, "filesystem": filesystem, "raw": raw}
    # Of each write, by its place.
    file["beginnings"] = {} if spec.get("end_bytes") else None
    file |= {"bytes": 0, "crc": 0}

    if is_hdfs(filesystem):
        file["write"], file["finish"], file["stop"] = _write_behind(raw, store, path)
    elif filesystem is not None:
        file["write"] = _write_blocks(raw, store, path)

    class Sink:
        """Counts bytes and keeps a running CRC-32, of headers and small pages alone.

        A large page's own CRC-32 stands in the header before it, and once more would cost a tenth of the write.
        """

        closed = False

        def write(self, data: Any) -> int:
            if file.get("is_discarded"):
                # A discarded file's writer ends with a footer that nobody wants.
                return len(data)
            if file["beginnings"] is not None and len(file["beginnings"]) < _MAX_BEGINNINGS:
                file["beginnings"][file["bytes"]] = bytes(memoryview(data)[:_HEAD_BYTES])
            file["bytes"] += len(data)
            if len(data) <= _MAX_HEADER_BYTES:
                file["crc"] = zlib.crc32(data, file["crc"])
            if "footer" in file:
                file["footer"].write(data)
            if filesystem is not None:
                file["write"](data)
                return len(data)
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
            compression=codecs,
            use_dictionary=False,
            # A page for each column and row group: its bytes can be used as they lie in the mapped file.
            data_page_size=_MAX_PAGE_BYTES,
            **_max_rows_per_page(),
            write_statistics=comparable,
            write_page_checksum=True,
            metadata_collector=footers,
        )
    except BaseException:
        _discard(file, [], spec)
        raise
    file |= {"rows": [], "row_group_bytes": [], "digests": [], "nulls": dict.fromkeys(schema.names, 0)}
    return file


def _write_blocks(raw: Any, store: dict[str, Any], path: str) -> Callable[[Any], None]:
    """Write a file that fsspec's filesystem collects and sends itself, block by block: what hands it bytes."""

    def write(data: Any) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _STEP_BYTES):
            hand_over(bytes(view[start : start + _STEP_BYTES]))

    def hand_over(piece: bytes) -> None:
        num_bytes, block_bytes = len(piece), 0
        if hasattr(raw, "blocksize"):
            num_bytes, block_bytes = num_bytes + raw.buffer.tell(), raw.blocksize
        # What fills no block asks nobody.
        seconds = _seconds_for(store, num_bytes) if num_bytes >= block_bytes else math.inf
        _answer_in(seconds, lambda: raw.write(piece), path)

    return write


def _write_behind(
    raw: Any, store: dict[str, Any], path: str
) -> tuple[Callable[[Any], None], Callable[[], None], Callable[[], None]]:
    """Write a file in a thread of its own: what hands it bytes, what waits until all are written, what gives up.

    Meanwhile the next rows are fetched and encoded: 200 MB of binary to HDFS in 1.50 s instead of 1.76 on two cores.
    """
    pieces: deque[bytes] = deque()
    failed: list[BaseException] = []
    changed = threading.Condition()
    num_bytes, is_over = 0, False
    # When the piece was begun that is being written, and how long it may take.
    begun: float | None = None
    seconds = _seconds_for(store)

    def run() -> None:
        nonlocal num_bytes, begun, seconds
        while True:
            with changed:
                changed.wait_for(lambda: pieces or is_over)
                if not pieces:
                    return
                piece = pieces.popleft()
                begun, seconds = time.monotonic(), _seconds_for(store, len(piece))
            try:
                raw.write(piece)
            except BaseException as error:  # noqa: BLE001 (raised where the next piece is handed over)
                with changed:
                    failed.append(error)
                    changed.notify_all()
                return
            with changed:
                num_bytes -= len(piece)
                begun = None
                changed.notify_all()

    def wait_for(is_reached: Callable[[], bool]) -> None:
        """Return once it is; raises what the writing failed with, or that it hangs."""
        while not failed:
            left = seconds if begun is None else begun + seconds - time.monotonic()
            if left <= 0:
                raise _out_of_reach(path, seconds)
            if is_reached():
                return
            changed.wait(left)
        raise failed[0]

    def write(data: Any) -> None:
        nonlocal num_bytes
        # hdfs-native takes a memoryview number by number: 0.1 GB/s, and of bytes 0.5, which pyarrow hands over.
        piece = data if isinstance(data, bytes) else bytes(data)
        with changed:
            wait_for(lambda: num_bytes < _WAITING_BYTES)
            num_bytes += len(piece)
            pieces.append(piece)
            changed.notify_all()

    def end() -> None:
        nonlocal is_over
        with changed:
            is_over = True
            changed.notify_all()

    def finish() -> None:
        end()
        with changed:
            wait_for(lambda: not num_bytes)
        thread.join()

    def stop() -> None:
        pieces.clear()
        end()
        # Nobody waits for a store that hangs.
        thread.join(_LAST_WAIT_SECONDS)

    thread = threading.Thread(target=run, name=WRITING_THREAD, daemon=True)
    thread.start()
    return write, finish, stop


def _max_rows_per_page() -> dict[str, int]:
    """Newer versions of pyarrow begin a new page after 20,000 rows, unless they are told otherwise."""
    name = "max_rows_per_page"
    return {name: _MAX_PAGE_BYTES} if name in inspect.signature(pq.ParquetWriter.__init__).parameters else {}


def _write_row_group(file: dict[str, Any], table: pa.Table) -> None:
    file["writer"].write_table(table, row_group_size=table.num_rows)
    file["rows"].append(table.num_rows)
    file["row_group_bytes"].append(table.nbytes)
    # Taken before the footer, which names the writer's version: the digest is of the rows alone.
    file["digests"].append(f"{file['crc']:08x}")
    for name in table.column_names:
        file["nulls"][name] += table[name].null_count


def _close_file(file: dict[str, Any]) -> dict[str, Any]:
    file["footer"] = io.BytesIO()
    file["writer"].close()
    if "finish" in file:
        file["finish"]()
    raw, num_bytes = file["raw"], file["bytes"]
    # A block that is not full yet, or what hdfs-native has taken and not yet sent.
    unsent_bytes = min(num_bytes, getattr(raw, "blocksize", _STEP_BYTES))
    seconds = _seconds_for(file["store"], unsent_bytes)
    _answer_in(seconds, lambda: close_whole(file["filesystem"], raw, file["path"], num_bytes), file["path"])
    _let_go_of_writer(file)
    file["end"], file["heads"] = end_of(file["footer"]), _heads(file)
    return {
        "name": file["name"],
        "footer_crc32": zlib.crc32(file["end"]),
        "bytes": file["bytes"],
        "rows": file["rows"],
        "row_group_bytes": file["row_group_bytes"],
        "digests": file["digests"],
        "nulls": file["nulls"],
        **sum_footer(file["footers"][0]),
    }


def _let_go_of_writer(file: dict[str, Any]) -> None:
    """Break the circle of writer, sink and file: it runs through C++, where no garbage collector sees it."""
    file.pop("writer", None)


def end_of(file: Any) -> bytes:
    """A Parquet file from its footer on, which names every page's place, size and range: of another file another."""
    file.seek(0, os.SEEK_END)
    num_bytes = file.tell()
    file.seek(max(num_bytes - 8, 0))
    length = int.from_bytes(file.read(4), "little")
    file.seek(max(num_bytes - 8 - length, 0))
    return bytes(file.read())


def head_of(data_page_offset: int, stored_bytes: int) -> tuple[int, int]:
    """Where a column chunk that we wrote begins, and how many bytes of it hold its first page's sizes and checksum."""
    return data_page_offset, min(_HEAD_BYTES, stored_bytes)


def _heads(file: dict[str, Any]) -> bytes | None:
    """The CRC-32 of each chunk's head, four bytes each, row group by row group; None where nobody wants them."""
    if file["beginnings"] is None:
        return None
    footer, found = file["footers"][0], []
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for chunk in map(group.column, range(footer.num_columns)):
            start, num_bytes = head_of(chunk.data_page_offset, chunk.total_compressed_size)
            head = file["beginnings"].get(start, b"")
            # A short header, and the page behind it.
            while 0 < len(head) < num_bytes and (more := file["beginnings"].get(start + len(head))):
                head += more
            if len(head) < num_bytes:
                return None
            found.append(zlib.crc32(head[:num_bytes]))
    return np.array(found, "<u4").tobytes()


def sum_footer(footer: pq.FileMetaData) -> dict[str, Any]:
    """What a file's footer says of its columns over all row groups.

    `column_bytes`: their bytes before they are compressed. `spans`: for columns of single numbers the sum of the row
    groups' ranges, and their least and largest value.
    """
    spans: dict[str, list[float]] = {}
    column_bytes: dict[str, int] = {}
    groups = [footer.row_group(group) for group in range(footer.num_row_groups)]
    for index in range(footer.num_columns):
        column = footer.schema.column(index)
        # A list's numbers lie below the column itself.
        name = column.path if not column.max_repetition_level else column.path.partition(".list.")[0]
        chunks = [group.column(index) for group in groups]
        # Dates and times as the integers that they are stored as: Python's end with the year 9999.
        is_temporal = column.logical_type.type in ("DATE", "TIME", "TIMESTAMP")
        column_bytes[name] = sum(chunk.total_uncompressed_size for chunk in chunks)
        if column.max_repetition_level:
            continue
        for chunk in chunks:
            statistics = chunk.statistics
            if statistics is None or not statistics.has_min_max:
                continue
            bounds = (statistics.min_raw, statistics.max_raw) if is_temporal else (statistics.min, statistics.max)
            if isinstance(bounds[0], (str, bytes)):
                continue
            add_span(spans, name, *map(float, bounds))
    return {"spans": spans, "column_bytes": column_bytes}


def add_span(spans: dict[str, list[float]], name: str, least: float, most: float) -> None:
    """Add a row group's range to those of a column."""
    if np.isfinite(most - least):
        before = spans.get(name, [0.0, least, most])
        spans[name] = [before[0] + most - least, min(before[1], least), max(before[2], most)]


def _discard(file: dict[str, Any] | None, reports: list[dict[str, Any]], spec: dict[str, Any]) -> None:
    """Remove everything this task wrote: nobody will hear of it."""
    if file is not None:
        if "stop" in file:
            file["stop"]()
        if hasattr(file["raw"], "blocksize"):
            # fsspec's: closing it would finish the file.
            file["raw"].closed = True
        elif is_hdfs(file["filesystem"]):
            # Closing it would wait for blocks that nobody wants.
            io.IOBase.close(file["raw"])
        else:
            file["raw"].close()
        file["is_discarded"] = True
        if "writer" in file:
            # Else it would close itself, and complain.
            file["writer"].is_open = False
        _let_go_of_writer(file)
        reports = [*reports, file]
    names = [report["name"] for report in reports]

    def remove() -> None:
        for name in names:
            # Why the files are discarded is to be heard; who sweeps removes what could not be removed.
            with contextlib.suppress(Exception):
                _remove(open_filesystem(spec["store"]), spec["directory"], name)

    if names:
        # Nor does a store that hangs keep the task.
        seconds = math.inf if spec["store"] is None else _LAST_WAIT_SECONDS
        with contextlib.suppress(TimeoutError):
            _answer_in(seconds, remove, spec["directory"])


def encode(array: pa.Array, column: dict[str, Any]) -> dict[str, Any]:
    """One batch of one column, ready to store.

    A scalar gives `array`. A tensor gives `values` (flat numbers, row after row),
    `sizes` (numbers in each row), `valid` (or None), `shape` (None where rows
    differ), `shapes` (then each row's, if it has several dimensions) and `empty` (no
    row has a shape, all are null). Bad data gives `finding`.
    """
    if column["kind"] == "scalar":
        target = _ARROW[column["dtype"]]
        return {"array": array if array.type == target else pc.cast(array, target, safe=False)}
    if column["kind"] == "bytes":
        return _encode_bytes(array, column)
    encoded = {"tensor": _encode_tensor, "vector": _encode_vector, "matrix": _encode_matrix}[column["kind"]](
        array, column
    )
    declared = column["shape"]
    if declared is None or "finding" in encoded or encoded["empty"]:
        return encoded
    if column["ndim"] > 1:
        if encoded["shape"] == tuple(declared):
            return encoded
        shapes, valid = _row_shapes(encoded), encoded["valid"]
        differs = (shapes != np.array(declared)).any(axis=1) if shapes.shape[1] == len(declared) else shapes[:, 0] >= 0
        row = int(np.argmax(differs if valid is None else differs & valid))
        found, expected = f"shape {tuple(shapes[row].tolist())}", f"shape {tuple(declared)}"
        return {"finding": {"kind": "shape", "row": row, "found": found, "expected": expected}}
    size = int(np.prod(declared))
    present = encoded["sizes"] if encoded["valid"] is None else encoded["sizes"][encoded["valid"]]
    wrong = np.flatnonzero(present != size)
    if len(wrong):
        row = wrong[0] if encoded["valid"] is None else np.flatnonzero(encoded["valid"])[wrong[0]]
        found, expected = f"{present[wrong[0]]} numbers", f"{size} numbers"
        return {"finding": {"kind": "shape", "row": int(row), "found": found, "expected": expected}}
    encoded["shape"] = tuple(declared)
    return encoded


def _encode_bytes(array: pa.Array, column: dict[str, Any]) -> dict[str, Any]:
    """Rows of bytes that are little-endian numbers of the declared shape."""
    valid = None if not array.null_count else np.asarray(array.is_valid())
    present = pc.cast(array if valid is None else array.drop_null(), pa.large_binary())
    dtype, row_numbers = np.dtype(column["dtype"]).newbyteorder("<"), math.prod(column["shape"])
    found = np.asarray(pc.binary_length(present))
    wrong = np.flatnonzero(found != row_numbers * dtype.itemsize)
    if len(wrong):
        row = wrong[0] if valid is None else np.flatnonzero(valid)[wrong[0]]
        said = {"found": f"{found[wrong[0]]} bytes", "expected": f"{row_numbers * dtype.itemsize} bytes"}
        return {"finding": {"kind": "shape", "row": int(row), **said}}
    values = np.empty(0, dtype)
    if len(present):
        _, offsets, data = present.buffers()
        start = int(np.frombuffer(offsets, np.int64, count=1, offset=present.offset * 8)[0])
        values = np.frombuffer(data, np.uint8, count=int(found.sum()), offset=start).view(dtype)
    sizes = np.full(len(array), row_numbers) if valid is None else valid * row_numbers
    shape = tuple(column["shape"])
    return {"values": values, "sizes": sizes, "valid": valid, "shape": shape, "shapes": None, "empty": not len(present)}


def _encode_tensor(array: pa.Array, column: dict[str, Any]) -> dict[str, Any]:
    """Nested lists of numbers: every row's shape, and the numbers in C order."""
    valid = None if not array.null_count else np.asarray(array.is_valid())
    outer = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    # How many lists each row has on the level above, and the sizes found on each level.
    level, counts, sizes = array.flatten(), outer, [outer]
    for _ in range(1, column["ndim"]):
        if level.null_count:
            return {"finding": {"kind": "null_element"}}
        lengths = pc.list_value_length(level).to_numpy(zero_copy_only=False).astype(np.int64)
        level = level.flatten()
        if len(lengths) and (lengths == lengths[0]).all():
            own = np.where(counts > 0, lengths[0], 0)
        else:
            own = np.zeros(len(counts), np.int64)
            own[counts > 0] = lengths[(np.cumsum(counts) - counts)[counts > 0]]
            if (lengths != np.repeat(own, counts)).any():
                return {"finding": {"kind": "jagged"}}
        sizes.append(own)
        counts = counts * own
    if level.null_count:
        return {"finding": {"kind": "null_element"}}
    return _encoded(_numbers(level, column["dtype"]), valid, np.stack(sizes, axis=1))


def _encoded(
    values: np.ndarray[Any, Any], valid: np.ndarray[Any, Any] | None, shapes: np.ndarray[Any, Any]
) -> dict[str, Any]:
    """Flat numbers and each row's shape, as `encode` gives them."""
    present = shapes if valid is None else shapes[valid]
    is_uniform = len(present) > 0 and bool((present == present[0]).all())
    return {
        "values": values,
        "sizes": shapes.prod(axis=1),
        "valid": valid,
        "shape": tuple(present[0].tolist()) if is_uniform else None,
        "shapes": shapes if shapes.shape[1] > 1 and not is_uniform else None,
        "empty": not len(present),
    }


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
    return _encoded(values, valid, sizes[:, None])


def _encode_matrix(array: pa.Array, column: dict[str, Any]) -> dict[str, Any]:
    """Matrices: struct<type, numRows, numCols, colPtrs, rowIndices, values, isTransposed>, dense where type is 1.

    Dense values and sparse pointers run along columns, or along rows where the matrix is transposed.
    """
    valid = None if not array.null_count else np.asarray(array.is_valid())
    present = array if valid is None else array.drop_null()

    def plain(name: str) -> np.ndarray[Any, Any]:
        return np.asarray(pc.struct_field(present, [name]).to_numpy(zero_copy_only=False))

    def flat(rows: pa.Array, name: str) -> tuple[pa.Array, np.ndarray[Any, Any]]:
        lists = pc.struct_field(rows, [name])
        return lists.flatten(), pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)

    shapes = np.zeros((len(array), 2), np.int64)
    shapes[slice(None) if valid is None else valid] = np.stack([plain("numRows"), plain("numCols")], axis=1)
    heights, widths = (shapes if valid is None else shapes[valid]).T
    is_sparse, is_transposed = plain("type") != 1, plain("isTransposed").astype(bool)
    numbers, stored = flat(present, "values")
    # Each stored number's row; its line (a column, or a row where the matrix is transposed), and its place there.
    owner = np.repeat(np.arange(len(present)), stored)
    line_length = np.where(is_transposed, widths, heights)[owner]
    within = np.arange(len(owner)) - np.repeat(np.cumsum(stored) - stored, stored)
    line, place = np.divmod(within, np.maximum(line_length, 1))
    if is_sparse.any():
        sparse, of_sparse = present.filter(pa.array(is_sparse)), is_sparse[owner]
        pointers, lengths = flat(sparse, "colPtrs")
        counts = np.diff(pointers.to_numpy(zero_copy_only=False))
        # Between the pointers of two matrices is no line.
        counts = np.delete(counts, np.cumsum(lengths)[:-1] - 1)
        lines = np.arange(len(counts)) - np.repeat(np.cumsum(lengths - 1) - (lengths - 1), lengths - 1)
        line[of_sparse] = np.repeat(lines, counts)
        place[of_sparse] = flat(sparse, "rowIndices")[0].to_numpy(zero_copy_only=False)
    row, column_of_row = np.where(is_transposed[owner], (line, place), (place, line))
    sizes = heights * widths
    values = np.zeros(int(sizes.sum()), np.dtype(column["dtype"]).newbyteorder("<"))
    values[(np.cumsum(sizes) - sizes)[owner] + row * widths[owner] + column_of_row] = _numbers(numbers, column["dtype"])
    return _encoded(values, valid, shapes)


def _numbers(array: pa.Array, dtype: str) -> np.ndarray[Any, Any]:
    """Flat numbers without nulls as a little-endian NumPy array of `dtype`."""
    if pa.types.is_boolean(array.type):
        return np.asarray(pc.cast(array, pa.uint8()))
    values = array.to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(values, dtype=np.dtype(dtype).newbyteorder("<"))


def as_binary(encoded: dict[str, Any], *, fixed: Any) -> pa.Array:
    """A tensor's rows as bytes: FIXED_LEN_BYTE_ARRAY when all have the shape `fixed`, else BINARY.

    In BINARY a row of several dimensions begins with its shape (see `header_bytes`).
    """
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
    if _ndim_of(encoded) > 1:
        values, sizes = _with_headers(encoded)
    offsets = np.concatenate(([0], np.cumsum(sizes) * values.dtype.itemsize))
    if offsets[-1] < 2**31:
        buffers = [validity, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(values)]
        return pa.Array.from_buffers(pa.binary(), num_rows, buffers, null_count)
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.large_binary(), num_rows, buffers, null_count)


def header_bytes(ndim: int) -> int:
    """How long a row's shape is before its numbers: int32 little-endian sizes, filled up to whole eights of bytes."""
    return 0 if ndim == 1 else (4 * ndim + 7) // 8 * 8


def _ndim_of(encoded: dict[str, Any]) -> int:
    """How many dimensions the rows of an encoded tensor have; 1 where nobody can tell."""
    return int(_row_shapes(encoded).shape[1])


def _with_headers(encoded: dict[str, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The numbers with each row's shape before them, as numbers of the same width; and how many each row has now."""
    values, sizes, valid = encoded["values"], encoded["sizes"], encoded["valid"]
    shapes = _row_shapes(encoded)
    present = np.arange(len(sizes)) if valid is None else np.flatnonzero(valid)
    headers = np.zeros((len(present), header_bytes(shapes.shape[1]) // 4), "<i4")
    headers[:, : shapes.shape[1]] = shapes[present]
    headers = headers.view(values.dtype)
    longer = sizes.copy()
    longer[present] += headers.shape[1]
    places = (np.cumsum(longer) - longer)[present][:, None] + np.arange(headers.shape[1])
    whole = np.empty(int(longer.sum()), values.dtype)
    is_number = np.ones(len(whole), bool)
    is_number[places] = False
    whole[places] = headers
    whole[is_number] = values
    return whole, longer


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
