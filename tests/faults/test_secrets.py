"""Nobody finds a credential in what Spark, Python and the store keep or show, whatever went wrong."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import logging
import os
import pickle
import re
import shutil
import threading
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, quote_plus, unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest
from deltalake import write_deltalake

import converter
from converter import ConverterError, make_delta_converter, make_parquet_converter, make_spark_converter, open_converter
from converter.portable.redaction import errors_behind
from converter.storage.directory import Storage
from converter.storage.opening import open_storage
from tests.processes import start_python
from tests.waiting import slow_rows, wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.servers.azurite import Azurite

NUM_ROWS = 20_000
KEY = "0123456789abcdef-0123456789abcdef"
SMALL_BLOB_BYTES = 1_000_000
SECONDS = 0.3
"""How long a store that does not answer is waited for."""

SIGNATURE = "signed-by-nobody-and-shown-to-nobody"
REST = ("jobs", "stages?details=true", "environment", "executors", "sql?details=true&planDescription=true&length=1000")
PAGES = ("jobs/", "stages/", "environment/", "executors/", "SQL/")


def _part(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def claims(audience: str) -> str:
    issued, ended = 1_700_000_000, 4_000_000_000
    said = {"aud": audience, "iss": "https://sts.windows.net/tests/", "iat": issued, "nbf": issued, "exp": ended}
    return _part(said)


AUDIENCE, OTHER_AUDIENCE = "https://storage.azure.com", "https://elsewhere.example.com"


def give_token() -> str:
    """A provider: only functions of a module's top travel."""
    return f"{_part({'alg': 'none'})}.{claims(AUDIENCE)}.{SIGNATURE}"


def give_refused_token() -> str:
    return f"{_part({'alg': 'none'})}.{claims(OTHER_AUDIENCE)}.{SIGNATURE}"


def give_nothing() -> str:
    raise ValueError("nobody is logged in")


# What happens in the process that is searched ----------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """A container that this credential opens, one that is not there, and credentials that open none."""

    name: str
    url: str
    missing_url: str
    options: dict[str, Any]
    refused: dict[str, dict[str, Any]]


