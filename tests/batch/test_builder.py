"""Plans against a second, slow, plain description of what a batch holds."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.batch.buckets import ShapeBuckets, default_buckets
from jaxserve.batch.builder import BatchBuilder, HostBatch
from jaxserve.batch.flags import BatchFlag, RowFlag
from jaxserve.batch.layout import places, unpack
from jaxserve.batch.row_table import has_penalties, needs_state_row
from jaxserve.request import Request, SamplingParams
from jaxserve.scheduler.output import ScheduledRequest, SchedulerOutput
from tests.fakes import make_config, make_request
from tests.scheduler.harness import Harness

BLOCK_SIZE = 4
MAX_SEQS = 6
CONFIG = make_config(
    max_num_seqs=MAX_SEQS, max_num_batched_tokens=40, max_model_len=64, block_size=BLOCK_SIZE
)
BUCKETS = default_buckets(CONFIG)
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def make_row(
    number: int,
    *,
    prompt: int,
    output: int = 0,
    computed: int = 0,
    scheduled: int | None = None,
    index: int = 0,
    seed: int = 0,
    stop: frozenset[int] = frozenset(),
    slot: int | None = None,
    **params: Any,
) -> ScheduledRequest:
    """Request `number`: its prompt is 1000 * number + position; `scheduled` None catches up."""
    request = Request(
        request_id=f"r{number}:{index}",
        group_id=f"r{number}",
        index=index,
        prompt_token_ids=tuple(1000 * number + i for i in range(prompt)),
        params=SamplingParams(max_tokens=None, **params),
        seed=seed,
        max_tokens=100,
        stop_token_ids=stop,
        output_token_ids=[1000 * number + 500 + i for i in range(output)],
        num_computed_tokens=computed,
        slot=number if slot is None else slot,
    )
    if scheduled is None:
        scheduled = prompt + output - computed
    blocks = -(-(computed + scheduled) // BLOCK_SIZE)
    table = tuple(100 * number + j + 1 for j in range(blocks))
    samples = computed + scheduled == prompt + output
    slot = number if slot is None else slot
    return ScheduledRequest(request, computed, scheduled, slot, table, samples, is_new=True)


def build(*rows: ScheduledRequest, padding_tokens: int = 0, buckets: ShapeBuckets = BUCKETS) -> HostBatch:
    plan = SchedulerOutput(0, tuple(rows), num_padding_tokens=padding_tokens)
    return BatchBuilder(buckets, block_size=BLOCK_SIZE, padding_row=MAX_SEQS).build(plan)


def arrays(batch: HostBatch) -> dict[str, np.ndarray]:
    found = unpack(batch.packed, places(batch.bucket))
    for name in FLOATS:
        found[name] = found[name].view(np.float32)
    return found


def row_flags(row: ScheduledRequest) -> RowFlag:
    return RowFlag(int(arrays(build(row))["row_flags"][0]))


def float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def expected(batch: HostBatch) -> dict[str, Any]:
    """What each array must hold, token by token and row by row, for the rows in the order they have."""
    tokens, seqs, width = batch.bucket.tokens, batch.bucket.seqs, batch.bucket.blocks
    want: dict[str, Any] = {
        name: [0] * tokens for name in ("token_ids", "positions", "slot_mapping", "target_ids")
    }
    want["block_tables"] = [[0] * width for _ in range(seqs)]
    row_names = (
        "seq_lens", "logits_indices", "sample_positions", "seed_low", "seed_high", "row_flags", "top_k", "min_p",
        "presence_penalty", "frequency_penalty",
    )  # fmt: skip
    want |= {name: [0] * seqs for name in row_names}
    want |= {name: [1.0] * seqs for name in ("temperature", "top_p", "repetition_penalty")}
    want["state_rows"] = [MAX_SEQS] * seqs
    want["cu_q_lens"] = [0]
    at = 0
    flags = 0
    for s, row in enumerate(batch.rows):
        request, params = row.request, row.request.params
        sequence = [*request.prompt_token_ids, *request.output_token_ids]
        for position in range(row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens):
            want["token_ids"][at] = sequence[position]
            want["positions"][at] = position
            want["slot_mapping"][at] = (
                row.new_block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            )
            if (
                params.prompt_logprobs is not None
                and request.index == 0
                and position + 1 < request.num_prompt_tokens
            ):
                want["target_ids"][at] = sequence[position + 1]
                flags |= 8
            at += 1
        for j, block in enumerate(row.new_block_ids):
            want["block_tables"][s][j] = block
        want["seq_lens"][s] = row.num_computed_tokens + row.num_scheduled_tokens
        want["cu_q_lens"].append(at)
        want["logits_indices"][s] = at - 1
        want["state_rows"][s] = request.slot
        want["seed_low"][s] = signed(request.seed % 2**32)
        want["seed_high"][s] = signed(request.seed // 2**32 % 2**32)
        want["top_k"][s] = params.top_k
        for name in FLOATS:
            want[name][s] = float32(getattr(params, name))
        if params.is_greedy:
            want["temperature"][s] = 1.0
        if row.num_computed_tokens + row.num_scheduled_tokens < len(sequence):
            continue
        row_flag = 1
        want["sample_positions"][s] = len(sequence)
        if params.temperature >= 1e-5 and params.top_k != 1:
            row_flag |= 2
            flags |= 1
        if (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0, 0, 1):
            row_flag |= 4
        if params.logit_bias:
            row_flag |= 8
        if len(request.output_token_ids) < params.min_tokens and request.stop_token_ids:
            row_flag |= 16
        if row_flag & (4 | 8 | 16):
            flags |= 2
        if params.logprobs is not None:
            flags |= 4
        want["row_flags"][s] = row_flag
    want["cu_q_lens"] += [at] * (seqs - len(batch.rows))
    want["num_decodes"] = sum(row.num_scheduled_tokens == 1 for row in batch.rows)
    want["num_seqs"] = len(batch.rows)
    want["batch_flags"] = flags
    return want


def check(batch: HostBatch, rows: list[ScheduledRequest]) -> None:
    assert sorted(map(id, batch.rows)) == sorted(map(id, rows)), "every row once"
    assert batch.num_tokens == sum(row.num_scheduled_tokens for row in rows)
    found = arrays(batch)
    for name, want in expected(batch).items():
        assert np.array_equal(found[name], np.array(want, found[name].dtype)), name
    singles = [row.num_scheduled_tokens == 1 for row in batch.rows]
    assert singles == sorted(singles, reverse=True), "single tokens come first"
    lengths = [row.num_computed_tokens for row in batch.rows if row.num_scheduled_tokens == 1]
    assert lengths == sorted(lengths, reverse=True), "longest context first"
    assert batch.first_token == tuple(found["cu_q_lens"][: len(rows)].tolist())
    assert batch.packed.dtype == np.int32


params_strategy = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1e-6, 1e-5, 0.7, 100.0]),
        "top_p": st.sampled_from([0.0, 0.9, 1.0]),
        "top_k": st.sampled_from([-1, 0, 1, 2**31 - 1]),
        "min_p": st.sampled_from([0.0, 0.1, 1.0]),
        "presence_penalty": st.sampled_from([0.0, -2.0, 2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.3]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 1e-6]),
        "logit_bias": st.sampled_from([None, {}, {3: 5.0}]),
        "min_tokens": st.integers(0, 6),
        "logprobs": st.sampled_from([None, 0, 20]),
        "prompt_logprobs": st.sampled_from([None, 0, 3]),
    },
)


@st.composite
def plans(draw: st.DrawFn) -> list[ScheduledRequest]:
    rows = []
    budget = 40
    for number in range(draw(st.integers(1, MAX_SEQS))):
        prompt = draw(st.integers(1, 30))
        output = draw(st.integers(0, 10))
        computed = draw(st.integers(0, prompt + output - 1))
        left = min(prompt + output - computed, budget)
        if left == 0:
            break
        scheduled = left if draw(st.booleans()) else draw(st.integers(1, left))
        budget -= scheduled
        rows.append(
            make_row(
                number,
                prompt=prompt,
                output=output,
                computed=computed,
                scheduled=scheduled,
                index=draw(st.sampled_from([0, 0, 1])),
                seed=draw(st.integers(-(2**63), 2**64 - 1)),
                stop=draw(st.sampled_from([frozenset(), frozenset({2, 9})])),
                slot=number,
                **draw(params_strategy),
            )
        )
    return draw(st.permutations(rows))


@given(rows=plans())
@settings(max_examples=300)
def test_every_array_is_as_described(rows: list[ScheduledRequest]) -> None:
    check(build(*rows), rows)


@given(rows=plans(), extra=st.integers(0, 20))
@settings(max_examples=30)
def test_padding_on_purpose_only_widens_the_bucket(rows: list[ScheduledRequest], extra: int) -> None:
    used = sum(row.num_scheduled_tokens for row in rows)
    extra = min(extra, 40 - used)
    batch = build(*rows, padding_tokens=extra)
    check(batch, rows)
    assert batch.bucket == BUCKETS.smallest_for(used + extra, len(rows))


@pytest.mark.parametrize("count", range(1, MAX_SEQS + 1))
def test_padding_names_the_sink_and_the_spare_row(count: int) -> None:
    batch = build(*(make_row(i, prompt=5, output=2, computed=6) for i in range(count)))
    found = arrays(batch)
    assert (found["slot_mapping"][count:] == 0).all()
    assert (found["slot_mapping"][:count] >= BLOCK_SIZE).all(), "a real token in the sink"
    assert (found["state_rows"][count:] == MAX_SEQS).all()
    assert (found["seq_lens"][count:] == 0).all()
    assert (found["row_flags"][count:] == 0).all()
    assert (found["temperature"][count:] == 1).all(), "a division by it must stay finite"
    assert (found["logits_indices"] < batch.bucket.tokens).all()


def test_arrays_are_fresh_for_every_batch() -> None:
    """A device may read them in place while the next batch is built."""
    row = make_row(0, prompt=5)
    first = build(row)
    kept = first.packed.copy()
    second = build(make_row(1, prompt=5, temperature=0.5))
    assert not np.shares_memory(first.packed, second.packed)
    assert np.array_equal(first.packed, kept)
    assert not np.shares_memory(build(row).packed, first.packed)


@pytest.mark.parametrize(
    ("computed", "scheduled", "scored"),
    [
        (0, 10, 9),
        (0, 9, 9),
        (0, 8, 8),
        (0, 1, 1),
        (8, 1, 1),
        (8, 2, 1),
        (9, 1, 0),
        (3, 4, 4),
        (9, 3, 0),
        (11, 1, 0),
    ],
)
def test_positions_scored_at_the_edges_of_chunks(computed: int, scheduled: int, scored: int) -> None:
    row = make_row(1, prompt=10, output=2, computed=computed, scheduled=scheduled, prompt_logprobs=0)
    batch = build(make_row(2, prompt=8, output=1, computed=8), row)
    targets = arrays(batch)["target_ids"]
    at = [item.request_id for item in batch.rows].index("r1:0")
    assert batch.num_scored == (tuple(scored * (s == at) for s in range(2)) if scored else ())
    first = batch.first_token[at]
    want = np.zeros_like(targets)
    want[first : first + scored] = [1000 + computed + 1 + i for i in range(scored)]
    assert np.array_equal(targets, want)
    assert bool(arrays(batch)["batch_flags"] & BatchFlag.PROMPT_LOGPROBS) == (scored > 0)


@given(cuts=st.lists(st.integers(1, 29), unique=True, max_size=8), prompt=st.integers(1, 30))
def test_chunks_score_every_prompt_position_once(cuts: list[int], prompt: int) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < prompt), prompt]
    scored: list[int] = []
    for start, end in pairwise(edges):
        row = make_row(0, prompt=prompt, computed=start, scheduled=end - start, prompt_logprobs=2)
        scored += range(start + 1, start + 1 + sum(build(row).num_scored))
    assert scored == list(range(1, prompt))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1, -(2**63), -(2**31)])
def test_seeds_travel_as_two_words(seed: int) -> None:
    found = arrays(build(make_row(0, prompt=3, seed=seed)))
    low, high = found["seed_low"].view(np.uint32)[0], found["seed_high"].view(np.uint32)[0]
    assert int(low) + (int(high) << 32) == seed % 2**64


@pytest.mark.parametrize(
    ("params", "row", "batch"),
    [
        ({"temperature": 0.0}, RowFlag.SAMPLE, 0),
        ({"temperature": 9.9e-6}, RowFlag.SAMPLE, 0),
        ({"top_k": 1}, RowFlag.SAMPLE, 0),
        ({}, RowFlag.SAMPLE | RowFlag.RANDOM, BatchFlag.RANDOM),
        ({"temperature": 1e-5}, RowFlag.SAMPLE | RowFlag.RANDOM, BatchFlag.RANDOM),
        ({"temperature": 0, "presence_penalty": -0.1}, RowFlag.SAMPLE | RowFlag.PENALTIES, BatchFlag.PROCESS_LOGITS),
        ({"temperature": 0, "frequency_penalty": 0.1}, RowFlag.SAMPLE | RowFlag.PENALTIES, BatchFlag.PROCESS_LOGITS),
        ({"temperature": 0, "repetition_penalty": 1.1}, RowFlag.SAMPLE | RowFlag.PENALTIES, BatchFlag.PROCESS_LOGITS),
        ({"temperature": 0, "logit_bias": {1: 0.5}}, RowFlag.SAMPLE | RowFlag.LOGIT_BIAS, BatchFlag.PROCESS_LOGITS),
        ({"temperature": 0, "logit_bias": {}}, RowFlag.SAMPLE, 0),
        ({"temperature": 0, "min_tokens": 3}, RowFlag.SAMPLE | RowFlag.BAN_STOPS, BatchFlag.PROCESS_LOGITS),
        ({"temperature": 0, "min_tokens": 2}, RowFlag.SAMPLE, 0),
        ({"temperature": 0, "logprobs": 0}, RowFlag.SAMPLE, BatchFlag.LOGPROBS),
        ({"temperature": 0, "prompt_logprobs": 0}, RowFlag.SAMPLE, 0),
    ],
)  # fmt: skip
def test_flags_say_what_is_needed_and_no_more(params: dict[str, Any], row: int, batch: int) -> None:
    decode = make_row(0, prompt=5, output=2, computed=6, stop=frozenset({7}), **params)
    found = arrays(build(decode))
    assert found["row_flags"][0] == int(row)
    assert int(found["batch_flags"]) == int(batch)


def test_a_chunk_that_samples_nothing_asks_for_nothing() -> None:
    chunk = make_row(
        0, prompt=9, scheduled=4, logprobs=1, frequency_penalty=1.0, min_tokens=3, stop=frozenset({1})
    )
    found = arrays(build(chunk))
    assert found["row_flags"][0] == 0
    assert int(found["batch_flags"]) == 0
    assert found["state_rows"][0] == 0


def test_stops_are_banned_until_min_tokens_are_there() -> None:
    for output in range(5):
        row = make_row(0, prompt=4, output=output, computed=3 + output, min_tokens=3, stop=frozenset({1}))
        assert bool(row_flags(row) & RowFlag.BAN_STOPS) == (output < 3)
    assert not row_flags(make_row(0, prompt=4, min_tokens=3)) & RowFlag.BAN_STOPS, "nothing to ban"


def test_state_rows_are_loaded_for_whoever_reads_them() -> None:
    """Any row flag that reads the device state implies that the state is brought up to date on admission."""
    reads = RowFlag.PENALTIES | RowFlag.LOGIT_BIAS | RowFlag.BAN_STOPS
    for params in (
        {}, {"presence_penalty": 1.0}, {"frequency_penalty": -1.0}, {"repetition_penalty": 0.9},
        {"logit_bias": {3: 1.0}}, {"min_tokens": 1}, {"temperature": 0},
    ):  # fmt: skip
        row = make_row(0, prompt=3, stop=frozenset({5}), **params)
        assert needs_state_row(row.request) == bool(row_flags(row) & reads)
        assert has_penalties(row.request.params) == bool(row_flags(row) & RowFlag.PENALTIES)


def test_a_resumed_request_computes_its_output_again_and_samples_once() -> None:
    """After a preemption the output is a prompt's tail: positions run on and only the last chunk samples."""
    resumed = {"prompt": 6, "output": 7, "temperature": 0.5, "seed": 9}
    first = make_row(1, computed=0, scheduled=8, **resumed)
    batch = build(first)
    check(batch, [first])
    assert arrays(batch)["row_flags"][0] == 0
    assert arrays(batch)["token_ids"][:8].tolist() == [*range(1000, 1006), 1500, 1501]
    last = make_row(1, computed=8, **resumed)
    batch = build(last)
    check(batch, [last])
    assert arrays(batch)["token_ids"][:5].tolist() == [1502, 1503, 1504, 1505, 1506]
    assert arrays(batch)["sample_positions"][0] == 13, "the same draw as without the preemption"


