"""`/metrics`: the engine's counters and the latencies that clients see, in Prometheus text.

Names begin with `vllm:` where the meaning is that of vLLM's metric, so that dashboards fit, and with `jaxserve:`
otherwise. Each app has a registry of its own: two servers can live in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jaxserve.distribution import Distribution
from jaxserve.request import FinishReason
from jaxserve.request_stats import PHASE_BOUNDS
from jaxserve.server.circuit_breaker import CircuitBreaker
from jaxserve.server.key_metrics import KeyUsage
from jaxserve.server.metric_families import Families
from jaxserve.server.pressure_metrics import PressureCollector
from jaxserve.server.swap_metrics import swap_metrics
from jaxserve.server.vllm_metrics import VllmCollector
from jaxserve.stats import EngineStats

CONTENT_TYPE = CONTENT_TYPE_LATEST


class ServerMetrics:
    """The registry of one app, and the observer of its requests (`async_engine.Observer`).

    Attributes:
      keys: usage by API key.
    """

    def __init__(self, stats: EngineStats, breaker: CircuitBreaker, model_name: str) -> None:
        self._finished = dict.fromkeys((reason.value for reason in FinishReason), 0)
        self._latencies = Distribution(PHASE_BOUNDS)
        self._refusals: dict[str, int] = {}
        self.keys = KeyUsage(model_name)
        self._registry = CollectorRegistry()
        for collector in (
            VllmCollector(stats, self._finished, self._latencies, model_name),
            _EngineCollector(stats, model_name),
            PressureCollector(stats, breaker, self._refusals, model_name),
            self.keys,
        ):
            self._registry.register(collector)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)

    def finished(self, reason: str, seconds: float) -> None:
        """A choice ended, so long after its request arrived."""
        self._finished[reason] += 1
        self._latencies.observe(seconds)

    def refused(self, reason: str) -> None:
        """A request was refused at the door, before the engine was asked."""
        self._refusals[reason] = self._refusals.get(reason, 0) + 1


class _EngineCollector(Collector):
    """What vLLM has no name for. Reads `EngineStats` when scraped."""

    def __init__(self, stats: EngineStats, model_name: str) -> None:
        self._stats = stats
        self._model = model_name

    def collect(self) -> Iterable[Metric]:
        stats = self._stats
        gauges = (
            ("shapes_ready", "Shapes whose program is ready.", stats.shapes.ready),
            ("shapes", "Shapes there will be.", stats.shapes.total),
            (
                "packing_efficiency",
                "Tokens computed for a request / all tokens computed, padding included.",
                stats.packing_efficiency,
            ),
        )
        counters = (
            ("cache_evictions", "Cached blocks given to another prefix.", stats.evictions),
            ("steps", "Forward passes.", stats.steps),
            ("useful_tokens", "Tokens computed for a request.", stats.useful_tokens),
            ("padded_tokens", "All tokens computed, padding included.", stats.padded_tokens),
            ("compilations", "Executables compiled.", stats.compilations),
            ("serving_compilations", "Compiled after warm-up; stays 0.", stats.serving_compilations),
            ("step_seconds", "Time spent in steps.", stats.step_seconds),
            ("host_seconds", "The part of it not spent waiting for the device.", stats.host_seconds),
            (
                "host_gap_seconds",
                "Time for which the device had nothing to do, because the next step was not ready.",
                stats.host_gap_seconds,
            ),
        )
        families = Families(self._model)
        for name, text, value in gauges:
            yield families.gauge(name, text, value)
        for name, text, value in counters:
            yield families.counter(name, text, value)
        memory = "What memory is for, as accounted before serving."
        yield families.gauge("memory_bytes", memory, stats.memory, "kind")
        yield from self._bucket_counters()
        yield from swap_metrics(stats, self._model)

    def _bucket_counters(self) -> Iterator[Metric]:
        """By bucket; as many label sets as the engine has shapes."""
        labels = ["model_name", "tokens", "seqs"]
        steps = CounterMetricFamily("jaxserve:bucket_steps", "Forward passes of each shape.", labels=labels)
        seconds = CounterMetricFamily(
            "jaxserve:bucket_step_seconds", "What they took, the host's part included.", labels=labels
        )
        tokens = CounterMetricFamily(
            "jaxserve:bucket_padding_tokens", "Tokens computed for nobody, by shape.", labels=labels
        )
        rows = CounterMetricFamily(
            "jaxserve:bucket_padding_rows", "Rows of logits computed for nobody, by shape.", labels=labels
        )
        for bucket, stats in self._stats.by_bucket.items():
            shape = [self._model, *map(str, bucket)]
            steps.add_metric(shape, stats.steps)
            seconds.add_metric(shape, stats.seconds)
            tokens.add_metric(shape, stats.padding_tokens)
            rows.add_metric(shape, stats.padding_rows)
        yield from (steps, seconds, tokens, rows)
