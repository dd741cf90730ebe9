"""Requests that are all there at the start, as a JSON list of token ids and output lengths (see workloads/)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.workload.traced_request import TracedRequest, Workload

_KEYS = {"prompt_token_ids", "max_tokens"}


def parse_token_lists(content: bytes, path: Path) -> Workload:
    """Read a JSON list of ``{"prompt_token_ids": [int, ...], "max_tokens": int}``.

    Raises:
      ConfigError: one line that names the file, and the request at fault (counted from 0).
    """
    try:
        data = json.loads(content)
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON ({error})") from error
    if not isinstance(data, list) or not data:
        raise ConfigError(f"{path}: must be a list of at least one request")
    return Workload(
        path.stem, tuple(_request(entry, f"{path}: request {index}") for index, entry in enumerate(data))
    )


def _request(entry: Any, where: str) -> TracedRequest:
    if not isinstance(entry, dict) or set(entry) != _KEYS:
        raise ConfigError(f"{where}: must be an object with exactly the keys {', '.join(sorted(_KEYS))}")
    prompt, max_tokens = entry["prompt_token_ids"], entry["max_tokens"]
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
        raise ConfigError(f"{where}: prompt_token_ids must be a list of at least one integer")
    if type(max_tokens) is not int or max_tokens < 1:
        raise ConfigError(f"{where}: max_tokens must be an integer of at least 1, got {max_tokens!r}")
    return TracedRequest(tuple(prompt), max_tokens)
