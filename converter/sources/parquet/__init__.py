"""Parquet files that exist already become a manifest, from their footers alone."""
