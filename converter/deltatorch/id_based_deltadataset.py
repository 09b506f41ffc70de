"""`IDBasedDeltaDataset`, as DeltaTorch's module of this name has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from converter.deltatorch.deltadataset import DeltaIterableDataset
from converter.deltatorch.fields import FieldSpec
from converter.deltatorch.table import PartitionFilter


class IDBasedDeltaDataset(DeltaIterableDataset):
    """A `DeltaIterableDataset` with the name of a column of ids, which is not needed: rows are counted.

    ```python
    from converter.deltatorch import FieldSpec, IDBasedDeltaDataset

    dataset = IDBasedDeltaDataset("/data/digits", "id", [FieldSpec("label")])
    ```
    """

    def __init__(
        self,
        path: str,
        id_field: str | None,
        fields: Sequence[FieldSpec],
        version: int | None = None,
        partition_filter: PartitionFilter | None = None,
        use_fixed_rank: bool = False,
        rank: int | None = None,
        num_ranks: int | None = None,
        num_workers: int = 2,
        shuffle: bool = False,
        batch_size: int | None = 32,
        drop_last: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            path,
            fields,
            partition_filter,
            version,
            use_fixed_rank,
            rank,
            num_ranks,
            num_workers,
            shuffle,
            batch_size,
            drop_last,
            storage_options,
        )
        self.id_field = id_field
