"""Buffers between a reader and a loader: rows one by one, or in columns."""
