"""A dataset's state saved beside the model's: in a `tf.train.Checkpoint`, or in a file while `fit` runs."""

from __future__ import annotations

import json
import os
from typing import Any

import keras
import tensorflow as tf

from converter.frameworks.tensorflow.dataset import TFDataset


class DatasetState(tf.train.experimental.PythonState):  # type: ignore[misc]
    """A dataset's state as a part of a `tf.train.Checkpoint`.

    TensorFlow cannot save the iterator itself ("PyFunc is stateful"): give the checkpoint this object in its place.

    For a loop over the dataset itself. If a strategy or a `tf.function` takes the batches, they are not counted: save
    `dataset.state_dict(batches=…)` beside the checkpoint instead.

    ```python
    from converter.frameworks.tensorflow import DatasetState

    with converter.make_tf_dataset(batch_size=2) as dataset:
        checkpoint = tf.train.Checkpoint(data=DatasetState(dataset))  # beside model=… and optimizer=…
        next(iter(dataset))
        saved = checkpoint.save(f"{directory}/model")  # calls `serialize`; `restore` calls `deserialize`
        checkpoint.restore(saved)
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
        """Copy the state for an asynchronous checkpoint, so that it holds the state of this moment.

        Reaches into: tf.train.experimental.PythonState._copy_trackable_to_cpu (TensorFlow 2.21).
        Without it: TensorFlow does not call this, and an asynchronous checkpoint may hold a later state.
        """
        copied = object_map.setdefault(self, _CopiedState())

        def copy() -> None:
            copied.text = self.serialize()

        if tf.executing_eagerly():
            copy()
        else:
            # From the second save on TensorFlow runs the graph of this, which it makes once.
            tf.py_function(copy, [], [])


class _CopiedState(tf.train.experimental.PythonState):  # type: ignore[misc]
    """The copy of a state that an asynchronous checkpoint writes later."""

    text = ""

    def serialize(self) -> str:
        return self.text

    def deserialize(self, string_value: str) -> None:
        self.text = string_value


class DatasetStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Writes a dataset's state to a file while `fit` runs, at the steps at which `ModelCheckpoint` writes the model.

    It counts steps, so batches that a strategy has prefetched do not count as used. `steps_per_execution` should divide
    the steps of an epoch where other code uses the dataset meanwhile, and where `fit` gets a `repeat` with `prefetch`:
    else Keras does not tell how many steps the last execution had. To resume, load the model's weights and the state
    before `fit`; Keras then warns that the first epoch has fewer steps than the others.

    ```python
    from converter.frameworks.tensorflow import DatasetStateCallback

    with converter.make_tf_dataset(batch_size=2, features="x", labels="y") as dataset:
        saving = DatasetStateCallback(dataset, f"{directory}/state.json")
        keras_model.fit(dataset, shuffle=False, callbacks=[saving])
        with open(f"{directory}/state.json") as file:
            dataset.load_state_dict(json.load(file))
    ```

    Args:
        dataset: the dataset that `fit` gets, or that its dataset was made from batch for batch (`unbatch`, `rebatch`
            and `cache` are counted wrongly).
        filepath: the JSON file for the state; it is replaced as a whole.
        save_freq: `"epoch"`, or a number of batches.

    Raises:
        ValueError: `save_freq` is neither.
    """

    def __init__(self, dataset: TFDataset, filepath: str | os.PathLike[str], *, save_freq: str | int = "epoch") -> None:
        super().__init__()
        if save_freq != "epoch" and (isinstance(save_freq, (str, bool)) or save_freq < 1):
            raise ValueError(f"save_freq must be 'epoch' or a number of batches above 0, got {save_freq!r:.80}.")
        self._dataset, self._filepath, self._save_freq = dataset, os.fspath(filepath), save_freq
        self._begin: Any = None
        # Kept from one `fit` to the next, as in ModelCheckpoint.
        self._unsaved = 0
        self._steps = 0
        self._end: int | None = None
        self._num_begun: int | None = None
        """The dataset's count of iterations when the running one had begun."""

        self._last_batch = -1
        self._tested_from: Any = None
        self._is_moved = False
        """Whether a validation has read whole iterations of the dataset."""

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Count from where the dataset stands now, whatever else uses it meanwhile."""
        self._begin, self._end = self._dataset.next_begin()
        self._steps, self._num_begun, self._is_moved = 0, None, False

    def on_test_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Note where the dataset stands before a validation, which may read it, too."""
        self._tested_from = self._dataset.next_begin()[0]

    def on_test_end(self, logs: Any = None) -> None:  # noqa: ARG002
        """Note whether the validation has read it."""
        self._is_moved |= self._dataset.next_begin()[0] is not self._tested_from

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Count this epoch's batches from 0; after a validation on the dataset itself, from where that left it."""
        self._last_batch = -1
        if self._is_moved and self._end is not None and self._steps == self._end - len(self._dataset):
            self._begin, self._end = self._dataset.next_begin()
            self._steps, self._num_begun, self._is_moved = 0, None, False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Count the batches, and save after every `save_freq` of them."""
        self._steps += batch - self._last_batch
        self._unsaved += batch - self._last_batch
        self._last_batch = batch
        num_begun = self._dataset.num_begun
        self._num_begun = self._num_begun or num_begun
        if self._end is not None and self._steps >= self._end:
            if num_begun == self._num_begun:
                # If the last execution has fewer steps than planned, Keras still reports the planned number.
                self._steps, self._num_begun = self._end, None
            else:
                self._num_begun = num_begun
            self._end += len(self._dataset)
        if not isinstance(self._save_freq, str) and self._unsaved >= self._save_freq:
            self._save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Save, with `save_freq="epoch"`."""
        if self._save_freq == "epoch":
            self._save()

    def _save(self) -> None:
        self._unsaved = 0
        state = self._dataset.state_after(self._begin, self._steps)
        partial = f"{self._filepath}.partial"
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(state, file)
        os.replace(partial, self._filepath)
