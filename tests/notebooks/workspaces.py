"""Where a notebook runs: its folders, and what stands in for what only a platform has."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from IPython.core.inputtransformer2 import TransformerManager

from converter.sources.spark.local import find_java_home
from tests.folders import files_below
from tests.servers.azurite import SecureAzurite, start_secure_azurite
from tests.servers.connect import only_connect_server

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
DIGITS = ["01_digits_in_torch", "02_digits_in_keras"]
SYNAPSE = "03_synapse_and_fabric"
DATABRICKS = "04_databricks"
PLATFORMS = [SYNAPSE, DATABRICKS]
DELTA = "05_images_in_delta"
CACHE = "06_cache_reuse_and_cleanup"
RANKS = "07_ranks_resume_and_memory"
STORES = "08_stores_and_credentials"
TYPES = "09_types_nulls_shapes_order"
VALUES = "10_images_text_numbers"
SERIES = "11_forecasting_a_series"
MIXING = "12_mixing_balancing_buckets"
MOVING = "13_from_petastorm_and_deltatorch"
LAUNCHED = "14_many_gpus_from_spark"
SEEN = "15_see_what_happens"
CLOUD = "cloud"
"""The tag of cells that need a platform."""

IN_ACCOUNT = "abfss:"
"""What begins the names of files that are in a storage account, where others are on a volume."""

STAND_IN_TOKENS = '''
"""Tokens of the form that Entra ID gives, and a file that says who asked for them."""

import base64
import json
import os
import time


def _part(value):
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def give(*asked_by):
    with open(os.environ["STAND_IN_ASKED"], "a") as asked:
        asked.write(json.dumps([os.getpid(), *asked_by]) + "\\n")
    now = int(time.time())
    claims = {"aud": "https://storage.azure.com", "iss": "https://sts.windows.net/tests/"}
    claims |= {"iat": now, "nbf": now - 5, "exp": now + 3600}
    return ".".join([_part({"alg": "none"}), _part(claims), "signed-by-nobody"]), now + 3600
'''

NOTEBOOKUTILS = '''
"""Stands in for the module of Synapse and Fabric: its names."""

import os

from stand_in_tokens import give


class credentials:
    def getToken(audience):
        assert audience == "storage"
        return give()[0]

    def getConnectionStringOrCreds(linkedService):
        assert linkedService == "lake"
        return os.environ["STAND_IN_SAS"]
'''

DATABRICKS_RUNTIME = '''
"""Stands in for what Databricks has in the notebook's process: it cannot be used or sent elsewhere."""

from itertools import count

from azure.core.credentials import AccessToken
from pyspark import TaskContext
from stand_in_tokens import give


class _Bound:
    def __reduce__(self):
        raise TypeError("You cannot use dbutils within a spark job or otherwise pickle it.")


class _Provider(_Bound):
    numbers = count(1)

    def __init__(self, name):
        self.name, self.number = name, next(self.numbers)

    def get_token(self, *scopes, **_):
        assert scopes == ("https://storage.azure.com/.default",)
        return AccessToken(*give("notebook", self.name, self.number))


class _Credentials(_Bound):
    def getServiceCredentialsProvider(self, name):
        assert TaskContext.get() is None
        return _Provider(name)


class _Utilities(_Bound):
    credentials = _Credentials()


dbutils = _Utilities()
'''

DATABRICKS_SERVICE_CREDENTIALS = '''
"""Stands in for what Databricks has on executors, and nowhere else."""

from azure.core.credentials import AccessToken
from pyspark import TaskContext
from stand_in_tokens import give


class _Provider:
    def __init__(self, name):
        self.name = name

    def get_token(self, *scopes, **_):
        assert scopes == ("https://storage.azure.com/.default",)
        return AccessToken(*give("executor", self.name))


def getServiceCredentialsProvider(name):
    assert TaskContext.get() is not None
    return _Provider(name)
