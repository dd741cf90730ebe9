"""EngineCore: schedule -> build -> launch, read -> update, once a step. Everything else hangs off these."""

from __future__ import annotations

import hashlib
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.batch.builder import BatchBuilder, HostBatch
from jaxserve.batch.flags import BatchFlag
from jaxserve.batch.ready_buckets import ReadyBuckets
from jaxserve.batch.step_trace import StepRecorder
from jaxserve.config import GenerationDefaults, ModelConfig, ResolvedConfig
from jaxserve.engine_view import MAX_NOTED_STEPS, EngineView, StepView
from jaxserve.errors import EngineDeadError, InvalidRequestError, OverloadedError
from jaxserve.host_gap import HostGap
from jaxserve.latency_meter import LatencyMeter
from jaxserve.lost_steps import LostSteps
from jaxserve.output_processor import OutputProcessor
from jaxserve.outputs import ModelRunnerOutput, RequestOutput, RequestUpdate
from jaxserve.recent_times import RecentTimes
from jaxserve.request import FinishReason, GenerationRequest, Request
from jaxserve.scheduler.factory import create_scheduler
from jaxserve.scheduler.host_tier import HostSpace
from jaxserve.scheduler.output import DraftRequest, SchedulerOutput
from jaxserve.scheduler.step_time import StepTimeModel
from jaxserve.scheduler.view import view_step
from jaxserve.speculative.proposer import Proposer
from jaxserve.stats import BucketStats, EngineStats, KVCacheSettings, ReadyShapes
from jaxserve.structured_output.compiler import GrammarCompiler
from jaxserve.structured_output.token_masks import TokenMasks
from jaxserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# As often may a step fail without one that works in between before those that ran in it end with an error: one of
# them may be why.
MAX_STEP_FAILURES = 3
# As many failed steps may a request go through without a new token: it may be why, although others work in between.
MAX_LOST_STEPS = 10


class Runner(Protocol):
    """What the engine needs of a model runner (tests bring one that can be computed by hand)."""

    padding_row: int

    @property
    def num_compiled(self) -> int: ...
    @property
    def serving_compilations(self) -> int: ...
    @property
    def failure(self) -> BaseException | None: ...
    def launch(self, plan: SchedulerOutput, batch: HostBatch) -> Any: ...
    def is_done(self, step: Any) -> bool: ...
    def read(self, step: Any) -> ModelRunnerOutput: ...
    def rebuild_state(self) -> None: ...
    def close(self) -> None: ...


class Outputs(Protocol):
    """What makes outputs of updates: `OutputProcessor`, or what takes its place where nobody reads text."""

    def add(self, request: Request, stream: bool = True) -> None: ...
    def process(
        self, updates: Sequence[RequestUpdate]
    ) -> tuple[list[RequestOutput], list[tuple[RequestUpdate, int, str]]]: ...


class _LostStepError(Exception):
    """The device failed at a step (`__cause__` is how), and what it held is lost."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose result has not been read: its plan, its batch, and the runner's handle of it."""

    plan: SchedulerOutput
    batch: HostBatch
    step: Any


