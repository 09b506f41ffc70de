"""The errors that Petastorm's names promise."""

from __future__ import annotations

from converter.errors import EmptyShardError, ReadError


class NoDataAvailableError(EmptyShardError):
    """There are fewer row groups than shards, so that a shard would be empty; or epochs without end have no row."""


class DecodeFieldError(ReadError, RuntimeError):
    """A stored value is not what its field's codec or dtype expects; the message names the field."""
