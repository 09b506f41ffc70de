"""`create_pytorch_dataloader`, as DeltaTorch's module of this name has it. torch is loaded when it is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from converter.deltatorch.fields import FieldSpec, check_fields
from converter.deltatorch.table import PartitionFilter
from converter.deltatorch.warning import warn_once
from converter.errors import MissingDependencyError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


def create_pytorch_dataloader(
    path: str,
    id_field: str | None = None,
    fields: Sequence[FieldSpec] = (),
    partition_filter: PartitionFilter | None = None,
    version: int | None = None,
    batch_size: int | None = 32,
    use_fixed_rank: bool = False,
    rank: int | None = None,
    num_ranks: int | None = None,
    num_workers: int = 2,
    shuffle: bool = False,
    drop_last: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    **pytorch_dataloader_kwargs: Any,
) -> DataLoader[Any]:
    """A `torch.utils.data.DataLoader` over one version of a Delta table. Its batches are dicts by field.

    Together the ranks read each row once in an epoch, in equally many batches. Only batches of one row cannot be cut:
    there some ranks may have one more. `loader.dataset` is an `IDBasedDeltaDataset`, and its `len()` the number of
    this rank's rows.

    Example:
        ```python
        from converter.deltatorch import FieldSpec, create_pytorch_dataloader

        def to_float(image):
            return torch.from_numpy(image).float() / 255

        fields = [FieldSpec("image", decode_numpy_and_apply_shape=(28, 28), transform=to_float), FieldSpec("label")]
        loader = create_pytorch_dataloader("/data/digits", "id", fields, batch_size=64, shuffle=True)
        for batch in loader:
            print(batch["image"].shape, batch["label"].shape)
        ```

    Args:
        path: the table's folder or URL.
        id_field: a column of ids; not needed, and not read.
        fields: the columns, and what becomes of them.
        partition_filter: read only rows that pass all of these tuples, e.g. `("day", "=", "2026-11-25")`. The column
            need not be one of a partition.
        version: the table's version; None for the latest. It is fixed when the loader is made.
        batch_size: rows of a batch; None for single rows.
        use_fixed_rank: take `rank` and `num_ranks`; else they are found in torch.distributed, if it is initialised.
        rank: which part of the rows this process reads, from 0.
        num_ranks: the number of processes that train together.
        num_workers: processes that call the functions of fields, and `collate_fn`. Without any, threads read.
        shuffle: read the rows in another order in each iteration; the orders follow `torch.manual_seed`.
        drop_last: leave out rows that fill no batch; otherwise the last batch may be short.
        storage_options: options of the store, by deltalake's names or by those of fsspec's filesystem.
        pytorch_dataloader_kwargs: other arguments of `torch.utils.data.DataLoader`.

    Raises:
        EmptyShardError: there are fewer rows than ranks.
        MissingDependencyError: torch or deltalake is not installed, or Pillow and a field needs it.
        SourceError: there is no Delta table, no such version, or no rows.
        ValueError, TypeError: an argument is wrong, or a column does not exist; the message names it.
    """
    specs = check_fields(fields)
    options: dict[str, Any] = {
        "version": version,
        "partition_filter": partition_filter,
        "batch_size": batch_size,
        "use_fixed_rank": use_fixed_rank,
        "rank": rank,
        "num_ranks": num_ranks,
        "num_workers": num_workers,
        "shuffle": shuffle,
        "drop_last": drop_last,
        "storage_options": storage_options,
    }
    warn_once("create_pytorch_dataloader", path, specs, options, stacklevel=2)
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("DeltaTorch needs torch: pip install 'spark-tensor-converter[torch]'.") from error
    from converter.deltatorch.id_based_deltadataset import IDBasedDeltaDataset
    from converter.deltatorch.loader import DeltaDataLoader

    dataset = IDBasedDeltaDataset(path, id_field, specs, **options)
    return DeltaDataLoader(
        dataset,
        batch_size=batch_size,
        num_workers=num_workers,
        drop_last=drop_last,
        **pytorch_dataloader_kwargs,
    )
