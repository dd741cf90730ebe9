"""A request's life inside the engine: what was asked, a few counters, and how it ended.

There is no prefill phase and no decode phase. A request has `num_computed_tokens` (KV entries present) catching
up with `num_tokens` (prompt + output so far); whoever schedules it only ever moves the first towards the second.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from jaxserve.errors import InvalidRequestError
from jaxserve.grammar import Grammar

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_N = 128
MAX_SPECULATIVE_TOKENS = 64

Pooling = Literal["mean", "last"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # never run, or preempted: holds no blocks
    RUNNING = "running"
    FINISHED = "finished"


class ServiceClass(enum.StrEnum):
    """Who waits for whom: interactive work passes background work, which ages so that it is never starved."""

    INTERACTIVE = "interactive"
    BACKGROUND = "background"


@dataclass(frozen=True, slots=True)
class ServiceTargets:
    """What a request's client can live with (its SLO); None is no target.

    Attributes:
      ttft_seconds: from arrival to the first output token. A request that can't have it is refused at once.
      itl_seconds: between two output tokens. Prefill chunks of others are kept small enough for it.
    """

    ttft_seconds: float | None = None
    itl_seconds: float | None = None

    def met_by(self, ttft: float, mean_itl: float | None) -> bool:
        """Whether latencies, in seconds, are within the targets; `mean_itl`: None with a single token."""
        if self.ttft_seconds is not None and ttft > self.ttft_seconds:
            return False
        return self.itl_seconds is None or mean_itl is None or mean_itl <= self.itl_seconds


class FinishReason(enum.StrEnum):
    """Why a request ended; the values are those of the OpenAI API where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a prompt. Checked on construction, so an instance is always valid.

    Attributes:
      n: independent continuations of the prompt.
      temperature: 0 is greedy; anything below 1e-5 counts as 0.
      top_p: keep the smallest set of most likely tokens whose mass reaches it; the most likely one is always kept.
      top_k: keep the k most likely tokens; 0 or -1 keeps all, 1 is greedy.
      min_p: keep tokens at least `min_p` times as likely as the most likely one.
      presence_penalty, frequency_penalty: subtracted from the logits of tokens in the output so far (once; per
        occurrence), as in the OpenAI API.
      repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output
        (arXiv 1909.05858).
      logit_bias: token id -> number added to its logit.
      seed: root of this request's random numbers; None draws one from the engine's seed.
      max_tokens: most tokens to generate; None is as many as fit.
      min_tokens: no end (EOS, stop token, stop string) before that many.
      stop: strings that end the output; the text stops before them unless `include_stop_str_in_output`.
      stop_token_ids: ids that end the output, as the model's EOS ids do.
      ignore_eos: do not end at the model's EOS ids.
      logprobs: None, or how many of the most likely alternatives to report with each token's own logprob
        (0 reports the token's own alone). Logprobs are those of the model, before any of the settings above.
      prompt_logprobs: the same for the prompt's tokens.
      skip_special_tokens: leave special tokens out of the text.
      shown_special_token_ids: special tokens that stay in the text all the same.
      speculative_tokens: most draft tokens a step, where the engine speculates: None is as many as pay, a number is
        always that many, if there are so many; 0 is none. Tokens are the same in any case.
      grammar: what the output must look like; it ends (`stop`) where nothing can follow, also with `ignore_eos`
        and before `min_tokens`.
      pooling: no tokens are wanted but one vector for the whole prompt (see `jaxserve.pooling`): `max_tokens` is 0.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    shown_special_token_ids: frozenset[int] = frozenset()
    speculative_tokens: int | None = None
    grammar: Grammar | None = None
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        if isinstance(self.stop, str):
            set_field(self, "stop", (self.stop,))
        set_field(self, "stop", tuple(self.stop or ()))
        set_field(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.top_k == -1:
            set_field(self, "top_k", 0)
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        ):
            _require_number(name, getattr(self, name))
        _require_int("n", self.n, 1, MAX_N)
        _require_range("temperature", self.temperature, 0.0, 100.0)
        _require_range("top_p", self.top_p, 0.0, 1.0)
        _require_range("min_p", self.min_p, 0.0, 1.0)
        _require_int("top_k", self.top_k, 0, 2**31 - 1)
        _require_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not self.repetition_penalty > 0 or self.repetition_penalty > 1e6 or self.repetition_penalty < 1e-6:
            raise InvalidRequestError(
                f"repetition_penalty must be between 1e-6 and 1e6, got {self.repetition_penalty}",
                param="repetition_penalty",
            )
        if self.seed is not None:
            _require_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _require_int("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _require_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _require_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.speculative_tokens is not None:
            _require_int("speculative_tokens", self.speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)
        if self.pooling is not None and (self.pooling not in POOLINGS or self.max_tokens != 0 or self.n != 1):
            raise InvalidRequestError(
                f"pooling is one of {', '.join(POOLINGS)}, with max_tokens=0 and n=1; got {self.pooling!r}",
                param="pooling",
            )
        self._check_stops()
        self._check_logit_bias()

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop holds {len(self.stop)} strings, at most {MAX_STOP_STRINGS}", param="stop"
            )
        for text in self.stop:
            if not isinstance(text, str):
                raise InvalidRequestError(f"stop must hold strings, got {type(text).__name__}", param="stop")
            if not text:
                raise InvalidRequestError("stop must not hold an empty string", param="stop")
            if len(text) > MAX_STOP_STRING_CHARS:
                raise InvalidRequestError(
                    f"a stop string has {len(text)} characters, at most {MAX_STOP_STRING_CHARS}", param="stop"
                )
            try:
                text.encode()
            except UnicodeEncodeError:
                raise InvalidRequestError("a stop string has an unpaired surrogate", param="stop") from None
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids holds {len(self.stop_token_ids)} ids, at most {MAX_STOP_TOKEN_IDS}",
                param="stop_token_ids",
            )
        for token in self.stop_token_ids:
            _require_int("stop_token_ids", token, 0, 2**31 - 1)

    def _check_logit_bias(self) -> None:
        if not self.logit_bias:
            return
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"logit_bias holds {len(self.logit_bias)} entries, at most {MAX_LOGIT_BIAS}",
                param="logit_bias",
            )
        for token, bias in self.logit_bias.items():
            _require_int("logit_bias", token, 0, 2**31 - 1)
            _require_number("logit_bias", bias)
            _require_range("logit_bias", bias, -100.0, 100.0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5 or self.top_k == 1


def _require_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequestError(f"{name} must be a finite number, got {value!r}", param=name)


def _require_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low:g} and {high:g}, got {value}", param=name)


