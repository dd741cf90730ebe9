"""The sampler against plain float64 numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.batch.flags import BatchFlag, RowFlag
from jaxserve.device import sampling
from jaxserve.device.sampling import (
    SamplingState,
    argmax,
    filter_logits,
    gumbel_noise,
    gumbel_noise_of,
    init_state,
    logprobs_of,
    no_logprobs,
)
from jaxserve.request import MAX_LOGPROBS
from tests.device.sampling_rows import RANDOM_ROW, VOCAB, draw, jitted_sample, make_rows, no_processing

PROMPT, STOP = 1 << 30, 1 << 29
ALL_FLAGS = [
    int(penalties | bias | ban | RowFlag.SAMPLE)
    for penalties in (RowFlag(0), RowFlag.PENALTIES)
    for bias in (RowFlag(0), RowFlag.LOGIT_BIAS)
    for ban in (RowFlag(0), RowFlag.BAN_STOPS)
]


def random_history(rng: np.random.Generator, num_rows: int) -> tuple[SamplingState, dict[str, np.ndarray]]:
    """Device state, and the same as plain arrays [R, V]."""
    shape = (num_rows, VOCAB)
    plain = {
        "count": rng.poisson(0.4, shape),
        "prompt": rng.random(shape) < 0.3,
        "stop": rng.random(shape) < 0.1,
        "bias": np.where(rng.random(shape) < 0.2, rng.uniform(-100, 100, shape), 0).astype(np.float32),
    }
    info = plain["count"] + PROMPT * plain["prompt"] + STOP * plain["stop"]
    return SamplingState(jnp.asarray(info, jnp.int32), jnp.asarray(plain["bias"])), plain


def reference_process(logits: np.ndarray, plain: dict[str, np.ndarray], s: int, **row: Any) -> np.ndarray:
    """One row in float64, in the documented order, one token at a time."""
    out = logits.astype(np.float64)
    for v in range(len(out)):
        if row["flags"] & RowFlag.PENALTIES:
            if plain["count"][s, v] or plain["prompt"][s, v]:
                out[v] = out[v] / row["repetition"] if out[v] > 0 else out[v] * row["repetition"]
            out[v] -= row["frequency"] * plain["count"][s, v]
            out[v] -= row["presence"] * (plain["count"][s, v] > 0)
        if row["flags"] & RowFlag.LOGIT_BIAS:
            out[v] += plain["bias"][s, v]
        if row["flags"] & RowFlag.BAN_STOPS and plain["stop"][s, v]:
            out[v] = -1e30
    return out


@pytest.mark.parametrize("seed", range(3))
def test_penalties_bias_and_bans_in_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    state, plain = random_history(rng, 17)
    logits = rng.normal(0, 5, (16, VOCAB)).astype(np.float32)
    logits[:, 5] = 0.0
    flags = np.array(ALL_FLAGS * 2)
    state_rows = rng.permutation(16)
    presence, frequency = rng.uniform(-2, 2, (2, 16)).astype(np.float32)
    repetition = np.exp(rng.uniform(-1, 1, 16)).astype(np.float32)
    rows = make_rows(
        16,
        flags=flags,
        state_rows=state_rows,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
    )
    got = np.asarray(jax.jit(sampling._process)(jnp.asarray(logits), rows, state))
    for s in range(16):
        want = reference_process(
            logits[s],
            plain,
            int(state_rows[s]),
            flags=int(flags[s]),
            presence=float(presence[s]),
            frequency=float(frequency[s]),
            repetition=float(repetition[s]),
        )
        np.testing.assert_allclose(got[s], want, rtol=2e-6, atol=2e-5)
        if flags[s] == RowFlag.SAMPLE:
            assert np.array_equal(got[s], logits[s]), "a row that asks for nothing is untouched"


def test_prompt_counts_for_repetition_only() -> None:
    """Frequency and presence look at the output alone (OpenAI); repetition at prompt and output."""
    state = init_state(4, VOCAB)
    info = state.token_info_RV.at[:, 3].set(PROMPT).at[:, 4].set(2)
    state = SamplingState(info, state.logit_bias_RV)
    logits = jnp.full((3, VOCAB), 1.0)
    flags = int(RowFlag.SAMPLE | RowFlag.PENALTIES)
    rows = make_rows(
        3, flags=flags, repetition_penalty=[2, 1, 1], presence_penalty=[0, 1, 0], frequency_penalty=[0, 0, 1]
    )
    got = np.asarray(sampling._process(logits, rows, state))
    assert got[:, 3].tolist() == [0.5, 1.0, 1.0]
    assert got[:, 4].tolist() == [0.5, 0.0, -1.0]
    assert (np.delete(got, [3, 4], axis=1) == 1.0).all()


@pytest.mark.parametrize("repetition", [1e-6, 1e6])
def test_extreme_penalties_stay_finite(repetition: float) -> None:
    rng = np.random.default_rng(1)
    state, _ = random_history(rng, 4)
    logits = jnp.asarray(rng.normal(0, 100, (3, VOCAB)), jnp.float32)
    flags = int(RowFlag.SAMPLE | RowFlag.RANDOM | RowFlag.PENALTIES | RowFlag.LOGIT_BIAS | RowFlag.BAN_STOPS)
    rows = make_rows(
        3,
        flags=flags,
        repetition_penalty=repetition,
        frequency_penalty=2.0,
        presence_penalty=-2.0,
        temperature=1e-5,
    )
    assert np.isfinite(np.asarray(sampling._process(logits, rows, state))).all()
    tokens, finite = jitted_sample(logits, rows, jnp.int32(3), state, rows_at_once=1)
    assert finite.all()
    assert ((tokens >= 0) & (tokens < VOCAB)).all()


def reference_keep(
    scaled: np.ndarray, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens that must stay, tokens that may stay): they differ where the mass decides by less than rounding."""
    x = scaled.astype(np.float64)
    order = np.argsort(-x, kind="stable")
    k = len(x) if top_k <= 0 else min(top_k, len(x))
    in_k = x >= x[order[k - 1]]
    weight = np.where(in_k, np.exp(x), 0.0)
    share = weight / weight.sum()

    def by_mass(mass: float) -> np.ndarray:
        if top_p >= 1.0:
            return in_k
        reached = np.cumsum(share[order])
        count = min(int(np.searchsorted(reached, mass)) + 1, int(in_k.sum()))
        return in_k & (x >= x[order[count - 1]])

    slack = 1e-5
    floor = np.exp(x)
    must = by_mass(max(0.0, top_p - slack)) & (floor >= min_p * (1 + slack))
    may = by_mass(top_p + slack) & (floor >= min_p * (1 - slack))
    best = x == x.max()
    return must | best, may | best


