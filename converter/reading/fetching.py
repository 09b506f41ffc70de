"""Fetches remote files in threads of their own, ahead of the threads that decode."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

from converter.living import Living
from converter.plan import Piece
from converter.pool import Answer, Threads
from converter.reading.row_groups import FetchedGroup
from converter.reading.source import BatchSource
from converter.storage.at_once import MAX_REQUESTS_AT_ONCE, Turn

_MAX_FETCHERS = 64
_MAX_REQUESTS = 128
"""At once in one process (both are guesses); `storage` bounds the bytes on their way as well."""


Fetch = Callable[[Piece, Turn, Threads], Mapping[int, FetchedGroup]]
"""Fetches the bytes of a piece's remote row groups, by their numbers."""


@contextlib.contextmanager
def fetching(
    fetch: Fetch, pieces: Iterator[Piece], source: BatchSource, given_up: threading.Event
) -> Iterator[Iterator[tuple[Piece, Answer[Mapping[int, FetchedGroup]] | None]]]:
    """Yield the pieces, each with the answer that its bytes are; with None if the files are local.

    The network is busy while the workers decode. Pieces make their requests in order, so that the piece that is
    wanted first does not wait for a full line. The end sets `given_up`.
    """
    if source.storage.is_local:
        yield ((piece, None) for piece in pieces)
        return
    # Later pieces wait in line: a thousand small windows must not be a thousand threads.
    fetchers_count = min(source.windows_ahead, _MAX_FETCHERS)
    requests_count = min(source.windows_ahead * MAX_REQUESTS_AT_ONCE, _MAX_REQUESTS)
    with (
        Threads(fetchers_count, "converter-fetch") as fetchers,
        Threads(requests_count, "converter-fetch") as requests,
    ):
        _given_up.add(given_up)
        try:
            yield _submitted(fetchers, requests, fetch, pieces)
        finally:
            given_up.set()
            for pool in (fetchers, requests):
                pool.shutdown(wait=False, cancel=True)


def _submitted(
    fetchers: Threads, requests: Threads, fetch: Fetch, pieces: Iterator[Piece]
) -> Iterator[tuple[Piece, Answer[Mapping[int, FetchedGroup]]]]:
    turn = None
    for piece in pieces:
        turn = Turn(turn)
        yield piece, fetchers.submit(fetch, piece, turn, requests)


_given_up: Living[threading.Event] = Living()
"""The event of each reader that fetches in this process."""


def give_up_fetching() -> None:
    """Cancel all fetching of this process, for the interpreter's end: an unfinished iterator must not delay it."""
    for given_up in _given_up:
        given_up.set()
