"""A store's fsspec filesystem, and how a file on it is opened and closed whole."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from typing import Any

from converter.portable.credentials import async_credential, renewed_signature
from converter.portable.deadlines import CLOSING_THREAD, start_beside

_AZURE_BLOCK_BYTES = 8 << 20
"""adlfs sends 50 MB at once otherwise, which takes a slow line longer than a store may be silent."""

_AZURE_PATIENCE = {"initial_backoff": 0, "increment_base": 2, "random_jitter_range": 0.25, "total_retries": 5,
                   "connect_retries": 5, "read_retries": 5, "status_retries": 5}  # fmt: skip
"""Azure's own begins with 15 seconds: asked again after 2, 4, 8, 16 and 32 seconds, within the default time."""

_LEAST_BLOCK_BYTES = 128 << 20
_BLOCK_STEP_BYTES = 1 << 20
"""Hadoop's default, and what NameNodes ask of a block's size at least."""


def open_filesystem(store: dict[str, Any] | None, **more: Any) -> Any:
    """The fsspec filesystem of a store; None for local disks."""
    if store is None:
        return None
    options = store["options"] | more
    if store["protocol"] in ("hdfs", "viewfs"):
        # fsspec's own class of this name needs libhdfs.
        import hdfs_native.fsspec as hdfs

        made = hdfs.HdfsFileSystem if store["protocol"] == "hdfs" else hdfs.ViewfsFileSystem
        options = dict(options)
        user = options.pop("user", None)
        # hdfs-native takes a user from the environment alone, and so for the whole process.
        if user is not None and os.environ.setdefault("HADOOP_USER_NAME", str(user)) != str(user):
            raise ValueError(f"the user {user} is not the one of HADOOP_USER_NAME, and a process can be one of them")
        found = made(**options)
        # Its own takes what follows a `;`, `?` or `#` off a path.
        found._strip_protocol = _plain_path  # type: ignore[method-assign]  # noqa: SLF001
        return found
    import fsspec

    if store["protocol"] == "abfs":
        # In one request: what it sends by default, 50 MB, takes a slow line too long.
        options = {"blocksize": _AZURE_BLOCK_BYTES} | options
    if callable(options.get("credential")) or hasattr(options.get("credential"), "get_token"):
        options = options | {"credential": async_credential(options["credential"])}
    if callable(options.get("sas_token")):
        options = options | {"credential": renewed_signature(options["sas_token"]), "sas_token": None}
    found = fsspec.filesystem(store["protocol"], **options)
    policy = getattr(getattr(getattr(found, "service_client", None), "_config", None), "retry_policy", None)
    for name, value in _AZURE_PATIENCE.items():
        if hasattr(policy, name):
            setattr(policy, name, value)
    return found


def _plain_path(path: Any) -> str:
    """A path on HDFS as it is, of a URL the part behind the cluster's name."""
    _, is_url, rest = str(path).partition("://")
    path = "/" + rest.partition("/")[2] if is_url else str(path)
    return path.rstrip("/") or "/"


def open_new(filesystem: Any, directory: str, name: str, *, num_bytes: int) -> Any:
    """A new file, to be written from its beginning to its end; of about so many bytes, or fewer.

    On HDFS it is one block: hdfs-native gives a file up when the NameNode is not told of a block before the next but
    one begins, which happens where DataNodes have much to do.
    """
    if filesystem is None:
        os.makedirs(directory, exist_ok=True)
        return open(os.path.join(directory, name), "wb", buffering=0)
    if not is_hdfs(filesystem):
        return filesystem.open(f"{directory}/{name}", "wb")
    filesystem.makedirs(directory, exist_ok=True)
    block_bytes = max(_LEAST_BLOCK_BYTES, -(-num_bytes // _BLOCK_STEP_BYTES) * _BLOCK_STEP_BYTES)
    return filesystem.open(f"{directory}/{name}", "wb", block_size=block_bytes)


def is_hdfs(filesystem: Any) -> bool:
    """Whether it is hdfs-native's."""
    return getattr(filesystem, "protocol", None) in ("hdfs", "viewfs")


def close_whole(filesystem: Any, raw: Any, path: str, num_bytes: int) -> None:
    """Close a new file of so many bytes; returns once the store has it whole.

    hdfs-native asks the NameNode to complete a file a moment before the DataNode has told it of the last block, and
    then waits half a second, a constant, before it asks again. Meanwhile the NameNode is asked here what can be read:
    it counts complete blocks alone, and where those are the whole file, giving up the lease closes it. 5 to 40 ms
    instead of 510 to 540. (Not before: a lease given up while the last block is on its way lets the NameNode recover
    that block, and the file is lost to its writer.)
    """
    if not num_bytes or not is_hdfs(filesystem):
        raw.close()
        return
    client = filesystem.client
    # Of versions that cannot, the NameNode is asked once more in the background; the file is whole already.
    can_give_up = hasattr(client, "recover_lease")
    is_closed = threading.Event()
    failed: list[BaseException] = []

    def close() -> None:
        try:
            raw.close()
        except BaseException as error:  # noqa: BLE001 (raised below, unless the file is whole)
            failed.append(error)
        finally:
            is_closed.set()
        # Else Python closes it again when it is forgotten, and waits for a NameNode that may be gone by then.
        io.IOBase.close(raw)

    start_beside(close, CLOSING_THREAD)
    pause = 0.002
    while not is_closed.wait(pause):
        pause = min(2 * pause, 0.1)
        # What this question fails with says nothing of the file; the closing itself will.
        with contextlib.suppress(Exception):
            if len(client.read(path)) == num_bytes and (not can_give_up or client.recover_lease(path)):
                return
    if failed:
        raise failed[0]


def remove_file(filesystem: Any, directory: str, name: str) -> None:
    """Delete a file of ours; does nothing where it is gone."""
    with contextlib.suppress(FileNotFoundError):
        if filesystem is None:
            os.unlink(os.path.join(directory, name))
        else:
            filesystem.rm_file(f"{directory}/{name}")
