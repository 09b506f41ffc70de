"""What goes wrong at the n-th call of a store: it fails, hangs, is answered late, cut, with what was before, or twice.

Time is virtual where a store is waited for.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SECRET = "hunter2-of-the-store"
"""An option of the stores in memory, which their errors tell, as those of some clients do."""

READS = {"ls", "info", "cat", "stat", "map"}
LOOK_SECONDS, HANG_SECONDS = 0.002, 2.5
"""How often a call is looked at, and what passes meanwhile if it hangs."""

_FIRST_TIME = 1_700_000_000.0


class Clock:
    """Seconds that pass by themselves, and all at once by sleeping and by waiting for a call that hangs."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def monotonic(self) -> float:
        return self._skipped + time.monotonic()

    def sleep(self, seconds: float) -> None:
        self._skipped += seconds

    def time(self) -> float:
        return _FIRST_TIME + self._skipped + time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


clock = Clock()
hanging: set[int] = set()
"""The threads whose call hangs."""


class CrashError(BaseException):
    """The process dies: raised at this call and at each later one, so that nothing it tries has an effect."""


class AnswerError(Exception):
    """What the clients of S3 and Azure raise for a status, each with its own attribute."""

    def __init__(self, status: int, code: str, store: str, secret: str) -> None:
        super().__init__(f"{code} (key={secret})")
        if store == "s3":
            self.response = {"ResponseMetadata": {"HTTPStatusCode": status}, "Error": {"Code": code}}
        else:
            self.status_code = status


def _os_error(number: int) -> Callable[[str, str], Exception]:
    return lambda *_: OSError(number, os.strerror(number))


ERRORS: dict[str, dict[str, Callable[[str, str], Exception]]] = {
    "remote": {
        "reset": lambda _, secret: ConnectionResetError(f"connection of {secret} was reset"),
        "throttled": lambda store, secret: AnswerError(503, "SlowDown", store, secret),
        "refused": lambda _, secret: PermissionError(f"not with the key {secret}"),
        "forbidden": lambda store, secret: AnswerError(403, "AccessDenied", store, secret),
        "broken": lambda _, secret: OSError(f"the server broke for {secret}"),
        "odd": lambda _, secret: RuntimeError(f"odd answer to {secret}"),
        "missing": lambda *_: FileNotFoundError("not there"),
        "exists": lambda *_: FileExistsError("there already"),
    },
    "local": {
        name: _os_error(number)
        for name, number in {
            "input-output": errno.EIO,
            "refused": errno.EACCES,
            "full": errno.ENOSPC,
            "stale-handle": errno.ESTALE,
            "read-only": errno.EROFS,
            "timeout": errno.ETIMEDOUT,
            "missing": errno.ENOENT,
            "no-directory": errno.ENOTDIR,
            "a-directory": errno.EISDIR,
            "exists": errno.EEXIST,
            "too-many": errno.EMFILE,
        }.items()
    },
}

_ON_DISK = {"throttled": "full", "forbidden": "read-only", "reset": "stale-handle", "odd": "too-many"}
"""What an error of a store is on the disk beside it."""

KINDS = {
    "remote": (
        "before",
        "before",
        "after",
        "after",
        "hang",
        "late",
        "late",
        "slow",
        "cut",
        "stale",
        "twice",
        "rival",
        "crash",
    ),
    "local": (
        "before",
        "before",
        "before",
        "after",
        "after",
        "after",
        "slow",
        "cut",
        "stale",
        "twice",
        "rival",
        "crash",
    ),
}
"""How calls go wrong; those that are named twice are drawn twice as often. A disk has no deadline, so none hangs."""


@dataclass(kw_only=True)
class Fault:
    """What happens to the `at`-th call that it can happen to, from 0."""

    kind: str
    at: int
    error: str = "broken"

    lasts: bool = False
    """Also to all later ones, to the end of the step."""

    age: int = 1
    """How many changes ago it was, what a stale answer tells; or after how many calls a late one has its effect."""

    rival: str = "sweep"
    """What another process does just before the call."""

    num_calls: int = 0
    has_fired: bool = False

    @property
    def is_lie(self) -> bool:
        """Whether it denies or forges what is there. Stores with one such answer are rare; with two of them, nothing
        that is deleted after a look can be safe."""
        return self.kind in ("stale", "cut") or self.error in ("missing", "no-directory", "exists")

    def can_happen(self, call: str, store: str, *, is_beside: bool) -> bool:
        """`is_beside`: the call is not of this store, but of the disk that copies of it are kept on."""
        if is_beside and self.kind not in ("before", "after", "slow", "crash"):
            return False
        if self.kind == "stale":
            # S3 before December 2020, Swift and gateways with replicas answer so; NFS, from its cache of attributes.
            return call in ("ls", "info", "cat")
        if self.kind == "cut":
            # A proxy that closes early; on disks, and where files grow as they are written, a writer that is cut off.
            return call == "cat" or (call in ("close", "write") and store in ("folders", "local"))
        if self.kind == "twice":
            # A client, or NFS, that asks again after the answer was lost.
            return call not in READS and call not in ("open", "write", "lock")
        if self.kind in ("before", "after") and self.error == "exists":
            return call in ("put", "mkdir", "open")
        return True


