"""What the scheduler costs a step: real plans, real bookkeeping, and a stand-in for the device that answers at once.

The house is full: as many run as may, others wait, and whoever ends is replaced by a newcomer, so every step decodes,
most admit somebody, and prompts are cut into chunks. Requests come from several clients and of both service classes.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxserve.bench.environment import describe_environment
from jaxserve.bench.picture import new_figure, save
from jaxserve.config import ResolvedConfig
from jaxserve.outputs import ModelRunnerOutput
from jaxserve.request import Request, SamplingParams, ServiceClass
from jaxserve.scheduler.factory import create_scheduler
from jaxserve.scheduler.step_time import StepTimeModel

_STEP_SECONDS = 0.02  # by the clock that the scheduler is told
_NUM_CLIENTS = 16
_PROMPT_TOKENS, _OUTPUT_TOKENS = (16, 512), (32, 256)
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds.

    Attributes:
      running, waiting: sequences, all the time.
      plan, accept: of planning a step, and of accepting its result; medians.
      total_p99: of the two together.
      submit: of taking in a newcomer; median.
    """

    running: int
    waiting: int
    plan: float
    accept: float
    total_p99: float
    submit: float

    @property
    def total(self) -> float:
        """Of a step: plan and accept."""
        return self.plan + self.accept


def measure_costs(running: tuple[int, ...], waiting: tuple[int, ...], *, steps: int) -> list[Cost]:
    """A cost for each pair, `steps` steps each."""
    return [_measure(run, wait, steps) for run in running for wait in waiting]


def _measure(running: int, waiting: int, steps: int) -> Cost:
    rng = random.Random(0)
    longest = _PROMPT_TOKENS[1] + _OUTPUT_TOKENS[1]
    config = ResolvedConfig(
        dtype="float32",
        max_model_len=longest,
        max_num_seqs=running,
        max_num_batched_tokens=running + 512,
        max_prefill_chunk=256,
        block_size=_BLOCK_SIZE,
        enable_prefix_caching=True,
        scheduler="continuous",
        max_waiting=running + waiting,
        seed=0,
        attention_backend="auto",
    )
    num_blocks = running * longest // _BLOCK_SIZE
    scheduler = create_scheduler(config, num_blocks, StepTimeModel(lambda tokens, seqs: (tokens, seqs)))
    num_added = 0
    now = 0.0

    def newcomer() -> Request:
        nonlocal num_added
        num_added += 1
        return _request(num_added, now, rng)

    for _ in range(running + waiting):
        scheduler.add(newcomer())
    plans, accepts, submits = [], [], []
    # Until the first have ended and been replaced, all are in step with each other.
    for step in range(_OUTPUT_TOKENS[1] + steps):
        now += _STEP_SECONDS
        began = time.perf_counter()
        plan = scheduler.schedule(now)
        planned = time.perf_counter()
        result = ModelRunnerOutput({row.request_id: [1] for row in plan.scheduled if row.samples})
        answered = time.perf_counter()
        updates = scheduler.update_from_output(plan, result)
        accepted = time.perf_counter()
        for request in [newcomer() for update in updates if update.request.is_finished]:
            came = time.perf_counter()
            scheduler.add(request)
            submits.append((time.perf_counter() - came) * 1e3)
        if step >= _OUTPUT_TOKENS[1]:
            plans.append((planned - began) * 1e3)
            accepts.append((accepted - answered) * 1e3)
    totals = sorted(plan + accept for plan, accept in zip(plans, accepts, strict=True))
    return Cost(
        running,
        waiting,
        statistics.median(plans),
        statistics.median(accepts),
        totals[min(len(totals) - 1, round(0.99 * len(totals)))],
        statistics.median(submits),
    )


def _request(number: int, now: float, rng: random.Random) -> Request:
    output = rng.randint(*_OUTPUT_TOKENS)
    start = rng.randrange(50_000)
    return Request(
        request_id=f"r{number}:0",
        group_id=f"r{number}",
        index=0,
        prompt_token_ids=tuple(range(start, start + rng.randint(*_PROMPT_TOKENS))),
        params=SamplingParams(max_tokens=output),
        seed=number,
        max_tokens=output,
        service_class=rng.choice([ServiceClass.INTERACTIVE, ServiceClass.BACKGROUND]),
        client=f"client {rng.randrange(_NUM_CLIENTS)}",
        arrival_time=now,
    )


def report(costs: list[Cost]) -> str:
    """A line for each."""
    names = ("running", "waiting", "plan", "accept", "total", "total P99", "submit")
    lines = ["", "the scheduler alone, milliseconds a step", "".join(f"{name:>11}" for name in names)]
    for cost in costs:
        counts = f"{cost.running:>11}{cost.waiting:>11}"
        lines.append(
            counts
            + "".join(
                f"{value:>11.3f}"
                for value in (cost.plan, cost.accept, cost.total, cost.total_p99, cost.submit)
            )
        )
    return "\n".join(lines)


def to_json(costs: list[Cost], *, steps: int) -> dict[str, object]:
    """Everything, with what it depends on."""
    return {
        "benchmark": "scheduler",
        **describe_environment(),
        "steps": steps,
        "milliseconds": [{**asdict(cost), "total": cost.total} for cost in costs],
    }


def plot(costs: list[Cost], path: Path) -> None:
    """Cost against running sequences, a line for each length of the queue; the suffix of `path` decides the format.

    Raises:
      ConfigError: matplotlib is missing, or does not know the format.
    """
    figure = new_figure(width=6, height=3.6)
    axes = figure.subplots()
    for waiting in sorted({cost.waiting for cost in costs}):
        line = [cost for cost in costs if cost.waiting == waiting]
        axes.plot([c.running for c in line], [c.total for c in line], "o-", label=f"{waiting:,} waiting")
    axes.set_xlabel("running sequences")
    axes.set_ylabel("milliseconds a step (median)")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    save(figure, path)
