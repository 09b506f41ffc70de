"""The Trainer of Hugging Face Transformers on a loader: its epochs, its checkpoints, and the very next row after them.

A Trainer makes its own DataLoader, which would batch and shard a second time, and after a checkpoint it reads again
what it has read before. `train` hands it the loader's batches as they are, and keeps the loader's position in the
checkpoint, in `trainer_state.json`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from converter.errors import MissingDependencyError, StateMismatchError
from converter.frameworks.torch import TorchDataLoader

_KEY = "converter"
"""Under this name a position lies among the states of callbacks in `trainer_state.json`."""


def train(
    trainer: Any, loader: TorchDataLoader, *, resume_from_checkpoint: str | bool | None = None, **options: Any
) -> Any:
    """Call `trainer.train()` on the batches of a loader, and return what it returns.

    ```python
    from converter.frameworks.transformers import train

    arguments = TrainingArguments("checkpoints", num_train_epochs=3, save_steps=500)
    trainer = Trainer(model, arguments)
    with converter.make_torch_dataloader(batch_size=32, shuffle=True, columns=["input_ids", "labels"]) as loader:
        train(trainer, loader, resume_from_checkpoint=True)  # On any number of processes, in batches of any size.
    ```

    The Trainer's arguments decide how many epochs or steps there are, when to log, evaluate and save, and how gradients
    accumulate. The batch size is the loader's. The model is called with each of the loader's columns as a keyword.

    Under torchrun or another launcher each process reads its part. A checkpoint holds the loader's position; training
    goes on from it with the very next row, also with another number of processes, batch size, or number of batches for
    a step. Where the batches of an epoch cannot be divided among steps, one step takes batches of two epochs.

    Args:
        trainer: a `transformers.Trainer` (tried with 4.57 to 5.24), or a class of yours that is one.
        loader: of `make_torch_dataloader`, with `num_epochs=1`.
        resume_from_checkpoint: as of `Trainer.train`: a folder, or True for the newest one in `output_dir`.
        options: further arguments of `Trainer.train`.

    Raises:
        MissingDependencyError: Transformers is not installed.
        StateMismatchError: the checkpoint has no position of a loader, or one of other rows or another order.
        TypeError: `trainer` is no Trainer, or `loader` no loader of `make_torch_dataloader`.
        ValueError: there is no batch, the loader has its own number of epochs, the Trainer looks for a batch size by
            itself, or there is no checkpoint to go on from.
    """
    _check(trainer, loader)
    arguments = trainer.args
    checkpoint = _find_checkpoint(resume_from_checkpoint, arguments.output_dir)
    epochs_done, steps_done = 0, 0
    if checkpoint is not None:
        epochs_done, steps_done = _load_position(checkpoint, loader)
    batches = _Batches(loader, epochs_done)
    accumulated = arguments.gradient_accumulation_steps
    if arguments.max_steps > 0:
        num_steps = arguments.max_steps
    else:
        num_steps = steps_done + math.ceil(batches.left(arguments.num_train_epochs) / accumulated)
    # What a Trainer takes for one epoch is all that is left; the true ones are told by the callback.
    batches.length = max(0, num_steps - steps_done) * accumulated
    if arguments.max_steps <= 0:
        batches.length = min(batches.length, batches.left(arguments.num_train_epochs))
    own = {"max_steps": num_steps, "ignore_data_skip": True}
    if arguments.n_gpu <= 1:
        own["per_device_train_batch_size"] = loader.batch_size  # For what is logged.
    before = {name: getattr(arguments, name) for name in own}
    callback = _make_callback(batches)
    trainer.add_callback(callback)
    trainer.get_train_dataloader = lambda: batches
    for name, value in own.items():
        setattr(arguments, name, value)
    told_before = _tell_batch_size(trainer, arguments.train_batch_size)
    try:
        result = trainer.train(resume_from_checkpoint=checkpoint, **options)
    finally:
        del trainer.get_train_dataloader
        trainer.remove_callback(callback)
        for name, value in before.items():
            setattr(arguments, name, value)
        _tell_batch_size(trainer, told_before)
    if batches.done and batches.done % len(loader) == 0:
        # A Trainer does not ask for a batch after the last one, which is when a loader goes on to the next epoch.
        loader.set_epoch(loader.state_dict()["epoch"] + 1)
    return result


def _tell_batch_size(trainer: Any, batch_size: Any) -> Any:
    """Tell a Trainer for how many rows of a step it reports its speed; what it believed before.

    Reaches into: Trainer._train_batch_size (Transformers 4.57 to 5.24).
    Without it: the samples per second that a Trainer reports are those of its own batch size.
    """
    before = getattr(trainer, "_train_batch_size", None)
    trainer._train_batch_size = batch_size  # noqa: SLF001
    return before


class _Batches:
    """The batches of a loader from where it stands, epoch after epoch, as one iteration of so many."""

    def __init__(self, loader: TorchDataLoader, epochs_done: int) -> None:
        self.length = 0
        self._loader = loader
        self._of_epoch = len(loader)
        if not self._of_epoch:
            raise ValueError(
                "The loader has no batch, so there is nothing to train on. Choose a smaller batch_size, or more rows."
            )
        self._first = (epochs_done + 1) * self._of_epoch - loader.remaining
        self._handed = 0

    @property
    def done(self) -> int:
        """Batches since the training's first epoch began, counted in those that the loader has now."""
        return self._first + self._handed

    @property
    def epoch(self) -> float:
        """How many epochs are done, with the part of the running one."""
        return self.done / self._of_epoch

    def left(self, num_epochs: float) -> int:
        """The batches until the end of so many epochs."""
        return max(0, math.ceil(num_epochs * self._of_epoch) - self._first)

    def position(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        # After its last batch a loader still is in that epoch, until it is asked for the next one.
        epochs_done = max(0, self.done - 1) // self._of_epoch
        return {"loader": self._loader.state_dict(), "epochs_done": epochs_done}

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        epochs = itertools.chain.from_iterable(itertools.repeat(self._loader))
        for batch in itertools.islice(epochs, self.length):
            self._handed += 1
            yield batch


def _make_callback(batches: _Batches) -> Any:
    from transformers import TrainerCallback

    class KeepPosition(TrainerCallback):  # type: ignore[misc]
        """Tells the Trainer where the epochs end, and its checkpoints where the loader stands."""

        def __init__(self) -> None:
            self.epoch = int(batches.epoch)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            state.epoch = batches.epoch
            state.stateful_callbacks[_KEY] = batches.position()
            if int(state.epoch) == self.epoch:
                return
            self.epoch = int(state.epoch)
            if state.global_step >= state.max_steps:
                return  # The Trainer sees this end by itself.
            control.should_log |= args.logging_strategy == "epoch"
            control.should_evaluate |= args.eval_strategy == "epoch" and args.eval_delay <= state.epoch
            control.should_save |= args.save_strategy == "epoch"

    return KeepPosition()


def _check(trainer: Any, loader: Any) -> None:
    try:
        from transformers import Trainer
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "train needs Hugging Face Transformers, which is not installed: pip install transformers accelerate."
        ) from error
    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer: expected a transformers.Trainer, got {type(trainer).__name__}.")
    if not isinstance(loader, TorchDataLoader):
        raise TypeError(f"loader: expected what make_torch_dataloader returns, got {type(loader).__name__}.")
    if loader.num_epochs != 1:
        raise ValueError(
            f"loader: it has num_epochs={loader.num_epochs}, but the Trainer's num_train_epochs says how many there "
            "are. Make the loader without num_epochs."
        )
    if trainer.args.auto_find_batch_size:
        raise ValueError(
            "trainer: with auto_find_batch_size=True it would change a batch size that is the loader's. Leave it out."
        )


