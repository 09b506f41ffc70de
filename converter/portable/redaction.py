"""Finds the secrets in options and URLs, and removes them from texts and errors."""

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
"""Attributes in which azure-identity's objects keep a secret."""


def hide_secrets(text: str, options: Mapping[str, Any]) -> str:
    """The text with `***` for each secret of the options, for passwords in URLs and for queries of URLs.

    >>> hide_secrets("no answer from https://host/c/a?sig=abcd with the key efgh", {"account_key": "efgh"})
    'no answer from https://host/c/a?*** with the key ***'
    """
    for secret in _secrets_in(options):
        text = text.replace(secret, "***")
    return _QUERY.sub(r"\1?***", _PASSWORD.sub("://***@", text))


def shows_secrets(error: BaseException, options: Mapping[str, Any]) -> bool:
    """Whether the text of an error, or of one behind it, shows a secret: a traceback shows them all."""
    return any(hide_secrets(str(cause), options) != str(cause) for cause in errors_behind(error))


def errors_behind(error: BaseException | None) -> Iterator[BaseException]:
    """An error, its cause or context, and theirs."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def is_secret(name: str, value: Any) -> bool:
    """Whether an option is a secret or holds one; a function that gives secrets holds none."""
    if isinstance(value, Mapping):
        return any(is_secret(str(key), inner) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        # Such as aiohttp's BasicAuth.
        return any(is_secret(name, inner) for inner in value)
    if _held_secrets(value):
        return True
    if isinstance(value, str) and _PASSWORD.search(value):
        # An endpoint or a proxy with user and password.
        return True
    return isinstance(value, (str, bytes)) and _SECRET_NAME.search(name) is not None


def _held_secrets(value: Any) -> list[str]:
    """The secrets in one of Azure's credentials: a key, a signature, a password."""
    module = type(value).__module__
    if module.startswith("azure.core."):
        held = [getattr(value, "signature", None), getattr(value, "key", None)]
        held.append(getattr(getattr(value, "named_key", None), "key", None))
        return [secret for secret in held if isinstance(secret, str)]
    return list(_held_in(value, "", set())) if module.startswith("azure.identity") else []


def _held_in(value: Any, name: str, seen: set[int]) -> Iterator[str]:
    """The secrets in an object of azure-identity, found by the names of its attributes.

    Reaches into: azure.identity.*.__dict__ (azure-identity 1.27).
    Without it: such a credential counts as a provider without secrets, and is pickled as it is.
    """
    if isinstance(value, (str, bytes)):
        if value and _HELD_NAME.search(name):
            yield value.decode(errors="replace") if isinstance(value, bytes) else value
    elif id(value) not in seen:
        # The credentials of a chain may share what they hold.
        seen.add(id(value))
        if isinstance(value, Mapping):
            members = [(str(key), inner) for key, inner in value.items()]
        elif isinstance(value, (list, tuple)):
            members = [(name, inner) for inner in value]
        else:
            is_own = type(value).__module__.startswith("azure.identity")
            members = list(getattr(value, "__dict__", {}).items()) if is_own else []
        for key, inner in members:
            yield from _held_in(inner, key, seen)


def _secrets_in(options: Mapping[str, Any]) -> list[str]:
    """The secrets among options as texts, the longest first."""
    secrets: list[str] = []
    for name, value in options.items():
        if isinstance(value, (list, tuple)):
            for inner in value:
                secrets += _secrets_in(inner if isinstance(inner, Mapping) else {name: inner})
            continue
        if isinstance(value, Mapping):
            secrets += _secrets_in({str(key): inner for key, inner in value.items()})
            continue
        texts = _held_secrets(value)
        if isinstance(value, (str, bytes)) and is_secret(name, value):
            texts.append(value.decode(errors="replace") if isinstance(value, bytes) else value)
        for text in texts:
            # Also what follows "Bearer ".
            secrets += [text, text.removeprefix("?"), text.rpartition(" ")[2], *_PASSWORD.findall(text)]
            # A connection string's parts, a signature's fields.
            for part in text.replace("?", "&").replace(";", "&").split("&"):
                key, is_pair, part_value = part.partition("=")
                if is_pair and (_SECRET_NAME.search(key) or "sig" in key.lower()):
                    secrets += [part_value, unquote(part_value)]
    return sorted({secret for secret in secrets if len(secret) > 3}, key=len, reverse=True)
