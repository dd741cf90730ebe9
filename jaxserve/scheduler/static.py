"""Static batching, the baseline that continuous batching is measured against.

A batch starts only when nothing runs. Every prompt counts as the longest of its batch (padded on the left, so that
all reach their last token in the same step), and rows of ended members are computed until the last member ends.
No prefix cache, no preemption: each member's blocks are reserved for its longest possible output.
"""

from __future__ import annotations

from jaxserve.config import ResolvedConfig
from jaxserve.scheduler.admission import final_num_computed_tokens
from jaxserve.scheduler.base import BaseScheduler
from jaxserve.scheduler.entry import Entry
from jaxserve.scheduler.kv_cache_manager import KVCacheManager, Reuse
from jaxserve.scheduler.output import ScheduledRequest, SchedulerOutput
from jaxserve.scheduler.policy import ChunkedPrefillPolicy
from jaxserve.scheduler.step_time import StepTimeModel
from jaxserve.scheduler.waiting_queue import WaitingQueue


class StaticScheduler(BaseScheduler):
    """Same interface as `Scheduler`. A batch of N with a longest prompt of P computes N * P tokens for prompts, in
    steps of as many columns as the token budget allows, and N for each decode step of its longest output."""

    def __init__(self, config: ResolvedConfig, num_blocks: int, step_times: StepTimeModel) -> None:
        super().__init__(
            config,
            KVCacheManager(num_blocks, config.block_size, enable_prefix_caching=False),
            ChunkedPrefillPolicy(config.max_prefill_chunk),
            step_times,
        )
        self._queue = WaitingQueue()
        self._batch_size = 0
        self._num_columns = 0  # longest prompt of the batch

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan the next step. Its result must be accepted before the next plan is made."""
        self._now = now
        if not self._running:
            self._start_batch()
        scheduled: list[ScheduledRequest] = []
        num_padding = 0
        if self._running:
            start = min(self._column(entry) for entry in self._running)
            stop = self._last_column(start)
            counts = [(entry, stop - self._column(entry)) for entry in self._running]
            scheduled = self._rows((entry, count, ()) for entry, count in counts if count > 0)
            scheduled.sort(key=lambda item: item.num_scheduled_tokens > 1)  # as `SchedulerOutput` promises
            num_padding = self._batch_size * (stop - start) - sum(i.num_scheduled_tokens for i in scheduled)
        plan = SchedulerOutput(self._step_id, tuple(scheduled), num_padding_tokens=num_padding)
        self._step_id += 1
        return plan

    def _start_batch(self) -> None:
        while self._free_slots and (head := self._queue.peek()):
            entry = self._entries[head[1]]
            num_tokens = final_num_computed_tokens(entry.request)
            if self._kv.num_missing(Reuse(), num_tokens) > 0:
                break
            self._dequeue(entry)
            self._kv.admit(entry.request, Reuse(), num_tokens)
            self._start(entry, 0)
        self._batch_size = len(self._running)
        self._num_columns = max((entry.request.num_prompt_tokens for entry in self._running), default=0)

    def _column(self, entry: Entry) -> int:
        """Column of a row's next token; left padding puts its first at (longest prompt - own prompt)."""
        request = entry.request
        return self._num_columns - request.num_prompt_tokens + request.num_computed_tokens

    def _last_column(self, start: int) -> int:
        if start >= self._num_columns:
            return start + 1
        return min(start + max(1, self._config.max_num_batched_tokens // self._batch_size), self._num_columns)

    def _enqueue(self, entry: Entry) -> None:
        self._queue.push(entry.key, entry.request.request_id, entry.request.num_tokens)

    def _dequeue(self, entry: Entry) -> None:
        self._queue.remove(entry.request.request_id)

    def _num_waiting_tokens(self) -> int:
        return self._queue.total().tokens
