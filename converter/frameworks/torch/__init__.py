"""Batches as torch tensors, through a real `torch.utils.data.DataLoader`."""

from converter.errors import MissingDependencyError

try:
    import torch  # noqa: F401 (before the modules below, whose import errors would not name the extra)
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        "make_torch_dataloader needs PyTorch, which is not installed: pip install 'spark-tensor-converter[torch]'."
    ) from error

from converter.frameworks.torch.loader import TorchDataLoader

__all__ = ["TorchDataLoader"]
