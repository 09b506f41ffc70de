"""The warning that a program still uses DeltaTorch's interface, with the native line that does the same."""

from __future__ import annotations

import inspect
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from converter.deltatorch.fields import FieldSpec, shape_of
from converter.errors import ConverterWarning
from converter.storage.urls import shown_url


class MovedWarning(ConverterWarning, DeprecationWarning):
    """DeltaTorch's interface was used. It works; the message has the native line that does the same."""


_lock = threading.Lock()
_has_warned = False


def warn_once(
    name: str, path: Any, fields: Sequence[FieldSpec], options: Mapping[str, Any], *, stacklevel: int
) -> None:
    """Warn the first time in this process that `name` was used."""
    global _has_warned
    with _lock:
        if _has_warned:
            return
        _has_warned = True
    warnings.warn(
        f"{name} is DeltaTorch's interface. The native form is\n    {native_line(path, fields, options)}",
        MovedWarning,
        stacklevel=stacklevel + 1,
    )


def level_of_caller() -> int:
    """The `stacklevel` that blames the line outside of this package, for a warning in the function that calls this."""
    frame = inspect.currentframe()
    level = -1
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("converter."):
        frame, level = frame.f_back, level + 1
    return level + 1


def native_line(path: Any, fields: Sequence[FieldSpec], options: Mapping[str, Any]) -> str:
    """The native calls that do the same; `...` stands for what must be written.

    >>> native_line("/data/digits", [FieldSpec("image", (28, 28))], {"batch_size": 64, "shuffle": True})
    "make_delta_converter('/data/digits', columns=['image'], shapes={'image': (28, 28)},
    float_dtype=None).make_torch_dataloader(batch_size=64, shuffle=True)"
    """
    shapes = {spec.name: shape_of(spec) for spec in fields if shape_of(spec) is not None}
    pictures = [f"{spec.name!r}: Image()" for spec in fields if spec.load_image_using_pil]
    has_functions = any(spec.transform or spec.full_record_transform or spec.target_name for spec in fields)
    table = [
        repr(shown_url(os.fspath(path))) if isinstance(path, (str, os.PathLike)) else repr(path),
        *_given(version=options.get("version")),
        f"columns={list(dict.fromkeys(spec.name for spec in fields))!r}",
        *_given(filters=options.get("partition_filter") or None, shapes=shapes or None),
        *([f"decode={{{', '.join(pictures)}}}"] if pictures else []),
        "float_dtype=None",
        # They may hold secrets.
        *(["storage_options=..."] if options.get("storage_options") else []),
    ]
    num_workers = options.get("num_workers") if has_functions else None
    ranks = (options.get("rank"), options.get("num_ranks")) if options.get("use_fixed_rank") else (None, None)
    loader = [
        *_given(batch_size=options.get("batch_size"), shuffle=options.get("shuffle") or None),
        *_given(cur_shard=ranks[0], shard_count=ranks[1], drop_last=options.get("drop_last") or None),
        *(["transform=..."] if has_functions else []),
        *_given(num_workers=num_workers or None),
    ]
    return f"make_delta_converter({', '.join(table)}).make_torch_dataloader({', '.join(loader)})"


def _given(**options: Any) -> list[str]:
    return [f"{name}={value!r}" for name, value in options.items() if value is not None]
