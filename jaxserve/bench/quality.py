"""What a smaller number format costs in quality: perplexity on a text, and agreement with float32's greedy answers.

Everything is computed by the engine itself: prompts are scored by `prompt_logprobs`, answers are greedy requests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxserve.bench.environment import describe_environment
from jaxserve.config import DType, EngineConfig, Quantization, replace
from jaxserve.engine import EngineCore
from jaxserve.engine_factory import create_engine
from jaxserve.errors import ConfigError
from jaxserve.outputs import TokenLogprobs
from jaxserve.progress import Progress
from jaxserve.request import GenerationRequest, SamplingParams

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """A number format: of activations, KV cache and whatever `quantization` leaves alone, and that."""

    dtype: DType
    quantization: Quantization | None = None

    def __str__(self) -> str:
        return self.dtype if self.quantization is None else f"{self.quantization}, else {self.dtype}"


REFERENCE = Variant("float32")
VARIANTS = (Variant("bfloat16"), Variant("float32", "int8"), Variant("bfloat16", "int8"))


@dataclass(frozen=True, slots=True)
class Exam:
    """What every variant is asked.

    Attributes:
      text: scored in windows of `window` tokens, of which the first has no score.
      prompts: each is continued greedily for `num_tokens` tokens.
    """

    text: str
    prompts: tuple[str, ...]
    window: int = 1024
    num_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Quality:
    """What a variant scored.

    Attributes:
      perplexity: exp of the mean negative log-probability of the text's scored tokens.
      equal: share of the prompts whose answers are the reference's, all tokens of them.
      mean_first_difference: over the other prompts, answer tokens before the first that differs; None without any.
      teacher_forced: share of the reference's answer tokens that the variant, given all tokens before, thinks best.
    """

    perplexity: float
    equal: float
    mean_first_difference: float | None
    teacher_forced: float


@dataclass(frozen=True, slots=True)
class Report:
    """Qualities of the reference and of every variant, in order.

    Attributes:
      num_scored: tokens of the text that have a score.
    """

    model: str
    exam: Exam
    num_scored: int
    qualities: tuple[tuple[Variant, Quality], ...]


def read_exam(text: Path, prompts: Path, *, window: int = 1024, limit: int | None = None) -> Exam:
    """Read a text, and a JSON list of prompts.

    Args:
      limit: keep the first so many prompts.

    Raises:
      ConfigError: one line that names the file.
    """
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{text}: {error}") from error
    try:
        wanted = json.loads(prompts.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{prompts}: {error}") from error
    if not isinstance(wanted, list) or not wanted or not all(isinstance(x, str) and x for x in wanted):
        raise ConfigError(f"{prompts}: must be a list of at least one text, none empty")
    if not content:
        raise ConfigError(f"{text}: is empty")
    return Exam(content, tuple(wanted[:limit]), window)


def measure_quality(
    model: str,
    exam: Exam,
    options: EngineConfig,
    *,
    variants: Sequence[Variant] = VARIANTS,
    max_windows: int | None = None,
    progress: Progress | None = None,
    announce: Callable[[str], None] = lambda line: None,
) -> Report:
    """Put the same questions to an engine of each variant, one engine after the other, the reference first.

    Args:
      options: of every engine; number formats, prefix cache and queue limit are chosen here.
      max_windows: score only so many windows.

    Raises:
      JaxserveError: the model, the options or a prompt can't be used.
    """
    qualities: list[tuple[Variant, Quality]] = []
    reference: list[Tokens] | None = None
    for variant in (REFERENCE, *variants):
        announce(f"engine: {variant}")
        chosen = replace(
            options,
            dtype=variant.dtype,
            quantization=variant.quantization,
            enable_prefix_caching=False,
            max_waiting=max(options.max_waiting, len(exam.prompts)),
        )
        with closing(create_engine(model, chosen, progress=progress)) as engine:
            windows = _windows(engine, exam)[:max_windows]
            scores = [entry.logprob for window in _score(engine, windows) for entry in window]
            prompts = [tuple(engine.tokenizer.encode(prompt)) for prompt in exam.prompts]
            answers = _answer(engine, prompts, exam.num_tokens)
            reference = reference or answers
            followed = _score(engine, [p + r for p, r in zip(prompts, reference, strict=True)])
            quality = _quality(scores, reference, answers, followed)
            qualities.append((variant, quality))
            announce(f"perplexity {quality.perplexity:.4f}, teacher-forced {quality.teacher_forced:.2%}")
            name = engine.model_name
    return Report(name, exam, len(scores), tuple(qualities))


def _windows(engine: EngineCore, exam: Exam) -> list[Tokens]:
    """The text in windows; a last one of a single token has nothing to score."""
    ids = engine.tokenizer.encode(exam.text)
    windows = [tuple(ids[start : start + exam.window]) for start in range(0, len(ids), exam.window)]
    return [window for window in windows if len(window) > 1]


def _quality(
    scores: Sequence[float],
    reference: Sequence[Tokens],
    answers: Sequence[Tokens],
    followed: Sequence[Sequence[TokenLogprobs]],
) -> Quality:
    """`followed`: scores of every prompt and the reference's answer to it."""
    pairs = list(zip(reference, answers, strict=True))
    different = [
        next(i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b)
        for pair in pairs
        if pair[0] != pair[1]
    ]
    agreed = [
        entry.rank == 1
        for answer, entries in zip(reference, followed, strict=True)
        for entry in entries[-len(answer) :]
    ]
    return Quality(
        perplexity=math.exp(-math.fsum(scores) / len(scores)),
        equal=1 - len(different) / len(pairs),
        mean_first_difference=sum(different) / len(different) if different else None,
        teacher_forced=sum(agreed) / len(agreed),
    )


