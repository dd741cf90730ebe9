"""A few threads for work that would hold up the event loop, and whose turn it is with them.

A thousand requests may come in one instant, and getting one ready takes a while. So they wait here, in the order in
which the engine would take them (class, priority, fair shares of clients), rather than in the order of their arrival:
one that is more urgent, or of a client who asks for less, does not stand behind all of a crowd.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from jaxserve.scheduler.fairness import FairShares, Level

NUM_THREADS = 2
# Work handed to the threads: so much that none of them waits for the loop, and no more, since it has no order there.
MAX_HANDED_OVER = 2 * NUM_THREADS
_COST = 1.0  # of anything: what it takes is not known before


@dataclass(frozen=True, slots=True)
class Place:
    """Whose work it is. Lower levels come first."""

    level: Level
    client: str = ""


# What is nearly through, or takes no place in the engine's queue.
FIRST = Place((-1, 0))


@dataclass(slots=True)
class _Job:
    place: Place
    tag: float
    make: Callable[[], Any]
    result: asyncio.Future[Any]


class WorkerThreads:
    """Belongs to one event loop, which runs everything here but the work itself."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="jaxserve-prepare")
        self._shares = FairShares()
        self._waiting: list[tuple[Level, float, int, _Job]] = []
        self._numbers = itertools.count()
        self._num_handed_over = 0

    async def run[T](self, place: Place, make: Callable[[], T]) -> T:
        """What `make` returns or raises, in a thread. Who is cancelled before his turn costs nothing more."""
        job = _Job(
            place,
            self._shares.arrive(place.level, place.client, _COST),
            make,
            asyncio.get_running_loop().create_future(),
        )
        heapq.heappush(self._waiting, (place.level, job.tag, next(self._numbers), job))
        self._hand_over()
        result: T = await job.result
        return result

    def close(self) -> None:
        """Begin nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _hand_over(self) -> None:
        while self._waiting and self._num_handed_over < MAX_HANDED_OVER:
            job = heapq.heappop(self._waiting)[-1]
            if job.result.done():  # cancelled
                self._shares.ended(job.place.level, job.place.client, _COST)
                continue
            self._shares.admitted(job.place.level, job.tag, _COST)
            self._num_handed_over += 1
            running = asyncio.get_running_loop().run_in_executor(self._pool, job.make)
            running.add_done_callback(lambda done, job=job: self._ended(job, done))  # type: ignore[misc]

    def _ended(self, job: _Job, running: asyncio.Future[Any]) -> None:
        self._num_handed_over -= 1
        self._shares.ended(job.place.level, job.place.client, 0.0)
        if running.cancelled():
            job.result.cancel()
        else:
            error = running.exception()  # read it, so that nobody is warned of it
            if not job.result.done():
                if error is None:
                    job.result.set_result(running.result())
                else:
                    job.result.set_exception(error)
        self._hand_over()
