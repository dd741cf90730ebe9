"""Accepted tokens to outputs: text, stop strings, logprobs, one `RequestOutput` after another."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.detokenizer import IncrementalDetokenizer
from jaxserve.outputs import RequestOutput, RequestTiming, RequestUpdate, TokenLogprobs
from jaxserve.pooling import Pool
from jaxserve.request import FinishReason, Request
from jaxserve.stop_strings import StopStringMatcher
from jaxserve.tokenizer import Tokenizer


class OutputProcessor:
    """Keeps what each unfinished request needs to turn its tokens into outputs. Used by the engine's thread alone."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._active: dict[str, _OutputState] = {}

    def add(self, request: Request, stream: bool = True) -> None:
        """Follow `request` from now on.

        Args:
          stream: an output after every step; otherwise a single one, the whole, when it ends.
        """
        self._active[request.request_id] = _OutputState(self._tokenizer, request, stream)

    def discard(self, request_id: str) -> None:
        """Forget a request; further updates of it are ignored. Unknown ids are, too."""
        self._active.pop(request_id, None)

    def process(
        self, updates: Sequence[RequestUpdate]
    ) -> tuple[list[RequestOutput], list[tuple[RequestUpdate, int, str]]]:
        """Take one step's updates, in order.

        Returns:
          The outputs for the front doors, and (update, how many of its tokens the output keeps, stop string) of every
          request that a stop string ended here: the scheduler takes it for running, or for ended by a later token.
          Requests that ended are forgotten.
        """
        outputs: list[RequestOutput] = []
        stopped: list[tuple[RequestUpdate, int, str]] = []
        for update in updates:
            request_id = update.request.request_id
            state = self._active.get(request_id)
            if state is None:
                continue
            output = state.take(update)
            if output is not None:
                outputs.append(output)
            if state.ended:
                del self._active[request_id]
                if state.matched is not None:
                    stopped.append((update, state.num_kept, state.matched))
        return outputs, stopped


class _OutputState:
    """One request: what has been shown, and what waits to be."""

    def __init__(self, tokenizer: Tokenizer, request: Request, stream: bool) -> None:
        params = request.params
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            request.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            shown_special_token_ids=params.shown_special_token_ids,
        )
        self._matcher = StopStringMatcher(params.stop, include_stop=params.include_stop_str_in_output)
        self._has_stop_strings = bool(params.stop)
        self._min_tokens = params.min_tokens
        self._stream = stream
        self.num_output_tokens = 0
        self.num_kept = 0  # of the newest update's tokens
        self._num_accepted_drafts = 0
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        wants_prompt = params.prompt_logprobs is not None and request.index == 0
        self._prompt_logprobs = _PromptLogprobs(request.num_prompt_tokens) if wants_prompt else None
        self._pool = Pool(params.pooling, request.num_prompt_tokens) if params.pooling is not None else None
        self._is_first = True
        self.ended = False

    @property
    def matched(self) -> str | None:
        """The stop string that ended the output."""
        return self._matcher.matched

    def take(self, update: RequestUpdate) -> RequestOutput | None:
        """Account for an update; the output it gives rise to, if any."""
        request = update.request
        if update.prompt_logprobs and self._prompt_logprobs is not None:
            self._prompt_logprobs.add(update)
        if update.pooled is not None and self._pool is not None:
            self._pool.add(update.pooled)
        before = self.num_output_tokens
        self._take_tokens(update)
        self.num_kept = self.num_output_tokens - before
        self._num_accepted_drafts += min(update.num_accepted_drafts, self.num_kept)
        if request.finish_reason is not None and self.matched is None:
            self._text.append(self._matcher.feed(self._detokenizer.finish(), armed=self._may_stop))
            self._text.append(self._matcher.flush())
        self.ended = request.finish_reason is not None or self.matched is not None
        if self.ended or (self._stream and (self._token_ids or any(self._text))):
            return self._emit(request, update.error)
        return None

    def _take_tokens(self, update: RequestUpdate) -> None:
        if update.request.finish_reason is None and self._logprobs is None and not self._has_stop_strings:
            # What most rows of a step are: nothing ends here, and nothing but text is wanted.
            self.num_output_tokens += len(update.new_token_ids)
            self._token_ids += update.new_token_ids
            for token_id in update.new_token_ids:
                self._text.append(self._detokenizer.append(token_id))
            return
        hidden = self._index_of_hidden_token(update)
        for index, token_id in enumerate(update.new_token_ids):
            self.num_output_tokens += 1
            self._token_ids.append(token_id)
            if self._logprobs is not None and update.logprobs is not None:
                self._logprobs.append(update.logprobs[index])
            if index == hidden:
                break
            text = self._detokenizer.append(token_id)
            if self._has_stop_strings:
                text = self._matcher.feed(text, armed=self._may_stop)
            self._text.append(text)
            if self.matched is not None:
                break  # tokens after it were computed for nothing

    def _index_of_hidden_token(self, update: RequestUpdate) -> int | None:
        """Where the token stands that only ended the request and is no part of its text."""
        request, tokens = update.request, update.new_token_ids
        by_token = (
            request.finish_reason is FinishReason.STOP and tokens and tokens[-1] in request.stop_token_ids
        )
        return len(tokens) - 1 if by_token and not request.params.include_stop_str_in_output else None

    @property
    def _may_stop(self) -> bool:
        return self.num_output_tokens > self._min_tokens

    def _emit(self, request: Request, error: str | None) -> RequestOutput:
        finish_reason, stop_reason = request.finish_reason, request.stop_reason
        if self.matched is not None:
            finish_reason, stop_reason = FinishReason.STOP, self.matched
        prompt_logprobs = None
        if self._prompt_logprobs is not None:
            prompt_logprobs = self._prompt_logprobs.take()
            self._prompt_logprobs = None
        output = RequestOutput(
            request_id=request.group_id,
            index=request.index,
            text="".join(self._text),
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens or 0,
            num_output_tokens=self.num_output_tokens,
            prompt_logprobs=prompt_logprobs,
            error=error,
            num_draft_tokens=request.num_draft_tokens,
            num_accepted_tokens=self._num_accepted_drafts,
            embedding=None if self._pool is None else self._pool.embedding(),
            timing=_timing(request) if self._is_first or self.ended else None,
        )
        self._is_first = False
        self._text, self._token_ids = [], []
        self._logprobs = None if self._logprobs is None else []
        return output


def _timing(request: Request) -> RequestTiming:
    return RequestTiming(
        request.arrival_time, request.scheduled_time, request.first_token_time, request.last_token_time
    )


class _PromptLogprobs:
    """Logprobs of the prompt's tokens, gathered over prefill chunks, by position."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._entries: list[TokenLogprobs | None] = [None] * num_prompt_tokens
        self._missing = set(range(1, num_prompt_tokens))

    def add(self, update: RequestUpdate) -> None:
        """Entries sent again by a recompute replace equal ones."""
        entries = update.prompt_logprobs or []
        # The step that reached `num_computed_tokens` scored the tokens up to that position.
        last = min(update.request.num_computed_tokens, len(self._entries) - 1)
        start = last - len(entries) + 1
        if start < 1:  # the counter was reset by the request's end: these go on where the last ones stopped
            start = min(self._missing, default=len(self._entries))
        for position, entry in enumerate(entries, start):
            if position < len(self._entries):
                self._entries[position] = entry
                self._missing.discard(position)

    def take(self) -> list[TokenLogprobs | None] | None:
        """One entry a prompt token, the first None; None if the request ended before all were there."""
        return None if self._missing else self._entries
