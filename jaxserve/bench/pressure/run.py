"""A server for each policy, and every load on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.bench.peers.answer import Answer, read_answer
from jaxserve.bench.peers.client import completion_body, replay
from jaxserve.bench.peers.compare import warm_up_items
from jaxserve.bench.peers.peer import own_peer
from jaxserve.bench.peers.process import running
from jaxserve.bench.peers.ready import wait_until_ready
from jaxserve.bench.pressure.load import Plan, classed_body, closed_requests, requests_of
from jaxserve.bench.pressure.outcome import Outcome, outcome_of
from jaxserve.bench.scrape import scrape
from jaxserve.workload.traced_request import TracedRequest

FCFS, OURS = "first come, first served", "classes and targets"
_FCFS_FLAGS = ("--slo-itl-ms", "0", "--max-waiting", "1000000")
_READY_TIMEOUT_S, _IDLE_TIMEOUT_S = 900.0, 900.0
_COUNTED = ("preemptions", "promotions", "refus", "swap", "step_failures", "recompute")

Body = Callable[[str, TracedRequest], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Pressure:
    """All runs.

    Attributes:
      capacity: requests a second of a closed run of the first policy's server.
      outcomes: by policy, then by load.
    """

    plan: Plan
    capacity: float
    outcomes: dict[str, dict[float, Outcome]]


@dataclass(frozen=True, slots=True)
class _Server:
    """One that is ready, and what it calls its model."""

    url: str
    model: str


def measure_pressure(
    model: str, plan: Plan, flags: Sequence[str], *, announce: Callable[[str], None]
) -> Pressure:
    """Measure capacity, then run every load under both policies, each policy in a server of its own.

    Args:
      flags: of both servers.

    Raises:
      JaxserveError: a server did not start.
    """
    capacity = 0.0
    outcomes: dict[str, dict[float, Outcome]] = {}
    for name, own, body in ((FCFS, _FCFS_FLAGS, completion_body), (OURS, (), classed_body)):
        announce(f"{name}: starting")
        outcomes[name] = {}
        with running(own_peer(name, model, (*flags, *own))) as process:
            server = _Server(process.url, wait_until_ready(process, timeout_s=_READY_TIMEOUT_S).model)
            if not capacity:
                capacity = _capacity(server, plan)
                announce(f"capacity: {capacity:.2f} requests/s")
            for load in plan.loads:
                outcome = _run(server, plan, load, capacity, body)
                outcomes[name][load] = outcome
                announce(f"{name}, {load:g}x: goodput {outcome.goodput:.2f}/s")
    return Pressure(plan, capacity, outcomes)


def _capacity(server: _Server, plan: Plan) -> float:
    """Requests a second when all are there from the start."""
    workload = closed_requests(plan)
    _answers(server, warm_up_items(workload), completion_body)
    answers = _answers(server, workload.requests, completion_body)
    return len(answers) / max(answer.ended for answer in answers)


def _run(server: _Server, plan: Plan, load: float, capacity: float, body: Body) -> Outcome:
    """One load."""
    items = requests_of(plan, load, capacity).requests
    before = _counts(server)
    answers = _answers(server, items, body)
    counts = {name: value - before.get(name, 0.0) for name, value in _counts(server).items()}
    return outcome_of(items, answers, plan.targets, counts)


def _answers(server: _Server, items: Sequence[TracedRequest], body: Body) -> list[Answer]:
    arrivals = [item.arrival for item in items]
    exchanges = replay(server.url, server.model, items, arrivals, idle_timeout_s=_IDLE_TIMEOUT_S, body=body)
    return [read_answer(item, exchange) for item, exchange in zip(items, exchanges, strict=True)]


def _counts(server: _Server) -> dict[str, float]:
    """Counters of `/metrics` that say what the policy did."""
    counters = scrape(server.url, "counter")
    return {name: value for name, value in counters.items() if any(word in name for word in _COUNTED)}
