"""`DeltaIterableDataset`: the rows of a Delta table one by one, as DeltaTorch's module of this name has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from converter.arguments import check_integer
from converter.deltatorch.batches import ByRecord
from converter.deltatorch.fields import FieldSpec, check_fields, check_pillow, decode_and_transform_record
from converter.deltatorch.ranks import batches_of_worker, find_rank, rows_between, rows_of_rank
from converter.deltatorch.rows import Rows
from converter.deltatorch.table import PartitionFilter, open_table
from converter.deltatorch.values import Values
from converter.deltatorch.warning import warn_once

__all__ = ["DeltaIterableDataset", "FieldSpec"]

_MOST_STRIPES = 1 << 16
"""Ranges of batches into which the workers of another loader cut an epoch; a guess."""


class DeltaIterableDataset(IterableDataset[Any]):
    """The rows of one version of a Delta table, or of a rank's part of it, as dicts of Python objects.

    `len()` is the number of rows of this rank. The version is fixed when the dataset is made. Each iteration with
    `shuffle=True` has another order, which follows `torch.manual_seed`. Workers of a `DataLoader` share the rows, batch
    by batch of `batch_size`.

    ```python
    from converter.deltatorch import DeltaIterableDataset, FieldSpec

    dataset = DeltaIterableDataset("/data/digits", [FieldSpec("image", (28, 28)), FieldSpec("label")])
    for row in dataset:
        print(row["image"].shape, row["label"])
    ```

    Raises:
        EmptyShardError: there are fewer rows than ranks.
        MissingDependencyError: deltalake is not installed, or Pillow and a field needs it.
        SourceError: there is no Delta table, no such version, or no rows.
        ValueError, TypeError: an argument is wrong, or a column does not exist; the message names it.
    """

    def __init__(
        self,
        path: str,
        fields: Sequence[FieldSpec],
        partition_filter: PartitionFilter | None = None,
        version: int | None = None,
        use_fixed_rank: bool = False,
        rank: int | None = None,
        num_ranks: int | None = None,
        num_workers: int = 2,
        shuffle: bool = False,
        batch_size: int | None = 32,
        drop_last: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        options = {name: value for name, value in locals().items() if name not in ("self", "path", "fields")}
        self.field_specs = check_fields(fields)
        # A subclass's constructor stands between this one and its caller.
        stacklevel = 2 if type(self) is DeltaIterableDataset else 3
        warn_once(type(self).__name__, path, self.field_specs, options, stacklevel=stacklevel)
        if any(spec.load_image_using_pil for spec in self.field_specs):
            check_pillow()
        self.rank, self.num_ranks = find_rank(use_fixed_rank=use_fixed_rank, rank=rank, num_ranks=num_ranks)
        self.num_workers = check_integer("num_workers", num_workers, least=0)
        self.batch_size = None if batch_size is None else check_integer("batch_size", batch_size, least=1)
        self.path, self.partition_filter, self.use_fixed_rank = path, partition_filter, use_fixed_rank
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        names = tuple(dict.fromkeys(spec.name for spec in self.field_specs))
        self._table = open_table(
            path, names, version=version, partition_filter=partition_filter, storage_options=storage_options
        )
        self.version = self._table.manifest.version
        """The version that is read."""

        own = rows_of_rank(self._table.num_rows, self.rank, self.num_ranks)
        self.start, self.end = own.start, own.stop
        """The numbers of this rank's rows: from `start` up to, and without, `end`."""

        manifest = rows_between(self._table.manifest, own)
        self.rows = Rows(self._table.source(manifest, batch_size=self.batch_size or 1, shuffle=self.shuffle))
        """What the native engine reads for this rank."""

    decode_and_transform_record = staticmethod(decode_and_transform_record)

    def __len__(self) -> int:
        return self.end - self.start

    def count(self) -> int:
        """The rows of all ranks."""
        return self._table.num_rows

    def __iter__(self) -> Iterator[Any]:
        return self.process_data()

    def process_data(self) -> Iterator[Any]:
        """Yield this rank's rows, or a worker's part of them, each transformed when it is asked for."""
        worker = get_worker_info()
        index, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        # The same for all workers of an iteration: torch adds the worker's number.
        epoch = draw_epoch() if worker is None else worker.seed - worker.id
        self.rows.num_processes = count
        num_batches = -(-len(self) // self.rows.source.batch_size)
        stripe = max(1, num_batches // _MOST_STRIPES)
        batches = batches_of_worker([range(num_batches)], index, count, most=stripe, is_free=False)
        records = ByRecord(self.field_specs, Values(self.rows.source), default_collate)
        for part in self.rows.parts(epoch, batches):
            yield from records.records(part)


def draw_epoch(generator: torch.Generator | None = None) -> int:
    """A random number for the order of an iteration; follows `torch.manual_seed`, as workers' seeds do."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
