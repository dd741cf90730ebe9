"""One load on a server that is there already, and what its answers were like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.bench.peers.answer import Answer, read_answer
from jaxserve.bench.peers.client import replay
from jaxserve.bench.peers.compare import warm_up_items
from jaxserve.bench.peers.process import Running
from jaxserve.bench.peers.ready import Identity, wait_until_ready
from jaxserve.bench.serve.goal import Goal
from jaxserve.bench.serve.load import ServeLoad
from jaxserve.simulation.latencies import MEASURES, Latencies, percentiles
from jaxserve.workload.traced_request import Workload


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure. `url` is without `/v1` and without a slash at the end.

    Attributes:
      model: what requests name; None: the first of `/v1/models`.
      headers: of every request.
      idle_timeout_s: a request that gets nothing for so long is given up.
    """

    url: str
    model: str | None = None
    headers: Mapping[str, str] | None = None
    idle_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of bad answer, how many there were, and the first in full."""

    kind: str
    count: int
    first: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What one load gave. `seconds`: from the first request sent to the last answer ended."""

    load: ServeLoad
    goal: Goal
    seconds: float
    prompt_tokens: int
    latencies: Latencies
    faults: tuple[Fault, ...]

    @property
    def is_whole(self) -> bool:
        return not self.faults

    def figures(self) -> dict[str, float]:
        """By name, flat; times in milliseconds."""
        found, seconds = self.latencies, self.seconds
        figures = {
            "seconds": seconds,
            "requests/s": found.complete / seconds,
            "output tokens/s": found.output_tokens / seconds,
            "total tokens/s": (found.output_tokens + self.prompt_tokens) / seconds,
            "goodput requests/s": found.goodput,
            "requests": found.num_requests,
            "complete": found.complete,
            "within goal": found.within_targets,
        }
        for measure in MEASURES:
            for percent, value in getattr(found, measure).items():
                figures[f"{measure} P{percent} ms"] = value * 1000
        return figures

    def to_json(self) -> dict[str, Any]:
        return {
            "load": self.load.to_json(),
            "goal": str(self.goal),
            "figures": self.figures(),
            "faults": {fault.kind: {"count": fault.count, "first": fault.first} for fault in self.faults},
        }


def find_server(target: Target, *, timeout_s: float) -> Identity:
    """Wait until it answers; what it says of itself, with the model that requests are to name.

    Raises:
      NotReadyError: it does not answer.
    """
    server = Running(target.url, None, None)
    found = wait_until_ready(server, timeout_s=timeout_s, headers=target.headers)
    return replace(found, model=target.model or found.model)


def measure(target: Target, model: str, workload: Workload, load: ServeLoad, goal: Goal) -> Measured:
    """Warm the server up, and put the load on it."""
    arrivals = load.arrivals(workload)
    options: dict[str, Any] = {"idle_timeout_s": target.idle_timeout_s, "headers": target.headers}
    warm_up = warm_up_items(workload)
    replay(target.url, model, warm_up, (0.0,) * len(warm_up), **options)
    exchanges = replay(
        target.url, model, workload.requests, arrivals, concurrency=load.concurrency, **options
    )
    answers = tuple(map(read_answer, workload.requests, exchanges))
    return summarise(answers, workload, load, goal)


def summarise(answers: Sequence[Answer], workload: Workload, load: ServeLoad, goal: Goal) -> Measured:
    """Answers with a fault count as far as they came, but never as complete, nor for goodput."""
    seconds = max(answer.ended for answer in answers) - min(answer.sent for answer in answers)
    whole = [answer for answer in answers if answer.fault is None]
    good = sum(map(goal.met_by, whole))
    counts = Counter(answer.fault for answer in answers if answer.fault is not None)
    latencies = Latencies(
        num_requests=len(answers),
        complete=len(whole),
        within_targets=good,
        goodput=good / seconds if seconds else 0.0,
        output_tokens=sum(answer.output_tokens for answer in answers),
        refused={fault.value: count for fault, count in counts.items()},
        ttft=percentiles(value for answer in answers if (value := answer.ttft) is not None),
        tpot=percentiles(value for answer in answers if (value := answer.tpot) is not None),
        itl=percentiles(gap for answer in answers for gap in answer.gaps),
        e2e=percentiles(answer.ended - answer.sent for answer in whole),
    )
    firsts = {fault: next(answer.detail for answer in answers if answer.fault is fault) for fault in counts}
    return Measured(
        load,
        goal,
        seconds,
        sum(
            item.num_prompt_tokens
            for item, answer in zip(workload.requests, answers, strict=True)
            if answer.fault is None
        ),
        latencies,
        tuple(Fault(fault.value, count, firsts[fault]) for fault, count in counts.items()),
    )
