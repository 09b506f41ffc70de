"""What lies behind a network is fetched ahead of those who decode it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from converter.plan import Piece
from converter.reading.row_groups import FetchedGroup
from converter.reading.source import BatchSource
from converter.storage.at_once import MAX_REQUESTS_AT_ONCE, Turn

_MAX_FETCHERS = 64
_MAX_REQUESTS = 128
"""At once in one process (both are guesses); what may be on its way is bounded in bytes too, see `storage`."""


class Fetcher(Protocol):
    """Who fetches a piece of a plan, in a thread of ours."""

    given_up: threading.Event
    """Nobody waits for what is being fetched."""

    def fetch(self, piece: Piece, turn: Turn, pool: ThreadPoolExecutor) -> Mapping[int, FetchedGroup]:
        """What lies behind a network of a piece's row groups, by their numbers."""


@contextlib.contextmanager
def fetching(
    reader: Fetcher, pieces: Iterator[Piece], source: BatchSource
) -> Iterator[Iterator[tuple[Piece, Future[Mapping[int, FetchedGroup]] | None]]]:
    """The pieces, each with what is being fetched of it, where the files lie behind a network.

    In threads of its own, so that the network is busy while the workers decode. Pieces ask in their order: what is
    wanted first need not wait where a line takes no more.
    """
    if source.storage.is_local:
        yield ((piece, None) for piece in pieces)
        return
    # What is further ahead waits in line: a thousand small windows need not be a thousand threads.
    fetchers_count = min(source.windows_ahead, _MAX_FETCHERS)
    requests_count = min(source.windows_ahead * MAX_REQUESTS_AT_ONCE, _MAX_REQUESTS)
    with (
        ThreadPoolExecutor(fetchers_count, thread_name_prefix="converter-fetch") as fetchers,
        ThreadPoolExecutor(requests_count, thread_name_prefix="converter-fetch") as requests,
    ):
        _given_up.add(reader.given_up)
        try:
            yield _submitted(fetchers, requests, reader, pieces)
        finally:
            reader.given_up.set()
            for pool in (fetchers, requests):
                pool.shutdown(wait=False, cancel_futures=True)


def _submitted(
    fetchers: ThreadPoolExecutor, requests: ThreadPoolExecutor, reader: Fetcher, pieces: Iterator[Piece]
) -> Iterator[tuple[Piece, Future[Mapping[int, FetchedGroup]]]]:
    turn = None
    for piece in pieces:
        turn = Turn(turn)
        yield piece, fetchers.submit(reader.fetch, piece, turn, requests)


_given_up: weakref.WeakSet[threading.Event] = weakref.WeakSet()
"""Of all who fetch in this process."""


def give_up_fetching() -> None:
    """Wait for no store any more, whoever has left an iterator unfinished: for the interpreter's end."""
    for given_up in list(_given_up):
        given_up.set()
