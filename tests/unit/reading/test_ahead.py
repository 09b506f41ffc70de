"""Threads work ahead of who reads, in order, and learn that nobody waits."""

from __future__ import annotations

import threading

from converter.reading.ahead import read_ahead


def test_results_come_in_order_and_the_end_is_told() -> None:
    given_up = threading.Event()
    results = read_ahead(lambda item: item * 2, iter(range(9)), workers_count=3, ahead=4, given_up=[given_up])
    assert next(results) == 0
    assert not given_up.is_set()
    results.close()
    assert given_up.is_set()
    assert list(read_ahead(lambda item: item * 2, iter(range(9)), workers_count=3, ahead=4)) == list(range(0, 18, 2))
