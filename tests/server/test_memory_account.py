"""What a server says its memory is for, against what the process then has: at its peak under load."""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server_process import ServerProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

TOLERANCE = 0.05
# So that the arrays weigh something beside the process: a pool of 328 MB.
FLAGS = (
    "--num-blocks",
    "20000",
    "--max-num-seqs",
    "4",
    "--max-num-batched-tokens",
    "16",
    "--host-memory",
    "100000000",
)
PROMPT_TOKENS, REQUESTS = 150, 24


def metric(server: ServerProcess, name: str, label: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.base_url}/metrics") as response:
        families = text_string_to_metric_families(response.read().decode())
    return {s.labels[label]: s.value for family in families for s in family.samples if s.name == name}


def wait_for_shapes(server: ServerProcess) -> None:
    for _ in range(1200):
        ready = metric(server, "jaxserve:shapes_ready", "model_name")
        if ready == metric(server, "jaxserve:shapes", "model_name"):
            return
        time.sleep(0.25)
    raise AssertionError(server.logs)


def peak_under_load(server: ServerProcess) -> int:
    """Bytes of physical memory, at most, from now until everything is answered."""
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # the peak begins anew

    def ask(index: int) -> None:
        prompt = [(index * 37 + i * 11) % 9000 + 100 for i in range(PROMPT_TOKENS)]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "logprobs": 5, "ignore_eos": True, "n": 2}
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            f"{server.base_url}/v1/completions", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            assert len(json.load(response)["choices"]) == 2

    with ThreadPoolExecutor(REQUESTS) as threads:
        list(threads.map(ask, range(REQUESTS)))
    status = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def is_exact(account: dict[str, float], peak: int) -> bool:
    return abs(sum(account.values()) / peak - 1) <= TOLERANCE


@pytest.fixture(scope="module")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("start", ["first, most shapes compiled while serving", "again"])
def test_the_account_is_what_the_process_uses(tiny_checkpoint_dir: Path, cache_home: str, start: str) -> None:
    with ServerProcess(tiny_checkpoint_dir, *FLAGS, environment={"XDG_CACHE_HOME": cache_home}) as server:
        account = metric(server, "jaxserve:memory_bytes", "kind")
        wait_for_shapes(server)
        peak = peak_under_load(server)
        [compiled] = metric(server, "jaxserve:compilations_total", "model_name").values()
        kept = len(list(Path(cache_home).rglob("*.bin")))
        assert compiled == (0 if start == "again" else kept), "what was measured is compiled once"
        for kind, name in (("weights", "weights"), ("kv_cache", "KV cache"), ("process", "process")):
            assert re.search(
                rf"^INFO jaxserve\.memory:   {name} +{account[kind] / 1e6:.1f} MB$", server.logs, re.MULTILINE
            )
    assert set(account) == {"weights", "kv_cache", "row_state", "temporaries", "process", "host_tier"}
    print(f"together {sum(account.values()):,.0f}, used {peak:,}")
    assert is_exact(account, peak), f"{account}, together {sum(account.values()):,.0f}; used {peak:,}"
    for kind in ("kv_cache", "process", "host_tier"):  # it is not exact by being wide
        assert not is_exact({**account, kind: 0}, peak)
        assert not is_exact({**account, kind: account[kind] * 1.5}, peak)
