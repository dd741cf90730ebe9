"""A draft is packed as a row of its own: as if the request had it for its last token."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.batch.builder import HostBatch
from jaxserve.scheduler.output import ScheduledRequest
from tests.batch.test_builder import BLOCK_SIZE, arrays, build, make_row


def with_drafts(row: ScheduledRequest, drafts: tuple[int, ...]) -> ScheduledRequest:
    count = row.num_scheduled_tokens + len(drafts)
    blocks = -(-(row.num_computed_tokens + count) // BLOCK_SIZE)
    table = tuple(row.new_block_ids[0] + j for j in range(blocks))
    return msgspec.structs.replace(
        row, num_scheduled_tokens=count, draft_token_ids=drafts, new_block_ids=table
    )


def one_by_one(row: ScheduledRequest) -> list[ScheduledRequest]:
    """The same rows as requests that know their drafts."""
    rows = []
    for count in range(len(row.draft_token_ids) + 1):
        request = dataclasses.replace(
            row.request, output_token_ids=[*row.request.output_token_ids, *row.draft_token_ids[:count]]
        )
        start = row.num_computed_tokens + count
        rows.append(
            msgspec.structs.replace(
                row, request=request, num_computed_tokens=start, num_scheduled_tokens=1, draft_token_ids=()
            )
        )
    return rows


def sorted_rows(batch: HostBatch) -> tuple[dict[str, list[object]], np.ndarray]:
    """What each row and its token hold, by (slot, position): the two ways order them otherwise."""
    found = arrays(batch)
    rows = {}
    for s in range(int(found["num_seqs"])):
        first, last = int(found["cu_q_lens"][s]), int(found["logits_indices"][s])
        names = [
            n
            for n, a in found.items()
            if a.shape[:1] == found["seq_lens"].shape and n not in ("logits_indices",)
        ]
        row = [(n, found[n][s].tolist()) for n in names if not n.startswith("draft")]
        tokens = [
            (n, found[n][first : last + 1].tolist())
            for n in ("token_ids", "positions", "slot_mapping", "target_ids")
        ]
        rows[int(found["state_rows"][s]), int(found["seq_lens"][s])] = [*row, *tokens]
    return rows, found  # type: ignore[return-value]


@settings(max_examples=60)
@given(data=st.data())
def test_drafts_are_rows(data: st.DataObject) -> None:
    rows, flat = [], []
    room = 2  # beside three requests and a chunk
    for number in range(3):
        prompt, output = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
        row = make_row(
            number,
            prompt=prompt,
            output=output,
            computed=prompt + output - 1,
            stop=frozenset([5]),
            min_tokens=data.draw(st.integers(0, 12)),
            logprobs=data.draw(st.sampled_from([None, 2])),
        )
        drafts = data.draw(st.lists(st.integers(0, 90), max_size=room))
        room -= len(drafts)
        row = with_drafts(row, tuple(drafts))
        rows.append(row)
        flat += one_by_one(row)
    rows.append(chunk := make_row(5, prompt=9, scheduled=4))
    batch, reference = build(*rows), build(*flat, chunk)
    assert batch.bucket == reference.bucket
    found, held = sorted_rows(batch)
    assert found == sorted_rows(reference)[0]
    assert batch.num_rows == len(flat) + 1 == int(held["num_seqs"])
    assert batch.num_tokens == reference.num_tokens
    assert batch.flags == reference.flags
    for at, row in enumerate(batch.rows):
        first = batch.first_row[at] if batch.first_row else at
        drafts = held["draft_ids"][first + 1 : first + row.num_rows].tolist()
        assert drafts == list(row.draft_token_ids)
        assert held["draft_indices"][first : first + row.num_rows].tolist() == list(range(row.num_rows))
        assert held["draft_ids"][first] == 0
        assert batch.first_token[at] == held["cu_q_lens"][first]
        assert held["state_rows"][first] == row.slot
