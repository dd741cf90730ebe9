"""From raw bytes to an answer: when its tokens came, how many the peer says they were, and what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from jaxserve.bench.peers.client import Exchange
from jaxserve.workload.traced_request import TracedRequest


class Fault(StrEnum):
    """Kinds of bad answers; an answer has at most one, the first that applies."""

    UNREACHABLE = "no connection"
    REFUSED = "refused"
    TIMEOUT = "timed out"
    ERROR_EVENT = "error in the stream"
    BROKEN = "broken off"
    NO_USAGE = "no usage"
    WRONG_PROMPT = "other prompt length"
    WRONG_COUNT = "wrong number of tokens"


@dataclass(frozen=True, slots=True)
class Answer:
    """Times are seconds since the pass began.

    Attributes:
      sent, ended: of the whole request.
      chunks: when each chunk came that brought text.
      output_tokens: by the peer's `usage`; without one, the number of chunks that came.
      text: all of it.
      fault, detail: what is wrong, and how exactly; None and "" if nothing is.
    """

    sent: float
    ended: float
    chunks: tuple[float, ...]
    output_tokens: int
    text: str
    fault: Fault | None = None
    detail: str = ""

    @property
    def ttft(self) -> float | None:
        """From sending the request to the first chunk with text; None without one."""
        return self.chunks[0] - self.sent if self.chunks else None

    @property
    def tpot(self) -> float | None:
        """Mean time between its tokens; None with fewer than two."""
        if self.output_tokens < 2 or not self.chunks:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Between one chunk with text and the next."""
        return [after - before for before, after in pairwise(self.chunks)]


def read_answer(item: TracedRequest, exchange: Exchange) -> Answer:
    """Decode what came for `item`; never raises for what a peer did."""
    chunks: list[float] = []
    pieces: list[str] = []
    usage: dict[str, Any] | None = None
    problem: tuple[Fault, str] | None = None
    done = False
    if exchange.status == 200:
        for moment, data in _events(exchange):
            if data == b"[DONE]":
                done = True
                continue
            try:
                event = json.loads(data)
                if event.get("error"):
                    problem = problem or (Fault.ERROR_EVENT, _one_line(json.dumps(event["error"])))
                    continue
                text = "".join(choice.get("text") or "" for choice in event.get("choices") or ())
                usage = event.get("usage") or usage
            except (ValueError, AttributeError, TypeError):
                problem = problem or (Fault.BROKEN, f"not a chunk of a completion: {_one_line(data)}")
                continue
            if text:
                chunks.append(moment)
                pieces.append(text)
    tokens = _count(usage, "completion_tokens")
    fault, detail = problem or _judge(item, exchange, usage, done) or (None, "")
    return Answer(
        sent=exchange.sent,
        ended=exchange.ended,
        chunks=tuple(chunks),
        output_tokens=len(chunks) if tokens is None else tokens,
        text="".join(pieces),
        fault=fault,
        detail=detail,
    )


def _judge(
    item: TracedRequest, exchange: Exchange, usage: dict[str, Any] | None, done: bool
) -> tuple[Fault, str] | None:
    if exchange.timed_out:
        return Fault.TIMEOUT, exchange.broken or ""
    if exchange.status is None:
        return Fault.UNREACHABLE, _one_line(exchange.broken or "")
    if exchange.status != 200:
        body = b"".join(data for _, data in exchange.received)
        return Fault.REFUSED, f"HTTP {exchange.status}: {_one_line(body)}"
    if exchange.broken is not None or not done:
        return Fault.BROKEN, _one_line(exchange.broken or "the stream ended without [DONE]")
    prompt, output = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    if prompt is None or output is None:
        return Fault.NO_USAGE, "the peer does not say how many tokens it made"
    if prompt != len(item.prompt_token_ids):
        return Fault.WRONG_PROMPT, f"{prompt} instead of {len(item.prompt_token_ids)} prompt tokens"
    if output != item.max_tokens:
        return Fault.WRONG_COUNT, f"{output} instead of {item.max_tokens} tokens"
    return None


def _count(usage: dict[str, Any] | None, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int and value >= 0 else None


def _events(exchange: Exchange) -> Iterator[tuple[float, bytes]]:
    """Data of the stream's events, each with the time at which its last byte came."""
    rest = b""
    for moment, data in exchange.received:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield moment, line.removeprefix(b"data:").strip()


def _one_line(text: str | bytes, limit: int = 300) -> str:
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    return " ".join(text.split())[:limit]
