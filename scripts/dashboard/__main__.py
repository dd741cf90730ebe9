"""`scripts/check_dashboard URL`: a real Prometheus scrapes a running server while requests run, and is asked about
every expression of the dashboard."""

from __future__ import annotations

import argparse
import json
import math
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from scripts.dashboard.expressions import Expression, expressions

PROMPT = "one two three four, one two three four, one two three four,"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/check_dashboard", description=__doc__)
    parser.add_argument("url", help="of a running server (with --speculative, for those panels)")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which requests run")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    if shutil.which("prometheus") is None:
        parser.error("there is no `prometheus` on this machine: apt-get install prometheus")
    url = arguments.url.rstrip("/")
    with running_prometheus(url) as prometheus:
        num_requests = load(url, arguments.seconds)
        results = [ask(prometheus, one) for one in expressions("30s")]
        version = get(f"{prometheus}/api/v1/status/buildinfo")["data"]["version"]
    bad = [one for one in results if one["fault"] is not None]
    for one in bad:
        print(f"{one['panel']}: {one['fault']}\n    {one['expr']}")
    print(f"{len(results) - len(bad)} of {len(results)} expressions have values ({num_requests} requests)")
    if arguments.json is not None:
        summary = {
            "date": date.today().isoformat(),
            "machine": platform.machine(),
            "prometheus": version,
            "requests": num_requests,
            "expressions": results,
        }
        arguments.json.write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if bad else 0


@contextmanager
def running_prometheus(url: str) -> Iterator[str]:
    """One that scrapes `url` every second; its own URL."""
    parts = urllib.parse.urlsplit(url)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "prometheus.yml"
        targets = {"targets": [parts.netloc]}
        job = {"job_name": "jaxserve", "scheme": parts.scheme, "static_configs": [targets]}
        settings = {"scrape_interval": "1s", "scrape_timeout": "1s"}
        config.write_text(json.dumps({"global": settings, "scrape_configs": [job]}))  # JSON is YAML
        process = subprocess.Popen(
            [
                *("prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data"),
                *(f"--web.listen-address={address}", "--log.level=error"),
            ]
        )
        try:
            wait_until_scraping(f"http://{address}", process)
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait(30)


def wait_until_scraping(prometheus: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(300):
        if process.poll() is not None:
            sys.exit("prometheus has ended")
        try:
            found = get(f"{prometheus}/api/v1/query?query=up%7Bjob%3D%22jaxserve%22%7D")["data"]["result"]
            if found and found[0]["value"][1] == "1":
                return
        except (OSError, ValueError):
            pass  # not listening yet
        time.sleep(0.2)
    sys.exit("prometheus can't scrape the server")


def load(url: str, seconds: float) -> int:
    """Keep a few requests running for so long; how many there were."""
    model = get(f"{url}/v1/models")["data"][0]["id"]
    end = time.monotonic() + seconds

    def ask_on(number: int) -> int:
        count = 0
        while time.monotonic() < end:
            body = {
                "model": model,
                "prompt": f"{PROMPT} {number % 2}",
                "max_tokens": 16 + count,
                "n": 1 + number % 2,
            }
            body |= {"temperature": 0, "ignore_eos": True, "slo_ttft_ms": 60_000}
            if number == 3:
                body |= {"service_tier": "flex"}
            get(f"{url}/v1/completions", body)
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(ask_on, range(4)))


def ask(prometheus: str, one: Expression) -> dict[str, Any]:
    """What an expression gives, and what is wrong with it."""
    fault, series = None, []
    try:
        query = urllib.parse.urlencode({"query": one.text})
        series = get(f"{prometheus}/api/v1/query?{query}")["data"]["result"]
    except urllib.error.HTTPError as error:
        fault = json.load(error)["error"]
    values = [float(item["value"][1]) for item in series]
    if fault is None and not values:
        fault = "no series"
    elif fault is None and all(math.isnan(value) for value in values):
        fault = "no values, only NaN"
    return {
        "panel": one.panel,
        "expr": one.text,
        "series": len(series),
        "first": None if not values or not math.isfinite(values[0]) else values[0],
        "fault": fault,
    }


def get(url: str, body: dict[str, Any] | None = None) -> Any:
    """JSON, of a GET, or of a POST with a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=120) as response:
        return json.load(response)


if __name__ == "__main__":
    sys.exit(main())
