"""Each credential that Azure has opens the same container, and folders that are blobs leave no trace of ours.

What talks TLS runs in a Python of its own, which trusts the emulator's certificate from its first import on.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import logging
import os
import pickle
import re
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from azure.core.credentials import AccessToken
from azure.storage.blob import ContainerClient
from deltalake import write_deltalake
from pyspark.sql import SparkSession

from converter import (
    CacheError,
    DatasetConverter,
    SourceError,
    make_delta_converter,
    make_parquet_converter,
    make_spark_converter,
    sweep,
)
from converter.cache import entries, leases, roots
from converter.sources.spark.local import find_java_home
from converter.storage.opening import open_storage
from tests.processes import run_python
from tests.servers.azurite import TRUST_PASSWORD, Azurite, SecureAzurite, start_secure_azurite
from tests.unit.cache.written import KEY, write_attempt

STORAGE = "https://storage.azure.com"
HEADER = "known to the machine alone"
HOUR = 3600
SOON = 200
"""Seconds: azure-core asks for another token when fewer than 300 are left."""

SENT = ["function", "ManagedIdentityCredential", "DefaultAzureCredential"]
"""What gives tokens, and travels with a converter to worker processes."""

PROVIDERS = [*SENT, "aio-ManagedIdentityCredential"]


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureAzurite]:
    with start_secure_azurite(tmp_path_factory.mktemp("secure") / "azurite") as account:
        yield account


class MachineIdentity:
    """The address that App Service, Functions and their like give tokens of a managed identity at.

    Of each path it gives one token after another, which live for `lives` seconds each, and the last life for all that
    follow; `asked` counts them.
    """

    def __init__(self, *lives: int, audience: str = STORAGE) -> None:
        self.asked: Counter[str] = Counter()
        identity, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                address = urlsplit(self.path)
                if self.headers["X-IDENTITY-HEADER"] != HEADER or parse_qs(address.query)["resource"] != [STORAGE]:
                    self.send_error(400)
                    return
                with lock:
                    life = lives[min(identity.asked[address.path], len(lives) - 1)]
                    identity.asked[address.path] += 1
                until = int(time.time()) + life
                found = {"access_token": token(until, audience), "expires_on": str(until), "resource": STORAGE}
                answer = json.dumps(found | {"token_type": "Bearer"}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def environment(self) -> dict[str, str]:
        """What such a machine tells its processes."""
        return {
            "IDENTITY_ENDPOINT": f"http://127.0.0.1:{self._server.server_port}/",
            "IDENTITY_HEADER": HEADER,
            # adlfs would find it by itself, and hide that it was not told a credential.
            "AZURE_STORAGE_ANON": "true",
        }

    def __enter__(self) -> MachineIdentity:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def token(until: int, audience: str) -> str:
    """As Entra ID gives them, signed by nobody: the emulator does not look."""

    def part(value: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    claims = {"aud": audience, "iss": "https://sts.windows.net/tests/", "iat": until - HOUR, "nbf": until - HOUR}
    return ".".join([part({"alg": "none"}), part(claims | {"exp": until}), "nobody"])


# In a Python of its own --------------------------------------------------------------


def ask_the_machine() -> str:
    """What a user writes who has a service that gives tokens as texts."""
    address = f"{os.environ['IDENTITY_ENDPOINT']}?resource={STORAGE}"
    request = urllib.request.Request(address, headers={"X-IDENTITY-HEADER": os.environ["IDENTITY_HEADER"]})
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["access_token"])


def provider(kind: str) -> Any:
    """What gives tokens to a user, asked at an address that says which kind it is."""
    import azure.identity
    import azure.identity.aio

    os.environ["IDENTITY_ENDPOINT"] = f"{os.environ['IDENTITY_ENDPOINT'].rpartition('/')[0]}/{kind}"
    if kind == "function":
        return ask_the_machine
    return getattr(azure.identity.aio if kind.startswith("aio") else azure.identity, kind.removeprefix("aio-"))()


def rows_of(converter: DatasetConverter) -> list[int]:
    with converter, converter.make_batch_reader(batch_size=2) as reader:
        return sorted(number for batch in reader for number in batch["id"].tolist())


def use(url: str, options: dict[str, Any]) -> dict[str, Any]:
    """All that a cache and readers do with a store."""
    storage = open_storage(f"{url}/cache", options, 20)
    won = [storage.put_if_absent("a", b"first"), storage.put_if_absent("a", b"second"), storage.put_if_absent("b", b"")]
    storage.touch("a")
    storage.delete_file("b")
    return {
        "won": won,
        "read": storage.read("a").decode(),
        "names": [info.name for info in storage.list()],
        "parquet": rows_of(make_parquet_converter(f"{url}/parquet", storage_options=options, timeout_seconds=20)),
        "delta": rows_of(make_delta_converter(f"{url}/delta", storage_options=options, timeout_seconds=20)),
    }


USED = {"won": [True, False, True], "read": "first", "names": ["a"], "parquet": [0, 1, 2], "delta": [0, 1, 2]}


def use_each(places: dict[str, tuple[str, dict[str, str]]]) -> dict[str, Any]:
    """What each credential shows in a container of its own, or how it fails."""
    found: dict[str, Any] = {}
    for kind, (url, given) in places.items():
        try:
            options = given | ({"credential": provider(kind)} if kind in PROVIDERS else {})
            found[kind] = use(url, options)
            if kind in SENT:
                again = pickle.loads(pickle.dumps(open_storage(f"{url}/cache", options, 20)))
                found[kind]["read elsewhere"] = again.read("a").decode()
        except Exception as error:  # noqa: BLE001 (the next credential is tried all the same)
            found[kind] = f"{type(error).__name__}: {error}"
    return found


def read_by_each(kinds: list[str], url: str, given: dict[str, str]) -> dict[str, list[int]]:
    def read(kind: str) -> list[int]:
        options = given | {"credential": provider(kind)}
        return rows_of(make_parquet_converter(f"{url}/parquet", storage_options=options, timeout_seconds=20))

    return {kind: read(kind) for kind in kinds}


def use_urls(urls: list[str], tables: list[str], given: dict[str, str]) -> dict[str, Any]:
    """What is read by each URL, and of what each of them has written."""
    found = {}
    for number, url in enumerate(urls):
        storage = open_storage(f"{url}/cache", given, 20)
        assert storage.put_if_absent(str(number), url.encode())
        found[url] = {
            "shown": storage.url,
            "names": [info.name for info in storage.list()],
            "read": storage.read("0").decode(),
            "parquet": rows_of(make_parquet_converter(f"{url}/parquet", storage_options=given, timeout_seconds=20)),
        }
    delta = [rows_of(make_delta_converter(f"{url}/delta", storage_options=given, timeout_seconds=20)) for url in tables]
    return {"each": found, "delta": delta}


# Credentials -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A Parquet folder and a Delta table, by the names below them."""
    folder = tmp_path_factory.mktemp("tables")
    (folder / "parquet").mkdir()
    for number in range(3):
        table = pa.table({"id": [number]})
        write_deltalake(folder / "delta", table, mode="append")
        pq.write_table(table, folder / f"parquet/{number}.parquet")
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}


