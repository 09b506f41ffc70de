"""How rows are fetched, decoded, gathered and cut into batches: every row is copied once, without a loop over rows.

From the bottom up: one file (`checks`, `open_file`, `data_files`), one column of one row group (`decode`, `row_groups`;
columns of lists become tensors in `decode` and `pages`), one window of rows (`gather`, `windows`), batches (`runs`).
"""
