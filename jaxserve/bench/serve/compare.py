"""Two results beside each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.bench.serve.load import ServeLoad
from jaxserve.errors import ConfigError

_KINDS = ("serve", "sweep", "throughput")
_HIGHER_IS_BETTER = ("/s", "efficiency", "utilisation", "complete", "within goal")


def read_result(path: Path) -> dict[str, Any]:
    """What `jaxserve bench` wrote.

    Raises:
      ConfigError: one line that names the file.
    """
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: can't be read as JSON ({error})") from error
    if not isinstance(result, dict) or result.get("benchmark") not in _KINDS:
        raise ConfigError(f"{path}: is no result of jaxserve bench throughput, serve or sweep")
    return result


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """A line for each figure that both have, with the second over the first.

    Raises:
      ConfigError: they have no load in common, or are of different kinds.
    """
    if first["benchmark"] != second["benchmark"]:
        raise ConfigError(f"one is of {first['benchmark']}, the other of {second['benchmark']}")
    try:
        points = [_points(result) for result in (first, second)]
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"a result lacks what it should hold ({error})") from error
    common = [name for name in points[0] if name in points[1]]
    if not common:
        raise ConfigError(f"no load is in both: {', '.join(points[0])}; {', '.join(points[1])}")
    lines = [f"(!) {text}" for text in differences(first, second)]
    for name in common:
        left, right = points[0][name], points[1][name]
        figures = [figure for figure in left if figure in right]
        width = max(map(len, figures), default=0)
        lines += ["", name] if name else [""]
        lines.append(f"{'':<{width}}  {'first':>12}  {'second':>12}  {'ratio':>7}")
        lines += [_line(figure, left[figure], right[figure], width) for figure in figures]
    return "\n".join(lines)


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """What else differs, and may be why: the machine, versions, server, workload."""
    found = []
    for name in ("machine", "versions", "commit", "server", "workload"):
        left, right = first.get(name), second.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            keys = [key for key in {**left, **right} if left.get(key) != right.get(key)]
            found += [f"{name} {key}: {left.get(key)} and {right.get(key)}" for key in keys]
        elif left != right:
            found.append(f"{name}: {left} and {right}")
    return found


def _points(result: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    if result["benchmark"] == "throughput":
        return {"": result["figures"]}
    return {ServeLoad(**point["load"]).describe(): point["figures"] for point in result["points"]}


def _line(name: str, left: float, right: float, width: int) -> str:
    if left == right:
        ratio, word = "1.000", ""
    elif left == 0:
        ratio, word = "-", ""
    else:
        ratio = f"{right / left:.3f}"
        timed = name.endswith("ms") or name == "seconds"
        higher = any(mark in name for mark in _HIGHER_IS_BETTER)
        word = "" if not (timed or higher) else " better" if (right > left) == higher else " worse"
    return f"{name:<{width}}  {left:>12.3f}  {right:>12.3f}  {ratio:>7}{word}"