def new_tables(account: SecureAzurite, files: dict[str, bytes]) -> str:
    """A new container with these files."""
    container = account.new_container()
    with account.client(container) as client:
        for name, data in files.items():
            client.upload_blob(name, data)
    return container


def test_each_credential_reads_and_writes(secure: SecureAzurite, files: dict[str, bytes]) -> None:
    kinds = ["account_key", "sas_token", *PROVIDERS]
    containers = {kind: new_tables(secure, files) for kind in kinds}
    given = {kind: {"account_host": secure.host} for kind in kinds}
    given["account_key"]["account_key"] = secure.key
    given["sas_token"]["sas_token"] = secure.sas(containers["sas_token"], permission="rcwdl")
    places = {kind: (secure.url(containers[kind]), given[kind]) for kind in kinds}
    with MachineIdentity(HOUR) as identity:
        environment = {"SSL_CERT_FILE": str(secure.certificate), **identity.environment}
        found = run_python(use_each, places, environment=environment)
    assert found == {kind: USED | ({"read elsewhere": "first"} if kind in SENT else {}) for kind in kinds}
    for container in containers.values():
        assert [name for name in secure.files(container) if name not in files] == ["cache/a"]
    # An object of azure-identity keeps its token in one process; a function is asked by each store, and for deltalake.
    assert identity.asked == {"/function": 5, **{f"/{kind}": 2 if kind in SENT else 1 for kind in PROVIDERS[1:]}}


def test_a_token_that_ends_soon_is_asked_for_again_and_no_row_is_missed(
    secure: SecureAzurite, files: dict[str, bytes]
) -> None:
    kinds = ["function", "ManagedIdentityCredential"]
    container = new_tables(secure, files)
    with MachineIdentity(SOON, SOON, SOON, SOON, HOUR) as identity:
        environment = {"SSL_CERT_FILE": str(secure.certificate), **identity.environment}
        place = secure.url(container), {"account_host": secure.host}
        found = run_python(read_by_each, kinds, *place, environment=environment)
    assert found == {kind: [0, 1, 2] for kind in kinds}
    # Each of the first four was still good when the next one was asked for; the fifth is for all that follows.
    assert identity.asked == {f"/{kind}": 5 for kind in kinds}


