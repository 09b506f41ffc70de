"""This process's hold on an entry, let go of at the end."""

from __future__ import annotations

import atexit
import concurrent.futures.thread
import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from converter.cache import entries, leases
from converter.errors import CacheError, ConverterError
from converter.manifest import Manifest
from converter.reading.fetching import give_up_fetching
from converter.sources.spark import identity
from converter.storage.directory import Storage

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Holding:
    """This process's hold on an entry.

    Lives until it is closed or the interpreter ends, also where nobody holds its converter any more: loaders may
    still read. A hold on files that are not ours (`root` is None) ends and touches nothing.
    """

    root: Storage | None = None
    key: str = ""
    manifest: Manifest | None = None
    lease: leases.Lease | None = None
    delete_on_exit: bool = False
    pid: int = 0
    state: str = ""
    has_failed: bool = False
    """It could not be closed, so that is tried again."""

    def __post_init__(self) -> None:
        self.pid = os.getpid()

    def close(self, *, delete: bool) -> None:
        """Let go, once; what fails can be tried again, and is at the interpreter's end."""
        if self.state and not self.has_failed:
            return
        # Said first: nobody begins to read what is about to go, and of two threads one lets it go.
        self.state, self.has_failed = "deleted" if delete and self.root is not None else "closed", False
        try:
            self._let_go(delete=delete)
        except BaseException:
            # Its lease is not renewed any more: a sweep may take it, so there is nothing to read in any case.
            self.state, self.has_failed = "closed", True
            # Also where the next try is the end of a block, or of the interpreter.
            self.delete_on_exit = self.delete_on_exit or delete
            raise
        holdings.discard(self)

    @contextlib.contextmanager
    def leaving(self, error: BaseException | None, url: str) -> Iterator[None]:
        """The end of a `with` block: what fails while it lets go does not hide the error that ended the block."""
        if self.root is None or error is None:
            yield
            return
        # Who was interrupted, or whose store is away, is not kept for another `timeout_seconds`.
        hurries = isinstance(error, ConverterError) or not isinstance(error, Exception)
        try:
            with self.root.hurried(leases.HURRY_SECONDS) if hurries else contextlib.nullcontext():
                yield
        except (OSError, CacheError) as failure:
            logger.warning("Could not let go of %s: %s; sweep(…) removes what is left.", url, failure)

    def check(self, url: str, state: str) -> None:
        """Raise CacheError where there are no rows any more; `state` is what became of the converter itself."""
        state = state or self.state
        if state:
            raise CacheError(
                f"The converter of {url} was {state}, so it has no rows any more. Convert again, or "
                "make loaders before delete() and inside the `with` block.",
                path=url,
            )
        if self.lease is not None and self.lease.lost:
            raise CacheError(
                f"This process gave no sign of life for {3 * leases.RENEW_SECONDS:.0f} seconds or longer, so its "
                f"cache entry {url} was taken for abandoned and swept. Convert again.",
                path=url,
            )

    def _let_go(self, *, delete: bool) -> None:
        if self.pid != os.getpid() or self.root is None or self.manifest is None:
            return
        if delete:
            identity.forget(self.key)
            entries.delete(self.root, self.key, self.manifest, self.lease)
        else:
            entries.let_go(self.root, self.key, self.manifest, self.lease)


holdings: set[Holding] = set()


def _close_remote() -> None:
    """Let go of what lies behind a network while its clients still live, which end before `atexit` has its turn.

    A thread of the user's that is not over yet may still read: then the last turn must do.
    """
    pooled = concurrent.futures.thread._threads_queues  # noqa: SLF001
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    # Of ours some may just begin, and stand in no queue yet.
    if all(thread.daemon or thread.name.startswith("converter-") or thread in pooled for thread in others):
        give_up_fetching()
        _close_all(is_remote=True)


# Before the one of concurrent.futures, without whose threads nobody can be asked; there is no public way.
getattr(threading, "_register_atexit", atexit.register)(_close_remote)


@atexit.register
def _close_all(*, is_remote: bool = False) -> None:
    """Let go of everything at the interpreter's end, and delete what is to be deleted then."""
    for holding in list(holdings):
        if is_remote and (holding.root is None or holding.root.is_local):
            continue
        root = holding.root
        try:
            # Who failed before is not waited for as long again.
            with (
                root.hurried(leases.HURRY_SECONDS)
                if root is not None and holding.has_failed
                else contextlib.nullcontext()
            ):
                holding.close(delete=holding.delete_on_exit)
        except (OSError, CacheError) as error:
            logger.warning("Could not close %s/%s at exit: %s", getattr(root, "url", ""), holding.key, error)
        finally:
            # One try at the end: at the next turn the clients of remote stores are gone.
            holdings.discard(holding)
