"""One version of a Delta table becomes a manifest, from its log and the footers of some of its files."""
