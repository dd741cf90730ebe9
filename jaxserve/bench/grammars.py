"""JSON schemas of the real world: how many can be kept to, what they and their masks take, and is it true?"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from jaxserve.batch.masks import mask_words
from jaxserve.bench.environment import describe_host
from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.grammar import Grammar
from jaxserve.progress import Progress
from jaxserve.structured_output.compiler import GrammarCompiler
from jaxserve.tokenizer import Tokenizer

_REASONS = 8


@dataclass(slots=True)
class GrammarFigures:
    """What came out.

    Attributes:
      refused: schemas that can't be kept to, by the beginning of the reason.
      compile_seconds: of each schema that was taken, its first mask included. mask_seconds: of each later mask.
      instances: (is valid, was accepted) -> how many; (False, True) must not occur.
    """

    num_schemas: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    compile_seconds: list[float] = field(default_factory=list)
    mask_seconds: list[float] = field(default_factory=list)
    instances: Counter[tuple[bool, bool]] = field(default_factory=Counter)


def measure_grammars(
    files: Sequence[Path], tokenizer: Tokenizer, eos_token_ids: Sequence[int], progress: Progress
) -> GrammarFigures:
    """Compile each file's schema and run its instances through it, token by token.

    Args:
      files: those of MaskBench (https://github.com/guidance-ai/jsonschemabench): objects with a `schema`, and `tests`
        with `data` and `valid`.

    Raises:
      ConfigError: a file is none.
    """
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, eos_token_ids)
    compiler.compile(Grammar.json_object())  # the vocabulary, which a server makes once
    figures = GrammarFigures()
    for done, path in enumerate(files, start=1):
        _measure_one(path, compiler, tokenizer, figures)
        progress("Schemas", done, len(files))
    return figures


def choose_files(folder: Path, sample: int | None) -> list[Path]:
    """The folder's JSON files, or as many of them by a fixed seed. Raises: ConfigError: there are none."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ConfigError(f"there are no JSON files in {folder}")
    return files if sample is None or sample >= len(files) else random.Random(0).sample(files, sample)


def _measure_one(
    path: Path, compiler: GrammarCompiler, tokenizer: Tokenizer, figures: GrammarFigures
) -> None:
    try:
        case = json.loads(path.read_text())
        schema, tests = case["schema"], case["tests"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no object with a schema and tests: {error}") from None
    figures.num_schemas += 1
    started = time.perf_counter()
    try:
        start = compiler.compile(Grammar.json_schema(schema))
    except InvalidRequestError as error:
        figures.refused[str(error).partition(": ")[2].partition("[")[0][:40].strip()] += 1
        return
    figures.compile_seconds.append(time.perf_counter() - started)
    for test in tests:
        tokens = tokenizer.encode(
            json.dumps(test["data"], ensure_ascii=False), add_special_tokens=False, parse_special=False
        )
        accepted = _follow(start.deep_copy(), tokens, tokenizer.vocab_size, figures.mask_seconds)
        figures.instances[bool(test["valid"]), accepted] += 1


def _follow(matcher: LLMatcher, tokens: Sequence[int], vocab_size: int, seconds: list[float]) -> bool:
    mask = np.zeros((1, mask_words(vocab_size)), np.int32)
    for token in tokens:
        started = time.perf_counter()
        fill_next_token_bitmask(matcher, mask)
        seconds.append(time.perf_counter() - started)
        if not mask.view(np.uint32)[0, token // 32] >> np.uint32(token % 32) & 1:
            return False
        matcher.consume_token(token)
    return bool(matcher.is_accepting())


def report(figures: GrammarFigures) -> str:
    """The figures as text."""
    taken, valid = len(figures.compile_seconds), figures.instances
    lines = [
        f"{taken} of {figures.num_schemas} schemas are taken ({taken / figures.num_schemas:.1%})",
        *(f"  refused: {count} for {reason!r}" for reason, count in figures.refused.most_common(_REASONS)),
        _line("compiling, with the first mask", figures.compile_seconds),
        _line("a mask", figures.mask_seconds),
        f"valid instances accepted: {valid[True, True]} of {valid[True, True] + valid[True, False]} (the others have "
        "their keys in another order, as a rule)",
        f"invalid instances accepted: {valid[False, True]} of {valid[False, True] + valid[False, False]}",
    ]
    return "\n".join(lines)


def to_json(figures: GrammarFigures) -> dict[str, object]:
    """The same for a file."""
    return {
        "environment": describe_host(),
        "num_schemas": figures.num_schemas,
        "refused": dict(figures.refused),
        "compile_ms": _quantiles(figures.compile_seconds),
        "mask_ms": _quantiles(figures.mask_seconds),
        "instances": {
            f"{'valid' if is_valid else 'invalid'}, {'accepted' if accepted else 'refused'}": count
            for (is_valid, accepted), count in sorted(figures.instances.items())
        },
    }


def _line(what: str, seconds: Sequence[float]) -> str:
    values = ", ".join(f"{name} {value:.2f}" for name, value in _quantiles(seconds).items())
    return f"{what} (ms, {len(seconds)}): {values}"


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    values = {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(seconds)}
    return {name: round(1000 * value, 4) for name, value in values.items()}
