"""Writes one Parquet file, once; counts and digests its bytes on their way to the disk or the store."""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import threading
import time
import zlib
from collections import deque
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from converter.portable.deadlines import LAST_WAIT_SECONDS, WRITING_THREAD, answer_in, out_of_reach, seconds_for
from converter.portable.filesystems import (
    close_whole,
    is_gone,
    is_hdfs,
    mark_closed,
    open_filesystem,
    open_new,
    remove_file,
    unsent_bytes,
)
from converter.portable.footers import HEAD_BYTES, end_of, heads_of, sum_footer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from converter.portable.records import FileReport, OpenFile, StoreSpec, WriteSpec

_WAITING_BYTES = 32 << 20
"""Bytes queued for an HDFS file before the encoder blocks."""

_STEP_BYTES = 8 << 20
"""The most that a client is handed at once, and that hdfs-native may hold unsent; a guess."""

_MAX_BEGINNINGS = 1 << 16
"""Writes whose beginnings are kept, some 10 MB. Readers of a file with more writes read its footer."""

_MAX_HEADER_BYTES = 64 << 10
"""More than any page's header, whose statistics hold at most 4 kB each."""

_MAX_PAGE_BYTES = 1 << 30
"""A page's size is a number of 32 bits."""

_SAMPLE_BYTES, _LEAST_SAVING = 1 << 20, 0.2


def choose_codecs(table: pa.Table) -> dict[str, str]:
    """For each column zstd if that saves a fifth of its first megabyte, else no compression.

    Decompressing random floats costs more than fetching the rest: 40 columns of them are read from HDFS at 2.6 M rows/s
    uncompressed, and at 2.3 M in 86 % of the bytes.
    """
    sample = table.slice(0, max(1, _SAMPLE_BYTES * table.num_rows // max(1, table.nbytes)))
    packed = io.BytesIO()
    pq.write_table(sample, packed, compression="zstd", use_dictionary=False, write_statistics=False)
    group = pq.ParquetFile(packed).metadata.row_group(0)
    chunks = [group.column(index) for index in range(group.num_columns)]
    return {
        # A column's name, unless it is a list: then its elements' place below it.
        chunk.path_in_schema: "zstd"
        if chunk.total_compressed_size <= (1 - _LEAST_SAVING) * chunk.total_uncompressed_size
        else "none"
        for chunk in chunks
    }


def open_parquet_file(
    spec: WriteSpec, name: str, schema: pa.Schema, codecs: str | dict[str, str], num_bytes: int
) -> OpenFile:
    """A new Parquet file of about `num_bytes`, ready for `write_row_group`."""
    store, path = spec["store"], f"{spec['directory']}/{name}"
    # Outside the time of the request: importing a client takes seconds when all tasks begin together.
    filesystem = open_filesystem(store)
    raw = answer_in(
        seconds_for(store), lambda: open_new(filesystem, spec["directory"], name, num_bytes=num_bytes), path
    )
    file: OpenFile = {
        "name": name, "path": path, "store": store, "filesystem": filesystem, "raw": raw,
        "beginnings": {} if spec["end_bytes"] else None, "bytes": 0, "crc": 0, "footers": [],
        "rows": [], "row_group_bytes": [], "digests": [], "nulls": dict.fromkeys(schema.names, 0),
    }  # fmt: skip
    if store is not None and is_hdfs(filesystem):
        file["write"], file["finish"], file["stop"] = _write_behind(raw, store, path)
    elif store is not None:
        file["write"] = _write_blocks(raw, store, path)

    class Sink:
        """Counts bytes and keeps a running CRC-32 of headers and small pages.

        A large page's own CRC-32 stands in its header. To compute it again would cost a tenth of the write.
        """

        closed = False

        def write(self, data: Any) -> int:
            if file.get("is_discarded"):
                # A discarded file's writer ends with a footer all the same.
                return len(data)
            beginnings = file["beginnings"]
            if beginnings is not None and len(beginnings) < _MAX_BEGINNINGS:
                beginnings[file["bytes"]] = bytes(memoryview(data)[:HEAD_BYTES])
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
            metadata_collector=file["footers"],
        )
    except BaseException:
        discard(file, [], spec)
        raise
    return file


def _write_blocks(raw: Any, store: StoreSpec, path: str) -> Callable[[Any], None]:
    """The function that hands bytes to a file that fsspec collects and sends block by block."""

    def write(data: Any) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _STEP_BYTES):
            hand_over(bytes(view[start : start + _STEP_BYTES]))

    def hand_over(piece: bytes) -> None:
        collected_bytes, block_bytes = unsent_bytes(raw, 0)
        num_bytes = collected_bytes + len(piece)
        # Bytes that fill no block are kept in memory, without a request.
        seconds = seconds_for(store, num_bytes) if num_bytes >= block_bytes else math.inf
        answer_in(seconds, lambda: raw.write(piece), path)

    return write