class Traces:
    """Does what may fail, and keeps what is seen of it in files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.failed: dict[str, str] = {}
        """The error, by what failed."""

        self.num_rows: dict[str, int] = {}
        """How many rows were read, by who read them."""

    def keep(self, name: str, content: bytes) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def fail(self, name: str, call: Callable[[], Any]) -> None:
        print(f"==== {name}", flush=True)
        self.failed[name] = "nothing"
        try:
            call()
        except Exception as error:
            self.failed[name] = f"{'ours' if isinstance(error, ConverterError) else type(error).__name__}: {error}"
            traceback.print_exception(error)
            print(str(error), *map(repr, errors_behind(error)), sep="\n")
            logging.getLogger("user").exception("%s failed", name)
            # Spark's own hold what belongs to their session, and do not travel.
            if isinstance(error, ConverterError):
                self.keep(f"errors/{name}", pickle.dumps(error))

    def show(self, name: str, made: converter.DatasetConverter) -> None:
        """All that can be seen of a converter that works, and of its readers."""
        with made.make_batch_reader(batch_size=1000) as reader, made.make_torch_dataloader(batch_size=1000) as loader:
            print(made, repr(made), made._repr_html_(), made.url, made._storage, reader, loader, loader.dataset)
            self.num_rows[name] = sum(len(batch["id"]) for batch in reader)
            self.keep(f"pickles/{name}", pickle.dumps(made))
            self.keep(f"pickles/{name}-dataset", pickle.dumps(loader.dataset))


def go_through(folder: str, port: int, container: str, secure: dict[str, str], sas_file: str) -> dict[str, Any]:
    """What may go wrong; the signatures come by a file, because the command line of this process is searched."""
    from tests.servers.azurite import SlowAzurite
    from tests.servers.proxy import Proxy

    sas: dict[str, str] = json.loads(Path(sas_file).read_text())
    log = logging.FileHandler(Path(folder, "log"))
    log.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[log])
    logging.getLogger("converter").setLevel(logging.DEBUG)
    traces = Traces(Path(folder))
    with Proxy(port) as proxy:
        slow = SlowAzurite(proxy)
        conf = {name: value for name, value in slow.spark_confs().items() if "account.key" not in name}
        conf |= {
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": Path(folder, "events").as_uri(),
            "spark.eventLog.compress": "false",
            "spark.ui.enabled": "true",
            "spark.ui.port": "0",
            "spark.sql.ansi.enabled": "true",
        }
        Path(folder, "events").mkdir()
        spark = converter.start_local_spark("secrets", master="local[2]", conf=conf)
        spark.sparkContext.setLogLevel("INFO")
        behind_proxy = list(accesses_behind_proxy(slow, container, sas))
        for access in [*behind_proxy, *accesses_over_tls(secure, sas, slow.key)]:
            convert_and_be_refused(traces, spark, access)
        for access in behind_proxy:
            meet_faults(traces, spark, access, slow)
        fail_in_tasks(traces, spark, behind_proxy[0])
        look_while_it_writes(traces, spark, behind_proxy[0])
        let_spark_write(traces, spark, slow)
        read_over_http(traces, slow, container, sas)
        show_ui(traces, spark)
        jvm = spark.sparkContext._gateway.proc
        spark.stop()
        # Hadoop would wait for half a minute for a filesystem that is refused.
        jvm.kill()
    return {"failed": traces.failed, "num_rows": traces.num_rows}


def accesses_behind_proxy(slow: Any, container: str, sas: dict[str, str]) -> Iterator[Access]:
    by_key = {"connection_string": slow.connection_string}
    by_sas, by_ended_sas = (
        {"connection_string": f"BlobEndpoint={slow.endpoint};SharedAccessSignature={sas[name]}"}
        for name in ("here", "ended")
    )
    by_wrong_key = {"connection_string": slow.connection_string.replace(slow.key, wrong_key(slow.key))}
    for name, options, refused in (
        ("key", by_key, {"wrong-key": by_wrong_key}),
        ("sas-in-string", by_sas, {"ended-sas": by_ended_sas}),
    ):
        yield Access(
            name=name,
            url=f"{slow.url(container)}/{name}",
            missing_url=f"{slow.url('not-there')}/{name}",
            options=options,
            refused=refused,
        )


def accesses_over_tls(secure: dict[str, str], sas: dict[str, str], key: str) -> Iterator[Access]:
    place = {"account_host": secure["host"]}
    mistaken = {
        "mistaken-key-for-sas": {"sas_token": key},
        "mistaken-cut-key": {"account_key": key[:-3]},
        "mistaken-key-for-string": {"connection_string": key},
        "mistaken-sas-for-string": {"connection_string": sas["secure"]},
    }
    for name, options, refused in (
        ("sas", {"sas_token": sas["secure"]}, {"ended-sas": {"sas_token": sas["secure_ended"]}} | mistaken),
        (
            "provider",
            {"credential": give_token},
            {"refused": {"credential": give_refused_token}, "raising": {"credential": give_nothing}},
        ),
    ):
        yield Access(
            name=name,
            url=f"{secure['url']}/{name}",
            missing_url=f"{secure['missing_url']}/{name}",
            options=place | options,
            refused={kind: place | one for kind, one in refused.items()},
        )


def convert_and_be_refused(traces: Traces, spark: SparkSession, access: Access) -> None:
    with make_spark_converter(spark.range(0, 3000, 1, 2), cache_dir=access.url, storage_options=access.options) as made:
        traces.show(access.name, made)
        with open_converter(made.url, storage_options=access.options) as again:
            traces.keep(f"pickles/{access.name}-again", pickle.dumps(again))
        traces.keep(f"blobs/{access.name}", b"\n".join(small_blobs(open_storage(access.url, access.options))))
        places = {name: (made.url, access.url, options) for name, options in access.refused.items()}
        places["missing"] = (f"{access.missing_url}/converter-v1/{KEY}", access.missing_url, access.options)
        is_place = {"connection_string", "account_host"}
        dead = {name: dead_port(value) if name in is_place else value for name, value in access.options.items()}
        places["nobody-listens"] = (made.url, access.url, dead)
        for kind, (entry_url, url, options) in places.items():
            be_refused(traces, spark, f"{access.name}-{kind}", entry_url, url, options)


def be_refused(
    traces: Traces, spark: SparkSession, name: str, entry_url: str, url: str, options: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"storage_options": options}
    if name.endswith("nobody-listens"):
        given["timeout_seconds"] = SECONDS
    traces.fail(f"{name}-make", lambda: make_spark_converter(spark.range(5), cache_dir=url, **given))
    traces.fail(f"{name}-open", lambda: open_converter(entry_url, **given))
    traces.fail(f"{name}-parquet", lambda: make_parquet_converter(url, **given))
    traces.fail(f"{name}-delta", lambda: make_delta_converter(url, **given))


def meet_faults(traces: Traces, spark: SparkSession, access: Access, slow: Any) -> None:
    proxy, given = slow.proxy, {"cache_dir": access.url, "storage_options": access.options}

    @contextlib.contextmanager
    def failing(**fault: Any) -> Iterator[None]:
        proxy.fail_next(1000, **fault)
        try:
            yield
        finally:
            proxy.heal()

    def convert_meanwhile(fault: Any, **options: Any) -> None:
        with fault:
            make_spark_converter(spark.range(0, 3000, 1, 1), **given, **options).delete()

    soon = {"timeout_seconds": SECONDS}
    traces.fail(f"{access.name}-write-hangs", lambda: convert_meanwhile(proxy.hanging(), **soon))
    traces.fail(f"{access.name}-write-busy", lambda: convert_meanwhile(failing(status=503), **soon))
    forbidden = failing(status=403, path=".parquet")
    traces.fail(f"{access.name}-task-forbidden", lambda: convert_meanwhile(forbidden))
    with make_spark_converter(spark.range(0, NUM_ROWS, 1, 1), row_group_bytes=1 << 14, **given) as made:

        def read_meanwhile(fault: Any, **options: Any) -> None:
            with (
                open_converter(made.url, storage_options=access.options, **options) as again,
                again.make_batch_reader(batch_size=500, shuffle_window_rows=2000) as reader,
            ):
                batches = iter(reader)
                next(batches)
                with fault:
                    list(batches)

        traces.fail(f"{access.name}-read-hangs", lambda: read_meanwhile(proxy.hanging(), **soon))
        traces.fail(f"{access.name}-read-busy", lambda: read_meanwhile(failing(status=503), **soon))
        traces.fail(f"{access.name}-read-forbidden", lambda: read_meanwhile(failing(status=403)))
        made._storage.delete_file(made._manifest.file_names[0])
        traces.fail(f"{access.name}-read-gone", lambda: list(made.make_batch_reader(batch_size=1000)))

    def open_table(status: int) -> None:
        # Of what is in the log deltalake asks, and nobody else.
        with failing(status=status, path="_delta_log/0"):
            make_delta_converter(table_url, storage_options=access.options)

    table_url = f"{access.url}/table"
    place, options = open_storage(table_url, access.options).delta_place()
    write_deltalake(place, pa.table({"id": [1, 2, 3]}), storage_options=options)
    with make_delta_converter(table_url, storage_options=access.options) as table:
        traces.show(f"{access.name}-table", table)
    traces.fail(f"{access.name}-table-forbidden", lambda: open_table(403))
    traces.fail(f"{access.name}-table-broken", lambda: open_table(400))


def fail_in_tasks(traces: Traces, spark: SparkSession, access: Access) -> None:
    def convert(df: DataFrame) -> None:
        make_spark_converter(df, cache_dir=access.url, storage_options=access.options).delete()

    few = spark.range(0, 10, 1, 1)
    traces.fail("task-ansi", lambda: convert(few.selectExpr("1 / (id - 5) x")))
    traces.fail("task-python", lambda: convert(few.mapInArrow(raise_in_task, "id long")))


def look_while_it_writes(traces: Traces, spark: SparkSession, access: Access) -> None:
    """What is in the store while nothing is committed."""
    release = Path(traces._folder, f"release-{access.name}")
    root = open_storage(access.url, access.options)

    def convert() -> None:
        rows = slow_rows(spark, release, partitions=1)
        make_spark_converter(rows, cache_dir=access.url, storage_options=access.options).delete()

    writing = threading.Thread(target=convert)
    writing.start()
    blobs: list[bytes] = []

    def is_writing() -> bool:
        blobs[:] = small_blobs(root)
        return any(blob.startswith(b"==== data-") and b".intent\n" in blob for blob in blobs)

    wait_until(is_writing)
    keep_processes(traces, f"{access.name}-writing")
    traces.keep(f"blobs/{access.name}-intent", b"\n".join(blobs))
    release.touch()
    writing.join()


def read_over_http(traces: Traces, slow: Any, container: str, sas: dict[str, str]) -> None:
    """As from any web server, whose errors show the whole URL."""
    table = io.BytesIO()
    pq.write_table(pa.table({"id": [1, 2, 3]}), table)
    by_key = {"connection_string": slow.connection_string}
    assert open_storage(f"{slow.url(container)}/http", by_key).put_if_absent("a.parquet", table.getvalue())
    file = f"{slow.endpoint}/{container}/http/a.parquet"
    with make_parquet_converter([file], storage_options={"params": dict(parse_qsl(sas["here"]))}) as made:
        traces.show("http", made)
    ended = {"storage_options": {"params": dict(parse_qsl(sas["ended"]))}}
    traces.fail("http-ended", lambda: make_parquet_converter([file], **ended))


def let_spark_write(traces: Traces, spark: SparkSession, slow: Any) -> None:
    """Spark has the key from its user, who set it where neither a conf of the session nor the UI shows it."""
    hadoop = spark.sparkContext._jsc.hadoopConfiguration()

    def convert(key: str) -> None:
        hadoop.set(f"fs.azure.account.key.{slow.account}.blob.core.windows.net", key)
        hadoop.set("fs.azure.account.key", key)
        # A new one: Hadoop keeps what opened the last one.
        url = f"{slow.url(slow.new_container())}/cache"
        options = {"storage_options": {"connection_string": slow.connection_string}, "writer": "spark"}
        with make_spark_converter(spark.range(0, 3000, 1, 2), cache_dir=url, **options) as made:
            traces.show("spark-writer", made)

    convert(slow.key)
    traces.fail("spark-writer-wrong-key", lambda: convert(wrong_key(slow.key)))


def show_ui(traces: Traces, spark: SparkSession) -> None:
    place = spark.sparkContext.uiWebUrl
    api = f"{place}/api/v1/applications/{spark.sparkContext.applicationId}"
    for number, url in enumerate([*(f"{api}/{one}" for one in REST), *(f"{place}/{one}" for one in PAGES)]):
        with urllib.request.urlopen(url, timeout=60) as answer:
            traces.keep(f"ui/{number}", answer.read())


def raise_in_task(batches: Any) -> Any:
    for _ in batches:
        raise ValueError("the user's own function fails")
    yield from ()


def small_blobs(storage: Storage) -> list[bytes]:
    """Each blob with its name."""
    found = []
    for info in storage.list():
        # It may be gone by now.
        with contextlib.suppress(FileNotFoundError):
            if info.is_directory:
                found += small_blobs(storage.below(info.name))
            elif info.num_bytes < SMALL_BLOB_BYTES:
                found.append(b"==== " + info.name.encode() + b"\n" + storage.read(info.name))
    return found


def wrong_key(key: str) -> str:
    return key.replace("E", "F")


def dead_port(text: str) -> str:
    """The same place at a port where nobody listens."""
    before, _, rest = text.rpartition(":")
    return f"{before}:1/{rest.partition('/')[2]}"


# On a cluster, whose executors and Python workers are processes of their own -----------


def go_through_a_cluster(folder: str, arguments_file: str) -> dict[str, Any]:
    """Convert, fail, read with worker processes and in Spark; the secrets come by a file, not by this command line."""
    from tests.servers.azurite import SlowAzurite
    from tests.servers.proxy import Proxy

    arguments = json.loads(Path(arguments_file).read_text())
    traces = Traces(Path(folder))
    conf = {"spark.executor.memory": "1g", "spark.log.level": "INFO", "spark.task.maxFailures": "1"}
    with Proxy(arguments["port"]) as proxy:
        slow = SlowAzurite(proxy)
        spark = converter.start_local_spark("secrets", master="local-cluster[1,1,1024]", conf=conf)
        sas_string = f"BlobEndpoint={slow.endpoint};SharedAccessSignature={arguments['sas']}"
        by_key, by_sas = (
            Access(
                name=name, url=f"{slow.url(arguments['container'])}/{name}", missing_url="", refused={},
                options={"connection_string": connection},
            )
            for name, connection in (("key", slow.connection_string), ("sas", sas_string))
        )  # fmt: skip
        look_while_it_writes(traces, spark, by_sas)
        given: dict[str, Any] = {"cache_dir": by_key.url, "storage_options": by_key.options}
        with make_spark_converter(spark.range(0, 3000, 1, 2), **given) as made:
            with made.make_torch_dataloader(
                batch_size=100, num_workers=1, multiprocessing_context="spawn", local_cache_dir=f"{folder}/local"
            ) as loader:
                for number, _ in enumerate(loader):
                    if not number:
                        keep_processes(traces, "loader")
                print(loader.stats(), loader.progress)
            traces.num_rows["to_spark"] = made.to_spark(spark, partitions=1).count()
            proxy.fail_next(1000, status=403, path=".parquet")
            traces.fail("spark-forbidden", lambda: made.to_spark(spark, partitions=1).count())
            traces.fail("task-forbidden", lambda: make_spark_converter(spark.range(9), **given))
            proxy.heal()
        fail_in_tasks(traces, spark, by_sas)
        # A local cluster's worker keeps them there.
        work = Path(pyspark.__file__).parent / "work" / str(spark.sparkContext.applicationId)
        spark.stop()
    for log in work.rglob("std*"):
        traces.keep(f"executors/{log.parent.name}-{log.name}", log.read_bytes())
    shutil.rmtree(work)
    return {"failed": traces.failed, "num_rows": traces.num_rows}


def keep_processes(traces: Traces, name: str) -> None:
    """The command lines and the environments of this process's session: Spark, its executors and all workers."""
    seen = []
    for process in Path("/proc").glob("[0-9]*"):
        # It may end meanwhile.
        with contextlib.suppress(OSError):
            if os.getsid(int(process.name)) == os.getsid(0):
                seen += [(process / file).read_bytes() for file in ("cmdline", "environ")]
    traces.keep(f"processes/{name}", b"\n".join(seen))


