"""Lightning, Accelerate and torch's own loops drive the loader: every row comes once, or an error names the remedy.

What several processes do together is run in real ones, which talk over gloo. Each tells the rows that it was given.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import pickle
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import accelerate
import lightning
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as distributed_checkpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from converter import ConverterError, DatasetConverter, make_parquet_converter, open_converter
from converter.loading import agreement
from tests.columns import ID, Column, assert_batch
from tests.entries import write_converter
from tests.processes import error_of, finish, run_python, start_python
from tests.repository import REPOSITORY

COLUMNS = (ID, Column(name="text", dtype="str"), Column(name="vector", dtype="float32", shape=(3,)))
NUM_ROWS = 1000
BATCH_SIZE = 50
STEPS = NUM_ROWS // BATCH_SIZE
WINDOW = 150
SHUFFLED: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True, "seed": 3, "shuffle_window_rows": WINDOW}
REMEDY = "make it with device=accelerator.device, cur_shard=accelerator.process_index"

# What Lightning warns of by itself, whatever the loader does.
pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:The '.*' does not have many workers"),
    pytest.mark.filterwarnings("ignore:`weights_only` was not set, defaulting to"),
    pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX` has been removed"),
]


@pytest.fixture(scope="module")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    """Two files of several row groups."""
    directory = tmp_path_factory.mktemp("frameworks")
    with write_converter(directory, COLUMNS, [[range(400)], [range(400, NUM_ROWS)]], row_group_bytes=2000) as found:
        assert found._manifest.num_row_groups > 8
        yield found


def ids_of(batches: Any) -> list[int]:
    return [row for batch in batches for row in batch["id"].tolist()]


def epochs_of(converter: DatasetConverter, count: int) -> list[list[int]]:
    """The rows of the first epochs, in order, as one process reads them."""
    with converter.make_batch_reader(**SHUFFLED) as reader:
        return [ids_of(reader) for _ in range(count)]


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def run_ranks(function: Any, *arguments: Any, environment: bool, count: int = 2, seconds: float = 120) -> list[Any]:
    """What each of some processes returns; `environment` names rank and address as launchers do."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(count):
            known = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            known |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
            known |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
            processes.append(
                stack.enter_context(start_python(function, rank, *arguments, environment=known if environment else {}))
            )
        return [finish(process, seconds=seconds) for process in processes]


