"""How rows are fetched, decoded, gathered and cut into batches.

From the bottom up: one column of one row group (`decode`), one file (`data_files`), one window of rows (`windows`).
Every row is copied once, without a loop over rows.
"""
