"""Drafts of an exit: what it says, worked out by hand, of which tokens, and from what it continues."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.device.draft_model import first_layers
from jaxserve.device.model_runner import ModelRunner
from jaxserve.device.programs import DraftKey, ObserveKey, ProgramMaker
from jaxserve.device.sampling import gumbel_noise
from jaxserve.models.exit import Exit
from jaxserve.models.random_weights import init_random
from jaxserve.models.registry import get_family
from jaxserve.progress import NullProgress
from jaxserve.request import Request
from pallas_kernels.paged_attention import XLA
from tests.device.driver import CONFIG, MODEL, Driver, make_runner
from tests.exits import exit_shape, random_exit
from tests.fakes import make_request

pytestmark = pytest.mark.usefixtures("quick_to_compile")

MOST = 4
BUCKETS = ShapeBuckets(((4, (4,)), (64, (8,))), CONFIG.max_blocks_per_seq)
NUM_BLOCKS = 200
SHAPE = exit_shape(MODEL)


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    runner = make_runner(
        buckets=BUCKETS,
        num_blocks=NUM_BLOCKS,
        draft=first_layers(MODEL, 1, XLA, MOST, SHAPE),
        draft_params=random_exit(SHAPE, MODEL.vocab_size),
    )
    runner.warm_up(NullProgress())
    yield runner
    assert runner.serving_compilations == 0
    runner.close()


def drive(runner: ModelRunner, seed: int = 0) -> Driver:
    return Driver(runner, seed, num_blocks=NUM_BLOCKS, ahead=MOST)


class ByHand:
    """The model and its exit without caches or batches."""

    def __init__(self) -> None:
        build = get_family(MODEL.architecture).build
        graphdef, state = nnx.split(build(MODEL, dtype=jnp.float32, rngs=nnx.Rngs(0)))
        nnx.replace_by_pure_dict(state, init_random(MODEL, jnp.float32))
        self.model: Any = nnx.merge(graphdef, state)
        self.params = random_exit(SHAPE, MODEL.vocab_size)
        graphdef, state = nnx.split(Exit(SHAPE, dtype=jnp.float32, rngs=nnx.Rngs(0)))
        nnx.replace_by_pure_dict(state, self.params)
        self.exit = nnx.merge(graphdef, state)
        self._hidden = jax.jit(self._hidden_of)

    def hidden(self, token_ids: list[int]) -> tuple[jax.Array, jax.Array]:
        """Of the last token: (behind the first layer, behind the last and normed), [1, D] each."""
        padded = np.pad(token_ids, (0, CONFIG.max_model_len - len(token_ids)))  # what follows is not seen
        early_TD, final_TD = self._hidden(padded)
        return early_TD[len(token_ids) - 1][None], final_TD[len(token_ids) - 1][None]

    def _hidden_of(self, token_ids: jax.Array) -> tuple[jax.Array, jax.Array]:

        def attend(
            index: int, q: jax.Array, k: jax.Array, v: jax.Array, cache: None
        ) -> tuple[jax.Array, None]:
            group = q.shape[1] // k.shape[1]
            scores = jnp.einsum("qhd,shd->hqs", q, jnp.repeat(k, group, 1)) * MODEL.head_dim**-0.5
            scores = jnp.where(jnp.tril(jnp.ones_like(scores[0])) > 0, scores, -jnp.inf)
            weights = jax.nn.softmax(scores)
            return jnp.einsum("hqs,shd->qhd", weights, jnp.repeat(v, group, 1)), None

        x_TD, shared = self.model.embed(token_ids, jnp.arange(len(token_ids)))
        behind = []
        for layer in self.model.layers:
            x_TD, _ = layer(x_TD, shared, 0, None, attend)
            behind.append(x_TD)
        return behind[0], self.model.norm(behind[-1])

    def drafts(self, request: Request, count: int) -> list[int]:
        """Of a request that is greedy, or draws from all tokens."""
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        before = self.hidden(tokens[:-1])[1]
        ids = np.asarray(self.params["token_ids"])
        drafts: list[int] = []
        for _ in range(count):
            early = self.hidden([*tokens, *drafts])[0]
            before = self.exit.guess(early, before)
            logits = np.asarray(self.exit.compute_logits(before))[0]
            if request.params.temperature > 0:
                assert request.seed is not None
                seed = jnp.array([request.seed >> 32, request.seed & 0xFFFFFFFF], jnp.uint32)
                noise = gumbel_noise(seed, jnp.int32(len(tokens) + len(drafts)), MODEL.vocab_size)
                logits = logits / request.params.temperature + np.asarray(noise)[ids]
            drafts.append(int(ids[np.argmax(logits)]))
        return drafts


def requests_of(driver: Driver, **params: Any) -> list[Request]:
    rng = np.random.default_rng(0)
    requests = []
    for i, length in enumerate((1, 5, 31, 40, 17)):
        prompt = rng.integers(0, MODEL.vocab_size, length).tolist()
        requests.append(driver.admit(make_request(f"r{i}", prompt, 40, **params)))
        driver.step((requests[-1], length))
    return requests


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_are_the_exits(runner: ModelRunner, temperature: float) -> None:
    """Its own guesses carry it from draft to draft; the model's hidden states from step to step."""
    by_hand, driver = ByHand(), drive(runner)
    requests = requests_of(driver, temperature=temperature)
    seen = set()
    for together in (requests, requests[:2], requests):
        drafts = driver.draft(*((request, MOST) for request in together))
        assert drafts == [by_hand.drafts(request, MOST) for request in together]
        seen |= {token for draft in drafts for token in draft}
        driver.step(*((request, 1) for request in requests))
    assert len(seen) > 8, "it says the same whatever it is asked"


