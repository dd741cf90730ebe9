"""Traces that others have published: when requests came and how long they were, without their texts.

Azure's LLM inference traces (github.com/Azure/AzurePublicDataset): CSV with TIMESTAMP, ContextTokens, GeneratedTokens.
Mooncake's (github.com/kvcache-ai/Mooncake): JSON lines with timestamp (ms), input_length, output_length and hash_ids,
one for every 512 tokens of the prompt; equal ids are equal tokens after equal beginnings.

The texts are made up: so many random tokens, the same for the same hash id, so that prefixes are shared as they were.
A request without an answer counts as one with a single token.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from jaxserve.errors import ConfigError
from jaxserve.workload.traced_request import PromptRecipe, Segment, TracedRequest, Workload
from jaxserve.workload.workload_file import decode

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_BLOCK = 512

_Length = Annotated[int, msgspec.Meta(ge=1)]
_Whole = Annotated[int, msgspec.Meta(ge=0)]


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Length
    output_length: _Whole
    hash_ids: tuple[_Whole, ...]


def parse_mooncake(lines: Iterator[tuple[int, bytes]], path: Path) -> Workload:
    """The requests of a Mooncake trace.

    Args:
      lines: their numbers, from 1, and content.

    Raises:
      ConfigError: one line that names the file and the line at fault.
    """
    decoder = msgspec.json.Decoder(_MooncakeLine)
    requests = []
    for number, text in lines:
        line = decode(decoder, text, path, number)
        before_last = MOONCAKE_BLOCK * (len(line.hash_ids) - 1)
        if not before_last < line.input_length <= before_last + MOONCAKE_BLOCK:
            raise ConfigError(
                f"{path}: line {number}: {len(line.hash_ids)} hash_ids of {MOONCAKE_BLOCK} tokens don't make an "
                f"input_length of {line.input_length}"
            )
        lengths = [MOONCAKE_BLOCK] * (len(line.hash_ids) - 1) + [line.input_length - before_last]
        segments = [
            Segment(f"mooncake/{key}", length) for key, length in zip(line.hash_ids, lengths, strict=True)
        ]
        output = max(line.output_length, 1)
        requests.append(TracedRequest(PromptRecipe(tuple(segments)), output, line.timestamp / 1000))
    return _from_its_start(path, requests)


def parse_azure(lines: Iterator[tuple[int, bytes]], path: Path) -> Workload:
    """The requests of an Azure trace; see `parse_mooncake`. Other columns are ignored."""
    _, header = next(lines)
    names = [name.strip() for name in _cells(header, f"{path}: line 1")]
    if missing := [name for name in AZURE_COLUMNS if name not in names]:
        raise ConfigError(f"{path}: line 1: there is no column {missing[0]}")
    places = [names.index(name) for name in AZURE_COLUMNS]
    requests = []
    first: datetime | None = None
    for number, text in lines:
        where = f"{path}: line {number}"
        cells = _cells(text, where)
        if len(cells) <= max(places):
            raise ConfigError(f"{where}: has {len(cells)} of {len(names)} columns")
        moment, prompt, output = (cells[place].strip() for place in places)
        try:
            time = datetime.fromisoformat(moment)
            first = first or time
            arrival = (time - first).total_seconds()
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{where}: TIMESTAMP {moment!r}: {error}") from error
        recipe = PromptRecipe((Segment(f"azure/{number}", _number(prompt, 1, f"{where}: ContextTokens")),))
        requests.append(
            TracedRequest(recipe, max(_number(output, 0, f"{where}: GeneratedTokens"), 1), arrival)
        )
    return _from_its_start(path, requests)


def _from_its_start(path: Path, requests: list[TracedRequest]) -> Workload:
    """In order of arrival, the first at 0."""
    first = min((item.arrival for item in requests), default=0.0)
    ordered = sorted(requests, key=lambda item: item.arrival)
    return Workload(
        path.stem,
        tuple(TracedRequest(item.prompt, item.max_tokens, item.arrival - first) for item in ordered),
    )


def _cells(line: bytes, where: str) -> list[str]:
    try:
        return next(csv.reader([line.decode()]), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{where}: is not CSV ({error})") from error


def _number(text: str, least: int, what: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{what} must be a number of at least {least}, got {text!r}")
    return int(text)
