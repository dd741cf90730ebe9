"""SchedulerOutput -> HostBatch: the plan of a step as one packed numpy vector of a known shape.

Decode rows come first, longest context first (attention tiles of equal lengths waste least), then prefill chunks.
Padding tokens write to block 0, the sink, and padding rows sample nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.batch.buckets import Bucket, ShapeBuckets
from jaxserve.batch.flags import BatchFlag, RowFlag
from jaxserve.batch.layout import packed_size, unpack
from jaxserve.request import Request, SamplingParams
from jaxserve.scheduler.output import ScheduledRequest, SchedulerOutput


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A step's input on the host. Never written again once built: on a CPU the device may read it in place.

    Attributes:
      bucket: its shape.
      packed: int32 vector, see `layout`.
      rows: the scheduled requests in row order (row s of the batch is rows[s]).
      first_token: index of each row's first token in the packed batch.
      num_tokens: real tokens; the bucket's remainder is padding.
    """

    bucket: Bucket
    packed: np.ndarray
    rows: tuple[ScheduledRequest, ...]
    first_token: tuple[int, ...]
    num_tokens: int


def build_batch(
    plan: SchedulerOutput, buckets: ShapeBuckets, *, block_size: int, padding_row: int
) -> HostBatch:
    """Pack a plan.

    Args:
      padding_row: row of the per-request device state that padding rows may write to.
    """
    rows = _row_order(plan.scheduled)
    counts = np.array([row.num_scheduled_tokens for row in rows], np.int32)
    starts = np.array([row.num_computed_tokens for row in rows], np.int32)
    num_seqs, num_tokens = len(rows), int(counts.sum())
    bucket = buckets.smallest_for(num_tokens + plan.num_padding_tokens, num_seqs)
    packed = np.zeros(packed_size(bucket), np.int32)
    array = unpack(packed, bucket)
    ends = np.cumsum(counts)
    first = ends - counts

    array["token_ids"][:num_tokens] = [
        token
        for row in rows
        for token in row.request.token_ids(
            row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens
        )
    ]
    owner = np.repeat(np.arange(num_seqs), counts)
    positions = np.arange(num_tokens, dtype=np.int32) - first[owner] + starts[owner]
    array["positions"][:num_tokens] = positions
    tables = array["block_tables"]
    for s, row in enumerate(rows):
        tables[s, : len(row.block_ids)] = row.block_ids
    array["slot_mapping"][:num_tokens] = (
        tables[owner, positions // block_size] * block_size + positions % block_size
    )
    array["seq_lens"][:num_seqs] = starts + counts
    array["cu_q_lens"][1 : num_seqs + 1] = ends
    array["cu_q_lens"][num_seqs + 1 :] = num_tokens
    array["logits_indices"][:num_seqs] = ends - 1
    array["num_decodes"][...] = int((counts == 1).sum())
    array["num_seqs"][...] = num_seqs
    array["state_rows"][:] = padding_row
    batch_flags = _write_sampling_rows(array, rows)
    if any(_scores_prompt(row) for row in rows):
        batch_flags |= BatchFlag.PROMPT_LOGPROBS
        _write_targets(array["target_ids"], rows, first)
    array["batch_flags"][...] = int(batch_flags)
    return HostBatch(bucket, packed, rows, tuple(first.tolist()), num_tokens)


def _row_order(scheduled: tuple[ScheduledRequest, ...]) -> tuple[ScheduledRequest, ...]:
    single = [row for row in scheduled if row.num_scheduled_tokens == 1]
    chunks = [row for row in scheduled if row.num_scheduled_tokens != 1]
    return (*sorted(single, key=lambda row: -row.num_computed_tokens), *chunks)


def _write_sampling_rows(array: dict[str, np.ndarray], rows: tuple[ScheduledRequest, ...]) -> BatchFlag:
    """Fill the per-row sampling arrays; returns what the batch as a whole needs."""
    batch = BatchFlag(0)
    floats = {
        name: array[name].view(np.float32)
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        )
    }
    floats["temperature"][:] = 1.0
    floats["top_p"][:] = 1.0
    floats["repetition_penalty"][:] = 1.0
    for s, row in enumerate(rows):
        request, params = row.request, row.request.params
        assert request.slot is not None
        array["state_rows"][s] = request.slot
        if not row.samples:
            continue
        flags = row_flags(request)
        array["row_flags"][s] = int(flags)
        array["sample_positions"][s] = request.num_tokens
        array["seed_low"][s], array["seed_high"][s] = _seed_words(request.seed)
        if flags & (RowFlag.PENALTIES | RowFlag.LOGIT_BIAS | RowFlag.BAN_STOPS):
            batch |= BatchFlag.PROCESS_LOGITS
            floats["presence_penalty"][s] = params.presence_penalty
            floats["frequency_penalty"][s] = params.frequency_penalty
            floats["repetition_penalty"][s] = params.repetition_penalty
        if flags & RowFlag.RANDOM:
            batch |= BatchFlag.RANDOM
            array["top_k"][s] = params.top_k
            floats["temperature"][s] = params.temperature
            floats["top_p"][s] = params.top_p
            floats["min_p"][s] = params.min_p
        if params.logprobs is not None:
            batch |= BatchFlag.LOGPROBS
    return batch


def row_flags(request: Request) -> RowFlag:
    """What the next sample of a request needs."""
    params = request.params
    flags = RowFlag.SAMPLE
    if not params.is_greedy:
        flags |= RowFlag.RANDOM
    if has_penalties(params):
        flags |= RowFlag.PENALTIES
    if params.logit_bias:
        flags |= RowFlag.LOGIT_BIAS
    if request.num_output_tokens < params.min_tokens and request.stop_token_ids:
        flags |= RowFlag.BAN_STOPS
    return flags


def has_penalties(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1


def needs_state_row(request: Request) -> bool:
    """Whether the request's row of device state (token counts, bias, stop ids) is ever read."""
    params = request.params
    return has_penalties(params) or bool(params.logit_bias) or params.min_tokens > 0


def _scores_prompt(row: ScheduledRequest) -> bool:
    return prompt_positions_scored(row) > 0


def prompt_positions_scored(row: ScheduledRequest) -> int:
    """How many prompt positions this step can score: position p is scored by the step that computes p - 1."""
    if row.request.params.prompt_logprobs is None or row.request.index != 0:
        return 0
    end = min(row.num_computed_tokens + row.num_scheduled_tokens, row.request.num_prompt_tokens - 1)
    return max(0, end - row.num_computed_tokens)


def _write_targets(target_ids: np.ndarray, rows: tuple[ScheduledRequest, ...], first: np.ndarray) -> None:
    for s, row in enumerate(rows):
        scored = prompt_positions_scored(row)
        if scored:
            start = row.num_computed_tokens + 1
            target_ids[first[s] : first[s] + scored] = row.request.prompt_token_ids[start : start + scored]


def _seed_words(seed: int) -> tuple[int, int]:
    """A 64-bit seed as two int32, low word first."""
    low, high = np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint32).view(np.int32)
    return int(low), int(high)
