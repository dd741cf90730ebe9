"""int8 matrices: a request's tokens and logprobs are bit by bit those of the request alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.checkpoint import open_checkpoint
from jaxserve.config import EngineConfig, resolve
from jaxserve.request import GenerationRequest
from tests.checkpoint.tiny_files import tiny_config, tiny_tensors, write_huggingface
from tests.engine_harness import Outcomes, ServedModel, ask, run, serve
from tests.text_models import smollm2

# Small, so that it compiles quickly; of a width at which XLA sums a row in one way in small batches and in another
# in large ones.
MODEL = tiny_config(vocab_size=512, hidden_size=64, intermediate_size=128, max_position_embeddings=256)
SHAPES = ((2, (2,)), (32, (8,)))  # alone a request decodes in the one, in company in the other


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(100, MODEL["vocab_size"], length).tolist()


REQUESTS = [
    *(ask(f"plain{n}", prompt(n, n), 20, logprobs=2) for n in (1, 9, 40, 130)),
    ask("sampled", prompt(2, 17), 20, temperature=0.9, seed=3, top_p=0.9, logprobs=0),
    ask("penalties", prompt(3, 12), 20, repetition_penalty=1.3, logprobs=0),
    ask("choices", prompt(4, 21), 10, n=2, temperature=0.8, seed=5, logprobs=0),
]


# Products in C++, and XLA's.
@pytest.fixture(scope="module", params=[("float32", "auto"), ("bfloat16", "xla")], ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    directory = tmp_path_factory.mktemp("int8")
    tensors = {
        # As initialised models are; attention outweighs the token itself, so that the whole context matters.
        name: array * (0.1 if "o_proj" in name else 0.02 if array.ndim == 2 else 1)
        for name, array in tiny_tensors(MODEL).items()
    }
    write_huggingface(directory, MODEL, tensors=tensors)
    dtype, attention_backend = request.param
    options = EngineConfig(
        dtype=dtype,
        attention_backend=attention_backend,
        quantization="int8",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        block_size=8,
    )
    checkpoint = open_checkpoint(directory)
    params = checkpoint.load_params(dtype, quantization="int8")
    blocks = resolve(options, checkpoint.config, platform="cpu").max_blocks_per_seq
    served = serve(options, checkpoint.config, params, smollm2(), buckets=ShapeBuckets(SHAPES, blocks))
    yield served
    served.close()


@pytest.fixture(scope="module")
def alone(model: ServedModel) -> Outcomes:
    engine = model.engine(enable_prefix_caching=False)
    return {key: outcome for request in REQUESTS for key, outcome in run(engine, [request]).items()}


@pytest.mark.parametrize(
    "changes", [{}, {"max_prefill_chunk": 5}, {"num_blocks": 40}, {"max_num_seqs": 3}], ids=str
)
def test_together_as_alone(model: ServedModel, alone: Outcomes, changes: dict[str, int]) -> None:
    together = run(model.engine(**changes), REQUESTS)
    assert together.keys() == alone.keys()
    for key, outcome in alone.items():
        assert together[key].token_ids == outcome.token_ids, key
        assert together[key].logprobs == outcome.logprobs, key


def test_answers_depend_on_the_whole_context(model: ServedModel, alone: Outcomes) -> None:
    """Or the comparison above would show little: another first token changes what is said after 40."""
    first, *rest = prompt(40, 40)
    changed = GenerationRequest("changed", (first ^ 1, *rest), REQUESTS[2].params)
    assert run(model.engine(), [changed])["changed", 0].logprobs != alone["plain40", 0].logprobs
