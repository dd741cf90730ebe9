"""Workloads on disk, in our own format: JSON lines, a header first, then one request a line.

    {"jaxserve_workload": 1, "name": "generated", "vocabulary": [100, 49152]}
    {"arrival": 0.31, "max_tokens": 20, "prompt": [["0/system/0", 64], ["0/chat/1/said/0", 12]], "client": "client-0"}

A prompt is a list of (key, tokens), see `traced_request.Segment`, or `"prompt_token_ids": [5, 6, 7]`. Everything
that is not there has the default of `TracedRequest`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.request import SamplingParams, ServiceClass, ServiceTargets
from jaxserve.workload.traced_request import PromptRecipe, Segment, TokenRange, TracedRequest, Workload

KEY = "jaxserve_workload"
_VERSION = 1

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_TokenId = Annotated[int, msgspec.Meta(ge=0)]


class _Header(msgspec.Struct, frozen=True):
    jaxserve_workload: int
    name: str = "workload"
    vocabulary: tuple[_TokenId, _TokenId] = (TokenRange().first, TokenRange().stop)


class _Line(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    max_tokens: _Count
    arrival: _Seconds = 0.0
    prompt: tuple[tuple[str, _Count], ...] = ()
    prompt_token_ids: tuple[_TokenId, ...] = ()
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    priority: int = 0
    client: str = ""
    ttft_seconds: _Seconds | None = None
    itl_seconds: _Seconds | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    seed: int | None = None
    aborts_after: _Seconds | None = None


def write_workload(path: Path, workload: Workload) -> None:
    """Write a file that `read_workload` reads as the same workload.

    Raises:
      OSError: it can't be written.
    """
    recipes = [item.prompt for item in workload.requests if isinstance(item.prompt, PromptRecipe)]
    vocabulary = recipes[0].vocabulary if recipes else TokenRange()
    assert all(recipe.vocabulary == vocabulary for recipe in recipes), "prompts of several vocabularies"
    header = _Header(_VERSION, workload.name, (vocabulary.first, vocabulary.stop))
    encode = msgspec.json.encode
    with path.open("wb") as file:
        file.write(encode(header) + b"\n")
        for item in workload.requests:
            file.write(encode(_to_line(item)) + b"\n")


def parse_workload(lines: Iterator[tuple[int, bytes]], path: Path) -> Workload:
    """The requests of a file.

    Args:
      lines: their numbers, from 1, and content. The header is the first.

    Raises:
      ConfigError: one line that names the file and the line at fault.
    """
    number, first = next(lines)
    header = decode(msgspec.json.Decoder(_Header), first, path, number)
    if header.jaxserve_workload != _VERSION:
        raise ConfigError(
            f"{path}: line 1: version {header.jaxserve_workload} of the format is not known here"
        )
    vocabulary = TokenRange(*header.vocabulary)
    if vocabulary.first >= vocabulary.stop:
        raise ConfigError(f"{path}: line 1: the vocabulary is empty")
    decoder = msgspec.json.Decoder(_Line)
    requests = []
    for number, line in lines:
        requests.append(_from_line(decode(decoder, line, path, number), vocabulary, path, number))
    for before, after in pairwise(requests):
        if after.arrival < before.arrival:
            raise ConfigError(
                f"{path}: requests are not in order of arrival ({after.arrival} after {before.arrival})"
            )
    return Workload(header.name, tuple(requests))


def decode[T](decoder: msgspec.json.Decoder[T], line: bytes, path: Path, number: int) -> T:
    """A line as what it should be; raises ConfigError that names file and line."""
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: line {number}: {error}") from error


def _to_line(item: TracedRequest) -> _Line:
    recipe = isinstance(item.prompt, PromptRecipe)
    return _Line(
        max_tokens=item.max_tokens,
        arrival=item.arrival,
        prompt=tuple((part.key, part.length) for part in item.prompt.segments) if recipe else (),  # type: ignore[union-attr]
        prompt_token_ids=() if recipe else item.prompt,  # type: ignore[arg-type]
        service_class=item.service_class,
        priority=item.priority,
        client=item.client,
        ttft_seconds=item.targets.ttft_seconds,
        itl_seconds=item.targets.itl_seconds,
        n=item.n,
        stop=item.stop,
        temperature=item.temperature,
        seed=item.seed,
        aborts_after=item.aborts_after,
    )


def _from_line(line: _Line, vocabulary: TokenRange, path: Path, number: int) -> TracedRequest:
    if bool(line.prompt) == bool(line.prompt_token_ids):
        raise ConfigError(f"{path}: line {number}: needs either prompt or prompt_token_ids")
    prompt: tuple[int, ...] | PromptRecipe = line.prompt_token_ids
    if line.prompt:
        prompt = PromptRecipe(tuple(Segment(key, length) for key, length in line.prompt), vocabulary)
    try:
        SamplingParams(n=line.n, stop=line.stop, temperature=line.temperature, seed=line.seed)
    except InvalidRequestError as error:
        raise ConfigError(f"{path}: line {number}: {error}") from error
    return TracedRequest(
        prompt,
        line.max_tokens,
        line.arrival,
        service_class=line.service_class,
        priority=line.priority,
        client=line.client,
        targets=ServiceTargets(line.ttft_seconds, line.itl_seconds),
        n=line.n,
        stop=line.stop,
        temperature=line.temperature,
        seed=line.seed,
        aborts_after=line.aborts_after,
    )
