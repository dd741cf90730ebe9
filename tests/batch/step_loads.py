"""Step sizes of whole loads: the real scheduler, with a clock in which a step takes 33 ms and 1.5 ms a token."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

from jaxserve.batch.step_sizes import StepLimits, StepSizes
from jaxserve.outputs import ModelRunnerOutput
from jaxserve.scheduler.factory import create_scheduler
from jaxserve.scheduler.step_time import StepTimeModel
from tests.fakes import make_config, make_request

WORKLOADS = Path(__file__).parents[2] / "workloads"
Arrival = tuple[float, int, int]  # seconds, prompt tokens, output tokens


def steps_of(arrivals: list[Arrival], limits: StepLimits) -> StepSizes:
    """What a server with these limits would compute."""
    config = make_config(
        max_num_seqs=limits.max_seqs,
        max_num_batched_tokens=limits.max_tokens,
        max_model_len=2048,
        block_size=32,
        enable_prefix_caching=False,
    )
    scheduler = create_scheduler(
        config, 64 * limits.max_seqs, StepTimeModel(lambda tokens, seqs: (tokens, seqs))
    )
    waiting = sorted(arrivals, reverse=True)
    counts: Counter[tuple[int, int]] = Counter()
    now = 0.0
    while waiting or scheduler.has_unfinished:
        if not scheduler.has_unfinished:
            now = max(now, waiting[-1][0])
        while waiting and waiting[-1][0] <= now:
            _, prompt, output = waiting.pop()
            name = f"r{len(waiting)}"
            scheduler.add(make_request(name, [1] * prompt, output))
        plan = scheduler.schedule(0.0)
        result = ModelRunnerOutput()
        result.sampled_token_ids.update({row.request_id: [7] for row in plan.scheduled if row.samples})
        scheduler.update_from_output(plan, result)
        counts[plan.num_scheduled_tokens, len(plan.scheduled)] += 1
        now += 0.033 + 0.0015 * plan.num_scheduled_tokens
    return StepSizes(dict(counts))


def workload(name: str) -> list[tuple[int, int]]:
    """(prompt, output) lengths of a file in workloads/."""
    items = json.loads((WORKLOADS / f"{name}.json").read_text())
    return [(len(item["prompt_token_ids"]), item["max_tokens"]) for item in items]


def at_once(lengths: list[tuple[int, int]]) -> list[Arrival]:
    return [(0.0, *length) for length in lengths]


def poisson(lengths: list[tuple[int, int]], rate: float) -> list[Arrival]:
    """One after the other, `rate` a second on average."""
    rng = random.Random(0)
    now, arrivals = 0.0, []
    for length in lengths:
        now += rng.expovariate(rate)
        arrivals.append((now, *length))
    return arrivals
