"""Cases of `elastic`: what a seed decides, how the ranks of a case run, and what their notes must say.

Apart from the program, so that forked ranks find this module in memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from converter import NumPy, make_parquet_converter, mix, open_converter
from tests.waiting import wait_until

NUM_ROWS, ROWS_OF_FILE, ROWS_OF_KEY = 2400, 800, 50
NUM_EPOCHS = 2
TIMEOUT_SECONDS, ENDING_SECONDS = 150.0, 40.0
MOST_RANKS = 6
FORKED, TORCHRUN = "forked", "torchrun"


# What is read ------------------------------------------------------------------------------------


def write_rows(folder: Path) -> str:
    """A Parquet data set, and a cache entry of the same ids beside it; the entry's URL."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tests.columns import ID
    from tests.entries import write_converter

    (folder / "parquet").mkdir()
    parts = [range(start, start + ROWS_OF_FILE) for start in range(0, NUM_ROWS, ROWS_OF_FILE)]
    for number, part in enumerate(parts):
        ids = np.array(part)
        columns = {
            "id": ids,
            "key": ids // ROWS_OF_KEY,
            "time": ids % ROWS_OF_KEY,
            "label": ids % 10 == 0,
            "payload": [as_npy(row) for row in part],
        }
        pq.write_table(pa.table(columns), folder / "parquet" / f"{number}.parquet", row_group_size=100)
    batches = [[part] for part in parts]
    with write_converter(folder / "cache", (ID,), batches, row_group_bytes=1000, delete_on_exit=False) as converter:
        return converter.url


def as_npy(row: int) -> bytes:
    """An array that says which row it is of, as a .npy file."""
    content = io.BytesIO()
    np.save(content, np.full(4, row, np.int32))
    return content.getvalue()


def rare(folder: Path, is_rare: bool) -> Any:
    return make_parquet_converter(folder / "parquet", columns=["id", "label"]).where([("label", "=", is_rare)])


VIEWS: dict[str, Callable[[Path, str], Any]] = {
    "cache": lambda _, url: open_converter(url),
    "where": lambda _, url: open_converter(url).where([("id", ">=", 300), ("id", "<", 2171)]),
    "split": lambda _, url: open_converter(url).split({"a": 0.37, "b": 0.63}, seed=5)["b"],
    "Parquet, decoded": lambda folder, _: make_parquet_converter(
        folder / "parquet", decode={"payload": NumPy("int32", (4,))}
    ),
    "sequences": lambda folder, _: make_parquet_converter(folder / "parquet", columns=["id", "key", "time"]).sequences(
        4, by="key", order_by="time", stride=2
    ),
    "balanced": lambda folder, _: make_parquet_converter(folder / "parquet", columns=["id", "label"]).balance("label"),
    "mixed": lambda folder, _: mix(
        {"rare": rare(folder, True), "others": rare(folder, False)}, {"rare": 0.2, "others": 0.8}, stop=2011
    ),
}


def ids_of(batch: Any) -> list[int]:
    """What names a batch's elements: the id of each row, or of a sequence's first row. Padded ones are left out."""
    ids = np.asarray(batch["id"])
    if ids.ndim == 2:
        assert (ids == ids[:, :1] + np.arange(ids.shape[1])).all(), "a sequence's rows do not follow each other"
        ids = ids[:, 0]
    if "payload" in batch:
        assert (np.asarray(batch["payload"]) == ids[:, None]).all(), "a payload is not its row's"
    if "__valid" in batch:
        ids = ids[np.asarray(batch["__valid"])]
    return [int(number) for number in ids]