def _find_checkpoint(wanted: str | bool | None, output_dir: str) -> str | None:
    if wanted is None or wanted is False:
        return None
    if wanted is not True:
        return os.fspath(wanted)
    from transformers.trainer_utils import get_last_checkpoint

    found = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
    if found is None:
        raise ValueError(
            f"resume_from_checkpoint: there is no checkpoint in {output_dir}. Pass a checkpoint's folder, or False to "
            "start from the beginning."
        )
    return str(found)


def _load_position(checkpoint: str, loader: TorchDataLoader) -> tuple[int, int]:
    """Let a loader stand where the checkpoint was made; how many epochs and steps were done by then."""
    path = os.path.join(checkpoint, "trainer_state.json")
    try:
        with open(path, encoding="utf-8") as file:
            state = json.load(file)
    except FileNotFoundError as error:
        raise ValueError(
            f"resume_from_checkpoint: {path} is missing, so this is no checkpoint of a Trainer. Pass a folder such as "
            "checkpoint-500."
        ) from error
    except ValueError as error:
        raise StateMismatchError(f"{path} is damaged ({error}). Take an earlier checkpoint.") from error
    try:
        position = state["stateful_callbacks"][_KEY]
        saved, epochs_done, steps_done = position["loader"], position["epochs_done"], state["global_step"]
        is_valid = isinstance(saved, Mapping) and type(epochs_done) is type(steps_done) is int
    except (KeyError, TypeError):
        is_valid = False
    if not is_valid or min(epochs_done, steps_done) < 0:
        raise StateMismatchError(
            f"{path} has no position of a loader, as the training that wrote it did not read one by this function. "
            "Load the model's weights from it, and start without resume_from_checkpoint."
        )
    loader.load_state_dict(saved)
    return epochs_done, steps_done
