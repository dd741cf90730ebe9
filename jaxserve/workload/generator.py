"""Workloads made up from a few numbers and a seed. The same ones give the same requests, token for token."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, fields

from jaxserve.errors import ConfigError
from jaxserve.request import ServiceClass, ServiceTargets
from jaxserve.workload.arrivals import Arrivals, Lengths
from jaxserve.workload.traced_request import PromptRecipe, Segment, TokenRange, TracedRequest, Workload

_LONGEST = 1e9  # seconds, of anything
_STOPS = ("\n\n", ". ", "?", " and", "def ")


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """What a workload is like. Shares are between 0 and 1, and drawn for every request by itself.

    Attributes:
      num_requests: how many.
      arrivals: when they come.
      prompt, output: tokens of a prompt (in a chat: of what its user says in one turn) and of an answer.
      context: most tokens of prompt and answer together; longer ones are cut, and a chat ends there.
      background_share: requests of the background class; they are single ones.
      chat_share: of the interactive ones, those that are turns of chats. A turn's prompt is the system prompt and all
        turns before with their answers, so it begins with the prompt of the turn before. (The answers in it are made
        up as well: what the model will say isn't known here.)
      turns: mean turns of a chat. think_seconds: least time between two turns' arrivals.
      system_prompts, system_tokens: how many system prompts there are, one for each chat, and tokens of each.
      clients, client_skew: how many clients there are; client i is drawn in proportion to 1 / (i + 1) ** skew.
      targets: of interactive requests.
      priorities: levels of priority, drawn evenly from 0.. for every single request.
      n_share, most_n: requests with several choices: 2 to `most_n`.
      stop_share: requests with stop strings, which may end them early.
      sampled_share: requests with a temperature (0.8) and a seed; the others are greedy.
      abort_share, abort_seconds: requests whose client goes away, and mean seconds until then.
      vocabulary: of prompts.
    """

    num_requests: int = 100
    arrivals: Arrivals = field(default_factory=lambda: Arrivals(rate=1.0))
    prompt: Lengths = field(default_factory=lambda: Lengths(128, 1.0))
    output: Lengths = field(default_factory=lambda: Lengths(64, 0.8))
    context: int = 2048
    background_share: float = 0.0
    chat_share: float = 0.0
    turns: float = 4.0
    think_seconds: float = 5.0
    system_prompts: int = 1
    system_tokens: int = 64
    clients: int = 1
    client_skew: float = 0.0
    targets: ServiceTargets = field(default_factory=ServiceTargets)
    priorities: int = 1
    n_share: float = 0.0
    most_n: int = 4
    stop_share: float = 0.0
    sampled_share: float = 0.0
    abort_share: float = 0.0
    abort_seconds: float = 5.0
    vocabulary: TokenRange = field(default_factory=TokenRange)

    def __post_init__(self) -> None:
        for share in (item.name for item in fields(self) if item.name.endswith("_share")):
            if not 0 <= getattr(self, share) <= 1:
                raise ConfigError(f"{share} must be between 0 and 1, got {getattr(self, share):g}")
        for name, least, most in (
            ("num_requests", 1, 10**8),
            ("context", 2, 10**8),
            ("turns", 1, 10**6),
            ("think_seconds", 0, _LONGEST),
            ("system_prompts", 1, 10**6),
            ("system_tokens", 0, 10**8),
            ("clients", 1, 10**6),
            ("client_skew", 0, 10),
            ("priorities", 1, 10**6),
            ("most_n", 2, 10**3),
        ):
            if not least <= (value := getattr(self, name)) <= most:
                raise ConfigError(f"{name} must be between {least} and {most:g}, got {value:g}")
        for name, value in (
            ("abort_seconds", self.abort_seconds),
            ("ttft_target", self.targets.ttft_seconds),
            ("itl_target", self.targets.itl_seconds),
        ):
            if value is not None and not 0 < value <= _LONGEST:
                raise ConfigError(f"{name} must be more than 0 and at most {_LONGEST:g}, got {value:g}")
        if not 0 <= self.vocabulary.first < self.vocabulary.stop <= 2**31:
            raise ConfigError(f"{self.vocabulary.first}..{self.vocabulary.stop - 1} is no range of token ids")


@dataclass(slots=True)
class _Chat:
    """One conversation.

    Attributes:
      segments: of what was said so far, the system prompt first.
      last_arrival: of its newest turn.
    """

    name: str
    client: str
    segments: list[Segment]
    last_arrival: float
    num_turns: int = 0


def generate(spec: WorkloadSpec, seed: int, *, name: str = "generated") -> Workload:
    """Make the requests up.

    Args:
      seed: another one gives other arrivals, lengths, texts and choices.
    """
    rng = random.Random(f"jaxserve workload {seed}")
    return Workload(name, tuple(_Generator(spec, rng, f"{seed}").requests()))


class _Generator:
    def __init__(self, spec: WorkloadSpec, rng: random.Random, key: str) -> None:
        self._spec = spec
        self._rng = rng
        self._key = key  # of all texts: two seeds share none
        self._chats: list[_Chat] = []  # open ones, the longest idle first
        self._num_chats = 0
        self._client_weights = [1 / (i + 1) ** spec.client_skew for i in range(spec.clients)]

    def requests(self) -> list[TracedRequest]:
        times = itertools.islice(self._spec.arrivals.times(self._rng), self._spec.num_requests)
        return [self._request(index, round(arrival, 6)) for index, arrival in enumerate(times)]

    def _request(self, index: int, arrival: float) -> TracedRequest:
        spec, rng = self._spec, self._rng
        background = rng.random() < spec.background_share
        output = min(spec.output.draw(rng), spec.context - 1)
        said = min(spec.prompt.draw(rng), spec.context - output)
        if not background and rng.random() < spec.chat_share:
            client, segments = self._turn(arrival, said, output)
            output = min(output, spec.context - sum(segment.length for segment in segments))
        else:
            client, segments = self._client(), (Segment(f"{self._key}/request/{index}", said),)
        sampled = rng.random() < spec.sampled_share
        several = rng.random() < spec.n_share
        stops = rng.random() < spec.stop_share
        aborts = rng.random() < spec.abort_share
        return TracedRequest(
            PromptRecipe(segments, spec.vocabulary),
            output,
            arrival,
            service_class=ServiceClass.BACKGROUND if background else ServiceClass.INTERACTIVE,
            priority=rng.randrange(spec.priorities),
            client=client,
            targets=ServiceTargets() if background else spec.targets,
            n=rng.randint(2, spec.most_n) if several else 1,
            stop=tuple(rng.sample(_STOPS, rng.randint(1, 2))) if stops else (),
            temperature=0.8 if sampled else 0.0,
            seed=rng.getrandbits(63) if sampled or several else None,
            aborts_after=round(rng.expovariate(1 / spec.abort_seconds), 6) if aborts else None,
        )

    def _turn(self, arrival: float, said: int, output: int) -> tuple[str, tuple[Segment, ...]]:
        """Client and prompt of the next turn of the chat that has been idle longest, or of a new one."""
        spec, rng = self._spec, self._rng
        chat = self._idle_chat(arrival, said + output) or self._new_chat()
        known = sum(segment.length for segment in chat.segments)
        chat.segments.append(
            Segment(f"{chat.name}/said/{chat.num_turns}", min(said, spec.context - 1 - known))
        )
        prompt = tuple(chat.segments)
        chat.segments.append(Segment(f"{chat.name}/answer/{chat.num_turns}", output))
        chat.num_turns += 1
        chat.last_arrival = arrival
        if rng.random() >= 1 / spec.turns:
            self._chats.append(chat)
        return chat.client, prompt

    def _idle_chat(self, arrival: float, num_tokens: int) -> _Chat | None:
        spec = self._spec
        while self._chats and self._chats[0].last_arrival + spec.think_seconds <= arrival:
            chat = self._chats.pop(0)
            if sum(segment.length for segment in chat.segments) + num_tokens <= spec.context:
                return chat  # otherwise its context is full, and it ends
        return None

    def _new_chat(self) -> _Chat:
        spec = self._spec
        self._num_chats += 1
        system = Segment(
            f"{self._key}/system/{self._rng.randrange(spec.system_prompts)}",
            min(spec.system_tokens, spec.context - 2),
        )
        segments = [system] if system.length else []
        return _Chat(f"{self._key}/chat/{self._num_chats}", self._client(), segments, 0.0)

    def _client(self) -> str:
        [index] = self._rng.choices(range(self._spec.clients), self._client_weights)
        return f"client-{index}"