class EngineCore:
    """One model, one scheduler, one device. All methods but `validate` belong to one thread.

    Attributes:
      max_request_tokens: most prompt + output tokens a request can have: the context, or the KV pool if smaller.
      host: room for KV blocks in host memory.
      stats: counts and gauges, refreshed by every step.
      step_times: how long steps take, learned from all that were run.
    """

    def __init__(
        self,
        *,
        model_name: str,
        config: ResolvedConfig,
        model_config: ModelConfig,
        generation: GenerationDefaults,
        tokenizer: Tokenizer,
        runner: Runner,
        buckets: ShapeBuckets | ReadyBuckets,
        num_blocks: int,
        host: HostSpace | None = None,
        recorder: StepRecorder | None = None,
        clock: Callable[[], float] = time.monotonic,
        builder: BatchBuilder | None = None,
        proposer: Proposer | None = None,
        outputs: Outputs | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.model_name = model_name
        self.config = config
        self.model_config = model_config
        self.generation = generation
        self.tokenizer = tokenizer
        self.max_request_tokens = min(config.max_model_len, num_blocks * config.block_size)
        self._max_unfinished = config.max_num_seqs + config.max_waiting
        self.stats = EngineStats(num_blocks=num_blocks, num_free_blocks=num_blocks)
        # All there will ever be, so that a reader in another thread never sees the dict grow.
        self.stats.by_bucket = {(b.tokens, b.seqs): BucketStats() for b in reversed(buckets.all_buckets())}
        self.stats.kv_cache = KVCacheSettings(
            config.block_size, config.dtype, config.enable_prefix_caching, host.num_blocks if host else 0
        )
        if isinstance(buckets, ReadyBuckets):
            self.stats.shapes = buckets.progress
        else:  # all are
            self.stats.shapes = ReadyShapes(len(self.stats.by_bucket), len(self.stats.by_bucket))
        self._recorder = recorder
        self._runner = runner
        self._builder = builder or BatchBuilder(
            buckets, block_size=config.block_size, padding_row=runner.padding_row
        )
        self._proposer = proposer
        self._drafting_seconds = 0.0  # of the step being taken
        self._launched: _Launched | None = None  # with overlap, between two calls of `step`
        self._gap = HostGap()
        self._lost = LostSteps(MAX_LOST_STEPS)
        self._clock = clock
        self.step_times = StepTimeModel(buckets.round_up)
        self.host = host or HostSpace()
        self._scheduler = create_scheduler(config, num_blocks, self.step_times, self.host)
        self._output_processor = outputs or OutputProcessor(tokenizer)
        vocab_size = model_config.vocab_size
        self._grammars = grammars or GrammarCompiler(tokenizer, vocab_size, generation.eos_token_ids)
        self._masks = TokenMasks(self._grammars, vocab_size)
        self._latencies = LatencyMeter(self.stats)
        self._groups: dict[str, list[str]] = {}  # unfinished sequences of each GenerationRequest
        self._ended: list[RequestUpdate] = []  # to report with the next step
        self._noted_steps: deque[StepView] | None = None  # while somebody watches
        self._seeds = random.Random(config.seed)
        self._next_seed = self._seeds.getrandbits(64)  # of the next request taken: one refused uses none up
        self._dead: str | None = None
        # Held by whoever reads or changes what is planned from; not while the device is waited for.
        self._books = threading.Lock()
        self._refresh_stats()

    # The front.

    def validate(self, request: GenerationRequest) -> None:
        """Check a request against the model and the engine's limits. Pure, and safe from any thread.

        Raises:
          InvalidRequestError: naming the parameter.
        """
        prompt, params = request.prompt_token_ids, request.params
        vocab_size, limit = self.model_config.vocab_size, self.max_request_tokens
        if not prompt:
            raise InvalidRequestError("the prompt must hold at least one token", param="prompt")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise InvalidRequestError(f"prompt token ids must be in 0..{vocab_size - 1}", param="prompt")
        wanted = 1 if params.max_tokens is None else params.max_tokens
        if len(prompt) + wanted > limit:
            asked = "at least 1 output token" if params.max_tokens is None else f"max_tokens={wanted}"
            also = f" and {asked} was asked for" if wanted else ""
            what = "context" if limit == self.config.max_model_len else "KV cache"
            raise InvalidRequestError(
                f"the {what} holds {limit} tokens, but the prompt has {len(prompt)}{also}",
                param="prompt" if len(prompt) + 1 > limit else "max_tokens",
                code="context_length_exceeded",
            )
        if params.min_tokens > limit - len(prompt):
            raise InvalidRequestError(
                f"min_tokens={params.min_tokens} does not fit: {limit - len(prompt)} tokens are left",
                param="min_tokens",
            )
        if params.n > self._max_unfinished:
            raise InvalidRequestError(
                f"n={params.n} is more than the {self._max_unfinished} sequences that can run or wait",
                param="n",
            )
        for name, ids in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids)):
            if any(token >= vocab_size for token in ids):
                raise InvalidRequestError(f"{name} ids must be in 0..{vocab_size - 1}", param=name)
        if params.grammar is not None:
            self._grammars.compile(params.grammar)

    def check_admission(self, request: GenerationRequest, now: float) -> None:
        """Refuse at once what `submit` would refuse because of load. Safe from any thread, also while a step runs,
        which `submit` would have to wait for. Who passes is counted until the next step is planned, and should be
        submitted by then, with `is_promised`.

        Args:
          now: seconds, of the engine's clock (which a recording must not see asked from here).

        Raises:
          OverloadedError
        """
        with self._books, self._refusals_shown():
            self._scheduler.check(*self._fan_out(request, now), now=now)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; its `n` continuations come out of `step`.

        Raises:
          InvalidRequestError, OverloadedError, EngineDeadError, ValueError (the id is in use).
        """
        self._require_alive()
        self.validate(request)
        if request.request_id in self._groups:
            raise ValueError(f"request id {request.request_id!r} is in use")
        now = self._clock()
        sequences = self._fan_out(request, now)
        with self._books, self._refusals_shown():
            self._scheduler.add(*sequences, now=now)
        if request.params.seed is None:
            self._next_seed = self._seeds.getrandbits(64)
        promised = request.targets.ttft_seconds is not None and self.step_times.is_ready
        for sequence in sequences:
            self._masks.start(sequence)
            self._output_processor.add(sequence, stream=request.stream)
            self._latencies.add(sequence, promised=promised)
        self._groups[request.request_id] = [sequence.request_id for sequence in sequences]

    @contextmanager
    def _refusals_shown(self) -> Iterator[None]:
        """An idle engine makes no step that would refresh its statistics."""
        try:
            yield
        except OverloadedError:
            self._scheduler.fill_stats(self.stats)
            raise

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is; its outputs come with the next step. Unknown ids are ignored."""
        with self._books:
            ended = self._scheduler.abort(self._groups.get(request_id, ()))
        self._ended += [RequestUpdate(sequence, []) for sequence in ended]

    def has_work(self) -> bool:
        """Whether `step` has anything to do, or to report: a failure in the background is for it to raise."""
        return self._has_steps() or self._runner.failure is not None

    def step(self) -> list[RequestOutput]:
        """One iteration: launch a step, and take in the result of one.

        That is the result of the same step; with `config.overlap`, of the one launched by the call before, so that the
        device works while the host does. Sequences whose end comes to light then have a row in the step just launched:
        it is computed for nothing, and ignored. A step in which somebody has a grammar is taken in before the next is
        planned.

        When the device fails, what it held is lost, and nothing else: its state is made anew, and all that ran begins
        again from the tokens it has, which gives the same ones. After `MAX_STEP_FAILURES` in a row whatever ran in the
        last ends with an error, and so does a request that has been through `MAX_LOST_STEPS` without a new token.

        Raises:
          EngineDeadError: the engine was closed, has died before, or a program could not be made.
          Exception: whatever else went wrong: in planning, in accepting a result, in making the state anew. The engine
            is dead then.
        """
        self._require_alive()
        with self._books:
            return self._step()

    def _step(self) -> list[RequestOutput]:
        started = self._clock()
        waited = 0.0
        updates: list[RequestUpdate] = []
        due = self._launched
        try:
            if due is not None and due.batch.flags & BatchFlag.MASK:
                # Its tokens decide what may follow them: the next step waits for them, and nobody has to miss it.
                self._launched = None
                updates, waited = self._take_in(due, is_last=True)
                self._launched = self._launch(started)
            else:
                launched = self._launch(started)
                if self.config.overlap:
                    self._launched = launched
                else:
                    due = launched
                if due is not None:
                    updates, waited = self._take_in(due, is_last=launched is due or launched is None)
        except _LostStepError as lost:
            due = None
            self._recover(lost.__cause__)
        except BaseException as error:
            self._dead = f"a step failed: {type(error).__name__}: {error}"
            raise
        outputs = self._finish_step(updates)
        elapsed = self._clock() - started
        step_seconds, self._drafting_seconds = elapsed - self._drafting_seconds, 0.0
        if due is not None and step_seconds > 0:
            self.step_times.observe(due.plan.work, step_seconds)
            bucket = due.batch.bucket
            self.stats.by_bucket[bucket.tokens, bucket.seqs].seconds += step_seconds
        self.stats.step_seconds += elapsed
        self.stats.host_seconds += elapsed - waited
        self.stats.host_gap_seconds = self._gap.seconds
        return outputs

    def _take_in(self, due: _Launched, *, is_last: bool) -> tuple[list[RequestUpdate], float]:
        """Read a step, and accept what it computed.

        Args:
          is_last: no other step has been launched behind it.

        Returns:
          (updates, seconds that the device was waited for)
        """
        asked = self._clock()
        result = self._on_device(self._runner.read, due.step)
        now = self._clock()
        if is_last:
            self._gap.busy(now)
        if due.batch.flags & BatchFlag.MASK:  # the masks made last are this step's
            result = replace(result, failed={**result.failed, **self._masks.take_failures()})
        updates = self._scheduler.update_from_output(due.plan, result)
        if self._masks.is_used:
            updates = [self._follow_grammar(update) for update in updates]
        self._scheduler.note_first_tokens(updates, now)
        self._latencies.tokens(updates, now)
        self._lost.worked(updates)
        self._count(due)
        self.stats.step_failures_in_a_row = 0
        return updates, now - asked

    def watch(self, is_watched: bool) -> None:
        """Note what each step is made of from now on, for `view`; or no longer."""
        self._noted_steps = deque(maxlen=MAX_NOTED_STEPS) if is_watched else None
        self._latencies.recent = (RecentTimes(), RecentTimes()) if is_watched else None

    def view(self) -> EngineView:
        """How the engine stands, for people to look at. Takes the steps noted; O(num_blocks) otherwise."""
        steps, stats = tuple(self._noted_steps or ()), self.stats
        if self._noted_steps is not None:
            self._noted_steps.clear()
        ttfts, gaps = self._latencies.recent or (RecentTimes(), RecentTimes())
        now = self._clock()
        with self._books:
            pool = self._scheduler.view_pool()
        return EngineView(
            steps=steps,
            pool=pool,
            running=stats.running_by_class,
            waiting=stats.waiting_by_class,
            waiting_tokens=stats.waiting_tokens,
            num_steps=stats.steps,
            prompt_tokens=stats.prompt_tokens,
            cached_prompt_tokens=stats.cached_prompt_tokens,
            generation_tokens=stats.generation_tokens,
            useful_tokens=stats.useful_tokens,
            padded_tokens=stats.padded_tokens,
            preemptions=stats.preemptions,
            ttft=ttfts.percentiles(now),
            itl=gaps.percentiles(now),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError with what is inconsistent. Slow; for tests and debugging."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Free the device memory. The engine accepts nothing afterwards. Idempotent."""
        if self._dead != "it was closed":
            self._dead = "it was closed"
            self._launched = None
            self._runner.close()
            if self._recorder is not None:
                self._recorder.close()

    # One step.

    def _launch(self, now: float) -> _Launched | None:
        """Plan a step and hand it to the device; None when nothing can be planned."""
        self._look_at_device()
        if self._proposer is not None and (wanted := self._scheduler.plan_drafts()):
            self._scheduler.take_drafts(wanted, self._drafts_for(self._proposer, wanted))
        plan = self._scheduler.schedule(now)
        if not plan.scheduled:
            return None
        batch = self._builder.build(plan)
        if batch.flags & BatchFlag.MASK:
            batch = replace(batch, masks=self._masks.for_batch(batch))
        self._look_at_device()
        step = self._on_device(self._runner.launch, plan, batch)
        self._gap.launched(self._clock())
        return _Launched(plan, batch, step)

    def _drafts_for(self, proposer: Proposer, wanted: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        if not proposer.uses_device:
            return proposer.propose(wanted)
        asked = self._clock()
        drafts = self._on_device(proposer.propose, wanted)
        self._drafting_seconds = self._clock() - asked
        if any(drafts):
            rounds = max(map(len, drafts))  # fewer than wanted, where blocks are too new to draft into
            self._scheduler.note_drafting(len(wanted), rounds, self._drafting_seconds)
        return drafts

    def _on_device[**P, R](self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Have the runner do something that may take long, or fail."""
        self._books.release()
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise _LostStepError from error
        finally:
            self._books.acquire()

    def _look_at_device(self) -> None:
        if self._launched is not None and not self._on_device(self._runner.is_done, self._launched.step):
            self._gap.busy(self._clock())

    def _recover(self, error: BaseException | None) -> None:
        """Go on after a failure of the device, or die where it can't be had back."""
        stats = self.stats
        stats.step_failures += 1
        stats.step_failures_in_a_row += 1
        self._launched = None
        self._gap.out_of_work()
        fault = f"a step failed: {type(error).__name__}: {error}"
        if self._runner.failure is not None:
            self._dead = fault
            raise EngineDeadError(f"the engine is not running: {fault}") from error
        try:
            self._runner.rebuild_state()
        except BaseException as second:
            self._dead = f"{fault}; its state could not be made anew: {type(second).__name__}: {second}"
            raise
        restarted = self._scheduler.restart_running()
        hopeless, in_a_row = self._lost.failed(restarted), stats.step_failures_in_a_row
        reason = f"the device failed at {MAX_LOST_STEPS} steps while this request ran and got no token"
        if in_a_row >= MAX_STEP_FAILURES:
            hopeless = restarted
            reason = (
                f"the device failed at {in_a_row} steps in a row, of which the last computed this request"
            )
        logger.error(
            "%s (%d in a row); %d sequences end with an error, %d are computed again",
            fault,
            in_a_row,
            len(hopeless),
            len(restarted) - len(hopeless),
            exc_info=error,
        )
        for request in hopeless:
            self._scheduler.finish(request.request_id, FinishReason.ERROR)
            self._ended.append(RequestUpdate(request, [], error=reason))

    def _follow_grammar(self, update: RequestUpdate) -> RequestUpdate:
        """End a request whose output is complete."""
        request, tokens = update.request, update.new_token_ids
        complete = self._masks.accept(request.request_id, tokens)
        if complete is None or (complete == len(tokens) and request.finish_reason is FinishReason.STOP):
            return update
        self._scheduler.finish_within(update, complete, FinishReason.STOP)
        logprobs = update.logprobs and update.logprobs[:complete]
        accepted_drafts = min(update.num_accepted_drafts, complete)
        return RequestUpdate(
            request, tokens[:complete], logprobs, update.prompt_logprobs, num_accepted_drafts=accepted_drafts
        )

    def _count(self, done: _Launched) -> None:
        batch = done.batch
        self.stats.count_step((batch.bucket.tokens, batch.bucket.seqs), batch.num_tokens, batch.num_rows)
        if self._noted_steps is not None:
            self._noted_steps.append(view_step(done.plan, batch.bucket.tokens, batch.bucket.seqs))
        if self._recorder is not None:
            self._recorder.add(batch.num_tokens + done.plan.num_padding_tokens, batch.num_rows)

    def _finish_step(self, updates: list[RequestUpdate]) -> list[RequestOutput]:
        ended, self._ended = self._ended, []
        outputs, stopped = self._output_processor.process([*ended, *updates])
        for update, num_kept, stop_string in stopped:
            self._scheduler.finish_within(update, num_kept, FinishReason.STOP, stop_string)
        for output in outputs:
            if output.finish_reason is not None:
                self._forget(output.request_id, output.index)
                sequence_id = _sequence_id(output.request_id, output.index)
                self._latencies.ended(sequence_id, output.finish_reason, output.num_output_tokens)
        if not self._has_steps():
            self._gap.out_of_work()
        self._refresh_stats()
        return outputs

    def _forget(self, group_id: str, index: int) -> None:
        members, sequence_id = self._groups[group_id], _sequence_id(group_id, index)
        members.remove(sequence_id)
        self._lost.ended(sequence_id)
        self._masks.forget(sequence_id)
        if self._proposer is not None:
            self._proposer.forget(sequence_id)
        if not members:
            del self._groups[group_id]

    def _has_steps(self) -> bool:
        return self._scheduler.has_unfinished or bool(self._ended) or self._launched is not None

    def _refresh_stats(self) -> None:
        self._scheduler.fill_stats(self.stats)
        self.stats.compilations = self._runner.num_compiled + self._runner.serving_compilations
        self.stats.serving_compilations = self._runner.serving_compilations

    def _require_alive(self) -> None:
        if self._dead is None and (failure := self._runner.failure) is not None:
            self._dead = f"a program could not be made: {type(failure).__name__}: {failure}"
        if self._dead is not None:
            raise EngineDeadError(f"the engine is not running: {self._dead}")

    # From a request to its sequences.

    def _fan_out(self, request: GenerationRequest, now: float) -> list[Request]:
        params = request.params
        seed = self._next_seed if params.seed is None else params.seed % 2**64
        room = self.max_request_tokens - len(request.prompt_token_ids)
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops.update(self.generation.eos_token_ids)
        arrival = now if request.arrival_time is None else request.arrival_time
        return [
            Request(
                request_id=_sequence_id(request.request_id, index),
                group_id=request.request_id,
                index=index,
                prompt_token_ids=tuple(request.prompt_token_ids),
                params=params,
                seed=_choice_seed(seed, index),
                max_tokens=room if params.max_tokens is None else params.max_tokens,
                stop_token_ids=frozenset(stops),
                priority=request.priority,
                service_class=request.service_class,
                client=request.client,
                targets=request.targets,
                is_promised=request.is_promised,
                cache_salt=request.cache_salt,
                arrival_time=arrival,
            )
            for index in range(params.n)
        ]


def _sequence_id(group_id: str, index: int) -> str:
    return f"{group_id}:{index}"


def _choice_seed(seed: int, index: int) -> int:
    """Choice 0 keeps the request's seed; the others get unrelated ones that depend on nothing else."""
    if index == 0:
        return seed
    digest = hashlib.sha256(seed.to_bytes(8, "little") + index.to_bytes(4, "little")).digest()
    return int.from_bytes(digest[:8], "little")
