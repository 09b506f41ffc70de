"""How long a store is waited for, what is retried, and what its errors show."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any, ClassVar

import fsspec
import pytest
from botocore import exceptions as botocore_errors
from fsspec.implementations.memory import MemoryFileSystem

from converter.storage import store as store_module
from converter.storage.opening import open_storage
from converter.storage.requests import GivenUpError
from converter.storage.store import Store, check_timeout
from tests.waiting import held_elsewhere


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_timeout_is_above_0(seconds: float) -> None:
    with pytest.raises(ValueError, match="timeout_seconds must be above 0"):
        check_timeout(seconds)


@pytest.mark.parametrize("seconds", ["10", None, True])
def test_a_timeout_is_a_number(seconds: Any) -> None:
    with pytest.raises(TypeError, match="timeout_seconds must be a number of seconds"):
        check_timeout(seconds)


class StatusError(Exception):
    """As azure-core's errors say it."""

    def __init__(self, status_code: int, text: str = "no") -> None:
        super().__init__(text)
        self.status_code = status_code


def ask(store: Store, *errors: Exception | None) -> tuple[Any, int]:
    """What a request gives that fails in these ways first, and how often it was asked."""
    asked = []

    def request(_: Any) -> str:
        asked.append(1)
        error = errors[len(asked) - 1] if len(asked) <= len(errors) else None
        if error is not None:
            raise error
        return "answer"

    try:
        return store.ask(request, path="place"), len(asked)
    except OSError as error:
        return error, len(asked)


ENDPOINT = "http://127.0.0.1:1/"


@pytest.mark.parametrize(
    "error",
    [
        StatusError(503),
        StatusError(429),
        TimeoutError(),
        ConnectionResetError(),
        botocore_errors.EndpointConnectionError(endpoint_url=ENDPOINT),
        botocore_errors.ConnectionClosedError(endpoint_url=ENDPOINT),
        botocore_errors.ReadTimeoutError(endpoint_url=ENDPOINT),
        botocore_errors.ConnectTimeoutError(endpoint_url=ENDPOINT),
        botocore_errors.ProxyConnectionError(proxy_url=ENDPOINT),
        botocore_errors.ResponseStreamingError(error="cut"),
    ],
    ids=str,
)
def test_what_passes_is_asked_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_FIRST_PAUSE_SECONDS", 0.001)
    assert ask(Store({}, protocol="memory", timeout_seconds=10), error, error) == ("answer", 3)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (StatusError(403), PermissionError),
        (StatusError(401), PermissionError),
        (StatusError(404), FileNotFoundError),
        (StatusError(409), OSError),
        (FileNotFoundError("x"), FileNotFoundError),
        (ValueError("odd"), OSError),
        (botocore_errors.NoCredentialsError(), OSError),
        (botocore_errors.ParamValidationError(report="no"), OSError),
    ],
)
def test_what_does_not_pass_is_an_error_at_once(error: Exception, kind: type[OSError]) -> None:
    found, asked = ask(Store({}, protocol="memory", timeout_seconds=10), error)
    assert (type(found), asked) == (kind, 1)


def test_the_last_words_of_who_never_answers_are_told() -> None:
    found, asked = ask(Store({}, protocol="memory", timeout_seconds=0.5), *[StatusError(503, "busy")] * 50)
    assert isinstance(found, TimeoutError)
    assert str(found) == (
        "place could not be reached for 0.5 seconds (timeout_seconds); its last answer was StatusError: busy"
    )
    assert 2 <= asked < 10


def test_no_part_of_a_secret_is_left_where_a_text_is_cut() -> None:
    store = Store({"account_key": "K" * 60}, protocol="memory", timeout_seconds=1)
    for length in range(230, 300, 7):
        assert "KKK" not in store._text(OSError("m" * length + "K" * 60 + "n"))


def test_what_hangs_is_left_behind() -> None:
    store, held = Store({}, protocol="memory", timeout_seconds=0.3), threading.Event()
    with pytest.raises(TimeoutError, match=r"place could not be reached for 0\.3 seconds"):
        store.ask(lambda _: held.wait(), path="place")
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(GivenUpError):
        store.ask(lambda _: held.wait(), path="place", given_up=given_up)
    held.set()
    for thread in threading.enumerate():
        if thread.name == "converter-request":
            thread.join(10)


def test_names_of_options_that_hide_something() -> None:
    hidden = ("auth", "proxy_auth", "X-Auth", "Authorization", "sas", "sas_token", "passphrase", "Cookie", "headers")
    for name in hidden:
        assert name not in open_storage("memory://a", {name: "hidden-text"})._filesystem.open_options, name
    for name in ("hadoop.security.authentication", "authority", "sasl"):
        assert name in open_storage("memory://a", {name: "shown-text"})._filesystem.open_options, name


