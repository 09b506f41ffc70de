"""A task has one client for the functions that give its tokens, and leaves none in Spark's worker, which lives on."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest

from converter.portable import filesystems
from converter.portable.filesystems import close_filesystems, open_filesystem
from converter.storage.opening import open_storage
from converter.storage.store import detach_finalizers

URL = "abfss://data@lake.dfs.core.windows.net/a"


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    yield
    close_filesystems()


def signature() -> str:
    return "sv=2020&sig=abc&se=2099-01-01T00:00:00Z"


def opened(**options: Any) -> Any:
    return open_filesystem(open_storage(URL, options, 5).store)


@pytest.mark.parametrize("name", ["sas_token", "credential"])
def test_a_task_has_one_filesystem_for_a_function_and_leaves_none(name: str) -> None:
    kind = fsspec.get_filesystem_class("abfs")
    gc.collect()
    kept, known = len(kind._cache), len(getattr(weakref.finalize, "_registry"))  # noqa: B009 (mypy knows no such name)
    first = weakref.ref(opened(**{name: signature}))
    assert opened(**{name: signature}) is first()
    assert len(kind._cache) == kept
    close_filesystems()
    gc.collect()
    assert first() is None
    assert len(getattr(weakref.finalize, "_registry")) == known  # noqa: B009


def test_other_functions_and_other_options_have_filesystems_of_their_own() -> None:
    assert opened(sas_token=signature) is not opened(sas_token=lambda: signature())  # noqa: PLW0108
    assert opened(sas_token=signature) is not opened(sas_token=signature, max_concurrency=3)


def test_the_next_task_asks_its_own_function() -> None:
    asked = []
    for number in range(2):
        opened(sas_token=lambda number=number: asked.append(number) or signature())
        close_filesystems()
    assert asked == [0, 1]


def test_a_client_that_cannot_be_closed_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: Any) -> None:
        raise OSError("gone")

    monkeypatch.setattr("adlfs.spec.close_service_client", fail)
    first = weakref.ref(opened(sas_token=signature))
    close_filesystems()
    gc.collect()
    assert first() is None
    assert not filesystems._of_this_task


def test_the_driver_has_clients_of_its_own() -> None:
    store = open_storage(URL, {"sas_token": signature}, 5).store
    first, second = (open_filesystem(store, retries_itself=False) for _ in range(2))
    assert first is not second
    assert not filesystems._of_this_task
    for client in (first, second):
        # adlfs would keep it, and a forked child that ends would wait for ever for the parent's thread.
        detach_finalizers(client)
