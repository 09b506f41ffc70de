"""Leases: which processes use or write an entry, and whether they are still alive.

A lease is a small file in the entry, renewed by one thread for each cache directory. A process is dead if it is gone
from this host, or if it missed three renewals.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from converter.cache.roots import ATTEMPT_PATTERN, LEASE_PATTERN
from converter.signals import is_of_handler
from converter.storage.directory import FileInfo, Storage

logger = logging.getLogger(__name__)

RENEW_SECONDS = 60.0
"""How often a lease is renewed; after three missed renewals it is dead."""
HURRY_SECONDS = 5.0
"""How long to wait for a store after an error or an interrupt."""

_TAKE_OVER_SECONDS = 10.0
"""How long the other processes of a host have to put a lease in place of one whose owner is gone; a guess."""

_MOST_LOOKS = 10
"""How often an entry is listed again because a lease was released in between; a guess."""

_MAX_CLOCKS = 10
_MAX_PID = 1 << 31
"""What Linux's numbers of processes stay below. 0 and less would mean many processes."""

_UNKNOWN = "?"
"""When a process began, if that cannot be seen."""

_RENEWAL_SECONDS = 20.0
"""How long a renewal waits for an answer (a guess): a request that hangs must leave time for others in good time."""

_LEASES_FOR_A_THREAD, _MOST_THREADS = 10, 7
"""More threads than the cache directory's own renew leases if there are many: on a slow store each takes half a second,
and 180 seconds after its last renewal a lease counts as dead."""

_LAST_RENEWAL_SECONDS = 5.0
"""How long `release` waits for a renewal under way; a guess. A renewal that takes longer hangs."""


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """A file in an entry that shows that this process is alive: a reader's lease or a writer's intent."""

    entry: Storage
    name: str
    content: bytes
    lost: bool = False
    """A sweep took this process for dead and removed the file."""

    is_late: bool = False
    """Whether its last renewal failed, which was said."""

    on_lost: Callable[[], None] = lambda: None
    """Called when it is lost."""

    on_renewed: Callable[[], None] = lambda: None
    """Called each time that it was renewed."""

    given_up: threading.Event = field(default_factory=threading.Event)
    """Set by `release`: cancels a renewal that is still under way."""

    @property
    def root_url(self) -> str:
        """The URL of the cache that it is in."""
        return self.entry.url.rpartition("/")[0]


def release(lease: Lease) -> None:
    """Stop renewing a lease or an intent, and remove its file."""
    heartbeat.remove(lease)
    lease.entry.delete_file(lease.name)


def put_lease(entry: Storage, attempt_id: str, *, is_shared: bool = False) -> Lease:
    """Mark an entry as read by this process, and by others of its host if `is_shared`."""
    content = _sign_of_life(attempt_id, "", is_shared=is_shared)
    return _put(Lease(entry=entry, name=f"lease-{uuid.uuid4().hex}.json", content=content))


def put_intent(entry: Storage, attempt_id: str, application_id: str) -> Lease:
    """Mark an attempt as written by this process."""
    content = _sign_of_life(attempt_id, application_id)
    return _put(Lease(entry=entry, name=f"data-{attempt_id}.intent", content=content))


def _put(lease: Lease) -> Lease:
    try:
        is_new = lease.entry.put_if_absent(lease.name, lease.content)
    except BaseException as error:
        if not isinstance(error, Exception) or is_of_handler(error):
            # Interrupted: a store may have it by now, and nobody would remove it.
            with contextlib.suppress(OSError), lease.entry.hurried(HURRY_SECONDS):
                lease.entry.delete_file(lease.name)
        raise
    if not is_new:
        raise FileExistsError(f"{lease.entry.url}/{lease.name} exists already")
    try:
        heartbeat.add(lease)
    except BaseException:
        # For example no thread can be started.
        with contextlib.suppress(OSError):
            release(lease)
        raise
    return lease


