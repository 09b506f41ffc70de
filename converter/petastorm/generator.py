"""Random rows of a schema."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from converter.petastorm.columns import scalar_type
from converter.petastorm.unischema import Unischema

LIST_SIZE = 13
"""The size of a dimension that differs from row to row."""


def generate_datapoint(schema: Unischema) -> dict[str, npt.NDArray[Any]]:
    """A row of random values, each an array of its field's dtype and shape; `numpy.random.seed` decides them.

    Whole numbers are of all sizes, others from 0 to 1.
    """
    return {
        name: _random(field.numpy_dtype, tuple(LIST_SIZE if size is None else size for size in field.shape))
        for name, field in schema.fields.items()
    }


def _random(numpy_dtype: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    kind = scalar_type(numpy_dtype)
    if issubclass(kind, np.integer):
        bounds = np.iinfo(kind)
        return np.asarray(np.random.randint(bounds.min, int(bounds.max) + 1, shape, kind))  # noqa: NPY002 (seeded by numpy.random.seed)
    values = np.asarray(np.random.rand(*shape))  # noqa: NPY002 (seeded by numpy.random.seed)
    if kind is np.datetime64:
        return (values * np.iinfo(np.int32).max).astype("datetime64[s]")
    return values > 0.5 if kind is np.bool_ else np.array(values, dtype=kind)
