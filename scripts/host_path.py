"""Host microseconds of a step, by part, with nothing on the device: python -m scripts.host_path

The real scheduler and batch builder decode rows of contexts of 256 tokens and more; a stand-in for the device
answers at once.
"""

from __future__ import annotations

import statistics
import time

from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.batch.builder import BatchBuilder
from jaxserve.config import EngineConfig, ModelConfig, resolve
from jaxserve.outputs import ModelRunnerOutput
from jaxserve.request import Request, SamplingParams
from jaxserve.scheduler.factory import create_scheduler

MODEL = ModelConfig("LlamaForCausalLM", 49152, 64, 128, 2, 4, 2, 16, 8192)
STEPS, PROMPT = 200, 256


def measure(num_seqs: int) -> dict[str, float]:
    """Medians in microseconds of planning, building and updating a step in which all decode."""
    options = EngineConfig(max_num_seqs=num_seqs, max_num_batched_tokens=2048, max_model_len=4096)
    config = resolve(options, MODEL, platform="cpu")
    scheduler = create_scheduler(config, num_seqs * config.max_blocks_per_seq)
    sizes = ((num_seqs, (num_seqs,)), (2048, (num_seqs,)))  # a step of decode rows, and one that prompts fill
    buckets = ShapeBuckets(sizes, config.max_blocks_per_seq)
    builder = BatchBuilder(buckets, block_size=config.block_size, padding_row=num_seqs)
    for i in range(num_seqs):
        prompt = tuple(range(i, i + PROMPT))
        params = SamplingParams(max_tokens=3000)
        scheduler.add(Request(f"r{i}:0", f"r{i}", 0, prompt, params, seed=i, max_tokens=3000))
    taken: dict[str, list[float]] = {"plan": [], "build": [], "update": []}
    decoding = 0
    while decoding < STEPS:
        times = [time.perf_counter()]
        plan = scheduler.schedule()
        times.append(time.perf_counter())
        batch = builder.build(plan)
        times.append(time.perf_counter())
        result = ModelRunnerOutput({row.request_id: [7] for row in batch.rows if row.samples})
        times.append(time.perf_counter())
        scheduler.update_from_output(plan, result)
        times.append(time.perf_counter())
        if plan.num_scheduled_tokens == num_seqs and all(
            row.num_computed_tokens >= PROMPT for row in batch.rows
        ):
            decoding += 1
            for part, at in (("plan", 0), ("build", 1), ("update", 3)):
                taken[part].append((times[at + 1] - times[at]) * 1e6)
    return {part: statistics.median(values) for part, values in taken.items()}


if __name__ == "__main__":
    for count in (1, 64, 256):
        parts = measure(count)
        text = ", ".join(f"{part} {value:.0f}" for part, value in parts.items())
        print(f"{count} sequences: {text}; in all {sum(parts.values()):.0f} us")
