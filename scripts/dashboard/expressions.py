"""The PromQL of docs/grafana/jaxserve.json."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).resolve().parents[2] / "docs/grafana/jaxserve.json"

_NAME = re.compile(r"(?:vllm|jaxserve):\w+")
_GROUPING = re.compile(r"\b(?:by|without)\s*\(([^)]*)\)")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")


@dataclass(frozen=True)
class Expression:
    """Attributes: panel: its title; text: with the dashboard's variables filled in: all models, rates of a minute."""

    panel: str
    text: str

    @property
    def names(self) -> set[str]:
        """Of the series that it reads."""
        return set(_NAME.findall(self.text))

    @property
    def labels(self) -> set[str]:
        """That it groups by or selects with."""
        grouped = {label.strip() for group in _GROUPING.findall(self.text) for label in group.split(",")}
        return grouped | set(_MATCHER.findall(self.text))


def expressions(window: str = "1m") -> list[Expression]:
    """All of them. `window`: of rates."""
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text("utf-8"))
    return [
        Expression(panel["title"], target["expr"].replace("$__rate_interval", window).replace("$model", ".*"))
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]
