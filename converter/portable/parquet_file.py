"""One Parquet file, written once, counted and digested as it passes."""

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
from converter.portable.filesystems import close_whole, is_hdfs, open_filesystem, open_new, remove_file
from converter.portable.footers import HEAD_BYTES, end_of, heads_of, sum_footer

if TYPE_CHECKING:
    from collections.abc import Callable


_WAITING_BYTES = 32 << 20
"""Of a file on HDFS what may wait to be written before the next page is taken, beside the row group that is encoded."""

_STEP_BYTES = 8 << 20
"""What is handed to a client at once, and what hdfs-native may have taken and not yet sent; a guess."""

_MAX_BEGINNINGS = 1 << 16
"""Writes whose beginnings are kept, some 10 MB; of a file with more of them the footer is read."""

_MAX_HEADER_BYTES = 64 << 10
"""A page's header holds, of statistics, at most 4 kB each."""

_MAX_PAGE_BYTES = 1 << 30
"""A page's size is a number of 32 bits."""

_SAMPLE_BYTES = 1 << 20
_LEAST_SAVING = 0.8


def choose_codecs(table: pa.Table) -> dict[str, str]:
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


def open_parquet_file(
    spec: dict[str, Any], name: str, schema: pa.Schema, codecs: str | dict[str, str], num_bytes: int
) -> dict[str, Any]:
    """A new Parquet file that counts and digests what passes; a dict, because a class would not travel."""
    store, path = spec["store"], f"{spec['directory']}/{name}"
    # Not in the time of a request: to import a client takes seconds where all tasks begin together.
    filesystem = open_filesystem(store)
    raw = answer_in(
        seconds_for(store), lambda: open_new(filesystem, spec["directory"], name, num_bytes=num_bytes), path
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
                file["beginnings"][file["bytes"]] = bytes(memoryview(data)[:HEAD_BYTES])
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
        discard(file, [], spec)
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
        seconds = seconds_for(store, num_bytes) if num_bytes >= block_bytes else math.inf
        answer_in(seconds, lambda: raw.write(piece), path)

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
                raise out_of_reach(path, seconds)
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
        thread.join(LAST_WAIT_SECONDS)

    thread = threading.Thread(target=run, name=WRITING_THREAD, daemon=True)
    thread.start()
    return write, finish, stop


def _max_rows_per_page() -> dict[str, int]:
    """Newer versions of pyarrow begin a new page after 20,000 rows, unless they are told otherwise."""
    name = "max_rows_per_page"
    return {name: _MAX_PAGE_BYTES} if name in inspect.signature(pq.ParquetWriter.__init__).parameters else {}


def write_row_group(file: dict[str, Any], table: pa.Table) -> None:
    """Write a table as one row group."""
    file["writer"].write_table(table, row_group_size=table.num_rows)
    file["rows"].append(table.num_rows)
    file["row_group_bytes"].append(table.nbytes)
    # Taken before the footer, which names the writer's version: the digest is of the rows alone.
    file["digests"].append(f"{file['crc']:08x}")
    for name in table.column_names:
        file["nulls"][name] += table[name].null_count


def close_parquet_file(file: dict[str, Any]) -> dict[str, Any]:
    """Write the footer, and say what the file became: rows, bytes and digests."""
    file["footer"] = io.BytesIO()
    file["writer"].close()
    if "finish" in file:
        file["finish"]()
    raw, num_bytes = file["raw"], file["bytes"]
    # A block that is not full yet, or what hdfs-native has taken and not yet sent.
    unsent_bytes = min(num_bytes, getattr(raw, "blocksize", _STEP_BYTES))
    seconds = seconds_for(file["store"], unsent_bytes)
    answer_in(seconds, lambda: close_whole(file["filesystem"], raw, file["path"], num_bytes), file["path"])
    _let_go_of_writer(file)
    file["end"], file["heads"] = end_of(file["footer"]), heads_of(file)
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


def discard(file: dict[str, Any] | None, reports: list[dict[str, Any]], spec: dict[str, Any]) -> None:
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
                remove_file(open_filesystem(spec["store"]), spec["directory"], name)

    if names:
        # Nor does a store that hangs keep the task.
        seconds = math.inf if spec["store"] is None else LAST_WAIT_SECONDS
        with contextlib.suppress(TimeoutError):
            answer_in(seconds, remove, spec["directory"])
