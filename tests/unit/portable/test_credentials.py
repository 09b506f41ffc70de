"""Tokens and signatures are asked for again before they end, and no provider keeps a process."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime as dt
import json
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from azure.core.credentials import AccessToken
from azure.core.pipeline import PipelineContext, PipelineRequest, PipelineResponse
from azure.core.pipeline.policies import AsyncBearerTokenCredentialPolicy
from azure.core.rest import HttpRequest

from converter.portable import credentials
from converter.portable.deadlines import TOKEN_THREAD
from converter.storage.opening import open_storage, open_store
from tests.processes import error_of, run_python
from tests.waiting import wait_until

LAKE = "data@lake.dfs.core.windows.net"


def jwt(expiry: int) -> str:
    return "head." + base64.urlsafe_b64encode(json.dumps({"exp": expiry}).encode()).decode().rstrip("=") + ".tail"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> int:
    """The time, which stands still."""
    seconds = 1_700_000_000
    monkeypatch.setattr(time, "time", lambda: float(seconds))
    return seconds


@pytest.mark.parametrize("token", ["opaque", "a.b.c", "a.e30.c"])
def test_a_token_that_says_no_end_is_asked_for_again_soon(token: str, now: int) -> None:
    assert credentials.token_expiry(token) == now + 600


def test_a_tokens_end_is_what_it_says() -> None:
    assert credentials.token_expiry(jwt(0)) == 0


class Identity:
    """As azure-identity's credentials."""

    def __init__(self) -> None:
        self.scopes: list[tuple[str, ...]] = []

    def get_token(self, *scopes: str) -> Any:
        self.scopes.append(scopes)
        return AccessToken(f"token-{len(self.scopes)}", int(time.time()) + (10 if len(self.scopes) == 1 else 3600))


@pytest.mark.parametrize("kind", ["object", "function", "text"])
def test_a_provider_is_asked_again_before_its_token_ends(kind: str) -> None:
    identity = Identity()
    provider: Any = identity
    if kind == "function":
        provider = lambda: tuple(identity.get_token("scope"))  # noqa: E731
    elif kind == "text":
        provider = lambda: jwt(identity.get_token("scope").expires_on)  # noqa: E731
    store, _, _ = open_store("abfss://data@lake.dfs.core.windows.net/a", {"credential": provider}, 5)
    policies = store.filesystem().service_client._pipeline._impl_policies
    (policy,) = [one for one in policies if isinstance(one, AsyncBearerTokenCredentialPolicy)]
    sent = []

    class Server:
        async def send(self, request: Any) -> Any:
            sent.append(request.http_request.headers["Authorization"])
            return PipelineResponse(request.http_request, SimpleNamespace(status_code=200, headers={}), None)

    policy.next = Server()

    async def ask() -> None:
        for _ in range(3):
            request = HttpRequest("GET", "https://lake.blob.core.windows.net/data")
            await policy.send(PipelineRequest(request, PipelineContext(None)))

    asyncio.run(ask())
    # The first one ends in ten seconds, the second in an hour.
    assert len(identity.scopes) == 2
    assert len(set(sent)) == 2
    assert sent[1] == sent[2]


class Clock:
    """The time, for `credentials`; it stands still between two steps."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def time(self) -> float:
        return self.now


class Signatures:
    """As a linked service that gives signatures, each for some seconds."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self.seconds, self.clock, self.num_asked = seconds, clock, 0
        self.is_away = False

    def __call__(self) -> str:
        if self.is_away:
            raise OSError("away")
        self.num_asked += 1
        ends = dt.datetime.fromtimestamp(self.clock.now + self.seconds, dt.timezone.utc)
        text = ends.isoformat(timespec="microseconds").replace("+00:00", "0Z").replace(":", "%3A")
        return f"?sv=2024-01-01&se={text}&sig=of-{self.num_asked}"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(credentials, "time", clock)
    return clock


def signature_of(seconds: float, clock: Clock) -> tuple[Signatures, Any]:
    provider = Signatures(seconds, clock)
    store, _, _ = open_store("abfss://data@lake.dfs.core.windows.net/a", {"sas_token": provider}, 5)
    return provider, store.filesystem().credential


def test_a_signature_is_asked_for_again_before_it_ends(clock: Clock) -> None:
    provider, credential = signature_of(2000, clock)
    clock.now += 1600
    assert credential.signature.endswith("of-1")
    assert provider.num_asked == 1
    # Less than five minutes are left.
    clock.now += 200
    assert credentials.signature_expiry(credential.signature) > clock.now
    wait_until(lambda: credential.signature.endswith("of-2"))
    assert provider.num_asked == 2
    # After a rest, when the last one has ended, the next request waits for another.
    clock.now += 3000
    assert credential.signature.endswith("of-3")
    assert credentials.signature_expiry(credential.signature) > clock.now


def test_a_signature_that_lasts_is_asked_for_once(clock: Clock) -> None:
    provider, credential = signature_of(3600, clock)
    assert {credential.signature for _ in range(10)} == {credential.signature}
    assert provider.num_asked == 1


def test_a_signature_stays_while_no_other_is_given_until_it_ends(clock: Clock) -> None:
    provider, credential = signature_of(4000, clock)
    first, provider.is_away = credential.signature, True
    clock.now += 3800
    assert [credential.signature, credential.signature] == [first, first]
    # Another was asked for.
    wait_until(lambda: credential._error is not None)
    assert credential.signature == first
    clock.now += 300
    with pytest.raises(OSError, match="away"):
        credential.signature  # noqa: B018 (a property that asks)
    # It was away for a while.
    provider.is_away = False

    def is_renewed() -> bool:
        with contextlib.suppress(OSError):
            return bool(credential.signature != first)
        return False

    wait_until(is_renewed)
    assert provider.num_asked == 2


