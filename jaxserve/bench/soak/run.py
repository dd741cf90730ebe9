"""Thousands of requests of every kind against a pool that is far too small for them; then what is left of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from jaxserve.bench.environment import describe_environment
from jaxserve.bench.peers.peer import own_peer
from jaxserve.bench.peers.process import running
from jaxserve.bench.peers.ready import wait_until_ready
from jaxserve.bench.scrape import scrape
from jaxserve.bench.soak.client import End, send_all
from jaxserve.request import ServiceTargets
from jaxserve.workload.arrivals import Arrivals, Lengths
from jaxserve.workload.generator import WorkloadSpec, generate

_READY_TIMEOUT_S = 900.0
_IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
_COUNTED = (
    "preemptions",
    "promotions",
    "refus",
    "swap",
    "request_success",
    "serving_compilations",
    "host_tier",
)


@dataclass(frozen=True, slots=True)
class Soak:
    """What was seen.

    Attributes:
      ends: how many requests ended in which way.
      losses: what was said of those that were lost, the first few.
      compared, different: answers that were asked for again, alone; those that came out otherwise.
      idle: gauges afterwards, all of which should be 0.
      resident: (requests ended, bytes of the server's memory), as it went.
      counts: the server's counters that say what happened.
    """

    requests: int
    ends: dict[str, int]
    losses: tuple[str, ...]
    compared: int
    different: int
    idle: dict[str, float]
    resident: tuple[tuple[int, int], ...]
    counts: dict[str, float]

    @property
    def growth(self) -> int:
        """Bytes of memory that the server gained from a fifth of the requests on."""
        later = [size for done, size in self.resident if done >= self.requests / 5]
        return later[-1] - later[0]

    @property
    def is_well(self) -> bool:
        """Nothing lost, nothing different, nothing left behind."""
        return not self.ends.get(End.LOST, 0) and not self.different and not any(self.idle.values())


def soak(
    model: str,
    *,
    num_requests: int,
    clients: int,
    compare: int,
    seed: int,
    flags: Sequence[str],
    announce: Callable[[str], None],
) -> Soak:
    """Run it. The server is in deterministic mode, so that answers can be compared token for token.

    Args:
      clients: requests in progress at a time.
      compare: how many answers are asked for again, each alone.
      flags: of `serve`; should name a pool that is too small for `clients` requests.

    Raises:
      JaxserveError: the server did not start.
    """
    items = generate(_spec(num_requests), seed).requests
    resident: list[tuple[int, int]] = []
    with running(own_peer("soak", model, ("--deterministic", *flags))) as server:
        name = wait_until_ready(server, timeout_s=_READY_TIMEOUT_S).model

        def every(done: int) -> None:
            if done % max(num_requests // 20, 1) == 0:
                resident.append((done, server.resident_bytes()))
                announce(f"{done} of {num_requests} requests, {resident[-1][1] / 2**20:.0f} MiB")

        endings = send_all(server.url, name, items, clients=clients, every=every)
        answered = [index for index, ending in enumerate(endings) if ending.token_ids]
        chosen = random.Random(seed).sample(answered, min(compare, len(answered)))
        again = send_all(server.url, name, [items[index] for index in chosen], clients=1)
        metrics = scrape(server.url, "counter", "gauge")
    different = sum(
        endings[index].token_ids != alone.token_ids for index, alone in zip(chosen, again, strict=True)
    )
    return Soak(
        requests=num_requests,
        ends=dict(Counter(ending.end.value for ending in endings)),
        losses=tuple(ending.detail for ending in endings if ending.end is End.LOST)[:10],
        compared=len(chosen),
        different=different,
        idle={key: value for key, value in metrics.items() if key in _IDLE},
        resident=tuple(resident),
        counts={
            key: value
            for key, value in metrics.items()
            if value and key not in _IDLE and any(word in key for word in _COUNTED)
        },
    )


def _spec(num_requests: int) -> WorkloadSpec:
    return WorkloadSpec(
        num_requests=num_requests,
        arrivals=Arrivals(1e6),
        prompt=Lengths(40, 0.9, most=160),
        output=Lengths(20, 0.8, most=80),
        context=250,
        background_share=0.3,
        chat_share=0.3,
        think_seconds=0.0,
        system_prompts=4,
        system_tokens=24,
        clients=8,
        client_skew=1.0,
        targets=ServiceTargets(itl_seconds=0.5),
        priorities=3,
        n_share=0.1,
        most_n=3,
        stop_share=0.1,
        sampled_share=0.4,
        abort_share=0.15,
        abort_seconds=1.0,
    )


def report(result: Soak) -> str:
    """As text."""
    ends = ", ".join(f"{count} {end}" for end, count in sorted(result.ends.items()))
    lines = [
        "",
        f"{result.requests} requests: {ends}",
        *(f"  lost: {loss}" for loss in result.losses),
        f"asked again alone: {result.compared}, of which {result.different} came out otherwise",
        "left behind: " + (", ".join(f"{k} {v:g}" for k, v in result.idle.items() if v) or "nothing"),
        f"memory: {result.growth / 2**20:+.1f} MiB from a fifth of the requests on",
        *(f"  {name} {value:g}" for name, value in sorted(result.counts.items())),
    ]
    return "\n".join(lines)


def to_json(result: Soak) -> dict[str, object]:
    """Everything, with what it depends on."""
    return {"benchmark": "soak", **describe_environment(), **asdict(result), "growth": result.growth}
