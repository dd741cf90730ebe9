"""What a newcomer would find. Costs O(running), so it is kept until something changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from jaxserve.config import ResolvedConfig
from jaxserve.errors import OverloadedError
from jaxserve.scheduler import admission
from jaxserve.scheduler.entry import Entry
from jaxserve.scheduler.fairness import Level
from jaxserve.scheduler.kv_cache_manager import KVCacheManager
from jaxserve.scheduler.output_length import OutputLengths
from jaxserve.scheduler.policy import Policy
from jaxserve.scheduler.step_time import StepTimeModel
from jaxserve.scheduler.ttft_prediction import Load, Newcomer, predict_departure, predict_ttft
from jaxserve.scheduler.ttft_record import Trust
from jaxserve.scheduler.waiting_queue import QueuedWork, WaitingQueue

_LAST_LEVEL: Level = (2, 0)  # nobody who runs gives way to it


class Forecast:
    """Reads the scheduler's books; changes nothing."""

    def __init__(
        self,
        config: ResolvedConfig,
        policy: Policy,
        step_times: StepTimeModel,
        lengths: OutputLengths,
        kv: KVCacheManager,
        running: list[Entry],
        short_queue: WaitingQueue,
        long_queue: WaitingQueue,
        itl_targets: Mapping[str, float],
    ) -> None:
        self._config = config
        self._policy = policy
        self._step_times = step_times
        self._lengths = lengths
        self._kv = kv
        self._running = running
        self._short_queue = short_queue
        self._long_queue = long_queue
        self._itl_targets = itl_targets
        self._loads: dict[Level, Load] = {}

    def changed(self) -> None:
        """What runs is not what it was."""
        self._loads.clear()

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """Look at what runs at this moment, which may be in the middle of a step, and keep nothing of it."""
        kept, self._loads = self._loads, {}
        try:
            yield
        finally:
            self._loads = kept

    def ttft(self, entry: Entry, num_cached_tokens: int) -> float | None:
        """Seconds until the first token of a request that is about to be queued; None where nothing is known."""
        request = entry.request
        tokens = request.num_tokens - num_cached_tokens
        own = Newcomer(
            tokens,
            num_cached_tokens,
            self._policy.is_long(tokens),
            self._kv.blocks_for(admission.tokens_to_start(request)),
        )
        load, waiting = self._load(entry.key[:2]), self.waiting()
        mean_tokens = waiting.tokens // max(waiting.seqs, 1)
        fit = min(load.open_slots, load.open_blocks // self._kv.blocks_for(mean_tokens + 1), waiting.seqs)
        return predict_ttft(
            load,
            self._short_queue.ahead_of(entry.key),
            self._long_queue.ahead_of(entry.key),
            load.prefill_tokens + fit * mean_tokens,
            own,
            self._policy,
            self._step_times,
        )

    def ttft_alone(self, entry: Entry, num_cached_tokens: int) -> float | None:
        """The same were nothing else there."""
        tokens = entry.request.num_tokens - num_cached_tokens
        limit, seqs = self._config.max_num_batched_tokens, self._config.max_num_seqs
        idle = Load(limit, seqs, 0, 0, 0, 0, 0, 0, seqs, 0, (), seqs, self._kv.pool.num_blocks)
        own = Newcomer(tokens, num_cached_tokens, False, 1)
        return predict_ttft(idle, QueuedWork(), QueuedWork(), 0, own, self._policy, self._step_times)

    def departures(self, number: int) -> float | None:
        """Seconds until so many places in the queue are free."""
        waiting = self._short_queue.total() + self._long_queue.total()
        return predict_departure(self._load(_LAST_LEVEL), waiting, number, self._step_times)

    def waiting(self) -> QueuedWork:
        return self._short_queue.total() + self._long_queue.total()

    def _load(self, level: Level) -> Load:
        found = self._loads.get(level)
        if found is None:
            found = self._loads[level] = self._measure(level)
        return found

    def _measure(self, level: Level) -> Load:
        decodes = decode_keys = prefills = short_tokens = long_tokens = prefill_tokens = preemptible = 0
        free_blocks = self._kv.pool.num_free
        ends = []
        for entry in self._running:
            request = entry.request
            unplanned = request.num_unplanned_tokens
            gives_way = entry.key[:2] > level
            outputs = self._lengths.expected(request) - request.num_pending_tokens
            if unplanned <= 1:
                decodes += 1
                decode_keys += request.num_tokens
            else:
                prefill_tokens += unplanned
            if unplanned > 1 and entry.key[0] <= level[0]:
                prefills += 1
                if self._policy.is_long(unplanned):
                    long_tokens += unplanned
                else:
                    short_tokens += unplanned
                outputs += -(-(short_tokens + long_tokens) // self._config.max_num_batched_tokens) - 1
            if gives_way:
                preemptible += 1
                free_blocks += self._kv.num_blocks_of(request.request_id)
            else:
                ends.append(max(outputs, 0))
        ends.sort()
        return Load(
            self._config.max_num_batched_tokens,
            self._config.max_num_seqs,
            decodes,
            decode_keys,
            prefills,
            short_tokens,
            long_tokens,
            prefill_tokens,
            self._config.max_num_seqs - len(self._running),
            self._kv.pool.num_free,
            tuple(ends),
            self._config.max_num_seqs - len(self._running) + preemptible,
            free_blocks,
            min(self._itl_targets.values(), default=math.inf),
        )


# Room for what a prediction may be off by, in mean absolute deviations of actual over predicted times: 3 are 2.4
# standard deviations of a bell curve, so of those that are let in at the very edge 1 in 100 is late.
MARGIN = 3.0


def check_promise(elapsed: float, raw: float, alone: float, target: float, trust: Trust) -> None:
    """Refuse a request whose first token may not be there in time.

    Args:
      elapsed: seconds since it arrived.
      raw: predicted seconds from now, of which `alone` even in an idle engine: what is due to others is less certain.
      target: seconds from its arrival.

    Raises:
      OverloadedError
    """
    predicted, least = elapsed + raw * trust.correction, alone * trust.correction
    margin = MARGIN * trust.spread * max(raw - alone, 0.0)
    if predicted + margin <= target:
        return
    hopeless = least > target
    about = f"the first token would come after about {predicted:.3g} s"
    about += f", perhaps {predicted + margin:.3g} s" if predicted <= target else ""
    raise OverloadedError(
        f"{about}, and {target:.3g} s were asked for; "
        + (
            f"it takes {least:.3g} s even when nothing else is served, so trying again is of no use"
            if hopeless
            else "try again later"
        ),
        reason="ttft_target",
        retry_after_seconds=math.inf if hopeless else predicted + margin - target,
    )