filter_rows = jax.jit(lambda x, k, p, m: jax.lax.map(lambda row: filter_logits(*row), (x, k, p, m)))


def distributions(rng: np.random.Generator, num: int) -> np.ndarray:
    """Peaked, flat, tied, long-tailed and nearly equal rows; maxima 0."""
    rows = []
    for i in range(num):
        x = rng.normal(0, [0.01, 1, 5, 40, 1e-6][i % 5], VOCAB)
        if i % 3 == 0:
            x = np.round(x)  # ties
        if i % 7 == 0:
            x[rng.random(VOCAB) < 0.5] = -1e30
        rows.append((x - x.max()).astype(np.float32))
    return np.stack(rows)


def test_filters_keep_what_they_say() -> None:
    rng = np.random.default_rng(0)
    x = distributions(rng, 600)
    top_k = rng.choice([0, 1, 2, 5, VOCAB - 1, VOCAB, VOCAB + 1, 2**31 - 1], 600).astype(np.int32)
    top_p = rng.choice([0, 1e-9, 1e-3, 0.1, 0.5, 0.9, 0.99, 0.9999999, 1], 600).astype(np.float32)
    min_p = rng.choice([0, 0, 1e-30, 0.01, 0.5, 1], 600).astype(np.float32)
    got = np.asarray(filter_rows(x, top_k, top_p, min_p))
    for i in range(600):
        kept = got[i] > -1e29
        must, may = reference_keep(x[i], int(top_k[i]), float(top_p[i]), float(min_p[i]))
        kept_or_already_out = kept | (x[i] <= -1e29)
        case = f"row {i}: top_k {top_k[i]}, top_p {top_p[i]}, min_p {min_p[i]}"
        assert (kept_or_already_out >= must).all(), case
        assert (kept <= may).all(), case
        assert np.array_equal(got[i][kept], x[i][kept]), "what stays is unchanged"
        assert kept[x[i].argmax()], "the most likely token always stays"


