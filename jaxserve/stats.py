"""Counts and gauges of a running engine: written by the engine thread, read by metrics and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jaxserve.request import ServiceClass
from jaxserve.request_stats import RequestStats


@dataclass(slots=True)
class BucketStats:
    """What came to one bucket: steps, what they took, and their tokens and rows of logits computed for nobody."""

    steps: int = 0
    seconds: float = 0.0
    padding_tokens: int = 0
    padding_rows: int = 0


@dataclass(slots=True)
class ReadyShapes:
    """How many of an engine's shapes have their program; the rest is still being compiled."""

    ready: int = 0
    total: int = 0


def zero_by_class() -> dict[str, int]:
    """A count for each service class."""
    return {service_class.value: 0 for service_class in ServiceClass}


@dataclass(slots=True)
class SwapStats:
    """What host memory does for the KV cache.

    Attributes:
      blocks, used_blocks: that there is room for; that hold something (gauges).
      pinned_blocks: kept, or room kept for them, for preempted sequences (gauge).
      block_bytes: of one block.
      out_blocks, in_blocks: copied to host memory, and back.
      evictions: contents that went from there for others.
      preemptions: preempted sequences whose blocks it keeps; the others compute theirs again.
      requests_in: admissions that brought blocks in; hits: tokens of prompts that were found there.
      out_bytes_per_second, in_bytes_per_second: as measured so far (gauges).
    """

    blocks: int = 0
    used_blocks: int = 0
    pinned_blocks: int = 0
    block_bytes: int = 0
    out_blocks: int = 0
    in_blocks: int = 0
    evictions: int = 0
    preemptions: int = 0
    requests_in: int = 0
    hits: int = 0
    out_bytes_per_second: float = 0.0
    in_bytes_per_second: float = 0.0


@dataclass(slots=True)
class SpeculationStats:
    """Counters of speculative decoding.

    Attributes:
      drafts: rows of drafts verified, one a request and step; draft_tokens: tokens in them.
      accepted_tokens: of these in outputs; accepted_by_position: by place in their draft, from 0.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Count one request's drafts in a step."""
        self.drafts += 1
        self.draft_tokens += num_drafted
        self.accepted_tokens += num_accepted
        for place in range(num_accepted):
            self.accepted_by_position[place] += 1

    def copy(self) -> SpeculationStats:
        """As they are now: who reads them in another thread must never see any of them shrink."""
        return replace(self, accepted_by_position=list(self.accepted_by_position))

    def take_back(self, num_accepted: int, num_lost: int) -> None:
        """The last `num_lost` of `num_accepted` counted drafts are in no output."""
        self.accepted_tokens -= num_lost
        for place in range(num_accepted - num_lost, num_accepted):
            self.accepted_by_position[place] -= 1


@dataclass(frozen=True, slots=True)
class KVCacheSettings:
    """How the KV cache is laid out; `num_host_blocks` are those in host memory."""

    block_size: int = 0
    dtype: str = ""
    enable_prefix_caching: bool = False
    num_host_blocks: int = 0