def _require_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, got {value!r}", param=name)
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low} and {high}, got {value}", param=name)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt as a front door hands it to the engine; `params.n` continuations come back.

    Attributes:
      request_id: unique among the unfinished ones.
      prompt_token_ids: at least one id.
      priority: lower runs first within its service class (as in vLLM); equal priorities share (see `client`).
      service_class: interactive requests pass background ones.
      client: whom it is for; clients that wait share the token budget fairly.
      targets: the latencies it asks for.
      cache_salt: prefixes are shared only between requests with the same salt.
      arrival_time: seconds, of the engine's clock (`time.monotonic()`); None is set on submission.
      stream: the caller wants an output after every step; otherwise one when a choice has ended.
      is_promised: `EngineCore.check_admission` has let it in: it is not refused for its target any more.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    priority: int = 0
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    client: str = ""
    targets: ServiceTargets = ServiceTargets()
    cache_salt: str | None = None
    arrival_time: float | None = None
    stream: bool = True
    is_promised: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """One sequence in the scheduler: one choice of a `GenerationRequest`.

    Stored: the counters below, in the order `num_computed_tokens <= num_planned_tokens <= num_tokens +
    num_pending_tokens` (asserted by `check_integrity()`). Everything else is derived. Between two steps without
    overlap, the planned tokens are the computed ones and none are pending.

    Attributes:
      request_id: id of this sequence, `"{group_id}:{index}"`.
      group_id: the `GenerationRequest` it came from; its members share the prompt's blocks.
      index: which of the `n` choices.
      seed: 64-bit root of the random numbers of this choice.
      max_tokens: most output tokens, already limited to what the context and the pool can hold.
      stop_token_ids: every id that ends it (the model's EOS ids included unless `ignore_eos`).
      num_computed_tokens: leading tokens whose KV entries are in the cache, by the results accepted so far.
      num_planned_tokens: leading tokens whose KV entries are there once every planned step has run.
      num_pending_tokens: tokens that planned steps sample, and that nobody has read yet.
      awaits_result: nothing more of it is planned until the result of the step under way is known, because it
        speculates, or because its grammar decides by that what may follow.
      num_draft_tokens: drafts that were verified for it.
      num_cached_tokens: prompt tokens that a prefix hit (or a fork) saved when it was first admitted.
      admitted_step: step of its latest admission; results of steps before it are stale.
      slot: row of the device's per-request sampling state while RUNNING, else None.
      scheduled_time, first_token_time, last_token_time: seconds, of the clock of `arrival_time`: when the step that it
        was first admitted to was planned; when tokens came. None as long as they have not.
    """

    request_id: str
    group_id: str
    index: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    client: str = ""
    targets: ServiceTargets = ServiceTargets()
    is_promised: bool = False
    cache_salt: str | None = None
    arrival_time: float = 0.0

    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_planned_tokens: int = 0
    num_pending_tokens: int = 0
    awaits_result: bool = False
    num_draft_tokens: int = 0
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    admitted_step: int = -1
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    slot: int | None = None
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_unplanned_tokens(self) -> int:
        """What is left for steps to come, as far as is known.

        1 for a request that decodes; more while a prompt (or a recomputed output) is being caught up; 0 when the step
        under way samples its last token, or when it awaits that step's result.
        """
        if self.awaits_result:
            return 0
        pending, num_output = self.num_pending_tokens, len(self.output_token_ids)
        if pending and num_output + pending >= self.max_tokens:
            return 0
        return len(self.prompt_token_ids) + num_output + pending - self.num_planned_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens `start..stop` of prompt + output, as one sequence."""
        split = len(self.prompt_token_ids)
        if stop <= split:
            return list(self.prompt_token_ids[start:stop])
        if start >= split:
            return self.output_token_ids[start - split : stop - split]
        return [*self.prompt_token_ids[start:], *self.output_token_ids[: stop - split]]
