"""What a batch could do to one of its rows: padding, wrong rows of parameters, stale slots and blocks, odd shapes."""

from __future__ import annotations

import itertools

import pytest

from jaxserve.request import FinishReason
from tests.engine_harness import (
    VOCAB,
    ServedModel,
    ask,
    assert_as_solo,
    assert_same,
    mixed_requests,
    prompt_ids,
    run,
)


@pytest.fixture(scope="module")
def mixed(tiny_model: ServedModel):
    return mixed_requests(tiny_model)


def test_every_batch_size(tiny_model):
    """B214, B210: equal prompts in all rows but the last, while rows leave one by one."""
    same, other = prompt_ids("same", 11), prompt_ids("other", 19)
    for count in range(1, 17):
        engine = tiny_model.engine(enable_prefix_caching=False)
        requests = [ask(f"same{i}", same, 4 + i) for i in range(count - 1)]
        requests.append(ask("last", other, 20))
        outcomes = run(engine, requests)
        assert_as_solo(tiny_model, requests, outcomes)
        # Not even a near-tie may part them: rows of one batch compute the same.
        longest = max((outcomes[f"same{i}", 0].token_ids for i in range(count - 1)), key=len, default=[])
        for i in range(count - 1):
            assert outcomes[f"same{i}", 0].token_ids == longest[: 4 + i]


@pytest.mark.parametrize("count", [3, 5, 7, 13])
def test_parameters_stay_with_their_rows(tiny_model, count):
    """B216: counts that are no bucket's; greedy and seeded rows side by side, in every rotation."""
    requests = [
        ask(f"row{i}", 5 + i, 12)
        if i % 3 == 0
        else ask(f"row{i}", 5 + i, 12, temperature=0.5 + 0.1 * i, seed=i, top_k=(0, 0, 50)[i % 3])
        for i in range(count)
    ]
    for first in range(0, count, 2):
        rotated = requests[first:] + requests[:first]
        assert_as_solo(tiny_model, requests, run(tiny_model.engine(), rotated))


@pytest.mark.parametrize(
    "filters", [{}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5}, {"top_p": 0.8, "top_k": 9, "min_p": 0.01}]
)
def test_a_mates_filters_do_not_shift_the_noise(tiny_model, filters):
    """B070, in both directions."""
    unfiltered = ask("unfiltered", 14, 32, temperature=0.8, seed=42)
    filtered = ask("filtered", 14, 32, temperature=0.8, seed=42, **filters)
    assert_as_solo(tiny_model, [unfiltered, filtered], run(tiny_model.engine(), [unfiltered, filtered]))


@pytest.mark.parametrize("length", [2, 9, 40])
def test_a_mates_penalties_are_its_own(tiny_model, length):
    """B077: padding penalises nothing either, neither id 0 nor the padding id."""
    watched = {0: 12.0, 2: 12.0}  # likely enough to be chosen by those that nobody penalises
    plain = ask("plain", 20, 24, logit_bias=watched)
    penalised = ask("penalised", 20, 24, logit_bias=watched, frequency_penalty=1.05, presence_penalty=0.5)
    mate = ask("mate", length, 24, logit_bias=watched, frequency_penalty=2.0, repetition_penalty=1.3)
    requests = [plain, penalised, mate]
    assert {0, 2} & set(tiny_model.solo(plain)[0].token_ids)
    for order in itertools.permutations(requests):
        assert_as_solo(tiny_model, requests, run(tiny_model.engine(), order))


def test_extreme_parameters_hurt_no_mate(tiny_model):
    """B041, B073, B074: every legal value gives finite logprobs, and what it asks for."""
    prompt = prompt_ids("extreme", 15)
    mate = ask("mate", 21, 30)
    greedy = tiny_model.solo(ask("greedy", prompt, 10))[0].token_ids
    acts_greedy = [
        *({"temperature": t} for t in (1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-30, 5e-324, -0.0)),
        *({"temperature": 1.0, "top_p": p} for p in (0.0, 1e-9)),
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 1.0, "top_k": 1, "top_p": 0.0, "min_p": 0.5},
    ]
    others = [
        *({"repetition_penalty": value} for value in (1e-6, 1e6, 1.0)),
        *({"presence_penalty": v, "frequency_penalty": v} for v in (-2.0, 2.0)),
        {"temperature": 100.0},
        {"temperature": 1.0, "top_k": 1, "top_p": 0.0, "min_p": 1.0, "logit_bias": {greedy[0]: -100.0}},
        {"logit_bias": dict.fromkeys(range(1000), -100.0)},
    ]
    cases = [*acts_greedy, *others]
    requests = [ask(f"case{i}", prompt, 10, seed=i, logprobs=3, **params) for i, params in enumerate(cases)]
    for start in range(0, len(requests), 15):
        batch = [mate, *requests[start : start + 15]]
        outcomes = run(tiny_model.engine(), batch)
        assert_as_solo(tiny_model, batch, outcomes)
        for (name, _), outcome in outcomes.items():
            assert len(outcome.token_ids) == (30 if name == "mate" else 10), name
            for entry in outcome.logprobs:
                assert all(-1e4 < value <= 1e-4 for value in (entry.logprob, *(lp for _, lp in entry.top)))
            if name.startswith("case") and int(name[4:]) < len(acts_greedy):
                assert outcome.token_ids == greedy, cases[int(name[4:])]
    assert tiny_model.solo(requests[-2])[0].token_ids[0] != greedy[0], "a bias of -100 excludes"


