"""A Spark DataFrame becomes a cache entry: reused if one provably holds the same rows, else written once."""
