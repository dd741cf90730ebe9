"""What comes back for a prompt in offline use, and putting it together from the engine's outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.outputs import RequestOutput, TokenLogprobs
from jaxserve.prompt import PromptTokens
from jaxserve.request import FinishReason


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """One continuation of a prompt.

    Attributes:
      index: which of the n.
      text: without the stop string that ended it, unless `include_stop_str_in_output`.
      token_ids: every generated token, one that only ended the output (EOS, stop token) included.
      logprobs: one entry a token, where asked for.
      finish_reason: "stop", "length", "abort" or "error".
      stop_reason: the stop string or stop token id that ended it.
      error: one line, where finish_reason is "error".
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """Everything about one prompt.

    Attributes:
      prompt: its text (that of the filled-in template for a chat); None for a prompt given as token ids.
      prompt_token_ids: what the model saw.
      choices: `params.n` of them, in order.
      num_cached_tokens: prompt tokens that the prefix cache saved.
      prompt_logprobs: where asked for: one entry a prompt token, the first None.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    choices: list[ChoiceOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text


@dataclass(slots=True)
class PartialCompletion:
    """A completion that is being put together.

    Attributes:
      pieces: by choice, as they came.
    """

    prompt: PromptTokens
    num_choices: int
    pieces: dict[int, list[RequestOutput]] = field(default_factory=dict)

    def add(self, output: RequestOutput) -> None:
        self.pieces.setdefault(output.index, []).append(output)

    def complete(self) -> Completion:
        everything = [self.pieces[index] for index in range(self.num_choices)]
        return Completion(
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            choices=[_choice(pieces) for pieces in everything],
            num_cached_tokens=everything[0][-1].num_cached_tokens,
            prompt_logprobs=everything[0][0].prompt_logprobs,
        )


def _choice(pieces: list[RequestOutput]) -> ChoiceOutput:
    last = pieces[-1]
    assert last.finish_reason is not None
    logprobs = None
    if last.logprobs is not None:
        logprobs = [entry for piece in pieces for entry in piece.logprobs or []]
    return ChoiceOutput(
        index=last.index,
        text="".join(piece.text for piece in pieces),
        token_ids=[token for piece in pieces for token in piece.token_ids],
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
    )
