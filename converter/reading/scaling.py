"""Standardised columns: (x − mean) / std, computed on the rows that were gathered, or on the way into a stack."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from converter.reading.gather import Array
from converter.schema import Scale


def standardized(values: Array, scale: Scale, dtype: str, valid: npt.NDArray[np.bool_] | None) -> Array:
    """The values as `dtype`, standardised; rows that are not valid are zeros, the mean. Floats are changed in place.

    >>> standardized(np.array([1, 2, 3]), Scale(2, 0.5), "float32", np.array([True, True, False])).tolist()
    [-2.0, 0.0, 0.0]
    """
    # Whole numbers and doubles may be larger than float32 tells apart, such as seconds since 1970.
    kind = values.dtype if values.dtype.kind == "f" else np.dtype(np.float64)
    numbers = values.astype(kind, copy=not values.flags.writeable)
    # In the precision of the numbers: a float64 mean would make NumPy compute, and allocate, in float64.
    mean, factor = (numbers.dtype.type(number) for number in (scale.mean, 1 / scale.std))
    np.subtract(numbers, mean, out=numbers)
    np.multiply(numbers, factor, out=numbers)
    with np.errstate(over="ignore"):
        # A number beyond float32 becomes infinite, as everywhere.
        numbers = numbers.astype(dtype, copy=False)
    if valid is not None:
        numbers[~valid] = 0
    return numbers
