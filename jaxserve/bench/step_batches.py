"""Batches as the real scheduler and builder make them, without a device: what the steps of a load look like."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.batch.builder import BatchBuilder, HostBatch
from jaxserve.config import ResolvedConfig
from jaxserve.errors import ConfigError
from jaxserve.outputs import ModelRunnerOutput
from jaxserve.request import Request, SamplingParams
from jaxserve.scheduler.factory import create_scheduler
from jaxserve.scheduler.step_time import StepTimeModel
from jaxserve.workload.traced_request import TracedRequest

_STEPS = 30  # decode steps that the host's time is the median of
_TOKEN = 7  # what every row is said to have sampled


@dataclass(frozen=True, slots=True)
class HostSteps:
    """What the host made of some requests.

    Attributes:
      prompts: the batch of the first step, as full of prompts as the limits allow.
      decode: that of a step in which all of them decode, in the middle of their outputs.
      host_seconds: planning, building and updating such a step; median.
    """

    prompts: HostBatch
    decode: HostBatch
    host_seconds: float


def requests_of(items: tuple[TracedRequest, ...], config: ResolvedConfig) -> list[Request]:
    """`items` half done: half of each output counts as prompt, and is followed by as much as measuring takes.

    Raises:
      ConfigError: one of them does not fit the model's context.
    """
    tokens = sum(len(item.prompt_token_ids) + item.max_tokens // 2 for item in items)
    steps = _STEPS + len(items) + tokens // max(1, config.max_num_batched_tokens - len(items))
    requests = []
    for index, item in enumerate(items):
        prompt = (*item.prompt_token_ids, *item.prompt_token_ids[:1] * (item.max_tokens // 2))
        if len(prompt) + steps > config.max_model_len:
            raise ConfigError(
                f"request {index}: {len(prompt)} tokens, and {steps} steps to measure, do not fit a context of "
                f"{config.max_model_len}"
            )
        params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
        requests.append(Request(f"{index}:0", f"{index}", 0, prompt, params, seed=index, max_tokens=steps))
    return requests


def blocks_for(requests: list[Request], config: ResolvedConfig) -> int:
    """KV blocks with which none of them is ever preempted."""
    tokens = (len(request.prompt_token_ids) + request.max_tokens + 1 for request in requests)
    return sum(-(-count // config.block_size) for count in tokens)


def make_batches(
    requests: list[Request],
    config: ResolvedConfig,
    buckets: ShapeBuckets,
    num_blocks: int,
    *,
    waiting: int = 0,
) -> HostSteps:
    """Let requests run until all decode, and for a while longer.

    Args:
      waiting: requests that queue behind them meanwhile, for want of a slot.
    """
    if waiting:
        config = replace(config, max_num_seqs=len(requests), max_waiting=waiting)
    scheduler = create_scheduler(config, num_blocks, StepTimeModel(lambda tokens, seqs: (tokens, seqs)))
    builder = BatchBuilder(buckets, block_size=config.block_size, padding_row=config.max_num_seqs)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    behind = [
        Request(f"w{index}:0", f"w{index}", 0, (index % 1000,), params, seed=0, max_tokens=1)
        for index in range(waiting)
    ]
    for request in (*requests, *behind):
        scheduler.add(request)
    prompts: HostBatch | None = None
    seconds: list[float] = []
    while True:
        started = time.perf_counter()
        plan = scheduler.schedule(0.0)
        batch = builder.build(plan)
        planned = time.perf_counter() - started
        result = ModelRunnerOutput({row.request_id: [_TOKEN] for row in batch.rows if row.samples})
        started = time.perf_counter()
        scheduler.update_from_output(plan, result)
        prompts = prompts or batch
        if all(row.num_scheduled_tokens == 1 for row in batch.rows) and len(batch.rows) == len(requests):
            seconds.append(planned + time.perf_counter() - started)
            if len(seconds) == _STEPS:
                return HostSteps(prompts, batch, statistics.median(seconds))
