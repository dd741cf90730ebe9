"""The requests of a run: as many a second as a multiple of what the server can do, of both service classes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jaxserve.bench.peers.client import completion_body
from jaxserve.request import ServiceClass, ServiceTargets
from jaxserve.workload.arrivals import Arrivals, Lengths
from jaxserve.workload.generator import WorkloadSpec, generate
from jaxserve.workload.traced_request import TracedRequest, Workload

CAPACITY_REQUESTS = 96  # of the closed run that capacity is measured with


@dataclass(frozen=True, slots=True)
class Plan:
    """What a whole measurement is made of.

    Attributes:
      loads: offered requests a second, as multiples of capacity.
      seconds: how long requests come in each run.
      targets: of interactive requests, and what goodput is counted by.
      background_share: of all requests.
      clients: how many, drawn in proportion to 1 / rank.
    """

    loads: tuple[float, ...]
    seconds: float
    targets: ServiceTargets
    background_share: float = 0.3
    clients: int = 8
    seed: int = 0


def requests_of(plan: Plan, load: float, capacity: float) -> Workload:
    """The requests of one load.

    Args:
      capacity: requests a second that the server can do.
    """
    rate = load * capacity
    return generate(_spec(plan, rate, max(8, math.ceil(rate * plan.seconds))), plan.seed + round(100 * load))


def closed_requests(plan: Plan) -> Workload:
    """Requests of the same kind, all at once, to measure capacity with."""
    return generate(_spec(plan, 1e6, CAPACITY_REQUESTS), plan.seed)


def _spec(plan: Plan, rate: float, count: int) -> WorkloadSpec:
    return WorkloadSpec(
        num_requests=count,
        arrivals=Arrivals(rate),
        prompt=Lengths(64, 0.8, most=384),
        output=Lengths(32, 0.6, least=4, most=128),
        context=512,
        background_share=plan.background_share,
        clients=plan.clients,
        client_skew=1.0,
        targets=plan.targets,
    )


def classed_body(model: str, item: TracedRequest) -> dict[str, Any]:
    """`completion_body` says not a word about who a request is for and what it needs; this adds class, client and
    targets."""
    body = {**completion_body(model, item), "user": item.client}
    if item.service_class is ServiceClass.BACKGROUND:
        body["service_tier"] = "flex"
    for field, seconds in (
        ("slo_ttft_ms", item.targets.ttft_seconds),
        ("slo_itl_ms", item.targets.itl_seconds),
    ):
        if seconds is not None:
            body[field] = 1e3 * seconds
    return body
