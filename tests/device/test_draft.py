"""Drafting on the device: what a draft says, whose cache it says it from, and what it leaves alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.batch.bucket import Bucket
from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.config import ModelConfig
from jaxserve.device.draft_model import DraftModel, first_layers
from jaxserve.device.kv_cache import block_bytes
from jaxserve.device.model_runner import ModelRunner
from jaxserve.device.program_definitions import LOAD_ROW
from jaxserve.device.programs import DraftKey, FollowKey, ProgramMaker
from jaxserve.models.random_weights import init_random
from jaxserve.progress import NullProgress
from jaxserve.request import Request
from pallas_kernels.paged_attention import XLA
from tests.device.driver import CONFIG, MODEL, Driver, make_runner
from tests.fakes import make_request

pytestmark = pytest.mark.usefixtures("quick_to_compile")

MOST = 5
# Up to four rows alone, up to eight in a shape of more tokens than rows.
BUCKETS = ShapeBuckets(((4, (4,)), (64, (8,))), CONFIG.max_blocks_per_seq)
NUM_BLOCKS = 200
DRAFT = dataclasses.replace(MODEL, num_layers=3, num_kv_heads=1, head_dim=16, num_heads=2)
SHORT = dataclasses.replace(MODEL, num_layers=1)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 1.0},
    "hot": {"temperature": 2.0, "top_p": 0.9},
    "filters": {"temperature": 0.8, "top_k": 20, "min_p": 0.01},
    "bias": {"temperature": 0.7, "logit_bias": {3: 2.0}},
}


def params_of(model: ModelConfig) -> dict[Any, Any]:
    return init_random(model, jnp.float32)


def own(model: ModelConfig) -> dict[str, Any]:
    return {
        "draft": DraftModel(model, is_own=True, attention=XLA, max_tokens=MOST),
        "draft_params": params_of(model),
    }


def start(**options: Any) -> ModelRunner:
    runner = make_runner(buckets=BUCKETS, num_blocks=NUM_BLOCKS, **options)
    runner.warm_up(NullProgress())
    return runner


def drive(runner: ModelRunner, seed: int = 0) -> Driver:
    return Driver(runner, seed, num_blocks=NUM_BLOCKS, ahead=MOST)


def warm(**options: Any) -> Iterator[ModelRunner]:
    runner = start(**options)
    yield runner
    assert runner.serving_compilations == 0
    runner.close()


@pytest.fixture(scope="module")
def other() -> Iterator[ModelRunner]:
    """Its draft model has other layers and heads than the target."""
    yield from warm(**own(DRAFT))


@pytest.fixture(scope="module")
def own_layers() -> Iterator[ModelRunner]:
    yield from warm(draft=first_layers(MODEL, 1, XLA, MOST))


def requests_of(driver: Driver, lengths: tuple[int, ...] = (1, 5, 31, 40, 17)) -> list[Request]:
    """One of each kind, their prompts computed and one token sampled."""
    rng = np.random.default_rng(len(lengths))
    requests = [
        driver.admit(
            make_request(
                f"r{i}",
                rng.integers(0, MODEL.vocab_size, length).tolist(),
                40,
                **list(KINDS.values())[i % len(KINDS)],
            )
        )
        for i, length in enumerate(lengths)
    ]
    for request in requests:
        driver.step((request, request.num_tokens - request.num_computed_tokens))
    return requests


def go_on(driver: Driver, requests: list[Request], steps: int) -> list[list[int]]:
    """The next tokens of each, all in one batch."""
    at = [request.num_output_tokens for request in requests]
    for _ in range(steps):
        driver.step(*((request, 1) for request in requests))
    return [request.output_token_ids[start:] for request, start in zip(requests, at, strict=True)]


@pytest.fixture(scope="module")
def alone() -> Iterator[ModelRunnerOf]:
    """The draft model of `other`."""
    model = ModelRunnerOf(DRAFT, params_of(DRAFT))
    yield model
    model.close()


def test_a_draft_model_says_what_it_says_alone(other: ModelRunner, alone: ModelRunnerOf) -> None:
    """For each kind of sampling, with shapes of its own, and again after what the target has said."""
    driver = drive(other)
    requests = requests_of(driver)
    differs = 0
    for _ in range(3):
        drafts = driver.draft(*((request, MOST) for request in requests))
        assert drafts == [alone.continuation(request, MOST) for request in requests]
        said = go_on(driver, requests, MOST)
        differs += sum(tokens != draft for tokens, draft in zip(said, drafts, strict=True))
    assert differs > 5, "the two models say the same: nothing was tested"


def test_the_first_layers_draft_with_the_targets_head(own_layers: ModelRunner) -> None:
    """As a model of so many layers would, out of the target's own cache."""
    weights = params_of(MODEL)
    weights["layers"] = {0: weights["layers"][0]}
    alone = ModelRunnerOf(SHORT, weights)
    driver = drive(own_layers)
    requests = requests_of(driver)
    for _ in range(3):
        drafts = driver.draft(*((request, MOST) for request in requests))
        for request, draft in zip(requests, drafts, strict=True):
            assert draft == alone.continuation(request, MOST)
        go_on(driver, requests, 2)
    alone.close()


