"""Opens one version of a Delta table for the columns that fields name."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from converter.deltatorch.storage_options import fsspec_options
from converter.loading.options import LoaderOptions
from converter.make import make_delta_converter
from converter.manifest import Manifest
from converter.reading.source import BatchSource
from converter.schema import Schema
from converter.storage.directory import Storage

PartitionFilter = Sequence[tuple[str, str, Any]]
"""Tuples of column, operator and value; values may be texts, as Delta's log has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The rows of one version of a table that pass the filter."""

    storage: Storage
    manifest: Manifest
    names: tuple[str, ...]
    """The columns that are read."""

    @property
    def num_rows(self) -> int:
        """Live rows."""
        return self.manifest.num_live_rows

    def source(self, manifest: Manifest, *, batch_size: int, shuffle: bool) -> BatchSource:
        """Rows of this table, `manifest`, in batches."""
        options = LoaderOptions(
            batch_size=batch_size,
            columns=self.names,
            shuffle=shuffle,
            # Without mixing a small window is as good, and workers need not share its row groups.
            shuffle_window_rows=None if shuffle else 1,
            nulls="mask",
            ragged="nested",
            cur_shard=0,
            shard_count=1,
        )
        return options.make_source(self.storage, manifest)


def open_table(
    path: Any,
    names: Sequence[str],
    *,
    version: int | None,
    partition_filter: PartitionFilter | None,
    storage_options: Mapping[str, Any] | None,
) -> Table:
    """The columns `names` of a version of a table; None for the latest.

    Raises:
        MissingDependencyError: deltalake is not installed.
        SourceError: there is no Delta table, no such version, no rows, or no row passes the filter.
        ValueError: a column does not exist; the message names it.
    """
    filters = _check_filter(partition_filter)
    columns = list(dict.fromkeys([*names, *(name for name, _, _ in filters)]))
    converter = make_delta_converter(
        path,
        version=version,
        columns=columns,
        float_dtype=None,
        storage_options=fsspec_options(path, storage_options),
    )
    if filters:
        converter = converter.where([_typed(converter.schema, *condition) for condition in filters])
    loader = converter.make_torch_dataloader(nulls="mask", ragged="nested", cur_shard=0, shard_count=1)
    return Table(storage=loader.source.storage, manifest=loader.source.manifest, names=tuple(names))


def _check_filter(partition_filter: Any) -> list[tuple[str, str, Any]]:
    if not partition_filter:
        return []
    is_list = isinstance(partition_filter, Sequence) and not isinstance(partition_filter, str)
    if not is_list or not all(isinstance(part, (tuple, list)) and len(part) == 3 for part in partition_filter):
        raise TypeError(
            "partition_filter must be a list of tuples such as ('day', '=', '2026-11-25'), got "
            f"{partition_filter!r:.80}."
        )
    return [tuple(part) for part in partition_filter]


_READERS: Mapping[str, Callable[[str], Any]] = {
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "datetime64[D]": dt.date.fromisoformat,
    "datetime64[us]": lambda text: dt.datetime.fromisoformat(text.replace("Z", "+00:00")),
    **dict.fromkeys(("int8", "int16", "int32", "int64"), int),
    **dict.fromkeys(("float32", "float64"), float),
}


def _typed(schema: Schema, name: str, operator: str, value: Any) -> tuple[str, str, Any]:
    """A condition whose texts have become values of the column's type."""
    read = _READERS.get(schema[name].dtype)
    if read is None:
        return name, operator, value

    def typed(given: Any) -> Any:
        if not isinstance(given, str):
            return given
        try:
            return read(given)
        except (KeyError, ValueError):
            raise ValueError(
                f"partition_filter: {given!r} is no value of the column {name!r}, which holds {schema[name].dtype}."
            ) from None

    return name, operator, [typed(given) for given in value] if isinstance(value, (list, tuple, set)) else typed(value)
