"""Continuous batching: which tokens of which requests run in the next step.

A step is planned in three stages. Running requests that lack a block for their next token get one, if need be from
the last in order (preemption: its blocks go to host memory as others need them, if moving is cheaper than computing
again, see `host_swap.py`). Waiting requests are admitted while slots, budget and blocks allow; one
that is admitted holds blocks for all its known tokens. Then the token budget is divided: requests that decode first,
the rest to prefills as `policy.py` says. Blocks never move once tokens are being divided, so a plan is never revised.
"""

from __future__ import annotations

from jaxserve.config import ResolvedConfig
from jaxserve.request import Request, RequestStatus
from jaxserve.scheduler import admission
from jaxserve.scheduler.base import BaseScheduler, Entry
from jaxserve.scheduler.block_moves import BlockMoves
from jaxserve.scheduler.host_swap import HostSwap
from jaxserve.scheduler.host_tier import HostSpace, HostTier
from jaxserve.scheduler.kv_cache_manager import KVCacheManager, Reuse
from jaxserve.scheduler.output import ScheduledRequest, SchedulerOutput
from jaxserve.scheduler.policy import ChunkedPrefillPolicy, PrefillBudget
from jaxserve.scheduler.siblings import SiblingIndex
from jaxserve.scheduler.step_time import StepTimeModel
from jaxserve.scheduler.swap_cost import SwapCost
from jaxserve.scheduler.waiting_queue import WaitingQueue


