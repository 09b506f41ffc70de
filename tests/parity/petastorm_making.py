#!/usr/bin/env python3
"""The stores that Petastorm wrote, kept in the repository, with what Petastorm 0.13.1 reads of them.

`petastorm-<version>/<name>.tar.xz` holds a store's folder as that version's `materialize_dataset` and Spark wrote it,
less Hadoop's checksums. `petastorm-<version>/<name>.json.xz` holds what the reader of 0.13.1 hands out of it in each of
the ways of `petastorm_reads.py`. To make them again, in the repository's folder:

    PYTHON -m tests.parity.petastorm_making write FOLDER     # by a Python with Petastorm of any age and a Spark
    PYTHON -m tests.parity.petastorm_making read FOLDER VERSION     # by a Python with Petastorm 0.13.1 and torch
    python -m tests.parity.petastorm_making pack FOLDER VERSION

`petastorm_environments.py` beside this file makes such Pythons, `petastorm_python2.py` the store of a Python 2.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import shutil
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.parity.petastorm_stores import STORES, Package, write_store

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
READ_BY = "0.13.1"
OLD_VERSIONS = (
    "0.4.1-python2", "0.4.1", "0.5.1", "0.6.0", "0.7.7", "0.8.2", "0.9.8", "0.10.0", "0.11.5", "0.12.1",
)  # fmt: skip
VERSIONS = (READ_BY, *OLD_VERSIONS)


def make_session() -> Any:
    """A local Spark in UTC whose workers run this Python."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    confs = {
        "spark.sql.session.timeZone": "UTC", "spark.ui.enabled": "false", "spark.driver.host": "localhost",
        "spark.driver.extraJavaOptions": "-Duser.timezone=UTC", "spark.sql.shuffle.partitions": "1",
    }  # fmt: skip
    builder = SparkSession.builder.master("local[1]")
    for name, value in confs.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def url_of(folder: Path) -> str:
    return f"file://{folder.absolute()}"


def write(root: Path, package_name: str = "petastorm") -> None:
    """Write all stores that this version of a package is asked for into a folder of its version."""
    package = Package(package_name)
    # Ours has no version of its own, and writes all that the newest Petastorm does.
    text = getattr(package.top, "__version__", package_name)
    version = tuple(int(number) for number in (READ_BY if text == package_name else text).split(".")[:2])
    spark = make_session()
    for name, store in STORES.items():
        folder = root / text / name
        if version < store.since or (version < (0, 13) and store.frame):
            continue
        if not folder.exists():
            print("writing", folder)
            write_store(package, spark, name, url_of(folder))
    spark.stop()


def read_all(root: Path, version: str, package_name: str = "petastorm") -> dict[str, Any]:
    """What a package hands out of all stores in a folder."""
    from tests.parity.petastorm_reads import WAYS, read

    package = Package(package_name)
    found = {}
    for name in STORES:
        folder = root / version / name
        if folder.exists():
            found[name] = {way: read(package, run, url_of(folder)) for way, run in WAYS[name].items()}
    return found


def read_and_keep(root: Path, version: str) -> None:
    """Write down what the real Petastorm reads, beside the stores."""
    for name, known in read_all(root, version).items():
        lines = ",\n".join(f"{json.dumps(way)}: {json.dumps(found)}" for way, found in known.items())
        (root / version / f"{name}.json").write_text(f"{{\n{lines}\n}}\n")


def kept_in(version: str) -> Path:
    return HERE / f"petastorm-{version}"


def pack(root: Path, version: str) -> None:
    """Keep the stores in a folder, and what was read of them, instead of those that were kept before."""
    target = kept_in(version)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for name in STORES:
        folder = root / version / name
        if not folder.exists():
            continue
        with tarfile.open(target / f"{name}.tar.xz", "w:xz") as archive:
            for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".crc"):
                member = archive.gettarinfo(str(path), path.relative_to(root / version).as_posix())
                member.uid, member.gid, member.uname, member.gname, member.mtime = 0, 0, "", "", 0
                archive.addfile(member, io.BytesIO(path.read_bytes()))
        found = (root / version / f"{name}.json").read_bytes()
        if version == READ_BY or found != (root / READ_BY / f"{name}.json").read_bytes():
            (target / f"{name}.json.xz").write_bytes(lzma.compress(found))


def unpack(version: str, name: str, root: Path) -> Path:
    """Put a kept store into a folder of its own below `root`; that folder."""
    folder = root / version
    with tarfile.open(kept_in(version) / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def expected(version: str, name: str) -> dict[str, Any]:
    """What Petastorm 0.13.1 hands out of a kept store, by ways to read it."""
    own = kept_in(version) / f"{name}.json.xz"
    # What is read of an older version's store is mostly the same as of the newest one's.
    path = own if own.exists() else kept_in(READ_BY) / own.name
    return json.loads(lzma.decompress(path.read_bytes()))


COMMANDS: dict[str, Callable[..., None]] = {"write": write, "read": read_and_keep, "pack": pack}

if __name__ == "__main__":
    command, root_of_all, *rest = sys.argv[1:]
    COMMANDS[command](Path(root_of_all).absolute(), *rest)
