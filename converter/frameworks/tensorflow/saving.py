"""A dataset's state beside the model's."""

from __future__ import annotations

import json
import os
from typing import Any

import keras
import tensorflow as tf

from converter.frameworks.tensorflow.dataset import TFDataset


class DatasetState(tf.train.experimental.PythonState):  # type: ignore[misc]
    """A dataset's state as a part of a `tf.train.Checkpoint`.

    For a loop over the dataset itself. Where a strategy or a `tf.function` uses the batches, nobody here counts them:
    there save `dataset.state_dict(batches=…)` beside the checkpoint.

    ```python
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, data=DatasetState(dataset))
    ```
    """

    def __init__(self, dataset: TFDataset) -> None:
        self._dataset = dataset

    def serialize(self) -> str:
        """The state as text; TensorFlow calls this when a checkpoint is written."""
        return json.dumps(self._dataset.state_dict())

    def deserialize(self, string_value: str) -> None:
        """Load the state; TensorFlow calls this when a checkpoint is restored."""
        self._dataset.load_state_dict(json.loads(string_value))

    def _copy_trackable_to_cpu(self, object_map: dict[Any, Any]) -> None:
        """Let an asynchronous checkpoint hold the state of the moment at which it is asked for."""
        copied = object_map.setdefault(self, _CopiedState())
        copied.text = self.serialize()


class _CopiedState(tf.train.experimental.PythonState):  # type: ignore[misc]
    """A state that a checkpoint writes later."""

    text = ""

    def serialize(self) -> str:
        return self.text

    def deserialize(self, string_value: str) -> None:
        self.text = string_value


class DatasetStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Writes a dataset's state to a file while `fit` runs, at the steps at which `ModelCheckpoint` writes the model.

    Steps are counted here, so batches that a strategy has prefetched are not taken for used ones. To go on, load the
    model's weights and `dataset.load_state_dict(json.load(open(filepath)))` before `fit`; Keras then warns that the
    first epoch has fewer steps than the others.

    Args:
        dataset: the one that `fit` is given, or that what it is given was made of, batch for batch: what `unbatch`,
            `rebatch` or `cache` give is not counted rightly.
        filepath: where the state stands, as JSON; replaced as a whole.
        save_freq: `"epoch"`, or after how many batches.
    """

    def __init__(self, dataset: TFDataset, filepath: str | os.PathLike[str], *, save_freq: str | int = "epoch") -> None:
        super().__init__()
        if save_freq != "epoch" and (isinstance(save_freq, (str, bool)) or save_freq < 1):
            raise ValueError(f"save_freq must be 'epoch' or a number of batches above 0, got {save_freq!r}.")
        self._dataset, self._filepath, self._save_freq = dataset, os.fspath(filepath), save_freq
        self._begin: Any = None
        # Not counted anew in a second `fit`, as ModelCheckpoint does not.
        self._unsaved = 0
        self._steps = 0
        self._end: int | None = None
        self._num_begun: int | None = None
        """As the dataset counted it when the iteration had begun that is under way."""

        self._last_batch = -1

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Count from where the dataset stands: what others do with it meanwhile changes nothing."""
        self._begin, self._end = self._dataset.next_begin()
        self._steps, self._num_begun = 0, None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Count this epoch's batches from 0."""
        self._last_batch = -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Count the batches, and save where it is time."""
        self._steps += batch - self._last_batch
        self._unsaved += batch - self._last_batch
        self._last_batch = batch
        num_begun = self._dataset.num_begun
        self._num_begun = self._num_begun or num_begun
        if self._end is not None and self._steps >= self._end:
            if num_begun == self._num_begun:
                # Of a last execution of several steps Keras tells the number that was planned.
                self._steps, self._num_begun = self._end, None
            else:
                self._num_begun = num_begun
            self._end += len(self._dataset)
        if not isinstance(self._save_freq, str) and self._unsaved >= self._save_freq:
            self._save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Save, if that is asked for."""
        if self._save_freq == "epoch":
            self._save()

    def _save(self) -> None:
        self._unsaved = 0
        state = self._dataset.state_after(self._begin, self._steps)
        partial = f"{self._filepath}.partial"
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(state, file)
        os.replace(partial, self._filepath)
