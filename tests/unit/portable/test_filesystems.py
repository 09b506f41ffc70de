"""A worker of Spark lives for many tasks, and has one client for all that name the same credentials."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fsspec
import pytest

from converter.portable.filesystems import _MAX_SHARED, _shared_with_providers, open_filesystem
from converter.storage.opening import open_storage

URL = "abfss://data@lake.dfs.core.windows.net/a"


class Tokens:
    """As an object of azure-identity."""

    __slots__ = ()

    def get_token(self, *scopes: str) -> Any:
        raise AssertionError("nothing is asked for")


@pytest.fixture(autouse=True)
def shared() -> Iterator[dict[str, Any]]:
    before = dict(_shared_with_providers())
    _shared_with_providers().clear()
    yield _shared_with_providers()
    _shared_with_providers().clear()
    _shared_with_providers().update(before)


def signature() -> str:
    return "sv=2020&sig=abc&se=2099-01-01T00:00:00Z"


def in_a_task(options: dict[str, Any]) -> Any:
    """What a task opens: it gets the options anew, and another object for a function among them."""
    store = open_storage(URL, options, 5).store
    assert store is not None
    copied = {name: (lambda value=value: value()) if callable(value) else value for name, value in options.items()}
    return open_filesystem({**store, "options": store["options"] | copied})


@pytest.mark.parametrize("name", ["sas_token", "credential"])
def test_tasks_share_the_filesystem_of_a_function(name: str) -> None:
    kept = len(fsspec.get_filesystem_class("abfs")._cache)
    opened = {id(in_a_task({name: signature})) for _ in range(3)}
    assert len(opened) == 1
    assert len(fsspec.get_filesystem_class("abfs")._cache) == kept


def test_other_functions_and_other_options_have_filesystems_of_their_own() -> None:
    def other() -> str:
        return signature()

    assert in_a_task({"sas_token": signature}) is not in_a_task({"sas_token": other})
    assert in_a_task({"sas_token": signature}) is not in_a_task({"sas_token": signature, "max_concurrency": 3})
    assert in_a_task({"sas_token": other}) is in_a_task({"sas_token": other})


def test_the_driver_has_clients_of_its_own() -> None:
    store = open_storage(URL, {"sas_token": signature}, 5).store
    assert open_filesystem(store, retries_itself=False) is not open_filesystem(store, retries_itself=False)
    assert not _shared_with_providers()


def test_of_many_functions_the_oldest_filesystems_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Any] = []

    async def close(filesystem: Any) -> None:
        closed.append(filesystem)

    monkeypatch.setattr("adlfs.spec.close_service_client", close)
    opened = [in_a_task({"sas_token": lambda: signature()}) for _ in range(_MAX_SHARED + 2)]  # noqa: PLW0108
    assert closed == opened[:2]
    assert list(_shared_with_providers().values()) == opened[2:]


def test_what_has_no_name_is_another_one_each_time() -> None:
    assert in_a_task({"credential": Tokens()}) is not in_a_task({"credential": Tokens()})