# The search --------------------------------------------------------------------------


def forms(secret: str) -> Iterator[bytes]:
    """The ways in which a secret may be written, in pieces: what is cut off in the middle is found, too."""
    written = {secret, unquote(secret), quote(secret, safe=""), quote_plus(secret), quote(quote(secret, safe=""))}
    written |= {json.dumps(one)[1:-1].replace("/", r"\/") for one in list(written)}
    for text in (secret, unquote(secret)):
        written.add(text.encode().hex())
        for before in range(3):
            # Wherever it begins in what is encoded, without what its neighbours have a part in.
            written.add(base64.b64encode(b"x" * before + text.encode()).decode()[4:-4])
    for one in written:
        for start in [*range(0, max(1, len(one) - 16), 8), max(0, len(one) - 16)]:
            yield one[start : start + 16].encode()


def signature(sas: str) -> str:
    return sas.partition("sig=")[2].partition("&")[0]


CAUSES = {
    "wrong-key": "failed to authenticate",
    "ended-sas": r"failed to authenticate.*sp=rcwdl",
    "refused": "failed to authenticate",
    "raising": "nobody is logged in",
    "mistaken": "cannot be (read|written)",
    "http-ended": "403",
    # A signature for one container does not let the emulator say that another one is missing.
    "missing": "no container 'not-there'|failed to authenticate",
    "nobody-listens": r"could not be reached for 0\.3 seconds",
    "write-hangs": r"could not be reached for 0\.3 seconds",
    "write-busy": r"Service Unavailable|Told to|for 0\.3 seconds",
    "task-forbidden": "Told to",
    "task-ansi": "DIVIDE_BY_ZERO",
    "task-python": "the user's own function fails",
    "read-hangs": r"for 0\.3 seconds",
    "read-busy": r"Service Unavailable|Told to|for 0\.3 seconds",
    "read-forbidden": "Forbidden|Told to",
    "read-gone": "is not there",
    "table-forbidden": "lacked the necessary privileges",
    "table-broken": "cannot be opened: .*Azure",
}
"""What each error says, by what failed."""

