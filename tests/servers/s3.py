"""A store that speaks S3 on this machine: Moto, the emulator of Amazon's services. It keeps its data in memory."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.servers.process import Server, free_port, get


class S3:
    """The emulator, in a process of its own, and what a client must know of it."""

    key = "access-key-of-the-tests"
    secret = "secret-key-of-the-tests"

    def __init__(self, folder: Path) -> None:
        self.logs = folder
        self.port = free_port()
        self.process = Server(
            "Moto",
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            log=folder / "moto.log",
            is_ready=lambda: get(self.port, "/moto-api/") is not None,
        )

    @property
    def options(self) -> dict[str, Any]:
        """What s3fs needs to reach it."""
        return {"key": self.key, "secret": self.secret, "endpoint_url": f"http://127.0.0.1:{self.port}"}

    def new_bucket(self) -> str:
        """The name of a bucket that did not exist before."""
        from s3fs import S3FileSystem

        name = f"test-{uuid.uuid4().hex}"
        store = S3FileSystem(**self.options, skip_instance_cache=True)
        store.mkdir(name)
        return name

    def url(self, bucket: str) -> str:
        """The bucket as fsspec takes it."""
        return f"s3://{bucket}"


@contextmanager
def start_s3(folder: Path) -> Iterator[S3]:
    """The emulator, ready; it ends with the block."""
    server = S3(folder)
    server.process.start()
    try:
        yield server
    finally:
        server.process.stop()
