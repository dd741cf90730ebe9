"""`scripts/bench peers` against real servers, good and broken: what is reported (never how fast)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxserve.bench.__main__ import main
from jaxserve.bench.peers.answer import Fault
from jaxserve.bench.peers.compare import Load, Pass, compare, measure
from jaxserve.bench.peers.peer import Peer, choose_peers, parse_peer
from jaxserve.bench.peers.report import fault_lines, markdown, report, to_json
from jaxserve.errors import ConfigError
from jaxserve.workload.traced_request import TracedRequest, Workload

pytestmark = pytest.mark.usefixtures("quick_to_compile")

ODD_PEER = Path(__file__).with_name("odd_peer.py")
WORKLOAD = Workload("tiny", tuple(TracedRequest(tuple(range(10, 10 + size)), 12) for size in (3, 20, 7)))
LOAD = Load(idle_timeout_s=5.0, ready_timeout_s=30.0)


def odd_peer(mode: str, *arguments: str) -> Peer:
    return Peer(mode, command=(sys.executable, str(ODD_PEER), "{port}", mode, *arguments))


def kinds(one: Pass) -> set[Fault | None]:
    return {answer.fault for answer in one.answers}


def is_running(pid: int) -> bool:
    """Zombies have ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("refuse", Fault.REFUSED),
        ("short", Fault.WRONG_COUNT),
        ("no-usage", Fault.NO_USAGE),
        ("long-prompt", Fault.WRONG_PROMPT),
        ("error", Fault.ERROR_EVENT),
        ("cut", Fault.BROKEN),
    ],
)
def test_bad_answers_are_told_and_never_hidden(mode: str, fault: Fault) -> None:
    result = compare((odd_peer(mode),), WORKLOAD, LOAD)
    (one,) = result.results[0].passes
    assert kinds(one) == {fault}
    assert not one.is_whole
    assert any(fault.value in line and "3 of 3" in line for line in fault_lines(result))
    for text in (report(result), markdown(result)):
        assert f"{mode} (!)" in text
        assert fault.value in text
        assert "0 of 3" in text


def test_a_short_answer_counts_only_the_tokens_that_came() -> None:
    one = measure(odd_peer("short"), WORKLOAD, LOAD)
    assert [answer.output_tokens for answer in one.answers] == [9, 9, 9]
    assert "9 instead of 12" in one.answers[0].detail


def test_a_peer_that_falls_silent_is_given_up() -> None:
    one = measure(odd_peer("silent"), WORKLOAD, Load(idle_timeout_s=1.0, ready_timeout_s=30.0))
    assert kinds(one) == {Fault.TIMEOUT}
    assert [len(answer.chunks) for answer in one.answers] == [2, 2, 2]


def test_a_peer_that_dies_in_the_middle_is_told_with_its_last_words() -> None:
    one = measure(odd_peer("die"), WORKLOAD, LOAD)
    assert one.failure is not None
    assert "exit code 7" in one.failure
    assert "out of luck" in one.failure
    assert None not in kinds(one)


@pytest.mark.parametrize(
    ("peer", "told"),
    [
        (odd_peer("never-ready"), "not ready after 8 s (HTTP 503)"),  # its Python has to start meanwhile
        (odd_peer("no-model"), "names no model"),
        (Peer("ends", command=(sys.executable, "-c", "print('no {port} for me'); exit(3)")), "exit code 3"),
        (
            Peer("mute", command=(sys.executable, "-c", "import time; time.sleep(60)  # {port}")),
            "not ready after 1 s",
        ),
    ],
)
def test_a_peer_that_never_answers_spoils_nothing_for_the_others(peer: Peer, told: str) -> None:
    waits = re.search(r"after (\d+) s", told)
    load = Load(idle_timeout_s=5.0, ready_timeout_s=float(waits[1]) if waits else 30.0)
    bad = compare((peer,), WORKLOAD, load)
    (failed,) = bad.results[0].passes
    assert failed.failure is not None
    assert told in failed.failure
    assert told in report(bad)
    assert to_json(bad)["peers"][0]["passes"][0]["failure"] == failed.failure  # type: ignore[index]
    assert compare((odd_peer("good"),), WORKLOAD, LOAD).results[0].is_whole