PLACES = {
    # What a task raises stands there, and which rows it was to write.
    "events": [b"SparkListenerTaskEnd", b"Told to", b"the user's own function fails", b"MapInArrow"],
    "ui": [b"MapInArrow", b"Told to", b"spark.eventLog.dir"],
    "log": [b"INFO converter.", b"Traceback (most recent call last)"],
    "stdout": [b"DatasetConverter("],
    "stderr": [b"INFO TaskSetManager", b"Told to", b"Traceback (most recent call last)"],
    "blobs": [b"manifest.json", b"lease-", b".intent", b".owner"],
    "pickles": [b"converter.dataset"],
    "errors": [b"converter.errors"],
    "processes": [b"pyspark.daemon", b"org.apache.spark.deploy.SparkSubmit", b"SSL_CERT_FILE="],
}
"""Where is searched, and what is there to be found."""

PLACES_ON_A_CLUSTER = {
    "executors": [b"INFO Executor", b"Told to", b"the user's own function fails"],
    "processes": [b"CoarseGrainedExecutorBackend", b"pyspark.daemon", b"spawn_main", b"PATH="],
    "local": [b"spark-tensor-converter"],
    "stdout": [b"==== task-forbidden"],
    "stderr": [b"Traceback (most recent call last)", b"Told to"],
    "blobs": [b".intent", b".owner"],
    "errors": [b"converter.errors"],
}


