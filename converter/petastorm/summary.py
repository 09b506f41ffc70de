"""The file `_common_metadata` beside a store's files: reads what it holds, and writes it."""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import re
import uuid
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from converter.petastorm.pickle_records import PetastormMetadataError
from converter.storage.databricks import is_on_databricks
from converter.storage.directory import Storage
from converter.storage.opening import open_storage

NAME = "_common_metadata"
NAME_WITH_ROW_GROUPS = "_metadata"
_CHECKSUM = "._common_metadata.crc"


def as_it_is_called(url: str) -> str:
    """A local URL as the path that it names letter by letter, if that is there: Petastorm and Spark decode no `%20`."""
    path = re.sub(r"^file:(//[^/]*)?", "", url) if url.startswith("file:") else ""
    return path if "%" in path and os.path.exists(path) else url


def open_folder(url: str, storage_options: Mapping[str, Any] | None = None) -> Storage:
    """The folder that a URL names, or in which the file lies that it names. It need not exist."""
    scheme, sign, path = as_it_is_called(url).rpartition("://")
    # Petastorm takes several slashes in a path for one.
    folder = open_storage(scheme + sign + re.sub("/{2,}", "/", path), storage_options)
    return folder.at(posixpath.dirname(folder.path())) if folder.is_at_a_file else folder


def read_summary(folder: Storage) -> tuple[pq.FileMetaData, dict[bytes, bytes]] | None:
    """The footer in `_common_metadata`, else in `_metadata`, and its key-value metadata; None if there is neither.

    Raises:
        PetastormMetadataError: the file is no Parquet footer.
    """
    for name in (NAME, NAME_WITH_ROW_GROUPS):
        try:
            content = folder.read(name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            footer = pq.read_metadata(io.BytesIO(content))
            return footer, dict(footer.metadata or {})
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _refusal(folder, name, error) from error
    return None


def columns_of(folder: Storage, footer: pq.FileMetaData) -> pa.Schema:
    """The columns of a footer that `read_summary` returned.

    Raises:
        PetastormMetadataError: Arrow does not understand them.
    """
    try:
        return footer.schema.to_arrow_schema().remove_metadata()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _refusal(folder, NAME, error) from error


def _refusal(folder: Storage, name: str, error: Exception) -> PetastormMetadataError:
    return PetastormMetadataError(
        f"{folder.url}/{name} is no Parquet footer that can be read: {error}. Write the metadata again with "
        "converter.petastorm.etl.petastorm_generate_metadata.",
        path=f"{folder.url}/{name}",
    )


def write_summary(folder: Storage, columns: pa.Schema, metadata: Mapping[bytes, bytes]) -> None:
    """Write `_common_metadata` in place of what was there."""
    sink = io.BytesIO()
    # Arrow writes its own form of the columns anew.
    kept = {key: value for key, value in metadata.items() if key != b"ARROW:schema"}
    pq.write_metadata(columns.with_metadata(kept), sink)
    if folder.is_local:
        path = folder.path(NAME)
        # Mounts of Databricks have no exchange of two files; there a file appears when it is closed.
        aside = path if is_on_databricks(path) else f"{path}.{uuid.uuid4().hex}.tmp"
        with open(aside, "wb") as file:
            file.write(sink.getvalue())
        if aside != path:
            os.replace(aside, path)
        # Hadoop's own sum of what was there before.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(folder.path(_CHECKSUM))
        return
    folder.delete_file(NAME)
    if not folder.put_if_absent(NAME, sink.getvalue()):
        raise PetastormMetadataError(
            f"{folder.url}/{NAME} was written by another program at the same time. Let one program write the metadata.",
            path=f"{folder.url}/{NAME}",
        )
