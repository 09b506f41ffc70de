"""What a program shows and keeps while much goes wrong for it, and a search for secrets in all of that."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import pickle
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, quote_plus, unquote

import pyarrow as pa
from deltalake import write_deltalake

import converter
from converter import ConverterError, make_delta_converter, make_parquet_converter, make_spark_converter, open_converter
from converter.portable.redaction import errors_behind
from converter.storage.directory import Storage
from converter.storage.opening import open_storage
from tests.waiting import slow_rows, wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.servers.proxy import Proxy

NUM_ROWS = 20_000
KEY = "0123456789abcdef-0123456789abcdef"
SMALL_BLOB_BYTES = 1_000_000
SECONDS = 0.3
"""How long a store that does not answer is waited for."""


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

    def log(self) -> None:
        """Keep what Python's loggers say, those of converter whole."""
        log = logging.FileHandler(self._folder / "log")
        log.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[log])
        logging.getLogger("converter").setLevel(logging.DEBUG)

    def conf_of_events(self) -> dict[str, str]:
        """What lets Spark keep its events."""
        folder = self._folder / "events"
        folder.mkdir()
        return {
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": folder.as_uri(),
            "spark.eventLog.compress": "false",
        }

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


def convert_and_be_refused(traces: Traces, spark: SparkSession, access: Access) -> None:
    with make_spark_converter(spark.range(0, 3000, 1, 2), cache_dir=access.url, storage_options=access.options) as made:
        traces.show(access.name, made)
        with open_converter(made.url, storage_options=access.options) as again:
            traces.keep(f"pickles/{access.name}-again", pickle.dumps(again))
        traces.keep(f"blobs/{access.name}", b"\n".join(small_blobs(open_storage(access.url, access.options))))
        places = {name: (made.url, access.url, options) for name, options in access.refused.items()}
        places["missing"] = (f"{access.missing_url}/converter-v1/{KEY}", access.missing_url, access.options)
        is_place = {"connection_string", "account_host", "endpoint_url"}
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


def meet_faults(traces: Traces, spark: SparkSession, access: Access, proxy: Proxy) -> None:
    given = {"cache_dir": access.url, "storage_options": access.options}

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


def dead_port(text: str) -> str:
    """The same place at a port where nobody listens."""
    before, _, rest = text.rpartition(":")
    return f"{before}:1/{rest.partition('/')[2]}"


def keep_processes(traces: Traces, name: str) -> None:
    """The command lines and the environments of this process's session: Spark, its executors and all workers."""
    seen = []
    for process in Path("/proc").glob("[0-9]*"):
        # It may end meanwhile.
        with contextlib.suppress(OSError):
            if os.getsid(int(process.name)) == os.getsid(0):
                seen += [(process / file).read_bytes() for file in ("cmdline", "environ")]
    traces.keep(f"processes/{name}", b"\n".join(seen))


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
