"""How many tokens are drafted, and how many drafts a step verifies: `draft_lengths`, asked with what is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxserve.config import NGRAM, ResolvedConfig
from jaxserve.request import Request
from jaxserve.scheduler.draft_lengths import Candidate, best_lengths, best_rounds
from jaxserve.scheduler.draft_times import DraftTimes
from jaxserve.scheduler.drafts import Drafts
from jaxserve.scheduler.output import DraftRequest
from jaxserve.scheduler.step_time import StepTimeModel, StepWork, work_of_chunks


class DraftPlanner:
    """One scheduler's. Reads what it knows of drafts and step times; learns how long drafting takes."""

    def __init__(self, config: ResolvedConfig, drafts: Drafts, step_times: StepTimeModel) -> None:
        self._config = config
        self._drafts = drafts
        self._step_times = step_times
        # Looking up n-grams costs next to nothing.
        self._times = None if config.speculative in (None, NGRAM) else DraftTimes()

    def note_drafting(self, num_rows: int, num_rounds: int, seconds: float) -> None:
        """See `BaseScheduler.note_drafting`."""
        if self._times is not None:
            self._times.observe(num_rows, num_rounds, seconds)

    def worth_drafting(
        self, wanted: Sequence[DraftRequest], running: Sequence[Request], *, itl_seconds: float
    ) -> Sequence[DraftRequest]:
        """As many tokens of each as pay for the time that drafting takes; all for requests that want it always.

        Args:
          itl_seconds: see `choose`.
        """
        times = self._times
        if times is None:
            return wanted
        chosen = [item for item in wanted if item.request.params.speculative_tokens is not None]
        free = [item for item in wanted if item.request.params.speculative_tokens is None]
        if not free:
            return chosen
        work = _decode_work(running)
        seconds = self._step_seconds(work, len(running))
        most = self._config.max_rows - len(running)
        rounds = best_rounds(
            [
                Candidate(item.num_tokens, self._drafts.acceptance_of(item.request.request_id))
                for item in free
            ],
            num_rows=len(running),
            seconds=lambda count: seconds(count) if count <= most else None,
            drafting_seconds=lambda count: times.seconds(len(wanted), count),
            most_seconds=_bound(itl_seconds, seconds(0)),
        )
        if not rounds and (times.seconds(len(wanted), 1) is None or times.is_time_to_probe()):
            rounds = 1
        if rounds:
            chosen += [replace(item, num_tokens=min(item.num_tokens, rounds)) for item in free]
        return chosen

    def choose(
        self,
        decoding: Sequence[Request],
        chunks: Callable[[], Sequence[tuple[int, int]]],
        *,
        itl_seconds: float,
    ) -> dict[str, tuple[int, ...]]:
        """Which of the proposed drafts are verified, by request.

        Args:
          chunks: (computed tokens, tokens to compute) of each prompt that is computed beside, were there no drafts.
          itl_seconds: the smallest target of those that decode. Drafts make no step longer than that; where it is
            longer without any, only their gain counts.
        """
        proposed: list[tuple[str, tuple[int, ...]]] = []
        candidates = []
        for request in decoding:
            if proposal := self._drafts.proposed(request.request_id):
                proposed.append((request.request_id, proposal.token_ids))
                is_fixed = request.params.speculative_tokens is not None
                candidates.append(
                    Candidate(len(proposal.token_ids), self._drafts.acceptance(proposal), is_fixed)
                )
        if not candidates:
            return {}
        beside = chunks()
        decode_work = _decode_work(decoding)
        work = work_of_chunks(beside, beside=decode_work)
        room = min(
            self._config.max_rows - len(decoding) - len(beside),
            self._config.max_num_batched_tokens - len(decoding) - min(len(beside), 1),
        )
        # Without the prompts: these give way to streams afterwards.
        unstalled = self._step_seconds(decode_work, len(decoding))
        most_seconds = _bound(itl_seconds, unstalled(0))
        lengths = best_lengths(
            candidates,
            room=max(room, 0),
            num_rows=len(decoding),
            seconds=self._step_seconds(work, len(decoding)),
            fits=lambda count: (unstalled(count) or 0.0) <= most_seconds,
        )
        return {
            request_id: token_ids[:length]
            for (request_id, token_ids), length in zip(proposed, lengths, strict=True)
            if length
        }

    def _step_seconds(self, work: StepWork, num_decodes: int) -> Callable[[int], float | None]:
        """What a step with `work` and so many drafts takes, each of which attends as the average row that decodes."""
        limit, keys_each = self._config.max_num_batched_tokens, work.decode_keys // num_decodes

        def seconds(count: int) -> float | None:
            fits = min(count, limit - work.tokens)
            predicted = self._step_times.predict(
                StepWork(
                    work.tokens + fits,
                    work.seqs + fits,
                    work.decode_keys + count * keys_each,
                    work.prefill_pairs,
                )
            )
            # Drafts that take the places of prompt tokens put these off.
            return predicted and predicted * (work.tokens + count) / (work.tokens + fits)

        return seconds


def _bound(itl_seconds: float, alone: float | None) -> float:
    """Most seconds of a step with drafts, where one without takes `alone`; None: that is unknown."""
    return itl_seconds if alone is not None and alone <= itl_seconds else math.inf


def _decode_work(requests: Sequence[Request]) -> StepWork:
    """That of a token for each."""
    return work_of_chunks(((request.num_planned_tokens, 1) for request in requests), beside=StepWork(0, 0))
