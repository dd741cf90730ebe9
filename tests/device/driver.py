"""A tiny model behind the real runner, and plans made by hand."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.batch.builder import BatchBuilder
from jaxserve.config import ModelConfig
from jaxserve.device.model_runner import ModelRunner
from jaxserve.models.random_weights import init_random
from jaxserve.outputs import ModelRunnerOutput
from jaxserve.request import Request
from jaxserve.scheduler.output import DraftRequest, ScheduledRequest, SchedulerOutput
from jaxserve.speculative.device_proposer import DeviceProposer
from pallas_kernels.paged_attention import XLA
from tests.fakes import make_config

MODEL = ModelConfig("LlamaForCausalLM", 256, 32, 64, 2, 4, 2, 8, 128, tie_word_embeddings=True)
CONFIG = make_config(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=128)
# Rows differ from the chunk in which prompts are scored (2, 32, 32), so that shapes tell them apart.
BUCKETS = ShapeBuckets(((2, (1,)), (32, (8,)), (64, (8, 16))), CONFIG.max_blocks_per_seq)
NUM_BLOCKS = 4000  # a layer's keys weigh more than all of a step's temporaries


def make_runner(**changes: Any) -> ModelRunner:
    arguments = {
        "attention": XLA,
        "num_blocks": NUM_BLOCKS,
        "buckets": BUCKETS,
        "cache_directory": None,
        **changes,
    }
    model = arguments.pop("model", MODEL)
    config = arguments.pop("config", CONFIG)
    params = arguments.pop("params", None) or init_random(model, jnp.dtype(config.dtype))
    return ModelRunner(model, config, params, **arguments)


class Driver:
    """Gives requests slots and shuffled blocks, and runs one step at a time."""

    def __init__(
        self, runner: ModelRunner, seed: int = 0, *, num_blocks: int = NUM_BLOCKS, ahead: int = 0
    ) -> None:
        self._ahead = ahead  # tokens behind a step's that there are blocks for
        self.runner = runner
        self._free_blocks = np.random.default_rng(seed).permutation(np.arange(1, num_blocks + 1)).tolist()
        self._free_slots = list(range(CONFIG.max_num_seqs))
        self.blocks: dict[str, list[int]] = {}
        self._new: set[str] = set()
        self._told: dict[str, int] = {}
        self._builder = BatchBuilder(
            runner.buckets.planned, block_size=CONFIG.block_size, padding_row=self.runner.padding_row
        )

    def admit(self, request: Request) -> Request:
        request.slot = self._free_slots.pop(0)
        self.blocks[request.request_id] = []
        self._new.add(request.request_id)
        self._told[request.request_id] = 0
        return request

    def preempt(self, request: Request) -> None:
        """Take blocks and slot away; `admit` starts it over with the output it has."""
        assert request.slot is not None
        self._free_slots.append(request.slot)
        request.slot, request.num_computed_tokens = None, 0
        del self.blocks[request.request_id]

    def step(self, *parts: tuple[Request, int]) -> ModelRunnerOutput:
        """(request, tokens to compute) each; sampled tokens are appended."""
        rows = []
        for request, count in parts:
            blocks = self.blocks[request.request_id]
            while len(blocks) * CONFIG.block_size < request.num_computed_tokens + count + self._ahead:
                blocks.append(self._free_blocks.pop())
            is_new = request.request_id in self._new
            self._new.discard(request.request_id)
            start, told = request.num_computed_tokens, self._told[request.request_id]
            self._told[request.request_id] = len(blocks)
            samples = start + count == request.num_tokens
            assert request.slot is not None
            rows.append(
                ScheduledRequest(
                    request, start, count, request.slot, tuple(blocks[told:]), samples, is_new=is_new
                )
            )
        plan = SchedulerOutput(0, tuple(rows))
        result = self.runner.read(self.runner.launch(plan, self._builder.build(plan)))
        for request, count in parts:
            request.num_computed_tokens += count
            request.output_token_ids += result.sampled_token_ids.get(request.request_id, [])
        return result

    def draft(self, *parts: tuple[Request, int]) -> list[list[int]]:
        """(request, draft tokens) each, whose last token is the only one that is not computed."""
        wanted = []
        for request, count in parts:
            assert request.num_computed_tokens == request.num_tokens - 1
            assert request.slot is not None
            wanted.append(DraftRequest(request, count, request.slot))
        return [list(tokens) for tokens in DeviceProposer(self.runner, self._builder).propose(wanted)]

    def finish(self, request: Request, num_tokens: int) -> list[int]:
        """Alone, whatever is uncomputed in one chunk, until the output has `num_tokens`."""
        while request.num_output_tokens < num_tokens:
            self.step((request, request.num_tokens - request.num_computed_tokens))
        return request.output_token_ids
