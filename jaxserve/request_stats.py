"""How sequences fared: distributions of what they asked for, and of what it took.

Bounds are those of vLLM's metrics of the same names, so that heat maps of both have the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from jaxserve.distribution import Distribution

_FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
PHASE_BOUNDS = (
    *(0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CHOICES_BOUNDS = (1, 2, 5, 10, 20)
_LONGEST_CONTEXT = 131_072


def token_bounds(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, ... up to `most`."""
    return tuple(m * 10**e for e in range(len(str(most))) for m in (1, 2, 5) if m * 10**e <= most)


_lengths = partial(Distribution, token_bounds(_LONGEST_CONTEXT))
_phase = partial(Distribution, PHASE_BOUNDS)


@dataclass(slots=True)
class RequestStats:
    """Seconds, tokens or choices. Streamed or not makes no difference: tokens are timed when the engine has them.

    Attributes:
      first_token: from arrival to a sequence's first token.
      between_tokens: between a sequence's tokens; of several tokens that come at once each has its part.
      per_output_token: its mean, of sequences that ended with at least two tokens.
      queue: from arrival to the first step; prefill: from there to the first token; decode: to the last one;
        inference: both together. Of sequences that ended, where it took place.
      prompt_tokens, generation_tokens: of sequences that ended.
      longest_generation: tokens of a request's longest choice; choices: how many it asked for; when all have ended.
      max_tokens: that could be generated at most, of sequences that ended.
      step_tokens: computed for somebody in a step.
    """

    first_token: Distribution = field(default_factory=partial(Distribution, _FIRST_TOKEN_BOUNDS))
    between_tokens: Distribution = field(default_factory=partial(Distribution, _TOKEN_BOUNDS))
    per_output_token: Distribution = field(default_factory=partial(Distribution, _TOKEN_BOUNDS))
    queue: Distribution = field(default_factory=_phase)
    prefill: Distribution = field(default_factory=_phase)
    decode: Distribution = field(default_factory=_phase)
    inference: Distribution = field(default_factory=_phase)
    prompt_tokens: Distribution = field(default_factory=_lengths)
    generation_tokens: Distribution = field(default_factory=_lengths)
    longest_generation: Distribution = field(default_factory=_lengths)
    choices: Distribution = field(default_factory=partial(Distribution, _CHOICES_BOUNDS))
    max_tokens: Distribution = field(default_factory=_lengths)
    step_tokens: Distribution = field(default_factory=partial(Distribution, _STEP_BOUNDS))