def test_a_token_that_azure_refuses_is_an_error_at_once(secure: SecureAzurite, files: dict[str, bytes]) -> None:
    place = secure.url(new_tables(secure, files)), {"account_host": secure.host}
    with MachineIdentity(HOUR, audience="https://vault.azure.net") as identity:
        environment = {"SSL_CERT_FILE": str(secure.certificate), **identity.environment}
        (said,) = run_python(use_each, {"ManagedIdentityCredential": place}, environment=environment).values()
    # It would be a TimeoutError if it had been asked until the deadline.
    assert said.startswith("PermissionError: ")
    assert "Server failed to authenticate the request" in said
    assert token(0, "").partition(".")[0] not in said


def test_a_signature_that_allows_to_list_alone_blames_no_file(azurite: Azurite, files: dict[str, bytes]) -> None:
    container = azurite.new_container()
    with ContainerClient.from_connection_string(azurite.connection_string, container) as client:
        for name, data in files.items():
            client.upload_blob(name, data)
    signature = azurite.sas(container, permission="l")
    text = azurite.connection_string.replace(f"AccountKey={azurite.key}", f"SharedAccessSignature={signature}")
    for make, folder, said in (
        (make_parquet_converter, "parquet", "not authorized to perform this operation using this permission"),
        (make_delta_converter, "delta", "lacked the necessary privileges"),
    ):
        with pytest.raises(SourceError, match=said) as raised:
            make(f"{azurite.url(container)}/{folder}", storage_options={"connection_string": text}, timeout_seconds=20)
        # Nobody should remove what is well.
        assert "gone" not in str(raised.value)
        assert "removed" not in str(raised.value)


def test_each_form_of_a_url_reaches_the_same_blobs(secure: SecureAzurite, files: dict[str, bytes]) -> None:
    account = secure.account
    container = new_tables(secure, {f"a folder/{name}": data for name, data in files.items()})
    hadoop = f"{container}@{account}.dfs.core.windows.net/a folder"
    shown = {
        f"abfs://{hadoop}": f"abfs://{hadoop}",
        f"abfss://{hadoop}": f"abfss://{hadoop}",
        f"abfss://{container}@{account}.blob.core.windows.net/a folder": f"abfss://{hadoop}",
        f"az://{hadoop}": f"abfs://{hadoop}",
        f"az://{container}/a folder": f"abfs://{hadoop}",
        f"abfs://{container}/a folder": f"abfs://{hadoop}",
        f"https://{account}.dfs.core.windows.net/{container}/a%20folder": f"abfss://{hadoop}",
        f"https://{account}.blob.core.windows.net/{container}/a%20folder": f"abfss://{hadoop}",
        # The host that is given counts also where a URL names one that is not Azure's own.
        f"https://{account}.blob.core.chinacloudapi.cn/{container}/a%20folder": (
            f"abfss://{container}@{account}.dfs.core.chinacloudapi.cn/a folder"
        ),
    }
    urls, tables = list(shown), sorted(set(shown.values()))
    given = {"account_name": account, "account_key": secure.key, "account_host": secure.host}
    found = run_python(use_urls, urls, tables, given, environment={"SSL_CERT_FILE": str(secure.certificate)})
    names = [str(number) for number in range(len(urls))]
    assert found["each"] == {
        url: {"shown": f"{shown[url]}/cache", "names": names[: number + 1], "read": urls[0], "parquet": [0, 1, 2]}
        for number, url in enumerate(urls)
    }
    assert found["delta"] == [[0, 1, 2]] * 3
    written = [name for name in secure.files(container) if name.removeprefix("a folder/") not in files]
    assert written == [f"a folder/cache/{name}" for name in names]


# Which side has credentials ----------------------------------------------------------


