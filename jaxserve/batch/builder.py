"""SchedulerOutput -> HostBatch: the plan of a step as one packed numpy vector of a known shape.

Decode rows come first, longest context first (so that the longest work starts first), then prefill chunks. A draft is a
decode row of its own, behind that of its request's last token or of the draft before it. Padding tokens write to block
0, the sink, and padding rows sample nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.batch.bucket import Bucket
from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.batch.flags import BatchFlag, RowFlag
from jaxserve.batch.layout import ROW_SETTINGS, Place, places, unpack
from jaxserve.batch.ready_buckets import ReadyBuckets
from jaxserve.batch.row_table import RowTable
from jaxserve.scheduler.output import DraftRequest, ScheduledRequest, SchedulerOutput

_PROCESSED = int(RowFlag.PENALTIES | RowFlag.LOGIT_BIAS | RowFlag.BAN_STOPS)


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A step's input on the host. Never written again once built: on a CPU the device may read it in place.

    Attributes:
      bucket: its shape.
      packed: int32 vector, see `layout`.
      rows: the scheduled requests in row order.
      first_token: index of each one's first token in the packed batch.
      num_scored: how many prompt positions each scores, from that token on: position p is scored by the step
        that computes p - 1. Empty when none scores any.
      num_tokens: real tokens; the bucket's remainder is padding.
      flags: what the step as a whole needs.
      first_row: each one's first row of the batch (there are more where it has drafts); empty: it is its index.
      masks: with BatchFlag.MASK: which tokens each row may have, packed as in `masks`. Takes a while, so it is called
        when the device is at work. Once.
    """

    bucket: Bucket
    packed: np.ndarray
    rows: tuple[ScheduledRequest, ...]
    first_token: tuple[int, ...]
    num_scored: tuple[int, ...]
    num_tokens: int
    flags: BatchFlag
    first_row: tuple[int, ...] = ()
    masks: Callable[[], np.ndarray] | None = None

    @property
    def num_rows(self) -> int:
        """Rows that yield logits, padding left out."""
        return self.first_row[-1] + self.rows[-1].num_rows if self.first_row else len(self.rows)


class BatchBuilder:
    """Packs the plans of one scheduler, each once and in order: it remembers block tables and settings by slot.

    Args:
      padding_row: row of the per-request device state that padding rows may write to, behind all slots.
    """

    def __init__(self, buckets: ShapeBuckets | ReadyBuckets, *, block_size: int, padding_row: int) -> None:
        self._buckets = buckets
        self._block_size = block_size
        self._padding_row = padding_row
        self._table = RowTable(padding_row + 1, buckets.blocks)
        self._layouts: dict[Bucket, tuple[Place, ...]] = {}

    def build(self, plan: SchedulerOutput) -> HostBatch:
        """Pack a plan into a vector of its own."""
        table = self._table
        for row in plan.scheduled:
            if row.new_block_ids or row.is_new:
                table.update(row)
        starts, counts, slots, samples, continues, drafts = _columns(plan.scheduled)
        order = np.argsort(np.where(counts == 1 + drafts, -starts, 1), kind="stable")
        rows = tuple([plan.scheduled[i] for i in order.tolist()])
        starts, counts, slots, drafts = starts[order], counts[order], slots[order], drafts[order]
        samples, continues = samples[order], continues[order]
        first_row = draft_index = None
        if drafts.any():
            owners, first_row, draft_index = _rows_of_drafts(drafts)
            starts, slots = starts[owners] + draft_index, slots[owners]
            counts = counts[owners] - drafts[owners]
            samples, continues = samples[owners], continues[owners]

        num_seqs, num_tokens = len(starts), int(counts.sum())
        bucket = self._buckets.smallest_for(num_tokens + plan.num_padding_tokens, num_seqs)
        layout = self._layouts.get(bucket)
        if layout is None:
            layout = self._layouts[bucket] = places(bucket)
        packed = np.zeros(layout[-1].stop, np.int32)
        array = unpack(packed, layout)
        cuts = np.cumsum(counts)
        first, ends = cuts - counts, starts + counts
        owner = np.repeat(np.arange(num_seqs), counts)
        positions = np.arange(num_tokens, dtype=np.int32) + (starts - first)[owner]
        block, offset = np.divmod(positions, self._block_size)
        num_decodes = int(np.count_nonzero(counts == 1))

        _write_token_ids(array["token_ids"], rows, num_decodes, first)
        if draft_index is not None:
            array["draft_indices"][:num_seqs] = draft_index
            draft_ids = array["token_ids"][:num_decodes] * (draft_index[:num_decodes] > 0)
            array["draft_ids"][:num_decodes] = draft_ids
        array["positions"][:num_tokens] = positions
        array["slot_mapping"][:num_tokens] = (
            table.block_tables_RB[slots[owner], block] * self._block_size + offset
        )
        array["seq_lens"][:num_seqs] = ends
        array["cu_q_lens"][1 : num_seqs + 1] = cuts
        array["cu_q_lens"][num_seqs + 1 :] = num_tokens
        array["logits_indices"][:num_seqs] = cuts - 1
        array["num_decodes"][...] = num_decodes
        array["num_seqs"][...] = num_seqs

        state_rows = array["state_rows"]
        state_rows[:num_seqs] = slots
        state_rows[num_seqs:] = self._padding_row
        np.take(table.block_tables_RB, state_rows, axis=0, out=array["block_tables"], mode="clip")
        settings = next(place.start for place in layout if place.field.name == ROW_SETTINGS[0].name)
        settings_FS = packed[settings : settings + len(ROW_SETTINGS) * bucket.seqs].reshape(-1, bucket.seqs)
        np.take(table.settings_FR, state_rows, axis=1, out=settings_FS, mode="clip")

        banned = (ends < table.banned_until_R[slots]) * int(RowFlag.BAN_STOPS)
        flags = np.where(samples, table.flags_R[slots] | banned, 0)
        array["row_flags"][:num_seqs] = flags | (continues * int(RowFlag.CONTINUES))
        array["sample_positions"][:num_seqs] = np.where(samples, ends, 0)
        wanted = int(np.bitwise_or.reduce(flags))
        batch_flags = BatchFlag(int(np.bitwise_or.reduce(table.pooling_R[slots])))
        if wanted & RowFlag.RANDOM:
            batch_flags |= BatchFlag.RANDOM
        if wanted & _PROCESSED:
            batch_flags |= BatchFlag.PROCESS_LOGITS
        if wanted & RowFlag.MASK:
            batch_flags |= BatchFlag.MASK
        if (table.logprobs_R[slots] & samples).any():
            batch_flags |= BatchFlag.LOGPROBS
        if first_row is not None:  # from here on by request
            starts, ends, slots, first = (
                starts[first_row],
                ends[first_row],
                slots[first_row],
                first[first_row],
            )
        scored = np.maximum(np.minimum(table.scored_until_R[slots], ends) - starts, 0)
        num_scored: tuple[int, ...] = ()
        if scored.any():
            batch_flags |= BatchFlag.PROMPT_LOGPROBS
            num_scored = tuple(scored.tolist())
            _write_targets(array["target_ids"], rows, first, num_scored)
        array["batch_flags"][...] = int(batch_flags)
        return HostBatch(
            bucket,
            packed,
            rows,
            tuple(first.tolist()),
            num_scored,
            num_tokens,
            batch_flags,
            () if first_row is None else tuple(first_row.tolist()),
        )

    def build_for_drafts(self, wanted: Sequence[DraftRequest]) -> tuple[HostBatch | None, list[int]]:
        """A batch of the last known token of each request that can draft, for `device.draft`; no part of any plan.

        Drafts are written to blocks that earlier plans have told of, no others: what a new block held before may still
        be on its way to host memory, which the next plan sees to.

        Returns:
          (the batch, how many tokens each of its rows may draft); (None, []) if none can.
        """
        lengths: dict[str, int] = {}
        rows = []
        for item in wanted:
            position = item.request.num_tokens - 1
            room = self._table.num_blocks(item.slot) * self._block_size - position
            if (length := min(item.num_tokens, room)) > 0:
                lengths[item.request.request_id] = length
                rows.append(ScheduledRequest(item.request, position, 1, item.slot, (), samples=True))
        if not rows:
            return None, []
        batch = self.build(SchedulerOutput(-1, tuple(rows)))
        return batch, [lengths[row.request_id] for row in batch.rows]