# A case ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What is drawn anew each time that the ranks start."""

    ranks: int
    batch_size: int
    num_workers: int
    killed_rank: int | None
    """None: this time they are left to the end."""

    counted_from_step: int
    """From the moment that all ranks have taken so many steps, the time runs until the kill."""

    kill_after_seconds: float

    kill_at_step: int | None
    """Then the rank kills itself in this step, before or after it is noted; whichever of the two comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All that a seed decides."""

    seed: int
    launcher: str
    trainer: str
    view: str
    uneven: str
    is_shuffled: bool
    window_rows: int
    save_every: int
    attempts: tuple[Attempt, ...]

    @property
    def options(self) -> dict[str, Any]:
        """What must not change when a training goes on."""
        shuffled = {"shuffle": True, "shuffle_window_rows": self.window_rows} if self.is_shuffled else {}
        return {"seed": self.seed, "uneven": self.uneven, **shuffled}


def draw(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    attempts = []
    num_kills = rng.randint(1, 5)
    trainer = rng.choices(list(TRAINERS), [7, 2, 1])[0]
    for number in range(num_kills + 1):
        ranks = rng.choice([1, 2, 2, 3, 3, 4, 5, MOST_RANKS])
        if trainer == "Keras":
            ranks = min(ranks, 3)  # Each imports TensorFlow.
        attempts.append(
            Attempt(
                ranks=ranks,
                batch_size=rng.choice([4, 7, 16, 33, 64]),
                # Each worker process imports torch, for seconds: few of them, so that there are more kills.
                num_workers=rng.choice([0, 0, 0, 0, 0, 1, 2]) if ranks <= 3 else 0,
                killed_rank=rng.randrange(ranks) if number < num_kills else None,
                counted_from_step=rng.choice([0, 1, 20]),
                kill_after_seconds=rng.random() * rng.choice([0.05, 0.3, 1.0]),
                kill_at_step=rng.choice([None, rng.randint(0, 40)]),
            )
        )
    return Case(
        seed=seed,
        launcher=TORCHRUN if rng.random() < 0.04 else FORKED,  # Its ranks import torch for ten seconds.
        trainer=trainer,
        view=rng.choice(list(VIEWS)),
        # With "keep" ranks take unequal steps, which Lightning cannot.
        uneven=rng.choice(["drop", "pad", "keep"] if trainer == "a loop" else ["drop", "pad"]),
        is_shuffled=rng.random() < 0.8,
        window_rows=rng.choice([150, 400, 5000]),
        save_every=rng.randint(1, 12),
        attempts=tuple(attempts),
    )


# A rank ------------------------------------------------------------------------------------------


class Rank:
    """What the trainers have in common: notes of each step, a kill, the last state."""

    def __init__(self, folder: str, number: int, case: Case) -> None:
        self.case, self.number, self.attempt = case, number, case.attempts[number]
        self.index = int(os.environ["RANK"])
        self.own = Path(folder, f"case-{case.seed}", str(number))
        self.state_file = self.own.parent / "state.json"
        self.saved = json.loads(self.state_file.read_text()) if self.state_file.exists() else None
        self.step = 0
        self._notes = open(self.own / f"{self.index}.jsonl", "w", encoding="ascii")  # noqa: SIM115 (until the end)

    def before_step(self) -> None:
        """From its first call in a chosen step on, the rank may be killed."""
        if self.step == self.attempt.counted_from_step:
            (self.own / f"{self.index}.pid").write_text(str(os.getpid()))

    @property
    def dies_now(self) -> bool:
        return self.index == self.attempt.killed_rank and self.step == self.attempt.kill_at_step

    def note(self, epoch: int, ids: Sequence[int], reading: int | None = None) -> None:
        """Note the rows of a step, which count once all ranks have noted theirs."""
        from torch import distributed

        if self.dies_now and self.case.seed % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        reading = self.attempt.ranks if reading is None else reading
        print(json.dumps([epoch, self.step, reading, list(ids)]), file=self._notes, flush=True)
        distributed.barrier()

    def save(self, **state: Any) -> None:
        """On rank 0: the state from which the next ranks go on."""
        if self.index == 0:
            new = self.own / "state.new"
            new.write_text(json.dumps({"attempt": self.number, "step": self.step, **state}))
            new.replace(self.state_file)

    @property
    def saves_now(self) -> bool:
        return self.step % self.case.save_every == 0

    def after_step(self) -> None:
        if self.dies_now:
            os.kill(os.getpid(), signal.SIGKILL)
        self.step += 1


def train_with_torch(rank: Rank, rows: Any) -> None:
    """A loop by hand."""
    import torch
    from torch import distributed

    attempt, epoch = rank.attempt, 0
    with rows.make_torch_dataloader(
        batch_size=attempt.batch_size, num_workers=attempt.num_workers, **rank.case.options
    ) as loader:
        if rank.saved:
            epoch = rank.saved["epoch"]
            loader.load_state_dict(rank.saved["loader"])
        while epoch < NUM_EPOCHS:
            batches = iter(loader)
            while True:
                rank.before_step()
                batch = next(batches, None)
                reading = torch.tensor(int(batch is not None))
                distributed.all_reduce(reading)
                if reading == 0:
                    break
                rank.note(epoch, [] if batch is None else ids_of(batch), int(reading))
                if rank.saves_now and reading == attempt.ranks:
                    rank.save(epoch=epoch, loader=loader.state_dict())
                rank.after_step()
            epoch += 1


def train_with_lightning(rank: Rank, rows: Any) -> None:
    """Lightning, by its own checkpoints."""
    import lightning
    import torch

    attempt = rank.attempt

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, *_: Any) -> torch.Tensor:
            return self.layer(torch.ones(1, 1)).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    class Note(lightning.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            rank.before_step()

        def on_train_batch_end(self, trainer: Any, module: Any, _: Any, batch: Any, __: int) -> None:
            rank.note(trainer.current_epoch, ids_of(batch))
            if rank.saves_now:
                # Of a name of its own, so that the last state's is whole.
                checkpoint = str(rank.own / f"{rank.step}.ckpt")
                trainer.save_checkpoint(checkpoint)
                rank.save(checkpoint=checkpoint)
            rank.after_step()

    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", devices=attempt.ranks, max_epochs=NUM_EPOCHS, callbacks=[Note()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=str(rank.own),
    )  # fmt: skip
    with rows.make_torch_dataloader(
        batch_size=attempt.batch_size, num_workers=attempt.num_workers, **rank.case.options
    ) as loader:
        trainer.fit(Model(), loader, ckpt_path=rank.saved and rank.saved["checkpoint"])


