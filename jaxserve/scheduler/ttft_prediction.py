"""When a request that comes now will have its first token, by what is known of the queue and of step times.

Two things keep it waiting, at the same time: slots (and blocks) that others have to leave first, and prompt tokens that
go first in the steps' budget. The steps that each takes are counted from sums, without walking the queue; a prediction
is the time of as many steps as the longer one takes, of which so many are full of prompt tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.scheduler.decode_stall import largest_within
from jaxserve.scheduler.policy import Policy
from jaxserve.scheduler.step_time import StepTimeModel, StepWork
from jaxserve.scheduler.waiting_queue import QueuedWork


@dataclass(frozen=True, slots=True)
class Load:
    """What runs at one moment, seen by a request of some class and priority.

    Attributes:
      budget: most tokens of a step.
      max_seqs: most sequences of a step.
      decodes, decode_keys: rows that decode, and keys that they attend to together.
      prefills: requests whose prompts are being computed and that go first.
      short_tokens, long_tokens: what these have left, by lane.
      prefill_tokens: what all prompts that are being computed have left.
      open_slots, open_blocks: free already.
      ends: steps until each of those that keep their slots ends, ascending.
      free_slots, free_blocks: with those of running requests that would give way.
      stall_limit: seconds that a step may take for the streams beside it, see `decode_stall.py`.
    """

    budget: int
    max_seqs: int
    decodes: int
    decode_keys: int
    prefills: int
    short_tokens: int
    long_tokens: int
    prefill_tokens: int
    open_slots: int
    open_blocks: int
    ends: tuple[int, ...]
    free_slots: int
    free_blocks: int
    stall_limit: float = math.inf


@dataclass(frozen=True, slots=True)
class Newcomer:
    """The request in question: tokens that it has to compute, and that it needn't; blocks that it needs."""

    tokens: int
    cached_tokens: int
    is_long: bool
    blocks: int


def predict_ttft(
    load: Load,
    ahead_short: QueuedWork,
    ahead_long: QueuedWork,
    filler_tokens: int,
    own: Newcomer,
    policy: Policy,
    steps: StepTimeModel,
) -> float | None:
    """Seconds until the first output token; None while step times are unknown.

    Args:
      ahead_short, ahead_long: the work of those that wait and go first, by lane.
      filler_tokens: of those that run or can be admitted now, whoever goes first: they fill what room there is in the
        last step.
    """
    ahead, beside, slot_steps = _until_admitted(load, ahead_short, ahead_long, own, policy)
    queued = ahead_short + ahead_long
    # No more decode beside each other than begin while one of them runs, at so many prompts a step.
    at_once = 1 + load.budget * queued.outputs // max(1, queued.tokens)
    in_the_end = min(load.max_seqs, load.decodes + load.prefills + min(ahead, at_once))
    decodes = min(beside, load.max_seqs) if slot_steps else (load.decodes + in_the_end) / 2
    short = load.short_tokens + ahead_short.tokens + (0 if own.is_long else own.tokens)
    long = load.long_tokens + ahead_long.tokens + (own.tokens if own.is_long else 0)

    def tokens_first(budget: float) -> float:
        """Prompt tokens of the steps until its own are computed, at so many a step."""
        lane = min(float(policy.lane_share(int(budget))), budget) if long else 0.0
        # Its lane gets its share at least, and all of the budget where the other lane has little to do.
        share, mine = (lane, long) if own.is_long else (budget - lane, short)
        return min(mine / max(share, 0.5), (short + long) / budget) * budget

    budget = max(1.0, load.budget - decodes)
    tokens = tokens_first(budget)
    others = max(0.0, tokens - own.tokens)
    mean = others / max(1, load.prefills + ahead)
    pairs = others * mean / 2 + own.tokens * (own.cached_tokens + own.tokens / 2)
    pairs_each, rows_each = (amount / max(tokens, 1.0) for amount in (pairs, load.prefills + ahead + 1))
    keys = decodes * (load.decode_keys / load.decodes if load.decodes else mean)

    def seconds(prefill: float) -> float | None:
        rows = min(prefill, max(1.0, prefill * rows_each))
        step_tokens = min(load.budget, round(decodes + prefill))
        step_seqs = min(load.max_seqs, step_tokens, round(decodes + rows))  # there is no shape for more
        work = StepWork(step_tokens, step_seqs, round(keys), round(pairs_each * prefill))
        return steps.predict(work) if work.tokens else 0.0

    if load.stall_limit < math.inf:
        budget = float(largest_within(seconds, load.stall_limit, int(budget)))
        tokens = tokens_first(budget)
    full, last = divmod(tokens, budget)
    if last:
        last = min(budget, max(last, filler_tokens + own.tokens - full * budget))
    num_prefill_steps = int(full) + (last > 0)
    idle_steps = max(0, slot_steps + -(-own.tokens // int(budget)) - num_prefill_steps)
    parts = [(full, seconds(budget)), (1, seconds(last) if last else 0.0), (idle_steps, seconds(0.0))]
    total = 0.0
    for count, each in parts:
        if each is None:
            return None
        total += count * each
    return total


def predict_departure(load: Load, waiting: QueuedWork, number: int, steps: StepTimeModel) -> float | None:
    """Seconds until so many of those that run, and of their successors, have ended."""
    count = _departure(load.ends, number, max(1, waiting.outputs // max(waiting.seqs, 1)))
    work = StepWork(load.decodes, load.decodes, load.decode_keys) if load.decodes else StepWork(1, 1)
    each = steps.predict(work)
    return None if each is None else count * each


def _until_admitted(
    load: Load, ahead_short: QueuedWork, ahead_long: QueuedWork, own: Newcomer, policy: Policy
) -> tuple[int, int, int]:
    """
    Returns:
      How many are admitted before it, how many fit beside each other, and the steps until enough others have ended for
      all who go first, and for it.
    """
    queued = ahead_short + ahead_long
    mean_tokens = queued.tokens // max(queued.seqs, 1)
    mean_outputs = max(1, queued.outputs // max(queued.seqs, 1))
    block_size = max(1, (own.tokens + own.cached_tokens) // max(own.blocks, 1))
    mean_blocks = mean_tokens // block_size + 1
    for_others = max(0, load.free_blocks - own.blocks) // mean_blocks
    room = min(load.free_slots, for_others + (load.free_blocks >= own.blocks))
    mean_long = max(1, ahead_long.tokens // max(ahead_long.seqs, 1))
    ahead, beside, steps = queued.seqs, 0, 0
    if not own.is_long:
        # It passes long ones while their lane is taken; as many as the lane takes until then go first.
        ahead = ahead_short.seqs + min(ahead_long.seqs, 1)
    for _ in range(8):
        ends = sorted([*load.ends, *[mean_outputs] * min(room, ahead)])
        beside = len(ends)
        steps = _departure(ends, ahead + 1 - room, mean_outputs)
        admitted_long = 1 + steps * policy.lane_share(load.budget) // mean_long
        more = ahead_short.seqs + min(ahead_long.seqs, admitted_long)
        if own.is_long or more <= ahead:
            break
        ahead = more
    return ahead, beside, steps


def _departure(ends: Sequence[int], number: int, mean_outputs: int) -> int:
    """Steps until so many have ended, when each is followed by one of `mean_outputs`; `ends` ascend."""
    if number < 1 or not ends:
        return 0
    # Once many have been followed, the ends are spread evenly.
    even = round(sum(ends) / len(ends) + (number / len(ends) - 0.5) * mean_outputs)
    if number > len(ends):
        return max(ends[0], even)
    return min(ends[number - 1], max(ends[0], even))
