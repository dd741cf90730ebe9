"""A server for each policy, and every load on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.bench.peers.answer import read_answer
from jaxserve.bench.peers.client import replay
from jaxserve.bench.peers.compare import warm_up_items
from jaxserve.bench.peers.peer import Peer, own_peer
from jaxserve.bench.peers.process import running
from jaxserve.bench.peers.ready import wait_until_ready
from jaxserve.bench.pressure.load import Plan, classed_body, closed_requests, plain_body, requests_of
from jaxserve.bench.pressure.outcome import Outcome, outcome_of
from jaxserve.bench.scrape import scrape
from jaxserve.workload.traced_request import TracedRequest

FCFS, OURS = "first come, first served", "classes and targets"
_FCFS_FLAGS = ("--slo-itl-ms", "0", "--max-waiting", "1000000")
_READY_TIMEOUT_S, _IDLE_TIMEOUT_S = 900.0, 900.0
_COUNTED = ("preemptions", "promotions", "refus", "swap", "step_failures", "recompute")


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
    for name, own, body in ((FCFS, _FCFS_FLAGS, plain_body), (OURS, (), classed_body)):
        announce(f"{name}: starting")
        peer = own_peer(name, model, (*flags, *own))
        outcomes[name] = {}
        with _Server(peer) as server:
            if not capacity:
                capacity = server.capacity(plan)
                announce(f"capacity: {capacity:.2f} requests/s")
            for load in plan.loads:
                outcome = server.run(plan, load, capacity, body)
                outcomes[name][load] = outcome
                announce(f"{name}, {load:g}x: goodput {outcome.goodput:.2f}/s")
    return Pressure(plan, capacity, outcomes)


class _Server:
    """A server and the client that presses it."""

    def __init__(self, peer: Peer) -> None:
        self._running = running(peer)

    def __enter__(self) -> _Server:
        self._server = self._running.__enter__()
        self._model = wait_until_ready(self._server, timeout_s=_READY_TIMEOUT_S).model
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._running.__exit__(*exc_info)

    def capacity(self, plan: Plan) -> float:
        """Requests a second when all are there from the start."""
        workload = closed_requests(plan)
        self._replay(warm_up_items(workload), plain_body)
        answers = self._replay([_at_once(item) for item in workload.requests], plain_body)
        return len(answers) / max(answer.ended for answer in answers)

    def run(
        self, plan: Plan, load: float, capacity: float, body: Callable[[str, TracedRequest], dict[str, Any]]
    ) -> Outcome:
        """One load."""
        items = requests_of(plan, load, capacity).requests
        before = self._counts()
        answers = self._replay(items, body)
        counts = {name: value - before.get(name, 0.0) for name, value in self._counts().items()}
        return outcome_of(items, answers, plan.targets, counts)

    def _replay(
        self, items: Sequence[TracedRequest], body: Callable[[str, TracedRequest], dict[str, Any]]
    ) -> list[Any]:
        arrivals = [item.arrival for item in items]
        exchanges = replay(
            self._server.url, self._model, items, arrivals, idle_timeout_s=_IDLE_TIMEOUT_S, body=body
        )
        return [read_answer(item, exchange) for item, exchange in zip(items, exchanges, strict=True)]

    def _counts(self) -> dict[str, float]:
        """Counters of `/metrics` that say what the policy did."""
        counters = scrape(self._server.url, "counter")
        return {name: value for name, value in counters.items() if any(word in name for word in _COUNTED)}


def _at_once(item: TracedRequest) -> TracedRequest:
    return TracedRequest(item.prompt, item.max_tokens)