def test_a_provider_of_signatures_that_hangs_is_waited_for_once_and_asked_again_later(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    provider, credential = signature_of(200, clock)
    is_over, hanging, give = threading.Event(), [], Signatures.__call__

    def hang(_: Signatures) -> str:
        hanging.append(1)
        is_over.wait()
        return f"?se=2001-01-01T00:00:00Z&sig=late-{len(hanging)}"

    monkeypatch.setattr(credentials, "_SIGNATURE_SECONDS", 0.05)
    monkeypatch.setattr(Signatures, "__call__", hang)
    clock.now += 300

    def is_refused() -> bool:
        with pytest.raises(TimeoutError, match=r"sas_token'\] gives no signature"):
            credential.signature  # noqa: B018 (a property that asks)
        return True

    assert is_refused()
    # Another one would be waited for.
    monkeypatch.setattr(credentials, "_SIGNATURE_SECONDS", 1000)
    assert [is_refused() for _ in range(3)] == [True] * 3
    assert len(hanging) == 1
    clock.now += 1001
    monkeypatch.setattr(Signatures, "__call__", give)

    def is_given() -> bool:
        with contextlib.suppress(TimeoutError):
            return bool(credential.signature.endswith("of-2"))
        return False

    wait_until(is_given)
    # What comes late is no better.
    is_over.set()
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == TOKEN_THREAD])
    assert credential.signature.endswith("of-2")
    assert provider.num_asked == 2


def test_a_forked_child_asks_for_a_signature_itself(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Who asks in the parent gives the child nothing."""
    _, credential = signature_of(200, clock)
    is_over, give = threading.Event(), Signatures.__call__
    monkeypatch.setattr(Signatures, "__call__", lambda provider: is_over.wait() and give(provider))
    clock.now += 150
    assert credential.signature.endswith("of-1")
    clock.now += 100
    monkeypatch.setattr(Signatures, "__call__", give)
    if not (pid := os.fork()):
        os._exit(0 if credential.signature.endswith("of-2") else 1)
    assert os.waitpid(pid, 0)[1] == 0
    is_over.set()
    assert credential.signature.endswith(("of-2", "of-3"))


@pytest.mark.parametrize(("given", "kind"), [(None, "NoneType"), ("abc", "a text without sig="), (7, "int")])
def test_a_provider_that_gives_no_signature_is_told_so(given: Any, kind: str) -> None:
    store, _, _ = open_store("abfss://data@lake.dfs.core.windows.net/a", {"sas_token": lambda: given}, 5)
    with pytest.raises(OSError, match=rf"sas_token'\] gave {kind}, where a shared access signature was expected"):
        store.filesystem()


@pytest.mark.parametrize(
    "signature",
    ["sv=1&se=2026-11-20T10%3A30%3A00Z&sig=a", "se=2026-11-20T10:30:00.0000000Z", "se=2026-11-20T11:30:00%2B01:00"],
)
def test_a_signatures_end_is_what_it_says(signature: str) -> None:
    assert (
        credentials.signature_expiry(signature) == dt.datetime(2026, 11, 20, 10, 30, tzinfo=dt.timezone.utc).timestamp()
    )


@pytest.mark.parametrize("signature", ["sig=a", "se=soon", ""])
def test_a_signature_that_says_no_end_is_asked_for_again_soon(signature: str, now: int) -> None:
    assert credentials.signature_expiry(signature) == now + 600


@pytest.mark.parametrize(
    ("given", "kind"), [(None, "NoneType"), ("", "an empty text"), (7, "int"), ((None, 1), "tuple")]
)
def test_a_provider_that_gives_no_token_is_told_so(given: Any, kind: str) -> None:
    credential = credentials.async_credential(lambda: given)
    with pytest.raises(TypeError, match=f"credential'] gave {kind}, where a token was expected"):
        asyncio.run(credential.get_token("scope"))


def ask_a_provider_that_hangs() -> list[str]:
    storage = open_storage(f"abfss://{LAKE}/a", {"credential": threading.Event().wait}, 1)
    return error_of(storage.list)


@pytest.mark.long("starts a process, whose end it waits for")
def test_a_provider_that_hangs_does_not_keep_the_interpreter() -> None:
    kind, said = run_python(ask_a_provider_that_hangs)
    assert kind == "TimeoutError"
    assert "could not be reached for 1 second" in said


class Async:
    """As azure-identity's credentials of `azure.identity.aio`."""

    def __init__(self, provider: Any) -> None:
        self.provider = provider

    async def get_token(self, *_: str) -> Any:
        return self.provider()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_provider_that_raises_no_error_ends_no_loop(kind: type[BaseException], is_async: bool) -> None:
    def provider() -> str:
        raise kind("hidden")

    given = Async(provider) if is_async else provider
    storage = open_storage(f"abfss://{LAKE}/a", {"credential": given}, 5)
    for _ in range(2):
        said = rf"storage_options\['credential'\] failed: it raised {kind.__name__}"
        with pytest.raises(OSError, match=said) as raised:
            storage.list()
        assert "hidden" not in str(raised.value)


def test_a_provider_that_raises_what_no_future_holds_is_an_error() -> None:
    credential = credentials.async_credential(lambda: next(iter([])))
    with pytest.raises(RuntimeError, match="credential'] failed: it raised StopIteration"):
        asyncio.run(credential.get_token("scope"))


def test_an_error_of_a_provider_stays_what_it_is() -> None:
    def provider() -> str:
        raise ConnectionResetError("the login is away")

    # Only so it can be told that it may pass.
    with pytest.raises(ConnectionResetError, match="the login is away"):
        asyncio.run(credentials.async_credential(provider).get_token("scope"))
