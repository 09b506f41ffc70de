"""Whether the files of a dataset are what its manifest says, and can be read."""

from __future__ import annotations

from dataclasses import replace

from converter.errors import ReadError, SourceError
from converter.loading.batches import numpy_batches
from converter.loading.options import LoaderOptions
from converter.manifest import Manifest
from converter.reading.windows import open_files
from converter.storage.directory import Storage


def find_damage(storage: Storage, manifest: Manifest, *, every_row: bool) -> list[str]:
    """What is wrong, a line for each file: empty if nothing is.

    A file's size, footer, number of rows and the places of its columns are compared with the manifest. With `every_row`
    all rows are read as well: each page is decoded, and compared with its checksum if it has one. That ends at the
    first damage.
    """
    options = LoaderOptions(
        batch_size=1 << 16, nulls="mask", ragged="nested", cur_shard=0, shard_count=1, verify_checksums=every_row
    )
    # The bytes in the files, whatever is made of them.
    source = options.make_source(storage, replace(manifest.of_rows, decoders={}, scales={}))
    files = open_files(source)
    first_of_file = {int(file): number for number, file in reversed([*enumerate(manifest.row_group_file.tolist())])}
    damage = []
    for number in first_of_file.values():
        file = files.file_of(number)
        try:
            with file.named_errors(number):
                files.open(file)
        except (ReadError, SourceError) as error:
            damage.append(str(error))
    if every_row and not damage:
        try:
            for _ in numpy_batches(source, source.plan(0), files):
                pass
        except (ReadError, SourceError) as error:
            damage.append(str(error))
    return damage
