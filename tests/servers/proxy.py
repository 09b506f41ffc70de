"""A proxy that delays, counts and spoils requests on their way to an HTTP server on this machine.

It passes on what it gets, byte by byte: a signature that a client made for the server stays valid.

Each connection has a thread here, and each request a connection of its own to the server, so that a server that
hangs up between two requests is not noticed.
"""

from __future__ import annotations

import contextlib
import io
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

_CHUNK_BYTES = 2**18
_REASONS = {403: "Forbidden", 429: "Too Many Requests", 500: "Internal Server Error", 503: "Service Unavailable"}
# What Azure's own service calls them.
_CODES = {403: "AuthorizationFailure", 429: "TooManyRequests", 500: "InternalError", 503: "ServerBusy"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as it came; the proxy may have answered it itself."""

    method: str

    path: str
    """With the query, as it was sent."""

    headers: dict[str, str]
    """By their names in lower case."""

    @property
    def range(self) -> str | None:
        """Which bytes it asked for, such as `bytes=0-9`; None where it asked for all of them."""
        return self.headers.get("x-ms-range", self.headers.get("range"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    method: str | None
    path: str
    status: int | None = None
    retry_after_seconds: int | None = None
    after_bytes: int | None = None


class Proxy:
    """Listens from the start to the end of its `with` block.

    `delay_seconds` may be changed at any time. Faults hit the next requests, in the order of the calls: of all
    methods or of one, and with `path` those that have this text in their path or query, such as `comp=blocklist`.
    """

    def __init__(self, server_port: int, *, delay_seconds: float = 0.0, port: int = 0) -> None:
        self.delay_seconds = delay_seconds
        self.requests: list[Request] = []
        """All that came since the start or since `forget`."""
        self.most_at_once = 0
        """How many requests waited for the beginning of their answers at the same time, at most."""
        self._server_port = server_port
        self._faults: deque[_Fault] = deque()
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._is_flowing = threading.Event()
        self._is_flowing.set()
        self._is_closed = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._listener = socket.create_server(("127.0.0.1", port), backlog=256)
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Proxy:
        self._run(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_closed.set()
        self._is_flowing.set()
        # Wakes the thread that accepts; close() alone would not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            for connection in self._sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        while threads := set(self._threads):
            for thread in threads:
                thread.join()
        self._listener.close()

    def count(self, method: str | None = None) -> int:
        """How many requests came, of one method or of all."""
        return sum(method in (None, request.method) for request in list(self.requests))

    def forget(self) -> None:
        """Count anew."""
        with self._lock:
            self.requests.clear()
            self.most_at_once = 0

    def fail_next(
        self,
        count: int = 1,
        *,
        status: int,
        retry_after_seconds: int | None = None,
        method: str | None = None,
        path: str = "",
    ) -> None:
        """Answer the next `count` requests with an error of this status."""
        self._plan(count, _Fault(method=method, path=path, status=status, retry_after_seconds=retry_after_seconds))

    def reset_next(self, count: int = 1, *, method: str | None = None, path: str = "") -> None:
        """Reset the connection of the next `count` requests, of which the server never hears."""
        self._plan(count, _Fault(method=method, path=path))

    def lose_next_answers(
        self, count: int = 1, *, after_bytes: int = 0, method: str | None = None, path: str = ""
    ) -> None:
        """Let the server do what the next `count` requests ask for, and reset the connection while it answers.

        The client gets at most `after_bytes` of the answer's body, and not even its head where they are 0.
        """
        self._plan(count, _Fault(method=method, path=path, after_bytes=after_bytes))

    def heal(self) -> None:
        """Let everything pass that no fault has hit yet."""
        with self._lock:
            self._faults.clear()

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Requests that come in this block are answered after it."""
        self._is_flowing.clear()
        try:
            yield
        finally:
            self._is_flowing.set()

    def _plan(self, count: int, fault: _Fault) -> None:
        with self._lock:
            self._faults.extend([fault] * count)

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._run(self._serve, client)

    def _run(self, function: Callable[..., None], *arguments: object) -> None:
        def run() -> None:
            try:
                function(*arguments)
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="proxy", daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()

    @contextmanager
    def _known(self, connection: socket.socket) -> Iterator[None]:
        """Close the connection after the block, and break it as soon as the proxy is closed."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            with self._lock:
                self._sockets.add(connection)
            if self._is_closed.is_set():
                connection.shutdown(socket.SHUT_RDWR)
            try:
                yield
            finally:
                with self._lock:
                    self._sockets.discard(connection)

    def _serve(self, client: socket.socket) -> None:
        """Answer the requests of one connection, until either side closes it."""
        with contextlib.suppress(OSError), self._known(client), client.makefile("rb") as stream:
            try:
                while self._answer(client, stream):
                    pass
            except (_Reset, OSError):
                # Closing it now sends a reset, as a server that dies would.
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _answer(self, client: socket.socket, stream: io.BufferedReader) -> bool:
        """Answer one request; whether another one may follow."""
        head = _read_head(stream)
        if head is None:
            return False
        fault = self._begin(head)
        with contextlib.ExitStack() as waiting:
            waiting.callback(self._end)
            self._is_closed.wait(self.delay_seconds)
            self._is_flowing.wait()
            if self._is_closed.is_set():
                raise _Reset
            if head.headers.get("expect", "").lower() == "100-continue":
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            if fault is None or fault.after_bytes is not None:
                most_bytes = None if fault is None else fault.after_bytes
                return self._forward(head, client, stream, waiting, most_bytes=most_bytes)
            if fault.status is None:
                raise _Reset
            for _ in _body(stream, head.headers):
                pass
            waiting.close()
            client.sendall(_error(head, fault.status, fault.retry_after_seconds))
            return True

    def _begin(self, head: _Head) -> _Fault | None:
        """Write a request down; the fault that is meant for it."""
        method, path, _ = head.first_line.split(" ", 2)
        with self._lock:
            self.requests.append(Request(method=method, path=path, headers=head.headers))
            self._num_waiting += 1
            self.most_at_once = max(self.most_at_once, self._num_waiting)
            for fault in self._faults:
                if fault.method in (None, method) and fault.path in path:
                    self._faults.remove(fault)
                    return fault
        return None

    def _end(self) -> None:
        with self._lock:
            self._num_waiting -= 1

    def _forward(
        self,
        head: _Head,
        client: socket.socket,
        stream: io.BufferedReader,
        waiting: contextlib.ExitStack,
        *,
        most_bytes: int | None,
    ) -> bool:
        """Let the server answer one request, with at most `most_bytes` of the body."""
        with socket.create_connection(("127.0.0.1", self._server_port)) as server, self._known(server):
            server.sendall(head.text)
            for chunk in _body(stream, head.headers):
                server.sendall(chunk)
            with server.makefile("rb") as answers:
                answer = _read_head(answers)
                if answer is None or most_bytes == 0:
                    raise _Reset
                # Before the client hears of it, and asks for the next one.
                waiting.close()
                client.sendall(answer.text)
                status = int(answer.first_line.split(" ", 2)[1])
                if head.first_line.startswith("HEAD ") or status in (204, 304):
                    return True
                is_measured = "content-length" in answer.headers or "transfer-encoding" in answer.headers
                num_sent = 0
                for chunk in _body(answers, answer.headers, until_closed=not is_measured):
                    if most_bytes is not None and num_sent + len(chunk) >= most_bytes:
                        client.sendall(chunk[: most_bytes - num_sent])
                        raise _Reset
                    client.sendall(chunk)
                    num_sent += len(chunk)
                return is_measured


class _Reset(Exception):  # noqa: N818 (it is no error of ours)
    """The client is to see its connection break."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """What stands before the body of a request or of an answer."""

    text: bytes
    first_line: str
    headers: dict[str, str]


def _read_head(stream: io.BufferedReader) -> _Head | None:
    """None where the other side has closed the connection."""
    lines: list[bytes] = []
    while True:
        line = stream.readline()
        if not line:
            return None
        lines.append(line)
        if line == b"\r\n":
            break
    pairs = (line.decode("latin-1").partition(":") for line in lines[1:-1])
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    text = b"".join(line for line in lines if not line.lower().startswith(b"expect:"))
    return _Head(text=text, first_line=lines[0].decode("latin-1").rstrip(), headers=headers)


def _body(stream: io.BufferedReader, headers: Mapping[str, str], *, until_closed: bool = False) -> Iterator[bytes]:
    """The body as it stands on the wire."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while True:
            line = _line(stream)
            yield line
            num_bytes = int(line.partition(b";")[0], 16)
            if num_bytes == 0:
                break
            yield from _exactly(stream, num_bytes + len(b"\r\n"))
        # The trailers, and the empty line that ends them.
        while line != b"\r\n":
            line = _line(stream)
            yield line
    elif until_closed:
        while chunk := stream.read1(_CHUNK_BYTES):
            yield chunk
    else:
        yield from _exactly(stream, int(headers.get("content-length", "0")))


def _line(stream: io.BufferedReader) -> bytes:
    line = stream.readline()
    if not line:
        raise _Reset
    return line


def _exactly(stream: io.BufferedReader, num_bytes: int) -> Iterator[bytes]:
    left = num_bytes
    while left:
        chunk = stream.read1(min(left, _CHUNK_BYTES))
        if not chunk:
            raise _Reset
        left -= len(chunk)
        yield chunk


def _error(head: _Head, status: int, retry_after_seconds: int | None) -> bytes:
    """An error as Azure's blobs answer it."""
    code = _CODES.get(status, "Unknown")
    content = f'<?xml version="1.0" encoding="utf-8"?><Error><Code>{code}</Code><Message>Told to.</Message></Error>'
    lines = [
        f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}",
        f"x-ms-error-code: {code}",
        "Content-Type: application/xml",
        f"Content-Length: {len(content)}",
    ]
    if retry_after_seconds is not None:
        lines.append(f"Retry-After: {retry_after_seconds}")
    body = "" if head.first_line.startswith("HEAD ") else content
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode()
