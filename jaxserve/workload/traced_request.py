"""One request of a workload, and the workload: what arrives when, whoever is to serve it."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field

from jaxserve.errors import ConfigError
from jaxserve.request import GenerationRequest, SamplingParams, ServiceClass, ServiceTargets


@dataclass(frozen=True, slots=True)
class TokenRange:
    """The token ids that prompts are made of: `first <= id < stop`. The default leaves out SmolLM2's control tokens."""

    first: int = 100
    stop: int = 49152


@dataclass(frozen=True, slots=True)
class Segment:
    """So many tokens that follow from a key alone: equal keys are equal text, and a shorter one is a beginning."""

    key: str
    length: int


@dataclass(frozen=True, slots=True)
class PromptRecipe:
    """A prompt as segments one after the other, so that a trace of long prompts is small in memory and on disk."""

    segments: tuple[Segment, ...]
    vocabulary: TokenRange = TokenRange()

    def __len__(self) -> int:
        return sum(segment.length for segment in self.segments)

    def token_ids(self) -> tuple[int, ...]:
        """The prompt. The same in every process, and for every seed but the key's."""
        ids = range(self.vocabulary.first, self.vocabulary.stop)
        return tuple(
            token for part in self.segments for token in random.Random(part.key).choices(ids, k=part.length)
        )


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request, when it arrives, and how long its answer is. The model's end-of-text ids do not end it.

    Attributes:
      prompt: token ids, or how to make them.
      max_tokens: tokens of its answer; only a stop string ends it earlier.
      arrival: seconds from the workload's start.
      service_class, priority, client, targets: see `GenerationRequest`.
      n, stop, temperature, seed: see `SamplingParams`.
      aborts_after: seconds from its arrival after which its client goes away; None stays.
    """

    prompt: tuple[int, ...] | PromptRecipe
    max_tokens: int
    arrival: float = 0.0
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    priority: int = 0
    client: str = ""
    targets: ServiceTargets = field(default_factory=ServiceTargets)
    n: int = 1
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    seed: int | None = None
    aborts_after: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Made anew at every access, if there is a recipe."""
        return self.prompt.token_ids() if isinstance(self.prompt, PromptRecipe) else self.prompt

    def request(self, request_id: str, *, started: float | None = None) -> GenerationRequest:
        """The request as the engine takes it.

        Args:
          started: when the workload began, by the engine's clock; None leaves the arrival to the submission.
        """
        params = SamplingParams(
            n=self.n,
            temperature=self.temperature,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop=self.stop,
            ignore_eos=True,
        )
        return GenerationRequest(
            request_id,
            self.prompt_token_ids,
            params,
            priority=self.priority,
            service_class=self.service_class,
            client=self.client,
            targets=self.targets,
            arrival_time=None if started is None else started + self.arrival,
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of their arrivals.

    Attributes:
      name: of the file without its suffix, or of whatever else it comes from.
    """

    name: str
    requests: tuple[TracedRequest, ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.num_prompt_tokens for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Of all `n` choices of every request."""
        return sum(request.n * request.max_tokens for request in self.requests)

    @property
    def seconds(self) -> float:
        """When the last request arrives."""
        return self.requests[-1].arrival if self.requests else 0.0

    def faster(self, factor: float) -> Workload:
        """The same requests, `factor` times as many a second; clients that go away do so after as long as before.

        Raises:
          ConfigError: no such factor makes sense.
        """
        if not 1e-9 <= factor <= 1e9:
            raise ConfigError(f"faster must be between 1e-9 and 1e9, got {factor:g}")
        return Workload(
            self.name,
            tuple(dataclasses.replace(item, arrival=item.arrival / factor) for item in self.requests),
        )