def _score(engine: EngineCore, sequences: Sequence[Tokens]) -> list[list[TokenLogprobs]]:
    """Of each sequence, the scores of all tokens but the first."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    found: dict[str, list[TokenLogprobs]] = {}
    for index, sequence in enumerate(sequences):
        engine.submit(GenerationRequest(str(index), sequence, params))
    while engine.has_work():
        for output in engine.step():
            if output.prompt_logprobs is not None:
                found[output.request_id] = [entry for entry in output.prompt_logprobs if entry is not None]
    return [found[str(index)] for index in range(len(sequences))]


def _answer(engine: EngineCore, prompts: Sequence[Tokens], num_tokens: int) -> list[Tokens]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    found: dict[str, Tokens] = {str(index): () for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        engine.submit(GenerationRequest(str(index), prompt, params))
    while engine.has_work():
        for output in engine.step():
            found[output.request_id] += tuple(output.token_ids)
    return list(found.values())


def report(result: Report) -> str:
    """The result as a table."""
    exam = result.exam
    base = result.qualities[0][1].perplexity
    lines = [
        "",
        f"{result.model}: perplexity of {result.num_scored} tokens in windows of {exam.window}; "
        f"{len(exam.prompts)} prompts, {exam.num_tokens} greedy tokens each, against float32",
        f"{'':<20}{'perplexity':>12}{'change':>10}{'equal':>8}{'first diff.':>13}{'teacher-forced':>16}",
    ]
    for variant, quality in result.qualities:
        first = quality.mean_first_difference
        lines.append(
            f"{variant!s:<20}{quality.perplexity:>12.3f}{quality.perplexity / base - 1:>+10.2%}{quality.equal:>8.0%}"
            f"{'-' if first is None else f'{first:.1f}':>13}{quality.teacher_forced:>16.2%}"
        )
    return "\n".join(lines)


def to_json(result: Report) -> dict[str, object]:
    """Everything but the text and the prompts."""
    return {
        "benchmark": "quality",
        **describe_environment(),
        "model": result.model,
        "scored_tokens": result.num_scored,
        "window": result.exam.window,
        "prompts": len(result.exam.prompts),
        "answer_tokens": result.exam.num_tokens,
        "variants": [{**asdict(variant), **asdict(quality)} for variant, quality in result.qualities],
    }
