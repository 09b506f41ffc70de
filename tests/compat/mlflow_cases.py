"""What a run that MLflow tracked says of its rows, and the way back to them, in another process than the run's.

`tests/integration/test_mlflow.py` runs these in an environment that has MLflow and this package installed.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import mlflow.data
import numpy as np
import pytest
from mlflow.data.schema import TensorDatasetSchema
from mlflow.entities import Dataset, Run
from mlflow.types.schema import Schema

from converter import CacheError, DatasetConverter, SourceChangedError, SourceError, make_parquet_converter
from converter.lineage.mlflow_dataset import ConverterDataset, ConverterSource, from_converter
from tests.compat.launchers import start
from tests.compat.mlflow_runs import NUM_WIDE, SECRET, rows_of
from tests.documented import python_blocks
from tests.integration.test_jobs import clean_environment
from tests.servers.process import free_port

# MLflow's own, of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning")

LOADED = (
    "older version", "fewer columns", "newest version", "view", "files that are kept", "mixture", "wide", "entry",
    "validation",
)  # fmt: skip
STORES = ("database", "files")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and two tracking stores with a run of each kind, which another process logged."""
    folder = tmp_path_factory.mktemp("runs")
    program = Path(__file__).with_name("mlflow_runs.py")
    uris = [uri_of(folder, store) for store in STORES]
    done = subprocess.run(
        [sys.executable, program, folder, *uris],
        cwd=folder, env=clean_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


def uri_of(folder: Path, store: str) -> str:
    return f"sqlite:///{folder}/runs.db" if store == "database" else (folder / "mlruns").as_uri()


@pytest.fixture(params=STORES)
def runs(request: pytest.FixtureRequest, folder: Path) -> Iterator[dict[str, Run]]:
    """The runs of a store, by name."""
    mlflow.set_tracking_uri(uri_of(folder, request.param))
    listed = mlflow.search_runs(experiment_names=["rides"], output_format="list")
    yield {run.info.run_name: run for run in listed}
    mlflow.set_tracking_uri(None)


def source_of(run: Run) -> Any:
    """As a user comes from a run to its data."""
    return mlflow.data.get_source(mlflow.get_run(run.info.run_id).inputs.dataset_inputs[0])


@pytest.mark.parametrize("kind", LOADED)
def test_a_run_leads_back_to_the_same_rows(folder: Path, runs: dict[str, Run], kind: str) -> None:
    with source_of(runs[kind]).load() as part, np.load(folder / f"{kind}.npz") as expected:
        rows = rows_of(part)
        assert list(rows) == list(expected)
        for name, values in expected.items():
            np.testing.assert_array_equal(rows[name], values)


@pytest.mark.parametrize(("kind", "version"), [("older version", 1), ("newest version", 2), ("view", 1)])
def test_a_run_says_which_version_it_was_trained_on(
    folder: Path, runs: dict[str, Run], kind: str, version: int
) -> None:
    (tracked,) = runs[kind].inputs.dataset_inputs
    profile, source = json.loads(tracked.dataset.profile), json.loads(tracked.dataset.source)
    assert (source["kind"], source["url"], source["version"]) == ("delta", f"{folder}/table", version)
    assert (profile["url"], profile["version"]) == ((folder / "table").as_uri(), version)
    with np.load(folder / f"{kind}.npz") as expected:
        assert profile["rows"] == len(expected["id"])
    assert tracked.dataset.digest.startswith(profile["fingerprint"])
    assert len(tracked.dataset.digest) == 36
    assert {tag.key: tag.value for tag in tracked.tags} == {"mlflow.data.context": "training"}


def test_runs_on_the_same_rows_are_found_by_their_fingerprint(runs: dict[str, Run]) -> None:
    fingerprint = source_of(runs["older version"]).fingerprint
    listed = mlflow.search_runs(
        experiment_names=["rides"], filter_string=f"dataset.digest LIKE '{fingerprint}%'", output_format="list"
    )
    # They differ in their columns, and each has a source of its own.
    assert {run.info.run_name for run in listed} == {"older version", "fewer columns"}


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (
            "files that are changed",
            SourceChangedError,
            r"changed/\*\.parquet has changed: its rows had the fingerprint",
        ),
        ("files that are gone", SourceError, r"gone.\*.parquet matches no Parquet files"),
        ("deleted entry", CacheError, r"There is no committed cache entry at .*: write it again"),
    ],
)
def test_rows_that_are_no_more_are_an_error(
    runs: dict[str, Run], kind: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        source_of(runs[kind]).load()


def test_the_profile_says_what_load_will_do(runs: dict[str, Run]) -> None:
    profiles = {kind: json.loads(run.inputs.dataset_inputs[0].dataset.profile) for kind, run in runs.items()}
    assert profiles["entry"]["load"] == "makes a converter of the same rows"
    assert profiles["entry"]["cache_key"] == "rides-1"
    assert profiles["deleted entry"]["load"].startswith("only until the cache entry is removed")
    assert profiles["view"]["views"] == ["where", "split"]
    assert profiles["mixture"]["sources"].keys() == {"a", "b"}
    assert profiles["wide"]["columns"] == NUM_WIDE


def test_no_secret_is_in_a_store(folder: Path, runs: dict[str, Run]) -> None:
    places = [folder / "runs.db", *(path for path in (folder / "mlruns").rglob("*") if path.is_file())]
    assert len(places) > 10
    contents = b"".join(path.read_bytes() for path in places)
    assert b"files_fingerprint" in contents
    assert SECRET.encode() not in contents
    assert b"account_key" not in contents


def test_the_schema_is_one_of_mlflows(runs: dict[str, Run]) -> None:
    documents = {kind: json.loads(run.inputs.dataset_inputs[0].dataset.schema) for kind, run in runs.items()}
    tensors = TensorDatasetSchema.from_dict(documents["older version"]).features
    shapes = {spec.name: (str(spec.type), spec.shape) for spec in tensors}
    assert shapes["pair"] == ("float32", (-1, 2))
    assert (shapes["day"], shapes["name"][1]) == (("datetime64[D]", (-1,)), (-1,))
    # What the page of a run shows.
    columns = Schema.from_json(json.dumps(documents["older version"]["mlflow_colspec"]))
    assert columns.input_names() == ["id", "x", "y", "day", "pair", "name"]
    assert len(documents["wide"]["mlflow_colspec"]) == NUM_WIDE


def test_a_schema_that_mlflow_cannot_keep_is_left_out(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = [f"{number:05d}{'x' * 100}" for number in range(4000)]
    pq.write_table(pa.table({name: [1] for name in names}), tmp_path / "a.parquet")
    converter = make_parquet_converter(tmp_path / "a.parquet")
    # Too long with the tensors, then by itself.
    schema = json.loads(converter.mlflow_dataset().to_dict()["schema"])
    assert list(schema) == ["mlflow_colspec"]
    dataset = converter.mlflow_dataset()
    dataset._columns = type(converter.schema)(converter.schema.fields * 2)
    document = dataset.to_dict()
    assert document["schema"] is None
    assert "left out" in json.loads(document["profile"])["schema"]


def test_mlflow_makes_the_dataset_of_a_converter_and_knows_it_as_a_source(folder: Path) -> None:
    converter = make_parquet_converter(folder / "kept")
    dataset = mlflow.data.from_converter(converter)
    assert (dataset.name, dataset.digest) == ("kept", converter.mlflow_dataset().digest)
    assert mlflow.data.from_converter(converter, name="a", digest="b").digest == "b"
    of_arrays = mlflow.data.from_numpy(converter.head(3)["x"], source=converter)
    assert isinstance(of_arrays.source, ConverterSource)
    with mlflow.data.get_source(of_arrays).load() as part:
        assert part.fingerprint == converter.fingerprint


@pytest.mark.parametrize("source", ["", "[", "[]", "{}", "[" * 100_000, '{"format": 1, "kind": "pickle"}'])
def test_what_others_wrote_into_a_store_is_refused(source: str) -> None:
    entity = Dataset(name="rides", digest="0", source_type="converter", source=source)
    with pytest.raises(SourceError, match="The source of this dataset in the tracking store"):
        mlflow.data.get_source(entity)


def test_the_documented_examples_run(folder: Path) -> None:
    mlflow.set_tracking_uri(uri_of(folder, "database"))
    explained = (DatasetConverter.mlflow_dataset, ConverterDataset, from_converter, ConverterSource)
    blocks = [block for name in explained for block in python_blocks(inspect.getdoc(name) or "")]
    assert len(blocks) == len(explained)
    with mlflow.start_run() as run:
        for block in blocks:
            names = {"mlflow": mlflow, "converter": make_parquet_converter(folder / "kept"), "run_id": run.info.run_id}
            exec(block, names)


def test_a_server_shows_the_rows_of_a_run(folder: Path, tmp_path: Path) -> None:
    mlflow.set_tracking_uri(uri_of(folder, "database"))
    (run,) = mlflow.search_runs(
        experiment_names=["rides"], filter_string="run_name = 'older version'", output_format="list"
    )
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri_of(folder, "database")]
    with start([*command, "--port", str(port), "--workers", "1"], tmp_path, clean_environment()) as process:
        answer = json.loads(read_when_up(f"{url}/api/2.0/mlflow/runs/get?run_id={run.info.run_id}", process))
    (tracked,) = answer["run"]["inputs"]["dataset_inputs"]
    assert re.search(r'"version": 1\b', tracked["dataset"]["source"])
    assert tracked["dataset"]["name"] == "rides"


def read_when_up(url: str, process: subprocess.Popen[str]) -> bytes:
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.URLError:
            assert process.poll() is None, process.communicate()[0][-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