def test_no_secret_is_shown_or_stored_whatever_goes_wrong(azurite: Azurite, tmp_path: Path) -> None:
    from tests.servers.azurite import start_secure_azurite

    with start_secure_azurite(tmp_path / "azurite") as account:
        here, there = azurite.new_container(), account.new_container()
        sas = {
            "here": azurite.sas(here),
            "ended": azurite.sas(here, valid_seconds=-60),
            "secure": account.sas(there),
            "secure_ended": account.sas(there, valid_seconds=-60),
        }
        secure = {"host": account.host, "url": account.url(there), "missing_url": account.url("not-there")}
        shown = tmp_path / "shown"
        shown.mkdir()
        sas_file = tmp_path / "sas.json"
        sas_file.write_text(json.dumps(sas))
        arguments = (str(shown), azurite.port, here, secure, str(sas_file))
        environment = {"SSL_CERT_FILE": str(account.certificate)}
        with start_python(go_through, *arguments, environment=environment) as process:
            output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    (shown / "stdout").write_text(output)
    (shown / "stderr").write_text(errors)

    result = json.loads(output.splitlines()[-1])
    assert set(result["num_rows"]) == {
        "key", "sas-in-string", "sas", "provider", "key-table", "sas-in-string-table", "spark-writer", "http",
    }  # fmt: skip
    assert all(result["num_rows"].values())
    assert [name for name in result["failed"] if not any(kind in name for kind in CAUSES)] == []
    for kind, cause in CAUSES.items():
        said = [text for name, text in result["failed"].items() if kind in name]
        assert said, kind
        for text in said:
            assert re.match(f"ours: .*({cause})", text), (kind, text)

    secrets = {"key": azurite.key, "wrong key": wrong_key(azurite.key), "token": f"{claims(AUDIENCE)}.{SIGNATURE}"}
    secrets |= {"refused token": claims(OTHER_AUDIENCE)}
    secrets |= {f"{name} SAS": signature(one) for name, one in sas.items()}
    assert search(shown, PLACES, secrets) == set()


