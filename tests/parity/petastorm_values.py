"""Values that readers hand out as JSON, with their types, dtypes and shapes, so that two readers can be compared.

Runs with the Python, NumPy and pandas of any Petastorm since 0.4, so that both sides use the same text.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np


def as_json(value: Any) -> Any:
    """A value as lists, dicts, strings and integers that are equal exactly if the values and their types are."""
    if value is None:
        return None
    if hasattr(value, "data_ptr"):
        array = value.detach().cpu().numpy()
        return {"tensor": str(value.dtype), "shape": list(array.shape), "values": [_cell(cell) for cell in array.flat]}
    if isinstance(value, np.ndarray):
        return _array(value)
    if type(value).__name__ == "Categorical":
        # What Petastorm hands out for the key of a folder: its values are what a program uses.
        values = np.asarray(value)
        return _array(values.astype(str) if values.dtype.kind == "O" else values)
    if isinstance(value, dict):
        return {"dict": [[_cell(key), as_json(item)] for key, item in value.items()]}
    if hasattr(value, "_asdict"):
        return {"row": [[name, as_json(item)] for name, item in value._asdict().items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [as_json(item) for item in value]}
    # NumPy 2 calls its bool and str by other names, but not their dtypes.
    kind = f"numpy {value.dtype.str}" if isinstance(value, np.generic) else type(value).__name__
    return {kind: _cell(value)}


def _array(array: np.ndarray) -> Any:
    known = {"array": array.dtype.str, "shape": list(array.shape)}
    if array.dtype.kind == "O":
        return {**known, "values": [as_json(cell) for cell in array.flat]}
    if array.dtype.kind in "mM":
        return {**known, "values": array.astype(np.int64).reshape(-1).tolist()}
    return {**known, "values": [_cell(cell) for cell in array.reshape(-1).tolist()]}


def _cell(value: Any) -> Any:
    """A single value; that of a float is exact."""
    if isinstance(value, (np.datetime64, np.timedelta64)):
        return int(value.astype(np.int64))
    if isinstance(value, np.generic):
        return _cell(value.item())
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, complex):
        return [value.real.hex(), value.imag.hex()]
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    if isinstance(value, (dt.date, dt.datetime)):
        return value.isoformat()
    return value if isinstance(value, (bool, int, str)) else str(value)