'''

CONNECT = """
from pyspark.sql import SparkSession

builder = SparkSession.builder.remote("local[2]")
builder.config("spark.sql.execution.arrow.pythonUDF.columnarInput.enabled", "false").getOrCreate()
"""

DBUTILS = """
# Databricks' notebooks have the name without an import.
from databricks.sdk.runtime import dbutils
"""

KILLED_WHILE_SAVING = """
import os
import signal

import torch


def _dying(save, most):
    def saved(*arguments):
        nonlocal most
        most -= 1
        if most < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        save(*arguments)

    return saved


torch.save = _dying(torch.save, most=2)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Where a notebook runs: what we put in the place of what only a platform has."""

    files: Callable[[], list[str]]
    """What stands where the cache goes, or the notebook's own table."""

    data_requests: Callable[[], int] = lambda: 0
    """How many requests for rows the store has answered."""

    environment: Mapping[str, str] = field(default_factory=dict)

    replaced: Mapping[str, str] = field(default_factory=dict)
    """Texts of the cloud cells that stand for something of the user's, and what they are here."""

    before: str = ""
    """A cell that runs first."""

    after_cloud: str = ""
    """A cell that runs after the last cloud cell."""

    killed_by: str = ""
    """A cell in front of a first run that this kills; the notebook is then run again."""

    def cells(self, content: Any, first: str = "") -> list[Any]:
        """The notebook's cells without the installation, among ours."""
        cells = [cell for cell in content.cells if not is_installation(cell)]
        for cell in cells:
            for text, here in self.replaced.items() if is_cloud(cell) else ():
                assert text in cell.source
                cell.source = cell.source.replace(text, here)
        if self.after_cloud:
            last = max(index for index, cell in enumerate(cells) if is_cloud(cell))
            cells.insert(last + 1, nbformat.v4.new_code_cell(self.after_cloud))
        return [nbformat.v4.new_code_cell(source) for source in (self.before, first) if source] + cells


def is_cloud(cell: Any) -> bool:
    return CLOUD in cell.metadata.get("tags", ())


def is_installation(cell: Any) -> bool:
    return is_cloud(cell) and "%pip install" in cell.source


def python_of(cell: Any) -> str:
    """A cell's code with its magics as the calls that they are."""
    return TransformerManager().transform_cell(cell.source)


# Where they run ----------------------------------------------------------------------


@contextlib.contextmanager
def on_this_machine(folder: Path) -> Iterator[Workspace]:
    yield Workspace(files=lambda: files_below(folder / "cache"))


@contextlib.contextmanager
def with_an_account(folder: Path, modules: Mapping[str, str]) -> Iterator[tuple[SecureAzurite, str, dict[str, str]]]:
    """Blobs over TLS that take tokens, a container, and an environment where a platform's modules give them."""
    with start_secure_azurite(folder / "azurite") as account:
        platform = folder / "platform"
        for name, source in {"stand_in_tokens": STAND_IN_TOKENS, **modules}.items():
            path = platform / f"{name.replace('.', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(platform), os.environ.get("PYTHONPATH")])),
            "SSL_CERT_FILE": str(account.certificate),
            "STAND_IN_ASKED": str(platform / "asked"),
        }
        yield account, account.new_container(), environment


@contextlib.contextmanager
def as_on_databricks(folder: Path) -> Iterator[Workspace]:
    """Spark Connect, blobs over TLS, and a folder for the volume: what a volume's mount does otherwise is not seen."""
    volume = folder / "cache"
    volume.mkdir()
    modules = {
        "databricks.sdk.runtime": DATABRICKS_RUNTIME,
        "databricks.service_credentials": DATABRICKS_SERVICE_CREDENTIALS,
    }
    with only_connect_server(), with_an_account(folder, modules) as (account, container, environment):
        yield Workspace(
            files=lambda: [*files_below(volume), *(f"{IN_ACCOUNT}{name}" for name in account.files(container))],
            data_requests=account.data_requests,
            environment={
                **environment,
                "SPARK_LOCAL_IP": "127.0.0.1",
                "JAVA_HOME": str(find_java_home()),
                "PYSPARK_PYTHON": sys.executable,
            },
            before=CONNECT + DBUTILS,
            replaced={
                "/Volumes/main/default/volume": str(volume),
                "container@account.": f"{container}@{account.account}.",
            },
            # The emulator has all accounts on one host.
            after_cloud=f"to_read['account_host'] = to_write['account_host'] = '{account.host}'",
            killed_by=KILLED_WHILE_SAVING,
        )


@contextlib.contextmanager
def as_in_synapse(folder: Path) -> Iterator[Workspace]:
    """Classic Spark, a module that gives tokens, and blobs over TLS that take them."""
    with with_an_account(folder, {"notebookutils": NOTEBOOKUTILS}) as (account, container, environment):
        yield Workspace(
            files=lambda: account.files(container),
            data_requests=account.data_requests,
            environment={**environment, "STAND_IN_SAS": account.sas(container)},
            before="from converter import start_local_spark\n\nstart_local_spark('synapse', master='local[2]')",
            replaced={"container@account.": f"{container}@{account.account}."},
            # The emulator has all accounts on one host.
            after_cloud=f"storage_options['account_host'] = '{account.host}'",
        )


@contextlib.contextmanager
def among_temporary_files(folder: Path) -> Iterator[Workspace]:
    """The notebook keeps what it writes in a temporary folder of its own."""
    yield Workspace(files=lambda: files_below(folder / "tmp"))


WORKSPACES = {SYNAPSE: as_in_synapse, DATABRICKS: as_on_databricks}
WORKSPACES |= dict.fromkeys([DELTA, CACHE, RANKS, STORES], among_temporary_files)