def test_a_url_where_nobody_listens_is_a_failure_of_that_peer() -> None:
    load = Load(idle_timeout_s=5.0, ready_timeout_s=6.0)
    result = compare((Peer("nobody", url="http://127.0.0.1:9"), odd_peer("loading")), WORKLOAD, load)
    nobody, loading = result.results
    assert nobody.passes[0].failure is not None
    assert "not ready" in nobody.passes[0].failure
    assert loading.is_whole
    assert loading.time_to_ready is not None
    assert loading.time_to_ready >= 1.0  # it says 503 for a second
    assert loading.passes[0].identity is not None
    assert (loading.passes[0].identity.model, loading.passes[0].identity.version) == ("odd", "1.2.3")


def test_a_command_s_whole_group_has_ended_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxserve.bench.peers.process._TERM_GRACE_S", 0.5)
    started = tmp_path / "pid"
    assert measure(odd_peer("stubborn", str(started)), WORKLOAD, LOAD).is_whole
    assert not is_running(int(started.read_text()))


def test_peers_take_turns_and_only_one_is_alive() -> None:
    lines: list[str] = []
    result = compare((odd_peer("good"), odd_peer("joined")), WORKLOAD, LOAD, repeats=2, announce=lines.append)
    started = [line.rpartition(", ")[2] for line in lines if line.endswith(": starting")]
    assert started == ["good: starting", "joined: starting"] * 2
    good, joined = result.results
    assert good.is_whole
    assert joined.is_whole
    assert good.median(lambda figures: figures.tokens_per_chunk) == pytest.approx(1.0)
    assert joined.median(lambda figures: figures.tokens_per_chunk) == pytest.approx(2.0)
    assert "median of 2 passes" in report(result)
    assert "6 of 6" in report(result)


def test_an_open_loop_sends_at_its_times_whatever_comes_back() -> None:
    load = Load(rate=10.0, seed=3, idle_timeout_s=5.0, ready_timeout_s=30.0)
    for mode in ("good", "refuse"):
        one = measure(odd_peer(mode), WORKLOAD, load)
        sent = [answer.sent for answer in one.answers]
        assert sent == sorted(sent)
        assert len(set(sent)) == 3
    assert "Poisson arrivals, 10 a second, seed 3" in report(compare((odd_peer("good"),), WORKLOAD, load))


