"""Renews Azure's tokens and signatures before they expire, in a thread of their own."""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import inspect
import json
import os
import re
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from converter.portable.deadlines import TOKEN_THREAD

if TYPE_CHECKING:
    from collections.abc import Callable


_RENEW_SECONDS = 300.0
"""How long before the end of a signature the next one is asked for; azure-core's figure for tokens."""

_ASK_AGAIN_SECONDS = 5.0
"""The pause after a provider of signatures has failed."""

_SIGNATURE_SECONDS = 20.0
"""How long requests wait for a signature once the last one has ended."""

_UNKNOWN_SECONDS = 600
"""How long a token or signature is used if its expiry is unknown."""


def async_credential(provider: Any) -> Any:
    """An asynchronous credential, as adlfs takes it, from an object of azure-identity or a function that gives a token.

    The provider is asked again before a token expires: when a JSON Web Token or an AccessToken says its expiry, else
    every few minutes.
    """
    import asyncio

    from azure.core.credentials import AccessToken

    def ask(scopes: tuple[str, ...]) -> AccessToken:
        token = provider.get_token(*scopes) if hasattr(provider, "get_token") else provider()
        if isinstance(token, str) and token:
            return AccessToken(token, token_expiry(token))
        if not isinstance(token, tuple) or not token[0]:
            kind = "an empty text" if token == "" else type(token).__name__
            raise TypeError(
                f"storage_options['credential'] gave {kind}, where a token was expected. Let it return the token as a "
                "text, or an azure.core.credentials.AccessToken."
            )
        return AccessToken(*token[:2])

    def as_error(error: BaseException) -> Exception:
        # SystemExit would end the loop of all requests, and a future refuses StopIteration.
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            return error
        return RuntimeError(f"storage_options['credential'] failed: it raised {type(error).__name__}")

    def ask_beside(scopes: tuple[str, ...]) -> asyncio.Future[AccessToken]:
        """Ask in a thread of its own, because it may wait for the network, or hang.

        Not in one of asyncio's threads, for which the interpreter's end waits.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def settle(token: AccessToken | None, error: Exception | None) -> None:
            if answer.done():
                # The request was cancelled.
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(token)

        def run() -> None:
            token, failure = None, None
            try:
                token = ask(scopes)
            except BaseException as error:  # noqa: BLE001 (raised where the answer is awaited)
                failure = as_error(error)
            # The loop may be closed by now.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, token, failure)

        threading.Thread(target=run, name=TOKEN_THREAD, daemon=True).start()
        return answer

    class Credential:
        async def get_token(self, *scopes: str, **_: Any) -> AccessToken:
            if not inspect.iscoroutinefunction(getattr(provider, "get_token", None)):
                return await ask_beside(scopes)
            try:
                return AccessToken(*(await provider.get_token(*scopes))[:2])
            except (Exception, asyncio.CancelledError):
                raise
            except BaseException as error:  # noqa: BLE001 (becomes an Exception)
                raise as_error(error) from None

        async def close(self) -> None:
            pass

        async def __aenter__(self) -> Credential:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

    return Credential()


class _Asking:
    """A call of a provider of signatures in a thread, which may hang."""

    def __init__(self, begun: float) -> None:
        self.begun, self.pid, self.is_over = begun, os.getpid(), threading.Event()


def renewed_signature(provider: Callable[[], str]) -> Any:
    """A credential, as adlfs takes it, from a function that gives shared access signatures.

    The function is asked again, in a thread of its own, five minutes before a signature ends, or after half of its time
    if that is later.
    """
    from azure.core.credentials import AzureSasCredential

    def ask() -> str:
        signature = provider()
        if not isinstance(signature, str) or "sig=" not in signature:
            kind = "a text without sig=" if isinstance(signature, str) else type(signature).__name__
            raise TypeError(f"storage_options['sas_token'] gave {kind}, where a shared access signature was expected")
        return signature.removeprefix("?")

    class Signature(AzureSasCredential):
        def __init__(self) -> None:
            super().__init__(ask())
            self._starting = threading.Lock()
            self._asking: _Asking | None = None
            self._ends = self._renew_at = 0.0
            self._error: Exception | None = None
            self._take(super().signature)

        @property
        def signature(self) -> str:
            now = time.time()
            if now > self._renew_at:
                self._ask_beside(now)
            if now > self._ends:
                # No request can be sent without it, so all requests of this process wait: once, and not without end.
                asking = self._asking
                was_late = isinstance(self._error, TimeoutError)
                if not was_late and (asking is None or not asking.is_over.wait(_SIGNATURE_SECONDS)):
                    self._error = TimeoutError("storage_options['sas_token'] gives no signature")
                if self._error is not None:
                    raise self._error
            return super().signature

        def _ask_beside(self, now: float) -> None:
            """Ask in a thread, unless one asks that may still be answered: this process's, and begun lately."""
            if not self._starting.acquire(blocking=False):
                return
            try:
                asking = self._asking
                if (
                    asking is None
                    or asking.is_over.is_set()
                    or asking.pid != os.getpid()
                    or now - asking.begun > _SIGNATURE_SECONDS
                ):
                    asking = self._asking = _Asking(begun=now)
                    threading.Thread(target=self._renew, args=(asking,), name=TOKEN_THREAD, daemon=True).start()
            finally:
                self._starting.release()

        def _take(self, signature: str) -> None:
            now = time.time()
            self._ends = signature_expiry(signature)
            self._renew_at = now + max(self._ends - now - _RENEW_SECONDS, (self._ends - now) / 2)
            self.update(signature)
            self._error = None

        def _renew(self, asking: _Asking) -> None:
            try:
                signature = ask()
                # An answer may come late, after that of another thread.
                if asking is self._asking or signature_expiry(signature) > self._ends:
                    self._take(signature)
            except BaseException as error:  # noqa: BLE001 (raised once the old one has ended)
                ended = RuntimeError(f"storage_options['sas_token'] failed: it raised {type(error).__name__}")
                if asking is self._asking:
                    self._error = error if isinstance(error, Exception) else ended
                    # From then on each request asks again.
                    self._renew_at = min(time.time() + _ASK_AGAIN_SECONDS, self._ends)
            finally:
                asking.is_over.set()

    return Signature()


def signature_expiry(signature: str) -> float:
    """When a shared access signature expires, in seconds since 1970; ten minutes from now if it does not say."""
    with contextlib.suppress(ValueError, KeyError):
        # Python 3.10 parses neither a Z nor seven digits.
        text = re.sub(r"\.\d+", "", parse_qs(signature)["se"][0]).replace("Z", "+00:00")
        end = dt.datetime.fromisoformat(text)
        return (end if end.tzinfo else end.replace(tzinfo=dt.timezone.utc)).timestamp()
    return time.time() + _UNKNOWN_SECONDS


def token_expiry(token: str) -> int:
    """When a token expires, in seconds since 1970: as a JSON Web Token says, else ten minutes from now.

    azure-core asks for the next one five minutes before.
    """
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
        payload = token.split(".")[1]
        return int(json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["exp"])
    return int(time.time()) + _UNKNOWN_SECONDS
