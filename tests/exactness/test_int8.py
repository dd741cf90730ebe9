"""int8 matrices: a request's tokens and logprobs are bit by bit those of the request alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.checkpoint import open_checkpoint
from jaxserve.config import EngineConfig
from tests.engine_harness import ServedModel, ask, run, serve
from tests.text_models import smollm2

REQUESTS = [
    *(ask(f"plain{n}", n, 20, logprobs=2) for n in (1, 9, 40, 130)),
    ask("sampled", 17, 20, temperature=0.9, seed=3, top_p=0.9, logprobs=0),
    ask("penalties", 12, 20, repetition_penalty=1.3, logprobs=0),
    ask("choices", 21, 10, n=2, temperature=0.8, seed=5, logprobs=0),
]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(
    request: pytest.FixtureRequest, tiny_checkpoint_dir: Path, compile_cache_dir: Path
) -> Iterator[ServedModel]:
    options = EngineConfig(
        dtype=request.param,
        quantization="int8",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        block_size=8,
    )
    checkpoint = open_checkpoint(tiny_checkpoint_dir)
    params = checkpoint.load_params(request.param, quantization="int8")
    served = serve(options, checkpoint.config, params, smollm2(), compile_cache_dir)
    yield served
    served.close()


@pytest.mark.parametrize(
    "changes", [{}, {"max_prefill_chunk": 5}, {"num_blocks": 40}, {"max_num_seqs": 3}], ids=str
)
def test_together_as_alone(model: ServedModel, changes: dict[str, int]) -> None:
    together = run(model.engine(**changes), REQUESTS)
    for request in REQUESTS:
        alone = run(model.engine(enable_prefix_caching=False), [request])
        for key, outcome in alone.items():
            assert together[key].token_ids == outcome.token_ids, key
            assert together[key].logprobs == outcome.logprobs, key
