"""Batches as a real `tf.data.Dataset`, and its state beside the model's."""

from converter.errors import MissingDependencyError

try:
    import keras  # noqa: F401 (before the modules below, so that what is missing is named here)
    import tensorflow as tf  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("keras", "tensorflow"):
        # Of a backend that KERAS_BACKEND names, say.
        raise
    raise MissingDependencyError(
        f"make_tf_dataset needs {error.name}, which is not installed: pip install 'spark-tensor-converter[tf]'."
    ) from error

from converter.frameworks.tensorflow.dataset import TFDataset
from converter.frameworks.tensorflow.saving import DatasetState, DatasetStateCallback

__all__ = ["DatasetState", "DatasetStateCallback", "TFDataset"]
