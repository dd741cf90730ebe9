"""The same few well-behaved clients, alone and beside each kind of crowd, on one server."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxserve.bench.environment import describe_host
from jaxserve.bench.peers.answer import read_answer
from jaxserve.bench.peers.client import completion_body, replay
from jaxserve.bench.peers.peer import own_peer
from jaxserve.bench.peers.process import Running, running
from jaxserve.bench.peers.ready import wait_until_ready
from jaxserve.bench.scrape import scrape
from jaxserve.bench.serve.goal import Goal
from jaxserve.bench.serve.load import ServeLoad
from jaxserve.bench.serve.measure import Measured, summarise
from jaxserve.bench.slow_clients.crowd import Manner
from jaxserve.errors import JaxserveError
from jaxserve.simulation.latencies import MEASURES, PERCENTS
from jaxserve.workload.traced_request import TracedRequest, Workload

_READY_TIMEOUT_S = 900.0
_CROWD_TIMEOUT_S = 600.0
_IDLE_TIMEOUT_S = 120.0
_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@dataclass(frozen=True, slots=True)
class Plan:
    """Attributes:
    clients: of the crowd. tokens: of each of its answers.
    probes: requests of the well-behaved, `at_once` of them at a time.
    """

    clients: int = 1000
    tokens: int = 256
    probes: int = 48
    at_once: int = 4


@dataclass(frozen=True, slots=True)
class Phase:
    """What was seen beside one crowd.

    Attributes:
      name: of the crowd's manner, or "alone".
      measured: of the well-behaved.
      resident_peak, resident_after: bytes of the server's memory, during it and when it had gone.
      left_behind: gauges that were not 0 then.
    """

    name: str
    measured: Measured
    resident_peak: int
    resident_after: int
    left_behind: dict[str, float]


def measure_crowds(
    model: str, plan: Plan, flags: Sequence[str], announce: Callable[[str], None]
) -> list[Phase]:
    """Run it. The crowd is background work and the others are of the first class, so that only manners can matter.

    Raises:
      JaxserveError: the server or a crowd did not start.
    """
    phases = []
    with running(own_peer("slow-clients", model, flags)) as server:
        name = wait_until_ready(server, timeout_s=_READY_TIMEOUT_S).model
        for manner in (None, Manner.READING, Manner.SILENT, Manner.VANISHING, None):
            phases.append(measure_phase(server, name, plan, manner))
            found = phases[-1]
            announce(f"{found.name}: peak {found.resident_peak / 2**20:.0f} MiB")
    return phases


def measure_phase(server: Running, model: str, plan: Plan, manner: Manner | None) -> Phase:
    """One crowd (None: nobody), and the few beside it.

    Raises:
      JaxserveError: the crowd did not get through, or ended before its time.
    """
    items = tuple(
        TracedRequest(tuple(range(1000 + 40 * index, 1032 + 40 * index)), 32) for index in range(plan.probes)
    )
    load = ServeLoad(concurrency=plan.at_once)
    with _memory_watched(server) as peak, _crowd(server.url, model, plan, manner):
        exchanges = replay(
            server.url,
            model,
            items,
            (0.0,) * len(items),
            idle_timeout_s=_CROWD_TIMEOUT_S,
            concurrency=plan.at_once,
            body=lambda model, item: {**completion_body(model, item), "service_tier": "priority"},
        )
    answers = list(map(read_answer, items, exchanges))
    left_behind = _wait_until_idle(server.url)
    return Phase(
        "alone" if manner is None else manner.value,
        summarise(answers, Workload("probes", items), load, Goal()),
        max(peak),
        server.resident_bytes(),
        left_behind,
    )


@contextlib.contextmanager
def _crowd(url: str, model: str, plan: Plan, manner: Manner | None) -> Iterator[None]:
    """It is there, and its first requests are answered, while the body runs."""
    if manner is None:
        yield
        return
    item = TracedRequest(tuple(range(100, 116)), plan.tokens)
    body = {**completion_body(model, item), "service_tier": "flex", "logprobs": 5}
    command = [sys.executable, "-m", "jaxserve.bench.slow_clients.crowd", url, json.dumps(body)]
    process = subprocess.Popen(
        [*command, str(plan.clients), manner.value], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise JaxserveError(f"the crowd of {manner.value} clients did not get through")
        yield
        if process.poll() is not None:
            raise JaxserveError(f"the crowd of {manner.value} clients ended before its time")
    finally:
        process.communicate()


@contextlib.contextmanager
def _memory_watched(server: Running, every_s: float = 0.1) -> Iterator[list[int]]:
    sizes = [server.resident_bytes()]
    end = threading.Event()

    def watch() -> None:
        while not end.wait(every_s):
            sizes.append(server.resident_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield sizes
    finally:
        end.set()
        thread.join()


def _wait_until_idle(url: str) -> dict[str, float]:
    """Gauges that are not 0; empty as soon as all are."""
    deadline = time.monotonic() + _IDLE_TIMEOUT_S
    while True:
        gauges = scrape(url, "gauge")
        left = {name: gauges[name] for name in _GAUGES if gauges.get(name)}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def report(plan: Plan, phases: Sequence[Phase]) -> str:
    """As text."""
    names = [f"{measure} P{percent}" for measure in MEASURES for percent in PERCENTS if measure != "tpot"]
    lines = [
        "",
        f"{plan.clients} clients of a crowd, {plan.tokens} tokens each; {plan.probes} requests of "
        f"{plan.at_once} others, ms",
        "",
        f"{'':12}" + "".join(f"{name:>10}" for name in names) + f"{'peak MiB':>10}{'then MiB':>10}",
    ]
    for phase in phases:
        figures = phase.measured.figures()
        cells = [f"{figures[f'{name} ms']:.1f}" for name in names]
        cells += [f"{size / 2**20:.0f}" for size in (phase.resident_peak, phase.resident_after)]
        lines.append(f"{phase.name:12}" + "".join(f"{cell:>10}" for cell in cells))
    for phase in phases:
        lines += [f"{phase.name}: left behind {phase.left_behind}"] if phase.left_behind else []
        lines += [
            f"{phase.name}: {fault.count} {fault.kind} ({fault.first})" for fault in phase.measured.faults
        ]
    return "\n".join(lines)


def is_well(phases: Sequence[Phase]) -> bool:
    """Nothing lost, nothing left behind."""
    return all(phase.measured.is_whole and not phase.left_behind for phase in phases)


def to_json(plan: Plan, phases: Sequence[Phase]) -> dict[str, Any]:
    """Everything, with what it depends on."""
    return {
        "benchmark": "slow-clients",
        **describe_host(),
        "plan": asdict(plan),
        "phases": [
            {
                "name": phase.name,
                **phase.measured.to_json(),
                "resident_peak": phase.resident_peak,
                "resident_after": phase.resident_after,
                "left_behind": phase.left_behind,
            }
            for phase in phases
        ],
    }