def test_our_own_server_in_two_configurations(tiny_checkpoint_dir: Path, tmp_path: Path) -> None:
    small = "--max-num-seqs 2 --max-num-batched-tokens 8 --max-model-len 64"
    workload = tmp_path / "three.json"
    workload.write_text(
        json.dumps(
            [
                {"prompt_token_ids": list(item.prompt_token_ids), "max_tokens": 12}
                for item in WORKLOAD.requests
            ]
        )
    )
    files = {name: tmp_path / name for name in ("r.json", "r.md", "r.png")}
    code = main(
        [
            *("peers", "--workload", str(workload), "--model", str(tiny_checkpoint_dir)),
            *("--peer", f"ours=jaxserve:{small}", "--peer", f"static=jaxserve:{small} --scheduler static"),
            *(
                "--json",
                str(files["r.json"]),
                "--markdown",
                str(files["r.md"]),
                "--plot",
                str(files["r.png"]),
            ),
        ]
    )
    assert code == 0
    result: dict[str, Any] = json.loads(files["r.json"].read_text())
    assert {"date", "commit", "versions", "machine", "workload", "load", "peers"} <= set(result)
    assert [peer["name"] for peer in result["peers"]] == ["ours", "static"]
    for peer in result["peers"]:
        (one,) = peer["passes"]
        assert one["figures"]["whole"] == 3
        assert one["time_to_ready"] > 0
        assert peer["server"].endswith(small + (" --scheduler static" if peer["name"] == "static" else ""))
    assert str(tmp_path.parent) not in files["r.json"].read_text()  # nothing of the machine's folders
    assert "| output throughput, tok/s |" in files["r.md"].read_text()
    assert files["r.png"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["vllm"], "must be NAME=URL"),
        (["=http://127.0.0.1:1"], "must be NAME=URL"),
        (["a=ftp://x"], "after '='"),
        (["a=cmd:server --port 8000"], "must say where {port} goes"),
        (["a=cmd:server '{port}"], "No closing quotation"),
        (["a=http://h:1", "a=http://h:2"], "two are called 'a'"),
        (["jaxserve=http://h:1"], "two are called 'jaxserve'"),
    ],
)
def test_a_peer_that_is_named_badly_is_one_line(
    texts: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        choose_peers(texts, model="m", with_own=True)
    workload = tmp_path / "w.json"
    workload.write_text(json.dumps([{"prompt_token_ids": [1], "max_tokens": 1}]))
    flags = [flag for text in texts for flag in ("--peer", text)]
    assert main(["peers", "--workload", str(workload), *flags]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)


def test_a_command_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        measure(Peer("gone", command=(str(tmp_path / "server"), "{port}")), WORKLOAD, LOAD)


def test_our_own_comes_first_unless_it_is_named_or_unwanted() -> None:
    other, own = "a=http://h:1/v1/", "b=jaxserve:--dtype bfloat16"
    names = lambda *texts, with_own=True: [  # noqa: E731
        peer.name for peer in choose_peers(texts, model="m", with_own=with_own)
    ]
    assert names(other) == ["jaxserve", "a"]
    assert names(other, own) == ["a", "b"]
    assert names(other, with_own=False) == ["a"]
    assert parse_peer(other, model="m").url == "http://h:1"
    command = parse_peer(own, model="m").command
    assert command is not None
    assert command[-2:] == ("--dtype", "bfloat16")
    assert (
        parse_peer("c=cmd:/opt/x/bin/vllm serve --port {port}", model="m").describe()
        == "vllm serve --port '{port}'"
    )
    with pytest.raises(ConfigError, match="nobody"):
        names(with_own=False)


def test_without_matplotlib_a_plot_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    workload = tmp_path / "w.json"
    workload.write_text(json.dumps([{"prompt_token_ids": [1], "max_tokens": 1}]))
    plot = str(tmp_path / "plot.png")
    assert main(["peers", "--workload", str(workload), "--peer", "a=http://h:1", "--plot", plot]) == 2
    assert "jaxserve[bench]" in capsys.readouterr().err


def test_ending_the_bench_ends_the_server_it_started(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    workload = tmp_path / "w.json"
    workload.write_text(json.dumps([{"prompt_token_ids": [1], "max_tokens": 12}]))
    script = (
        f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(300)  # {{port}}"
    )
    bench = subprocess.Popen(
        [
            *(sys.executable, "-m", "jaxserve.bench", "peers", "--workload", str(workload), "--without-own"),
            *("--peer", f'slow=cmd:{sys.executable} -c "{script}"'),
        ],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    deadline = time.monotonic() + 60
    while not (started.exists() and started.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    bench.terminate()
    assert bench.wait(60) == 128 + 15
    assert not is_running(int(started.read_text()))


@pytest.mark.parametrize("command", ["slow-clients", "soak", "pressure"])
def test_ending_a_bench_ends_our_own_server(command: str, tmp_path: Path) -> None:
    """Its server never gets ready: the model is one whose weights it can't read for ever, out of a pipe."""
    model = tmp_path / "model.gguf"
    os.mkfifo(model)
    bench = subprocess.Popen(
        [sys.executable, "-m", "jaxserve.bench", command, "--model", str(model)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    servers: list[int] = []
    deadline = time.monotonic() + 60
    while not servers and time.monotonic() < deadline:
        time.sleep(0.05)
        children = Path(f"/proc/{bench.pid}/task/{bench.pid}/children").read_text().split()
        servers = [int(pid) for pid in children]
    assert servers
    bench.terminate()
    assert bench.wait(60) == 128 + 15
    assert not any(map(is_running, servers))
