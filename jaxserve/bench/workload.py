"""Workload files: requests as token ids and output lengths, so that every engine computes exactly the same tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.request import GenerationRequest, SamplingParams

_KEYS = {"prompt_token_ids", "max_tokens"}


@dataclass(frozen=True, slots=True)
class Item:
    """One request: greedy, and as long as it says (the model's end-of-text ids do not end it)."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int

    def request(self, request_id: str) -> GenerationRequest:
        """The request as the engine takes it."""
        params = SamplingParams(temperature=0.0, max_tokens=self.max_tokens, ignore_eos=True)
        return GenerationRequest(request_id, self.prompt_token_ids, params)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are all there at the start.

    Attributes:
      name: the file's name without its suffix.
    """

    name: str
    items: tuple[Item, ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(item.prompt_token_ids) for item in self.items)

    @property
    def num_output_tokens(self) -> int:
        return sum(item.max_tokens for item in self.items)


def read_workload(path: Path, *, limit: int | None = None) -> Workload:
    """Read a JSON list of ``{"prompt_token_ids": [int, ...], "max_tokens": int}``.

    Args:
      limit: keep the first so many requests.

    Raises:
      ConfigError: one line that names the file, and the request at fault (counted from 0).
    """
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON ({error})") from error
    if not isinstance(data, list) or not data:
        raise ConfigError(f"{path}: must be a list of at least one request")
    items = tuple(_item(entry, f"{path}: request {index}") for index, entry in enumerate(data))
    return Workload(path.stem, items[:limit])


def _item(entry: Any, where: str) -> Item:
    if not isinstance(entry, dict) or set(entry) != _KEYS:
        raise ConfigError(f"{where}: must be an object with exactly the keys {', '.join(sorted(_KEYS))}")
    prompt, max_tokens = entry["prompt_token_ids"], entry["max_tokens"]
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
        raise ConfigError(f"{where}: prompt_token_ids must be a list of at least one integer")
    if type(max_tokens) is not int or max_tokens < 1:
        raise ConfigError(f"{where}: max_tokens must be an integer of at least 1, got {max_tokens!r}")
    return Item(tuple(prompt), max_tokens)