class Scheduler(BaseScheduler):
    """The order is (priority, arrival) everywhere. The first in it is never preempted, so there is always progress."""

    def __init__(
        self,
        config: ResolvedConfig,
        num_blocks: int,
        step_times: StepTimeModel,
        *,
        host: HostSpace | None = None,
        policy: ChunkedPrefillPolicy | None = None,
    ) -> None:
        host = host or HostSpace()
        cost = SwapCost(host.block_bytes, config.block_size, config.max_num_batched_tokens, step_times)
        swap = HostSwap(HostTier(host.num_blocks), cost, keeps_evicted=config.enable_prefix_caching)
        super().__init__(
            config,
            KVCacheManager(num_blocks, config.block_size, config.enable_prefix_caching, swap),
            policy or ChunkedPrefillPolicy(config.max_prefill_chunk),
            step_times,
        )
        # Apart, so that finding the first short one never means walking past a thousand long ones.
        self._short_queue = WaitingQueue()
        self._long_queue = WaitingQueue()
        self._siblings = SiblingIndex()
        self._preempted: list[Request] = []

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan the next step. Results of earlier plans may be outstanding: their tokens count as pending then.

        Args:
          now: seconds, of the clock of `Request.arrival_time`.
        """
        self._preempted = []
        self._grow_running()
        if self._may_admit():
            self._admit_waiting()
        scheduled = self._divide_budget()
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
        self._step_id += 1
        return plan

    # Stage 1: blocks for those that run.

    def _grow_running(self) -> None:
        for request in self._kv.lacking(entry.request for entry in self._running):
            needed = request.num_planned_tokens + request.num_unplanned_tokens
            while request.status is RequestStatus.RUNNING and not self._kv.grow(request.request_id, needed):
                self._preempt(self._running[-1])  # itself, when it is the last

    def _preempt(self, entry: Entry) -> None:
        """RUNNING -> WAITING. Its tokens are kept, and its full blocks stay findable as long as they are free.

        Where the host tier keeps them, they are found there after that.
        """
        request = entry.request
        self._kv.keep(request)
        self._stop(entry)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._counters.preemptions += 1
        self._preempted.append(request)
        self._enqueue(entry)

    # Stage 2: admission.

    def _may_admit(self) -> bool:
        """Cheap and often false: a full house is the normal state of a busy engine."""
        heads = [head for queue in (self._short_queue, self._long_queue) if (head := queue.peek())]
        if not heads:
            return False
        return bool(self._free_slots) or self._lower_priority_runs(self._entries[min(heads)[1]].request)

    def _admit_waiting(self) -> None:
        budget = self._prefill_budget()
        long_open = True
        while True:
            first_long = self._long_queue.peek() if long_open else None
            first_short = self._short_queue.peek()
            if first_short and not budget.admits_short(long_waits=first_long is not None):
                first_short = None
            if not first_short and not first_long:
                return
            from_long = not first_short or (first_long is not None and first_long < first_short)
            head = first_long if from_long else first_short
            assert head is not None
            entry = self._entries[head[1]]
            request = entry.request
            if not self._free_slots and not self._lower_priority_runs(request):
                return
            if request in self._preempted:
                return  # it just made room for others
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
                        self._long_queue.push(entry.key, request.request_id)
                    continue
            elif not budget.admits_short(long_waits=False):
                long_open = False  # only a head of the long queue gets here
                continue
            is_first = request.num_cached_tokens is None
            if not self._admit(entry, reuse):
                return  # nobody behind may take the blocks that the head waits for
            budget.add(entry.key, num_uncomputed)
            if is_first and limit and not reuse.is_fork and self._kv.shares_prefixes:
                self._counters.prefix_cache_queries += request.num_prompt_tokens
                self._counters.prefix_cache_hits += reuse.num_tokens
                self._kv.swap.count_hits(len(reuse.host_digests) * self._kv.block_size)

    def _prefill_budget(self) -> PrefillBudget:
        unplanned = [(entry.key, entry.request.num_unplanned_tokens) for entry in self._running]
        num_decodes = sum(1 for _, count in unplanned if count == 1)
        budget = PrefillBudget(self._policy, self._config.max_num_batched_tokens - num_decodes)
        for key, count in unplanned:
            if count > 1:
                budget.add(key, count)
        return budget

    def _reuse_limit(self, entry: Entry) -> int:
        """Most tokens to take from the cache: the logits of a cached position are not computed again."""
        request = entry.request
        if request.params.prompt_logprobs is None or request.index != 0:
            return request.num_tokens
        if entry.num_scored_tokens >= request.num_prompt_tokens:
            return request.num_tokens  # all delivered before it was preempted
        return entry.num_scored_tokens - 1

    def _admit(self, entry: Entry, reuse: Reuse) -> bool:
        """Start a waiting request, if need be in place of running ones of strictly lower priority."""
        request = entry.request
        num_tokens = admission.tokens_to_start(request)
        missing = self._kv.num_missing(reuse, num_tokens)
        if missing > 0 or not self._free_slots:
            lower = (e.request for e in reversed(self._running) if e.request.priority > request.priority)
            victims = self._kv.victims_for(lower, missing, keep=frozenset(reuse.block_ids))
            if victims is None:
                return False
            for victim in victims:
                self._preempt(self._entries[victim.request_id])
        self._dequeue(entry)
        self._start(entry, self._kv.admit(request, reuse, num_tokens))
        return True

    def _lower_priority_runs(self, request: Request) -> bool:
        return bool(self._running) and self._running[-1].request.priority > request.priority

    # Stage 3: tokens.

    def _divide_budget(self) -> tuple[ScheduledRequest, ...]:
        decodes: list[ScheduledRequest] = []
        prefills: list[Entry] = []
        for entry in self._running:
            unplanned = entry.request.num_unplanned_tokens
            if unplanned == 1:
                decodes.append(self._scheduled(entry, 1))
            elif unplanned:
                prefills.append(entry)
        if not prefills:
            return tuple(decodes)
        grants = self._policy.divide(
            [entry.request.num_unplanned_tokens for entry in prefills],
            self._config.max_num_batched_tokens - len(decodes),
        )
        chunks = [
            self._scheduled(entry, grant) for entry, grant in zip(prefills, grants, strict=True) if grant
        ]
        # A chunk of one token is like a decode to whoever packs the batch.
        chunks.sort(key=lambda item: item.num_scheduled_tokens > 1)
        return (*decodes, *chunks)

    # Queues and groups.

    def _enqueue(self, entry: Entry) -> None:
        # By all known tokens; how many of them the cache saves is found out at the head of the queue.
        is_long = self._policy.is_long(entry.request.num_tokens)
        queue = self._long_queue if is_long else self._short_queue
        queue.push(entry.key, entry.request.request_id)

    def _dequeue(self, entry: Entry) -> None:
        request_id = entry.request.request_id
        if request_id in self._short_queue:
            self._short_queue.remove(request_id)
        elif request_id in self._long_queue:
            self._long_queue.remove(request_id)
        else:
            assert self._siblings.unpark(entry.request), f"{request_id} waits nowhere"

    def _on_started(self, entry: Entry) -> None:
        self._siblings.started(entry.request)

    def _on_stopped(self, entry: Entry) -> None:
        for request_id in self._siblings.stopped(entry.request):
            self._enqueue(self._entries[request_id])

    def _on_prompt_computed(self, entry: Entry) -> None:
        for request_id in self._siblings.prompt_computed(entry.request.group_id):
            # A fork leaves it one token to compute, however long the prompt is.
            self._short_queue.push(self._entries[request_id].key, request_id)

    def check_integrity(self) -> None:
        super().check_integrity()
        self._siblings.check_integrity()
        for request_id, entry in self._entries.items():
            places = (request_id in self._short_queue) + (request_id in self._long_queue)
            places += self._siblings.is_parked(entry.request)
            waits = entry.request.status is RequestStatus.WAITING
            assert places == waits, (
                f"{request_id} ({entry.request.status.value}) is queued in {places} places"
            )
