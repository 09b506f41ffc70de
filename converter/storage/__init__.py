"""Where bytes lie: one file for each kind of store, and directories on them.

A new kind of store is one file with a subclass of `Store`, a line in `opening.py`, and its place in the contract
test that all stores pass (tests/contracts/storage.py). Only `urls.py` and the stores know what a URL means.
"""
