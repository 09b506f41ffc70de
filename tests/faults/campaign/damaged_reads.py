"""What is read of a data set, whole or damaged, and which columns differ."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from converter import DatasetConverter, make_delta_converter, make_parquet_converter, open_converter
from tests.faults.campaign import damaged_bases
from tests.faults.campaign.cases import Step, require
from tests.faults.campaign.damaged_files import Files

Columns = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What is read of a data set that is not damaged."""

    columns: Columns
    num_rows: int
    file_names: frozenset[str]
    """The files with rows."""


class Bases:
    """All data sets, each made when a case asks for it first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[str, str], damaged_bases.Base] = {}
        self._truths: dict[tuple[str, str], Truth] = {}

    def base(self, kind: str, name: str) -> damaged_bases.Base:
        """A data set."""
        key = ("entry" if kind == "away" else kind, name)
        if key not in self._made:
            folder = self._folder / f"made-{len(self._made)}"
            folder.mkdir()
            if key[0] == "entry":
                self._made[key] = damaged_bases.entry(name, folder)
            elif kind == "files":
                self._made[key] = damaged_bases.files_of_others(name, folder)
            else:
                self._made[key] = damaged_bases.table_of_delta(name)
        return self._made[key]

    def truth(self, kind: str, name: str) -> Truth:
        """What is read of it."""
        key = ("entry" if kind == "away" else kind, name)
        if key not in self._truths:
            files = Files(self.base(kind, name), self._folder / f"truth-{len(self._truths)}", is_away=False)
            with contextlib.closing(files), open_of(key[0], files.url) as converter:
                columns = read(converter, {})
                manifest = converter._manifest
                read_files = {manifest.file_names[one] for one in manifest.row_group_file[manifest.live_rows > 0]}
                self._truths[key] = Truth(columns=columns, num_rows=len(converter), file_names=frozenset(read_files))
                require(len(columns["row"]) == len(converter) > 0, "what is not damaged is read", f"{key}")
        return self._truths[key]


def open_of(kind: str, url: str) -> DatasetConverter:
    """The converter of a data set."""
    if kind in ("entry", "away"):
        return open_converter(f"{url}/{damaged_bases.ENTRY}")
    return make_parquet_converter(url) if kind == "files" else make_delta_converter(url)


def read(converter: DatasetConverter, step: Step, **options: Any) -> Columns:
    """All rows, with their numbers as column `row`."""
    options |= {
        "batch_size": step.get("batch_size", 1000),
        "shuffle": step.get("shuffle", False),
        "verify_checksums": step.get("verifies", False),
        "workers_count": step.get("workers", 1),
        "ragged": step.get("ragged", "nested"),
        "nulls": "mask",
        "with_row_index": "row",
    }
    if step.get("few"):
        options["columns"] = list(converter.columns)[::3]
    make = converter.make_torch_dataloader if step.get("torch") else converter.make_batch_reader
    batches: list[Columns] = []
    with make(**options) as reader:
        for batch in reader:
            sizes = {len(column) for column in batch.values()}
            require(len(sizes) == 1, "the columns of a batch have the same number of rows", f"{sizes}")
            batches.append({name: np.asarray(batch[name]) for name in batch if not _is_nested(batch[name])})
        require(len(batches) == len(reader), "as many batches come as len says", f"{len(batches)} {len(reader)}")
    names = [name for name in (batches[0] if batches else ()) if all(name in batch for batch in batches)]
    if step.get("ragged") == "pad":
        # A batch is as wide as its longest row.
        names = [name for name in names if f"{name}__length" not in names and not name.endswith("__element_valid")]
        names = [name for name in names if len({batch[name].shape[1:] for batch in batches}) == 1]
    return {name: np.concatenate([batch[name] for batch in batches]) for name in names}


def _is_nested(column: Any) -> bool:
    # A ragged tensor of torch's, or lists of lists.
    is_list = isinstance(column, list) and bool(column) and isinstance(column[0], list)
    return is_list or bool(getattr(column, "is_nested", False))


def differing(found: Columns, truth: Columns) -> list[str]:
    """The columns that hold other values than they should; only those that both have are compared."""
    order = np.argsort(found["row"], kind="stable")
    wrong = []
    for name in found.keys() & truth.keys():
        values, expected = found[name][order], truth[name]
        if expected.dtype == object or values.dtype == object:
            same = len(values) == len(expected) and all(map(_is_same, values, expected))
        else:
            plain = values.astype(expected.dtype) if values.dtype != expected.dtype else values
            same = plain.shape == expected.shape and plain.tobytes() == expected.tobytes()
        if not same:
            wrong.append(name)
    return wrong


def _is_same(value: Any, expected: Any) -> bool:
    if isinstance(expected, np.ndarray):
        return isinstance(value, np.ndarray) and value.shape == expected.shape and bool((value == expected).all())
    return bool(value == expected)
