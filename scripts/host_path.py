"""Host microseconds of a step, by part, with nothing on the device: python -m scripts.host_path

The real scheduler, batch builder and output processor (text, stop strings, one output a row, streamed) decode rows of
contexts of 256 tokens and more; a stand-in for the device answers at once.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.batch.builder import BatchBuilder
from jaxserve.checkpoint import open_checkpoint, resolve_model
from jaxserve.config import EngineConfig, ModelConfig, resolve
from jaxserve.output_processor import OutputProcessor
from jaxserve.outputs import ModelRunnerOutput
from jaxserve.request import Request, SamplingParams
from jaxserve.scheduler.factory import create_scheduler
from jaxserve.scheduler.step_time import StepTimeModel
from jaxserve.tokenizer import Tokenizer

CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
MODEL = ModelConfig("LlamaForCausalLM", 49152, 64, 128, 2, 4, 2, 16, 8192)
STEPS, PROMPT = 200, 256
TOKEN = 1000  # what every row samples: a word


def measure(num_seqs: int, tokenizer: Tokenizer) -> dict[str, float]:
    """Medians in microseconds of planning, building, updating and detokenising a step in which all decode."""
    options = EngineConfig(max_num_seqs=num_seqs, max_num_batched_tokens=2048, max_model_len=4096)
    config = resolve(options, MODEL, platform="cpu")
    scheduler = create_scheduler(
        config, num_seqs * config.max_blocks_per_seq, StepTimeModel(lambda tokens, seqs: (tokens, seqs))
    )
    sizes = ((num_seqs, (num_seqs,)), (2048, (num_seqs,)))  # a step of decode rows, and one that prompts fill
    buckets = ShapeBuckets(sizes, config.max_blocks_per_seq)
    builder = BatchBuilder(buckets, block_size=config.block_size, padding_row=num_seqs)
    outputs = OutputProcessor(tokenizer)
    for i in range(num_seqs):
        prompt = tuple(range(i, i + PROMPT))
        params = SamplingParams(max_tokens=3000)
        request = Request(f"r{i}:0", f"r{i}", 0, prompt, params, seed=i, max_tokens=3000)
        scheduler.add(request)
        outputs.add(request)
    taken: dict[str, list[float]] = {"plan": [], "build": [], "update": [], "text": []}
    decoding = 0
    while decoding < STEPS:
        times = [time.perf_counter()]
        plan = scheduler.schedule(0.0)
        times.append(time.perf_counter())
        batch = builder.build(plan)
        times.append(time.perf_counter())
        result = ModelRunnerOutput({row.request_id: [TOKEN] for row in batch.rows if row.samples})
        times.append(time.perf_counter())
        updates = scheduler.update_from_output(plan, result)
        times.append(time.perf_counter())
        outputs.process(updates)
        times.append(time.perf_counter())
        if plan.num_scheduled_tokens == num_seqs and all(
            row.num_computed_tokens >= PROMPT for row in batch.rows
        ):
            decoding += 1
            for part, at in (("plan", 0), ("build", 1), ("update", 3), ("text", 4)):
                taken[part].append((times[at + 1] - times[at]) * 1e6)
    return {part: statistics.median(values) for part, values in taken.items()}


if __name__ == "__main__":
    demo_tokenizer = open_checkpoint(resolve_model("smollm2", store=CHECKPOINTS)).load_tokenizer()
    for count in (1, 64, 256):
        parts = measure(count, demo_tokenizer)
        text = ", ".join(f"{part} {value:.0f}" for part, value in parts.items())
        print(f"{count} sequences: {text}; in all {sum(parts.values()):.0f} us")
