"""The same as `test_secrets`, with the keys of S3: nobody finds them in what is kept or shown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import converter
from converter import make_parquet_converter, make_spark_converter
from tests.faults.traces import (
    Access,
    Traces,
    convert_and_be_refused,
    fail_in_tasks,
    look_while_it_writes,
    meet_faults,
    search,
)
from tests.processes import start_python

if TYPE_CHECKING:
    from tests.servers.s3 import S3

SECRETS = {
    "secret key": "wJalrXUtnFEMI/K7MDENG+bPxRfiCYsecret0key",
    "session token": "FwoGZXIvYXdzEBYaDsession0token/of+the=tests",
    "password": "password0of0an0endpoint",
}
"""Made up, in the alphabets of real ones; the emulator takes any."""

CAUSES = {
    "missing": "there is no bucket 'not-there'",
    "nobody-listens": r"could not be reached for 0\.3 seconds",
    "hangs": r"for 0\.3 seconds",
    "write-busy": r"503|Told to|for 0\.3 seconds",
    "read-busy": r"503|Told to|for 0\.3 seconds",
    "forbidden": "403|Forbidden|Told to|lacked the necessary privileges",
    "task-ansi": "DIVIDE_BY_ZERO",
    "task-python": "the user's own function fails",
    "read-gone": "is not there",
    "table-broken": "cannot be opened",
    "in-url": "has a user's name or key in it",
    "in-endpoint": "",
}
"""What each error says, by what failed."""

PLACES = {
    "log": [b"INFO converter.", b"Traceback (most recent call last)"],
    "events": [b"SparkListenerTaskEnd", b"the user's own function fails"],
    "stdout": [b"DatasetConverter("],
    "stderr": [b"Traceback (most recent call last)"],
    "blobs": [b"manifest.json", b"lease-", b".intent", b".owner"],
    "pickles": [b"converter.dataset"],
    "errors": [b"converter.errors"],
    "processes": [b"pyspark.daemon", b"org.apache.spark.deploy.SparkSubmit"],
}


def go_through(folder: str, port: int, bucket: str, secrets_file: str) -> dict[str, Any]:
    """What may go wrong; the secrets come by a file, because the command line of this process is searched."""
    from tests.servers.proxy import Proxy

    secrets: dict[str, str] = json.loads(Path(secrets_file).read_text())
    traces = Traces(Path(folder))
    traces.log()
    spark = converter.start_local_spark("secrets-of-s3", master="local[2]", conf=traces.conf_of_events())
    with Proxy(port) as proxy:
        options = {
            "key": "AKIDOFTHETESTS",
            "secret": secrets["secret key"],
            "token": secrets["session token"],
            "endpoint_url": f"http://127.0.0.1:{proxy.port}",
        }
        access = Access(
            name="keys", url=f"s3://{bucket}/keys", missing_url="s3://not-there/keys", options=options, refused={}
        )
        convert_and_be_refused(traces, spark, access)
        meet_faults(traces, spark, access, proxy)
        fail_in_tasks(traces, spark, access)
        look_while_it_writes(traces, spark, access)
        # Where they do not belong, but where people put them.
        in_url = f"s3://AKIDOFTHETESTS:{secrets['secret key'].replace('/', '%2F')}@{bucket}/keys"
        at_endpoint = options | {"endpoint_url": f"http://user:{secrets['password']}@127.0.0.1:1"}
        soon = {"timeout_seconds": 0.3}
        traces.fail("in-url-make", lambda: make_spark_converter(spark.range(5), cache_dir=in_url, **soon))
        traces.fail("in-url-parquet", lambda: make_parquet_converter(in_url, **soon))
        traces.fail(
            "in-endpoint-make",
            lambda: make_spark_converter(spark.range(5), cache_dir=access.url, storage_options=at_endpoint, **soon),
        )
        traces.fail(
            "in-endpoint-parquet", lambda: make_parquet_converter(access.url, storage_options=at_endpoint, **soon)
        )
        spark.stop()
    return {"failed": traces.failed, "num_rows": traces.num_rows}


def test_no_key_of_s3_is_shown_or_stored_whatever_goes_wrong(s3: S3, tmp_path: Path) -> None:
    shown, secrets_file = tmp_path / "shown", tmp_path / "secrets.json"
    shown.mkdir()
    secrets_file.write_text(json.dumps(SECRETS))
    with start_python(go_through, str(shown), s3.port, s3.new_bucket(), str(secrets_file)) as process:
        output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    (shown / "stdout").write_text(output)
    (shown / "stderr").write_text(errors)

    result = json.loads(output.splitlines()[-1])
    assert set(result["num_rows"]) == {"keys", "keys-table"}
    assert [name for name in result["failed"] if not any(kind in name for kind in CAUSES)] == []
    for kind, cause in CAUSES.items():
        said = [text for name, text in result["failed"].items() if kind in name]
        assert said, kind
        for text in said:
            assert re.match(f"(?s)(ours|ValueError): .*({cause})", text), (kind, text)
    assert search(shown, PLACES, SECRETS) == set()
