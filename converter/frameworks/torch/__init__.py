"""Batches as torch tensors, through a real `torch.utils.data.DataLoader`."""

from converter.frameworks.torch.loader import TorchDataLoader

__all__ = ["TorchDataLoader"]
