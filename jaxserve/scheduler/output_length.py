"""How many tokens a request is likely to produce yet, learned from those that have ended.

An output is taken to end with the same chance after each token, so what is left does not depend on what has come:
the chance is (ends seen) / (tokens seen), over a fading window, in which an output cut off by its limit counts with
its tokens and no end (the maximum-likelihood estimate of a censored geometric distribution).
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.request import FinishReason, Request

_FADE = 0.99  # weight of an output after one more: a window of a hundred


@dataclass(slots=True)
class OutputLengths:
    """Belongs to one scheduler. Begins as if one output of 256 tokens had been seen."""

    _ends: float = 1.0
    _tokens: float = 256.0

    def observe(self, request: Request) -> None:
        """Learn from a request that has ended."""
        if not _may_stop(request) or not request.output_token_ids:
            return
        self._ends = _FADE * self._ends + (request.finish_reason is FinishReason.STOP)
        self._tokens = _FADE * self._tokens + len(request.output_token_ids)

    def expected(self, request: Request) -> int:
        """Output tokens to come, at least 1 where there can be one."""
        most = request.max_tokens - len(request.output_token_ids)
        if most <= 1 or not _may_stop(request):
            return most
        chance = min(self._ends / self._tokens, 1.0)
        if chance * most < 1e-6:
            return most
        return max(1, round((1.0 - (1.0 - chance) ** most) / chance))


def _may_stop(request: Request) -> bool:
    """Whether anything but its length can end the output."""
    return bool(request.stop_token_ids or request.params.stop)
