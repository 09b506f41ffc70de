"""The row groups of a batch reader, decoded by the native engine in the reader's own order."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from converter.loading.options import LoaderOptions
from converter.manifest import Manifest
from converter.petastorm.native import Work, cache_options, native_manifest
from converter.plan import EpochPlan
from converter.reading.windows import open_files, read_plans

_MOST_FILES = 256
"""More would delay the first rows: a manifest takes 0.2 ms for each file."""

Columns = dict[str, npt.NDArray[Any]]


def native_blocks(work: Work, given_up: threading.Event) -> Generator[Columns, None, None] | None:
    """The columns of each row group in the reader's order, over its epochs; None if only the reader can read them.

    That is so with code of the user's, with columns that are no numbers or have nulls, and if rows change places.
    Requests end once `given_up` is set, which the end of the blocks does, too.
    """
    if work.recipe.shuffle_rows or work.order.num_parts > 1 or len(work.recipe.store.names) > _MOST_FILES:
        return None
    manifest = native_manifest(work, given_up)
    return None if manifest is None else _blocks(work, manifest, given_up)


def _blocks(work: Work, manifest: Manifest, given_up: threading.Event) -> Generator[Columns, None, None]:
    options = LoaderOptions(batch_size=1, shuffle=False, cur_shard=0, shard_count=1, **cache_options(work))
    source = options.make_source(work.recipe.store.storage, manifest)
    files = open_files(source)
    numbers = _numbers_of(work, manifest)
    first = work.first_epoch
    epochs = itertools.count(first) if work.num_epochs is None else range(first, first + work.num_epochs)
    num_rows = sys.maxsize if work.num_epochs is None else work.num_epochs * manifest.num_live_rows

    def plan(epoch: int) -> EpochPlan:
        # A file without rows is not in the manifest.
        listed = [numbers[item.row_group] for item in work.order.epoch(epoch) if item.row_group in numbers]
        order = np.array(listed, np.int64)
        return _in_order(source.plan(0), order, manifest.row_group_rows[order])

    yield from read_plans(source, map(plan, epochs), num_rows, files, given_up)


def _numbers_of(work: Work, manifest: Manifest) -> dict[Any, int]:
    """The manifest's numbers of the reader's row groups."""
    names = work.recipe.store.names
    files = {number: names.index(name) for number, name in enumerate(manifest.file_names)}
    return {
        (files[int(manifest.row_group_file[number])], manifest.row_group_in_file(number)): number
        for number in range(manifest.num_row_groups)
    }


def _in_order(plan: EpochPlan, order: npt.NDArray[np.int64], num_rows: npt.NDArray[np.int64]) -> EpochPlan:
    """The plan with other row groups, each read alone, so that a run is a row group."""
    starts = np.concatenate(([0], np.cumsum(num_rows)))
    return replace(
        plan,
        segments=(range(int(starts[-1])),),
        num_padded=0,
        num_dropped=0,
        group_order=order,
        group_starts=starts,
        window_starts=np.arange(len(order) + 1),
    )