def test_a_reused_slot_remembers_nothing(tiny_model):
    """B080: with one slot, between unrelated requests, cold and cached, at the edge of a block."""
    for length in (16, 17):
        prompt = prompt_ids(f"edge{length}", length)
        engine = tiny_model.engine(max_num_seqs=1)
        for turn in range(5):
            requests = [
                ask(
                    f"between{turn}",
                    3 + turn,
                    5,
                    seed=turn,
                    temperature=2.0,
                    presence_penalty=2.0,
                    logit_bias={5: 9},
                ),
                ask(f"watched{turn}", prompt, 9),
                ask(f"penalised{turn}", prompt, 9, repetition_penalty=1.2),
                ask(f"biased{turn}", prompt, 9, min_tokens=3, logit_bias={7: 9}),
            ]
            outcomes = run(engine, requests)
            assert_as_solo(tiny_model, requests, outcomes)
            assert (outcomes[f"watched{turn}", 0].num_cached_tokens > 0) == (turn > 0)


def test_padding_touches_no_running_request(tiny_model):
    """B126: prompts just above every padded size, again and again, beside a long-lived request."""
    long_lived = ask("long-lived", 9, 200)
    lengths = [n + 1 for n in (1, 48, 64, 96, *(tokens for tokens, _ in tiny_model.buckets.seqs_by_tokens))]
    visits = {1 + 7 * i: [ask(f"visit{i}", lengths[i % len(lengths)], 2)] for i in range(25)}
    requests = [long_lived, *(request for (request,) in visits.values())]
    outcomes = run(tiny_model.engine(num_blocks=60), {0: [long_lived]} | visits)
    assert_as_solo(tiny_model, requests, outcomes)


@pytest.mark.parametrize("lengths", [(3, 13), (5, 9, 31), (1, 2, 3, 10, 11, 12, 33)])
def test_prompts_that_fill_no_block(tiny_model, lengths):
    """B128."""
    requests = [ask(f"unaligned{i}", length, 16) for i, length in enumerate(lengths)]
    assert_as_solo(tiny_model, requests, run(tiny_model.engine(), requests))


def test_up_to_the_very_end_of_the_context(tiny_model):
    """B219: the limit is a multiple of nothing; every prompt that leaves room for a token is served to the limit."""
    limit = 203
    engine = tiny_model.engine(max_model_len=limit)
    lengths = [limit - 1, limit - 2, limit - 8, limit - 31, limit - 32, limit - 33]
    requests = [ask(f"end{n}", n, max_tokens=limit - n) for n in lengths]
    unlimited = [ask(f"open{n}", prompt_ids(f"end{n}", n), None) for n in lengths[:3]]
    outcomes = run(engine, [*requests, *unlimited])
    assert_as_solo(tiny_model, requests, outcomes)
    for n in lengths:
        outcome = outcomes[f"end{n}", 0]
        assert (len(outcome.token_ids), outcome.finish_reason) == (limit - n, FinishReason.LENGTH)
    for n in lengths[:3]:
        assert outcomes[f"open{n}", 0].token_ids == outcomes[f"end{n}", 0].token_ids
    # With a cached beginning that leaves little of the last chunk, and one token at a time.
    for left in (1, 7, 8, 9):
        ids = [*prompt_ids(f"end{limit - 1}", limit - 1)[: limit - 1 - left], *prompt_ids("left", left)]
        request = ask(f"hit{left}", ids, 1)
        outcomes = run(engine, [request])
        assert outcomes[f"hit{left}", 0].num_cached_tokens >= limit - 1 - left - 8
        assert_as_solo(tiny_model, [request], outcomes)
    tight = tiny_model.engine(
        max_model_len=limit, max_num_seqs=1, max_num_batched_tokens=1, max_prefill_chunk=1
    )
    assert_as_solo(tiny_model, requests[:2], run(tight, requests[:2]))


def test_scores_of_a_cached_prompt_are_complete(tiny_model):
    """B060: logprobs of cached positions exist, and are those of a cold run, wherever the prompt is cut."""
    engine = tiny_model.engine()
    prompt = prompt_ids("scored", 70)
    cold = run(engine, [ask("cold", prompt, 1, prompt_logprobs=1)])["cold", 0].prompt_logprobs
    assert cold is not None
    run(engine, [ask("normal", prompt, 5)])
    for turn in range(2):
        for length in (70, 33, 32, 31, 17, 16, 8, 2, 1):
            request = ask(f"warm{turn}-{length}", prompt[:length], 1, prompt_logprobs=1)
            scored = run(engine, [request])[request.request_id, 0].prompt_logprobs
            assert scored is not None
            assert len(scored) == length
            assert scored[0] is None
            for mine, theirs in zip(scored[1:], cold[1:], strict=False):
                assert mine.token_id == theirs.token_id
                assert abs(mine.logprob - theirs.logprob) < 1e-4
                assert mine.rank == theirs.rank
    after = run(engine, [ask("after", prompt, 5)])["after", 0]
    assert after.num_cached_tokens > 0


