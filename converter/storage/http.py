"""Files of a web server, read by their names: nothing is listed, nothing is written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from fsspec.asyn import sync
from fsspec.implementations.dirfs import DirFileSystem

from converter.portable.deadlines import Result
from converter.storage.ranges import Data
from converter.storage.requests import BEYOND_THE_END_STATUS, GONE_STATUS, PARTIAL_STATUS, status_of
from converter.storage.store import Store


class HttpStore(Store):
    """A web server; a path is what follows its name."""

    has_containers = False
    has_folders = False

    def __init__(self, options: Mapping[str, Any], *, host: str, protocol: str, timeout_seconds: float) -> None:
        super().__init__(options, protocol=protocol, timeout_seconds=timeout_seconds)
        self.host = host

    def _open(self) -> Any:
        # fsspec would keep each of them, and its connections, for ever.
        return DirFileSystem(path=f"{self.protocol}://{self.host}", fs=super()._open(), skip_instance_cache=True)

    def ask(self, request: Callable[[Any], Result], *, path: str, **waiting: Any) -> Result:
        """As every store's; errors name the host."""

        def answer(filesystem: Any) -> Result:
            try:
                return request(filesystem)
            except FileNotFoundError as error:
                # fsspec reports a file as missing if it did not get its size.
                cause = error.__cause__
                if not isinstance(cause, Exception) or status_of(cause) in GONE_STATUS:
                    raise
                raise cause from None

        return super().ask(answer, path=f"{self.protocol}://{self.host}/{path}", **waiting)

    def ls(self, path: str, detail: bool = True) -> list[dict[str, Any]]:  # noqa: ARG002 (the name is fsspec's)
        """Raise OSError: a page of links need not name each file."""
        raise OSError(
            f"{self.protocol}://{self.host}/{path} is on a web server, which has no folders that could be listed; "
            "name each file, in a list"
        )

    def info(self, path: str, given_up: threading.Event | None = None) -> dict[str, Any]:
        """Size of a file; raises FileNotFoundError for a page."""
        info = super().info(quote(path), given_up)
        if info.get("mimetype") == "text/html" or str(info.get("url", "")).endswith("/"):
            raise FileNotFoundError(f"{self.protocol}://{self.host}/{path} is a page")
        if info.get("size") is None:
            raise OSError(f"{self.protocol}://{self.host}/{path}: the server does not report its size")
        return info

    def cat_file(self, path: str, given_up: threading.Event | None = None) -> bytes:
        """The bytes of a file."""
        return super().cat_file(quote(path), given_up)

    def read_range(self, path: str, start: int, end: int, given_up: threading.Event | None = None) -> Data:
        """A part of a file, in one request; an answer with another part, or the whole file, is an error."""

        async def read(filesystem: Any) -> bytes:
            url, kwargs = f"{self.protocol}://{self.host}/{quote(path)}", dict(filesystem.kwargs)
            # Of what it compresses a server gives no parts.
            asked = {"Accept-Encoding": "identity", "Range": f"bytes={start}-{end - 1}"}
            kwargs["headers"] = {**kwargs.get("headers", {}), **asked}
            session = await filesystem.set_session()
            async with session.get(filesystem.encode_url(url), **kwargs) as response:
                if response.status in GONE_STATUS:
                    raise FileNotFoundError(url)
                if response.status == BEYOND_THE_END_STATUS:
                    return b""
                response.raise_for_status()
                if response.status != PARTIAL_STATUS:
                    raise OSError(
                        f"{self.protocol}://{self.host} ignores Range requests and answers with whole files, so each "
                        "file would be fetched many times. Copy the files to a disk, or choose another server."
                    )
                given = response.headers.get("Content-Range", "")
                if not given.replace(" ", "").startswith(f"bytes{start}-"):
                    raise OSError(
                        f"the server was asked for the bytes {start} to {end - 1}, and gave {given or 'some'}"
                    )
                return bytes(await response.read())

        if start >= end:
            return b""
        return self.ask(
            lambda filesystem: bytes(sync(filesystem.fs.loop, read, filesystem.fs)), path=path, given_up=given_up
        )
