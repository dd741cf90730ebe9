"""An engine whose "model" repeats its prompt, with handles for what a real one does only by accident.

Detokenising, stop strings and outputs are the real `OutputProcessor`'s. Tests use it where they must decide when a
step happens, or that one fails; everything else runs against a real engine.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np

from jaxserve.config import GenerationDefaults, ModelConfig
from jaxserve.errors import EngineDeadError, InvalidRequestError, QueueFullError
from jaxserve.latency_meter import LatencyMeter
from jaxserve.output_processor import OutputProcessor
from jaxserve.outputs import PooledTokens, RequestOutput, RequestUpdate, TokenLogprobs
from jaxserve.request import FinishReason, GenerationRequest, Request, RequestStatus
from jaxserve.stats import EngineStats
from jaxserve.tokenizer import Tokenizer
from tests.server.hand_engine import MODEL


@dataclass
class CopyEngine:
    """Has the interface of `jaxserve.engine.EngineCore`, as far as servers use it.

    Attributes:
      max_running: sequences that advance in a step; others wait.
      step_seconds: a step takes at least so long.
      may_step: cleared, the next step blocks until it is set.
      fail_with: the next step raises it.
      broken: ids of requests (any prefix) that end with FinishReason.ERROR at their next step.
      submitted, aborted: ids of generation requests, in order.
    """

    tokenizer: Tokenizer
    max_request_tokens: int = 2048
    max_waiting: int = 100
    max_running: int = 64
    step_seconds: float = 0.0
    fail_with: BaseException | None = None
    may_step: threading.Event = field(default_factory=threading.Event)
    submitted: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    break_next: bool = False
    model_name: str = "copy"
    generation: GenerationDefaults = field(default_factory=lambda: GenerationDefaults(eos_token_ids=(2,)))
    model_config: ModelConfig = MODEL
    closed: bool = False
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.stats = EngineStats(num_blocks=100, num_free_blocks=100)
        self._latencies = LatencyMeter(self.stats)
        self.may_step.set()
        self._outputs = OutputProcessor(self.tokenizer)
        self._running: list[Request] = []

    def validate(self, request: GenerationRequest) -> None:
        if len(request.prompt_token_ids) >= self.max_request_tokens:
            raise InvalidRequestError(
                f"the prompt has {len(request.prompt_token_ids)} tokens, the context {self.max_request_tokens}",
                code="context_length_exceeded",
            )
        if any(not 0 <= token < self.tokenizer.vocab_size for token in request.prompt_token_ids):
            raise InvalidRequestError("prompt: token id out of range", param="prompt")
        if any(token >= self.tokenizer.vocab_size for token in request.params.logit_bias or ()):
            raise InvalidRequestError("logit_bias: token id out of range", param="logit_bias")

    def check_admission(self, request: GenerationRequest, now: float) -> None:
        if len(self._running) + request.params.n > self.max_running + self.max_waiting:
            raise QueueFullError("the queue is full")

    def submit(self, request: GenerationRequest) -> None:
        if self.closed:
            raise EngineDeadError("closed")
        self.check_admission(request, 0.0)
        self.submitted.append(request.request_id)
        room = self.max_request_tokens - len(request.prompt_token_ids)
        for index in range(request.params.n):
            sequence = Request(
                request_id=f"{request.request_id}:{index}",
                group_id=request.request_id,
                index=index,
                prompt_token_ids=request.prompt_token_ids,
                params=request.params,
                seed=0,
                max_tokens=room
                if request.params.max_tokens is None
                else min(room, request.params.max_tokens),
                stop_token_ids=frozenset(request.params.stop_token_ids) | self.eos_token_ids,
            )
            sequence.num_cached_tokens = 0
            sequence.num_computed_tokens = sequence.num_prompt_tokens
            sequence.arrival_time = request.arrival_time or time.monotonic()
            self._latencies.add(sequence, promised=False)
            self._running.append(sequence)
            self._outputs.add(sequence, request.stream)

    def abort(self, request_id: str) -> None:
        for request in [one for one in self._running if one.group_id == request_id]:
            self._running.remove(request)
            self._outputs.discard(request.request_id)
            self._latencies.ended(request.request_id, FinishReason.ABORT, request.num_output_tokens)
            if request.index == 0:
                self.aborted.append(request_id)

    def has_work(self) -> bool:
        return bool(self._running)

    def step(self) -> list[RequestOutput]:
        started = time.monotonic()
        self.may_step.wait()
        time.sleep(self.step_seconds)
        if self.fail_with is not None:
            raise self.fail_with
        running = self._running[: self.max_running]
        for request in running:
            if request.scheduled_time is None:
                request.scheduled_time = started
        updates = [self._advance(request) for request in running]
        self._latencies.tokens(updates, time.monotonic())
        outputs, stopped = self._outputs.process(updates)
        for output in outputs:
            if output.finish_reason is not None:
                sequence_id = f"{output.request_id}:{output.index}"
                self._latencies.ended(sequence_id, output.finish_reason, output.num_output_tokens)
        ended = {update.request.request_id for update, *_ in stopped}
        self._running = [
            one for one in self._running if one.request_id not in ended and one.finish_reason is None
        ]
        return outputs

    def close(self) -> None:
        self.closed = True

    def next_token(self, request: Request) -> int:
        """What the "model" says next."""
        prompt = request.prompt_token_ids
        return prompt[request.num_output_tokens % len(prompt)]

    def _advance(self, request: Request) -> RequestUpdate:
        params, prompt = request.params, request.prompt_token_ids
        prompt_logprobs = None
        if params.prompt_logprobs is not None and not request.num_output_tokens:
            prompt_logprobs = [self._logprobs(token, params.prompt_logprobs) for token in prompt[1:]]
        if self.break_next:
            self.break_next = False
            self._end(request, FinishReason.ERROR)
            return RequestUpdate(request, [], error="logits are not finite")
        new: list[int] = []
        if request.max_tokens:
            new = [self.next_token(request)]
            request.output_token_ids += new
        if new and new[0] in request.stop_token_ids:
            request.stop_reason = new[0]
            self._end(request, FinishReason.STOP)
        elif request.num_output_tokens >= request.max_tokens:
            self._end(request, FinishReason.LENGTH)
        logprobs = None
        if params.logprobs is not None:
            logprobs = [self._logprobs(token, params.logprobs) for token in new]
        pooled = None
        if params.pooling is not None:
            pooled = PooledTokens(
                0, len(prompt), np.bincount(np.array(prompt) % 8, minlength=8).astype(float)
            )
        return RequestUpdate(request, new, logprobs, prompt_logprobs, pooled=pooled)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        request.status = RequestStatus.FINISHED

    def _logprobs(self, token: int, num_top: int) -> TokenLogprobs:
        top = [(token, -0.5), *((other, -2.0 - other) for other in range(300, 320))]
        return TokenLogprobs(token, -0.5, 1, tuple(top[:num_top]))
