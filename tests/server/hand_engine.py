"""The real engine, scheduler and pool around the model that can be computed by hand, as slow as a test likes it."""

from __future__ import annotations

import math
import time
from typing import Any

from jaxserve.batch.buckets import default_buckets
from jaxserve.config import GenerationDefaults, ModelConfig
from jaxserve.engine import EngineCore
from jaxserve.outputs import ModelRunnerOutput, TokenLogprobs
from jaxserve.scheduler.output import SchedulerOutput
from jaxserve.tokenizer import Tokenizer
from tests.fakes import FakeRunner, make_config

MODEL = ModelConfig("LlamaForCausalLM", 49152, 64, 128, 2, 4, 2, 16, 4096)
END = 2


class SlowRunner(FakeRunner):
    """Attributes:
    step_seconds: a step takes at least so long.
    says: token ids that every sequence says, then the end; None: what the model that is computed by hand says.
    """

    num_compiled = 0
    serving_compilations = 0
    failure = None

    def __init__(self, block_size: int, num_blocks: int, padding_row: int, step_seconds: float) -> None:
        super().__init__(block_size, num_blocks, MODEL.vocab_size)
        self.padding_row = padding_row
        self.step_seconds = step_seconds
        self.says: list[int] | None = None

    def launch(self, plan: SchedulerOutput, batch: Any) -> ModelRunnerOutput:
        result = self.run(plan)
        for item in plan.scheduled:
            if item.samples and self.says is not None and item.request_id in result.sampled_token_ids:
                at = item.request.num_output_tokens
                token = self.says[at] if at < len(self.says) else END
                result.sampled_token_ids[item.request_id] = [token]
            if item.request_id in result.logprobs:
                num_top = item.request.params.logprobs or 0
                tokens = result.sampled_token_ids[item.request_id]
                result.logprobs[item.request_id] = [_entry(token, num_top) for token in tokens]
        return result

    def is_done(self, step: Any) -> bool:
        return True

    def read(self, step: Any) -> Any:
        time.sleep(self.step_seconds)
        return step

    def close(self) -> None: ...


def _entry(token: int, num_top: int) -> TokenLogprobs:
    """The token itself is likely by 0.6, others by less and less."""
    chances = (0.6, 0.2, 0.08, 0.04, *(0.02 * 0.5**place for place in range(16)))
    top = [((token + by) % MODEL.vocab_size, math.log(chance)) for by, chance in enumerate(chances)]
    return TokenLogprobs(token, top[0][1], 1, tuple(top[:num_top]))


def hand_engine(
    tokenizer: Tokenizer, *, num_blocks: int = 48, step_seconds: float = 0.0, **config: Any
) -> EngineCore:
    """Blocks of 4 tokens, 4 sequences and 16 tokens a step unless told otherwise."""
    resolved = make_config(**config)
    runner = SlowRunner(resolved.block_size, num_blocks, resolved.max_num_seqs, step_seconds)
    return EngineCore(
        model_name="hand",
        config=resolved,
        model_config=MODEL,
        generation=GenerationDefaults(eos_token_ids=(END,)),
        tokenizer=tokenizer,
        runner=runner,
        buckets=default_buckets(resolved),
        num_blocks=num_blocks,
    )
