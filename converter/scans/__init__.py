"""Passes over a dataset that answer a question: which rows pass a filter or are in a split, and statistics."""
