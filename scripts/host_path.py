"""Host microseconds of a step, by part, with nothing on the device: python -m scripts.host_path

The real scheduler, batch builder and output processor (text, stop strings, one output a row, streamed) decode rows of
contexts of 256 tokens and more; a stand-in for the device answers at once. Once more with `--speculative ngram` and
text whose beginnings recur but never go on as before: proposals are made and weighed in each step, and all for nothing.
"""

from __future__ import annotations

import random
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
from jaxserve.speculative.ngram import NgramProposer
from jaxserve.tokenizer import Tokenizer

CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
MODEL = ModelConfig("LlamaForCausalLM", 49152, 64, 128, 2, 4, 2, 16, 8192)
STEPS, PROMPT = 200, 256
FIRST, FEW = (
    1000,
    200,
)  # what rows sample: one of so many words, so that two in a row recur, and what follows does not
STEP_SECONDS, TOKEN_SECONDS = 0.03, 0.0035  # roughly those of the demo model on two cores


def measure(num_seqs: int, tokenizer: Tokenizer, speculative: str | None) -> dict[str, float]:
    """Medians in microseconds of drafting, planning, building, updating and detokenising a step in which all decode."""
    options = EngineConfig(
        max_num_seqs=2 * num_seqs,  # rows for drafts
        max_num_batched_tokens=2048,
        max_model_len=4096,
        speculative=speculative,
    )
    config = resolve(options, MODEL, platform="cpu")
    step_times = StepTimeModel(lambda tokens, seqs: (tokens, seqs))
    scheduler = create_scheduler(config, num_seqs * config.max_blocks_per_seq, step_times)
    proposer, rng = NgramProposer(), random.Random(0)
    rows = config.max_rows
    sizes = ((rows, (num_seqs, rows)), (2048, (rows,)))  # steps of decode rows, and one that prompts fill
    buckets = ShapeBuckets(sizes, config.max_blocks_per_seq)
    builder = BatchBuilder(buckets, block_size=config.block_size, padding_row=config.max_num_seqs)
    outputs = OutputProcessor(tokenizer)
    for i in range(num_seqs):
        prompt = tuple(range(i, i + PROMPT))
        params = SamplingParams(max_tokens=3000)
        request = Request(f"r{i}:0", f"r{i}", 0, prompt, params, seed=i, max_tokens=3000)
        scheduler.add(request)
        outputs.add(request)
    taken: dict[str, list[float]] = {"draft": [], "plan": [], "build": [], "update": [], "text": []}
    decoding = 0
    while decoding < STEPS:
        times = [time.perf_counter()]
        if wanted := scheduler.plan_drafts():
            scheduler.take_drafts(wanted, proposer.propose(wanted))
        times.append(time.perf_counter())
        plan = scheduler.schedule(0.0)
        times.append(time.perf_counter())
        batch = builder.build(plan)
        times.append(time.perf_counter())
        result = ModelRunnerOutput(
            {row.request_id: [FIRST + rng.randrange(FEW)] for row in plan.scheduled if row.samples}
        )
        times.append(time.perf_counter())
        updates = scheduler.update_from_output(plan, result)
        times.append(time.perf_counter())
        outputs.process(updates)
        times.append(time.perf_counter())
        step_times.observe(plan.work, STEP_SECONDS + TOKEN_SECONDS * plan.num_scheduled_tokens)
        if plan.num_scheduled_tokens == num_seqs and all(
            row.num_computed_tokens >= PROMPT for row in batch.rows
        ):
            decoding += 1
            for part, at in (("draft", 0), ("plan", 1), ("build", 2), ("update", 4), ("text", 5)):
                taken[part].append((times[at + 1] - times[at]) * 1e6)
    return {part: statistics.median(values) for part, values in taken.items()}


if __name__ == "__main__":
    demo_tokenizer = open_checkpoint(resolve_model("smollm2", store=CHECKPOINTS)).load_tokenizer()
    for count in (1, 64, 256):
        for who in (None, "ngram"):
            parts = measure(count, demo_tokenizer, who)
            text = ", ".join(f"{part} {value:.0f}" for part, value in parts.items())
            also = " with ngram" if who else ""
            print(f"{count} sequences{also}: {text}; in all {sum(parts.values()):.0f} us")