def test_in_another_slot_and_behind_a_preemption(runner: ModelRunner) -> None:
    by_hand, driver = ByHand(), drive(runner)
    requests = requests_of(driver, temperature=0.0)
    driver.draft(*((request, MOST) for request in requests))
    driver.preempt(requests[2])
    newcomer = driver.admit(make_request("new", list(range(40)), 40, temperature=0.0))
    driver.step((newcomer, 40), (requests[0], 1))
    driver.admit(requests[2])
    driver.step((requests[2], requests[2].num_tokens))
    both = [newcomer, requests[2], requests[0]]
    drafts = driver.draft(*((request, MOST) for request in both))
    assert drafts == [by_hand.drafts(request, MOST) for request in both]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0, "logit_bias": {4: 100.0}},
        {"temperature": 2.0, "frequency_penalty": 1.5, "presence_penalty": 1.0},
        {"temperature": 5.0, "top_k": 30, "top_p": 0.9, "min_p": 0.001},
    ],
    ids=["bias", "penalties", "filters"],
)
def test_tokens_that_it_does_not_know_are_never_proposed(runner: ModelRunner, params: dict[str, Any]) -> None:
    known = set(np.asarray(random_exit(SHAPE, MODEL.vocab_size)["token_ids"]).tolist())
    assert 4 not in known
    driver = drive(runner)
    requests = requests_of(driver, **params)
    for _ in range(3):
        drafts = driver.draft(*((request, MOST) for request in requests))
        assert {token for draft in drafts for token in draft} <= known
        driver.step(*((request, 1) for request in requests))


def test_bias_and_penalties_meet_their_tokens(runner: ModelRunner) -> None:
    """By their ids in the vocabulary, wherever the exit's head has them."""
    known = np.asarray(random_exit(SHAPE, MODEL.vocab_size)["token_ids"]).tolist()
    driver = drive(runner)
    wanted = known[20]
    biased = requests_of(driver, temperature=0.0, logit_bias={wanted: 100.0})
    drafts = driver.draft(*((request, 2) for request in biased))
    assert drafts == [[wanted, wanted]] * len(biased)


def test_in_parts_it_is_what_it_is_as_one_program(runner: ModelRunner) -> None:
    in_parts = runner._executables
    make = ProgramMaker(dataclasses.replace(runner._maker.programs, by_layer=False), None)
    mixed = dict(in_parts._executables)
    mixed |= {DraftKey(bucket): make(DraftKey(bucket)) for bucket in BUCKETS.decode_buckets()}
    answers = []
    for executables in (in_parts, mixed):
        runner._executables = executables  # type: ignore[assignment]
        try:
            driver = drive(runner)
            requests = requests_of(driver, temperature=0.9)
            answers.append(driver.draft(*((request, MOST) for request in requests)))
        finally:
            runner._executables = in_parts
    assert answers[0] == answers[1]


def test_memory_and_programs_are_accounted_for(runner: ModelRunner) -> None:
    account = runner.account(temporaries=0)
    extra = sum(leaf.nbytes for leaf in jax.tree.leaves(random_exit(SHAPE, MODEL.vocab_size)))
    model = sum(leaf.nbytes for leaf in jax.tree.leaves(init_random(MODEL, jnp.float32)))
    assert account.weights == model + extra
    rows = CONFIG.max_num_seqs + 1
    assert account.row_state == rows * (MODEL.vocab_size * 8 + 4 + MODEL.hidden_size * 4)
    assert ObserveKey(BUCKETS.all_buckets()[0]) in runner._executables
