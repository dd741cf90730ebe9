"""Dashboards made for vLLM: names, types, labels, and that the numbers are those of what requests did."""

from __future__ import annotations

import time
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.server.circuit_breaker import BreakerLimits, CircuitBreaker
from jaxserve.server.metrics import ServerMetrics
from jaxserve.stats import EngineStats
from jaxserve.tokenizer import Tokenizer
from tests.server import http
from tests.server.copy_engine import CopyEngine
from tests.server.running_server import RunningServer

COMPLETIONS = "/v1/completions"
USUAL = {"model_name", "engine"}
GAUGES = {"num_requests_running": USUAL, "num_requests_waiting": USUAL, "kv_cache_usage_perc": USUAL} | {
    "lora_requests_info": {"max_lora", "waiting_lora_adapters", "running_lora_adapters"},
    "cache_config_info": {"block_size", "cache_dtype", "num_gpu_blocks", "enable_prefix_caching", "engine"},
}
COUNTERS = {
    **dict.fromkeys(("prefix_cache_queries", "prefix_cache_hits", "num_preemptions"), USUAL),
    **dict.fromkeys(("prompt_tokens", "prompt_tokens_cached", "generation_tokens"), USUAL),
    "request_success": USUAL | {"finished_reason"},
}
HISTOGRAMS = dict.fromkeys(
    (
        *("request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total"),
        *("request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds"),
        *("request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
        *("request_queue_time_seconds", "request_inference_time_seconds"),
        *("request_prefill_time_seconds", "request_decode_time_seconds"),
    ),
    USUAL,
)
DRAFTS = {
    **dict.fromkeys(("num_drafts", "num_draft_tokens", "num_accepted_tokens"), USUAL),
    "num_accepted_tokens_per_pos": USUAL | {"position"},
}


def families(text: str) -> dict[str, Metric]:
    found = list(text_string_to_metric_families(text))
    assert len(found) == len({family.name for family in found}), "a name comes twice"
    return {family.name: family for family in found}


class Scrape:
    """A real server's `/metrics` at a moment."""

    def __init__(self, url: str) -> None:
        reply = http.request(url, "GET", "/metrics")
        assert reply.headers["content-type"].startswith("text/plain")
        self.families = families(reply.body.decode())
        self.values: dict[str, float] = {}  # summed over labels
        for family in self.families.values():
            for sample in family.samples:
                if not sample.name.endswith("_bucket"):
                    self.values[sample.name] = self.values.get(sample.name, 0.0) + sample.value

    def since(self, before: Scrape, name: str) -> float:
        return self.values[name] - before.values[name]


def check_family(family: Metric, kind: str, labels: set[str]) -> None:
    assert family.type == kind, family
    for sample in family.samples:
        extra = {"le"} if sample.name.endswith("_bucket") else set()
        missing = (labels | extra) - set(sample.labels)
        assert not missing, sample
        if family.name != "vllm:cache_config_info":
            assert set(sample.labels) == labels | extra, sample


@pytest.mark.parametrize("kind", ["gauge", "counter", "histogram"])
def test_every_name_has_its_type_and_labels(api_url: str, kind: str) -> None:
    found = Scrape(api_url).families
    for name, labels in {"gauge": GAUGES, "counter": COUNTERS, "histogram": HISTOGRAMS}[kind].items():
        check_family(found[f"vllm:{name}"], kind, labels)


def test_drafts_have_their_names() -> None:
    stats = EngineStats()
    stats.speculation.accepted_by_position = [0, 0, 0]
    stats.speculation.count(3, 2)
    breaker = CircuitBreaker(BreakerLimits(), time.monotonic)
    found = families(ServerMetrics(stats, breaker, "m").render().decode())
    for name, labels in DRAFTS.items():
        check_family(found[f"vllm:spec_decode_{name}"], "counter", labels)
    positions = found["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
    assert [(one.labels["position"], one.value) for one in positions] == [("0", 1), ("1", 1), ("2", 0)]


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Once upon a time", "ignore_eos": True, **fields}


def test_histograms_are_whole(api_url: str) -> None:
    http.post(api_url, COMPLETIONS, completion(max_tokens=3))
    found = Scrape(api_url).families
    for name in HISTOGRAMS:
        family = found[f"vllm:{name}"]
        buckets = [one for one in family.samples if one.name.endswith("_bucket")]
        bounds = [float(one.labels["le"]) for one in buckets]
        assert bounds == sorted(set(bounds))
        assert bounds[-1] == float("inf")
        counts = [one.value for one in buckets]
        assert counts == sorted(counts)
        assert {one.value for one in family.samples if one.name.endswith("_count")} == {counts[-1]}
        assert counts[-1] > 0, name


def test_numbers_are_those_of_the_requests(api_url: str) -> None:
    before = Scrape(api_url)
    streamed = completion(n=2, max_tokens=5, stream_options={"include_usage": True})
    usages = [
        http.stream(api_url, COMPLETIONS, streamed)[-1]["usage"],
        http.post(api_url, COMPLETIONS, completion(max_tokens=7)).json["usage"],
    ]
    after = Scrape(api_url)
    prompt = usages[1]["prompt_tokens"]
    tokens = sum(usage["completion_tokens"] for usage in usages)
    assert tokens == 2 * 5 + 7
    choices, requests = 3, 2

    def since(name: str) -> float:
        return after.since(before, f"vllm:{name}")

    assert since("request_success_total") == choices
    assert since("prompt_tokens_total") == choices * prompt
    assert since("generation_tokens_total") == tokens
    for name in ("prompt_tokens", "generation_tokens", "params_max_tokens"):
        assert since(f"request_{name}_count") == choices, name
    assert since("request_prompt_tokens_sum") == choices * prompt
    assert since("request_generation_tokens_sum") == tokens
    assert since("request_params_max_tokens_sum") == tokens
    assert (since("request_params_n_count"), since("request_params_n_sum")) == (requests, choices)
    longest = "request_max_num_generation_tokens"
    assert (since(f"{longest}_count"), since(f"{longest}_sum")) == (requests, 5 + 7)
    assert since("time_to_first_token_seconds_count") == choices
    assert since("inter_token_latency_seconds_count") == tokens - choices
    for name in ("queue", "prefill", "decode", "inference"):
        assert since(f"request_{name}_time_seconds_count") == choices, name
    assert since("request_time_per_output_token_seconds_count") == choices
    assert since("e2e_request_latency_seconds_count") == choices

    seconds = {
        name: since(f"request_{name}_time_seconds_sum")
        for name in ("queue", "prefill", "decode", "inference")
    }
    assert all(value > 0 for value in seconds.values()), seconds
    assert seconds["inference"] == pytest.approx(seconds["prefill"] + seconds["decode"])
    assert since("inter_token_latency_seconds_sum") == pytest.approx(seconds["decode"])
    assert since("time_to_first_token_seconds_sum") == pytest.approx(seconds["queue"] + seconds["prefill"])
    assert since("e2e_request_latency_seconds_sum") >= seconds["queue"] + seconds["inference"]

    assert since("iteration_tokens_total_count") == after.since(before, "jaxserve:steps_total")
    assert since("iteration_tokens_total_sum") == after.since(before, "jaxserve:useful_tokens_total")


def test_cached_tokens_are_what_usage_says(api_url: str) -> None:
    body = completion(prompt="A prompt of its own, told twice. " * 20, max_tokens=2)
    for _ in range(2):
        before = Scrape(api_url)
        usage = http.post(api_url, COMPLETIONS, body).json["usage"]
        after = Scrape(api_url)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert after.since(before, "vllm:prompt_tokens_cached_total") == cached
        assert after.since(before, "vllm:prefix_cache_hits_total") == cached
        assert after.since(before, "vllm:prefix_cache_queries_total") >= usage["prompt_tokens"] - 1
    assert cached > 0


def test_the_shapes_account_for_all_steps(api_url: str) -> None:
    before = Scrape(api_url)
    http.post(api_url, COMPLETIONS, completion(n=4, max_tokens=9))
    after = Scrape(api_url)

    def since(name: str) -> float:
        return after.since(before, f"jaxserve:{name}_total")

    assert since("bucket_steps") == since("steps") > 0
    assert since("bucket_padding_tokens") == since("padded_tokens") - since("useful_tokens")
    assert 0 < since("bucket_step_seconds") <= since("step_seconds")


def test_what_only_this_server_has_is_there(api_url: str) -> None:
    values = Scrape(api_url).values
    for name in (
        *("packing_efficiency", "bucket_steps_total", "compilations_total", "serving_compilations_total"),
        *("swap_bytes_total", "ttft_predicted_seconds_total", "ttft_actual_seconds_total"),
        *("refusals_total", "bucket_step_seconds_total", "memory_bytes"),
    ):
        assert f"jaxserve:{name}" in values, name


def test_refusals_at_the_door_are_counted_by_reason(tokenizer: Tokenizer) -> None:
    with RunningServer(CopyEngine(tokenizer)) as server:
        server.drain(0.0)
        body = {"model": "copy", "prompt": "a", "max_tokens": 1}
        while http.post(server.base_url, COMPLETIONS, body).status != 503:
            time.sleep(0.01)
        (family,) = [Scrape(server.base_url).families["jaxserve:refusals"]]
    counts = {sample.labels["reason"]: sample.value for sample in family.samples}
    assert counts == {
        **dict.fromkeys(("queue_full", "queue_tokens_full", "ttft_target", "circuit_open", "engine_dead"), 0),
        "shutting_down": 1,
    }
