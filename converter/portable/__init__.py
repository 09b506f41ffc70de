"""What also runs on Spark's executors, where this package need not be installed.

A write sends these modules by value. So they import NumPy, pyarrow, fsspec and one another alone, and of one another
names, not modules: a name travels with the function that uses it, a module would be imported there.
Readers and stores use them as well.
"""
