"""Opens a store's fsspec filesystem; opens a new file on it, and closes it so that the store has all of it."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

from converter.portable.credentials import async_credential, renewed_signature
from converter.portable.deadlines import CLOSING_THREAD, LAST_WAIT_SECONDS, answer_in, start_beside

if TYPE_CHECKING:
    from converter.portable.records import StoreSpec

_AZURE_BLOCK_BYTES = 8 << 20
"""What adlfs sends in one request; its default of 50 MB can take a slow line longer than a store may be silent."""

_LEAST_BLOCK_BYTES, _BLOCK_STEP_BYTES = 128 << 20, 1 << 20
"""Hadoop's default block, and the steps in which NameNodes allow other sizes."""


def open_filesystem(store: StoreSpec | None, *, retries_itself: bool = True) -> Any:
    """The fsspec filesystem of a store; None for local disks.

    Pass `retries_itself=False` if the caller retries failed requests: the client then reports each failure at once,
    and is one of the caller's own.
    """
    if store is None:
        return None
    options = dict(store["options"]) if retries_itself else store["options"] | {"skip_instance_cache": True}
    if store["protocol"] in ("hdfs", "viewfs"):
        return _open_hdfs(store["protocol"], options)
    if store["protocol"] == "abfs":
        options = {"blocksize": _AZURE_BLOCK_BYTES} | options
    # fsspec knows its filesystems again by their options, among which a function is wrapped anew each time.
    providers = [value for value in options.values() if callable(value) or hasattr(value, "get_token")]
    if not retries_itself or not providers:
        return _open_fsspec(store["protocol"], options, retries_itself=retries_itself)
    key = repr((store["protocol"], os.getpid(), sorted(options.items(), key=str)))
    opened = _of_this_task.get(key)
    if opened is None:
        options["skip_instance_cache"] = True
        # With the functions, so that no other ones get their addresses, which are in the key.
        opened = _of_this_task[key] = providers, _open_fsspec(store["protocol"], options, retries_itself=True)
    return opened[1]


_of_this_task: dict[str, tuple[list[Any], Any]] = {}
"""Filesystems with functions among their options. Each task of Spark brings this module, and its variables, anew."""


def close_filesystems() -> None:
    """Close the filesystems that know functions, at the end of a task: the next one has functions of its own.

    Reaches into: weakref.finalize._registry (CPython 3.10 to 3.13).
    Without it: adlfs 2026.8 holds each of its filesystems, and their sockets, until Spark's worker ends.
    """
    while _of_this_task:
        _, (_, filesystem) = _of_this_task.popitem()
        for finalizer in list(getattr(weakref.finalize, "_registry", ())):
            held = finalizer.peek()
            if held is not None and held[0] is filesystem:
                # A client that cannot be closed is as good as closed.
                with contextlib.suppress(Exception):
                    answer_in(LAST_WAIT_SECONDS, finalizer, "a client that is closed")


def _open_fsspec(protocol: str, options: dict[str, Any], *, retries_itself: bool) -> Any:
    import fsspec

    if callable(options.get("credential")) or hasattr(options.get("credential"), "get_token"):
        options["credential"] = async_credential(options["credential"])
    if callable(options.get("sas_token")):
        options |= {"credential": renewed_signature(options["sas_token"]), "sas_token": None}
    filesystem = fsspec.filesystem(protocol, **options)
    if protocol == "abfs":
        _set_azure_retries(filesystem, 5 if retries_itself else 0)
    return filesystem


_shared_hdfs: dict[str, Any] = {}
"""The clients of HDFS that this process shares. fsspec empties its own cache of them in a forked child, and there a
client of hdfs-native waits, before it ends, for threads that only the parent has."""


def _open_hdfs(protocol: str, options: dict[str, Any]) -> Any:
    # fsspec's own class of this name needs libhdfs.
    import hdfs_native.fsspec as hdfs

    user = options.pop("user", None)
    if user is not None:
        _name_hadoop_user(str(user))
    is_shared = not options.get("skip_instance_cache")
    key = repr((protocol, os.getpid(), sorted(options.items())))
    filesystem = _shared_hdfs.get(key) if is_shared else None
    if filesystem is None:
        kind = hdfs.HdfsFileSystem if protocol == "hdfs" else hdfs.ViewfsFileSystem
        filesystem = kind(**{**options, "skip_instance_cache": True})
        _keep_whole_paths(filesystem)
        if is_shared:
            _shared_hdfs[key] = filesystem
    return filesystem


def _name_hadoop_user(user: str) -> None:
    """Let hdfs-native write as this user. Raises ValueError if the process is another user already.

    Reaches into: os.environ, HADOOP_USER_NAME (hdfs-native 0.14, which takes a user from there alone).
    Without it: files on HDFS belong to the user of the process.
    """
    if os.environ.setdefault("HADOOP_USER_NAME", user) != user:
        raise ValueError(
            f"storage_options or the URL name the user {user}, and HADOOP_USER_NAME another one. A process can have "
            "only one: unset the variable, or start another process."
        )


