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
    if values.dtype.kind == "f":
        is_own = values.dtype == dtype and values.flags.writeable
        numbers = values if is_own else values.astype(dtype)
    else:
        # Whole numbers may be larger than float32 tells apart, such as seconds since 1970.
        numbers = values.astype(np.float64)
    # In the precision of the numbers: a float64 mean would make NumPy compute, and allocate, in float64.
    mean, factor = (numbers.dtype.type(number) for number in (scale.mean, 1 / scale.std))
    np.subtract(numbers, mean, out=numbers)
    np.multiply(numbers, factor, out=numbers)
    numbers = numbers.astype(dtype, copy=False)
    if valid is not None:
        numbers[~valid] = 0
    return numbers