def assert_parted(parts: Sequence[Sequence[int]]) -> None:
    """Every row is in exactly one of two equal parts."""
    assert sorted(itertools.chain(*parts)) == list(range(NUM_ROWS))
    assert [len(part) for part in parts] == [NUM_ROWS // 2] * 2


# Lightning, one process ----------------------------------------------------------------------


class Model(lightning.LightningModule):
    """Notes the rows of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.seen: list[tuple[int, list[int]]] = []

    def training_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
        assert_batch({name: batch[name] for name in batch}, COLUMNS, batch["id"].tolist())
        self.seen.append((self.current_epoch, batch["id"].tolist()))
        return self.layer(batch["vector"]).mean()

    def predict_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
        return batch["id"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)

    @property
    def epochs(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for epoch, ids in self.seen:
            found.setdefault(epoch, []).extend(ids)
        return found

    @property
    def ids(self) -> list[int]:
        return [row for _, ids in self.seen for row in ids]


class ValidatedModel(Model):
    """Notes the rows of every validation, too; those of the sanity check apart."""

    def __init__(self) -> None:
        super().__init__()
        self.checked: list[int] = []
        self.validated: dict[int, list[int]] = {}

    def validation_step(self, batch: dict[str, Any], index: int) -> None:
        ids = batch["id"].tolist()
        if self.trainer.sanity_checking:
            self.checked += ids
        else:
            self.validated.setdefault(self.current_epoch, []).extend(ids)


class SaveAt(lightning.Callback):
    """A checkpoint after so many steps, in the middle of whatever goes on."""

    def __init__(self, step: int, path: str | Path) -> None:
        self.step = step
        self.path = str(path)

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class SaveAtEnd(SaveAt):
    """A checkpoint at the end of an epoch, where Lightning's own callback makes it."""

    def on_train_batch_end(self, *_: Any) -> None:
        """Not here."""

    def on_train_epoch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def make_trainer(directory: str | Path, *callbacks: lightning.Callback, **options: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(directory),
        **{"devices": 1, **options},
    )


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_lightning_reads_every_row_in_every_epoch_in_another_order(
    converter: DatasetConverter, tmp_path: Path, options: dict[str, Any]
) -> None:
    model = Model()
    with converter.make_torch_dataloader(**SHUFFLED, **options) as loader:
        make_trainer(tmp_path, max_epochs=3).fit(model, loader)
    expected = epochs_of(converter, 3)
    assert model.epochs == dict(enumerate(expected))
    assert sorted(expected[0]) == sorted(expected[1]) == list(range(NUM_ROWS))
    assert expected[0] != expected[1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_lightning_tells_the_epoch_where_it_leaves_each_one_early(
    converter: DatasetConverter, tmp_path: Path, num_workers: int
) -> None:
    model = Model()
    with converter.make_torch_dataloader(num_workers=num_workers, **SHUFFLED) as loader:
        make_trainer(tmp_path, max_epochs=3, limit_train_batches=3).fit(model, loader)
    expected = epochs_of(converter, 3)
    assert model.epochs == {epoch: rows[: 3 * BATCH_SIZE] for epoch, rows in enumerate(expected)}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sanity_check_takes_no_row_from_the_validation(
    converter: DatasetConverter, tmp_path: Path, num_workers: int
) -> None:
    model = ValidatedModel()
    with (
        converter.make_torch_dataloader(**SHUFFLED) as loader,
        converter.make_torch_dataloader(batch_size=30, num_workers=num_workers) as validation,
    ):
        make_trainer(tmp_path, max_epochs=2, num_sanity_val_steps=2).fit(model, loader, validation)
    assert model.checked == list(range(60))
    assert model.validated == {0: list(range(NUM_ROWS)), 1: list(range(NUM_ROWS))}
    assert model.epochs == dict(enumerate(epochs_of(converter, 2)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_that_validates_too_goes_on_with_the_trainings_next_row(
    converter: DatasetConverter, tmp_path: Path, num_workers: int
) -> None:
    """Lightning tells it the epoch again before each validation, in the midst of the training's own."""
    expected = list(itertools.chain(*epochs_of(converter, 2)))
    path, begin = None, 0
    for step in (8, 17, STEPS + 7):
        model, saved = ValidatedModel(), tmp_path / f"{step}.ckpt"
        with converter.make_torch_dataloader(num_workers=num_workers, **SHUFFLED) as loader:
            trainer = make_trainer(tmp_path, SaveAt(step, saved), max_steps=step + 1, val_check_interval=3)
            trainer.fit(model, loader, loader, ckpt_path=path)
        assert model.ids == expected[begin * BATCH_SIZE : (step + 1) * BATCH_SIZE]
        assert model.validated
        path, begin = saved, step


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("step", [1, 7, STEPS - 1, STEPS + 1, STEPS + 9])
def test_lightning_goes_on_with_the_very_next_row(
    converter: DatasetConverter, tmp_path: Path, step: int, num_workers: int
) -> None:
    path = tmp_path / "middle.ckpt"
    before, after = Model(), Model()
    with converter.make_torch_dataloader(num_workers=num_workers, **SHUFFLED) as loader:
        make_trainer(tmp_path, SaveAt(step, path), max_epochs=2).fit(before, loader)
    with converter.make_torch_dataloader(num_workers=num_workers, **SHUFFLED) as loader:
        make_trainer(tmp_path, max_epochs=3).fit(after, loader, ckpt_path=path)
    expected = list(itertools.chain(*epochs_of(converter, 3)))
    assert before.ids == expected[: 2 * NUM_ROWS]
    assert after.ids == expected[step * BATCH_SIZE :]
    assert set(after.epochs) == set(range(step // STEPS, 3))


def expected_after(converter: DatasetConverter, rows_done: int, count: int) -> dict[int, list[int]]:
    """The rows of each epoch that are left after so many, as one process reads them."""
    rows = itertools.chain(*epochs_of(converter, count))
    left = list(itertools.islice(rows, rows_done, None))
    head = -rows_done % NUM_ROWS
    parts = [left[:head]] + [left[start : start + NUM_ROWS] for start in range(head, len(left), NUM_ROWS)]
    return {rows_done // NUM_ROWS - (not head) + number: part for number, part in enumerate(parts) if part}


@pytest.mark.parametrize(("batch_size", "num_workers"), [(20, 0), (125, 1), (1000, 0)])
@pytest.mark.parametrize("step", [1, 5, STEPS - 1, STEPS, STEPS + 10])
def test_lightning_goes_on_with_the_very_next_row_in_batches_of_another_size(
    converter: DatasetConverter, tmp_path: Path, step: int, batch_size: int, num_workers: int
) -> None:
    """Lightning's own count of the epoch's batches would end it early or late."""
    path = tmp_path / "middle.ckpt"
    after, ends = ValidatedModel(), []
    with converter.make_torch_dataloader(**SHUFFLED) as loader:
        make_trainer(tmp_path, SaveAt(step, path), max_epochs=2).fit(Model(), loader)
    with (
        converter.make_torch_dataloader(num_workers=num_workers, **{**SHUFFLED, "batch_size": batch_size}) as loader,
        converter.make_torch_dataloader(batch_size=NUM_ROWS) as validation,
    ):
        note_end = lightning.pytorch.callbacks.LambdaCallback(
            on_train_epoch_end=lambda trainer, _: ends.append(trainer.current_epoch)
        )
        trainer = make_trainer(tmp_path, note_end, max_epochs=3, num_sanity_val_steps=0)
        trainer.fit(after, loader, validation, ckpt_path=path)
    expected = expected_after(converter, step * BATCH_SIZE, 3)
    assert after.epochs == expected
    # Each epoch ends once, with one validation after its last batch.
    assert ends == list(expected)
    assert after.validated == {epoch: list(range(NUM_ROWS)) for epoch in expected}


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("save", [SaveAt, SaveAtEnd])
@pytest.mark.parametrize(
    "steps", [(STEPS, STEPS + 3), (STEPS, 2 * STEPS, 2 * STEPS + 1), (7, STEPS, STEPS + 1)], ids=str
)
def test_lightning_goes_on_with_the_very_next_row_as_often_as_it_is_resumed(
    converter: DatasetConverter, tmp_path: Path, steps: tuple[int, ...], save: type[SaveAt], validates: bool
) -> None:
    """After an epoch's last batch it does not count the next epoch as begun, so a checkpoint of it looks like its end.

    First seen in `python -m tests.faults.elastic --seeds 6:7`.
    """
    checkpoint, begun = None, []
    note_begin = lightning.pytorch.callbacks.LambdaCallback(
        on_train_epoch_start=lambda trainer, _: begun.append(trainer.current_epoch)
    )
    kind = ValidatedModel if validates else Model

    def fit(model: Model, callback: lightning.Callback) -> None:
        with (
            converter.make_torch_dataloader(**SHUFFLED) as loader,
            converter.make_torch_dataloader(batch_size=NUM_ROWS) as validation,
        ):
            trainer = make_trainer(tmp_path, callback, max_epochs=4, num_sanity_val_steps=0)
            trainer.fit(model, loader, validation if validates else None, ckpt_path=checkpoint)

    for step in steps:
        path = tmp_path / f"{step}.ckpt"
        fit(kind(), save(step, path) if step % STEPS == 0 else SaveAt(step, path))
        checkpoint = path
    after = kind()
    fit(after, note_begin)
    assert after.epochs == expected_after(converter, steps[-1] * BATCH_SIZE, 4)
    assert begun == list(range(steps[-1] // STEPS + 1, 4))


@pytest.mark.parametrize("fraction", [0.5, 0.8])
def test_a_part_of_each_epoch_is_that_part_after_a_resume_in_batches_of_another_size(
    converter: DatasetConverter, tmp_path: Path, fraction: float
) -> None:
    path = tmp_path / "middle.ckpt"
    after = Model()
    with converter.make_torch_dataloader(**SHUFFLED) as loader:
        trainer = make_trainer(tmp_path, SaveAt(4, path), max_epochs=1, limit_train_batches=fraction)
        trainer.fit(Model(), loader)
    with converter.make_torch_dataloader(**{**SHUFFLED, "batch_size": 20}) as loader:
        make_trainer(tmp_path, max_epochs=2, limit_train_batches=fraction).fit(after, loader, ckpt_path=path)
    read, first = int(NUM_ROWS * fraction), 4 * BATCH_SIZE
    expected = epochs_of(converter, 2)
    assert after.epochs == {0: expected[0][first:read], 1: expected[1][:read]}


@pytest.mark.parametrize("max_steps", [30, 60])
def test_a_training_of_so_many_steps_ends_after_them_in_batches_of_another_size(
    converter: DatasetConverter, tmp_path: Path, max_steps: int
) -> None:
    path = tmp_path / "middle.ckpt"
    after = Model()
    with converter.make_torch_dataloader(**SHUFFLED) as loader:
        make_trainer(tmp_path, SaveAt(10, path), max_steps=15).fit(Model(), loader)
    with converter.make_torch_dataloader(**{**SHUFFLED, "batch_size": 25}) as loader:
        make_trainer(tmp_path, max_steps=max_steps).fit(after, loader, ckpt_path=path)
    rows = list(itertools.chain(*epochs_of(converter, 3)))
    assert after.ids == rows[500 : 500 + (max_steps - 10) * 25]


@pytest.mark.parametrize("num_epochs", [2, None])
def test_lightning_refuses_a_loader_that_counts_epochs_too(
    converter: DatasetConverter, tmp_path: Path, num_epochs: int | None
) -> None:
    with (
        converter.make_torch_dataloader(num_epochs=num_epochs, **SHUFFLED) as loader,
        pytest.raises(ConverterError, match=f"num_epochs={num_epochs}, but Lightning counts epochs by itself"),
    ):
        make_trainer(tmp_path, max_steps=5).fit(Model(), loader)


@pytest.mark.parametrize("step", [8, 10, 14, 19, 20, 27])
@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size", "min_size"])
def test_two_loaders_at_once_go_on_each_with_its_next_row(
    converter: DatasetConverter, tmp_path: Path, mode: Any, step: int
) -> None:
    """The shorter one ends after ten steps. In a cycle it begins anew, so it may be in an epoch that the training is
    not; else it gives None until the longer one ends, or ends the epoch."""
    path = tmp_path / "middle.ckpt"

    class Pair(Model):
        def training_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
            self.seen.append((index, {name: part and part["id"].tolist() for name, part in batch.items()}))
            return self.layer(batch["long"]["vector"]).mean()

    def fit(model: Model, *callbacks: lightning.Callback, **options: Any) -> None:
        with (
            converter.where([("id", "<", 500)]).make_torch_dataloader(**SHUFFLED) as short,
            converter.make_torch_dataloader(**SHUFFLED) as long,
        ):
            both = CombinedLoader({"short": short, "long": long}, mode)
            make_trainer(tmp_path, *callbacks, max_epochs=3).fit(model, both, **options)

    whole, after = Pair(), Pair()
    fit(whole, SaveAt(step, path))
    fit(after, ckpt_path=path)
    assert after.seen == whole.seen[step:]
    if step == 20:
        fit(Pair(), SaveAtEnd(step, path))
        at_end = Pair()
        fit(at_end, ckpt_path=path)
        assert at_end.seen == whole.seen[step:]


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start"])
def test_lightning_goes_on_with_the_very_next_row_though_the_model_names_the_epoch_too(
    converter: DatasetConverter, tmp_path: Path, hook: str
) -> None:
    path, step = tmp_path / "middle.ckpt", STEPS + 9

    class Naming(Model):
        def name_epoch(self, *_: Any) -> None:
            self.trainer.train_dataloader.sampler.set_epoch(self.current_epoch)

    setattr(Naming, hook, Naming.name_epoch)
    before, after = Naming(), Naming()
    with converter.make_torch_dataloader(**SHUFFLED) as loader:
        make_trainer(tmp_path, SaveAt(step, path), max_epochs=2).fit(before, loader)
    with converter.make_torch_dataloader(**SHUFFLED) as loader:
        make_trainer(tmp_path, max_epochs=3).fit(after, loader, ckpt_path=path)
    assert after.ids == list(itertools.chain(*epochs_of(converter, 3)))[step * BATCH_SIZE :]


def test_a_second_fit_without_a_checkpoint_counts_from_the_start(converter: DatasetConverter, tmp_path: Path) -> None:
    first, second = Model(), Model()
    with converter.make_torch_dataloader(**SHUFFLED) as loader:
        make_trainer(tmp_path, max_epochs=1).fit(first, loader)
        make_trainer(tmp_path, max_epochs=2).fit(second, loader)
    expected = epochs_of(converter, 2)
    assert first.epochs == {0: expected[0]}
    assert second.epochs == dict(enumerate(expected))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_checkpoint_of_an_epochs_end_goes_on_with_the_next_epoch(
    converter: DatasetConverter, tmp_path: Path, num_workers: int
) -> None:
    """Lightning makes the iterator of a resumed run before it tells the epoch."""
    path = tmp_path / "end.ckpt"
    model = Model()
    with converter.make_torch_dataloader(num_workers=num_workers, **SHUFFLED) as loader:
        make_trainer(tmp_path, SaveAtEnd(STEPS, path), max_epochs=1).fit(Model(), loader)
    with converter.make_torch_dataloader(num_workers=num_workers, **SHUFFLED) as loader:
        make_trainer(tmp_path, max_epochs=3).fit(model, loader, ckpt_path=path)
    expected = epochs_of(converter, 3)
    assert model.epochs == {1: expected[1], 2: expected[2]}


def test_a_resumed_run_of_other_rows_is_refused(converter: DatasetConverter, tmp_path: Path) -> None:
    path = tmp_path / "middle.ckpt"
    with converter.make_torch_dataloader(**SHUFFLED) as loader:
        make_trainer(tmp_path, SaveAt(3, path), max_epochs=1).fit(Model(), loader)
    with (
        converter.make_torch_dataloader(**{**SHUFFLED, "seed": 4}) as loader,
        pytest.raises(ConverterError, match="The state is of another run: seed was 3 and is 4"),
    ):
        make_trainer(tmp_path, max_epochs=1).fit(Model(), loader, ckpt_path=path)


def test_lightning_predicts_every_row_or_names_the_remedy(converter: DatasetConverter, tmp_path: Path) -> None:
    with converter.make_torch_dataloader(batch_size=BATCH_SIZE) as loader:
        try:
            found: Any = make_trainer(tmp_path).predict(Model(), loader)
        except ConverterError as error:
            assert "make_batch_reader" in str(error) or "predict" in str(error)  # noqa: PT017
            return
    assert torch.cat(found).tolist() == list(range(NUM_ROWS))


def test_the_fabric_reads_every_row(converter: DatasetConverter) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    with converter.make_torch_dataloader(**SHUFFLED) as loader:
        wrapped = fabric.setup_dataloaders(loader)
        assert len(wrapped) == STEPS
        found = [ids_of(wrapped) for _ in range(2)]
    assert found == epochs_of(converter, 2)


# Lightning, two processes --------------------------------------------------------------------


class RankedModel(Model):
    """Makes its loader where Lightning asks for it, unless one is given; tells what its rank saw."""

    def __init__(self, url: str, path: str, *, num_workers: int = 0) -> None:
        super().__init__()
        self.url = url
        self.path = path
        self.num_workers = num_workers

    def train_dataloader(self) -> Any:
        return open_converter(self.url).make_torch_dataloader(num_workers=self.num_workers, **SHUFFLED)

    def on_train_end(self) -> None:
        told = {"ids": self.ids, "epochs": sorted(self.epochs), "error": ["", ""]}
        Path(f"{self.path}-{self.global_rank}.json").write_text(json.dumps(told))


def told_error_of(call: Any) -> list[str]:
    """As `error_of`, of our own error where Lightning's way out raises another one on top of it."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 (whatever it is, the test says what it must be)
        shown: BaseException | None = error
        while shown is not None and not isinstance(shown, ConverterError):
            shown = shown.__cause__ or shown.__context__
        return [type(shown or error).__name__, str(shown or error)]
    return ["", ""]


def told_by(path: str) -> list[dict[str, Any]]:
    return [json.loads(Path(f"{path}-{rank}.json").read_bytes()) for rank in range(2)]


def fit_in_ddp(url: str, directory: str) -> None:
    """The main program of Lightning's own launcher, which starts it a second time as rank 1."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))

    checkpoint = f"{directory}/middle.ckpt"

    def fit(name: str, *callbacks: lightning.Callback, num_workers: int = 0, max_epochs: int = 1) -> None:
        model = RankedModel(url, f"{directory}/{name}", num_workers=num_workers)
        trainer = make_trainer(directory, *callbacks, strategy="ddp", devices=2, max_epochs=max_epochs)
        trainer.fit(model, ckpt_path=checkpoint if name == "resumed" else None)

    early = open_converter(url).make_torch_dataloader(**SHUFFLED)
    model = RankedModel(url, f"{directory}/early")
    error = told_error_of(lambda: make_trainer(directory, strategy="ddp", devices=2, max_epochs=1).fit(model, early))
    if error[0]:
        Path(f"{directory}/early-{rank}.json").write_text(json.dumps({"ids": model.ids, "error": error}))
    fit("asked")
    fit("asked-workers", num_workers=2)
    fit("saved", SaveAt(4, checkpoint))
    fit("resumed", max_epochs=2)


@pytest.fixture(scope="module")
def ddp(converter: DatasetConverter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ddp")
    script = directory / "train.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from tests.integration.test_frameworks import fit_in_ddp\n"
        f"fit_in_ddp({converter.url!r}, {str(directory)!r})\n"
    )
    environment = {name: value for name, value in os.environ.items() if "RANK" not in name and name != "WORLD_SIZE"}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=directory,
        env=environment | {"MASTER_PORT": free_port()},
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return directory


@pytest.mark.parametrize("name", ["asked", "asked-workers", "early"])
def test_two_ranks_of_lightning_read_every_row_once(ddp: Path, name: str) -> None:
    assert_parted([one["ids"] for one in told_by(f"{ddp}/{name}")])


def test_two_ranks_of_lightning_go_on_with_the_very_next_rows(ddp: Path) -> None:
    saved, resumed = told_by(f"{ddp}/saved"), told_by(f"{ddp}/resumed")
    done = 4 * BATCH_SIZE
    assert_parted([one["ids"] for one in saved])
    for before, after in zip(saved, resumed, strict=True):
        assert after["ids"][: len(before["ids"]) - done] == before["ids"][done:]
    assert_parted([one["ids"][NUM_ROWS // 2 - done :] for one in resumed])
    assert [one["epochs"] for one in resumed] == [[0, 1]] * 2


def fit_in_spawned(url: str, directory: str) -> dict[str, list[str]]:
    """Errors of a run whose ranks make their loaders, and of one that is given a loader."""
    errors = {}
    for name in ("asked", "given"):
        model = RankedModel(url, f"{directory}/{name}")
        loader = open_converter(url).make_torch_dataloader(**SHUFFLED) if name == "given" else None
        trainer = make_trainer(directory, strategy="ddp_spawn", devices=2, max_epochs=1)
        errors[name] = error_of(lambda model=model, loader=loader, trainer=trainer: trainer.fit(model, loader))  # type: ignore[misc]
    return errors


@pytest.fixture(scope="module")
def spawned(converter: DatasetConverter, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    directory = tmp_path_factory.mktemp("spawned")
    return directory, run_python(fit_in_spawned, converter.url, str(directory))


def test_two_spawned_ranks_of_lightning_read_every_row_once(spawned: Any) -> None:
    directory, errors = spawned
    assert errors["asked"] == ["", ""]
    assert_parted([one["ids"] for one in told_by(f"{directory}/asked")])


def test_a_loader_that_is_sent_to_spawned_ranks_is_parted(spawned: Any) -> None:
    directory, errors = spawned
    assert errors["given"] == ["", ""]
    assert_parted([one["ids"] for one in told_by(f"{directory}/given")])


# torch.distributed ---------------------------------------------------------------------------


def read_in_group(rank: int, url: str, path: str) -> dict[str, Any]:
    """A rank that nobody told its shard."""
    assert "RANK" not in os.environ
    early = open_converter(url).make_torch_dataloader(columns=["id"], **SHUFFLED)
    early_numpy = open_converter(url).make_batch_reader(columns=["id"], **SHUFFLED)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    converter = open_converter(url)
    found: dict[str, Any] = {}
    for num_workers in (0, 2):
        with converter.make_torch_dataloader(num_workers=num_workers, **SHUFFLED) as loader:
            batches = list(loader)
            assert len(batches) == len(loader)
            found[f"torch {num_workers}"] = ids_of(batches)
    with converter.make_batch_reader(**SHUFFLED) as reader:
        found["numpy"] = ids_of(reader)
    with pickle.loads(pickle.dumps(converter)).make_torch_dataloader(**SHUFFLED) as loader:
        found["copy"] = ids_of(loader)
    with converter.make_torch_dataloader(cur_shard=0, shard_count=1, **SHUFFLED) as loader:
        found["whole"] = ids_of(loader)
    for name, loader in (("early torch", early), ("early numpy", early_numpy)):
        ids: list[int] = []
        error = error_of(lambda ids=ids, loader=loader: ids.extend(ids_of(loader)))  # type: ignore[misc]
        found[name] = {"ids": ids, "error": error}
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def group(converter: DatasetConverter, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(read_in_group, converter.url, str(tmp_path_factory.mktemp("group") / "store"), environment=False)


@pytest.mark.parametrize("name", ["torch 0", "torch 2", "numpy", "copy"])
def test_ranks_of_torch_distributed_find_their_shards(group: list[Any], name: str) -> None:
    assert_parted([one[name] for one in group])


def test_a_rank_that_asks_for_the_whole_gets_it(group: list[Any], converter: DatasetConverter) -> None:
    assert [one["whole"] for one in group] == epochs_of(converter, 1) * 2


@pytest.mark.parametrize("name", ["early torch", "early numpy"])
def test_what_was_made_before_the_process_group_is_parted(group: list[Any], name: str) -> None:
    assert [one[name]["error"] for one in group] == [["", ""]] * 2
    assert_parted([one[name]["ids"] for one in group])


DISAGREEMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "batch_size": ({"batch_size": 10}, {"batch_size": 20}),
    "seed": ({"seed": 1}, {"seed": 2}),
    "uneven": ({"uneven": "drop"}, {"uneven": "keep"}),
    "shuffle_window_rows": ({"shuffle_window_rows": 100}, {"shuffle_window_rows": 200}),
    "num_epochs": ({"num_epochs": 1}, {"num_epochs": 2}),
}
"""What the two ranks pass."""


def disagree(rank: int, url: str, path: str) -> dict[str, Any]:
    """A rank that reads otherwise than the other one, once in each way."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    converter = open_converter(url)
    found: dict[str, Any] = {}
    for name, options in DISAGREEMENTS.items():
        with converter.make_torch_dataloader(**{**SHUFFLED, **options[rank]}) as loader:
            found[name] = error_of(lambda loader=loader: list(loader))  # type: ignore[misc]
    rows = converter.where([("id", "<", 600 + rank)])
    with rows.make_batch_reader(**SHUFFLED) as reader:
        found["the rows (fingerprint)"] = error_of(lambda: list(reader))
    with converter.make_torch_dataloader(**SHUFFLED) as loader:
        # Both have to be there once, so that one of them may then resume.
        iteration = iter(loader)
        for _ in range(2 + rank):
            next(iteration)
        saved = loader.state_dict()
    with converter.make_torch_dataloader(**SHUFFLED) as loader:
        loader.load_state_dict(saved)
        found["the saved state"] = error_of(lambda: list(loader))
    with converter.make_torch_dataloader(**SHUFFLED) as loader:
        found["agree"] = error_of(lambda: list(loader))
        # Once is enough.
        found["again"] = error_of(lambda: list(loader)) if rank else ["", ""]
    # Nobody waits in an evaluation, nor for a rank that was told its part.
    for own in ({"shuffle": False}, {"cur_shard": 0, "shard_count": 2}):
        if rank:
            with converter.make_torch_dataloader(**{**SHUFFLED, **own}) as loader:
                found[f"alone {len(own)}"] = error_of(lambda loader=loader: list(loader))  # type: ignore[misc]
    torch.distributed.barrier()
    # Nor for ever for one that never comes.
    agreement._WAIT_SECONDS = 2.0
    if rank:
        with converter.make_torch_dataloader(**SHUFFLED) as loader:
            found["never"] = error_of(lambda: list(loader))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return found


def test_ranks_that_disagree_are_told_so_on_each_of_them(
    converter: DatasetConverter, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = str(tmp_path_factory.mktemp("disagree") / "store")
    first, second = run_ranks(disagree, converter.url, path, environment=False)
    for name in (*DISAGREEMENTS, "the rows (fingerprint)", "the saved state"):
        kind, text = first[name]
        assert (kind, second[name]) == ("ConverterError", [kind, text]), name
        assert f"would not read parts of one epoch: {name} is " in text
        assert "on rank 0" in text
        assert "on rank 1" in text
    assert re.search(
        "batch_size is (10 on rank 0 and 20 on rank 1|20 on rank 1 and 10 on rank 0)", first["batch_size"][1]
    )
    for name in ("agree", "again"):
        assert first[name] == second[name] == ["", ""]
    assert [second[name] for name in ("alone 1", "alone 2", "never")] == [["", ""]] * 3


def begin_groups(rank: int, url: str, path: str) -> int:
    """How often a rank waited in vain for the other one, in one process group after the other."""
    agreement._WAIT_SECONDS = 1.0
    waits: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: waits.append(record.getMessage())  # type: ignore[method-assign]
    agreement.logger.addHandler(handler)
    if rank:
        # As if each store had the place in memory of the last one, as it may be on some of the ranks.
        agreement.id = lambda _: 1  # type: ignore[attr-defined]
    converter = open_converter(url)
    for number in range(3):
        torch.distributed.init_process_group("gloo", init_method=f"file://{path}-{number}", rank=rank, world_size=2)
        with converter.make_batch_reader(**SHUFFLED) as reader:
            list(reader)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return len(waits)


def test_ranks_do_not_wait_in_the_next_process_group(
    converter: DatasetConverter, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = str(tmp_path_factory.mktemp("groups") / "store")
    assert run_ranks(begin_groups, converter.url, path, environment=False) == [0, 0]


# Accelerate ----------------------------------------------------------------------------------


def train_with_accelerate(rank: int, url: str, directory: str) -> dict[str, Any]:
    """A rank that follows the remedy, and then does what it warns of."""
    from accelerate.utils import DataLoaderConfiguration

    accelerator = accelerate.Accelerator(cpu=True)
    converter = open_converter(url)

    def make(**options: Any) -> Any:
        return converter.make_torch_dataloader(**SHUFFLED, **options)

    def follow_the_remedy(num_workers: int = 0) -> Any:
        return make(
            device=accelerator.device,
            cur_shard=accelerator.process_index,
            shard_count=accelerator.num_processes,
            num_workers=num_workers,
        )

    model = torch.nn.Linear(3, 1)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    found: dict[str, Any] = {"rank": accelerator.process_index, "ranks": accelerator.num_processes}
    for num_workers in (0, 2):
        ids: list[int] = []
        with follow_the_remedy(num_workers) as loader:
            for batch in loader:
                assert batch["vector"].device.type == accelerator.device.type
                ids += batch["id"].tolist()
                accelerator.backward(prepared(batch["vector"]).mean())
                optimizer.step()
                optimizer.zero_grad()
        found[f"remedy {num_workers}"] = ids
    with follow_the_remedy() as loader:
        accelerator.register_for_checkpointing(loader)
        head = ids_of(itertools.islice(loader, 3))
        accelerator.save_state(directory)
        # Rank 0 alone writes the model.
        accelerator.wait_for_everyone()
        loader.load_state_dict(follow_the_remedy().state_dict())
        accelerator.load_state(directory)
        found["resumed"] = head + ids_of(loader)
        accelerator._custom_objects.clear()
    accelerator.wait_for_everyone()
    for name, options in (
        ("each reads", {"dispatch_batches": False}),
        ("each reads and splits", {"dispatch_batches": False, "split_batches": True}),
        # Last: here rank 0 alone reads, and leaves the other one waiting when it fails.
        ("one reads", {}),
    ):
        accelerator.dataloader_config = DataLoaderConfiguration(**options)  # type: ignore[arg-type]
        ids = []
        with make() as loader:
            error = error_of(lambda ids=ids, loader=loader: ids.extend(ids_of(accelerator.prepare(loader))))  # type: ignore[misc]
        found[name] = {"ids": ids, "error": error}
        if name == "one reads" and rank == 0:
            print(json.dumps(found), flush=True)
            os._exit(0)
    return found


@pytest.fixture(scope="module", params=[1, 2])
def accelerated(
    request: pytest.FixtureRequest, converter: DatasetConverter, tmp_path_factory: pytest.TempPathFactory
) -> list[Any]:
    directory = str(tmp_path_factory.mktemp("accelerate"))
    if request.param == 1:
        return [run_python(train_with_accelerate, 0, converter.url, directory)]
    return run_ranks(train_with_accelerate, converter.url, directory, environment=True)


def test_accelerates_processes_are_who_they_are(accelerated: list[Any]) -> None:
    assert [(one["rank"], one["ranks"]) for one in accelerated] == [
        (rank, len(accelerated)) for rank in range(len(accelerated))
    ]


@pytest.mark.parametrize("name", ["remedy 0", "remedy 2", "resumed"])
def test_the_remedy_for_accelerate_reads_every_row_once(accelerated: list[Any], name: str) -> None:
    assert sorted(itertools.chain(*(one[name] for one in accelerated))) == list(range(NUM_ROWS))
    assert {len(one[name]) for one in accelerated} == {NUM_ROWS // len(accelerated)}
    assert [one[name] for one in accelerated] == [one["remedy 0"] for one in accelerated]


@pytest.mark.parametrize("name", ["each reads", "each reads and splits", "one reads"])
def test_a_loader_that_accelerate_prepares_names_the_remedy(accelerated: list[Any], name: str) -> None:
    # Where one reads for all, the others hear only that it is gone.
    readers = accelerated[:1] if name == "one reads" else accelerated
    for one in readers:
        kind, said = one[name]["error"]
        assert kind == "ConverterError", (kind, said)
        assert REMEDY in said
    for one in accelerated:
        assert one[name]["error"][0]
        assert not one[name]["ids"]


# Protocols and loops that read attributes ----------------------------------------------------


@pytest.mark.parametrize("make", ["make_torch_dataloader", "make_batch_reader"])
def test_a_loader_is_stateful_as_torch_means_it(converter: DatasetConverter, make: str) -> None:
    with getattr(converter, make)() as loader:
        assert isinstance(loader, Stateful)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("steps", [0, 7, STEPS - 1])
def test_torchs_distributed_checkpoint_saves_and_loads_a_loader(
    converter: DatasetConverter, tmp_path: Path, steps: int
) -> None:
    with converter.make_torch_dataloader(**SHUFFLED) as loader:
        iterator = iter(loader)
        head = ids_of(itertools.islice(iterator, steps))
        distributed_checkpoint.save({"loader": loader}, checkpoint_id=tmp_path / "saved", no_dist=True)
    with converter.make_torch_dataloader(**SHUFFLED) as loader:
        distributed_checkpoint.load({"loader": loader}, checkpoint_id=tmp_path / "saved", no_dist=True)
        tail = ids_of(loader)
    assert head + tail == epochs_of(converter, 1)[0]


def read_beside_a_checkpoint(rank: int, url: str, checkpoint: str, steps: int | None) -> list[int]:
    """A rank that saves after so many steps, or loads and reads on to the epoch's end."""
    torch.distributed.init_process_group("gloo")
    # Rows that 1, 2 and 3 ranks can share evenly after any of these steps.
    options = {**SHUFFLED, "batch_size": 20}
    with open_converter(url).where([("id", "<", 960)]).make_torch_dataloader(**options) as loader:
        if steps is None:
            distributed_checkpoint.load({"loader": loader}, checkpoint_id=checkpoint)
            ids = ids_of(loader)
        else:
            ids = ids_of(itertools.islice(iterator := iter(loader), steps))
            distributed_checkpoint.save({"loader": loader}, checkpoint_id=checkpoint)
            del iterator
    torch.distributed.destroy_process_group()
    return ids


def test_torchs_distributed_checkpoint_of_two_ranks_is_continued_by_one_and_by_three(
    converter: DatasetConverter, tmp_path: Path
) -> None:
    def run(count: int, steps: int | None) -> list[list[int]]:
        arguments = (converter.url, str(tmp_path / "saved"), steps)
        return run_ranks(read_beside_a_checkpoint, *arguments, environment=True, count=count, seconds=240)

    before = run(2, 6)
    assert [len(part) for part in before] == [120] * 2
    for count in (1, 3):
        after = run(count, None)
        assert [len(part) for part in after] == [720 // count] * count
        assert sorted(itertools.chain(*before, *after)) == list(range(960))


def test_a_state_survives_json_and_a_careful_torch_load(converter: DatasetConverter, tmp_path: Path) -> None:
    with converter.make_torch_dataloader(**SHUFFLED) as loader:
        next(iter(loader))
        state = loader.state_dict()
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == json.loads(json.dumps(state)) == state


# With processes torch itself waits five seconds and more for a worker that raised.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(("num_workers", "batch_size"), [(0, None), (0, 4), (1, 4)])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_another_loader_around_the_dataset_names_the_remedy(
    converter: DatasetConverter, kind: Any, num_workers: int, batch_size: int | None
) -> None:
    with converter.make_torch_dataloader(**SHUFFLED) as loader:
        around = kind(loader.dataset, batch_size=batch_size, num_workers=num_workers)
        with pytest.raises(ConverterError, match=REMEDY):
            list(around)
        # And what belongs to us goes on as if nothing had been.
        assert ids_of(loader) == epochs_of(converter, 1)[0]
        with pytest.raises(ConverterError, match=REMEDY):
            list(kind(loader.dataset, batch_size=None))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_training_loop_asks_of_a_loader_is_true(
    converter: DatasetConverter, num_workers: int, drop_last: bool
) -> None:
    with converter.make_torch_dataloader(batch_size=300, drop_last=drop_last, num_workers=num_workers) as loader:
        assert isinstance(loader, DataLoader)
        assert loader.batch_size == 300
        assert loader.num_workers == num_workers
        assert loader.pin_memory is False
        assert loader.drop_last is drop_last
        assert loader.batch_sampler is None
        assert loader.persistent_workers is False
        assert loader.timeout == 0
        assert callable(loader.collate_fn)
        assert callable(loader.sampler.set_epoch)
        assert not isinstance(loader.sampler, torch.utils.data.distributed.DistributedSampler)
        assert isinstance(loader.dataset, torch.utils.data.IterableDataset)
        # Without a length of rows, loops count batches.
        with pytest.raises(TypeError, match=r"has no len\(\)"):
            len(loader.dataset)  # type: ignore[arg-type]
        batches = list(loader)
        assert len(batches) == len(loader) == (3 if drop_last else 4)


def test_a_loop_that_sets_the_epoch_at_the_sampler_sets_it(converter: DatasetConverter) -> None:
    expected = epochs_of(converter, 3)
    with converter.make_torch_dataloader(**SHUFFLED) as loader:
        for epoch in (2, 0, 1):
            loader.sampler.set_epoch(epoch)
            assert ids_of(loader) == expected[epoch]


def test_a_look_at_a_batch_leaves_a_loaded_place_where_it_is(converter: DatasetConverter) -> None:
    expected = epochs_of(converter, 4)
    with converter.make_torch_dataloader(**SHUFFLED) as loader, converter.make_torch_dataloader(**SHUFFLED) as other:
        loader.sampler.set_epoch(2)
        head = ids_of(itertools.islice(loader, 6))
        other.load_state_dict(loader.state_dict())
        next(iter(other))
        for epoch in (2, 3):
            other.sampler.set_epoch(epoch)
            assert (head if epoch == 2 else []) + ids_of(other) == expected[epoch]


def look(loader: Any) -> None:
    next(iter(loader))


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([2, 2], id="twice"),
        pytest.param([2, 0], id="by the program, and by Fabric, which counts from 0"),
        pytest.param([0, look, 1], id="by Fabric, for a look at a batch and for the rest"),
        pytest.param([2, look, 2], id="for a look at a batch and for the rest"),
    ],
)
def test_a_loaded_place_is_kept_however_often_an_epoch_is_named(converter: DatasetConverter, names: list[Any]) -> None:
    expected = epochs_of(converter, 4)
    with converter.make_torch_dataloader(**SHUFFLED) as loader, converter.make_torch_dataloader(**SHUFFLED) as other:
        loader.sampler.set_epoch(2)
        head = ids_of(itertools.islice(loader, 6))
        other.load_state_dict(loader.state_dict())
        for each in names:
            if each is look:
                look(other)
            else:
                other.sampler.set_epoch(each)
        assert head + ids_of(other) == expected[2]
        assert ids_of(other) == expected[3]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", ["make_torch_dataloader", "make_batch_reader"])
def test_an_epoch_that_is_set_before_the_first_batch_is_that_of_the_batches_and_of_the_state(
    converter: DatasetConverter, make: str, num_workers: int
) -> None:
    """As torch's samplers have it, and as Lightning does it where a run is resumed."""
    options = SHUFFLED if make == "make_batch_reader" else {**SHUFFLED, "num_workers": num_workers}
    expected = epochs_of(converter, 3)
    with getattr(converter, make)(**options) as loader, getattr(converter, make)(**options) as other:
        iterator = iter(loader)
        loader.set_epoch(2)
        head = ids_of(itertools.islice(iterator, 4))
        other.load_state_dict(loader.state_dict())
        assert head + ids_of(other) in expected
        assert head + ids_of(iterator) == expected[2]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_a_copy_of_a_loader_reads_the_same_epochs_or_is_refused(
    converter: DatasetConverter, options: dict[str, Any]
) -> None:
    with converter.make_torch_dataloader(**SHUFFLED, **options) as loader:
        try:
            copy = pickle.loads(pickle.dumps(loader))
        except ConverterError:
            return
        with copy:
            assert [ids_of(copy) for _ in range(2)] == epochs_of(converter, 2)
        assert [ids_of(loader) for _ in range(2)] == epochs_of(converter, 2)


# Evaluation -----------------------------------------------------------------------------------------------------------


def evaluate_a_part(rank: int, path: str) -> dict[str, Any]:
    """What a rank knows after it has counted its part and the sums were added; the model is right where x < 0.5."""
    torch.distributed.init_process_group("gloo")
    totals, rows = torch.zeros(2, dtype=torch.int64), []
    with (
        make_parquet_converter(path) as converter,
        converter.make_torch_dataloader(batch_size=1024, with_row_index="row") as loader,
    ):
        for batch in loader:
            is_right = (batch["x"] >= 0.5) == batch["y"]
            totals += torch.tensor([is_right.sum(), len(is_right)])
            rows += batch["row"].tolist()
    torch.distributed.all_reduce(totals)
    torch.distributed.destroy_process_group()
    return {"totals": totals.tolist(), "rows": rows}


def test_an_evaluation_counts_every_row_on_all_ranks(tmp_path: Path) -> None:
    x = np.arange(1000) / 1000
    y = np.where(np.arange(1000) < 600, 0, 1)
    pq.write_table(pa.table({"x": x, "y": y}), tmp_path / "test.parquet")
    told = run_ranks(evaluate_a_part, str(tmp_path / "test.parquet"), environment=True)
    assert [rank["totals"] for rank in told] == [[900, 1000]] * 2
    assert sorted(told[0]["rows"] + told[1]["rows"]) == list(range(1000))