def _columns(scheduled: tuple[ScheduledRequest, ...]) -> tuple[np.ndarray, ...]:
    """(first positions, token counts, slots: int32; samples, continues: bool; drafts: int32), each [scheduled]."""
    return (
        np.array([row.num_computed_tokens for row in scheduled], np.int32),
        np.array([row.num_scheduled_tokens for row in scheduled], np.int32),
        np.array([row.slot for row in scheduled], np.int32),
        np.array([row.samples for row in scheduled], bool),
        np.array([row.continues for row in scheduled], bool),
        np.array([len(row.draft_token_ids) for row in scheduled], np.int32),
    )


def _rows_of_drafts(drafts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each request's rows side by side, one more than it has drafts.

    Returns:
      (whose each row is [rows]; each request's first row [requests]; drafts up to each row [rows]), int32.
    """
    rows_each = 1 + drafts
    owners = np.repeat(np.arange(len(drafts), dtype=np.int32), rows_each)
    first_row = np.cumsum(rows_each, dtype=np.int32) - rows_each
    return owners, first_row, np.arange(len(owners), dtype=np.int32) - first_row[owners]


def _write_token_ids(
    token_ids: np.ndarray, rows: tuple[ScheduledRequest, ...], num_decodes: int, first: np.ndarray
) -> None:
    singles: list[int] = []
    num_single = 0
    for row in rows:
        if not row.is_single:
            break
        num_single += 1
        singles.append(0 if row.continues else _single_token(row))
        if row.draft_token_ids:
            singles.extend(row.draft_token_ids)
    token_ids[:num_decodes] = singles
    for row, start in zip(rows[num_single:], first[num_decodes:].tolist(), strict=True):
        begin, count = row.num_computed_tokens, row.num_scheduled_tokens
        token_ids[start : start + count] = row.request.token_ids(begin, begin + count)


def _single_token(row: ScheduledRequest) -> int:
    request, position = row.request, row.num_computed_tokens
    behind_prompt = position - len(request.prompt_token_ids)
    return (
        request.prompt_token_ids[position] if behind_prompt < 0 else request.output_token_ids[behind_prompt]
    )


def _write_targets(
    target_ids: np.ndarray,
    rows: tuple[ScheduledRequest, ...],
    first: np.ndarray,
    num_scored: tuple[int, ...],
) -> None:
    for row, start, scored in zip(rows, first.tolist(), num_scored, strict=True):
        if scored:
            position = row.num_computed_tokens + 1
            target_ids[start : start + scored] = row.request.prompt_token_ids[position : position + scored]
