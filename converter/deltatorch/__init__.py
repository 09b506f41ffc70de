"""DeltaTorch's public names on top of the native engine: change `deltatorch` to `converter.deltatorch` in imports.

    from converter.deltatorch import FieldSpec, create_pytorch_dataloader

Batches are dicts with the keys, dtypes and shapes of DeltaTorch 0.0.3; functions of rows get the values that they got.

| old name | native way | what differs here from DeltaTorch |
|---|---|---|
| `create_pytorch_dataloader` | `make_delta_converter(…).make_torch_dataloader(…)` | the version is fixed when the loader is made |
| `id_field` | | not needed: ids may have gaps, come twice or be missing |
| `shuffle` | `shuffle=True` | mixes whole windows of the table, not record batches; `torch.manual_seed` settles the order |
| `shuffle=False` | the same | rows come in the table's order with any number of workers |
| `partition_filter` | `filters=`, `where` | filters rows (DeltaTorch only counts by it); any column |
| `use_fixed_rank`, `rank`, `num_ranks` | `cur_shard`, `shard_count` | parts differ by one row at most, ranks take equally many steps; wrong pairs are errors |
| `num_workers` | the same, or threads | processes only for functions of rows; batches are whole across workers, `len()` is exact |
| `drop_last` | the same | drops at most one batch of a rank, not one of each worker |
| `storage_options` | the same | names of deltalake or of fsspec |
| `FieldSpec.decode_numpy_and_apply_shape` | `shapes={"x": (28, 28)}` | an int and -1 work; the array may be written to |
| `FieldSpec.load_image_using_pil` | `decode={"x": Image()}` | without `transform` an array, not an error |
| `FieldSpec.load_using_io` | | `transform` gets an `io.BytesIO` |
| `FieldSpec.transform` | `transform=` of a loader, for a whole batch | |
| `FieldSpec.target_name` | `transform=` | as there, the plain value stays under its old name |
| `FieldSpec.full_record_transform` | `transform=` | |
| dates and times without `transform` | the same | whole days and microseconds since 1970, not an error |
| a null without `transform` | `nulls=` | `NullValueError` names the column |
| a struct | columns `s.a` | name its members: `FieldSpec("s.a")` |
| tables with deletion vectors, renamed columns | the same | are read |
| tables of up to 64 MB | | stay in memory between epochs |
| `DeltaIterableDataset`, `IDBasedDeltaDataset` | `make_batch_reader` | the same, without `create_delta_table` and `calc_boundaries` |
| `SkipReadDeltaDataset` | | is not here; it does not work there |

The first use in a process raises `MovedWarning` with the native line. Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converter.deltatorch.fields import FieldSpec
from converter.deltatorch.pytorch import create_pytorch_dataloader
from converter.deltatorch.warning import MovedWarning

if TYPE_CHECKING:
    from converter.deltatorch.deltadataset import DeltaIterableDataset
    from converter.deltatorch.id_based_deltadataset import IDBasedDeltaDataset

__all__ = ["DeltaIterableDataset", "FieldSpec", "IDBasedDeltaDataset", "MovedWarning", "create_pytorch_dataloader"]


def __getattr__(name: str) -> Any:
    # These are subclasses of torch's, so torch is loaded for them.
    if name == "DeltaIterableDataset":
        from converter.deltatorch.deltadataset import DeltaIterableDataset

        return DeltaIterableDataset
    if name == "IDBasedDeltaDataset":
        from converter.deltatorch.id_based_deltadataset import IDBasedDeltaDataset

        return IDBasedDeltaDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
