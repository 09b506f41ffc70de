"""Rows whose every value is a function of (row id, column name).

So a wrong row, a swapped column or a buffer that two batches share shows in the values. Both sides stand here: the
Spark expression that makes a column, and the NumPy values that a reader must find.
"""
