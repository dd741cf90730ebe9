"""How many drafts to verify in a step: as many as make it yield most tokens a second. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_LEAST_GAIN = 1.02  # predictions are no better than that, and a loss is worse than a gain missed


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that could have drafts verified.

    Attributes:
      num_drafts: most of them.
      acceptance: chance of a draft to be accepted when those before it are.
      is_fixed: it gets all of them, whether that pays or not.
    """

    num_drafts: int
    acceptance: float
    is_fixed: bool = False


def best_lengths(
    candidates: Sequence[Candidate],
    *,
    room: int,
    num_rows: int,
    seconds: Callable[[int], float | None],
    fits: Callable[[int], bool] = lambda count: True,
) -> list[int]:
    """Drafts for each candidate.

    Args:
      room: most drafts in all.
      num_rows: rows that yield a token without any draft.
      seconds: what a step with so many drafts takes; None: unknown, then nothing but what is fixed is granted.
      fits: whether a step may have so many drafts; asked of what is not fixed.
    """
    lengths = [0] * len(candidates)
    for index, candidate in enumerate(candidates):
        if candidate.is_fixed:
            lengths[index] = min(candidate.num_drafts, room)
            room -= lengths[index]
    num_fixed = sum(lengths)
    # A draft's chance is that all up to it are accepted, so a request's drafts come in order by themselves.
    chances = sorted(
        (
            (candidate.acceptance**place, index)
            for index, candidate in enumerate(candidates)
            if not candidate.is_fixed
            for place in range(1, candidate.num_drafts + 1)
        ),
        key=lambda chance: -chance[0],
    )[:room]
    alone = seconds(num_fixed) if chances else None
    if not alone:
        return lengths
    gain = sum(
        candidate.acceptance**place
        for candidate, length in zip(candidates, lengths, strict=True)
        for place in range(1, length + 1)
    )
    yielded = num_rows + gain
    best, best_rate = 0, _LEAST_GAIN * yielded / alone
    for count, (chance, _) in enumerate(chances, start=1):
        yielded += chance
        taken = seconds(num_fixed + count)
        if taken and yielded / taken > best_rate and fits(num_fixed + count):
            best, best_rate = count, yielded / taken
    for _, index in chances[:best]:
        lengths[index] += 1
    return lengths


def best_rounds(
    candidates: Sequence[Candidate],
    *,
    num_rows: int,
    seconds: Callable[[int], float | None],
    drafting_seconds: Callable[[int], float | None],
    most_seconds: float = math.inf,
) -> int:
    """Tokens to draft for each candidate where drafting takes time itself; 0: it does not pay, or nothing is known.

    Args:
      num_rows, seconds: see `best_lengths`.
      drafting_seconds: what drafting so many tokens for all of them takes.
      most_seconds: that drafting and the step may take together.
    """
    alone = seconds(0)
    if not alone:
        return 0
    best, best_rate = 0, _LEAST_GAIN * num_rows / alone
    yielded, count = float(num_rows), 0
    for rounds in range(1, max((candidate.num_drafts for candidate in candidates), default=0) + 1):
        reached = [candidate for candidate in candidates if candidate.num_drafts >= rounds]
        yielded += sum(candidate.acceptance**rounds for candidate in reached)
        count += len(reached)
        step, drafting = seconds(count), drafting_seconds(rounds)
        if not step or drafting is None or step + drafting > most_seconds:
            continue
        if yielded / (step + drafting) > best_rate:
            best, best_rate = rounds, yielded / (step + drafting)
    return best
