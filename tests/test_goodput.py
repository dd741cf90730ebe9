from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxserve.latency_meter import LatencyMeter
from jaxserve.outputs import RequestUpdate
from jaxserve.request import FinishReason, Request, ServiceClass, ServiceTargets
from jaxserve.stats import EngineStats
from tests.fakes import make_request

ARRIVAL = 100.0


def request(name: str, **fields: Any) -> Request:
    made = make_request(name, 3, 100)
    made.arrival_time = ARRIVAL
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def run(
    targets: ServiceTargets,
    times: list[float],
    reason: FinishReason = FinishReason.LENGTH,
    *,
    tokens: int = 1,
    promised: bool = True,
    service_class: ServiceClass = ServiceClass.INTERACTIVE,
) -> EngineStats:
    """A sequence with tokens so long after its arrival."""
    stats = EngineStats()
    meter = LatencyMeter(stats)
    mine = request("a", targets=targets, service_class=service_class)
    meter.add(mine, promised=promised)
    for time in times:
        meter.tokens([RequestUpdate(mine, [7] * tokens)], ARRIVAL + time)
    meter.ended(mine.request_id, reason, tokens * len(times))
    assert not meter._followed
    assert not meter._groups
    return stats


@pytest.mark.parametrize(
    ("targets", "times", "good"),
    [
        (ServiceTargets(), [1000.0, 5000.0], True),
        (ServiceTargets(1.0, None), [1.0, 500.0], True),
        (ServiceTargets(1.0, None), [1.001], False),
        (ServiceTargets(None, 0.5), [90.0, 90.2, 91.0], True),  # the mean counts
        (ServiceTargets(None, 0.5), [90.0, 90.2, 91.1], False),
        (ServiceTargets(None, 0.001), [90.0], True),  # one token has no gaps
        (ServiceTargets(1.0, 0.5), [0.5, 5.0], False),
        (ServiceTargets(1.0, 0.5), [], True),  # max_tokens 0
    ],
)
@pytest.mark.parametrize("service_class", ServiceClass)
def test_in_time_or_not(
    targets: ServiceTargets, times: list[float], good: bool, service_class: ServiceClass
) -> None:
    stats = run(targets, times, service_class=service_class)
    zero = {name.value: 0 for name in ServiceClass}
    mine = {**zero, service_class.value: 1}
    assert (stats.within_targets, stats.outside_targets) == ((mine, zero) if good else (zero, mine))


def test_several_tokens_at_once_are_as_many_gaps() -> None:
    assert run(ServiceTargets(None, 0.5), [1.0, 3.0], tokens=4).within_targets["interactive"] == 1


def test_errors_are_not_good_and_aborts_are_nothing() -> None:
    assert run(ServiceTargets(), [1.0], FinishReason.ERROR).outside_targets["interactive"] == 1
    stats = run(ServiceTargets(0.1, 0.1), [1.0], FinishReason.ABORT)
    assert not sum([*stats.within_targets.values(), *stats.outside_targets.values()])


def test_only_promises_are_kept_or_broken() -> None:
    for promised, time, kept, missed in (
        (True, 0.9, 1, 0),
        (True, 1.1, 0, 1),
        (False, 0.9, 0, 0),
        (False, 9.0, 0, 0),
    ):
        stats = run(ServiceTargets(1.0, None), [time, time + 50], promised=promised)
        assert (stats.ttft_promises_kept, stats.ttft_promises_missed) == (kept, missed)


def test_sequences_that_nobody_added_are_ignored() -> None:
    stats = EngineStats()
    meter = LatencyMeter(stats)
    meter.tokens([RequestUpdate(request("x"), [1])], 5.0)
    meter.ended("x:0", FinishReason.STOP, 1)
    assert dataclasses.asdict(stats) == dataclasses.asdict(EngineStats())