class Faults:
    """The faults of a case, and the calls that they happen to."""

    def __init__(self, store: str = "local", rivals: Mapping[str, Callable[[], None]] | None = None) -> None:
        self.store, self._rivals = store, rivals or {}
        self.armed: list[Fault] = []
        self.fired: list[Fault] = []
        self.told: list[str] = []
        """Which calls went wrong, and how."""

        self.num_calls = 0
        self._lock = threading.RLock()
        self._num_off = 0
        self.own = threading.local()
        """Of each thread: whether it is inside a call, and the secret that its client has."""

        self._waiting: list[tuple[list[int], threading.Event, threading.Event]] = []
        self._given_up: list[threading.Event] = []

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """No call goes wrong in the block: other processes make it, or the test."""
        with self._lock:
            self._num_off += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_off -= 1

    def end_step(self) -> None:
        """Let late calls have their effect, those that hang end, and what lasts pass."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            given_up, self._given_up = self._given_up, []
            self.armed = [fault for fault in self.armed if not fault.has_fired]
        for event in given_up:
            event.set()
        for _, begins, has_ended in waiting:
            begins.set()
            has_ended.wait(10)

    def call(
        self,
        call: str,
        path: str,
        effect: Callable[[], Any],
        past: Callable[[int], Any] | None = None,
        *,
        is_disk: bool = False,
    ) -> Any:
        """One call of a client: its effect, unless a fault happens to it."""
        if self._num_off or getattr(self.own, "is_inside", False):
            return effect()
        fault, landing = self._next(call, path, is_beside=is_disk and self.store != "local")
        for begins, has_ended in landing:
            begins.set()
            has_ended.wait(10)
        self.own.is_inside = True
        try:
            return effect() if fault is None else self._go_wrong(fault, call, effect, past, is_disk=is_disk)
        finally:
            self.own.is_inside = False

    def _next(
        self, call: str, path: str, *, is_beside: bool
    ) -> tuple[Fault | None, list[tuple[threading.Event, threading.Event]]]:
        with self._lock:
            self.num_calls += 1
            landing = []
            for waiting in list(self._waiting):
                waiting[0][0] -= 1
                if waiting[0][0] <= 0:
                    self._waiting.remove(waiting)
                    landing.append(waiting[1:])
            for fault in self.armed:
                if (fault.has_fired and not fault.lasts) or not fault.can_happen(call, self.store, is_beside=is_beside):
                    continue
                fault.num_calls += 1
                if fault.num_calls > fault.at:
                    fault.has_fired = True
                    self.fired.append(fault)
                    self.told.append(f"{fault.kind} ({fault.error}) at {call} {path}")
                    return fault, landing
            return None, landing

    def _go_wrong(
        self, fault: Fault, call: str, effect: Callable[[], Any], past: Callable[[int], Any] | None, *, is_disk: bool
    ) -> Any:
        if fault.kind == "crash":
            raise CrashError
        if fault.kind == "before":
            raise self._error(fault, is_disk=is_disk)
        if fault.kind == "after":
            answer = effect()
            if is_disk and call == "open":
                # The caller does not get it.
                close = functools.partial(os.close, answer) if isinstance(answer, int) else answer.close
                close()
            raise self._error(fault, is_disk=is_disk)
        if fault.kind == "slow":
            clock.sleep(15.0)
            return effect()
        if fault.kind == "hang":
            self._hang(None)
            raise ConnectionResetError("ended at last")
        if fault.kind == "late":
            has_ended = threading.Event()
            try:
                self._hang((fault.age, has_ended))
                return effect()
            finally:
                has_ended.set()
        if fault.kind == "stale":
            return effect() if past is None else past(fault.age)
        if fault.kind == "twice":
            effect()
            return effect()
        if fault.kind == "rival":
            with self.off():
                self.own.is_inside = False
                self._rivals[fault.rival]()
            return effect()
        assert fault.kind == "cut"
        answer = effect()
        if isinstance(answer, bytes):
            return answer[: len(answer) // 2]
        if isinstance(answer, Halved):
            answer.halve()
            raise ConnectionResetError("cut off")
        return answer

    def _error(self, fault: Fault, *, is_disk: bool) -> Exception:
        errors = ERRORS["local" if is_disk else "remote"]
        make = errors.get(fault.error) or errors[_ON_DISK.get(fault.error, "input-output")]
        return make(self.store, getattr(self.own, "secret", ""))

    def _hang(self, late: tuple[int, threading.Event] | None) -> None:
        begins = threading.Event()
        with self._lock:
            if late is None:
                self._given_up.append(begins)
            else:
                self._waiting.append(([late[0]], begins, late[1]))
        hanging.add(threading.get_ident())
        begins.wait(30)
        hanging.discard(threading.get_ident())


class Halved:
    """The answer of a call that wrote something, which can be cut."""

    def __init__(self, halve: Callable[[], None]) -> None:
        self.halve = halve
