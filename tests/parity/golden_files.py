"""The golden tables as files that are kept in the repository, so that a test needs neither Spark nor Delta for them.

`delta-4.4.0/<name>.tar.xz` holds the folder of a table, byte for byte as Delta wrote it and with the times of its files
(Delta finds a version by the time of its commit), and the rows that Spark reads of each version. `index.json` beside
the archives says what is known of each version. To make them again, with Delta's jars from Maven:

    python -m tests.parity.golden_files FOLDER

Spark makes the tables in FOLDER, which may be removed afterwards; tables that are there already are only packed. It
takes 4 to 7 minutes on two cores, and took 22 when many other programs used them.

Only the log of a clone is changed when it is unpacked: it names files by absolute paths. In the long lane of tests a
clone is made afresh, beside other tables of many features, and has the rows that are kept.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import tarfile
from pathlib import Path
from urllib.parse import quote

from tests.parity.golden_making import INDEX, Index, folder_of, make_tables
from tests.parity.golden_tables import PACKAGE, TABLES

KEPT = Path(__file__).with_name(f"delta-{PACKAGE.rpartition(':')[2]}")


def read_index(root: Path) -> Index:
    """What is known of the tables in a folder, or of those that are kept."""
    index: Index = json.loads((root / INDEX).read_text())
    return index


def pack(root: Path) -> None:
    """Keep the tables in `root` instead of those that were kept before."""
    index = read_index(root)
    assert list(index["tables"]) == list(TABLES), f"not every table is there: {index['failures']}"
    shutil.rmtree(KEPT, ignore_errors=True)
    KEPT.mkdir()
    shutil.copyfile(root / INDEX, KEPT / INDEX)
    for name in TABLES:
        folder = folder_of(root, name)
        folders = (folder, folder.with_name(f"{folder.name} of origin"), root / "rows" / name)
        with tarfile.open(_archive_of(name), "w:xz") as archive:
            for path in sorted(path for folder in folders for path in folder.rglob("*")):
                member = archive.gettarinfo(path, path.relative_to(root).as_posix())
                member.uid, member.gid, member.uname, member.gname = 0, 0, "", ""
                archive.addfile(member, io.BytesIO(path.read_bytes()) if member.isfile() else None)


def unpack(root: Path) -> None:
    """Put the kept tables, their rows and their index into an empty folder."""
    index = read_index(KEPT)
    made_in, unpacked_in = (f"file:{quote(str(folder))}/".encode() for folder in (index["root"], root))
    shutil.copyfile(KEPT / INDEX, root / INDEX)
    for name in index["tables"]:
        with tarfile.open(_archive_of(name)) as archive:
            archive.extractall(root, filter="data")
        log = folder_of(root, name) / "_delta_log"
        if any(made_in in commit.read_bytes() for commit in log.glob("*.json")):
            _move_log(log, made_in, unpacked_in)


def _move_log(log: Path, made_in: bytes, unpacked_in: bytes) -> None:
    """Let a log that names files by absolute paths name them in another folder.

    Its checkpoints and Hadoop's checksums are removed, for their bytes cannot be replaced; the commits say the same.
    """
    for path in log.iterdir():
        if path.suffix == ".parquet" or path.name == "_last_checkpoint" or path.name.startswith("."):
            path.unlink()
        elif path.is_file():
            path.write_bytes(path.read_bytes().replace(made_in, unpacked_in))


def _archive_of(name: str) -> Path:
    return KEPT / f"{name}.tar.xz"


if __name__ == "__main__":
    folder = Path(sys.argv[1]).absolute()
    if not (folder / INDEX).exists():
        make_tables(str(folder))
    pack(folder)
