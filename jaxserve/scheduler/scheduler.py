"""Continuous batching: which tokens of which requests run in the next step.

A step is planned in three stages. Running requests that lack a block for their next token get one, if need be from
the last in order (preemption: its blocks go to host memory as others need them, if moving is cheaper than computing
again, see `host_swap.py`). Waiting requests are admitted while slots, budget and blocks allow; one
that is admitted holds blocks for all its known tokens. Then the token budget is divided: requests that decode first,
the rest to prefills as `policy.py` says. Blocks never move once tokens are being divided, so a plan is never revised.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence

from jaxserve.config import ResolvedConfig
from jaxserve.outputs import ModelRunnerOutput, RequestUpdate
from jaxserve.request import FinishReason, Request, RequestStatus, ServiceClass
from jaxserve.scheduler import admission
from jaxserve.scheduler.ageing import Ageing
from jaxserve.scheduler.base import BaseScheduler
from jaxserve.scheduler.block_moves import BlockMoves
from jaxserve.scheduler.decode_stall import largest_within
from jaxserve.scheduler.draft_planner import DraftPlanner
from jaxserve.scheduler.entry import Entry, key_of, tokens_to_compute
from jaxserve.scheduler.forecast import Forecast, check_promise
from jaxserve.scheduler.host_swap import HostSwap
from jaxserve.scheduler.host_tier import HostSpace, HostTier
from jaxserve.scheduler.kv_cache_manager import KVCacheManager, Reuse
from jaxserve.scheduler.output import DraftRequest, ScheduledRequest, SchedulerOutput
from jaxserve.scheduler.policy import BACKGROUND, CLASS_RANKS, Order, Policy, PrefillBudget
from jaxserve.scheduler.promises import Promises
from jaxserve.scheduler.siblings import SiblingIndex
from jaxserve.scheduler.step_time import StepTimeModel, work_of, work_of_chunks
from jaxserve.scheduler.steps_under_way import StepsUnderWay
from jaxserve.scheduler.swap_cost import SwapCost
from jaxserve.scheduler.ttft_record import TtftRecord
from jaxserve.scheduler.waiting_queue import WaitingQueue
from jaxserve.stats import EngineStats

_PROMOTED = -(2**63)  # a priority before all others
_PREDICT_EVERY = 16  # steps, where there is no target: so that predictions are compared with what comes


class Scheduler(BaseScheduler):
    """One order everywhere, that of the policy. The first in it is never preempted, so there is always progress."""

    def __init__(
        self,
        config: ResolvedConfig,
        num_blocks: int,
        step_times: StepTimeModel,
        policy: Policy,
        host: HostSpace | None = None,
    ) -> None:
        host = host or HostSpace()
        cost = SwapCost(host.block_bytes, config.block_size, config.max_num_batched_tokens, step_times)
        swap = HostSwap(HostTier(host.num_blocks), cost, keeps_evicted=config.enable_prefix_caching)
        kv = KVCacheManager(num_blocks, config.block_size, config.enable_prefix_caching, swap)
        super().__init__(config, kv, policy, step_times)
        # Apart, so that finding the first short one never means walking past a thousand long ones.
        self._short_queue = WaitingQueue()
        self._long_queue = WaitingQueue()
        self._siblings = SiblingIndex()
        self._preempted: list[Request] = []
        self._checked: list[tuple[WaitingQueue, str]] = []  # places of those who have passed `check`
        self._draft_planner = DraftPlanner(config, self._drafts, step_times)
        self._ageing = Ageing(config.background_max_wait)
        self._itl_targets: dict[str, float] = {}  # of running requests that have one
        self._ttfts = TtftRecord()
        self._under_way = StepsUnderWay()
        self._promises = Promises()
        self._predicted_step = -_PREDICT_EVERY
        self._forecast = Forecast(
            config,
            policy,
            step_times,
            self._lengths,
            kv,
            self._running,
            self._short_queue,
            self._long_queue,
            self._itl_targets,
        )

    def plan_drafts(self) -> tuple[DraftRequest, ...]:
        """For whom drafts are wanted in the next plan: those who decode and whose last token is known.

        Blocks for drafts are taken only while every running request could have one as well: nobody is preempted, or
        waits, because of them.
        """
        if not self._drafts.most or len(self._running) >= self._config.max_rows:
            return ()
        wanted = []
        for entry in self._running:
            request = entry.request
            known = request.num_tokens
            if entry.is_new or request.num_pending_tokens or known - request.num_planned_tokens != 1:
                continue
            most = self._drafts.limit(request)
            if most <= 0:
                continue
            if entry.room < known + most:
                held = self._kv.grow_towards(request.request_id, known + most, spare=len(self._running))
                if held != entry.room:
                    entry.room, entry.has_new_blocks = held, True
            if entry.room > known:
                assert request.slot is not None
                wanted.append(DraftRequest(request, min(most, entry.room - known), request.slot))
        return tuple(
            self._draft_planner.worth_drafting(
                wanted,
                [entry.request for entry in self._running],
                itl_seconds=self._smallest_itl_target(self._running),
            )
        )

    def note_drafting(self, num_rows: int, num_rounds: int, seconds: float) -> None:
        self._draft_planner.note_drafting(num_rows, num_rounds, seconds)

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan the next step. Results of earlier plans may be outstanding: their tokens count as pending then.

        Args:
          now: seconds, of the clock of `Request.arrival_time`.
        """
        self._now = now
        self._forget_checked()
        self._preempted = []
        self._forecast.changed()
        self._promote_aged()
        self._put_promised_forward()
        decoding, prefills = self._walk_running()
        if self._may_admit():
            started = self._admit_waiting(len(decoding), prefills)
            decoding, prefills = self._after_admission(decoding, prefills, started)
        scheduled = self._divide_budget(decoding, prefills)
        # A plan without rows is never run: what it should have moved goes with the next one.
        moves = self._kv.take_moves() if scheduled else BlockMoves()
        plan = SchedulerOutput(
            step_id=self._step_id,
            scheduled=scheduled,
            block_copies=tuple((source, destination) for destination, source in moves.copies.items()),
            preempted=tuple(self._preempted),
            swap_out=tuple((device, host) for host, device in moves.outs.items()),
            swap_in=tuple((host, device) for device, host in moves.ins.items()),
        )
        if scheduled:
            self._under_way.planned(plan, now)
        self._step_id += 1
        return plan

    def update_from_output(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestUpdate]:
        self._forecast.changed()
        self._under_way.done(plan.step_id)
        return super().update_from_output(plan, result)

    def restart_running(self) -> list[Request]:
        self._under_way.lost()
        return super().restart_running()

    def note_first_tokens(self, updates: Sequence[RequestUpdate], now: float) -> None:
        """Compare predicted times to first token with actual ones: what `update_from_output` returned came `now`."""
        if not self._ttfts.awaits:
            return
        for update in updates:
            if update.new_token_ids:
                self._ttfts.first_token(update.request.request_id, now)
            elif update.request.is_finished:
                self._ttfts.forget(update.request.request_id)

    def fill_stats(self, stats: EngineStats) -> None:
        super().fill_stats(stats)
        self._ttfts.fill_stats(stats, self._now)

    # Before all: those that have waited too long.

    def _promote_aged(self) -> None:
        """Put background requests before all that wait; then nobody passes them any more, nor takes their places."""
        while (request_id := self._ageing.take_due(self._now)) is not None:
            self._counters.promotions += 1
            turn = float(self._counters.promotions)
            self._put_forward(request_id, (CLASS_RANKS[ServiceClass.INTERACTIVE], _PROMOTED, turn))

    def _put_promised_forward(self) -> None:
        """Those whose time to the first token gets short, before all of their class and priority."""
        while (due := self._promises.take_due(self._now)) is not None:
            request_id, tag = due
            self._put_forward(request_id, (*self._entries[request_id].key[:2], tag))

    def _put_forward(self, request_id: str, order: Order) -> None:
        """Give one that is queued another place, for good."""
        entry = self._entries[request_id]
        queue = self._short_queue if request_id in self._short_queue else self._long_queue
        queue.remove(request_id)
        self._promises.leaves(request_id)
        entry.key = (*order, entry.key[3])
        self._push(queue, entry)

    # Stage 1: those that run.

    def _walk_running(self) -> tuple[list[Entry], list[Entry]]:
        """The only walk of a plan through all that runs, in order: those that lack a block get one.

        Returns those that decode, and those that have more than one token left.
        """
        decoding: list[Entry] = []
        prefills: list[Entry] = []
        for entry in self._running:  # which may lose its last ones meanwhile
            request = entry.request
            pending = request.num_pending_tokens
            outputs = len(request.output_token_ids) + pending
            if request.awaits_result or (pending and outputs >= request.max_tokens):
                continue  # see `Request.num_unplanned_tokens`
            known = len(request.prompt_token_ids) + outputs
            if known > entry.room and not self._grow(entry, known):
                break
            if known - request.num_planned_tokens == 1:
                decoding.append(entry)
            else:
                prefills.append(entry)
        return decoding, prefills

    def _grow(self, entry: Entry, num_tokens: int) -> bool:
        """Lengthen a block table, at the cost of those behind. False where none of them was enough: it waits now."""
        request_id = entry.request.request_id
        while not self._kv.grow(request_id, num_tokens):
            last = self._running[-1]
            self._preempt(last)
            if last is entry:
                return False
        entry.room, entry.has_new_blocks = self._kv.room_of(request_id), True
        return True

    def _preempt(self, entry: Entry) -> None:
        """Make room for others. Where the host tier keeps its full blocks, they are found there after that."""
        self._kv.keep(entry.request)
        self._suspend(entry)
        self._counters.preemptions += 1
        self._counters.preemptions_by_class[entry.request.service_class] += 1
        self._preempted.append(entry.request)

    # Stage 2: admission.

    def _may_admit(self) -> bool:
        """Cheap and often false: a full house is the normal state of a busy engine."""
        heads = [head for queue in (self._short_queue, self._long_queue) if (head := queue.peek())]
        if not heads:
            return False
        return bool(self._free_slots) or self._may_take_a_place(self._entries[min(heads)[1]])

    def _admit_waiting(self, num_decodes: int, prefills: list[Entry]) -> list[Entry]:
        """Start what there is room for beside so many rows that decode, and prompts under way."""
        budgets = self._prefill_budgets(num_decodes, prefills)
        long_open = True
        started: list[Entry] = []
        while True:
            first_long = self._long_queue.peek() if long_open else None
            first_short = self._short_queue.peek()
            if first_short:
                long_waits = first_long is not None and first_long[0][0] <= first_short[0][0]
                if not budgets[first_short[0][0]].admits_short(long_waits=long_waits):
                    first_short = None
            if not first_short and not first_long:
                return started
            from_long = not first_short or (first_long is not None and first_long < first_short)
            head = first_long if from_long else first_short
            assert head is not None
            entry = self._entries[head[1]]
            request = entry.request
            budget = budgets[entry.key[0]]
            if not self._free_slots and not self._may_take_a_place(entry):
                return started
            if request in self._preempted:
                return started  # it just made room for others
            source = self._siblings.source_for(request)
            limit = self._reuse_limit(entry)
            may_fork = limit >= request.num_prompt_tokens - 1
            if source is None and may_fork and self._siblings.has_running(request.group_id):
                self._dequeue(entry)
                self._siblings.park(request)
                continue
            reuse = self._kv.find_reusable(request, limit=limit, source=source)
            num_uncomputed = request.num_tokens - reuse.num_tokens
            if self._policy.is_long(num_uncomputed):
                if not budget.admits_long(entry.key):
                    if from_long:
                        long_open = False
                    else:  # what was to make it short is gone
                        self._dequeue(entry)
                        self._push(self._long_queue, entry)
                    continue
            elif not budget.admits_short(long_waits=False):
                long_open = False  # only a head of the long queue gets here
                continue
            is_first = request.num_cached_tokens is None
            if not self._admit(entry, reuse):
                return started  # nobody behind may take the blocks that the head waits for
            started.append(entry)
            budget.add(entry.key, num_uncomputed)
            if entry.key[0] < BACKGROUND:
                budgets[BACKGROUND].give_way(num_uncomputed)
            if request.service_class is ServiceClass.INTERACTIVE:
                self._ageing.interactive_admitted()
            if is_first and limit and not reuse.is_fork and self._kv.shares_prefixes:
                self._counters.prefix_cache_queries += request.num_prompt_tokens
                self._counters.prefix_cache_hits += reuse.num_tokens
                self._kv.swap.count_hits(len(reuse.host_digests) * self._kv.block_size)

    def _after_admission(
        self, decoding: list[Entry], prefills: list[Entry], started: list[Entry]
    ) -> tuple[list[Entry], list[Entry]]:
        """Without those whose places were taken, and with those who have started, in order."""
        if self._preempted:
            runs = RequestStatus.RUNNING
            decoding = [entry for entry in decoding if entry.request.status is runs]
            prefills = [entry for entry in prefills if entry.request.status is runs]
            started = [entry for entry in started if entry.request.status is runs]
        for entry in started:
            peers = decoding if entry.request.num_unplanned_tokens == 1 else prefills
            bisect.insort(peers, entry, key=key_of)
        return decoding, prefills

    def _prefill_budgets(
        self, num_decodes: int, prefills: list[Entry]
    ) -> tuple[PrefillBudget, PrefillBudget]:
        """By class; the second has what the first leaves."""
        left = self._config.max_num_batched_tokens - num_decodes
        budgets = PrefillBudget(self._policy, left), PrefillBudget(self._policy, left)
        for entry in prefills:
            key, count = entry.key, entry.request.num_unplanned_tokens
            budgets[key[0]].add(key, count)
            if key[0] < BACKGROUND:
                budgets[BACKGROUND].give_way(count)
        return budgets

    def _reuse_limit(self, entry: Entry) -> int:
        """Most tokens to take from the cache: the logits of a cached position are not computed again."""
        request = entry.request
        if request.params.pooling == "mean":
            return 0  # every token's hidden state is wanted, and no cache has them
        if request.params.prompt_logprobs is None or request.index != 0:
            return request.num_tokens
        if entry.num_scored_tokens >= request.num_prompt_tokens:
            return request.num_tokens  # all delivered before it was preempted
        return entry.num_scored_tokens - 1

    def _admit(self, entry: Entry, reuse: Reuse) -> bool:
        """Start a waiting request, if need be in place of running ones of a lower class or priority."""
        request = entry.request
        num_tokens = admission.tokens_to_start(request)
        missing = self._kv.num_missing(reuse, num_tokens)
        if missing > 0 or not self._free_slots:
            if not self._may_take_a_place(entry):
                return False
            lower = (e.request for e in reversed(self._running) if e.key[:2] > entry.key[:2])
            victims = self._kv.victims_for(lower, missing, keep=frozenset(reuse.block_ids))
            if victims is None:
                return False
            self._counters.class_preemptions += len(victims)
            for victim in victims:
                self._preempt(self._entries[victim.request_id])
        self._dequeue(entry)
        self._start(entry, self._kv.admit(request, reuse, num_tokens))
        return True

    def _may_take_a_place(self, entry: Entry) -> bool:
        """Whether anybody who runs gives way to it. One promoted is the next to start, and no more than that."""
        if not self._running or entry.key[1] == _PROMOTED:
            return False
        return self._running[-1].key[:2] > entry.key[:2]

    # Stage 3: tokens.

    def _divide_budget(self, decoding: list[Entry], prefills: list[Entry]) -> tuple[ScheduledRequest, ...]:
        drafts: dict[str, tuple[int, ...]] = {}
        itl_seconds = self._smallest_itl_target(decoding) if self._drafts.most or prefills else math.inf
        if self._drafts.most:
            room = self._config.max_num_batched_tokens - len(decoding)
            drafts = self._draft_planner.choose(
                [entry.request for entry in decoding],
                lambda: self._chunks(prefills, room),
                itl_seconds=itl_seconds,
            )
            decodes = self._rows((entry, 1, drafts.get(entry.request.request_id, ())) for entry in decoding)
        else:
            decodes = self._decode_rows(decoding)
        if not prefills:
            return tuple(decodes)
        num_drafts = sum(map(len, drafts.values()))
        budget = self._config.max_num_batched_tokens - len(decodes) - num_drafts
        grants = self._grants(prefills, self._without_stall(decodes, prefills, budget, itl_seconds))
        chunks = self._rows(
            (entry, grant, ()) for entry, grant in zip(prefills, grants, strict=True) if grant
        )
        # A chunk of one token is like a decode to whoever packs the batch.
        chunks.sort(key=lambda item: item.num_scheduled_tokens > 1)
        return (*decodes, *chunks)

    def _grants(self, prefills: list[Entry], budget: int) -> list[int]:
        """Tokens for each, in their order: background prompts get what interactive ones leave."""
        counts = [entry.request.num_unplanned_tokens for entry in prefills]
        first = sum(1 for entry in prefills if entry.key[0] < BACKGROUND)
        grants = self._policy.divide(counts[:first], budget) if first else []
        if first < len(counts):
            grants += self._policy.divide(counts[first:], budget - sum(grants))
        return grants

    def _chunks(self, prefills: list[Entry], budget: int) -> list[tuple[int, int]]:
        """(computed tokens, tokens granted) of each."""
        grants = self._grants(prefills, budget)
        return [
            (entry.request.num_planned_tokens, grant) for entry, grant in zip(prefills, grants, strict=True)
        ]

    def _smallest_itl_target(self, decoding: Iterable[Entry]) -> float:
        """Seconds; inf where none of them has one."""
        targets = self._itl_targets
        if not targets:
            return math.inf
        return min((targets.get(entry.request.request_id, math.inf) for entry in decoding), default=math.inf)

    def _without_stall(
        self, decodes: list[ScheduledRequest], prefills: list[Entry], budget: int, limit: float
    ) -> int:
        """The part of the budget with which no stream beside waits longer for its token than `limit` seconds."""
        if limit == math.inf:
            return budget

        def seconds(tokens: int) -> float | None:
            return self._step_times.predict(
                work_of_chunks(self._chunks(prefills, tokens), beside=decode_work)
            )

        decode_work = work_of(decodes)
        within = largest_within(seconds, limit, budget)
        self._counters.stall_cuts += within < budget
        return within

    # Whom to refuse.

    def add(self, *requests: Request, now: float | None = None) -> None:
        self._forget_checked()
        super().add(*requests, now=now)

    def check(self, *requests: Request, now: float) -> list[Entry]:
        """See `BaseScheduler.check`. Whoever passes stands in the queue for those who are checked next, until somebody
        is added or a step is planned."""
        predicted_step, num_added = self._predicted_step, self._num_added
        self._num_added += len(self._checked)  # behind those who have passed
        try:
            with self._forecast.fresh():
                entries = super().check(*requests, now=now)
        finally:
            self._predicted_step, self._num_added = predicted_step, num_added
            self._ttfts.forget(requests[0].request_id)
        for entry in entries:
            name = f"checked {len(self._checked)}"
            queue = self._queue_for(entry)
            tokens, outputs = tokens_to_compute(entry.request), self._lengths.expected(entry.request)
            queue.push(entry.key, name, tokens, outputs)
            self._checked.append((queue, name))
        return entries

    def _forget_checked(self) -> None:
        """They are added now, or their clients went away."""
        for queue, name in self._checked:
            queue.remove(name)
        self._checked.clear()

    def _check_target(self, entry: Entry, now: float) -> None:
        request, target = entry.request, entry.request.targets.ttft_seconds
        if not self._step_times.is_ready:
            return
        if target is None and self._step_id < self._predicted_step + _PREDICT_EVERY:
            return
        cached = self._kv.find_reusable(request, limit=self._reuse_limit(entry)).num_tokens
        raw = self._forecast.ttft(entry, cached)
        if raw is None:
            return
        raw += self._under_way.remaining(now, self._step_times.predict)
        rank = entry.key[0]
        may_refuse = bool(self._entries) or not self._ttfts.is_stale(rank, now)
        if target is not None and may_refuse and not request.is_promised:
            alone = self._forecast.ttft_alone(entry, cached)
            check_promise(now - request.arrival_time, raw, alone or 0.0, target, self._ttfts.trust(rank, now))
        self._predicted_step = self._step_id
        self._ttfts.expect(request.request_id, rank, request.arrival_time, now, raw)

    def _seconds_to_drain(self, num_seqs: int, num_tokens: int) -> float | None:
        waiting = self._forecast.waiting()
        mean_tokens = max(1, waiting.tokens // max(waiting.seqs, 1))
        seconds = self._forecast.departures(max(num_seqs, -(-num_tokens // mean_tokens)))
        return (
            None
            if seconds is None
            else seconds * self._ttfts.trust(CLASS_RANKS[ServiceClass.INTERACTIVE], self._now).correction
        )

    def _num_waiting_tokens(self) -> int:
        return self._forecast.waiting().tokens

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        ended = super().abort(request_ids)
        for request in ended:
            self._ttfts.forget(request.request_id)
        if ended:
            self._forecast.changed()
        return ended

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        super().finish(request_id, reason, stop_reason)
        self._ttfts.forget(request_id)
        self._forecast.changed()

    # Queues and groups.

    def _enqueue(self, entry: Entry) -> None:
        self._push(self._queue_for(entry), entry)

    def _queue_for(self, entry: Entry) -> WaitingQueue:
        # By all known tokens; how many of them the cache saves is found out at the head of the queue.
        is_long = self._policy.is_long(entry.request.num_tokens)
        return self._long_queue if is_long else self._short_queue

    def _push(self, queue: WaitingQueue, entry: Entry) -> None:
        request = entry.request
        queue.push(entry.key, request.request_id, tokens_to_compute(request), self._lengths.expected(request))
        if entry.key[0] == BACKGROUND:
            self._ageing.waits(request.request_id, entry.waiting_since, entry.waited)
        if entry.key[2] == entry.order[2]:  # it has not been put forward
            self._promises.waits(request)

    def _dequeue(self, entry: Entry) -> None:
        request_id = entry.request.request_id
        self._ageing.leaves(request_id)
        self._promises.leaves(request_id)
        if request_id in self._short_queue:
            self._short_queue.remove(request_id)
        elif request_id in self._long_queue:
            self._long_queue.remove(request_id)
        else:
            assert self._siblings.unpark(entry.request), f"{request_id} waits nowhere"

    def _on_started(self, entry: Entry) -> None:
        request = entry.request
        self._siblings.started(request)
        if request.targets.itl_seconds is not None:
            self._itl_targets[request.request_id] = request.targets.itl_seconds

    def _on_stopped(self, entry: Entry) -> None:
        self._itl_targets.pop(entry.request.request_id, None)
        for request_id in self._siblings.stopped(entry.request):
            self._enqueue(self._entries[request_id])

    def _on_prompt_computed(self, request: Request) -> None:
        for request_id in self._siblings.prompt_computed(request.group_id):
            # A fork leaves it one token to compute, however long the prompt is.
            self._push(self._short_queue, self._entries[request_id])

    def check_integrity(self) -> None:
        super().check_integrity()
        self._siblings.check_integrity()
        queued = {i for i in self._entries if i in self._short_queue or i in self._long_queue}
        aging = {request_id for request_id in queued if self._entries[request_id].key[0] == BACKGROUND}
        assert set(self._ageing.waiting) == aging, f"{set(self._ageing.waiting)} age, not {aging}"
        promised = {
            request_id
            for request_id in queued
            if (request := self._entries[request_id].request).targets.ttft_seconds is not None
            and not request.num_output_tokens
            and self._entries[request_id].key[2] == self._entries[request_id].order[2]
        }
        assert set(self._promises.waiting) <= promised, (
            f"{set(self._promises.waiting)} are promised, not {promised}"
        )
        streams = {e.request.request_id for e in self._running if e.request.targets.itl_seconds is not None}
        assert set(self._itl_targets) == streams, f"targets of {set(self._itl_targets)}, not of {streams}"
        for request_id, entry in self._entries.items():
            places = (request_id in self._short_queue) + (request_id in self._long_queue)
            places += self._siblings.is_parked(entry.request)
            waits = entry.request.status is RequestStatus.WAITING
            assert places == waits, (
                f"{request_id} ({entry.request.status.value}) is queued in {places} places"
            )
