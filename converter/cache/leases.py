"""Signs of life: who uses or writes an entry, and whether they still live."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from converter.cache.roots import ATTEMPT_PATTERN, LEASE_PATTERN
from converter.storage.directory import FileInfo, Storage

logger = logging.getLogger(__name__)

RENEW_SECONDS = 60.0
"""How often a lease is renewed; after three missed renewals it is dead."""
HURRY_SECONDS = 5.0
"""How long a store is waited for once something has gone wrong, or somebody was interrupted."""

_LAST_RENEWAL_SECONDS = 5.0
"""How long a renewal under way is waited for by who gives the lease back; guessed. One that takes longer hangs."""


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """A sign of life in an entry: a reader's lease or a writer's intent."""

    entry: Storage
    name: str
    content: bytes
    lost: bool = False
    """Somebody took it for dead and swept it."""

    given_up: threading.Event = field(default_factory=threading.Event)
    """Set once it is given back: a renewal that is still under way is not wanted any more."""

    @property
    def place(self) -> str:
        """The cache directory that it is in, by its URL."""
        return self.entry.url.rpartition("/")[0]


def release(lease: Lease) -> None:
    """End a lease or an intent."""
    heartbeat.remove(lease)
    lease.entry.delete_file(lease.name)


def release_if_any(lease: Lease | None) -> None:
    """`release`, where there is a lease."""
    if lease is not None:
        release(lease)


def put_lease(entry: Storage, attempt_id: str) -> Lease:
    """Say in an entry that this process reads it."""
    content = sign_of_life(attempt_id, "")
    lease = Lease(entry=entry, name=f"lease-{uuid.uuid4().hex}.json", content=content)
    put_sign(lease)
    heartbeat.add(lease)
    return lease


def put_sign(lease: Lease) -> None:
    """Let a sign of life appear; nobody else has its name."""
    if not lease.entry.put_if_absent(lease.name, lease.content):
        raise FileExistsError(f"{lease.entry.url}/{lease.name} exists already")


def held_now(entry: Storage) -> set[str]:
    """The attempts that somebody alive uses or writes, looked at now."""
    if not any(_is_sign(info) for info in entry.list()):
        return set()
    try:
        # The time first: who was held up between the two would else take a lease for older than it is.
        now = entry.now()
    except FileNotFoundError:
        # The folder is gone, so nothing in it is held.
        return set()
    return held_attempts(entry, entry.list(), now=now)


def held_attempts(entry: Storage, infos: list[FileInfo], *, now: float) -> set[str]:
    """The attempts that somebody alive uses or writes, by a listing that is not older than `now`."""
    held: set[str] = set()
    for info in infos:
        if _is_sign(info) and not is_dead(entry, info, now=now):
            match = ATTEMPT_PATTERN.fullmatch(info.name)
            sign = {"attempt": match[1]} if match else _read_sign(entry, info.name)
            if sign is None:
                # Given back in between.
                continue
            if isinstance(sign.get("attempt"), str):
                held.add(sign["attempt"])
            else:
                # Its content is on its way: it may be of any of them.
                held.update(found[1] for found in map(ATTEMPT_PATTERN.fullmatch, (one.name for one in infos)) if found)
    return held


def _is_sign(info: FileInfo) -> bool:
    return not info.is_directory and bool(LEASE_PATTERN.fullmatch(info.name) or info.name.endswith(".intent"))


def is_dead(entry: Storage, info: FileInfo, *, now: float) -> bool:
    """Whether the process behind a sign of life is gone: known on this host, guessed elsewhere from its silence."""
    if now - info.modified > 3 * RENEW_SECONDS:
        return True
    sign = _read_sign(entry, info.name) or {}
    if sign.get("host") != this_host():
        return False
    pid = sign.get("pid")
    return not isinstance(pid, int) or _process_start(pid) != sign.get("process_start")


def _read_sign(entry: Storage, name: str) -> dict[str, Any] | None:
    """What a sign of life says, which may be nothing yet; None where it is gone."""
    try:
        sign = json.loads(entry.read(name))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        return {}
    return sign if isinstance(sign, dict) else {}


def sign_of_life(attempt_id: str, application_id: str) -> bytes:
    """What a lease says of its owner."""
    sign = {
        "attempt": attempt_id,
        "host": this_host(),
        "pid": os.getpid(),
        "process_start": _process_start(os.getpid()),
        "application_id": application_id,
        "created": time.time(),
    }
    return json.dumps(sign).encode()


def this_host() -> str:
    """This machine and process namespace: within one, process numbers can be compared."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            parts.append(file.read().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)


def _process_start(pid: int) -> str | None:
    """When a process began, in the kernel's ticks, so that a reused number is told apart; None where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        if os.path.isdir("/proc/self"):
            return None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            return "?"
        return "?"
    return None if fields[0] in ("Z", "X") else fields[19]


class _Heartbeat:
    """One thread for each cache directory, which renews this process's leases there and ends with the last of them.

    No lock is held while a store is asked, so one that hangs keeps nobody waiting but its own thread.
    """

    def __init__(self) -> None:
        self.forget_parent()

    def forget_parent(self) -> None:
        """Begin anew: in a forked child neither the threads nor the leases, nor a lock that was held, are its own."""
        self._condition = threading.Condition()
        self._leases: set[Lease] = set()
        self._renewing: set[Lease] = set()
        self._threads: dict[str, threading.Thread] = {}

    def add(self, lease: Lease) -> None:
        place = lease.place
        with self._condition:
            self._leases.add(lease)
            if place not in self._threads:
                thread = threading.Thread(target=self._run, args=(place,), name="converter-heartbeat", daemon=True)
                thread.start()
                self._threads[place] = thread

    def remove(self, lease: Lease) -> None:
        """Renew it no more; does nothing the second time."""
        place, thread = lease.place, None
        with self._condition:
            self._leases.discard(lease)
            if all(other.place != place for other in self._leases):
                thread = self._threads.pop(place, None)
                self._condition.notify_all()
            # A renewal under way comes first: after the lease is deleted it could bring the file back.
            self._condition.wait_for(lambda: lease not in self._renewing, timeout=_LAST_RENEWAL_SECONDS)
            lease.given_up.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def renew(self, place: str | None = None) -> None:
        """Renew every lease once, or those of one cache directory."""
        with self._condition:
            leases = [lease for lease in self._leases if place in (None, lease.place)]
        for lease in leases:
            with self._condition:
                if lease not in self._leases or lease in self._renewing or lease.lost:
                    continue
                # Said under the lock, so that who gives the lease back either is seen here or sees this.
                self._renewing.add(lease)
            try:
                self._renew(lease)
            finally:
                with self._condition:
                    self._renewing.discard(lease)
                    self._condition.notify_all()

    def _renew(self, lease: Lease) -> None:
        try:
            lease.entry.touch(lease.name, lease.given_up)
        except OSError as error:
            with self._condition:
                if lease not in self._leases:
                    return
                lease.lost = isinstance(error, FileNotFoundError)
            if lease.lost:
                logger.warning("%s/%s was taken for dead and swept.", lease.entry.url, lease.name)
            else:
                logger.warning("Could not renew %s/%s: %s", lease.entry.url, lease.name, error)

    def _run(self, place: str) -> None:
        own = threading.current_thread()
        while True:
            with self._condition:
                if self._condition.wait_for(lambda: self._threads.get(place) is not own, timeout=RENEW_SECONDS):
                    return
            self.renew(place)


heartbeat = _Heartbeat()
os.register_at_fork(after_in_child=heartbeat.forget_parent)