def _keep_whole_paths(filesystem: Any) -> None:
    """Keep a `;`, `?` or `#` in a path on HDFS, and what follows it.

    Reaches into: hdfs_native.fsspec.HdfsFileSystem._strip_protocol (hdfs-native 0.14).
    Without it: hdfs-native cuts such a path, so that the file is not found.
    """

    def plain_path(path: Any) -> str:
        _, is_url, rest = str(path).partition("://")
        plain = "/" + rest.partition("/")[2] if is_url else str(path)
        return plain.rstrip("/") or "/"

    filesystem._strip_protocol = plain_path  # noqa: SLF001


def _set_azure_retries(filesystem: Any, num_retries: int) -> None:
    """Let Azure's client retry a failed request `num_retries` times: after 2, 4, 8, 16 and 32 seconds.

    By default it waits 15 seconds first and has no deadline. On an executor nothing else retries, so the client retries
    five times, within the default of timeout_seconds. A `Store` retries requests itself, until its deadline, and must
    see each answer: a put that was tried twice reports that the file exists. So there the client does not retry.

    Reaches into: azure.storage.blob.aio.BlobServiceClient._config.retry_policy (azure-storage-blob 12.31).
    Without it: the client's own retries, which are slower to begin and may end after the deadline.
    """
    policy = getattr(getattr(getattr(filesystem, "service_client", None), "_config", None), "retry_policy", None)
    names = ("total_retries", "connect_retries", "read_retries", "status_retries")
    pauses = {"initial_backoff": 0, "increment_base": 2, "random_jitter_range": 0.25}
    for name, value in (dict.fromkeys(names, num_retries) | pauses).items():
        if hasattr(policy, name):
            setattr(policy, name, value)


def open_new(filesystem: Any, directory: str, name: str, *, num_bytes: int) -> Any:
    """A new file, to be written from beginning to end; `num_bytes` is about its size, or more.

    On HDFS it is one block: with several, hdfs-native fails if a block is not yet reported to the NameNode when the
    second one after it begins, as happens with busy DataNodes.
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

    hdfs-native asks the NameNode to complete a file a moment before the DataNode has reported the last block, and asks
    again half a second later, a constant. So the NameNode is asked here what can be read: it counts complete blocks
    alone. Once those are the whole file, giving up the lease closes it: 5 to 40 ms instead of 510 to 540. (Not before:
    a lease given up while the last block is on its way makes the NameNode recover that block, and the file is lost.)
    """
    if not num_bytes or not is_hdfs(filesystem):
        raw.close()
        return
    client = filesystem.client
    # Older versions cannot: there the NameNode is asked once more in the background, but the file is whole already.
    can_give_up = hasattr(client, "recover_lease")
    is_closed = threading.Event()
    errors: list[BaseException] = []

    def close() -> None:
        try:
            raw.close()
        except BaseException as error:  # noqa: BLE001 (raised below, unless the file is whole)
            errors.append(error)
        finally:
            is_closed.set()
        # Else Python closes it again when it is collected, and waits for a NameNode that may be gone by then.
        mark_closed(raw)

    start_beside(close, CLOSING_THREAD)
    pause = 0.004
    while not is_closed.wait(pause):
        # Each question is a request to a NameNode that all ranks may be asking at once.
        pause = min(3 * pause, 0.1)
        # A failure of this question says nothing about the file; closing it will.
        with contextlib.suppress(Exception):
            if len(client.read(path)) == num_bytes and (not can_give_up or client.recover_lease(path)):
                return
    if errors:
        raise errors[0]


def mark_closed(raw: Any) -> None:
    """Let a file that is written count as closed, without telling its store anything.

    Reaches into: fsspec.spec.AbstractBufferedFile.closed, io.IOBase.close (fsspec 2026.9, hdfs-native 0.14).
    Without it: closing a discarded file finishes it, which takes a request and leaves a file to be removed.
    """
    if hasattr(raw, "blocksize"):
        raw.closed = True
    else:
        io.IOBase.close(raw)


def unsent_bytes(raw: Any, default: int) -> tuple[int, int]:
    """How many bytes a remote file has collected and not yet sent, and how many it sends at once.

    Reaches into: fsspec.spec.AbstractBufferedFile.buffer and .blocksize (fsspec 2026.9).
    Without it: `default` bytes are sent at once, so that each write is given the time of a request.
    """
    buffer = getattr(raw, "buffer", None)
    return (0 if buffer is None else buffer.tell()), getattr(raw, "blocksize", default)


def is_gone(filesystem: Any, path: str) -> bool:
    """Whether the store says that a file is not there."""
    try:
        if filesystem is None:
            os.stat(path)
        else:
            filesystem.invalidate_cache(path.rpartition("/")[0])
            filesystem.info(path)
    except FileNotFoundError:
        return True
    except Exception:  # noqa: BLE001 (each filesystem has errors of its own, and none is an answer)
        return False
    return False


def remove_file(filesystem: Any, directory: str, name: str) -> None:
    """Delete one of our files; does nothing if it is gone."""
    with contextlib.suppress(FileNotFoundError):
        if filesystem is None:
            os.unlink(os.path.join(directory, name))
        else:
            filesystem.rm_file(f"{directory}/{name}")
