"""Every expression of the Grafana dashboard: its syntax, and that what it reads is in a real server's `/metrics`."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.server.circuit_breaker import BreakerLimits, CircuitBreaker
from jaxserve.server.metrics import ServerMetrics
from jaxserve.stats import EngineStats
from scripts.dashboard.expressions import DASHBOARD, Expression, expressions
from tests.server import http


def labels_by_name(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.fixture(scope="module")
def series(api_url: str) -> dict[str, set[str]]:
    """Labels of every series of a real server, and of one that speculates."""
    stats = EngineStats()
    stats.speculation.accepted_by_position = [0]
    drafts = ServerMetrics(stats, CircuitBreaker(BreakerLimits(), time.monotonic), "m").render().decode()
    real = http.request(api_url, "GET", "/metrics").body.decode()
    return labels_by_name(drafts) | labels_by_name(real)


def test_every_name_and_label_is_there(series: dict[str, set[str]]) -> None:
    assert len(expressions()) > 60
    for one in expressions():
        assert one.names, one
        for name in one.names:
            assert name in series, one
        assert one.labels <= set().union(*(series[name] for name in one.names)), one


def test_names_and_labels_are_found() -> None:
    text = 'sum by (le, kind) (rate(vllm:a_bucket{x=~"b", y!="c"}[1m])) / max(jaxserve:d)'
    one = Expression("", text)
    assert one.names == {"vllm:a_bucket", "jaxserve:d"}
    assert one.labels == {"le", "kind", "x", "y"}


def test_everything_of_the_issue_is_shown() -> None:
    shown = set().union(*(one.names for one in expressions()))
    for part in (
        "packing_efficiency",
        "bucket_steps",
        "compilations",
        "swap_bytes",
        "ttft_predicted",
        "refusals",
    ):
        assert any(part in name for name in shown), part
    assert {"jaxserve:bucket_step_seconds_total", "jaxserve:memory_bytes"} <= shown


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's prometheus")
def test_promtool_takes_every_expression(tmp_path: Path) -> None:
    rules = [{"record": f"check:{number}", "expr": one.text} for number, one in enumerate(expressions())]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    result = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(rules)} rules found" in result.stdout


def test_panels_do_not_lie_on_each_other() -> None:
    cells: set[tuple[int, int]] = set()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        mine = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not mine & cells, panel["title"]
        assert max(x for x, _ in mine) < 24
        cells |= mine
