"""Whether the files of a dataset are what its manifest says, and can be read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from converter.errors import ReadError, SourceError
from converter.loading.batches import numpy_batches
from converter.loading.options import LoaderOptions
from converter.manifest import Manifest
from converter.reading.windows import open_files
from converter.selection import select_some
from converter.storage.directory import Storage


def find_damage(storage: Storage, manifest: Manifest, *, every_row: bool) -> list[str]:
    """What is wrong, a line for each file: empty if nothing is.

    A file's size, footer, number of rows and the places of its columns are compared with the manifest. With `every_row`
    all rows are read as well: each page is decoded, and compared with its checksum if it has one. In each file that
    ends at the first damage.

    Raises:
        ReadError: a file may not be read, or its store does not answer.
    """
    options = LoaderOptions(
        batch_size=1 << 16, nulls="mask", ragged="nested", cur_shard=0, shard_count=1, verify_checksums=every_row
    )
    # The bytes in the files, whatever is made of them.
    source = options.make_source(storage, replace(manifest.of_rows, decoders={}, scales={}))
    files = open_files(source)
    first_of_file = {int(file): number for number, file in reversed([*enumerate(manifest.row_group_file.tolist())])}
    damage, whole = [], []
    for number in sorted(first_of_file.values()):
        file = files.file_of(number)
        try:
            with file.named_errors(number):
                files.open(file)
        except (ReadError, SourceError) as error:
            _raise_if_forbidden(error)
            damage.append(str(error))
        else:
            whole.append(int(manifest.row_group_file[number]))
    for number in whole if every_row else ():
        rows = np.where(manifest.row_group_file == number, manifest.row_group_rows, 0)
        chosen = replace(source, manifest=replace(source.manifest, selection=select_some(rows, {})))
        try:
            for _ in numpy_batches(chosen, chosen.plan(0), files):
                pass
        except (ReadError, SourceError) as error:
            _raise_if_forbidden(error)
            damage.append(str(error))
    return damage


def _raise_if_forbidden(error: Exception) -> None:
    """Raise the error if the file could not be reached: that says nothing about what is in it."""
    if isinstance(error.__cause__, PermissionError | TimeoutError):
        raise error
