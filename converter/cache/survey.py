"""What lies in a cache directory and who holds it. Looking changes nothing and holds nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass

from converter.cache.entries import load_manifest
from converter.cache.finding import list_entries
from converter.cache.leases import is_dead, read_sign
from converter.cache.roots import ATTEMPT_PATTERN, LEASE_PATTERN, named_errors
from converter.errors import CacheError
from converter.manifest import Manifest
from converter.storage.directory import FileInfo, Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that uses or writes an entry."""

    host: str
    pid: int
    since: float
    """When it began, in seconds since 1970, by its own clock."""

    silent_seconds: float
    """How long ago it last showed that it lives, by the store's clock."""

    is_writing: bool
    is_dead: bool
    """Whether it is gone: a sweep removes what it has left."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surveyed:
    """An entry, committed or not."""

    url: str
    manifest: Manifest | None
    """None if it is not committed, or cannot be read."""

    problem: str = ""
    """Why it cannot be read."""

    num_bytes: int
    """Of its data files, unfinished ones too."""

    idle_seconds: float
    """How long ago anything in it changed, by the store's clock."""

    holders: tuple[Holder, ...]


@named_errors
def survey(root: Storage) -> list[Surveyed]:
    """Each entry of a cache; the largest first.

    Raises:
        CacheError: the store failed.
    """
    entries = list_entries(root)
    if not entries:
        return []
    try:
        now = root.now()
    except OSError:
        # Who may not write here has the clock of this machine.
        now = time.time()
    found = [_look_at(root, info, now) for info in entries]
    return sorted((one for one in found if one is not None), key=lambda one: -one.num_bytes)


def _look_at(root: Storage, folder: FileInfo, now: float) -> Surveyed | None:
    entry = root.below(folder.name)
    infos = entry.list()
    if not infos:
        return None  # Deleted just now.
    manifest, problem = None, ""
    try:
        manifest = load_manifest(root, folder.name)
    except CacheError as error:
        problem = str(error)
    attempts = [info.name for info in infos if info.is_directory and ATTEMPT_PATTERN.fullmatch(info.name)]
    holders = [_holder_of(entry, info, now) for info in infos]
    return Surveyed(
        url=entry.url,
        manifest=manifest,
        problem=problem,
        num_bytes=sum(info.num_bytes for name in attempts for info in entry.below(name).list()),
        idle_seconds=max(0.0, now - max(folder.modified, *(info.modified for info in infos))),
        holders=tuple(holder for holder in holders if holder is not None),
    )


def _holder_of(entry: Storage, info: FileInfo, now: float) -> Holder | None:
    is_writing = info.name.endswith(".intent")
    if info.is_directory or not (is_writing or LEASE_PATTERN.fullmatch(info.name)):
        return None
    sign = read_sign(entry, info.name)
    if sign is None:
        return None  # Released just now.
    pid, since = sign.get("pid"), sign.get("created")
    return Holder(
        host=str(sign.get("host", "?")).partition("/")[0],
        pid=pid if isinstance(pid, int) else 0,
        since=float(since) if isinstance(since, (int, float)) else info.modified,
        silent_seconds=max(0.0, now - info.modified),
        is_writing=is_writing,
        is_dead=is_dead(entry, info, now=now),
    )
