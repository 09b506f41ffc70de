"""What a signal handler raises is told from what a library raises, however the handler is written."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from converter.signals import is_of_handler
from converter.storage.store import Store


class AlarmError(Exception):
    """Of the user's handler."""


def handle(*_: Any) -> None:
    raise AlarmError


class Handler:
    def __call__(self, *_: Any) -> None:
        raise AlarmError

    def method(self, *_: Any) -> None:
        _raise()


def _raise() -> None:
    raise AlarmError


@pytest.fixture
def handler() -> Iterator[None]:
    """Give back what handles the signal."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("function", [handle, Handler(), Handler().method, functools.partial(handle, 1)])
def test_errors_of_handlers_are_known(handler: None, function: Callable[..., None]) -> None:
    with pytest.raises(AlarmError) as before:
        function(signal.SIGUSR1, None)
    assert not is_of_handler(before.value)
    signal.signal(signal.SIGUSR1, function)
    with pytest.raises(AlarmError) as raised:
        signal.raise_signal(signal.SIGUSR1)
    assert is_of_handler(raised.value)
    assert not is_of_handler(ValueError("of nobody"))


def test_an_error_of_a_handler_is_none_of_the_store(handler: None) -> None:
    signal.signal(signal.SIGUSR1, handle)
    main, may_end = threading.main_thread().ident, threading.Event()

    def request(_: Any) -> None:
        signal.pthread_kill(main or 0, signal.SIGUSR1)
        may_end.wait(60)

    with pytest.raises(AlarmError):
        Store({}, protocol="memory", timeout_seconds=60).ask(request, path="place")
    may_end.set()
    for thread in threading.enumerate():
        if thread.name == "converter-request":
            thread.join(10)