class Careless(MemoryFileSystem):  # type: ignore[misc]
    """A store that takes the mode "x" and does not mind what is there, as fsspec's FTP does."""

    protocol = "careless"
    store: ClassVar[dict[str, Any]] = {}

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return super()._open(path, mode.replace("x", "w"), **options)


def test_a_store_that_writes_over_what_is_there_is_refused() -> None:
    fsspec.register_implementation("careless", Careless, clobber=True)
    storage = open_storage("careless://x/cache", timeout_seconds=5)
    for _ in range(2):
        with pytest.raises(OSError, match="the store overwrites files that are to be new, so a commit could be lost"):
            storage.put_if_absent("a", b"1")
    assert storage.list() == []


CONNECTION = (
    "DefaultEndpointsProtocol=https;AccountName=lake;AccountKey=a2V5LW9mLXRoZS1sYWtl;EndpointSuffix=core.windows.net"
)

SAS = "?sv=2024-01-01&sp=r&sig=c2lnbmF0dXJl%3D"


@pytest.mark.parametrize(
    ("options", "secrets"),
    [
        ({"account_key": "a2V5LW9m"}, ["a2V5LW9m"]),
        ({"sas_token": SAS}, [SAS, "c2lnbmF0dXJl%3D"]),
        ({"connection_string": CONNECTION}, ["a2V5LW9mLXRoZS1sYWtl"]),
        ({"client_secret": "hunter22", "tenant_id": "t"}, ["hunter22"]),
        ({"client_kwargs": {"aws_secret_access_key": "hunter22"}}, ["hunter22"]),
        ({"params": {"sp": "r", "sig": "c2lnbmF0dXJl"}}, ["c2lnbmF0dXJl"]),
        ({"endpoint_url": "https://user:hunter22@host"}, ["hunter22"]),
        ({"config_kwargs": {"proxies": {"http": "http://user:hunter22@proxy:1"}}}, ["hunter22"]),
    ],
)
def test_no_secret_is_told_or_pickled(options: dict[str, Any], secrets: list[str]) -> None:
    store = Store(options, protocol="memory")
    text = f"GET https://host/x{' '.join(secrets)} failed"
    for secret in secrets:
        assert secret not in store.without_secrets(text)
        assert secret not in repr(store)
        error = store.harmless(ValueError(text))
        assert secret not in repr(error)
        assert secret not in repr(store.open_options)
    plain = ValueError("nothing to hide")
    assert store.harmless(plain) is plain


def test_what_a_library_says_of_a_url_is_told_without_its_secrets() -> None:
    store = Store({}, protocol="https")
    said = "https://user:hidden@host/a?sig=hidden&b=1 and abfs://data@lake/a, 'http://host/b?hidden'"
    assert store.without_secrets(said) == "https://***@host/a?*** and abfs://data@lake/a, 'http://host/b?***'"


def test_a_name_that_was_taken_and_is_free_again_was_taken() -> None:
    """Not a missing folder. Seen in `python -m tests.faults.campaign crowd_of_stores --case 1:3`."""

    class Rival(Store):
        def _create(self, filesystem: Any, path: str, data: bytes) -> None:
            # Another process has the name at this moment, and removes the file before anybody looks.
            raise FileExistsError(path)

    store = Rival({}, protocol="memory", timeout_seconds=10)
    store._keeps_answers = False
    assert store.create("/taken-and-free-again", b"own") is False


def test_a_client_that_tries_again_by_itself_creates_a_file_all_the_same() -> None:
    """First seen in `python -m tests.faults.campaign store --case 61:133 --steps 0,1,3,5,6`: there was no marker."""

    class Twice(MemoryFileSystem):
        store: ClassVar[dict[str, Any]] = {}
        opened: ClassVar[list[str]] = []

        def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            if mode == "xb" and not self.opened:
                # The answer to the first request was lost.
                self.opened.append(path)
                self.pipe_file(path, b"first")
            return super().open(path, mode, **options)

    store = Store({}, protocol="memory", timeout_seconds=10)
    store._keeps_answers = store._creates_exclusively = False
    store._opened = (os.getpid(), Twice())
    assert store.create("/marker", b"own") is True
    assert store.cat_file("/marker") == b"own"


def test_a_forked_child_does_not_wait_for_a_client_that_a_thread_of_its_parent_opens() -> None:
    store = Store({}, protocol="memory")
    with held_elsewhere(store._opening[1]):
        if not (pid := os.fork()):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            os._exit(0 if store.filesystem() is not None else 1)
        assert os.waitpid(pid, 0)[1] == 0