class ModelRunnerOf:
    """Another model that says how it would go on with a request."""

    def __init__(self, model: ModelConfig, params: dict[Any, Any]) -> None:
        self._runner = start(model=model, params=params)
        self._driver = drive(self._runner, seed=1)

    def continuation(self, request: Request, count: int) -> list[int]:
        start = request.num_output_tokens
        copy = dataclasses.replace(
            request, output_token_ids=list(request.output_token_ids), num_computed_tokens=0, slot=None
        )
        said = self._driver.finish(self._driver.admit(copy), start + count)[start:]
        self._driver.preempt(copy)
        return said

    def close(self) -> None:
        self._runner.close()


@pytest.mark.parametrize("which", ["other", "own_layers"])
def test_drafts_write_where_they_may(which: str, request: pytest.FixtureRequest) -> None:
    """Only behind their own row's tokens, as far as it wants drafts, only in the draft's layers."""
    runner: ModelRunner = request.getfixturevalue(which)
    driver = drive(runner, seed=7)  # so that nothing has been there before
    requests = requests_of(driver)
    lengths = [1, MOST, 3, 2, 4]
    before = [np.asarray(x) for x in jax.tree.leaves(runner._state)]
    driver.draft(*zip(requests, lengths, strict=True))
    after = [np.asarray(x) for x in jax.tree.leaves(runner._state)]
    programs = runner._maker.programs
    drafting, num_layers = programs.draft, len(runner._state.kv_cache.k)
    assert drafting is not None
    layers = range(drafting.first_layer, drafting.first_layer + len(drafting.model.layers))
    size = CONFIG.block_size
    allowed = {
        (driver.blocks[r.request_id][position // size], position % size)
        for r, length in zip(requests, lengths, strict=True)
        for position in range(r.num_tokens - 1, r.num_tokens - 1 + length)
    }
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        if index >= 2 * num_layers or index % num_layers not in layers:
            assert np.array_equal(old, new), f"array {index} is not the draft's"
            continue
        blocks, _, offsets, _ = np.nonzero(old != new)
        written = {(b, o) for b, o in zip(blocks.tolist(), offsets.tolist(), strict=True) if b != 0}
        assert written == allowed


def test_after_a_preemption_and_with_another_neighbour(other: ModelRunner, alone: ModelRunnerOf) -> None:
    """A slot's draft is made of its new owner's tokens."""
    driver = drive(other)
    requests = requests_of(driver)
    driver.draft(*((request, MOST) for request in requests))
    driver.preempt(requests[2])
    newcomer = driver.admit(make_request("new", list(range(40)), 40, temperature=1.0))
    driver.step((newcomer, 40), (requests[0], 1))
    driver.admit(requests[2])
    driver.step((requests[2], requests[2].num_tokens))
    both = [newcomer, requests[2], requests[0]]
    drafts = driver.draft(*((request, MOST) for request in both))
    assert drafts == [alone.continuation(request, MOST) for request in both]


def test_in_parts_it_is_what_it_is_as_one_program(other: ModelRunner) -> None:
    runner = other
    in_parts = runner._executables
    make = ProgramMaker(dataclasses.replace(runner._maker.programs, by_layer=False), None)
    keys = [*BUCKETS.all_buckets()]
    whole: dict[Any, Any] = {key: in_parts[key] for key in (*keys, LOAD_ROW)}
    whole |= {DraftKey(bucket): make(DraftKey(bucket)) for bucket in BUCKETS.decode_buckets()}
    drafting = runner._maker.programs.draft
    assert drafting is not None
    if drafting.what.is_own:
        whole |= {FollowKey(bucket): make(FollowKey(bucket)) for bucket in keys}
    answers: list[list[list[int]]] = []
    for executables in (in_parts, whole):
        runner._executables = executables  # type: ignore[assignment]
        try:
            driver = drive(runner)
            requests = requests_of(driver)
            answer = driver.draft(*((r, MOST) for r in requests))
            go_on(driver, requests, 2)
            answer += driver.draft(*((r, MOST) for r in requests[:1]))
        finally:
            runner._executables = in_parts
        answers.append(answer)
    assert answers[0] == answers[1]


def test_batches_of_one_token_rows_have_their_programs(other: ModelRunner) -> None:
    for rows in range(1, 9):
        assert other.can_draft(BUCKETS.smallest_for(rows, rows))
    assert not other.can_draft(Bucket(64, 4, BUCKETS.blocks))


def test_memory_is_accounted_for(other: ModelRunner, own_layers: ModelRunner) -> None:
    with_model, with_layers = other.account(temporaries=0), own_layers.account(temporaries=0)
    extra = sum(leaf.nbytes for leaf in jax.tree.leaves(params_of(DRAFT)))
    assert with_model.weights == with_layers.weights + extra
    each = [block_bytes(MODEL, CONFIG.block_size, jnp.float32, draft) for draft in (None, DRAFT)]
    assert with_layers.kv_cache == each[0] * (NUM_BLOCKS + 1)
    assert with_model.kv_cache == each[1] * (NUM_BLOCKS + 1)