def _write_behind(
    raw: Any, store: StoreSpec, path: str
) -> tuple[Callable[[Any], None], Callable[[], None], Callable[[], None]]:
    """Write a file in a thread of its own; returns functions that hand it bytes, wait for all of them, and give up.

    Meanwhile the next rows are fetched and encoded: 200 MB of binary to HDFS in 1.50 s instead of 1.76 on two cores.
    """
    pieces: deque[bytes] = deque()
    errors: list[BaseException] = []
    changed = threading.Condition()
    num_bytes, is_over = 0, False
    # When the piece that is being written was begun, and how long it may take.
    begun: float | None = None
    seconds = seconds_for(store)

    def run() -> None:
        nonlocal num_bytes, begun, seconds
        while True:
            with changed:
                changed.wait_for(lambda: pieces or is_over)
                if not pieces:
                    return
                piece = pieces.popleft()
                begun, seconds = time.monotonic(), seconds_for(store, len(piece))
            try:
                raw.write(piece)
            except BaseException as error:  # noqa: BLE001 (raised where the next piece is handed over)
                with changed:
                    errors.append(error)
                    changed.notify_all()
                return
            with changed:
                num_bytes -= len(piece)
                begun = None
                changed.notify_all()

    def wait_for(is_reached: Callable[[], bool]) -> None:
        """Return once it is reached; raises the error of the writing, or TimeoutError if it hangs."""
        while not errors:
            left = seconds if begun is None else begun + seconds - time.monotonic()
            if left <= 0:
                raise out_of_reach(path, seconds)
            if is_reached():
                return
            changed.wait(left)
        raise errors[0]

    def write(data: Any) -> None:
        nonlocal num_bytes
        # hdfs-native copies a memoryview number by number, at 0.1 GB/s; bytes at 0.5.
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
        # A store that hangs is not waited for.
        thread.join(LAST_WAIT_SECONDS)

    thread = threading.Thread(target=run, name=WRITING_THREAD, daemon=True)
    thread.start()
    return write, finish, stop


def _max_rows_per_page() -> dict[str, int]:
    """Newer versions of pyarrow begin a new page after 20,000 rows, unless they are told otherwise."""
    name = "max_rows_per_page"
    return {name: _MAX_PAGE_BYTES} if name in inspect.signature(pq.ParquetWriter.__init__).parameters else {}


def write_row_group(file: OpenFile, table: pa.Table) -> None:
    """Write a table as one row group."""
    file["writer"].write_table(table, row_group_size=table.num_rows)
    file["rows"].append(table.num_rows)
    file["row_group_bytes"].append(table.nbytes)
    # The digest covers the rows alone, without the footer, which names the writer's version.
    file["digests"].append(f"{file['crc']:08x}")
    for name in table.column_names:
        file["nulls"][name] += table[name].null_count


def close_parquet_file(file: OpenFile) -> FileReport:
    """Write the footer; reports the file's rows, bytes and digests."""
    file["footer"] = io.BytesIO()
    file["writer"].close()
    if "finish" in file:
        file["finish"]()
    raw, num_bytes = file["raw"], file["bytes"]
    seconds = seconds_for(file["store"], min(num_bytes, unsent_bytes(raw, _STEP_BYTES)[1]))
    answer_in(seconds, lambda: close_whole(file["filesystem"], raw, file["path"], num_bytes), file["path"])
    _release_writer(file)
    spans, column_bytes = sum_footer(file["footers"][0])
    return {
        "name": file["name"],
        "footer_crc32": zlib.crc32(end_of(file["footer"])),
        "bytes": file["bytes"],
        "rows": file["rows"],
        "row_group_bytes": file["row_group_bytes"],
        "digests": file["digests"],
        "nulls": file["nulls"],
        "spans": spans,
        "column_bytes": column_bytes,
    }


def ends_of(file: OpenFile) -> tuple[bytes, bytes] | None:
    """A closed file's footer and the checksums of its pages' heads; None if these were not collected."""
    heads = heads_of(file)
    return None if heads is None else (end_of(file["footer"]), heads)


def _release_writer(file: OpenFile) -> None:
    """Break the circle of writer, sink and file: it runs through C++, where no garbage collector sees it."""
    file.pop("writer", None)


def _stop_writer(file: OpenFile) -> None:
    """Let the writer of a discarded file end in silence.

    Reaches into: pyarrow.parquet.ParquetWriter.is_open (pyarrow 26).
    Without it: the writer closes itself when it is collected, and Python prints the error that this raises.
    """
    if "writer" in file:
        file["writer"].is_open = False
    _release_writer(file)


def is_given_up(spec: WriteSpec) -> bool:
    """Whether the driver has given up this write, so that nobody will list or delete its files."""
    path = spec["intent"]
    if path is None:
        return False
    try:
        filesystem = open_filesystem(spec["store"])
        return answer_in(seconds_for(spec["store"]), lambda: is_gone(filesystem, path), path)
    except TimeoutError:
        return False


def discard(file: OpenFile | None, reports: Sequence[FileReport], spec: WriteSpec) -> None:
    """Remove all files of this task: its reports will not arrive."""
    names = [report["name"] for report in reports]
    if file is not None:
        if "stop" in file:
            file["stop"]()
        if file["store"] is None:
            file["raw"].close()
        else:
            # Closing it would finish the file, or wait for its blocks.
            mark_closed(file["raw"])
        file["is_discarded"] = True
        _stop_writer(file)
        names.append(file["name"])

    def remove() -> None:
        if file is not None and hasattr(file["raw"], "discard"):
            # S3 keeps the parts that it has until it is told to forget them.
            with contextlib.suppress(Exception):
                file["raw"].discard()
        for name in names:
            # The error that discards the files must be seen, not this one; a sweep removes what is left.
            with contextlib.suppress(Exception):
                remove_file(open_filesystem(spec["store"]), spec["directory"], name)

    if names:
        # A store that hangs must not keep the task.
        seconds = math.inf if spec["store"] is None else LAST_WAIT_SECONDS
        with contextlib.suppress(TimeoutError):
            answer_in(seconds, remove, spec["directory"])
