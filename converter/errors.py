"""The errors that `converter` raises on purpose, as one tree, and its warnings.

    ConverterError
    ├── SourceError                    the input cannot be converted as given
    │   ├── UnsupportedTypeError       (also TypeError)    .column
    │   ├── NullValueError             (also ValueError)   .column
    │   └── SourceChangedError         the files no longer match the manifest   .path
    ├── CacheError                     the cache directory cannot be used   .path
    │   ├── CacheNotConfiguredError    (also ValueError)
    │   ├── CacheNotOwnedError         the directory is not ours
    │   └── CacheCorruptError          the files there are not those that were committed
    ├── ReadError                      .path .row_group
    ├── EmptyShardError                fewer rows than shards
    ├── StateMismatchError             (also ValueError): a state of other rows or another order
    └── MissingDependencyError         (also ImportError): names the extra to install

Bad argument values stay plain `ValueError` and `TypeError`.
Every warning is a `ConverterWarning`. `converter.messages` lists all texts.

Every class can be built from its message alone, because worker processes
(torch, Spark) rebuild an exception from its text and drop its attributes.
"""

from __future__ import annotations


class ConverterError(Exception):
    """The root of the tree: catch this to catch all of it.

    >>> issubclass(SourceChangedError, ConverterError)
    True
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)


class SourceError(ConverterError):
    """The input cannot be converted as it was given; `.column` names the column, if one is to blame."""

    def __init__(self, message: str, *, column: str | None = None, path: str | None = None) -> None:
        super().__init__(message)
        self.column = column
        self.path = path


class UnsupportedTypeError(SourceError, TypeError):
    """A column's type has no tensor form; `.column` names the first one, the message all of them."""


class NullValueError(SourceError, ValueError):
    """A column holds nulls where none are allowed; `.column` names the column."""


class SourceChangedError(SourceError):
    """A data file is gone or no longer the one that the manifest describes; `.path` names it."""


class CacheError(ConverterError):
    """The cache directory cannot be used; `.path` names it, if there is one."""

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class CacheNotConfiguredError(CacheError, ValueError):
    """No cache directory was given, and none is safe to assume."""


class CacheNotOwnedError(CacheError):
    """The directory was not made by this package, so nothing in it is read or removed."""


class CacheCorruptError(CacheError):
    """A committed entry does not hold what its manifest lists."""


class ReadError(ConverterError):
    """A row group could not be read; `.path` and `.row_group` name it."""

    def __init__(self, message: str, *, path: str | None = None, row_group: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.row_group = row_group


class EmptyShardError(ConverterError):
    """There are fewer rows than shards, so a shard would be empty."""


class StateMismatchError(ConverterError, ValueError):
    """A loader's state was taken from other rows, or with other options; the message names the difference."""


class MissingDependencyError(ConverterError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


class ConverterWarning(UserWarning):
    """A call works, but can be mended now: the message says how. Every warning of this package is one.

    What depends on the rows, the machine or other processes is logged instead, so that a program that runs without
    warnings once runs without them everywhere.

    >>> import warnings
    >>> warnings.filterwarnings("error", category=ConverterWarning)  # in a test, or "ignore"
    """
