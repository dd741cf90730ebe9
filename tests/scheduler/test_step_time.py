"""What is learned of step times predicts others, follows a change, and is not fooled by a stray one."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.scheduler.output import ScheduledRequest
from jaxserve.scheduler.step_time import StepTimeModel, StepWork, work_of
from tests.fakes import make_request


def _round_up(tokens: int, seqs: int) -> tuple[int, int]:
    return -(-tokens // 16) * 16, -(-seqs // 8) * 8


def _random_work(rng: random.Random) -> StepWork:
    seqs = rng.randint(1, 64)
    prefill = rng.choice([0, 0, rng.randint(2, 192)])
    return StepWork(seqs + prefill, seqs, rng.randint(1, 1000) * seqs, prefill * rng.randint(1, 500))


def _true_seconds(work: StepWork, weights: tuple[float, ...] = (0.02, 1e-3, 2e-4, 1e-6, 3e-7)) -> float:
    tokens, seqs = _round_up(work.tokens, work.seqs)
    features = (1, tokens, seqs, work.decode_keys, work.prefill_pairs)
    return sum(weight * feature for weight, feature in zip(weights, features, strict=True))


def _trained(steps: int = 300, noise: float = 0.0, **kwargs: tuple[float, ...]) -> StepTimeModel:
    rng = random.Random(1)
    model = StepTimeModel(_round_up)
    for _ in range(steps):
        work = _random_work(rng)
        model.observe(work, _true_seconds(work, **kwargs) * rng.uniform(1 - noise, 1 + noise))
    return model


def _worst_error(model: StepTimeModel, **kwargs: tuple[float, ...]) -> float:
    rng = random.Random(2)
    works = [_random_work(rng) for _ in range(200)]
    return max(abs((model.predict(work) or 0) / _true_seconds(work, **kwargs) - 1) for work in works)


def test_predicts_nothing_before_it_knows() -> None:
    model = StepTimeModel(_round_up)
    assert model.predict(StepWork(4, 4, 100)) is None
    for _ in range(20):
        model.observe(StepWork(4, 4, 100), 0.05)
    assert model.predict(StepWork(4, 4, 100)) == pytest.approx(0.05, rel=0.01)


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.01), (0.2, 0.15)])
def test_predicts_work_it_has_not_seen(noise: float, tolerance: float) -> None:
    assert _worst_error(_trained(noise=noise)) < tolerance


def test_follows_a_machine_that_becomes_slower() -> None:
    slower = (0.06, 2e-3, 2e-4, 4e-6, 3e-7)
    model = _trained()
    rng = random.Random(3)
    for _ in range(2000):
        work = _random_work(rng)
        model.observe(work, _true_seconds(work, slower))
    assert _worst_error(model, weights=slower) < 0.02


def test_a_stray_step_moves_little() -> None:
    model = _trained()
    work = StepWork(64, 64, 20_000)
    before = model.predict(work)
    model.observe(work, 60.0)
    assert model.predict(work) == pytest.approx(before, rel=0.25)


def test_a_shape_of_its_own_kind_is_learned_apart() -> None:
    model = _trained()
    odd, plain = StepWork(40, 8, 1000), StepWork(100, 8, 1000)
    rng = random.Random(4)
    for _ in range(300):
        for work in (odd, plain, _random_work(rng)):
            slow = 1.5 if _round_up(work.tokens, work.seqs) == (48, 8) else 1.0
            model.observe(work, slow * _true_seconds(work))
    assert model.predict(odd) == pytest.approx(1.5 * _true_seconds(odd), rel=0.1)
    assert model.predict(plain) == pytest.approx(_true_seconds(plain), rel=0.1)


def test_a_round_trip_through_json_predicts_the_same() -> None:
    model = _trained(noise=0.1)
    again = StepTimeModel.from_dict(json.loads(json.dumps(model.to_dict())), _round_up)
    rng = random.Random(5)
    for _ in range(50):
        work = _random_work(rng)
        assert again.predict(work) == pytest.approx(model.predict(work), rel=1e-9)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0, 1.0, 1.0, -1.0], "abcde"])
def test_a_file_that_is_none_is_refused(weights: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        StepTimeModel.from_dict({"num_steps": 9, "weights": weights, "factors": [], "recent": []}, _round_up)


@given(
    st.lists(
        st.tuples(st.integers(1, 256), st.integers(1, 64), st.integers(0, 10**6), st.floats(1e-4, 10.0)),
        max_size=60,
    )
)
def test_whatever_it_sees_it_predicts_a_time(steps: list[tuple[int, int, int, float]]) -> None:
    model = StepTimeModel(_round_up)
    for tokens, seqs, keys, seconds in steps:
        model.observe(StepWork(max(tokens, seqs), seqs, keys), seconds)
    predicted = model.predict(StepWork(64, 64, 10_000))
    assert (predicted is None) == (len(steps) < 8)
    assert predicted is None or 0 <= predicted < 1e6


def test_the_work_of_a_plan() -> None:
    def row(start: int, count: int) -> ScheduledRequest:
        return ScheduledRequest(make_request(f"r{start}", 200), start, count, 0, (), True)

    decodes, chunk = [row(9, 1), row(0, 1)], row(3, 4)
    assert work_of(decodes) == StepWork(2, 2, 11, 0)
    assert work_of([*decodes, chunk]) == StepWork(6, 3, 11, 4 + 5 + 6 + 7)
    assert work_of([chunk], num_padding_tokens=5) == replace(work_of([chunk]), tokens=9)
