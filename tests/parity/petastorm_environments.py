#!/usr/bin/env python3
"""Makes the environments in which old Petastorms wrote the stores that are kept; by hand, before `petastorm_making.py`.

    python tests/parity/petastorm_environments.py FOLDER --python3.7 PYTHON --python2.7 PYTHON [--only VERSION …]

Each version gets the newest pyarrow and NumPy of its time. All share one Spark 3.4, the newest that Python 3.7 runs and
the oldest that Java 17 does. For Python 2 there are only packages in two folders, for its PYTHONPATH:
`FOLDER/python2` and `FOLDER/python2-spark`, a PySpark 2.4 without its jars. Petastorm 0.13.1 has the environment that
`tests/bench/images.py` makes. It reads what Petastorm wrote before 0.7 only with a PySpark before 3.3 on its
PYTHONPATH, `FOLDER/spark-3.2`: the pickle calls a function there that later ones lack.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

REQUIREMENTS = {
    "0.4.1": ("pyarrow==0.12.1", "numpy==1.16.6", "pandas==0.24.2"),
    "0.5.1": ("pyarrow==0.12.1", "numpy==1.16.6", "pandas==0.24.2"),
    "0.6.0": ("pyarrow==0.12.1", "numpy==1.16.6", "pandas==0.24.2"),
    "0.7.7": ("pyarrow==0.14.1", "numpy==1.16.6", "pandas==0.25.3"),
    "0.8.2": ("pyarrow==0.15.1", "numpy==1.16.6", "pandas==0.25.3"),
    "0.9.8": ("pyarrow==0.17.1", "numpy==1.17.5", "pandas==1.0.5"),
    "0.10.0": ("pyarrow==2.0.0", "numpy==1.19.5", "pandas==1.1.5"),
    "0.11.5": ("pyarrow==6.0.1", "numpy==1.21.6", "pandas==1.3.5"),
    "0.12.1": ("pyarrow==12.0.1", "numpy==1.21.6", "pandas==1.3.5"),
}
SHARED = (
    "six", "future", "psutil", "pyzmq", "dill", "diskcache", "packaging", "pytz", "fsspec", "py4j==0.10.9.7",
    "opencv-python-headless==4.5.1.48", "setuptools<60",
)  # fmt: skip
PYTHON2 = (
    "pyarrow==0.12.1", "numpy==1.16.6", "pandas==0.24.2", "six==1.16", "future==0.18.2", "psutil<6", "pyzmq<20",
    "dill==0.3.4", "diskcache<5", "packaging==20.9", "pytz", "futures", "opencv-python-headless==4.1.2.30",
    "py4j==0.10.7",
)  # fmt: skip


def pip(python: str, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True)


def make_spark(python: str, folder: Path, version: str, *, jars: bool) -> None:
    """A PySpark in a folder of its own."""
    if not folder.exists():
        pip(python, "--no-deps", "--target", str(folder), f"pyspark=={version}")
        for name in ("examples", *(() if jars else ("jars",))):
            shutil.rmtree(folder / "pyspark" / name)


def make_old(root: Path, python: str, versions: Sequence[str]) -> None:
    """The environments of Python 3.7."""
    spark = root / "spark-3.4"
    make_spark(python, spark, "3.4.4", jars=True)
    for version in versions:
        folder = root / version
        if not folder.exists():
            subprocess.run([python, "-m", "venv", str(folder)], check=True)
            own = str(folder / "bin" / "python")
            pip(own, *REQUIREMENTS[version], *SHARED)
            pip(own, "--no-deps", f"petastorm=={version}")
            (packages,) = folder.glob("lib/python*/site-packages")
            (packages / "spark.pth").write_text(str(spark))


def main() -> None:
    """Make what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python3.7", dest="python3", required=True, help="a Python 3.7")
    parser.add_argument("--python2.7", dest="python2", required=True, help="a Python 2.7 with pip")
    parser.add_argument("--only", nargs="+", default=[*REQUIREMENTS], choices=REQUIREMENTS, metavar="VERSION")
    options = parser.parse_args()
    root = options.folder.absolute()
    os.makedirs(root, exist_ok=True)
    make_old(root, options.python3, options.only)
    make_spark(options.python3, root / "spark-3.2", "3.2.4", jars=False)
    # Python 2's pip cannot build it, and need not.
    make_spark(options.python3, root / "python2-spark", "2.4.8", jars=False)
    if not (root / "python2").exists():
        pip(options.python2, "--target", str(root / "python2"), *PYTHON2)
        pip(options.python2, "--target", str(root / "python2"), "--no-deps", "petastorm==0.4.1")


if __name__ == "__main__":
    main()
