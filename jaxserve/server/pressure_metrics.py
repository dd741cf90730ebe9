"""The part of `/metrics` that shows how a server does under load: queues, refusals, preemptions, targets, failures.

Every counter by class or kind is there from the start, at 0, so that a rate can be taken of the first event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jaxserve.server.circuit_breaker import BreakerState, CircuitBreaker
from jaxserve.server.metric_families import Families
from jaxserve.stats import EngineStats

# Of the engine's and the door's.
_REFUSALS = ("queue_full", "queue_tokens_full", "ttft_target", "circuit_open", "shutting_down", "engine_dead")


class PressureCollector(Collector):
    """Reads `EngineStats` and the circuit breaker when scraped.

    Args:
      refusals: at the door, by reason.
    """

    def __init__(
        self, stats: EngineStats, breaker: CircuitBreaker, refusals: Mapping[str, int], model_name: str
    ) -> None:
        self._stats = stats
        self._refusals = refusals
        self._breaker = breaker
        self._families = Families(model_name)

    def collect(self) -> Iterable[Metric]:
        yield from self._queues()
        yield from self._preemptions()
        yield from self._targets()
        yield from self._failures()

    def _queues(self) -> Iterator[Metric]:
        stats = self._stats
        yield self._families.gauge("running", "Sequences being computed.", stats.running_by_class, "class")
        yield self._families.gauge(
            "waiting", "Sequences waiting to be computed.", stats.waiting_by_class, "class"
        )
        yield self._families.gauge(
            "waiting_tokens", "Tokens that waiting sequences have to compute.", stats.waiting_tokens
        )
        refusals = Counter(dict.fromkeys(_REFUSALS, 0))
        refusals.update(self._refusals)
        refusals.update(stats.refusals)
        yield self._families.counter(
            "refusals", "Requests that nobody had room or time for.", refusals, "reason"
        )
        yield self._families.counter(
            "promotions", "Background sequences that had waited too long to be passed.", stats.promotions
        )
        yield self._families.counter(
            "stall_cuts",
            "Steps that computed less of prompts for the sake of running streams.",
            stats.stall_cuts,
        )

    def _preemptions(self) -> Iterator[Metric]:
        stats = self._stats
        yield self._families.counter(
            "preemptions_by_class", "Sequences that lost their blocks.", stats.preemptions_by_class, "class"
        )
        yield self._families.counter(
            "class_preemptions", "Made room for a higher class or priority.", stats.class_preemptions
        )

    def _targets(self) -> Iterator[Metric]:
        stats = self._stats
        yield self._families.counter(
            "within_targets",
            "Sequences that ended with the latencies they asked for.",
            stats.within_targets,
            "class",
        )
        yield self._families.counter(
            "outside_targets", "Sequences that ended without them.", stats.outside_targets, "class"
        )
        promises = {"kept": stats.ttft_promises_kept, "missed": stats.ttft_promises_missed}
        yield self._families.counter(
            "ttft_promises", "First tokens that were promised in time.", promises, "outcome"
        )
        yield self._families.counter("ttft_predictions", "Predicted and seen.", stats.ttft_predictions)
        for name, text, value in (
            ("predicted", "Sum of what was predicted of them.", stats.ttft_predicted_seconds),
            ("actual", "Sum of what they took.", stats.ttft_actual_seconds),
            ("error", "Sum of the absolute differences.", stats.ttft_error_seconds),
        ):
            yield self._families.counter(f"ttft_{name}_seconds", text, value)
        yield self._families.gauge(
            "ttft_correction", "What predictions are multiplied by.", stats.ttft_correction
        )
        yield self._families.gauge(
            "ttft_spread",
            "Mean deviation of actual over predicted times from the correction.",
            stats.ttft_spread,
        )

    def _failures(self) -> Iterator[Metric]:
        yield self._families.counter(
            "step_failures", "Steps that the device failed at.", self._stats.step_failures
        )
        states = {state.value: int(state is self._breaker.state) for state in BreakerState}
        yield self._families.gauge("circuit_breaker", "1 for the state that it is in.", states, "state")
        yield self._families.counter(
            "circuit_breaker_openings", "How often it has opened.", self._breaker.num_openings
        )