def held_now(entry: Storage, infos: list[FileInfo] | None = None) -> set[str]:
    """The attempts that live processes use or write, by a fresh listing, unless `infos`, just listed, show none."""
    tries_left = _MAX_CLOCKS
    while any(_is_sign(info) for info in (entry.list() if infos is None else infos)):
        infos = None
        try:
            # The time first: a delay between the two must not make a lease look older than it is.
            now = entry.now()
        except FileNotFoundError:
            # The folder is gone, or this process stood still and a sweep removed the file of its clock.
            tries_left -= 1
            if not tries_left:
                raise
            continue
        return held_attempts(entry, entry.list(), now=now)
    return set()


def held_attempts(entry: Storage, infos: list[FileInfo], *, now: float, looks_left: int = _MOST_LOOKS) -> set[str]:
    """The attempts that live processes use or write, by a listing that is not older than `now`."""
    attempt_of = {info.name: match[1] for info in infos if (match := ATTEMPT_PATTERN.fullmatch(info.name))}
    held: set[str] = set()
    for info in infos:
        if _is_sign(info) and not is_dead(entry, info, now=now):
            sign = {"attempt": attempt_of[info.name]} if info.name in attempt_of else read_sign(entry, info.name)
            if sign is None and looks_left and entry.size(info.name) is None:
                # Released in between, maybe because another process of its host put one instead: look again.
                return held_attempts(entry, entry.list(), now=now, looks_left=looks_left - 1)
            if sign is not None and isinstance(sign.get("attempt"), str):
                held.add(sign["attempt"])
            else:
                # Its content is still being written, or was denied: it may hold any attempt.
                held.update(attempt_of.values())
    return held


def _is_sign(info: FileInfo) -> bool:
    return not info.is_directory and bool(LEASE_PATTERN.fullmatch(info.name) or info.name.endswith(".intent"))


def is_dead(entry: Storage, info: FileInfo, *, now: float) -> bool:
    """Whether the owner of a lease or an intent is gone: certain on this host, else guessed from its silence.

    A lease on which other processes of this host count is dead later: one of them may be about to put another.
    """
    if now - info.modified > 3 * RENEW_SECONDS:
        return True
    sign = read_sign(entry, info.name) or {}
    if sign.get("host") != this_host():
        return False
    if _may_run(sign.get("pid"), sign.get("process_start")):
        return False
    return not sign.get("is_shared") or now - info.modified > RENEW_SECONDS + _TAKE_OVER_SECONDS


def read_sign(entry: Storage, name: str) -> dict[str, Any] | None:
    """The content of a lease or an intent, empty while it is being written; None if the file is gone."""
    try:
        sign = json.loads(entry.read(name))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        return {}
    return sign if isinstance(sign, dict) else {}


def _sign_of_life(attempt_id: str, application_id: str, *, is_shared: bool = False) -> bytes:
    """The content of a lease: the attempt that it holds, and its owner."""
    sign = {
        "attempt": attempt_id,
        "host": this_host(),
        "pid": os.getpid(),
        "process_start": process_start(os.getpid()),
        "application_id": application_id,
        "created": time.time(),
        "is_shared": is_shared,
    }
    return json.dumps(sign).encode()


def this_host() -> str:
    """A name of this machine and process namespace: within one, process numbers can be compared."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            parts.append(file.read().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)


def _may_run(pid: Any, begun: Any) -> bool:
    """Whether a process of this host may still run; if that cannot be seen, only its silence tells."""
    found = process_start(pid) if type(pid) is int and 0 < pid < _MAX_PID else None
    return found is not None and (found == begun or _UNKNOWN in (found, begun or _UNKNOWN))


def process_start(pid: int) -> str | None:
    """When a process began, in the kernel's ticks, so that a reused number is noticed.

    None if it is gone, "?" if that cannot be seen.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        # There is no /proc, or it hides the processes of other users.
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except OSError:
            pass
        return _UNKNOWN
    except OSError:
        # For example too many open files.
        return _UNKNOWN
    return None if fields[0] in ("Z", "X") else fields[19]


def _say_late(lease: Lease, error: BaseException) -> None:
    """Log that a renewal has failed, unless the one before had."""
    is_said, lease.is_late = lease.is_late, True
    if not is_said:
        logger.warning("Could not renew %s/%s, tried again soon: %s", lease.entry.url, lease.name, error)


