"""One lease for the processes that a launcher has started on this host, instead of one for each.

The first of them to open an entry puts the lease and renews it. The others connect to it through the kernel, by a Unix
socket without a file, and ask the store for no lease. They notice at once when it ends: then one of them puts a lease
of its own. Who releases the lease while others still read waits until that is done, so the entry is held all the time.
If the first one renews it no more, because it is stopped or cannot reach the store, each of them puts a lease in time.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

from converter.cache import leases
from converter.cache.leases import RENEW_SECONDS, Lease, put_lease, release
from converter.errors import CacheError
from converter.living import Living
from converter.shards import count_processes_of_host
from converter.storage.directory import Storage

logger = logging.getLogger(__name__)

_JOIN_SECONDS = 60.0
"""How long a process waits for the first one, which asks the store meanwhile; then it takes a lease of its own."""

_HAND_OVER_SECONDS = 30.0
"""How long one that ends waits for the leases of those that count on it: a slow store's time (a guess). Those that have
ended, too, are not waited for."""

_SAY_SECONDS = 10.0
_LOOK_SECONDS = 0.1

_SILENT_SECONDS = 2 * RENEW_SECONDS
"""After two renewals of which the others hear nothing they put leases: after the third, the entry may be swept."""

_RETRY_SECONDS = 0.01
_WAITING = 1024
"""Processes of a host that may wait for the first one."""

_LEAVING, _LOST, _RENEWED = b"l", b"x", b"r"


def is_shared() -> bool:
    """Whether this process is one of several of a launcher on this host, and may share a lease with them."""
    # Only Linux has sockets without a file.
    return sys.platform == "linux" and (count_processes_of_host() or 1) > 1


def is_held_here(entry: Storage) -> bool:
    """Whether another process of this host and user, started by the same launcher, is about to hold an entry, or does.

    It has seen that this package made the folder, so that the store need not be asked for it once more.
    """
    if not is_shared():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        try:
            connection.connect(_address_of(entry))
        except OSError:
            return False
        return _user_of(connection) == os.getuid()


def _address_of(entry: Storage) -> bytes:
    content = f"{os.getuid()} {leases.this_host()} {entry.url}"
    return b"\0converter-" + hashlib.sha256(content.encode()).hexdigest().encode()


class HostLease:
    """This process's part in the lease of its host on an entry.

    `find` looks for the process that holds it. If there is none, this process must call `put` and, once it has seen
    that the entry is whole, `share`.
    """

    def __init__(self, entry: Storage, attempt_id: str) -> None:
        self._entry, self._attempt_id = entry, attempt_id
        self._address = _address_of(entry)
        self._lock = threading.Lock()
        self._own: Lease | None = None
        self._listener: socket.socket | None = None
        self._holder: socket.socket | None = None
        """The connection to the process that holds the lease."""

        self._others: list[socket.socket] = []
        """The connections of those that count on this process."""

        self._threads: list[threading.Thread] = []
        self._is_released = self._is_lost = False
        _open.add(self)

    @property
    def lost(self) -> bool:
        """Whether a sweep took the holder for dead and removed the file."""
        return self._is_lost or (self._own is not None and self._own.lost)

    @property
    def is_elsewhere(self) -> bool:
        """Whether another process of this host holds the lease."""
        return self._holder is not None

    def find(self) -> bool:
        """Connect to the process that holds the lease and return True, or get ready to `put` it."""
        until = time.monotonic() + _JOIN_SECONDS
        while time.monotonic() < until and not self._is_released:
            if self._bind():
                return False
            with contextlib.suppress(ConnectionError):
                holder = self._connected(until)
                # Set first: the thread that watches it removes it again.
                self._holder = holder
                if holder is None or self._begin(self._watch, holder):
                    return holder is not None
                self._holder = None
                return False
            # The holder has just ended.
            time.sleep(_RETRY_SECONDS)
        return False

    def put(self) -> None:
        """Put the lease on the store."""
        self._own = put_lease(self._entry, self._attempt_id, is_shared=True)
        self._own.on_lost = lambda: self._say(_LOST)
        self._own.on_renewed = lambda: self._say(_RENEWED)

    def share(self) -> None:
        """Let the other processes of this host count on the lease."""
        if self._listener is not None:
            self._begin(self._welcome, self._listener)

    def release(self) -> bool:
        """End this process's part; whether another process goes on holding the lease.

        That one may be about to end as well, but does so after this call has begun. A second call has no effect, and
        does not know.
        """
        with self._lock:
            is_elsewhere = self._holder is not None
            if self._is_released:
                return False
            # From now on no thread begins.
            self._is_released = True
        for connection in (self._holder, self._listener):
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        # Who connects now finds nobody, and puts a lease.
        self._unbind()
        self._hand_over()
        if self._own is not None:
            release(self._own)
        return is_elsewhere

    def _hand_over(self) -> None:
        """Wait until those that count on this process hold a lease of their own."""
        until = time.monotonic() + _HAND_OVER_SECONDS
        for other in self._others:
            with contextlib.suppress(OSError):
                other.send(_LEAVING, socket.MSG_DONTWAIT)
        for other in self._others:
            with contextlib.suppress(OSError):
                other.settimeout(max(_RETRY_SECONDS, until - time.monotonic()))
                other.recv(1)
            other.close()

    def _bind(self) -> bool:
        """Let others connect to this process; False if another process has the address."""
        # Kept before it has the address, so that a child that is forked meanwhile closes its copy.
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(self._address)
            self._listener.listen(_WAITING)
        except OSError:
            self._unbind()
            return False
        return True

    def _unbind(self) -> None:
        """Let nobody connect any more: those that wait for an answer look for another process."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _connected(self, until: float) -> socket.socket | None:
        """A connection to the process that holds a lease on this attempt; None if that is another attempt's.

        Raises:
            ConnectionError: it has ended.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if not self._connect(connection, until):
                connection.close()
                return None
            # Any user may take a name that is no file.
            answer = self._answer_of(connection, until) if _user_of(connection) == os.getuid() else b"?"
        except BaseException:
            connection.close()
            raise
        if answer == self._attempt_id.encode():
            connection.settimeout(None)
            return connection
        connection.close()
        if not answer:
            raise ConnectionResetError
        return None

    def _connect(self, connection: socket.socket, until: float) -> bool:
        """Connect with the process at the address; False if it takes nobody in time: so many wait that none may queue.

        Raises:
            ConnectionError: there is none.
        """
        connection.setblocking(False)
        while not self._is_released and time.monotonic() < until:
            with contextlib.suppress(BlockingIOError):
                connection.connect(self._address)
                return True
            time.sleep(_RETRY_SECONDS)
        return False

    def _answer_of(self, connection: socket.socket, until: float) -> bytes:
        """What the holder answers once it has seen that the entry is whole; `?` if it does not."""
        connection.settimeout(_LOOK_SECONDS)
        say_at = time.monotonic() + _SAY_SECONDS
        while not self._is_released and (now := time.monotonic()) < until:
            with contextlib.suppress(TimeoutError):
                return connection.recv(len(self._attempt_id))
            if now > say_at:
                say_at = until
                logger.warning(
                    "Another process of this host is opening %s, and this one has waited for it for %.0f seconds. "
                    "After %.0f seconds it takes a lease of its own.",
                    self._entry.url, _SAY_SECONDS, _JOIN_SECONDS,
                )  # fmt: skip
        return b"?"

    def _begin(self, work: Callable[[socket.socket], None], connection: socket.socket) -> bool:
        """Start a thread, unless the lease was released."""
        with self._lock:
            if self._is_released:
                connection.close()
                return False
            thread = threading.Thread(target=work, args=(connection,), name="converter-host-lease", daemon=True)
            self._threads.append(thread)
            thread.start()
            return True

    def _welcome(self, listener: socket.socket) -> None:
        """Answer the processes that connect, until the lease is released."""
        while True:
            try:
                other, _ = listener.accept()
            except OSError:
                # Released, or this process has too many open files.
                listener.close()
                return
            with self._lock:
                if self._is_released:
                    other.close()
                    return
                with contextlib.suppress(OSError):
                    other.send(self._attempt_id.encode())
                self._others = [*filter(_is_connected, self._others), other]

    def _watch(self, holder: socket.socket) -> None:
        """Wait for the end of the process that holds the lease, then put another one."""
        is_silent = False
        holder.settimeout(_SILENT_SECONDS)
        try:
            while (said := holder.recv(1)) in (_LOST, _RENEWED):
                self._is_lost = self._is_lost or said == _LOST
        except TimeoutError:
            is_silent = True
        except OSError:
            pass
        try:
            self._take_over(is_silent=is_silent)
        except (OSError, CacheError) as error:
            logger.warning("This process holds no lease on %s any more: %s", self._entry.url, error)
        finally:
            # The one who leaves waits for this.
            holder.close()

    def _take_over(self, *, is_silent: bool) -> None:
        with self._lock:
            self._holder = None
            if self._is_released:
                return
        # A silent holder still has the address to which others connect.
        if not is_silent and (self.find() or self._is_released):
            return
        try:
            self.put()
        except BaseException:
            self._unbind()
            raise
        self.share()

    def _say(self, what: bytes) -> None:
        with self._lock:
            for other in self._others:
                # One that is stopped for long may take no more.
                with contextlib.suppress(OSError):
                    other.send(what, socket.MSG_DONTWAIT)

    def forget_parent(self) -> None:
        """Close the copies of a forked child: a connection ends with the last process that has it."""
        for connection in (self._listener, self._holder, *self._others):
            if connection is not None:
                connection.close()


def _is_connected(connection: socket.socket) -> bool:
    """Whether the other end still lives; else the connection is closed here."""
    try:
        connection.setblocking(False)
        is_over = connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        is_over = False
    except OSError:
        is_over = True
    if is_over:
        connection.close()
    else:
        connection.setblocking(True)
    return not is_over


def _user_of(connection: socket.socket) -> int:
    """The user of the process at the other end: any user may take a name that is no file."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", credentials)[1]
    return user


_open: Living[HostLease] = Living()


def _forget_parents() -> None:
    for lease in _open:
        lease.forget_parent()


os.register_at_fork(after_in_child=_forget_parents)
