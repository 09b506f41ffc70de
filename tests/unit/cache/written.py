"""Entries as their writers leave them, made without Spark."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np

from converter.cache import entries, roots
from converter.cache.entries import HeldEntry
from converter.manifest import Manifest, Origin
from converter.schema import Field, Schema
from converter.sources.spark import identity
from converter.storage.directory import Storage
from tests.faults.small_entries import write_data

KEY = "0123456789abcdef-fedcba9876543210"
OTHER_KEY = "f" * 16 + "-" + "0" * 16


def write_attempt(root: Storage, *, files: int = 2, mark: str = "a") -> tuple[entries.Attempt, Manifest]:
    """An attempt whose executors are done: its files, and the manifest that the driver would commit."""
    attempt = entries.begin(root, KEY, application_id="app-1")
    data = root.below(KEY, attempt.data_directory)
    data.make_directory()
    names = [f"part-{number:05d}-{number + 10:08x}-0000.parquet" for number in range(files)]
    for number, name in enumerate(names):
        assert data.put_if_absent(name, mark.encode() * (100 + number))
    manifest = Manifest(
        schema=Schema((Field(name="x", dtype="float32"),)),
        file_names=tuple(f"{attempt.data_directory}/{name}" for name in names),
        file_bytes=np.arange(files, dtype=np.int64) + 100,
        row_group_file=np.arange(files, dtype=np.int64),
        row_group_rows=np.full(files, 5, np.int64),
        row_group_bytes=np.full(files, 20, np.int64),
        fingerprint=mark * 32,
        num_rows=5 * files,
        statistics={},
    )
    return attempt, manifest


def commit(root: Storage, **options: Any) -> HeldEntry:
    """A committed entry, held by its maker."""
    attempt, manifest = write_attempt(root, **options)
    held = entries.commit(root, attempt, manifest)
    assert held.manifest is manifest
    return held


def name_entry(cache_dir: Path, cache_key: str, *, schema: str = "{}", is_kept: bool = True) -> str:
    """The URL of an entry that was written as `cache_key` and that nobody holds."""
    root = roots.open_root(str(cache_dir))
    named = identity.named(cache_key)
    key = identity.entry_key(named, schema=schema, write_options={"is_kept": True} if is_kept else {})
    attempt = entries.begin(root, key, application_id="app-1")
    origin = Origin(
        cache_key=cache_key, created="2026-11-20T01:02:03+00:00", host="h", application_id="a", user="u",
        source="DataFrame",
    )  # fmt: skip
    manifest = dataclasses.replace(write_data(root, attempt, is_kept=is_kept), origin=origin)
    entries.commit(root, attempt, manifest).release()
    return root.below(key).url


def signs(ours: Path) -> list[str]:
    """The leases and intents that stand in the entry."""
    return [path.name for path in (ours / KEY).iterdir() if path.name.startswith("lease-") or ".intent" in path.name]


def silence(path: Path, seconds: float = 1e6) -> None:
    """As if its owner had been silent for so long."""
    moment = path.stat().st_mtime - seconds
    os.utime(path, (moment, moment))
