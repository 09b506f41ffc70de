"""Batches as a real `tf.data.Dataset`, and its state beside the model's."""

from converter.frameworks.tensorflow.dataset import DatasetState, DatasetStateCallback, TFDataset

__all__ = ["DatasetState", "DatasetStateCallback", "TFDataset"]
