"""What also runs on Spark's executors, where this package need not be installed.

A write sends these modules by value. So they import NumPy, pyarrow, fsspec and one another, nothing else, and names
instead of modules: what a pickled function names travels with it, a module would be looked for there.
Readers and stores use them as well.
"""
