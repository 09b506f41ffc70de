"""What launchers of several processes make of a converter: every row once, after a crash too, on any number of ranks.

    python -m tests.compat.launchers > tests/compat/LAUNCHERS.md        # a quarter of an hour on two cores

With each launcher, ranks that talk over gloo train for two epochs and note the rows of each step. They save a
checkpoint in the middle of the second epoch; two steps later the last rank kills itself. The ranks that start again go
on from the checkpoint, and so does another run with another number of ranks. `tests/integration/test_launchers.py`
checks the same notes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from converter import DatasetConverter, make_spark_converter, open_converter

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_ROWS = 960
BATCH_SIZE = 20
SHUFFLED: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True, "seed": 3, "shuffle_window_rows": 150}
TIMEOUT_SECONDS = 240.0
FIRST, OTHER = "first", "other"


# What every rank runs ----------------------------------------------------------------------------


def train(rows: DatasetConverter, folder: str, launch: str) -> None:
    """Train for two epochs, from the checkpoint if there is one; die in the middle of the second one if there is none.

    The only weight loses 1 in each step, so that it tells how many steps the model has made.
    """
    import torch
    from torch import distributed

    is_ranked = "RANK" in os.environ
    rank, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    model: Any = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ranks_model = model
    # Ray makes one for its ranks.
    is_own_group = is_ranked and not distributed.is_initialized()
    if is_own_group:
        distributed.init_process_group("gloo")
    if is_ranked:
        ranks_model = torch.nn.parallel.DistributedDataParallel(model)

    checkpoint = Path(folder, "checkpoint.pt")
    epoch, step, saved = 0, 0, None
    with (
        rows.make_torch_dataloader(**SHUFFLED) as loader,
        open(Path(folder, launch, f"{rank}-{os.getpid()}.jsonl"), "w") as notes,
    ):
        if checkpoint.exists():
            saved = torch.load(checkpoint, weights_only=True)
            epoch, step = saved["epoch"], saved["step"]
            for part in (model, optimizer, loader):
                part.load_state_dict(saved[type(part).__name__])
        about = {"rank": rank, "ranks": count, "resumed_from": step, "python": sys.prefix}
        middle = 3 * len(loader) // 2
        while epoch < 2:
            for batch in loader:
                optimizer.zero_grad()
                ranks_model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                step += 1
                note = {"epoch": epoch, "step": step, "weight": model.weight.item(), "ids": batch["id"].tolist()}
                print(json.dumps(about | note), file=notes, flush=True)
                if saved is None and step == middle and rank == 0:
                    states = {type(part).__name__: part.state_dict() for part in (model, optimizer, loader)}
                    torch.save({**states, "epoch": epoch, "step": step}, f"{checkpoint}.new")
                    os.replace(f"{checkpoint}.new", checkpoint)
                # Step middle + 1 needed all ranks, so rank 0 has saved.
                if saved is None and step == middle + 2 and rank == count - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            epoch += 1
    if is_ranked:
        # Nobody leaves before all have read their rows: the store in which ranks meet ends with rank 0.
        distributed.barrier()
    if is_own_group:
        distributed.destroy_process_group()


def train_with_lightning(rows: DatasetConverter, folder: str, launch: str, devices: int) -> None:
    """The same by Lightning, whose Trainer starts this program again for each further rank."""
    import lightning
    import torch

    checkpoint = Path(folder, "checkpoint.ckpt")
    start = torch.load(checkpoint, weights_only=False)["global_step"] if checkpoint.exists() else 0

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.zeros_(self.layer.weight)

        def training_step(self, *_: Any) -> torch.Tensor:
            return self.layer(torch.ones(1, 1)).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1.0)

        def train_dataloader(self) -> Any:
            return rows.make_torch_dataloader(**SHUFFLED)

    class Note(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, _: Any, batch: Any, __: int) -> None:
            rank, count, step = trainer.global_rank, trainer.world_size, trainer.global_step
            about = {"rank": rank, "ranks": count, "resumed_from": start, "python": sys.prefix}
            note = {"epoch": trainer.current_epoch, "step": step, "weight": module.layer.weight.item()}
            with open(Path(folder, launch, f"{rank}-{os.getpid()}.jsonl"), "a") as notes:
                print(json.dumps(about | note | {"ids": batch["id"].tolist()}), file=notes)
            middle = 3 * len(trainer.train_dataloader) // 2
            if not start and step == middle:
                trainer.save_checkpoint(checkpoint)
            if not start and step == middle + 2 and rank == count - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", devices=devices, max_epochs=2, callbacks=[Note()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Model(), ckpt_path=checkpoint if start else None)


def train_with_transformers(rows: DatasetConverter, folder: str, launch: str) -> None:
    """The same by a Trainer of Hugging Face Transformers, under torchrun."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    from converter.frameworks.transformers import train as train_by

    output = Path(folder, "transformers")
    saved = get_last_checkpoint(str(output)) if output.exists() else None
    start = int(saved.rpartition("-")[2]) if saved else 0
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    read: list[int] = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, id: torch.Tensor) -> dict[str, torch.Tensor]:  # noqa: A002 (a column's name)
            read[:] = id.tolist()
            return {"loss": self.weight.sum()}

    class Note(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            step, of_epoch = state.global_step, NUM_ROWS // BATCH_SIZE // count
            middle = 3 * of_epoch // 2
            # The first epoch's last step is in it.
            epoch = 1 if start else (step - 1) // of_epoch
            about = {"rank": rank, "ranks": count, "resumed_from": start, "python": sys.prefix}
            note = {"epoch": epoch, "step": step, "weight": model.weight.item(), "ids": list(read)}
            with open(Path(folder, launch, f"{rank}-{os.getpid()}.jsonl"), "a") as notes:
                print(json.dumps(about | note), file=notes)
            control.should_save = not start and step == middle
            if not start and step == middle + 2 and rank == count - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    arguments = TrainingArguments(
        str(output), num_train_epochs=2, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
        optim="sgd", learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=0.0,
    )  # fmt: skip
    with rows.make_torch_dataloader(**SHUFFLED) as loader:
        train_by(Trainer(Model(), arguments, callbacks=[Note()]), loader, resume_from_checkpoint=saved)


def drive(folder: str, ranks: int, other_ranks: int, place: str, store: str | None) -> None:
    """Write the rows with Spark, and train on them by TorchDistributor, beside the driver or in the executors.

    With a `store`, the cache is there.
    """
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.getOrCreate()
    df = spark.range(0, NUM_ROWS, 1, 2)
    cache_dir = store or f"{folder}/cache"
    converter = make_spark_converter(df, cache_dir=cache_dir, row_group_bytes=2000, delete_on_exit=False)
    note_expected(converter, folder, ranks)
    first, other = (
        TorchDistributor(num_processes=count, local_mode=place == "driver", use_gpu=False)
        for count in (ranks, other_ranks)
    )
    # Spark does not start the last stage of a job again where it is a barrier: it is the user who does. Which process
    # died, and of what, stands in its log alone; `check_fresh` reads it from the notes.
    try:
        first.run(train, converter, folder, FIRST)
    except Exception as error:  # noqa: BLE001 (Spark's classes are several)
        assert "failed during training" in str(error), error  # noqa: PT017 (a program, not a test)
    else:
        raise AssertionError("no rank was killed")
    first.run(train, converter, folder, FIRST)
    other.run(train, converter, folder, OTHER)
    print(json.dumps({"session": type(spark).__module__}), flush=True)
    spark.stop()


def drive_ray(folder: str, ranks: int, other_ranks: int) -> None:
    """Train on the rows by Ray Train, which starts its ranks again after one was killed."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(num_cpus=max(ranks, other_ranks) + 1, include_dashboard=False, _temp_dir=f"{folder}/ray")
    with open_converter(Path(folder, "url").read_text()) as rows:
        for launch, count in ((FIRST, ranks), (OTHER, other_ranks)):
            TorchTrainer(
                lambda config: train(config["rows"], folder, config["launch"]),
                train_loop_config={"rows": rows, "launch": launch},
                torch_config=TorchConfig(backend="gloo"),
                scaling_config=ScalingConfig(num_workers=count),
                run_config=RunConfig(
                    storage_path=f"{folder}/results", name=launch, failure_config=FailureConfig(max_failures=1)
                ),
            ).fit()
    ray.shutdown()


# Launchers ---------------------------------------------------------------------------------------

StartStore = Callable[[Path], AbstractContextManager[tuple[str, dict[str, str]]]]
"""Starts a store below a folder for the time of a block; gives a place for a cache, and environment variables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A standalone Spark: a master and two workers of one core. Executors run a virtual environment of their own."""

    url: str
    python_home: Path
    environment: Mapping[str, str]
    """What makes the driver run this Python, and the executors the cluster's."""


@contextmanager
def start_cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster for the time of the block, with its logs in `folder`."""
    from tests.integration.test_jobs import SPARK_HOME, clean_environment, daemon

    python_home = make_environment(folder / "python")
    environment = clean_environment() | {
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYSPARK_PYTHON": str(python_home / "bin" / "python"),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
    }
    of_daemons = environment | {
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "SPARK_DAEMON_MEMORY": "512m",
    }
    master, worker = (f"org.apache.spark.deploy.{name}" for name in ("master.Master", "worker.Worker"))
    ports = ["--host", "127.0.0.1", "--webui-port", "0"]
    with ExitStack() as stack:
        log = stack.enter_context(daemon([master, *ports, "--port", "0"], of_daemons, folder / "master.log"))
        url = log(r"Starting Spark master at (spark://127\.0\.0\.1:\d+)")
        options = [*ports, "--cores", "1", "--memory", "1g"]
        logs = [
            stack.enter_context(
                daemon(
                    [worker, *options, "--work-dir", str(folder / f"work-{number}"), url],
                    of_daemons,
                    folder / f"worker-{number}.log",
                )
            )
            for number in range(2)
        ]
        for log in logs:
            log(r"(Successfully registered with master)")
        yield Cluster(url=url, python_home=python_home, environment=environment)


def make_environment(folder: Path, *packages: str) -> Path:
    """A virtual environment that takes this one's packages, so that no others than `packages` are installed."""
    from tests.servers.process import fetch

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (own,) = folder.glob("lib/python*/site-packages")
    ours = next(path for path in sys.path if path.endswith("site-packages"))
    # Unlike a bare path, this also follows the other environment's own .pth files.
    (own / "packages.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    if packages:
        pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
        fetch([*pip, "install", "--quiet", *packages], folder=folder)
    return folder


def run(command: Sequence[str | Path], folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """How a program ended, and its output. Nothing of it outlives this call."""
    with start(command, folder, environment) as process:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    return process.returncode, output


@contextmanager
def start(
    command: Sequence[str | Path], folder: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """A program for the time of the block, its errors among its output."""
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        # Ranks have process groups of their own: torchrun ends them when it is asked to end.
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def environment_of_ranks(folder: Path) -> dict[str, str]:
    """The environment without any launcher's variables; temporary files go below `folder`."""
    from tests.integration.test_jobs import clean_environment

    environment = {name: value for name, value in clean_environment().items() if not name.endswith(("RANK", "SIZE"))}
    # Else ranks that start again meet by the addresses of those that died (pytorch#135712, torch 2.5 to 2.15 at least).
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return environment | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}


def torchrun(
    program: Sequence[str],
    folder: Path,
    *,
    nodes: int = 1,
    ranks_per_node: int,
    max_restarts: int = 0,
    python: str | Path = sys.executable,
) -> list[str]:
    """Run a program by as many agents as there are nodes, which meet on this host; their outputs."""
    from tests.servers.process import free_port

    options = [
        f"--nnodes={nodes}", f"--nproc-per-node={ranks_per_node}", f"--max-restarts={max_restarts}",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=rows", "--local-addr=127.0.0.1",
        "--monitor-interval=0.1",
    ]  # fmt: skip
    command = [python, "-m", "torch.distributed.run", *options, *program]
    with ExitStack() as stack:
        agents = [stack.enter_context(start(command, folder, environment_of_ranks(folder))) for _ in range(nodes)]
        outputs = [agent.communicate(timeout=TIMEOUT_SECONDS)[0] for agent in agents]
    for agent, output in zip(agents, outputs, strict=True):
        assert agent.returncode == 0, output[-5000:]
    return outputs


def launch_alone(folder: Path, start_cluster_once: Callable[[], Cluster]) -> None:
    """One process, killed and started again; its checkpoint is continued by two ranks."""
    del start_cluster_once
    write_rows(folder, 1)
    environment = environment_of_ranks(folder)
    for expected in (-signal.SIGKILL, 0):
        status, output = run([sys.executable, *rank_of(folder, FIRST)], folder, environment)
        assert status == expected, output[-5000:]
    torchrun(rank_of(folder, OTHER), folder, ranks_per_node=2)


def launch_by_torchrun(folder: Path, start_cluster_once: Callable[[], Cluster], *, nodes: int) -> None:
    """Four ranks, started again once; their checkpoint is continued by three, or by two on two nodes."""
    del start_cluster_once
    write_rows(folder, 4)
    torchrun(rank_of(folder, FIRST), folder, nodes=nodes, ranks_per_node=4 // nodes, max_restarts=1)
    torchrun(rank_of(folder, OTHER), folder, nodes=nodes, ranks_per_node=3 // nodes)


def launch_by_lightning(folder: Path, start_cluster_once: Callable[[], Cluster]) -> None:
    """Two ranks of Lightning, killed and started again; their checkpoint is continued by three."""
    del start_cluster_once
    write_rows(folder, 2)
    environment = environment_of_ranks(folder)
    for launch, devices, is_killed in ((FIRST, 2, True), (FIRST, 2, False), (OTHER, 3, False)):
        command = [sys.executable, __file__, "--lightning", json.dumps([str(folder), launch, devices])]
        status, output = run(command, folder, environment)
        assert (status != 0) == is_killed, output[-5000:]


def launch_by_transformers(folder: Path, start_cluster_once: Callable[[], Cluster]) -> None:
    """Two ranks of a Trainer, started again once; their checkpoint is continued by three."""
    del start_cluster_once
    write_rows(folder, 2)
    python = make_environment(folder / "python", "transformers") / "bin" / "python"
    for launch, ranks, max_restarts in ((FIRST, 2, 1), (OTHER, 3, 0)):
        program = [__file__, "--transformers", json.dumps([str(folder), launch])]
        torchrun(program, folder, ranks_per_node=ranks, max_restarts=max_restarts, python=python)


def launch_by_ray(folder: Path, start_cluster_once: Callable[[], Cluster]) -> None:
    """Two ranks of Ray Train, started again once; their checkpoint is continued by three."""
    del start_cluster_once
    write_rows(folder, 2)
    python = make_environment(folder / "python", "ray[train]") / "bin" / "python"
    program = [python, __file__, "--drive-ray", json.dumps([str(folder), 2, 3])]
    status, output = run(program, folder, environment_of_ranks(folder) | {"PYTHONPATH": str(REPOSITORY)})
    assert status == 0, output[-8000:]


def launch_by_spark(
    folder: Path,
    start_cluster_once: Callable[[], Cluster],
    *,
    place: str,
    ranks: tuple[int, int],
    is_connect: bool = False,
    start_store: StartStore | None = None,
) -> None:
    """TorchDistributor in a session of the cluster."""
    from tests.integration.test_jobs import SPARK_SUBMIT

    cluster = start_cluster_once()
    with ExitStack() as stack:
        environment, store = dict(cluster.environment), None
        options: list[str] = []
        if start_store is not None:
            store, known = stack.enter_context(start_store(folder))
            environment |= known
            # A converter travels without credentials: executors have their own.
            options = [
                word for name, value in known.items() for word in ("--conf", f"spark.executorEnv.{name}={value}")
            ]
        program = [__file__, "--drive", json.dumps([str(folder), *ranks, place, store])]
        command: list[str | Path] = [SPARK_SUBMIT, "--master", cluster.url, *options, *program]
        if is_connect:
            environment["SPARK_REMOTE"] = stack.enter_context(connect_server(cluster, folder))
            command = [sys.executable, *program]
        status, output = run(command, folder, environment)
    assert status == 0, output[-8000:]
    (told,) = (json.loads(line) for line in output.splitlines() if line.startswith('{"session"'))
    assert told["session"] == ("pyspark.sql.connect.session" if is_connect else "pyspark.sql.session")


@contextmanager
def start_hdfs_store(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A cache's place on an HDFS, and the environment of who may read it."""
    from tests.servers.hdfs import start_hdfs

    (folder / "hdfs").mkdir()
    with start_hdfs(folder / "hdfs") as hdfs:
        yield f"{hdfs.url}/cache", {}


@contextmanager
def start_azure_store(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The same in a blob store."""
    from tests.servers.azurite import start_azurite

    (folder / "azurite").mkdir()
    with start_azurite(folder / "azurite") as azurite:
        known = {"AZURE_STORAGE_CONNECTION_STRING": azurite.connection_string}
        yield f"{azurite.url(azurite.new_container())}/cache", known


@contextmanager
def connect_server(cluster: Cluster, folder: Path) -> Iterator[str]:
    """The URL of a Connect server whose executors are the cluster's."""
    from tests.integration.test_jobs import SPARK_HOME, daemon
    from tests.servers.process import free_port

    port = free_port()
    command = [
        "org.apache.spark.deploy.SparkSubmit", "--master", cluster.url,
        "--class", "org.apache.spark.sql.connect.service.SparkConnectServer",
        "--conf", f"spark.connect.grpc.binding.port={port}", "--conf", "spark.connect.grpc.binding.address=127.0.0.1",
        "--conf", "spark.ui.enabled=false", "spark-internal",
    ]  # fmt: skip
    environment = {**cluster.environment, "SPARK_HOME": str(SPARK_HOME)}
    with daemon(command, environment, folder / "connect.log") as log:
        log(r"(Spark Connect server started)")
        yield f"sc://127.0.0.1:{port}"


def write_rows(folder: Path, ranks: int) -> None:
    """The rows, written without Spark."""
    from tests.columns import ID
    from tests.entries import write_converter

    halves = [[range(NUM_ROWS // 2)], [range(NUM_ROWS // 2, NUM_ROWS)]]
    with write_converter(folder / "cache", (ID,), halves, row_group_bytes=2000, delete_on_exit=False) as converter:
        (folder / "url").write_text(converter.url)
        note_expected(converter, folder, ranks)


def note_expected(converter: DatasetConverter, folder: str | Path, ranks: int) -> None:
    """Write down the rows of each rank in each epoch, in order, as a reader in one process gives them."""
    expected = []
    for rank in range(ranks):
        with converter.make_batch_reader(**SHUFFLED, cur_shard=rank, shard_count=ranks) as reader:
            expected.append([[row for batch in reader for row in batch["id"].tolist()] for _ in range(2)])
    Path(folder, "expected.json").write_text(json.dumps(expected))


def rank_of(folder: Path, launch: str) -> list[str]:
    """The program of a rank that opens the rows by their URL."""
    return [__file__, "--rank", json.dumps([str(folder), launch])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A way to start ranks, and how many."""

    name: str
    ranks: int
    other_ranks: int
    function: Callable[[Path, Callable[[], Cluster]], None]

    def launch(self, folder: Path, start_cluster_once: Callable[[], Cluster]) -> None:
        """Run all ranks in an empty folder, which holds their rows, checkpoint and notes afterwards."""
        for name in (FIRST, OTHER):
            (folder / name).mkdir()
        self.function(folder, start_cluster_once)


def spark_launcher(place: str, *, other_ranks: int, is_connect: bool) -> Launcher:
    where = {"driver": "beside the driver", "executors": "in two executors"}[place]
    function = partial(launch_by_spark, place=place, ranks=(2, other_ranks), is_connect=is_connect)
    name = f"TorchDistributor {where}, {'Connect' if is_connect else 'classic'}"
    return Launcher(name=name, ranks=2, other_ranks=other_ranks, function=function)


def store_launcher(store: str, start_store: StartStore) -> Launcher:
    function = partial(launch_by_spark, place="executors", ranks=(2, 1), start_store=start_store)
    name = f"TorchDistributor in two executors, classic, the rows {store}"
    return Launcher(name=name, ranks=2, other_ranks=1, function=function)


LAUNCHERS = (
    Launcher(name="none, continued by torchrun", ranks=1, other_ranks=2, function=launch_alone),
    Launcher(name="torchrun, 1 node × 4", ranks=4, other_ranks=3, function=partial(launch_by_torchrun, nodes=1)),
    Launcher(name="torchrun, 2 nodes × 2", ranks=4, other_ranks=2, function=partial(launch_by_torchrun, nodes=2)),
    spark_launcher("driver", other_ranks=3, is_connect=False),
    spark_launcher("executors", other_ranks=1, is_connect=False),
    spark_launcher("driver", other_ranks=3, is_connect=True),
    spark_launcher("executors", other_ranks=1, is_connect=True),
    Launcher(name="Lightning", ranks=2, other_ranks=3, function=launch_by_lightning),
    Launcher(name="Transformers under torchrun", ranks=2, other_ranks=3, function=launch_by_transformers),
    store_launcher("on HDFS", start_hdfs_store),
    store_launcher("in Azurite", start_azure_store),
    Launcher(name="Ray Train", ranks=2, other_ranks=3, function=launch_by_ray),
)


# What the notes must say -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What the ranks of a launcher have noted."""

    launcher: Launcher
    fresh: list[dict[str, Any]]
    """Until the last rank was killed."""

    resumed: list[dict[str, Any]]
    other: list[dict[str, Any]]
    expected: list[list[list[int]]]
    """Of each rank, the rows of each epoch, in order."""

    @property
    def middle(self) -> int:
        """The step of the checkpoint."""
        return 3 * NUM_ROWS // BATCH_SIZE // self.launcher.ranks // 2

    def until_checkpoint(self, rank: int) -> list[int]:
        """The rows of the second epoch that are in the checkpoint."""
        steps = [note for note in self.fresh if note["epoch"] == 1 and note["step"] <= self.middle]
        return rows_of(steps, rank)


def read_notes(launcher: Launcher, folder: Path) -> Notes:
    """The notes that a launcher's ranks have left."""
    notes = {
        name: [json.loads(line) for path in sorted((folder / name).iterdir()) for line in path.read_text().splitlines()]
        for name in (FIRST, OTHER)
    }
    return Notes(
        launcher=launcher,
        fresh=[note for note in notes[FIRST] if not note["resumed_from"]],
        resumed=[note for note in notes[FIRST] if note["resumed_from"]],
        other=notes[OTHER],
        expected=json.loads((folder / "expected.json").read_text()),
    )


def rows_of(notes: Sequence[Mapping[str, Any]], rank: int) -> list[int]:
    return [row for note in notes if note["rank"] == rank for row in note["ids"]]


def check_fresh(notes: Notes) -> None:
    """Every row of the first epoch is on one rank, in the order of one process, until a rank is killed."""
    ranks = range(notes.launcher.ranks)
    epoch = [note for note in notes.fresh if note["epoch"] == 0]
    parts = [rows_of(epoch, rank) for rank in ranks]
    assert parts == [notes.expected[rank][0] for rank in ranks]
    assert sorted(itertools.chain(*parts)) == list(range(NUM_ROWS))
    assert max(note["step"] for note in notes.fresh) == notes.middle + 2
    check_ranks(notes.fresh, notes.launcher.ranks)


def check_resumed(notes: Notes) -> None:
    """After the crash each rank goes on with its very next row, and the epoch has every row once."""
    ranks = range(notes.launcher.ranks)
    assert {note["resumed_from"] for note in notes.resumed} == {notes.middle}
    parts = [notes.until_checkpoint(rank) + rows_of(notes.resumed, rank) for rank in ranks]
    assert parts == [notes.expected[rank][1] for rank in ranks]
    assert sorted(itertools.chain(*parts)) == list(range(NUM_ROWS))
    check_ranks(notes.resumed, notes.launcher.ranks)


def check_other(notes: Notes) -> None:
    """With another number of ranks the rest of the epoch has each remaining row once, in equal parts."""
    ranks = range(notes.launcher.other_ranks)
    assert {note["resumed_from"] for note in notes.other} == {notes.middle}
    before = [notes.until_checkpoint(rank) for rank in range(notes.launcher.ranks)]
    after = [rows_of(notes.other, rank) for rank in ranks]
    assert sorted(itertools.chain(*before, *after)) == list(range(NUM_ROWS))
    assert {len(part) for part in after} == {NUM_ROWS // 2 // len(ranks)}
    check_ranks(notes.other, notes.launcher.other_ranks)


def check_ranks(notes: Sequence[Mapping[str, Any]], count: int) -> None:
    assert {note["rank"] for note in notes} == set(range(count))
    assert {note["ranks"] for note in notes} == {count}
    assert all(abs(note["weight"] + note["step"]) < 0.01 for note in notes)


CASES: dict[str, Callable[[Notes], None]] = {
    "fresh": check_fresh,
    "resumed after SIGKILL": check_resumed,
    "other number of ranks": check_other,
}


# The table ---------------------------------------------------------------------------------------


def main() -> None:
    """Run every launcher; print Markdown; exit 1 if a case failed."""
    lines, failures = [], []
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clusters: list[Cluster] = []

        def cluster() -> Cluster:
            if not clusters:
                (root / "cluster").mkdir()
                clusters.append(stack.enter_context(start_cluster(root / "cluster")))
            return clusters[0]

        for number, launcher in enumerate(LAUNCHERS):
            begin, folder = time.perf_counter(), root / str(number)
            folder.mkdir()
            error = failure_of(partial(launcher.launch, folder, cluster))
            print(f"{launcher.name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
            cells = [launcher.name, str(launcher.ranks)]
            for case, check in CASES.items():
                wrong = error or failure_of(lambda check=check, of=launcher, at=folder: check(read_notes(of, at)))  # type: ignore[misc]
                passed = f"passed, {launcher.ranks} → {launcher.other_ranks}" if check is check_other else "passed"
                cells.append("**failed**" if wrong else passed)
                failures += [f"- {launcher.name}, {case}: {wrong.replace(str(root), '…')}"] if wrong else []
            lines.append("| " + " | ".join(cells) + " |")
    print("\n".join([*heading(), *lines, *([""] if failures else []), *failures]))
    sys.exit(bool(failures))


def failure_of(call: Callable[[], None]) -> str:
    """The last line of what a call raises; its traceback goes to stderr."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 (it is a cell of the table)
        traceback.print_exc()
        return (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return ""


def heading() -> list[str]:
    """What was run, on what, when."""
    import pyspark
    import torch

    what = (
        f"`python -m tests.compat.launchers`, {time.strftime('%Y-%m-%d')}: {os.cpu_count()} cores, "
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"Spark {pyspark.__version__}. Ranks talk over gloo. “Two executors” are those of a standalone cluster, a "
        "master and two workers, with a virtual environment of their own; a converter is an argument of the training "
        "function, as with Ray Train. With the others, each rank opens the rows by their URL."
    )
    cases = (
        "fresh: all rows once in an epoch, in the order of one process. resumed: a rank is killed in the middle of the "
        "next epoch; the ranks that start again go on with the very next rows. other: from the same checkpoint another "
        "number of ranks reads each remaining row once."
    )
    return [
        "# Launchers, tried",
        "",
        what,
        "",
        cases,
        "",
        "| launcher | ranks | " + " | ".join(CASES) + " |",
        "| --- | --- |" + " --- |" * len(CASES),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--lightning", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--transformers", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--drive-ray", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--drive", type=json.loads, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank:
        with open_converter(Path(chosen.rank[0], "url").read_text()) as opened:
            train(opened, *chosen.rank)
    elif chosen.lightning:
        with open_converter(Path(chosen.lightning[0], "url").read_text()) as opened:
            train_with_lightning(opened, *chosen.lightning)
    elif chosen.transformers:
        with open_converter(Path(chosen.transformers[0], "url").read_text()) as opened:
            train_with_transformers(opened, *chosen.transformers)
    elif chosen.drive_ray:
        drive_ray(*chosen.drive_ray)
    elif chosen.drive:
        drive(*chosen.drive)
    else:
        main()
