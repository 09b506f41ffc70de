"""Petastorm's public names on top of the native engine: change `petastorm` to `converter.petastorm` in imports.

    from converter.petastorm import make_reader, make_batch_reader, TransformSpec

Rows, types, shapes, counts and classes of errors are Petastorm's. Stores that Petastorm wrote are read, and
`materialize_dataset` writes stores that Petastorm can read; nothing in a store is ever unpickled.

| old name | native way | what differs here from Petastorm 0.13 |
|---|---|---|
| `make_batch_reader` | `make_parquet_converter` and a loader | strings with nulls are objects with None, not the text 'None' |
| `make_reader` | `make_parquet_converter(…, decode=…)` | pictures are decoded without OpenCV |
| `Reader`, `num_epochs` | `num_epochs=` of a loader | each epoch has another order, also with a seed |
| a converter's `cur_shard`, `shard_count` | the same | without them the rank is found in the environment of Horovod, MPI or torchrun |
| `cur_shard`, `shard_count` | the same, or found by itself | a seed changes which row groups a shard has; sizes differ by at most one; `NoDataAvailableError` also if too few row groups are left after predicate and selector |
| `seed` | `seed=` | 0 is a seed like any other; loaders use the reader's seed |
| `shuffle_rows` with `predicate` | `shuffle=True, filters=…` | rows stay whole (Petastorm mixed columns of different rows) |
| `predicate` with `make_batch_reader` | `filters=`, `where` | all predicates work, dtypes stay, `removed_fields` and tensors too |
| `predicate` on several partition columns | `filters=` | works |
| wrong shards, `num_epochs`, `shuffle_row_drop_partitions`, folders without files | | refused (Petastorm reads nothing, or loses rows) |
| an error of a transform | | `next()` raises it again; nothing is left out without a word |
| `filters` | `filters=` | rows are filtered exactly, not row groups alone |
| `cache_type="local-disk"` | `local_cache_dir=` | keeps bytes of remote stores, never decoded rows; works with predicates |
| `reader_pool_type`, `workers_count` | `workers_count=` | threads read, at most one for each core up to four; `"process"` runs a transform in processes of its own |
| `hdfs_driver`, `pyarrow_serialize`, `zmq_copy_buffers`, `results_queue_size` | | accepted, do nothing |
| `DataLoader` | `make_torch_dataloader` | no row of the last batch comes again in the next pass; takes readers with `NGram`; `batch_size` below 1 is refused |
| `BatchedDataLoader` | `make_torch_dataloader` | with a shuffling queue rows of the whole store are mixed, not of a few row groups |
| `make_petastorm_dataset` | `make_tf_dataset` | decimals of batches and times of rows work; a null among whole numbers, times or texts is an error; `unbatch().batch(n)` cuts columns |
| `NGram` | `sequences` | |
| `WeightedSamplingReader` | `mix` | `len()` is gone, `reset()` is there; probabilities that are none are refused |
| `TransformSpec` | `transform=` of a loader | |
| `SparkDatasetConverter` | `make_spark_converter` | data of a URL are never deleted |
| `CompressedImageCodec` | `decode={"x": Image()}` | needs the extra `images` |
| `NdarrayCodec` | `decode={"x": NumPy()}` | |
| `materialize_dataset` | `make_spark_converter`, `df.write` | also writes the schema as JSON |

Values, where Petastorm lost or garbled them:

| stored | here | Petastorm 0.13 |
|---|---|---|
| a null in a text column of batches | None | the text 'None' |
| whole numbers beside nulls in batches that doubles would round | objects | rounded |
| a null time in rows | None | `DecodeFieldError` |
| times of `dataset_as_rdd` | of UTC, as a reader's | of the executor's zone |
| texts of partition columns in a copy of a dataset | kept | numbers, as `7` of `007` |
| times of a column of nanoseconds in rows | `datetime64[ns]` | `datetime64[us]`, nanoseconds cut |
| lists of times or decimals in rows | lists of them | an error |
| lists of texts or bytes without a codec | arrays of objects | one text of them all, or pointers |
| a list of one float64 | a list | a number |
| a null in a list of booleans | `DecodeFieldError` | False |
| bytes of a text field | the text | the text "b'…'" |
| numbers that the declared type would wrap, cut or round | `DecodeFieldError` | other numbers |
| texts and bytes that end with zeros | Python's own | NumPy's, which lose the zeros in pickles |
| false in a boolean partition column | False | True |
| partition values with escaped signs | unescaped | as in the folder's name |
| big-endian arrays | of this machine's order | as they are, which torch refuses |
| pictures of other dtypes than uint8 and uint16 | refused on encode | made uint8 |
| a picture that cannot be decoded | `DecodeFieldError` | `AttributeError` |

The first use in a process raises `PetastormDeprecationWarning` with the native lines.
"""

from __future__ import annotations

from converter.petastorm.reader import make_batch_reader, make_reader
from converter.petastorm.transform import TransformSpec
from converter.petastorm.warning import PetastormDeprecationWarning

__all__ = ["PetastormDeprecationWarning", "TransformSpec", "make_batch_reader", "make_reader"]
