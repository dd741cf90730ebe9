"""`/metrics`: the engine's counters and the latencies that clients see, in Prometheus text.

Names begin with `vllm:` where the meaning is that of vLLM's metric, so that dashboards fit, and with `jaxserve:`
otherwise. Each app has a registry of its own: two servers can live in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jaxserve.request import FinishReason
from jaxserve.server.circuit_breaker import CircuitBreaker
from jaxserve.server.key_metrics import KeyUsage
from jaxserve.server.metric_families import Families
from jaxserve.server.pressure_metrics import PressureCollector
from jaxserve.server.speculation_metrics import speculation_metrics
from jaxserve.server.swap_metrics import swap_metrics
from jaxserve.stats import EngineStats

CONTENT_TYPE = CONTENT_TYPE_LATEST

_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ServerMetrics:
    """The registry of one app, and the observer of its requests (`async_engine.Observer`).

    Attributes:
      keys: usage by API key.
    """

    def __init__(self, stats: EngineStats, breaker: CircuitBreaker, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats, model_name))
        self._registry.register(PressureCollector(stats, breaker, model_name))
        self.keys = KeyUsage(model_name)
        self._registry.register(self.keys)
        self._model = model_name
        self._finished = dict.fromkeys((reason.value for reason in FinishReason), 0)
        self._registry.register(_FinishedCollector(self._finished, model_name))
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds",
            "From a request's arrival to its first token; streamed requests only.",
            _FIRST_TOKEN_BUCKETS,
        )
        self._between_tokens = self._histogram(
            "vllm:inter_token_latency_seconds", "Time between tokens of a streamed choice.", _TOKEN_BUCKETS
        )
        self._request = self._histogram(
            "vllm:e2e_request_latency_seconds",
            "From a request's arrival to the end of a choice.",
            _REQUEST_BUCKETS,
        )

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)

    def first_token(self, seconds: float) -> None:
        """A choice's first token arrived, so long after its request."""
        self._first_token.observe(seconds)

    def between_tokens(self, seconds: float, tokens: int) -> None:
        """Further tokens of a choice arrived, so long after the one before."""
        for _ in range(tokens):
            self._between_tokens.observe(seconds / tokens)

    def finished(self, reason: str, seconds: float) -> None:
        """A choice ended, so long after its request arrived."""
        self._finished[reason] += 1
        self._request.observe(seconds)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(name, text, ["model_name"], registry=self._registry, buckets=buckets)
        return family.labels(self._model)


class _EngineCollector(Collector):
    """Reads `EngineStats` when scraped."""

    def __init__(self, stats: EngineStats, model_name: str) -> None:
        self._stats = stats
        self._model = model_name

    def collect(self) -> Iterable[Metric]:
        stats = self._stats
        used = stats.num_blocks - stats.num_free_blocks
        gauges = (
            ("vllm:num_requests_running", "Sequences being computed.", stats.num_running),
            ("vllm:num_requests_waiting", "Sequences waiting to be computed.", stats.num_waiting),
            (
                "vllm:kv_cache_usage_perc",
                "Share of the KV blocks in use; 1 is all.",
                used / stats.num_blocks if stats.num_blocks else 0.0,
            ),
            ("jaxserve:shapes_ready", "Shapes whose program is ready.", stats.shapes.ready),
            ("jaxserve:shapes", "Shapes there will be.", stats.shapes.total),
            (
                "jaxserve:packing_efficiency",
                "Tokens computed for a request / all tokens computed, padding included.",
                stats.packing_efficiency,
            ),
        )
        counters = (
            ("vllm:num_preemptions", "Sequences that lost their blocks to others.", stats.preemptions),
            ("vllm:prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found.", stats.prefix_cache_hits),
            ("jaxserve:cache_evictions", "Cached blocks given to another prefix.", stats.evictions),
            ("jaxserve:steps", "Forward passes.", stats.steps),
            ("jaxserve:useful_tokens", "Tokens computed for a request.", stats.useful_tokens),
            ("jaxserve:padded_tokens", "All tokens computed, padding included.", stats.padded_tokens),
            ("jaxserve:compilations", "Executables compiled.", stats.compilations),
            ("jaxserve:serving_compilations", "Compiled after warm-up; stays 0.", stats.serving_compilations),
            ("jaxserve:step_seconds", "Time spent in steps.", stats.step_seconds),
            ("jaxserve:host_seconds", "The part of it not spent waiting for the device.", stats.host_seconds),
            (
                "jaxserve:host_gap_seconds",
                "Time for which the device had nothing to do, because the next step was not ready.",
                stats.host_gap_seconds,
            ),
        )
        families = Families(self._model, prefix="")  # of either kind
        for name, text, value in gauges:
            yield families.gauge(name, text, value)
        for name, text, value in counters:
            yield families.counter(name, text, value)
        memory = "What memory is for, as accounted before serving."
        yield families.gauge("jaxserve:memory_bytes", memory, stats.memory, "kind")
        yield from self._bucket_counters()
        yield from swap_metrics(stats, self._model)
        yield from speculation_metrics(stats, self._model)

    def _bucket_counters(self) -> Iterator[Metric]:
        """By bucket; as many label sets as the engine has shapes."""
        labels = ["model_name", "tokens", "seqs"]
        steps = CounterMetricFamily("jaxserve:bucket_steps", "Forward passes of each shape.", labels=labels)
        tokens = CounterMetricFamily(
            "jaxserve:bucket_padding_tokens", "Tokens computed for nobody, by shape.", labels=labels
        )
        rows = CounterMetricFamily(
            "jaxserve:bucket_padding_rows", "Rows of logits computed for nobody, by shape.", labels=labels
        )
        for bucket, stats in self._stats.by_bucket.items():
            shape = [self._model, *map(str, bucket)]
            steps.add_metric(shape, stats.steps)
            tokens.add_metric(shape, stats.padding_tokens)
            rows.add_metric(shape, stats.padding_rows)
        yield from (steps, tokens, rows)


class _FinishedCollector(Collector):
    """Choices that ended, by reason."""

    def __init__(self, finished: dict[str, int], model_name: str) -> None:
        self._finished = finished
        self._families = Families(model_name, "vllm:")

    def collect(self) -> Iterator[Metric]:
        yield self._families.counter(
            "request_success", "Choices that ended, by reason.", self._finished, "finished_reason"
        )
