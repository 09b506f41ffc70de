"""What the rows are: each source turns its input into a storage and a `Manifest` of Parquet files on it.

To add a source whose rows lie in Parquet files:

1. Write one file here, `converter/sources/<name>.py`, with one function that returns `(storage, manifest)`:
   `open_storage(url)` gives the storage of a folder, and `parquet.fields.manifest_of(storage, {file name: partition
   values})` the manifest of files below it. It raises `SourceError` for input that cannot be read.
2. Write one test, a subclass of `SourceContract` (tests/contracts/sources.py): `write` puts the contract's rows where
   the source finds them, `find` calls the function. `tests/unit/sources/test_contract.py` shows it with a text file
   that lists Parquet files.

That is the whole source. Users reach it through a function in `make.py`, which makes a `DatasetConverter` of the pair.

A source that writes its rows first (`spark`) commits them as a cache entry instead. No room above knows which source
a manifest came from.
"""
