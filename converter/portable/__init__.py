"""The code that travels to Spark's executors, by value; `tasks` is what a task runs, `sources.spark.session` sends it.

A write sends these modules by value. So they import NumPy, pyarrow, fsspec and one another alone, and of one another
names, not modules: a name travels with the function that uses it, a module would be imported there.
Readers and stores use them as well.
"""
