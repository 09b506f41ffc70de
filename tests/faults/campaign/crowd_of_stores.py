"""The crowd of `crowd`, whose cache is on a namenode, in Azurite or in an emulator of S3, each a real server."""

from __future__ import annotations

import contextlib
import os
import random
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.faults.campaign.cases import Campaign, Step
from tests.faults.campaign.crowd import MAX_SECONDS, Crowds, draw_steps, run_in
from tests.servers.azurite import start_azurite
from tests.servers.hdfs import start_hdfs
from tests.servers.s3 import start_s3

CLIENTS = ("adlfs", "hdfs_native.fsspec", "s3fs")


def _draw(chance: random.Random) -> list[Step]:
    store = chance.choice(("HDFS", "Azurite", "S3"))
    return [{**step, "store": store} for step in draw_steps(chance)]


class _Stores:
    """The servers, each started when the first case needs it."""

    def __init__(self, folder: Path, crowds: Crowds, until: contextlib.ExitStack) -> None:
        self.crowds = crowds
        self._folder = folder
        self._until = until
        self._places: dict[str, tuple[str, dict[str, str]]] = {}

    def place(self, store: str) -> tuple[str, dict[str, str]]:
        """A new cache directory, and the variables by which a client finds it: what is pickled has no credentials."""
        if store not in self._places:
            folder = self._folder / store
            folder.mkdir()
            self._places[store] = getattr(self, f"_start_{store.lower()}")(folder)
        url, environment = self._places[store]
        os.environ |= environment
        return f"{url}/{uuid.uuid4().hex}", environment

    def _start_hdfs(self, folder: Path) -> tuple[str, dict[str, str]]:
        return f"{self._until.enter_context(start_hdfs(folder)).url}/crowd", {}

    def _start_azurite(self, folder: Path) -> tuple[str, dict[str, str]]:
        azurite = self._until.enter_context(start_azurite(folder))
        environment = {"AZURE_STORAGE_CONNECTION_STRING": azurite.connection_string}
        return azurite.url(azurite.new_container()), environment

    def _start_s3(self, folder: Path) -> tuple[str, dict[str, str]]:
        s3 = self._until.enter_context(start_s3(folder))
        names = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_ENDPOINT_URL": "endpoint_url"}
        return s3.url(s3.new_bucket()), {name: s3.options[option] for name, option in names.items()}


@contextlib.contextmanager
def _shared(folder: Path) -> Iterator[_Stores]:
    with contextlib.ExitStack() as until:
        crowds = until.enter_context(contextlib.closing(Crowds(*CLIENTS)))
        yield _Stores(folder, crowds, until)


def _run(steps: Sequence[Step], stores: _Stores, folder: Path) -> Counter[str]:
    store = steps[0]["store"]
    url, environment = stores.place(store)
    return run_in(steps, stores.crowds, folder, url, environment) + Counter({f"cases on {store}": 1})


CAMPAIGN = Campaign(name="crowd_of_stores", draw=_draw, run=_run, shared=_shared, max_seconds=MAX_SECONDS + 90)
