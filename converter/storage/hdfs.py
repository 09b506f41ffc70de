"""HDFS, through hdfs-native (no JVM, no libhdfs): which failures are transient, and how a file is created whole."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa

from converter.garbage import keep_garbage_of_parents
from converter.portable.filesystems import close_whole
from converter.storage.ranges import Data
from converter.storage.store import TIMEOUT_SECONDS, NotOpenedError, Store
from converter.storage.urls import split_url

_TRANSIENT_SIGNS = ("DataTransferError", "All DataNodes failed", "Connection", "SafeModeException", "StandbyException")
"""In the texts of hdfs-native's errors, which have no classes."""
_MAX_KEPT_READERS = 256


class HdfsStore(Store):
    """An HDFS cluster, or the mounts of viewfs."""

    survives_fork = False
    is_native = True
    _used_by: int | None = None

    def __init__(self, options: Mapping[str, Any], *, protocol: str, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        super().__init__(options, protocol=protocol, timeout_seconds=timeout_seconds)
        self._readers: dict[str, Any] = {}

    @property
    def user(self) -> str | None:
        """The user of the options or of the URL; None for the one of the environment, as for Hadoop's clients."""
        user = self.options.get("user")
        return None if user is None else str(user)

    def is_transient(self, error: BaseException) -> bool:
        """Also true for the errors that hdfs-native raises while nodes are away or the NameNode starts."""
        return super().is_transient(error) or (
            isinstance(error, (RuntimeError, OSError)) and any(sign in str(error) for sign in _TRANSIENT_SIGNS)
        )

    def path_of(self, url: str) -> str | None:
        """The path of a URL on this filesystem; a URL without a cluster's name is on it."""
        scheme, netloc, path = split_url(url)
        place, host, port = urlsplit(f"//{netloc}"), self.options.get("host"), self.options.get("port")
        # Without a cluster's name, or a port, the one of Hadoop's configuration is meant.
        is_named = place.hostname is not None and host is not None
        is_other = is_named and (place.hostname != host or (place.port or port) != (port or place.port))
        return None if scheme != self.protocol or is_other else path

    def _why_silent(self) -> str:
        # hdfs-native retries by itself, and does not say why.
        host, port = self.options.get("host"), self.options.get("port")
        if host is not None and port is not None:
            try:
                socket.create_connection((str(host), int(port)), timeout=1).close()
            except OSError as error:
                return f": {host}:{port} answers {error.strerror or error}"
        return ""

    def _open(self) -> Any:
        # Its threads stay in the parent: a forked child that used them would hang.
        if HdfsStore._used_by not in (None, os.getpid()):
            raise OSError(
                "hdfs-native does not work in a process that was forked from one that used it. Start processes anew, "
                "e.g. with multiprocessing_context='spawn'."
            )
        keep_garbage_of_parents()
        HdfsStore._used_by = os.getpid()
        try:
            return super()._open()
        except RuntimeError as error:
            if self.options.get("port") is not None or "InvalidArgument" not in str(error):
                raise
            raise NotOpenedError(f"{self._not_configured()} ({self._text(error)})") from error

    def _not_configured(self) -> str:
        """What to do if hdfs-native finds no cluster to ask."""
        host = self.options.get("host") or ""
        place = f"{self.protocol}://{host or '/'}"
        if self.protocol == "viewfs":
            return f"{place} needs mounts: let HADOOP_CONF_DIR name the folder of the core-site.xml that has them"
        if not host:
            return (
                f"{place} takes the cluster from Hadoop's configuration: let HADOOP_CONF_DIR name the folder of "
                "core-site.xml and hdfs-site.xml, or write hdfs://host:port/…"
            )
        return (
            f"{place} has no port, and is no name service that Hadoop's configuration knows: write the NameNode's, "
            f"as in {place}:8020/…, or let HADOOP_CONF_DIR name the folder of the hdfs-site.xml that has it"
        )

    def _create(self, filesystem: Any, path: str, data: bytes) -> None:
        # A new file is seen before its content; a rename without overwriting is one step of the NameNode.
        from hdfs_native import WriteOptions

        aside = f"{path}.{uuid.uuid4().hex}.tmp"
        try:
            file = filesystem.client.create(aside, WriteOptions(overwrite=False))
            if data:
                file.write(data)
            close_whole(filesystem, file, aside, len(data))
            filesystem.client.rename(aside, path, overwrite=False)
        except BaseException:
            with contextlib.suppress(Exception):
                filesystem.client.delete(aside)
            raise

    def _named(self, error: Exception, path: str) -> OSError:
        named = super()._named(error, path)
        return PermissionError(*named.args) if "AccessControlException" in str(error) else named

    def cat_file(self, path: str, given_up: threading.Event | None = None) -> bytes:
        """The bytes of a file."""

        def read(filesystem: Any) -> bytes:
            reader = filesystem.client.read(path)
            # hdfs-native panics if it is asked for more than there is.
            return bytes(reader.read_range(0, len(reader))) if len(reader) else b""

        return self.ask(read, path=path, given_up=given_up)

    def read_range(self, path: str, start: int, end: int, given_up: threading.Event | None = None) -> Data:
        """A part of a file; fewer bytes if the file ends before.

        Piece by piece into Arrow's pool, whose memory is warm: 1.3 GB/s; hdfs-native's `read_range` gives new pages
        each time, 0.9 GB/s. The NameNode is asked once where a file is, and again once a part cannot be read.
        """

        def read(filesystem: Any) -> pa.Buffer:
            reader = self._readers.get(path)
            try:
                if reader is None:
                    reader = filesystem.client.read(path)
                last = min(end, len(reader))
                part = pa.allocate_buffer(max(0, last - start))
                view, num_bytes = memoryview(part).cast("B"), 0
                for piece in reader.read_range_stream(start, part.size) if part.size else ():
                    view[num_bytes : num_bytes + len(piece)] = piece
                    num_bytes += len(piece)
            except BaseException:
                self._readers.pop(path, None)
                raise
            if num_bytes != part.size:
                raise ConnectionError(f"{num_bytes} bytes came, expected {part.size}")
            if len(self._readers) >= _MAX_KEPT_READERS:
                self._readers.clear()
            self._readers[path] = reader
            return part

        return self.ask(read, path=path, given_up=given_up)

    def ls(self, path: str, detail: bool = True) -> list[dict[str, Any]]:
        """What a directory holds; times in seconds, as on other stores."""
        return [_with_mtime(info) for info in super().ls(path, detail)]

    def info(self, path: str, given_up: threading.Event | None = None) -> dict[str, Any]:
        """Size, kind and time of a file."""
        return _with_mtime(super().info(path, given_up))

    def renew(self, path: str, given_up: threading.Event | None = None, within: float = math.inf) -> None:
        """Append nothing, so that the NameNode sets its own time."""
        self.ask(lambda filesystem: filesystem.client.append(path).close(), path=path, given_up=given_up, within=within)


def _with_mtime(info: dict[str, Any]) -> dict[str, Any]:
    return info | {"mtime": info["modification_time"] / 1000}
