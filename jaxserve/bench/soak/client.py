"""Clients that send one request after the other, and sometimes go away in the middle of an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import aiohttp

from jaxserve.bench.pressure.load import classed_body
from jaxserve.workload.traced_request import TracedRequest

_TIMEOUT_S = 600.0  # for an answer that was not given up


class End(StrEnum):
    """How a request ended, as its client saw it."""

    ANSWERED = "answered"
    REFUSED = "refused"  # with a status and a JSON body that say so
    LEFT = "left"  # the client went away
    LOST = "lost"  # neither a result nor an error: what must not happen


@dataclass(frozen=True, slots=True)
class Ending:
    """What became of a request.

    Attributes:
      token_ids: of each choice, if it was answered.
      detail: of a loss.
    """

    end: End
    token_ids: tuple[tuple[int, ...], ...] = ()
    detail: str = ""


def body_of(model: str, item: TracedRequest) -> dict[str, Any]:
    """The request, not streamed unless its client may leave."""
    body = classed_body(model, item)
    del body["stream_options"]
    return {
        **body,
        "stream": item.aborts_after is not None,
        "priority": item.priority,
        "n": item.n,
        "stop": list(item.stop),
        "temperature": item.temperature,
        "seed": item.seed,
        "return_token_ids": True,
    }


def send_all(
    url: str,
    model: str,
    items: Sequence[TracedRequest],
    *,
    clients: int,
    every: Callable[[int], None] = lambda done: None,
) -> list[Ending]:
    """Send all, `clients` at a time, each as soon as another has ended.

    Args:
      every: told how many have ended, after each.
    """
    return asyncio.run(_send_all(url, model, items, clients, every))


async def _send_all(
    url: str, model: str, items: Sequence[TracedRequest], clients: int, every: Callable[[int], None]
) -> list[Ending]:
    endings: list[Ending | None] = [None] * len(items)
    left: Iterator[tuple[int, TracedRequest]] = iter(enumerate(items))
    done = 0

    async def work(session: aiohttp.ClientSession) -> None:
        nonlocal done
        for index, item in left:
            endings[index] = await _send(session, f"{url}/v1/completions", body_of(model, item), item)
            done += 1
            every(done)

    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout
    ) as session:
        await asyncio.gather(*(work(session) for _ in range(clients)))
    return [ending for ending in endings if ending is not None]


async def _send(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], item: TracedRequest
) -> Ending:
    try:
        async with asyncio.timeout(item.aborts_after), session.post(url, json=body) as response:
            data = await response.read()
            status = response.status
    except TimeoutError:
        if item.aborts_after is not None:
            return Ending(End.LEFT)
        return Ending(End.LOST, detail="no answer in time")
    except aiohttp.ClientError as error:
        return Ending(End.LOST, detail=f"{type(error).__name__}: {error}")
    return _read(status, data, streamed=body["stream"])


def _read(status: int, data: bytes, *, streamed: bool) -> Ending:
    if streamed and status == 200:
        ended = data.rstrip().endswith(b"data: [DONE]")
        return Ending(End.ANSWERED) if ended else Ending(End.LOST, detail="a stream without an end")
    try:
        answer = json.loads(data)
        if status == 200:
            return Ending(End.ANSWERED, tuple(tuple(choice["token_ids"]) for choice in answer["choices"]))
        message = answer["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return Ending(End.LOST, detail=f"HTTP {status}: {data[:200]!r}")
    if status in (429, 503):
        return Ending(End.REFUSED)
    return Ending(End.LOST, detail=f"HTTP {status}: {message}")
