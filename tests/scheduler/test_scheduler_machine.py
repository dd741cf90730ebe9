"""Random lives of requests in tiny pools: whatever happens, tokens are those of the solo run and nothing leaks."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.errors import InvalidRequestError
from jaxserve.outputs import BlockTransfers
from jaxserve.request import FinishReason, RequestStatus
from jaxserve.scheduler.step_time import StepWork
from tests.fakes import make_group
from tests.scheduler.harness import BLOCK_BYTES, Harness

FAMILIES = [[(7 * f + 13 * i) % 50 for i in range(40)] for f in range(2)]  # prompts share beginnings


class SchedulerMachine(RuleBasedStateMachine):
    kind = "continuous"
    overlap = False

    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        spare_budget=st.integers(0, 12),
        chunk=st.integers(1, 8),
        caching=st.booleans(),
        host_blocks=st.sampled_from([0, 1, 3, 6, 20]),
        moving_is_slow=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        spare_budget: int,
        chunk: int,
        caching: bool,
        host_blocks: int,
        moving_is_slow: bool,
    ) -> None:
        budget = max_num_seqs + spare_budget
        self.harness = Harness(
            num_blocks,
            vocab=11,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_prefill_chunk=min(chunk, budget),
            enable_prefix_caching=caching,
            scheduler=self.kind,
            overlap=self.overlap,
            host_blocks=host_blocks,
        )
        if moving_is_slow:  # a block takes a second each way, about what its tokens take, so decisions differ
            self.harness.runner.transfers = BlockTransfers(BLOCK_BYTES, 1.0, BLOCK_BYTES, 1.0)
            for tokens in range(1, 20):
                self.harness.step_times.observe(StepWork(tokens, 1), 0.5 * tokens)
        self.num_groups = 0

    @rule(
        family=st.sampled_from([0, 1]),
        shared=st.integers(0, 30),
        tail=st.lists(st.integers(0, 50), min_size=1, max_size=4),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.integers(0, 12),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        salt=st.sampled_from([None, None, "tenant"]),
        eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 0]),
    )
    def submit(
        self,
        family: int,
        shared: int,
        tail: list[int],
        n: int,
        max_tokens: int,
        priority: int,
        salt: str | None,
        eos: bool,
        prompt_logprobs: int | None,
    ) -> None:
        capacity = self.harness.num_blocks * self.harness.config.block_size
        prompt = [*FAMILIES[family][:shared], *tail][:capacity]
        members = make_group(
            f"g{self.num_groups}",
            prompt,
            n,
            max_tokens,
            priority=priority,
            salt=salt,
            eos=[3] if eos else [],
            prompt_logprobs=prompt_logprobs,
        )
        self.num_groups += 1
        try:
            self.harness.add(*members)
        except InvalidRequestError:
            assert len(prompt) + max_tokens - 1 > capacity

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.harness.step()

    def living(self) -> list[str]:
        return [i for i, r in self.harness.requests.items() if not r.is_finished]

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.living()), unique=True, min_size=1, max_size=3))
        ended = self.harness.scheduler.abort([*chosen, "unknown", chosen[0]])
        assert [request.request_id for request in ended] == chosen
        assert self.harness.scheduler.abort(chosen) == []
        self.harness.check()

    @precondition(lambda self: self.living())
    @rule()
    def abort_all(self) -> None:
        self.harness.scheduler.abort(self.living())
        self.harness.check()
        self.harness.check_drained()

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def find_stop_string(self, data: st.DataObject) -> None:
        started = [i for i in self.living() if self.harness.requests[i].output_token_ids]
        if started:
            chosen = data.draw(st.sampled_from(started))
            self.harness.scheduler.finish(chosen, FinishReason.STOP, "stop!")
            request = self.harness.requests[chosen]
            assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "stop!")
            self.harness.check()

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def abort_while_a_step_is_under_way(self, data: st.DataObject) -> None:
        plan = self.harness.launch()
        chosen = data.draw(st.sampled_from(self.living()))
        self.harness.scheduler.abort([chosen])
        self.harness.accept(leaving=int(self.overlap and bool(plan.scheduled)))
        assert chosen not in [update.request.request_id for update in self.harness.last_updates]

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def fail_row(self, data: st.DataObject) -> None:
        running = [i for i in self.living() if self.harness.requests[i].status is RequestStatus.RUNNING]
        if running:
            chosen = data.draw(st.sampled_from(running))
            self.harness.runner.failing = {chosen}
            self.harness.step()
            self.harness.runner.failing = set()
            request = self.harness.requests[chosen]
            if self.overlap:  # the step before may have ended it otherwise
                failed = request.finish_reason is FinishReason.ERROR
            else:
                failed = request.is_finished
            assert failed == (chosen in self.harness.errors)

    @invariant()
    def gauges_agree(self) -> None:
        if hasattr(self, "harness"):
            scheduler = self.harness.scheduler
            assert scheduler.num_running <= self.harness.config.max_num_seqs
            assert scheduler.num_running + scheduler.num_waiting == len(self.living())
            assert scheduler.has_unfinished == bool(self.living())

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()
            self.harness.check_drained()


class OverlapMachine(SchedulerMachine):
    overlap = True


class StaticMachine(SchedulerMachine):
    kind = "static"


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestOverlapMachine = OverlapMachine.TestCase
TestOverlapMachine.settings = TestSchedulerMachine.settings
TestStaticMachine = StaticMachine.TestCase
TestStaticMachine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