def test_choices_of_one_request(tiny_model):
    """B065: each has a seed of its own, the first the request's; place and repetition change nothing."""
    prompt = prompt_ids("choices", 13)
    twice = [ask(f"copy{i}", prompt, 16, n=3, seed=7, temperature=1.0) for i in range(2)]
    outcomes = run(tiny_model.engine(), [ask("other", 5, 9), *twice])
    again = run(tiny_model.engine(), twice)
    texts = [[outcomes[f"copy{i}", index].token_ids for index in range(3)] for i in range(2)]
    assert texts[0] == texts[1] == [again["copy0", index].token_ids for index in range(3)]
    assert len(set(map(tuple, texts[0]))) == 3
    alone = tiny_model.solo(ask("single", prompt, 16, seed=7, temperature=1.0))[0]
    assert alone.token_ids == texts[0][0]


def test_every_stream_is_complete(tiny_model):
    """B008: many streams at once deliver exactly the tokens that were asked for, then one end."""
    counts = [(1, 2, 3, 17)[i % 4] for i in range(64)]
    requests = [ask(f"stream{i}", 3 + i % 9, count, logprobs=0) for i, count in enumerate(counts)]
    outcomes = run(tiny_model.engine(), requests)
    for i, count in enumerate(counts):
        outcome = outcomes[f"stream{i}", 0]
        assert len(outcome.token_ids) == len(outcome.logprobs) == count
        assert outcome.finish_reason is FinishReason.LENGTH
    assert_as_solo(tiny_model, requests, outcomes)


def test_no_end_before_min_tokens(tiny_model):
    """B017: neither by a stop string, a stop token nor EOS; then the next one counts."""
    prompt = prompt_ids("early", 10)
    free = tiny_model.solo(ask("free", prompt, 40))[0]
    decode = tiny_model.tokenizer.decode
    early, late = decode(free.token_ids[:20]), decode(free.token_ids[31:38])
    first = next(c for c in early if c.isalpha() and c in late)
    by_string = ask("string", prompt, 40, stop=(first,), min_tokens=30, include_stop_str_in_output=True)
    eos = ask("eos", prompt, 40, ignore_eos=False, min_tokens=30, logit_bias={2: 100.0})
    token = ask("token", prompt, 40, stop_token_ids=tuple(free.token_ids[:5]), min_tokens=30)
    outcomes = run(tiny_model.engine(), [by_string, eos, token, ask("mate", 9, 40)])
    assert outcomes["string", 0].token_ids == free.token_ids[: len(outcomes["string", 0].token_ids)]
    assert len(outcomes["string", 0].token_ids) > 30
    assert len(outcomes["eos", 0].token_ids) == 31
    assert outcomes["eos", 0].token_ids[-1] == 2
    assert 2 not in outcomes["eos", 0].token_ids[:-1]
    assert not set(free.token_ids[:5]) & set(outcomes["token", 0].token_ids[:30])
    for name in ("string", "eos"):
        assert outcomes[name, 0].finish_reason is FinishReason.STOP
    for (name, _), outcome in outcomes.items():
        if name == "eos":
            assert outcome.stop_reason is None


def test_only_allowed_tokens_at_the_right_rate(tiny_model):
    """B223: with all but two tokens excluded nothing else is ever drawn, and both as often as they should."""
    prompt = prompt_ids("rate", 6)
    solo = tiny_model.solo(ask("best", prompt, 1, logprobs=20))[0]
    (first, logprob), (second, other) = solo.logprobs[0].top[:2]
    # Far above everything else, and level with each other.
    bias = {first: 90.0 + (other - logprob) / 2, second: 90.0 + (logprob - other) / 2}
    engine = tiny_model.engine()
    drawn: list[int] = []
    for turn in range(4):
        requests = [ask(f"draw{turn}", prompt, 1, n=64, seed=turn, temperature=1.0, logit_bias=bias)]
        drawn += [token for outcome in run(engine, requests).values() for token in outcome.token_ids]
    assert set(drawn) == {first, second}
    share = drawn.count(first) / len(drawn)
    assert abs(share - 0.5) < 5 * (0.25 / len(drawn)) ** 0.5, f"{share:.3f} of {len(drawn)}"


def test_row_of_the_largest_token_id(tiny_model):
    """No index is clipped: a bias on the vocabulary's ends moves exactly these."""
    for token in (0, VOCAB - 1):
        outcome = run(tiny_model.engine(), [ask("end", 8, 3, logit_bias={token: 100.0})])["end", 0]
        assert outcome.token_ids == [token] * 3
    plain = ask("plain", 8, 3)
    assert_same(run(tiny_model.engine(), [plain])["plain", 0], tiny_model.solo(plain)[0], "plain")
