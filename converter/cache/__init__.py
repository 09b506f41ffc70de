"""The cache: how an entry is written, found, used and removed.

An entry appears whole or not at all. Nothing is removed that we did not write, or that a live process uses.
"""
