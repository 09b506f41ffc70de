"""What `loader.stats()` says of slow loops whose reason is known, and what it counts.

Nine of ten must be right; `tests/bench/verdicts.py` prints the table.
"""

from __future__ import annotations

from pathlib import Path

from tests.servers.azurite import SlowAzurite
from tests.situations import SITUATIONS, slow_store


def test_nine_of_ten_verdicts_are_right(tmp_path: Path) -> None:
    wrong, busy = {}, 0
    for number, (name, (situation, right)) in enumerate(SITUATIONS.items()):
        stats = situation(tmp_path / str(number))
        if stats.limit not in right:
            # Once more: other tests may have disturbed it. A verdict that is wrong by itself is wrong again.
            stats = situation(tmp_path / f"{number}-again")
        # Beside other tests that may well be so.
        busy += stats.limit == "other programs"
        if stats.limit not in right | {"other programs"}:
            wrong[name] = str(stats)
    assert len(wrong) <= len(SITUATIONS) // 10, "\n\n".join(f"{name}: {said}" for name, said in wrong.items())
    assert busy <= 3


def test_a_slow_store_is_named_and_then_its_copies(slow_azurite: SlowAzurite, tmp_path: Path) -> None:
    stats = slow_store(slow_azurite, tmp_path / "a")
    assert stats.limit == "store", stats
    assert "a local_cache_dir would keep them" in stats.verdict
    assert stats.bytes_fetched > 200_000 * 10 * 4
    assert stats.bytes_from_local_cache == 0
    stats = slow_store(slow_azurite, tmp_path / "b", local_cache_dir=tmp_path / "copies")
    assert stats.limit == "cold cache", stats
    assert stats.bytes_fetched > 200_000 * 10 * 4
