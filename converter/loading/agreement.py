"""Ranks of one training that would read differently are told so, all of them, before any of them hangs.

Ranks that take different numbers of steps, or other rows, end in a collective for which some of them wait for ever. So
when a shuffled loader begins, each rank says in the store of torch.distributed what it is about to read. No collective
is used: a rank that never comes is waited for only so long.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

from converter.errors import ConverterError

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 60.0
"""How long a rank waits for the others; then it goes on alone."""

_LOOK_SECONDS = 0.25


def _store_of_ranks() -> Any:
    """The store of torch.distributed; None if it is not initialised.

    Reaches into: torch.distributed.distributed_c10d._get_default_store (torch 2.15).
    Without it: ranks that disagree are not told.
    """
    distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    get_store = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_get_default_store", None)
    return None if get_store is None else get_store()


def check_agreement(what: Mapping[str, Any], rank: int, num_ranks: int) -> None:
    """Compare what the ranks are about to read.

    Raises:
        ConverterError: they differ; on every rank, with the names of what differs.
    """
    store = _store_of_ranks()
    if store is None:
        return
    # The n-th loaders of all ranks are compared. Counted there: a process may have several stores, one after the other.
    prefix = f"converter/{num_ranks}/{store.add(f'converter/{num_ranks}/begun/{rank}', 1)}"
    text = json.dumps({"rank": rank, **what})
    # What came first stays.
    first, own = json.loads(store.compare_set(f"{prefix}/first", "", text)), json.loads(text)
    odd = [name for name in what if first[name] != own[name]]
    if odd:
        store.set(f"{prefix}/odd", _difference(first, own, odd))
    if store.add(f"{prefix}/arrived", 1) == num_ranks:
        store.set(f"{prefix}/all", "1")
    _wait(store, prefix, num_ranks)
    if odd or store.check([f"{prefix}/odd"]):
        raise ConverterError(store.get(f"{prefix}/odd").decode())


def _difference(first: Mapping[str, Any], other: Mapping[str, Any], names: list[str]) -> str:
    parts = [f"{name} is {first[name]!r} on rank {first['rank']} and {other[name]!r} on rank {other['rank']}"
             for name in names]  # fmt: skip
    return (
        f"The ranks of this training would not read parts of one epoch: {'; '.join(parts)}. Give all ranks the same "
        "arguments, rows and saved state; or, if they are to differ, pass cur_shard and shard_count."
    )


def _wait(store: Any, prefix: str, num_ranks: int) -> None:
    """Wait until all ranks have said what they read, but not for ever."""
    until, pause_seconds = time.monotonic() + _WAIT_SECONDS, 0.001
    while time.monotonic() < until:
        # The store's own waiting cannot be interrupted, and torch writes to stderr each time that it ends in vain.
        if store.check([f"{prefix}/all"]):
            return
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, _LOOK_SECONDS)
    logger.warning(
        "Only %d of %d ranks have begun to read this shuffled loader after %.0f seconds; this one goes on. If the "
        "others do not read, pass cur_shard=0, shard_count=1 here; if they do, give all ranks the same shuffle, and no "
        "cur_shard.",
        store.add(f"{prefix}/arrived", 0), num_ranks, _WAIT_SECONDS,
    )  # fmt: skip