def test_a_request_may_fill_its_whole_block_table() -> None:
    row = make_row(1, prompt=40, output=24, computed=63)
    batch = build(row)
    check(batch, [row])
    assert (arrays(batch)["block_tables"][0] > 0).all()
    assert arrays(batch)["slot_mapping"][0] == row.new_block_ids[-1] * BLOCK_SIZE + BLOCK_SIZE - 1


@pytest.mark.parametrize("overlap", [False, True])
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 20), st.booleans(), params_strategy),
        min_size=2,
        max_size=12,
    ),
    num_blocks=st.integers(13, 24),
    aborted=st.lists(st.integers(0, 20), max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_what_is_remembered_by_slot_is_what_a_newcomer_would_be_told(
    overlap: bool, requests: list[tuple[int, int, bool, dict[str, Any]]], num_blocks: int, aborted: list[int]
) -> None:
    """Slots and tables change hands under pressure; each batch equals the one of a builder without a memory."""
    harness = Harness(
        num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=40,
        max_model_len=64,
        overlap=overlap,
    )
    for number, (prompt, output, stops, params) in enumerate(requests):
        harness.add(
            make_request(f"r{number}", prompt, output, eos=[1] if stops else [], **own(params, output))
        )
    builder = BatchBuilder(BUCKETS, block_size=BLOCK_SIZE, padding_row=MAX_SEQS)
    while harness.scheduler.has_unfinished:
        plan = harness.launch()
        if plan.scheduled:
            batch = builder.build(plan)
            told = [
                msgspec.structs.replace(
                    row,
                    is_new=True,
                    new_block_ids=tuple(harness.runner.table(row)),
                )
                for row in plan.scheduled
            ]
            assert np.array_equal(batch.packed, build(*told).packed)
            continues = [bool(flags & RowFlag.CONTINUES) for flags in arrays(batch)["row_flags"]]
            assert continues[: len(batch.rows)] == [row.continues for row in batch.rows]
            assert overlap or not any(continues)
        harness.accept(leaving=int(overlap and bool(plan.scheduled)))
        if harness.num_steps in aborted:
            harness.scheduler.abort([min(harness.scheduler._entries, default="nobody")])


def own(params: dict[str, Any], output: int) -> dict[str, Any]:
    """The settings that a request of so many tokens may have."""
    return {**params, "min_tokens": min(params.get("min_tokens", 0), output)}
