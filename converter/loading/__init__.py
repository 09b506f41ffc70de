"""What every loader is, whatever it hands out: its options, its epochs and their state, its batches as NumPy's."""
