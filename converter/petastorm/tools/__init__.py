"""Commands: copies of datasets, and the arguments that commands with Spark share."""
