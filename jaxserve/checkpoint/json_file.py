"""Reading a JSON object from disk, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in `path`.

    Raises:
      CheckpointError: the file is missing, can't be read, isn't UTF-8 JSON, or holds something else than an object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: the file is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not valid JSON (not UTF-8 text)") from error
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value


def read_optional_json_object(path: Path) -> dict[str, Any]:
    """As `read_json_object`, but a file that does not exist counts as an empty object."""
    return read_json_object(path) if path.exists() or path.is_symlink() else {}
