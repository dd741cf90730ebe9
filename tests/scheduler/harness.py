"""Drives a scheduler with the fake model and checks everything after everything."""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.outputs import ModelRunnerOutput, RequestUpdate, TokenLogprobs
from jaxserve.request import FinishReason, Request, RequestStatus
from jaxserve.scheduler.factory import create_scheduler
from jaxserve.scheduler.host_tier import HostSpace
from jaxserve.scheduler.output import SchedulerOutput
from jaxserve.scheduler.step_time import StepTimeModel
from jaxserve.stats import EngineStats
from tests.fakes import FakeRunner, OracleProposer, make_config, solo_tokens

BLOCK_BYTES = 1000


class Harness:
    """Attributes:
    requests: everything ever added, by id.
    tokens, prompt_logprobs, errors: what updates delivered, by id.
    ends: how often an update reported an end, by id.
    """

    def __init__(self, num_blocks: int, *, vocab: int = 97, host_blocks: int = 0, **config: object) -> None:
        self.config = make_config(**config)
        self.in_flight: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        self.num_blocks = num_blocks
        self.now = 0.0
        self.step_times = StepTimeModel(lambda tokens, seqs: (tokens, seqs))
        host = HostSpace(host_blocks, BLOCK_BYTES)
        self.scheduler = create_scheduler(self.config, num_blocks, self.step_times, host)
        self.proposer = OracleProposer(vocab)
        self.runner = FakeRunner(self.config.block_size, num_blocks, vocab, host_blocks)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self.errors: dict[str, str] = {}
        self.ends: dict[str, int] = {}
        self.last_updates: list[RequestUpdate] = []
        self.num_steps = 0

    def add(self, *requests: Request) -> None:
        """Each by itself."""
        for request in requests:
            self.add_group(request)

    def add_group(self, *members: Request) -> None:
        """All of them, or none."""
        self.scheduler.add(*members, now=self.now)
        for request in members:
            self.requests[request.request_id] = request
            self.tokens[request.request_id] = []
            self.prompt_logprobs[request.request_id] = []
            self.ends[request.request_id] = 0

    def step(self) -> SchedulerOutput:
        """Plan and run a step, and accept the result of that one, or with `config.overlap` of the one before."""
        plan = self.launch()
        self.accept(leaving=int(self.config.overlap and bool(plan.scheduled)))
        return plan

    def launch(self) -> SchedulerOutput:
        self.num_steps += 1
        assert self.num_steps < 20_000, "no end in sight"
        if wanted := self.scheduler.plan_drafts():
            self.scheduler.check_integrity()
            rounds = max(item.num_tokens for item in wanted)
            self.scheduler.note_drafting(len(wanted), rounds, 0.1 * rounds)
            self.scheduler.take_drafts(wanted, self.proposer.propose(wanted))
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        assert sum(item.num_rows for item in plan.scheduled) <= self.config.max_rows
        budget = plan.num_scheduled_tokens
        assert budget <= self.config.max_num_batched_tokens or self.config.scheduler == "static"
        if plan.scheduled:
            self.in_flight.append((plan, self.runner.run(plan)))
        return plan

    def accept(self, leaving: int = 0) -> None:
        """Accept the results of steps in their order until so many are left."""
        self.last_updates = []
        while len(self.in_flight) > leaving:
            self.last_updates += self._accept(*self.in_flight.pop(0))
        self.check()

    def _accept(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestUpdate]:
        updates = self.scheduler.update_from_output(plan, result)
        self.scheduler.note_first_tokens(updates, self.now)
        for update in updates:
            request_id = update.request.request_id
            self.tokens[request_id] += update.new_token_ids
            self.prompt_logprobs[request_id] += update.prompt_logprobs or []
            self.ends[request_id] += update.request.is_finished
            if update.error:
                self.errors[request_id] = update.error
        return updates

    def lose_device(self) -> None:
        """Steps under way fail, and what they and all before them have left is gone."""
        self.in_flight.clear()
        self.runner.rebuild_state()
        running = [entry.request for entry in self.scheduler._running]
        assert self.scheduler.restart_running() == running
        assert self.scheduler.num_running == 0
        self.check()

    def check(self) -> None:
        self.scheduler.check_integrity()
        if not self.in_flight:
            for request in self.requests.values():
                assert request.num_pending_tokens == 0, f"{request.request_id} awaits what nobody computes"
                assert request.is_finished or request.num_planned_tokens == request.num_computed_tokens
        pool, swap = self.scheduler._kv.pool, self.scheduler._kv.swap
        leaving = set(swap.moves.outs.values())  # with the next plan that has rows
        self.runner.poison(b for b in pool.free_ids() if pool.digest(b) is None and b not in leaving)
        self.runner.poison_host(swap.tier.free_ids())

    def drain(self, max_steps: int | None = None) -> int:
        """Step until nothing is left, with progress in each step. Returns the number of steps."""
        if max_steps is None:
            tokens = sum(r.num_prompt_tokens + r.max_tokens for r in self.requests.values())
            max_steps = 10 * tokens + 10
        steps = 0
        while self.scheduler.has_unfinished or self.in_flight:
            busy = bool(self.in_flight)
            plan = self.step()
            assert plan.scheduled or busy, "nothing was scheduled although requests are unfinished"
            steps += 1
            assert steps <= max_steps, f"not done after {max_steps} steps"
        return steps

    def check_drained(self) -> None:
        """Every request ended once, with its solo tokens, and everything was given back."""
        assert not self.scheduler.has_unfinished
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler._kv.pool.num_free == self.num_blocks
        assert not self.scheduler._kv._chains, "digests of ended requests are kept"
        self.check_host_tier()
        for request_id, request in self.requests.items():
            assert request.status is RequestStatus.FINISHED
            assert request.slot is None
            assert self.tokens[request_id] == request.output_token_ids
            expected = solo_tokens(request, self.runner.vocab)
            if request.finish_reason in (FinishReason.LENGTH, FinishReason.STOP) and not isinstance(
                request.stop_reason, str
            ):
                assert request.output_token_ids == expected, request_id
                assert self.ends[request_id] == 1
                if request.params.prompt_logprobs is not None and request.index == 0:
                    scored = [entry.token_id for entry in self.prompt_logprobs[request_id]]
                    assert scored == list(request.prompt_token_ids[1:])
            else:
                assert request.output_token_ids == expected[: request.num_output_tokens], request_id

    def check_host_tier(self) -> None:
        """Nobody waits for anything in it; without prefix caching it is empty, and nothing on the device has a name."""
        swap, pool = self.scheduler._kv.swap, self.scheduler._kv.pool
        assert not swap._pins
        assert swap.tier.num_pinned == 0
        if not self.config.enable_prefix_caching:
            assert pool.num_cached == 0
            assert len(swap.tier.free_ids()) == swap.tier.num_blocks - len(swap.tier._reads)

    def run(self, *requests: Request) -> None:
        self.add(*requests)
        self.drain()
        self.check_drained()

    def stats(self) -> EngineStats:
        stats = EngineStats()
        self.scheduler.fill_stats(stats)
        return stats

    def needed_tokens(self, requests: Iterable[Request] | None = None) -> int:
        """Tokens to compute were every request alone and undisturbed."""
        chosen = self.requests.values() if requests is None else requests
        return sum(r.num_prompt_tokens + max(len(r.output_token_ids) - 1, 0) for r in chosen)


def rows(plan: SchedulerOutput) -> dict[str, int]:
    """Tokens that a plan computes, by request id."""
    return {item.request_id: item.num_scheduled_tokens for item in plan.scheduled}
