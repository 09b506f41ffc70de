"""Parquet whose first column is encrypted, as Spark writes it with keys."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.parquet import encryption


class _Keys(encryption.KmsClient):
    """Keys that wrap nothing."""

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> str:
        return base64.b64encode(key_bytes).decode()

    def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> bytes:
        return base64.b64decode(wrapped_key)


def write_encrypted(path: Path, columns: Mapping[str, Any], *, plaintext_footer: bool) -> None:
    """Write the columns, the first of which needs a key; so does the footer, unless it is plain text."""
    asked = encryption.EncryptionConfiguration(
        footer_key="f", column_keys={"k": [next(iter(columns))]}, plaintext_footer=plaintext_footer
    )
    factory = encryption.CryptoFactory(lambda _: _Keys())
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), asked)
    pq.write_table(pa.table(dict(columns)), path, encryption_properties=properties)