def train_with_keras(rank: Rank, rows: Any) -> None:
    """Keras `fit` on each rank, with `DatasetStateCallback`."""
    import keras

    from converter.frameworks.tensorflow import DatasetStateCallback

    read: list[int] = []

    class Model(keras.Model):  # type: ignore[misc]
        def train_step(self, batch: Any) -> dict[str, float]:
            rank.before_step()
            read[:] = ids_of(batch)
            return {"loss": 0.0}

    class Note(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            rank.note(self.epoch, read)
            # Written just now by the other callback, if this is a step of it.
            if state_file.exists():
                rank.save(loader=json.loads(state_file.read_text()))
                state_file.unlink()
            rank.after_step()

    state_file = rank.own / f"keras-{rank.index}.json"
    with rows.make_tf_dataset(batch_size=rank.attempt.batch_size, **rank.case.options) as dataset:
        epoch = 0
        if rank.saved:
            dataset.load_state_dict(rank.saved["loader"])
            epoch = rank.saved["loader"]["epoch"]
            if not dataset.remaining:
                epoch += 1
                dataset.set_epoch(epoch)
        if epoch < NUM_EPOCHS:
            saving = DatasetStateCallback(dataset, state_file, save_freq=rank.case.save_every)
            model = Model()
            model.compile(run_eagerly=True)
            model.fit(
                dataset, shuffle=False, epochs=NUM_EPOCHS, initial_epoch=epoch, callbacks=[saving, Note()], verbose=0
            )


TRAINERS: dict[str, Callable[[Rank, Any], None]] = {
    "a loop": train_with_torch, "Lightning": train_with_lightning, "Keras": train_with_keras,
}  # fmt: skip


def train(folder: str, url: str, number: int, case: Case) -> None:
    """A rank of one attempt: read both epochs, or what the state has left of them, and note each row."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS))
    rank = Rank(folder, number, case)
    with VIEWS[case.view](Path(folder), url) as rows:
        TRAINERS[case.trainer](rank, rows)
    if distributed.is_initialized():
        distributed.destroy_process_group()
    (rank.own / f"{rank.index}.done").touch()


def be_rank(environment: dict[str, str], folder: str, url: str, number: int, case: Case) -> None:
    """A rank, whose output is beside its notes. If it fails, and not because another one died, it says so."""
    os.environ |= environment
    own = Path(folder, f"case-{case.seed}", str(number), os.environ["RANK"])
    with open(own.with_suffix(".log"), "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        train(folder, url, number, case)
    except BaseException as error:
        # So torch tells of a rank that is gone, by gloo or by the store in which ranks meet.
        if type(error) is not RuntimeError and not type(error).__name__.startswith("Dist"):
            own.with_suffix(".error").write_text(traceback.format_exc())
        raise


# Launching ---------------------------------------------------------------------------------------


class Forkserver:
    """Starts ranks in a tenth of a second: what they import is in memory already."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "lightning", "tests.faults.elastic_cases"])

    @contextmanager
    def start(self, folder: Path, url: str, number: int, case: Case) -> Iterator[Callable[[], bool]]:
        """Ranks for the time of the block; a function says whether all have ended."""
        from tests.servers.process import free_port

        count, port = case.attempts[number].ranks, free_port()
        environments = [
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            for rank in range(count)
        ]
        ranks = [
            self._context.Process(target=be_rank, args=(environment, str(folder), url, number, case))
            for environment in environments
        ]
        try:
            for rank in ranks:
                rank.start()
            yield lambda: not any(rank.is_alive() for rank in ranks)
        finally:
            for rank in ranks:
                if rank.pid is not None:
                    rank.kill()
                    rank.join()


@contextmanager
def start_torchrun(folder: Path, url: str, number: int, case: Case) -> Iterator[Callable[[], bool]]:
    """The same, started by torchrun."""
    from tests.compat.launchers import environment_of_ranks, start
    from tests.repository import REPOSITORY

    program = ["-m", "tests.faults.elastic", "--rank", json.dumps([str(folder), url, number, case.seed])]
    count = str(case.attempts[number].ranks)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count, *program]
    with start(command, REPOSITORY, environment_of_ranks(folder)) as agent:
        yield lambda: agent.poll() is not None