def convert_with_each_side(
    python: str, confs: dict[str, str], key: str, places: dict[str, tuple[str, dict[str, str]]]
) -> dict[str, Any]:
    """Who writes with `auto`, or what is said, where the driver, the executors and Spark have credentials or none."""
    os.environ |= {
        "JAVA_HOME": str(find_java_home()),
        # Another program than the driver's, or nobody would be asked.
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    builder: Any = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    spark = builder.config(map=confs).getOrCreate()
    driver = os.getpid()

    def everywhere() -> str:
        return ask_the_machine()

    def on_the_driver() -> str:
        # As the identity of a notebook, which is the driver's alone.
        if os.getpid() != driver:
            raise RuntimeError("only the driver has an identity")
        return ask_the_machine()

    class Bound:
        """As Databricks' provider of tokens."""

        def get_token(self, *_scopes: str, **_options: Any) -> AccessToken:
            return AccessToken(ask_the_machine(), int(time.time()) + HOUR)

        def __reduce__(self) -> Any:
            raise TypeError("it stays in the notebook")

    said: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("converter").addHandler(handler)
    logging.getLogger("converter").setLevel(logging.INFO)
    found: dict[str, Any] = {}
    for kind, (url, given) in places.items():
        said.clear()
        credential = {"executors": everywhere, "bound": Bound()}.get(kind, on_the_driver)
        options = given | {"credential": credential}
        if kind == "spark":
            # Each container is a filesystem of its own to Hadoop, which looks here when it opens one.
            spark.sparkContext._jsc.hadoopConfiguration().set("fs.azure.account.key", key)
        try:
            with make_spark_converter(spark.range(100), cache_dir=url, storage_options=options) as made:
                names = [name.rpartition("/")[2] for name in made._manifest.file_names]
                with made.make_batch_reader(batch_size=64) as reader:
                    ids = [int(one) for batch in reader for one in batch["id"]]
            found[kind] = {"ids": ids, "is_by_spark": ["-c000" in name for name in names]}
            found[kind]["because"] = [text for text in said if text.startswith("Using Spark's own Parquet writer")]
        except CacheError as error:
            found[kind] = str(error)
    spark.stop()
    return found


def test_auto_takes_the_side_that_has_credentials(secure: SecureAzurite, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    confs = {name: value for name, value in secure.spark_confs().items() if "account.key" not in name}
    confs |= {
        "spark.hadoop.fs.azure.always.use.https": "true",
        "spark.driver.extraJavaOptions": (
            f"-Djavax.net.ssl.trustStore={secure.trust_store} -Djavax.net.ssl.trustStorePassword={TRUST_PASSWORD}"
        ),
    }
    containers = {kind: secure.new_container() for kind in ("executors", "neither", "spark", "bound")}
    places = {kind: (f"{secure.url(one)}/cache", {"account_host": secure.host}) for kind, one in containers.items()}
    with MachineIdentity(HOUR) as identity:
        environment = {"SSL_CERT_FILE": str(secure.certificate), **identity.environment}
        found = run_python(convert_with_each_side, str(python), confs, secure.key, places, environment=environment)
    said = found.pop("neither")
    because = {kind: " ".join(one.pop("because")) for kind, one in found.items()}
    assert found == {
        kind: {"ids": list(range(100)), "is_by_spark": [kind != "executors"]}
        for kind in ("executors", "spark", "bound")
    }
    assert because["executors"] == ""
    assert "the executors cannot write to" in because["spark"]
    assert "only the driver has an identity" in because["spark"]
    assert "storage_options cannot be handed to the executors" in because["bound"]
    assert "it stays in the notebook" in because["bound"]
    assert "Invalid configuration value detected for fs.azure.account.key. Spark's own writer was used because" in said
    assert "only the driver has an identity" in said
    assert said.endswith("Pass storage_options= that may write there: executors get storage_options.")
    for container in containers.values():
        # Spark makes blobs that stand for the folders above.
        left = [name for name in secure.files(container) if name not in ("cache", "cache/converter-v1")]
        assert left == ["cache/converter-v1/.owner"]


# Blobs that stand for folders --------------------------------------------------------


def mark_folders(azurite: Azurite, container: str, *names: str) -> None:
    """As Hadoop's drivers leave them, and as accounts with a hierarchy list their folders."""
    with ContainerClient.from_connection_string(azurite.connection_string, container) as client:
        for name in names:
            client.upload_blob(name, b"", metadata={"hdi_isfolder": "true"}, overwrite=True)


def blobs_of(azurite: Azurite, container: str) -> list[str]:
    with ContainerClient.from_connection_string(azurite.connection_string, container) as client:
        return sorted(blob.name for blob in client.list_blobs())


def test_blobs_that_stand_for_folders_hide_no_row(azurite: Azurite, files: dict[str, bytes]) -> None:
    options = {"connection_string": azurite.connection_string}
    container = azurite.new_container()
    url = azurite.url(container)
    with ContainerClient.from_connection_string(azurite.connection_string, container) as client:
        for name, data in files.items():
            client.upload_blob(re.sub(r"^parquet/(\d)", r"parquet/x=\1/a", name), data)
    folders = ["parquet", "parquet/x=0", "parquet/x=1", "parquet/x=2", "parquet/empty", "delta", "delta/_delta_log"]
    for marked in ([], folders[:1], folders[1:3], folders):
        mark_folders(azurite, container, *marked)
        assert rows_of(make_parquet_converter(f"{url}/parquet", storage_options=options)) == [0, 1, 2]
        assert rows_of(make_parquet_converter(f"{url}/parquet/x=1", storage_options=options)) == [1]
        assert rows_of(make_delta_converter(f"{url}/delta", storage_options=options)) == [0, 1, 2]
    storage = open_storage(f"{url}/parquet", options)
    found = [(info.name, info.is_directory, info.num_bytes) for info in storage.list()]
    assert found == [(name, True, 0) for name in ("empty", "x=0", "x=1", "x=2")]
    assert storage.below("empty").list() == []
    assert storage.size("x=1") is None
    assert not storage.below("x=1").is_at_a_file
    with pytest.raises(SourceError, match="holds no Parquet files"):
        make_parquet_converter(f"{url}/parquet/empty", storage_options=options)


@pytest.mark.parametrize("ends", ["delete", "sweep", "sweep of an attempt"])
def test_a_cache_among_blobs_that_stand_for_folders_leaves_none_of_its_own(azurite: Azurite, ends: str) -> None:
    options = {"connection_string": azurite.connection_string}
    container = azurite.new_container()
    root = roots.open_root(f"{azurite.url(container)}/cache", options)
    mark_folders(azurite, container, "cache", "cache/converter-v1", "cache/thesis")
    before = blobs_of(azurite, container)
    attempt, manifest = write_attempt(root)
    entry = f"cache/converter-v1/{KEY}"
    data = f"{entry}/{attempt.data_directory}"
    mark_folders(azurite, container, entry, data)
    if ends == "sweep of an attempt":
        # What Spark's own writer leaves of a job that was killed.
        mark_folders(azurite, container, f"{data}/_temporary", f"{data}/_temporary/0", f"{data}/_temporary/0/task")
        assert root.below(KEY, attempt.data_directory, "_temporary/0/task").put_if_absent("part", b"a part")
        leases.release(attempt.intent)
    else:
        held = entries.commit(root, attempt, manifest)
        committed = entries.load(root, KEY)
        assert committed is not None
        assert committed.file_names == manifest.file_names
        if ends == "delete":
            held.delete()
        else:
            leases.release(held.lease)
    if ends != "delete":
        report = sweep(f"{azurite.url(container)}/cache", storage_options=options)
        counted = (report.num_entries, report.num_attempts, report.num_files)
        assert counted == ((1, 0, 2) if ends == "sweep" else (0, 1, 2))
    assert blobs_of(azurite, container) == before


# Signatures --------------------------------------------------------------------------


def use_signatures(url: str, given: dict[str, str], key: str) -> dict[str, Any]:
    """What a cache does with signatures that live for three seconds each, from a function that gives them."""
    from azure.storage.blob import ContainerSasPermissions, generate_container_sas

    container, _, host = url.partition("://")[2].partition("@")
    given_out = []

    def sign() -> str:
        given_out.append(time.time())
        until = dt.datetime.fromtimestamp(given_out[-1] + 3, dt.timezone.utc)
        permission = ContainerSasPermissions.from_string("rcwdl")
        return generate_container_sas(host.partition(".")[0], container, key, permission=permission, expiry=until)

    storage = open_storage(f"{url}/cache", given | {"sas_token": sign}, 20)
    won = storage.put_if_absent("a", b"first")
    read, begin = set(), time.monotonic()
    while time.monotonic() - begin < 5:
        read.add(storage.read("a").decode())
        time.sleep(0.1)
    # After a rest the last one has ended, and another is waited for.
    time.sleep(4)
    before = len(given_out)
    read.add(storage.read("a").decode())
    return {"won": won, "read": list(read), "in five seconds": before, "after a rest": len(given_out) - before}


def test_a_signature_that_ends_is_asked_for_again(secure: SecureAzurite) -> None:
    url, given = secure.url(secure.new_container()), {"account_host": secure.host}
    environment = {"SSL_CERT_FILE": str(secure.certificate)}
    found = run_python(use_signatures, url, given, secure.key, environment=environment)
    assert found.pop("in five seconds") >= 3
    assert found == {"won": True, "read": ["first"], "after a rest": 1}
