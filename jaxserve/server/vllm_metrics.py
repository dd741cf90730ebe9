"""What `/metrics` says under vLLM's names, with their types, labels and meaning, so that dashboards fit."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jaxserve.distribution import Distribution
from jaxserve.server.metric_families import vllm_families
from jaxserve.server.speculation_metrics import speculation_metrics
from jaxserve.stats import EngineStats


class VllmCollector(Collector):
    """Reads `EngineStats`, and what the server knows of ends, when scraped.

    Args:
      finished: choices that ended, by reason.
      latencies: from a request's arrival to the end of a choice, as its client sees it, in seconds.
    """

    def __init__(
        self, stats: EngineStats, finished: Mapping[str, int], latencies: Distribution, model_name: str
    ) -> None:
        self._stats = stats
        self._finished = finished
        self._latencies = latencies
        self._model = model_name
        self._families = vllm_families(model_name)

    def collect(self) -> Iterable[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        yield from self._infos()
        yield from speculation_metrics(self._stats, self._model)

    def _gauges(self) -> Iterator[Metric]:
        stats, gauge = self._stats, self._families.gauge
        used = stats.num_blocks - stats.num_free_blocks
        yield gauge("num_requests_running", "Sequences being computed.", stats.num_running)
        yield gauge("num_requests_waiting", "Sequences waiting to be computed.", stats.num_waiting)
        share = used / stats.num_blocks if stats.num_blocks else 0.0
        yield gauge("kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all.", share)

    def _counters(self) -> Iterator[Metric]:
        stats = self._stats
        for name, text, value in (
            ("num_preemptions", "Sequences that lost their blocks to others.", stats.preemptions),
            ("prompt_tokens", "Prompt tokens of admitted sequences.", stats.prompt_tokens),
            (
                "prompt_tokens_cached",
                "Those of them that the prefix cache, or a fork, saved.",
                stats.cached_prompt_tokens,
            ),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found.", stats.prefix_cache_hits),
        ):
            yield self._families.counter(name, text, value)
        yield self._families.counter(
            "request_success", "Choices that ended, by reason.", self._finished, "finished_reason"
        )

    def _histograms(self) -> Iterator[Metric]:
        stats = self._stats.requests
        for name, text, values in (
            ("time_to_first_token_seconds", "From arrival to a choice's first token.", stats.first_token),
            ("inter_token_latency_seconds", "Between tokens of a choice.", stats.between_tokens),
            (
                "request_time_per_output_token_seconds",
                "A choice's mean time between its tokens.",
                stats.per_output_token,
            ),
            ("e2e_request_latency_seconds", "From arrival to the end of a choice.", self._latencies),
            ("request_queue_time_seconds", "From arrival to the first step.", stats.queue),
            ("request_prefill_time_seconds", "From the first step to the first token.", stats.prefill),
            ("request_decode_time_seconds", "From the first token to the last.", stats.decode),
            ("request_inference_time_seconds", "From the first step to the last token.", stats.inference),
            ("request_prompt_tokens", "Prompt tokens of choices that ended.", stats.prompt_tokens),
            ("request_generation_tokens", "Tokens of choices that ended.", stats.generation_tokens),
            (
                "request_max_num_generation_tokens",
                "Tokens of a request's longest choice.",
                stats.longest_generation,
            ),
            ("request_params_n", "Choices that requests asked for.", stats.choices),
            ("request_params_max_tokens", "Most tokens that a choice could have.", stats.max_tokens),
            ("iteration_tokens_total", "Tokens computed for somebody in a step.", stats.step_tokens),
        ):
            yield self._families.histogram(name, text, values)

    def _infos(self) -> Iterator[Metric]:
        """Their labels are what they say; they have no model's name, as vLLM's have none."""
        config = {**_cache_config(self._stats), "engine": "0"}
        cache = GaugeMetricFamily("vllm:cache_config_info", "Settings of the KV cache.", labels=list(config))
        cache.add_metric(list(config.values()), 1)
        yield cache
        adapters = {"max_lora": "0", "waiting_lora_adapters": "", "running_lora_adapters": ""}
        lora = GaugeMetricFamily(
            "vllm:lora_requests_info", "Adapters in use (none are served), as of now.", labels=list(adapters)
        )
        lora.add_metric(list(adapters.values()), time.time())
        yield lora


def _cache_config(stats: EngineStats) -> dict[str, str]:
    """By vLLM's names."""
    settings = stats.kv_cache
    return {
        "block_size": str(settings.block_size),
        "cache_dtype": settings.dtype,
        "enable_prefix_caching": str(settings.enable_prefix_caching),
        "num_gpu_blocks": str(stats.num_blocks),
        "num_cpu_blocks": str(settings.num_host_blocks),
        "prefix_caching_hash_algo": "sha256",
        "sliding_window": "None",
    }
