"""What nobody may see, and how a text is rid of it: of options, of URLs, of what a client says.

It travels to Spark's executors with `executor`, and so imports nothing of ours either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

_QUERY = re.compile(r"(https?://[^\s?'\"]*)\?[^\s'\"]*")
_PASSWORD = re.compile(r"://[^/@:\s]*:([^/@\s]*)@")
_SECRET_NAME = re.compile(
    r"key|token|secret|pass|pwd|credential|connection_string|signature|authorization|cookie|header"
    r"|(?<![a-z])(?:auth|sas|sig)(?![a-z])",
    re.IGNORECASE,
)
_HELD_NAME = re.compile(r"secret|password|passphrase|private|client_credential|assertion")
"""Where azure-identity's objects keep what they get their tokens by."""


def hide_secrets(text: str, options: Mapping[str, Any]) -> str:
    """The text with `***` for whatever the options hold that nobody may see, and for the queries of URLs.

    >>> hide_secrets("no answer from https://host/c/a?sig=abcd with the key efgh", {"account_key": "efgh"})
    'no answer from https://host/c/a?*** with the key ***'
    """
    for secret in _secrets_in(options):
        text = text.replace(secret, "***")
    return _QUERY.sub(r"\1?***", _PASSWORD.sub("://***@", text))


def shows_secrets(error: BaseException, options: Mapping[str, Any]) -> bool:
    """Whether an error's text holds any, or that of one behind it, which a traceback shows as well."""
    return any(hide_secrets(str(one), options) != str(one) for one in errors_behind(error))


def errors_behind(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those behind it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def is_secret(name: str, value: Any) -> bool:
    """Whether an option must not be seen, or holds what must not; what gives secrets when it is asked need not."""
    if isinstance(value, Mapping):
        return any(is_secret(str(inner), one) for inner, one in value.items())
    if isinstance(value, (list, tuple)):
        # Such as aiohttp's BasicAuth.
        return any(is_secret(name, one) for one in value)
    if _held_secrets(value):
        return True
    if isinstance(value, str) and _PASSWORD.search(value):
        # User and password of an endpoint or a proxy.
        return True
    return isinstance(value, (str, bytes)) and _SECRET_NAME.search(name) is not None


def _held_secrets(value: Any) -> list[str]:
    """What credentials of Azure hold: a key or a signature, and those that ask for tokens a password, say."""
    module = type(value).__module__
    if module.startswith("azure.core."):
        held = [getattr(value, "signature", None), getattr(value, "key", None)]
        held.append(getattr(getattr(value, "named_key", None), "key", None))
        return [one for one in held if isinstance(one, str)]
    return list(_held_in(value, "", set())) if module.startswith("azure.identity") else []


def _held_in(value: Any, name: str, seen: set[int]) -> Iterator[str]:
    if isinstance(value, (str, bytes)):
        if value and _HELD_NAME.search(name):
            yield value.decode(errors="replace") if isinstance(value, bytes) else value
    elif id(value) not in seen:
        # One of a chain may hold what another one uses.
        seen.add(id(value))
        if isinstance(value, Mapping):
            inner = [(str(key), one) for key, one in value.items()]
        elif isinstance(value, (list, tuple)):
            inner = [(name, one) for one in value]
        else:
            is_own = type(value).__module__.startswith("azure.identity")
            inner = list(vars(value).items()) if is_own and hasattr(value, "__dict__") else []
        for key, one in inner:
            yield from _held_in(one, key, seen)


def _secrets_in(options: Mapping[str, Any]) -> list[str]:
    """The texts among options that nobody may see, the longest first."""
    found: list[str] = []
    for name, value in options.items():
        if isinstance(value, (list, tuple)):
            for one in value:
                found += _secrets_in(one if isinstance(one, Mapping) else {name: one})
            continue
        if isinstance(value, Mapping):
            found += _secrets_in({str(inner): one for inner, one in value.items()})
            continue
        texts = _held_secrets(value)
        if isinstance(value, (str, bytes)) and is_secret(name, value):
            texts.append(value.decode(errors="replace") if isinstance(value, bytes) else value)
        for text in texts:
            # Of "Bearer …" also what stands behind it.
            found += [text, text.removeprefix("?"), text.rpartition(" ")[2], *_PASSWORD.findall(text)]
            # A connection string's parts, a signature's fields.
            for part in text.replace("?", "&").replace(";", "&").split("&"):
                key, is_pair, inner = part.partition("=")
                if is_pair and (_SECRET_NAME.search(key) or "sig" in key.lower()):
                    found += [inner, unquote(inner)]
    return sorted({one for one in found if len(one) > 3}, key=len, reverse=True)
