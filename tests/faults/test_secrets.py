"""Nobody finds a credential in what Spark, Python and the store keep or show, whatever went wrong."""

from __future__ import annotations

import base64
import io
import json
import pickle
import re
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest

import converter
from converter import make_parquet_converter, make_spark_converter
from converter.storage.opening import open_storage
from tests.faults.traces import (
    Access,
    Traces,
    convert_and_be_refused,
    fail_in_tasks,
    forms,
    keep_processes,
    look_while_it_writes,
    meet_faults,
    search,
)
from tests.processes import start_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.servers.azurite import Azurite


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


def go_through(folder: str, port: int, container: str, secure: dict[str, str], sas_file: str) -> dict[str, Any]:
    """What may go wrong; the signatures come by a file, because the command line of this process is searched."""
    from tests.servers.azurite import SlowAzurite
    from tests.servers.proxy import Proxy

    sas: dict[str, str] = json.loads(Path(sas_file).read_text())
    traces = Traces(Path(folder))
    traces.log()
    with Proxy(port) as proxy:
        slow = SlowAzurite(proxy)
        conf = {name: value for name, value in slow.spark_confs().items() if "account.key" not in name}
        conf |= traces.conf_of_events() | {
            "spark.ui.enabled": "true",
            "spark.ui.port": "0",
            "spark.sql.ansi.enabled": "true",
        }
        spark = converter.start_local_spark("secrets", master="local[2]", conf=conf)
        spark.sparkContext.setLogLevel("INFO")
        behind_proxy = list(accesses_behind_proxy(slow, container, sas))
        for access in [*behind_proxy, *accesses_over_tls(secure, sas, slow.key)]:
            convert_and_be_refused(traces, spark, access)
        for access in behind_proxy:
            meet_faults(traces, spark, access, proxy)
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


def wrong_key(key: str) -> str:
    return key.replace("E", "F")


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


# The search --------------------------------------------------------------------------


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
