"""The client: sends every request at its time, streams the answers, and keeps raw bytes with their times.

Nothing is decoded while a pass runs: client and server share the machine's cores.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from jaxserve.workload.arrivals import Arrivals
from jaxserve.workload.traced_request import TracedRequest

_CONNECT_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and whatever came back. Times are seconds since the pass began.

    Attributes:
      sent, ended: when the request went out; when its answer was complete or had failed.
      status: of HTTP; None if there was no answer at all.
      received: (time, bytes) as they came.
      broken: why the answer is not complete; None if the peer ended it properly, in whatever way.
      timed_out: the peer sent nothing for too long.
    """

    sent: float
    ended: float
    status: int | None
    received: tuple[tuple[float, bytes], ...]
    broken: str | None = None
    timed_out: bool = False


def arrival_times(count: int, *, rate: float | None, seed: int, burstiness: float = 1.0) -> tuple[float, ...]:
    """When each request is sent, in seconds: all at 0, or a Poisson process of `rate` a second from 0 on.

    Args:
      burstiness: see `Arrivals`; 1 is a Poisson process.
    """
    if rate is None:
        return (0.0,) * count
    times = tuple(itertools.islice(Arrivals(rate, burstiness).times(random.Random(seed)), count))
    return tuple(time - times[0] for time in times)


def completion_body(model: str, item: TracedRequest) -> dict[str, Any]:
    """Greedy, of exactly `max_tokens` tokens, streamed, with the counts at the end."""
    return {
        "model": model,
        "prompt": list(item.prompt_token_ids),
        "max_tokens": item.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def replay(
    url: str,
    model: str,
    items: Sequence[TracedRequest],
    arrivals: Sequence[float],
    *,
    idle_timeout_s: float,
    body: Callable[[str, TracedRequest], dict[str, Any]] = completion_body,
    concurrency: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[Exchange, ...]:
    """Send `items[i]` at `arrivals[i]`, whatever became of the others (an open loop); wait for all answers.

    Args:
      idle_timeout_s: a request that gets no byte for so long is given up.
      body: (model, request) -> what is sent.
      concurrency: no more than that many are under way at once; the next is sent as one ends (a closed loop).
      headers: of every request.
    """
    bodies = [body(model, item) for item in items]
    return asyncio.run(_replay(url, bodies, arrivals, idle_timeout_s, concurrency, headers))


async def _replay(
    url: str,
    bodies: Sequence[dict[str, Any]],
    arrivals: Sequence[float],
    idle_timeout_s: float,
    concurrency: int | None,
    headers: Mapping[str, str] | None,
) -> tuple[Exchange, ...]:
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=min(_CONNECT_TIMEOUT_S, idle_timeout_s), sock_read=idle_timeout_s
    )
    payloads = [aiohttp.JsonPayload(body) for body in bodies]
    # One connection a request: a peer that closes idle ones must not look like one that fails.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    places = asyncio.Semaphore(concurrency or max(len(payloads), 1))
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        start = time.perf_counter()
        return tuple(
            await asyncio.gather(
                *(
                    _exchange(session, f"{url}/v1/completions", body, start, arrival, places)
                    for body, arrival in zip(payloads, arrivals, strict=True)
                )
            )
        )


async def _exchange(
    session: aiohttp.ClientSession,
    url: str,
    body: aiohttp.Payload,
    start: float,
    arrival: float,
    places: asyncio.Semaphore,
) -> Exchange:
    await asyncio.sleep(start + arrival - time.perf_counter())
    async with places:
        return await _send(session, url, body, start)


async def _send(session: aiohttp.ClientSession, url: str, body: aiohttp.Payload, start: float) -> Exchange:
    status: int | None = None
    received: list[tuple[float, bytes]] = []
    broken: str | None = None
    timed_out = False
    sent = time.perf_counter() - start
    try:
        async with session.post(url, data=body) as response:
            status = response.status
            async for data in response.content.iter_any():
                received.append((time.perf_counter() - start, data))
    except TimeoutError:
        broken, timed_out = "nothing came for too long", True
    except aiohttp.ClientError as error:
        broken = str(error) or type(error).__name__
    return Exchange(sent, time.perf_counter() - start, status, tuple(received), broken, timed_out)
