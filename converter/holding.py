"""Which cache entries this process holds, and how they are released: by `close`, or when the interpreter exits."""

from __future__ import annotations

import atexit
import concurrent.futures.thread
import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from converter.cache.entries import HeldEntry
from converter.cache.leases import HURRY_SECONDS, RENEW_SECONDS
from converter.errors import CacheError, ConverterError
from converter.exits import register_before_thread_pools
from converter.reading.fetching import give_up_fetching
from converter.sources.spark import identity

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Holding:
    """This process's use of an entry, until `close` or the interpreter's end.

    It outlives its converter, because loaders may still read. Without an entry (files that are not ours) `close` only
    changes the state.
    """

    entry: HeldEntry | None = None
    delete_on_exit: bool = False
    pid: int = field(default_factory=os.getpid)
    state: str = ""
    """Empty while it is open, then `closed` or `deleted`."""

    made_on: str = ""
    """The other machine whose local files these are; empty if they are of this one, or in a store."""

    has_failed: bool = False
    """`close` raised, so it may be called again."""

    def close(self, *, delete: bool) -> None:
        """Release or delete the entry, once; after an error the next call, or the interpreter's end, tries again.

        What was only released can be deleted later.
        """
        is_kept = self.state == "closed" and self.entry is not None
        if self.state and not self.has_failed and not (delete and is_kept):
            return
        # First, so that no new read begins, and of two threads only one closes it.
        self.state, self.has_failed = "deleted" if delete and self.entry is not None else "closed", False
        try:
            self._close(delete=delete)
        except BaseException:
            # Its lease is not renewed any more, so a sweep may remove the data: there is nothing to read.
            self.state, self.has_failed = "closed", True
            # So that the end of a block, or of the interpreter, also deletes.
            self.delete_on_exit = self.delete_on_exit or delete
            raise
        holdings.discard(self)

    @contextlib.contextmanager
    def leaving(self, error: BaseException | None, url: str) -> Iterator[None]:
        """Wrap the end of a `with` block: an error while closing does not hide the `error` that ended the block."""
        if self.entry is None or error is None:
            yield
            return
        # After an interrupt, or when the store is away, do not wait another `timeout_seconds`.
        hurries = isinstance(error, ConverterError) or not isinstance(error, Exception)
        try:
            with self.entry.root.hurried(HURRY_SECONDS) if hurries else contextlib.nullcontext():
                yield
        except (OSError, CacheError) as failure:
            logger.warning("Could not release %s: %s; sweep(…) removes what is left.", url, failure)

    def check(self, url: str, state: str) -> None:
        """Raise CacheError if the rows are no longer available; `state` is the converter's own state."""
        if state or self.state:
            raise CacheError(
                f"The converter of {url} was {state or self.state}, so it has no rows any more. Convert again, or "
                "make loaders before delete() and inside the `with` block.",
                path=url,
            )
        if self.entry is not None and self.entry.lease is not None and self.entry.lease.lost:
            raise CacheError(
                f"This process did not renew its lease on {url} for {3 * RENEW_SECONDS:.0f} seconds or longer (was it "
                "suspended?), so the entry was swept. Convert again.",
                path=url,
            )

    def _close(self, *, delete: bool) -> None:
        # A forked child holds a copy, whose lease is its parent's.
        if self.entry is None or self.pid != os.getpid():
            return
        if delete:
            identity.forget(self.entry.key)
            self.entry.delete()
        else:
            self.entry.release()


holdings: set[Holding] = set()


def is_in_thread_pool(thread: threading.Thread) -> bool:
    """Whether a thread is a worker of a `ThreadPoolExecutor`, which ends only after the interpreter's end has begun.

    Reaches into: concurrent.futures.thread._threads_queues (CPython 3.11).
    Without it: an idle pool keeps remote entries open until the `atexit` hook, so they wait for a sweep.
    """
    try:
        return thread in concurrent.futures.thread._threads_queues  # noqa: SLF001
    except AttributeError:
        return False


def _close_remote() -> None:
    """Release remote entries while the clients of their stores still work; those end before `atexit` hooks run.

    If a thread of the user's still runs, it may still read: then `_close_all` must do.
    """
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    # Threads of ours end only after this, too.
    if all(thread.daemon or thread.name.startswith("converter-") or is_in_thread_pool(thread) for thread in others):
        give_up_fetching()
        # Imported here, because `import converter` needs it in no other way.
        from multiprocessing.process import parent_process

        # A process of multiprocessing ends without `atexit` hooks if it was forked.
        _close_all(is_remote=parent_process() is None)


register_before_thread_pools(_close_remote)


@atexit.register
def _close_all(*, is_remote: bool = False) -> None:
    """Release every entry at the interpreter's end, and delete those that are to be deleted then."""
    for holding in list(holdings):
        entry = holding.entry
        if is_remote and (entry is None or entry.root.is_local):
            continue
        if holding.pid != os.getpid():
            # A forked child: the parent's clients would wait for threads that only the parent has, if they ended here.
            continue
        try:
            # After a failure, do not wait as long again.
            with (
                entry.root.hurried(HURRY_SECONDS)
                if entry is not None and holding.has_failed
                else contextlib.nullcontext()
            ):
                holding.close(delete=holding.delete_on_exit)
        except (OSError, CacheError) as error:
            closed = "a converter" if entry is None else entry.folder.url
            logger.warning("Could not close %s at exit: %s", closed, error)
        finally:
            # Tried once at the end: next time the clients of remote stores are gone.
            holdings.discard(holding)
