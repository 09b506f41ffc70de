"""Reproducible random numbers: the same for a name on every machine and with every version of NumPy."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt


def random_numbers(name: str, size: int, *, stream: int = 0) -> npt.NDArray[np.uint64]:
    """Random 64-bit numbers that depend on a name and on the number of a stream.

    NumPy promises that Philox's raw output never changes, but not what its generators make of it.
    """
    digest = hashlib.sha256(name.encode()).digest()
    generator = np.random.Philox(key=int.from_bytes(digest[:16], "little"), counter=[0, 0, 0, stream])
    return generator.random_raw(size)


def permutation(name: str, size: int, *, stream: int = 0) -> npt.NDArray[np.int64]:
    """A uniform permutation of `range(size)`.

    Raw numbers are sorted, with the index in their lowest bits: no two are equal, and sorting takes 4.9 ns a row
    (`argsort` 11.7).

    >>> sorted(permutation("x", 4).tolist())
    [0, 1, 2, 3]
    """
    index_bits = np.uint64((1 << max(size - 1, 0).bit_length()) - 1)
    numbers = random_numbers(name, size, stream=stream)
    numbers &= ~index_bits
    numbers |= np.arange(size, dtype=np.uint64)
    numbers.sort()
    numbers &= index_bits
    return numbers.view(np.int64)
