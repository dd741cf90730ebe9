"""Plans on disk: JSON that a person may read and edit, checked before anything relies on it."""

from __future__ import annotations

import json
import os
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxserve.batch.bucket_expectation import Expectation
from jaxserve.batch.bucket_plan import MIN_SIZE, Shapes
from jaxserve.errors import ConfigError

_VERSION = 1
_KEY = "jaxserve_bucket_plan"


def write_plan(path: Path, shapes: Shapes, expectation: Expectation, *, num_steps: int) -> None:
    """Write a plan, whole or not at all, with what it expects (for people; nothing reads it back).

    Raises:
      OSError: it can't be written there.
    """
    plan = {
        **plan_content(shapes),
        "expected": {
            "planned_from_steps": num_steps,
            "packing_efficiency": round(expectation.packing_efficiency, 4),
            "step_share": {
                f"T{entry.bucket.tokens}xS{entry.bucket.seqs}": round(entry.step_share, 6)
                for entry in expectation.buckets
            },
        },
    }
    descriptor, partial = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(plan, file, indent=1)
            file.write("\n")
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def plan_content(shapes: Shapes) -> dict[str, Any]:
    """What `read_plan` reads, as JSON values."""
    return {
        _KEY: _VERSION,
        "shapes": [{"tokens": tokens, "seqs": list(seqs)} for tokens, seqs in shapes],
    }


def read_plan(path: Path) -> Shapes:
    """The shapes of a plan.

    Raises:
      ConfigError: one line that names the file and the fault.
    """
    try:
        plan = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not a bucket plan (not JSON: {error})") from error
    if not isinstance(plan, dict) or _KEY not in plan:
        raise ConfigError(f"{path}: is not a bucket plan (it has no {_KEY!r})")
    if plan[_KEY] != _VERSION:
        raise ConfigError(
            f"{path}: is a bucket plan of version {plan[_KEY]!r}; this program reads {_VERSION}"
        )
    try:
        return _check_shapes(plan.get("shapes"))
    except ValueError as error:
        raise ConfigError(f"{path}: is damaged ({error})") from error


def _check_shapes(value: Any) -> Shapes:
    """Raises ValueError unless every step up to the last size is sure of a bucket."""
    if not isinstance(value, list) or not value:
        raise ValueError("'shapes' must be a list of at least one size")
    shapes: list[tuple[int, tuple[int, ...]]] = []
    for index, entry in enumerate(value):
        where = f"size {index}"
        if not isinstance(entry, dict) or set(entry) != {"tokens", "seqs"}:
            raise ValueError(f"{where} must have exactly 'tokens' and 'seqs'")
        tokens, seqs = entry["tokens"], entry["seqs"]
        if not isinstance(seqs, list) or not all(type(size) is int for size in (tokens, *seqs)):
            raise ValueError(f"{where} must have a whole number 'tokens' and a list of them 'seqs'")
        _check_ascending([MIN_SIZE - 1, *seqs], f"'seqs' of {where}")
        shapes.append((tokens, tuple(seqs)))
    _check_ascending([MIN_SIZE - 1, *(tokens for tokens, _ in shapes)], "'tokens'")
    most_rows = max((rows for _, seqs in shapes for rows in seqs), default=0)
    for tokens, seqs in shapes:
        if not seqs or seqs[-1] != min(tokens, most_rows):
            raise ValueError(
                f"'seqs' of {tokens} tokens must end with {min(tokens, most_rows)}, or some steps would have no bucket"
            )
    return tuple(shapes)


def _check_ascending(sizes: list[int], what: str) -> None:
    if any(larger <= smaller for smaller, larger in pairwise(sizes)):
        raise ValueError(f"{what} must ascend from at least {MIN_SIZE}")