@pytest.mark.parametrize("top_p", [0.0, 1e-45, 1e-30, 1e-9])
@pytest.mark.parametrize("top_k", [0, 1, 3])
@pytest.mark.parametrize("min_p", [0.0, 1.0])
def test_next_to_no_mass_keeps_the_best_token(top_p: float, top_k: int, min_p: float) -> None:
    x = distributions(np.random.default_rng(5), 40)
    got = filter_rows(
        x, np.full(40, top_k, np.int32), np.full(40, top_p, np.float32), np.full(40, min_p, np.float32)
    )
    assert np.array_equal(np.asarray(got) > -1e29, x == 0.0)


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    """0.5 + 0.25 + 0.125 + ...: sums are exact in binary, so the edge itself is decided exactly."""
    share = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    x = np.log(share / share[0]).astype(np.float32)[None].repeat(6, 0)
    masses = np.array([0.4, 0.5001, 0.7499, 0.7501, 0.8751, 0.94], np.float32)
    got = np.asarray(filter_rows(x, np.zeros(6, np.int32), masses, np.zeros(6, np.float32)))
    assert (got > -1e29).sum(1).tolist() == [1, 2, 2, 3, 5, 5], "the tied pair stays together"


def test_a_set_that_reaches_the_mass_exactly_is_enough() -> None:
    """Both weights are exactly 1 in float32, and half of their sum is what the better one has."""
    x = np.array([[-1e-9, 0.0, -1e30]], np.float32)
    got = np.asarray(filter_rows(x, np.int32([0]), np.float32([0.5]), np.float32([0.0])))
    assert (got > -1e29).tolist() == [[False, True, False]]


def test_top_p_measures_the_mass_that_top_k_kept() -> None:
    x = np.log(np.array([[0.4, 0.3, 0.2, 0.1]]) / 0.4).astype(np.float32)

    def kept(top_k: int, top_p: float) -> int:
        got = filter_rows(x, np.int32([top_k]), np.float32([top_p]), np.float32([0]))
        return int((np.asarray(got) > -1e29).sum())

    assert kept(0, 0.65) == 2
    assert kept(2, 0.65) == 2, "0.4 of 0.7 does not reach 0.65"
    assert kept(2, 0.55) == 1, "0.4 of 0.7 is more than 0.55"


def test_a_large_flat_vocabulary_keeps_its_share() -> None:
    """Rounding in a sum of many equal terms must not lose or add more than a sliver."""
    vocab = 50_000
    x = np.random.default_rng(0).permutation(np.linspace(-1e-3, 0, vocab, dtype=np.float32))
    got = jax.jit(filter_logits)(x, jnp.int32(0), jnp.float32(0.9), jnp.float32(0.0))
    kept = np.asarray(got) > -1e29
    mass = np.exp(x.astype(np.float64))
    assert abs(mass[kept].sum() / mass.sum() - 0.9) < 1e-3


@pytest.mark.parametrize("temperature", [1.0001e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e34])
def test_tiny_temperatures_are_greedy_and_finite(temperature: float, scale: float) -> None:
    rng = np.random.default_rng(2)
    logits = (rng.permuted(np.tile(np.arange(VOCAB), (8, 1)), axis=1) - 30).astype(np.float32) * np.float32(
        scale
    )
    rows = make_rows(
        8, flags=RANDOM_ROW, temperature=temperature, seed=np.arange(8), top_p=[1, 0.9] * 4, top_k=[0, 3] * 4
    )
    assert np.array_equal(no_processing(logits, rows), logits.argmax(1))


