"""`jaxserve bench`: what is reported of good and of bad servers, and what is refused (never how fast)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.bench.peers.answer import Answer, Fault
from jaxserve.bench.peers.peer import Peer
from jaxserve.bench.peers.process import Running, running
from jaxserve.bench.peers.ready import NotReadyError
from jaxserve.bench.serve.compare import compare, differences
from jaxserve.bench.serve.goal import Goal, parse_goal
from jaxserve.bench.serve.load import ServeLoad
from jaxserve.bench.serve.measure import Target, find_server, measure, summarise
from jaxserve.bench.slow_clients.crowd import Manner
from jaxserve.bench.slow_clients.run import Plan, measure_phase
from jaxserve.errors import ConfigError
from jaxserve.server.api_keys import make_api_keys
from jaxserve.server.app import ServerOptions
from jaxserve.tokenizer import Tokenizer
from jaxserve.workload.traced_request import TracedRequest, Workload
from tests.cli.command import assert_refused, run_jaxserve
from tests.server.copy_engine import CopyEngine
from tests.server.running_server import RunningServer
from tests.server_process import ServerProcess
from tests.text_models import smollm2

ODD_PEER = Path(__file__).with_name("odd_peer.py")
FEW = ("--requests", "6", "--prompt-median", "20", "--output-median", "12", "--output-sigma", "0")
NOBODY = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return smollm2()


@pytest.fixture(scope="module")
def tiny_server(tiny_checkpoint_dir: Path) -> Iterator[str]:
    flags = ("--max-num-seqs", "16", "--max-num-batched-tokens", "32", "--max-model-len", "1024")
    with ServerProcess(
        tiny_checkpoint_dir, "--served-model-name", "tiny", *flags, start_timeout_s=900
    ) as server:
        yield server.base_url


def bench(*arguments: str | Path, **options: Any) -> Any:
    return run_jaxserve("bench", *arguments, **options)


def test_serve_and_compare(tiny_server: str, tmp_path: Path) -> None:
    """Both ways of loading a server, with a key; and the results beside each other."""
    results = []
    for name, load in (("open", ("--rate", "50", "--burstiness", "2")), ("closed", ("--concurrency", "2"))):
        file = tmp_path / f"{name}.json"
        done = bench(
            *("serve", "--url", f"{tiny_server}/v1", *FEW, *load, "--goodput", "ttft:60000 tpot:60000"),
            *("--json", file),
        )
        assert done.returncode == 0, done.stderr
        assert "6 of 6 requests complete" in done.stdout
        assert "6 within ttft:60000 tpot:60000" in done.stdout
        result = json.loads(file.read_text())
        (point,) = result["points"]
        figures = point["figures"]
        assert (figures["requests"], figures["complete"], figures["within goal"]) == (6, 6, 6)
        assert figures["output tokens/s"] * figures["seconds"] == pytest.approx(6 * 12)
        assert 0 < figures["itl P50 ms"] <= figures["itl P99 ms"] <= figures["e2e P99 ms"]
        assert figures["ttft P99 ms"] < figures["e2e P99 ms"]
        assert point["faults"] == {}
        assert result["server"]["url"] == tiny_server
        assert result["machine"]["cores"] > 0
        results.append(file)
    done = bench("compare", results[0], results[0])
    assert done.returncode == 0
    assert "(!)" not in done.stdout
    assert "50 requests/s, burstiness 2" in done.stdout
    assert_refused(bench("compare", *results), "no load is in both")


def test_sweep_draws(tiny_server: str, tmp_path: Path) -> None:
    loads, file, picture = (
        ("--concurrency", "1", "--concurrency", "4"),
        tmp_path / "s.json",
        tmp_path / "s.svg",
    )
    done = bench(
        *("sweep", "--url", tiny_server, *FEW, *loads),
        *("--json", file, "--plot", picture),
    )
    assert done.returncode == 0, done.stderr
    assert [point["load"]["concurrency"] for point in json.loads(file.read_text())["points"]] == [1, 4]
    assert "all at once, 4 under way" in done.stdout
    assert picture.read_text().startswith("<?xml")


def test_a_key_is_sent(tokenizer: Tokenizer) -> None:
    options = ServerOptions(keys=make_api_keys([("someone", "secret")]))
    with RunningServer(CopyEngine(tokenizer), options) as server:
        with pytest.raises(NotReadyError, match="HTTP 401"):
            find_server(Target(server.base_url), timeout_s=5)
        target = Target(server.base_url, headers={"Authorization": "Bearer secret"})
        assert find_server(target, timeout_s=5).model == "copy"
        measured = measure(target, "copy", Workload("w", (TracedRequest((5, 6, 7), 3),)), ServeLoad(), Goal())
    assert measured.latencies.num_requests == 1
    assert Fault.REFUSED not in measured.latencies.refused


@pytest.mark.parametrize("manner", list(Manner))
def test_a_crowd_leaves_nothing_behind(tiny_server: str, manner: Manner) -> None:
    """The few beside it get all of their answers, and afterwards nothing runs, waits or holds a block."""
    plan = Plan(clients=50, tokens=40, probes=4, at_once=2)
    found = measure_phase(Running(tiny_server, None, None), "tiny", plan, manner)
    assert found.measured.is_whole
    assert found.left_behind == {}
    assert found.name == manner.value


def test_throughput(tiny_checkpoint_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    limits = ("--max-num-seqs", "16", "--max-num-batched-tokens", "32", "--max-model-len", "1024")
    done = bench(
        *("throughput", "--model", tiny_checkpoint_dir, *FEW, *limits, "--repeats", "2"), "--json", file
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert result["spread"]["passes"] == 2
    assert result["figures"]["output tokens/s"] > 0
    assert bench("compare", file, file).returncode == 0


@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("refuse", Fault.REFUSED),
        ("short", Fault.WRONG_COUNT),
        ("error", Fault.ERROR_EVENT),
        ("cut", Fault.BROKEN),
    ],
)
def test_bad_answers_are_counted_and_are_never_good(mode: str, fault: Fault, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    with running(Peer(mode, command=(sys.executable, str(ODD_PEER), "{port}", mode))) as server:
        done = bench("serve", "--url", server.url, *FEW, "--json", file, "--ready-timeout", "60")
    assert done.returncode == 1, done.stderr
    assert f"6 of 6 answers: {fault.value}" in done.stdout
    (point,) = json.loads(file.read_text())["points"]
    assert point["figures"]["complete"] == point["figures"]["goodput requests/s"] == 0
    assert point["faults"][fault.value]["count"] == 6


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("serve", "--url", NOBODY, "--ready-timeout", "0.5"), "not ready after 0.5 s"),
        (("serve", "--url", "nonsense"), "'nonsense' is not the URL of a server"),
        (("serve", "--burstiness", "-1"), "burstiness"),
        (("serve", "--goodput", "ttft:-3"), "--goodput 'ttft:-3'"),
        (("serve", "--goodput", "ttft:1 ttft:2"), "each once"),
        (("serve", "--rate", "1", "--recorded", "1", "--workload", "x"), "contradict each other"),
        (("serve", "--recorded", "1"), "--recorded needs --workload"),
        (("serve", "--rate", "nan"), "--rate must be a finite number"),
        (("serve", "--rate", "-1"), "rate must be between"),
        (("serve", "--workload", "/nonexistent"), "/nonexistent"),
        (("serve", "--json", "/nonexistent/a.json"), "there is no such folder"),
        (("sweep",), "name several --rate, or several --concurrency"),
        (("compare", ODD_PEER, ODD_PEER), "can't be read as JSON"),
        ((), "Missing command"),
    ],
)
def test_refusals(arguments: tuple[str, ...], told: str) -> None:
    assert_refused(bench(*arguments), told)


# What the figures mean, by hand.


def answer(sent: float, chunks: tuple[float, ...], fault: Fault | None = None) -> Answer:
    return Answer(sent, chunks[-1] if chunks else sent + 1, chunks, len(chunks), "", fault, "why")


def test_figures_by_hand() -> None:
    answers = [
        answer(0, (1, 1.5, 2)),
        answer(1, (3, 4, 6)),
        answer(2, (3,), Fault.BROKEN),
        answer(2, (), Fault.REFUSED),
    ]
    workload = Workload("w", (TracedRequest((1,) * 10, 3),) * 4)
    figures = summarise(answers, workload, ServeLoad(), Goal(ttft=1500)).figures()
    assert figures["seconds"] == 6
    assert figures["output tokens/s"] == 7 / 6  # tokens of a broken answer did come
    assert figures["total tokens/s"] == (7 + 20) / 6  # prompts of whole ones
    assert figures["requests/s"] == 2 / 6
    assert figures["goodput requests/s"] == 1 / 6
    assert figures["ttft P50 ms"] == 1000  # of 1, 2 and 1 s
    assert figures["tpot P50 ms"] == 1000  # of 0.5 and 1.5 s
    assert figures["itl P50 ms"] == 750  # of 0.5, 0.5, 1 and 2 s
    assert figures["e2e P50 ms"] == 3500  # of 2 and 5 s


@given(
    limits=st.dictionaries(st.sampled_from(["ttft", "tpot", "e2e"]), st.integers(1, 10**6)),
    comma=st.booleans(),
)
def test_goals_are_read_as_they_are_written(limits: dict[str, int], comma: bool) -> None:
    text = (", " if comma else " ").join(f"{name}:{limit}" for name, limit in limits.items())
    goal = parse_goal([text])
    assert parse_goal([] if str(goal) == "none" else str(goal).split()) == goal == Goal(**limits)
    assert goal.met_by(answer(0, (1, 2), Fault.BROKEN)) is False
    met = {"ttft": 1000, "tpot": 1000, "e2e": 2000}
    assert goal.met_by(answer(0, (1, 2))) is all(met[name] <= limit for name, limit in limits.items())


def test_what_else_differs_is_told() -> None:
    first: dict[str, Any] = {
        "benchmark": "throughput",
        "machine": {"cores": 2},
        "commit": "a",
        "figures": {"x/s": 2.0},
    }
    second = {**first, "machine": {"cores": 4}, "commit": "b", "figures": {"x/s": 3.0, "only here": 1}}
    assert differences(first, second) == ["machine cores: 2 and 4", "commit: a and b"]
    text = compare(first, second)
    assert "1.500 better" in text
    assert "only here" not in text
    with pytest.raises(ConfigError, match="one is of throughput, the other of serve"):
        compare(first, {**second, "benchmark": "serve"})
