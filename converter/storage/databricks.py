"""How Databricks names the same file to Spark and to Python."""

from __future__ import annotations

import os

_DATABRICKS_MOUNTS = ("/dbfs/", "/Volumes/")


def is_on_databricks(path: str) -> bool:
    """Whether a local path is on one of Databricks' mounts, which the JVM knows by another name."""
    return path.startswith(_DATABRICKS_MOUNTS)


def spark_url_of(path: str) -> str:
    """A local path as Spark takes it.

    >>> spark_url_of("/data/cache"), spark_url_of("/dbfs/cache"), spark_url_of("/Volumes/main/ml/cache")
    ('file:///data/cache', 'dbfs:/cache', 'dbfs:/Volumes/main/ml/cache')
    """
    if is_on_databricks(path):
        return "dbfs:" + path.removeprefix("/dbfs")
    return f"file://{path}"


def python_path_of(url: str) -> str:
    """Where Python finds what Spark knows as `dbfs:/…`.

    >>> python_path_of("dbfs:/cache"), python_path_of("dbfs:///cache"), python_path_of("dbfs:/Volumes/main/ml/cache")
    ('/dbfs/cache', '/dbfs/cache', '/Volumes/main/ml/cache')
    """
    path = "/" + url.removeprefix("dbfs:").lstrip("/")
    return path if path.startswith("/Volumes/") else "/dbfs" + path


def check_mount(url: str, path: str) -> None:
    """Raise ValueError if a Databricks path is on a mount that is not there."""
    mount = "/" + path.split("/")[1]
    if not os.path.isdir(mount):
        raise ValueError(
            f"{url} is reached through {mount}, which this machine does not have. On Databricks choose a path of a "
            "volume, /Volumes/<catalog>/<schema>/<volume>/…."
        )


def create_on_databricks(path: str, data: bytes) -> bool:
    """Create a file on a mount, which has no hard links: it appears when it is closed. False if the name is taken."""
    try:
        with open(path, "xb") as file:
            file.write(data)
    except FileExistsError:
        return False
    return True
