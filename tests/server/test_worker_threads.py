"""Whose turn it is with the threads that get requests ready."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from typing import Any

import pytest

from jaxserve.server.service_level import Caller, place_at_a_glance
from jaxserve.server.worker_threads import FIRST, MAX_HANDED_OVER, NUM_THREADS, Place, WorkerThreads

NORMAL, LATER = (0, 0), (1, 0)


def order_of_work(places: list[Place], *, leaving: frozenset[int] = frozenset()) -> list[int]:
    """In which order `places` have their turn, of whom all come while the threads are busy.

    Args:
      leaving: of these, who is cancelled while he waits.
    """
    done: list[int] = []
    begin, end = threading.Event(), threading.Event()

    async def run() -> None:
        threads = WorkerThreads()
        # All threads but one have something to do until the end, so that the others come one after the other.
        held = [asyncio.create_task(threads.run(FIRST, end.wait)) for _ in range(NUM_THREADS - 1)]
        await asyncio.sleep(0)
        for _ in range(MAX_HANDED_OVER - len(held)):
            held.append(asyncio.create_task(threads.run(FIRST, begin.wait)))
        await asyncio.sleep(0)
        waiting = [
            asyncio.create_task(threads.run(place, functools.partial(done.append, index)))
            for index, place in enumerate(places)
        ]
        await asyncio.sleep(0)
        for index in leaving:
            waiting[index].cancel()
        begin.set()
        await asyncio.gather(*(task for index, task in enumerate(waiting) if index not in leaving))
        end.set()
        await asyncio.gather(*held)
        threads.close()

    asyncio.run(asyncio.wait_for(run(), 30))
    return done


def test_the_more_urgent_do_not_stand_behind_a_crowd() -> None:
    crowd = [Place(LATER)] * 50
    order = order_of_work([*crowd, Place(NORMAL), Place((0, -1))])
    assert set(order) == set(range(52))
    assert set(order[:2]) == {50, 51}
    assert order[2:] == list(range(50))  # equals in the order of their arrival


def test_a_client_that_asks_for_less_does_not_stand_behind_one_that_asks_for_more() -> None:
    order = order_of_work([*[Place(NORMAL, "crowd")] * 50, *[Place(NORMAL, "few")] * 3])
    assert max(order.index(index) for index in (50, 51, 52)) < 8


def test_who_leaves_before_his_turn_costs_nothing() -> None:
    leaving = frozenset({1, 3})
    order = order_of_work([Place(NORMAL)] * 6, leaving=leaving)
    assert sorted(order) == [0, 2, 4, 5]


def test_errors_reach_who_asked_and_the_threads_go_on() -> None:
    def fail() -> None:
        raise ValueError("no")

    async def run() -> list[Any]:
        threads = WorkerThreads()
        tasks = [threads.run(Place(NORMAL), fail if index % 2 else list) for index in range(4 * NUM_THREADS)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        threads.close()
        return found

    found = asyncio.run(asyncio.wait_for(run(), 30))
    assert [type(one) for one in found] == [list, ValueError] * (2 * NUM_THREADS)


@pytest.mark.parametrize(
    ("body", "level", "user"),
    [
        (b"{}", (0, 0), ""),
        (b'{"service_tier": "flex", "user": "ann", "messages": [{"x": [1]}]}', (1, 0), "ann"),
        (b'{"service_tier": "priority", "priority": 5}', (0, 5 - 2**32), ""),
        (b'{"service_tier": 3}', (0, 0), ""),
        (b'{"service_tier": "other", "priority": 2}', (0, 2), ""),
        (b'{"service_tier": "flex"', (0, 0), ""),
        (b"[" * 50_000, (0, 0), ""),
        (b'{"a":' * 10_000, (0, 0), ""),
        (json.dumps({"service_tier": "flex", "prompt": "x" * 100_000}).encode(), (0, 0), ""),
    ],
)
def test_a_place_is_told_by_a_glance_at_the_body(body: bytes, level: tuple[int, int], user: str) -> None:
    assert place_at_a_glance(body, Caller(identity="key")) == Place(level, f"key\0{user}")
