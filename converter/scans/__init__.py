"""Passes over a dataset that answer a question: which rows pass a filter or fall into a split, and statistics.

A pass (`passes`) reads only the columns that its question needs (`columns`). `filters` gives a filter its meaning
(`values`: exactly as Spark compares), and `pruning` turns it into skipped files and row groups. The result is a
`Selection`, or statistics.
"""
