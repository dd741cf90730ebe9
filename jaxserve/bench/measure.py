"""Running a workload through an engine, and what that took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxserve.engine import EngineCore
from jaxserve.errors import JaxserveError
from jaxserve.workload.traced_request import Workload


@dataclass(frozen=True, slots=True)
class Run:
    """One pass of a workload. Times are seconds from the moment before the first request was submitted.

    Attributes:
      seconds: until the last request ended.
      token_ids: output of each request, in the workload's order.
      first_token, finished: when each request had its first token, and its last.
      num_prompt_tokens, num_output_tokens: of the workload.
      steps: forward passes.
      useful_tokens, padded_tokens: computed for a request; computed in all, padding included.
      slot_steps: summed over the steps, sequences that held a slot.
      num_slots: `max_num_seqs`.
      preemptions, compilations: during the pass.
    """

    seconds: float
    token_ids: tuple[tuple[int, ...], ...]
    first_token: tuple[float, ...]
    finished: tuple[float, ...]
    num_prompt_tokens: int
    num_output_tokens: int
    steps: int
    useful_tokens: int
    padded_tokens: int
    slot_steps: int
    num_slots: int
    preemptions: int
    compilations: int

    @property
    def output_throughput(self) -> float:
        """Output tokens a second."""
        return self.num_output_tokens / self.seconds

    @property
    def total_throughput(self) -> float:
        """Prompt and output tokens a second."""
        return (self.num_prompt_tokens + self.num_output_tokens) / self.seconds

    @property
    def packing_efficiency(self) -> float:
        """Useful tokens / computed tokens."""
        return self.useful_tokens / self.padded_tokens

    @property
    def slot_utilisation(self) -> float:
        """Mean share of the slots that an unfinished sequence held during a step."""
        return self.slot_steps / (self.steps * self.num_slots)

    def ttft(self, percent: float) -> float:
        """Time to first token: that percentile over the requests, seconds."""
        return float(np.percentile(self.first_token, percent))

    def latency(self, percent: float) -> float:
        """Time to last token: that percentile over the requests, seconds."""
        return float(np.percentile(self.finished, percent))


def run_workload(
    engine: EngineCore, workload: Workload, *, clock: Callable[[], float] = time.perf_counter
) -> Run:
    """Submit everything at once to an idle engine, and step until nothing is left.

    Args:
      clock: seconds, monotonic.

    Raises:
      InvalidRequestError, QueueFullError: a request does not fit the engine.
      JaxserveError: a request did not end by its length.
    """
    assert not engine.has_work(), "the engine is busy with something else"
    stats = engine.stats
    before = (
        stats.steps,
        stats.useful_tokens,
        stats.padded_tokens,
        stats.preemptions,
        stats.serving_compilations,
    )
    index_of = {f"bench-{index}": index for index in range(len(workload.requests))}
    tokens: list[list[int]] = [[] for _ in workload.requests]
    first: list[float] = [0.0] * len(tokens)
    finished: list[float] = [0.0] * len(tokens)
    slot_steps = 0
    started = clock()
    for request_id, index in index_of.items():
        engine.submit(workload.requests[index].request(request_id))
    while engine.has_work():
        outputs = engine.step()
        now = clock() - started
        slot_steps += stats.num_running  # those that go on ...
        for output in outputs:
            index = index_of[output.request_id]
            if output.token_ids and not tokens[index]:
                first[index] = now
            tokens[index] += output.token_ids
            if output.finish_reason is not None:
                slot_steps += 1  # ... and those that ended in this step
                finished[index] = now
                if len(tokens[index]) != workload.requests[index].max_tokens:
                    raise JaxserveError(
                        f"request {index} ended after {len(tokens[index])} of "
                        f"{workload.requests[index].max_tokens} tokens: {output.error or output.finish_reason.value}"
                    )
    seconds = clock() - started
    after = (
        stats.steps,
        stats.useful_tokens,
        stats.padded_tokens,
        stats.preemptions,
        stats.serving_compilations,
    )
    steps, useful, padded, preemptions, compilations = (b - a for a, b in zip(before, after, strict=True))
    return Run(
        seconds=seconds,
        token_ids=tuple(map(tuple, tokens)),
        first_token=tuple(first),
        finished=tuple(finished),
        num_prompt_tokens=workload.num_prompt_tokens,
        num_output_tokens=workload.num_output_tokens,
        steps=steps,
        useful_tokens=useful,
        padded_tokens=padded,
        slot_steps=slot_steps,
        num_slots=engine.config.max_num_seqs,
        preemptions=preemptions,
        compilations=compilations,
    )
