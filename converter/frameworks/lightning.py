"""Lightning counts the batches of an epoch by itself; after a resume it counts on from where the loader really is.

A checkpoint of Lightning holds the loader's state and, apart from it, how many batches of the epoch are done. With
another number of ranks, or another batch size, the same rows are another number of batches: with the old number an
epoch would end before its rows do. `for_lightning` is registered as an entry point, so every Trainer has the callback,
and users have nothing to do. It changes no training but one that was resumed and reads a loader of this package.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from typing import Any

from converter.errors import ConverterError


def for_lightning() -> Any:
    """The callback of a Trainer of `lightning`."""
    return make_callback("lightning.pytorch")


def for_pytorch_lightning() -> Any:
    """The callback of a Trainer of `pytorch_lightning`, the same library by its older name."""
    return make_callback("pytorch_lightning")


def make_callback(package: str) -> Any:
    """The callback, of the class that this package of Lightning looks for."""
    base: Any = importlib.import_module(package).Callback

    class CountOn(base):  # type: ignore[misc]
        """Corrects the number of batches that are done when a training is resumed."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
            """Lightning has given the loader its state by now, and has not yet read a batch."""
            count_on(trainer)

        def __reduce__(self) -> tuple[Any, ...]:
            # Trainers are pickled for ranks that are spawned.
            return make_callback, (package,)

    return CountOn()


def count_on(trainer: Any) -> None:
    """Let a resumed Trainer count as done what the loader has no more batches for.

    Raises:
        ConverterError: a loader has a number of epochs of its own.
    """
    epochs, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    # Every Trainer comes here: without this module there is no loader of ours, and it is not imported for nothing.
    ours: Any = sys.modules.get("converter.frameworks.torch")
    if ours is None:
        return
    loaders = [loader for loader in _flat(trainer.train_dataloader) if isinstance(loader, ours.TorchDataLoader)]
    for loader in loaders:
        if loader.num_epochs != 1:
            raise ConverterError(
                f"This loader has num_epochs={loader.num_epochs}, but Lightning counts epochs by itself, and its "
                "checkpoints would hold a wrong position. Make the loader without num_epochs: Trainer(max_epochs=…) or "
                "Trainer(max_steps=…) says when the training ends."
            )
    if not loop.restarting or not loaders:
        return
    # Resumed after an epoch's last batch, Lightning 2.6 counts that epoch as processed and then takes the next one for
    # one that had begun. It would count as one epoch less that began, so a checkpoint made in it would look like one of
    # an epoch's end: the next resume would not give the loader its state, and rows would be read again.
    if epochs.restarted_mid_epoch and epochs.epoch_progress.current.processed == epochs.epoch_progress.current.ready:
        epochs.reset_restart_stage()
    epoch, progress = epochs.epoch_progress.current.processed, loop.batch_progress
    if progress.is_last_batch:
        _begin_epoch(epoch, loaders)
    else:
        _end_those_that_had_ended(epochs, loaders, epoch)
        for loader in loaders:
            loader.sampler.follow(epoch)
    # The longest one decides when an epoch ends, as in Lightning's default for several loaders.
    longest = max(loaders, key=len)
    others = (one for one in _flat(trainer.train_dataloader) if not isinstance(one, ours.TorchDataLoader))
    if any(_len(one) > len(longest) for one in others):
        return
    # After an epoch's last batch its rest of rows, dropped because it could not be shared out, may suffice for others.
    done = len(longest) if progress.is_last_batch else len(longest) - longest.remaining
    current = progress.current
    # A checkpoint that is made at a batch's end is made before that batch counts as completed. Lightning adds it after
    # this, so the number may be -1: of a large batch that takes the place of small ones, none is done yet.
    unfinished = current.processed - current.completed
    current.ready = current.started = current.processed = done
    current.completed = done - unfinished


def _begin_epoch(epoch: int, loaders: Sequence[Any]) -> None:
    """Let the loaders begin with an epoch's first rows: in a cycle a shorter one is further on when an epoch ends."""
    for loader in loaders:
        # By way of another epoch, for in its own one a loader goes on where its state was taken.
        loader.set_epoch(epoch + 1)
        loader.set_epoch(epoch)


def _end_those_that_had_ended(fit_loop: Any, loaders: Sequence[Any], epoch: int) -> None:
    """In the mode in which a shorter loader gives None once it has ended, let it give None until the epoch ends.

    Its state is that of the next epoch by then. Lightning has made the iterators, and keeps nowhere which had ended.

    Reaches into: FitLoop._combined_loader, its _mode and the iterators in its _iterator (Lightning 2.6).
    Without it: a resumed training reads the shorter loader's next epoch beside the rest of this one.
    """
    combined = fit_loop._combined_loader  # noqa: SLF001
    if combined._mode != "max_size":  # noqa: SLF001
        return
    for index, loader in enumerate(combined.flattened):
        if any(loader is one for one in loaders) and loader.state_dict()["epoch"] > epoch:
            combined._iterator.iterators[index] = iter(())  # noqa: SLF001


def _len(loader: Any) -> float:
    """The batches of a loader of any kind."""
    try:
        return len(loader)
    except TypeError:
        return math.inf


def _flat(loaders: Any) -> list[Any]:
    """The loaders in what `train_dataloader` may return."""
    if isinstance(loaders, dict):
        return [one for part in loaders.values() for one in _flat(part)]
    if isinstance(loaders, (list, tuple)):
        return [one for part in loaders for one in _flat(part)]
    return [loaders]
