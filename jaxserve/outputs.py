"""What comes out: of the device for a step, of the scheduler for a request, of the engine for a front door."""

from __future__ import annotations

import operator
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING

import msgspec

from jaxserve.request import FinishReason, Request

if TYPE_CHECKING:  # whoever plans steps needs no numpy
    import numpy as np


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, natural logarithm, of the model's own distribution.

    Attributes:
      token_id, logprob: of the token that stands there.
      rank: 1 for the most likely token; ties count from the first.
      top: the most likely (token id, logprob) pairs, best first; as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PooledTokens:
    """What a step adds to a request's embedding.

    Attributes:
      start, count: the tokens that it comes from, by position.
      vector: float64 [D]; of their final hidden states the sum (mean pooling), or the last one.
    """

    start: int
    count: int
    vector: np.ndarray


@dataclass(frozen=True, slots=True)
class BlockTransfers:
    """KV blocks moved between the device and host memory, and the seconds that the engine's thread spent on it."""

    out_bytes: int = 0
    out_seconds: float = 0.0
    in_bytes: int = 0
    in_seconds: float = 0.0

    def __add__(self, other: BlockTransfers) -> BlockTransfers:
        return BlockTransfers(*map(operator.add, astuple(self), astuple(other)))

    @property
    def rates(self) -> tuple[float, float] | None:
        """Bytes a second to the host and back; None unless something was moved each way."""
        if not (self.out_seconds and self.in_seconds):
            return None
        return self.out_bytes / self.out_seconds, self.in_bytes / self.in_seconds


@dataclass(slots=True)
class ModelRunnerOutput:
    """What a step computed, by `Request.request_id`.

    Attributes:
      sampled_token_ids: new tokens of every request whose last scheduled token was its last known one. A list, so
        that a step with speculation can return several.
      logprobs: one entry a sampled token, for requests that asked.
      prompt_logprobs: for requests that asked: entries for the prompt positions that this step could score, in
        order. The entry of prompt position p (p >= 1) comes from the step that computed position p - 1.
      pooled: for requests that want an embedding; with mean pooling from every step that computes tokens of theirs.
      failed: request id -> reason, for rows whose logits were not finite.
      transfers: what was moved since the result before, as measured. The scheduler learns its transfer rates from this
        alone, so its decisions are a function of plans' results, step times and arrivals, all of which can be recorded.
    """

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    pooled: dict[str, PooledTokens] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    transfers: BlockTransfers = BlockTransfers()


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """When things happened to a sequence, in seconds of the engine's clock; None: not yet, or never."""

    arrival: float
    scheduled: float | None
    first_token: float | None
    last_token: float | None


# These two are structs and no dataclasses: there is one per running sequence and step, and they are made three times
# as fast.
class RequestUpdate(msgspec.Struct, frozen=True, gc=False):
    """What one step did to one request, as the scheduler accepted it.

    `new_token_ids` may be empty (a prefill chunk with prompt logprobs or a part of an embedding, or an end without a
    token).
    `request.finish_reason` tells whether it ended. A stop or EOS token that ended it is the last of `new_token_ids`.
    The first `num_accepted_drafts` of these were drafts.
    """

    request: Request
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    pooled: PooledTokens | None = None
    num_accepted_drafts: int = 0


class RequestOutput(msgspec.Struct, frozen=True, gc=False):
    """What is new about one choice of a `GenerationRequest`. Deltas: joined, they are the whole answer.

    Attributes:
      request_id, index: which request, which of its n choices.
      text: characters that are certain by now (never half a character, never the beginning of a stop string).
      token_ids, logprobs: new tokens. A token that only ended the request (EOS, stop token) is among them; tokens
        after a stop string are not.
      finish_reason, stop_reason: set exactly once, on the choice's last output; `stop_reason` is the stop string
        or stop token id where one ended it.
      error: one line, with finish_reason ERROR.
      num_prompt_tokens, num_cached_tokens, num_output_tokens: totals so far.
      num_draft_tokens, num_accepted_tokens: drafts verified for it so far, and those of them in the output.
      prompt_logprobs: on the first output of choice 0 where asked for: one entry a prompt token, the first None.
      embedding: on the last output, where pooling was asked for: float32 [D], of length 1.
      timing: on a choice's first output, and on its last.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    embedding: np.ndarray | None = None
    timing: RequestTiming | None = None
