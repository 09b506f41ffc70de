"""Sets confs of a Spark session for a while and restores them; threads that do so at once share them.

A conf belongs to the whole session. The first block that changes it notes what it was, the last one that ends gives
that back. In between the newest word holds; of numbers the smallest one, because they bound memory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from converter.signals import is_of_handler
from converter.sources.spark.session import after_interrupt, ends_all, has_broken_off, is_spark_away, java_packages

logger = logging.getLogger(__name__)

_REDACTED = "(redacted)"
"""What `SET` says of values that may be secrets."""


@dataclass(slots=True)
class _Change:
    """A conf that some blocks have changed."""

    explicit: str | None
    """What the user had set; None if nothing."""

    wanted: dict[object, str] = field(default_factory=dict)
    """What each block wants, the newest last."""

    @property
    def value(self) -> str:
        values = list(self.wanted.values())
        return min(values, key=int) if all(value.isdigit() for value in values) else values[-1]


_changes: dict[tuple[object, str], _Change] = {}
"""Of each session and name."""

_lock = threading.RLock()
"""Not a plain lock: a signal handler may convert, too."""


@contextlib.contextmanager
def changed_confs(session: Any, wanted: Mapping[str, str]) -> Iterator[None]:
    """Set session confs for a while; one that the platform refuses stays as it is."""
    block, owner = object(), _identity_of(session)
    held: list[str] = []
    is_away = False
    interruption: BaseException | None = None
    try:
        for name, value in wanted.items():
            try:
                # Noted before, for a signal handler may raise once it is set.
                held.append(name)
                with _lock:
                    change = _changes.get((owner, name)) or _Change(session.conf.get(name, None))
                    _changes[owner, name] = change
                    change.wanted[block] = value
                    session.conf.set(name, change.value)
            except Exception as error:
                if ends_all(error):
                    raise
                # Each platform refuses with an error of its own.
                logger.debug("Spark keeps %s as it is: %s", name, error)
                _forget(owner, held.pop(), block)
        yield
    except Exception as error:
        is_away = is_spark_away(error) and not has_broken_off(error)
        raise
    finally:
        while held and not is_away:
            name = held[-1]
            try:
                is_away = _give_back(session, owner, name, block)
                held.pop()
            except BaseException as error:  # noqa: BLE001 (all confs must be restored first)
                if interruption is not None:
                    # Once more was enough: a timer that comes again and again must not keep us here.
                    _forget(owner, held.pop(), block)
                interruption = error
        if held:
            logger.warning("Spark cannot be reached, so these confs were not restored: %s", ", ".join(held))
        for name in held:
            _forget(owner, name, block)
        if interruption is not None:
            raise interruption


def users_confs(session: Any) -> dict[str, str]:
    """The confs that are set, without what blocks of `changed_confs` have changed just now."""
    owner = _identity_of(session)
    with _lock:
        confs = {row[0]: row[1] for row in session.sql("SET").collect()}
        for name, value in confs.items():
            if _REDACTED in value:
                # So are some that are no secrets, such as the name of a column. Only a digest is kept.
                hidden = session.conf.get(name, None)
                confs[name] = hashlib.sha256(str(hidden).encode()).hexdigest()
        for (other, name), change in _changes.items():
            if other == owner:
                confs.pop(name, None)
                if change.explicit is not None:
                    confs[name] = change.explicit
    return confs


def _give_back(session: Any, owner: object, name: str, block: object) -> bool:
    """Restore a conf and forget the block's; whether Spark is away. Raises only what is to be raised in the end."""
    is_away = False
    try:
        after_interrupt(functools.partial(_restore, session, owner, name, block))
    except Exception as error:
        if is_of_handler(error):
            raise
        logger.warning("Could not restore the conf %s: %s", name, error)
        is_away = is_spark_away(error)
    _forget(owner, name, block)
    return is_away


def _restore(session: Any, owner: object, name: str, block: object) -> None:
    """Set a conf to what the other blocks want; to what it was if there are none."""
    with _lock:
        change = _changes.get((owner, name))
        if change is None:
            return
        change.wanted.pop(block, None)
        if change.wanted:
            session.conf.set(name, change.value)
        elif change.explicit is None:
            session.conf.unset(name)
        else:
            session.conf.set(name, change.explicit)


def _forget(owner: object, name: str, block: object) -> None:
    """Note that a block has no say in a conf any more."""
    with _lock:
        change = _changes.get((owner, name))
        if change is not None:
            change.wanted.pop(block, None)
            if not change.wanted:
                del _changes[owner, name]


def _identity_of(session: Any) -> object:
    """What is equal for all Python objects of one session.

    Reaches into: pyspark.sql.SparkSession._jsparkSession (pyspark 3.5 to 4.3).
    Without it: the Python object, so two of them for one session may leave each other's confs behind.
    """
    try:
        # Spark Connect has names for its sessions.
        named = getattr(session, "session_id", None)
        if named is not None:
            return str(named)
        return int(java_packages(session).java.lang.System.identityHashCode(session._jsparkSession))  # noqa: SLF001
    except Exception as error:
        if ends_all(error):
            raise
        return id(session)
