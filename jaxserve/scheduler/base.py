"""Bookkeeping that every scheduler shares: who is known, running, in which slot; and what a step's result changes."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Sequence

from jaxserve.config import ResolvedConfig
from jaxserve.engine_view import PoolView
from jaxserve.errors import OverloadedError
from jaxserve.outputs import ModelRunnerOutput, RequestUpdate, TokenLogprobs
from jaxserve.request import FinishReason, Request, RequestStatus
from jaxserve.scheduler import admission
from jaxserve.scheduler.drafts import Drafts
from jaxserve.scheduler.entry import Counters, Entry, check_request, key_of, tokens_to_compute
from jaxserve.scheduler.kv_cache_manager import KVCacheManager
from jaxserve.scheduler.output import DraftRequest, ScheduledRequest, SchedulerOutput
from jaxserve.scheduler.output_length import OutputLengths
from jaxserve.scheduler.policy import Policy
from jaxserve.scheduler.step_time import StepTimeModel
from jaxserve.scheduler.view import view_pool
from jaxserve.stats import EngineStats, zero_by_class

_NO_BLOCKS: tuple[int, ...] = ()


class BaseScheduler:
    """Not used by itself: `schedule` and the places where waiting requests are kept belong to the subclasses."""

    def __init__(
        self,
        config: ResolvedConfig,
        kv: KVCacheManager,
        policy: Policy,
        step_times: StepTimeModel,
    ) -> None:
        self._config = config
        self._step_times = step_times
        self._kv = kv
        self._policy = policy
        self._lengths = OutputLengths()
        self._drafts = Drafts(config.num_speculative_tokens)
        self._now = 0.0
        self._entries: dict[str, Entry] = {}
        self._unfinished_by_class = zero_by_class()
        self._running_by_class = zero_by_class()
        self._running: list[Entry] = []  # in order of their keys
        self._free_slots = list(range(config.max_num_seqs))  # a heap
        self._step_id = 0
        self._num_added = 0
        self._counters = Counters()

    # What subclasses define, all of them the first four.

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan the next step; `now`: seconds, of the clock of `Request.arrival_time`."""
        raise NotImplementedError

    def _enqueue(self, entry: Entry) -> None:
        raise NotImplementedError

    def _dequeue(self, entry: Entry) -> None:
        raise NotImplementedError

    def _num_waiting_tokens(self) -> int:
        raise NotImplementedError

    def _on_started(self, entry: Entry) -> None: ...

    def _on_stopped(self, entry: Entry) -> None: ...

    def _on_prompt_computed(self, request: Request) -> None: ...

    def _check_target(self, entry: Entry, now: float) -> None:
        """Raises OverloadedError when the request can't have its first token in time."""

    def _seconds_to_drain(self, num_seqs: int, num_tokens: int) -> float | None:
        """How long it will take until so many sequences and tokens less wait; None where nothing is known."""
        return None

    def plan_drafts(self) -> tuple[DraftRequest, ...]:
        """For whom drafts are wanted in the next plan; none by default."""
        return ()

    def note_drafting(self, num_rows: int, num_rounds: int, seconds: float) -> None:
        """Drafting for so many requests, of so many tokens for the one that got most, took the device so long."""

    def note_first_tokens(self, updates: Sequence[RequestUpdate], now: float) -> None:
        """What `update_from_output` returned came `now`."""

    # The front.

    @property
    def has_unfinished(self) -> bool:
        return bool(self._entries)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._entries) - len(self._running)

    def add(self, *requests: Request, now: float | None = None) -> None:
        """Queue all sequences of a request, or none.

        Args:
          now: seconds, of the clock of `Request.arrival_time`; None: they arrive now.

        Raises:
          OverloadedError: the queue is full, or the first token can't be had in time.
          InvalidRequestError: it could never run, even alone.
          ValueError: an unfinished request has its id, or it has run before.
        """
        for request in requests:
            if request.request_id in self._entries:
                raise ValueError(f"request id {request.request_id!r} is in use")
            if request.status is not RequestStatus.WAITING or request.num_computed_tokens:
                raise ValueError(f"request {request.request_id!r} is not a fresh one")
            admission.check_fits_pool(request, self._kv.pool.num_blocks, self._kv.block_size)
        for entry in self._entries_unless_refused(requests, requests[0].arrival_time if now is None else now):
            request = entry.request
            self._entries[request.request_id] = entry
            self._unfinished_by_class[request.service_class] += 1
            self._enqueue(entry)

    def check(self, *requests: Request, now: float) -> list[Entry]:
        """Refuse what `add` would refuse because of load. Nothing that later decisions of `add` or `schedule` rest on
        changes.

        Returns the entries that `add` would have made.
        """
        num_added = self._num_added
        try:
            entries = self._entries_unless_refused(requests, now)
        finally:
            self._num_added = num_added
        for entry in entries:
            self._policy.ended(entry.request, entry.order, entry.cost)
            self._kv.forget(entry.request.request_id)
        return entries

    def _entries_unless_refused(self, requests: Sequence[Request], now: float) -> list[Entry]:
        try:
            self._check_queue(requests)
            return self._make_entries(requests, now)
        except OverloadedError as error:
            refusals = self._counters.refusals
            refusals[error.reason] = refusals.get(error.reason, 0) + 1
            raise

    def _check_queue(self, requests: Sequence[Request]) -> None:
        num_tokens = sum(tokens_to_compute(request) for request in requests)
        waiting_tokens = self._num_waiting_tokens()
        config = self._config
        try:
            admission.check_queue(len(requests), self.num_waiting, self.num_running, config)
            admission.check_queued_tokens(num_tokens, waiting_tokens, config)
        except OverloadedError as error:
            too_many = len(requests) - (config.max_waiting + config.max_num_seqs - len(self._entries))
            too_long = (
                waiting_tokens + num_tokens - (config.max_waiting_tokens or waiting_tokens + num_tokens)
            )
            error.retry_after_seconds = self._seconds_to_drain(too_many, too_long)
            raise

    def _make_entries(self, requests: Sequence[Request], now: float) -> list[Entry]:
        entries: list[Entry] = []
        try:
            for request in requests:
                cost = float(tokens_to_compute(request) + self._lengths.expected(request))
                order = self._policy.order(request, cost)
                key = (*order, self._num_added)
                has_grammar = request.params.grammar is not None
                entries.append(Entry(request, order, key, cost, request.arrival_time, has_grammar))
                self._num_added += 1
            self._check_target(entries[0], now)
        except OverloadedError:
            for entry in entries:
                self._policy.ended(entry.request, entry.order, entry.cost)
            self._kv.forget(requests[0].request_id)
            raise
        return entries

    def take_drafts(self, wanted: Sequence[DraftRequest], proposed: Sequence[Sequence[int]]) -> None:
        """What was proposed for each of `wanted`, before `schedule`: drafts in order, maybe fewer than wanted."""
        for item, token_ids in zip(wanted, proposed, strict=True):
            if token_ids:
                self._drafts.propose(item.request.request_id, token_ids[: item.num_tokens])

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """End requests in whatever state they are, and free all they hold at once. Unknown ids are ignored.

        Returns those that ended by it.
        """
        ended = []
        for request_id in request_ids:
            entry = self._entries.get(request_id)
            if entry is not None:
                self._end(entry, FinishReason.ABORT)
                ended.append(entry.request)
        return ended

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a request for a reason found outside. No change if it has ended already."""
        entry = self._entries.get(request_id)
        if entry is not None:
            self._end(entry, reason, stop_reason)

    def finish_within(
        self, update: RequestUpdate, num_kept: int, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End a request behind the first `num_kept` tokens of its newest update, where somebody outside found an end
        (a stop string, a grammar). Tokens behind it are in no output, and an end that they brought was none.
        """
        request = update.request
        num_left_out = len(update.new_token_ids) - num_kept
        if num_left_out:
            del request.output_token_ids[-num_left_out:]
            self._counters.generation_tokens -= num_left_out
            num_lost = max(update.num_accepted_drafts - num_kept, 0)
            self._drafts.stats.take_back(update.num_accepted_drafts, num_lost)
        if request.finish_reason is None:
            self.finish(request.request_id, reason, stop_reason)
            return
        self._counters.finished[request.finish_reason.value] -= 1
        self._count_end(reason)
        request.finish_reason, request.stop_reason = reason, stop_reason

    def update_from_output(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestUpdate]:
        """Accept what a step computed. The only place where `num_computed_tokens` moves forward.

        Rows of requests that were aborted, finished or preempted since the plan was made are ignored.

        Returns one update for every request with new tokens, prompt logprobs, a part of an embedding, or an end.
        Raises:
          RuntimeError: the result doesn't belong to the plan.
        """
        self._kv.swap.cost.observe(result.transfers)
        # One loop without a function call in the usual case: there are as many rows as sequences that run.
        updates: list[RequestUpdate] = []
        step_id, running = plan.step_id, RequestStatus.RUNNING
        block_size, tokens_of, failed = self._config.block_size, result.sampled_token_ids, result.failed
        logprobs_of, prompt_logprobs_of, pooled_of = result.logprobs, result.prompt_logprobs, result.pooled
        filled: list[Request] = []  # have a block more that is full
        ended: list[tuple[Request, FinishReason, int | str | None]] = []
        num_accepted = 0
        speculates = self._drafts.most > 0
        for item in plan.scheduled:
            request = item.request
            if request.status is not running or step_id < request.admitted_step:
                continue
            request_id = request.request_id
            start, samples, drafts = item.num_computed_tokens, item.samples, item.draft_token_ids
            if start != request.num_computed_tokens:
                raise RuntimeError(
                    f"a step computed tokens of {request_id} from {start} on, "
                    f"but {request.num_computed_tokens} are computed: was this result accepted before?"
                )
            if failed and request_id in failed:
                updates.append(self._fail(request, failed[request_id]))
                continue
            sampled = tokens_of.get(request_id) or []
            num_tokens = len(sampled)
            if num_tokens > 1 + len(drafts) or (samples != (num_tokens > 0) and request.max_tokens > 0):
                due = f"1 to {1 + len(drafts)} were" if samples else "none was"
                raise RuntimeError(
                    f"the step over tokens {start}..{start + item.num_scheduled_tokens} of {request_id} returned "
                    f"{num_tokens} tokens, {due} due"
                )
            count = item.num_scheduled_tokens
            computed = start + count
            reason, accepted_drafts = None, 0
            if samples:
                output = request.output_token_ids
                if (
                    num_tokens == 1
                    and sampled[0] not in request.stop_token_ids
                    and len(output) + 1 < request.max_tokens
                ):
                    output.append(sampled[0])  # what most rows are: one token that ends nothing
                    accepted = sampled
                else:
                    accepted, reason, stop_reason = _until_end(request, sampled)
                    output += accepted
                request.num_pending_tokens -= 1
                num_accepted += len(accepted)
                request.awaits_result = False
                if speculates:
                    accepted_drafts = self._drafts.verified(request, drafts, sampled, len(accepted))
                if drafts:  # of which one less is in the output than tokens came
                    count = max(len(accepted), 1)
                    computed = request.num_planned_tokens = start + count
            else:
                accepted = []
            request.num_computed_tokens = computed
            if computed % block_size < count:
                filled.append(request)
            if start < len(request.prompt_token_ids) <= computed:
                self._on_prompt_computed(request)
            prompt_logprobs, logprobs, pooled = None, None, None
            if prompt_logprobs_of and request_id in prompt_logprobs_of:
                prompt_logprobs = self._new_prompt_logprobs(request_id, start, prompt_logprobs_of[request_id])
            if pooled_of:
                pooled = pooled_of.get(request_id)
            if reason is not None:
                ended.append((request, reason, stop_reason))
            elif not accepted and not prompt_logprobs and pooled is None:
                continue
            if logprobs_of and request_id in logprobs_of:
                logprobs = logprobs_of[request_id][: len(accepted)]
            updates.append(
                RequestUpdate(request, accepted, logprobs, prompt_logprobs, None, pooled, accepted_drafts)
            )
        self._counters.generation_tokens += num_accepted
        # Together, since what is done again at once is done in half the time; and before their blocks are freed.
        self._kv.commit(filled)
        for request, reason, stop in ended:
            self._end(self._entries[request.request_id], reason, stop)
        return updates

    def restart_running(self) -> list[Request]:
        """After the device has lost what it held: all that runs waits again, in its place.

        Results of steps planned before must not be accepted any more. Returns those that ran.
        """
        restarted = [entry.request for entry in self._running]
        for entry in self._running[::-1]:
            self._suspend(entry)
        self._kv.clear()
        return restarted

    def fill_stats(self, stats: EngineStats) -> None:
        """Write everything the scheduler counts; steps, useful and padded tokens and times are the engine's."""
        counters = self._counters
        stats.num_running = self.num_running
        stats.num_waiting = self.num_waiting
        running = stats.running_by_class = dict(self._running_by_class)
        stats.waiting_by_class = {
            name: count - running[name] for name, count in self._unfinished_by_class.items()
        }
        stats.waiting_tokens = self._num_waiting_tokens()
        stats.num_blocks = self._kv.pool.num_blocks
        stats.num_free_blocks = self._kv.pool.num_free
        stats.prompt_tokens = counters.prompt_tokens
        stats.cached_prompt_tokens = counters.cached_prompt_tokens
        stats.generation_tokens = counters.generation_tokens
        stats.preemptions = counters.preemptions
        stats.preemptions_by_class = dict(counters.preemptions_by_class)
        stats.class_preemptions = counters.class_preemptions
        stats.promotions = counters.promotions
        stats.stall_cuts = counters.stall_cuts
        stats.refusals = dict(counters.refusals)
        stats.evictions = self._kv.pool.evictions
        stats.prefix_cache_queries = counters.prefix_cache_queries
        stats.prefix_cache_hits = counters.prefix_cache_hits
        stats.finished = dict(counters.finished)
        stats.swap = self._kv.swap.current_stats()
        stats.speculation = self._drafts.stats.copy()

    def view_pool(self) -> PoolView:
        """The KV blocks, for people to look at."""
        return view_pool(self._kv.pool, self._kv.swap.tier)

    def check_integrity(self) -> None:
        """Raises AssertionError naming what is inconsistent. Slow; for tests and debugging."""
        running = [entry.request for entry in self._running]
        keys = [entry.key for entry in self._running]
        assert keys == sorted(set(keys)), f"running requests out of order: {keys}"
        slots = [request.slot for request in running]
        assert None not in slots, f"running without a slot: {slots}"
        assert sorted([*self._free_slots, *(slot for slot in slots if slot is not None)]) == list(
            range(self._config.max_num_seqs)
        ), f"slots in use {slots}, free {sorted(self._free_slots)}"
        for request_id, entry in self._entries.items():
            check_request(request_id, entry.request)
        for name, count in self._unfinished_by_class.items():
            assert count == sum(e.request.service_class == name for e in self._entries.values()), name
            assert self._running_by_class[name] == sum(r.service_class == name for r in running), name
        for request in running:
            assert request.status is RequestStatus.RUNNING, f"{request.request_id} runs as {request.status}"
            assert self._entries[request.request_id].request is request
        assert sum(e.request.status is RequestStatus.RUNNING for e in self._entries.values()) == len(running)
        self._kv.check_integrity(running)

    # Life of one request.

    def _start(self, entry: Entry, num_computed_tokens: int) -> None:
        """WAITING -> RUNNING. Its block table exists already."""
        request = entry.request
        request.status = RequestStatus.RUNNING
        request.slot = heapq.heappop(self._free_slots)
        request.num_computed_tokens = request.num_planned_tokens = num_computed_tokens
        request.admitted_step = self._step_id
        entry.is_new = entry.has_new_blocks = True
        entry.room = self._kv.room_of(request.request_id)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_computed_tokens
            request.scheduled_time = self._now
            self._policy.admitted(request, entry.order, entry.cost)
            self._counters.prompt_tokens += request.num_prompt_tokens
            self._counters.cached_prompt_tokens += num_computed_tokens
        entry.waited += max(0.0, self._now - entry.waiting_since)
        self._running_by_class[request.service_class] += 1
        bisect.insort(self._running, entry, key=key_of)
        self._on_started(entry)

    def _stop(self, entry: Entry) -> None:
        """No longer RUNNING: gives back blocks and slot. What steps under way compute for it is lost.

        They may still write into its blocks and its row of device state. Whoever gets these next is in a later step,
        so the device has written there before the new owner does, and nobody reads what he has not written. Blocks
        that stay findable are full, and those steps write behind them.
        """
        request = entry.request
        request.num_planned_tokens = request.num_pending_tokens = 0
        request.awaits_result = False
        self._drafts.drop(request.request_id)
        self._kv.free(request.request_id)
        assert request.slot is not None
        heapq.heappush(self._free_slots, request.slot)
        request.slot = None
        del self._running[bisect.bisect_left(self._running, entry.key, key=key_of)]
        self._running_by_class[request.service_class] -= 1
        self._on_stopped(entry)

    def _suspend(self, entry: Entry) -> None:
        """RUNNING -> WAITING. Its tokens are kept, and its full blocks stay findable as long as they are free."""
        self._stop(entry)
        request = entry.request
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        entry.waiting_since = self._now
        self._enqueue(entry)

    def _end(self, entry: Entry, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        request = entry.request
        if request.status is RequestStatus.RUNNING:
            self._stop(entry)
        else:
            self._dequeue(entry)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        self._kv.forget(request.request_id)
        self._drafts.forget(request.request_id)
        del self._entries[request.request_id]
        self._unfinished_by_class[request.service_class] -= 1
        used = len(request.output_token_ids)
        if request.num_cached_tokens is not None:
            used += request.num_prompt_tokens if request.index == 0 else 1
        self._policy.ended(request, entry.order, entry.cost - used)
        self._lengths.observe(request)
        self._count_end(reason)

    def _count_end(self, reason: FinishReason) -> None:
        self._counters.finished[reason.value] = self._counters.finished.get(reason.value, 0) + 1

    def _rows(self, parts: Iterable[tuple[Entry, int, tuple[int, ...]]]) -> list[ScheduledRequest]:
        """The rows of a plan that advance each entry by so many tokens, and verify its drafts.

        Planned tokens advance here and in `_decode_rows`, nowhere else.
        """
        speculates = self._drafts.most > 0
        rows = []
        for entry, num_tokens, drafts in parts:
            request = entry.request
            start, pending = request.num_planned_tokens, request.num_pending_tokens
            is_new, new_block_ids = entry.is_new, _NO_BLOCKS
            if entry.has_new_blocks:
                entry.is_new = entry.has_new_blocks = False
                new_block_ids = self._kv.take_new_block_ids(request.request_id)
            end = request.num_planned_tokens = start + num_tokens
            samples = end == len(request.prompt_token_ids) + len(request.output_token_ids) + pending
            if samples:
                request.num_pending_tokens = pending + 1
                if entry.has_grammar:
                    request.awaits_result = True
                elif speculates:
                    request.awaits_result = self._drafts.limit(request) > 0
            slot = request.slot
            assert slot is not None
            if drafts:
                num_tokens += len(drafts)
            rows.append(
                ScheduledRequest(
                    request, start, num_tokens, slot, new_block_ids, samples, pending > 0, is_new, drafts
                )
            )
        return rows

    def _decode_rows(self, decoding: Iterable[Entry]) -> list[ScheduledRequest]:
        """What `_rows` makes of entries that decode, one token each, where nobody speculates.

        That is nearly every row of a busy engine, so this is one loop without a call, as in `update_from_output`.
        """
        rows = []
        for entry in decoding:
            request = entry.request
            start, pending, slot = request.num_planned_tokens, request.num_pending_tokens, request.slot
            assert slot is not None
            is_new, new_block_ids = entry.is_new, _NO_BLOCKS
            if entry.has_new_blocks:
                entry.is_new = entry.has_new_blocks = False
                new_block_ids = self._kv.take_new_block_ids(request.request_id)
            request.num_planned_tokens = start + 1
            request.num_pending_tokens = pending + 1
            if entry.has_grammar:
                request.awaits_result = True
            rows.append(ScheduledRequest(request, start, 1, slot, new_block_ids, True, pending > 0, is_new))
        return rows

    # One row of a step's result.

    def _fail(self, request: Request, reason: str) -> RequestUpdate:
        self._kv.distrust(request.request_id)
        self._end(self._entries[request.request_id], FinishReason.ERROR)
        return RequestUpdate(request, [], error=reason)

    def _new_prompt_logprobs(
        self, request_id: str, start: int, scored: list[TokenLogprobs]
    ) -> list[TokenLogprobs] | None:
        """Entries not delivered before: a preempted request computes, and scores, its prompt again."""
        entry = self._entries[request_id]
        first = start + 1  # position of scored[0]
        fresh = scored[max(0, entry.num_scored_tokens - first) :]
        entry.num_scored_tokens = max(entry.num_scored_tokens, first + len(scored))
        return fresh or None


def _until_end(
    request: Request, sampled: list[int]
) -> tuple[list[int], FinishReason | None, int | str | None]:
    """The tokens up to the one that ends the output, why it ends it, and which stop token it is if one was named."""
    if request.max_tokens == 0:
        return [], FinishReason.LENGTH, None
    stops, most, params = request.stop_token_ids, request.max_tokens, request.params
    num_output = len(request.output_token_ids)
    for count, token in enumerate(sampled, start=1):
        if token in stops and num_output + count >= params.min_tokens:
            named = token in params.stop_token_ids
            return sampled[:count], FinishReason.STOP, token if named else None
        if num_output + count >= most:
            return sampled[:count], FinishReason.LENGTH, None
    return sampled, None, None
