"""The servers that other tests rely on: they are real, they obey, and nothing of them is left behind."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.processes import error_of, finish, run_python, start_python
from tests.servers import process
from tests.servers.process import Server, fetch, fetched, free_port, require_program
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.servers.azurite import Azurite, BlobAccount, SlowAzurite
    from tests.servers.hdfs import Hdfs

CONTENT = bytes(range(256)) * 40_000  # 10 MB: three blocks of HDFS.


# Processes and downloads ---------------------------------------------------------------


def _start_sleeper(folder: str) -> None:
    """Start a server with a child of its own, tell who they are, and wait to be killed."""
    children = f"{folder}/children"
    command = ["sh", "-c", f"sleep 1000 & echo $! $$ > {children}; wait"]
    Server("sleeper", command, log=Path(folder, "log"), is_ready=lambda: os.path.exists(children)).start()
    Path(folder, "is-up").touch()
    signal.pause()


def _is_alive(pid: int) -> bool:
    try:
        # The state stands behind the name, which is in parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_server_and_its_children_end_with_a_test_process_that_is_killed(tmp_path: Path) -> None:
    with start_python(_start_sleeper, str(tmp_path)) as tests:
        wait_until((tmp_path / "is-up").exists)
        pids = [int(pid) for pid in (tmp_path / "children").read_text().split()]
        assert all(_is_alive(pid) for pid in pids)
        tests.kill()
        wait_until(lambda: not any(_is_alive(pid) for pid in pids))


def test_a_server_that_ends_instead_of_answering_shows_the_end_of_its_log(tmp_path: Path) -> None:
    server = Server("broken", ["sh", "-c", "seq 100; echo no memory"], log=tmp_path / "log", is_ready=lambda: False)
    with pytest.raises(RuntimeError, match=r"broken ended\. The end of .*log:\n62\n(?s:.*)\n100\nno memory$"):
        server.start()


def test_a_server_that_does_not_answer_in_time_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "START_SECONDS", 0)
    server = Server("dumb", ["sleep", "1000"], log=tmp_path / "log", is_ready=lambda: False)
    with pytest.raises(RuntimeError, match=r"dumb did not answer within 0 s"):
        server.start()
    assert not server.is_running


def _take_ports(first: int, stop: int) -> list[int]:
    pytest.MonkeyPatch().setattr(process, "_PORTS", range(first, stop))
    return [free_port() for _ in range(50)]


def test_no_two_processes_are_given_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_PORTS", range(19_000, 19_150))
    mine = {free_port() for _ in range(50)}
    theirs = set(run_python(_take_ports, 19_000, 19_150))
    assert len(mine) == len(theirs) == 50
    assert not mine & theirs


def _fetch_together(folder: str, name: str) -> str:
    def fill(unfinished: Path) -> None:
        wait_until(lambda: len(list(Path(folder).glob("started-*"))) == 2)
        (unfinished / "content").write_text(name)

    Path(folder, f"started-{name}").touch()
    return (fetched("thing", fill) / "content").read_text()


def test_two_processes_that_want_the_same_thing_fetch_it_once(tmp_path: Path) -> None:
    cache = {"CONVERTER_TEST_SERVERS": str(tmp_path / "cache")}
    with (
        start_python(_fetch_together, str(tmp_path), "a", environment=cache) as first,
        start_python(_fetch_together, str(tmp_path), "b", environment=cache) as second,
    ):
        assert finish(first) == finish(second)


def test_what_could_not_be_fetched_whole_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("no network")

    monkeypatch.setattr(process, "_cache", lambda: tmp_path)
    with pytest.raises(RuntimeError, match="no network"):
        fetched("thing", fail)
    folder = fetched("thing", lambda folder: (folder / "whole").touch())
    assert [path.name for path in folder.iterdir()] == ["whole"]


def test_a_registry_is_asked_three_times(tmp_path: Path) -> None:
    fail_twice = ["sh", "-c", "echo asked | tee -a asked; test $(wc -l < asked) = 3"]
    fetch(fail_twice, folder=tmp_path)
    with pytest.raises(RuntimeError, match=r"failed three times:\nasked\n$"):
        fetch(fail_twice, folder=tmp_path)


def test_a_missing_program_skips_a_test_and_fails_it_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"^`no-such-program` is missing: install it$"):
        require_program("no-such-program", "install it")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=r"^`no-such-program` is missing: install it$"):
        require_program("no-such-program", "install it")


# HDFS ----------------------------------------------------------------------------------


def _write(hdfs: Hdfs, path: str) -> Any:
    """A client that has written `CONTENT` to a file."""
    from hdfs_native import Client

    client = Client(hdfs.url)
    with client.create(path) as file:
        file.write(CONTENT)
    return client


def test_hdfs_keeps_what_hdfs_native_writes(hdfs: Hdfs) -> None:
    client = _write(hdfs, "/written")
    assert client.read("/written").read() == CONTENT
    assert client.get_file_info("/written").blocksize < len(CONTENT) / 2


def test_hdfs_keeps_what_spark_writes(hdfs: Hdfs, spark: SparkSession) -> None:
    spark.range(1000).write.parquet(f"{hdfs.url}/spark")
    assert spark.read.parquet(f"{hdfs.url}/spark").count() == 1000


def test_a_paused_namenode_answers_once_it_goes_on(hdfs: Hdfs) -> None:
    client = _write(hdfs, "/paused")
    with ThreadPoolExecutor() as pool:
        with hdfs.namenode.paused():
            asked = pool.submit(client.get_file_info, "/paused")
            assert not wait([asked], timeout=1).done
        assert asked.result().length == len(CONTENT)


def test_a_namenode_comes_back_with_its_data(hdfs: Hdfs) -> None:
    client = _write(hdfs, "/restarted")
    with hdfs.namenode.killed():
        assert not hdfs.namenode.is_running
    hdfs.wait_until_writable()
    assert client.read("/restarted").read() == CONTENT


def test_a_datanode_comes_back_with_its_data(hdfs: Hdfs) -> None:
    client = _write(hdfs, "/killed")
    with hdfs.datanode.killed():
        hdfs.wait_until_datanode_is_given_up()
        # The NameNode is another process, and knows the file.
        assert client.get_file_info("/killed").length == len(CONTENT)
        with pytest.raises(RuntimeError, match="All DataNodes failed"):
            client.read("/killed").read()
    assert hdfs.num_live_datanodes() == 1
    assert client.read("/killed").read() == CONTENT


def test_in_safe_mode_hdfs_is_read_but_not_changed(hdfs: Hdfs) -> None:
    client = _write(hdfs, "/safe")
    with hdfs.safe_mode():
        assert client.read("/safe").read() == CONTENT
        with pytest.raises(RuntimeError, match="SafeModeException"):
            client.mkdirs("/safe-not")
    client.mkdirs("/safe-again")


def _error_of_writing(url: str) -> list[str]:
    from hdfs_native import Client

    return error_of(lambda: Client(url).create("/not-mine"))


def test_hdfs_checks_permissions(hdfs: Hdfs) -> None:
    _, text = run_python(_error_of_writing, hdfs.url, environment={"HADOOP_USER_NAME": "somebody"})
    assert "Permission denied: user=somebody" in text


# Azurite -------------------------------------------------------------------------------


def _filesystem(account: BlobAccount) -> Any:
    import fsspec

    # No shared instance: one of an earlier test may have been made for the same port.
    return fsspec.filesystem("abfs", connection_string=account.connection_string, skip_instance_cache=True)


def test_azurite_keeps_what_adlfs_writes(azurite: Azurite) -> None:
    filesystem = _filesystem(azurite)
    path = f"{azurite.new_container()}/folder/file"
    filesystem.pipe_file(path, CONTENT)
    assert filesystem.cat_file(path) == CONTENT
    assert filesystem.info(path)["size"] == len(CONTENT)


def test_azurite_keeps_its_data_when_it_is_killed_or_stopped(azurite: Azurite) -> None:
    filesystem = _filesystem(azurite)
    path = f"{azurite.new_container()}/file"
    filesystem.pipe_file(path, CONTENT)
    with azurite.killed():
        assert not azurite.process.is_running
    assert filesystem.cat_file(path) == CONTENT
    azurite.stop()
    azurite.start()
    assert filesystem.cat_file(path) == CONTENT


@pytest.mark.parametrize(
    ("options", "status"),
    [({}, 201), ({"permission": "rl"}, 403), ({"valid_seconds": -60}, 403)],
    ids=["valid", "for reading", "expired"],
)
def test_a_token_allows_what_it_was_made_for(azurite: Azurite, options: dict[str, Any], status: int) -> None:
    container = azurite.new_container()
    assert _put(azurite, f"{container}/file?{azurite.sas(container, **options)}", CONTENT) == status


def _write_by_spark(url: str, confs: dict[str, str]) -> int:
    from converter import start_local_spark

    spark = start_local_spark("azurite", master="local[2]", conf=confs)
    spark.range(1000).write.parquet(f"{url}/table")
    return int(spark.read.parquet(f"{url}/table").count())


def test_azurite_keeps_what_spark_writes(azurite: Azurite) -> None:
    container = azurite.new_container()
    # In a process of its own: a session that runs takes no more packages.
    assert run_python(_write_by_spark, azurite.url(container), azurite.spark_confs()) == 1000
    assert any(path.endswith(".parquet") for path in _filesystem(azurite).find(f"{container}/table"))


# The proxy -----------------------------------------------------------------------------


@contextlib.contextmanager
def _connected(account: BlobAccount) -> Iterator[http.client.HTTPConnection]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", account.port, timeout=60)) as connection:
        yield connection


def _get(connection: http.client.HTTPConnection, path: str, **headers: str) -> bytes:
    connection.request("GET", path, headers=headers)
    return connection.getresponse().read()


def _read(account: BlobAccount, blob: str) -> bytes:
    with _connected(account) as connection:
        return _get(connection, f"/{account.account}/{blob}")


def _put(account: BlobAccount, blob: str, content: bytes) -> int:
    """The status of writing a blob."""
    with _connected(account) as connection:
        connection.request("PUT", f"/{account.account}/{blob}", content, {"x-ms-blob-type": "BlockBlob"})
        return connection.getresponse().status


@pytest.fixture
def blob(slow_azurite: SlowAzurite) -> str:
    """A blob of `CONTENT` below its account, with a token; no request is written down yet."""
    container = slow_azurite.new_container()
    blob = f"{container}/blob?{slow_azurite.sas(container)}"
    assert _put(slow_azurite, blob, CONTENT) == 201
    slow_azurite.proxy.forget()
    return blob


def test_the_proxy_hands_on_what_it_gets_and_writes_it_down(slow_azurite: SlowAzurite, blob: str) -> None:
    path = f"/{slow_azurite.account}/{blob}"
    with _connected(slow_azurite) as connection:
        assert _get(connection, path) == CONTENT
        # On the same connection, which is kept.
        assert _get(connection, path, Range="bytes=10-19") == CONTENT[10:20]
        connection.request("HEAD", path)
        assert connection.getresponse().headers["Content-Length"] == str(len(CONTENT))
    found = [(request.method, request.path, request.range) for request in slow_azurite.proxy.requests]
    assert found == [("GET", path, None), ("GET", path, "bytes=10-19"), ("HEAD", path, None)]
    assert (slow_azurite.proxy.count(), slow_azurite.proxy.count("GET")) == (3, 2)


def test_a_client_that_signs_its_requests_is_understood(slow_azurite: SlowAzurite) -> None:
    filesystem = _filesystem(slow_azurite)
    path = f"{slow_azurite.new_container()}/file"
    filesystem.pipe_file(path, CONTENT)
    assert filesystem.cat_ranges([path] * 3, [0, 10, 20], [5, 15, 25]) == [CONTENT[at : at + 5] for at in (0, 10, 20)]


@pytest.mark.parametrize("num_bytes", [0, 1, 2**18, 2**26])
def test_bodies_of_any_length_pass(slow_azurite: SlowAzurite, blob: str, num_bytes: int) -> None:
    content = (CONTENT * 7)[:num_bytes]
    assert _put(slow_azurite, blob, content) == 201
    assert _read(slow_azurite, blob) == content


def test_bodies_whose_length_is_not_told_pass(slow_azurite: SlowAzurite, blob: str) -> None:
    with _connected(slow_azurite) as connection:
        for _ in range(2):
            connection.request(
                "GET", f"/{slow_azurite.account}/{blob}&restype=container&comp=list".replace("/blob?", "?")
            )
            answer = connection.getresponse()
            assert answer.headers["Transfer-Encoding"] == "chunked"
            assert b"<Name>blob</Name>" in answer.read()


def test_every_request_is_delayed(slow_azurite: SlowAzurite, blob: str) -> None:
    slow_azurite.proxy.delay_seconds = 0.1
    started = time.monotonic()
    for _ in range(3):
        _read(slow_azurite, blob)
    assert time.monotonic() - started >= 0.3
    assert slow_azurite.proxy.count() == 3
    assert slow_azurite.proxy.most_at_once == 1


def test_requests_that_hang_are_answered_once_it_ends(slow_azurite: SlowAzurite, blob: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        with slow_azurite.proxy.hanging():
            answers = [pool.submit(_read, slow_azurite, blob) for _ in range(8)]
            wait_until(lambda: slow_azurite.proxy.count() == 8)
            assert not any(answer.done() for answer in answers)
        assert all(answer.result() == CONTENT for answer in answers)
    assert slow_azurite.proxy.most_at_once == 8


@pytest.mark.parametrize("status", [403, 429, 500, 503])
def test_the_next_requests_get_the_error_that_was_chosen(slow_azurite: SlowAzurite, blob: str, status: int) -> None:
    slow_azurite.proxy.fail_next(2, status=status, retry_after_seconds=7)
    found = []
    with _connected(slow_azurite) as connection:
        for _ in range(3):
            connection.request("GET", f"/{slow_azurite.account}/{blob}")
            answer = connection.getresponse()
            found.append((answer.status, answer.headers["Retry-After"]))
            answer.read()
    assert found == [(status, "7"), (status, "7"), (200, None)]


def test_faults_that_nobody_met_can_be_taken_back(slow_azurite: SlowAzurite, blob: str) -> None:
    slow_azurite.proxy.reset_next(100)
    slow_azurite.proxy.heal()
    assert _read(slow_azurite, blob) == CONTENT


def test_a_fault_may_be_meant_for_some_requests(slow_azurite: SlowAzurite, blob: str) -> None:
    slow_azurite.proxy.fail_next(status=503, method="PUT")
    assert _read(slow_azurite, blob) == CONTENT
    assert [_put(slow_azurite, blob, b"new") for _ in range(2)] == [503, 201]
    slow_azurite.proxy.reset_next(path="/no/such/path")
    assert _read(slow_azurite, blob) == b"new"


def test_a_request_that_is_reset_never_reaches_the_server(slow_azurite: SlowAzurite, blob: str) -> None:
    slow_azurite.proxy.reset_next()
    with pytest.raises(OSError, match="reset"):
        _put(slow_azurite, blob, b"new")
    assert _read(slow_azurite, blob) == CONTENT


def test_a_request_whose_answer_is_lost_was_done(slow_azurite: SlowAzurite, blob: str) -> None:
    slow_azurite.proxy.lose_next_answers()
    with pytest.raises(OSError, match="reset"):
        _put(slow_azurite, blob, b"new")
    assert _read(slow_azurite, blob) == b"new"


def test_an_answer_breaks_off_after_some_bytes(slow_azurite: SlowAzurite, blob: str) -> None:
    slow_azurite.proxy.lose_next_answers(after_bytes=1000)
    with _connected(slow_azurite) as connection:
        connection.request("GET", f"/{slow_azurite.account}/{blob}")
        answer = connection.getresponse()
        assert answer.status == 200
        with pytest.raises(ConnectionResetError, match="reset"):
            answer.read()


def test_the_proxy_does_not_outlast_its_block_for_those_who_wait(azurite: Azurite) -> None:
    from tests.servers.azurite import SlowAzurite
    from tests.servers.proxy import Proxy

    with ThreadPoolExecutor() as pool:
        with Proxy(azurite.port, delay_seconds=1000) as proxy:
            answer = pool.submit(_read, SlowAzurite(proxy), "container/blob")
            wait_until(proxy.count)
        with pytest.raises(OSError, match=r"reset|closed"):
            answer.result()
    assert not [thread for thread in threading.enumerate() if thread.name == "proxy"]
