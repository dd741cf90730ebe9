"""The same conversations through an engine that speculates and one that does not, in turn and in one process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from jaxserve.bench.static import median
from jaxserve.config import EngineConfig, ResolvedConfig, replace
from jaxserve.engine import EngineCore
from jaxserve.engine_factory import create_engine
from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.progress import Progress
from jaxserve.request import GenerationRequest, SamplingParams

OFF, ON = "without", "with"


@dataclass(frozen=True, slots=True)
class Texts:
    """Questions of one kind.

    Attributes:
      temperature: of the answers; seeds are the streams' numbers.
    """

    name: str
    temperature: float
    messages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pass:
    """So many streams of one kind at once, again and again until every message was asked.

    Attributes:
      seconds: in all.
      token_ids: of each answer.
      decode_seconds, decode_tokens: summed over the streams, from the first token to the last; tokens past the first.
      draft_tokens, accepted_tokens: verified, and of these in answers.
      steps: forward passes.
    """

    seconds: float
    token_ids: tuple[tuple[int, ...], ...]
    decode_seconds: float
    decode_tokens: int
    draft_tokens: int
    accepted_tokens: int
    steps: int

    @property
    def seconds_per_token(self) -> float:
        """TPOT, the mean over all tokens past the first."""
        return self.decode_seconds / max(self.decode_tokens, 1)


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind at one number of streams; passes in the order they were made."""

    texts: Texts
    streams: int
    passes: dict[str, tuple[Pass, ...]]

    @property
    def speedup(self) -> float:
        """Median time per output token, without over with."""
        return median(self.passes[OFF], lambda p: p.seconds_per_token) / median(
            self.passes[ON], lambda p: p.seconds_per_token
        )

    @property
    def throughput_ratio(self) -> float:
        """Median time of whole passes, without over with."""
        return median(self.passes[OFF], lambda p: p.seconds) / median(self.passes[ON], lambda p: p.seconds)

    @property
    def acceptance(self) -> float | None:
        """Accepted drafts over verified ones; None: there were none."""
        drafts = sum(p.draft_tokens for p in self.passes[ON])
        return sum(p.accepted_tokens for p in self.passes[ON]) / drafts if drafts else None

    @property
    def num_equal(self) -> int:
        """Answers whose tokens are the same with and without."""
        both = zip(self.passes[OFF][0].token_ids, self.passes[ON][0].token_ids, strict=True)
        return sum(one == other for one, other in both)

    @property
    def num_answers(self) -> int:
        return len(self.passes[ON][0].token_ids)

    def milliseconds(self, name: str) -> float:
        """Median time per output token."""
        return 1e3 * median(self.passes[name], lambda p: p.seconds_per_token)


@dataclass(frozen=True, slots=True)
class Result:
    """`config`: of the engine that speculates; the other differs in that alone."""

    model: str
    config: ResolvedConfig
    max_tokens: int
    cells: tuple[Cell, ...]


def read_texts(path: Path) -> tuple[Texts, ...]:
    """The kinds in a file.

    Raises:
      ConfigError: it is none.
    """
    try:
        kinds = json.loads(path.read_text())
        return tuple(
            Texts(name, float(kind["temperature"]), tuple(kind["messages"])) for name, kind in kinds.items()
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: no file of texts, see workloads/README.md ({error!r})") from None


def measure_speculation(
    model: str,
    options: EngineConfig,
    kinds: Sequence[Texts],
    *,
    streams: Sequence[int],
    max_tokens: int,
    repeats: int,
    progress: Progress | None = None,
    announce: Callable[[str], None] = lambda line: None,
) -> Result:
    """Run every kind at every number of streams, on both engines in turn, without prefix cache.

    Args:
      options: of the engine that speculates.

    Raises:
      JaxserveError: the model, the options or a text can't be used.
    """
    common = replace(options, enable_prefix_caching=False)
    cells = []
    with ExitStack() as stack:
        engines = {}
        for name, speculative in ((OFF, None), (ON, options.speculative)):
            announce(f"engine: {name} speculation")
            engine = create_engine(model, replace(common, speculative=speculative), progress=progress)
            engines[name] = stack.enter_context(closing(engine))
        for kind in kinds:  # learns what steps cost, and how often drafts are right
            for engine in engines.values():
                run_streams(engine, kind, max(streams), max_tokens)
        for kind in kinds:
            for count in streams:
                passes: dict[str, list[Pass]] = {OFF: [], ON: []}
                for repeat in range(repeats):  # A B, B A, ...: a machine that slows down slows both
                    order = list(engines) if repeat % 2 == 0 else list(engines)[::-1]
                    for name in order:
                        passes[name].append(run_streams(engines[name], kind, count, max_tokens))
                cell = Cell(kind, count, {name: tuple(made) for name, made in passes.items()})
                cells.append(cell)
                announce(f"{kind.name}, {count} streams: {cell.speedup:.2f} times as fast")
        return Result(engines[ON].model_name, engines[ON].config, max_tokens, tuple(cells))


def run_streams(engine: EngineCore, texts: Texts, streams: int, max_tokens: int) -> Pass:
    """Ask `streams` messages at once of an idle engine, until all answers have ended; then the next ones."""
    counts = engine.stats.speculation
    before = counts.draft_tokens, counts.accepted_tokens, engine.stats.steps
    tokens: list[list[int]] = []
    decode_seconds = 0.0
    started = time.perf_counter()
    for wave in range(0, len(texts.messages), streams):
        answers, seconds = _run_wave(engine, texts, range(wave, wave + streams), max_tokens)
        tokens += answers
        decode_seconds += seconds
    counts = engine.stats.speculation
    return Pass(
        seconds=time.perf_counter() - started,
        token_ids=tuple(map(tuple, tokens)),
        decode_seconds=decode_seconds,
        decode_tokens=sum(max(len(ids) - 1, 0) for ids in tokens),
        draft_tokens=counts.draft_tokens - before[0],
        accepted_tokens=counts.accepted_tokens - before[1],
        steps=engine.stats.steps - before[2],
    )


def _run_wave(
    engine: EngineCore, texts: Texts, numbers: range, max_tokens: int
) -> tuple[list[list[int]], float]:
    """(tokens of each answer, seconds from first to last token, summed)."""
    tokens: dict[str, list[int]] = {}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for number in numbers:
        message = texts.messages[number % len(texts.messages)]
        prompt = engine.tokenizer.encode_chat([{"role": "user", "content": message}])
        params = SamplingParams(temperature=texts.temperature, seed=number, max_tokens=max_tokens)
        engine.submit(GenerationRequest(f"stream-{number}", tuple(prompt), params))
        tokens[f"stream-{number}"] = []
    while engine.has_work():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.error is not None:
                raise InvalidRequestError(f"a stream failed: {output.error}")
            if output.token_ids:
                first.setdefault(output.request_id, now)
                last[output.request_id] = now
                tokens[output.request_id] += output.token_ids
    return list(tokens.values()), sum(last.values()) - sum(first.values())