@dataclass(slots=True)
class EngineStats:
    """Counters only ever grow; gauges are those of the last step.

    Attributes:
      num_running, num_waiting: sequences (gauges).
      running_by_class, waiting_by_class: the same by service class; promoted ones count as what they came as (gauges).
      waiting_tokens: tokens that the waiting ones have to compute (gauge).
      num_blocks, num_free_blocks: the pool; free includes blocks kept for the prefix cache (gauges).
      steps: forward passes run.
      step_failures: steps that the device failed at; step_failures_in_a_row: since the last that worked (gauge).
      useful_tokens: tokens computed for a request; padded_tokens: all tokens computed, bucket padding included.
      prompt_tokens, cached_prompt_tokens: of admitted prompts; how many of them the prefix cache saved.
      generation_tokens: sampled and accepted.
      preemptions, evictions: sequences that lost their blocks; cached blocks given to somebody else.
      preemptions_by_class: the preempted by their service class.
      class_preemptions: how many of them made room for a request of a higher class or priority.
      promotions: background requests that had waited for `background_max_wait` and passed interactive ones.
      stall_cuts: steps that computed less of prompts than they could have, so that running streams keep their
        inter-token latency.
      refusals: requests refused because of load, by `OverloadedError.reason`.
      ttft_predictions: requests whose predicted time to first token has been compared with the actual one.
      ttft_predicted_seconds, ttft_actual_seconds, ttft_error_seconds: sums over these, the last one of absolute errors.
      ttft_promises_kept, ttft_promises_missed: first tokens that came within, or after, the time asked for; only of
        requests that a prediction had let in.
      within_targets, outside_targets: sequences that ended, by service class: with the latencies asked for (or none
        asked for), or without, errors included; inter-token latency is a sequence's mean. Aborted ones count nowhere.
      ttft_correction: what predictions for interactive requests are multiplied by, learned from actual ones (gauge).
      ttft_spread: mean deviation of actual over predicted times from that (gauge).
      prefix_cache_queries, prefix_cache_hits: tokens looked up and found, on the device or in host memory.
      swap: what host memory does for the cache.
      speculation: what came of drafts.
      compilations: executables compiled, warm-up included; serving_compilations: those after it (must stay 0).
      finished: requests ended, by finish reason.
      requests: how sequences fared.
      kv_cache: its settings.
      shapes: whose programs are ready; refreshed between steps as well.
      by_bucket: (T, S) of every bucket there is -> what came to it.
      memory: bytes by what they are for, as accounted before serving.
      step_seconds, host_seconds: summed wall time of steps, and of what of it was not spent waiting for the device.
      host_gap_seconds: summed time for which the device waited for the host, see `HostGap`.
    """

    num_running: int = 0
    num_waiting: int = 0
    running_by_class: dict[str, int] = field(default_factory=zero_by_class)
    waiting_by_class: dict[str, int] = field(default_factory=zero_by_class)
    waiting_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    steps: int = 0
    step_failures: int = 0
    step_failures_in_a_row: int = 0
    useful_tokens: int = 0
    padded_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    preemptions_by_class: dict[str, int] = field(default_factory=zero_by_class)
    class_preemptions: int = 0
    promotions: int = 0
    stall_cuts: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    ttft_predictions: int = 0
    ttft_predicted_seconds: float = 0.0
    ttft_actual_seconds: float = 0.0
    ttft_error_seconds: float = 0.0
    ttft_correction: float = 1.0
    ttft_spread: float = 0.0
    ttft_promises_kept: int = 0
    ttft_promises_missed: int = 0
    within_targets: dict[str, int] = field(default_factory=zero_by_class)
    outside_targets: dict[str, int] = field(default_factory=zero_by_class)
    evictions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    swap: SwapStats = field(default_factory=SwapStats)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    compilations: int = 0
    serving_compilations: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    requests: RequestStats = field(default_factory=RequestStats)
    kv_cache: KVCacheSettings = KVCacheSettings()
    shapes: ReadyShapes = field(default_factory=ReadyShapes)
    by_bucket: dict[tuple[int, int], BucketStats] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    step_seconds: float = 0.0
    host_seconds: float = 0.0
    host_gap_seconds: float = 0.0

    def count_step(self, bucket: tuple[int, int], num_tokens: int, num_rows: int) -> None:
        """Count a forward pass of a (T, S) with so many useful tokens and rows."""
        self.steps += 1
        self.requests.step_tokens.observe(num_tokens)
        self.useful_tokens += num_tokens
        self.padded_tokens += bucket[0]
        here = self.by_bucket[bucket]
        here.steps += 1
        here.padding_tokens += bucket[0] - num_tokens
        here.padding_rows += bucket[1] - num_rows

    @property
    def packing_efficiency(self) -> float:
        """Useful tokens / computed tokens; 1.0 before the first step."""
        return self.useful_tokens / self.padded_tokens if self.padded_tokens else 1.0
