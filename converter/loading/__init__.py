"""What all loaders share: options, epochs and their state, NumPy batches, and what a loader will cost."""
