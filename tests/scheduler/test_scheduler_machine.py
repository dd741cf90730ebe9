"""Random lives of requests in tiny pools: whatever happens, tokens are those of the solo run and nothing leaks."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.errors import InvalidRequestError, OverloadedError
from jaxserve.outputs import BlockTransfers
from jaxserve.request import FinishReason, Request, RequestStatus, ServiceClass, ServiceTargets
from jaxserve.scheduler.step_time import StepWork, work_of
from tests.fakes import make_group
from tests.scheduler.harness import BLOCK_BYTES, Harness

FAMILIES = [[(7 * f + 13 * i) % 50 for i in range(40)] for f in range(2)]  # prompts share beginnings


class SchedulerMachine(RuleBasedStateMachine):
    kind = "continuous"
    overlap = False
    speculates = False  # in every life; in others now and then

    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        spare_budget=st.integers(0, 12),
        chunk=st.integers(1, 8),
        caching=st.booleans(),
        host_blocks=st.sampled_from([0, 1, 3, 6, 20]),
        moving_is_slow=st.booleans(),
        background_max_wait=st.sampled_from([0.0, 1.0, 20.0]),
        max_waiting_tokens=st.sampled_from([None, None, 40]),
        num_drafts=st.sampled_from([0, 0, 1, 3, 5]),
        speculative=st.sampled_from(["ngram", "self:1"]),
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
        background_max_wait: float,
        max_waiting_tokens: int | None,
        num_drafts: int,
        speculative: str,
    ) -> None:
        budget = max_num_seqs + spare_budget
        if self.speculates:
            num_blocks, budget, num_drafts = num_blocks + 6, budget + 8, max(num_drafts, 2)
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
            background_max_wait=background_max_wait,
            max_waiting_tokens=max_waiting_tokens,
            speculative=speculative,
            num_speculative_tokens=num_drafts if self.kind == "continuous" else 0,
        )
        if moving_is_slow:  # a block takes a second each way, about what its tokens take, so decisions differ
            self.harness.runner.transfers = BlockTransfers(BLOCK_BYTES, 1.0, BLOCK_BYTES, 1.0)
            for tokens in range(1, 20):
                self.harness.step_times.observe(StepWork(tokens, 1), 0.5 * tokens)
        self.num_groups = self.num_refused = 0

    @rule(
        family=st.sampled_from([0, 1]),
        shared=st.integers(0, 30),
        tail=st.lists(st.integers(0, 50), min_size=1, max_size=4),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.integers(0, 12),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        service_class=st.sampled_from(ServiceClass),
        client=st.sampled_from("abc"),
        ttft=st.sampled_from([None, None, 0.0, 1.0, 30.0]),
        itl=st.sampled_from([None, None, 0.2, 0.8]),
        salt=st.sampled_from([None, None, "tenant"]),
        eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        speculative_tokens=st.sampled_from([None, None, 0, 2, 9]),
    )
    def submit(
        self,
        family: int,
        shared: int,
        tail: list[int],
        n: int,
        max_tokens: int,
        priority: int,
        service_class: ServiceClass,
        client: str,
        ttft: float | None,
        itl: float | None,
        salt: str | None,
        eos: bool,
        prompt_logprobs: int | None,
        speculative_tokens: int | None,
    ) -> None:
        capacity = self.harness.num_blocks * self.harness.config.block_size
        prompt = [*FAMILIES[family][:shared], *tail][:capacity]
        members = make_group(
            f"g{self.num_groups}",
            prompt,
            n,
            max_tokens,
            priority=priority,
            service_class=service_class,
            client=client,
            targets=ServiceTargets(ttft_seconds=ttft, itl_seconds=itl),
            arrival=self.harness.now,
            salt=salt,
            eos=[3] if eos else [],
            prompt_logprobs=prompt_logprobs,
            speculative_tokens=(speculative_tokens or 2) if self.speculates else speculative_tokens,
        )
        self.num_groups += 1
        known = len(self.living())
        try:
            self.harness.add_group(*members)
        except InvalidRequestError:
            assert len(prompt) + max_tokens - 1 > capacity
        except OverloadedError as error:
            self.check_refusal(error)
            assert len(self.living()) == known, "a part of it was taken"
            self.num_refused += 1
            self.harness.check()

    @staticmethod
    def check_refusal(error: OverloadedError) -> None:
        assert error.reason in ("ttft_target", "queue_tokens_full")
        assert error.retry_after_seconds is None or error.retry_after_seconds >= 0

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            work = work_of(self.harness.step().scheduled)
            self.harness.now += 0.05 * work.tokens
            if work.tokens:
                self.harness.step_times.observe(work, 0.05 * work.tokens)

    @rule(seconds=st.sampled_from([0.3, 5.0, 100.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.harness.now += seconds

    def waiting(self) -> list[Request]:
        return [r for r in self.harness.requests.values() if r.status is RequestStatus.WAITING]

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

    @rule(amid_a_step=st.booleans())
    def lose_the_device(self, amid_a_step: bool) -> None:
        if amid_a_step:
            self.harness.launch()
        self.harness.lose_device()

    @invariant()
    def gauges_agree(self) -> None:
        if hasattr(self, "harness"):
            scheduler = self.harness.scheduler
            assert scheduler.num_running <= self.harness.config.max_num_seqs
            assert scheduler.num_running + scheduler.num_waiting == len(self.living())
            assert scheduler.has_unfinished == bool(self.living())
            stats = self.harness.stats()
            assert sum(stats.running_by_class.values()) == stats.num_running
            assert sum(stats.waiting_by_class.values()) == stats.num_waiting
            assert sum(stats.preemptions_by_class.values()) == stats.preemptions >= stats.class_preemptions
            assert sum(stats.refusals.values()) == self.num_refused
            parked = (
                sum(scheduler._siblings.is_parked(r) for r in self.waiting()) if self.kind != "static" else 0
            )
            assert stats.waiting_tokens >= stats.num_waiting - parked

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()
            self.harness.check_drained()


class OverlapMachine(SchedulerMachine):
    overlap = True


class SpeculatingMachine(SchedulerMachine):
    speculates = True


class SpeculatingOverlapMachine(SpeculatingMachine):
    overlap = True


class StaticMachine(SchedulerMachine):
    kind = "static"


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestOverlapMachine = OverlapMachine.TestCase
TestOverlapMachine.settings = TestSchedulerMachine.settings
TestSpeculatingMachine = SpeculatingMachine.TestCase
TestSpeculatingMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSpeculatingOverlapMachine = SpeculatingOverlapMachine.TestCase
TestSpeculatingOverlapMachine.settings = TestSpeculatingMachine.settings
TestStaticMachine = StaticMachine.TestCase
TestStaticMachine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