def test_no_secret_is_shown_by_a_cluster_its_executors_or_any_process(azurite: Azurite, tmp_path: Path) -> None:
    container = azurite.new_container()
    sas = azurite.sas(container)
    arguments = tmp_path / "arguments.json"
    arguments.write_text(json.dumps({"port": azurite.port, "container": container, "sas": sas}))
    shown = tmp_path / "shown"
    shown.mkdir()
    with start_python(go_through_a_cluster, str(shown), str(arguments)) as process:
        output, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    (shown / "stdout").write_text(output)
    (shown / "stderr").write_text(errors)
    result = json.loads(output.splitlines()[-1])
    assert result["num_rows"] == {"to_spark": 3000}
    assert {name: text for name, text in result["failed"].items() if text == "nothing"} == {}
    assert search(shown, PLACES_ON_A_CLUSTER, {"key": azurite.key, "SAS": signature(sas)}) == set()


def search(shown: Path, places: dict[str, list[bytes]], secrets: dict[str, str]) -> set[tuple[str, str]]:
    """In which file which secret stands; each place must have what shows that it was filled."""
    found = {path: path.read_bytes() for path in sorted(shown.rglob("*")) if path.is_file()}
    for place, expected in places.items():
        content = b"".join(text for path, text in found.items() if path.relative_to(shown).parts[0] == place)
        assert [one for one in expected if one not in content] == [], place
    return {
        (str(path.relative_to(shown)), name)
        for name, secret in secrets.items()
        for form in set(forms(secret))
        for path, text in found.items()
        if form in text
    }


@pytest.mark.parametrize(
    "secret", ["Eby8vdM02xNOcqFlqUwJPLlm/EtlCDXJ1OUzFT50uSRZ6IFsuFq2U==", f"{claims(AUDIENCE)}.tail"]
)
def test_a_secret_is_found_however_it_is_written(secret: str) -> None:
    """The search itself: each form, and a part that was cut off."""
    for text in (secret, quote(secret, safe=""), json.dumps({"a": secret}), secret[5:30], pickle.dumps({"a": secret})):
        content = text if isinstance(text, bytes) else text.encode()
        for written in (content, base64.b64encode(b"a" + content), base64.b64encode(b"abc" + content)):
            assert any(form in written for form in forms(secret)), written
    assert not any(form in b"nothing of it" * 100 for form in forms(secret))
