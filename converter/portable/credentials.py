"""Tokens and signatures that are asked for again before they end."""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import inspect
import json
import re
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from converter.portable.deadlines import TOKEN_THREAD

if TYPE_CHECKING:
    from collections.abc import Callable


_RENEW_SECONDS = 300.0
_ASK_AGAIN_SECONDS = 5.0
_SIGNATURE_SECONDS = 20.0
"""Of a signature: how long before its end another is asked for, as azure-core does; after a failure; waited for."""


def async_credential(provider: Any) -> Any:
    """What adlfs takes for credentials, from a function that gives a token, or from an object of azure-identity.

    It is asked again before a token expires. A text alone does not say when, unless it is a JSON Web Token; then it
    is asked every few minutes.
    """
    import asyncio

    from azure.core.credentials import AccessToken

    def ask(scopes: tuple[str, ...]) -> AccessToken:
        found = provider.get_token(*scopes) if hasattr(provider, "get_token") else provider()
        if isinstance(found, str) and found:
            return AccessToken(found, token_expiry(found))
        if not isinstance(found, tuple) or not found[0]:
            kind = "an empty text" if found == "" else type(found).__name__
            raise TypeError(
                f"storage_options['credential'] gave {kind}, where a token was expected: let it return the token as a "
                "text, or an azure.core.credentials.AccessToken"
            )
        return AccessToken(*found[:2])

    def as_error(error: BaseException) -> Exception:
        # SystemExit and its like would end the loop that all requests run in, and a future refuses StopIteration.
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            return error
        return RuntimeError(f"storage_options['credential'] failed: it raised {type(error).__name__}")

    def ask_beside(scopes: tuple[str, ...]) -> asyncio.Future[AccessToken]:
        """Ask in a thread of its own: it may ask the network, which must not keep the loop, or never come back.

        Not in one of asyncio's, for which the interpreter's end waits.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[AccessToken] = loop.create_future()

        def settle(found: AccessToken | Exception) -> None:
            if answer.done():
                # Nobody waits any more.
                return
            if isinstance(found, Exception):
                answer.set_exception(found)
            else:
                answer.set_result(found)

        def run() -> None:
            found: AccessToken | Exception
            try:
                found = ask(scopes)
            except BaseException as error:  # noqa: BLE001 (raised where the answer is awaited)
                found = as_error(error)
            # The loop may be closed by now.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, found)

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
            except BaseException as error:  # noqa: BLE001 (what is no error becomes one)
                raise as_error(error) from None

        async def close(self) -> None:
            pass

        async def __aenter__(self) -> Credential:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

    return Credential()


def renewed_signature(provider: Callable[[], str]) -> Any:
    """What adlfs takes for a shared access signature that ends, from a function that gives one.

    It is asked again, in a thread beside, once five minutes are left of a signature, or half of a shorter one's time.
    """
    from azure.core.credentials import AzureSasCredential

    def ask() -> str:
        found = provider()
        if not isinstance(found, str) or "sig=" not in found:
            kind = "a text without sig=" if isinstance(found, str) else type(found).__name__
            raise TypeError(f"storage_options['sas_token'] gave {kind}, where a shared access signature was expected")
        return found.removeprefix("?")

    class Signature(AzureSasCredential):
        def __init__(self) -> None:
            super().__init__(ask())
            self._asking = threading.Lock()
            self._asked = threading.Event()
            self._ends = self._renew_at = 0.0
            self._error: Exception | None = None
            self._take(super().signature)

        @property
        def signature(self) -> str:
            now = time.time()
            if now > self._renew_at and self._asking.acquire(blocking=False):
                self._asked.clear()
                threading.Thread(target=self._renew, name=TOKEN_THREAD, daemon=True).start()
            if now > self._ends:
                # All requests of this process wait: there is none that could be sent. Not for ever, and once.
                if not isinstance(self._error, TimeoutError) and not self._asked.wait(_SIGNATURE_SECONDS):
                    self._error = TimeoutError("storage_options['sas_token'] gives no signature")
                if self._error is not None:
                    raise self._error
            return super().signature

        def _take(self, signature: str) -> None:
            now = time.time()
            self._ends = signature_expiry(signature)
            self._renew_at = now + max(self._ends - now - _RENEW_SECONDS, (self._ends - now) / 2)
            self.update(signature)
            self._error = None

        def _renew(self) -> None:
            try:
                self._take(ask())
            except BaseException as error:  # noqa: BLE001 (raised once the old one has ended)
                ended = RuntimeError(f"storage_options['sas_token'] failed: it raised {type(error).__name__}")
                self._error = error if isinstance(error, Exception) else ended
                # Each request asks again from then on.
                self._renew_at = min(time.time() + _ASK_AGAIN_SECONDS, self._ends)
            finally:
                self._asked.set()
                self._asking.release()

    return Signature()


def signature_expiry(signature: str) -> float:
    """When a shared access signature ends, in seconds since 1970; in ten minutes where it does not say."""
    with contextlib.suppress(ValueError, KeyError):
        # Python 3.10 reads neither a Z nor seven digits.
        text = re.sub(r"\.\d+", "", parse_qs(signature)["se"][0]).replace("Z", "+00:00")
        found = dt.datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=dt.timezone.utc)).timestamp()
    return time.time() + 600


def token_expiry(token: str) -> int:
    """When a token ends, in seconds since 1970: as a JSON Web Token says itself, else in ten minutes.

    azure-core asks for another one five minutes before.
    """
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
        payload = token.split(".")[1]
        expiry = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["exp"]
        return int(expiry)
    return int(time.time()) + 600