# One case ----------------------------------------------------------------------------------------


def run_case(case: Case, folder: Path, url: str, forkserver: Forkserver) -> Counter[str]:
    """Run a case and check it; what was done, in numbers."""
    done = Counter[str](cases=1)
    own = folder / f"case-{case.seed}"
    starts: list[Any] = []
    for number, attempt in enumerate(case.attempts):
        notes, state = own / str(number), own / "state.json"
        notes.mkdir(parents=True)
        starts.append(json.loads(state.read_text()) if state.exists() else None)
        done["resumes"] += starts[number] is not None
        launcher = start_torchrun if case.launcher == TORCHRUN else forkserver.start
        with launcher(folder, url, number, case) as have_ended:
            kill_one(notes, attempt, have_ended)
            try:
                wait_until(have_ended, seconds=TIMEOUT_SECONDS if attempt.killed_rank is None else ENDING_SECONDS)
            except AssertionError:
                # As a launcher does, the block ends those that still wait for the one that is gone.
                if attempt.killed_rank is None:
                    raise
        errors = [path.read_text() for path in sorted(notes.glob("*.error"))]
        assert not errors, f"attempt {number}: {errors[0]}"
        if len(list(notes.glob("*.done"))) == attempt.ranks:
            break
        assert attempt.killed_rank is not None, f"not all of the last {attempt.ranks} ranks have ended well"
        done["kills"] += 1
    done["rows"] += check(case, own, starts, expected_rows(case, folder, url))
    return done


