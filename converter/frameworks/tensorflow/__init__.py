"""Batches as a real `tf.data.Dataset`, and its state beside the model's."""

from converter.errors import MissingDependencyError

try:
    import keras  # noqa: F401 (before the modules below, whose import errors would not name the extra)
    import tensorflow as tf  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("keras", "tensorflow"):
        # For example the backend that KERAS_BACKEND names.
        raise
    raise MissingDependencyError(
        f"make_tf_dataset needs {error.name}, which is not installed: pip install 'spark-tensor-converter[tf]'."
    ) from error

from converter.frameworks.tensorflow.dataset import TFDataset
from converter.frameworks.tensorflow.saving import DatasetState, DatasetStateCallback

__all__ = ["DatasetState", "DatasetStateCallback", "TFDataset"]
