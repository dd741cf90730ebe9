"""Where the outputs under way stand in their grammars, and which tokens they may go on with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

from jaxserve.batch.builder import HostBatch
from jaxserve.batch.masks import no_masks
from jaxserve.request import Request
from jaxserve.structured_output.compiler import GrammarCompiler


class TokenMasks:
    """One engine's; for its thread alone.

    A request keeps its place through preemption and failed steps: places follow the tokens of its output, and nothing
    on the device.
    """

    def __init__(self, compiler: GrammarCompiler, vocab_size: int) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._matchers: dict[str, LLMatcher] = {}
        self._failures: dict[str, str] = {}
        self._executor: LLExecutor | None = None

    def start(self, request: Request) -> None:
        """Follow a request's output, if it has a grammar. Raises: InvalidRequestError."""
        if request.params.grammar is not None:
            self._matchers[request.request_id] = self._compiler.compile(request.params.grammar)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._matchers.pop(request_id, None)

    @property
    def is_used(self) -> bool:
        """Whether any request is followed."""
        return bool(self._matchers)

    def accept(self, request_id: str, token_ids: Sequence[int]) -> int | None:
        """Take in new tokens of an output.

        Returns:
          After how many of them the output is complete, so that nothing can follow; None: it may go on.
        """
        matcher = self._matchers.get(request_id)
        if matcher is None:
            return None
        for count, token in enumerate(token_ids, start=1):
            if not matcher.consume_token(token):
                return None  # it has given up, which its next mask will show
            if matcher.is_stopped():
                return count
        return None

    def take_failures(self) -> dict[str, str]:
        """Requests whose masks could not be made since the call before: what was sampled for them means nothing."""
        failures, self._failures = self._failures, {}
        return failures

    def for_batch(self, batch: HostBatch) -> Callable[[], np.ndarray]:
        """What computes the masks of a batch's rows, packed as in `batch.masks`."""
        rows = [
            _Row(row.request_id, matcher, batch.first_row[at] if batch.first_row else at, row.draft_token_ids)
            for at, row in enumerate(batch.rows)
            if row.samples and (matcher := self._matchers.get(row.request_id)) is not None
        ]
        return partial(self._compute, rows, batch.bucket.seqs)

    def _compute(self, rows: list[_Row], num_rows: int) -> np.ndarray:
        allowed_SW = no_masks(num_rows, self._vocab_size)
        masks_SW = allowed_SW.view(np.int32)  # as llguidance wants them
        self._executor = self._executor or LLExecutor()
        if plain := [(row.matcher, row.at) for row in rows if not row.drafts]:
            fill_next_token_bitmask_par(self._executor, plain, masks_SW)
        if drafted := [(row.matcher, row.at, list(row.drafts)) for row in rows if row.drafts]:
            # Rows behind a draft that does not fit stay open: what they sample is not accepted.
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, masks_SW)
        for row in rows:
            if reason := self._compiler.fault(row.matcher, allowed_SW[row.at]):
                self._failures[row.request_id] = f"the output can't be kept to its grammar: {reason}"
        return allowed_SW


class _Row(NamedTuple):
    request_id: str
    matcher: LLMatcher
    at: int  # its first row of the batch
    drafts: tuple[int, ...]