def kill_one(notes: Path, attempt: Attempt, have_ended: Callable[[], bool]) -> None:
    """Kill the rank that is to be killed, unless it has ended before."""
    if attempt.killed_rank is None:
        return
    killed = notes / str(attempt.killed_rank)

    def is_ready() -> bool:
        pids = [notes / f"{rank}.pid" for rank in range(attempt.ranks)]
        return have_ended() or all(path.exists() and path.read_text() for path in pids)

    wait_until(is_ready, seconds=TIMEOUT_SECONDS)
    until = time.monotonic() + attempt.kill_after_seconds
    while time.monotonic() < until and not have_ended():
        time.sleep(0.001)
    if not killed.with_suffix(".done").exists() and killed.with_suffix(".pid").exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(killed.with_suffix(".pid").read_text()), signal.SIGKILL)


def expected_rows(case: Case, folder: Path, url: str) -> list[Counter[int]]:
    """How often each element comes in each epoch, as one process reads them without a crash."""
    with (
        VIEWS[case.view](folder, url) as rows,
        rows.make_batch_reader(batch_size=500, cur_shard=0, shard_count=1, **case.options) as reader,
    ):
        return [Counter(number for batch in reader for number in ids_of(batch)) for _ in range(NUM_EPOCHS)]


def check(case: Case, own: Path, starts: Sequence[Any], expected: list[Counter[int]]) -> int:
    """Compare what counts with what is expected; the number of rows."""
    read = [Counter[int]() for _ in range(NUM_EPOCHS)]
    stretches: list[list[tuple[int, int]]] = [[] for _ in range(NUM_EPOCHS)]
    number, until = len(starts) - 1, None
    while True:
        attempt = case.attempts[number]
        rows = Counter[int]()
        for rank in range(attempt.ranks):
            notes = own / str(number) / f"{rank}.jsonl"
            lines = notes.read_text().splitlines() if notes.exists() else []
            for epoch, step, reading, ids in map(json.loads, lines[: None if until is None else until + 1]):
                assert until is None or step <= until
                assert case.uneven == "keep" or reading == attempt.ranks, f"ranks took unequal steps: {reading}"
                read[epoch].update(ids)
                rows[epoch] += len(ids)
        for epoch in range(NUM_EPOCHS):
            stretches[epoch].insert(0, (attempt.ranks, rows[epoch]))
        start = starts[number]
        if start is None:
            break
        number, until = start["attempt"], start["step"]
    for epoch, (found, wanted) in enumerate(zip(read, expected, strict=True)):
        more, missing = found - wanted, wanted - found
        of = f"of the rows of {stretches[epoch]} (ranks, rows that count)"
        assert not more, f"epoch {epoch}: {more.total()} too often, {missing.total()} missing, {of}"
        dropped = count_dropped(wanted.total(), stretches[epoch]) if case.uneven == "drop" else 0
        assert missing.total() == dropped, f"epoch {epoch}: {missing.total()} missing, not {dropped}, {of}"
    return sum(found.total() for found in read)


def count_dropped(num_rows: int, stretches: Sequence[tuple[int, int]]) -> int:
    """How many rows cannot be shared out: of all by the first ranks, of what is left by those that follow, and so on.

    >>> count_dropped(11, [(2, 4), (2, 2), (3, 3)])
    2
    """
    dropped, ranks_before = 0, 0
    for ranks, rows_read in stretches:
        if not rows_read and num_rows >= ranks:
            continue  # These have read another epoch.
        if ranks != ranks_before:
            dropped += num_rows % ranks
            num_rows -= num_rows % ranks
            ranks_before = ranks
        num_rows -= rows_read
    return dropped