class _Heartbeat:
    """Renews this process's leases: one thread for each cache directory, which ends with the last lease there.

    No lock is held during a request, so a store that hangs delays only its own thread.
    """

    def __init__(self) -> None:
        self.forget_parent()

    def forget_parent(self) -> None:
        """Start anew in a forked child, which owns neither the threads, nor the leases, nor a lock that was held."""
        # Its lock is taken without it: a Ctrl-C inside of Condition.__enter__, which is Python, leaves it held.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._leases: set[Lease] = set()
        self._renewing: set[Lease] = set()
        self._threads: dict[str, threading.Thread] = {}

    def add(self, lease: Lease) -> None:
        root_url = lease.root_url
        with self._lock:
            self._leases.add(lease)
            if root_url not in self._threads:
                thread = threading.Thread(target=self._run, args=(root_url,), name="converter-heartbeat", daemon=True)
                thread.start()
                self._threads[root_url] = thread

    def remove(self, lease: Lease) -> None:
        """Stop renewing a lease; does nothing the second time."""
        thread = None
        with self._lock:
            self._leases.discard(lease)
            if all(other.root_url != lease.root_url for other in self._leases):
                thread = self._threads.pop(lease.root_url, None)
                self._condition.notify_all()
            # A renewal under way comes first: after the lease is deleted it could bring the file back.
            self._condition.wait_for(lambda: lease not in self._renewing, timeout=_LAST_RENEWAL_SECONDS)
            lease.given_up.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def renew(self, root_url: str | None = None) -> bool:
        """Renew every lease once, or those of one cache directory. Returns whether none is to be tried again soon."""
        with self._lock:
            leases = [lease for lease in self._leases if root_url in (None, lease.root_url)]
        left, are_renewed = iter(leases), True

        def renew_left() -> None:
            nonlocal are_renewed
            for lease in left:
                if not self._renew_held(lease):
                    are_renewed = False

        threads = [
            threading.Thread(target=renew_left, name="converter-heartbeat", daemon=True)
            for _ in range(min(len(leases) // _LEASES_FOR_A_THREAD, _MOST_THREADS))
        ]
        # Without a new thread this one renews all.
        with contextlib.suppress(RuntimeError):
            for thread in threads:
                thread.start()
        renew_left()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        return are_renewed

    def _renew_held(self, lease: Lease) -> bool:
        """Renew a lease, unless it was removed. Returns whether it is not to be tried again soon."""
        with self._lock:
            if lease not in self._leases or lease in self._renewing or lease.lost:
                return True
            # Under the lock: `remove` either happened before, or waits for this renewal.
            self._renewing.add(lease)
        try:
            return self._renew(lease)
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)) or is_of_handler(error):
                raise
            # A client's panic, or a user's handler of logs. The other leases need this thread.
            with contextlib.suppress(Exception):
                _say_late(lease, error)
            return False
        finally:
            with self._lock:
                self._renewing.discard(lease)
                self._condition.notify_all()

    def _renew(self, lease: Lease) -> bool:
        try:
            lease.entry.touch(lease.name, lease.given_up, _RENEWAL_SECONDS)
        except OSError as error:
            with self._lock:
                if lease not in self._leases:
                    return True
                lease.lost = isinstance(error, FileNotFoundError)
            if lease.lost:
                lease.on_lost()
                logger.warning(
                    "%s/%s was taken for dead and swept: its data may be gone. Convert again.",
                    lease.entry.url,
                    lease.name,
                )
            else:
                _say_late(lease, error)
            return lease.lost
        lease.is_late = False
        lease.on_renewed()
        return True

    def _run(self, root_url: str) -> None:
        own, seconds = threading.current_thread(), RENEW_SECONDS
        while True:
            with self._lock:
                if self._condition.wait_for(lambda: self._threads.get(root_url) is not own, timeout=seconds):
                    return
            began = time.monotonic()
            are_renewed = self.renew(root_url)
            # The first of many is due again while the last one is renewed.
            seconds = max(HURRY_SECONDS, RENEW_SECONDS - (time.monotonic() - began)) if are_renewed else HURRY_SECONDS


heartbeat = _Heartbeat()
os.register_at_fork(after_in_child=heartbeat.forget_parent)