def test_filters_with_a_banned_favourite_still_choose() -> None:
    logits = np.zeros((3, VOCAB), np.float32)
    logits[:, 7], logits[:, 9] = 50.0, 20.0
    state = init_state(4, VOCAB)
    state = SamplingState(
        state.token_info_RV.at[1, 7].set(STOP), state.logit_bias_RV.at[0, 7].set(-100.0).at[2].set(-100.0)
    )
    flags = [RowFlag.LOGIT_BIAS, RowFlag.BAN_STOPS, RowFlag.LOGIT_BIAS]
    for filters in ({"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9, "top_k": 1, "min_p": 1.0}):
        rows = make_rows(3, flags=[int(flag) | RANDOM_ROW for flag in flags], seed=[1, 2, 3], **filters)
        assert draw(logits, rows, state=state).tolist() == [9, 9, 7]


def test_everything_banned_still_gives_a_token() -> None:
    state = init_state(3, VOCAB)
    state = SamplingState(state.token_info_RV | STOP, state.logit_bias_RV)
    flags = [int(RowFlag.BAN_STOPS) | RANDOM_ROW, int(RowFlag.BAN_STOPS | RowFlag.SAMPLE)]
    tokens = draw(
        np.random.default_rng(0).normal(0, 1, (2, VOCAB)), make_rows(2, flags=flags, top_p=0.5), state=state
    )
    assert ((tokens >= 0) & (tokens < VOCAB)).all()


MATES = [
    {"flags": RANDOM_ROW},
    {"flags": RANDOM_ROW, "top_p": 0.9},
    {"flags": RANDOM_ROW, "top_k": 5},
    {"flags": RANDOM_ROW, "min_p": 0.1},
    {"flags": RANDOM_ROW | int(RowFlag.PENALTIES), "frequency_penalty": 2.0, "repetition_penalty": 3.0},
    {"flags": RANDOM_ROW | int(RowFlag.LOGIT_BIAS | RowFlag.BAN_STOPS), "temperature": 1e-5},
    {"flags": int(RowFlag.SAMPLE | RowFlag.PENALTIES), "presence_penalty": -2.0},
    {"flags": 0},
]


def batch_flags_of(flags: int) -> int:
    reads_state = RowFlag.PENALTIES | RowFlag.LOGIT_BIAS | RowFlag.BAN_STOPS
    needed = BatchFlag.RANDOM if flags & RowFlag.RANDOM else BatchFlag(0)
    return int(needed | (BatchFlag.PROCESS_LOGITS if flags & reads_state else BatchFlag(0)))


@pytest.mark.parametrize("rows_at_once", [1, 4])
@pytest.mark.parametrize("own", MATES, ids=lambda own: ",".join(map(str, own.values())))
def test_a_row_does_not_notice_its_mates(own: dict[str, Any], rows_at_once: int) -> None:
    """Any row's token is the same alone, beside any mate, in any place, whatever the batch as a whole needs."""
    rng = np.random.default_rng(3)
    state, _ = random_history(rng, 5)
    logits = rng.normal(0, 1.5, (4, VOCAB)).astype(np.float32)
    names = ("flags", "temperature", "top_p", "top_k", "min_p")
    names += ("presence_penalty", "frequency_penalty", "repetition_penalty")
    neutral = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}

    def token(place: int, mate: dict[str, Any]) -> int:
        everyone = [own if s == place else mate for s in range(4)]
        fields = {name: [row.get(name, neutral.get(name, 0)) for row in everyone] for name in names}
        state_rows = [0 if s == place else s % 4 + 1 for s in range(4)]
        here = logits[[0 if s == place else 1 + s % 3 for s in range(4)]]
        rows = make_rows(
            4, seed=[42 if s == place else s for s in range(4)], positions=9, state_rows=state_rows, **fields
        )
        needed = batch_flags_of(own["flags"] | mate["flags"])
        return int(draw(here, rows, state=state, batch_flags=needed, rows_at_once=rows_at_once)[place])

    alone = token(0, {"flags": 0})
    assert {token(place, mate) for place in (0, 1, 3) for mate in MATES} == {alone}


def test_greedy_rows_are_the_argmax_of_untouched_logits() -> None:
    rng = np.random.default_rng(4)
    logits = rng.normal(0, 1, (8, VOCAB)).astype(np.float32)
    logits[1::2] = np.round(logits[1::2])  # ties
    rows = make_rows(
        8, flags=[int(RowFlag.SAMPLE), RANDOM_ROW | int(RowFlag.PENALTIES)] * 4, repetition_penalty=1.5
    )
    for batch_flags in range(4):
        tokens = draw(logits, rows, batch_flags=batch_flags)
        assert np.array_equal(tokens[::2], logits[::2].argmax(1))
    tokens = draw(logits, make_rows(8), batch_flags=3)
    assert np.array_equal(tokens, logits.argmax(1)), "the first of equals"


def test_argmax_of_odd_rows() -> None:
    inf, nan = np.inf, np.nan
    rows = np.array(
        [
            [0, 1, 1, 0],
            [-inf, -inf, -inf, -inf],
            [nan, nan, nan, nan],
            [0, nan, 2, 1],
            [inf, 0, inf, 1],
            [-0.0, 0.0, -0.0, -1],
            [-inf, -inf, -3e38, -inf],
            [5, 5, 5, 5],
        ],
        np.float32,
    )
    got = np.asarray(jax.jit(argmax)(rows))
    assert got.dtype == np.int32
    assert ((got >= 0) & (got < 4)).all(), "always a valid id"
    assert got[[0, 1, 4, 5, 6, 7]].tolist() == [1, 0, 0, 0, 2, 0]
    assert np.asarray(argmax(jnp.zeros((3, 1)))).tolist() == [0, 0, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_reported_one_by_one(bad: float) -> None:
    logits = np.random.default_rng(0).normal(0, 1, (4, VOCAB)).astype(np.float32)
    good = draw(logits, make_rows(4, flags=RANDOM_ROW, seed=range(4)))
    logits[2, 5] = bad
    rows = make_rows(4, flags=RANDOM_ROW, seed=range(4), top_p=[1, 1, 0.5, 1])
    tokens, finite = jitted_sample(
        jnp.asarray(logits), rows, jnp.int32(1), init_state(5, VOCAB), rows_at_once=1
    )
    assert finite.tolist() == [True, True, False, True]
    assert np.array_equal(np.delete(np.asarray(tokens), 2), np.delete(good, 2))
    assert 0 <= int(tokens[2]) < VOCAB


def test_logprobs_against_float64() -> None:
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 6, (10, VOCAB)).astype(np.float32)
    logits[3] += 1e4  # the normaliser must not overflow
    logits[4] = np.round(logits[4])
    logits[5] = 0.0
    chosen = rng.integers(0, VOCAB, 10).astype(np.int32)
    got = jax.jit(logprobs_of)(logits, chosen)
    x = logits.astype(np.float64)
    want = x - x.max(1, keepdims=True)
    want -= np.log(np.exp(want).sum(1, keepdims=True))
    tolerance = {"rtol": 1e-5, "atol": 2e-3}
    np.testing.assert_allclose(got.chosen_M, want[np.arange(10), chosen], **tolerance)
    order = np.argsort(-x, axis=1, kind="stable")[:, :MAX_LOGPROBS]
    assert np.array_equal(got.top_ids_MK, order), "best first, the lower id among equals"
    np.testing.assert_allclose(got.top_MK, np.take_along_axis(want, order, 1), **tolerance)
    assert np.array_equal(got.rank_M, 1 + (x > x[np.arange(10), chosen][:, None]).sum(1)), (
        "ties count from the first"
    )
    assert (np.exp(np.asarray(got.top_MK, np.float64)).sum(1)[[0, 1, 2, 5]] <= 1 + 1e-5).all()
    assert (np.diff(np.asarray(got.top_MK), axis=1) <= 0).all()
    assert (np.asarray(got.chosen_M) <= 1e-6).all()


def test_no_logprobs_has_the_same_shapes() -> None:
    for vocab in (5, MAX_LOGPROBS, 64):
        real = jax.eval_shape(logprobs_of, jnp.zeros((3, vocab)), jnp.zeros(3, jnp.int32))
        none = jax.eval_shape(lambda v=vocab: no_logprobs(3, v))
        assert jax.tree.map(
            lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), real, none
        ) == jax.tree.map(lambda _: True, real)


def test_noise_of_some_tokens_is_what_they_have_among_all() -> None:
    seed, ids = jnp.array([3, 99], jnp.uint32), jnp.array([0, 5, 17, 1000, 49151])
    for position in (0, 1, 2**20):
        of_all = gumbel_noise(seed, jnp.int32(position), 49152)
        some = gumbel_noise_of(seed, jnp.int32(position), ids)
        assert np.allclose(
            some, of_all[ids], rtol=1e-5, atol=1e-6
        )  # logarithms of few numbers round otherwise
