"""What the rows are: each source turns its input into a `Manifest`.

A new source is one folder here, or one file, with a function that returns a storage and a manifest of Parquet files on
it, and the contract test that all sources pass (tests/contracts/sources.py). Nothing below knows which source it was.
"""
