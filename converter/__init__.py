"""Turns a Spark DataFrame, Parquet files or a Delta table into batches of tensors.

```python
from converter import make_spark_converter

with make_spark_converter(df) as converter:
    with converter.make_torch_dataloader(batch_size=1024, shuffle=True) as loader:
        for batch in loader:
            ...
```

A source says what the rows are, a cache makes them durable, a plan says which rows and in what order, a reader says how
they are fetched, a framework says as what they arrive. Importing this loads no Spark, torch or TensorFlow.

Beside this file are `CHANGELOG.md`, `COMPATIBILITY.md` (what a version may change) and `SECURITY.md` (threat model).
"""

from importlib import metadata as _metadata

from converter import plot as plot
from converter.dataset import DatasetConverter
from converter.decoders import Image, NumPy
from converter.errors import (
    CacheCorruptError,
    CacheError,
    CacheNotConfiguredError,
    CacheNotOwnedError,
    ConverterError,
    ConverterWarning,
    EmptyShardError,
    MissingDependencyError,
    NullValueError,
    ReadError,
    SourceChangedError,
    SourceError,
    StateMismatchError,
    UnsupportedTypeError,
)
from converter.make import make_delta_converter, make_parquet_converter, make_spark_converter, open_converter, sweep
from converter.mixed import MixedConverter, mix
from converter.sources.spark.local import start_local_spark

try:
    __version__ = _metadata.version("spark-tensor-converter")
except _metadata.PackageNotFoundError:  # A checkout that was never installed.
    __version__ = "0+unknown"

__docformat__ = "google"

__all__ = [
    "CacheCorruptError",
    "CacheError",
    "CacheNotConfiguredError",
    "CacheNotOwnedError",
    "ConverterError",
    "ConverterWarning",
    "DatasetConverter",
    "EmptyShardError",
    "Image",
    "MissingDependencyError",
    "MixedConverter",
    "NullValueError",
    "NumPy",
    "ReadError",
    "SourceChangedError",
    "SourceError",
    "StateMismatchError",
    "UnsupportedTypeError",
    "__version__",
    "make_delta_converter",
    "make_parquet_converter",
    "make_spark_converter",
    "mix",
    "open_converter",
    "start_local_spark",
    "sweep",
]


def __dir__() -> list[str]:
    """What users need. The other modules are internal: they stay importable and are not listed."""
    return sorted([*__all__, "frameworks", "plot"])
