"""What a Trainer of Hugging Face Transformers reads of a loader, before and after its checkpoints.

`tests/integration/test_transformers.py` runs these in an environment that has Transformers.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from converter import DatasetConverter, StateMismatchError
from converter.frameworks.transformers import train
from tests.columns import ID
from tests.entries import write_converter

NUM_ROWS, BATCH_SIZE, EPOCHS = 1000, 50, 3
STEPS = NUM_ROWS // BATCH_SIZE
SHUFFLED: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True, "seed": 3, "shuffle_window_rows": 150}
CHECKPOINTS = (7, STEPS, STEPS + 8, EPOCHS * STEPS)


class Model(torch.nn.Module):
    """Notes the rows of every call; its weight tells how many steps were made."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.rows: list[int] = []

    def forward(self, id: torch.Tensor) -> dict[str, torch.Tensor]:  # noqa: A002 (a column's name)
        if self.training:
            self.rows += id.tolist()
        return {"loss": self.weight.sum(), "logits": id[:, None] * self.weight}


class Numbers(torch.utils.data.Dataset[dict[str, int]]):
    """Eight rows to evaluate on."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"id": index}


def make_trainer(folder: Path, model: Model, **options: Any) -> Trainer:
    chosen = {"num_train_epochs": EPOCHS, "save_strategy": "no", "lr_scheduler_type": "constant", **options}
    callbacks = chosen.pop("callbacks", None)
    arguments = TrainingArguments(
        str(folder), report_to=[], use_cpu=True, disable_tqdm=True, optim="sgd", learning_rate=1.0, max_grad_norm=0.0,
        label_names=["id"],
        **chosen,
    )  # fmt: skip
    return Trainer(model, arguments, callbacks=callbacks, eval_dataset=Numbers())


@pytest.fixture(scope="module")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    parts = [[range(400)], [range(400, NUM_ROWS)]]
    with write_converter(tmp_path_factory.mktemp("rows"), (ID,), parts, row_group_bytes=2000) as found:
        yield found


@pytest.fixture(scope="module")
def expected(converter: DatasetConverter) -> list[int]:
    """The rows of more epochs than any case reads, as one process reads them."""
    with converter.make_batch_reader(**SHUFFLED) as reader:
        return [row for _ in range(2 * EPOCHS) for batch in reader for row in batch["id"].tolist()]


@pytest.fixture(scope="module")
def folder(converter: DatasetConverter, expected: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a training, each in its folder."""
    found = tmp_path_factory.mktemp("checkpoints")
    model = Model()

    class Save(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save |= state.global_step in CHECKPOINTS

    with converter.make_torch_dataloader(**SHUFFLED) as loader:
        result = train(make_trainer(found, model, callbacks=[Save()]), loader)
    assert model.rows == expected[: EPOCHS * NUM_ROWS]
    assert result.global_step == EPOCHS * STEPS
    assert model.weight.item() == -EPOCHS * STEPS
    speed = result.metrics["train_samples_per_second"] / result.metrics["train_steps_per_second"]
    assert speed == pytest.approx(BATCH_SIZE, rel=0.05)
    return found


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_training_reads_the_epochs_that_its_arguments_say(
    converter: DatasetConverter, expected: list[int], tmp_path: Path, num_workers: int
) -> None:
    model = Model()
    with converter.make_torch_dataloader(num_workers=num_workers, **SHUFFLED) as loader:
        train(make_trainer(tmp_path, model, num_train_epochs=1.5), loader)
    assert model.rows == expected[: 3 * NUM_ROWS // 2]


@pytest.mark.parametrize("step", CHECKPOINTS)
@pytest.mark.parametrize(("batch_size", "accumulated"), [(BATCH_SIZE, 1), (20, 1), (125, 2), (33, 3), (NUM_ROWS, 1)])
def test_a_training_goes_on_with_the_very_next_row(
    converter: DatasetConverter, expected: list[int], folder: Path, tmp_path: Path, step: int, batch_size: int,
    accumulated: int,
) -> None:  # fmt: skip
    model = Model()
    trainer = make_trainer(tmp_path, model, gradient_accumulation_steps=accumulated)
    with converter.make_torch_dataloader(**{**SHUFFLED, "batch_size": batch_size}) as loader:
        result = train(trainer, loader, resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    assert model.rows == expected[step * BATCH_SIZE : EPOCHS * NUM_ROWS]
    assert model.weight.item() == -result.global_step
    assert trainer.state.epoch == EPOCHS


def test_a_training_that_is_resumed_twice_reads_each_row_once(
    converter: DatasetConverter, expected: list[int], folder: Path, tmp_path: Path
) -> None:
    rows, checkpoint = expected[: 7 * BATCH_SIZE], folder / "checkpoint-7"
    for number, (batch_size, max_steps) in enumerate([(20, 60), (130, 65), (40, -1)]):
        model = Model()
        trainer = make_trainer(tmp_path / str(number), model, max_steps=max_steps, save_strategy="steps", save_steps=5)
        with converter.make_torch_dataloader(**{**SHUFFLED, "batch_size": batch_size}) as loader:
            train(trainer, loader, resume_from_checkpoint=str(checkpoint))
        rows += model.rows
        checkpoint = tmp_path / str(number) / f"checkpoint-{max_steps}"
    assert rows == expected[: EPOCHS * NUM_ROWS]


def test_a_second_training_goes_on_with_the_next_epoch(
    converter: DatasetConverter, expected: list[int], tmp_path: Path
) -> None:
    models = [Model(), Model()]
    with converter.make_torch_dataloader(**SHUFFLED) as loader:
        for model, num_epochs in zip(models, (1, 2), strict=True):
            train(make_trainer(tmp_path, model, num_train_epochs=num_epochs), loader)
    assert [model.rows for model in models] == [expected[:NUM_ROWS], expected[NUM_ROWS : 3 * NUM_ROWS]]


def test_true_takes_the_newest_checkpoint(converter: DatasetConverter, expected: list[int], tmp_path: Path) -> None:
    first, second = Model(), Model()
    for model, max_steps in ((first, 25), (second, 30)):
        trainer = make_trainer(tmp_path, model, max_steps=max_steps, save_strategy="steps", save_steps=10)
        with converter.make_torch_dataloader(**SHUFFLED) as loader:
            train(trainer, loader, resume_from_checkpoint=model is second)
    assert first.rows + second.rows == expected[: 30 * BATCH_SIZE]


def test_what_is_to_happen_after_an_epoch_happens_after_the_loaders(
    converter: DatasetConverter, tmp_path: Path
) -> None:
    every: dict[str, Any] = dict.fromkeys(("logging_strategy", "eval_strategy", "save_strategy"), "epoch")
    trainer = make_trainer(tmp_path, Model(), **every)
    with converter.make_torch_dataloader(**SHUFFLED) as loader:
        train(trainer, loader)
    history = trainer.state.log_history
    for name in ("loss", "eval_loss"):
        assert [(one["step"], one["epoch"]) for one in history if name in one] == [
            (STEPS * epoch, epoch) for epoch in range(1, EPOCHS + 1)
        ]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        f"checkpoint-{STEPS * epoch}" for epoch in range(1, EPOCHS + 1)
    ]


def test_a_training_that_stops_early_goes_on_from_there(
    converter: DatasetConverter, expected: list[int], tmp_path: Path
) -> None:
    first, second = Model(), Model()
    early: dict[str, Any] = {
        "eval_strategy": "steps", "eval_steps": 6, "save_strategy": "steps", "save_steps": 6,
        "metric_for_best_model": "eval_loss", "greater_is_better": True, "load_best_model_at_end": True,
    }  # fmt: skip
    trainer = make_trainer(tmp_path, first, callbacks=[EarlyStoppingCallback(2)], **early)
    with converter.make_torch_dataloader(**SHUFFLED) as loader:
        train(trainer, loader)
        stopped = trainer.state.global_step
        train(make_trainer(tmp_path, second), loader, resume_from_checkpoint=True)
    assert stopped == 18
    assert first.rows + second.rows == expected[: EPOCHS * NUM_ROWS]


def test_afterwards_a_trainer_is_as_before(converter: DatasetConverter, folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Model())
    before, callbacks = trainer.args.to_dict(), list(trainer.callback_handler.callbacks)

    class Fail(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise ArithmeticError("no")

    with converter.make_torch_dataloader(**SHUFFLED) as loader:
        train(trainer, loader, resume_from_checkpoint=str(folder / "checkpoint-7"))
        trainer.add_callback(fail := Fail())
        with pytest.raises(ArithmeticError, match="no"):
            train(trainer, loader)
        trainer.remove_callback(fail)
    assert trainer.args.to_dict() == before
    assert trainer.callback_handler.callbacks == callbacks
    assert "get_train_dataloader" not in vars(trainer)
    assert trainer._train_batch_size == 8


@pytest.mark.parametrize(
    ("options", "of_loader", "checkpoint", "message"),
    [
        ({}, {"num_epochs": 2}, None, "it has num_epochs=2, but the Trainer's num_train_epochs says"),
        ({"auto_find_batch_size": True}, {}, None, "auto_find_batch_size=True"),
        ({}, {"batch_size": 2000, "drop_last": True}, None, "The loader has no batch"),
        ({}, {}, True, "there is no checkpoint in"),
        ({}, {}, "nowhere", r"nowhere/trainer_state.json is missing"),
        ({}, {"seed": 4}, "checkpoint-7", "seed was 3 and is 4"),
        ({}, {}, "plain", "has no position of a loader"),
        ({}, {}, "damaged", "is damaged"),
        ({}, {}, "strange", "has no position of a loader"),
    ],
    ids=["epochs", "batch size", "empty", "no newest", "no folder", "other order", "plain", "damaged", "strange"],
)
def test_what_cannot_be_trained_is_refused_by_name(
    converter: DatasetConverter, folder: Path, tmp_path: Path, options: dict[str, Any], of_loader: dict[str, Any],
    checkpoint: str | bool | None, message: str,
) -> None:  # fmt: skip
    contents = {
        "plain": json.dumps({"global_step": 3, "stateful_callbacks": {}}),
        "damaged": '{"global_step": 3, "stateful',
        "strange": json.dumps(
            {"global_step": 3, "stateful_callbacks": {"converter": {"loader": 1, "epochs_done": -1}}}
        ),
    }
    if checkpoint in contents:
        (folder / str(checkpoint)).mkdir()
        (folder / str(checkpoint) / "trainer_state.json").write_text(contents[str(checkpoint)])
    where = str(folder / checkpoint) if isinstance(checkpoint, str) else checkpoint
    trainer = make_trainer(tmp_path / "empty", model := Model(), **options)
    with (
        converter.make_torch_dataloader(**{**SHUFFLED, **of_loader}) as loader,
        pytest.raises((ValueError, StateMismatchError), match=message),
    ):
        train(trainer, loader, resume_from_checkpoint=where)
    assert model.rows == []


def test_what_is_no_trainer_or_no_loader_is_refused(converter: DatasetConverter, tmp_path: Path) -> None:
    with converter.make_torch_dataloader(**SHUFFLED) as loader, converter.make_batch_reader(**SHUFFLED) as reader:
        with pytest.raises(TypeError, match=r"expected a transformers.Trainer, got Model"):
            train(Model(), loader)
        with pytest.raises(TypeError, match=r"expected what make_torch_dataloader returns, got BatchReader"):
            train(make_trainer(tmp_path, Model()), reader)  # type: ignore[arg-type]


def test_rows_of_an_epoch_are_all_of_them(expected: list[int]) -> None:
    """The oracle itself: each epoch is another order of all rows."""
    epochs = [expected[start : start + NUM_ROWS] for start in range(0, len(expected), NUM_ROWS)]
    assert all(sorted(epoch) == list(range(NUM_ROWS)) for epoch in epochs)
    assert all(one != other for one, other in itertools.pairwise(epochs))
