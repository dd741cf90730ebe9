"""The same model with another block size: nothing may depend on where blocks begin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxserve.config import EngineConfig
from tests.engine_harness import TINY_MODEL, ServedModel, ask, assert_as_solo, run, serve

ONE = EngineConfig(
    dtype="float32", max_model_len=96, max_num_seqs=4, max_num_batched_tokens=8, block_size=1, num_blocks=None
)


@pytest.fixture(scope="module")
def one_token_blocks(tiny_model: ServedModel, compile_cache_dir: Path) -> Iterator[ServedModel]:
    params = jax.tree.map(jnp.copy, tiny_model.params)
    served = serve(ONE, TINY_MODEL, params, tiny_model.tokenizer, compile_cache_dir)
    yield served
    served.close()


def test_blocks_of_one_token(tiny_model, one_token_blocks):
    """B103, B128, B225: batched, shared, forked, cached and preempted; compared with blocks of eight."""
    requests = [
        ask("one", 1, 20),
        ask("odd", 7, 20, logprobs=2),
        ask("seeded", 13, 20, temperature=0.9, seed=4),
        ask("choices", 9, 15, n=2, temperature=0.9, seed=5),
        ask("penalised", 30, 20, frequency_penalty=1.0),
        ask("scored", 33, 9, prompt_logprobs=1),
        *(ask(f"more{i}", 5 + i, 30) for i in range(6)),
    ]
    ample = one_token_blocks.engine()
    assert_as_solo(tiny_model, requests, run(ample, requests))
    warm = run(ample, requests)
    assert_as_solo(tiny_model, requests, warm)
    assert warm["penalised", 0].num_cached_tokens == 29
    tight = one_token_blocks.engine(num_blocks=60, max_prefill_chunk=4)
    assert_as_solo(tiny_model, requests, run(tight, requests))
    assert tight.stats.preemptions > 0
