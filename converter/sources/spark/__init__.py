"""A Spark DataFrame becomes an entry of the cache: found again if it is the same, else written once."""
